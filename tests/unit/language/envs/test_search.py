"""Search environment."""

from __future__ import annotations

import json

from rlhpc.language.envs.base import step_of
from rlhpc.language.envs.search import Bm25, Search, get_page_index
from tests.unit.language.envs.playing import begun, said


def test_a_search_finds_the_page_and_a_closed_one_nothing() -> None:
    found = Bm25(["a rare word", "a common word", "a common text of common things"])
    assert found.best("rare word", 3) == [0, 1] and found.best("common", 1) == [2] and found.best("nobody", 3) == []
    world = get_page_index(400, 0)
    assert all(world.search(name, 1) == [world.page(name)] for name in world.names)
    problem = Search.problem(1)
    player = begun(Search(closed=True), problem)
    assert said(player, "search: " + problem.question).said == "nothing."
    asked = begun(Search(results=3), problem)
    call = {"id": "call_1", "function": {"name": "search", "arguments": json.dumps({"query": world.names[3]})}}
    (message,) = step_of(asked.step({"content": "", "tool_calls": [call]})).said
    assert (
        message["role"] == "tool"
        and message["tool_call_id"] == "call_1"
        and world.page(world.names[3]) in message["content"]
    )
    schema = asked.tools[0]["function"]
    assert (
        schema["parameters"]["properties"] == {"query": {"type": "string"}} and "pages" in schema["description"].lower()
    )
