"""Configuration checks of runs with simulators. This module neither imports torch nor writes files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from rlhpc.algorithms.registry import COMPARE_WITHIN_GROUPS
from rlhpc.config.constraints import Fail, check_choice, check_name
from rlhpc.config.typed import select
from rlhpc.embodied.algorithms.registry import ALGORITHMS
from rlhpc.embodied.config import (
    BcConfig,
    EmbodiedConfig,
    PlayingConfig,
    PpoConfig,
    SacConfig,
    minibatch_size,
)
from rlhpc.embodied.config.model_options import check_model_options
from rlhpc.embodied.envs.wrappers import entry
from rlhpc.embodied.rollout.work_sharing import divisible
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.training.registry import BACKENDS

#: Policies that come with the package.
MODELS = (
    "mlp", "cnn", "resnet", "flow", "sac", "crossq", "td3", "iql", "dsrl", "conditioned", "success", "vla", "pi0", "openvla",
    "lerobot",
)  # fmt: skip
#: Policies that act by a flow (of lerobot's: smolvla, pi0 and pi05).
_FLOWS = ("flow", "pi0", "lerobot")
#: Policies with critics of actions.
_CRITICS = ("sac", "crossq", "td3", "iql", "dsrl")
#: Policies that each off-policy algorithm can train.
_NETWORKS = {"sac": ("sac", "crossq", "dsrl"), "crossq": ("crossq",), "td3": ("td3",), "iql": ("iql",)}
#: Policies that behaviour cloning cannot train, and the reason.
_NOT_CLONED = {
    "crossq": "crossq normalises by off-policy learning's batches; clone into sac, td3 or iql",
    "dsrl": "dsrl steers a policy that was cloned: clone into flow, and name that run then",
}
#: Policies that support adapters.
_ADAPTED = ("vla", "pi0", "openvla")
#: Policies that can recompute activations in the backward pass.
_RECOMPUTED = ("vla", "openvla")
#: Environment types of robots, which cannot be duplicated.
_ROBOTS = ("robot", "distant_robot")


def check_common(cfg: EmbodiedConfig, fail: Fail) -> None:
    """Checks the parts that all runs with simulators have: environments, suites, the policy's network.

    Raises:
        ConfigError: The first rule that is broken.
    """
    model = cfg.actor.model
    _check_normalisation(cfg, fail)
    if model.model_type.lower() in MODELS:
        check_model_options(model, fail)
    else:
        from rlhpc.embodied.models.registry import MODELS as REGISTRY

        REGISTRY.find(model.model_type)
    if (
        select(cfg, "actor.model.gradient_checkpointing")  # which off-policy runs have not
        and model.model_type.lower() in MODELS
        and model.model_type.lower() not in _RECOMPUTED
    ):
        raise fail(
            "actor.model.gradient_checkpointing",
            f"actor.model.model_type {model.model_type} has nothing to recompute, as {' and '.join(_RECOMPUTED)} have: false",
        )
    delay = select(cfg, "env.eval.real_time_chunking.inference_delay")  # which off-policy runs have not
    if delay is not None and model.model_type.lower() in MODELS and model.model_type.lower() not in _FLOWS:
        raise fail(
            "env.eval.real_time_chunking.inference_delay",
            f"chunks are guided where a policy acts by a flow: actor.model.model_type {', '.join(_FLOWS)}; "
            f"{model.model_type} does not",
        )
    for suite in cfg.workflow.eval_suites:
        check_name("workflow.eval_suites", suite, ("default", *cfg.workflow.suites), fail)
    for name, env_cfg in (("train", cfg.env.train), ("eval", cfg.env.eval)):
        if env_cfg.kwargs.get("render_mode") == "human":
            raise fail(
                f"env.{name}.kwargs.render_mode",
                "it opens a window for each slot and waits for it at every step; leave it out: films are made by "
                "env.eval.video_episodes",
            )
        _wrappers(f"env.{name}.wrappers", env_cfg.wrappers)
        if env_cfg.env_type.lower() == "gymnasium":
            _gymnasium_id(f"env.{name}.env_id", env_cfg.env_id, fail)
        else:
            from rlhpc.embodied.envs.registry import ENVS

            ENVS.find(env_cfg.env_type, f"env.{name}.env_type")


def _wrappers(key: str, wrappers: Sequence[object]) -> None:
    """Checks the wrappers' names; `module:Class` is imported only when the environment is built."""
    if not wrappers:
        return
    from rlhpc.embodied.envs.wrappers import WRAPPERS, entry

    for i, wrapper in enumerate(wrappers):
        name, _ = entry(wrapper, f"{key}[{i}]")
        if WRAPPERS.path(name) is None:
            WRAPPERS.find(name, f"{key}[{i}]")


