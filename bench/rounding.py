"""Change of a model's log-probs in half precision, compared with the trainer's estimate: the tolerance of a weight probe.

    python -m bench.rounding

The benchmark makes correct updates of small models with random weights and of SmolLM2. It compares the trainer's log-probs of
the probe's text in bfloat16 with those of the same weights in float32 and with those of vLLM's kernels in bfloat16. The
differences are divided by `Probe.rounding`, like in a run.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from bench.machine import write
from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines import make_rollout
from rlhpc.language.models.logprobs import TokenScores, token_scores
from rlhpc.language.training.weight_sync import Prober, probe_text

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Llama of 12 layers": {"num_hidden_layers": 12}, "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32}, "Mistral": {"sliding_window": 6},
    "Mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
}  # fmt: skip
DEVIATIONS = (0.02, 0.15, 0.5)


class PlainTrainer:
    """Trainer interface that `Prober` uses, around a plain model."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.master = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.backend = SimpleNamespace(module=self.model, dtype=torch.bfloat16)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, size: float) -> None:
        """Moves each weight by a fixed fraction of the typical size in its tensor."""
        for master, weight in zip(self.master.parameters(), self.model.parameters(), strict=True):
            master.add_(size * master.std() * torch.randn(master.shape, generator=self.generator))
            weight.copy_(master)

    @torch.no_grad()
    def forward(self, batch: Any, *, temperature: float) -> TokenScores:
        """Implements `TokenTrainer.forward`."""
        return token_scores(self.model, batch, temperature)

    @torch.no_grad()
    def compute_exact_logprobs(self, text: Sequence[int]) -> list[float]:
        """Returns the log-probs of the same weights in float32."""
        ids = torch.tensor([list(text)])
        logprobs = copy.deepcopy(self.model).float()(ids).logits[0, :-1].log_softmax(-1)
        exact_logprobs: list[float] = logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return exact_logprobs


def measure(folder: str, num_updates: int, uses_vllm: bool) -> list[tuple[float, float]]:
    """Returns, for each update, the mean difference of log-probs per token, and the trainer's estimate of rounding."""
    trainer: Any = PlainTrainer(folder)
    probe_sequence = probe_text(trainer.model.config.get_text_config().vocab_size, 60)
    prober, differences = Prober(trainer, probe_sequence, 0, torch.bfloat16), []
    engine: Any = None
    if uses_vllm:
        cfg = typed(GrpoConfig, OmegaConf.structured(GrpoConfig))
        cfg.rollout.rollout_backend, cfg.rollout.max_batch_size, cfg.rollout.max_model_len = "vllm", 4, 128
        cfg.actor.model.dtype = "bfloat16"
        engine = make_rollout(cfg, model_path=folder, device="cpu", seed=0)
    for update in range(1, num_updates + 1):
        if engine is not None:
            engine.update_weights(update, ((n, t.detach().clone()) for n, t in trainer.model.named_parameters()))
        probe = prober.ask()
        engine_logprobs = (
            trainer.compute_exact_logprobs(probe_sequence) if engine is None else engine.score(probe.token_ids)
        )
        differences.append((float(np.abs(np.subtract(engine_logprobs, probe.logprobs)).mean()), probe.rounding))
        trainer.step(10.0 ** -(1 + update % 5))
    if engine is not None:
        engine.close()
    return differences


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/rounding.json`."""
    import transformers

    from rlhpc.language.models.builtin import smollm2

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}

    def tell(name: str, rows: list[tuple[float, float]]) -> None:
        differences, ratios = np.asarray([row[0] for row in rows]), np.asarray([row[0] / row[1] for row in rows])
        figures[name] = {
            "n": len(rows), "apart, median": float(np.median(differences)), "apart, most": float(differences.max()),
            "of what the trainer says, median": float(np.median(ratios)),
            "of what the trainer says, most": float(ratios.max()),
        }  # fmt: skip
        print(f"{name:50}", *(f"{value:9.3g}" for value in figures[name].values()), flush=True)

    for deviation in DEVIATIONS:
        for family, family_changes in FAMILIES.items():
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(0)
                options = {**SIZES, **family_changes, "initializer_range": deviation}
                config = getattr(transformers, f"{family.split()[0]}Config")(**options)
                transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
                tell(f"{family}, {deviation}, float32", measure(folder, args.updates, False))
                if family == "Qwen3Moe":
                    tell(f"{family}, {deviation}, vLLM", measure(folder, args.updates, True))
    with tempfile.TemporaryDirectory() as folder:
        smollm2(Path(folder))
        for name in ("float32", "vLLM"):
            tell(f"SmolLM2, {name}", measure(folder, args.updates // 2, name == "vLLM"))
    print(write("rounding", f"python -m bench.rounding --updates {args.updates}", {"figures": figures}))


if __name__ == "__main__":
    main()
