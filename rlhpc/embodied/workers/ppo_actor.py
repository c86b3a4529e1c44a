"""Actor of on-policy embodied runs: computes advantages and trains the policy on the rollout ranks' trajectories."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.algorithms.nonfinite import skips
from rlhpc.embodied.algorithms.ppo import PolicyUpdate, TransitionStream
from rlhpc.embodied.config import PpoConfig, minibatch_size
from rlhpc.embodied.envs.observations import cleaned, is_column, rows_of
from rlhpc.embodied.models.mlp import flat_numbers
from rlhpc.embodied.rollout.slot_map import TRAJECTORIES, SlotMap, Source
from rlhpc.embodied.rollout.work_sharing import PARTS, cuts
from rlhpc.embodied.workers.actor import PolicyTrainer, TrajectoryReceiver

#: Columns of a step, or of a part of it, from which advantages are computed.
_SEQUENCE = ("rewards", "values", "next_values", "terminations", "truncations", "loss_mask")
#: Columns that the update needs, in addition to observations and the model's inputs.
_TRAINS = ("actions", "logprobs", "values", "advantages", "returns", "token_mask")


def _trains(column: str) -> bool:
    return column in _TRAINS or is_column(column, "obs") or is_column(column, "inputs")


def token_mask(executed: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the mask of the log-probabilities that train: `executed [n, T, chunk]` in the shape of `logprobs
    [n, T, chunk(, dim)]`.
    """
    missing = logprobs.dim() - executed.dim()
    return executed.reshape(*executed.shape, *[1] * missing).expand(logprobs.shape).float()


