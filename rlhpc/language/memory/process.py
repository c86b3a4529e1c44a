"""What a process has beside tensors."""

from __future__ import annotations

from rlhpc.runs.memory.account import GIB, MIB, Term

#: Libraries' work space; on an accelerator its context and the collectives' buffers.
ON_HOST, ON_ACCELERATOR = 24 * MIB, 1.5 * GIB


def process(accelerated: bool) -> Term:
    """What is there where the rank computes."""
    return Term("context and collectives", ON_ACCELERATOR) if accelerated else Term("libraries' work space", ON_HOST)
