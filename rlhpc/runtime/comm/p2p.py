"""Point to point between ranks of any groups, and broadcast to many: straight into the receiver's inbox."""

from __future__ import annotations

import pickle
import secrets
from typing import Any

from rlhpc.runtime.comm.channel import AsyncWork, in_background
from rlhpc.runtime.comm.payload import Packed
from rlhpc.runtime.comm.queues import Outlook
from rlhpc.runtime.comm.segments import discard
from rlhpc.runtime.comm.service import INBOX
from rlhpc.runtime.comm.share import Share
from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.context import Context, current


def _key(tag: str, group: str, rank: int) -> str:
    return f"{tag}/{group}/{rank}"


def _deliver(
    context: Context,
    packed: Packed,
    key: str,
    dst_group: str,
    dst_rank: int,
    reader: int = 0,
    share: Share | None = None,
) -> bool:
    """Puts a message into the inbox of a rank; whether that was waiting for it."""
    whom = f"{dst_group}-{dst_rank} to take a message from {context.name}"
    record = context.member(dst_group, dst_rank)["data"]
    if record["ipc"] == context.service.endpoint["ipc"]:
        frames = [bytes(frame) for frame in packed.frames(reader, share)]
        context.service.wait_local(
            lambda answer: context.service.channel(INBOX).put(
                key, frames, packed.nbytes, 0, packed.segment or "", answer
            ),
            context.wait_deadline,
            whom,
        )
        return False
    head = pickle.dumps((INBOX, key, packed.nbytes, 0, packed.segment or "", True))
    message = [head, *packed.frames(reader, share)]
    reply = context.service.peers.request(choose(record), b"PUT", message, context.wait_deadline, whom)
    return Outlook(*pickle.loads(reply[0])).waiting


def send(
    obj: Any, group: str, rank: int, dst_group: str, dst_rank: int, *, tag: str = "o", async_op: bool = False
) -> AsyncWork | None:
    """See `Worker.send`."""
    context = current()
    far = context.member(dst_group, dst_rank)["host"] != context.host
    packed = context.service.pack(obj, lend=far and not async_op)
    if async_op:
        packed.owned()

    def deliver() -> None:
        try:
            waiting = _deliver(context, packed, _key(tag, group, rank), dst_group, dst_rank)
            packed.settle(waiting, context.check)
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
    segment: str | None = None,
) -> Any:
    """See `Worker.broadcast`.

    With `segment`, one that the object speaks of and whose reader k is the k-th receiver in the order of `readers_of`: it is
    freed for those that the object does not reach.
    """
    context = current()
    if (group, rank) != tuple(src):
        return _receive("b", src[0], src[1], borrow=read_only)
    targets = [(g, r) for g, ranks in groups for r in ranks if (g, r) != (group, rank)]
    readers = readers_of(context, targets)
    if readers:
        far = all(context.member(*together[0])["host"] != context.host for together in readers)
        packed, key = context.service.pack(obj, len(readers), lend=far), _key("b", group, rank)
        begun, reached, waiting = 0, 0, True
        try:
            for reader, together in enumerate(readers):
                name = secrets.token_hex(8) if len(together) > 1 else ""
                for index, (dst_group, dst_rank) in enumerate(together):
                    share = Share(name, index, len(together)) if name else None
                    waits = _deliver(context, packed, key, dst_group, dst_rank, reader, share)
                    waiting, begun, reached = waiting and waits, reader + 1, reached + 1
            packed.settle(waiting, context.check)
        finally:
            packed.discard(begun)
            for number in range(reached, len(targets) if segment else 0):
                discard(str(segment), number)
    return obj


def readers_of(context: Context, targets: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Who reads a segment of this process: each receiver of this host by itself, those of another host together."""
    alone, together = [], dict[str, list[tuple[str, int]]]()
    for target in targets:
        host = context.member(*target)["host"]
        if host == context.host:
            alone.append([target])
        else:
            together.setdefault(host, []).append(target)
    return [*together.values(), *alone]
