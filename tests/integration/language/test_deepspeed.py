"""DeepSpeed's ZeRO stages against a plain loop of PyTorch: real DeepSpeed, on gloo, in real worker groups."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("deepspeed", "llm")

sys.path.insert(0, str(Path(__file__).parent))

from deepspeed_ranks import ZeroTrainer
from lm_ranks import ENTROPY_COEF, LR, TEMPERATURE, alone, count, groups_of, make_config, probe_batch, sequences, train

from rlhpc import Session
from rlhpc.language.models.loading import compute_dtype
from rlhpc.language.models.logprobs import token_scores
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.deepspeed_config import deepspeed_config
from tests.accelerators import OTHERS_ON_CARD, loose, same

STAGES = (1, 2, 3)
#: DeepSpeed keeps small parameters whole, which all of a tiny model's are; this makes stage 3 cut them up.
PARTITION = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
#: What the fork server imports, so that not each rank has to.
PRELOAD = (
    "deepspeed", "deepspeed.checkpoint.ds_to_universal", "deepspeed.runtime.zero.muon.muon_optimizer", "peft",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose head is its embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tied"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    """Groups of real worker processes, one of each size."""
    if not OTHERS_ON_CARD:
        os.environ["DS_ACCELERATOR"] = "cpu"
    Session.prewarm(PRELOAD)
    yield from groups_of(ZeroTrainer, "zero")


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Any]) -> Callable[..., list[dict[str, Any]]]:
    """Trains on n ranks, each configuration in turn; rank 0's reports. The others must agree with it."""

    def on(n: int, configs: list[Any], **options: Any) -> list[dict[str, Any]]:
        first, *others = ranks(n).train_all(configs, **options).wait()
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                assert theirs["losses"] == mine["losses"] and theirs["norms"] == mine["norms"]
                assert all(torch.equal(value, mine["weights"][name]) for name, value in theirs["weights"].items())
        return first

    return on


@pytest.fixture(scope="module")
def trained(run: Callable[..., list[dict[str, Any]]]) -> Callable[[int, Any], dict[str, Any]]:
    """The report of four steps from the start on n ranks, trained once: several tests compare with it."""
    known: dict[tuple[int, str], dict[str, Any]] = {}

    def of(n: int, cfg: Any) -> dict[str, Any]:
        key = n, OmegaConf.to_yaml(cfg)
        if key not in known:
            (known[key],) = run(n, [cfg])
        return known[key]

    return of


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Any], Path]:
    """The checkpoint of two steps from the start on n ranks, alone in its folder; for several tests, too."""
    known: dict[tuple[int, str], Path] = {}

    def of(n: int, cfg: Any) -> Path:
        key = n, OmegaConf.to_yaml(cfg)
        if key not in known:
            folder = tmp_path_factory.mktemp("saved") / "global_step_2"
            run(n, [cfg], steps=range(2), save=folder)
            known[key] = folder
        return known[key]

    return of


def configured(model: Path, stage: int, **changes: Any) -> Any:
    options = {"training_backend": "deepspeed", "deepspeed.zero_stage": stage, "deepspeed.config": PARTITION}
    return make_config(model, **{**options, **changes})


def plain_loop(folder: Path, lora: int = 0) -> dict[str, Any]:
    """The same training with torch alone: one process, one sequence at a time, torch.optim.AdamW."""
    import peft
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if lora:
        torch.manual_seed(1)
        options = {"r": lora, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        module = peft.get_peft_model(module, peft.LoraConfig(**options))
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=1e-5, weight_decay=0.1)
    losses, norms = [], []
    for step in range(4):
        total = 0.0
        for sequence in sequences(step):
            ids = sequence["ids"]
            every = torch.log_softmax(module(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
            picked, entropy = every.gather(1, ids[1:, None]).squeeze(1), -(every.exp() * every).sum(-1)
            loss = -(sequence["weights"][1:] * picked + ENTROPY_COEF * entropy).sum() / count(step)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    merged = module.merge_and_unload() if lora else module
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in merged.named_parameters()}}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    tolerance = loose(tolerance)
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
    assert list(found["weights"]) == list(expected["weights"])
    for name, value in found["weights"].items():
        torch.testing.assert_close(value.float(), expected["weights"][name], rtol=tolerance, atol=tolerance, msg=name)


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_every_stage_and_world_size_trains_as_a_plain_loop(trained, model, n: int) -> None:
    expected = plain_loop(model)
    for stage in STAGES:
        found = trained(n, configured(model, stage))
        assert_same(found, expected)
        assert found["trained"] == sum(value.numel() for value in expected["weights"].values())
        # The reference is the model of before training, the trained one has left it.
        torch.testing.assert_close(found["reference"], found["before"], rtol=loose(1.3e-6), atol=loose(1e-5))
        assert (found["after"] - found["before"]).abs().max() > 0.05


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_as_in_a_plain_loop(run, model, stage: int) -> None:
    changes: dict[str, Any] = {"lora.rank": 2, "model.gradient_checkpointing": stage == 3}
    (found,) = run(2, [configured(model, stage, **changes)])
    assert_same(found, plain_loop(model, lora=2))
    torch.testing.assert_close(found["reference"], found["before"], rtol=loose(1.3e-6), atol=loose(1e-5))


