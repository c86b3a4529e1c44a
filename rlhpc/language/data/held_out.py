"""Held-out rows for the validation loss of runs on demonstrations or preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rlhpc.config.constraints import Fail
from rlhpc.config.typed import changed
from rlhpc.language.data.registry import FILES

if TYPE_CHECKING:
    from rlhpc.language.config.data import HoldoutConfig, SourceConfig

Source = TypeVar("Source", bound="SourceConfig")


def holdout_section(train: Source, holdout: HoldoutConfig) -> tuple[Source, str]:
    """Returns the data section from which the held-out rows are read (as part "eval"), and the section's name in messages.

    The held-out rows are all rows of `data.holdout.path` and `split`. If neither is set, they are the rows that
    `data.train.eval_fraction` excludes from training.

    Args:
        train: Section `data.train`, which sets how rows are read.
        holdout: Section `data.holdout`.
    """
    section = changed(train, "size", None)
    if holdout.path is None and holdout.split is None:
        return section, "data.train"
    for name in ("path", "split"):
        if (holdout_value := getattr(holdout, name)) is not None:
            section = changed(section, name, holdout_value)
    return changed(section, "eval_fraction", 0.0), "data.holdout"


def check_holdout(interval: int, train: SourceConfig, holdout: HoldoutConfig, fail: Fail) -> None:
    """Checks that held-out rows exist if the validation loss is turned on.

    Args:
        interval: `runner.val_check_interval`.
        train, holdout: See `holdout_section`.
        fail: Function that creates the error from a key and a message.

    Raises:
        ConfigError: There are no held-out rows, or they are the training rows.
    """
    if interval <= 0 or train.source.lower() not in FILES:
        return  # procedural sources generate separate problems for evaluation
    sources = {name: getattr(holdout, name) for name in ("path", "split") if getattr(holdout, name) is not None}
    if not sources and train.eval_fraction == 0:
        raise fail(
            "runner.val_check_interval",
            "the loss needs held-out rows: set data.train.eval_fraction, such as 0.05, or data.holdout.path",
        )
    if sources and all(getattr(train, name) == train_value for name, train_value in sources.items()):
        name = next(iter(sources))
        raise fail(
            f"data.holdout.{name}",
            f"data.train.{name} is the same, and so are the rows: name others, or set data.train.eval_fraction instead",
        )
