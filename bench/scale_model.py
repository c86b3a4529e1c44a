"""Prediction of a run's control plane at 1024 to 16 384 ranks, from costs that real runs of the same messages have.

    python -m bench.scale_model --repeat 5                     # measures, checks the model, predicts, writes the result
    python -m bench.scale_model --repeat 3 --ranks 16 64       # smaller checks, on a busy machine
    python -m bench.scale_model --predict                      # predicts again from the runs in the result
    python -m bench.scale_model --page                         # writes the tables of docs/explanation/scale.md anew

Real runs of `bench.scale_loop` alternate: small ones (`FIT`), from whose processor time the costs of a message come, and
larger ones (`CHECKED`), with which the simulated loop (`bench.simulation`) is compared: requests, file operations and bytes
must be equal, and times are compared as medians of the ratios of measured to predicted seconds. All processes share two cores,
which the model has, too; the largest small runs say by which factor other programs and waiting slow a phase down
(`slowdowns_of`). The driver's costs are also compared with a real driver of 1024 and 4096 ranks that share
processes (`bench.peers.members`).

Predictions are of a cluster whose ranks have a core each. Every constant has its source beside it (`CONSTANTS`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import statistics
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench import scale_loop
from bench.machine import RESULTS, goal, spread, write
from bench.peers.counts import TIMED
from bench.scale_loop import ACTOR, ROLLOUT, Sizes
from bench.simulation import (
    PHASES,
    Cost,
    Costs,
    LoopModel,
    Machine,
    Network,
    Reliability,
    compute_best_interval_s,
    compute_tree_depth,
    simulate_failures,
    simulate_weight_tree,
)
from rlhpc import Cluster, PackedPlacementStrategy
from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.worker_spec import for_input, spec_of
from rlhpc.weights.device_sharing import CHUNK_BYTES
from rlhpc.weights.transport import _assign_slots

RESULT, PAGE = "scale_model", RESULTS.parents[1] / "docs" / "explanation" / "scale.md"
#: Ranks of the runs from which costs come, and of those with which the model is compared.
FIT, CHECKED = (4, 8, 12), (16, 64)
#: Ranks of the simulated groups of which a real driver is measured, and of the predictions.
SIMULATED, PREDICTED = (1024, 4096), (1024, 4096, 16384)
#: Allowed relative error of the time of all phases.
_TOLERANCE = 0.3


class Constant(NamedTuple):
    """Value of a constant of the predictions, its unit and its source."""

    value: float
    unit: str
    source: str


_LLAMA = "Llama 3 report (arXiv 2407.21783)"
CONSTANTS: dict[str, Constant] = {
    "failures, Llama 3": Constant(
        419 / 54 / (16384 / 8) * 1000, "per 1000 node-days",
        f"419 unexpected interruptions in 54 days on 16 384 GPUs, 8 a node: {_LLAMA}, section 3.3.4",
    ),
    "failures, RSC-1": Constant(
        6.5, "per 1000 node-days", "Kokolis et al., Revisiting Reliability in Large-Scale ML Clusters (arXiv 2410.21680)"
    ),
    "ranks on a node": Constant(8, "", "a node of eight H100"),
    "model": Constant(70e9, "parameters", "assumed; a bfloat16 weight has 2 bytes"),
    "peak": Constant(989e12, "FLOP/s", "NVIDIA H100 SXM data sheet, bfloat16, dense"),
    "memory": Constant(3.35e12, "B/s", "NVIDIA H100 SXM data sheet"),
    "model FLOPs utilization": Constant(0.41, "", f"38 to 43 %: {_LLAMA}, table 4"),
    "memory utilization": Constant(0.6, "", "assumed"),
    "trained tokens": Constant(32768, "for each trainer rank and step", "assumed; constant, so the work grows with the ranks"),
    "response": Constant(8192, "tokens of the longest answer", "assumed"),
    "ranks of an engine": Constant(8, "", "assumed"),
    "checkpoint": Constant(14, "B for each parameter", "bfloat16 weights, float32 weights and two float32 moments"),
    "filesystem": Constant(100e9, "B/s", f"assumed; {_LLAMA} has 2 TB/s, section 3.3.1"),
    "metadata latency": Constant(1e-3, "s", "assumed, of one operation on a shared filesystem"),
    "metadata rate": Constant(20e3, "operations/s", "assumed, of one metadata server"),
    "network latency": Constant(30e-6, "s", "assumed, of a message over TCP in a data centre"),
    "oversubscription": Constant(4, "", "assumed, of the links from leaf to spine; 32 nodes a leaf"),
    "TCP stream": Constant(0, "B/s", "measured: `hosts.json`, TCP"),
    "restart": Constant(
        120, "s", "assumed: end of the failed ranks, requeue and start of the job; the launch itself is predicted"
    ),
    "loading": Constant(60, "s", "assumed: imports, engines and compiled kernels after a restart"),
}  # fmt: skip
STEPS_OF_A_CHECKPOINT = 10
LINKS = (25, 100, 400)


def read_constant(name: str) -> float:
    """Returns the value of a constant."""
    if name == "TCP stream":
        hosts = json.loads((RESULTS / "hosts.json").read_text())["figures"]
        return float((256 << 20) / hosts["TCP, 256 MiB dict (ms)"]["median"] * 1e3)
    return CONSTANTS[name].value


# -- measurement ---------------------------------------------------------------------------------------------------------


def run_child(*arguments: str) -> Any:
    """Runs a measurement in a separate process; returns its last line, as JSON."""
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def measure(all_ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Runs the loop with each number of ranks, in a fork of this process, which has imported everything; yields the runs."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                for phases in scale_loop.measure([Sizes(ranks) for ranks in all_ranks]):
                    print(json.dumps(phases), file=file, flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        for ranks, line in zip(all_ranks, file, strict=False):
            yield {"ranks": ranks, "phases": json.loads(line)}
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"bench.scale_model: a run of {all_ranks} ranks failed (see above)")


def summarize_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes a run: seconds, and processor seconds of each part of the run, by phase, as medians over its steps.

    The first of several steps makes connections, and does not count.
    """
    sizes, phases = Sizes(run["ranks"]), {}
    for phase in PHASES:
        steps = run["phases"][phase]
        steps = steps[1:] if len(steps) > 1 else steps
        cpu_s = [_part_cpu_s(phase, step, sizes) for step in steps]
        phases[phase] = {
            "seconds": statistics.median(step["seconds"] for step in steps),
            "cpu_s": {part: statistics.median(parts[part] for parts in cpu_s) for part in cpu_s[0]},
        }
    return {"ranks": run["ranks"], "differences": len(list_count_differences(run)), "phases": phases}


