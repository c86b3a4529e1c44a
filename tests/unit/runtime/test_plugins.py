"""Names in a configuration, and what they stand for."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rlhpc.runtime import plugins as lookup
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry, require_package


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
    read: list[str] = []
    known = metadata.distributions
    monkeypatch.setattr(lookup, "distributions", lambda path: read.extend(path) or known(path=path))
    lookup._list_installed.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [registry().names() for _ in range(3)] == [["path"]] * 3
    assert sorted(read) == sorted({*sys.path}) and str(tmp_path) in read
    read.clear()
    info = tmp_path / "another-1.0.dist-info"
    info.mkdir()
    os.utime(tmp_path, ns=(1, 1))  # a clock that ticks slowly
    (info / "METADATA").write_text("Name: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhpc.test_tools]\nplane = os:sep\n")
    assert [registry().names() for _ in range(3)] == [["path", "plane"]] * 3 and read == [str(tmp_path)]


def test_the_first_package_of_a_name_hides_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, tool in (("second", "saw = os:sep"), ("first", "plane = os:sep")):
        info = tmp_path / folder / "one_package-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: one-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rlhpc.test_tools]\n{tool}\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert registry().names() == ["path", "plane"]


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


def test_a_package_that_is_not_installed() -> None:
    assert require_package("os.path", "never said") is os.path
    with pytest.raises(ConfigError) as error:
        require_package("nowhere", "pictures need Pillow", "embodied")
    assert str(error.value) == "pictures need Pillow (No module named 'nowhere'): pip install 'rlhpc[embodied]'"


@pytest.mark.parametrize("name", ["PATH", "saw"])
def test_a_name_is_given_once(name: str) -> None:
    tools = registry()
    tools.register("saw")(print)
    with pytest.raises(ConfigError, match=f"tool '{name}' is registered twice"):
        tools.register("free", name)(print)
    assert "free" not in tools.names()


@pytest.mark.parametrize("where", ["here", "beside the configuration", "nowhere"])
@pytest.mark.parametrize("form", ["module", "package"])
def test_code_that_lies_where_python_does_not_look(
    where: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the command that makes it importable."""
    here, beside = tmp_path / "here it is", tmp_path / "configs"
    here.mkdir()
    beside.mkdir()
    if where != "nowhere":
        folder = here if where == "here" else beside
        file = folder / ("my_tools.py" if form == "module" else "my_tools/__init__.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text("def hammer(): pass\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and Path(path) != Path.cwd()])
    monkeypatch.setattr(sys, "argv", ["rlhpc", "train", "../configs/run.yaml"])
    with pytest.raises(ConfigError) as caught:
        registry().find("my_tools:hammer")
    ways = {
        "here": f"it is in {here}: export PYTHONPATH='{here}'",
        "beside the configuration": f"it is in {beside}: export PYTHONPATH={beside}",
        "nowhere": "No module named 'my_tools'",
    }
    assert ways[where] in str(caught.value) and ("PYTHONPATH" in str(caught.value)) == (where != "nowhere")
    if where != "nowhere":
        monkeypatch.syspath_prepend(str(here if where == "here" else beside))
        assert registry().find("my_tools:hammer").__name__ == "hammer"
        del sys.modules["my_tools"]
