"""Success classifier: its training during a run, and an environment wrapper that uses its probabilities as rewards."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rlhpc.algorithms.nonfinite import nonfinite
from rlhpc.checkpoint.start import WEIGHTS, find_weights
from rlhpc.checkpoint.state import load_state, load_tensors, save_state, save_tensors
from rlhpc.config.typed import with_value
from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import EncoderOptions, model_options
from rlhpc.embodied.data.replay_buffer import ReplayBuffer
from rlhpc.embodied.envs.base import Step, VectorEnv, env_failed
from rlhpc.embodied.envs.observations import Obs as EnvObs
from rlhpc.embodied.envs.observations import as_arrays, columns_of, rows_of, space_to_json, take
from rlhpc.embodied.envs.vector_wrapper import VectorEnvWrapper
from rlhpc.embodied.interventions.sources import MARK_CODES, Mark
from rlhpc.embodied.models.base import Obs, Policy
from rlhpc.embodied.models.cnn import build_obs_encoder, encode_obs, shift_images
from rlhpc.embodied.models.mlp import flat_width, mlp
from rlhpc.embodied.models.registry import build_model, load_policy
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import write_durably
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.embodied.config import PlayedEnvConfig, SacConfig


class SuccessModel(Policy):
    """Success classifier: predicts the probability of success from observations. It chooses no actions.

    `actor.model.kwargs` are `EncoderOptions`.
    """

    has_head = False
    start_options = ("weights",)
    is_success_classifier = True

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        options = model_options(EncoderOptions, cfg)
        self.encoder = build_obs_encoder(cfg, observation_space, action_space, options)
        layer_sizes = (
            [flat_width(observation_space), *cfg.hidden_sizes] if self.encoder is None else [self.encoder.hidden]
        )
        self.judge = mlp(layer_sizes, 1, cfg.activation, cfg.ortho_init, 0.01)

    def logits(self, obs: Obs) -> Tensor:
        """Returns log-odds of success `[B]`."""
        return self.judge(encode_obs(self.encoder, obs)).squeeze(-1)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None as the head's input, and probabilities of success as values (`Policy.features`)."""
        if policy:
            self._refuse_to_act()
        return None, self.logits(obs).sigmoid() if value else None

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Raises ConfigError, because the classifier does not act."""
        del obs, mode, noise
        self._refuse_to_act()

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the binary cross-entropy `[B]` with the labels `success [B]`, which are 1 if the task is done at `obs`."""
        return F.binary_cross_entropy_with_logits(self.logits(inputs["obs"]), inputs["success"], reduction="none")

    def _refuse_to_act(self) -> NoReturn:
        raise ConfigError("a model of success (model_type success) judges what it sees and does not act")


KEY = "env.train.reward_model"


def reward_model(path: str, observation_space: Any, key: str = KEY) -> SuccessModel:
    """Loads the classifier of a run, a checkpoint or an export folder.

    Args:
        path: The folder.
        observation_space: Observation space of a slot.
        key: Configuration key of the path, for messages.

    Raises:
        ConfigError: The folder contains no classifier, or a classifier for other observations.
    """
    model = load_policy(find_weights(path, key), Trust())
    if not isinstance(model, SuccessModel):
        raise ConfigError(
            f"{key} is {path!r}, a {type(model).__name__}; it must be a model of success (model_type success)"
        )
    if space_to_json(model.observation_space) != space_to_json(observation_space):
        raise ConfigError(f"{key} is {path!r}, which sees {model.observation_space}; env.train has {observation_space}")
    return model


