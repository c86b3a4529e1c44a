"""What `make docs` does beside MkDocs: files outside docs/ that a page links to (configurations, scripts) come along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
#: Path in the site → file in the repository.
_brought: dict[str, Path] = {}


def _outside(page: Path, target: str) -> Path | None:
    """The file of the repository that a link of a page means, if it is none of docs/."""
    if "://" in target or target.startswith("mailto:"):
        return None
    found = (page.parent / target).resolve()
    inside = found.is_relative_to(ROOT / "docs") or not found.is_relative_to(ROOT)
    return None if inside or not found.exists() else found


def on_files(files: Files, config: Any) -> Files:
    """Adds what the pages link to."""
    _brought.clear()
    left = [Path(file.abs_src_path) for file in files.documentation_pages()]
    while left:
        page = left.pop()
        for _, target, _ in _LINK.findall(page.read_text()):
            found = _outside(page, target)
            if found is None or found.is_dir():
                continue
            name = f"files/{found.relative_to(ROOT).as_posix()}"
            if name not in _brought:
                _brought[name] = found
                files.append(File.generated(config, name, abs_src_path=str(found)))
                if found.suffix == ".md":
                    left.append(found)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside docs/ become links to their copies; one to a folder becomes its name."""
    here = page.file.src_uri
    source = _brought.get(here, ROOT / "docs" / here)
    up = "../" * here.count("/")

    def moved(match: re.Match[str]) -> str:
        if (found := _outside(source, match[2])) is None:
            target = (source.parent / match[2]).resolve()
            if here in _brought and "://" not in match[2] and target.is_relative_to(ROOT / "docs"):
                return f"{match[1]}{up}{target.relative_to(ROOT / 'docs').as_posix()}{match[3]}"
            return match[0]
        if found.is_dir():
            return f"{match[1]}{up}README.md)"
        return f"{match[1]}{up}files/{found.relative_to(ROOT).as_posix()}{match[3]}"

    return _LINK.sub(moved, markdown)
