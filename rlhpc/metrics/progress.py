"""Progress display: a bar on a terminal, periodic lines in a log file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from tqdm import tqdm

from rlhpc.runtime.active_time import active_s

Clock = Callable[[], float]
_BAR = "{desc} {percentage:3.0f}%|{bar}| {unit} {n_fmt}/{total_fmt} [{elapsed}, ETA {remaining}{postfix}]"


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Prevents the terminal from printing `^C` into its output while the block runs; does nothing without a terminal."""
    import termios

    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        foreground = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):
        foreground = False
    if not foreground:  # setting it from the background would stop the process
        yield
        return
    quiet = list(before)
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(fd) == os.getpgrp():
                termios.tcsetattr(fd, termios.TCSADRAIN, before)


#: Displayed facts of a step, in this order.
_ORDER = ("return", "eval", "reward", "accuracy", "loss", "failed", "tokens", "rate")


class ProgressBar:
    """Progress display of a training run: step, return, env steps per second, time left.

    On a terminal it is a bar; elsewhere, one line about every `interval_s` seconds and one at the end.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        *,
        name: str = "train",
        unit: str = "step",
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Clock = active_s,
    ) -> None:
        """Starts the bar.

        Args:
            total: Steps of the run.
            initial: Steps already done before a resume.
            name: Label in front of the bar.
            unit: Unit of the count.
            stream: Output stream; stderr by default.
            interval_s: Seconds between lines if the stream is not a terminal.
            clock: Returns monotonic seconds; tests pass their own.
        """
        self._stream = stream or sys.stderr
        self._total, self._initial, self._step = total, initial, initial
        self._name, self._unit, self._interval, self._clock = name, unit, interval_s, clock
        self._start = self._printed = clock()
        self._facts: dict[str, str] = {}
        self._unprinted = False
        self._bar: tqdm | None = None
        self._quiet = contextlib.ExitStack()
        if self._stream.isatty():
            self._quiet.enter_context(quiet_terminal())
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=name,
                unit=unit,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=_BAR,
            )

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Shows that `step` is done.

        Args:
            step: Global step.
            metrics: The step's row; train/episode_return, time/env_steps_per_s and eval/return_mean are shown.
        """
        facts = self._facts | _facts(metrics or {})
        self._facts = {name: facts[name] for name in _ORDER if name in facts}
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._facts.values()), refresh=False)
            self._bar.update(step - self._step)
        self._step = step
        self._unprinted = True
        if self._bar is None and self._clock() - self._printed >= self._interval:
            self._print()

    def message(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._quiet.close()
        elif self._unprinted:
            self._print()

    def eta_s(self) -> float | None:
        """Returns the seconds left at the average pace so far; None before the first step."""
        done = self._step - self._initial
        return (self._clock() - self._start) / done * max(self._total - self._step, 0) if done > 0 else None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self) -> None:
        eta = self.eta_s()
        parts = [f"{self._name}: {self._unit} {self._step}/{self._total}", *self._facts.values()]
        if eta is not None and self._step < self._total:
            parts.append(f"ETA {tqdm.format_interval(eta)}")
        print(", ".join(parts), file=self._stream, flush=True)
        self._printed, self._unprinted = self._clock(), False


def _facts(metrics: Mapping[str, float]) -> dict[str, str]:
    texts = {}
    if (value := metrics.get("train/episode_return")) is not None and value == value:
        texts["return"] = f"return {value:.1f}"
    if (value := metrics.get("eval/return_mean")) is not None and value == value:
        texts["eval"] = f"eval {value:.1f}"
    for name in ("reward", "accuracy", "loss"):
        # a language model's row has both reward and loss: the reward says more
        if (value := metrics.get(f"train/{name}")) is not None and not (name == "loss" and "reward" in texts):
            texts[name] = f"{name} {value:.3f}"
    if failed := metrics.get("rollout/failed_rewards"):
        texts["failed"] = f"{failed:.0f} of {metrics.get('rollout/step_samples', failed):.0f} not judged"
    tokens = metrics.get("time/tokens_per_s", metrics.get("time/train_tokens_per_s"))
    if tokens is not None:
        texts["tokens"] = f"{tokens:,.0f} tokens/s"
    if (value := metrics.get("time/env_steps_per_s")) is not None and value == value:
        texts["rate"] = f"{value:,.0f} env steps/s"
    return texts
