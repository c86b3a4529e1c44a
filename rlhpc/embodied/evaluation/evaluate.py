"""Offline evaluation of a checkpoint's policy by `rlhpc eval`, in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from torch import nn

from rlhpc import __version__
from rlhpc.checkpoint import read_manifest, require_valid
from rlhpc.checkpoint.start import find_weights
from rlhpc.config.typed import mapping, plain, select, typed
from rlhpc.embodied.config import EmbodiedConfig, PpoConfig
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.video import add_border, shrink, tile, write_video
from rlhpc.embodied.envs.base import VectorEnv, env_failed
from rlhpc.embodied.evaluation.episodes import Watch, evaluate_policy
from rlhpc.embodied.evaluation.intervention import find_intervention
from rlhpc.embodied.evaluation.recorder import record
from rlhpc.embodied.export import load_exported
from rlhpc.embodied.models.registry import load_policy
from rlhpc.jobs.paths import CONFIG
from rlhpc.metrics import ProgressBar
from rlhpc.runs.device import device_of, evaluation_device, settle
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, read_yaml, replace_durably
from rlhpc.runtime.plugins import load_attribute
from rlhpc.runtime.trust import Trust, without_variables


class ExpertPolicy:
    """Expert function `obs [N, ...] -> actions [N, A]` with the interface of a policy, without noise and values."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def predict_action_batch(
        self, obs: Any, mode: str = "eval", noise: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns actions `[N, 1, A]`."""
        del mode, noise
        arrays = (
            {name: tensor.cpu().numpy() for name, tensor in obs.items()} if isinstance(obs, dict) else obs.cpu().numpy()
        )
        actions = np.asarray(self._function(arrays))
        return torch.from_numpy(actions.reshape(len(actions), 1, -1)), {}


def load_actor(source: str, key: str, trust: Trust | None = None) -> Any:
    """Loads an expert from `module:function`, or the policy of a checkpoint, export folder or run folder.

    Args:
        source: Text from the user: `module:function`, or a path.
        key: Name of the option in messages.
        trust: Trust settings for code that a folder names.

    Raises:
        ConfigError, CheckpointError: The source cannot be loaded.
    """
    if ":" in source and not expand_home(source).exists():
        return ExpertPolicy(load_attribute(source, key))
    folder = find_weights(source, key)
    if not any((folder / name).is_file() for name in ("config.json", "model.json")):
        raise CheckpointError(f"{folder} says nothing of the network (no model.json, no config.json)")
    return load_exported(folder, trust=trust)


#: Maximum number of frames in a video.
MAX_FRAMES = 1500


class Film(Watch):
    """Video of an evaluation, with one frame before each step that shows the slots side by side. After its episode,
    a slot keeps the last image, with a border.

    Args:
        env: Vector environment.
        episodes: Number of slots to show.
    """

    def __init__(self, env: VectorEnv, episodes: int) -> None:
        self._env, self._slots = env, list(range(min(episodes, env.num_envs)))
        self._last_pictures: dict[int, np.ndarray] = {}
        self._pictures: np.ndarray | None = None
        self.frames: list[np.ndarray] = []
        self.available = True

    def before(self, obs: Any, actions: np.ndarray) -> None:
        """Renders the slots (`Watch.before`)."""
        if not self.available or len(self._last_pictures) == len(self._slots) or len(self.frames) >= MAX_FRAMES:
            return
        frames = self._env.render(self._slots)
        self.available = frames is not None
        if frames is None:
            return
        self._pictures = shrink(np.asarray(frames))
        self.frames.append(
            tile(
                np.stack(
                    [self._last_pictures.get(slot, self._pictures[index]) for index, slot in enumerate(self._slots)]
                )
            )
        )

    def after(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Stores the last image of each slot in which an episode ended, with a border (`Watch.after`)."""
        episode = infos.get("episode", {})
        success = next((episode[name] for name in ("success_once", "success") if name in episode), None)
        has_ended = (terminations | truncations) & ~env_failed(infos, len(slots))
        for index, slot in enumerate(self._slots):
            if self._pictures is not None and slot not in self._last_pictures and has_ended[slot]:
                self._last_pictures[slot] = add_border(
                    self._pictures[index], success is not None and bool(success[slot])
                )

    def write(self, path: Path, fps: int) -> None:
        """Writes the video as an mp4 file. The last frame is shown for half a second."""
        if self._pictures is None:
            return
        last_frame = tile(
            np.stack([self._last_pictures.get(slot, self._pictures[index]) for index, slot in enumerate(self._slots)])
        )
        write_video(path, [*self.frames, *[last_frame] * max(1, fps // 2)], fps)


def evaluate_checkpoint(
    checkpoint: str | Path,
    *,
    cfg: EmbodiedConfig | None = None,
    suite: str = "default",
    episodes: int | None = None,
    output: str | Path | None = None,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Evaluates a checkpoint with deterministic actions and a fixed number of episodes per slot.

    Args:
        checkpoint: A `global_step_<N>` folder of any run, on any machine.
        cfg: Configuration that replaces the checkpoint's config.yaml, for section `env.eval` and `runner.seed`.
        suite: Name of the evaluation.
        episodes: Number of episodes; default `env.eval.num_episodes`.
        output: Path of the JSON file, which is written atomically.
        trust_code: Import code that the checkpoint names as `module:Class`, even if `cfg` does not name it.

    Returns:
        Result of `evaluate_policy`, with suite, global_step and checkpoint, and the video's name if one was written.

    Raises:
        CheckpointError: The checkpoint has faults.
        ConfigError: The environment cannot be built, or does not fit the policy.
    """
    folder = expand_home(checkpoint).absolute()
    require_valid(folder, hint="or evaluate another checkpoint")
    cfg = _load_config(folder, Trust(trust_code)) if cfg is None else cfg
    env_cfg, seed = cfg.env.eval, cfg.runner.seed
    policy = settle(load_policy(folder, Trust.of(plain(cfg), trust_code)), evaluation_device(cfg))
    films: list[Film] = []

    def film(env: VectorEnv) -> Film:
        films.append(Film(env, env_cfg.video_episodes))
        return films[0]

    # A checkpoint of an older version has no such key in its configuration.
    build_film = film if output is not None and mapping(env_cfg).get("video_episodes", 0) else None
    num_episodes = env_cfg.num_episodes if episodes is None else episodes
    start = time.perf_counter()
    try:
        with ProgressBar(num_episodes, name="eval", unit="episode") as progress_bar:

            def update_bar(done: int, steps: int) -> None:
                progress_bar.update(done, {"time/env_steps_per_s": steps / (time.perf_counter() - start)})

            evaluation = evaluate_policy(
                policy,
                env_cfg,
                seed=seed,
                episodes=episodes,
                device=device_of(policy),
                watch=build_film,
                on_progress=update_bar,
            )
    except RuntimeError as error:
        raise ConfigError(f"env.eval.env_id={cfg.env.eval.env_id} does not fit {folder}'s policy: {error}") from error
    evaluation |= {"suite": suite, "global_step": int(read_manifest(folder)["global_step"]), "checkpoint": str(folder)}
    if output is not None:
        if films and films[0].available:
            video = Path(output).with_suffix(".mp4")
            films[0].write(video, env_cfg.video_fps)
            evaluation["video"] = video.name
        elif films:
            note(f"{cfg.env.eval.env_id} cannot be rendered here, so there is no video")
        write_result(Path(output), evaluation)
    return evaluation


def write_result(output: Path, result: dict[str, Any]) -> None:
    """Writes an evaluation's result as JSON, atomically.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        replace_durably(output, json.dumps(result, indent=2, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error


def record_episodes(
    source: str,
    cfg: EmbodiedConfig,
    output: Path,
    *,
    episodes: int,
    only_success: bool = False,
    mode: str = "eval",
    seed: int | None = None,
    teacher: str | None = None,
    intervene: str | None = None,
    only_taken: bool = False,
    trust_code: bool = False,
    options: WriteOptions | None = None,
) -> dict[str, Any]:
    """Records episodes of `env.eval` as trajectories.

    Args:
        source: A checkpoint, an export folder, a run folder, or an expert as `module:function`.
        cfg: Configuration.
        output, episodes, only_success, mode: See `record`.
        seed: Seed instead of `runner.seed`.
        teacher: Policy that labels the episodes: its actions replace the executed actions. Same forms as `source`.
        intervene: Source of interventions (`find_intervention`).
        only_taken, options: See `record`.
        trust_code: Import code that a checkpoint or export names as `module:Class`, even if `cfg` does not name it.

    Returns:
        See `record`.
    """
    trust = Trust.of(plain(cfg), trust_code)
    actor = _settled(load_actor(source, "--expert" if ":" in source else "--checkpoint", trust), cfg)
    teacher_policy = None if teacher is None else _settled(load_actor(teacher, "--teacher", trust), cfg)
    seed = cfg.runner.seed if seed is None else seed
    provenance = {"source": source, "teacher": teacher, "mode": mode, "seed": seed, "rlhpc_version": __version__}
    provenance |= {} if intervene is None else {"intervene": intervene}
    if teacher is not None and intervene is not None:
        raise ConfigError("--teacher and --intervene: either the one labels what is played, or the other acts")
    intervention = None if intervene is None else find_intervention(intervene)
    source_type = "dagger" if teacher is not None else "scripted" if isinstance(actor, ExpertPolicy) else "rl"
    source_type = source_type if intervention is None else "human"
    try:
        return record(
            actor, cfg.env.eval, output, episodes=episodes, seed=seed, only_success=only_success, mode=mode,
            teacher=teacher_policy, intervention=intervention, only_taken=only_taken, source_type=source_type,
            source_desc=source, extra={"rlhpc": provenance}, options=options,
        )  # fmt: skip
    except RuntimeError as error:
        raise ConfigError(
            f"env.eval.env_id={cfg.env.eval.env_id} does not fit the policy of {source}: {error}"
        ) from error


def _settled(actor: Any, cfg: EmbodiedConfig) -> Any:
    """Moves a policy to the device of evaluations; returns an expert's function unchanged."""
    return settle(actor, evaluation_device(cfg)) if isinstance(actor, nn.Module) else actor


def _load_config(folder: Path, trust: Trust) -> EmbodiedConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; pass the run's configuration with --config")
    try:
        content = read_yaml(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("env"), dict):
        raise CheckpointError(f"{path}: no configuration of a policy in an environment (no section env)")
    cfg = OmegaConf.create(content if trust.everything else without_variables(content, trust, str(path)))
    trust.check(plain(cfg), str(path))
    if missing_keys := [key for key in ("env.eval", "runner.seed") if select(cfg, key) is None]:
        raise CheckpointError(f"{path}: no {missing_keys[0]}; pass a configuration")
    return typed(PpoConfig, cfg)  # every task type has these same sections
