"""Task types of language models: their checks, their metrics, and requests that they refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import with_value
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.task_types import DPO, GRPO, REWARD_MODEL, SFT
from rlhpc.runs.configuration import load_config
from rlhpc.runs.preflight import Need
from rlhpc.runs.task_type import Exporting, PlayOptions
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = {"reasoning": "demo", "sft": "demo_sft", "dpo": "dpo", "reward_model": "reward_model"}
TYPES: Mapping[str, Any] = {"reasoning": GRPO, "sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}
TINY = (
    "runner.name=tiny", "actor.model.model_path=builtin:tiny", "actor.model.kwargs={hidden: 16, layers: 1, heads: 1}"
)  # fmt: skip
SUITES = "data.eval=[{name: a, source: arithmetic, size: 4}, {name: b, source: arithmetic, size: 4, samples: 4}]"
ANSWERED = ["eval/accuracy", "eval/reward", "eval/truncated"]


def load(name: str, *overrides: str) -> Any:
    return load_config(CONFIGS / "reasoning" / f"{FILES[name]}.yaml", overrides)


def rows_file(folder: Path, name: str, **row: object) -> str:
    """Writes eight rows with a sum as the prompt, and returns the file's path."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", **row}) + "\n" for n in range(8)))
    return str(path)


@pytest.mark.parametrize(
    ("name", "overrides", "metrics"),
    [
        ("reasoning", ["runner.val_check_interval=80"], ANSWERED),
        ("reasoning", ["runner.val_check_interval=-1"], []),
        (
            "reasoning",
            ["runner.val_check_interval=80", SUITES, "workflow.eval_suites=[a, b]"],
            [*ANSWERED, *(f"eval/b/{each}" for each in ("accuracy", "reward", "truncated", "pass_at_4", "majority"))],
        ),
        ("sft", ["runner.val_check_interval=60"], ["eval/loss"]),
        (
            "sft",
            ["runner.val_check_interval=60", "cluster.component_placement={'actor,rollout': 0}"],
            ["eval/loss", *ANSWERED],
        ),
        ("dpo", [], ["eval/loss", "eval/pair_accuracy", "eval/margin"]),
        ("reward_model", [], [f"eval/{each}" for each in ("accuracy", "loss", "margin", "calibration_error")]),
    ],
)
def test_metrics_that_choose_a_checkpoint(name: str, overrides: list[str], metrics: list[str]) -> None:
    assert list(TYPES[name].checks.evaluation_metrics(load(name, *overrides))) == metrics


def test_a_reward_model_of_labels_has_other_metrics() -> None:
    cfg = with_value(with_value(load("reward_model"), "algorithm.loss_kwargs", {}), "algorithm.loss_type", "regression")
    metrics = [f"eval/{each}" for each in ("accuracy", "loss", "mse", "r2", "spearman")]
    assert list(REWARD_MODEL.checks.evaluation_metrics(cfg)) == metrics


def test_a_validation_loss_needs_held_out_rows(tmp_path: Path) -> None:
    path = rows_file(tmp_path, "rows", response="2")
    given = [*TINY, f"data.train={{source: jsonl, path: '{path}'}}", "runner.val_check_interval=60"]
    with pytest.raises(ConfigError, match=r"runner.val_check_interval .* the loss needs held-out rows"):
        load_config(CONFIGS / "base" / "sft.yaml", given)
    load_config(CONFIGS / "base" / "sft.yaml", [*given, "data.train.eval_fraction=0.5"])


def load_with_files(name: str, folder: Path) -> Any:
    """Returns a configuration with a tiny model, data in files, and a suite."""
    sizes = ["runner.max_steps=1", "data.prompts_per_step=4", "data.max_prompt_tokens=24"]
    if name in ("reasoning", "sft"):
        path = rows_file(folder, "rows", answer="2", response="2")
        data = [
            f"data.train={{source: jsonl, path: '{path}'}}",
            "data.eval=[{name: held_out, source: arithmetic, size: 8}]",
        ]
        data += ["workflow.eval_suites=[held_out]", "reward.terms=[{name: exact}]", "rollout.max_new_tokens=6"]
        sizes += ["algorithm.group_size=4"] if name == "reasoning" else []
        file = "base/grpo.yaml" if name == "reasoning" else "base/sft.yaml"
    else:
        path = rows_file(folder, "rows", chosen="2", rejected="no")
        other = rows_file(folder, "held_out", chosen="3", rejected="no")
        suite = f"data.eval=[{{name: held_out, source: jsonl, path: '{other}'}}]"
        data = [f"data.train.path={path}", f"data.holdout.path={other}" if name == "dpo" else suite]
        file = f"reasoning/{name}.yaml"
    return load_config(CONFIGS / file, [*TINY, *data, *sizes])


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_preflight_reads_model_and_data(name: str, tmp_path: Path) -> None:
    cfg, checks = load_with_files(name, tmp_path), TYPES[name].checks
    ranks = {"actor": 1, "rollout": 1} if name == "reasoning" else {"actor": 1}
    with checks.trial(cfg) as trial_cfg:
        model = Path(trial_cfg.actor.model.model_path)
        assert (model / "config.json").is_file()
        preflight = list(checks.preflight(trial_cfg, ranks))
        names = [check.name for check in preflight]
        assert names[:2] == ["data.eval[held_out]", "actor.model and data.train"]
        assert ("reward.terms" in names) == ("the groups' models" in names) == (name == "reasoning")
        for check in preflight:
            assert check.resource.need is Need.FILES
            check.run()
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
        with pytest.raises(ConfigError, match=r"rows.jsonl"):
            preflight[1].run()
    assert not model.exists(), "models of a trial are temporary"


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_built_in_model_is_written_once_the_data_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHPC_MODELS", str(tmp_path / "models"))
    cfg, checks = load_with_files(name, tmp_path), TYPES[name].checks
    content = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"rows.jsonl"):
        checks.prepare(cfg, resumes=False)
    assert not (tmp_path / "models").exists()
    (tmp_path / "rows.jsonl").write_text(content)
    prepared = checks.prepare(cfg, resumes=False)
    assert (Path(prepared.actor.model.model_path) / "config.json").is_file()
    assert Path(prepared.actor.model.model_path).is_relative_to(tmp_path)


