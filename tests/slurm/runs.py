"""A run on the test cluster, started as a person would: through the command line, from the login side."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tests.eventually import Patience
from tests.planted import plant

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "embodied" / "cartpole_het.yaml"
#: What the test cluster calls things.
SITE = {
    "cluster": {
        "time": "00:30:00",
        "setup": ["export OMP_NUM_THREADS=1"],
        "node_groups": [
            {"label": "gpu", "partition": "gpu", "gres_name": "gpu:fake"},
            {"label": "cpu", "partition": "cpu"},
        ],
    }
}

#: Steps in which time passes rather than work is done, of which the machine has enough: environments that wait.
LIGHT = ("algorithm.update_epochs=1", "env.train.wrappers=[waiting_env:Waiting]")
WAITING = """
import time
import gymnasium

class Waiting(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.0005)
        return self.env.step(action)
"""


def until(condition: Callable[[], Any], what: str, deadline_s: float = 90.0) -> Any:
    """The condition's value as soon as it is true."""
    patience = Patience(deadline_s)
    while not (value := condition()):
        assert not patience.is_over(), f"waited {deadline_s:.0f} s until {what}"
        time.sleep(0.1)
    return value


class SlurmRun:
    """One run, in a folder of its own. `cluster` is the SlurmCluster that it runs on; of `light` ones see `LIGHT`."""

    #: Commands that wait for a run. Of a test that failed some may do so still.
    submitted: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(
        self, cluster: Any, folder: Path, *overrides: str, config: Path = CONFIG, name: str = "run", light: bool = False
    ) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.site = folder / "site.yaml"
        self.site.write_text(yaml.safe_dump(SITE))
        self.config, self.root = config, folder / "runs" / name
        self.overrides = [
            f"runner.run_dir={folder / 'runs'}", f"runner.name={name}", "runner.segments=1",
            "runner.logger.logger_backends=[jsonl]", *(LIGHT if light else ()), *overrides,
        ]  # fmt: skip
        self.environment = {**os.environ, **cluster.env(), "OMP_NUM_THREADS": "1"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if light:
            (folder / "waiting_env.py").write_text(WAITING)
            self.environment["PYTHONPATH"] = f"{folder}:{ROOT}"
        self.log = folder / f"{name}.log"
        #: Put before `rlhpc submit`, to enter another host.
        self.login_words: list[str] = []
        self.here = folder / "here"
        if not self.here.exists():  # whoever imports from where a run is submitted ends
            plant(self.here)

    # -- commands -------------------------------------------------------------------------------------------------

    def rlhpc(self, *words: str, timeout: float = 120, code: int | None = 0) -> str:
        """Output of an rlhpc command."""
        done = subprocess.run(
            [sys.executable, "-m", "rlhpc.cli", *words], env=self.environment, cwd=ROOT, text=True, timeout=timeout,
            capture_output=True,
        )  # fmt: skip
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, *more: str) -> subprocess.Popen[str]:
        """`rlhpc submit`, which waits; its output goes to `log`."""
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [*self.login_words, sys.executable, "-P", "-m", "rlhpc.cli", "submit", str(self.config), "--executor", "slurm",
                 "--site", str(self.site), *self.overrides, *more],
                env=self.environment, cwd=self.here, stdout=log, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self.submitted.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout: float = 300, code: int = 0) -> str:
        """Waits for a submit command to end; what it said."""
        try:
            found = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"not finished after {timeout:.0f} s\n{self.account()}") from None
        assert found == code, f"exit code {found}\n{self.account()}"
        return self.log.read_text()

    def account(self) -> str:
        """All that may explain what went wrong."""
        files = [self.log, *sorted((self.root / "logs").rglob("*.err")), *sorted((self.root / "submit").glob("*.err"))]
        parts = [f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.is_file()]
        parts.append(f"--- squeue\n{self.cluster.run('squeue', '--all')}")
        return "\n".join(parts)

    # -- what the run left ----------------------------------------------------------------------------------------

    def json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.root / name).read_text())
        except (OSError, ValueError):
            return {}

    @property
    def job(self) -> str:
        return str(self.json("submit/segment_0.json").get("job_id", ""))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return list(self.json("submit/segment_0.attempts.json").get("attempts", []))

    @property
    def recoveries(self) -> list[int]:
        """Steps from which environments and rollout started again alone."""
        try:
            said = (self.root / "logs" / "segment_0" / "driver.err").read_text()
        except OSError:
            return []
        return [int(step) for step in re.findall(r"start again from global_step_(\d+)", said)]

    def generation(self) -> str:
        try:
            return (self.root / "registry" / "current").read_text()
        except OSError:
            return ""

    def members(self) -> dict[str, dict[str, Any]]:
        """Records of the ranks of the current generation."""
        found = {}
        for path in (self.root / "registry" / self.generation() / "members").glob("*.json"):
            try:
                found[path.stem] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
        return found

    def committed(self) -> int:
        """Step of the newest complete checkpoint."""
        steps = [int(p.parent.name.rpartition("_")[2]) for p in self.root.glob("checkpoints/global_step_*/COMPLETE")]
        return max(steps, default=-1)

    def step(self) -> int:
        return int(self.json("status.json").get("step", -1))

    def rows(self) -> list[dict[str, Any]]:
        """Metric rows without the clock's."""
        lines = (self.root / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]

    def weights(self, step: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        [file] = (self.root / "checkpoints" / f"global_step_{step}").glob("**/model*.safetensors")
        return load_file(file)

    def training(self, beyond: int = 0, deadline_s: float = 90) -> None:
        """Waits until a step beyond that one is committed."""
        until(lambda: self.committed() > beyond, f"a step beyond {beyond} is committed\n{self.account()}", deadline_s)


def kill(pid: int) -> None:
    """SIGKILL; the process may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
