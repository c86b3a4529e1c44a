"""An export's program gives the policy's own actions, in a process that cannot import rlhpc."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.embodied.config import EvalEnvConfig, ModelConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.observations import boxes_of, space_from_json, space_to_json
from rlhpc.embodied.envs.wrappers import BUILT_IN
from rlhpc.embodied.evaluation.episodes import StepObserver, evaluate_policy
from rlhpc.embodied.export import policy_card
from rlhpc.embodied.models import build_model
from rlhpc.embodied.standalone_policy import SCRIPT, program_of, wrapper_files
from tests.extras import need_extra

INF = float("inf")
STATE = spaces.Box(-INF, INF, (4,), np.float32)
CASES = {
    "discrete": ({}, STATE, spaces.Discrete(3, start=-1)),
    "box": ({}, STATE, spaces.Box(np.float32([-1, -INF]), np.float32([0.5, INF]))),
    "chunks of a dict": (
        {"num_action_chunks": 2},
        spaces.Dict({"a": STATE, "b": spaces.Box(0, 1, (2,), np.float64)}),
        spaces.MultiDiscrete([2, 3]),
    ),
    "images": ({"model_type": "cnn"}, spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Discrete(4)),
    "flow": ({"model_type": "flow", "num_action_chunks": 2}, STATE, spaces.Box(-1, 1, (2,), np.float32)),
    "transformer": (
        {
            "model_type": "flow",
            "num_action_chunks": 2,
            "kwargs": {"network": "transformer", "width": 8, "heads": 2, "noise_method": "flow_noise"},
        },
        STATE,
        spaces.Box(-1, 1, (2,), np.float32),
    ),
    "cameras": (
        {"model_type": "resnet10", "kwargs": {"freeze": True}},
        spaces.Dict({"rgb": spaces.Box(0, 255, (32, 32, 6), np.uint8), "state": STATE}),
        spaces.Box(-1, 1, (2,), np.float32),
    ),
}
_ASK = """
import json, sys
sys.modules["rlhpc"] = None  # importing it would fail
sys.path.insert(0, {folder!r})
import numpy, policy
obs = numpy.load({folder!r} + "/obs.npz")
many = [dict(zip(obs, rows)) if "obs" not in obs else rows[0] for rows in zip(*obs.values())]
print(json.dumps([numpy.asarray(policy.act(one)).tolist() for one in many]))
"""


def model(changes: dict[str, Any], observation: Any, action: Any) -> Any:
    cfg = OmegaConf.merge(default_section(ModelConfig), changes)
    policy = build_model(cfg, observation, action, seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():  # the last layers begin at nearly nothing
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return policy.eval()


@pytest.mark.parametrize("name", CASES)
def test_the_program_acts_as_the_policy(name: str) -> None:
    policy = model(*CASES[name])
    program = program_of(policy)
    assert program is not None
    rows = sample(policy.observation_space, 5)
    from io import BytesIO

    acts = torch.export.load(BytesIO(program)).module()
    with torch.no_grad():
        starts = (policy.sample_start((5,), torch.Generator().manual_seed(1)),) if policy.start_shape else ()
        expected = policy.predict_action_batch(rows, "eval", *starts)[0]
        torch.testing.assert_close(acts(rows, *starts), expected, rtol=1e-5, atol=1e-5)
        one = {key: part[:1] for key, part in rows.items()} if isinstance(rows, dict) else rows[:1]
        torch.testing.assert_close(acts(one, *[each[:1] for each in starts]), expected[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["discrete", "box"])
def test_the_script_acts_without_rlhpc(name: str, tmp_path: Path) -> None:
    policy = model(*CASES[name])
    config = {"env_id": "CartPole-v1", "policy": policy.spec()}
    (tmp_path / "config.json").write_text(json.dumps(config, allow_nan=False))  # JSON has no Infinity
    (tmp_path / "policy.pt2").write_bytes(program_of(policy) or b"")
    (tmp_path / "policy.py").write_text(SCRIPT)
    rows = sample(policy.observation_space, 6)
    np.savez(tmp_path / "obs.npz", obs=rows.numpy())
    ask = [sys.executable, "-P", "-c", _ASK.format(folder=str(tmp_path))]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    raw = policy.predict_action_batch(rows, mode="eval")[0][:, 0].detach().numpy()
    space = policy.action_space
    wanted = raw[:, 0] + space.start if name == "discrete" else np.clip(raw, space.low, space.high)
    np.testing.assert_allclose(json.loads(done.stdout), wanted, rtol=1e-5, atol=1e-6)
    assert all(space.contains(np.asarray(a, space.dtype)) for a in json.loads(done.stdout))


def test_a_policy_that_cannot_be_followed() -> None:
    """What it does depends on the numbers that it is given."""
    policy = model(*CASES["discrete"])
    actor = policy.actor.forward
    policy.actor.forward = lambda obs: actor(obs) if obs.sum() > 0 else -actor(obs)
    assert program_of(policy) is None


def test_spaces_are_json() -> None:
    for _, observation, action in CASES.values():
        for space in (observation, action):
            assert space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False))) == space
    old = {"type": "Box", "shape": [1], "dtype": "float32", "low": -INF, "high": [INF]}  # as earlier versions wrote it
    assert space_from_json(old) == spaces.Box(-INF, INF, (1,), np.float32)


def test_the_card() -> None:
    policy = model(*CASES["discrete"])
    config = {"env_id": "CartPole-v1", "run": "mine", "rlhpc_version": "0", "global_step": 4, "policy": policy.spec()}
    result = {"env_id": "CartPole-v1", "suite": "default", "episodes": 9, "return_mean": 41.5, "return_std": 2.0,
              "return_ci95": [40.0, 43.0]}  # fmt: skip
    card = policy_card(config, "global_step_4", [result], licence="apache-2.0", is_standalone=True)
    facts = yaml.safe_load(card.split("---\n")[1])
    assert (facts["license"], facts["pipeline_tag"]) == ("apache-2.0", "reinforcement-learning")
    [entry] = facts["model-index"][0]["results"]
    assert entry["metrics"][0] == {"type": "mean_reward", "name": "mean return", "value": "41.50 +/- 2.00"}
    assert (
        "| default | 9 | 41.50 | 40.00 to 43.00 |" in card and "Linear(64) → tanh → Linear(64) → tanh → Linear" in card
    )
    assert (
        yaml.safe_load(policy_card(config, "x", [], licence=None, is_standalone=False).split("---\n")[1])["license"]
        == "other"
    )


def sample(space: Any, count: int) -> Any:
    """Observations of a space, as tensors."""
    if isinstance(space, spaces.Dict):
        return {key: sample(part, count) for key, part in space.spaces.items()}
    rng = np.random.default_rng(3)
    if space.dtype == np.uint8:
        return torch.from_numpy(rng.integers(0, 256, (count, *space.shape), np.uint8))
    return torch.from_numpy(rng.standard_normal((count, *space.shape)).astype(space.dtype))


#: Each wrapper that comes with rlhpc, in a world that it can wrap, with settings.
WRAPPED: dict[str, tuple[str, list[Any]]] = {
    "atari": ("Game", [{"atari": {"frame_skip": 2, "screen_size": 36, "noop_max": 3, "grayscale_newaxis": True}}]),
    "clip_action": ("Numbers", ["clip_action"]),
    "clip_reward": ("Numbers", [{"clip_reward": {"min_reward": -0.5, "max_reward": 0.0}}]),
    "dtype": ("Numbers", [{"dtype": {"dtype": "float64"}}]),
    "filter": ("Parts", [{"filter": {"filter_keys": ["near"]}}]),
    "flatten": ("Numbers", ["flatten"]),
    "frame_skip": ("Numbers", [{"frame_skip": {"skip": 2}}]),
    "frame_stack": ("Numbers", [{"frame_stack": {"stack_size": 3}}]),
    "grayscale": ("Pictures", [{"grayscale": {"keep_dim": True}}]),
    "normalize": ("Numbers", ["normalize"]),
    "normalize_reward": ("Numbers", ["statistics", "normalize_reward"]),
    "pixels": ("Numbers", [{"pixels": {"render_only": True}}]),
    "rescale": ("Numbers", [{"rescale": {"min_obs": -1.0, "max_obs": 1.0}}]),
    "rescale_action": ("Numbers", [{"rescale_action": {"min_action": -1.0, "max_action": 1.0}}]),
    "resize": ("Pictures", [{"resize": {"shape": [36, 36]}}]),
    "statistics": ("Numbers", ["statistics", {"clip_reward": {"min_reward": -0.1, "max_reward": 0.0}}]),
    "time": ("Numbers", [{"time": {"normalize_time": False}}]),
    "fire_reset": ("Game", ["life_loss", "fire_reset"]),
    "life_loss": ("Game", ["life_loss"]),
    "panda_state": ("Panda", ["panda_state"]),
}
#: Sections `env.eval` and models besides.
PLAYED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"wrapper {name}": (
            {
                "env_id": f"toy_worlds:{world}-v0", "wrappers": wrappers,
                "kwargs": {"render_mode": "rgb_array"} if name == "pixels" else {},
            },
            {},
        )
        for name, (world, wrappers) in WRAPPED.items()
    },
    "kwargs": ({"env_id": "Pendulum-v1", "kwargs": {"g": 0.5}, "max_episode_steps": 40}, {}),
    "kwargs, wrapper, chunk": (
        {"env_id": "Pendulum-v1", "kwargs": {"g": 2.0}, "max_episode_steps": 40, "wrappers": [
            {"rescale_action": {"min_action": -1.0, "max_action": 1.0}}]},
        {"num_action_chunks": 3},
    ),
    "chunk": ({"env_id": "toy_worlds:Numbers-v0", "kwargs": {"gain": 2.0}}, {"num_action_chunks": 4}),
    "flow": ({"env_id": "toy_worlds:Numbers-v0"}, {"model_type": "flow", "num_action_chunks": 2}),
    "flow over lost lives": (
        {"env_id": "toy_worlds:Brave-v0", "wrappers": ["life_loss"]}, {"model_type": "flow", "num_action_chunks": 3}
    ),
    "flow from zero": ({"env_id": "toy_worlds:Numbers-v0", "noise": "zero"}, {"model_type": "flow", "num_action_chunks": 2}),
    "chunk over lost lives": (
        {"env_id": "toy_worlds:Game-v0", "wrappers": ["life_loss"]}, {"num_action_chunks": 3, "model_type": "cnn"}
    ),
    "texts": ({"env_id": "toy_worlds:Told-v0"}, {"num_action_chunks": 2}),
    "ends ignored": ({"env_id": "toy_worlds:Numbers-v0", "ignore_terminations": True, "max_episode_steps": 33}, {}),
}  # fmt: skip
_PLAY = """
import importlib.util, json, sys
sys.modules["rlhpc"] = None  # importing it would fail
import numpy
returns = {}
for name, folder in json.loads(sys.argv[1]).items():
    spec = importlib.util.spec_from_file_location("policy", folder + "/policy.py")
    policy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(policy)
    returns[name] = []
    for slot in range(2):
        env, limit = policy.make_env()
        returns[name].append(policy.play(env, limit, 7, slot))
