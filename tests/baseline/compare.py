"""Comparison of what a baseline run does with what was recorded: bit for bit where the machine computes as the recording did,
else by names, shapes and whether numbers are finite: a token that is sampled otherwise changes all that follows."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.baseline.archive import DATA

ROOT = Path(__file__).resolve().parents[2]
#: What runs have since the recordings: metrics and their charts, and the position within a pass in states of cloning.
ADDED = re.compile(
    r"mismatch_unequal(\.svg)?$|mismatch_(abs|share)([/_][a-z]+|\.svg)|^/?(pass_rows|passes|rows)( .*)?$|^drawn$"
    r"|^/ds_config/fp16/enabled$"
)
#: Options of models that were added since, in a checkpoint's description of its model.
ADDED_OPTIONS = re.compile(r"/model\.json/model/(kwargs/base_spec/model/)?(num_q_heads|kwargs/lora/(init|path))$")
#: Stands for a value that differs from one recording to the next.
VARIES = "<varies>"
_DESCRIBED = re.compile(r"((?:list )?\w+) \[([\d, ]*)\] [0-9a-f]{16}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
#: Exports hold what was loaded, without any computation, so their digests are the same on every machine.
_LOADED = re.compile(r"export/[^/]+/[^/]+\.safetensors/")


def record_of(name: str) -> Path:
    """Returns the path of a run's record."""
    return DATA / "runs" / f"{name}.json"


@functools.cache
def machine() -> dict[str, str]:
    """Returns what the last bits of a number depend on: the version of torch, and the digest of what this machine makes of
    some operations, on one thread as runs do. The names of virtual machines' CPUs do not tell which instructions they have."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.baseline.compare"], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    return {"numbers": answer.stdout.strip(), "torch": torch.__version__}


def digest_of_operations() -> str:
    """Returns the digest of the results of some operations of torch and numpy."""
    generator, results = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (3, 17, 64, 257):
            a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
            rows = torch.nn.functional.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])
            image = torch.nn.functional.conv2d(a[None, None], b[None, None, :3, :3])
            results += [a @ b, (a @ b[0]), rows, image, torch.nn.functional.layer_norm(a, (size,))]
            results += [f(a) for f in (torch.exp, torch.tanh, torch.sigmoid, torch.nn.functional.gelu, torch.sin)]
            results += [torch.log_softmax(a, -1), torch.linalg.vector_norm(a), a.sum(), a.var(0), a.abs().sqrt()]
    digest = hashlib.sha256(b"".join(result.float().numpy().tobytes() for result in results))
    for size in (3, 64, 257):
        values = np.random.default_rng(size).standard_normal((size, size))
        digest.update((values @ values).tobytes() + np.exp(values).tobytes() + np.tanh(values).tobytes())
    return digest.hexdigest()[:16]


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


def outline(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a result is the same wherever it is computed: names, which metrics are finite, and the exports, which
    hold what was loaded. A token that is sampled otherwise changes the rest: answers, counts, lengths."""
    rows = [
        {key: value if value == VARIES else math.isfinite(value) for key, value in row.items()}
        for row in result.get("metrics", [])
    ]
    return {
        **{name: sorted(content) for name, content in result.get("checkpoint", {}).items() if isinstance(content, Mapping)},
        "metrics": rows, "export": result.get("export", {}), "report": result.get("report", []),
        "run_folder": result.get("run_folder", []),
    }  # fmt: skip


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
        new_keys = [key for key in found if key not in recorded and not ADDED.search(str(key))]
        lines += [f"{path}/{key} is new" for key in new_keys if not ADDED_OPTIONS.search(f"{path}/{key}")]
        for key in recorded:
            if key in found:
                lines += differences(recorded[key], found[key], exact=exact, merged=merged, path=f"{path}/{key}")
        return lines
    if isinstance(recorded, list) and isinstance(found, list) and _named(recorded) and _named(found):
        return [f"{path}: {name} is gone" for name in recorded if name not in found] + [
            f"{path}: {name} is new" for name in found if name not in recorded and not ADDED.search(name)
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
    """Whether numbers are finite alike, and tensors have the same dtype and shape."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isfinite(a) == math.isfinite(b)
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


if __name__ == "__main__":
    print(digest_of_operations())
