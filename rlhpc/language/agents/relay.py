"""A UNIX socket on this node that leads to a gateway on another: the way out of a sandbox without a network."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import urllib.parse

from rlhpc.runtime.scratch import folder_for_sockets

_CHUNK = 1 << 16
_START_S = 60.0


class Relays:
    """Leads to gateways on other nodes, by one socket each."""

    def __init__(self) -> None:
        self._folder = folder_for_sockets("agents")
        self._sockets: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlhpc-relays", daemon=True)
        self._thread.start()

    def to(self, url: str) -> str:
        """The path of the socket that leads to a gateway."""
        if url not in self._sockets:
            path = str(self._folder / f"model-{len(self._sockets)}")
            asyncio.run_coroutine_threadsafe(self._listen(url, path), self._loop).result(_START_S)
            self._sockets[url] = path
        return self._sockets[url]

    async def _listen(self, url: str, path: str) -> None:
        where = urllib.parse.urlsplit(url)

        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(where.hostname, where.port)
                await asyncio.gather(_pass(reader, back), _pass(there, writer))
            writer.close()

        await asyncio.start_unix_server(lead, path)

    def close(self) -> None:
        """Ends them."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):  # the other direction may go on
        writer.write_eof()
