"""Ranks of the groups that score: some make a column of values for the actor's tokens, some rate answers for the reward.

They work on groups and answers as these come, and keep nothing: one that is lost is started again alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_tensors, save_tensors
from rlhpc.config.parallel import MeshSizes
from rlhpc.jobs.paths import MODEL
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.registry import forkable
from rlhpc.language.models.micro_batching import split_micro_batches, values_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rollout.group_receiver import BlockChannel
from rlhpc.language.rollout.sample_group import PARTS, SampleGroup, column_message
from rlhpc.language.scoring.checks import judges, section_of
from rlhpc.language.scoring.groups import REFERENCE, scoring_groups
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.language.training.prompt_dispatch import GROUPS, PromptMap, channel_to, ratings_of
from rlhpc.language.training.weight_sync import reference_sync_of
from rlhpc.runs.device import own_device, seed_process
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.runtime.worker import Worker
from rlhpc.weights import make_sync
from rlhpc.weights.delta import Elements
from rlhpc.weights.verification import Proof


class GroupInbox:
    """The groups of answers that a rank is sent, those of a step at a time, until the driver says that there are no more.

    Of a prompt that was drawn again, because who drew it first was lost while handing it over, there may be two
    (`SampleGroup.draw`). Which one the actor has, nobody here knows: both are scored.

    Args:
        channel: Where they come in.
        who: The rank's name, for messages.
        makers: The group that sends them.
    """

    def __init__(self, channel: BlockChannel, who: str, makers: str) -> None:
        self._channel, self._who, self._makers = channel, who, makers
        self._later: list[SampleGroup] = []
        self._ended = -1

    def parts(
        self, step: int, share: Sequence[int], deadline: float, *, together: bool = False
    ) -> Iterator[list[SampleGroup]]:
        """A step's groups in a few parts, each as soon as it is whole. Which groups a part has depends on `share` alone: what
        is computed together, and so its last digits, does not change with what came first. What was drawn twice comes last.

        Args:
            step: Of the run.
            share: The rank's groups, by position.
            deadline: On the clock of `time.monotonic`.
            together: In one part, when all are there.

        Raises:
            DeadlineExceeded: One did not come in time.
        """
        count = 1 if together else min(PARTS, len(share) or 1)
        lacking = [part.tolist() for part in np.array_split(np.asarray(share), count) if len(part)]
        found, again, draws = dict[int, SampleGroup](), list[SampleGroup](), dict[int, set[bytes]]()
        while lacking or self._ended < step:
            for group in self.some(step, deadline):
                known = draws.setdefault(group.position, set())
                if not known:
                    found[group.position] = group
                elif group.draw not in known:
                    again.append(group)
                known.add(group.draw)
            if together and self._ended < step:
                continue
            for part in [part for part in lacking if found.keys() >= {*part}]:
                lacking.remove(part)
                extra, again = (again, []) if together else ([], again)
                yield [*(found.pop(position) for position in part), *extra]
        if again:
            yield again

    def some(self, step: int, deadline: float) -> list[SampleGroup]:
        """All groups of a step that are there; waits for one, or for word that there are no more.

        Raises:
            DeadlineExceeded: None came until the deadline, on the clock of `time.monotonic`.
        """
        found, ended = [group for group in self._later if group.step == step], False
        self._later = [group for group in self._later if group.step > step]
        while True:
            try:
                message = self._channel.get_nowait()
            except QueueEmpty:
                if found or ended:
                    return found
                message = self._wait(step, deadline)
            if "end" in message:
                self._ended = max(self._ended, message["end"])
                ended = True
            elif message["step"] >= step:
                group = SampleGroup.unpack(message)
                (found if group.step == step else self._later).append(group)

    def _wait(self, step: int, deadline: float) -> Any:
        try:
            return self._channel.get(max(0.0, deadline - time.monotonic()))
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"step {step}: no groups came from {self._makers} to {self._who} within runner.step_timeout_s"
            ) from None


class _Scoring(Worker):
    """What both kinds have in common."""

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.scorer: Any = None

    def close(self) -> None:
        """Ends what the scorer has started."""
        if self.scorer is not None:
            self.scorer.close()

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads what it scores with."""
        self.prompts = prompts
        seed_process(self.cfg.runner.seed, self.group_name, self.rank)
        self.group = scoring_groups(self.cfg)[self.group_name]
        self.device = own_device(self)
        self.scorer = make_scorer(self.cfg, self.device, self.group)
        self.log.info("scores with %s on %s", self.group.model.model_path or self.group.scorer, self.device)

    def _deadline(self) -> float:
        return time.monotonic() + self.cfg.runner.step_timeout_s


class ScoringWorker(_Scoring):
    """One rank of a group with a `Scorer`: its column goes to the actors."""

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        own = BlockChannel(self.connect_channel(channel_to(self.group_name)), self, MeshSizes(shard=self.world_size))
        self._inbox = GroupInbox(own, f"{self.group_name}-{self.rank}", self.prompts.rollout_name)
        self._actors = self.connect_channel(GROUPS)

    def serve(self, step: int) -> dict[str, float]:
        """Scores its share of a step's groups, as they come.

        Returns:
            Seconds spent scoring, and tokens.
        """
        busy, tokens = 0.0, 0
        share = self.prompts.share_of(self.group_name, self.rank)
        for groups in self._inbox.parts(step, share, self._deadline()):
            start = time.perf_counter()
            batch = TokenBatch.joined([group.batch for group in groups])
            values = values_of(
                self._score,
                split_micro_batches(batch, self.group.max_tokens, packed=self.scorer.packed),
                batch,
                "the scorer",
            )
            send_column(self._actors, self.prompts, groups, self.group_name, values)
            tokens += batch.tokens
            busy += time.perf_counter() - start
        return {"busy_s": busy, "tokens": float(tokens)}

    def _score(self, batch: TokenBatch) -> torch.Tensor:
        values: torch.Tensor = self.scorer.score(batch.to(self.device))
        return values

    def offload(self) -> None:
        """Gives the accelerator to another role."""
        self.scorer.offload()
        empty_cache()

    def reload(self) -> None:
        """Takes back what `offload` moved away."""
        self.scorer.reload()


