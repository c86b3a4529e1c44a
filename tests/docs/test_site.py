"""The site of the documentation is read without a network: nothing on a page is loaded from another host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("docs")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[2]
DRAWING = "```mermaid\nsequenceDiagram\n    driver->>ranks: begin\n    ranks-->>driver: done & well\n```\n"


def site_of(folder: Path, text: str) -> Path:
    """The site of one page, made as `make docs` makes that of docs/; returns the page."""
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(text)
    options = {"docs_dir": str(folder / "docs"), "site_dir": str(folder / "site")}
    config = load_config(str(ROOT / "mkdocs.yml"), **options)
    config.nav = None
    build(config)
    return folder / "site" / "index.html"


def test_drawings_are_pictures_on_the_page(tmp_path: Path) -> None:
    page = site_of(
        tmp_path, f"# Page\n\nA [link](https://example.org/) is followed, not loaded.\n\n{DRAWING}"
    ).read_text()
    assert 'src="data:image/svg+xml;base64,' in page
    assert 'class="mermaid"' not in page  # for which the theme would load a program from elsewhere
    assert 'alt="sequenceDiagram' in page and "done &amp; well" in page


@pytest.mark.parametrize(
    "text",
    ["![x](https://example.org/x.png)", '<script src="//example.org/x.js"></script>'],
    ids=["picture", "program"],
)
def test_a_page_that_loads_from_elsewhere_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    with pytest.raises(Abort):
        site_of(tmp_path, f"# Page\n\n{text}\n")
    assert re.search(r"index\.md: loads \S*//example\.org/x\..*without a network", caplog.text)


def test_a_drawing_that_cannot_be_made_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="this drawing cannot be made"):
        site_of(tmp_path, "# Page\n\n```mermaid\nno such drawing\n```\n")
