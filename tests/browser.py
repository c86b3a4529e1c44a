"""Pages measured in headless Chromium: what overflows, how large its letters are, and what its charts show."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

from tests.extras import find_program, need_programs

CHROMIUM = next(filter(None, map(find_program, ("chromium", "chromium-browser", "google-chrome"))), "")
#: Height of the frame; no page is measured by it.
_HEIGHT = 1600
_MEASURE = """
const clear = (text) => text.trim().replace(/\\s+/g, " ");
const seen = (element) => element.checkVisibility() && element.getClientRects().length > 0;
const measure = (frame) => {
  const page = frame.contentDocument, view = frame.contentWindow, texts = [], charts = [];
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!clear(node.data) || element.closest("svg title, script, style") || !seen(element)) continue;
    const svg = element.closest("svg");
    const scale = svg ? svg.getScreenCTM().a : 1;
    const style = view.getComputedStyle(element);
    texts.push({text: clear(node.data).slice(0, 60), px: parseFloat(style.fontSize) * scale, svg: Boolean(svg),
                color: svg ? style.fill : style.color});
  }
  for (const svg of page.querySelectorAll("svg.chart")) {
    if (!seen(svg)) continue;
    const box = svg.getBoundingClientRect();
    const outside = [...svg.querySelectorAll("text")].filter((text) => {
      const own = text.getBoundingClientRect();
      return own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1;
    }).map((text) => clear(text.textContent));
    charts.push({title: svg.getAttribute("aria-label"), width: box.width, outside,
                 curves: [...svg.querySelectorAll("polyline")].map((line) => line.getAttribute("points")),
                 strips: [...svg.querySelectorAll(".strip title")].map((title) => title.textContent),
                 letters: [...svg.querySelectorAll("text")].map((text) =>
                   parseFloat(view.getComputedStyle(text).fontSize) * svg.getScreenCTM().a)});
  }
  return {overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
          background: view.getComputedStyle(page.body).backgroundColor, texts, charts};
};
addEventListener("load", () => {
  const found = Object.fromEntries([...document.querySelectorAll("iframe")].map((frame) => [frame.title, measure(frame)]));
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
"""


@dataclass(frozen=True)
class Measured:
    """A page at one width.

    Attributes:
        overflow: Pixels by which it is wider than the frame.
        background: Its colour.
        texts: Every visible text with its size in pixels on the screen, and its colour.
        charts: Every visible chart: title, width, texts outside of it, curves, tooltips, sizes of its letters.
    """

    overflow: int
    background: str
    texts: list[dict[str, Any]]
    charts: list[dict[str, Any]]


def chromium(folder: Path, *options: str) -> str:
    """Runs Chromium without a window; returns its standard output."""
    if not CHROMIUM:
        need_programs("chromium")
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
              f"--user-data-dir={folder / 'profile'}")  # fmt: skip
    done = subprocess.run([CHROMIUM, *common, *options], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


def measure(
    pages: Sequence[Path], folder: Path, widths: Sequence[int], *, dark: bool
) -> dict[tuple[str, int], Measured]:
    """Opens all pages at all widths, each in a frame of that width.

    Args:
        pages: HTML files.
        folder: For files of the browser.
        widths: In CSS pixels.
        dark: Whether the reader prefers dark pages.

    Returns:
        By page's name and width.
    """
    frames = "".join(
        f'<iframe title="{page.name} {width}" width="{width}" height="{_HEIGHT}" style="border:0" '
        f'srcdoc="{escape(page.read_text(), quote=True)}"></iframe>'
        for page in pages
        for width in widths
    )
    wrapper = folder / "wrapper.html"
    scheme = f"<style>:root{{color-scheme:{'dark' if dark else 'light'}}}</style>"
    wrapper.write_text(f"<!doctype html><meta charset=utf-8>{scheme}<body>{frames}<script>{_MEASURE}</script>")
    theme = ("--blink-settings=preferredColorScheme=0",) if dark else ("--blink-settings=preferredColorScheme=1",)
    dom = chromium(folder, *theme, "--window-size=1400,1600", "--dump-dom", wrapper.as_uri())
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-500:]
    results = json.loads(unescape(found[1]))
    return {(name.rpartition(" ")[0], int(name.rpartition(" ")[2])): Measured(**one) for name, one in results.items()}


def screenshot(page: Path, folder: Path, width: int, height: int, output: Path, *, dark: bool) -> None:
    """Writes a picture of a page at a width, from its top."""
    wrapper = folder / f"picture-{width}.html"
    style = f"body{{margin:0}}:root{{color-scheme:{'dark' if dark else 'light'}}}"
    frame = (
        f'<iframe width="{width}" height="{height}" style="border:0" srcdoc="{escape(page.read_text(), quote=True)}">'
    )
    wrapper.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{frame}</iframe>")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    chromium(folder, scheme, f"--window-size={max(width, 500)},{height}", f"--screenshot={output}", wrapper.as_uri())
