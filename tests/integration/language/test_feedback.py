"""Rewards that come when an episode has ended: whose they may be, and when they are trained on."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import Scripted, episodes_of, run_all
from test_reasoning import LanguageRun

from rlhpc.language.agents.external import ExternalEpisodes

TARGET = "outside_agents:awaits_feedback"


def notes_in(folder: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda note: note["seed"])


def give(url: str, key: str, body: Any) -> tuple[int, str]:
    """What the endpoint says to a reward."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/feedback", data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as said:
            return said.status, said.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def paid(generation: ExternalEpisodes, count: int) -> list[tuple[Any, Any]]:
    found, deadline = list[tuple[Any, Any]](), time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += generation.delayed_rewards()
        time.sleep(0.01)
    return found


def test_whoever_has_the_scorers_key_says_once_what_a_completion_was_worth(tmp_path: Path) -> None:
    with episodes_of(Scripted(lambda prompt: "84"), TARGET, feedback_s=60.0, notes=str(tmp_path)) as generation:
        episodes = run_all(generation, 3)
        assert all(
            episode.has_delayed_reward and episode.outcome.reward is None and not episode.failed for episode in episodes
        )
        url, key = generation.scorer["near"], generation.scorer["key"]
        first, second, third = notes_in(tmp_path)
        reward = {"id": first["id"], "reward": 0.5}
        for other in (first["key"], "", "rf-nobody", key[:-1]):
            assert give(url, other, reward)[0] == 401, "no other key, the model's own least of all"
        for body in (
            b"{", b"[]", {"id": first["id"]}, {"id": first["id"], "reward": True}, {"id": 7, "reward": 1.0},
            {"id": first["id"], "reward": "1"}, {"id": first["id"], "reward": float("nan")}, {"id": 1, "reward": 10**400},
        ):  # fmt: skip
            assert give(url, key, body)[0] == 400
        assert give(url, key, {"id": "chatcmpl-none", "reward": 1.0})[0] == 404
        assert not generation.delayed_rewards()
        assert give(url, key, reward)[0] == 200 and give(url, key, reward)[0] == 200, "a client may ask again"
        code, said = give(url, key, {**reward, "reward": 1})
        assert code == 409 and "0.5" in said
        assert give(url, key, {"id": third["id"], "reward": -2})[0] == 200
        found = {before.id: (before, after) for before, after in paid(generation, 2)}
        for number, worth in ((0, 0.5), (2, -2.0)):
            before, after = found[number]
            assert before is episodes[number] and not after.has_delayed_reward and after.outcome.reward == worth
            assert after.token_ids == before.token_ids and after.outcome.metrics["later"] == 1.0
            (sample,) = after.samples
            assert sample.rewards[-1] == worth, "the turn's own, too"
        generation.abort()
        until = time.monotonic() + 20
        while give(url, key, {"id": second["id"], "reward": 1.0})[0] != 404:
            assert time.monotonic() < until
        assert not generation.delayed_rewards()


