"""A rollout rank's engine, and the weights that it takes in between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from rlhpc.language.config import GrpoConfig
from rlhpc.language.engines.base import HasContext, ReadsInChunks, ScoresTexts, TakesShards, TellsWeights, taking_parts
from rlhpc.language.engines.ends import load_model_config
from rlhpc.language.engines.engine import engine_dtype
from rlhpc.language.engines.registry import awaiting_weights, make_engine
from rlhpc.language.policies import policies_of
from rlhpc.language.roles.mates import Part, RunLink, first_of_engine, ranks_of_engine
from rlhpc.language.roles.probe import Draw, Probe, check_probe, draw, long_text
from rlhpc.language.roles.prompts import VERSIONS, PromptMap
from rlhpc.language.roles.sending import sync_of
from rlhpc.language.tokens.model import window_of
from rlhpc.runs.device import own_device
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.worker import Worker
from rlhpc.weights import make_sync, sends_shards
from rlhpc.weights.reshard import SendsShards
from rlhpc.weights.verification import Proof

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
        self.part = Part(self._engine, link, self._follow)

    def forget(self) -> None:
        """The next weights are complete: the last ones may have been lost on their way."""
        self._sync.forget()

    def computes(self) -> dict[str, str]:
        """Returns the engine's `dtype` and the type of its `device`."""
        device = own_device(self._worker)
        return {"dtype": engine_dtype(self._cfg, device), "device": device.type}

    def draw(self, vocabulary: int, phase: int) -> list[Draw]:
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
            engine.update_shards(update.version, proof.whole())
        elif self._in_parts is None:
            engine.update_weights(update.version, proof.whole())
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
