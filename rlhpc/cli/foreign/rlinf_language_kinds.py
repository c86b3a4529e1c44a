"""Kinds of RLinf's runs of language models, with the tables of their loop and placement, and of supervised runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rlhpc.cli.foreign.rlinf_agents import AGENT_ROWS, EVALUATION, JUDGE_ROWS, agent_name, has_judge, is_evaluation
from rlhpc.cli.foreign.rlinf_defaults import has_critic, language_defaults
from rlhpc.cli.foreign.rlinf_embodied import adapter_rows
from rlhpc.cli.foreign.rlinf_language import CRITIC, ROWS, mesh_size, trained_group_rows
from rlhpc.cli.foreign.rlinf_language_unsupported import (
    AGENT_KEYS,
    CRITIC_KEYS,
    EVALUATION_KEYS,
    LANGUAGE_KEYS,
    SUPERVISED_KEYS,
)
from rlhpc.cli.foreign.rlinf_problems import PROBLEMS, eval_suites, suite_names
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows, Rule, RunKind, UnsupportedKeys, allow_only

#: Beginnings of the names of RLinf's language models (config.py, SupportedModel).
_LANGUAGE_MODELS = ("qwen", "deepseek")


def _is_supervised(leaves: Mapping[str, Any]) -> bool:
    model = str(leaves.get("actor.model.model_type")).lower()
    return leaves.get("runner.task_type") == "sft" and model.startswith(_LANGUAGE_MODELS)


def _is_training(leaves: Mapping[str, Any]) -> bool:
    return leaves.get("runner.task_type") in ("reasoning", "coding_online_rl") and not is_evaluation(leaves)


def _training_rows(leaves: Mapping[str, Any]) -> Rows:
    rows = [*_run_rows("reasoning"), *ROWS, *(CRITIC if has_critic(leaves) else ())]
    return [*rows, *(AGENT_ROWS if agent_name(leaves) else ()), *(JUDGE_ROWS if has_judge(leaves) else ())]


def _training_keys(leaves: Mapping[str, Any]) -> Sequence[UnsupportedKeys]:
    agent, critic = agent_name(leaves) is not None, has_critic(leaves)
    return [*(AGENT_KEYS if agent else ()), *(CRITIC_KEYS if critic else ()), *LANGUAGE_KEYS]


def _evaluation_rows(leaves: Mapping[str, Any]) -> Rows:
    return [*_run_rows("reasoning"), *EVALUATION, *(AGENT_ROWS if agent_name(leaves) else ())]


#: Kinds of runs of language models.
KINDS: Sequence[RunKind] = (
    RunKind(
        lambda leaves: "sft (language model)",
        "sft",
        _is_supervised,
        lambda leaves: [*_run_rows("sft"), *_SUPERVISED],
        lambda leaves: SUPERVISED_KEYS,
        lambda leaves: language_defaults(leaves) | _SUPERVISED_DEFAULTS,
    ),
    RunKind(
        lambda leaves: "reasoning, for rlhpc eval --model '' --config FILE",
        "reasoning",
        is_evaluation,
        _evaluation_rows,
        lambda leaves: [*EVALUATION_KEYS, *AGENT_KEYS, *LANGUAGE_KEYS],
        language_defaults,
    ),
    RunKind(
        lambda leaves: f"reasoning ({leaves.get('algorithm.adv_type', 'language models')})",
        "reasoning",
        _is_training,
        _training_rows,
        _training_keys,
        language_defaults,
        (allow_only("algorithm.loss_type", ("actor",), "RLinf's actors of language models learn by no other loss"),),
    ),
)


# -- the loop -----------------------------------------------------------------------------------------------------------


def _steps(config: ForeignConfig) -> Any:
    """Returns the steps of the run: RLinf's number, or the steps of its passes over the data, or `MISSING` without the
    data.
    """
    steps, epochs = config.integer("runner.max_steps", -1), config.integer("runner.max_epochs", -1)
    batch = _prompts(config)
    rows = sum(map(_num_rows, config.texts("data.train_data_paths")))
    if epochs > 0 and rows >= batch:
        return min(epochs * (rows // batch), steps) if steps >= 0 else epochs * (rows // batch)
    if epochs > 0 and steps < 0:
        config.omit(
            "runner.max_epochs",
            "it counts passes over the data, which are not on this machine: set runner.max_steps to the passes times the "
            "problems, divided by data.prompts_per_step",
        )
        return MISSING
    elif epochs > 0:
        config.omit("runner.max_epochs", "runner.max_steps ends the run first, unless the data are few", False)
    return steps if steps >= 0 else UNSET


def _prompts(config: ForeignConfig) -> int:
    """Returns the prompts of a step."""
    return config.peek("data.rollout_batch_size") or config.peek("actor.global_batch_size") or 1


def _num_rows(path: Any) -> int:
    """Returns the number of problems in a file of JSON lines or Parquet on this machine; 0 for any other path."""
    file = Path(str(path))
    if not file.is_file():
        return 0
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(file).num_rows)
    return 0


# -- the placement ------------------------------------------------------------------------------------------------------


def _components(config: ForeignConfig, task_type: str) -> dict[str, str]:
    """Returns the groups that the run has, by the names that RLinf has for them."""
    leaves = config.leaves
    if task_type != "reasoning":
        return {"actor": "actor"}
    components = {"actor": "actor", "rollout": "rollout"}
    if has_critic(leaves):
        components["critic"] = "critic"
    if leaves.get("algorithm.kl_beta") or leaves.get("algorithm.reinpp_kl_beta"):
        components["inference"] = "reference"
    if has_judge(leaves):
        components["reward"] = "judge"
    return components


_OTHER_COMPONENTS = {
    "reward": "rewards are judged by processes beside the rollout (reward.processes)",
    "inference": "the actor computes these log-probs itself",
    "rollout_judge": "an agent's judge is a server of its own: start it as one of agent.services",
}


def _placement(task_type: str) -> Rule:
    def rule(config: ForeignConfig) -> Any:
        """Returns the placement of the groups that the run has; records the reason for each other component."""
        components, placement = _components(config, task_type), dict[str, Any]()
        for names, ranks in config.section("cluster.component_placement").items():
            listed, _, placement_key = names.partition(".")
            groups = []
            for name in (name.strip() for name in listed.split(",")):
                if name in components:
                    groups.append(components[name])
                else:
                    reason = _OTHER_COMPONENTS.get(name, f"rlhpc has no component {name} in such a run")
                    config.omit(f"cluster.component_placement.{names}", reason, name not in ("reward", "inference"))
            for group in groups:  # RLinf uses the last placement of a component
                if placement_key:
                    earlier = placement.get(group)
                    placement[group] = {**(earlier if isinstance(earlier, dict) else {}), placement_key: ranks}
                else:
                    placement[group] = _even_ranks(config, group, names, ranks)
        if is_evaluation(config.leaves) and "rollout" in placement:
            placement.setdefault("actor", placement["rollout"])  # an evaluation's model is in the actor's section
        return _merge_colocated(placement) or UNSET

    return rule


def _even_ranks(config: ForeignConfig, group: str, names: str, ranks: Any) -> Any:
    """Returns the ranks of a trained group: the first ones, so many that they divide the prompts of a step.

    RLinf divides the responses of a step over its actors, and rlhpc the prompts.
    """
    bounds = str(ranks).split("-")
    if group not in ("actor", "critic") or not all(bound.isdigit() for bound in bounds) or len(bounds) > 2:
        return ranks
    first, last = int(bounds[0]), int(bounds[-1])
    block = math.prod(mesh_size(config, group, f"{name}_parallel_size") for name in ("tensor_model", "context"))
    prompts = _prompts(config)
    blocks = (last - first + 1) // block
    even = max((count for count in range(1, blocks + 1) if prompts % count == 0), default=blocks)
    if even == blocks:
        return ranks
    config.omit(
        f"cluster.component_placement.{names}",
        f"{even * block} of the {last - first + 1} ranks of {group} are written: rlhpc divides prompts over them, and "
        f"{prompts} prompts are not divisible by {blocks}; only speed",
        False,
    )
    return f"{first}-{first + even * block - 1}" if even * block > 1 else first


def _merge_colocated(placement: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the placement with one entry for all groups on the same accelerators."""
    joined: dict[str, Any] = {}
    for group, place in placement.items():
        names = next((names for names, other in joined.items() if other == place), None)
        joined[f"{names},{group}" if names else group] = joined.pop(names) if names else place
    return joined


