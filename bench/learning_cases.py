"""Tasks of `bench.learning`. One table of settings determines rlhpc's overrides and the reference's arguments."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Setting → rlhpc's keys; the reference has an argument of the setting's name.
PPO_KEYS = {
    "num_envs": ["env.train.num_envs"],
    "rollout_steps": ["algorithm.rollout_steps"],
    "lr": ["actor.optim.lr"],
    "gamma": ["algorithm.gamma"],
    "gae_lambda": ["algorithm.gae_lambda"],
    "epochs": ["algorithm.update_epochs"],
    "minibatch": ["actor.global_batch_size"],
    "clip": ["algorithm.clip_ratio_low", "algorithm.clip_ratio_high"],
    "entropy": ["algorithm.entropy_coef"],
    "value_coef": ["algorithm.value_coef"],
    "value_clip": ["algorithm.value_clip"],
    "target_kl": ["algorithm.target_kl"],
    "log_std": ["actor.model.log_std_init"],
    "hidden": ["actor.model.hidden_sizes"],
    "anneal_lr": ["algorithm.anneal_lr"],
    "actor_gain": ["actor.model.kwargs.actor_gain"],
    "critic_gain": ["actor.model.kwargs.critic_gain"],
}
SAC_KEYS = {
    "starts": ["algorithm.replay_buffer.min_buffer_size"],
    "buffer": ["algorithm.replay_buffer.size"],
    "data": ["algorithm.demo_buffer.load_path"],
    "offline_steps": ["algorithm.offline_steps"],
    "offline_updates": ["algorithm.offline_updates"],
    "inverse_temperature": ["algorithm.inverse_temperature"],
    "random": ["algorithm.random_steps"],
}
#: What `bench.offline_data` writes.
DATA = Path(tempfile.gettempdir()) / "rlhpc_bench_pendulum.h5"
#: Transitions between two rounds of updates of rlhpc; the reference updates after each.
SAC_ROLLOUT = 8


@dataclass(frozen=True)
class Case:
    """Task of a learning-curve comparison, with its settings for both sides.

    Attributes:
        title: For the page.
        env: Environment id.
        algorithm: `ppo`, `sac`, `td3`, `crossq` or `iql`.
        steps: Environment steps.
        settings: Hyperparameters, by the names of the tables above.
        maniskill: Whether the task is ManiSkill's.
        env_kwargs: Arguments of the environment.
        normalize: CleanRL's running normalisation of observations and rewards, on both sides.
        spans: Points of the curve.
        note: Note for readers of the figure.
        more: Further overrides of rlhpc.
    """

    title: str
    env: str
    algorithm: str
    steps: int
    settings: dict[str, Any]
    maniskill: bool = False
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    normalize: bool = False
    spans: int = 20
    note: str = ""
    more: tuple[str, ...] = ()

    @property
    def config(self) -> str:
        """Configuration from which rlhpc's run starts."""
        return f"configs/base/{self.algorithm}.yaml"

    @property
    def off_policy(self) -> bool:
        """True if the algorithm learns from a replay buffer."""
        return self.algorithm != "ppo"

    @property
    def transitions(self) -> int:
        """Environment steps of a training step of rlhpc."""
        return SAC_ROLLOUT if self.off_policy else self.settings["num_envs"] * self.settings["rollout_steps"]

    def build_overrides(self) -> list[str]:
        """Returns the overrides of rlhpc's configuration."""
        keys = SAC_KEYS if self.off_policy else PPO_KEYS
        override_words = [
            f"{key}={_format_value(value)}" for name, value in self.settings.items() for key in keys[name]
        ]
        override_words += [f"env.train.env_id={self.env}", "env.train.simulators=0"]
        override_words += [f"env.train.kwargs.{name}={_format_value(value)}" for name, value in self.env_kwargs.items()]
        if self.off_policy:
            override_words.append(f"algorithm.rollout_steps={SAC_ROLLOUT}")
        override_words += self.more
        if self.maniskill:
            override_words += ["env.train.env_type=maniskill", "env.train.ignore_terminations=true"]
        if self.normalize:
            override_words.append("env.train.wrappers=[bench.cleanrl_wrappers:normalize_env]")
        return override_words

    def build_reference_command(self, seed: int, num_steps: int) -> list[str]:
        """Returns module and arguments of the single-process loop."""
        arguments = [f"bench.single_process_{self.algorithm}", "--env", self.env, "--seed", str(seed)]
        arguments += ["--env-kwargs", json.dumps(self.env_kwargs)]
        arguments += ["--steps" if self.off_policy else "--max-env-steps", str(num_steps)]
        for name, value in self.settings.items():
            argument = name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{argument}" if value else f"--no-{argument}")
            elif value is not None:
                # With `=`, since a value may begin with a minus.
                arguments.append(
                    f"--{argument}=" + (",".join(map(str, value)) if isinstance(value, list) else str(value))
                )
        if self.algorithm == "ppo":
            arguments.append("--bootstrap-truncations")
        arguments += ["--maniskill"] * self.maniskill + ["--normalize"] * self.normalize
        return arguments


