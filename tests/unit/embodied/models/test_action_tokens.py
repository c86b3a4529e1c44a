"""Vision-language-action policies, tiny ones: acting and training agree, every part learns, adapters leave the rest alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc import ConfigError
from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.models import build_model, policy_from_spec
from tests.extras import is_installed, need_extra

need_extra("llm")

from rlhpc.embodied.models.action_tokens import ActionTokens

CFG = OmegaConf.create(
    {
        "hidden_sizes": [], "log_std_init": 0.0, "num_action_chunks": 2, "value_per_action": False, "dtype": "float32",
        "model_path": "builtin:tiny", "attn_implementation": "sdpa", "trust_remote_code": False, "kwargs": {},
        "add_value_head": True,
    }
)  # fmt: skip
LORA = {"rank": 4, "alpha": 8, "target_modules": "all-linear"}
ACTION = spaces.Box(np.array([-1, 0, -2], np.float32), np.array([1, 1, 2], np.float32))
SPACE = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (24, 24, 6), np.uint8),  # two cameras
        "instruction": spaces.Box(0, 255, (40,), np.uint8),
        "state": spaces.Box(-1, 1, (5,), np.float32),
    }
)


#: OpenVLA predicts its actions in three ways.
HEADS = {"openvla-parallel": {"head": "parallel", "proprio": True}, "openvla-l1": {"head": "l1", "proprio": True}}
KINDS = ["vla", "pi0", "openvla", *HEADS]


def section(kind, **changes):
    name = kind.partition("-")[0]
    kwargs = {**HEADS.get(kind, {}), **changes.pop("kwargs", {})}
    return OmegaConf.merge(CFG, {"model_type": name, **changes, "kwargs": kwargs})


def observations(count, seed=0):
    rng = np.random.default_rng(seed)
    texts = [encode_text(("push the cube", "pick up the peg and insert it")[i % 2], 40) for i in range(count)]
    return {
        "rgb": torch.from_numpy(rng.integers(0, 256, (count, 24, 24, 6), np.uint8)),
        "instruction": torch.from_numpy(np.stack(texts)),
        "state": torch.from_numpy(rng.uniform(-1, 1, (count, 5)).astype(np.float32)),
    }


def rows(obs, part):
    return {key: value[part] for key, value in obs.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["token_level", "chunk_level"])
def test_acting_and_training_agree(kind, level):
    policy = build_model(section(kind), SPACE, ACTION, seed=1)
    policy.logprob_type = level
    obs = observations(4)
    with torch.no_grad():
        torch.nn.init.normal_(policy.value_head.out.weight)
        noise = policy.sample_noise((4,), torch.Generator().manual_seed(0))
        actions, extras = policy.predict_action_batch(obs, "train", noise)
        out = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]}, True, True, True)
        alone = policy.predict_action_batch(rows(obs, slice(1, 2)), "train", noise[1:2])[0]
        values = policy.value(obs)
    assert actions.shape == (4, 2, 3)
    torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out["values"], extras["prev_values"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out["values"], values, rtol=1e-4, atol=1e-5)
    # Texts of other lengths in the batch change nothing.
    torch.testing.assert_close(alone, actions[1:2], rtol=1e-3, atol=1e-3)
    shape = (4, 2, 3) if level == "token_level" else (4,)
    assert out["logprobs"].shape == out["entropy"].shape == shape
    if kind in ("vla", "openvla", "openvla-parallel"):
        assert (actions >= torch.tensor(ACTION.low)).all() and (actions <= torch.tensor(ACTION.high)).all()


PARTS = {
    "vla": ("vision_tower", "multi_modal_projector", "language_model", "lm_head"),
    "pi0": ("vision_tower", "multi_modal_projector", "language_model", "dit", "embed_action_time", "action_out_proj"),
    "openvla": ("featurizer.blocks", "fused_featurizer.blocks", "projector", "language_model", "lm_head"),
    "openvla-parallel": ("featurizer.blocks", "fused_featurizer.blocks", "proprio_projector", "lm_head"),
    "openvla-l1": ("featurizer.blocks", "fused_featurizer.blocks", "proprio_projector", "action_head"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["policy", "imitation"])
def test_gradients_reach_every_part(kind, loss):
    policy = build_model(section(kind), SPACE, ACTION, seed=1)
    obs = observations(3)
    if loss == "imitation":
        actions = torch.rand(3, 2, 3)
        policy.bc_loss({"obs": obs, "actions": actions}).mean().backward()
    else:
        with torch.no_grad():
            actions, extras = policy.predict_action_batch(obs)
        out = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]}, True, False, True)
        (out["logprobs"].sum() + out["values"].sum()).backward()
        assert policy.value_head.out.weight.grad.any()
    for part in PARTS[kind]:
        found = [p for name, p in policy.named_parameters() if f"{part}." in name and "norm" not in name]
        assert found and sum(bool(p.grad is not None and p.grad.any()) for p in found) > len(found) / 2, part


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_sees_reads_and_feels_matters(kind):
    policy = build_model(section(kind), SPACE, ACTION, seed=1)
    torch.manual_seed(0)
    for p in policy.parameters():  # fresh weights hardly look at their inputs
        p.data += 0.05 * torch.randn_like(p)
    obs, other = observations(2), observations(2, seed=5)
    with torch.no_grad():
        noise = policy.sample_noise((2,), torch.Generator().manual_seed(0))
        actions, extras = policy.predict_action_batch(obs, "train", noise)
        given = {"actions": actions, **extras["inputs"]}
        reference = policy.default_forward({"obs": obs, **given})["logprobs"]
        changes = {"rgb": other["rgb"], "instruction": obs["instruction"].flip(0)}
        if kind in ("pi0", *HEADS):  # action tokens follow pictures and words alone
            changes["state"] = other["state"]
        for key, value in changes.items():
            assert (
                policy.default_forward({"obs": {**obs, key: value}, **given})["logprobs"] - reference
            ).abs().min() > 1e-5, key


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_and_the_rest_stays(kind):
    need_extra("llm")
    policy = build_model(section(kind, kwargs={"lora": LORA}, add_value_head=False), SPACE, ACTION, seed=1)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    beside = {name for name in trained if name.startswith(("action_head.", "proprio_projector.", "head."))}
    assert trained - beside and all("lora_" in name for name in trained - beside)
    small = sum(p.numel() for name, p in policy.named_parameters() if name in trained - beside)
    assert small < 0.3 * sum(p.numel() for p in policy.parameters())
    plain = build_model(section(kind), SPACE, ACTION, seed=1)
    obs = observations(2)
    with torch.no_grad():
        actions = [one.predict_action_batch(obs, "eval")[0] for one in (policy, plain)]
        torch.testing.assert_close(*actions, rtol=1e-4, atol=1e-4)  # adapters begin as nothing
        assert policy.value(obs).tolist() == [0, 0]
    before = copy.deepcopy(policy.state_dict())
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        policy.bc_loss({"obs": obs, "actions": torch.zeros(2, 2, 3)}).sum().backward()
        optimizer.step()
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed - beside and changed <= trained
    twin = policy_from_spec(policy.spec())
    twin.load_state_dict(policy.state_dict())
    assert torch.equal(twin.predict_action_batch(obs, "eval")[0], policy.predict_action_batch(obs, "eval")[0])


def test_action_tokens_are_openvlas():
    tokens = ActionTokens(32000)
    edges = np.linspace(-1, 1, 256)
    middles = (edges[:-1] + edges[1:]) / 2
    actions = np.random.default_rng(0).uniform(-1.1, 1.1, 2000).astype(np.float32)
    expected = 32000 - np.digitize(np.clip(actions, -1, 1), edges.astype(np.float32))
    found = tokens.ids(torch.from_numpy(actions))
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_allclose(tokens.actions(found).numpy(), middles[np.clip(32000 - expected - 1, 0, 254)], atol=1e-6)
    said = torch.arange(32000 - 255, 32000)
    assert torch.equal(tokens.ids(tokens.actions(said)), said)


def test_samples_follow_the_probabilities():
    from rlhpc.embodied.models.action_tokens import _sample_bins

    logp = torch.log_softmax(torch.tensor([[0.5, -1.0, 1.5, 0.0]]), -1).expand(40_000, 4)
    drawn = _sample_bins(logp, torch.rand(40_000, 1, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(torch.bincount(drawn[:, 0], minlength=4) / 40_000, logp[0].exp(), atol=0.01, rtol=0)


def test_weights_of_a_folder(tmp_path):
    """A tiny Llava with a tokenizer, saved as transformers does, in bfloat16 under adapters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

    from rlhpc.embodied.models.vlm import tiny_config

    words = {chr(i): i for i in range(256)} | {f"<{i}>": i for i in range(256, 640)}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<257>", pad_token="<258>").save_pretrained(tmp_path)
    AutoModelForImageTextToText.from_config(tiny_config("vla", 1, 3, 0)).save_pretrained(tmp_path)
    policy = build_model(section("vla", model_path=str(tmp_path)), SPACE, ACTION, seed=0)
    assert policy.tokens.end == 640
    assert policy.predict_action_batch(observations(2), "eval")[0].shape == (2, 2, 3)
    if not is_installed("flash-attn"):
        with pytest.raises(ConfigError, match=r"actor\.model\.attn_implementation is 'flash_attention_2'"):
            build_model(
                section("vla", model_path=str(tmp_path), attn_implementation="flash_attention_2"), SPACE, ACTION
            )
    need_extra("llm")
    lora = section("vla", model_path=str(tmp_path), dtype="bfloat16", kwargs={"lora": LORA})
    policy = build_model(lora, SPACE, ACTION, seed=0)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert policy.predict_action_batch(observations(2))[1]["prev_logprobs"].dtype == torch.float32


