"""The parts of what is too much for every run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.drawn import PART, SEED, commit, drawn, pytest_report_header

NAMES = [f"name {n}" for n in range(47)]


@pytest.mark.parametrize("n", [1, 2, 20, 47, 100])
def test_the_parts_together_are_everything(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setenv(SEED, "some commit")
    found: Counter[str] = Counter()
    for k in range(1, n + 1):
        monkeypatch.setenv(PART, f"{k}/{n}")
        found.update(drawn("names", NAMES, least=0))
    assert found == Counter(NAMES)


def test_a_part_is_the_same_again_and_another_of_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PART, "3/10")
    parts = []
    for seed in ("a", "a", "b"):
        monkeypatch.setenv(SEED, seed)
        parts.append(drawn("names", NAMES))
    assert parts[0] == parts[1] != parts[2] and len(parts[0]) == 5
    assert drawn("others", NAMES) != parts[2]
    assert "make test-all SEED=b PART=3/10" in pytest_report_header()
    assert len(drawn("names", NAMES, least=9)) == 9 and {*drawn("names", NAMES)} < {*drawn("names", NAMES, least=9)}
    assert "name 1" in drawn("names", NAMES[2:], always=["name 1"])


def test_without_a_seed_the_commit_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SEED, raising=False)
    monkeypatch.delenv(PART, raising=False)
    assert f"part 1/20 of the long tests, drawn by {commit()}:" in pytest_report_header()


@pytest.mark.parametrize("text", ["0/20", "21/20", "1", "1/", "a/b", "1/2/3", ""])
def test_what_is_no_part_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PART, text)
    with pytest.raises(pytest.UsageError, match="must be k/n"):
        drawn("names", NAMES)
