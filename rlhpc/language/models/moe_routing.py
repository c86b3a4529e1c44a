"""Expert routing of mixture-of-experts models: load balancing loss and metric, and routing replay (R3).

The loss follows Switch Transformer (Fedus et al. 2021, eq. 4 to 6), as implemented in transformers: each expert's number of
choices per token is multiplied by its mean probability; the loss is the number of experts times the sum of these products over
experts, taken over all layers of a micro-batch. It equals k if routing is even.

Trainer and engine round differently. If two experts are about equally likely, trainer and engine may choose different experts
for a token, which changes the token's log-prob. With replay (Ma et al. 2025, arXiv 2510.11370), the trainer's router uses the
engine's experts. It weights them by the trainer's probabilities, so that the router gets a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhpc.language.models.context_parallel import RowShare
from rlhpc.language.models.loading import pretrained_in
from rlhpc.language.models.token_batch import EXPERTS, TokenBatch
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.torch_adapter import replace_forward


class Routing:
    """Recording and replay of the expert choices of a model's routers.

    Args:
        routers: Modules that return a tuple of logits `[tokens, experts]`, …, expert ids `[tokens, k]`.
    """

    def __init__(self, routers: list[nn.Module]) -> None:
        self._router_outputs: list[tuple[Tensor, Tensor]] | None = None
        self._routers = routers
        self._is_wrapped = False
        self._replay_ids: Tensor | None = None
        for router in routers:
            router.register_forward_hook(self._record_choices)

    @property
    def choices(self) -> int:
        """Number of experts per token, summed over all routers."""
        routers: list[Any] = [*self._routers]
        return sum(int(router.top_k) for router in routers)

    def replay(self, experts: Tensor | None) -> None:
        """Makes the routers use the given experts in all following passes, including layers that backward recomputes.

        Args:
            experts: `[tokens, choices]`, in the order in which the model reads the tokens; -1 leaves the choice to the router.
                None ends replay.
        """
        if experts is not None and not self._is_wrapped:
            self._is_wrapped = True
            for layer, router in enumerate(self._routers):
                replace_forward(router, self._wrap_router(router.forward, layer, router))
        self._replay_ids = None if experts is None else experts.long().view(len(experts), len(self._routers), -1)

    def _wrap_router(self, inner: Any, router_index: int, router: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._replay_ids is None:
                return inner(*args, **kwargs)
            with _ReplayMode(self._replay_ids[:, router_index], int(router.weight.shape[0])) as replay:
                outputs = inner(*args, **kwargs)
            if replay.num_calls != 1:
                raise ConfigError(
                    f"rollout.routing_replay: {type(router).__name__} does not choose experts as others do: leave it false"
                )
            return outputs

        return forward

    def _record_choices(self, router: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._router_outputs is not None:  # None while the backward pass recomputes layers
            self._router_outputs.append((outputs[0], outputs[-1]))

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yields a list that collects (logits, expert ids) of each router call within the block."""
        router_outputs = self._router_outputs = []
        try:
            yield router_outputs
        finally:
            self._router_outputs = None


class _ReplayMode(TorchFunctionMode):
    """Torch function mode in which `topk` over the experts' probabilities returns the replayed experts.

    Args:
        replayed_experts: `[tokens, k]`, expert ids; -1 leaves the choice to the router.
        num_experts: Number of experts.

    Attributes:
        num_calls: Number of `topk` calls that were replaced.
    """

    def __init__(self, replayed_experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._replay_ids = replayed_experts
        self._experts = num_experts
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return outputs
        probabilities = args[0]
        if probabilities.shape[-1] != self._experts or outputs[1].shape != self._replay_ids.shape:
            return outputs
        self.num_calls += 1
        expert_ids = torch.where(self._replay_ids < 0, outputs[1], self._replay_ids)
        return type(outputs)((probabilities.gather(-1, expert_ids), expert_ids))


#: Routing of each model whose routers have hooks.
_routing_by_model: WeakKeyDictionary[nn.Module, Routing] = WeakKeyDictionary()


def routing_of(model: nn.Module) -> Routing | None:
    """Returns a model's routing; the first call adds hooks. Returns None if the model declares no routers to transformers."""
    causal_model = pretrained_in(model)
    if causal_model is None:
        return None
    if causal_model not in _routing_by_model:
        router_record = next(
            (
                submodule._can_record_outputs["router_logits"]
                for submodule in causal_model.modules()
                if "router_logits" in (getattr(submodule, "_can_record_outputs", None) or {})
            ),
            None,
        )
        router_class = getattr(router_record, "target_class", None)
        routers = (
            []
            if router_class is None
            else [submodule for submodule in causal_model.modules() if isinstance(submodule, router_class)]
        )
        if not routers or getattr(router_record, "index", None) != 0:
            return None
        _routing_by_model[causal_model] = Routing(routers)
    return _routing_by_model[causal_model]


def load_balance_loss(
    router_outputs: list[tuple[Tensor, Tensor]], batch: TokenBatch, share: RowShare | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the load balancing loss, with gradients, and the load of the most loaded expert in any layer.

    The load is the expert's fraction of the layer's choices times the number of experts; it is 1 if routing is even.

    Args:
        router_outputs: (logits, expert ids) of each layer's router, from `Routing.watching`.
        batch: The batch in the form that the model read; padding does not count.
        share: This rank's part of each row in context parallelism; all ranks get the results of the full row.
    """
    num_experts, tokens = router_outputs[0][0].shape[1], _token_indices(batch, share).to(router_outputs[0][0].device)
    router_outputs = [(logits[tokens], expert_ids[tokens]) for logits, expert_ids in router_outputs]
    counts = torch.stack(
        [torch.bincount(expert_ids.flatten(), minlength=num_experts) for _, expert_ids in router_outputs]
    ).float()
    num_tokens = torch.tensor(float(sum(len(logits) for logits, _ in router_outputs)), device=counts.device)
    probabilities = torch.stack([logits.float().softmax(-1).sum(0) for logits, _ in router_outputs]).sum(0)
    if share is not None:
        counts, num_tokens, probabilities = (share.sum(total) for total in (counts, num_tokens, probabilities))
    num_tokens = num_tokens.clamp(min=1.0)
    loss = num_experts * ((counts.sum(0) / num_tokens) * (probabilities / num_tokens)).sum()
    return loss, (counts.amax(1) / counts.sum(1).clamp(min=1.0) * num_experts).max()


def replayed_experts(batch: TokenBatch, share: RowShare | None = None) -> Tensor | None:
    """Returns the engine's experts in the order in which the model reads the tokens; None if the batch has none.

    Args:
        batch: Batch in the form that the model reads.
        share: This rank's part of each row in context parallelism.

    Returns:
        `[tokens, choices]`; -1 for padding.
    """
    experts = batch.columns.get(EXPERTS)
    if experts is None:
        return None
    if not batch.packed:
        return batch.padded(experts, -1).flatten(0, 1)
    experts = experts[batch.row.tokens]
    start, end = (0, max(2, len(experts))) if share is None else share.bounds(batch)
    return nn.functional.pad(experts, (0, 0, 0, max(0, end - len(experts))), value=-1)[start:end]


def _token_indices(batch: TokenBatch, share: RowShare | None) -> Tensor:
    """Returns the flat indices of the tokens, without padding, in the model's input on this rank.

    Tokens of a shared prefix occur once for each sample, as without sharing.
    """
    if share is not None:
        start, end = share.bounds(batch)
        return torch.arange(max(0, min(end, batch.tokens) - start))
    return batch.row.places if batch.packed else batch.places
