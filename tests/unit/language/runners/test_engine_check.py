"""The proof that engines agree with the trainer is made again where what they compute with has changed."""

from __future__ import annotations

from importlib import metadata

from rlhpc.language.runners.engine_check import _PACKAGES, _version
from tests.extras import need_extra


def test_the_installed_engine_is_among_the_packages() -> None:
    """By the name of its distribution, which a build for CPUs has of its own."""
    need_extra("vllm")
    names = {name for name in metadata.packages_distributions()["vllm"] if name in _PACKAGES}
    assert names and all(map(_version, names))
