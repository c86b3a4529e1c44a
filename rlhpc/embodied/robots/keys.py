"""Keys with which robots join: each is a file, for one joining, and has an end.

The run's side of a key lies in the run's registry, which nobody but its user can open; the other side is the file that is
taken to the robot. Both sides prove that they know the secret; neither tells it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json, replace_durably

_ID = re.compile(r"[0-9a-f]{16}")
_FORM = "rlhpc robot key 1"
_KEY_POLL_S = 0.2


class Refused(ConfigError):
    """A run does not take a robot, and says why."""


def proof(secret: str, role: str, *said: str) -> str:
    """That this side knows the secret."""
    return hmac.new(bytes.fromhex(secret), "\n".join([role, *said]).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Place:
    """Where an env rank waits for a robot, as it publishes it.

    Attributes:
        robot: The robot's name.
        slot: Global number of its slot.
        address, port: Where it listens.
        node: The node it is on.
        run: Name of the run.
        there: Whether the robot is there.
        since: When that began, in seconds since the epoch.
    """

    robot: str
    slot: int
    address: str
    port: int
    node: str
    run: str
    there: bool
    since: float

    def publish(self, folder: Path) -> None:
        replace_durably(_place(folder, self.slot), json.dumps(asdict(self)).encode(), mode=0o600, sync=False)

    def withdraw(self, folder: Path) -> None:
        """Nobody waits there any more, and no key opens anything."""
        for key in folder.glob(f"slot_{self.slot}.*.key"):
            key.unlink(missing_ok=True)
        _place(folder, self.slot).unlink(missing_ok=True)


@dataclass(frozen=True)
class Key:
    """What is taken to the robot.

    Attributes:
        id: Names the key, and is no secret.
        secret: Hexadecimal.
        until: When it ends, in seconds since the epoch by the cluster's clocks.
        place: Where the run waits.
    """

    id: str
    secret: str
    until: float
    place: Place

    @classmethod
    def read(cls, path: Path) -> Key:
        """The key in a file.

        Raises:
            ConfigError: There is none, or others may read it.
        """
        try:
            mode = path.stat().st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise ConfigError(f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}")
            found = read_json(path.read_bytes())
            if found.pop("form") != _FORM:
                raise ValueError
            key = cls(**{**found, "place": Place(**found["place"])})
            if not _ID.fullmatch(key.id) or len(bytes.fromhex(key.secret)) != 32:
                raise ValueError
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; rlhpc robot invite RUN --output FILE makes a key") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{path} is no key of a robot; rlhpc robot invite RUN --output FILE makes one") from None
        return key


def _place(folder: Path, slot: int) -> Path:
    return folder / f"slot_{slot}.json"


def places(folder: Path) -> list[Place]:
    """Where robots are waited for."""
    return [Place(**read_json(path.read_bytes())) for path in sorted(folder.glob("slot_*.json"))]


def invite(folder: Path, output: Path, *, slot: int | None, minutes: float, wait_s: float, run: str) -> Key:
    """Makes a key for a robot that a run waits for.

    Args:
        folder: Where they meet.
        output: The file to be taken to the robot.
        slot: The robot's; None where the run has one.
        minutes: How long the key is good for.
        wait_s: How long to wait until the run waits for a robot.
        run: What the user calls the run.

    Raises:
        ConfigError: The run waits for none, or for several.
    """
    if output.exists():
        raise ConfigError(f"--output is {output}, which exists: a key is written once; name another file")
    deadline = time.monotonic() + wait_s
    while not (found := [place for place in places(folder) if slot in (None, place.slot)]):
        if time.monotonic() >= deadline:
            which = "no robot" if slot is None else f"no robot of slot {slot}"
            raise ConfigError(
                f"{run} waits for {which} (waited {wait_s:g} s): a run does once its env rank has started, where "
                f"env.train.env_type is distant_robot; see rlhpc status {run}"
            )
        time.sleep(_KEY_POLL_S)
    if len(found) > 1:
        there = ", ".join(f"{place.slot} ({place.robot})" for place in found)
        raise ConfigError(f"{run} waits for several robots: say which with --slot; there are {there}")
    [place] = found
    key = Key(secrets.token_hex(8), secrets.token_hex(32), time.time() + 60 * minutes, place)
    entry = {"secret": key.secret, "until": key.until, "used": False}
    replace_durably(_entry(folder, place.slot, key.id), json.dumps(entry).encode(), mode=0o600)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(output, json.dumps({"form": _FORM, **asdict(key)}).encode(), mode=0o600)
    return key


def _entry(folder: Path, slot: int, name: str) -> Path:
    return folder / f"slot_{slot}.{name}.key"


def secret_of(folder: Path, slot: int, name: str) -> str | None:
    """The secret of a key of this slot; None if there is no such key."""
    try:
        return str(read_json(_entry(folder, slot, name).read_bytes())["secret"]) if _ID.fullmatch(name) else None
    except FileNotFoundError:
        return None


def use(folder: Path, slot: int, name: str, fits: Callable[[], None]) -> None:
    """Uses a key up.

    Args:
        folder, slot, name: The key.
        fits: Raises where the robot cannot be taken; the key is then as good as before.

    Raises:
        Refused: It has been used, or is over; says when.
    """
    path = _entry(folder, slot, name)
    entry = read_json(path.read_bytes())
    if entry["used"]:
        raise Refused(f"this key has been used {_ago(entry['used'])} ago: one key is for one joining")
    if time.time() > entry["until"]:
        raise Refused(f"this key ended {_ago(entry['until'])} ago")
    fits()
    replace_durably(path, json.dumps({**entry, "used": time.time()}).encode(), mode=0o600)


def _ago(when: float) -> str:
    return f"{max(0.0, time.time() - when):.0f} s"
