"""Keys of RLinf without a counterpart, with the reasons. The first pattern that fits a key counts."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.cli.foreign.rules import Left

#: Of embodied runs.
EMBODIED = [
    Left("algorithm.huber_delta", "the value loss is the squared error, with no linear part"),
    Left(
        "algorithm.bootstrap_type",
        "an episode that ended is worth 0 from there on; one cut at its limit, the value of its last observation",
        ("standard",),
    ),
    Left("algorithm.clip_ratio_c", "RLinf's embodied loss uses it with GR00T N1.6 and N1.7 only", True),
    Left("algorithm.kl_beta algorithm.kl_penalty", "RLinf's embodied losses do not use it", True),
    Left("algorithm.value_clip algorithm.gae_lambda", "for a critic, which group estimators do without", True),
    Left(
        "algorithm.entropy_type", "entropy is averaged over what the policy loss takes for a token (logprob_type)", True
    ),
    Left("algorithm.loss_agg_func", "embodied losses are averaged over all tokens: token-mean", ("token-mean",)),
    Left(
        "algorithm.filter_rewards algorithm.rewards_*_bound algorithm.reward_*_bound",
        "groups whose mean reward is outside bounds are not filtered (algorithm.filter_groups is for language models)",
        (False,),
    ),
    Left(
        "algorithm.behave_weight_threshold",
        "RLinf leaves out what weighs more; algorithm.tis_cap caps the weight instead",
    ),
    Left(
        "algorithm.adv_type algorithm.normalize_advantages algorithm.reward_type algorithm.logprob_type "
        "algorithm.use_fixed_reset_state_ids algorithm.entropy_bonus",
        "SAC has no use for it",
        True,
    ),
    Left("algorithm.loss_type", "in runner.task_type", True),
    Left("actor.training_backend", "embodied policies are replicated on each rank", True),
    Left("algorithm.ratio_clip_eps", "clip_ratio_low and clip_ratio_high say it", True),
    Left("algorithm.critic_subsample_size", "there are two critics, and both are taken", (0, 2)),
    Left("algorithm.enable_drq actor.enable_drq", "pictures are not shifted at random", (False,)),
    Left("algorithm.train_actor_steps", "actor and critics train from the first update on"),
    Left("algorithm.eval_rollout_epoch", "in env.eval.num_episodes", True),
    Left("algorithm.rollout_epoch", "in algorithm.rollout_steps", True),
    Left("actor.compile_model actor.num_gpus actor.sync_weight_no_wait rollout.sync_weight_*", "only speed", True),
    Left("actor.enable_sft_co_train actor.sft_*", "no demonstrations are trained on beside PPO", (False,)),
    Left("env.*.group_size", "off-policy slots are drawn one by one", (1,)),
    Left("algorithm.reward_coef", "used by way of env.train.reward_coef", True),
    Left("algorithm.group_size", "used by way of env.train.group_size", True),
    Left(
        "algorithm.length_params.* algorithm.sampling_params.*",
        "for generation by a language model, which policies do not use",
        True,
    ),
    Left("algorithm.dagger.* algorithm.expert*", "not for this kind of run: rlhpc dagger"),
    Left(
        "algorithm.replay_buffer.sample_window_size algorithm.replay_buffer.cache_size",
        "RLinf counts trajectories, rlhpc counts transitions: set algorithm.replay_buffer.size",
    ),
    Left(
        "algorithm.replay_buffer.min_buffer_size",
        "RLinf counts trajectories, rlhpc counts transitions: set algorithm.replay_buffer.min_buffer_size",
    ),
    Left("algorithm.replay_buffer.*", "the buffer lies in memory, and in each checkpoint", True),
    Left(
        "algorithm.demo_buffer.*",
        "RLinf's demonstrations are in a format of its own: set algorithm.demo_buffer.load_path",
    ),
    Left(
        "algorithm.agg_q algorithm.actor_agg_q", "targets and actor take the smaller of the critics' values", ("min",)
    ),
    Left(
        "algorithm.q_head_type actor.model.q_head_type",
        "the critics are two networks on state and action",
        ("default",),
    ),
    Left("algorithm.entropy_tuning.optim.clip_grad", "the temperature's gradient is not clipped"),
    Left("algorithm.entropy_tuning.* algorithm.target_update_type", "as rlhpc has it", True),
    Left("actor.critic_optim.clip_grad", "actor and critics are clipped at actor.optim.clip_grad", (10.0,)),
    Left(
        "actor.critic_optim.lr_scheduler actor.optim.lr_scheduler",
        "the learning rate is constant, or falls linearly (algorithm.anneal_lr)",
        ("constant", "torch_constant"),
    ),
    Left("actor.critic_optim.lr_warmup_steps actor.optim.lr_warmup_steps", "embodied runs do not warm up", (-1, 0)),
    Left("actor.critic_optim.*", "actor and critics share Adam's other numbers"),
    Left("actor.optim.value_lr", "policy and critic share one learning rate"),
    Left(
        "actor.optim.critic_warmup_steps",
        "the critic does not train alone first (runner.init_from with bc_value_coef starts with one)",
        (0,),
    ),
    Left(
        "actor.optim.total_training_steps actor.optim.min_lr* actor.optim.num_cycles actor.optim.warmup_style",
        "for a schedule of the learning rate",
    ),
    Left("actor.optim.*", "not used by RLinf's optimizer of such runs", True),
    Left("actor.micro_batch_size", "off-policy batches are not cut; it only saves memory", True),
    Left(
        "actor.enable_offload rollout.enable_offload env.enable_offload env.*.enable_offload env.*.enable_init_offload",
        "each group keeps its memory; it only saves some",
        True,
    ),
    Left(
        "actor.fsdp_config.*", "embodied policies are replicated on each rank: it only concerns speed and memory", True
    ),
    Left("actor.model.precision", "the policy computes in float32", ("32", 32, "fp32")),
    Left("rollout.model.*", "the rollout has the actor's model", True),
    Left("actor.model.model_path", "such a policy starts from random weights", ("",)),
    Left(
        "actor.model.obs_dim actor.model.action_dim actor.model.state_dim actor.model.image_size",
        "the environment's spaces say it",
        True,
    ),
    Left("actor.model.hidden_dim", "RLinf's MLP has three layers of 256 whatever it says", (256,)),
    Left("actor.model.add_value_head actor.model.add_q_head", "algorithm and policy say it", True),
    Left("actor.model.lora_rank actor.model.lora_path actor.model.is_lora", "no adapters", ("", False, 32, None)),
    Left("actor.model.policy_setup actor.model.model_name", "names the robot, which the environment knows", True),
    Left(
        "actor.model.attn_implementation actor.model.low_cpu_mem_usage actor.model.use_cache",
        "only speed and memory",
        True,
    ),
    Left(
        "actor.model.trust_remote_code",
        "set actor.model.trust_remote_code yourself where the model brings code of its own",
        True,
    ),
    Left("actor.model.*", "of RLinf's model, which is built in another way here"),
    Left("rollout.backend rollout.generation_backend", "policies act by their own forward pass", ("huggingface",)),
    Left(
        "rollout.sampling_params.temperature_train rollout.sampling_params.temperature_eval rollout.sampling_params.top_*",
        "policies sample from their own distribution, and evaluate with its mode",
    ),
    Left("rollout.sampling_params.*", "for generation by a language model, which policies do not use", True),
    Left(
        "rollout.enable_torch_compile rollout.enable_cuda_graph rollout.enforce_eager rollout.gpu_memory_utilization",
        "only speed",
        True,
    ),
    Left("rollout.collect_* rollout.recompute_logprobs", "the runner knows what it needs", True),
    Left(
        "rollout.unnorm_key rollout.expert_model.* rollout.rlt_feature_model.*",
        "of RLinf's model, which is built in another way here",
    ),
    Left("env.train.video_cfg.* env.eval.video_cfg.*", "films are made in evaluation, into the run's folder", True),
    Left(
        "env.*.wrap_obs_mode", "observations are the simulator's own (env.train.kwargs.obs_mode)", ("simple", "default")
    ),
    Left("env.*.use_full_state", "observations are the simulator's own", (False,)),
    Left("env.*.init_params.num_envs env.*.init_params.max_episode_steps", "set from the environment's own keys", True),
    Left(
        "env.*.init_params.sim_backend env.*.init_params.render_mode env.*.init_params.control_mode",
        "the simulation runs on a GPU where there is one, and films ask for a renderer themselves",
        ("gpu", "auto", "all", "rgb_array", "None", None),
    ),
    Left(
        "env.*.is_eval env.*.reset_gripper_open",
        "objects come to rest with the gripper open before an episode begins",
        True,
    ),
    Left("env.*.use_ordered_reset_state_ids env.*.specific_reset_id", "states are drawn by the seed", (False, None)),
    Left("env.*.use_step_penalty", "LIBERO's reward is 1 at success and 0 before it", (False,)),
    Left(
        "env.eval.env_type env.eval.seed env.eval.group_size env.eval.auto_reset env.eval.use_rel_reward env.eval.reward_mode "
        "env.eval.reward_coef env.eval.rollout_epoch env.eval.max_steps_per_rollout_epoch env.eval.task_suite_name",
        "evaluation plays whole episodes, counts their own returns, and draws seeds of its own",
        True,
    ),
    Left("env.*.data_collection.*", "rlhpc record writes demonstrations (docs/how-to/demonstrations.md)", True),
    Left("env.train.rollout_epoch env.train.max_steps_per_rollout_epoch", "in algorithm.rollout_steps", True),
    Left("env.train.*  env.eval.* env.delay_sampler.*", "of RLinf's environment, which is another one here"),
    Left("reward.use_reward_model", "embodied rewards are the simulator's", (False,)),
    Left("reward.*", "embodied rewards are the simulator's; there is no reward model"),
    Left("data.*", "embodied runs read no data set", True),
]

#: Of language models.
LANGUAGE = [
    Left("runner.val_check_interval", "the workflow evaluates each checkpoint (runner.save_interval)", True),
    Left(
        "algorithm.early_stop_imp_ratio",
        "an update is not stopped by its ratios (algorithm.target_kl can stop a step's updates)",
    ),
    Left("algorithm.use_valid_token_scale", "losses are averaged as algorithm.loss_agg says", (False,)),
    Left("algorithm.calculate_entropy", "entropy is always computed", True),
    Left(
        "algorithm.*rollout_batch_size_per_gpu algorithm.logprob_forward_micro_batch_size",
        "batches are cut by tokens (actor.max_tokens_per_micro_batch); only speed and memory",
        True,
    ),
    Left("algorithm.shuffle_rollout", "responses are dealt to minibatches at random", (True,)),
    Left("algorithm.sampling_params.do_sample", "training samples", (True,)),
    Left("algorithm.sampling_params.min_new_tokens", "a response may end at once", (0, 1)),
    Left("algorithm.sampling_params.repetition_penalty", "engines sample without", (1.0,)),
    Left("algorithm.max_num_gen_batches", "groups are refilled as algorithm.filter_groups says", (1,)),
    Left(
        "algorithm.gae_lambda algorithm.value_* algorithm.critic_warmup_steps",
        "for a critic, which this run does not have",
        True,
    ),
    Left(
        "algorithm.n_minibatches algorithm.training_batch_size_per_gpu",
        "in actor.global_batch_size and actor.max_tokens_per_micro_batch",
        True,
    ),
    Left(
        "actor.global_batch_size actor.micro_batch_size",
        "RLinf computes it from data.rollout_batch_size and algorithm.n_minibatches",
        True,
    ),
    Left(
        "actor.megatron.* actor.mcore_gpt actor.spec_name actor.variable_seq_lengths",
        "Megatron's; rlhpc trains with FSDP2 or DeepSpeed",
        True,
    ),
    Left(
        "actor.model.*_parallel* actor.model.*parallel_size actor.model.sequence_parallel",
        "rlhpc shards weights over all actor ranks, and does not cut layers or sequences",
        True,
    ),
    Left(
        "actor.model.moe_aux_loss_coeff actor.model.moe_router_bias_update_rate",
        "there is no loss or bias for the experts' balance",
        (0, 0.0),
    ),
    Left(
        "actor.model.recompute_* actor.model.moe_* actor.model.*fusion actor.model.use_cpu_initialization "
        "actor.model.batch_p2p_comm actor.model.variable_seq_lengths actor.model.init_method_std "
        "actor.model.multi_latent_attention actor.model.persist_layer_norm",
        "Megatron's; transformers builds the model from its own folder",
        True,
    ),
    Left(
        "actor.model.activation actor.model.normalization actor.model.position_embedding_type actor.model.add_bias_linear "
        "actor.model.attention_softmax_in_fp32 actor.model.model_type actor.model.seq_length actor.model.encoder_seq_length "
        "actor.model.megatron_checkpoint actor.model.sharding_strategy rollout.model.model_type",
        "the model's own folder says it",
        True,
    ),
    Left("actor.model.lora_rank actor.model.lora_path", "no adapters", True),
    Left(
        "actor.offload_* actor.enable_offload",
        "collocated groups make room for one another by actor.offload_in_rollout; only memory",
        True,
    ),
    Left("actor.optim.min_lr actor.lr_sched.min_lr", "the learning rate is constant, or falls to 0", (0, 0.0)),
    Left(
        "actor.lr_sched.lr_warmup_fraction", "rlhpc counts warm-up in steps: set actor.optim.lr_warmup_steps", (0, 0.0)
    ),
    Left("actor.lr_sched.lr_decay_iters", "a schedule ends with the run", (None,)),
    Left("actor.lr_sched.*", "the schedule has no such part", True),
    Left(
        "actor.optim.total_training_steps actor.optim.num_cycles actor.optim.min_lr_rate actor.optim.lr_warmup_steps_ratio",
        "a schedule ends with the run, at 0, and rlhpc counts warm-up in steps (actor.optim.lr_warmup_steps)",
        (None, 0, 0.0, 0.5),
    ),
    Left("actor.optim.*", "of Megatron's or FSDP's optimizer; only speed and memory", True),
    Left(
        "actor.tokenizer.trust_remote_code",
        "set actor.model.trust_remote_code yourself where the model brings code of its own",
        True,
    ),
    Left("actor.tokenizer.* reward.tokenizer.*", "the tokenizer comes with the model", True),
    Left("actor.fsdp_config.*", "FSDP2 has its own way: float32 master weights, bfloat16 computation", True),
    Left("actor.calculate_flops", "only a metric", True),
    Left("rollout.tensor_parallel_size rollout.pipeline_parallel_size", "an engine runs on one accelerator", (1,)),
    Left(
        "rollout.sglang.* rollout.vllm.*", "left to the engine (rollout.engine_kwargs takes vLLM's own arguments)", True
    ),
    Left(
        "rollout.recompute_logprobs rollout.return_logprobs",
        "engines always return log-probs; algorithm.recompute_logprobs says which are used",
        True,
    ),
    Left("rollout.*", "left to the engine; only speed, memory and logs", True),
    Left("data.type", "problems are texts", ("math",)),
    Left("data.image_keys data.lazy_loading data.choice_key data.solution_key", "problems are texts, without pictures"),
    Left("data.shuffle", "prompts come in random order, each once an epoch", (True,)),
    Left(
        "data.validation_shuffle data.num_workers data.seed data.val_rollout_batch_size data.dataset_name",
        "loading is the runner's; runner.seed says the order",
        True,
    ),
    Left("reward.use_reward_model", "there is no reward model: register a reward of your own", (False,)),
    Left(
        "reward.reward_scale reward.reward_min_val reward.reward_max_val",
        "of RLinf's reward: set the weight in reward.terms",
        (1.0,),
    ),
    Left("reward.reward_weights.*", "rewards are terms with weights: add them to reward.terms"),
    Left("inference.*", "the actor computes these log-probs itself", True),
    Left(
        "runner.seq_length runner.max_tokens_per_mbs runner.enable_dynamic_batch_size",
        "in rollout.max_model_len and actor.max_tokens_per_micro_batch",
        True,
    ),
]

#: Of language models' runs with a value model: what is left out of the actor's section is left out of the critic's, too.
CRITIC = [
    Left("critic.use_critic_model", "its place in cluster.component_placement says it", True),
    Left("critic.seed", "runner.seed is for all groups", True),
    *(
        replace(entry, keys=entry.keys.replace("actor.", "critic."), why=entry.why.replace("actor.", "critic."))
        for entry in LANGUAGE
        if entry.keys.startswith("actor.")
    ),
]

#: Of every run.
EVERYWHERE = [
    Left("hydra.*", "Hydra's own", True),
    Left("*.group_name", "groups have their components' names", True),
    Left(
        "runner.logger.log_path runner.output_dir runner.per_worker_log* runner.logger.project_name runner.experiment_name",
        "all files of a run lie in runner.run_dir/runner.name",
        True,
    ),
    Left("runner.only_eval", "rlhpc eval evaluates a checkpoint", (False,)),
    Left(
        "runner.ckpt_path runner.eval_policy_path runner.expert_ckpt_path",
        "rlhpc does not read RLinf's checkpoints (runner.init_from takes rlhpc's)",
        (None, ""),
    ),
    Left("runner.resume_dir", "rlhpc does not read RLinf's checkpoints", (None,)),
    Left("runner.weight_sync_interval", "weights go to the rollout after every step", (1,)),
    Left(
        "runner.use_training_pipeline",
        "set it yourself, with minibatches that fit (docs/how-to/simulators.md)",
        (False,),
    ),
    Left("runner.local_update_steps runner.log_interval", "the runner is another one"),
    Left("runner.seq_length runner.max_prompt_length", "embodied policies have no sequences", True),
    Left("cluster.node_groups", "write cluster.node_groups yourself: label, node_ranks, env_vars, python_interpreter"),
    Left("cluster.*", "Ray's or RLinf's scheduler; Slurm is the process manager here"),
    Left("weight_syncer.*", "weights travel as rollout.weight_sync and weight_delta say; only speed", True),
    Left("critic.use_critic_model", "there is no critic of its own", (False,)),
    Left("critic.*", "there is no critic of its own"),
    Left("profile.* profiler.* tracer.*", "not a part of the configuration: see time/ in a run's metrics", True),
    Left("router_server_args.* reward.*", "there is no server for rewards"),
]
