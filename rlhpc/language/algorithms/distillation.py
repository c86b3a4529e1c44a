"""On-policy distillation: the model samples, and a teacher returns each sampled token's log-prob, or its distribution there.

The model learns in states that it reaches by itself (Agarwal et al., "On-Policy Distillation of Language Models", 2023). The
loss of a token is the divergence at that token. It ignores the token's effect on later tokens, as with a discount of 0.

Mode `sampled` uses one number of the teacher for each token: its log-prob q of the token that the model sampled with log-prob
p. The token's advantage is the constant q − p: E[(q − p) ∇p] = −∇KL(model ‖ teacher). Minimizing an estimate of that KL would
be wrong: its gradient ignores that the samples depend on the weights. The gradient of k1 = p − q is ∇p alone, whose
expectation is 0 for any teacher. The gradient of k3 = exp(q − p) − 1 − (q − p) is (1 − exp(q − p)) ∇p, whose expectation is
the gradient of the other KL(teacher ‖ model), with unbounded ratios.

The modes `topk` and `full` use the teacher's distribution. At each state their gradient is an expectation over tokens instead
of a sample. So it has less noise, but needs more computation and, in mode topk, more traffic.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhpc.language.algorithms.base import ROLLOUT, ROLLOUT_LOGPROBS, VALUES, MinibatchCounts, Reduce
from rlhpc.language.algorithms.policy_gradient import OLD, PolicyGradient
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.models.divergence import FLOOR, FullDivergence, TopKDivergence
from rlhpc.language.models.logprobs import RowReader, TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import (
    TEACHER,
    TEACHER_INDEX,
    placed_groups,
    scoring_groups,
    teacher_index,
    teachers_of,
)
from rlhpc.language.scoring.registry import Column, LogitReader, Scorer, ScoringGroup

#: Columns of the teacher's log-probs: of the sampled tokens, and of its most likely tokens (`top_logprobs`).
TEACHER_LOGPROBS, TEACHER_TOP = "teacher_logprobs", "teacher_top_logprobs"
DIVERGENCE = "teacher_divergence"
#: Prefixes of the mean divergence from one of several teachers, and of the share of trained tokens that learn from it.
_BY_TEACHER, _SHARE = "teacher_divergence/", "teacher_share/"


class ColocatedTeacher(Scorer):
    """Teacher of section `teacher` on an actor rank."""

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup | None = None) -> None:
        from rlhpc.language.scoring.registry import make_scorer

        group = scoring_groups(cfg)[TEACHER]
        super().__init__(cfg, device, group)
        self.scorer = make_scorer(cfg, device, group)
        self.packed, self.shares_prefixes = self.scorer.packed, self.scorer.shares_prefixes

    def score(self, batch: TokenBatch) -> Tensor:
        """Returns the teacher's column (`Scorer.score`)."""
        column: Tensor = self.scorer.score(batch)
        return column

    def offload(self) -> None:
        """Offloads the teacher (`Scorer.offload`)."""
        self.scorer.offload()

    def reload(self) -> None:
        """Reloads the teacher (`Scorer.reload`)."""
        self.scorer.reload()


class TopDivergenceReader(LogitReader):
    """Divergence from the teacher's log-probs of its most likely tokens."""

    packed = shares_prefixes = True

    def rows(self, batch: TokenBatch) -> RowReader:
        """Returns the reader of a micro-batch (`LogitReader.rows`)."""
        teacher_top = batch.columns[TEACHER_TOP][batch.predictors()[0]]
        if not batch.tokens:  # then the teacher's number of likely tokens is unknown
            teacher_top = teacher_top.new_zeros(0, 1, 2)
        return TopKDivergence(teacher_top, self.cfg.rollout.temperature, self.cfg.algorithm.distillation.beta)


class FullDivergenceReader(LogitReader):
    """Divergence from the teacher's full distribution. The teacher reads each micro-batch on the actor rank during the
    forward pass. Its hidden states are stored until the backward pass, or its logits if its LM head cannot be called
    separately."""

    def __init__(self, cfg: GrpoConfig, device: torch.device) -> None:
        super().__init__(cfg, device)
        self.teacher = ColocatedTeacher(cfg, device)
        self.packed, self.shares_prefixes = self.teacher.packed, self.teacher.shares_prefixes

    def rows(self, batch: TokenBatch) -> RowReader:
        """Returns the reader of a micro-batch (`LogitReader.rows`)."""
        teacher_rows = self.teacher.scorer.rows(batch)
        return FullDivergence(teacher_rows, self.cfg.rollout.temperature, self.cfg.algorithm.distillation.beta)

    def offload(self) -> None:
        """Offloads the teacher (`LogitReader.offload`)."""
        self.teacher.offload()

    def reload(self) -> None:
        """Reloads the teacher (`LogitReader.reload`)."""
        self.teacher.reload()


