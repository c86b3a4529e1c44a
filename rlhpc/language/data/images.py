"""Pictures of a row of data: files, data URLs, or bytes as Hugging Face `datasets` and Parquet files have them."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.language.data.pictures import size_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home

_URL = "data:image/"
_FORMS = "a file's path, a data URL (data:image/png;base64,…), {bytes: …}, or a list of these"


def read_images(value: Any, folder: Path) -> tuple[bytes, ...]:
    """The pictures of a row, as files have them.

    Args:
        value: What stands in its column; None for none.
        folder: Where relative paths begin.

    Raises:
        ConfigError: It is something else, or a file cannot be read.
    """
    return tuple(_bytes(one, folder) for one in _several(value))


def check_images(value: Any, folder: Path) -> None:
    """Refuses what `read_images` would: files are only looked for, and of bytes it is read how large the picture is.

    Raises:
        ConfigError: See there.
    """
    for one in _several(value):
        if not isinstance(one, str) or one.startswith(_URL):
            size_of(_bytes(one, folder))
        elif not _path(one, folder).is_file():
            raise ConfigError(f"there is no file {_path(one, folder)}")


def names_of(value: Any) -> str:
    """Which pictures a row has, as far as that is known without opening files: paths as they stand, of others a digest."""
    named = [
        one if isinstance(one, str) and not one.startswith(_URL) else _bytes(one, Path()) for one in _several(value)
    ]
    return repr([one if isinstance(one, str) else digest_of(one) for one in named])


def digest_of(image: bytes) -> str:
    """The same for the same file."""
    return hashlib.blake2b(image, digest_size=16).hexdigest()


def _several(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else (value,)


def _bytes(one: Any, folder: Path) -> bytes:
    if isinstance(one, Mapping):
        inside = one.get("bytes")
        one = inside if inside is not None else one.get("path")
    if isinstance(one, bytes):
        return one
    if hasattr(one, "save"):  # datasets opens them itself
        return _png(one)
    if not isinstance(one, str) or not one:
        raise ConfigError(f"a picture is {type(one).__name__}; allowed: {_FORMS}")
    if one.startswith(_URL):
        return from_url(one)
    try:
        return _path(one, folder).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_path(one, folder)} cannot be read: {error.strerror}") from None


def from_url(url: str) -> bytes:
    """The picture in a data URL.

    Raises:
        ConfigError: It is none.
    """
    head, _, body = url.partition(",")
    if not head.startswith(_URL) or not head.endswith(";base64"):
        raise ConfigError(f"a picture is the URL {url[:40]!r}; allowed: data:image/png;base64,… and its like")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"a picture's data URL is not base64: {error}") from None


def _png(image: Any) -> bytes:
    import io

    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()


def _path(one: str, folder: Path) -> Path:
    path = expand_home(one)
    return path if path.is_absolute() else folder / path
