"""Energy counters of a rank: NVML's, of a library that is not NVIDIA's, and RAPL's, of a folder that is not the kernel's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime.energy import EnergyMeter, rank_meter, split_report
from tests.extras import needs_programs
from tests.fake_nvml import Cards

#: Two calls of a meter in a process of its own, whose loader finds the library. Between them it waits for a line.
CALLS = """
import json, sys
from rlhpc.runtime.energy import rank_meter
meter = rank_meter(json.loads(sys.argv[1]), lambda: json.loads(sys.argv[2]))
print(json.dumps(meter.describe()), flush=True)
for _ in range(2):
    meter.begin_call()
    print("begun", flush=True)
    sys.stdin.readline()
    sys.stdout.write(meter.end_call().decode() + ".\\n")
    sys.stdout.flush()
    sys.stdin.readline()
"""


class Calls:
    """The process of `CALLS`."""

    def __init__(self, folder: Path, visible: str, accelerators: list[int], addresses: list[str] | None = None) -> None:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": visible}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CALLS, json.dumps(accelerators), json.dumps(addresses or [])], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.description: dict[str, Any] = json.loads(self._output.readline())
        assert self._output.readline() == "begun\n"

    def call(self) -> list[Any]:
        """Ends the call in progress; returns its readings."""
        self._tell()
        line = self._output.readline()
        if line != ".\n":
            self._output.readline()
        return [] if line == ".\n" else json.loads(line)

    def next(self) -> None:
        self._tell()
        assert self._output.readline() == "begun\n"

    def _tell(self) -> None:
        self._input.write("\n")
        self._input.flush()

    def end(self) -> str:
        return self._process.communicate()[1]


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    needs_programs("cc")
    cards = Cards(tmp_path / "nvml")
    cards.set(0, 5_000)
    cards.set(1, 7_000)
    return cards


@pytest.mark.parametrize("visible", ["0,1", "GPU-fake-0,GPU-fake-1"])
def test_each_card_has_a_counter_in_microjoules(cards: Cards, visible: str) -> None:
    calls = Calls(cards.folder, visible, [0, 1])
    assert [counter[:2] for counter in calls.description["counters"]] == [["gpu", "GPU-fake-0"], ["gpu", "GPU-fake-1"]]
    cards.set(0, 5_150)
    start, before, end, after = calls.call()
    assert (before, after) == ([5_000_000, 7_000_000], [5_150_000, 7_000_000]) and start < end
    calls.next()
    assert calls.call()[1] == after
    calls.end()


def test_a_counter_that_fails_ends_the_reading_and_not_the_rank(cards: Cards) -> None:
    calls = Calls(cards.folder, "0", [0])
    cards.set(0, "lost")
    assert calls.call() == []
    calls.next()
    assert calls.call() == []
    assert "the energy counters are not read any more" in calls.end()


@pytest.mark.parametrize(
    ("visible", "addresses", "reason"),
    [
        ("5", [], "the accelerator 5 has no energy counter"),
        ("9", [], "NVML does not know the accelerator 9 (NVML error 2)"),
        ("GPU-other", [], "NVML does not know the accelerator GPU-other (NVML error 6)"),
        ("0", ["0000:1b:00.0"], "NVML does not know the accelerator 0000:1b:00.0"),
        ("MIG-3-4", [], "a MIG instance has no counter of its own"),
    ],
)
def test_a_card_without_a_counter_has_a_reason(cards: Cards, visible: str, addresses: list[str], reason: str) -> None:
    calls = Calls(cards.folder, visible, [0], addresses)
    assert reason in calls.description["missing"]["gpu"] and calls.description["counters"] == []
    assert calls.call() == []
    calls.end()


def test_without_the_library_there_is_a_reason(tmp_path: Path) -> None:
    calls = Calls(tmp_path, "0", [0])
    assert calls.description["missing"]["gpu"] == "there is no NVML here (libnvidia-ml.so.1)"
    calls.end()


# -- RAPL --------------------------------------------------------------------------------------------------------------


def domain(root: Path, name: str, title: str, energy: str, wraps: int = 1_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, content in {"name": title, "energy_uj": energy, "max_energy_range_uj": str(wraps)}.items():
        (folder / file).write_text(f"{content}\n")
    return folder


def test_packages_are_read_and_their_parts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_POWERCAP", str(tmp_path))
    first = domain(tmp_path, "intel-rapl:0", "package-0", "100")
    domain(tmp_path, "intel-rapl:1", "package-1", "200")
    domain(tmp_path, "intel-rapl:0:0", "core", "7")
    domain(tmp_path, "intel-rapl:2", "psys", "9")
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", "11")
    meter = rank_meter([], list)
    assert meter.describe() == {
        "counters": [["cpu", "intel-rapl:0", 1001], ["cpu", "intel-rapl:1", 1001]], "missing": {},
    }  # fmt: skip
    meter.begin_call()
    (first / "energy_uj").write_text("350\n")
    report, rest = split_report(meter.end_call() + b'0.5 {"a": 1}')
    assert report is not None and (report[1], report[3]) == ([100, 200], [350, 200]) and rest == b'0.5 {"a": 1}'


def test_counters_that_cannot_be_read_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_POWERCAP", str(tmp_path))
    assert rank_meter([], list).missing == {"cpu": f"there are no RAPL counters in {tmp_path}"}
    folder = domain(tmp_path, "intel-rapl:0", "package-0", "no number")
    assert rank_meter([], list).missing == {"cpu": f"RAPL cannot be read: {folder}/energy_uj: no number"}
    (folder / "energy_uj").unlink()
    assert rank_meter([], list).missing == {
        "cpu": f"RAPL cannot be read: {folder}/energy_uj: No such file or directory"
    }


def test_a_rank_without_counters_reads_and_sends_nothing() -> None:
    meter = EnergyMeter()
    meter.begin_call()
    assert meter.read() is None and meter.end_call() == b""
    assert split_report(b"0.25") == (None, b"0.25")
