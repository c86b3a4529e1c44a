"""GRPO runner: RL of a language model on verifiable tasks.

In a step, the rollout ranks answer the prompts and have the answers scored. The actors receive each group when it is complete,
compute the columns that the algorithm needs, and train once all groups have arrived. Then they send the new weights. With
`algorithm.max_staleness` the rollout ranks already sample later steps, and receive new weights between two tokens.
"""

from __future__ import annotations

import math
from typing import Any

from rlhpc.algorithms.nonfinite import MAX_IN_A_ROW, nonfinite
from rlhpc.config.parallel import MeshSizes
from rlhpc.jobs.signals import StopRequest
from rlhpc.language.agents.registry import INLINE
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rollout.engine_group import ranks_of_engine
from rlhpc.language.rollout.group_builder import PREFIX as UNTRAINED
from rlhpc.language.rollout.group_builder import REASONS
from rlhpc.language.rollout.prompt_queue import PromptTracker, sum_metrics
from rlhpc.language.runners.engine_check import ROUNDS, Agreement, sampled_texts
from rlhpc.language.runners.grpo_loops import Agents, AuxiliaryGroups, GrpoGroups, make_loop
from rlhpc.language.scoring.groups import AGENT, CRITIC, REFERENCE, learning_groups
from rlhpc.language.training.prompt_dispatch import PromptMap, weight_shards
from rlhpc.metrics import PhaseTimers
from rlhpc.runs.replicas import Replicas
from rlhpc.runs.run_folder import RunFolder, note
from rlhpc.runs.runner import Runner
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.errors import NothingTrained
from rlhpc.runtime.rpc import Handle
from rlhpc.runtime.worker_group import WorkerGroup
from rlhpc.weights.device_sharing import STAY_ON_ACCELERATORS, weight_sources
from rlhpc.weights.receiver import transfer_facts, transfer_metrics

#: Names of sums over a step's samples; a missing sum counts as 0, for example if the step trains on no sample.
_SUMS = (
    "samples", "groups", "reward", "reward_squared", "accuracy", "length", "truncated", "varied", "failed", "stale",
    "max_length", "max_stale", "nonfinite", "agent_failed",
)  # fmt: skip


