"""Harness of a sandboxed program: runs the program and reports over a pipe. Each reported line begins with a nonce, which the
program does not receive.

Assertions such as `assert f(2) == 4` are transferred as data: the value of `f(2)` leaves the sandbox, and the 4 never
enters it. So the comparison is made outside the sandbox, where the program cannot change it. A program that searches its
memory for the nonce can write lines. This does not help the program, because it could also return the same value.
"""

# This file makes raw system calls, and pathlib would slow down the start.
# ruff: noqa: PTH120
from __future__ import annotations

import atexit
import json
import os
import sys
from typing import Any

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 40
_MAX_ITEMS = 1 << 17
# These names are bound here, before the program can replace the builtins.
_run, _evaluate, _compile, _write, _dumps = exec, eval, compile, os.write, json.dumps


def write_record(fd: int, nonce: str, record_kind: str, payload: Any = None) -> None:
    """Writes one record as a line: the nonce, a label, and JSON."""
    line = f"{nonce} {record_kind} {_dumps(payload)}\n".encode()
    while line:
        line = line[_write(fd, line) :]


def encode(value: Any, depth: int = 0) -> Any:
    """Encodes a value as JSON with its type.

    Raises:
        TypeError: The value contains an unsupported type, or is nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise TypeError("nested too deep")
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return {"i": hex(int(value))}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    for container_types, key in ((list, "l"), (tuple, "t"), ((set, frozenset), "s")):
        if isinstance(value, container_types):
            return {key: [encode(element, depth + 1) for element in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, depth + 1), encode(element, depth + 1)] for key, element in value.items()]}
    if hasattr(type(value), "__next__"):
        return {"g": [encode(element, depth + 1) for _, element in zip(range(_MAX_ITEMS), value, strict=False)]}
    module, name = type(value).__module__, type(value).__name__
    if module == "fractions" and name == "Fraction":
        return {"q": [hex(value.numerator), hex(value.denominator)]}
    if module == "decimal" and name == "Decimal":
        return {"n": str(value)}
    if module == "datetime" and name in ("date", "datetime", "time"):
        return {"m": [name, value.isoformat()]}
    if module == "datetime" and name == "timedelta":
        return {"m": [name, [value.days, value.seconds, value.microseconds]]}
    if module == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return encode(value.item(), depth + 1)
    raise TypeError(f"a {module}.{name} cannot leave the sandbox")


def _describe(error: BaseException) -> str:
    """Returns the name and the message of an exception."""
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except BaseException:
        return type(error).__name__


def _encode_expression(expression_source: str, namespace: dict[str, Any]) -> Any:
    encoding = encode(_evaluate(_compile(expression_source, "<test>", "eval"), namespace))
    encoded_size = len(_dumps(encoding))
    if encoded_size > _MAX_BYTES:
        raise ValueError(f"the value takes {encoded_size} bytes")
    return encoding


def _run_checks(checks: list[dict[str, str]], namespace: dict[str, Any], fd: int, nonce: str) -> None:
    check_number = 0
    for check_source in checks:
        payload = None
        try:
            if check_source["kind"] == "value":
                record_type = "value"
                payload = _encode_expression(check_source["source"], namespace)
            else:
                record_type = "passed"
                _run(_compile(check_source["source"], "<test>", "exec"), namespace)
        except BaseException as error:
            record_type, payload = "error", _describe(error)
            if check_source["kind"] == "raises":
                record_type, payload = (
                    "value",
                    encode((payload, [exception_class.__name__ for exception_class in type(error).__mro__])),
                )
        write_record(fd, nonce, f"{record_type} {check_number}", payload)
        check_number += 1  # noqa: SIM113 - the program could have replaced `enumerate`


def run(job: dict[str, Any], fd: int) -> None:
    """Executes `job["source"]` and `job["setup"]`, then the job's checks; ends the process."""
    nonce = job.pop("nonce")
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + job["packages"]
    sys.argv[:] = ["program.py"]
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    module = type(sys)("__main__" if job["main"] else "program")
    sys.modules.pop("confine", None), sys.modules.pop("harness", None)
    sys.modules["__main__"] = sys.modules[module.__name__] = sys.modules["solution"] = module
    exit_code, failure = 0, ""
    try:
        for code_source, name in ((job["source"], "<program>"), (job["setup"], "<setup>")):
            _run(_compile(code_source, name, "exec"), module.__dict__)
    except SystemExit as system_exit:
        exit_code = system_exit.code if isinstance(system_exit.code, int) else int(system_exit.code is not None)
        failure = f"SystemExit: {system_exit.code}"
    except BaseException as error:
        exit_code, failure = 1, _describe(error)
        import traceback

        last_frame = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, last_frame, limit=-8)
    write_record(fd, nonce, "end", failure)
    if not failure:
        _run_checks(job["checks"], module.__dict__, fd, nonce)
    try:  # the steps of an interpreter's exit
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        exit_code = 1
    os._exit(exit_code)
