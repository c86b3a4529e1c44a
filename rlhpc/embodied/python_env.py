"""Function calls in another Python environment, for evaluation, recording and conversion of LeRobot's policies.

`python -m rlhpc.embodied.python_env ANSWER` in that environment reads a pickled call from standard input and writes the
pickled answer to a file. Both sides run this module; pickled data never come from a checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import read_json
from rlhpc.runtime.interrupts import Interrupts

#: Environment variable with the path of LeRobot's Python interpreter.
PYTHON = "RLHPC_LEROBOT_PYTHON"
Params = ParamSpec("Params")
Result = TypeVar("Result")


def importable() -> bool:
    """Returns whether LeRobot is installed in this Python environment."""
    return importlib.util.find_spec("lerobot") is not None


def lerobot_error(lerobot_purpose: str) -> ConfigError:
    """Returns an error that explains how to install LeRobot."""
    return ConfigError(
        f"{lerobot_purpose} needs lerobot, which has a Python of its own: make setup-lerobot, export "
        "RLHPC_LEROBOT_PYTHON=$PWD/.venv-lerobot/bin/python, and name it as cluster.node_groups[].python_interpreter of "
        "actor and rollout (docs/how-to/lerobot.md)"
    )


def call_where_importable(
    policy_source: str | Path, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """Calls a function and returns its result. The call runs in LeRobot's Python if it concerns a LeRobot policy and this
    Python does not have LeRobot.

    Args:
        policy_source: Folder of the checkpoint or export that the call concerns, or another name.
        function: Top-level function of a module.
        *args, **kwargs: Arguments of the function; they and the result must be picklable.

    Raises:
        ConfigError: LeRobot's Python is needed, but `RLHPC_LEROBOT_PYTHON` is not set or cannot be started.
        RlhpcError: The function raised this error in LeRobot's Python.
    """
    if importable() or not _is_lerobot(Path(policy_source)):
        return function(*args, **kwargs)
    python = os.environ.get(PYTHON)
    if not python:
        raise lerobot_error(f"the policy of {policy_source}")
    pickled_call = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder, "answer")
        try:
            exit_code, is_interrupted = _run([python, "-m", __name__, str(answer_file)], pickled_call, env)
        except OSError as error:
            raise lerobot_error(
                f"{PYTHON} is {python!r}, which cannot be started ({error.strerror}); {policy_source}"
            ) from error
        if not answer_file.is_file():
            if is_interrupted:
                raise KeyboardInterrupt
            raise RlhpcError(f"{python} ended with {exit_code} and no answer; what it said is above")
        answer_value, raised_error = pickle.loads(answer_file.read_bytes())
    if raised_error is not None:
        raise raised_error
    return answer_value


def _run(command: list[str], input_bytes: bytes, env: dict[str, str]) -> tuple[int, bool]:
    """Runs a command; returns its exit code, and whether a signal has ended it.

    A signal that would end this process is sent to the command, which is waited for: it may stop a robot and write data.
    """
    is_interrupted = False
    with Interrupts(), subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env) as process:
        try:
            process.communicate(input_bytes)
        except KeyboardInterrupt:
            is_interrupted = True
            process.terminate()  # SIGINT may be ignored there, as in the background of a script
            process.wait()
    return process.returncode, is_interrupted


def _is_lerobot(folder: Path) -> bool:
    """Returns whether a checkpoint or an export contains a LeRobot policy."""
    for name in ("model.json", "config.json"):
        try:
            policy_config = read_json((folder / name).read_bytes())
            model_type = policy_config.get("policy", policy_config)["model"]["model_type"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        return str(model_type).lower() == "lerobot"
    return False


def main() -> None:
    """Runs a pickled call from standard input and writes the pickled answer to a file."""
    module, name, args, kwargs = pickle.loads(sys.stdin.buffer.read())
    answer: Any = None
    exception: BaseException | None = None
    try:
        with Interrupts():
            answer = getattr(importlib.import_module(module), name)(*args, **kwargs)
    except (RlhpcError, KeyboardInterrupt) as error:
        exception = error
    Path(sys.argv[1]).write_bytes(pickle.dumps((answer, exception)))


if __name__ == "__main__":
    main()
