"""Energy counters of a rank: those of its accelerators (NVML) and of its host's processors (RAPL, /sys/class/powercap).

A counter only grows, and covers all that uses the card or the processor. What cannot be read has no counter but a reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

#: Root of the folder of RAPL's counters; `RLHPC_POWERCAP` names another one.
_POWERCAP = "/sys/class/powercap"
#: A counter of 64 bits does not wrap.
_NO_WRAP = 1 << 64
#: Microjoules of NVML's unit.
_UJ_PER_MJ = 1000


class EnergyCounter(NamedTuple):
    """Energy counter of a device.

    Attributes:
        kind: `gpu` or `cpu`.
        name: Name that is unique on the host.
        wraps_at: Value in microjoules at which the counter starts again from 0.
    """

    kind: str
    name: str
    wraps_at: int


#: Readings of a rank before and after a call: time, values, time, values.
EnergyReport = tuple[float, list[int], float, list[int]]
#: Byte between the readings around a call and what follows them in the answer.
SEPARATOR = b"\n"


def split_report(answer: bytes) -> tuple[EnergyReport | None, bytes]:
    """Splits the readings of `EnergyMeter.end_call` from the bytes that follow them; None if the rank has no counters."""
    report, separator, remainder = answer.rpartition(SEPARATOR)
    return (tuple(json.loads(report)) if separator else None), remainder


class EnergyMeter:
    """Energy counters that this process can read.

    Args:
        devices: NVML's handles of the rank's accelerators; see `nvml_devices`.
        missing_reasons: Kind → reason for which it has no counters.
        powercap: Folder of RAPL's counters.
    """

    def __init__(
        self,
        devices: Sequence[tuple[str, Callable[[], int]]] = (),
        missing_reasons: Mapping[str, str] = types.MappingProxyType({}),
        powercap: Path = Path("/nowhere"),
    ) -> None:
        packages, cpu_reason = _open_rapl_packages(powercap)
        self.counters = [
            *(EnergyCounter("gpu", name, _NO_WRAP) for name, _ in devices),
            *(EnergyCounter("cpu", name, wraps_at) for name, _, wraps_at in packages),
        ]
        self.missing = {**missing_reasons, **({"cpu": cpu_reason} if cpu_reason else {})}
        self._reads = [read_energy for _, read_energy in devices]
        self._files = [descriptor for _, descriptor, _ in packages]
        self._is_readable = bool(self.counters)
        self._start_reading: tuple[float, list[int]] | None = None

    def begin_call(self) -> None:
        """Reads the counters before a call."""
        self._start_reading = self.read()

    def end_call(self) -> bytes:
        """Reads the counters after a call; returns both readings for `split_report`, or nothing without counters."""
        old_reading, new_reading = self._start_reading, self.read()
        if old_reading is None or new_reading is None:
            return b""
        return json.dumps([*old_reading, *new_reading]).encode() + SEPARATOR

    def read(self) -> tuple[float, list[int]] | None:
        """Returns the host's monotonic time in seconds, and the value of each counter in microjoules; None without counters.

        A counter that fails ends the reading, and not the rank.
        """
        if not self._is_readable:
            return None
        try:
            counter_values = [read_energy() for read_energy in self._reads]
            counter_values += [int(os.pread(descriptor, 32, 0)) for descriptor in self._files]
        except (OSError, ValueError) as error:
            log.warning("the energy counters are not read any more: %s", error)
            self._is_readable = False
            return None
        return time.monotonic(), counter_values

    def describe(self) -> dict[str, Any]:
        """Returns the counters and the missing kinds, for the rank's record."""
        return {"counters": [list(counter) for counter in self.counters], "missing": self.missing}


