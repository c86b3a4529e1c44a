"""Prompts with pictures: what transformers' own processor and model make of them, and whole runs of SFT and GRPO."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from engine_models import change
from engine_ranks import engine_of
from lm_ranks import alone
from picture_ranks import train
from test_reasoning import TWO_ACTORS, LanguageRun
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlhpc.language.agents.episodes import Agent, Episode
from rlhpc.language.agents.registry import ToolAgent, run_episodes
from rlhpc.language.data import PromptTokenizer
from rlhpc.language.data.images import PromptImages
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines import Completion, Request, SamplingParams
from rlhpc.language.models.packing import pack
from rlhpc.language.models.tiny_vision import FAMILIES, make_tiny_vision_model
from rlhpc.language.models.token_batch import Pictures, TokenBatch
from rlhpc.language.models.vision import place_by_token_type
from rlhpc.language.reporting.sample_pages import read_samples
from tests.forked import forked

pytestmark = pytest.mark.long(together=True)

CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{name: run, run_dir: {folder}, max_steps: 4, save_interval: 2, logger: {{logger_backends: [jsonl]}}}}
data:
  train: {{source: drawn, size: 64, kwargs: {{tasks: [side, area], points: 56}}}}
  eval: [{{name: held_out, source: drawn, size: 8, kwargs: {{tasks: side, points: 56}}}}]
  max_prompt_tokens: 32
  prompts_per_step: 4
reward: {{terms: [{{name: "lm_rewards:ones"}}]}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 4}}
rollout: {{max_new_tokens: 4, max_batch_size: 16}}
actor:
  global_batch_size: 16
  model: {{model_path: "builtin:tiny_vl", kwargs: {{hidden: 32, heads: 2, layers: 2}}}}
  optim: {{lr: 1.0e-3}}
"""

OWN = CONFIG.replace("source: drawn, size: 64, kwargs: {{tasks: [side, area], points: 56}}", "path: rows.jsonl")


def picture(seed: int, width: int, height: int) -> bytes:
    """Noise, as a PNG."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def shown(folder: Path, family: str) -> tuple[list[list[int]], list[PromptImages | None]]:
    """Prompts with no picture, one, and two between words, as tokens and what they show."""
    encoder = PromptTokenizer(AutoTokenizer.from_pretrained(folder), 128, "error", True, key="data.train")
    unit = 28 if family == "qwen2_5_vl" else 32
    two = picture(1, unit, unit), picture(2, 2 * unit, 4 * unit)
    prompts = [
        Prompt(0, ({"role": "user", "content": "1+1="},)),
        Prompt(1, ({"role": "user", "content": "how many="},), images=(picture(0, 3 * unit, 2 * unit),)),
        Prompt(2, ({"role": "user", "content": "a<image>b<image>c="},), images=two),
    ]  # fmt: skip
    made = [encoder.encode(prompt) or ([], []) for prompt in prompts]
    assert all(ids for ids, _ in made)
    seen = [encoder.prompt_images(prompt, at) for prompt, (_, at) in zip(prompts, made, strict=True)]
    return [ids for ids, _ in made], seen


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Samples with no picture, one, and two between words, as one row and as a rectangle, beside transformers' own way from a
    conversation to logits, sample by sample; and a batch cut into two and joined again."""
    make_tiny_vision_model(tmp_path, family=family, hidden=64, heads=2, seed=3)
    ids, seen = shown(tmp_path, family)
    own = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    theirs = []
    with torch.no_grad():
        for tokens, looked in zip(ids, seen, strict=True):
            row = torch.tensor([tokens])
            looks: dict[str, Any] = {"mm_token_type_ids": torch.zeros_like(row)}
            if looked is not None:
                looks = looked.inputs(len(tokens), "cpu")
            theirs.append(own(input_ids=row, attention_mask=torch.ones_like(row), **looks).logits[0])

    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    place_by_token_type(model)
    batch = TokenBatch.from_sequences(ids, [[True] * len(one) for one in ids], pictures=Pictures.from_images(seen))
    batch = TokenBatch.joined(batch.split([1, 2]))
    with torch.no_grad():
        rectangle = batch.of_tokens(model(**batch.inputs()).logits)
        assert pack(model)
        row = batch.read_by(packed=True)
        packed = row.of_tokens(model(**row.inputs()).logits)
    for found in (rectangle, packed):
        torch.testing.assert_close(found, torch.cat(theirs), atol=2e-5, rtol=1e-4)


