"""Code of a run in its bundle: the files of the commit with the run's changes, the changes alone, and the user's modules."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from rlhpc import share
from rlhpc.checkpoint.manifest import digest, is_plain_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.publishing.file_set import FileSet
from rlhpc.publishing.layout import CODE
from rlhpc.runtime.files import read_file, read_json
from rlhpc.runtime.repository import git_output

MODULES = f"{CODE}/modules"
#: What runs need of a checkout of rlhpc.
_PARTS_OF_RLHPC = ("rlhpc", *share.FOLDERS, "pyproject.toml", "setup.py", "LICENSE", "README.md")
#: Facts about a repository that a bundle has.
_PUBLIC_FACTS = ("role", "commit", "branch", "dirty", "remote", "python_path", "has_rlhpc")
#: Largest file that is no program, and largest repository, in bytes.
_MAX_FILE, _MAX_REPOSITORY = 1 << 20, 64 << 20
_TIMEOUT_S = 120.0


def add_code(files: FileSet, paths: RunPaths, provenance: dict[str, Any], *, is_included: bool) -> list[dict[str, Any]]:
    """Adds the code of the run's newest start; returns its entries in the record.

    Args:
        files: Files of the bundle.
        paths: The run.
        provenance: Provenance record of the run.
        is_included: Whether the files of the commits go in, and not only the commits' names and the changes.
    """
    last_start = (provenance.get("segments") or [provenance])[-1]
    code_states = last_start.get("code")
    if code_states is None and last_start.get("git"):  # runs of earlier versions did not record changes
        code_states = [{"role": "project", **last_start["git"], "top": last_start.get("folder"), "python_path": []}]
    record = []
    for code_state in code_states or ():
        public_facts = {key: code_state.get(key) for key in _PUBLIC_FACTS}
        public_facts["working_folder"] = code_state.get("folder")
        role = PurePosixPath(str(code_state.get("role") or "project")).name
        diff_bytes = _read_stored(paths, code_state.get("diff"))
        if diff_bytes is not None:
            public_facts["diff"] = f"{CODE}/{role}.diff"
            files.add_text(public_facts["diff"], diff_bytes.decode(errors="replace"), is_code=True)
        elif code_state.get("dirty"):
            public_facts["missing"] = "the changes to the commit were not recorded"
        if is_included and diff_bytes is None and code_state.get("dirty"):
            public_facts["missing"] += ", so its files would not be those that ran"
        elif is_included:
            public_facts |= _add_tree(
                files, role, code_state, diff_bytes, _read_sources(paths, code_state.get("untracked"))
            )
        record.append(public_facts)
    source_texts = _read_sources(paths, last_start.get("modules"))
    for name in sorted(source_texts):
        files.add_text(f"{MODULES}/{name}", source_texts[name], is_code=True)
    if source_texts:
        record.append({"role": "modules", "folder": MODULES, "files": len(source_texts), "python_path": ["."]})
    return record


def _read_stored(paths: RunPaths, name: Any) -> bytes | None:
    """Returns the content of a file that the provenance record names; None if the file does not exist."""
    if not isinstance(name, str) or not is_plain_name(name):
        return None
    try:
        return read_file(paths.provenance_files / name)
    except OSError:
        return None


def _read_sources(paths: RunPaths, name: Any) -> dict[str, str]:
    """Returns the sources in a file that the provenance record names, by path."""
    source_bytes = _read_stored(paths, name)
    try:
        source_texts = read_json(source_bytes) if source_bytes is not None else {}
    except ValueError:
        return {}
    return (
        {str(path): str(source_texts[path]) for path in source_texts if is_plain_name(path)}
        if isinstance(source_texts, dict)
        else {}
    )


def _add_tree(
    files: FileSet, role: str, code_state: dict[str, Any], diff_bytes: bytes | None, untracked_files: dict[str, str]
) -> dict[str, Any]:
    """Adds the files of a commit with uncommitted changes and untracked files; returns facts for the record."""
    top, commit_id = Path(str(code_state.get("top") or "")), str(code_state.get("commit") or "")
    included_names = (
        [tree_part for tree_part in _PARTS_OF_RLHPC if (top / tree_part).exists()]
        if code_state.get("has_rlhpc")
        else []
    )
    try:
        archive = git_output(top, "archive", "--format=tar", commit_id, "--", *included_names, timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return {"missing": "the repository does not have the commit any more, or is not on this machine"}
    if len(archive) > _MAX_REPOSITORY:
        return {
            "missing": f"the files of the commit have {len(archive) >> 20} MB; at most {_MAX_REPOSITORY >> 20} MB are included"
        }
    with tempfile.TemporaryDirectory(prefix="rlhpc-code-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = [member for member in tar.getmembers() if member.isfile() and is_plain_name(member.name)]
            tar.extractall(tree, members, filter="data")
        if diff_bytes and not _apply_diff(tree, diff_bytes, included_names):
            return {"missing": "the recorded changes do not fit the commit"}
        for name, source_text in untracked_files.items():
            if not included_names or name.split("/")[0] in included_names:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_text(source_text)
        left_out, original_checksums, num_files, total_bytes = [], dict[str, str](), 0, 0
        for path in sorted(tree.rglob("*")):
            name = str(path.relative_to(tree))
            if not path.is_file() or path.is_symlink():
                continue
            if path.stat().st_size > _MAX_FILE and path.suffix != ".py":
                left_out.append(name)
                continue
            target = f"{CODE}/{role}/{name}"
            files.add_file(target, path, is_code=True)
            # The temporary folder is gone when the bundle is written.
            if isinstance(target_content := files.files[target].content, Path):
                files.add_bytes(target, target_content.read_bytes())
            elif (checksum := digest(path)[1]) != files.files[target].checksum()[1]:
                original_checksums[name] = checksum
            num_files, total_bytes = num_files + 1, total_bytes + path.stat().st_size
    tree_facts: dict[str, Any] = {"folder": f"{CODE}/{role}", "files": num_files, "bytes": total_bytes}
    return (
        tree_facts
        | ({"left_out": left_out} if left_out else {})
        | ({"redacted": original_checksums} if original_checksums else {})
    )


def _apply_diff(tree: Path, diff_bytes: bytes, included_names: list[str]) -> bool:
    """Applies a difference to the files of its commit; returns whether it fits."""
    (tree.parent / "changes.diff").write_bytes(diff_bytes)
    include_options = [
        f"--include={tree_part}" if "." in tree_part or tree_part == "LICENSE" else f"--include={tree_part}/*"
        for tree_part in included_names
    ]
    environment = {name: variable_value for name, variable_value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "apply", "--whitespace=nowarn", *include_options, str(tree.parent / "changes.diff")]
    try:
        subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
