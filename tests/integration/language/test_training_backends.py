"""Language models' training backends against a plain loop of PyTorch, with real models and real ranks."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import (
    ENTROPY_COEF,
    LR,
    TEMPERATURE,
    Trainer,
    alone,
    count,
    groups_of,
    make_config,
    probe_batch,
    sequences,
    train,
)

from rlhpc import Worker
from rlhpc.language.models.logprobs import token_scores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runtime.errors import CheckpointError, ConfigError
from tests.accelerators import OTHERS_ON_CARD, loose, same

STEPS = range(4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with a tokenizer: Llamas, `untied` and `tied` (embeddings shared with the head); a GPT-2, which has dropout,
    learned positions, biases and transposed weights; and a Gemma 3, which scales its embeddings by a number that is in no
    file, and has a window in its first layer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

    folders = {}
    for name in ("untied", "tied", "gpt2", "gemma3"):
        folders[name] = tmp_path_factory.mktemp("models") / name
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        )
        options = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": name == "tied",
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if name != "gpt2":
            config = LlamaConfig(**options)
        if name == "gemma3":
            window = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
            config = Gemma3TextConfig(**options, **window, head_dim=8, pad_token_id=0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2").save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    """Groups of real worker processes, one of each size."""
    yield from groups_of(Trainer, "trainers")


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Any]) -> Callable[..., dict[str, Any]]:
    """Trains on n ranks (one: in this process) and gives rank 0's report; the others' must agree with it."""

    def on(n: int, cfg: Any, **options: Any) -> dict[str, Any]:
        if n == 1:
            return train(alone(), cfg, **options)
        first, *others = ranks(n).train(cfg, **options).wait()
        for other in others:
            assert other["losses"] == first["losses"] and other["norms"] == first["norms"]
            assert torch.equal(other["after"], first["after"])
            assert all(torch.equal(value, first["weights"][name]) for name, value in other["weights"].items())
        return first

    return on


def scores_alone(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one sequence without padding, column 0 being 0."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE
    every = torch.log_softmax(logits, -1)[:-1]
    zero = torch.zeros(1)
    picked = every.gather(1, ids[1:, None]).squeeze(1)
    return torch.cat([zero, picked]), torch.cat([zero, -(every.exp() * every).sum(-1)])


def plain_loop(folder: Path, *, lora: int = 0, bf16: bool = False, head: bool = False) -> dict[str, Any]:
    """The same training with torch alone: one process, one sequence at a time, torch.optim.AdamW."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    if lora:
        torch.manual_seed(1)
        options = {"r": lora, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if head:
        trained["head"] = torch.nn.Parameter(new_head(folder))
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, eps=1e-5, weight_decay=0.1)

    def called(**inputs: Any) -> Any:
        if not bf16:
            return model(**inputs)
        half = {name: p.bfloat16() for name, p in model.named_parameters()}
        return torch.func.functional_call(model, half, kwargs=inputs)

    losses, norms = [], []
    for step in STEPS:
        total = 0.0
        for sequence in sequences(step):
            logprobs, entropy = scores_alone(called, sequence["ids"])
            loss = -(sequence["weights"] * logprobs + ENTROPY_COEF * entropy).sum() / count(step)
            if head:
                values = values_alone(model, trained["head"], sequence["ids"])
                loss = loss + (values - sequence["weights"]).square().sum() / count(step)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    if lora:
        model = model.merge_and_unload()
    found = {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}
    return {**found, "model": model.eval(), "head": trained["head"].detach()} if head else found


def new_head(folder: Path) -> torch.Tensor:
    """The one that a run begins with."""
    from rlhpc.language.config.models import PretrainedConfig
    from rlhpc.language.models.loading import load_causal_lm
    from rlhpc.language.models.value_head import add_value_head

    model = add_value_head(load_causal_lm(PretrainedConfig(model_path=str(folder))), seed=1)
    weight: torch.Tensor = model.value_head.weight.detach().clone()
    return weight


