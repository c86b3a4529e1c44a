"""Engine groups: ranks of the rollout group that form one engine, and the receiver of the actor's weights.

Neighbouring ranks form an engine (`rollout.parallel`): a leader and its followers. A call to the worker group reaches all
ranks. The leader runs the call: it leases prompts, requests scores and calls the engine. The followers repeat the leader's
engine calls until the call ends (`engines.multi_rank`).
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.base import RolloutBackend
from rlhpc.language.engines.common import engine_precision
from rlhpc.language.engines.multi_rank import Commands, FollowerEngine, Leader
from rlhpc.language.engines.registry import awaiting_weights, make_engine
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.multi_policy import policies_of
from rlhpc.language.training.prompt_dispatch import VERSIONS, PromptMap
from rlhpc.language.training.weight_sync import Probe, ProbeSequence, check_probe, long_text, sample_probe, sync_of
from rlhpc.runs.device import worker_device
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import CallAborted, DeadlineExceeded, RlhpcError
from rlhpc.runtime.trace_recorder import IdleSpan, span
from rlhpc.runtime.worker import Worker
from rlhpc.weights import make_sync, sends_shards
from rlhpc.weights.receiver import TransferTotals
from rlhpc.weights.reshard import SendsShards
from rlhpc.weights.verification import UpdateVerification

Result = TypeVar("Result")
#: Topic of the leader's commands to the followers (`p2p.post`).
_COMMAND_TOPIC = "engine"
#: Seconds for which a follower still waits after an abort, because the leader may already send a command.
_ABORT_GRACE_S = 5.0
#: Seconds within which the driver notices the end of a rank, and within which the driver then ends the engine's other ranks.
_NOTICE_S, _TERMINATION_S = 10.0, 60.0


def ranks_of_engine(cfg: GrpoConfig) -> int:
    """Returns the number of neighbouring ranks of an engine, which the placement writes into the configuration."""
    return cfg.rollout.parallel.tensor or 1


def first_of_engine(rank: int, cfg: GrpoConfig) -> int:
    """Returns the rank of the leader of a rank's engine."""
    return rank - rank % ranks_of_engine(cfg)


class RunLink:
    """Link between the ranks of one engine, through their inboxes (`multi_rank.EngineLink`).

    Args:
        worker: Worker of this rank.
        size: Number of ranks of the engine.
    """

    def __init__(self, worker: Worker, size: int) -> None:
        self._worker = worker
        self._group = worker.group_name
        self.size = size
        leader_rank = worker.rank - worker.rank % size
        self.ranks = range(leader_rank, leader_rank + size)
        self.rank = worker.rank - leader_rank
        self.device_index = worker.device_index
        self._leader_name = f"{self._group}-{leader_rank}"
        current_context = current()
        records = [current_context.rank_record(self._group, rank) for rank in self.ranks]
        self.ident = f"{current_context.host}-{self._leader_name}-{records[0]['incarnation']}"
        self.call = 0

    def begin_call(self) -> None:
        """Starts a new call; the number of the call separates its commands from commands of an aborted call."""
        self.call += 1

    def form(self) -> None:
        """Forms the process group of the engine's ranks (`EngineLink.form`)."""
        self._worker.init_process_group(self.ranks)

    def broadcast(self, command: Commands) -> None:
        """Sends a command to the followers (`EngineLink.broadcast`).

        Raises:
            RlhpcError: A rank of the engine has ended.
        """
        for rank in self.ranks[1:]:
            if not p2p.post((self.call, command), _COMMAND_TOPIC, self._group, rank):
                raise RlhpcError(f"{self._group}-{rank} has ended, and it is one engine with {self._leader_name}")

    def receive(self) -> Commands:
        """Returns the leader's next command (`EngineLink.receive`)."""
        abort_time: float | None = None
        while True:
            try:
                call, command = p2p.await_post(_COMMAND_TOPIC, current().wait_deadline, self._leader_name)
            except CallAborted:
                # The leader may already compute, and wait for this rank in a collective.
                abort_time = abort_time or time.monotonic()
                if time.monotonic() - abort_time > _ABORT_GRACE_S:
                    raise
                time.sleep(0.01)
                continue
            if call == self.call:  # otherwise the command belongs to an aborted call
                commands: Commands = command
                return commands

    def handle_failure(self, error: BaseException) -> None:
        """Waits until the driver ends this process if another rank of the engine has ended (`EngineLink.handle_failure`)."""
        if isinstance(error, CallAborted):
            return
        current_context, deadline = current(), time.monotonic() + _NOTICE_S
        peers = [rank for rank in self.ranks if rank != self._worker.rank]
        with contextlib.suppress(RlhpcError):
            while time.monotonic() < deadline:
                if any(current_context.has_left(self._group, rank) for rank in peers):
                    self._worker.log.info("a rank of this engine has ended, and so must this one")
                    time.sleep(_TERMINATION_S)  # the driver ends this process
                time.sleep(0.05)


