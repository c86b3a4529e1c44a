"""Cells of the table of families: what trainer and hf engine do with a tiny model of a family."""

from __future__ import annotations

import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines import make_rollout
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runtime.errors import ConfigError, UserError
from tests.families.models import EAGER, save_family
from tests.forked import Rank, forked

#: Columns of the table, in order.
CELLS = ("trains", "packs", "decodes", "after update", "LoRA", "sharded")
YES = "yes"
#: Largest difference of log-probs in float32 that rounding explains; a scan in chunks sums in another order than its steps.
TOLERANCE = 3e-5
_LENGTHS = (12, 9, 3, 17)


def config_of(folder: Path, **actor: Any) -> Any:
    """Returns the configuration of a run that trains the model of a folder."""
    cfg = default_section(GrpoConfig)
    keys = {"model.model_path": str(folder), "model.dtype": "float32", "optim.name": "adamw", "optim.adam_eps": 1e-3}
    if folder.name in EAGER:
        keys["model.attn_implementation"] = "eager"
    for key, value in {**keys, **{name.replace("__", "."): value for name, value in actor.items()}}.items():
        OmegaConf.update(cfg.actor, key, value)
    cfg.rollout.max_batch_size = 3
    return cfg


def make_batch(lengths: Sequence[int] = _LENGTHS) -> TokenBatch:
    """Returns samples of random tokens, of which the model writes two thirds."""
    generator = torch.Generator().manual_seed(5)
    return TokenBatch.from_sequences(
        [torch.randint(3, 64, (length,), generator=generator) for length in lengths],
        [torch.arange(length) >= max(1, length // 3) for length in lengths],
    )


def _loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = -scores.logprobs[batch.mask].mean()
    return value, {"loss": value}


def _train(trainer: TokenTrainer, steps: int = 4) -> list[float]:
    """Returns the loss of each step on the same samples."""
    batch = make_batch().read_by(trainer.packed)
    losses = list[float]()
    for _ in range(steps):
        (metrics,) = trainer.forward_backward([batch], _loss)
        losses.append(float(metrics["loss"]))
        trainer.optimizer_step(3e-3)
    return losses


def _logprobs(trainer: TokenTrainer, batch: TokenBatch) -> torch.Tensor:
    return trainer.forward(batch.read_by(trainer.packed)).logprobs[batch.mask].detach()


def _difference(trainer: TokenTrainer, engine: Any) -> float:
    """Returns the largest difference of the log-probs of drawn tokens between engine and trainer."""
    generator = torch.Generator().manual_seed(3)
    requests = [
        Request(number, tuple(torch.randint(3, 64, (length,), generator=generator).tolist()),
                SamplingParams(max_new_tokens=6 + 4 * (number % 3)), number)
        for number, length in enumerate((1, 20, 4, 9, 2))
    ]  # fmt: skip
    completions: list[Completion] = engine.generate(requests)
    texts = [torch.tensor([*r.prompt_ids, *c.token_ids]) for r, c in zip(requests, completions, strict=True)]
    masks = [torch.arange(len(t)) >= len(r.prompt_ids) for t, r in zip(texts, requests, strict=True)]
    drawn = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    return float((drawn - _logprobs(trainer, TokenBatch.from_sequences(texts, masks))).abs().max())


def _verdict(difference: float) -> str:
    return YES if difference <= TOLERANCE else f"log-probs differ by {difference:.1g}"


class Family:
    """A tiny model of a family, and the cells that have been computed."""

    def __init__(self, name: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="rlhpc-family-")
        self._folder = Path(self._temporary.name) / name
        save_family(self._folder, name)

    def _trainer(self, **actor: Any) -> TokenTrainer:
        return TokenTrainer(config_of(self._folder, **actor), Rank(0, 1))  # type: ignore[arg-type]

    def _engine(self) -> Any:
        return make_rollout(config_of(self._folder), model_path=str(self._folder), device="cpu", seed=0)

    @cached_property
    def _untrained(self) -> TokenTrainer:
        return self._trainer()

    @cached_property
    def _trained(self) -> tuple[TokenTrainer, list[float]]:
        """A trainer after four steps, and their losses."""
        trainer = self._trainer()
        return trainer, _train(trainer, 4)

    @cached_property
    def _updated_engine(self) -> Any:
        return self._engine()

    def trains(self) -> str:
        """Gradients are finite and reach each trained weight, and steps lower the loss."""
        trainer, losses = self._trained
        if not losses[-1] < losses[0]:
            return f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
        trainer.forward_backward([make_batch().read_by(trainer.packed)], _loss)
        parameters = [(n, p) for n, p in trainer.backend.module.named_parameters() if p.requires_grad]
        missing_parts = {
            name.rpartition("layers.")[2].partition(".")[2] or name for name, p in parameters if p.grad is None
        }
        if missing_parts:
            return f"no gradient for {', '.join(sorted(missing_parts))}"
        return YES if all(bool(p.grad.isfinite().all()) for _, p in parameters if p.grad is not None) else "not finite"

    def packs(self) -> str:
        """Samples of one row have the log-probs that each has alone."""
        trainer, batch = self._untrained, make_batch()
        if not trainer.packed:
            return "no: each sample is a row"
        alone = torch.cat([_logprobs(trainer, sample) for sample in batch.split([1] * len(batch))])
        return _verdict(float((_logprobs(trainer, batch) - alone).abs().max()))

    def decodes(self) -> str:
        """Tokens that the hf engine draws in three rows for five requests have the trainer's log-probs."""
        return _verdict(_difference(self._untrained, self._engine()))

    def after_update(self) -> str:
        """The same after training steps on all weights."""
        trainer, _ = self._trained
        self._updated_engine.update_weights(1, trainer.named_weights())
        return _verdict(_difference(trainer, self._updated_engine))

    def lora(self) -> str:
        """The same after training steps on adapters."""
        trainer = self._trainer(lora__rank=4)
        losses = _train(trainer, 4)
        if not losses[-1] < losses[0]:
            return f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
        self._updated_engine.update_weights(2, trainer.named_weights())
        return _verdict(_difference(trainer, self._updated_engine))

    def sharded(self) -> str:
        """Weights on two ranks, by FSDP2: the log-probs after a step are those of one rank."""
        trainer = self._trainer()
        _train(trainer, 1)
        expected = _logprobs(trainer, make_batch())
        results = forked(2, "tests.families.cells:train_sharded", str(self._folder), timeout=280)
        if isinstance(results[0], str):
            return f"refused: {results[0]}"
        return _verdict(max(float((result - expected).abs().max()) for result in results))


def train_sharded(rank: Rank, folder: str) -> torch.Tensor | str:
    """Trains a step with sharded weights, on the same samples on each rank; returns log-probs, or the refusal."""
    warnings.simplefilter("ignore")
    try:
        trainer = TokenTrainer(config_of(Path(folder), training_backend="fsdp"), rank)  # type: ignore[arg-type]
    except ConfigError as error:
        return _reason(error)
    _train(trainer, 1)
    return _logprobs(trainer, make_batch())


def _reason(error: Exception) -> str:
    return textwrap.shorten(str(error).replace("|", "∣"), 300, placeholder=" …")


@lru_cache(maxsize=1)
def _family(name: str) -> Family:
    return Family(name)


def evaluate(name: str, cell: str) -> str:
    """Returns what a cell of the table says: `yes`, or why not."""
    warnings.simplefilter("ignore")
    method: Callable[[], str] = getattr(_family(name), cell.lower().replace(" ", "_"))
    try:
        return method()
    except UserError as error:
        return f"refused: {_reason(error).replace(str(_family(name)._folder), name)}"
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return f"fails: {type(error).__name__}: {_reason(error)}"
