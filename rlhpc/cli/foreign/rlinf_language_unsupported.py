"""RLinf keys of language models without a counterpart in rlhpc, with the reasons. The first pattern that matches applies."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.cli.foreign.rlinf_unsupported_embodied import FSDP_KEYS, keys_below
from rlhpc.cli.foreign.rules import UnsupportedKeys

#: Keys of RLinf's Megatron trainer: processes, checkpoints and profiles.
_MEGATRON_KEYS = (
    "megatron.{accumulate_allreduce_grads_in_fp32,ckpt_format,ddp_bucket_size,distributed_backend,"
    "distributed_timeout_minutes,mbridge,tp_comm_bootstrap_backend,tp_comm_overlap_cfg,use_dist_ckpt,use_hf_ckpt,"
    "use_profiler} megatron.ckpt_convertor.{model,model_type,hf_model_path,save_path,tensor_model_parallel_size,"
    "pipeline_model_parallel_size,expert_model_parallel_size,expert_tensor_parallel_size,grouped_gemm,process_num,"
    "te_ln_add_extra_state,te_ln_linear_mlp_fc1,te_ln_linear_qkv,use_gpu_index,use_gpu_num} "
    "megatron.profiler.{activities,chrome_filename_prefix,export_chrome_trace,export_tensorboard,output_dir,"
    "profile_memory,record_shapes,schedule_wait,schedule_active,schedule_repeat,schedule_warmup,with_flops,with_modules,"
    "with_stack}"
)
_TOKENIZER_KEYS = "tokenizer.{tokenizer_model,tokenizer_path,use_fast,padding_side}"
#: Keys of RLinf's engines that concern speed, memory and addresses.
_ENGINE_KEYS = (
    "sglang.{attention_backend,decode_log_interval,serving_mode,tool_call_parser,torch_compile_max_bs,use_torch_compile} "
    "sglang.server.{host,port} vllm.{attention_backend,enable_chunked_prefill,enable_flash_infer_sampler,"
    "enable_prefix_caching,max_num_batched_tokens,torch_profiler_dir}"
)
_TRAINER = [
    UnsupportedKeys(
        f"{keys_below('actor', _MEGATRON_KEYS)} actor.mcore_gpt actor.spec_name actor.variable_seq_lengths",
        "Megatron's; rlhpc trains with FSDP2 or DeepSpeed",
        True,
    ),
    UnsupportedKeys(
        "actor.model.{pipeline_model_parallel_size,virtual_pipeline_model_parallel_size}",
        "layers are sharded over the ranks, not divided among them: only speed and memory",
        True,
        missing_feature=r"pipeline.?parallel|parallel\.pipeline",
    ),
    UnsupportedKeys(
        "actor.model.expert_tensor_parallel_size actor.model.sequence_parallel actor.sequence_parallel",
        "follows from actor.parallel: only speed and memory",
        True,
    ),
    UnsupportedKeys(
        "actor.model.moe_router_bias_update_rate",
        "no bias keeps the experts' load even",
        (0, 0.0, None),
        missing_feature=r"router_bias|bias_update",
    ),
    UnsupportedKeys(
        "actor.model.{recompute_granularity,recompute_method,recompute_num_layers,moe_grouped_gemm,moe_permute_fusion,"
        "moe_router_load_balancing_type,moe_router_pre_softmax,moe_router_topk,moe_token_dispatcher_type,apply_rope_fusion,"
        "bias_activation_fusion,bias_dropout_fusion,gradient_accumulation_fusion,use_cpu_initialization} "
        "actor.model.batch_p2p_comm actor.model.variable_seq_lengths actor.model.init_method_std actor.model.qk_layernorm "
        "actor.model.multi_latent_attention actor.model.persist_layer_norm actor.model.add_qkv_bias",
        "Megatron's; transformers builds the model from its own folder",
        True,
    ),
    UnsupportedKeys(
        "actor.model.activation actor.model.normalization actor.model.position_embedding_type actor.model.add_bias_linear "
        "actor.model.attention_softmax_in_fp32 actor.model.model_type actor.model.seq_length actor.model.encoder_seq_length "
        "actor.model.megatron_checkpoint actor.model.sharding_strategy",
        "the model's own folder says it",
        True,
    ),
    UnsupportedKeys(
        "actor.model.attn_implementation", "only speed: set actor.model.attn_implementation yourself", True
    ),
    UnsupportedKeys("actor.model.lora_rank actor.model.is_lora", "no adapters are trained", (False, None)),
    UnsupportedKeys("actor.model.lora_path", "rlhpc trains new adapters", ("", None)),
    UnsupportedKeys(
        "actor.model.add_value_head actor.model.value_head",
        "the critic is a group of its own, or actor.model.value_head",
        (False, None),
    ),
    UnsupportedKeys(
        "actor.{offload_optimizer,offload_weight,offload_grad,enable_offload}",
        "collocated groups make room for one another by actor.offload_in_rollout; only memory",
        True,
    ),
    UnsupportedKeys(
        "actor.lr_sched.lr_warmup_init",
        "the learning rate rises from 0",
        (0, 0.0, None),
        missing_feature=r"warmup_init",
    ),
    UnsupportedKeys(
        "actor.lr_sched.max_lr", "RLinf takes the learning rate from optim.lr (config.py, validate_megatron_cfg)", True
    ),
    UnsupportedKeys(
        "actor.lr_sched.{start_weight_decay,end_weight_decay,weight_decay_incr_style}",
        "the weight decay is constant: actor.optim.weight_decay",
        True,
    ),
    UnsupportedKeys("actor.lr_sched.*", "the schedule has no such part", missing_feature=r"lr_sched\."),
    UnsupportedKeys("actor.optim.num_cycles", "a cosine falls once", (None, 0.5), missing_feature=r"num_cycles"),
    UnsupportedKeys("actor.optim.value_lr", "RLinf reads it for models with a value head", True),
    UnsupportedKeys("actor.optim.warmup_style", "RLinf's trainer does not read it", True),
    UnsupportedKeys(
        "actor.optim.{bf16,fp16,loss_scale,initial_loss_scale,loss_scale_window,overlap_grad_reduce,overlap_param_gather,"
        "overlap_param_gather_with_optimizer_step,optimizer_cpu_offload,optimizer_enable_pin,use_distributed_optimizer,"
        "use_precision_aware_optimizer,lr_warmup_steps_ratio}",
        "of Megatron's optimizer; only speed and memory: weights are float32, and the loss scale is actor.grad_scaler",
        True,
    ),
    UnsupportedKeys(
        "actor.tokenizer.trust_remote_code actor.model.trust_remote_code",
        "set actor.model.trust_remote_code yourself where the model brings code of its own",
        True,
    ),
    UnsupportedKeys(keys_below("actor", _TOKENIZER_KEYS), "the tokenizer comes with the model", True),
    UnsupportedKeys(keys_below("actor", FSDP_KEYS), "FSDP2 has its own way: float32 master weights", True),
    UnsupportedKeys("actor.calculate_flops", "only a metric", True),
]

#: Unsupported keys of language models.
LANGUAGE_KEYS = [
    UnsupportedKeys(
        "runner.val_check_interval",
        "RLinf reads it, and evaluates nothing; the workflow evaluates each checkpoint, and runner.val_check_interval "
        "evaluates during training",
        True,
    ),
    UnsupportedKeys("algorithm.use_valid_token_scale", "used by way of algorithm.loss_agg", True),
    UnsupportedKeys(
        "algorithm.{rollout_batch_size_per_gpu,val_rollout_batch_size_per_gpu,logprob_forward_micro_batch_size} "
        "algorithm.training_batch_size_per_gpu",
        "batches are cut by tokens (actor.max_tokens_per_micro_batch); only speed and memory",
        True,
    ),
    UnsupportedKeys("algorithm.sampling_params.do_sample", "training samples", (True,)),
    UnsupportedKeys(
        "algorithm.sampling_params.min_new_tokens",
        "a response may end at once",
        (0, 1),
        missing_feature=r"min_new_tokens",
    ),
    UnsupportedKeys(
        "algorithm.sampling_params.repetition_penalty",
        "engines sample without",
        (1.0,),
        missing_feature=r"repetition.?penalty",
    ),
    UnsupportedKeys(
        "algorithm.sampling_params.stop algorithm.sampling_params.stop_token_ids",
        "a response ends at the model's own end tokens (generation_config.json), and of an agent at its stop texts",
        missing_feature=r"key rollout\.stop",
    ),
    UnsupportedKeys("algorithm.max_num_gen_batches", "groups are refilled as algorithm.filter_groups says", (1,)),
    UnsupportedKeys(
        "algorithm.{clip_log_ratio_min,clip_log_ratio_max}",
        "log-ratios are not clipped by themselves",
        (None, 20, -20),
        missing_feature=r"log.?ratio",
    ),
    UnsupportedKeys(
        "algorithm.down_sampling.do_down_sampling",
        "all responses of a group are trained on",
        (False,),
        missing_feature=r"down.?sampl",
    ),
    UnsupportedKeys(
        "algorithm.down_sampling.*",
        "part of RLinf's choice among the responses of a group",
        missing_feature=r"down.?sampl",
    ),
    UnsupportedKeys(
        "algorithm.gae_lambda algorithm.value_clip algorithm.value_cliprange algorithm.critic_warmup_steps "
        "algorithm.use_critic algorithm.use_value_loss",
        "for a critic, which this run does not have",
        True,
    ),
    UnsupportedKeys("algorithm.n_minibatches", "in actor.global_batch_size", True),
    UnsupportedKeys(
        "actor.global_batch_size actor.micro_batch_size critic.global_batch_size critic.micro_batch_size",
        "RLinf computes it from data.rollout_batch_size and algorithm.n_minibatches",
        True,
    ),
    UnsupportedKeys("actor.pack_traj", "turns that share a beginning are always trained on together", True),
    *_TRAINER,
    UnsupportedKeys(
        "rollout.pipeline_parallel_size",
        "an engine's ranks divide each layer: rollout.parallel.tensor",
        (1, None),
        missing_feature=r"pipeline.?parallel|parallel\.pipeline",
    ),
    UnsupportedKeys(
        keys_below("rollout", _ENGINE_KEYS),
        "left to the engine (rollout.engine_kwargs takes vLLM's own arguments)",
        True,
    ),
    UnsupportedKeys(
        "rollout.recompute_logprobs rollout.return_logprobs",
        "engines always return log-probs; algorithm.recompute_logprobs says which are used",
        True,
    ),
    UnsupportedKeys(
        "rollout.custom_chat_template",
        "the chat template is the tokenizer's: put it into tokenizer_config.json",
        (None, ""),
        missing_feature=r"custom_chat_template|model\.chat_template",
    ),
    UnsupportedKeys(
        "rollout.model.{model_path,model_type} rollout.distributed_executor_backend rollout.disable_log_stats "
        "rollout.detokenize rollout.padding rollout.eos rollout.weight_reload "
        "rollout.{validate_weight,validate_weight_first_sync} rollout.validate_save_dir rollout.print_outputs "
        "rollout.cuda_graph_max_bs rollout.seed rollout.is_eval rollout.group_name",
        "left to the engine; only speed, memory and logs",
        True,
    ),
    UnsupportedKeys("data.type", "the columns say whether prompts have pictures", ("math", "vlm")),
    UnsupportedKeys("data.solution_key", "RLinf's reward does not read it", True),
    UnsupportedKeys("data.lazy_loading", "only memory", True),
    UnsupportedKeys(
        "data.shuffle",
        "prompts come in random order, each once an epoch",
        (True,),
        missing_feature=r"key data\.(train\.)?shuffle",
    ),
    UnsupportedKeys("data.dataset_name", "the columns are named by data.train", True),
    UnsupportedKeys(
        "data.apply_chat_template_kwargs",
        "the chat template is called without arguments",
        ({}, None),
        missing_feature=r"chat_template_kwargs",
    ),
    UnsupportedKeys("data.data_size", "all problems are used", (-1, None)),
    UnsupportedKeys(
        "data.validation_shuffle data.num_workers data.seed data.val_rollout_batch_size "
        "data.{process_workers,process_batch_size}",
        "loading is the runner's; runner.seed says the order",
        True,
    ),
    UnsupportedKeys(
        f"{keys_below('reward', _TOKENIZER_KEYS)} reward.tokenizer.trust_remote_code",
        "the tokenizer comes with the model",
        True,
    ),
    UnsupportedKeys("reward.use_reward_model", "RLinf has no reward models for language models", (False,)),
    UnsupportedKeys("reward.use_prompt", "rewards always see the prompt", True),
    UnsupportedKeys(
        "reward.reward_scale reward.reward_min_val reward.reward_max_val",
        "of RLinf's reward: set the weight in reward.terms",
        (1.0,),
    ),
    UnsupportedKeys("reward.reward_weights.*", "a term of weight 0 is left out", (0, 0.0), any_name=True),
    UnsupportedKeys(
        f"inference.{{group_name,load_from_actor,model_type}} inference.model.{{model_path,model_type,precision,is_lora,"
        f"tensor_model_parallel_size,pipeline_model_parallel_size,sequence_parallel}} {keys_below('inference', FSDP_KEYS)} "
        f"{keys_below('inference', _TOKENIZER_KEYS)} inference.tokenizer.trust_remote_code",
        "the actor computes these log-probs itself, or the group reference",
        True,
    ),
    UnsupportedKeys(
        "runner.seq_length runner.max_tokens_per_mbs runner.enable_dynamic_batch_size",
        "in rollout.max_model_len and actor.max_tokens_per_micro_batch",
        True,
    ),
    UnsupportedKeys(
        "cluster.auto_scheduler cluster.use_pre_process_policy cluster.use_wait_before_last_iter_policy "
        "cluster.recreate_nccl_groups",
        "RLinf moves accelerators between groups while it runs; only speed (cluster.elastic lets ranks join)",
        True,
    ),
    UnsupportedKeys(
        "profile_data.*", "RLinf's estimates of speed, by which it moves accelerators", True, any_name=True
    ),
    UnsupportedKeys("critic.use_critic_model", "no critic is placed", (False,)),
]


def _select_group(entries: list[UnsupportedKeys], group: str) -> list[UnsupportedKeys]:
    """Returns the entries of the actor for another trained group."""
    return [
        replace(
            entry,
            keys=entry.keys.replace("actor.", f"{group}."),
            reason=entry.reason.replace("actor.", f"{group}."),
        )
        for entry in entries
    ]


#: Unsupported keys of language models with a critic.
CRITIC_KEYS = [
    UnsupportedKeys("critic.use_critic_model", "its place in cluster.component_placement says it", True),
    UnsupportedKeys("critic.seed", "runner.seed is for all groups", True),
    *_select_group(_TRAINER, "critic"),
]

_OWN_JUDGE = "an agent asks its judge by itself: start the judge's server as one of agent.services"
#: Unsupported keys of agents.
AGENT_KEYS = [
    UnsupportedKeys("*.group_name", "groups have their components' names", True, any_name=True),
    UnsupportedKeys("agentloop.print_outputs", "rlhpc report shows the episodes", True),
    UnsupportedKeys("agentloop.is_dynamic_rollout_batch", "an episode always has as many turns as it takes", True),
    UnsupportedKeys("agentloop.max_user_turns", "the model's turns are counted (agent.max_turns)", (None,)),
    UnsupportedKeys("agentloop.max_parallel_calls", "all calls of a turn are answered"),
    UnsupportedKeys("agentloop.continue_at_tool_failure", "the model reads a tool's error, and goes on", (True,)),
    UnsupportedKeys(
        "agentloop.max_tool_response_length agentloop.tool_response_truncate_side",
        "the environment tools cuts long results at their end, by characters (agent.kwargs.max_characters)",
    ),
    UnsupportedKeys(
        "agentloop.use_local_judge",
        _OWN_JUDGE,
        (False,),
    ),
    UnsupportedKeys(
        "agentloop.*", "part of RLinf's agent, which is a program: write yours (docs/how-to/train-your-agent.md)"
    ),
    UnsupportedKeys("agentlightning.n_runners", "agent.episodes_per_rank says how many episodes run at a time", True),
    UnsupportedKeys(
        "tools.codejudge.{concurrency_limit,host_addr,host_port}",
        "programs run in rlhpc's sandbox, on the rollout's own nodes",
        True,
    ),
    UnsupportedKeys("tools.mcp_file_system", "agent.servers names MCP servers", (None,)),
    UnsupportedKeys("tools.*", "part of RLinf's tools, which are programs"),
    UnsupportedKeys(
        "rollout_server.{online_router,tracking_rollout}.{host,port}",
        "rlhpc's endpoint has a free port (docs/how-to/train-your-agent.md)",
        True,
    ),
    UnsupportedKeys("rollout_judge.model.model_path", _OWN_JUDGE),
    UnsupportedKeys("rollout_judge.*", _OWN_JUDGE, True, any_name=True),
    UnsupportedKeys(
        "rollout_fixed_worker.model.model_path rollout.use_fixed_worker",
        "the roles of an episode share a model, or are adapters of one (agent.policies)",
        (False,),
    ),
    UnsupportedKeys(
        "rollout_fixed_worker.*", "the engine of a second model, which this run does not have", True, any_name=True
    ),
    UnsupportedKeys(
        "data.is_* data.unique_columns data.norm_column", "part of RLinf's agent, which gets the columns as task.meta"
    ),
    UnsupportedKeys("data.type", "the agent says what its problems are", True),
    UnsupportedKeys("eval", "this file trains", (False,)),
]

#: Unsupported keys of files that only evaluate a model.
EVALUATION_KEYS = [
    UnsupportedKeys("eval data.validation_shuffle", "rlhpc eval evaluates all problems once", True),
    UnsupportedKeys(
        "algorithm.{adv_type,advantage_mode,loss_agg_func,loss_scales,loss_type,clip_ratio_c,clip_ratio_high,clip_ratio_low,"
        "ratio_clip_eps,clip_log_ratio_min,clip_log_ratio_max,kl_beta,kl_penalty_type,entropy_bonus,calculate_entropy,"
        "normalize_advantages,early_stop_imp_ratio,shuffle_rollout,recompute_logprobs,use_valid_token_scale} "
        "data.train_data_paths data.shuffle data.rollout_batch_size "
        "runner.{save_interval,max_steps,max_epochs,max_tokens_per_mbs,enable_dynamic_batch_size}",
        "for training",
        True,
    ),
    UnsupportedKeys("actor.* critic.* inference.*", "for training", True, any_name=True),
    UnsupportedKeys("data.data_size", "all problems are used", (-1, None)),
    UnsupportedKeys(
        "algorithm.group_size algorithm.sampling_params.temperature "
        "data.{prompt_key,answer_key,apply_chat_template,use_chat_template}",
        "of suites, and data.val_data_paths names none",
        True,
    ),
]

#: Unsupported keys of supervised runs.
SUPERVISED_KEYS = [
    UnsupportedKeys("algorithm.{adv_type,sampling_params.temperature}", "RLinf's supervised runs do not read it", True),
    UnsupportedKeys("actor.eval_batch_size", "only speed and memory", True),
    UnsupportedKeys(
        "actor.micro_batch_size", "micro-batches are cut by tokens (actor.max_tokens_per_micro_batch)", True
    ),
    UnsupportedKeys(
        "actor.model.trainable_modules",
        "all weights are trained, or all but the vision tower (actor.model.freeze_vision), or adapters "
        "(actor.lora.target_modules)",
        (None,),
        missing_feature=r"trainable_modules",
    ),
    UnsupportedKeys(
        "actor.model.format_ce_coef actor.model.{sample_reweight,success_head,extra_label_loss}.enabled "
        "actor.model.sample_reweight.{use_meta_sample_weight,success_weight,non_success_weight} "
        "actor.model.sample_reweight.target_label_ratio.{positive,negative,unclear}",
        "the loss is the mean over the response's tokens, each of the same weight",
        (False, None),
        missing_feature=r"sample_reweight|ce_coef|key data\.train\.weight",
    ),
    UnsupportedKeys(
        "data.video_* data.data_root",
        "models look at pictures, not at videos: write a video's frames into a column of pictures (data.train.images_key)",
        (None,),
        missing_feature=r"^sft .*\b(video|film)s?\b",
    ),
    UnsupportedKeys("data.image_keys", "prompts have no pictures", ([], None)),
    UnsupportedKeys(
        "data.answer_separator",
        "a response follows the prompt without a separator",
        ("", None),
        missing_feature=r"answer_separator",
    ),
    *[entry for entry in LANGUAGE_KEYS if not entry.keys.startswith(("runner.val", "actor.global"))],
]
