"""Key-value store of a process group: operations, waits for several keys, and lists in messages."""

from __future__ import annotations

import random
import threading

import pytest

from rlhpc.runtime.comm.key_value_store import KeyValueStore, decode_list, encode_list


@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_lists_are_read_back(count: int) -> None:
    draw = random.Random(count)
    items = [draw.randbytes(draw.randrange(40)) for _ in range(count)]
    assert decode_list(encode_list(items)) == items


def test_operations() -> None:
    store = KeyValueStore()
    assert store.execute(b"add", b"n", b"2") == b"2" and store.execute(b"add", b"n", b"3") == b"5"
    assert store.execute(b"set", b"a", b"x") == b"x" and store.execute(b"get", b"a") == b"x"
    assert store.execute(b"swap", b"a", b"y", b"z") == b"x" and store.execute(b"swap", b"a", b"x", b"z") == b"z"
    assert store.execute(b"swap", b"new", b"", b"1") == b"1"
    assert store.execute(b"mset", encode_list([b"p/0", b"p/1"]), b"0", b"1") == b""
    assert store.execute(b"has", encode_list([b"p/0", b"p/2", b"p/1"])) == b"101"
    assert store.execute(b"count", b"p/") == b"2"
    assert store.execute(b"del", b"p/0") == b"1" and store.execute(b"del", b"p/0") == b"0"
    with pytest.raises(KeyError):
        store.execute(b"get", b"p/0")


def test_waits_end_with_the_last_of_their_keys() -> None:
    store, answers = KeyValueStore(), list[list[bytes]]()
    keys = encode_list([b"a", b"b", b"a"])
    for _ in range(3):
        store.when_set(keys, lambda values: answers.append(decode_list(values)))
    store.execute(b"set", b"b", b"2")
    store.when_set(encode_list([b"b"]), lambda values: answers.append(decode_list(values)))
    assert answers == [[b"2"]]
    store.execute(b"set", b"a", b"1")
    assert answers[1:] == 3 * [[b"1", b"2", b"1"]]
    assert store.wait([b"c"], 0.01) is None
    setter = threading.Timer(0.05, store.execute, (b"set", b"c", b"3"))
    setter.start()
    assert store.wait([b"c", b"a"], 60) == [b"3", b"1"]
    setter.join()
