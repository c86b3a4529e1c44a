"""What a rank writes while it trains on: the copies' content, summed as it is written."""

from __future__ import annotations

import collections
import hashlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rlhpc.checkpoint import async_writer as beside
from rlhpc.checkpoint.async_writer import HostBuffers, Writes
from rlhpc.checkpoint.state import load_state, load_tensors, save_state, save_tensors
from rlhpc.runtime import os_resources
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.trace_recorder import recorder
from tests.unit.runtime.test_trace_recorder import spans

LARGE = 5 << 20  # elements: 20 MB


def digest(path: Path) -> tuple[int, str]:
    content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()


def saved(folder: Path, writes: Writes, tensors: dict[str, torch.Tensor], state: Any) -> None:
    with writes.collect():
        save_tensors(folder / "model.safetensors", tensors)
        save_state(folder / "optimizer.pt", state)


def test_a_file_of_tensors_is_what_safetensors_writes(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
              torch.float8_e4m3fn, torch.int16]  # fmt: skip
    tensors = {f"ä {i}": torch.randn(3, i).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.zeros(0, 4), "part": torch.randn(8, 8)[2:4].T}
    save_tensors(tmp_path / "ours", tensors)
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    assert (tmp_path / "ours").read_bytes() == safetensors.torch.save(plain, {"format": "pt"})


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_files_have_what_was_there_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """And their checksums are those of what was handed over; without room for copies they are written at once."""
    if not room:
        monkeypatch.setattr(beside, "free_memory", lambda: 24 << 20)
    weights = torch.arange(LARGE, dtype=torch.float32)
    module = collections.OrderedDict(w=torch.ones(LARGE))
    module._metadata = {"kept": 1}  # type: ignore[attr-defined]
    writes = Writes(tmp_path, HostBuffers())
    saved(tmp_path, writes, {"w": weights, "tied": weights}, {"step": 3, "sums": [torch.ones(LARGE), (weights[:7],)]})
    with writes.collect():
        beside.write_file(tmp_path / "module.pt", module, lambda file, state: torch.save(state, file))  # type: ignore[arg-type]
    assert writes.is_done is not room and (tmp_path / "model.safetensors").exists() is not room
    before = weights.clone()
    weights += 1
    module["w"].zero_()
    sums = writes.write()
    assert sums == {name: digest(tmp_path / name) for name in ("model.safetensors", "optimizer.pt", "module.pt")}
    found = load_tensors(tmp_path / "model.safetensors")
    assert torch.equal(found["w"], before) and torch.equal(found["tied"], before)
    state = load_state(tmp_path / "optimizer.pt")
    assert state["step"] == 3 and torch.equal(state["sums"][1][0], before[:7])
    other = torch.load(tmp_path / "module.pt", weights_only=True)
    assert torch.equal(other["w"], torch.ones(LARGE)) and other._metadata == {"kept": 1}


def test_what_is_small_is_written_at_once(tmp_path: Path) -> None:
    writes = Writes(tmp_path, HostBuffers())
    saved(tmp_path, writes, {"w": torch.ones(3)}, {"step": 1})
    assert writes.is_done and writes.write().keys() == {"model.safetensors", "optimizer.pt"}


def test_memory_for_copies_is_taken_once(tmp_path: Path) -> None:
    copies, weights = HostBuffers(), torch.ones(LARGE)
    first = copies.copy_value("model", {"w": weights})
    second = copies.copy_value("model", {"w": weights + 1})
    other = copies.copy_value("model", {"w": torch.ones(LARGE + 1)})
    assert first is not None and second is not None and other is not None
    assert first["w"] is second["w"] and float(first["w"][0]) == 2.0 and other["w"] is not second["w"]


def test_a_file_that_the_filesystem_refuses_is_named(tmp_path: Path) -> None:
    """Whoever writes it: torch says of a failed write only that the file has an unexpected position."""
    full = tmp_path / "optimizer.pt"
    full.symlink_to("/dev/full")
    for save in (
        lambda: save_state(full, {"a": torch.ones(9999)}),
        lambda: save_tensors(full, {"a": torch.ones(9999)}),
    ):
        with pytest.raises(CheckpointError, match=r"optimizer.pt: could not be written: No space left on device"):
            save()


def test_free_memory_is_what_the_narrowest_control_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < os_resources.free_memory() < 1 << 50
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("0::/job_7/step_0\n")
    for path, most, now, files in (("job_7", 3 << 20, 2 << 20, 1 << 19), ("job_7/step_0", "max", 1, 0)):
        (groups / path).mkdir(parents=True)
        (groups / path / "memory.max").write_text(f"{most}\n")
        (groups / path / "memory.current").write_text(f"{now}\n")
        (groups / path / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")
    monkeypatch.setattr(os_resources, "_PROCESS_CGROUP", own)
    monkeypatch.setattr(os_resources, "_CGROUP_ROOT", groups)
    assert os_resources.free_memory() == (1 << 20) + (1 << 19)


def test_a_trace_says_which_files_were_written_at_once_and_whether_they_are_large(tmp_path: Path) -> None:
    trace = tmp_path / "g-0.jsonl"  # its own thread writes what is recorded
    recorder.start(str(trace), {"group": "g", "rank": 0, "host": "h", "host_id": "h", "pid": 1})
    try:
        writes = Writes(tmp_path)
        with writes.collect():
            save_tensors(tmp_path / "small", {"w": torch.zeros(4)})
            save_tensors(tmp_path / "large", {"w": torch.zeros(4 << 20)})
        rows = {name: args for name, category, *_, args in spans(trace) if category == "save"}
    finally:
        recorder.stop(flush=True)
        recorder.reset()
    assert {name: args["is_large"] for name, args in rows.items()} == {"small": False, "large": True}
    assert rows["large"]["bytes"] == (tmp_path / "large").stat().st_size
