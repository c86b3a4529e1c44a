"""Comparison of what a baseline run does with what was recorded: bit for bit on the recording's machine, else nearly."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.baseline.archive import DATA

#: Stands for a value that differs from one recording to the next.
VARIES = "<varies>"
#: Tolerances of numbers on another machine.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
_DESCRIBED = re.compile(r"((?:list )?\w+) \[([\d, ]*)\] [0-9a-f]{16}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
#: Exports hold what was loaded, without any computation, so their digests are the same on every machine.
_LOADED = re.compile(r"export/[^/]+/[^/]+\.safetensors/")


def record_of(name: str) -> Path:
    """Returns the path of a run's record."""
    return DATA / "runs" / f"{name}.json"


def machine() -> dict[str, str]:
    """Returns what the last bits of a number depend on: the model of the CPU, and the version of torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {"cpu": cpu, "torch": torch.__version__}


def common(first: Any, second: Any, path: str = "") -> tuple[Any, list[str]]:
    """Returns what two recordings agree on, with `VARIES` in the place of the rest, and the paths of the rest."""
    if isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
        parts = {key: common(first[key], second[key], f"{path}/{key}") for key in first}
        return {key: value for key, (value, _) in parts.items()}, [
            name for _, names in parts.values() for name in names
        ]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        items = [common(a, b, f"{path}/{index}") for index, (a, b) in enumerate(zip(first, second, strict=True))]
        return [value for value, _ in items], [name for _, names in items for name in names]
    return (first, []) if _equal(first, second) else (VARIES, [path])


def differences(recorded: Any, found: Any, *, exact: bool, merged: bool = False, path: str = "") -> list[str]:
    """Returns a line for each difference.

    Args:
        recorded: What was recorded.
        found: What came of it now.
        exact: Whether numbers and digests must be the same bit for bit.
        merged: Whether the exported policy has merged adapters, which depend on rounding.
        path: Where both are.
    """
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        lines = [f"{path}/{key} is gone" for key in recorded if key not in found]
        lines += [f"{path}/{key} is new" for key in found if key not in recorded]
        for key in recorded:
            if key in found:
                lines += differences(recorded[key], found[key], exact=exact, merged=merged, path=f"{path}/{key}")
        return lines
    if isinstance(recorded, list) and isinstance(found, list) and _named(recorded) and _named(found):
        return [f"{path}: {name} is gone" for name in recorded if name not in found] + [
            f"{path}: {name} is new" for name in found if name not in recorded
        ]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
        return [
            line for n, (a, b) in pairs for line in differences(a, b, exact=exact, merged=merged, path=f"{path}/{n}")
        ]
    loaded = _LOADED.match(path.lstrip("/")) and not (merged and path.startswith("/export/policy/"))
    if recorded == VARIES or _equal(recorded, found) or (not exact and not loaded and _near(recorded, found)):
        return []
    return [f"{path}: {_short(recorded)} was recorded, and it is {_short(found)}"]


def _named(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and bool(a == b)


def _near(a: Any, b: Any) -> bool:
    """Whether values are the same up to rounding, and tensors have the same dtype and shape."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    if isinstance(a, str) and isinstance(b, str):
        described = _DESCRIBED.search(a) or _DESCRIBED.search(b)
        return _shape_of(a) == _shape_of(b) if described else _NUMBER.sub("0", a) == _NUMBER.sub("0", b)
    return False


def _shape_of(text: str) -> str:
    """Returns the description of a tensor without its digest; of bytes without their number."""
    return _DESCRIBED.sub(lambda found: found[1] if found[1] == "bytes" else f"{found[1]} {found[2]}", text)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 200 else f"{text[:200]}…"
