"""Input devices read from hidraw: a device's report descriptor has the positions of its axes and buttons in its reports.

Nothing but the device file is needed, neither a driver library nor a daemon. Source of the format: Device Class Definition
for Human Interface Devices 1.11, sections 5 and 6.2.2, and HID Usage Tables, pages 1 (Generic Desktop) and 9 (Button).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.runtime.errors import ConfigError

#: Axes of page Generic Desktop, by usage.
AXES = {
    0x30: "x",
    0x31: "y",
    0x32: "z",
    0x33: "rx",
    0x34: "ry",
    0x35: "rz",
    0x36: "slider",
    0x37: "dial",
    0x38: "wheel",
}
#: Kinds of device by the usage of their application collection on page Generic Desktop.
GAMEPAD, SPACEMOUSE = (0x04, 0x05), (0x08,)
_DESKTOP, _BUTTONS = 0x01, 0x09
_SYSTEM_FOLDER = Path("/sys/class/hidraw")
#: Maximum bytes of one read; a hidraw device returns one report per read.
_MAX_READ = 4096


class DeviceLost(Exception):
    """Error raised when an input device was unplugged."""


@dataclass(frozen=True)
class ReportField:
    """One axis or button in the reports of a device.

    Attributes:
        report: Number of the report; 0 if the device does not number its reports.
        page, usage: Meaning of the field.
        offset, size: Position in the report in bits, after the byte of the report's number.
        min_value, max_value: Range of the value.
    """

    report: int
    page: int
    usage: int
    offset: int
    size: int
    min_value: int
    max_value: int

    def value(self, report: bytes) -> int:
        """Returns the field's value in a report, without the byte of the report's number."""
        raw_bits = int.from_bytes(report, "little") >> self.offset & (1 << self.size) - 1
        is_negative = self.min_value < 0 and raw_bits >> self.size - 1
        return raw_bits - (1 << self.size) if is_negative else raw_bits

    def deflection(self, report: bytes) -> float:
        """Returns the field's value in [-1, 1]; 0 is the middle of its range."""
        half_range = (self.max_value - self.min_value) / 2
        return (
            max(-1.0, min(1.0, (self.value(report) - self.min_value - half_range) / half_range)) if half_range else 0.0
        )


@dataclass(frozen=True)
class ReportDescriptor:
    """Content of a report descriptor.

    Attributes:
        applications: Usages of the application collections on page Generic Desktop.
        fields: Axes and buttons.
        sizes: Bytes of each input report without the byte of its number, by number.
    """

    applications: frozenset[int]
    fields: tuple[ReportField, ...]
    sizes: dict[int, int]

    @property
    def is_numbered(self) -> bool:
        """True if each report begins with its number."""
        return set(self.sizes) != {0}


