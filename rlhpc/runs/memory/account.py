"""The account of one rank's memory: what it holds at each moment of a step, term by term. Pure numbers; imports nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Part of an accelerator's memory that is left free for what an account cannot know: fragmentation, kernels' work space.
SPARE = 0.08


@dataclass(frozen=True)
class MemoryTerm:
    """Something that takes memory.

    Attributes:
        name: What it is.
        nbytes: How much.
        note: How it comes about, in a few words.
    """

    name: str
    nbytes: float
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """Everything that is there at one time.

    Attributes:
        name: What is done then.
        terms: What is there.
    """

    name: str
    terms: tuple[MemoryTerm, ...]

    @property
    def nbytes(self) -> float:
        """The sum."""
        return math.fsum(term.nbytes for term in self.terms)

    @property
    def largest(self) -> MemoryTerm:
        """The term that takes most."""
        return max(self.terms, key=lambda term: term.nbytes)


@dataclass(frozen=True)
class SuggestedChange:
    """Another configuration that would fit.

    Attributes:
        overrides: What to set.
        nbytes: What a rank then holds at most.
    """

    overrides: tuple[str, ...]
    nbytes: float


@dataclass(frozen=True)
class Account:
    """What a rank of a group holds.

    Attributes:
        group: The group.
        about: What it works with, in a line.
        moments: What is where the rank computes: on its accelerator, or in the host's memory if it has none.
        host: What it also holds of the host's memory, where it computes on an accelerator.
        pinned: That part of the host's memory whose pages are locked.
        shared: What it writes to its host's /dev/shm.
        spare: What it would also take of the host's memory if there is room, and does without otherwise.
        turns: It gives its accelerator away while another group that takes turns with it works.
        unknown: Why nothing can be said; then there are no moments.
        remarks: What else there is to say, such as how many sequences fit.
        refusals: Why it could not start, whatever else is on its accelerator.
        changes: Given what one accelerator or rank may hold: the nearest configurations that fit, best first.
        measured: Has PyTorch follow a step without contents, and says what it found, for `rlhpc plan --measure`; None if that
            cannot be.
        most: Given that: what could be raised, as key, value and unit.
    """

    group: str
    about: str = ""
    moments: tuple[Moment, ...] = ()
    host: tuple[MemoryTerm, ...] = ()
    pinned: tuple[MemoryTerm, ...] = ()
    shared: tuple[MemoryTerm, ...] = ()
    spare: tuple[MemoryTerm, ...] = ()
    turns: bool = False
    unknown: str = ""
    remarks: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    changes: Callable[[float], Sequence[SuggestedChange]] = field(default=lambda room: (), compare=False)
    measured: Callable[[], str] | None = field(default=None, compare=False)
    most: Callable[[float], Mapping[str, str]] = field(default=lambda room: {}, compare=False)

    @property
    def peak(self) -> Moment | None:
        """The moment at which it holds most; None if nothing is known."""
        return max(self.moments, key=lambda moment: moment.nbytes, default=None)

    @property
    def least(self) -> float:
        """Bytes that it holds at every moment."""
        return min((moment.nbytes for moment in self.moments), default=0.0)

    @property
    def on_host(self) -> float:
        """Bytes beside those where it computes."""
        return math.fsum(term.nbytes for term in (*self.host, *self.pinned))

    @property
    def in_shared(self) -> float:
        """Bytes in /dev/shm."""
        return math.fsum(term.nbytes for term in self.shared)


@dataclass(frozen=True)
class GroupRanks:
    """What a group's account is asked for.

    Attributes:
        number: Ranks of the group.
        accelerated: Whether they compute on accelerators.
        room: Bytes of an accelerator, or of a host where there is none; None if nobody knows.
        per_node: Ranks of the group on one node, at most.
    """

    number: int
    accelerated: bool = False
    room: float | None = None
    per_node: int = 1


def gib(nbytes: float) -> str:
    """`12.3 GiB`, or MiB below one hundredth of that."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / MIB:.0f} MiB"


def terms(**found: float) -> tuple[MemoryTerm, ...]:
    """Terms by name (underscores are blanks) that are not nothing."""
    return tuple(MemoryTerm(name.replace("_", " "), nbytes) for name, nbytes in found.items() if nbytes > 0)
