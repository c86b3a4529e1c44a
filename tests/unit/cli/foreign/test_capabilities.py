"""Reasons of the importer: none of them denies what rlhpc has."""

from __future__ import annotations

import pytest

from rlhpc.cli.foreign import rlinf, rlinf_embodied
from rlhpc.cli.foreign.rlinf import EVERYWHERE
from rlhpc.runs.task_type import find_task_type
from tests.unit.cli.foreign.capabilities import capabilities, claims_absence, contradictions

TABLES = [
    *{
        id(entry): entry
        for kind in rlinf.KINDS
        if kind.task_type in ("embodied", "off_policy", "bc")
        for entry in kind.unsupported_of({}, find_task_type(kind.task_type).schema.keys)
    }.values(),
    *EVERYWHERE,
]
REQUIREMENTS = [*rlinf_embodied.REQUIREMENTS, *(one for kind in rlinf.KINDS for one in kind.requirements)]


def test_capabilities_are_those_of_schemas_and_registries() -> None:
    for name in (
        "crossq",
        "iql",
        "openvla",
        "lerobot",
        "maniskill",
        "gae",
        "grpo",
        "fsdp",
        "deepspeed",
        "bc",
        "reward_model",
    ):
        assert f"name {name}" in capabilities()
    assert contradictions(r"^embodied key actor\.lora\.rank") and contradictions(r"^option pi0\.num_steps")
    assert not contradictions("no such words anywhere")


@pytest.mark.parametrize("entry", [*TABLES, *REQUIREMENTS], ids=lambda entry: getattr(entry, "keys", None) or entry.key)
def test_what_a_reason_calls_missing_is_in_no_registry_and_no_schema(entry) -> None:
    assert not entry.missing_feature or not contradictions(entry.missing_feature)


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: entry.keys)
def test_a_reason_that_claims_absence_tells_of_what(entry) -> None:
    assert entry.missing_feature or not claims_absence(entry.reason)


@pytest.mark.parametrize(
    "false_claim",
    ["^name crossq$", r"^embodied key .*reward_model", r"^off_policy key .*demo_buffer", r"^embodied key actor\.fsdp"],
)
def test_a_claim_that_outlived_the_gap_is_found(false_claim: str) -> None:
    assert contradictions(false_claim)
