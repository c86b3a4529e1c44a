"""Checkpoints of `actor.training_backend: local` from before policies and language models were trained by one backend."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium as gym
import torch

from rlhpc import Worker
from rlhpc.checkpoint.state import load_state, load_tensors
from rlhpc.config.typed import default_section
from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.workers.actor import PolicyTrainer
from rlhpc.training import ReplicatedBackend
from rlhpc.training.flat_parameters import FlatModule
from tests.extras import need_extra

HERE = Path(__file__).parent / "checkpoints"


def flat(backend: object) -> FlatModule:
    assert isinstance(backend, ReplicatedBackend)
    return backend.flat


def test_a_policy_s_goes_on() -> None:
    folder = HERE / "policy"
    cfg = default_section(PpoConfig)
    cfg.actor.model.hidden_sizes = [8]
    trainer = PolicyTrainer(cfg)
    trainer.set_up_device()
    with gym.make("CartPole-v1") as env:
        backend = trainer.build_backend(cfg.actor, (env.observation_space, env.action_space), reads_norm=False)
    trainer.load(str(folder))
    saved, optimizer = load_tensors(folder / "model.safetensors"), load_state(folder / "optimizer.pt")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trainer.policy.state_dict().items())
    held = flat(backend).state_dict()
    assert held["steps"] == optimizer["steps"] > 0 and trainer.updates == 2
    for name, averages in optimizer["state"].items():
        assert all(torch.equal(averages[kind], held["state"][name][kind]) for kind in ("exp_avg", "exp_avg_sq"))


def test_a_language_model_s_goes_on(tmp_path: Path) -> None:
    """Its optimizer's averages were one flat tensor each."""
    need_extra("llm")
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhpc.language.config.run import GrpoConfig
    from rlhpc.language.training.trainer import TokenTrainer

    folder = HERE / "language"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(tmp_path)
    cfg = default_section(GrpoConfig)
    cfg.actor.model.model_path = str(tmp_path)
    trainer = TokenTrainer(cfg, Worker())
    trainer.load(folder)
    saved, optimizer = load_tensors(folder / "model.safetensors"), load_state(folder / "optimizer.pt")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trainer.named_weights())
    assert trainer.num_trained_parameters == json.loads((folder / "backend.json").read_text())["trainable parameters"]
    held = flat(trainer.backend).optimizer
    assert held.steps == optimizer["steps"] > 0
    assert torch.equal(held.exp_avg, optimizer["exp_avg"]) and torch.equal(held.exp_avg_sq, optimizer["exp_avg_sq"])
