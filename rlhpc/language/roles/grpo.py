"""GrpoActor: one data-parallel rank of the trainer of a run by RL."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from rlhpc.algorithms import calculate_adv_and_returns, kl_penalty, policy_loss
from rlhpc.algorithms.losses import aggregate, entropy_loss
from rlhpc.language.config import GrpoConfig
from rlhpc.language.roles.actor import LanguageActor, Row
from rlhpc.language.roles.prompts import GROUPS, VERSIONS, Group, PromptMap
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.scores import TokenScores
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.training.contract import Named
from rlhpc.weights import WeightSync, make_sync

#: Parts in which a step's groups are scored as they come: while the last ones are made, the first are done.
_CHUNKS = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GrpoActor(LanguageActor[GrpoConfig]):
    """Scores and trains on what the rollout ranks hand over, and sends them the weights."""

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__(cfg)
        self._sync: WeightSync | None = None
        self._sent: frozenset[str] = frozenset()

    def init_worker(self, total_steps: int, prompts: PromptMap) -> dict[str, Any]:
        """Loads model and optimizer.

        Args:
            total_steps: Steps of the whole run, for the learning rate.
            prompts: Who has which prompt.

        Returns:
            Facts: trainable parameters.
        """
        cfg, self.prompts = self.cfg, prompts
        facts = self._load_model(total_steps)
        self._early: dict[int, list[Group]] = {}
        self.rows: list[Row] = []
        self._received = -1
        self._sync = None
        if self.rank == 0:
            to = [(prompts.rollout_name, list(range(prompts.rollout_ranks)))]
            rollout = cfg.rollout
            self._sync = make_sync(rollout.weight_sync, self, (prompts.actor_name, 0), to, rollout.weight_delta)
        self._forget_sent()
        self.temperature = cfg.rollout.temperature
        self.recompute = cfg.algorithm.recompute_logprobs
        self.kl_coef = cfg.algorithm.kl_coef
        return facts

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        self._groups, self._versions = self.connect_channel(GROUPS), self.connect_channel(VERSIONS)
        self._early.clear()

    def load(self, folder: str) -> None:
        """Restores a checkpoint, of this or another world size; frozen weights are sent anew."""
        super().load(folder)
        self._forget_sent()

    # -- weights --------------------------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> None:
        """Sends the weights, as `version`, to all rollout ranks; those that are not trained only once."""
        if version != self.version:  # the update before it failed
            raise RlhpcError(f"weights of version {version} are not there: the actor has {self.version}")
        frozen = self._frozen_names()
        weights = self.backend.named_weights(self._sent)
        try:
            if self._sync is None:
                for _ in weights:  # a sharded backend gathers each with all ranks
                    pass
            else:
                for rank in range(self.prompts.rollout_ranks):
                    self._versions.put(version, key=str(rank))
                self._sync.send(version, _as(_DTYPES.get(self.cfg.rollout.dtype), weights), frozen=frozen)
        finally:
            # Now, not when the last reference to it is dropped: it may have taken memory that another role wants back.
            if isinstance(weights, Generator):
                weights.close()
        self._sent = frozen

    def _frozen_names(self) -> frozenset[str]:
        off = self.cfg.rollout.weight_delta.lower() == "off"
        return frozenset() if off else self.backend.frozen_names()

    def _forget_sent(self) -> None:
        """Frozen weights go out again with the next version; all ranks call it."""
        self._sent = frozenset()
        if self._sync is not None:
            self._sync.forget()

    # -- what comes in --------------------------------------------------------------------------------------------

    def receive(self, step: int) -> dict[str, float]:
        """Takes in its groups of a step, and scores them as they come where scores are wanted.

        Returns:
            Seconds that scoring took, and those that were waited.
        """
        mine = self.prompts.of_actor(self.rank)
        have: dict[int, Group] = {group.position: group for group in self._early.pop(step, [])}
        self.rows, self._received, scored, waited = [], -1, 0.0, 0.0
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        parts = np.array_split(np.asarray(mine), min(_CHUNKS, len(mine)))
        for part in parts:
            while missing := [int(p) for p in part if int(p) not in have]:
                start = time.perf_counter()
                try:
                    group = Group.unpack(
                        self._groups.get(key=str(self.rank), timeout=max(0.0, deadline - time.monotonic()))
                    )
                except DeadlineExceeded:
                    makers = sorted({position % self.prompts.rollout_ranks for position in missing})
                    who = ", ".join(f"{self.prompts.rollout_name}-{rank}" for rank in makers)
                    raise DeadlineExceeded(
                        f"step {step}: prompts {missing[:8]} did not come from {who} within runner.step_timeout_s "
                        f"({self.cfg.runner.step_timeout_s:g} s)"
                    ) from None
                waited += time.perf_counter() - start
                if group.step == step:
                    have[group.position] = group
                elif group.step > step:
                    self._early.setdefault(group.step, []).append(group)
            rows = [row for position in part for row in self._rows_of(have[int(position)])]
            if not self.cfg.actor.offload_in_rollout:
                scored += self._score(rows)
            self.rows += rows
        self._received = step
        return {"score_s": scored, "wait_s": waited}

    def _rows_of(self, group: Group) -> list[Row]:
        """One dict a response: `ids`, and columns aligned with them."""
        head, rows = group.prompt_ids, []
        before = np.zeros(len(head), np.float32)
        limit = self.cfg.algorithm.max_staleness
        drop = self.cfg.algorithm.overlong_filter
        for member, response in enumerate(group.responses):
            mask, versions = group.masks[member], group.versions[member]
            if mask.any() and group.step - 1 - int(versions[mask].min()) > limit:
                raise RlhpcError(
                    f"step {group.step}, prompt {group.position}: a token was drawn by version "
                    f"{int(versions[mask].min())}, more than algorithm.max_staleness ({limit}) behind {group.step - 1}"
                )
            kept = mask if group.finished[member] or not drop else np.zeros_like(mask)
            rows.append({
                "ids": torch.from_numpy(np.concatenate([head, response]).astype(np.int64)),
                "mask": torch.from_numpy(np.concatenate([before.astype(bool), kept])),
                "rollout_logprobs": torch.from_numpy(np.concatenate([before, group.logprobs[member]])),
                "reward": float(group.rewards[member]),
                "group": group.position,
                "sequence": group.position * len(group.responses) + member,
            })  # fmt: skip
        return rows

    def _score(self, rows: list[Row]) -> float:
        """Adds `old_logprobs` and `ref_logprobs` where the algorithm wants them; all ranks call it equally often."""
        if not self.recompute and not self.kl_coef:
            return 0.0
        start = time.perf_counter()
        for batch in self._micro_batches(rows, ()):
            found: dict[str, torch.Tensor] = {}
            if self.recompute:
                found["old_logprobs"] = self.backend.forward(batch, temperature=self.temperature).logprobs
            if self.kl_coef:
                found["ref_logprobs"] = self.backend.reference(batch, temperature=self.temperature).logprobs
            filled = batch.attention_mask.any(1).tolist()
            for line, member in enumerate(batch.fields["line"].tolist()):
                for name, scores in found.items() if filled[line] else ():
                    rows[member][name] = scores[line, : len(rows[member]["ids"])].float().cpu()
        return time.perf_counter() - start

    # -- training -------------------------------------------------------------------------------------------------

    def update(self, step: int) -> dict[str, float]:
        """Trains on the groups that `receive` took in.

        Returns:
            Metrics, the same on all ranks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        if self._received != step:
            raise RlhpcError(f"step {step} cannot be trained: its groups did not come")
        cfg, start = self.cfg.algorithm, time.perf_counter()
        rows, self.rows = self.rows, []
        scored = self._score(rows) if self.cfg.actor.offload_in_rollout else 0.0
        self._advantages(rows)
        total = self.cfg.data.prompts_per_step * cfg.group_size
        size = self.cfg.actor.global_batch_size
        rate, sums, updates = self._learning_rate(step), dict[str, float](), 0
        mismatch, tokens = dict[str, float](), 0.0
        for epoch in range(cfg.update_epochs):
            order = np.arange(total)
            if size < total:
                np.random.default_rng((self.seed, step, epoch)).shuffle(order)
            place = {int(sequence): position for position, sequence in enumerate(order)}
            for number in range(total // size):
                chosen = [row for row in rows if number * size <= place[row["sequence"]] < (number + 1) * size]
                found = self._minibatch(chosen, rate, f"step {step}, epoch {epoch}, minibatch {number}")
                tokens += found["tokens"]
                if not math.isfinite(found["grad_norm"]):
                    continue
                if not updates:
                    mismatch = {name: found[name] for name in ("mismatch_kl", "mismatch_abs")}
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + value
                updates += 1
        self.version = step
        metrics = {name: value / updates for name, value in sums.items()} if updates else {"tokens": tokens}
        metrics |= self.skips.counted()
        seconds = {"update_s": time.perf_counter() - start - scored, "late_score_s": scored}
        return {**metrics, **mismatch, "lr": rate, "updates": float(updates), **seconds}

    def _advantages(self, rows: list[Row]) -> None:
        """Adds `advantages` to each row, by the estimator over all of this rank's groups."""
        cfg = self.cfg.algorithm
        B, T = len(rows), max(len(row["ids"]) for row in rows)
        mask = torch.zeros(B, T, dtype=torch.bool)
        rewards = torch.zeros(B, T)
        kl = torch.zeros(B, T)
        for line, row in enumerate(rows):
            mask[line, : len(row["ids"])] = row["mask"]
            if self.kl_coef and cfg.kl_in == "reward":
                old = row["old_logprobs"] if self.recompute else row["rollout_logprobs"]
                kl[line, : len(row["ids"])] = kl_penalty(old, row["ref_logprobs"], cfg.kl_type)
        positions = torch.arange(T)
        last = torch.where(mask, positions, -1).amax(1)
        outcome = torch.tensor([row["reward"] for row in rows])
        lines = torch.nonzero(last >= 0).flatten()
        rewards[lines, last[lines]] = outcome[lines]
        extra: dict[str, Any] = {}
        if self.kl_coef and cfg.kl_in == "reward":
            if cfg.adv_type.lower().startswith("reinforce++"):
                extra = {"kl": kl, "kl_coef": self.kl_coef}
            else:
                rewards -= self.kl_coef * kl * mask
        advantages, _ = calculate_adv_and_returns(
            cfg.adv_type, rewards=rewards, loss_mask=mask,
            group_ids=torch.tensor([row["group"] for row in rows]), gamma=cfg.gamma,
            normalize=cfg.normalize_advantages == "batch",
            all_reduce=self.all_reduce if self.world_size > 1 else None, **extra,
        )  # fmt: skip
        for line, row in enumerate(rows):
            row["advantages"] = advantages[line, : len(row["ids"])].clone()

    def _minibatch(self, rows: list[Row], rate: float, where: str) -> dict[str, float]:
        """One optimizer step over all ranks' rows; `grad_norm` that is not finite: it was left out."""
        cfg = self.cfg.algorithm
        columns = ["mask", "rollout_logprobs", "advantages"]
        columns += ["old_logprobs"] * self.recompute + ["ref_logprobs"] * bool(self.kl_coef)
        counts = torch.tensor([float(sum(int(row["mask"].sum()) for row in rows)),
                               float(sum(bool(row["mask"].any()) for row in rows))])  # fmt: skip
        if self.world_size > 1:
            counts = self.all_reduce(counts)
        tokens, sequences = counts.tolist()
        if self.skips.skip and not tokens:  # all was left out: Adam would move by its momentum alone
            return {"grad_norm": math.nan, "tokens": 0.0}
        width = max((len(row["ids"]) for row in rows), default=1)
        if self.world_size > 1 and cfg.loss_agg == "seq-mean-token-sum-norm":
            width = int(self.all_reduce(torch.tensor(float(width)), "max").item())
        whole = {"global_tokens": tokens, "global_seqs": sequences}
        entropy = cfg.entropy_coef != 0.0

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._loss(scores, batch, whole, width)

        batches = self._micro_batches(rows, tuple(columns))
        parts = self.backend.forward_backward(batches, loss, temperature=self.temperature, entropy=entropy)
        return self._step(rate, self._reduced(parts), tokens, where, rows)

    def _loss(
        self, scores: TokenScores, batch: TokenBatch, whole: dict[str, float], width: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The rank's part of the global loss; metrics as parts of global means."""
        cfg, columns = self.cfg.algorithm, batch.fields
        mask = columns["mask"].bool()
        behaviour = columns["rollout_logprobs"]
        recomputed = columns.get("old_logprobs")
        extra: dict[str, Any] = dict(whole)
        if cfg.loss_type.lower() == "decoupled_ppo":
            old, extra["proximal_logprobs"] = behaviour, recomputed
            extra["behave_weight_cap"] = cfg.tis_cap
        elif recomputed is not None:
            old = recomputed
            extra |= {"rollout_logprobs": behaviour, "tis_cap": cfg.tis_cap}
        else:
            old = behaviour
        loss, metrics = policy_loss(
            cfg.loss_type, logprobs=scores.logprobs, old_logprobs=old, advantages=columns["advantages"],
            loss_mask=mask, clip_ratio_low=cfg.clip_ratio_low, clip_ratio_high=cfg.clip_ratio_high,
            clip_ratio_c=cfg.clip_ratio_c, loss_agg=cfg.loss_agg,
            **extra,
        )  # fmt: skip
        if cfg.loss_agg == "seq-mean-token-sum-norm":
            loss = loss * (mask.shape[1] / width)  # the width of the whole minibatch, not of this micro-batch
        parts: dict[str, torch.Tensor] = {"policy_loss": loss.detach()}
        if self.kl_coef:
            kl = kl_penalty(scores.logprobs, columns["ref_logprobs"], cfg.kl_type)
            parts["ref_kl"] = aggregate(kl.detach(), mask, "token-mean", **whole)
            if cfg.kl_in == "loss":
                loss = loss + self.kl_coef * aggregate(kl, mask, cfg.loss_agg, **whole)
        if scores.entropy is not None:
            bonus = entropy_loss(scores.entropy, mask, cfg.loss_agg, **whole)
            loss = loss - cfg.entropy_coef * bonus
            parts["entropy"] = aggregate(scores.entropy.detach(), mask, "token-mean", **whole)
        else:  # a sample estimate costs nothing
            parts["entropy"] = aggregate(-scores.logprobs.detach(), mask, "token-mean", **whole)
        share = mask.sum() / max(whole["global_tokens"], 1.0)
        parts |= {name: torch.as_tensor(value) * share for name, value in metrics.items()}
        gap = torch.where(mask, scores.logprobs.detach() - behaviour, 0.0)
        parts["mismatch_kl"] = aggregate(kl_penalty(-gap, torch.zeros_like(gap), "k3"), mask, "token-mean", **whole)
        parts["mismatch_abs"] = aggregate(gap.abs(), mask, "token-mean", **whole)
        parts["loss"] = loss.detach()
        return loss, parts


def _as(dtype: torch.dtype | None, weights: Named) -> Named:
    """Weights as the engine wants them: those in floating point in `dtype`, where there is one."""
    if dtype is None:
        return weights
    return ((name, one.to(dtype) if one.is_floating_point() else one) for name, one in weights)