def rank_meter(accelerators: Sequence[int], addresses: Callable[[], Sequence[str]]) -> EnergyMeter:
    """Returns the meter of this rank.

    Args:
        accelerators: The rank's accelerators; empty for a rank without.
        addresses: Returns the PCI addresses of this process's accelerators; called only if there are accelerators.
    """
    powercap = Path(os.environ.get("RLHPC_POWERCAP", _POWERCAP))
    if not accelerators:
        return EnergyMeter([], {}, powercap)
    visible_devices = [
        device_word.strip()
        for device_word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if device_word.strip()
    ]
    if any(device_word.startswith("MIG-") for device_word in visible_devices):
        return EnergyMeter([], {"gpu": "a MIG instance has no counter of its own"}, powercap)
    try:
        return EnergyMeter(nvml_devices(addresses(), visible_devices), {}, powercap)
    except OSError as error:
        return EnergyMeter([], {"gpu": str(error)}, powercap)


def nvml_devices(addresses: Sequence[str], visible_devices: Sequence[str]) -> list[tuple[str, Callable[[], int]]]:
    """Returns a name and a function for each accelerator; the function returns the accelerator's energy in microjoules.

    Args:
        addresses: PCI addresses of the accelerators; if empty, `visible_devices` names them.
        visible_devices: Indices or UUIDs of the accelerators, as in CUDA_VISIBLE_DEVICES.

    Raises:
        OSError: NVML or a counter cannot be used; the message gives the reason.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise OSError("there is no NVML here (libnvidia-ml.so.1)") from None
    _check(nvml.nvmlInit_v2(), "NVML does not start")
    devices = []
    for device_address in addresses or visible_devices:
        device = ctypes.c_void_p()
        if addresses:
            status_code = nvml.nvmlDeviceGetHandleByPciBusId_v2(device_address.encode(), ctypes.byref(device))
        elif device_address.isdecimal():
            status_code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device_address)), ctypes.byref(device))
        else:
            status_code = nvml.nvmlDeviceGetHandleByUUID(device_address.encode(), ctypes.byref(device))
        _check(status_code, f"NVML does not know the accelerator {device_address}")
        uuid = ctypes.create_string_buffer(96)
        _check(nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(len(uuid))), f"NVML has no UUID of {device_address}")
        read_energy = _reader(nvml, device)
        try:
            read_energy()
        except OSError:
            raise OSError(
                f"the accelerator {device_address} has no energy counter (before NVIDIA Volta, or a virtual one)"
            ) from None
        devices.append((uuid.value.decode(errors="replace"), read_energy))
    return devices


def _check(status_code: int, message: str) -> None:
    if status_code != 0:
        raise OSError(f"{message} (NVML error {status_code})")


def _reader(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Callable[[], int]:
    energy_mj = ctypes.c_ulonglong()
    pointer, query_energy = ctypes.byref(energy_mj), nvml.nvmlDeviceGetTotalEnergyConsumption

    def read() -> int:
        _check(query_energy(device, pointer), "the energy counter cannot be read")
        return energy_mj.value * _UJ_PER_MJ

    return read


def _open_rapl_packages(powercap: Path) -> tuple[list[tuple[str, int, int]], str]:
    """Returns the name, file descriptor and maximum of each processor package's energy counter; if no counter is readable, an
    empty list and the reason.
    """
    # package domains only: core, uncore and dram are parts of them, or separate on some processors
    folders = sorted(
        path for path in powercap.glob("*-rapl:*") if path.name.count(":") == 1 and "mmio" not in path.name
    )
    if not folders:
        return [], f"there are no RAPL counters in {powercap}"
    packages: list[tuple[str, int, int]] = []
    try:
        for folder in folders:
            if not (folder / "name").read_text().startswith("package"):
                continue
            wraps_at = int((folder / "max_energy_range_uj").read_text()) + 1
            descriptor = os.open(folder / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
            packages.append((folder.name, descriptor, wraps_at))
            int(os.pread(descriptor, 32, 0))
    except (OSError, ValueError) as error:
        for _, descriptor, _ in packages:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        reason = error.strerror if isinstance(error, OSError) else "no number"
        return [], f"RAPL cannot be read: {folder / 'energy_uj'}: {reason}"
    return packages, "" if packages else f"there are no RAPL counters of packages in {powercap}"
