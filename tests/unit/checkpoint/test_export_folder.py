"""Folders of exports: replaced as a whole, with the umask's modes, and the metadata and tables of model cards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.checkpoint import CheckpointWriter, verify
from rlhpc.checkpoint.export_folder import (
    checkpoint_results,
    default_output,
    filled_folder,
    format_accuracy_table,
    format_card_header,
    read_object,
    require_free,
)
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_of_checkpoints_and_exports_follow_the_umask(paths: RunPaths, umask: int, mode: int) -> None:
    """A colleague may evaluate what is not kept from him; safetensors by itself makes files that are the owner's alone."""
    import torch

    from rlhpc.checkpoint.state import save_tensors

    before = os.umask(umask)
    try:
        with CheckpointWriter(paths, 1) as writer:
            save_tensors(writer.path("model.safetensors"), {"w": torch.zeros(2)})
            writer.add_bytes("runner.json", b"{}")
            checkpoint = writer.commit()
        with filled_folder(paths.export(1)) as staging:
            save_tensors(staging / "model.safetensors", {"w": torch.zeros(2)})
    finally:
        os.umask(before)
    files = [path for folder in (checkpoint, paths.export(1)) for path in folder.iterdir()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: oct(mode) for path in files}
    assert not verify(checkpoint)


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "below" / "export"
    with filled_folder(target) as staging:
        (staging / "config.json").write_text("1")
    with filled_folder(target) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "weights").write_text("2")
    assert [path.name for path in target.rglob("*")] == ["sub", "weights"], "nothing of the first is left"
    with pytest.raises(ZeroDivisionError), filled_folder(target) as staging:
        (staging / "half").write_text("3")
        raise ZeroDivisionError
    assert not (target / "half").exists() and [path.name for path in target.parent.iterdir()] == ["export"]


def test_only_exports_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    require_free(tmp_path / "none")
    require_free(tmp_path)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(CheckpointError, match="exists and is not an export folder"):
        require_free(tmp_path)
    with pytest.raises(CheckpointError, match="exists and is not an export folder"):
        require_free(tmp_path / "mine.txt")
    (tmp_path / "adapter_config.json").touch()
    require_free(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "missing, so the policy cannot be rebuilt"), ("{", "cannot be read as JSON"), ("[]", "not a JSON object")],
)
def test_what_describes_a_policy_is_an_object(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "model.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=said):
        read_object(path)
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}


def test_results_are_those_of_the_checkpoints_step(paths: RunPaths, tmp_path: Path) -> None:
    for step, name, content in ((3, "a", '{"return_mean": 1.5}'), (3, "b", "{"), (3, "c", '{"accuracy": 0.5}'),
                                (4, "a", '{"return_mean": 9}')):  # fmt: skip
        path = paths.eval_result(step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    checkpoint = paths.checkpoint(3)
    checkpoint.mkdir(parents=True)
    assert checkpoint_results(checkpoint, 3) == [{"return_mean": 1.5}]
    assert checkpoint_results(checkpoint, 3, "accuracy") == [{"accuracy": 0.5}]
    assert checkpoint_results(tmp_path / "elsewhere", 3) == []
    assert default_output(checkpoint, 3) == paths.export(3)


def card(**changes: Any) -> dict[str, Any]:
    text = format_card_header(
        **{
            "library": "rlhpc",
            "task": "reinforcement-learning",
            "licence": None,
            "name": "mine",
            "tags": ["ppo"],
            **changes,
        }
    )
    assert text.startswith("---\n") and text.endswith("---\n")
    loaded: dict[str, Any] = yaml.safe_load(text.strip("-\n"))
    return loaded


def test_a_card_names_its_results_by_environment_and_suite() -> None:
    assert card() == {
        "library_name": "rlhpc",
        "pipeline_tag": "reinforcement-learning",
        "license": "other",
        "tags": ["ppo"],
    }
    result = {"env_id": "X-v0", "suite": "far", "return_mean": 1.234, "return_std": 0.5, "success_once": 0.25}
    [entry] = card(licence="mit", results=[result])["model-index"][0]["results"]
    assert (
        entry["dataset"] == {"type": "X-v0", "name": "X-v0 (far)"} and entry["task"]["name"] == "reinforcement learning"
    )
    assert [(metric["type"], metric["value"]) for metric in entry["metrics"]] == [
        ("mean_reward", "1.23 +/- 0.50"), ("success_once", 0.25)
    ]  # fmt: skip
    [entry] = card(results=[{"suite": "gsm", "accuracy": 0.5}])["model-index"][0]["results"]
    assert entry["dataset"]["name"] == "gsm" and entry["metrics"][0]["value"] == 0.5


def test_a_table_has_a_row_for_each_suite_with_its_largest_k() -> None:
    assert format_accuracy_table([]) == ""
    results = [{"suite": "gsm", "n": 10, "accuracy": 0.5, "accuracy_ci95": [0.4, 0.6],
                "pass_at_k": {"1": 0.5, "4": 0.75, "2": 0.6}},
               {"accuracy": 0.25}]  # fmt: skip
    rows = format_accuracy_table(results).strip().splitlines()[2:]
    assert (
        rows[0].startswith("| gsm | 10 problems | 50.0% |")
        and "40.0% to 60.0%" in rows[0]
        and "pass@4 75.0%" in rows[0]
    )
    assert rows[1].startswith("| default |") and "| – |" in rows[1]
