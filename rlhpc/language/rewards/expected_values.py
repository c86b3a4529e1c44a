"""Evaluation of assertions outside the sandbox, by arithmetic, comparisons and builtin functions on builtin values.

The program under test chooses the operands, so the cost of every operation is bounded.
"""

from __future__ import annotations

import ast
import collections
import copy
import datetime
import functools
import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_DEPTH = 64
_LARGEST_EXPONENT = 10_000
_MAX_EQUAL_HASHES = 32
"""Maximum number of set members with the same hash. A malicious program could return more to slow down comparisons."""


def decode(value: Any, depth: int = 0) -> Any:
    """Decodes a value that the sandbox's harness has encoded.

    Raises:
        ValueError: The encoding is invalid, because a program wrote it.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"no value: a {type(value).__name__}")
    ((type_code, encoded_content),) = value.items()
    try:
        return _DECODERS[type_code](encoded_content, functools.partial(decode, depth=depth + 1))
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"no value of kind {type_code!r}: {error}") from None


def _decode_dict(items: Any, decode_element: Callable[[Any], Any]) -> dict[Any, Any]:
    pairs = [(decode_element(key), decode_element(element)) for key, element in items]
    _refuse_equal_hashes([key for key, _ in pairs])
    return dict(pairs)


def _decode_decimal(parts: Any, _: Callable[[Any], Any]) -> Decimal:
    decimal = Decimal(parts)
    if decimal.is_finite() and abs(decimal.adjusted()) > _LARGEST_EXPONENT:
        raise ValueError(f"an exponent of {decimal.adjusted()}")  # rounding would create all digits
    return decimal


def _decode_moment(parts: Any, _: Callable[[Any], Any]) -> Any:
    if parts[0] == "timedelta":
        return datetime.timedelta(*map(int, parts[1]))
    moment_types: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
    return moment_types[parts[0]].fromisoformat(str(parts[1]))


def _refuse_equal_hashes(members: list[Hashable]) -> Iterable[Hashable]:
    """Refuses too many members with the same hash, for which hashing takes quadratic time; returns the members.

    Raises:
        ValueError: More than `_MAX_EQUAL_HASHES` members share a hash.
    """
    hash_counts = collections.Counter(map(hash, members))
    if len(members) > _MAX_EQUAL_HASHES and max(hash_counts.values()) > _MAX_EQUAL_HASHES:
        raise ValueError("a set of members that share their hash")
    return members


#: Decoders by the harness's type code; each takes the encoded content and a decoder for its elements.
_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "i": lambda encoded_text, _: int(encoded_text, 16),
    "f": lambda encoded_text, _: float.fromhex(encoded_text),
    "c": lambda encoded_parts, _: complex(float.fromhex(encoded_parts[0]), float.fromhex(encoded_parts[1])),
    "b": lambda encoded_text, _: bytes.fromhex(encoded_text),
    "q": lambda encoded_parts, _: Fraction(int(encoded_parts[0], 16), int(encoded_parts[1], 16)),
    "n": _decode_decimal,
    "m": _decode_moment,
    "l": lambda encoded_elements, decode_element: [decode_element(element) for element in encoded_elements],
    "g": lambda encoded_elements, decode_element: iter([decode_element(element) for element in encoded_elements]),
    "t": lambda encoded_elements, decode_element: tuple(decode_element(element) for element in encoded_elements),
    "s": lambda encoded_elements, decode_element: set(
        _refuse_equal_hashes([decode_element(element) for element in encoded_elements])
    ),
    "d": _decode_dict,
}

_MAX_BITS, _MAX_ITEMS = 1 << 22, 1 << 20
Answer = Mapping[str, Any]
Term = Callable[[Sequence[Answer]], Any]
"""Function that computes a value from the sandbox's answers to a plan's steps."""


def _build_range(*range_bounds: int) -> range:
    rounds = range(*range_bounds)
    if len(rounds) > _MAX_ITEMS:
        raise ValueError("too large")
    return rounds


COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Approximation:
    """Number or container of numbers that is equal to close values, like `pytest.approx`."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected = expected
        self.relative = rel
        self.absolute = abs

    def __eq__(self, other: object) -> bool:
        return self._is_close(self.expected, other)

    def _is_close(self, expected_number: Any, actual_number: Any) -> bool:
        """Returns whether a value is within the tolerance of the expected value, element by element."""
        if isinstance(expected_number, dict):
            return (
                isinstance(actual_number, dict)
                and actual_number.keys() == expected_number.keys()
                and all(self._is_close(element, actual_number[key]) for key, element in expected_number.items())
            )
        if isinstance(expected_number, (list, tuple)):
            return (
                isinstance(actual_number, (list, tuple))
                and len(actual_number) == len(expected_number)
                and all(self._is_close(*value_pair) for value_pair in zip(expected_number, actual_number, strict=True))
            )
        if isinstance(expected_number, bool) or not isinstance(
            expected_number, (int, float, complex, Decimal, Fraction)
        ):
            return bool(expected_number == actual_number)
        if isinstance(actual_number, bool) or not isinstance(actual_number, (int, float, complex, Decimal, Fraction)):
            return False
        if expected_number == actual_number:
            return True
        absolute_tolerance = 1e-12 if self.absolute is None else self.absolute
        if self.relative is None and self.absolute is not None:
            tolerance = absolute_tolerance
        else:
            relative_tolerance = 1e-6 if self.relative is None else self.relative
            tolerance = max(absolute_tolerance, relative_tolerance * abs(complex(expected_number)))
        absolute_difference = abs(complex(expected_number) - complex(actual_number))
        return math.isfinite(tolerance) and absolute_difference <= tolerance


