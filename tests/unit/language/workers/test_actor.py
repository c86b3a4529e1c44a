"""The trainer's rank with what rollout ranks may hand over, on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.algorithms.nonfinite import MAX_IN_A_ROW, SkippedSteps
from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.models import FrozenModelConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.micro_batching import minibatch_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.prompt_dispatch import PromptMap
from rlhpc.language.workers.grpo_actor import GrpoActor
from rlhpc.runtime.errors import NonFinite, RlhpcError

TINY = {"hidden": 16, "layers": 1, "heads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHPC_MODELS", str(tmp_path_factory.mktemp("models")))
        return str(resolve_model(FrozenModelConfig(model_path="builtin:tiny", kwargs=TINY)))


def actor(model: str, *, actor: dict[str, Any] | None = None, **algorithm: Any) -> GrpoActor:
    """Of two prompts with two answers each; an optimizer step has two, unless the section `actor` says otherwise."""
    given = {
        "algorithm": {"group_size": 2, **algorithm}, "data": {"prompts_per_step": 2},
        "actor": {"global_batch_size": 2, "model": {"model_path": model}, **(actor or {})},
        "teacher": {"model": {"model_path": model}},
    }  # fmt: skip
    made = GrpoActor(typed(GrpoConfig, OmegaConf.merge(default_section(GrpoConfig), given)))
    made.init_worker(1, PromptMap(2, 2, 1, 1))
    return made


def test_groups_without_samples_have_all_columns_and_train_nothing(model: str) -> None:
    """A part of a step's groups has none at all, and so has a minibatch: one of two, for one sample."""
    trainer = actor(
        model,
        update_epochs=1,
        name="distillation",
        distillation={"mode": "topk", "topk": 3},
        recompute_logprobs=True,
        kl_coef=0.1,
    )
    known = {
        "rollout_logprobs": [torch.tensor([0.0, 0.0, -1.0, -2.0])],
        "versions": [torch.tensor([-1.0, -1.0, 0.0, 0.0])],
    }
    some = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, False, True, True]], known)
    some.episode, some.group = torch.tensor([3]), torch.tensor([1])
    none = some.select(torch.zeros(0, dtype=torch.long))
    assert not len(none) and not none.tokens
    for part in (none, some):
        trainer._recompute_logprobs(part, 1)
    shapes = {name: tuple(values.shape) for name, values in TokenBatch.joined([none, some]).columns.items()}
    assert shapes == {
        "rollout_logprobs": (4,), "versions": (4,), "old_logprobs": (4,), "ref_logprobs": (4,),
        "teacher_top_logprobs": (4, 4, 2),
    }  # fmt: skip
    trainer._batches, trainer._received_step, trainer._returns = [none, some], 1, None
    found = trainer.update(1)
    assert (found["updates"], found["empty_minibatches"], found["tokens"]) == (1, 1, 2)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_minibatch_without_a_trained_token_takes_no_step(model: str, on_nonfinite: str) -> None:
    """Nor is it in a mean: momentum and weight decay move nothing, whatever follows numbers that are not finite."""
    trainer = actor(model, update_epochs=2, adv_type="raw")
    trainer.skips = SkippedSteps(on_nonfinite == "skip")
    columns = {"rollout_logprobs": [torch.tensor([0.0, -1.0, -2.0])], "versions": [torch.tensor([-1.0, 0.0, 0.0])]}
    some = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]], columns)
    some.reward = torch.ones(1)

    def update(step: int, *parts: TokenBatch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        trainer._batches, trainer._received_step, trainer._returns = list(parts), step, None
        metrics = trainer.update(step)
        return metrics, {name: tensor.clone() for name, tensor in trainer.backend.local_tensors()}

    metrics, before = update(1, some)
    assert (metrics["updates"], metrics["empty_minibatches"]) == (2, 2), "the momentum is not 0"
    assert metrics["entropy"] == pytest.approx(3.8, abs=0.3), "of a model of 45 tokens that has learned nothing"
    none = some.select(torch.zeros(0, dtype=torch.long))
    metrics, after = update(2, none)
    assert (metrics["updates"], metrics["empty_minibatches"], metrics["tokens"]) == (0, 4, 0)
    assert "loss" not in metrics and all(torch.equal(before[name], after[name]) for name in before)


def test_an_overflow_of_float16_is_no_fault_but_a_loss_that_is_not_finite_is(model: str) -> None:
    """`runner.on_nonfinite: stop` lets the scale fall until steps are taken, more than ten times in a row."""
    section = {"model": {"model_path": model, "dtype": "float16"}, "grad_scaler": {"init_scale": 2.0**60}}
    trainer = actor(model, update_epochs=1, adv_type="raw", actor=section)
    columns = {"rollout_logprobs": [torch.tensor([0.0, -1.0, -2.0])], "versions": [torch.tensor([-1.0, 0.0, 0.0])]}
    some = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]], columns)

    def update(step: int, reward: float) -> dict[str, float]:
        some.reward = torch.tensor([reward])
        trainer._batches, trainer._received_step, trainer._returns = [some], step, None
        return trainer.update(step)

    before = {name: tensor.clone() for name, tensor in trainer.backend.local_tensors()}
    scale, step = 2.0**60, 1
    while (metrics := update(step, 1.0))["overflow_skipped"]:
        assert (metrics["updates"], metrics["overflow_skipped"], metrics["loss_scale"]) == (0, 1, scale / 2)
        assert "nonfinite_skipped" not in metrics
        assert all(torch.equal(before[name], tensor) for name, tensor in trainer.backend.local_tensors())
        scale, step = scale / 2, step + 1
    assert step > MAX_IN_A_ROW + 1 and scale > 1.0
    assert (metrics["updates"], metrics["loss_scale"]) == (1, scale) and metrics["grad_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.backend.local_tensors())
    with pytest.raises(NonFinite, match="gradient's norm is nan, and so are"):
        update(step + 1, float("nan"))


@pytest.mark.parametrize(
    ("parallel", "dtype", "bound"), [(1, "float32", 0.0), (2, "float32", 1e-5), (2, "bfloat16", 0.04)]
)
def test_a_deterministic_run_ends_where_log_probs_differ(
    model: str, monkeypatch: pytest.MonkeyPatch, parallel: int, dtype: str, bound: float
) -> None:
    """In any bit; or, where ranks compute parts of sums, by more than a bound. Before the step counts as trained."""
    trainer = actor(model, update_epochs=1, actor={"model": {"model_path": model, "dtype": dtype}})
    threads = torch.get_num_threads()
    trainer.cfg.runner.deterministic, trainer.cfg.actor.parallel.tensor = True, parallel
    trainer.backend.blueprint.exact = parallel == 1
    some = drawn([6, 6, 6, 6])
    trainer._batches, trainer._received_step, trainer._returns = [some], 1, None
    with pytest.raises(RlhpcError, match=r"step 1: runner\.deterministic: .*train/mismatch_abs reports"):
        trainer.update(1)
    assert trainer.version == 0
    trainer._require_agreement(1, {"mismatch_abs": bound, "mismatch_unequal": 0.0 if parallel == 1 else 1.0})
    with pytest.raises(RlhpcError):
        trainer._require_agreement(1, {"mismatch_abs": bound * 1.01 + 1e-9, "mismatch_unequal": 1e-6})
    trainer.cfg.runner.deterministic = False
    trainer._require_agreement(1, {"mismatch_abs": 1.0, "mismatch_unequal": 1.0})
    torch.set_num_threads(threads)


def test_special_tokens_are_a_class_of_the_mismatch(model: str) -> None:
    """Those that were added to the vocabulary; here the end of the text."""
    trainer = actor(model, update_epochs=1)
    some = drawn([6, 6, 6, 6])
    end, ends = trainer.tokenizer.eos_token_id, some.cu_seqlens[1:] - 1
    some.ids[ends[:2]] = end
    trainer._batches, trainer._received_step, trainer._returns = [some], 1, None
    metrics = trainer.update(1)
    # Two optimizer steps, of which the first counts.
    special = int(torch.isin(some.ids[some.mask], torch.tensor(sorted(trainer.tokenizer.added_tokens_decoder))).sum())
    assert special >= 2 and metrics["mismatch_share/special"] > 0 and metrics["mismatch_abs/special"] > 0


def drawn(lengths: list[int]) -> TokenBatch:
    """Answers of a few tokens, two to each prompt."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 40, (length,), generator=generator) for length in lengths]
    masks = [[False, *[True] * (length - 1)] for length in lengths]
    columns = {
        "rollout_logprobs": [-4 + torch.rand(length, generator=generator) for length in lengths],
        "versions": [torch.zeros(length) for length in lengths],
    }
    batch = TokenBatch.from_sequences(ids, masks, columns)
    batch.group, batch.reward = batch.episode // 2, torch.rand(len(lengths), generator=generator)
    return batch


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("minibatch", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "is_skipped"),
    [
        ({}, True),
        ({"tis_cap": 2.0}, True),
        ({"loss_type": "decoupled_ppo"}, True),
        ({"kl_coef": 0.1}, True),
        ({"kl_coef": 0.1, "kl_in": "reward"}, False),
        ({"update_epochs": 2}, False),
        ({"name": "distillation", "distillation": {"mode": "topk", "topk": 3}}, False),
        ({"adv_type": "gae"}, False),
    ],
    ids=str,
)
def test_the_first_minibatch_is_scored_by_its_own_forward_pass(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: dict[str, Any],
    is_skipped: bool,
    minibatch: int,
    offloads: bool,
) -> None:
    """The samples of a step's first minibatch are not scored where the loss alone reads their log-probs; and the update is
    the same as if they were."""
    results = []
    for skips_scoring in (True, False):
        trainer = actor(
            model,
            recompute_logprobs=True,
            actor={"global_batch_size": minibatch, "offload_in_rollout": offloads,
                   "model": {"model_path": model, "value_head": algorithm.get("adv_type") == "gae"}},
            **{"adv_type": "rloo", **algorithm},
        )  # fmt: skip
        assert bool(trainer._columns_of_loss) == is_skipped
        if not skips_scoring:
            trainer._columns_of_loss = []
        scored: list[int] = []
        forward = trainer.backend.forward

        def counted(batch: TokenBatch, forward: Any = forward, scored: list[int] = scored, **options: Any) -> Any:
            scored.append(batch.tokens)
            return forward(batch, **options)

        monkeypatch.setattr(trainer.backend, "forward", counted)
        batch = drawn([5, 3, 7, 4])
        parts = [batch.select(torch.tensor([0, 1])), batch.select(torch.tensor([2, 3]))]
        if not offloads:
            for part in parts:
                trainer._recompute_logprobs(part, 1)
        trainer._batches, trainer._received_step, trainer._returns = parts, 1, None
        metrics = trainer.update(1)
        first = minibatch_of(batch, 4, minibatch, (trainer.seed, 1, 0)) == 0
        skipped_tokens = int(batch.lengths[first].sum()) if is_skipped and skips_scoring else 0
        assert sum(scored) == batch.tokens - skipped_tokens
        weights = {name: tensor.clone() for name, tensor in trainer.backend.local_tensors()}
        results.append(({name: value for name, value in metrics.items() if not name.endswith("_s")}, weights))
    (metrics, weights), (expected_metrics, expected_weights) = results
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], rtol=1e-4, atol=1e-6, msg=name)
