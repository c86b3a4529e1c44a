"""Groups beside actor and rollout: a critic, a reference, a reward model, and groups from outside the package."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from lm_rewards import ones
from safetensors.torch import load_file
from test_reasoning import LanguageRun, json_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhpc.config.typed import with_value
from rlhpc.language.config.models import FrozenModelConfig, PretrainedConfig
from rlhpc.language.data import PromptSampler, load_tokenizer
from rlhpc.language.engines import Request, SamplingParams, make_rollout
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.loading import load_causal_lm
from rlhpc.language.models.value_head import add_value_head, load_scalar_model
from rlhpc.language.preflight import open_prompts
from rlhpc.language.rewards import Sample
from rlhpc.language.training.prompt_dispatch import seed_of
from rlhpc.runs.configuration import load_config
from tests.classifiers import save_classifier

pytestmark = pytest.mark.long(together=True)

HERE = Path(__file__).parent


def places(**groups: str | int) -> str:
    placed = {"actor": 0, "rollout": 0, **groups}
    return "cluster.component_placement={" + ", ".join(f"{k}: '{v}'" for k, v in placed.items()) + "}"


PPO = (
    "algorithm.adv_type=gae",
    "algorithm.gae_lambda=0.9",
    "algorithm.value_clip=0.5",
    "critic.optim.lr=1e-3",
    "runner.max_steps=4",
)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    run = LanguageRun(tmp_path_factory.mktemp("critic") / "plain", *PPO, places(critic=0))
    run.train()
    return run


def test_ppo_with_a_critic_learns_and_its_critic_does(critic: LanguageRun) -> None:
    rows = critic.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["critic/explained_variance"] > rows[0]["critic/explained_variance"]
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"]
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    lines = (critic.root / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line) if name.startswith(("critic/", "time/critic"))}
    assert {name for name in names if f"| `{name}` |" not in page} == set()


@pytest.mark.parametrize("own", [False, True], ids=["critic", "head"])
def test_a_step_is_that_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward_model: Path, own: bool
) -> None:
    """One process, plain torch: sample, value, rewards on the way, advantages by the recursion, losses, optimizers; with the
    values of a critic, or of a head on the model's own layers."""
    values = ("actor.model.value_head=true", places(steps=0)) if own else (places(critic=0, steps=0),)
    run = LanguageRun(
        tmp_path / "plain", *PPO, *values, "actor.optim.lr=1e-3",
        f"groups=[{{name: steps, scorer: process, model: {{model_path: {reward_model}}}, "
        "kwargs: {separator: '1', change: true}}]", "reward.process_terms=[{name: steps, weight: 0.1}]",
    )  # fmt: skip
    run.train("runner.max_steps=1", "runner.save_interval=1")
    monkeypatch.setenv("RLHPC_MODELS", run.environment["RLHPC_MODELS"])
    monkeypatch.syspath_prepend(HERE)
    loop = PlainLoop(run, reward_model, own)
    (row,) = run.rows()
    for name, value in loop.step().items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    parts = {"": dict(loop.actor.named_parameters())}
    if own:
        parts[""]["value_head.weight"] = loop.head
    else:
        parts["critic"] = dict(loop.critic.named_parameters())
    for part, weights in parts.items():
        saved = load_file(run.root / "checkpoints" / "global_step_1" / part / "model.safetensors")
        assert own == ("value_head.weight" in saved)
        for name, there in saved.items():
            torch.testing.assert_close(weights[name].detach(), there, atol=3e-5, rtol=0)


