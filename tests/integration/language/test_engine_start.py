"""Start of real vLLM engines: its phases, and the order in which engines with one cache start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm", "vllm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import save_model, save_tokenizer

pytestmark = [pytest.mark.long(together=True), pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("engine_start.py")
#: Phases of an engine on the CPU, where nothing is compiled; on GPUs there is one more, vLLM: profile.
BUILD = ["vLLM: devices", "vLLM: load weights", "vLLM: KV cache and graphs", "start", "closed"]


class Engine:
    """Process of `engine_start.py`, and the lines that it has printed."""

    def __init__(self, model: Path, cache: Path, *words: str) -> None:
        environment = {**os.environ, "VLLM_CACHE_ROOT": str(cache)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model), *words], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self.phases, self.errors = list[str](), list[str]()
        for stream, lines in ((self.process.stdout, self.phases), (self.process.stderr, self.errors)):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()

    @staticmethod
    def _read(stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))

    def wait_for(self, phase: str) -> None:
        deadline = time.monotonic() + 600
        while phase not in self.phases:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.phases, self.errors[-20:])
            time.sleep(0.05)


def test_the_second_engine_starts_when_the_caches_of_the_first_are_there(tmp_path: Path) -> None:
    model, cache, go = tmp_path / "model", tmp_path / "cache", tmp_path / "go"
    save_model(model)
    save_tokenizer(model)
    first = Engine(model, cache, "vLLM: load weights", str(go))
    second = Engine(model, cache, "vLLM: imports", str(tmp_path / "first builds"))
    try:
        first.wait_for("vLLM: load weights")
        (tmp_path / "first builds").touch()
        second.wait_for("vLLM: wait for the cache")
        assert not list(cache.rglob("*.filled")) and "vLLM: devices" not in second.phases
        go.touch()
        second.wait_for("vLLM: devices")
        [marker] = cache.rglob("*.filled")
        assert list((cache / "modelinfos").iterdir()), "what vLLM keeps of the model's class"
        for engine in (first, second):
            assert engine.process.wait(600) == 0, engine.errors[-20:]
            while "closed" not in engine.phases:
                time.sleep(0.05)
        assert first.phases == ["start", "vLLM: imports", *BUILD]
        assert second.phases == ["start", "vLLM: imports", "vLLM: wait for the cache", *BUILD]
        assert [*cache.rglob("*.filled")] == [marker] and not list(cache.rglob("*.lease"))
        assert any("vLLM: init engine" in line and "took" in line for line in first.errors), "the log has durations"
    finally:
        for engine in (first, second):
            engine.process.kill()
