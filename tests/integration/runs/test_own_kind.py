"""A kind of run from outside the package: its own keys, workers, loop, evaluation, export, curves. Nothing in rlhpc knows
it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

BANDIT = '''
import json
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc import ConfigError, Worker
from rlhpc.config.constraints import COUNT
from rlhpc.config.sections import RunConfig
from rlhpc.metrics.logger import series
from rlhpc.metrics.charts import Line, line_chart
from rlhpc.runs.preflight import Check, Need, Resource
from rlhpc.runs.task_type import ConfigChecks, GroupSpec, Kind, Offline, Parts, Reporting, TaskType
from rlhpc.runs.runner import Runner


@dataclass
class BanditSection:
    """The bandit."""

    arms: int = 4
    """How many."""
    rate: float = 0.5
    """How far a step goes."""


@dataclass
class BanditConfig(RunConfig):
    """A run of the bandit."""

    bandit: BanditSection = field(default_factory=BanditSection)


class Player(Worker):
    def __init__(self, cfg):
        super().__init__()
        self.values = [0.0] * cfg.bandit.arms
        self.rate = cfg.bandit.rate

    def pull(self, step):
        arm = step % len(self.values)
        self.values[arm] += self.rate * (arm - self.values[arm])
        return sum(self.values)

    def save(self, folder):
        Path(folder, f"player-{self.rank}.json").write_text(json.dumps(self.values))

    def load(self, folder):
        self.values = json.loads(Path(folder, f"player-{self.rank}.json").read_text())


class BanditRunner(Runner):
    def __init__(self, cfg, player, *, run=None, stop=None):
        super().__init__(cfg, {"player": player}, run=run, stop=stop)

    def build(self):
        pass

    def one_step(self):
        value = self.groups["player"].pull(self.step + 1).wait(self.timeout)[0]
        self.step += 1
        return {"train/value": value}


class BanditChecks(ConfigChecks):
    ranges = {"bandit.arms": COUNT}

    def check(self, cfg, fail, *, training):
        if cfg.bandit.arms > 9:
            raise fail("bandit.arms", "nine are enough")


class BanditOffline(Offline):
    def evaluate(self, cfg, checkpoint, *, suite, episodes, output, trust_code):
        values = json.loads((checkpoint / "player-0.json").read_text())
        return f"best arm {max(range(len(values)), key=values.__getitem__)}"


class BanditReporting(Reporting):
    def charts(self, paths, rows):
        return {"value": line_chart("Value", "global step", "value", [Line("", *series(rows, "train/value"))])}

    def parts(self, paths, rows, *, linked):
        return Parts("a bandit", "<p>cards</p>", [], "<p>none</p>", [], {}, ("train/value", "value"))


KIND = TaskType("bandit", BanditConfig, GroupSpec({"player": "own_bandit:Player"}), "own_bandit:BanditRunner",
                checks=BanditChecks(), offline=BanditOffline("bandit"), reporting=BanditReporting({"value": "Value"}))


class FormerBandit(Kind):
    """As packages declared a task type before it had parts."""

    def checks(self, cfg, ranks):
        yield Check("the arms", lambda: print("former check", cfg.bandit.arms), Resource(Need.FILES))

    def evaluate(self, cfg, checkpoint, *, suite, episodes, output, trust_code):
        return BanditOffline("former").evaluate(
            cfg, checkpoint, suite=suite, episodes=episodes, output=output, trust_code=trust_code
        )

    def charts(self, paths, rows):
        return BanditReporting().charts(paths, rows)


FORMER = FormerBandit("former", BanditConfig, {"player": "own_bandit:Player"}, "own_bandit:BanditRunner",
                      curves={"value": "Value"}, ranges={"bandit.arms": COUNT}, expendable=frozenset({"player"}))
'''
CONFIG = """
cluster: {accelerators_per_node: 0, component_placement: {player: 0}}
runner: {task_type: bandit, name: arms, max_steps: 8, save_interval: 4}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package that offers the kind as an entry point."""
    folder = tmp_path_factory.mktemp("bandit")
    site = folder / "site"
    about = site / "own_bandit-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "own_bandit.py").write_text(BANDIT)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-bandit\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rlhpc.kinds]\nbandit = own_bandit:KIND\nformer = own_bandit:FORMER\n")
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def rlhpc(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(part for part in (str(folder / "site"), os.environ.get("PYTHONPATH", "")) if part)
    return warm.run(
        [sys.executable, "-P", "-m", "rlhpc.cli", *words], cwd=folder, text=True, capture_output=True, timeout=200,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip


def test_it_is_trained_evaluated_and_reported(folder: Path) -> None:
    trained = rlhpc(folder, "train", "run.yaml")
    assert trained.returncode == 0, trained.stderr
    again = rlhpc(folder, "train", "run.yaml", "runner.max_steps=12", "runner.resume_dir=auto")
    assert again.returncode == 0, again.stderr
    rows = [json.loads(line) for line in (folder / "runs" / "arms" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    # Twelve pulls of four arms: three of each, half the way a pull.
    assert rows[-1]["train/value"] == pytest.approx((1 - 0.5**3) * (1 + 2 + 3))
    evaluated = rlhpc(folder, "eval", "--run", "runs/arms")
    assert evaluated.returncode == 0 and evaluated.stdout.strip().startswith("global_step_12: best arm 3"), evaluated
    reported = rlhpc(folder, "report", "runs/arms", "--curves", "curves")
    assert reported.returncode == 0 and (folder / "curves" / "value.svg").is_file(), reported.stderr
    assert "a bandit" in (folder / "runs" / "arms" / "report" / "index.html").read_text()


def test_a_former_kind_is_a_task_type_for_two_releases(folder: Path) -> None:
    words = ("runner.task_type=former", "runner.name=former", "runner.max_steps=4")
    trained = rlhpc(folder, "train", "run.yaml", *words)
    assert trained.returncode == 0 and "former check 4" in trained.stdout, trained.stderr
    assert "the task type 'former' is a Kind, which works for two releases" in trained.stderr
    evaluated = rlhpc(folder, "eval", "--run", "runs/former")
    assert evaluated.returncode == 0 and evaluated.stdout.strip().startswith("global_step_4: best arm"), evaluated
    reported = rlhpc(folder, "report", "runs/former", "--curves", "former")
    assert reported.returncode == 0 and (folder / "former" / "value.svg").is_file(), reported.stderr
    refused = rlhpc(folder, "convert", "--run", "runs/former")
    assert refused.returncode == 2 and "runs of kind former have no export" in refused.stderr


def test_its_keys_are_its_own(folder: Path) -> None:
    for word, said in {
        "bandit.arms=0": "bandit.arms is 0; it must be greater than 0",
        "bandit.arms=10": "bandit.arms is 10; nine are enough",
        "bandit.armz=3": "unknown key bandit.armz; did you mean bandit.arms?",
        "algorithm.gamma=0.5": "algorithm is for task types that this one (bandit) is not: embodied",
        "runner.task_type=embodied": "cluster.component_placement.player: no such component",
    }.items():
        refused = rlhpc(
            folder, "plan", "run.yaml", *(["env.train.env_id=CartPole-v1"] if "embodied" in word else []), word
        )
        assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    refused = rlhpc(folder, "convert", "--run", "runs/arms")
    assert refused.returncode == 2 and "runs of kind bandit have no export" in refused.stderr
