"""RLinf's unit tests on rlhpc: `RLINF=FOLDER python -m tests.rlinf_shim.run [--write]`.

Runs RLinf's tests of workers, groups, channels, placement, cluster configuration and communication from a checkout of RLinf
over the import shim beside this file, and prints which pass, and why the others do not. `--write` replaces `results.md`.
Tests that need an accelerator skip themselves without one, and are not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.md"
#: Environment variable with the folder of RLinf's checkout.
VARIABLE = "RLINF"
FILES = ("test_worker", "test_channel", "test_placement", "test_cluster_config", "test_comm")
#: Seconds that one file may take.
TIMEOUT_S = 600
PROFILING = "RLinf's section cluster.profiling; rlhpc's is runner.trace.profile"
#: Part of a test's name → why it fails, where the error does not say it. The first match counts.
REASONS = {
    "TestMultiChannelProcessGroupFailures": "rlhpc's messages do not go through process groups of torch",
    "TestLoadUserExtensions": "extensions of rlhpc are entry points of packages, not a module named by RLINF_EXT_MODULE",
    "test_peek_all": "a channel does not show its items: they may lie in the memory of another process or host",
    "test_inference_tp_size_constraint": "inference is no model-parallel group with a size of its own in rlhpc",
    "test_recompute_logprobs_false_with_inference_raises": "the algorithm says whether log-probs are recomputed in rlhpc",
    "test_reward_required_raises": "rewards need no group of their own in rlhpc",
    "test_auto_mode_actor_expands_to_all_gpus": "rlhpc has no cluster.auto_scheduler; `rlhpc tune` searches placements",
}
#: Parts of names of tests that pass by code of the shim alone, because rlhpc has another form.
IN_SHIM = {
    "merge": "rlhpc merges no PATH-like variables; in env_vars, `${oc.env:PATH}` stands for the driver's",
    "test_cluster_config_env_var": "RLinf's list of one-entry mappings; env_vars is one mapping in rlhpc",
    "test_cluster_config_node_group_entry_must_be_mapping": "refused by rlhpc where a configuration is loaded",
    "test_nsight_should_profile_step": "the driver compares steps in rlhpc (TraceControl)",
    "modify_profile_context": "the driver chooses the groups in rlhpc (runner.trace.profile.nsys)",
}
#: Reasons that are about the profilers of GPU vendors, which start a rank's process.
VENDOR_PROFILERS = ("start of ranks under rocprof-sys", PROFILING)


class Case(NamedTuple):
    """Outcome of a test.

    Attributes:
        file, name: The test.
        outcome: `passed`, `failed` or `skipped`.
        reason: Why it failed.
    """

    file: str
    name: str
    outcome: str
    reason: str


def run_file(folder: Path, name: str) -> list[Case]:
    """Runs a file of RLinf's tests in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=120",
            f"--junitxml={report}", str(folder / "tests" / "unit_tests" / f"{name}.py"),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=scratch, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"{name} of {folder} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [_case(name, element) for element in ElementTree.parse(report).getroot().iter("testcase")]


def _case(file: str, element: ElementTree.Element) -> Case:
    owner = element.get("classname", "").rpartition(".")[2]
    name = f"{owner}.{element.get('name')}" if owner != file else str(element.get("name"))
    if element.find("skipped") is not None:
        return Case(file, name, "skipped", "")
    problems = [child for child in element if child.tag in ("failure", "error")]
    if not problems:
        return Case(file, name, "passed", "")
    message = problems[0].get("message", "").splitlines()[0]
    known = (reason for part, reason in REASONS.items() if part in name)
    absent = message.removeprefix("NotImplementedError: ") if message.startswith("NotImplementedError: ") else None
    return Case(file, name, "failed", absent or next(known, message))


def render(cases: list[Case]) -> str:
    """Formats the results, in Markdown."""
    lines = [
        "# RLinf's unit tests on rlhpc",
        "",
        f"Written by `{VARIABLE}=FOLDER python -m tests.rlinf_shim.run --write`, for RLinf at commit `a3816b5`, on a machine",
        "without an accelerator. Tests that need one skip themselves.",
        "",
        "| file | pass | fail | skipped |",
        "|---|---|---|---|",
    ]
    for file in (*FILES, ""):
        counts = Counter(case.outcome for case in cases if file in ("", case.file))
        label = f"`{file}`" if file else "all"
        lines.append(f"| {label} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
    failed = [case for case in cases if case.outcome == "failed"]
    passed = sum(case.outcome == "passed" for case in cases)
    others = [case for case in failed if not case.reason.endswith(VENDOR_PROFILERS)]
    lines += [
        "",
        f"Of all tests that run without an accelerator, {_percent(passed, len(failed))} % pass; without those of GPU vendors' "
        f"profilers (nsys, rocprof-sys), {_percent(passed, len(others))} %.",
    ]
    by_shim = [(part, [case for case in cases if part in case.name and case.outcome == "passed"]) for part in IN_SHIM]
    lines += [
        "",
        f"{sum(len(found) for _, found in by_shim)} of those that pass test code of the shim alone:",
        "",
        *(f"- `{case.file}`: `{case.name}`: {IN_SHIM[part]}" for part, found in by_shim for case in found),
    ]
    for reason, _ in Counter(case.reason for case in failed).most_common():
        same = [case for case in failed if case.reason == reason]
        lines += ["", f"## Fail ({len(same)}): {reason}", "", *(f"- `{case.file}`: `{case.name}`" for case in same)]
    for file in FILES:
        names = [case.name for case in cases if case.file == file and case.outcome == "passed"]
        lines += ["", f"## Pass: `{file}` ({len(names)})", "", *(f"- `{name}`" for name in names)]
    return "\n".join(lines) + "\n"


def _percent(passed: int, failed: int) -> int:
    return passed * 100 // max(1, passed + failed)


def main() -> None:
    """Runs the tests, and prints or writes the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.rlinf_shim.run", description="RLinf's unit tests on rlhpc.")
    parser.add_argument("--write", action="store_true", help="replace results.md")
    options = parser.parse_args()
    if VARIABLE not in os.environ:
        parser.error(f"{VARIABLE} is not set: give the folder of a checkout of RLinf")
    text = render([case for name in FILES for case in run_file(Path(os.environ[VARIABLE]), name)])
    if options.write:
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
