"""Environment of a run's start: installed packages, system, and the code that is run.

`provenance.json` has the facts. Texts that several starts share are files of the folder `provenance/`, named by their
checksum. Whatever cannot be recorded is left out: a run does not end because of it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import rlhpc
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.env_references import to_plain
from rlhpc.runtime.files import read_file, replace_durably
from rlhpc.runtime.redaction import SECRET, redact_addresses
from rlhpc.runtime.repository import git_output, git_state, remote_url, repository_top
from rlhpc.runtime.trust import named_code

#: Maximum bytes of the difference from a commit, and of the user's modules.
_MAX_DIFF, _MAX_MODULES = 16 << 20, 16 << 20
#: Programs that count although they are in no commit yet, and their maximum number.
_PROGRAMS, _MAX_UNTRACKED = ("*.py", "*.smk", "*.toml", "*.jinja"), 500
_PACKAGE_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s#;]+)(?:\s+#.*)?")


def record_environment(paths: RunPaths, cfg: Any) -> dict[str, Any]:
    """Returns the facts about a start's environment, and writes the files that they name.

    Args:
        paths: The run.
        cfg: Resolved configuration (DictConfig or dict), which may name modules of the user.
    """
    environment_facts: dict[str, Any] = {"system": system_facts()}
    with contextlib.suppress(OSError):
        environment_facts["packages"] = _store(paths, package_list().encode(), "txt")
    with contextlib.suppress(OSError):
        environment_facts["code"] = [_read_code_state(paths, role, folder) for role, folder in _iter_repositories()]
    with contextlib.suppress(OSError):
        if modules := find_user_modules(to_plain(cfg)):
            environment_facts["modules"] = _store(paths, json.dumps(modules, indent=0, sort_keys=True).encode(), "json")
    return environment_facts


def package_list() -> str:
    """Returns the installed packages, one per line as `name==version`, sorted by name.

    A package that came from an address has the address in a comment, without logins.
    """
    lines = dict[str, str]()
    for package in metadata.distributions():
        # Only the head is parsed, because the description below it may be long.
        head = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
        package_name, version = (
            re.search(rf"^{field}:[ \t]*(\S+)", head, re.MULTILINE) for field in ("Name", "Version")
        )
        name = re.sub(r"[-_.]+", "-", package_name[1]).lower() if package_name else ""
        if not name or version is None or name in lines:  # the first on the path hides others of its name
            continue
        origin = ""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            direct = json.loads(package.read_text("direct_url.json") or "{}")
            commit_id = (direct.get("vcs_info") or {}).get("commit_id", "")
            url = redact_addresses(str(direct.get("url") or ""), SECRET)
            # A local folder says nothing on another machine, and may be in a home directory.
            url = "a local folder" if url.startswith("file:") else url
            origin = f"  # from {url}{f' at {commit_id}' if commit_id else ''}" if url else ""
        lines[name] = f"{name}=={version[1]}{origin}"
    return "".join(f"{lines[name]}\n" for name in sorted(lines))


def parse_package_list(list_text: str) -> dict[str, str]:
    """Returns the versions in a list of packages by name; ignores lines of a different form."""
    matches = (_PACKAGE_LINE.fullmatch(line.strip()) for line in list_text.splitlines())
    return {match[1]: match[2] for match in matches if match}


def system_facts() -> dict[str, Any]:
    """Returns the facts about this machine that influence results."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libc": " ".join(platform.libc_ver()),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _find_first_match(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$"),
        "nvidia_driver": _find_first_match(Path("/proc/driver/nvidia/version"), r"Kernel Module\D*([\d.]+)"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def find_user_modules(nested_config: Any) -> dict[str, str]:
    """Returns the sources of the user's modules that a configuration names, by path below the import path.

    Modules that these import belong to them. So do the modules of plugins that are installed from a local folder. Modules of
    Python and of installed packages are left out, because versions say what they have. Nothing is imported.
    """
    queue = [code_entry.module for code_entry in named_code(nested_config) if code_entry.module]
    for package in metadata.distributions():
        if "[rlhpc." in (package.read_text("entry_points.txt") or ""):
            queue += [
                entry_point.module for entry_point in package.entry_points if entry_point.group.startswith("rlhpc.")
            ]
    source_texts, visited_names, total_chars = dict[str, str](), set[str](), 0
    while queue:
        name = queue.pop()
        if name in visited_names or name.partition(".")[0] in ("rlhpc", ""):
            continue
        visited_names.add(name)
        for path, file in _iter_module_files(name):
            if path in source_texts:
                continue
            with contextlib.suppress(OSError, ValueError):
                source_text = read_file(file).decode()
                total_chars += len(source_text)
                if total_chars > _MAX_MODULES:
                    return source_texts
                source_texts[path] = source_text
                queue += _find_imports(source_text, path)
    return source_texts


def _find_imports(source_text: str, path: str) -> list[str]:
    """Returns the modules that a source imports, and the names that may be modules of a package."""
    try:
        tree = ast.parse(source_text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    package = path.split("/")[:-1]
    module_names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module_names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            base_name = ".".join([*parents, *([node.module] if node.module else [])])
            module_names += [base_name, *(f"{base_name}.{alias.name}" for alias in node.names)]
    return module_names


def _iter_module_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yields names and files of a module and of its parent packages, except those that belong to an installed package."""
    top, *submodule_names = name.split(".")
    try:
        module_spec = importlib.util.find_spec(top)  # of a top-level module, which imports nothing
    except (ImportError, ValueError, AttributeError):
        return
    if module_spec is None:
        return
    folders = [Path(location) for location in module_spec.submodule_search_locations or ()]
    if module_spec.origin and module_spec.origin.endswith(".py") and not _is_installed(Path(module_spec.origin)):
        yield f"{top}/__init__.py" if folders else f"{top}.py", Path(module_spec.origin)
    folders = [folder for folder in folders if not _is_installed(folder)]
    for depth, submodule_name in enumerate(submodule_names):
        parent_path = "/".join([top, *submodule_names[:depth]])
        for folder in folders:
            if (module := folder / f"{submodule_name}.py").is_file():
                yield f"{parent_path}/{submodule_name}.py", module
            if (module := folder / submodule_name / "__init__.py").is_file():
                yield f"{parent_path}/{submodule_name}/__init__.py", module
        folders = [folder / submodule_name for folder in folders if (folder / submodule_name).is_dir()]


def _is_installed(path: Path) -> bool:
    """Returns whether a file belongs to Python or to an installed package, whose version identifies its content."""
    folders = {sysconfig.get_path(path_kind) for path_kind in ("purelib", "platlib", "stdlib", "platstdlib")}
    return any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in folders if folder)


def _iter_repositories() -> Iterator[tuple[str, Path]]:
    """Yields role and folder of the repositories whose code runs: the working directory's and rlhpc's."""
    tops = set[Path]()
    for role, folder in (("project", Path.cwd()), ("rlhpc", Path(rlhpc.__file__).resolve().parents[1])):
        if role == "rlhpc" and not (folder / ".git").exists():  # not a checkout
            continue
        with contextlib.suppress(OSError):
            if (repository := repository_top(folder)) not in tops:
                tops.add(repository)
                yield role, folder


def _read_code_state(paths: RunPaths, role: str, folder: Path) -> dict[str, Any]:
    """Returns commit, remote and difference from the commit of a repository."""
    repository = repository_top(folder)
    state: dict[str, Any] = {
        "role": role,
        **git_state(folder),
        "top": str(repository),
        "folder": os.path.relpath(folder, repository),
    }
    search_path = [
        Path(python_path).absolute()
        for python_path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if python_path
    ]
    state["python_path"] = [
        os.path.relpath(python_path, repository)
        for python_path in search_path
        if python_path.is_relative_to(repository)
    ]
    state["has_rlhpc"] = Path(rlhpc.__file__).resolve().is_relative_to(repository.resolve())
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        state["remote"] = redact_addresses(remote_url(folder), SECRET)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sources := _read_untracked_sources(repository):
            state["untracked"] = _store(paths, json.dumps(sources, indent=0, sort_keys=True).encode(), "json")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if state.get("dirty"):
            diff_bytes = git_output(
                repository, "diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD"
            )
            state["diff_bytes"] = len(diff_bytes)
            if len(diff_bytes) <= _MAX_DIFF:
                state["diff"] = _store(paths, diff_bytes, "diff")
    return state


def _read_untracked_sources(repository: Path) -> dict[str, str]:
    """Returns the programs in a repository that are in no commit yet and that it does not ignore, by path."""
    file_names = git_output(repository, "ls-files", "-z", "--others", "--exclude-standard", "--", *_PROGRAMS).decode(
        errors="replace"
    )
    source_texts, total_chars = dict[str, str](), 0
    for name in sorted(filter(None, file_names.split("\0")))[:_MAX_UNTRACKED]:
        path = repository / name
        with contextlib.suppress(OSError, ValueError):
            if not path.is_symlink() and (total_chars := total_chars + path.stat().st_size) <= _MAX_MODULES:
                source_texts[name] = read_file(path).decode()
    return source_texts


def _store(paths: RunPaths, stored_bytes: bytes, suffix: str) -> str:
    """Writes a text to a file named by its checksum, unless the file exists; returns the file's name.

    Only the user can read the file, because a difference may have what was not meant for others.
    """
    name = f"{hashlib.sha256(stored_bytes).hexdigest()[:16]}.{suffix}"
    if not (path := paths.provenance_files / name).exists():
        replace_durably(path, stored_bytes, mode=0o600)
    return name


def _find_first_match(path: Path, pattern: str) -> str:
    try:
        match = re.search(pattern, read_file(path, 1 << 22).decode(errors="replace"), re.MULTILINE)
    except (OSError, ValueError):
        return ""
    return match[1].strip() if match else ""
