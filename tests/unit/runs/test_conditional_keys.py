"""Keys without effect: the tables say of every key whether it is always read, and the user is told of those that are not."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path

import pytest

from rlhpc.runs.conditional_keys import find_unused
from rlhpc.runs.task_type import all_task_types
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ("base", "site", "sweeps")
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in TEMPLATES)

#: Keys that every run with such a key reads, whatever else it says. Who adds a key says here that it is one of them, or adds a
#: row to the table of its kind of run (`conditions.py` of `language`, `embodied` or `runs`).
ALWAYS_READ = """
runner.alerts.command runner.alerts.webhook runner.alerts.silenced runner.alerts.rules
runner.trace.steps runner.trace.profile.groups runner.trace.profile.nsys
groups cluster.* workflow.eval_job.* workflow.convert_job.* workflow.eval_suites workflow.suites workflow.sft
workflow.eval_start workflow.demos_expert workflow.record_episodes
env.train.intervene.source algorithm.minibatches_per_step algorithm.success_classifier.train

runner.task_type runner.name runner.run_dir runner.seed runner.tf32 runner.max_steps runner.save_interval runner.async_save
runner.keep_checkpoints runner.keep_best runner.patience runner.resume_dir runner.segments
runner.max_restarts runner.on_nonfinite runner.save_reserve_s
runner.rendezvous_timeout_s runner.step_timeout_s runner.logger.* runner.val_check_interval runner.init_from runner.stop_return
runner.deterministic runner.enable_decoupled_mode runner.use_training_pipeline runner.weight_sync_interval

algorithm.name algorithm.kwargs algorithm.loss_type algorithm.loss_agg algorithm.loss_kwargs algorithm.beta
algorithm.clip_ratio_high
algorithm.entropy_coef algorithm.update_epochs algorithm.group_size algorithm.recompute_logprobs algorithm.filter_groups
algorithm.max_refills algorithm.overlong_buffer algorithm.overlong_filter algorithm.max_staleness algorithm.anneal_lr
algorithm.corrections
algorithm.target_kl algorithm.rollout_steps algorithm.rollout_parts algorithm.logprob_type algorithm.bc_loss
algorithm.bc_value_coef algorithm.value_model algorithm.critic_actor_ratio algorithm.update_to_data algorithm.offline_steps
algorithm.random_steps algorithm.random_shift algorithm.n_step
algorithm.replay_buffer.* algorithm.demo_buffer.load_path algorithm.filter_rewards

data.train.source data.train.kwargs data.train.size data.train.seed data.train.eval_fraction data.train.chat_template
data.train.prompt_template data.train.system_prompt data.train.images_key data.train.chosen_key data.train.rejected_key
data.train.margin_key data.train.label_key data.eval data.max_prompt_tokens data.overlong_prompts data.prompts_per_step
demos.* reward.terms reward.timeout_s reward.failed reward.max_failed_steps reward.processes reward.process_terms
reference.update_interval

rollout.batch_invariant rollout.quantization
rollout.rollout_backend rollout.engine_kwargs rollout.dtype rollout.max_batch_size rollout.max_model_len rollout.max_new_tokens
rollout.top_p rollout.top_k rollout.temperature rollout.agent rollout.weight_sync rollout.weight_delta rollout.parallel.*
rollout.probe_interval rollout.probe_tolerance rollout.merge_adapters rollout.routing_replay rollout.pipeline_stage_num
rollout.enable_offload

env.train.env_type env.train.env_id env.train.max_episode_steps env.train.kwargs env.train.wrappers
env.train.ignore_terminations env.train.simulator_python env.train.num_envs
env.train.seed env.train.group_size env.train.use_fixed_reset_state_ids
env.train.use_rel_reward env.train.simulators env.train.simulator_timeout_s env.train.reward_model env.train.auto_reset
env.eval.env_type env.eval.env_id env.eval.max_episode_steps env.eval.kwargs env.eval.wrappers env.eval.ignore_terminations
env.eval.simulator_python env.eval.num_envs env.eval.seed env.eval.group_size env.eval.use_fixed_reset_state_ids
env.eval.simulators env.eval.simulator_timeout_s env.eval.num_episodes env.eval.noise env.eval.video_episodes
env.eval.real_time_chunking.inference_delay

