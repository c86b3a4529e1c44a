"""What tests of agents outside need: a tokenizer whose texts drift when they are encoded again, an engine that says what it is
told to, and agents."""

from __future__ import annotations

import functools
import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhpc.language.agents.agent_processes import Program
from rlhpc.language.agents.external import AgentOptions, ExternalEpisodes
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.server import EngineRequest, Gateway
from rlhpc.language.agents.gateway.sessions import EpisodeLimits, GatewaySession
from rlhpc.language.agents.turn_tree import RequestError
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.runtime.errors import ConfigError

HERE = Path(__file__).parent
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
#: ChatML with tools, as Qwen's.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:
{% for t in tools %}{{ t | tojson }}
{% endfor %}Call with <tool_call>{"name":..,"arguments":..}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = (
    "I multiply with a tool and say what the product is, I think. The answer is a number such as 84 or 12 times 7. "
    "name arguments multiply final_answer user assistant system tool response function type object integer "
)
QUESTION = Prompt(7, ({"role": "user", "content": "12*7?"},), "84", {"kind": "product"})


@functools.cache
def chat_tokenizer() -> Any:
    """A small byte-pair encoding: what is drawn character by character would be encoded otherwise."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.add_tokens(TAGS)
    return wrapped


def chat_model(folder: Path, *, context: int = 2048, hidden: int = 64, heads: int = 2) -> Any:
    """Writes a random Llama with that tokenizer; vLLM on a CPU wants heads as wide as 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=1, max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


class Scripted:
    """An engine that says what `say` makes of the prompt's text, in tokens that are not those the tokenizer would choose.

    Args:
        say: From the prompt's text to the reply's.
        context: Most tokens.
        delay: Steps that each reply takes.
    """

    can_drop = True

    def __init__(self, say: Callable[[str], str], context: int = 20_000, delay: int = 0) -> None:
        self.say, self.context, self.version, self.delay = say, context, 0, delay
        self.requests: list[Request] = []
        self.dropped: list[int] = []
        self._queue: list[list[Any]] = []

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if len(request.prompt_ids) >= self.context:
                raise ConfigError(f"a prompt of {len(request.prompt_ids)} tokens leaves no room in the context")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < len(chat_tokenizer()):
                raise ConfigError("token ids are not of the model's vocabulary")
            self.requests.append(request)
            self._queue.append([self.delay, request])

    def unfinished(self) -> int:
        return len(self._queue)

    def drop(self, ids: Collection[int]) -> None:
        self.dropped += [request.id for _, request in self._queue if request.id in ids]
        self._queue = [entry for entry in self._queue if entry[1].id not in ids]

    def sampled_tokens(self, ids: Collection[int]) -> dict[int, list[int]]:
        return {
            request.id: (tokens := self._completion(request).token_ids)[: max(0, len(tokens) - 1 - left)]
            for left, request in self._queue
            if request.id in ids
        }

    def step(self) -> list[Completion]:
        done = [entry for entry in self._queue if entry[0] <= 0]
        self._queue = [entry for entry in self._queue if entry[0] > 0]
        for entry in self._queue:
            entry[0] -= 1
        if not done:
            time.sleep(0.001)
        return [self._completion(request) for _, request in done]

    def _completion(self, request: Request) -> Completion:
        tokenizer, draw, ids = chat_tokenizer(), random.Random(request.seed), list[int]()
        for part in re.split("(" + "|".join(TAGS) + ")", self.say(tokenizer.decode(request.prompt_ids))):
            if part in TAGS:
                ids.append(tokenizer.convert_tokens_to_ids(part))
                continue
            while part:
                size = draw.randint(1, 3)
                ids += tokenizer.encode(part[:size], add_special_tokens=False)
                part = part[size:]
        ids.append(tokenizer.eos_token_id)
        most = request.sampling.max_new_tokens
        reason, ids = ("stop", ids) if len(ids) <= most else ("length", ids[:most])
        logprobs = [-draw.random() for _ in ids]
        return Completion(request.id, ids, logprobs, [self.version] * len(ids), reason)

    def abort(self) -> list[Completion]:
        queue, self._queue = self._queue, []
        return [Completion(request.id, finish_reason="abort") for _, request in queue]

    def close(self) -> None:
        self._queue.clear()