def left_out(bad: np.ndarray, failed: np.ndarray, adv_type: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the transitions that train nothing, each bool `[n, T]`; no other transition's advantage depends on them.

    Args:
        bad: Transitions that are not finite, or are missing: all transitions of their slot are left out.
        failed: Transitions whose simulator or robot failed. GAE bootstraps from the observation before, so it leaves out
            these alone; other estimators treat a slot's transitions as one unit, whose outcome is unknown.
        adv_type: Name of the estimator.

    Returns:
        The transitions that are left out because of `bad`, and those because of `failed`.
    """
    if adv_type.lower() != "gae":
        failed = np.broadcast_to(failed.any(1, keepdims=True), failed.shape)
    return np.broadcast_to(bad.any(1, keepdims=True), bad.shape), failed


def ends_at(ends: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Returns where episodes end among the positions that train: each end at the last of them up to its decision.

    If the decision of an end does not train (none of its actions was executed, or its simulator failed), the episode is cut
    after the position before; otherwise it would be credited with the rewards that follow.

    Args:
        ends: Decisions that ended an episode, bool `[n, T]`.
        trained: Positions that train, bool `[n, T]` or `[n, T, actions]`.

    Returns:
        Bool, of the shape of `trained`.
    """
    positions = trained.flatten(1)
    index = torch.arange(positions.shape[1], device=positions.device)
    latest = torch.where(positions, index, -1).cummax(1).values.view(trained.shape)
    latest = latest if trained.dim() == 2 else latest[..., -1]
    marks = (ends & (latest >= 0)).to(torch.uint8)
    counts = torch.zeros_like(positions, dtype=torch.uint8).scatter_reduce_(1, latest.clamp(min=0), marks, "amax")
    return counts.bool().view(trained.shape)


def by_action(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns outcomes of chunks as one sequence of actions, `[n, T · chunk]`; an end belongs to the last executed action."""
    executed = batch["action_mask"] & batch["loss_mask"][..., None]
    columns = {"rewards": batch["rewards"], "loss_mask": executed}
    columns |= {name: ends_at(batch[name], executed) for name in ("terminations", "truncations")}
    if batch["values"].dim() == 3:
        columns |= {name: batch[name] for name in ("values", "next_values")}
    return {name: column.flatten(1) for name, column in columns.items()}


def by_decision(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns outcomes of decisions, `[n, T]`, with ends at decisions that train."""
    ends = {name: ends_at(batch[name], batch["loss_mask"]) for name in ("terminations", "truncations")}
    return {**batch, **ends}


class EmbodiedActor(PolicyTrainer[PpoConfig]):
    """Actor rank that trains by PPO and related algorithms on the rollout ranks' trajectories."""

    #: Stream of the step's transitions, where training overlaps with the rollout.
    arriving: TransitionStream | None = None

    def init_worker(self, slots: SlotMap, observation_space: Any, action_space: Any) -> int:
        """Builds policy and optimizer; the initial weights depend on the seed alone.

        Returns:
            Number of trainable parameters.
        """
        cfg = self.cfg
        self.settle_in()
        self.slots, self.steps, self.share = slots, cfg.algorithm.rollout_steps, slots.actor_share(self.rank)
        self.intake = TrajectoryReceiver(cfg, slots, self.rank)
        self.backend = self.build_backend(
            cfg.actor,
            (observation_space, action_space),
            look=skips(cfg),
            levels=cfg.algorithm.logprob_type.lower(),
        )
        self.update_policy = PolicyUpdate(
            cfg.algorithm,
            self.backend,
            batch_size=minibatch_size(cfg),
            micro_batch=cfg.actor.micro_batch_size,
            seed=self.seed,
            reduce=self.all_reduce,
            gather=self.all_gather_object,
            rank=self.rank,
            ranks=self.world_size,
            skip=skips(cfg),
        )
        self.open_sync(slots, cfg.rollout)
        trained = self.backend.parameters_trained
        self.log.info("trains %d parameters of %s on %s", trained, cfg.actor.model.model_type, self.device)
        return trained

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        self.intake.connect(self.connect_channel(TRAJECTORIES), self.connect_channel(PARTS))

    def receive(self, step: int, source: Source) -> dict[str, float]:
        """Receives this step's trajectories of its slots, and computes advantages and returns without the transitions that are
        left out (`left_out`).

        With `runner.use_training_pipeline` these are the trajectories of the step's first part; `update` receives the others.

        Args:
            step: Global step.
            source: Turns and shards that make up the step.

        Returns:
            The oldest version of the policy that acted; the number of transitions left out because something in their slot is
            not finite; the number whose simulator or robot `failed`; the number `lost` with env ranks; and the number `taken`
            in.

        Raises:
            NonFinite: Something is not finite, and `runner.on_nonfinite` is stop.
        """
        parts = 1 if self.cfg.algorithm.max_staleness else cuts(self.cfg)
        if parts == 1:
            batch, facts = self._take(step, source)
            self.batch = {name: column.flatten(0, 1) for name, column in batch.items()}
            return facts
        facts_of_parts: list[dict[str, float]] = []

        def part(number: int) -> dict[str, torch.Tensor]:
            later = (acted.turn.number for acted in source.acted[number + 1 :])
            one = replace(source, acted=source.acted[number : number + 1], later=source.later.union(later))
            batch, facts = self._take(step, one)
            facts_of_parts.append(facts)
            return batch

        self.arriving = TransitionStream(part, parts, self.steps)
        if self.cfg.runner.use_training_pipeline:
            self.arriving.wait_until(0)  # of those to come nothing may be missing
            return {**facts_of_parts[0], "taken": facts_of_parts[0]["taken"] * parts}
        self.arriving.wait_until(parts - 1)
        self.batch, self.arriving = self.arriving.columns, None
        sums = {name: sum(facts[name] for facts in facts_of_parts) for name in ("left_out", "failed", "lost", "taken")}
        return {"version": min(facts["version"] for facts in facts_of_parts), **sums}

    def _take(self, step: int, source: Source) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Returns the columns of a step, or of a part of it, that train, `[n, T, ...]`, and the facts that `receive`
        returns.
        """
        columns, version = self.intake.columns(step, source)
        is_lost, failed = self.intake.pop_lost(columns), self.intake.pop_failed(columns)
        spoiled = self.intake.pop_nonfinite(step, columns)
        algorithm = self.cfg.algorithm
        bad, failed = left_out(spoiled | is_lost, failed, algorithm.adv_type)
        excluded = bad | failed
        if np.any(excluded):
            columns["loss_mask"] = columns.get("loss_mask", np.ones(bad.shape, bool)) & ~excluded
            columns = {name: cleaned(column) for name, column in columns.items()}
        batch = {name: torch.from_numpy(column).to(self.device) for name, column in columns.items()}
        batch.setdefault("loss_mask", torch.ones(batch["rewards"].shape[:2], dtype=torch.bool, device=self.device))
        if "action_mask" in batch:
            batch["token_mask"] = token_mask(batch["action_mask"] & batch["loss_mask"][..., None], batch["logprobs"])
        sequence = by_action(batch) if batch["rewards"].dim() == 3 else by_decision(batch) if failed.any() else batch
        slots = torch.arange(self.share.start, self.share.stop, device=self.device)
        # Slots that are left out altogether are no members of their groups.
        members = torch.from_numpy(~excluded.all(1)).to(self.device) if np.any(excluded) else None
        outcomes: dict[str, Any] = {name: sequence[name] for name in _SEQUENCE if name in sequence}
        with torch.no_grad():
            advantages, returns = calculate_adv_and_returns(
                algorithm.adv_type,
                group_ids=slots // self.slots.group_size,
                gamma=algorithm.gamma,
                gae_lambda=algorithm.gae_lambda,
                all_reduce=self.all_reduce if self.world_size > 1 else None,
                members=members,
                **outcomes,
            )
        shape = batch["rewards"].shape
        batch["advantages"], batch["returns"] = advantages.reshape(shape), returns.reshape(shape)
        batch["loss_mask"] = sequence["loss_mask"].reshape(shape)
        trained_columns = {name: column for name, column in batch.items() if _trains(name)}
        return {**trained_columns, "mask": batch["loss_mask"].float()}, {
            "version": float(version), "left_out": float(max(0, bad.sum() - is_lost.sum())), "lost": float(is_lost.sum()),
            "failed": float((failed & ~bad).sum()), "taken": float((~is_lost).sum()),
        }  # fmt: skip

    def update(self, step: int, progress: float = 0.0) -> dict[str, float]:
        """Trains on the trajectories that `receive` took in.

        Args:
            step: Global step.
            progress: Completed fraction of the run, 0 to 1, for the learning rate.

        Returns:
            Metrics, the same on all ranks, and `update_s`: the seconds that it took, without those spent on receiving parts.
        """
        start = time.perf_counter()
        rate = self.backend.base_lr * ((1.0 - progress) if self.cfg.algorithm.anneal_lr else 1.0)
        arriving, self.arriving = self.arriving, None
        flat, self.batch = self.batch if arriving is None else arriving.columns, {}
        # Where nothing is left to train on, Adam would move by its momentum alone.
        if arriving is None and not self.all_reduce(flat["mask"].sum()).item():
            return {"lr": rate, "epochs": 0.0}
        held = range(self.share.start * self.steps, self.share.stop * self.steps)
        total = self.slots.num_envs * self.steps
        waited = 0.0 if arriving is None else arriving.waited
        metrics = self.update_policy.run(flat, held, total, step, rate, arriving)
        explained = self._explained_variance(flat["values"], flat["returns"], flat["mask"])
        self._observe(flat)
        self.updates += 1
        took = time.perf_counter() - start
        if arriving is not None:
            took -= arriving.waited - waited
        return {**metrics, "explained_variance": explained, "update_s": took}

    def _observe(self, flat: dict[str, torch.Tensor]) -> None:
        """Adds this step's observations to the policy's running statistics, once its update is done: until then, the
        statistics with which the policy acted and was trained stay in use.
        """
        normaliser = self.policy.normaliser
        if normaliser is None:
            return
        slots = len(self.share)
        observations = flat_numbers(rows_of(flat, "obs"))
        mask = (flat["mask"].reshape(slots, self.steps, -1) > 0).any(-1)
        moments = normaliser.moments(observations.reshape(slots, self.steps, -1), mask).cpu()
        if self.world_size > 1:
            moments = torch.cat(self.all_gather_object(moments))
        normaliser.update(moments.to(self.device))

    def _explained_variance(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
        """Returns 1 − Var(returns − values) / Var(returns) over all transitions that train, over all ranks."""
        if values.shape != returns.shape:  # returns of single actions, where no value is asked for
            return float("nan")
        error, target = ((returns - values) * mask).double(), (returns * mask).double()
        count = mask.double().sum()
        sums = torch.stack([count, error.sum(), (error * error).sum(), target.sum(), (target * target).sum()])
        n, e1, e2, r1, r2 = self.all_reduce(sums).tolist()
        variance = r2 / n - (r1 / n) ** 2
        return 1.0 - (e2 / n - (e1 / n) ** 2) / variance if variance > 0 else float("nan")
