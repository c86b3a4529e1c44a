"""Who speaks for which episode: its own key or, for a client that has one key for all it does, that key and `X-Session-ID`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from rlhpc.language.agents.messages import Refused
from rlhpc.language.agents.sessions import NAMED, Session

#: Names that one episode may go by.
_MOST = 64


class Keys:
    """The keys of a gateway. On its loop, but for `open`.

    Attributes:
        process: For clients with one key a process; says nothing without a session's name.
    """

    def __init__(self) -> None:
        self.process = f"rp-{secrets.token_urlsafe(24)}"
        self._of_key: dict[str, Session] = {}
        self._of_name: dict[str, Session] = {}

    def open(self, session: Session) -> None:
        """From now on its key and its name are good."""
        self._of_key[session.key] = self._of_name[session.name] = session

    def end(self, session: Session) -> None:
        """From now on neither they are, nor the names that its clients gave it."""
        self._of_key.pop(session.key, None)
        for name in (session.name, *session.names):
            self._of_name.pop(name, None)

    def sessions(self) -> list[Session]:
        """Those that are open."""
        return list(self._of_key.values())

    def find(self, key: str, name: str = "") -> Session:
        """The episode of a key.

        Args:
            key: An episode's, or the process's.
            name: `X-Session-ID`. With an episode's key, any name that is not another's, which is that episode's from then
                on; with the process's key, one that is an episode's.

        Raises:
            Refused: There is none.
        """
        if same_key(key, self.process):
            if not name:
                raise _refused("this key is of a process: X-Session-ID must say which episode")
            if name not in self._of_name:
                raise _refused("there is no episode of this X-Session-ID, or it has ended")
            return self._of_name[name]
        session = self._of_key.get(key)
        if session is None:
            raise _refused("there is no episode of this key, or it has ended")
        if name and name != session.name:
            self._bind(session, name)
        return session

    def of(self, headers: Mapping[str, str]) -> Session:
        """The episode of a request.

        Raises:
            Refused: There is none.
        """
        return self.find(key_in(headers), headers.get("X-Session-ID", "").strip())

    def _bind(self, session: Session, name: str) -> None:
        if name.startswith(NAMED) or self._of_name.get(name, session) is not session:
            raise Refused("X-Session-ID is another episode's, or of one that has ended", 403, "invalid_session")
        if name in session.names:
            return
        if len(session.names) >= _MOST:
            raise Refused(f"X-Session-ID: an episode has at most {_MOST}", 403, "invalid_session")
        session.names.add(name)
        self._of_name[name] = session


def same_key(key: str, other: str) -> bool:
    """Returns whether two keys are the same, in a time that tells nothing; headers may have bytes that are no UTF-8."""
    return secrets.compare_digest(key.encode(errors="surrogateescape"), other.encode())


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request comes with; "" without one."""
    return headers.get("Authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")


def _refused(why: str) -> Refused:
    return Refused(why, 401, "invalid_api_key")