def _format_value(value: Any) -> str:
    return json.dumps(value)


#: ManiSkill's ppo.py with its defaults; its critic starts larger than CleanRL's, which MS-CartpoleBalance-v1 shows.
_MANISKILL: dict[str, Any] = {
    "lr": 3e-4, "gamma": 0.8, "gae_lambda": 0.9, "epochs": 4, "clip": 0.2, "entropy": 0.0, "value_coef": 0.5,
    "value_clip": None, "target_kl": 0.1, "log_std": -0.5, "hidden": [256, 256, 256], "anneal_lr": False,
    "actor_gain": 0.01 * 2**0.5, "critic_gain": 2**0.5,
}  # fmt: skip
_MANISKILL_NOTE = (
    "ManiSkill's ppo.py has hundreds to thousands of slots on a GPU and the minibatches that follow; both sides here have "
    "what a CPU can do. Episodes end at the time limit only (its --no_partial_reset), and are bootstrapped there. "
    "Both simulate with rlhpc's batched CPU simulation."
)
#: CleanRL's ppo.py.
_CLEANRL: dict[str, Any] = {
    "lr": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95, "epochs": 4, "clip": 0.2, "entropy": 0.01, "value_coef": 0.5,
    "value_clip": 0.2, "hidden": [64, 64], "anneal_lr": True, "num_envs": 4, "rollout_steps": 128, "minibatch": 128,
}  # fmt: skip
_BOOTSTRAP_NOTE = (
    "Unlike CleanRL's, the reference bootstraps from the last observation of an episode that the time limit cuts, as rlhpc "
    "always does."
)
_SAC_NOTE = (
    f"CleanRL's sac_continuous_action.py: one slot, batches of 256, an update for each step; rlhpc makes its updates in "
    f"rounds of {SAC_ROLLOUT} after as many steps."
)

_PENDULUM: dict[str, Any] = {"starts": 1000, "buffer": 100_000}
_ROUNDS = (
    f"One slot, batches of 256, an update a step; rlhpc makes them in rounds of {SAC_ROLLOUT} after as many steps."
)