def _run_rows(task_type: str) -> Rows:
    """Returns the rows of the loop and the placement, which differ from those of other kinds."""
    return [
        ("runner.task_type", lambda config: task_type if config("runner.task_type") else UNSET),
        ("runner.max_steps", _steps),
        ("cluster.component_placement", _placement(task_type)),
        ("algorithm.gamma", lambda config: UNSET),
    ]


# -- supervised runs ----------------------------------------------------------------------------------------------------

#: Defaults of RLinf for keys that a supervised configuration omits.
_SUPERVISED_DEFAULTS: dict[str, Any] = {
    "runner.val_check_interval": -1,  # config.py, validate_sft_cfg
    "actor.fsdp_config.sharding_strategy": "full_shard",  # config.py, validate_fsdp_cfg
}


def _held_out_key(config: ForeignConfig) -> str:
    """Returns the key of the validation files, whose name depends on the trainer (workers/sft)."""
    used, unused = ("eval", "val") if config.leaves.get("actor.training_backend") == "megatron" else ("val", "eval")
    config.omit(f"data.{unused}_data_paths", f"RLinf's trainer reads data.{used}_data_paths", False)
    return f"data.{used}_data_paths"


def _held_out_path(config: ForeignConfig) -> Any:
    paths = config(_held_out_key(config))
    paths = [paths] if isinstance(paths, str) else list(paths or ())
    return str(paths[0]) if paths else UNSET


