"""Judges many samples at once, in processes that can be ended."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.language.rewards.base import Reward, Sample, SaysInline
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
"""Longest time that a judge may take to build its rewards."""
_MOST_FAILED_STARTS = 3
_SERVER = "from rlhpc.language.rewards.pool_server import main; main()"


@dataclass(frozen=True)
class Scored:
    """What became of a sample.

    Attributes:
        total: The weighted sum of the terms, or `reward.failed`.
        terms: By name, unweighted; a term that failed has `reward.failed`.
        failed: Whether a judge raised, hung or died.
        reason: Why it failed.
    """

    total: float
    terms: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Term:
    """One term of the reward: `factory` is a class or a function of a sample."""

    name: str
    factory: Callable[..., Any]
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def inline(self) -> bool:
        """Whether the term is so cheap and harmless that no process is needed."""
        inline = self.factory.inline if isinstance(self.factory, SaysInline) else False
        return bool(inline(**self.kwargs) if callable(inline) else inline)


@dataclass
class _Judge:
    number: int
    socket: socket.socket
    deadline: float
    ready: bool = False
    ticket: int | None = None


class RewardPool:
    """Judges samples by a weighted sum of rewards. Not thread-safe: one thread calls it.

    Args:
        terms: What is summed up.
        timeout_s: Wall time of one sample.
        failed: Total of a sample whose judge raised, hung or died.
        processes: Judges, each of which judges one sample at a time. None is started where all terms are inline.

    Raises:
        ConfigError: A reward cannot be built.
    """

    def __init__(
        self, terms: Sequence[Term], *, timeout_s: float = 10.0, failed: float = 0.0, processes: int = 1
    ) -> None:
        self.timeout_s, self.failed, self.processes = timeout_s, failed, processes
        self._weights = {term.name: term.weight for term in terms}
        self._inline: dict[str, Reward] = {
            term.name: build_reward(term.name, term.factory, term.kwargs) for term in terms if term.inline
        }
        self._remote = [term for term in terms if not term.inline]
        self._queue: collections.deque[int] = collections.deque()
        self._waiting: dict[int, tuple[Hashable, Sample]] = {}
        self._done: list[tuple[Any, Scored]] = []
        self._ticket = self._number = self._failed_starts = 0
        self._counts = collections.Counter[str]()
        self._told = 0
        self._judges: dict[int, _Judge] = {}
        self._selector = selectors.DefaultSelector()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        if self._remote:
            import cloudpickle

            # By value where they have no module that the server could import.
            spec = [(term.name, term.factory, term.kwargs) for term in self._remote]
            self._spec = cloudpickle.dumps(spec)
            try:
                self._start_server()
                self._await_first()
            except BaseException:
                self.close()
                raise

    def submit(self, sample_id: Hashable, sample: Sample) -> None:
        """Queues a sample; `poll` gives its verdict back under `sample_id`."""
        self._ticket += 1
        self._waiting[self._ticket] = (sample_id, sample)
        if self._remote:
            self._queue.append(self._ticket)
            self._feed()
        else:
            self._finish(self._ticket, {}, "")

    def poll(self, timeout_s: float = 0.0) -> list[tuple[Any, Scored]]:
        """Verdicts since the last call, in any order; ends judges that are over their time.

        Args:
            timeout_s: How long to wait for the first one; 0 does not wait.
        """
        until = time.monotonic() + timeout_s
        while True:
            self._attend(0.0 if self._done else max(0.0, min(until, self._next_deadline()) - time.monotonic()))
            if self._done or time.monotonic() >= until or not self._waiting:
                break
        done, self._done = self._done, []
        return done

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Judges them all; in their order. Samples under way from `submit` keep their place."""
        mine = {object(): i for i in range(len(samples))}
        for key, sample in zip(mine, samples, strict=True):
            self.submit(key, sample)
        found: dict[int, Scored] = {}
        others = []
        while len(found) < len(mine):
            for key, scored in self.poll(1.0):
                if key in mine:
                    found[mine[key]] = scored
                else:
                    others.append((key, scored))
        self._done = others + self._done
        return [found[i] for i in range(len(samples))]

    def unfinished(self) -> int:
        """Samples submitted whose verdict `poll` has not given back."""
        return len(self._waiting) + len(self._done)

    def drain(self) -> None:
        """Forgets all samples under way."""
        self._queue.clear()
        self._waiting.clear()
        self._done.clear()

    def metrics(self) -> dict[str, float]:
        """Counts since the last call: `scored`, `failed`, and of these `timeouts`, `died` and `raised`."""
        counts, self._counts = self._counts, collections.Counter()
        return {name: float(counts[name]) for name in ("scored", "failed", "timeouts", "died", "raised")}

    def close(self) -> None:
        """Ends the judges; waits until they are gone."""
        self.drain()
        for one in list(self._judges.values()):
            self._forget(one)
        if self._control is not None:
            self._control.close()  # the server reads end-of-file, and ends what it started
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._selector.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- judges

    def _start_server(self) -> None:
        control, theirs = socket.socketpair()
        self._folder = str(make_temporary_folder("judges"))
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno()), str(os.getpid()), self._folder],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()
        self._control = control
        pickle_stream.send(control, self._spec)
        control.settimeout(_START_S)
        told = pickle_stream.receive(control)
        if told is None or "failed" in told:
            why = f"{told['failed']}" if told else f"the judges' server ended, or did not start within {_START_S:g} s"
            raise ConfigError(f"reward.terms: {why}")
        control.settimeout(5.0)
        for _ in range(self.processes):
            self._start_judge()

    def _start_judge(self) -> None:
        assert self._control is not None
        self._number += 1
        ours, theirs = socket.socketpair()
        ours.settimeout(5.0)  # a judge that stops in the middle of a message is as good as dead
        one = _Judge(self._number, ours, time.monotonic() + _START_S)
        try:
            pickle_stream.send(self._control, {"op": "start", "judge": one.number})
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        except OSError:
            ours.close()
            self._restart()
            return
        finally:
            theirs.close()
        self._judges[one.number] = one
        self._selector.register(ours, selectors.EVENT_READ, one)

    def _restart(self) -> None:
        """Starts the server again after it was killed; its judges are gone with it."""
        self._failed_starts += 1
        if self._failed_starts > _MOST_FAILED_STARTS:
            raise RlhpcError(f"the judges' server ended {self._failed_starts} times in a row; see its output above")
        log.warning("the judges' server is gone; starting another")
        tickets = [one.ticket for one in self._judges.values() if one.ticket is not None]
        for one in list(self._judges.values()):
            self._forget(one)
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # it could not do that itself
        for ticket in tickets:
            self._fail(ticket, "died", "the judge died")
        self._start_server()

    def _forget(self, one: _Judge) -> None:
        self._judges.pop(one.number, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one.socket)
        one.socket.close()

    def _replace(self, one: _Judge, kind: str, reason: str) -> None:
        assert self._control is not None
        self._forget(one)
        with contextlib.suppress(OSError):
            pickle_stream.send(self._control, {"op": "kill", "judge": one.number})
        if one.ticket is not None:
            self._fail(one.ticket, kind, reason)
        if not one.ready:
            self._failed_starts += 1
            if self._failed_starts > _MOST_FAILED_STARTS:
                raise RlhpcError(f"a judge could not be started {self._failed_starts} times in a row: {reason}")
        self._start_judge()

    def _await_first(self) -> None:
        while not any(one.ready for one in self._judges.values()):
            self._attend(1.0)

    def _next_deadline(self) -> float:
        return min(
            (one.deadline for one in self._judges.values() if one.ticket is not None or not one.ready), default=1e300
        )

    def _attend(self, timeout_s: float) -> None:
        """Takes in what judges say, ends those over their time, hands out samples."""
        if not self._remote:
            return
        for key, _ in self._selector.select(timeout_s):
            one: _Judge = key.data
            if one.number in self._judges:
                self._heard(one)
        now = time.monotonic()
        for one in [one for one in self._judges.values() if now >= one.deadline]:
            if one.ticket is not None:
                self._replace(one, "timeouts", f"the judge took longer than reward.timeout_s ({self.timeout_s:g} s)")
            elif not one.ready:
                self._replace(one, "died", f"it built no rewards within {_START_S:g} s")
        self._feed()

    def _heard(self, one: _Judge) -> None:
        said = pickle_stream.receive(one.socket)
        if said is None:
            self._replace(one, "died", "the judge died")
        elif "failed" in said:
            if said["config"]:
                raise ConfigError(said["failed"])
            raise RlhpcError(f"reward.terms: a reward could not be built:\n{said['failed']}")
        elif "ready" in said:
            one.ready, one.deadline, self._failed_starts = True, 1e300, 0
        else:
            ticket, one.ticket, one.deadline = said["ticket"], None, 1e300
            self._finish(ticket, *said["verdict"])

    def _feed(self) -> None:
        for one in list(self._judges.values()):
            while self._queue and one.ready and one.ticket is None:
                ticket = self._queue.popleft()
                if ticket not in self._waiting:
                    continue
                one.ticket, one.deadline = ticket, time.monotonic() + self.timeout_s
                try:
                    pickle_stream.send(one.socket, (ticket, self._waiting[ticket][1]))
                except OSError:
                    one.ticket = None
                    self._queue.appendleft(ticket)
                    break  # it is gone; its socket says so when it is read

    # -- verdicts

    def _finish(self, ticket: int, values: dict[str, float], errors: str) -> None:
        if ticket not in self._waiting:
            return
        sample_id, sample = self._waiting.pop(ticket)
        found, more = judge(self._inline, sample)
        values, errors = values | found, "; ".join(part for part in (errors, more) if part)
        terms = {name: values.get(name, self.failed) for name in self._weights}
        self._counts["scored"] += 1
        if errors:
            self._counts["failed"] += 1
            self._counts["raised"] += 1
            self._tell(errors)
            self._done.append((sample_id, Scored(self.failed, terms, True, errors)))
        else:
            total = sum(weight * terms[name] for name, weight in self._weights.items())
            self._done.append((sample_id, Scored(total, terms)))

    def _fail(self, ticket: int, kind: str, reason: str) -> None:
        if ticket not in self._waiting:
            return
        sample_id, sample = self._waiting.pop(ticket)
        values, _ = judge(self._inline, sample)
        self._counts.update(("scored", "failed", kind))
        self._tell(reason)
        terms = {name: values.get(name, self.failed) for name in self._weights}
        self._done.append((sample_id, Scored(self.failed, terms, True, reason)))

    def _tell(self, reason: str) -> None:
        self._told += 1
        if self._told <= 3 or self._told % 1000 == 0:
            log.warning("a sample could not be judged (number %d of these): %s", self._told, reason)


