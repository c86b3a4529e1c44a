"""Files of configurations and sweeps, and their defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.files import read_files
from rlhpc.config.sweep import SweepConfig, read_section
from rlhpc.runtime.errors import ConfigError


def section_of(folder: Path, text: str, *overrides: str) -> SweepConfig | None:
    file = folder / "lr.yaml"
    file.write_text(text)
    found = read_section(read_files(file), overrides)
    return found[0] if found else None


def test_where_a_sweep_is_from(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("sweep: {seeds: [7]}\n")
    assert section_of(tmp_path, "defaults: [base.yaml]\n") == SweepConfig(seeds=[7])
    file = "defaults: [base.yaml]\nsweep: {grid: {actor.optim.lr: [1e-4]}}\n"
    assert section_of(tmp_path, file) == SweepConfig(grid={"actor.optim.lr": [1e-4]})
    assert section_of(tmp_path, file, "sweep=null") is None
    assert section_of(tmp_path, file, "sweep={seeds: [1]}", "runner.max_steps=3") == SweepConfig(seeds=[1])
    changed = section_of(tmp_path, file, "sweep.seeds=[1, 2]", "sweep.grid.actor.optim.lr=[3]")
    assert changed == SweepConfig(grid={"actor.optim.lr": [3]}, seeds=[1, 2])
    assert section_of(tmp_path, "runner: {name: a}\n", "sweep.seeds=[1]") == SweepConfig(seeds=[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep: {seed: [1]}", "unknown key sweep.seed; did you mean sweep.seeds?"),
        ("sweep: 3", "sweep is 3; it is a section"),
        ("sweep: {seeds: [a]}", "sweep.seeds is ['a']; it must be list[int]"),
        ("sweep: {max_queued: many}", "sweep.max_queued is 'many'; it must be"),
    ],
)
def test_a_section_of_other_keys_or_types(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        section_of(tmp_path, text)
    assert said in str(refused.value)
