"""An engine whose answers are its process's own, and which is killed while it hands some over; named as `dying:Uneven`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhpc.language.engines import Request
from rlhpc.language.engines.hf import HFRollout
from rlhpc.runtime.channel import Channel


class Uneven(HFRollout):
    """The engine hf, with other random numbers in each process: a prompt that is drawn again has other answers, and others of
    them, as where an engine's numbers depend on what else it has under way."""

    def add(self, requests: Iterable[Request]) -> None:
        super().add([replace(request, seed=request.seed ^ os.getpid()) for request in requests])


def _dies_before(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has the process be killed before it puts something into the channel that a file names, once."""

    def put(channel: Channel, *args: Any, **options: Any) -> Any:
        order = Path(os.environ["RLHPC_TEST_DIES"])
        try:
            if order.read_text() == channel.name:
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        except FileNotFoundError:
            pass
        return method(channel, *args, **options)

    return put


Channel.entrust = _dies_before(Channel.entrust)  # type: ignore[method-assign]
Channel.put = _dies_before(Channel.put)  # type: ignore[method-assign]
