"""Episodes of several turns, on an engine that writes what a script says."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from rlhpc.language.agents.chat_content import message_text
from rlhpc.language.agents.episodes import Episode, id_array, logprob_array, repeated_value, token_array, tokens_of
from rlhpc.language.agents.registry import (
    Agent,
    EpisodeRunner,
    ToolAgent,
    make_generation,
    run_episodes,
)
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines import Completion, Request, SamplingParams
from rlhpc.runtime.errors import ConfigError

EOS = 0


class Letters:
    """A tokenizer of characters; token 0 is the end."""

    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return "".join("" if i == EOS and skip_special_tokens else "<eos>" if i == EOS else chr(i) for i in ids)

    def apply_chat_template(self, messages, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"[{m['role']}]{m['content']}<eos>\n" for m in messages) + "[assistant]"


@dataclass
class Scripted:
    """An engine after `script`: from all that stands before, to what is written next, one token a step."""

    script: object
    context: int = 10_000
    version: int = 0
    requests: list[Request] = field(default_factory=list)
    _rows: dict[int, tuple[Request, list[int], Completion]] = field(default_factory=dict)

    def add(self, requests) -> None:
        for request in requests:
            if len(request.prompt_ids) >= self.context:
                raise ConfigError("no room")
            assert request.id not in self._rows
            text = self.script(Letters().decode(request.prompt_ids))
            self.requests.append(request)
            tokens = [ord(letter) for letter in text.removesuffix("$")] + ([EOS] if text.endswith("$") else [])
            self._rows[request.id] = request, tokens, Completion(request.id)

    def step(self) -> list[Completion]:
        done = []
        for request, tokens, completion in list(self._rows.values()):
            token = tokens[len(completion.token_ids)]
            completion.token_ids.append(token)
            completion.logprobs.append(-token / 1000)
            completion.versions.append(self.version)
            text = Letters().decode(completion.token_ids)
            room = min(request.sampling.max_new_tokens, self.context - len(request.prompt_ids))
            if token == EOS or any(stop in text for stop in request.sampling.stop):
                completion.finish_reason = "stop"
            elif len(completion.token_ids) >= room:
                completion.finish_reason = "length"
            else:
                continue
            del self._rows[request.id]
            done.append(completion)
        return done

    def unfinished(self) -> int:
        return len(self._rows)

    def abort(self) -> list[Completion]:
        rows, self._rows = self._rows, {}
        return [completion for _, _, completion in rows.values()]


def request(number: int, prompt: str, most: int = 200, seed: int = 7) -> Request:
    return Request(number, tuple(map(ord, prompt)), SamplingParams(max_new_tokens=most), seed)


def test_an_episode_is_gone_on_with() -> None:
    """From its tokens, with what room is left and with other random numbers; what is whole, and what has not begun, too."""
    engine = Scripted(lambda text: "abcdefgh$"[len(text) - 1 :])
    episodes = EpisodeRunner(engine, Letters())
    begun = Completion(1, [ord("a"), ord("b")], [-1.0, -2.0], [3, 4], "abort")
    for number, drawn in enumerate((begun, Completion(2, [ord("z"), EOS], [-1.0, -1.0], [3, 3], "stop"))):
        episodes.resume(request(number, "?", most=5), drawn)
    episodes.resume(request(2, "?", most=5), Completion(2, finish_reason="abort"))
    found = {}
    while episodes.unfinished():
        found |= {episode.id: episode for episode in episodes.step()}
    assert Letters().decode(found[0].token_ids) == "abcde" and found[0].finish_reason == "length"
    assert found[0].logprobs[:2] == [-1.0, -2.0] and found[0].versions == [3, 4, 0, 0, 0]
    assert found[1].token_ids == [ord("z"), EOS] and found[1].finish_reason == "stop" and found[1].turns == 1
    assert Letters().decode(found[2].token_ids) == "abcde" and found[2].prompt_ids == (ord("?"),)
    follows, fresh = engine.requests
    assert Letters().decode(follows.prompt_ids) == "?ab" and follows.sampling.max_new_tokens == 3
    assert follows.seed != request(0, "?").seed and fresh.seed == request(2, "?").seed


def test_what_had_ended_is_not_gone_on_with() -> None:
    """An engine may hold back what ended while it did something else; it is given back as it ended."""
    engine = Scripted(lambda text: "ab$")
    episodes = EpisodeRunner(engine, Letters())
    episodes.add([request(0, "?"), request(1, "??")])
    engine._rows[0][2].finish_reason, engine._rows[1][2].finish_reason = "stop", "abort"
    assert {e.id: (e.finish_reason, e.turns) for e in episodes.abort()} == {0: ("stop", 1), 1: ("abort", 0)}


def sums(text: str) -> str:
    """Asks the calculator, then repeats what it said."""
    if "<result>" not in text:
        return f"<tool>calculator: {text}</tool>"
    return text.split("<result>")[1].split("</result>")[0] + "$"


def run(script, prompts, agent, max_turns=4, **given):
    backend = Scripted(script, **given.pop("engine", {}))
    asked = [(request(i, prompt, **given), None) for i, prompt in enumerate(prompts)]
    episodes = {episode.id: episode for episode in run_episodes(backend, asked, agent, Letters(), max_turns)}
    return [episodes[i] for i in range(len(prompts))], backend


def test_tokens_and_masks_of_a_tool_call():
    (episode,), backend = run(sums, ["12*7"], ToolAgent())
    call, result, said = "<tool>calculator: 12*7</tool>", "<result>84</result>\n", "84"
    assert episode.token_ids == [*map(ord, call + result + said), EOS]
    masks = [True] * len(call) + [False] * len(result) + [True] * 3
    assert episode.loss_mask == masks
    assert episode.logprobs == [-t / 1000 if mask else 0 for t, mask in zip(episode.token_ids, masks, strict=True)]
    assert episode.turns == 2 and episode.finish_reason == "stop" and len(episode.versions) == len(masks)
    # the second turn goes on after exactly these tokens, with other random numbers and what is left of the length
    first, second = backend.requests
    assert second.prompt_ids == (*first.prompt_ids, *map(ord, call + result))
    assert second.seed != first.seed and second.id == first.id
    assert second.sampling.max_new_tokens == 200 - len(call + result)
    assert first.sampling.stop == second.sampling.stop == ("</tool>",)


def test_the_same_seed_gives_the_same_episode():
    seeds = [[r.seed for r in run(sums, ["1+1"], ToolAgent(), seed=seed)[1].requests] for seed in (3, 3, 4)]
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 4


def test_one_turn_without_an_agent():
    backend = Scripted(lambda text: "two$")
    cfg = SimpleNamespace(rollout=SimpleNamespace(agent=None, max_turns=1), agent=SimpleNamespace(kind="inline"))
    generation = make_generation(cfg, backend, Letters())
    prompt = Prompt(1, ({"role": "user", "content": "1+1"},))
    generation.add([request(0, "1+1"), request(1, "1+1")], prompt)
    ended = []
    while generation.unfinished():
        ended += generation.step()
    assert [Letters().decode(e.token_ids) for e in ended] == ["two<eos>"] * 2 and ended[0].prompt is prompt


def test_episodes_end_for_a_reason():
    again = "<tool>calculator: 1</tool>"
    (episode,), _ = run(lambda text: again, ["q"], ToolAgent(), max_turns=3)
    assert (episode.finish_reason, episode.turns) == ("turns", 3) and episode.loss_mask[-1]
    (episode,), _ = run(lambda text: again, ["q"], ToolAgent(), max_turns=50, most=100)
    assert episode.finish_reason == "length" and len(episode.token_ids) == 100
    (episode,), _ = run(lambda text: again, ["q"], ToolAgent(), max_turns=50, most=len(again) + 3)
    assert episode.finish_reason == "length" and episode.loss_mask[-3:] == [False] * 3
    (episode,), _ = run(lambda text: "x" * 99, ["q"], ToolAgent(), most=20)
    assert (episode.finish_reason, len(episode.token_ids)) == ("length", 20)
    (episode,), _ = run(lambda text: again, ["q"], ToolAgent(), max_turns=9, engine={"context": 40})
    assert episode.finish_reason == "length" and len(episode.token_ids) >= 39


class Moody(Agent):
    """Does what the model says."""

    timeout_s = 0.3

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.go = threading.Event()

    def respond(self, episode, text):
        self.seen.append(text)
        match text:
            case "raise":
                raise ValueError("in a bad mood")
            case "hang":
                self.go.wait(30)
            case "number":
                return 7
            case "message":
                return {"role": "user", "content": "and now?"}
            case "wait":
                time.sleep(0.2)
        return None


def test_an_agent_that_fails_costs_its_episode(caplog):
    agent = Moody()
    prompts = ["raise", "hang", "number", "fine", *["hang"] * 9, "last"]
    episodes, _ = run(lambda text: text + "$", prompts, agent)
    agent.go.set()
    assert [e.finish_reason for e in episodes] == ["error"] * 3 + ["stop"] + ["error"] * 9 + ["stop"]
    assert episodes[0].token_ids == [*map(ord, "raise"), EOS] and "in a bad mood" in caplog.text


def test_nothing_waits_for_the_slowest():
    backend = Scripted(lambda text: text + "$")
    order = [e.id for e in run_episodes(backend, [(request(0, "wait"), None), (request(1, "a much longer one"), None)],
                                        Moody(), Letters(), 2)]  # fmt: skip
    assert order == [1, 0]


def test_answers_as_messages():
    def talk(text: str) -> str:
        return "done$" if "and now?" in text else "message$"

    (episode,), _ = run(talk, ["q"], Moody())
    said = Letters().decode(episode.token_ids)
    # the model has written its end of turn itself: the template's is not repeated
    assert said == "message<eos>\n[user]and now?<eos>\n[assistant]done<eos>"
    assert sum(episode.loss_mask) == len("message") + 1 + len("done") + 1
    assert message_text(Letters(), {"role": "user", "content": "x"}, [97]) == "<eos>\n[user]x<eos>\n[assistant]"


def test_versions_of_weights_that_change_on_the_way():
    backend = Scripted(sums)
    episodes = EpisodeRunner(backend, Letters(), ToolAgent(), max_turns=3)
    episodes.add([request(0, "2+2")])
    ended = []
    while episodes.unfinished():
        ended += episodes.step()
        backend.version += 1
    versions, mask = ended[0].versions, ended[0].loss_mask
    assert versions == sorted(versions) and len(versions) == len(mask)
    agents = [version for version, own in zip(versions, mask, strict=True) if not own]
    assert set(agents) == {versions[mask.index(False) - 1]}


def test_aborting():
    backend = Scripted(lambda text: text + "$")
    agent = Moody()
    agent.timeout_s = 30.0
    episodes = EpisodeRunner(backend, Letters(), agent, max_turns=3)
    episodes.add([request(0, "hang"), request(1, "something long")])
    while len(agent.seen) < 1:
        assert episodes.step() == []
    ended = {episode.id: episode for episode in episodes.abort()}
    agent.go.set()
    assert {e.finish_reason for e in ended.values()} == {"abort"} and sorted(ended) == [0, 1]
    assert 0 < len(ended[1].token_ids) < len("something long")
    assert episodes.unfinished() == backend.unfinished() == 0
    episodes.add([request(0, "fine")])  # the same number again, while the old answer comes in late
    ended = []
    while episodes.unfinished():
        ended += episodes.step()
    assert [(e.id, e.finish_reason) for e in ended] == [(0, "stop")]


def test_many_episodes_with_python():
    def script(text: str) -> str:
        if "<result>" not in text:
            return f"<tool>python: {text}</tool>"
        return text.split("<result>")[1].split("</result>")[0] + "$"

    episodes, _ = run(script, [f"print({i} ** 2)" for i in range(16)], ToolAgent())
    assert [Letters().decode(e.token_ids[-8:], True).split("\n")[-1] for e in episodes] == [
        str(i**2) for i in range(16)
    ]


# -- arrays of tokens

LISTS: list[list[int]] = [[], [0], [7] * 5, [3, 3, 4], [-1, 0, 2**31 - 1], [*range(300)]]


@pytest.mark.parametrize("values", LISTS)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.bool_])
def test_lists_of_tokens_become_the_arrays_that_numpy_makes(values: list[int], dtype: type[np.generic]) -> None:
    for given in (values, [bool(value) for value in values]):
        array, expected = token_array(given, dtype), np.asarray(given, dtype)
        assert array.dtype == expected.dtype and array.tobytes() == expected.tobytes()
    assert id_array(*values).tobytes() == np.asarray(values, np.int64).tobytes()


def test_logprobs_are_rounded_as_numpy_rounds_them() -> None:
    """Bit for bit, with those that are not finite and those below float32's normal numbers."""
    generator = random.Random(0)
    values = [-generator.expovariate(1.0) * 10.0 ** generator.randint(-44, 30) for _ in range(10_000)]
    for given in ([], [*values, math.inf, -math.inf, 0.0, -0.0, 1e-46, -1e-45], [float(np.float32(v)) for v in values]):
        assert logprob_array(given).tobytes() == np.asarray(given, np.float32).tobytes()
    assert np.isnan(logprob_array([-1.0, math.nan])).tolist() == [False, True]


def test_a_value_is_repeated_where_all_entries_have_it() -> None:
    assert repeated_value([]) is repeated_value([1, 2]) is repeated_value([True, False]) is None
    assert repeated_value([0, 0]) == 0 and repeated_value([False]) is False


def test_trained_tokens_of_all_samples_are_counted() -> None:
    branches = [Episode(0, (1,), loss_mask=[True, False, True]), Episode(0, (1,)), Episode(0, (1,), loss_mask=[False])]
    assert tokens_of(Episode(0, (1,), branches=branches)) == 2
    assert tokens_of(Episode(0, (1,), loss_mask=[True] * 9)) == 9
