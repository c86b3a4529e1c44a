"""RO-Crate metadata; tests/integration/publishing/test_bundles.py has the community's validator judge it."""

from __future__ import annotations

import json
from typing import Any

from rlhpc.publishing.crate import metadata

RECORD: dict[str, Any] = {
    "run": "small", "state": "finished", "global_step": 2, "max_steps": 2, "stop_reason": "max_steps", "author": "A. Turing",
    "created": "2026-11-01T10:00:00+01:00", "updated": 1.7e9, "versions": {"rlhpc": "0.1.0"}, "licence": "CC-BY-4.0",
    "command": {"config": "a.yaml", "overrides": ["runner.seed=2"]}, "code": [{"role": "project", "commit": "abc"}],
    "checkpoints": [{"global_step": 2, "included": False, "files": {"model.safetensors": {"size": 7, "sha256": "ff"}}}],
    "inputs": [{"key": "data.train.path", "name": "inputs/0-a b.jsonl", "included": False,
                "files": {"": {"size": 1, "sha256": "ee"}}}],
}  # fmt: skip
FILES = dict.fromkeys(
    ("config.yaml", "workflow/Snakefile", "run/eval/a b.json", "run/logs/x.err", "code/project/a.py"), (5, "aa")
)


def graph(**changes: Any) -> dict[str, dict[str, Any]]:
    content = json.loads(metadata({**RECORD, **changes}, FILES, ["run/logs", "code/project"]))
    assert content["@context"] == ["https://w3id.org/ro/crate/1.1/context",
                                   {"sha256": "https://w3id.org/ro/terms/workflow-run#sha256"}]  # fmt: skip
    return {entity["@id"]: entity for entity in content["@graph"]}


def ids(references: list[dict[str, str]]) -> list[str]:
    return [reference["@id"] for reference in references]


def test_the_run_is_an_action_of_the_workflow() -> None:
    entities = graph()
    action, root = entities["#run"], entities["./"]
    assert root["mainEntity"] == action["instrument"] == {"@id": "workflow/Snakefile"}
    assert "ComputationalWorkflow" in entities["workflow/Snakefile"]["@type"]
    assert ids(action["object"]) == ["config.yaml", "#input-0-a%20b.jsonl"]
    assert ids(action["result"]) == ["run/eval/a%20b.json", "#checkpoint-2"]
    assert action["actionStatus"]["@id"].endswith("CompletedActionStatus") and "error" not in action
    assert action["description"] == "rlhpc run a.yaml runner.seed=2: 2 of 2 training steps"
    assert root["datePublished"] == action["endTime"] == "2023-11-14T22:13:20+00:00", "the run's time, not today's"
    assert root["license"] == {"@id": "https://spdx.org/licenses/CC-BY-4.0"}
    assert entities["#checkpoint-2"]["identifier"] == ["model.safetensors sha256:ff"]


def test_every_reference_has_an_entity_and_folders_stand_for_their_files() -> None:
    entities = graph()
    assert set(ids(entities["./"]["hasPart"])) == {
        "config.yaml", "workflow/Snakefile", "run/eval/a%20b.json", "run/logs/", "code/project/",
    }  # fmt: skip
    for entity in entities.values():
        for value in entity.values():
            for reference in value if isinstance(value, list) else [value]:
                target = reference.get("@id", "") if isinstance(reference, dict) else ""
                assert target in entities or "://" in target or not target, target


def test_a_run_that_failed_says_so() -> None:
    action = graph(state="failed", stop_reason="out of memory", updated=None)["#run"]
    assert action["actionStatus"]["@id"].endswith("FailedActionStatus")
    assert action["error"] == "the run is failed: out of memory" and "endTime" not in action
