"""Metadata of configuration keys, which stand in the annotation of the field: `lr: Annotated[float, RATE, FREE] = 3e-4`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_SEED = 2**32 - 1


class OnResume(enum.Enum):
    """Rule for a changed key, or a changed key of a section, when a run continues under its name.

    Keys without this mark determine the training: a run in which one of them changes is another run.
    """

    FIXED = "fixed"
    FREE = "free"
    EVALUATION = "evaluation only"


#: Key of the machine, of the run's length or of the division of its work.
FREE = OnResume.FREE
#: Key that changes evaluations and nothing else.
EVALUATION = OnResume.EVALUATION


#: Metadata of a dataclass field that rlhpc sets itself and messages do not offer: `field(metadata={INTERNAL: True})`.
INTERNAL = "internal"


class Choices(tuple[str, ...]):
    """Words that a key may have; case does not matter.

    Args:
        words: The words in lower case.
    """

    def __new__(cls, *words: str) -> Choices:
        return super().__new__(cls, words)


@dataclass(frozen=True)
class Registered:
    """Mark of a key that names an entry of a registry, or any other by its import path.

    Attributes:
        registry: The `rlhpc.runtime.plugins.Registry`, as `module:NAME`; it is imported when its names are needed.
    """

    registry: str


@dataclass(frozen=True)
class OptionsOf:
    """Mark of the options (`kwargs`) of the component that a key beside them names.

    Attributes:
        selector: Name of that key, such as `model_type`.
        declarations: `module:NAME` of a mapping: name in lower case → dataclass of the options, or its import path.
    """

    selector: str
    declarations: str


@dataclass(frozen=True)
class Range:
    """Interval, with an optional number outside it that has a meaning, such as -1 for none; null stands for that number.

    Attributes:
        low, high: Bounds; None means unbounded.
        above, below: Exclude the lower or the upper bound itself.
        also: A number outside the interval that is allowed, and its meaning.
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
        """Formats the rule in words, for messages."""
        return f"it must {self._words()}{'' if self.also is None else f', or {self.also[0]:g} for {self.also[1]}'}"

    def _words(self) -> str:
        if self.low is not None and self.high is not None:
            if not self.above and not self.below:
                return f"lie between {_plain(self.low)} and {_plain(self.high)}"
            return (
                f"be {'above' if self.above else 'at least'} {_plain(self.low)} and "
                f"{'below' if self.below else 'at most'} {_plain(self.high)}"
            )
        if self.low == 0:
            return "be greater than 0" if self.above else "not be negative"
        return f"be {'above' if self.above else 'at least'} {_plain(self.low or 0)}"

    def short(self) -> str:
        """Formats the range as an interval, for a table: `(0, 10]`; empty if everything is allowed."""
        if self.low is None and self.high is None:
            return ""
        low = "-∞" if self.low is None else _plain(self.low)
        high = "∞" if self.high is None else _plain(self.high)
        closed = self.high is not None and not self.below
        interval = f"{'[' if self.low is not None and not self.above else '('}{low}, {high}{']' if closed else ')'}"
        return interval if self.also is None else f"{interval} or {_plain(self.also[0])} (null)"


def _plain(number: float) -> str:
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

#: Precisions of a model's computation, and of an engine's weights.
DTYPES = Choices("auto", "float32", "bfloat16")
ENGINE_DTYPES = Choices("auto", "float32", "bfloat16", "float16")
#: Orientations of pictures that a MuJoCo renderer makes.
ORIENTATIONS = Choices("rotate_180", "flip_rows", "raw")
#: Implementations of attention in transformers.
ATTENTION = Choices("sdpa", "eager", "flash_attention_2")
