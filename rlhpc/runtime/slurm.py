"""Execution of Slurm's commands: the only module that runs them and waits for their output."""

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
#: By thread, the command it waits for: the process, and whether it leads a session.
_commands: dict[int, tuple[subprocess.Popen[str], bool]] = {}
#: Variables by which a user's own queries have other columns, rows, orders or forms of time than their arguments say.
_OF_QUERIES = re.compile(
    r"(SQUEUE|SINFO|SACCT|SACCTMGR|SCONTROL|SCANCEL|SSHARE|SPRIO|SDIAG|SSTAT|SREPORT)_|SLURM_(TIME_FORMAT|BITSTR_LEN|JSON|YAML)$"
    r"|LANGUAGE$|LC_"
)
_FIELD = re.compile(r"([A-Za-z][\w:/\[\]-]*)=(.*?)(?=\s+[A-Za-z][\w:/\[\]-]*=|\s*$)")


@dataclass(frozen=True)
class CommandOutput:
    """Output of a command; code 127 if there is no such command, 124 if it did not end in time."""

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
    def words(self) -> str:
        """Last line of the standard error or, if that is empty, of the standard output."""
        lines = [line.strip() for line in (self.error.strip() or self.text.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"

    @property
    def records(self) -> list[dict[str, str]]:
        """Records of `scontrol --oneliner show …`, one per line; values may have spaces."""
        return [record for line in self.text.splitlines() if (record := dict(_FIELD.findall(line)))]


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of every Slurm command: only its arguments decide what it shows and which jobs it selects, times
    are ISO 8601, and messages are English.

    `SLURM_CONF` and `SLURM_CLUSTERS`, which select the cluster to ask, stay, and so do sbatch's own variables, which describe
    the submitted jobs.
    """
    inherited = {name: value for name, value in environ.items() if not _OF_QUERIES.match(name)}
    return inherited | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}


def ask(
    *argv: str,
    stdin: str = "",
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    apart: bool = False,
) -> CommandOutput:
    """Runs a command; never raises.

    Args:
        argv: The command.
        stdin: Its input.
        timeout_s: Seconds that it may take.
        environment: Its environment, filtered by `query_environment`; by default this process's.
        apart: Shield the command from signals to this process's session, and end its children with it if it takes too long: a
            command that outlives its answer may still act unexpectedly.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=query_environment(os.environ if environment is None else environment), start_new_session=apart,
        )  # fmt: skip
    except OSError as error:
        return CommandOutput(127, "", f"{argv[0]}: {error.strerror or error}")
    _commands[threading.get_ident()] = process, apart
    with process:
        try:
            output, error_text = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process, apart)
            return CommandOutput(124, "", f"{argv[0]} did not answer within {timeout_s:.0f} s")
        except BaseException:
            _kill(process, apart)
            raise
        finally:
            _commands.pop(threading.get_ident(), None)
    return CommandOutput(process.returncode, output, error_text)


def give_up(thread: threading.Thread) -> None:
    """Ends the command whose answer a thread waits for, if it waits for one."""
    if thread.ident is not None and (command := _commands.get(thread.ident)) is not None:
        _kill(*command)


def _kill(process: subprocess.Popen[str], with_others: bool) -> None:
    if process.poll() is not None:
        return
    if with_others:  # it leads a session; it has not been reaped, so no other process has its number
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
