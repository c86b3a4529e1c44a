"""What a role moves to the host leaves memory that torch keeps for itself: it goes back last, when all has been moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import TEACHER_INDEX, scoring_groups
from rlhpc.language.scoring.logprobs import LogProbs, RoutedLogProbs, TopLogProbs
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.language.scoring.reward_models import ProcessRewards
from rlhpc.language.workers.scoring import ScoringWorker
from tests.unit.language.scoring.moved import accelerator_events, scorer  # noqa: F401 (a fixture)


@pytest.mark.parametrize("cls", [LogProbs, ProcessRewards])
def test_a_rank_that_scores_gives_its_memory_back(cls: type, said: list[str]) -> None:
    worker: Any = ScoringWorker.__new__(ScoringWorker)
    worker.scorer = scorer(cls, said)
    worker.offload()
    assert said == ["moved", "given back"]


# -- several teachers

SIZES = (
    {"hidden": 32, "layers": 2, "heads": 2, "seed": 1, "context": 512},
    {"hidden": 64, "layers": 1, "heads": 4, "seed": 2, "context": 512},
)


def config(mode: str) -> GrpoConfig:
    """Returns the configuration of a distillation with three teachers: the built-in model, and two others by task."""
    cfg: Any = default_section(GrpoConfig)
    teachers = [
        {"name": f"t{i}", "tasks": [str(i)], "model": {"model_path": "builtin:tiny", "kwargs": kwargs}}
        for i, kwargs in enumerate(SIZES)
    ]
    changes = {
        "actor": {"model": {"model_path": "builtin:tiny", "dtype": "float32"}, "share_prefixes": True},
        "teacher": {"model": {"model_path": "builtin:tiny", "kwargs": {"context": 512}}, "by_task": teachers},
        "algorithm": {"name": "distillation", "distillation": {"mode": mode, "topk": 5}},
        "rollout": {"temperature": 0.8},
    }
    cfg = OmegaConf.merge(cfg, changes)
    for model in (cfg.actor.model, cfg.teacher.model, *(teacher.model for teacher in cfg.teacher.by_task)):
        model.model_path, model.dtype = resolve_model(model), "float32"
        model.kwargs = {}
    return cfg  # type: ignore[no-any-return]


@pytest.fixture
def routed_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenBatch:
    """Samples of three teachers in mixed order, two of each prompt with the same first tokens; one has no answer."""
    monkeypatch.setenv("RLHPC_MODELS", str(tmp_path))
    generator, owners = torch.Generator().manual_seed(3), (2, 2, 0, 0, 1, 1, 2, 2)
    num_prompt_tokens = 40
    lengths = [num_prompt_tokens + n for n in (5, 2, 7, 3, 4, 1, 6, 2)]
    masks = [torch.arange(length) >= num_prompt_tokens for length in lengths]
    masks[3][:] = False
    columns = [(torch.arange(n) >= num_prompt_tokens) * float(i) for n, i in zip(lengths, owners, strict=True)]
    ids = [torch.randint(3, 40, (length,), generator=generator) for length in lengths]
    for first, second in zip(ids[::2], ids[1::2], strict=True):
        second[:num_prompt_tokens] = first[:num_prompt_tokens]
    batch = TokenBatch.from_sequences(ids, masks, {TEACHER_INDEX: columns})
    return replace(batch, group=batch.group // 2)


def single_teachers(cfg: GrpoConfig, cls: type, **options: Any) -> list[Any]:
    """Returns a scorer of one teacher for each model."""
    group, device = scoring_groups(cfg)["teacher"], torch.device("cpu")
    models = [cfg.teacher.model, *(teacher.model for teacher in cfg.teacher.by_task)]
    return [cls(cfg, device, type(group)("teacher", "", model, 1024), **options) for model in models]


@pytest.mark.parametrize(("mode", "cls", "options"), [("sampled", LogProbs, {}), ("topk", TopLogProbs, {"k": 5})])
@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_each_sample_is_scored_by_its_teacher(
    mode: str, cls: type, options: dict[str, Any], shares_prefixes: bool, routed_batch: TokenBatch
) -> None:
    cfg = config(mode)
    routed = make_scorer(cfg, torch.device("cpu"), scoring_groups(cfg)["teacher"])
    assert isinstance(routed, RoutedLogProbs) and routed.packed and routed.shares_prefixes
    batch = routed_batch.read_by(True)
    if shares_prefixes:
        batch = batch.sharing_prefixes()
        assert batch.inputs()["input_ids"].shape[1] < batch.tokens
    values = routed.score(batch)
    for index, teacher in enumerate(single_teachers(cfg, cls, **options)):
        expected, is_owner = teacher.score(batch), (batch.columns[TEACHER_INDEX] == index) & batch.mask
        assert is_owner.any()
        torch.testing.assert_close(values[is_owner], expected[is_owner], rtol=0, atol=2e-5)
    empty = batch.select(torch.zeros(0, dtype=torch.long))
    assert routed.score(empty).shape == values[:0].shape and len(routed.score(batch.empty_sample())) == 0


def test_rows_of_logits_are_those_of_each_samples_teacher(routed_batch: TokenBatch) -> None:
    """In any slices; a narrower teacher gives the other tokens probability 0."""
    cfg, batch = config("full"), routed_batch.read_by(True)
    routed = make_scorer(cfg, torch.device("cpu"), scoring_groups(cfg)["teacher"])
    narrow = routed.teachers[1].model
    narrow.resize_token_embeddings(narrow.config.vocab_size - 3)
    rows, teachers = routed.rows(batch), routed.teachers
    trained_tokens = batch.predictors()[0]
    owners = batch.columns[TEACHER_INDEX][trained_tokens]
    assert rows.number == len(trained_tokens) and rows.width == teachers[0].rows(batch).width
    logits = torch.cat([rows.make(slice(start, min(start + 4, rows.number))) for start in range(0, rows.number, 4)])
    for index, teacher in enumerate(teachers):
        expected = teacher.rows(batch)
        own_rows = logits[owners == index]
        torch.testing.assert_close(
            own_rows[:, : expected.width], expected.make(slice(0, expected.number))[owners == index], rtol=0, atol=2e-5
        )
        assert bool((own_rows[:, expected.width :] == -torch.inf).all())
    assert teachers[1].rows(batch).width == rows.width - 3
    assert routed.rows(batch.select(torch.zeros(0, dtype=torch.long))).number == 0
