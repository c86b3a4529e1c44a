"""Broken, half-known and newer files of RLinf: one message, exit 2, and nothing is written."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc import cli
from tests.unit.cli.foreign.rlinf_configs import CUBE, KINDS, _kinds, flat, put

_kinds()

#: Texts that break a line of YAML, or a file.
_BROKEN_LINES = (
    "\t- x",
    "key: [1, 2",
    "'",
    "&a *a",
    "{",
    ": :",
    "a: b: c",
    "<<<<<<< HEAD",
    "\x00",
    "? !!python/object:os.system x",
)


def _tree(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, name = key.split(".")
        subtree = tree
        for section in sections:
            subtree = subtree.setdefault(section, {})
        subtree[name] = value
    return tree


def _break_text(text: str, rng: random.Random) -> bytes:
    """Breaks the text of a file: cut off, with a broken line, with other bytes, or with a section twice."""
    lines = text.splitlines()
    kind = rng.choice(("cut", "line", "bytes", "circle", "missing piece", "list"))
    position = rng.randrange(1, len(lines))
    if kind == "cut":
        return (text[: rng.randrange(1, len(text))] + ": [").encode()
    if kind == "line":
        return "\n".join([*lines[:position], rng.choice(_BROKEN_LINES), *lines[position:]]).encode()
    if kind == "bytes":
        return text.encode()[: rng.randrange(1, len(text))] + bytes([0xFF, 0xFE, 0x80])
    if kind == "circle":
        return f"defaults: [broken]\n{text}".encode()
    return f"defaults: [env/none@env.train]\n{text}".encode() if kind == "missing piece" else f"- {lines[0]}".encode()


def _half_known(leaves: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns a configuration with keys of a later version, or with values of other types."""
    leaves = dict(leaves)
    for _ in range(rng.choice((1, 2, 5))):
        key = rng.choice([key for key in leaves if key.startswith(("algorithm.", "runner."))])
        leaves[f"{key}_of_a_later_version"] = rng.choice((1, "x", None, [1], {"deep": 1}))
    return leaves


def _import(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["config", "import", str(source), "-o", str(target)])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_or_newer_file_is_one_message_and_nothing_is_written(
    kind: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(f"{kind} {seed}")
    put(tmp_path, "env/cube.yaml", CUBE)
    known = {
        key: value
        for key, value in flat(KINDS[kind][0]).items()
        if "${" not in str(value) and "later_version" not in key
    }
    source, target = tmp_path / "broken.yaml", tmp_path / "written" / "ours.yaml"
    for number in range(8):
        if number % 2:
            source.write_bytes(_break_text(yaml.safe_dump(_tree(known), sort_keys=False), rng))
        else:
            source.write_text(yaml.safe_dump(_tree(_half_known(known, rng)), sort_keys=False))
        before = sorted(tmp_path.rglob("*"))
        code, said = _import(source, target, capsys)
        content = source.read_bytes()[-300:]
        assert code == 2 and said.count("rlhpc: error:") == 1, (said, content)
        assert "Traceback" not in said and len(re.findall(r"^\S", said, re.MULTILINE)) <= 2, said
        assert sorted(tmp_path.rglob("*")) == before, content
        if number % 2 == 0:
            assert "_of_a_later_version" in said and "--ignore-unknown" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_file_is_written(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        key: value
        for key, value in flat(KINDS[kind][0]).items()
        if "${" not in str(value) and "later_version" not in key
    }
    source = put(tmp_path, "known.yaml", _tree(known))
    code, said = _import(source, tmp_path / "ours.yaml", capsys)
    assert code == 0 and "rlhpc: error:" not in said and (tmp_path / "ours.yaml").exists()


#: Change of a file's text → part of the message.
_MISTAKES = {
    "{gamma}${algorithm.nowhere}": r"algorithm\.gamma is '\$\{algorithm\.nowhere\}', which has no value",
    "{gamma}${magic:1}": r"algorithm\.gamma is '\$\{magic:1\}', which has no value \(Unsupported interpolation type magic",
    "{gamma}${algorithm.gamma}": r"algorithm\.gamma is '\$\{algorithm\.gamma\}', which has no value",
    "{gamma}???": r"algorithm\.gamma is '\?\?\?', which has no value",
    "{gamma}${algorithm.tau": r"broken\.yaml: .*\$\{algorithm\.tau",
    "{gamma}*nothing": r"not valid YAML: found undefined alias 'nothing'",
    "{gamma}0.9\n  gamma: 0.8": r"not valid YAML: key 'gamma' is given twice",
    "null: 4\n": r"broken\.yaml: .*NoneType",
    "x: !!set {a, b}\n": r"broken\.yaml: x: .*'set'",
    "x: !mine 3\n": r"could not determine a constructor for the tag '!mine'",
    "a: &a {b: *a}\n": r"found unconstructable recursive node",
    "defaults: [{override /env: cube}]\n": r"defaults has 'override /env: cube'; the importer replaces no choice",
    "defaults: [[env/cube]]\n": r"defaults has \['env/cube'\]; Hydra has a file's name or one",
    "defaults: [{env: {a: b}}]\n": r"there is no file env/\{'a': 'b'\}\.yaml",
    "defaults: [{a: b, c: d}]\n": r"defaults has \{'a': 'b', 'c': 'd'\}; Hydra has",
    "defaults: [env/list]\n": r"list\.yaml: found \[1\] at the top; a configuration is a mapping",
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_mistake_of_hydra_or_yaml_is_one_message_and_nothing_is_written(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {key: value for key, value in flat(KINDS["off_policy"][0]).items() if "${" not in str(value)}
    text = yaml.safe_dump(_tree({key: value for key, value in known.items() if "later_version" not in key}))
    put(tmp_path, "env/list.yaml", [1])
    line = "gamma: 0.9\n"
    assert line in text
    changed = (
        text.replace(line, mistake.replace("{gamma}", "gamma: ") + "\n") if "{gamma}" in mistake else mistake + text
    )
    source, target = tmp_path / "broken.yaml", tmp_path / "ours.yaml"
    source.write_text(changed)
    code, said = _import(source, target, capsys)
    assert code == 2 and said.count("rlhpc: error:") == 1 and not target.exists(), said
    assert re.search(_MISTAKES[mistake], said), said
