"""Chat with a language model: replies in pieces, what the model reads of earlier turns, and commands.

A conversation with a trained checkpoint at a terminal is in tests/integration/language/test_chat.py.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import SftConfig
from rlhpc.language.data.tokenizer import PromptTokenizer
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.evaluation import chat as module
from rlhpc.language.evaluation.chat import Conversation, chat
from rlhpc.runtime.errors import ConfigError

CONTEXT = 400


class Bytes:
    """A tokenizer of bytes whose chat template names each role."""

    name_or_path, eos_token_id, all_special_ids = "", 0, (0,)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, template: bool = True) -> None:
        self.chat_template = "roles" if template else None

    def apply_chat_template(self, messages: list[Any], tokenize: bool, add_generation_prompt: bool) -> str:
        turns = [f"{message['role']}:{message['content']}\n" for message in messages]
        return "".join(turns) + "assistant:" * add_generation_prompt

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [*text.encode()]}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in ids if token).decode(errors="replace")


class Engine:
    """An engine that writes one byte of the next reply in each step.

    Args:
        replies: Replies in the order of the requests.
        shows: Whether the tokens of a running request can be read.
    """

    def __init__(self, replies: Iterable[str], shows: bool = True) -> None:
        self._replies, self.can_drop = iter(replies), shows
        self.requests: list[Request] = []
        self.aborted = self.closed = 0
        self._reply, self._length = b"", 0

    @property
    def prompts(self) -> list[str]:
        return [bytes(request.prompt_ids).decode() for request in self.requests]

    def add(self, requests: Iterable[Request]) -> None:
        (request,) = requests
        if len(request.prompt_ids) >= CONTEXT:
            raise ConfigError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room")
        self.requests.append(request)
        self._reply, self._length = next(self._replies).encode() + b"\0", 0

    def unfinished(self) -> int:
        return int(self._length < len(self._reply))

    def step(self) -> list[Completion]:
        self._length += 1
        if self.unfinished():
            return []
        return [Completion(self.requests[-1].id, [*self._reply])]

    def sampled_tokens(self, ids: Collection[int]) -> dict[int, list[int]]:
        return {number: [*self._reply[: self._length]] for number in ids}

    def abort(self) -> list[Completion]:
        self._length = len(self._reply)
        self.aborted += 1
        return []

    def close(self) -> None:
        self.closed += 1


def conversation(engine: Engine, *, template: bool = True, system: str | None = None, seed: int = 1) -> Conversation:
    encoder = PromptTokenizer(Bytes(template), 100, chat_template=template)
    return Conversation(engine, encoder, SamplingParams(max_new_tokens=9), seed, system)  # type: ignore[arg-type]


def test_a_reply_comes_in_pieces_and_is_part_of_what_the_model_reads_next() -> None:
    engine = Engine(["one", "two"])
    talk = conversation(engine, system="brief")
    assert [*talk.reply("a")] == ["o", "n", "e"]
    assert "".join(talk.reply("b")) == "two"
    first = "system:brief\nuser:a\nassistant:"
    assert engine.prompts == [first, f"{first}one\nuser:b\nassistant:"]
    assert engine.requests[0].sampling.max_new_tokens == 9


def test_each_reply_has_a_seed_of_its_own_and_the_same_in_another_chat() -> None:
    def seeds(seed: int) -> list[int]:
        engine = Engine(["x"] * 3)
        talk = conversation(engine, seed=seed)
        for _ in range(3):
            assert [*talk.reply("a")] == ["x"]
        return [request.seed for request in engine.requests]

    assert seeds(1) == seeds(1) and len({*seeds(1), *seeds(2)}) == 6


def test_a_cleared_conversation_keeps_the_system_message() -> None:
    engine = Engine(["x", "y"])
    talk = conversation(engine, system="brief")
    list(talk.reply("a"))
    talk.clear()
    list(talk.reply("b"))
    assert engine.prompts[1] == "system:brief\nuser:b\nassistant:"


def test_a_character_of_several_tokens_comes_when_it_is_complete() -> None:
    assert [*conversation(Engine(["aé€"])).reply("a")] == ["a", "é", "€"]


def test_an_engine_that_shows_nothing_before_the_end_gives_the_reply_at_once() -> None:
    assert [*conversation(Engine(["whole"], shows=False)).reply("a")] == ["whole"]


def test_an_interrupted_reply_ends_the_request_and_is_read_as_far_as_it_came() -> None:
    engine = Engine(["long reply", "x"])
    talk = conversation(engine)
    pieces = talk.reply("a")
    assert [next(pieces), next(pieces)] == ["l", "o"]
    pieces.close()
    assert engine.aborted == 1 and not engine.unfinished()
    list(talk.reply("b"))
    assert engine.prompts[1] == "user:a\nassistant:lo\nuser:b\nassistant:"


def test_without_a_chat_template_each_text_is_continued_alone() -> None:
    engine = Engine(["x", "y"])
    talk = conversation(engine, template=False)
    list(talk.reply("1+1="))
    list(talk.reply("2+2="))
    assert engine.prompts == ["1+1=", "2+2="]


# -- the command


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with lines of a pipe; the model's folder is loaded by stand-ins."""

    def run(engine: Engine, lines: str, *, template: bool = True, keys: Any = None, **options: Any) -> None:
        cfg = default_section(SftConfig)
        for key, value in {"cluster.accelerators_per_node": 0, **(keys or {})}.items():
            OmegaConf.update(cfg, key, value)
        monkeypatch.setattr(module, "load_tokenizer", lambda *args: Bytes(template))
        monkeypatch.setattr(module, "make_engine", lambda cfg, **rest: engine)
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        chat(cfg, tmp_path, **options)

    return run


