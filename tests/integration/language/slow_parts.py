"""Parts of a run that are slow as a test says: an engine, a reward, a disk. Named as `slow_parts:…` in configurations."""

from __future__ import annotations

import os
import time
from typing import Any

from rlhpc.algorithms.advantages import grpo
from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.engines.hf import HFRollout, SequenceTable
from rlhpc.language.rewards import Sample

__all__ = ["PacedEngine", "grpo", "ones", "slow_ones"]

#: Seconds of a forward pass, whatever the batch, of a reward, and of the writing of a large file.
_PASS_S, _REWARD_S, _DISK_S = 0.02, 0.06, float(os.environ.get("RLHPC_TEST_DISK_S", "0"))
#: Tokens of an answer, and of the one in sixteen that is long.
_SHORT, _LONG = 6, int(os.environ.get("RLHPC_TEST_LONG_ANSWER", "6"))

if _DISK_S:
    _fsync = os.fsync

    def _slow_fsync(fd: int) -> None:
        if os.fstat(fd).st_size > 1 << 20:
            time.sleep(_DISK_S)
        _fsync(fd)

    os.fsync = _slow_fsync


class PacedEngine(HFRollout):
    """Answers of the same length, save for a few, at a pace that does not depend on the machine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No token ends an answer.
        self._sequences = SequenceTable(self._max_rows, self.vocabulary, frozenset(), self._stop_texts)

    def _max_response_tokens(self, request: Request) -> int:
        return _LONG if request.id % 16 == 15 else _SHORT

    def _advance(self) -> list[Completion]:
        time.sleep(_PASS_S)
        return super()._advance()


def ones(sample: Sample) -> float:
    """Share of the letter 1."""
    return sample.response.count("1") / max(1, len(sample.response))


def slow_ones(sample: Sample) -> float:
    """As `ones`, after some time."""
    time.sleep(_REWARD_S)
    return ones(sample)
