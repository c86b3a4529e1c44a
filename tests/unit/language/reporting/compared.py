"""Pairs of preferred and rejected responses."""

from __future__ import annotations


def pairs(*rewards: tuple[float, float]) -> list[dict]:
    return [{"rewards": list(each), "target": 0.0, "level": f"level {i % 2}"} for i, each in enumerate(rewards)]
