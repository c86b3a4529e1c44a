"""The estimate of updates in the docs is that of the figures in `bench/results`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.updates import ASSUMED, measure_rates, predict_update, render_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "performance.md"


def test_the_page_shows_what_is_computed() -> None:
    assert render_table() in PAGE.read_text(), "python -m bench.updates has the present one"
    assert f"{measure_rates()['stream']:.1f} GB/s" in PAGE.read_text()


def test_by_hand() -> None:
    """4 nodes at 40 Gb/s = 5 GB/s, of which the sender has half for each copy: 10 GB take 4 s, and a part each goes through
    the device's copy, the engine's, and two levels of hosts."""
    part = 0.268435456
    found = predict_update(10e9, 4, 40, 1e9, 1e9)
    filling = part / ASSUMED["device to host, pages locked"] + part / ASSUMED["host to device, for each engine"]
    assert found.slowest == "sending" and found.seconds == pytest.approx(4 + filling + 2 * part / 5)
    assert predict_update(10e9, 1, 1, 1e9, 1e9).seconds == pytest.approx(10 / 6 + filling), "one node needs no network"
