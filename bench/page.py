"""Page of all results in `bench/results`: goals, figures and plots.

python -m bench.page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from bench.machine import RESULTS
from rlhpc.metrics.charts import Line, line_chart, log_bar_chart, number
from rlhpc.metrics.page import facts, page, render_figures, section, table

TITLES = {
    "runtime": "The runtime beside Ray and the machine's limits",
    "weights": "Weights to other processes of the host",
    "hosts": "Between hosts",
    "tree": "Weights to many hosts",
    "reshard": "Weights from shards to shards",
    "scale": "Rendezvous and dispatch as workers grow, and on a slow filesystem",
    "scale_model": "The control plane at 1024 to 16 384 ranks, predicted",
    "embodied_loop": "The embodied loop, around an environment that costs nothing",
    "environments": "Environment steps a second",
    "simulators": "Simulators beside their own vector environments",
    "checkpoint": "Checkpoints",
    "cartpole": "CartPole-v1 to its target",
    "slurm": "A Slurm job",
    "rollout": "Generation",
    "training": "Training",
    "rows": "Rows without padding",
    "rows_loss": "The loss of a large vocabulary",
    "prefixes": "Shared prefixes computed once",
    "proof": "What proving the weights costs",
    "saves": "Training beside saves",
    "trace": "What recording a trace costs",
    "serve_pages": "How soon a page of rlhpc serve opens",
    "tune": "Whether rlhpc tune chooses well",
    "taken": "Work that is taken beside work that is dealt",
    "tail": "What long answers leave idle",
    "tail_episodes": "What long episodes leave idle",
    "helpers": "Ranks that join a run",
    "joined_envs": "Env ranks that join a run of SAC",
    "pipeline": "Training while the rest of a rollout is played, env ranks answered as they ask",
    "overlap": "How phases of a language model's step overlap",
    "trl_grpo": "GRPO beside TRL",
    "demo_llm": "The language model demonstration",
    "demo_agent": "The agent demonstration",
    "gateway": "The gateway of agents",
    "token_cost": "The host's work for a generated token",
    "token_cost_stale": "The host's work for a token, with an update during each response",
    "self_play": "Games whose best play is known",
    "distillation": "Distillation beside GRPO",
    "staleness": "Corrections at several bounds of staleness",
    "families": "Families of models that vLLM computes as the trainer does",
    "demo_families": "GRPO on tiny models of hybrid families and of mixtures of experts",
    "robot": "From demonstrations to RL",
    "robot_link": "A robot outside the cluster",
    "intervention": "Somebody who takes over",
    "demo_hil": "The demonstration with a person who helps",
    "pixels": "SAC from images beside a plain loop",
    "gpu": "On an accelerator",
}
_COLORS = {"limit": 7, "rlhpc": 0, "Ray": 1}  # of the palette


def iter_leaves(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
    """Yields every min/median/max in a result with its path of names."""
    if isinstance(content, Mapping):
        if {"min", "median", "max"} <= set(content):
            yield path, dict(content)
            return
        for name, nested_content in content.items():
            yield from iter_leaves(nested_content, (*path, str(name)))


def draw_runtime_plots(result: Mapping[str, Any]) -> list[str]:
    """Draws rlhpc and Ray and, where available, the limit of each figure."""
    render_figures = result["figures"]
    limits = {
        "cold start to 8 ready workers (s)": "interpreter and import torch (s)",
        "dispatch to 1 worker (us)": "ZeroMQ TCP round trip, 1 KB (us)",
        "channel, 1 KB, one way (us)": "UNIX socket round trip, 1 KB (us)",
        "channel, 64 MiB, one way (ms)": "memory copy, 64 MiB (ms)",
        "send and recv, 64 MiB, one way (ms)": "memory copy, 64 MiB (ms)",
        "channel, 256 MiB dict of tensors, one way (ms)": "memory copy, 256 MiB (ms)",
    }
    charts = []
    for unit, title in (
        ("(s)", "Launch"), ("(us)", "Latency"), ("(ms)", "Large items"), ("(items/s)", "Throughput (more is better)"),
        ("(PSS, MB)", "Idle memory"),
    ):  # fmt: skip
        rows: dict[str, dict[str, tuple[float, float, float]]] = {}
        for name in render_figures["rlhpc"]:
            if not name.endswith(unit):
                continue
            figures_by_side = {"limit": render_figures["limit"].get(limits.get(name, ""))} | {
                side: render_figures[side].get(name) for side in ("rlhpc", "Ray") if side in render_figures
            }
            rows[name.removesuffix(unit).strip(" ,")] = {
                side: (max(f["min"], 1e-3), max(f["median"], 1e-3), max(f["max"], 1e-3))
                for side, f in figures_by_side.items()
                if f
            }
        charts.append(log_bar_chart(title, unit.strip("()").replace("us", "µs"), rows, _COLORS))
    return charts


def draw_scale_plots(result: Mapping[str, Any]) -> list[str]:
    """Draws figures against the number of workers."""
    charts = []
    for part_name, names, label in (
        ("real", ("launch (s)",), "workers (processes)"),
        ("real", ("dispatch to all (us)",), "workers (processes)"),
        ("simulated", ("rendezvous (s)", "rendezvous, CPU of the driver (s)"), "members"),
        ("simulated", ("dispatch (s)", "dispatch, CPU of the driver (s)"), "members"),
        ("slow", ("cold start to 8 ready workers (s)", "channel, first items (s)"), "ms an operation of the registry"),
    ):
        counts = result["figures"][part_name]
        x = [float(count) for count in counts]
        lines = [
            Line(
                name, x, [counts[c][name]["median"] for c in counts], [counts[c][name]["min"] for c in counts],
                [counts[c][name]["max"] for c in counts], color=i, markers=True,
            )
            for i, name in enumerate(names)
        ]  # fmt: skip
        unit = names[0].rsplit("(", 1)[1].strip(")").replace("us", "µs")
        charts.append(line_chart(names[0].rsplit(" (", 1)[0], label, unit, lines))
    return charts


PLOTS = {"runtime": draw_runtime_plots, "scale": draw_scale_plots}


def _bound_text(text: str) -> str:
    """Formats a goal's bound: `>= 1e+04` as `≥ 10k`."""
    sign, _, bound = text.partition(" ")
    return f"{ {'<=': '≤', '>=': '≥'}.get(sign, sign) } {number(float(bound))}"


