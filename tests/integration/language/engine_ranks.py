"""An engine of several ranks, for tests of one process: the other ranks are forked from it and follow.

vLLM's import takes half a minute of the processor, so that the ranks are forked from a process that has it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import DEVICE, config

from rlhpc.checkpoint.tensor_slice import TensorSlice, cut, full_slice
from rlhpc.language.engines import RolloutBackend, make_rollout
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.multi_rank import Commands, FollowerEngine, Leader
from rlhpc.language.engines.vllm_launch import has_disjoint_cores
from rlhpc.weights.transfer_plan import ShardMetadata, plan_transfer
from tests.accelerators import OTHERS_ON_CARD
from tests.extras import need_extra
from tests.forked import Rank


class Pipes:
    """A `Link` by pipes; rank 0 has one to each of the others."""

    device_index = 0

    def __init__(self, rank: int, size: int, store: str, pipes: list[Connection]) -> None:
        self.rank, self.size, self.ident, self.pipes = rank, size, f"vm:{Path(store).name}", pipes
        self._store = store

    def form(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(self._store, self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def broadcast(self, told: Commands) -> None:
        self.hand(told)

    def hand(self, what: Any) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def receive(self) -> Commands:
        told: Commands = self.pipes[0].recv()
        return told

    def handle_failure(self, error: BaseException) -> None:
        """Whoever tests it lets it end."""


class Several(Leader):
    """The engine that a test calls. What it is updated with, the other ranks get from here.

    Attributes:
        own: This rank's engine.
        ident: Its name among engines.
        pids: Of the other ranks.
    """

    def __init__(self, own: RolloutBackend, link: Pipes, pids: list[int]) -> None:
        super().__init__(own, link)
        self.own, self.pids, self.ident, self._pipes = own, pids, link.ident, link

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = [(name, tensor.detach().clone()) for name, tensor in named_tensors]
        self.begin_weights()
        self._pipes.hand((version, weights, ""))
        self.own.update_weights(version, iter(weights))

    def take_shards(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], layout: str) -> None:
        """From a trainer of four ranks: each rank of the engine gets the parts that its routes bring; the rest is spoilt."""
        weights = [(name, tensor.detach().clone()) for name, tensor in named_tensors]
        self.begin_weights()
        self._pipes.hand((version, weights, layout))
        take_shards(self.own, version, weights, layout)

    def close(self) -> None:
        self.end()
        self.own.close()
        for pid in self.pids:
            assert os.waitpid(pid, 0)[1] == 0, "a rank of the engine has failed"
        if dist.is_initialized():
            dist.destroy_process_group()


def take_shards(engine: Any, version: int, weights: list[tuple[str, torch.Tensor]], layout: str) -> None:
    """What the routes from four ranks of a trainer bring to a rank of an engine."""
    held = [
        [
            ShardMetadata(n, tuple(t.shape), 4, tensor_slice)
            for n, t in weights
            for tensor_slice in part_of(n, t.shape, rank, layout)
        ]
        for rank in range(4)
    ]
    routes, given = plan_transfer(held, engine.wants()), dict[str, torch.Tensor]()
    for piece in routes.slices:
        tensor = dict(weights)[piece.name]
        spoilt = given.setdefault(piece.name, torch.full_like(tensor, torch.nan))
        cut(spoilt, piece.tensor_slice).copy_(cut(tensor, piece.tensor_slice))
    engine.update_shards(version, given.items())


def part_of(name: str, shape: torch.Size, rank: int, layout: str) -> list[TensorSlice]:
    """What one of four ranks holds: `4`, rows over all; `2x2`, rows over pairs, and within each the rows or columns that
    tensor ranks have; `ep4`, whole experts, and rows of all else."""
    if layout == "ep4" and ".experts." in name:
        return [full_slice(shape)] if int(name.split(".experts.")[1].split(".")[0]) % 4 == rank else []
    rows = [(at, min(-(-shape[0] // 4), shape[0] - at)) for at in range(0, shape[0], -(-shape[0] // 4))]
    if layout != "2x2" or len(shape) == 1:
        return (
            [TensorSlice((rows[rank][0], *(0 for _ in shape[1:])), (rows[rank][1], *shape[1:]))]
            if rank < len(rows)
            else []
        )
    half, pair = -(-shape[0] // 2), rank // 2
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        column = shape[1] // 2
        return [TensorSlice((pair * half, rank % 2 * column), (half, column))]
    quarter = shape[0] // 4  # FSDP cuts what a tensor rank has: its half of the rows, of which each pair has one half
    return [TensorSlice((rank % 2 * half + pair * quarter, 0), (quarter, shape[1]))]


def engine_of(kind: str, folder: Path, seed: int = 3, **rollout: Any) -> RolloutBackend:
    """An engine, of which this process is the first rank.

    Args:
        kind: The backend, and behind `x` how many ranks: `hf`, `vllm`, `vllm x 2`.
        folder: Of the model.
        seed: Of the engine.
        rollout: Of its section, as `config` takes them; `adapters`: rank and alpha of some that are not merged.
    """
    backend, _, ranks = kind.partition(" x ")
    if backend == "vllm":
        need_extra("vllm")
    size, keeps, says = (
        int(ranks or 1),
        rollout.pop("keep_cache_on_update", False),
        rollout.pop("routing_replay", False),
    )
    rank, alpha = rollout.pop("adapters", (0, 0))
    cfg = config(backend, **rollout)
    cfg.rollout = {**cfg.rollout, "keep_cache_on_update": keeps, "merge_adapters": not rank, "routing_replay": says}
    cfg.actor.lora.rank, cfg.actor.lora.alpha = rank, alpha
    options = {"model_path": str(folder), "device": DEVICE, "seed": seed}
    if size == 1:
        return make_rollout(cfg, **options)
    if OTHERS_ON_CARD:
        pytest.skip("each rank of an engine needs an accelerator of its own")
    import vllm  # noqa: F401 (before the ranks are forked)

    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()  # of a trainer of one rank, in a test before

    store = tempfile.mktemp(prefix="rlhpc-engine-")
    ends, pids = list[Connection](), list[int]()
    for rank in range(1, size):
        mine, theirs = Pipe()
        ends.append(mine)
        if (pid := os.fork()) == 0:
            status = 1
            with contextlib.suppress(BaseException):
                # faulthandler's timer waits for ever in a fork of a process that has started one.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(600)
                _follow(cfg, options, Pipes(rank, size, store, [theirs]))
                status = 0
            sys.stdout.flush()
            os._exit(status)
        pids.append(pid)
    link = Pipes(0, size, store, ends)
    return Several(make_rollout(cfg, **options, link=link), link, pids)


def _follow(cfg: Any, options: dict[str, Any], link: Pipes) -> None:
    try:
        engine = make_rollout(cfg, **options, link=link)

        def take() -> None:
            version, weights, layout = link.pipes[0].recv()
            if layout:
                take_shards(engine, version, weights, layout)
            else:
                engine.update_weights(version, iter(weights))

        follower = FollowerEngine(engine, link, take)
        while True:
            try:
                follower.follow()
                break
            except WeightUpdateError:  # as in the first rank, whose test goes on
                pass
        engine.close()
    except BaseException:
        import traceback

        traceback.print_exc()
        raise


def apart(rank: Rank, bound: list[list[set[int]]]) -> list[bool]:
    """Whether ranks that are bound to these cores have cores of their own."""
    found = []
    for cores in bound:
        os.sched_setaffinity(0, cores[rank.rank])
        found.append(has_disjoint_cores())
    return found
