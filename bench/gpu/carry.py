"""Packages of the part `curve` for a machine without a network: reasoning-gym and its dependencies, in one archive.

    python -m bench.gpu.carry --python python3.12   # where a package index is: writes .carry/curve, which git ignores
    python -m bench.gpu --only curve                # there, with that folder in the checkout: unpacks and uses the archive

The archive is for one version of Python on Linux with the same processor. That Python must be installed where the archive is
made, because one of the packages has no wheels and is compiled. What torch, transformers and matplotlib bring is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.gpu.part import ROOT
from envs.freeze import closure

#: Where the archive is looked for.
FOLDER = ROOT / ".carry" / "curve"
#: Packages that are not carried, because machines with torch, transformers and matplotlib have them.
PRESENT = frozenset(
    {
        "contourpy", "cycler", "fonttools", "kiwisolver", "matplotlib", "mpmath", "numpy", "packaging", "pillow", "pyparsing",
        "python-dateutil", "pyyaml", "setuptools", "sympy",
    }
)  # fmt: skip
#: Bytes of an archive at most; what travels with a checkout is limited.
LIMIT = 32 << 20


def archive_name(python: str = sys.executable) -> str:
    """Returns the name of the archive for the version of a Python."""
    code = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"packages-{tag}.tar.xz"


def install(python: str, target: Path) -> None:
    """Installs reasoning-gym and its requirements in the versions of this environment, for another Python."""
    pins = {name: version for name, version in closure(("reasoning-gym",)).items() if name not in PRESENT}
    uv = shutil.which("uv") or str(Path(sys.prefix) / "bin" / "uv")
    requirements = [f"{name}=={version}" for name, version in sorted(pins.items())]
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "--target", str(target), *requirements]
    subprocess.run(command, check=True)


def pack(site: Path, archive: Path) -> int:
    """Writes a folder of installed packages, without byte code, as an archive; returns its size in bytes.

    Raises:
        SystemExit: The archive would be too large.
    """

    def without_byte_code(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in member.name.split("/") else member

    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}")
    with tarfile.open(temporary, "w:xz") as file:
        file.add(site, ".", filter=without_byte_code)
    size = temporary.stat().st_size
    if size > LIMIT:
        temporary.unlink()
        raise SystemExit(f"{archive} would have {size / 2**20:.0f} MiB, of at most {LIMIT >> 20}")
    temporary.replace(archive)
    return size


@contextmanager
def carried_packages(module: str = "reasoning_gym", folder: Path = FOLDER) -> Iterator[bool]:
    """Makes the archive's packages importable in processes started in the block, if `module` is not installed here.

    Yields:
        Whether these processes can import `module`.
    """
    archive = folder / archive_name()
    if importlib.util.find_spec(module) is not None or not archive.is_file():
        yield importlib.util.find_spec(module) is not None
        return
    former = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as site:
        with tarfile.open(archive) as file:
            file.extractall(site, filter="data")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, former)))
        try:
            yield True
        finally:
            if former is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = former


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the archive for a Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python of the version of the other machine's")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the archive")
    options = parser.parse_args(arguments)
    archive = options.out / archive_name(options.python)
    with tempfile.TemporaryDirectory() as site:
        install(options.python, Path(site))
        print(f"{archive}: {pack(Path(site), archive) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
