"""Access to the transformers package, which not every installation has, and to chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import required
from rlhpc.runtime.text import first_line

if TYPE_CHECKING:
    pass


#: Stands for a reply of which the tokens are known, in what a chat template writes.
REPLY = "REPLYHERE7F3A"


def transformers() -> Any:
    """Returns the transformers package.

    Raises:
        ConfigError: The package is not installed.
    """
    return required("transformers", "language models need transformers")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keeps transformers from drawing a bar for each model that it loads or writes, also into a log file."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens of a tokenizer that are no text, such as `<bos>`."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | added


def template_file(tokenizer: Any) -> str:
    """Returns where a tokenizer's chat template stands: its file, or the model's name."""
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    file = next((folder / name for name in names if folder.name and (folder / name).is_file()), None)
    return str(file or folder.name or "of the tokenizer")


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Returns what a tokenizer's chat template writes for a conversation.

    Raises:
        ConfigError: The template raises; names its file.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **({"tools": list(tools)} if tools else {}),
        )
    except Exception as error:  # jinja's, and whatever a template's author has it raise
        from jinja2 import TemplateError

        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ConfigError(
            f"the chat template refuses a conversation of {roles}: {kind}{first_line(error)} ({template_file(tokenizer)})"
        ) from None
    return text


def turn_end(tokenizer: Any | None) -> int | None:
    """Returns the special token that the chat template puts behind an assistant's message; None if there is none.

    Base models have another end token than their template: `<|endoftext|>` of a text, `<|im_end|>` of a turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    assert tokenizer is not None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}]
    try:
        text = render_chat(tokenizer, turns)
    except ConfigError:
        return None
    special = special_tokens(tokenizer)
    behind: list[int] = tokenizer.encode(text.rpartition(REPLY)[2], add_special_tokens=False) if REPLY in text else []
    return next((token for token in behind if token in special), None)


def load_model_config(model_path: str, trust_remote_code: bool) -> Any:
    """Loads the configuration of a model.

    Raises:
        ConfigError: The model does not exist.
    """
    try:
        return transformers().AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"actor.model.model_path is {model_path!r}, where no model can be loaded from: {first_line(error)}; a folder with "
            "config.json and weights, or the name of a model in the hub's cache, is allowed"
        ) from None


#: Keys of the number of experts in configurations.
EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
