"""Control of a run's trace: the driver decides between steps which steps are recorded, and notifies all ranks.

The ranks confirm the start before the step's first call, so that the trace has all of it. A rank that does not answer is
left out. No error of the trace reaches the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime.comm.zmq_sockets import Pending, choose
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.host import node_name
from rlhpc.runtime.launchers import RankProcess
from rlhpc.runtime.rpc import Handle
from rlhpc.runtime.session import Session
from rlhpc.runtime.trace_recorder import recorder
from rlhpc.runtime.worker_instruments import Instrumented

log = logging.getLogger(__name__)
#: Seconds that all ranks together may take to confirm the start or the end of a recording.
_CONFIRM_S = 2.0
#: Seconds that a rank may take to write its profile at the end of the run.
_PROFILE_S = 60.0


@dataclass(frozen=True)
class ProfileOptions:
    """Ranks of worker groups that record profiles with torch.profiler, and the steps; and groups whose ranks run under Nsight
    Systems, with the steps that it records."""

    groups: Collection[str]
    ranks: Collection[int]
    steps: Collection[int]
    nsys_groups: Collection[str] = ()
    nsys_steps: Collection[int] = ()


class TraceControl:
    """Controller that starts and ends the trace of a run on its driver.

    Args:
        folder: Folder of the ranks' files.
        steps: Steps to record (`runner.trace.steps`).
        session: Session of the driver; None outside a run.
        profile: Ranks that record profiles, and the steps; None for no profiles.
    """

    def __init__(
        self, folder: Path, steps: Collection[int], session: Session | None, profile: ProfileOptions | None = None
    ) -> None:
        self._folder, self._steps, self._session = folder, steps, session
        self._profile, self._is_profiling = profile or ProfileOptions((), (), ()), False
        self._is_capturing = False
        self._last_step = 0
        #: Incarnations of the ranks that record.
        self._recording_ranks = set[str]()

    def begin_step(self, step: int) -> None:
        """Starts or ends the recording before a step, if that is due."""
        session = self._session
        if session is None:
            return
        if session.trace_request:
            self._last_step, session.trace_request = step + session.trace_request - 1, 0
        if self._is_profiling or step in self._profile.steps:
            self._call_profiled(session, step if step in self._profile.steps else None)
        if (step in self._profile.nsys_steps) != self._is_capturing:
            self._capture(session, not self._is_capturing)
        if step in self._steps or step <= self._last_step:
            self._start(session)
        elif self._recording_ranks or recorder.is_on:
            self.end()

    def end(self) -> None:
        """Ends the recording on all ranks; each rank writes its records soon."""
        if self._session is None:
            return
        handles = self._call_profiled(self._session, None) if self._is_profiling else []
        handles += self._capture(self._session, False) if self._is_capturing else []
        for handle in handles:
            with contextlib.suppress(RlhpcError):  # a rank has ended: the run reports it
                handle.wait(_PROFILE_S)
        if not (self._recording_ranks or recorder.is_on):
            return
        recording_ranks, self._recording_ranks = self._recording_ranks, set()
        processes = [
            process for process in self._session.ranks.all_processes() if process.spec.incarnation in recording_ranks
        ]
        self._tell(self._session, processes, {"on": False})
        recorder.stop(flush=True)

    def _call_profiled(self, session: Session, step: int | None) -> list[Handle]:
        """Makes the profiled ranks end their profile and, unless `step` is None, start another one between two calls."""
        self._is_profiling = step is not None
        processes = [
            process
            for process in self._ready_processes(session, self._profile.groups)
            if process.spec.rank in self._profile.ranks
        ]
        return self._call(session, processes, Instrumented.profile_step.__name__, step)

    def _capture(self, session: Session, is_on: bool) -> list[Handle]:
        """Makes the ranks that run under Nsight Systems open or close the range that it records, between two calls."""
        self._is_capturing = is_on
        processes = self._ready_processes(session, self._profile.nsys_groups)
        return self._call(session, processes, Instrumented.capture_profile_range.__name__, is_on)

    @staticmethod
    def _ready_processes(session: Session, groups: Collection[str]) -> list[RankProcess]:
        return [
            process
            for process in session.ranks.all_processes()
            if process.state == "ready" and process.spec.group in groups
        ]

    @staticmethod
    def _call(session: Session, processes: Iterable[RankProcess], method: str, argument: Any) -> list[Handle]:
        """Calls a method of the ranks, after their calls so far; returns handles that may be ignored."""
        handles = []
        for process in processes:
            with contextlib.suppress(RlhpcError):
                handles.append(session.rpc.call([process.record], method, (argument,), {}))
        return handles

    def _start(self, session: Session) -> None:
        host = {"host": node_name(), "host_id": session.context.host}
        recorder.start(str(self._folder / "driver-0.jsonl"), {"group": "driver", "rank": 0, "pid": os.getpid(), **host})
        new_processes = [
            process
            for process in session.ranks.all_processes()
            if process.state == "ready" and process.record and process.spec.incarnation not in self._recording_ranks
        ]
        self._recording_ranks |= {process.spec.incarnation for process in new_processes}
        self._tell(
            session, new_processes, {"on": True, "folder": str(self._folder), "driver": session.service.endpoint}
        )

    def _tell(self, session: Session, processes: Iterable[RankProcess], request: dict[str, Any]) -> None:
        """Sends a request to ranks and waits until they have confirmed it, at most `_CONFIRM_S` seconds."""
        peers, deadline = session.service.peers, time.monotonic() + _CONFIRM_S
        pending_requests: list[tuple[RankProcess, Pending]] = []
        for process in processes:
            worker_spec = process.spec
            identity = {
                "group": worker_spec.group,
                "rank": worker_spec.rank,
                "host": worker_spec.node,
                "pid": process.pid,
            }
            wait_purpose, timeout_s = f"{worker_spec.name} to record its trace", max(0.01, deadline - time.monotonic())
            with contextlib.suppress(RlhpcError, OSError):
                frames = [pickle.dumps({**request, **identity})]
                pending_requests.append(
                    (process, peers.begin(choose(process.record["data"]), b"TRACE", frames, wait_purpose, timeout_s))
                )
        for process, pending_request in pending_requests:
            try:
                peers.reply_to(pending_request, max(0.01, deadline - time.monotonic()))
            except (RlhpcError, OSError) as error:  # the next wait for the rank reports its failure
                log.debug("%s does not record its trace: %s", process.spec.name, error)