def _part_cpu_s(phase: str, measurement: Mapping[str, Any], sizes: Sizes) -> dict[str, float]:
    """Returns the processor seconds of each part of the run in a phase; means over the ranks of a part."""
    actors, rollouts = measurement["rank_cpu_s"][: sizes.actors], measurement["rank_cpu_s"][sizes.actors :]
    parts = {"driver": measurement["driver_cpu_s"], "fork server": measurement["fork_cpu_s"]}
    if phase == "weights":
        return parts | {
            "sender": actors[0],
            "actor": statistics.fmean(actors[1:]),
            "rollout": statistics.fmean(rollouts),
        }
    return parts | {"actor": statistics.fmean(actors), "rollout": statistics.fmean(rollouts)}


#: Parts whose messages grow with the ranks: their costs have a fixed part.
_PARTS_WITH_FIXED_COST = ("driver", "sender", "fork server")


def fit(runs: Sequence[Mapping[str, Any]]) -> Costs:
    """Returns the costs that explain the processor time of the small runs, given as summaries."""
    samples: dict[tuple[str, str], dict[int, list[float]]] = {}
    num_messages: dict[tuple[str, str], dict[int, int]] = {}
    no_costs = Costs({phase: {} for phase in PHASES})
    for run in runs:
        model = LoopModel(Sizes(run["ranks"]), no_costs, Machine())
        for phase in PHASES:
            handled = model.run(phase).num_messages
            for part, cpu_s in run["phases"][phase]["cpu_s"].items():
                samples.setdefault((phase, part), {}).setdefault(run["ranks"], []).append(cpu_s)
                num_messages.setdefault((phase, part), {})[run["ranks"]] = handled.get(part, 0)
    parts: dict[str, dict[str, Cost]] = {phase: {} for phase in PHASES}
    for (phase, part), by_ranks in samples.items():
        points = [(num_messages[phase, part][ranks], statistics.median(values)) for ranks, values in by_ranks.items()]
        parts[phase][part] = _fit_line(points) if part in _PARTS_WITH_FIXED_COST else _fit_proportional(points)
    message_s = parts["rollout"]["rollout"].message_s
    for part in ("actor", "rollout"):  # an actor is a home of channels, and does most of the work in the call
        cpu_s = statistics.median(value for values in samples["connect", part].values() for value in values)
        num_handled = max(num_messages["connect", part].values())
        parts["connect"][part] = Cost(max(0.0, cpu_s - num_handled * message_s), message_s)
    return Costs(parts)


