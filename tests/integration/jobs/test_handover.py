"""Waiting runs are shells that one watcher talks to: what it costs, and that nothing is lost when one of them is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.segment import JobRecord
from rlhpc.jobs.shared_files import read_json_file, write_json
from rlhpc.jobs.shared_probe import wait_folder
from rlhpc.jobs.wait_client import SHELL_COMMAND, SHELL_PROGRAM
from tests.integration.jobs.test_submit import Run, until
from tests.waiting import program, watchers

pytestmark = pytest.mark.timeout(120)


class WaitedFor(Run):
    """A run whose waiting commands meet in a folder of the test's own."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.environment = {"TMPDIR": str(root.parent)}

    def waits(self, waiter: subprocess.Popen[str]) -> bool:
        """Whether the command is a shell that is being told how it goes."""
        return program(waiter.pid) in ("sh", "dash", "bash", "busybox")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[WaitedFor]]:
    (tmp_path / "t").mkdir()
    runs = [WaitedFor(tmp_path / "t" / f"s{k}") for k in range(4)]
    yield runs
    for run in runs:
        cancel(run.paths, grace_s=0.0)
    until(lambda: not watchers(tmp_path / "t"), "the watcher ends when nobody waits")
    assert not list((tmp_path / "t").glob("rlhpc.waits-*"))


def waiting(runs: list[WaitedFor], waiters: list[subprocess.Popen[str]]) -> int:
    """The watcher, once all of them are waiting shells."""
    until(lambda: all(run.waits(w) for run, w in zip(runs, waiters, strict=True)), "all of them wait")
    [watcher] = watchers(runs[0].root.parent)
    return watcher


def test_one_process_waits_for_all(runs: list[WaitedFor]) -> None:
    waiters = [run.waiter(60.0) for run in runs]
    first = waiting(runs, waiters)
    # one run fails while nobody looks, and the watcher is killed: the others start another one, which tells what it was
    os.kill(first, signal.SIGSTOP)
    lost = runs[0].claim()
    assert lost.driver is not None
    os.kill(lost.driver.pid, signal.SIGKILL)
    until(lambda: read_json_file(runs[0].files.exit), "the job notes how its driver ended")
    os.kill(first, signal.SIGKILL)
    _, err = waiters[0].communicate(timeout=30)
    assert waiters[0].returncode == 137 and "rlhpc: error: the driver was ended by SIGKILL" in err
    assert len(runs[0].starts()) == 1 and "Traceback" not in err
    second = waiting(runs[1:], waiters[1:])
    assert second != first
    assert "s0 segment 0: submitted local job" in err
    # a waiter that is killed is not waited for any more; one that is cancelled says so
    waiters[1].kill()
    waiters[1].communicate()
    cancel(runs[2].paths)
    _, err = waiters[2].communicate(timeout=30)
    assert waiters[2].returncode == 143 and "was cancelled" in err and "s2 segment 0: local job" in err
    waiters[3].send_signal(signal.SIGINT)
    _, err = waiters[3].communicate(timeout=30)
    assert waiters[3].returncode == 130 and err.count("rlhpc: error: stopped waiting; local job") == 1
    assert [len(run.starts()) for run in runs] == [1] * 4


def test_the_result_is_the_commands(runs: list[WaitedFor]) -> None:
    """It is the same as that of a command which waits by itself, on stdout and stderr."""
    waiters = [runs[0].waiter(1.0), runs[1].waiter(mode="reject"), runs[2].waiter(mode="fail")]
    (out, err), (_, rejected), (_, failed) = (waiter.communicate(timeout=60) for waiter in waiters)
    assert [w.returncode for w in waiters] == [0, 2, 1]
    record = JobRecord.read(runs[0].files)
    assert record is not None
    assert json.loads(out) == {
        "state": "finished", "segment": 0, "executor": "local", "job_id": record.job_id, "result": {"global_step": 20},
    }  # fmt: skip
    assert err.splitlines()[-1] == "rlhpc: segment 0: finished at step 20"
    assert "rlhpc: error: env.train.env_id: unknown 'CartPoel'\n  driver log: " in rejected
    assert "rlhpc: error: actor rank 1 on n1 was killed\n" in failed


@pytest.mark.parametrize("victims", ["engine", "both"])
def test_a_shell_ends_with_who_asked(runs: list[WaitedFor], victims: str) -> None:
    engine = subprocess.Popen(["sleep", "60"])
    runs[0].environment["ASKED_BY"] = str(engine.pid)
    waiter = runs[0].waiter(60.0)
    watcher = waiting(runs[:1], [waiter])
    engine.kill()
    if victims == "both":
        os.kill(watcher, signal.SIGKILL)
    engine.wait()
    _, err = waiter.communicate(timeout=30)
    assert waiter.returncode == 130 and "rlhpc: error: stopped waiting; local job" in err
    assert runs[0].claim().alive_here()


def test_who_found_a_job_becomes_a_shell_too(runs: list[WaitedFor]) -> None:
    """Once it is certain that the job was not dying when it was found."""
    first = runs[0].waiter(60.0)
    runs[0].claim()
    runs[0].environment["DYING_S"] = "0.5"
    second = runs[0].waiter(60.0)
    waiting([runs[0]] * 2, [first, second])
    cancel(runs[0].paths)
    for waiter in (first, second):
        _, err = waiter.communicate(timeout=30)
        assert waiter.returncode == 143 and "was cancelled" in err
    assert len(runs[0].starts()) == 1


