"""Entry point of ranks that a fork server starts in tests; the specification's body is the action."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhpc.runtime.worker_spec import WorkerSpec


def set_variable() -> None:
    """What a library may do at import."""
    os.environ["RLHPC_TEST_IMPORTED"] = "by the server"


def open_device() -> None:
    """What a library that wakes an accelerator's driver does at import; the device is a file of the test's."""
    set_variable()
    os.open(os.environ["RLHPC_TEST_DEVICE_FILE"], os.O_RDWR | os.O_CREAT)


def fail() -> None:
    """What a library does that does not expect to be imported here."""
    raise RuntimeError("no driver")


def note_import() -> None:
    """Notes the process that imports, in the working directory."""
    with open("imports", "a") as file:
        print(os.getpid(), file=file)


def crash() -> None:
    """What a library does whose native code is broken."""
    os.kill(os.getpid(), signal.SIGKILL)


def import_slowly() -> None:
    """What an import does on a slow filesystem; the test ends it."""
    while not os.path.exists("go on"):
        time.sleep(0.01)


def import_endlessly() -> None:
    """What an import does on a filesystem that hangs."""
    signal.pause()


def call(item: str) -> None:
    """Imports a module, or calls a function (`module:function`)."""
    module, _, name = item.partition(":")
    imported = importlib.import_module(module)
    if name:
        getattr(imported, name)()


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
        case ["write", name]:
            log.write_text(os.environ.get(name, ""))
        case ["parent"]:
            log.write_text(str(os.getppid()))
        case ["import", *items]:
            for item in items:
                call(item)
        case ["read"]:
            print(sys.stdin.read(), flush=True)
        case ["wait", "on"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            log.write_text("waiting")
            while True:
                signal.pause()
        case ["wait"]:
            log.write_text("waiting")
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(run(pickle.loads(sys.stdin.buffer.read())))
