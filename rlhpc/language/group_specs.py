"""Worker groups of language task types: worker classes, components, placement checks and failure policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhpc.config.typed import with_value
from rlhpc.language import checks, size_checks
from rlhpc.language.config.run import (
    GrpoConfig,
    LanguageConfig,
    RewardRunConfig,
    SftConfig,
    TrainedLanguageConfig,
)
from rlhpc.language.scoring.groups import (
    AGENT,
    CRITIC,
    group_worker_classes,
    learning_groups,
    placed_groups,
    scoring_groups,
)
from rlhpc.runs.task_type import (
    GroupSpec,
)
from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies

#: Configuration of a run that trains a language model.
Trained = TypeVar("Trained", bound=TrainedLanguageConfig)
#: Configuration of a run with a model that answers problems.
Cfg = TypeVar("Cfg", bound=LanguageConfig)
#: Seconds after which a run continues without a silent rank of the group `agent`.
_AGENT_LOST_S = 30.0
_PRELOAD = (
    "rlhpc.language.workers.agent",
    "rlhpc.language.workers.grpo_actor",
    "rlhpc.language.workers.supervised_actors",
    "rlhpc.language.workers.rollout",
    "rlhpc.language.workers.critic",
    "rlhpc.weights.transport",
    "transformers",
    "transformers.models.auto.modeling_auto",
)
#: Worker that answers the suites of a supervised run.
_EVALUATION = "rlhpc.language.workers.supervised_actors:EvaluationWorker"


class TrainedGroupSpec(GroupSpec[Trained]):
    """Worker groups of a run that trains a language model."""

    preload = _PRELOAD


class LanguageGroupSpec(TrainedGroupSpec[Cfg]):
    """Worker groups of a run with a model that answers problems, at least in evaluation."""

    def check_placement(self, cfg: Cfg, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Refuses prompts that cannot be distributed evenly, and processes with several accelerators."""
        checks.check_sizes(cfg, cfg.data.prompts_per_step, processes)
        checks.check_accelerators(cfg, accelerators)
        size_checks.check_models(cfg, accelerators)


class SftGroupSpec(LanguageGroupSpec[SftConfig]):
    """Worker groups of supervised fine-tuning."""

    def worker_classes_of(self, cfg: SftConfig) -> Mapping[str, str]:
        """Returns the worker classes, including the engines that answer the suites if the placement has a group `rollout`."""
        return {**self.worker_classes, **({"rollout": _EVALUATION} if "rollout" in placed_groups(cfg) else {})}

    def components(self, cfg: SftConfig) -> Sequence[str]:
        """Returns all names that a component may have."""
        return [*self.worker_classes, "rollout"]

    def check_placement(self, cfg: SftConfig, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Checks the placement of the groups, and refuses engines with several accelerators.

        Raises:
            PlacementError: A process of the group `rollout` has several accelerators.
        """
        super().check_placement(cfg, processes, accelerators)
        if accelerators.get("rollout", 0) > 1:
            raise PlacementError(
                f"cluster.component_placement.rollout gives each process {accelerators['rollout']} accelerators, and the "
                "engines that answer the suites of a supervised run compute on one: give it a process an accelerator"
            )


class RewardModelGroupSpec(TrainedGroupSpec[RewardRunConfig]):
    """Worker groups of reward model training."""

    def check_placement(
        self, cfg: RewardRunConfig, processes: Mapping[str, int], accelerators: Mapping[str, int]
    ) -> None:
        """Refuses rows that cannot be distributed evenly, and processes with several accelerators."""
        checks.check_sizes(cfg, cfg.data.prompts_per_step, processes)
        checks.check_accelerators(cfg, accelerators)


class GrpoGroupSpec(LanguageGroupSpec[GrpoConfig]):
    """Worker groups of RL: actor and engines, and the critic, agents and scoring groups that a configuration adds."""

    def worker_classes_of(self, cfg: GrpoConfig) -> Mapping[str, str]:
        """Returns actor, rollout, and the groups of a configuration that have a placement or need one."""
        return {**self.worker_classes, **group_worker_classes(cfg)}

    def components(self, cfg: GrpoConfig) -> Sequence[str]:
        """Returns all names that a component may have."""
        return [*self.worker_classes, AGENT, CRITIC, *scoring_groups(cfg)]

    def policies(self, cfg: GrpoConfig, *, max_recoveries: int = 0) -> SessionPolicies:
        """Returns the policies of the engines, the scoring groups and the agents' group.

        The ranks of scoring groups are stateless and do not communicate with each other. Engines are elastic unless actor and
        engines are offloaded alternately (`actor.offload_in_rollout`): other ranks take over the prompts of a lost engine. A
        step waits for the episodes of the agents' group. Other ranks can restart these episodes at little cost, so a silent
        rank of this group is given up early.
        """
        stateless = frozenset(group_worker_classes(cfg)) - learning_groups(cfg)
        ranks_per_engine = self.engine_size(cfg)
        groups = {
            name: GroupPolicy(restartable=True, independent_ranks=name in stateless)
            for name in frozenset(group_worker_classes(cfg)) - {CRITIC}
        }
        groups["rollout"] = GroupPolicy(
            restartable=True,
            replica_size=ranks_per_engine,
            min_ranks=None if cfg.actor.offload_in_rollout else ranks_per_engine,
        )
        if AGENT in placed_groups(cfg):
            groups[AGENT] = replace(groups.get(AGENT, GroupPolicy()), min_ranks=1, lease_s=_AGENT_LOST_S)
        return SessionPolicies(groups, max_recoveries)

    @staticmethod
    def engine_size(cfg: GrpoConfig) -> int:
        """Returns the number of ranks of an engine."""
        return cfg.rollout.parallel.tensor or 1

    def placed(self, cfg: GrpoConfig, replicas: Mapping[str, int]) -> GrpoConfig:
        """Returns the configuration with the number of ranks of an engine."""
        return with_value(cfg, "rollout.parallel.tensor", replicas["rollout"])

    def max_useful_ranks(self, cfg: GrpoConfig, num_started: Mapping[str, int]) -> dict[str, int]:
        """Returns the largest useful numbers of ranks: one engine per prompt, and one rank of agents per episode."""
        del num_started
        prompts = cfg.data.prompts_per_step
        agents = {AGENT: prompts * cfg.algorithm.group_size} if AGENT in placed_groups(cfg) else {}
        return {"rollout": prompts * self.engine_size(cfg), **agents}
