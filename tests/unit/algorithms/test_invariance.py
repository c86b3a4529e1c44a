"""What must not change a loss or an advantage: the split, the mask's shape, garbage where the mask is off, rounding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.algorithms import (
    aggregate,
    calculate_adv_and_returns,
    entropy_loss,
    kl_penalty,
    overlong_penalty,
    policy_loss,
    register_policy_loss,
    value_loss,
    varied_groups,
)
from rlhpc.algorithms.losses import AGGREGATIONS
from rlhpc.runtime.errors import ConfigError

B, T = 7, 6
LOSSES = ("ppo", "gspo", "cispo", "decoupled_ppo")
ESTIMATORS = ("gae", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw")


def close(found: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Rows that start late, have holes, end early, or have no valid token."""
    draw = torch.Generator().manual_seed(0)
    normal = {
        name: 0.3 * torch.randn(B, T, generator=draw, dtype=torch.float64)
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "proximal_logprobs", "advantages", "values",
                     "old_values", "returns", "rewards")
    }  # fmt: skip
    mask = torch.rand(B, T, generator=draw) > 0.3
    mask[0, :3], mask[1, 4:], mask[2] = False, False, False
    mask[0, 3:], mask[1, :4] = True, True
    return {**normal, "loss_mask": mask}


def rows(batch: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
    return {name: x[part] for name, x in batch.items()}


def loss_of(kind: str, batch: dict[str, Tensor], logprobs: Tensor, **options: Any) -> Tensor:
    names = ("old_logprobs", "advantages", "loss_mask", "rollout_logprobs")
    given = {name: batch[name] for name in names}
    if kind == "decoupled_ppo":
        given["proximal_logprobs"] = batch["proximal_logprobs"]
    return policy_loss(kind, logprobs=logprobs, clip_ratio_c=3.0, tis_cap=1.1, **given, **options)[0]


class TestSplits:
    """Micro-batches and ranks: the shares of the global batch add up, in value and in gradient."""

    @pytest.mark.parametrize("how", AGGREGATIONS)
    @pytest.mark.parametrize("kind", LOSSES)
    def test_policy_loss(self, kind: str, how: str, batch: dict[str, Tensor]) -> None:
        whole = batch["logprobs"].clone().requires_grad_()
        total = loss_of(kind, batch, whole, loss_agg=how)
        total.backward()
        counts = {"global_tokens": batch["loss_mask"].sum(), "global_seqs": int(batch["loss_mask"].any(1).sum())}
        for bounds in ((0, 1, 4, 7), (0, 3, 7), (0, 2, 3, 7)):  # the last has a share without a valid token
            pieces = batch["logprobs"].clone().requires_grad_()
            summed = 0.0
            for first, last in itertools.pairwise(bounds):
                part = slice(first, last)
                share = loss_of(kind, rows(batch, part), pieces[part], loss_agg=how, **counts)
                share.backward()
                summed += share.item()
            assert summed == pytest.approx(total.item(), abs=1e-12)
            assert pieces.grad is not None and whole.grad is not None
            close(pieces.grad, whole.grad, 1e-12)

    @pytest.mark.parametrize("how", AGGREGATIONS)
    def test_value_and_entropy(self, how: str, batch: dict[str, Tensor]) -> None:
        counts = {"global_tokens": batch["loss_mask"].sum(), "global_seqs": batch["loss_mask"].any(1).sum()}

        def both(part: slice, **counts: Any) -> Tensor:
            b = rows(batch, part)
            value, _ = value_loss(
                values=b["values"], returns=b["returns"], loss_mask=b["loss_mask"], old_values=b["old_values"],
                value_clip=0.1, loss_agg=how, **counts,
            )  # fmt: skip
            return value - 0.01 * entropy_loss(b["logprobs"], b["loss_mask"], how, **counts)

        close(both(slice(0, 2), **counts) + both(slice(2, B), **counts), both(slice(0, B)), 1e-12)

    @pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
    def test_groups_apart(self, name: str, batch: dict[str, Tensor]) -> None:
        ids = torch.tensor([4, 4, 4, 9, 9, 1, 1])
        given = {"rewards": batch["rewards"], "loss_mask": batch["loss_mask"]}
        whole, _ = calculate_adv_and_returns(name, **given, group_ids=ids)
        for part in (slice(0, 3), slice(3, 5), slice(5, 7)):
            alone, _ = calculate_adv_and_returns(name, **rows(given, part), group_ids=ids[part])
            close(alone, whole[part], 1e-12)

    def test_group_ids_are_labels_in_any_order(self) -> None:
        rewards = torch.tensor([[1.0], [5.0], [0.0], [7.0]], dtype=torch.float64)
        mixed, _ = calculate_adv_and_returns("rloo", rewards=rewards, group_ids=torch.tensor([8, -3, 8, -3]))
        close(mixed, [[1.0], [-2.0], [-1.0], [2.0]])


class TestMasks:
    """Only valid positions exist."""

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_holes_are_as_if_cut_out(self, name: str, batch: dict[str, Tensor]) -> None:
        mask = torch.tensor([[0, 0, 1, 0, 1, 1]], dtype=torch.bool).expand(4, T)
        kept = {key: batch[key][:4] for key in ("rewards", "values")}
        ends = torch.zeros(4, T, dtype=torch.bool)
        ends[0, 4] = True
        options: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8, "group_ids": torch.tensor([0, 0, 1, 1])}
        holes = calculate_adv_and_returns(name, **kept, loss_mask=mask, terminations=ends, **options)
        short = {key: x[mask].reshape(4, 3) for key, x in kept.items()}
        dense = calculate_adv_and_returns(name, **short, terminations=ends[mask].reshape(4, 3), **options)
        for found, expected in zip(holes, dense, strict=True):
            close(found[mask].reshape(4, 3), expected, 1e-12)
            assert (found[~mask] == 0).all()

    @pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("kind", LOSSES)
    def test_what_a_rollout_left_there_reaches_no_gradient(
        self, kind: str, garbage: float, batch: dict[str, Tensor]
    ) -> None:
        clean = batch["logprobs"].clone().requires_grad_()
        expected = loss_of(kind, batch, clean)
        expected.backward()
        for name in ("old_logprobs", "rollout_logprobs", "proximal_logprobs"):
            batch[name] = batch[name].masked_fill(~batch["loss_mask"], garbage)
        logprobs = batch["logprobs"].clone().requires_grad_()
        loss = loss_of(kind, batch, logprobs)
        loss.backward()
        assert logprobs.grad is not None and clean.grad is not None
        close(loss, expected.detach(), 1e-12)
        close(logprobs.grad, clean.grad, 1e-12)

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_garbage_reaches_no_advantage(self, name: str, batch: dict[str, Tensor]) -> None:
        mask = batch["loss_mask"]
        clean = {key: batch[key] for key in ("rewards", "values")}
        dirty = {key: x.masked_fill(~mask, float("nan")) for key, x in clean.items()}
        expected = calculate_adv_and_returns(name, **clean, loss_mask=mask, normalize=True, gamma=0.9)
        found = calculate_adv_and_returns(name, **dirty, loss_mask=mask, normalize=True, gamma=0.9)
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-12)

    @pytest.mark.parametrize("how", AGGREGATIONS)
    @pytest.mark.parametrize("kind", LOSSES)
    def test_nothing_valid(self, kind: str, how: str, batch: dict[str, Tensor]) -> None:
        batch["loss_mask"] = torch.zeros(B, T, dtype=torch.bool)
        logprobs = batch["logprobs"].clone().requires_grad_()
        loss = loss_of(kind, batch, logprobs, loss_agg=how)
        loss.backward()
        assert loss.item() == 0 and logprobs.grad is not None and (logprobs.grad == 0).all()


