"""What engines on a GPU take for granted of device memory: vLLM's pool for sleep, torch's allocator, and symmetric memory.

The installed sources run on stand-ins for torch's allocator and for devices. Each assumption is held against another version
of them, too, in which one text is different and the assumption does not hold.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "vllm")

#: A text of a source, and what another version has in its place.
Change = tuple[str, str]
SAME: Change = ("", "")
CONFIG = "max_split_size_mb:512,expandable_segments:True,roundup_power2_divisions:4"


def changed(text: str, change: Change) -> str:
    before, after = change
    assert before in text, f"the source has no {before!r}"
    return text.replace(before, after) if before else text


def loaded(module: str, change: Change) -> ModuleType:
    """Loads another version of a module, which is nowhere registered."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin
    made = ModuleType(module)
    made.__package__ = module.rpartition(".")[0]
    exec(compile(changed(Path(spec.origin).read_text(), change), spec.origin, "exec"), made.__dict__)
    return made


# -- the pool of an engine that can sleep


def pool_faults(monkeypatch: pytest.MonkeyPatch, cumem: ModuleType) -> list[str]:
    """What of the pool is another than the project assumes, where a user has chosen expandable segments for training."""
    settings, faults = [CONFIG], list[str]()
    freed, snapshot = list[tuple[Any, ...]](), list[dict[str, int]]()
    pool = SimpleNamespace(snapshot=lambda: snapshot)

    @contextlib.contextmanager
    def use_pool(*callbacks: Callable[..., Any]) -> Iterator[Any]:
        settings.append("pool")
        try:
            yield pool, "allocator"
        finally:
            settings.append("end of pool")

    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", use_pool)
    monkeypatch.setattr(cumem, "current_alloc_conf", lambda: next(s for s in reversed(settings) if ":" in s))
    monkeypatch.setattr(cumem, "set_alloc_conf", settings.append)
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: freed.append(handle))
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    allocator = cumem.CuMemAllocator()
    with contextlib.suppress(KeyError), allocator.use_memory_pool("weights"):
        inside = next(s for s in reversed(settings) if ":" in s)
        if "expandable_segments:False" not in inside:
            faults.append("expandable segments are on in the pool")
        elif {*inside.split(",")} ^ {*CONFIG.split(",")} != {"expandable_segments:False", "expandable_segments:True"}:
            faults.append(f"in the pool, torch's allocator is set to {inside}")
        if settings[-1] != "pool":
            faults.append("the pool is opened before torch's allocator is set")
        for address, used in ((1, 8), (2, 0)):
            allocator.python_malloc_callback((0, 8, address, 0))
            snapshot.append({"address": address, "allocated_size": used})
        raise KeyError  # an engine that cannot be built leaves the allocator as it was
    if settings[-1] != CONFIG or "end of pool" not in settings:
        faults.append(f"after the pool, torch's allocator is set to {settings[-1]}")
    if allocator.current_tag != cumem.CuMemAllocator.default_tag:
        faults.append("memory after the pool counts as weights")
    if allocator.allocator_and_pools != {"weights": [(pool, "allocator")]}:
        faults.append("nothing keeps the pool")
    with allocator.use_memory_pool("kv_cache"):
        pass
    with allocator.use_memory_pool("weights"):
        pass
    if [handle[2] for handle in freed] != [2] or [*allocator.pointer_to_data] != [1]:
        faults.append("free memory of the pool is not given back")
    freed.clear()
    allocator.sleep(())
    allocator.sleep(())
    if [handle[2] for handle in freed] != [1]:
        faults.append("an engine that sleeps holds memory, or gives it back twice")
    return faults


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (SAME, None),
        (("            set_alloc_conf(with_conf_flag(prev_conf, EXPANDABLE_SEGMENTS, False))", "            pass"),
         "expandable segments are on in the pool"),
        (("with_conf_flag(prev_conf, EXPANDABLE_SEGMENTS, False)", '"expandable_segments:False"'),
         "in the pool, torch's allocator is set to expandable_segments:False"),
        (("                set_alloc_conf(prev_conf)", "                pass"), "after the pool, torch's allocator is set to"),
        (("            self.current_tag = old_tag\n            if exp", "            if exp"),
         "memory after the pool counts as weights"),
        (("self.allocator_and_pools.setdefault(tag, []).append(data)", "pass"), "nothing keeps the pool"),
        (('allocation["allocated_size"] == 0 and data', "False and data"), "free memory of the pool is not given back"),
        (("            finally:\n                data.is_asleep = True", "            finally:\n                pass"),
         "an engine that sleeps holds memory, or gives it back twice"),
    ],
    ids=lambda value: "as installed" if value == SAME else value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_pool_of_an_engine_leaves_torchs_allocator_alone(
    monkeypatch: pytest.MonkeyPatch, change: Change, fault: str | None
) -> None:
    """Training beside an engine may use expandable segments: they are off while memory of the engine is allocated, and no
    other setting of the user is lost; what the process allocates afterwards is not the engine's, and does not sleep."""
    faults = pool_faults(monkeypatch, loaded("vllm.device_allocator.cumem", change))
    assert (faults == []) if fault is None else any(found.startswith(fault) for found in faults), faults


