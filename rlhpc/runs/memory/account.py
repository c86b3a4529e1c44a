"""Memory account of one rank: the memory at each moment of a step, term by term. Imports only the standard library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MIB, GIB = 1 << 20, 1 << 30
#: Share of an accelerator's memory that the plan leaves free for unknown terms: fragmentation, work space of kernels.
SPARE = 0.08


@dataclass(frozen=True)
class MemoryTerm:
    """Term of a memory account.

    Attributes:
        name: Name of the term.
        nbytes: Size in bytes.
        note: Origin of the number, as a short text.
    """

    name: str
    nbytes: float
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """Memory terms that exist at one moment of a step.

    Attributes:
        name: Name of the phase of the step.
        terms: Memory terms at this moment.
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
    """Configuration change after which the run would fit.

    Attributes:
        overrides: Overrides to set.
        nbytes: Maximum bytes of a rank with these overrides.
    """

    overrides: tuple[str, ...]
    nbytes: float


@dataclass(frozen=True)
class Account:
    """Memory account of a rank of a group.

    Attributes:
        group: Name of the group.
        description: Model or environment of the rank, as one line.
        moments: Memory of the device where the rank computes: its accelerator, or the host without one.
        host: Additional host memory of a rank that computes on an accelerator.
        pinned: Additional host memory with locked pages.
        shm: Memory terms in the host's /dev/shm.
        optional: Optional host memory, which the rank uses only if enough is free.
        colocated: True if the rank offloads its accelerator memory while a colocated group works.
        unknown: Reason for a missing account; the account then has no moments.
        remarks: Further remarks, such as the number of sequences that fit.
        refusals: Reasons why the rank cannot start, independent of the other groups on its accelerator.
        changes: Returns the nearest configurations that fit into a number of bytes per accelerator or rank, best first.
        measured: Lets PyTorch trace a step without data, and returns the result as one line, for `rlhpc plan --measure`;
            None if such a trace is not possible.
        max_fitting: Returns a dict from key to largest value (with unit) that fits into a number of bytes.
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
        accelerated: True if the ranks compute on accelerators.
        capacity: Bytes of an accelerator, or of a host without accelerators; None if unknown.
        per_node: Maximum number of ranks of the group on one node.
    """

    number: int
    accelerated: bool = False
    capacity: float | None = None
    per_node: int = 1


def gib(num_bytes: float) -> str:
    """Formats a number of bytes in GiB, such as `12.3 GiB`; in MiB below 0.1 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / MIB:.0f} MiB"


def terms(**nbytes_by_name: float) -> tuple[MemoryTerm, ...]:
    """Returns memory terms with these names and sizes. Underscores in names become blanks; terms of 0 bytes are omitted."""
    return tuple(
        MemoryTerm(name.replace("_", " "), term_bytes) for name, term_bytes in nbytes_by_name.items() if term_bytes > 0
    )


#: Fixed bytes of a process: work space of libraries on a host; context and buffers of collectives on an accelerator.
_HOST_BYTES, _ACCELERATOR_BYTES = 24 * MIB, 1.5 * GIB


def process(on_accelerator: bool) -> MemoryTerm:
    """Returns the memory term for the fixed memory of a process on its device."""
    return (
        MemoryTerm("context and collectives", _ACCELERATOR_BYTES)
        if on_accelerator
        else MemoryTerm("libraries' work space", _HOST_BYTES)
    )
