"""The page on families in vLLM has the committed results, and each refusal on it says why."""

from __future__ import annotations

import json

from bench.families import FAMILIES, PAGE, render
from bench.machine import RESULTS
from tests.extras import need_extra


def test_the_page_has_the_committed_results() -> None:
    content = json.loads((RESULTS / "families.json").read_text())
    assert PAGE.read_text() == render(content), "run: python -m bench.families"
    assert {row["family"] for row in content["rows"]} <= FAMILIES.keys()
    for row in content["rows"]:
        assert row["commit"] and (row["seeds"] > 0 if not row["refused"] else row["refused"].startswith("at the ")), row


def test_the_bound_in_8_bits_is_twice_what_the_families_differ_by() -> None:
    need_extra("llm")
    from rlhpc.language.training import weight_sync

    rows = json.loads((RESULTS / "families.json").read_text())["rows"]
    multiples = [row["multiple"] for row in rows if row["dtype"] == "fp8" and not row["refused"]]
    assert multiples and 0 < 2 * max(multiples) <= weight_sync._TIMES_OF_8_BITS
