"""Time in which a process was stopped, as by `scontrol suspend`, is not time in which it trained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from rlhpc.metrics.logger import ProgressBar
from rlhpc.metrics.phase_times import ActiveClock, active_s, phase_columns


class Source:
    now, processor = 100.0, 7.0

    def __call__(self) -> float:
        return self.now


def test_a_gap_in_which_nothing_was_computed_is_left_out() -> None:
    source = Source()
    clock = ActiveClock(1.0, 10.0, source, lambda: source.processor)
    begin = clock()
    for seconds, processor in ((1.0, 0.5), (9.0, 0.0), (60.0, 0.0), (1.0, 0.0), (60.0, 58.0), (3600.0, 0.01)):
        source.now, source.processor = source.now + seconds, source.processor + processor
        clock()
    # a busy machine (9 s) and a call that kept the other threads out (60 s) count; of each stop, one look
    assert clock() - begin == 1.0 + 9.0 + 1.0 + 1.0 + 60.0 + 1.0


def test_an_estimate_leaves_the_stop_out() -> None:
    source = Source()
    clock = ActiveClock(1.0, 10.0, source, lambda: source.processor)
    with open(os.devnull, "w") as nowhere, ProgressBar(100, stream=nowhere, clock=clock) as bar:
        for step in range(1, 11):
            source.now += 2.0
            bar.update(step)
        assert bar.eta_s() == 180.0
        source.now += 3600.0
        assert bar.eta_s() == 180.0 + 9.0  # of the stop, one look


STOPPED = """
import sys, time
from rlhpc.metrics.phase_times import ActiveClock
clock = ActiveClock(0.05, 1.0).start()
began, active = time.perf_counter(), clock()
print("ready", flush=True)
sys.stdin.readline()
print(time.perf_counter() - began, clock() - active)
"""


def test_a_process_that_was_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    child.send_signal(signal.SIGCONT)
    passed, active = map(float, child.communicate("\n")[0].split())
    assert passed - active > 2.0


def test_a_fork_has_a_clock_of_its_own() -> None:
    active_s()
    readable, writable = os.pipe()
    if os.fork() == 0:
        import threading

        active_s()
        os.write(writable, ",".join(thread.name for thread in threading.enumerate()).encode())
        os._exit(0)
    assert b"rlhpc-active-time" in os.read(readable, 1000)
    os.wait()


def test_rates_and_stages_are_no_phases() -> None:
    stages = {"time/generate_s": 0.9, "time/train_s": 0.8, "time/score_s": 0.7}  # inside the phases, and side by side
    rows = [{"step": 1, "time/step_s": 1.0, "time/rollout_s": 1.0, "time/tokens_per_s": 9.0, **stages}]
    assert phase_columns(rows) == {"rollout": [1.0]}
