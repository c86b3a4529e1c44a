"""HDF5 reader for files from untrusted sources, which reads only data that the file itself contains.

The format allows the bytes of a data set in any other file (external storage, virtual data sets), and names that point
into another file (external links). An untrusted file could thus pull private files of this user into the training data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line

_MAX_LINKS = 16
_LARGE_BYTES, _MAX_COMPRESSION = 1 << 30, 2000


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """Opens a file for the block, which reads it with `member` and `require_local`.

    Raises:
        ConfigError: The file cannot be opened as HDF5.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as HDF5: {first_line(error)}") from None
    with file:
        yield file


def member(group: Any, name: str, num_links: int = 0) -> Any:
    """Returns the member of a group at a name or a path of names.

    Args:
        group: Group or file.
        name: Name, or names separated by `/`.
        num_links: Number of soft links that led to this name.

    Raises:
        ConfigError: The name points into another file, or leads through too many soft links.
        KeyError: The member does not exist.
    """
    node = group.file if name.startswith("/") else group
    for component in name.split("/"):
        if component in ("", "."):
            continue
        location = f"{group.file.filename}: {node.name.rstrip('/')}/{component}"
        if not isinstance(node, h5py.Group):
            raise KeyError(location)
        try:
            link = node.get(component, getlink=True)
        except TypeError:  # a user-defined type of link
            link = h5py.ExternalLink
        if link is None:
            raise KeyError(location)
        if isinstance(link, h5py.SoftLink):
            if num_links >= _MAX_LINKS:
                raise ConfigError(f"{location} is a link that leads to links only")
            node = member(node, link.path, num_links + 1)
        elif isinstance(link, h5py.HardLink):
            node = node[component]
        else:
            target = f" ({link.filename})" if isinstance(link, h5py.ExternalLink) else ""
            raise ConfigError(f"{location} is a link into another file{target}; a data set holds all its data itself")
    return node


def has(group: Any, name: str) -> bool:
    """Returns whether a group has a member with this name.

    Raises:
        ConfigError: The name points into another file.
    """
    try:
        member(group, name)
    except KeyError:
        return False
    return True


def members(group: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and members of a group. Raises the errors of `member`."""
    for name in group:
        yield name, member(group, name)


def require_local(dataset: Any) -> Any:
    """Checks that the bytes of a data set are in its own file, and returns the data set.

    Raises:
        ConfigError: The object is not a data set, its bytes are in another file, or its size in memory is too large for its
            stored bytes.
    """
    location = f"{dataset.file.filename}: {dataset.name}"
    if not isinstance(dataset, h5py.Dataset):
        raise ConfigError(f"{location} is a {type(dataset).__name__}, not a data set")
    if dataset.external or dataset.is_virtual:
        storage_label = "external storage" if dataset.external else "a virtual data set"
        raise ConfigError(
            f"{location} is {storage_label}, whose bytes lie in another file; a data set holds all its data itself"
        )
    nbytes, stored_bytes = (
        dataset.size * dataset.dtype.itemsize if dataset.shape is not None else 0,
        dataset.id.get_storage_size(),
    )
    if nbytes > _LARGE_BYTES and nbytes > _MAX_COMPRESSION * max(1, stored_bytes):
        raise ConfigError(f"{location} says that it has {nbytes} bytes, but the file holds {stored_bytes} of it")
    return dataset
