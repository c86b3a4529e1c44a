"""Translation tables of RLinf's agents, of rewards by a judge, and of evaluations without training.

RLinf's agent loops are code, chosen by the script that starts the run. The configuration tells them apart by the parser of
tool calls and the type of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.cli.foreign.rlinf_language import ENGINE
from rlhpc.cli.foreign.rlinf_problems import PROBLEMS, eval_suites
from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows

#: Name of the function that a user writes in place of an agent loop of RLinf that rlhpc does not have.
OWN_AGENT = "my_agent:solve"
#: Seconds for which the user of an online agent may take to accept or refuse an answer.
_FEEDBACK_S = 600.0


def agent_name(leaves: Mapping[str, Any]) -> str | None:
    """Returns the name of RLinf's agent loop: search, code, wide_search, lightning, online; None if the run has none."""
    parser, data = str(leaves.get("agentloop.toolcall_parser")), leaves.get("data.type")
    if any(key.startswith("agentlightning.") for key in leaves):
        return "lightning"
    if leaves.get("runner.task_type") == "coding_online_rl":
        return "online"
    if data == "wideseek_r1" or parser.startswith("wideseek"):
        return "wide_search"
    if data == "rstar2" or parser.startswith("rstar2"):
        return "code"
    return "search" if parser.startswith("searchr1") else None


def has_judge(leaves: Mapping[str, Any]) -> bool:
    """Returns whether a language model judges the answers (algorithms/rewards/code), and not an agent."""
    return leaves.get("reward.reward_type") == "code_offline" and agent_name(leaves) is None


def is_evaluation(leaves: Mapping[str, Any]) -> bool:
    """Returns whether the file only evaluates a model."""
    task = leaves.get("runner.task_type")
    return task == "reasoning_eval" or (task == "reasoning" and bool(leaves.get("eval", False)))


# -- agents -------------------------------------------------------------------------------------------------------------


def _kind(config: ForeignConfig) -> str:
    return "environment" if agent_name(config.leaves) in ("search", "code") else "python"


def _target(config: ForeignConfig) -> str:
    if _kind(config) == "environment":
        return "tools"
    config.omit(
        "agentloop.toolcall_parser agentlightning.n_runners rollout_server.online_router.port runner.task_type",
        f"RLinf's agent is a program: write yours as {OWN_AGENT} (docs/how-to/train-your-agent.md)",
    )
    return OWN_AGENT


def _tools(config: ForeignConfig) -> Any:
    """Returns the arguments of the environment `tools`, or those of a user's function."""
    name = agent_name(config.leaves)
    if name == "search":
        config.omit(
            "agentloop.toolcall_parser",
            "the model calls the tool in the format of its chat template, not by <search>: change the prompts that ask for it",
        )
        address = config("tools.search.server_addr", "127.0.0.1:8000")
        kwargs = {"tools": ["search"], "search_url": f"http://{address}/retrieve"}
        return {**kwargs, "results": config.integer("tools.search.topk", 3)}
    if name == "code":
        config.omit("agentloop.toolcall_parser", "agent.tool_parser reads the same form of calls", False)
        return {"tools": ["python"]}
    if name == "wide_search":
        kwargs = {key: config(f"agentloop.{key}") for key in _WIDE_SEARCH if f"agentloop.{key}" in config.leaves}
        return {**kwargs, **{f"tools.{key}": value for key, value in config.section("tools").items()}} or UNSET
    return UNSET


#: Options of RLinf's search by several agents, which a user's function gets as `task.kwargs`.
_WIDE_SEARCH = (
    "workflow", "max_planner_turns", "max_worker_turns", "max_sa_turns", "max_workers_per_planner", "max_toolcall_per_worker",
    "format_reward", "call_search_reward", "length_limit", "max_length_limit", "length_penalty", "over_context_penalty",
    "use_llm_judge", "llm_ip", "llm_port", "llm_type", "fixed_role",
)  # fmt: skip


def _max_turns(config: ForeignConfig) -> Any:
    for key in ("max_turns", "max_assistant_turns"):
        if (turns := config(f"agentloop.{key}")) is not None:
            return int(turns)
    return UNSET


