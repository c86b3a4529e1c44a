"""Which experts a mixture's routers choose: how evenly, as metrics and as a loss that makes it more even.

The loss is that of Switch Transformer (Fedus et al. 2021, eq. 4 to 6), as transformers has it: the number of experts times the
sum, over experts, of the choices per token times the mean probability, over all layers of a micro-batch; k where all is even.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.context import RowShare
from rlhpc.language.tokens.model import pretrained_in


class Routing:
    """What the routers of a model say in a forward pass.

    Args:
        routers: Modules that give logits `[tokens, experts]` first, and the chosen experts `[tokens, k]` last.
    """

    def __init__(self, routers: list[nn.Module]) -> None:
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        for router in routers:
            router.register_forward_hook(self._note)

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


def _tokens(batch: TokenBatch, share: RowShare | None) -> Tensor:
    """Where tokens are among the lines that the model read, or its part of the row."""
    if share is not None:
        start, end = share.bounds(batch)
        return torch.arange(max(0, min(end, batch.tokens) - start))
    return torch.arange(batch.tokens) if batch.packed else batch.places
