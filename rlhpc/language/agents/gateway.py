"""The gateway: an endpoint in the forms of OpenAI's and Anthropic's, over the engine of this very process.

Anybody's agent speaks to it as to any other, with a key that is its episode. It runs on a loop of its own, in a thread, and
exchanges with the engine's through two queues; so the engine stays where it is, and what steers it (weights, sleep) is no
route that anybody could call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from rlhpc.language.agents.feedback import Feedback
from rlhpc.language.agents.keys import Keys, key_in
from rlhpc.language.agents.messages import Refused, Renderer
from rlhpc.language.agents.messages_api import conversation_of, message_error, message_reply
from rlhpc.language.agents.parsers import Parsers
from rlhpc.language.agents.sessions import Answer, Session
from rlhpc.language.agents.streams import ChatStream, MessageStream
from rlhpc.language.agents.wire import body_of, chat_reply, check_chat, generate_reply
from rlhpc.language.data.pictures import Looker, Seen
from rlhpc.language.engines.base import Completion, SamplingParams
from rlhpc.runtime.scratch import folder_for_sockets

#: Largest body of a call, in bytes.
_BODY = 32 << 20
#: Seconds after which a client that waits for a stream is told that it is not forgotten.
_ALIVE_S = 10.0
_START_S = 60.0
_LOOPBACK = "127.0.0.1"
MODEL = "policy"


@dataclass
class Drawing:
    """What the engine is asked for.

    Attributes:
        session: Who asks.
        prompt_ids, sampling, seed, seen: What is drawn.
        answer: Is called with what was drawn, or why nothing was; by the engine's thread.
        show: Is called with all tokens so far, now and then, where somebody reads along; by the engine's thread.
        given_up: Whether nobody waits for it any more.
    """

    session: Session
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    answer: Callable[[Completion | Exception], None]
    show: Callable[[list[int]], None] | None = None
    given_up: bool = False
    seen: Seen | None = None


class Reading:
    """What a client that reads along gets to see of a draw. On the gateway's loop.

    Attributes:
        prompt: What the model reads; empty before it does.
        ids: What it has drawn so far.
        came: Set when there is more.
    """

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.ids: list[int] = []
        self.came = asyncio.Event()

    def show(self, ids: list[int]) -> None:
        """There is more."""
        self.ids = ids
        self.came.set()


class Gateway:
    """Serves episodes.

    Args:
        tokenizer: Of the model, with its chat template.
        parsers: How replies are read.
        context: Most tokens that the model reads and writes.
        address: Of this host, to listen there for other hosts as well, on a port that the system chooses; "" for none.
        looker: What looks at pictures; None if the model reads text alone.

    Attributes:
        asked: What the engine is to draw.
        keys: Of its episodes.
        feedback: Rewards that come later.
        url: Where it is for this host, without `/v1`.
        far: Where it is for others; "" if it is for none.
        socket: Path of a UNIX socket where it is, too: for sandboxes without a network.
    """

    def __init__(
        self, tokenizer: Any, parsers: Parsers, context: int, address: str = "", looker: Looker | None = None
    ) -> None:
        self.asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self._tokenizer, self._parsers, self._context = tokenizer, parsers, context
        self._renderer = Renderer(tokenizer, looker)
        self._folder = folder_for_sockets("agents")
        self.socket = str(self._folder / "model")
        self.keys = Keys()
        self.feedback = Feedback(lambda: [turn for session in self.keys.sessions() for turn in session.tree.turns])
        self._waiting: set[asyncio.Future[Completion]] = set()
        self._thread = threading.Thread(target=self._serve, name="rlhpc-gateway", daemon=True)
        self._thread.start()
        try:
            found = asyncio.run_coroutine_threadsafe(self._listen(address), self.loop).result(_START_S)
            self.url, self.far = found
        except OSError:
            self.close()
            raise

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _listen(self, address: str) -> tuple[str, str]:
        app = web.Application(client_max_size=_BODY)
        posts = {
            "/v1/chat/completions": self._chat, "/inference/v1/generate": self._generate, "/v1/messages": self._messages,
            "/v1/feedback": self._take_feedback,
        }  # fmt: skip
        app.add_routes([web.get("/v1/models", self._models), *(web.post(*route) for route in posts.items())])
        # A log would have keys in it. What a client that has hung up had asked for need not be drawn.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await self._runner.setup()
        for host in (_LOOPBACK, *([address] if address else ())):
            await web.TCPSite(self._runner, host, 0).start()
        near, *far = [f"http://{host}:{port}" for host, port in self._runner.addresses]
        await web.UnixSite(self._runner, self.socket).start()
        return near, far[0] if far else ""

    def close(self) -> None:
        """Ends it; whoever waits is refused."""

        async def end() -> None:
            for session in self.keys.sessions():
                self.end(session)
            for waiting in list(self._waiting):
                if not waiting.done():
                    waiting.set_exception(Refused("the run has ended", 503))
            with contextlib.suppress(AttributeError):  # it did not come to that
                await self._runner.cleanup()

        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self.loop).result(5.0)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- episodes -------------------------------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """From now on its key is good."""
        self.keys.open(session)

    def end(self, session: Session) -> None:
        """From now on it is not, and what is still drawn for it is lost. On the gateway's loop."""
        session.closed = True
        self.keys.end(session)

    async def chat(self, key: str, role: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        """The model's next message, for who is in this process. On the gateway's loop.

        Raises:
            Refused: There is none.
        """
        session = self.keys.find(key)
        asking = session.chat(
            messages, tools, session.role_of(role), session.sampling_of(None, None), self._renderer, self._parsers, self._draw
        )  # fmt: skip
        answer = await asking
        answer.turn.received = True
        return answer.message

    # -- the engine -----------------------------------------------------------------------------------------------

    async def _draw(
        self, session: Session, prompt: list[int], sampling: SamplingParams, seed: int, seen: Seen | None,
        reading: Reading | None = None,
    ) -> Completion:  # fmt: skip
        waiting: asyncio.Future[Completion] = self.loop.create_future()

        def settle(found: Completion | Exception) -> None:
            if waiting.done():
                return
            if isinstance(found, Exception):
                waiting.set_exception(found)
            else:
                waiting.set_result(found)

        def answer(found: Completion | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(settle, found)

        drawing = Drawing(session, tuple(prompt), sampling, seed, answer, seen=seen)
        if reading is not None:
            reading.prompt = prompt
            drawing.show = partial(self._shown, reading)
        self._waiting.add(waiting)
        self.asked.put(drawing)
        try:
            return await waiting
        finally:
            drawing.given_up = True
            self._waiting.discard(waiting)

    def _shown(self, reading: Reading, ids: list[int]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(reading.show, ids)

    # -- routes ---------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._list)

    async def _list(self, request: web.Request, session: Session) -> web.StreamResponse:
        about = {"object": "model", "created": 0, "owned_by": "rlhpc", "max_model_len": self._context}
        models = [{"id": name, **about} for name in session.limits.roles or (MODEL,)]
        return web.json_response({"object": "list", "data": models})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._answer_chat)

    async def _answer_chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        raw = await request.read()
        body = body_of(raw)
        check_chat(body)
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        most = body.get("max_completion_tokens") or body.get("max_tokens")

        stream, draw, reading = body.get("stream"), self._draw, Reading()

        async def work() -> Answer:
            sampling = session.sampling_of(most, body.get("stop"))
            role = session.role_of(body.get("model"))
            said, drawn = body.get("messages"), partial(draw, reading=reading) if stream else draw
            return await session.chat(said, tools, role, sampling, self._renderer, self._parsers, drawn)

        asking = session.once(raw, _retried(request), work)
        model = str(body.get("model") or MODEL)
        if not stream:
            answer = await asking
            return _received(request, answer, chat_reply(answer, body, model, self._tokenizer))
        return await self._stream(request, asking, ChatStream(body, model, self._tokenizer), reading, tools, _error)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._answer_message, message_error)

    async def _answer_message(self, request: web.Request, session: Session) -> web.StreamResponse:
        raw = await request.read()
        body = body_of(raw)
        messages, tools = conversation_of(body)

        stream, draw, reading = body.get("stream"), self._draw, Reading()

        async def work() -> Answer:
            sampling = session.sampling_of(body.get("max_tokens"), body.get("stop_sequences"))
            role, drawn = session.role_of(body.get("model")), partial(draw, reading=reading) if stream else draw
            return await session.chat(messages, tools, role, sampling, self._renderer, self._parsers, drawn)

        asking, model = session.once(raw, _retried(request), work), str(body.get("model") or MODEL)
        if not stream:
            answer = await asking
            return _received(request, answer, message_reply(answer, model))
        return await self._stream(request, asking, MessageStream(model), reading, tools, message_error)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._answer_generate)

    async def _answer_generate(self, request: web.Request, session: Session) -> web.StreamResponse:
        raw = await request.read()
        body = body_of(raw)
        prompt, wanted = body.get("token_ids"), body.get("sampling_params") or {}
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise Refused("token_ids must be a list of integers, with at least one")
        if self._renderer.looker is not None and self._renderer.looker.token in prompt:
            raise Refused("token_ids has a token of a picture; show pictures by /v1/chat/completions or /v1/messages")
        if wanted.get("n") not in (None, 1):
            raise Refused("n must be 1: ask again for another answer")

        async def work() -> Answer:
            sampling = session.sampling_of(wanted.get("max_tokens"), wanted.get("stop"), wanted.get("stop_token_ids"))
            return await session.tokens(prompt, session.role_of(body.get("model")), sampling, self._draw)

        answer = await session.once(raw, _retried(request), work)
        return _received(request, answer, generate_reply(answer))

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        try:
            self.feedback.take(key_in(request.headers), body_of(await request.read()))
        except Refused as why:
            return web.json_response(_error(why), status=why.status)
        return web.json_response({"status": "taken"})

    async def _guarded(
        self,
        request: web.Request,
        route: Callable[[web.Request, Session], Awaitable[web.StreamResponse]],
        error: Callable[[Refused], dict[str, Any]] | None = None,
    ) -> web.StreamResponse:
        """What a route answers, or why it does not, as its clients understand it."""
        try:
            return await route(request, self.keys.of(request.headers))
        except Refused as why:
            return web.json_response((error or _error)(why), status=why.status)

    async def _stream(
        self,
        request: web.Request,
        asking: Awaitable[Answer],
        stream: ChatStream | MessageStream,
        reading: Reading,
        tools: Any,
        error: Callable[[Refused], dict[str, Any]],
    ) -> web.StreamResponse:
        """Answers with a stream: what is certain of the reply as it is written, then the rest."""
        made = asyncio.ensure_future(asking)
        made.add_done_callback(lambda _: reading.came.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await _more(reading)
            if made.done():
                made.result()  # refused at once: by a status
            await response.prepare(request)
            partly = None if stream.whole else self._parsers.partly(reading.prompt, tools)
            silent_since = self.loop.time()
            while not made.done():
                events = stream.more(len(reading.prompt), *partly.split(reading.ids)) if partly else []
                if not events and self.loop.time() - silent_since >= _ALIVE_S:
                    events = [": waiting\n\n"]  # so that no client takes a slow one for a lost one
                for event in events:
                    await response.write(event.encode())
                    silent_since = self.loop.time()
                await _more(reading)
            try:
                answer = made.result()
            except Refused as why:
                await response.write(f"event: error\ndata: {json.dumps(error(why))}\n\n".encode())
                return response
            *most, last = stream.end(answer)
            for event in most:
                await response.write(event.encode())
            answer.turn.names.append(stream.id)
            before, answer.turn.received = answer.turn.received, True  # its client may be done before this goes on
            try:
                await response.write(last.encode())
                await response.write_eof()
            except ConnectionError:
                answer.turn.received = before
        except ConnectionError:  # nobody is there any more
            pass
        finally:
            made.cancel()
        return response


async def _more(reading: Reading) -> None:
    """Waits for more to read, but not for long."""
    with contextlib.suppress(TimeoutError):
        # not `wait_for`: Python 3.11's forgets that it was cancelled where at that moment there is more, too
        async with asyncio.timeout(_ALIVE_S):
            await reading.came.wait()
        reading.came.clear()  # what comes from now on is for the next time


def _retried(request: web.Request) -> bool:
    """Whether the client's library says that it asks once more."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def _received(request: web.Request, answer: Answer, reply: dict[str, Any]) -> web.Response:
    transport = request.transport
    answer.turn.names.append(reply.get("id") or reply["request_id"])
    if transport is not None and not transport.is_closing():
        answer.turn.received = True
    return web.json_response(reply)


def _error(why: Refused) -> dict[str, Any]:
    return {"error": {"message": str(why), "type": "invalid_request_error", "code": why.code}}
