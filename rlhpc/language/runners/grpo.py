"""ReasoningRunner: the loop of a language model's RL on verifiable tasks.

A step: rollout ranks answer the step's prompts and have the answers judged; actors take each group as soon as it is whole,
score it where scores are wanted, and train when all are there; new weights go out. With `algorithm.max_staleness` rollout
ranks work on later steps meanwhile, and take in new weights between two tokens.
"""

from __future__ import annotations

import math
from typing import Any

from rlhpc.algorithms.nonfinite import MOST_IN_A_ROW, nonfinite
from rlhpc.config.parallel import MeshSizes
from rlhpc.jobs.signals import StopRequest
from rlhpc.language.agents.registry import INLINE
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rollout.engine_group import ranks_of_engine
from rlhpc.language.rollout.group_builder import PREFIX as UNTRAINED
from rlhpc.language.rollout.group_builder import REASONS
from rlhpc.language.rollout.prompt_queue import PromptTracker
from rlhpc.language.rollout.validation import asked_of_all, validation_metrics
from rlhpc.language.runners.auxiliary_groups import Agents, Made, Others
from rlhpc.language.runners.engine_check import ROUNDS, Agreement
from rlhpc.language.scoring.groups import AGENT, CRITIC, REFERENCE, learning_groups
from rlhpc.language.training.prompt_dispatch import PromptMap, evaluation_phase
from rlhpc.metrics import PhaseTimers
from rlhpc.runs.replicas import Replicas
from rlhpc.runs.run_folder import RunFolder, note
from rlhpc.runs.runner import Runner
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.errors import NothingTrained
from rlhpc.runtime.rpc import Handle
from rlhpc.runtime.worker_group import WorkerGroup

#: What the rollout ranks sum up over their samples; missing from a step whose samples were all left out.
_SUMS = (
    "samples", "groups", "reward", "reward_squared", "accuracy", "length", "truncated", "varied", "failed", "stale",
    "max_length", "max_stale",
)  # fmt: skip


def _is_unjudged(total: dict[str, float]) -> bool:
    """Returns whether each sample of a step failed to be judged, or its agent failed."""
    samples, failed, agents = (total.get(name, 0.0) for name in ("samples", "failed", "agent_failed"))
    return failed + agents > 0 and failed >= samples


