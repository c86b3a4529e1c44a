"""What a driver does for ranks that come and go: it listens for them, keeps account of them, and looks after their jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlhpc.jobs.attendance import Attendance
from rlhpc.jobs.elastic.plan import Placed, helper_plans
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.signals import EXIT_REQUEUE, MAX_RESTARTS, StopRequest
from rlhpc.metrics import update_provenance
from rlhpc.runs.folder import note
from rlhpc.runs.helpers import Helpers
from rlhpc.runtime.allocation import in_slurm_job
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.network import address_for_partition

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.session import Session


class Elastic:
    """One start of a run, as far as it concerns ranks that join.

    Args:
        section: Section `cluster`.
        paths: The run.
        placements: Where the ranks are that it starts with, by group.
        useful: Ranks beyond which there is nothing more to do, by group.
    """

    def __init__(
        self,
        section: ClusterConfig,
        paths: RunPaths,
        placements: Mapping[str, Sequence[Placed]],
        useful: Mapping[str, int],
    ) -> None:
        self._paths, self._plans = paths, helper_plans(section, placements)
        self._useful = {name: most - len(placements.get(name) or ()) for name, most in useful.items()}
        self._helpers: list[Helpers] = []
        self._attendance: Attendance | None = None
        self._restarts = False

    def address(self, cluster: Cluster) -> str | None:
        """Where to listen for ranks on other hosts; None if nobody is to come, or if the run listens there anyway."""
        if not self._plans or any(not node.is_local for node in cluster.nodes):
            return None
        try:
            return address_for_partition(dict(self._plans[0].options).get("partition"), cluster.interface)
        except ConfigError as error:
            note(f"cluster.elastic: {error}; only ranks on this host can join")
            return None

    def open(self, session: Session) -> None:
        """The session is there: who joins is written down."""
        self._attendance = Attendance(self._paths.attendance)
        session.membership.heard = self._attendance.note
        self._helpers = [
            Helpers(
                self._paths, plan, self._useful.get(plan.group, plan.bounds.most), session.job_gone,
                session.membership.by_job, session.membership.faulty,
            )
            for plan in self._plans
        ]  # fmt: skip

    def start(self, session: Session) -> None:
        """The first step is about to begin: from now on ranks may join."""
        session.membership.is_open = True
        for helpers in self._helpers:
            helpers.start()

    def saw(self, row: Mapping[str, float]) -> None:
        """A step's metrics."""
        for helpers in self._helpers:
            helpers.saw(row)

    def failed(self, error: BaseException) -> None:
        """The start has failed: in a job, it may be made again."""
        self._restarts = (
            isinstance(error, RlhpcError) and error.restartable and os.environ.get(MAX_RESTARTS, "0") != "0"
        )

    def close(self, stop: StopRequest) -> None:
        """The session is over. A job that was told to end may be requeued, which only Slurm knows: `rlhpc cancel` ends the
        helpers' jobs itself."""
        again = self._restarts or stop.exit_code == EXIT_REQUEUE
        for helpers in self._helpers:
            helpers.stop(again=again, killed=stop.exit_code > 128 and in_slurm_job(os.environ))
        if self._attendance is not None:
            self._attendance.close("its driver ended, and another takes the run up" if again else "the run ended")
        if self._helpers:
            jobs = [asdict(job) for helpers in self._helpers for job in helpers.jobs]
            update_provenance(self._paths, helpers=jobs)
