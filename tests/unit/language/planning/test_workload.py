"""What `rlhpc tune` may vary in a run of a language model."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.language.planning.workload import TENSOR, rl_workload
from rlhpc.runs.configuration import load_config


@pytest.mark.parametrize(
    ("engine", "rollout", "tensor", "values"),
    [
        ("hf", "0-3", None, None),
        ("vllm", "0-3", None, (None, 2, 4)),
        ("vllm", "0-5", 1, (1, 2)),
        ("vllm", "0-7:0-3", None, (None, 2, 4, 8)),
    ],
)
def test_engines_of_several_ranks_are_tried(engine: str, rollout: str, tensor: int | None, values: Any) -> None:
    cfg = load_config(
        "configs/reasoning/demo.yaml",
        [
            "cluster.accelerators_per_node=8", f"cluster.component_placement={{actor: '0', rollout: '{rollout}'}}",
            f"rollout.rollout_backend={engine}", f"{TENSOR}={'null' if tensor is None else tensor}",
        ],
        check=False,
    )  # fmt: skip
    found = {knob.key: knob.values for knob in rl_workload(cfg, 0).knobs}
    assert found.get(TENSOR) == values
