"""Numbers that are not finite: finding them, and what follows.

One NaN in a reward, an observation or a gradient makes every weight NaN with the next update. So what comes in is looked at
where it comes in, a gradient by its norm before the optimizer's step, and weights before they are saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rlhpc.config.sections import RunConfig
from rlhpc.runtime.errors import NonFinite

#: Optimizer steps in a row, or rollouts without a sound sample, after which `runner.on_nonfinite: skip` gives up.
MOST_IN_A_ROW = 10
_WAY_OUT = (
    "Nothing of it was saved. To go on from the newest checkpoint: rlhpc train <config> runner.resume_dir=auto; to leave "
    "such samples and steps out instead of stopping: runner.on_nonfinite=skip"
)


def nonfinite(what: str, advice: str = _WAY_OUT) -> NonFinite:
    """The error for a number that is not finite: what and where, then what to do."""
    return NonFinite(f"{what}. {advice}")


def skips(cfg: RunConfig) -> bool:
    """Whether `runner.on_nonfinite` leaves out rather than stops."""
    return cfg.runner.on_nonfinite.lower() == "skip"


def bad_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the tensors that hold a number that is not finite."""
    found = []
    for name, tensor in named:
        if tensor.is_floating_point():
            tensor = tensor.detach()
            # A sum is a pass at the memory's speed, and finite only if all numbers are; if it is not, it may have overflowed.
            if not math.isfinite(float(tensor.sum(dtype=torch.float32))) and not bool(tensor.isfinite().all()):
                found.append(name)
    return found


def tensors_of(state: Any, name: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts and lists, by path."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from tensors_of(value, f"{name}[{index}]")


def require_finite(named: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Refuses weights, or an optimizer's state, that are not finite.

    Raises:
        NonFinite: Names the first tensors.
    """
    if found := bad_tensors(named):
        raise nonfinite(f"{where}: {listed(found)} {'is' if len(found) == 1 else 'are'} not finite", _WEIGHTS)


_WEIGHTS = (
    "They were not saved; the last update, at this learning rate (actor.optim.lr), was too large for them. To go on from the "
    "newest checkpoint with a smaller one: rlhpc train <config> runner.resume_dir=auto actor.optim.lr=… --resume-with"
)


def listed(names: list[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Skips:
    """Optimizer steps that are left out because their gradient is not finite. The ranks decide alike: the norm is that of the
    sum over all of them.

    Args:
        skip: Leave them out; else the first one ends the run.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self._count = self._row = 0

    def took(self) -> None:
        """A step was taken."""
        self._row = 0

    def left_out(self, what: Callable[[], str]) -> None:
        """A step was not.

        Args:
            what: Says which, and what was not finite.

        Raises:
            NonFinite: Steps are not to be left out, or too many were in a row.
        """
        if not self.skip:
            raise nonfinite(what())
        self._count, self._row = self._count + 1, self._row + 1
        if self._row >= MOST_IN_A_ROW:
            raise nonfinite(
                f"{what()}; it is the {self._row}th optimizer step in a row that had to be left out", _AGAIN
            )

    def counted(self) -> dict[str, float]:
        """`nonfinite_skipped` since the last call, where there were any."""
        count, self._count = self._count, 0
        return {"nonfinite_skipped": float(count)} if count else {}


_AGAIN = (
    "Nothing of it was saved. To find the cause: rlhpc train <config> runner.resume_dir=auto runner.on_nonfinite=stop, which "
    "ends at the first one and names it"
)
