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

from rlhpc.runtime.disk_errors import explain_error
from rlhpc.runtime.env_references import mask_values
from rlhpc.runtime.errors import RlhpcError, UserError
from rlhpc.runtime.standard_streams import silence_output, tell
from rlhpc.runtime.text import readable
from rlhpc.troubleshooting import pointer


def report_errors(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; prints an exception as a message."""
    try:
        try:
            exit_code = command()
            sys.stdout.flush()  # here, because at its end the interpreter only prints an error and ignores it
            return exit_code
        except Exception as error:
            failure = explain_error(error, "this command", allows_unknown_path=False)
            if failure is error:
                raise
            raise failure from error
    except RlhpcError as error:
        _report((readable if isinstance(error, UserError) else mask_values)(_with_notes(str(error), error)))
        return error.exit_code
    except KeyboardInterrupt as error:
        tell(f"rlhpc: {_with_notes('interrupted', error)}")
        return 130
    except BrokenPipeError:
        silence_output()
        return 141
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            silence_output()
            failed_path = error.filename or "standard output, or a file of the run (metrics, logs, checkpoints)"
            _report(f"cannot write {failed_path}: {error.strerror}")
            return 1
        # a name from the user, because the names that rlhpc makes are shorter; or a file that is closed to this user
        is_closed = error.filename is not None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        if error.errno == errno.ENAMETOOLONG or is_closed:
            _report(readable(f"{error.filename}: {error.strerror}"))
            return 2
        return _fault(error)
    except Exception as error:
        return _fault(error)


def _with_notes(message: str, error: BaseException) -> str:
    """Returns the message followed by the error's notes."""
    return "; ".join([message, *getattr(error, "__notes__", ())])


def _fault(error: Exception) -> int:
    """Reports an unexpected error in one line, with the way to get the traceback; returns the exit code."""
    if os.environ.get("RLHPC_DEBUG"):
        traceback.print_exception(error)
    advice_text = "; ".join(getattr(error, "__notes__", ())) or "set RLHPC_DEBUG=1 for the traceback"
    message_lines = f"{error}".splitlines()
    summary = f"{type(error).__name__}: {mask_values(message_lines[0]) if message_lines else ''}"
    _report(f"{summary} (a fault of rlhpc itself, or of code it called; {advice_text})")
    return 1


def _report(message: str) -> None:
    """Prints an error message, and in a last line the command that explains it."""
    tell("\n".join(filter(None, (f"rlhpc: error: {message}", pointer(message)))))
