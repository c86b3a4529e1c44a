"""Replay buffer and batches of off-policy learning on the actor's device (`rlhpc.embodied.workers.tensor_actor`).

The host draws the rows of batches, by the rule of buffers in its memory, and sends them to the device. The transitions stay
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.embodied.data.mixture import POSITION, DrawOptions, MixtureDraw, RowSampler
from rlhpc.embodied.data.replay_buffer import ReplayBuffer, TransitionRing
from rlhpc.embodied.data.stored_replay import describe, row_type
from rlhpc.runtime.errors import ConfigError

#: Maximum number of updates whose rows and noise are sent to the device together.
_UPDATES_PER_COPY = 64


class TensorReplay(TransitionRing):
    """One rank's part of the replay buffer, on a device. Images are stored as other columns are, twice in a transition.

    Only checkpoints use the host: `save` copies the decisions since the last save to a buffer there, which writes the files.
    They are the files of a `ReplayBuffer`, so that a run can resume either way.

    Args:
        host: Buffer for checkpoints, with the sizes of this one.
        device: Device of the transitions.
    """

    def __init__(self, host: ReplayBuffer, device: torch.device) -> None:
        super().__init__(host.capacity * host.num_envs, host.share, host.num_envs)
        self.host, self._device = host, device
        self._ring: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the transitions on the device."""
        return sum(column.nbytes for column in self._ring.values())

    def add(self, columns: Mapping[str, Any]) -> None:
        """Adds T decisions of all the rank's slots; each column is a tensor or an array, `[slots, T, ...]`.

        Raises:
            ConfigError: The columns differ from the buffer's, or the device has too little memory.
        """
        tensors = {name: torch.as_tensor(column, device=self._device) for name, column in columns.items()}
        dtype = row_type({name: _make_empty_like(tensor) for name, tensor in tensors.items()}, 2)
        if not self._ring:
            self._allocate(tensors)
            self.dtype = dtype
        elif dtype != self.dtype:
            raise ConfigError(
                f"the replay buffer has {describe(self.dtype)}; this run's transitions have {describe(dtype)}"
            )
        num_decisions = next(iter(tensors.values())).shape[1]
        num_kept = min(num_decisions, self.capacity)
        for offset, slot_range in self._parts(self.decisions + num_decisions - num_kept, num_kept):
            step_start = num_decisions - num_kept + offset
            for name, tensor in tensors.items():
                self._ring[name][slot_range] = tensor[
                    :, step_start : step_start + slot_range.stop - slot_range.start
                ].transpose(0, 1)
        self.decisions += num_decisions

    def _allocate(self, tensors: Mapping[str, Tensor]) -> None:
        rows, num_slots = self.capacity * len(self.share), len(self.share)
        shapes = {
            name: ((self.capacity, num_slots, *tensor.shape[2:]), tensor.dtype) for name, tensor in tensors.items()
        }
        try:
            self._ring = {
                name: torch.zeros(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in shapes.items()
            }
        except torch.OutOfMemoryError as error:
            row_bytes = sum(tensor[0, 0].nbytes for tensor in tensors.values())
            size_text = f"{rows} transitions of {row_bytes} bytes need {rows * row_bytes / 2**30:.1f} GiB"
            raise ConfigError(
                f"algorithm.replay_buffer.size: {size_text} on {self._device}, which is out of memory; make it "
                f"smaller, or give "
                "env and rollout a place (cluster.component_placement), which keeps them in the host's memory"
            ) from error

    def _parts(self, first_decision: int, count: int) -> Iterator[tuple[int, slice]]:
        """Yields slices of the ring that hold `count` decisions from `first_decision` on, each with its offset in them."""
        offset = 0
        while offset < count:
            slot_start = (first_decision + offset) % self.capacity
            slot_stop = min(self.capacity, slot_start + count - offset)
            yield offset, slice(slot_start, slot_stop)
            offset += slot_stop - slot_start

    def columns(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the transitions of some rows, `[k, ...]` by name."""
        return {name: self.column(name, rows) for name in self._ring}

    def column(self, name: str, rows: Tensor) -> Tensor:
        """Returns a column of the transitions of some rows, `[k, ...]`."""
        return self._ring[name].flatten(0, 1)[rows]

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes the buffer to a checkpoint (`ReplayBuffer.save`)."""
        num_new = self.decisions - self.host.decisions
        num_kept = min(num_new, self.capacity)
        self.host.skip(num_new - num_kept)
        for _, slot_range in self._parts(self.decisions - num_kept, num_kept):
            self.host.add({name: ring[slot_range].transpose(0, 1).cpu().numpy() for name, ring in self._ring.items()})
        self.host.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Restores this rank's slots from a checkpoint (`ReplayBuffer.load`)."""
        self.host.load(checkpoint)
        self.decisions, self.first, self.dtype = self.host.decisions, self.host.first, self.host.dtype
        self._ring = {}
        if self.host.dtype is None:
            return
        num_held = self.held
        blank = np.zeros((len(self.share), 1), self.host.dtype)
        self._allocate({name: torch.from_numpy(blank[name]) for name in self.host.dtype.names or ()})
        for _, slot_range in self._parts(self.decisions - num_held, num_held):
            rows = np.arange(slot_range.start * len(self.share), slot_range.stop * len(self.share))
            table = np.empty((len(rows), self.host.dtype.itemsize), np.uint8)
            self.host.gather(rows, table)
            transitions = table.view(self.host.dtype)[:, 0]
            for name, ring in self._ring.items():
                ring[slot_range] = torch.from_numpy(transitions[name]).to(self._device).view(ring[slot_range].shape)


class _TensorDemos:
    """Demonstrated transitions `[n]` on a device, with the methods of a `TensorReplay` that a draw needs."""

    def __init__(self, transitions: np.ndarray, device: torch.device) -> None:
        self._columns = {
            name: torch.from_numpy(np.ascontiguousarray(transitions[name])).to(device)
            for name in transitions.dtype.names or ()
        }
        self._size = len(transitions)

    def columns(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the transitions of some rows (`TensorReplay.columns`)."""
        return {name: column[rows] for name, column in self._columns.items()}

    def column(self, name: str, rows: Tensor) -> Tensor:
        """Returns a column of some rows (`TensorReplay.column`)."""
        return self._columns[name][rows]

    def following(self, rows: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
        """Finds later transitions (`TransitionRing.following`)."""
        return (rows + num_steps).clamp(max=self._size - 1), rows + num_steps < self._size


class TensorMixture(RowSampler):
    """Sampler of batches whose transitions are on a device: the batches of a `Mixture` of the same transitions. Takes the
    arguments of `RowSampler`, and the device.
    """

    replay: TensorReplay

    def __init__(
        self,
        replay: TensorReplay,
        demos: np.ndarray | None,
        options: DrawOptions,
        *,
        device: torch.device,
        **ranks: int,
    ) -> None:
        super().__init__(replay, demos, options, **ranks)
        self._device = device
        self._demos = None if demos is None else _TensorDemos(demos, device)

    def draws(self, first_update: int, count: int, *, demos_only: bool = False) -> Iterator[MixtureDraw[Tensor]]:
        """Yields the batches of consecutive updates, as `Mixture.draw` draws them. Rows and noise of many updates reach the
        device in one copy.

        Args:
            first_update: Number of the first update.
            count: Number of updates.
            demos_only: Draw all rows from the demonstrations.
        """
        if count:
            self.dtype(demos_only=demos_only)
        for draw_start in range(first_update, first_update + count, _UPDATES_PER_COPY):
            draw_stop = min(draw_start + _UPDATES_PER_COPY, first_update + count)
            draws = [self.draw_rows(update, demos_only=demos_only) for update in range(draw_start, draw_stop)]
            tensors = [self._to_device([getattr(draw, name) for draw in draws]) for name in _ROW_FIELDS]
            for draw, *draw_tensors in zip(draws, *tensors, strict=True):
                yield self._read_batch(draw.total, *draw_tensors)

    def _to_device(self, arrays: list[np.ndarray | None]) -> list[Tensor | None]:
        """Sends the arrays of several updates to the device in one copy."""
        present_arrays = [array for array in arrays if array is not None]
        if len(present_arrays) < len(arrays):
            return [None] * len(arrays)
        flat_array = np.concatenate([array.reshape(-1) for array in present_arrays])
        device_parts = torch.from_numpy(flat_array).to(self._device).split([array.size for array in present_arrays])
        return [tensor.view(array.shape) for tensor, array in zip(device_parts, present_arrays, strict=True)]

    def _read_batch(
        self,
        num_transitions: int,
        demo_rows: Tensor,
        replay_rows: Tensor,
        noise: Tensor,
        shifts: Tensor | None,
        critics: Tensor | None,
    ) -> MixtureDraw[Tensor]:
        """Reads the transitions of a batch, on the device."""
        column_parts = []
        if self._demos is not None and len(demo_rows):
            column_parts.append(self._read(self._demos, demo_rows))
        if len(replay_rows):
            column_parts.append(self._read(self.replay, replay_rows))
        if not column_parts:  # other ranks have all rows of this batch
            dtype_source = self.replay if self._demos is None or self.replay.dtype is not None else self._demos
            column_parts.append(self._read(dtype_source, replay_rows))
        columns = {name: torch.cat([column_part[name] for column_part in column_parts]) for name in column_parts[0]}
        return MixtureDraw(columns, noise, num_transitions, columns.pop(_STEPS, None), shifts, critics)

    def _read(self, source: TensorReplay | _TensorDemos, rows: Tensor) -> dict[str, Tensor]:
        """Returns the transitions of some rows, with sums of rewards as `Mixture` computes them."""
        columns = source.columns(rows)
        if self.options.num_steps == 1:
            return columns
        rewards, row_positions = columns["rewards"].double(), columns.pop(POSITION)
        last_rows, num_steps, goes_on = rows, torch.ones_like(rows), torch.ones_like(rows, dtype=torch.bool)
        for step in range(1, self.options.num_steps):
            later_rows, is_there = source.following(rows, step)
            later_positions = source.column(POSITION, later_rows)
            goes_on = goes_on & is_there & (row_positions & 1 == 0) & (later_positions >> 1 == (row_positions >> 1) + 1)
            row_positions = later_positions
            later_rewards = source.column("rewards", later_rows).double()
            rewards = rewards + goes_on.double() * self.options.gamma**step * later_rewards
            last_rows = torch.where(goes_on, later_rows, last_rows)
            num_steps = num_steps + goes_on
        bootstrap_names = [name for name in columns if name.startswith("next_obs") or name == "terminations"]
        last_columns = {name: source.column(name, last_rows) for name in bootstrap_names}
        return {**columns, **last_columns, "rewards": rewards.float(), _STEPS: num_steps}


#: Fields of a `RowDraw` that are sent to the device.
_ROW_FIELDS = ("demo_rows", "replay_rows", "noise", "shifts", "critics")
#: Column of `MixtureDraw.steps`.
_STEPS = "steps"


def _make_empty_like(tensor: Tensor) -> np.ndarray:
    """Returns an array without elements that has the dtype and the trailing shape of a tensor `[slots, T, ...]`."""
    return np.empty((0, 0, *tensor.shape[2:]), torch.empty(0, dtype=tensor.dtype).numpy().dtype)
