"""Registry of loggers: built-in loggers, entry points of group `rlhpc.loggers`, and classes named as `module:Class`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlhpc.config.options import check_options
from rlhpc.metrics.loggers.base import RunLogger
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry, nearest

#: Name of the logger that `MetricLogger` itself implements.
JSONL = "jsonl"
_KEY = "runner.logger.logger_backends"
LOGGERS: Registry[Callable[..., RunLogger]] = Registry(
    "logger", _KEY, "rlhpc.loggers",
    {
        "tensorboard": "rlhpc.metrics.loggers.tensorboard:TensorBoardLogger",
        "wandb": "rlhpc.metrics.loggers.wandb:WandbLogger",
        "mlflow": "rlhpc.metrics.loggers.mlflow:MLflowLogger",
        "swanlab": "rlhpc.metrics.loggers.swanlab:SwanLabLogger",
        "trackio": "rlhpc.metrics.loggers.trackio:TrackioLogger",
    },
)  # fmt: skip
#: Packages that a logger imports, if they differ from its name.
_PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}


def logger_names() -> list[str]:
    """Returns all names of loggers."""
    return [JSONL, *LOGGERS.names()]


def find_logger(name: str) -> Callable[..., RunLogger]:
    """Returns the class of a logger, without importing the package of its service.

    Raises:
        ConfigError: The logger is unknown, or its package is not installed.
    """
    lower_name = name.lower()
    if ":" not in name and lower_name not in LOGGERS.names():
        raise ConfigError(_format_unknown_logger(_KEY, name))
    packages = _PACKAGES.get(lower_name, (lower_name,)) if lower_name in LOGGERS.built_in else ()
    missing_packages = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing_packages:
        raise ConfigError(
            f"{_KEY} has {name!r}, whose package {missing_packages[0]} is not installed; install it with: "
            f"pip install 'rlhpc[{lower_name}]'"
        )
    logger_class = LOGGERS.find(name)
    if not all(hasattr(logger_class, method) for method in ("open", "log", "commit", "close")):
        raise ConfigError(f"{_KEY} has {name!r}, which is not a class with the methods open, log, commit and close")
    return logger_class


def build_loggers(requested_names: Iterable[str], kwargs: Mapping[str, Any]) -> dict[str, RunLogger]:
    """Returns the loggers of a run by name, without `jsonl`, not yet open.

    Args:
        requested_names: `runner.logger.logger_backends`.
        kwargs: `runner.logger.kwargs`: name → arguments of its class.

    Raises:
        ConfigError: A name is unknown, a package is missing, or an argument is not accepted.
    """
    classes = {name: find_logger(name) for name in requested_names if name.lower() != JSONL}
    allowed_names = {*map(str.lower, classes), *logger_names()}
    for name, arguments in kwargs.items():
        if str(name).lower() not in allowed_names:
            raise ConfigError(_format_unknown_logger("runner.logger.kwargs", str(name)))
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"runner.logger.kwargs.{name} is {arguments!r}; write a mapping of arguments")
    arguments_by_name = {str(name).lower(): arguments for name, arguments in kwargs.items()}
    return {name: _build_logger(name, cls, arguments_by_name.get(name.lower(), {})) for name, cls in classes.items()}


def check_loggers(names: Iterable[str], kwargs: Mapping[str, Any]) -> None:
    """Checks that a run can use these loggers: raises the errors of `build_loggers`, and writes nothing."""
    build_loggers(names, kwargs)


def _build_logger(name: str, logger_class: Callable[..., RunLogger], arguments: Mapping[str, Any]) -> RunLogger:
    key = f"runner.logger.kwargs.{name}"
    options = check_options(logger_class, arguments, key, f"logger {name}")
    try:
        return logger_class(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from None


def _format_unknown_logger(key: str, name: str) -> str:
    known_names = logger_names()
    message = f"{key}: {name!r} is not a logger{nearest(name, known_names)} choose from {', '.join(known_names)}"
    return f"{message}, or name a class as module:Class"
