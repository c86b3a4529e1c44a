"""Mistakes of users, by the hundred: is each one message with the right exit code, in time, and is nothing left?

    python -m tests.attack.bad_inputs [--seed S] [--part K/N] [--class NAME] [--show]

The command is imported once; each case is a fork of that process in a folder of its own, or, where the interpreter's start
matters, a process. A case is right if

- it ends with a code that its class expects (2: the user's mistake, 1: something went wrong, 0: it is no mistake),
- standard error has one `rlhpc: error:` (none with 0) with the texts that the case asks for,
- there is no traceback, nothing that calls itself a fault of rlhpc, and it ended within a minute,
- the folder is as it was before (with 0: but for what the command is for), no process is left, and nothing of rlhpc's in
  /tmp and /dev/shm.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.drawn import PART, SEED, drawn

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
#: Stands for the case's own folder, in words, texts and environment.
HERE = "@HERE@"
#: Should a check be lost one day, its case trains one short step only.
SHORT = (
    f"runner.run_dir={HERE}/runs", "runner.name=tiny", "runner.max_steps=1", "runner.segments=1", "runner.save_interval=-1",
    "runner.logger.logger_backends=[jsonl]",
)  # fmt: skip
_HANG_S = 60.0
#: How long processes that end may take for it.
_GRACE_S = 5.0
#: Files with more bytes are not read to see whether they changed.
_LARGE = 1 << 26
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        kind: Its class.
        name: What is wrong.
        argv: Words after `rlhpc`.
        says: Texts that the message must have.
        codes: Exit codes that are right.
        files: Content by name in the case's folder.
        env: What is set (None: unset) in the environment.
        before: What wraps the command, as argv; it then is a process of its own.
        prepare: Called with the case's folder before the look at what is there.
        inside: Called in the fork, before the command.
        run: A finished run of one step lies in runs/tiny.
        writes: The command may leave files (it works, or fails on its way).
        out: Texts that standard output must have.
    """

    kind: str
    name: str
    argv: tuple[str, ...]
    says: tuple[str, ...] = ()
    codes: tuple[int, ...] = (2,)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    before: tuple[str, ...] | None = None
    prepare: Callable[[Path], None] | None = None
    inside: Callable[[], None] | None = None
    run: bool = False
    writes: bool = False
    out: tuple[str, ...] = ()


@dataclass
class Verdict:
    """What came of a case; right where there are no complaints."""

    case: Case
    code: int | None
    out: str
    err: str
    seconds: float
    complaints: list[str]


def train_words(*overrides: str, config: str = str(QUICKSTART)) -> tuple[str, ...]:
    """A training command that would be short if it were accepted."""
    played = ("algorithm.rollout_steps=32",) if config == str(QUICKSTART) else ()
    return ("train", config, *SHORT, *played, *overrides)


def plan_words(*overrides: str, config: str = str(QUICKSTART)) -> tuple[str, ...]:
    """The same configuration, looked at only."""
    return ("plan", config, *SHORT, *overrides)


def make_run(folder: Path) -> Path:
    """Trains the run that cases with `run` get a copy of; returns its folder."""
    words = [word.replace(HERE, str(folder)) for word in train_words()]
    subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", *words], check=True, timeout=300, capture_output=True, cwd=folder
    )
    return folder / "runs"


def preload() -> None:
    """Imports what most commands import, so that forks have it: another user may not read this one's Python.

    Nothing here starts a thread.
    """
    import gymnasium  # noqa: F401

    import rlhpc.config
    import rlhpc.jobs.plan  # noqa: F401

    gc.freeze()  # forks then share what is imported


