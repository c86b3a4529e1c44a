"""Adapter for torch: all replacements of torch's code are in this module, which does not import torch itself.

The code relies on the sources of the version in `VERIFIED`; `tests/unit/runtime/test_torch_adapter.py` checks its assumptions
for the installed version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VERIFIED = {"torch": "2.13"}

_DISTRIBUTED = "torch.distributed.distributed_c10d"
_TORCHVISION_OPERATORS = ("nms", "qnms")
#: Torch's compiler of graphs.
_COMPILER = "inductor"
#: Maximum number of graphs of a compiled function: for types of layers, training and evaluation, and policies.
_MAX_GRAPHS = 64
#: Objects with declarations of operators, which torch removes when the objects are deleted.
_libraries: list[Any] = []

# --- modules


def replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Makes calls of a module compute another function.

    A hook cannot do this, because it only sees inputs and outputs, and the module's computation still runs. The hooks of the
    module are called as before.

    Args:
        module: The module; its class does not change.
        forward: New function, with the arguments of the module's `forward`.
    """
    module.forward = forward


@contextlib.contextmanager
def forward_replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Makes calls of a module compute another function for the duration of the block (`replace_forward`)."""
    previous_forward = vars(module).get("forward")  # an earlier replacement, for example by a tensor-parallel plan
    replace_forward(module, forward)
    try:
        yield
    finally:
        if previous_forward is None:
            del module.forward
        else:
            replace_forward(module, previous_forward)


def compile_forward(
    module: Any,
    fail: Callable[[Exception], Exception],
    *,
    has_variable_batch: bool = False,
    scores_by_training_graph: bool = False,
) -> None:
    """Compiles a module's forward function into one graph, without graph breaks, that serves all sizes of its inputs.

    The hooks of the module, such as FSDP2's, run outside the graph. Modules with the same code share their graphs.

    Args:
        module: The module.
        fail: Function that returns the error to raise if torch cannot compile the function; its argument is the cause.
        has_variable_batch: Whether batches of one row and of several rows occur, in dimension 0 of the first argument and of
            `attention_mask`. Torch makes a separate graph for a size of 1 unless the dimension is marked as unbacked; torch
            before 2.13 cannot mark two arguments as equal and makes both graphs.
        scores_by_training_graph: Whether calls without gradients run the graph that is made for training (`_as_in_training`).
            The module must compute the same in training and evaluation mode.
    """
    import torch
    import torch._dynamo
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    dynamo_config = torch._dynamo.config
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _MAX_GRAPHS)
    marks_batch = has_variable_batch and "shape_id" in inspect.signature(mark_unbacked).parameters
    forward = module.forward
    compiled_forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=_COMPILER)

    @functools.wraps(forward)
    def run_compiled_forward(*arguments: Any, **options: Any) -> Any:
        if marks_batch:
            mark_unbacked(arguments[0], 0, shape_id="batch")
            mask = options.get("attention_mask")
            if mask is not None:
                if len(mask) == 1:  # the stride that a mask has which several rows share
                    mask = options["attention_mask"] = mask.as_strided(mask.shape, (0, *mask.stride()[1:]))
                mark_unbacked(mask, 0, shape_id="batch")
        try:
            return compiled_forward(*arguments, **options)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise fail(error) from error

    run_forward = run_compiled_forward
    if scores_by_training_graph:
        run_forward = functools.wraps(forward)(functools.partial(_as_in_training, module, run_compiled_forward))
    replace_forward(module, run_forward)


def _as_in_training(module: Any, run: Callable[..., Any], states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Calls a module's compiled forward function such that all properties on which torch specializes graphs, other than those
    of the module, are the same in training and scoring: gradients are enabled, the first argument requires them, and the mode
    is evaluation. Results for scoring are detached, which frees at once what the graph has kept for a backward pass.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    has_gradients, is_training = torch.is_grad_enabled(), module.training
    if not states.requires_grad:
        states = states.detach().requires_grad_()
    for child in module.children():
        if child.training:
            child.eval()
    module.training = False
    try:
        with torch.enable_grad():
            outputs = run(states, *arguments, **options)
    finally:
        module.training = is_training  # callers outside the graph read it, such as those that checkpoint activations
    return outputs if has_gradients else tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


@contextlib.contextmanager
def class_before_fsdp(module: Any) -> Iterator[None]:
    """Restores the original class of a module that FSDP2 wrapped, for the duration of the block.

    FSDP2 changes the class of a module in place, but some libraries look up the class by its name.
    """
    from torch.distributed.fsdp import FSDPModule

    wrapped_class = type(module)
    module.__class__ = next(
        base_class for base_class in wrapped_class.__mro__ if not issubclass(base_class, FSDPModule)
    )
    try:
        yield
    finally:
        module.__class__ = wrapped_class


# --- process groups


def wrap_gloo_constructor(wrap: Callable[[Any, Callable[..., None]], Callable[..., None]]) -> None:
    """Wraps the constructor of gloo's process groups; Python code creates every gloo group with this constructor.

    Args:
        wrap: Takes the class and its constructor, and returns the new constructor. If torch is not imported yet, `wrap` is
            called right after the import of torch.distributed, so that this function need not import torch.
    """

    def replace() -> None:
        from torch.distributed.distributed_c10d import is_gloo_available

        if not is_gloo_available():
            return
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        if not hasattr(ProcessGroupGloo.__init__, "__wrapped__"):
            ProcessGroupGloo.__init__ = wrap(ProcessGroupGloo, ProcessGroupGloo.__init__)  # type: ignore[method-assign]

    if _DISTRIBUTED in sys.modules:
        replace()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(_DISTRIBUTED, replace))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import finder that calls a function once a module has been imported, and removes itself."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module = module
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        module_spec = importlib.util.find_spec(name)
        if module_spec is not None and module_spec.loader is not None:
            execute = module_spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._function()

            module_spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return module_spec


# --- torchvision


def import_torchvision() -> None:
    """Imports torchvision, even if its operators are built for another torch, such as a CUDA build with a CPU build of torch.

    The import of torchvision fails if two of its operators do not exist. In this case the function declares the operators
    first. They are not needed, because rlhpc uses only torchvision's networks, which are written in Python.
    """
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    _libraries.append(library)
    for operator in _TORCHVISION_OPERATORS:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")


# --- attention


def segment_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    max_lengths: tuple[int, int],
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of each segment of queries to the same segment of keys, without autograd.

    Torch's public functions do not give the gradient of attention that is merged from parts by its log-sum-exps; these
    operators are the ones that they call.

    Args:
        q, k, v: `[Q, heads, d]`, `[K, kv_heads, d]` and `[K, kv_heads, d]`.
        query_ends, key_ends: `[N + 1]` int32, cumulative lengths of the segments, from 0.
        max_lengths: Largest number of queries, and of keys, in a segment.
        is_causal: Whether a query attends only to keys up to its index; segments of queries and keys are then the same.
        scale: Factor of the attention logits; None for 1 / √d.

    Returns:
        Outputs `[Q, heads, d]`, and log-sum-exps of the scaled attention logits, `[heads, Q]`, in float32 or float64.
    """
    import torch

    if q.device.type != "cpu":
        ends = (query_ends, key_ends)
        outputs, log_sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, *max_lengths, 0.0, is_causal, return_debug_mask=False, scale=scale
        )
        return outputs, log_sums
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    outputs, log_sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=sum_dtype)
    for queries, keys in _segments(query_ends, key_ends):
        part, part_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_with_batch(q[queries], k[keys], v[keys]), 0.0, is_causal, scale=scale
        )
        outputs[queries], log_sums[:, queries] = part[0].transpose(0, 1), part_sums[0]
    return outputs, log_sums


