"""How far what an engine says of a text may be from what its trainer says."""

from __future__ import annotations

import pytest

from rlhpc.language.roles.probe import Probe, check_probe
from rlhpc.weights.proof import WeightsDiffer


class Engine:
    """Is off by so much, a token."""

    def __init__(self, off: float) -> None:
        self.off = off

    def score(self, token_ids):
        return [-1.0 - self.off] * (len(token_ids) - 1)


@pytest.mark.parametrize(
    ("dtypes", "device", "tolerance", "most"),
    [
        ({"float32"}, "cpu", None, 0.001),
        ({"float32"}, "cuda", None, 0.02),
        ({"float32", "bfloat16"}, "cpu", None, 0.25),
        ({"bfloat16"}, "cuda", None, 0.25),
        ({"float32"}, "cuda", 0.005, 0.005),
    ],
)
def test_rounding_is_no_difference(dtypes, device, tolerance, most) -> None:
    probe = Probe((3, 1, 2), (-1.0, -1.0), "float32")
    for off in (0.99 * most, -0.99 * most):
        assert check_probe(Engine(off), probe, 3, tolerance, dtypes, "actor-0", device) == pytest.approx(abs(off))
    for off in (1.01 * most, float("nan")):
        with pytest.raises(WeightsDiffer, match=rf"version 3 .*actor-0.*rounding explains {most:g}"):
            check_probe(Engine(off), probe, 3, tolerance, dtypes, "actor-0", device)