class Examiner:
    """Runs cases, one after the other.

    Args:
        folder: Where they get their folders.
        runs: A finished run's `runs`, for the cases that need one; without it they are not to be asked for.
    """

    def __init__(self, folder: Path, runs: Path | None = None) -> None:
        self.folder, self.runs, self._count = folder, runs, 0

    def __call__(self, case: Case) -> Verdict:
        """Runs one."""
        self._count += 1
        here = self.folder / f"c{self._count}" / "here"
        here.mkdir(parents=True)
        if case.run:
            assert self.runs is not None, f"{case.name}: needs a run"
            shutil.copytree(self.runs, here / "runs")
        for name, content in case.files.items():
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = content.replace(HERE, str(here)).encode() if isinstance(content, str) else content
            path.write_bytes(text)
        if case.prepare is not None:
            case.prepare(here)
        before, shared = snapshot(here), leftovers()
        begun = time.monotonic()
        code = self._end(self._start(case, here), begun)
        seconds = time.monotonic() - begun
        strays = end_orphans()
        said, shown = ((here.parent / name).read_text(errors="replace") for name in ("err", "out"))
        verdict = Verdict(case, code, shown, said, seconds, [])
        verdict.complaints = complaints(verdict, here)
        if strays:
            verdict.complaints.append(f"left processes: {', '.join(strays)}")
        if not case.writes and (left := changes(before, snapshot(here))):
            verdict.complaints.append(f"left or changed: {', '.join(left[:5])}")
        if left := sorted(leftovers() - shared):
            verdict.complaints.append(f"left outside: {', '.join(left)}")
        shutil.rmtree(here.parent, ignore_errors=True)
        return verdict

    def _start(self, case: Case, here: Path) -> int:
        """Starts it as the leader of a session of its own; returns its process id."""
        argv = [word.replace(HERE, str(here)) for word in case.argv]
        env = {name: None if value is None else value.replace(HERE, str(here)) for name, value in case.env.items()}
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) != 0:
            return pid
        code = 99
        try:
            os.setsid()
            os.chdir(here)
            for number, name in ((0, os.devnull), (1, "../out"), (2, "../err")):
                opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(opened, number)
                os.close(opened)
            for variable in ("RLHPC_DEBUG", "RLHPC_SITE", "XDG_CONFIG_HOME"):
                os.environ.pop(variable, None)
            for variable, value in env.items():
                os.environ.pop(variable, None) if value is None else os.environ.__setitem__(variable, value)
            if case.before is not None:
                wrapped = [word.replace(HERE, str(here)) for word in case.before]
                command = [*wrapped, sys.executable, "-m", "rlhpc.cli", *argv]
                os.execvp(command[0], command)
            code = command_in_fork(argv, case.inside)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self, pid: int, begun: float) -> int | None:
        """Its exit code; None where it had to be killed."""
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() - begun > _HANG_S:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.01)


