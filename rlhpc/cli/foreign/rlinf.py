"""Translation of RLinf's configurations into rlhpc's.

The tables have one row for each key of rlhpc; further tables list RLinf's keys without a counterpart, with the reasons.
The meaning of RLinf's keys follows its code. If a key does less than its name suggests, the reason says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlhpc.cli.foreign import rlinf_defaults, rlinf_demonstrations, rlinf_language_kinds, rlinf_off_policy
from rlhpc.cli.foreign import rlinf_embodied as embodied
from rlhpc.cli.foreign.hydra import ComposedConfig
from rlhpc.cli.foreign.rlinf_agents import is_evaluation
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows, RunKind, Translation, UnsupportedKeys, apply_rules
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import short_repr


def translate(composed: ComposedConfig, source: str) -> Translation:
    """Translates a composed configuration.

    Raises:
        ConfigError: The file is not an RLinf configuration, it has no counterpart in rlhpc, or a value has a wrong type.
    """
    from rlhpc.runs.task_type import find_task_type

    leaves = composed.leaves
    kind = next((kind for kind in KINDS if kind.applies(leaves)), None)
    is_run = "runner.task_type" in leaves and any(key.startswith(_RUN_SECTIONS) for key in leaves)
    if kind is None and not is_run:
        raise ConfigError(
            f"{source}: this is not the configuration of an RLinf run: it has no runner.task_type with an algorithm, a "
            "rollout, an actor or a data section; give a file of its examples/embodiment/config or "
            "examples/reasoning/config itself, not a piece in their env/ or model/"
        )
    requirements = [*(kind.requirements if kind else ()), *embodied.REQUIREMENTS]
    for requirement in requirements:
        if missing := requirement.missing(leaves):
            raise ConfigError(f"{source}: {requirement.key} is {short_repr(leaves.get(requirement.key))}: {missing}")
    if kind is None:
        raise ConfigError(
            f"{source}: runner.task_type {leaves['runner.task_type']} with algorithm.loss_type "
            f"{leaves.get('algorithm.loss_type')} has no counterpart in rlhpc; imported are "
            f"{', '.join(kind.title({}) for kind in KINDS)}"
        )
    keys = find_task_type(kind.task_type).schema.keys
    rows = kind.rows_of(leaves, keys)
    replaced = {key for key, _ in rows if key}
    has_critic = kind.task_type == "reasoning" and rlinf_defaults.has_critic(leaves)
    unsupported = [*kind.unsupported_of(leaves, keys), *EVERYWHERE, *([] if has_critic else NO_CRITIC)]
    _check_references(composed, unsupported, source)
    try:
        translation = apply_rules(
            kind.title(leaves),
            {key: value for key, value in leaves.items() if key not in composed.unresolved},
            [*(row for row in RUN if row[0] not in replaced), *rows],
            unsupported,
            kind.defaults(leaves),
            keys,
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    translation.ours["runner.task_type"] = kind.task_type
    translation.training = not is_evaluation(leaves)
    translation.foreign = dict(leaves)
    for key, reason in composed.unresolved.items():
        translation.omitted[key] = (f"its reference cannot be followed: {reason}", False)
    return translation


def _check_references(composed: ComposedConfig, unsupported: Sequence[UnsupportedKeys], source: str) -> None:
    """Refuses a configuration in which a key that training depends on has no value.

    Raises:
        ConfigError: There is such a key.
    """
    for key, reason in composed.unresolved.items():
        entry = next((entry for entry in unsupported if entry.matches(key)), None)
        if entry is None or entry.harmless is not True:
            raise ConfigError(
                f"{source}: {key} is {short_repr(composed.leaves[key])}, which has no value ({reason}): give it one, or "
                "define what it refers to"
            )


#: Sections of which every run has one.
_RUN_SECTIONS = ("algorithm.", "rollout.", "actor.", "data.")


def _name(config: ForeignConfig) -> Any:
    name = config("runner.logger.experiment_name") or config("runner.experiment_name") or "imported"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(name)).strip("._-")[:100] or "imported"


def _loggers(config: ForeignConfig) -> Any:
    return ["jsonl", *config.texts("runner.logger.logger_backends")]


def _logger_options(config: ForeignConfig) -> Any:
    project = config("runner.logger.project_name")
    tracking_backends = [name for name in config.texts("runner.logger.logger_backends") if name in ("wandb", "swanlab")]
    return {name: {"project": str(project)} for name in tracking_backends} if project and tracking_backends else UNSET


def _steps(config: ForeignConfig) -> Any:
    steps, epochs = config.integer("runner.max_steps", -1), config.integer("runner.max_epochs", 1)
    if config.leaves["runner.task_type"] == "embodied":  # one step is an epoch of RLinf
        return epochs if steps < 0 else min(steps, epochs)
    if config.leaves["runner.task_type"] == "reasoning":
        reason = "it counts passes over the data, rlhpc counts steps: set runner.max_steps yourself"
        config.omit("runner.max_epochs", reason)
    return steps if steps >= 0 else UNSET


def _resume(config: ForeignConfig) -> Any:
    resume_dir = config("runner.resume_dir")
    if resume_dir in (None, "auto"):
        return resume_dir if resume_dir else UNSET
    return config.omit(
        "runner.resume_dir", "rlhpc does not read RLinf's checkpoints", missing_feature="RLinf's checkpoint"
    )


def _placement(config: ForeignConfig) -> Any:
    """Returns the placement of the components that the run has in rlhpc; records the reason for each omitted component."""
    components_of_run = {"actor", "rollout"}
    if config.leaves["runner.task_type"] in ("embodied", "offline"):
        components_of_run.add("env")
    elif rlinf_defaults.has_critic(config.leaves):
        components_of_run.add("critic")
    placement: dict[str, Any] = {}
    for names, ranks in config.section("cluster.component_placement").items():
        components, _, placement_key = names.partition(".")
        listed_names = [name.strip() for name in components.split(",")]
        for name in listed_names:
            if name not in components_of_run:
                known_reason = _OTHER_COMPONENTS.get(name)
                reason = known_reason or f"rlhpc has no component {name} in such a run"
                config.omit(f"cluster.component_placement.{names}", reason, known_reason is None)
        if component_names := ",".join(name for name in listed_names if name in components_of_run):
            if placement_key:
                placement.setdefault(component_names, {})[placement_key] = ranks
            else:
                placement[component_names] = ranks
    return placement or UNSET


_OTHER_COMPONENTS = {
    "reward": "rewards are judged by processes beside the rollout (reward.processes)",
    "inference": "the actor computes these log-probs itself",
}


def _accelerators(config: ForeignConfig) -> Any:
    """Returns the number of accelerators of a node, from the highest rank in the placement."""
    placement = config.section("cluster.component_placement")
    ranges = ",".join(str(ranks) for key, ranks in placement.items() if not key.endswith(".node_group")).split(",")
    ranks = [int(n) for rank_range in ranges for n in re.findall(r"\d+", rank_range.partition(":")[0])]
    return math.ceil((max(ranks) + 1) / max(1, config.integer("cluster.num_nodes", 1))) if ranks else UNSET


_NODE_GROUPS = "cluster.node_groups"


def _node_groups(config: ForeignConfig) -> Any:
    """Returns the labelled nodes. RLinf counts the robots of a group with `hardware`; with one on each node, these are the
    group's nodes, which rlhpc counts in a group without accelerators.
    """
    groups = config(_NODE_GROUPS)
    if not groups:
        return UNSET
    translated_groups, notes = [], []
    for group in groups:
        translated_group = {name: group[name] for name in ("label", "node_ranks") if group.get(name) is not None}
        environments = group.get("env_configs") or []
        variables = [dict(item) for each in environments for item in each.get("env_vars") or []]
        pythons = {each.get("python_interpreter_path") for each in environments} - {None}
        if len(environments) > 1 and (variables or len(pythons) > 1):
            notes.append(f"{group['label']}: all nodes of a group have the same variables and Python here")
        if variables:
            translated_group["env_vars"] = {
                name: str(value) for variable in variables for name, value in variable.items()
            }
        if pythons:
            translated_group["python_interpreter"] = sorted(pythons)[0]
        if robots := (group.get("hardware") or {}).get("configs"):
            translated_group["accelerator_kind"] = "cpu"
            notes.append(
                f"{group['label']}: a robot's address is an option of its class here (docs/how-to/real-robot.md)"
                + (", and several robots of a node are not counted" if _has_shared_nodes(robots) else "")
            )
        if group.get("ignore_hardware"):
            translated_group["accelerator_kind"] = "cpu"
        if unknown := set(group) - {"label", "node_ranks", "env_configs", "hardware", "ignore_hardware"}:
            notes.append(f"{group['label']}: the importer does not know {', '.join(sorted(unknown))}")
        translated_groups.append(translated_group)
    if notes:
        config.omit(_NODE_GROUPS, "; ".join(notes))
    return translated_groups


def _has_shared_nodes(robots: list[Any]) -> bool:
    nodes = [robot.get("node_rank") for robot in robots]
    return len(set(nodes)) < len(nodes)


RUN: Rows = [
    ("runner.task_type", lambda config: config.text("runner.task_type")),
    ("runner.name", _name),
    ("runner.seed", "actor.seed"),
    ("runner.max_steps", _steps),
    ("runner.save_interval", "runner.save_interval"),
    ("runner.resume_dir", _resume),
    ("runner.logger.logger_backends", _loggers),
    ("runner.logger.kwargs", _logger_options),
    ("cluster.num_nodes", "cluster.num_nodes"),
    ("cluster.accelerators_per_node", _accelerators),
    ("cluster.node_groups", _node_groups),
    ("cluster.component_placement", _placement),
    ("algorithm.gamma", "algorithm.gamma"),
]


#: Unsupported keys of every run.
EVERYWHERE = [
    UnsupportedKeys("hydra.*", "Hydra's own", True, any_name=True),
    UnsupportedKeys("*.group_name", "groups have their components' names", True, any_name=True),
    UnsupportedKeys(
        "runner.logger.log_path runner.output_dir runner.{per_worker_log,per_worker_log_path} "
        "runner.logger.project_name runner.experiment_name",
        "all files of a run lie in runner.run_dir/runner.name",
        True,
    ),
    UnsupportedKeys("runner.logger.wandb_entity", "wandb reads the variable WANDB_ENTITY", True),
    UnsupportedKeys("runner.only_eval", "rlhpc eval evaluates a checkpoint", (False,)),
    UnsupportedKeys(
        "runner.ckpt_path runner.eval_policy_path runner.expert_ckpt_path",
        "rlhpc does not read RLinf's checkpoints (runner.init_from takes rlhpc's)",
        (None, ""),
        "RLinf's checkpoint",
    ),
    UnsupportedKeys("runner.resume_dir", "rlhpc does not read RLinf's checkpoints", (None,), "RLinf's checkpoint"),
    UnsupportedKeys(
        "runner.use_training_pipeline",
        "set it yourself, with minibatches that fit (docs/how-to/simulators.md)",
        (False,),
    ),
    UnsupportedKeys("runner.local_update_steps runner.log_interval", "the runner is another one"),
    UnsupportedKeys("runner.seq_length runner.max_prompt_length", "for sequences of language models", True),
    UnsupportedKeys("cluster.*", "Ray's or RLinf's scheduler; Slurm is the process manager here"),
    UnsupportedKeys(
        "weight_syncer.bucket.bucket_dtype", "weights travel in their own precision", (None,), r"sync_dtype"
    ),
    UnsupportedKeys(
        "weight_syncer.{type,use_ring_sync,nccl_max_ctas,nccl_min_ctas,snapshot_device,transport_device} "
        "weight_syncer.bucket.{bucket_size,bucket_device,is_agent,load_instant} "
        "weight_syncer.patch.{compression,compression_algorithm,delta_encoding,snapshot_device,transport_device} "
        "weight_syncer.patch.init_sync.{enabled,prefixes,bucket_size}",
        "weights travel as rollout.weight_sync and weight_delta say; only speed",
        True,
    ),
    UnsupportedKeys(
        "profile.* profiler.* tracer.*",
        "not a part of the configuration: see time/ in a run's metrics",
        True,
        any_name=True,
    ),
    UnsupportedKeys("router_server_args.* reward.*", "of RLinf's servers and workers of rewards"),
]


#: Unsupported keys of runs without a critic model.
NO_CRITIC = [UnsupportedKeys("critic.*", "RLinf reads it with use_critic_model", True, any_name=True)]


#: Kinds of RLinf's runs; the first one that applies translates the file.
KINDS: Sequence[RunKind] = (
    *embodied.KINDS,
    *rlinf_off_policy.KINDS,
    *rlinf_demonstrations.KINDS,
    *rlinf_language_kinds.KINDS,
)
