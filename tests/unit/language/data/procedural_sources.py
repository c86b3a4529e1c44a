"""Prompts of a procedural source."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import Any

from omegaconf import OmegaConf

from rlhpc.language.config.data import DataSourceConfig


def config(source: str, **fields: Any) -> Any:
    return OmegaConf.structured(DataSourceConfig(source=source, **fields))


def questions(dataset: Any) -> list[str]:
    return [problem.messages[-1]["content"] for problem in dataset]


# What some tasks ask hangs on the order of sets of texts, which differs from process to process.
ALL_TASKS = """
import json, pickle, sys
from types import SimpleNamespace
from reasoning_gym.factory import DATASETS
from rlhpc.language.data.reasoning_gym import ReasoningGymProblems
out, sys.stdout = sys.stdout.buffer, sys.stderr
problems = {}
for task in json.loads(sys.argv[1]) or sorted(set(DATASETS) - {"composite"}):
    cfg = SimpleNamespace(source="reasoning_gym", size=10, seed=5, eval_fraction=0.0, kwargs={"task": task})
    dataset = ReasoningGymProblems(cfg, part="eval", key="data.eval")
    problems[task] = [dataset[i] for i in json.loads(sys.argv[2])]
out.write(pickle.dumps(problems))
"""


def made_elsewhere(hash_seed: str, tasks: list[str], positions: list[int]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALL_TASKS, json.dumps(tasks), json.dumps(positions)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
    )
    made: dict[str, Any] = pickle.loads(done.stdout)
    return made
