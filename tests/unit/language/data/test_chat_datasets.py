"""Chat datasets, drawn anew by the seed of `tests.drawn`: what reaches the model is what an independent rendering says, or the
first row at fault is named with its file and line. Nothing is changed in silence, and nothing ends in a traceback."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.language.config.data import DataSourceConfig
from rlhpc.language.data import PromptTokenizer, make_dataset
from rlhpc.runtime.errors import ConfigError
from tests import drawn
from tests.extras import need_extra

need_extra("llm")
import pyarrow as pa
import pyarrow.parquet as pq
import transformers

COUNT = 60
Row = dict[str, Any]

HEAD = (
    "{%- if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}|{{ key }}={{ value }}{% endfor %}</call>{% endfor %}"
)
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINK = "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}" + CALLS + TAIL
#: `full` writes everything; `late` leaves reasoning out of turns before the last question, as Qwen3's does; `plain` writes
#: contents alone; `two` knows the roles user and assistant alone.
TEMPLATES = {
    "full": HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}" + THINK,
    "late": HEAD + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}" + THINK,
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + TAIL,
    "two": "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}" + TAIL,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "multiply", "parameters": {"a": "int", "b": "int"}}},
    {"type": "function", "function": {"name": "look", "parameters": {"text": "str"}}},
]


def tokenizer_of(template: str) -> Any:
    """A tokenizer of bytes, which loses nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"], chat_template=TEMPLATES[template],
    )  # fmt: skip


def rendered(message: Row, template: str, *, reasons: bool) -> str:
    """What a template writes for a message between its role and its end: said here a second time, in Python."""
    text = ""
    if message.get("reasoning_content") and reasons:
        text += f"<think>{message['reasoning_content']}</think>"
    text += message["content"]
    for name, arguments in message.get("calls", ()):
        text += f"<call>{name}" + "".join(f"|{key}={value}" for key, value in arguments.items()) + "</call>"
    return text


def expected(row: Row, template: str) -> tuple[str, str]:
    """Prompt and response of a row that is taken."""
    *before, turn = row["messages"]
    last = max((n for n, message in enumerate(before) if message["role"] == "user"), default=-1)
    text = ""
    if row.get("tools") and template in ("full", "late"):
        text += "<|im_start|>tools\n" + "".join(json.dumps(tool) + "\n" for tool in row["tools"]) + "<|im_end|>\n"
    for number, message in enumerate(before):
        body = rendered(message, template, reasons=template != "late" or number > last)
        text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
    return text + "<|im_start|>assistant\n", rendered(turn, template, reasons=True) + "<|im_end|>"


def is_lost(row: Row, template: str) -> bool:
    """Whether a template leaves something of a row out."""
    if template in ("full", "late"):
        return any("name" in message and message["role"] == "user" for message in row["messages"])
    if row.get("tools") or any(
        {"reasoning_content", "calls", "name"} & {*m} for m in row["messages"] if m["role"] != "tool"
    ):
        return True
    return template == "two" and any(message["role"] not in ("user", "assistant") for message in row["messages"])


@dataclass
class Case:
    """A dataset in a file.

    Attributes:
        number: By which it is drawn.
        template: Of the tokenizer.
        form: Of the file.
        rows: As they are meant.
        fault: What is wrong with row `at`; "" if nothing is.
        fields: Keys of the section besides.
    """

    number: int
    template: str
    form: str
    rows: list[Row]
    fault: str = ""
    at: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


LETTERS = "abcdefgh äß‘€😀\u2028\\\"'{}%<>|:"
FAULTS = (
    "not json", "no column", "number", "empty list", "null content", "odd part", "odd arguments", "odd key", "alone", "blank",
    "cut", "no gzip", "no role", "text in place of a message", "calls are text", "no answer", "odd tools",
    "two demonstrations",
)  # fmt: skip
FILES = ("not json", "cut", "no gzip")


