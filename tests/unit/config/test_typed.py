"""Code that reads a configuration is checked against its dataclass; what stands beside the dataclasses agrees with them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.sections import JobConfig, ProfileConfig, RunConfig, RunnerConfig, TraceConfig
from rlhpc.config.typed import alone, default_section, plain, select, with_value
from rlhpc.embodied.config import BcConfig, EvalEnvConfig, PpoConfig, plays
from rlhpc.language.config.run import GrpoConfig
from rlhpc.runtime.cluster_config import ElasticClusterConfig, ElasticConfig, Key, NodeGroupConfig

ROOT = Path(__file__).resolve().parents[3]
#: Every line with a comment has one key right and one wrong, which the comment repeats.
CODE = """
from rlhpc.embodied.task_types import PPO
from rlhpc.embodied.workers.env import EnvWorker
from rlhpc.embodied.workers.ppo_actor import EmbodiedActor
from rlhpc.embodied.workers.off_policy import OffPolicyRolloutWorker
from rlhpc.embodied.runners.rollout_runner import EmbodiedRunner
from rlhpc.embodied.runners.off_policy_runner import OffPolicyRunner
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.cluster import read_key

class MyActor(EmbodiedActor):
    def look(self) -> int:
        return self.cfg.algorithm.rollout_steps + self.cfg.algorithm.rollout_stepz  # rollout_stepz

class MyRunner(EmbodiedRunner):
    def look(self) -> float:
        return self.cfg.algorithm.gamma + self.cfg.algorithm.tau  # tau

class MySacRunner(OffPolicyRunner):
    def look(self) -> float:
        return self.cfg.algorithm.tau + self.cfg.algorithm.clip_ratio_low  # clip_ratio_low

class MyRollout(OffPolicyRolloutWorker):
    def look(self) -> bool:
        return self.cfg.env.train.auto_reset and self.cfg.env.train.autoreset  # autoreset

class MyEnv(EnvWorker):
    def look(self) -> int:
        return self.cfg.rollout.pipeline_stage_num + self.cfg.rollout.stages  # stages

cfg = load_config("run.yaml")
print(cfg.runner.name, cfg.runner.nmae)  # nmae
print(PPO.config().actor.optim.lr, PPO.config().actor.optim.learning_rate)  # learning_rate
print(read_key({}, "num_nodes"), read_key({}, "nodes"))  # nodes
"""

#: Of the project's own code alone: the packages that it uses have no say in this, and take most of the time.
LIGHT = """
[mypy]
python_version = 3.11
check_untyped_defs = true
disallow_untyped_defs = true
error_summary = false
ignore_missing_imports = true
[mypy-torch.*,numpy.*,gymnasium.*,PIL.*,zmq.*,omegaconf.*,yaml.*]
follow_imports = skip
"""


@pytest.mark.long
def test_a_misspelt_key_is_a_type_error(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(CODE)
    settings = tmp_path / "mypy.ini"
    settings.write_text(LIGHT)
    argv = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path), str(snippet)]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = {int(line): text for line, text in re.findall(r"snippet\.py:(\d+): error: (.*)", said.stdout)}
    wrong = {n: line.rpartition("  # ")[2] for n, line in enumerate(CODE.splitlines(), 1) if "  # " in line}
    assert found.keys() == wrong.keys(), said.stdout + said.stderr
    assert all(re.search(rf"""['"]{key}['"]""", found[n]) for n, key in wrong.items()), said.stdout


def test_keys_that_are_read_by_name_exist() -> None:
    classes = (
        ElasticClusterConfig,
        NodeGroupConfig,
        ElasticConfig,
        JobConfig,
        RunConfig,
        RunnerConfig,
        TraceConfig,
        ProfileConfig,
    )
    known = {field.name for cls in classes for field in dataclasses.fields(cls)} | {"name", "eval_job", "convert_job"}
    assert set(get_args(Key)) <= known
    assert {field.name for cls in classes[:3] for field in dataclasses.fields(cls)} <= set(get_args(Key))


def test_a_changed_copy_leaves_the_original() -> None:
    cfg: PpoConfig = OmegaConf.structured(PpoConfig)
    cfg.env.train.env_id, cfg.env.train.kwargs = "CartPole-v1", {"a": 1, "b": 2}
    OmegaConf.set_readonly(cfg, True)
    other = with_value(cfg, "runner.init_from", "somewhere")
    assert (other.runner.init_from, cfg.runner.init_from) == ("somewhere", None)
    assert with_value(cfg.env.train, "kwargs", {"b": 3}).kwargs == {"b": 3} and cfg.env.train.kwargs == {"a": 1, "b": 2}
    side: EvalEnvConfig = with_value(cfg.env.eval, "simulators", 0)
    assert (side.simulators, cfg.env.eval.simulators, side.env_id) == (0, None, "CartPole-v1")
    for same in (cfg, other):
        with pytest.raises(OmegaConfBaseException):
            same.runner.seed = 2


def test_a_section_alone_needs_no_other() -> None:
    cfg: PpoConfig = OmegaConf.structured(PpoConfig)
    cfg.env.train.env_id = "CartPole-v1"
    moved = alone(cfg.env.eval)
    cfg.env.train.env_id = "Acrobot-v1"
    assert (moved.env_id, cfg.env.eval.env_id) == ("CartPole-v1", "Acrobot-v1")
    assert plain(cfg.env.eval, resolve=False)["env_id"] == "${env.train.env_id}" and plain({"a": 1}) == {"a": 1}
    assert select(cfg, "env.eval.env_id") == "Acrobot-v1" and select(cfg, "env.eval.no_such") is None


def test_which_runs_have_simulators() -> None:
    played = [plays(OmegaConf.structured(cls)) for cls in (PpoConfig, BcConfig, GrpoConfig)]
    assert played == [True, True, False]


def test_what_is_untouched_is_what_omegaconf_makes_and_each_callers_own() -> None:
    @dataclasses.dataclass
    class Local:
        number: int = 1

    for cls in (PpoConfig, BcConfig, GrpoConfig, Local):
        made = OmegaConf.structured(cls)
        for found in (default_section(cls), default_section(cls)):
            assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(made)
            assert OmegaConf.get_type(found) is cls and OmegaConf.missing_keys(found) == OmegaConf.missing_keys(made)
            key = "number" if cls is Local else "runner.seed"
            for name, value in ((key, "none"), ("no_such", 1)):
                with pytest.raises(OmegaConfBaseException):
                    OmegaConf.update(found, name, value)
            OmegaConf.update(found, key, 7)
            assert OmegaConf.select(found, key) == 7
