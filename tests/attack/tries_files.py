"""Attacks by what is unpacked or downloaded: programs that are judged, repositories, run folders, data sets."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attack.tries import CannotRunError, attack

# -- code rewards -----------------------------------------------------------------------------------------------------

#: What is expected, and a program that looks for it in all that it reaches: whole numbers that read 3112991437 from behind.
EXPECTED = 7341992113
_SEEK = r"""
import gc, os, re, sys, types
def digits():
    return "3112991437"[::-1]
def holds(value, depth=0):
    if isinstance(value, (int, float, str, bytes)):
        return digits() in (value.decode("latin-1") if isinstance(value, bytes) else str(value))
    if depth < 4:
        if isinstance(value, dict):
            return any(holds(k, depth + 1) or holds(v, depth + 1) for k, v in list(value.items()))
        if isinstance(value, (list, tuple, set, frozenset)):
            return any(holds(v, depth + 1) for v in list(value))
        if isinstance(value, types.CodeType):
            return holds(value.co_consts, depth + 1)
        if isinstance(value, types.FunctionType):
            return holds(value.__code__, depth + 1) or holds(value.__defaults__, depth + 1) or holds(value.__closure__ and [c.cell_contents for c in value.__closure__], depth + 1)
        if isinstance(value, type) and value.__module__ in ("__main__", "builtins", None):
            return holds({k: v for k, v in vars(value).items() if not k.startswith("__")}, depth + 1)
    return False
"""
SEEKERS = {
    "frames": _SEEK + """
def add(a, b):
    frame, mine = sys._getframe(), globals()["__builtins__"]
    while frame:
        names = {**frame.f_globals, **frame.f_locals}
        if holds(names) or holds(frame.f_code if frame.f_code.co_name != "add" else ()):
            return int(digits())
        frame = frame.f_back
    return 0
""",
    "collector": _SEEK + """
def add(a, b):
    for value in gc.get_objects():
        if isinstance(value, (dict, list, tuple, types.FunctionType, types.CodeType)) and value is not globals():
            try:
                if holds(value, 3):
                    return int(digits())
            except Exception:
                pass
    return 0
""",
    "memory": """
def add(a, b):
    import os, re, struct
    digits = "3112991437"[::-1].encode()
    wanted = [re.escape(digits), re.escape(struct.pack("<q", int(digits)))]
    mine = id(digits) + 33
    try:
        maps = open("/proc/self/maps").read().splitlines()
        memory = open("/proc/self/mem", "rb", 0)
    except OSError:
        return 0
    hits = 0
    for line in maps:
        words = line.split()
        if not words[1].startswith("rw") or (len(words) > 5 and words[5].startswith("/")):
            continue
        low, high = (int(x, 16) for x in words[0].split("-"))
        if high - low > 64 << 20:
            continue
        try:
            memory.seek(low)
            hits += len(re.findall(wanted[0], memory.read(high - low)))
        except (OSError, OverflowError, ValueError):
            pass
    return int(digits) if hits > 25 else 0
""",
    "files": """
def add(a, b):
    import os
    digits = "3112991437"[::-1].encode()
    for top in (".", "/tmp", "/dev/shm", "/proc/self/fd", "/proc/self/cwd", "/proc/self/root/tmp"):
        try:
            names = os.listdir(top)
        except OSError:
            continue
        for name in names:
            try:
                path = os.path.join(top, name)
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                if digits in os.read(fd, 1 << 20):
                    return int(digits)
            except OSError:
                pass
    for pid in ("self", str(os.getppid()), "1"):
        for name in ("cmdline", "environ"):
            try:
                if digits in open(f"/proc/{pid}/{name}", "rb").read():
                    return int(digits)
            except OSError:
                pass
    return 0