class FirstStep:
    """A run's model, prompts and draws, for a loop in plain torch."""

    def __init__(self, run: LanguageRun) -> None:
        cfg: Any = load_config(run.root / "config.yaml", [], training=False)
        self.folder = resolve_model(cfg.actor.model)
        self.cfg: Any = with_value(cfg, "actor.model.model_path", self.folder)
        self.actor = load_causal_lm(FrozenModelConfig(model_path=self.folder))

    def samples(self) -> list[tuple[list[int], int, float]]:
        """Of step 1: token ids, length of the prompt, reward; of all prompts and responses."""
        cfg = self.cfg
        _, encoder, dataset = open_prompts(cfg)
        tokenizer = load_tokenizer(self.folder, False)
        prompts, size = cfg.data.prompts_per_step, cfg.algorithm.group_size
        order = PromptSampler(len(dataset), prompts, cfg.runner.seed)
        engine = make_rollout(cfg, model_path=self.folder, device="cpu", seed=0)
        drawn = SamplingParams(cfg.rollout.max_new_tokens, cfg.rollout.temperature, 1.0, -1)
        ids = [tuple(encoder.encode(dataset[order.at(p)])[0]) for p in range(prompts)]
        engine.add([
            Request(p * size + g, ids[p], drawn, seed_of(cfg.runner.seed, 1, p, 0, g))
            for p in range(prompts) for g in range(size)
        ])  # fmt: skip
        found: dict[int, tuple[list[int], int, float]] = {}
        while engine.unfinished():
            for done in engine.step():
                prompt = ids[done.id // size]
                text = tokenizer.decode(done.token_ids, skip_special_tokens=True)
                found[done.id] = ([*prompt, *done.token_ids], len(prompt), ones(Sample("", text)))
        engine.close()
        return [found[number] for number in range(prompts * size)]


class PlainLoop(FirstStep):
    """PPO with a critic as one would write it in an afternoon."""

    def __init__(self, run: LanguageRun, pays: Path, own: bool) -> None:
        super().__init__(run)
        self.own, given = own, FrozenModelConfig(model_path=self.folder)
        self.pays = AutoModelForSequenceClassification.from_pretrained(pays)
        self.critic = load_scalar_model(given, seed=self.cfg.runner.seed)
        if own:
            head = add_value_head(load_causal_lm(given), self.cfg.runner.seed).value_head.weight
            self.head = torch.nn.Parameter(head.detach().clone())

    def on_the_way(self, ids: list[int], start: int) -> list[float]:
        """What is paid for each token of a response: at a 1, and at its end, by how much the value changed since."""

        def value(stop: int) -> float:
            with torch.no_grad():
                return float(self.pays(input_ids=torch.tensor([ids[:stop]])).logits)

        characters = [load_tokenizer(self.folder, False).decode([one], skip_special_tokens=True) for one in ids[start:]]
        paid, last, written = [0.0] * len(characters), value(start), 0
        for place, character in enumerate(characters):
            at_end = not any(ids[start + place + 1 :])  # but for padding
            step = "".join(characters[written : place if character == "1" else place + 1])
            if (character == "1" or at_end) and step.strip():
                paid[place] = value(start + place + 1) - last
                last += paid[place]
            if character == "1":
                written = place + 1
        return paid

    def value(self, ids: list[int], start: int) -> torch.Tensor:
        """Of the state before each token of a response."""
        tokens = torch.tensor([ids])
        if not self.own:
            found: torch.Tensor = self.critic(input_ids=tokens)[0, start - 1 : -1]
            return found
        hidden = self.actor.model(input_ids=tokens, use_cache=False).last_hidden_state[0, start - 1 : -1]
        return (hidden @ self.head.T).squeeze(-1)

    def step(self) -> dict[str, float]:
        """Trains both once; metrics by their names in the run's rows."""
        algorithm, samples = self.cfg.algorithm, self.samples()
        advantages, returns, olds = [], [], []
        on_the_way = [self.on_the_way(ids, start) for ids, start, _ in samples]
        for (ids, start, reward), extra in zip(samples, on_the_way, strict=True):
            with torch.no_grad():
                values = self.value(ids, start)
            following, carried = 0.0, 0.0
            rows = []
            for t in range(len(values) - 1, -1, -1):
                paid = 0.1 * extra[t] + (reward if t == len(values) - 1 else 0.0)
                carried = (
                    paid
                    + algorithm.gamma * following
                    - values[t].item()
                    + algorithm.gamma * algorithm.gae_lambda * carried
                )
                following = values[t].item()
                rows.append(carried)
            advantages.append(torch.tensor(rows[::-1]))
            returns.append(advantages[-1] + values)
            olds.append(values)
        everything = torch.cat(advantages)
        count = len(everything)
        loss, value_loss = torch.zeros(()), torch.zeros(())
        for (ids, start, _), advantage, target, old in zip(samples, advantages, returns, olds, strict=True):
            tokens = torch.tensor([ids])
            logprobs = self.actor(input_ids=tokens).logits[0, start - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, tokens[0, start:, None]).squeeze(1)
            ratio = (chosen - chosen.detach()).exp()  # the first update: the policy is the one that drew
            white = (advantage - everything.mean()) / (everything.std() + 1e-8)
            loss = loss - (ratio * white).sum() / count
            values = self.value(ids, start)
            bounded = old + (values - old).clamp(-algorithm.value_clip, algorithm.value_clip)
            value_loss = value_loss + 0.5 * torch.max((values - target) ** 2, (bounded - target) ** 2).sum() / count
        norms = []
        trained = [
            ([*self.actor.parameters()], loss, self.cfg.actor.optim),
            ([*self.critic.parameters()], value_loss, self.cfg.critic.optim),
        ]
        if self.own:
            loss = loss + algorithm.value_coef * value_loss
            trained = [([*self.actor.parameters(), self.head], loss, self.cfg.actor.optim)]
        for parameters, value, optim in trained:
            adam = torch.optim.AdamW(
                parameters, lr=optim.lr, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps,
                weight_decay=optim.weight_decay,
            )  # fmt: skip
            value.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, optim.clip_grad).item())
            adam.step()
        target = torch.cat(returns)
        mine = "train" if self.own else "critic"
        found = {
            "train/reward": sum(reward for _, _, reward in samples) / len(samples), "train/loss": loss.item(),
            "train/grad_norm": norms[0], ("train/value_loss" if self.own else "critic/loss"): value_loss.item(),
            "train/process/steps": sum(map(sum, on_the_way)) / len(samples), f"{mine}/return": target.mean().item(),
            f"{mine}/value": torch.cat(olds).mean().item(),
            f"{mine}/explained_variance": 1 - (everything.var(correction=0) / target.var(correction=0)).item(),
        }  # fmt: skip
        return found if self.own else {**found, "critic/grad_norm": norms[1]}


