"""Names in a configuration, and what they stand for."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from rlhpc.runtime import lookup
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import Registry


def registry() -> Registry:
    return Registry("tool", "work.tool", "rlhpc.test_tools", {"path": "pathlib:Path"})


def test_a_name_is_registered_built_in_or_an_import_path() -> None:
    tools = registry()

    @tools.register("Saw", "fretsaw")
    def saw() -> None:
        pass

    assert tools.find("saw") is tools.find("FRETSAW") is saw
    assert tools.find("Path") is Path
    assert tools.find("builtins:str.upper") is str.upper
    assert tools.names() == ["fretsaw", "path", "saw"]


def test_another_packages_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed distribution offers it."""
    info = tmp_path / "their_tools-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: their-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhpc.test_tools]\nPlane = their_tools:plane\nlost = their_tools:lost\n")
    (tmp_path / "their_tools.py").write_text("def plane(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    tools = registry()
    assert tools.names() == ["lost", "path", "plane"]
    assert tools.find("plane").__module__ == "their_tools"
    with pytest.raises(ConfigError, match=r"work.tool is 'their_tools:lost', which cannot be imported: .*lost"):
        tools.find("lost")


def test_installed_packages_are_read_once_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(lookup, "entry_points", lambda **of: read.append(1) or metadata.entry_points(**of))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [registry().names() for _ in range(3)] == [["path"]] * 3 and len(read) == 1
    info = tmp_path / "another-1.0.dist-info"
    info.mkdir()
    os.utime(tmp_path, ns=(1, 1))  # a clock that ticks slowly
    (info / "METADATA").write_text("Name: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhpc.test_tools]\nplane = os:sep\n")
    assert [registry().names() for _ in range(3)] == [["path", "plane"]] * 3 and len(read) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pth", r"work.tool is 'pth', which is unknown; did you mean 'path'\? allowed: path, or module:Class"),
        ("hammer", r"work.tool is 'hammer', which is unknown; allowed: path, or module:Class"),
        ("nowhere:Hammer", r"work.tool is 'nowhere:Hammer', which cannot be imported: No module named 'nowhere'"),
        ("os:sep", r"work.tool is 'os:sep', which is a str, no class and no function"),
        (":", r"work.tool is ':', which cannot be imported"),
    ],
)
def test_what_stands_for_nothing(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry().find(name)
    with pytest.raises(ConfigError, match=r"^other\.key is "):
        registry().find(name, "other.key")


@pytest.mark.parametrize("name", ["PATH", "saw"])
def test_a_name_is_given_once(name: str) -> None:
    tools = registry()
    tools.register("saw")(print)
    with pytest.raises(ConfigError, match=f"tool '{name}' is registered twice"):
        tools.register("free", name)(print)
    assert "free" not in tools.names()
