"""Off-policy updates beside plain ones, and on any number of ranks."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from rlhpc.embodied.algorithms.registry import algorithm_for
from rlhpc.embodied.algorithms.sac import SacUpdate
from rlhpc.embodied.algorithms.td3 import Td3Update
from rlhpc.runtime.errors import CheckpointError, ConfigError
from tests.unit.embodied.algorithms.networks import ALGORITHMS, OPTIM, ROWS, algorithm, batch, policy


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_make_the_update_of_one(name):
    """Three ranks with unequal parts of each batch, one of them with none."""
    learns = ALGORITHMS[name][0]
    whole = learns(algorithm(), OPTIM, policy(model_type=name))
    for number in range(1, 4):
        whole.step(batch(number))
    expected = whole.metrics()
    barrier, held = threading.Barrier(3, timeout=30), {}

    def reduce(rank):
        def add(tensor):
            held[rank] = tensor.clone()
            barrier.wait()
            total = held[0] + held[1] + held[2]
            barrier.wait()
            return tensor.copy_(total)

        return add

    parts, results = (slice(0, 17), slice(17, 17), slice(17, ROWS)), {}
    policies = [
        policy(model_type=name) for _ in parts
    ]  # here: threads would share the generator that draws their weights

    def work(rank):
        update = learns(algorithm(), OPTIM, policies[rank], reduce(rank), 3)
        for number in range(1, 4):
            update.step(batch(number, parts[rank]))
        results[rank] = update.metrics(), update

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(results) == 3
    for metrics, update in results.values():
        assert metrics == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(update.critic.weights, whole.critic.weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(update.actor.weights, whole.actor.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state_goes_on_bit_for_bit_and_another_model_is_refused(name):
    learns = ALGORITHMS[name][0]
    first = learns(algorithm(), OPTIM, policy(model_type=name))
    for number in range(1, 4):
        first.step(batch(number))
    first.metrics()
    state, weights = first.state_dict(), copy.deepcopy(first.policy.state_dict())
    second = learns(algorithm(), OPTIM, policy(model_type=name))
    second.policy.load_state_dict(weights)
    second.load_state_dict(state)
    for update in (first, second):
        for number in range(4, 7):
            update.step(batch(number))
    assert torch.equal(first.critic.weights, second.critic.weights)
    assert torch.equal(first.actor.weights, second.actor.weights) and first.metrics() == second.metrics()
    with pytest.raises(CheckpointError):
        learns(algorithm(), OPTIM, policy(model_type=name, hidden_sizes=[8])).load_state_dict(state)
    with pytest.raises(CheckpointError):
        learns(algorithm(), OPTIM, policy(model_type=name)).load_state_dict({"optimizer": "adam"})


def test_one_algorithm_does_not_take_anothers_networks_or_checkpoint():
    with pytest.raises(ConfigError, match="model_type 'td3'"):
        algorithm_for("td3", policy(), "sac")
    with pytest.raises(ConfigError, match="no subclass"):
        algorithm_for("rlhpc.embodied.models:Policy", policy(), "sac")
    state = SacUpdate(algorithm(), OPTIM, policy()).state_dict()
    with pytest.raises(CheckpointError):
        Td3Update(algorithm(), OPTIM, policy(model_type="td3")).load_state_dict(state)
