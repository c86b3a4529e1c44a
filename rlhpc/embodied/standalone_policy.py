"""Standalone policy of an export, which acts without rlhpc: policy.pt2, policy.py and wrapper sources."""

from __future__ import annotations

import inspect
import io
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.embodied.envs import interface
from rlhpc.embodied.envs.wrappers import BUILT_IN

if TYPE_CHECKING:
    from rlhpc.embodied.models import Policy

log = logging.getLogger(__name__)

#: Wrappers of rlhpc, with file in the export folder, module and class. An export contains their source.
_OWN_WRAPPERS = {
    name: (f"wrapper_{module.rpartition('.')[2]}.py", module, wrapper)
    for name, (module, wrapper) in {
        name: path.split(":") for name, path in BUILT_IN.items() if not path.startswith("gymnasium.")
    }.items()
}
_WRAPPERS = {
    name: list(_OWN_WRAPPERS[name][::2]) if name in _OWN_WRAPPERS else path.split(":")
    for name, path in BUILT_IN.items()
}


def _format_entries(wrappers: dict[str, list[str]]) -> str:
    """Formats a dict as Python source, one line per entry."""
    return "{\n" + "".join(f"    {name!r}: {path!r},\n" for name, path in wrappers.items()) + "}"


#: Source code of the environment checks of `rlhpc eval`.
_INTERFACE = "".join(
    f"{inspect.getsource(function)}\n\n"
    for function in (
        interface.reset_env, interface.step_env, interface.to_number, interface.to_flag, interface.to_scalar,
        interface.takes_options, interface.failed_wrapper, interface.describe, interface.refusal,
    )
)  # fmt: skip
#: Source code of policy.py, which acts in the Gymnasium environment with the folder's files and torch, without rlhpc.
SCRIPT = '''"""The policy of this folder: needs torch and numpy, and gymnasium to play.

`python policy.py --episodes 10 --seed 0` plays as `rlhpc eval --episodes 10 env.eval.num_envs=10 env.eval.seed=0` does: in the
environment of config.json, with its arguments, wrappers and step limit, and with every action of a chunk.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path


class PolicyError(Exception):
    """Mistake of the user of this folder; a command prints its message and exits with code 2."""


class InterfaceError(PolicyError):
    """An environment has another interface than gymnasium's."""


def fail(message):
    """Ends the command as those of rlhpc end where the user made a mistake."""
    print(f"policy.py: error: {message}", file=sys.stderr)
    sys.exit(2)


HERE = Path(__file__).resolve().parent
try:
    import numpy as np
    import torch

    CONFIG = json.loads((HERE / "config.json").read_text())
    with (HERE / "policy.pt2").open("rb") as file:
        EXPORTED = torch.export.load(file)
except (ImportError, OSError, ValueError, RuntimeError) as error:
    if __name__ != "__main__":
        raise
    fail(f"{HERE} cannot be used: {error}; it needs torch, numpy, and all files of the export")
PROGRAM = EXPORTED.module()
WRAPPERS = @WRAPPERS@  # module, or file of this folder, and class
STARTS = EXPORTED.example_inputs[0][1:]  # the noise from which a flow begins, if the policy is one


def noise(seed=0, slot=0, episode=0, decision=0):
    """What the program begins from besides an observation, as `rlhpc eval` draws it."""
    if (CONFIG.get("env") or {}).get("noise") == "zero":
        return [torch.zeros(1, *each.shape[1:]) for each in STARTS]
    state = np.random.SeedSequence([seed, slot, episode, decision]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    return [torch.randn((1, *each.shape[1:]), generator=torch.Generator().manual_seed(int(state))) for each in STARTS]


def act(obs, *key):
    """The most likely action for one observation of the environment, as `env.step` takes it; the first one of a chunk.

    `key` as `noise` takes it.
    """
    return actions(obs, *key)[0]


def actions(obs, *key):
    """All actions that are chosen at once for one observation, to be played one after another."""
    spaces = CONFIG["policy"].get("observation_space", {}).get("spaces", {})
    if isinstance(obs, dict):
        rows = {name: _row(part, spaces.get(name)) for name, part in obs.items()}
    else:
        rows = _row(obs, None)
    with torch.no_grad():
        chunk = PROGRAM(rows, *noise(*key))[0].numpy()
    return [_action(action) for action in chunk]


def _row(part, space):
    if isinstance(part, str):  # zero-padded UTF-8
        size = space["shape"][0]
        data = part.encode()[:size].decode(errors="ignore").encode()
        part = np.frombuffer(data.ljust(size, bytes(1)), np.uint8).copy()
    return torch.as_tensor(np.asarray(part))[None]


def _action(action):
    space = CONFIG["policy"]["action_space"]
    if space["type"] == "Discrete":
        return int(action[0]) + space["start"]
    if space["type"] == "Box":
        low, high = (np.asarray(space[name], np.float64) for name in ("low", "high"))
        low, high = (bound.reshape(space["shape"]) if bound.ndim else bound for bound in (low, high))
        return np.clip(action.reshape(space["shape"]), low, high).astype(space["dtype"])
    return action + np.asarray(space.get("start", 0))


def make_env():
    """The environment that the policy was evaluated in, and its step limit (0 for none)."""
    try:
        import gymnasium
        from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
    except ImportError as error:
        raise PolicyError(f"playing needs gymnasium: {error}; or give observations to act()") from None
    section = CONFIG.get("env") or {}
    kind, env_id = section.get("env_type", "gymnasium"), CONFIG["env_id"]
    if kind != "gymnasium":
        raise PolicyError(
            f"env_type {kind} needs code that this folder does not have; play {env_id} with rlhpc, "
            "or give observations to act()"
        )
    if sys.platform == "linux" and not os.environ.get("DISPLAY") and "MUJOCO_GL" not in os.environ:
        try:
            ctypes.CDLL("libEGL.so.1")
            os.environ["MUJOCO_GL"] = "egl"
        except OSError:
            pass
    try:
        env = gymnasium.make(env_id, disable_env_checker=True, **(section.get("kwargs") or {}))
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise PolicyError(f"env_id {env_id} needs code that is not installed here: {error}") from None
    limit = section.get("max_episode_steps")
    if limit is None:
        limit = env.spec.max_episode_steps if env.spec is not None else None
    while isinstance(env, (TimeLimit, OrderEnforcing, PassiveEnvChecker)):
        env = env.env
    if env.unwrapped.spec is not None:
        env.unwrapped.spec.max_episode_steps = limit or None
    for entry in section.get("wrappers") or []:
        ((name, settings),) = entry.items() if isinstance(entry, dict) else ((entry, None),)
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in (settings or {}).items()}
        try:
            env = _wrapper(name)(env, **settings)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise PolicyError(f"wrapper {name} cannot be put around {env_id}: {error}") from None
    return env, limit or 0


def _wrapper(name):
    offered = {entry.name.lower(): entry.value for entry in entry_points(group="rlhpc.wrappers")}
    known = WRAPPERS.get(name.lower()) or offered.get(name.lower(), name).split(":")
    try:
        if len(known) != 2:
            raise ModuleNotFoundError("no package that is installed here offers it")
        if known[0].endswith(".py"):
            spec = importlib.util.spec_from_file_location(known[0][:-3], HERE / known[0])
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(known[0])
        return getattr(module, known[1])
    except (ImportError, AttributeError, OSError) as error:
        raise PolicyError(f"wrapper {name} needs code that this folder does not have: {error}") from None


@INTERFACE@
def play(env, limit, seed, slot=0):
    """The return of the first episode in a slot of `rlhpc eval` with this seed."""
    from gymnasium import Wrapper
    from gymnasium.wrappers import RecordEpisodeStatistics

    counted = env  # the wrapper that counts returns; those above it may change rewards
    while isinstance(counted, Wrapper) and not isinstance(counted, RecordEpisodeStatistics):
        counted = counted.env
    ignored = (CONFIG.get("env") or {}).get("ignore_terminations", False)
    name = CONFIG["env_id"]
    obs, _ = reset_env(env, name, seed=int(np.random.SeedSequence([seed, slot]).generate_state(1)[0]))
    total, steps, part, decision = 0.0, 0, 0, 0
    while True:
        chosen = actions(obs, seed, slot, part, decision)
        decision += 1
        for action in chosen:
            obs, reward, terminated, truncated, info = step_env(env, name, action)
            total, steps = total + reward, steps + 1
            terminated = terminated and not ignored
            if terminated or truncated or (limit and steps >= limit):
                if not (terminated and "life_lost" in info):
                    return float(counted.episode_returns) if isinstance(counted, RecordEpisodeStatistics) else total
                obs, _ = reset_env(env, name)
                part, decision = part + 1, 0
                break


def main():
    parser = argparse.ArgumentParser(description="Plays episodes with the policy of this folder.")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.episodes < 1:
        raise PolicyError(f"--episodes is {args.episodes}; it must be at least 1")
    if args.seed < 0:
        raise PolicyError(f"--seed is {args.seed}; it must be 0 or more")
    env, limit = make_env()
    for number in range(args.episodes):
        if number:
            env, limit = make_env()  # wrappers may remember earlier episodes
        print(f"return {play(env, limit, args.seed, number):g}", flush=True)
        env.close()


if __name__ == "__main__":
    try:
        main()
    except PolicyError as error:
        fail(error)
'''.replace("@WRAPPERS@", _format_entries(_WRAPPERS)).replace("@INTERFACE@", _INTERFACE)