@pytest.mark.parametrize(
    ("change", "holds"),
    [(SAME, True), (("self.enable_cumem_allocator = True", "pass"), False)],
    ids=["installed", "other"],
)
def test_sleep_mode_brings_the_pool(change: Change, holds: bool) -> None:
    """The project asks for `enable_sleep_mode` alone."""
    text = changed(Path(str(importlib.util.find_spec("vllm.config.model").origin)).read_text(), change)  # type: ignore[union-attr]
    _, _, after = text.partition("        if self.enable_sleep_mode:\n")
    block = after[: re.search(r"^ {8}\S", after, re.M).start()]  # type: ignore[union-attr]
    assert ("is_cuda_alike()" in block and "self.enable_cumem_allocator = True" in block) is holds


def torch_faults(cuda_memory: Any, bindings: Any, header: str) -> list[str]:
    """What of torch's allocator is another than vLLM's pool and the device channel assume."""
    faults = []
    for name, arguments in {
        "CUDAPluggableAllocator": ("path_to_so_file", "alloc_fn_name", "free_fn_name"),
        "MemPool": ("allocator",),
        "use_mem_pool": ("pool",),
    }.items():
        parameters = [*inspect.signature(getattr(cuda_memory, name)).parameters]
        if tuple(parameters[: len(arguments)]) != arguments:
            faults.append(f"{name} takes {parameters}")
    if not hasattr(cuda_memory.MemPool, "snapshot"):
        faults.append("a pool does not tell its memory")
    if not callable(getattr(bindings, "_accelerator_setAllocatorSettings", None)):
        faults.append("settings of the allocator cannot be changed")
    handle = re.search(r"struct ShareableHandle \{(.*?)\};", header, re.S)
    fields = [] if handle is None else re.findall(r"(\S+) (\w+);", handle.group(1))
    if fields != [("ptrdiff_t", "offset"), ("std::string", "handle")]:
        faults.append(f"a handle of memory has {fields}")
    if "ShareableHandle shareIpcHandle(void* ptr)" not in header or "getIpcDevPtr(std::string handle)" not in header:
        faults.append("memory is shared by something else than a handle of any length")
    return faults


