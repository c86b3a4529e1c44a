"""Diffusion Policy (Chi et al. 2023), and log-probabilities of how it denoises a chunk (DPPO, Ren et al. 2024).

From noise x_K the policy goes through K steps to the chunk x_0. For reinforcement learning a step from t to s is

    x_s ~ N(μ(x_t, ε), σ²),    σ = max(noise_level, the posterior's standard deviation),

with DDPM's posterior mean μ for DDIM, too (that is η = 1), and the log-probability of a chunk is that of all K steps, over the
actions that are used. Evaluation takes DDIM's own deterministic steps, or DDPM's means.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.base import PolicyObs
from rlhpc.embodied.models.lerobot.denoising import DenoisingPolicy
from rlhpc.runtime.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)


class DiffusionPolicy(DenoisingPolicy):
    """LeRobot's Diffusion Policy; the value head sees what the denoising network is given of the observation.

    `actor.model` of all of LeRobot's, and in `kwargs`: `num_steps` (K; by default what the folder says), `noise_level` (0.1).
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        model = self.inner.diffusion
        self.steps = int(cfg.kwargs.get("num_steps") or model.num_inference_steps)
        self.noise_level = float(cfg.kwargs.get("noise_level", 0.1))
        most = int(model.noise_scheduler.config.num_train_timesteps)
        if not 1 <= self.steps <= most or self.noise_level <= 0:
            raise ConfigError(
                f"actor.model.kwargs: num_steps is {self.steps} (1 to {most}) and noise_level {self.noise_level} (above 0)"
            )
        model.num_inference_steps = self.steps
        model.noise_scheduler.set_timesteps(self.steps)
        self._times = [int(t) for t in model.noise_scheduler.timesteps]
        self._stds = [max(self.noise_level, math.sqrt(self._coefficients(t)[2])) for t in self._times]

    def value_inputs(self) -> int:
        """See `LerobotPolicy.value_inputs`."""
        model = self.inner.diffusion
        return int(model.unet.down_modules[0][0].cond_encoder[1].in_features) - int(
            model.config.diffusion_step_embed_dim
        )

    @property
    def state_shape(self) -> tuple[int, int]:
        """See `DenoisingPolicy.state_shape`."""
        return int(self.inner.config.horizon), self.dim

    # -- steps ----------------------------------------------------------------------------------------------------

    def _coefficients(self, t: int) -> tuple[float, float, float]:
        """Of x_0 and x_t in the posterior's mean at `t`, and its variance."""
        scheduler = self.inner.diffusion.noise_scheduler
        s = t - int(scheduler.config.num_train_timesteps) // self.steps
        now = float(scheduler.alphas_cumprod[t])
        then = float(scheduler.alphas_cumprod[s]) if s >= 0 else 1.0
        kept = now / then
        of_end, of_now = math.sqrt(then) * (1 - kept) / (1 - now), math.sqrt(kept) * (1 - then) / (1 - now)
        return of_end, of_now, (1 - then) / (1 - now) * (1 - kept)

    def _predict(self, seen: Tensor, x: Tensor, t: int) -> Tensor:
        found: Tensor = self.inner.diffusion.unet(x, x.new_full((len(x),), t, dtype=torch.long), global_cond=seen)
        return found

    def _mean(self, seen: Tensor, x: Tensor, t: int) -> Tensor:
        """μ of the step from `t`."""
        scheduler = self.inner.diffusion.noise_scheduler
        found, now = self._predict(seen, x, t), float(scheduler.alphas_cumprod[t])
        if scheduler.config.prediction_type == "epsilon":
            found = (x - math.sqrt(1 - now) * found) / math.sqrt(now)
        if scheduler.config.clip_sample:
            most = float(scheduler.config.clip_sample_range)
            found = found.clamp(-most, most)
        of_end, of_now, _ = self._coefficients(t)
        return of_end * found + of_now * x

    def framed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """See `LerobotPolicy.framed`."""
        if self.before:
            return batch
        return {name: each[:, None] if name.startswith("observation.") else each for name, each in batch.items()}

    # -- acting and learning --------------------------------------------------------------------------------------

    def see(self, obs: PolicyObs) -> tuple[Tensor, Tensor]:
        """See `DenoisingPolicy.see`; twice what the denoising network is given, `[B, width]`."""
        rows, config = self.framed(self.batch(obs)), self.inner.config
        if config.image_features:
            rows["observation.images"] = torch.stack([rows[name] for name in config.image_features], -4)
        found: Tensor = self.inner.diffusion._prepare_global_conditioning(rows)
        return found, found

    def chain(self, seen: Tensor, noise: Tensor) -> Tensor:
        """See `DenoisingPolicy.chain`."""
        states = [noise[:, 0]]
        for k, (t, std) in enumerate(zip(self._times, self._stds, strict=True)):
            states.append(self._mean(seen, states[-1], t) + std * noise[:, k + 1])
        return torch.stack(states, 1)

    def chain_logprobs(self, seen: Tensor, chain: Tensor) -> Tensor:
        """See `DenoisingPolicy.chain_logprobs`."""
        total = torch.zeros_like(chain[:, 0])
        for k, (t, std) in enumerate(zip(self._times, self._stds, strict=True)):
            off = (chain[:, k + 1] - self._mean(seen, chain[:, k], t)) / std
            total = total - 0.5 * off**2 - math.log(std) - 0.5 * _LOG_2PI
        return total

    def noise_entropy(self) -> float:
        """See `DenoisingPolicy.noise_entropy`."""
        return sum(math.log(std) + 0.5 + 0.5 * _LOG_2PI for std in self._stds)

    def denoise(self, seen: Tensor, x: Tensor) -> Tensor:
        """See `DenoisingPolicy.denoise`."""
        scheduler = self.inner.diffusion.noise_scheduler
        own = type(scheduler).__name__ == "DDIMScheduler"
        for t in self._times:
            x = scheduler.step(self._predict(seen, x, t), t, x).prev_sample if own else self._mean(seen, x, t)
        return x
