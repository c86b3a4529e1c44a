"""Programs that agents need beside the model: a search engine, a database, the server of an environment (`agent.services`)."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.language.agent_config import ServiceConfig
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.import_paths import run_module

log = logging.getLogger(__name__)
_LOOPBACK, _LOOK_S, _END_S, _TAIL = "127.0.0.1", 0.05, 8.0, 600


@dataclass
class _Running:
    """A service. `said` is the file with what it prints."""

    section: ServiceConfig
    address: str
    process: subprocess.Popen[bytes]
    said: Path


class Services:
    """Runs them until it is closed, each at a port of the system's choice on the loopback address.

    Args:
        sections: `agent.services`.
        folder: Where what they print is written; None is a temporary folder.
        ports: Where they were before, if they were.

    Attributes:
        addresses: By name, `host:port`.

    Raises:
        ConfigError: One cannot be started, or was not ready in time.
    """

    def __init__(
        self, sections: Sequence[ServiceConfig], folder: Path | None = None, ports: Mapping[str, str] | None = None
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="rlhpc-services-") if sections and not folder else None
        where = folder or Path(self._temporary.name if self._temporary else "")
        self._running: list[_Running] = []
        try:
            for section in sections:
                self._running.append(_start(section, where, (ports or {}).get(section.name)))
            for running in self._running:
                _await_ready(running)
        except BaseException:
            self.close()
            raise
        self.addresses = {running.section.name: running.address for running in self._running}

    def close(self) -> None:
        """Ends them, with all that they have started."""
        for running in self._running:
            assert running.process.stdin is not None
            running.process.stdin.close()
        for running in self._running:
            try:
                running.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self._running.clear()
        if self._temporary is not None:
            self._temporary.cleanup()


def placed_in(value: Any, addresses: Mapping[str, str]) -> Any:
    """A text, or texts in lists and mappings, with services' addresses in place of their names in braces."""
    if isinstance(value, str):
        for name, address in addresses.items():
            value = value.replace(f"{{{name}}}", address)
        return value
    if isinstance(value, Mapping):
        return {key: placed_in(part, addresses) for key, part in value.items()}
    return [placed_in(part, addresses) for part in value] if isinstance(value, (list, tuple)) else value


def _start(section: ServiceConfig, folder: Path, before: str | None) -> _Running:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((_LOOPBACK, int(before.rpartition(":")[2]) if before else 0))
        except OSError:
            free.bind((_LOOPBACK, 0))
        port = free.getsockname()[1]
    command = [word.replace("{port}", str(port)) for word in section.command]
    said = folder / f"service-{section.name}-{os.uname().nodename}.log"
    with said.open("ab") as file:
        process = subprocess.Popen(
            run_module("rlhpc.language.agents.keeper", *command), stdin=subprocess.PIPE, stdout=file, stderr=file,
            env={**os.environ, "PORT": str(port)},
        )  # fmt: skip
    return _Running(section, f"{_LOOPBACK}:{port}", process, said)


def _await_ready(running: _Running) -> None:
    section = running.section
    deadline = time.monotonic() + section.timeout_s
    while not _is_ready(running):
        ended = running.process.poll()
        if ended is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            continue
        tail = running.said.read_bytes()[-_TAIL:].decode(errors="replace").strip()
        why = f"ended with status {ended}" if ended is not None else (
            f"was not ready ({section.ready}) within timeout_s ({section.timeout_s:g} s)"
        )  # fmt: skip
        raise ConfigError(
            f"agent.services[{section.name}] {why}" + (f"; it said: {tail}" if tail else "; it said nothing")
        )
    log.info("service %s is ready at %s", section.name, running.address)


def _is_ready(running: _Running) -> bool:
    ready, (host, _, port) = running.section.ready, running.address.partition(":")
    if ready.startswith("line:"):
        return ready[5:].strip().encode() in running.said.read_bytes()
    try:
        if ready == "port":
            socket.create_connection((host, int(port)), 1.0).close()
            return True
        connection = http.client.HTTPConnection(host, int(port), timeout=5.0)
        try:
            connection.request("GET", ready)
            return connection.getresponse().status < 400
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False