def _validation_interval(config: ForeignConfig) -> Any:
    """Returns the steps between held-out losses. RLinf generates answers instead; the workflow does so for each checkpoint."""
    return UNSET if _held_out_path(config) is UNSET else config.integer("runner.val_check_interval")


def _response_key(config: ForeignConfig) -> Any:
    if config.leaves.get("data.choice_key") is not None:
        config.omit(
            "data.answer_key", "the column is the response as it is; RLinf writes letter and text of the choice"
        )
    return config("data.answer_key", UNSET)


def _average(config: ForeignConfig) -> Any:
    """Explains the average of the loss over a step's tokens."""
    config.omit(
        "actor.micro_batch_size",
        "RLinf averages the micro-batches, whatever their numbers of tokens; rlhpc averages over the step's tokens",
    )
    return UNSET


def _exact_match(config: ForeignConfig) -> Any:
    """Returns the reward of the suites: RLinf compares texts without case and space (workers/sft/fsdp_vlm_sft_worker.py)."""
    return UNSET if _held_out_path(config) is UNSET else [{"name": "exact", "kwargs": {"ignore_case": True}}]


_SUPERVISED: Rows = [
    ("", _average),
    ("runner.val_check_interval", _validation_interval),
    *[row for row in PROBLEMS if row[0].startswith(("data.train", "data.max_prompt"))],
    ("data.overlong_prompts", lambda config: "error"),
    ("data.train.response_key", _response_key),
    ("data.prompts_per_step", "actor.global_batch_size"),
    ("data.holdout.path", _held_out_path),
    ("data.eval", lambda config: eval_suites(config, _held_out_key(config))),
    ("workflow.eval_suites", lambda config: suite_names(config, _held_out_key(config))),
    ("reward.terms", _exact_match),
    ("actor.model.model_path", "actor.model.model_path"),
    *adapter_rows(),
    *trained_group_rows("actor"),
]