def test_a_critic_is_resumed_bit_for_bit(critic: LanguageRun, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "resumed", *PPO, places(critic=0))
    run.train("runner.max_steps=2")
    run.train("runner.resume_dir=auto")
    assert run.rows() == critic.rows()
    for part in ("model.safetensors", "critic/model.safetensors"):
        mine, theirs = (one.root / "checkpoints" / "global_step_4" / part for one in (run, critic))
        assert mine.read_bytes() == theirs.read_bytes(), part


def test_a_critic_is_exported(critic: LanguageRun) -> None:
    """A sequence classifier for transformers, with the values of the one that was trained; a run may start from it."""
    said = critic.rlhpc("convert", "--run", str(critic.root), "--step", "latest", "--critic", "--trust-checkpoint-code")
    folder = critic.root / "export" / "global_step_4-critic"
    assert said.strip().splitlines()[-1] == str(folder) and "value-model" in (folder / "README.md").read_text()
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = load_scalar_model(PretrainedConfig(model_path=str(folder)))(input_ids=ids)
    assert theirs(input_ids=ids).logits.item() == pytest.approx(ours[0, -1].item(), abs=1e-6)
    trained = load_file(critic.root / "checkpoints" / "global_step_4" / "critic" / "model.safetensors")
    torch.testing.assert_close(dict(theirs.named_parameters())["score.weight"].data, trained["score.weight"])
    critic.train("runner.name=again", "runner.max_steps=1", f"critic.model.model_path={folder}")


