"""Gateway: HTTP server for this process's engine, in OpenAI's and Anthropic's API formats.

External agents call it like any other endpoint; the API key identifies the episode. The gateway runs an event loop in a
separate thread. It sends requests to the engine's thread through a queue and receives the results through callbacks. So
the engine stays in its thread, and no route reaches its control functions (weights, sleep).
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
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlhpc.language.agents.gateway.api_formats import (
    ChatStream,
    MessageStream,
    chat_error,
    conversation_of,
    generate_reply,
    message_error,
)
from rlhpc.language.agents.gateway.connections import Connections
from rlhpc.language.agents.gateway.feedback import Feedback
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.request_schema import CHAT, FEEDBACK, GENERATE, MESSAGES, BodySchema, read_body
from rlhpc.language.agents.gateway.sessions import GatewaySession, Sampler, SessionKeys, StoredResponse, key_in
from rlhpc.language.agents.gateway.threads import Threads, call_on_loop, set_outcome
from rlhpc.language.agents.turn_tree import OVER, Renderer, RequestError
from rlhpc.language.data.images import PromptImageProcessor, PromptImages
from rlhpc.language.engines.base import Completion, SamplingParams
from rlhpc.runtime.scratch import make_socket_folder
from rlhpc.runtime.tcp_listener import Acceptor, TcpListener

#: Maximum sizes of a call's body, of all concurrent bodies of an episode, and of a reward's body, in bytes.
_MAX_BODY_BYTES, _MAX_BODIES_BYTES, _MAX_REWARD_BYTES = 32 << 20, 64 << 20, 4 << 10
#: Maximum size of a body that the event loop parses, in bytes; and number of threads, which parse larger bodies.
_MAX_INLINE_BYTES, _THREADS = 64 << 10, 4
#: Seconds without an event after which a stream sends a comment, so that the client does not time out.
_KEEP_ALIVE_S = 10.0
_START_S = 60.0
_LOOPBACK = "127.0.0.1"
MODEL = "policy"

#: Log of the server. It omits invalid HTTP requests, so that clients without a key cannot fill it.
_server_log = logging.getLogger(f"{__name__}.server")


def _is_server_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_server_log.addFilter(_is_server_fault)


@dataclass
class EngineRequest:
    """Request to the engine.

    Attributes:
        session: Session of the request.
        prompt_ids, sampling, seed, images: Prompt, sampling parameters, seed and images.
        answer: Callback with the completion or the error, called in the engine's thread.
        show: Callback with all tokens so far, for a streaming client; called repeatedly in the engine's thread.
        given_up: Whether the client no longer waits for the result.
        started_ns: Time at which the request was made, by `time.monotonic_ns`, for traces.
    """

    session: GatewaySession
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    answer: Callable[[Completion | Exception], object]
    show: Callable[[list[int]], object] | None = None
    given_up: bool = False
    images: PromptImages | None = None
    started_ns: int = field(default_factory=time.monotonic_ns)


@dataclass
class StreamReader:
    """Tokens of a completion for a streaming client. Used only on the gateway's event loop.

    Attributes:
        prompt: Tokens of the prompt; empty before the request is sent to the engine.
        ids: Tokens sampled so far.
        arrival: Event that is set when new tokens have arrived.
    """

    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    arrival: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, ids: list[int]) -> None:
        """Stores the tokens sampled so far, and wakes the waiting stream."""
        self.ids = ids
        self.arrival.set()


class Gateway:
    """HTTP server of the episodes of a rollout rank.

    Args:
        tokenizer: Tokenizer of the model, with a chat template.
        parsers: Parsers of replies.
        context: Maximum number of tokens of prompt and reply.
        address: Address of this host on which to also accept connections from other hosts, on a port that the system
            chooses; "" to refuse other hosts.
        image_processor: Image processor; None if the model reads only text.
        accepts_feedback: Whether rewards may be delayed.

    Attributes:
        engine_queue: Queue of requests to the engine and of ended episodes.
        keys: Keys of the episodes.
        accepts_feedback: Delayed rewards.
        url: URL for clients on this host, without `/v1`.
        far: URL for clients on other hosts; "" if they have no access.
        socket: Path of a UNIX socket of the gateway, for sandboxes without a network.
    """

    def __init__(
        self,
        tokenizer: Any,
        parsers: Parsers,
        context: int,
        address: str = "",
        image_processor: PromptImageProcessor | None = None,
        accepts_feedback: bool = False,
    ) -> None:
        self.engine_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self._tokenizer, self._parsers, self._context = tokenizer, parsers, context
        self._renderer = Renderer(tokenizer, image_processor, context)
        self._threads = Threads(_THREADS, "rlhpc-encoding")
        self._folder = make_socket_folder("agents")
        self.socket = str(self._folder / "model")
        self.keys = SessionKeys()
        self._accepts_feedback = accepts_feedback
        self.feedback = Feedback(lambda: [turn for session in self.keys.sessions() for turn in session.tree.turns])
        self._pending_completions: set[asyncio.Future[Completion]] = set()
        self._servers, self._runners = list[asyncio.AbstractServer](), list[web.AppRunner]()
        self._acceptors, self._adopt_tasks = list[Acceptor](), set[asyncio.Task[Any]]()
        self._connections = list[Connections]()
        self._thread = threading.Thread(target=self._serve, name="rlhpc-gateway", daemon=True)
        self._thread.start()
        try:
            self.url, self.far = asyncio.run_coroutine_threadsafe(self._listen(address), self.loop).result(_START_S)
        except OSError:
            self.close()
            raise

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _listen(self, address: str) -> tuple[str, str]:
        protocol_factory = await self._serve_routes([web.post("/v1/feedback", self._take_feedback)])
        urls = list[str]()
        for host in filter(None, (_LOOPBACK, address)):
            listener = TcpListener(host)
            self._acceptors.append(listener.serve(partial(self._admit, protocol_factory), "rlhpc-gateway-accept"))
            urls.append("http://{}:{}".format(*listener.address))
        # Sandboxes use this socket. It has no route for rewards, because the model controls the programs there.
        protocol_factory = await self._serve_routes([])
        self._servers.append(await self.loop.create_unix_server(protocol_factory, self.socket))
        return urls[0], "".join(urls[1:])

    def _admit(self, connections: Connections, sock: socket.socket) -> None:
        """Passes a connection from the accepting thread to the event loop."""

        def adopt() -> None:
            task = self.loop.create_task(self.loop.connect_accepted_socket(connections, sock))
            self._adopt_tasks.add(task)
            task.add_done_callback(self._adopt_tasks.discard)

        if not call_on_loop(self.loop, adopt):
            sock.close()

    async def _serve_routes(self, extra_routes: Sequence[web.RouteDef]) -> Connections:
        """Creates an application with the episodes' routes and `extra_routes`; returns its connection factory."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/models", partial(self._run_route, self._list_models)),
                web.post("/v1/chat/completions", partial(self._run_route, self._handle_chat)),
                web.post("/inference/v1/generate", partial(self._run_route, self._generate)),
                web.post("/v1/messages", partial(self._run_route, self._messages, format_error=message_error)),
                *extra_routes,
            ]
        )
        # An access log would contain keys. Requests of disconnected clients are cancelled.
        runner = web.AppRunner(
            app, access_log=None, logger=_server_log, shutdown_timeout=0.5, handler_cancellation=True
        )
        self._runners.append(runner)
        await runner.setup()
        assert runner.server is not None
        self._connections.append(Connections(runner.server))
        return self._connections[-1]

    def close(self) -> None:
        """Closes the gateway; refuses pending requests."""

        async def end() -> None:
            for session in self.keys.sessions():
                self.end(session)
            for pending_completion in list(self._pending_completions):
                if not pending_completion.done():
                    pending_completion.set_exception(RequestError("the run has ended", 503))
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
        """Makes the session's key valid."""
        self.keys.open(session)

    def end(self, session: GatewaySession) -> None:
        """Makes the session's key invalid and drops its pending requests. Runs on the gateway's event loop."""
        session.closed = True
        self.keys.end(session)

    async def chat(self, key: str, role: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        """Returns the model's next message, for agents in this process. Runs on the gateway's event loop.

        Raises:
            RequestError: The request is refused.
        """
        session = self.keys.find(key)
        answer = await self._generate_answer(session, messages, tools, role, session.sampling_of(), self._sample)
        answer.turn.mark_received()
        return answer.message

    # -- the engine -----------------------------------------------------------------------------------------------

    async def _sample(
        self,
        session: GatewaySession,
        prompt: list[int],
        sampling: SamplingParams,
        seed: int,
        images: PromptImages | None,
        reader: StreamReader | None = None,
    ) -> Completion:
        if len(prompt) >= self._context:
            raise RequestError(
                f"{len(prompt)} tokens: that leaves no room in the context of {self._context} tokens", code=OVER
            )
        pending_completion: asyncio.Future[Completion] = self.loop.create_future()
        answer = partial(call_on_loop, self.loop, set_outcome, pending_completion)
        completion_request = EngineRequest(session, tuple(prompt), sampling, seed, answer, images=images)
        if reader is not None:
            reader.prompt = prompt
            completion_request.show = partial(call_on_loop, self.loop, reader.show)
        self._pending_completions.add(pending_completion)
        self.engine_queue.put(completion_request)
        try:
            return await pending_completion
        finally:
            completion_request.given_up = True
            self._pending_completions.discard(pending_completion)

    # -- routes ---------------------------------------------------------------------------------------------------

    async def _list_models(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        model_card = {"object": "model", "created": 0, "owned_by": "rlhpc", "max_model_len": self._context}
        models = [{"id": name, **model_card} for name in session.limits.roles or (MODEL,)]
        return web.json_response({"object": "list", "data": models})

    async def _handle_chat(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        raw_body, body = await self._read_body(request, session, CHAT)
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        sampling = session.sampling_of(max_tokens, body.get("stop", ()), body.get("stop_token_ids", ()))
        stream = ChatStream(body, body.get("model", MODEL), self._tokenizer)
        return await self._respond(request, session, raw_body, body["messages"], tools, sampling, stream)

    async def _respond(
        self,
        request: web.Request,
        session: GatewaySession,
        raw_body: bytes,
        messages: list[Any],
        tools: Any,
        sampling: SamplingParams,
        stream: ChatStream | MessageStream,
    ) -> web.StreamResponse:
        """Answers a conversation in the format of `stream`, as a single response or as a stream of events."""
        reader = StreamReader()
        draw = partial(self._sample, reader=reader) if stream.is_requested else self._sample
        start_answer = partial(self._generate_answer, session, messages, tools, stream.model, sampling, draw)
        pending_answer = session.answer_once(raw_body, _is_retry(request), start_answer)
        if stream.is_requested:
            return await self._send_stream_reply(request, pending_answer, stream, reader, tools, sampling.stop)
        answer = await pending_answer
        return _send_reply(request, answer, stream.reply(answer))

    async def _generate_answer(
        self,
        session: GatewaySession,
        messages: list[Any],
        tools: Any,
        model: str,
        sampling: SamplingParams,
        draw: Sampler,
    ) -> StoredResponse:
        return await session.chat(
            messages, tools, session.role_of(model), sampling, self._renderer, self._parsers, draw, self._threads
        )

    async def _messages(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        raw_body, body = await self._read_body(request, session, MESSAGES)
        messages, tools = conversation_of(body)
        sampling = session.sampling_of(body.get("max_tokens"), body.get("stop_sequences", ()))
        stream = MessageStream(body, body.get("model", MODEL))
        return await self._respond(request, session, raw_body, messages, tools, sampling, stream)

    async def _generate(self, request: web.Request, session: GatewaySession) -> web.StreamResponse:
        raw_body, body = await self._read_body(request, session, GENERATE)
        prompt, options = body["token_ids"], body.get("sampling_params", {})
        if self._renderer.image_processor is not None and self._renderer.image_processor.token in prompt:
            raise RequestError(
                "token_ids has a token of a picture; show pictures by /v1/chat/completions or /v1/messages"
            )
        stop_texts, stop_token_ids = options.get("stop") or (), options.get("stop_token_ids") or ()
        sampling = session.sampling_of(options.get("max_tokens"), stop_texts, stop_token_ids)

        async def draw_tokens() -> StoredResponse:
            return await session.tokens(prompt, session.role_of(body.get("model")), sampling, self._sample)

        answer = await session.answer_once(raw_body, _is_retry(request), draw_tokens)
        return _send_reply(request, answer, generate_reply(answer))

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        try:
            self.feedback.check(key_in(request.headers))
            self._check_authentication(request, "feedback")
            body = read_body(await _read_body(request, _MAX_REWARD_BYTES), FEEDBACK)
            if not self._accepts_feedback:
                raise RequestError(
                    "rewards do not come later in this run: agent.feedback_timeout_s is not set", 404, "not_found"
                )
            self.feedback.take(body)
        except RequestError as error:
            return _format_error_response(error, chat_error)
        return web.json_response({"status": "taken"})

    async def _read_body(
        self, request: web.Request, session: GatewaySession, schema: BodySchema
    ) -> tuple[bytes, dict[str, Any]]:
        """Reads and parses the body of an episode's request; returns the bytes and the parsed object."""
        body_size = min(_MAX_BODY_BYTES if request.content_length is None else request.content_length, _MAX_BODY_BYTES)
        if session.bytes_in + body_size > _MAX_BODIES_BYTES:
            raise RequestError(
                f"requests of {_MAX_BODIES_BYTES >> 20} MiB of the episode are being read", 429, "rate_limit_exceeded"
            )
        session.bytes_in += body_size
        try:
            raw_body = await _read_body(request, _MAX_BODY_BYTES)
            if len(raw_body) <= _MAX_INLINE_BYTES:
                return raw_body, read_body(raw_body, schema)
            async with session.encoding_lock:
                return raw_body, await self._threads.call_to_end(read_body, raw_body, schema)
        finally:
            session.bytes_in -= body_size

    async def _run_route(
        self,
        route_handler: Callable[[web.Request, GatewaySession], Awaitable[web.StreamResponse]],
        request: web.Request,
        format_error: Callable[[RequestError], dict[str, Any]] = chat_error,
    ) -> web.StreamResponse:
        """Runs a route with the session of the request's key; returns a `RequestError` in the client's format."""
        try:
            session = self.keys.find_by_headers(request.headers)
            self._check_authentication(request, session.key)
            return await route_handler(request, session)
        except RequestError as refusal:
            return _format_error_response(refusal, format_error)

    def _check_authentication(self, request: web.Request, owner: str) -> None:
        if request.transport is not None:
            for connections in self._connections:
                connections.authenticate(request.transport, owner)

    async def _send_stream_reply(
        self,
        request: web.Request,
        pending_answer: Awaitable[StoredResponse],
        stream: ChatStream | MessageStream,
        reader: StreamReader,
        tools: Any,
        stop_texts: Sequence[str],
    ) -> web.StreamResponse:
        """Streams a reply: the text that can no longer change while tokens are sampled, then the remainder."""
        answer_task = asyncio.ensure_future(pending_answer)
        answer_task.add_done_callback(lambda _: reader.arrival.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await _await_tokens(reader)
            if answer_task.done():
                answer_task.result()  # an immediate refusal becomes an HTTP status
            await response.prepare(request)
            partial_reply = None if stream.is_sent_at_end else self._parsers.partial(reader.prompt, tools, stop_texts)
            last_event_time = self.loop.time()
            while not answer_task.done():
                events = (
                    stream.new_events(len(reader.prompt), *partial_reply.split(reader.ids)) if partial_reply else []
                )
                if not events and self.loop.time() - last_event_time >= _KEEP_ALIVE_S:
                    events = [": waiting\n\n"]  # keeps clients of slow replies connected
                for event in events:
                    await response.write(event.encode())
                    last_event_time = self.loop.time()
                await _await_tokens(reader)
            try:
                answer = answer_task.result()
            except RequestError as refusal:
                await response.write(f"event: error\ndata: {json.dumps(stream.error(refusal))}\n\n".encode())
                return response
            *leading_events, last_event = stream.end(answer)
            for event in leading_events:
                await response.write(event.encode())
            answer.turn.names.append(stream.id)
            was_received = answer.turn.mark_received()  # the client may finish before the next line runs
            try:
                await response.write(last_event.encode())
                await response.write_eof()
            except ConnectionError:
                answer.turn.mark_received(was_received)
        except ConnectionError:  # the client has disconnected
            pass
        finally:
            answer_task.cancel()
        return response


async def _read_body(request: web.Request, max_bytes: int) -> bytes:
    """Reads the bytes of a body.

    Raises:
        RequestError: The body is longer than `max_bytes`.
    """
    raw_body, content_length = bytearray(), request.content_length or 0
    while content_length <= max_bytes:
        chunk = await request.content.readany()
        if not chunk:
            return bytes(raw_body)
        raw_body += chunk
        content_length = max(content_length, len(raw_body))
    raise RequestError(f"the body is longer than {max_bytes} bytes", 413)


async def _await_tokens(reader: StreamReader) -> None:
    """Waits for new tokens, at most `_KEEP_ALIVE_S` seconds."""
    with contextlib.suppress(TimeoutError):
        # not `wait_for`: Python 3.11 loses a cancellation that arrives together with the event
        async with asyncio.timeout(_KEEP_ALIVE_S):
            await reader.arrival.wait()
        reader.arrival.clear()  # later tokens end the next wait


def _is_retry(request: web.Request) -> bool:
    """Returns whether the client's library marks the request as a retry."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def _send_reply(request: web.Request, answer: StoredResponse, reply: dict[str, Any]) -> web.Response:
    answer.turn.names.append(reply.get("id") or reply["request_id"])
    if request.transport is not None and not request.transport.is_closing():
        answer.turn.mark_received()
    return web.json_response(reply)


def _format_error_response(
    refusal: RequestError, format_error: Callable[[RequestError], dict[str, Any]]
) -> web.Response:
    response = web.json_response(format_error(refusal), status=refusal.status)
    if refusal.status in (401, 413):  # the rest of the request is not read
        response.force_close()
    return response
