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
    previous = vars(module).get("forward")  # an earlier replacement, for example by a tensor-parallel plan
    replace_forward(module, forward)
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            replace_forward(module, previous)


def compile_forward(module: Any, fail: Callable[[Exception], Exception]) -> None:
    """Compiles a module's forward function into one graph, without graph breaks, that serves all sizes of its inputs.

    The hooks of the module, such as FSDP2's, run outside the graph. Modules with the same code share their graphs.

    Args:
        module: The module.
        fail: Function that returns the error to raise if torch cannot compile the function; its argument is the cause.
    """
    import torch
    import torch._dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MAX_GRAPHS)
    forward = module.forward
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=_COMPILER)

    @functools.wraps(forward)
    def compiled_forward(*arguments: Any, **options: Any) -> Any:
        try:
            return compiled(*arguments, **options)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise fail(error) from error

    replace_forward(module, compiled_forward)


@contextlib.contextmanager
def class_before_fsdp(module: Any) -> Iterator[None]:
    """Restores the original class of a module that FSDP2 wrapped, for the duration of the block.

    FSDP2 changes the class of a module in place, but some libraries look up the class by its name.
    """
    from torch.distributed.fsdp import FSDPModule

    wrapped = type(module)
    module.__class__ = next(base for base in wrapped.__mro__ if not issubclass(base, FSDPModule))
    try:
        yield
    finally:
        module.__class__ = wrapped


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
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._function()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


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


# --- products


def add_product(total: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> None:
    """Adds the product of two matrices to a float32 matrix, inside the product if the device can.

    A separate sum would read and write the matrix once more for each chunk.
    """
    import torch

    if mat1.dtype == torch.float32:
        total.addmm_(mat1, mat2)
    elif sums_in_product(total.device.type, mat1.dtype):
        torch.ops.aten.addmm.dtype_out(total, mat1, mat2, torch.float32, out=total)
    else:
        total += mat1 @ mat2


@functools.cache
def sums_in_product(device: str, dtype: torch.dtype) -> bool:
    """Returns whether a device adds products of half-precision matrices to a float32 matrix; computes a small sum."""
    import torch

    total = torch.full((16, 16), 2.0**-12, device=device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((total == 16 + 2.0**-12).all())
