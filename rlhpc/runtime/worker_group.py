"""Worker groups: handles of the ranks of a worker class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlhpc.runtime.comm import context as contexts
from rlhpc.runtime.errors import ConfigError, WorkerFailed
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.placement import NodePlacementStrategy
from rlhpc.runtime.placement.strategies import Placement, with_all_devices, with_shared_devices
from rlhpc.runtime.rpc import Handle, RpcClient
from rlhpc.runtime.session import Session

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.launchers import RankProcess

_clients: dict[int, RpcClient] = {}
#: Seconds to wait for a killed process to end before its successor is started.
_KILL_S = 30.0


def _get_client() -> RpcClient:
    """Returns the calling process's RPC client: the session's in the driver, a separate one in a worker."""
    session = Session.running()
    if session is not None:
        return session.rpc
    context = contexts.current()
    if id(context) not in _clients:
        _clients[id(context)] = RpcClient(context, on_failure=lambda _: None, check=context.check)
    return _clients[id(context)]


@runtime_checkable
class Forking(Protocol):
    """Worker class that declares whether its ranks may be forked; see `Worker.forks`."""

    def forks(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether ranks with these arguments may be forked."""


@former_members(why_left="find_leave_reason")
class WorkerGroup:
    """Handle of the ranks of a worker class: `group.method(*args)` calls the method on all ranks and returns a `Handle`.

    `MyWorker.create_group(...)` creates a group and `launch` starts it; `from_group_name` attaches to a running group.

    Raises:
        ConfigError: A method of the worker class has the name of a method of the group.
    """

    def __init__(self, cls: type, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        clashes = [name for name in vars(WorkerGroup) if name[0] != "_" and callable(getattr(cls, name, None))]
        if clashes:
            raise ConfigError(
                f"{cls.__name__}.{clashes[0]} could not be called: a group has {clashes[0]!r} of its own. Give the method "
                f"another name (taken: {', '.join(name for name in vars(WorkerGroup) if name[0] != '_')})"
            )
        self._cls, self._args, self._kwargs = cls, args, kwargs or {}
        self._records: list[dict[str, Any]] = []
        self._selected_ranks: set[int] | None = None
        self._world_size = 0
        self._arrival: Callable[[], list[dict[str, Any]]] | None = None
        self._processes: list[RankProcess] = []
        self._cluster: Cluster | None = None
        self._timeout = 300.0
        self.name = ""

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: Any = None,
        name: str | None = None,
        *,
        env_vars: dict[str, str] | None = None,
        fork: bool | None = None,
        timeout: float = 300.0,
        wait: bool = True,
        command_prefix: Sequence[str] = (),
        isolate_gpu: bool = True,
    ) -> WorkerGroup:
        """Starts the ranks and waits until each has built its object.

        Args:
            cluster: Nodes for the ranks.
            placement_strategy: Placement of the ranks; by default one rank on the first node.
            name: Name of the group, unique among the running groups; by default the class's name.
            env_vars: Environment variables for every rank.
            fork: Fork the ranks from the node's fork server; False starts new interpreters, for engines that cannot be forked.
                By default the class decides (`Worker.forks`).
            timeout: Seconds that all ranks together may take to become ready.
            wait: Wait for the ranks. False returns at once, so that groups can start in parallel; the first call on the group
                then waits.
            command_prefix: Command that starts each rank's interpreter, such as a profiler; the ranks are not forked then.
            isolate_gpu: Whether a rank sees the accelerators of its placement alone; False shows it all of its node.

        Raises:
            RendezvousTimeout: Some ranks did not become ready; the message has the ranks, their nodes and their logs.
            WorkerFailed: A constructor raised an exception.
        """
        self.name = name or self._cls.__name__
        strategy = placement_strategy or NodePlacementStrategy([0])
        session = Session.current()
        started_processes = session.launch(
            self.name,
            (self._cls, self._args, self._kwargs),
            self._choose_placements(strategy, cluster)
            if isolate_gpu
            else with_all_devices(strategy.place(cluster), cluster),
            cluster,
            env_vars=env_vars or {},
            fork=self._can_fork() if fork is None else fork,
            preload=self._preloads(),
            command_prefix=command_prefix,
        )
        self._processes, self._world_size, self._cluster, self._timeout = (
            started_processes,
            len(started_processes),
            cluster,
            timeout,
        )
        self._records, self._arrival = [], lambda: session.await_arrivals(self.name, started_processes, timeout)
        return self.wait_ready() if wait else self

    def _choose_placements(self, strategy: Any, cluster: Cluster) -> list[Placement]:
        count_sharing = getattr(self._cls, "ranks_sharing_devices", None)
        num_sharing = 1 if count_sharing is None else count_sharing(*self._args, **self._kwargs)
        placements: list[Placement] = strategy.place(cluster)
        return with_shared_devices(placements, num_sharing) if num_sharing > 1 else placements

    def _can_fork(self) -> bool:
        return self._cls.forks(*self._args, **self._kwargs) if isinstance(self._cls, Forking) else True

    def _preloads(self) -> list[str]:
        preloads = getattr(self._cls, "preloads", None)
        return [] if preloads is None else list(preloads(*self._args, **self._kwargs))

    def relaunch(self) -> WorkerGroup:
        """Restarts the ended ranks with the same placement; call `wait_ready` afterwards.

        Raises:
            WorkerFailed: The earlier process of a rank cannot be killed.
        """
        restarted_ranks, session = set(self.restart(_KILL_S)), Session.current()
        if unfinished_processes := [
            m for m in session.membership.restartable(self.name) if m.spec.rank not in restarted_ranks
        ]:
            worker_spec, pid = unfinished_processes[0].spec, unfinished_processes[0].pid
            raise WorkerFailed(
                f"process {pid} of {worker_spec.name} on node {worker_spec.node} was killed and is still there after "
                f"{_KILL_S:.0f} s",
                group=worker_spec.group, rank=worker_spec.rank, node=worker_spec.node, log_path=worker_spec.log_err,
            )  # fmt: skip
        started_processes = [process for process in self._processes if process.spec.rank in restarted_ranks]
        alive_records = [record for record in self._records if record["rank"] not in restarted_ranks]

        def report_arrival() -> list[dict[str, Any]]:
            arrived_records = session.await_arrivals(self.name, started_processes, self._timeout)
            return sorted([*alive_records, *arrived_records], key=lambda record: int(record["rank"]))

        self._arrival = report_arrival
        return self

    @property
    def present(self) -> list[int]:
        """Ranks that take calls, which are all ranks that have not left."""
        self.wait_ready()
        client = _get_client()
        return [record["rank"] for record in self._records if not client.has_left(record)]

    def find_leave_reason(self, rank: int) -> str:
        """Returns the reason for which a rank got a notice to leave and left; "" if it ended for another reason."""
        return Session.current().membership.find_leave_reason(self.name, rank)

    @property
    def leaving(self) -> list[int]:
        """Ranks that have a notice to leave and wait for permission (`Worker.stay_until_let_go`)."""
        return Session.current().membership.leaving(self.name)

    def restart(self, patience_s: float = 0.0) -> list[int]:
        """Restarts the ended ranks with the same placement and returns at once; `admit` adds them later, when they are ready.

        Args:
            patience_s: Seconds to wait for the earlier processes of the ranks to end. If the earlier process of a rank still
                runs, the rank is not restarted; call this method again later.

        Returns:
            The restarted ranks.

        Raises:
            ConfigError: The group was not launched by this process.
        """
        if self._cluster is None:
            raise ConfigError(f"group {self.name or self._cls.__name__!r} was never launched here")
        started_processes = Session.current().relaunch(self.name, self._cluster, patience_s)
        ranks = [process.spec.rank for process in started_processes]
        self._processes = [m for m in self._processes if m.spec.rank not in ranks] + started_processes
        return ranks

    def admit(self) -> list[int]:
        """Adds the ready ranks that were restarted or have joined; they take calls from now on.

        Returns:
            The added ranks.
        """
        incarnations = {record["incarnation"] for record in self._records}
        records = Session.current().membership.newcomers(self.name, incarnations)
        if records:
            Session.current().ranks.announce(Session.current().service)
        ranks = {record["rank"] for record in records}
        retained_records = [record for record in self._records if record["rank"] not in ranks]
        self._records = sorted([*retained_records, *records], key=lambda record: int(record["rank"]))
        return sorted(ranks)

    def took_in(self, rank: int) -> None:
        """Registers a rank from `admit` as a participant after its setup."""
        Session.current().membership.register_participant(self.name, rank)

    def wait_ready(self) -> WorkerGroup:
        """Waits until each rank has built its object, after `launch(wait=False)`.

        Raises:
            RendezvousTimeout, WorkerFailed: As for `launch`.
        """
        if self._arrival is not None:
            pending_arrival, self._arrival = self._arrival, None
            self._records = pending_arrival()
        return self

    @classmethod
    def from_group_name(cls, worker_cls: type, name: str, timeout: float = 60.0) -> WorkerGroup:
        """Returns a handle of a running group. The driver and any worker of the run may call this."""
        context = contexts.current()
        group = cls(worker_cls)
        group.name = name
        world_size = context.group_size(name, timeout)
        group._records, group._world_size = (
            [context.rank_record(name, rank, timeout) for rank in range(world_size)],
            world_size,
        )
        return group

    @property
    def worker_class(self) -> type:
        """Class of the ranks."""
        return self._cls

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def accelerators(self) -> list[frozenset[tuple[int, int]]]:
        """The accelerators of each rank, as (node, index), of a group that this process has launched."""
        processes = sorted(self._processes, key=lambda process: process.spec.rank)
        return [
            frozenset((process.spec.node_rank, index) for index in process.spec.accelerators) for process in processes
        ]

    def execute_on(self, *ranks: int) -> WorkerGroup:
        """Restricts only the next call to these ranks; returns the group.

        Raises:
            ValueError: There are no ranks, or a rank does not exist.
        """
        joined_ranks = {record["rank"] for record in self._records}
        unknown_ranks = [rank for rank in ranks if not 0 <= rank < self.world_size and rank not in joined_ranks]
        if unknown_ranks or not ranks:
            raise ValueError(f"execute_on{ranks}: group {self.name!r} has ranks 0 to {self.world_size - 1}")
        self._selected_ranks = set(ranks)
        return self

    def __getattr__(self, name: str) -> Callable[..., Handle]:
        """Returns a function that calls method `name` on all ranks, or on the ranks of `execute_on`, and returns a `Handle`.

        The call waits until the ranks are ready and skips ranks that have left.

        Raises:
            AttributeError: The worker class has no such public method.
        """
        if name.startswith("_"):
            raise AttributeError(f"{name!r}: names that begin with '_' are private to the worker and cannot be called")
        if not callable(getattr(self._cls, name, None)):
            raise AttributeError(f"{self._cls.__name__} has no method {name!r}")

        def call(*args: Any, **kwargs: Any) -> Handle:
            ranks, self._selected_ranks = self._selected_ranks, None
            self.wait_ready()
            if not self._records:
                raise ConfigError(f"group {self.name or self._cls.__name__!r} is not running: call launch() first")
            client = _get_client()
            client._check()
            present_records = [record for record in self._records if not client.has_left(record)]
            records = (
                present_records if ranks is None else [record for record in present_records if record["rank"] in ranks]
            )
            # The requested ranks may all have left; the handle then has no results.
            return client.call(records, name, args, kwargs) if records else Handle(client, self.name, name, [])

        return call

    def shutdown(self, grace: float = 5.0) -> None:
        """Ends the group: ranks finish their current call, and are killed if they take longer than `grace` seconds.

        Does not wait for ranks that are still starting. Does nothing if the group has ended or failed. A group from
        `from_group_name` keeps running; only this handle becomes unusable.
        """
        session = Session.running()
        if self._processes and session is not None:
            session.shutdown_group(self.name, self._processes, grace)
        self._records, self._processes, self._world_size, self._arrival = [], [], 0, None

    async def async_shutdown(self, grace: float = 5.0) -> None:
        await asyncio.to_thread(self.shutdown, grace)

    def __repr__(self) -> str:
        return f"WorkerGroup({self._cls.__name__}, name={self.name!r}, world_size={self.world_size})"
