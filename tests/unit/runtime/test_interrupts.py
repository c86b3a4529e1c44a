"""Signals that end a command in order."""

from __future__ import annotations

import signal

import pytest

from rlhpc.runtime.interrupts import Interrupts


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_the_first_signal_interrupts_and_later_ones_do_not_interrupt_the_end(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signum)
        for later in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(later)
        interrupts.check()
    assert signal.getsignal(signum) is before
    with Interrupts() as interrupts:
        with interrupts.deferred():
            signal.raise_signal(signum)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
