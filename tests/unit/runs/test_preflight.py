"""What a start refuses from files alone, before its first step, `rlhpc plan` refuses in the same sentence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rlhpc.cli import main
from rlhpc.runs.preflight import FILES, Check, Need, Resource, run_checks
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.session import Session
from tests.extras import need_extra

need_extra("llm")
need_extra("embodied")

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TINY = ("runner.max_steps=1", "actor.model.model_path=builtin:tiny", "actor.max_tokens_per_micro_batch=4096")
#: Runs that are right, by the kind of run that they stand for: configuration and overrides. `{here}` is the case's folder.
RIGHT = {
    "reasoning": (
        "base/grpo.yaml",
        (*TINY, "data.train={source: jsonl, path: '{here}/sums.jsonl'}", "data.prompts_per_step=4",
         "data.max_prompt_tokens=24", "data.eval=[{name: held_out, source: arithmetic, size: 8, kwargs: {digits: 1}}]",
         "workflow.eval_suites=[held_out]",
         "reward.terms=[{name: exact}]", "rollout.max_new_tokens=6", "algorithm.group_size=4", "actor.global_batch_size=16"),
    ),
    "sft": (
        "base/sft.yaml",
        (*TINY, "data.train={source: jsonl, path: '{here}/sums.jsonl'}", "data.prompts_per_step=4",
         "data.max_prompt_tokens=24"),
    ),
    "dpo": (
        "reasoning/dpo.yaml",
        (*TINY, "data.train.path={here}/pairs.jsonl", "data.holdout.path={here}/more_pairs.jsonl", "data.prompts_per_step=4"),
    ),
    "reward_model": (
        "reasoning/reward_model.yaml",
        (*TINY, "data.train.path={here}/pairs.jsonl", "data.prompts_per_step=4",
         "data.eval=[{name: held_out, source: jsonl, path: '{here}/pairs.jsonl'}]"),
    ),
    "embodied": ("quickstart.yaml", ()),
    "off_policy": ("embodied/pendulum_sac.yaml", ()),
    "bc": ("base/bc.yaml", ("env.train.env_id=Pendulum-v1", "demos.path={here}/pendulum.h5", "runner.max_steps=1")),
}  # fmt: skip
SUMS = "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1), "response": str(n + 1)}) + "\n" for n in range(8))
PAIRS = "".join(json.dumps({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"}) + "\n" for n in range(8))
FILES_THERE = {"sums.jsonl": SUMS, "pairs.jsonl": PAIRS, "more_pairs.jsonl": PAIRS}
MISSING = "{here}/missing"
SUITE = "data.eval=[{name: held_out, source: jsonl, path: '{here}/%s'}]"


@dataclass(frozen=True)
class Broken:
    """One broken input: a run of `RIGHT`, overrides, a text that the message has, and files."""

    kind: str
    overrides: tuple[str, ...]
    says: str
    files: Mapping[str, str] = field(default_factory=dict)


def broken(kind: str, *overrides: str, says: str, rows: str = "", policy: tuple[str, ...] = ()) -> Broken:
    """A broken input, with a file `rows.jsonl`, and a folder `vla` with these files, if there are any."""
    files = {**({"rows.jsonl": rows} if rows else {}), **{f"vla/{name}": "{}" for name in policy}}
    return Broken(kind, overrides, says, files)


BROKEN_ROW = SUMS + "{no JSON\n"
CASES = {
    # data
    "reasoning: a suite's file": broken("reasoning", SUITE % "missing.jsonl", says="missing.jsonl"),
    "reasoning: a suite's row": broken("reasoning", SUITE % "rows.jsonl", says="rows.jsonl:9", rows=BROKEN_ROW),
    "reasoning: a row without the answer": broken(
        "reasoning", SUITE % "rows.jsonl", says="answer", rows='{"prompt": "1+1="}\n'),
    "reasoning: training data": broken(
        "reasoning", f"data.train={{source: jsonl, path: '{MISSING}.jsonl'}}", says="missing.jsonl"),
    "reasoning: a training row": broken(
        "reasoning", "data.train={source: jsonl, path: '{here}/rows.jsonl'}", says="rows.jsonl:9", rows=BROKEN_ROW),
    "reasoning: a suite's key": broken("reasoning", "data.eval=[{name: a, source: arithmetic, sise: 1}]", says="sise"),
    "reasoning: a suite's source": broken("reasoning", "data.eval=[{name: held_out, source: nosuch}]", says="nosuch"),
    "reasoning: samples that are all alike": broken(
        "reasoning", "runner.val_check_interval=1",
        "data.eval=[{name: held_out, source: arithmetic, size: 8, samples: 2}]", says="temperature 0"),
    "reasoning: a suite's prompts are too long": broken(
        "reasoning", "runner.val_check_interval=1", SUITE % "rows.jsonl", "data.overlong_prompts=error",
        says="data.max_prompt_tokens", rows=json.dumps({"prompt": "1+" * 30, "answer": "30"}) + "\n"),
    # rewards and judges
    "reasoning: a reward": broken("reasoning", "reward.terms=[{name: 'nosuch_rewards:score'}]", says="nosuch_rewards"),
    "reasoning: a reward's arguments": broken("reasoning", "reward.terms=[{name: exact, kwargs: {nosuch: 1}}]", says="nosuch"),
    "reasoning: a judge without a model": broken(
        "reasoning", "reward.terms=[{name: judge}]", "cluster.component_placement.judge=0", says="judge"),
    "reasoning: a judge's question": broken(
        "reasoning", "reward.terms=[{name: judge}]", "judge.rubric=How good is it?", "judge.model.model_path=builtin:tiny",
        "cluster.component_placement.judge=0", says="{response}"),
    # agents
    "reasoning: an agent's module": broken(
        "reasoning", "agent.kind=python", "agent.target=nosuch_agent:solve", "reward.terms=[{name: agent}]",
        says="nosuch_agent"),
    "reasoning: an agent's interpreter": broken(
        "reasoning", "agent.kind=python", "agent.target=nosuch_agent:solve", f"agent.python={MISSING}", says="missing"),
    "reasoning: an agent without its command": broken("reasoning", "agent.kind=command", says="agent.command"),
    "reasoning: an agent's environment": broken(
        "reasoning", "agent.kind=environment", "agent.target=nosuch", says="nosuch"),
    "reasoning: an agent inside": broken(
        "reasoning", "rollout.agent=nosuch_agent:Agent", "rollout.max_turns=2", says="nosuch_agent"),
    # models and sizes
    "reasoning: the model": broken("reasoning", f"actor.model.model_path={MISSING}", says="no such folder"),
    "reasoning: a teacher": broken(
        "reasoning", "algorithm.name=distillation", f"teacher.model.model_path={MISSING}", says="teacher.model.model_path"),
    "reasoning: a batch": broken("reasoning", "actor.global_batch_size=100", says="must divide"),
    # sft, dpo, reward models
    "sft: demonstrations": broken("sft", f"data.train.path={MISSING}.jsonl", says="missing.jsonl"),
    "sft: a row": broken("sft", "data.train.path={here}/rows.jsonl", says="rows.jsonl:9", rows=BROKEN_ROW),
    "sft: a row without a response": broken(
        "sft", "data.train.path={here}/rows.jsonl", says="response", rows='{"prompt": "1+1=", "answer": "2"}\n'),
    "sft: held-out demonstrations": broken(
        "sft", "runner.val_check_interval=1", f"data.holdout.path={MISSING}.jsonl", says="missing.jsonl"),
    "sft: a suite's file": broken("sft", SUITE % "missing.jsonl", says="missing.jsonl"),
    "sft: the model": broken("sft", f"actor.model.model_path={MISSING}", says="no such folder"),
    "dpo: pairs": broken("dpo", f"data.train.path={MISSING}.jsonl", says="missing.jsonl"),
    "dpo: a row": broken("dpo", "data.train.path={here}/rows.jsonl", says="chosen", rows=SUMS),
    "dpo: held-out pairs": broken("dpo", f"data.holdout.path={MISSING}.jsonl", says="missing.jsonl"),
    "dpo: a suite's file": broken("dpo", SUITE % "missing.jsonl", says="missing.jsonl"),
    "dpo: the model": broken("dpo", f"actor.model.model_path={MISSING}", says="no such folder"),
    "reward_model: pairs": broken("reward_model", f"data.train.path={MISSING}.jsonl", says="missing.jsonl"),
    "reward_model: a row": broken(
        "reward_model", "data.train.path={here}/rows.jsonl", says="chosen", rows=SUMS),
    "reward_model: a suite's file": broken("reward_model", SUITE % "missing.jsonl", says="missing.jsonl"),
    "reward_model: the model": broken("reward_model", f"actor.model.model_path={MISSING}", says="no such folder"),
    # simulators
    "embodied: an environment": broken("embodied", "env.train.env_id=NoSuch-v0", says="NoSuch"),
    "embodied: its arguments": broken("embodied", "env.train.kwargs={nosuch: 1}", says="nosuch"),
    "embodied: the environment of evaluations": broken(
        "embodied", "runner.val_check_interval=1", "env.eval.env_id=NoSuch-v0", says="NoSuch"),
    "embodied: a simulator's interpreter": broken(
        "embodied", f"env.train.simulator_python={MISSING}", says="No such file or directory"),
    "embodied: an environment of one's own": broken("embodied", "env.train.env_type=nosuch_envs:Env", says="nosuch_envs"),
    "embodied: a simulator's task": broken(
        "embodied", "env.train.env_type=maniskill", "env.train.env_id=NoSuchTask-v1", says="NoSuchTask"),
    "embodied: slots": broken(
        "embodied", "cluster.component_placement={actor: '0:0-2', env: '0', rollout: '0'}", says="divide"),
    "embodied: a suite's changes": broken("embodied", "workflow.eval_suites=[long]", says="long"),
    "embodied: a suite's key": broken(
        "embodied", "workflow.eval_suites=[long]", "workflow.suites={long: [env.eval.nosuch=1]}", says="nosuch"),
    "embodied: weights to start from": broken("embodied", f"runner.init_from={MISSING}", says="runner.init_from"),
    "embodied: a model of success": broken("embodied", f"env.train.reward_model={MISSING}", says="env.train.reward_model"),
    # pretrained policies; the environment of LIBERO is in a Python of its own
    "embodied: a policy's folder": broken(
        "embodied", "actor.model.model_type=vla", f"actor.model.model_path={MISSING}", says="no such folder"),
    "embodied: a policy without statistics": broken(
        "embodied", "actor.model.model_type=openvla", "actor.model.model_path={here}/vla", "env.train.env_type=libero",
        "env.train.env_id=libero_spatial", f"env.train.simulator_python={sys.executable}", says="statistics",
        policy=("config.json", "model.safetensors")),
    "embodied: a policy without weights": broken(
        "embodied", "actor.model.model_type=pi0", "actor.model.model_path={here}/vla", says="without weights",
        policy=("config.json",)),
    "embodied: pi0 without statistics": broken(
        "embodied", "actor.model.model_type=pi0", "actor.model.model_path={here}/vla", says="norm_stats",
        policy=("config.json", "model.safetensors")),
    # off-policy
    "off_policy: an environment": broken("off_policy", "env.train.env_id=NoSuch-v0", says="NoSuch"),
    "off_policy: a simulator's interpreter": broken(
        "off_policy", f"env.train.simulator_python={MISSING}", says="No such file or directory"),
    "off_policy: data that are not there": broken(
        "off_policy", f"algorithm.demo_buffer.load_path={MISSING}.h5", says="algorithm.demo_buffer.load_path"),
    "off_policy: data that no pattern finds": broken(
        "off_policy", "algorithm.demo_buffer.load_path={here}/*.hdf", says="algorithm.demo_buffer"),
    "off_policy: data of other shapes": broken(
        "off_policy", "algorithm.demo_buffer.load_path={here}/other.h5", says="algorithm.demo_buffer.load_path"),
    "off_policy: damaged data": broken(
        "off_policy", "algorithm.demo_buffer.load_path={here}/damaged.h5", says="damaged.h5"),
    # cloning
    "bc: demonstrations that are not there": broken("bc", f"demos.path={MISSING}.h5", says="missing.h5"),
    "bc: demonstrations of other shapes": broken("bc", "demos.path={here}/other.h5", says="demos.path"),
    "bc: damaged demonstrations": broken("bc", "demos.path={here}/damaged.h5", says="damaged.h5"),
    "bc: demonstrations of other shapes, for a simulator elsewhere": broken(
        "bc", f"demos.path={MISSING}.h5", f"env.train.simulator_python={sys.executable}", says="missing.h5"),
    "bc: a simulator's interpreter": broken("bc", f"env.train.simulator_python={MISSING}", says="No such file or directory"),
    "bc: a loss that choices have not": broken(
        "bc", "algorithm.bc_loss=mse", "env.train.env_id=CartPole-v1", says="algorithm.bc_loss"),
    "bc: weights to start from": broken("bc", f"runner.init_from={MISSING}", says="runner.init_from"),
    "bc: a critic": broken(
        "bc", "actor.model.model_type=conditioned", "actor.model.kwargs={of: mlp}", "algorithm.bc_value_coef=0",
        f"algorithm.value_model={MISSING}", says="algorithm.value_model"),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of `RIGHT`, in which no rank can be started."""
    from rlhpc.embodied.data.trajectories import TrajectoryWriter

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(Session, "start", refuse)
    monkeypatch.setattr(Session, "prewarm", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHPC_MODELS", str(tmp_path / "models"))
    for name, text in FILES_THERE.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "damaged.h5").write_bytes(b"no HDF5")
    for name, numbers in (("pendulum", 3), ("other", 5)):
        with TrajectoryWriter(tmp_path / f"{name}.h5", env_id="Pendulum-v1") as writer:
            writer.add(episode(numbers))
    return tmp_path