def test_waits_by_itself_where_others_might_listen(
    runs: list[WaitedFor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder where they meet is open to others: no watcher is asked, and none is started."""
    # here, not in another process: where PYTHONPATH does not name this checkout, that one has the folder of another one
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    place = wait_folder()
    place.mkdir()
    place.chmod(0o755)  # whatever the umask is
    waiter = runs[0].waiter(2.0)
    runs[0].claim()
    assert program(waiter.pid).startswith("python") and not watchers(tmp_path / "t")
    out, _ = waiter.communicate(timeout=30)
    assert waiter.returncode == 0 and json.loads(out)["result"] == {"global_step": 40}
    assert list((tmp_path / "t").glob("rlhpc.waits-*")) == [place], "the command came to this folder"
    place.rmdir()


def test_waits_by_itself_where_no_watcher_lives(runs: list[WaitedFor], tmp_path: Path) -> None:
    """Not started for ever: the command goes on as it is."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'rlhpc.jobs.wait_server' in sys.orig_argv:\n"
        f"    open({str(tmp_path / 'tried')!r}, 'a').write('x')\n"
        "    os._exit(1)\n"
    )
    runs[0].environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), *(p for p in sys.path if p)])
    waiter = runs[0].waiter(1.0)
    out, _ = waiter.communicate(timeout=60)
    assert waiter.returncode == 0 and json.loads(out)["result"] == {"global_step": 20}
    assert (tmp_path / "tried").read_text() == "xxxx"
    [place] = (tmp_path / "t").glob("rlhpc.waits-*")
    shutil.rmtree(place)


def test_what_the_watcher_does_not_expect_the_command_says_itself(runs: list[WaitedFor]) -> None:
    """A record that no driver writes ends the wait for this run, as in a command that waits by itself, and for no other."""
    waiters = [run.waiter(60.0) for run in runs[:2]]
    watcher = waiting(runs[:2], waiters)
    claim = runs[0].claim().path
    content = read_json_file(claim)
    assert content is not None
    write_json(claim, {**content, "started": "soon"})
    _, err = waiters[0].communicate(timeout=30)
    write_json(claim, content)
    assert waiters[0].returncode == 1 and "rlhpc: error: ValueError: could not convert string to float" in err
    assert "Traceback" not in err and waiting(runs[1:2], waiters[1:]) == watcher


def shells() -> list[list[str]]:
    """What /bin/sh is on one system or another."""
    known = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]
    return [words for words in known if shutil.which(words[0])]


@pytest.mark.parametrize("shell", shells(), ids=lambda words: words[0])
def test_the_shell(shell: list[str]) -> None:
    def told(*lines: str, sig: int = 0) -> tuple[int, str, str]:
        ours, its = socket.socketpair()
        again = ["sh", "-c", 'echo "again $*"', "again", "python"]
        begin = (
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); fd = int(sys.argv[1]); os.dup2(fd, 3); "
            "os.set_inheritable(3, True); os.execvp(sys.argv[2], sys.argv[2:])"
        )
        words = [sys.executable, "-c", begin, str(its.fileno()), *shell, "-c", SHELL_COMMAND, "rlhpc", *again]
        with ours:
            with its:
                process = subprocess.Popen(
                    words, pass_fds=[its.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env={**os.environ, "RLHPC_SHELL": SHELL_PROGRAM, "RLHPC_STOPPED": "one\n  two"},
                )  # fmt: skip
            assert process.stdout is not None
            ours.sendall(b"Oready\n")
            assert process.stdout.readline() == "ready\n"
            ours.sendall("".join(f"{line}\n" for line in lines).encode())
            if sig:
                process.send_signal(sig)
                process.wait(20)
            ours.shutdown(socket.SHUT_RDWR)
            out, err = process.communicate(timeout=20)
        return process.returncode, out, err

    assert told(r"E  a \n %s  ", "O{}", "X75", "Enever") == (75, "{}\n", "  a \\n %s  \n")
    assert told("Etold", "X0") == (0, "", "told\n")
    assert told() == (0, "again python\n", "")
    assert told("A") == (0, "again python --alone\n", "")
    assert told("D0", "D1") == (0, "again python\n", "")
    assert told(sig=signal.SIGINT) == (130, "", "one\n  two\n")
    assert told(sig=signal.SIGTERM)[0] == -signal.SIGTERM


def test_what_a_secret_was_is_not_shown(runs: list[WaitedFor]) -> None:
    """The watcher does not have the waiting command's environment, and hides its secrets all the same."""
    others = runs[1].waiter(60.0)
    waiting(runs[1:2], [others])
    runs[0].environment["KEY_OF_MINE"] = "actor rank 1"
    waiter = runs[0].waiter(mode="fail")
    _, err = waiter.communicate(timeout=30)
    assert waiter.returncode == 1 and "rlhpc: error: ${oc.env:KEY_OF_MINE} on n1 was killed" in err
