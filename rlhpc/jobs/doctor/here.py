"""The checks of this machine: its environment, packages, disks and quotas. Each turns facts into lines, and asks nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.jobs.doctor.report import Line, size

_LEAST_SPACE = 5 * 2**30
_LEAST_INODES = 20_000


def environment(environ: Mapping[str, str]) -> list[Line]:
    """Variables of this shell that a job would inherit and should not."""
    lines = []
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None and "SLURM_JOB_ID" not in environ:
        lines.append(
            Line("warn", "this shell's GPU mask", f"CUDA_VISIBLE_DEVICES={mask!r} goes along with every job",
                 "unset CUDA_VISIBLE_DEVICES (look in ~/.bashrc) before submitting")
        )  # fmt: skip
    stray = sorted(name for name in environ if name.startswith(("SBATCH_", "SALLOC_")))
    if stray:
        lines.append(
            Line("warn", "this shell's options", f"set: {', '.join(stray)}; they win over what a run asks for",
                 f"unset {' '.join(stray)}")
        )  # fmt: skip
    return lines


def packages(versions: Mapping[str, str | None], conf: str | None) -> list[Line]:
    """Versions of what submits; `conf` is the path of slurm.conf where it is not the usual one."""
    lines = []
    least = {"snakemake": (9,), "submitit": (1, 5), "snakemake-executor-plugin-slurm": (2,)}
    for name, text in versions.items():
        found = tuple(int(part) for part in re.findall(r"\d+", text or "")[:3])
        wanted = ".".join(map(str, least.get(name, ())))
        if text is None and name.startswith("snakemake-executor"):
            lines.append(
                Line("warn", name, "not installed", "pip install 'rlhpc[slurm]' (only profiles/slurm needs it)")
            )
        elif text is None:
            lines.append(Line("fail", name, "not installed", f"pip install {name}"))
        elif found < least.get(name, ()):
            lines.append(Line("fail", name, f"{text}; {wanted} or later is needed", f"pip install -U {name}"))
        elif name.endswith("jobstep") and found == (0, 6, 1) and conf:
            lines.append(
                Line("warn", name, f"{text} loses SLURM_CONF in its jobs, and here it is {conf}",
                     f"pip install {name}==0.6.0, or have the file at /etc/slurm/slurm.conf")
            )  # fmt: skip
        else:
            lines.append(Line("pass", name, text))
    return lines


def disk(what: str, path: str, found: Mapping[str, Any]) -> Line:
    """Room and inodes of a filesystem, as `probe.space` gives them."""
    if "error" in found:
        return Line("fail", what, f"{path}: {found['error']}", "make the folder, or name another")
    text = f"{path}: {size(found['free'])} of {size(found['total'])} free"
    if found["inodes"]:
        text += f", {found['inodes_free']} of {found['inodes']} inodes"
    if not found["writable"]:
        return Line("fail", what, f"{path} is not writable", "name a folder of your own")
    if found["free"] < _LEAST_SPACE or (found["inodes"] and found["inodes_free"] < _LEAST_INODES):
        return Line("warn", what, text, "make room, or use another folder: a run that cannot save stops")
    return Line("pass", what, text)


def quotas(text: str) -> list[Line]:
    """`quota -wp` (with raw times): used and limits of blocks and of files."""
    lines = []
    for row in text.splitlines():
        words = [word.rstrip("*") for word in row.split()]
        if len(words) < 9 or not all(word.isdigit() for word in words[1:]):
            continue
        for what, unit, (used, soft, hard) in (("space", 1024, words[1:4]), ("inodes", 1, words[5:8])):
            limit = int(soft) or int(hard)
            if not limit:
                continue
            share = (
                f"{100 * int(used) / limit:.0f} % of {size(limit * unit) if unit > 1 else limit} {what} on {words[0]}"
            )
            if int(used) > 0.9 * limit:
                lines.append(Line("warn", "quota", share, "make room: caches in $HOME are often the cause"))
            else:
                lines.append(Line("pass", "quota", share))
    return lines


def nearest_folder(path: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
