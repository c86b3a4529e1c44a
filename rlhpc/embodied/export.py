"""Export of a checkpoint: model.safetensors, config.json and README.md in the Hugging Face layout, and policy.pt2 with
policy.py, which act without rlhpc.

export/global_step_<N>/config.json   {"architectures", "model_type", "policy": {...}, "env_id", "global_step", ...}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhpc.checkpoint.export_folder import default_output, filled_folder, read_object, require_free, results_beside
from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.checkpoint.store import require_valid
from rlhpc.jobs.paths import CONFIG, MODEL
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home, read_yaml, write_durably
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.embodied.models import Policy
import inspect
import io
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.checkpoint.export_folder import head
from rlhpc.embodied.envs import interface
from rlhpc.embodied.envs.wrappers import BUILT_IN
from rlhpc.runtime.text import interval_text

if TYPE_CHECKING:
    from rlhpc.embodied.models import Policy


def policy_card(
    config: Mapping[str, Any],
    checkpoint: str,
    results: Sequence[Mapping[str, Any]],
    *,
    licence: str | None,
    standalone: bool = False,
    released: bool = False,
) -> str:
    """Returns the model card of an embodied policy.

    Args:
        config: Content of the export's config.json.
        checkpoint: Name of the checkpoint.
        results: From `results_beside`.
        licence: An SPDX identifier.
        standalone: Whether `policy.pt2` and `policy.py` are in the folder.
        released: Whether the folder has the format in which the policy's family is released.
    """
    env = config["env_id"] or "the run's environment"
    name, version, step = config["run"] or checkpoint, config["rlhpc_version"], config["global_step"]
    tags = ["reinforcement-learning", "rlhpc", *([str(config["env_id"])] if config["env_id"] else [])]
    text = head(
        library="rlhpc", task="reinforcement-learning", licence=licence, name=str(name), tags=tags, results=results
    )
    text += (
        f"# {name}: a policy for {env}\n\nTrained with rlhpc {version}; global step {step}, from `{checkpoint}`.\n\n"
    )
    if results:
        text += "| suite | episodes | mean return | 95 % interval | success once |\n|---|---|---|---|---|\n"
        for result in results:
            success = f"{result['success_once']:.1%}" if "success_once" in result else ""
            text += (
                f"| {result.get('suite', 'default')} | {result.get('episodes', '')} | {result['return_mean']:.2f} | "
            )
            text += f"{interval_text(result.get('return_ci95'), '.2f', ' to ') or '–'} | {success} |\n"
        text += "\n"
    if released:
        kind = config["policy"]["model"]["model_type"]
        text += f"The folder is as models of the family {kind} are released, for their own code.\n\n## With rlhpc\n\n"
        return text + f"```yaml\nactor: {{model: {{model_type: {kind}, model_path: <this folder>}}}}\n```\n"
    text += "| file | content |\n|---|---|\n| `model.safetensors` | the weights |\n"
    text += "| `config.json` | the policy's specification and the environment it was trained in |\n"
    if standalone:
        text += "| `policy.pt2` | the same policy as a torch program: `[B, …]` in, actions `[B, chunk, dim]` out |\n"
        text += "| `policy.py` | acts with it, without rlhpc: `python policy.py` plays an episode |\n"
    text += f"\n## The network\n\n{_forward(config['policy'])}\n\n## With rlhpc\n\n"
    text += '```python\nfrom rlhpc import load_exported\n\npolicy = load_exported(".")\n'
    text += 'actions, extras = policy.predict_action_batch(obs, mode="eval")   # obs: tensor [B, …]\n```\n'
    return text


def _forward(spec: Mapping[str, Any]) -> str:
    """Returns a description of the network that suffices to rebuild it."""
    model, action = spec.get("model") or {}, spec.get("action_space") or {}
    kind = model.get("model_type", spec.get("model_type", "a model of its own"))
    if kind != "mlp":
        return f"`model_type` is `{kind}`; `config.json` has its options."
    layers = " → ".join(
        f"Linear({width}) → {model.get('activation', 'tanh')}" for width in model.get("hidden_sizes", ())
    )
    last = {
        "Discrete": "logits; the action is the largest",
        "Box": "the mean of a Gaussian, clipped to the action space",
    }
    gives = last.get(str(action.get("type")), "logits for each part of the action")
    return (
        "Observations are flattened (several in the order of their names). `actor.*` of `model.safetensors`: "
        f"{layers} → Linear: {gives}. `critic.*`: the same layers, and the value."
    )


EXPORT_FORMAT = 1


def export_checkpoint(checkpoint: Path, output: Path | None = None, *, licence: str | None = None) -> Path:
    """Writes the export folder of a checkpoint, atomically; an existing one is replaced.

    Args:
        checkpoint: A `global_step_<N>` folder of any run, on any machine.
        output: Target folder; by default `export/global_step_<N>` of the checkpoint's run.
        licence: SPDX identifier for the model card.

    Returns:
        The export folder.

    Raises:
        CheckpointError: The checkpoint has faults, or the target cannot be written.
    """
    checkpoint, target, step = _from_and_to(checkpoint, output)
    config = _config(checkpoint, step)
    try:
        model = (checkpoint / MODEL).read_bytes()
        acting = _acting(checkpoint, config)
        results = results_beside(checkpoint, step)
        card = policy_card(config, checkpoint.name, results, licence=licence, standalone=bool(acting))
        _write_folder(
            target,
            {
                MODEL: model,
                "config.json": json.dumps(_finite(config), indent=2, sort_keys=True, allow_nan=False).encode() + b"\n",
                "README.md": card.encode(),
                **acting,
            },
        )
    except OSError as error:
        raise _not_written(checkpoint, target, error) from error
    return target


def release_checkpoint(
    checkpoint: Path, output: Path | None = None, *, licence: str | None = None, trust_code: bool = False
) -> Path:
    """Writes a checkpoint's policy in the format of its family's releases, atomically; an existing folder is replaced.

    Args:
        checkpoint, output, licence: As in `export_checkpoint`.
        trust_code: As in `load_exported`.

    Returns:
        The folder.

    Raises:
        ConfigError: The policy's family has no such format.
        CheckpointError: The checkpoint has faults, or the target cannot be written.
    """
    checkpoint, target, step = _from_and_to(checkpoint, output)
    policy: Any = load_exported(checkpoint, trust_code=trust_code)
    if not hasattr(policy, "release"):
        kind = policy.spec()["model"]["model_type"]
        raise ConfigError(f"--released is for openvla and lerobot; {checkpoint} is of model_type {kind}: leave it out")
    try:
        results = results_beside(checkpoint, step)
        card = policy_card(_config(checkpoint, step), checkpoint.name, results, licence=licence, released=True)
        with filled_folder(target) as staging:
            policy.release(staging, step)
            write_durably(staging / "README.md", card.encode())
    except OSError as error:
        raise _not_written(checkpoint, target, error) from error
    return target


def _from_and_to(checkpoint: Path, output: Path | None) -> tuple[Path, Path, int]:
    """Returns the checked checkpoint, a free target, and the step."""
    checkpoint = expand_home(checkpoint).absolute()
    require_valid(checkpoint, hint="or convert another checkpoint with: rlhpc convert <checkpoint>")
    step = int(read_manifest(checkpoint)["global_step"])
    target = default_output(checkpoint, step) if output is None else expand_home(output).absolute()
    require_free(target)
    return checkpoint, target, step


def _not_written(checkpoint: Path, target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} could not be exported: {error.filename or target}: {error.strerror}. "
        f"{advice(error, target)}, or give another output folder"
    )


def load_exported(folder: str | Path, *, trust_code: bool = False, trust: Trust | None = None) -> Policy:
    """Loads the policy of an export folder (or of a checkpoint folder), in eval mode, on the CPU.

    Args:
        folder: The folder.
        trust_code: Import code that the folder names as `module:Class`. Without it, only models are built that are built
            in, registered or part of an installed package: a foreign folder cannot run code.
        trust: Detailed trust settings instead of `trust_code`.

    Raises:
        CheckpointError: Files are missing, or the weights do not fit the policy that config.json describes.
        ConfigError: The folder names code that is not trusted.
    """
    from rlhpc.embodied.models.registry import load_policy  # with torch, which an export does without

    return load_policy(expand_home(folder), trust or Trust(trust_code))


def _config(checkpoint: Path, step: int) -> dict[str, Any]:
    from rlhpc import __version__

    spec = read_object(checkpoint / "model.json")
    run: dict[str, Any] = {}
    if (checkpoint / CONFIG).is_file():
        try:
            run = read_yaml((checkpoint / CONFIG).read_bytes()) or {}
        except (ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"{checkpoint / CONFIG}: cannot be read as YAML: {error}") from error
    env = _at(run, "env", "eval") or _at(run, "env", "train") or {}
    return {
        "format": EXPORT_FORMAT,
        "architectures": ["rlhpc.models.Policy"],
        "model_type": spec.get("model_type", "rlhpc"),
        "policy": spec,
        "env_id": env.get("env_id") or _at(run, "env", "train", "env_id"),
        "env": env,
        "run": _at(run, "runner", "name"),
        "global_step": step,
        "rlhpc_version": __version__,
    }


def _finite(value: Any) -> Any:
    """Replaces infinities by words; JSON lacks them, and checkpoints of earlier versions contain them."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _write_folder(target: Path, files: dict[str, bytes]) -> None:
    with filled_folder(target) as staging:
        for name, data in files.items():
            write_durably(staging / name, data)


