"""Vision-language-action policies by the commands a user types: demonstrations, imitation, then GRPO or PPO from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc import cli

pytest.importorskip("transformers")
pytest.importorskip("peft")

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "cluster": {"component_placement": {"actor,rollout,env": 0}},
    "runner": {"name": "run", "seed": 1, "max_steps": 1, "logger": {"logger_backends": ["jsonl"]}},
    "algorithm": {
        "rollout_steps": 6, "update_epochs": 1, "logprob_type": "token_level", "gamma": 0.9,
    },
    "env": {"train": {"env_id": "square:Square-v0", "num_envs": 4}, "eval": {"num_envs": 2, "num_episodes": 2}},
    "actor": {
        "global_batch_size": 24, "micro_batch_size": 12, "optim": {"lr": 1.0e-3},
        "model": {"model_type": "vla", "model_path": "builtin:tiny", "num_action_chunks": 2},
    },
}  # fmt: skip
CLONING = {
    "cluster": {"component_placement": {"actor": 0}},
    "runner": {**CONFIG["runner"], "task_type": "bc"}, "actor": CONFIG["actor"],
    "env": {**CONFIG["env"], "train": {"env_id": "square:Square-v0"}},
    "algorithm": {"update_epochs": 1, "gamma": 0.9}, "demos": {"path": "demos.h5"},
}  # fmt: skip
GRPO = [
    "algorithm.adv_type=grpo", "algorithm.value_coef=0", "env.train.group_size=2", "env.train.auto_reset=false",
    "env.train.ignore_terminations=true", "env.eval.ignore_terminations=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a configuration and a few demonstrations, to be in."""
    folder = tmp_path_factory.mktemp("vla")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(HERE))
        Path("vla.yaml").write_text(yaml.safe_dump(CONFIG))
        Path("cloning.yaml").write_text(yaml.safe_dump(CLONING))
        command = ["record", "--expert", "square:expert", "--config", "vla.yaml", "--episodes", "6"]
        assert cli.main([*command, "--output", "demos.h5"]) == 0
        yield folder


def train(name: str, *overrides: str, config: str = "vla.yaml") -> list[dict[str, Any]]:
    assert cli.main(["train", config, f"runner.name={name}", *overrides]) == 0
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def test_imitation_then_grpo_with_action_tokens(here: Path) -> None:
    rows = train("bc", "runner.max_steps=3", config="cloning.yaml")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    (row,) = train("grpo", *GRPO, "runner.init_from=runs/bc")
    # The trainer finds the log-probs that the rollout acted with.
    assert row["train/approx_kl"] == pytest.approx(0, abs=1e-6) and row["train/grad_norm"] > 0
    assert row["rollout/env_steps"] == 4 * 6 * 2 and row["train/value_loss"] == 0
    assert cli.main(["eval", "--run", "runs/grpo", "--step", "latest", "--trust-checkpoint-code"]) == 0


def test_ppo_of_pi0_with_adapters(here: Path) -> None:
    pi0 = ["actor.model.model_type=pi0", "actor.model.kwargs={num_steps: 2}"]
    (row,) = train("ppo", *pi0, "actor.lora.rank=4")
    assert row["train/approx_kl"] == pytest.approx(0, abs=1e-6) and row["train/grad_norm"] > 0
    assert row["train/value_loss"] > 0
    assert train("flow_bc", *pi0, config="cloning.yaml")[0]["train/grad_norm"] > 0
