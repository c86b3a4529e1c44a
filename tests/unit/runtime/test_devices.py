"""Devices of this machine, as torch and the kernel number them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhpc.runtime import devices, os_resources
from tests.accelerators import ON_CPU

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
