"""The replay buffer on a device: its batches and its checkpoints are those of the buffer in the host's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.embodied.data.mixture import POSITION, DrawOptions, Mixture, PositionCounter
from rlhpc.embodied.data.replay_buffer import ReplayBuffer
from rlhpc.embodied.data.tensor_replay import TensorMixture, TensorReplay
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.data.transitions import SLOTS, buffers, play

CPU = torch.device("cpu")
OPTIONS = {
    "one decision": DrawOptions(16, 0.25, 2),
    "several decisions": DrawOptions(16, 0.25, 2, num_steps=3, gamma=0.9),
    "shifted images and drawn critics": DrawOptions(16, 0.25, 2, random_shift=4, num_critics=5, num_targets=2),
}  # fmt: skip


def tensor_buffers(folder: Path, ranks: int = 1, capacity: int = 40) -> list[TensorReplay]:
    return [TensorReplay(buffer, CPU) for buffer in buffers(folder, ranks, capacity)]


def rounds(share: range, images: bool = False) -> list[dict[str, np.ndarray]]:
    """Transitions of four steps, of which the last overwrite the first in a buffer of ten decisions."""
    counter, found = PositionCounter(share), []
    for number in range(4):
        columns = play(number * 4, 4, share, images)
        if images:
            columns["next_obs.rgb"] = columns["obs.rgb"] + np.uint8(1)
        found.append({**columns, POSITION: counter.count(columns["terminations"])})
    return found


def demos(columns: dict[str, np.ndarray], dtype: Any) -> np.ndarray:
    rows = np.zeros(columns["rewards"].size, dtype)
    for name in dtype.names:
        rows[name] = columns[name].reshape(rows.size, *columns[name].shape[2:])
    return rows


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_are_those_of_the_hosts_buffer(tmp_path: Path, options: DrawOptions, ranks: int) -> None:
    arrays, tensors = buffers(tmp_path, ranks), tensor_buffers(tmp_path, ranks)
    for buffer in (*arrays, *tensors):
        for columns in rounds(buffer.share):
            buffer.add(columns)
    demonstrated = demos(rounds(range(SLOTS))[0], arrays[0].dtype)
    for rank in range(ranks):
        seeds = {"seed": 3, "rank": rank, "ranks": ranks}
        mixture = Mixture(arrays[rank], demonstrated, options, **seeds)
        on_device = TensorMixture(tensors[rank], demonstrated, options, device=CPU, **seeds)
        for alone in (False, True):
            for update, drawn in enumerate(on_device.draws(7, 70, demos_only=alone), 7):
                expected = mixture.draw(update, demos_only=alone)
                if options.num_steps > 1:
                    del expected.columns[POSITION]
                assert drawn.total == expected.total and drawn.columns.keys() == expected.columns.keys()
                pairs = [(drawn.columns[name], column) for name, column in expected.columns.items()]
                pairs += [
                    (getattr(drawn, name), getattr(expected, name)) for name in ("noise", "steps", "shifts", "critics")
                ]
                for tensor, array in pairs:
                    assert (tensor is None) == (array is None)
                    assert array is None or (
                        tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
                    )
            assert update == 76


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("saves", [(0, 1, 2, 3), (3,)], ids=["often", "seldom"])
def test_its_checkpoints_are_those_of_the_hosts_buffer(tmp_path: Path, images: bool, saves: tuple[int, ...]) -> None:
    """Whichever of the two wrote a checkpoint, both restore the same, also where more than fits came since the last save."""
    (array,), (tensor,) = buffers(tmp_path), tensor_buffers(tmp_path)
    for number, columns in enumerate(rounds(range(SLOTS), images)):
        array.add(columns)
        tensor.add({name: torch.from_numpy(column) for name, column in columns.items()})
        if number in saves:
            for name, buffer in (("array", array), ("tensor", tensor)):
                folder = tmp_path / f"{name}-{number}"
                folder.mkdir()
                buffer.save(folder)
    restored: list[Any] = []
    for name in ("array", "tensor"):
        host, (device,) = ReplayBuffer(40, range(SLOTS), SLOTS, 0, tmp_path / "ring"), tensor_buffers(tmp_path)
        host.load(tmp_path / f"{name}-{saves[-1]}")
        device.load(tmp_path / f"{name}-{saves[-1]}")
        restored += [(host, Mixture(host, None, DrawOptions(16, 0.0, 2), seed=1).draw(5))]
        restored += [(device, *TensorMixture(device, None, DrawOptions(16, 0.0, 2), device=CPU, seed=1).draws(5, 1))]
    expected = Mixture(array, None, DrawOptions(16, 0.0, 2), seed=1).draw(5).columns
    for buffer, drawn in restored:
        assert (buffer.decisions, buffer.held, buffer.dtype) == (16, 10, array.dtype)
        assert all(np.array_equal(np.asarray(drawn.columns[name]), column) for name, column in expected.items())
    device = restored[1][0]
    device.add(play(16, 1, range(SLOTS)) | {n: c[:, :1] for n, c in columns.items() if n == POSITION or "rgb" in n})
    assert device.decisions == 17 and device.held == 10


def test_other_columns_and_too_little_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = tensor_buffers(tmp_path)
    tensor.add(play(0, 1, range(SLOTS)))
    with pytest.raises(ConfigError, match=r"the replay buffer has .*; this run's transitions have .*obs\.rgb uint8"):
        tensor.add(play(1, 1, range(SLOTS), images=True))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", fail)
    (tensor,) = tensor_buffers(tmp_path)
    with pytest.raises(
        ConfigError, match=r"replay_buffer.size: 40 transitions of 25 bytes need .* on cpu, which is out of"
    ):
        tensor.add(play(0, 1, range(SLOTS)))