def wrapper_files(env: Any) -> dict[str, bytes]:
    """Returns the sources of rlhpc's wrappers that a section `env.eval` names, by file name in an export's folder."""
    files: dict[str, bytes] = {}
    for wrapper_entry in (env or {}).get("wrappers") or []:
        name = next(iter(wrapper_entry), "") if isinstance(wrapper_entry, dict) else wrapper_entry
        if str(name).lower() in _OWN_WRAPPERS:
            file, module, _ = _OWN_WRAPPERS[str(name).lower()]
            module_spec = find_spec(module)
            assert module_spec is not None and module_spec.origin is not None
            files[file] = Path(module_spec.origin).read_bytes()
    return files


class _ActingModule(nn.Module):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Any, noise: Tensor | None = None) -> Tensor:
        """Returns the most likely actions `[B, chunk, dim]`, for noise from `Policy.sample_start` if the policy acts from
        noise.
        """
        return self.policy.predict_action_batch(obs, mode="eval", noise=noise)[0]


def program_of(policy: Policy) -> bytes | None:
    """Returns the content of `policy.pt2`; None for a policy that torch.export cannot trace.

    Args:
        policy: Policy in eval mode, on the CPU. Its program takes the environment's observations `[B, ...]` with any B, or a
            dict of them, and noise `[B, *start_shape]` if the policy acts from noise.
    """
    batch = torch.export.Dim("batch", min=1)
    try:
        # Two rows, because torch.export would treat a dimension of size one as a constant.
        obs = _make_zero_observations(policy.observation_space, 2)
        shapes: Any = {key: {0: batch} for key in obs} if isinstance(obs, dict) else {0: batch}
        with torch.no_grad():
            inputs: tuple[Any, ...] = (obs,)
            if policy.start_shape:
                inputs, shapes = (obs, torch.zeros(2, *policy.start_shape)), (shapes, {0: batch})
            else:
                shapes = (shapes,)
            program = torch.export.export(_ActingModule(policy).eval(), inputs, dynamic_shapes=shapes)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    except Exception as error:  # any code of a model that cannot be traced
        log.info("no program of this policy: %s", str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None
    return buffer.getvalue()


def _make_zero_observations(space: Any, num_rows: int) -> Any:
    """Returns `num_rows` zero observations of a space, as tensors."""
    if hasattr(space, "spaces"):
        return {key: _make_zero_observations(subspace, num_rows) for key, subspace in space.spaces.items()}
    return torch.from_numpy(np.zeros((num_rows, *space.shape), space.dtype))
