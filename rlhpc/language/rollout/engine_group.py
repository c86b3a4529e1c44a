"""The ranks of a rollout group that are one engine: how they hear of each other, and who does what in a call.

Neighbouring ranks are an engine (`rollout.parallel`). The first takes prompts, has answers judged and decides; the others
repeat what its engine does (`engines.lockstep`). A call to the group reaches all of them: the first carries it out, the others
follow it until it is done.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.base import (
    HasContext,
    ReadsInChunks,
    RolloutBackend,
    ScoresTexts,
    TakesShards,
    TellsWeights,
    taking_parts,
)
from rlhpc.language.engines.common import engine_dtype
from rlhpc.language.engines.multi_rank import Commands, FollowerEngine, Leader
from rlhpc.language.engines.registry import awaiting_weights, make_engine
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.loading import window_of
from rlhpc.language.multi_policy import policies_of
from rlhpc.language.training.prompt_dispatch import VERSIONS, PromptMap
from rlhpc.language.training.weight_sync import Probe, ProbeSequence, check_probe, draw, long_text, sync_of
from rlhpc.runs.device import own_device
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import CallAborted, DeadlineExceeded, RlhpcError
from rlhpc.runtime.worker import Worker
from rlhpc.weights import make_sync, sends_shards
from rlhpc.weights.reshard import SendsShards
from rlhpc.weights.verification import Proof

Found = TypeVar("Found")
#: What an engine's first rank tells the others (`p2p.post`).
_TOLD = "engine"
#: How long another rank may take to tell what it had begun when a call is given up.
_BEGUN_S = 5.0
#: How long the driver may take to notice that a rank of the engine has ended, and to end the others.
_NOTICED_S, _ENDED_S = 10.0, 60.0


def ranks_of_engine(cfg: GrpoConfig) -> int:
    """How many neighbouring ranks are one engine; what the placement says has been written down by now."""
    return cfg.rollout.parallel.tensor or 1


def first_of_engine(rank: int, cfg: GrpoConfig) -> int:
    """The rank that decides for an engine of which a rank is one."""
    return rank - rank % ranks_of_engine(cfg)


class RunLink:
    """The way between ranks of one engine, through their inboxes (`lockstep.Link`).

    Args:
        worker: This rank.
        size: Ranks of the engine.
    """

    def __init__(self, worker: Worker, size: int) -> None:
        self._worker, self._group, self.size = worker, worker.group_name, size
        first = worker.rank - worker.rank % size
        self.ranks, self.rank = range(first, first + size), worker.rank - first
        self._first = f"{self._group}-{first}"
        context = current()
        records = [context.member(self._group, rank) for rank in self.ranks]
        self.ident = f"{context.host}-{self._first}-{records[0]['incarnation']}"
        self.call = 0

    def form(self) -> None:
        """See `Link.form`."""
        self._worker.init_process_group(self.ranks)

    def tell(self, told: Commands) -> None:
        """See `Link.tell`."""
        for rank in self.ranks[1:]:
            if not p2p.post((self.call, told), _TOLD, self._group, rank):
                raise RlhpcError(f"{self._group}-{rank} has ended, and it is one engine with {self._first}")

    def hear(self) -> Commands:
        """See `Link.hear`."""
        aborted: float | None = None
        while True:
            try:
                call, told = p2p.await_post(_TOLD, current().wait_deadline, self._first)
            except CallAborted:
                # The first rank may be computing already, and wait for this one where it hears of nothing.
                aborted = aborted or time.monotonic()
                if time.monotonic() - aborted > _BEGUN_S:
                    raise
                time.sleep(0.01)
                continue
            if call == self.call:  # otherwise of one that was given up
                found: Commands = told
                return found

    def mourn(self, error: BaseException) -> None:
        """See `Link.mourn`."""
        if isinstance(error, CallAborted):
            return
        context, until = current(), time.monotonic() + _NOTICED_S
        others = [rank for rank in self.ranks if rank != self._worker.rank]
        with contextlib.suppress(RlhpcError):
            while time.monotonic() < until:
                if any(context.has_left(self._group, rank) for rank in others):
                    self._worker.log.info("a rank of this engine has ended, and so must this one")
                    time.sleep(_ENDED_S)  # the driver ends this process
                time.sleep(0.05)


class EngineRank:
    """A rank's part in its engine.

    Args:
        engine: This rank's own.
        link: To the others; None where there are none.
        take_weights: Takes in the weights that come next; called where another rank decides when.

    Attributes:
        engine: What generation calls.
        follows: Whether another rank decides.
    """

    def __init__(self, engine: Any, link: RunLink | None, take_weights: Callable[[], object]) -> None:
        self._link = link
        self.follows = link is not None and link.rank > 0
        self._leader = Leader(engine, link) if link is not None and not self.follows else None
        self._follower = FollowerEngine(engine, link, take_weights) if link is not None and self.follows else None
        self.engine: RolloutBackend = self._leader or engine

    def begin_weights(self) -> None:
        """Has the others take in weights, as this rank is about to do."""
        if self._leader is not None:
            self._leader.begin_weights()

    def follow(self) -> None:
        """Does what the first rank does, until its call is over. Who is told to leave meanwhile leaves behind that: the first
        may have something to hand back."""
        assert self._follower is not None
        Worker.before_leaving(lambda: None)
        self._follower.follow()
        Worker.before_leaving(None)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call that all ranks of the engine get."""
        if self._link is not None:
            self._link.call += 1
        try:
            yield
        except CallAborted:
            if self._leader is not None:
                with contextlib.suppress(RlhpcError):
                    self._leader.end()
            raise
        if self._leader is not None:
            self._leader.end()


