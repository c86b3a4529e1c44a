"""Environments of gymnasium's interface give the values that they have; those of any other are refused in one sentence.

The environments are drawn by the commit; `RLHPC_TESTS_SEED=…` draws others.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import VectorEnv, make_env
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv
from rlhpc.embodied.envs.interface import InterfaceError
from rlhpc.runtime.errors import ConfigError
from tests.drawn import seed

ROOT = Path(__file__).resolve().parents[4]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
ENVIRONMENTS = 120
LENGTH = 4


class Form(NamedTuple):
    """A way to return a value, and whether it is of gymnasium's interface."""

    convert: Any
    is_valid: bool = True


RESETS = {
    "pair": Form(lambda obs: (obs, {})),
    "list": Form(lambda obs: [obs, {}]),
    "alone": Form(lambda obs: obs, False),
    "no info": Form(lambda obs: (obs, None), False),
    "three": Form(lambda obs: (obs, {}, {}), False),
    "nothing": Form(lambda obs: None, False),
}
STEPS = {
    "five": Form(lambda values: values),
    "list": Form(list),
    "four": Form(lambda values: (*values[:3], values[4]), False),
    "three": Form(lambda values: values[:3], False),
    "alone": Form(lambda values: values[0], False),
    "six": Form(lambda values: (*values, {}), False),
}
REWARDS = {
    "float": Form(float),
    "int32": Form(lambda value: np.int32(value)),
    "float32": Form(lambda value: np.float32(value)),
    "0-d": Form(lambda value: np.array(value)),
    "1-d": Form(lambda value: np.array([value])),
    "tensor": Form(torch.tensor),
    "bool": Form(lambda value: bool(value)),
    "fraction": Form(Fraction),
    "none": Form(lambda value: None, False),
    "text": Form(str, False),
    "two": Form(lambda value: np.array([value, value]), False),
    "list": Form(lambda value: [value], False),
    "complex": Form(lambda value: complex(value), False),
    "dict": Form(lambda value: {"agent": value}, False),
}
FLAGS = {
    "bool": Form(bool),
    "numpy": Form(np.bool_),
    "int": Form(int),
    "float": Form(float),
    "1-d": Form(lambda value: np.array([value])),
    "tensor": Form(torch.tensor),
    "none": Form(lambda value: None, False),
    "text": Form(str, False),
    "two": Form(lambda value: np.array([value, value]), False),
    "dict": Form(lambda value: {"agent": value}, False),
    "number": Form(lambda value: 0.5, False),
}
INFOS = {
    "empty": Form(lambda done: {}),
    "bool": Form(lambda done: {"success": done}),
    "is_success": Form(lambda done: {"is_success": np.float64(done)}),
    "unknown": Form(lambda done: {"success": None}),
    "first unknown": Form(lambda done: {"success": None, "is_success": done}),
    "array": Form(lambda done: {"success": np.array([done])}),
    "two": Form(lambda done: {"success": np.array([done, done])}, False),
    "share": Form(lambda done: {"success": 0.5}, False),
    "text": Form(lambda done: {"success": "yes"}, False),
    "none": Form(lambda done: None, False),
    "list": Form(lambda done: [], False),
}
SPACES = {
    "floats": spaces.Box(-100, 100, (3,), np.float32),
    "doubles": spaces.Box(-100, 100, (2, 2), np.float64),
    "two": spaces.Box(-100, 100, (2,), np.float32),
    "five": spaces.Box(-100, 100, (5,), np.float32),
    "bytes": spaces.Box(0, 255, (3,), np.uint8),
    "integers": spaces.Box(-100, 100, (1,), np.int64),
    "number": spaces.Box(-100, 100, (), np.float32),
    "parts": spaces.Dict({"a": spaces.Box(-100, 100, (2,), np.float32), "b": spaces.Box(0, 255, (1,), np.uint8)}),
}
OBSERVATIONS = {
    "array": Form(lambda array: array),
    "float64": Form(lambda array: array.astype(np.float64)),
    "int64": Form(lambda array: array.astype(np.int64)),
    "list": Form(lambda array: array.tolist()),
    "tensor": Form(lambda array: torch.tensor(array)),
    "first": Form(lambda array: array.reshape(-1)[0], False),
    "long": Form(lambda array: np.append(array, 0), False),
    "texts": Form(lambda array: array.astype(str), False),
    "none": Form(lambda array: None, False),
    "complex": Form(lambda array: array + 1j, False),
    "half": Form(lambda array: array + 0.5),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "several": spaces.MultiDiscrete([2, 3]),
}
WRAPPERS = {"none": [], "order": ["gymnasium.wrappers:RecordEpisodeStatistics"]}


