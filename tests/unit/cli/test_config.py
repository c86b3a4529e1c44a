"""`rlhpc config show` and `rlhpc config schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rlhpc import cli


def words(*arguments: str) -> list[str]:
    return ["config", *arguments]


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words("show", "actor.optim.lr")) == 0
    first, *others = capsys.readouterr().out.split("\n\n")
    assert first == (
        "actor.optim.lr (embodied, off_policy, bc)\n  Learning rate.\n  type:      float\n  range:     (0, 10]\n"
        "  default:   0.0003\n  on resume: may not change: it determines the training"
    )
    assert [text.splitlines()[0] for text in others] == [
        "actor.optim.lr (reasoning, dpo)", "actor.optim.lr (sft)", "actor.optim.lr (reward_model)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("runner.on_nonfinite", "choices:   stop, skip"),
        ("runner.max_steps", "range:     [1, ∞) or -1 (null)"),
        ("runner.name", "default:   required"),
        ("env.eval.env_id", "default:   ${env.train.env_id}"),
        ("env.eval.seed", "on resume: may change; evaluations change with it"),
        ("data.eval[0].samples", "data.eval[].samples (reasoning, sft, dpo)"),
        ("reward.terms.0.weight", "reward.terms[].weight (reasoning, sft, dpo)"),
        ("rollout.rollout_backend", "names:     hf, vllm, or an import path"),
        ("runner.logger", "logger_backends  `jsonl` (always written)"),
        ("groups", "list of sections with max_tokens_per_micro_batch, name, scorer, model, kwargs"),
    ],
)
def test_what_it_says(key: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words("show", key)) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "actor.optim.lrr"), "there is no key actor.optim.lrr; did you mean actor.optim.lr?"),
        (("show", "learning_rate"), "there is no key learning_rate; did you mean actor.optim.lr?"),
        (("show", "nosuch.thing"), "there is no key nosuch.thing; rlhpc config show runner lists"),
        (("show",), "name a key"),
        (("show", "runner", "-o", "x"), "takes no --output"),
        (("show", "runner", "a.b=1"), "takes no key=value"),
        (("schema", "stf"), "did you mean 'sft'?"),
        (("import",), "name the other project's YAML file"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(*arguments)) == 2
    assert message in capsys.readouterr().err


def test_the_schema_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "schema.json"
    assert cli.main(words("schema", "sft", "-o", str(path))) == 0
    assert cli.main(words("schema", "site")) == 0
    runs, sites = json.loads(path.read_text()), json.loads(capsys.readouterr().out)
    for schema in (runs, sites):
        Draft202012Validator.check_schema(schema)
    document = {"cluster": {"partition": "gpu"}, "actor": {"optim": {"lr": 1e-5}}}
    assert Draft202012Validator(runs).is_valid(document) and not Draft202012Validator(sites).is_valid(document)
