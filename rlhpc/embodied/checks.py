"""Configuration checks for runs with simulators. This module neither imports torch nor writes files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhpc.algorithms.registry import COMPARE_WITHIN_GROUPS
from rlhpc.config.constraints import Fail, check_choice, check_name, check_rules
from rlhpc.config.load import segment_ends
from rlhpc.config.typed import select
from rlhpc.embodied.algorithms.registry import ALGORITHMS
from rlhpc.embodied.config import (
    BcConfig,
    EmbodiedConfig,
    PlayingConfig,
    PpoConfig,
    SacConfig,
    acts_in_actor,
    minibatch_size,
)
from rlhpc.embodied.envs.wrappers import parse_entry
from rlhpc.embodied.rollout.work_sharing import divisible
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.similar_names import similar_names
from rlhpc.training.registry import BACKENDS

#: Model types of the built-in policies.
MODELS = (
    "mlp", "cnn", "resnet", "resnet10", "flow", "sac", "crossq", "td3", "iql", "dsrl", "conditioned", "success", "vla", "pi0",
    "openvla", "lerobot",
)  # fmt: skip
#: Policies that generate actions by a flow. Of model_type lerobot, only smolvla, pi0 and pi05 do.
_FLOW_TYPES = ("flow", "pi0", "lerobot")
#: Policies with critics Q(s, a).
_CRITICS = ("sac", "crossq", "td3", "iql", "dsrl")
#: Policies that each off-policy algorithm can train.
_TRAINABLE_TYPES = {"sac": ("sac", "crossq", "dsrl"), "crossq": ("crossq",), "td3": ("td3",), "iql": ("iql",)}
#: Policies that behaviour cloning cannot train, with the reason.
_UNCLONABLE_TYPES = {
    "crossq": "crossq normalises by off-policy learning's batches; clone into sac, td3 or iql",
    "dsrl": "dsrl steers a policy that was cloned: clone into flow, and name that run then",
}
#: Policies that support adapters.
_ADAPTER_TYPES = ("vla", "pi0", "openvla")
#: Policies on a pretrained model, whose value head is optional.
_PRETRAINED_TYPES = ("vla", "pi0", "openvla", "lerobot")
#: Policies that can recompute activations in the backward pass.
_CHECKPOINTED = ("vla", "openvla")
#: Environment types of robots; a robot can run only one environment at a time.
_ROBOT_ENV_TYPES = ("robot", "distant_robot")


def check_common(cfg: EmbodiedConfig, fail: Fail) -> None:
    """Checks the sections that all runs with simulators have: environments, evaluation suites and the policy's network.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    model = cfg.actor.model
    name = model.model_type
    _check_normalisation(cfg, fail)
    if name in MODELS:
        inference_delay = select(cfg, "env.eval.real_time_chunking.inference_delay")  # off-policy runs have no such key
        check_rules(
            (
                (
                    select(cfg, "actor.model.gradient_checkpointing") and name not in _CHECKPOINTED,  # nor this one
                    "actor.model.gradient_checkpointing",
                    f"actor.model.model_type {model.model_type} has nothing to recompute, as {' and '.join(_CHECKPOINTED)} "
                    "have: false",
                ),
                (
                    model.kwargs.get("temperature_eval") and select(cfg, "env.eval.noise") == "zero",
                    "env.eval.noise",
                    "actor.model.kwargs.temperature_eval samples action tokens, for which zero is one certain outcome: seeded",
                ),
                (
                    inference_delay is not None and name not in _FLOW_TYPES,
                    "env.eval.real_time_chunking.inference_delay",
                    f"chunks are guided where a policy acts by a flow: actor.model.model_type {', '.join(_FLOW_TYPES)}; "
                    f"{model.model_type} does not",
                ),
            ),
            fail,
        )
    else:
        from rlhpc.embodied.models.registry import MODELS as REGISTRY

        REGISTRY.find(model.model_type)
    for suite in cfg.workflow.eval_suites:
        check_name("workflow.eval_suites", suite, ("default", *cfg.workflow.suites), fail)
    for section, env_cfg in (("env.train", cfg.env.train), ("env.eval", cfg.env.eval)):
        if env_cfg.kwargs.get("render_mode") == "human":
            raise fail(
                f"{section}.kwargs.render_mode",
                "it opens a window for each slot and waits for it at every step; leave it out: videos are made by "
                "env.eval.video_episodes",
            )
        _check_wrappers(f"{section}.wrappers", env_cfg.wrappers)
        if env_cfg.env_type == "gymnasium":
            _check_gymnasium_id(f"{section}.env_id", env_cfg.env_id, fail)
        else:
            from rlhpc.embodied.envs.registry import ENVS

            ENVS.find(env_cfg.env_type, f"{section}.env_type")