class Options(NamedTuple):
    """What an environment is like."""

    reset: str
    step: str
    reward: str
    terminated: str
    truncated: str
    info: str
    space: str
    obs: str
    action: str
    wrappers: str


TABLES = (RESETS, STEPS, REWARDS, FLAGS, FLAGS, INFOS, SPACES, OBSERVATIONS, ACTIONS, WRAPPERS)


def _observation(space: Any, time: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _observation(part, time) for key, part in space.spaces.items()}
    return (np.arange((space._shape and np.prod(space.shape, dtype=int)) or 1).reshape(space.shape) + time).astype(
        space.dtype
    )


class World(gymnasium.Env):  # type: ignore[type-arg]
    """Counts its steps: observations and rewards follow from the count."""

    def __init__(self, options: str) -> None:
        self.options = Options(*json.loads(options))
        self.observation_space, self.action_space = SPACES[self.options.space], ACTIONS[self.options.action]

    def _shown(self) -> Any:
        convert = OBSERVATIONS[self.options.obs].convert
        shown = _observation(self.observation_space, self.time)
        return {k: convert(v) for k, v in shown.items()} if isinstance(shown, dict) else convert(shown)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return RESETS[self.options.reset].convert(self._shown())

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action if np.ndim(action) else self.action_space.dtype.type(action)), action
        self.time += 1
        done, one = self.time >= LENGTH, self.options
        flags = (FLAGS[one.terminated].convert(done), FLAGS[one.truncated].convert(False))
        reward = REWARDS[one.reward].convert(self.time % 2)
        return STEPS[one.step].convert((self._shown(), reward, *flags, INFOS[one.info].convert(done)))


gymnasium.register("tests/Interface-v0", entry_point=World)


def _drawn(number: int) -> Options:
    """An environment with at most two oddities that are not valid; every second has none."""
    draw = random.Random(f"{seed()} environments {number}")
    values = [draw.choice([n for n, form in table.items() if getattr(form, "is_valid", True)]) for table in TABLES]
    for _ in range(number % 2 * draw.randint(1, 2)):
        index = draw.choice([0, 1, 2, 3, 4, 5, 7])
        values[index] = draw.choice([n for n, form in TABLES[index].items() if not form.is_valid])
    return Options(*values)


def _is_valid(options: Options) -> bool:
    forms = [table[name] for table, name in zip(TABLES, options, strict=True)]
    if not all(getattr(form, "is_valid", True) for form in forms):
        single = options.obs == "first" and options.space in ("integers", "number")
        others = [form for index, form in enumerate(forms) if index != 7]
        return single and all(getattr(form, "is_valid", True) for form in others)
    whole = options.space in ("bytes", "integers", "parts")
    return not (whole and options.obs == "half")


def _section(options: Options, **changes: Any) -> Any:
    return OmegaConf.structured(
        EnvSideConfig(
            **{
                "env_id": "tests/Interface-v0",
                "kwargs": {"options": json.dumps(options)},
                "wrappers": WRAPPERS[options.wrappers],
                **changes,
            }
        )
    )


def _rows(space: Any, form: str, time: int) -> Any:
    shown = _observation(space, time)
    if isinstance(shown, dict):
        return {key: _rows(space[key], form, time) for key in shown}
    return shown + 0.5 if form == "half" else shown


