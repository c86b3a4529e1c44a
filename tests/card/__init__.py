"""An accelerator for tests on machines that have none: torch's own mechanism for devices from outside, in this host's memory.

Its memory belongs to its kernels. What else touches it, because a copy was forgotten, is ended by the operating system with
SIGSEGV, where on an accelerator it would have read something else or ended, too. `python -m tests.card COMMAND…` runs a
command on a machine with this one accelerator: pytest, say, of tests that take any.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.extras import need_programs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_ENTRY = {"METADATA": "Metadata-Version: 2.1\nName: rlhpc-card\nVersion: 0\n",
          "entry_points.txt": "[torch.backends]\ncard = rlhpc_card:load\n"}  # fmt: skip


def build() -> Path:
    """The folder with the device, compiled for the torch that is installed (some 6 seconds, once a user and version)."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    source = (HERE / "card.cpp").read_bytes()
    name = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rlhpc-card-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "card.so").exists():
            need_programs("c++")
            (library,) = library_paths()[:1]
            names = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            words = [
                "c++", "-O0", "-std=c++20", "-shared", "-fPIC", names,
                *(f"-I{path}" for path in include_paths()), str(HERE / "card.cpp"), "-o", str(folder / "made.so"),
                f"-L{library}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{library}",
            ]  # fmt: skip
            subprocess.run(words, check=True)
            (folder / "made.so").rename(folder / "card.so")
        about = folder / "rlhpc_card-0.dist-info"
        about.mkdir(exist_ok=True)
        for file, text in _ENTRY.items():
            (about / file).write_text(text)
    return folder


def environment() -> dict[str, str]:
    """Of processes that have the accelerator."""
    folder = build()
    path = [str(folder), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "RLHPC_CARD": str(folder / "card.so"), "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "RLHPC_TEST_DEVICE": "card", "RLHPC_VIRTUAL_ACCELERATORS": "1",
        "RLHPC_CARDS": os.environ.get("RLHPC_CARDS", "0,1,2,3"),
    }  # fmt: skip