TYPES = {
    value_type.__name__: value_type
    for value_type in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}  # fmt: skip
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{f.__name__: (f, ()) for f in (abs, all, any, bool, len, float, int, str, list, tuple, set, frozenset, dict, type)},
    **{f.__name__: (f, ("key",)) for f in (max, min)},
    **{f.__name__: (f, ()) for f in (sum, isinstance, enumerate, zip)},
    "round": (round, ("ndigits",)), "sorted": (sorted, ("reverse", "key")), "repr": (repr, ()),
    "pytest.approx": (Approximation, ("rel", "abs")),
    "math.isclose": (math.isclose, ("rel_tol", "abs_tol")), "math.fabs": (math.fabs, ()), "math.sqrt": (math.sqrt, ()),
    "math.isnan": (math.isnan, ()), "math.isinf": (math.isinf, ()), "collections.Counter": (collections.Counter, ()),
    "range": (_build_range, ()),
}  # fmt: skip
"""Functions that are computed outside the sandbox, with their supported keywords."""


def _compute_factorial(integer: int) -> int:
    if integer > 5000:
        raise ValueError("too large")
    return math.factorial(integer)


_MOMENTS = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta)
ANY = "*"
"""Wildcard for keywords of any name."""
KNOWN_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{f.__name__: (f, ()) for f in (bytes, complex, chr, ord, bin, hex, oct, divmod)},
    **{f"math.{f.__name__}": (f, ()) for f in (math.ceil, math.floor, math.gcd, math.hypot, math.radians, math.degrees)},
    **{f"math.{f.__name__}": (f, ()) for f in (math.sin, math.cos, math.tan, math.exp, math.log, math.log2, math.log10)},
    **{f"statistics.{f.__name__}": (f, ()) for f in (statistics.mean, statistics.median, statistics.mode)},
    **{f"datetime.{f.__name__}": (f, ("days", "seconds", "minutes", "hours", "weeks")) for f in _MOMENTS[3:]},
    **{f"datetime.{f.__name__}": (f, ("year", "month", "day", "hour", "minute", "second")) for f in _MOMENTS[:3]},
    "reversed": (lambda sequence: list(reversed(sequence)), ()), "math.factorial": (_compute_factorial, ()),
    "decimal.Decimal": (Decimal, ()), "fractions.Fraction": (Fraction, ()), "json.loads": (json.loads, ()),
    "dict": (dict, (ANY,)),
    "collections.OrderedDict": (dict, (ANY,)), "copy.deepcopy": (copy.deepcopy, ()), "copy.copy": (copy.copy, ()),
}  # fmt: skip
"""Functions that are computed outside the sandbox if all arguments come from the tests."""
KNOWN_METHODS: dict[type, tuple[str, ...]] = {
    dict: ("items", "keys", "values", "get", "copy"), list: ("copy", "index", "count"), tuple: ("index", "count"),
    str: ("upper", "lower", "strip", "split", "splitlines", "join", "replace", "title", "capitalize", "startswith", "endswith",
          "encode"),
    bytes: ("decode",), set: ("copy", "union", "intersection", "difference"),
}  # fmt: skip
"""Read-only methods of the tests' values, by type."""
CONVERSIONS = {"list", "tuple", "set", "frozenset", "dict", "sorted", "len", "str", "int", "float", "sum", "round", "min",
                "max", "collections.Counter"}  # fmt: skip
