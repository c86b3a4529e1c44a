"""Slot maps: every slot has one owner per role, messages are the intersections, and keys are unambiguous."""

import itertools

import pytest

from rlhpc.embodied.rollout.slot_map import SlotMap, relative_slice
from rlhpc.runtime.errors import ConfigError

LAYOUTS = [
    {"num_envs": n, "num_stages": s, "num_env_ranks": e, "num_rollout_ranks": r, "num_actor_ranks": a}
    for n, s, e, r, a in itertools.product((12, 24), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3))
    if n % s == 0 and (n // s) % e == 0 and (n // s) % r == 0
]
#: Numbers of ranks that divide neither the slots nor one another.
LAYOUTS += [
    {"num_envs": n, "num_stages": s, "num_env_ranks": e, "num_rollout_ranks": r, "num_actor_ranks": 2, "group_size": g}
    for (e, r), (n, s, g) in itertools.product(
        ((3, 2), (2, 3), (5, 3), (3, 5)), ((20, 1, 1), (20, 2, 1), (20, 1, 2), (60, 3, 2))
    )
]
#: Ranks have gone and joined; shares differ in size.
LAYOUTS += [
    {
        "num_envs": 24,
        "num_stages": s,
        "num_env_ranks": 2,
        "num_rollout_ranks": 2,
        "num_actor_ranks": 3,
        "group_size": g,
        "acting": acting,
    }
    for s, g, acting in itertools.product((1, 2), (1, 2), ((1,), (0, 2, 5), (0, 1, 3, 4, 7)))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(str(x) for x in v.values()))
def test_every_slot_has_one_owner_in_each_role(layout):
    m = SlotMap(**layout)
    everything = list(range(m.num_envs))
    stages = range(m.num_stages)
    assert sorted(i for s in stages for e in range(m.num_env_ranks) for i in m.env_share(s, e)) == everything
    assert sorted(i for s in stages for r in m.acting_ranks for i in m.rollout_share(s, r)) == everything
    assert sorted(i for a in range(m.num_actor_ranks) for i in m.actor_share(a)) == everything
    envs = [[len(m.env_share(s, e)) for s in stages] for e in range(m.num_env_ranks)]
    rollouts = [[len(m.rollout_share(s, r)) for s in stages] for r in m.acting_ranks]
    for sizes in (envs, rollouts):
        flat = [size for each in sizes for size in each]
        whole = [sum(each) for each in sizes]
        assert min(flat) > 0 and max(flat) - min(flat) <= m.group_size and max(whole) - min(whole) <= m.group_size


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(str(x) for x in v.values()))
def test_both_ends_agree_on_the_messages(layout):
    m = SlotMap(**layout)
    stages = range(m.num_stages)
    sent = {(s, e, r): c for s in stages for e in range(m.num_env_ranks) for r, c in m.rollouts_of(s, e)}
    taken = {(s, e, r): c for s in stages for r in m.acting_ranks for e, c in m.envs_of(s, r)}
    assert sent == taken
    assert sorted(i for c in sent.values() for i in c) == list(range(m.num_envs))
    handed = {(s, r, a): c for s in stages for r in m.acting_ranks for a, c in m.actors_of(s, r)}
    received = {(s, r, a): c for a in range(m.num_actor_ranks) for s, r, c in m.sources_of(a)}
    assert handed == received
    for a in range(m.num_actor_ranks):
        in_slot_order = [i for _, _, c in m.sources_of(a) for i in c]
        assert in_slot_order == list(m.actor_share(a))


def test_keys_are_unique_and_live_with_the_consumer():
    m = SlotMap(24, num_stages=2, num_env_ranks=2, num_rollout_ranks=4, num_actor_ranks=3)
    triples = list(itertools.product(range(2), range(2), range(4)))
    to_rollout = {t: m.to_rollout_key(*t) for t in triples}
    to_env = {t: m.to_env_key(*t) for t in triples}
    assert len(set(to_rollout.values())) == len(set(to_env.values())) == len(triples)
    assert all(int(key) % 4 == t[2] for t, key in to_rollout.items())
    assert all(int(key) % 2 == t[1] for t, key in to_env.items())
    assert all(int(m.to_actor_key(s, r, a)) % 3 == a for s in range(2) for r in range(4) for a in range(3))


def test_keys_of_those_who_act_after_others_have_come_and_gone():
    before, after = (
        SlotMap(24, num_rollout_ranks=2),
        SlotMap(24, num_rollout_ranks=2, num_env_ranks=3, absent={0, 1}, acting=(1, 4)),
    )
    homes = after.playing_channels()
    assert homes["observations"] == ("rollout", (1, 4)) and homes["actions"] == ("env", (2, 2, 2))
    assert [int(after.to_rollout_key(0, e, r)) % 2 for e in range(3) for r in (1, 4)] == [0, 1] * 3
    assert before.to_actor_key(0, 1, 0) == after.to_actor_key(0, 1, 0), "what was played is taken in after that"
    assert not after.rollout_share(0, 0) and after.max_ranks == 24


def test_within():
    assert relative_slice(range(6, 8), range(4, 12)) == slice(2, 4)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"num_envs": 7, "num_stages": 2}, ("num_envs(7)", "pipeline_stage_num(2)")),
        ({"num_envs": 8, "num_env_ranks": 9}, ("= 8 shares", "env ranks(9)", "component_placement.env")),
        ({"num_envs": 8, "num_stages": 2, "num_rollout_ranks": 5}, ("= 4 shares", "rollout ranks(5)")),
        ({"num_envs": 8, "num_actor_ranks": 3}, ("num_envs(8)", "actor ranks(3)")),
        ({"num_envs": 8, "num_env_ranks": 4, "group_size": 4}, ("group_size(4)", "= 2 shares")),
        ({"num_envs": 8, "num_stages": 2, "group_size": 8}, ("group_size(8)", "must not be split")),
        ({"num_envs": 0}, ("num_envs is 0",)),
        ({"num_envs": 8, "num_stages": 0}, ("pipeline_stage_num is 0",)),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_their_numbers(layout, words):
    with pytest.raises(ConfigError) as caught:
        SlotMap(**layout)
    for word in words:
        assert word in str(caught.value)
