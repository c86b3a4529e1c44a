"""Tables of memory in the documentation."""

from __future__ import annotations

import re

from rlhpc.language.planning.memory_tables import tables
from tests.unit.language.planning.accounts import ROOT

LARGE = str(ROOT / "configs" / "reasoning" / "large.yaml")


def test_the_tables_of_the_docs_are_what_the_command_makes() -> None:
    page = (ROOT / "docs" / "explanation" / "memory.md").read_text()
    between = re.search(r"<!-- tables -->\n(.*?)\n<!-- end of tables -->", page, re.DOTALL)
    assert between is not None and between[1].strip() == tables(LARGE).strip()
