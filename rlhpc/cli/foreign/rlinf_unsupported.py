"""RLinf keys without a counterpart in rlhpc, with the reasons. The first pattern that matches a key applies."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.cli.foreign.rules import UnsupportedKeys

#: Unsupported keys of embodied runs.
EMBODIED = [
    UnsupportedKeys("algorithm.huber_delta", "the value loss is the squared error, with no linear part"),
    UnsupportedKeys(
        "algorithm.bootstrap_type",
        "an episode that ended is worth 0 from there on; one cut at its limit, the value of its last observation",
        ("standard",),
    ),
    UnsupportedKeys("algorithm.clip_ratio_c", "RLinf's embodied loss uses it with GR00T N1.6 and N1.7 only", True),
    UnsupportedKeys("algorithm.kl_beta algorithm.kl_penalty", "RLinf's embodied losses do not use it", True),
    UnsupportedKeys(
        "algorithm.value_clip algorithm.gae_lambda", "for a critic, which group estimators do without", True
    ),
    UnsupportedKeys(
        "algorithm.entropy_type", "entropy is averaged over what the policy loss takes for a token (logprob_type)", True
    ),
    UnsupportedKeys(
        "algorithm.loss_agg_func", "embodied losses are averaged over all tokens: token-mean", ("token-mean",)
    ),
    UnsupportedKeys(
        "algorithm.filter_rewards algorithm.rewards_*_bound algorithm.reward_*_bound",
        "groups whose mean reward is outside bounds are not filtered (algorithm.filter_groups is for language models)",
        (False,),
    ),
    UnsupportedKeys(
        "algorithm.behave_weight_threshold",
        "RLinf leaves out what weighs more; algorithm.tis_cap caps the weight instead",
    ),
    UnsupportedKeys(
        "algorithm.adv_type algorithm.normalize_advantages algorithm.reward_type algorithm.logprob_type "
        "algorithm.use_fixed_reset_state_ids algorithm.entropy_bonus",
        "SAC has no use for it",
        True,
    ),
    UnsupportedKeys("algorithm.loss_type", "in runner.task_type", True),
    UnsupportedKeys("actor.training_backend", "embodied policies are replicated on each rank", True),
    UnsupportedKeys("algorithm.ratio_clip_eps", "clip_ratio_low and clip_ratio_high say it", True),
    UnsupportedKeys("algorithm.critic_subsample_size", "there are two critics, and both are taken", (0, 2)),
    UnsupportedKeys("algorithm.enable_drq actor.enable_drq", "pictures are not shifted at random", (False,)),
    UnsupportedKeys("algorithm.train_actor_steps", "actor and critics train from the first update on"),
    UnsupportedKeys("algorithm.eval_rollout_epoch", "in env.eval.num_episodes", True),
    UnsupportedKeys("algorithm.rollout_epoch", "in algorithm.rollout_steps", True),
    UnsupportedKeys(
        "actor.compile_model actor.num_gpus actor.sync_weight_no_wait rollout.sync_weight_*", "only speed", True
    ),
    UnsupportedKeys("actor.enable_sft_co_train actor.sft_*", "no demonstrations are trained on beside PPO", (False,)),
    UnsupportedKeys("env.*.group_size", "off-policy slots are drawn one by one", (1,)),
    UnsupportedKeys("algorithm.reward_coef", "used by way of env.train.reward_coef", True),
    UnsupportedKeys("algorithm.group_size", "used by way of env.train.group_size", True),
    UnsupportedKeys(
        "algorithm.length_params.* algorithm.sampling_params.*",
        "for generation by a language model, which policies do not use",
        True,
    ),
    UnsupportedKeys("algorithm.dagger.* algorithm.expert*", "not for this task type: rlhpc dagger"),
    UnsupportedKeys(
        "algorithm.replay_buffer.sample_window_size algorithm.replay_buffer.cache_size",
        "RLinf counts trajectories, rlhpc counts transitions: set algorithm.replay_buffer.size",
    ),
    UnsupportedKeys(
        "algorithm.replay_buffer.min_buffer_size",
        "RLinf counts trajectories, rlhpc counts transitions: set algorithm.replay_buffer.min_buffer_size",
    ),
    UnsupportedKeys("algorithm.replay_buffer.*", "the buffer lies in memory, and in each checkpoint", True),
    UnsupportedKeys(
        "algorithm.demo_buffer.*",
        "RLinf's demonstrations are in a format of its own: set algorithm.demo_buffer.load_path",
    ),
    UnsupportedKeys(
        "algorithm.agg_q algorithm.actor_agg_q", "targets and actor take the smaller of the critics' values", ("min",)
    ),
    UnsupportedKeys(
        "algorithm.q_head_type actor.model.q_head_type",
        "the critics are two networks on state and action",
        ("default",),
    ),
    UnsupportedKeys("algorithm.entropy_tuning.optim.clip_grad", "the temperature's gradient is not clipped"),
    UnsupportedKeys("algorithm.entropy_tuning.* algorithm.target_update_type", "as rlhpc has it", True),
    UnsupportedKeys("actor.critic_optim.clip_grad", "actor and critics are clipped at actor.optim.clip_grad", (10.0,)),
    UnsupportedKeys(
        "actor.critic_optim.lr_scheduler actor.optim.lr_scheduler",
        "the learning rate is constant, or falls linearly (algorithm.anneal_lr)",
        ("constant", "torch_constant"),
    ),
    UnsupportedKeys(
        "actor.critic_optim.lr_warmup_steps actor.optim.lr_warmup_steps", "embodied runs do not warm up", (-1, 0)
    ),
    UnsupportedKeys("actor.critic_optim.*", "actor and critics share Adam's other numbers"),
    UnsupportedKeys("actor.optim.value_lr", "policy and critic share one learning rate"),
    UnsupportedKeys(
        "actor.optim.critic_warmup_steps",
        "the critic does not train alone first (runner.init_from with bc_value_coef starts with one)",
        (0,),
    ),
    UnsupportedKeys(
        "actor.optim.total_training_steps actor.optim.min_lr* actor.optim.num_cycles actor.optim.warmup_style",
        "for a schedule of the learning rate",
    ),
    UnsupportedKeys("actor.optim.*", "not used by RLinf's optimizer of such runs", True),
    UnsupportedKeys("actor.micro_batch_size", "off-policy batches are not cut; it only saves memory", True),
    UnsupportedKeys(
        "actor.enable_offload rollout.enable_offload env.enable_offload env.*.enable_offload env.*.enable_init_offload",
        "each group keeps its memory; it only saves some",
        True,
    ),
    UnsupportedKeys(
        "actor.fsdp_config.*", "embodied policies are replicated on each rank: it only concerns speed and memory", True
    ),
    UnsupportedKeys("actor.model.precision", "the policy computes in float32", ("32", 32, "fp32")),
    UnsupportedKeys("rollout.model.*", "the rollout has the actor's model", True),
    UnsupportedKeys("actor.model.model_path", "such a policy starts from random weights", ("",)),
    UnsupportedKeys(
        "actor.model.obs_dim actor.model.action_dim actor.model.state_dim actor.model.image_size",
        "the environment's spaces say it",
        True,
    ),
    UnsupportedKeys("actor.model.hidden_dim", "RLinf's MLP has three layers of 256 whatever it says", (256,)),
    UnsupportedKeys("actor.model.add_value_head actor.model.add_q_head", "algorithm and policy say it", True),
    UnsupportedKeys(
        "actor.model.lora_rank actor.model.lora_path actor.model.is_lora", "no adapters", ("", False, 32, None)
    ),
    UnsupportedKeys(
        "actor.model.policy_setup actor.model.model_name", "names the robot, which the environment knows", True
    ),
    UnsupportedKeys(
        "actor.model.attn_implementation actor.model.low_cpu_mem_usage actor.model.use_cache",
        "only speed and memory",
        True,
    ),
    UnsupportedKeys(
        "actor.model.trust_remote_code",
        "set actor.model.trust_remote_code yourself where the model brings code of its own",
        True,
    ),
    UnsupportedKeys("actor.model.*", "of RLinf's model, which is built in another way here"),
    UnsupportedKeys(
        "rollout.backend rollout.generation_backend", "policies act by their own forward pass", ("huggingface",)
    ),
    UnsupportedKeys(
        "rollout.sampling_params.temperature_train rollout.sampling_params.temperature_eval rollout.sampling_params.top_*",
        "policies sample from their own distribution, and evaluate with its mode",
    ),
    UnsupportedKeys("rollout.sampling_params.*", "for generation by a language model, which policies do not use", True),
    UnsupportedKeys(
        "rollout.enable_torch_compile rollout.enable_cuda_graph rollout.enforce_eager rollout.gpu_memory_utilization",
        "only speed",
        True,
    ),
    UnsupportedKeys("rollout.collect_* rollout.recompute_logprobs", "the runner knows what it needs", True),
    UnsupportedKeys(
        "rollout.unnorm_key rollout.expert_model.* rollout.rlt_feature_model.*",
        "of RLinf's model, which is built in another way here",
    ),
    UnsupportedKeys(
        "env.train.video_cfg.* env.eval.video_cfg.*", "films are made in evaluation, into the run's folder", True
    ),
    UnsupportedKeys(
        "env.*.wrap_obs_mode", "observations are the simulator's own (env.train.kwargs.obs_mode)", ("simple", "default")
    ),
    UnsupportedKeys("env.*.use_full_state", "observations are the simulator's own", (False,)),
    UnsupportedKeys(
        "env.*.init_params.num_envs env.*.init_params.max_episode_steps", "set from the environment's own keys", True
    ),
    UnsupportedKeys(
        "env.*.init_params.sim_backend env.*.init_params.render_mode env.*.init_params.control_mode",
        "the simulation runs on a GPU where there is one, and films ask for a renderer themselves",
        ("gpu", "auto", "all", "rgb_array", "None", None),
    ),
    UnsupportedKeys(
        "env.*.is_eval env.*.reset_gripper_open",
        "objects come to rest with the gripper open before an episode begins",
        True,
    ),
    UnsupportedKeys(
        "env.*.use_ordered_reset_state_ids env.*.specific_reset_id", "states are drawn by the seed", (False, None)
    ),
    UnsupportedKeys("env.*.use_step_penalty", "LIBERO's reward is 1 at success and 0 before it", (False,)),
    UnsupportedKeys(
        "env.eval.env_type env.eval.seed env.eval.group_size env.eval.auto_reset env.eval.use_rel_reward env.eval.reward_mode "
        "env.eval.reward_coef env.eval.rollout_epoch env.eval.max_steps_per_rollout_epoch env.eval.task_suite_name",
        "evaluation plays whole episodes, counts their own returns, and draws seeds of its own",
        True,
    ),
    UnsupportedKeys(
        "env.*.data_collection.*", "rlhpc record writes demonstrations (docs/how-to/demonstrations.md)", True
    ),
    UnsupportedKeys(
        "env.train.rollout_epoch env.train.max_steps_per_rollout_epoch", "in algorithm.rollout_steps", True
    ),
    UnsupportedKeys("env.train.*  env.eval.* env.delay_sampler.*", "of RLinf's environment, which is another one here"),
    UnsupportedKeys("reward.use_reward_model", "embodied rewards are the simulator's", (False,)),
    UnsupportedKeys("reward.*", "embodied rewards are the simulator's; there is no reward model"),
    UnsupportedKeys("data.*", "embodied runs read no data set", True),
]

#: Unsupported keys of language models.
LANGUAGE = [
    UnsupportedKeys("runner.val_check_interval", "the workflow evaluates each checkpoint (runner.save_interval)", True),
    UnsupportedKeys(
        "algorithm.early_stop_imp_ratio",
        "an update is not stopped by its ratios (algorithm.target_kl can stop a step's updates)",
    ),
    UnsupportedKeys("algorithm.use_valid_token_scale", "losses are averaged as algorithm.loss_agg says", (False,)),
    UnsupportedKeys("algorithm.calculate_entropy", "entropy is always computed", True),
    UnsupportedKeys(
        "algorithm.*rollout_batch_size_per_gpu algorithm.logprob_forward_micro_batch_size",
        "batches are cut by tokens (actor.max_tokens_per_micro_batch); only speed and memory",
        True,
    ),
    UnsupportedKeys("algorithm.shuffle_rollout", "responses are dealt to minibatches at random", (True,)),
    UnsupportedKeys("algorithm.sampling_params.do_sample", "training samples", (True,)),
    UnsupportedKeys("algorithm.sampling_params.min_new_tokens", "a response may end at once", (0, 1)),
    UnsupportedKeys("algorithm.sampling_params.repetition_penalty", "engines sample without", (1.0,)),
    UnsupportedKeys("algorithm.max_num_gen_batches", "groups are refilled as algorithm.filter_groups says", (1,)),
    UnsupportedKeys(
        "algorithm.gae_lambda algorithm.value_* algorithm.critic_warmup_steps",
        "for a critic, which this run does not have",
        True,
    ),
    UnsupportedKeys(
        "algorithm.n_minibatches algorithm.training_batch_size_per_gpu",
        "in actor.global_batch_size and actor.max_tokens_per_micro_batch",
        True,
    ),
    UnsupportedKeys(
        "actor.global_batch_size actor.micro_batch_size",
        "RLinf computes it from data.rollout_batch_size and algorithm.n_minibatches",
        True,
    ),
    UnsupportedKeys(
        "actor.megatron.* actor.mcore_gpt actor.spec_name actor.variable_seq_lengths",
        "Megatron's; rlhpc trains with FSDP2 or DeepSpeed",
        True,
    ),
    UnsupportedKeys(
        "actor.model.*_parallel* actor.model.*parallel_size actor.model.sequence_parallel",
        "rlhpc shards weights over all actor ranks, and does not cut layers or sequences",
        True,
    ),
    UnsupportedKeys(
        "actor.model.moe_aux_loss_coeff actor.model.moe_router_bias_update_rate",
        "there is no loss or bias for the experts' balance",
        (0, 0.0),
    ),
    UnsupportedKeys(
        "actor.model.recompute_* actor.model.moe_* actor.model.*fusion actor.model.use_cpu_initialization "
        "actor.model.batch_p2p_comm actor.model.variable_seq_lengths actor.model.init_method_std "
        "actor.model.multi_latent_attention actor.model.persist_layer_norm",
        "Megatron's; transformers builds the model from its own folder",
        True,
    ),
    UnsupportedKeys(
        "actor.model.activation actor.model.normalization actor.model.position_embedding_type actor.model.add_bias_linear "
        "actor.model.attention_softmax_in_fp32 actor.model.model_type actor.model.seq_length actor.model.encoder_seq_length "
        "actor.model.megatron_checkpoint actor.model.sharding_strategy rollout.model.model_type",
        "the model's own folder says it",
        True,
    ),
    UnsupportedKeys("actor.model.lora_rank actor.model.lora_path", "no adapters", True),
    UnsupportedKeys(
        "actor.offload_* actor.enable_offload",
        "collocated groups make room for one another by actor.offload_in_rollout; only memory",
        True,
    ),
    UnsupportedKeys(
        "actor.optim.min_lr actor.lr_sched.min_lr", "the learning rate is constant, or falls to 0", (0, 0.0)
    ),
    UnsupportedKeys(
        "actor.lr_sched.lr_warmup_fraction", "rlhpc counts warm-up in steps: set actor.optim.lr_warmup_steps", (0, 0.0)
    ),
    UnsupportedKeys("actor.lr_sched.lr_decay_iters", "a schedule ends with the run", (None,)),
    UnsupportedKeys("actor.lr_sched.*", "the schedule has no such part", True),
    UnsupportedKeys(
        "actor.optim.total_training_steps actor.optim.num_cycles actor.optim.min_lr_rate actor.optim.lr_warmup_steps_ratio",
        "a schedule ends with the run, at 0, and rlhpc counts warm-up in steps (actor.optim.lr_warmup_steps)",
        (None, 0, 0.0, 0.5),
    ),
    UnsupportedKeys("actor.optim.*", "of Megatron's or FSDP's optimizer; only speed and memory", True),
    UnsupportedKeys(
        "actor.tokenizer.trust_remote_code",
        "set actor.model.trust_remote_code yourself where the model brings code of its own",
        True,
    ),
    UnsupportedKeys("actor.tokenizer.* reward.tokenizer.*", "the tokenizer comes with the model", True),
    UnsupportedKeys("actor.fsdp_config.*", "FSDP2 has its own way: float32 master weights, bfloat16 computation", True),
    UnsupportedKeys("actor.calculate_flops", "only a metric", True),
    UnsupportedKeys(
        "rollout.tensor_parallel_size rollout.pipeline_parallel_size", "an engine runs on one accelerator", (1,)
    ),
    UnsupportedKeys(
        "rollout.sglang.* rollout.vllm.*", "left to the engine (rollout.engine_kwargs takes vLLM's own arguments)", True
    ),
    UnsupportedKeys(
        "rollout.recompute_logprobs rollout.return_logprobs",
        "engines always return log-probs; algorithm.recompute_logprobs says which are used",
        True,
    ),
    UnsupportedKeys("rollout.*", "left to the engine; only speed, memory and logs", True),
    UnsupportedKeys("data.type", "problems are texts", ("math",)),
    UnsupportedKeys(
        "data.image_keys data.lazy_loading data.choice_key data.solution_key", "problems are texts, without pictures"
    ),
    UnsupportedKeys("data.shuffle", "prompts come in random order, each once an epoch", (True,)),
    UnsupportedKeys(
        "data.validation_shuffle data.num_workers data.seed data.val_rollout_batch_size data.dataset_name",
        "loading is the runner's; runner.seed says the order",
        True,
    ),
    UnsupportedKeys("reward.use_reward_model", "there is no reward model: register a reward of your own", (False,)),
    UnsupportedKeys(
        "reward.reward_scale reward.reward_min_val reward.reward_max_val",
        "of RLinf's reward: set the weight in reward.terms",
        (1.0,),
    ),
    UnsupportedKeys("reward.reward_weights.*", "rewards are terms with weights: add them to reward.terms"),
    UnsupportedKeys("inference.*", "the actor computes these log-probs itself", True),
    UnsupportedKeys(
        "runner.seq_length runner.max_tokens_per_mbs runner.enable_dynamic_batch_size",
        "in rollout.max_model_len and actor.max_tokens_per_micro_batch",
        True,
    ),
]

#: Unsupported keys of language models with a critic; unsupported keys of the actor are unsupported in the critic, too.
CRITIC = [
    UnsupportedKeys("critic.use_critic_model", "its place in cluster.component_placement says it", True),
    UnsupportedKeys("critic.seed", "runner.seed is for all groups", True),
    *(
        replace(
            unsupported,
            keys=unsupported.keys.replace("actor.", "critic."),
            reason=unsupported.reason.replace("actor.", "critic."),
        )
        for unsupported in LANGUAGE
        if unsupported.keys.startswith("actor.")
    ),
]

#: Unsupported keys of every run.
EVERYWHERE = [
    UnsupportedKeys("hydra.*", "Hydra's own", True),
    UnsupportedKeys("*.group_name", "groups have their components' names", True),
    UnsupportedKeys(
        "runner.logger.log_path runner.output_dir runner.per_worker_log* runner.logger.project_name runner.experiment_name",
        "all files of a run lie in runner.run_dir/runner.name",
        True,
    ),
    UnsupportedKeys("runner.only_eval", "rlhpc eval evaluates a checkpoint", (False,)),
    UnsupportedKeys(
        "runner.ckpt_path runner.eval_policy_path runner.expert_ckpt_path",
        "rlhpc does not read RLinf's checkpoints (runner.init_from takes rlhpc's)",
        (None, ""),
    ),
    UnsupportedKeys("runner.resume_dir", "rlhpc does not read RLinf's checkpoints", (None,)),
    UnsupportedKeys("runner.weight_sync_interval", "weights go to the rollout after every step", (1,)),
    UnsupportedKeys(
        "runner.use_training_pipeline",
        "set it yourself, with minibatches that fit (docs/how-to/simulators.md)",
        (False,),
    ),
    UnsupportedKeys("runner.local_update_steps runner.log_interval", "the runner is another one"),
    UnsupportedKeys("runner.seq_length runner.max_prompt_length", "embodied policies have no sequences", True),
    UnsupportedKeys(
        "cluster.node_groups", "write cluster.node_groups yourself: label, node_ranks, env_vars, python_interpreter"
    ),
    UnsupportedKeys("cluster.*", "Ray's or RLinf's scheduler; Slurm is the process manager here"),
    UnsupportedKeys("weight_syncer.*", "weights travel as rollout.weight_sync and weight_delta say; only speed", True),
    UnsupportedKeys("critic.use_critic_model", "there is no critic of its own", (False,)),
    UnsupportedKeys("critic.*", "there is no critic of its own"),
    UnsupportedKeys(
        "profile.* profiler.* tracer.*", "not a part of the configuration: see time/ in a run's metrics", True
    ),
    UnsupportedKeys("router_server_args.* reward.*", "there is no server for rewards"),
]
