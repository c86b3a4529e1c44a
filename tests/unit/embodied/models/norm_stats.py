"""Statistics of a dataset for normalization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.embodied.models import build_model
from tests.extras import need_extra

need_extra("llm")

from tests.unit.embodied.models.test_action_tokens import ACTION, SPACE, section

STATE = {"mean": [0.1, 0.2, 0.3, 0.4, 0.5], "std": [1.0, 2.0, 0.5, 1.0, 3.0], "q01": [-1.0] * 5, "q99": [3.0] * 5}
ACTIONS = {"mean": [5.0, -4.0, 0.0], "std": [0.5, 2.0, 1.0], "q01": [-1.0, 0.0, 2.0], "q99": [1.0, 4.0, 2.5]}
FILE = {"norm_stats": {"state": STATE, "actions": ACTIONS}}


def pi0(tmp_path: Path, **kwargs: Any) -> Any:
    file = tmp_path / "norm_stats.json"
    file.write_text(json.dumps(FILE))
    return build_model(section("pi0", kwargs={"statistics": str(file), **kwargs}), SPACE, ACTION, seed=1).eval()