def test_a_head_for_values_trains_as_on_one_rank(run, model) -> None:
    changes = {"model.value_head": True}
    expected = train(alone(), make_config(model, **changes))
    for found in run(2, [configured(model, stage, **changes) for stage in (2, 3)]):
        assert_same(found, expected)
        torch.testing.assert_close(found["values"], expected["values"], rtol=loose(1e-4), atol=loose(1e-4))


@pytest.mark.long
def test_tied_weights_offload_and_checkpointing_change_nothing(run, model, tied) -> None:
    (found,) = run(2, [configured(tied, 3)])
    assert_same(found, plain_loop(tied))
    changes = [{"deepspeed.cpu_offload": True}, {"model.gradient_checkpointing": True}]
    for found in run(2, [configured(model, stage, **change) for stage in (2, 3) for change in changes]):
        assert_same(found, plain_loop(model))


def test_the_stages_agree_in_mixed_precision(trained, model) -> None:
    single = plain_loop(model)
    found = [trained(2, configured(model, stage, **{"model.dtype": "bfloat16"})) for stage in STAGES]
    for report in found:
        assert {value.dtype for value in report["weights"].values()} == {torch.bfloat16}
        assert report["losses"] == pytest.approx(found[0]["losses"], abs=loose(1e-4))
        assert report["losses"] == pytest.approx(single["losses"], abs=0.02)
        assert report["losses"] != pytest.approx(single["losses"], abs=1e-6)  # it did compute in bfloat16


# -- checkpoints ------------------------------------------------------------------------------------------------------

