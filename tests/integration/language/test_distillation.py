"""Runs that learn from a teacher: on the actor's ranks and on its own, alone and beside a reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from test_groups import FirstStep, places
from test_reasoning import TWO_ACTORS, LanguageRun

from rlhpc.language.config.models import FrozenModelConfig, LanguageModelConfig
from rlhpc.language.data import PromptSampler
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.preflight import open_prompts
from rlhpc.language.scoring.groups import teachers_of

pytestmark = pytest.mark.long(together=True)

TEACHER = "teacher.model={model_path: 'builtin:tiny', kwargs: {hidden: 64, layers: 2, heads: 2, seed: 7}}"
DISTIL = (
    "algorithm.name=distillation", TEACHER, "rollout.temperature=0.9", "runner.max_steps=4", "algorithm.group_size=4",
    "actor.global_batch_size=32", "algorithm.distillation.topk=16",
)  # fmt: skip
SAME = ("train/teacher_divergence", "train/loss", "train/grad_norm", "train/tokens")


def mode(name: str) -> str:
    return f"algorithm.distillation.mode={name}"


def distilled(folder: Path, *overrides: str, train: tuple[str, ...] = ()) -> LanguageRun:
    run = LanguageRun(folder, *DISTIL, *overrides)
    run.train(*train)
    return run


def same(run: LanguageRun, other: LanguageRun, steps: int, tolerance: float = 2e-4) -> None:
    for mine, theirs in zip(run.rows()[:steps], other.rows()[:steps], strict=True):
        for name in SAME:
            assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    return distilled(tmp_path_factory.mktemp("distil") / "top", mode("topk"))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    return distilled(tmp_path_factory.mktemp("distil") / "sampled", mode("sampled"), "algorithm.loss_agg=token-sum")


def test_the_model_comes_closer_to_its_teacher(top: LanguageRun, sampled: LanguageRun, tmp_path: Path) -> None:
    full = distilled(tmp_path / "full", mode("full"))
    for run in (top, full):
        far = [row["train/teacher_divergence"] for row in run.rows()]
        assert far[-1] < 0.8 * far[0], far
    # Fewer outcomes tell less apart, and an estimate from few tokens is about the whole.
    first = [run.rows()[0]["train/teacher_divergence"] for run in (top, full, sampled)]
    assert 0 < first[0] < first[1] and first[2] == pytest.approx(first[1], rel=0.25)
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    assert "| `train/teacher_divergence` |" in page


@pytest.mark.parametrize(("name", "beta"), [("sampled", 1.0), ("topk", 1.0), ("topk", 0.0), ("full", 0.3)])
def test_a_step_is_that_of_a_plain_loop(
    name: str, beta: float, top: LanguageRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, and the formulas in plain torch, from the same samples: loss, gradient and weights."""
    run = distilled(
        top.folder.parent / f"{name}-{beta}", mode(name), f"algorithm.distillation.beta={beta}",
        "algorithm.distillation.coef=0.7",
        "actor.optim.adam_eps=1e-3",  # with less, Adam makes large steps of the rounding of gradients that are nearly 0
        train=("runner.max_steps=1",),
    )  # fmt: skip
    monkeypatch.setenv("RLHPC_MODELS", run.environment["RLHPC_MODELS"])
    monkeypatch.syspath_prepend(Path(__file__).parent)
    loop, (row,) = PlainDistillation(run), run.rows()
    for metric, value in loop.step().items():
        assert row[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    weights, saved = dict(loop.actor.named_parameters()), run.weights(1)
    for parameter, there in saved.items():
        torch.testing.assert_close(weights[parameter].detach(), there, atol=1e-6, rtol=0)


BY_TASK = (
    "data.train.kwargs={digits: 1, operators: '+-'}",
    "teacher.by_task=[{name: minus, tasks: ['- 1 digit'], "
    "model: {model_path: 'builtin:tiny', kwargs: {hidden: 32, seed: 9}}}]",
)


@pytest.mark.parametrize(
    ("name", "placement"),
    [("sampled", ()), ("topk", ()), ("full", ()), ("topk", (places(teacher=0),)), ("full", (TWO_ACTORS,))],
    ids=["sampled", "topk", "full", "topk of its own", "full on two ranks"],
)
def test_each_task_has_its_teacher(
    name: str, placement: tuple[str, ...], top: LanguageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plain loop, with two teachers, of which each has some of the prompts."""
    run = distilled(tmp_path / "run", mode(name), *BY_TASK, *placement, train=("runner.max_steps=1",))
    monkeypatch.setenv("RLHPC_MODELS", run.environment["RLHPC_MODELS"])
    monkeypatch.syspath_prepend(Path(__file__).parent)
    loop, (row,) = PlainDistillation(run), run.rows()
    expected = loop.step()
    assert 0 < expected["train/teacher_share/minus"] < 1
    for metric, value in expected.items():
        assert row[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


class PlainDistillation(FirstStep):
    """A step of distillation as one would write it in an afternoon; divergences in float64, over whole distributions."""

    def step(self) -> dict[str, float]:
        """Trains once; metrics by their names in the run's row."""
        cfg, options = self.cfg, self.cfg.algorithm.distillation
        sources = {
            label: resolve_model(FrozenModelConfig(model_path="builtin:tiny", kwargs=dict(model.kwargs)))
            for label, model in teachers_of(cfg).items()
        }
        teachers = {label: type(self.actor).from_pretrained(source) for label, source in sources.items()}
        samples, _, dataset = self.samples(), *open_prompts(cfg)[1:]
        order = PromptSampler(len(dataset), cfg.data.prompts_per_step, cfg.runner.seed)
        levels = [dataset[order.at(number // cfg.algorithm.group_size)].level for number in range(len(samples))]
        labels = [next((t.name for t in cfg.teacher.by_task if level in t.tasks), "default") for level in levels]
        sums = {label: [0.0, 0] for label in teachers}
        count = sum(len(ids) - start for ids, start, _ in samples)
        loss, far = torch.zeros((), dtype=torch.float64), 0.0
        for (ids, start, _), label in zip(samples, labels, strict=True):
            tokens, teacher = torch.tensor([ids]), teachers[label]
            p, q = (
                (model(input_ids=tokens).logits[0, start - 1 : -1].double() / cfg.rollout.temperature).log_softmax(-1)
                for model in (self.actor, teacher)
            )
            q = q.detach()
            if options.mode == "sampled":
                drawn, told = (one.gather(1, tokens[0, start:, None]).squeeze(1) for one in (p, q))
                apart = drawn.detach() - told
                losses = apart * (drawn - drawn.detach()).exp()  # the policy is the one that drew: a ratio of 1
            else:
                if options.mode == "topk":
                    most = q.topk(options.topk).indices
                    p, q = (with_rest(one.gather(1, most).exp()).log() for one in (p, q))
                apart = losses = jensen_shannon(p, q, options.beta)
            loss, far = loss + options.coef * losses.sum() / count, far + apart.sum().item() / count
            sums[label][0], sums[label][1] = sums[label][0] + apart.sum().item(), sums[label][1] + len(apart)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), cfg.actor.optim.clip_grad).item()
        optim = cfg.actor.optim
        torch.optim.AdamW(
            self.actor.parameters(), lr=optim.lr, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
        ).step()  # fmt: skip
        by_teacher = {f"train/teacher_divergence/{label}": total / number for label, (total, number) in sums.items()}
        shares = {f"train/teacher_share/{label}": number / count for label, (_, number) in sums.items()}
        return {
            **(by_teacher | shares if len(teachers) > 1 else {}),
            "train/loss": loss.item(), "train/grad_norm": norm, "train/teacher_divergence": far, "train/tokens": count,
            "train/reward": sum(reward for _, _, reward in samples) / len(samples),
        }  # fmt: skip


def with_rest(outcomes: torch.Tensor) -> torch.Tensor:
    """And the probability of all others together."""
    return torch.cat([outcomes, 1.0 - outcomes.sum(-1, keepdim=True)], -1)


def jensen_shannon(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    """Of log-probs: β KL(q ‖ m) + (1 − β) KL(p ‖ m), where m is their mixture; and what is meant at its two ends."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    m = ((1 - beta) * p.exp() + beta * q.exp()).log()
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def test_a_teacher_of_its_own_says_the_same(top: LanguageRun, sampled: LanguageRun, tmp_path: Path) -> None:
    """On two ranks of its own, with small micro-batches; and two actors, sharded, with their teachers beside them."""
    own = (places(teacher="0:0-1"), "teacher.max_tokens_per_micro_batch=64")
    same(distilled(tmp_path / "own", mode("topk"), *own, train=("runner.max_steps=2",)), top, 2)
    same(
        distilled(
            tmp_path / "sampled",
            mode("sampled"),
            "algorithm.loss_agg=token-sum",
            *own,
            train=("runner.max_steps=2",),
        ),
        sampled,
        2,
    )


def test_a_teacher_in_an_engine_says_the_same(top: LanguageRun, tmp_path: Path) -> None:
    """On a rank of its own, which takes turns with the others."""
    need_extra("vllm")
    engine = ("teacher.rollout_backend=vllm", places(teacher=0), "actor.offload_in_rollout=true", "runner.max_steps=2")
    run = distilled(tmp_path / "engine", mode("topk"), train=engine)
    same(run, top, 2)
    log = "".join(path.read_text() for path in run.root.rglob("teacher*") if path.is_file())
    assert "offload frees nothing" in log  # the CPU build was asked to sleep


def test_two_actors_are_one(top: LanguageRun, tmp_path: Path) -> None:
    """In two shards, and taking turns with the engine; small micro-batches."""
    two = (mode("topk"), TWO_ACTORS, "actor.max_tokens_per_micro_batch=64")
    same(distilled(tmp_path / "two", *two, "actor.training_backend=fsdp", train=("runner.max_steps=2",)), top, 2)
    full, other = (
        distilled(tmp_path / name, mode("full"), *layout, train=("runner.max_steps=1",))
        for name, layout in (("one", ()), ("turns", (*two[1:], "actor.offload_in_rollout=true")))
    )
    same(other, full, 1)


def test_a_resumed_run_is_the_same_run(top: LanguageRun, tmp_path: Path) -> None:
    run = distilled(tmp_path / "resumed", mode("topk"), train=("runner.max_steps=2",))
    run.train("runner.resume_dir=auto")
    assert run.rows() == top.rows()
    mine, theirs = run.weights(4), top.weights(4)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_beside_a_reward_and_a_reference(tmp_path: Path) -> None:
    """A step of all at once, where groups without variance are left out: nothing is trained on, or what is left."""
    run = distilled(
        tmp_path / "both", mode("topk"), "algorithm.distillation.task_reward_coef=1.0", "algorithm.distillation.beta=0.5",
        "algorithm.kl_coef=0.1", "algorithm.recompute_logprobs=true", "algorithm.filter_groups=true",
        "algorithm.max_refills=0", places(teacher=0), train=("runner.max_steps=2",),
    )  # fmt: skip
    rows = run.rows()
    assert rows[1]["train/ref_kl"] > 0 and rows[1]["train/teacher_divergence"] > 0
    assert abs(rows[0]["train/policy_loss"]) > 0 or rows[0]["train/varied_groups"] < 1


ENGINE = ("teacher.rollout_backend=vllm", places(teacher=0))
BAD = (
    (("teacher.model={model_path: null, kwargs: {}}",), "teacher.model.model_path is not set, but algorithm.name=dist"),
    ((mode("full"), places(teacher=0)), "whole distributions are too much to send: leave the teacher out of"),
    (
        ENGINE[:1],
        "teacher.rollout_backend is 'vllm'; an engine needs ranks of its own: set cluster.component_placement.te",
    ),
    (
        (*ENGINE, mode("full")),
        "does not tell whole distributions: choose topk or sampled, or set teacher.rollout_backend=null",
    ),
    (("teacher.rollout_backend=vlm",), "teacher.rollout_backend is 'vlm'; did you mean 'vllm'? allowed: vllm"),
    (
        (*ENGINE, "teacher.max_model_len=21"),
        "teacher.max_model_len is 21; a sequence may have data.max_prompt_tokens(16) + rollout.max_new_tokens(6) = 22",
    ),
    (
        (*ENGINE, TEACHER.replace("seed", "context: 22, seed")),
        "has a context of 22 tokens; a sequence may have data.max_prompt_tokens(16) + rollout.max_new_tokens(6) = 22",
    ),
    (
        ("groups=[{name: own, scorer: engine_logprobs}]",),
        "groups[own].scorer is 'engine_logprobs', which is the teacher's: see teacher.rollout_backend",
    ),
    (
        ("teacher.by_task=[{name: a, tasks: [ones], model: {model_path: 'builtin:tiny'}}]",),
        "teacher.by_task[0].tasks has 'ones', which no prompt of data.train has; their tasks: ",
    ),
    (
        (*ENGINE, "teacher.by_task=[{name: a, tasks: [b], model: {model_path: 'builtin:tiny'}}]"),
        "teacher.rollout_backend is 'vllm'; an engine has one model, and teacher.by_task has others: set null",
    ),
    (("algorithm.distillation.beta=0.5",), "mode sampled follows the gradient of the reverse KL: set it to 1"),
    ((mode("topp"),), "algorithm.distillation.mode is 'topp'"),
    (
        ("algorithm.name=policy_gradient", places(teacher=0)),
        "nothing asks the group 'teacher': set algorithm.name=dist",
    ),
    (
        ("algorithm.adv_type=gae", "algorithm.distillation.task_reward_coef=1.0"),
        "gae needs a critic: give it a place with cluster.component_placement.critic",
    ),
)


@pytest.mark.parametrize(("overrides", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_what_does_not_fit_is_one_message(overrides: tuple[str, ...], said: str, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "bad", *DISTIL, *overrides)
    answer = run.train(code=2)
    assert said in answer and "Traceback" not in answer, answer
    assert not run.root.exists()


@pytest.mark.parametrize("placement", [(), (places(teacher=0),)], ids=["beside the actor", "of its own"])
def test_another_vocabulary_is_refused(
    placement: tuple[str, ...], top: LanguageRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model with one more token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RLHPC_MODELS", str(top.folder.parent / "models"))
    source = resolve_model(
        LanguageModelConfig(model_path="builtin:tiny", kwargs={"hidden": 64, "layers": 2, "heads": 2})
    )
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    tokenizer.add_tokens(["¤"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    model.save_pretrained(tmp_path / "teacher")
    run = LanguageRun(tmp_path / "bad", *DISTIL, *placement)
    answer = run.train(f"teacher.model={{model_path: '{tmp_path / 'teacher'}', kwargs: {{}}}}", code=2)
    assert "its vocabulary" in answer and "'¤' is None there and" in answer and "Traceback" not in answer, answer
    assert not run.root.exists()
