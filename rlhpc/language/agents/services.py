"""Services of agents (`agent.services`): programs such as a search engine, a database, or the server of an environment."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlhpc.language.config.agents import ServiceConfig
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.proxies import without_proxy
from rlhpc.runtime.scratch import make_socket_folder, make_temporary_folder
from rlhpc.runtime.tcp_sockets import loopback_listeners, socket_inodes

log = logging.getLogger(__name__)
_LOOPBACK, _POLL_S, _STOP_S, _TAIL = "127.0.0.1", 0.05, 8.0, 600
#: Seconds between two checks of running services.
_WATCH_S = 2.0


@dataclass
class _RunningService:
    """Running service. `log_file` receives its output; `listeners` are the inodes of its checked listening sockets."""

    section: ServiceConfig
    address: str
    process: subprocess.Popen[bytes]
    log_file: Path
    listeners: frozenset[int] = frozenset()

    def has_foreign_listener(self) -> bool:
        """Returns whether another program listens at the service's port and could receive its connections."""
        listeners = loopback_listeners(int(self.address.rpartition(":")[2]))
        inodes = frozenset(listener.inode for listener in listeners)
        if inodes <= self.listeners:
            return False
        if any(listener.uid != os.getuid() for listener in listeners):
            return True
        pids = [self.process.pid]
        with contextlib.suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        service_inodes = socket_inodes(pids)
        if service_inodes is not None and not inodes <= service_inodes:
            return True
        self.listeners = inodes
        return False

    def tail(self) -> str:
        """Formats the end of the service's output as a clause of an error message."""
        log_text = self.log_file.read_bytes()[-_TAIL:].decode(errors="replace").strip()
        return f"; it said: {log_text}" if log_text else "; it said nothing"


class Services:
    """Running services, which `close` ends. Each service gets a free port of the loopback address.

    Args:
        sections: `agent.services`.
        folder: Folder of the log files; None for a temporary folder.
        ports: Addresses of an earlier start, which are reused if they are free.

    Attributes:
        addresses: Address `host:port` of each service, by name.

    Raises:
        ConfigError: A service cannot be started, or was not ready in time.
    """

    def __init__(
        self, sections: Sequence[ServiceConfig], folder: Path | None = None, ports: Mapping[str, str] | None = None
    ) -> None:
        self._temporary_folder = make_temporary_folder("services") if sections and not folder else None
        log_folder = folder or self._temporary_folder or Path()
        self._services: list[_RunningService] = []
        try:
            for section in sections:
                self._services.append(_start_service(section, log_folder, (ports or {}).get(section.name)))
            for service in self._services:
                _await_ready(service)
        except BaseException:
            self.close()
            raise
        self.addresses = {service.section.name: service.address for service in self._services}
        self._next_check_at = time.monotonic() + _WATCH_S

    def check(self) -> None:
        """Checks that the services still run and own their ports.

        Raises:
            ConfigError: A service has ended, or another program has its port.
        """
        if time.monotonic() < self._next_check_at:
            return
        self._next_check_at = time.monotonic() + _WATCH_S
        for service in self._services:
            name, status = service.section.name, service.process.poll()
            if status is not None:
                raise ConfigError(f"agent.services[{name}] ended with status {status} during the run{service.tail()}")
            if service.has_foreign_listener():
                raise ConfigError(_format_foreign_error(service))

    def close(self) -> None:
        """Ends the services, with all their descendants."""
        for service in self._services:
            assert service.process.stdin is not None
            service.process.stdin.close()
        for service in self._services:
            try:
                service.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
        self._services.clear()
        if self._temporary_folder is not None:
            shutil.rmtree(self._temporary_folder, ignore_errors=True)


def fill_addresses(config_value: Any, addresses: Mapping[str, str]) -> Any:
    """Replaces service names in braces by addresses, in all texts of a nested value."""
    if isinstance(config_value, str):
        for name, address in addresses.items():
            config_value = config_value.replace(f"{{{name}}}", address)
        return config_value
    if isinstance(config_value, Mapping):
        return {key: fill_addresses(child, addresses) for key, child in config_value.items()}
    return (
        [fill_addresses(child, addresses) for child in config_value]
        if isinstance(config_value, (list, tuple))
        else config_value
    )


def _start_service(section: ServiceConfig, folder: Path, earlier_address: str | None) -> _RunningService:
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((_LOOPBACK, int(earlier_address.rpartition(":")[2]) if earlier_address else 0))
        except OSError:
            probe_socket.bind((_LOOPBACK, 0))
        port = probe_socket.getsockname()[1]
    command = [argument.replace("{port}", str(port)) for argument in section.command]
    log_file = folder / f"service-{section.name}-{os.uname().nodename}.log"
    with log_file.open("ab") as file:
        process = subprocess.Popen(
            run_module("rlhpc.language.agents.runner.keeper", *command),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={**os.environ, **without_proxy(), "PORT": str(port)},
        )
    return _RunningService(section, f"{_LOOPBACK}:{port}", process, log_file)


def _await_ready(service: _RunningService) -> None:
    section = service.section
    deadline = time.monotonic() + section.timeout_s
    # Another program at this address must not count as the service.
    while not (_is_ready(service) and service.process.poll() is None and not service.has_foreign_listener()):
        status = service.process.poll()
        if service.has_foreign_listener():
            raise ConfigError(_format_foreign_error(service))
        if status is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            continue
        reason = f"was not ready ({section.ready}) within timeout_s ({section.timeout_s:g} s)"
        if status is not None:
            reason = f"ended with status {status}"
        raise ConfigError(f"agent.services[{section.name}] {reason}{service.tail()}")
    log.info("service %s is ready at %s", section.name, service.address)


def _format_foreign_error(service: _RunningService) -> str:
    return (
        f"agent.services[{service.section.name}]: a program that is not this service listens at its address {service.address} "
        f"(another user's, or of this user outside it){service.tail()}. Start the run again: it takes another port"
    )


def _is_ready(service: _RunningService) -> bool:
    readiness_path, (host, _, port) = service.section.ready, service.address.partition(":")
    if readiness_path.startswith("line:"):
        return readiness_path[5:].strip().encode() in service.log_file.read_bytes()
    try:
        if not loopback_listeners(int(port)) or service.has_foreign_listener():
            return False
        if readiness_path == "port":
            socket.create_connection((host, int(port)), 1.0).close()
            return True
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=5.0)) as connection:
            connection.request("GET", readiness_path)
            return connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False


_CHUNK = 1 << 16
_START_S = 60.0


class Relays:
    """UNIX sockets that relay connections to gateways on other nodes, with one socket per gateway."""

    def __init__(self) -> None:
        self._folder = make_socket_folder("agents")
        self._sockets: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlhpc-relays", daemon=True)
        self._thread.start()

    def socket_for(self, url: str) -> str:
        """Returns the path of the socket that relays to a gateway; starts the relay at the first call."""
        if url not in self._sockets:
            path = str(self._folder / f"model-{len(self._sockets)}")
            asyncio.run_coroutine_threadsafe(self._listen(url, path), self._loop).result(_START_S)
            self._sockets[url] = path
        return self._sockets[url]

    async def _listen(self, url: str, path: str) -> None:
        target_url = urllib.parse.urlsplit(url)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                upstream, upstream_writer = await asyncio.open_connection(target_url.hostname, target_url.port)
                await asyncio.gather(_copy_stream(reader, upstream_writer), _copy_stream(upstream, writer))
            writer.close()

        await asyncio.start_unix_server(relay, path)

    def close(self) -> None:
        """Closes the relays."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(OSError):  # the other direction may continue
        writer.write_eof()
