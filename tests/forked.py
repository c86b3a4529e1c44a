"""Ranks that are forked from one process that has imported everything, with a process group of gloo: for tests of what is done
with tensors, where the runtime's own workers would say nothing more and start more slowly."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[1]


class Rank:
    """What a training backend needs of its worker (`rlhpc.training.backend.TrainingRanks`)."""

    accelerators = ()
    group_name = "ranks"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def init_process_group(self) -> None:
        """It is there."""

    def all_reduce(self, tensor: Any, op: str = "sum") -> Any:
        import torch.distributed as dist

        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
        return tensor

    def all_gather_object(self, obj: Any) -> list[Any]:
        import torch.distributed as dist

        found = [None] * self.world_size
        dist.all_gather_object(found, obj)
        return found

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def forked(n: int, function: str, *args: Any, timeout: float = 300) -> list[Any]:
    """Runs `module:function` with a `Rank` and the arguments on n ranks; what each gives back, in their order.

    The module is one beside a test or below the repository. If a rank fails, its traceback is this one's error.
    """
    with tempfile.TemporaryDirectory(prefix="rlhpc-ranks-") as temporary:
        folder = Path(temporary)
        (folder / "call").write_bytes(pickle.dumps((n, function, args, sys.path)))
        done = warm.run(
            [sys.executable, "-m", "tests.forked", temporary], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        failed = sorted(folder.glob("*.failed"))
        if done.returncode or failed:
            told = "\n".join(f"{path.stem}:\n{path.read_text()}" for path in failed)
            raise AssertionError(f"the ranks ended with {done.returncode}\n{told}\n{done.stdout}")
        return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(n)]


def _main(folder: Path) -> int:
    n, function, args, path = pickle.loads((folder / "call").read_bytes())
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(n):
        child = os.fork()
        if not child:
            os._exit(_rank(folder, called, args, rank, n, port))
        children.append(child)
    status = 0
    while children:
        ended, found = os.wait()
        children.remove(ended)
        if found and not status:
            status = 1
            for other in children:  # they would wait for it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, 15)
    return status


def _rank(folder: Path, called: Any, args: tuple[Any, ...], rank: int, n: int, port: int) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(n)}
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=n)
        (folder / f"{rank}").write_bytes(pickle.dumps(called(Rank(rank, n), *args)))
        dist.destroy_process_group()
        return 0
    except BaseException:
        (folder / f"{rank}.failed").write_text(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
