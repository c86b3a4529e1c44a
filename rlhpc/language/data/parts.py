"""Which problems belong to evaluation, and which of the procedural ones are made."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config import DataSourceConfig

DEFAULT_SIZE = {"train": 10_000, "eval": 500}
"""Procedural problems that are made if `size` is null, or all if there are fewer."""
_HELD_OUT = 0.2
_LISTED = 200_000
"""Up to this many possible problems are listed and shuffled; if there are more, some are drawn."""


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a problem is on evaluation's side, for ever and on every machine: a hash of the problem itself decides.

    What a smaller fraction holds out, a larger one does too.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def belongs(text: str, part: str, fraction: float) -> bool:
    """Whether a problem belongs to `part` ("train" or "eval"); with fraction 0 each problem belongs to both."""
    return fraction == 0 or is_held_out(text, fraction) == (part == "eval")


def procedural_fraction(cfg: DataSourceConfig) -> float:
    """Fraction that a procedural source holds out: a fifth, unless the configuration says otherwise."""
    return cfg.eval_fraction or _HELD_OUT


def arguments(cfg: DataSourceConfig) -> dict[str, Any]:
    """`kwargs` of a section, as plain Python."""
    from omegaconf import OmegaConf

    given = OmegaConf.to_container(cfg.kwargs, resolve=True) if OmegaConf.is_config(cfg.kwargs) else dict(cfg.kwargs)
    assert isinstance(given, dict)
    return {str(name): value for name, value in given.items()}


def choose(
    cfg: DataSourceConfig, sizes: Sequence[int], keep: Callable[[int], bool], *, part: str, key: str
) -> list[int]:
    """Numbers of `cfg.size` different problems, in an order that `cfg.seed` alone decides.

    Args:
        cfg: A section `data.train` or `data.eval[i]`.
        sizes: How many problems each level has; they are numbered through.
        keep: Whether a problem is in the part.
        part: "train" or "eval".
        key: What messages call the section.

    Raises:
        ConfigError: There are not that many.
    """
    rng = random.Random(f"{cfg.source} {cfg.seed}")
    total = sum(sizes)
    wanted = cfg.size or DEFAULT_SIZE[part]
    if total <= _LISTED:
        numbers = [number for number in range(total) if keep(number)]
        rng.shuffle(numbers)
        if cfg.size and cfg.size > len(numbers):
            raise ConfigError(
                f"{key}.size is {cfg.size}, but only {len(numbers)} of all {total} problems are in the {part} part; "
                f"leave size out to take up to {DEFAULT_SIZE[part]}, or make kwargs allow more problems"
            )
        return numbers[:wanted]
    fraction = procedural_fraction(cfg)
    most = int(total * (fraction if part == "eval" else 1 - fraction) / 2)
    if wanted > most:
        raise ConfigError(f"{key}.size is {wanted}; at most {most} problems can be drawn of {total}")
    # A dict keeps the order of drawing.
    drawn: dict[int, None] = {}
    while len(drawn) < wanted:
        # Levels are equally frequent: drawn from all problems, nearly every one would be of the hardest level.
        level = rng.randrange(len(sizes))
        number = sum(sizes[:level]) + rng.randrange(sizes[level])
        if number not in drawn and keep(number):
            drawn[number] = None
    return list(drawn)


def choose_contents(
    cfg: DataSourceConfig, sizes: Sequence[int], content: Callable[[int], str], *, part: str, key: str
) -> list[int]:
    """Returns numbers of `cfg.size` problems with different contents, as `choose`, where numbers may have the same content.

    Args:
        cfg: A section `data.train` or `data.eval[i]`.
        sizes: How many numbers each level has; they are numbered through.
        content: Describes all that a problem shows. It decides the part, whatever the seed and the number.
        part: "train" or "eval".
        key: What messages call the section.

    Raises:
        ConfigError: There are not that many.
    """
    rng, fraction = random.Random(f"{cfg.source} {cfg.seed}"), procedural_fraction(cfg)
    count, total = cfg.size or DEFAULT_SIZE[part], sum(sizes)
    numbers = range(total) if total <= _LISTED else rng.sample(range(total), _LISTED)
    order = list(numbers)
    rng.shuffle(order)
    chosen: dict[bytes, int] = {}
    for number in order:
        text = content(number)
        if belongs(text, part, fraction):
            chosen.setdefault(hashlib.blake2b(text.encode(), digest_size=16).digest(), number)
        if len(chosen) == count:
            break
    if cfg.size and len(chosen) < cfg.size:
        raise ConfigError(
            f"{key}.size is {cfg.size}, but only {len(chosen)} different problems are in the {part} part; leave size out to "
            f"take up to {DEFAULT_SIZE[part]}, or make kwargs allow more problems"
        )
    return list(chosen.values())


def locate(number: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Level of a problem, and its number in the level."""
    for level, size in enumerate(sizes):
        if number < size:
            return level, number
        number -= size
    raise IndexError(number)
