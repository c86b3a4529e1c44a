"""Prompts as tokens, the tiny model's tokenizer, and what is said where there is no tokenizer or template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhpc.language.data import Prompt, PromptTokenizer, load_tokenizer
from rlhpc.language.models.tiny import SPECIAL, VOCABULARY, character_tokenizer
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

need_extra("llm")
import transformers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ask(content: str, response: str = "", **fields: Any) -> Prompt:
    return Prompt(7, ({"role": "user", "content": content},), response=response, **fields)


@pytest.fixture(scope="module")
def characters() -> Any:
    return character_tokenizer()


@pytest.fixture(scope="module")
def words() -> Any:
    """A byte-level BPE with chat markers, as Qwen's and SmolLM's are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What is two and two? It is four.", "user assistant system"] * 20, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def test_the_character_tokenizer(characters: Any) -> None:
    numbers = {character: number for number, character in enumerate((*SPECIAL, *VOCABULARY))}
    assert characters("12+34=")["input_ids"] == [1, *(numbers[c] for c in "12+34=")]
    assert characters.decode([numbers[c] for c in "a b  c"]) == "a b  c"
    assert characters.decode([1, numbers["4"], 2], skip_special_tokens=True) == "4"
    assert characters("~")["input_ids"] == [1, characters.unk_token_id]
    assert (characters.pad_token_id, characters.bos_token_id, characters.eos_token_id) == (0, 1, 2)


def test_a_prompt_is_what_the_chat_template_says(words: Any) -> None:
    tokenizer = PromptTokenizer(words, 100)
    prompt = Prompt(0, ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}))
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    ids, _ = tokenizer.encode(prompt)
    assert tokenizer.text(prompt.messages) == words.decode(ids) == text
    assert ids == words.apply_chat_template(
        list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_bare_text(words: Any, characters: Any) -> None:
    bare = PromptTokenizer(words, 100, chat_template=False)
    assert words.decode(bare.encode(ask("2+2?"))[0]) == "2+2?"
    two = Prompt(0, ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}))
    assert words.decode(bare.encode(two)[0]) == "Add.\n2+2?"
    raw = Prompt(0, ({"role": "raw", "content": "2+2="},))
    assert words.decode(PromptTokenizer(words, 100).encode(raw)[0]) == "2+2="
    # Bare text begins as the tokenizer begins texts, and so does its template: once.
    for chat_template in (True, False):
        ids, _ = PromptTokenizer(characters, 100, chat_template=chat_template).encode(ask("2+2="))
        assert ids == characters("2+2=")["input_ids"]
        assert ids.count(characters.bos_token_id) == 1


@pytest.mark.parametrize("chat_template", [True, False])
def test_a_demonstration_is_the_prompt_the_response_and_the_end(words: Any, chat_template: bool) -> None:
    tokenizer = PromptTokenizer(words, 100, chat_template=chat_template)
    prompt = ask("What is two and two?", "It is four.")
    ids, mask, _ = tokenizer.encode_demonstration(prompt)
    asked, _ = tokenizer.encode(prompt)
    assert ids[: len(asked)] == asked
    assert mask == [False] * len(asked) + [True] * (len(ids) - len(asked))
    assert words.decode([i for i, trained in zip(ids, mask, strict=True) if trained]) == "It is four.<|im_end|>"
    # A response that brings its end gets no second one.
    assert tokenizer.encode_demonstration(ask("What is two and two?", "It is four.<|im_end|>"))[0] == ids


def test_a_response_does_not_change_the_tokens_of_its_prompt(words: Any) -> None:
    # In one text, "assistant" is one token; the model, asked " assi", does not see it.
    tokenizer = PromptTokenizer(words, 100, chat_template=False)
    first, second = words(" assi")["input_ids"], words("stant")["input_ids"]
    assert len(words(" assistant")["input_ids"]) == 1
    ids, mask, _ = tokenizer.encode_demonstration(ask(" assi", "stant"))
    assert ids == [*first, *second, words.eos_token_id]
    assert sum(mask) == len(second) + 1


