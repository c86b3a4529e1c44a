"""Vision-language-action policies by the commands a user types: demonstrations, imitation, then GRPO or PPO from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhpc import cli
from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.export import load_exported
from rlhpc.embodied.models import build_model
from tests.extras import need_extra

need_extra("llm")

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


def test_openvla_from_cloning_to_a_folder_of_its_family(here: Path) -> None:
    """OFT: cloned with statistics of the demonstrations, reinforced, resumed bit for bit, released, and loaded again."""
    bounds = {"q01": [-0.9, -0.8], "q99": [0.9, 0.8], "min": [-1, -1], "max": [1, 1], "mask": [True, True]}
    Path("statistics.json").write_text(json.dumps({"square": {"action": bounds, "proprio": bounds}}))
    kwargs = "{head: l1, proprio: true, statistics: statistics.json}"
    model = ["actor.model.model_type=openvla", f"actor.model.kwargs={kwargs}", "actor.model.log_std_init=-1"]
    rows = train("oft_bc", *model, "runner.max_steps=4", "actor.optim.lr=1e-4", config="cloning.yaml")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    start = [*model, "runner.init_from=runs/oft_bc", "runner.save_interval=1", "runner.max_steps=2"]
    rows = train("oft", *start)
    assert rows[0]["train/approx_kl"] == pytest.approx(0, abs=1e-6) and rows[0]["train/grad_norm"] > 0
    train("oft_again", *start, "runner.resume_dir=runs/oft/checkpoints/global_step_1")
    weights = [load_file(f"runs/{run}/checkpoints/global_step_2/model.safetensors") for run in ("oft", "oft_again")]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())

    assert cli.main(["convert", "--run", "runs/oft", "--step", "2", "--released", "--output", "oft_out"]) == 0
    mine = load_exported("runs/oft/checkpoints/global_step_2")
    section = mine._cfg
    section.model_path, section.kwargs = "oft_out", {}
    theirs = build_model(section, mine.observation_space, mine.action_space)
    generator = np.random.default_rng(0)
    obs = {
        "rgb": torch.from_numpy(generator.integers(0, 256, (4, 16, 16, 3), np.uint8)),
        "instruction": torch.from_numpy(np.stack([encode_text("go to the red square", 40)] * 4)),
        "state": torch.from_numpy(generator.uniform(-1, 1, (4, 2)).astype(np.float32)),
    }
    with torch.no_grad():
        assert torch.equal(mine.predict_action_batch(obs, "eval")[0], theirs.predict_action_batch(obs, "eval")[0])
        assert torch.equal(mine.value(obs), theirs.value(obs))
