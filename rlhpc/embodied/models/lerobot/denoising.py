"""What LeRobot's policies share that come from noise to a chunk of actions in K steps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.models.base import PolicyObs
from rlhpc.embodied.models.heads import at_level
from rlhpc.embodied.models.lerobot.base import LerobotPolicy
from rlhpc.embodied.models.vlm import values_of


class DenoisingPolicy(LerobotPolicy):
    """Its states on the way are a chain `[B, K + 1, *state_shape]`, whose log-probability over the actions that are used is
    that of the chunk. Evaluation goes a deterministic way from noise.

    Attributes:
        steps: K.
    """

    steps: int

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int]:
        """Of a state: the network's own chunk, and an action's components or more."""

    @abstractmethod
    def see(self, obs: PolicyObs) -> tuple[Any, Tensor]:
        """Reads an observation once: for the steps, and `[B, width]` for the value head."""

    @abstractmethod
    def chain(self, seen: Any, noise: Tensor) -> Tensor:
        """The states from noise `[B, K + 1, *state_shape]`."""

    @abstractmethod
    def chain_logprobs(self, seen: Any, chain: Tensor) -> Tensor:
        """`[B, *state_shape]`, over all steps."""

    @abstractmethod
    def noise_entropy(self) -> float:
        """Of all steps' noise, for each number of a state; it is not learned."""

    @abstractmethod
    def denoise(self, seen: Any, x: Tensor) -> Tensor:
        """The deterministic way from a state of noise to actions, normalised `[B, *state_shape]`."""

    def evaluated(self, encoded: Any, hidden: Tensor, obs: PolicyObs, noise: Tensor | None) -> Tensor:
        """Returns the actions in which evaluations end, which begin in rows of `sample_start`."""
        return self.denoise(encoded, self.start_for(obs, noise, hidden.device))

    @property
    def start_shape(self) -> tuple[int, ...]:
        """See `Policy.start_shape`: that of a state."""
        return self.state_shape

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """See `Policy.features`: there is no head."""
        with self.settled():
            return None, self._values(self.see(obs)[1]) if value else None

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """See `Policy.default_forward`; `inputs` has the `chain` of states of `predict_action_batch`."""
        out: dict[str, Tensor] = {}
        with self.settled():
            seen, hidden = self.see(inputs["obs"])
            if compute_logprobs:
                out["logprobs"] = self._leveled(self.chain_logprobs(seen, inputs["chain"]))
        if compute_entropy:
            out["entropy"] = self._leveled(hidden.new_full((len(hidden), *self.state_shape), self.noise_entropy()))
        if compute_values:
            out["values"] = self._values(hidden)
        return out

    def predict_action_batch(
        self, obs: PolicyObs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Actions for a batch of observations (`Policy.predict_action_batch`); evaluations go a deterministic way."""
        with self.settled():
            seen, hidden = self.see(obs)
            values = self._values(hidden)
            if mode == "eval":
                return self._used(self.evaluated(seen, hidden, obs, noise)), {"prev_values": values}
            chain = self.chain(seen, self.noise_for(obs, noise, hidden.device))
            found = self._leveled(self.chain_logprobs(seen, chain))
        return self._used(chain[:, -1]), {"prev_logprobs": found, "prev_values": values, "inputs": {"chain": chain}}

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal `[*shape, K + 1, *state_shape]`: where the way begins, and the noise of its steps."""
        return torch.randn((*shape, self.steps + 1, *self.state_shape), generator=generator)

    def _values(self, hidden: Tensor) -> Tensor:
        return values_of(self.value_head, hidden, self.value_width)

    def _used(self, actions: Tensor) -> Tensor:
        return self.processors.after(self._played(actions))

    def _leveled(self, each: Tensor) -> Tensor:
        return at_level(self._played(each), self.logprob_type, self.chunk)

    def _played(self, each: Tensor) -> Tensor:
        """Of all that is predicted, from the first observation on, what is played from the present one on."""
        return each[:, -self.before : self.chunk - self.before, : self.dim]
