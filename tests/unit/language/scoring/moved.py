"""Models that record where they are moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


class Moved(nn.Module):
    """A model that says when it goes to the host."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def to(self, *given: Any, **options: Any) -> Any:
        self.said.append("moved")
        return self


def scorer(cls: type, said: list[str]) -> Any:
    made = cls.__new__(cls)
    made.model = Moved(said)
    return made


@pytest.fixture(name="said")
def accelerator_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened in turn, as on a machine with an accelerator."""
    events: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: events.append("given back"))
    return events
