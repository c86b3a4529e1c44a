"""Rewards at the ends of an answer's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.models import FrozenModelConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data import load_tokenizer
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import last_values, token_values
from rlhpc.language.scoring.registry import ScoringGroup
from rlhpc.language.scoring.reward_models import ProcessRewards
from rlhpc.runtime.errors import ConfigError
from tests.classifiers import save_classifier

#: Pieces of an answer, the part that was written by others in brackets; and how many characters each step's end is in.
CASES: dict[str, tuple[list[str], list[int]]] = {
    "lines": (["1+2-=3-"], [4, 7]),
    "no last separator": (["1+2-=3"], [4, 6]),
    "two separators are one end": (["12--34-"], [3, 7]),
    "nothing but separators": (["--"], []),
    "a tool between": (["12-3", "(9-9-9)", "4-5"], [3, 4, 11, 12]),
    "nothing": ([""], []),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHPC_MODELS", str(tmp_path_factory.mktemp("models")))
        return save_classifier(tmp_path_factory.mktemp("process"))


def scorer(model: Path, **kwargs: Any) -> ProcessRewards:
    cfg = typed(GrpoConfig, default_section(GrpoConfig))
    group = ScoringGroup("steps", "process", FrozenModelConfig(model_path=str(model)), 4096)
    return ProcessRewards(cfg, torch.device("cpu"), group, separator="-", **kwargs)


def batch_of(model: Path, cases: dict[str, tuple[list[str], list[int]]]) -> tuple[TokenBatch, list[int]]:
    """The cases behind a prompt, as token ids; each character of theirs is one. And the prompt's length."""
    tokenizer = load_tokenizer(str(model), False)
    prompt = tokenizer("1+1=", add_special_tokens=False)["input_ids"]
    ids, masks = [], []
    for pieces, _ in cases.values():
        text = [(piece, not piece.startswith("(")) for piece in pieces]
        rows = [(tokenizer(piece.strip("()"), add_special_tokens=False)["input_ids"], own) for piece, own in text]
        ids.append([*prompt, *(one for row, _ in rows for one in row)])
        masks.append([False] * len(prompt) + [own for row, own in rows for _ in row])
    return TokenBatch.from_sequences(ids, masks, pad_id=0), [len(prompt)] * len(ids)


def test_a_step_is_worth_what_the_model_says_of_the_text_up_to_it(model: Path) -> None:
    batch, starts = batch_of(model, CASES)
    found = batch.padded(scorer(model).score(batch))
    changes = batch.padded(scorer(model, change=True).score(batch))
    squashed = batch.padded(scorer(model, sigmoid=True).score(batch))
    module = scorer(model).model

    def value(sample: int, stop: int) -> float:
        part = batch.select(torch.tensor([sample]))
        cut = TokenBatch.from_sequences([part.ids[:stop]], [part.mask[:stop]], pad_id=0)
        with torch.no_grad():
            return last_values(token_values(module, cut), cut).item()

    for sample, (name, (_, ends)) in enumerate(CASES.items()):
        places = [starts[sample] + end - 1 for end in ends]
        assert torch.nonzero(found[sample]).flatten().tolist() == places, name
        before = starts[sample]
        for place in places:
            now = value(sample, place + 1)
            assert found[sample, place].item() == pytest.approx(now, abs=1e-5), name
            assert squashed[sample, place].item() == pytest.approx(torch.tensor(now).sigmoid().item(), abs=1e-5)
            if name != "a tool between":  # there, what a tool wrote is no step's
                assert changes[sample, place].item() == pytest.approx(now - value(sample, before), abs=1e-5), name
            before = place + 1
        if places and name != "a tool between":  # changes add up to that of the whole
            assert changes[sample].sum().item() == pytest.approx(
                value(sample, places[-1] + 1) - value(sample, starts[sample]), abs=1e-5
            )


def test_an_end_must_have_a_sign(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"groups\[steps\].kwargs.separator is empty"):
        ProcessRewards(
            typed(GrpoConfig, default_section(GrpoConfig)), torch.device("cpu"),
            ScoringGroup("steps", "process", FrozenModelConfig(model_path=str(model)), 4096), separator="",
        )  # fmt: skip