def test_a_reward_may_come_before_its_agent_is_done_and_no_reward_is_a_failure(tmp_path: Path) -> None:
    with episodes_of(Scripted(lambda prompt: "84"), "outside_agents:waits_for_word", feedback_s=1.5, notes=str(tmp_path),
                     ) as generation:  # fmt: skip
        url, key = generation.scorer["near"], generation.scorer["key"]

        def answered() -> None:
            for note in notes_in(tmp_path):
                if not (tmp_path / f"{note['id']}.word").exists():
                    if note["seed"] == 0:
                        assert give(url, key, {"id": note["id"], "reward": 3.0})[0] == 200
                    (tmp_path / f"{note['id']}.word").touch()

        run_all(generation, 2, between=answered)
        (first, second) = sorted((after for _, after in paid(generation, 2)), key=lambda episode: int(episode.id))
    assert first.outcome.reward == 3.0
    assert second.failed and "no reward came for it within agent.feedback_timeout_s (1.5 s)" in second.outcome.error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"feedback_s": 0.0}, "set agent.feedback_timeout_s"),
        ({"feedback_s": 9.0, "later": ["chatcmpl-other"]}, "a completion that nobody received in this episode"),
    ],
)
def test_what_cannot_come_is_not_waited_for(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with episodes_of(Scripted(lambda prompt: "84"), TARGET, notes=str(tmp_path), **options) as generation:
        (episode,) = run_all(generation, 1)
    assert not episode.has_delayed_reward and episode.failed and said in episode.outcome.error


RUN = (
    "reward.terms=[{name: agent}]", "runner.max_steps=6", "runner.save_interval=3", "data.prompts_per_step=4",
    "algorithm.group_size=2", "algorithm.max_staleness=3", "actor.global_batch_size=8",
)  # fmt: skip


@contextmanager
def scorer(run: LanguageRun, notes: Path, slow: int, said: list[str]) -> Iterator[dict[str, float]]:
    """Gives each completion a reward, every `slow`-th of them two steps later; one by the command, which said what is in
    `said`. What it has given, by id."""
    given, seen, held, over = dict[str, float](), set[str](), list[tuple[int, str]](), threading.Event()

    def endpoints() -> list[dict[str, str]]:
        return [json.loads(path.read_text()) for path in (run.root / "registry").glob("*/feedback/*.json")]

    def pay(name: str) -> None:
        reward = (int(name[-6:], 16) % 5) / 4
        if not said:
            said.append(run.rlhpc("feedback", str(run.root), name, str(reward)))
            said.append(run.rlhpc("feedback", str(run.root), "chatcmpl-none", "1", code=2))
        codes = [give(one["near"], one["key"], {"id": name, "reward": reward})[0] for one in endpoints()]
        if 200 in codes:
            given[name] = reward

    def work() -> None:
        while not over.wait(0.02):
            rows = run.root / "metrics.jsonl"
            steps = len(rows.read_text().splitlines()) if rows.exists() else 0
            for note in notes_in(notes):
                if note["id"] not in seen:
                    seen.add(note["id"])
                    held.append((steps + 2 * (len(seen) % slow == 0), note["id"]))
            for due in [entry for entry in held if entry[0] <= steps]:
                held.remove(due)
                pay(due[1])

    thread = threading.Thread(target=work)
    thread.start()
    yield given
    over.set()
    thread.join(60)


@pytest.mark.long
def test_a_run_goes_on_with_others_and_trains_on_what_was_paid_later(tmp_path: Path) -> None:
    """One completion of five waits for two more steps. No step waits for it; it is trained on in the step it came to."""
    notes = tmp_path / "notes"
    agent = f"agent={{kind: python, target: '{TARGET}', feedback_timeout_s: 100, kwargs: {{notes: {notes}}}}}"
    run = LanguageRun(tmp_path / "run", agent, *RUN)
    said = list[str]()
    with scorer(run, notes, 5, said) as given:
        run.train(timeout=120)
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["agent/later"] == 1.0 for row in rows)
    assert max(row["rollout/staleness_max"] for row in rows) >= 2, "some were drawn two versions before"
    assert not any(row["agent/failed"] for row in rows), rows
    counts = np.diff([row["rollout/samples"] for row in rows], prepend=0.0)
    worth = sum(count * row["train/reward"] for count, row in zip(counts, rows, strict=True))
    assert 0 < worth <= sum(given.values()) and worth * 4 == pytest.approx(round(worth * 4), abs=1e-3)
    assert "run: rollout-0 has taken" in said[0] and "none of 1 rollout ranks awaits a reward for it" in said[1]
    assert "no driver of this run is at work" in run.rlhpc("feedback", str(run.root), "chatcmpl-none", "1", code=2)
    assert not [
        path for path in run.root.rglob("*") if path.is_file() and re.search(rb"rf-[\w-]{30}", path.read_bytes())
    ], "keys end with it"