def test_lines_of_a_pipe_are_answered_on_standard_output_alone(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(["one", "two"])
    talk(engine, "a\n\n/clear\nb\n", system="brief", max_tokens=5, seed=4)
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n" and "/clear begins anew, /exit" in shown.err
    assert engine.prompts == ["system:brief\nuser:a\nassistant:", "system:brief\nuser:b\nassistant:"]
    assert engine.requests[0].sampling.max_new_tokens == 5 and engine.closed == 1


def test_exit_ends_before_the_end_of_the_input(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(Engine(["one"]), "a\n/exit\nb\n")
    assert capsys.readouterr().out == "one\n"


def test_control_characters_of_a_reply_do_not_reach_the_terminal(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(Engine(["a\x1b[2J\tb\nc\x9b"]), "x\n")
    assert capsys.readouterr().out == "a\ufffd[2J\tb\nc\ufffd\n"


def test_a_conversation_that_is_too_long_goes_on_after_clear(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(["one"])
    talk(engine, "a" * CONTEXT + "\n/clear\nb\n")
    shown = capsys.readouterr()
    assert shown.out == "one\n" and "tokens leaves no room; /clear begins anew" in shown.err
    assert engine.prompts == ["user:b\nassistant:"]


def test_an_interrupt_ends_the_reply_and_not_the_chat(
    talk: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(["long reply", "two"])
    step = engine.step

    def interrupted() -> list[Completion]:
        if len(engine.requests) == 1 and engine._length == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    talk(engine, "a\nb\n")
    assert capsys.readouterr().out == "lon …\ntwo\n"
    assert engine.prompts[1] == "user:a\nassistant:lon\nuser:b\nassistant:"


def test_a_model_without_a_chat_template_has_no_system_message(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for template, keys in ((False, None), (True, {"data.train.chat_template": False})):
        engine = Engine(["x"])
        talk(engine, "1+1=\n", template=template, keys=keys)
        assert engine.prompts == ["1+1="] and "without a chat template" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="--system needs a chat template"):
            talk(engine, "1+1=\n", template=template, keys=keys, system="brief")