actor.training_backend actor.global_batch_size actor.micro_batch_size actor.max_tokens_per_micro_batch actor.use_remove_padding
actor.share_prefixes actor.enable_dp_load_balance actor.compile actor.kernels actor.offload_in_rollout actor.enable_offload
actor.parallel.* actor.lora.rank
actor.model.model_type actor.model.kwargs actor.model.num_action_chunks actor.model.log_std_init
actor.model.normalize_observations actor.model.gradient_checkpointing
actor.model.router_aux_loss_coef actor.model.freeze_vision actor.model.value_head
actor.optim.name actor.optim.lr actor.optim.adam_* actor.optim.weight_decay actor.optim.clip_grad
actor.optim.lr_scheduler actor.optim.lr_warmup_steps
actor.optim.critic_warmup_steps
"""
#: Keys that one kind of run always reads, and another under a condition.
SOMETIMES_READ = """
actor.capture_graphs actor.optim.value_lr algorithm.bootstrap_type
actor.model.activation actor.model.attn_implementation actor.model.critic_hidden_sizes actor.model.dtype
actor.model.hidden_sizes actor.model.model_path actor.model.trust_remote_code algorithm.adv_type algorithm.gamma
algorithm.normalize_advantages algorithm.tis_cap algorithm.value_coef env.train.reward_scale data.train.path data.train.split
data.train.prompt_key data.train.response_key data.train.level_key data.train.tools_key
"""


ALWAYS, SOMETIMES = ALWAYS_READ.split(), SOMETIMES_READ.split()


def is_always_read(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in ALWAYS)


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_each_key_is_always_read_or_has_a_condition(kind) -> None:
    conditional = {key for key in kind.schema.keys if any(row.matches(key) for row in kind.checks.conditions)}
    always = {key for key in kind.schema.keys if is_always_read(key)}
    assert {*kind.schema.keys} - conditional - always - {*SOMETIMES} == set(), "say of each when it is read"
    assert conditional & always == set(), "either or"
    patterns = [pattern for row in kind.checks.conditions for pattern in row.keys]
    dead = [pattern for pattern in patterns if not fnmatch.filter(kind.schema.keys, pattern)]
    assert dead == [], "no such key"


def test_what_is_listed_exists() -> None:
    keys = [key for kind in all_task_types() for key in kind.schema.keys]
    assert [pattern for pattern in (*ALWAYS, *SOMETIMES) if not fnmatch.filter(keys, pattern)] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_that_come_with_the_package_set_nothing_in_vain(path: Path) -> None:
    assert find_unused(path, []) == []


CRITIC = ["algorithm.adv_type=gae", "cluster.component_placement={actor: 0, rollout: 0, critic: 0}"]
DISTILS = ["algorithm.name=distillation", "teacher.model.model_path=builtin:tiny"]
DEMO, CARTPOLE, SAC, BC = (
    f"configs/{name}.yaml"
    for name in ("reasoning/demo", "quickstart", "embodied/pendulum_sac", "embodied/cartpole_swingup_bc")
)
#: Configuration, overrides under which a key is read, overrides under which it is not, the key, and a value.
ROWS = [
    (DEMO, ["rollout.agent=tools"], [], "rollout.max_turns", "4"),
    (DEMO, ["agent.kind=python"], [], "agent.timeout_s", "4"),
    (DEMO, ["agent.kind=python"], [], "agent.max_turns", "4"),
    (DEMO, ["algorithm.max_staleness=1"], [], "rollout.keep_cache_on_update", "true"),
    (DEMO, ["rollout.agent=tools"], [], "algorithm.credit", "turn"),
    (DEMO, ["rollout.agent=tools", "algorithm.credit=turn"], ["rollout.agent=tools"], "algorithm.turn_gamma", "0.5"),
    (DEMO, ["algorithm.credit=state"], ["algorithm.credit=turn"], "algorithm.turn_coef", "0.5"),
    (DEMO, CRITIC, [], "critic.warmup_steps", "2"),
    (DEMO, [*CRITIC, "critic.training_backend=fsdp"], CRITIC, "critic.fsdp.cpu_offload", "true"),
    (DEMO, DISTILS, [], "teacher.model.model_path", "builtin:tiny"),
    (DEMO, [*DISTILS, "teacher.rollout_backend=vllm"], DISTILS, "teacher.max_batch_size", "3"),
    (DEMO, DISTILS, [], "algorithm.distillation.coef", "2.0"),
    (DEMO, [*DISTILS, "algorithm.distillation.mode=topk"], DISTILS, "algorithm.distillation.topk", "3"),
    (DEMO, [*DISTILS, "algorithm.distillation.task_reward_coef=1"], DISTILS, "algorithm.adv_type", "raw"),
    (DEMO, [*DISTILS, "algorithm.kl_coef=0.1", "algorithm.distillation.task_reward_coef=1"],
     [*DISTILS, "algorithm.kl_coef=0.1"], "algorithm.kl_in", "reward"),
    (DEMO, ["algorithm.kl_coef=0.1"], [], "algorithm.kl_type", "k2"),
    (DEMO, ["algorithm.adv_type=raw"], ["algorithm.adv_type=rloo"], "algorithm.gamma", "0.5"),
    (DEMO, CRITIC, [], "algorithm.gae_lambda", "0.5"),
    (DEMO, CRITIC, [], "algorithm.value_clip", "0.5"),
    (DEMO, ["actor.model.value_head=true"], CRITIC, "algorithm.value_coef", "0.7"),
    (DEMO, [], ["algorithm.loss_type=cispo"], "algorithm.clip_ratio_low", "0.1"),
    (DEMO, ["reward.terms=[{name: judge}]"], [], "judge.mode", "compare"),
    (DEMO, ["reward.terms=[{name: reward}]"], [], "reward.model.model_path", "somewhere"),
    (DEMO, ["cluster.component_placement={reference: 0}"], [], "reference.max_tokens_per_micro_batch", "99"),
    (DEMO, ["rollout.rollout_backend=vllm"], ["rollout.rollout_backend=hf"], "rollout.gpu_memory_utilization", "0.3"),
    (DEMO, ["actor.training_backend=fsdp"], [], "actor.fsdp.reshard_after_forward", "false"),
    (DEMO, ["actor.training_backend=deepspeed"], [], "actor.deepspeed.zero_stage", "3"),
    (DEMO, ["actor.lora.rank=4"], [], "actor.lora.alpha", "3"),
    (DEMO, ["actor.model.dtype=float16"], ["actor.model.dtype=bfloat16"], "actor.grad_scaler.init_scale", "8"),
    (DEMO, [*CRITIC, "critic.model.dtype=float16"], CRITIC, "critic.grad_scaler.growth_interval", "8"),
    (DEMO, ["data.train.source=jsonl"], ["data.train.source=arithmetic"], "data.train.split", "a=b"),
    (DEMO, ["runner.max_steps=-1"], [], "runner.max_epochs", "3"),
    (DEMO, None, ["actor.lora.rank=4"], "actor.lora.dropout", "0.5"),
    ("configs/reasoning/demo_sft.yaml", ["actor.lora.rank=4"], [], "actor.lora.dropout", "0.5"),
    ("configs/reasoning/dpo.yaml", None, ["actor.lora.rank=4"], "actor.lora.dropout", "0.5"),
    ("configs/reasoning/dpo.yaml", ["algorithm.loss_type=sigmoid"], ["algorithm.loss_type=ipo"],
     "algorithm.label_smoothing", "0.1"),
    (CARTPOLE, ["algorithm.loss_type=decoupled_ppo"], [], "algorithm.tis_cap", "2.0"),
    (CARTPOLE, ["actor.model.num_action_chunks=2"], [], "actor.model.value_per_action", "true"),
    (CARTPOLE, ["actor.model.num_action_chunks=2"], [], "algorithm.reward_type", "action_level"),
    (CARTPOLE, [], ["algorithm.adv_type=grpo"], "algorithm.gae_lambda", "0.5"),
    (CARTPOLE, [], ["algorithm.adv_type=grpo"], "algorithm.gamma", "0.5"),
    (CARTPOLE, [], ["algorithm.value_coef=0"], "algorithm.value_clip", "0.5"),
    (CARTPOLE, ["actor.model.model_type=vla"], [], "actor.model.model_path", "builtin:tiny"),
    (CARTPOLE, ["actor.training_backend=fsdp"], [], "actor.model.dtype", "bfloat16"),
    (CARTPOLE, [], ["actor.model.model_type=vla"], "actor.model.hidden_sizes", "[3]"),
    (CARTPOLE, ["env.eval.video_episodes=1"], [], "env.eval.video_fps", "3"),
    (CARTPOLE, None, [], "env.eval.reward_scale", "3.0"),
    (CARTPOLE, ["workflow.record_episodes=1"], [], "workflow.record_only_success", "false"),
    (SAC, ["algorithm.name=td3"], [], "algorithm.policy_noise", "0.5"),
    (SAC, ["actor.model.model_type=td3"], [], "actor.model.exploration_noise", "0.5"),
    (SAC, [], ["algorithm.name=td3"], "algorithm.initial_alpha", "0.5"),
    (SAC, [], ["algorithm.auto_entropy_tuning=false"], "algorithm.target_entropy", "0.5"),
    (SAC, [], ["algorithm.auto_entropy_tuning=false"], "algorithm.alpha_type", "softplus"),
    (SAC, [], ["algorithm.name=td3"], "algorithm.alpha_clip_grad", "0.5"),
    (SAC, ["algorithm.name=iql"], [], "algorithm.expectile", "0.5"),
    (SAC, [], ["algorithm.name=crossq"], "algorithm.tau", "0.5"),
    (SAC, [], ["actor.model.model_type=crossq"], "actor.model.critic_layer_norm", "true"),
    (SAC, ["algorithm.demo_buffer.load_path=x"], [], "algorithm.demo_buffer.ratio", "0.2"),
    (SAC, ["algorithm.offline_steps=1"], [], "algorithm.offline_updates", "3"),
    (BC, ["algorithm.bc_value_coef=1"], ["algorithm.bc_value_coef=0"], "algorithm.gamma", "0.5"),
    (BC, ["algorithm.value_model=x"], [], "algorithm.advantage_steps", "3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "read", "unread", "key", "value"), ROWS, ids=[f"{row[3]}-{Path(row[0]).stem}" for row in ROWS]
)
def test_a_key_is_told_of_where_it_is_not_read(
    config: str, read: list[str] | None, unread: list[str], key: str, value: str
) -> None:
    def told(*overrides: str) -> list[str]:
        return [unused.key for unused in find_unused(ROOT / config, [*overrides, f"{key}={value}"])]

    assert key in told(*unread)
    assert read is None or key not in told(*read)


def test_a_default_and_a_template_are_not_told_of(tmp_path: Path) -> None:
    template, own = tmp_path / "template.yaml", tmp_path / "own.yaml"
    template.write_text(
        f"defaults: [{ROOT}/configs/base/ppo.yaml]\nenv: {{train: {{env_id: CartPole-v1}}}}\nalgorithm: {{tis_cap: 2.0}}\n"
    )
    own.write_text(
        "defaults: [template.yaml]\nrunner: {name: own}\nactor: {fsdp: {cpu_offload: false}, lora: {alpha: 3}}\n"
    )
    (unused,) = find_unused(own, [])
    assert str(unused) == f"actor.lora.alpha=3 ({own}): it is read with adapters: actor.lora.rank of 1 or more"


def test_plan_lists_them_and_a_start_says_them_once(tmp_path: Path) -> None:
    words = ["algorithm.tis_cap=2.0", f"runner.run_dir={tmp_path}", "runner.max_steps=1", "runner.segments=1"]
    line = "algorithm.tis_cap=2.0 (override 'algorithm.tis_cap=2.0'): it is read by algorithm.loss_type=decoupled_ppo"

    def said(command: str) -> tuple[str, str]:
        done = warm.run(
            [sys.executable, "-m", "rlhpc.cli", command, str(ROOT / CARTPOLE), *words],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    plan, _ = said("plan")
    assert f"no effect in this configuration:\n  {line}\n" in plan
    _, start = said("train")
    assert start.count("no effect") == 1 and f"rlhpc: no effect: {line}\n" in start
