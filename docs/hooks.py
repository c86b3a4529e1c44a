"""What `make docs` does beside MkDocs. Files outside docs/ that a page links to (configurations, scripts) come along; drawings
become pictures here, rather than in each reader's browser with a program from elsewhere; and a site with a page that has
something loaded from elsewhere is refused.
"""

from __future__ import annotations

import base64
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import mermaidx
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.superfences import SuperFencesException

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
#: Path in the site → file in the repository.
_brought: dict[str, Path] = {}
#: What a browser loads by itself: element → attribute. Links that a reader follows are not among them.
_LOADS = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "link": "href", "image": "href", "use": "href",
}  # fmt: skip
#: Of `link`, which says of its address what it is for.
_LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload", "manifest"}


def drawn(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **_: Any) -> str:
    """A fence with a drawing as a picture, which is part of the page. On white: its lines are dark in either palette.

    Raises:
        SuperFencesException: It is no drawing that Mermaid knows; the build ends.
    """
    try:
        picture = mermaidx.render(source).svg()
    except Exception as error:
        raise SuperFencesException(f"this drawing cannot be made: {error}\n{source}") from error
    data = base64.b64encode(picture.encode()).decode()
    style = "background: white; padding: 0.4rem; border-radius: 0.2rem"
    return f'<p><img class="drawing" style="{style}" alt="{escape(source)}" src="data:image/svg+xml;base64,{data}"></p>'


def on_config(config: Any) -> Any:
    """Drawings are made by `drawn`."""
    fence = {"name": "mermaid", "class": "mermaid", "format": drawn}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


class _Loaded(HTMLParser):
    """The addresses that a browser loads with a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag != "link" or _LOADED_LINKS & {*given.get("rel", "").split()}:
            self.addresses.append(given.get(_LOADS.get(tag, ""), ""))


def from_elsewhere(page: str) -> list[str]:
    """What a browser loads from another host when it shows this HTML."""
    return [address for address in _Loaded(page).addresses if re.match(r"(https?:)?//", address)]


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Raises:
    PluginError: The page has something loaded from another host.
    """
    if found := from_elsewhere(output):
        raise PluginError(f"{page.file.src_uri}: loads {', '.join(found)}; the site is to be read without a network")
    return output


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
                copy = File.generated(config, name, abs_src_path=str(found), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(copy)
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
