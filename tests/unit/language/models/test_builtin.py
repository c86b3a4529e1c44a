"""Models that need no download: the tiny one."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhpc.language.data import Prompt, PromptTokenizer, load_tokenizer
from rlhpc.language.models import builtin, tiny, tiny_vision
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.tiny import main, make_tiny_model
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import process_id
from tests import warm
from tests.extras import need_extra

need_extra("llm")
import transformers


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
    prompt = Prompt(0, ({"role": "user", "content": "1+1="},))
    ids, _ = PromptTokenizer(load_tokenizer(str(tmp_path)), 64).encode(prompt)
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


def test_who_wants_one_that_is_being_made_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def slowly(folder: Path, **options: Any) -> int:
        made.append(folder)
        time.sleep(0.3)
        return make_tiny_model(folder, **options)

    monkeypatch.setattr("rlhpc.language.models.tiny.make_tiny_model", slowly)
    with ThreadPoolExecutor(3) as threads:
        found = {*threads.map(lambda _: resolve_model("builtin:tiny", tmp_path), range(3))}
    assert found == {str(tmp_path / "tiny")} and len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_processes_of_two_hosts_make_a_model_in_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging: list[str] = []

    def noted(folder: Path, **options: Any) -> int:
        staging.append(folder.name)
        return make_tiny_model(folder, **options)

    monkeypatch.setattr("rlhpc.language.models.tiny.make_tiny_model", noted)
    for host in ("one", "two"):  # without a lock that holds between them, and with one process id
        monkeypatch.setattr("rlhpc.language.models.builtin.node_name", lambda host=host: host)
        resolve_model("builtin:tiny", tmp_path / host)
    assert len(staging) == 2 and staging[0] != staging[1]
    assert all(name.endswith(process_id()) for name in staging)


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


@pytest.mark.long
def test_vllm_loads_the_tiny_model_and_says_the_same(tmp_path: Path) -> None:
    need_extra("vllm")
    make_tiny_model(tmp_path)
    tokenizer = PromptTokenizer(load_tokenizer(str(tmp_path)), 64)
    prompts = [tokenizer.encode(Prompt(0, ({"role": "user", "content": text},)))[0] for text in ("12+34=", "5*7=")]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for ids, (tokens, logprobs) in zip(prompts, vllm_answers(tmp_path, prompts), strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == tokens
        assert torch.allclose(scores.max(-1).values, torch.tensor(logprobs), atol=1e-5)


@pytest.mark.parametrize("module", [builtin, tiny, tiny_vision], ids=lambda module: module.__name__)
def test_the_help_names_the_command(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module.main(["--help"])
    assert f"python -m {module.__name__} " in capsys.readouterr().out
