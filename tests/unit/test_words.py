"""Words check: each rule on small sources, and on the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words

FILE = "rlhpc/language/rollout/prompt_queue.py"


def kinds(source: str, path: str = FILE) -> list[tuple[str, int]]:
    """Returns kind and line of each finding in a source text."""
    return [(finding.kind, finding.line) for finding in words.check_sources({path: source})]


@pytest.mark.parametrize("word", ["What", "How", "Which", "Where", "Who", "Whether", "That", "Of", "When", "Why"])
def test_a_module_docstring_opens_with_a_noun_phrase(word: str) -> None:
    assert kinds(f'"""{word} a step trains on."""\n') == [("module_docstring", 1)]
    assert kinds('"""Prompt queue of a training step."""\n') == []


def test_a_class_docstring_does_not_open_with_a_clause() -> None:
    assert kinds('class Queue:\n    """What a step trains on."""\n') == [("class_docstring", 2)]
    assert kinds('class Queue:\n    """Prompt queue of a step."""\n') == []


@pytest.mark.parametrize(
    "text",
    [
        "Returns the names.",
        "Names the columns.",
        "Ends.",
        "Reads from a file.",
        "Checks that a file exists.",
        "Passes a message on.",
        "Has each rank load its shard.",
        "Counts `tokens` of a batch.",
        "Re-reads the file.",
    ],
)
def test_a_verb_in_the_third_person_is_known(text: str) -> None:
    assert words.begins_with_verb(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The names.",
        "Return the names.",
        "What a step trains on.",
        "Whose turn it is.",
        "Names of the columns.",
        "Names, in order.",
        "Counts since the last call.",
        "Ranks `[N]`.",
        "Seconds until the deadline.",
        "Tokens to train on.",
        "Loss of a minibatch.",
        "Axis of the batch.",
        "Status of a job.",
        "Always returns True.",
        "This rank's share.",
        "Runs of a folder.",
        "As `wait`, for coroutines.",
        "Raises:\n    ValueError: It is late.",
        "Args:\n    step: The step.",
    ],
)
def test_what_is_no_verb_is_known(text: str) -> None:
    assert not words.begins_with_verb(text)


FUNCTION = '''def wait(key, *, timeout_s=1.0, **options):
    """Waits for a key.

    Args:
        {entry}
            More of it.
        timeout_s, options: Others.
    """
'''
CLASS = '''class Ring({base}):
    """Ring.

    Args:
        count: Number.
    """

    {body}
'''


@pytest.mark.parametrize(
    ("source", "is_right"),
    [
        (FUNCTION.format(entry="key: The key."), True),
        (FUNCTION.format(entry="`key`: The key."), True),
        (FUNCTION.format(entry="name: The key."), False),
        (FUNCTION.format(entry="key, name: The keys."), False),
        (CLASS.format(base="", body="def __init__(self, count): ..."), True),
        (CLASS.format(base="", body="def __init__(self, size): ..."), False),
        (CLASS.format(base="", body="count: int"), True),
        (CLASS.format(base="", body="size: int"), False),
        (CLASS.format(base="Base", body="size: int"), True),  # the base class may have it
        ('def wait():\n    """Waits.\n\n    Raises: ValueError: Never.\n    """\n', False),
    ],
)
def test_parameters_that_a_docstring_explains_exist(source: str, is_right: bool) -> None:
    assert [kind for kind, _ in kinds(source)] == ([] if is_right else ["arguments"])


ERRORS = '''class RunError(Exception):
    """Error of a run."""


class StepError(RunError):
    """Error of a step."""


def step(size):
    """Runs a step.{text}"""
    {body}
'''


@pytest.mark.parametrize(
    ("text", "body", "is_right"),
    [
        ("", "raise StepError(size)", False),
        ("", "raise StepError", False),
        ("\n\n    Raises:\n        StepError: Always.\n    ", "raise StepError(size)", True),
        ("\n\n    Raises:\n        RunError: Always.\n    ", "raise StepError(size)", True),  # its base class
        ("\n\n    Raises:\n        StepError: Always.\n    ", "raise RunError(size)", False),
        (" See `Loop.step`.", "raise StepError(size)", True),  # the base class's method names it
        ("", "raise error", True),
        ("", "raise NotImplementedError", True),
        ("", "def inner(): raise StepError", True),
        ("", "try:\n        raise StepError\n    except (ValueError, RunError):\n        pass", True),
        ("", "try:\n        pass\n    except RunError:\n        raise StepError", False),
        ("", "with contextlib.suppress(StepError):\n        raise StepError", True),
        ("", "with contextlib.suppress(StepError):\n        raise RunError", False),
    ],
)
def test_errors_that_a_function_raises_are_in_its_docstring(text: str, body: str, is_right: bool) -> None:
    source = ERRORS.format(text=text, body=body)
    found = words.check_sources({"rlhpc/a.py": source})
    assert [each.kind for each in found] == ([] if is_right else ["errors"])
    assert words.check_sources({"bench/a.py": source}) == []
    assert words.check_sources({"rlhpc/a.py": source.replace("def step", "def _step")}) == []


def test_the_errors_of_a_constructor_are_in_the_docstring_of_its_class() -> None:
    source = 'class Ring:\n    """Ring.{}"""\n\n    def __init__(self, size):\n        raise ValueError(size)\n'
    assert [each.kind for each in words.check_sources({"rlhpc/a.py": source.format("")})] == ["errors"]
    assert words.check_sources({"rlhpc/a.py": source.format(" Raises ValueError.")}) == []


@pytest.mark.parametrize("head", ["def step()", "async def step()", "def _step()", "def __len__(self)"])
def test_function_docstrings_begin_with_a_verb(head: str) -> None:
    assert kinds(f'{head}:\n    """The next step."""\n') == [("function_docstring", 2)]
    assert kinds(f'{head}:\n    """Returns the next step."""\n') == []
    assert kinds(f"{head}:\n    return 1\n") == []


@pytest.mark.parametrize(
    "decorator", ["property", "functools.cached_property", "cached_property", "size.setter", "abc.abstractproperty"]
)
def test_properties_may_begin_with_a_noun(decorator: str) -> None:
    method = 'class Queue:\n    @{}\n    def size(self):\n        """{}"""\n'
    assert kinds(method.format(decorator, "Number of prompts.")) == []
    assert kinds(method.format(decorator, "How many there are.")) == [("function_docstring", 4)]
    assert kinds(method.format("staticmethod", "Number of prompts.")) == [("function_docstring", 4)]


@pytest.mark.parametrize(
    "statement",
    [
        "found = 1",
        "_found = 1",
        "FOUND = 1",
        "found: int",
        "found += 1",
        "a, (found, b) = c",
        "self.found = 1",
        "self._found: int = 1",
        "a[0].found = 1",
        "for found in a: pass",
        "with a as found: pass",
        "with a as b, c as (d, found): pass",
        "[found for found in a]",
        "b = {k: v for k, found in a}",
        "if (found := a): pass",
        "lambda found: 1",
        "def f(found): pass",
        "def f(*found): pass",
        "def f(*, found=1): pass",
        "def f(a, /, **found): pass",
        "def f(a=lambda found: 1): pass",
        "def found(): pass",
        "async def found(): pass",
        "class Found: pass",
        "import a as found",
        "from a import b as found",
        "try: pass\nexcept E as found: pass",
        "match a:\n    case [found]: pass",
        "match a:\n    case [*found]: pass",
        "match a:\n    case {'b': 1, **found}: pass",
        "match a:\n    case b if (found := 1): pass",
        "class A:\n    found: int = 1",
        "def f():\n    while a:\n        if b:\n            found = 1",
        "try: pass\nfinally:\n    found = 1",
    ],
)
def test_reserved_names_are_found_wherever_they_are_bound(statement: str) -> None:
    assert [kind for kind, _ in kinds(f"{statement}\n")] == ["name"]
    assert kinds(f"{statement}\n".replace("found", "matches").replace("Found", "Match").replace("FOUND", "A")) == []


@pytest.mark.parametrize(
    "statement", ["print(a.found)", "f(found=1)", "from a import found", "foundation = not_found = 1", "a['found'] = 1"]
)
def test_names_that_are_only_used_are_no_findings(statement: str) -> None:
    assert kinds(f"{statement}\n") == []


def test_the_reserved_names_of_the_vocabulary_are_all_known() -> None:
    listed = (
        "found said own known seen given asked wanted what whole left most told made there shown ended rest kept begun who "
        "others lost taken beside same least looks nothing paid"
    )
    for name in listed.split():
        assert kinds(f"x = 1\n{name} = 1\n") == [("name", 2)]


def test_a_public_class_name_is_defined_once_in_the_package() -> None:
    sources = {
        "rlhpc/weights/slices.py": "class Part:\n    pass\nclass _Task:\n    pass\n",
        "rlhpc/language/parts.py": "x = 1\nclass Part:\n    pass\nclass _Task:\n    pass\n",
        "bench/parts.py": "class Part:\n    pass\n",  # another package
    }
    found = words.check_sources(sources)
    assert [(each.path, each.line, each.kind) for each in found] == [
        ("rlhpc/language/parts.py", 2, "class_name"),
        ("rlhpc/weights/slices.py", 1, "class_name"),
    ]
    assert "rlhpc/weights/slices.py:1" in found[0].message


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a checkout with a reserved name in a module of rlhpc."""
    for name in ("rlhpc/language/a.py", "rlhpc/runs/b.py", "bench/c.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "rlhpc/language/a.py").write_text("x = 1\nfound = 1\n")
    return tmp_path


def test_a_finding_is_an_error_and_printed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "bench/d.py").write_text('"""Of."""\n\ndef said(): pass\n')
    assert words.main([], root=checkout) == 1
    printed = capsys.readouterr().out
    for place in ("rlhpc/language/a.py:2: ", "bench/d.py:1: ", "bench/d.py:3: "):
        assert f"\n{place}" in f"\n{printed}"
    assert (
        "words: 1 module_docstring, 0 class_docstring, 0 function_docstring, 0 arguments, 0 errors, 2 name, 0 class_name"
        in printed
    )


def test_the_files_of_a_path_are_checked_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main(["--list", "rlhpc/runs"], root=checkout) == 0
    assert words.main(["--list", "rlhpc/language/a"], root=checkout) == 1
    assert "rlhpc/language/a.py:2: " in capsys.readouterr().out
    (checkout / "rlhpc/language/a.py").unlink()
    assert words.main([], root=checkout) == 0


def test_the_package_has_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main([]) == 0, capsys.readouterr().out
