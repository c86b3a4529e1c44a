"""PPO in one process and one file, like CleanRL's and ManiSkill's ppo.py: reference of `bench.cartpole` and `bench.learning`.

The implementation uses Gymnasium's SyncVectorEnv, torch.distributions, Adam(eps=1e-5), GAE, and advantages normalised per
minibatch. ManiSkill's tasks run in rlhpc's batched simulation in this process, because ManiSkill batches on a GPU only. Like
ManiSkill's program, the loop checks a KL limit before each minibatch's update.

Prints one JSON line: the ended episodes by environment step, and when the mean return of the last 100 episodes first reached
the target, in environment steps and in seconds since the start of the loop.

    python -m bench.single_process_ppo --seed 1
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal


def build_network(sizes: list[int], output_size: int, gain: float) -> nn.Sequential:
    """Builds a tanh MLP with orthogonal weights; `gain` is the last layer's."""
    layers: list[nn.Module] = []
    for inputs, width in zip(sizes, [*sizes[1:], output_size], strict=True):
        linear = nn.Linear(inputs, width)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    last_layer = layers[-2]
    assert isinstance(last_layer, nn.Linear)
    nn.init.orthogonal_(last_layer.weight, gain)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Separate networks for policy and value."""

    def __init__(self, envs: Environments, args: argparse.Namespace) -> None:
        super().__init__()
        sizes = [envs.observation, *map(int, args.hidden.split(","))]
        self.critic = build_network(sizes, 1, args.critic_gain)
        self.discrete = isinstance(envs.space, gym.spaces.Discrete)
        output_size = (
            int(envs.space.n) if isinstance(envs.space, gym.spaces.Discrete) else int(np.prod(envs.space.shape))
        )
        self.actor = build_network(sizes, output_size, args.actor_gain)
        self.log_std = nn.Parameter(torch.full((1, 0 if self.discrete else output_size), args.log_std))

    def act(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns action, log-probability, entropy and value."""
        output = self.actor(obs)
        policy: Any = (
            Categorical(logits=output) if self.discrete else Normal(output, self.log_std.exp().expand_as(output))
        )
        if action is None:
            action = policy.sample()
        logprob, entropy = policy.log_prob(action), policy.entropy()
        if not self.discrete:
            logprob, entropy = logprob.sum(1), entropy.sum(1)
        return action, logprob, entropy, self.critic(obs).squeeze(-1)