""",
}  # fmt: skip
#: Forms of a test that expects the number, which the documentation does not name among those judged beside the program.
FORMS = {
    "two names at once": f"low, high = 1, {EXPECTED}\nassert add(2, 3) == high",
    "a star": f"first, *rest = [1, {EXPECTED}]\nassert add(2, 3) == rest[0]",
    "a name that is bound again": f"expected = 5\nexpected = {EXPECTED}\nassert add(2, 3) == expected",
    "a sum of names": f"half = {EXPECTED // 2}\nrest = {EXPECTED - EXPECTED // 2}\nassert add(2, 3) == half + rest",
    "a table": f"table = {{(2, 3): {EXPECTED}}}\nfor arguments, value in table.items():\n    assert add(*arguments) == value",
    "a comprehension": f"assert [add(i, i) for i in range(2)] == [{EXPECTED} for _ in range(2)]",
    "a chain": f"assert 0 != add(2, 3) == {EXPECTED}",
    "with and": f"assert isinstance(add(2, 3), int) and add(2, 3) == {EXPECTED}",
    "a text": f"assert str(add(2, 3)) == '{EXPECTED}'",
    "a formatted text": f"n = {EXPECTED}\nassert f'{{add(2, 3)}}' == f'{{n}}'",
    "a function of the test": f"def test_it():\n    assert add(2, 3) == {EXPECTED}\n",
    "a default": f"def check(candidate, wanted={EXPECTED}):\n    assert candidate(2, 3) == wanted\ncheck(add)",
    "a class of tests": f"import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(2, 3), {EXPECTED})\n",
    "parameters": f"import pytest\n@pytest.mark.parametrize('a, b, wanted', [(2, 3, {EXPECTED})])\ndef test_it(a, b, wanted):\n    assert add(a, b) == wanted\n",
    "an approximation": f"import pytest\nassert add(2, 3) == pytest.approx({EXPECTED})",
    "if": f"if add(2, 3) != {EXPECTED}:\n    raise AssertionError",
    "an input and an output": {"input": "2 3", "output": str(EXPECTED)},
}


@functools.cache
def judge() -> Any:
    from rlhpc.language.rewards.code_reward import CodeReward

    return CodeReward(partial=True, timeout_s=10.0, sandbox={"memory_mb": 512})


def seek(seeker: str, form: str) -> str:
    from rlhpc.language.rewards import Sample

    program = SEEKERS[seeker] + ("\nprint(add(2, 3))" if isinstance(FORMS[form], dict) else "")
    tests: Any = FORMS[form] if isinstance(FORMS[form], dict) else [FORMS[form]]
    value = judge()(Sample("", f"```python\n{program}\n```", meta={"tests": tests}))
    return f"a reward of {value}" if value else ""


@functools.cache
def seekers_find_nothing_else() -> None:
    """Of a test that does not have the number, none of them may say that it has it."""
    from rlhpc.language.rewards import Sample

    for name, source in SEEKERS.items():
        tests = ["low, high = 1, 55\nassert add(2, 3) == 0"]
        if judge()(Sample("", f"```python\n{source}\n```", meta={"tests": tests})) != 1.0:
            raise CannotRunError(f"{name} finds what is not there")


def seek_all(form: str) -> str:
    seekers_find_nothing_else()
    return "; ".join(f"{seeker}: {how}" for seeker in SEEKERS if (how := seek(seeker, form)))


_INSIDE = "docs/how-to/rewards.md: what a star binds, defaults of check, and if go inside"
for _form in FORMS:
    attack("what a program is to compute", _form, _INSIDE if _form in ("a star", "a default", "if") else "")(
        functools.partial(seek_all, _form)
    )

# -- repositories -----------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x", *words], check=True, capture_output=True
    )


def _as_bare(repository: Path, mark: str) -> None:
    """The working directory is a git directory itself."""
    for name in (".git/HEAD", ".git/objects", ".git/refs", ".git/config", ".git/index"):
        (repository / name).rename(repository / Path(name).name)
    (repository / ".git").rename(repository.parent / "was-git")
    with (repository / "config").open("a") as file:
        file.write(f"[core]\n\tbare = false\n\tworktree = {repository}\n\tfsmonitor = {mark}\n")


def _elsewhere(repository: Path, mark: str) -> None:
    (repository / ".git").rename(repository.parent / "g")
    (repository / ".git").write_text(f"gitdir: {repository.parent / 'g'}\n")
    git(repository, "config", "core.fsmonitor", mark)


def _attributes_in_info(repository: Path, mark: str) -> None:
    (repository / ".git/info").mkdir(exist_ok=True)
    (repository / ".git/info/attributes").write_text("* filter=y diff=y text eol=crlf working-tree-encoding=UTF-16\n")
    git(repository, "config", "filter.y.clean", mark)
    git(repository, "config", "diff.y.textconv", mark)


def _commondir(repository: Path, mark: str) -> None:
    common = repository.parent / "common"
    subprocess.run(["cp", "-r", str(repository / ".git"), str(common)], check=True)
    (repository / ".git/commondir").write_text(str(common))
    with (common / "config").open("a") as file:
        file.write(f"[core]\n\tfsmonitor = {mark}\n")


def _values_of_many_lines(repository: Path, mark: str) -> None:
    with (repository / ".git/config").open("a") as file:
        file.write(
            f'[core]\n\teol = "lf\\n[core]\\nfsmonitor = {mark}"\n\tautocrlf = "input\\n\\tfsmonitor = {mark}"\n'
        )


def _linked_settings(repository: Path, mark: str) -> None:
    config = repository / ".git/config"
    target = repository.parent / "more"
    target.write_text(config.read_text() + f"[core]\n\tfsmonitor = {mark}\n")
    config.unlink()
    config.symlink_to(target)


def _pipe(name: str) -> Callable[[Path, str], None]:
    def plant(repository: Path, mark: str) -> None:
        path = repository / name
        if path.is_dir():
            path.rename(repository / "moved")
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return plant


def _endless(name: str) -> Callable[[Path, str], None]:
    def plant(repository: Path, mark: str) -> None:
        (repository / name).unlink(missing_ok=True)
        (repository / name).symlink_to("/dev/zero")

    return plant


REPOSITORIES: dict[str, Callable[[Path, str], None]] = {
    "the folder is a git directory": _as_bare, "a git directory elsewhere": _elsewhere, "attributes in info": _attributes_in_info,
    "another common directory": _commondir, "values of many lines": _values_of_many_lines, "settings through a link": _linked_settings,
    "HEAD is a pipe": _pipe(".git/HEAD"), "settings are a pipe": _pipe(".git/config"), ".git is a pipe": _pipe(".git"),
    "the index is a pipe": _pipe(".git/index"), "commondir is a pipe": _pipe(".git/commondir"),
    "HEAD has no end": _endless(".git/HEAD"), "settings have no end": _endless(".git/config"), "the index has no end": _endless(".git/index"),
    "a file of the tree is a pipe": _pipe("f"),
}  # fmt: skip
_LOOK = """
import sys, resource, time, json
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    from rlhpc.runtime.repository import git_state
except ImportError:
    from rlhpc.metrics.provenance import _git_state as git_state