def test_its_ranks_and_micro_batches_do_not_show(critic: LanguageRun, tmp_path: Path) -> None:
    """Two ranks of each group, with minibatches and micro-batches: the same to rounding."""
    ranks = "cluster.component_placement={actor: '0:0-1', rollout: '0', critic: '0:0-1'}"
    run = LanguageRun(
        tmp_path / "ranks", *PPO, ranks, "critic.max_tokens_per_micro_batch=64", "critic.training_backend=fsdp"
    )
    run.train("runner.max_steps=2")
    for mine, theirs in zip(run.rows(), critic.rows()[:2], strict=True):
        for name in (
            "critic/loss",
            "critic/grad_norm",
            "critic/value",
            "critic/explained_variance",
            "train/loss",
            "train/grad_norm",
        ):
            assert mine[name] == pytest.approx(theirs[name], abs=2e-4), name


def test_roles_may_take_turns_at_the_accelerator(critic: LanguageRun, tmp_path: Path) -> None:
    """Engine, reference, critic and actor, one after the other: the same to rounding."""
    words = (*PPO, "algorithm.kl_coef=0.1", places(critic=0, reference=0))
    beside, turns = LanguageRun(tmp_path / "beside", *words), LanguageRun(tmp_path / "turns", *words)
    beside.train("runner.max_steps=2")
    turns.train("runner.max_steps=2", "actor.offload_in_rollout=true")
    for mine, theirs in zip(turns.rows(), beside.rows(), strict=True):
        for name in ("critic/loss", "critic/grad_norm", "train/loss", "train/grad_norm", "train/ref_kl"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4), name


def test_a_run_without_a_critic_cannot_go_on_with_one(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "later")
    run.train("runner.max_steps=1")
    said = run.rlhpc(
        "train", str(run.config), *PPO, places(critic=0), "runner.resume_dir=auto", "--resume-with", code=2
    )
    assert "it has no critic" in said and "Traceback" not in said


HEAD = ("algorithm.adv_type=gae", "actor.model.value_head=true", "actor.lora.rank=2", "runner.save_interval=1")


def test_a_head_on_the_models_layers_is_resumed_and_exported(tmp_path: Path) -> None:
    """With adapters: what is sent to the engine and exported is a plain causal model; the values are a classifier's."""
    run, again = (LanguageRun(tmp_path / name, *HEAD) for name in ("whole", "again"))
    run.train("runner.max_steps=3")
    again.train("runner.max_steps=1")
    again.train("runner.max_steps=3", "runner.resume_dir=auto")
    assert again.rows() == run.rows() and run.rows()[-1]["train/value_loss"] < run.rows()[0]["train/value_loss"]
    saved = run.weights(3)
    assert all(torch.equal(saved[name], one) for name, one in again.weights(3).items())
    assert run.rows()[-1]["train/mismatch_abs"] < 1e-4
    command = ("convert", "--run", str(run.root), "--step", "latest", "--trust-checkpoint-code")
    folders = [Path(run.rlhpc(*command, *more).strip().splitlines()[-1]) for more in ((), ("--critic",))]
    policy, values = (AutoModelForCausalLM, AutoModelForSequenceClassification)
    ids = torch.tensor([[5, 6, 7, 8]])
    read = policy.from_pretrained(folders[0]).model(input_ids=ids).last_hidden_state
    trained = next(one for name, one in saved.items() if "value_head" in name)
    found = values.from_pretrained(folders[1])(input_ids=ids).logits
    torch.testing.assert_close(found[0], (read @ trained.T)[0, -1], atol=1e-5, rtol=0)
    run.rlhpc("eval", "--run", str(run.root), "--step", "3", "--suite", "held_out", "--trust-checkpoint-code")
    said = again.train("runner.max_steps=4", "runner.resume_dir=auto", "algorithm.adv_type=grpo",
                       "actor.model.value_head=false", "--resume-with", code=2)  # fmt: skip
    assert "has actor.model.value_head True, this configuration False" in said and "Traceback" not in said, said


