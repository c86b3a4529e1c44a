"""What each number of a run with simulators may be."""

from __future__ import annotations

from rlhpc.config.ranges import (
    ANY,
    COUNT,
    ELASTIC_RANGES,
    FRACTION,
    INTERVAL,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    RATE,
    SEED,
    Range,
)

#: What each number may be, in all these kinds of run.
RANGES: dict[str, Range] = {
    **ELASTIC_RANGES,
    "runner.val_check_interval": INTERVAL,
    "runner.stop_return": ANY,
    "algorithm.gamma": FRACTION,
    "algorithm.gae_lambda": FRACTION,
    "algorithm.clip_ratio_low": PART,
    "algorithm.clip_ratio_high": NOT_NEGATIVE,
    "algorithm.clip_ratio_c": Range(1, above=True),
    "algorithm.value_clip": POSITIVE,
    "algorithm.value_coef": NOT_NEGATIVE,
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "algorithm.target_kl": POSITIVE,
    "algorithm.update_epochs": COUNT,
    "algorithm.bc_value_coef": NOT_NEGATIVE,
    "algorithm.rollout_steps": COUNT,
    "algorithm.tis_cap": POSITIVE,
    "algorithm.max_staleness": NOT_NEGATIVE,
    "algorithm.tau": Range(0, 1, above=True),
    "algorithm.initial_alpha": POSITIVE,
    "algorithm.target_entropy": ANY,
    "algorithm.alpha_lr": RATE,
    "algorithm.update_to_data": POSITIVE,
    "algorithm.critic_actor_ratio": COUNT,
    "algorithm.target_update_freq": COUNT,
    "algorithm.random_steps": NOT_NEGATIVE,
    "algorithm.replay_buffer.size": COUNT,
    "algorithm.replay_buffer.min_buffer_size": COUNT,
    "algorithm.demo_buffer.ratio": FRACTION,
    **{
        f"env.{side}.{name}": allowed
        for side in ("train", "eval")
        for name, allowed in {
            "num_envs": COUNT,
            "max_episode_steps": COUNT,
            "seed": SEED,
            "group_size": COUNT,
            "reward_scale": ANY,
            "simulators": NOT_NEGATIVE,
            "simulator_timeout_s": POSITIVE,
        }.items()
    },
    "env.eval.num_episodes": COUNT,
    "env.eval.video_episodes": NOT_NEGATIVE,
    "env.eval.video_fps": COUNT,
    "rollout.pipeline_stage_num": COUNT,
    "actor.global_batch_size": COUNT,
    "actor.micro_batch_size": COUNT,
    "actor.model.hidden_sizes": COUNT,
    "actor.model.log_std_init": Range(-20, 20),
    "actor.model.num_action_chunks": COUNT,
    "actor.optim.value_lr": RATE,
    "demos.limit": COUNT,
    "demos.holdout": PART,
    "workflow.demos_episodes": COUNT,
    "workflow.record_episodes": NOT_NEGATIVE,
}
