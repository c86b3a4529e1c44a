"""Authentication of gloo's connections, because gloo itself accepts a connection from any process.

gloo connects each pair of a group's ranks while the group is created, and does not need its listening socket afterwards. But
it keeps the socket, and ends the process if accepting a connection fails, for example when foreign connections have used up
the file descriptors. Therefore each process group that is created in a rank, by rlhpc, a library or the worker class:

1. waits for all its ranks before any of them listens, so that the ports are open for milliseconds, not for as long as the
   slowest rank takes to start;
2. closes its listening socket as soon as this rank's connections are established;
3. waits until all ranks have established their connections, so that a slow rank is not taken for a stranger;
4. makes both ends of every connection prove that they know the generation's secret, before any other data is sent.

A rank makes six requests to the group's store, whatever the number of ranks: two for each wait, one that publishes its
address and one that gets the addresses of all ranks. gloo itself would make two requests for each other rank.

gloo accepts the first connection with the right pair number. A foreign process that connects before step 2 can therefore take
a rank's place. Step 4 then fails, and the group is not used.
"""

from __future__ import annotations

import datetime
import functools
import hmac
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rlhpc.runtime.comm.context import Context, installed_context
from rlhpc.runtime.errors import StrangerConnected
from rlhpc.runtime.host import node_name
from rlhpc.runtime.torch_adapter import wrap_gloo_constructor

log = logging.getLogger(__name__)

#: Seconds to wait for a rank's proof. All ranks have just established their connections; this is long enough for a paused one
#: to continue.
PROOF_S = 60.0
_PROOF_BYTES = 32
#: Message tag of the proofs, which no worker class is likely to use; they are exchanged before the group is in use.
_TAG = 0x7268_7063


