"""Prompt queue of a step: rollout ranks lease prompts in order; the driver tracks which groups were delivered.

An answer's tokens depend on seed, step, position and weights, not on the rank that samples them. Therefore a step has the same
result if ranks are slow, are lost or join later. The driver holds the queue. A rank acknowledges a prompt once the actor's
process has the complete group. When a rank ends, its unacknowledged prompts return to the queue. If steps overlap, a rank that
is told to leave requeues its prompts with the partial answers (`PartialGroup`), and another rank resumes the answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rlhpc.language.rollout.pending_group import PartialGroup
from rlhpc.language.training.prompt_dispatch import DELIVERED, WORK
from rlhpc.runtime.channel import Channel, LeasedItem, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded

log = logging.getLogger(__name__)

#: Seconds between two attempts of a rank to lease prompts that other ranks may have returned to an empty queue.
_AGAIN_S = 0.25


@dataclass(frozen=True)
class Delivery:
    """Message to the driver that an actor has received the group of a prompt.

    Attributes:
        step, position: Step and position of the prompt.
        metrics: Sums over the group's episodes (`group_builder.group_metrics`).
        failure: Reason why an episode failed or could not be scored; "" if there are no failures.
    """

    step: int
    position: int
    metrics: dict[str, float]
    failure: str = ""


class PromptTracker:
    """Driver's side of the prompt queue: enqueues the prompts of each step once, and counts the delivered groups.

    Args:
        num_prompts: Number of prompts of a step.
    """

    def __init__(self, num_prompts: int) -> None:
        self._prompts = num_prompts
        self._channels: tuple[Channel, Channel] | None = None
        self._last_enqueued_step = 0
        self._delivery_channel: dict[int, dict[int, Delivery]] = {}
        self.failure = ""  # the latest failure of all steps

    def open(self, step: int) -> None:
        """Opens the queue after `step`, without enqueued or delivered prompts of later steps."""
        self._channels = Channel.create(WORK), Channel.create(DELIVERED)
        self._last_enqueued_step = step
        self._delivery_channel = {}

    def enqueue(self, last_step: int) -> None:
        """Enqueues the prompts of all steps up to `last_step`, each once."""
        for step in range(self._last_enqueued_step + 1, last_step + 1):
            for prompt_position in range(self._prompts):
                self._open_channels[0].put(prompt_position, key=str(step))
        self._last_enqueued_step = max(self._last_enqueued_step, last_step)

    @property
    def _open_channels(self) -> tuple[Channel, Channel]:
        assert self._channels is not None
        return self._channels

    def wait_complete(self, step: int, wait_s: float) -> bool:
        """Returns whether all groups of a step were delivered; waits up to `wait_s` seconds for missing groups."""
        deadline = time.monotonic() + wait_s
        while len(self._delivery_channel.get(step, ())) < self._prompts:
            remaining_s = deadline - time.monotonic()
            try:
                delivery: Delivery = (
                    self._open_channels[1].get(timeout=remaining_s)
                    if remaining_s > 0
                    else self._open_channels[1].get_nowait()
                )
            except (QueueEmpty, DeadlineExceeded):
                return False
            # A rank that was lost just after a delivery may have returned its prompt to the queue.
            self._delivery_channel.setdefault(delivery.step, {}).setdefault(delivery.position, delivery)
        return True

    def has_returned_prompts(self, step: int) -> bool:
        """Returns whether the queue has prompts of a step."""
        return not self._open_channels[0].empty(key=str(step))

    def list_missing_positions(self, step: int) -> list[int]:
        """Returns the positions of a step whose groups were not delivered."""
        return sorted({*range(self._prompts)} - self._delivery_channel.get(step, {}).keys())

    def close(self, step: int) -> dict[str, float]:
        """Ends a step with all groups delivered; returns the sums over the groups, added in the order of the prompts."""
        deliveries = [delivery for _, delivery in sorted(self._delivery_channel.pop(step).items())]
        self.failure = next((delivery.failure for delivery in reversed(deliveries) if delivery.failure), self.failure)
        return sum_metrics(delivery.metrics for delivery in deliveries)


class PromptLeases:
    """Rollout rank's side of the prompt queue: the leases of the rank, up to its share of a step.

    Args:
        num_prompts: Number of prompts of a step.
        work_channel, delivery_channel: The driver's channels.
    """

    def __init__(self, num_prompts: int, work_channel: Channel, delivery_channel: Channel) -> None:
        self._prompts = num_prompts
        self._work = work_channel
        self._delivery_channel = delivery_channel
        self._leases: dict[tuple[int, int], LeasedItem] = {}
        self._empty_at: dict[int, float] = {}
        self._num_engines = 1

    def begin(self, step: int, num_engines: int) -> None:
        """Starts a step of `num_engines` engines."""
        self._num_engines = num_engines
        self._empty_at = {queue_step: empty_at for queue_step, empty_at in self._empty_at.items() if queue_step > step}

    def num_leased(self, step: int) -> int:
        """Returns the number of a step's prompts that this rank has leased and not delivered."""
        return sum(lease_step == step for lease_step, _ in self._leases)

    def is_exhausted(self, step: int) -> bool:
        """Returns whether the queue of a step was empty at the last attempt."""
        return step in self._empty_at

    def lease(self, step: int) -> int | PartialGroup | None:
        """Leases a prompt of a step.

        Returns:
            The position of the prompt, or the partial group of another rank; None if this rank has its share of the step or
            the queue is empty.
        """
        if self.num_leased(step) >= math.ceil(self._prompts / self._num_engines):
            return None
        current_time = time.monotonic()
        if current_time - self._empty_at.get(step, -math.inf) < _AGAIN_S:
            return None
        while True:
            try:
                lease = self._work.take_nowait(key=str(step))
            except QueueEmpty:
                self._empty_at[step] = current_time
                return None
            self._empty_at.pop(step, None)
            prompt_or_group: int | PartialGroup = lease.item
            prompt_position = prompt_or_group.position if isinstance(prompt_or_group, PartialGroup) else prompt_or_group
            previous_lease = self._leases.get((step, prompt_position))
            if previous_lease is None:
                self._leases[step, prompt_position] = lease
                return prompt_or_group
            # The prompt has returned twice, and this rank has it already.
            log.info("step %d, prompt %d: in flight on this rank, and leased again", step, prompt_position)
            if previous_lease.number != lease.number:
                self._work.done(lease)

    def requeue(self, step: int, partial: PartialGroup) -> None:
        """Requeues a prompt with its partial answers.

        If this rank ends during the call, the prompt may return twice. Driver and actor count it once, and a rank that leases
        it again while it is in flight there goes on with the first.
        """
        self._work.entrust(partial, key=str(step))
        self._work.done(self._leases.pop((step, partial.position)))

    def deliver(self, step: int, position: int, metrics: dict[str, float], failure: str = "") -> None:
        """Reports to the driver that an actor has received the group of a prompt."""
        self._delivery_channel.put(Delivery(step, position, metrics, failure))
        self._work.done(self._leases.pop((step, position)))


def sum_metrics(rows: Iterable[Mapping[str, float]], maxima: Collection[str] = ()) -> dict[str, float]:
    """Returns the sums of metrics over rows, added in order; metrics in `maxima` or with the prefix `max_` are maxima."""
    metric_totals: dict[str, float] = {}
    for row in rows:
        for name, metric_value in row.items():
            is_maximum = name.startswith("max_") or name in maxima
            metric_totals[name] = (
                max(metric_totals.get(name, 0.0), metric_value)
                if is_maximum
                else metric_totals.get(name, 0.0) + metric_value
            )
    return metric_totals
