"""Standard error of commands, as tests read it."""

from __future__ import annotations


def error_lines(stderr: str) -> list[str]:
    """Returns the lines without those that name an explanation, `what to do: rlhpc explain …`."""
    return [line for line in stderr.strip().splitlines() if not line.startswith("  what to do: rlhpc explain ")]
