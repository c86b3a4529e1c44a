"""Evaluation of a real (tiny) model by a real engine with real judges."""

from __future__ import annotations

import json
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")
sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import make_config, train

from rlhpc import Worker
from rlhpc.checkpoint import CheckpointWriter
from rlhpc.config.typed import default_section
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.config.rewards import RewardTermConfig
from rlhpc.language.config.run import GrpoConfig as Config
from rlhpc.language.evaluation.evaluate import describe, evaluate_language_model, find_suite, vote
from rlhpc.language.export import export_language_model
from rlhpc.language.models.tiny import make_tiny_model
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.reporting.sample_pages import compare, read_samples
from rlhpc.metrics.statistics import wilson_interval
from rlhpc.runs.report import write_report
from rlhpc.runtime.errors import CheckpointError, ConfigError

QUESTIONS = [f"{a}+{b}=" for a in range(10, 14) for b in range(20, 23)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return folder


def problems(path: Path, answers: list[str]) -> Path:
    lines = [
        {"prompt": question, "answer": answer, "level": f"level {1 + i % 2}"}
        for i, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(model: Path, *suites: dict[str, Any], **changes: Any) -> Any:
    common = {"source": "jsonl", "level_key": "level", "chat_template": False}
    cfg = OmegaConf.merge(default_section(Config), {
        "runner": {"name": "test", "task_type": "reasoning", "seed": 3},
        "actor": {"model": {"model_path": str(model)}},
        "rollout": {"rollout_backend": "hf", "max_new_tokens": 6, "max_batch_size": 5},
        "data": {"eval": [{**common, **suite} for suite in suites]},
        "reward": {"terms": [{"name": "exact"}, {"name": "length", "weight": 0.5, "kwargs": {"limit": 6}}]},
    })  # fmt: skip
    return OmegaConf.merge(cfg, changes)


@pytest.fixture(scope="module")
def suite(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of which the model, by construction, gets the first five right: their answers are what it says."""
    folder = tmp_path_factory.mktemp("data")
    blank = problems(folder / "blank.jsonl", ["?"] * len(QUESTIONS))
    evaluate_language_model(config(model, {"path": str(blank)}), model, output=folder / "blank.json")
    said = [row["response"] for row in read_samples(folder / "blank.samples.jsonl")]
    assert len(said) == 12 and all(said)
    return problems(folder / "suite.jsonl", [text if i < 5 else "?" for i, text in enumerate(said)])


def test_greedy_accuracy(model: Path, suite: Path, tmp_path: Path) -> None:
    output = tmp_path / "eval" / "global_step_0" / "default.json"
    cfg = config(model, {"path": str(suite), "name": "sums"})
    result = evaluate_language_model(cfg, model, output=output)
    assert json.loads(output.read_text()) == result
    assert (result["n"], result["samples"], result["accuracy"]) == (12, 1, 5 / 12)
    assert result["accuracy_ci95"] == list(wilson_interval(5, 12))
    assert result["levels"]["level 1"]["accuracy"] == 0.5 and result["levels"]["level 2"]["accuracy"] == 2 / 6
    facts = {"suite": "default", "global_step": 0, "backend": "hf", "seed": 3, "temperature": 0.0, "failed": 0}
    assert {name: result[name] for name in facts} == facts and result["model"] == str(model)
    rows = list(read_samples(output.with_name("default.samples.jsonl")))
    assert [row["prompt"] for row in rows] == QUESTIONS
    assert [row["right"] for row in rows] == [True] * 5 + [False] * 7
    assert set(rows[0]["terms"]) == {"exact", "length"} and 0 < rows[0]["tokens"] <= 6
    assert {name: result[name] for name in summarize(rows)} == summarize(rows)
    assert describe(result).startswith(
        "accuracy 41.7% (95 % interval 19.3% to 68.0%) on 12 problems; suite default, step 0, hf"
    )


def test_sampled_evaluations_repeat_for_a_seed(model: Path, suite: Path, tmp_path: Path) -> None:
    def run(folder: str, **changes: Any) -> tuple[bytes, bytes]:
        cfg = config(model, {"path": str(suite), "name": "sampled", "samples": 4, "temperature": 1.0}, **changes)
        evaluate_language_model(cfg, model, "sampled", tmp_path / folder / "sampled.json")
        return tuple((tmp_path / folder / name).read_bytes() for name in ("sampled.json", "sampled.samples.jsonl"))

    first = run("a")
    result, rows = json.loads(first[0]), list(read_samples(tmp_path / "a" / "sampled.samples.jsonl"))
    assert list(result["pass_at_k"]) == ["1", "2", "4"] and result["n"] == 12 and len(rows) == 48
    assert [row["sample"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    assert len({row["response"] for row in rows[:4]}) > 1  # samples of one problem differ
    assert run("b", rollout={"max_batch_size": 48}) == first
    assert run("c", runner={"seed": 4})[1] != first[1]


def test_no_row_is_lost_or_mixed_up(model: Path, suite: Path, tmp_path: Path) -> None:
    """What a sample says does not depend on how many are asked for, or on the order in which they end."""
    texts = []
    for samples in (2, 3):
        cfg = config(model, {"path": str(suite), "samples": samples, "temperature": 0.7})
        evaluate_language_model(cfg, model, output=tmp_path / f"{samples}.json")
        rows = read_samples(tmp_path / f"{samples}.samples.jsonl")
        texts.append({(row["prompt"], row["sample"]): row["response"] for row in rows})
    assert len(texts[0]) == 24 and len(texts[1]) == 36
    assert texts[0] == {key: text for key, text in texts[1].items() if key[1] < 2}


def test_step_and_report(model: Path, suite: Path, tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    paths.root.mkdir()
    paths.config.write_text(f"runner: {{task_type: reasoning}}\nactor: {{model: {{model_path: {model}}}}}\n")
    for step in (0, 7):
        exported = tmp_path / f"global_step_{step}"
        exported.symlink_to(model)
        cfg = config(model, {"path": str(suite)})
        result = evaluate_language_model(cfg, exported, output=paths.eval_result(step, "default"))
        assert result["global_step"] == step
    elsewhere = evaluate_language_model(cfg, tmp_path / "global_step_7", output=tmp_path / "seven.json")
    of_this_run = evaluate_language_model(cfg, tmp_path / "global_step_7", output=tmp_path / "global_step_0" / "x.json")
    assert (elsewhere["global_step"], of_this_run["global_step"]) == (7, 0)
    write_report(paths)
    page = (paths.report.parent / "samples.html").read_text()
    assert page.count('<article class="problem">') == 12 and "step 7" in page and "41.7%" in paths.report.read_text()


def test_checkpoint(suite: Path, tmp_path: Path) -> None:
    """A checkpoint is evaluated as what it would be converted to; an export is taken only where it is of this one."""
    need_extra("llm")
    base, paths = tmp_path / "tiny", RunPaths(tmp_path / "run")
    make_tiny_model(base, vocabulary=string.printable[:60], hidden=32, layers=2)
    with CheckpointWriter(paths, 2) as writer:
        train(Worker(), make_config(base), steps=range(2), save=writer.staging)
        writer.commit({})
    cfg = config(base, {"path": str(suite)})

    def evaluate(model: Path) -> list[str]:
        result = evaluate_language_model(cfg, model, output=tmp_path / "result.json")
        assert result["model"] == str(model)
        assert result["global_step"] == (0 if model == base else 2)
        return [row["response"] for row in read_samples(tmp_path / "result.samples.jsonl")]

    untrained, trained = evaluate(base), evaluate(writer.final)
    assert trained != untrained and not paths.export(2).exists()
    exported = export_language_model(writer.final)
    assert evaluate(exported) == trained == evaluate(writer.final)
    shutil.copy(base / "model.safetensors", exported / "model.safetensors")
    assert evaluate(writer.final) == evaluate(exported) == untrained  # so the export was taken
    record = json.loads((exported / "conversion.json").read_text())
    (exported / "conversion.json").write_text(json.dumps({**record, "manifest_sha256": "of another"}))
    assert evaluate(writer.final) == trained
    (writer.final / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*or evaluate another checkpoint"):
        evaluate_language_model(cfg, writer.final)


def test_what_is_wrong_is_said_once(model: Path, suite: Path, tmp_path: Path) -> None:
    cfg = config(model, {"path": str(suite), "name": "easy"}, {"path": str(suite), "name": "hard"})
    assert find_suite(cfg, "default").name == "easy" and find_suite(cfg, "hard").name == "hard"
    with pytest.raises(ConfigError, match=r"--suite is 'harder'; did you mean 'hard'\? data.eval has: easy, hard"):
        evaluate_language_model(cfg, model, "harder")
    with pytest.raises(ConfigError, match=r"data\.eval is empty"):
        evaluate_language_model(config(model), model)
    with pytest.raises(ConfigError, match="samples 4 and temperature 0"):
        evaluate_language_model(config(model, {"path": str(suite), "samples": 4}), model)
    cfg.reward.terms = []
    with pytest.raises(ConfigError, match=r"reward\.terms is empty"):
        evaluate_language_model(cfg, model)
    with pytest.raises(ConfigError, match="nowhere"):
        evaluate_language_model(config(model, {"path": str(suite)}), tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="rollout_backend is 'vlmm'"):
        evaluate_language_model(config(model, {"path": str(suite)}), model, backend="vlmm")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        evaluate_language_model(config(model, {"path": str(suite)}), model, output=tmp_path / "file" / "x.json")


def test_prompts_that_are_too_long_are_counted(model: Path, suite: Path) -> None:
    long = suite.with_name("long.jsonl")
    long.write_text(suite.read_text() + json.dumps({"prompt": "1" * 40, "answer": "1", "level": "level 3"}) + "\n")
    cfg = config(model, {"path": str(long)}, data={"max_prompt_tokens": 16, "overlong_prompts": "drop"})
    result = evaluate_language_model(cfg, model)
    assert (result["n"], result["dropped"], result["accuracy"]) == (12, 1, 5 / 12)
    cfg.data.overlong_prompts = "error"
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        evaluate_language_model(cfg, model)


def test_compare(model: Path, suite: Path, tmp_path: Path) -> None:
    for name, temperature in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        cfg = config(model, {"path": str(suite), "temperature": temperature})
        evaluate_language_model(cfg, model, output=tmp_path / f"{name}.json")
    same = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert (same["n"], same["same_text"], same["same_right"], same["difference"]) == (12, 1.0, 1.0, 0.0)
    assert same["accuracy"] == [5 / 12, 5 / 12] and same["examples"] == []
    assert same["difference_ci95"] == [
        -wilson_interval(0, 12)[1],
        wilson_interval(0, 12)[1],
    ]  # 12 problems do not prove that none differs
    other = compare(tmp_path / "a.json", tmp_path / "c.json")
    assert other["same_text"] < 1 and other["difference"] == pytest.approx(other["accuracy"][1] - 5 / 12)
    low, high = other["difference_ci95"]
    assert low <= other["difference"] <= high and other["examples"][0]["first"] != other["examples"][0]["second"]
    with pytest.raises(ConfigError, match=r"nothing\.samples\.jsonl: cannot be read"):
        compare(tmp_path / "a.json", tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("term", "response", "answer", "right", "given"),
    [
        ("math", "so \\boxed{\\frac{1}{2}}", "0.5", True, "1/2"),
        ("math", "so \\boxed{\\sqrt{4}}", "#### 2", True, "2"),  # equal to the reference, however it is written
        ("math", "#### 1,200 ", "7", False, "1200"),
        ("math", "it is 12", "7", False, ""),  # no answer to be found
        ("exact", "Paris", "London", False, "paris"),
        ("reasoning_gym", "because\n<answer> [1, 2] </answer>", "", True, "[1, 2]"),
        ("code", "def f(): pass", "", True, ""),
    ],
)
def test_votes(term: str, response: str, answer: str, right: bool, given: str) -> None:
    assert vote(response, answer, right, OmegaConf.structured(RewardTermConfig(name=term))) == given


def test_votes_of_lenient_math() -> None:
    term = RewardTermConfig(name="math", kwargs={"last_number": True})
    assert vote("3 + 4 is 8", "7", False, OmegaConf.structured(term)) == "8"


@pytest.mark.long
def test_vllm_gives_the_same_greedy_answers(model: Path, suite: Path, tmp_path: Path) -> None:
    need_extra("vllm")
    cfg = config(model, {"path": str(suite)})
    evaluate_language_model(cfg, model, output=tmp_path / "hf.json")
    result = evaluate_language_model(cfg, model, output=tmp_path / "vllm.json", backend="vllm")
    assert result["backend"] == "vllm" and cfg.rollout.rollout_backend == "hf"
    both = compare(tmp_path / "hf.json", tmp_path / "vllm.json")
    assert both["same_text"] == 1.0, both["examples"]
    assert result["accuracy"] == 5 / 12
