"""On-policy distillation: the model writes, and a teacher says of each token what it would have written in its place.

Everywhere the states are those that the model itself reaches, so what it learns is what to do where it really gets to
(Agarwal et al., "On-Policy Distillation of Language Models", 2023). What counts at a token is the divergence there; what it
does to later tokens does not, as with a discount of 0.

Mode `sampled` knows one number of the teacher's for each token: the log-prob q that it gives to what the model drew with
log-prob p. It takes q − p, as a constant, for that token's advantage: E[(q − p) ∇p] = −∇KL(model ‖ teacher). To minimize an
estimate of that KL would be wrong: its gradient leaves out that what is drawn depends on the weights. The gradient of
k1 = p − q is ∇p alone, whose expectation is 0, whatever the teacher says. That of k3 = exp(q − p) − 1 − (q − p) is
(1 − exp(q − p)) ∇p, whose expectation is the gradient of the other KL(teacher ‖ model), by ratios that have no bound.

The modes `topk` and `full` know a distribution, and their gradient is exact at each state: no sampling of the token, so less
noise, for more to compute and, in mode topk, to send.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.language.algorithms.base import ROLLOUT_LOGPROBS, VALUES, Reduce, Whole
from rlhpc.language.algorithms.policy_gradient import OLD, PolicyGradient
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.divergence import FLOOR, FullDivergence, TopDivergence
from rlhpc.language.models.logprobs import RowReader, TokenScores, logit_rows
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import TEACHER, placed, scoring_groups
from rlhpc.language.scoring.registry import Column, LogitReader, Scorer, ScoringGroup

#: The teacher's log-probs of the drawn tokens; or of its most likely ones, as `top_logprobs` gives them.
TEACHER_LOGPROBS, TEACHER_TOP = "teacher_logprobs", "teacher_top_logprobs"
DIVERGENCE = "teacher_divergence"


class BesideActor(Scorer):
    """The teacher of the section of that name, on an actor rank."""

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup | None = None) -> None:
        from rlhpc.language.scoring.registry import make_scorer

        group = scoring_groups(cfg)[TEACHER]
        super().__init__(cfg, device, group)
        self.scorer = make_scorer(cfg, device, group)
        self.packed = self.scorer.packed

    def score(self, batch: TokenBatch) -> Tensor:
        """See `Scorer.score`."""
        found: Tensor = self.scorer.score(batch)
        return found

    def offload(self) -> None:
        """See `Scorer.offload`."""
        self.scorer.offload()

    def reload(self) -> None:
        """See `Scorer.reload`."""
        self.scorer.reload()


class FromTop(LogitReader):
    """The divergence from what the teacher said of its most likely tokens."""

    packed = True

    def rows(self, batch: TokenBatch) -> RowReader:
        """See `LogitReader.rows`."""
        told = batch.columns[TEACHER_TOP][batch.predictors()[0]]
        if not batch.tokens:  # then it is not known of how many tokens the teacher would tell
            told = told.new_zeros(0, 1, 2)
        return TopDivergence(told, self.cfg.rollout.temperature, self.cfg.algorithm.distillation.beta)


class FromAll(LogitReader):
    """The divergence from the teacher's whole distribution. The teacher, beside the model, reads each micro-batch as it is
    trained; its hidden states are kept until the backward pass or, where its head cannot be asked, its logits."""

    def __init__(self, cfg: GrpoConfig, device: torch.device) -> None:
        super().__init__(cfg, device)
        self.teacher = BesideActor(cfg, device)
        self.packed = self.teacher.packed

    def rows(self, batch: TokenBatch) -> RowReader:
        """See `LogitReader.rows`."""
        theirs = logit_rows(self.teacher.scorer.model, batch)
        return FullDivergence(theirs, self.cfg.rollout.temperature, self.cfg.algorithm.distillation.beta)

    def offload(self) -> None:
        """See `LogitReader.offload`."""
        self.teacher.offload()

    def reload(self) -> None:
        """See `LogitReader.reload`."""
        self.teacher.reload()


class Distillation(PolicyGradient):
    """Distillation alone or, with `task_reward_coef`, beside what the reward asks for: see `algorithm.distillation`.

    In mode sampled the teacher's part is added to the advantages, so the policy loss clips it and corrects for the age of the
    policy that drew a token; in the others it is added to the loss. KL to a reference and entropy bonus are as ever.
    """

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__(cfg)
        options = cfg.algorithm.distillation
        self.sampled = options.mode == "sampled"
        self.coef, self.reward_coef = options.coef, options.task_reward_coef
        if not self.reward_coef and self.critic:
            self.critic = self.own_values = False
            self.columns = [column for column in self.columns if column.name != VALUES]
        by = TEACHER if TEACHER in placed(cfg) else BesideActor
        if options.mode == "full":
            self.reader = FromAll
        else:
            self.columns = [*self.columns, Column(TEACHER_LOGPROBS if self.sampled else TEACHER_TOP, by)]
            self.reader = None if self.sampled else FromTop
        if self.sampled:  # an estimate from tokens holds for the weights that drew them
            self.at_first = self.at_first | {DIVERGENCE}
        in_loss = self.kl_coef and cfg.algorithm.kl_in == "loss"
        self._more = bool(self.sampled or self.reward_coef or in_loss or cfg.algorithm.entropy_coef)

    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        """See `LanguageAlgorithm.advantages`."""
        advantages = torch.zeros(batch.tokens, dtype=batch.reward.dtype)
        if self.reward_coef:
            advantages = self.reward_coef * super().advantages(batch, all_reduce)
        if self.sampled:
            old = batch.columns[OLD if self.cfg.algorithm.recompute_logprobs else ROLLOUT_LOGPROBS]
            gap = batch.columns[TEACHER_LOGPROBS].clamp_min(FLOOR) - old
            advantages = advantages + self.coef * torch.where(batch.mask, gap, 0.0)
        return advantages

    def loss(self, scores: TokenScores, batch: TokenBatch, whole: Whole) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LanguageAlgorithm.loss`."""
        # Where the distillation is alone, the log-probs are for metrics, and need no gradient of the size of the logits.
        with torch.set_grad_enabled(self._more and torch.is_grad_enabled()):
            loss, parts = super().loss(scores, batch, whole)
        if self.sampled:
            gap = scores.logprobs.detach() - batch.columns[TEACHER_LOGPROBS].clamp_min(FLOOR)
            parts[DIVERGENCE] = whole.mean(gap, batch)
            return loss, parts
        assert scores.read is not None
        loss = loss + self.coef * whole.loss(scores.read, batch, self.cfg.algorithm.loss_agg)
        parts[DIVERGENCE] = whole.mean(scores.read, batch)
        parts["loss"] = loss.detach()
        return loss, parts
