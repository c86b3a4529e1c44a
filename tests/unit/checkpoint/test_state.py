"""State files: what goes in comes out, and nothing in them can run code."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.checkpoint.state import (
    dump_state,
    dump_tensors,
    load_state,
    load_tensors,
    parse_state,
    rng_state,
    save_state,
    save_tensors,
    set_rng_state,
)
from rlhpc.runtime.errors import CheckpointError
from tests import warm


def test_round_trip() -> None:
    generator = np.random.default_rng(3)
    state: dict[Any, Any] = {
        "none": None,
        "numbers": [1, -2.5, True, 2**127],
        "text": ("a", b"\x00\xff"),
        "arrays": {"f": np.arange(6, dtype=np.float32).reshape(2, 3), "u": np.array([1], np.uint32)},
        "empty": np.zeros((0, 3)),
        "zero_d": np.zeros((), np.int64),
        "scalar": np.float32(3.5),
        "tensor": torch.arange(10)[2:4],
        7: "an int key",
        "generator": generator.bit_generator.state,
    }
    got = parse_state(dump_state(state))
    assert got["numbers"] == state["numbers"] and got["text"] == state["text"] and got[7] == "an int key"
    for name in ("f", "u"):
        np.testing.assert_array_equal(got["arrays"][name], state["arrays"][name])
        assert got["arrays"][name].dtype == state["arrays"][name].dtype
    assert got["empty"].shape == (0, 3) and got["zero_d"].shape == () and got["zero_d"].dtype == np.int64
    assert isinstance(got["scalar"], np.float32) and got["scalar"] == 3.5
    assert torch.equal(got["tensor"], torch.tensor([2, 3])) and got["tensor"].untyped_storage().nbytes() == 16
    expected = generator.random(5)
    other = np.random.default_rng(0)
    other.bit_generator.state = got["generator"]
    np.testing.assert_array_equal(other.random(5), expected)


def test_same_state_same_bytes() -> None:
    state = {"a": torch.ones(3), "b": np.ones(4), "c": [1, 2]}
    assert dump_state(state) == dump_state(parse_state(dump_state(state)))


def test_optimizer_state_round_trip() -> None:
    def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        parameter.grad = 2 * parameter.detach()
        optimizer.step()

    first = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([first], lr=0.1)
    step(first, optimizer)
    second = torch.nn.Parameter(first.detach().clone())
    resumed = torch.optim.Adam([second], lr=0.5)
    resumed.load_state_dict(parse_state(dump_state(optimizer.state_dict())))
    step(first, optimizer)
    step(second, resumed)
    assert torch.equal(first, second)


def test_foreign_objects_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"state\['env'\]\[0\]: .*object"):
        dump_state({"env": [object()]})
    with pytest.raises(CheckpointError, match="dtype object"):
        dump_state(np.array([object()]))


def test_loading_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    path = tmp_path / "actor-0.pt"
    torch.save({"x": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"actor-0\.pt"):
        load_state(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"actor-0\.pt"):
        load_state(path)
    assert not (tmp_path / "ran").exists()


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    save_state(tmp_path / "a.pt", {"x": torch.ones(100)})
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_state(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"b\.pt: No such file"):
        load_state(tmp_path / "b.pt")
    (tmp_path / "m.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        load_tensors(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state(tmp_path / "no" / "a.pt", {})


def test_a_file_of_tensors_that_cannot_be_written_or_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"m\.safetensors: could not be written: No such file"):
        save_tensors(tmp_path / "no" / "m.safetensors", {"x": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"m\.safetensors: [Nn]o such file"):
        load_tensors(tmp_path / "m.safetensors")
    # A full disk, as the kernel tells it of a file that may not grow.
    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from rlhpc.checkpoint.state import save_tensors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "save_tensors(Path(sys.argv[1]), {'x': torch.ones(100_000)})\n"
    )
    done = warm.run([sys.executable, "-c", code, str(tmp_path / "full.safetensors")], capture_output=True, text=True)
    assert "CheckpointError" in done.stderr and "full.safetensors: could not be written: File too large" in done.stderr


def test_tensors_round_trip(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    tensors = {**module.state_dict(), "tied": module.weight, "transposed": module.weight.t()}
    save_tensors(tmp_path / "model.safetensors", tensors)
    got = load_tensors(tmp_path / "model.safetensors")
    assert set(got) == set(tensors) and all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert dump_tensors(tensors) == dump_tensors(dict(reversed(tensors.items())))


def test_rng_state_round_trip() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    draw()
    state = parse_state(dump_state(rng_state()))
    first = draw()
    draw()
    set_rng_state(state)
    assert draw() == first
