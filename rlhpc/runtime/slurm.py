"""Execution of Slurm's commands. All code that waits for the output of such a command uses this module."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass

#: Seconds after which a command that has not ended counts as failed.
TIMEOUT_S = 20.0
#: By thread: the process of the command for which the thread waits, and whether the process leads a session.
_commands: dict[int, tuple[subprocess.Popen[str], bool]] = {}
#: Variables with which users change the columns, rows, order or time format of queries. They are removed, because code here
#: parses the output.
_QUERY_VARIABLES = re.compile(
    r"(SQUEUE|SINFO|SACCT|SACCTMGR|SCONTROL|SCANCEL|SSHARE|SPRIO|SDIAG|SSTAT|SREPORT)_|SLURM_(TIME_FORMAT|BITSTR_LEN|JSON|YAML)$"
    r"|LANGUAGE$|LC_"
)
_FIELD = re.compile(r"([A-Za-z][\w:/\[\]-]*)=(.*?)(?=\s+[A-Za-z][\w:/\[\]-]*=|\s*$)")


@dataclass(frozen=True)
class CommandOutput:
    """Output of a command. The code is 127 if the command does not exist, and 124 if it did not end in time."""

    code: int
    text: str
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def lines(self) -> list[str]:
        """Lines of the standard output; if the command failed, also those of the standard error."""
        return (self.text if self.ok else self.text + self.error).splitlines()

    @property
    def last_line(self) -> str:
        """Last line of the standard error or, if that is empty, of the standard output."""
        lines = [line.strip() for line in (self.error.strip() or self.text.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"

    @property
    def records(self) -> list[dict[str, str]]:
        """Records of `scontrol --oneliner show …`, one per line; values may have spaces."""
        return [record for line in self.text.splitlines() if (record := dict(_FIELD.findall(line)))]


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for Slurm's commands, without the variables that change the output of queries.

    Times are ISO 8601, and messages are English. `SLURM_CONF` and `SLURM_CLUSTERS`, which select the cluster, are kept, and
    so are sbatch's variables, which describe submitted jobs.
    """
    inherited_environment = {
        name: variable_value for name, variable_value in environ.items() if not _QUERY_VARIABLES.match(name)
    }
    return inherited_environment | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}


def ask(
    *argv: str,
    stdin: str = "",
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    has_session: bool = False,
) -> CommandOutput:
    """Runs a command and returns its output; a failure of the command raises no error.

    Args:
        argv: The command.
        stdin: Input of the command.
        timeout_s: Seconds that the command may take.
        environment: Environment of the command, filtered by `query_environment`; by default this process's environment.
        has_session: Run the command in a separate session, which signals to this process's session do not reach. If the
            command takes too long, its children are killed, too, so that they cannot act later.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=query_environment(os.environ if environment is None else environment), start_new_session=has_session,
        )  # fmt: skip
    except OSError as error:
        return CommandOutput(127, "", f"{argv[0]}: {error.strerror or error}")
    _commands[threading.get_ident()] = process, has_session
    with process:
        try:
            output, error_text = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process, has_session)
            return CommandOutput(124, "", f"{argv[0]} did not answer within {timeout_s:.0f} s")
        except BaseException:
            _kill(process, has_session)
            raise
        finally:
            _commands.pop(threading.get_ident(), None)
    return CommandOutput(process.returncode, output, error_text)


def give_up(thread: threading.Thread) -> None:
    """Kills the command for which a thread waits, if it waits for a command."""
    if thread.ident is not None and (command := _commands.get(thread.ident)) is not None:
        _kill(*command)


def _kill(process: subprocess.Popen[str], ends_session: bool) -> None:
    if process.poll() is not None:
        return
    if ends_session:  # the process leads a session and is not reaped yet, so no other process has its number
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
