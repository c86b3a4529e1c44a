"""Blueprint of an embodied policy for the training backends."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.embodied.models import build_model, policy_section
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.registry import MODELS, policy_dtype
from rlhpc.runs.device import limit_threads
from rlhpc.runtime.devices import computes_bfloat16
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.backend import Blueprint, Full, Named
from rlhpc.training.deepspeed_config import deepspeed_config
from rlhpc.weights import frozen_names

if TYPE_CHECKING:
    from rlhpc.embodied.config import EmbodiedActorConfig


class PolicyBlueprint(Blueprint):
    """Blueprint that builds the policy of `actor.model` for an environment.

    If the weights are sharded, policies that support it (`Policy.mixed_precision`) compute in `actor.model.dtype` and keep
    their trained weights in float32. Otherwise each weight has the policy's dtype.

    Args:
        actor: Section `actor`.
        seed: Seed of the initial weights.
        spaces: Observation space and action space of one environment slot.
        device: Device of the computation.
        levels: `algorithm.logprob_type`.
        reads_norm: See `Blueprint.reads_norm`.
    """

    keeps_weights = True
    unmarked = "local"
    knobs = "lower actor.micro_batch_size"

    def __init__(
        self,
        actor: EmbodiedActorConfig,
        spaces: tuple[Any, Any],
        device: torch.device,
        *,
        seed: int,
        reads_norm: bool,
        levels: str = "chunk_level",
    ) -> None:
        self.actor, self.seed, self.reads_norm = actor, seed, reads_norm
        self.spaces, self.device = spaces, device
        self._levels = levels
        self._dtypes: dict[str, torch.dtype] = {}
        self.dtype = _dtype(actor, device)

    def layers(self, module: nn.Module) -> list[nn.Module]:
        """Returns the layers (`Blueprint.layers`) without those that no pass runs (`unused_layers` of a module): FSDP2 cannot
        accumulate gradients over micro-batches in a layer whose weights were never gathered.
        """
        unused_layers = {
            id(layer) for submodule in module.modules() for layer in getattr(submodule, "unused_layers", ())
        }
        return [layer for layer in super().layers(module) if id(layer) not in unused_layers]

    def build(self, *, empty: bool = False) -> Policy:
        """Builds the module (`Blueprint.build`); the initial weights depend only on the seed.

        Raises:
            ConfigError: The policy does not support `actor.model.gradient_checkpointing`.
        """
        with without_weights() if empty else contextlib.nullcontext():
            policy = build_model(policy_section(self.actor, self.device), *self.spaces, seed=self.seed).train()
        policy.set_logprob_type(self._levels)
        if self.actor.model.gradient_checkpointing and not policy.recompute_activations():
            raise ConfigError(
                f"actor.model.gradient_checkpointing: a policy of model_type {self.actor.model.model_type!r} has nothing to "
                "recompute; leave it false"
            )
        limit_threads(policy, self.device)
        if self.dtype != torch.float32:
            self._dtypes = {name: tensor.dtype for name, tensor in policy.state_dict().items()}
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        return policy

    def named_weights(self, module: nn.Module, full: Full, excluded_names: Container[str] = ()) -> Named:
        """Yields the weights (`Blueprint.named_weights`) under the policy's names and dtypes, which rollout ranks also use."""
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name not in excluded_names:
                weight = full(tensor).detach()
                yield name, weight.to(self._dtypes.get(name, weight.dtype))

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of the weights that never change (`Blueprint.frozen_names`)."""
        return frozen_names(module)


def check_backend(actor: EmbodiedActorConfig) -> None:
    """Checks settings that `actor.training_backend` would otherwise reject only on the ranks.

    Raises:
        ConfigError: A setting is not supported; the message names the key.
    """
    if actor.training_backend == "deepspeed":
        deepspeed_config(actor, _dtype(actor, torch.device("cpu")))


def _dtype(actor: EmbodiedActorConfig, device: torch.device) -> torch.dtype:
    """Returns the compute dtype of a policy on a device."""
    if actor.training_backend == "local" or policy_dtype(actor, computes_bfloat16(device.type)) != "bfloat16":
        return torch.float32
    factory = MODELS.find(actor.model.model_type)
    has_mixed_precision = isinstance(factory, type) and issubclass(factory, Policy) and factory.mixed_precision
    return torch.bfloat16 if has_mixed_precision else torch.float32


def without_weights() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which pretrained models are built on the meta device. It does not import transformers itself."""
    from rlhpc.embodied.models.vlm import without_weights

    return without_weights()
