"""What `torch_adapter` assumes of torch."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from rlhpc.runtime import torch_adapter
from rlhpc.runtime.devices import accelerator
from rlhpc.runtime.torch_adapter import (
    add_product,
    segment_attention,
    segment_attention_backward,
    sums_in_product,
)


def test_a_replaced_forward_is_called_between_the_modules_hooks() -> None:
    layer = nn.Linear(2, 2)
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append("forward")
        return 2 * x

    torch_adapter.replace_forward(layer, forward)
    assert layer(torch.ones(1, 2)).tolist() == [[2, 2]]
    assert seen == ["before", "forward", "after"]


@pytest.mark.parametrize("replaced_before", [False, True])
def test_a_forward_is_replaced_for_a_block(replaced_before: bool) -> None:
    layer = nn.Linear(2, 2)
    if replaced_before:
        torch_adapter.replace_forward(layer, lambda x: 3 * x)
    x = torch.ones(1, 2)
    before = layer(x).tolist()
    with pytest.raises(ValueError, match="inside"), torch_adapter.forward_replaced(layer, lambda x: -x):
        assert layer(x).tolist() == [[-1, -1]]
        raise ValueError("inside")
    assert layer(x).tolist() == before
    assert ("forward" in vars(layer)) == replaced_before


def test_fsdp_changes_the_class_of_a_module_in_place() -> None:
    program = """
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from rlhpc.runtime.torch_adapter import class_before_fsdp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = nn.Linear(2, 2)
fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
wrapped = type(layer)
assert wrapped is not nn.Linear and isinstance(layer, FSDPModule), "fully_shard wraps in another way now"
with class_before_fsdp(layer):
    assert type(layer) is nn.Linear
assert type(layer) is wrapped
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_every_gloo_group_is_made_by_the_wrapped_constructor() -> None:
    """In a process that had not imported torch, and through `new_group`, which looks the class up at each call."""
    program = """
import sys
from rlhpc.runtime.torch_adapter import wrap_gloo_constructor
assert "torch" not in sys.modules
made = []
def wrap(kind, make):
    def init(self, *args, **kwargs):
        made.append(kind.__name__)
        make(self, *args, **kwargs)
    init.__wrapped__ = make
    return init
wrap_gloo_constructor(wrap)
wrap_gloo_constructor(wrap)  # once is enough
import torch.distributed as dist
assert not [f for f in sys.meta_path if type(f).__name__ == "_AfterImport"]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
wrap_gloo_constructor(wrap)  # torch is imported
dist.new_group([0])
print(made)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["ProcessGroupGloo"] * 3)


def test_gloos_options_are_those_that_are_set() -> None:
    """`gloo_auth` gives devices of its own to the constructor."""
    if not torch.distributed.is_gloo_available():
        pytest.fail("this torch has no gloo: ranks without accelerators could not form a group")
    kind = torch.distributed.ProcessGroupGloo
    options = kind._Options()
    assert all(hasattr(options, name) for name in ("_timeout", "_devices", "_threads"))
    assert hasattr(kind, "create_device") and hasattr(kind, "create_default_device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right, total = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype), torch.randn(5, 3)
    expected = total.double() + left.double() @ right.double()
    add_product(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)


def test_torch_has_the_product_that_adds_to_float32() -> None:
    schema = str(torch.ops.aten.addmm.dtype_out._schema)
    assert schema.startswith("aten::addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *,")
    assert "Tensor(a!) out" in schema
    assert isinstance(sums_in_product("cpu", torch.bfloat16), bool)


@pytest.mark.gpu
def test_an_accelerator_adds_in_the_product() -> None:
    device = accelerator() or "cpu"
    left, right, total = (torch.randn(256, 256, device=device) for _ in range(3))
    left, right = left.bfloat16(), right.bfloat16()
    expected = total.double() + left.double() @ right.double()
    add_product(total, left, right)
    in_product = sums_in_product(device, torch.bfloat16)
    assert in_product or device != "cuda"
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-3 if in_product else 0.3)


def test_attention_of_segments_merges_to_that_of_all_keys() -> None:
    """Outputs and gradients of two sets of keys, merged by their log-sum-exps, are those of a softmax over both."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(9, heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    ends = torch.tensor([0, 9], dtype=torch.int32)
    sets = [(slice(4), ends.clamp(max=4)), (slice(4, 9), ends.clamp(max=5))]
    parts = [
        segment_attention(q, k[keys], v[keys], ends, key_ends, (9, 5), is_causal=False, scale=0.3)
        for keys, key_ends in sets
    ]
    log_sums = torch.logaddexp(parts[0][1], parts[1][1])
    outputs = sum(out * (sums - log_sums).exp().T[..., None] for out, sums in parts)
    states = [states.clone().requires_grad_() for states in (q, k, v)]
    logits = torch.einsum("qhd,khd->hqk", states[0], states[1].repeat_interleave(2, 1)) * 0.3
    expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), states[2].repeat_interleave(2, 1))
    torch.testing.assert_close(outputs, expected.detach())
    torch.testing.assert_close(log_sums, logits.logsumexp(-1).detach())
    grads = [
        segment_attention_backward(
            grad, q, k[keys], v[keys], outputs, log_sums, ends, key_ends, (9, 5), is_causal=False, scale=0.3
        )
        for keys, key_ends in sets
    ]
    found = [grads[0][0] + grads[1][0], *(torch.cat([grads[0][i], grads[1][i]]) for i in (1, 2))]
    for each, wanted in zip(found, torch.autograd.grad(expected, states, grad), strict=True):
        torch.testing.assert_close(each, wanted)


