"""Division invariance: loss, gradient and metrics of a minibatch do not depend on how it is divided.

A minibatch is divided in each of many random ways: groups over ranks, orders of groups and episodes, turns of an episode over
samples, samples over ranks (load balance) and micro-batches. The functions are those that train; the ranks are threads.
The reference has each episode in one piece, on one rank, in one micro-batch.

Exceptions, by definition: the ratio of GSPO and of corrections of sequences is a sample's, and losses of routers are a
micro-batch's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.algorithms.losses import AGGREGATIONS
from rlhpc.language.algorithms.base import ADVANTAGES, MinibatchCounts, length_limit
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch, cumulate
from tests.drawn import drawn

from .test_policy_gradient import config

GROUPS, SIZE, ROLES, TURNS = 4, 4, 2, 5
DIVISIONS = 200
COLUMNS = (
    "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "teacher_logprobs", "turn_rewards",
)  # fmt: skip
#: What is trained by: an estimator with a policy loss, KL and entropy, a value head for gae; or a teacher.
VARIANTS: dict[str, dict[str, Any]] = {
    "gae": {"adv_type": "gae", "gamma": 0.9, "gae_lambda": 0.8, "value_clip": 0.3},
    "grpo": {"adv_type": "grpo"},
    "dr_grpo": {"adv_type": "dr_grpo", "loss_type": "cispo"},
    "rloo": {"adv_type": "rloo", "recompute_logprobs": True, "tis_cap": 1.1},
    "reinforce++": {"adv_type": "reinforce++", "gamma": 0.9},
    "reinforce++, penalty in the reward": {"adv_type": "reinforce++", "gamma": 0.9, "kl_in": "reward"},
    "reinforce++_baseline": {"adv_type": "reinforce++_baseline", "gamma": 0.9},
    "raw": {"adv_type": "raw", "gamma": 0.9, "normalize_advantages": "batch"},
    "decoupled": {"adv_type": "rloo", "loss_type": "decoupled_ppo", "recompute_logprobs": True, "tis_cap": 1.1},
    "credit by turn": {"adv_type": "rloo", "credit": "turn", "turn_gamma": 0.7},
    "credit by state": {"adv_type": "grpo", "credit": "state", "turn_gamma": 0.7, "normalize_advantages": "batch"},
    "corrections of tokens": {
        "adv_type": "rloo",
        "recompute_logprobs": True,
        "loss_type": "decoupled_ppo",
        "corrections": [
            {"name": "token_rejection", "kwargs": {"high": 1.6}},
            {"name": "binary_tv", "kwargs": {"low": 0.3, "high": 0.3, "tau": 0.2}},
        ],
    },
    "corrections of sequences": {
        "adv_type": "rloo",
        "recompute_logprobs": True,
        "corrections": [
            {"name": "sequence_tis"},
            {"name": "k3", "kwargs": {"threshold": 0.2}},
            {"name": "geometric", "kwargs": {"low": 0.5, "high": 2.0}},
        ],
    },
    "gspo": {"adv_type": "grpo", "loss_type": "gspo"},
    "distillation, sampled": {"name": "distillation", "distillation": {"mode": "sampled", "task_reward_coef": 1.0}},
    "distillation, topk": {"name": "distillation", "distillation": {"mode": "topk", "task_reward_coef": 1.0}},
    "distillation, full": {"name": "distillation", "distillation": {"mode": "full"}},
}


@dataclass
class Turn:
    """A turn of the model: what it had just read, and what it drew. `uid` numbers drawn tokens; what is read has the last."""

    ids: Tensor
    mask: Tensor
    uid: Tensor


@dataclass
class Play:
    """A step's episodes: the turns of each role in each, and the values of each drawn token.

    Attributes:
        turns: By episode and role.
        columns: `[U + 1]`, by uid; the last is garbage that must reach nothing.
        leaves: `[U + 1]`: what the model says of each token.
    """

    turns: dict[tuple[int, int], list[Turn]]
    columns: dict[str, Tensor]
    leaves: dict[str, Tensor]
    rewards: Tensor


def play(dtype: torch.dtype) -> Play:
    draw = torch.Generator().manual_seed(11)
    turns, drawn = dict[tuple[int, int], list[tuple[int, int]]](), 0
    for episode in range(GROUPS * SIZE):
        for role in range(1 + episode % ROLES):
            number = int(torch.randint(1, TURNS + 1, (), generator=draw))
            turns[episode, role] = [tuple(torch.randint(1, 4, (2,), generator=draw).tolist()) for _ in range(number)]
            drawn += sum(tokens for _, tokens in turns[episode, role])
    numbers = iter(range(drawn))
    made = {
        key: [
            Turn(
                torch.randint(3, 5, (read + tokens,), generator=draw),
                torch.arange(read + tokens) >= read,
                torch.tensor([drawn] * read + [next(numbers) for _ in range(tokens)]),
            )
            for read, tokens in pairs
        ]
        for key, pairs in turns.items()
    }
    columns = {name: 0.4 * torch.randn(drawn + 1, generator=draw, dtype=torch.float64) for name in COLUMNS}
    leaves = {
        name: 0.4 * torch.randn(drawn + 1, generator=draw, dtype=torch.float64)
        for name in ("logprobs", "entropy", "values", "read")
    }
    for values in columns.values():
        values[-1] = 1e3
    rewards = torch.randn(GROUPS * SIZE, generator=draw, dtype=torch.float64).to(dtype)
    rewards[:SIZE] = 0.3  # a group whose rewards are equal, though each is paid in parts
    return Play(made, *({name: x.to(dtype) for name, x in some.items()} for some in (columns, leaves)), rewards)  # type: ignore[call-arg]


def batch_of(given: Play, samples: Sequence[tuple[int, int, Sequence[int]]]) -> TokenBatch:
    """Samples as (episode, role, numbers of its turns), each after a prompt token."""
    ids, mask, turn, uid, lengths = [], [], [], [], []
    nothing = len(given.leaves["logprobs"]) - 1
    for episode, role, numbers in samples:
        parts = [(number, given.turns[episode, role][number]) for number in numbers]
        ids += [torch.tensor([1]), *(part.ids for _, part in parts)]
        mask += [torch.tensor([False]), *(part.mask for _, part in parts)]
        uid += [torch.tensor([nothing]), *(part.uid for _, part in parts)]
        turn += [torch.tensor([0]), *(torch.full_like(part.ids, number) for number, part in parts)]
        lengths.append(1 + sum(len(part.ids) for _, part in parts))
    uids = torch.cat(uid)
    episodes, roles = (torch.tensor([sample[at] for sample in samples], dtype=torch.long) for at in (0, 1))
    columns = {name: values[uids] for name, values in given.columns.items()}
    return TokenBatch(
        cumulate(lengths), torch.cat(ids), torch.cat(mask), torch.cat(turn), episodes, roles, episodes // SIZE,
        given.rewards[episodes], {**columns, "uid": uids},
    )  # fmt: skip


class Ranks:
    """Ranks as threads, with a sum over them in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, [torch.zeros(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def all(self, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
        def reduce_of(rank: int) -> Callable[[Tensor], Tensor]:
            def reduce(tensor: Tensor) -> Tensor:
                self.held[rank] = tensor.clone()
                self.barrier.wait()
                total = torch.stack(self.held).sum(0)
                self.barrier.wait()
                return total

            return reduce

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(rank, reduce_of(rank)), range(self.size)))


Cut = Callable[[TokenBatch], list[list[TokenBatch]]]


@dataclass
class Trained:
    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, Tensor]