def _iter_items(descriptor: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields tag (with type) and data of each short item of a descriptor; skips long items."""
    next_byte = 0
    while next_byte < len(descriptor):
        prefix = descriptor[next_byte]
        if prefix == 0xFE:  # long item: size and tag follow
            next_byte += 3 + descriptor[next_byte + 1]
            continue
        item_size = (0, 1, 2, 4)[prefix & 3]
        yield prefix & 0xFC, descriptor[next_byte + 1 : next_byte + 1 + item_size]
        next_byte += 1 + item_size


def parse_report_descriptor(descriptor: bytes) -> ReportDescriptor:
    """Parses a report descriptor.

    Raises:
        ValueError: The descriptor has no input reports.
    """
    page = low_value = high_value = bits_per_field = num_fields = report = 0
    saved_globals: list[tuple[int, ...]] = []
    usages: list[int] = []
    first_usage = 0
    applications: set[int] = set()
    fields: list[ReportField] = []
    num_bits: dict[int, int] = {}
    for tag, item_data in _iter_items(descriptor):
        unsigned, signed = int.from_bytes(item_data, "little"), int.from_bytes(item_data, "little", signed=True)
        usage = unsigned if len(item_data) == 4 else page << 16 | unsigned
        if tag == 0x04:
            page = unsigned
        elif tag == 0x14:
            low_value = signed
        elif tag == 0x24:
            high_value = signed if low_value < 0 else unsigned
        elif tag == 0x74:
            bits_per_field = unsigned
        elif tag == 0x94:
            num_fields = unsigned
        elif tag == 0x84:
            report = unsigned
        elif tag == 0xA4:
            saved_globals.append((page, low_value, high_value, bits_per_field, num_fields, report))
        elif tag == 0xB4 and saved_globals:
            page, low_value, high_value, bits_per_field, num_fields, report = saved_globals.pop()
        elif tag == 0x08:
            usages.append(usage)
        elif tag == 0x18:
            first_usage = usage
        elif tag == 0x28:
            usages += range(first_usage, min(usage, first_usage + 255) + 1)
        elif tag == 0xA0 and unsigned == 1 and usages and usages[-1] >> 16 == _DESKTOP:
            applications.add(usages[-1] & 0xFFFF)
        elif tag == 0x80:
            first_bit = num_bits.get(report, 0)
            is_variable = not unsigned & 1 and unsigned & 2
            for index in range(num_fields if is_variable and usages else 0):
                field_usage = usages[min(index, len(usages) - 1)]
                is_axis = field_usage >> 16 == _DESKTOP and field_usage & 0xFFFF in AXES
                if is_axis or field_usage >> 16 == _BUTTONS:
                    bit_offset = first_bit + index * bits_per_field
                    fields.append(
                        ReportField(
                            report,
                            field_usage >> 16,
                            field_usage & 0xFFFF,
                            bit_offset,
                            bits_per_field,
                            low_value,
                            high_value,
                        )
                    )
            num_bits[report] = first_bit + bits_per_field * num_fields
        if tag & 0x0C == 0:  # a main item ends its local items
            usages, first_usage = [], 0
    if not num_bits:
        raise ValueError("it has no input reports")
    return ReportDescriptor(
        frozenset(applications),
        tuple(fields),
        {report_number: -(-report_bits // 8) for report_number, report_bits in num_bits.items()},
    )


def find_device(applications: Sequence[int], folder: Path = _SYSTEM_FOLDER) -> Path | None:
    """Returns the first hidraw device with one of these applications; None if no such device is attached."""
    for device_path in sorted(folder.glob("hidraw*"), key=lambda path: (len(path.name), path.name)):
        try:
            descriptor = parse_report_descriptor((device_path / "device" / "report_descriptor").read_bytes())
        except (OSError, ValueError, IndexError):
            continue
        if descriptor.applications & {*applications}:
            return Path("/dev") / device_path.name
    return None


class HidDevice:
    """Open input device: state of its axes and buttons.

    Args:
        path: Device file, such as `/dev/hidraw0`, or a pipe with its reports.
        descriptor: File with the device's report descriptor; None takes the one that the kernel reports.

    Attributes:
        axes: Deflection of each axis in [-1, 1], by name.
        pressed: Numbers of the pressed buttons, from 1.
        clicked_buttons: Numbers of the buttons that were pressed since `take_clicks`.

    Raises:
        DeviceLost: The device is not there.
        ConfigError: The device cannot be read, or has neither axes nor buttons.
    """

    def __init__(self, path: Path, descriptor: Path | None = None) -> None:
        self.path = path
        file = descriptor or _SYSTEM_FOLDER / path.name / "device" / "report_descriptor"
        try:
            self._descriptor = parse_report_descriptor(file.read_bytes())
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except PermissionError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; allow it with a udev rule, such as "
                'KERNEL=="hidraw*", TAG+="uaccess"'
            ) from None
        except OSError as error:
            raise DeviceLost(f"{path}: {error.strerror}") from None
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{file} is no report descriptor: {error}") from None
        self._is_pipe = stat.S_ISFIFO(os.fstat(self._fd).st_mode)
        self._was_written = False
        self._pending_bytes = b""
        fields = self._descriptor.fields
        self._axis_fields = {AXES[field.usage]: field for field in fields if field.page == _DESKTOP}
        self._button_fields = {field.usage: field for field in fields if field.page == _BUTTONS}
        self.axes = dict.fromkeys(self._axis_fields, 0.0)
        self.pressed: set[int] = set()
        self.clicked_buttons: set[int] = set()

    @property
    def num_buttons(self) -> int:
        """Largest number of a button."""
        return max(self._button_fields, default=0)

    def read(self) -> None:
        """Reads all reports that have arrived, and updates axes and buttons.

        Raises:
            DeviceLost: The device is gone.
        """
        while True:
            try:
                report_bytes = os.read(self._fd, _MAX_READ)
            except BlockingIOError:
                return
            except OSError as error:
                raise DeviceLost(f"{self.path}: {errno.errorcode.get(error.errno or 0, error.errno)}") from None
            if not report_bytes:
                if self._is_pipe and not self._was_written:
                    return  # a pipe without a writer yet
                raise DeviceLost(f"{self.path}: it was closed")
            self._was_written = True
            for report in self._split(report_bytes):
                self._apply(report)

    def _split(self, data: bytes) -> Iterator[bytes]:
        """Yields the complete reports in the bytes that were read; a pipe may join several."""
        self._pending_bytes += data
        while self._pending_bytes:
            report_number = self._pending_bytes[0] if self._descriptor.is_numbered else 0
            if report_number not in self._descriptor.sizes:  # a report without axes and buttons
                self._pending_bytes = b""
                return
            report_length = self._descriptor.sizes[report_number] + self._descriptor.is_numbered
            if len(self._pending_bytes) < report_length:
                if not self._is_pipe:  # some devices send shorter reports than their descriptor says
                    yield self._pending_bytes
                    self._pending_bytes = b""
                return
            yield self._pending_bytes[:report_length]
            self._pending_bytes = self._pending_bytes[report_length:] if self._is_pipe else b""

    def _apply(self, report: bytes) -> None:
        report_number, report_content = (report[0], report[1:]) if self._descriptor.is_numbered else (0, report)
        num_bits = 8 * len(report_content)
        for name, field in self._axis_fields.items():
            if field.report == report_number and field.offset + field.size <= num_bits:
                self.axes[name] = field.deflection(report_content)
        for button, field in self._button_fields.items():
            if field.report == report_number and field.offset + field.size <= num_bits:
                if field.value(report_content):
                    self.clicked_buttons |= {button} - self.pressed
                    self.pressed.add(button)
                else:
                    self.pressed.discard(button)

    def take_clicks(self) -> set[int]:
        """Returns the buttons that were pressed since the last call."""
        clicked_buttons, self.clicked_buttons = self.clicked_buttons, set()
        return clicked_buttons

    def close(self) -> None:
        """Closes the device."""
        os.close(self._fd)
