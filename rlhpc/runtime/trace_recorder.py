"""Recorder of this process's trace: spans, flows and counters, which a thread appends to the rank's file.

Recording is off until the driver asks for the trace of a step (`trace_control`). A span then costs less than a microsecond: a
tuple is appended to a queue, and the recorder's thread encodes it later. The queue and the file are bounded; what does not fit
is counted in the file. An error of the recorder, such as a full disk, is logged once and never reaches the training.

The file has one JSON object per line. The first line of each recording is its header; the other lines have the keys `packed`
(spans), `messages` (of mailboxes), `flows`, `counters`, `clock`, `wall` and `dropped`. A packed table has `kinds`, each of
which ends with the times of its rows: start, relative to the table's `base_ns`, and length of each, in nanoseconds.

All times are of the monotonic clock, which no one can set and which all processes of a host share. In the file they are
nanoseconds since the epoch: the header's `anchor_ns`, which the process reads once, has been added. `wall` has pairs of such a
time and of the wall clock at that time, which say how the wall clock moved while the trace was recorded.
`rlhpc.tracing.read` reads the file.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

log = logging.getLogger(__name__)
_clock_ns = time.monotonic_ns

#: Maximum number of spans, and of flows, that wait for the recorder's thread.
_MAX_WAITING = 200_000
#: Maximum bytes of a rank's file; recording continues in memory, and the file's last line counts what is dropped.
_MAX_FILE_BYTES = 1 << 30
#: Seconds between two lines of the file, between two samples of the counters, and between two samples of the clock.
_WRITE_S, _SAMPLE_S, _CLOCK_S = 1.0, 0.25, 2.0
#: Number of clock samples at the start and at the end of a recording; the one with the shortest round trip counts.
_BURST = 8
#: Maximum number of spans in a line.
_LINE_SPANS = 5_000

#: Times of a request for the driver's clock: sent here, received there, answered there, received here; by `Recorder.now_ns`.
ClockSample = tuple[int, int, int, int]


class _ThreadName(threading.local):
    """Name of the current thread, as an attribute that is fast to read."""

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.name = "main" if thread is threading.main_thread() else thread.name


_thread = _ThreadName()


def _find_no_loop(*_: Any) -> None:
    return None


class _NoSpan:
    """Span that records nothing. Its methods are built-in functions, which cost less than Python's own."""

    __slots__ = ()

    #: Takes any arguments and returns "", so that exceptions of the block pass.
    __exit__: Callable[..., Any] = "".format

    def __enter__(self) -> _NoSpan:
        return self

    def add(self, **args: Any) -> None:
        """Does nothing."""


NO_SPAN = _NoSpan()
#: `getattr(module, "NO_SPAN")`, whether it is called with the span, as `contextlib.ExitStack` does, or without.
_NoSpan.__enter__ = functools.partial(getattr, sys.modules[__name__], "NO_SPAN")  # type: ignore[method-assign]


class _Span:
    """Span that is recorded when its block ends; afterwards, the row of the queue.

    `span` sets name, category and arguments: a span costs a fifth less without an `__init__`.
    """

    __slots__ = ("args", "category", "end_ns", "name", "start_ns", "thread")
    name: str
    category: str
    args: dict[str, Any] | None
    start_ns: int
    end_ns: int
    thread: str

    def __enter__(self) -> _Span:
        self.start_ns = _clock_ns()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ns = _clock_ns()
        if error_type is not None:
            self.add(error=error_type.__name__)
        loop = recorder.running_loop()
        self.thread = _thread.name if loop is None else _find_task_name(loop)
        rows = recorder.spans
        if len(rows) < _MAX_WAITING and recorder.is_on:
            rows.append(self)
        else:
            _queue_span(self)

    def add(self, **args: Any) -> None:
        """Adds arguments that are known only inside the block."""
        self.args = {**(self.args or {}), **args}


_new_span = cast(Callable[[], _Span], functools.partial(object.__new__, _Span))