def _gymnasium_id(key: str, env_id: str, fail: Fail) -> None:
    """Checks that gymnasium knows a bare id; `module:Id` is imported only when the environment is built."""
    if ":" in env_id:
        return
    import gymnasium

    if env_id not in gymnasium.registry:
        similar_ids = difflib.get_close_matches(env_id, list(gymnasium.registry), 3, 0.5)
        hint = (
            f"did you mean {', '.join(similar_ids)}?"
            if similar_ids
            else "see gymnasium.registry for all ids, or write module:Id"
        )
        raise fail(key, f"gymnasium does not know it; {hint}")


def _check_normalisation(cfg: EmbodiedConfig, fail: Fail) -> None:
    """Refuses running statistics of observations that evaluations would lack: a policy keeps its own.

    Raises:
        ConfigError: The first rule that is broken.
    """
    for key in ("env.train.wrappers", "env.eval.wrappers"):
        for wrapper_index, wrapper in enumerate(select(cfg, key) or ()):
            if entry(wrapper, key)[0] in ("normalize", "gymnasium.wrappers:NormalizeObservation"):
                raise fail(
                    f"{key}[{wrapper_index}]",
                    "its running statistics are each slot's own, neither saved nor used by evaluations: take it out and, in "
                    "runs of task_type embodied, set actor.model.normalize_observations=true; elsewhere rescale by fixed "
                    "bounds",
                )
    is_normalized = (
        select(cfg, "algorithm.adv_type") is not None and str(select(cfg, "actor.training_backend")).lower() == "local"
    )
    if select(cfg, "actor.model.normalize_observations") and not is_normalized:
        raise fail(
            "actor.model.normalize_observations",
            "running statistics are kept by runs of task_type embodied with actor.training_backend local; elsewhere: false",
        )


def _check_demos_target(cfg: SacConfig | BcConfig, key: str, fail: Fail) -> None:
    """Checks that `workflow.demos_expert` writes one `.h5` file, which the run reads as its demonstrations.

    Raises:
        ConfigError: The key names something else.
    """
    if cfg.workflow.demos_expert is not None:
        path = select(cfg, key)
        if not isinstance(path, str) or not path.endswith(".h5") or "*" in path:
            raise fail(key, "workflow.demos_expert records the demonstrations there: name one .h5 file")


def check_slots(cfg: PlayingConfig, fail: Fail) -> None:
    """Checks that environments, groups and stages divide one another.

    Raises:
        ConfigError: Names the first that does not.
    """
    if cfg.rollout.weight_sync.lower() == "shards":
        raise fail("rollout.weight_sync", "policies are sent whole: take auto (shards is for language models)")
    env_type = cfg.env.train.env_type.lower()
    if env_type in _ROBOTS and env_type == cfg.env.eval.env_type.lower() and cfg.runner.val_check_interval > 0:
        raise fail(
            "runner.val_check_interval",
            f"env.eval is a {env_type}, as env.train is, which an env rank holds while a rollout rank evaluates, and a "
            "robot is in one place at a time; allowed: -1, and rlhpc eval --run once the run has ended; or a simulator "
            "as env.eval (env_type, env_id, kwargs)",
        )
    envs, stages = cfg.env.train.num_envs, cfg.rollout.pipeline_stage_num
    if envs % stages:
        raise fail("env.train.num_envs", f"it must divide by rollout.pipeline_stage_num ({stages})")
    for env_name, section in (("train", cfg.env.train), ("eval", cfg.env.eval)):
        if section.num_envs % section.group_size:
            raise fail(
                f"env.{env_name}.num_envs", f"it must divide by env.{env_name}.group_size ({section.group_size})"
            )