def _check_wrappers(key: str, wrappers: Sequence[object]) -> None:
    """Checks the wrappers' names; `module:Class` is imported only when the environment is built."""
    if not wrappers:
        return
    from rlhpc.embodied.envs.wrappers import WRAPPERS, parse_entry

    for index, wrapper in enumerate(wrappers):
        name, _ = parse_entry(wrapper, f"{key}[{index}]")
        if WRAPPERS.path(name) is None:
            WRAPPERS.find(name, f"{key}[{index}]")


def _check_gymnasium_id(key: str, env_id: str, fail: Fail) -> None:
    """Checks that gymnasium knows a bare id; `module:Id` is imported only when the environment is built."""
    if ":" in env_id:
        return
    import gymnasium

    if env_id not in gymnasium.registry:
        similar_ids = similar_names(env_id, gymnasium.registry, 3, 0.5)
        hint = (
            f"did you mean {', '.join(similar_ids)}?"
            if similar_ids
            else "see gymnasium.registry for all ids, or write module:Id"
        )
        raise fail(key, f"gymnasium does not know it; {hint}")


def _check_normalisation(cfg: EmbodiedConfig, fail: Fail) -> None:
    """Rejects wrappers that keep running observation statistics, because evaluations would lack these statistics. Also
    rejects `actor.model.normalize_observations` in runs that do not support it.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    for key in ("env.train.wrappers", "env.eval.wrappers"):
        for wrapper_index, wrapper in enumerate(select(cfg, key) or ()):
            if parse_entry(wrapper, key)[0] in ("normalize", "gymnasium.wrappers:NormalizeObservation"):
                raise fail(
                    f"{key}[{wrapper_index}]",
                    "its running statistics are each slot's own, neither saved nor used by evaluations: take it out and, in "
                    "runs of task_type embodied, set actor.model.normalize_observations=true; elsewhere rescale by fixed "
                    "bounds",
                )
    keeps_statistics = (
        select(cfg, "algorithm.adv_type") is not None and str(select(cfg, "actor.training_backend")) == "local"
    )
    if select(cfg, "actor.model.normalize_observations") and not keeps_statistics:
        raise fail(
            "actor.model.normalize_observations",
            "running statistics are kept by runs of task_type embodied with actor.training_backend local; elsewhere: false",
        )


def _check_demos_target(cfg: SacConfig | BcConfig, key: str, fail: Fail) -> None:
    """Checks that `key` names one `.h5` file if `workflow.demos_expert` is to record the demonstrations there.

    Raises:
        ConfigError: The key names something else.
    """
    path = select(cfg, key)
    is_file = isinstance(path, str) and path.endswith(".h5") and "*" not in path
    if cfg.workflow.demos_expert is not None and not is_file:
        raise fail(key, "workflow.demos_expert records the demonstrations there: name one .h5 file")


def check_slots(cfg: PlayingConfig, fail: Fail) -> None:
    """Checks that groups and stages divide the environments, that weights are not sent as shards, and that training and
    evaluation do not use the same robot at once.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    train_env, evaluation, stages = cfg.env.train, cfg.env.eval, cfg.rollout.pipeline_stage_num
    env_type = train_env.env_type
    is_shared_robot = env_type in _ROBOT_ENV_TYPES and env_type == evaluation.env_type
    check_rules(
        [
            (
                cfg.rollout.weight_sync == "shards",
                "rollout.weight_sync",
                "policies are sent whole: take auto (shards is for language models)",
            ),
            (
                is_shared_robot and cfg.runner.val_check_interval > 0,
                "runner.val_check_interval",
                f"env.eval is a {env_type}, as env.train is, which an env rank holds while a rollout rank evaluates, and a "
                "robot is in one place at a time; allowed: -1, and rlhpc eval --run once the run has ended; or a simulator "
                "as env.eval (env_type, env_id, kwargs)",
            ),
            (
                train_env.num_envs % stages,
                "env.train.num_envs",
                f"it must divide by rollout.pipeline_stage_num ({stages})",
            ),
            *_sync_interval_rules(cfg),
            *(
                (
                    section.num_envs % section.group_size,
                    f"env.{name}.num_envs",
                    f"it must divide by env.{name}.group_size ({section.group_size})",
                )
                for name, section in (("train", train_env), ("eval", evaluation))
            ),
        ],
        fail,
    )


