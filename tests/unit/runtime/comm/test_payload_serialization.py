"""Objects to bytes and back: by reference where the reader can import what it needs, and by value otherwise."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.runtime.comm import payload as serialization
from rlhpc.runtime.comm.payload import copy_shared, dumps, loads, pickle_object

CODE = "def solve():\n    ...\n\nif __name__ == '__main__':\n    solve()\n"


@dataclass
class Answer:
    text: str
    tokens: np.ndarray


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "obj",
    [
        CODE,
        [Answer(CODE, np.arange(5)) for _ in range(3)],
        {"__main__": ("__mp_main__", CODE.encode())},
        {"color": Color.RED, "code": CODE, "kind": Answer, "function": dumps},
    ],
    ids=["text", "dataclasses", "keys", "references"],
)
def test_text_that_speaks_of_main_is_pickled_once(obj: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    dump = serialization._dump
    monkeypatch.setattr(serialization, "_dump", lambda kind, *rest: attempts.append(kind) or dump(kind, *rest))
    data, buffers = dumps(obj)
    assert attempts == [serialization._Pickler]
    assert repr(loads(data, buffers)) == repr(obj)


SCRIPT = """
import enum, pickle, sys
from dataclasses import dataclass
from rlhpc.runtime.comm.payload import dumps, pickle_object

@dataclass
class Thing:
    x: int

class Kind(enum.Enum):
    A = "a"

def double(x): return 2 * x

for obj in (Thing(3), [{"deep": (Thing(4),)}], double, Thing, Kind.A, {Kind.A: [double]}, lambda x: x):
    data, buffers = dumps(obj)
    assert not buffers
    pickle.dump((data, pickle_object(obj)), sys.stdout.buffer)
"""


def test_what_main_defines_travels_by_value() -> None:
    """A process with another `__main__` can read it."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    reader = (
        "import io, pickle, sys\nstream, count = io.BytesIO(sys.stdin.buffer.read()), 0\n"
        "while pair := (pickle.load(stream) if stream.tell() < len(stream.getvalue()) else None):\n"
        "    count += 1\n    for data in pair: pickle.loads(data)\nprint(count)"
    )
    read = subprocess.run([sys.executable, "-c", reader], input=done.stdout, capture_output=True, check=True)
    assert read.stdout.strip() == b"7"


def test_an_argument_of_main_is_pickled_by_value_with_its_group() -> None:
    assert loads(pickle_object((Answer, (CODE,), {})))[0] is Answer


def test_buffers_are_owned_once_nothing_outside_can_change_them() -> None:
    array, text = np.zeros(10, np.uint8), b"constant"
    view = array[:]
    view.flags.writeable = False
    kept = copy_shared([text, memoryview(text)[2:], memoryview(array), memoryview(view), bytearray(b"abc"), array.data])
    array[:] = 1
    assert kept[0] is text and kept[1].obj is text
    assert [bytes(buffer) for buffer in kept[2:]] == [bytes(10), bytes(10), b"abc", bytes(10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8])
@pytest.mark.parametrize(
    "cut",
    [lambda x: x[::2], lambda x: x[1:2], lambda x: x[:, ::3], lambda x: x.T, lambda x: x[0], lambda x: x[:0]],
    ids=["rows", "row", "columns", "transposed", "first", "empty"],
)
def test_tensors_of_any_layout(dtype: torch.dtype, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One element counts as contiguous whatever its stride."""
    base = torch.ones(2, 4).to(dtype)
    for tensor in (cut(base), cut(base[:1, :1]), cut(base)[..., ::2]):
        data, buffers = dumps(tensor)
        assert torch.equal(loads(data, [bytearray(buffer) for buffer in buffers]), tensor)
