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

from rlhpc.language.agents.episodes import Episode, sample_of, tokens_of
from rlhpc.language.agents.registry import INLINE, make_generation
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data import PromptSampler
from rlhpc.language.engines import Request, SamplingParams
from rlhpc.language.engines.base import BoundedEngine
from rlhpc.language.engines.common import choices_of
from rlhpc.language.engines.registry import forkable
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout import group_builder as untrained
from rlhpc.language.rollout.engine_group import EngineWeights, first_of_engine, led
from rlhpc.language.rollout.group_builder import GroupMaker
from rlhpc.language.rollout.pending_group import Late, PartialGroup, PendingGroup
from rlhpc.language.rollout.preflight import open_prompts, require_looks
from rlhpc.language.rollout.prompt_queue import PromptLeases
from rlhpc.language.rollout.sample_group import FINISHED
from rlhpc.language.rollout.validation import Row, Validation
from rlhpc.language.scoring.reward_aggregator import AskingGroup, Judging
from rlhpc.language.training.prompt_dispatch import DELIVERED, GROUPS, WORK, PromptMap, channel_to, ratings_of, seed_of
from rlhpc.language.workers.agent import ScorersDoor, address_for_others, agents_elsewhere
from rlhpc.runs.device import own_device, seed_process
from rlhpc.runtime.devices import device_name
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.worker import Worker
from rlhpc.weights.verification import COST

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
        self.refills = cfg.algorithm.max_refills
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
        own = require_looks(cfg, self.tokenizer, self.dataset, looks, self.node)
        self.sampler = PromptSampler(len(self.dataset), prompts.prompts, self.seed)
        self.sampling = SamplingParams(
            max_new_tokens=cfg.rollout.max_new_tokens, temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k,
        )  # fmt: skip
        self._build(prompts)
        self._capacity = self.backend.capacity if isinstance(self.backend, BoundedEngine) else sys.maxsize
        where = f"{self.group_name}-{self.rank}"
        self.groups_made = GroupMaker(cfg, make_algorithm(cfg), choices_of(cfg, self.backend), where)
        address = address_for_others(cfg)
        self.generation = make_generation(cfg, self.backend, self.tokenizer, agents_elsewhere(self, cfg), address)
        self._ended_with_it[:0] = [ScorersDoor(self, self.generation), self.generation]
        self.judges = Judging(cfg)
        self._ended_with_it.append(self.judges)
        self.every = cfg.runner.val_check_interval
        if self.every > 0:
            self.validation = Validation(cfg, self.tokenizer)
        COST.pop()
        self.log.info("answers with %s by %s on %s; %d problems", path, cfg.rollout.rollout_backend, own_device(self),
                      len(self.dataset))  # fmt: skip
        return {
            "problems": len(self.dataset),
            "looks": own,
            "device": device_name(own_device(self)),
            "dropped": self.dataset.dropped,
        }

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
        self._slots: dict[tuple[int, int], PendingGroup] = {}
        self._asked, self._late = Counter[tuple[int, int]](), Late(self.cfg.agent.feedback_ahead)
        self.work = PromptLeases(self.prompts.prompts, self.rank, self._work, self._delivered)
        self._of_request: dict[int, tuple[PendingGroup, int]] = {}
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
            for before, episode in self.generation.delayed_rewards():
                self._paid(before, episode)
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
    def draw(self, phase: int) -> dict[str, Any]:
        """Has the engine draw from prompts of random tokens, for the trainer to score (`probe.draw`).

        Args:
            phase: Of the probe; prompts differ by it.

        Returns:
            `draws`; and `dtype` and `device`, which the engine computes in and on.
        """
        return {"draws": self.taken.draw(len(self.tokenizer), phase), **self.taken.computes()}

    @led
    def take_weights(self, version: int) -> None:
        """Takes in the weights of a version, or newer ones, as the actor writes them."""
        self._await_weights(version)

    def _await_weights(self, version: int) -> None:
        self.taken.await_version(version, self._take_weights)

    def _waits_for(self) -> str:
        waits = [f"{n} ratings of {name}" for name, n in self.judges.waits_for().items()]
        if unpaid := self._late.waiting():
            waits.append(f"{unpaid} rewards that come later (agent.feedback_timeout_s)")
        return "; it waits for " + ", ".join(waits) if waits else ""

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
                if isinstance(taken, PartialGroup):
                    self._go_on(step, taken)
                else:
                    self._start((step, taken))

    def _start(self, place: tuple[int, int], vain: int = 0, before: Counter[str] | None = None) -> None:
        """Begins a group in a place, or gives that to one whose rewards have come meanwhile."""
        before = before or Counter()
        while (slot := self._late.next()) is not None:
            slot.step, slot.position = place
            if not self.groups_made.lacks(slot):
                break
            before = before + untrained.refilled(slot)  # by now it is too old
        else:
            slot = self._slot(*place, self._asked[place])
        slot.untrained.update(before)
        slot.vain = vain
        if slot.scores:
            self._slots[place] = slot
            self._whole(slot)
            return
        self._asked[place] += 1
        self.generation.add(self._requests(slot), slot.prompt)

    def _slot(self, step: int, position: int, attempt: int) -> PendingGroup:
        index = self.sampler.at((step - 1) * self.prompts.prompts + position)
        if attempt:
            draw = np.random.default_rng(seed_of(self.seed, step, position, attempt, -1))
            index = int(draw.integers(len(self.dataset)))
        prompt = self.dataset[index]
        ids, at = self.encoder.encode(prompt) or ((), ())
        return PendingGroup(step, position, attempt, prompt, tuple(ids), seen=self.encoder.prompt_images(prompt, at))

    def _requests(self, slot: PendingGroup) -> list[Request]:
        """A request for each member of the group; from now on it is under way."""
        self._slots[slot.place] = slot
        if self.hands_back:
            self.before_leaving(self._hand_back)
        requests = []
        for member in range(self.group_size):
            self._request += 1
            self._of_request[self._request] = slot, member
            seed = seed_of(self.seed, slot.step, slot.position, slot.attempt, member)
            requests.append(Request(self._request, slot.prompt_ids, self.sampling, seed, slot.seen))
        return requests

    def _go_on(self, step: int, begun: PartialGroup) -> None:
        """Takes over what another rank had to leave. Finished answers are judged anew: some raters look at whole groups."""
        slot = self._slot(step, begun.position, begun.attempt)
        slot.vain, self._asked[slot.place] = begun.attempt, begun.attempt + 1
        for member, (request, answer) in enumerate(zip(self._requests(slot), begun.answers, strict=True)):
            if answer.token_ids:
                slot.drawn[member] = len(answer.token_ids)
            self.generation.resume(request, answer, slot.prompt)

    def _hand_back(self) -> None:
        """Gives back all that is under way, with what there is of it, for other ranks to go on with."""
        stopped = {episode.id: episode for episode in self.generation.abort()}
        ids = {(slot.place, member): number for number, (slot, member) in self._of_request.items()}
        for place, slot in self._slots.items():
            episodes = [slot.episodes.get(m) or stopped[ids[place, m]] for m in range(self.group_size)]
            self.work.hand_back(slot.step, slot.begun(episodes))
        self.log.info("leaves, and hands back %d prompts with what there is of the answers", len(self._slots))
        self._slots.clear()
        self.before_leaving(None)

    def _judge(self, episode: Episode) -> int:
        """Has an answer judged; returns how many of its tokens were drawn here."""
        slot, member = self._of_request[episode.id]
        slot.episodes[member] = episode
        if episode.later:
            self._late.expects(slot, member)
        else:
            self._submit(slot, episode)
        self._without(slot)
        return tokens_of(episode) - slot.drawn.get(member, 0)

    def _submit(self, slot: PendingGroup, episode: Episode) -> None:
        sample = sample_of(slot.prompt, episode, self.tokenizer, finished=episode.finish_reason in FINISHED)
        self.judges.submit(episode.id, sample, slot.first, self.group_size)

    def _paid(self, before: Episode, episode: Episode) -> None:
        """An episode has the reward that was to come later."""
        if (slot := self._late.paid(before, episode)) is not None:
            self._submit(slot, episode)

    def _without(self, slot: PendingGroup) -> None:
        """If a group lacks nothing but rewards that come later, another one takes its place."""
        if len(slot.episodes) == self.group_size and self._late.waits(slot) and self._late.steps_aside(slot):
            self._start(slot.place, slot.vain)

    def _scored(self, request: int, scored: Scored) -> None:
        slot, member = self._of_request.pop(request)
        slot.scores[member] = scored
        if len(slot.scores) < self.group_size:
            return
        if not self._late.whole(slot):
            self._whole(slot)
            return
        for waiting in list(self._slots.values()):
            self._without(waiting)

    def _whole(self, slot: PendingGroup) -> None:
        """Handles a group that is whole: hands it over, or asks another prompt in its place."""
        judged = self.groups_made.judged(slot, may_refill=slot.vain < self.refills)
        if judged is None:
            self._start(slot.place, slot.vain + 1, untrained.refilled(slot))
            return
        del self._slots[slot.place], self._asked[slot.place]
        group, facts = self.groups_made.group(slot, judged)
        # What is safe there is not lost with this process.
        self._groups.entrust(group.pack(), key=str(self.prompts.actor_of(slot.position)))
        for name, channel in self._scoring.items():
            channel.entrust(group.bare(), key=str(self.prompts.scorer_of(name, slot.position)))
        self.work.deliver(slot.step, slot.position, facts, untrained.failure_of(slot))