class _HasPart(Protocol):
    part: EngineRank


def led(method: Callable[..., Found]) -> Callable[..., Found]:
    """A method that the first rank of an engine carries out, and the others follow: they return {}."""

    @functools.wraps(method)
    def call(self: _HasPart, *args: Any, **kwargs: Any) -> Any:
        with self.part.call():
            if not self.part.follows:
                return method(self, *args, **kwargs)
            self.part.follow()
            return {}

    return call


#: Pause in seconds where another rank has heard of weights, and this one has not yet.
_IDLE_S = 0.002


class EngineWeights:
    """Builds this rank's engine, and keeps it up to date.

    Args:
        worker: The rank.
        cfg: The run's configuration.
        prompts: Names the groups.

    Attributes:
        part: This rank's part in the engine.
        version: Of the weights; -1 before any have come.
    """

    def __init__(self, worker: Worker, cfg: GrpoConfig, prompts: PromptMap) -> None:
        self._worker, self._cfg, self._sender = worker, cfg, f"{prompts.actor_name}-0"
        size, self.version = ranks_of_engine(cfg), -1
        link = RunLink(worker, size) if size > 1 else None
        path, device = str(cfg.actor.model.model_path), own_device(worker)
        self._engine = make_engine(
            awaiting_weights(cfg), model_path=path, device=device, seed=cfg.runner.seed, link=link
        )
        name = sync_of(cfg)
        by_shards = sends_shards(name)
        self._in_parts = None if by_shards else taking_parts(self._engine)
        self._sync = make_sync(
            name, worker, (prompts.actor_name, 0),
            [(prompts.rollout_name, list(range(prompts.rollout_ranks)))], cfg.rollout.weight_delta,
            whole=self._in_parts is None,
        )  # fmt: skip
        if by_shards:
            assert isinstance(self._sync, SendsShards)
            self._sync.want(self._engine.wants() if isinstance(self._engine, TakesShards) else None)
        self.part = EngineRank(self._engine, link, self._follow)

    def forget(self) -> None:
        """The next weights are complete: the last ones may have been lost on their way."""
        self._sync.forget()

    def computes(self) -> dict[str, str]:
        """Returns the engine's `dtype` and the type of its `device`."""
        device = own_device(self._worker)
        return {"dtype": engine_dtype(self._cfg, device), "device": device.type}

    def draw(self, vocabulary: int, phase: int) -> list[ProbeSequence]:
        """Has the engine draw from short prompts, and from one that is longer than a layer's window and than a piece of a
        prefill, if those of the run may be (`probe.draw`)."""
        cfg, engine = self._cfg, self._engine
        prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens
        context = engine.context if isinstance(engine, HasContext) else 0
        chunk = engine.chunk if isinstance(engine, ReadsInChunks) else 0
        config = load_model_config(str(cfg.actor.model.model_path), cfg.actor.model.trust_remote_code)
        length = long_text(prompt + response, window_of(config), chunk, context)
        return draw(self.part.engine, vocabulary, prompt, response, length, phase, len(policies_of(cfg).names))

    def take(self) -> bool:
        """Takes in a version, if one has been announced."""
        try:
            probe: Probe | None = self._worker.notice(VERSIONS)
        except queue.Empty:
            return False
        self.part.begin_weights()
        self._take(probe)
        return True

    def await_version(self, version: int, take: Callable[[], bool] | None = None) -> None:
        """Takes in weights until they are of a version, or newer.

        Args:
            version: The actor's.
            take: Takes in a version, if one has been announced; by default `take`.

        Raises:
            DeadlineExceeded: They did not come within `runner.step_timeout_s`.
        """
        deadline = time.monotonic() + self._cfg.runner.step_timeout_s
        while self.version < version:
            if time.monotonic() > deadline:
                rank = f"{self._worker.group_name}-{self._worker.rank}"
                raise DeadlineExceeded(f"the weights of step {version} did not reach {rank}")
            if not (take or self.take)():
                time.sleep(_IDLE_S)

    def _follow(self) -> None:
        """Takes in the version that another rank of the engine takes in now."""
        deadline = time.monotonic() + self._cfg.runner.step_timeout_s
        while True:
            try:
                probe: Probe | None = self._worker.notice(VERSIONS)
                break
            except queue.Empty:
                if time.monotonic() > deadline:
                    who = f"{self._worker.group_name}-{self._worker.rank}"
                    first = first_of_engine(self._worker.rank, self._cfg)
                    raise DeadlineExceeded(f"{who} was not told of weights that rank {first} takes in") from None
                time.sleep(_IDLE_S)
        self._take(probe)

    def _take(self, probe: Probe | None) -> None:
        engine, rollout = self._engine, self._cfg.rollout
        update = self._sync.receive()
        held = engine.held if isinstance(engine, TellsWeights) else None
        proof = Proof(update, self._sender, look=not update.proven)
        if update.proven and isinstance(engine, TakesShards):
            engine.update_shards(update.version, proof.complete_tensors())
        elif self._in_parts is None:
            engine.update_weights(update.version, proof.complete_tensors())
        else:
            self._in_parts.update_weights(update.version, proof.tensors(), complete=update.complete)
        proof.check(held)
        if probe is not None and isinstance(engine, ScoresTexts):
            computes = self.computes()
            dtypes = {probe.dtype, computes["dtype"]}
            check_probe(
                engine, probe, update.version, rollout.probe_tolerance, dtypes, self._sender, computes["device"]
            )
        self.version = update.version
