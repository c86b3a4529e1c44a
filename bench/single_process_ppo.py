"""PPO in one process and one file, the way CleanRL's ppo.py does it: the yardstick of `bench/cartpole.py`.

Written for this benchmark: gymnasium's own SyncVectorEnv, torch.distributions, Adam(eps=1e-5), annealed learning rate, GAE,
plain value loss, advantages normalised per minibatch. Prints one JSON line: when the mean return of the last 100 training
episodes first reached the target, in environment steps and in seconds since the loop began.

    python bench/single_process_ppo.py --seed 1
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Separate tanh MLPs for policy and value."""

    def __init__(self, observation: int, actions: int) -> None:
        super().__init__()
        root2 = 2**0.5
        self.critic = nn.Sequential(
            layer(observation, 64, root2), nn.Tanh(), layer(64, 64, root2), nn.Tanh(), layer(64, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(observation, 64, root2), nn.Tanh(), layer(64, 64, root2), nn.Tanh(), layer(64, actions, 0.01)
        )

    def act(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Action, log-probability, entropy and value."""
        policy = Categorical(logits=self.actor(obs))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(obs).squeeze(-1)


def train(args: argparse.Namespace) -> dict[str, float | int | None]:
    """Trains until the target or `max_env_steps`."""
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    torch.set_num_threads(1)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")) for _ in range(args.num_envs)],
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    steps, batch = args.rollout_steps, args.rollout_steps * args.num_envs
    updates = args.max_env_steps // batch
    obs_b = torch.zeros(steps, args.num_envs, 4)
    act_b = torch.zeros(steps, args.num_envs, dtype=torch.long)
    logp_b, rew_b, done_b, val_b = (torch.zeros(steps, args.num_envs) for _ in range(4))
    returns_seen: deque[float] = deque(maxlen=100)
    reached: dict[str, float | int | None] = {"env_steps": None, "seconds": None}
    started = time.perf_counter()
    obs = torch.as_tensor(envs.reset(seed=args.seed)[0])
    done = torch.zeros(args.num_envs)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = (1 - update / updates) * args.lr
        for t in range(steps):
            obs_b[t], done_b[t] = obs, done
            with torch.no_grad():
                action, logp, _, value = agent.act(obs)
            act_b[t], logp_b[t], val_b[t] = action, logp, value
            raw, reward, terminated, truncated, infos = envs.step(action.numpy())
            rew_b[t] = torch.as_tensor(reward)
            if args.bootstrap_truncations and (cut := truncated & ~terminated).any():
                rows = torch.as_tensor(cut.nonzero()[0])
                final = torch.as_tensor(np.stack(infos["final_obs"][cut]))
                with torch.no_grad():
                    rew_b[t, rows] += args.gamma * agent.critic(final).squeeze(-1)
            obs, done = torch.as_tensor(raw), torch.as_tensor(terminated | truncated, dtype=torch.float32)
            if "final_info" in infos:
                episode = infos["final_info"]["episode"]
                returns_seen.extend(float(r) for r, m in zip(episode["r"], infos["_final_info"], strict=True) if m)
        env_steps = (update + 1) * batch
        if len(returns_seen) == 100 and np.mean(returns_seen) >= args.target and reached["env_steps"] is None:
            reached = {"env_steps": env_steps, "seconds": time.perf_counter() - started}
            if args.stop:
                break
        with torch.no_grad():
            next_value = agent.critic(obs).squeeze(-1)
            advantages, last = torch.zeros_like(rew_b), torch.zeros(args.num_envs)
            for t in reversed(range(steps)):
                alive = 1 - (done if t == steps - 1 else done_b[t + 1])
                following = next_value if t == steps - 1 else val_b[t + 1]
                delta = rew_b[t] + args.gamma * following * alive - val_b[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * alive * last
            targets = advantages + val_b
        flat = [x.reshape(batch, *x.shape[2:]) for x in (obs_b, act_b, logp_b, advantages, targets)]
        for _ in range(args.epochs):
            for index in torch.randperm(batch).split(args.minibatch):
                o, a, lp, adv, ret = (x[index] for x in flat)
                _, new_logp, entropy, new_value = agent.act(o, a)
                ratio = (new_logp - lp).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                policy_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
                value_loss = 0.5 * ((new_value - ret) ** 2).mean()
                loss = policy_loss - args.entropy * entropy.mean() + args.value_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    total = time.perf_counter() - started
    return {"seed": args.seed, **reached, "total_env_steps": env_steps, "total_seconds": total,
            "env_steps_per_s": env_steps / total, "last_return": float(np.mean(returns_seen))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, kind, default in (
        ("seed", int, 1), ("num-envs", int, 8), ("rollout-steps", int, 32), ("max-env-steps", int, 122_880),
        ("lr", float, 1e-3), ("gamma", float, 0.98), ("gae-lambda", float, 0.8), ("epochs", int, 20),
        ("minibatch", int, 256), ("clip", float, 0.2), ("entropy", float, 0.0), ("value-coef", float, 0.5),
        ("target", float, 475.0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--stop", action="store_true", help="stop when the target is reached")
    parser.add_argument("--bootstrap-truncations", action="store_true", help="value of the final observation where cut")
    print(json.dumps(train(parser.parse_args())))


if __name__ == "__main__":
    main()