def trained(cfg: GrpoConfig, given: Play, batches: Sequence[TokenBatch], cut: Cut) -> Trained:
    """The loss of a minibatch whose samples are on ranks, by the functions that train.

    Args:
        batches: By rank.
        cut: Cuts the samples of all ranks into micro-batches, by rank: they may change ranks.
    """
    algorithm = make_algorithm(cfg)

    def prepare(rank: int, reduce: Callable[[Tensor], Tensor]) -> MinibatchCounts:
        batches[rank].columns[ADVANTAGES] = algorithm.advantages(batches[rank], reduce)
        return MinibatchCounts.from_batch(batches[rank], length_limit(cfg), reduce)

    wholes = Ranks(len(batches)).all(prepare)
    assert all(whole == wholes[0] for whole in wholes)
    leaves = {name: values.clone().requires_grad_() for name, values in given.leaves.items()}
    total, sums = torch.zeros(()), dict[str, Tensor]()
    for micro_batches in cut(TokenBatch.joined(batches)):
        for part in micro_batches:
            uid = part.columns["uid"]
            scores = TokenScores(
                leaves["logprobs"][uid], leaves["entropy"][uid] if algorithm.entropy else None, leaves["read"][uid],
                leaves["values"][uid],
            )  # fmt: skip
            loss, metrics = algorithm.loss(scores, part, wholes[0])
            loss.backward()
            total = total + loss.detach()
            sums = {name: sums.get(name, 0.0) + torch.as_tensor(value) for name, value in metrics.items()}
    gradients = {name: values.grad for name, values in leaves.items() if values.grad is not None}
    return Trained(total, gradients, sums)