def segment_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    outputs: torch.Tensor,
    log_sums: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    max_lengths: tuple[int, int],
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the gradients of q, k and v from the gradient `[Q, heads, d]` of the outputs (`segment_attention`).

    Outputs and log-sum-exps may be those of attention to further keys, too: the result is then the part of the gradients that
    these keys account for.
    """
    import torch

    if q.device.type != "cpu":
        # Without dropout the kernel reads no random state.
        rng_state, unused_tensor = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        tensors = (grad, q, k, v, outputs, log_sums, query_ends, key_ends)
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
            *tensors, *max_lengths, 0.0, is_causal, rng_state, unused_tensor, scale=scale
        )
        return gradients
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in _segments(query_ends, key_ends):
        states = _with_batch(grad[queries], q[queries], k[keys], v[keys], outputs[queries])
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *states, log_sums[None, :, queries], 0.0, is_causal, scale=scale
        )
        for total, place, part in zip((grad_q, grad_k, grad_v), (queries, keys, keys), parts, strict=True):
            total[place] = part[0].transpose(0, 1)
    return grad_q, grad_k, grad_v


def _segments(query_ends: torch.Tensor, key_ends: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields the slices of queries and of keys of each segment."""
    slices = (map(slice, ends[:-1], ends[1:]) for ends in (query_ends.tolist(), key_ends.tolist()))
    return zip(*slices, strict=True)


def _with_batch(*states: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields views of `[T, heads, d]` as `[1, heads, T, d]`."""
    return (tensor.transpose(0, 1)[None] for tensor in states)


# --- products


def add_product(accumulator: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> None:
    """Adds the product of two matrices to a float32 matrix, inside the product if the device can.

    A separate sum would read and write the matrix once more for each chunk.
    """
    import torch

    if mat1.dtype == torch.float32:
        accumulator.addmm_(mat1, mat2)
    elif sums_in_product(accumulator.device.type, mat1.dtype):
        torch.ops.aten.addmm.dtype_out(accumulator, mat1, mat2, torch.float32, out=accumulator)
    else:
        accumulator += mat1 @ mat2


@functools.cache
def sums_in_product(device: str, dtype: torch.dtype) -> bool:
    """Returns whether a device adds products of half-precision matrices to a float32 matrix; computes a small sum."""
    import torch

    accumulator = torch.full((16, 16), 2.0**-12, device=device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(accumulator, ones, ones, torch.float32, out=accumulator)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((accumulator == 16 + 2.0**-12).all())
