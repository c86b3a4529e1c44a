"""Devices of this machine, as torch and the kernel number them."""

from __future__ import annotations

import gc
import logging
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.runtime import devices, os_resources
from rlhpc.runtime.devices import SideCopies, explain_unseen, move_module, torch_device
from rlhpc.runtime.errors import ConfigError
from tests.accelerators import ON_CPU

#: One accelerator more than there are.
BEYOND = tuple(range(torch.cuda.device_count() + 1))
CARDS = ("0000:1b:00.0", "0001:e3:00.0")


def test_addresses_are_those_of_the_devices_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0),
             SimpleNamespace(pci_domain_id=1, pci_bus_id=0xE3, pci_device_id=0)]  # fmt: skip
    assert devices.pci_addresses() == [] or not ON_CPU
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    assert devices.pci_addresses() == list(CARDS)


@pytest.mark.gpu
def test_the_kernel_knows_the_devices_of_this_machine() -> None:
    found = devices.pci_addresses()
    assert len(found) == (0 if ON_CPU else torch.accelerator.device_count())
    for address in found:
        assert (os_resources.PCI / address / "local_cpulist").is_file()


def test_none_granted_is_the_cpu() -> None:
    assert torch_device(()) == "cpu"


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_it_says_whether_the_build_or_the_machine_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match="built for CUDA 13.0 and finds" if cuda else "built for the CPU"):
        torch_device(BEYOND, {})


def test_virtual_accelerators_are_the_cpu_where_there_are_none() -> None:
    if not torch.cuda.is_available():
        assert torch_device((0, 1), {"RLHPC_VIRTUAL_ACCELERATORS": "1"}) == "cpu"


def test_on_the_cpu_a_copy_is_there_at_once() -> None:
    target, source = torch.zeros(3), torch.ones(3)
    SideCopies("cpu").begin([(target, source)])()
    assert torch.equal(target, source)


def test_an_accelerator_is_asked_whether_it_computes_in_it_without_emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(native: bool) -> Any:
        return SimpleNamespace(is_bf16_supported=lambda including_emulation=True: native or including_emulation)

    for native in (True, False):  # a V100 emulates it, slowly
        monkeypatch.setattr(torch, "get_device_module", lambda device, native=native: card(native))
        assert devices.computes_bfloat16("cuda") is native
        assert not devices.computes_bfloat16("cpu")


@pytest.mark.parametrize(("driver", "build"), [("", "auto"), ("13.1", "cu130"), ("12.8", "cu128"), ("12.4", "cu126")])
def test_a_build_for_the_cpu_is_replaced_by_one_that_the_driver_supports(driver: str, build: str) -> None:
    reason, remedy = explain_unseen(0, None, None, None, driver)
    assert reason == "is built for the CPU" and remedy.endswith(f"RLHPC_TORCH={build} bash envs/setup.sh")
    assert "ROCm 6.4 and finds 1 of them (CUDA_VISIBLE_DEVICES=3)" in explain_unseen(1, None, "6.4", "3")[0]


def test_tied_parameters_are_tied_on_the_other_device_too() -> None:
    model = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["tokens"].weight
    moved = move_module(model, torch.device("meta"))
    assert moved["head"].weight is moved["tokens"].weight and moved["head"].weight.device.type == "meta"


def test_a_received_tensor_goes_to_the_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: "")
    assert devices.receiving_device("cuda:3") == devices.receiving_device("cpu") == "cpu"
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setattr(devices, "_device_index", None)
    assert devices.receiving_device("cuda:3") == "cuda" and devices.process_device_index() is None
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    devices.set_process_device(1)
    assert devices.receiving_device("cuda:3") == "cuda:1" and devices.receiving_device("cpu") == "cpu"
    assert devices.process_device_index() == 1


def test_the_cpu_has_gloo_its_architecture_and_no_memory_of_a_device() -> None:
    cpu = torch.device("cpu")
    assert devices.collective_backends("cpu") == "gloo" and devices.collective_backends("cuda") == "cpu:gloo,cuda:nccl"
    assert devices.device_name(cpu) == f"cpu {platform.machine()}" and devices.device_memory(cpu) is None
    assert devices.message_budget(64 << 30) == 2 << 30
    half = torch.zeros(1, 2, 4, 8, dtype=torch.float16)
    assert not devices.has_segment_attention(half, half)
    devices.synchronize("cpu")
    if not torch.accelerator.is_available():
        devices.empty_cache()  # neither of them has anything to do


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The pages that the driver of an accelerator has locked, by address; one of 4096 bytes is beyond its limit."""
    locked: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        if size == 4096:
            return 2
        locked[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return locked


def test_host_memory_is_locked_as_long_as_its_tensor_lives(
    pages: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    memory: Any = devices.host_memory(8192, "cuda")
    assert pages == {memory.data_ptr(): 8192}
    assert devices.host_memory(8192, "cpu").shape == (8192,) and devices.host_memory(0, "cuda").shape == (0,)
    assert len(pages) == 1, "copies from and to the CPU need no locked pages"
    del memory
    gc.collect()
    assert pages == {}
    with caplog.at_level(logging.WARNING):
        assert devices.host_memory(4096, "cuda").shape == (4096,), "a limit makes copies slower, not wrong"
    assert pages == {} and "4096 bytes of host memory cannot be locked" in caplog.text
