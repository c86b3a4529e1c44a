"""Weight messages: all or nothing, copied, or adopted by a module."""

from __future__ import annotations

import pytest
import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.broadcast import pack_tensors, unpack_tensors


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return made.requires_grad_(False).eval()


@pytest.mark.parametrize("adopt", [False, True])
def test_a_detached_list_of_a_modules_tensors_updates_the_module(adopt: bool) -> None:
    sender, receiver, x = network(1), network(2), torch.randn(5, 3)
    message = pack_tensors(7, sender.state_dict().items())
    assert unpack_tensors(message, receiver.state_dict().items(), adopt=receiver if adopt else None) == 7
    assert torch.equal(sender(x), receiver(x))
    shares = receiver[0].weight.data_ptr() == message["tensors"][0].data_ptr()
    assert shares == adopt


def test_tied_weights_stay_tied() -> None:
    sender, receiver = torch.nn.Module(), torch.nn.Module()
    for module in (sender, receiver):
        module.a = torch.nn.Parameter(torch.randn(3))
        module.b = module.a
    unpack_tensors(pack_tensors(1, sender.state_dict().items()), receiver.state_dict().items(), adopt=receiver)
    assert receiver.a is receiver.b and torch.equal(receiver.a, sender.a)


@pytest.mark.parametrize("adopt", [False, True])
def test_weights_of_another_model_change_nothing(adopt: bool) -> None:
    receiver = network(2)
    before = {name: tensor.clone() for name, tensor in receiver.state_dict().items()}
    other = {name: tensor for name, tensor in network(1).state_dict().items() if not name.startswith("2.bias")}
    with pytest.raises(RlhpcError, match=r"weights of version 3 do not fit the receiver: it has .*2\.bias.*got None"):
        unpack_tensors(pack_tensors(3, other.items()), receiver.state_dict().items(), adopt=receiver if adopt else None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in receiver.state_dict().items())
