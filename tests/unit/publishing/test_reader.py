"""Bundles from strangers: each hostile one is refused with one message, and nothing is written."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.publishing.bundle import write_bundle
from rlhpc.publishing.contents import BundleOptions
from rlhpc.publishing.reader import open_bundle
from rlhpc.runtime.errors import ConfigError
from tests.finished_runs import make_run

Members = dict[str, bytes]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """The files of a bundle by name."""
    folder = tmp_path_factory.mktemp("bundle")
    write_bundle(make_run(folder / "runs"), folder / "a.zip", BundleOptions(code="commit"))
    with zipfile.ZipFile(folder / "a.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def sealed(members: Members, **changed: bytes | None) -> Members:
    """Changes files, and makes the checksums fit, as who planted something would."""
    files = {**members, **{name: content for name, content in changed.items() if content is not None}}
    files = {name: content for name, content in files.items() if changed.get(name, b"") is not None}
    listed = sorted(files.keys() - {"checksums.sha256", "ro-crate-metadata.json"})
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in listed).encode()
    metadata = json.loads(files["ro-crate-metadata.json"])
    for entity in metadata["@graph"]:
        if entity["@id"] == "checksums.sha256":
            entity["sha256"] = hashlib.sha256(lines).hexdigest()
    return {**files, "checksums.sha256": lines, "ro-crate-metadata.json": json.dumps(metadata).encode()}


def write_zip(path: Path, members: Members, change: Callable[[zipfile.ZipInfo], None] = lambda entry: None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            change(entry)
            archive.writestr(entry, content)
    return path


def write_folder(path: Path, members: Members) -> Path:
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def refusal(path: Path) -> str:
    before = {file: file.lstat().st_mtime_ns for file in path.parent.rglob("*")}
    with pytest.raises(ConfigError) as refused, open_bundle(path):
        pass
    assert {file: file.lstat().st_mtime_ns for file in path.parent.rglob("*")} == before, "nothing was written"
    message = str(refused.value)
    assert message.isprintable()
    return message


def test_a_good_bundle_as_file_and_as_folder(tmp_path: Path, members: Members) -> None:
    for path in (write_zip(tmp_path / "a.zip", sealed(members)), write_folder(tmp_path / "folder", members)):
        with open_bundle(path) as bundle:
            assert bundle.record["run"] == "small" and bundle.config["runner"]["run_dir"] == "runs"
            bundle.extract(target := tmp_path / f"out-{path.name}")
        files = {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}
        assert files["run/metrics.jsonl"] == members["run/metrics.jsonl"] and files.keys() == members.keys()


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/evil", "run/../../evil", "run\\..\\evil", "evil", "runs/small/COMPLETE", "run/a\x1b[2J", "run/./a",
     "run/a\0b", "C:/evil", "run/" + "a" * 2000],
)  # fmt: skip
def test_names_outside_the_bundle(tmp_path: Path, members: Members, name: str) -> None:
    message = refusal(write_zip(tmp_path / "a.zip", sealed(members, **{name: b"x"})))
    reasons = (
        "no name of a file",
        "does not belong into a bundle",
        "is not both in the bundle and",
    )  # the last: of a NUL
    assert any(reason in message for reason in reasons)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_in_a_file(tmp_path: Path, members: Members, kind: int) -> None:
    def change(entry: zipfile.ZipInfo) -> None:
        if entry.filename == "run/metrics.jsonl":
            entry.external_attr = (kind | 0o777) << 16

    message = refusal(write_zip(tmp_path / "a.zip", sealed(members, **{"run/metrics.jsonl": b"/etc/passwd"}), change))
    assert "run/metrics.jsonl is a link or a device" in message


def test_links_and_pipes_in_a_folder(tmp_path: Path, members: Members) -> None:
    folder = write_folder(tmp_path / "folder", members)
    (folder / "run" / "passwd").symlink_to("/etc/passwd")
    assert "run/passwd is a link" in refusal(folder)
    (folder / "run" / "passwd").unlink()
    (folder / "inputs").symlink_to("/etc")
    assert "inputs is a link" in refusal(folder)
    (folder / "inputs").unlink()
    os.mkfifo(folder / "run" / "pipe")
    assert "run/pipe is a link or a device" in refusal(folder)


def test_a_zip_bomb(tmp_path: Path, members: Members) -> None:
    path = tmp_path / "a.zip"
    write_zip(path, sealed(members))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("run/zeros", "w") as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    assert "that is no run" in refusal(path)


def test_a_size_that_is_not_true(tmp_path: Path, members: Members) -> None:
    path = write_zip(tmp_path / "a.zip", sealed(members))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"run/metrics.jsonl") - 46 + 24  # the uncompressed size in the central directory
    content[at : at + 4] = (5).to_bytes(4, "little")
    path.write_bytes(content)
    assert "run/metrics.jsonl" in refusal(path)


def test_a_name_that_is_there_twice(tmp_path: Path, members: Members) -> None:
    path = write_zip(tmp_path / "a.zip", sealed(members))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("config.yaml", b"runner: {}")
    assert "config.yaml is there twice" in refusal(path)


def test_changed_content(tmp_path: Path, members: Members) -> None:
    changed = {**members, "run/metrics.jsonl": b'{"step": 1, "train/return": 500}\n'}
    assert "run/metrics.jsonl: its checksum is not" in refusal(write_zip(tmp_path / "a.zip", changed))
    changed = {**members, "checksums.sha256": members["checksums.sha256"].replace(b"a", b"b")}
    assert "checksums.sha256: its checksum is not" in refusal(write_zip(tmp_path / "b.zip", changed))
    changed = {name: content for name, content in members.items() if name != "run/metrics.jsonl"}
    assert "run/metrics.jsonl' is not both" in refusal(write_zip(tmp_path / "c.zip", changed))
    assert "run/more' is not both" in refusal(write_zip(tmp_path / "d.zip", {**members, "run/more": b""}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['touch evil']", "config.yaml cannot be read"),
        ("runner: !!python/name:os.system ''", "config.yaml cannot be read"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "not the configuration of a run"),
        ("[" * 5000, "config.yaml cannot be read"),
        ("defaults: [/etc/hostname]\nrunner: {name: a, run_dir: runs}", "defaults is not allowed"),
        ("runner: {name: a, run_dir: /tmp}", "runner.run_dir is '/tmp'"),
        ("runner: {name: a, run_dir: ../..}", "runner.run_dir is"),
        ("runner: {name: ../a, run_dir: runs}", "runner.name is '../a'"),
        (
            "runner: {name: a, run_dir: runs}\nworkflow: {sft: /home/eve/sft.yaml}",
            "workflow.sft is '/home/eve/sft.yaml'",
        ),
        ("runner: {name: a, run_dir: runs}\nworkflow: {sft: sft.yaml}", "workflow.sft is 'sft.yaml'"),
    ],
)
def test_configurations(tmp_path: Path, members: Members, text: str, message: str) -> None:
    assert message in refusal(write_zip(tmp_path / "a.zip", sealed(members, **{"config.yaml": text.encode()})))
    assert not (Path.cwd() / "evil").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "update rlhpc"),
        ({"format": "1"}, "not the record of a bundle"),
        ({"checkpoints": {}}, "checkpoints is missing, or is not of type list"),
        ({"code": [{"role": "project", "folder": "../../etc"}]}, "no name of a file"),
        ({"inputs": [{"key": "data", "name": "/etc/passwd"}]}, "no name of a file"),
        ({"inputs": [{"key": "data", "name": "inputs/0-a", "files": {"a": 1}}]}, "have no checksums"),
    ],
)
def test_records(tmp_path: Path, members: Members, change: dict[str, object], message: str) -> None:
    record = json.dumps({**json.loads(members["bundle.json"]), **change}).encode()
    assert message in refusal(write_zip(tmp_path / "a.zip", sealed(members, **{"bundle.json": record})))


def test_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("text")
    assert "it is no zip file" in refusal(tmp_path / "text.zip")
    assert "no such file" in refusal(tmp_path / "nothing.zip")
    (tmp_path / "empty").mkdir()
    assert "ro-crate-metadata.json is missing" in refusal(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe.zip")
    assert "pipe.zip" in refusal(tmp_path / "pipe.zip")


def test_what_changes_after_the_check_is_not_kept(tmp_path: Path, members: Members) -> None:
    folder = write_folder(tmp_path / "folder", members)
    with open_bundle(folder) as bundle:
        size = len(members["run/metrics.jsonl"])
        (folder / "run" / "metrics.jsonl").write_bytes(b"x" * size)
        with pytest.raises(ConfigError, match=r"run/metrics.jsonl has changed"):
            bundle.extract(tmp_path / "out")
