"""Pages and status of runs whose files hold what this program never wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.run_folders import WRONG, faults, fields, tried, whole_run

#: Fields whose wrong values once ended a command.
ONCE = {
    "language": [
        ("held_out.samples.jsonl", ("episode", 0, "parts", 0, "turn"), "text"),
        ("held_out.samples.jsonl", ("episode", 0, "parts", 1, "reward"), "text"),
        ("held_out.samples.jsonl", ("episode", 0, "parts", 0, "turn"), "huge"),
        ("held_out.samples.jsonl", ("sample",), "huge"),
        ("metrics.jsonl", ("train/accuracy",), "long integer"),
        ("held_out.json", ("pass_at_k_ci95", "1"), "list"),
        ("held_out.json", ("n",), "huge"),
    ],
    "embodied": [
        ("metrics.jsonl", ("time/wall_s",), "long integer"),
        ("default.json", ("episodes",), "text"),
        ("manifest.json", ("files", "optimizer.pt", "size"), "long integer"),
        ("env-0.json", ("rank",), "nul"),
        ("env-0.json", ("pid",), "list"),
        ("status.json", ("step",), "deep"),
        ("provenance.json", ("placement", "actor", 0, "accelerators", 0), "long integer"),
        ("provenance.json", ("git",), "text"),
    ],
}


@pytest.mark.parametrize("kind", ONCE)
def test_values_of_a_wrong_type_end_no_command(kind: str, tmp_path: Path) -> None:
    run = whole_run(kind, tmp_path / "run")
    every = fields(run)
    for name, path, wrong in ONCE[kind]:
        [field] = [one for one in every if one[0].name == name and one[2] == path]
        assert faults(run, field, wrong) == []


def test_any_field_may_be_wrong(tmp_path: Path) -> None:
    assert tried(tmp_path, 0, len(WRONG)) == []