def _queue_span(new_span: _Span) -> None:
    """Queues a span, or counts it as dropped; if the recording has ended, wakes the recorder's thread."""
    if len(recorder.spans) >= _MAX_WAITING:
        recorder.num_dropped += 1
        return
    recorder.spans.append(new_span)
    if not recorder.is_on:
        recorder._wake_event.set()


def _find_task_name(loop: Any) -> str:
    """Returns the name of the current thread and asyncio task, e.g. `main/Task-3`."""
    task = recorder.current_task(loop)
    return _thread.name if task is None else f"{_thread.name}/{task.get_name()}"


class Recorder:
    """Recorder of a process. The process has one, `recorder`.

    Attributes:
        is_on: Whether spans are recorded now. Code whose arguments are costly to build checks this first.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.running_loop: Callable[[], Any] = _find_no_loop
        self.current_task: Callable[[Any], Any] = _find_no_loop
        self.spans: collections.deque[_Span] = collections.deque()
        self.flows: collections.deque[tuple[Any, ...]] = collections.deque()
        #: Name, source, and nanoseconds of departure and arrival of messages whose receiver knows all of these.
        self.messages: collections.deque[tuple[str, str, int, int]] = collections.deque()
        #: Ids of messages. Each process draws its first one when it starts to record, because forks share earlier numbers.
        self.flow_ids: Iterator[int] = iter(())
        self.num_dropped = 0
        self.gauges: dict[str, tuple[str, Callable[[], float | None]]] = {}
        self._counters: list[tuple[str, str, int, float]] = []
        self._clock: list[ClockSample] = []
        self._wall: list[tuple[int, int]] = []
        self._anchor_ns = 0
        self._sample_clock: Callable[[], ClockSample] | None = None
        self._path, self._header = "", dict[str, Any]()
        self._header_is_due = self._has_failed = self._has_warned = self._is_registered = False
        self._wake_event, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, path: str, header: dict[str, Any], sample_clock: Callable[[], ClockSample] | None = None) -> None:
        """Starts to record; does nothing but continue if this process records already.

        Args:
            path: File of this rank; it is created, or lines are appended.
            header: Identity of the rank: group, rank, host, host_id and pid.
            sample_clock: Returns a sample of the driver's clock; None if this process has the driver's clock.
        """
        if self.is_on:
            return
        import asyncio

        self.running_loop, self.current_task = asyncio._get_running_loop, asyncio.current_task
        self.flow_ids = itertools.count(secrets.randbits(40) << 22)
        with self._lock:
            self._path, self._header, self._sample_clock = path, header, sample_clock
            self._header_is_due = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="rlhpc-trace", daemon=True)
                self._thread.start()
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self.stop, flush=True)
        self.is_on = True
        self._wake_event.set()

    def stop(self, *, flush: bool = False) -> None:
        """Ends the recording; spans that are open now are still recorded when they end.

        Args:
            flush: Write what has been recorded before the return, because the process is about to end.
        """
        was_on, self.is_on = self.is_on, False
        if was_on:
            self._sample_wall()
        self._wake_event.set()
        if flush and self._path and (was_on or self.spans or self.flows or self.messages):
            self._write()

    def reset(self) -> None:
        """Ends the recording without writing anything: in a forked child, the records are the parent's."""
        gauges, is_registered = self.gauges, self._is_registered
        self.__init__()  # type: ignore[misc]
        self.gauges, self._is_registered = gauges, is_registered

    def now_ns(self) -> int:
        """Returns the time of this process's traces, in nanoseconds since the epoch. It runs on if the wall clock is set."""
        if not self._anchor_ns:
            self._anchor_ns = _read_anchor()
        return _clock_ns() + self._anchor_ns

    def add_message(self, name: str, source_rank: str, sent_ns: int, arrived_ns: int) -> None:
        """Adds a message that carries the time of its departure on the clock of this host.

        Args:
            name: Name of the message.
            source_rank: Sender's track, e.g. `env-0`.
            sent_ns, arrived_ns: Departure and arrival by `time.monotonic_ns`.
        """
        if len(self.messages) < _MAX_WAITING:
            self.messages.append((name, source_rank, sent_ns, arrived_ns))
        else:
            self.num_dropped += 1

    # -- the recorder's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        written_at, clock_sampled, was_on = 0.0, 0.0, False
        while True:
            if self.is_on:
                self._wake_event.wait(_SAMPLE_S)
            else:
                self._wake_event.wait()
            if self._thread is not threading.current_thread():
                return  # `reset` was called, and a later recording has another thread
            self._wake_event.clear()
            try:
                now = time.monotonic()
                if self.is_on:
                    self._sample_gauges()
                if self._header_is_due or was_on != self.is_on:
                    clock_sampled, was_on = now, self.is_on
                    self._sample_clocks(_BURST)
                elif self.is_on and now - clock_sampled >= _CLOCK_S:
                    clock_sampled = now
                    self._sample_clocks(1)
                if now - written_at >= _WRITE_S or not self.is_on:
                    written_at = now
                    self._write()
            except Exception as error:  # the training must not notice
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("the trace of this rank is incomplete: %s (%s)", error, self._path)

    def _sample_gauges(self) -> None:
        for name, (gauge_unit, read_gauge) in [*_PROCESS_GAUGES.items(), *self.gauges.items()]:
            with contextlib.suppress(Exception):
                if (gauge_value := read_gauge()) is not None:
                    self._counters.append((name, gauge_unit, self.now_ns(), float(gauge_value)))

    def _sample_wall(self) -> None:
        now_ns, anchor_ns = self.now_ns(), _read_anchor()
        self._wall.append((now_ns, now_ns - self._anchor_ns + anchor_ns))

    def _sample_clocks(self, num_samples: int) -> None:
        self._sample_wall()
        for _ in range(num_samples if self._sample_clock is not None else 0):
            assert self._sample_clock is not None
            with contextlib.suppress(Exception):  # the driver is busy, or has ended
                self._clock.append(self._sample_clock())

    def _write(self) -> None:
        with self._lock:
            if not self._path:
                return  # `reset` was called in the meantime
            lines = []
            if self._header_is_due:
                self._header_is_due = False
                times = {"started_ns": self.now_ns(), "anchor_ns": self._anchor_ns}
                lines.append({"rlhpc_trace": 1, **times, **self._header})
            anchor_ns = self._anchor_ns
            while True:
                line_content: dict[str, Any] = {
                    "packed": _pack_spans(_take(self.spans), anchor_ns),
                    "messages": _pack_messages(_take(self.messages), anchor_ns),
                    "flows": [(*ends, time_ns + anchor_ns, name) for *ends, time_ns, name in _take(self.flows)],
                }
                line_content["counters"], self._counters = self._counters, []
                line_content["clock"], self._clock = self._clock, []
                line_content["wall"], self._wall = self._wall, []
                line_content["dropped"], self.num_dropped = self.num_dropped, 0
                if not any(line_content.values()):
                    break
                lines.append({key: field_value for key, field_value in line_content.items() if field_value})
            if lines:
                self._append(lines)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        encoded_rows = b"".join(
            json.dumps(line, separators=(",", ":"), default=_to_plain).encode(errors="replace") + b"\n"
            for line in lines
        )
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self._path, flags, 0o644)
            try:
                num_written = os.fstat(fd).st_size
                if num_written + len(encoded_rows) > _MAX_FILE_BYTES:
                    raise OSError(f"the file would be larger than {_MAX_FILE_BYTES >> 20} MiB")
                if self._has_failed and num_written:  # ends the part of a line that was written before
                    encoded_rows = b"\n" + encoded_rows
                remaining_bytes = memoryview(encoded_rows)
                while remaining_bytes:
                    remaining_bytes = remaining_bytes[os.write(fd, remaining_bytes) :]
            finally:
                os.close(fd)
            self._has_failed = False
        except OSError as error:
            self._has_failed = True
            self._header_is_due = self._header_is_due or any("rlhpc_trace" in line for line in lines)
            spans = (
                len(packed_kind[-1]) // 2 for line in lines for packed_kind in line.get("packed", {}).get("kinds", ())
            )
            self.num_dropped += sum(spans) + sum(line.get("dropped", 0) for line in lines)
            self._warn(error)


