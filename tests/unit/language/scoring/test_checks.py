"""Checks of scoring groups: second judges and engines' keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.scoring.groups import scoring_groups
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.scoring.judges import judge_model, second  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (
            {"rubic": "{response}"},
            "groups[second].kwargs: a judge has no key 'rubic'; did you mean 'rubric'? allowed: cache_size, ",
        ),
        ({"model": {}}, "a judge's model stands in groups[second].model"),
        ({"max_requests": 0}, "groups[second].kwargs.max_requests is 0; it must be greater than 0"),
        ({"mode": "garde"}, "groups[second].kwargs.mode: did you mean 'grade'? allowed: grade, compare"),
    ],
)
def test_a_second_judges_mistakes(kwargs: dict[str, Any], said: str, model: Path) -> None:
    from rlhpc.language.scoring.checks import section_of

    cfg = second(model, **kwargs)
    with pytest.raises(ConfigError) as refused:
        section_of(cfg, scoring_groups(cfg)["second"])
    assert said in str(refused.value)
