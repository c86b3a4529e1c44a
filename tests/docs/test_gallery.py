"""The gallery: its pictures are there and are shown, and its commands are such that `rlhpc` and `make` know."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from bench import gallery, gallery_pages, gallery_pictures
from rlhpc.cli import build_parser
from rlhpc.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/gallery.md"
ENTRIES = gallery_pictures.ENTRIES


def test_the_page_shows_each_entry_once_with_all_its_pictures() -> None:
    text = PAGE.read_text()
    assert re.findall(r"<!-- pictures (\w+) -->", text) == list(ENTRIES)
    shown = re.findall(r"!\[[^]]+\]\(images/gallery/([\w.]+)\)", text)
    assert sorted(shown) == sorted(path.name for path in gallery_pictures.IMAGES.glob("*.png"))
    videos = {f"{name}_film.png" for name, entry in ENTRIES.items() if entry.video}
    assert set(shown) == {f"{name}.png" for name in ENTRIES} | videos


def test_an_entry_without_pictures_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"nosuch\.json does not exist: python -m bench\.gallery_pictures nosuch"):
        gallery_pages.render_pictures("nosuch", PAGE)


@pytest.mark.parametrize("name", ENTRIES)
def test_pictures_are_of_the_entrys_commands(name: str) -> None:
    content = json.loads((gallery_pictures.IMAGES / f"{name}.json").read_text())
    assert content["commands"] == gallery_pictures.build_commands(name)
    assert content["seconds"] > 0 and content["result"] and content["machine"]["commit"]
    assert bool(content.get("samples")) == ENTRIES[name].samples
    for row in content.get("samples", ()):
        assert row["prompt"] and row["answer"]


@pytest.mark.parametrize("name", ENTRIES)
def test_commands_are_such_that_the_program_knows(name: str) -> None:
    """Words that the parser takes, with configurations that exist."""
    for command in gallery_pictures.build_commands(name):
        program, *words = shlex.split(command)
        options = build_parser().parse_args(words)
        assert program == "rlhpc"
        assert words[0] != "train" or (ROOT / options.config).is_file()
    assert ENTRIES[name].task in gallery.TASKS


def test_the_makefile_has_what_the_pages_say() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^gallery: .*\n\tpython -m bench\.gallery \$\(ONLY\)$", text, re.M)
    assert re.search(r"^curve-%: .*\n\tpython -m bench\.gallery \$\*$", text, re.M)
    pages = "".join(page.read_text() for page in gallery_pages.PAGES)
    targets = re.findall(r"make curve-(\w+)", pages)
    assert set(targets) <= set(gallery.TASKS)
    assert len(targets) > 20
    for target in re.findall(r"^\| `make ([\w-]+)", PAGE.read_text(), re.M):
        assert re.search(rf"^{target}:", text, re.M), target
    (words,) = set(re.findall(r'make gallery ONLY="([^"]+)"', (ROOT / "docs/algorithms/README.md").read_text()))
    assert set(words.split()) <= set(gallery.TASKS)