def _take(rows: collections.deque[_T]) -> list[_T]:
    """Removes and returns the oldest rows; other threads may append at the same time."""
    return [rows.popleft() for _ in range(min(len(rows), _LINE_SPANS))]


def _read_anchor() -> int:
    """Returns the wall clock minus the monotonic clock, from the shortest of some readings."""
    readings = []
    for _ in range(_BURST):
        before_ns, wall_ns, after_ns = _clock_ns(), time.time_ns(), _clock_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


def _pack_spans(spans: Sequence[_Span], anchor_ns: int) -> dict[str, Any]:
    """Returns spans as a packed table, whose kinds are name, category, thread and arguments; {} without spans.

    A loop's spans differ in their times only: as two numbers each, they take half the time to encode and a fifth of the bytes.
    """
    if not spans:
        return {}
    base_ns, packed_kinds = spans[0].start_ns, list[tuple[Any, ...]]()
    latest_spans = dict[tuple[str, str, str], tuple[Any, list[int]]]()
    for span in spans:
        args = span.args
        key = (span.name, span.category, span.thread)
        packed_kind = latest_spans.get(key)
        if packed_kind is None or (args is not packed_kind[0] and not _are_equal(args, packed_kind[0])):
            packed_kind = latest_spans[key] = args, []
            packed_kinds.append((*key, *packed_kind))
        add = packed_kind[1].append
        add(span.start_ns - base_ns)
        add(span.end_ns - span.start_ns)
    return {"base_ns": base_ns + anchor_ns, "kinds": packed_kinds}


