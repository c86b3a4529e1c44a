"""Names of metrics that choose a checkpoint are those that evaluations during training give."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.algorithms.preference_losses import find_reward_loss
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.evaluation import evaluate
from rlhpc.language.evaluation.reward_model import preference_validation_metrics as preference_metrics
from rlhpc.language.rollout.validation import validation_metrics as answer_metrics
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import task_type_of

CONFIGS = Path(__file__).resolve().parents[4] / "configs/reasoning"
EVERY = "runner.val_check_interval=5"


def names_of(config: str, *words: str) -> set[str]:
    cfg: Any = load_config(CONFIGS / config, [EVERY, "runner.name=x", *words])
    return set(task_type_of(cfg).checks.evaluation_metrics(cfg))


@pytest.mark.parametrize("samples", [1, 2])
def test_of_answers(samples: int) -> None:
    rows = [
        {
            "place": place, "sample": sample, "id": place, "reward": 1.0, "right": True, "failed": False, "finished": True,
            "tokens": 3, "level": "", "vote": "1", "terms": {"exact": 1.0},
        }
        for place in range(2)
        for sample in range(samples)
    ]  # fmt: skip
    given = answer_metrics([{"held_out": rows, "other": rows}])
    suite = "{{name: {0}, source: arithmetic, samples: {1}, temperature: 1.0}}"
    words = [
        f"data.eval=[{suite.format('held_out', samples)}, {suite.format('other', samples)}]",
        "workflow.eval_suites=[held_out, other]",
    ]
    names = names_of("demo.yaml", *words)
    assert names <= {*given} and {"eval/accuracy", "eval/other/accuracy"} <= names


@pytest.mark.parametrize(("loss_type", "responses"), [("bradley_terry", 2), ("regression", 1)])
def test_of_preferences_and_the_held_out_loss_is_that_of_training(loss_type: str, responses: int) -> None:
    loss, form = find_reward_loss(loss_type)
    rewards = torch.randn(7, responses, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = [
        {"place": place, "rewards": own, "target": place / 7, "level": "", "prompt": str(place)}
        for place, own in enumerate(rewards.tolist())
    ]
    parts = [{"held_out": rows[rank::3]} for rank in range(3)]
    given = preference_metrics(parts, form, loss)
    chosen = f"algorithm={{loss_type: {loss_type}, loss_kwargs: {{}}}}"
    assert names_of("reward_model.yaml", chosen) <= {*given}
    each = loss(*rewards.unbind(1), torch.arange(7, dtype=torch.float64) / 7)
    assert given["eval/loss"] == pytest.approx(float(each.mean()), abs=1e-12)


class Letters:
    """Tokenizer whose tokens are letters."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def test_an_answer_of_one_turn_has_each_sampled_token_with_its_log_prob(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = Episode(0, (65,), turns=1)
    episode.append([98, 99, 100], 0, [-0.123456, -1.0, -2.5], [0, 0, 0])
    episode.append([101], 1)  # what an agent says at the end
    tokens = [["b", -0.1235], ["c", -1.0], ["d", -2.5]]
    assert evaluate.transcript(episode, Letters()) == {"drawn": tokens}
    monkeypatch.setattr(evaluate, "_MAX_DRAWN_TOKENS", 2)
    assert evaluate.transcript(episode, Letters()) == {"drawn": tokens[:2]}


def noise(seed: int, width: int = 640, height: int = 320) -> bytes:
    """Returns a PNG of noise."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, "PNG")
    return file.getvalue()


def test_images_of_prompts_are_saved_small_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    first, second, third = noise(0), noise(1, 20, 10), noise(2)
    prompts = [
        Prompt(n, (), images=images) for n, images in enumerate([(first, second), (), (first,), (third, second)])
    ]
    problems: Any = [(prompt, (), [], None) for prompt in prompts]
    rows: list[dict[str, Any]] = [{} for _ in range(8)]
    folder = tmp_path / "run" / "held_out.images"
    evaluate._write_previews(problems, rows, 2, folder)
    assert rows[2] == rows[3] == {}, "a prompt without images"
    assert rows[0] == rows[1] and rows[0]["num_images"] == 2 and rows[4]["images"] == rows[0]["images"][:1]
    names = {name for row in rows for name in row.get("images", ())}
    assert names == {path.name for path in folder.iterdir()} and len(names) == 3
    assert Image.open(folder / rows[0]["images"][0]).size == (384, 192)
    assert Image.open(folder / rows[0]["images"][1]).size == (20, 10)
    # together they stay below a limit, and a row says how many there are
    limit = (folder / rows[0]["images"][0]).stat().st_size + 2000
    monkeypatch.setattr(evaluate, "_MAX_PREVIEW_BYTES", limit)
    evaluate._write_previews(problems, rows, 2, tmp_path / "small")
    assert sum(path.stat().st_size for path in (tmp_path / "small").iterdir()) <= limit
    assert [(len(row["images"]), row["num_images"]) for row in rows[::2] if row] == [(2, 2), (1, 1), (1, 2)]
    assert [path.name for path in (tmp_path / "small").iterdir() if path.suffix != ".jpg"] == []


def test_without_images_no_folder_is_made(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{}]
    problems: Any = [(Prompt(0, ()), (), [], None)]
    evaluate._write_previews(problems, rows, 1, tmp_path / "images")
    assert rows == [{}] and not (tmp_path / "images").exists()