def _sync_interval_rules(cfg: PlayingConfig) -> tuple[tuple[object, str, str], ...]:
    """Returns the rules of `runner.weight_sync_interval`."""
    runner, sync_interval = cfg.runner, cfg.runner.weight_sync_interval
    return (
        (
            sync_interval > 1 and cfg.algorithm.max_staleness and runner.task_type == "embodied",
            "runner.weight_sync_interval",
            "in on-policy runs algorithm.max_staleness bounds how old weights may be: 1, or algorithm.max_staleness=0",
        ),
        (
            runner.save_interval > 0 and runner.save_interval % sync_interval,
            "runner.save_interval",
            f"a run that is resumed between two weight syncs would sync at once: it must divide by "
            f"runner.weight_sync_interval ({sync_interval})",
        ),
        (
            runner.segments > 1 and any(end_step % sync_interval for end_step in segment_ends(cfg)[:-1]),
            "runner.segments",
            f"segments must end with a weight sync, after a multiple of runner.weight_sync_interval ({sync_interval}) steps",
        ),
    )


def check_processes(cfg: PlayingConfig, processes: Mapping[str, int]) -> None:
    """Checks that each env and rollout process has slots in every stage, and that all actor processes have equally many.

    Raises:
        ConfigError: A component has too many processes; the message names it and the numbers.
    """
    train_env, stages = cfg.env.train, cfg.rollout.pipeline_stage_num
    num_slots = train_env.num_envs // stages
    slots_text = (
        f"env.train.num_envs({train_env.num_envs}) / rollout.pipeline_stage_num({stages}) = {num_slots} slots of "
        "a stage"
    )
    for name, num_processes in processes.items():
        processes_text = f"cluster.component_placement.{name} gives {num_processes} processes"
        if name == "actor" and num_slots % num_processes:
            raise ConfigError(f"{processes_text}; they must divide the {slots_text}")
        if name != "actor" and num_processes > num_slots // train_env.group_size:
            raise ConfigError(
                f"{processes_text}; there may be {num_slots // train_env.group_size}: one for each "
                f"env.train.group_size({train_env.group_size}) of the {slots_text}"
            )