def _acting(checkpoint: Path, config: dict[str, Any]) -> dict[str, bytes]:
    """Returns the files by which the policy acts without rlhpc; empty if torch.export cannot trace it, or if its code is not
    trusted.
    """

    try:
        program = program_of(load_exported(checkpoint))
    except (
        RlhpcError,
        KeyError,
        TypeError,
    ):  # code that is not trusted, or a description of something other than a policy
        return {}
    if program is None:
        return {}
    return {"policy.pt2": program, "policy.py": SCRIPT.encode(), **wrapper_files(config["env"])}


log = logging.getLogger(__name__)

#: Wrappers of rlhpc, whose source an export contains: file in its folder, module, and class.
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


def _listed(wrappers: dict[str, list[str]]) -> str:
    """Formats a dict as Python source, one line per entry."""
    return "{\n" + "".join(f"    {name!r}: {path!r},\n" for name, path in wrappers.items()) + "}"


#: Checks of `rlhpc eval`, as source.
_INTERFACE = "".join(
    f"{inspect.getsource(function)}\n\n"
    for function in (
        interface.reset_env, interface.step_env, interface.to_number, interface.to_flag, interface.to_scalar,
        interface.takes_options, interface.failed_wrapper, interface.describe, interface.refusal,
    )
)  # fmt: skip
#: Acts in its Gymnasium environment with the folder's files and torch; it knows nothing of rlhpc.
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
    """A mistake of whoever uses this folder; as a command, one message and exit code 2."""


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
'''.replace("@WRAPPERS@", _listed(_WRAPPERS)).replace("@INTERFACE@", _INTERFACE)


def wrapper_files(env: Any) -> dict[str, bytes]:
    """Returns the sources of rlhpc's wrappers that a section `env.eval` names, by file name in an export's folder."""
    files: dict[str, bytes] = {}
    for entry in (env or {}).get("wrappers") or []:
        name = next(iter(entry), "") if isinstance(entry, dict) else entry
        if str(name).lower() in _OWN_WRAPPERS:
            file, module, _ = _OWN_WRAPPERS[str(name).lower()]
            spec = find_spec(module)
            assert spec is not None and spec.origin is not None
            files[file] = Path(spec.origin).read_bytes()
    return files


class _Acts(nn.Module):
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
        policy: Policy in eval mode, on the CPU. Its program takes observations `[B, ...]` with any B, in the environment's
            form, or a dict of them; and noise `[B, *start_shape]`, if the policy acts from noise.
    """
    batch = torch.export.Dim("batch", min=1)
    try:
        # Two rows: a dimension of one would be taken for a constant.
        obs = _rows(policy.observation_space, 2)
        shapes: Any = {key: {0: batch} for key in obs} if isinstance(obs, dict) else {0: batch}
        with torch.no_grad():
            inputs: tuple[Any, ...] = (obs,)
            if policy.start_shape:
                inputs, shapes = (obs, torch.zeros(2, *policy.start_shape)), (shapes, {0: batch})
            else:
                shapes = (shapes,)
            program = torch.export.export(_Acts(policy).eval(), inputs, dynamic_shapes=shapes)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    except Exception as error:  # whatever a model's code is that a trace cannot follow
        log.info("no program of this policy: %s", str(error).splitlines()[0] if str(error) else type(error).__name__)
        return None
    return buffer.getvalue()


def _rows(space: Any, count: int) -> Any:
    """Returns `count` zero observations of a space, as tensors."""
    if hasattr(space, "spaces"):
        return {key: _rows(part, count) for key, part in space.spaces.items()}
    return torch.from_numpy(np.zeros((count, *space.shape), space.dtype))
