"""Hydra configurations: files of `defaults`, packages, and references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.foreign.hydra import compose
from rlhpc.runtime.errors import ConfigError


def write(folder: Path, **files: str) -> Path:
    """Writes files (`env__cube` is env/cube.yaml); returns the path of `main`."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "main.yaml"


def test_own_values_win_over_those_of_defaults_unless_self_says_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, base="a: 1\nb: {c: 1, d: 1}\n", main="defaults: [base]\na: 2\nb: {c: 2}\n")
    composed = compose(path)
    assert composed.leaves == {"a": 2, "b.c": 2, "b.d": 1}
    assert [file.name for file in composed.files] == ["base.yaml", "main.yaml"]
    path = write(tmp_path, main="defaults: [_self_, base]\na: 2\n")
    assert compose(path).leaves["a"] == 1


def test_groups_lie_in_their_package(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        env__cube="size: 3\n", model__mlp="width: 8\n", model__cnn="depth: 2\n", extra="x: 1\n",
        main="defaults:\n- env/cube@env.train\n- model: [mlp, cnn]\n- optional extra@_global_: null\n- extra@_global_\n"
        "- override hydra/launcher: slurm\n",
    )  # fmt: skip
    composed = compose(path)
    assert composed.leaves == {"env.train.size": 3, "model.width": 8, "model.depth": 2, "x": 1}
    assert composed.skipped == ["optional extra@_global_: None", "override hydra/launcher: slurm"]


def test_files_are_found_above_and_on_the_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORE", str(tmp_path / "more"))
    write(tmp_path, env__cube="size: 3\n", more__other="y: 1\n")
    path = write(
        tmp_path / "runs",
        main="defaults: [env/cube, other@_global_]\nhydra: {searchpath: ['file://${oc.env:MORE}', /not/there]}\n",
    )
    composed = compose(path)
    assert composed.leaves["env.size"] == 3 and composed.leaves["y"] == 1


def test_an_optional_file_may_be_missing_and_a_group_may_begin_with_a_slash(tmp_path: Path) -> None:
    text = "defaults: [{optional size: nothing}, {/size: small}, _self_]\ny: 1\n"
    (tmp_path / "size").mkdir()
    (tmp_path / "size/small.yaml").write_text("x: 3\n")
    assert compose(write(tmp_path, main=text)).leaves == {"size.x": 3, "y": 1}


def test_references_and_arithmetic_are_resolved(tmp_path: Path) -> None:
    text = (
        "a: 4\nb: ${a}\nc: ${multiply:${a},3}\nd: ${int_div:${a},3}\ne: ${add:1,2.5}\nf: ${subtract:${a},1}\ng: ${not:true}\n"
        "s: {x: '${.y}', y: [1, '${a}']}\n"
    )
    assert compose(write(tmp_path, main=text)).leaves == {
        "a": 4, "b": 4, "c": 12, "d": 1, "e": 3.5, "f": 3, "g": False, "s.x": [1, 4], "s.y": [1, 4],
    }  # fmt: skip


def test_a_reference_that_leads_nowhere_stays_as_it_is_written(tmp_path: Path) -> None:
    composed = compose(write(tmp_path, main="a: ${nothing}\nb: ${unknown:1}\nc: ${int_div:1,0}\nd: 1\n"))
    assert composed.leaves == {"a": "${nothing}", "b": "${unknown:1}", "c": "${int_div:1,0}", "d": 1}
    assert set(composed.unresolved) == {"a", "b", "c"} and all(composed.unresolved.values())


def test_environment_variables_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    composed = compose(write(tmp_path, main="a: ${oc.env:SECRET}/x\nb: ${a}\nc: ['${oc.env:SECRET}']\n"))
    assert composed.leaves == {"a": "${oc.env:SECRET}/x", "b": "${oc.env:SECRET}/x", "c": ["${oc.env:SECRET}"]}


def test_the_text_of_numbers_is_kept(tmp_path: Path) -> None:
    composed = compose(write(tmp_path, main="a: 1e3\nb: {c: 0x10, d: text}\n"))
    assert composed.leaves["a"] == 1000.0 and composed.texts == {"a": "1e3", "b.c": "0x10"}


def test_hydras_own_section_is_not_resolved(tmp_path: Path) -> None:
    composed = compose(write(tmp_path, main="hydra: {run: {dir: '${now:%Y}'}}\n"))
    assert composed.leaves == {"hydra.run.dir": "${now:%Y}"} and composed.unresolved == {}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"main": "defaults: [base]\n", "base": "defaults: [main]\n"},
            r"go round in a circle: main\.yaml → base\.yaml",
        ),
        (
            {"main": "defaults: [missing]\n"},
            r"there is no file missing\.yaml, neither in .* copy the configuration's folder",
        ),
        ({"main": "defaults: text\n"}, "defaults is 'text'; Hydra has a list there"),
        ({"main": "defaults: [[a]]\n"}, "Hydra has a file's name or one `group: name` there"),
        ({"main": "- 1\n"}, "at the top; a configuration is a mapping of sections"),
    ],
)
def test_what_cannot_be_composed_is_one_message(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(write(tmp_path, **files))
