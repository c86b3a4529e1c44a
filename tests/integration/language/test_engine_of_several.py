"""An engine of several ranks is an engine: what tests ask of one of a single rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import requests_of
from engine_ranks import Several, engine_of
from test_rollout_backends import (  # noqa: F401 (tests and fixtures: they run here with the engine of this file)
    engine,
    folder,
    model,
    test_a_text_is_scored_by_the_weights_of_now,
    test_abort_gives_back_what_there_is,
    test_another_goes_on_where_one_had_to_leave,
    test_every_update_arrives_and_a_missed_one_shows,
    test_filters_draw_allowed_tokens_only,
    test_frequencies_are_the_models_probabilities,
    test_generate_keeps_what_others_added,
    test_generates_what_the_model_says,
    test_greedy_tokens_are_those_of_transformers_generate,
    test_neighbours_do_not_matter,
    test_offload_loses_no_request,
    test_seeds,
    test_some_are_dropped_and_the_others_do_not_notice,
    test_stop_tokens_and_texts,
    test_the_context_is_kept,
    test_update_with_requests_under_way,
    test_zz_half_an_update_stops_the_engine,
)

from rlhpc.language.engines import RolloutBackend
from rlhpc.language.engines.multi_rank import EngineDivergenceError, FollowerEngine
from tests.forked import forked

pytestmark = pytest.mark.long(together=True)


@pytest.fixture(scope="module")
def built(folder: Path) -> Iterator[RolloutBackend]:  # noqa: F811 (the fixture that is imported)
    """Two ranks; this process is the first."""
    made = engine_of("vllm x 2", folder)
    yield made
    made.close()


def test_what_ranks_have_in_common_leaves_no_name_behind(built: Several) -> None:
    """The memory by which they add up is nobody's but theirs, and is gone with them, whatever ends them."""
    assert not [name for name in os.listdir("/dev/shm") if built.ident.partition(":")[2] in name]


def test_ranks_that_share_cores_do_not_wait_without_sleep(built: Several) -> None:
    """They would keep each other from computing what they wait for."""
    from vllm.distributed import get_tp_group

    if len(os.sched_getaffinity(0)) > 1:  # the fixture's ranks are not bound
        assert get_tp_group().device_communicator.dist_module is torch.distributed
    cores = sorted(os.sched_getaffinity(0))
    bound = [[{cores[0]}, {cores[-1]}], [{cores[0]}, {cores[0], cores[-1]}]]
    for rank in forked(2, "engine_ranks:apart", bound):
        assert rank == [len(cores) > 1, False]


class _Told:
    """The link of a rank whose first rank says what is given here."""

    rank, size, ident = 1, 2, "engine"

    def __init__(self, *told: Any) -> None:
        self.told = list(told)

    def receive(self) -> Any:
        return self.told.pop(0)

    def handle_failure(self, error: BaseException) -> None:
        raise AssertionError("nobody has ended")


class _Draws:
    """An engine that draws the same token for ever."""

    capacity, can_drop, can_score, context, chunk, choices = 1, False, False, 0, 0, 0

    def __init__(self, token: int) -> None:
        self.token = token

    def add(self, requests: Any) -> None:
        self.requests = list(requests)

    def step(self) -> list[Any]:
        from rlhpc.language.engines import Completion

        return [Completion(request.id, [self.token], [0.0], [0]) for request in self.requests]


def test_ranks_that_draw_different_tokens_are_found_out() -> None:
    from rlhpc.language.engines.multi_rank import Leader

    said: list[Any] = []
    link: Any = _Told()
    link.broadcast = said.append
    first = Leader(_Draws(5), link)  # type: ignore[arg-type]
    first.add(requests_of(2))
    first.step()
    first.end()
    follower = FollowerEngine(_Draws(5), _Told(*said), lambda: None)  # type: ignore[arg-type]
    follower.follow()
    other = FollowerEngine(_Draws(6), _Told(*said), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(EngineDivergenceError, match="rank 1 of engine has drawn other tokens"):
        other.follow()
