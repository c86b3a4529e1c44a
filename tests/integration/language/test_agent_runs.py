"""Whole runs whose prompts are answered by an agent outside, from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import ROOT, LanguageRun

AGENT = (
    "agent={kind: python, target: 'outside_agents:odd_digits', timeout_s: 60, episodes_per_rank: 4}",
    "reward.terms=[{name: agent}]", "runner.max_steps=4", "runner.save_interval=2", "runner.val_check_interval=2",
    "data.prompts_per_step=4", "algorithm.group_size=4", "actor.global_batch_size=16",
)  # fmt: skip


@pytest.mark.long
def test_an_agents_run_learns_of_its_tokens_and_resumes_to_the_last_bit(tmp_path: Path) -> None:
    whole, halves = (LanguageRun(tmp_path / name, *AGENT) for name in ("whole", "halves"))
    whole.train()
    rows = whole.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # What the trainer says of each token is what the engine said when it drew it: over turns, samples and updates.
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    assert sum(row["agent/failed"] for row in rows) > 0, "some tools broke"
    assert all(row["agent/turns"] > 2 and 1 < row["agent/samples"] < 2 and row["agent/letters"] > 0 for row in rows)
    assert {row["rollout/samples"] for row in rows} != {16.0}
    assert all(row["train/tokens"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    assert "eval/accuracy" in rows[1] and "eval/accuracy" in rows[3]
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    own = {name for row in rows for name in row if name.startswith("agent/")} - {"agent/letters"}
    assert {name for name in own if f"`{name}`" not in page} == set()
    keys = [path for path in whole.root.rglob("*") if path.is_file() and b"rk-" in path.read_bytes()]
    assert keys == [], "no file of the run has an episode's key"
    halves.train("runner.max_steps=2")
    halves.train("runner.resume_dir=auto")
    assert halves.rows() == rows
    mine, theirs = halves.weights(4), whole.weights(4)
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)
    # The same agent answers in evaluation.
    evaluation = ("eval", "--run", str(whole.root), "--step", "4", "--suite", "held_out")
    own, whole.environment = whole.environment, {**whole.environment, "XDG_STATE_HOME": str(whole.folder / "stranger")}
    assert "agent.target" in whole.rlhpc(*evaluation, code=2), (
        "code that a stranger's checkpoint names is not run unasked"
    )
    whole.environment = own
    said = whole.rlhpc(*evaluation)
    assert "on 10 problems" in said
    samples = [
        json.loads(line) for path in whole.root.rglob("*.samples.jsonl") for line in path.read_text().splitlines()
    ]
    assert samples and all("response" in row for row in samples)


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["actor.offload_in_rollout=true", "algorithm.max_staleness=1"])
def test_an_agents_run_whose_roles_take_turns_or_overlap(overlap: str, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "run", *AGENT, overlap, "runner.val_check_interval=-1", "runner.max_steps=3")
    run.train()
    rows = run.rows()
    assert len(rows) == 3
    if "offload" in overlap:  # otherwise the trainer's weights are newer than those that drew
        assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    assert all(row["rollout/staleness_max"] <= 1 and row["train/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("agent.target=null", "agent.target"),
        ("agent.target=outside_agents", "module:function"),
        ("agent.target=outside_agents:nobody", "cannot be imported"),
        ("agent={kind: command, target: null}", "agent.command"),
        ("agent.kind=inline", "agent.target"),
        ("agent.kind=shell", "allowed"),
        ("agent.timeout_s=1800", "runner.step_timeout_s"),
        ("agent.feedback_timeout_s=1800", "agent.feedback_timeout_s"),
        (
            "agent={kind: openenv, target: null, framework: {base_url: 'http://h'}, feedback_timeout_s: 5}",
            "agent.kind=python",
        ),
        ("agent.tool_parser=nobody", "agent.tool_parser"),
        ("agent.untrained_roles=[judge]", "agent.untrained_roles"),
        ("rollout.max_turns=3", "agent.max_turns"),
        ("algorithm.overlong_buffer=2", "algorithm.overlong_buffer"),
    ],
)
def test_an_agent_that_cannot_be_is_refused_in_a_sentence(override: str, said: str, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "refused", *AGENT)
    told = run.train(override, code=2)
    assert said in told and "Traceback" not in told
    assert not run.root.exists()
