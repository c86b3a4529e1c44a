"""Ends of responses: each end token of a model is stripped, and demonstrations end as the chat template ends a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

import transformers
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhpc.language.agents.episodes import Agent, Episode, EpisodeRunner, sample_of
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.config.models import LanguageModelConfig
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.tokenizer import (
    PromptTokenizer,
    StopTexts,
    cut_at_stop,
    end_tokens,
    strip_end_tokens,
    turn_end,
)
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.models.loading import export_model
from rlhpc.runtime.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>", "<plain_end>"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A base model as they are published: its text ends otherwise than its template's turns, and it has further ends."""
    folder = tmp_path_factory.mktemp("base")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate([*letters, *SPECIAL])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=CHATML
    )
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL[1:4]})
    wrapped.add_tokens(SPECIAL[4:])  # an end token that is not marked as special
    wrapped.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(wrapped), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=wrapped.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    ends = wrapped.convert_tokens_to_ids(["<|endoftext|>", "<|eom_id|>", "<plain_end>"])
    transformers.GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


class Written:
    """An engine that has written these tokens."""

    def __init__(self, ids: list[int]) -> None:
        self._completion, self._requests = Completion(0, ids, [0.0] * len(ids), [0] * len(ids), "stop"), list[Request]()

    def add(self, requests: list[Request]) -> None:
        self._requests += requests

    def unfinished(self) -> int:
        return len(self._requests)

    def step(self) -> list[Completion]:
        return [self._completion for _ in range(len(self._requests)) if self._requests.pop()]


class Listener(Agent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def respond(self, episode: Episode, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_end|>", "<|eom_id|>", "<plain_end>"])
def test_each_end_token_is_stripped_for_each_reader(base: Any, end: str) -> None:
    ids = [*base.encode("It is 4.", add_special_tokens=False), base.convert_tokens_to_ids(end)]
    assert ids[-1] in end_tokens(base.name_or_path, transformers.AutoConfig.from_pretrained(base.name_or_path), base)
    assert strip_end_tokens(ids, base) == ids[:-1] and strip_end_tokens([], base) == []
    assert Parsers(base, None, None).read(ids, None).content == "It is 4."
    runner = EpisodeRunner(Written(ids), base, listener := Listener())  # type: ignore[arg-type]
    runner.add([Request(0, (1,), SamplingParams(max_new_tokens=50), 0)])
    while runner.unfinished():
        runner.step()
    assert listener.texts == ["It is 4."]
    problem = Prompt(0, ({"role": "user", "content": "2+2?"},), "4")
    episode = Episode(0, (1,), problem, ids, [0.0] * len(ids), [0] * len(ids), [True] * len(ids))
    assert sample_of(problem, episode, base, has_finished=True).response == "It is 4."


def test_a_demonstration_ends_as_the_template_ends_a_turn(base: Any, tmp_path: Path) -> None:
    end = base.convert_tokens_to_ids("<|im_end|>")
    assert turn_end(base) == end != base.eos_token_id
    prompt = Prompt(0, ({"role": "user", "content": "2+2?"},), "4", response="4")
    whole = [*prompt.messages, {"role": "assistant", "content": "4"}]
    encoder = PromptTokenizer(base, 1000)
    ids, _, _ = encoder.encode_demonstration(prompt)  # type: ignore[misc]
    assert base.apply_chat_template(whole, tokenize=False) == base.decode(ids) + "\n"
    bare, _, _ = PromptTokenizer(base, 1000, chat_template=False).encode_demonstration(prompt)  # type: ignore[misc]
    assert bare[-1] == base.eos_token_id, "a bare text has no turns"
    model = OmegaConf.structured(LanguageModelConfig(model_path=base.name_or_path))
    weights = transformers.AutoModelForCausalLM.from_pretrained(base.name_or_path).state_dict()
    export_model(tmp_path, weights.items(), model)
    ends = json.loads(tmp_path.joinpath("generation_config.json").read_text())["eos_token_id"]
    assert ends == [*base.convert_tokens_to_ids(["<|endoftext|>", "<|eom_id|>", "<plain_end>"]), end]


def test_a_token_without_an_embedding_is_refused(base: Any, tmp_path: Path) -> None:
    """A tokenizer that is larger than the model is fine until a text has such a token, as with Gemma 3's smallest models."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base.name_or_path)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path)
    config = json.loads(Path(base.name_or_path, "config.json").read_text())
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    encoder = PromptTokenizer(transformers.AutoTokenizer.from_pretrained(tmp_path), 1000)
    sum_prompt = Prompt(0, ({"role": "user", "content": "2+2?"},), "4", response="4")
    assert encoder.encode(sum_prompt) and encoder.encode_demonstration(sum_prompt)
    number = config["vocab_size"]
    expected = rf"token {number} \('<tool>'\), and the model in {tmp_path} has embeddings for {number} \(vocab_size"
    with pytest.raises(ConfigError, match=expected):
        encoder.encode(Prompt(0, ({"role": "user", "content": "2<tool>"},), "4"))
    with pytest.raises(ConfigError, match=expected):
        encoder.encode_demonstration(Prompt(0, sum_prompt.messages, "4", response="<tool>"))


def test_a_stop_text_neither_begins_nor_ends_inside_a_special_token(base: Any) -> None:
    def ids(*parts: str) -> list[int]:
        return [
            token
            for part in parts
            for token in (
                [base.convert_tokens_to_ids(part)] if part in SPECIAL else base.encode(part, add_special_tokens=False)
            )
        ]

    whole = "é a<|im_start|> b<|eom_id|>c<plain_end>"
    said = ids("é a", "<|im_start|>", " b", "<|eom_id|>", "c", "<plain_end>")
    for stop, text, match in (
        (["im"], whole, None), (["<"], "é a<|im_start|> b<|eom_id|>c", "<"),
        (["a<|"], whole, None), (["|> b"], whole, None), (["<|im_start|>"], "é a", "<|im_start|>"),
        (["a<|im_start|> b"], "é ", "a<|im_start|> b"), (["m", "c"], "é a<|im_start|> b<|eom_id|>", "c"),
        (["b", "é"], "", "é"), (["plain"], "é a<|im_start|> b<|eom_id|>c<", "plain"), ([], whole, None),
    ):  # fmt: skip
        assert cut_at_stop(base, said, stop) == (text, match), stop
        # Token by token, as engines look, it is found where the whole text has it, and not before.
        texts, at = (
            StopTexts(base, "x"),
            [n for n in range(1, len(said) + 1) if stop and StopTexts(base, "x").is_complete(said[:n], tuple(stop))],
        )
        assert bool(at) == (match is not None), stop
        if at:
            assert cut_at_stop(base, said[: at[0]], stop) == (text, match) and not any(
                texts.is_complete(said[:n], tuple(stop)) for n in range(1, at[0])
            )


@pytest.mark.parametrize("stop", [("\ud800",), ("x", "a\udfffb"), ("",)])
def test_a_stop_text_that_cannot_be_looked_for_is_refused(base: Any, stop: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="a stop text is"):
        StopTexts(base, "x").check(stop)
    StopTexts(base, "x").check(("é", "<|im_end|>"))