def _fit_line(points: Sequence[tuple[int, float]]) -> Cost:
    """Returns the line through the points that has no negative part."""
    counts, seconds = zip(*points, strict=True)
    if len({*counts}) < 2:
        return Cost(statistics.fmean(seconds))
    slope, intercept = statistics.linear_regression(counts, seconds)
    if slope <= 0:
        return Cost(statistics.fmean(seconds))
    if intercept < 0:
        return Cost(0.0, sum(seconds) / sum(counts))
    return Cost(intercept, slope)


def _fit_proportional(points: Sequence[tuple[int, float]]) -> Cost:
    counts, seconds = zip(*points, strict=True)
    return Cost(0.0, sum(seconds) / sum(counts)) if any(counts) else Cost(0.0)


def compute_expected_bytes(sizes: Sizes) -> dict[str, int]:
    """Returns the bytes of data that each phase moves: fetched chunks of weights, and files of the checkpoint."""
    num_hosts = len({sizes.host_of("rollout", rank) for rank in range(sizes.rollouts)})
    chunk_bytes = 0
    for chunk in range(sizes.chunks):
        table = pickle.dumps([(f"layer{chunk}", (sizes.chunk_bytes // 4,), "float32", (sizes.chunk_bytes,), "")])
        chunk_bytes += sizes.chunk_bytes + -sizes.chunk_bytes % 64 + len(table)
    return {"weights": num_hosts * chunk_bytes, "checkpoint": sizes.actors * sizes.file_bytes}


def list_count_differences(run: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each number of requests, fetches, file operations or bytes that the model has wrong."""
    sizes = Sizes(run["ranks"])
    model = LoopModel(sizes, Costs({phase: {} for phase in PHASES}), Machine())
    differences = []
    num_bytes = compute_expected_bytes(sizes)
    for phase in PHASES:
        for measurement in run["phases"][phase]:
            predicted_counts = model.run(phase).counts
            real = {kind: number for kind, number in measurement["numbers"].items() if kind not in TIMED}
            differences += [
                f"{run['ranks']} ranks, {phase}: {kind} {real.get(kind, 0)}, predicted {predicted_counts.get(kind, 0)}"
                for kind in sorted((real.keys() | predicted_counts.keys()) - set(TIMED))
                if real.get(kind, 0) != predicted_counts.get(kind, 0)
            ]
            moved_kind = {"weights": "fetch", "checkpoint": "checkpoint"}.get(phase)
            if moved_kind is not None and measurement["num_bytes"].get(moved_kind) != num_bytes[phase]:
                moved_bytes = measurement["num_bytes"].get(moved_kind)
                differences.append(f"{run['ranks']} ranks, {phase}: {moved_bytes} bytes, predicted {num_bytes[phase]}")
    return differences


def compute_slowdowns(runs: Iterable[Mapping[str, Any]], costs: Costs) -> dict[str, float]:
    """Returns by phase the factor by which the largest of the small runs are slower than the model on two free cores.

    Other programs, waking processes and waiting for a disk make this difference. Medians over the runs.
    """
    largest_runs = [run for run in runs if run["ranks"] == max(FIT)]
    model = LoopModel(Sizes(max(FIT)), costs, Machine())
    return {
        phase: statistics.median(run["phases"][phase]["seconds"] for run in largest_runs) / model.run(phase).seconds
        for phase in PHASES
    }


def compute_time_ratios(run: Mapping[str, Any], costs: Costs, slowdowns: Mapping[str, float]) -> dict[str, float]:
    """Returns measured / predicted seconds of each phase, and of all phases together."""
    measured_s, predicted_s = {}, {}
    for phase in PHASES:
        model = LoopModel(Sizes(run["ranks"]), costs, Machine(slowdown=slowdowns[phase]))
        measured_s[phase], predicted_s[phase] = run["phases"][phase]["seconds"], model.run(phase).seconds
    return {phase: measured_s[phase] / predicted_s[phase] for phase in PHASES} | {
        "all": sum(measured_s.values()) / sum(predicted_s.values())
    }


# -- predictions ---------------------------------------------------------------------------------------------------------


def make_cluster() -> Machine:
    """Returns the predicted cluster: each rank has a separate core, and files are on a shared filesystem."""
    return Machine(
        cores=1, is_shared=False, latency_s=read_constant("network latency"),
        metadata_latency_s=read_constant("metadata latency"),
        metadata_rate=read_constant("metadata rate"),
    )  # fmt: skip


def sizes_of(num_ranks: int) -> Sizes:
    """Returns the predicted loop: half of the ranks train, and each of the others is an engine's rank with one prompt."""
    return Sizes(num_ranks, ranks_per_host=int(read_constant("ranks on a node")), prompts_per_rank=1, chunks=1)


def compute_s() -> dict[str, float]:
    """Returns the seconds of a step in which the accelerators work: sampling and training."""
    per_token = (
        2
        * read_constant("model")
        / read_constant("ranks of an engine")
        / read_constant("memory")
        / read_constant("memory utilization")
    )
    training = (
        6
        * read_constant("model")
        * read_constant("trained tokens")
        / read_constant("peak")
        / read_constant("model FLOPs utilization")
    )
    return {"sampling": per_token * read_constant("response"), "training": training}


class WeightSync(NamedTuple):
    """Predicted weight sync: seconds of the tree, bytes of the busiest uplink / the model's, and levels of the tree."""

    seconds: float
    uplink: float
    depth: int


def count_chunks() -> int:
    """Returns the number of chunks of the predicted model."""
    return math.ceil(2 * read_constant("model") / CHUNK_BYTES)


def predict_weight_sync(
    num_ranks: int, link_gbps: float, stream_gbps: float, oversubscription: float = 1.0
) -> WeightSync:
    """Predicts the tree of hosts for a version of the weights."""
    sizes, network = sizes_of(num_ranks), Network(link_gbps, stream_gbps, 32, oversubscription)
    hosts = math.ceil(sizes.rollouts / sizes.ranks_per_host)
    few = 4 * compute_tree_depth(hosts) + 8  # each further chunk takes as long as the last of these
    (half_s, _), (few_s, sent_bytes) = (
        simulate_weight_tree(hosts, count, CHUNK_BYTES, network) for count in (few // 2, few)
    )
    seconds = few_s + (few_s - half_s) / (few - few // 2) * (count_chunks() - few)
    return WeightSync(seconds, max(sent_bytes) / few / CHUNK_BYTES, compute_tree_depth(hosts))


def predict_networks(num_ranks: int) -> dict[str, WeightSync]:
    """Predicts the tree for each network by its label."""
    stream = read_constant("TCP stream") * 8 / 1e9
    oversubscription = read_constant("oversubscription")
    return {
        f"one TCP stream of {stream / 8:.1f} GB/s to a host, {LINKS[0]} to {LINKS[-1]} Gb/s": predict_weight_sync(
            num_ranks, LINKS[0], stream
        ),
        **{f"streams as fast as the link, {link} Gb/s": predict_weight_sync(num_ranks, link, link) for link in LINKS},
        f"the same, {LINKS[-1]} Gb/s, 1:{oversubscription:.0f} to the spine": predict_weight_sync(
            num_ranks, LINKS[-1], LINKS[-1], oversubscription
        ),
    }


def predict(num_ranks: int, costs: Costs) -> dict[str, Any]:
    """Returns the predictions for a number of ranks."""
    sizes, work = sizes_of(num_ranks), compute_s()
    model = LoopModel(sizes, costs, make_cluster())
    results = {phase: model.run(phase) for phase in PHASES}
    step_phases = ("rollout", "calls")
    driver_s = sum(results[phase].busy_s["driver"] for phase in step_phases) + results["weights"].busy_s["driver"]
    control_s = sum(results[phase].seconds for phase in step_phases)
    syncs = predict_networks(num_ranks)
    announcements_s = costs.find_cost("weights", "sender").message_s * 2 * sizes.rollouts * count_chunks()
    sync_s = max(next(iter(syncs.values())).seconds, announcements_s)
    step_s = sum(work.values()) + control_s + sync_s
    nodes = num_ranks / read_constant("ranks on a node")
    checkpoint_bytes = read_constant("checkpoint") * read_constant("model")
    write_s = checkpoint_bytes / read_constant("filesystem")
    operations = {
        phase: sum(n for kind, n in results[phase].counts.items() if kind.startswith("file ")) / num_ranks
        for phase in PHASES
    }
    stall_s = checkpoint_bytes / sizes.actors / 25e9
    start_s = results["launch"].seconds + results["connect"].seconds
    recovery_s = (
        read_constant("restart") + read_constant("loading") + start_s + checkpoint_bytes / read_constant("filesystem")
    )
    reliabilities = {}
    for name in ("Llama 3", "RSC-1"):
        per_day = read_constant(f"failures, {name}") * nodes / 1000
        reliability = Reliability(
            step_s, STEPS_OF_A_CHECKPOINT, stall_s, write_s + results["checkpoint"].seconds, recovery_s, per_day
        )
        outcomes = [simulate_failures(reliability, 54, seed) for seed in range(20)]
        reliabilities[name] = {
            "failures a day": per_day, "goodput": statistics.fmean(outcome.goodput for outcome in outcomes),
            "lost steps of a failure": sum(o.lost_steps * o.failures for o in outcomes) / sum(o.failures for o in outcomes),
            "lost seconds of a failure": sum(o.lost_s * o.failures for o in outcomes) / sum(o.failures for o in outcomes),
            "best interval (s)": compute_best_interval_s(max(stall_s, 1e-3), per_day),
        }  # fmt: skip
    return {
        "phases (s)": {phase: result.seconds for phase, result in results.items()},
        "requests of a step": sum(
            n for phase in ("rollout", "weights", "calls") for kind, n in results[phase].counts.items()
            if kind.startswith("request")
        ),
        "file operations a rank": operations,
        "driver, processor of a step (s)": driver_s,
        "step (s)": step_s, "weight sync (s)": sync_s, "compute (s)": sum(work.values()), "control plane (s)": control_s,
        "control plane, share of a step": control_s / step_s, "driver, share of a step": driver_s / step_s,
        "weight sync": {label: sync._asdict() for label, sync in syncs.items()}, "announcements (s)": announcements_s,
        "counted": count_bytes(num_ranks),
        "start (s)": start_s, "recovery (s)": recovery_s, "checkpoint, written after (s)": write_s,
        "checkpoint, manifest (s)": results["checkpoint"].seconds, "failures": reliabilities,
    }  # fmt: skip


class Records:
    """Records of ranks as `rlhpc.weights.transport` reads them: receivers on nodes, and the sender on another one."""

    host = "sender"

    def __init__(self, ranks_per_host: int) -> None:
        self._ranks_per_host = ranks_per_host

    def rank_record(self, group: str, rank: int) -> dict[str, Any]:
        """Returns the record of a rank."""
        host = rank // self._ranks_per_host
        return {"host": f"host{host}", "data": {"bulk": f"tcp://{group}@10.0.{host // 256}.{host % 256}:40000"}}


def count_bytes(num_ranks: int) -> dict[str, float]:
    """Returns bytes of messages and files with an entry for each rank, built by the code of rlhpc."""
    sizes = sizes_of(num_ranks)
    cluster_of_ranks = Cluster.local(num_ranks // sizes.ranks_per_host, sizes.ranks_per_host)
    endpoint = {"host": "n" * 40, "ipc": "ipc:///tmp/rlhpc-0123456789/d-12345.4026531836-0", "tcp": "tcp://10.0.0.1:40000",
                "bulk": "0123456789@10.0.0.1:40001"}  # fmt: skip
    specs = [
        spec_of(
            ROLLOUT, placement, num_ranks, cluster_of_ranks, {}, sizes.ranks_per_host, Path("/scratch/user/runs/name/logs"),
            registry="/scratch/user/runs/name/registry/1-0", token="0123456789", body=bytes(2000), incarnation="18c0ffee",
            driver=endpoint, tcp_address="10.0.0.1",
        )
        for placement in PackedPlacementStrategy(0, num_ranks - 1).place(cluster_of_ranks)
    ]  # fmt: skip
    receivers = [(ROLLOUT, rank) for rank in range(sizes.rollouts)]
    slots, _ = _assign_slots(cast(Context, Records(sizes.ranks_per_host)), receivers)
    manifest = {f"{ACTOR}-{rank}.pt": {"size": 10**9, "sha256": "0" * 64} for rank in range(sizes.actors)}
    return {
        "specifications": len(for_input(specs)), "places in the tree": len(pickle.dumps(slots)),
        "record of a channel": len(json.dumps({"homes": [endpoint] * sizes.actors})),
        "manifest": len(json.dumps(manifest, indent=1)), "log files": 2 * num_ranks,
    }  # fmt: skip


# -- tables of the page --------------------------------------------------------------------------------------------------


def _render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def _operations(prediction: Mapping[str, Any], *phases: str) -> float:
    return sum(float(prediction["file operations a rank"][phase]) for phase in phases)


def _format_number(value: float) -> str:
    """Formats a number with two or three significant digits."""
    if value == 0:
        return "0"
    num_digits = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(num_digits, 4)}f}".replace(",", " ")


def render_tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the page by name, from the result's content."""
    predictions: Mapping[str, Any] = content["predictions"]
    head = [f"{int(ranks):,}".replace(",", " ") for ranks in predictions]

    def rows(*lines: tuple[str, Any]) -> list[list[str]]:
        return [[label, *(_format_number(value(p)) for p in predictions.values())] for label, value in lines]

    check_rows = [
        [ranks, str(check["runs"]), str(check["differences"]),
         *(f"{check['ratios'][phase]['median']:.2f}" for phase in (*PHASES, "all"))]
        for ranks, check in content["checks"].items()
    ]  # fmt: skip
    simulated_rows = [
        [f"{int(ranks):,}".replace(",", " "),
         *(f"{row[f'{name}, CPU of the driver (s)']:.2f} s / {predicted_s:.2f} s"
           for name, predicted_s in row["predicted"].items()),
         f"{row['rendezvous, CPU of the driver (s)']:.1f} s", f"{row['idle, CPU of the driver (% of a core)']:.1f} %",
         f"{row['memory of the driver (MB)']:.0f} MB", f"{row['descriptors']:.0f}"]
        for ranks, row in content["simulated"].items()
    ]  # fmt: skip
    labels = list(next(iter(predictions.values()))["weight sync"])
    return {
        "checks": _render_table(["processes", "runs", "counts that differ", *PHASES, "all phases"], check_rows),
        "simulated": _render_table(
            ["simulated ranks", "connect, measured / predicted", "rollout", "calls", "rendezvous", "idle", "memory",
             "descriptors"],
            simulated_rows,
        ),
        "constants": _render_table(
            ["constant", "value", "source"],
            [[name, f"{read_constant(name):.4g} {c.unit}".strip(), c.source] for name, c in CONSTANTS.items()],
        ),
        "step": _render_table(
            ["predicted, ranks", *head],
            rows(
                ("a step (s)", lambda p: p["step (s)"]),
                ("of it sampling and training (s)", lambda p: p["compute (s)"]),
                ("of it weight sync (s)", lambda p: p["weight sync (s)"]),
                ("of it control plane (s)", lambda p: p["control plane (s)"]),
                ("control plane, % of a step", lambda p: 100 * p["control plane, share of a step"]),
                ("requests of a step", lambda p: p["requests of a step"]),
                ("driver, processor time of a step (s)", lambda p: p["driver, processor of a step (s)"]),
                ("driver, % of a core", lambda p: 100 * p["driver, share of a step"]),
                ("file operations a rank, start", lambda p: _operations(p, "launch", "connect")),
                ("file operations a rank, step", lambda p: _operations(p, "rollout", "calls")),
                ("file operations an actor, checkpoint", lambda p: 2 * _operations(p, "checkpoint")),
                ("launch and connect (s)", lambda p: p["start (s)"]),
                ("manifest of a checkpoint (s)", lambda p: p["checkpoint, manifest (s)"]),
            ),
        ),
        "weights": _render_table(
            ["predicted, ranks", *head],
            [
                [f"tree, {label} (s)", *(_format_number(p["weight sync"][label]["seconds"]) for p in predictions.values())]
                for label in labels
            ]
            + rows(
                ("announcements at the sender (s)", lambda p: p["announcements (s)"]),
                ("levels of the tree", lambda p: p["weight sync"][labels[0]]["depth"]),
                ("bytes of the busiest uplink / of the model", lambda p: p["weight sync"][labels[0]]["uplink"]),
            ),
        ),
        "counted": _render_table(
            ["counted, ranks", *head],
            rows(
                ("specifications that each rank of a job step reads (MB)", lambda p: p["counted"]["specifications"] / 1e6),
                ("record of the channel to the actors, which each rollout rank reads (MB)",
                 lambda p: p["counted"]["record of a channel"] / 1e6),
                ("places in the weight tree, sent to each node with the first version (MB)",
                 lambda p: p["counted"]["places in the tree"] / 1e6),
                ("manifest of a checkpoint with a file for each actor (MB)", lambda p: p["counted"]["manifest"] / 1e6),
                ("log files", lambda p: p["counted"]["log files"]),
            ),
        ),
        "failures": _render_table(
            ["simulated, ranks", *head],
            [
                row
                for name in ("Llama 3", "RSC-1")
                for row in rows(
                    (f"failures a day, rate of {name}", lambda p, name=name: p["failures"][name]["failures a day"]),
                    ("lost steps of a failure", lambda p, name=name: p["failures"][name]["lost steps of a failure"]),
                    ("lost work of a failure (s)", lambda p, name=name: p["failures"][name]["lost seconds of a failure"]),
                    ("time that counts, %", lambda p, name=name: 100 * p["failures"][name]["goodput"]),
                )
            ]
            + rows(("recovery (s)", lambda p: p["recovery (s)"])),
        ),
    }  # fmt: skip


_BLOCK = r"(<!-- table: {} -->\n).*?(<!-- end -->)"


def insert_tables(page: str, content: Mapping[str, Any]) -> str:
    """Returns the page with the tables of the result."""
    for name, table in render_tables(content).items():
        page = re.sub(_BLOCK.format(name), rf"\g<1>{table}\n\g<2>", page, flags=re.S)
    return page


# -- command -------------------------------------------------------------------------------------------------------------


def measure_all(repeat: int, checked_ranks: Sequence[int], once: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    """Runs all sizes in turn; yields the summaries of each repetition."""
    for repetition in range(repeat):
        runs = []
        for run in measure((*FIT, *checked_ranks, *(once if repetition == repeat // 2 else ()))):
            differences = list_count_differences(run)
            runs.append(summarize_run(run))
            print(f"{run['ranks']} ranks, {len(differences)} differences", *differences[:5], sep="\n  ", flush=True)
        yield runs


def evaluate(content: dict[str, Any]) -> None:
    """Adds costs, checks and predictions to the content of a result, from its runs."""
    runs = content["runs"]
    costs = fit([run for run in runs if run["ranks"] in FIT])
    slowdowns = compute_slowdowns(runs, costs)
    content["costs"] = {
        phase: {part: vars(cost) for part, cost in by_part.items()} for phase, by_part in costs.parts.items()
    }
    content["slowdowns"], content["checks"] = slowdowns, {}
    for ranks in sorted({run["ranks"] for run in runs} - {*FIT}):
        runs_of_size = [run for run in runs if run["ranks"] == ranks]
        ratios = [compute_time_ratios(run, costs, slowdowns) for run in runs_of_size]
        content["checks"][str(ranks)] = {
            "runs": len(runs_of_size), "differences": sum(run["differences"] for run in runs_of_size),
            "ratios": {name: spread([ratio[name] for ratio in ratios]) for name in ratios[0]},
        }  # fmt: skip
    for ranks, row in content["simulated"].items():
        model = LoopModel(sizes_of(int(ranks)), costs, Machine())
        row["predicted"] = {phase: model.run(phase).busy_s["driver"] for phase in ("connect", "rollout", "calls")}
    content["predictions"] = {str(ranks): predict(ranks, costs) for ranks in PREDICTED}
    content["goals"] = [
        goal("requests, file operations or bytes that differ",
             sum(check["differences"] for check in content["checks"].values()), at_most=0),
        *(
            goal(f"{ranks} processes, all phases: |measured / predicted - 1|",
                 abs(check["ratios"]["all"]["median"] - 1), at_most=_TOLERANCE)
            for ranks, check in content["checks"].items()
        ),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, predicts and writes `results/scale_model.json`, or only predicts or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(CHECKED), help="sizes of the checks")
    parser.add_argument("--once", type=int, nargs="*", default=[128], help="sizes that are checked once")
    parser.add_argument("--simulated", type=int, nargs="*", help="ranks that share processes")
    parser.add_argument("--more", action="store_true", help="adds to the runs in the result")
    parser.add_argument("--predict", action="store_true", help="predicts again from the runs in the result")
    parser.add_argument("--page", action="store_true", help="writes the tables of the page anew")
    args = parser.parse_args(argv)
    path: Path = RESULTS / f"{RESULT}.json"
    content: dict[str, Any] = {"runs": [], "simulated": {}}
    if args.page or args.predict or args.more:
        content = json.loads(path.read_text())
    if args.page:
        PAGE.write_text(insert_tables(PAGE.read_text(), content))
        return
    command, header = f"python -m bench.scale_model --repeat {args.repeat}", content.pop("machine", None)
    earlier_command = content.pop("command", "")
    if args.predict:
        evaluate(content)
        path.write_text(json.dumps({"command": earlier_command, "machine": header, **content}, indent=2) + "\n")
        return
    num_simulated = SIMULATED if args.simulated is None else args.simulated
    options = {"ranks": args.ranks, "once": args.once, "simulated": num_simulated}
    command += "".join(f" --{name} {' '.join(map(str, values))}".rstrip() for name, values in options.items())
    command = f"{earlier_command}; {command} --more" if args.more else command
    for runs in measure_all(args.repeat, args.ranks, args.once):
        content["runs"] += runs
        write(RESULT, command, content)
    for ranks in num_simulated:
        content["simulated"][str(ranks)] = run_child("bench.scale", "--only", "loop", str(ranks))
        print(ranks, json.dumps(content["simulated"][str(ranks)]), flush=True)
        write(RESULT, command, content)
    evaluate(content)
    print(write(RESULT, command, content))
    for line in content["goals"]:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['goal']:60} {line['measured']:.3f} ({line['wanted']})")


if __name__ == "__main__":
    main()
