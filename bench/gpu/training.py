"""Training backends on one card: time of a step, tokens per second, memory, and agreement of their log-probs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bench.gpu.part import Report, dtype_for, make_model, size_for
from bench.gpu.ranks import Trains, launch_groups
from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig

#: By the name of its figures, what is set below `actor`.
BACKENDS: dict[str, dict[str, Any]] = {
    "replicated": {"training_backend": "local"},
    "FSDP2": {"training_backend": "fsdp"},
    "DeepSpeed 2": {"training_backend": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "DeepSpeed 3": {"training_backend": "deepspeed", "deepspeed": {"zero_stage": 3}},
}


def configuration(model: Path, device: str, changes: dict[str, Any]) -> Any:
    """Returns the configuration of a trainer."""
    cfg = OmegaConf.structured(GrpoConfig)
    cfg.actor.model.model_path, cfg.actor.model.dtype = str(model), dtype_for(device)
    cfg.actor.optim.name, cfg.actor.optim.clip_grad = "adamw", 1.0
    return typed(GrpoConfig, OmegaConf.merge(cfg, {"actor": changes}))


def train(report: Report, model: Path, changes: dict[str, Any], num_ranks: int = 1) -> dict[str, Any]:
    """Returns the measurements of rank 0 (`Trains.measure`) of a group with the given number of ranks."""
    cfg = configuration(model, report.device, changes)
    with launch_groups(report.device, (Trains, "trains", range(num_ranks))) as (group,):
        measurements: dict[str, Any] = group.measure(cfg, size_for(report.device), 2 if report.small else 5).wait()[0]
    return measurements


def report_backend(report: Report, name: str, measurements: dict[str, Any]) -> None:
    """Reports the figures of one backend."""
    report.figure(f"{name}, a step", measurements["seconds"], "s")
    report.figure(
        f"{name}, trained", [measurements["tokens"] / seconds for seconds in measurements["seconds"]], "tokens/s"
    )
    report.figure(f"{name}, most memory", measurements["peak"] / 1e9, "GB of the host" if report.small else "GB")
    for transfer, column_index in (("offload", 1), ("reload", 2)):
        rates = [row[0] / row[column_index] / 1e9 for row in measurements["moved"]]
        if rates:
            report.figure(f"{name}, {transfer} of {measurements['moved'][0][0] / 1e9:.2f} GB", rates, "GB/s")


def measure(report: Report) -> None:
    """Measures each backend in a separate rank, all on the same model and batches."""
    with tempfile.TemporaryDirectory() as folder:
        report.figure("parameters", make_model(Path(folder), size_for(report.device), report.device) / 1e6, "million")
        first_logprobs: Any = None
        if report.small:
            report.skip("offload and reload", "on a CPU nothing has to move")
        for name, overrides in BACKENDS.items():
            with report.piece(name):
                measurements = train(report, Path(folder), overrides)
                report_backend(report, name, measurements)
                if first_logprobs is None:
                    first_logprobs = measurements["probe"]
                    logprob_change = (first_logprobs - measurements["before"]).abs().mean()
                    report.figure(f"{name}, log-probs moved by the steps", float(logprob_change), "nats")
                else:
                    logprob_difference = (measurements["probe"] - first_logprobs).abs().mean()
                    report.figure(
                        f"{name}, log-probs apart from {next(iter(BACKENDS))}'s", float(logprob_difference), "nats"
                    )
