"""Routes between groups of different sizes: plans, splitting and merging, and real ranks that use them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc import Channel, Cluster, NodePlacementStrategy, WorkerFailed, WorkerGroup
from rlhpc.runtime.routing import Route, count_rows, merge_batches, routes, split_batch
from tests.instrumented import Router


@pytest.mark.parametrize(("world_size", "peers"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (6, 4), (8, 3)])
def test_both_sides_plan_the_same_rows(world_size: int, peers: int) -> None:
    batch_size = 48
    sent = {
        (rank, route.peer_rank): route.num_rows
        for rank in range(world_size)
        for route in routes(batch_size, rank, world_size, peers)
    }
    received = {
        (route.peer_rank, rank): route.num_rows
        for rank in range(peers)
        for route in routes(batch_size, rank, peers, world_size)
    }
    assert sent == received and sum(sent.values()) == batch_size and min(sent.values()) > 0
    owners = {row: (row * world_size // batch_size, row * peers // batch_size) for row in range(batch_size)}
    assert sent == {pair: list(owners.values()).count(pair) for pair in owners.values()}


def test_routes_of_uneven_groups() -> None:
    assert routes(6, 1, 2, 3) == [Route(1, 1), Route(2, 2)]
    for size in (0, -6, 7):
        with pytest.raises(ValueError, match=rf"batch_size is {size}; it must be a positive multiple .* \(2 and 3\)"):
            routes(size, 0, 2, 3)


def test_parts_of_a_batch_merge_to_the_batch() -> None:
    batch = {
        "obs": {"state": torch.arange(12.0).reshape(6, 2), "text": list("abcdef")},
        "array": np.arange(6), "name": "task", "step": 3, "missing": None, "done": False,
    }  # fmt: skip
    parts = split_batch(batch, [1, 3, 2])
    assert [part["obs"]["text"] for part in parts] == [["a"], ["b", "c", "d"], ["e", "f"]]
    assert [count_rows(part) for part in parts] == [1, 3, 2]
    assert count_rows({"name": "task", "step": 3, "obs": torch.ones(4, 2)}) == 4, "texts and numbers have no rows"
    merged = merge_batches(parts)
    assert torch.equal(merged["obs"]["state"], batch["obs"]["state"])  # type: ignore[index]
    assert merged["array"].tolist() == list(range(6)) and merged["obs"]["text"] == list("abcdef")
    assert (merged["name"], merged["step"], merged["missing"], merged["done"]) == ("task", 3, None, False)
    assert math.isnan(merge_batches([{"loss": math.nan}, {"loss": float("nan")}])["loss"])
    assert all(
        part["obs"]["state"].is_contiguous() for part in split_batch({"obs": {"state": torch.ones(2, 6).t()}}, [4, 2])
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: split_batch(torch.ones(5), [2, 2]), "a batch of 5 rows was to be split into parts of \\[2, 2\\] rows"),
        (lambda: split_batch({1, 2}, [1, 1]), "a set cannot be split; give split_fn"),
        (lambda: count_rows({"a": None}), "the rows of a dict cannot be counted"),
        (lambda: count_rows(torch.tensor(1)), "the rows of a Tensor cannot be counted"),
        (lambda: merge_batches([1, "a"]), "parts of different types cannot be merged: int, str"),
        (lambda: merge_batches([{"a": 1}, {"b": 1}]), "parts with different keys"),
        (lambda: merge_batches([{"a": None}, {"a": torch.ones(1)}]), "NoneType, Tensor"),
        (lambda: merge_batches([1, 2]), "different values of type int"),
    ],
)
def test_what_cannot_be_split_or_merged_is_refused(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


@pytest.fixture
def pair() -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    cluster = Cluster.local()
    groups = [
        Router.create_group().launch(cluster, NodePlacementStrategy([0] * n), name)
        for name, n in (("env", 3), ("roll", 2))
    ]
    yield groups[0], groups[1]
    for group in groups:
        group.shutdown()


def test_rows_arrive_in_order_whatever_the_sizes_of_the_groups(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    env, roll = pair
    channel = Channel.create("rows")
    for through, async_op in itertools.product((channel, None), (False, True)):
        for source, target in ((env, roll), (roll, env)):
            sent = [
                source.send_rows(target.name, 12, through, {"async_op": async_op, "tag": "obs", "route_key": stage})
                for stage in (0, 1)
            ]
            order = (0, 1) if through is None else (1, 0)  # streams of a channel do not mix
            received = {
                stage: target.receive_rows(
                    source.name, through, {"async_op": async_op, "tag": "obs", "route_key": stage, "batch_size": 12}
                ).wait()
                for stage in order
            }
            for of_ranks in received.values():
                assert torch.cat([part["rows"] for part in of_ranks]).tolist() == list(range(12))
                assert all(part["tag"] == "x" and part["none"] is None for part in of_ranks)
            for handle in sent:
                handle.wait()


def test_a_mode_is_part_of_the_tag_and_the_size_may_be_left_out(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    env, roll = pair
    channel = Channel.create("modes")
    env.send_rows("roll", 6, channel, {"mode": "eval", "tag": "obs"}).wait()
    env.send_rows("roll", 12, channel, {"mode": "train", "tag": "obs"}).wait()
    parts = roll.receive_rows("env", channel, {"tag": "train_obs"}).wait()
    assert [len(part["rows"]) for part in parts] == [6, 6]
    assert [len(part["rows"]) for part in roll.receive_rows("env", channel, {"tag": "eval_obs"}).wait()] == [3, 3]


def test_another_number_of_rows_is_refused(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    env, roll = pair
    channel = Channel.create("sizes")
    env.send_rows("roll", 12, channel, {"tag": "obs"}).wait()
    with pytest.raises(
        WorkerFailed, match=r"recv_from\('env', tag='obs'\): . rows came where batch_size=6 of 3 and 2 ranks"
    ):
        roll.receive_rows("env", channel, {"tag": "obs", "batch_size": 6}).wait()


@pytest.mark.parametrize(
    ("num_env", "num_roll", "times", "queue_size"),
    # Two at once: as many rounds as each env rank has requests, or each rank would wait for a second one at the end.
    [(4, 2, 1, 0), (4, 2, 3, 1), (2, 2, 3, 0), (1, 2, 3, 0)],
)
def test_in_decoupled_mode_replies_return_to_who_asked(
    num_env: int, num_roll: int, times: int, queue_size: int
) -> None:
    cluster, channel = Cluster.local(), Channel.create("requests")
    env, roll = (
        Router.create_group().launch(cluster, NodePlacementStrategy([0] * n), name)
        for name, n in (("env", num_env), ("roll", num_roll))
    )
    asked = [env.ask("roll", 8, channel) for _ in range(times)]
    at_once = queue_size or max(1, num_env // num_roll)
    requests = times * max(num_env, num_roll)
    answered = roll.answer("env", 8, channel, requests // (num_roll * at_once), queue_size)
    for handle in asked:
        assert [-row for of_rank in handle.wait() for row in of_rank] == list(range(8))
    assert sum(answered.wait()) == 8 * times
    for group in (env, roll):
        group.shutdown()


def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    worker = Router()
    with pytest.raises(ValueError, match="need a channel, or enable_p2p=True"):
        worker.send_to("roll", None, torch.ones(2))
    with pytest.raises(ValueError, match="decoupled_mode needs a channel"):
        worker.recv_from("roll", None, enable_p2p=True, decoupled_mode=True)
