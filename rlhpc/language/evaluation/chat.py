"""Chat with a trained language model in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Self

from rlhpc.config.typed import mapping
from rlhpc.language.agents.registry import INLINE
from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.data import PromptTokenizer, load_tokenizer
from rlhpc.language.data.tokenizer import context_tokens
from rlhpc.language.engines import Request, RolloutBackend, SamplingParams
from rlhpc.language.engines.registry import make_engine
from rlhpc.language.evaluation.evaluate import model_folder
from rlhpc.language.multi_policy import folders_of
from rlhpc.language.training.prompt_dispatch import seed_of
from rlhpc.runs.device import evaluation_device
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError

_COMMANDS = "/clear begins anew, /exit or Ctrl-D ends, Ctrl-C stops a reply"
_PAUSE_S = 0.002
#: Translation of control characters to a replacement character, because a terminal interprets control characters.
_CONTROL_CHARACTERS = {
    char_code: "\ufffd" for char_code in (*range(32), *range(127, 160)) if chr(char_code) not in "\n\t"
}


class Conversation:
    """Conversation with an engine: previous messages, and the engine that answers the next message.

    Args:
        engine: Engine without pending requests.
        encoder: Tokenizer of messages. Without a chat template, the model continues each text separately.
        sampling: Sampling parameters of replies.
        seed: Seed of sampling.
        system: System message, or None.
    """

    def __init__(
        self, engine: RolloutBackend, encoder: PromptTokenizer, sampling: SamplingParams, seed: int, system: str | None
    ) -> None:
        self._engine, self._encoder, self._sampling, self._seed = engine, encoder, sampling, seed
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages, self._num_turns = [*self._system], 0

    def clear(self) -> None:
        """Removes all messages except the system message."""
        self._messages = [*self._system]

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yields the reply to a text in pieces. After an interruption, the generated part of the reply is recorded.

        Raises:
            ConfigError: The conversation does not fit into the model's context, or the chat template refuses it.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        if not self._encoder.chat_template:
            messages = [{"role": "raw", "content": text}]
        ids = tuple(self._encoder.encode_messages(messages))
        self._num_turns += 1
        self._engine.add([Request(self._num_turns, ids, self._sampling, seed_of(self._seed, self._num_turns))])
        answer = ""
        try:
            for tokens, is_finished in self._iter_tokens():
                text_so_far = self._encoder.tokenizer.decode(tokens, skip_special_tokens=True)
                if not is_finished and text_so_far.endswith("\ufffd"):  # the last character is incomplete
                    continue
                added_text, answer = text_so_far[len(answer) :], text_so_far
                if added_text:
                    yield added_text
        finally:
            if self._engine.unfinished():
                self._engine.abort()
            if self._encoder.chat_template:
                self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _iter_tokens(self) -> Iterator[tuple[list[int], bool]]:
        """Yields the tokens generated so far, and whether the reply is complete."""
        engine = self._engine
        while engine.unfinished():
            for completion in engine.step():
                yield completion.token_ids, True
                return
            if engine.can_drop and (tokens := engine.sampled_tokens([self._num_turns]).get(self._num_turns)):
                yield tokens, False
            else:
                time.sleep(_PAUSE_S)


def chat(
    cfg: LanguageConfig,
    checkpoint: Path,
    *,
    system: str | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> None:
    """Answers typed messages until the end of the input.

    Args:
        cfg: The run's configuration: sections `rollout` and `actor.model`, and `runner.seed`.
        checkpoint: A `global_step_<N>` folder.
        system: First message of the conversation.
        max_tokens: Maximum number of tokens of a reply; by default `rollout.max_new_tokens`.
        seed: Seed of sampling; by default `runner.seed`.

    Raises:
        ConfigError: Model or engine cannot be loaded, or there is a system message and the model has no chat template.
        CheckpointError: The checkpoint is invalid.
    """
    with open_conversation(cfg, checkpoint, system_text=system, max_tokens=max_tokens, seed=seed) as conversation:
        note(f"{checkpoint.name}; {_COMMANDS}")
        _run_chat(conversation)


@contextlib.contextmanager
def open_conversation(
    cfg: LanguageConfig,
    checkpoint: Path,
    *,
    system_text: str | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
) -> Iterator[Conversation]:
    """Yields a conversation with a checkpoint's model; closes its engine at the end. Arguments and errors as of `chat`."""
    seed = cfg.runner.seed if seed is None else seed
    sampling = SamplingParams(
        max_new_tokens=cfg.rollout.max_new_tokens if max_tokens is None else max_tokens,
        temperature=mapping(cfg.rollout).get("temperature", 1.0),
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
    )
    with contextlib.ExitStack() as exit_stack:
        # Standard output is reserved for replies, and libraries print during import.
        with contextlib.redirect_stdout(sys.stderr):
            folder, _ = exit_stack.enter_context(model_folder(checkpoint, cfg.actor.model.trust_remote_code))
            model_path = next(iter(folders_of(cfg, folder).values()))
            encoder = _make_encoder(cfg, load_tokenizer(model_path, cfg.actor.model.trust_remote_code), system_text)
            engine = make_engine(cfg, model_path=folder, device=str(evaluation_device(cfg)), seed=seed)
        exit_stack.callback(engine.close)
        yield Conversation(engine, encoder, sampling, seed, system_text)


class GeneratingPolicy:
    """Trained language model that answers prompts, for scripts and notebooks.

    Args:
        cfg, checkpoint: As of `chat`.
    """

    def __init__(self, cfg: LanguageConfig, checkpoint: Path) -> None:
        self._exit_stack = contextlib.ExitStack()
        self._conversation = self._exit_stack.enter_context(open_conversation(cfg, checkpoint))

    def generate(self, prompt: str) -> str:
        """Returns the reply to a prompt, sampled as the run's rollouts; each call begins a new conversation.

        Raises:
            ConfigError: The prompt does not fit into the model's context.
        """
        self._conversation.clear()
        return "".join(self._conversation.reply(prompt))

    def close(self) -> None:
        """Closes the engine; has no effect if it is closed."""
        self._exit_stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_encoder(cfg: LanguageConfig, tokenizer: Any, system_text: str | None) -> PromptTokenizer:
    """Returns the tokenizer of the conversation; prints which parts of the run the chat omits."""
    has_template = bool(getattr(tokenizer, "chat_template", None)) and cfg.data.train.chat_template
    if not has_template:
        if system_text is not None:
            raise ConfigError("--system needs a chat template, and this model was trained without one; leave it out")
        note("trained without a chat template: each text is continued by itself")
    if cfg.agent.kind != INLINE or cfg.rollout.agent is not None:
        note("this run trains an agent; here the model answers alone, without its tools and environment")
    return PromptTokenizer(
        tokenizer, cfg.data.max_prompt_tokens, chat_template=has_template, context=context_tokens(cfg, tokenizer)
    )


def _run_chat(conversation: Conversation) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (input() then edits lines)
    while True:
        try:
            question = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        if question.strip() == "/exit":
            return
        if question.strip() == "/clear":
            conversation.clear()
        elif question.strip():
            _print_reply(conversation, question)


def _print_reply(conversation: Conversation, user_text: str) -> None:
    """Prints a reply while the engine generates it."""
    text_pieces = conversation.reply(user_text)
    try:
        for text_piece in text_pieces:
            print(text_piece.translate(_CONTROL_CHARACTERS), end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except ConfigError as error:
        note(f"{error}; /clear begins anew")
        return
    finally:
        text_pieces.close()
    print(flush=True)
