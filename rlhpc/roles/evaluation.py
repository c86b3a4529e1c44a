"""Evaluation of a policy: deterministic actions, a fixed number of episodes per slot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from rlhpc.envs import make_env
from rlhpc.roles.device import to_tensors
from rlhpc.runtime.errors import ConfigError, RlhpcError

#: Decisions after which an episode that does not end is an error: nothing waits for ever.
MAX_DECISIONS = 1_000_000


def quotas(episodes: int, slots: int) -> np.ndarray:
    """Episodes each slot contributes. Fixed in advance: taking the first to finish would favour short episodes."""
    counts = np.full(slots, episodes // slots)
    counts[: episodes % slots] += 1
    return counts


def eval_seed(env_cfg: Any, seed: int) -> int:
    """Seed of the evaluation's environments: `env.eval.seed`, or one that training, which uses `seed`, does not."""
    return int(env_cfg.seed) if env_cfg.seed is not None else seed + 1_000_003


@torch.inference_mode()
def evaluate_policy(
    policy: Any, env_cfg: Any, *, seed: int, episodes: int | None = None, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Runs the first episodes of every slot of a vector environment.

    Args:
        policy: In eval mode, on `device`.
        env_cfg: Section `env.eval`.
        seed: Of the run, see `eval_seed`.
        episodes: Number of episodes; default `env.eval.num_episodes`.
        device: Where the policy is.

    Returns:
        return_mean, return_std, return_min, return_max, return_ci95 [low, high], length_mean, episodes, env_id, seed,
        and success_rate where the environment reports success.
    """
    wanted = int(env_cfg.num_episodes if episodes is None else episodes)
    if wanted < 1:
        raise ConfigError(f"episodes is {wanted}; an evaluation needs at least 1")
    slots, seed = min(int(env_cfg.num_envs), wanted), eval_seed(env_cfg, seed)
    env = make_env(env_cfg, slots, slot_offset=0, seed=seed, stage="eval")
    try:
        returns, lengths, successes = _run(policy, env, quotas(wanted, slots), torch.device(device))
    finally:
        env.close()
    result = summarize(returns, lengths)
    if successes:
        result["success_rate"] = float(np.mean(successes))
    return {**result, "env_id": str(env_cfg.env_id), "seed": seed}


def _run(policy: Any, env: Any, left: np.ndarray, device: torch.device) -> tuple[list[float], list[float], list[float]]:
    found: list[tuple[int, int, float, float, float | None]] = []  # slot, its how-manieth, return, length, success
    seen = np.zeros_like(left)
    obs, _ = env.reset()
    for _ in range(MAX_DECISIONS):
        actions, _ = policy.predict_action_batch(to_tensors(obs, device), mode="eval")
        obs, _, terminations, truncations, infos = env.chunk_step(actions.cpu().numpy())
        done = np.flatnonzero(np.asarray(terminations) | np.asarray(truncations))
        episode: dict[str, Any] = infos.get("episode", {}) if done.size else {}
        for slot in done.tolist() if episode else ():
            if seen[slot] < left[slot]:
                success = float(episode["success"][slot]) if "success" in episode else None
                total, length = float(episode["return"][slot]), float(episode["length"][slot])
                found.append((slot, int(seen[slot]), total, length, success))
                seen[slot] += 1
        if (seen >= left).all():
            found.sort(key=lambda row: row[:2])
            return [r[2] for r in found], [r[3] for r in found], [r[4] for r in found if r[4] is not None]
    raise RlhpcError(
        f"the evaluation's episodes did not end within {MAX_DECISIONS} decisions; set env.eval.max_episode_steps"
    )


def summarize(returns: list[float], lengths: list[float]) -> dict[str, Any]:
    """The statistics of an evaluation; the interval is the normal approximation of the mean's."""
    values = np.asarray(returns, np.float64)
    mean, count = float(values.mean()), len(values)
    std = float(values.std(ddof=1)) if count > 1 else 0.0
    half = 1.959964 * std / math.sqrt(count)
    return {
        "return_mean": mean,
        "return_std": std,
        "return_min": float(values.min()),
        "return_max": float(values.max()),
        "return_ci95": [mean - half, mean + half],
        "length_mean": float(np.mean(lengths)),
        "episodes": count,
    }
