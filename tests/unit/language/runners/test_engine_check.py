"""The proof that engines agree with the trainer is made again where what they compute with has changed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest

from rlhpc.language.runners.engine_check import _PACKAGES, _version, check_digests
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra


def test_the_installed_engine_is_among_the_packages() -> None:
    """By the name of its distribution, which a build for CPUs has of its own."""
    need_extra("vllm")
    names = {name for name in metadata.packages_distributions()["vllm"] if name in _PACKAGES}
    assert names and all(map(_version, names))


# -- digests of an engine's parameters

PARAMETERS = ("layers.0.qkv_proj.weight", "layers.0.qkv_proj.bias", "mlp.gate.e_score_correction_bias", "norm.weight")
BUFFERS = ("model.layers.0.mlp.gate.e_score_correction_bias", "rotary.inv_freq")


def rounds(change: Callable[[int, str], int]) -> list[dict[str, int]]:
    return [{name: change(number, name) for name in PARAMETERS} for number in range(3)]


def follows(number: int, name: str) -> int:
    """Digests of an engine that takes in all trained weights; the bias of the router is a buffer of the trainer."""
    return hash(name) if "e_score" in name else hash((name, number % 2))


def test_an_engine_that_follows_all_rounds_passes() -> None:
    check_digests(rounds(follows), BUFFERS, "the engine")
    check_digests([{}, {}, {}], BUFFERS, "an engine that gives no digests")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda number, name: 7 if name == "norm.weight" else follows(number, name),
            "norm.weight did not change, although",
        ),
        (
            lambda number, name: number if name == "norm.weight" else follows(number, name),
            "norm.weight did not become what",
        ),
        (
            lambda number, name: 7 if "qkv" in name else follows(number, name),
            "qkv_proj.weight, layers.0.qkv_proj.bias did not",
        ),
    ],
    ids=["stale", "not restored", "packed once"],
)
def test_a_parameter_that_does_not_follow_is_named(change: Callable[[int, str], int], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"the engine does not follow weight updates: its parameters .*{message}"):
        check_digests(rounds(change), BUFFERS, "the engine")


def test_a_weight_of_the_engine_that_the_trainer_lacks_is_named() -> None:
    """Such as the bias of a layer that transformers builds without one, or of a re-saved configuration."""
    with pytest.raises(ConfigError, match=r"parameters mlp\.gate\.e_score_correction_bias did not change"):
        check_digests(rounds(follows), ["rotary.inv_freq"], "the engine")


def test_a_parameter_that_vanishes_is_named() -> None:
    seen = rounds(follows)
    del seen[1]["norm.weight"]
    with pytest.raises(ConfigError, match=r"parameters norm\.weight appear or vanish"):
        check_digests(seen, BUFFERS, "the engine")


def test_with_frozen_matrices_parameters_may_stay_but_must_come_back() -> None:
    frozen = ["base.layers.0.q_proj.weight"]
    check_digests(rounds(lambda number, name: 7), frozen, "the engine")
    with pytest.raises(ConfigError, match="did not become what they were"):
        check_digests(rounds(lambda number, name: number), frozen, "the engine")
