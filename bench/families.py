"""Admission of model families to vLLM: the agreement check of a run's start, on tiny models with random weights.

    python -m bench.families --seeds 3

Each family is tried in a separate process. Its engine starts from a saved model. Then, for each seed, it receives new
weights, and engine and trainer are compared as at the start of a run (`rlhpc.language.runners.engine_check`): with these
weights, with every trained number changed, and with these weights again. The trainer is transformers' model in the same dtype.

With the dtype `fp8`, weights are in bfloat16 and the engine computes in 8 bits (`rollout.quantization`). Where the trainer
measures the effect of rounding, as in half precision, the largest difference relative to it is reported, too.

Prints a line for each family and dtype; writes bench/results/families.json and docs/reference/engine-families.md after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.machine import RESULTS, commit, write

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "engine-families.md"
VOCABULARY, CONTEXT = 512, 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
#: Dtype of the factors of products with the dtype `fp8`.
FP8 = "float8_e4m3fn"
#: Result of a family before its check.
_NOT_TRIED: dict[str, Any] = {"seeds": 0, "difference": 0.0, "multiple": 0.0, "refused": ""}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
_ROUTED: dict[str, Any] = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_SHARED = {**_EXPERTS, "num_local_experts": 4, "shared_expert_intermediate_size": 64}
_DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
#: Configuration class, sizes, and keys of the published configurations that transformers does not write, by family.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS, {}),
    "glm4_moe": ("Glm4Moe", _ROUTED, _SIGMOID),
    "minimax_m2": (
        "MiniMaxM2", {**_EXPERTS, "num_local_experts": 4, "rotary_dim": 16},
        {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 16},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1, "head_dim": 32},
        {"moe_use_aux_free": True, "moe_gate": "topk"},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_ROUTED, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_shared_experts": 1,
        },
        {**_SIGMOID, "num_nextn_predict_layers": 0},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {},
    ),
    "qwen3_5_text": ("Qwen3_5Text", _DELTA, {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**_SHARED, **_DELTA}, {}),
    "qwen3_next": ("Qwen3Next", {**_SHARED, **_DELTA}, {}),
    "falcon_h1": ("FalconH1", {**_MAMBA, "head_dim": 32, "mamba_d_ssm": 128}, {}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
        },
        {},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "expand": 2,
            "hybrid_override_pattern": "M*", "layers_block_type": ["mamba", "attention"],
        },
        {},
    ),
    "lfm2_moe": (
        "Lfm2Moe", {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}, {},
    ),
    "lfm2": (
        "Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 128, "conv_use_xavier_init": True},
    ),
}  # fmt: skip


def save_family(folder: Path, family: str, dtype: str) -> Any:
    """Saves a tiny model of a family with random weights; returns it."""
    import torch
    import transformers

    kind, sizes, config_class = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config_class}))
    return model


class ModuleTrainer:
    """Trainer interface that `Prober` uses, around a model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.backend = SimpleNamespace(module=model, dtype=model.dtype)

    def forward(self, batch: Any, *, temperature: float) -> Any:
        """Implements `TokenTrainer.forward`."""
        import torch

        from rlhpc.language.models.logprobs import token_scores

        with torch.no_grad():
            return token_scores(self._model, batch, temperature)


def make_engine(folder: Path, dtype: str, quantization: str | None = None) -> Any:
    """Starts vLLM with the model of a folder."""
    from omegaconf import OmegaConf

    from rlhpc.config.typed import typed
    from rlhpc.language.config.run import GrpoConfig
    from rlhpc.language.engines import make_rollout

    cfg = typed(GrpoConfig, OmegaConf.structured(GrpoConfig))
    cfg.rollout.rollout_backend, cfg.rollout.max_batch_size, cfg.rollout.max_model_len = "vllm", 8, CONTEXT
    cfg.actor.model.dtype, cfg.rollout.quantization = dtype, quantization
    return make_rollout(cfg, model_path=str(folder), device="cpu", seed=0)


