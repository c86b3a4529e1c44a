"""PPO actor: advantages and losses of action chunks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.embodied.data.batches import RolloutBatch, TrainBatch, token_mask
from rlhpc.embodied.rollout.step_outcomes import Outcomes, next_values
from tests.replicas import replicated

GAMMA, LAMBDA = 0.9, 0.8


def gae_of(steps, bootstrap):
    """Advantages of (reward, value, terminated, truncated, value at the end) from the last to the first."""
    found, carried, following = [], 0.0, bootstrap
    for reward, value, terminated, truncated, final in reversed(steps):
        done = terminated or truncated
        ahead = final if done else following
        carried = reward + GAMMA * ahead * (not terminated) - value + GAMMA * LAMBDA * (not done) * carried
        found.append(carried)
        following = value
    return found[::-1]


def test_advantages_of_actions_are_those_of_a_run_without_chunks():
    rng = np.random.default_rng(0)
    size, steps, chunk = 5, 7, 3
    outcomes = Outcomes(range(size), steps, chunk=chunk, has_action_rewards=True)
    values = rng.normal(size=(size, steps, chunk)).astype(np.float32)
    last = rng.normal(size=(size, chunk)).astype(np.float32)
    flat = [[] for _ in range(size)]
    for t in range(steps):
        # An episode ends after the action `cut`, or goes on past the chunk.
        cut = rng.integers(0, 2 * chunk, size)
        ends, executed = cut < chunk, np.arange(chunk) <= cut[:, None]
        terminated = ends & (rng.random(size) < 0.5)
        rewards = (rng.normal(size=(size, chunk)) * executed).astype(np.float32)
        final = rng.normal(size=(size, 1)).astype(np.float32)
        infos = {"final_obs": final, "chunk": {"rewards": rewards, "mask": executed}}
        outcomes.add(t, rewards.sum(1), terminated, ends & ~terminated, infos)
        for i in range(size):
            for c in range(chunk):
                if executed[i, c]:
                    end = ends[i] and c == cut[i]
                    cause = (end and terminated[i], end and not terminated[i])
                    flat[i].append((rewards[i, c], values[i, t, c], *cause, 2 * final[i, 0]))
    message = outcomes.part(slice(0, size), last)
    final_values = np.repeat(2 * message.final_obs, chunk, 1)
    ahead = next_values(values, last, message.final_slot, message.final_step, final_values, message.executed)
    columns = {"obs": values, "actions": values, "values": values, "next_values": ahead}
    batch = RolloutBatch.from_columns({**columns, **message.transition_columns()}).to_tensors(torch.device("cpu"))
    sequence = batch.reward_sequence()
    advantages, _ = calculate_adv_and_returns("gae", **sequence.estimator_inputs(), gamma=GAMMA, gae_lambda=LAMBDA)
    for i in range(size):
        mine = advantages[i][batch.executed[i].flatten()]
        np.testing.assert_allclose(mine.numpy(), gae_of(flat[i], last[i, 0]), rtol=1e-4, atol=1e-5)


class Table(torch.nn.Module):
    """A log-probability for each row and token."""

    def __init__(self, logprobs):
        super().__init__()
        self.logprobs = torch.nn.Parameter(logprobs.clone())

    def forward(self, work):
        return work(self)

    def default_forward(self, inputs, **_):
        found = self.logprobs[inputs["obs"]]
        return {"logprobs": found, "entropy": torch.zeros_like(found), "values": torch.zeros(len(found))}


OPTIM = SimpleNamespace(
    name="adam", lr=1e-3, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-5, weight_decay=0.0, clip_grad=None
)
ALGORITHM = SimpleNamespace(
    update_epochs=1, loss_type="ppo", value_coef=0.0, entropy_coef=0.0, value_clip=None, huber_delta=None,
    loss_agg="token-mean", count_filtered_groups=False, target_kl=None,
    normalize_advantages="none", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=None,
)  # fmt: skip


@pytest.mark.parametrize("per_action", [False, True])
@pytest.mark.parametrize("micro", [None, 2])
def test_the_loss_of_tokens_is_the_mean_over_those_that_were_executed(per_action, micro):
    draw = torch.Generator().manual_seed(0)
    rows, chunk, dim = 6, 3, 2
    new, old = (torch.randn(rows, chunk, dim, generator=draw) * 0.2 for _ in range(2))
    advantages = torch.randn(rows, chunk, generator=draw) if per_action else torch.randn(rows, generator=draw)
    executed = torch.rand(rows, chunk, generator=draw) < 0.6
    batch = TrainBatch(
        obs=torch.arange(rows),
        actions=torch.zeros(rows),
        logprobs=old,
        values=torch.zeros(rows),
        advantages=advantages,
        returns=advantages,
        token_mask=token_mask(executed, old),
        mask=executed.float() if per_action else torch.ones(rows),
    )
    module = Table(new)
    update = PolicyUpdate(ALGORITHM, replicated(module, OPTIM), batch_size=rows, micro_batch=micro, seed=0)
    found = update.run(batch, range(rows), rows, 0, 1e-3)
    losses, gradient = [], torch.zeros_like(new)
    for b, c, d in np.ndindex(rows, chunk, dim):
        if executed[b, c]:
            a, ratio = float(advantages[b, c] if per_action else advantages[b]), float((new - old)[b, c, d].exp())
            losses.append(max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)))
            gradient[b, c, d] = -a * ratio if losses[-1] == -a * ratio else 0.0
    assert found["policy_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    # Gradients are still there: the optimizer clears them before the next update only.
    torch.testing.assert_close(module.logprobs.grad, gradient / len(losses), rtol=1e-4, atol=1e-7)