def guard() -> None:
    """Makes all gloo groups of this process authenticate their connections. May be called before torch is imported."""
    # A rank then publishes its address alone. Otherwise it adds a number for each other rank, and N ranks fetch N³ numbers.
    os.environ.setdefault("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "1")
    wrap_gloo_constructor(_guard_constructor)


def _guard_constructor(group_class: Any, make_group: Callable[..., None]) -> Callable[..., None]:
    """Returns gloo's constructor with the three steps added. Python creates every gloo group with this constructor."""

    @functools.wraps(make_group)
    def init(self: Any, store: Any, rank: int, size: int, timeout: Any = None, **options: Any) -> None:
        context = installed_context()
        if context is None or options or not isinstance(timeout, datetime.timedelta | None):
            # this process is no rank of a run, or the caller has created the sockets
            make_group(self, store, rank, size, *(() if timeout is None else (timeout,)), **options)
            return
        from rlhpc.runtime.comm.store import address_exchange  # torch is imported by now

        token = await_ranks(store, size, "all")
        settings, listeners = group_class._Options(), []
        if timeout is not None:
            settings._timeout = timeout
        devices = []
        for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
            with _record_listeners() as sockets:
                # lazy devices connect at a pair's first message, so they would always need their ports
                devices.append(
                    group_class.create_device(interface=interface, lazy_init=False)
                    if interface
                    else group_class.create_default_device(lazy_init=False)
                )
            if not sockets:
                log.warning("cannot tell which socket gloo listens on: its port stays open")
            listeners += sockets
        settings._devices, settings._threads = devices, 2 * len(devices)
        try:
            make_group(self, address_exchange(store, size), rank, size, settings)
        except RuntimeError as error:
            raise StrangerConnected(
                f"{context.name}: rank {rank} of a process group of {size} could not connect to the others "
                f"({str(error).partition(chr(10))[0]}): one of them died, the network between them is closed, or a stranger "
                f"took a rank's place while the group was formed. Nothing of it was used; start again"
            ) from error
        finally:
            for descriptor in listeners:
                _replace_with_idle(descriptor)
        # A split of this group would reuse the closed sockets and wait forever; without devices torch refuses to split it.
        settings._devices = []
        if size > 1:
            await_ranks(store, size, "connected")
            _exchange_proofs(self, rank, size, token, context)

    return init


def await_ranks(store: Any, world_size: int, stage: str) -> bytes:
    """Waits for all ranks of the group to reach a stage of its creation.

    Returns:
        A random token that all ranks share; empty for a single rank.
    """
    if world_size == 1:
        return b""
    num_arrived = int(store.add(f"rlhpc/arrived/{stage}", 1))
    # The name of a destroyed group may be reused, so each creation has a separate key.
    key = f"rlhpc/{stage}/{-(-num_arrived // world_size)}"
    if num_arrived % world_size == 0:
        token = secrets.token_hex(16)
        store.set(key, token)
        return token.encode()
    token_bytes: bytes = store.get(key)  # waits until it is set
    return token_bytes


@contextmanager
def _record_listeners() -> Iterator[list[int]]:
    """Yields a list to which gloo's listening sockets are added at the end of the block; the block creates gloo's device.

    Other threads may open sockets at the same time. A socket of gloo is recognized by an epoll that watches exactly one
    listening socket and one pipe, all three created within the block. A Python event loop watches a pair of sockets instead,
    and ZeroMQ's epoll already exists.
    """
    listeners: list[int] = []
    earlier_fds = _descriptors()
    yield listeners
    current_fds = _descriptors()
    added_fds = {fd: description for fd, description in current_fds.items() if earlier_fds.get(fd) != description}
    for fd, description in added_fds.items():
        if description == "anon_inode:[eventpoll]":
            watched_fds = _read_watched_descriptors(fd)
            sockets = [
                watched_fd for watched_fd in watched_fds if watched_fd in added_fds and _is_listening(watched_fd)
            ]
            pipes = [
                watched_fd
                for watched_fd in watched_fds
                if watched_fd in added_fds and added_fds[watched_fd].startswith("pipe:")
            ]
            if len(sockets) == len(pipes) == 1 and len(watched_fds) == 2:
                listeners += sockets


def _descriptors() -> dict[int, str]:
    """Returns the link target in /proc/self/fd of each of this process's file descriptors."""
    descriptions = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            descriptions[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return descriptions


def _read_watched_descriptors(epoll: int) -> list[int]:
    with open(f"/proc/self/fdinfo/{epoll}") as lines:
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _is_listening(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _replace_with_idle(descriptor: int) -> None:
    """Closes gloo's listening socket and replaces it with an idle eventfd under the same descriptor. gloo closes it later.

    This also removes the socket from gloo's epoll, so that gloo's thread gets no event. (`shutdown` would wake the thread,
    which would then end the process.)
    """
    idle_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    os.dup2(idle_fd, descriptor, inheritable=False)
    os.close(idle_fd)


def _exchange_proofs(group: Any, rank: int, world_size: int, token: bytes, context: Context) -> None:
    """Exchanges proofs of the generation's secret with every other rank of the group.

    Raises:
        StrangerConnected: A rank's proof is wrong or did not arrive, so another process may be at that end of the connection.
    """
    import torch

    key = hmac.digest(context.service.keys.secret, b"rlhpc mesh " + token, "sha256")

    def compute_proof(source_rank: int, target_rank: int) -> bytes:
        return hmac.digest(key, b"%d to %d of %d" % (source_rank, target_rank, world_size), "sha256")

    peers = [(rank + step) % world_size for step in range(1, world_size)]
    deadline = time.monotonic() + PROOF_S
    received_proofs: dict[int, torch.Tensor] = {}
    proof_transfers: list[tuple[int, Any, torch.Tensor | None]] = []
    peer = peers[0]
    try:
        for peer in peers:
            sent_proof = torch.frombuffer(bytearray(compute_proof(rank, peer)), dtype=torch.uint8)
            received_proofs[peer] = torch.zeros(_PROOF_BYTES, dtype=torch.uint8)
            proof_transfers.append(
                (peer, group.send([sent_proof], peer, _TAG), sent_proof)
            )  # keeps the tensor alive until it has been sent
            proof_transfers.append((peer, group.recv([received_proofs[peer]], peer, _TAG), None))
        for peer, async_work, _ in proof_transfers:  # noqa: B007 - the error names the last peer
            async_work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
        unproven_ranks = [
            peer
            for peer in peers
            if not hmac.compare_digest(bytes(received_proofs[peer].tolist()), compute_proof(peer, rank))
        ]
        reason = "what it sent is not a proof"
    except RuntimeError as error:
        unproven_ranks, reason = [peer], str(error).partition("\n")[0]
    if unproven_ranks:
        raise StrangerConnected(
            f"{context.name}: rank {unproven_ranks[0]} of a process group of {world_size} did not prove to be of this "
            f"run ({reason}): a "
            f"stranger may have connected to the ports of {context.name} on {node_name()} while the group was "
            "formed. It got nothing and nothing of it was used; start again"
        )
