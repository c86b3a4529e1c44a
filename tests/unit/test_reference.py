"""Generated reference pages: signatures, docstrings as Markdown, and the three pages as a whole."""

from __future__ import annotations

import pytest

import rlhpc
from rlhpc import reference


class Base:
    """Counter.

    Args:
        start: First number.
        limit: Last number,
            or None.
    """

    def __init__(self, start: int, /, *steps: int, limit: int | None = None, **names: str) -> None: ...


class Derived(Base):
    """Counter that counts twice.

    Attributes:
        total: The sum.
    """


def test_a_signature_is_that_of_the_call() -> None:
    assert reference._signature(Base) == "(start: int, *steps: int, limit: int | None = None, **names: str)"
    assert reference._signature(lambda a, b=1: a) == "(a, b=1)"


def test_a_class_shows_the_arguments_of_the_constructor_that_it_inherits() -> None:
    assert reference._render_doc(Derived) == [
        "Counter that counts twice.\n",
        "Attributes:\n\n- `total`: The sum.\n",
        "Args:\n\n- `start`: First number.\n- `limit`: Last number, or None.\n",
    ]


def test_each_page_has_its_subjects() -> None:
    commands, keys, runtime, causes = (render() for render in reference.PAGES.values())
    assert "## rlhpc train\n" in commands and "| `--segment SEGMENT` |" in commands
    assert "## runner\n" in keys and "| `runner.name` | str | required |" in keys
    assert "### no-usable-gpu\n" in causes
    documented = [name for name in rlhpc.__all__ if f"### {name}\n" not in runtime and f"| `{name}` |" not in runtime]
    assert documented == []


def test_a_page_is_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["config"]) == 0
    assert capsys.readouterr().out == reference.render_config()
    with pytest.raises(SystemExit):
        reference.main(["nothing"])
