"""What each number of a configuration may be: every numeric key of the schema is here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.rules import Fail

#: Greatest integer that all that reads a configuration tells from its neighbours.
LARGEST = 2**53
_SEED = 2**32 - 1


@dataclass(frozen=True)
class Range:
    """An interval, and perhaps one number outside that means something of its own.

    Attributes:
        low, high: Bounds; None for none.
        above, below: The bound itself is outside.
        also: A number outside that is allowed, and what it stands for.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    also: tuple[float, str] | None = None

    def __contains__(self, number: float) -> bool:
        if self.also is not None and number == self.also[0]:
            return True
        if self.low is not None and (number < self.low or (self.above and number == self.low)):
            return False
        return self.high is None or number < self.high or (number == self.high and not self.below)

    def rule(self) -> str:
        """What must hold, in words."""
        return f"it must {self._words()}{'' if self.also is None else f', or {self.also[0]:g} for {self.also[1]}'}"

    def _words(self) -> str:
        if self.low is not None and self.high is not None:
            if not self.above and not self.below:
                return f"lie between {_plain(self.low)} and {_plain(self.high)}"
            return (
                f"be {'above' if self.above else 'at least'} {_plain(self.low)} and "
                f"{'below' if self.below else 'at most'} {_plain(self.high)}"
            )
        if self.low == 0:
            return "be greater than 0" if self.above else "not be negative"
        return f"be {'above' if self.above else 'at least'} {_plain(self.low or 0)}"

    def short(self) -> str:
        """The same for a table: `(0, 10]`; empty where all is allowed."""
        if self.low is None and self.high is None:
            return ""
        low = "-∞" if self.low is None else _plain(self.low)
        high = "∞" if self.high is None else _plain(self.high)
        closed = self.high is not None and not self.below
        interval = f"{'[' if self.low is not None and not self.above else '('}{low}, {high}{']' if closed else ')'}"
        return interval if self.also is None else f"{interval} or {_plain(self.also[0])}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


ANY = Range()
COUNT = Range(0, above=True)
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
PART = Range(0, 1, below=True)
RATE = Range(0, 10, above=True)
INTERVAL = Range(1, also=(-1, "none"))
SEED = Range(0, _SEED)

RANGES: dict[str, Range] = {
    "cluster.num_nodes": COUNT,
    "cluster.cpus_per_node": COUNT,
    "cluster.accelerators_per_node": NOT_NEGATIVE,
    "cluster.signal_lead_s": Range(1, 65535),  # what Slurm takes for --signal
    "cluster.node_groups[].num_nodes": COUNT,
    "cluster.node_groups[].cpus_per_node": COUNT,
    "cluster.node_groups[].accelerators_per_node": NOT_NEGATIVE,
    "cluster.node_groups[].het_component": NOT_NEGATIVE,
    "runner.seed": SEED,
    "runner.max_steps": INTERVAL,
    "runner.max_epochs": INTERVAL,
    "runner.save_interval": INTERVAL,
    "runner.val_check_interval": INTERVAL,
    "runner.keep_checkpoints": NOT_NEGATIVE,
    "runner.segments": COUNT,
    "runner.max_restarts": NOT_NEGATIVE,
    "runner.stop_return": ANY,
    "runner.save_reserve_s": NOT_NEGATIVE,
    "runner.rendezvous_timeout_s": POSITIVE,
    "runner.step_timeout_s": POSITIVE,
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
    "algorithm.group_size": COUNT,
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.tis_cap": POSITIVE,
    "algorithm.max_refills": NOT_NEGATIVE,
    "algorithm.overlong_buffer": NOT_NEGATIVE,
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
    "rollout.max_new_tokens": COUNT,
    "rollout.temperature": NOT_NEGATIVE,
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.top_k": Range(1, also=(-1, "off")),
    "rollout.max_batch_size": COUNT,
    "rollout.max_model_len": COUNT,
    "rollout.gpu_memory_utilization": Range(0, 1, above=True),
    "rollout.max_turns": COUNT,
    "actor.global_batch_size": COUNT,
    "actor.micro_batch_size": COUNT,
    "actor.model.hidden_sizes": COUNT,
    "actor.model.log_std_init": Range(-20, 20),
    "actor.model.num_action_chunks": COUNT,
    "actor.optim.lr": RATE,  # one step of Adam moves a weight by about as much
    "actor.optim.value_lr": RATE,
    "actor.optim.adam_beta1": PART,
    "actor.optim.adam_beta2": PART,
    "actor.optim.adam_eps": Range(0, 1, above=True),
    "actor.optim.weight_decay": Range(0, 100),
    "actor.optim.clip_grad": POSITIVE,
    "actor.optim.lr_warmup_steps": NOT_NEGATIVE,
    "actor.max_tokens_per_micro_batch": COUNT,
    "actor.lora.rank": NOT_NEGATIVE,
    "actor.lora.alpha": COUNT,
    "actor.lora.dropout": PART,
    "actor.deepspeed.zero_stage": Range(1, 3),
    **{
        f"data.{part}.{name}": allowed
        for part in ("train", "eval[]")
        for name, allowed in {"size": COUNT, "seed": NOT_NEGATIVE, "eval_fraction": FRACTION}.items()
    },
    "data.eval[].samples": COUNT,
    "data.eval[].temperature": NOT_NEGATIVE,
    "data.max_prompt_tokens": COUNT,
    "data.prompts_per_step": COUNT,
    "demos.limit": COUNT,
    "demos.holdout": PART,
    "reward.terms[].weight": ANY,
    "reward.timeout_s": POSITIVE,
    "reward.failed": ANY,
    "reward.processes": COUNT,
    "workflow.demos_episodes": COUNT,
    "workflow.record_episodes": NOT_NEGATIVE,
    "workflow.eval_job.cpus": COUNT,
    "workflow.convert_job.cpus": COUNT,
}


def check_ranges(cfg: Any, fail: Fail) -> None:
    """Whether every number lies in its range; null is in none, and allowed where the schema allows it.

    Raises:
        ConfigError: The first that does not.
    """
    for key, allowed in RANGES.items():
        for place, found in _found(cfg, key):
            for number in found if OmegaConf.is_list(found) else (found,):
                if number is not None and number not in allowed:
                    raise fail(place, allowed.rule())


def _found(cfg: Any, key: str) -> Iterator[tuple[str, Any]]:
    """What stands at a key; at `list[].name` that of each element."""
    section, each, name = key.partition("[].")
    if not each:
        yield key, OmegaConf.select(cfg, key)
        return
    for index, element in enumerate(OmegaConf.select(cfg, section)):
        yield f"{section}[{index}].{name}", OmegaConf.select(element, name)
