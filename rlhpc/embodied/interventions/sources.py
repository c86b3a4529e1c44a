"""Sources of interventions: a person or a script watches a policy and takes control when the policy fails (human-gated
DAgger, Kelly et al. 2019; HIL-SERL, Luo et al. 2024).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.config.constraints import Fail
from rlhpc.embodied.envs.wrappers import parse_entry
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.plugins import Registry, load_attribute

if TYPE_CHECKING:
    from rlhpc.embodied.config import PpoConfig, SacConfig

__all__ = [
    "INTERVENTIONS",
    "Intervention",
    "Mark",
    "Scripted",
    "Signals",
    "build_intervention",
    "check_intervene",
    "find_intervention",
    "named_intervention",
    "register_intervention",
]

KEY = "env.train.intervene.source"


class Mark(StrEnum):
    """Verdict of a person that ends the running episode."""

    NONE = "none"
    SUCCESS = "success"
    FAILURE = "failure"


#: Codes of verdicts in the outcomes of a rollout.
MARK_CODES = {Mark.NONE: 0, Mark.SUCCESS: 1, Mark.FAILURE: -1}


@dataclass(frozen=True)
class Signals:
    """Signals of a person besides actions.

    Attributes:
        mark: Verdict on the running episode since the last call.
        paused: Whether the environment waits until the person resumes.
    """

    mark: Mark = Mark.NONE
    paused: bool = False


_NO_SIGNALS = Signals()


@former_members(ended="end_episodes")
class Intervention(ABC):
    """Observer of a policy that may replace the policy's actions at every step.

    Attributes:
        one_slot: True if the intervention supports only a single slot.
        needs_pictures: True if the intervention needs rendered images of the first slot.
        hz: Maximum number of steps per second of a simulator; None for no limit. Robots have their own rate.
        failure: Reason why the person lost control against their will, such as a disconnected device; empty otherwise.
    """

    one_slot = False
    needs_pictures = False
    hz: float | None = None
    failure = ""

    @property
    def gives_signals(self) -> bool:
        """True if the source sends signals, by which a person marks episodes as success or failure."""
        return type(self).signals is not Intervention.signals

    def begin(self, slots: range, seed: int) -> None:  # noqa: B027 (most need not know)
        """Prepares for an environment with these global slots; random decisions depend on `seed` and slot alone."""

    @abstractmethod
    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the actions of this step.

        Args:
            obs: Observations `[N, ...]`, or a dict of such arrays.
            actions: The policy's actions, `[N, dim]`.
            picture: Image of the first slot, uint8 `[H, W, 3]`, if `needs_pictures` and the environment can be rendered.

        Returns:
            Actions `[N, dim]`, and a mask of the slots in which the policy's actions were replaced, bool `[N]`.
        """

    def signals(self) -> Signals:
        """Returns the person's signals since the last call. While the environment is paused, it is called repeatedly."""
        return _NO_SIGNALS

    def end_episodes(self, slots: np.ndarray) -> None:  # noqa: B027 (most need not know)
        """Handles the end of episodes; `slots` (bool `[N]`) marks the slots in which an episode ended."""

    def slot_states(self) -> list[Any] | None:
        """Returns the state of each slot for a checkpoint, as plain containers and numbers; None if there is none."""
        return None

    def load_slot_states(self, states: list[Any]) -> None:
        """Restores the slots from a checkpoint (`slot_states`)."""
        del states

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Frees resources at the end."""


INTERVENTIONS: Registry[Any] = Registry(
    "source of interventions", "--intervene", "rlhpc.interventions",
    {
        "gamepad": "rlhpc.embodied.interventions.person:Gamepad",
        "keyboard": "rlhpc.embodied.interventions.person:Keyboard",
        "scripted": "rlhpc.embodied.interventions.sources:Scripted",
        "spacemouse": "rlhpc.embodied.interventions.person:SpaceMouse",
    },
)  # fmt: skip
register_intervention = INTERVENTIONS.register


def named_intervention(source_text: str) -> tuple[str, Any, dict[str, Any]]:
    """Parses a name, or a mapping from a name to settings, such as `{scripted: {expert: module:function}}`.

    Returns:
        The name, the factory that is called with the settings, and the settings.

    Raises:
        ConfigError: The name is unknown.
    """
    try:
        parsed_source = read_yaml(source_text)
    except Exception as error:  # whatever the YAML parser has against it
        raise ConfigError(
            f"--intervene is {source_text!r}, which is no name and no mapping of one to settings: {error}"
        ) from None
    name, settings = parse_entry(parsed_source, "--intervene", "{keyboard: {hz: 5}}")
    return name, INTERVENTIONS.find(name), settings


def find_intervention(source_text: str) -> Intervention:
    """Builds the intervention from a text (see `named_intervention`). Interventions by a person open a window or a device.

    Raises:
        ConfigError: The intervention is unknown, or rejects its settings.
    """
    name, _, settings = named_intervention(source_text)
    return build_intervention(name, settings, "--intervene")


def build_intervention(name: str, settings: Mapping[str, Any], key: str) -> Intervention:
    """Builds an intervention from its name and its settings.

    Args:
        name: A name of `INTERVENTIONS`, or `module:Class`.
        settings: Keyword arguments of the class.
        key: Configuration key or option that has the name, for messages.

    Raises:
        ConfigError: The intervention is unknown, or rejects its settings.
    """
    factory = INTERVENTIONS.find(name, key)
    try:
        intervention: Intervention = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"{key} is {name!r}, which refuses {dict(settings)}: {error}") from None
    return intervention


def check_intervene(cfg: PpoConfig | SacConfig, fail: Fail) -> None:
    """Checks that a run can learn from the configured source of interventions.

    Raises:
        ConfigError: The source is unknown, or does not fit the run; the message names the key.
    """
    train_env = cfg.env.train
    name = train_env.intervene.source
    if name is None:
        return
    factory = INTERVENTIONS.find(name, KEY)
    if getattr(factory, "one_slot", False) and train_env.num_envs > 1:
        raise fail("env.train.num_envs", f"a person watches one slot at a time ({KEY} {name}): take 1")
    if train_env.env_type == "tensors":
        raise fail(KEY, "env_type tensors simulates where the policy acts, out of a person's reach: take null")
    if cfg.actor.model.model_type == "dsrl":
        raise fail(KEY, "dsrl learns of noise, and a person gives actions: take null")
    algorithm = cfg.algorithm
    if getattr(algorithm, "adv_type", "gae") != "gae":
        raise fail(
            KEY,
            f"algorithm.adv_type {algorithm.adv_type} compares whole episodes, so that the policy would be praised for "  # type: ignore[union-attr]
            "what a person did: take null, or adv_type gae",
        )


class Scripted(Intervention):
    """Scripted intervention that imitates a person. It tolerates small differences, reacts with a delay, and keeps control
    for a minimum time.

    Args:
        expert: Function `obs [N, ...] -> actions [N, dim]`, as `module:function`.
        apart: Maximum tolerated difference of an action component between policy and expert.
        patience: Number of consecutive steps with a larger difference before the expert takes over.
        hold: Minimum number of steps in control. Afterwards the expert acts until the policy's actions are close again.
        max_hold: Maximum number of steps in control; None for no limit.
        chance: Probability of taking over in each step in which the expert may.
        noise: Standard deviation of the noise on the expert's actions.
        hz: Maximum number of steps per second; None for no limit.

    Raises:
        ConfigError: An option is out of its range.
    """

    def __init__(
        self, expert: str, apart: float = 0.5, patience: int = 3, hold: int = 10, max_hold: int | None = None,
        chance: float = 1.0, noise: float = 0.0, hz: float | None = None,
    ) -> None:  # fmt: skip
        if apart < 0 or patience < 1 or hold < 1:
            raise ConfigError(
                f"--intervene scripted: apart is {apart}, patience {patience}, hold {hold}; at least 0, 1 and 1 are wanted"
            )
        if not 0 <= chance <= 1 or noise < 0 or (max_hold is not None and max_hold < hold):
            raise ConfigError(
                f"--intervene scripted: chance is {chance}, noise {noise}, max_hold {max_hold}; allowed: a chance of 0 to 1, "
                f"noise of at least 0, and a max_hold of at least hold ({hold})"
            )
        self.hz = hz
        self._expert = load_attribute(expert, "--intervene scripted.expert")
        self._apart, self._patience, self._hold, self._chance, self._noise = apart, patience, hold, chance, noise
        self._max_hold = np.iinfo(np.int64).max if max_hold is None else max_hold
        self._steps_apart = self._steps_in_control = np.zeros(0, np.int64)
        self._generators: list[np.random.Generator] = []

    def begin(self, slots: range, seed: int) -> None:
        """Seeds the random decisions of each slot (`Intervention.begin`)."""
        self._generators = [np.random.Generator(np.random.Philox(key=[seed, slot])) for slot in slots]
        self._steps_apart, self._steps_in_control = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the actions of this step (`Intervention.act`)."""
        del picture
        if len(self._generators) != len(actions):
            self.begin(range(len(actions)), 0)
        expert_actions = np.asarray(self._expert(obs), actions.dtype).reshape(actions.shape)
        if self._noise:
            expert_actions = expert_actions + self._noise * self._draw(actions.shape[1]).astype(actions.dtype)
        is_far = np.abs(expert_actions - actions).max(1) > self._apart
        self._steps_apart = np.where(is_far, self._steps_apart + 1, 0)
        was_in_control = self._steps_in_control > 0
        takes_over = self._steps_apart >= self._patience
        if self._chance < 1:
            takes_over &= np.array([generator.random() for generator in self._generators]) < self._chance
        keeps_control = (is_far | (self._steps_in_control < self._hold)) & (self._steps_in_control < self._max_hold)
        in_control = np.where(was_in_control, keeps_control, takes_over)
        self._steps_in_control = np.where(in_control, self._steps_in_control + 1, 0)
        return np.where(in_control[:, None], expert_actions, actions), in_control

    def _draw(self, size: int) -> np.ndarray:
        return np.stack([generator.standard_normal(size) for generator in self._generators])

    def end_episodes(self, slots: np.ndarray) -> None:
        """Resets the counters of slots whose episode ended (`Intervention.end_episodes`)."""
        self._steps_apart, self._steps_in_control = (
            np.where(slots, 0, self._steps_apart),
            np.where(slots, 0, self._steps_in_control),
        )

    def slot_states(self) -> list[Any] | None:
        """Returns the counters and the random generator of each slot (`Intervention.slot_states`)."""
        return [
            {"apart": int(steps_apart), "in_control": int(in_control), "generator": generator.bit_generator.state}
            for steps_apart, in_control, generator in zip(
                self._steps_apart, self._steps_in_control, self._generators, strict=True
            )
        ]

    def load_slot_states(self, states: list[Any]) -> None:
        """Restores the slots (`Intervention.load_slot_states`)."""
        self._steps_apart = np.array([slot_state["apart"] for slot_state in states], np.int64)
        self._steps_in_control = np.array([slot_state["in_control"] for slot_state in states], np.int64)
        self._generators = [_restore_generator(slot_state["generator"]) for slot_state in states]


def _restore_generator(generator_state: Any) -> np.random.Generator:
    bit_generator = np.random.Philox()
    bit_generator.state = generator_state
    return np.random.Generator(bit_generator)
