"""A kind of run has its own keys; one of another kind is refused, and the message says whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc import load_config
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.task_type import Kind, TaskType, all_task_types, find_task_type, task_type_of, task_type_of_run
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from tests.drawn import drawn
from tests.extras import need_extra

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EMBODIED, LANGUAGE = CONFIGS / "quickstart.yaml", CONFIGS / "reasoning" / "gsm8k.yaml"
FOREIGN = {
    EMBODIED: [
        "actor.share_prefixes=false", "algorithm.kl_coef=0.1", "algorithm.kl_type=k1",
        "algorithm.group_size=4", "algorithm.recompute_logprobs=true",
        "algorithm.filter_groups=true", "algorithm.overlong_buffer=3", "algorithm.tau=0.1", "algorithm.bc_loss=mse",
        "rollout.temperature=0.5", "rollout.max_new_tokens=3", "rollout.rollout_backend=vllm", "rollout.agent=tool",
        "actor.max_tokens_per_micro_batch=5",
        "data.prompts_per_step=3", "reward.timeout_s=1", "demos.path=x.h5", "workflow.sft=x.yaml",
    ],
    LANGUAGE: [
        "runner.stop_return=1", "runner.init_from=x", "algorithm.target_kl=0.1",
        "algorithm.logprob_type=nonsense", "algorithm.reward_type=chunk_level",
        "algorithm.rollout_steps=5", "actor.micro_batch_size=3",
        "rollout.pipeline_stage_num=2", "actor.model.model_type=nonsense", "actor.model.hidden_sizes=[3]",
        "env.train.num_envs=3", "demos.limit=1", "workflow.record_episodes=3",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("config", "word"), [(config, word) for config, words in FOREIGN.items() for word in words])
def test_a_key_of_another_kind_is_refused(config: Path, word: str) -> None:
    key, own = word.partition("=")[0], "embodied" if config is EMBODIED else "reasoning"
    with pytest.raises(ConfigError) as refused:
        load_config(config, [word], training=False)
    said = str(refused.value)
    owners = [kind.name for kind in all_task_types() if key in kind.schema]
    assert owners and own not in owners
    assert said.startswith(f"override {word!r}: ") and f"that this one ({own}) is not: " in said
    assert said.split("is not: ")[1].split(";")[0].split(", ")[0] in owners


def _misspellings(name: str) -> list[str]:
    """Returns a name without its middle letter, with two of its letters exchanged, and with its last letter twice."""
    middle = len(name) // 2
    exchanged = f"{name[: middle - 1]}{name[middle]}{name[middle - 1]}{name[middle + 1 :]}"
    return [f"{name[:middle]}{name[middle + 1 :]}", exchanged, f"{name}{name[-1]}"]


def _misspelt_keys() -> dict[str, str]:
    """Returns misspelt key → key, of all task types."""
    schemas = [kind.schema for kind in all_task_types()]
    keys = {key for schema in schemas for key in schema.keys if len(key.rpartition(".")[2]) > 2}
    return {
        misspelt: key
        for key in sorted(keys)
        for name in _misspellings(key.rpartition(".")[2])
        if not any((misspelt := f"{key.removesuffix(key.rpartition('.')[2])}{name}") in schema for schema in schemas)
    }


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_a_misspelt_key_has_the_hint_at_the_key_or_at_the_task_types_that_have_it(kind: TaskType[Any]) -> None:
    """A hint at the nearest key of this task type alone would name another key than the one that was meant."""
    misspelt_keys = _misspelt_keys()
    for misspelt in drawn(f"misspelt keys of {kind.name}", misspelt_keys, least=100):
        key = misspelt_keys[misspelt]
        with pytest.raises(ConfigError) as refused:
            ConfigLayers(kind.schema, kind.keys).set(misspelt, 1, "run.yaml")
        message = str(refused.value)
        if key in kind.schema:
            assert f"did you mean {key}? allowed here: " in message
            continue
        parts = key.split(".")
        missing = next(path for n in range(len(parts)) if (path := ".".join(parts[: n + 1])) not in kind.schema)
        hint = f"did you mean {key}? it is for " if missing == key else f"run.yaml: {missing} is for "
        assert hint in message and f"that this one ({kind.name}) is not: " in message and "leave it out" in message


def test_an_unknown_key_is_not_somebody_elses() -> None:
    with pytest.raises(ConfigError, match=r"unknown key algorithm.klcoef; did you mean algorithm.\w+\?"):
        load_config(LANGUAGE, ["algorithm.klcoef=1"])


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_all_that_a_kind_names_is_there(kind) -> None:  # type: ignore[no-untyped-def]
    """Workers, runner and what is imported beforehand."""
    import importlib

    if kind.runner.startswith("rlhpc.language."):
        need_extra("llm")
    for name in (*kind.groups.worker_classes.values(), kind.runner):
        module, _, attribute = name.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    for name in kind.groups.preload:
        importlib.import_module(name)
    assert find_task_type(kind.name.upper()) is kind


def test_kinds_are_found(tmp_path: Path) -> None:
    assert task_type_of(load_config(EMBODIED, training=False)).name == "embodied"
    assert task_type_of_run(RunPaths(tmp_path)).name == "embodied"  # nothing there
    (tmp_path / "config.yaml").write_text("runner: {task_type: sft}\n")
    assert task_type_of_run(RunPaths(tmp_path)).name == "sft"
    (tmp_path / "config.yaml").write_text("runner: {task_type: 'os:environ'}\n")
    assert task_type_of_run(RunPaths(tmp_path)).name == "embodied"  # nothing is imported


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("embodyd", r"did you mean 'embodied'\? allowed: embodied, off_policy, bc, reasoning, sft"),
        ("no_such_module:KIND", "which cannot be imported"),
        ("os:environ", "which is a _Environ and no TaskType"),
        ("3", "runner.task_type is .3.; allowed: embodied"),
        ("[3]", "it must be the name of a task type"),
    ],
)
def test_what_is_no_kind_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(EMBODIED, [f"runner.task_type={word}"])


class FormerKind(Kind[RunConfig]):
    """A task type of another package, in the former form."""

    def elastic_of(self, cfg: RunConfig) -> dict[str, int]:
        return {"player": 2}

    def together_of(self, cfg: RunConfig) -> dict[str, int]:
        return {"player": 2}

    def patience_of(self, cfg: RunConfig) -> dict[str, float]:
        return {"player": 30.0}

    def why_fixed(self, cfg: RunConfig) -> str:
        return "no reason"


def test_the_methods_of_a_former_kind_are_policies() -> None:
    former = FormerKind(
        "former", RunConfig, {}, "", expendable=frozenset({"player", "judge"}), independent=frozenset({"judge"})
    )
    with pytest.warns(FutureWarning, match="the task type 'former' is a Kind, which works for two releases"):
        task_type = former.task_type
    assert task_type.name == "former" and task_type.schema.keys == former.schema.keys
    policies = task_type.groups.policies(RunConfig(), max_recoveries=3)
    assert policies == SessionPolicies(
        {
            "player": GroupPolicy(restartable=True, min_ranks=2, replica_size=2, lease_s=30.0),
            "judge": GroupPolicy(restartable=True, independent_ranks=True),
        },
        3,
        "no reason",
    )