def test_a_critic_may_learn_alone_at_first(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "warm", *PPO, places(critic=0), "critic.warmup_steps=1", "runner.save_interval=1")
    run.train("runner.max_steps=2")
    first, second = run.weights(1), run.weights(2)
    assert any(not torch.equal(first[name], second[name]) for name in second)
    rows = run.rows()
    assert "train/loss" not in rows[0] and "train/loss" in rows[1] and rows[0]["critic/loss"] > 0


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with a head that somebody trained (here: drew)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHPC_MODELS", str(tmp_path_factory.mktemp("models")))
        return save_classifier(tmp_path_factory.mktemp("reward"))


FOLLOWS = (
    "algorithm.kl_coef=0.1",
    "reference.update_interval=2",
    "runner.max_steps=5",
    "runner.save_interval=1",
    "runner.keep_checkpoints=0",
)


def test_a_reference_may_follow_the_actor(tmp_path: Path) -> None:
    """Every second step it becomes the actor's policy: then the first update's distance from it is 0. Resumed, too."""
    run = LanguageRun(tmp_path / "follows", *FOLLOWS, places(reference="0:0-1"))
    run.train()
    rows = run.rows()
    apart = [row["train/ref_kl"] for row in rows]
    assert [kl < 1e-9 for kl in apart] == [True, False, True, False, True], apart
    at = run.root / "checkpoints"
    kept = load_file(at / "global_step_3" / "reference" / "model.safetensors")
    second = run.weights(2)
    assert all(torch.equal(kept[name], second[name]) for name in second)
    again = LanguageRun(tmp_path / "again", *FOLLOWS, places(reference="0:0-1"))
    again.train("runner.max_steps=3")
    again.train("runner.resume_dir=auto")
    assert again.rows() == rows


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_a_reference_follows_where_answers_are_begun_ahead(tmp_path: Path, interval: int, staleness: int) -> None:
    """It takes new weights, and is saved, between the steps that it scores, as where none are begun ahead."""
    words = (*FOLLOWS, f"reference.update_interval={interval}", f"algorithm.max_staleness={staleness}")
    run = LanguageRun(tmp_path / "ahead", *words, places(reference=0), "runner.step_timeout_s=60")
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["train/ref_kl"] < 1e-9 for row in rows] == [step % interval == 0 for step in range(5)], rows
    assert max(row["rollout/staleness_max"] for row in rows) > 0  # some were begun ahead
    kept = load_file(run.root / "checkpoints" / "global_step_3" / "reference" / "model.safetensors")
    assert all(torch.equal(kept[name], one) for name, one in run.weights(3 - 3 % interval).items())


def test_a_critic_learns_where_answers_are_begun_ahead(tmp_path: Path) -> None:
    """It trains, and is saved, between the steps that it values; a second group does not wait for it."""
    words = (*PPO, "algorithm.max_staleness=1", "algorithm.kl_coef=0.1", "runner.save_interval=1")
    run = LanguageRun(tmp_path / "ahead", *words, places(critic="0:0-1", reference=0), "runner.step_timeout_s=60")
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["rollout/staleness_max"] for row in rows) > 0
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"]


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_a_reference_follows_an_actor_that_sends_shards(tmp_path: Path, backend: str) -> None:
    """Engines get shards, the reference whole tensors: the run is the one in which engines get these, too."""
    words = (*FOLLOWS, "runner.max_steps=3", f"actor.training_backend={backend}")
    words = (*words, "cluster.component_placement={actor: '0:0-1', rollout: 0, reference: 0}")
    runs = [LanguageRun(tmp_path / sync, *words, f"rollout.weight_sync={sync}") for sync in ("shards", "auto")]
    for run in runs:
        run.train()
    assert runs[0].rows() == runs[1].rows()


