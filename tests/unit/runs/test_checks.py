"""`rlhpc plan` refuses what `rlhpc train` refuses before a rank starts, in the same words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhpc.runs.checks import check_planned
from rlhpc.runs.configuration import load_config
from rlhpc.runs.train import train
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.session import Session
from tests.extras import need_extra

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PPO, SAC, PROBLEMS = "quickstart.yaml", "embodied/pendulum_sac.yaml", "reasoning/demo.yaml"
TINY = ("actor.model.model_path=builtin:tiny", "rollout.max_new_tokens=8", "actor.max_tokens_per_micro_batch=4096")
BROKEN = {
    "a network for images": (PPO, ("actor.model.model_type=cnn",), "model_type 'cnn' needs images"),
    "a flow over choices": (PPO, ("actor.model.model_type=flow",), "actions"),
    "off-policy networks": (SAC, ("actor.model.model_type=cnn",), "off_policy trains sac, crossq"),
    "off-policy networks, another algorithm": (
        SAC, ("actor.model.model_type=resnet", "algorithm.name=td3"), "off_policy trains sac, crossq",
    ),
    "choices for sac": (SAC, ("env.train.env_id=CartPole-v1",), "continuous"),
    "arguments of the environment": (PPO, ("env.train.kwargs={nosuch: 1}",), "nosuch"),
    "beyond the context": (
        PROBLEMS, (*TINY, "rollout.max_model_len=4000"), "rollout.max_model_len is 4000; the model's context is 64",
    ),
    "all prompts too long": (PROBLEMS, (*TINY, "data.max_prompt_tokens=1"), "prompts are longer than"),
    "one prompt too long": (
        PROBLEMS, (*TINY, "data.max_prompt_tokens=1", "data.overlong_prompts=error"), "data.max_prompt_tokens",
    ),
    "stacks of pixels for sac": (
        SAC, ("env.train.kwargs={render_mode: rgb_array}", "env.train.wrappers=['gymnasium.wrappers:AddRenderObservation']",
              "algorithm.replay_buffer.frame_stack=2"),
        "frame_stack is 2, which does not divide the 3 channels",
    ),
    "no such model": (PROBLEMS, (*TINY[1:], "actor.model.model_path=./nosuch", "workflow.sft=null"), "no such folder"),
}  # fmt: skip


def refused_by(command: str, path: Path, overrides: list[str]) -> str:
    """Returns what `plan` or `train` says against a configuration; "" if nothing."""
    try:
        cfg = load_config(path, overrides)
        check_planned(cfg) if command == "plan" else train(cfg)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", BROKEN)
def test_plan_and_train_say_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is started: the refusal comes before the session opens."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(Session, "start", refuse)
    monkeypatch.setattr(Session, "prewarm", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHPC_MODELS", str(tmp_path / "models"))
    config, words, message = BROKEN[name]
    if name.endswith("too long") or name == "no such model":  # transformers look at it
        need_extra("llm")
    overrides = [*words, f"runner.run_dir={tmp_path / 'runs'}", "runner.name=broken"]
    trains = refused_by("train", CONFIGS / config, overrides)
    assert trains and message in trains
    assert refused_by("plan", CONFIGS / config, overrides) == trains.replace(
        str(tmp_path / "models/tiny"), TINY[0][24:]
    )


@pytest.mark.parametrize("config", [PPO, SAC])
def test_what_needs_a_process_is_left_to_the_start_and_named(config: str) -> None:
    """A simulator in a Python of its own, and what needs its spaces, is no matter of a plan."""
    assert check_planned(load_config(CONFIGS / config)) == []
    skipped = check_planned(load_config(CONFIGS / config, [f"env.train.simulator_python={sys.executable}"]))
    assert str(skipped[0]) == (f"env.train: needs a process of its own (a simulator in {sys.executable})")
