"""Point to point between ranks of any groups, and broadcast to many: straight into the receiver's inbox."""

from __future__ import annotations

import pickle
from typing import Any

from rlhpc.runtime.comm.channel import AsyncWork, in_background
from rlhpc.runtime.comm.payload import Packed
from rlhpc.runtime.comm.service import INBOX
from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.context import Context, current


def _key(tag: str, group: str, rank: int) -> str:
    return f"{tag}/{group}/{rank}"


def _deliver(context: Context, packed: Packed, key: str, dst_group: str, dst_rank: int, reader: int = 0) -> None:
    whom = f"{dst_group}-{dst_rank} to take a message from {context.name}"
    record = context.member(dst_group, dst_rank)["data"]
    if record["ipc"] == context.service.endpoint["ipc"]:
        frames = [bytes(frame) for frame in packed.frames(reader)]
        context.service.wait_local(
            lambda answer: context.service.channel(INBOX).put(
                key, frames, packed.nbytes, 0, packed.segment or "", answer
            ),
            context.wait_deadline,
            whom,
        )
        return
    head = pickle.dumps((INBOX, key, packed.nbytes, 0, packed.segment or "", True))
    context.service.peers.request(choose(record), b"PUT", [head, *packed.frames(reader)], context.wait_deadline, whom)


def send(
    obj: Any, group: str, rank: int, dst_group: str, dst_rank: int, *, tag: str = "o", async_op: bool = False
) -> AsyncWork | None:
    """See `Worker.send`."""
    context = current()
    packed = context.service.pack(obj)
    if async_op:
        packed.owned()

    def deliver() -> None:
        try:
            _deliver(context, packed, _key(tag, group, rank), dst_group, dst_rank)
        except BaseException:
            packed.discard()
            raise

    if async_op:
        return in_background(f"send-{dst_group}-{dst_rank}", deliver)
    deliver()
    return None


def _receive(tag: str, src_group: str, src_rank: int, borrow: bool = False) -> Any:
    context = current()
    service, key = context.service, _key(tag, src_group, src_rank)
    items = service.wait_local(
        lambda answer: service.channel(INBOX).get(key, "", None, answer),
        context.wait_deadline,
        f"a message from {src_group}-{src_rank}",
    )
    return service.unpack(items[0].frames, borrow=borrow)


def recv(src_group: str, src_rank: int, *, tag: str = "o") -> Any:
    """See `Worker.recv`."""
    return _receive(tag, src_group, src_rank)


def copy_into(tensor: Any, received: Any) -> None:
    """Copies what came into the receiver's tensor, refusing another shape or dtype."""
    if tuple(tensor.shape) != tuple(received.shape) or tensor.dtype != received.dtype:
        raise ValueError(
            f"recv_tensor was given {tuple(tensor.shape)} {tensor.dtype}, "
            f"but {tuple(received.shape)} {received.dtype} was sent"
        )
    tensor.detach().copy_(received)


def broadcast(
    obj: Any,
    group: str,
    rank: int,
    groups: list[tuple[str, list[int]]],
    src: tuple[str, int],
    *,
    read_only: bool = False,
) -> Any:
    """See `Worker.broadcast`."""
    context = current()
    if (group, rank) != tuple(src):
        return _receive("b", src[0], src[1], borrow=read_only)
    targets = [(g, r) for g, ranks in groups for r in ranks if (g, r) != (group, rank)]
    if targets:
        packed, delivered = context.service.pack(obj, len(targets)), 0
        try:
            for reader, (dst_group, dst_rank) in enumerate(targets):
                _deliver(context, packed, _key("b", group, rank), dst_group, dst_rank, reader)
                delivered += 1
        finally:
            packed.discard(delivered)
    return obj
