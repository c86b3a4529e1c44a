"""Which changes of a configuration make another run, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlhpc.config import config_to_yaml
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.config_changes import (
    configuration_differences,
    evaluation_fingerprint,
    require_same_run,
    training_changes,
    training_fingerprint,
)
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError, UserError

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("actor.optim.lr=0.01", "training"),
        ("runner.seed=7", "training"),
        ("env.train.env_id=Acrobot-v1", "training"),
        ("env.train.num_envs=16", "training"),
        ("algorithm.gamma=0.9", "training"),
        ("env.eval.num_episodes=7", "evaluation"),
        ("workflow.suites={long: [env.eval.num_episodes=9]}", "evaluation"),
        ("runner.max_steps=999", "nothing"),
        ("cluster.time='10:00'", "nothing"),
        ("cluster.component_placement={actor: 0, rollout: 0, env: 0}", "nothing"),
        ("runner.logger.logger_backends=[jsonl]", "nothing"),
        ("runner.keep_checkpoints=9", "nothing"),
        ("actor.micro_batch_size=8", "nothing"),
    ],
)
def test_what_a_key_changes(override: str, what: str) -> None:
    before, after = load_config(QUICKSTART), load_config(QUICKSTART, [override])
    assert (training_fingerprint(before) != training_fingerprint(after)) == (what == "training")
    assert bool(training_changes(before, after)) == (what == "training")
    if what == "nothing" or override.startswith(("env.eval", "workflow.suites")):
        assert (evaluation_fingerprint(before) != evaluation_fingerprint(after)) == (what == "evaluation")


def test_a_saved_configuration_is_the_same_run(tmp_path: Path) -> None:
    cfg = load_config(QUICKSTART)
    saved = tmp_path / "config.yaml"
    require_same_run(saved, cfg, subject="run", way_out="…")  # nothing saved yet
    saved.write_text(config_to_yaml(cfg))
    require_same_run(saved, cfg, subject="run", way_out="…")
    changed = load_config(QUICKSTART, ["actor.optim.lr=0.5", "algorithm.gamma=0.5"])
    with pytest.raises(
        ConfigError, match=r"(?s)the run has another .*gamma: 0.98 → 0.5.*optim.lr: 0.001 → 0.5.*way out"
    ):
        require_same_run(saved, changed, subject="the run", way_out="way out")


def test_keys_of_other_versions_and_of_the_environment_are_no_difference(tmp_path: Path) -> None:
    content = yaml.safe_load(config_to_yaml(load_config(QUICKSTART)))
    content["algorithm"]["a_key_of_long_ago"] = 1
    del content["algorithm"]["gae_lambda"]
    content["runner"]["seed"] = "${oc.env:A_SEED}"
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump(content))
    require_same_run(saved, load_config(QUICKSTART, ["algorithm.gae_lambda=0.5"]), subject="run", way_out="…")


def test_a_saved_configuration_that_cannot_be_read(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    for junk in (b"\xff\xfe\x00", b"a: [1"):
        saved.write_bytes(junk)
        with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read"):
            require_same_run(saved, load_config(QUICKSTART), subject="run", way_out="…")


@pytest.mark.parametrize("change", ["added", "removed", "changed", "emptied", "filled"])
@pytest.mark.parametrize("mapping", ["env.train.kwargs", "actor.model.kwargs"])
def test_a_key_of_the_users_own_is_a_change_of_the_run(mapping: str, change: str) -> None:
    """Whichever side has it: it did not come with a version."""
    one, two, other = "{a: 1}", "{a: 1, b: 2}", "{a: 3}"
    before, after = {
        "added": (one, two), "removed": (two, one), "changed": (one, other), "emptied": (one, "{}"), "filled": ("{}", one),
    }[change]  # fmt: skip
    sides = []
    for value in (before, after):
        content = yaml.safe_load(config_to_yaml(load_config(QUICKSTART)))
        section = content
        *parents, name = mapping.split(".")
        for parent in parents:
            section = section[parent]
        section[name] = yaml.safe_load(value)
        sides.append(content)
    changes = training_changes(*sides)
    assert [change.key for change in changes] == [f"{mapping}.{'b' if change in ('added', 'removed') else 'a'}"]
    assert training_changes(sides[0], sides[0]) == []


def test_configurations_of_runs_differ_in_values_and_keys(tmp_path: Path) -> None:
    texts = {
        "a": "runner: {name: a, seed: 1, tags: [x]}\nonly: {here: null}\n",
        "b": 'runner: {name: b, seed: 2, tags: [x, "\\e[31my"]}\nrate: .nan\n',
        "c": "runner: {name: c, seed: 1, tags: [x]}\nempty: {}\n",
    }
    runs = {name: RunPaths(tmp_path / name) for name in texts}
    for name, text in texts.items():
        runs[name].root.mkdir()
        runs[name].config.write_text(text)
    result = configuration_differences(runs)
    assert result["runs"] == ["a", "b", "c"]
    rows = {row["key"]: row["values"] for row in result["rows"]}
    assert "\x1b" not in str(rows.pop("runner.tags"))
    assert rows == {
        "empty": [None, None, "{}"], "only.here": ["null", None, None], "rate": [None, "NaN", None],
        "runner.seed": ["1", "2", "1"],
    }  # fmt: skip
    assert configuration_differences({"a": runs["a"]})["rows"] == []


@pytest.mark.parametrize("text", ["runner: [", "- a list", "a: 1\n" * 3_000_000])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    run = RunPaths(tmp_path)
    run.config.write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml of a "):
        configuration_differences({"a": run})
    run.config.unlink()
    with pytest.raises(UserError, match=r"config\.yaml of a cannot be read: No such file"):
        configuration_differences({"a": run})
