"""Messages of data files: what the reader makes of them, and what is said of rows, templates and answers that are faulty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.language.config.data import DataSourceConfig, PreferenceSourceConfig
from rlhpc.language.data import PromptTokenizer, make_dataset
from rlhpc.language.data.chat_messages import find_omitted_parts, read_messages, read_tools
from rlhpc.language.data.preferences import Preferences, encode
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

USER = {"role": "user", "content": "6*7?"}
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": None}}}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def section(**fields: Any) -> Any:
    return OmegaConf.structured(DataSourceConfig(**fields))


def test_null_counts_as_absent_and_inside_arguments_only_where_files_fill_it_in() -> None:
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "id": None}],
        "reasoning_content": None,
        "name": "",
    }
    for sparse, arguments in ((False, {"a": 6, "b": None}), (True, {"a": 6})):
        (_, made) = read_messages([USER, turn], is_sparse=sparse)
        function = {"name": "multiply", "arguments": arguments}
        assert made == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def test_parts_of_text_become_one_text_and_pictures_a_mark() -> None:
    parts = ["a", {"type": "text", "text": "b", "image": None}, {"type": "image", "text": None}]
    assert read_messages([{"role": "user", "content": parts}], has_pictures=True)[0]["content"] == "ab<image>"
    with pytest.raises(ConfigError, match=r"message 0 \(user\) has a part of type image, and no column of pictures"):
        read_messages([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("tools", "said"),
    [(5, "tools are a list"), ("[", "no JSON|not JSON"), ([{"type": "function"}], "tool 0 has no name")],
)
def test_tools_that_are_none(tools: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tools(tools)
    assert read_tools(None) == read_tools("") == ()


def test_a_text_that_stands_elsewhere_too_does_not_hide_what_a_template_leaves_out() -> None:
    messages = [USER, {"role": "assistant", "content": "six", "reasoning_content": "six"}]

    def render(messages: Any, tools: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    assert find_omitted_parts(messages, [], render)[0] == ["reasoning_content of message 1 (assistant)"]
    assert find_omitted_parts([USER], [{"name": "x"}], render)[0] == ["the tools"]


def test_a_template_that_computes_with_a_value_is_tried_without_it() -> None:
    def render(messages: Any, tools: Any) -> str:
        try:
            return "".join(f"{message['content']}{message.get('weight', 0) + 1}" for message in messages)
        except TypeError as error:
            raise ConfigError(str(error)) from None

    assert find_omitted_parts([{**USER, "weight": 2}], [], render) == ([], [])


def test_a_completion_of_messages_is_a_demonstration(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "42"}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        result,
        {"role": "assistant", "content": "42"},
    ]
    path = write(
        tmp_path / "rows.jsonl", {"prompt": [USER], "completion": completion}, {"prompt": "a", "completion": [USER]}
    )
    cfg = section(path=path, answer_key=None, response_key="completion")
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:2: column 'completion' is .*the last message is not the assistant's"
    ):
        make_dataset(cfg, requires_demonstrations=True)
    write(tmp_path / "rows.jsonl", {"prompt": [USER], "completion": completion})
    problem = make_dataset(cfg, requires_demonstrations=True)[0]
    assert [message["role"] for message in problem.messages] == ["user", "assistant", "tool"]
    assert problem.messages[1]["tool_calls"] == [CALL] and (problem.response, problem.turn) == ("42", None)


def test_a_row_without_the_reference_that_a_reward_compares_with(tmp_path: Path) -> None:
    from rlhpc.language.rewards.registry import check_problems

    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None})
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:2: column 'answer' is null, and the reward 'exact' compares with"
    ):
        check_problems(["exact"], make_dataset(section(path=path)), "data.train")
    with pytest.raises(ConfigError, match=r"data\.train\.answer_key is null, and the reward 'exact' compares with"):
        check_problems(["exact"], make_dataset(section(path=path, answer_key=None)), "data.train")
    check_problems(["format"], make_dataset(section(path=path)), "data.train")


def tokenizer_with(template: Any, folder: Path) -> Any:
    need_extra("llm")
    from rlhpc.language.data import load_tokenizer
    from rlhpc.language.models.tiny import VOCABULARY, character_tokenizer

    tokenizer = character_tokenizer(VOCABULARY + "<>:|{}\",_?'", 1000)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "template",
    ["{{ 1 + 'a' }}", "{{ messages[0].nothing.more }}", "{% if %}", {"tool_use": "x"}, "{{ raise_exception('no') }}"],
    ids=["TypeError", "undefined", "syntax", "without default", "raise_exception"],
)
def test_a_template_that_raises_is_one_line_with_its_file(template: Any, tmp_path: Path) -> None:
    encoder = PromptTokenizer(tokenizer_with(template, tmp_path / "model"), 100)
    problems = make_dataset(section(path=write(tmp_path / "rows.jsonl", {"prompt": "a"}), answer_key=None))
    for use in (lambda: encoder.fitting(problems), lambda: encoder.encode(problems[0])):
        with pytest.raises(ConfigError) as error:
            use()
        message = str(error.value)
        assert "rows.jsonl:1: " in message and "\n" not in message, message
        assert str(tmp_path / "model") in message, message


def test_preferences_of_messages_with_calls(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    asks = "{% if add_generation_prompt %}<assistant>{% endif %}"
    writes = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + calls + "{% endfor %}" + asks
    call, text = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "assistant", "content": "no"}
    row = {"prompt": [USER], "chosen": [USER, call], "rejected": [text]}
    path = write(tmp_path / "rows.jsonl", row)
    rows = Preferences(PreferenceSourceConfig(path=path), "pairs")
    encoder = PromptTokenizer(tokenizer_with(writes, tmp_path / "model"), 100)
    assert rows.fit(encoder, 200) == 0
    texts = [encoder.tokenizer.decode(ids) for ids in encode(rows[0], encoder, 200) or ()]
    assert texts[0].endswith('<assistant>|multiply{"a": 6, "b": null}<eos>') and texts[1].endswith("<assistant>no<eos>")
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: .*leaves out tool_calls.0.function.name of message 1 \(assistant\)"
    ):
        rows.fit(PromptTokenizer(tokenizer_with(plain, tmp_path / "other"), 100), 200)


def test_what_was_found_of_the_same_problems_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content }}{% endfor %}", tmp_path / "model")
    path = write(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "a" * 50}, {"prompt": "b"})

    def fitting() -> Any:
        return PromptTokenizer(tokenizer, 10, "drop").fitting(make_dataset(section(path=path, answer_key=None)))

    first = fitting()
    assert (len(first), first.dropped, [prompt.id for prompt in first]) == (2, 1, [0, 2])
    with monkeypatch.context() as patch:
        patch.setattr(PromptTokenizer, "encode", None)
        assert [prompt.id for prompt in fitting()] == [0, 2]
    write(tmp_path / "rows.jsonl", {"prompt": "a" * 40}, {"prompt": "a"}, {"prompt": "b"})
    assert [prompt.id for prompt in fitting()] == [1, 2]