KINDS = [
    pytest.param({}, id="float32"),
    pytest.param({"model.dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.long),
    pytest.param({"lora.rank": 2}, id="lora", marks=pytest.mark.long),
]


@pytest.mark.parametrize("changes", KINDS)
def test_it_resumes_bit_for_bit_and_on_another_world_size(run, trained, saved, model, changes) -> None:
    for stage in STAGES:
        cfg = configured(model, stage, **changes)
        whole, folder = trained(2, cfg), saved(2, cfg)
        (rest,) = run(2, [cfg], steps=range(2, 4), load=folder)
        exact = {"rel": loose(0), "abs": loose(0)}
        assert rest["losses"] == pytest.approx(whole["losses"][2:], **exact)
        assert rest["norms"] == pytest.approx(whole["norms"][2:], **exact)
        assert all(same(value, whole["weights"][name]) for name, value in rest["weights"].items())
        (alone,) = run(1, [cfg], steps=range(2, 4), load=folder)
        tolerance = 1e-2 if changes.get("model.dtype") else loose(2e-5)
        assert alone["losses"] == pytest.approx(whole["losses"][2:], abs=tolerance)
        assert alone["norms"] == pytest.approx(whole["norms"][2:], rel=max(1e-4, tolerance))
        for name, value in alone["weights"].items():
            torch.testing.assert_close(value, whole["weights"][name], rtol=tolerance, atol=tolerance, msg=name)
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.long
@pytest.mark.parametrize("before", [1, 2])
def test_it_resumes_on_more_ranks(run, trained, saved, model, before: int) -> None:
    for stage in STAGES:
        cfg = configured(model, stage)
        (rest,) = run(4, [cfg], steps=range(2, 4), load=saved(before, cfg))
        assert rest["losses"] == pytest.approx(trained(before, cfg)["losses"][2:], abs=loose(2e-5))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_an_accelerator_goes_on_where_there_is_none(run, saved, trained, model, stage: int) -> None:
    """With `dtype: auto` it was bfloat16 there and is float32 here."""
    there, here = configured(model, stage, **{"model.dtype": "bfloat16"}), configured(model, stage)
    (rest,) = run(2, [here], steps=range(2, 4), load=saved(2, there))
    assert rest["losses"] == pytest.approx(trained(2, there)["losses"][2:], abs=1e-2)
    assert {value.dtype for value in rest["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("changed", [1_000, 10**9])
def test_sub_groups_of_another_size_go_on(run, trained, saved, model, changed: int) -> None:
    """ZeRO-3's optimizer states in many sub-groups, read where there is one, and the other way round."""
    one, many = (configured(model, 3, **{"deepspeed.config": _sub_groups(size)}) for size in (10**9, 1_000))
    before, after = (one, many) if changed == 1_000 else (many, one)
    (rest,) = run(2, [after], steps=range(2, 4), load=saved(2, before))
    assert rest["losses"] == pytest.approx(trained(2, before)["losses"][2:], abs=loose(2e-5))


def _sub_groups(size: int) -> dict[str, Any]:
    return {"zero_optimization": {"sub_group_size": size, "stage3_param_persistence_threshold": 0}}


@pytest.mark.long
def test_stages_1_and_2_read_each_other(run, trained, saved, model) -> None:
    for stage in (1, 2):
        cfg = configured(model, stage)
        (rest,) = run(2, [configured(model, 3 - stage)], steps=range(2, 4), load=saved(2, cfg))
        assert rest["losses"] == pytest.approx(trained(2, cfg)["losses"][2:], abs=loose(2e-5))


def test_options_are_those_of_the_configuration_after_a_resume(run, saved, model) -> None:
    folder = saved(2, configured(model, 2))
    changed = configured(model, 2, **{"optim.clip_grad": 1e-9, "optim.weight_decay": 0.0, "optim.adam_eps": 1.0})
    for n in (1, 2):
        (rest,) = run(n, [changed], steps=range(2, 4), load=folder)
        assert (rest["after"] - rest["before"]).abs().max() < 1e-2  # such a clip and eps leave hardly a step


def test_a_checkpoint_of_something_else_is_refused(run, ranks, model, tied, tmp_path) -> None:
    folder = tmp_path / "saved"
    run(2, [configured(model, 2)], steps=range(0), save=folder)

    def said(cfg: Any) -> str:
        first, second = ranks(2).refused(cfg, load=folder).wait()
        assert first == second
        return first

    assert "CheckpointError" in said(configured(tied, 2)) and "trainable parameters" in said(configured(tied, 2))
    assert "actor.lora.rank" in said(configured(model, 2, **{"lora.rank": 2}))
    assert "zero_stage=2" in said(configured(model, 3))
    layout = json.loads((folder / "deepspeed.json").read_text())
    (folder / "deepspeed.json").write_text(json.dumps({**layout, "world_size": 3}))
    for path in (folder / "deepspeed" / "state").glob("*optim_states.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    assert "CheckpointError" in said(configured(model, 2)) and "could not be converted" in said(configured(model, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", KINDS)
def test_what_is_exported_scores_the_same_in_transformers(run, model, tmp_path, changes) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    then = {"export": tmp_path / "whole"} | ({"adapter": tmp_path / "adapter"} if "lora.rank" in changes else {})
    (report,) = run(2, [configured(model, 3, **changes)], steps=range(2), **then)
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / "whole")]
    if "adapter" in then:
        base = AutoModelForCausalLM.from_pretrained(model)
        loaded.append(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    for module in loaded:
        with torch.no_grad():
            scores = token_scores(module.eval(), probe_batch(), TEMPERATURE).logprobs
        # in half precision processors without instructions for it round sums of other shapes otherwise
        far = 5e-3 if changes.get("model.dtype") == "bfloat16" else loose(1e-5)
        torch.testing.assert_close(scores, report["after"], rtol=far, atol=far)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "whole")) == 64


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", KINDS[:2])
def test_memory_can_be_given_away_between_steps(run, ranks, model, changes) -> None:
    for stage in STAGES:
        cfg = configured(model, stage, **changes)
        (whole,) = run(2, [cfg], steps=range(3))
        for losses, given, held in ranks(2).train_parked(cfg).wait():
            assert losses == pytest.approx(whole["losses"], rel=loose(0), abs=loose(0))
            assert given > 4 * whole["trained"] and held == 0


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_given_away_is_saved_loaded_and_sent(ranks, model, tmp_path, stage: int) -> None:
    for found in ranks(2).save_and_load_parked(configured(model, stage), str(tmp_path)).wait():
        assert found and all(found.values()), found


def test_gradients_of_a_step_come_in_one_call(ranks, model) -> None:
    (said,) = ranks(1).accumulate_twice(configured(model, 1)).wait()
    assert "forward_backward was called twice" in said


def test_ranks_write_no_banners(run, ranks, model, tmp_path) -> None:
    before = ranks(2).written().wait()
    for stage in STAGES:
        # The tiny model has too few positions for the check of shared prefixes, which the log would say.
        cfg = configured(model, stage, **{"model.dtype": "bfloat16", "share_prefixes": False})
        run(2, [cfg], steps=range(2), save=tmp_path / str(stage))
        run(1, [cfg], steps=range(2), load=tmp_path / str(stage))
    for (out, err), (out_before, err_before) in zip(ranks(2).written().wait(), before, strict=True):
        assert out.removeprefix(out_before) == "" and err.removeprefix(err_before) == ""


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is set by rlhpc.*actor.deepspeed.zero_stage"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param is set.*cpu_offload"),
        ({"train_batch_size": 8}, "config.train_batch_size is set by rlhpc"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is set by rlhpc.*actor.optim.clip_grad"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer is set by rlhpc.*actor.optim"),
        ({"bf16": {"enabled": True}}, "bf16 is set by rlhpc.*actor.model.dtype"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal is set by rlhpc"),
        ({"zero_optimisation": {}}, "zero_optimisation: no such key; did you mean 'zero_optimization'"),
        ({"zero_optimization": 3}, "zero_optimization is 3; it must be a mapping"),
    ],
)
def test_keys_that_rlhpc_sets_are_refused(model, given: dict[str, Any], text: str) -> None:
    cfg = make_config(model, training_backend="deepspeed")
    cfg.actor.deepspeed.config = given
    with pytest.raises(ConfigError, match=text):
        deepspeed_config(cfg.actor, torch.float32)