class Distillation(PolicyGradient):
    """Distillation alone, or with the reward (`task_reward_coef`): see `algorithm.distillation`.

    In mode sampled the teacher's term is added to the advantages, so that the policy loss clips it and corrects for the
    staleness of the sampling policy. In the other modes it is added to the loss. The KL penalty to a reference and the entropy
    bonus are unchanged.
    """

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__(cfg)
        options = cfg.algorithm.distillation
        self.sampled = options.mode == "sampled"
        self.coef = options.coef
        self.reward_coef = options.task_reward_coef
        if not self.reward_coef and self.critic:
            self.critic = self.has_value_head = False
            self.columns = [column for column in self.columns if column.name != VALUES]
        scorer = TEACHER if TEACHER in placed_groups(cfg) else ColocatedTeacher
        if options.mode == "full":
            self.reader = FullDivergenceReader
        else:
            self.columns = [*self.columns, Column(TEACHER_LOGPROBS if self.sampled else TEACHER_TOP, scorer)]
            self.reader = None if self.sampled else TopDivergenceReader
        self._teacher_names = list(teachers_of(cfg)) if cfg.teacher.by_task else []
        if self._teacher_names:
            self.columns = [*self.columns, Column(TEACHER_INDEX, ROLLOUT)]
        if self.sampled:  # the estimate is valid for the weights that sampled the tokens
            self.at_first = self.at_first | {DIVERGENCE}
            self.at_first |= {prefix + name for prefix in (_BY_TEACHER, _SHARE) for name in self._teacher_names}
        has_kl_loss = self.kl_coef and cfg.algorithm.kl_in == "loss"
        self._needs_policy_loss = bool(self.sampled or self.reward_coef or has_kl_loss or cfg.algorithm.entropy_coef)

    def prompt_columns(self, prompt: Prompt) -> Mapping[str, float]:
        """Returns the index of the prompt's teacher, if there are several (`LanguageAlgorithm.prompt_columns`)."""
        return {TEACHER_INDEX: float(teacher_index(self.cfg, prompt.level))} if self._teacher_names else {}

    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        """Returns the advantages of the reward, plus the teacher's term in mode sampled (`LanguageAlgorithm.advantages`)."""
        advantages = torch.zeros(batch.tokens, dtype=batch.reward.dtype)
        if self.reward_coef:
            advantages = self.reward_coef * super().advantages(batch, all_reduce)
        if self.sampled:
            old_logprobs = batch.columns[OLD if self.cfg.algorithm.recompute_logprobs else ROLLOUT_LOGPROBS]
            log_ratio = batch.columns[TEACHER_LOGPROBS].clamp_min(FLOOR) - old_logprobs
            advantages = advantages + self.coef * torch.where(batch.mask, log_ratio, 0.0)
        return advantages

    def loss(self, scores: TokenScores, batch: TokenBatch, counts: MinibatchCounts) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the policy loss, plus the divergence in the modes topk and full (`LanguageAlgorithm.loss`)."""
        # With distillation alone, only metrics use the log-probs, so these need no gradient of the size of the logits.
        with torch.set_grad_enabled(self._needs_policy_loss and torch.is_grad_enabled()):
            loss, metrics = super().loss(scores, batch, counts)
        if self.sampled:
            log_ratio = scores.logprobs.detach() - batch.columns[TEACHER_LOGPROBS].clamp_min(FLOOR)
            metrics |= self._divergence_metrics(log_ratio, batch, counts)
            return loss, metrics
        assert scores.read is not None
        loss = loss + self.coef * counts.loss(scores.read, batch, self.cfg.algorithm.loss_agg)
        metrics |= self._divergence_metrics(scores.read, batch, counts)
        metrics["loss"] = loss.detach()
        return loss, metrics

    def _divergence_metrics(self, values: Tensor, batch: TokenBatch, counts: MinibatchCounts) -> dict[str, Tensor]:
        """Returns a micro-batch's shares of the divergence from the teachers, and of each teacher's sum and share of tokens.

        Args:
            values: `[T]`, divergence of each token.
            batch, counts: See `loss`.
        """
        metrics = {DIVERGENCE: counts.mean(values, batch)}
        for index, name in enumerate(self._teacher_names):
            is_taught = (batch.columns[TEACHER_INDEX] == index) & batch.mask
            metrics[_BY_TEACHER + name] = counts.mean(values.masked_fill(~is_taught, 0), batch)
            metrics[_SHARE + name] = counts.mean(is_taught.to(values.dtype), batch)
        return metrics

    def summarize(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Divides each teacher's sum by its share of tokens; omits teachers without any (`LanguageAlgorithm.summarize`)."""
        summary = super().summarize(metrics)
        for key in metrics:
            prefix, separator, name = key.rpartition(_BY_TEACHER)
            if separator:
                share, total = metrics[prefix + _SHARE + name], summary.pop(key)
                if share:
                    summary[key] = total / share
        return summary