def check_processes(cfg: PlayingConfig, processes: Mapping[str, int]) -> None:
    """Checks that each env and rollout process has slots in every stage, and that actor processes have equal shares.

    Raises:
        ConfigError: Names the component and the numbers.
    """
    train, stages = cfg.env.train, cfg.rollout.pipeline_stage_num
    slots = train.num_envs // stages
    slots_text = (
        f"env.train.num_envs({train.num_envs}) / rollout.pipeline_stage_num({stages}) = {slots} slots of a stage"
    )
    for name, size in processes.items():
        processes_text = f"cluster.component_placement.{name} gives {size} processes"
        if name == "actor" and slots % size:
            raise ConfigError(f"{processes_text}; they must divide the {slots_text}")
        if name != "actor" and size > slots // train.group_size:
            raise ConfigError(
                f"{processes_text}; there may be {slots // train.group_size}: one for each "
                f"env.train.group_size({train.group_size}) of the {slots_text}"
            )


def check_divisibility(cfg: PpoConfig, fail: Fail) -> None:
    """Checks that a rollout divides into minibatches, and these into micro-batches.

    Raises:
        ConfigError: Names the first that does not divide.
    """
    check_slots(cfg, fail)
    envs = cfg.env.train.num_envs
    batch, total = minibatch_size(cfg), envs * cfg.algorithm.rollout_steps
    if total % batch:
        raise fail(
            "actor.global_batch_size",
            f"a rollout has env.train.num_envs({envs}) * algorithm.rollout_steps({cfg.algorithm.rollout_steps}) = "
            f"{total} transitions, which must divide by it",
        )
    micro = cfg.actor.micro_batch_size
    if micro is not None and (micro > batch or batch % micro):
        raise fail("actor.micro_batch_size", f"it must divide actor.global_batch_size ({batch})")
    _check_parts(cfg, fail)


def _check_parts(cfg: PpoConfig, fail: Fail) -> None:
    """Checks the parts of rollouts: that the rollouts can be divided, and that the parts are large enough for training on them
    as they arrive.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm, parts = cfg.algorithm, cfg.algorithm.rollout_parts
    if algorithm.rollout_steps % parts:
        raise fail("algorithm.rollout_parts", f"it must divide algorithm.rollout_steps ({algorithm.rollout_steps})")
    if parts > 1 and cfg.env.train.auto_reset and not divisible(cfg):
        raise fail(
            "algorithm.rollout_parts",
            f"algorithm.adv_type {algorithm.adv_type} takes what follows one another as one, which only gae can cut: take 1, "
            "or env.train.auto_reset false, where each part is an episode",
        )
    if parts > 1 and not cfg.env.train.auto_reset and algorithm.max_staleness:
        raise fail(
            "algorithm.rollout_parts",
            "with algorithm.max_staleness and without env.train.auto_reset, a step is an episode: 1",
        )
    if cfg.runner.use_training_pipeline:
        _pipeline(cfg, fail)


def _pipeline(cfg: PpoConfig, fail: Fail) -> None:
    key, algorithm, parts = "runner.use_training_pipeline", cfg.algorithm, cfg.algorithm.rollout_parts
    if parts < 2:
        raise fail("algorithm.rollout_parts", f"{key} trains on one part while the next is played: take 2 or more")
    if algorithm.max_staleness:
        raise fail(key, "with algorithm.max_staleness whole steps are played meanwhile: choose one of them")
    for section_name, section in (("actor", cfg.actor), ("rollout", cfg.rollout)):
        if section.enable_offload:
            raise fail(f"{section_name}.enable_offload", f"with {key} both are at work at once: set it false")
    if cfg.runner.on_nonfinite.lower() == "skip":
        raise fail("runner.on_nonfinite", f"what is left out must be known first, which {key} does not wait for: stop")
    if algorithm.loss_type.lower() == "decoupled_ppo":
        raise fail(
            "algorithm.loss_type", f"it asks the weights from before all updates, which {key} does not keep: ppo"
        )
    size, batch = cfg.env.train.num_envs * algorithm.rollout_steps // parts, minibatch_size(cfg)
    part_text = f"with {key}, a part has {size} transitions"
    normalize = algorithm.normalize_advantages.lower()
    if normalize == "batch":
        raise fail(
            "algorithm.normalize_advantages", f"{part_text}, and those of others are not known: minibatch or none"
        )
    if size % batch and batch % size:
        raise fail("actor.global_batch_size", f"{part_text}: it must divide that, or be a multiple")
    if batch > size and normalize not in ("none", "false"):
        raise fail(
            "algorithm.normalize_advantages",
            f"{part_text}, and a minibatch of {batch} is begun before its last advantages are known: none, or a smaller "
            "actor.global_batch_size",
        )
    levels = {algorithm.logprob_type.lower(), algorithm.reward_type.lower()}
    if batch > size and (levels != {"chunk_level"} or not cfg.env.train.auto_reset):
        raise fail(
            "actor.global_batch_size", f"{part_text}, and how much of others trains is not known: take {size} or less"
        )


def _check_adapters(cfg: PpoConfig | BcConfig, fail: Fail) -> None:
    """Checks that the model supports the adapters and the dtype.

    Raises:
        ConfigError: The first rule that is broken.
    """
    model = cfg.actor.model
    backend = cfg.actor.training_backend
    if ":" not in backend:
        check_choice("actor.training_backend", backend, BACKENDS.choices(), fail)
    if model.model_type.lower() == "lerobot":
        _lerobot(cfg, fail)
    if cfg.actor.lora.rank:
        if model.model_type.lower() not in _ADAPTED:
            raise fail("actor.lora.rank", f"adapters are for {', '.join(_ADAPTED)}; the others train all weights: 0")
    elif model.model_type.lower() in _ADAPTED and model.dtype == "bfloat16" and backend.lower() == "local":
        raise fail(
            "actor.model.dtype",
            "all weights are trained in float32; bfloat16 needs adapters (actor.lora.rank), or actor.training_backend fsdp or "
            "deepspeed",
        )


def _lerobot(cfg: PpoConfig | BcConfig, fail: Fail) -> None:
    """Checks the limits of LeRobot's policies: all weights are trained on each rank, in float32."""
    if cfg.actor.training_backend.lower() != "local":
        raise fail("actor.training_backend", "policies of model_type lerobot are trained by local alone")
    if cfg.actor.model.dtype == "bfloat16":
        raise fail("actor.model.dtype", "policies of model_type lerobot compute in float32")