def _max_tokens(config: ForeignConfig) -> Any:
    """Returns the tokens that the model may write in an episode; in RLinf's loops of tools, those after the longest prompt."""
    length = config.integer("runner.seq_length")
    if _kind(config) == "environment":
        if agent_name(config.leaves) == "code":
            length = config.integer("actor.model.encoder_seq_length", length)
        config.omit("runner.seq_length", "RLinf also counts the tokens of the tools' results, rlhpc those of the model")
        length -= config.integer("data.max_prompt_length")
    return max(1, length) if length else UNSET


def _roles(config: ForeignConfig) -> Any:
    if agent_name(config.leaves) != "wide_search":
        return UNSET
    return ["planner", "worker"] if config("agentloop.workflow", "mas") == "mas" else UNSET


def _untrained_roles(config: ForeignConfig) -> Any:
    role = config("agentloop.fixed_role")
    return UNSET if role is None or _roles(config) is UNSET else [str(role)]


def _reward_terms(config: ForeignConfig) -> Any:
    name = agent_name(config.leaves)
    if name == "search":
        config.omit(
            "reward.reward_type",
            "answers are compared without case; RLinf also leaves out articles and punctuation, and takes a quarter of the "
            "reward from answers with more than ten tags",
        )
        return [{"name": "exact", "kwargs": {"extract": "<answer>(.*?)</answer>", "ignore_case": True}}]
    if name == "code":
        config.omit("reward.reward_type", "rlhpc's verifier of mathematical answers decides, not rStar2's")
        return [{"name": "math", "weight": config.number("reward.reward_scale")}]
    config.omit("reward.reward_type", "the agent returns the reward", False)
    config.omit("reward.reward_scale", "the agent returns the reward", False)
    return [{"name": "agent"}]


def _feedback_s(config: ForeignConfig) -> Any:
    """Returns for how long an answer waits for its user's reaction; RLinf waits without a limit."""
    return _FEEDBACK_S if agent_name(config.leaves) == "online" else UNSET


AGENT_ROWS: Rows = [
    ("agent.kind", _kind),
    ("agent.target", _target),
    ("agent.kwargs", _tools),
    ("agent.max_turns", _max_turns),
    ("agent.max_tokens", _max_tokens),
    ("agent.roles", _roles),
    ("agent.untrained_roles", _untrained_roles),
    ("agent.feedback_timeout_s", _feedback_s),
    ("reward.terms", _reward_terms),
    ("reward.failed", lambda config: UNSET),
]


# -- judges -------------------------------------------------------------------------------------------------------------


def _judged_terms(config: ForeignConfig) -> list[dict[str, Any]]:
    config.omit(
        "reward.reward_type",
        "RLinf asks a model behind an API (LLMASJUDGE_API_URL) about completed code; the group judge asks judge.model about "
        "any answer: set judge.model.model_path, and judge.rubric to your question",
    )
    return [{"name": "judge", "weight": config.number("reward.reward_scale")}]


JUDGE_ROWS: Rows = [
    ("reward.terms", _judged_terms),
    (
        "reward.failed",
        lambda config: 0.4 * config.number("reward.reward_scale"),
    ),  # code_verifier/verify.py, DEFAULT_REWARD
    ("judge.rollout_backend", lambda config: "vllm"),
    ("judge.scale", lambda config: [0.0, 10.0]),
]


# -- evaluations --------------------------------------------------------------------------------------------------------


def _sampled_suites(config: ForeignConfig) -> Any:
    suites = eval_suites(config)
    if suites is UNSET:
        return UNSET
    samples = config.integer("algorithm.group_size", 1)
    temperature = config.number("algorithm.sampling_params.temperature", 1.0)
    if (size := config.integer("data.data_size", -1)) > 0:
        config.omit("data.data_size", "the problems are drawn, by data.eval.seed; RLinf takes the first ones")
        suites = [{**suite, "size": size} for suite in suites]
    return [{**suite, "samples": samples, "temperature": temperature} for suite in suites]


#: Keys of a file that only evaluates a model: `rlhpc eval --model '' --config FILE`.
EVALUATION: Rows = [
    *[row for row in PROBLEMS if not row[0].startswith("data.train")],
    *ENGINE,
    ("data.eval", _sampled_suites),
    ("actor.model.model_path", "rollout.model.model_path"),
]
