"""Merged adapters on shards: what is sent is what was trained."""

from __future__ import annotations

import pytest
import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.training import lora as merging
from tests.extras import need_extra

need_extra("llm")

from tests.unit.training.adapters import DTYPES, MODELS, RATES, Adapted


@RATES
@DTYPES
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("how", ["by peft", "by hand"])
def test_adapters_that_were_merged_already_are_not_merged_again(
    how: str, family: str, rate: float, dtype: torch.dtype
) -> None:
    """Also after one step at the smallest learning rate, wherever it changes a bit of the base at all."""
    adapted = Adapted(family, dtype)
    before = adapted.base.clone()
    assert torch.equal(adapted.sent(), before)
    adapted.step(rate)
    expected = (before.float() + adapted.delta()).to(dtype)
    for _ in range(3):
        assert torch.equal(adapted.sent(), expected)
    if how == "by peft":
        adapted.model.merge_adapter()
    else:
        adapted.base += adapted.delta().to(dtype)
    assert not torch.equal(adapted.base, before)
    with pytest.raises(RlhpcError, match=rf"^{adapted.name} has changed, .* merged twice"):
        adapted.sent()


@DTYPES
@pytest.mark.parametrize("family", MODELS)
def test_a_thousand_sound_updates_are_all_sent(family: str, dtype: torch.dtype) -> None:
    """200 a family and dtype, from where rounding hides them to where they are larger than the weights."""
    adapted = Adapted(family, dtype)
    before = adapted.base.clone()
    for update in range(200):
        assert torch.equal(adapted.sent(update % 2 == 1), (before.float() + adapted.delta()).to(dtype))
        adapted.step(10.0 ** (update % 8 - 7))


def test_factors_that_a_kernel_rounds_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ten bits, as some accelerators' do where they are asked for it."""
    adapted, sound = Adapted("dense", torch.float32), merging._sum

    def rounded(factor: torch.Tensor) -> torch.Tensor:
        return ((factor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    monkeypatch.setattr(merging, "_sum", lambda base, a, b, *more: sound(base, rounded(a), rounded(b), *more))
    before = adapted.base.clone()
    for update in range(50):
        adapted.step(10.0 ** (update % 6 - 6))
        sent = adapted.sent()
        torch.testing.assert_close(sent, before + adapted.delta(), rtol=1e-2, atol=1e-2)
    assert not torch.equal(sent, before + adapted.delta())
