"""Shared prefixes computed once, compared with the same samples packed one after the other, each with its prefix.

    python -m bench.prefixes --repeat 5

Both sides have the same samples, the same model and the same maximum of tokens in a micro-batch (the default,
`actor.max_tokens_per_micro_batch`), and run forward and backward passes in turn. The time is CPU time, because other processes
hardly change it. Gradients are compared once, by the norm of their difference over all parameters, and the gradients of each
side with those of the same model in float64. Separate processes measure memory.

Prints a line for each figure and writes bench/results/prefixes.json.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.machine import goal, spread
from bench.rows import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    make_samples,
    make_trainer,
    read_resident_kib,
    run_passes,
    write_report,
)
from bench.training import make_model
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.micro_batching import split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer

MAX_TOKENS: int = GrpoConfig().actor.max_tokens_per_micro_batch
#: Lengths by depth of the nodes of a tree, and numbers of children: a prompt with 8 answers, or an agent's turns.
CASES = {
    "8 x (4096 + 256)": ((4096, 256), (8,)),
    "8 x (512 + 512)": ((512, 512), (8,)),
    "a tree of depth 4": ((1024, 512, 512, 256), (2, 2, 2)),
}
SIDES = ("flat", "shared")


def make_tree(lengths: tuple[int, ...], children: tuple[int, ...]) -> TokenBatch:
    """Returns the paths from the root of a tree to its leaves as samples; each node but the root is trained in one of them."""
    generator = torch.Generator().manual_seed(0)
    paths, masks = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.bool)]
    for depth, length in enumerate(lengths):
        number = 1 if depth == 0 else children[depth - 1]
        longer_paths, longer_masks = [], []
        for path, mask in zip(paths, masks, strict=True):
            for child in range(number):
                node = torch.randint(0, VOCABULARY, (length,), generator=generator)
                longer_paths.append(torch.cat([path, node]))
                earlier = mask if child == 0 else torch.zeros_like(mask)
                longer_masks.append(torch.cat([earlier, torch.full((length,), depth > 0)]))
        paths, masks = longer_paths, longer_masks
    weights = [torch.randn(len(path), generator=generator) for path in paths]
    batch = TokenBatch.from_sequences(paths, masks, {"weights": weights})
    return dataclasses.replace(batch, group=torch.zeros_like(batch.group))


def list_micro_batches(token_trainer: TokenTrainer, batch: TokenBatch, side: str) -> list[TokenBatch]:
    """Returns the micro-batches of a side."""
    parts = split_micro_batches(
        batch, MAX_TOKENS, is_packed=True, shares_prefixes=side == "shared", hidden_size=token_trainer.hidden
    )
    return [micro_batch for _, micro_batch in parts]


def compute_gradients(token_trainer: TokenTrainer) -> dict[str, torch.Tensor]:
    named_parameters = token_trainer.backend.module.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named_parameters if parameter.grad is not None}


def compare(folder: str, case: str, repeat: int) -> dict[str, Any]:
    """Returns CPU seconds of both sides, their ratio within a round, and how far their gradients are from each other.

    The gradient in float64 shows how much of that is the rounding of float32, which both sides have.
    """
    token_trainer, batch = make_trainer(folder, True), make_tree(*CASES[case])
    if not token_trainer.shares_prefixes:
        raise SystemExit("the model does not share prefixes here")
    parts = {side: list_micro_batches(token_trainer, batch, side) for side in SIDES}
    seconds, grads = {side: list[float]() for side in SIDES}, dict[str, dict[str, torch.Tensor]]()
    for turn in range(repeat + 1):
        for side in SIDES[:: 1 - 2 * (turn % 2)]:
            start_s = time.process_time()
            run_passes(token_trainer, parts[side], batch.tokens)
            if turn:  # the first round warms up
                seconds[side].append(time.process_time() - start_s)
            else:
                grads[side] = compute_gradients(token_trainer)
    exact = compute_exact_gradients(load_causal_lm(folder), batch, batch.columns["weights"] / batch.tokens)
    return {
        "tokens, flat": batch.tokens,
        "tokens, shared": sum(len(part.row.tokens) for part in parts["shared"]),
        **{f"{side} (CPU s)": spread(values) for side, values in seconds.items()},
        "flat / shared": statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)),
        "relative difference of the gradients": relative_difference(grads["shared"], grads["flat"]),
        "largest relative difference of an element": max(
            float((grads["shared"][name] - flat).abs().max() / flat.abs().max()) for name, flat in grads["flat"].items()
        ),
        **{f"{side}: relative error against float64": relative_difference(grads[side], exact) for side in SIDES},
    }


def load_causal_lm(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def compute_exact_gradients(model: Any, batch: TokenBatch, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the gradients of minus the weighted sum of log-probs, each sample computed for itself in float64.

    Args:
        model: Model of transformers in float32 without packing; it is not changed.
        batch: The samples.
        weights: `[T]`, weight of each token's log-prob, without the mask.
    """
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):  # transformers' RMSNorm converts its inputs to float32
            module.forward = partial(_compute_rms_norm, module)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        ids = batch.ids[start:end]
        log_probabilities = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logprobs = log_probabilities.gather(1, ids[1:, None])[:, 0]
        factors = (weights * batch.mask)[start + 1 : end].double()
        (-(factors * logprobs).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _compute_rms_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    return torch.nn.functional.rms_norm(hidden_states, weight.shape, weight, module.variance_epsilon)


def relative_difference(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of two gradients of a model, relative to the norm of the second."""
    differences = [(values[name].double() - gradient).norm() for name, gradient in expected.items()]
    norms = [gradient.double().norm() for gradient in expected.values()]
    return float(torch.stack(differences).norm() / torch.stack(norms).norm())


def print_peak(folder: str, case: str, side: str) -> None:
    """Prints the growth of this process's peak resident memory, in MiB, in the passes of a side."""
    token_trainer = make_trainer(folder, True)
    small_batch = make_samples([8, 8], VOCABULARY)
    run_passes(token_trainer, [small_batch.read_by(True)], small_batch.tokens)
    batch = make_tree(*CASES[case])
    parts = list_micro_batches(token_trainer, batch, side)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    kib_before = read_resident_kib("VmRSS")
    run_passes(token_trainer, parts, batch.tokens)
    print(json.dumps((read_resident_kib("VmHWM") - kib_before) / 1024))


def measure_in_process(folder: str, case: str, side: str) -> float:
    command = [sys.executable, "-m", "bench.prefixes", "--model", folder, "--peak", case, side]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    mib: float = json.loads(result.stdout)
    return mib


def main() -> None:
    """Measures all cases, prints the figures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print_peak(args.model, *args.peak)
        return
    figures = dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", LAYERS, WIDTH, VOCABULARY)
        for case in CASES:
            case_figures = compare(str(Path(folder) / "model"), case, args.repeat)
            for side in SIDES:
                case_figures[f"{side} (peak MiB)"] = measure_in_process(str(Path(folder) / "model"), case, side)
            figures |= {f"{case}: {name}": value for name, value in case_figures.items()}
    first_case, *_ = CASES
    goals = [
        goal(
            f"{first_case}: at most a third of the CPU time of flat rows",
            figures[f"{first_case}: flat / shared"],
            at_least=3.0,
        ),
        *(
            goal(
                f"{case}: gradients to 1e-6",
                figures[f"{case}: relative difference of the gradients"],
                at_most=1e-6,
            )
            for case in CASES
        ),
        *(
            goal(
                f"{case}: no more memory than flat rows",
                figures[f"{case}: shared (peak MiB)"] / figures[f"{case}: flat (peak MiB)"],
                at_most=1.0,
            )
            for case in CASES
        ),
    ]
    write_report("prefixes", f"python -m bench.prefixes --repeat {args.repeat}", 1, figures, goals)


if __name__ == "__main__":
    main()