for folder in sys.argv[1:]:
    began = time.monotonic()
    try:
        state = git_state(Path(folder))
    except Exception as error:
        state = {"raised": repr(error)}
    print(json.dumps([time.monotonic() - began, state]), flush=True)
"""


def look_at(plant: Callable[[Path, str], None]) -> str:
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as name:
        top = Path(name)
        repository = top / "repository"
        (repository / "below").mkdir(parents=True)
        git(repository, "init", "-q", "-b", "trunk")
        (repository / "f").write_text("1\n")
        git(repository, "add", "f")
        git(repository, "commit", "-qm", "m")
        mark, program = top / "ran", top / "program"
        program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
        program.chmod(0o755)
        (repository / "f").write_text("22\n")
        plant(repository, str(program))
        mark.unlink(missing_ok=True)
        try:
            done = subprocess.run([sys.executable, "-c", _LOOK, str(repository), str(repository / "below")], capture_output=True,
                                  text=True, timeout=70)  # fmt: skip
        except subprocess.TimeoutExpired:
            return "it hangs"
        if mark.exists():
            return "a command ran"
        if done.returncode:
            return f"it ended: {done.stderr[-200:]}"
        for line in done.stdout.splitlines():
            took, state = json.loads(line)
            if "raised" in state:
                return f"raised {state['raised']}"
            if took > 40:
                return f"it took {took:.0f} s"
    return ""


for _name, _plant in REPOSITORIES.items():
    attack("repository", _name)(functools.partial(look_at, _plant))

# -- run folders ------------------------------------------------------------------------------------------------------


def limited() -> None:
    """Before a command: no more than 3 GB, also for root."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))