class _MemPool:
    """Another version of torch's, which takes its allocator by another name and tells nothing."""

    def __init__(self, backend: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("memory", "bindings", "change", "fault"),
    [
        ({}, None, SAME, None),
        ({"MemPool": _MemPool}, None, SAME, "MemPool takes"),
        ({"MemPool": _MemPool}, None, SAME, "a pool does not tell its memory"),
        ({"use_mem_pool": lambda: None}, None, SAME, "use_mem_pool takes"),
        ({}, SimpleNamespace(), SAME, "settings of the allocator cannot be changed"),
        ({}, None, ("  std::string handle;", "  std::array<char, 64> handle;"), "a handle of memory has"),
        ({}, None, ("shareIpcHandle(void* ptr)", "shareIpcHandle(void* ptr, int flags)"), "memory is shared by"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torchs_allocator_has_pools_settings_and_handles_of_any_length(
    memory: dict[str, Any], bindings: Any, change: Change, fault: str | None
) -> None:
    """The device channel passes a handle on as bytes, so that those of expandable segments, which are longer than CUDA's 64
    bytes, arrive as well."""
    header = Path(torch.__file__).parent / "include/c10/cuda/CUDACachingAllocator.h"
    names = {name: getattr(torch.cuda.memory, name) for name in ("CUDAPluggableAllocator", "MemPool", "use_mem_pool")}
    faults = torch_faults(
        SimpleNamespace(**{**names, **memory}), bindings or torch._C, changed(header.read_text(), change)
    )
    assert (faults == []) if fault is None else any(found.startswith(fault) for found in faults), faults


# -- symmetric memory of the ranks of an engine


def symmetric_faults(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """What of vLLM's symmetric memory is another than the project assumes, for a rank whose device is the mask's second."""
    faults, buffers, current = list[str](), list[Any](), list[Any]()
    capability = next(iter(module.SYMM_MEM_ALL_REDUCE_MAX_SIZES))
    size = next(iter(module.SYMM_MEM_ALL_REDUCE_MAX_SIZES[capability]))
    rank = SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: SimpleNamespace(as_version_str=lambda: capability)
    )
    monkeypatch.setattr(module, "current_platform", rank)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: size)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    tensor, group = torch.zeros(64, dtype=torch.bfloat16), SimpleNamespace(group_name="tp:0")

    def made(rendezvous: Callable[[Any, str], Any], *, invariant: bool = False) -> Any:
        def empty(count: int, *, device: Any, dtype: Any) -> Any:
            buffers.append(torch.device(device))
            return torch.zeros(count, dtype=dtype)

        monkeypatch.setattr(module, "torch_symm_mem", SimpleNamespace(empty=empty, rendezvous=rendezvous))
        monkeypatch.setattr(module, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=invariant))
        try:
            return module.SymmMemCommunicator(group, torch.device("cuda:1"))
        except RuntimeError as error:
            faults.append(f"an engine cannot start: {error}")
            return None

    def refused(buffer: Any, name: str) -> Any:
        raise RuntimeError("detected allocations from overlapping devices from different ranks")

    shared = SimpleNamespace(multicast_ptr=1)
    groups = list[str]()

    def meet(buffer: Any, name: str) -> Any:
        groups.append(name)
        return shared

    usable = made(meet)
    if usable is None or not usable.should_use_symm_mem(tensor):
        faults.append("symmetric memory is not used where it is")
    if {*buffers} | {torch.device(device) for device in current} != {torch.device("cuda:1")}:
        faults.append(f"buffers are on {buffers}")
    if groups != ["tp:0"]:
        faults.append(f"ranks meet in {groups}")
    for reason, without in {
        "ranks cannot share it": made(refused),
        "devices have no multicast": made(lambda buffer, name: SimpleNamespace(multicast_ptr=0)),
        "results must not depend on the batch": made(lambda buffer, name: shared, invariant=True),
    }.items():
        if without is not None and without.should_use_symm_mem(tensor):
            faults.append(f"symmetric memory is used where {reason}")
    return faults


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (SAME, None),
        (("except RuntimeError as e", "except ValueError as e"), "an engine cannot start: detected allocations"),
        (("device=self.device,", 'device="cuda:0",'), "buffers are on"),
        (("rendezvous(self.buffer, self.group.group_name)", 'rendezvous(self.buffer, "world")'), "ranks meet in"),
        (("if handle.multicast_ptr == 0:", "if False:"), "symmetric memory is used where devices have no multicast"),
        (("if envs.VLLM_BATCH_INVARIANT:", "if False:"), "symmetric memory is used where results must not depend"),
        (("self.disabled = False", "self.disabled = True"), "symmetric memory is not used where it is"),
    ],
    ids=lambda value: "as installed" if value == SAME else value if isinstance(value, str) else "",
)
def test_an_engine_uses_symmetric_memory_on_its_own_devices_or_does_without(
    monkeypatch: pytest.MonkeyPatch, change: Change, fault: str | None
) -> None:
    """Engines whose ranks cannot share memory, such as those on several hosts, reduce by NCCL; the project asks nothing of
    vLLM for that."""
    module = loaded("vllm.distributed.device_communicators.symm_mem", change)
    faults = symmetric_faults(monkeypatch, module)
    assert (faults == []) if fault is None else any(found.startswith(fault) for found in faults), faults


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("empty", ("size", "dtype", "device")), ("rendezvous", ("tensor", "group"))],
)
def test_torchs_symmetric_memory_takes_what_vllm_gives_it(name: str, arguments: tuple[str, ...]) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    assert [*inspect.signature(getattr(symmetric_memory, name)).parameters][: len(arguments)] == [*arguments]
