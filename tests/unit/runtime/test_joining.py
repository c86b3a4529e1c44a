"""A driver that is not the user's own: what a process that joins reads of it runs nothing and ends in one message."""

from __future__ import annotations

import json
import os
import pickle
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime import joining
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import host_id
from rlhpc.runtime.joining import DriverConnection, JoinRefused
from rlhpc.runtime.registry import CURRENT, MEMBERS, CurveKeys, GenerationFolder
from rlhpc.runtime.worker_spec import WorkerSpec

SPEC = WorkerSpec(
    "rollout", 3, 4, "n1", 3, 0, 1, (0, 1), "/r", "t", bytes(range(256)), "/o", "/e", {"A": "b"}, ["/p"], "/", 2, True,
    "10.0.0.1", None, {"host": "h", "tcp": ""}, 0.1 + 0.2, "", "17",
)  # fmt: skip


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def run_of(tmp_path: Path, record: Any, keys: CurveKeys | None = None) -> Path:
    root = tmp_path / "run" / "registry"
    root.parent.mkdir(mode=0o700)
    registry = GenerationFolder.create(root, "local-0")
    registry.save_keys(keys or CurveKeys.fresh())
    (registry.root / MEMBERS / "driver.json").write_text(
        record if isinstance(record, str) else json.dumps({"generation": "local-0", **record})
    )
    return root


def driver_at(path: str) -> dict[str, Any]:
    return {"node": "n1", "data": {"host": host_id(), "ipc": path, "tcp": "", "bulk": ""}}


def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> WorkerSpec:
    door = DriverConnection(run_of(tmp_path, driver_at("ipc:///nowhere")))
    monkeypatch.setattr(door._peers, "request", lambda *_: [answer])
    try:
        return door.ask({"group": "rollout"})
    finally:
        door.close()


def test_a_specification_survives() -> None:
    again = WorkerSpec.from_json(SPEC.to_json())
    assert again == SPEC and all(type(getattr(again, f.name)) is type(getattr(SPEC, f.name)) for f in fields(SPEC))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "went-off"))
    with pytest.raises(JoinRefused, match="is no place in a run"):
        answered(tmp_path, monkeypatch, pickle.dumps(Bomb(), protocol))
    assert not (tmp_path / "went-off").exists()


@pytest.mark.parametrize(
    "answer", [b"", b"null", b"[]", b"{}", b"7", b"[" * 100_000, b"\xff\xfe", b'{"rank": 1e999}', b"1" * 9999]
)
def test_what_is_no_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    with pytest.raises(JoinRefused, match="is no place in a run"):
        answered(tmp_path, monkeypatch, answer)


@pytest.mark.parametrize("name", [f.name for f in fields(WorkerSpec)])
@pytest.mark.parametrize("value", [None, 7, -1, 1.5, "x", True, [None], {"a": None}, [[]]], ids=str)
def test_each_value_has_its_type(name: str, value: Any) -> None:
    """A value of another type is refused; one that is taken is of the field's own."""
    content = json.loads(SPEC.to_json()) | {name: value}
    try:
        spec = WorkerSpec.from_json(json.dumps(content).encode())
    except ValueError:
        return
    found, kind = getattr(spec, name), type(getattr(SPEC, name))
    assert isinstance(
        found, (kind, int) if kind is float else (str, type(None)) if name in ("tcp_address", "interface") else kind
    )
    assert value not in ([None], [[]]) and value != {"a": None}


@pytest.mark.parametrize(
    "record",
    [
        "", "[]", "7", "[" * 100_000, '{"generation": "local-0"}', '{"generation": "local-0", "node": 1, "data": 3}',
        '{"generation": "local-0", "node": "n1", "data": {"host": "h"}}', '{"generation": "other"}',
    ],
)  # fmt: skip
def test_a_driver_that_says_something_else(tmp_path: Path, record: str) -> None:
    with pytest.raises((ConfigError, joining.RlhpcError)):
        DriverConnection(run_of(tmp_path, record))


@pytest.mark.parametrize("text", ["a\0b", "", "../..", "x" * 5000])
def test_a_generation_that_is_none(tmp_path: Path, text: str) -> None:
    root = run_of(tmp_path, driver_at("ipc:///nowhere"))
    (root / CURRENT).write_text(text)
    with pytest.raises(joining.RlhpcError):
        DriverConnection(root)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_driver_of_another_user_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        os.chown(path, 65534, 65534)
        door = DriverConnection(run_of(tmp_path, driver_at(f"ipc://{path}")))
        with pytest.raises(JoinRefused, match="a driver of another user gives no place"):
            door.ask({"group": "rollout"})
        door.close()
        assert not door.is_reachable


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:9", "inproc://x", "pgm://x", ""])
def test_a_driver_on_this_host_has_a_unix_socket(tmp_path: Path, endpoint: str) -> None:
    door = DriverConnection(run_of(tmp_path, driver_at(endpoint)))
    with pytest.raises(JoinRefused, match="no UNIX socket"):
        door.ask({"group": "rollout"})
    door.close()
