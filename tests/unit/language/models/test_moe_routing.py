"""Expert routing: recorded choices, replay of an engine's choices, and the balance loss."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

import torch
from torch import Tensor, nn

from rlhpc.language.models.moe_routing import EXPERTS, Routing, load_balance_loss, replayed_experts, routing_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError


class Router(nn.Module):
    """Router that chooses the 2 most likely of 4 experts."""

    top_k = 2

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states @ self.weight.T
        probabilities, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, probabilities, experts


HIDDEN = torch.randn(5, 3, generator=torch.Generator().manual_seed(9))


def test_choices_are_recorded_within_the_block_alone() -> None:
    routers = [Router(0), Router(1)]
    routing = Routing([*routers])
    assert routing.choices == 4
    with routing.watch() as outputs:
        expected = [router(HIDDEN) for router in routers]
    routers[0](HIDDEN)
    assert [(logits.tolist(), experts.tolist()) for logits, experts in outputs] == [
        (logits.tolist(), experts.tolist()) for logits, _, experts in expected
    ]


def test_a_replayed_router_takes_the_given_experts_weighted_by_its_own_probabilities() -> None:
    router = Router(0)
    routing = Routing([router])
    own = router(HIDDEN)
    replayed = torch.tensor([[3, 0], [0, 1], [-1, -1], [2, 3], [1, 2]])
    routing.replay(replayed)
    logits, probabilities, experts = router(HIDDEN)
    expected = torch.where(replayed < 0, own[2], replayed)
    assert torch.equal(experts, expected) and torch.equal(probabilities, logits.softmax(-1).gather(-1, expected))
    probabilities.sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0
    routing.replay(None)
    assert torch.equal(router(HIDDEN)[2], own[2])


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    class Sorting(Router):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden @ self.weight.T
            return logits, logits, logits.argsort(-1)[:, :2]

    router = Sorting(0)
    Routing([router]).replay(torch.zeros(5, 2, dtype=torch.long))
    with pytest.raises(ConfigError, match="Sorting does not choose experts as others do"):
        router(HIDDEN)


def batch_of(lengths: list[int], **columns: list[Any]) -> TokenBatch:
    return TokenBatch.from_sequences([[1] * n for n in lengths], [[True] * n for n in lengths], columns)


def test_the_balance_loss_is_k_where_routing_is_even_and_larger_where_one_expert_is_favoured() -> None:
    batch = batch_of([4]).read_by(True)
    even = (torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))
    loss, largest_share = load_balance_loss([even], batch)
    assert loss == pytest.approx(2.0) and largest_share == pytest.approx(1.0)
    skewed = (torch.tensor([[9.0, 0, 0, 0]]).repeat(4, 1), torch.tensor([[0, 1]] * 4))
    loss, largest_share = load_balance_loss([skewed], batch)
    assert loss > 3.9 and largest_share == pytest.approx(2.0)


def test_padding_does_not_count_in_the_balance_loss() -> None:
    batch = batch_of([3, 1])  # a rectangle of 2 x 3
    generator = torch.Generator().manual_seed(1)
    logits, experts = torch.randn(6, 4, generator=generator), torch.randint(4, (6, 2), generator=generator)
    rows = torch.tensor([0, 1, 2, 3])
    expected = load_balance_loss([(logits[rows], experts[rows])], batch.read_by(True))
    assert torch.equal(torch.stack(load_balance_loss([(logits, experts)], batch)), torch.stack(expected))


def test_replayed_experts_have_the_form_that_the_model_reads() -> None:
    assert replayed_experts(batch_of([2])) is None
    batch = batch_of([2, 1], **{EXPERTS: [torch.tensor([[1, 2], [3, 0]]), torch.tensor([[2, 1]])]})
    rectangle = replayed_experts(batch)
    packed = replayed_experts(batch.read_by(True))
    assert rectangle is not None and rectangle.tolist() == [[1, 2], [3, 0], [2, 1], [-1, -1]]
    assert packed is not None and packed.tolist() == [[1, 2], [3, 0], [2, 1]]


def test_a_module_without_a_model_of_transformers_has_no_routing() -> None:
    assert routing_of(nn.Linear(2, 2)) is None
