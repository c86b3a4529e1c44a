"""Import of RLinf's agents, judges and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.foreign.rlinf_agents import OWN_AGENT
from tests.unit.cli.foreign.rlinf_configs import LANGUAGE, _kinds, flat, imported, merged, put, translation
from tests.unit.cli.foreign.test_rlinf_language import changed, translated

_kinds()

EPISODES = {
    "algorithm": {
        "adv_type": "grpo_dynamic", "advantage_mode": "trajectory",
        "loss_scales": ["group_level", "agent_level", "turn_level"],
    },
}  # fmt: skip
SEARCH = merged(
    EPISODES,
    {
        "agentloop": {"group_name": "Loop", "toolcall_parser": "searchr1-qwen", "max_turns": 3, "print_outputs": True},
        "tools": {"search": {"server_addr": "10.0.0.1:8000", "topk": 5}},
        "reward": {"reward_type": "searchr1", "reward_scale": 1.0},
    },
)
CODE = {
    "agentloop": {"toolcall_parser": "rstar2-qwen", "max_user_turns": None, "max_assistant_turns": 5},
    "tools": {"codejudge": {"host_addr": "127.0.0.1", "host_port": 8000}},
    "data": {"type": "rstar2"},
    "reward": {"reward_type": "rstar2", "reward_scale": 2.0},
    "algorithm": {"down_sampling": {"do_down_sampling": True, "down_sampling_config": {"down_sample_to_n": 4}}},
}
WIDE = merged(
    EPISODES,
    {
        "agentloop": {
            "toolcall_parser": "wideseek_r1-qwen",
            "workflow": "mas",
            "max_planner_turns": 4,
            "format_reward": 0.1,
        },
        "data": {"type": "wideseek_r1"},
        "reward": {"reward_type": None},
    },
)
LIGHTNING = merged(
    EPISODES, {"agentlightning": {"n_runners": 10}, "eval": False, "reward": {"reward_type": "code_offline"}}
)
ONLINE = {"runner": {"task_type": "coding_online_rl"}, "algorithm": {"adv_type": "raw", "group_size": 1}}


def test_a_search_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(tmp_path, "search.yaml", merged(LANGUAGE, SEARCH)), capsys)
    assert cfg is not None, report
    assert (cfg.agent.kind, cfg.agent.target, cfg.agent.max_turns) == ("environment", "tools", 3)
    assert dict(cfg.agent.kwargs) == {"tools": ["search"], "search_url": "http://10.0.0.1:8000/retrieve", "results": 5}
    assert (cfg.algorithm.adv_type, cfg.algorithm.loss_agg) == ("grpo", "seq-mean-token-mean")
    assert cfg.reward.terms[0].name == "exact" and "<answer>" in cfg.reward.terms[0].kwargs.extract
    said = " ".join(report.split())
    assert "not by <search>" in said and "agentloop.group_name" in said


def test_a_coding_agent_runs_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _, report = imported(put(tmp_path, "code.yaml", merged(LANGUAGE, CODE)), capsys)
    assert cfg is not None, report
    assert (cfg.agent.target, cfg.agent.kwargs.tools, cfg.agent.max_turns) == ("tools", ["python"], 5)
    assert (cfg.reward.terms[0].name, cfg.reward.terms[0].weight) == ("math", 2.0)
    made = translated(CODE)
    assert "algorithm.down_sampling.do_down_sampling" in changed(made)
    assert "agentloop.toolcall_parser" not in changed(made)


@pytest.mark.parametrize("agent", [WIDE, LIGHTNING, ONLINE], ids=["wide search", "lightning", "online"])
def test_an_agent_that_is_a_program_is_left_to_a_function_of_the_user(agent: dict[str, Any]) -> None:
    made = translated(agent)
    assert (made.ours["agent.kind"], made.ours["agent.target"]) == ("python", OWN_AGENT)
    assert made.ours["reward.terms"] == [{"name": "agent"}]
    if agent is not ONLINE:
        assert any("my_agent:solve" in reason for reason in changed(made).values())


def test_roles_and_options_of_an_agent_reach_the_function() -> None:
    made = translated(WIDE, {"agentloop": {"fixed_role": "worker"}})
    assert made.ours["agent.roles"] == ["planner", "worker"] and made.ours["agent.untrained_roles"] == ["worker"]
    assert made.ours["agent.kwargs"]["max_planner_turns"] == 4 and "agentloop.format_reward" not in made.omitted
    assert "algorithm.loss_scales" in changed(made)  # RLinf weighs each of a role's agents
    single = translated(WIDE, {"agentloop": {"workflow": "sa"}})
    assert "agent.roles" not in single.ours and "agent.untrained_roles" not in single.ours
    assert translated(ONLINE).ours["agent.feedback_timeout_s"] > 0
    assert translated(ONLINE).ours["algorithm.gamma"] == 1.0  # RLinf's raw does not discount


def test_a_judge_takes_the_rewards_place() -> None:
    judged = {"reward": {"reward_type": "code_offline", "reward_scale": 2.0, "use_prompt": True}}
    made = translated(judged)
    assert made.ours["reward.terms"] == [{"name": "judge", "weight": 2.0}]
    assert made.ours["reward.failed"] == 0.8 and made.ours["judge.scale"] == [0.0, 10.0]
    assert made.ours["cluster.component_placement"] == {"actor,rollout,judge": "0-15"}
    assert "judge.model.model_path" in changed(made)["reward.reward_type"]


def test_an_evaluation_has_suites_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = merged(
        merged(LANGUAGE, SEARCH),
        {
            "runner": {"task_type": "reasoning_eval"},
            "data": {"train_data_paths": None, "data_size": 200},
            "algorithm": {"group_size": 4},
        },
    )
    _, _, report = imported(put(tmp_path, "exam.yaml", evaluation), capsys)
    assert report.endswith("rlhpc eval also looks at the files that they name\n")
    made = translation({key: value for key, value in flat(evaluation).items() if "${" not in str(value)})
    (suite,) = made.ours["data.eval"]
    assert (suite["samples"], suite["temperature"], suite["size"]) == (4, 0.9, 200)
    assert not any(key.startswith(("data.train", "actor.optim", "algorithm.")) for key in made.ours)
    assert made.ours["actor.model.model_path"] == "models/one" and made.ours["agent.target"] == "tools"
    assert not made.training and "actor.optim.lr" not in changed(made)


def test_an_evaluation_of_a_training_file_is_told_by_its_flag() -> None:
    assert not translated(LIGHTNING, {"eval": True}).training and translated(LIGHTNING).training


@pytest.mark.parametrize(
    ("agent", "tokens"),
    [
        (SEARCH, 1024),
        (merged(CODE, {"actor": {"model": {"encoder_seq_length": 4096}}}), 3072),
        (CODE, 1024),
        (WIDE, 2048),
    ],
)
def test_the_tokens_of_an_episode_follow_the_longest_prompt(agent: dict[str, Any], tokens: int) -> None:
    """RLinf's loops of tools have room for as many tokens as follow the longest prompt, its other agents for the context."""
    result = translated(agent)
    assert result.ours["agent.max_tokens"] == tokens
    assert ("runner.seq_length" in changed(result)) == (agent is not WIDE)
