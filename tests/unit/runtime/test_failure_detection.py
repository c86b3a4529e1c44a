"""What a failure means for the ranks that still live: tables of cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from rlhpc.runtime.errors import RlhpcError, StaleGeneration, StepFailed, WorkerFailed
from rlhpc.runtime.failure_detection import FailurePolicy, group_by
from rlhpc.runtime.policies import NEXT_PHASES, GroupPolicy, SessionPhase, SessionPolicies
from rlhpc.runtime.worker_spec import WorkerSpec

SPEC = WorkerSpec("", 0, 1, "n1", 0, 0, 1, (), "r", "t", b"", "o", "e")


@dataclass
class Rank:
    spec: WorkerSpec
    state: str


def ranks(words: str) -> list[Rank]:
    """`actor-0:ready env-1:ended …`"""
    found = []
    for word in words.split():
        name, state = word.split(":")
        group, rank = name.rsplit("-", 1)
        found.append(Rank(replace(SPEC, group=group, rank=int(rank)), state))
    return found


def died(group: str, rank: int | None = 0) -> WorkerFailed:
    return WorkerFailed("killed", group=group, rank=rank, exit_signal=9)


def policy_of(
    groups: dict[str, GroupPolicy], *, phase: SessionPhase = SessionPhase.RUNNING, max_recoveries: int = 1
) -> FailurePolicy:
    """The failure policy of a session in a phase."""
    policy = FailurePolicy()
    if phase is not SessionPhase.STARTING:
        policy.enter(SessionPhase.RUNNING, SessionPolicies(groups, max_recoveries))
    if phase not in (SessionPhase.STARTING, SessionPhase.RUNNING):
        policy.enter(phase)
    return policy


RAISED = WorkerFailed("raised", group="env", rank=0, remote_traceback="Traceback …")
ALIVE = "actor-0:ready rollout-0:ready env-0:ended env-1:ready"


@pytest.mark.parametrize(
    ("failure", "expendable", "independent", "living", "spared"),
    [
        (died("env"), "", "", ALIVE, ""),  # nobody may be lost
        (died("actor"), "rollout env", "env", ALIVE, ""),  # nor the one that all depend on
        (died("env"), "env rollout", "", ALIVE, "actor-0"),  # the expendable go down together
        (died("env"), "env", "", ALIVE, "actor-0 rollout-0"),
        (died("env"), "env rollout", "env", ALIVE, "actor-0 rollout-0 env-1"),  # its group goes on without it
        (died("env", 1), "env rollout", "env", ALIVE, "actor-0"),  # it has not ended: it may still hold something
        (StepFailed("no step", group="env"), "env", "env", ALIVE, "actor-0 rollout-0"),  # of no rank alone
        (RAISED, "env", "env", ALIVE, ""),  # it would raise again
        (StaleGeneration("old"), "env", "env", ALIVE, ""),
    ],
)
def test_who_is_spared(failure: RlhpcError, expendable: str, independent: str, living: str, spared: str) -> None:
    policy = policy_of(
        {
            name: GroupPolicy(restartable=name in expendable.split(), independent_ranks=name in independent.split())
            for name in ("actor", "rollout", "env")
        }
    )
    all_ranks = ranks(living)
    assert policy.names_to_keep(failure, all_ranks) == set(spared.split())
    assert policy.names_to_end(failure, all_ranks) == {r.spec.name for r in all_ranks} - set(spared.split())


@pytest.mark.parametrize(
    ("settled", "possible"),
    [
        ("actor-0:ready env-0:ended", True),
        ("actor-0:ready env-0:ended env-1:ready", True),
        ("actor-0:ended env-0:ended", False),  # one that is not expendable
        ("env-0:ended env-1:ended", False),  # nobody is left
        ("actor-0:ready env-0:stopping", False),  # one that does not end
        ("actor-0:starting env-0:ended", False),  # one that has not arrived
        ("actor-0:ready env-0:ended env-1:starting", True),  # one that was to join, and perhaps never will
    ],
)
def test_what_can_be_recovered_from(settled: str, possible: bool) -> None:
    assert policy_of({"env": GroupPolicy(restartable=True)}).recoverable(ranks(settled)) is possible


def test_the_first_failure_counts() -> None:
    policy, first = FailurePolicy(), died("env")
    assert policy.take(first) and not policy.take(died("actor"))
    assert policy.first_failure is first and policy.past_failure is None
    policy.archive_failure()
    assert policy.first_failure is None and policy.past_failure is first
    policy.archive_failure()
    assert policy.past_failure is first, "nothing has failed since"
    assert policy.take(died("actor"))


def test_ranks_by_group() -> None:
    groups = group_by(ranks("env-1:ended actor-0:ended env-0:ended"), lambda rank: rank.spec.group)
    assert {name: [rank.spec.rank for rank in members] for name, members in groups.items()} == {
        "env": [1, 0],
        "actor": [0],
    }


@pytest.mark.parametrize(
    ("failure", "least", "living", "departs"),
    [
        (died("env", 0), 1, "actor-0:ready env-0:ended env-1:ready", True),
        (died("env", 0), 1, "actor-0:ready env-0:ready env-1:ready", True),  # it gave no sign of life
        (died("env", 0), 1, "actor-0:ready env-0:ended env-1:starting", False),  # nobody could take over
        (died("env", 0), 2, "actor-0:ready env-0:ended env-1:ready", False),
        (died("actor", 0), 1, "actor-0:ended env-0:ready env-1:ready", False),  # of no elastic group
        (RAISED, 1, "actor-0:ready env-0:ready env-1:ready", False),  # a mistake is one for all
        (StepFailed("no step", group="env"), 1, "env-0:ready env-1:ready", False),  # all of them are lost
        (StepFailed("no step", group="env", rank=1), 1, "env-0:ready env-1:ended", True),  # it cannot be started again
        (StepFailed("no step", group="env", rank=1), 1, "env-0:ended env-1:ended", False),
    ],
)
def test_whom_a_group_does_without(failure: RlhpcError, least: int, living: str, departs: bool) -> None:
    assert policy_of({"env": GroupPolicy(min_ranks=least)}).is_departure(failure, ranks(living)) == departs


@pytest.mark.parametrize(
    ("least", "living", "departs"),
    [
        (2, "env-0:ready env-1:ended env-2:ready env-3:ready", True),
        (2, "env-0:ready env-1:ended env-2:ready env-3:starting", False),  # no whole replica is left
        (2, "env-0:ready env-1:ended", False),
    ],
)
def test_a_replica_departs_whole(least: int, living: str, departs: bool) -> None:
    policy = policy_of({"env": GroupPolicy(min_ranks=least, replica_size=2)})
    assert policy.is_departure(died("env", 1), ranks(living)) == departs
    assert [policy.replica_of("env", rank) for rank in (0, 1, 5)] == [range(2), range(2), range(4, 6)]
    assert policy.replica_of("actor", 3) == range(3, 4)


def test_nobody_departs_from_a_run_that_fails() -> None:
    policy = policy_of({"env": GroupPolicy(min_ranks=1)})
    assert policy.take(died("actor"))
    assert not policy.is_departure(died("env"), ranks("env-0:ended env-1:ready"))


#: Group policies by name, of a group of two ranks.
POLICIES = {
    "strict": GroupPolicy(),
    "restartable": GroupPolicy(restartable=True),
    "independent": GroupPolicy(restartable=True, independent_ranks=True),
    "elastic": GroupPolicy(min_ranks=1),
    "elastic, restartable": GroupPolicy(restartable=True, independent_ranks=True, min_ranks=1),
    "replica": GroupPolicy(restartable=True, min_ranks=2, replica_size=2),
}
#: Failures by name: a rank of the group dies, raises an error or is abandoned by its step; a rank of the actor dies.
EVENTS = {
    "dies": died("env", 0),
    "raises": RAISED,
    "step": StepFailed("no step", group="env"),
    "actor": died("actor", 0),
}
#: Outcome of each event: `ends` the run, `leaves` (the group continues without the rank), `group` (the group is restarted),
#: `rank` (the rank alone is restarted).
TRAINING = {
    "strict": {"dies": "ends", "raises": "ends", "step": "ends", "actor": "ends"},
    "restartable": {"dies": "group", "raises": "ends", "step": "group", "actor": "ends"},
    "independent": {"dies": "rank", "raises": "ends", "step": "group", "actor": "ends"},
    "elastic": {"dies": "leaves", "raises": "ends", "step": "ends", "actor": "ends"},
    "elastic, restartable": {"dies": "leaves", "raises": "ends", "step": "group", "actor": "ends"},
    "replica": {"dies": "group", "raises": "ends", "step": "group", "actor": "ends"},
}


def outcome(policy: FailurePolicy, failure: RlhpcError) -> str:
    """What a failure means for a run with two ready env ranks, of which the first has ended, and an actor."""
    living = ranks("actor-0:ready env-0:ended env-1:ready")
    if policy.is_departure(failure, living):
        return "leaves"
    spared = policy.names_to_keep(failure, living)
    return {frozenset(): "ends", frozenset({"actor-0"}): "group"}.get(frozenset(spared), "rank")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("phase", SessionPhase)
def test_the_outcome_of_each_event_by_policy_and_phase(phase: SessionPhase, name: str, event: str) -> None:
    """While the first ranks start, and while the run ends, no failure is tolerated."""
    policy = policy_of({"env": POLICIES[name]}, phase=phase)
    expected = TRAINING[name][event] if phase in (SessionPhase.RUNNING, SessionPhase.RECOVERING) else "ends"
    assert outcome(policy, EVENTS[event]) == expected


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_restarted_in_a_run_without_recoveries(name: str, event: str) -> None:
    policy = policy_of({"env": POLICIES[name]}, max_recoveries=0)
    expected = TRAINING[name][event]
    assert outcome(policy, EVENTS[event]) == (expected if expected == "leaves" else "ends")


@pytest.mark.parametrize("before", SessionPhase)
@pytest.mark.parametrize("after", SessionPhase)
def test_the_phases_of_a_session(before: SessionPhase, after: SessionPhase) -> None:
    policy = policy_of({}, phase=before)
    if after in NEXT_PHASES[before]:
        policy.enter(after)
        assert policy.phase is after
    else:
        with pytest.raises(RlhpcError, match=f"a session that is {before} cannot be {after} next"):
            policy.enter(after)
        assert policy.phase is before
