"""The one place that runs Slurm's commands and waits for what they say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

#: Seconds after which a command that has not ended counts as failed.
TIMEOUT_S = 20.0
_FIELD = re.compile(r"([A-Za-z][\w:/\[\]-]*)=(.*?)(?=\s+[A-Za-z][\w:/\[\]-]*=|\s*$)")


@dataclass(frozen=True)
class Answer:
    """What a command printed; code 127 if there is no such command, 124 if it did not end in time."""

    code: int
    text: str
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def lines(self) -> list[str]:
        """The lines of its output; if the command failed, also those of its errors."""
        return (self.text if self.ok else self.text + self.error).splitlines()

    @property
    def words(self) -> str:
        """Its last line: of the errors if there are any, otherwise of the output."""
        lines = [line.strip() for line in (self.error.strip() or self.text.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"

    @property
    def records(self) -> list[dict[str, str]]:
        """Records of `scontrol --oneliner show …`, one per line; values may have spaces."""
        return [record for line in self.text.splitlines() if (record := dict(_FIELD.findall(line)))]


def ask(
    *argv: str,
    stdin: str = "",
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    apart: bool = False,
) -> Answer:
    """Runs a command; never raises. With `apart`, signals to this process's session do not reach it."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            errors="replace",
            env=environment,
            start_new_session=apart,
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{argv[0]} did not answer within {timeout_s:.0f} s")
    except OSError as error:
        return Answer(127, "", f"{argv[0]}: {error.strerror or error}")
    return Answer(done.returncode, done.stdout, done.stderr)
