"""RLinf keys of runs with policies that have no counterpart in rlhpc, with the reasons. The first pattern that matches a key
applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, OptionalRow, Rule, UnsupportedKeys

#: Keys of RLinf's FSDP trainer (config.py, validate_fsdp_cfg).
FSDP_KEYS = (
    "fsdp_config.{strategy,sharding_strategy,cpu_offload,offload_pin_memory,reshard_after_forward,"
    "enable_gradient_accumulation,forward_prefetch,backward_prefetch,limit_all_gathers,fsdp_size,use_orig_params,"
    "use_liger_kernel,gradient_checkpointing,gradient_checkpointing_use_reentrant,save_full_model_weights} "
    "fsdp_config.mixed_precision.{param_dtype,reduce_dtype,buffer_dtype} fsdp_config.amp_autocast.{enabled,precision} "
    "fsdp_config.grad_scaler.{enabled,init_scale,growth_interval} fsdp_config.amp.{enabled,precision,use_grad_scaler} "
    "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
)


def keys_below(group: str, keys: str) -> str:
    """Returns patterns with a group in front of each."""
    return " ".join(f"{group}.{pattern}" for pattern in keys.split())


#: RLinf's estimators that need no critic.
GROUP_ESTIMATORS = ("grpo", "raw", "reinpp")


def _critic_rule(key: str) -> Rule:
    """Returns the rule for a key that RLinf reads only if there is a critic."""
    return lambda config: UNSET if config.leaves.get("algorithm.adv_type") in GROUP_ESTIMATORS else config(key, UNSET)


def _bootstrap_type(config: ForeignConfig) -> Any:
    runs_to_limit = config.flag("env.train.ignore_terminations")
    has_values = config.leaves.get("algorithm.adv_type") not in GROUP_ESTIMATORS
    return config("algorithm.bootstrap_type", UNSET) if has_values and not runs_to_limit else UNSET


def _filter_rule(key: str) -> Rule:
    """Returns the rule for a key that RLinf reads only if `filter_rewards` is set."""
    return lambda config: config(key, UNSET) if config.flag("algorithm.filter_rewards") else UNSET


#: Row of `bootstrap_type`, which PPO and SAC have.
BOOTSTRAP = OptionalRow(
    "algorithm.bootstrap_type",
    _bootstrap_type,
    UnsupportedKeys(
        "algorithm.bootstrap_type",
        "an episode that ended is worth 0 from there on; at its limit, it is worth the value of its last observation",
        ("standard",),
        r"bootstrap_type",
    ),
)
#: Row of `weight_sync_interval`, which RLinf's asynchronous runs have.
WEIGHT_SYNC = OptionalRow(
    "runner.weight_sync_interval",
    "runner.weight_sync_interval",
    UnsupportedKeys(
        "runner.weight_sync_interval", "weights go to the rollout after every step", (1,), r"weight_sync_interval"
    ),
)


def _ppo_sync_interval(config: ForeignConfig) -> Any:
    key = WEIGHT_SYNC.key
    if config.leaves.get("algorithm.loss_type") == "decoupled_actor_critic":
        return config.omit(key, "RLinf's asynchronous PPO sends weights after every step, whatever it says", False)
    return config(key, UNSET)


#: Optional rows of PPO and GRPO.
PPO_OPTIONAL = (
    BOOTSTRAP,
    replace(WEIGHT_SYNC, rule=_ppo_sync_interval),
    OptionalRow(
        "algorithm.huber_delta",
        _critic_rule("algorithm.huber_delta"),
        UnsupportedKeys("algorithm.huber_delta", "the value loss is the squared error", missing_feature="huber"),
    ),
    *(
        OptionalRow(
            key,
            _filter_rule(key),
            UnsupportedKeys(
                f"{key} algorithm.{{rewards_lower_bound,rewards_upper_bound}}",
                "all groups train, whatever their mean reward is",
                (False,),
                r"^embodied key .*(filter_rewards|rewards_lower_bound)",
            ),
        )
        for key in ("algorithm.filter_rewards", "algorithm.rewards_lower_bound", "algorithm.rewards_upper_bound")
    ),
    OptionalRow(
        "actor.optim.value_lr",
        _critic_rule("actor.optim.value_lr"),
        UnsupportedKeys(
            "actor.optim.value_lr",
            "policy and critic train with actor.optim.lr",
            missing_feature=r"^embodied key actor\.optim\.value_lr",
        ),
    ),
    OptionalRow(
        "actor.optim.critic_warmup_steps",
        _critic_rule("actor.optim.critic_warmup_steps"),
        UnsupportedKeys(
            "actor.optim.critic_warmup_steps",
            "policy and critic train from the first update on (runner.init_from with bc_value_coef starts with a critic)",
            (0,),
            r"^embodied key .*critic_warmup",
        ),
    ),
)

#: Unsupported keys of SAC, CrossQ and IQL.
OFF_POLICY = [
    UnsupportedKeys("algorithm.tau algorithm.target_update_freq", "for target networks", True),
    UnsupportedKeys(
        "algorithm.target_update_type",
        "the target of an encoder follows it by tau, as those of the critics do",
        ("all", None),
    ),
    UnsupportedKeys("algorithm.enable_drq actor.enable_drq", "in algorithm.random_shift", True),
    UnsupportedKeys(
        "algorithm.train_actor_steps",
        "actor and critics train from the first update on",
        (0,),
        r"^off_policy key .*(train_actor_steps|actor_delay|critic_warmup)",
    ),
    UnsupportedKeys(
        "algorithm.replay_buffer.cache_size algorithm.replay_buffer.enable_cache algorithm.replay_buffer.trajectory_format "
        "algorithm.replay_buffer.prefetch_size algorithm.replay_buffer.enable_preload",
        "RLinf's cache and format of the buffer's files",
        True,
    ),
    UnsupportedKeys(
        "algorithm.replay_buffer.{auto_save,auto_save_path,auto_save_interval,load_path}",
        "the buffer is a memory-mapped file, and part of each checkpoint",
        True,
    ),
    UnsupportedKeys(
        "algorithm.demo_buffer.*",
        "RLinf's demonstrations have a format of RLinf's: set algorithm.demo_buffer.load_path to trajectories",
    ),
    UnsupportedKeys(
        "algorithm.entropy_tuning.optim.lr_scheduler", "the learning rate is constant", ("torch_constant",)
    ),
    UnsupportedKeys("algorithm.q_head_type actor.model.q_head_type", "in algorithm.name", True),
    UnsupportedKeys("algorithm.target_entropy", "RLinf reads algorithm.entropy_tuning.target_entropy", True),
    UnsupportedKeys("algorithm.agg_q", "the targets take the smallest value", True),
    UnsupportedKeys("actor.critic_optim.clip_grad", "actor and critics are clipped at actor.optim.clip_grad"),
    UnsupportedKeys(
        "actor.critic_optim.lr_scheduler actor.value_optim.lr_scheduler actor.optim.lr_scheduler",
        "the learning rate is constant, or falls linearly (algorithm.anneal_lr)",
        ("constant", "torch_constant"),
        r"^off_policy key actor\.optim\.lr_scheduler",
    ),
    UnsupportedKeys(
        "actor.critic_optim.lr_warmup_steps actor.value_optim.lr_warmup_steps actor.optim.lr_warmup_steps",
        "the learning rate has its value from the first update on",
        (-1, 0),
        r"^off_policy key actor\.optim\.lr_warmup_steps",
    ),
    UnsupportedKeys(
        "actor.critic_optim.* actor.value_optim.*", "actor and critics share Adam's other numbers (actor.optim)"
    ),
    UnsupportedKeys(
        "algorithm.adv_type algorithm.normalize_advantages algorithm.reward_type algorithm.logprob_type "
        "algorithm.use_fixed_reset_state_ids algorithm.entropy_bonus algorithm.loss_agg_func algorithm.clip_ratio_low "
        "algorithm.clip_ratio_high algorithm.huber_delta",
        "RLinf's off-policy trainer does not read it",
        True,
    ),
    UnsupportedKeys("algorithm.group_size env.train.group_size", "each slot draws its own resets", (1,)),
    UnsupportedKeys(
        f"actor.training_backend {keys_below('actor', FSDP_KEYS)} actor.use_fsdp_wrap actor.offline_torch_compile",
        "small networks: gradients are summed over the ranks",
        True,
    ),
    UnsupportedKeys(
        "actor.micro_batch_size", "a rank computes its part of a batch at once; it only saves memory", True
    ),
    UnsupportedKeys("actor.enable_offload rollout.enable_offload", "it only saves memory", True),
    UnsupportedKeys("actor.model.iql_config.{log_std_min,log_std_max}", "the log-std is clamped to [-20, 2]", (2.0,)),
    UnsupportedKeys(
        "actor.model.iql_config.type actor.model.iql_config.hidden_dims actor.model.iql_config.dropout_rate "
        "actor.model.iql_config.state_dependent_std algorithm.hidden_dims algorithm.dropout_rate",
        "RLinf's heads of the same networks",
        True,
    ),
    UnsupportedKeys("env.eval.task_name", "evaluation has the training environment", True),
    UnsupportedKeys("env.eval.env_type", "evaluation has the training environment", True),
    UnsupportedKeys(
        "data.dataset_type data.shuffle data.seed data.num_workers", "batches are drawn by runner.seed", True
    ),
    UnsupportedKeys("runner.log_interval runner.local_update_steps", "in algorithm.offline_updates", True),
]

#: Unsupported keys of behaviour cloning.
BC = [
    UnsupportedKeys(
        "algorithm.dagger.beta* algorithm.dagger.init_beta",
        "rlhpc dagger lets the clone act, and the expert label what it visits; RLinf's expert acts in a part of the rollouts",
        missing_feature=r"dagger.*beta|beta_schedule",
    ),
    UnsupportedKeys(
        "algorithm.dagger.online_lerobot.enabled algorithm.dagger.online_lerobot.robot_type "
        "algorithm.dagger.online_lerobot.fps algorithm.dagger.online_lerobot.finalize_interval "
        "algorithm.dagger.online_lerobot.data_path "
        "algorithm.dagger.online_lerobot.lerobot_num_workers",
        "rlhpc dagger writes the data of a round to a file, or to a LeRobot dataset (--to)",
        True,
    ),
    UnsupportedKeys(
        "algorithm.dagger.only_save_expert algorithm.dagger.online_lerobot.only_success "
        "algorithm.dagger.online_lerobot.rolling_lerobot_window_size algorithm.dagger.online_lerobot.min_frames",
        "rlhpc dagger trains on all episodes of all rounds, with the expert's actions",
        (False, None),
    ),
    UnsupportedKeys(
        "algorithm.replay_buffer.*",
        "rlhpc dagger trains on the data of all rounds so far",
        missing_feature=r"^bc key [\w.]*replay",
    ),
    UnsupportedKeys(
        "algorithm.{gamma,adv_type,loss_type,group_size,normalize_advantages,reward_type,logprob_type,entropy_type,"
        "entropy_bonus,kl_beta,kl_penalty,clip_ratio_low,clip_ratio_high,clip_ratio_c,clip_log_ratio_min,clip_log_ratio_max} "
        "algorithm.value_clip algorithm.huber_delta algorithm.gae_lambda algorithm.loss_agg_func algorithm.reward_coef",
        "RLinf's loss on demonstrations does not read it",
        True,
    ),
    UnsupportedKeys(
        "env.train.total_num_envs env.train.rollout_epoch env.train.max_steps_per_rollout_epoch",
        "rlhpc dagger plays --episodes a round, in env.eval.num_envs slots",
        True,
    ),
    UnsupportedKeys(
        "env.train.auto_reset env.train.group_size env.train.seed env.train.reward_coef env.train.use_rel_reward "
        "env.train.use_fixed_reset_state_ids",
        "demonstrations are played as evaluations are",
        True,
    ),
    UnsupportedKeys(
        "actor.optim.lr_scheduler",
        "each round of rlhpc dagger has a schedule of its own: choose one",
        ("constant", "torch_constant"),
    ),
    UnsupportedKeys(
        "actor.optim.lr_warmup_steps", "each round of rlhpc dagger has a warm-up of its own: choose one", (-1, 0)
    ),
    UnsupportedKeys("actor.optim.value_lr actor.optim.critic_warmup_steps", "for a critic", True),
    UnsupportedKeys("actor.optim.warmup_style", "RLinf's trainer does not read it", True),
    UnsupportedKeys("actor.optim.total_training_steps", "RLinf reads it with another lr_scheduler", True),
    UnsupportedKeys(
        "runner.early_stop.min_delta",
        "any improvement counts",
        missing_feature=r"min_delta|smallest improvement",
    ),
    UnsupportedKeys(
        "runner.early_stop.monitor", "the held-out loss decides", ("val_loss", None), r"^bc .*holdout_accuracy"
    ),
    UnsupportedKeys("runner.early_stop.{enabled,patience}", "in runner.patience and runner.keep_best", True),
    UnsupportedKeys("data.val_data_paths", "set demos.holdout: a part of the episodes is held out"),
    UnsupportedKeys(
        "data.{num_workers,prefetch_factor,lazy_load,parquet_cache_size,video_backend,tolerance_s,video_tolerance_s}",
        "the runner loads demonstrations in its own order, by runner.seed; only speed and memory",
        True,
    ),
    UnsupportedKeys(
        "data.tasks data.task_subtasks.* data.use_skill data.fine_grained_level data.modalities data.sampling_mode "
        "data.macro_stride data.video_in_chunk_offsets data.repo_id data.behavior_dataset_root",
        "part of RLinf's data set, of which rlhpc reads the episodes alone",
        (None,),
    ),
    UnsupportedKeys(
        "actor.model.pretrained", "the encoder starts from random weights", (False,), r"resnet18"
    ),
    UnsupportedKeys("actor.model.dropout", "the encoder has no dropout", (0, 0.0), r"^(bc key|option) .*dropout"),
    UnsupportedKeys("actor.model.normalize", "the encoder scales pictures itself", True),
    UnsupportedKeys("actor.model.freeze_vit actor.model.use_flash_attention", "for transformers", True),
    UnsupportedKeys("runner.val_check_interval", "the held-out loss is computed at every step", True),
    UnsupportedKeys("rollout.expert_model.{precision,model_path}", "the expert is --expert's", True),
    UnsupportedKeys(
        "rollout.expert_model.* rollout.rlt_feature_model.*", "of a second policy in the rollout, such as an expert"
    ),
    UnsupportedKeys(
        "rollout.{group_name,backend,rollout_backend,generation_backend,recompute_logprobs,unnorm_key,enable_offload,"
        "enable_torch_compile,enable_cuda_graph,pipeline_stage_num,collect_prev_infos,collect_transitions,"
        "sync_weight_nccl_max_ctas} rollout.model.{model_type,model_path,precision}",
        "only actors train on demonstrations",
        True,
    ),
    UnsupportedKeys("actor.eval_batch_size", "the held-out loss is a mean over all rows", True),
    UnsupportedKeys("runner.enable_decoupled_mode", "rlhpc dagger plays and trains in turns", True),
]  # fmt: skip

#: Unsupported keys of all runs with policies.
EMBODIED = [
    UnsupportedKeys("algorithm.entropy_type", "rlhpc averages the entropy over the units of logprob_type", True),
    UnsupportedKeys(
        "rollout.rollout_queue_size", "algorithm.max_staleness bounds how far acting may run ahead of training", (0, None)
    ),
    UnsupportedKeys(
        "algorithm.rollout_store_size_per_rank",
        "algorithm.max_staleness bounds how far acting may run ahead of training",
    ),
    UnsupportedKeys(
        "algorithm.clip_log_ratio_min algorithm.clip_log_ratio_max",
        "RLinf's embodied loss uses it with GR00T N1.6 and N1.7 only", True
    ),
    UnsupportedKeys(
        "algorithm.clip_ratio_c", "RLinf's synchronous embodied loss uses it with GR00T N1.6 and N1.7 only", True
    ),
    UnsupportedKeys("algorithm.kl_beta algorithm.kl_penalty", "RLinf's embodied losses do not use it", True),
    UnsupportedKeys(
        "algorithm.value_clip algorithm.gae_lambda", "for a critic, which group estimators do without", True
    ),
    UnsupportedKeys("algorithm.loss_type", "in runner.task_type", True),
    UnsupportedKeys("algorithm.ratio_clip_eps", "clip_ratio_low and clip_ratio_high have the values", True),
    UnsupportedKeys("algorithm.eval_rollout_epoch", "in env.eval.num_episodes", True),
    UnsupportedKeys("algorithm.rollout_epoch", "in algorithm.rollout_steps", True),
    UnsupportedKeys(
        "actor.{compile_model,num_gpus,sync_weight_no_wait} rollout.sync_weight_nccl_max_ctas", "only speed", True
    ),
    UnsupportedKeys(
        "actor.{enable_sft_co_train,sft_data_path,sft_loss_weight,config_name}",
        "PPO learns from its rollouts; demonstrations come before it (task_type bc and runner.init_from)",
        (False,),
        r"^embodied key [\w.]*(sft_|demo_buffer|demos)",
    ),
    UnsupportedKeys("env.eval.group_size", "evaluation plays single episodes", True),
    UnsupportedKeys(
        "env.delay_sampler.{type,delay,min_delay,max_delay,rate,mean,stddev,seed}",
        "RLinf waits so long after each step of a simulator, to imitate a slow robot or network; only speed",
        True,
    ),
    UnsupportedKeys("algorithm.reward_coef", "RLinf reads env.train.reward_coef", True),
    UnsupportedKeys("algorithm.group_size", "in env.train.group_size", True),
    UnsupportedKeys(
        "algorithm.length_params.{max_length,max_new_token,min_length} algorithm.sampling_params.{do_sample,"
        "temperature_train,temperature_eval,top_k,top_p,repetition_penalty,add_BOS}",
        "RLinf's policies do not read it",
        True,
    ),
    UnsupportedKeys("algorithm.use_fixed_reset_state_ids", "RLinf reads env.train.use_fixed_reset_state_ids", True),
    UnsupportedKeys(
        "actor.optim.lr_scheduler", "the learning rate is constant", ("constant", "torch_constant")
    ),
    UnsupportedKeys("actor.num_steps", "RLinf reads actor.model.num_steps", True),
    UnsupportedKeys(
        "actor.optim.{min_lr,min_lr_rate,num_cycles}",
        "for a schedule that falls (actor.optim.lr_scheduler)",
        True,
    ),
    UnsupportedKeys("actor.optim.warmup_style", "RLinf's trainer does not read it", True),
    UnsupportedKeys("actor.optim.total_training_steps", "a schedule ends with the run", True),
    UnsupportedKeys(
        "actor.optim.{weight_decay,value_lr,critic_warmup_steps,lr_warmup_steps,lr_warmup_steps_ratio}",
        "RLinf's optimizer of such runs does not read it",
        True,
    ),
    UnsupportedKeys(
        "env.enable_offload env.{train,eval}.{enable_offload,enable_init_offload}", "it only saves memory", True
    ),
    UnsupportedKeys("actor.enable_offload rollout.enable_offload", "each group has its own accelerators", True),
    UnsupportedKeys(
        "actor.fsdp_config.sharding_strategy actor.fsdp_config.strategy actor.fsdp_config.reshard_after_forward "
        "actor.fsdp_config.cpu_offload actor.fsdp_config.enable_gradient_accumulation",
        "in actor.training_backend; only memory and speed",
        True,
    ),
    UnsupportedKeys(
        "actor.fsdp_config.mixed_precision.{param_dtype,reduce_dtype,buffer_dtype} "
        "actor.fsdp_config.amp_autocast.{enabled,precision}",
        "weights are float32, and computation has actor.model.dtype",
        True,
    ),
    UnsupportedKeys(
        "actor.fsdp_config.gradient_checkpointing actor.model.gradient_checkpointing", "it only saves memory", True
    ),
    UnsupportedKeys(
        "actor.fsdp_config.grad_scaler.{enabled,init_scale,growth_interval}",
        "float16 needs a scaled loss, bfloat16 and float32 do not",
        True,
    ),
    UnsupportedKeys(keys_below("actor", FSDP_KEYS), "only memory and speed", True),
    UnsupportedKeys("actor.model.precision", "the policy computes in float32", ("32", 32, "fp32", None)),
    UnsupportedKeys(
        "rollout.model.{model_type,model_path,tokenizer_path,backbone_model_path,precision,action_dim,state_dim,image_num,"
        "num_q_heads}",
        "the rollout has the actor's model",
        True,
    ),
    UnsupportedKeys("actor.model.model_path", "such a policy starts from random weights", ("", None)),
    UnsupportedKeys(
        "actor.model.obs_dim actor.model.action_dim actor.model.state_dim actor.model.image_size actor.model.proprio_dim "
        "actor.model.action_env_dim actor.model.openpi.action_env_dim",
        "the environment's spaces have it",
        True,
    ),
    UnsupportedKeys(
        "actor.model.max_prompt_length actor.model.vocab_size actor.model.hidden_size actor.model.openpi.config_name "
        "actor.model.num_images_in_input actor.model.openpi.num_images_in_input actor.model.use_proprio",
        "the model's folder has it",
        True,
    ),
    UnsupportedKeys(
        "actor.model.openpi.action_chunk actor.model.openpi.num_steps actor.model.openpi.add_value_head "
        "actor.model.num_steps actor.model.ref_num_action_chunks",
        "RLinf's copies of num_action_chunks, num_steps and add_value_head",
        True,
    ),
    UnsupportedKeys(
        "actor.model.openpi.value_vlm_mode actor.model.openpi.joint_logprob actor.model.openpi.detach_critic_input "
        "actor.model.openpi.noise_logvar_range",
        "for the noise and the critic of reinforcement learning",
        True,
    ),
    UnsupportedKeys(
        "actor.model.openpi.noise_params", "RLinf reads it with noise_anneal", True
    ),
    UnsupportedKeys(
        "actor.model.openpi.dsrl_{action_noise_dim,agg_q,hidden_dims,image_latent_dim,num_q_heads,state_dim,"
        "state_latent_dim} actor.model.openpi.{use_dsrl,is_nft}",
        "for DSRL and NFT",
        True,
    ),
    UnsupportedKeys(
        "actor.model.add_bias_linear actor.model.add_qkv_bias", "Megatron's, which RLinf's policies do not read", True
    ),
    UnsupportedKeys(
        "actor.model.vh_mode actor.model.q_network_separate_processing actor.model.sharding_strategy actor.model.backbone",
        "RLinf's policies do not read it",
        True,
    ),
    UnsupportedKeys(
        "actor.model.openpi_data.{action_space,default_prompt,image_space,norm_stats_path,repo_id,state_space}",
        "LeRobot's folder has the statistics and names of its data",
        True,
    ),
    UnsupportedKeys("actor.model.hidden_dim", "RLinf's MLP has three layers of 256 with any value", (256,)),
    UnsupportedKeys("actor.model.add_value_head actor.model.add_q_head", "algorithm and policy decide it", True),
    UnsupportedKeys(
        "actor.model.lora_rank actor.model.is_lora", "all weights train", ("", False, 32, None)
    ),
    UnsupportedKeys(
        "actor.model.{policy_setup,model_name} env.{train,eval}.policy_setup", "the environment knows its robot", True
    ),
    UnsupportedKeys(
        "actor.model.attn_implementation actor.model.low_cpu_mem_usage actor.model.use_cache",
        "only speed and memory",
        True,
    ),
    UnsupportedKeys(
        "actor.model.trust_remote_code",
        "rlhpc's code builds the model: set actor.model.trust_remote_code yourself where its tokenizer brings code",
        True,
    ),
    UnsupportedKeys(
        "actor.model.vh_mode actor.model.value_type",
        "the value head reads the hidden state after the prompt",
    ),
    UnsupportedKeys("actor.model.implement_version", "rlhpc follows OFT's own code", ("official",)),
    UnsupportedKeys("actor.model.center_crop", "RLinf reads it, and crops no picture by it", True),
    UnsupportedKeys("actor.model.use_film", "FiLM is off", (False,)),
    UnsupportedKeys("actor.model.*", "of RLinf's model, which rlhpc builds in another way"),
    UnsupportedKeys(
        "rollout.backend rollout.generation_backend", "policies act by their forward pass", ("huggingface",)
    ),
    UnsupportedKeys(
        "rollout.sampling_params.{temperature_train,temperature_eval,top_k,do_sample}",
        "RLinf reads it with action tokens",
        True,
    ),
    UnsupportedKeys(
        "rollout.sampling_params.top_p",
        "policies sample from all actions",
        (1, 1.0, None),
        r"^(embodied|option) .*top_p",
    ),
    UnsupportedKeys(
        "rollout.sampling_params.repetition_penalty rollout.sampling_params.max_new_tokens rollout.sampling_params.add_BOS",
        "RLinf's policies do not read it",
        True,
    ),
    UnsupportedKeys(
        "rollout.enable_torch_compile rollout.enable_cuda_graph rollout.enforce_eager rollout.gpu_memory_utilization",
        "only speed",
        True,
    ),
    UnsupportedKeys("rollout.{collect_prev_infos,collect_transitions}", "the runner knows what it needs", True),
    UnsupportedKeys("rollout.recompute_logprobs", "RLinf recomputes none in such runs", (False, None)),
    UnsupportedKeys("rollout.unnorm_key", "RLinf's policies read actor.model.unnorm_key", True),
    UnsupportedKeys(
        "rollout.expert_model.* rollout.rlt_feature_model.*", "of a second policy in the rollout, such as an expert"
    ),
    UnsupportedKeys(
        "env.{train,eval}.video_cfg.{save_video,video_base_dir,fps,info_on_video,extra_info_on_video}",
        "videos are made in evaluation, into the run's folder",
        True,
    ),
    UnsupportedKeys(
        "env.{train,eval}.wrap_obs_mode",
        "observations are the simulator's (env.train.kwargs.obs_mode)",
        ("simple", "default", "simple_prompt", None),
    ),
    UnsupportedKeys("env.{train,eval}.use_full_state", "observations are the simulator's", (False,)),
    UnsupportedKeys(
        "env.{train,eval}.init_params.{num_envs,max_episode_steps}", "set from the environment's own keys", True
    ),
    UnsupportedKeys(
        "env.{train,eval}.init_params.{sim_backend,render_mode,control_mode}",
        "the simulation runs on a GPU where there is one, and videos ask for a renderer themselves",
        ("gpu", "auto", "all", "rgb_array", "None", None),
    ),
    UnsupportedKeys("env.*.init_params.*", "RLinf's environment reads it; set env.train.kwargs"),
    UnsupportedKeys("env.{train,eval}.is_eval", "the stage decides it", True),
    UnsupportedKeys(
        "env.{train,eval}.reset_gripper_open",
        "objects come to rest with the gripper open before an episode begins",
        (True, None),
        r"^option .*gripper_open",
    ),
    UnsupportedKeys("env.train.use_ordered_reset_state_ids", "states are drawn by the seed", (False, None)),
    UnsupportedKeys(
        "env.eval.use_ordered_reset_state_ids", "evaluation plays the states of a suite in order", (True, False, None)
    ),
    UnsupportedKeys("env.{train,eval}.specific_reset_id", "episodes start from all states", (None,)),
    UnsupportedKeys("env.{train,eval}.use_step_penalty", "LIBERO's reward is 1 at success and 0 before it", (False, None)),
    UnsupportedKeys(
        "env.eval.env_type env.eval.seed env.eval.auto_reset env.eval.use_rel_reward env.eval.reward_mode "
        "env.eval.reward_coef env.eval.rollout_epoch env.eval.max_steps_per_rollout_epoch env.eval.task_suite_name "
        "env.eval.use_fixed_reset_state_ids env.eval.use_subproc_vector_env env.eval.total_num_envs "
        "env.eval.max_episode_steps env.eval.ignore_terminations",
        "evaluation plays complete episodes, counts their returns, and draws seeds for itself",
        True,
    ),
    UnsupportedKeys(
        "env.{train,eval}.data_collection.{enabled,save_dir,export_format,robot_type,fps,only_success,finalize_interval,"
        "collect_env_stride,gae_gamma,gae_lambda,sidecar_rgb_capture}",
        "rlhpc record writes demonstrations (docs/how-to/demonstrations.md)",
        True,
    ),
    UnsupportedKeys(
        "env.train.rollout_epoch env.train.max_steps_per_rollout_epoch", "in algorithm.rollout_steps", True
    ),
    UnsupportedKeys("env.train.*  env.eval.*", "RLinf's environment reads it"),
    UnsupportedKeys("reward.use_reward_model", "in env.train.reward_model", True),
]  # fmt: skip

#: Unsupported keys of a run with policies that asks a reward model.
REWARD_MODEL = [
    UnsupportedKeys("reward.{worker_type,standalone_realworld}", "the environments ask the classifier", True),
    UnsupportedKeys("reward.reward_mode", "the classifier judges each step", True),
    UnsupportedKeys("reward.group_name", "groups have their components' names", True),
    UnsupportedKeys("reward.enable_offload", "it only saves memory", True),
    UnsupportedKeys("reward.{reward_threshold,use_reward_prob}", "RLinf reads it, and does nothing with it", True),
    UnsupportedKeys(
        "reward.model.reward_threshold",
        "the reward is the classifier's probability, also below a threshold",
        (None,),
        r"^(embodied|off_policy) key .*reward_threshold",
    ),
    UnsupportedKeys(
        "reward.model.{arch,dropout,hidden_dim,image_size,normalize,pretrained,precision,model_type}",
        "the classifier's folder has it",
        True,
    ),
    UnsupportedKeys("reward.*", "of RLinf's reward model, which rlhpc builds in another way"),
]


#: Unsupported keys of a run with policies and without a reward model.
NO_REWARD_MODEL = [UnsupportedKeys("reward.*", "RLinf reads it with use_reward_model", True, any_name=True)]


def embodied_keys(leaves: Mapping[str, Any]) -> list[UnsupportedKeys]:
    """Returns the unsupported keys of all runs with policies."""
    has_model = leaves.get("reward.use_reward_model") is True
    return [*EMBODIED, *(REWARD_MODEL if has_model else NO_REWARD_MODEL)]
