"""The store in which the ranks of a process group find one another, and the number of their requests."""

from __future__ import annotations

import datetime
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore

from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.comm.gloo_auth import await_ranks
from rlhpc.runtime.comm.key_value_store import KeyValueStore
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.store import ServiceStore, address_exchange
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.host import host_id
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


def test_many_keys_take_one_request_each_way(store: ServiceStore) -> None:
    prefixed: Any = PrefixStore("part", store)  # torch declares only some of its methods
    assert prefixed.has_extended_api()
    prefixed.multi_set(["a", "b"], ["1", "2"])
    assert prefixed.multi_get(["b", "a"]) == [b"2", b"1"] == store.multi_get(["part/b", "part/a"])
    assert store.find_missing_keys(["part/a", "c", "part/b", "d"]) == ["c", "d"]


def test_a_rank_waits_for_a_key_of_another(pair: tuple[Context, Context]) -> None:
    holder, other = (ServiceStore(context, "left", "name", 10.0) for context in pair)
    for waiting, setting in ((holder, other), (other.clone(), holder)):
        timer = threading.Timer(0.1, setting.set, ["late", b"value"])
        timer.start()
        waiting.wait(["late"])
        assert waiting.get("late") == b"value"
        timer.join()
        holder.delete_key("late")
    timers = [threading.Timer(0.05 * index, holder.set, [f"late{index}", str(index)]) for index in range(3)]
    for timer in timers:
        timer.start()
    assert other.multi_get(["late2", "late0", "late1"]) == [b"2", b"0", b"1"]
    for timer in timers:
        timer.join()


def test_a_key_that_nobody_sets(store: ServiceStore) -> None:
    store.set_timeout(datetime.timedelta(seconds=0.1))
    with pytest.raises(DeadlineExceeded, match=r"for the ranks of 'left' to form their process group \(key none\)"):
        store.get("none")
    with pytest.raises(DeadlineExceeded):
        store.wait(["none"], datetime.timedelta(seconds=0.1))
    store.set("one", "1")
    with pytest.raises(DeadlineExceeded, match=r"key none and 1 more"):
        store.multi_get(["one", "none", "nothing"])


class _Members:
    """Members of a group that send their requests to a real store of this process, which are counted; no sockets."""

    def __init__(self) -> None:
        self.store, self.requests, self.num_bytes = KeyValueStore(), Counter[str](), 0

    def context(self, name: str) -> Any:
        """The context of a member, whose group's first rank is another process."""
        service = SimpleNamespace(
            endpoint={"ipc": name}, peers=SimpleNamespace(request=functools.partial(self._request, name))
        )
        record = {"data": {"host": host_id(), "ipc": "the holder"}}
        return SimpleNamespace(name=name, service=service, rank_record=lambda *_: record)

    def _request(
        self, name: str, endpoint: str, op: bytes, frames: list[bytes], limit: float, purpose: str
    ) -> list[bytes]:
        self.requests[name] += 1
        answers: SimpleQueue[bytes] = SimpleQueue()
        Service._on_store(SimpleNamespace(store=self.store), SimpleNamespace(frames=answers.put), frames)  # type: ignore[arg-type]
        answer = answers.get(timeout=limit)
        self.num_bytes += len(answer)
        return [answer]


@pytest.mark.parametrize("size", [8, 1024])
def test_requests_of_a_member_do_not_grow_with_the_group(size: int) -> None:
    """The members do what a rank does with its store: they wait for one another and exchange addresses, as gloo does."""
    members = _Members()

    def form(rank: int) -> set[bytes]:
        group = PrefixStore("group", ServiceStore(members.context(f"rank {rank}"), "group", "name", 60.0))
        token = await_ranks(group, size, "all")
        addresses = address_exchange(group, size)
        addresses.set(f"0/{rank}", b"host and address of a rank".hex() * 3 + str(rank))
        for other in (0, rank, size - 1):
            addresses.wait([f"0/{other}"])
            assert addresses.get(f"0/{other}").endswith(str(other).encode())
        return {token, await_ranks(group, size, "connected")}

    with ThreadPoolExecutor(size) as pool:
        tokens = list(pool.map(form, range(size)))
    assert len(set.union(*tokens)) == 2, "one token for each of the two waits"
    assert set(members.requests.values()) == {6} and len(members.requests) == size
    assert members.num_bytes < size * (size * 250 + 1000), "no rank may publish something for each other rank"
