"""Small models for the tests of generation engines, requests to them, and a plain forward of the same weights beside what they
write; importable by the ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.engines import EngineConfig
from rlhpc.language.config.run import LanguageActorConfig
from rlhpc.language.engines import Completion, Request, RolloutBackend, SamplingParams
from tests.accelerators import OTHERS_ON_CARD, kind_of_others

VOCABULARY, CONTEXT, END = 64, 256, 1
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456</>"[:61]
#: Both compute in float32: what is left is the order of summation.
TOLERANCE = 0.01 if OTHERS_ON_CARD else 2e-5  # accelerators' kernels multiply float32 with the precision of TF32
DEVICE = kind_of_others()
EXPERTS = {"num_experts_per_tok": 2}


def save_model(folder: Path, kind: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "initializer_range": 0.15,
        "bos_token_id": 0, "eos_token_id": END, "pad_token_id": 2, **changes,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """One token a character, so that a stop text takes several."""
    from tokenizers import Tokenizer, decoders, models

    words = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def config(backend: str, **rollout: Any) -> Any:
    """The sections of any run: what one on demonstrations has is enough, for it is evaluated by the same engines."""
    on_card = {"dtype": "float32", "gpu_memory_utilization": 0.2} if OTHERS_ON_CARD else {}
    engine = EngineConfig(rollout_backend=backend, **{"max_batch_size": 16, **on_card, **rollout})
    return OmegaConf.create({"rollout": OmegaConf.structured(engine), "actor": default_section(LanguageActorConfig)})


def requests_of(count: int, seed: int = 0, **fixed: Any) -> list[Request]:
    """Prompts of different lengths, each sampled in its own way."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        sampling = {
            "max_new_tokens": rng.randint(1, 40), "temperature": rng.choice([0.0, 0.7, 1.0, 1.3]),
            "top_p": rng.choice([1.0, 1.0, 0.8]), "top_k": rng.choice([-1, -1, 5]), **fixed,
        }  # fmt: skip
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 25)))
        made.append(Request(i, prompt, SamplingParams(**sampling), seed=seed * 1000 + i))
    return made


def distributions(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probs `[response, V]` that a plain forward gives."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].float()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1)[len(prompt) - 1 : -1]


def error_of(model: Any, request: Request, completion: Completion, version: int | None = None) -> float:
    """Largest distance between a completion's log-probs (of one version) and the plain forward's."""
    expected = distributions(model, request.prompt_ids, completion.token_ids, request.sampling.temperature)
    mine = torch.tensor(completion.logprobs)
    theirs = expected.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
    chosen = torch.tensor([version is None or v == version for v in completion.versions])
    return float((mine - theirs).abs()[chosen].max()) if chosen.any() else 0.0


def change(model: Any, seed: int) -> None:
    """What an optimizer step does, only more of it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03)


def run_out(engine: RolloutBackend) -> list[Completion]:
    done = []
    while engine.unfinished():
        done += engine.step()
    return done
