"""Exit codes of commands: 0 for success, 2 for user errors, 1 for other errors; each error is one message.

`rlhpc`, the modules that run as `python -m rlhpc.…`, and the scripts in `examples` call `report_errors`. An exported
`policy.py`, which does not import rlhpc, follows the same rule.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from rlhpc.runtime.disk_errors import explained
from rlhpc.runtime.env_references import masked
from rlhpc.runtime.errors import RlhpcError, UserError
from rlhpc.runtime.standard_streams import silence_output, tell
from rlhpc.runtime.text import readable


def report_errors(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; prints an exception as a message."""
    try:
        try:
            code = command()
            sys.stdout.flush()  # here, because at its end the interpreter only prints an error and ignores it
            return code
        except Exception as error:
            failure = explained(error, "this command", anyway=False)
            if failure is error:
                raise
            raise failure from error
    except RlhpcError as error:
        tell(f"rlhpc: error: {(readable if isinstance(error, UserError) else masked)(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        tell("rlhpc: interrupted")
        return 130
    except BrokenPipeError:
        silence_output()
        return 141
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            silence_output()
            failed_path = error.filename or "standard output, or a file of the run (metrics, logs, checkpoints)"
            tell(f"rlhpc: error: cannot write {failed_path}: {error.strerror}")
            return 1
        if error.errno == errno.ENAMETOOLONG:  # a name from the user, because the names that rlhpc makes are shorter
            tell(f"rlhpc: error: {readable(f'{error.filename}: {error.strerror}')}")
            return 2
        return _fault(error)
    except Exception as error:
        return _fault(error)


def _fault(error: Exception) -> int:
    """Reports an unexpected error in one line, which says how to get the traceback; returns the exit code."""
    if os.environ.get("RLHPC_DEBUG"):
        traceback.print_exception(error)
    advice = "; ".join(getattr(error, "__notes__", ())) or "set RLHPC_DEBUG=1 for the traceback"
    message_lines = f"{error}".splitlines()
    summary = f"{type(error).__name__}: {masked(message_lines[0]) if message_lines else ''}"
    tell(f"rlhpc: error: {summary} (a fault of rlhpc itself, or of code it called; {advice})")
    return 1
