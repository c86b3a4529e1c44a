"""LanguageRolloutWorker: answers prompts, has the answers judged, and hands over each group as soon as it is whole.

One loop does everything on the main thread: between two steps of the engine it takes in new weights if there are any,
admits prompts, and collects what the judges (processes of their own) have said. So nothing waits for the slowest
sequence but the group it belongs to.

Staleness is bounded by admission: a prompt of step s starts once the weights are of version s − 1 − `max_staleness` or
newer, and weights never get older. With 0 that is the synchronous loop.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlhpc.algorithms.finite import nonfinite, skips
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.agents.judged import sample_of
from rlhpc.language.agents.registry import INLINE, make_generation
from rlhpc.language.algorithm.registry import make_algorithm
from rlhpc.language.config import GrpoConfig
from rlhpc.language.data import PromptSampler
from rlhpc.language.engines import Request, SamplingParams
from rlhpc.language.engines.base import Bounded
from rlhpc.language.engines.engine import choices_of
from rlhpc.language.engines.registry import forkable
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.roles import untrained
from rlhpc.language.roles.agent import agents_elsewhere
from rlhpc.language.roles.engine_weights import EngineWeights
from rlhpc.language.roles.facts import facts_of, not_finite, overlong, varied
from rlhpc.language.roles.groups import FINISHED, columns_of, group_of
from rlhpc.language.roles.mates import first_of_engine, led
from rlhpc.language.roles.opening import looks_of, open_prompts
from rlhpc.language.roles.prompts import (
    DELIVERED,
    GROUPS,
    WORK,
    PromptMap,
    channel_to,
    ratings_of,
    seed_of,
)
from rlhpc.language.roles.validation import Row, Validation
from rlhpc.language.roles.work import Begun, Slot, Takings
from rlhpc.language.scoring.asking import AskingGroup, Judging
from rlhpc.runs.device import own_device, seed_process
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.worker import Worker
from rlhpc.weights.cost import COST

#: Pause in seconds when neither engine nor judges had anything.
_IDLE_S = 0.002


class _Closes(Protocol):
    def close(self) -> None: ...


class LanguageRolloutWorker(Worker):
    """One generation engine with its judges, or a further rank of one (`mates`).

    No checkpoint keeps any of it: what it draws follows from seeds and weights.
    """

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._ended_with_it: list[_Closes] = []

    @classmethod
    def forks(cls, cfg: GrpoConfig) -> bool:
        """Whether ranks of the engine may be forked."""
        return forkable(cfg.rollout.rollout_backend)

    def close(self) -> None:
        """Ends the engine, with all that it has started, and the judges."""
        for part in self._ended_with_it:
            part.close()

    def init_worker(self, prompts: PromptMap, last_step: int, looks: str = "") -> dict[str, Any]:
        """Loads engine, tokenizer, dataset and judges.

        Args:
            prompts: Which rank answers which prompt.
            last_step: Step after which no prompt is admitted.
            looks: What model and data look like where the run was started (`looks_of`); "" for a rank that says so itself.

        Returns:
            Facts of model and dataset.

        Raises:
            ConfigError: They look otherwise from here.
        """
        cfg = self.cfg
        self.prompts, self.last_step, self.seed = prompts, last_step, cfg.runner.seed
        self.group_size, self.staleness = prompts.group_size, cfg.algorithm.max_staleness
        self.filter, self.refills = cfg.algorithm.filter_groups, cfg.algorithm.max_refills
        # Where steps do not overlap, any ranks make the same run, to the last bit: there, prompts are drawn again.
        self.hands_back = self.staleness > 0 and cfg.rollout.agent is None and cfg.agent.kind == INLINE
        first = first_of_engine(self.rank, cfg)
        seed_process(self.seed, "rollout", first)  # all ranks of an engine alike
        if self.rank > first:
            self._build(prompts)
            self.log.info("computes with %s-%d", self.group_name, first)
            return {}
        path = str(cfg.actor.model.model_path)
        self.tokenizer, self.encoder, self.dataset = open_prompts(cfg)
        own = looks_of(cfg, self.tokenizer, self.dataset)
        if looks and own != looks:
            raise ConfigError(
                f"on {self.node}, the model in {path} (actor.model.model_path) or the problems of data.train are others than "
                "those that the run was started with; have the same files there"
            )
        self.sampler = PromptSampler(len(self.dataset), prompts.prompts, self.seed)
        self.algorithm = make_algorithm(cfg)
        self.sampling = SamplingParams(
            max_new_tokens=cfg.rollout.max_new_tokens, temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k,
        )  # fmt: skip
        self._build(prompts)
        self._capacity = self.backend.capacity if isinstance(self.backend, Bounded) else sys.maxsize
        self._choices = choices_of(cfg, self.backend)
        self.generation = make_generation(cfg, self.backend, self.tokenizer, agents_elsewhere(self, cfg))
        self._ended_with_it.insert(0, self.generation)
        self.judges = Judging(cfg)
        self._ended_with_it.append(self.judges)
        self.every = cfg.runner.val_check_interval
        if self.every > 0:
            self.validation = Validation(cfg, self.tokenizer)
        COST.pop()
        self.log.info("answers with %s by %s on %s; %d problems", path, cfg.rollout.rollout_backend, own_device(self),
                      len(self.dataset))  # fmt: skip
        return {"problems": len(self.dataset), "looks": own}

    def _build(self, prompts: PromptMap) -> None:
        """Builds this rank's engine."""
        self.taken = EngineWeights(self, self.cfg, prompts)
        self.part = self.taken.part
        self.backend = self.part.engine
        self._ended_with_it = [self.backend]

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        if self.part.follows:
            return
        self._groups = self.connect_channel(GROUPS)
        self._work, self._delivered = self.connect_channel(WORK), self.connect_channel(DELIVERED)
        self._scoring = {name: self.connect_channel(channel_to(name)) for name in self.prompts.scoring}
        self._raters = {
            name: AskingGroup(
                self.connect_channel(channel_to(name)), partial(self.notice, ratings_of(name)), self.rank, ranks
            )
            for name, ranks in self.prompts.rating.items()
        }
        self.judges.connect(self._raters)

    @led
    def begin(self, step: int) -> None:
        """Starts after `step`; whatever is under way is dropped, weights come before anything else."""
        self.generation.abort()
        self.judges.drain()
        self._clear(step)

    def forget_sent(self) -> None:
        """The next weights are complete: the last ones may have been lost on their way."""
        self.taken.forget()

    @led
    def offload(self) -> None:
        """Gives the accelerator to the actor."""
        self.backend.offload()

    @led
    def reload(self) -> None:
        """Takes back what `offload` moved away."""
        self.backend.reload()

    def _clear(self, step: int) -> None:
        self.taken.version, self._until = -1, step
        self._slots: dict[tuple[int, int], Slot] = {}
        self.work = Takings(self.prompts.prompts, self.rank, self._work, self._delivered)
        self._of_request: dict[int, tuple[tuple[int, int], int]] = {}
        self._request, self._synced = 0, 0.0
        self.before_leaving(None)

    # -- the loop -------------------------------------------------------------------------------------------------

    @led
    def generate(self, step: int, ranks: int) -> dict[str, float]:
        """Takes prompts of `step` and answers them until none is left; with `max_staleness`, of later steps too meanwhile.

        Args:
            step: Of the run.
            ranks: How many engines take part.

        Returns:
            The seconds that the call took, those that the engine worked and that weights were taken in, and tokens; and what
            `Cost.pop` says.
        """
        begun, busy, tokens = time.perf_counter(), 0.0, 0
        deadline = begun + self.cfg.runner.step_timeout_s
        self._until = self.last_step
        if self.every > 0:  # nothing is under way when the weights of a step are evaluated
            self._until = min(self.last_step, -(-step // self.every) * self.every)
        self.work.begin(step, ranks)
        while self.work.held(step) or not self.work.exhausted(step):
            if time.perf_counter() > deadline:
                raise DeadlineExceeded(
                    f"step {step}: {self.work.held(step)} groups of {self.group_name}-{self.rank} were not whole "
                    f"after runner.step_timeout_s ({self.cfg.runner.step_timeout_s:g} s){self._waits_for()}"
                )
            if self.told_to_leave:
                self._hand_back()
                break
            self._take_weights()
            self._admit(step)
            worked = False
            if self.generation.unfinished():
                start = time.perf_counter()
                ended = self.generation.step()
                busy += time.perf_counter() - start
                for episode in ended:
                    tokens += self._judge(episode)
                worked = True
            for request, scored in self.judges.poll():
                self._scored(request, scored)
                worked = True
            if not worked:
                time.sleep(_IDLE_S)
        stats = {"seconds": time.perf_counter() - begun, "busy_s": busy, "sync_s": self._synced, "tokens": tokens}
        stats |= COST.pop()
        self._synced = 0.0
        if not self._slots:
            self.before_leaving(None)
        return stats

    @led
    def evaluate(self, step: int, ranks: Sequence[int]) -> dict[str, list[Row]]:
        """Answers this rank's share of the evaluation's problems with the weights of `step`, which are on their way.

        Args:
            step: Of the run.
            ranks: Who takes part: the first ranks of engines.

        Returns:
            See `Validation.rows`.
        """
        self._await_weights(step)
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        share = list(ranks).index(self.rank), len(ranks)
        return self.validation.rows(self.generation, self.judges, share, deadline)

    @led
    def take_weights(self, version: int) -> None:
        """Takes in the weights of a version, or newer ones, as the actor writes them."""
        self._await_weights(version)

    def _await_weights(self, version: int) -> None:
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        while self.taken.version < version:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the weights of step {version} did not reach {self.group_name}-{self.rank}")
            if not self._take_weights():
                time.sleep(_IDLE_S)

    def _waits_for(self) -> str:
        waits = self.judges.waits_for()
        return "; it waits for " + ", ".join(f"{n} ratings of {name}" for name, n in waits.items()) if waits else ""

    def _take_weights(self) -> bool:
        """Takes in a version, if one has been announced."""
        start = time.perf_counter()
        took = self.taken.take()
        if took:
            self._synced += time.perf_counter() - start
        return took

    def _admit(self, first: int) -> None:
        if self.taken.version < 0:
            return
        for step in range(first, min(self.taken.version + 1 + self.staleness, self._until) + 1):
            while self.backend.unfinished() < self._capacity:
                taken = self.work.take(step)
                if taken is None:
                    break
                if isinstance(taken, Begun):
                    self._go_on(step, taken)
                else:
                    self._start(step, taken, 0)

    def _start(self, step: int, position: int, attempt: int, before: Counter[str] | None = None) -> None:
        slot = self._slot(step, position, attempt)
        slot.untrained.update(before or {})
        self.generation.add(self._requests(slot), slot.prompt)

    def _slot(self, step: int, position: int, attempt: int) -> Slot:
        index = self.sampler.at((step - 1) * self.prompts.prompts + position)
        if attempt:
            draw = np.random.default_rng(seed_of(self.seed, step, position, attempt, -1))
            index = int(draw.integers(len(self.dataset)))
        prompt = self.dataset[index]
        return Slot(step, position, attempt, prompt, tuple(self.encoder.encode(prompt) or ()))

    def _requests(self, slot: Slot) -> list[Request]:
        """A request for each member of the group; from now on it is under way."""
        self._slots[slot.step, slot.position] = slot
        if self.hands_back:
            self.before_leaving(self._hand_back)
        requests = []
        for member in range(self.group_size):
            self._request += 1
            self._of_request[self._request] = ((slot.step, slot.position), member)
            seed = seed_of(self.seed, slot.step, slot.position, slot.attempt, member)
            requests.append(Request(self._request, slot.prompt_ids, self.sampling, seed))
        return requests

    def _go_on(self, step: int, begun: Begun) -> None:
        """Takes over what another rank had to leave. Finished answers are judged anew: some raters look at whole groups."""
        slot = self._slot(step, begun.position, begun.attempt)
        for member, (request, answer) in enumerate(zip(self._requests(slot), begun.answers, strict=True)):
            if answer.token_ids:
                slot.drawn[member] = len(answer.token_ids)
            self.generation.resume(request, answer, slot.prompt)

    def _hand_back(self) -> None:
        """Gives back all that is under way, with what there is of it, for other ranks to go on with."""
        stopped = {self._of_request[episode.id]: episode for episode in self.generation.abort()}
        for place, slot in self._slots.items():
            episodes = [slot.episodes.get(m) or stopped[place, m] for m in range(self.group_size)]
            self.work.hand_back(slot.step, slot.begun(episodes))
        self.log.info("leaves, and hands back %d prompts with what there is of the answers", len(self._slots))
        self._slots.clear()
        self.before_leaving(None)

    def _judge(self, episode: Episode) -> int:
        """Has an answer judged; returns how many of its tokens were drawn here."""
        place, member = self._of_request[episode.id]
        slot = self._slots[place]
        slot.episodes[member] = episode
        sample = sample_of(slot.prompt, episode, self.tokenizer, finished=episode.finish_reason in FINISHED)
        self.judges.submit(episode.id, sample, (*place, slot.attempt), self.group_size)
        return sample.tokens - slot.drawn.get(member, 0)

    def _scored(self, request: int, scored: Scored) -> None:
        place, member = self._of_request.pop(request)
        slot = self._slots[place]
        slot.scores[member] = scored
        if len(slot.scores) == self.group_size:
            self._whole(slot)

    def _whole(self, slot: Slot) -> None:
        """Handles a group that is whole: hands it over, or asks another prompt in its place."""
        oldest = slot.step - 1 - self.staleness
        members = untrained.members(slot, oldest)
        lacking = len(members) < min(2, self.group_size)
        if lacking:
            if slot.attempt < self.refills:
                self._start(slot.step, slot.position, slot.attempt + 1, untrained.refilled(slot))
                return
            members = [0]
        episodes = [slot.episodes[member] for member in members]
        scores = [slot.scores[member] for member in members]
        rewards = np.asarray([score.total for score in scores], np.float32)
        rewards += overlong(episodes, self.sampling.max_new_tokens, self.cfg.algorithm.overlong_buffer)
        if fault := not_finite(rewards, episodes, scores):
            if not skips(self.cfg):
                asked = f"prompt {slot.position} ({slot.prompt.question!r:.80})"
                raise nonfinite(f"step {slot.step}, {asked}, {self.group_name}-{self.rank}: {fault}")
            rewards = np.zeros_like(rewards)  # equal ones: with algorithm.filter_groups another prompt takes its place
        if self.filter and not lacking and not varied(rewards) and slot.attempt < self.refills:
            self._start(slot.step, slot.position, slot.attempt + 1, untrained.refilled(slot))
            return
        why = "nonfinite" if fault else "alone" if lacking else ""
        untrained.settle(slot, oldest, cut=self.cfg.algorithm.overlong_filter, why=why)
        del self._slots[slot.step, slot.position]
        made = [
            columns_of(self.algorithm, s, score) for e, score in zip(episodes, scores, strict=True) for s in e.samples
        ]
        group = group_of(
            slot.step, slot.position, dict(zip(members, episodes, strict=True)), rewards, made,
            trains=not fault and not lacking, size=self.group_size,
            choices=self._choices,
            agent_weight=sum(term.weight for term in self.cfg.reward.terms if term.name.lower() == "agent"),
        )  # fmt: skip
        # What is safe there is not lost with this process.
        self._groups.entrust(group.pack(), key=str(self.prompts.actor_of(slot.position)))
        for name, channel in self._scoring.items():
            channel.entrust(group.bare(), key=str(self.prompts.scorer_of(name, slot.position)))
        left_out = {"refills": float(slot.attempt), **({"nonfinite": float(self.group_size)} if fault else {})}
        facts = left_out if fault or lacking else facts_of(slot.step, episodes, scores, rewards, slot.attempt)
        self.work.deliver(slot.step, slot.position, facts | untrained.facts(slot))