def _are_equal(args: Any, other_args: Any) -> bool:
    try:
        return bool(args == other_args)
    except Exception:  # arrays, whose comparison is an array
        return False


def _pack_messages(messages: Sequence[tuple[str, str, int, int]], anchor_ns: int) -> dict[str, Any]:
    """Returns messages as a packed table, whose kinds are name and source's track name; {} without messages."""
    if not messages:
        return {}
    base_ns, times = messages[0][2], dict[tuple[str, str], list[int]]()
    for name, source_rank, sent_ns, arrived_ns in messages:
        times.setdefault((name, source_rank), []).extend((sent_ns - base_ns, arrived_ns - sent_ns))
    kinds = [(*message_kind, rows) for message_kind, rows in times.items()]
    return {"base_ns": base_ns + anchor_ns, "kinds": kinds}


def _to_plain(arg_value: Any) -> Any:
    """Returns a JSON value for an argument: a number for a scalar of an array library, otherwise text."""
    with contextlib.suppress(Exception):
        return arg_value.item()
    return str(arg_value)[:200]


recorder = Recorder()
os.register_at_fork(after_in_child=recorder.reset)


def span(name: str, category: str, **args: Any) -> _Span | _NoSpan:
    """Returns a context manager that records its block as a span; while recording is off, it does nothing.

    Args:
        name: Name of the work, e.g. a method's name, or a channel's name for a wait.
        category: One of `rlhpc.tracing.model.CATEGORIES`.
        args: Details as JSON values, e.g. tokens, batch or bytes.
    """
    if not recorder.is_on:
        return NO_SPAN
    new_span = _new_span()
    new_span.name, new_span.category, new_span.args = name, category, args
    return new_span


def record(
    name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None, lane: str = ""
) -> None:
    """Records a span with known times.

    Args:
        name, category, args: See `span`.
        start_ns, end_ns: Start and end by `time.monotonic_ns`.
        lane: Name of what the span belongs to, if it is not the current thread or asyncio task: `episodes/7` is one of many
            that run at the same time, and share lanes in the trace.
    """
    new_span = _new_span()
    new_span.name, new_span.category, new_span.args, new_span.start_ns, new_span.end_ns = (
        name,
        category,
        args,
        start_ns,
        end_ns,
    )
    loop = recorder.running_loop()
    new_span.thread = lane or (_thread.name if loop is None else _find_task_name(loop))
    _queue_span(new_span)


