"""Memory account of one rank: its memory at each moment of a step, term by term. Pure numbers without imports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Share of an accelerator's memory that stays free for unknown terms: fragmentation, kernels' work space.
SPARE = 0.08


@dataclass(frozen=True)
class MemoryTerm:
    """Term of a memory account.

    Attributes:
        name: Name of the term.
        nbytes: Bytes.
        note: Origin of the number, in a few words.
    """

    name: str
    nbytes: float
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """Memory terms that exist at one moment of a step.

    Attributes:
        name: Phase of the step.
        terms: Terms at that moment.
    """

    name: str
    terms: tuple[MemoryTerm, ...]

    @property
    def nbytes(self) -> float:
        """Sum of all terms, in bytes."""
        return math.fsum(term.nbytes for term in self.terms)

    @property
    def largest(self) -> MemoryTerm:
        """Largest term."""
        return max(self.terms, key=lambda term: term.nbytes)


@dataclass(frozen=True)
class SuggestedChange:
    """Configuration change that would fit.

    Attributes:
        overrides: Overrides to set.
        nbytes: Maximum bytes of a rank with them.
    """

    overrides: tuple[str, ...]
    nbytes: float


@dataclass(frozen=True)
class Account:
    """Memory account of a rank of a group.

    Attributes:
        group: The group.
        description: Model or environment of the rank, in a line.
        moments: Memory of the device where the rank computes: its accelerator, or the host without one.
        host: Additional host memory of a rank that computes on an accelerator.
        pinned: Additional host memory with locked pages.
        shm: Bytes that it writes to its host's /dev/shm.
        optional: Optional host memory, which it uses only if enough is free.
        colocated: True if it offloads its accelerator memory while a colocated group works.
        unknown: Reason for a missing account; the account then has no moments.
        remarks: Further remarks, such as the number of sequences that fit.
        refusals: Reasons why it could not start, independent of the other groups on its accelerator.
        changes: Returns the nearest configurations that fit into a number of bytes per accelerator or rank, best first.
        measured: Lets PyTorch trace a step without data, and returns the result in a line, for `rlhpc plan --measure`; None if
            that is not possible.
        max_fitting: Returns the largest values of keys that fit into a number of bytes: key → value and unit.
    """

    group: str
    description: str = ""
    moments: tuple[Moment, ...] = ()
    host: tuple[MemoryTerm, ...] = ()
    pinned: tuple[MemoryTerm, ...] = ()
    shm: tuple[MemoryTerm, ...] = ()
    optional: tuple[MemoryTerm, ...] = ()
    colocated: bool = False
    unknown: str = ""
    remarks: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    changes: Callable[[float], Sequence[SuggestedChange]] = field(default=lambda capacity: (), compare=False)
    measured: Callable[[], str] | None = field(default=None, compare=False)
    max_fitting: Callable[[float], Mapping[str, str]] = field(default=lambda capacity: {}, compare=False)

    @property
    def peak(self) -> Moment | None:
        """Moment with the most memory; None if no moment is known."""
        return max(self.moments, key=lambda moment: moment.nbytes, default=None)

    @property
    def peak_bytes(self) -> float:
        """Maximum over all moments, in bytes."""
        return 0.0 if self.peak is None else self.peak.nbytes

    @property
    def min_nbytes(self) -> float:
        """Minimum over all moments, in bytes."""
        return min((moment.nbytes for moment in self.moments), default=0.0)

    @property
    def extra_host_bytes(self) -> float:
        """Bytes of host memory in addition to the memory of the moments."""
        return math.fsum(term.nbytes for term in (*self.host, *self.pinned))

    @property
    def shm_bytes(self) -> float:
        """Bytes in /dev/shm."""
        return math.fsum(term.nbytes for term in self.shm)


@dataclass(frozen=True)
class GroupRanks:
    """Ranks of a group, as input of its memory account.

    Attributes:
        number: Number of ranks of the group.
        accelerated: True if they compute on accelerators.
        capacity: Bytes of an accelerator, or of a host without accelerators; None if unknown.
        per_node: Maximum number of ranks of the group on one node.
    """

    number: int
    accelerated: bool = False
    capacity: float | None = None
    per_node: int = 1


def gib(nbytes: float) -> str:
    """Formats a number of bytes: `12.3 GiB`, or MiB below 0.1 GiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / MIB:.0f} MiB"


def terms(**nbytes_by_name: float) -> tuple[MemoryTerm, ...]:
    """Returns terms by name (underscores become blanks), without terms of 0 bytes."""
    return tuple(MemoryTerm(name.replace("_", " "), nbytes) for name, nbytes in nbytes_by_name.items() if nbytes > 0)


#: Work space of libraries; on an accelerator, its context and the buffers of collectives.
_HOST_BYTES, _ACCELERATOR_BYTES = 24 * MIB, 1.5 * GIB


def process(accelerated: bool) -> MemoryTerm:
    """Returns the fixed memory of a process on its device."""
    return (
        MemoryTerm("context and collectives", _ACCELERATOR_BYTES)
        if accelerated
        else MemoryTerm("libraries' work space", _HOST_BYTES)
    )