class EngineRank:
    """Rank of an engine: leader or follower.

    Args:
        engine: This rank's engine.
        link: Link to the other ranks; None for an engine of one rank.
        take_weights: Function that receives the next weights; a follower calls it on the leader's command.
        check_weights: Function that checks the last weights once the engine can compute again; likewise.

    Attributes:
        engine: Engine that the generation calls; on a leader, the calls reach all ranks of the engine.
        follows: Whether this rank is a follower.
    """

    def __init__(
        self,
        engine: Any,
        link: RunLink | None,
        take_weights: Callable[[], object],
        check_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self.follows = link is not None and link.rank > 0
        self._leader = Leader(engine, link) if link is not None and not self.follows else None
        self._follower = (
            FollowerEngine(engine, link, take_weights, check_weights) if link is not None and self.follows else None
        )
        self.engine: RolloutBackend = self._leader or engine

    def begin_weights(self) -> None:
        """Commands the followers to receive the weights that this rank is about to receive."""
        if self._leader is not None:
            self._leader.begin_weights()

    def follow(self) -> None:
        """Repeats the leader's engine calls until the leader's call ends.

        A rank that is told to leave waits for the end, because the leader may still have to requeue prompts.
        """
        assert self._follower is not None
        Worker.before_leaving(lambda: None)
        self._follower.follow()
        Worker.before_leaving(None)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Runs the block as a call of the worker group on this rank; at the end, the leader releases the followers."""
        if self._link is not None:
            self._link.begin_call()
        try:
            yield
        except CallAborted:
            if self._leader is not None:
                with contextlib.suppress(RlhpcError):
                    self._leader.end()
            raise
        if self._leader is not None:
            self._leader.end()


class _HasEngineRank(Protocol):
    engine_rank: EngineRank


def leader_only(method: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a worker's method so that only the leader runs it; the followers repeat its engine calls and return {}."""

    @functools.wraps(method)
    def call(self: _HasEngineRank, *args: Any, **kwargs: Any) -> Any:
        with self.engine_rank.call():
            if not self.engine_rank.follows:
                return method(self, *args, **kwargs)
            self.engine_rank.follow()
            return {}

    return call


#: Pause in seconds between two checks for an announcement of new weights.
_IDLE_S = 0.002


class EngineWeights:
    """Engine of this rank, with the receiver of its weights.

    Args:
        worker: Worker of this rank.
        cfg: The run's configuration.
        prompts: Map with the names of the groups.

    Attributes:
        engine_rank: Role of this rank in its engine, leader or follower.
        version: Version of the weights; -1 before the first update.
    """

    def __init__(self, worker: Worker, cfg: GrpoConfig, prompts: PromptMap) -> None:
        self._worker = worker
        self._cfg = cfg
        weight_source = (prompts.actor_name, prompts.source_of(worker.rank))
        self._sender = "{}-{}".format(*weight_source)
        self._unchecked_probe: tuple[Probe, int] | None = None
        ranks_per_engine = ranks_of_engine(cfg)
        self.version = -1
        self._sync_s = 0.0
        self._transfers = TransferTotals()
        link = RunLink(worker, ranks_per_engine) if ranks_per_engine > 1 else None
        path, device = str(cfg.actor.model.model_path), worker_device(worker)
        self._engine = make_engine(
            awaiting_weights(cfg), model_path=path, device=device, seed=cfg.runner.seed, link=link
        )
        name = sync_of(cfg, prompts)
        sends_by_shards = sends_shards(name)
        self._takes_partial_updates = self._engine.takes_partial_updates and not sends_by_shards
        self._sync = make_sync(
            name, worker, weight_source,
            [(prompts.rollout_name, list(range(prompts.rollout_ranks)))], cfg.rollout.weight_delta,
            complete_updates=not self._takes_partial_updates,
        )  # fmt: skip
        if sends_by_shards:
            assert isinstance(self._sync, SendsShards)
            self._sync.want(self._engine.wants())
        self.engine_rank = EngineRank(self._engine, link, self._receive_as_follower, self.check_deferred_probe)

    def forget_version(self) -> None:
        """Resets the version to -1, so that the engine waits for new weights, and the seconds of receiving to 0."""
        self.version = -1
        self._sync_s = 0.0
        self._transfers.pop()

    def pop_sync_s(self) -> float:
        """Returns the seconds spent receiving weights since the last call."""
        duration_s, self._sync_s = self._sync_s, 0.0
        return duration_s

    def pop_transfers(self) -> dict[str, float]:
        """Returns the report of the versions received since the last call (`TransferTotals`)."""
        return self._transfers.pop()

    def forget(self) -> None:
        """Makes the receiver expect complete weights next, because the last update may have been lost."""
        self._sync.forget()

    def computes(self) -> dict[str, str]:
        """Returns the `dtype` in which the engine computes (`engine_precision`), and its `device` type."""
        device = worker_device(self._worker)
        return {"dtype": engine_precision(self._cfg, device), "device": device.type}

    def sample_probe(self, vocabulary: int, phase: int) -> list[ProbeSequence]:
        """Draws samples for short random prompts and a long one (`weight_sync.sample_probe`).

        The long prompt exceeds the attention window and a prefill chunk if prompts of the run can exceed them.
        """
        cfg, engine = self._cfg, self._engine
        prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens
        config = load_model_config(str(cfg.actor.model.model_path), cfg.actor.model.trust_remote_code)
        probe_length = long_text(prompt + response, _find_window(config), engine.chunk, engine.context)
        return sample_probe(
            self.engine_rank.engine, vocabulary, prompt, response, probe_length, phase, len(policies_of(cfg).names)
        )

    def take(self, idle_span: IdleSpan | None = None) -> bool:
        """Receives the next version of the weights if it was announced; returns whether it was announced.

        Args:
            idle_span: Span of the wait for the announcement, which ends with it.
        """
        try:
            probe: Probe | None = self._worker.notice(VERSIONS)
        except queue.Empty:
            return False
        if idle_span is not None:
            idle_span.end()
        start_time = time.perf_counter()
        with span("weights", "weights"):
            self.engine_rank.begin_weights()
            self._load_update(probe)
        self._sync_s += time.perf_counter() - start_time
        return True

    def await_version(self, version: int) -> None:
        """Receives weights until the engine has this version or a newer one.

        Args:
            version: Version of the actor's weights.

        Raises:
            DeadlineExceeded: The weights did not arrive within `runner.step_timeout_s`.
        """
        deadline, idle_span = (
            time.monotonic() + self._cfg.runner.step_timeout_s,
            IdleSpan(f"weights from {self._sender}"),
        )
        while self.version < version:
            if time.monotonic() > deadline:
                rank_name = f"{self._worker.group_name}-{self._worker.rank}"
                raise DeadlineExceeded(f"the weights of step {version} did not reach {rank_name}")
            if not self.take(idle_span):
                idle_span.begin()
                time.sleep(_IDLE_S)

    def await_update(self, version: int) -> None:
        """Receives the next update of this version, even if the engine has had weights of this version before.

        Raises:
            DeadlineExceeded: The weights did not arrive within `runner.step_timeout_s`.
        """
        self.version = min(self.version, version - 1)
        self.await_version(version)

    def _receive_as_follower(self) -> None:
        """Receives the version that the leader is receiving."""
        deadline = time.monotonic() + self._cfg.runner.step_timeout_s
        while not self.take():
            if time.monotonic() > deadline:
                rank_name = f"{self._worker.group_name}-{self._worker.rank}"
                leader_rank = first_of_engine(self._worker.rank, self._cfg)
                raise DeadlineExceeded(f"{rank_name} was not told of weights that rank {leader_rank} takes in")
            time.sleep(_IDLE_S)

    def _load_update(self, probe: Probe | None) -> None:
        engine, weight_update = self._engine, self._sync.receive()
        verification = UpdateVerification(weight_update, self._sender, digests_on_arrival=not weight_update.proven)
        if weight_update.proven and engine.takes_shards:
            engine.update_shards(weight_update.version, verification.complete_tensors())
        elif not self._takes_partial_updates:
            engine.update_weights(weight_update.version, verification.complete_tensors())
        else:
            engine.update_weights(weight_update.version, verification.tensors(), complete=weight_update.complete)
        verification.check(engine.held)
        self._transfers.add(weight_update.transfer)
        if probe is not None and engine.can_score:
            self._unchecked_probe = probe, weight_update.version
        if engine.can_compute:
            self.check_deferred_probe()
        self.version = weight_update.version

    def check_deferred_probe(self) -> None:
        """Compares the engine's log-probs with the probe of the last version, if that has not been done yet."""
        unchecked_probe, self._unchecked_probe = self._unchecked_probe, None
        if unchecked_probe is not None:
            (probe, version), device_and_dtype = unchecked_probe, self.computes()
            check_probe(
                self._engine, probe, version, self._cfg.rollout.probe_tolerance,
                {probe.dtype, device_and_dtype["dtype"]}, self._sender, device_and_dtype["device"],
            )  # fmt: skip


def _find_window(config: Any) -> int:
    """Returns the size in tokens of a model's sliding window or attention chunk; 0 if all layers attend to all tokens.

    Args:
        config: The model's transformers configuration.
    """
    text_config = config.get_text_config()
    return int(getattr(text_config, "sliding_window", None) or getattr(text_config, "attention_chunk_size", None) or 0)
