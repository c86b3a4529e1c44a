"""Runs of language models with metrics and evaluations, and a parser of their pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.reporting.sample_pages import FILTER, samples_path

CONFIG = """
runner: {task_type: %s}
actor: {model: {model_path: /models/tiny}}
data: {train: {source: arithmetic}}
"""


class Page(HTMLParser):
    """Collects the tags, and fails on one that does not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def parse(path: Path) -> tuple[str, Page]:
    text, parser = path.read_text().replace(f"<script>{FILTER}</script>", ""), Page()
    parser.feed(text)
    assert parser.open == []
    tags = {tag for tag, _ in parser.seen}
    assert not tags & {"script", "img", "link", "iframe", "object", "base"}
    assert not re.search(r"@import|url\(", text)
    assert not any(name.startswith("on") or name == "src" for _, attributes in parser.seen for name in attributes)
    assert not set(text) & {chr(code) for code in range(32) if chr(code) not in "\n\t"}
    return text, parser


def rows(problems: int, right: int, samples: int = 1, response: str = "It is {}.") -> list[dict[str, Any]]:
    return [
        {
            "id": i, "sample": j, "level": f"{1 + i % 2} digits", "prompt": f"What is {i} + {i}?", "answer": str(2 * i),
            "response": response.format(2 * i), "vote": str(2 * i), "right": i < right, "reward": float(i < right) + 0.1,
            "terms": {"math": float(i < right), "format": 0.1}, "tokens": 5 + i, "finished": i % 3 > 0, "failed": i == 4,
        }
        for i in range(problems) for j in range(samples)
    ]  # fmt: skip


def evaluate(paths: RunPaths, step: int, suite: str, samples: list[dict[str, Any]]) -> None:
    path = paths.eval_result(step, suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    samples_path(path).write_text("".join(json.dumps(row) + "\n" for row in samples))
    path.write_text(json.dumps({"suite": suite, "global_step": step, "backend": "hf", **summarize(samples)}))
