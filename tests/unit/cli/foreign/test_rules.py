"""Translation rules: what becomes of each foreign key, and why."""

from __future__ import annotations

from typing import Any

from rlhpc.cli.foreign.rules import UNSET, ForeignConfig, Rows, UnsupportedKeys, apply_rules


def steps(config: ForeignConfig) -> Any:
    """Computes steps from epochs; one epoch is what rlhpc does anyway."""
    epochs = config("algo.epochs", 1)
    return UNSET if epochs == 1 else epochs * config("algo.batches", 10)


def clip(config: ForeignConfig) -> Any:
    """Leaves a kind of clipping out."""
    return config.omit("algo.clip", "rlhpc clips otherwise") if config("algo.clip") == "odd" else config("algo.clip")


RULES: Rows = [
    ("actor.lr", "optim.lr"),
    ("actor.steps", steps),
    ("actor.clip", clip),
    ("actor.model.kwargs", lambda config: config.section("model") or UNSET),
]
UNMATCHED = [
    UnsupportedKeys("log.*", "rlhpc logs in its own way", True),
    UnsupportedKeys("algo.kl algo.kl_*", "there is no KL term", (0, None)),
]


def translate(leaves: dict[str, Any], **defaults: Any) -> Any:
    """Translates a configuration with these rules."""
    return apply_rules(
        "PPO", leaves, RULES, UNMATCHED, {key.replace("__", "."): value for key, value in defaults.items()}
    )


def test_values_are_copied_or_computed_and_know_their_origin() -> None:
    result = translate({"optim.lr": 0.1, "algo.epochs": 3, "algo.batches": 5, "model.width": 8, "model.act": "relu"})
    assert result.ours == {
        "actor.lr": 0.1,
        "actor.steps": 15,
        "actor.clip": None,
        "actor.model.kwargs": {"width": 8, "act": "relu"},
    }
    assert result.origin["actor.steps"] == ["algo.epochs", "algo.batches"]
    assert result.origin["actor.model.kwargs"] == ["model.width", "model.act"]
    assert set(result.used) == set(result.foreign) and result.omitted == {}


def test_defaults_of_the_foreign_project_stand_in_for_missing_keys() -> None:
    result = translate({"algo.epochs": 2}, optim__lr=0.5, algo__batches=7)
    assert result.ours["actor.lr"] == 0.5 and result.ours["actor.steps"] == 14
    assert result.origin["actor.lr"] == [] and result.defaults["actor.lr"] == ["optim.lr"]
    assert result.origin["actor.steps"] == ["algo.epochs"] and result.defaults["actor.steps"] == ["algo.batches"]


def test_a_boolean_is_not_a_number_that_can_be_omitted() -> None:
    entry = UnsupportedKeys("env.first_state", "states are drawn", (False, None, 1.0))
    assert [entry.is_harmless(value) for value in (False, None, 1, 1.0)] == [True] * 4
    assert [entry.is_harmless(value) for value in (0, 0.0, True, "False")] == [False] * 4
    assert translate({"algo.kl": False}).omitted["algo.kl"][1] and not translate({"algo.kl": 0.0}).omitted["algo.kl"][1]


def test_null_counts_as_missing() -> None:
    config = ForeignConfig({"a": None, "b": "None", "c": 0}, {"a": 1})
    assert config("a", 5) == 1 and config("b", 5) == 5 and config("c", 5) == 0 and config("d", 5) == 5
    assert config.read_keys == {"a", "b", "c"}
    assert translate({"optim.lr": None}).ours == {"actor.clip": None}


def test_each_key_that_is_left_out_has_a_reason_and_says_whether_training_differs() -> None:
    result = translate(
        {"log.dir": "x", "algo.kl": 0, "algo.kl_coef": 0.1, "algo.clip": "odd", "algo.epochs": 1, "new": 1}
    )
    assert result.omitted == {
        "log.dir": ("rlhpc logs in its own way", False),
        "algo.kl": ("there is no KL term", False),
        "algo.kl_coef": ("there is no KL term", True),
        "algo.clip": ("rlhpc clips otherwise", True),
        "algo.epochs": ("with this value, what rlhpc does anyway", False),
        "new": ("the importer does not know this key", True),
    }


def test_a_reason_is_recorded_for_written_keys_alone() -> None:
    config = ForeignConfig({"a": 1}, {"b": 2})
    assert config.omit("a", "why", changes_training=False) is UNSET and config.omit("b", "why") is UNSET
    assert config.reasons == {"a": ("why", False)}