def draw(number: int) -> Case:
    lots = random.Random(f"{drawn.seed()} chat {number}")

    def text(least: int = 1) -> str:
        return "x" * least + "".join(lots.choice(LETTERS) for _ in range(lots.randrange(12))) + "y"

    def call() -> tuple[str, dict[str, Any]]:
        if lots.random() < 0.5:
            return "multiply", {"a": lots.randrange(100), "b": lots.randrange(100)}
        return "look", {"text": text()}

    def assistant(rich: float) -> Row:
        message: Row = {"role": "assistant", "content": text()}
        if lots.random() < rich:
            message["reasoning_content"] = text()
        if lots.random() < rich:
            message["calls"] = [call() for _ in range(lots.choice((1, 1, 2)))]
            message["content"] = lots.choice(("", message["content"]))
        return message

    rich = lots.choice((0.0, 0.4, 0.8))
    rows = []
    for _ in range(lots.randrange(1, 5)):
        messages: list[Row] = []
        if lots.random() < 0.3:
            messages.append({"role": lots.choice(("system", "system", "developer")), "content": text()})
        for turn in range(lots.randrange(1, 4)):
            if turn:
                messages.append(assistant(rich))
                for name, _ in messages[-1].get("calls", ()):
                    messages.append({"role": "tool", "name": name, "content": lots.choice((text(), text(), ""))})
            if messages[-1:] and messages[-1]["role"] == "tool" and lots.random() < 0.5:
                continue
            messages.append({"role": "user", "content": text()})
            if lots.random() < 0.05:
                messages[-1]["name"] = "Ada"
        row: Row = {"messages": [*messages, assistant(rich)]}
        if rich and lots.random() < 0.5:
            row["tools"] = TOOLS[: lots.randrange(1, 3)]
        rows.append(row)
    form = lots.choice(("jsonl", "jsonl", "jsonl.gz", "parquet", "parquet", "crlf", "bom"))
    template = lots.choice(("full", "full", "full", "late", "late", "plain", "two"))
    case = Case(number, template, form, rows)
    if lots.random() < 0.4:
        case.fault, case.at = lots.choice(FAULTS), lots.randrange(len(rows))
        if case.fault in FILES:
            case.form = "jsonl" if case.fault == "not json" else "jsonl.gz"
        elif form == "parquet":  # one type a column
            case.form = "jsonl"
    return case


def write(case: Case, folder: Path) -> tuple[Path, list[str]]:
    """Writes a case's file; returns it and the place of each row in it."""
    lots = random.Random(f"{drawn.seed()} written {case.number}")
    as_text, in_parts, bare_calls = (lots.random() < 0.5 for _ in range(3))

    def message_of(message: Row) -> Row:
        made: Row = {"role": message["role"]}
        content: Any = message["content"]
        if in_parts and content:
            content = [{"type": "text", "text": content[:2]}, {"type": "text", "text": content[2:]}]
        elif not content and message["role"] != "user":
            content = lots.choice((None, [] if in_parts else ""))
        if content is not None or lots.random() < 0.5:
            made["content"] = content
        for key in ("reasoning_content", "name"):
            if key in message:
                made[key] = message[key]
        if "calls" in message:
            made["tool_calls"] = []
            for number, (name, arguments) in enumerate(message["calls"]):
                function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
                call = function if bare_calls else {"id": f"c{number}", "type": "function", "function": function}
                made["tool_calls"].append(call)
        if case.form != "parquet" and lots.random() < 0.2:
            made |= {key: None for key in ("tool_calls", "reasoning_content", "weight") if key not in made}
        return made

    rows = []
    for row in case.rows:
        made: Row = {"messages": [message_of(message) for message in row["messages"]]}
        tools = row.get("tools")
        made["tools"] = json.dumps(tools) if as_text and tools else tools
        rows.append(made)
    if case.fault and case.fault not in FILES:
        spoil(rows[case.at], case)
    if case.form == "parquet":
        path = folder / f"chat{case.number}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path, [f"{path}, row {number}" for number in range(len(rows))]
    lines = [json.dumps(row, ensure_ascii=lots.random() < 0.5) for row in rows]
    if case.fault == "not json":
        lines[case.at] = lines[case.at][: lots.randrange(1, len(lines[case.at]) - 1)]
    end = "\r\n" if case.form == "crlf" else "\n"
    data = (end.join(lines) + lots.choice(("", end, end * 2))).encode()
    name = f"chat{case.number}.jsonl"
    if case.form == "bom":
        data = b"\xef\xbb\xbf" + data
    elif case.form == "jsonl.gz":
        name, packed = f"{name}.gz", gzip.compress(data)
        data = {"cut": packed[: lots.randrange(1, len(packed) - 1)], "no gzip": data}.get(case.fault, packed)
    path = folder / name
    path.write_bytes(data)
    return path, [f"{path}:{number + 1}" for number in range(len(rows))]