def test_groups_share_the_actor_s_built_in_model_unless_they_have_arguments() -> None:
    cfg = load("reasoning")
    models = {"actor": "builtin:tiny", "teacher": "builtin:tiny", "judge": "builtin:tiny", "critic": "/models/critic"}
    for section, path in models.items():
        cfg = with_value(cfg, f"{section}.model.model_path", path)
    cfg = with_value(cfg, "judge.model.kwargs", {"hidden": 16})
    resolved = GRPO.checks.with_models(cfg, lambda model: f"/made/{dict(model.kwargs)}")  # type: ignore[attr-defined]
    assert resolved.actor.model.model_path == resolved.teacher.model.model_path == "/made/{}"
    assert resolved.judge.model.model_path == "/made/{'hidden': 16}"
    assert resolved.critic.model.model_path == "/models/critic"


def test_a_checkpoint_of_another_model_differs_by_its_keys(tmp_path: Path) -> None:
    checkpoint, model = tmp_path / "checkpoint", tmp_path / "model"
    for folder, layers in ((checkpoint / "model", 2), (model, 4)):
        folder.mkdir(parents=True)
        config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
    saved = {"actor.training_backend": "fsdp", "actor.lora.rank": 4, "about": {"lora": {"alpha": 8}}}
    (checkpoint / "backend.json").write_text(json.dumps(saved))
    cfg = load("sft", f"actor.model.model_path={model}", "actor.training_backend=local", "actor.lora.rank=4")
    cfg = with_value(cfg, "actor.lora.alpha", 16)
    assert SFT.checks.differences(cfg, checkpoint) == [
        "actor.training_backend is 'fsdp' there and 'local' here",
        "actor.lora.alpha is 8 there and 16 here",
        "actor.model.model_path names another model (num_hidden_layers 2 there and 4 here)",
    ]
    (checkpoint / "backend.json").unlink()
    (checkpoint / "model" / "config.json").unlink()
    critic = ("cluster.component_placement={'actor,rollout,critic': 0}", "algorithm.adv_type=gae")
    with_critic = load("reasoning", "critic.model.model_path=builtin:tiny", *critic)
    assert GRPO.checks.differences(with_critic, checkpoint) == ["it has no critic"]
    (checkpoint / "critic").mkdir()
    assert GRPO.checks.differences(with_critic, checkpoint) == []


def test_requests_that_no_language_model_can_answer_are_refused(tmp_path: Path) -> None:
    cfg, offline = load("reasoning"), GRPO.offline
    preparation = offline.preparation(cfg)
    assert preparation.sft is not None and preparation.sft[0].endswith("demo_sft.yaml") and preparation.evaluates_start
    with pytest.raises(ConfigError, match=r"--episodes is for runs with simulators; data.eval says"):
        offline.evaluate(cfg, tmp_path, suite="held_out", episodes=3, output=None, trust_code=False)
    with pytest.raises(ConfigError, match="--episodes is for runs with simulators; a language model"):
        offline.play(cfg, tmp_path, PlayOptions(video=tmp_path / "video.mp4", episodes=3))
    with pytest.raises(ConfigError, match=r"--suite is 'held'; .*data.eval has: held_out"):
        offline.evaluate_model(cfg, suite="held", output=None)
    with pytest.raises(ConfigError, match="--released is for policies of robots"):
        offline.export(tmp_path, None, Exporting(released=True))
    assert REWARD_MODEL.offline.preparation(load("reward_model")).sft is None


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_report_has_the_curves_and_the_progress_of_its_task_type(name: str, tmp_path: Path) -> None:
    reporting = TYPES[name].reporting
    metric, title = reporting.trained
    rows = [{"step": step, metric: 0.5 * step, reporting.rate: 10.0} for step in (1, 2)]
    assert {*reporting.curves} <= {*reporting.charts(RunPaths(tmp_path), rows)}
    parts = reporting.parts(RunPaths(tmp_path), rows, linked=False)
    assert parts.trained == (metric, title) and f">{title.capitalize()}<" in parts.cards and "1.000" in parts.cards
    assert metric in {headline.metric for headline in reporting.headlines}
