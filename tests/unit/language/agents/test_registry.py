"""Agents by name, and the runner of episodes that a configuration describes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhpc.language.agents.registry import Agent, ToolAgent, make_agent, make_generation, register_agent
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.agents.test_episodes import Letters, Scripted, request


def test_a_search_task_is_a_class_outside_the_package(tmp_path, monkeypatch):
    (tmp_path / "pages_search.py").write_text(
        "from rlhpc.language.agents.registry import ToolAgent\n"
        "PAGES = {'capital of France': 'Paris is the capital of France.'}\n"
        "class SearchAgent(ToolAgent):\n"
        "    def __init__(self):\n"
        "        super().__init__(tools={'search': self.search}, longest=300)\n"
        "    def search(self, query):\n"
        "        return PAGES[query.strip()]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rollout = SimpleNamespace(agent="pages_search:SearchAgent", max_turns=3)
    cfg = SimpleNamespace(rollout=rollout, agent=SimpleNamespace(kind="inline"))

    def ask(text: str) -> str:
        if "<result>" not in text:
            return f"<tool>search: {text}</tool>"
        return "<answer>" + text.split("<result>")[1].split()[0] + "</answer>$"

    generation = make_generation(cfg, Scripted(ask), Letters())
    generation.add([request(0, "capital of France"), request(1, "capital of Atlantis")])
    said = {}
    while generation.unfinished():
        said |= {e.id: Letters().decode(e.token_ids, skip_special_tokens=True) for e in generation.step()}
    assert said[0].endswith("<result>Paris is the capital of France.</result>\n<answer>Paris</answer>")
    assert "<result>error: 'capital of Atlantis'</result>" in said[1]


def test_by_name():
    assert isinstance(make_agent("Tools"), ToolAgent)

    @register_agent("Mine")
    class Mine(Agent):
        pass

    assert isinstance(make_agent("mine"), Mine)
    with pytest.raises(ConfigError, match="registered twice"):
        register_agent("TOOLS")(Mine)
    for name, message in [
        ("tool", "is unknown; did you mean 'tools'"), ("nowhere:A", "cannot be imported"), ("os:getcwd", "is no agent"),
        ("rlhpc.language.agents.episodes:Episode", "cannot be built without arguments"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            make_agent(name)
