"""Things that users do on a shared folder with two hosts. Each scenario passes on every filesystem of `drawn_faults`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import read_manifest, verify
from tests.eventually import Patience, busyness
from tests.filesystems.beds import Client, SharedFolder, is_readable
from tests.filesystems.faults import Faults

#: Seconds of a lease and between its renewals, in the agents of a scenario; on a busy machine, whose processes may not run for
#: seconds, a lease is longer.
LEASE_S, RENEW_S = 4.0, 0.5
#: Seconds for which an agent may work on one action.
_ANSWER_S = 90.0


class ActionError(Exception):
    """Error of an agent's action; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class AgentProcess:
    """Agent on a client's host; `agent("claim", run=…)` runs an action and returns its value."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.process = client.start(sys.executable, "-m", "tests.filesystems.agent")
        assert self.receive() == "ready"
        self("leases", lease_s=LEASE_S * busyness(), renew_s=RENEW_S)

    def __call__(self, action: str, **arguments: Any) -> Any:
        self.send(action, **arguments)
        return self.receive()

    def send(self, action: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        if not is_readable(self.process.stdout, _ANSWER_S):
            self.kill()
            raise AssertionError(f"the agent on {self.client.name} did not answer within {_ANSWER_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            assert self.process.stderr is not None
            raise AssertionError(f"the agent on {self.client.name} ended: {self.process.stderr.read()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise ActionError(answer["error"], answer["text"])
        return answer["value"]

    def kill(self) -> None:
        """Ends the process without a warning, like the death of its host."""
        self.process.kill()
        self.process.communicate(timeout=10)


@contextlib.contextmanager
def agents(bed: SharedFolder, *, per_host: int = 1) -> Iterator[list[AgentProcess]]:
    """Starts agents on every host, host by host."""
    started = [AgentProcess(client) for client in bed.clients for _ in range(per_host)]
    try:
        yield started
    finally:
        for agent in started:
            if agent.process.poll() is None:
                agent.kill()


def _run_folder(bed: SharedFolder, name: str) -> str:
    (bed.backing / name / "submit").mkdir(parents=True)
    return str(bed.path / name)


def _fails(kind: str, call: Callable[[], Any]) -> str:
    """Returns the message of the error of this class that the call must raise."""
    try:
        value = call()
    except ActionError as error:
        assert error.kind == kind, error
        return error.text
    raise AssertionError(f"it returned {value!r}, and not {kind}")


def claims(bed: SharedFolder, draw: random.Random) -> None:
    """Jobs on two hosts claim a segment at once: one owns it. After its end, one of the next ones does."""
    run = _run_folder(bed, "claims")
    with agents(bed, per_host=2) as jobs:
        previous: AgentProcess | None = None
        for number in range(1, 4):
            at = time.monotonic() + 0.3
            for job, agent in enumerate(jobs):
                agent.send("claim", run=run, token=f"{number}-{job}", at=at + draw.random() * 0.01)
            numbers = [agent.receive() for agent in jobs]
            assert sorted(n for n in numbers if n is not None) == [number], numbers
            owner = next(agent for agent, n in zip(jobs, numbers, strict=True) if n is not None)
            assert owner("owns", number=number)
            if previous is not None:
                assert not previous("owns", number=number - 1)
            owner("release_claim", number=number)
            for agent in jobs:  # within the time for which a host may cache the owner's file
                _until(functools.partial(_is_released, agent, run, number), f"{agent.client.name} sees the release")
            previous = owner
        # the owner's host dies: the claim of a process that no longer renews it is taken over
        assert jobs[0]("claim", run=run, token="last") == 4
        early = jobs[-1]("claim", run=run, token="too early")
        assert early is None, early
        jobs[0].kill()
        assert jobs[-1]("claim", run=run, token="heir") == 5
    _no_leftovers(bed.backing / "claims" / "submit")


def _is_released(agent: AgentProcess, run: str, number: int) -> bool:
    return (agent("newest", run=run) or [])[::2] == [number, True]


def submit_locks(bed: SharedFolder, draw: random.Random) -> None:
    """Processes on two hosts take the submit lock in turn, also after a holder's host has died."""
    run, log = _run_folder(bed, "locks"), bed.backing.parent / "locks.log"
    with agents(bed, per_host=2) as submitters:
        at = time.monotonic() + 0.3
        for agent in submitters:
            agent.send("submit", run=run, log=str(log), hold_s=0.2 * draw.random(), timeout_s=60.0, at=at)
        for agent in submitters:
            agent.receive()
        submitters[0].send("submit", run=run, log=str(log), hold_s=60.0, timeout_s=30.0)
        _until(lambda: any((bed.backing / "locks" / "submit").glob("*.lease")), "the first submitter holds the lock")
        # a live holder keeps the lock for longer than a lease
        text = _fails(
            "DeadlineExceeded", lambda: submitters[-1]("submit", run=run, log=str(log), hold_s=0.0, timeout_s=6.0)
        )
        assert "another process has been submitting it" in text
        submitters[0].kill()
        submitters[-1]("submit", run=run, log=str(log), hold_s=0.0, timeout_s=80.0)
    times = sorted(json.loads(line) for line in log.read_text().splitlines())
    assert len(times) == len(submitters) + 1
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times)), times
    _no_leftovers(bed.backing / "locks" / "submit")