def command_in_fork(argv: Sequence[str], inside: Callable[[], None] | None) -> int:
    """`rlhpc` as the script of that name runs it, with a fresh standard output and error."""
    from rlhpc import cli

    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["rlhpc", *argv]
    if inside is not None:
        inside()
    try:
        code = cli.main(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def complaints(verdict: Verdict, here: Path) -> list[str]:
    """What is wrong with what it said and how it ended."""
    case, err = verdict.case, verdict.err
    if verdict.code is None:
        return [f"still there after {_HANG_S:.0f} s"]
    found = []
    if verdict.code not in case.codes:
        found.append(f"exit code {verdict.code}, not {' or '.join(map(str, case.codes))}")
    if "Traceback (most recent" in err:
        found.append("a traceback")
    if "fault of rlhpc" in err:
        found.append("calls it a fault of rlhpc")
    errors = err.count("rlhpc: error:")
    if verdict.code in (1, 2) and errors != 1 and not _stderr_is_gone(case):
        found.append(f"{errors} messages")
    if verdict.code == 0 and errors:
        found.append("an error's message, and exit code 0")
    if verdict.code == 2 and err and not err.startswith("rlhpc: "):
        found.append("something before the message")
    if len(err) > 4000:
        found.append(f"{len(err)} characters of message")
    for text in case.says:
        if text.replace(HERE, str(here)) not in err:
            found.append(f"does not say {text!r}")
    found += [f"does not print {text!r}" for text in case.out if text not in verdict.out]
    return found


def _stderr_is_gone(case: Case) -> bool:
    return case.before is not None and any("2>" in word for word in case.before)


# -- what is left -----------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, str]:
    """Everything below, by name, with a digest of what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file():
            found[name] = "a folder or a link"
        elif (about := path.stat()).st_size > _LARGE:
            found[name] = f"{about.st_size} bytes of {about.st_mtime_ns}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names that came, went or changed."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def leftovers() -> set[str]:
    """What rlhpc keeps outside a run's folder while it runs. With a private /tmp and /dev/shm these are the cases' own."""
    if "RLHPC_BAD_INPUTS_PRIVATE" not in os.environ:
        return set()
    return {
        str(path)
        for root in ("/tmp", "/dev/shm")
        for path in Path(root).glob("rlhpc*")
        if "bad-inputs" not in path.name
    }


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, so that those left behind are seen."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> list[str]:
    """Waits a little for processes that a case left to end; kills the others and returns their commands."""
    deadline = time.monotonic() + _GRACE_S
    while (pids := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    strays = []
    for pid in pids:
        with contextlib.suppress(OSError):
            strays.append(
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:120]
            )
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return strays


def _children() -> list[int]:
    """Children of this process that still run; the others are reaped."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0:
            return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


# -- all of them ------------------------------------------------------------------------------------------------------


def table(verdicts: Sequence[Verdict]) -> str:
    """Cases, right and wrong, by class."""
    kinds = list(dict.fromkeys(verdict.case.kind for verdict in verdicts))
    lines = [f"{'class':<16} {'cases':>6} {'right':>6} {'wrong':>6}"]
    for kind in (*kinds, "all"):
        of_kind = [verdict for verdict in verdicts if kind in ("all", verdict.case.kind)]
        wrong = sum(bool(verdict.complaints) for verdict in of_kind)
        lines.append(f"{kind:<16} {len(of_kind):>6} {len(of_kind) - wrong:>6} {wrong:>6}")
    return "\n".join(lines)


def told(verdict: Verdict) -> str:
    """A case that went wrong: its command, what is wrong with it, and what it said."""
    case = verdict.case
    setting = [f"{name}={value}" for name, value in case.env.items()] + list(case.before or ())
    lines = [f"[{case.kind}] {case.name}: {'; '.join(verdict.complaints)}"]
    lines.append(f"  $ {' '.join([*setting, 'rlhpc', *case.argv])}   ({verdict.seconds:.1f} s)")
    return "\n".join([*lines, *(f"  | {line[:300]}" for line in verdict.err.strip().splitlines()[-12:])])


def chosen(cases: Sequence[Case], kind: str) -> list[Case]:
    """This run's part of the cases of a class, in their order."""
    names = [f"{index:05}" for index, case in enumerate(cases) if case.kind == kind]
    return [cases[int(name)] for name in drawn(f"mistakes: {kind}", names)]


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that is gone afterwards; others may enter it, for the cases of other users."""
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-bad-inputs-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def private() -> None:
    """Starts again with /tmp and /dev/shm of its own, where that is allowed: what is left there then is the cases'."""
    if "RLHPC_BAD_INPUTS_PRIVATE" in os.environ:
        return
    mounts = "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /tmp"
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    if subprocess.run([*namespace, mounts], capture_output=True, check=False).returncode == 0:
        os.environ["RLHPC_BAD_INPUTS_PRIVATE"] = "1"
        again = [sys.executable, "-m", "tests.attack.bad_inputs", *sys.argv[1:]]
        os.execvp(namespace[0], [*namespace, f'{mounts} && exec "$@"', "sh", *again])


def main() -> int:
    """Runs them; returns 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1", help="of what is drawn (default 1)")
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n parts of each class (default: all)")
    parser.add_argument("--class", dest="kind", action="append", help="only cases of this class")
    parser.add_argument(
        "--cheap", action="store_true", help="only cases that need no trained run and no process of their own"
    )
    parser.add_argument("--name", help="only cases whose name has this text")
    parser.add_argument("--show", action="store_true", help="also what the cases said that went right")
    args = parser.parse_args()
    private()
    from tests.attack.bad_cases import all_cases

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[SEED], os.environ[PART] = args.seed, args.part
    cases = [case for case in all_cases(args.seed) if not args.kind or case.kind in args.kind]
    cases = [case for case in cases if not args.cheap or not (case.run or case.before)]
    kinds = dict.fromkeys(case.kind for case in cases)
    cases = [case for kind in kinds for case in chosen(cases, kind) if args.name is None or args.name in case.name]
    adopt_orphans()
    with own_folder() as folder:
        (folder / "seed").mkdir()
        runs = make_run(folder / "seed") if any(case.run for case in cases) else None
        preload()
        examine = Examiner(folder, runs)
        verdicts = []
        for case in cases:
            verdicts.append(examine(case))
            if verdicts[-1].complaints or args.show:
                print(told(verdicts[-1]), flush=True)
            if len(verdicts) % 50 == 0:
                print(f"… {len(verdicts)} of {len(cases)}", flush=True)
    print(f"\nseed {args.seed}\n{table(verdicts)}")
    return int(any(verdict.complaints for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
