"""What ranks do that train models with pictures, of which each sees some or none in a micro-batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_ranks import LR, TEMPERATURE, make_config

from rlhpc.language.data.images import PromptImages
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import Pictures, TokenBatch
from rlhpc.language.training.trainer import TokenTrainer

Sample = tuple[list[int], PromptImages | None]
#: Which sample each of two ranks reads in each micro-batch of a step; None reads nothing.
DEALT: tuple[tuple[int | None, int | None], ...] = ((1, 0), (0, 2), (2, None), (0, 0))


def batch_of(samples: list[Sample]) -> TokenBatch:
    ids, seen = zip(*samples, strict=True)
    weights = [torch.linspace(-1, 1, len(one)) for one in ids]
    return TokenBatch.from_sequences(
        ids, [[True] * len(one) for one in ids], {"weights": weights}, pictures=Pictures.from_images(seen)
    )


def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = -(batch.columns["weights"] * scores.logprobs).sum() / 50
    if scores.values is not None:
        value = value + (scores.values - batch.columns["weights"]).square().sum() / 50
    return value, {"loss": value}


def train(
    rank: Any, folder: str, samples: list[Sample], changes: dict[str, Any],
    load: str = "", then: str = "", steps: int = 2,
) -> dict[str, Any]:  # fmt: skip
    """Losses, norms, what is said of all samples before and after, and the weights then. A rank alone reads what two would.

    Args:
        rank: This one.
        folder: The model's.
        samples: Some that show something, and one that does not.
        changes: Of section `actor`.
        load: Goes on from a checkpoint of this folder.
        then: Saves to this folder, and exports to `export` below it.
        steps: So many.
    """
    trainer = TokenTrainer(make_config(folder, **changes), rank, has_values=changes.get("model.value_head", False))
    backend: Any = trainer.backend
    if load:
        trainer.load(Path(load))
    nothing = batch_of(samples[:1]).empty_sample()

    def said(how: Callable[..., TokenScores]) -> torch.Tensor:
        """One rank looks, and another does not, without gradients as well."""
        order = samples if rank.rank else samples[::-1]
        each = [how(batch_of([one]), temperature=TEMPERATURE).logprobs for one in order]
        return torch.cat(each if rank.rank else each[::-1])

    found: dict[str, Any] = {"losses": [], "norms": [], "packed": trainer.packed, "before": said(trainer.forward)}
    for _ in range(steps):
        backend.move_to_host()  # gives its memory away, as on an accelerator that others take in turn
        backend.reload()
        mine = [one for dealt in DEALT for one in dealt[rank.rank :: rank.world_size]]
        parts = [nothing if one is None else batch_of([samples[one]]) for one in mine]
        metrics = trainer.forward_backward(parts, loss, temperature=TEMPERATURE)
        total = torch.stack([m["loss"] for m in metrics]).double().sum()
        found["losses"].append(float(rank.all_reduce(total)))
        found["norms"].append(trainer.optimizer_step(LR))
    found["after"], found["reference"] = said(trainer.forward), said(trainer.reference)
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    if then:
        trainer.save(Path(then))
        trainer.export(Path(then) / "export")
    return found


def several(rank: Any, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """`train` of one case after the other."""
    return [train(rank, *case) for case in cases]
