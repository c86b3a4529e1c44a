"""Services of agents: ready, or an error that says why not; and another program at their ports."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.language.agents import services
from rlhpc.language.agents.services import Services, fill_addresses
from rlhpc.language.config.agents import ServiceConfig
from rlhpc.runtime.errors import ConfigError

LISTENS = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))"


def section(program: str, name: str = "search", **more: Any) -> ServiceConfig:
    return ServiceConfig(name, [sys.executable, "-c", program, "{port}"], **more)


@pytest.mark.parametrize("ready", ["port", "/", "line: up"])
def test_a_service_whose_port_another_program_has_taken_is_not_ready(
    ready: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was faster: by the time the service starts, its port stands in the list of processes."""
    real, thief = services._start_service, list[socket.socket]()

    def start(*args: Any) -> Any:
        running = real(*args)
        thief.append(socket.create_server(("127.0.0.1", int(running.address.rpartition(":")[2]))))
        return running

    monkeypatch.setattr(services, "_start_service", start)
    with pytest.raises(ConfigError, match=r"services\[search\]: a program that is not this service listens at"):
        Services([section("import time; print('up', flush=True); time.sleep(100)", ready=ready)], tmp_path)
    thief[0].close()


def test_a_service_that_ends_or_loses_its_port_during_the_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_WATCH_S", 0.1)
    stop = tmp_path / "stop"
    program = f"{LISTENS}; import os\nwhile not os.path.exists({str(stop)!r}): time.sleep(0.05)\n"
    for ends, said in (("sys.exit('out of memory')", "ended with status 1 during the run; it said: out of memory"),
                       ("s.close(); time.sleep(100)", "a program that is not this service listens")):  # fmt: skip
        stop.unlink(missing_ok=True)
        made = Services([section(program + ends)], tmp_path)
        try:
            time.sleep(0.2)
            made.check()
            stop.touch()
            port, thief, until = int(made.addresses["search"].rpartition(":")[2]), None, time.monotonic() + 60
            with pytest.raises(ConfigError, match=said):
                while time.monotonic() < until:
                    if thief is None and "close" in ends:
                        with contextlib.suppress(OSError):
                            thief = socket.create_server(("127.0.0.1", port))
                    made.check()
                    time.sleep(0.05)
        finally:
            made.close()
            if thief is not None:
                thief.close()


def test_services_are_ready_or_say_why_not(tmp_path: Path) -> None:
    listen = f"import os; {LISTENS}"
    both = [
        section(f"{listen}; assert os.environ['PORT'] == sys.argv[1]; time.sleep(1000)", "one"),
        section("import os, time; os.fork() or os.setsid(); print('now it is', flush=True); time.sleep(1000)", "two",
                ready="line: now it is"),
    ]  # fmt: skip
    running = Services(both, tmp_path)
    assert running.addresses.keys() == {"one", "two"}
    again = running.addresses
    running.close()
    running = Services(both, tmp_path, again)
    assert running.addresses == again, "whoever knows the old addresses finds them"
    running.close()
    dies = section("import sys; sys.exit('no data here')", "dies")
    with pytest.raises(ConfigError, match=r"services\[dies\] ended with status 1; it said: no data here"):
        Services([both[0], dies], tmp_path)
    slow = section("import time; time.sleep(1000)", "slow", timeout_s=0.5)
    with pytest.raises(ConfigError, match=r"services\[slow\] was not ready \(port\) within timeout_s \(0\.5 s\)"):
        Services([slow], tmp_path)
    assert os.listdir(tmp_path)


def test_addresses_replace_names_in_nested_values() -> None:
    addresses = {"search": "127.0.0.1:7"}
    assert fill_addresses({"url": "http://{search}/x", "args": ["{search}", 3]}, addresses) == {
        "url": "http://127.0.0.1:7/x",
        "args": ["127.0.0.1:7", 3],
    }
