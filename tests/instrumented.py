"""Worker classes of tests that use locks, timers, profiles, routes and `async` methods; importable by the workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch

from rlhpc import Channel, Worker


class Instrumented(Worker):
    """Worker that uses what a worker has besides messages."""

    def __init__(self) -> None:
        super().__init__()
        self.background: asyncio.Task[str] | None = None

    # -- log ------------------------------------------------------------------------------------------------------

    def speak(self, text: str) -> None:
        self.log_debug(f"debug {text}")
        self.log_info(f"info {text}")
        self.log_warning(f"warning {text} 100%")
        self.log_error(f"error {text}")
        self.log_on_first_rank(f"first {text}")
        self.log_on_last_rank(f"last {text}")

    # -- time -----------------------------------------------------------------------------------------------------

    @Worker.timer("train")
    def train(self, seconds: float) -> int:
        for _ in range(2):
            with self.worker_timer("forward"):
                time.sleep(seconds)
        return self.rank

    @Worker.timer()
    async def generate(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    def unnamed_section(self) -> None:
        with self.worker_timer():
            pass

    @Worker.timer("failing")
    def fail_once(self) -> None:
        raise ValueError("no batch")

    def survive(self) -> str:
        with contextlib.suppress(ValueError):
            self.fail_once()
        return "survived"

    def survive_for(self, seconds: float) -> None:
        time.sleep(seconds)

    @Worker.timer("multiply")
    def multiply(self, size: int) -> float:
        matrix = torch.ones(size, size)
        return float((matrix @ matrix).sum())

    # -- locks ----------------------------------------------------------------------------------------------------

    def hold_device(self, path: str, seconds: float) -> bool:
        """Holds the lock for some time; returns whether it was alone with the accelerators meanwhile."""
        with self.device_lock, self.device_lock:
            marker = Path(path)
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                return False
            time.sleep(seconds)
            marker.unlink()
        return True

    def die_with_device(self) -> None:
        self.device_lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    def lock_device(self) -> float:
        started = time.monotonic()
        with self.device_lock:
            return time.monotonic() - started

    def keep_device(self) -> None:
        self.device_lock.acquire()

    def release_device(self) -> None:
        self.device_lock.release()

    def ports(self, count: int, max_port: int | None = None) -> list[int]:
        return [self.acquire_free_port(max_port) for _ in range(count)]

    def serve(self) -> int:
        port = self.acquire_free_port()
        with socket.socket() as server:
            server.bind(("", port))
            server.listen()
        return port

    # -- async methods --------------------------------------------------------------------------------------------

    async def start_task(self, channel: Channel) -> int:
        """Leaves a task behind that waits for an item; returns how often another task ran while this method waited."""

        async def get() -> str:
            item: str = await channel.get(async_op=True).async_wait()
            return item

        self.background = asyncio.create_task(get())
        count = 0
        for _ in range(5):
            await asyncio.sleep(0)
            count += 1
        return count

    async def finish_task(self) -> str:
        assert self.background is not None
        return await self.background

    async def raise_later(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("raised in a coroutine")

    async def wait_for_item(self, channel: Channel) -> Any:
        return await channel.get(async_op=True).async_wait()

    def shout(self, groups: list[tuple[str, Any]], src: tuple[str, int] | None, async_op: bool) -> Any:
        sent = f"from {self.group_name}-{self.rank}"
        result = self.broadcast(sent, groups, src, async_op)
        return result.wait(20) if async_op else result


class Router(Worker):
    """Worker that exchanges batches with another group by routes."""

    def rows(self, num_rows: int) -> torch.Tensor:
        """Returns this rank's rows of a batch that counts from 0."""
        size = num_rows // self.world_size
        return torch.arange(self.rank * size, (self.rank + 1) * size)

    def send_rows(self, group: str, num_rows: int, channel: Channel | None, options: dict[str, Any]) -> None:
        rows = self.rows(num_rows)
        work = self.send_to(
            group, channel, {"rows": rows, "tag": "x", "none": None}, enable_p2p=channel is None, **options
        )
        if work is not None:
            work.wait(20)

    def receive_rows(self, group: str, channel: Channel | None, options: dict[str, Any]) -> dict[str, Any]:
        received = self.recv_from(group, channel, enable_p2p=channel is None, **options)
        result: dict[str, Any] = received.wait(20) if options.get("async_op") else received
        return result

    def ask(self, group: str, num_rows: int, channel: Channel) -> list[int]:
        """Sends this rank's rows as a request, and returns the reply."""
        self.send_to(group, channel, self.rows(num_rows), mode="train", tag="results", decoupled_mode=True)
        reply: torch.Tensor = self.recv_from(
            group, channel, tag="train_results", batch_size=num_rows, decoupled_mode=True
        )
        return reply.tolist()

    def answer(self, group: str, num_rows: int, channel: Channel, times: int, queue_size: int) -> int:
        """Answers requests with the negative rows, `queue_size` at once; returns how many rows it answered."""
        self.batch_router = {"results": []}
        num_answered = 0
        for _ in range(times):
            rows = self.recv_from(
                group, channel, tag="results", batch_size=num_rows, decoupled_mode=True, recv_queue_size=queue_size
            )
            self.send_to(group, channel, -rows, tag="results", decoupled_mode=True, async_op=True)
            num_answered += len(rows)
        return num_answered