OWN = (
    "groups=[{name: ones, scorer: 'own_groups:Ones'}, {name: evenness, scorer: 'own_groups:Evenness'}]",
    "algorithm.name=own_groups:Even", "algorithm.kl_coef=0.1", "runner.max_steps=5", "runner.save_interval=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> LanguageRun:
    """A reference, a reward model, and two groups from outside, all in one run; two ranks rate."""
    run = LanguageRun(
        tmp_path_factory.mktemp("groups") / "plain", *OWN, f"reward.model.model_path={reward_model}",
        "reward.terms=[{name: ones}, {name: reward, weight: 0.01}]",
        places(reference=0, reward="0:0-1", ones=0, evenness=0),
    )  # fmt: skip
    run.train()
    return run


def test_groups_say_what_the_actor_and_the_judges_would(
    groups: LanguageRun, tmp_path: Path, reward_model: Path
) -> None:
    """The reference by the actor, and the same rating by a judge of the rollout rank: the same numbers."""
    alone = LanguageRun(
        tmp_path / "alone", *OWN, f"reward.model.model_path={reward_model}",
        "reward.terms=[{name: 'lm_rewards:ones'}, {name: reward, weight: 0.01}]", places(reward=0, evenness=0),
        "groups=[{name: evenness, scorer: 'own_groups:Evenness'}]",
    )  # fmt: skip
    alone.train("runner.max_steps=2")
    for mine, theirs in zip(alone.rows(), groups.rows()[:2], strict=True):
        for name in ("train/reward", "train/ref_kl", "train/loss", "reward/reward", "train/even", "train/accuracy"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), name
        assert mine["reward/lm_rewards:ones"] == pytest.approx(theirs["reward/ones"], abs=1e-9)
    assert groups.rows()[-1]["train/ref_kl"] > 0


def test_an_evaluation_asks_the_groups_models_itself(groups: LanguageRun) -> None:
    groups.rlhpc("eval", "--run", str(groups.root), "--step", "5", "--suite", "held_out", "--trust-checkpoint-code")
    found = json.loads((groups.root / "eval" / "global_step_5" / "held_out.json").read_text())
    (line, *_) = (groups.root / "eval" / "global_step_5" / "held_out.samples.jsonl").read_text().splitlines()
    assert set(json.loads(line)["terms"]) == {"ones", "reward"} and found["failed"] == 0


def test_a_group_that_is_killed_starts_again_alone(groups: LanguageRun, tmp_path: Path, reward_model: Path) -> None:
    """Nothing else is lost: no step, though none is saved, and no other process; the numbers are those of the run that
    nobody disturbed."""
    run = LanguageRun(
        tmp_path / "killed", *OWN, f"reward.model.model_path={reward_model}",
        "reward.terms=[{name: ones}, {name: reward, weight: 0.01}]", "runner.save_interval=5",
        places(reference=0, reward="0:0-1", ones=0, evenness=0),
        "groups=[{name: ones, scorer: 'own_groups:Ones', kwargs: {pause_s: 0.3}}, "
        "{name: evenness, scorer: 'own_groups:Evenness'}]",
    )  # fmt: skip
    run.environment["RLHPC_MAX_RESTARTS"] = "2"
    process = run.start()

    def members() -> dict[str, int]:
        registry = run.root / "registry"
        now = registry / (registry / "current").read_text() / "members"
        return {path.stem: json_of(path)["pid"] for path in now.glob("*.json")}

    end = time.monotonic() + 150
    while json_of(run.root / "status.json").get("step", 0) < 1:
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.02)
    before = members()
    os.kill(before["reward-1"], signal.SIGKILL)
    time.sleep(0.3)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert "reward[1] start again, and step" in err and "nothing else is lost" in err, err
    assert run.rows() == groups.rows()
    for name, mine in run.weights(5).items():
        assert torch.equal(mine, groups.weights(5)[name])


