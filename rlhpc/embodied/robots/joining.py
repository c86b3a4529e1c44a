"""Authenticated connections of robots to a run. The run listens and accepts a robot that proves possession of a key. It
accepts the same robot again after a lost connection.
"""

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.embodied.robots.protocol import ConnectionLost, RobotConnection, receive_greeting, send_greeting
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json, replace_durably
from rlhpc.runtime.host import node_name
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.tcp_listener import ConnectionTable, TcpListener, host_of

_ID = re.compile(r"[0-9a-f]{16}")
_FORM = "rlhpc robot key 1"
_KEY_POLL_S = 0.2


class RobotRefused(ConfigError):
    """Error raised if the run rejects a robot. The message gives the reason."""


def proof(secret: str, role: str, *parts: str) -> str:
    """Returns the hexadecimal HMAC of role and parts, which proves that the caller knows the secret."""
    return hmac.new(bytes.fromhex(secret), "\n".join([role, *parts]).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class _RobotMeetingPoint:
    """Published address at which an env rank waits for a robot.

    Attributes:
        robot: Name of the robot.
        slot: Global number of the robot's slot.
        address, port: Address of the listener.
        node: Node of the env rank.
        run: Name of the run.
        connected: Whether the robot is connected.
        since: Time of the last change of `connected`, in seconds since the epoch.
    """

    robot: str
    slot: int
    address: str
    port: int
    node: str
    run: str
    connected: bool
    since: float

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> _RobotMeetingPoint:
        """Builds a meeting point from the result of `to_json`."""
        fields = dict(content)
        return cls(connected=fields.pop("there"), **fields)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the published file, in which `connected` is named `there`."""
        fields = asdict(self)
        return {"there": fields.pop("connected"), **fields}

    def publish(self, folder: Path) -> None:
        replace_durably(
            _meeting_point_file(folder, self.slot), json.dumps(self.to_json()).encode(), mode=0o600, sync=False
        )

    def withdraw(self, folder: Path) -> None:
        """Removes the published address and all keys of the slot."""
        for key in folder.glob(f"slot_{self.slot}.*.key"):
            key.unlink(missing_ok=True)
        _meeting_point_file(folder, self.slot).unlink(missing_ok=True)


@dataclass(frozen=True)
class Key:
    """Key that authenticates a robot. The user copies its file to the robot.

    Attributes:
        id: Identifier of the key, which is not secret.
        secret: Secret of the key, hexadecimal.
        until: Expiry, in seconds since the epoch by the cluster's clocks.
        place: Meeting point of the run.
    """

    id: str
    secret: str
    until: float
    place: _RobotMeetingPoint

    @classmethod
    def read(cls, path: Path) -> Key:
        """Reads a key from a file.

        Raises:
            ConfigError: The file contains no key, or other users may read it.
        """
        try:
            mode = path.stat().st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise ConfigError(f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}")
            content = read_json(path.read_bytes())
            if content.pop("form") != _FORM:
                raise ValueError
            key = cls(**{**content, "place": _RobotMeetingPoint.from_json(content["place"])})
            if not _ID.fullmatch(key.id) or len(bytes.fromhex(key.secret)) != 32:
                raise ValueError
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; rlhpc robot invite RUN --output FILE makes a key") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{path} is no key of a robot; rlhpc robot invite RUN --output FILE makes one") from None
        return key


def _meeting_point_file(folder: Path, slot: int) -> Path:
    return folder / f"slot_{slot}.json"


def meeting_points(folder: Path) -> list[_RobotMeetingPoint]:
    """Returns the published meeting points, sorted by file name."""
    return [_RobotMeetingPoint.from_json(read_json(path.read_bytes())) for path in sorted(folder.glob("slot_*.json"))]


def invite(folder: Path, output: Path, *, slot: int | None, minutes: float, wait_s: float, run: str) -> Key:
    """Creates a key for a robot that a run waits for, and writes it to `output`.

    Args:
        folder: Folder of published addresses and keys.
        output: Key file, to be copied to the robot.
        slot: Slot of the robot; None if the run has one robot.
        minutes: Validity of the key, in minutes.
        wait_s: Maximum seconds to wait until the run waits for a robot.
        run: Name of the run, for messages.

    Raises:
        ConfigError: The run waits for no robot or for several robots, or `output` exists.
    """
    if output.exists():
        raise ConfigError(f"--output is {output}, which exists: a key is written once; name another file")
    deadline = time.monotonic() + wait_s
    while not (
        matches := [meeting_point for meeting_point in meeting_points(folder) if slot in (None, meeting_point.slot)]
    ):
        if time.monotonic() >= deadline:
            robot_text = "no robot" if slot is None else f"no robot of slot {slot}"
            raise ConfigError(
                f"{run} waits for {robot_text} (waited {wait_s:g} s): a run does once its env rank has started, where "
                f"env.train.env_type is distant_robot; see rlhpc status {run}"
            )
        time.sleep(_KEY_POLL_S)
    if len(matches) > 1:
        slots_text = ", ".join(f"{meeting_point.slot} ({meeting_point.robot})" for meeting_point in matches)
        raise ConfigError(f"{run} waits for several robots: say which with --slot; there are {slots_text}")
    [meeting_point] = matches
    key = Key(secrets.token_hex(8), secrets.token_hex(32), time.time() + 60 * minutes, meeting_point)
    key_record = {"secret": key.secret, "until": key.until, "used": False}
    replace_durably(_key_file(folder, meeting_point.slot, key.id), json.dumps(key_record).encode(), mode=0o600)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(
        output, json.dumps({"form": _FORM, **asdict(key), "place": key.place.to_json()}).encode(), mode=0o600
    )
    return key


def _key_file(folder: Path, slot: int, name: str) -> Path:
    return folder / f"slot_{slot}.{name}.key"


def _secret_of(folder: Path, slot: int, name: str) -> str | None:
    """Returns the secret of a slot's key; None if the key does not exist."""
    try:
        return str(read_json(_key_file(folder, slot, name).read_bytes())["secret"]) if _ID.fullmatch(name) else None
    except FileNotFoundError:
        return None


def _mark_used(folder: Path, slot: int, name: str, check_fit: Callable[[], None]) -> None:
    """Marks a key as used.

    Args:
        folder, slot, name: Folder, slot and identifier of the key.
        check_fit: Function that raises an error if the robot cannot be accepted. The key then stays unused.

    Raises:
        RobotRefused: The key has been used or has expired; the message says when.
    """
    path = _key_file(folder, slot, name)
    key_record = read_json(path.read_bytes())
    if key_record["used"]:
        raise RobotRefused(
            f"this key has been used {_elapsed_text(key_record['used'])} ago: one key is for one joining"
        )
    if time.time() > key_record["until"]:
        raise RobotRefused(f"this key ended {_elapsed_text(key_record['until'])} ago")
    check_fit()
    replace_durably(path, json.dumps({**key_record, "used": time.time()}).encode(), mode=0o600)


def _elapsed_text(start_time: float) -> str:
    return f"{max(0.0, time.time() - start_time):.0f} s"


log = logging.getLogger(__name__)

#: Seconds within which a connection must prove possession of a key, and the maximum number of unauthenticated connections.
#: A further connection replaces the oldest connection of the address with the most connections.
GREETING_S, _MAX_UNAUTHENTICATED = 10.0, 32
_POLL_S = 0.2
#: Maximum seconds until the closed connection of an earlier robot process is detected.
_LOSS_NOTICED_S = 2.0
_VERSION = 2


def _connection_key(secret: str, *nonces: str) -> bytes:
    """Returns the HMAC key of one connection."""
    return bytes.fromhex(proof(secret, "line", *nonces))


def _session_of(secret: str, *nonces: str) -> tuple[str, str]:
    """Returns the name and secret of a session, with which a robot reconnects after it has joined with a key."""
    return proof(secret, "session name", *nonces)[:16], proof(secret, "session", *nonces)


class RobotListener:
    """Listener for the connections of one robot.

    Args:
        folder: Folder for published addresses and keys, private to the user.
        robot: Name of the robot.
        slot: Global number of the robot's slot.
        address: Address to listen on.
        run: Name of the run.
        describe_misfit: Returns the reason why a robot with a description cannot be accepted; empty if the robot fits.

    Attributes:
        place: Published meeting point.
    """

    def __init__(
        self, folder: Path, robot: str, slot: int, address: str, run: str, describe_misfit: Callable[[Any], str]
    ) -> None:
        self._folder, self._slot, self._describe_misfit = folder, slot, describe_misfit
        make_private(folder, parents=True)
        _check_not_waiting(folder, slot)
        listener = TcpListener(address)
        port = listener.address[1]
        self.place = _RobotMeetingPoint(
            robot, slot, address, port, node_name(), run, connected=False, since=time.time()
        )
        self._condition = threading.Condition()
        self._unauthenticated_sockets = ConnectionTable[socket.socket](_MAX_UNAUTHENTICATED)
        self._unproven_lock = threading.Lock()
        self._connection: RobotConnection | None = None
        self._is_fresh = False
        self._session: tuple[str, str] = ("", "")
        self.place.withdraw(folder)
        self.place.publish(folder)
        self._acceptor = listener.serve(self._accept, "robot-meeting")

    def wait(self, timeout_s: float, check: Callable[[], None]) -> tuple[RobotConnection, bool] | None:
        """Waits for the robot. Returns its connection and whether this is the first use of its session; None after a
        timeout.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._condition:
                if self._connection is not None and not self._connection.loss_reason:
                    is_fresh, self._is_fresh = self._is_fresh, False
                    return self._connection, is_fresh
                self._publish_presence(is_connected=False)
                self._condition.wait(_POLL_S)
            check()
            if time.monotonic() > deadline:
                return None

    def close(self) -> None:
        """Closes the listener and the connection, and withdraws the address."""
        self._acceptor.close()
        if self._connection is not None:
            self._connection.close()
        with contextlib.suppress(OSError):
            self.place.withdraw(self._folder)

    def _publish_presence(self, *, is_connected: bool) -> None:
        """Publishes whether the robot is connected, if that has changed."""
        if is_connected != self.place.connected:
            self.place = replace(self.place, connected=is_connected, since=time.time())
            self.place.publish(self._folder)

    def _accept(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        with self._unproven_lock:
            oldest_socket = self._unauthenticated_sockets.add(sock, host_of(sock))
        if oldest_socket is not None:
            with contextlib.suppress(OSError):
                oldest_socket.shutdown(socket.SHUT_RDWR)  # the connection's thread closes it
        threading.Thread(target=self._handle, args=(sock,), name="robot-greeting", daemon=True).start()

    def _forget(self, sock: socket.socket) -> None:
        """Removes a socket from the table of unauthenticated connections."""
        with self._unproven_lock:
            self._unauthenticated_sockets.remove(sock)

    def _handle(self, sock: socket.socket) -> None:
        try:
            if not self._greet(sock):
                self._forget(sock)
                sock.close()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("somebody who connected was no robot: %s", error)
            self._forget(sock)
            sock.close()

    def _greet(self, sock: socket.socket) -> bool:
        """Runs the handshake and returns whether a robot has joined. A peer without a key learns only that it is rejected."""
        nonce = secrets.token_hex(32)
        send_greeting(sock, {"rlhpc robot": _VERSION, "nonce": nonce})
        greeting = receive_greeting(sock, GREETING_S)
        name, peer_nonce, spaces_text = str(greeting["name"]), str(greeting["nonce"]), str(greeting["about"])
        with self._condition:
            is_rejoin = bool(self._session[0]) and hmac.compare_digest(name, self._session[0])
            secret = self._session[1] if is_rejoin else _secret_of(self._folder, self._slot, name)
            if secret is None or not hmac.compare_digest(
                str(greeting["proof"]), proof(secret, "robot", nonce, peer_nonce, name, spaces_text)
            ):
                log.warning("somebody who connected has no key of this run")
                send_greeting(sock, {"refused": "the run knows no such key"})
                return False
            self._forget(sock)
            try:
                self._admit(name, is_rejoin, spaces_text)
            except RobotRefused as error:
                send_greeting(
                    sock, {"refused": str(error), "proof": proof(secret, "no", nonce, peer_nonce, str(error))}
                )
                return False
            send_greeting(sock, {"proof": proof(secret, "run", nonce, peer_nonce)})
            if not is_rejoin:
                self._session = _session_of(secret, nonce, peer_nonce)
                self._is_fresh = True
            self._connection = RobotConnection(sock, _connection_key(secret, nonce, peer_nonce), b"run", b"robot")
            self._publish_presence(is_connected=True)
            self._condition.notify_all()
        log.info("%s %s", self.place.robot, "is back" if is_rejoin else "has joined")
        return True

    def _admit(self, name: str, is_rejoin: bool, description: str) -> None:
        if is_rejoin:
            if self._connection is not None:  # the robot reconnects, so it has lost this connection
                self._connection.close()
            return

        deadline = time.monotonic() + _LOSS_NOTICED_S
        while self._connection is not None and not self._connection.loss_reason and time.monotonic() < deadline:
            self._condition.wait(_POLL_S / 4)

        def check_fit() -> None:
            if self._connection is not None and not self._connection.loss_reason:
                raise RobotRefused("the run has its robot already")
            if reason := self._describe_misfit(json.loads(description)):
                raise RobotRefused(reason)

        _mark_used(self._folder, self._slot, name, check_fit)


def _check_not_waiting(folder: Path, slot: int) -> None:
    """Checks that no other process waits for the same robot.

    Raises:
        ConfigError: Another process listens at the slot's published address.
    """
    for meeting_point in meeting_points(folder):
        with contextlib.suppress(OSError):
            if meeting_point.slot == slot:
                socket.create_connection((meeting_point.address, meeting_point.port), GREETING_S).close()
                raise ConfigError(
                    f"the robot of slot {slot} is already waited for, at {meeting_point.address} port {meeting_point.port} of "
                    f"{meeting_point.node}: a robot is in one place at a time (no evaluation during training: "
                    "runner.val_check_interval=-1)"
                )


def join(sock: socket.socket, name: str, secret: str, description: str) -> tuple[RobotConnection, tuple[str, str]]:
    """Joins a run from the robot's side, with a key or with the session of an earlier join.

    Returns:
        The connection, and the session's name and secret. A robot that joined with a key uses them to reconnect.

    Raises:
        RobotRefused: The run rejected the robot.
        ConnectionLost: The run did not answer, or did not prove that it knows the secret.
    """
    greeting = receive_greeting(sock, GREETING_S)
    if greeting.get("rlhpc robot") != _VERSION:
        raise RobotRefused(f"the run speaks another version ({greeting.get('rlhpc robot')!r}): install the run's rlhpc")
    peer_nonce, nonce = str(greeting["nonce"]), secrets.token_hex(32)
    key_proof = proof(secret, "robot", peer_nonce, nonce, name, description)
    send_greeting(sock, {"name": name, "nonce": nonce, "about": description, "proof": key_proof})
    greeting = receive_greeting(sock, GREETING_S)
    if "refused" in greeting:
        raise RobotRefused(f"the run refuses this robot: {str(greeting['refused'])[:300]}")
    if not hmac.compare_digest(str(greeting.get("proof")), proof(secret, "run", peer_nonce, nonce)):
        raise ConnectionLost("what answers there does not know the key")
    return RobotConnection(sock, _connection_key(secret, peer_nonce, nonce), b"robot", b"run"), _session_of(
        secret, peer_nonce, nonce
    )
