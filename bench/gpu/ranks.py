"""Workers of the parts of `bench.gpu`, and their placement on accelerators."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.gpu.part import Size, peak_bytes, timed
from bench.training import make_batches
from rlhpc import Cluster, NodePlacementStrategy, PackedPlacementStrategy, Session, Worker, WorkerGroup
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runs.device import worker_device
from rlhpc.runtime.devices import empty_cache
from rlhpc.weights import make_sync
from rlhpc.weights.receiver import apply

#: Large enough that a backend which does not train is apart from one that does.
LR = 1e-4


@contextmanager
def launch_groups(device: str, *specs: tuple[type[Worker], str, Sequence[int]]) -> Iterator[list[WorkerGroup]]:
    """Launches groups by class, name and their ranks' accelerators (on the CPU only their number counts), until the block
    ends.
    """
    num_cards = max(max(card_indices) for _, _, card_indices in specs) + 1
    cluster = Cluster.local(1, 0) if device == "cpu" else Cluster({"accelerators_per_node": num_cards})
    worker_groups: list[WorkerGroup] = []
    try:
        for cls, name, card_indices in specs:
            on_cards = PackedPlacementStrategy(card_indices[0], card_indices[-1])
            strategy = NodePlacementStrategy([0] * len(card_indices)) if device == "cpu" else on_cards
            worker_groups.append(cls.create_group().launch(cluster, placement_strategy=strategy, name=name))
        yield worker_groups
    finally:
        for group in worker_groups:
            group.shutdown()
        if session := Session.running():
            session.stop()


class Trains(Worker):
    """Worker that trains a language model."""

    def measure(self, cfg: Any, size: Size, repeat: int) -> dict[str, Any]:
        """Measures steps, then offloads to the host and reloads.

        Returns:
            Seconds of each step, tokens of a step (of all ranks), peak bytes, log-probs of a probe before and after the
            steps, and (bytes, seconds to offload, seconds to reload) of each repetition; empty if nothing is offloaded.
        """
        torch.manual_seed(0)
        trainer = TokenTrainer(cfg, self)
        device = trainer.device.type
        batches = make_batches(size.vocabulary, size.sequences, size.longest, size.micro)
        count = sum(batch.tokens for batch in batches)
        local_batches = batches[self.rank :: self.world_size]
        local_batches += [batches[0].empty_sample()] * (-(-len(batches) // self.world_size) - len(local_batches))

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss_value = -(batch.columns["weights"] * scores.logprobs).sum() / count
            return loss_value, {"loss": loss_value}

        def step() -> None:
            trainer.forward_backward(local_batches, loss)
            trainer.optimizer_step(LR)

        logprobs_before = trainer.forward(batches[0]).logprobs.float().cpu()
        seconds = [timed(step) for _ in range(repeat + 1)][1:]  # the first warms up
        peak = peak_bytes(device)
        probe = trainer.forward(batches[0]).logprobs.float().cpu()
        offloads = [] if device == "cpu" else [self._away(trainer) for _ in range(3)]
        return {
            "seconds": seconds,
            "tokens": count,
            "peak": peak,
            "before": logprobs_before,
            "probe": probe,
            "moved": offloads,
        }

    def _away(self, trainer: TokenTrainer) -> tuple[int, float, float]:
        empty_cache()
        nbytes_before = torch.accelerator.memory_allocated()
        offload_s = timed(trainer.offload)
        freed_bytes = nbytes_before - torch.accelerator.memory_allocated()
        return freed_bytes, offload_s, timed(trainer.reload)


class DeviceHolder(Worker):
    """Worker with weights on its device, as sender or receiver of updates."""

    def open(
        self, receivers: list[tuple[str, list[int]]], num_tensors: int, num_elements: int, sync: str = "auto"
    ) -> None:
        device = worker_device(self)
        self.held = [
            (f"t{i}", torch.zeros(num_elements, dtype=torch.bfloat16, device=device)) for i in range(num_tensors)
        ]
        self.sync = make_sync(sync, self, ("sender", 0), receivers, "off")

    def give(self, version: int) -> float:
        """Changes all weights and sends them; returns the seconds."""
        for _, tensor in self.held:
            tensor.fill_(version)
        return timed(lambda: self.sync.send(version, self.held))

    def take(self) -> bool:
        """Receives a version of the weights; returns whether all of it arrived."""
        version = apply(self.sync, self.held)
        return all(bool((tensor == version).all()) for _, tensor in self.held)


class Linked(Worker):
    """Worker of a group of two ranks with a card each."""

    def collectives(self, num_elements: int, repeat: int) -> dict[str, list[float]]:
        """Returns the seconds of an all-reduce, of one tensor from rank 0 to rank 1 by torch, and by rlhpc
        through the host.
        """
        import torch.distributed as dist

        self.init_process_group()
        device, peer_rank = worker_device(self), 1 - self.rank
        tensor = torch.ones(num_elements, dtype=torch.float32, device=device)

        def torchs() -> None:
            dist.send(tensor, peer_rank) if self.rank == 0 else dist.recv(tensor, peer_rank)

        def ours() -> None:
            if self.rank == 0:
                self.send_tensor(tensor, self.group_name, peer_rank)
            else:
                self.recv_tensor(tensor, self.group_name, peer_rank)

        seconds_by_name: dict[str, list[float]] = {}
        for name, run in (("all-reduce", lambda: self.all_reduce(tensor)), ("send", torchs), ("rlhpc's send", ours)):
            seconds_by_name[name] = []
            for turn in range(repeat + 1):
                self.barrier()
                seconds = timed(run)
                if turn:
                    seconds_by_name[name].append(seconds)
                tensor.fill_(1.0)
        return seconds_by_name

    def visible_cards(self) -> tuple[str, int, str]:
        """Returns the mask, the number of cards that torch sees through it, and the index of the card."""
        device_type = worker_device(self).type
        module: Any = torch.get_device_module(device_type)
        card_id = str(module.get_device_properties(0).uuid)
        return os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.accelerator.device_count(), card_id
