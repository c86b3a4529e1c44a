"""The other end of a lane in the tests: a process that does what it is told on its standard input.

python -m tests.lane_reader FOLDER ADDRESS [lags]
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, BinaryIO

from rlhpc.runtime.comm import device_memory as devices
from rlhpc.runtime.comm.device_memory import DeviceMappings
from tests.stand_in_device import StandIn


class Reader:
    """What it can be told."""

    def __init__(self, device: StandIn) -> None:
        self._device, self._mappings = device, DeviceMappings()
        self._held: list[Any] = []

    def take(self, crossing: Any, reader: int) -> list[Any]:
        """Takes a message, and says what came."""
        self._held = self._mappings.take(crossing, reader)
        return self.held()

    def held(self) -> list[Any]:
        """What the last message has come to by now."""
        return [tensor.clone() for tensor in self._held]

    def run(self) -> None:
        """Lets the device do what it was asked for."""
        self._device.run()

    def settle(self) -> None:
        self._mappings.free_read_buffers()

    def park(self) -> None:
        self._mappings.park()


def serve(reader: Reader, orders: BinaryIO, answers: BinaryIO) -> None:
    """Answers each order with what it returns, or with its error."""
    while True:
        try:
            name, given = pickle.load(orders)
        except EOFError:
            return
        try:
            answer = (True, getattr(reader, name)(*given))
        except Exception as error:
            answer = (False, type(error).__name__)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    folder, address, *flags = sys.argv[1:]
    device = StandIn(Path(folder), address, lags="lags" in flags)
    devices.use(device)
    serve(Reader(device), sys.stdin.buffer, sys.stdout.buffer)