def test_what_does_not_fit_is_explained(tmp_path):
    blind = spaces.Dict({"state": SPACE["state"]})
    for kind in ("vla", "pi0", "openvla"):
        with pytest.raises(ConfigError, match="need pictures"):
            build_model(section(kind), blind, ACTION)
        with pytest.raises(ConfigError, match="continuous actions"):
            build_model(section(kind), SPACE, spaces.Discrete(2))
        with pytest.raises(ConfigError, match="cannot load"):
            build_model(section(kind, model_path=str(tmp_path)), SPACE, ACTION)
        with pytest.raises(ConfigError, match="allowed"):
            build_model(section(kind, kwargs={"stepz": 1}), SPACE, ACTION)


SAMPLED = {"temperature_train": 1.7, "top_k": 5}


@pytest.mark.parametrize("kind", ["vla", "openvla", "openvla-parallel"])
def test_acting_and_training_agree_on_temperature_and_likeliest_tokens(kind):
    policy, plain = (build_model(section(kind, kwargs=kwargs), SPACE, ACTION, seed=1) for kwargs in (SAMPLED, {}))
    plain.load_state_dict(policy.state_dict())
    obs, noise = observations(4), policy.sample_noise((4,), torch.Generator().manual_seed(0))
    with torch.no_grad():
        actions, extras = policy.predict_action_batch(obs, "train", noise)
        given = {"obs": obs, "actions": actions, **extras["inputs"]}
        out = policy.default_forward(given, True, True, False)
        other = plain.default_forward(given, True, True, False)
        logp = policy._compute_bin_logprobs(policy._hidden_states(obs, extras["inputs"]["tokens"]), 1.7)
    torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out["logprobs"], other["logprobs"], rtol=0.05)
    assert out["entropy"].isfinite().all() and (out["entropy"] < other["entropy"]).all()
    assert ((logp.exp() > 0).sum(-1) == 5).all() and torch.allclose(logp.exp().sum(-1), torch.ones(()))
    likeliest = policy.tokens.first + logp.topk(5, -1).indices
    assert (likeliest == extras["inputs"]["tokens"][..., None]).any(-1).all()