def send_column(
    actors: Channel, prompts: PromptMap, groups: Sequence[SampleGroup], maker: str, values: torch.Tensor
) -> None:
    """Sends the actors a column of some groups' tokens.

    Args:
        actors: Their channel.
        prompts: Which actor has which group.
        groups: The groups, in the order of `values`.
        maker: The group that made it.
        values: `[T]` or `[T, k]`.
    """
    for group, part in zip(groups, values.split([group.batch.tokens for group in groups]), strict=True):
        message = column_message(group, maker, part)
        actors.put(message, key=str(prompts.actor_of(group.position)))


class RatingWorker(_Scoring):
    """One rank of a group with a `Rater`: a term of the reward."""

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        self._asked = self.connect_channel(channel_to(self.group_name))
        self._ends = set[str]()

    def serve(self, phase: str) -> dict[str, float]:
        """Rates answers as they come, until the driver says that nobody asks any more in this phase.

        Args:
            phase: Of the run, as the rollout ranks name it.

        Returns:
            Seconds spent rating, answers, and the rater's counts as `count/<name>`.
        """
        busy, count, deadline = 0.0, 0, self._deadline()
        self.scorer.counts()  # of a phase that broke off
        while phase not in self._ends:
            asked = self._some(phase, deadline)
            if not asked:
                continue
            start = time.perf_counter()
            for one in asked:
                self._answer(one)
                count += len(one["ids"])
            busy += time.perf_counter() - start
        self._ends.discard(phase)
        counted = {f"count/{name}": value for name, value in self.scorer.counts().items()}
        return {"busy_s": busy, "answers": float(count), **counted}

    def _some(self, phase: str, deadline: float) -> list[dict[str, Any]]:
        """All that has been asked; waits for the first."""
        key, found = str(self.rank), list[dict[str, Any]]()
        try:
            message = self._asked.get(key=key, timeout=max(0.0, deadline - time.monotonic()))
            while True:
                if "end" in message:
                    self._ends.add(message["end"])
                else:
                    found.append(message)
                message = self._asked.get_nowait(key=key)
        except QueueEmpty:
            return found
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"{phase}: {self.prompts.rollout_name} asked {self.group_name}-{self.rank} nothing, and was not done, within "
                "runner.step_timeout_s"
            ) from None

    def _answer(self, asked: dict[str, Any]) -> None:
        found = list(self.scorer.rate(asked["samples"]))
        if len(found) != len(asked["ids"]):
            raise RlhpcError(f"{self.group.scorer}: rate gave {len(found)} numbers for {len(asked['ids'])} answers")
        values = [None if value is None else float(value) for value in found]
        message = {"round": asked["round"], "ids": asked["ids"], "values": values}
        self.notify(message, self.prompts.rollout_name, asked["rollout"], ratings_of(self.group_name))


class JudgeWorker(RatingWorker):
    """A rank of a group with a language model as judge."""

    @classmethod
    def forks(cls, cfg: GrpoConfig) -> bool:
        """Whether the ranks of all judges may be forked: where one's engine does not allow it, none is."""
        return all(forkable(section_of(cfg, group).rollout_backend) for group in judges(cfg).values())


class ReferenceWorker(ScoringWorker, SavingWorker):
    """Scores like any other rank; and takes in the actor's weights when it is told to, which it then keeps in checkpoints."""

    scorer: LogProbs

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads the policy from before training."""
        super().init_worker(prompts)
        receivers = [(self.group_name, list(range(self.world_size)))]
        self._sync = make_sync(reference_sync_of(self.cfg), self, (prompts.actor_name, 0), receivers, "off", whole=True)

    def take_weights(self) -> None:
        """Becomes the policy that the actor sends."""
        update = self._sync.receive()
        there = self.scorer.model.state_dict()
        with torch.no_grad():
            proof = Proof(update, f"{self.prompts.actor_name}-0")
            for name, tensor in proof.tensors():
                if isinstance(tensor, Elements) or name not in there:
                    raise RlhpcError(f"the actor's weight {name} does not fit the reference's model")
                there[name].copy_(tensor)
            proof.check()

    def save(self, folder: str) -> None:
        """Rank 0 writes the weights: they are neither the actor's nor those from before training."""
        if self.rank == 0:
            path = Path(folder) / REFERENCE
            path.mkdir(exist_ok=True)
            weights = {name: parameter.detach().cpu() for name, parameter in self.scorer.model.named_parameters()}
            save_tensors(path / MODEL, weights)

    def load(self, folder: str) -> None:
        """Restores a checkpoint, of this or another world size."""
        self._sync.forget()
        there = dict(self.scorer.model.named_parameters())
        with torch.no_grad():
            for name, tensor in load_tensors(Path(folder) / REFERENCE / MODEL).items():
                there[name].copy_(tensor)