def check_divisibility(cfg: PpoConfig, fail: Fail) -> None:
    """Checks that a rollout divides into parts and minibatches, and minibatches into micro-batches; also checks the
    requirements of `runner.use_training_pipeline`.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    check_slots(cfg, fail)
    algorithm, num_envs, num_parts = cfg.algorithm, cfg.env.train.num_envs, cfg.algorithm.rollout_parts
    if algorithm.rollout_steps % num_parts:  # before a part is divided into minibatches
        raise fail("algorithm.rollout_parts", f"it must divide algorithm.rollout_steps ({algorithm.rollout_steps})")
    batch_size, num_transitions, micro_batch_size = (
        minibatch_size(cfg),
        num_envs * algorithm.rollout_steps,
        cfg.actor.micro_batch_size,
    )
    check_rules(
        (
            (
                num_transitions % batch_size,
                "actor.global_batch_size",
                f"a rollout has env.train.num_envs({num_envs}) * algorithm.rollout_steps({algorithm.rollout_steps}) = "
                f"{num_transitions} transitions, which must divide by it",
            ),
            (
                micro_batch_size is not None and batch_size % micro_batch_size,
                "actor.micro_batch_size",
                f"it must divide actor.global_batch_size ({batch_size})",
            ),
            (
                num_parts > 1 and cfg.env.train.auto_reset and not divisible(cfg),
                "algorithm.rollout_parts",
                f"algorithm.adv_type {algorithm.adv_type} takes what follows one another as one, which only gae can cut: "
                "take 1, or env.train.auto_reset false, where each part is an episode",
            ),
            (
                num_parts > 1 and not cfg.env.train.auto_reset and algorithm.max_staleness,
                "algorithm.rollout_parts",
                "with algorithm.max_staleness and without env.train.auto_reset, a step is an episode: 1",
            ),
        ),
        fail,
    )
    if cfg.runner.use_training_pipeline:
        _check_pipeline(cfg, fail)


def _check_pipeline(cfg: PpoConfig, fail: Fail) -> None:
    """Checks the requirements of `runner.use_training_pipeline`."""
    key, algorithm, num_parts = "runner.use_training_pipeline", cfg.algorithm, cfg.algorithm.rollout_parts
    part_size, batch = cfg.env.train.num_envs * algorithm.rollout_steps // num_parts, minibatch_size(cfg)
    part_text = f"with {key}, a part has {part_size} transitions"
    normalize = algorithm.normalize_advantages
    levels = {algorithm.logprob_type, algorithm.reward_type}
    check_rules(
        (
            (
                num_parts < 2,
                "algorithm.rollout_parts",
                f"{key} trains on one part while the next is played: take 2 or more",
            ),
            (
                algorithm.max_staleness,
                key,
                "with algorithm.max_staleness whole steps are played meanwhile: choose one of them",
            ),
            *(
                (section.enable_offload, f"{name}.enable_offload", f"with {key} both are at work at once: set it false")
                for name, section in (("actor", cfg.actor), ("rollout", cfg.rollout))
            ),
            (
                algorithm.filter_rewards,
                "algorithm.filter_rewards",
                f"what is left out must be known first, which {key} does not wait for: false",
            ),
            (
                algorithm.loss_agg != "token-mean",
                "algorithm.loss_agg",
                f"the lengths of all episodes must be known first, which {key} does not wait for: token-mean",
            ),
            (
                cfg.runner.on_nonfinite == "skip",
                "runner.on_nonfinite",
                f"what is left out must be known first, which {key} does not wait for: stop",
            ),
            (
                algorithm.loss_type == "decoupled_ppo",
                "algorithm.loss_type",
                f"it asks the weights from before all updates, which {key} does not keep: ppo",
            ),
            (
                normalize == "batch",
                "algorithm.normalize_advantages",
                f"{part_text}, and those of others are not known: minibatch or none",
            ),
            (
                part_size % batch and batch % part_size,
                "actor.global_batch_size",
                f"{part_text}: it must divide that, or be a multiple",
            ),
            (
                batch > part_size and normalize not in ("none", "false"),
                "algorithm.normalize_advantages",
                f"{part_text}, and a minibatch of {batch} is begun before its last advantages are known: none, or a smaller "
                "actor.global_batch_size",
            ),
            (
                batch > part_size and (levels != {"chunk_level"} or not cfg.env.train.auto_reset),
                "actor.global_batch_size",
                f"{part_text}, and how much of others trains is not known: take {part_size} or less",
            ),
        ),
        fail,
    )


def _check_adapters(cfg: PpoConfig | BcConfig, fail: Fail) -> None:
    """Checks that the model supports the configured adapters, training backend and dtype.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    name, backend = cfg.actor.model.model_type, cfg.actor.training_backend
    if ":" not in backend:
        check_choice("actor.training_backend", backend, BACKENDS.choices(), fail)
    is_local, is_bfloat16, has_adapters = (
        backend == "local",
        cfg.actor.model.dtype == "bfloat16",
        cfg.actor.lora.rank,
    )
    check_rules(
        (
            (
                name == "lerobot" and not is_local,
                "actor.training_backend",
                "policies of model_type lerobot are trained by local alone",
            ),
            (
                name == "lerobot" and is_bfloat16,
                "actor.model.dtype",
                "policies of model_type lerobot compute in float32",
            ),
            (
                has_adapters and name not in _ADAPTER_TYPES,
                "actor.lora.rank",
                f"adapters are for {', '.join(_ADAPTER_TYPES)}; the others train all weights: 0",
            ),
            (
                not has_adapters and name in _ADAPTER_TYPES and is_bfloat16 and is_local,
                "actor.model.dtype",
                "all weights are trained in float32; bfloat16 needs adapters (actor.lora.rank), or actor.training_backend "
                "fsdp or deepspeed",
            ),
        ),
        fail,
    )


