"""Several policies in one run: adapters of one model, each trained on what its own roles say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import alone, batch_of, loss_of, make_config, sequences
from test_environments import RUN
from test_reasoning import LanguageRun

from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.registry import make_engine
from rlhpc.language.models.micro_batching import split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.multi_policy import ONE, Policies
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.language.workers.grpo_actor import split_policy_batches
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from rlhpc.training import lora

TWO = Policies(("answers", "asks"), (1, 0))
LORA = {"lora.rank": 4, "lora.alpha": 8, "optim.lr": 1e-2, "optim.clip_grad": 0.05}


def weights_of(trainer: TokenTrainer, policy: str) -> dict[str, torch.Tensor]:
    """An adapter's weights, as they are."""
    named = trainer.backend.module.named_parameters()
    return {
        name.replace(f".{policy}.", "."): p.detach().clone()
        for name, p in named
        if lora.belongs_to_adapter(name, policy)
    }


def gradients_of(trainer: TokenTrainer, policy: str) -> list[torch.Tensor]:
    return [p.grad for name, p in trainer.backend.module.named_parameters() if lora.belongs_to_adapter(name, policy)]


def step(trainer: TokenTrainer, number: int, batch: TokenBatch) -> None:
    cut = [
        part
        for _, part in split_policy_batches(
            trainer.policies, batch, lambda mine: split_micro_batches(mine, 64, is_packed=trainer.packed)
        )
    ]
    trainer.forward_backward(cut, loss_of(number), compute_entropy=True)
    trainer.optimizer_step(1e-2)


def spoken(number: int, roles: list[int]) -> TokenBatch:
    """Samples of a step, each by a role."""
    batch = batch_of(sequences(number))
    batch.role = torch.tensor(roles)
    return batch


def test_each_policy_is_trained_as_if_it_were_alone(model: Path, tmp_path: Path) -> None:
    """Another one beside it changes no bit of its weights, be it in the same minibatches or in others."""
    cfg = make_config(model, **LORA)
    both = TokenTrainer(cfg, alone(), policies=TWO)
    begun = weights_of(both, "answers")
    assert not all(torch.equal(begun[name], mine) for name, mine in weights_of(both, "asks").items())
    for number in range(3):
        batch = spoken(number, [0, 1] * 4)
        step(both, number, batch)
        (asks, answers) = (both.backend.norms[name] for name in ("asks", "answers"))
        assert asks > 0 and answers > 0 and asks != answers
    kept, others = weights_of(both, "answers"), weights_of(both, "asks")
    said = both.forward(spoken(9, [1] * 8).select(torch.arange(8))).logprobs
    step(both, 3, spoken(3, [1] * 8))  # role 1 answers
    assert all(not gradient.any() for gradient in gradients_of(both, "asks"))
    assert both.backend.norms["asks"] == 0.0
    # Nor do averages of gradients move it.
    assert all(torch.equal(others[name], mine) for name, mine in weights_of(both, "asks").items())
    assert any(not torch.equal(kept[name], mine) for name, mine in weights_of(both, "answers").items())
    assert not torch.equal(both.forward(spoken(9, [1] * 8)).logprobs, said)

    single = TokenTrainer(cfg, alone(), policies=ONE)
    first = Policies(("one", "two"), (0, 1))
    beside = TokenTrainer(cfg, alone(), policies=first)  # the first is drawn as the only one is
    both.backend.save(tmp_path / "both")
    for number in range(2):
        whole = spoken(number, [0, 0, 0, 0, 1, 1, 1, 1])
        step(beside, number, whole)
        part = [p for _, p in split_micro_batches(whole.select(torch.arange(4)), 64, is_packed=single.packed)]
        single.forward_backward(part, loss_of(number), compute_entropy=True)
        single.optimizer_step(1e-2)
    mine, alone_ = weights_of(beside, "one"), weights_of(single, lora.ADAPTER)
    assert mine.keys() == alone_.keys() and all(torch.equal(mine[name], alone_[name]) for name in mine)

    again = TokenTrainer(cfg, alone(), policies=TWO)
    again.load(tmp_path / "both")
    for trainer in (both, again):
        step(trainer, 5, spoken(5, [0, 1] * 4))
    for policy in TWO.names:
        theirs = weights_of(again, policy)
        assert all(torch.equal(theirs[name], mine) for name, mine in weights_of(both, policy).items())


