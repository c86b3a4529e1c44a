"""Metadata of configuration keys, part of the field's annotation: `lr: Annotated[float, RATE, FREE] = 3e-4`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_SEED = 2**32 - 1


class OnResume(enum.Enum):
    """Rule for a change of a key, or of a section's keys, when a run is resumed.

    A key without this mark determines the training, so that a run with another value is a different run.
    """

    FIXED = "fixed"
    FREE = "free"
    EVALUATION = "evaluation only"


#: Key that may change on resume: it describes the machines, the length of the run, or the division of its work.
FREE = OnResume.FREE
#: Key that only affects evaluations.
EVALUATION = OnResume.EVALUATION


#: Metadata of a field that only rlhpc sets; messages do not list it: `field(metadata={INTERNAL: True})`.
INTERNAL = "internal"


class Choices(tuple[str, ...]):
    """Allowed words of a key; case does not matter.

    Args:
        words: The allowed words in lower case.
    """

    def __new__(cls, *words: str) -> Choices:
        return super().__new__(cls, words)


@dataclass(frozen=True)
class Registered:
    """Mark of a key that names an entry of a registry, or an object by its import path.

    Attributes:
        registry: Import path (`module:NAME`) of the `rlhpc.runtime.plugins.Registry`, which is imported when it is needed.
    """

    registry: str


@dataclass(frozen=True)
class OptionsOf:
    """Mark of a key with the options (`kwargs`) of a component; another key of the same section names the component.

    Attributes:
        selector: Name of the other key, such as `model_type`.
        options_types: Import path (`module:NAME`) of a mapping from the component's name in lower case to the dataclass of its
            options, or to the import path of the dataclass.
    """

    selector: str
    options_types: str


@dataclass(frozen=True)
class Range:
    """Interval of allowed numbers, with an optional special number outside it, such as -1 for none; null means this number.

    Attributes:
        low, high: Bounds; None means unbounded.
        above, below: Whether the lower or the upper bound is excluded.
        also: Special number and its meaning.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    also: tuple[float, str] | None = None

    def __contains__(self, number: float) -> bool:
        if self.also is not None and number == self.also[0]:
            return True
        if self.low is not None and (number < self.low or (self.above and number == self.low)):
            return False
        return self.high is None or number < self.high or (number == self.high and not self.below)

    def rule(self) -> str:
        """Formats the range as a rule in words, for messages."""
        return (
            f"it must {self._format_words()}{'' if self.also is None else f', or {self.also[0]:g} for {self.also[1]}'}"
        )

    def _format_words(self) -> str:
        if self.low is not None and self.high is not None:
            if not self.above and not self.below:
                return f"lie between {_format_plain(self.low)} and {_format_plain(self.high)}"
            return (
                f"be {'above' if self.above else 'at least'} {_format_plain(self.low)} and "
                f"{'below' if self.below else 'at most'} {_format_plain(self.high)}"
            )
        if self.low == 0:
            return "be greater than 0" if self.above else "not be negative"
        return f"be {'above' if self.above else 'at least'} {_format_plain(self.low or 0)}"

    def short(self) -> str:
        """Formats the range as an interval, for a table: `(0, 10]`; "" if all numbers are allowed."""
        if self.low is None and self.high is None:
            return ""
        low_text = "-∞" if self.low is None else _format_plain(self.low)
        high_text = "∞" if self.high is None else _format_plain(self.high)
        is_closed = self.high is not None and not self.below
        left_bracket = "[" if self.low is not None and not self.above else "("
        interval_text = f"{left_bracket}{low_text}, {high_text}{']' if is_closed else ')'}"
        return interval_text if self.also is None else f"{interval_text} or {_format_plain(self.also[0])} (null)"


def _format_plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


ANY = Range()
COUNT = Range(0, above=True)
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
PART = Range(0, 1, below=True)
RATE = Range(0, 10, above=True)
INTERVAL = Range(1, also=(-1, "none"))
INTERVAL_OR_0 = Range(1, also=(0, "none"))
SEED = Range(0, _SEED)

#: Precisions of a policy's computation, and precisions of a language model.
DTYPES = Choices("auto", "float32", "bfloat16")
ENGINE_DTYPES = Choices("auto", "float32", "bfloat16", "float16")
#: Orientations of images from a MuJoCo renderer.
ORIENTATIONS = Choices("rotate_180", "flip_rows", "raw")
#: Implementations of attention in transformers.
ATTENTION = Choices("sdpa", "eager", "flash_attention_2")