#: What is trained otherwise, by family.
DIVIDED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_5_vl", {}),
    ("qwen3_vl", {"model.gradient_checkpointing": True, "model.value_head": True}),
    ("qwen3_vl", {"lora.rank": 2, "use_remove_padding": False}),
    ("qwen2_5_vl", {"model.freeze_vision": True, "fsdp.cpu_offload": True, "fsdp.reshard_after_forward": False}),
    ("qwen2_5_vl", {"model.dtype": "bfloat16"}),
]


@pytest.mark.long
def test_shards_train_as_a_whole_model_does(tmp_path: Path) -> None:
    """Two ranks of which one often sees a picture where the other sees none, beside one that has all weights. What they save
    goes on alone; what they export, transformers loads."""
    cases, whole = list[tuple[Any, ...]](), list[dict[str, Any]]()
    for number, (family, changes) in enumerate(DIVIDED):
        folder = tmp_path / family
        if not folder.exists():
            make_tiny_vision_model(folder, family=family, hidden=32, heads=2, seed=3)
        samples = list(zip(*shown(folder, family), strict=True))
        saved = str(tmp_path / f"{number}")
        cases.append((str(folder), samples, {**changes, "training_backend": "fsdp"}, "", saved))
        whole.append(train(alone(), str(folder), samples, changes))
    first, second = forked(2, "picture_ranks:several", cases, timeout=120)
    for (family, changes), case, one, other, expected in zip(DIVIDED, cases, first, second, whole, strict=True):
        far = 2e-2 if "model.dtype" in changes else 2e-5
        assert one["packed"] == expected["packed"] == changes.get("use_remove_padding", True)
        # Products are rounded where a whole model rounds them, the angles of a picture's positions not at all.
        torch.testing.assert_close(one["before"], expected["before"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one["reference"], one["before"], rtol=1e-5, atol=1e-5)
        assert one["losses"] == other["losses"] and torch.equal(one["after"], other["after"])
        assert one["losses"] == pytest.approx(expected["losses"], rel=far, abs=far), (family, changes)
        assert one["norms"] == pytest.approx(expected["norms"], rel=10 * far), (family, changes)
        torch.testing.assert_close(one["after"], expected["after"], rtol=far, atol=far)
        assert list(one["weights"]) == list(expected["weights"])
        for name, value in one["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=far, atol=far, msg=name)
        loaded = AutoModelForImageTextToText.from_pretrained(Path(case[-1]) / "export").state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in one["weights"].items())
    path, samples, changes, _, saved = cases[0]
    rest, further = train(alone(), path, samples, changes, saved), train(alone(), path, samples, {}, steps=4)
    assert rest["losses"] == pytest.approx(further["losses"][2:], rel=2e-5, abs=2e-5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    """GRPO on drawn pictures: one actor, one rollout rank."""
    run = LanguageRun(tmp_path_factory.mktemp("pictures") / "plain", config=CONFIG)
    run.train()
    return run


def test_the_engine_sees_what_the_trainer_sees(reference: LanguageRun) -> None:
    """After each of the updates, of the part that looks, too; which would be noticed if the engine had old ones."""
    rows, start = reference.rows(), reference.weights(2)
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    moved = [name for name, value in reference.weights(4).items() if not torch.equal(value, start[name])]
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)


def far(
    model: Any, prompt: Sequence[int], done: Completion | Episode, seen: PromptImages | None, which: list[bool]
) -> float:
    """How far the log-probs of some of the tokens are from what the model says."""
    ids = [*prompt, *done.token_ids]
    batch = TokenBatch.from_sequences([ids], [[True] * len(ids)], pictures=Pictures.from_images([seen]))
    with torch.no_grad():
        found = batch.of_tokens(model(**batch.inputs()).logits).log_softmax(-1)[len(prompt) - 1 : -1]
    theirs = found.gather(1, torch.tensor(done.token_ids)[:, None]).squeeze(1)
    return max((torch.tensor(done.logprobs) - theirs).abs()[torch.tensor(which)].tolist(), default=0.0)


class Shows(Agent):
    """Answers with a picture of a tool's, then with a text."""

    tools = ToolAgent({"look": lambda _: picture(9, 56, 28), "say": lambda _: "="})

    def respond(self, episode: Episode, text: str) -> str | dict[str, Any] | None:
        return self.tools.respond(episode, "<tool>look:</tool>" if episode.turns == 1 else "<tool>say:</tool>")


def test_an_agent_inside_shows_pictures(tmp_path: Path) -> None:
    """Behind a prompt that shows some and one that does not: each turn is of a model that sees what there is by then."""
    make_tiny_vision_model(tmp_path, hidden=64, heads=2, seed=3)
    ids, seen = shown(tmp_path, "qwen2_5_vl")
    tokenizer, engine = AutoTokenizer.from_pretrained(tmp_path), engine_of("hf", tmp_path)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    place_by_token_type(model)
    # Any token ends a turn: the agent is asked at once.
    sampling = SamplingParams(max_new_tokens=60, stop_token_ids=tuple(range(len(tokenizer))))
    requests = [
        Request(n, tuple(own), sampling, n, images=looked)
        for n, (own, looked) in enumerate(zip(ids, seen, strict=True))
    ]
    episodes = list(run_episodes(engine, [(one, None) for one in requests], Shows(), tokenizer, 3))
    assert sorted(len(one.images.grids) for one in episodes if one.images) == [1, 2, 3]
    for one in episodes:
        assert one.turns == 3 and far(model, one.prompt_ids, one, one.images, one.loss_mask) < 2e-5
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_says_what_the_trainer_says(family: str, tmp_path: Path) -> None:
    """Before an update of all weights, of those under way at one, and after: none is answered by what old weights saw. The
    same tokens with another picture are another prompt, whatever is kept of the first."""
    make_tiny_vision_model(tmp_path, family=family, hidden=64, heads=2, seed=3)
    ids, seen = shown(tmp_path, family)
    other = next(one for one in seen if one is not None)
    other = dataclasses.replace(other, patches=(-other.patches[0],), digests=(b"another",))
    places = [*zip(ids, seen, strict=True), (ids[1], other)]
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    place_by_token_type(model)
    engine = engine_of("vllm", tmp_path)

    def asked(first: int, tokens: int) -> list[Request]:
        sampling = SamplingParams(max_new_tokens=tokens)
        return [Request(first + n, tuple(own), sampling, n, images=looked) for n, (own, looked) in enumerate(places)]

    def error(request: Request, done: Completion) -> float:
        return far(model, request.prompt_ids, done, request.images, [one == engine.version for one in done.versions])

    try:
        requests = asked(0, 8)
        done = engine.generate(requests)
        assert max(map(error, requests, done)) < 2e-5
        assert done[1].token_ids != done[3].token_ids
        engine.add(under_way := asked(10, 12))
        for _ in range(4):
            assert not engine.step()
        change(model, 1)
        engine.update_weights(1, model.state_dict().items())
        again = engine.generate(requests)
        assert max(map(error, requests, again)) < 2e-5
        ended = {one.id: one for _ in range(30) if engine.unfinished() for one in engine.step()}
        assert max(error(one, ended[one.id]) for one in under_way) < 2e-5
    finally:
        engine.close()


def test_it_trains_with_vllm_and_an_agent_outside(tmp_path: Path) -> None:
    """Which sends the pictures of prompts and others, of the same size, by the endpoint: every sample has its own, and none
    is gone on from for its tokens alone. Evaluated on the way, in the same way."""
    url = "data:image/png;base64," + base64.b64encode(picture(7, 56, 56)).decode()
    agent = f"agent={{kind: python, target: 'outside_agents:looks_again', kwargs: {{other: '{url}'}}}}"
    words = "rollout.rollout_backend=vllm", "actor.model.kwargs.heads=1", "reward.terms=[{name: agent}]", agent
    run = LanguageRun(tmp_path / "vllm", *words, config=CONFIG)
    run.train("runner.max_steps=2", "runner.val_check_interval=2")
    rows = run.rows()
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    assert all(row["agent/failed"] == 0 and row["agent/samples"] == 2 and row["train/reward"] > 0 for row in rows)
    assert [row["step"] for row in rows if any(name.startswith("eval/") for name in row)] == [2]


def test_it_resumes_and_is_evaluated_and_exported(reference: LanguageRun, tmp_path: Path) -> None:
    """To the last bit; and transformers loads what was exported, with what cuts pictures."""
    run = LanguageRun(tmp_path / "again", config=CONFIG)
    run.train("runner.max_steps=2")
    run.train("runner.resume_dir=auto")
    assert run.rows() == reference.rows()
    run.rlhpc("eval", "--run", str(run.root), "--output", "held_out.json", "--trust-checkpoint-code")
    assert json.loads((tmp_path / "again" / "held_out.json").read_text())["n"] == 8
    samples = list(read_samples(tmp_path / "again" / "held_out.samples.jsonl"))
    assert len(samples) == 8 and all(len(row["images"]) == row["num_images"] == 1 for row in samples)
    saved = {path.name for path in (tmp_path / "again" / "held_out.images").iterdir()}
    assert saved == {name for row in samples for name in row["images"]}
    run.rlhpc("convert", "--run", str(run.root))
    export = run.root / "export" / "global_step_4"
    loaded = AutoModelForImageTextToText.from_pretrained(export).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in run.weights(4).items())
    assert (export / "preprocessor_config.json").is_file()


