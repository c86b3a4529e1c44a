"""Objects drawn at random, and ranks that exchange them and overwrite them at once."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from rlhpc import Channel, Worker

MAX_BYTES = 8 << 20
#: Sizes at which a message takes another way: joined frames, inline frames, segments, loans.
LIMITS = (16 << 10, 32 << 10, 1 << 20)
_ARRAYS = ("u1", "i4", "f2", "f4", "f8", "c8", "?")
_TENSORS = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64, torch.bool)


@dataclass
class Record:
    """A dataclass with data in it."""

    name: str
    data: Any
    more: dict[str, Any]


def _draw_size(rng: random.Random, max_bytes: int) -> int:
    if rng.random() < 0.4:
        return max(1, min(max_bytes, rng.choice(LIMITS) + rng.randint(-2000, 2000)))
    return int(2 ** rng.uniform(0, np.log2(max_bytes)))


def _draw_leaf(rng: random.Random, size: int) -> Any:
    data = np.frombuffer(rng.randbytes(size + 16), np.uint8).copy()
    kind = rng.randrange(8)
    if kind == 0:
        return bytearray(data)
    if kind < 4:
        dtype = np.dtype(rng.choice(_ARRAYS))
        count = max(1, size // dtype.itemsize)
        array = data[: count * dtype.itemsize] if dtype != np.dtype("?") else data[:count] & 1
        array = array.view(dtype)
        layout = rng.randrange(6)
        if layout == 1:
            array = array[::2]
        elif layout == 2:
            array = array[: count // 2 * 2].reshape(2, -1).T
        elif layout == 3:
            array = array[::-1]
        elif layout == 4:
            array = array[count // 3 :]
        elif layout == 5:  # nobody writes through it, but its owner does
            array = array[:]
            array.flags.writeable = False
        return array
    dtype_t = rng.choice(_TENSORS)
    count = max(1, size // dtype_t.itemsize)
    raw = torch.from_numpy(data)[: count * dtype_t.itemsize].clone()
    tensor = raw.view(dtype_t) if dtype_t != torch.bool else (raw & 1).bool()
    layout = rng.randrange(5)
    if layout == 1:
        tensor = tensor[::2]
    elif layout == 2:
        tensor = tensor[: count // 2 * 2].reshape(2, -1).T
    elif layout == 3:
        tensor = tensor[count // 3 :]
    elif layout == 4 and tensor.is_floating_point():
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    return tensor


def draw(seed: int, max_bytes: int = MAX_BYTES) -> Any:
    """Returns a nested object whose arrays and tensors hold up to about `max_bytes`; the same for the same seed."""
    rng = random.Random(seed)
    size = _draw_size(rng, max_bytes)
    parts = [_draw_leaf(rng, max(1, size // count)) for count in [rng.choice((1, 1, 2, 3))] for _ in range(count)]
    form = rng.randrange(5)
    if form == 0:
        return parts[0]
    if form == 1:
        return [*parts, seed, parts[0]]
    if form == 2:
        return {"seed": seed, "parts": tuple(parts), "deep": [{"first": parts[0]}]}
    if form == 3:
        return Record(str(seed), parts, {"last": parts[-1]})
    return (seed, [Record("inner", parts[-1], {}), {"list": parts}])


def _leaves(obj: Any) -> list[Any]:
    if isinstance(obj, dict):
        return [leaf for value in obj.values() for leaf in _leaves(value)]
    if isinstance(obj, list | tuple):
        return [leaf for value in obj for leaf in _leaves(value)]
    if is_dataclass(obj):
        return [leaf for field in fields(obj) for leaf in _leaves(getattr(obj, field.name))]
    return [obj]


def digest(obj: Any) -> str:
    """Returns a digest of all of an object's values, with their types and shapes."""
    total = hashlib.sha256()
    for leaf in _leaves(obj):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().as_strided((leaf.numel(),), (1,)).view(torch.uint8).numpy()
            total.update(f"{leaf.dtype} {tuple(leaf.shape)} {type(leaf).__name__}".encode() + flat.tobytes())
        elif isinstance(leaf, np.ndarray):
            total.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        else:
            total.update(repr(leaf).encode() if not isinstance(leaf, bytearray) else bytes(leaf))
    return total.hexdigest()


def overwrite(obj: Any) -> None:
    """Inverts all memory behind an object's arrays and tensors."""
    memories = {}
    for leaf in _leaves(obj):
        if isinstance(leaf, torch.Tensor):
            memory = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.detach().untyped_storage())
            memories[memory.data_ptr()] = memory
        elif isinstance(leaf, np.ndarray):
            while isinstance(leaf.base, np.ndarray):
                leaf = leaf.base
            if leaf.flags.writeable:
                memories[leaf.__array_interface__["data"][0]] = leaf.reshape(-1).view(np.uint8)
        elif isinstance(leaf, bytearray):
            memories[id(leaf)] = np.frombuffer(leaf, np.uint8)
    for memory in memories.values():
        if isinstance(memory, torch.Tensor):
            memory.bitwise_not_()
        else:
            np.invert(memory, out=memory)


class Reuser(Worker):
    """Overwrites what it has sent, returned or received as soon as the call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []
        self.returned: Any = None

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def take(self, obj: Any) -> None:
        self.digests.append(digest(obj))
        overwrite(obj)

    def take_digests(self) -> list[str]:
        digests, self.digests = self.digests, []
        return digests

    def give(self, seed: int, max_bytes: int) -> Any:
        overwrite(self.returned)
        self.returned = draw(seed, max_bytes)
        return self.returned

    def send_by(self, how: str, seeds: list[int], max_bytes: int, group: str, channel: Channel | None) -> list[str]:
        """Sends an object per seed; returns their digests."""
        digests, under_way = [], []
        for seed in seeds:
            obj = draw(seed, max_bytes)
            digests.append(digest(obj))
            if how == "send":
                self.send(obj, group, 0)
            elif how == "send, async":
                under_way.append(self.send(obj, group, 0, async_op=True))
            elif how == "notify":
                self.notify(obj, group, 0, "reuse")
            elif how == "broadcast":
                self.broadcast(obj, [(group, [0, 1])], (self.group_name, 0))
            else:
                assert channel is not None
                if how == "put":
                    channel.put(obj, key="0")
                elif how == "put, async":
                    under_way.append(channel.put(obj, key="0", async_op=True))
                elif how == "put_nowait":
                    channel.put_nowait(obj, key="0")
                else:
                    channel.entrust(obj, key="0")
            overwrite(obj)
        for work in under_way:
            assert work is not None
            work.wait(60)
        return digests

    def receive_by(self, how: str, count: int, source: str, channel: Channel | None, late: float) -> list[str]:
        """Receives objects and overwrites each, after a while in which the sender goes on; returns their digests."""
        from rlhpc.runtime.comm import p2p

        time.sleep(late)
        digests = []
        for _ in range(count):
            if how.startswith("send"):
                obj = self.recv(source, 0)
            elif how == "notify":
                obj = p2p.await_post("reuse", 60, source)
            elif how == "broadcast":
                obj = self.broadcast(None, [(self.group_name, [0, 1])], (source, 0))
            else:
                assert channel is not None
                obj = channel.get(key="0")
            digests.append(digest(obj))
            overwrite(obj)
        return digests
