"""The device channel's CUDA device is the process's, in whichever thread: torch's current device belongs to a thread."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing.reductions

from rlhpc.runtime import devices
from rlhpc.runtime.comm.cuda_device import CudaDevice

SECOND = torch.device("cuda", 1)


def properties(index: int) -> Any:
    """Of a device."""
    address = {"pci_domain_id": 0, "pci_bus_id": 7 + index, "pci_device_id": 0}
    return SimpleNamespace(**address, uuid=f"card-{index}", total_memory=1 << 36)


class Driver:
    """What torch says in a thread that has chosen no device, of a process that sees two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.chosen: list[int] = []
        cuda = {
            "current_device": lambda: 0, "device_count": lambda: 2, "can_device_access_peer": lambda one, other: True,
            "get_device_properties": lambda device: properties(getattr(device, "index", device)),
            "current_stream": self.stream, "Event": self.event,
        }  # fmt: skip
        for name, answer in cuda.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.chosen.append)
        monkeypatch.setattr(devices, "_device_index", None)
        monkeypatch.setattr(devices, "accelerator", lambda: "cuda")

    def stream(self, device: Any = None) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.calls.append(("wait", device)), device=device)

    def event(self, **options: Any) -> Any:
        assert options == {"enable_timing": False, "interprocess": True}
        return SimpleNamespace(record=lambda stream: self.calls.append(("record", stream.device)))


def test_a_thread_that_has_chosen_no_device_uses_that_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    assert CudaDevice().address.startswith("0000:07:00 card-0")
    devices.set_process_device(1)
    device = CudaDevice()
    assert driver.chosen == [1]
    assert device.address.startswith("0000:08:00 card-1")
    assert [entry.split()[1] for entry in device.reads] == [
        "card-1",
        "card-0",
    ]
    event = device.event()
    event.record()
    event.wait()
    assert driver.calls == [("record", SECOND), ("wait", SECOND)]


def test_received_tensors_are_on_the_accelerator_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    assert [devices.receiving_device(sent) for sent in ("cuda:0", "cpu")] == ["cuda", "cpu"]
    devices.set_process_device(1)
    assert [devices.receiving_device(sent) for sent in ("cuda:0", "cpu")] == ["cuda:1", "cpu"]
    monkeypatch.setattr(devices, "accelerator", lambda: "")
    assert devices.receiving_device("cuda:0") == "cpu"


def handle_fields(source: str) -> tuple[list[str], list[str]]:
    """How torch itself names what `_share_cuda_` returns, and what `_new_shared_cuda` takes."""
    returned, taken = list[str](), list[str]()
    for node in ast.walk(ast.parse(source)):
        call = node.value if isinstance(node, ast.Assign) else node
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "_share_cuda_" and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            returned = [ast.unparse(element) for element in node.targets[0].elts]
        if call.func.attr == "_new_shared_cuda":
            taken = [ast.unparse(argument).removeprefix("storage_") for argument in call.args]
    return [name.removeprefix("storage_") for name in returned], taken


def passed_on(monkeypatch: pytest.MonkeyPatch, returned: list[str]) -> list[Any]:
    """What the device channel gives `_new_shared_cuda` of another process, if `_share_cuda_` returns these, by their names."""
    arguments: list[Any] = []

    def open_storage(*given: Any) -> Any:
        arguments.extend(given)
        raise RuntimeError("no driver")

    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *counter: arguments.append(counter), raising=False
    )
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage, raising=False)
    storage = SimpleNamespace(_share_cuda_=lambda: tuple(returned))
    memory: Any = SimpleNamespace(untyped_storage=lambda: storage)
    device = CudaDevice()
    handle = device.export(memory)
    with pytest.raises(RuntimeError, match="no driver"):
        device.open(handle)
    return arguments


def differences(monkeypatch: pytest.MonkeyPatch, source: str) -> list[str]:
    """What of torch's handles is another than the device channel assumes."""
    returned, taken = handle_fields(source)
    counter, *opened = passed_on(monkeypatch, returned)
    expected: dict[str, Any] = {
        "device": 0, "ref_counter_handle": b"/rlhpc-leases", "ref_counter_offset": 0, "event_handle": b"",
        "event_sync_required": False,
    }  # fmt: skip
    wrong = [] if counter == ("ref_counter_handle", "ref_counter_offset") else [f"released {counter}"]
    wrong += [] if len(opened) == len(taken) else [f"{len(opened)} arguments instead of {taken}"]
    return wrong + [
        f"{value} as {name}" for name, value in zip(taken, opened, strict=False) if value != expected.get(name, name)
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("handle,\n            storage_size_bytes,", "storage_size_bytes,\n            handle,"),
     ("storage_offset_bytes,\n                ref", "ref"), ("ref_counter_offset,\n            event_handle", "event_handle")],
    ids=["as installed", "another order", "an argument less", "a field less"],
)  # fmt: skip
def test_memory_is_shared_by_handles_as_torch_has_them(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    Driver(monkeypatch)
    source = Path(torch.multiprocessing.reductions.__file__).read_text()
    assert before in source
    assert bool(differences(monkeypatch, source.replace(before, after, 1) if before else source)) is bool(before)
