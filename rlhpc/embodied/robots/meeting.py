"""How a robot and a run meet: the run listens, takes one that shows a key, and takes it again when its line was lost."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhpc.embodied.robots.keys import Place, Refused, places, proof, secret_of, use
from rlhpc.embodied.robots.line import Line, LineLost, greet, hear_greeting
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.tcp_listener import ConnectionTable, TcpListener, host_of

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
        self.place = Place(robot, slot, address, port, node_name(), run, there=False, since=time.time())
        self._changed = threading.Condition()
        self._strangers = ConnectionTable[socket.socket](_MOST)
        self._coming = threading.Lock()
        self._line: Line | None = None
        self._fresh = False
        self._session: tuple[str, str] = ("", "")
        self.place.withdraw(folder)
        self.place.publish(folder)
        self._acceptor = listener.serve(self._come, "robot-meeting")

    def wait(self, timeout_s: float, check: Callable[[], None]) -> tuple[Line, bool] | None:
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
            except Refused as error:
                greet(sock, {"refused": str(error), "proof": proof(secret, "no", own, theirs, str(error))})
                return False
            greet(sock, {"proof": proof(secret, "run", own, theirs)})
            if not again:
                self._session = session_of(secret, own, theirs)
                self._fresh = True
            self._line = Line(sock, line_key(secret, own, theirs), b"run", b"robot")
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
                raise Refused("the run has its robot already")
            if why := self._misfit(json.loads(about)):
                raise Refused(why)

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


def join(sock: socket.socket, name: str, secret: str, about: str) -> tuple[Line, tuple[str, str]]:
    """The robot's side: shows a key, or that it has been here before.

    Returns:
        The line, and the session's name and secret, should it have joined by a key.

    Raises:
        Refused: The run does not take it.
        LineLost: Nobody answers, or not as a run does that knows the secret.
    """
    said = hear_greeting(sock, GREETING_S)
    if said.get("rlhpc robot") != VERSION:
        raise Refused(f"the run speaks another version ({said.get('rlhpc robot')!r}): install the run's rlhpc")
    theirs, own = str(said["nonce"]), secrets.token_hex(32)
    shown = proof(secret, "robot", theirs, own, name, about)
    greet(sock, {"name": name, "nonce": own, "about": about, "proof": shown})
    said = hear_greeting(sock, GREETING_S)
    if "refused" in said:
        raise Refused(f"the run refuses this robot: {str(said['refused'])[:300]}")
    if not hmac.compare_digest(str(said.get("proof")), proof(secret, "run", theirs, own)):
        raise LineLost("what answers there does not know the key")
    return Line(sock, line_key(secret, theirs, own), b"robot", b"run"), session_of(secret, theirs, own)
