"""Translation tables of RLinf's runs that learn from demonstrations: DAgger, supervised fine-tuning of policies, and success
classifiers. All become behaviour cloning (`task_type: bc`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.cli.foreign import rlinf_defaults
from rlhpc.cli.foreign.rlinf_embodied import POLICY, SCHEDULE, optimizer_rows
from rlhpc.cli.foreign.rlinf_environments import ENVIRONMENTS, is_embodied, is_mlp, model_type_of
from rlhpc.cli.foreign.rlinf_unsupported_embodied import BC, embodied_keys
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Requirement, Rows, Rule, RunKind, is_null

#: RLinf's policies that act; its other models of `task_type: sft` are language models.
_POLICIES = (
    "openvla", "openvla_oft", "openpi", "openpi_rlinf", "mlp_policy", "cnn_policy", "flow_policy", "gr00t", "gr00t_n1d6",
    "gr00t_n1d7", "dexbotic_pi", "dexbotic_dm0", "dreamzero", "lingbotvla", "abot_m0", "evo1", "starvla", "molmoact2",
)  # fmt: skip
#: Value models and guided policies of RLinf's offline methods, with the method.
_VALUE_MODELS = {"cfg_model": "RECAP", "recap_value_model": "RECAP", "steam_value_model": "STEAM"}


def _actor_placement(config: ForeignConfig) -> Any:
    """Returns the placement of the actors, the only group of such a run."""
    placement: dict[str, Any] = {}
    for names, ranks in config.section("cluster.component_placement").items():
        listed_names = [name.strip() for name in names.partition(".")[0].split(",")]
        config.omit(f"cluster.component_placement.{names}", "only actors train on demonstrations", False)
        if "actor" in listed_names:
            placement["actor"] = ranks
    return placement or UNSET


def _demos_path(config: ForeignConfig) -> Any:
    paths = config.texts("data.train_data_paths")
    if any(path.endswith(".pt") for path in paths):
        config.omit(
            "data.train_data_paths",
            "rlhpc reads HDF5, Minari and LeRobot data: record the episodes with rlhpc record, and name them",
        )
    return paths[0] if len(paths) == 1 else paths or UNSET


def _updates_per_step(config: ForeignConfig) -> Any:
    """Returns the number of updates in a step of a run that RLinf counts in updates; `UNSET` if it counts passes.

    It divides the intervals of checkpoints and evaluations, which RLinf counts in updates, too.
    """
    steps = config.integer("runner.max_steps", -1)
    if steps < 1:
        return UNSET
    intervals = (config.integer(f"runner.{name}_interval", -1) for name in ("save", "val_check"))
    return math.gcd(steps, *(interval for interval in intervals if interval > 0))


def _steps_rule(key: str) -> Rule:
    """Returns the rule that converts updates to steps of rlhpc; -1, and numbers of a run that counts passes, are kept."""

    def rule(config: ForeignConfig) -> Any:
        count, each = config.integer(key, -1), _updates_per_step(config)
        return count if each is UNSET or count < 0 else count // each

    return rule


def _num_steps(config: ForeignConfig) -> Any:
    """Returns the steps of the run, of updates or of passes; `UNSET` if the file does not limit them."""
    epochs = config.integer("runner.max_epochs", -1)
    if _updates_per_step(config) is UNSET:
        return epochs if epochs > 0 else UNSET
    if epochs > 0:
        config.omit("runner.max_epochs", "RLinf ends after so many passes, too, if they come first")
    return _steps_rule("runner.max_steps")(config)


#: Rows of the length of a run, whose step is a pass over the demonstrations, or a number of updates.
_LENGTH: Rows = [
    ("runner.max_steps", _num_steps),
    ("runner.save_interval", _steps_rule("runner.save_interval")),
    ("runner.val_check_interval", _steps_rule("runner.val_check_interval")),
    ("algorithm.update_epochs", lambda config: 1 if _updates_per_step(config) is UNSET else UNSET),
    ("algorithm.minibatches_per_step", _updates_per_step),
    *SCHEDULE,
]


CLONING: Rows = [
    ("cluster.component_placement", _actor_placement),
    ("actor.global_batch_size", "actor.global_batch_size"),
    ("actor.micro_batch_size", lambda config: config("actor.micro_batch_size", UNSET)),
    ("actor.optim.name", lambda config: "adamw" if config("actor.optim.weight_decay") else "adam"),
    *optimizer_rows("actor"),
    ("actor.optim.weight_decay", "actor.optim.weight_decay"),
]


# -- DAgger -------------------------------------------------------------------------------------------------------------


def _expert(config: ForeignConfig) -> Any:
    path = config("runner.expert_ckpt_path") or config("rollout.expert_model.model_path")
    config.omit(
        "runner.expert_ckpt_path rollout.expert_model.model_path algorithm.loss_type",
        "the expert is a checkpoint of rlhpc or a function: rlhpc dagger FILE --expert EXPERT --rounds N --episodes M",
    )
    return str(path) if path else UNSET


def _updates(config: ForeignConfig) -> int:
    config.omit(
        "algorithm.update_epoch",
        "RLinf makes so many updates after each rollout; each round of rlhpc dagger makes so many passes over its data",
    )
    for key in ("runner.max_epochs", "runner.max_steps"):
        config.omit(key, "rounds of rlhpc dagger: --rounds", config.integer(key, -1) >= 0)
    return max(1, config.integer("algorithm.update_epoch", 1))


DAGGER: Rows = [
    *ENVIRONMENTS,
    *CLONING,
    *POLICY,
    ("runner.max_steps", _updates),
    ("algorithm.update_epochs", lambda config: 1),
    # RLinf's MLP learns by the squared error of the mean action.
    ("algorithm.bc_loss", lambda config: "mse" if is_mlp(config) else UNSET),
    ("workflow.demos_expert", _expert),
    ("demos.path", lambda config: "demos/dagger.h5"),
]


# -- supervised fine-tuning ---------------------------------------------------------------------------------------------


def _environment(key: str) -> Any:
    """Returns the rule for a key of the environment, whose observation and action spaces the demonstrations must have."""

    def rule(config: ForeignConfig) -> Any:
        config_name = str(config.leaves.get("actor.model.openpi.config_name", ""))
        reason = "RLinf's file names no environment: set env.train.env_type and env.train.env_id to the recorded one"
        config.omit("data.train_data_paths", reason)
        if "libero" not in config_name:
            return UNSET
        config.omit("data.train_data_paths", "libero_10 is written for the shapes of its observations", False)
        return {"env_type": "libero", "env_id": "libero_10"}[key]

    return rule


SUPERVISED: Rows = [
    ("env.train.env_type", _environment("env_type")),
    ("env.train.env_id", _environment("env_id")),
    *CLONING,
    *POLICY,
    *_LENGTH,
    ("demos.path", _demos_path),
]


# -- success classifiers ------------------------------------------------------------------------------------------------


def _classifier_options(config: ForeignConfig) -> Any:
    config.omit(
        "actor.model.arch",
        "rlhpc's encoder is IMPALA's ResNet, from random weights; RLinf's is torchvision's",
        missing_feature=r"resnet18",
    )
    return {"encoder": "resnet"}


def _holdout(config: ForeignConfig) -> Any:
    if config("data.val_data_paths") is None:
        return UNSET
    config.omit("data.val_data_paths", "a tenth of the episodes is held out in place of RLinf's file (demos.holdout)")
    return 0.1


def _patience(config: ForeignConfig) -> Any:
    return config.integer("runner.early_stop.patience", 5) if config.flag("runner.early_stop.enabled") else UNSET


def _best_metric(config: ForeignConfig) -> Any:
    stops_early = config.flag("runner.early_stop.enabled") and config("data.val_data_paths") is not None
    return "train/holdout_loss" if stops_early else UNSET


CLASSIFIER: Rows = [
    *CLONING,
    ("runner.patience", _patience),
    ("runner.keep_best", _best_metric),
    ("demos.holdout", _holdout),
    ("actor.training_backend", lambda config: "local" if config("actor.training_backend") else UNSET),
    ("actor.model.model_type", lambda config: "success" if config("actor.model.model_type") else UNSET),
    ("actor.model.hidden_sizes", lambda config: [config.integer("actor.model.hidden_dim", 256)]),
    ("actor.model.kwargs", _classifier_options),
    *_LENGTH,
    ("runner.val_check_interval", lambda config: UNSET),  # a success model does not play
    ("demos.path", _demos_path),
]


# -- kinds --------------------------------------------------------------------------------------------------------------


def _is_supervised(leaves: Mapping[str, Any], models: Sequence[str]) -> bool:
    return leaves.get("runner.task_type") == "sft" and leaves.get("actor.model.model_type") in models


_METHODS = (
    Requirement(
        "actor.model.model_type",
        lambda leaves: (
            f"{_VALUE_MODELS[name]}'s {name} is a vision-language model, which rlhpc does not train as a critic of a policy"
            if (name := str(leaves.get("actor.model.model_type"))) in _VALUE_MODELS
            else ""
        ),
        r"^bc .*(distributional|STEAM)",
    ),
)


KINDS: Sequence[RunKind] = (
    RunKind(
        lambda leaves: "bc (DAgger)" if leaves else "loss_type embodied_dagger",
        "bc",
        lambda leaves: is_embodied(leaves) and leaves.get("algorithm.loss_type") == "embodied_dagger",
        lambda leaves: DAGGER,
        lambda leaves: [*BC, *embodied_keys(leaves)],
        lambda leaves: rlinf_defaults.DAGGER,
    ),
    RunKind(
        lambda leaves: f"bc ({model_type_of(leaves)})" if leaves else "task_type sft of policies",
        "bc",
        lambda leaves: _is_supervised(leaves, (*_POLICIES, *_VALUE_MODELS)),
        lambda leaves: SUPERVISED,
        lambda leaves: [*BC, *embodied_keys(leaves)],
        lambda leaves: rlinf_defaults.SUPERVISED,
        _METHODS,
    ),
    RunKind(
        lambda leaves: "bc (success classifier)" if leaves else "task_type sft of reward models on pictures",
        "bc",
        lambda leaves: _is_supervised(leaves, ("resnet",)) and not is_null(leaves.get("actor.model.model_type")),
        lambda leaves: CLASSIFIER,
        lambda leaves: [*BC, *embodied_keys(leaves)],
        lambda leaves: rlinf_defaults.SUPERVISED,
    ),
)
