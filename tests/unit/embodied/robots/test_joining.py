"""A robot that joins a run: keys, what is refused, and connections that prove nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.robots.joining import Key, RobotRefused, invite, meeting_points
from rlhpc.runtime.errors import ConfigError
from tests.eventually import wait_until
from tests.unit.embodied.robots.remote_robot import Inside, Outside, Rail


def test_who_opens_many_connections_keeps_no_robot_out(inside: Inside) -> None:
    """They say nothing, and come again as soon as they are sent away."""
    wait_until(lambda: bool(meeting_points(inside.folder)), 20)
    (place,), over = meeting_points(inside.folder), threading.Event()

    def come() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                there = (place.address, place.port)
                with socket.create_connection(there, 20, source_address=("127.0.0.2", 0)) as stranger:
                    while stranger.recv(4096):
                        pass
            over.wait(0.05)

    strangers = [threading.Thread(target=come, daemon=True) for _ in range(48)]
    for stranger in strangers:
        stranger.start()
    Outside(inside.key(), Rail(), patience_s=5.0)
    inside.joined()
    over.set()
    inside.env.close()


def refused(key: Key, robot: Rail | None = None) -> str:
    outside = Outside(key, robot or Rail())
    outside.join(20)
    assert isinstance(outside.error, RobotRefused), "it was taken"
    return str(outside.error)


def test_a_key_is_for_one_joining_of_one_robot_in_its_time(inside: Inside, tmp_path: Path) -> None:
    key, over, other = inside.key(), inside.key(minutes=1e-9), inside.key()
    assert "knows no such key" in refused(replace(key, secret="0" * 64)) + refused(replace(key, id="0" * 16))
    assert "this key ended 0 s ago" in refused(over)
    wide = Rail()
    wide.action_space = spaces.Box(-2, 2, (1,), np.float32)
    assert "kwargs.acts of the run says {'low': [-1.0], 'high': [1.0]}, and this robot {'low': [-2.0]" in refused(
        key, wide
    )
    outside = Outside(key, Rail())  # what was refused did not use it up
    inside.joined()
    assert "has its robot already" in refused(other) and "has been used" in refused(key)
    assert not inside.move(0.5)[3][0] and outside.is_alive()
    said = Inside(tmp_path).refusal()
    assert "slot 2 is already waited for" in said and "val_check_interval=-1" in said
    file, notes = tmp_path / "1.key", tmp_path / "notes"
    notes.touch(0o600)
    file.chmod(0o644)
    for path, says in (
        (file, "can be read by others"),
        (tmp_path / "none", "No such file"),
        (notes, "is no key of a robot"),
    ):
        with pytest.raises(ConfigError, match=says):
            Key.read(path)
    with pytest.raises(ConfigError, match="exists: a key is written once"):
        invite(inside.folder, file, slot=None, minutes=1, wait_s=0, run="here")
    with pytest.raises(ConfigError, match=r"waits for no robot of slot 0 \(waited 0 s\)"):
        invite(inside.folder, tmp_path / "new", slot=0, minutes=1, wait_s=0, run="here")
