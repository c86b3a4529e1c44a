"""Environments in the rollout rank: what they say and pay, and what is left of those that go wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import Scripted, chat_tokenizer, run_all
from test_reasoning import LanguageRun

from rlhpc.jobs.paths import RunPaths
from rlhpc.language.agents.episodes import sample_of
from rlhpc.language.agents.external import AgentOptions, ExternalEpisodes
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.sessions import EpisodeLimits
from rlhpc.language.agents.inline_agents import InlineEnvironment
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import Environment, EnvResponse, Message, Step
from rlhpc.language.envs.games import Guess, KuhnPoker, Proposer
from rlhpc.language.envs.search import Search
from rlhpc.language.envs.tools import ProblemTools
from rlhpc.language.evaluation.evaluate import transcript
from rlhpc.language.reporting.sample_pages import write_episodes_page
from rlhpc.language.rewards.math_verifier import MathReward


@contextmanager
def played(
    engine: Any, environment: Any, *, turns: int = 10, timeout_s: float = 60.0, roles: tuple[str, ...] = ()
) -> Any:
    tokenizer = chat_tokenizer()
    options = AgentOptions(EpisodeLimits(turns, 4000, roles), timeout_s, {})
    found = ExternalEpisodes(
        engine,
        tokenizer,
        Parsers(tokenizer, "hermes", "think"),
        engine.context,
        InlineEnvironment(environment, 4),
        options,
    )
    try:
        yield found
    finally:
        found.close()


def text_of(sample: Any) -> str:
    said: str = chat_tokenizer().decode([*sample.prompt_ids, *sample.token_ids])
    return said


def test_a_search_by_the_models_own_calls() -> None:
    problem = Search.problem(3)  # two hops
    who = problem.question.rstrip("?").split()[-1]

    def say(prompt: str) -> str:
        pages = prompt.split("<tool_response>")[1:]
        if len(pages) == 2:
            return pages[1].split("home ")[1][:3] if "home of" in prompt else pages[1].split("make ")[1][:3]
        name = pages[0].split("kin ")[1][:3] if pages else who
        return f'<tool_call>{{"arguments":  {{"query": "{name}"}}, "name": "search"}}</tool_call>'

    engine = Scripted(say)
    with played(engine, Search) as generation:
        episodes = run_all(generation, 6, prompt=problem)
        assert generation.unfinished() == 0
    for episode in episodes:
        (sample,) = episode.samples  # the model's tokens were drifting ones, and yet nothing was torn
        assert (episode.outcome.reward, episode.finish_reason, sample.turns) == (1.0, "stop", 3)
        assert episode.outcome.metrics["searches"] == 2.0 and sample.turn_ids[-1] == 2
        assert text_of(sample).count("<tool_response>") == 2 and '"name": "search"' in text_of(sample)
        assert [reward for reward in sample.rewards if reward] == [1.0] and sample.rewards[-1] == 1.0
    with played(engine, Search, turns=2) as generation:
        cut = run_all(generation, 1, prompt=problem)[0]
    assert (cut.finish_reason, cut.outcome.reward, cut.failed) == ("length", 0.0, False)


def test_players_have_contexts_and_rewards_of_their_own() -> None:
    problem = Prompt(0, ({"role": "user", "content": "Kuhn poker"},), "", {"deal": "QK"})
    moves = {"Your card is Q": "p", "Your card is K": "b", "The other bets": "b"}

    def say(prompt: str) -> str:
        last = prompt.rsplit("<|im_start|>user", 1)[-1]
        return next(move for said, move in reversed(moves.items()) if said in last)

    with played(Scripted(say), KuhnPoker, roles=KuhnPoker.roles) as generation:
        episode = run_all(generation, 1, prompt=problem)[0]
    first, second = episode.samples
    assert (first.role, second.role, first.turns, second.turns) == (0, 1, 2, 1)
    assert "card is K" not in text_of(first) and "card is Q" not in text_of(second)
    assert (episode.outcome.reward, first.role_reward_offset, second.role_reward_offset) == (0.0, -2.0, 2.0)
    assert (sum(first.rewards), first.rewards[-1], second.rewards[-1]) == (-2.0, -2.0, 2.0)


def test_attempts_of_a_solver_are_turns_with_the_same_context() -> None:
    wrong = iter([False, True, False, True])

    def say(prompt: str) -> str:
        return "12*7=" if "neither easy nor hard" in prompt else "84" if next(wrong) else "7"

    with played(Scripted(say), Proposer, roles=tuple(Proposer.roles)) as generation:
        episode = run_all(generation, 1, prompt=Proposer.problem(0))[0]
    proposer, *attempts = episode.samples
    assert len(attempts) == 4 and len({attempt.prompt_ids for attempt in attempts}) == 1
    assert sum(proposer.rewards) == 1.0, "half of them were right"
    paid = sorted((sample.turn_ids[0], sum(sample.rewards)) for sample in attempts)
    assert paid == [(0, 0.0), (1, 1.0), (2, 0.0), (3, 1.0)]


def test_an_episode_is_truncated_whose_last_turn_was_cut() -> None:
    replies = {"last": ["1", "x" * 400], "first": ["x" * 400, "1"], "none": ["1", "1"]}
    found = {}
    for cut, said in replies.items():
        turns = iter(said)
        with played(Scripted(lambda prompt, turns=turns: next(turns)), Guess) as generation:
            (episode,) = run_all(generation, 1, most=20, prompt=Guess.problem(1, turns=2))
        assert not episode.failed
        found[cut] = episode.finish_reason
    assert found == {"last": "length", "first": "stop", "none": "stop"}


class Broken(Environment):
    """Goes wrong in its second turn, as it is told to."""

    let_go = threading.Event()

    def __init__(self, how: str = "hang") -> None:
        self._how, self._turns = how, 0

    def reset(self, task: Any) -> EnvResponse:
        return "Begin." if task.seed % 2 else Step(task.question)

    def step(self, reply: Message) -> EnvResponse:
        self._turns += 1
        if self._turns == 1:
            return "Go on."
        if self._how == "hang":
            self.let_go.wait(100)
        if self._how == "raise":
            raise ValueError("no")
        return object()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("how", "said"), [("hang", "agent.timeout_s"), ("raise", "ValueError: no"), ("other", "a object")]
)
def test_of_an_environment_that_goes_wrong_only_its_episodes_are_lost(how: str, said: str) -> None:
    from functools import partial

    Broken.let_go.clear()
    with played(Scripted(lambda prompt: "84"), partial(Broken, how), timeout_s=0.5) as generation:
        episodes = run_all(generation, 20, seconds=30)
        assert all(episode.failed and said in episode.outcome.error for episode in episodes)
        generation.add([])
    Broken.let_go.set()
    deadline = time.monotonic() + 10
    while any(thread.name == "rlhpc-environment" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "threads are left"
        time.sleep(0.01)


RUN = (
    "agent={kind: environment, target: kuhn_poker, kwargs: {short: true}, episodes_per_rank: 16}",
    "data.train={source: environment, size: 64, kwargs: {name: kuhn_poker}}", "reward.terms=[{name: agent}]",
    "data.eval=[]", "workflow.eval_suites=[]", "runner.max_steps=2", "runner.save_interval=2", "data.prompts_per_step=4",
    "algorithm.group_size=4", "actor.global_batch_size=16", "algorithm.adv_type=rloo", "algorithm.credit=state",
    "rollout.max_new_tokens=1", "actor.model.kwargs={vocabulary: '12JQKpb', hidden: 32, layers: 1, heads: 1}",
)  # fmt: skip


def test_a_run_of_self_play(tmp_path: Path) -> None:
    one, other = (LanguageRun(tmp_path / name, *RUN) for name in ("one", "other"))
    one.train()
    other.train("agent.episodes_per_rank=3")
    rows = one.rows()
    assert all(row["train/mismatch_abs"] < 1e-5 and row["train/grad_norm"] > 0 for row in rows)
    assert all(1 <= row["agent/samples"] <= 2 and "agent/no_move" in row for row in rows)
    mine, theirs = one.weights(2), other.weights(2)
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs), "however many are under way at a time"
    for override, said in (
        ("agent.target=poker", "did you mean 'kuhn_poker'"),
        ("agent.kwargs={long: true}", "allowed: short"),
        ("agent.roles=[a]", "agent.roles"),
        ("algorithm.adv_type=raw", "algorithm.credit"),
    ):
        told = LanguageRun(tmp_path / "refused", *RUN).train(override, code=2)
        assert said in told and "Traceback" not in told


def test_what_an_episode_left_is_on_a_page_as_it_was_and_foreign_text_stays_text(tmp_path: Path) -> None:
    problem = Prompt(0, ({"role": "user", "content": "Kuhn poker"},), "<b>none</b>", {"deal": "QK"})
    with played(Scripted(lambda prompt: "b<script>x</script>"), KuhnPoker, roles=KuhnPoker.roles) as generation:
        episode = run_all(generation, 1, prompt=problem)[0]
    left = transcript(episode, chat_tokenizer(), KuhnPoker.roles)
    for sample, shown in zip(episode.samples, left["episode"], strict=True):
        drawn = [token for part in shown["parts"] for token in part.get("drawn", [])]
        assert [logprob for _, logprob in drawn] == pytest.approx([p for p in sample.logprobs if p], abs=1e-4)
        assert "".join(text for text, _ in drawn) == "b<script>x</script><|im_end|>"
        assert [part["reward"] for part in shown["parts"] if "reward" in part] == [sum(sample.rewards)]
    folder = tmp_path / "run" / "eval" / "global_step_1"
    folder.mkdir(parents=True)
    row = {
        "id": 0,
        "sample": 0,
        "right": True,
        "prompt": "",
        "response": "",
        "answer": problem.answer,
        "reward": 2.0,
        **left,
    }
    torn = {**row, "id": 1, "episode": [{"parts": [{"turn": 0, "drawn": [["x", "none"]]}]}]}
    folder.joinpath("here.samples.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(torn) + "\n")
    folder.joinpath("here.json").write_text(json.dumps({"global_step": 1, "suite": "here"}))
    page = write_episodes_page(RunPaths(tmp_path / "run"))
    assert page is not None
    html = page.read_text()
    assert "<script" not in html and "<b>none" not in html and html.count("<article") == 1
    assert "first · branch 1 of 2" in html and "turn 1, reward -2" in html and "Your card is Q" in html
    assert html.count('<i title="log-prob -') == sum(
        len(p.get("drawn", [])) for s in left["episode"] for p in s["parts"]
    )


def test_the_answer_after_a_tools_result_is_what_rewards_score() -> None:
    problem = Prompt(0, ({"role": "user", "content": "What is 12 * 7?"},), "84")

    def say(prompt: str) -> str:
        if "<tool_response>" not in prompt:
            return '<tool_call>{"arguments": {"code": "x = 12\\nx * 7"}, "name": "python"}</tool_call>'
        result = prompt.split("<tool_response>")[1].split("</tool_response>")[0].strip()
        return f"It is \\boxed{{{result}}}."

    with played(Scripted(say), partial(ProblemTools, ["python"])) as generation:
        episodes = run_all(generation, 3, prompt=problem)
    for episode in episodes:
        (sample,) = episode.samples
        assert (episode.failed, sample.turns, episode.outcome.metrics["tool_calls"]) == (False, 2, 1.0)
        scored = sample_of(problem, episode, chat_tokenizer(), has_finished=True)
        assert scored.response == "It is \\boxed{84}." and MathReward()(scored) == 1.0
