"""Non-finite values: detection, and reaction of a run.

One NaN in a reward, an observation or a gradient makes every weight NaN with the next update. So inputs are checked on
arrival, a gradient by its norm before the optimizer step, and weights before they are saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rlhpc.config.sections import RunConfig
from rlhpc.runtime.errors import NonFinite
from rlhpc.runtime.text import format_names

#: Number of skipped optimizer steps in a row, or of rollouts without a finite sample, after which
#: `runner.on_nonfinite: skip` ends the run.
MAX_IN_A_ROW = 10
_WAY_OUT = (
    "Nothing of it was saved. To go on from the newest checkpoint: rlhpc train <config> runner.resume_dir=auto; to leave "
    "such samples and steps out instead of stopping: runner.on_nonfinite=skip"
)


def nonfinite(finding: str, advice: str = _WAY_OUT) -> NonFinite:
    """Builds the error for a non-finite number, with its location and a remedy."""
    return NonFinite(f"{finding}. {advice}")


def skips(cfg: RunConfig) -> bool:
    """Returns whether `runner.on_nonfinite` skips steps instead of stopping the run."""
    return cfg.runner.on_nonfinite == "skip"


def skips_step(norm: torch.Tensor) -> bool:
    """Returns whether a gradient norm skips the optimizer step: it is on the host, since it was read, and not finite."""
    return norm.device.type == "cpu" and not math.isfinite(norm)


def bad_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns the names of the tensors that contain a non-finite number."""
    bad_names = []
    for name, tensor in named_tensors:
        if tensor.is_floating_point():
            tensor = tensor.detach()
            # A sum runs at memory bandwidth and is finite only if all numbers are. A non-finite sum may be an overflow.
            if not math.isfinite(float(tensor.sum(dtype=torch.float32))) and not bool(tensor.isfinite().all()):
                bad_names.append(name)
    return bad_names


def tensors_of(state: Any, name: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested dicts and lists as (path, tensor)."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, child in state.items():
            yield from tensors_of(child, f"{name}.{key}" if name else str(key))
    elif isinstance(state, (list, tuple)):
        for index, child in enumerate(state):
            yield from tensors_of(child, f"{name}[{index}]")


def require_finite(named_tensors: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Refuses non-finite weights or optimizer states.

    Raises:
        NonFinite: A tensor is not finite; the message names the first three such tensors.
    """
    if bad_names := bad_tensors(named_tensors):
        raise nonfinite(
            f"{where}: {format_names(bad_names)} {'is' if len(bad_names) == 1 else 'are'} not finite", _WEIGHTS
        )


_WEIGHTS = (
    "They were not saved; the last update, at this learning rate (actor.optim.lr), was too large for them. To go on from the "
    "newest checkpoint with a smaller one: rlhpc train <config> runner.resume_dir=auto actor.optim.lr=… --resume-with"
)


class SkippedSteps:
    """Counter of optimizer steps that are skipped because their gradient is not finite. All ranks skip the same steps, because
    the gradient norm is over all ranks.

    Args:
        skips_update: Whether to skip such steps; if False, the first such step ends the run.
    """

    def __init__(self, skips_update: bool) -> None:
        self.skip = skips_update
        self._num_skipped = self._num_consecutive = self._num_overflows = 0

    def record_step(self) -> None:
        """Records a successful optimizer step."""
        self._num_consecutive = 0

    def record_skip(self, describe: Callable[[], str]) -> None:
        """Records a skipped optimizer step.

        Args:
            describe: Returns the step and the non-finite value, for the message.

        Raises:
            NonFinite: Steps may not be skipped, or too many were skipped in a row.
        """
        if not self.skip:
            raise nonfinite(describe())
        self._num_skipped += 1
        self._num_consecutive += 1
        if self._num_consecutive >= MAX_IN_A_ROW:
            raise nonfinite(
                f"{describe()}; it is the {self._num_consecutive}th optimizer step in a row that had to be left out",
                _AGAIN,
            )

    def record_overflow(self) -> None:
        """Records a step that was skipped because the loss scale of float16 was too large, which is no fault."""
        self._num_overflows += 1

    def pop_overflows(self) -> int:
        """Returns the number of steps that `record_overflow` recorded since the last call."""
        num_overflows, self._num_overflows = self._num_overflows, 0
        return num_overflows

    def pop_metrics(self) -> dict[str, float]:
        """Returns the metric `nonfinite_skipped`: the number of steps skipped since the last call. Returns {} if it is 0."""
        num_skipped = self._num_skipped
        self._num_skipped = 0
        return {"nonfinite_skipped": float(num_skipped)} if num_skipped else {}


_AGAIN = (
    "Nothing of it was saved. To find the cause: rlhpc train <config> runner.resume_dir=auto runner.on_nonfinite=stop, which "
    "ends at the first one and names it"
)