def driver_lock(bed: SharedFolder, draw: random.Random) -> None:
    """A second driver is refused while the first renews its record, and let in when the first's host has died."""
    run = _run_folder(bed, "driver")
    with agents(bed) as (first, second):
        if draw.random() < 0.5:
            first, second = second, first
        second("look", path=run)
        first("drive", run=run)
        for _ in range(2):
            text = _fails("UserError", lambda: second("drive", run=run))
            assert "is being trained by process" in text and first.client.name in text, text
        first("stop_driving")
        _until(lambda: _drives(second, run), "the second driver is let in after the end of the first")
        text = _fails("UserError", lambda: first("drive", run=run))
        assert second.client.name in text
        second.kill()
        _until(lambda: _drives(first, run), "the driver is let in after the death of the other host")


def _drives(agent: AgentProcess, run: str) -> bool:
    try:
        agent("drive", run=run)
    except ActionError as error:
        assert error.kind == "UserError", error
        return False
    return True


#: Driver that counts its starts, trains for some seconds, and writes the marker of its segment last.
_DRIVER = """
import os, signal, sys, time
from pathlib import Path
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import write_json
paths, starts, seconds = RunPaths(Path(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with starts.open("a") as file:
    file.write("start\\n")
time.sleep(seconds)
paths.segments.mkdir(exist_ok=True)
write_json(paths.segment_done(0), {"global_step": 1})
"""


def jobs(bed: SharedFolder, draw: random.Random) -> None:
    """Two hosts submit a segment at once: it starts once, and both wait for it. Its own host can cancel it, and no other."""
    starts, folder = bed.backing.parent / "starts", bed.backing
    driver = folder.parent / "driver.py"
    driver.write_text(_DRIVER)
    run = _run_folder(bed, "jobs")
    command = [sys.executable, str(driver), run, str(starts), "6"]
    with agents(bed) as (first, second):
        for agent in (first, second):
            agent("leases", lease_s=30.0, renew_s=5.0)  # those of the job
        at = time.monotonic() + 0.3
        for agent in (first, second):
            agent.send("run_job", run=run, command=command, wait=True, at=at + draw.random() * 0.2)
        assert {first.receive(), second.receive()} <= {"submitted", "attached", "finished"}
        assert starts.read_text() == "start\n"
        starts.unlink()

        run = _run_folder(bed, "cancelled")
        first("run_job", run=run, command=[*command[:2], run, str(starts), "80"], wait=False)
        _until(starts.exists, "the driver starts")
        _until(lambda: any((folder / "cancelled/submit").glob("*.claim.*")), "the job claims the segment")
        text = _fails("RlhpcError", lambda: second("cancel", run=run))
        assert f"runs on {first.client.name}; cancel it from there" in text, text
        assert any("was cancelled" in line for line in first("cancel", run=run))
        assert starts.read_text() == "start\n"