def make_reward(cfg: RewardConfig, terms: Sequence[RewardTermConfig] | None = None) -> RewardPool:
    """Builds what section `reward` describes.

    Args:
        cfg: The section.
        terms: Only these of its terms.

    Raises:
        ConfigError: There are no terms, or one is unknown or cannot be built.
    """
    return RewardPool(find_terms(cfg, terms), timeout_s=cfg.timeout_s, failed=cfg.failed, processes=cfg.processes)


def build_inline(terms: Sequence[Term]) -> None:
    """Builds the terms that need no process of their own.

    Raises:
        ConfigError: One does not accept its arguments.
    """
    for term in terms:
        if term.inline:
            build_reward(term.name, term.factory, term.kwargs)


def find_terms(cfg: RewardConfig, terms: Sequence[RewardTermConfig] | None = None) -> list[Term]:
    """Returns the terms of section `reward`, or only these of them, with checked arguments; starts and builds nothing.

    Raises:
        ConfigError: There are no terms, one is unknown or does not take its arguments, or a number is out of range.
    """
    given_terms = cfg.terms if terms is None else terms
    if not given_terms:
        raise ConfigError("reward.terms is empty; it needs at least one term, such as [{name: math}]")
    for key, value, most in (("timeout_s", cfg.timeout_s, 0), ("processes", cfg.processes, 0)):
        if value <= most:
            raise ConfigError(f"reward.{key} is {value}; it must be above {most}")
    made: list[Term] = []
    for given in given_terms:
        name, kwargs = given.name, _plain(given.kwargs)
        factory = REWARDS.find(name)
        check_arguments(name, factory, kwargs)
        taken = [term.name for term in made]
        unique = next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}#{i}") not in taken)
        made.append(Term(unique, factory, given.weight, kwargs))
    return made


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else dict(kwargs)
    return {str(name): value for name, value in found.items()}