#: Rule of a run whose actors simulate and act themselves: whether it is broken, key, clause about these actors, allowed value.
_ActingRule = tuple[bool, str, str, str]


def _check_acting_actors(cfg: PlayingConfig, fail: Fail, rules: Sequence[_ActingRule] = ()) -> None:
    """Checks a run whose actor ranks simulate and act themselves (`acts_in_actor`).

    Args:
        cfg: The configuration.
        fail: Builds the error.
        rules: Rules of the task type, which are checked first.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    train_env, in_process = cfg.env.train, "simulate in their own process"
    rules = (
        *rules,
        (cfg.algorithm.max_staleness > 0, "algorithm.max_staleness", "do not train at the same time", "0"),
        (cfg.runner.weight_sync_interval > 1, "runner.weight_sync_interval", "have the newest weights", "1"),
        (cfg.rollout.pipeline_stage_num > 1, "rollout.pipeline_stage_num", "simulate all slots at once", "1"),
        (bool(train_env.simulators), "env.train.simulators", in_process, "0"),
        (train_env.simulator_python is not None, "env.train.simulator_python", in_process, "null"),
        (train_env.reward_model is not None, "env.train.reward_model", "take the simulator's rewards", "null"),
    )
    placement_remedy = "or give env and rollout a place (cluster.component_placement)"
    check_rules(
        (
            (is_broken, key, f"actors that act {clause}: {allowed}, {placement_remedy}")
            for is_broken, key, clause, allowed in rules
        ),
        fail,
    )


def _on_policy_acting_rules(cfg: PpoConfig) -> tuple[_ActingRule, ...]:
    algorithm, actor, no_memory = cfg.algorithm, cfg.actor, "use all of their memory"
    pipeline = "runner.use_training_pipeline"
    return (
        (actor.training_backend != "local", "actor.training_backend", "hold all weights", "local"),
        (algorithm.rollout_parts > 1, "algorithm.rollout_parts", "play a step at once", "1"),
        (cfg.runner.use_training_pipeline, pipeline, "do not train at the same time", "false"),
        (algorithm.filter_rewards, "algorithm.filter_rewards", "train on all groups", "false"),
        (actor.enable_offload, "actor.enable_offload", no_memory, "false"),
        (cfg.rollout.enable_offload, "rollout.enable_offload", no_memory, "false"),
    )


def check_ppo(cfg: PpoConfig, fail: Fail) -> None:
    """Checks on-policy settings: offloading, the model, action and reward levels, and group-based estimators.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    algorithm, model, train_env = cfg.algorithm, cfg.actor.model, cfg.env.train
    name, estimator = model.model_type, algorithm.adv_type
    check_rules(
        (
            *(
                (
                    section.enable_offload and algorithm.max_staleness,
                    f"{section_name}.enable_offload",
                    "with algorithm.max_staleness both are at work at once: set it false",
                )
                for section_name, section in (("actor", cfg.actor), ("rollout", cfg.rollout))
            ),
            (
                cfg.rollout.enable_offload and cfg.rollout.weight_sync == "broadcast",
                "rollout.enable_offload",
                "weights are taken in on the host, which rollout.weight_sync broadcast does not",
            ),
            (
                name in _CRITICS,
                "actor.model.model_type",
                f"{name} has critics of actions: it is for off_policy"
                f"{'' if name in _UNCLONABLE_TYPES else ', and for bc before that'}",
            ),
            (
                name == "success",
                "actor.model.model_type",
                "a model of success does not act: bc trains it, env.train.reward_model uses it",
            ),
        ),
        fail,
    )
    _check_adapters(cfg, fail)
    if acts_in_actor(cfg):
        _check_acting_actors(cfg, fail, _on_policy_acting_rules(cfg))
    is_action_level = model.num_action_chunks > 1 and algorithm.reward_type == "action_level"
    needs_values = estimator == "gae" or algorithm.value_coef > 0
    compares_groups = estimator in COMPARE_WITHIN_GROUPS
    check_rules(
        (
            *_list_value_optim_rules(cfg, needs_values),
            (
                algorithm.filter_rewards and train_env.group_size < 2,
                "env.train.group_size",
                "algorithm.filter_rewards compares groups of slots that share a reset: it must be at least 2",
            ),
            (
                algorithm.filter_rewards and algorithm.count_filtered_groups and algorithm.loss_agg == "token-mean",
                "algorithm.count_filtered_groups",
                "a mean over tokens counts no groups: take algorithm.loss_agg seq-mean-token-mean, or "
                "count_filtered_groups false",
            ),
            (
                algorithm.filter_rewards and train_env.auto_reset,
                "env.train.auto_reset",
                "algorithm.filter_rewards asks for the returns of whole episodes: it must be false",
            ),
            (
                algorithm.rewards_lower_bound > algorithm.rewards_upper_bound,
                "algorithm.rewards_lower_bound",
                f"it must not be above algorithm.rewards_upper_bound ({algorithm.rewards_upper_bound})",
            ),
            (
                algorithm.loss_agg != "token-mean" and train_env.auto_reset,
                "algorithm.loss_agg",
                "with env.train.auto_reset a slot plays several episodes, of which parts are cut off: take token-mean, or "
                "auto_reset false",
            ),
            (
                cfg.actor.training_backend == "deepspeed" and algorithm.target_kl is not None,
                "algorithm.target_kl",
                "DeepSpeed cannot take back a gradient: use null, or another training backend",
            ),
            (
                is_action_level and algorithm.logprob_type == "chunk_level",
                "algorithm.logprob_type",
                "algorithm.reward_type action_level needs action_level or token_level",
            ),
            (
                is_action_level and needs_values and not model.value_per_action,
                "actor.model.value_per_action",
                "algorithm.reward_type action_level needs a value for each action: true",
            ),
            (
                model.num_action_chunks > 1 and model.value_per_action and not is_action_level,
                "actor.model.value_per_action",
                "it is for algorithm.reward_type action_level",
            ),
            (
                compares_groups and train_env.group_size < 2,
                "env.train.group_size",
                f"algorithm.adv_type {estimator} compares slots that share a reset: it must be at least 2",
            ),
            (
                compares_groups and train_env.auto_reset,
                "env.train.auto_reset",
                f"algorithm.adv_type {estimator} compares whole episodes: it must be false",
            ),
        ),
        fail,
    )