class Served:
    """A gateway, and an engine that a thread of the test steps."""

    def __init__(self, engine: Scripted) -> None:
        self.engine, self.held = engine, threading.Event()
        self.gateway = Gateway(chat_tokenizer(), Parsers(chat_tokenizer(), "hermes", "think"), engine.context)
        self._numbers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        under_way: dict[int, EngineRequest] = {}
        while not self._stop.is_set():
            while not self.gateway.engine_queue.empty():
                drawing = self.gateway.engine_queue.get()
                self._numbers += 1
                try:
                    self.engine.add([Request(self._numbers, drawing.prompt_ids, drawing.sampling, drawing.seed)])
                except ConfigError as error:
                    drawing.answer(RequestError(str(error), code="context_length_exceeded"))
                    continue
                under_way[self._numbers] = drawing
            for number in [n for n, drawing in under_way.items() if drawing.given_up or drawing.session.closed]:
                self.engine.drop([number])
                under_way.pop(number).answer(RequestError("the episode has ended", 401))
            if not self.held.is_set():
                for completion in self.engine.step():
                    under_way.pop(completion.id).answer(completion)
            for number, ids in self.engine.sampled_tokens([n for n, d in under_way.items() if d.show]).items():
                under_way[number].show(ids)
            time.sleep(0.0005)

    def open(self, seed: int = 0, most: int = 100, turns: int = 80, tokens: int = 10_000) -> GatewaySession:
        session = GatewaySession(seed, SamplingParams(max_new_tokens=most), seed, EpisodeLimits(turns, tokens))
        self.gateway.open(session)
        return session

    def end(self, session: GatewaySession) -> None:
        self.gateway.loop.call_soon_threadsafe(self.gateway.end, session)

    def post(self, key: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        host = self.gateway.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST" if body is not None else "GET", path, None if body is None else json.dumps(body),
                           {"Authorization": f"Bearer {key}", **headers})  # fmt: skip
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            return response.status, [json.loads(part) for part in re.findall(r"^data: (\{.*\})$", text, re.MULTILINE)]
        return response.status, json.loads(text) if text.startswith("{") else text

    def chat(
        self, session: GatewaySession, messages: list[Any], *, headers: dict[str, str] | None = None, **more: Any
    ) -> Any:
        body = {"model": "policy", "messages": messages, **more}
        status, found = self.post(session.key, "/v1/chat/completions", body, **(headers or {}))
        assert status == 200, found
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.gateway.close()


def message_of(reply: Any) -> dict[str, Any]:
    return reply["choices"][0]["message"]


def exact(session: GatewaySession) -> list[Any]:
    """The samples, after a look at what must hold of any: each drawn token is trained on once, where it was drawn."""
    samples = session.tree.samples(0)
    assert sum(sum(s.loss_mask) for s in samples) == sum(len(t.token_ids) for t in session.tree.turns if t.received)
    drawn = sorted(token for turn in session.tree.turns if turn.received for token in turn.token_ids)
    assert drawn == sorted(t for s in samples for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m)
    for sample in samples:
        parts = (sample.logprobs, sample.versions, sample.loss_mask, sample.turn_ids)
        assert {len(part) for part in parts} == {len(sample.token_ids)}
        assert all(lp < 0 for lp, m in zip(sample.logprobs, sample.loss_mask, strict=True) if m)
    return samples


def product(prompt: str) -> str:
    """A model that multiplies with a tool, and then answers."""
    last = prompt.rsplit("<|im_start|>user", 1)[-1]
    if "<code>" in prompt or "```py" in prompt:  # a model that writes code
        return "Thought: I compute.\n<code>\nfinal_answer(multiply(12, 7))\n</code>"
    answered = "tool_response" in last or "Observation" in last
    if "final_answer" in prompt and answered:
        return '<tool_call>{"name": "final_answer", "arguments": {"answer": "84"}}</tool_call>'
    if answered:
        return "The product is  84 ,\n I think."
    return 'I  multiply. <tool_call>{"arguments": {"b": 7, "a": 12},  "name": "multiply"}</tool_call>'


@contextmanager
def episodes_of(
    engine: Any, target: str = "", *, python: str | None = None, command: tuple[str, ...] = (),
    limits: tuple[int, int] = (40, 4000), timeout_s: float = 60.0, processes: int = 4,
    parsers: tuple[str | None, str | None] = ("hermes", "think"), roles: tuple[str, ...] = (), kind: str = "",
    options: dict[str, Any] | None = None, sandbox: str | None = None, untrained: tuple[str, ...] = (),
    feedback_s: float = 0.0, **kwargs: Any,
) -> Iterator[ExternalEpisodes]:  # fmt: skip
    """Episodes of an agent of this folder."""
    tokenizer = chat_tokenizer()
    kind = kind or ("command" if command else "python")
    program = Program(kind, target or None, command, python, processes, options or {}, {}, sandbox)
    options = AgentOptions(EpisodeLimits(*limits, roles, untrained), timeout_s, kwargs, feedback_s)
    found = ExternalEpisodes(engine, tokenizer, Parsers(tokenizer, *parsers), engine.context, program, options)
    try:
        yield found
    finally:
        found.close()


def run_all(
    generation: ExternalEpisodes, count: int, *, most: int = 200, prompt: Prompt = QUESTION, seconds: float = 100.0,
    between: Callable[[], None] = lambda: None,
) -> list[Any]:  # fmt: skip
    """Episodes of a prompt, by number."""
    sampling = SamplingParams(max_new_tokens=most)
    generation.add([Request(number, (1,), sampling, seed=number) for number in range(count)], prompt)
    found, deadline = dict[int, Any](), time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < deadline, "episodes are missing"
        found |= {episode.id: episode for episode in generation.step()}
        between()
    return [found[number] for number in range(count)]
