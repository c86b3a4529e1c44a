"""Memory accounts of embodied runs against the parameters of the built policy."""

from __future__ import annotations

import pytest

from rlhpc.embodied.planning import accounts
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GroupRanks
from rlhpc.weights.device_sharing import buffer_bytes


@pytest.mark.parametrize(("backend", "actors"), [("local", 1), ("fsdp", 2)])
def test_an_actor_holds_its_shard_and_sends_weights_in_full(backend: str, actors: int) -> None:
    wide = "actor.model.hidden_sizes=[4096,4096]"
    cfg = load_config("configs/quickstart.yaml", [f"actor.training_backend={backend}", wide])
    card = 80e9
    ranks = {"actor": GroupRanks(actors, True, card), "rollout": GroupRanks(1, True, card), "env": GroupRanks(1)}
    by_group = {account.group: account for account in accounts(cfg, ranks, build=True, measure=True)}
    assert set(by_group) == {"actor", "rollout"}, "simulators have no policy"
    moments = {moment.name: {term.name: term.nbytes for term in moment.terms} for moment in by_group["actor"].moments}
    (acting,) = by_group["rollout"].moments
    policy_bytes = next(term.nbytes for term in acting.terms if term.name == "weights")
    update, sending = moments["update"], moments["weights are sent"]
    assert update["weights"] == update["gradients"] == update["optimizer"] / 2 == policy_bytes / actors
    assert "gradients" not in sending and sending["weights"] == update["weights"]
    assert sending["buffers of the update"] == min(policy_bytes, buffer_bytes(card)) > 100e6
    assert sending.get("a weight in full", 0.0) == (4.0 * 4096 * 4096 if backend == "fsdp" else 0.0)


def test_without_measuring_an_accelerators_memory_is_unknown() -> None:
    cfg = load_config("configs/quickstart.yaml", [])
    ranks = {"actor": GroupRanks(1, True, 80e9), "rollout": GroupRanks(1)}
    (actor,) = accounts(cfg, ranks, build=True, measure=False)
    assert actor.group == "actor" and "rlhpc plan --measure" in actor.unknown and not actor.moments


def _terms(config: str, *overrides: str) -> dict[str, dict[str, float]]:
    """Bytes of an actor's terms by moment and name."""
    cfg = load_config(f"configs/embodied/{config}.yaml", list(overrides))
    ranks = {"actor": GroupRanks(2, True, 80e9)}
    (account,) = accounts(cfg, ranks, build=True, measure=True)
    return {moment.name: {term.name: term.nbytes for term in moment.terms} for moment in account.moments}


@pytest.mark.parametrize(("algorithm", "networks"), [("sac", 1), ("td3", 2), ("crossq", 0)])
def test_off_policy_actors_hold_target_networks(algorithm: str, networks: int) -> None:
    words = (f"algorithm.name={algorithm}", f"actor.model.model_type={algorithm}", "actor.model.hidden_sizes=[64,64]")
    moments = _terms("pendulum_sac", *words)
    update = moments["update"]
    outputs = 1 if algorithm == "td3" else 2
    actor = 4.0 * (3 * 64 + 64 + 64 * 64 + 64 + 64 * outputs + outputs)
    critics = update["weights"] - actor - (algorithm == "crossq") * 4 * 2 * (3 + 64 + 64)
    assert update.get("target networks", 0.0) == [0.0, critics, critics + actor][networks]
    assert "weights are sent" in moments and "replay buffer" not in update


def test_actors_that_act_hold_transitions_a_copy_and_no_buffers_of_updates() -> None:
    words = (
        "cluster.component_placement={actor: '0:0-1'}",
        "algorithm.n_step=3",
        "algorithm.replay_buffer.size=80_000",
    )
    (update,) = _terms("pendulum_sac_tensors", *words).values()
    transition = 2 * 3 * 4 + 4 + 4 + 1 + 8
    assert update["replay buffer"] == 40_000 * transition and update["copy that acts"] == update["weights"]
    assert update["inputs of recorded passes"] == 2 * 128 * transition and update["rollout"] > 4 * 4 * transition
    (on_policy,) = _terms("cartpole_tensors").values()
    assert on_policy["rollout"] > 128 * 32 * 2 * 4 * 4 and "replay buffer" not in on_policy
    assert "inputs of recorded passes" not in _terms("cartpole_tensors", "actor.capture_graphs=false")["update"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("pendulum", ("actor.micro_batch_size=8",)),
        ("pendulum_sac", ()),
        ("../base/bc", ("runner.name=bc", "env.train.env_id=Pendulum-v1", "demos.path=.", "actor.micro_batch_size=8")),
    ],
)
def test_recorded_passes_keep_their_inputs_in_any_run(config: str, words: tuple[str, ...]) -> None:
    """Also where other ranks simulate, and while weights are sent."""
    moments = _terms(config, "actor.capture_graphs=true", *words)
    transition = 2 * 3 * 4 + 4 + 5  # of a pendulum
    expected = (8 if words else 2 * 256 / 2) * transition
    assert {moment: values.get("inputs of recorded passes") for moment, values in moments.items()} == dict.fromkeys(
        moments, expected
    )
