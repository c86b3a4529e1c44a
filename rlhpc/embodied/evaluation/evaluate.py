"""Offline evaluation of a checkpoint's policy or success model by `rlhpc eval`, in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from torch import nn

from rlhpc import __version__
from rlhpc.checkpoint import read_manifest, require_valid
from rlhpc.checkpoint.start import find_weights
from rlhpc.config.typed import mapping, plain, select, typed
from rlhpc.embodied.config import BcConfig, EmbodiedConfig, PpoConfig
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.demonstrations import DemoEpisode, held_out_of, index_demos
from rlhpc.embodied.data.frames import FramePool, load_obs
from rlhpc.embodied.data.trajectory import Trajectory
from rlhpc.embodied.data.video import add_border, shrink, tile, write_video
from rlhpc.embodied.envs.base import VectorEnv, env_failed
from rlhpc.embodied.envs.gymnasium_env import row_spec, to_env_actions, write_row
from rlhpc.embodied.envs.observations import boxes_of, encode_text, take
from rlhpc.embodied.evaluation.episodes import StepObserver, evaluate_policy
from rlhpc.embodied.evaluation.recorder import record
from rlhpc.embodied.export import load_exported
from rlhpc.embodied.interventions.sources import find_intervention
from rlhpc.embodied.models.base import Policy, noise_of_episodes
from rlhpc.embodied.models.registry import load_policy
from rlhpc.jobs.paths import CONFIG
from rlhpc.metrics import ProgressBar
from rlhpc.runs.device import device_of, evaluation_device, place_policy, to_tensors
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


def load_actor(policy_source: str, key: str, code_trust: Trust | None = None) -> Any:
    """Loads an expert from `module:function`, or the policy of a checkpoint, export folder or run folder.

    Args:
        policy_source: Text from the user: `module:function`, or a path.
        key: Name of the option in messages.
        code_trust: Trust settings for code that a folder names.

    Raises:
        ConfigError, CheckpointError: The source cannot be loaded.
    """
    if ":" in policy_source and not expand_home(policy_source).exists():
        return ExpertPolicy(load_attribute(policy_source, key))
    folder = find_weights(policy_source, key)
    if not any((folder / name).is_file() for name in ("config.json", "model.json")):
        raise CheckpointError(f"{folder} says nothing of the network (no model.json, no config.json)")
    return load_exported(folder, trust=code_trust)


class ActingPolicy:
    """Policy that acts on single observations of one environment, deterministically as in `rlhpc eval`.

    Args:
        policy: Policy in eval mode, on the CPU.
        seed: Seed of the noise from which a flow policy begins.
    """

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.policy, self._seed, self._num_decisions = policy, seed, 0

    def act(self, observation: Any) -> Any:
        """Returns the action for an observation, as `env.step` accepts it; of a chunk of actions, the first.

        Raises:
            ConfigError: The observation does not fit the policy's observation space.
        """
        return self.actions(observation)[0]

    def actions(self, observation: Any) -> list[Any]:
        """Returns all actions that the policy chooses for an observation, in the order in which they are executed.

        Raises:
            ConfigError: The observation does not fit the policy's observation space.
        """
        rows = self._rows(observation)
        noise: dict[str, Any] = {}
        if self.policy.start_shape:
            noise["noise"] = noise_of_episodes(self.policy.sample_start, self._seed, [0], [self._num_decisions])
        self._num_decisions += 1
        with torch.no_grad():
            chunk = self.policy.predict_action_batch(rows, mode="eval", **noise)[0][0].numpy()
        return [to_env_actions(self.policy.action_space, action[None])[0] for action in chunk]

    def _rows(self, observation: Any) -> Any:
        """Returns an observation as tensors with a batch dimension of one."""
        space = self.policy.observation_space
        rows = {}
        for key, box in boxes_of(space).items():
            try:
                array = observation[key] if key else observation
                if isinstance(array, str):
                    array = encode_text(array, box.shape[0])
                shape, dtype = row_spec(box, 1)
                row = np.zeros(shape, dtype)
                write_row(row, 0, array)
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"the observation does not fit the policy{f' at {key!r}' if key else ''}: {error}; "
                    f"the policy's observation space is {space}"
                ) from None
            rows[key] = torch.from_numpy(row)
        return rows if isinstance(getattr(space, "spaces", None), Mapping) else rows[""]

    def close(self) -> None:
        """Does nothing; a policy that acts holds no resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_acting_policy(checkpoint: Path, *, seed: int, trust_code: bool) -> ActingPolicy:
    """Loads the policy of a checkpoint.

    Raises:
        CheckpointError: Files are missing, or the weights do not fit.
        ConfigError: The checkpoint names code that is not trusted.
    """
    return ActingPolicy(load_exported(checkpoint, trust_code=trust_code), seed)


#: Maximum number of frames in a video.
MAX_FRAMES = 1500


