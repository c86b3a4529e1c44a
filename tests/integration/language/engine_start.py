"""Process that builds a vLLM engine and prints the phases of its start: `python engine_start.py MODEL [PHASE FILE]`.

In PHASE it waits until FILE exists.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_ranks import engine_of

from rlhpc.runtime.start_phases import Phases, connect_reporter

MODEL, HELD_PHASE, FILE = [*sys.argv[1:], "", ""][:3]


def print_phases(phases: Phases) -> None:
    for phase, _ in phases:
        print(phase, flush=True)
        while phase == HELD_PHASE and not Path(FILE).exists():
            time.sleep(0.05)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    connect_reporter(print_phases, [("start", time.time())])
    engine_of("vllm", Path(MODEL)).close()
    print("closed", flush=True)
