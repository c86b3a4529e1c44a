"""Process of rlhpc on a simulated host, driven by lines of JSON: `python -m tests.filesystems.agent`.

Each line is `{"do": name, ...arguments}`; `at` delays the action until that monotonic time, which all hosts share. The
answer is `{"value": ...}`, or `{"error": class, "text": message}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.checkpoint.manifest import digest
from rlhpc.checkpoint.store import CheckpointWriter, clean_leftovers, find_resumable, prune
from rlhpc.jobs import driver_lock, lease, segment
from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import Claim, SegmentJournal
from rlhpc.jobs.submit import Submission, SubmitRequest, WaitOptions
from rlhpc.metrics.logger import MetricLogger, read_metrics
from rlhpc.runtime import files
from rlhpc.runtime.registry import MEMBERS, CurveKeys, GenerationFolder
from tests.filesystems.naive import NAIVE, VERSIONS


class Agent:
    """Actions of a process; what it holds between two actions is in its attributes."""

    def __init__(self) -> None:
        self._claims: dict[int, Claim] = {}
        self._blocks: dict[str, contextlib.ExitStack] = {}
        self._writers: dict[int, CheckpointWriter] = {}
        self._registries: dict[str, GenerationFolder] = {}
        self._metrics: MetricLogger | None = None
        self._descriptors: list[Any] = []

    def leases(self, lease_s: float, renew_s: float) -> None:
        """Shortens the leases of this process."""
        lease.LEASE_S = segment.LEASE_S = lease_s
        lease.RENEW_S = renew_s

    # -- claims, the submit lock and the driver lock --

    def claim(self, run: str, token: str) -> int | None:
        """Takes the claim of segment 0; returns its number, or None."""
        claim = Claim.take(SegmentJournal(RunPaths(Path(run)), 0), token=token, job_id=token, executor="local")
        if claim is None:
            return None
        self._claims[claim.number] = claim
        return claim.number

    def owns(self, number: int) -> bool:
        return self._claims[number].owns()

    def release_claim(self, number: int) -> None:
        self._claims[number].update(released=True)

    def newest(self, run: str) -> list[Any] | None:
        claim = Claim.newest(SegmentJournal(RunPaths(Path(run)), 0))
        return None if claim is None else [claim.number, claim.token, claim.released]

    def submit(self, run: str, log: str, hold_s: float, timeout_s: float) -> None:
        """Holds the submit lock for a while, and logs when."""
        with SegmentJournal(RunPaths(Path(run)), 0).submit_lock(timeout_s):
            begin = time.monotonic()
            time.sleep(hold_s)
            line = json.dumps([begin, time.monotonic()]) + "\n"
            with open(log, "a") as file:
                file.write(line)

    def drive(self, run: str) -> None:
        """Takes the driver lock."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(driver_lock.sole_driver(RunPaths(Path(run))))
            self._blocks["driver"] = stack.pop_all()

    def stop_driving(self) -> None:
        self._blocks.pop("driver").close()

    # -- jobs --

    def run_job(self, run: str, command: list[str], wait: bool) -> str:
        """Submits the driver of segment 0 as a local job, or attaches to its job, and may wait; returns which of the two."""
        request = SubmitRequest(Path(run), command, executor="local")
        return str(Submission(request, WaitOptions(enabled=wait, poll_s=0.2, deadline_s=80.0)).run()["state"])

    def cancel(self, run: str) -> list[str]:
        return cancel(RunPaths(Path(run)), grace_s=20.0)

    # -- registry --

    def generation(self, run: str) -> str:
        """Starts the next generation; returns its name."""
        registry = GenerationFolder.create_next(RunPaths(Path(run)).registry)
        registry.save_keys(CurveKeys(b"public", b"secret"))
        self._registries[registry.generation] = registry
        return registry.generation

    def open_generation(self, run: str, name: str) -> None:
        self._registries[name] = GenerationFolder(RunPaths(Path(run)).registry / name)

    def members(self, name: str) -> list[str]:
        return sorted(path.name for path in (self._registries[name].root / MEMBERS).iterdir())

    def put(self, name: str, key: str, value: Any) -> None:
        self._registries[name].put(MEMBERS, key, {"value": value})

    def wait_for(self, name: str, key: str, timeout_s: float) -> Any:
        return self._registries[name].wait_for(MEMBERS, key, timeout_s, f"the record of {key}")["value"]

    def get(self, name: str, key: str) -> Any:
        record = self._registries[name].get(MEMBERS, key)
        return record and record["value"]

    def check_current(self, name: str) -> None:
        self._registries[name].check_current()

    # -- checkpoints and exports --

    def begin_save(self, run: str, step: int) -> str:
        """Begins a checkpoint; returns its staging folder, which this host has listed once."""
        writer = CheckpointWriter(RunPaths(Path(run)), step).__enter__()
        os.listdir(writer.staging)
        self._writers[step] = writer
        return str(writer.staging)

    def write(self, staging: str, name: str, size: int) -> list[Any]:
        """Writes a file of a rank; returns its size and checksum."""
        path = Path(staging) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_durably(path, os.urandom(size))
        return list(digest(path))

    def commit(self, step: int, reported: dict[str, list[Any] | None]) -> None:
        """Commits the checkpoint with the reports of ranks."""
        writer = self._writers.pop(step)
        try:
            writer.add_bytes("runner.json", b"{}")
            writer.commit({}, {name: (entry[0], entry[1]) if entry else None for name, entry in reported.items()})
        except BaseException as error:
            writer.__exit__(type(error), error, error.__traceback__)
            raise
        writer.__exit__(None, None, None)

    def prune(self, run: str, keep: int) -> list[str]:
        return [path.name for path in prune(RunPaths(Path(run)), keep)]

    def clean(self, run: str) -> int:
        return len(clean_leftovers(RunPaths(Path(run))))

    def steps(self, run: str) -> list[int]:
        """Lists the checkpoints, and keeps the listing in this host's cache."""
        return [step for step, _ in RunPaths(Path(run)).checkpoint_steps()]

    def resumable(self, run: str) -> int:
        return find_resumable(RunPaths(Path(run)), "auto").step

    def export(self, target: str, texts: dict[str, str]) -> None:
        with filled_folder(Path(target)) as folder:
            for name, text in texts.items():
                (folder / name).write_text(text)

    # -- metrics --

    def open_metrics(self, run: str, resume_step: int | None) -> None:
        if self._metrics is not None:
            with contextlib.suppress(Exception):
                self._metrics.close()
        self._metrics = MetricLogger(RunPaths(Path(run)), [], resume_step=resume_step)

    def log(self, step: int, values: dict[str, float]) -> None:
        assert self._metrics is not None
        self._metrics.log(step, values)
        self._metrics.commit()

    def rows(self, run: str) -> list[dict[str, Any]]:
        return read_metrics(RunPaths(Path(run)).metrics)

    # -- files as other programs use them --

    def look(self, path: str) -> bool:
        """Looks a path up, so that this host caches the answer."""
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def hold_open(self, path: str) -> None:
        """Opens a file, as a viewer or a tail does."""
        self._descriptors.append(open(path, "rb"))  # noqa: SIM115

    def let_go(self) -> None:
        for file in self._descriptors:
            file.close()
        self._descriptors.clear()


def main() -> None:
    if version := os.environ.get(NAIVE):
        VERSIONS[version]()
    agent = Agent()
    print(json.dumps({"value": "ready"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        action: Callable[..., Any] = getattr(agent, order.pop("do"))
        time.sleep(max(0.0, order.pop("at", 0.0) - time.monotonic()))
        try:
            answer = {"value": action(**order)}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
