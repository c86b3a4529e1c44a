"""Worker: base class of the objects that run on the ranks of a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.background import AsyncWork, in_background
from rlhpc.runtime.comm.collectives import Collectives
from rlhpc.runtime.comm.context import installed_context
from rlhpc.runtime.node_locks import DeviceLock, acquire_port
from rlhpc.runtime.routing import RoutedMessages
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.worker_instruments import Instrumented
from rlhpc.runtime.worker_spec import WorkerSpec

if TYPE_CHECKING:
    import torch

    from rlhpc.runtime.worker_group import WorkerGroup

_spec: WorkerSpec | None = None


def bind_spec(worker_spec: WorkerSpec) -> None:
    """Sets the specification of this process's rank, which `Worker` reads; called once, before the object is built."""
    global _spec
    _spec = worker_spec


class Worker(Instrumented, RoutedMessages):
    """Base class of a worker group's ranks.

    Subclasses call `super().__init__()`. The driver can call their public methods on the whole group; calls run on the
    process's main thread, one after the other. An `async` method runs to its end on the rank's event loop before the next
    call.

    Attributes:
        group_name: Name of the worker group.
        rank, world_size: Rank in the group, and the group's size.
        node, node_rank: Host name and rank of the node.
        local_rank, local_world_size: Index among the group's ranks on the node, and their number.
        accelerators: Indices of the node's accelerators that belong to this rank.
        device_index: Index of the rank's first accelerator among those that the process sees.
        device_lock: Lock on the rank's accelerators, which one rank of the run has at a time: `with self.device_lock: …`.
        log: Logger of the class's module; lines in the rank's log have group and rank.
        batch_router: Open requests in decoupled mode, by tag; see `send_to`.
    """

    def __init__(self) -> None:
        worker_spec = _spec
        group_name, rank, world_size = (
            (worker_spec.group, worker_spec.rank, worker_spec.world_size)
            if worker_spec
            else (type(self).__name__, 0, 1)
        )
        Instrumented.__init__(self, group_name, rank, world_size, worker_spec)
        RoutedMessages.__init__(self)
        # RLinf's names of these attributes, which programs written for it use
        self._group_name = group_name
        self._rank = rank
        self._world_size = world_size
        self.node = worker_spec.node if worker_spec else ""
        self.node_rank = worker_spec.node_rank if worker_spec else 0
        self.local_rank = worker_spec.local_rank if worker_spec else 0
        self.local_world_size = worker_spec.local_world_size if worker_spec else 1
        self.accelerators: tuple[int, ...] = worker_spec.accelerators if worker_spec else ()
        self.device_index = (
            worker_spec.device_mask.index(worker_spec.accelerators[0])
            if worker_spec and worker_spec.accelerators
            else 0
        )
        self._locks_folder = Scratch(worker_spec.token).sockets / "locks" if worker_spec else None
        self.device_lock = DeviceLock(
            self._locks_folder, [f"{self.node_rank}-{index}" for index in self.accelerators], f"{group_name}-{rank}"
        )
        self._collectives = Collectives(self.group_name, self.rank, self.world_size, worker_spec)
        if worker_spec is not None:
            devices_text = (
                f"accelerators {', '.join(map(str, worker_spec.accelerators))}"
                if worker_spec.accelerators
                else "no accelerator"
            )
            self.log.info(
                "%s: rank %d of %d on %s, pid %d, %s, threads %s", type(self).__name__, self.rank, self.world_size, self.node,
                os.getpid(), devices_text, os.environ.get("OMP_NUM_THREADS", "as it likes"),
            )  # fmt: skip

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Returns a group of this class, which is not launched yet; each rank's constructor gets `args` and `kwargs`."""
        from rlhpc.runtime.worker_group import (
            WorkerGroup,  # the driver's part of the runtime, which a rank does not need
        )

        return WorkerGroup(cls, args, kwargs)

    @classmethod
    def forks(cls, *args: Any, **kwargs: Any) -> bool:
        """Returns whether ranks with these arguments may be forked from the fork server.

        If not, each rank gets a new interpreter. Engines need this if they start processes or threads at import, or if they
        check how their process was started.
        """
        return True

    @classmethod
    def preloads(cls, *args: Any, **kwargs: Any) -> Sequence[str]:
        """Returns modules that a node imports once for its ranks with these arguments, besides the session's modules.

        Each item is a module, or a function that imports (`module:function`). A process of the node that starts no thread and
        opens no accelerator runs them before it forks the ranks: those of a job step, those that the driver starts on its own
        host, or those that join a run from there. An item that opens an accelerator is left to the ranks. A rank makes all
        imports by itself if it cannot be forked, if it is the only one of its group on the node, or if the driver's host
        starts it with another Python.
        """
        return ()

    @classmethod
    def ranks_sharing_devices(cls, *args: Any, **kwargs: Any) -> int:
        """Returns the number of consecutive ranks, with these arguments, that see each other's accelerators; with 1, a rank
        sees only its own.
        """
        return 1

    def acquire_free_port(self, max_port_num: int | None = None) -> int:
        """Returns a TCP port that is free on this node, and that no other rank of the run gets here while this rank runs.

        Args:
            max_port_num: Largest port, for servers that compute a second port from this one.

        Raises:
            RlhpcError: No port was free in 1000 attempts.
        """
        return acquire_port(self._locks_folder, max_port_num, f"{self.group_name}-{self.rank}")

    # -- leaving --------------------------------------------------------------------------------------------------

    @staticmethod
    def before_leaving(act: Callable[[], None] | None) -> None:
        """Sets the action that this rank runs before it leaves; with None the rank may end at once, even during a call.

        The main thread calls `act` between two calls, so a long call should check `told_to_leave` and return early. Only ranks
        that have joined a run (`rlhpc join`) get a notice to leave; any rank may be killed.
        """
        if (context := installed_context()) is not None:
            context.graceful_leave.set_action(act)

    @staticmethod
    def stay_until_let_go() -> None:
        """Keeps this rank in the run after a notice to leave, until a call runs `before_leaving(None)`.

        The rank reports the notice to the driver (`WorkerGroup.leaving`) and takes further calls. This is for ranks that must
        not leave at an arbitrary moment. The rank is killed if it stays longer than its job allows.
        """
        if (context := installed_context()) is not None:
            context.graceful_leave.stay()

    @property
    def told_to_leave(self) -> bool:
        """True if this rank has received a notice to leave the run, and finishes work first (`before_leaving`)."""
        context = installed_context()
        return context is not None and context.graceful_leave.may_finish

    # -- channels -------------------------------------------------------------------------------------------------

    @staticmethod
    def create_channel(name: str, maxsize: int = 0, distributed: bool = False) -> Channel:
        """Creates a channel; takes the arguments of `Channel.create`."""
        return Channel.create(name, maxsize, distributed)

    @staticmethod
    def connect_channel(name: str) -> Channel:
        """Attaches to a channel; takes the arguments of `Channel.connect`."""
        return Channel.connect(name)

    # -- point to point -------------------------------------------------------------------------------------------

    def send(self, obj: Any, dst_group_name: str, dst_rank: int, async_op: bool = False) -> AsyncWork | None:
        """Sends a picklable object to a rank of this or another group; messages between two ranks arrive in order.

        Tensors keep their dtype. Tensors from an accelerator arrive on the receiver's accelerator, or on the CPU if the
        receiver has no accelerator. Returns once the receiver's inbox has the message, which may be before the receiver calls
        `recv`. The inbox then has all data of an object of less than 32 KiB; larger data usually stays on this host until the
        `recv`. The caller may change the object afterwards. With `async_op` returns an `AsyncWork` at once.

        Raises:
            ValueError: A GPU tensor is not contiguous.
            DeadlineExceeded: The receiver's inbox stayed full until the session's wait deadline.
            RendezvousTimeout: The receiver has not started in time.
        """
        return p2p.send(obj, self.group_name, self.rank, dst_group_name, dst_rank, async_op=async_op)

    @staticmethod
    def notify(obj: Any, dst_group_name: str, dst_rank: int, about: str) -> bool:
        """Puts an object into the inbox of a rank, which reads the object with `notice(about)`.

        Returns:
            False if the rank has left and its group continues without this rank.
        """
        return p2p.post(obj, about, dst_group_name, dst_rank)

    @staticmethod
    def notice(about: str) -> Any:
        """Returns the next object that another rank has sent with `notify(…, about)`, without waiting.

        Raises:
            queue.Empty: No such object has arrived.
        """
        return p2p.poll(about)

    def recv(self, src_group_name: str, src_rank: int, async_op: bool = False) -> Any:
        """Receives the next object from a rank; with `async_op` returns an `AsyncWork` at once."""

        def receive() -> Any:
            return p2p.recv(src_group_name, src_rank)

        return in_background(f"recv-{src_group_name}-{src_rank}", receive) if async_op else receive()

    def send_tensor(self, tensor: torch.Tensor, dst_group_name: str, dst_rank: int, async_op: bool = False) -> Any:
        """Sends a tensor like `send`; the receiver passes a tensor of the same shape and dtype to `recv_tensor`."""
        return p2p.send(tensor, self.group_name, self.rank, dst_group_name, dst_rank, tag="t", async_op=async_op)

    def recv_tensor(self, tensor: torch.Tensor, src_group_name: str, src_rank: int, async_op: bool = False) -> Any:
        """Receives a tensor into `tensor` and returns it; with `async_op` returns an `AsyncWork` at once.

        Raises:
            ValueError: The sent tensor has a different shape or dtype.
        """

        def receive() -> None:
            p2p.copy_into(tensor, p2p.recv(src_group_name, src_rank, tag="t"))

        if async_op:
            return in_background(f"recvt-{src_group_name}-{src_rank}", receive)
        receive()
        return tensor

    def broadcast(
        self,
        obj: Any,
        groups: Sequence[tuple[str, Sequence[int] | int]],
        src: tuple[str, int] | None = None,
        async_op: bool = False,
        *,
        read_only: bool = False,
    ) -> Any:
        """Sends an object from a rank to all ranks in `groups`; sender and receivers call this and get the object.

        Large data is written once per host, and each receiver maps it.

        Args:
            obj: The object; receivers may give None.
            groups: Groups with their ranks.
            src: Group and rank of the sender; by default the first rank in `groups`.
            async_op: Return an `AsyncWork` at once.
            read_only: Receivers do not write to the received tensors, so that all receivers on a host use the same memory.

        Raises:
            ValueError: This rank is neither the sender nor in `groups`.
        """
        receivers = [(name, [ranks] if isinstance(ranks, int) else list(ranks)) for name, ranks in groups]
        receiver_addresses = [(name, rank) for name, ranks in receivers for rank in ranks]
        source_rank = (src[0], src[1]) if src is not None else receiver_addresses[0] if receiver_addresses else None
        if source_rank is None or (self.group_name, self.rank) not in (source_rank, *receiver_addresses):
            raise ValueError(
                f"broadcast: {self.group_name}-{self.rank} takes no part in a broadcast from {source_rank} "
                f"to {receiver_addresses or 'no rank'}"
            )

        def act() -> Any:
            return p2p.broadcast(obj, self.group_name, self.rank, receivers, source_rank, read_only=read_only)

        return in_background(f"broadcast-{source_rank[0]}-{source_rank[1]}", act) if async_op else act()

    # -- collectives inside the group -----------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces `tensor` over the group in place and returns it; `op` is "sum", "mean", "max" or "min"."""
        return self._collectives.all_reduce(tensor, op)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Collects an object from each rank of the group; all ranks get the list in rank order."""
        return self._collectives.all_gather_object(obj)

    def barrier(self) -> None:
        """Waits for all ranks of the group."""
        self._collectives.barrier()

    def init_process_group(self, ranks: range | None = None) -> Any:
        """Creates torch's default process group over this worker group (gloo on CPU, NCCL on GPU) and returns it.

        Returns None for a single rank.

        Args:
            ranks: Neighbouring ranks, including this rank, that form the process group; by default the whole worker group.
                The worker's collectives then run over these ranks.
        """
        if ranks is not None:
            group_rank = ranks.index(self.rank)
            self._collectives = Collectives(self.group_name, group_rank, len(ranks), _spec, ranks.start)
        return self._collectives.process_group()
