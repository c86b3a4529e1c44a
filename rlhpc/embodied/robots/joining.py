"""How a robot and a run meet: the run listens, takes one that shows a key, and takes it again when its line was lost."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.embodied.robots.protocol import LineLost, RobotConnection, greet, hear_greeting
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json, replace_durably
from rlhpc.runtime.host import node_name
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.tcp_listener import ConnectionTable, TcpListener, host_of

_ID = re.compile(r"[0-9a-f]{16}")
_FORM = "rlhpc robot key 1"
_KEY_POLL_S = 0.2


class RobotRefused(ConfigError):
    """A run does not take a robot, and says why."""


def proof(secret: str, role: str, *said: str) -> str:
    """That this side knows the secret."""
    return hmac.new(bytes.fromhex(secret), "\n".join([role, *said]).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class RobotMeetingPoint:
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
    place: RobotMeetingPoint

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
            key = cls(**{**found, "place": RobotMeetingPoint(**found["place"])})
            if not _ID.fullmatch(key.id) or len(bytes.fromhex(key.secret)) != 32:
                raise ValueError
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; rlhpc robot invite RUN --output FILE makes a key") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{path} is no key of a robot; rlhpc robot invite RUN --output FILE makes one") from None
        return key


def _place(folder: Path, slot: int) -> Path:
    return folder / f"slot_{slot}.json"


def places(folder: Path) -> list[RobotMeetingPoint]:
    """Where robots are waited for."""
    return [RobotMeetingPoint(**read_json(path.read_bytes())) for path in sorted(folder.glob("slot_*.json"))]


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
        raise RobotRefused(f"this key has been used {_ago(entry['used'])} ago: one key is for one joining")
    if time.time() > entry["until"]:
        raise RobotRefused(f"this key ended {_ago(entry['until'])} ago")
    fits()
    replace_durably(path, json.dumps({**entry, "used": time.time()}).encode(), mode=0o600)


def _ago(when: float) -> str:
    return f"{max(0.0, time.time() - when):.0f} s"


log = logging.getLogger(__name__)

#: Seconds in which one that connects must show its key, and how many may be about it at a time: a further one takes the
#: place of the oldest, of those addresses that have most.
GREETING_S, _MOST = 10.0, 32
_POLL_S = 0.2
#: Seconds in which the end of the robot before is noticed, where its connection was closed.
_NOTICED_S = 2.0
VERSION = 2


def line_key(secret: str, *nonces: str) -> bytes:
    """Of one connection."""
    return bytes.fromhex(proof(secret, "line", *nonces))


def session_of(secret: str, *nonces: str) -> tuple[str, str]:
    """Name and secret with which a robot that has joined by a key comes again."""
    return proof(secret, "session name", *nonces)[:16], proof(secret, "session", *nonces)


class Meeting:
    """Where one robot is waited for.

    Args:
        folder: For its keys, private to the user.
        robot: Its name.
        slot: Global number of its slot.
        address: To listen on.
        run: Name of the run.
        misfit: Why a robot that shows and takes such things cannot be this one; empty if it can.

    Attributes:
        place: Where it is.
    """

    def __init__(
        self, folder: Path, robot: str, slot: int, address: str, run: str, misfit: Callable[[Any], str]
    ) -> None:
        self._folder, self._slot, self._misfit = folder, slot, misfit
        make_private(folder, parents=True)
        _refuse_two(folder, slot)
        listener = TcpListener(address)
        port = listener.address[1]
        self.place = RobotMeetingPoint(robot, slot, address, port, node_name(), run, there=False, since=time.time())
        self._changed = threading.Condition()
        self._strangers = ConnectionTable[socket.socket](_MOST)
        self._coming = threading.Lock()
        self._line: RobotConnection | None = None
        self._fresh = False
        self._session: tuple[str, str] = ("", "")
        self.place.withdraw(folder)
        self.place.publish(folder)
        self._acceptor = listener.serve(self._come, "robot-meeting")

    def wait(self, timeout_s: float, check: Callable[[], None]) -> tuple[RobotConnection, bool] | None:
        """The robot's line, and whether another process than before is at its other end; None if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._line is not None and not self._line.lost:
                    fresh, self._fresh = self._fresh, False
                    return self._line, fresh
                self._tell(there=False)
                self._changed.wait(_POLL_S)
            check()
            if time.monotonic() > deadline:
                return None

    def close(self) -> None:
        """Waits for nobody any more."""
        self._acceptor.close()
        if self._line is not None:
            self._line.close()
        with contextlib.suppress(OSError):
            self.place.withdraw(self._folder)

    def _tell(self, *, there: bool) -> None:
        """Whoever asks how the run is doing."""
        if there != self.place.there:
            self.place = replace(self.place, there=there, since=time.time())
            self.place.publish(self._folder)

    def _come(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        with self._coming:
            oldest = self._strangers.add(sock, host_of(sock))
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        threading.Thread(target=self._met, args=(sock,), name="robot-greeting", daemon=True).start()

    def _forget(self, sock: socket.socket) -> None:
        """Takes one that has shown a key, or has gone, out of those that may be sent away."""
        with self._coming:
            self._strangers.remove(sock)

    def _met(self, sock: socket.socket) -> None:
        try:
            if not self._greet(sock):
                self._forget(sock)
                sock.close()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("somebody who connected was no robot: %s", error)
            self._forget(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> bool:
        """Whether a robot has come; one without a key is told nothing but that."""
        own = secrets.token_hex(32)
        greet(sock, {"rlhpc robot": VERSION, "nonce": own})
        said = hear_greeting(sock, GREETING_S)
        name, theirs, about = str(said["name"]), str(said["nonce"]), str(said["about"])
        with self._changed:
            again = bool(self._session[0]) and hmac.compare_digest(name, self._session[0])
            secret = self._session[1] if again else secret_of(self._folder, self._slot, name)
            if secret is None or not hmac.compare_digest(
                str(said["proof"]), proof(secret, "robot", own, theirs, name, about)
            ):
                log.warning("somebody who connected has no key of this run")
                greet(sock, {"refused": "the run knows no such key"})
                return False
            self._forget(sock)
            try:
                self._admit(name, again, about)
            except RobotRefused as error:
                greet(sock, {"refused": str(error), "proof": proof(secret, "no", own, theirs, str(error))})
                return False
            greet(sock, {"proof": proof(secret, "run", own, theirs)})
            if not again:
                self._session = session_of(secret, own, theirs)
                self._fresh = True
            self._line = RobotConnection(sock, line_key(secret, own, theirs), b"run", b"robot")
            self._tell(there=True)
            self._changed.notify_all()
        log.info("%s %s", self.place.robot, "is back" if again else "has joined")
        return True

    def _admit(self, name: str, again: bool, about: str) -> None:
        if again:
            if self._line is not None:  # it has lost it, or it would not come
                self._line.close()
            return

        deadline = time.monotonic() + _NOTICED_S
        while self._line is not None and not self._line.lost and time.monotonic() < deadline:
            self._changed.wait(_POLL_S / 4)

        def fits() -> None:
            if self._line is not None and not self._line.lost:
                raise RobotRefused("the run has its robot already")
            if why := self._misfit(json.loads(about)):
                raise RobotRefused(why)

        use(self._folder, self._slot, name, fits)


def _refuse_two(folder: Path, slot: int) -> None:
    """Raises `ConfigError` if another process waits for the same robot."""
    for place in places(folder):
        with contextlib.suppress(OSError):
            if place.slot == slot:
                socket.create_connection((place.address, place.port), GREETING_S).close()
                raise ConfigError(
                    f"the robot of slot {slot} is already waited for, at {place.address} port {place.port} of "
                    f"{place.node}: a robot is in one place at a time (no evaluation during training: "
                    "runner.val_check_interval=-1)"
                )


def join(sock: socket.socket, name: str, secret: str, about: str) -> tuple[RobotConnection, tuple[str, str]]:
    """The robot's side: shows a key, or that it has been here before.

    Returns:
        The line, and the session's name and secret, should it have joined by a key.

    Raises:
        Refused: The run does not take it.
        LineLost: Nobody answers, or not as a run does that knows the secret.
    """
    said = hear_greeting(sock, GREETING_S)
    if said.get("rlhpc robot") != VERSION:
        raise RobotRefused(f"the run speaks another version ({said.get('rlhpc robot')!r}): install the run's rlhpc")
    theirs, own = str(said["nonce"]), secrets.token_hex(32)
    shown = proof(secret, "robot", theirs, own, name, about)
    greet(sock, {"name": name, "nonce": own, "about": about, "proof": shown})
    said = hear_greeting(sock, GREETING_S)
    if "refused" in said:
        raise RobotRefused(f"the run refuses this robot: {str(said['refused'])[:300]}")
    if not hmac.compare_digest(str(said.get("proof")), proof(secret, "run", theirs, own)):
        raise LineLost("what answers there does not know the key")
    return RobotConnection(sock, line_key(secret, theirs, own), b"robot", b"run"), session_of(secret, theirs, own)