print(json.dumps(returns))
"""


def test_each_wrapper_is_among_the_cases() -> None:
    assert set(WRAPPED) == set(BUILT_IN)


@pytest.mark.long
def test_the_script_plays_the_environment_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its returns are those of `rlhpc eval` with the same seed."""
    need_extra("embodied")
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    expected, folders = {}, {}
    for number, (name, (changes, chosen)) in enumerate(PLAYED.items()):
        side = played_section(**changes)
        env = make_env(side, 1)
        seen, acts = env.observation_space, env.action_space
        env.close()
        pictures = any(len(box.shape) == 3 for box in boxes_of(seen).values())
        acting = model(({"model_type": "cnn"} if pictures else {}) | chosen, seen, acts)
        rows: list[float] = []
        result = evaluate_policy(acting, side, seed=0, build_observer=lambda env, rows=rows: Returns(rows))
        assert result["episodes"] == len(rows) == 2
        expected[name] = rows
        folders[name] = str(exported(tmp_path / str(number), acting, side))
    ask = [sys.executable, "-P", "-c", _PLAY, json.dumps(folders)]
    done = subprocess.run(
        ask, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "PYTHONPATH": here}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    assert np.ptp([np.mean(values) for values in expected.values()]) > 1, "the cases can be told apart"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_id": "PickCube-v1", "env_type": "maniskill"}, "env_type maniskill needs code"),
        ({"env_id": "no_such_worlds:World-v0"}, "env_id no_such_worlds:World-v0 needs code"),
        ({"wrappers": ["statistics", {"their_wrappers:Mine": {"a": 1}}]}, "wrapper their_wrappers:Mine needs code"),
        ({"wrappers": ["ours"]}, "wrapper ours needs code"),
    ],
)
def test_the_script_names_the_code_that_it_lacks(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "export", model(*CASES["discrete"]), {"env_id": "CartPole-v1"} | changes)
    done = subprocess.run(
        [sys.executable, "-P", str(folder / "policy.py")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(f"policy.py: error: {message}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "missing", "message"),
    [
        (["--episodes", "0"], "", "--episodes is 0; it must be at least 1"),
        (["--seed", "-1"], "", "--seed is -1; it must be 0 or more"),
        ([], "config.json", "No such file"),
        ([], "policy.pt2", "all files of the export"),
        ([], "gymnasium", "playing needs gymnasium"),
        ([], "torch", "it needs torch"),
    ],
)
def test_the_script_refuses_as_the_commands_do(
    words: list[str], missing: str, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = exported(tmp_path / "export", model(*CASES["discrete"]), {"env_id": "CartPole-v1"})
    if "." in missing:
        (folder / missing).unlink()
    elif missing:
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["policy.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "policy.py"), run_name="__main__")
    text = capsys.readouterr().err
    assert ended.value.code == 2 and text.startswith("policy.py: error: ") and message in text
    assert len(text.splitlines()) == 1


def test_the_functions_of_the_script_end_no_program_that_imports_it(tmp_path: Path) -> None:
    folder = exported(tmp_path / "export", model(*CASES["discrete"]), {"env_id": "no_such_worlds:World-v0"})
    script = runpy.run_path(str(folder / "policy.py"), run_name="policy")
    with pytest.raises(script["PolicyError"], match="no_such_worlds"):
        script["make_env"]()


class Returns(StepObserver):
    """Returns of the episodes that count, by slot."""

    def __init__(self, rows: list[float]) -> None:
        self.rows, self.by_slot = rows, dict[int, float]()

    def on_step_end(self, slots: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> None:
        if "episode" in infos:
            for slot in np.flatnonzero(infos["episode"]["mask"] & slots).tolist():
                self.by_slot[slot] = float(infos["episode"]["return"][slot])
            self.rows[:] = [self.by_slot[slot] for slot in sorted(self.by_slot)]


def played_section(**changes: Any) -> Any:
    values = {"env_type": "gymnasium", "num_envs": 2, "num_episodes": 2, "seed": 7, "simulators": 0, "wrappers": [],
              "kwargs": {}, "max_episode_steps": None, "ignore_terminations": False, "simulator_python": None}  # fmt: skip
    return OmegaConf.structured(EvalEnvConfig(**(values | changes)))


def exported(folder: Path, policy: Any, env: Any) -> Path:
    """A folder with what an export has to play."""
    folder.mkdir()
    env = OmegaConf.to_container(env) if OmegaConf.is_config(env) else env
    config = {"env_id": env["env_id"], "env": env, "policy": policy.spec()}
    files = {"config.json": json.dumps(config, allow_nan=False).encode(), "policy.py": SCRIPT.encode()}
    for name, data in {**files, "policy.pt2": program_of(policy) or b"", **wrapper_files(env)}.items():
        (folder / name).write_bytes(data)
    return folder
