"""Mirror tests: each large module has one, but for those of a list that only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import mirror

#: Modules that the list may have. Lower it with the list.
LIMIT = 1


def test_each_large_module_has_its_tests_where_one_looks() -> None:
    missing, listed = mirror.unmirrored(mirror.ROOT), mirror.listed()
    expected = {path: str(mirror.mirror_of(Path(path))) for path in sorted(missing - listed)}
    assert not expected, "these modules lack these tests"
    assert not listed - missing, "these have tests now or are gone: python -m tests.structure.mirror --write"
    assert len(listed) <= LIMIT


def test_the_mirror_of_a_module_has_its_path() -> None:
    assert mirror.mirror_of(Path("rlhpc/a/b.py")) == Path("tests/unit/a/test_b.py")
    assert mirror.mirror_of(Path("rlhpc/reference.py")) == Path("tests/unit/test_reference.py")


def test_only_large_modules_need_one(tmp_path: Path) -> None:
    for name, statements in {"small": 59, "large": 60, "tested": 60, "__init__": 60}.items():
        (tmp_path / "rlhpc/runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"rlhpc/runs/{name}.py").write_text('"""Doc."""\nimport os\n' + "x = 1\n" * statements)
    (tmp_path / "tests/unit/runs").mkdir(parents=True)
    (tmp_path / "tests/unit/runs/test_tested.py").touch()
    assert mirror.unmirrored(tmp_path) == {"rlhpc/runs/large.py"}


def test_the_list_never_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "UNMIRRORED", tmp_path / "list.txt")
    mirror.write(["rlhpc/b.py", "rlhpc/a.py"], limit=2)
    assert mirror.listed() == {"rlhpc/a.py", "rlhpc/b.py"}
    with pytest.raises(SystemExit, match="2 modules have no mirror test, 1 may have none"):
        mirror.write(["rlhpc/b.py", "rlhpc/a.py"], limit=1)
    assert mirror.listed() == {"rlhpc/a.py", "rlhpc/b.py"}