def registry(bed: SharedFolder, draw: random.Random) -> None:
    """Ranks on another host find the generation and are found; one of an earlier generation is refused."""
    run = _run_folder(bed, "registry")
    with agents(bed) as (driver, rank):
        names = []
        for start in range(3):
            rank("look", path=f"{run}/registry")
            name = driver("generation", run=run)
            names.append(name)
            rank("open_generation", run=run, name=name)
            rank.send("put", name=name, key="actor-0", value=start, at=time.monotonic() + draw.random() * 0.2)
            assert driver("wait_for", name=name, key="actor-0", timeout_s=30.0) == start
            rank.receive()
            for value in range(100, 110):
                rank("put", name=name, key="actor-1", value=value)
            assert driver("wait_for", name=name, key="actor-1", timeout_s=30.0) in range(100, 110)
            _until(functools.partial(_has_record, driver, name, 109), "the driver sees the last record")
            if start:
                _until(lambda: _is_stale(rank, names[-2]), "the earlier generation is refused")
                _fails("StaleGeneration", lambda: rank("put", name=names[-2], key="actor-0", value=0))
        # a driver on the other host, with an older listing, makes a generation without records of the earlier ones
        driver, rank = rank, driver
        name = driver("generation", run=run)
        assert name not in names and driver("members", name=name) == []


def _has_record(agent: AgentProcess, generation: str, value: int) -> bool:
    return bool(agent("get", name=generation, key="actor-1") == value)


def _is_stale(agent: AgentProcess, name: str) -> bool:
    try:
        agent("check_current", name=name)
    except ActionError as error:
        assert error.kind == "StaleGeneration", error
        return True
    return False


def checkpoints(bed: SharedFolder, draw: random.Random) -> None:
    """Ranks on two hosts write a checkpoint; it is sealed with every file. The other host resumes from the newest."""
    run = _run_folder(bed, "saves")
    root = bed.backing / "saves"
    with agents(bed) as (driver, rank):
        rank("look", path=f"{run}/checkpoints")
        for step in (2, 4, 4, 6):
            staging = driver("begin_save", run=run, step=step)
            names = ["actor-0.pt", "actor-1.pt", "critic/weights.pt"]
            reported = {
                name: (rank if number else driver)("write", staging=staging, name=name, size=draw.randrange(1, 20_000))
                for number, name in enumerate(names)
            }
            reported["critic/weights.pt"] = None if draw.random() < 0.5 else reported["critic/weights.pt"]
            driver("commit", step=step, reported=reported)
            checkpoint = root / "checkpoints" / f"global_step_{step}"
            assert verify(checkpoint) == []
            files = set(read_manifest(checkpoint)["files"])
            assert files == {*names, "runner.json"}, files
            if step == 2:
                _until(lambda: rank("steps", run=run) == [2], "the other host lists the first checkpoint")
        driver("hold_open", path=f"{run}/checkpoints/global_step_2/actor-0.pt")
        driver("prune", run=run, keep=2)
        assert not (root / "checkpoints" / "global_step_2").exists()
        driver("begin_save", run=run, step=8)
        driver.kill()
        assert rank("resumable", run=run) == 6
        rank("prune", run=run, keep=1)
        rank("begin_save", run=run, step=8)
        assert verify(root / "checkpoints" / "global_step_6") == []