def test_a_token_that_is_no_longer_among_the_likeliest_has_a_finite_gradient():
    """After an update a token of the rollout may be cut off: its ratio is 0, not a number that is none."""
    policy = build_model(section("vla", kwargs={"top_k": 2}), SPACE, ACTION, seed=1)
    obs = observations(2)
    with torch.no_grad():
        logp = policy._compute_bin_logprobs(policy._hidden_states(obs, torch.full((2, 6), policy.tokens.first)), 1.0)
    tokens = policy.tokens.first + logp.argmin(-1)
    out = policy.default_forward({"obs": obs, "tokens": tokens}, True, True, False)
    assert (out["logprobs"] < -1e6).all() and out["logprobs"].isfinite().all()
    (out["logprobs"].sum() + out["entropy"].sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())
    assert ((out["logprobs"] - out["logprobs"].detach()) == 0).all()


@pytest.mark.parametrize("kind", ["vla", "openvla-parallel"])
def test_an_evaluation_samples_at_its_temperature(kind):
    """From noise of the evaluation's seed, so that it is the same again; without, the likeliest tokens."""
    sampling, greedy = (
        build_model(section(kind, kwargs={"temperature_eval": value}), SPACE, ACTION, seed=1) for value in (0.8, 0.0)
    )
    obs = observations(3)
    assert sampling.start_shape == (6,) and greedy.start_shape == ()
    noise = sampling.sample_start((3,), torch.Generator().manual_seed(3))
    assert noise.min() >= 0 and noise.max() < 1
    with torch.no_grad():
        first, again, likeliest, others = (
            policy.predict_action_batch(obs, "eval", given)[0]
            for policy, given in ((sampling, noise), (sampling, noise), (greedy, None), (sampling, None))
        )
        trained = greedy.predict_action_batch(obs, "train", noise)[0]
    assert torch.equal(first, again) and not torch.equal(first, likeliest) and not torch.equal(others, likeliest)
    assert not torch.equal(first, trained), "at another temperature"
    rebuilt = policy_from_spec(sampling.spec())
    assert rebuilt.start_shape == (6,), "an export samples in the same way"


def test_sampling_is_of_tokens():
    with pytest.raises(ConfigError, match="temperature_train, temperature_eval and top_k are of action tokens"):
        build_model(section("openvla-l1", kwargs={"top_k": 3}), SPACE, ACTION)
    for wrong, message in (({"top_k": 0}, "top_k"), ({"temperature_train": 0.0}, "temperature_train")):
        with pytest.raises(ConfigError, match=message):
            build_model(section("vla", kwargs=wrong), SPACE, ACTION)
