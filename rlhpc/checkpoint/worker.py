"""A worker whose part of a checkpoint can be written while it goes on."""

from __future__ import annotations

from pathlib import Path

from rlhpc.checkpoint.beside import Checksums, Copies, Writes
from rlhpc.runtime.comm.background import AsyncWork, in_background
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.worker import Worker


class SavingWorker(Worker):
    """A worker that is part of checkpoints. It writes what is large by `rlhpc.checkpoint.state`."""

    _copies: Copies | None = None
    _save: AsyncWork | None = None
    _written: Checksums | None = None

    def save(self, folder: str) -> None:
        """Writes this rank's part below `folder`."""
        raise NotImplementedError

    def load(self, folder: str) -> object:
        """Takes back what `save` wrote."""
        raise NotImplementedError

    def begin_save(self, folder: str, beside: bool) -> Checksums | None:
        """Does what `save` does.

        Args:
            folder: Of the checkpoint.
            beside: Only copies what is large, as long as there is memory for that; a thread writes the copies.

        Returns:
            What was written; None if a thread is still at it, and `saved` will say.

        Raises:
            CheckpointError: The filesystem refused.
        """
        if beside and self._copies is None:
            self._copies = Copies()
        writes = Writes(Path(folder), self._copies if beside else None)
        with writes.collecting():
            self.save(folder)
        self._save, self._written = None, writes.write() if writes.done else None
        if self._written is None:
            self._save = in_background("save", writes.write)
        return self._written

    def saved(self, wait: bool) -> Checksums | None:
        """What the present save has written; None if that is still going on.

        Args:
            wait: Whether to wait for it.

        Raises:
            CheckpointError: The filesystem refused, or this rank was restarted since.
        """
        if self._written is not None:
            return self._written
        if self._save is None:
            raise CheckpointError(
                f"{self.group_name}[{self.rank}] was restarted before it had written its part of a checkpoint"
            )
        found: Checksums | None = self._save.wait() if wait or self._save.done() else None
        return found