def _list_value_optim_rules(cfg: PpoConfig, needs_values: bool) -> tuple[tuple[object, str, str], ...]:
    """Returns the rules of the optimizer's keys for the value head or critic."""
    optim, model = cfg.actor.optim, cfg.actor.model
    lacks_values = model.model_type in _PRETRAINED_TYPES and not model.add_value_head
    is_set_by_key = {"value_lr": optim.value_lr is not None, "critic_warmup_steps": optim.critic_warmup_steps > 0}
    return (
        *(
            (
                is_set and lacks_values,
                f"actor.optim.{name}",
                "the policy has no value head: set actor.model.add_value_head, or leave the key out",
            )
            for name, is_set in is_set_by_key.items()
        ),
        (
            optim.critic_warmup_steps and not (needs_values and cfg.algorithm.value_coef),
            "actor.optim.critic_warmup_steps",
            "no value is trained: set algorithm.value_coef above 0, or take 0",
        ),
        (
            optim.critic_warmup_steps and cfg.actor.training_backend == "deepspeed",
            "actor.optim.critic_warmup_steps",
            "DeepSpeed updates all parameters in each step: take 0, or another training backend",
        ),
    )


def check_off_policy(cfg: SacConfig, fail: Fail) -> None:
    """Checks the model, the algorithm and the buffers of off-policy runs.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    algorithm, buffer = cfg.algorithm, cfg.algorithm.replay_buffer
    name, model_type = algorithm.name, cfg.actor.model.model_type
    if acts_in_actor(cfg):
        _check_acting_actors(cfg, fail)
    if model_type in MODELS and model_type not in _CRITICS:
        raise fail("actor.model.model_type", f"off_policy trains {', '.join(_CRITICS)}; take task_type embodied or bc")
    if name not in ALGORITHMS.built_in:
        ALGORITHMS.find(algorithm.name)
    elif model_type in MODELS and model_type not in _TRAINABLE_TYPES[name]:
        raise fail("actor.model.model_type", f"algorithm.name {name} trains {', '.join(_TRAINABLE_TYPES[name])}")
    key, path = "algorithm.demo_buffer.load_path", algorithm.demo_buffer.load_path
    _check_demos_target(cfg, key, fail)
    is_recorded = cfg.workflow.demos_expert is not None  # the demonstrations exist only after that
    is_pattern = path is not None and any(wildcard in path for wildcard in "*?[")
    check_rules(
        (
            (
                buffer.size < max(buffer.min_buffer_size, cfg.env.train.num_envs),
                "algorithm.replay_buffer.size",
                f"it must hold min_buffer_size ({buffer.min_buffer_size}) and one transition of each of the "
                f"{cfg.env.train.num_envs} environments",
            ),
            (
                (algorithm.critic_subsample_size or 0) > cfg.actor.model.num_q_heads,
                "algorithm.critic_subsample_size",
                f"it draws of actor.model.num_q_heads, {cfg.actor.model.num_q_heads}",
            ),
            (path and model_type == "dsrl", key, "dsrl learns of noise, and data have actions: take null"),
            (
                algorithm.offline_steps and not path,
                "algorithm.offline_steps",
                "they learn from data alone: name it in algorithm.demo_buffer.load_path, or take 0",
            ),
            (
                path and not is_recorded and not is_pattern and not expand_home(path).exists(),
                key,
                "there is no such file or folder",
            ),
        ),
        fail,
    )


def check_bc(cfg: BcConfig, fail: Fail) -> None:
    """Checks the model of behaviour cloning and the path of the demonstrations.

    Raises:
        ConfigError: A rule is broken; the message names the first one.
    """
    _check_adapters(cfg, fail)
    name = cfg.actor.model.model_type
    check_rules(
        (
            (name in _UNCLONABLE_TYPES, "actor.model.model_type", _UNCLONABLE_TYPES.get(name, "")),
            (
                cfg.algorithm.value_model and name != "conditioned",
                "actor.model.model_type",
                "algorithm.value_model conditions a policy that can be told: conditioned",
            ),
            (
                name == "conditioned" and not cfg.algorithm.value_model,
                "algorithm.value_model",
                "name a policy with a critic: it says which actions were improvements",
            ),
            (
                name in ("conditioned", "success") and cfg.algorithm.bc_loss == "mse",
                "algorithm.bc_loss",
                f"model_type {name} learns by nll",
            ),
            (
                name == "success" and cfg.runner.val_check_interval > 0,
                "runner.val_check_interval",
                "a model of success does not play; train/holdout_loss says what it learns",
            ),
        ),
        fail,
    )
    _check_demos_target(cfg, "demos.path", fail)
    if not cfg.demos.path:
        raise fail(
            "demos.path", "name trajectories: a .h5 file, a pattern, a folder of them, or a LeRobot dataset's folder"
        )
