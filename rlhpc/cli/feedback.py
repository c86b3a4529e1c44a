"""`feedback`: assigns a delayed reward to a completion of a running run, after its episode has ended."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import urllib.error
import urllib.request
from typing import Any

from rlhpc.cli.arguments import require_driver, run_paths
from rlhpc.cli.parser import RUN, add_command, argument
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = ("rlhpc feedback runs/assistant chatcmpl-6f0c… 1.0", "rlhpc feedback runs/assistant chatcmpl-6f0c… -0.5")
#: Seconds within which a rollout rank must answer.
_ANSWER_S = 15.0


def _send_feedback(args: argparse.Namespace) -> int:
    paths = run_paths(args.run)
    reward = _parse_reward(args.reward)
    num_unaware, errors = 0, list[str]()
    for name, scorer in _read_reward_addresses(paths).items():
        try:
            reason = _send_reward(scorer, args.completion, reward)
        except (OSError, http.client.HTTPException) as error:
            errors.append(f"{name}: {error}")
            continue
        if reason is None:
            print(f"{paths.root.name}: {name} has taken {reward:g} for {args.completion}")
            return 0
        if reason:
            raise ConfigError(f"{name}: {reason}")
        num_unaware += 1
    answer_text = (
        f"none of {num_unaware} rollout ranks awaits a reward for it" if num_unaware else "no rollout rank answered"
    )
    raise ConfigError(
        f"{args.completion}: {answer_text}; it may be of an earlier start of the run, or its time is over "
        f"(agent.feedback_timeout_s){''.join(f'; {error_text}' for error_text in errors)}"
    )


def _parse_reward(reward_text: str) -> float:
    try:
        reward = float(reward_text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise ConfigError(f"{reward_text} is no reward; give a finite number, such as 1.0")
    return reward


def _read_reward_addresses(paths: RunPaths) -> dict[str, dict[str, str]]:
    """Returns, for each rollout rank, the addresses at which the rank accepts rewards.

    Raises:
        ConfigError: The run accepts no delayed rewards.
    """
    from rlhpc.language.agents.gateway.feedback import FEEDBACK

    folder = require_driver(paths) / FEEDBACK
    scorers = {path.stem: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))}
    if not scorers:
        raise ConfigError(f"{paths.root.name} takes no rewards that come later: start it with agent.feedback_timeout_s")
    return scorers


def _send_reward(scorer: dict[str, str], completion: str, reward: float) -> str | None:
    """Sends a reward to a rollout rank.

    Returns:
        None if the rank accepts the reward, "" if the rank does not know the completion, otherwise the reason for refusal.
    """
    from rlhpc.runtime.host import host_id

    url = scorer["near"] if scorer["host"] == host_id() else scorer["far"]
    if not url:
        raise OSError(f"it takes rewards on its own node only ({scorer['node']}); type this there")
    request = urllib.request.Request(
        f"{url}/v1/feedback",
        json.dumps({"id": completion, "reward": reward}).encode(),
        {"Authorization": f"Bearer {scorer['key']}", "Content-Type": "application/json"},
    )
    try:
        # No proxy: the address is inside the cluster.
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        with error:
            reason = json.loads(error.read())["error"]["message"]
        return "" if error.code == http.HTTPStatus.NOT_FOUND else str(reason)
    return None


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "feedback",
        _send_feedback,
        "give a completion its reward, after the agent that asked for it is done",
        _EXAMPLES,
        argument("run", help=RUN),
        argument("completion", help="its id, as the client got it from the model"),
        argument("reward", help="a number"),
    )
