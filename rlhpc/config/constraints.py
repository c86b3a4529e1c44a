"""Ranges of a configuration's numbers, including those of the sections that all task types have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.typed import select
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import meant

#: Makes the error for a key and the rule that it breaks.
Fail = Callable[[str, str], ConfigError]


def check_choice(key: str, value: str, allowed: Iterable[str], fail: Fail) -> None:
    """Raises an error if a value is not one of a few words; case does not matter.

    Raises:
        ConfigError: The value is another word; the message names the nearest and all allowed words.
    """
    check_name(key, value.lower(), allowed, fail)


def check_name(key: str, value: str, allowed: Iterable[str], fail: Fail) -> None:
    """Raises an error if a name that the user has chosen is not allowed; case matters.

    Raises:
        ConfigError: The name is not allowed; the message names the nearest and all allowed names.
    """
    allowed = list(allowed)
    if value not in allowed:
        raise fail(key, f"{meant(value, allowed)}allowed: {', '.join(allowed)}")


#: Greatest integer that every reader of a configuration can tell from its neighbours.
LARGEST = 2**53
_SEED = 2**32 - 1


@dataclass(frozen=True)
class Range:
    """Interval, with an optional number outside it that has a meaning, such as -1 for none; null stands for that number.

    Attributes:
        low, high: Bounds; None means unbounded.
        above, below: Exclude the lower or the upper bound itself.
        also: A number outside the interval that is allowed, and its meaning.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    also: tuple[float, str] | None = None

    def __contains__(self, number: float) -> bool:
        if self.also is not None and number == self.also[0]:
            return True
        if self.low is not None and (number < self.low or (self.above and number == self.low)):
            return False
        return self.high is None or number < self.high or (number == self.high and not self.below)

    def rule(self) -> str:
        """Formats the rule in words, for messages."""
        return f"it must {self._words()}{'' if self.also is None else f', or {self.also[0]:g} for {self.also[1]}'}"

    def _words(self) -> str:
        if self.low is not None and self.high is not None:
            if not self.above and not self.below:
                return f"lie between {_plain(self.low)} and {_plain(self.high)}"
            return (
                f"be {'above' if self.above else 'at least'} {_plain(self.low)} and "
                f"{'below' if self.below else 'at most'} {_plain(self.high)}"
            )
        if self.low == 0:
            return "be greater than 0" if self.above else "not be negative"
        return f"be {'above' if self.above else 'at least'} {_plain(self.low or 0)}"

    def short(self) -> str:
        """Formats the range as an interval, for a table: `(0, 10]`; empty if everything is allowed."""
        if self.low is None and self.high is None:
            return ""
        low = "-∞" if self.low is None else _plain(self.low)
        high = "∞" if self.high is None else _plain(self.high)
        closed = self.high is not None and not self.below
        interval = f"{'[' if self.low is not None and not self.above else '('}{low}, {high}{']' if closed else ')'}"
        return interval if self.also is None else f"{interval} or {_plain(self.also[0])} (null)"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


ANY = Range()
COUNT = Range(0, above=True)
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
PART = Range(0, 1, below=True)
RATE = Range(0, 10, above=True)
INTERVAL = Range(1, also=(-1, "none"))
INTERVAL_OR_0 = Range(1, also=(0, "none"))
SEED = Range(0, _SEED)

#: Ranges of `cluster.elastic`, for task types whose ranks may join and leave.
ELASTIC_RANGES: dict[str, Range] = {
    "cluster.elastic[].cpus_per_node": COUNT,
    "cluster.elastic[].min": NOT_NEGATIVE,
    "cluster.elastic[].max": COUNT,
    "cluster.elastic[].ranks_per_job": COUNT,
    "cluster.elastic[].accelerators_per_rank": NOT_NEGATIVE,
    "cluster.elastic[].max_gpu_hours": POSITIVE,
    "cluster.elastic[].start_within_s": NOT_NEGATIVE,
    "cluster.elastic[].react_s": NOT_NEGATIVE,
    "cluster.elastic[].look_s": Range(5),  # each look is a command or two of Slurm, from every such run
    "cluster.elastic[].signal_lead_s": Range(1, 65535),
}

RANGES: dict[str, Range] = {
    "cluster.num_nodes": COUNT,
    "cluster.cpus_per_node": COUNT,
    "cluster.accelerators_per_node": NOT_NEGATIVE,
    "cluster.signal_lead_s": Range(1, 65535),  # what Slurm accepts for --signal
    "cluster.node_groups[].num_nodes": COUNT,
    "cluster.node_groups[].cpus_per_node": COUNT,
    "cluster.node_groups[].accelerators_per_node": NOT_NEGATIVE,
    "cluster.node_groups[].het_component": NOT_NEGATIVE,
    "runner.seed": SEED,
    "runner.max_steps": INTERVAL,
    "runner.max_epochs": INTERVAL,
    "runner.save_interval": INTERVAL,
    "runner.keep_checkpoints": NOT_NEGATIVE,
    "runner.patience": NOT_NEGATIVE,
    "runner.segments": COUNT,
    "runner.max_restarts": NOT_NEGATIVE,
    "runner.save_reserve_s": NOT_NEGATIVE,
    "runner.rendezvous_timeout_s": POSITIVE,
    "runner.step_timeout_s": POSITIVE,
    "actor.optim.lr": RATE,  # one step of Adam moves a weight by about as much
    "actor.optim.adam_beta1": PART,
    "actor.optim.adam_beta2": PART,
    "actor.optim.adam_eps": Range(0, 1, above=True),
    "actor.optim.weight_decay": Range(0, 100),
    "actor.optim.clip_grad": POSITIVE,
    "actor.lora.rank": NOT_NEGATIVE,
    "actor.lora.alpha": COUNT,
    "actor.lora.dropout": PART,
    "actor.deepspeed.zero_stage": Range(1, 3),
    **{f"actor.parallel.{name}": COUNT for name in ("replicate", "shard", "context", "tensor", "expert")},
    "workflow.eval_job.cpus": COUNT,
    "workflow.convert_job.cpus": COUNT,
}


def null_numbers(ranges: Mapping[str, Range]) -> dict[str, int]:
    """Returns the number that null stands for, by key."""
    return {key: int(allowed.also[0]) for key, allowed in ranges.items() if allowed.also is not None}


def check_ranges(cfg: object, ranges: Mapping[str, Range], fail: Fail) -> None:
    """Raises an error for a number outside its range; null is allowed where the schema allows it.

    Raises:
        ConfigError: Names the first number outside its range.
    """
    for key, allowed in ranges.items():
        for path, value in _values_at(cfg, key):
            for number in value if OmegaConf.is_list(value) else (value,):
                if number is not None and number not in allowed:
                    raise fail(path, allowed.rule())


def _values_at(cfg: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yields each value at a key with its full key; for `list[].name`, those of all elements."""
    section, is_list, name = key.partition("[].")
    if not is_list:
        yield key, select(cfg, key)
        return
    for index, element in enumerate(select(cfg, section) or ()):
        yield f"{section}[{index}].{name}", select(element, name)