def spoil(row: Row, case: Case) -> None:
    """Plants a case's fault in a row of the file."""
    messages = row["messages"]
    user = next(message for message in messages if message["role"] == "user")
    last = messages[-1]
    match case.fault:
        case "no column":
            del row["messages"]
        case "number":
            row["messages"] = 5
        case "empty list":
            row["messages"] = []
        case "null content":
            user["content"] = None
        case "odd part":
            user["content"] = [{"type": "video", "url": "x"}]
        case "odd arguments":
            last["tool_calls"] = [{"type": "function", "function": {"name": "multiply", "arguments": "{"}}]
        case "odd key":
            last["weight"] = 0
        case "alone":
            row["messages"] = [{"role": "assistant", "content": "4"}]
        case "blank":
            row["messages"] = " "
        case "no role":
            del user["role"]
        case "text in place of a message":
            messages[0] = "hello"
        case "calls are text":
            last["tool_calls"] = "multiply"
        case "no answer":
            del messages[-1]
            if messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": "x"})
        case "odd tools":
            row["tools"] = 5
        case "two demonstrations":
            row["response"] = "another"


def fault_of(case: Case, folder: Path) -> str:
    """What is wrong with what becomes of a case; "" if nothing is."""
    path, places = write(case, folder)
    lost = [place for place, row in zip(places, case.rows, strict=True) if is_lost(row, case.template)]
    wanted = lost[:1]
    if case.fault in ("cut", "no gzip"):
        wanted = [str(path)]
    elif case.fault == "odd key":  # the reader takes it, and the template leaves it out
        wanted = sorted({*lost, places[case.at]}, key=places.index)[:1]
    elif case.fault:
        wanted = [places[case.at]]
    source = "parquet" if case.form == "parquet" else "jsonl"
    try:
        section = DataSourceConfig(
            source=source, path=str(path), prompt_key="messages", answer_key=None, tools_key="tools"
        )
        encoder = PromptTokenizer(tokenizer_of(case.template), 100_000)
        problems = encoder.fitting(
            make_dataset(OmegaConf.structured(section), requires_demonstrations=True), requires_demonstrations=True
        )
        found = [encoder.encode_demonstration(problems[number]) for number in range(len(problems))]
    except ConfigError as error:
        if wanted and wanted[0] in str(error) and "\n" not in str(error):
            return ""
        return f"refused, and {wanted or 'no place'} was to be named: {error}"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    if wanted:
        return f"taken, and {wanted[0]} was to be refused ({case.fault or 'the template leaves something out'})"
    for place, row, made in zip(places, case.rows, found, strict=True):
        assert made is not None
        ids, mask, _ = made
        texts = [
            encoder.tokenizer.decode([i for i, trained in zip(ids, mask, strict=True) if trained is side])
            for side in (False, True)
        ]
        if tuple(texts) != expected(row, case.template):
            return f"{place}: {texts} in place of {expected(row, case.template)}"
    return ""


@pytest.mark.parametrize("number", range(COUNT))
def test_what_reaches_the_model_is_what_the_file_says_or_its_line_is_named(number: int, tmp_path: Path) -> None:
    case = draw(number)
    assert not (fault := fault_of(case, tmp_path)), f"RLHPC_TESTS_SEED={drawn.seed()} case {number}: {case}\n{fault}"


def test_cases_of_every_kind_are_drawn() -> None:
    cases = [draw(number) for number in range(1000)]
    assert {case.fault for case in cases} == {"", *FAULTS} and {case.template for case in cases} == {*TEMPLATES}
    assert {case.form for case in cases} == {"jsonl", "jsonl.gz", "parquet", "crlf", "bom"}


if __name__ == "__main__":
    import collections
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        faults = {number: fault_of(draw(number), Path(folder)) for number in range(COUNT)}
    for number, fault in faults.items():
        if fault:
            print(number, draw(number).fault, draw(number).template, draw(number).form, fault[:600])
    kinds = collections.Counter(fault.split(":")[0].split(",")[0] for fault in faults.values() if fault)
    print(f"seed {drawn.seed()}: {sum(kinds.values())} of {COUNT} are wrong {dict(kinds)}")
