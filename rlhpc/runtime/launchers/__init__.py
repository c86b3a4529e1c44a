"""Launchers: start and end ranks on this host or as job steps. The session knows this interface alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.runtime.imports import python_path

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.errors import RlhpcError
    from rlhpc.runtime.worker_spec import WorkerSpec


def rank_environment(environ: Mapping[str, str], threads: int, *, foreign: bool = False) -> dict[str, str]:
    """Returns the environment in which a rank's interpreter starts.

    Args:
        environ: Environment to extend; its own settings of libraries stay.
        threads: Number of OpenMP threads.
        foreign: Whether it is another Python than this one (`imports.import_paths`).
    """
    return {
        # Threads that wait for one another go to sleep soon: on a busy node, spinning takes the core from the one awaited.
        "GOMP_SPINCOUNT": "1000",
        # A look for GPUs then leaves a process that can be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": python_path(foreign),
    }


@dataclass(eq=False)
class Member:
    """A rank as the driver sees it.

    Attributes:
        state: "starting", "ready", "stopping" or "ended". A rank that the run has abandoned is "ended" at once.
        has_exited: Whether its process is known to have ended; until then no successor may be started.
        leave_reason: Reason of its notice to leave, if it got one.
        leaving: Whether it waits for permission to leave.
    """

    spec: WorkerSpec
    launcher: Launcher
    pid: int = 0
    state: str = "starting"
    record: dict[str, Any] = field(default_factory=dict)
    alive: float = field(default_factory=time.monotonic)
    suspect: bool = False
    leave_reason: str = ""
    leaving: bool = False
    has_exited: bool = False


class Launcher(Protocol):
    """Interface that starts ranks and ends them.

    Attributes:
        grace_s: Seconds that ranks have to end by themselves before they are killed.
        limit_s: Seconds after which killed ranks are gone, or no longer waited for.
    """

    @property
    def grace_s(self) -> float: ...
    @property
    def limit_s(self) -> float: ...

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        """Completes the specification of a rank on `node`.

        Args:
            spec: The rank's specification.
            node: Node of the rank.
            fork: Whether it may be forked.

        Raises:
            SubmitError: No rank can be started there.
        """

    def start(self, members: Sequence[Member], cluster: Cluster) -> None:
        """Starts ranks of a group and reports their events."""

    def end(self, members: Sequence[Member]) -> None:
        """Asks ranks to end at once."""

    def kill(self, members: Sequence[Member]) -> None:
        """Kills the processes of ranks, also of abandoned ranks; reports each when it is gone."""

    def early_output(self, member: Member) -> str:
        """Returns the output of a rank that has not opened its log; "" if there is no output."""

    def arrival_report(self, members: Sequence[Member]) -> list[str]:
        """Returns the state of ranks that do not arrive, one line each."""

    def close(self, clear: bool) -> None:
        """Cleans up when all ranks have ended. With `clear`, also removes the files that killed ranks may have left on other
        nodes."""


class Reports(Protocol):
    """Interface of the receiver of a starter's reports, which arrive on the starter's threads."""

    def started(self, member: Member, pid: int) -> None:
        """Registers that a rank's process has started."""

    def exited(self, member: Member, status: int) -> None:
        """Registers that a rank's process has ended with this wait status."""

    def all_ended(self, members: Sequence[Member]) -> list[Member]:
        """Registers that none of these ranks can be alive; returns those whose end is unexpected."""

    def fail(self, failure: RlhpcError) -> None:
        """Records a failure that no rank has caused."""


class JoinedLauncher:
    """Starter of joined ranks, whose processes were started elsewhere. The process that started them checks whether the run
    exists, and ends its ranks if not.
    """

    grace_s = 2.0
    limit_s = 2.0

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        """Does nothing: joined ranks know their place."""

    def start(self, members: Sequence[Member], cluster: Cluster) -> None:
        """Does nothing: joined ranks arrive by themselves."""

    def end(self, members: Sequence[Member]) -> None:
        """Does nothing: joined ranks notice the end."""

    def kill(self, members: Sequence[Member]) -> None:
        """Does nothing: joined ranks notice the end."""

    def early_output(self, member: Member) -> str:
        """Returns "": the process that started the rank has its output."""
        return ""

    def arrival_report(self, members: Sequence[Member]) -> list[str]:
        """Returns an empty list: nothing is known about joined ranks."""
        return []

    def close(self, clear: bool) -> None:
        """Does nothing: the starter has no resources."""
