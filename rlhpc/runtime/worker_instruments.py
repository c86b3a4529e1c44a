"""Instruments of a worker: log lines, timed sections and profiles of its rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.trace_recorder import span

if TYPE_CHECKING:
    from torch.profiler import profile

    from rlhpc.runtime.worker_spec import WorkerSpec

F = TypeVar("F", bound=Callable[..., Any])


class Instrumented:
    """Base class of workers that log, time sections of their methods and record profiles.

    Args:
        group_name, rank, world_size: Identity of the rank.
        spec: Specification of the rank; None outside a run.

    Attributes:
        log: Logger of the class's module; lines in the rank's log have group and rank.
        call_durations: Seconds of the timed sections of the current call, by tag; the answer to the call takes them along.
    """

    def __init__(self, group_name: str, rank: int, world_size: int, spec: WorkerSpec | None) -> None:
        self.group_name, self.rank, self.world_size = group_name, rank, world_size
        self.log = logging.getLogger(type(self).__module__)
        self.call_durations: dict[str, float] = {}
        self._total_durations: dict[str, float] = {}
        self._profile_folder = _profile_folder(spec)
        self._profile: tuple[profile, int] | None = None

    # -- log ------------------------------------------------------------------------------------------------------

    def log_debug(self, msg: object) -> None:
        """Logs at level DEBUG, which a rank's log shows only if the logger's level is set so: `self.log.setLevel("DEBUG")`."""
        self.log.debug(msg, stacklevel=2)

    def log_info(self, msg: object) -> None:
        """Logs at level INFO."""
        self.log.info(msg, stacklevel=2)

    def log_warning(self, msg: object) -> None:
        """Logs at level WARNING."""
        self.log.warning(msg, stacklevel=2)

    def log_error(self, msg: object) -> None:
        """Logs at level ERROR."""
        self.log.error(msg, stacklevel=2)

    def log_on_first_rank(self, msg: object) -> None:
        """Logs at level INFO on the group's first rank, and nothing on the other ranks."""
        if self.rank == 0:
            self.log.info(msg, stacklevel=2)

    def log_on_last_rank(self, msg: object) -> None:
        """Logs at level INFO on the group's last rank, and nothing on the other ranks."""
        if self.rank == self.world_size - 1:
            self.log.info(msg, stacklevel=2)

    # -- timed sections -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker_timer(self, tag: str | None = None) -> Iterator[None]:
        """Times the block of a `with` statement; `Handle.consume_durations` returns the seconds to the driver.

        Sections of the same tag add up. While a profile is recorded, it shows the section, too.

        Args:
            tag: Name of the section; by default the name of the calling function.
        """
        name = sys._getframe(2).f_code.co_name if tag is None else tag
        with contextlib.ExitStack() as stack:
            if self._profile is not None:
                from torch.profiler import record_function

                stack.enter_context(record_function(name))
            stack.enter_context(span(name, "call"))
            start_time = time.perf_counter()
            try:
                yield
            finally:
                duration_s = time.perf_counter() - start_time
                for durations in (self.call_durations, self._total_durations):
                    durations[name] = durations.get(name, 0.0) + duration_s

    @staticmethod
    def timer(tag: str | None = None) -> Callable[[F], F]:
        """Decorates a method, also an `async` one, so that `worker_timer` times each of its calls.

        Args:
            tag: Name of the section; by default the method's name.
        """

        def decorate(method: F) -> F:
            name = tag or method.__name__

            @functools.wraps(method)
            def call(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
                with self.worker_timer(name):
                    return method(self, *args, **kwargs)

            @functools.wraps(method)
            async def call_async(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
                with self.worker_timer(name):
                    return await method(self, *args, **kwargs)

            return cast(F, call_async if inspect.iscoroutinefunction(method) else call)

        return decorate

    def pop_execution_time(self, tag: str) -> float:
        """Returns the seconds of the sections of this tag since the last such call, and clears them.

        Raises:
            ValueError: No section of this tag has ended since then.
        """
        if tag not in self._total_durations:
            tags_text = ", ".join(sorted(self._total_durations)) or "none"
            raise ValueError(
                f"no section {tag!r} has been timed on {self.group_name}-{self.rank}; there are: {tags_text}"
            )
        return self._total_durations.pop(tag)

    def pop_execution_times(self) -> dict[str, float]:
        """Returns the seconds of all timed sections since the last such call by tag, and clears them."""
        durations, self._total_durations = self._total_durations, {}
        return durations

    # -- profiles -------------------------------------------------------------------------------------------------

    def start_profile(self, step_idx: int) -> None:
        """Starts recording this rank with torch.profiler: operators, kernels and timed sections, until `stop_profile`.

        Args:
            step_idx: Number of the step, which the name of the profile's file has.

        Raises:
            RlhpcError: A profile of this rank is being recorded already.
        """
        from torch.profiler import profile

        if self._profile is not None:
            raise RlhpcError(
                f"start_profile({step_idx}): {self.group_name}-{self.rank} records a profile of step {self._profile[1]}; "
                "call stop_profile first"
            )
        profiler = profile()  # of the CPU, and of accelerators that torch can use
        profiler.start()
        self._profile = (profiler, step_idx)

    def profile_step(self, step_idx: int | None) -> None:
        """Ends the profile of an earlier step, if one is being recorded, and starts that of a step; only logs errors.

        Args:
            step_idx: Number of the step; None to start none.
        """
        try:
            if self._profile is not None:
                self.log.info("the profile is in %s", self.stop_profile())
            if step_idx is not None:
                self.start_profile(step_idx)
        except Exception:  # a profile must not end the run
            self.log.exception("step %s is not profiled", step_idx)

    def capture_profile_range(self, on: bool) -> None:
        """Opens or closes the range that Nsight Systems records (`cudaProfilerApi`); without CUDA it does nothing."""
        import torch

        try:
            if torch.cuda.is_available():
                (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
        except Exception:  # a profile must not end the run
            self.log.exception("Nsight Systems records no range")

    def stop_profile(self) -> str:
        """Ends the recording, and writes it as a Chrome trace, which https://ui.perfetto.dev shows.

        Returns:
            Path of the file: `profiles/<group>-<rank>.step-<step>.json` in the folder of the rank's logs. Without a run
            folder, `profiles` is in the working directory.

        Raises:
            RlhpcError: No profile is being recorded.
        """
        if self._profile is None:
            raise RlhpcError(
                f"stop_profile: {self.group_name}-{self.rank} records no profile; call start_profile first"
            )
        (profiler, step), self._profile = self._profile, None
        profiler.stop()
        self._profile_folder.mkdir(parents=True, exist_ok=True)
        path = self._profile_folder / f"{self.group_name}-{self.rank}.step-{step}.json"
        profiler.export_chrome_trace(str(path))
        return str(path)


def _profile_folder(worker_spec: WorkerSpec | None) -> Path:
    """Returns the folder of a rank's profiles.

    A session without a run folder removes its logs when it ends, so its profiles are written to the working directory.
    """
    logs = Path(worker_spec.log_err).parent if worker_spec is not None else None
    if logs is None or (worker_spec is not None and logs.is_relative_to(Scratch(worker_spec.token).sockets)):
        return Path(os.getcwd()) / "profiles"
    return logs / "profiles"