def test_an_engine_of_several_policies(model: Path) -> None:
    """Each request is drawn by its policy, and an update of all of them is whole or refused."""
    cfg = make_config(model, **LORA)
    cfg.agent.policies, cfg.agent.roles, cfg.agent.kind = (
        {"first": "asks", "second": "answers"},
        ["first", "second"],
        "mcp",
    )
    trainer = TokenTrainer(cfg, alone(), policies=TWO)
    for number in range(3):
        step(trainer, number, spoken(number, [0, 1] * 4))
    engine: Any = make_engine(cfg, model_path=str(model), device="cpu", seed=0)
    sent = list(trainer.named_weights())
    common = [name for name, _ in sent if "/" not in name]
    assert "model.embed_tokens.weight" in common and len({name for name, _ in sent}) == len(sent)
    engine.update_weights(3, iter(sorted(sent, key=lambda named: named[0].rpartition("/")[2])))
    sampling = [SamplingParams(max_new_tokens=12, policy=policy) for policy in (0, 1)]
    requests = [Request(n, (5, 6, 7), sampling[n % 2], seed=n // 2) for n in range(8)]
    found = engine.generate(requests)
    for request, completion in zip(requests, found, strict=True):
        ids = [*request.prompt_ids, *completion.token_ids]
        batch = TokenBatch.from_sequences([ids], [[False] * 3 + [True] * len(completion.token_ids)])
        batch.role += TWO.by_role.index(request.sampling.policy)
        logprobs = trainer.forward(batch).logprobs[3:]
        assert torch.allclose(logprobs, torch.tensor(completion.logprobs), atol=1e-5)
    assert any(found[n].logprobs != found[n + 1].logprobs for n in range(0, 8, 2))
    assert engine.score([5, 6, 7, 8], policy=0) != engine.score([5, 6, 7, 8], policy=1)
    for broken, said in (
        ([n for n in sent if not n[0].startswith("asks/")], "of policy asks"),
        ([*sent, sent[-1]], "twice"),
        ([*sent, ("third/lm_head.weight", sent[0][1])], "there are: answers, asks"),
    ):
        with pytest.raises(WeightUpdateError, match=said):
            engine.update_weights(4, iter(broken))
        engine.add([Request(1, (5, 6), sampling[0])])
        with pytest.raises(WeightUpdateError, match="did not arrive whole"):
            engine.step()
        engine.drop([1])
    engine.close()


SELF_PLAY = (
    *RUN, "agent.policies={first: opens, second: replies}", "actor.lora.rank=4", "actor.optim.lr=3e-2",
    "data.prompts_per_step=8", "algorithm.group_size=8", "actor.global_batch_size=64", "algorithm.entropy_coef=0.01",
    "data.eval=[{name: default, source: environment, size: 4, kwargs: {name: kuhn_poker}}]", "rollout.probe_interval=1",
    "runner.val_check_interval=2", "workflow.eval_suites=[default]",
)  # fmt: skip


@pytest.mark.long
def test_two_players_with_policies_of_their_own(tmp_path: Path) -> None:
    """The engine's log-probs of each are the trainer's; a run goes on bit for bit; each is exported by its name."""
    run = LanguageRun(tmp_path / "whole", *SELF_PLAY)
    run.train("runner.max_steps=4")
    rows = run.rows()
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    for row in rows:
        for policy in ("opens", "replies"):
            own = {name.rpartition("/")[2]: value for name, value in row.items() if f"/{policy}/" in name}
            assert own["mismatch_abs"] < 1e-5 and own["grad_norm"] > 0 and own["tokens"] > 0, row
            assert "`train/policy/<policy>/tokens`, `train/policy/<policy>/grad_norm`" in page
        both = [row[f"train/policy/{policy}/tokens"] for policy in ("opens", "replies")]
        assert sum(both) == row["train/tokens"]
    torn = LanguageRun(tmp_path / "torn", *SELF_PLAY)
    torn.train("runner.max_steps=2")
    torn.train("runner.max_steps=4", "runner.resume_dir=auto")
    mine, theirs = run.weights(4), torn.weights(4)
    assert {name.split(".")[-2] for name in mine} == {"opens", "replies"}
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    run.rlhpc("convert", "--run", str(run.root))
    exported = [run.root / "export" / "global_step_4" / policy for policy in ("opens", "replies")]
    first, second = (load_file(folder / "model.safetensors") for folder in exported)
    differ = {name for name in first if not torch.equal(first[name], second[name])}
    assert differ and all("_proj" in name for name in differ)
    assert "on 4 problems" in run.rlhpc("eval", "--run", str(run.root))
    (run.root / "export" / "global_step_4").rename(tmp_path / "export")
    run.rlhpc("convert", "--run", str(run.root), "--adapter-only")
    assert {path.name for path in (run.root / "export" / "global_step_4").iterdir()} == {"opens", "replies"}
    assert "adapter_model.safetensors" in {
        path.name for path in (run.root / "export" / "global_step_4" / "opens").iterdir()
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("agent.policies={frist: a, second: b}", ("agent.policies.frist", "did you mean 'first'")),
        ("agent.policies={first: a}", ("second has no policy", "first, second")),
        ("agent.policies={first: a/b, second: b}", ("agent.policies.first", "letters, digits")),
        ("agent.policies={first: a, second: a}", ("all roles have the policy a",)),
        ("actor.lora.rank=0", ("actor.lora.rank", "such as 16")),
        ("actor.training_backend=fsdp", ("actor.training_backend", "local")),
        ("rollout.rollout_backend=vllm", ("rollout.merge_adapters", "false")),
        ("actor.model.value_head=true", ("actor.model.value_head", "false")),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, override: str, said: tuple[str, ...]) -> None:
    run = LanguageRun(tmp_path / "refused", *SELF_PLAY)
    load_config(run.config, list(run.overrides))
    given = [word for word in run.overrides if (word + override).count("agent.policies") < 2]
    with pytest.raises(ConfigError) as told:
        load_config(run.config, [*given, override])
    assert all(each in str(told.value) for each in said), told.value
