"""Agents within the rollout rank: tools between turns, and environments whose episodes run beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.agents.external import AgentOptions, ExternalEpisodes
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.sessions import EpisodeLimits
from rlhpc.language.agents.inline_agents import InlineEnvironment, ToolAgent
from rlhpc.language.envs.base import Environment, EnvResponse, Message
from tests.integration.language.gateway_things import Scripted, chat_tokenizer, run_all


class Count(Environment):
    """Counts turns, and goes wrong where the model says so."""

    def reset(self, task: Any) -> EnvResponse:
        self._turns = 0
        return None

    def step(self, reply: Message) -> EnvResponse:
        self._turns += 1
        if "fail" in reply["content"]:
            raise KeyError("no such word")
        return 1.0 if self._turns == 2 else f"turn {self._turns}"


@pytest.mark.parametrize(
    ("say", "turns", "reward", "error"),
    [
        (lambda prompt: "more", 10, 1.0, ""),
        (lambda prompt: "fail", 10, None, "KeyError: 'no such word' (test_inline_agents.py, line "),
        (lambda prompt: "more", 1, 0.0, ""),
    ],
    ids=["played", "fails", "cut"],
)
def test_an_environment_s_episodes(say: Callable[[str], str], turns: int, reward: float | None, error: str) -> None:
    engine, tokenizer = Scripted(say), chat_tokenizer()
    options = AgentOptions(EpisodeLimits(turns, 4000), 60.0, {})
    parsers = Parsers(tokenizer, "hermes", "think")
    generation = ExternalEpisodes(engine, tokenizer, parsers, engine.context, InlineEnvironment(Count, 2), options)
    try:
        episodes = run_all(generation, 5)
    finally:
        generation.close()
    for episode in episodes:
        assert episode.outcome.error.startswith(error) and bool(episode.outcome.error) == bool(error)
        assert episode.outcome.reward == reward
        assert episode.finish_reason == ("error" if error else "length" if turns == 1 else "stop")


def test_tools_answer_the_last_call_of_a_turn() -> None:
    def loud(text: str) -> str:
        return f"<tool>{text.upper()}</result>" + "!" * 50

    def picture(text: str) -> bytes:
        return b"PNG"

    agent, episode = ToolAgent({"loud": loud, "picture": picture}, longest=10), Episode(0, ())
    assert agent.respond(episode, "no call") is None
    assert agent.respond(episode, "<tool>loud: a</tool> <tool>loud: b</tool>") == "<result> B!!!!!!!!...</result>\n"
    assert agent.respond(episode, "<tool>picture: x</tool>") == {
        "role": "tool",
        "content": [{"type": "image", "image": b"PNG"}],
    }
    assert "there is no tool nosuch" in str(agent.respond(episode, "<tool>nosuch: x</tool>"))
    assert "write <tool>" in str(agent.respond(episode, "<tool>broken</tool>"))
    failing = ToolAgent({"fail": lambda text: str(1 / 0)})
    assert failing.respond(episode, "<tool>fail: x</tool>") == "<result>error: division by zero</result>\n"


def test_the_tool_agent():
    agent = ToolAgent({"echo": lambda text: text, "long": lambda text: "x" * 5000}, longest=10)
    assert agent.respond(Episode(0, ()), "so it is 7") is None
    assert agent.respond(Episode(0, ()), "<tool>echo: a</tool>") == "<result> a</result>\n"
    assert agent.respond(Episode(0, ()), "<tool>echo: a</tool>, <tool> echo:b</tool>\n") == "<result>b</result>\n"
    assert agent.respond(Episode(0, ()), "<tool>long: </tool>") == "<result>xxxxxxxxxx...</result>\n"
    assert (
        agent.respond(Episode(0, ()), "<tool>ECHO: a</tool>")
        == "<result>error: there is no tool ECHO; there are echo, long</result>\n"
    )
    assert agent.respond(Episode(0, ()), "<tool>echo</tool>").startswith("<result>error: write <tool>")
    assert agent.respond(Episode(0, ()), "<tool>echo:</result><tool>x</tool>") == "<result>x</result>\n"