@pytest.mark.long
def test_shards_resume_and_are_exported(tmp_path: Path) -> None:
    """To the last bit, with prompts of which some show pictures and some do not, dealt to two ranks; and the engine has what
    they have."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.png").write_bytes(picture(0, 56, 28))
    rows = [{"prompt": "=" * (n + 1), "answer": "", "shown": "one.png" if n % 2 else None} for n in range(8)]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (
        TWO_ACTORS, "actor.training_backend=fsdp", "actor.max_tokens_per_micro_batch=36", "data.eval=[]",
        "workflow.eval_suites=[]", f"data.train.path={tmp_path}/data/rows.jsonl", "data.train.images_key=shown",
    )  # fmt: skip
    whole = LanguageRun(tmp_path / "whole", *words, config=OWN)
    whole.train()
    found = whole.rows()
    assert max(row["train/mismatch_abs"] for row in found) < 1e-5
    run = LanguageRun(tmp_path / "again", *words, config=OWN)
    run.train(f"runner.resume_dir={whole.root}/checkpoints/global_step_2")
    assert run.rows() == found[2:]
    exported = list[dict[str, torch.Tensor]]()
    for one in (whole, run):
        one.rlhpc("convert", "--run", str(one.root))
        exported.append(AutoModelForImageTextToText.from_pretrained(one.root / "export" / "global_step_4").state_dict())
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())


@pytest.mark.parametrize(
    "words",
    [
        [TWO_ACTORS, "actor.max_tokens_per_micro_batch=64"],
        ["actor.lora.rank=2"],
        ["actor.model.freeze_vision=true"],
    ],
    ids=["two actors", "adapters", "frozen"],
)
def test_other_ways_to_train(reference: LanguageRun, tmp_path: Path, words: list[str]) -> None:
    run = LanguageRun(tmp_path / "other", *words, config=CONFIG)
    run.train("runner.max_steps=2")
    rows, first = run.rows(), reference.rows()[0]
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    if TWO_ACTORS in words:
        for name in ("train/loss", "train/grad_norm", "train/reward"):
            assert rows[0][name] == pytest.approx(first[name], abs=1e-5)
    if "actor.model.freeze_vision=true" in words:
        start = AutoModelForImageTextToText.from_pretrained(next((tmp_path / "models").glob("tiny_vl*"))).state_dict()
        for name, value in run.weights(2).items():
            assert torch.equal(value, start[name]) == ("visual" in name), name


def test_pictures_of_ones_own(tmp_path: Path) -> None:
    """SFT from JSON lines: files beside them, and a data URL; two in one prompt; and the loss falls."""
    (tmp_path / "sft").mkdir()
    data, lines = tmp_path / "data", list[str]()
    data.mkdir()
    for number in range(8):
        (data / f"{number}.png").write_bytes(picture(number, 28, 28))
        url = "data:image/png;base64," + base64.b64encode(picture(number + 8, 56, 28)).decode()
        shown: Any = [f"{number}.png", url] if number % 2 else f"{number}.png"
        lines.append(json.dumps({"prompt": "=", "response": str(number), "answer": "", "shown": shown}))
    (data / "rows.jsonl").write_text("\n".join(lines))
    words = (
        "runner.task_type=sft", "cluster.component_placement={actor: 0}", "data.train.images_key=shown",
        f"data.train.path={data}/rows.jsonl",
        "runner.max_steps=12", "actor.optim.lr=1e-2", "data.eval=[]", "workflow.eval_suites=[]",
    )  # fmt: skip
    config = OWN.replace("grpo.yaml", "language.yaml").replace("algorithm: {{group_size: 4}}\n", "")
    run = LanguageRun(tmp_path / "sft", *words, config=config.replace("  global_batch_size: 16\n", ""))
    run.train()
    rows = run.rows()
    assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.model.model_path=builtin:tiny", "actor.model.kwargs={}"], "reads text alone: take a model that looks"),
        (
            ["rollout.rollout_backend=vllm", "actor.lora.rank=2", "rollout.merge_adapters=false"],
            "rollout.merge_adapters is false, and the model in",
        ),
        (["rollout.weight_sync=shards"], "rollout.weight_sync is 'shards', and the model in"),
        (["actor.training_backend=deepspeed"], "actor.training_backend is 'deepspeed', and the model in"),
        (
            ["actor.training_backend=fsdp", "actor.parallel.tensor=2", TWO_ACTORS],
            "actor.parallel.tensor is 2, and the model in",
        ),
        (
            ["algorithm.adv_type=gae", "cluster.component_placement={actor: 0, rollout: 0, critic: 0}",
             "critic.model.model_path=builtin:tiny_vl"],
            "looks at pictures, and critics read text alone",
        ),
        (["data.train.chat_template=false"], "data.train.chat_template is false: only a chat"),
        (["data.train.kwargs={tasks: colour}"], "data.train.kwargs.tasks is 'colour'; allowed: count, area, side"),
        (["actor.model.freeze_vision=true", "actor.lora.rank=2"], "actor.model.freeze_vision is true and actor.lora"),
        (["data.train.images_key=shown"], "rows.jsonl:1: column 'shown': there is no file"),
        (["data.train.source=drawn", "data.train.images_key=shown"], "source drawn makes its problems up, without columns"),
        (["data.train.images_key=other"], "data.train.images_key is 'other', but"),
        (["agent.kind=command", "agent.command=[true]", "agent.sandbox=none"], "and prompts of data.train show pictures"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_mistake(tmp_path: Path, words: list[str], said: str) -> None:
    """Before anything starts, and nothing is written."""
    config = OWN if words[0].startswith("data.train.images_key") else CONFIG
    run = LanguageRun(tmp_path / "wrong", *words, config=config)
    (tmp_path / "wrong" / "rows.jsonl").write_text(json.dumps({"prompt": "=", "answer": "1", "shown": "none.png"}))
    found = run.train(code=2)
    assert said in found and "Traceback" not in found and not run.root.exists()