def rlhpc(*words: str, timeout_s: float = 60.0) -> tuple[int | None, str]:
    """Runs a command; its status (None: it did not end) and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhpc.cli", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=limited, start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, "it hangs"
    return process.returncode, said.decode(errors="replace")


def verdict(code: int | None, said: str, allowed: tuple[int, ...] = (0, 1, 2)) -> str:
    from tests.attack.run_folders import OBEYED

    if code not in allowed or "Traceback" in said or "a fault of rlhpc" in said or "MemoryError" in said:
        return f"status {code}: {said[-200:]}"
    return f"printed {OBEYED.findall(said)[:5]!r}" if OBEYED.findall(said) else ""


def with_a_run(change: Callable[[Path], None], *commands: str) -> str:
    from tests.attack.run_folders import reading_commands, whole_run

    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as name:
        run = whole_run("language", Path(name) / "run")
        change(run)
        for command in commands:
            words = reading_commands(run).get(command) or [command, str(run)]
            if how := verdict(*rlhpc(*words)):
                return f"{command}: {how}"
    return ""


def as_pipe(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(run / name)

    return change


def strip_end_tokens(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to("/dev/zero")

    return change


def sparse(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.truncate(40 << 30)

    return change


def obeyed_names(run: Path) -> None:
    from tests.attack.run_folders import OBEYED_TEXT

    text = OBEYED_TEXT.replace("/", "")
    for name in (f"logs/segment_0/{text}.err", f"checkpoints/global_step_9{text}/COMPLETE", f"eval/global_step_2/{text}.json",
                 f"registry/{text}/members/driver.json", f"segments/{text}.json", f"submit/segment_0{text}.json"):  # fmt: skip
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    (run / "registry/current").write_text(text)


def _submitted(run: Path, **fields: Any) -> None:
    record = {
        "segment": 0,
        "attempt": 1,
        "token": "t",
        "executor": "local",
        "command": [],
        "job_name": "x",
        "phase": "submitted",
        **fields,
    }
    (run / "submit").mkdir(mode=0o700, exist_ok=True)
    (run / "submit/segment_0.json").write_text(json.dumps(record))


def foreign_process(where: str) -> str:
    """A run folder that names a process of this user, which its maker saw on the same host."""
    with subprocess.Popen(["sleep", "300"]) as victim:
        try:
            identity = {
                "pid": victim.pid,
                "start": int(Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[19]),
            }
            from rlhpc.jobs.probes import process_space

            identity["host"] = process_space()

            def change(run: Path) -> None:
                (run / "segments/0.json").unlink()
                _submitted(run, job_id=str(victim.pid), **({"process": identity} if where == "record" else {}))
                if where != "record":
                    gone = {**identity, "start": 1}
                    claim = {"token": "t", "job_id": "1", "executor": "local", "job": gone, where: identity}
                    (run / "submit/segment_0.claim.1.json").write_text(json.dumps(claim))

            how = with_a_run(change, "cancel")
            return f"it was ended; {how}" if victim.poll() is not None else how
        finally:
            victim.kill()


def foreign_job(**fields: Any) -> str:
    """A run folder that names another Slurm job of this user; stand-ins of Slurm's commands note what they are told."""
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as name:
        folder = Path(name)
        squeue = 'case "$*" in *--name=analysis*) echo 12;; *--name=*) ;; *%j*) echo "12|/home/a|c|analysis";; *) echo "12|RUNNING|None";; esac'
        for command, body in {
            "squeue": squeue,
            "sacct": "exit 1",
            "scontrol": "exit 1",
            "scancel": f'echo "$*" >> {folder}/told',
        }.items():
            (folder / command).write_text(f"#!/bin/sh\n{body}\n")
            (folder / command).chmod(0o755)
        before = os.environ["PATH"]
        os.environ["PATH"] = f"{folder}:{before}"

        def change(run: Path) -> None:
            (run / "segments/0.json").unlink()
            _submitted(run, executor="slurm", **fields)

        try:
            how = with_a_run(change, "cancel", "scale" if fields.get("scale") else "status")
        finally:
            os.environ["PATH"] = before
        told = (folder / "told").read_text() if (folder / "told").exists() else ""
    return f"scancel {told}" if told else how


attack("run folder", "cancel: another job's id")(functools.partial(foreign_job, job_id="12"))
attack("run folder", "cancel: another job's name")(
    functools.partial(foreign_job, job_name="analysis", phase="submitting")
)
attack("run folder", "cancel: an option as an id")(functools.partial(foreign_job, job_id="--me"))
attack("run folder", "cancel: two ids")(functools.partial(foreign_job, job_id="12,13"))
for _where in ("record", "job", "driver"):
    attack("run folder", f"cancel: another process ({_where})")(functools.partial(foreign_process, _where))
attack("run folder", "names of files that a terminal obeys")(
    functools.partial(with_a_run, obeyed_names, "status", "logs", "report")
)
for _label, _change, _commands in (
    ("metrics are a pipe", as_pipe("metrics.jsonl"), ("status", "report")),
    ("the status is a pipe", as_pipe("status.json"), ("status", "logs")),
    ("a log is a pipe", as_pipe("logs/segment_0/rollout-0.err"), ("logs", "status")),
    ("attendance is a pipe", as_pipe("attendance.jsonl"), ("status",)),
    ("a member is a pipe", as_pipe("registry/local-0/members/rollout-0.json"), ("status",)),
    ("metrics have no end", strip_end_tokens("metrics.jsonl"), ("status", "report")),
    ("the status has no end", strip_end_tokens("status.json"), ("status",)),
    ("a log has no end", strip_end_tokens("logs/segment_0/rollout-0.err"), ("logs",)),
    ("metrics of 40 GB of nothing", sparse("metrics.jsonl"), ("status", "report")),
    ("a log of 40 GB of nothing", sparse("logs/segment_0/rollout-0.err"), ("logs",)),
):
    attack("run folder", _label)(functools.partial(with_a_run, _change, *_commands))