def check_ppo(cfg: PpoConfig, fail: Fail) -> None:
    """Checks chunks, levels, and the requirements of estimators by group.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm, model, train = cfg.algorithm, cfg.actor.model, cfg.env.train
    for section_name, section in (("actor", cfg.actor), ("rollout", cfg.rollout)):
        if section.enable_offload and algorithm.max_staleness:
            raise fail(
                f"{section_name}.enable_offload", "with algorithm.max_staleness both are at work at once: set it false"
            )
    if cfg.rollout.enable_offload and cfg.rollout.weight_sync.lower() == "broadcast":
        raise fail(
            "rollout.enable_offload", "weights are taken in on the host, which rollout.weight_sync broadcast does not"
        )
    if (name := model.model_type.lower()) in _CRITICS:
        bc_hint = "" if name in _NOT_CLONED else ", and for bc before that"
        raise fail("actor.model.model_type", f"{name} has critics of actions: it is for off_policy{bc_hint}")
    if name == "success":
        raise fail(
            "actor.model.model_type", "a model of success does not act: bc trains it, env.train.reward_model uses it"
        )
    _check_adapters(cfg, fail)
    if cfg.actor.training_backend.lower() == "deepspeed" and algorithm.target_kl is not None:
        raise fail(
            "algorithm.target_kl", "DeepSpeed cannot take back a gradient: use null, or another training backend"
        )
    if model.num_action_chunks > 1:
        _chunks(cfg, fail)
    if algorithm.adv_type.lower() in COMPARE_WITHIN_GROUPS:
        if train.group_size < 2:
            raise fail(
                "env.train.group_size",
                f"algorithm.adv_type {algorithm.adv_type} compares slots that share a reset: it must be at least 2",
            )
        if train.auto_reset:
            raise fail(
                "env.train.auto_reset",
                f"algorithm.adv_type {algorithm.adv_type} compares whole episodes: it must be false",
            )


def _chunks(cfg: PpoConfig, fail: Fail) -> None:
    algorithm, model = cfg.algorithm, cfg.actor.model
    is_action_level = algorithm.reward_type.lower() == "action_level"
    if is_action_level and algorithm.logprob_type.lower() == "chunk_level":
        raise fail("algorithm.logprob_type", "algorithm.reward_type action_level needs action_level or token_level")
    needs_values = algorithm.adv_type.lower() == "gae" or algorithm.value_coef > 0
    if is_action_level and needs_values and not model.value_per_action:
        raise fail(
            "actor.model.value_per_action", "algorithm.reward_type action_level needs a value for each action: true"
        )
    if model.value_per_action and not is_action_level:
        raise fail("actor.model.value_per_action", "it is for algorithm.reward_type action_level")


def check_off_policy(cfg: SacConfig, fail: Fail) -> None:
    """Checks the buffers, and rejects features that off-policy runs do not have.

    Raises:
        ConfigError: The first rule that is broken.
    """
    algorithm, buffer = cfg.algorithm, cfg.algorithm.replay_buffer
    name, model_type = algorithm.name.lower(), cfg.actor.model.model_type.lower()
    if model_type in MODELS and model_type not in _CRITICS:
        raise fail(
            "actor.model.model_type",
            f"runner.task_type off_policy trains {', '.join(_CRITICS)}, which have critics of actions and read numbers; for "
            "images take task_type embodied or bc",
        )
    if name not in ALGORITHMS.built_in:
        ALGORITHMS.find(algorithm.name)
    elif model_type in MODELS and model_type not in _NETWORKS[name]:
        raise fail("actor.model.model_type", f"algorithm.name {name} trains {', '.join(_NETWORKS[name])}")
    _check_demos_target(cfg, "algorithm.demo_buffer.load_path", fail)
    if buffer.size < max(buffer.min_buffer_size, cfg.env.train.num_envs):
        raise fail(
            "algorithm.replay_buffer.size",
            f"it must hold min_buffer_size ({buffer.min_buffer_size}) and one transition of each of the "
            f"{cfg.env.train.num_envs} environments",
        )
    path = algorithm.demo_buffer.load_path
    if path and cfg.actor.model.model_type.lower() == "dsrl":
        raise fail("algorithm.demo_buffer.load_path", "dsrl learns of noise, and data have actions: take null")
    recorded = cfg.workflow.demos_expert is not None  # before training, which looks for them again
    if algorithm.offline_steps and not path:
        raise fail(
            "algorithm.offline_steps",
            "they learn from data alone: name it in algorithm.demo_buffer.load_path, or take 0",
        )
    if path and not recorded and not any(wildcard in path for wildcard in "*?[") and not expand_home(path).exists():
        raise fail("algorithm.demo_buffer.load_path", "there is no such file or folder")


def check_bc(cfg: BcConfig, fail: Fail) -> None:
    """Checks the model of behaviour cloning and the path of the demonstrations.

    Raises:
        ConfigError: The first rule that is broken.
    """
    _check_adapters(cfg, fail)
    name = cfg.actor.model.model_type.lower()
    if reason := _NOT_CLONED.get(name):
        raise fail("actor.model.model_type", reason)
    is_conditioned = name == "conditioned"
    if cfg.algorithm.value_model and not is_conditioned:
        raise fail("actor.model.model_type", "algorithm.value_model conditions a policy that can be told: conditioned")
    if is_conditioned and not cfg.algorithm.value_model:
        raise fail("algorithm.value_model", "name a policy with a critic: it says which actions were improvements")
    if name in ("conditioned", "success") and cfg.algorithm.bc_loss.lower() == "mse":
        raise fail("algorithm.bc_loss", f"model_type {name} learns by nll")
    if name == "success" and cfg.runner.val_check_interval > 0:
        raise fail(
            "runner.val_check_interval", "a model of success does not play; train/holdout_loss says what it learns"
        )
    _check_demos_target(cfg, "demos.path", fail)
    if not cfg.demos.path:
        raise fail(
            "demos.path", "name trajectories: a .h5 file, a pattern, a folder of them, or a LeRobot dataset's folder"
        )
