"""LanguageActor: one data-parallel rank of a language model's trainer, for RL and for SFT."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.algorithms import calculate_adv_and_returns, kl_penalty, policy_loss
from rlhpc.algorithms.finite import Skips, listed, require_finite, skips
from rlhpc.algorithms.losses import aggregate, entropy_loss
from rlhpc.checkpoint.state import load_state, rng_state, save_state, set_rng_state
from rlhpc.language.data import PromptSampler, PromptTokenizer, load_tokenizer, make_dataset
from rlhpc.language.roles.prompts import GROUPS, VERSIONS, Group, PromptMap
from rlhpc.language.tokens.batches import TokenBatch, fill_up, pack
from rlhpc.language.tokens.scores import TokenScores
from rlhpc.language.tokens.trainer import TokenTrainer
from rlhpc.runs.device import seed_process
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.runtime.worker import Worker
from rlhpc.weights.transport import WeightSender

STATE = "actor-{rank}.pt"
#: Parts in which a step's groups are scored as they come: while the last ones are made, the first are done.
_CHUNKS = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Row = dict[str, Any]


class LanguageActor(Worker):
    """Owns a training backend; scores and trains on what the rollout ranks hand over, or on demonstrations."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self._sender: WeightSender | None = None
        self._sent: frozenset[str] = frozenset()

    def init_worker(self, total_steps: int, prompts: PromptMap | None = None) -> dict[str, Any]:
        """Loads model and optimizer.

        Args:
            total_steps: Steps of the whole run, for the learning rate.
            prompts: Who has which prompt; None for SFT.

        Returns:
            Facts: trainable parameters.
        """
        cfg = self.cfg
        self.total, self.prompts, self.seed = total_steps, prompts, int(cfg.runner.seed)
        seed_process(self.seed, "actor", self.rank)
        self.tokenizer = load_tokenizer(str(cfg.actor.model.model_path), bool(cfg.actor.model.trust_remote_code))
        pad = self.tokenizer.pad_token_id
        self.pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        self.backend = TokenTrainer(cfg, self)
        self.skips = Skips(skips(cfg))
        self.max_tokens = int(cfg.actor.max_tokens_per_micro_batch)
        self._early: dict[int, list[Group]] = {}
        self.rows: list[Row] = []
        self.version, self._received = 0, -1
        self._sender = None
        self._forget_sent()
        if prompts is None:
            self._open_demonstrations()
        else:
            self.temperature = float(cfg.rollout.temperature)
            self.recompute = bool(cfg.algorithm.recompute_logprobs)
            self.kl_coef = float(cfg.algorithm.kl_coef)
        self.log.info("trains %s parameters of %s by %s", self.backend.parameters_trained, cfg.actor.model.model_path,
                      cfg.actor.training_backend)  # fmt: skip
        return {"parameters": self.backend.parameters_trained}

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        self._groups, self._versions = self.connect_channel(GROUPS), self.connect_channel(VERSIONS)
        self._early.clear()

    # -- weights --------------------------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> None:
        """Sends the weights, as `version`, to all rollout ranks; those that are not trained only once."""
        assert self.prompts is not None
        if version != self.version:  # the update before it failed
            raise RlhpcError(f"weights of version {version} are not there: the actor has {self.version}")
        frozen = self._frozen_names()
        weights = self.backend.named_weights(self._sent)
        try:
            if self.rank:
                for _ in weights:  # a sharded backend gathers each with all ranks
                    pass
            else:
                self._send(version, weights, frozen)
        finally:
            # Now, not when the last reference to it is dropped: it may have taken memory that another role wants back.
            if isinstance(weights, Generator):
                weights.close()
        self._sent = frozen

    def _frozen_names(self) -> frozenset[str]:
        off = str(self.cfg.rollout.weight_delta).lower() == "off"
        return frozenset() if off else self.backend.frozen_names()

    def _send(self, version: int, weights: Iterable[tuple[str, torch.Tensor]], frozen: frozenset[str]) -> None:
        assert self.prompts is not None
        ranks = list(range(self.prompts.rollout_ranks))
        for rank in ranks:
            self._versions.put(version, key=str(rank))
        if self._sender is None:
            receivers = [(self.prompts.rollout_name, ranks)]
            self._sender = WeightSender(self, receivers, str(self.cfg.rollout.weight_delta))
        self._sender.send(version, weights, frozen=frozen, dtype=_DTYPES.get(str(self.cfg.rollout.dtype)))

    def _forget_sent(self) -> None:
        """Frozen weights go out again with the next version; all ranks call it."""
        self._sent = frozenset()
        if self._sender is not None:
            self._sender.forget()

    # -- what comes in --------------------------------------------------------------------------------------------

    def receive(self, step: int) -> dict[str, float]:
        """Takes in its groups of a step, and scores them as they come where scores are wanted.

        Returns:
            Seconds that scoring took, and those that were waited.
        """
        assert self.prompts is not None
        mine = self.prompts.of_actor(self.rank)
        have: dict[int, Group] = {group.position: group for group in self._early.pop(step, [])}
        self.rows, self._received, scored, waited = [], -1, 0.0, 0.0
        deadline = time.monotonic() + float(self.cfg.runner.step_timeout_s)
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
        limit = int(self.cfg.algorithm.max_staleness)
        drop = bool(self.cfg.algorithm.overlong_filter)
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

    def _micro_batches(self, rows: list[Row], columns: tuple[str, ...]) -> list[TokenBatch]:
        """Micro-batches, as many on each rank; field `line` is the row's position."""
        fields = [
            {"ids": row["ids"], "line": line, **{name: row[name] for name in columns}} for line, row in enumerate(rows)
        ]
        batches = pack(fields, self.max_tokens, self.pad)
        if self.world_size > 1:
            most = int(self.all_reduce(torch.tensor(float(len(batches))), "max").item())
            batches = fill_up(batches, most, self.pad, None if batches else self._filler(columns))
        return batches

    def _filler(self, columns: tuple[str, ...]) -> TokenBatch:
        """What an empty batch looks like on a rank that has no rows."""
        ids = torch.full((1, 2), self.pad)
        fields = {name: torch.zeros(1, 2) for name in columns} | {"line": torch.zeros(1, dtype=torch.long)}
        return TokenBatch(ids, torch.zeros(1, 2, dtype=torch.bool), fields)

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
        total = int(self.cfg.data.prompts_per_step) * int(cfg.group_size)
        size = int(self.cfg.actor.global_batch_size)
        rate, sums, updates = self._learning_rate(step), dict[str, float](), 0
        mismatch, tokens = dict[str, float](), 0.0
        for epoch in range(int(cfg.update_epochs)):
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
            if self.kl_coef and str(cfg.kl_in) == "reward":
                old = row["old_logprobs"] if self.recompute else row["rollout_logprobs"]
                kl[line, : len(row["ids"])] = kl_penalty(old, row["ref_logprobs"], str(cfg.kl_type))
        positions = torch.arange(T)
        last = torch.where(mask, positions, -1).amax(1)
        outcome = torch.tensor([row["reward"] for row in rows])
        lines = torch.nonzero(last >= 0).flatten()
        rewards[lines, last[lines]] = outcome[lines]
        extra: dict[str, Any] = {}
        if self.kl_coef and str(cfg.kl_in) == "reward":
            if str(cfg.adv_type).lower().startswith("reinforce++"):
                extra = {"kl": kl, "kl_coef": self.kl_coef}
            else:
                rewards -= self.kl_coef * kl * mask
        advantages, _ = calculate_adv_and_returns(
            str(cfg.adv_type), rewards=rewards, loss_mask=mask,
            group_ids=torch.tensor([row["group"] for row in rows]), gamma=float(cfg.gamma),
            normalize=str(cfg.normalize_advantages) == "batch",
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
        if self.world_size > 1 and str(cfg.loss_agg) == "seq-mean-token-sum-norm":
            width = int(self.all_reduce(torch.tensor(float(width)), "max").item())
        whole = {"global_tokens": tokens, "global_seqs": sequences}
        entropy = float(cfg.entropy_coef) != 0.0

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._loss(scores, batch, whole, width)

        batches = self._micro_batches(rows, tuple(columns))
        parts = self.backend.forward_backward(batches, loss, temperature=self.temperature, entropy=entropy)
        return self._step(rate, self._reduced(parts), tokens, where, rows)

    def _step(
        self, rate: float, metrics: dict[str, float], tokens: float, where: str, rows: list[Row]
    ) -> dict[str, float]:
        """The optimizer's step and its metrics.

        Raises:
            NonFinite: The gradient is not finite. All ranks say so: the norm is over them all.
        """
        norm = self.backend.optimizer_step(rate)
        if math.isfinite(norm):
            self.skips.took()
        else:
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            told = f"the gradient's norm is {norm}" + (f", and so are {listed(bad)}" if bad else "")
            self.skips.left_out(lambda: f"{where}: {told}{_prompts(rows)} (actor-{self.rank})")
        return {**metrics, "grad_norm": norm, "tokens": tokens}

    def _loss(
        self, scores: TokenScores, batch: TokenBatch, whole: dict[str, float], width: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The rank's part of the global loss; metrics as parts of global means."""
        cfg, columns = self.cfg.algorithm, batch.fields
        mask = columns["mask"].bool()
        behaviour = columns["rollout_logprobs"]
        recomputed = columns.get("old_logprobs")
        extra: dict[str, Any] = dict(whole)
        if str(cfg.loss_type).lower() == "decoupled_ppo":
            old, extra["proximal_logprobs"] = behaviour, recomputed
            extra["behave_weight_cap"] = None if cfg.tis_cap is None else float(cfg.tis_cap)
        elif recomputed is not None:
            old = recomputed
            extra |= {"rollout_logprobs": behaviour, "tis_cap": None if cfg.tis_cap is None else float(cfg.tis_cap)}
        else:
            old = behaviour
        loss, metrics = policy_loss(
            str(cfg.loss_type), logprobs=scores.logprobs, old_logprobs=old, advantages=columns["advantages"],
            loss_mask=mask, clip_ratio_low=float(cfg.clip_ratio_low), clip_ratio_high=float(cfg.clip_ratio_high),
            clip_ratio_c=None if cfg.clip_ratio_c is None else float(cfg.clip_ratio_c), loss_agg=str(cfg.loss_agg),
            **extra,
        )  # fmt: skip
        if str(cfg.loss_agg) == "seq-mean-token-sum-norm":
            loss = loss * (mask.shape[1] / width)  # the width of the whole minibatch, not of this micro-batch
        parts: dict[str, torch.Tensor] = {"policy_loss": loss.detach()}
        if self.kl_coef:
            kl = kl_penalty(scores.logprobs, columns["ref_logprobs"], str(cfg.kl_type))
            parts["ref_kl"] = aggregate(kl.detach(), mask, "token-mean", **whole)
            if str(cfg.kl_in) == "loss":
                loss = loss + self.kl_coef * aggregate(kl, mask, str(cfg.loss_agg), **whole)
        if scores.entropy is not None:
            bonus = entropy_loss(scores.entropy, mask, str(cfg.loss_agg), **whole)
            loss = loss - float(cfg.entropy_coef) * bonus
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

    def _reduced(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and ranks."""
        names = sorted(parts[0])
        sums = torch.stack([sum((part[name].float().cpu() for part in parts), torch.zeros(())) for name in names])
        if self.world_size > 1:
            sums = self.all_reduce(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def _learning_rate(self, step: int) -> float:
        optim = self.cfg.actor.optim
        base, warmup = float(optim.lr), int(optim.lr_warmup_steps)
        if step <= warmup:
            return base * step / (warmup + 1)
        done = (step - 1 - warmup) / max(self.total - warmup, 1)
        kind = "linear" if self.cfg.algorithm.anneal_lr else str(optim.lr_scheduler)
        factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[kind]
        return base * factor

    # -- demonstrations -------------------------------------------------------------------------------------------

    def _open_demonstrations(self) -> None:
        data = self.cfg.data
        self.encoder = PromptTokenizer(
            self.tokenizer, int(data.max_prompt_tokens), str(data.overlong_prompts), bool(data.train.chat_template)
        )
        self.dataset = make_dataset(data.train, "train", demonstrations=True)
        if self.encoder.overlong == "drop":
            self.dataset = self.encoder.fitting(self.dataset, demonstrations=True, max_tokens=self.max_tokens)
        self.sampler = PromptSampler(len(self.dataset), int(data.prompts_per_step), self.seed)

    def imitate(self, step: int) -> dict[str, float]:
        """One optimizer step of SFT on this step's demonstrations: the mean of −log p over their tokens.

        Returns:
            Metrics, the same on all ranks.
        """
        rows, count = [], int(self.cfg.data.prompts_per_step)
        for draw in range(self.rank, count, self.world_size):
            index = self.sampler.at((step - 1) * count + draw)
            encoded = self.encoder.encode_demonstration(self.dataset[index], self.max_tokens)
            assert encoded is not None, "those that do not fit are dropped at the start"
            ids, mask = encoded
            rows.append({"ids": torch.tensor(ids), "mask": torch.tensor(mask, dtype=torch.bool)})
        held = torch.tensor(float(sum(int(row["mask"].sum()) for row in rows)))
        tokens = float((self.all_reduce(held) if self.world_size > 1 else held).item())

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = batch.fields["mask"].bool()
            value = aggregate(-scores.logprobs, mask, "token-mean", global_tokens=tokens)
            return value, {"loss": value.detach()}

        batches = self._micro_batches(rows, ("mask",))
        rate = self._learning_rate(step)
        parts = self.backend.forward_backward(batches, loss)
        found = self._step(rate, self._reduced(parts), tokens, f"step {step}", rows)
        self.version = step
        return {**found, "lr": rate, **self.skips.counted()}

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes the backend's files, and this rank's random states.

        Raises:
            NonFinite: A weight is not finite.
        """
        path = Path(folder)
        with self.backend.awake():
            require_finite(self.backend.held_tensors(), f"step {self.version} (actor-{self.rank})")
            self.backend.save(path)
        save_state(path / STATE.format(rank=self.rank), {"rng": rng_state(), "version": self.version})

    def load(self, folder: str) -> None:
        """Restores a checkpoint, of this or another world size."""
        path = Path(folder)
        self.backend.load(path)
        own = path / STATE.format(rank=self.rank)
        state = load_state(own if own.is_file() else path / STATE.format(rank=0))
        set_rng_state(state["rng"])
        self.version = int(state["version"])
        self._forget_sent()

    def offload(self) -> None:
        """Moves everything to the host."""
        self.backend.offload()

    def reload(self) -> None:
        """Inverse of `offload`."""
        self.backend.reload()


def _prompts(rows: Sequence[Row]) -> str:
    """Which of a rank's prompts brought something that is not finite, for a message."""
    columns = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
    found = {
        f"{name} of prompt {row['group']}"
        for row in rows
        for name in columns
        if name in row and not row[name][row["mask"]].isfinite().all()
    }
    return f"; not finite: {listed(sorted(found))}" if found else ""
