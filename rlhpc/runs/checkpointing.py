"""Checkpoint saves of a run. Ranks copy their state and write it while training continues; a checkpoint appears once all
ranks have written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.checkpoint.async_writer import Checksums, SavingWorker
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import RlhpcError


@dataclass
class _Save:
    """Save in progress.

    Attributes:
        writer: Writer of its folder.
        opened: Closes the writer, and removes the folder if it is not a checkpoint by then.
        meta: Entries of the manifest.
        began: Start time.
        queries: By role, the pending call that asks its ranks whether they have written everything.
        sums: By role, the checksums of the written files.
    """

    writer: CheckpointWriter
    opened: contextlib.ExitStack
    meta: dict[str, Any]
    began: float
    queries: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, Checksums] = field(default_factory=dict)

    def take(self, role: str, answers: Sequence[Checksums | None]) -> None:
        """Stores the answers of a group, unless one of its ranks is still writing."""
        checksums = [answer for answer in answers if answer is not None]
        if len(checksums) == len(answers):
            self.sums[role] = merge_checksums(checksums)


class Saves:
    """Saves of a run, at most one at a time.

    Args:
        groups: Launched groups by role.
        async_save: Continue training while files are written.
        timeout: Seconds that ranks may take.
    """

    def __init__(self, groups: Mapping[str, Any], async_save: bool, timeout: float) -> None:
        self._groups, self._async_save, self._timeout = groups, async_save, timeout
        self._now: _Save | None = None

    @property
    def under_way(self) -> int | None:
        """Step of a save that is not yet a complete checkpoint."""
        return None if self._now is None else self._now.writer.step

    def begin(self, writer: CheckpointWriter, files: Mapping[str, bytes | Path], meta: dict[str, Any]) -> None:
        """Starts a save of the present step on all ranks; returns when training may continue.

        Args:
            writer: Writer of the checkpoint.
            files: Further files, by name: their content, or a file to copy.
            meta: Entries of the manifest.

        Raises:
            CheckpointError: The filesystem refused.
            RlhpcError: A rank failed.
        """
        began = time.perf_counter()
        with contextlib.ExitStack() as opened:
            folder = str(opened.enter_context(writer).staging)
            handles = {
                role: group.begin_save(folder, self._async_save) if _sums(group) else group.save(folder)
                for role, group in self._groups.items()
            }
            answers = {role: handle.wait(self._timeout) for role, handle in handles.items()}
            for name, content in files.items():
                if isinstance(content, bytes):
                    writer.add_bytes(name, content)
                else:
                    writer.add_file(name, content)
            self._now = _Save(writer, opened.pop_all(), meta, began)
        for role, group in self._groups.items():
            if _sums(group):
                self._now.take(role, answers[role])

    def advance(self) -> float | None:
        """Commits the save in progress if all its files are written; does not wait.

        Returns:
            Seconds from its start to its commit, or None if nothing was committed.
        """
        return self._commit_if_written(wait=False)

    def finish(self) -> float | None:
        """Waits until the save in progress is a checkpoint.

        Returns:
            As `advance`.

        Raises:
            CheckpointError: The filesystem refused.
            RlhpcError: A rank failed.
        """
        return self._commit_if_written(wait=True)

    def settle(self) -> float | None:
        """Finishes the save in progress after a failure, once all ranks respond again; drops it if a lost rank had not
        written its part.

        Returns:
            As `advance`.
        """
        try:
            return self.finish()
        except RlhpcError:
            return None

    def abandon(self) -> None:
        """Drops the save in progress and removes its folder."""
        if (save := self._now) is not None:
            self._now = None
            save.opened.close()

    def _commit_if_written(self, wait: bool) -> float | None:
        save = self._now
        if save is None:
            return None
        try:
            if not self._written(save, wait):
                return None
            current().registry.check_current()  # a driver that has been replaced by another commits nothing
        except BaseException:
            self.abandon()
            raise
        self._now = None
        with save.opened:
            save.writer.commit(save.meta, merge_checksums(save.sums.values()))
        return time.perf_counter() - save.began

    def _written(self, save: _Save, wait: bool) -> bool:
        """Returns whether all ranks have written all files."""
        unreported = {role: group for role, group in self._groups.items() if role not in save.sums and _sums(group)}
        for role, group in unreported.items():
            if role not in save.queries:
                save.queries[role] = group.saved(wait)
        for role, group in unreported.items():
            if not wait and not save.queries[role].done():  # its ranks are busy
                continue
            answers = save.queries.pop(role).wait(self._timeout)
            if None in answers and wait:  # the pending query did not wait for the files
                answers = group.saved(True).wait(self._timeout)
            save.take(role, answers)
        return all(role in save.sums for role in unreported)


def merge_checksums(reports: Iterable[Checksums]) -> Checksums:
    """Merges the reports of several ranks about their files. A checksum has precedence over None, which a rank reports for a
    file that it has only seen.
    """
    merged: Checksums = {}
    for report in reports:
        merged |= {name: checksum for name, checksum in report.items() if checksum is not None or name not in merged}
    return merged


def _sums(group: Any) -> bool:
    """Returns whether a group's ranks report checksums, and may write files later."""
    return issubclass(group.worker_class, SavingWorker)
