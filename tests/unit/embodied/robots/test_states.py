"""The states of a robot, and what leads from one to another."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from rlhpc.embodied.robots.limits import RobotStopped
from rlhpc.embodied.robots.states import State, StateMachine
from rlhpc.runtime.errors import RlhpcError

CHANGES: dict[str, Callable[[StateMachine], object]] = {
    "hold": StateMachine.hold,
    "end": StateMachine.end,
    "stop": lambda states: states.stop("why"),
    "resume": StateMachine.resume,
    "close": StateMachine.close,
}
#: What a change leads to from a state, where that is another state.
LEADS_TO = {
    ("hold", State.MOVING): State.HELD,
    **{("end", state): State.IDLE for state in (State.RESETTING, State.HELD, State.MOVING)},
    **{("stop", state): State.STOPPED for state in State if state is not State.CLOSED},
    ("resume", State.STOPPED): State.IDLE,
    **{("close", state): State.CLOSED for state in State},
}


def in_state(state: State) -> StateMachine:
    states = StateMachine("arm")
    states.state = state
    return states


@pytest.mark.parametrize(("name", "state"), list(itertools.product(CHANGES, State)))
def test_each_change_leads_from_each_state_where_the_table_says(name: str, state: State) -> None:
    states = in_state(state)
    CHANGES[name](states)
    assert states.state is LEADS_TO.get((name, state), state)


@pytest.mark.parametrize("state", list(State))
def test_a_movement_begins_in_the_state_that_it_was_made_for(state: State) -> None:
    states = in_state(state)
    states.reason = "why"
    if state in (State.STOPPED, State.CLOSED):
        with pytest.raises(RobotStopped):
            states.move(State.HELD, State.MOVING)
        with pytest.raises(RobotStopped):
            states.require()
        return
    assert states.move(State.HELD, State.MOVING, end_time=5.0) is (state is State.HELD)
    assert states.state is (State.MOVING if state is State.HELD else state)
    assert states.is_over(5.1) is (state is State.HELD) and not states.is_over(5.0)
    states.require()
    with pytest.raises(RlhpcError, match="arm "):
        states.require(*(other for other in State if other is not states.state))


def test_the_first_reason_stays_until_a_person_has_said_so() -> None:
    states = in_state(State.MOVING)
    assert states.stop("first") and not states.stop("second") and states.reason == "first"
    states.resume()
    assert states.reason == "" and states.state is State.IDLE