def render_chapter(name: str, result: Mapping[str, Any]) -> str:
    """Formats a result's part of the page."""
    machine = result["machine"]
    sections = [facts({
        "command": result["command"], "date": machine["date"],
        "machine": f"{machine['cores']} cores of {machine['cpu']}, load {machine['load']:.1f} when it ended",
    })]  # fmt: skip
    if result.get("goals"):
        rows = [
            ["met" if g["met"] else "missed", g["goal"], number(g["measured"]), _bound_text(g["wanted"])]
            for g in result["goals"]
        ]
        sections.append(table(["", "goal", "measured", "wanted"], rows, text_columns=(0, 1)))
    if name in PLOTS:
        sections.append(render_figures(PLOTS[name](result)))
    rows = [
        [" · ".join(path), *(number(f[key]) for key in ("min", "median", "max"))] for path, f in iter_leaves(result)
    ]
    if rows:
        figure_table = table(["figure", "min", "median", "max"], rows, text_columns=(0,))
        sections.append(f"<details><summary>All figures</summary>{figure_table}</details>")
    image_paths = sorted(RESULTS.glob(f"{name}*.svg")) + sorted(RESULTS.glob(f"{name}*.png"))
    sections += [
        f'<figure><img src="{escape(path.name)}" alt="{escape(path.stem)}" width="100%"></figure>'
        for path in image_paths
    ]
    return section(TITLES.get(name, name.replace("_", " ").capitalize()), "".join(sections))


def main() -> None:
    """Writes `results/index.html`."""
    results_by_name = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    order = [
        *(name for name in TITLES if name in results_by_name),
        *(name for name in results_by_name if name not in TITLES),
    ]
    chapters = [render_chapter(name, results_by_name[name]) for name in order]
    path = RESULTS / "index.html"
    path.write_text(page("Benchmarks", "Medians of interleaved repetitions, by the scripts in bench/", chapters))
    print(path)


if __name__ == "__main__":
    main()