class VideoRecorder(StepObserver):
    """Recorder of an evaluation's video, with one frame before each step that shows the slots side by side. After its episode,
    a slot keeps the last image, with a border.

    Args:
        env: Vector environment.
        num_episodes: Number of episodes, and thus of slots, to show.
    """

    def __init__(self, env: VectorEnv, num_episodes: int) -> None:
        self._env, self._slots = env, list(range(min(num_episodes, env.num_envs)))
        self._last_pictures: dict[int, np.ndarray] = {}
        self._pictures: np.ndarray | None = None
        self.frames: list[np.ndarray] = []
        self.available = True

    def on_step_start(self, obs: Any, actions: np.ndarray) -> None:
        """Renders the slots (`StepObserver.on_step_start`)."""
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

    def on_step_end(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Stores the last image of each slot in which an episode ended, with a border (`StepObserver.on_step_end`)."""
        episode = infos.get("episode", {})
        success = next((episode[name] for name in ("success_once", "success") if name in episode), None)
        has_ended = (terminations | truncations) & ~env_failed(infos, len(slots))
        for index, slot in enumerate(self._slots):
            if self._pictures is not None and slot not in self._last_pictures and has_ended[slot]:
                self._last_pictures[slot] = add_border(
                    self._pictures[index], success is not None and bool(success[slot])
                )

    def write(self, path: Path, frames_per_second: int) -> None:
        """Writes the video as an mp4 file. The last frame is shown for half a second."""
        if self._pictures is None:
            return
        last_frame = tile(
            np.stack([self._last_pictures.get(slot, self._pictures[index]) for index, slot in enumerate(self._slots)])
        )
        write_video(path, [*self.frames, *[last_frame] * max(1, frames_per_second // 2)], frames_per_second)


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
    policy = place_policy(load_policy(folder, Trust.from_config(plain(cfg), trust_code)), evaluation_device(cfg))
    recorders: list[VideoRecorder] = []

    def build_recorder(env: VectorEnv) -> VideoRecorder:
        recorders.append(VideoRecorder(env, env_cfg.video_episodes))
        return recorders[0]

    # A checkpoint of an older version has no such key in its configuration.
    has_video = output is not None and mapping(env_cfg).get("video_episodes", 0)
    num_episodes = env_cfg.num_episodes if episodes is None else episodes
    start_time = time.perf_counter()
    try:
        with ProgressBar(num_episodes, name="eval", unit="episode") as progress_bar:

            def update_bar(num_done: int, num_steps: int) -> None:
                progress_bar.update(num_done, {"time/env_steps_per_s": num_steps / (time.perf_counter() - start_time)})

            evaluation = evaluate_policy(
                policy,
                env_cfg,
                seed=seed,
                episodes=episodes,
                device=device_of(policy),
                build_observer=build_recorder if has_video else None,
                on_progress=update_bar,
            )
    except RuntimeError as error:
        raise ConfigError(f"env.eval.env_id={cfg.env.eval.env_id} does not fit {folder}'s policy: {error}") from error
    evaluation |= {"suite": suite, "global_step": int(read_manifest(folder)["global_step"]), "checkpoint": str(folder)}
    if output is not None:
        if recorders and recorders[0].available:
            video = Path(output).with_suffix(".mp4")
            recorders[0].write(video, env_cfg.video_fps)
            evaluation["video"] = video.name
        elif recorders:
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
    policy_source: str,
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
    counts_whole: bool = False,
    trust_code: bool = False,
    options: WriteOptions | None = None,
) -> dict[str, Any]:
    """Records episodes of `env.eval` as trajectories.

    Args:
        policy_source: A checkpoint, an export folder, a run folder, or an expert as `module:function`.
        cfg: Configuration.
        output, episodes, only_success, mode: See `record`.
        seed: Seed instead of `runner.seed`.
        teacher: Policy that labels the episodes: its actions replace the executed actions. Same forms as `policy_source`.
        intervene: Source of interventions (`find_intervention`).
        only_taken, counts_whole, options: See `record`.
        trust_code: Import code that a checkpoint or export names as `module:Class`, even if `cfg` does not name it.

    Returns:
        See `record`.

    Raises:
        ConfigError: Both a teacher and an intervention source are given, or the environment does not fit the policy.
    """
    code_trust = Trust.from_config(plain(cfg), trust_code)
    actor = _place_actor(
        load_actor(policy_source, "--expert" if ":" in policy_source else "--checkpoint", code_trust), cfg
    )
    teacher_policy = None if teacher is None else _place_actor(load_actor(teacher, "--teacher", code_trust), cfg)
    seed = cfg.runner.seed if seed is None else seed
    provenance = {"source": policy_source, "teacher": teacher, "mode": mode, "seed": seed, "rlhpc_version": __version__}
    provenance |= {} if intervene is None else {"intervene": intervene}
    if teacher is not None and intervene is not None:
        raise ConfigError("--teacher and --intervene: either the one labels what is played, or the other acts")
    intervention = None if intervene is None else find_intervention(intervene)
    source_type = "dagger" if teacher is not None else "scripted" if isinstance(actor, ExpertPolicy) else "rl"
    source_type = source_type if intervention is None else "human"
    try:
        return record(
            actor, cfg.env.eval, output, episodes=episodes, seed=seed, only_success=only_success, mode=mode,
            teacher=teacher_policy, intervention=intervention, only_taken=only_taken, counts_whole=counts_whole,
            source_type=source_type, source_desc=policy_source, extra_facts={"rlhpc": provenance}, options=options,
        )  # fmt: skip
    except RuntimeError as error:
        raise ConfigError(
            f"env.eval.env_id={cfg.env.eval.env_id} does not fit the policy of {policy_source}: {error}"
        ) from error


def _place_actor(actor: Any, cfg: EmbodiedConfig) -> Any:
    """Moves a policy to the device of evaluations; returns an expert's function unchanged."""
    return place_policy(actor, evaluation_device(cfg)) if isinstance(actor, nn.Module) else actor


def _load_config(folder: Path, code_trust: Trust) -> EmbodiedConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; pass the run's configuration with --config")
    try:
        config_content = read_yaml(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(config_content, dict) or not isinstance(config_content.get("env"), dict):
        raise CheckpointError(f"{path}: no configuration of a policy in an environment (no section env)")
    cfg = OmegaConf.create(
        config_content if code_trust.everything else without_variables(config_content, code_trust, str(path))
    )
    code_trust.check(plain(cfg), str(path))
    if missing_keys := [key for key in ("env.eval", "runner.seed") if select(cfg, key) is None]:
        raise CheckpointError(f"{path}: no {missing_keys[0]}; pass a configuration")
    return typed(PpoConfig, cfg)  # every task type has these same sections


def evaluate_judge(cfg: BcConfig, checkpoint: Path, suite: str, episodes: int | None, output: Path | None) -> str:
    """Evaluates a success model on every step of the held-out episodes (`demos.holdout`), or of all episodes if no episode is
    held out.

    Args:
        cfg: Configuration.
        checkpoint: Checkpoint of the model.
        suite: Name of the evaluation.
        episodes: Maximum number of episodes.
        output: Path of the JSON file, which is written atomically.

    Returns:
        A line of text with the model's accuracy.

    Raises:
        CheckpointError: The checkpoint has faults.
        ConfigError: The episodes cannot be read, or the file cannot be written.
    """
    require_valid(checkpoint, hint="or evaluate another checkpoint")
    model, demos = place_policy(load_policy(checkpoint, Trust()), evaluation_device(cfg)), index_demos(cfg)
    held_out = held_out_of(len(demos), cfg)
    episodes_to_judge = [demo for index, demo in enumerate(demos) if index in held_out or not held_out][:episodes]
    judgement = score_predictions(model, _load(episodes_to_judge)) | {
        "suite": suite, "episodes": len(episodes_to_judge), "held_out": bool(held_out), "checkpoint": str(checkpoint),
        "global_step": int(read_manifest(checkpoint)["global_step"]),
    }  # fmt: skip
    if output is not None:
        write_result(output, judgement)
    split_name = "held-out" if held_out else "trained-on"
    return (
        f"{judgement['accuracy']:.1%} of {judgement['steps']} steps of {len(episodes_to_judge)} {split_name} episodes judged "
        f"rightly; of {judgement['successes']} steps with success {judgement['recall']:.1%}, of the others "
        f"{judgement['specificity']:.1%}"
    )


def _load(demos: Iterable[DemoEpisode]) -> Iterator[Trajectory]:
    """Yields the episodes with their images, one after the other."""
    pool = FramePool()
    for demo in demos:
        trajectory = demo.read()
        yield {**trajectory, "obs": load_obs(trajectory["obs"], pool)}
    pool.close()


@torch.no_grad()
def score_predictions(model: Policy, trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """Compares predictions (probability above one half) with the simulator's success label of each step.

    Returns:
        steps, successes (steps with success), accuracy, recall (accuracy on steps with success) and specificity (accuracy on
        the other steps); a rate over no steps is 1.
    """
    device = device_of(model)
    is_correct, labels = np.zeros(0, bool), np.zeros(0, bool)
    for trajectory in trajectories:
        predicted_success = model.value(to_tensors(take(trajectory["obs"], slice(1, None)), device)).cpu().numpy() > 0.5
        is_correct, labels = (
            np.append(is_correct, predicted_success == trajectory["success"]),
            np.append(labels, trajectory["success"]),
        )

    def rate(mask: np.ndarray) -> float:
        return float(is_correct[mask].mean()) if mask.any() else 1.0

    return {
        "steps": len(labels), "successes": int(labels.sum()), "accuracy": rate(np.ones(len(labels), bool)),
        "recall": rate(labels), "specificity": rate(~labels),
    }  # fmt: skip
