"""Which experts a mixture's routers choose: how evenly, as metrics and as a loss that makes it more even; and how they choose
those that an engine chose.

The loss is that of Switch Transformer (Fedus et al. 2021, eq. 4 to 6), as transformers has it: the number of experts times the
sum, over experts, of the choices per token times the mean probability, over all layers of a micro-batch; k where all is even.

Trainer and engine round differently, so where two experts are about equally likely, a token may go to one there and to the
other here, and its log-prob is another. With replay (Ma et al. 2025, arXiv 2510.11370) a router takes the experts that it is
told, weighted by its own probabilities of these, through which its gradient flows.
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
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError

#: The column of what engines chose.
EXPERTS = "experts"


class Routing:
    """What the routers of a model say in a forward pass.

    Args:
        routers: Modules that give logits `[tokens, experts]` first, and the chosen experts `[tokens, k]` last.
    """

    def __init__(self, routers: list[nn.Module]) -> None:
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        self._routers, self._tells = routers, False
        self._told: Tensor | None = None
        for router in routers:
            router.register_forward_hook(self._note)

    @property
    def choices(self) -> int:
        """How many experts all routers choose for a token."""
        routers: list[Any] = [*self._routers]
        return sum(int(router.top_k) for router in routers)

    def replay(self, told: Tensor | None) -> None:
        """From now on routers choose what they are told, also where a backward pass computes layers anew.

        Args:
            told: `[tokens, choices]`, for the lines that the model reads; -1 where a router is to choose. None ends it.
        """
        if told is not None and not self._tells:
            self._tells = True
            for number, router in enumerate(self._routers):
                router.forward = self._telling(router.forward, number, router)
        self._told = None if told is None else told.long().view(len(told), len(self._routers), -1)

    def _telling(self, inner: Any, number: int, router: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._told is None:
                return inner(*args, **kwargs)
            with _Told(self._told[:, number], int(router.weight.shape[0])) as mode:
                found = inner(*args, **kwargs)
            if mode.asked != 1:
                raise ConfigError(
                    f"rollout.routing_replay: {type(router).__name__} does not choose experts as others do: leave it false"
                )
            return found

        return forward

    def _note(self, router: nn.Module, given: Any, found: Any) -> None:
        if self._seen is not None:  # in a backward pass, layers that are computed anew say it again
            self._seen.append((found[0], found[-1]))

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """In the block, what they say comes into the list."""
        seen = self._seen = []
        try:
            yield seen
        finally:
            self._seen = None


class _Told(TorchFunctionMode):
    """In the block, the most likely experts are those that were told.

    Args:
        told: `[tokens, k]`, -1 where nothing was.
        experts: How many there are.
    """

    def __init__(self, told: Tensor, experts: int) -> None:
        super().__init__()
        self._told, self._experts, self.asked = told, experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        likely = args[0]
        if likely.shape[-1] != self._experts or found[1].shape != self._told.shape:
            return found
        self.asked += 1
        chosen = torch.where(self._told < 0, found[1], self._told)
        return type(found)((likely.gather(-1, chosen), chosen))


#: Models that are watched.
_watched: WeakKeyDictionary[nn.Module, Routing] = WeakKeyDictionary()


def routing_of(model: nn.Module) -> Routing | None:
    """Watches a model's routers; None if it has none, or does not say which they are. One that was watched before stays so."""
    causal = pretrained_in(model)
    if causal is None:
        return None
    if causal not in _watched:
        recorded = next(
            (
                part._can_record_outputs["router_logits"]
                for part in causal.modules()
                if "router_logits" in (getattr(part, "_can_record_outputs", None) or {})
            ),
            None,
        )
        kind = getattr(recorded, "target_class", None)
        routers = [] if kind is None else [part for part in causal.modules() if isinstance(part, kind)]
        if not routers or getattr(recorded, "index", None) != 0:
            return None
        _watched[causal] = Routing(routers)
    return _watched[causal]


def balance(
    seen: list[tuple[Tensor, Tensor]], batch: TokenBatch, share: RowShare | None = None
) -> tuple[Tensor, Tensor]:
    """The loss, with gradients, and the largest share of choices that an expert of a layer has, relative to an even one.

    Args:
        seen: Of each layer, see `Routing`.
        batch: What the model read, in the form in which it did: its padding does not count.
        share: Of rows, if several ranks share them: all get the same, of the whole row.
    """
    experts, tokens = seen[0][0].shape[1], _tokens(batch, share).to(seen[0][0].device)
    seen = [(logits[tokens], chosen[tokens]) for logits, chosen in seen]
    counts = torch.stack([torch.bincount(chosen.flatten(), minlength=experts) for _, chosen in seen]).float()
    rows = torch.tensor(float(sum(len(logits) for logits, _ in seen)), device=counts.device)
    probabilities = torch.stack([logits.float().softmax(-1).sum(0) for logits, _ in seen]).sum(0)
    if share is not None:
        counts, rows, probabilities = (share.together(each) for each in (counts, rows, probabilities))
    rows = rows.clamp(min=1.0)
    loss = experts * ((counts.sum(0) / rows) * (probabilities / rows)).sum()
    return loss, (counts.amax(1) / counts.sum(1).clamp(min=1.0) * experts).max()


def told_of(batch: TokenBatch, share: RowShare | None = None) -> Tensor | None:
    """What engines chose, for the lines that the model reads; None if nobody says.

    Args:
        batch: In the form in which the model reads it.
        share: Of rows, if several ranks share them.
    """
    told = batch.columns.get(EXPERTS)
    if told is None:
        return None
    if not batch.packed:
        return batch.padded(told, -1).flatten(0, 1)
    start, end = (0, max(2, batch.tokens)) if share is None else share.bounds(batch)
    return nn.functional.pad(told, (0, 0, 0, max(0, end - batch.tokens)), value=-1)[start:end]


def _tokens(batch: TokenBatch, share: RowShare | None) -> Tensor:
    """Where tokens are among the lines that the model read, or its part of the row."""
    if share is not None:
        start, end = share.bounds(batch)
        return torch.arange(max(0, min(end, batch.tokens) - start))
    return torch.arange(batch.tokens) if batch.packed else batch.places