def episode(numbers: int) -> dict[str, object]:
    """Returns an episode of Pendulum-v1, but for the numbers of its observations."""
    ends = np.array([False, False, True])
    return {
        "obs": np.zeros((4, numbers), np.float32), "actions": np.zeros((3, 1), np.float32),
        "rewards": np.zeros(3, np.float32), "terminations": ends, "truncations": np.zeros(3, bool),
    }  # fmt: skip


def words_of(kind: str, here: Path, overrides: tuple[str, ...] = ()) -> list[str]:
    """Returns configuration and overrides of a run."""
    config, right = RIGHT[kind]
    words = [word.replace("{here}", str(here)) for word in (*right, *overrides)]
    return [str(CONFIGS / config), *words, f"runner.run_dir={here / 'runs'}", "runner.name=tried"]


def refusal(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the sentence of a command that refuses; "" if it accepts."""
    capsys.readouterr()
    code = main([command, *words])
    text = capsys.readouterr().err
    if not code:
        return ""
    assert code == 2 and text.count("rlhpc: error:") == 1, text
    sentence = text.partition("rlhpc: error:")[2].strip()
    return re.sub(r"/\S*models/(tiny)(-[0-9a-f]{8})?\b", r"builtin:\1", sentence)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_refuses_what_a_start_refuses(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    for file, text in case.files.items():
        (here / file).parent.mkdir(exist_ok=True)
        (here / file).write_text(text)
    words = words_of(case.kind, here, case.overrides)
    started = refusal("train", words, capsys)
    assert case.says in started, started
    assert refusal("plan", words, capsys) == started
    assert not (here / "runs").exists()


@pytest.mark.parametrize("kind", RIGHT)
def test_a_plan_accepts_what_is_right(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal("plan", words_of(kind, here), capsys) == ""
    assert not (here / "runs").exists() and not (here / "models").exists()


@pytest.mark.parametrize(
    "name", ["a simulator's interpreter", "demonstrations of other shapes", "weights to start from"]
)
def test_a_plan_refuses_what_the_rounds_of_dagger_refuse(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[f"bc: {name}"]
    words = words_of(case.kind, here, case.overrides)
    expert = ["--expert", "rlhpc.embodied.envs.experts:push_cube", "--rounds", "1"]
    assert case.says in refusal("dagger", [*words, *expert], capsys)
    assert refusal("dagger", [*words, *expert], capsys) == refusal("plan", words, capsys)


def test_checks_without_their_resource_are_left_out_and_named() -> None:
    made: list[str] = []
    network = Resource(Need.NETWORK, "a model of the hub")
    checks = [Check("a", lambda: made.append("a")), Check("b", lambda: made.append("b"), network)]
    assert [str(check) for check in run_checks(checks, {Need.FILES})] == ["b: needs the network (a model of the hub)"]
    assert made == ["a"] and FILES.need is Need.FILES
    assert run_checks(checks) == [] and made == ["a", "a", "b"]

    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        run_checks([Check("a", fail), *checks])