class Environments:
    """Gymnasium's vector environment, with episodes' returns."""

    envs: Any
    space: gym.spaces.Box | gym.spaces.Discrete

    def __init__(self, args: argparse.Namespace) -> None:
        def make() -> Any:
            env = gym.make(args.env, **json.loads(args.env_kwargs))
            if not args.normalize:
                return gym.wrappers.RecordEpisodeStatistics(env)
            from bench.cleanrl_wrappers import normalize_env

            return normalize_env(env)

        self.envs = gym.vector.SyncVectorEnv([make] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        self.seed, self.space = args.seed, self.envs.single_action_space
        self.observation = int(np.prod(self.envs.single_observation_space.shape))

    def reset(self) -> np.ndarray:
        """Resets the environments, and returns the first observations."""
        first_obs: np.ndarray = self.envs.reset(seed=self.seed)[0]
        return first_obs

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Returns obs, rewards, terminated, truncated, last observations of ended episodes, and (return, success) of each of
        these.
        """
        if isinstance(self.space, gym.spaces.Box):
            actions = actions.clip(self.space.low, self.space.high)
        obs, rewards, terminated, truncated, infos = self.envs.step(actions)
        final_obs, episode_results = None, []
        if "final_info" in infos:
            mask = infos["_final_info"]
            final_obs = np.zeros_like(obs)
            final_obs[mask] = np.stack(infos["final_obs"][mask])
            episode_results = [
                (float(episode_return), None) for episode_return in infos["final_info"]["episode"]["r"][mask]
            ]
        return obs, rewards, terminated, truncated & ~terminated, final_obs, episode_results


class ManiSkill(Environments):
    """A ManiSkill task; episodes end at the time limit only (`--no_partial_reset` of ManiSkill's ppo.py)."""

    def __init__(self, args: argparse.Namespace) -> None:
        from rlhpc.embodied.config import EnvSideConfig
        from rlhpc.embodied.envs.maniskill import ManiSkillVectorEnv

        section = EnvSideConfig(env_id=args.env, kwargs=json.loads(args.env_kwargs), ignore_terminations=True)
        self.envs = ManiSkillVectorEnv(section, args.num_envs, 0, args.seed)
        self.space = self.envs.action_space
        self.observation = int(np.prod(self.envs.observation_space.shape))

    def reset(self) -> np.ndarray:
        """Returns the first observations."""
        first_obs: np.ndarray = self.envs.reset()[0]
        return first_obs

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Implements `Environments.step`."""
        assert isinstance(self.space, gym.spaces.Box)
        obs, rewards, terminated, truncated, infos = self.envs.step(actions.clip(self.space.low, self.space.high))
        episode_results = []
        if "episode" in infos:
            episode = infos["episode"]
            success = episode.get("success_once", [None] * len(rewards))
            episode_results = [(float(episode["return"][i]), success[i]) for i in episode["mask"].nonzero()[0]]
        return obs, rewards, terminated, truncated, infos.get("final_obs"), episode_results


def compute_advantages(
    args: argparse.Namespace, rewards: torch.Tensor, values: torch.Tensor, dones: torch.Tensor, last_value: torch.Tensor
) -> torch.Tensor:
    """Returns the GAE of `[T, N]`; `dones` marks steps at which an episode ended, `last_value [N]` is the
    value after the rollout.
    """
    advantages, trace = torch.zeros_like(rewards), torch.zeros_like(last_value)
    for t in reversed(range(len(rewards))):
        next_value = last_value if t == len(rewards) - 1 else values[t + 1]
        not_done = 1 - dones[t]
        delta = rewards[t] + args.gamma * next_value * not_done - values[t]
        advantages[t] = trace = delta + args.gamma * args.gae_lambda * not_done * trace
    return advantages


def run_update(
    args: argparse.Namespace, agent: Agent, optimizer: torch.optim.Optimizer, rollout_columns: list[torch.Tensor]
) -> None:
    """Runs all epochs over one rollout, until the KL limit."""
    for _ in range(args.epochs):
        for index in torch.randperm(len(rollout_columns[0])).split(args.minibatch):
            obs, a, old_logp, adv, ret, val = (x[index] for x in rollout_columns)
            _, new_logp, entropy, new_value = agent.act(obs, a)
            ratio = (new_logp - old_logp).exp()
            if args.target_kl and float((ratio - 1 - (new_logp - old_logp)).detach().mean()) > args.target_kl:
                return
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            policy_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
            errors = (new_value - ret) ** 2
            if args.value_clip:
                clipped_value = val + (new_value - val).clamp(-args.value_clip, args.value_clip)
                errors = torch.max(errors, (clipped_value - ret) ** 2)
            loss = policy_loss - args.entropy * entropy.mean() + args.value_coef * 0.5 * errors.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains until the target or `max_env_steps`."""
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    torch.set_num_threads(1)
    envs = (ManiSkill if args.maniskill else Environments)(args)
    agent = Agent(envs, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    steps, batch = args.rollout_steps, args.rollout_steps * args.num_envs
    updates = args.max_env_steps // batch
    actions = envs.space.shape if isinstance(envs.space, gym.spaces.Box) else ()
    obs_b = torch.zeros(steps, args.num_envs, envs.observation)
    act_b = torch.zeros(steps, args.num_envs, *actions, dtype=torch.long if agent.discrete else torch.float32)
    logp_b, rew_b, end_b, val_b = (torch.zeros(steps, args.num_envs) for _ in range(4))
    returns_seen: deque[float] = deque(maxlen=100)
    reached_at: dict[str, float | int | None] = {"env_steps": None, "seconds": None}
    curve: list[list[Any]] = []
    start_s = time.perf_counter()
    obs = torch.as_tensor(envs.reset(), dtype=torch.float32)
    for update_index in range(updates):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1 - update_index / updates) * args.lr
        env_steps, episode_results = (update_index + 1) * batch, []
        for t in range(steps):
            obs_b[t] = obs
            with torch.no_grad():
                act_b[t], logp_b[t], _, val_b[t] = agent.act(obs)
            next_obs, reward, terminated, truncated, final_obs, episodes = envs.step(act_b[t].numpy())
            rew_b[t] = torch.as_tensor(reward)
            if args.bootstrap_truncations and truncated.any():
                rows = torch.as_tensor(truncated.nonzero()[0])
                with torch.no_grad():
                    values = agent.critic(torch.as_tensor(final_obs[truncated], dtype=torch.float32))
                rew_b[t, rows] += args.gamma * values.squeeze(-1)
            obs = torch.as_tensor(next_obs, dtype=torch.float32)
            end_b[t] = torch.as_tensor(terminated | truncated)
            episode_results += episodes
        returns_seen.extend(episode_return for episode_return, _ in episode_results)
        curve.append([env_steps, episode_results])
        if len(returns_seen) == 100 and np.mean(returns_seen) >= args.target and reached_at["env_steps"] is None:
            reached_at = {"env_steps": env_steps, "seconds": time.perf_counter() - start_s}
            if args.stop:
                break
        with torch.no_grad():
            advantages = compute_advantages(args, rew_b, val_b, end_b, agent.critic(obs).squeeze(-1))
        columns = (obs_b, act_b, logp_b, advantages, advantages + val_b, val_b)
        run_update(args, agent, optimizer, [x.reshape(batch, *x.shape[2:]) for x in columns])
    total_s = time.perf_counter() - start_s
    return {"seed": args.seed, **reached_at, "total_env_steps": env_steps, "total_seconds": total_s,
            "env_steps_per_s": env_steps / total_s, "last_return": float(np.mean(returns_seen)) if returns_seen else None,
            "curve": curve}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value_type, default in (
        ("seed", int, 1), ("num-envs", int, 8), ("rollout-steps", int, 32), ("max-env-steps", int, 122_880),
        ("lr", float, 1e-3), ("gamma", float, 0.98), ("gae-lambda", float, 0.8), ("epochs", int, 20),
        ("minibatch", int, 256), ("clip", float, 0.2), ("entropy", float, 0.0), ("value-coef", float, 0.5),
        ("value-clip", float, None), ("target-kl", float, None), ("hidden", str, "64,64"), ("log-std", float, 0.0),
        ("actor-gain", float, 0.01), ("critic-gain", float, 1.0), ("target", float, 475.0),
        ("env", str, "CartPole-v1"), ("env-kwargs", str, "{}"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=value_type, default=default)
    parser.add_argument("--stop", action="store_true", help="stop when the target is reached")
    parser.add_argument("--bootstrap-truncations", action="store_true", help="value of the final observation where cut")
    parser.add_argument("--anneal-lr", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--maniskill", action="store_true", help="a task of ManiSkill")
    parser.add_argument(
        "--normalize", action="store_true", help="observations and rewards, as ppo_continuous_action.py"
    )
    print(json.dumps(train(parser.parse_args())))


if __name__ == "__main__":
    main()
