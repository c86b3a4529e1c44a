"""Files that one training step executes: `python -m tests.structure.steps [CHECKOUT]`.

Runs the smallest GRPO run and the quickstart's PPO run. Counts, over all processes and threads, the files of `rlhpc` with a
function that was called between the end of step 3 and the end of step 4. Timers of the runtime add a file or two now and then,
so the three steps after it are counted too, and the smallest number holds. All lie in the middle of a run: its first step
still builds, and its last one synchronizes no weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).with_name("called_functions")
#: The steps whose files are counted, and the last step of the run.
STEPS, LAST = (4, 5, 6, 7), 8
#: Times of files and of records are this coarse. The steps' ends are widened by it: what lies there is called in every step.
CLOCK_NS = 10_000_000
#: The smallest GRPO run: one rank a role, the hf engine, rewards in the rollout process, no critic and no reference.
GRPO = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{name: run, run_dir: {folder}, max_steps: {last}, logger: {{logger_backends: [jsonl]}}}}
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: math}}]}}
algorithm: {{group_size: 4}}
rollout: {{max_new_tokens: 6, max_batch_size: 32}}
actor:
  global_batch_size: 32
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 32, layers: 1, heads: 2}}}}
  optim: {{lr: 3.0e-3}}
"""
PPO = """
defaults: [{root}/configs/quickstart.yaml]
runner: {{name: run, run_dir: {folder}, max_steps: {last}, segments: 1, logger: {{logger_backends: [jsonl]}}}}
"""
RUNS = {"grpo": GRPO, "ppo": PPO}


@dataclass(frozen=True)
class Call:
    """A recorded call of a function.

    Attributes:
        time_ns: Time of the call, in nanoseconds since the epoch.
        path: Path of the function's file, from `rlhpc/` on.
        function: Qualified name of the function.
    """

    time_ns: int
    path: str
    function: str


@dataclass(frozen=True)
class StepFiles:
    """Files and functions of one step.

    Attributes:
        functions: File → the qualified names of its functions that were called.
    """

    functions: dict[str, set[str]]

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self.functions)

    def by_package(self) -> Counter[str]:
        """Returns the number of files in each top-level package."""
        return Counter(path.split("/")[1] for path in self.functions)

    def count_in(self, *packages: str) -> int:
        """Returns the number of files in these top-level packages together."""
        counts = self.by_package()
        return sum(counts[package] for package in packages)

    def table(self) -> str:
        """Formats the counts by package, then the list of files with their numbers of functions."""
        rows = [f"{number:5}  rlhpc/{package}" for package, number in self.by_package().most_common()]
        files = [f"{len(functions):5}  {path}" for path, functions in sorted(self.functions.items())]
        total = sum(map(len, self.functions.values()))
        return "\n".join([f"{len(self)} files, {total} functions", *rows, "functions of each file:", *files])


def recording(folder: Path, package: Path) -> dict[str, str]:
    """Returns the environment of a process that records calls, and those that it starts, too.

    Args:
        folder: Where the records go.
        package: Folder of the package whose functions are recorded.
    """
    return {
        **os.environ,
        "PYTHONPATH": str(HOOK),
        "RLHPC_CALLED_FUNCTIONS": str(folder),
        "RLHPC_CALLED_PACKAGE": str(package.resolve()),
    }


def wait_for_rows(process: subprocess.Popen[bytes], metrics: Path, timeout_s: float) -> dict[int, tuple[int, int]]:
    """Waits for a run's end.

    Returns:
        Number of rows in its metrics file → times before and after which the last of them was written, in nanoseconds since
        the epoch.

    Raises:
        TimeoutError: It takes longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    times: dict[int, tuple[int, int]] = {}
    size = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run has not ended within {timeout_s:.0f} s")
        if metrics.exists() and metrics.stat().st_size != size:
            written, content = metrics.stat().st_mtime_ns, metrics.read_bytes()
            size = len(content)
            times.setdefault(content.count(b"\n"), (written - CLOCK_NS, time.time_ns()))
        time.sleep(0.001 if times else 0.01)
    return times


def read_calls(folder: Path) -> list[Call]:
    """Returns the calls that the processes have recorded."""
    calls = []
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            time_ns, path, function = line.split("\t")
            calls.append(Call(int(time_ns), path, function))
    return calls


def files_of_step(calls: list[Call], begin_ns: int, end_ns: int) -> StepFiles:
    """Returns the files and functions that were called after `begin_ns`, up to `end_ns`."""
    functions: dict[str, set[str]] = {}
    for call in calls:
        if begin_ns < call.time_ns <= end_ns:
            functions.setdefault(call.path, set()).add(call.function)
    return StepFiles(functions)


def run_and_count(name: str, folder: Path, checkout: Path = ROOT, timeout_s: float = 400) -> StepFiles:
    """Trains and returns the files of a step in the middle of the run.

    Args:
        name: One of `RUNS`.
        folder: An empty folder for the run and its records.
        checkout: The checkout whose package runs.
        timeout_s: Limit of the run's time.

    Raises:
        RuntimeError: The run fails, or its steps follow each other too fast to be told apart.
        TimeoutError: The run takes too long.
    """
    records, config = folder / "calls", folder / "run.yaml"
    records.mkdir(parents=True)
    config.write_text(RUNS[name].format(root=checkout, folder=folder, last=LAST))
    environment = recording(records, checkout / "rlhpc") | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f"{os.pathsep}{checkout}"
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhpc.cli", "train", str(config)],
            cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            times = wait_for_rows(process, folder / "run" / "metrics.jsonl", timeout_s)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    if process.returncode != 0:
        raise RuntimeError(f"the {name} run ended with status {process.returncode}:\n{log.read_text()}")
    if unseen := {STEPS[0] - 1, *STEPS} - times.keys():
        raise RuntimeError(f"the ends of steps {sorted(unseen)} were not seen")
    calls = read_calls(records)
    windows = [(times[step - 1][0], times[step][1]) for step in STEPS]
    return min((files_of_step(calls, begin, end) for begin, end in windows), key=len)


def main() -> None:
    """Prints the files of a step of each run."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure.steps", description="Files of a training step.")
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--run", choices=RUNS, action="append", help="only this run")
    options = parser.parse_args()
    for name in options.run or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {run_and_count(name, Path(folder), options.checkout.resolve()).table()}\n")


if __name__ == "__main__":
    main()
