"""Page with the table of families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "reference" / "model-families.md"
_ENGINE_RESULTS = ROOT / "bench" / "results" / "families.json"
_TEXT = """# Families of models

What trainer and engines do with tiny models of {count} families with random weights, in float32 on a CPU, with transformers
{transformers}. A family that is not here is tried by the same checks at the start of a run.

- **trains**: gradients are finite, reach each trained weight, and lower the loss.
- **packs**: samples of one row have the log-probs that each has alone. Otherwise each sample is a row, without a key to set.
- **decodes**: tokens that the engine `hf` draws for rows that come and go have the trainer's log-probs.
- **after update**: the same after training steps on all weights; **LoRA**: on adapters.
- **sharded**: weights on two ranks, by FSDP2, give the log-probs of one rank.
- **vLLM**: at load and after each of the check's updates, in its build for CPUs
  ([details](engine-families.md)). A dash: not tried.

`make families` computes the table, each cell by a test; the commit is that of the last computation.

"""


def read_results() -> dict[str, dict[str, str]]:
    """Returns the committed cells by family."""
    rows: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return rows


def render(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the page; reasons stand below the table."""
    cells = [key for key in next(iter(rows.values())) if key != "commit"]
    engine_rows = json.loads(_ENGINE_RESULTS.read_text())["rows"]
    tried = {row["family"] for row in engine_rows}
    admitted = {(row["family"], row["dtype"]) for row in engine_rows if not row["refused"]}
    lines = [f"| family | {' | '.join(cells)} | vLLM | commit |", "|---" * (len(cells) + 3) + "|"]
    reasons = list[str]()
    for name, row in sorted(rows.items()):
        marks = list[str]()
        for cell in cells:
            marks.append("yes" if row[cell] == "yes" else "no")
            if row[cell] != "yes":
                reasons.append(f"- {name}, {cell}: {row[cell].removeprefix('no: ')}")
        if (name, "float32") in admitted:
            engine_mark = "yes"
        elif (name, "bfloat16") in admitted:
            engine_mark = "in bfloat16"
        else:
            engine_mark = "refused" if name in tried else "–"
        lines.append(f"| {name} | {' | '.join(marks)} | {engine_mark} | {row['commit']} |")
    text = _TEXT.format(count=len(rows), transformers=metadata.version("transformers"))
    return text + "\n".join([*lines, "", "## Reasons", "", *reasons]) + "\n"