def traced(name: str, category: str) -> Callable[[_F], _F]:
    """Decorates a function, so that each of its calls is a span."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with span(name, category):
                return function(*args, **kwargs)

        return cast(_F, call)

    return decorate


class IdleSpan:
    """Span of a wait in a loop that checks for work: from the first check without work to the next one with work.

    Args:
        name: Name of what is waited for.
    """

    def __init__(self, name: str) -> None:
        self._name, self._started_ns = name, 0

    def begin(self) -> None:
        """Begins the span, unless it has begun."""
        if recorder.is_on and not self._started_ns:
            self._started_ns = _clock_ns()

    def end(self) -> None:
        """Ends the span, if it has begun."""
        if self._started_ns:
            record(self._name, "wait", self._started_ns, _clock_ns())
            self._started_ns = 0


def new_flow(name: str) -> int:
    """Adds the departure of a message to the trace; returns the id of the message, which travels with it."""
    flow_id = next(recorder.flow_ids)
    mark_flow(name, flow_id, is_target=False)
    return flow_id


def mark_flow(name: str, flow_id: int, *, is_target: bool) -> None:
    """Adds the departure of a message to the trace or, with `is_target`, its arrival."""
    if len(recorder.flows) < _MAX_WAITING:
        recorder.flows.append((flow_id, int(is_target), _clock_ns(), name))
    else:
        recorder.num_dropped += 1


def add_gauge(name: str, gauge_unit: str, read_gauge: Callable[[], float | None]) -> None:
    """Registers a counter that is sampled while this process records.

    Args:
        name: Name of the counter, e.g. `KV cache`.
        gauge_unit: Unit of its values, e.g. `B` or `%`.
        read_gauge: Returns the current value, or None if there is none now; called on the recorder's thread.
    """
    recorder.gauges[name] = (gauge_unit, read_gauge)


def _read_resident_bytes() -> float:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))


def process_usage() -> tuple[float, float | None, float | None]:
    """Returns the resident bytes of this process, the bytes of its accelerator that torch has allocated, and the accelerator's
    utilisation in percent by all of its processes; None for what cannot be read, as without an accelerator.
    """
    try:
        return _read_resident_bytes(), _read_accelerator_bytes(), _read_utilisation()
    except Exception:  # another thread is importing torch
        return _read_resident_bytes(), None, None


def _find_accelerator() -> Any:
    """Returns torch's module of the accelerator that this process computes on; None if it computes on the CPU."""
    torch = sys.modules.get("torch")
    device = None if torch is None else torch.accelerator.current_accelerator()
    if torch is None or device is None:
        return None
    module = torch.get_device_module(device)
    return module if module.is_initialized() else None


def _read_accelerator_bytes() -> float | None:
    """Returns the bytes of the accelerator that torch has allocated; None if there is no accelerator."""
    module = _find_accelerator()
    return None if module is None else float(module.memory_allocated())


class _Utilisation:
    """Reader of the accelerator's utilisation, which torch gets from NVML. A call returns None if the library or the driver is
    missing.
    """

    def __init__(self) -> None:
        self._is_missing = False

    def __call__(self) -> float | None:
        module = None if self._is_missing else _find_accelerator()
        if module is None:
            return None
        try:
            return float(module.utilization())
        except Exception:  # no library, no driver, or a part of a device
            self._is_missing = True
            return None


_read_utilisation = _Utilisation()
_PROCESS_GAUGES: dict[str, tuple[str, Callable[[], float | None]]] = {
    "memory": ("B", _read_resident_bytes),
    "GPU memory": ("B", _read_accelerator_bytes),
    "GPU utilisation": ("%", _read_utilisation),
}
