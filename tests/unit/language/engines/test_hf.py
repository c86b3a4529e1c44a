"""The ledger of an engine's rows: sets of end tokens are kept as long as a row uses them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.data.tokenizer import StopTexts
from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.language.engines.hf import SequenceTable


@pytest.mark.parametrize("seed", range(3))
def test_each_row_ends_at_its_own_tokens_and_no_more_sets_are_kept_than_rows(seed: int) -> None:
    draw, rows, vocabulary = random.Random(seed), 4, 50
    ledger = SequenceTable(rows, vocabulary, frozenset({49}), StopTexts(None, ""))
    for number in range(300):
        ends = tuple(sorted(draw.sample(range(40), draw.randint(0, 3))))
        ledger.add(Request(number, (1,), SamplingParams(stop_token_ids=ends)), 1000)
        tokens = np.array([draw.randrange(vocabulary) for _ in ledger.requests])
        ended = ledger.record(0, tokens, np.zeros(len(tokens), np.float32), 0)
        due = [
            row for row, request in enumerate(ledger.requests) if tokens[row] in {*request.sampling.stop_token_ids, 49}
        ]
        assert [row for row, _ in ended] == due
        gone = {row for row, _ in ended} or ({draw.randrange(rows)} if len(ledger) == rows else set())
        keep = [row for row in range(len(ledger)) if row not in gone]
        ledger.move([(come, to) for to, come in enumerate(keep) if come != to], len(keep))
    assert len(ledger._end_sets) <= rows and len(ledger._end_masks) <= rows
