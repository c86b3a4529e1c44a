"""Keys that a configuration does not read (`ConfigChecks.conditions`), set to other values all at once, change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc import load_config
from rlhpc.config.conditional_keys import defaults_of
from rlhpc.runs.conditional_keys import find_unused
from rlhpc.runs.task_type import TaskType, task_type_of
from rlhpc.runtime.errors import ConfigError
from tests.combinations.options import KINDS, Value
from tests.combinations.trial import compared, train
from tests.extras import need_extra

need_extra("llm", "embodied")
pytestmark = pytest.mark.long

#: Values for keys whose type and default do not say which others there are.
OTHERS: dict[str, Any] = {
    "algorithm.adv_type": "raw", "algorithm.kl_in": "reward", "algorithm.kl_type": "k2",
    "algorithm.normalize_advantages": "batch",
    "algorithm.credit": "turn", "algorithm.distillation.mode": "topk", "algorithm.clip_ratio_c": 3.0,
    "algorithm.reward_type": "action_level", "judge.mode": "compare",
    "algorithm.value_clip": 0.1, "algorithm.huber_delta": 0.3, "algorithm.early_stop_imp_ratio": 1.5,
    "actor.optim.value_lr": 0.01, "actor.optim.min_lr": 1e-8, "critic.optim.min_lr": 1e-8,
    "actor.model.model_path": "builtin:tiny", "actor.model.attn_implementation": "eager", "algorithm.tis_cap": 0.5,
    "algorithm.target_entropy": -3.0, "algorithm.alpha_lr": 0.1, "actor.model.dtype": "bfloat16",
}  # fmt: skip
#: Rows of `tests.combinations.options`: what is read differs between them.
BASES: dict[str, tuple[str, dict[str, Value]]] = {
    "grpo": ("language", {}),
    "cispo": ("language", {"loss": "cispo", "kl": "loss-k3", "rollouts": 2}),
    "distillation": ("language", {"advantage": "full"}),
    "ipo": ("preferences", {"loss": "ipo"}),
    "ppo": ("embodied", {}),
    "rloo": ("embodied", {"algorithm": "rloo", "auto_reset": False, "loss": "cispo"}),
    "sac": ("embodied", {"algorithm": "sac", "temperature": "fixed"}),
    "td3": ("embodied", {"algorithm": "td3"}),
    "crossq": ("embodied", {"algorithm": "crossq"}),
}


def other_value(kind: TaskType[Any], key: str, default: Any) -> str | None:
    """Returns another value of a key, as an override has it; None if none is known."""
    value = OTHERS.get(key)
    if value is None and isinstance(default, bool):
        value = not default
    elif value is None and isinstance(default, (int, float)):
        value = default + 1 if isinstance(default, int) else default * 0.5 + 0.1
    elif value is None and isinstance(default, str) and key in kind.checks.choices:
        value = next(word for word in kind.checks.choices[key] if word != default)
    if value is None or value == default:
        return None
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


@pytest.mark.parametrize("name", BASES)
def test_keys_that_are_not_read_change_nothing(name: str, tmp_path: Path) -> None:
    which, options = BASES[name]
    tiny = KINDS[which]
    row = {**tiny.default(), **options}
    path, words = tiny.write(row, tmp_path), tiny.overrides(row)
    kind = task_type_of(load_config(path, words))
    defaults = defaults_of(kind.schema.root, kind.schema.keys)
    vain, keys = list[str](), set[str]()
    for key, default in defaults.items():
        given = {word.partition("=")[0] for word in words}
        word = other_value(kind, key, default)
        if word is None or key in given or not any(row.matches(key) for row in kind.checks.conditions):
            continue
        try:
            load_config(path, [*words, *vain, word])
        except ConfigError:  # refused, which says as much
            continue
        if key in {one.key for one in find_unused(path, [*words, *vain, word])}:
            vain.append(word)
            keys.add(key)
    assert len(keys) > 8, keys
    runs = [
        train([str(path), *more], label, tmp_path, 280)
        for label, more in (("without", words), ("with", [*words, *vain]))
    ]
    assert [run.code for run in runs] == [0, 0], [run.said for run in runs]
    assert "no effect" in runs[1].said
    before, after = ([compared(row) for row in run.rows] for run in runs)
    assert before == after, f"of {sorted(keys)} one is read"
