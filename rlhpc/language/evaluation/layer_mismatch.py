"""Mismatch of trainer and engine by layer (`rlhpc eval --layers`): both read the same answers, and their hidden states are
compared after each decoder layer.

The engine generates the answers, one at a time, so that its passes are those of a run: a prefill of the prompt, then one token
at a time. The trainer reads prompt and answer in one pass. The relative difference of a layer is the root of the mean squared
difference of hidden states, divided by the root mean square of the trainer's hidden states.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.config.typed import plain, with_value
from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.data import load_tokenizer
from rlhpc.language.engines import Request, RolloutBackend, SamplingParams
from rlhpc.language.engines.common import observed_outputs
from rlhpc.language.engines.registry import make_rollout
from rlhpc.language.evaluation.evaluate import find_suite, model_folder, problems_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.multi_policy import folders_of
from rlhpc.language.training.prompt_dispatch import seed_of
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runs.device import evaluation_device
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.text import align_columns
from rlhpc.runtime.worker import Worker

#: Number of compared problems by default, and maximum number of tokens of an answer.
NUM_PROBLEMS, _MAX_TOKENS = 4, 64
#: Multiple of the difference of the layer before that rounding does not explain.
_JUMP = 4.0
#: Settings of the trainer, which reads a folder with the weights on one rank.
_TRAINER_SETTINGS: dict[str, Any] = {
    "model.kwargs": {}, "model.value_head": False, "lora.rank": 0, "training_backend": "local", "compile": "off",
    "parallel.tensor": 1, "parallel.context": 1, "parallel.expert": 1,
}  # fmt: skip
#: Arguments of vLLM with which its layers call hooks, and read all tokens of each prompt.
_VLLM_ARGUMENTS = {"enforce_eager": True, "enable_prefix_caching": False}


class SingleRank(Worker):
    """Rank of a trainer outside a run.

    Args:
        device: Device of the computation; with an accelerator, the first.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.accelerators = () if device.type == "cpu" else (0,)


@dataclass
class LayerDifference:
    """Sums over tokens of the differences of a layer's hidden states.

    Attributes:
        squares: Sum of squared differences, of prompts and of answers.
        norms: Sum of the trainer's squared hidden states, of prompts and of answers.
        largest: Largest relative difference of a token.
        unequal: Number of tokens whose hidden states have different bits.
        tokens: Number of tokens.
    """

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    norms: list[float] = field(default_factory=lambda: [0.0, 0.0])
    largest: float = 0.0
    unequal: int = 0
    tokens: int = 0

    def add(self, trainer_states: Tensor, engine_states: Tensor, num_prompt_tokens: int) -> None:
        """Adds the tokens of a text.

        Args:
            trainer_states, engine_states: `[tokens, hidden size]`.
            num_prompt_tokens: Number of tokens of the prompt.
        """
        trainer_states, engine_states = trainer_states.double(), engine_states.double()
        squares, norms = (trainer_states - engine_states).square().sum(1), trainer_states.square().sum(1)
        for index, part in enumerate((slice(0, num_prompt_tokens), slice(num_prompt_tokens, None))):
            self.squares[index] += float(squares[part].sum())
            self.norms[index] += float(norms[part].sum())
        self.largest = max(self.largest, float((squares / norms.clamp_min(1e-30)).max().sqrt()))
        self.unequal += int((trainer_states != engine_states).any(1).sum())
        self.tokens += len(trainer_states)

    def summary(self) -> dict[str, float]:
        """Returns the relative differences in prompts (`prompt`) and answers (`answer`), the `largest` of a token, and the
        share of tokens that are `unequal`.
        """
        prompt, answer = (
            math.sqrt(squares / norms) if norms else 0.0
            for squares, norms in zip(self.squares, self.norms, strict=True)
        )
        return {
            "prompt": prompt,
            "answer": answer,
            "largest": self.largest,
            "unequal": self.unequal / max(self.tokens, 1),
        }


def compare_texts(trainer: TokenTrainer, engine: RolloutBackend, requests: Sequence[Request]) -> dict[str, Any]:
    """Compares trainer and engine, which have the same weights, on the answers that the engine generates.

    Returns:
        `layers`, a summary of each layer (`LayerDifference.summary`); `logprob`, the mean absolute difference of the log-probs
        of answers' tokens; and the number of `tokens` whose hidden states were compared.

    Raises:
        ConfigError: The engine does not give its layers, or has not as many as the trainer.
    """
    layers = trainer.blueprint.decoder_layers(trainer.backend.module)
    differences, logprob_sum, num_answer_tokens = [LayerDifference() for _ in layers], 0.0, 0
    for request in requests:
        engine_passes, record_engine = _make_recorder()
        with engine.observed_layers(record_engine):
            (completion,) = engine.generate([request])
        text = torch.tensor([*request.prompt_ids, *completion.token_ids])
        num_prompt_tokens = len(request.prompt_ids)
        batch = TokenBatch.from_sequences([text], [torch.arange(len(text)) >= num_prompt_tokens]).read_by(
            trainer.packed
        )
        trainer_passes, record_trainer = _make_recorder()
        with observed_outputs(layers, record_trainer):
            logprobs = trainer.forward(batch, temperature=request.sampling.temperature or 1.0).logprobs.cpu()[
                batch.mask
            ]
        if len(engine_passes) != len(layers) or len(trainer_passes) != len(layers):
            raise ConfigError(
                f"the engine has {len(engine_passes)} decoder layers that can be observed, and the trainer "
                f"{len(trainer_passes)} of {len(layers)}: they cannot be compared by layer"
            )
        for index, difference in enumerate(differences):
            engine_states = join_passes(engine_passes[index], num_prompt_tokens, len(text) - 1)
            difference.add(trainer_passes[index][0][: len(text) - 1], engine_states, num_prompt_tokens)
        logprob_sum += float((logprobs - torch.tensor(completion.logprobs)).abs().sum())
        num_answer_tokens += len(completion.token_ids)
    return {
        "layers": [difference.summary() for difference in differences],
        "logprob": logprob_sum / num_answer_tokens,
        "tokens": differences[0].tokens,
    }