RATED = ("reward.terms=[{name: reward}]", places(reward=0))
JUDGE = ("reward.terms=[{name: judge}]", places(judge=0))
STEPS = ("groups=[{name: steps, scorer: process, model: {model_path: 'builtin:tiny'}}]", places(steps=0))
BAD = (
    (("algorithm.adv_type=gae",), "gae needs a critic: give it a place with cluster.component_placement.critic"),
    (("actor.model.value_head=true",), "nothing asks for values: set algorithm.adv_type=gae, or false"),
    ((*PPO, places(critic=0), "actor.model.value_head=true"), "there is a group critic already"),
    ((places(critic=0),), "nothing asks the group 'critic': set algorithm.adv_type=gae, or leave it out"),
    ((places(reference=0),), "nothing asks the group 'reference': set algorithm.kl_coef, or leave it out"),
    (("reference.update_interval=2",), "give the reference a place with cluster.component_placement.reference"),
    ((places(reward=0),), "no term of reward.terms is 'reward': add one, or leave it out"),
    (("reward.process_terms=[{name: setps}]", places()), "reward.process_terms is [{'name': 'setps', 'weight': 1.0}]"),
    (("reward.process_terms=[{name: reward}]",), "the group 'reward' rates whole answers: name it in reward.terms"),
    ((*STEPS[:1], "reward.process_terms=[{name: steps}]"), "the group 'steps' has no place: set"),
    ((*STEPS, "reward.process_terms=[{name: steps}, {name: steps}]"), "the group 'steps' is named twice"),
    (
        (*STEPS, "reward.process_terms=[{name: steps}]", "algorithm.name=distillation", "teacher.model.model_path=x"),
        "the teacher alone is followed: set algorithm.distillation.task_reward_coef",
    ),
    ((*STEPS, "reward.process_terms=[{name: steps}]"), "it is no sequence classifier"),
    ((*STEPS, "reward.terms=[{name: steps}]"), "it can be one of reward.process_terms"),
    ((places(critc=0),), "component_placement.critc: no such component; did you mean 'critic'?"),
    (RATED[:1], "the group 'reward' has no place: set cluster.component_placement.reward"),
    (RATED, "reward.model.model_path is not set, but the group 'reward' has a place"),
    ((*RATED, "reward.model.model_path=builtin:tiny"), "it is no sequence classifier"),
    (("groups=[{name: actor, scorer: logprobs}]",), "groups[0].name is 'actor', which is taken"),
    (
        ("groups=[{name: a, scorer: logprops}]",),
        "groups[].scorer is 'logprops', which is unknown; did you mean 'logprobs'?",
    ),
    (
        ("groups=[{name: a, scorer: 'own_groups:Even'}]",),
        "is no subclass of rlhpc.Scorer (values of tokens) or of rlhpc",
    ),
    (
        ("groups=[{name: a, scorer: 'own_groups:Ones', kwargs: {b: 1}}]",),
        "groups[a].kwargs.b is 1; scorer own_groups:Ones has no such option; allowed: pause_s, refuses",
    ),
    (("algorithm.name=own_groups:Even",), "algorithm.name=own_groups:Even asks a group 'evenness': give it a place"),
    ((*PPO, places(critic=0), "critic.global_batch_size=7"), "critic.global_batch_size is 7; a step has 64 responses"),
    ((*PPO, places(critic=0), "critic.model.model_path=builtin:tinny"), "builtin:tinny"),
    (("judge.mode=graed",), "judge.mode is 'graed'; did you mean 'grade'? allowed: grade, compare"),
    (("judge.rubric=Is it right?",), "judge.rubric is 'Is it right?'; it needs {response}"),
    (("judge.scale=[5]",), "judge.scale is [5.0]; two numbers are needed, the lowest and the highest grade"),
    (("judge.scale=[5, 1]",), "judge.scale is [5.0, 1.0]; two numbers are needed"),
    (("judge.rollout_backend=vlm",), "judge.rollout_backend is 'vlm'; did you mean 'vllm'?"),
    ((places(judge=0),), "no term of reward.terms is 'judge': add one, or leave it out"),
    (JUDGE[:1], "the group 'judge' has no place: set cluster.component_placement.judge"),
    (JUDGE, "judge.model.model_path is not set, but the group 'judge' has a place: name its model"),
    ((*JUDGE, "judge.model.model_path=builtin:tinny"), "builtin:tinny"),
    (("reward.terms=[{name: judge, kwargs: {mode: compare}}]", JUDGE[1]), "reward.terms[0].kwargs: 'judge' is a group"),
    (
        (*JUDGE, "judge.mode=compare", "algorithm.group_size=1"),
        "algorithm.group_size is 1: there is nothing to compare",
    ),
    ((*JUDGE, "judge.mode=compare"), "suite 'held_out' of data.eval has samples 1: there is nothing to compare"),
    (
        (*JUDGE, "judge.model.model_path=builtin:tiny", "judge.rollout_backend=own_groups:Engine"),
        "judge.rollout_backend is 'own_groups:Engine', which cannot be imported",
    ),
    (
        ("groups=[{name: b, scorer: judge, kwargs: {scale: [1]}}]",),
        "groups[b].kwargs.scale is [1.0]; two numbers are needed",
    ),
)