def values_alone(model: Any, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the state before each token of one sequence, column 0 being 0."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    return torch.cat([torch.zeros(1), (hidden @ head.T).squeeze(-1)])


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    known: dict[Any, dict[str, Any]] = {}

    def of(model: str, **options: Any) -> dict[str, Any]:
        key = (model, *sorted(options.items()))
        if key not in known:
            known[key] = plain_loop(models[model], **options)
        return known[key]

    return of


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    tolerance = loose(tolerance)
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
    assert list(found["weights"]) == list(expected["weights"])
    for name, value in found["weights"].items():
        torch.testing.assert_close(value.float(), expected["weights"][name], rtol=tolerance, atol=tolerance, msg=name)


CHANGES: dict[str, dict[str, Any]] = {
    "whole": {},
    "tied": {},
    "gemma3": {"compile": "blocks"},
    "checkpointing": {"model.gradient_checkpointing": True},
    "lora": {"lora.rank": 2},
    "lora-checkpointing": {"lora.rank": 2, "model.gradient_checkpointing": True},
    "zero2": {"fsdp.reshard_after_forward": False},
    "host": {"fsdp.cpu_offload": True},
    "accumulated": {"fsdp.enable_gradient_accumulation": True},
    "accumulated-lora-checkpointing": {
        "fsdp.enable_gradient_accumulation": True,
        "lora.rank": 2,
        "model.gradient_checkpointing": True,
    },
    "compiled": {"compile": "blocks"},
    "compiled-lora-checkpointing": {"compile": "blocks", "lora.rank": 2, "model.gradient_checkpointing": True},
    "head": {"model.value_head": True, "model.gradient_checkpointing": True},
    "head-lora": {"model.value_head": True, "lora.rank": 2},
}


@pytest.mark.parametrize(
    ("backend", "n", "change"),
    [
        *[("local", n, change) for n in (1, 2) for change in ("whole", "tied", "checkpointing", "lora", "head")],
        *[("fsdp", 1, change) for change in ("whole", "tied", "lora-checkpointing")],
        *[("fsdp", 2, change) for change in CHANGES],
    ],
)
def test_losses_and_weights_are_those_of_a_plain_loop(run, models, plain, backend: str, n: int, change: str) -> None:
    model, changes = change if change in models else "untied", CHANGES[change]
    cfg = make_config(models[model], training_backend=backend, **changes)
    found = run(n, cfg, offload=change == "whole")
    head = changes.get("model.value_head", False)
    expected = plain(model, lora=changes.get("lora.rank", 0), head=head)
    assert_same(found, expected)
    if head:  # it is nowhere among the weights that are sent, and learned with them
        probe = probe_batch()
        apart = [values_alone(expected["model"], expected["head"], one.ids) for one in probe.split([1] * len(probe))]
        torch.testing.assert_close(found["values"], torch.cat(apart), rtol=loose(1e-4), atol=loose(1e-4))
    # The reference is the model of before training, the trained one has left it.
    torch.testing.assert_close(found["reference"], found["before"], rtol=loose(1.3e-6), atol=loose(1e-5))
    assert (found["after"] - found["before"]).abs().max() > 0.05


@pytest.mark.parametrize(
    "changes", [{}, {"lora.rank": 2, "model.gradient_checkpointing": True}], ids=["all weights", "lora, checkpointing"]
)
def test_gradients_are_reduced_once_a_step_if_asked(run, models, changes: dict[str, Any]) -> None:
    each, once = (
        run(2, make_config(models["untied"], training_backend="fsdp", **changes, **accumulates))["reductions"]
        for accumulates in ({}, CHANGES["accumulated"])
    )
    (modules,) = {reductions for _, reductions in once}
    assert modules >= 2, "at least each layer"
    assert each == [(number, number * modules) for number, _ in once] and max(number for number, _ in once) >= 3


@pytest.mark.parametrize(("backend", "n"), [("local", 1), ("local", 2), ("fsdp", 1), ("fsdp", 2)])
@pytest.mark.parametrize("lora", [0, 2])
def test_mixed_precision_follows_a_plain_loop_in_mixed_precision(run, models, plain, backend, n, lora) -> None:
    changes = {"model.dtype": "bfloat16", "lora.rank": lora}
    found = run(n, make_config(models["untied"], training_backend=backend, **changes))
    expected, single = plain("untied", bf16=True, lora=lora), plain("untied", lora=lora)
    assert {value.dtype for value in found["weights"].values()} == {torch.bfloat16}
    # The first loss says that each product is rounded where the plain loop rounds; float32 is 1e-5 away.
    assert found["losses"][0] == pytest.approx(expected["losses"][0], abs=loose(1e-6))
    if not OTHERS_ON_CARD:
        assert single["losses"][0] != pytest.approx(expected["losses"][0], abs=1e-5)
    assert found["losses"] == pytest.approx(expected["losses"], abs=0.02)
    assert found["norms"] == pytest.approx(expected["norms"], rel=0.02)
    # Adam's first steps are signs, which rounding flips where a gradient is near 0: what counts is the whole update.
    moved = apart = 0.0
    start = run(1, make_config(models["untied"]), steps=range(0))["weights"]
    for name, value in found["weights"].items():
        moved += float((expected["weights"][name] - start[name]).square().sum())
        apart += float((value.float() - expected["weights"][name]).square().sum())
    assert apart < 0.1**2 * moved


def test_the_same_seed_gives_the_same_bits(run, models) -> None:
    cfg = make_config(models["untied"], training_backend="local")
    first, again = run(1, cfg), run(1, cfg)
    assert first["losses"] == pytest.approx(again["losses"], rel=loose(0), abs=loose(0))
    assert all(same(value, again["weights"][name]) for name, value in first["weights"].items())


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "before", "after", "changes"),
    [
        ("local", 1, 2, {}),
        ("local", 2, 1, {"model.dtype": "bfloat16"}),
        ("fsdp", 1, 2, {}),
        ("fsdp", 2, 1, {"model.dtype": "bfloat16"}),
        ("fsdp", 2, 1, {"lora.rank": 2, "model.value_head": True}),
        pytest.param("fsdp", 2, 4, {"lora.rank": 2}, marks=pytest.mark.long),
        pytest.param("fsdp", 4, 2, {}, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_resumes_on_another_world_size(run, models, tmp_path, backend, before, after, changes) -> None:
    cfg = make_config(models["untied"], training_backend=backend, **changes)
    whole = run(before, cfg)
    run(before, cfg, steps=range(2), save=tmp_path / "checkpoint")
    rest = run(after, cfg, steps=range(2, 4), load=tmp_path / "checkpoint")
    tolerance = 2e-2 if changes.get("model.dtype") else loose(2e-5)
    assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=tolerance, abs=tolerance)
    for name, value in rest["weights"].items():
        torch.testing.assert_close(value, whole["weights"][name], rtol=tolerance, atol=tolerance)
    initial = run(1, cfg, steps=range(0))
    torch.testing.assert_close(rest["reference"], initial["before"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_a_checkpoint_of_an_accelerator_goes_on_where_there_is_none(run, models, tmp_path, backend: str) -> None:
    """With `dtype: auto` it was bfloat16 there and is float32 here; weights and moments are float32 in both."""
    there = make_config(models["untied"], training_backend=backend, **{"model.dtype": "bfloat16"})
    here = make_config(models["untied"], training_backend=backend)
    assert here.actor.model.dtype == "auto"
    whole = run(2, there)
    run(2, there, steps=range(2), save=tmp_path / "checkpoint")
    rest = run(2, here, steps=range(2, 4), load=tmp_path / "checkpoint", save=tmp_path / "again")
    assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=2e-2, abs=2e-2)
    assert {value.dtype for value in rest["weights"].values()} == {torch.float32}
    written = [json.loads((tmp_path / name / "backend.json").read_text())["about"] for name in ("checkpoint", "again")]
    assert [about["dtype"] for about in written] == ["bfloat16", "float32"]


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_on_the_same_world_size_it_resumes_bit_for_bit(run, models, tmp_path, backend: str) -> None:
    cfg = make_config(models["untied"], training_backend=backend)
    whole = run(2, cfg)
    run(2, cfg, steps=range(2), save=tmp_path)
    rest = run(2, cfg, steps=range(2, 4), load=tmp_path)
    assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=loose(0), abs=loose(0))
    assert all(same(value, whole["weights"][name]) for name, value in rest["weights"].items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_can_be_read_with_torch_alone(run, models, tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    report = run(2, make_config(models["untied"], training_backend="fsdp"), steps=range(1), save=tmp_path)
    state = {f"model.{name}": torch.empty_like(value) for name, value in report["weights"].items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "shards")), no_dist=True)
    assert all(torch.equal(state[f"model.{name}"], value) for name, value in report["weights"].items())
    assert sorted(path.suffix for path in (tmp_path / "shards").iterdir()) == [".safetensors"] * 2


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_a_checkpoint_of_something_else_is_refused(run, models, tmp_path, backend: str) -> None:
    cfg = make_config(models["untied"], training_backend=backend)
    run(1, cfg, steps=range(0), save=tmp_path / "good")
    other = "fsdp" if backend == "local" else "local"
    for changes, text in (
        ({"training_backend": other}, "training_backend"),
        ({"training_backend": backend, "lora.rank": 2}, "lora.rank"),
        ({"training_backend": backend, "model.model_path": str(models["tied"])}, "trainable parameters"),
    ):
        with pytest.raises(CheckpointError, match=text):
            TokenTrainer(make_config(models["untied"], **changes), Worker()).load(tmp_path / "good")
    with pytest.raises(CheckpointError, match="not a checkpoint of this kind"):
        TokenTrainer(cfg, Worker()).load(tmp_path / "none")
    for path in (tmp_path / "good").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="good"):
        TokenTrainer(cfg, Worker()).load(tmp_path / "good")


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "n", "model", "changes"),
    [
        ("local", 1, "untied", {}),
        ("local", 1, "tied", {"lora.rank": 2}),
        ("fsdp", 2, "tied", {}),
        ("fsdp", 2, "untied", {"lora.rank": 2}),
        ("fsdp", 2, "untied", {"model.dtype": "bfloat16"}),
        ("local", 1, "gpt2", {"lora.rank": 2}),
        ("fsdp", 2, "gpt2", {}),
    ],
)
def test_what_is_exported_scores_the_same_in_transformers(run, models, tmp_path, backend, n, model, changes) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = make_config(models[model], training_backend=backend, **changes)
    report = run(n, cfg, steps=range(2), export=tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.dtype is getattr(torch, changes.get("model.dtype", "float32"))
    assert dict(loaded.named_parameters()).keys() == report["weights"].keys()
    # A unit of the last place of bfloat16, where a processor without instructions for it adds up in another order.
    rounding = 2e-2 if loaded.dtype == torch.bfloat16 else loose(1e-5, 2e-3)
    with torch.no_grad():
        torch.testing.assert_close(
            token_scores(loaded, probe_batch(), TEMPERATURE).logprobs,
            report["after"],
            rtol=rounding,
            atol=rounding,
        )
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("t7") == 7


@pytest.mark.parametrize(("backend", "n"), [("local", 1), ("fsdp", 2)])
def test_an_exported_adapter_is_loaded_by_peft(run, models, tmp_path, backend: str, n: int) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    changes = {"lora.rank": 2, "model.value_head": n == 2}
    cfg = make_config(models["untied"], training_backend=backend, **changes)
    report = run(n, cfg, steps=range(2), adapter=tmp_path)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["untied"]), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            token_scores(model, probe_batch(), TEMPERATURE).logprobs,
            report["after"],
            rtol=loose(1e-5),
            atol=loose(1e-5),
        )
    assert not (tmp_path / "model.safetensors").exists()


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"training_backend": "megatron"}, r"'megatron', which is unknown.*allowed: deepspeed, fsdp, local"),
        ({"training_backend": "no.such.module:Backend"}, r"no\.such\.module:Backend"),
        ({"model.model_path": None}, r"model_path is not set"),
        ({"model.model_path": "/no/such/folder"}, r"model_path=/no/such/folder: the model cannot be loaded"),
        ({"model.dtype": "float8"}, r"actor\.model\.dtype is 'float8'; choose from auto, float32, bfloat16, float16"),
        ({"optim.name": "sgd"}, r"actor\.optim\.name is 'sgd'; choose from adam, adamw"),
        ({"optim.name": "sgd", "training_backend": "fsdp"}, r"actor\.optim\.name is 'sgd'; choose from adam, adamw"),
        ({"lora.rank": 2, "lora.target_modules": ["qqq"]}, r"target_modules is \['qqq'\]"),
        ({"lora.rank": 2, "lora.target_modules": ["embed_tokens"]}, r"embed_tokens.*linear"),
    ],
)
def test_bad_input_is_one_message(models, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TokenTrainer(make_config(models["untied"], **changes), Worker())


def test_out_of_memory_names_the_knobs(models) -> None:
    backend = TokenTrainer(make_config(models["untied"]), Worker())
    ids = torch.zeros(8192, 60, dtype=torch.int64)  # half a million tokens: 60 MB a layer's tensor
    batch = TokenBatch.from_sequences(list(ids), list(torch.ones_like(ids, dtype=torch.bool)))

    def loss(scores: Any, batch: Any) -> Any:
        return scores.logprobs.sum(), {}

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, limits[1]))
    try:
        with pytest.raises(ConfigError) as caught:
            backend.forward_backward([batch], loss)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    for knob in ("actor.max_tokens_per_micro_batch", "actor.model.gradient_checkpointing", "actor.fsdp.cpu_offload"):
        assert knob in str(caught.value)


