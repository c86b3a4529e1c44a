"""Evaluation suites of a run on demonstrations or preferences: engines answer them with the actor's weights.

The group `rollout` of such a run gives no training samples. Every `runner.val_check_interval` steps it receives weights and
answers its share of the problems, as in reinforcement learning (`Validation`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from rlhpc.config.typed import typed
from rlhpc.language.agents.registry import make_generation
from rlhpc.language.config.evaluation import answering_config
from rlhpc.language.config.run import SftConfig
from rlhpc.language.data import load_tokenizer
from rlhpc.language.engines.registry import forkable
from rlhpc.language.rollout.engine_group import EngineWeights
from rlhpc.language.rollout.validation import Row, Validation
from rlhpc.language.scoring.reward_aggregator import judging_here
from rlhpc.language.training.prompt_dispatch import PromptMap
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.language.training.weight_sync import ActorWeights
from rlhpc.language.workers.actor import Cfg, LanguageActor
from rlhpc.language.workers.agent import address_for_others
from rlhpc.runs.device import own_device, seed_process
from rlhpc.runtime.worker import Worker


class EvaluatedActor(LanguageActor[Cfg]):
    """Trainer that sends its weights to the engines that answer the suites."""

    backend: TokenTrainer

    def __init__(self, cfg: Cfg) -> None:
        super().__init__(cfg)
        self._weights: ActorWeights | None = None

    def open_weights(self, prompts: PromptMap) -> None:
        """Prepares to send weights; `prompts` names the groups."""
        self._weights = ActorWeights(self, answering_config(typed(SftConfig, self.cfg)), prompts, self.backend)

    def send_weights(self, version: int, ranks: Sequence[int]) -> None:
        """Sends the weights, as `version`, to these ranks of engines; all ranks call it."""
        assert self._weights is not None
        with self.backend.awake():
            self._weights.send(version, ranks, None)


class EvaluationWorker(Worker):
    """Engine that answers the suites of a supervised run and scores the answers. It has no state in checkpoints."""

    def __init__(self, cfg: SftConfig) -> None:
        super().__init__()
        self.cfg = answering_config(cfg)
        self._resources = ExitStack()

    @classmethod
    def forks(cls, cfg: SftConfig) -> bool:
        """Returns whether the rank of the engine may be forked."""
        return forkable(cfg.rollout.rollout_backend)

    def close(self) -> None:
        """Ends the engine with all processes that it has started, and the judges."""
        self._resources.close()

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads engine, tokenizer, suites and judges; `prompts` names the groups."""
        cfg, model = self.cfg, self.cfg.actor.model
        seed_process(cfg.runner.seed, "rollout", self.rank)
        self.tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
        self.weights = EngineWeights(self, cfg, prompts)
        engine = self.weights.engine_rank.engine
        self._resources.callback(engine.close)
        self.generation = make_generation(cfg, engine, self.tokenizer, address=address_for_others(cfg))
        self._resources.callback(self.generation.close)
        self.judges = judging_here(cfg, own_device(self))
        self._resources.callback(self.judges.close)
        self.validation = Validation(cfg, self.tokenizer)
        self.log.info("answers suites by %s on %s", cfg.rollout.rollout_backend, own_device(self))

    def evaluate(self, version: int, ranks: Sequence[int]) -> dict[str, list[Row]]:
        """Answers this rank's share of the suites with the weights of `version`, which are being sent.

        Args:
            version: Step of the actor.
            ranks: Ranks that take part.

        Returns:
            See `Validation.rows`.
        """
        self.weights.await_version(version)
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        return self.validation.rows(self.generation, self.judges, (list(ranks).index(self.rank), len(ranks)), deadline)
