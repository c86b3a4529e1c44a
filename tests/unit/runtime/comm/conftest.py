"""What tests of messages and shared memory have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from rlhpc.runtime.comm.zmq_sockets import Peers
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch
from tests.serving import Serving, temporary_scratch
from tests.unit.runtime.comm.bulk_pairs import nothing


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with temporary_scratch() as made:
        yield made


@pytest.fixture
def keys() -> CurveKeys:
    return CurveKeys.fresh()


@pytest.fixture
def owner(scratch: Scratch, keys: CurveKeys) -> Iterator[Serving]:
    made = Serving(scratch, keys, "owner-3")
    yield made
    made.close()


@pytest.fixture
def peers(keys: CurveKeys) -> Iterator[Peers]:
    made = Peers(zmq.Context.instance(), keys, nothing)
    yield made
    made.close()