class SuccessRewardEnv(VectorEnvWrapper):
    """Wrapper of a vector environment that replaces rewards with a classifier's probability that the task is done after
    the step.

    Ends of episodes, statistics and successes still come from the simulator. The last executed action of a chunk gets the
    reward.

    Args:
        env: Wrapped environment.
        cfg: Section `env.train`.
        device: Device of the classifier.
    """

    def __init__(self, env: VectorEnv, cfg: PlayedEnvConfig, device: torch.device) -> None:
        super().__init__(env)
        self.device = device
        self.model = reward_model(str(cfg.reward_model), env.observation_space).to(device)
        self._scale = np.float32(cfg.reward_scale)
        self._relative = cfg.use_rel_reward
        self._last_probability = np.zeros(env.num_envs, np.float32)

    def reset(self, seed: int | None = None) -> tuple[EnvObs, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        self._last_probability[:] = 0
        return self.env.reset(seed)

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`)."""
        return self._replace_rewards(self.env.step(actions))

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk of actions in every slot (`VectorEnv.chunk_step`)."""
        return self._replace_rewards(self.env.chunk_step(actions))

    @torch.no_grad()
    def _replace_rewards(self, step: Step) -> Step:
        obs, _, terminations, truncations, infos = step
        is_done = terminations | truncations
        last_obs = (
            _select_last_obs(as_arrays(obs), as_arrays(infos["final_obs"]), is_done)
            if is_done.any()
            else as_arrays(obs)
        )
        success_probability = self.model.value(to_tensors(last_obs, self.device)).cpu().numpy().astype(np.float32)
        rewards = self._scale * (
            success_probability - self._last_probability if self._relative else success_probability
        )
        rewards[env_failed(infos, self.num_envs)] = 0
        self._last_probability = np.where(is_done, np.float32(0), success_probability)
        if "chunk" in infos:
            mask = infos["chunk"]["mask"]
            last_rewards, is_executed = np.zeros(mask.shape, np.float32), mask.any(1)
            last_rewards[is_executed, mask.sum(1)[is_executed] - 1] = rewards[is_executed]
            infos["chunk"]["rewards"] = last_rewards
        return obs, rewards, terminations, truncations, infos

    def own_columns(self) -> dict[str, Any]:
        """Returns the probabilities before the next step (`VectorEnvWrapper.own_columns`)."""
        return {"before": self._last_probability.copy()}

    def load_own_columns(self, columns: Mapping[str, Any]) -> None:
        """Restores what `own_columns` returned."""
        self._last_probability = np.asarray(columns["before"], np.float32).copy()


def _select_last_obs(obs: Any, final_obs: Any, is_done: np.ndarray) -> Any:
    """Returns the observation of each slot after the step: `final_obs` if its episode ended, and `obs` if it continues."""
    if isinstance(obs, dict):
        return {key: _select_last_obs(array, final_obs[key], is_done) for key, array in obs.items()}
    return np.where(is_done.reshape(-1, *[1] * (obs.ndim - 1)), final_obs, obs)


#: Folder of the trained classifier in a checkpoint, and the file with its training state.
CLASSIFIER_FOLDER, _STATE = "success_classifier", "state.pt"
#: Verdicts whose frames a classifier learns, with the folder of the frames in `CLASSIFIER_FOLDER`.
_FRAME_FOLDERS = {Mark.SUCCESS: "successes", Mark.FAILURE: "failures"}
#: Maximum number of frames of one forward pass.
_FORWARD_ROWS = 256


class SuccessTrainer:
    """Success classifier that is trained alongside an off-policy run, on the frames that a person marks.

    A mark ends an episode, so its frame is the last observation. Half of the failures of a batch are frames from the replay
    buffer after which the episode went on: a person who saw a success there would have marked it. Each mark is predicted
    before it is learned, so that accuracy is that on new frames.

    Args:
        cfg: Configuration of the run.
        observation_space, action_space: Spaces of one slot.
        device: Device of the classifier.
        scratch: Folder of mapped files.

    Attributes:
        is_used: Whether the classifier's rewards are used (`algorithm.success_classifier.min_accuracy`).
        num_updates: Number of optimizer steps.
    """

    def __init__(
        self, cfg: SacConfig, observation_space: Any, action_space: Any, device: torch.device, scratch: Path
    ) -> None:
        self._cfg = options = cfg.algorithm.success_classifier
        self._device, self._seed = device, cfg.runner.seed
        self._scale = np.float32(cfg.env.train.reward_scale)
        self._spaces = observation_space, action_space
        if options.init_from is None:
            self.model = _new_classifier(cfg, observation_space, action_space)
        else:
            self.model = reward_model(options.init_from, observation_space, "algorithm.success_classifier.init_from")
        self.model.to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=options.lr)
        self._max_shift = 0 if self.model.encoder is None else cfg.algorithm.random_shift
        self._frames = {
            mark: ReplayBuffer(
                options.size, range(1), 1, 0, scratch, checkpoint_folder=f"{CLASSIFIER_FOLDER}/{folder}",
                key="algorithm.success_classifier.size",
            )
            for mark, folder in _FRAME_FOLDERS.items()
        }  # fmt: skip
        #: Whether the newest marks of each kind were predicted before they were learned.
        self._predicted = {mark: deque[bool](maxlen=options.min_marks) for mark in _FRAME_FOLDERS}
        self.is_used, self.num_updates = False, 0
        self._success_share: float | None = None

    # -- a step's transitions ---------------------------------------------------------------------------------------

    def receive(self, columns: Mapping[str, np.ndarray], marks: np.ndarray) -> np.ndarray:
        """Takes in a step's transitions: predicts all of them, and keeps the marked frames.

        Args:
            columns: Columns of transitions, `[n, T, ...]`.
            marks: Verdicts of the person (`MARK_CODES`), `[n, T]`.

        Returns:
            Rewards `[n, T]`: those of the classifier if it is used, and the transition's own with a mark.
        """
        frames = {
            name: column.reshape(-1, *column.shape[2:])
            for name, column in columns_of("obs", rows_of(columns, "next_obs")).items()
        }
        probabilities = self.predict(rows_of(frames, "obs")).reshape(marks.shape)
        self._success_share = float((probabilities > 0.5).mean())
        rewards = columns["rewards"]
        if self.is_used:
            rewards = np.where(marks == MARK_CODES[Mark.NONE], self._scale * probabilities, rewards)
        for mark, buffer in self._frames.items():
            is_marked = marks == MARK_CODES[mark]
            if is_marked.any():
                predictions = probabilities[is_marked] > 0.5
                self._predicted[mark].extend(
                    bool(success is (mark is Mark.SUCCESS)) for success in predictions.tolist()
                )
                buffer.add({name: column[is_marked.reshape(-1)][None] for name, column in frames.items()})
        self.is_used = self._has_passed()
        return rewards

    @torch.no_grad()
    def predict(self, obs: Any) -> np.ndarray:
        """Returns the probability that the task is done at observations, float32 `[B]`."""
        num_rows = len(next(iter(columns_of("obs", obs).values())))
        parts = [
            self.model.value(to_tensors(take(obs, slice(start, start + _FORWARD_ROWS)), self._device)).cpu().numpy()
            for start in range(0, num_rows, _FORWARD_ROWS)
        ]
        return np.concatenate(parts).astype(np.float32)

    def accuracy(self) -> float | None:
        """Returns the fraction of the newest marks that were predicted before they were learned: that of the kind with the
        smaller one. None without marks of both kinds.
        """
        fractions = [sum(results) / len(results) for results in self._predicted.values() if results]
        return min(fractions) if len(fractions) == len(self._predicted) else None

    def _has_passed(self) -> bool:
        accuracy = self.accuracy()
        has_enough = all(len(results) == self._cfg.min_marks for results in self._predicted.values())
        return has_enough and accuracy is not None and accuracy >= self._cfg.min_accuracy

    # -- training ---------------------------------------------------------------------------------------------------

    def update(self, replay: ReplayBuffer) -> dict[str, float]:
        """Trains on the marked frames, if there are both kinds; returns the metrics of the step.

        Args:
            replay: The run's replay buffer.
        """
        losses: list[float] = []
        if all(len(buffer) for buffer in self._frames.values()):
            self.model.train()
            losses = [self._step(replay) for _ in range(self._cfg.updates)]
            self.model.eval()
        metrics = {
            "marks": float(sum(map(len, self._frames.values()))),
            "used": float(self.is_used),
            "successes": self._success_share,
            "accuracy": self.accuracy(),
            "loss": float(np.mean(losses)) if losses else None,
        }
        self._success_share = None
        return {f"classifier_{name}": number for name, number in metrics.items() if number is not None}

    def _step(self, replay: ReplayBuffer) -> float:
        """Makes one optimizer step; returns the loss.

        Raises:
            NonFinite: The loss is not finite.
        """
        # The third number keeps this stream apart from that of the policy's batches.
        generator = np.random.default_rng((self._seed, self.num_updates, 1))
        num_successes = max(1, self._cfg.batch_size // 2)
        num_unmarked = num_successes // 2 if len(replay) else 0
        counts = {Mark.SUCCESS: num_successes, Mark.FAILURE: num_successes - num_unmarked}
        parts = [
            _read_frames(buffer, generator.integers(0, len(buffer), counts[mark]), "obs")
            for mark, buffer in self._frames.items()
        ]
        if num_unmarked:
            positions = generator.integers(0, len(replay), num_unmarked)
            _, rows = replay.local_rows(positions)
            parts.append(_read_frames(replay, positions[~replay.stored_column("terminations", rows)], "next_obs"))
        sizes = [len(next(iter(part.values()))) for part in parts]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        obs = to_tensors(rows_of(columns, "obs"), self._device)
        if self._max_shift:
            offsets = torch.from_numpy(generator.integers(0, 2 * self._max_shift + 1, (sum(sizes), 2)))
            obs = shift_images(obs, self._spaces[0], offsets.to(self._device), self._max_shift)
        labels = torch.zeros(sum(sizes), device=self._device)
        labels[: sizes[0]] = 1
        row_losses = self.model.bc_loss({"obs": obs, "success": labels})
        loss = (row_losses[: sizes[0]].mean() + row_losses[sizes[0] :].mean()) / 2  # both kinds weigh the same
        if not torch.isfinite(loss):
            raise nonfinite(f"update {self.num_updates + 1}: the loss of the success classifier is not finite")
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.num_updates += 1
        return loss.item()

    # -- checkpoint -------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Writes `CLASSIFIER_FOLDER`, which is also a folder for `env.train.reward_model`."""
        folder = checkpoint / CLASSIFIER_FOLDER
        folder.mkdir(exist_ok=True)
        save_tensors(folder / WEIGHTS, {name: tensor.cpu() for name, tensor in self.model.state_dict().items()})
        write_durably(folder / "model.json", json.dumps(self.model.spec(), indent=2, sort_keys=True).encode() + b"\n")
        for buffer in self._frames.values():
            buffer.save(checkpoint)
        state = {
            "optimizer": self._optimizer.state_dict(),
            "updates": self.num_updates,
            "used": self.is_used,
            "predicted": {str(mark): list(results) for mark, results in self._predicted.items()},
        }
        save_state(folder / _STATE, state)

    def load(self, checkpoint: Path) -> None:
        """Restores what `save` wrote. A checkpoint of a run that trained no classifier leaves it as it is.

        Raises:
            CheckpointError: The weights belong to another network.
        """
        folder = checkpoint / CLASSIFIER_FOLDER
        if not folder.is_dir():
            return
        try:
            self.model.load_state_dict(load_tensors(folder / WEIGHTS))
        except RuntimeError as error:
            raise CheckpointError(f"{folder} does not fit the success classifier of this run: {error}") from error
        state = load_state(folder / _STATE)
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates, self.is_used = int(state["updates"]), bool(state["used"])
        for mark, buffer in self._frames.items():
            buffer.load(checkpoint)
            self._predicted[mark].clear()
            self._predicted[mark].extend(state["predicted"][str(mark)])


def _new_classifier(cfg: SacConfig, observation_space: Any, action_space: Any) -> SuccessModel:
    """Builds a classifier with random weights and the encoder of the policy's images."""
    model, names = cfg.actor.model, [field.name for field in fields(EncoderOptions)]
    kwargs = {name: model.kwargs[name] for name in names if name in model.kwargs}
    section = with_value(with_value(model, "model_type", "success"), "kwargs", kwargs)
    classifier = build_model(section, observation_space, action_space, seed=cfg.runner.seed)
    assert isinstance(classifier, SuccessModel)
    return classifier.eval()


def _read_frames(buffer: ReplayBuffer, positions: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """Returns the columns of the observation `name` in the transitions at some positions, under the name `obs`."""
    assert buffer.dtype is not None
    _, rows = buffer.local_rows(positions)
    table = np.empty((len(rows), buffer.dtype.itemsize), np.uint8)
    buffer.gather(rows, table)
    transitions = table.view(buffer.dtype)[:, 0]
    columns = {column: transitions[column] for column in buffer.dtype.names or ()}
    return columns_of("obs", rows_of(columns, name))
