"""Exception tree of the package, and guards for threads that must survive an exception.

Each message states the fault, its location, and the next step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec

log = logging.getLogger(__name__)

P = ParamSpec("P")


class RlhpcError(Exception):
    """Base class of the errors that rlhpc raises for users.

    Attributes:
        exit_code: Exit code of a command that ends with this error.
        restartable: Whether a retry may succeed, because a machine has failed rather than the program.
        group, rank, node: Worker group, rank and node of the failed process, if it was a rank.
    """

    exit_code = 1
    restartable = False
    group: str = ""
    rank: int | None = None
    node: str = ""


class UserError(RlhpcError):
    """Error in the user's input; nothing was started. The command line exits with code 2."""

    exit_code = 2


class ConfigError(UserError):
    """Error in a configuration file or an override."""


class PlacementError(UserError):
    """Violation of a rule in `cluster.component_placement`; the message has the component, the text and the rule."""


class SubmitError(UserError):
    """Failure to submit a job."""


class CheckpointError(UserError):
    """Checkpoint that is missing, incomplete or altered."""


class NothingTrained(UserError):
    """Too many consecutive steps without a sample to train on, because agents or rewards fail.

    The message has the last failure.
    """


class NonFinite(RlhpcError):
    """Non-finite value in training, such as a loss; no update or checkpoint with this value was committed."""


class StorageError(UserError):
    """Filesystem that accepts no data because it is full, over quota or read-only. The message names the filesystem."""


class OwnershipError(UserError):
    """Folder that is not private to this user, because it belongs to another user, is a link, or is open to others.

    The message has the fault.
    """


class RegistryError(RlhpcError):
    """Registry folder that cannot be read or written, or that belongs to another generation."""

    restartable = True


class StaleGeneration(RegistryError):
    """Refusal of a process of an older generation (fencing)."""

    restartable = False


class RendezvousTimeout(RlhpcError):
    """Start of a run in which processes did not register in time; the message has their ranks, nodes and log files."""

    restartable = True


class Stopped(RlhpcError):
    """Request to end a run at a time when it had nothing to save.

    Attributes:
        exit_code: Exit code of the run, the same as for a later request.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DeadlineExceeded(RlhpcError):
    """Wait that has reached its deadline; the message names the awaited process."""

    restartable = True


class StrangerConnected(RlhpcError):
    """Connection between ranks with a process at the other end that does not belong to the run."""

    restartable = True


class StepFailed(RlhpcError):
    """Failure to start a job step.

    Attributes:
        group: Name of the worker group.
        rank: Rank of the group; None for all ranks of the step.
        node: First node of the step.
    """

    restartable = True

    def __init__(self, message: str, *, group: str = "", rank: int | None = None, node: str = "") -> None:
        super().__init__(message)
        self.group, self.rank = group, rank
        self.node = node


class CallAborted(RlhpcError):
    """Remote call that was ended because another group has failed; the rank that ran it stays alive."""

    restartable = True


class ChannelError(RlhpcError):
    """Channel that does not exist, or that has lost its home process."""

    restartable = True


class WorkerFailed(RlhpcError):
    """Failure of a worker: an exception, the end of its process, or silence. Only the first failure of a run is raised.

    Attributes:
        group: Name of the worker group.
        rank: Rank in the group.
        node: Name of the worker's node.
        log_path: File with the worker's stderr.
        exit_signal: Number of the signal that killed the process; None if no signal did.
        remote_traceback: Traceback of the worker's exception; "" if the worker raised no exception.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str = "",
        rank: int = -1,
        node: str = "",
        log_path: str = "",
        exit_signal: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.node = node
        self.log_path = log_path
        self.exit_signal = exit_signal
        self.remote_traceback = remote_traceback

    @property
    def restartable(self) -> bool:  # type: ignore[override]
        """True if the rank was killed or lost, or if it raised a restartable exception."""
        error_cause = self.__cause__
        return error_cause.restartable if isinstance(error_cause, RlhpcError) else not self.remote_traceback


@contextlib.contextmanager
def log_errors(message: str) -> Iterator[None]:
    """Logs an exception of the block with a message, and continues after the block."""
    try:
        yield
    except Exception:
        log.exception(message)


def guard_handler(handler: Callable[P, None]) -> Callable[P, None]:
    """Decorates the handler of a report, so that its exceptions are logged and its thread continues."""

    @functools.wraps(handler)
    def guard(*args: P.args, **kwargs: P.kwargs) -> None:
        with log_errors(f"a report could not be handled ({handler.__qualname__})"):
            handler(*args, **kwargs)

    return guard