class ReasoningRunner(Runner[GrpoConfig]):
    """Runner that trains a language model by RL.

    Args:
        cfg: The run's configuration.
        actor, rollout: Launched groups of `GrpoActor` and `LanguageRolloutWorker`.
        optional_groups: Launched groups by name: scoring and rating groups, agents and critic.
        run: Folder of the run; by default the folder that `runner.run_dir` and `runner.name` set.
        stop: Request to end early, checked between steps.

    Raises:
        ConfigError: The prompts cannot be distributed evenly over the ranks.
    """

    def __init__(
        self,
        cfg: GrpoConfig,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        *,
        run: RunFolder | None = None,
        stop: StopRequest | None = None,
        **optional_groups: WorkerGroup,
    ) -> None:
        self.critic = optional_groups.get(CRITIC)
        super().__init__(cfg, {"actor": actor, **({CRITIC: self.critic} if self.critic else {})}, run=run, stop=stop)
        self.actor = actor
        self.rollout = rollout
        agents = optional_groups.pop(AGENT, None)
        self.auxiliary = AuxiliaryGroups(
            cfg, {name: group for name, group in optional_groups.items() if name != CRITIC}
        )
        self.stateless = frozenset(self.auxiliary.groups) - learning_groups(cfg) | ({AGENT} if agents else set())
        if REFERENCE in optional_groups and cfg.reference.update_interval:
            self.groups[REFERENCE] = optional_groups[REFERENCE]
        group_names = {"actor_name": actor.name, "rollout_name": rollout.name}
        scoring = {
            name: group.world_size for name, group in optional_groups.items() if name not in self.auxiliary.rating
        }
        if self.critic:
            scoring[CRITIC] = MeshSizes.from_config(cfg.critic.parallel, self.critic.world_size, "critic.parallel").data
        can_share = cfg.rollout.weight_sync in STAY_ON_ACCELERATORS and not cfg.algorithm.max_staleness
        source_ranks = weight_sources(actor.accelerators, rollout.accelerators) if can_share else ()
        self.prompts = PromptMap.from_config(
            cfg, rollout=rollout.world_size, scoring=scoring,
            actor=MeshSizes.from_config(cfg.actor.parallel, actor.world_size).data,
            rating={name: group.world_size for name, group in self.auxiliary.rating.items()}, sources=source_ranks,
            num_shards=weight_shards(cfg.actor, actor.world_size), **group_names,
        )  # fmt: skip
        self.agents = Agents(agents, self.prompts, self.timeout, lambda: self.max_recoveries)
        self.samples = self._num_untrained_steps = self._num_unscored_steps = 0
        self.tracker = PromptTracker(self.prompts.prompts)
        self.replicas = Replicas(
            self.rollout, self._open_rollout, self._join_ranks, lambda: self.max_recoveries,
            "the others have made its prompts, and nothing else is lost", size=ranks_of_engine(cfg),
        )  # fmt: skip
        reference = self.groups.get(REFERENCE)
        groups = GrpoGroups(
            actor, rollout, self.critic, reference, self.auxiliary, self.agents, self.replicas, self.tracker,
            shares_accelerators=bool(source_ranks),
        )  # fmt: skip
        self.loop = make_loop(cfg, groups, self.folder.end_step)
        self._mean_reward = math.nan
        self._inputs_digest = ""
        self._num_dropped = 0
        self._devices: list[str] = []

    # -- start ----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Loads models, engines, datasets and judges on all ranks, and connects them."""
        opening = self._open_rollout(*self.rollout.present)
        self.loop.await_engines(opening, self.prompts)
        actor = self.actor.init_worker(self.folder.total, self.prompts)
        loading = [opening, actor]
        if self.critic:
            loading.append(self.critic.init_worker(self.folder.total, self.prompts))
        loading += self.auxiliary.open(self.prompts) + self.agents.open()
        for load_call in loading:
            load_call.wait(self.timeout)
        rank_facts = opening.wait(self.timeout)
        self._inputs_digest = str(rank_facts[0]["digest"])
        self._num_dropped = int(rank_facts[0]["dropped"])
        self._devices = [
            str(rank_fact["device"]) for rank_fact in (*rank_facts, *actor.wait(self.timeout)) if rank_fact
        ]
        self.loop.offload_loaded()
        self._connect()

    def _open_rollout(self, *ranks: int) -> Handle:
        all_joined = all(rank >= self.rollout.world_size for rank in ranks)
        digest = self._inputs_digest if all_joined else ""  # joined ranks may read different files than the first ranks
        return self.rollout.execute_on(*ranks).init_worker(self.prompts, self.folder.end_step, digest)

    def _join_ranks(self, *ranks: int) -> None:
        """Connects rollout ranks that have loaded an engine, and sends them the current weights."""
        self.rollout.execute_on(*ranks).connect().wait(self.timeout)
        self.rollout.execute_on(*ranks).begin(self.step).wait(self.timeout)
        handles = self.actor.send_all_weights(self.step, ranks), self.rollout.execute_on(*ranks).take_weights(self.step)
        for join_call in handles:
            join_call.wait(self.timeout)

    def _connect(self) -> None:
        for name, home_rank in self.prompts.channels().items():
            Channel.create(name, home=home_rank)
        self.tracker.open(self.step)
        self.agents.create_queue()
        groups = [self.actor, self.rollout, *([self.critic] if self.critic else []), *self.auxiliary.groups.values()]
        for connect_call in [*[group.connect() for group in groups], *self.agents.connect()]:
            connect_call.wait(self.timeout)

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts all engines if one was lost, and the lost ranks of other groups; then reconnects all groups."""
        self.loop.reset()
        self.loop.offload_actor()
        restarted_groups = {name: group for name, group in self.auxiliary.groups.items() if name in lost_ranks}
        if self.rollout.name in lost_ranks:
            restarted_groups[self.rollout.name] = self.rollout
        if AGENT in lost_ranks:
            restarted_groups[AGENT] = self.agents.group
        for group in restarted_groups.values():
            group.relaunch()
        for group in restarted_groups.values():
            group.wait_ready()
        for name, group in restarted_groups.items():
            if group is self.rollout:
                self._open_rollout(*self.rollout.present).wait(self.timeout)
            else:
                group.execute_on(*lost_ranks[name]).init_worker(self.prompts).wait(self.timeout)
            self.loop.offload_restarted(name, group, lost_ranks[name])
        self._connect()
        for forget_call in (self.actor.forget_sent(), self.rollout.forget_sent()):  # an update may have been in flight
            forget_call.wait(self.timeout)

    def unharmed(self, lost_ranks: dict[str, list[int]]) -> bool:
        """Returns whether the step can be repeated from the same weights and seeds.

        Only stateless ranks may be lost, and all trainers must have the weights of the last step.
        """
        trained_groups = [self.actor, *([self.critic] if self.critic else [])]
        if self.rollout.name in lost_ranks or not self.loop.repeats_steps or not {*lost_ranks} <= self.stateless:
            return False
        versions = [version for group in trained_groups for version in group.trained_version().wait(self.timeout)]
        return set(versions) == {self.step}

    def begin(self) -> None:
        """Drops all groups in flight, opens the prompt queue, and sends the current weights.

        Before the weights are sent, engines and trainer are compared, unless an earlier run has passed this check.
        """
        if self.loop.resume_note and self.step:
            note(self.loop.resume_note)
        self.loop.reset()
        if self.step >= self.folder.end_step:
            return
        self.rollout.begin(self.step).wait(self.timeout)
        self.agents.begin()
        self.tracker.open(self.step)
        self.replicas.begin()
        agreement = Agreement(self.cfg, self._devices, (self.actor.world_size, self.rollout.world_size))
        if not agreement.is_known:
            self._check_agreement(agreement)
        self.loop.begin(self.step)

    def _check_agreement(self, agreement: Agreement) -> None:
        """Checks for all weights of `ROUNDS` that the trainer's log-probs agree with the log-probs of each engine.

        Raises:
            ConfigError: An engine disagrees with the trainer.
        """
        largest_difference = 0.0
        for phase, (is_perturbed, weights) in enumerate(ROUNDS):
            samples = self.loop.sample_probe(self.step, phase, is_perturbed=is_perturbed)
            scores = self.actor.score_probe_samples(sampled_texts(samples), is_perturbed).wait(self.timeout)[0]
            largest_difference = max(largest_difference, agreement.compare(weights, samples, scores))
            self.rollout.begin(self.step).wait(self.timeout)
        agreement.keep(largest_difference)

    # -- a step ---------------------------------------------------------------------------------------------------

    def one_step(self) -> dict[str, float]:
        """Runs a step of the loop, and the evaluation if one is due after it; returns the metrics."""
        self.replicas.update_presence()
        self.agents.update_presence()
        timers = PhaseTimers()
        step_results = self.loop.step(self.step + 1, timers)
        self.step += 1
        row = self._compute_rollout_metrics(step_results.generated)
        if self.loop.evaluates(self.step):
            with timers("eval"):
                row |= self.loop.evaluate(self.step)
        row |= step_results.metrics(timers.pop())
        self._mean_reward = row["train/reward"]
        return row

    def _compute_rollout_metrics(self, sums: list[dict[str, float]]) -> dict[str, float]:
        """Returns the rollout metrics of the step, mostly means over samples, from the sums of groups and ranks."""
        metric_totals = dict.fromkeys(_SUMS, 0.0) | sum_metrics(sums, ("seconds", "busy_s", "sync_s"))
        self._count_untrained_steps(metric_totals)
        num_samples = max(metric_totals["samples"], 1.0)
        self.samples += int(metric_totals["samples"])
        mean_reward = metric_totals["reward"] / num_samples
        row = {
            "train/reward": mean_reward,
            "train/reward_std": math.sqrt(max(metric_totals["reward_squared"] / num_samples - mean_reward**2, 0.0)),
            "train/accuracy": metric_totals["accuracy"] / num_samples,
            "train/response_tokens": metric_totals["length"] / num_samples,
            "train/response_tokens_max": metric_totals["max_length"],
            "train/truncated": metric_totals["truncated"] / num_samples,
            "train/varied_groups": metric_totals["varied"] / max(metric_totals["groups"], 1.0),
            "rollout/refills": metric_totals["refills"],
            "rollout/failed_rewards": metric_totals["failed"],
            "rollout/staleness": metric_totals["stale"] / num_samples,
            "rollout/staleness_max": metric_totals["max_stale"],
            "rollout/samples": float(self.samples),
            "rollout/step_samples": metric_totals["samples"],
        }
        if self._num_dropped:
            row["train/dropped_problems"] = float(self._num_dropped)
        if metric_totals["nonfinite"]:
            row["rollout/nonfinite"] = metric_totals["nonfinite"]
        row |= {f"rollout/{name}": metric_totals.get(name, 0.0) for name in self.loop.rollout_sums}
        if self.cfg.agent.kind != INLINE:
            row["agent/failed"] = metric_totals["agent_failed"]
            row |= {
                name: metric_total / num_samples
                for name, metric_total in metric_totals.items()
                if name.startswith("agent/")
            }
            row |= {UNTRAINED + name: metric_totals.get(UNTRAINED + name, 0.0) for name in REASONS}
        row |= {
            f"reward/{name.removeprefix('term/')}": metric_total / num_samples
            for name, metric_total in metric_totals.items()
            if name.startswith("term/")
        }
        row["time/generate_s"], row["time/rollout_sync_s"] = metric_totals["busy_s"], metric_totals["sync_s"]
        row["time/tokens_per_s"] = metric_totals["tokens"] / max(metric_totals["seconds"], 1e-9)
        return row | transfer_metrics(sums)

    def _count_untrained_steps(self, metric_totals: dict[str, float]) -> None:
        """Counts the consecutive steps without a trained sample or without a scored sample; ends a run with too many.

        Raises:
            NonFinite: There were too many such steps, with non-finite samples.
            NothingTrained: There were too many such steps, for another reason.
        """
        num_samples, num_failed = metric_totals["samples"], metric_totals["failed"]
        num_truncated = metric_totals["truncated"] if self.cfg.algorithm.overlong_filter else 0.0
        self._num_untrained_steps = 0 if max(num_failed, num_truncated) < num_samples else self._num_untrained_steps + 1
        is_unscored = num_failed + metric_totals["agent_failed"] > 0 and num_failed >= num_samples
        self._num_unscored_steps = self._num_unscored_steps + 1 if is_unscored else 0
        is_untrained = not is_unscored and self._num_untrained_steps >= MAX_IN_A_ROW
        if self._num_unscored_steps <= self.cfg.reward.max_failed_steps and not is_untrained:
            return
        num_steps = self._num_unscored_steps or self._num_untrained_steps
        steps = f"{num_steps} steps in a row" if num_steps > 1 else "in the whole step"
        if metric_totals["nonfinite"]:
            raise nonfinite(f"step {self.step}: no prompt brought anything finite, {steps}")
        failure = (
            self.tracker.failure
            or "all answers were truncated or left out (see rollout/ and untrained/ in the metrics)"
        )
        raise NothingTrained(
            f"step {self.step}: no sample could be judged and trained on, {steps}; the last failure: {failure}. Mend it (or "
            "allow such steps: reward.max_failed_steps), then go on from the newest checkpoint: rlhpc train <config> "
            "runner.resume_dir=auto"
        )

    # -- methods of the base class ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the counters that a resumed run continues from."""
        return {"samples": self.samples}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the counters that `state` returned for the checkpoint."""
        self.samples = int(state.get("samples", 0))

    def result(self) -> dict[str, Any]:
        """Returns the number of samples of the run, and the mean reward of the last step."""
        return {"samples": self.samples, "reward": None if math.isnan(self._mean_reward) else self._mean_reward}

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Returns the reward and the token rate of a step for `rlhpc status`."""
        return {
            "reward": row["train/reward"],
            "tokens_per_s": row["time/tokens_per_s"],
            **transfer_facts(row),
        }