CASES: dict[str, Case] = {
    "push_cube": Case(
        "PPO, PushCube-v1 (ManiSkill)", "PushCube-v1", "ppo", 80_000,
        {**_MANISKILL, "num_envs": 32, "rollout_steps": 50, "minibatch": 100},
        maniskill=True, env_kwargs={"control_mode": "pd_joint_delta_pos", "reward_mode": "normalized_dense"},
        spans=10, note=f"32 slots × 50 steps, minibatches of 100. {_MANISKILL_NOTE}",
    ),
    "maniskill_cartpole": Case(
        "PPO, MS-CartpoleBalance-v1 (ManiSkill)", "MS-CartpoleBalance-v1", "ppo", 128_000,
        {**_MANISKILL, "gamma": 0.99, "gae_lambda": 0.95, "num_envs": 16, "rollout_steps": 250, "minibatch": 250},
        maniskill=True, env_kwargs={"reward_mode": "normalized_dense"}, spans=8,
        note=f"16 slots × 250 steps, minibatches of 250, γ 0.99 and λ 0.95 as ManiSkill's command for it. {_MANISKILL_NOTE} "
        "Seeds 1 to 3 alone were unequal, so that eight were run. Each update of a whole run of rlhpc, made again by the "
        "single-process loop from the same rollout, gives the same weights "
        "(tests/integration/embodied/test_ppo_reference.py).",
    ),
    "lunar_lander_ppo": Case(
        "PPO, LunarLander-v3", "LunarLander-v3", "ppo", 204_800,
        {**_CLEANRL, "lr": 3e-4, "gamma": 0.999, "gae_lambda": 0.98, "value_clip": None, "anneal_lr": False, "num_envs": 16,
         "rollout_steps": 256, "minibatch": 64},
        note="RL Baselines3 Zoo's hyperparameters, with rollouts of 256 steps for 1024: with CleanRL's defaults neither side "
        f"learns in as many steps. {_BOOTSTRAP_NOTE}",
    ),
    "inverted_pendulum_sac": Case(
        "SAC, InvertedPendulum-v5", "InvertedPendulum-v5", "sac", 8000, {"starts": 1000, "buffer": 1_000_000}, spans=8,
        note=f"{_SAC_NOTE} Learning starts after 1000 steps, not 5000. CleanRL's documentation has 909 ± 56 after a million "
        "steps of InvertedPendulum-v4.",
    ),
    "hopper_ppo": Case(
        "PPO, Hopper-v5", "Hopper-v5", "ppo", 51_200,
        {**_CLEANRL, "lr": 3e-4, "epochs": 10, "entropy": 0.0, "num_envs": 1, "rollout_steps": 2048, "minibatch": 64},
        normalize=True, spans=5,
        note=f"CleanRL's ppo_continuous_action.py with its defaults and wrappers, at a twentieth of its steps (the learning "
        f"rate goes to 0 over these). {_BOOTSTRAP_NOTE} CleanRL's documentation has 2741 ± 269 on Hopper-v4 after 8 million.",
    ),
    "lunar_lander_sac": Case(
        "SAC, LunarLander-v3, continuous", "LunarLander-v3", "sac", 20_000, {"starts": 1000, "buffer": 1_000_000}, spans=10,
        env_kwargs={"continuous": True}, note=f"{_SAC_NOTE} Learning starts after 1000 steps, not 5000.",
    ),
    "pendulum_td3": Case(
        "TD3, Pendulum-v1", "Pendulum-v1", "td3", 6000, _PENDULUM, spans=6,
        note=f"CleanRL's td3_continuous_action.py with its defaults, but for learning from step 1000 on. {_ROUNDS}",
    ),
    "pendulum_crossq": Case(
        "CrossQ, Pendulum-v1", "Pendulum-v1", "crossq", 6000, _PENDULUM, spans=6,
        more=("actor.model.critic_hidden_sizes=[256,256]",),
        note=f"SB3-Contrib's CrossQ with its defaults, but for critics of 256 units and learning from step 1000 on. {_ROUNDS}",
    ),
    "pendulum_iql": Case(
        "IQL, Pendulum-v1, offline, then online", "Pendulum-v1", "iql", 1200,
        {"starts": 200, "buffer": 100_000, "random": 0, "data": str(DATA), "offline_steps": 2, "offline_updates": 1000,
         "inverse_temperature": 0.5}, spans=2,
        note="CORL's iql.py with its defaults, but for an inverse temperature that fits these rewards: 2000 updates from "
        "12 000 transitions of mixed quality (`bench/offline_data.py`; the result's file has their mean return), then "
        f"online, with half of each batch from these. The curve is that of the online part. {_ROUNDS}",
    ),
}  # fmt: skip
