"""Translation rules: what becomes of each foreign key, and why."""

from __future__ import annotations

from typing import Any

from rlhpc.cli.foreign.rules import UNSET, Reading, Rows, UnsupportedKeys, apply_rules


def steps(read: Reading) -> Any:
    """Computes steps from epochs; one epoch is what rlhpc does anyway."""
    epochs = read("algo.epochs", 1)
    return UNSET if epochs == 1 else epochs * read("algo.batches", 10)


def clip(read: Reading) -> Any:
    """Leaves a kind of clipping out."""
    return read.omit("algo.clip", "rlhpc clips otherwise") if read("algo.clip") == "odd" else read("algo.clip")


RULES: Rows = [
    ("actor.lr", "optim.lr"),
    ("actor.steps", steps),
    ("actor.clip", clip),
    ("actor.model.kwargs", lambda read: read.below("model") or UNSET),
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


def test_null_counts_as_missing() -> None:
    read = Reading({"a": None, "b": "None", "c": 0}, {"a": 1})
    assert read("a", 5) == 1 and read("b", 5) == 5 and read("c", 5) == 0 and read("d", 5) == 5
    assert read.read_keys == {"a", "b", "c"}
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
    read = Reading({"a": 1}, {"b": 2})
    assert read.omit("a", "why", changes_training=False) is UNSET and read.omit("b", "why") is UNSET
    assert read.reasons == {"a": ("why", False)}
