"""What forked ranks hold at most while they train: measured by the kernel, as the rank's own anonymous memory."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: with fixed ones, whatever is freed leaves the process at once.
_MMAP, _TRIM, _LARGE = -3, -1, 64 << 10


class ForkedRank:
    """A rank of a group of processes that were forked from one (`rlhpc.training.contract.Ranks`)."""

    accelerators: tuple[int, ...] = ()

    def __init__(self, rank: int, world_size: int, store: Path) -> None:
        self.rank, self.world_size, self._store = rank, world_size, store

    def init_process_group(self) -> Any:
        import torch.distributed as dist

        if self.world_size > 1 and not dist.is_initialized():
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = dist.FileStore(str(self._store), self.world_size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        return dist.group.WORLD if self.world_size > 1 else None

    def all_reduce(self, tensor: Any, op: str = "sum") -> Any:
        import torch.distributed as dist

        if self.init_process_group() is not None:
            dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
        return tensor

    def all_gather_object(self, obj: Any) -> list[Any]:
        import torch.distributed as dist

        if self.init_process_group() is None:
            return [obj]
        found = [None] * self.world_size
        dist.all_gather_object(found, obj)
        return found

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.init_process_group() is not None:
            dist.barrier()


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("Vm", "Rss"))}


class Watch:
    """The highest anonymous memory since the last look, over what it was at the start."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP, _LARGE)
        libc.mallopt(_TRIM, _LARGE)
        libc.malloc_trim(0)
        self._start = _status()["RssAnon"]
        self.reset()

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what it is now

    def now(self) -> int:
        return _status()["RssAnon"] - self._start

    def peak(self) -> int:
        found = _status()
        self_peak = found["VmHWM"] - found["RssFile"] - found["RssShmem"] - self._start
        self.reset()
        return self_peak


def forked(n: int, job: Callable[[ForkedRank, Watch], Any], deadline_s: int = 300) -> list[Any]:
    """What the job returns (as JSON) in each of n processes, forked from this one, whose imports they share."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(n):
            sys.stdout.flush(), sys.stderr.flush()
            child = os.fork()
            if not child:
                code = 1
                try:
                    signal.alarm(deadline_s)
                    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n))
                    found = job(ForkedRank(rank, n, Path(folder) / "store"), Watch())
                    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), f"ranks ended with {codes}"
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(n)]