@pytest.mark.parametrize("stage", [0, 4])
def test_there_are_three_stages(model, stage: int) -> None:
    with pytest.raises(ConfigError, match=f"zero_stage is {stage}; choose from 1, 2, 3"):
        deepspeed_config(configured(model, stage).actor, torch.float32)


def test_what_the_user_adds_reaches_deepspeed(model) -> None:
    cfg = configured(model, 3, **{"model.dtype": "bfloat16", "deepspeed.cpu_offload": True, "optim.clip_grad": None})
    cfg.actor.deepspeed.config = {"zero_optimization": {"overlap_comm": False}, "communication_data_type": "bf16"}
    made = deepspeed_config(cfg.actor, compute_dtype(cfg.actor.model, "cpu"), num_parameters=1000)
    zero = made["zero_optimization"]
    assert zero["overlap_comm"] is False and zero["stage"] == 3 and zero["reduce_bucket_size"] == 1000
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu"}
    assert made["communication_data_type"] == "bf16" and made["bf16"] == {"enabled": True}
    assert made["gradient_clipping"] == 0.0


def test_a_key_that_deepspeed_refuses_is_told_as_a_configuration_error(ranks, model) -> None:
    cfg = configured(model, 2)
    cfg.actor.deepspeed.config = {"zero_optimization": {"reduce_bucket": 5}}
    (said,) = ranks(1).refused(cfg).wait()
    assert said.startswith("ConfigError") and "actor.deepspeed.config" in said and "reduce_bucket" in said


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_updates_nothing(model: Path, run, ranks, stage: int) -> None:
    """DeepSpeed leaves the step out by itself, on both ranks; its norm says so."""
    cfg = configured(model, stage)
    [expected] = run(2, [cfg], steps=range(2))
    for found in ranks(2).poisoned(cfg).wait():
        assert [math.isfinite(norm) for norm in found["norms"]] == [True, False, True]
        assert found["norms"][::2] == expected["norms"]
        assert all(torch.equal(value, expected["weights"][name]) for name, value in found["weights"].items())
