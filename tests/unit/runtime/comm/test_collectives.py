"""Collectives of a group of one rank, and the store in which the ranks of a process group find one another."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhpc.runtime.comm.collectives import Collectives, ServiceStore
from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.scratch import Scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair


@pytest.fixture
def pair(tmp_path: Path, scratch: Scratch) -> Iterator[tuple[Context, Context]]:
    with rank_pair(tmp_path, scratch) as contexts:
        yield contexts


@pytest.fixture(params=["holder", "other"])
def store(request: pytest.FixtureRequest, pair: tuple[Context, Context]) -> ServiceStore:
    """The store of `left-0`, as its holder and as the other rank see it."""
    return ServiceStore(pair[request.param == "other"], "left", "name", 10.0)


def test_one_rank_needs_no_process_group() -> None:
    collectives = Collectives("group", 0, 1, None)
    assert collectives.process_group() is None and collectives.all_gather_object("a") == ["a"]
    collectives.barrier()
    assert collectives.all_reduce(torch.ones(2), "sum").tolist() == [1, 1]


def test_values_of_a_store(store: ServiceStore) -> None:
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["key", "none"])
    assert [store.add("count", 2), store.add("count", -5)] == [2, -3]
    assert store.num_keys() == 2
    assert store.delete_key("key") and not store.delete_key("key") and not store.check(["key"])


def test_a_value_is_exchanged_if_it_is_the_expected_one(store: ServiceStore) -> None:
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "wrong", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second" == store.get("key")
    assert store.compare_set("absent", "expected", "value") == b"expected" and not store.check(["absent"])


def test_a_rank_waits_for_a_key_of_another(pair: tuple[Context, Context]) -> None:
    holder, other = (ServiceStore(context, "left", "name", 10.0) for context in pair)
    for waiting, setting in ((holder, other), (other.clone(), holder)):
        timer = threading.Timer(0.1, setting.set, ["late", b"value"])
        timer.start()
        waiting.wait(["late"])
        assert waiting.get("late") == b"value"
        timer.join()
        holder.delete_key("late")


def test_a_key_that_nobody_sets(store: ServiceStore) -> None:
    store.set_timeout(datetime.timedelta(seconds=0.1))
    with pytest.raises(DeadlineExceeded, match=r"for the ranks of 'left' to form their process group \(key none\)"):
        store.get("none")
    with pytest.raises(DeadlineExceeded):
        store.wait(["none"], datetime.timedelta(seconds=0.1))
