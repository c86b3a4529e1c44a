"""A value that names something is refused where there is nothing of that name: by every kind of run, in one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlhpc.cli import main
from rlhpc.runs.task_type import find_task_type

ROOT = Path(__file__).resolve().parents[3]
#: Text that may be anything: names that the user gives, files and folders, words for others (Slurm, transformers, columns).
FREE = (
    "runner.name", "runner.run_dir", "runner.resume_dir", "runner.init_from", "cluster.", "workflow.",
    "env.train.simulator_python",
    "env.eval.simulator_python", "actor.model.model_path", "critic.model.model_path", "teacher.model.model_path",
    # Names of vLLM's parsers, and which it has is known where it is imported: on the ranks, which refuse others.
    "agent.python", "agent.tool_parser", "agent.reasoning_parser",
    "reward.model.model_path", "judge.model.model_path", "judge.rubric", "judge.reply_start",
    "algorithm.demo_buffer.load_path", "algorithm.success_classifier.init_from",
    "algorithm.value_model", "env.train.reward_model",
    "actor.lora.path",
    "data.train.", "data.holdout.",
)  # fmt: skip
#: Keys of those sections that do name something, and which lists have words that do.
NAMED = {
    "reasoning": (
        "data.train.source=nonsense",
        "data.eval=[{source: nonsense}]",
        "reward.terms=[{name: nonsense}]",
        "groups=[{name: own, scorer: nonsense}]",
    ),
    "sft": ("data.train.source=nonsense", "data.eval=[{source: nonsense}]", "reward.terms=[{name: nonsense}]"),
    "reward_model": ("data.train.source=nonsense", "data.eval=[{source: nonsense}]"),
    "dpo": ("data.train.source=nonsense", "data.eval=[{source: nonsense}]", "reward.terms=[{name: nonsense}]"),
}
CONFIGS = {
    "embodied": {"defaults": [f"{ROOT}/configs/base/ppo.yaml"], "env": {"train": {"env_id": "CartPole-v1"}}},
    "off_policy": {"defaults": [f"{ROOT}/configs/base/sac.yaml"], "env": {"train": {"env_id": "Pendulum-v1"}}},
    "bc": {
        "cluster": {"component_placement": {"actor": 0}}, "runner": {"task_type": "bc"}, "demos": {"path": "demos.h5"},
        "env": {"train": {"env_id": "Pendulum-v1"}},
    },
    "reasoning": {
        "defaults": [f"{ROOT}/configs/base/grpo.yaml"], "actor": {"model": {"model_path": "builtin:tiny"}},
        "data": {"train": {"source": "arithmetic"}}, "reward": {"terms": [{"name": "math"}]},
    },
    "sft": {
        "defaults": [f"{ROOT}/configs/base/language.yaml"], "cluster": {"component_placement": {"actor": 0}},
        "runner": {"task_type": "sft"}, "actor": {"model": {"model_path": "builtin:tiny"}},
        "data": {"train": {"source": "arithmetic"}}, "reward": {"terms": [{"name": "math"}]},
    },
    "dpo": {
        "defaults": [f"{ROOT}/configs/base/dpo.yaml"], "actor": {"model": {"model_path": "builtin:tiny"}},
        "data": {"train": {"path": "pairs.jsonl"}}, "reward": {"terms": [{"name": "math"}]},
    },
    "reward_model": {
        "cluster": {"component_placement": {"actor": 0}}, "runner": {"task_type": "reward_model"},
        "actor": {"model": {"model_path": "builtin:tiny"}}, "data": {"train": {"path": "pairs.jsonl"}},
    },
}  # fmt: skip


def words(name: str) -> list[str]:
    """Overrides that name what there is not: every key of text that is not free."""
    schema = find_task_type(name).schema
    texts = [key for key in schema.keys if schema.type_of(key) in (str, str | None)]
    named = [f"{key}=nonsense" for key in texts if not key.startswith(FREE)]
    return [*named, *NAMED.get(name, ()), "runner.logger.logger_backends=[nonsense]", "workflow.eval_suites=[nonsense]"]


@pytest.mark.parametrize(("kind", "word"), [(kind, word) for kind in CONFIGS for word in words(kind)])
def test_it_is_refused(
    kind: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {**CONFIGS[kind], "runner": {"name": "run", **CONFIGS[kind].get("runner", {})}}
    Path("run.yaml").write_text(yaml.safe_dump(content))
    assert main(["plan", "run.yaml", word]) == 2, word
    line, pointer = capsys.readouterr().err.strip().splitlines()
    key = word.partition("=")[0].removesuffix("]")
    is_secret = key == "runner.alerts.webhook"  # whoever knows the URL can post
    assert line.startswith("rlhpc: error: ") and key in line and ("nonsense" in line) is not is_secret
    assert pointer.startswith("  what to do: rlhpc explain ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]