def test_a_tokenizer_that_puts_a_space_before_every_text() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    known = {token: i for i, token in enumerate(["</s>", "▁2+2=", "▁", "▁4", "4"])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first", split=False), pre_tokenizers.Split("4", "isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    metaspace = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert metaspace("4", add_special_tokens=False)["input_ids"] == [2, 4]
    # Not "2+2= 4".
    assert PromptTokenizer(metaspace, 9, chat_template=False).encode_demonstration(ask("2+2=", "4"))[0] == [1, 4, 0]


def test_bare_text_has_no_end(characters: Any) -> None:
    from tokenizers import processors

    ending = character_tokenizer()
    ending._tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    prompt = ask("1+1=", "2")
    both = [PromptTokenizer(t, 9, chat_template=False) for t in (ending, characters)]
    assert both[0].encode(prompt) == both[1].encode(prompt)
    assert both[0].encode_demonstration(prompt) == both[1].encode_demonstration(prompt)


def test_prompts_that_are_too_long(characters: Any) -> None:
    strict, lax = (PromptTokenizer(characters, 6, overlong) for overlong in ("error", "drop"))
    short, long = ask("1+1=", "2"), ask("11+11=", "22")
    assert len(strict.encode(short)[0]) == 5
    with pytest.raises(ConfigError) as error:
        strict.encode(long)
    assert str(error.value) == (
        "prompt 7 has 7 tokens, more than data.max_prompt_tokens allows (6): '11+11='; raise the limit, or set "
        "data.overlong_prompts=drop"
    )
    assert lax.encode(long) is None
    assert lax.encode_demonstration(long) is None
    assert list(lax.fitting([short, long, short])) == [short, short]
    assert list(lax.fitting([short, short])) == [short, short]
    assert lax.fitting([short, long, short]).notes("data.train") == [
        "data.train: 1 of 3 problems are dropped, because they are too long (data.overlong_prompts=drop)"
    ]
    with pytest.raises(ConfigError, match=r"all 2 prompts are longer than data\.max_prompt_tokens=6"):
        lax.fitting([long, long])
    assert lax.encode_demonstration(short, max_tokens=6) is None
    longer = ask("1+9=", "10")
    assert list(lax.fitting([short, longer, long], requires_demonstrations=True, max_tokens=7)) == [short]
    with pytest.raises(ConfigError, match=r"has 7 tokens with its response, more than actor\.max_tokens_per_micro_"):
        strict.encode_demonstration(short, max_tokens=6)


def test_a_tokenizer_without_what_is_needed(words: Any) -> None:
    from copy import deepcopy

    plain = deepcopy(words)
    plain.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template; set data\.train\.chat_template=false"):
        PromptTokenizer(plain, 10)
    assert PromptTokenizer(plain, 10, chat_template=False).encode(ask("two")) == (plain("two")["input_ids"], [])
    plain.eos_token = None
    with pytest.raises(ConfigError, match="has no end token"):
        PromptTokenizer(plain, 10, chat_template=False).encode_demonstration(ask("two", "four"))
    with pytest.raises(ConfigError, match=r"prompt 7 has no demonstration .*: 'two'"):
        PromptTokenizer(words, 10).encode_demonstration(ask("two"))
    with pytest.raises(ConfigError, match=r"overlong_prompts is 'droop'; did you mean 'drop'\? allowed: error, drop"):
        PromptTokenizer(words, 10, "droop")
    with pytest.raises(ConfigError, match="prompt 7 has no tokens"):
        PromptTokenizer(words, 10, chat_template=False).encode(ask(""))


def test_a_template_that_refuses_a_role(words: Any) -> None:
    from copy import deepcopy

    strict = deepcopy(words)
    strict.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    prompt = Prompt(0, ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}))
    with pytest.raises(ConfigError, match="the chat template refuses a conversation of system, user: no system here"):
        PromptTokenizer(strict, 10).encode(prompt)


def test_load_tokenizer(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert PromptTokenizer(loaded, 100).encode(ask("two")) == PromptTokenizer(words, 100).encode(ask("two"))
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("model").eos_token == "<|im_end|>"

    from copy import deepcopy

    unpadded = deepcopy(words)
    unpadded.pad_token = None
    unpadded.save_pretrained(tmp_path / "unpadded")
    assert load_tokenizer(str(tmp_path / "unpadded")).pad_token == "<|im_end|>"


def test_models_that_are_not_there(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing may be asked of the network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for path, said in (
        (None, "actor.model.model_path is not set"),
        (str(tmp_path / "modle"), f"there is no such folder; did you mean '{tmp_path / 'model'}'"),
        (str(tmp_path / "model"), "a folder without a tokenizer; it has: config.json"),
        ("nobody/nothing-0b", "neither a folder here nor a model in the Hugging Face cache or on the hub"),
    ):
        with pytest.raises(ConfigError) as error:
            load_tokenizer(path)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path / "model"))
