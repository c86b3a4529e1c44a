"""Where steps overlap, what a rank that leaves had begun is gone on with by another, from the tokens that there are."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

import transformers
from test_replicas import Disturbed

pytestmark = pytest.mark.long

STEPS, PROMPTS, GROUP, LONG = 24, 4, 4, 40
SETTINGS = (
    f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.keep_checkpoints=0", "algorithm.max_staleness=2",
    "cluster.component_placement={actor: '0', rollout: '0:0-1'}", f"data.prompts_per_step={PROMPTS}",
    f"algorithm.group_size={GROUP}", f"actor.global_batch_size={PROMPTS * GROUP}", f"rollout.max_new_tokens={LONG}",
    "rollout.max_batch_size=8", "rollout.rollout_backend='recording:Slow'", "algorithm.name=recording:Recorded",
    "workflow.eval_suites=[]",
)  # fmt: skip


class Watched(Disturbed):
    """A run of which everything is written down; slow until it is told to `hurry`."""

    def __init__(self, folder: Path) -> None:
        self.records, self.slow = folder / "records", folder / "slow"
        self.records.mkdir(parents=True)
        self.slow.write_text("0.1")
        os.environ["RLHPC_TEST_RECORDS"], os.environ["RLHPC_TEST_STEP"] = str(self.records), str(self.slow)
        super().__init__(folder, restarts=0, settings=SETTINGS)

    def of(self, pid: int) -> list[dict[str, Any]]:
        try:
            lines = (self.records / f"{pid}.jsonl").read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def all(self, kind: str, but: int = 0) -> list[dict[str, Any]]:
        """What all processes but one have written down of a kind."""
        found = [int(path.stem) for path in self.records.iterdir()]
        return [event for pid in found if pid != but for event in self.of(pid) if event["kind"] == kind]

    def in_the_middle(self, pid: int) -> bool:
        """Whether it has answers of some length under way."""
        last = [event["tokens"] for event in self.of(pid)[-1:] if event["kind"] == "step"]
        return bool(last) and 8 <= last[0] <= LONG // 2


def begins(sample: dict[str, Any], stopped: dict[str, Any]) -> bool:
    """Whether a sample begins with all that there was, its numbers included."""
    prompt, whole = stopped["prompt"], [*sample["prompt"], *sample["tokens"]]
    before = len(prompt) - len(sample["prompt"])  # those that an even earlier rank had drawn
    span = slice(before, before + len(stopped["tokens"]))
    return (
        before >= 0
        and whole[: len(prompt)] == prompt
        and all(sample[name][span] == stopped[name] for name in ("tokens", "logprobs", "versions"))
    )


def test_another_goes_on_from_the_tokens_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves as told and hands back what it has; one is killed, and what it had is drawn again."""
    for name in ("RLHPC_TEST_RECORDS", "RLHPC_TEST_STEP"):
        monkeypatch.setenv(name, "")  # given back afterwards
    run = Watched(tmp_path / "watched")
    run.until(lambda: run.step() >= 1)
    helpers = run.join(), run.join()
    run.until(lambda: all(f"rollout[{n}] takes part from the next step on" in run.said() for n in (2, 3)))
    leaving, dying = (run.members()[f"rollout-{n}"] for n in (2, 3))

    run.until(lambda: run.in_the_middle(leaving))
    next(h for h in helpers if psutil.Process(leaving).ppid() == h.pid).send_signal(signal.SIGTERM)
    run.until(lambda: run.in_the_middle(dying))
    os.kill(dying, signal.SIGKILL)
    for helper in helpers:
        helper.communicate(timeout=60)
    time.sleep(0.2)
    run.slow.unlink()
    run.hurry()
    said = run.end()
    assert "rollout[2] left (" in said and "rollout[3] ended" in said, said

    stopped = [event for event in run.of(leaving) if event["kind"] == "stopped"]
    assert stopped and max(len(event["tokens"]) for event in stopped) >= 8, "it left in the middle"
    assert not [event for event in run.of(dying) if event["kind"] == "stopped"]
    samples = run.all("handed over")
    for event in stopped:
        assert [s for s in samples if begins(s, event) and len(s["tokens"]) >= len(event["tokens"])], event
    # What the one that was killed had taken over went back as it came, but for what it had finished by then.
    finished = [event for event in run.of(dying) if event["kind"] == "handed over"]
    given_on = [event for event in stopped if not any(begins(sample, event) for sample in finished)]
    asked = run.all("asked", but=dying)
    continued = [event for event in asked if event["most"] < LONG]
    assert sorted(len(e["tokens"]) for e in given_on) == sorted(LONG - e["most"] for e in continued), (
        "each of them once"
    )
    seeds = Counter(event["seed"] for event in asked)
    assert all(seeds[event["seed"]] == 1 for event in continued), "with random numbers of their own"

    rows = run.rows()
    assert [row["rollout/samples"] for row in rows] == [float(PROMPTS * GROUP * s) for s in range(1, STEPS + 1)]
    handed = Counter((*sample["prompt"], *sample["tokens"]) for sample in samples)
    assert handed == Counter(tuple(event["ids"]) for event in run.all("trained")), "none is lost, none trained on twice"
    assert sum(row["rollout/continued"] for row in rows) >= len(stopped)
    assert sum(row["rollout/continued_tokens"] for row in rows) >= sum(len(e["tokens"]) for e in stopped)
    assert max(row["rollout/staleness_max"] for row in rows) <= 2

    most = max(len(sample["tokens"]) for sample in samples)
    assert most == LONG and all(s["reason"] != "abort" for s in samples)
    assert all((len(s["tokens"]) == LONG) >= (s["reason"] == "length") for s in samples)
    assert any(len({*s["versions"]}) > 1 for s in samples if any(begins(s, e) for e in stopped))
    check_logprobs(run, samples)


def check_logprobs(run: Watched, samples: list[dict[str, Any]]) -> None:
    """Each token's is the one that the weights say which drew it."""
    (folder,) = (path for path in (run.folder.parent / "models").iterdir() if (path / "config.json").exists())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for version in sorted({v for sample in samples for v in sample["versions"]}):
        if version:
            missing = model.load_state_dict(run.weights(version), strict=False).missing_keys
            assert {*missing} <= {"lm_head.weight"}
        for sample in samples:
            if version in sample["versions"]:
                ids = torch.tensor([[*sample["prompt"], *sample["tokens"]]])
                with torch.no_grad():
                    whole = model(ids).logits[0, :-1].log_softmax(-1)
                found = whole.gather(1, ids[0, 1:, None])[len(sample["prompt"]) - 1 :, 0]
                drawn = torch.tensor(sample["versions"]) == version
                worst = max(worst, float((found - torch.tensor(sample["logprobs"]))[drawn].abs().max()))
    assert worst < 1e-5, worst