def test_the_operators_of_a_gpu_take_the_same_segments() -> None:
    """As torch declares them: fake tensors check arguments and tell shapes, and compute nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v, grad = (torch.empty(9, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2, 4))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        layout = (ends, ends, (5, 5))
        outputs, log_sums = segment_attention(q, k, v, *layout, is_causal=True, scale=0.3)
        assert outputs.shape == q.shape and log_sums.shape == (4, 9) and log_sums.dtype == torch.float32
        states = (grad, q, k, v, outputs, log_sums, *layout)
        grads = segment_attention_backward(*states, is_causal=True, scale=0.3)
        assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]
        assert all(each.is_cuda for each in grads)


@pytest.mark.parametrize("has_mask", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize(("has_variable_batch", "num_graphs"), [(True, 1), (False, 2)])
def test_a_batch_of_one_row_shares_the_graph_of_others(
    monkeypatch: pytest.MonkeyPatch, has_mask: bool, has_variable_batch: bool, num_graphs: int
) -> None:
    """Torch makes a separate graph for a size of 1, and does not if the dimension is marked."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    class Attention(nn.Module):
        def forward(self, states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            heads = states.view(*states.shape[:-1], 2, -1).transpose(1, 2)
            outputs = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=attention_mask)
            return states + outputs.transpose(1, 2).flatten(2)

    monkeypatch.setattr(torch_adapter, "_COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = Attention(), Attention()
    torch_adapter.compile_forward(compiled, lambda error: error, has_variable_batch=has_variable_batch)
    for rows, tokens in ((1, 5), (3, 4), (2, 9), (1, 2)):
        states = torch.randn(rows, tokens, 8, requires_grad=True)
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril().expand(rows, -1, -1, -1) if has_mask else None
        outputs = [module(states, attention_mask=mask) for module in (compiled, plain)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), states)[0] for output in outputs))
    assert counters["stats"]["unique_graphs"] == num_graphs and not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("scores_by_training_graph", [True, False])
def test_scoring_takes_the_graph_of_training(monkeypatch: pytest.MonkeyPatch, scores_by_training_graph: bool) -> None:
    """Also of a first layer, whose input needs no gradient. Otherwise training and scoring have graphs of their own."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))

        def forward(self, states: torch.Tensor) -> tuple[torch.Tensor]:
            return (states + self.inner(states).tanh(),)

    monkeypatch.setattr(torch_adapter, "_COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    compiled = Block()
    plain = copy.deepcopy(compiled)
    torch_adapter.compile_forward(compiled, lambda error: error, scores_by_training_graph=scores_by_training_graph)
    for rows, has_gradient in ((3, False), (5, True), (2, False)):
        states, gradients = torch.randn(rows, 4), []
        for module in (compiled, plain):
            module.eval()
            with torch.no_grad():
                (scored,) = module(states)
            module.train()
            (trained,) = module(states.clone().requires_grad_(has_gradient))
            torch.testing.assert_close(scored, trained)
            assert not scored.requires_grad and scored.grad_fn is None and module.training
            gradients.append(torch.autograd.grad(trained.square().sum(), [*module.parameters()]))
        torch.testing.assert_close(*gradients)
    assert counters["stats"]["unique_graphs"] == (1 if scores_by_training_graph else 3)
    torch._dynamo.reset()
