"""Entry point of ranks that a fork server starts in tests; the specification's body is the action."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from rlhpc.runtime.worker_spec import WorkerSpec


def run(spec: WorkerSpec) -> int:
    """Runs a rank; returns its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = Path(spec.log_out)
    match spec.body.decode().split():
        case ["exit", status]:
            return int(status)
        case ["raise"]:
            raise ValueError("a rank's error")
        case ["leave", "child"]:
            log.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        case ["environment", name]:
            print(os.environ.get(name), os.getsid(0) == os.getpid(), flush=True)
        case ["wait"]:
            log.write_text("waiting")
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(run(pickle.loads(sys.stdin.buffer.read())))
