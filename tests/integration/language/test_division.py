"""Training on two ranks, in micro-batches of a few tokens, is training on one rank: actor and critic, cut answers left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from test_reasoning import LanguageRun

pytestmark = pytest.mark.long(together=True)

STEP = (
    "algorithm.adv_type=gae", "algorithm.gae_lambda=0.9", "algorithm.loss_agg=seq-mean-token-sum-norm",
    "algorithm.overlong_filter=true", "rollout.max_new_tokens=6", "critic.optim.lr=1e-3", "runner.max_steps=2",
)  # fmt: skip
#: Rows without padding, where ranks have equally many micro-batches, and rectangles, where one may have nothing to value.
READINGS = {"rows": "true", "rectangles": "false"}


def rows(folder: Path, ranks: str, *overrides: str) -> list[dict[str, Any]]:
    places = f"cluster.component_placement={{actor: '{ranks}', critic: '{ranks}', rollout: '0'}}"
    run = LanguageRun(folder, *STEP, places, *overrides)
    run.train()
    return run.rows()


@pytest.mark.parametrize("reading", READINGS)
def test_two_ranks_train_as_one(tmp_path: Path, reading: str) -> None:
    keys = [f"{group}.use_remove_padding={READINGS[reading]}" for group in ("actor", "critic")]
    small = [f"{group}.max_tokens_per_micro_batch=32" for group in ("actor", "critic")]
    one = rows(tmp_path / "one", "0")
    two = rows(tmp_path / "two", "0:0-1", *keys, *small)
    assert 0 < one[0]["train/truncated"] < 1, "some answers are cut, and some are not"
    for expected, found in zip(one, two, strict=True):
        names = {name for name in expected if name.startswith(("train/", "critic/", "rollout/"))}
        assert names <= found.keys()
        # Which are 0 but for rounding, and the share of tokens that it meets.
        rounding = {f"train/mismatch_{name}" for name in ("kl", "abs", "unequal")}
        for name in names - rounding:
            assert found[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6), name