def exports(bed: SharedFolder, draw: random.Random) -> None:
    """An export replaces another one while a reader has a file of it open."""
    run = _run_folder(bed, "exports")
    target, backing = f"{run}/export/policy", bed.backing / "exports" / "export" / "policy"
    with agents(bed) as (first, second):
        for number in range(3):
            agent = first if number < 2 else second
            agent("export", target=target, texts={"config.json": str(number), "weights": "w" * draw.randrange(10_000)})
            assert (backing / "config.json").read_text() == str(number)
            assert sorted(path.name for path in backing.iterdir()) == ["config.json", "weights"]
            first("hold_open", path=f"{target}/config.json")
        first("let_go")


def metrics(bed: SharedFolder, draw: random.Random) -> None:
    """Rows of metrics are read on the other host while they are written, and each is there once after a resume."""
    run = _run_folder(bed, "metrics")
    with agents(bed) as (driver, reader):
        driver("open_metrics", run=run, resume_step=None)
        for step in range(8):
            driver("log", step=step, values={"train/loss": float(step)})
            rows = reader("rows", run=run)
            assert [row["step"] for row in rows] == list(range(len(rows))) and len(rows) <= step + 1, rows
            if draw.random() < 0.3:
                driver("log", step=step, values={"eval/return": 1.0})  # replaces the committed row
        _until(lambda: len(reader("rows", run=run)) == 8, "the reader sees all rows")
        driver.kill()
        reader("open_metrics", run=run, resume_step=4)
        reader("log", step=5, values={"train/loss": 50.0})
        rows = reader("rows", run=run)
        assert [(row["step"], row["train/loss"]) for row in rows] == [*((s, float(s)) for s in range(5)), (5, 50.0)]


def full_disk(bed: SharedFolder, draw: random.Random) -> None:
    """On a filesystem without space, saves fail with an error and seal nothing; with space again, the run goes on."""
    run, root = _run_folder(bed, "full"), bed.backing / "full"
    error, at = draw.choice(["ENOSPC", "EDQUOT"]), draw.choice(["close", "write"])
    with agents(bed) as (driver, rank):
        driver("open_metrics", run=run, resume_step=None)
        driver("log", step=0, values={"train/loss": 0.0})
        _save(driver, rank, run, 1)
        bed.clients[0].set(full_error=error, full_at=at)
        text = _fails("StorageError", lambda: driver("log", step=1, values={"train/loss": 1.0}))
        assert "metrics could not be written" in text
        text = _fails("CheckpointError", lambda: _save(driver, rank, run, 2))
        assert "checkpoint of step 2 could not be saved" in text
        _fails("OSError", lambda: driver("export", target=f"{run}/export/policy", texts={"config.json": "1"}))
        bed.clients[0].set(full_error="")
        assert not (root / "export" / "policy").exists()
        assert _complete(root) == [1]
        driver("open_metrics", run=run, resume_step=0)
        driver("log", step=1, values={"train/loss": 1.0})
        _save(driver, rank, run, 2)
        rows = [row["step"] for row in driver("rows", run=run)]
        assert (_complete(root), rows) == ([1, 2], [0, 1])


def read_only(bed: SharedFolder, draw: random.Random) -> None:
    """A filesystem that becomes read-only ends saves with an error; claims are refused, and nothing is lost."""
    run, root = _run_folder(bed, "readonly"), bed.backing / "readonly"
    with agents(bed) as (driver, rank):
        _save(driver, rank, run, 1)
        driver("drive", run=run)
        bed.clients[0].set(read_only=True)
        text = _fails("CheckpointError", lambda: _save(driver, rank, run, 2))
        assert "read-only" in text.lower()
        _fails("OSError", lambda: driver("claim", run=run, token="t"))
        bed.clients[0].set(read_only=False)
        assert _complete(root) == [1] and verify(root / "checkpoints" / "global_step_1") == []
        driver("stop_driving")
        _save(driver, rank, run, 2)
        assert _complete(root) == [1, 2]


