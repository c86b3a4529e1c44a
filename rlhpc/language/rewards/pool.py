"""Reward pool: concurrent scoring of samples in processes that can be killed."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.config.typed import plain
from rlhpc.language.rewards.base import DeclaresInline, Reward, Sample
from rlhpc.language.rewards.pool_server import judge
from rlhpc.language.rewards.registry import REWARDS, build_reward, check_arguments
from rlhpc.runtime import pickle_stream
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.imports import python_path
from rlhpc.runtime.scratch import make_temporary_folder

if TYPE_CHECKING:
    from rlhpc.language.config.rewards import RewardConfig, RewardTermConfig

log = logging.getLogger(__name__)
_START_S = 120.0
"""Maximum time in seconds in which a judge process builds its rewards."""
_MAX_FAILED_STARTS = 3
_SERVER = "from rlhpc.language.rewards.pool_server import main; main()"


@dataclass(frozen=True)
class Scored:
    """Score of a sample.

    Attributes:
        total: Weighted sum of the terms; `reward.failed` if a term failed.
        terms: Unweighted values of the terms by name; `reward.failed` for a term that failed.
        failed: Whether a reward function raised or hung, or its process died.
        reason: Reason for the failure; "" if there is no failure.
    """

    total: float
    terms: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Term:
    """Term of the reward. `factory` is a reward class, or a function of a sample."""

    name: str
    factory: Callable[..., Any]
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def inline(self) -> bool:
        """True if the term is cheap and safe enough to run in this process."""
        inline = isinstance(self.factory, DeclaresInline) and self.factory.inline
        return bool(inline(**self.kwargs) if callable(inline) else inline)


@dataclass
class _Judge:
    number: int
    socket: socket.socket
    deadline: float
    ready: bool = False
    ticket: int | None = None


class RewardPool:
    """Pool of processes that score samples by a weighted sum of rewards. The pool is not thread-safe.

    Args:
        terms: Terms of the sum.
        timeout_s: Maximum time in seconds in which a sample is scored.
        failed: Total score of a sample if a reward function raised or hung, or its process died.
        processes: Number of judge processes; each scores one sample at a time. Ignored if all terms are inline.

    Raises:
        ConfigError: A reward cannot be built.
    """

    def __init__(
        self, terms: Sequence[Term], *, timeout_s: float = 10.0, failed: float = 0.0, processes: int = 1
    ) -> None:
        self.timeout_s = timeout_s
        self.failed = failed
        self.processes = processes
        self._weights = {term.name: term.weight for term in terms}
        self._inline: dict[str, Reward] = {
            term.name: build_reward(term.name, term.factory, term.kwargs) for term in terms if term.inline
        }
        self._process_terms = [term for term in terms if not term.inline]
        self._queue: collections.deque[int] = collections.deque()
        self._pending_samples: dict[int, tuple[Hashable, Sample]] = {}
        self._scored_samples: list[tuple[Any, Scored]] = []
        self._ticket = self._number = self._num_failed_starts = 0
        self._counts = collections.Counter[str]()
        self._num_failures = 0
        self._judges: dict[int, _Judge] = {}
        self._selector = selectors.DefaultSelector()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        if self._process_terms:
            import cloudpickle

            # cloudpickle serializes an object by value if the server could not import its module.
            term_specs = [(term.name, term.factory, term.kwargs) for term in self._process_terms]
            self._spec = cloudpickle.dumps(term_specs)
            try:
                self._start_server()
                while not any(judge_process.ready for judge_process in self._judges.values()):
                    self._handle_events(1.0)
            except BaseException:
                self.close()
                raise

    def submit(self, sample_id: Hashable, sample: Sample) -> None:
        """Queues a sample; `poll` returns its score with `sample_id`."""
        self._ticket += 1
        self._pending_samples[self._ticket] = (sample_id, sample)
        if self._process_terms:
            self._queue.append(self._ticket)
            self._send_queued()
        else:
            self._finish_sample(self._ticket, {}, "")

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Any, Scored]]:
        """Returns new scores as (sample id, score), in any order; replaces judge processes that exceed the time limit.

        Args:
            timeout_s: Maximum time in seconds to wait for the first score; 0 to return at once.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            next_deadline = min([deadline, *(judge_process.deadline for judge_process in self._judges.values())])
            self._handle_events(0.0 if self._scored_samples else max(0.0, next_deadline - time.monotonic()))
            if self._scored_samples or time.monotonic() >= deadline or not self._pending_samples:
                break
        scored_samples, self._scored_samples = self._scored_samples, []
        return scored_samples

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores all samples; returns their scores in the same order. Samples queued by `submit` remain queued."""
        indices = {object(): i for i in range(len(samples))}
        for key, sample in zip(indices, samples, strict=True):
            self.submit(key, sample)
        scores: dict[int, Scored] = {}
        other_scores = []
        while len(scores) < len(indices):
            for key, scored_answer in self.poll(1.0):
                if key in indices:
                    scores[indices[key]] = scored_answer
                else:
                    other_scores.append((key, scored_answer))
        self._scored_samples = other_scores + self._scored_samples
        return [scores[i] for i in range(len(samples))]

    def unfinished(self) -> int:
        """Returns the number of submitted samples that `poll` has not yet returned."""
        return len(self._pending_samples) + len(self._scored_samples)

    def drain(self) -> None:
        """Drops all submitted samples."""
        self._queue.clear()
        self._pending_samples.clear()
        self._scored_samples.clear()

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call: `scored`, `failed`, and the failures `timeouts`, `died` and `raised`."""
        event_counts, self._counts = self._counts, collections.Counter()
        return {name: float(event_counts[name]) for name in ("scored", "failed", "timeouts", "died", "raised")}

    def close(self) -> None:
        """Ends the judge processes and their server."""
        self.drain()
        self._end_server(10.0)
        self._selector.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- judges

    def _start_server(self) -> None:
        """Starts the server and its judge processes; waits until the server has imported the rewards."""
        control, server_end = socket.socketpair()
        self._folder = str(make_temporary_folder("judges"))
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER, str(server_end.fileno()), str(os.getpid()), self._folder],
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )
        server_end.close()
        self._control = control
        pickle_stream.send(control, self._spec)
        control.settimeout(_START_S)
        reply = pickle_stream.receive(control)
        if reply is None or "failed" in reply:
            reason = (
                f"{reply['failed']}" if reply else f"the judges' server ended, or did not start within {_START_S:g} s"
            )
            raise ConfigError(f"reward.terms: {reason}")
        control.settimeout(5.0)
        for _ in range(self.processes):
            self._start_judge()

    def _end_server(self, timeout_s: float) -> None:
        """Ends the server and its judges; kills the server if it does not exit in time."""
        for judge_process in list(self._judges.values()):
            self._remove(judge_process)
        if self._control is not None:
            self._control.close()  # the server reads end-of-file, and ends its processes
        if self._server is not None:
            try:
                self._server.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # a killed server has not removed its folder

    def _start_judge(self) -> None:
        """Requests a judge process from the server."""
        assert self._control is not None
        self._number += 1
        pool_end, judge_end = socket.socketpair()
        pool_end.settimeout(5.0)  # a judge that stops within a message counts as dead
        judge_process = _Judge(self._number, pool_end, time.monotonic() + _START_S)
        try:
            pickle_stream.send(self._control, {"op": "start", "judge": judge_process.number})
            socket.send_fds(self._control, [b"f"], [judge_end.fileno()])
        except OSError:
            pool_end.close()
            self._restart()
            return
        finally:
            judge_end.close()
        self._judges[judge_process.number] = judge_process
        self._selector.register(pool_end, selectors.EVENT_READ, judge_process)

    def _restart(self) -> None:
        """Restarts a server that was killed. The judges of the killed server have ended, too."""
        self._num_failed_starts += 1
        if self._num_failed_starts > _MAX_FAILED_STARTS:
            raise RlhpcError(f"the judges' server ended {self._num_failed_starts} times in a row; see its output above")
        log.warning("the judges' server is gone; starting another")
        tickets = [judge_process.ticket for judge_process in self._judges.values() if judge_process.ticket is not None]
        self._end_server(0.0)
        for ticket in tickets:
            self._finish_sample(ticket, {}, "the judge died", "died")
        self._start_server()

    def _remove(self, judge_process: _Judge) -> None:
        self._judges.pop(judge_process.number, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(judge_process.socket)
        judge_process.socket.close()

    def _replace(self, judge_process: _Judge, failure: str, reason: str) -> None:
        """Replaces a judge process that failed; its sample is scored as failed."""
        assert self._control is not None
        self._remove(judge_process)
        with contextlib.suppress(OSError):
            pickle_stream.send(self._control, {"op": "kill", "judge": judge_process.number})
        if judge_process.ticket is not None:
            self._finish_sample(judge_process.ticket, {}, reason, failure)
        if not judge_process.ready:
            self._num_failed_starts += 1
            if self._num_failed_starts > _MAX_FAILED_STARTS:
                raise RlhpcError(f"a judge could not be started {self._num_failed_starts} times in a row: {reason}")
        self._start_judge()

    def _handle_events(self, timeout_s: float) -> None:
        """Receives messages from judges, replaces judges that exceed their time limit, and sends queued samples."""
        if not self._process_terms:
            return
        for key, _ in self._selector.select(timeout_s):
            judge_process: _Judge = key.data
            if judge_process.number in self._judges:
                self._receive_result(judge_process)
        current_time = time.monotonic()
        for judge_process in [candidate for candidate in self._judges.values() if current_time >= candidate.deadline]:
            if judge_process.ready:
                reason = f"the judge took longer than reward.timeout_s ({self.timeout_s:g} s)"
                self._replace(judge_process, "timeouts", reason)
            else:
                self._replace(judge_process, "died", f"it built no rewards within {_START_S:g} s")
        self._send_queued()

    def _receive_result(self, judge_process: _Judge) -> None:
        message = pickle_stream.receive(judge_process.socket)
        if message is None:
            self._replace(judge_process, "died", "the judge died")
        elif "failed" in message:
            if message["config"]:
                raise ConfigError(message["failed"])
            raise RlhpcError(f"reward.terms: a reward could not be built:\n{message['failed']}")
        elif "ready" in message:
            judge_process.ready, judge_process.deadline, self._num_failed_starts = True, math.inf, 0
        else:
            judge_process.ticket, judge_process.deadline = None, math.inf
            self._finish_sample(message["ticket"], *message["verdict"])

    def _send_queued(self) -> None:
        """Sends queued samples to idle judge processes."""
        for judge_process in list(self._judges.values()):
            while self._queue and judge_process.ready and judge_process.ticket is None:
                ticket = self._queue.popleft()
                if ticket not in self._pending_samples:
                    continue
                try:
                    pickle_stream.send(judge_process.socket, (ticket, self._pending_samples[ticket][1]))
                except OSError:
                    self._queue.appendleft(ticket)
                    break  # the judge has ended, which the next read of its socket detects
                judge_process.ticket, judge_process.deadline = ticket, time.monotonic() + self.timeout_s

    # -- verdicts

    def _finish_sample(self, ticket: int, values: dict[str, float], error_text: str, failure: str = "raised") -> None:
        """Computes a sample's inline terms and its total score, and queues the score for `poll`.

        Args:
            ticket: Ticket of the sample.
            values: Values of the remote terms that succeeded.
            error_text: Reasons why remote terms failed; "" if none failed.
            failure: Metric that counts the failure.
        """
        if ticket not in self._pending_samples:
            return
        sample_id, sample = self._pending_samples.pop(ticket)
        inline_values, inline_errors = judge(self._inline, sample)
        values, error_text = values | inline_values, "; ".join(filter(None, (error_text, inline_errors)))
        terms = {name: values.get(name, self.failed) for name in self._weights}
        self._counts["scored"] += 1
        total_score = sum(weight * terms[name] for name, weight in self._weights.items())
        if error_text:
            total_score = self.failed
            self._counts.update(("failed", failure))
            self._log_failure(error_text)
        self._scored_samples.append((sample_id, Scored(total_score, terms, bool(error_text), error_text)))

    def _log_failure(self, reason: str) -> None:
        """Logs the first three failures, then each thousandth failure."""
        self._num_failures += 1
        if self._num_failures <= 3 or self._num_failures % 1000 == 0:
            log.warning("a sample could not be judged (number %d of these): %s", self._num_failures, reason)


def make_reward(cfg: RewardConfig, terms: Sequence[RewardTermConfig] | None = None) -> RewardPool:
    """Builds the reward pool from section `reward`.

    Args:
        cfg: The section.
        terms: Terms to compute; None for all terms of the section.

    Raises:
        ConfigError: There are no terms, or a term is unknown or cannot be built.
    """
    return RewardPool(find_terms(cfg, terms), timeout_s=cfg.timeout_s, failed=cfg.failed, processes=cfg.processes)


def build_inline(terms: Sequence[Term]) -> None:
    """Builds the inline terms once, to check their arguments.

    Raises:
        ConfigError: A term does not accept its arguments.
    """
    for term in terms:
        if term.inline:
            build_reward(term.name, term.factory, term.kwargs)


def find_terms(cfg: RewardConfig, terms: Sequence[RewardTermConfig] | None = None) -> list[Term]:
    """Returns the terms of section `reward`, or only `terms`, with checked arguments. Builds no rewards and starts no
    processes.

    Raises:
        ConfigError: There are no terms, a term is unknown or does not accept its arguments, or a number is out of range.
    """
    term_configs = cfg.terms if terms is None else terms
    if not term_configs:
        raise ConfigError("reward.terms is empty; it needs at least one term, such as [{name: math}]")
    for key in ("timeout_s", "processes"):
        if getattr(cfg, key) <= 0:
            raise ConfigError(f"reward.{key} is {getattr(cfg, key)}; it must be above 0")
    built_terms: list[Term] = []
    for term_config in term_configs:
        name, kwargs = term_config.name, plain(term_config.kwargs)
        factory = REWARDS.find(name)
        check_arguments(name, factory, kwargs)
        used_names = {term.name for term in built_terms}
        unique_name = next(
            n for n in itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2))) if n not in used_names
        )
        built_terms.append(Term(unique_name, factory, term_config.weight, kwargs))
    return built_terms