class ReasoningRunner(Runner[GrpoConfig]):
    """Trains a language model by RL.

    Args:
        cfg: Configuration.
        actor, rollout: Launched groups of `GrpoActor` and `LanguageRolloutWorker`.
        others: Launched groups that score, and the critic.
        run: The run's folder; by default what `runner.run_dir` and `runner.name` say.
        stop: Asked between steps whether to end early.

    Raises:
        ConfigError: Prompts cannot be shared out evenly over the ranks.
    """

    def __init__(
        self,
        cfg: GrpoConfig,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        *,
        run: RunFolder | None = None,
        stop: StopRequest | None = None,
        **others: WorkerGroup,
    ) -> None:
        self.critic = others.get(CRITIC)
        super().__init__(cfg, {"actor": actor, **({CRITIC: self.critic} if self.critic else {})}, run=run, stop=stop)
        self.actor, self.rollout = actor, rollout
        agents = others.pop(AGENT, None)
        self.others = Others(cfg, {name: group for name, group in others.items() if name != CRITIC})
        self.every = cfg.reference.update_interval if REFERENCE in others else 0
        self.learning = learning_groups(cfg)
        self.stateless = frozenset(self.others.groups) - self.learning | ({AGENT} if agents else set())
        if self.every:
            self.groups[REFERENCE] = others[REFERENCE]
        names = {"actor_name": actor.name, "rollout_name": rollout.name}
        scoring = {name: group.world_size for name, group in {**others}.items() if name not in self.others.rating}
        if self.critic:
            scoring[CRITIC] = MeshSizes.of(cfg.critic.parallel, self.critic.world_size, "critic.parallel").data
        self.prompts = PromptMap.from_config(
            cfg, rollout=rollout.world_size, actor=MeshSizes.of(cfg.actor.parallel, actor.world_size).data, scoring=scoring,
            rating={name: group.world_size for name, group in self.others.rating.items()}, **names,
        )  # fmt: skip
        self.agents = Agents(agents, self.prompts, self.timeout, lambda: self.max_recoveries)
        self.turns = cfg.actor.offload_in_rollout
        self.ahead = cfg.algorithm.max_staleness > 0
        self.samples = self._in_vain = self._unjudged = 0
        self.ledger = PromptTracker(self.prompts.prompts)
        self.replicas = Replicas(
            self.rollout, self._open_rollout, self._join, lambda: self.max_recoveries,
            "the others have made its prompts, and nothing else is lost", size=ranks_of_engine(cfg),
        )  # fmt: skip
        self._made: dict[int, Made] = {}
        self._reward = math.nan
        self._looks, self._dropped = "", 0
        self._devices: list[str] = []

    # -- start ----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Loads models, engines, datasets and judges on all ranks, and connects them.

        Where they share accelerators, one after the other: an engine measures how much memory is free while it starts, and
        takes what the actor allocates or frees meanwhile for its own.
        """
        opened = self._open_rollout(*self.rollout.present)
        loading = [opened]
        if self.turns:
            loading.pop().wait(self.timeout)
            self.rollout.offload().wait(self.timeout)
            self.others.open_engines(self.prompts, self.timeout)
        actor = self.actor.init_worker(self.folder.total, self.prompts)
        loading.append(actor)
        if self.critic:
            loading.append(self.critic.init_worker(self.folder.total, self.prompts))
        loading += self.others.open(self.prompts) + self.agents.open()
        for handle in loading:
            handle.wait(self.timeout)
        facts = opened.wait(self.timeout)
        self._looks, self._dropped = str(facts[0]["looks"]), int(facts[0]["dropped"])
        self._devices = [str(fact["device"]) for fact in (*facts, *actor.wait(self.timeout)) if fact]
        if self.turns:
            self.others.rest(self.timeout)
            if self.critic:
                self.critic.offload().wait(self.timeout)
        self._connect()

    def _open_rollout(self, *ranks: int) -> Handle:
        joined = all(rank >= self.rollout.world_size for rank in ranks)
        looks = self._looks if joined else ""  # it may see other files than those that the run was started with
        handle: Handle = self.rollout.execute_on(*ranks).init_worker(self.prompts, self.folder.end_step, looks)
        return handle

    def _join(self, *ranks: int) -> None:
        """Rollout ranks that have loaded an engine take part after the present step."""
        self.rollout.execute_on(*ranks).connect().wait(self.timeout)
        self.rollout.execute_on(*ranks).begin(self.step).wait(self.timeout)
        sent = self.actor.welcome(self.step, ranks), self.rollout.execute_on(*ranks).take_weights(self.step)
        for handle in sent:
            handle.wait(self.timeout)

    def _connect(self) -> None:
        for name, home in self.prompts.channels().items():
            Channel.create(name, home=home)
        self.ledger.open(self.step)
        self.agents.create_queue()
        groups = [self.actor, self.rollout, *([self.critic] if self.critic else []), *self.others.groups.values()]
        for handle in [*[group.connect() for group in groups], *self.agents.connect()]:
            handle.wait(self.timeout)

    def rebuild(self, gone: dict[str, list[int]]) -> None:
        """Starts again what has ended: all engines, or ranks of groups that score."""
        self._made.clear()
        if self.turns:  # it may have been at work when they ended
            self.actor.offload().wait(self.timeout)
        lost = {name: group for name, group in self.others.groups.items() if name in gone}
        if self.rollout.name in gone:
            lost[self.rollout.name] = self.rollout
        if AGENT in gone:
            lost[AGENT] = self.agents.group
        for group in lost.values():
            group.relaunch()
        for group in lost.values():
            group.wait_ready()
        for name, group in lost.items():
            if group is self.rollout:
                self._open_rollout(*self.rollout.present).wait(self.timeout)
                if self.turns:
                    self.rollout.offload().wait(self.timeout)
            else:
                group.execute_on(*gone[name]).init_worker(self.prompts).wait(self.timeout)
                if self.turns and name in self.others.scoring:
                    group.execute_on(*gone[name]).offload().wait(self.timeout)
        self._connect()
        for handle in (self.actor.forget_sent(), self.rollout.forget_sent()):  # one may have been on its way
            handle.wait(self.timeout)

    def unharmed(self, gone: dict[str, list[int]]) -> bool:
        """Whether only ranks that score were lost, and everyone who learns is where the last step left it: then that step's
        successor is made anew, from the same weights and seeds."""
        learning = [self.actor, *([self.critic] if self.critic else [])]
        if self.rollout.name in gone or self.turns or not {*gone} <= self.stateless:
            return False
        versions = [version for group in learning for version in group.trained_version().wait(self.timeout)]
        return set(versions) == {self.step}

    def begin(self) -> None:
        """Rollout ranks forget what was under way and get the present weights. If the roles take turns, the engines
        sleep meanwhile."""
        if self.ahead and self.step:
            note(
                "async generation: what was under way is made anew, so this resume loses nothing but is not bit for bit"
            )
        self._made.clear()
        if self.step >= self.folder.end_step:
            return
        self.rollout.begin(self.step).wait(self.timeout)
        self.agents.begin()
        self.ledger.open(self.step)
        self.replicas.begin()
        agreement = Agreement(self.cfg, self._devices, (self.actor.world_size, self.rollout.world_size))
        if not agreement.is_known:
            self._prove(agreement)
        self._sync(receive=not self.turns)

    def _sync(self, *, receive: bool, trial: bool = False, perturbed: bool = False) -> None:
        """Sends the present weights to the engines, which take them in now, or when they wake."""
        sync = [self.actor.sync_weights(self.step, self.replicas.ranks, trial=trial, perturbed=perturbed)]
        if receive and not self.turns:
            sync.append(self.replicas.of_step().take_weights(self.step))
        for handle in sync:
            handle.wait(self.timeout)
        if not self.turns:
            return
        self.actor.offload().wait(self.timeout)
        if receive:
            self.rollout.reload().wait(self.timeout)
            self.replicas.of_step().take_weights(self.step).wait(self.timeout)

    def _prove(self, agreement: Agreement) -> None:
        """Has each engine draw and the trainer score what it drew, with each of `agreement.ROUNDS` of weights.

        Raises:
            ConfigError: An engine does not compute what is trained.
        """
        largest = 0.0
        for phase, (perturbed, weights) in enumerate(ROUNDS):
            self._sync(receive=True, trial=True, perturbed=perturbed)
            drawn = self.replicas.of_step().draw(phase).wait(self.timeout)
            if self.turns:
                self.rollout.offload().wait(self.timeout)

            def score(texts: list[Any], perturbed: bool = perturbed) -> dict[str, Any]:
                scored: dict[str, Any] = self.actor.score_draws(texts, perturbed).wait(self.timeout)[0]
                return scored

            largest = max(largest, agreement.compare(weights, drawn, score))
            self.rollout.begin(self.step).wait(self.timeout)
        agreement.keep(largest)

    # -- a step ---------------------------------------------------------------------------------------------------

    def one_step(self) -> dict[str, float]:
        """Generation, judging, scoring, update, weights."""
        self.replicas.tend()
        self.agents.tend()
        step, timers = self.step + 1, PhaseTimers()
        last = step >= self.folder.end_step
        every = self.cfg.runner.val_check_interval
        due = every > 0 and step % every == 0
        waking = self.rollout.reload() if self.turns else None
        made = self._made.pop(step, None) or self._start(step)
        made.serve()
        if self.ahead and not last and not due:
            self._made[step + 1] = self._start(step + 1)
        received = self.actor.receive(step)
        if waking is not None:
            with timers("turns"):
                waking.wait(self.timeout)
            with timers("rollout"):
                made.wait(self.timeout)
            with timers("turns"):
                self.rollout.offload().wait(self.timeout)
            made.score(self.timeout)
            waking = self.actor.reload()
        update = self.actor.update(step)
        learnt = self.critic.update(step) if self.critic and not self.turns else None
        sync = [] if last and not due else [self.actor.sync_weights(step, self.replicas.ranks)]
        if waking is not None:
            with timers("turns"):
                waking.wait(self.timeout)
        with timers("rollout"):
            generated = made.wait(self.timeout)
            served = made.served(self.timeout)
        with timers("receive"):
            receipts = received.wait(self.timeout)
        with timers("update"):
            updated = update.wait(self.timeout)
            trained = updated[0]
            valued = learnt.wait(self.timeout)[0] if learnt else {}
        with timers("sync"):
            if sync and not self.turns and not self._made:
                sync.append(self.replicas.of_step().take_weights(step))
            for handle in sync:
                handle.wait(self.timeout)
        if self.turns and (sync or self.critic):
            with timers("turns"):
                self.actor.offload().wait(self.timeout)
        if self.turns and self.critic:
            with timers("turns"):
                self.critic.reload().wait(self.timeout)
            with timers("update"):
                valued = self.critic.update(step).wait(self.timeout)[0]
            with timers("turns"):
                self.critic.offload().wait(self.timeout)
        if self.every and step % self.every == 0:
            with timers("sync"):
                for handle in (self.actor.refresh_reference(step), self.groups[REFERENCE].take_weights()):
                    handle.wait(self.timeout)
        self.step = step
        row = self._rollout_metrics(generated)
        if due:
            with timers("eval"):
                row |= self._evaluate(step)
        times = ("update_s", "late_score_s", "proof_s", "cpu_s")
        row |= {f"train/{name}": value for name, value in trained.items() if name not in times}
        row |= {f"critic/{name}": value for name, value in valued.items() if name not in times}
        row |= served
        row |= timers.pop()
        score = max(receipt["score_s"] for receipt in receipts) + trained["late_score_s"]
        row |= {"time/score_s": score, "time/train_s": trained["update_s"]}
        row |= {
            f"time/{name}": sum(found.get(name, 0.0) for found in (*generated, *updated))
            for name in ("proof_s", "cpu_s")
        }
        row["time/train_tokens_per_s"] = trained["tokens"] * trained["updates"] / max(trained["update_s"], 1e-9)
        self._reward = row["train/reward"]
        return row

    def _start(self, step: int) -> Made:
        """Has a step's answers written, rated and, unless the roles take turns, scored by groups that do not learn."""
        self.ledger.give(min(step + self.cfg.algorithm.max_staleness, self.folder.end_step))
        return Made(
            step, self.ledger, self._generate, self.others, self.critic, self.agents, wait=self.turns, learning=self.learning
        )  # fmt: skip

    def _generate(self, step: int) -> Handle:
        handle: Handle = self.replicas.of_step().generate(step, len(self.replicas.firsts()))
        return handle

    def _evaluate(self, step: int) -> dict[str, float]:
        """The suites' metrics with the weights of a step, which have been sent."""
        if self.turns:
            self.rollout.reload()
        rated, run = self.others.rate(evaluation_phase(step)), self.agents.serve(evaluation_phase(step))
        rows = asked_of_all(
            self.replicas.firsts,
            lambda firsts: self.replicas.of_step().evaluate(step, firsts).wait(self.timeout),
            self.timeout,
        )
        metrics = validation_metrics(rows)
        self.others.end(evaluation_phase(step))
        self.agents.end(evaluation_phase(step))
        run.wait(self.timeout)
        for handle in rated.values():
            handle.wait(self.timeout)
        if self.turns:
            self.rollout.offload().wait(self.timeout)
        return metrics

    def _rollout_metrics(self, sums: list[dict[str, float]]) -> dict[str, float]:
        """Means over the step's samples, from the ranks' sums."""
        total: dict[str, float] = {}
        for found in sums:
            for name, value in found.items():
                larger = name.startswith("max_") or name in ("seconds", "busy_s", "sync_s")
                total[name] = max(total.get(name, 0.0), value) if larger else total.get(name, 0.0) + value
        left_out = total.get("nonfinite", 0.0)
        self._in_vain = 0 if self._trains_something(total) else self._in_vain + 1
        self._unjudged = self._unjudged + 1 if _is_unjudged(total) else 0
        if self._unjudged > self.cfg.reward.max_failed_steps or (not self._unjudged and self._in_vain >= MOST_IN_A_ROW):
            self._end_in_vain(left_out)
        total = dict.fromkeys(_SUMS, 0.0) | total
        n = max(total["samples"], 1.0)
        self.samples += int(total["samples"])
        mean = total["reward"] / n
        row = {
            "train/reward": mean,
            "train/reward_std": math.sqrt(max(total["reward_squared"] / n - mean**2, 0.0)),
            "train/accuracy": total["accuracy"] / n,
            "train/response_tokens": total["length"] / n,
            "train/response_tokens_max": total["max_length"],
            "train/truncated": total["truncated"] / n,
            "train/varied_groups": total["varied"] / max(total["groups"], 1.0),
            "rollout/refills": total["refills"],
            "rollout/failed_rewards": total["failed"],
            "rollout/staleness": total["stale"] / n,
            "rollout/staleness_max": total["max_stale"],
            "rollout/samples": float(self.samples),
            "rollout/step_samples": total["samples"],
        }
        if self._dropped:
            row["train/dropped_problems"] = float(self._dropped)
        if left_out:
            row["rollout/nonfinite"] = left_out
        if self.ahead:
            row |= {f"rollout/{name}": total.get(name, 0.0) for name in ("continued", "continued_tokens")}
        if self.cfg.agent.kind != INLINE:
            row["agent/failed"] = total.get("agent_failed", 0.0)
            row |= {name: value / n for name, value in total.items() if name.startswith("agent/")}
            row |= {UNTRAINED + name: total.get(UNTRAINED + name, 0.0) for name in REASONS}
        row |= {f"reward/{name[5:]}": value / n for name, value in total.items() if name.startswith("term/")}
        row["time/generate_s"], row["time/rollout_sync_s"] = total["busy_s"], total["sync_s"]
        row["time/tokens_per_s"] = total["tokens"] / max(total["seconds"], 1e-9)
        return row

    def _trains_something(self, total: dict[str, float]) -> bool:
        """Returns whether a sample of the step was judged and is trained on."""
        truncated = total.get("truncated", 0.0) if self.cfg.algorithm.overlong_filter else 0.0
        return max(total.get("failed", 0.0), truncated) < total.get("samples", 0.0)

    def _end_in_vain(self, left_out: float) -> None:
        """Ends a run that trains on nothing.

        Raises:
            NonFinite: Nothing was finite.
            NothingTrained: Nothing could be judged, or trained on, for another reason.
        """
        count = self._unjudged or self._in_vain
        steps = f"{count} steps in a row" if count > 1 else "in the whole step"
        if left_out:
            raise nonfinite(f"step {self.step}: no prompt brought anything finite, {steps}")
        failure = (
            self.ledger.failure or "all answers were truncated or left out (see rollout/ and untrained/ in the metrics)"
        )
        raise NothingTrained(
            f"step {self.step}: no sample could be judged and trained on, {steps}; the last failure: {failure}. Mend it (or "
            "allow such steps: reward.max_failed_steps), then go on from the newest checkpoint: rlhpc train <config> "
            "runner.resume_dir=auto"
        )

    # -- what the base class asks ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The counters that a resumed run continues from."""
        return {"samples": self.samples}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned when the checkpoint was made."""
        self.samples = int(state.get("samples", 0))

    def result(self) -> dict[str, Any]:
        """samples, reward (the last step's mean)."""
        return {"samples": self.samples, "reward": None if math.isnan(self._reward) else self._reward}

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Reward and rate."""
        return {"reward": row["train/reward"], "tokens_per_s": row["time/tokens_per_s"]}
