"""Launchers of ranks, on this host or as job steps, behind one interface that the session uses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.runtime.imports import python_path
from rlhpc.runtime.start_phases import ENVIRONMENT, Phases, RankPhases

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.errors import RlhpcError
    from rlhpc.runtime.worker_spec import WorkerSpec


def rank_environment(environ: Mapping[str, str], num_threads: int, *, foreign: bool = False) -> dict[str, str]:
    """Returns the environment in which a rank's interpreter starts.

    Args:
        environ: Environment to extend; its settings of libraries take precedence over those of this function.
        num_threads: Number of OpenMP threads.
        foreign: Whether the interpreter is another Python with separate packages (`imports.import_paths`).
    """
    return {
        # Waiting threads soon sleep: on a busy node, a spinning thread takes the core from the thread that it waits for.
        "GOMP_SPINCOUNT": "1000",
        # A check for GPUs then does not initialize CUDA, so that the process can still be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **environ,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": python_path(foreign),
    }


def node_imports(worker_spec: WorkerSpec, session_items: Sequence[str], fork: bool) -> list[str]:
    """Returns the modules that a node imports once for ranks of a group; [] if they cannot be forked.

    Args:
        worker_spec: Specification of a rank; `preload` has the group's imports (`Worker.preloads`).
        session_items: Imports of all ranks of the session.
        fork: Whether the ranks may be forked.
    """
    return [*session_items, *worker_spec.preload] if fork and not worker_spec.command_prefix else []


#: Fields of a rank's record in the table of all ranks.
_TABLE_COLUMNS = ("group", "rank", "node", "pid", "host", "log_out", "log_err", "incarnation")


#: Name, in the registry's folder `ranks`, of the record with what all ranks use.
USAGE = "usage"
#: Processor cores, bytes of memory, bytes of the accelerator's memory, and percent of time in which the accelerator is busy.
Usage = tuple[float, float, float | None, float | None]


@dataclass(eq=False)
class RankProcess:
    """Record of a rank on the driver.

    Attributes:
        spec: Specification of the rank.
        launcher: Launcher that has started the rank.
        pid: Process id; 0 until it is known.
        state: "starting", "ready", "stopping" or "ended". A rank that the run has abandoned is "ended" at once.
        record: The rank's record in the registry; empty until the rank is ready.
        last_heartbeat: Time (`time.monotonic`) of the last heartbeat.
        suspect: Whether the rank has been silent for longer than usual.
        leave_reason: Reason of the rank's notice to leave; "" if there is no notice.
        asks_to_leave: Whether the rank waits for permission to leave.
        has_exited: Whether the rank's process is known to have ended; until then no successor may be started.
        phases: Phases of the rank's start (`start_phases`).
        has_departed: Whether the rank has left while its group continues.
        log_positions: Sizes of the rank's logs, as it has reported them (`log_sizes`).
        usage: Resources that the rank has reported; None before its first report.
    """

    spec: WorkerSpec
    launcher: Launcher
    pid: int = 0
    state: str = "starting"
    record: dict[str, Any] = field(default_factory=dict)
    last_heartbeat: float = field(default_factory=time.monotonic)
    suspect: bool = False
    leave_reason: str = ""
    asks_to_leave: bool = False
    has_exited: bool = False
    phases: Phases = field(default_factory=lambda: [(ENVIRONMENT, time.time())])
    has_departed: bool = False
    log_positions: tuple[int, int] = (0, 0)
    usage: Usage | None = None

    def start_phases(self) -> RankPhases:
        """Returns the phases of the rank's start so far."""
        return RankPhases(self.spec.group, self.spec.rank, tuple(self.phases))

    def table_row(self) -> dict[str, Any]:
        """Returns the rank's row in the table of all ranks, which other commands read."""
        worker_spec = self.spec
        row = self.record or {
            "group": worker_spec.group, "rank": worker_spec.rank, "node": worker_spec.node, "pid": self.pid,
            "log_out": worker_spec.log_out,
            "log_err": worker_spec.log_err, "incarnation": worker_spec.incarnation,
        }  # fmt: skip
        state_names = {"starting": "starting", "ended": "left" if self.has_departed else "ended"}
        return {
            **{name: row[name] for name in _TABLE_COLUMNS if name in row},
            "state": state_names.get(self.state, "running"),
        }


class Launcher(Protocol):
    """Interface that starts ranks and ends them.

    Attributes:
        grace_s: Seconds that ranks may take to end by themselves before they are killed.
        limit_s: Maximum seconds that the session waits for killed ranks to end.
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
            fork: Whether the rank may be forked.

        Raises:
            SubmitError: The launcher cannot start a rank on this node.
        """

    def start(self, processes: Sequence[RankProcess], cluster: Cluster) -> None:
        """Starts ranks of a group; reports their events to `Reports`."""

    def end(self, processes: Sequence[RankProcess]) -> None:
        """Asks ranks to end at once."""

    def kill(self, processes: Sequence[RankProcess]) -> None:
        """Kills the processes of ranks, including abandoned ranks; reports the end of each process."""

    def early_output(self, process: RankProcess) -> str:
        """Returns the output of a rank that has not opened its log; "" if the rank has printed nothing."""

    def arrival_report(self, processes: Sequence[RankProcess]) -> list[str]:
        """Returns information about ranks that do not become ready, one line per item."""

    def close(self, clears_folders: bool) -> None:
        """Frees the launcher's resources after all ranks have ended.

        Args:
            clears_folders: Also remove the files that killed ranks may have left on other nodes.
        """


class Reports(Protocol):
    """Interface of the receiver of a launcher's reports, which arrive on the launcher's threads."""

    def record_start(self, process: RankProcess, pid: int) -> None:
        """Registers that a rank's process has started."""

    def record_exit(self, process: RankProcess, status: int) -> None:
        """Registers that a rank's process has ended with this wait status."""

    def record_ends(self, processes: Sequence[RankProcess]) -> list[RankProcess]:
        """Registers that all these ranks have ended; returns the ranks that ended unexpectedly."""

    def fail(self, failure: RlhpcError) -> None:
        """Records a failure that no rank has caused."""


class JoinedLauncher:
    """Launcher of joined ranks. It does nothing, because another process has started the ranks and ends them.

    That process checks whether the run still exists, and ends its ranks when the run has ended.
    """

    grace_s = 2.0
    limit_s = 2.0

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        """Does nothing, because the specification of a joined rank is complete."""

    def start(self, processes: Sequence[RankProcess], cluster: Cluster) -> None:
        """Does nothing, because another process starts the ranks."""

    def end(self, processes: Sequence[RankProcess]) -> None:
        """Does nothing, because the process that started the ranks ends them."""

    def kill(self, processes: Sequence[RankProcess]) -> None:
        """Does nothing, because the process that started the ranks ends them."""

    def early_output(self, process: RankProcess) -> str:
        """Returns "", because only the process that started the rank has its output."""
        return ""

    def arrival_report(self, processes: Sequence[RankProcess]) -> list[str]:
        """Returns an empty list, because this launcher has no information about joined ranks."""
        return []

    def close(self, clear: bool) -> None:
        """Does nothing, because this launcher has no resources."""