def test_the_reference_is_loaded_only_where_it_is_wanted(models) -> None:
    cfg = make_config(models["untied"])
    assert TokenTrainer(cfg, Worker()).backend._reference is None
    assert TokenTrainer(cfg, Worker(), has_reference=True).backend._reference is not None
    cfg.actor.lora.rank = 2
    assert TokenTrainer(cfg, Worker(), has_reference=True).backend._reference is None


def test_a_backend_of_ones_own_is_named_by_module_and_class(models) -> None:
    cfg = make_config(models["untied"], training_backend="rlhpc.training.data_parallel:ReplicatedBackend")
    backend = TokenTrainer(cfg, Worker())
    assert backend.num_trained_parameters == sum(tensor.numel() for _, tensor in backend.named_weights())


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_a_gradient_that_is_not_finite_updates_nothing(models, run, ranks, backend) -> None:
    """Neither weights nor averages, on any rank: what follows is as if there had been no such step."""
    cfg = make_config(models["untied"], training_backend=backend)
    expected = run(2, cfg, steps=range(2))
    for found in ranks(2).poisoned(cfg).wait():
        assert [math.isfinite(norm) for norm in found["norms"]] == [True, False, True]
        assert found["norms"][::2] == expected["norms"]
        assert all(torch.equal(value, expected["weights"][name]) for name, value in found["weights"].items())
        assert len(found["held"]) >= len(expected["weights"])