def divided(given: Play, draw: torch.Generator, ranks: int, *, splits: bool) -> list[TokenBatch]:
    """Batches of ranks: groups and episodes in any order, and the turns of a role in an episode over any samples."""
    batches = []
    for share in torch.randperm(GROUPS, generator=draw).chunk(ranks):
        samples = []
        for group in share.tolist():
            for member in torch.randperm(SIZE, generator=draw).tolist():
                episode = group * SIZE + member
                for role in [role for role in range(ROLES) if (episode, role) in given.turns]:
                    owner = torch.randint(0, 3 if splits else 1, (len(given.turns[episode, role]),), generator=draw)
                    for part in owner.unique()[torch.randperm(len(owner.unique()), generator=draw)].tolist():
                        samples.append((episode, role, torch.nonzero(owner == part).flatten().tolist()))
        batches.append(batch_of(given, samples))
    return batches


def cut_anyhow(draw: torch.Generator, ranks: int) -> Cut:
    """Micro-batches of any samples on any rank, with one that has none."""

    def cut(batch: TokenBatch) -> list[list[TokenBatch]]:
        parts = []
        for share in torch.randperm(len(batch), generator=draw).chunk(ranks):
            size = int(torch.randint(1, len(share) + 1, (), generator=draw))
            parts.append([*(batch.select(samples) for samples in share.split(size)), batch.empty_sample()])
        return parts

    return cut


def settings(name: str, loss_agg: str) -> GrpoConfig:
    cfg = config(**{"kl_coef": 0.1, "entropy_coef": 0.01, "loss_agg": loss_agg, **VARIANTS[name]})
    cfg.agent.kind = "environment"
    cfg.agent.max_tokens = 64
    cfg.actor.model.value_head = cfg.algorithm.adv_type == "gae"
    return cfg


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    scale = expected.abs().max().clamp(min=1e-2)
    assert (found - expected).abs().max() <= tolerance * scale, f"{name}: {found} is not {expected}"


def assert_same(found: Trained, expected: Trained, tolerance: float) -> None:
    assert_close(found.loss, expected.loss, tolerance, "loss")
    assert found.gradients.keys() == expected.gradients.keys() and found.metrics.keys() == expected.metrics.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.abs().max() > 1e-6 and not gradient[-1], name
        assert_close(found.gradients[name], gradient, tolerance, name)
    for name, value in expected.metrics.items():
        assert_close(found.metrics[name], torch.as_tensor(value), tolerance, name)


#: Divisions that this run tries: a part of all of them (`make test-all`).
TRIED = sorted(int(number) for number in drawn("divisions", map(str, range(DIVISIONS)), least=15))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["64", "32"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_gradient_and_metrics_do_not_depend_on_the_division(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    given = play(dtype)
    in_one_piece = [(episode, role, range(len(turns))) for (episode, role), turns in given.turns.items()]
    expected = {
        loss_agg: trained(settings(name, loss_agg), given, [batch_of(given, in_one_piece)], lambda batch: [[batch]])
        for loss_agg in AGGREGATIONS
    }
    for tried, number in enumerate(TRIED if dtype == torch.float64 else TRIED[::3]):
        draw, ranks = torch.Generator().manual_seed(number), (1, 2, 4)[number % 3]
        loss_agg = AGGREGATIONS[tried % len(AGGREGATIONS)]
        batches = divided(given, draw, ranks, splits=name not in ("gspo", "corrections of sequences"))
        found = trained(settings(name, loss_agg), given, batches, cut_anyhow(draw, ranks))
        assert_same(found, expected[loss_agg], tolerance)
