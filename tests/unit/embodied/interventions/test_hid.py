"""Input devices by their report descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.embodied.interventions.hid import (
    GAMEPAD,
    SPACEMOUSE,
    DeviceLost,
    HidDevice,
    find_device,
    parse_report_descriptor,
)
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.interventions.hid_files import attached, descriptor_bytes, reports


def test_a_descriptor_of_a_spacemouse() -> None:
    descriptor = parse_report_descriptor(descriptor_bytes("spacemouse"))
    assert descriptor.applications == {*SPACEMOUSE} and descriptor.is_numbered
    assert descriptor.sizes == {1: 6, 2: 6, 3: 2}
    places = [
        (field.report, field.page, field.usage, field.offset, field.min_value, field.max_value)
        for field in descriptor.fields
    ]
    translation = [(1, 1, 0x30 + i, 16 * i, -350, 350) for i in range(3)]
    rotation = [(2, 1, 0x33 + i, 16 * i, -350, 350) for i in range(3)]
    assert places == [*translation, *rotation, (3, 9, 1, 0, 0, 1), (3, 9, 2, 1, 0, 1)]


def test_a_descriptor_of_a_gamepad() -> None:
    descriptor = parse_report_descriptor(descriptor_bytes("gamepad"))
    assert descriptor.applications & {*GAMEPAD} and descriptor.sizes == {1: 63}
    axes = {field.usage: (field.offset, field.max_value) for field in descriptor.fields if field.page == 1}
    assert axes == {0x30: (0, 255), 0x31: (8, 255), 0x32: (16, 255), 0x35: (24, 255), 0x33: (56, 255), 0x34: (64, 255)}
    buttons = [(field.usage, field.offset, field.max_value) for field in descriptor.fields if field.page == 9]
    assert buttons == [(number, 36 + i, 1) for i, number in enumerate(range(1, 15))]
    assert all(len(report) == 64 for report in reports("gamepad"))


def test_reports_set_axes_and_buttons(tmp_path: Path) -> None:
    with attached("spacemouse", tmp_path) as pipe:
        device = HidDevice(pipe.path, pipe.descriptor)
        device.read()
        assert set(device.axes.values()) == {0.0} and device.num_buttons == 2
        pipe.send(3)
        device.read()
        assert device.axes == {"x": 1.0, "y": 0.5, "z": 0.0, "rx": 0.0, "ry": 0.0, "rz": 0.0}
        pipe.send(2)
        device.read()
        assert device.axes["rz"] == -1.0 and device.axes["x"] == 1.0 and device.pressed == {1}
        pipe.send(2)
        device.read()
        assert (device.axes["x"], device.axes["y"], device.axes["z"]) == (0, -1, -1) and not device.pressed
        assert device.take_clicks() == {1} and device.take_clicks() == set()
        pipe.detach()
        with pytest.raises(DeviceLost, match="closed"):
            device.read()


def test_a_report_may_come_in_two_parts(tmp_path: Path) -> None:
    import os

    with attached("gamepad", tmp_path) as pipe:
        device = HidDevice(pipe.path, pipe.descriptor)
        report = reports("gamepad")[2]
        writer = os.open(pipe.path, os.O_WRONLY)
        os.write(writer, report[:3])
        device.read()
        assert device.pressed == set()
        os.write(writer, report[3:])
        device.read()
        assert device.pressed == {6} and device.axes["y"] == -1.0
        os.close(writer)


def test_what_cannot_be_a_device(tmp_path: Path) -> None:
    (tmp_path / "none").write_bytes(b"")
    (tmp_path / "odd").write_bytes(bytes.fromhex("0501 0905 a101 85"))
    with attached("gamepad", tmp_path) as pipe:
        with pytest.raises(ConfigError, match=r"none is no report descriptor: it has no input reports"):
            HidDevice(pipe.path, tmp_path / "none")
        with pytest.raises(ConfigError, match="is no report descriptor"):
            HidDevice(pipe.path, tmp_path / "odd")
        with pytest.raises(DeviceLost):
            HidDevice(tmp_path / "missing", pipe.descriptor)


def test_devices_are_found_by_their_application(tmp_path: Path) -> None:
    for number, name in enumerate(("gamepad", "spacemouse", "spacemouse")):
        folder = tmp_path / f"hidraw{number + 9}" / "device"
        folder.mkdir(parents=True)
        (folder / "report_descriptor").write_bytes(descriptor_bytes(name))
    assert find_device(GAMEPAD, tmp_path) == Path("/dev/hidraw9")
    assert find_device(SPACEMOUSE, tmp_path) == Path("/dev/hidraw10")
    assert find_device((0x02,), tmp_path) is None
