"""Tiny language model that learns arithmetic on one core: random weights and a character tokenizer.

The following command writes a Hugging Face folder that `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load. The default
model has 0.8M parameters.

    python -m rlhpc.language.models.tiny models/tiny
"""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhpc.language.hugging_face import transformers
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.exit_codes import report_errors
from rlhpc.runtime.files import unwritable

VOCABULARY = string.digits + "+-*= " + string.ascii_lowercase
"""Characters that the default tokenizer knows."""
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# Concatenates the turns' texts; only assistant turns end with an end token.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tiny_model(
    folder: str | Path,
    *,
    vocabulary: str = VOCABULARY,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    context: int = 64,
    seed: int = 0,
) -> int:
    """Writes a Llama model with random weights and a character tokenizer.

    Args:
        folder: Target folder, created if missing.
        vocabulary: Characters that have a token; other characters become `<unk>`.
        hidden: Hidden size; an even multiple of `heads`.
        layers: Number of layers.
        heads: Number of attention heads. vLLM on a CPU requires `hidden / heads` to be 32, 64, 80, 96, 112, 128, …
        context: Maximum number of tokens of prompt and response.
        seed: Seed of the weights; the same seed writes the same bytes.

    Returns:
        Number of parameters.

    Raises:
        ConfigError: The sizes are incompatible.
    """
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(f"hidden={hidden} must be an even multiple of heads={heads}")
    if not vocabulary:
        raise ConfigError("vocabulary is empty; give the characters of prompts and answers")
    package = transformers()
    tokenizer = character_tokenizer(vocabulary, context)
    config = package.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        # Llama's ratio of 8/3, rounded up to a multiple of 8 for vector instructions
        intermediate_size=-(-hidden * 8 // 3 // 8) * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return write_model(folder, package.LlamaForCausalLM, config, tokenizer, seed)


def write_model(folder: str | Path, maker: Callable[[Any], Any], config: Any, tokenizer: Any, seed: int) -> int:
    """Writes a tokenizer and a model with random weights from a seed; returns the number of parameters."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = maker(config).float()
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def character_tokenizer(vocabulary: str = VOCABULARY, context: int = 64) -> Any:
    """Returns a tokenizer with one token per character, `<bos>` before each text, and a chat template that joins turns."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    token_ids = {token: number for number, token in enumerate((*SPECIAL, *dict.fromkeys(vocabulary)))}
    tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", token_ids["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )


def maker_parser(module: str, description: str, **numbers: int) -> argparse.ArgumentParser:
    """Creates the argument parser of a command that writes a model to a folder.

    Args:
        module: Name of the command's module.
        description: Docstring of the module; its first line becomes the description.
        numbers: Integer options with their defaults.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m rlhpc.language.models.{module}", description=description.splitlines()[0]
    )
    parser.add_argument("folder")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    return parser


def write_from_command_line(parser: argparse.ArgumentParser, make: Callable[..., int], argv: list[str] | None) -> int:
    """Parses the command line, writes the model, and prints its number of parameters; returns the exit code."""
    options = vars(parser.parse_args(argv))
    folder = Path(options.pop("folder"))

    def command() -> int:
        if problem := unwritable(folder):
            raise ConfigError(f"the folder is {folder}; {problem}; choose another place")
        print(f"{make(folder, **options)} parameters")
        return 0

    return report_errors(command)


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m rlhpc.language.models.tiny FOLDER`."""
    parser = maker_parser("tiny", __doc__, hidden=128, layers=4, heads=4, context=64, seed=0)
    parser.add_argument("--vocabulary", default=VOCABULARY, help="characters it knows (default: %(default)r)")
    return write_from_command_line(parser, make_tiny_model, argv)


if __name__ == "__main__":
    sys.exit(main())