def _save(driver: AgentProcess, rank: AgentProcess, run: str, step: int) -> None:
    staging = driver("begin_save", run=run, step=step)
    driver("commit", step=step, reported={"a.pt": rank("write", staging=staging, name="a.pt", size=1000)})


def _complete(root: Path) -> list[int]:
    """Steps of the checkpoints that carry the seal, on the server."""
    return sorted(int(path.parent.name.rpartition("_")[2]) for path in root.glob("checkpoints/global_step_*/COMPLETE"))


#: Overrides of the quickstart's task that make it short.
TINY = (
    "runner.segments=1", "runner.max_steps=8", "runner.save_interval=2", "algorithm.rollout_steps=32",
    "algorithm.update_epochs=2", "actor.global_batch_size=64", "env.eval.num_episodes=2",
    "runner.logger.logger_backends=[jsonl]",
)  # fmt: skip


def quickstart(bed: SharedFolder, draw: random.Random) -> None:
    """The quickstart's task trains on one host, whose driver dies; it resumes on the other host, with every step once."""
    runs, root = bed.path / "runs", bed.backing / "runs" / "quickstart"
    (bed.backing / "runs").mkdir()
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", "configs/quickstart.yaml", *TINY, f"runner.run_dir={runs}",
        "runner.resume_dir=auto",
    ]  # fmt: skip
    first, second = bed.clients if draw.random() < 0.5 else bed.clients[::-1]
    driver = first.start(*command, "runner.max_steps=1000")
    _until(lambda: _complete(root)[-1:] >= [2] or driver.poll() is not None, "the first checkpoint")
    assert driver.poll() is None, driver.communicate()
    code, text = second.run(*command)
    assert code == 2 and "is being trained by process" in text, text
    driver.kill()
    driver.communicate(timeout=20)
    last = max(_complete(root))
    code, text = second.run(*command, f"runner.max_steps={last + 4}", timeout_s=240)
    assert code == 0, text
    steps = [json.loads(line)["step"] for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == last + 4, steps
    assert all(verify(checkpoint) == [] for checkpoint in root.glob("checkpoints/global_step_*"))
    assert not list(root.glob("checkpoints/.tmp_*")), "unfinished saves are removed at the next save"


def _until(condition: Callable[[], bool], purpose: str, timeout_s: float = 90.0) -> None:
    patience = Patience(timeout_s)
    while not condition():
        assert not patience.is_over(), f"waited {timeout_s:.0f} s: {purpose}"
        time.sleep(0.1)


def _no_leftovers(folder: Path) -> None:
    names = [path.name for path in folder.iterdir() if ".dead-" in path.name or path.name.endswith(".tmp")]
    assert not names, names


#: Scenarios that pass on every filesystem of `drawn_faults`.
SCENARIOS: dict[str, Callable[[SharedFolder, random.Random], None]] = {
    scenario.__name__: scenario
    for scenario in (
        claims,
        submit_locks,
        driver_lock,
        jobs,
        registry,
        checkpoints,
        exports,
        metrics,
        full_disk,
        read_only,
        quickstart,
    )
}


def drawn_faults(draw: random.Random, seed: int) -> Faults:
    """Returns faults of a client that rlhpc tolerates: it may become slower, but nothing fails."""
    return Faults(
        attr_s=draw.choice([0.0, 1.0, 10.0]),
        entry_s=draw.choice([0.0, 1.0, 3.0]),
        negative_s=draw.choice([0.0, 1.0, 3.0]),
        listing_s=draw.choice([0.0, 2.0, 60.0]),
        delay_s=draw.choice([0.0, 0.0, 0.002]),
        fsync_s=draw.choice([0.0, 0.0, 0.05]),
        flock=draw.choice(["shared", "local", "ENOLCK", "EOPNOTSUPP"]),
        lost_replies=draw.choice([0.0, 0.1, 0.3]),
        rename_error=draw.choice(["ENOENT", "EEXIST"]),
        stale_handles=draw.choice([False, True]),
        seed=seed,
    )
