"""Memory tables of docs/explanation/memory.md: models from 7 B to 235 B parameters on one, four and sixteen nodes.

    python -m rlhpc.language.planning.memory_tables configs/reasoning/large.yaml

The command prints the tables for the settings of a configuration. The tables' models and nodes replace the configured model
and nodes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence

from rlhpc.config.parallel import MeshSizes
from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig, responses_per_step
from rlhpc.language.planning.memory_accounts import (
    divisions,
    format_count,
    format_sizes,
    largest_tokens,
    peak_bytes,
    training_of,
)
from rlhpc.language.planning.memory_model import Serving, Training
from rlhpc.language.planning.model_size import size_of
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GIB, SPARE, GroupRanks
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.exit_codes import report_errors

MODELS = (
    "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
)  # fmt: skip
NODES, PER_NODE, ROOM = (1, 4, 16), 8, 80.0 * GIB
_USABLE = (1.0 - SPARE) * ROOM
#: Engine sizes to try.
_ENGINES = (1, 2, 4, 8)


def tables(config: str) -> str:
    """Returns the Markdown of all tables.

    Args:
        config: Configuration of task type `reasoning`.
    """
    cfg = typed(GrpoConfig, load_config(config, training=False))
    return "\n\n".join((_render_training_table(cfg), _render_serving_table(cfg)))


def _render_training_table(cfg: GrpoConfig) -> str:
    base_training = training_of(cfg, "actor", cfg.actor, GroupRanks(PER_NODE, accelerated=True, capacity=ROOM))
    rows = [
        "| model | cards | divided by | most, GiB | when | largest term, GiB | micro-batch up to |",
        "|" + "---|" * 7,
    ]
    for model in MODELS:
        model_size = size_of(model)
        for nodes in NODES:
            num_accelerators = nodes * PER_NODE
            division_and_fit = _find_nearest_division(
                dataclasses.replace(
                    base_training, size=model_size, sizes=MeshSizes(shard=num_accelerators), separate_embeddings=True
                )
            )
            name = f"{model.rpartition('/')[2]} ({format_count(model_size.parameters)})"
            rows.append(f"| {name} | {nodes} × {PER_NODE} | {' | '.join(_iter_cells(division_and_fit))} |")
    return "\n".join(rows)


def _find_nearest_division(configured_training: Training) -> tuple[Training, bool]:
    """Returns the nearest division that fits, or the division with the lowest peak; and whether the result fits."""
    divisions_that_fit = [
        (change_distance, division)
        for change_distance, division in divisions(configured_training)
        if peak_bytes(division) <= _USABLE
    ]
    if divisions_that_fit:
        return min(divisions_that_fit, key=lambda candidate: (candidate[0], peak_bytes(candidate[1])))[1], True
    return min((division for _, division in divisions(configured_training)), key=peak_bytes), False


def _iter_cells(division_and_fit: tuple[Training, bool]) -> Iterator[str]:
    training, is_fitting = division_and_fit
    peak_moment = max(training.moments(), key=lambda memory_moment: memory_moment.nbytes)
    yield format_sizes(training.sizes)
    yield f"{peak_moment.nbytes / GIB:.1f}" + ("" if is_fitting else " (**does not fit**)")
    yield peak_moment.name
    yield f"{peak_moment.largest.name} {peak_moment.largest.nbytes / GIB:.1f}"
    yield f"{largest_tokens(training, _USABLE)} tokens" if is_fitting else "—"


def _render_serving_table(cfg: GrpoConfig) -> str:
    rows = [
        "| model | ranks of an engine | weights, GiB | KV cache, GiB | sequences of full length |",
        "|" + "---|" * 5,
    ]
    for model in MODELS:
        model_size = size_of(model)
        for tensor in _ENGINES:
            engine = Serving(
                model_size,
                "vllm",
                2,
                True,
                ROOM,
                cfg.data.max_prompt_tokens,
                cfg.rollout.max_new_tokens,
                responses_per_step(cfg),
                tensor=tensor,
                utilization=cfg.rollout.gpu_memory_utilization,
                max_batch_size=cfg.rollout.max_batch_size,
                max_model_len=cfg.rollout.max_model_len,
            )
            cells = (
                ["—", "does not fit"]
                if engine.refusals()
                else [f"{engine.cache_bytes() / GIB:.1f}", f"{engine.num_fitting()}"]
            )
            if model_size.kv_heads % tensor == 0 or tensor == model_size.kv_heads * 2:
                rows.append(
                    f"| {model.rpartition('/')[2]} | {tensor} | {engine.weights / GIB:.1f} | {' | '.join(cells)} |"
                )
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command `python -m rlhpc.language.planning.memory_tables CONFIG`; returns its exit code."""
    arguments = list(sys.argv[1:] if words is None else words)

    def run_command() -> int:
        if len(arguments) != 1:
            raise ConfigError("give one configuration, such as configs/reasoning/large.yaml")
        print(tables(arguments[0]))
        return 0

    return report_errors(run_command)


if __name__ == "__main__":
    sys.exit(main())