class TestEqualRewards:
    """A group that learned nothing from one another gives exactly 0, however its mean is rounded."""

    @pytest.mark.parametrize("value", [0.1, 0.7, 100.3, -3e4, 1e-7])
    @pytest.mark.parametrize("size", [2, 3, 7, 16])
    @pytest.mark.parametrize("kind", [torch.float32, torch.float64])
    def test_grpo(self, value: float, size: int, kind: torch.dtype) -> None:
        rewards = torch.full((size, 2), value, dtype=kind)
        assert (calculate_adv_and_returns("grpo", rewards=rewards)[0] == 0).all()

    def test_beside_a_group_that_varies(self) -> None:
        rewards = torch.tensor([[100.3]] * 7 + [[1.0], [0.0]])
        ids = torch.tensor([0] * 7 + [1, 1])
        advantages, _ = calculate_adv_and_returns("grpo", rewards=rewards, group_ids=ids)
        assert (advantages[:7] == 0).all()
        close(advantages[7:], [[0.7071058], [-0.7071058]])
        assert varied_groups(rewards[:, 0], ids).tolist() == [False] * 7 + [True, True]

    def test_no_rows(self) -> None:
        assert varied_groups(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


class TestFigures:
    """By hand."""

    def test_reinforce_plus_plus_with_kl_and_discount(self) -> None:
        mask = torch.tensor([[0, 1, 1, 1, 0]], dtype=torch.bool)
        rewards = torch.tensor([[0, 0, 0, 2.0, 0]], dtype=torch.float64)
        kl = torch.tensor([[9, 0.5, 1.0, 0.2, 9]], dtype=torch.float64)
        _, returns = calculate_adv_and_returns(
            "reinforce++", rewards=rewards, loss_mask=mask, gamma=0.5, kl=kl, kl_coef=0.1
        )
        last = 2 - 0.02
        close(returns, [[0, -0.05 + 0.5 * (-0.1 + 0.5 * last), -0.1 + 0.5 * last, last, 0]])

    def test_reinforce_plus_plus_without_variance_is_clamped(self) -> None:
        advantages, _ = calculate_adv_and_returns("reinforce++", rewards=torch.full((4, 1), 0.5))
        assert advantages.isfinite().all() and (advantages.abs() < 1e-3).all()

    def test_baseline_is_the_groups_mean(self) -> None:
        rewards = torch.tensor([[1.0], [0.0], [5.0], [5.0]], dtype=torch.float64)
        ids = torch.tensor([0, 0, 1, 1])
        advantages, returns = calculate_adv_and_returns("reinforce++_baseline", rewards=rewards, group_ids=ids)
        close(returns, [[0.5], [-0.5], [0.0], [0.0]])
        close(advantages, returns / returns.var(unbiased=False).sqrt())

    def test_clip_higher(self) -> None:
        logprobs = torch.log(torch.tensor([[1.5, 0.5]], dtype=torch.float64))
        loss, metrics = policy_loss(
            "ppo", logprobs=logprobs, old_logprobs=torch.zeros_like(logprobs),
            advantages=torch.tensor([[1.0, -1.0]], dtype=torch.float64), loss_mask=torch.ones(1, 2),
            clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg="token-sum",
        )  # fmt: skip
        assert loss.item() == pytest.approx(-1.28 + 0.8)
        assert metrics["clip_fraction"].item() == 1 and metrics["ratio"].item() == 1

    def test_truncated_importance_sampling(self) -> None:
        def loss(cap: float | None) -> tuple[float, float]:
            logprobs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
            value, _ = policy_loss(
                "ppo", logprobs=logprobs, old_logprobs=torch.zeros(1, 1, dtype=torch.float64),
                rollout_logprobs=torch.log(torch.tensor([[0.25]], dtype=torch.float64)), tis_cap=cap,
                advantages=torch.ones(1, 1, dtype=torch.float64), loss_mask=torch.ones(1, 1),
            )  # fmt: skip
            value.backward()
            assert logprobs.grad is not None
            return value.item(), logprobs.grad.item()

        assert loss(2.0) == pytest.approx((-2, -2))
        assert loss(10.0) == pytest.approx((-4, -4))
        assert loss(None) == pytest.approx((-1, -1))

    def test_behaviour_weight_is_capped(self) -> None:
        given = {name: torch.zeros(1, 1, dtype=torch.float64) for name in ("logprobs", "proximal_logprobs")}
        loss, metrics = policy_loss(
            "decoupled_ppo", old_logprobs=torch.full((1, 1), -3.0, dtype=torch.float64), behave_weight_cap=5.0,
            advantages=torch.ones(1, 1, dtype=torch.float64), loss_mask=torch.ones(1, 1), **given,
        )  # fmt: skip
        assert loss.item() == pytest.approx(-5.0) and metrics["behave_weight"].item() == pytest.approx(5.0)

    @pytest.mark.parametrize(
        ("how", "expected"),
        [("token-mean", 2.5), ("token-sum", 10), ("seq-mean-token-mean", 3), ("seq-mean-token-sum", 5),
         ("seq-mean-token-sum-norm", 5 / 4)],
    )  # fmt: skip
    def test_aggregation(self, how: str, expected: float) -> None:
        x = torch.tensor([[1.0, 9, 2, 3], [9, 4, 9, 9], [9, 9, 9, 9]], dtype=torch.float64)
        mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
        assert aggregate(x, mask, how).item() == pytest.approx(expected)

    def test_kl_aliases_and_far_references(self) -> None:
        p, q = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
        for alias, kind in (("kl", "k1"), ("MSE", "k2"), ("low_var_kl", "k3")):
            assert torch.equal(kl_penalty(p, q, alias), kl_penalty(p, q, kind))
        assert kl_penalty(torch.tensor([[-1e4]]), q, "k3").isfinite().all()


class TestNames:
    """Registries."""

    @pytest.mark.parametrize("alias", ["actor", "ACTOR_critic", "PPO"])
    def test_aliases_of_ppo(self, alias: str, batch: dict[str, Tensor]) -> None:
        assert torch.equal(loss_of(alias, batch, batch["logprobs"]), loss_of("ppo", batch, batch["logprobs"]))

    def test_a_name_that_is_taken_registers_nothing(self) -> None:
        def mine(**_: Any) -> None: ...

        with pytest.raises(ConfigError, match="'Ppo' is registered twice"):
            register_policy_loss("free-name", "Ppo")(mine)
        with pytest.raises(ConfigError, match="which is unknown"):
            policy_loss(
                "free-name", **dict.fromkeys(("logprobs", "old_logprobs", "advantages", "loss_mask"), torch.ones(1, 1))
            )

    def test_import_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "def double(*, rewards, mask, **_):\n    return 2 * rewards, rewards\nnumber = 3\n"
        (tmp_path / "their_advantage.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        assert calculate_adv_and_returns("their_advantage:double", rewards=torch.ones(1, 2))[0].tolist() == [[2, 2]]
        with pytest.raises(ConfigError, match="'their_advantage:number', which is a int, no class and no function"):
            calculate_adv_and_returns("their_advantage:number", rewards=torch.ones(1, 2))

    @pytest.mark.parametrize("path", ["nosuch_module:f", "torch:nosuch", ":f", ".relative:f", "torch:"])
    def test_import_path_that_leads_nowhere(self, path: str) -> None:
        with pytest.raises(ConfigError, match=f"algorithm.adv_type is '{path}'"):
            calculate_adv_and_returns(path, rewards=torch.ones(1, 1))

    def test_unknown_aggregation(self) -> None:
        with pytest.raises(ConfigError, match="allowed: token-mean"):
            aggregate(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), "mean")

    def test_options_that_make_no_sense(self, batch: dict[str, Tensor]) -> None:
        with pytest.raises(ConfigError, match="above 1"):
            policy_loss(
                "ppo",
                clip_ratio_c=0.5,
                **{k: batch[k] for k in ("logprobs", "old_logprobs", "advantages", "loss_mask")},
            )
        with pytest.raises(ConfigError, match="needs old_values"):
            value_loss(values=batch["values"], returns=batch["returns"], loss_mask=batch["loss_mask"], value_clip=0.2)
        with pytest.raises(ConfigError, match="buffer is 0"):
            overlong_penalty(lengths=torch.tensor([3]), max_length=5, buffer=0)
        with pytest.raises(ConfigError, match="needs values"):
            calculate_adv_and_returns("gae", rewards=batch["rewards"])
        with pytest.raises(ConfigError, match="group_ids has shape"):
            calculate_adv_and_returns("grpo", rewards=batch["rewards"], group_ids=torch.zeros(B + 1))
