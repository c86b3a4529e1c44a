"""The gateway: an endpoint in the forms of OpenAI's and Anthropic's, over the engine of this very process.

Anybody's agent speaks to it as to any other, with a key that is its episode. It runs on a loop of its own, in a thread, and
exchanges with the engine's through two queues; so the engine stays where it is, and what steers it (weights, sleep) is no
route that anybody could call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlhpc.language.agents.gateway.api_formats import (
    ChatStream,
    MessageStream,
    chat_reply,
    conversation_of,
    generate_reply,
    message_error,
    message_reply,
)
from rlhpc.language.agents.gateway.connections import Connections
from rlhpc.language.agents.gateway.feedback import Feedback
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.request_schema import CHAT, FEEDBACK, GENERATE, MESSAGES, Form, read_body
from rlhpc.language.agents.gateway.sessions import GatewaySession, SessionKeys, StoredResponse, key_in
from rlhpc.language.agents.gateway.threads import Threads
from rlhpc.language.agents.turn_tree import OVER, Renderer, RequestError
from rlhpc.language.data.images import Looker, PromptImages
from rlhpc.language.engines.base import Completion, SamplingParams
from rlhpc.runtime.scratch import folder_for_sockets
from rlhpc.runtime.tcp_listener import Acceptor, TcpListener

#: Largest body of a call, of an episode's calls together, and of a reward, in bytes.
_BODY, _BODIES, _REWARD = 32 << 20, 64 << 20, 4 << 10
#: Bytes of a body that is parsed on the loop: a longer one has a thread. And how many threads there are.
_SHORT, _THREADS = 64 << 10, 4
#: Seconds after which a client that waits for a stream is told that it is not forgotten.
_ALIVE_S = 10.0
_START_S = 60.0
_LOOPBACK = "127.0.0.1"
MODEL = "policy"

#: The server's own log. Whoever sends something else than HTTP has no key to show first, and must not fill it.
_server_log = logging.getLogger(f"{__name__}.server")


def _is_no_fault_of_a_client(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_server_log.addFilter(_is_no_fault_of_a_client)


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

    session: GatewaySession
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    answer: Callable[[Completion | Exception], None]
    show: Callable[[list[int]], None] | None = None
    given_up: bool = False
    seen: PromptImages | None = None


class StreamReader:
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


@dataclass
class _Conversation:
    """A request in either form.

    Attributes:
        messages, tools: As chat completions have them.
        model: What the client calls the model.
        sampling: How tokens are drawn.
        stream: Whether the client reads along.
        reading: What it reads then.
    """

    messages: list[Any]
    tools: Any
    model: str
    sampling: SamplingParams
    stream: bool
    reading: StreamReader = field(default_factory=StreamReader)


class Gateway:
    """Serves episodes.

    Args:
        tokenizer: Of the model, with its chat template.
        parsers: How replies are read.
        context: Most tokens that the model reads and writes.
        address: Of this host, to listen there for other hosts as well, on a port that the system chooses; "" for none.
        looker: What looks at pictures; None if the model reads text alone.
        feedback: Whether rewards may come later.

    Attributes:
        asked: What the engine is to draw.
        keys: Of its episodes.
        feedback: Rewards that come later.
        url: Where it is for this host, without `/v1`.
        far: Where it is for others; "" if it is for none.
        socket: Path of a UNIX socket where it is, too: for sandboxes without a network.
    """

    def __init__(
        self, tokenizer: Any, parsers: Parsers, context: int, address: str = "", looker: Looker | None = None,
        feedback: bool = False,
    ) -> None:  # fmt: skip
        self.asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self._tokenizer, self._parsers, self._context = tokenizer, parsers, context
        self._renderer = Renderer(tokenizer, looker, context)
        self._threads = Threads(_THREADS, "rlhpc-encoding")
        self._folder = folder_for_sockets("agents")
        self.socket = str(self._folder / "model")
        self.keys = SessionKeys()
        self._takes_feedback = feedback
        self.feedback = Feedback(lambda: [turn for session in self.keys.sessions() for turn in session.tree.turns])
        self._waiting: set[asyncio.Future[Completion]] = set()
        self._servers, self._runners = list[asyncio.AbstractServer](), list[web.AppRunner]()
        self._acceptors, self._adopting = list[Acceptor](), set[asyncio.Task[Any]]()
        self._doors = list[Connections]()
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
        rewards = [web.post("/v1/feedback", self._take_feedback)]
        doors, urls = await self._serve_routes(rewards), list[str]()
        for host in (_LOOPBACK, *([address] if address else ())):
            listener = TcpListener(host)
            self._acceptors.append(listener.serve(partial(self._admit, doors), "rlhpc-gateway-accept"))
            urls.append("http://{}:{}".format(*listener.address))
        # By this one sandboxes speak, and what the model drives in there gives itself no rewards.
        doors = await self._serve_routes([])
        self._servers.append(await self.loop.create_unix_server(doors, self.socket))
        return urls[0], "".join(urls[1:])

    def _admit(self, doors: Connections, sock: socket.socket) -> None:
        """Takes a connection to the loop, from the thread that has accepted it."""

        def adopt() -> None:
            task = self.loop.create_task(self.loop.connect_accepted_socket(doors, sock))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

        try:
            self.loop.call_soon_threadsafe(adopt)
        except RuntimeError:  # the loop has ended
            sock.close()

    async def _serve_routes(self, more: Sequence[web.RouteDef]) -> Connections:
        """Makes an application of the routes of episodes, and more; returns what takes its connections."""
        app = web.Application(client_max_size=_BODY)
        posts = {
            "/v1/chat/completions": self._chat, "/inference/v1/generate": self._generate, "/v1/messages": self._messages,
        }  # fmt: skip
        app.add_routes([web.get("/v1/models", self._models), *(web.post(*route) for route in posts.items()), *more])
        # A log would have keys in it. What a client that has hung up had asked for need not be drawn.
        runner = web.AppRunner(
            app, access_log=None, logger=_server_log, shutdown_timeout=0.5, handler_cancellation=True
        )
        self._runners.append(runner)
        await runner.setup()
        assert runner.server is not None
        self._doors.append(Connections(runner.server))
        return self._doors[-1]

    def close(self) -> None:
        """Ends it; whoever waits is refused."""

        async def end() -> None:
            for session in self.keys.sessions():
                self.end(session)
            for waiting in list(self._waiting):
                if not waiting.done():
                    waiting.set_exception(RequestError("the run has ended", 503))
            for server in self._servers:
                server.close()
            for runner in self._runners:
                await runner.cleanup()
            self._threads.close()

        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self.loop).result(5.0)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- episodes -------------------------------------------------------------------------------------------------

    def open(self, session: GatewaySession) -> None:
        """From now on its key is good."""
        self.keys.open(session)

    def end(self, session: GatewaySession) -> None:
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
            messages, tools, session.role_of(role), session.sampling_of(), self._renderer, self._parsers, self._draw,
            self._threads,
        )  # fmt: skip
        answer = await asking
        answer.turn.received = True
        return answer.message

    # -- the engine -----------------------------------------------------------------------------------------------

    async def _draw(
        self, session: GatewaySession, prompt: list[int], sampling: SamplingParams, seed: int, seen: PromptImages | None,
        reading: StreamReader | None = None,
    ) -> Completion:  # fmt: skip
        if len(prompt) >= self._context:
            raise RequestError(
                f"{len(prompt)} tokens: that leaves no room in the context of {self._context} tokens", code=OVER
            )
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

    def _shown(self, reading: StreamReader, ids: list[int]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(reading.show, ids)

    # -- routes ---------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._list)

    async def _list(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        about = {"object": "model", "created": 0, "owned_by": "rlhpc", "max_model_len": self._context}
        models = [{"id": name, **about} for name in session.limits.roles or (MODEL,)]
        return web.json_response({"object": "list", "data": models})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._answer_chat)

    async def _answer_chat(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        raw, body = await self._body(request, session, CHAT)
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        sampling = session.sampling_of(most, body.get("stop", ()), body.get("stop_token_ids", ()))
        conversation = _Conversation(
            body["messages"], tools, body.get("model", MODEL), sampling, bool(body.get("stream"))
        )
        asking = self._ask(session, raw, _retried(request), conversation)
        if not conversation.stream:
            answer = await asking
            return _received(request, answer, chat_reply(answer, body, conversation.model, self._tokenizer))
        return await self._stream(
            request, asking, ChatStream(body, conversation.model, self._tokenizer), conversation, _error
        )

    def _ask(
        self, session: GatewaySession, raw: bytes, retried: bool, conversation: _Conversation
    ) -> Awaitable[StoredResponse]:
        """The answer to a conversation, as `GatewaySession.once` gives it."""
        draw = partial(self._draw, reading=conversation.reading) if conversation.stream else self._draw

        async def work() -> StoredResponse:
            role = session.role_of(conversation.model)
            return await session.chat(
                conversation.messages,
                conversation.tools,
                role,
                conversation.sampling,
                self._renderer,
                self._parsers,
                draw,
                self._threads,
            )

        return session.once(raw, retried, work)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._answer_message, message_error)

    async def _answer_message(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        raw, body = await self._body(request, session, MESSAGES)
        messages, tools = conversation_of(body)
        sampling = session.sampling_of(body.get("max_tokens"), body.get("stop_sequences", ()))
        conversation = _Conversation(messages, tools, body.get("model", MODEL), sampling, bool(body.get("stream")))
        asking = self._ask(session, raw, _retried(request), conversation)
        if not conversation.stream:
            answer = await asking
            return _received(request, answer, message_reply(answer, conversation.model))
        return await self._stream(request, asking, MessageStream(conversation.model), conversation, message_error)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._guarded(request, self._answer_generate)

    async def _answer_generate(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        raw, body = await self._body(request, session, GENERATE)
        prompt, options = body["token_ids"], body.get("sampling_params", {})
        if self._renderer.looker is not None and self._renderer.looker.token in prompt:
            raise RequestError(
                "token_ids has a token of a picture; show pictures by /v1/chat/completions or /v1/messages"
            )
        stop, ends = options.get("stop") or (), options.get("stop_token_ids") or ()
        sampling = session.sampling_of(options.get("max_tokens"), stop, ends)

        async def work() -> StoredResponse:
            return await session.tokens(prompt, session.role_of(body.get("model")), sampling, self._draw)

        answer = await session.once(raw, _retried(request), work)
        return _received(request, answer, generate_reply(answer))

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        try:
            self.feedback.check(key_in(request.headers))
            self._prove(request, "feedback")
            body = read_body(await _read(request, _REWARD), FEEDBACK)
            if not self._takes_feedback:
                raise RequestError(
                    "rewards do not come later in this run: agent.feedback_timeout_s is not set", 404, "not_found"
                )
            self.feedback.take(body)
        except RequestError as why:
            return _refusal(why, _error)
        return web.json_response({"status": "taken"})

    async def _body(self, request: web.Request, session: GatewaySession, form: Form) -> tuple[bytes, dict[str, Any]]:
        """The body of an episode's request: its bytes, and what they say."""
        size = min(_BODY if request.content_length is None else request.content_length, _BODY)
        if session.bytes_in + size > _BODIES:
            raise RequestError(
                f"requests of {_BODIES >> 20} MiB of the episode are being read", 429, "rate_limit_exceeded"
            )
        session.bytes_in += size
        try:
            raw = await _read(request, _BODY)
            if len(raw) <= _SHORT:
                return raw, read_body(raw, form)
            async with session.encoding:
                return raw, await self._threads.call_to_end(read_body, raw, form)
        finally:
            session.bytes_in -= size

    async def _guarded(
        self,
        request: web.Request,
        route: Callable[[web.Request, GatewaySession], Awaitable[web.StreamResponse]],
        error: Callable[[RequestError], dict[str, Any]] | None = None,
    ) -> web.StreamResponse:
        """What a route answers, or why it does not, as its clients understand it."""
        try:
            session = self.keys.of(request.headers)
            self._prove(request, session.key)
            return await route(request, session)
        except RequestError as why:
            return _refusal(why, error or _error)

    def _prove(self, request: web.Request, owner: str) -> None:
        for door in self._doors:
            if request.transport is not None:
                door.prove(request.transport, owner)

    async def _stream(
        self,
        request: web.Request,
        asking: Awaitable[StoredResponse],
        stream: ChatStream | MessageStream,
        conversation: _Conversation,
        error: Callable[[RequestError], dict[str, Any]],
    ) -> web.StreamResponse:
        """Answers with a stream: what is certain of the reply as it is written, then the rest."""
        answering, reading = asyncio.ensure_future(asking), conversation.reading
        answering.add_done_callback(lambda _: reading.came.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await _more(reading)
            if answering.done():
                answering.result()  # refused at once: by a status
            await response.prepare(request)
            partly = (
                None
                if stream.whole
                else self._parsers.partly(reading.prompt, conversation.tools, conversation.sampling.stop)
            )
            silent_since = self.loop.time()
            while not answering.done():
                events = stream.more(len(reading.prompt), *partly.split(reading.ids)) if partly else []
                if not events and self.loop.time() - silent_since >= _ALIVE_S:
                    events = [": waiting\n\n"]  # so that no client takes a slow one for a lost one
                for event in events:
                    await response.write(event.encode())
                    silent_since = self.loop.time()
                await _more(reading)
            try:
                answer = answering.result()
            except RequestError as why:
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
            answering.cancel()
        return response


async def _read(request: web.Request, most: int) -> bytes:
    """The bytes of a body.

    Raises:
        Refused: There are more than these.
    """
    raw, length = bytearray(), request.content_length or 0
    while length <= most:
        chunk = await request.content.readany()
        if not chunk:
            return bytes(raw)
        raw += chunk
        length = max(length, len(raw))
    raise RequestError(f"the body is longer than {most} bytes", 413)


async def _more(reading: StreamReader) -> None:
    """Waits for more to read, but not for long."""
    with contextlib.suppress(TimeoutError):
        # not `wait_for`: Python 3.11's forgets that it was cancelled where at that moment there is more, too
        async with asyncio.timeout(_ALIVE_S):
            await reading.came.wait()
        reading.came.clear()  # what comes from now on is for the next time


def _retried(request: web.Request) -> bool:
    """Whether the client's library says that it asks once more."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def _received(request: web.Request, answer: StoredResponse, reply: dict[str, Any]) -> web.Response:
    transport = request.transport
    answer.turn.names.append(reply.get("id") or reply["request_id"])
    if transport is not None and not transport.is_closing():
        answer.turn.received = True
    return web.json_response(reply)


def _refusal(why: RequestError, error: Callable[[RequestError], dict[str, Any]]) -> web.Response:
    response = web.json_response(error(why), status=why.status)
    if why.status in (401, 413):  # nobody reads what else comes
        response.force_close()
    return response


def _error(why: RequestError) -> dict[str, Any]:
    return {"error": {"message": str(why), "type": "invalid_request_error", "code": why.code}}
