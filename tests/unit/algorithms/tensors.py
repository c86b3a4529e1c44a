"""Short forms for small tensors and their comparison."""

from __future__ import annotations

import torch


def t(*rows: object, kind: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(rows, dtype=kind)


def close(a: torch.Tensor, b: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=0, atol=tolerance)


def bools(*rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)
