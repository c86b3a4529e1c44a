"""Exception tree of the package. Each error states the fault, its place, and the next step."""

from __future__ import annotations


class RlhpcError(Exception):
    """Base of every error that rlhpc raises for a user to read.

    Attributes:
        exit_code: Exit code of a command that ends with this error.
        restartable: Whether a retry may succeed, because a machine failed and not the program.
        group, rank, node: Those of the process that failed, if it was a worker group's.
    """

    exit_code = 1
    restartable = False
    group: str = ""
    rank: int | None = None
    node: str = ""


class UserError(RlhpcError):
    """Something the user gave is wrong; nothing was started. The command line exits with code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration file or override is wrong."""


class PlacementError(UserError):
    """`cluster.component_placement` breaks a rule; names component, text and rule."""


class SubmitError(UserError):
    """A job could not be submitted."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or altered."""


class NothingTrained(UserError):
    """In too many steps in a row no sample could be trained on: agents or rewards fail. The message has the last failure."""


class NonFinite(RlhpcError):
    """A number that training depends on is not finite; nothing that it affected was committed."""


class StorageError(UserError):
    """A filesystem accepts no more data: it is full, over quota or read-only. The message names it."""


class OwnershipError(UserError):
    """A folder that must be private to this user belongs to another user, is a link, or is open to others. The message says
    which.
    """


class RegistryError(RlhpcError):
    """The registry folder cannot be read or written, or belongs to another generation."""

    restartable = True


class StaleGeneration(RegistryError):
    """A process of an older generation woke up and was refused (fencing)."""

    restartable = False


class RendezvousTimeout(RlhpcError):
    """Some processes did not arrive in time; names ranks, nodes and log files."""

    restartable = True


class Stopped(RlhpcError):
    """A run that was asked to end while there was nothing to save.

    Attributes:
        exit_code: The same as for a run that was asked to end later.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DeadlineExceeded(RlhpcError):
    """A wait that ran into its deadline; the message names the awaited process."""

    restartable = True


class StrangerConnected(RlhpcError):
    """The other end of a connection between ranks is not a process of the run."""

    restartable = True


class StepFailed(RlhpcError):
    """A job step could not be started.

    Attributes:
        group: Name of the worker group.
        rank: A rank of it; None for all that the step was for.
        node: The first node that the step was for.
    """

    restartable = True

    def __init__(self, message: str, *, group: str = "", rank: int | None = None, node: str = "") -> None:
        super().__init__(message)
        self.group, self.rank = group, rank
        self.node = node


class CallAborted(RlhpcError):
    """A call was given up because another group failed; its rank lives on."""

    restartable = True


class ChannelError(RlhpcError):
    """A channel that does not exist, or whose home process has ended."""

    restartable = True


class WorkerFailed(RlhpcError):
    """A worker raised, died or was lost. The first failure, not the ones that follow.

    Attributes:
        group: Name of the worker group.
        rank: Rank inside the group.
        node: Node name.
        log_path: The worker's stderr file.
        exit_signal: Signal number if the process was killed, otherwise None.
        remote_traceback: The worker's traceback if it raised, otherwise "".
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
        """True for a rank that was killed or lost; for one that raised, the exception decides."""
        cause = self.__cause__
        return cause.restartable if isinstance(cause, RlhpcError) else not self.remote_traceback
