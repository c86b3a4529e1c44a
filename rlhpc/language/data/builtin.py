"""Models that need no download: `builtin:tiny` and `builtin:smollm2`, made on first use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.model_config import FrozenModelConfig

PREFIX = "builtin:"
MODELS = ("tiny", "smollm2")


def resolve_model(model: FrozenModelConfig | str, folder: Path | None = None) -> str:
    """What transformers is to load for `actor.model`: the path as it stands, or the folder of a built-in model.

    Args:
        model: `actor.model`: model_path; and kwargs, which `builtin:tiny` takes (see `make_tiny_model`). Or a path alone.
        folder: Where built-in models are kept; default `RLHPC_MODELS`, or `models` in the working directory.

    Raises:
        ConfigError: There is no such built-in model, or it does not take these kwargs.
    """
    path = model if isinstance(model, str) else str(model.model_path)
    if not path.startswith(PREFIX):
        return str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
    name = path.removeprefix(PREFIX).lower()
    if name not in MODELS:
        raise ConfigError(f"actor.model.model_path is {path!r}; built-in models: builtin:tiny, builtin:smollm2")
    options = {} if isinstance(model, str) else {str(key): value for key, value in dict(model.kwargs).items()}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    parent = folder or Path(os.environ.get("RLHPC_MODELS", "models"))
    target = (parent / (f"{name}-{digest}" if options else name)).absolute()
    if not (target / "config.json").is_file():
        _make(name, target, options)
    return str(target)


def _make(name: str, target: Path, options: dict[str, Any]) -> None:
    """Makes the folder beside its place and moves it there: another process may be doing the same."""
    from rlhpc.language.data.packaged import smollm2
    from rlhpc.language.data.tiny import make_tiny_model

    staging = target.with_name(f".{target.name}-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if name == "tiny":
            try:
                make_tiny_model(staging, **options)
            except TypeError as error:
                raise ConfigError(f"actor.model.kwargs: builtin:tiny: {error}") from None
        elif options:
            raise ConfigError(f"actor.model.kwargs: builtin:{name} takes none; found {', '.join(options)}")
        else:
            smollm2(staging)
        try:
            staging.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