# -- joining ----------------------------------------------------------------------------------------------------------


class _Bomb:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def answer_a_join(answer: Callable[[str], bytes]) -> str:
    """A driver of somebody else answers one that joins."""
    from rlhpc.runtime.errors import RlhpcError
    from rlhpc.runtime.joining import DriverConnection
    from rlhpc.runtime.registry import CurveKeys, GenerationFolder

    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as name:
        top, mark = Path(name), f"{name}/went-off"
        registry = GenerationFolder.create(top / "run/registry", "local-0")
        registry.save_keys(CurveKeys.fresh())
        registry.put(
            "members",
            "driver",
            {"node": "n", "data": {"host": "h", "ipc": "ipc:///nowhere", "tcp": "tcp://h:1", "bulk": ""}},
        )
        door: Any = DriverConnection(top / "run/registry")
        door._peers.request = lambda *_: [answer(mark)]
        try:
            door.ask({"group": "rollout"})
        except RlhpcError:
            pass
        except Exception as error:
            if not Path(mark).exists():
                return f"no message: {error!r}"
        finally:
            door.close()
        return "it ran what the driver sent" if Path(mark).exists() else ""


def _pickled(mark: str) -> bytes:
    import pickle

    return pickle.dumps(_Bomb(mark))


for _label, _answer in {
    "a pickle": _pickled, "an empty answer": lambda mark: b"", "deep JSON": lambda mark: b"[" * 200_000,
    "a list": lambda mark: b"[1, 2]", "a huge number": lambda mark: b'{"rank": ' + b"9" * 5000 + b"}",
}.items():  # fmt: skip
    attack("joining", f"the driver answers {_label}")(functools.partial(answer_a_join, _answer))

# -- videos -----------------------------------------------------------------------------------------------------------

_VIDEO = """
import json, resource, sys
from pathlib import Path
import numpy as np
from rlhpc.embodied.data.lerobot_reader import read_lerobot
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.video import write_video
from rlhpc.runtime.errors import RlhpcError
folder, kind = Path(sys.argv[1]) / "set", sys.argv[2]
length, size = 20, 16
pictures = np.zeros((length + 1, size, size, 3), np.uint8)
episode = {"source": "made", "obs": {"state": np.zeros((length + 1, 3), np.float32), "rgb": pictures},
           "actions": np.zeros((length, 2), np.float32), "rewards": np.zeros(length, np.float32),
           "terminations": np.zeros(length, bool), "truncations": np.arange(length) == length - 1, "success": None}
with LeRobotWriter(folder, **json.loads(sys.argv[3])) as writer:
    writer.add(episode)
(file,) = folder.rglob("*.mp4")
big = 2048 if kind != "wide" else 64
write_video(file, [np.zeros((big, 16384 if kind == "wide" else 2048, 3), np.uint8)] * (length + 1), 10)
info = folder / "meta/info.json"
content = json.loads(info.read_text())
camera = next(n for n, f in content["features"].items() if f["dtype"] == "video")
if kind == "said to be so":
    content["features"][camera]["shape"] = [2048, 2048, 3]
if kind == "nothing said":
    del content["features"][camera]["shape"]
if kind == "padded":
    with file.open("ab") as target:
        target.write((64 << 20).to_bytes(4, "big") + b"free"); target.write(bytes((64 << 20) - 8))
    content["features"][camera]["shape"] = [2048, 2048, 3]
info.write_text(json.dumps(content))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in read_lerobot(folder):
        pass
    said = "read"
except RlhpcError as error:
    said = "refused"
print(json.dumps([said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10]))
"""


def read_videos(kind: str) -> str:
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-", dir="/var/tmp") as name:
        done = subprocess.run([sys.executable, "-c", _VIDEO, name, kind, json.dumps({"fps": 10, "videos": True, "task": "t"})],
                              capture_output=True, text=True, timeout=140, preexec_fn=limited)  # fmt: skip
    if done.returncode:
        raise CannotRunError(done.stderr[-300:])
    said, mb = json.loads(done.stdout)
    return (
        f"{said}, {mb} MB"
        if mb > 1400 or (said == "read" and kind not in ("said to be so", "nothing said", "padded"))
        else ""
    )


for _kind in ("small ones are said", "wide", "said to be so", "nothing said", "padded"):
    attack("videos", f"20 frames of 2048x2048: {_kind}")(functools.partial(read_videos, _kind))