"""Functions that may convert a program's value in the sandbox, because a value such as a deque cannot leave the sandbox. The
result must equal the expected value. So a program that manipulates a conversion gains no more than by returning that value.
"""
CONSTANTS: dict[str, Any] = {**TYPES, "math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan}


def holds(claim: Term, answers: Sequence[Answer]) -> bool:
    """Returns whether a claim is true. A claim that cannot be evaluated counts as false."""
    try:
        return bool(claim(answers))
    except Exception:  # missing answer, incomparable values, or too large
        return False


def value_of(answers: Sequence[Answer], number: int) -> Any:
    """Returns the decoded value of step `number`."""
    return decode(answers[number]["value"])


def has_raised(answers: Sequence[Answer], number: int, names: Sequence[str], pattern: str | None) -> bool:
    """Returns whether step `number` raised one of the named exceptions with a message that matches `pattern`. A NameError
    counts only if `names` contains it, because it usually means that the program lacks a definition.
    """
    error_text, classes = value_of(answers, number)
    if "NameError" in classes and "NameError" not in names:
        return False
    message = str(error_text).partition(": ")[2]
    return any(name in classes for name in names) and (pattern is None or re.search(pattern, message) is not None)


def call_method(receiver: Any, name: str, arguments: Sequence[Any]) -> Any:
    """Calls a method of `KNOWN_METHODS`; returns its result, with views of dicts as lists."""
    return_value = getattr(receiver, name)(*arguments)
    return list(return_value) if isinstance(receiver, dict) and name in ("items", "keys", "values") else return_value


def as_json(value: Any) -> Any:
    """Converts a value to the form of parsed JSON: tuples to lists, and keys of dicts to texts."""
    if isinstance(value, (list, tuple)):
        return [as_json(element) for element in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): as_json(element) for key, element in value.items()}
    return value


def require_steps(step_numbers: Sequence[int], claim: Term) -> Term:
    """Returns a term that holds if a claim holds and the steps have passed."""
    return lambda answers: all("passed" in answers[step_number] for step_number in step_numbers) and claim(answers)


def evaluate_bool_op(parts: Sequence[Term], *, stop_value: bool) -> Term:
    """Returns a term that evaluates `or` of the parts if `stop_value` is true, else `and`."""

    def value(answers: Sequence[Answer]) -> Any:
        part_value = None
        for term in parts:
            part_value = term(answers)
            if bool(part_value) == stop_value:
                break
        return part_value

    return value


def compare_chain(terms: Sequence[Term], kinds: Sequence[type[ast.cmpop]]) -> Term:
    """Returns a term that evaluates a chain of comparisons, such as `a < b <= c`."""

    def value(answers: Sequence[Answer]) -> bool:
        left_value = terms[0](answers)
        for operator_type, term in zip(kinds, terms[1:], strict=True):
            right_value = term(answers)
            if not COMPARISONS[operator_type](left_value, right_value):
                return False
            left_value = right_value
        return True

    return value


def compute(kind: type[ast.operator], left_operand: Any, right_operand: Any) -> Any:
    """Computes arithmetic on numbers, and concatenation, repetition and difference of containers.

    Raises:
        ValueError: The result would be too large.
        TypeError: The operation is not supported for these operands.
    """
    number_types: Any = (int, float, complex, Fraction, Decimal)
    if isinstance(left_operand, number_types) and isinstance(right_operand, number_types):
        if kind is ast.Pow and isinstance(left_operand, (int, Fraction)):
            max_bits = max(
                int(integer_part).bit_length() for integer_part in (left_operand.numerator, left_operand.denominator)
            )
            if not float(abs(right_operand)) * max_bits <= _MAX_BITS:
                raise ValueError("too large")
        return ARITHMETIC[kind](left_operand, right_operand)
    if (
        kind is ast.Add
        and type(left_operand) is type(right_operand)
        and isinstance(left_operand, (str, bytes, list, tuple))
    ):
        return left_operand + right_operand
    if kind is ast.Sub and isinstance(left_operand, (set, frozenset)) and isinstance(right_operand, (set, frozenset)):
        return left_operand - right_operand
    if kind is ast.Mult:
        sequence, repetitions = (
            (right_operand, left_operand) if isinstance(left_operand, int) else (left_operand, right_operand)
        )
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(repetitions, int):
            if len(sequence) * repetitions > _MAX_ITEMS:
                raise ValueError("too large")
            return sequence * repetitions
    raise TypeError("no arithmetic of these")


def call_function(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls a function outside the sandbox; refuses `type` with several arguments, which would create a class.

    Raises:
        TypeError: `type` is called with several arguments.
    """
    if function is type and len(arguments) != 1:
        raise TypeError("type() of one value")
    return function(*arguments, **keywords)