def _same(rows: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, part in expected.items():
            np.testing.assert_array_equal(rows[key][1], part)
    else:
        np.testing.assert_array_equal(rows[1], expected)


def _play(options: Options, **changes: Any) -> None:
    """Plays two episodes and holds each value against the count.

    Raises:
        ConfigError: The environment is refused.
    """
    env = make_env(_section(options, **changes), 2)
    space, action_space = SPACES[options.space], ACTIONS[options.action]
    try:
        obs, _ = env.reset()
        _same(obs, _rows(space, options.obs, 0))
        for step in range(1, 2 * LENGTH + 1):
            zero = np.zeros((2, *(action_space.shape or ())), np.int64)
            obs, rewards, terminations, truncations, infos = env.step(zero)
            time = (step - 1) % LENGTH + 1
            done = time == LENGTH
            assert rewards.tolist() == [time % 2] * 2
            assert terminations.tolist() == [done] * 2 and truncations.tolist() == [False] * 2
            _same(obs, _rows(space, options.obs, 0 if done else time))
            knows = options.info not in ("empty", "unknown")
            if knows:
                assert infos["success"].tolist() == [done] * 2
            if done:
                _same(infos["final_obs"], _rows(space, options.obs, time))
                episode = infos["episode"]
                assert episode["return"].tolist() == [LENGTH // 2] * 2 and episode["length"].tolist() == [LENGTH] * 2
                assert ("success_at_end" in episode) == knows
                assert not knows or episode["success_at_end"].tolist() == [1.0] * 2
    finally:
        env.close()


@pytest.mark.parametrize("number", range(ENVIRONMENTS))
def test_an_environment_is_played_as_it_is_or_refused_in_one_sentence(number: int) -> None:
    options = _drawn(number)
    if _is_valid(options):
        _play(options)
        return
    with pytest.raises(ConfigError, match="tests/Interface-v0") as error:
        _play(options)
    assert "\n" not in str(error.value), options


VALID = Options("pair", "five", "float", "bool", "bool", "empty", "floats", "array", "discrete", "none")


@pytest.mark.parametrize("table", [0, 1, 2, 3, 4, 5, 7])
def test_each_form_alone(table: int) -> None:
    for name in TABLES[table]:
        options = VALID._replace(**{Options._fields[table]: name})
        for wrappers in WRAPPERS:
            wrapped = options._replace(wrappers=wrappers)
            if _is_valid(wrapped):
                _play(wrapped)
            else:
                with pytest.raises(ConfigError, match="tests/Interface-v0"):
                    _play(wrapped)


@pytest.mark.parametrize("space", list(SPACES))
def test_an_old_reset_is_never_unpacked(space: str) -> None:
    for wrappers in WRAPPERS:
        with pytest.raises(InterfaceError, match=r"reset\(\).*gymnasium's interface is required"):
            _play(VALID._replace(reset="alone", space=space, wrappers=wrappers))


def test_a_simulators_process_refuses_it_as_well() -> None:
    env_id = f"{__name__}:tests/Interface-v0"  # the process imports this module
    with pytest.raises(ConfigError, match=r"tests/Interface-v0.*step\(\) returned a tuple of 4"):
        _play(VALID._replace(step="four"), simulators=1, simulator_timeout_s=60.0, env_id=env_id)


class Unseeded(World):
    """An environment of an interface before seeds."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Broken(World):
    """An environment with a mistake of its own."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise TypeError("unsupported operand")


gymnasium.register("tests/Unseeded-v0", entry_point=Unseeded)
gymnasium.register("tests/Broken-v0", entry_point=Broken)


def test_a_reset_without_seed_and_an_environments_own_mistake() -> None:
    for env_id, error in (("tests/Unseeded-v0", InterfaceError), ("tests/Broken-v0", TypeError)):
        section = _section(VALID)
        section.env_id = env_id
        with pytest.raises(error, match=r"seed and options|unsupported operand"):
            make_env(section, 1).reset()


class Vector(VectorEnv):
    """A user's vector environment, whose answers a test chooses."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    answer: Any = None

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int | None = None) -> Any:
        return self.answer if self.answer is not None else (np.zeros((self.num_envs, 2), np.float32), {})

    def step(self, actions: np.ndarray) -> Any:
        return self.answer


def _vector_answers() -> dict[str, Any]:
    obs, rewards, no = np.zeros((2, 2), np.float32), np.zeros(2, np.float32), np.zeros(2, bool)
    return {
        "four": (obs, rewards, no, {}),
        "one reward": (obs, 1.0, no, no, {}),
        "flags as numbers": (obs, rewards, no.astype(int), no, {}),
        "one observation": (obs[0], rewards, no, no, {}),
        "other shape": (np.zeros((2, 3), np.float32), rewards, no, no, {}),
        "no infos": (obs, rewards, no, no, None),
        "no final_obs": (obs, rewards, ~no, no, {}),
        "right": (obs, rewards, no, no, {}),
        "right at an end": (obs, rewards, no, ~no, {"final_obs": obs}),
    }


@pytest.mark.parametrize("name", _vector_answers())
def test_a_users_vector_environment(name: str) -> None:
    env = Vector(None, 2, 0, 0)
    env.reset()
    env.answer = _vector_answers()[name]
    if name.startswith("right"):
        assert env.step(np.zeros(2)) is env.answer and len(env.chunk_step(np.zeros((2, 1)))) == 5
        return
    with pytest.raises(InterfaceError, match=rf"{__name__}:Vector: step\(\)"):
        env.step(np.zeros(2))
    with pytest.raises(InterfaceError, match=rf"{__name__}:Vector: reset\(\)"):
        env.answer = np.zeros((2, 2), np.float32)
        env.reset()


@pytest.mark.parametrize("method", ["step", "chunk_step"])
def test_a_subclass_may_change_what_it_inherits(method: str) -> None:
    """Each call on the way is not yet the answer; the answer is still looked at."""

    class Doubled(GymnasiumVectorEnv):
        times = 2

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float32)

        def reset(self, seed: int | None = None) -> Any:
            obs, infos = super().reset(seed)
            return np.tile(obs, self.times), infos

    def changed(self: Any, actions: np.ndarray) -> Any:
        obs, *rest = getattr(GymnasiumVectorEnv, method)(self, actions)
        return np.tile(obs, self.times), *rest

    changed.__name__ = method
    Changed = type("Changed", (Doubled,), {method: changed, "__module__": __name__})
    section = OmegaConf.merge(OmegaConf.structured(EnvSideConfig), {"env_id": "CartPole-v1"})
    env = Changed(section, 2, 0, 0)
    assert env.reset()[0].shape == (2, 8)
    actions = np.zeros(2, int) if method == "step" else np.zeros((2, 3), int)
    assert getattr(env, method)(actions)[0].shape == (2, 8)
    env.times = 3
    with pytest.raises(InterfaceError, match=rf"Changed: {method}\(\) returned an array of shape \(2, 12\)"):
        getattr(env, method)(actions)


@pytest.mark.long
@pytest.mark.parametrize(("reset", "step"), [("alone", "five"), ("pair", "four")])
def test_a_run_ends_with_one_sentence(reset: str, step: str, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.unit.embodied.envs import test_interface\n"
    )
    options = json.dumps(VALID._replace(reset=reset, step=step))
    command = [
        str(Path(sys.executable).with_name("rlhpc")), "train", QUICKSTART, f"runner.run_dir={tmp_path}/runs",
        "env.train.env_id=world:tests/Interface-v0", f"env.train.kwargs.options='{options}'", "runner.max_steps=1",
        "runner.segments=1", "runner.save_interval=1", "algorithm.rollout_steps=8", "algorithm.update_epochs=1",
        "actor.global_batch_size=64",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "gymnasium's interface is required" in done.stderr and "Traceback" not in done.stderr, done.stderr
