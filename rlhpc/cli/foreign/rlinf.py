"""Translation of RLinf's configurations of embodied PPO, GRPO and SAC, and of language models, into rlhpc's.

The tables have one row for each key of rlhpc; `rlinf_unsupported` lists RLinf's keys without a counterpart, with the reasons.
The meaning of RLinf's keys follows its code. If a key does less than its name suggests, the reason says so.
"""

from __future__ import annotations

import math
import re
from typing import Any

from rlhpc.cli.foreign import rlinf_defaults, rlinf_language
from rlhpc.cli.foreign import rlinf_embodied as embodied
from rlhpc.cli.foreign.hydra import ComposedConfig
from rlhpc.cli.foreign.rlinf_embodied import LOSSES
from rlhpc.cli.foreign.rlinf_unsupported import CRITIC, EMBODIED, EVERYWHERE, LANGUAGE
from rlhpc.cli.foreign.rules import UNSET, Reading, Rows, Translation, apply_rules
from rlhpc.runtime.errors import ConfigError


def translate(composed: ComposedConfig, source: str) -> Translation:
    """Translates a composed configuration.

    Raises:
        ConfigError: The file is not an RLinf configuration, or its task type has no counterpart in rlhpc.
    """
    leaves = composed.leaves
    task, loss = str(leaves.get("runner.task_type")), str(leaves.get("algorithm.loss_type"))
    if "runner.task_type" not in leaves or not any(key.startswith(("algorithm.", "rollout.")) for key in leaves):
        raise ConfigError(
            f"{source}: this is not the configuration of an RLinf run: it has no runner.task_type with an algorithm and a "
            "rollout section; give a file of its examples/embodiment/config or examples/reasoning/config itself, not a piece "
            "in their env/ or model/"
        )
    resolved_leaves = {key: value for key, value in leaves.items() if key not in composed.unresolved}
    estimator = leaves.get("algorithm.adv_type")
    if task == "embodied" and loss in LOSSES:
        translation = apply_rules(
            f"embodied ({estimator}, {loss})",
            resolved_leaves,
            [*RUN, *embodied.ENVIRONMENTS, *embodied.PPO, *embodied.POLICY, *embodied.VLA],
            [*EMBODIED, *EVERYWHERE],
            rlinf_defaults.EMBODIED,
        )
    elif task == "embodied" and loss == "embodied_sac":
        translation = apply_rules(
            "off_policy (SAC)",
            resolved_leaves,
            [*RUN, *embodied.ENVIRONMENTS, *embodied.SAC, *embodied.POLICY],
            [*EMBODIED, *EVERYWHERE],
            rlinf_defaults.SAC,
        )
    elif task == "reasoning":
        critic = rlinf_defaults.has_critic(leaves)
        translation = apply_rules(
            f"reasoning ({estimator})",
            resolved_leaves,
            [*RUN, *rlinf_language.ROWS, *(rlinf_language.CRITIC if critic else ())],
            [*LANGUAGE, *(CRITIC if critic else ()), *EVERYWHERE],
            rlinf_defaults.language_defaults(leaves),
        )
    else:
        raise ConfigError(
            f"{source}: runner.task_type {task} with algorithm.loss_type {loss} has no counterpart in rlhpc; imported are "
            f"task_type embodied with loss_type {', '.join(LOSSES)} or embodied_sac, and task_type reasoning"
        )
    translation.foreign = dict(leaves)
    translation.omitted |= {
        key: (f"its reference cannot be followed: {reason}", True) for key, reason in composed.unresolved.items()
    }
    return translation


def _name(read: Reading) -> Any:
    name = read("runner.logger.experiment_name") or read("runner.experiment_name") or "imported"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(name)).strip("._-")[:100] or "imported"


def _loggers(read: Reading) -> Any:
    backend_names = read("runner.logger.logger_backends", [])
    return ["jsonl", *(str(name) for name in ([backend_names] if isinstance(backend_names, str) else backend_names))]


def _logger_options(read: Reading) -> Any:
    project = read("runner.logger.project_name")
    tracking_backends = [n for n in read.leaves.get("runner.logger.logger_backends") or () if n in ("wandb", "swanlab")]
    return {name: {"project": str(project)} for name in tracking_backends} if project and tracking_backends else UNSET


def _steps(read: Reading) -> Any:
    steps, epochs = int(read("runner.max_steps", -1)), int(read("runner.max_epochs", 1))
    if read.leaves["runner.task_type"] == "embodied":  # one step is an epoch of RLinf
        return epochs if steps < 0 else min(steps, epochs)
    read.omit("runner.max_epochs", "it counts passes over the data, rlhpc counts steps: set runner.max_steps yourself")
    return steps if steps >= 0 else UNSET


def _resume(read: Reading) -> Any:
    resume_dir = read("runner.resume_dir")
    if resume_dir in (None, "auto"):
        return resume_dir if resume_dir else UNSET
    return read.omit("runner.resume_dir", "rlhpc does not read RLinf's checkpoints")


def _placement(read: Reading) -> Any:
    """Returns the placement of the components that the run has in rlhpc; records the reason for each omitted component."""
    components_of_run = {"actor", "rollout"}
    if read.leaves["runner.task_type"] != "reasoning":
        components_of_run.add("env")
    elif rlinf_defaults.has_critic(read.leaves):
        components_of_run.add("critic")
    placement: dict[str, Any] = {}
    for names, ranks in read.below("cluster.component_placement").items():
        components, _, placement_key = names.partition(".")
        listed_names = [name.strip() for name in components.split(",")]
        for name in listed_names:
            if name not in components_of_run:
                known_reason = _OTHER_COMPONENTS.get(name)
                reason = known_reason or f"rlhpc has no component {name} in such a run"
                read.omit(f"cluster.component_placement.{names}", reason, known_reason is None)
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


def _accelerators(read: Reading) -> Any:
    """Returns the number of accelerators of a node, from the highest rank in the placement."""
    ranges = ",".join(map(str, read.below("cluster.component_placement").values())).split(",")
    ranks = [int(n) for rank_range in ranges for n in re.findall(r"\d+", rank_range.partition(":")[0])]
    return math.ceil((max(ranks) + 1) / int(read("cluster.num_nodes", 1))) if ranks else UNSET


RUN: Rows = [
    (
        "runner.task_type",
        lambda read: {"embodied_sac": "off_policy"}.get(read("algorithm.loss_type"), str(read("runner.task_type"))),
    ),
    ("runner.name", _name),
    ("runner.seed", "actor.seed"),
    ("runner.max_steps", _steps),
    ("runner.save_interval", "runner.save_interval"),
    ("runner.resume_dir", _resume),
    ("runner.logger.logger_backends", _loggers),
    ("runner.logger.kwargs", _logger_options),
    ("cluster.num_nodes", "cluster.num_nodes"),
    ("cluster.accelerators_per_node", _accelerators),
    ("cluster.component_placement", _placement),
    ("algorithm.gamma", "algorithm.gamma"),
]
