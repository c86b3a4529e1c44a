"""Names that are offered in place of an unknown one."""

from __future__ import annotations

import difflib
import random
import string

import pytest

from rlhpc.runtime.similar_names import similar_names


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("SEED", ["tf32", "seed", "name"], ["seed"]),
        ("runner.SEED", ["runner.tf32", "runner.seed", "runner.sweep"], ["runner.seed"]),
        ("plna", ["play", "plan", "pack"], ["plan"]),
        ("actor.optim.rl", ["actor.optim.lr", "actor.optim.name"], ["actor.optim.lr"]),
        ("zzz", ["seed"], []),
        ("", ["seed"], []),
        ("seed", [], []),
    ],
)
def test_the_likeliest_name_is_offered(name: str, known: list[str], meant: list[str]) -> None:
    assert similar_names(name, known) == meant == similar_names(name, reversed(known))


def test_in_lower_case_they_are_as_similar_as_difflib_finds() -> None:
    draw = random.Random(0)

    def word() -> str:
        return "".join(draw.choices(string.ascii_lowercase[:6], k=draw.randint(0, 8)))

    for _ in range(300):
        name, known = word(), sorted({word() for _ in range(12)})
        found, expected = similar_names(name, known, 3, 0.5), difflib.get_close_matches(name, known, 3, 0.5)

        def ratio(other: str, name: str = name) -> float:
            return difflib.SequenceMatcher(None, other, name).ratio()

        assert [*map(ratio, found)] == [*map(ratio, expected)]