@pytest.mark.parametrize(("overrides", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_what_does_not_fit_is_one_message(overrides: tuple[str, ...], said: str, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "bad", *overrides)
    answer = run.train(code=2)
    assert said in answer and "Traceback" not in answer, answer
    assert not run.root.exists()


def test_a_rating_that_fails_counts_as_failed(tmp_path: Path) -> None:
    run = LanguageRun(
        tmp_path / "failed", "groups=[{name: ones, scorer: 'own_groups:Ones', kwargs: {refuses: '2'}}]", places(ones=0),
        "reward.terms=[{name: ones}]", "reward.failed=-1.0", "runner.max_steps=1",
    )  # fmt: skip
    run.train()
    (row,) = run.rows()
    assert row["rollout/failed_rewards"] > 0 and row["reward/ones"] < 0


JUDGED = (
    "judge.model={model_path: 'builtin:tiny', kwargs: {hidden: 64, layers: 2, heads: 2, context: 1024}}",
    "judge.max_new_tokens=8", "judge.max_prompt_tokens=1000",
)  # fmt: skip


def test_a_judge_without_a_verdict_fails_closed(tmp_path: Path) -> None:
    """Random weights write no verdict: no answer is rated, in training and in evaluation, and each is counted."""
    run = LanguageRun(
        tmp_path / "judged", *JUDGED, "reward.terms=[{name: 'lm_rewards:ones'}, {name: judge}]", "reward.failed=-1.0",
        places(judge="0:0-1"), "runner.max_steps=1", "data.prompts_per_step=4", "algorithm.group_size=2",
        "actor.global_batch_size=8", "reward.max_failed_steps=1",
    )  # fmt: skip
    run.train()
    (row,) = run.rows()
    assert row["rollout/failed_rewards"] == 8 and row["train/reward"] == -1.0 == row["reward/judge"]
    assert 0 < row["judge/no_verdict"] <= 8 and row["judge/too_long"] == row["judge/over_budget"] == 0
    timed = json.loads((run.root / "metrics.jsonl").read_text().splitlines()[0])
    assert timed["time/judge_requests"] == row["judge/no_verdict"]  # equal answers to a problem are asked about once
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    names = {re.sub("judge[/_]", lambda found: f"<group>{found[0][-1]}", name) for name in timed if "judge" in name}
    assert {name for name in names if f"`{name}`" not in page} == {"reward/judge"}
    run.rlhpc("eval", "--run", str(run.root), "--step", "latest", "--suite", "held_out", "--trust-checkpoint-code")
    found = json.loads((run.root / "eval" / "global_step_1" / "held_out.json").read_text())
    assert found["failed"] == found["n"] == 10
