"""Ceilings of one card, which the other parts' figures are compared with: a matrix product, a copy, and copies over PCIe."""

from __future__ import annotations

from bench.gpu.part import Report, dtype_for, timed

REPEAT = 5


def measure(report: Report) -> None:
    """Measures the card's maximum rates: matrix products, copies in its memory, and copies over PCIe."""
    import torch

    width, num_bytes, num_repeats = (256, 16 << 20, 2) if report.small else (8192, 4 << 30, 10)
    device, dtype = report.device, getattr(torch, dtype_for(report.device))
    left_matrix, right_matrix = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))

    def multiply() -> None:
        for _ in range(num_repeats):
            left_matrix @ right_matrix

    multiply()
    seconds = [timed(multiply) for _ in range(REPEAT)]
    report.figure("product", [2 * width**3 * num_repeats / s / 1e12 for s in seconds], "TFLOP/s")
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = [timed(lambda: target.copy_(source)) for _ in range(REPEAT)]
    report.figure("copy, written", [num_bytes / s / 1e9 for s in seconds], "GB/s")
    if report.small:
        report.skip("copies over PCIe", "a CPU has none")
        return
    host = torch.empty(num_bytes // 4, dtype=torch.uint8, pin_memory=True)
    part = source[: len(host)]
    for name, copy in (("from the host", lambda: part.copy_(host)), ("to the host", lambda: host.copy_(part))):
        copy()
        seconds = [timed(copy) for _ in range(REPEAT)]
        report.figure(name, [len(host) / s / 1e9 for s in seconds], "GB/s")