def _make_recorder() -> tuple[dict[int, list[Tensor]], Callable[[int, Tensor], None]]:
    """Returns a dict from the index of a layer to its hidden states in each pass, and the function that fills it."""
    passes: dict[int, list[Tensor]] = defaultdict(list)

    def record(index: int, hidden_states: Tensor) -> None:
        passes[index].append(hidden_states.detach().cpu().clone())

    return passes, record


def join_passes(passes: Sequence[Tensor], num_prompt_tokens: int, num_tokens: int) -> Tensor:
    """Returns the hidden states of a text from an engine's passes: chunks of the prompt, then one token each, with padding.

    Args:
        passes: Hidden states of each pass, `[tokens and padding, hidden size]`.
        num_prompt_tokens: Number of tokens of the prompt.
        num_tokens: Number of tokens of the text that the engine has read.
    """
    parts, num_joined = list[Tensor](), 0
    for states in passes:
        parts.append(states[: max(1, num_prompt_tokens - num_joined)])
        num_joined += len(parts[-1])
    return torch.cat(parts)[:num_tokens]


def measure_layer_mismatch(
    cfg: LanguageConfig, model: str | Path, suite: str, *, num_problems: int, output: Path | None = None
) -> dict[str, Any]:
    """Compares trainer and engine of a run by layer, on the first problems of a suite.

    Args:
        cfg: Configuration of the run.
        model: A checkpoint, or a Hugging Face folder or name.
        suite: Name of the suite of `data.eval` (`find_suite`).
        num_problems: Number of problems; prompts with images are left out.
        output: JSON file to write.

    Returns:
        See `compare_texts`; also `backend`, `suite`, `model`, and the `dtype` of the trainer's computation.

    Raises:
        ConfigError: Model, data or engine cannot be used, or all prompts have images.
    """
    section, device = find_suite(cfg, suite), evaluation_device(cfg)
    with model_folder(model, cfg.actor.model.trust_remote_code) as (folder, _):
        path = next(iter(folders_of(cfg, folder).values()))
        problems, _ = problems_of(cfg, section, load_tokenizer(path, cfg.actor.model.trust_remote_code))
        texts = [(prompt, ids) for prompt, ids, _, encoder in problems if not prompt.images][:num_problems]
        if not texts:
            raise ConfigError(f"suite {suite!r}: all prompts have images, and --layers compares texts")
        sampling = SamplingParams(
            max_new_tokens=min(cfg.rollout.max_new_tokens, _MAX_TOKENS), temperature=section.temperature
        )
        suite_seed = zlib.crc32(suite.encode())
        requests = [
            Request(index, ids, sampling, seed_of(cfg.runner.seed, suite_seed, prompt.id, 0))
            for index, (prompt, ids) in enumerate(texts)
        ]
        engine_cfg = cfg
        if cfg.rollout.rollout_backend == "vllm":
            engine_cfg = with_value(
                cfg, "rollout.engine_kwargs", {**plain(cfg.rollout.engine_kwargs), **_VLLM_ARGUMENTS}
            )
        trainer = TokenTrainer(_trainer_config(cfg, path), SingleRank(device))
        with closing(make_rollout(engine_cfg, model_path=path, device=str(device), seed=cfg.runner.seed)) as engine:
            result = compare_texts(trainer, engine, requests)
    result |= {
        "backend": cfg.rollout.rollout_backend,
        "suite": suite,
        "model": str(model),
        "dtype": str(trainer.backend.dtype).removeprefix("torch."),
    }
    if output is not None:
        try:
            replace_durably(output, json.dumps(result, indent=2, sort_keys=True).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    return result


def _trainer_config(cfg: LanguageConfig, path: str) -> Any:
    """Returns the configuration of a trainer on one rank with the weights of a folder."""
    trainer_cfg: Any = with_value(cfg, "actor.model.model_path", path)
    for key, setting in _TRAINER_SETTINGS.items():
        trainer_cfg = with_value(trainer_cfg, f"actor.{key}", setting)
    return trainer_cfg


def format_table(result: dict[str, Any]) -> str:
    """Formats the result of `measure_layer_mismatch` as a table, with the first layer in which the difference jumps.

    That is a layer with several times the difference of the layer before, or of one rounding.
    """
    layers = result["layers"]
    rows = [["layer", "prompt", "answer", "largest", "unequal"]]
    for index, layer in enumerate(layers):
        differences = [f"{layer[name]:.2g}" for name in ("prompt", "answer", "largest")]
        rows.append([str(index), *differences, f"{layer['unequal']:.1%}"])
    lines = align_columns(rows, right_from=0)
    previous = torch.finfo(getattr(torch, result["dtype"])).eps
    for index, layer in enumerate(layers):
        part = max(("prompt", "answer"), key=lambda name: layer[name])
        if layer[part] > _JUMP * previous:
            lines.append(f"the difference jumps in layer {index}: from {previous:.2g} to {layer[part]:.2g} ({part})")
            break
        previous = max(previous, layer[part])
    else:
        lines.append("no layer's difference is more than rounding explains")
    lines.append(
        f"log-probs of answers differ by {result['logprob']:.2g} on average; {result['tokens']} tokens, "
        f"{result['backend']}, {result['dtype']}"
    )
    return "\n".join(lines)