def randomize(model: Any, seed: int) -> None:
    """Replaces all weights by random ones of the same spread."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = max(float(parameter.float().std()) if parameter.numel() > 1 else 0.0, 0.02)
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(parameter.float().mean() + noise)


class Agreement(NamedTuple):
    """Largest mean difference of a token's log-prob, and the largest relative to the effect of rounding that the trainer
    measures; 0 if it measures none.
    """

    difference: float
    multiple: float


def check_seed(engine: Any, model: Any, dtype: str, seed: int, precision: str | None = None) -> Agreement:
    """Compares engine and trainer with the current weights, as at the start of a run.

    Args:
        engine: The engine.
        model: The trainer's model.
        dtype: Dtype of the weights.
        seed: Seed of the probe texts.
        precision: Dtype in which the engine computes, if it is not that of the weights.

    Raises:
        ConfigError: They differ by more than rounding explains.
        WeightUpdateError: The engine did not take in all weights.
    """
    import torch

    from rlhpc.language.runners.engine_check import ROUNDS, check_digests
    from rlhpc.language.training.weight_sync import Prober, compare_probe_samples, sample_probe
    from rlhpc.training.backend import Perturbation

    precision = precision or dtype
    prober: Any = Prober(ModuleTrainer(model), [0], 0, getattr(torch, precision))  # type: ignore[arg-type]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    largest, digests = Agreement(0.0, 0.0), list[dict[str, int]]()
    for phase, (is_perturbed, weights) in enumerate(ROUNDS):
        perturbation = Perturbation()
        if is_perturbed:
            perturbation.apply(parameters)
        engine.update_weights(3 * seed + phase, ((name, p.detach().clone()) for name, p in model.named_parameters()))
        samples = sample_probe(engine, VOCABULARY, 64, 24, 96, 3 * seed + phase, 0)
        scores = [prober.score(sample.token_ids, is_perturbed=is_perturbed) for sample in samples]
        for sample, score in zip(samples, scores, strict=True):
            difference = compare_probe_samples([sample], [score], None, {dtype, precision}, "cpu", f"with {weights}")
            multiple = difference / score[1] if score[1] else 0.0
            largest = Agreement(max(largest.difference, difference), max(largest.multiple, multiple))
        digests.append(engine.parameter_digests())
        if is_perturbed:
            perturbation.undo(parameters)
    frozen_names = {name for name, p in model.named_parameters() if not p.requires_grad}
    check_digests(digests, frozen_names | {name for name, _ in model.named_buffers()}, "the engine vllm")
    return largest


def try_family(family: str, dtype: str, num_seeds: int) -> dict[str, Any]:
    """Returns the result of the check of a family in all seeds: `difference`, or `refused` with the reason."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result: dict[str, Any] = {**_NOT_TRIED, "family": family, "dtype": dtype}
    dtype, quantization, precision = ("bfloat16", dtype, FP8) if dtype == "fp8" else (dtype, None, None)
    with tempfile.TemporaryDirectory() as folder:
        stage = "start"
        try:
            model = save_family(Path(folder), family, dtype)
            engine = make_engine(Path(folder), dtype, quantization)
            stage = "check"
            for seed in range(num_seeds):
                if seed:
                    randomize(model, seed)
                difference, multiple = check_seed(engine, model, dtype, seed, precision)
                result["difference"] = max(result["difference"], difference)
                result["multiple"] = max(result["multiple"], multiple)
                result["seeds"] += 1
        except Exception as error:
            result["refused"] = f"at the {stage}: {type(error).__name__}: {' '.join(str(error).split())}"[:400]
    return result


def try_in_process(family: str, dtype: str, num_seeds: int) -> dict[str, Any]:
    """Returns the result of `try_family` in another process, which an engine may crash."""
    arguments = ["--json", "--families", family, "--dtypes", dtype, "--seeds", str(num_seeds)]
    process = subprocess.run(
        [sys.executable, "-m", "bench.families", *arguments], capture_output=True, text=True, timeout=3600
    )
    last_line = process.stdout.strip().rpartition("\n")[2]
    if process.returncode or not last_line.startswith("{"):
        reason = f"at the start: the process ended with {process.returncode}"
        return {**_NOT_TRIED, "family": family, "dtype": dtype, "refused": reason}
    result: dict[str, Any] = json.loads(last_line)
    return result


def render(content: dict[str, Any]) -> str:
    """Returns the page with the table of all results."""
    host = content["machine"]
    lines = [
        "# Families of models in vLLM",
        "",
        "Results of the check at the start of a run ([weights](../explanation/weights.md#verification)), on tiny models with\n"
        "random weights: engine and trainer are compared with the weights of a seed, with every trained number changed, and\n"
        "with the first weights again. A family that is refused here is refused at the start of a run on a CPU; another\n"
        "device has other kernels. A run checks a family that is not here as well.",
        "",
        f"`python -m bench.families`, {host['date']}; vLLM {content['versions']['vllm']} on a CPU, transformers "
        f"{content['versions']['transformers']}.",
        "",
        "| family | dtype | commit | seeds | largest mean difference of a token's log-prob | relative to rounding | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        verdict = f"refused {row['refused']}" if row["refused"] else "admitted"
        difference = f"{row['difference']:.2g}" if row["seeds"] else "–"
        multiple = f"{row['multiple']:.2f}" if row["seeds"] and row.get("multiple") else "–"
        cells = (
            row["family"],
            row["dtype"],
            row["commit"],
            row["seeds"],
            difference,
            multiple,
            verdict.replace("|", "∣"),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def read_versions() -> dict[str, str]:
    """Returns the versions of the compared packages."""
    import transformers
    import vllm

    return {"vllm": vllm.__version__, "transformers": transformers.__version__}


def _read_earlier_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of earlier runs with the same versions of the packages."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"versions": {}, "rows": []}
    return list(content["rows"]) if content["versions"] == read_versions() else []


def main(argv: Sequence[str] | None = None) -> None:
    """Tries all families, and writes results and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "fp8"), default=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true", help="try one family in this process, and print the result")
    args = parser.parse_args(argv)
    if args.json:
        print("\n" + json.dumps(try_family(args.families[0], args.dtypes[0], args.seeds)))
        return
    path = RESULTS / "families.json"
    rows_by_case = {(row["family"], row["dtype"]): row for row in _read_earlier_rows(path)}
    command = f"python -m bench.families --seeds {args.seeds}"
    for dtype in args.dtypes:
        for family in args.families:
            began_s = time.perf_counter()
            row = rows_by_case[family, dtype] = {**try_in_process(family, dtype, args.seeds), "commit": commit()}
            print(family, dtype, row["seeds"], f"{row['difference']:.3g}", row["refused"] or "admitted",
                  f"{time.perf_counter() - began_s:.0f} s", flush=True)  # fmt: skip
            rows = [rows_by_case[case] for case in sorted(rows_by_case)]
            write("families", command, {"versions": read_versions(), "rows": rows})
            PAGE.write_text(render(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
