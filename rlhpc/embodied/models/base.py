"""Policy interface: the network that rollout workers act with and the actor trains."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.embodied.config import EnvSideConfig, PolicyConfig, SacModelConfig
from rlhpc.embodied.envs.observations import count_rows, space_to_json
from rlhpc.embodied.models.action_heads import CategoricalHead, GaussianHead, make_head
from rlhpc.embodied.models.normalization import ObservationNormaliser
from rlhpc.runtime.env_references import to_plain
from rlhpc.runtime.former_names import former_members

#: Number of slots whose noise one generator draws; limits the surplus noise drawn at both ends of a rank's slots.
BLOCK = 16
_Sample = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _make_seeded_generator(*seeds: int, device: str = "cpu") -> torch.Generator:
    """Returns a generator seeded with `seeds`, integers of at least 0."""
    return torch.Generator(device).manual_seed(
        int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0] >> np.uint64(1))
    )


def noise_of_slots(
    sample: _Sample, seeds: Sequence[int], slots: range, block_size: int = BLOCK, device: str = "cpu"
) -> Tensor:
    """Draws the noise of one decision for `slots`, `[len(slots), ...]`. The noise of a slot does not depend on the
    other slots.

    Args:
        sample: `Policy.sample_noise`.
        seeds: Seed, step and decision: integers that identify the decision.
        slots: Global indices of the slots.
        block_size: Number of slots whose noise one generator draws.
        device: Device of the generators.
    """
    blocks = range(slots.start // block_size, -(-slots.stop // block_size))
    rows = [sample((block_size,), _make_seeded_generator(*seeds, block, device=device)) for block in blocks]
    first_slot = blocks.start * block_size
    return torch.cat(rows)[slots.start - first_slot : slots.stop - first_slot]


def noise_of_decision(
    sample: _Sample, seeds: Sequence[int], slots: range, env_cfg: EnvSideConfig, device: torch.device
) -> Tensor:
    """Draws the noise of a training decision on the policy's device (`noise_of_slots`). With environments of tensors, one
    generator on the device draws for all slots of the run, because thousands of slots would need hundreds of blocks.

    Args:
        sample, seeds, slots: See `noise_of_slots`.
        env_cfg: Section `env.train`.
        device: Device of the policy.
    """
    if env_cfg.env_type == "tensors":
        noise = noise_of_slots(sample, seeds, slots, env_cfg.num_envs, _choose_generator_device(device.type))
    else:
        noise = noise_of_slots(sample, seeds, slots)
    return noise.to(device)


@functools.cache
def _choose_generator_device(device_type: str) -> str:
    """Returns the type of a device, or `cpu` if torch has no random generator for it."""
    try:
        torch.Generator(device_type)
    except RuntimeError:
        return "cpu"
    return device_type


def noise_of_episodes(
    sample: _Sample, seed: int, episodes: Sequence[int], decisions: Sequence[int], first_slot: int = 0
) -> Tensor:
    """Draws the starting noise of an evaluation's slots, `[N, ...]`.

    Args:
        sample: `Policy.sample_start`.
        seed: Seed of the evaluation.
        episodes, decisions: Index of each slot's episode, and of the decision within the episode.
        first_slot: Number of the first slot among those of all ranks.
    """
    slot_positions = enumerate(zip(episodes, decisions, strict=True), first_slot)
    return torch.cat([sample((1,), _make_seeded_generator(seed, slot, e, t)) for slot, (e, t) in slot_positions])


def build_linear(num_inputs: int, num_outputs: int, init_gain: float, is_orthogonal: bool) -> nn.Linear:
    """Builds a linear layer. If `is_orthogonal` is true, its weights are orthogonal and its bias is 0, as usual for PPO."""
    linear_layer = nn.Linear(num_inputs, num_outputs)
    if is_orthogonal:
        nn.init.orthogonal_(linear_layer.weight, init_gain)
        nn.init.zeros_(linear_layer.bias)
    return linear_layer


Output = TypeVar("Output")
Method = TypeVar("Method", bound=Callable[..., Any])

#: One observation tensor, or several by name.
Obs = Tensor | dict[str, Tensor]


def _disable_gradient(method: Method) -> Method:
    """Wraps a policy's method so that it computes no gradient, except in `Policy.mean_action`. If gradients are already
    disabled, the wrapper leaves the grad mode unchanged, so that a trace contains no change of the grad mode.
    """

    @functools.wraps(method)
    def call(self: Policy, *args: Any, **kwargs: Any) -> Any:
        if self._differentiates or not torch.is_grad_enabled():
            return method(self, *args, **kwargs)
        with torch.no_grad():
            return method(self, *args, **kwargs)

    return cast(Method, call)


@former_members(imitated="imitated_offsets", played="decode_plan")
class Policy(nn.Module):
    """Actor-critic. A subclass builds its networks and implements `features`.

    Args:
        cfg: Section `actor.model`.
        observation_space, action_space: Spaces of one environment slot.

    Attributes:
        logprob_type: Level of log-probabilities and entropies, one of `LEVELS`: token_level
            `[B, chunk, dim]`, action_level `[B, chunk]`, chunk_level `[B]`. The trainer sets it by `set_logprob_type`.
        chunk: Number of actions per decision.
        value_width: Number of values per observation: 1, or one for each action of the chunk.
    """

    logprob_type = "chunk_level"
    #: True if the policy can compute in the lower precision of `actor.model.dtype`, whatever the precision of its weights.
    mixed_precision = False
    #: True if actions follow a distribution of `rlhpc.embodied.models.action_heads`.
    has_head = True
    #: True for success classifiers. They do not act, and their `bc_loss` gets `success [B]` for the observations after steps.
    is_success_classifier = False
    #: Options of `actor.model.kwargs` that only a new policy reads; descriptions (`spec`) leave them out.
    start_options: tuple[str, ...] = ()
    #: Normaliser of observations, if `actor.model.normalize_observations` is true.
    normaliser: ObservationNormaliser | None
    #: Value head of a pretrained network, see `actor.model.add_value_head`.
    value_head: nn.Module | None
    _differentiates = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Disables gradients in a subclass's `predict_action_batch`; training differentiates `default_forward`, `bc_loss`
        and `mean_action`.
        """
        super().__init_subclass__(**options)
        if "predict_action_batch" in vars(cls):
            cls.predict_action_batch = _disable_gradient(cls.predict_action_batch)  # type: ignore[method-assign]

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.observation_space, self.action_space = observation_space, action_space
        self.normaliser = None
        self.chunk = cfg.num_action_chunks
        has_action_values = (
            hasattr(cfg, "value_per_action") and cfg.value_per_action
        )  # configurations of off-policy runs have no such key
        self.value_width = self.chunk if has_action_values else 1
        if self.has_head:
            assert not isinstance(cfg, SacModelConfig)  # its policies build their own heads
            self.head: CategoricalHead | GaussianHead = make_head(action_space, cfg.log_std_init, self.chunk)
        self._cfg = cfg

    def set_logprob_type(self, level: str) -> None:
        """Sets the level of log-probabilities and entropies (`logprob_type`)."""
        self.logprob_type = level

    def forward(self, work: Callable[[Any], Output]) -> Output:
        """Runs `work(self)` and returns its result. Wrappers that shard the weights hook this call as the start and end of a
        pass.

        Args:
            work: Calls any of the methods below; returns tensors, or lists, tuples or dicts of tensors.
        """
        return work(self)

    def recompute_activations(self) -> bool:
        """Enables gradient checkpointing; returns False if the policy does not support it."""
        return False

    @property
    def imitated_offsets(self) -> range:
        """Offsets of the actions that behaviour cloning learns, relative to the observation; by default, the offsets of
        the chunk's actions.
        """
        return range(self.chunk)

    @abstractmethod
    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the head's input `[B, head.inputs]` if `policy`, and values `[B]` (`[B, value_width]` if the width is above
        1) if `value`.
        """

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """Runs the training pass.

        Args:
            inputs: `obs` (`[B, ...]`, or a dict of such tensors), `actions [B, chunk, dim]`, and the `inputs` that
                `predict_action_batch` returned, if any.
            compute_logprobs, compute_entropy, compute_values: Results to compute.

        Returns:
            `logprobs` and `entropy` with shapes as in `logprob_type`, and `values` `[B]` or `[B, chunk]`.
        """
        head_input, predicted_values = self.features(inputs["obs"], compute_logprobs or compute_entropy, compute_values)
        outputs: dict[str, Tensor] = {}
        if head_input is not None:
            logprobs, entropy = self.head.evaluate(head_input, inputs["actions"], compute_entropy, self.logprob_type)
            outputs["logprobs"] = logprobs
            if entropy is not None:
                outputs["entropy"] = entropy
        if predicted_values is not None:
            outputs["values"] = predicted_values
        return outputs

    @_disable_gradient
    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions, without gradients.

        Args:
            obs: `[B, ...]`, or a dict of such tensors if the environment has several observations.
            mode: "train" samples; "eval" takes the most likely action, or acts deterministically from `noise`.
            noise: In "train", rows `[B, ...]` of `sample_noise`; None draws them. In "eval", rows of `sample_start`, for
                policies that use it; None draws them with a fixed seed.

        Returns:
            Actions `[B, chunk, dim]`, and a dict with `prev_logprobs` and `prev_values` as in `default_forward`. If
            log-probabilities depend on more than observations and actions, it also has `inputs`, a dict of tensors
            `[B, ...]` that `default_forward` needs.
        """
        head_input, predicted_values = self.features(obs, True, True)
        assert head_input is not None and predicted_values is not None
        noise = None if mode == "eval" else self.noise_for(obs, noise, head_input.device)
        actions, logprobs = self.head.act(head_input, noise, self.logprob_type)
        return actions, {"prev_logprobs": logprobs, "prev_values": predicted_values}

    def mean_action(self, obs: Obs) -> Tensor:
        """Returns the actions that `predict_action_batch` chooses in "eval", as differentiable tensors.

        Args:
            obs: Observations as for `predict_action_batch`.

        Returns:
            Actions `[B, chunk, dim]`.
        """
        self._differentiates = True
        try:
            return self.predict_action_batch(obs, mode="eval")[0]
        finally:
            self._differentiates = False

    @property
    def horizon(self) -> int:
        """Number of actions that a flow policy predicts at once in `plan`; 0 for other policies."""
        return 0

    def plan(self, obs: Obs, guide: Guide | None = None, noise: Tensor | None = None) -> Tensor:
        """Returns the flow's complete prediction, computed as in evaluation; its shape is `[B, *state_shape]`.

        Args:
            obs: Observations as for `predict_action_batch`.
            guide: Guidance towards the previous chunk.
            noise: Rows of `sample_start`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not act by a flow")

    def decode_plan(self, plan: Tensor, part: slice) -> Tensor:
        """Returns the actions `[B, n, dim]` in slice `part` of the result of `plan`, in the environment's units."""
        raise NotImplementedError(f"{type(self).__name__} does not act by a flow")

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws noise for `predict_action_batch`, `[*shape, ...]`, on the generator's device; each row is for one slot and
        step.
        """
        return self.head.sample_noise(shape, generator)

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of the starting noise of evaluation, from which the policy acts deterministically; () for none."""
        return ()

    def sample_start(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws the starting noise of evaluation, standard normal `[*shape, *start_shape]`. A start at zero, which training
        does not cover, would end between the modes of the learned distribution.
        """
        return torch.randn((*shape, *self.start_shape), generator=generator)

    def start_for(self, obs: Obs, noise: Tensor | None, device: torch.device) -> Tensor:
        """Returns the starting noise of evaluation, `[B, *start_shape]`: `noise`, or noise drawn with a fixed seed."""
        if noise is None:
            noise = noise_of_slots(self.sample_start, (0,), range(count_rows(obs)))
        return noise.to(device)

    def noise_for(self, obs: Obs, noise: Tensor | None, device: torch.device) -> Tensor:
        """Returns the sampling noise for `predict_action_batch`: `noise`, or newly drawn noise if it is None."""
        return self.sample_noise((count_rows(obs),), torch.default_generator).to(device) if noise is None else noise

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of behaviour cloning, `[B]`: by default the negative log-likelihood of
        `actions [B, chunk, dim]` given `obs`.

        `is_pad [B, chunk]` marks actions beyond the end of the episode, which repeat its last action.
        """
        logprobs = self.default_forward(inputs)["logprobs"]
        return -logprobs.reshape(len(logprobs), -1).sum(1)

    def value(self, obs: Obs) -> Tensor:
        """Returns values `[B]`, or `[B, chunk]`."""
        predicted_values = self.features(obs, False, True)[1]
        assert predicted_values is not None
        return predicted_values

    def _values(self, features: Tensor) -> Tensor:
        """Returns the value head's outputs for hidden states, `[B]`, or `[B, value_width]` if the width is above 1.
        Without a value head, returns zeros.
        """
        if self.value_head is None:
            return torch.zeros(
                (len(features), self.value_width) if self.value_width > 1 else len(features), device=features.device
            )
        return self.value_head(features)

    def spec(self) -> dict[str, Any]:
        """Returns a JSON-serializable description from which `policy_from_spec` builds the same network."""
        from omegaconf import OmegaConf

        model = to_plain(self._cfg) if OmegaConf.is_config(self._cfg) else vars(self._cfg)
        if self.start_options:
            options = {
                name: option_value for name, option_value in model["kwargs"].items() if name not in self.start_options
            }
            model = {**model, "kwargs": options}
        return {
            "model": model,
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
        }


#: Function from states `[B, chunk, dim]` and times `[B]` to velocities `[B, chunk, dim]`.
Velocity = Callable[[Tensor, Tensor], Tensor]


def overlap_weights(horizon: int, num_executed: int, inference_delay: int) -> Tensor:
    """Returns the guidance weight of each action of the previous chunk, `[horizon]` (real-time chunking, equation 5).

    Args:
        horizon: H, number of actions in a chunk.
        num_executed: s, number of actions executed per chunk. The last s actions have no counterpart in the previous chunk, so
            their weight is 0.
        inference_delay: d, number of actions executed before the new chunk is available. Their weight is 1; later
            weights decrease.
    """
    weights = torch.zeros(horizon)
    weights[:inference_delay] = 1.0
    for i in range(inference_delay, horizon - num_executed):
        overlap_fraction = (horizon - num_executed - i) / (horizon - num_executed - inference_delay + 1)
        weights[i] = overlap_fraction * math.expm1(overlap_fraction) / math.expm1(1.0)
    return weights


@dataclass(frozen=True)
class Guide:
    """Guidance that makes a chunk agree with target actions (real-time chunking).

    Attributes:
        target: Actions in the flow's scale, `[B, ...]` like its states.
        weights: Weight of each action, broadcastable to `target`.
        max_weight: β, upper bound of the correction's weight.
    """

    target: Tensor
    weights: Tensor
    max_weight: float

    def __call__(self, velocity: Velocity) -> Velocity:
        """Returns the corrected velocity."""

        def correct_velocity(x: Tensor, t: Tensor) -> Tensor:
            with torch.enable_grad():
                x_t = x.detach().requires_grad_()
                flow_velocity = velocity(x_t, t)
                predicted_actions = x_t - t[:, None, None] * flow_velocity
                error = ((self.target - predicted_actions) * self.weights).detach()
                (gradient,) = torch.autograd.grad(predicted_actions, x_t, error)
            return flow_velocity.detach() - self._compute_guidance_weight(t)[:, None, None] * gradient

        return correct_velocity

    def _compute_guidance_weight(self, t: Tensor) -> Tensor:
        return (((1 - t) ** 2 + t**2) / (t * (1 - t))).clamp(max=self.max_weight)  # the weight is infinite at t = 1
