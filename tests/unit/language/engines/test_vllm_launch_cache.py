"""Order in which ranks fill vLLM's caches: one first, then all that would compile the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.lease import Lease
from rlhpc.language.engines.vllm_launch import cache_key, compiling_in_order

#: Process that begins to fill the caches, says so, and stays until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from rlhpc.language.engines.vllm_launch import compiling_in_order
with compiling_in_order(Path(sys.argv[1]), "key"):
    print("compiles", flush=True)
    time.sleep(600)
"""


class Model:
    def __init__(self, layers: int) -> None:
        self.layers = layers

    def __repr__(self) -> str:
        return f"Model {self.layers}"


def test_engines_share_a_key_if_they_compile_the_same() -> None:
    arguments: dict[str, Any] = {"model": "a", "dtype": "bfloat16", "seed": 1, "max_num_seqs": 8}
    key = cache_key(arguments, Model(2), "0.32", "H200")
    assert key == cache_key({**dict(reversed(arguments.items())), "seed": 2, "model": "b"}, Model(2), "0.32", "H200")
    others = [
        cache_key({**arguments, "max_num_seqs": 9}, Model(2), "0.32", "H200"),
        cache_key({**arguments, "dtype": "float16"}, Model(2), "0.32", "H200"),
        cache_key(arguments, Model(3), "0.32", "H200"),
        cache_key(arguments, Model(2), "0.33", "H200"),
        cache_key(arguments, Model(2), "0.32", "A100"),
    ]
    assert len({key, *others}) == 6


class Ranks:
    """Threads that fill the caches of a folder, each a rank with a lease of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events, self.lock = folder, list[str](), threading.Lock()

    def say(self, event: str) -> None:
        with self.lock:
            self.events.append(event)

    def start(self, name: str, key: str = "key", *, until: threading.Event, fails: bool = False) -> threading.Thread:
        def run() -> None:
            try:
                with compiling_in_order(self.folder, key):
                    self.say(f"{name} begins")
                    assert until.wait(60)
                    self.say(f"{name} ends")
                    if fails:
                        raise RuntimeError("out of memory")
            except RuntimeError:
                self.say(f"{name} fails")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_compiles_first_and_the_others_after_it(tmp_path: Path) -> None:
    ranks, go, free = Ranks(tmp_path), threading.Event(), threading.Event()
    free.set()
    first = ranks.start("first", until=go)
    wait_until(lambda: ranks.events == ["first begins"])
    threads = [first, *(ranks.start(name, until=free) for name in ("second", "third"))]
    ranks.start("other", "another key", until=free).join(60)
    assert ranks.events == ["first begins", "other begins", "other ends"], "another engine does not wait"
    time.sleep(0.3)
    assert len(ranks.events) == 3, "the others wait"
    go.set()
    for thread in threads:
        thread.join(60)
    assert ranks.events[3] == "first ends"
    assert sorted(ranks.events[4:]) == ["second begins", "second ends", "third begins", "third ends"]
    later = threading.Event()
    pair = [ranks.start(name, until=later) for name in ("a", "b")]
    wait_until(lambda: {"a begins", "b begins"} <= {*ranks.events})  # nobody waits once the caches are filled
    later.set()
    for thread in pair:
        thread.join(60)
    assert not list(tmp_path.rglob("*.lease"))


def test_the_next_takes_the_place_of_one_that_fails(tmp_path: Path) -> None:
    ranks, go = Ranks(tmp_path), threading.Event()
    first = ranks.start("first", until=go, fails=True)
    wait_until(lambda: ranks.events == ["first begins"])
    second = ranks.start("second", until=go)
    go.set()
    first.join(60)
    second.join(60)
    # The lease is free before the first thread has said that it failed.
    of_the_lease = [event for event in ranks.events if event != "first fails"]
    assert (
        of_the_lease == ["first begins", "first ends", "second begins", "second ends"] and "first fails" in ranks.events
    )


def test_the_next_takes_the_place_of_one_that_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "compiles\n"
    ranks, go = Ranks(tmp_path), threading.Event()
    go.set()
    second = ranks.start("second", until=go)
    time.sleep(0.3)
    assert ranks.events == []
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(60)
    second.join(60)
    assert ranks.events == ["second begins", "second ends"]


def test_a_rank_goes_on_after_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rlhpc-starts").mkdir()
    lease = Lease(tmp_path / "rlhpc-starts" / "key.lease")
    assert lease.take()
    with compiling_in_order(tmp_path, "key", max_wait_s=0.2):
        assert "waited 0 s for the rank that compiles" in caplog.text and str(lease.path) in caplog.text
    assert lease.owns() and not list(tmp_path.rglob("*.filled")), "it was not the first"
    lease.release()


def test_a_folder_that_cannot_be_written_needs_no_order(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = False
    with compiling_in_order(tmp_path / "file" / "cache", "key"):
        done = True
    assert done
    with pytest.raises(RuntimeError, match="own"), compiling_in_order(tmp_path / "file" / "cache", "key"):
        raise RuntimeError("its own error")
