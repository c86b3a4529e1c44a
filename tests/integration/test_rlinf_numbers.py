"""The same advantages, losses, gradients and steps as RLinf's own code on the same batch and weights.

`tests/rlinf/record.py` has written the numbers; the docstring of a test says where both differ by intent.
"""

from __future__ import annotations

import json
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf
from torch import Tensor, nn

from rlhpc.algorithms import calculate_adv_and_returns, kl_penalty, policy_loss
from rlhpc.algorithms.losses import aggregate, token_weights
from rlhpc.config.sections import OptimConfig
from rlhpc.config.typed import default_section, typed
from rlhpc.embodied.algorithms.off_policy import TransitionBatch
from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.embodied.algorithms.sac import CrossQUpdate, SacUpdate
from rlhpc.embodied.config import PpoConfig, SacAlgorithmConfig
from rlhpc.embodied.config.model_options import ActionTokenOptions
from rlhpc.embodied.config.models import ModelConfig, SacModelConfig
from rlhpc.embodied.config.run import PpoAlgorithmConfig, PpoOptimConfig, SacOptimConfig
from rlhpc.embodied.data.batches import RewardSequence, RolloutBatch, TrainBatch
from rlhpc.embodied.models import build_model
from rlhpc.embodied.runners.rollout_runner import SyncRolloutLoop
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.token_batch import TokenBatch, cumulate
from rlhpc.language.workers.actor import LanguageActor
from rlhpc.language.workers.grpo_actor import GrpoActor
from rlhpc.training.flat_parameters import AdamOptions, FlatModule, decay_factor
from tests.extras import need_extra
from tests.replicas import replicated
from tests.rlinf.record import FOLDER

OBS, ACTION = spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@cache
def numbers(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def close(found: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), **(tolerance or CLOSE))


# -- on-policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "always"])
def test_gae_bootstraps_where_rlinf_does(kind: str) -> None:
    """RLinf adds γ·V(last observation) to the reward of an episode's last step, and ends the trace there. It divides
    normalised advantages by std + 1e-5, rlhpc by std + 1e-8."""
    recorded = numbers("gae")
    inputs = {name: value.T for name, value in tensors(recorded["inputs"]).items()}
    ended = inputs["terminations"] | inputs["truncations"]
    sequence = RewardSequence(
        rewards=inputs["rewards"],
        terminations=inputs["terminations"],
        truncations=inputs["truncations"],
        valid=torch.ones_like(ended),
        values=inputs["values"][:, :-1],
        next_values=torch.where(ended, inputs["final_values"], inputs["values"][:, 1:]),
    )
    if kind == "always":
        sequence = sequence.as_truncated()
    options = {"gamma": recorded["gamma"], "gae_lambda": recorded["gae_lambda"]}
    advantages, returns = calculate_adv_and_returns("gae", **sequence.estimator_inputs(), **options)
    close(advantages.T, recorded[kind]["advantages"])
    close(returns.T, recorded[kind]["returns"])
    normalized, _ = calculate_adv_and_returns("gae", **sequence.estimator_inputs(), **options, normalize=True)
    close(normalized.T, recorded[kind]["normalized"], rtol=3e-5, atol=3e-5)


def mlp(weights: dict[str, Tensor]) -> nn.Module:
    """rlhpc's MLP policy with the weights of RLinf's. RLinf's last layer of values has no bias."""
    policy = build_model(ModelConfig(hidden_sizes=[4, 4], activation="tanh"), OBS, ACTION, seed=0)
    policy.load_state_dict(of_mlp(weights) | {"critic.4.bias": torch.zeros(1)})
    return policy


def of_mlp(tensors_by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients under rlhpc's names."""
    prefixes = {"backbone.": "actor.", "actor_mean.": "actor.4.", "value_head.mlp.": "critic."}
    renamed = {}
    for name, tensor in tensors_by_name.items():
        if name == "actor_logstd":
            renamed["head.log_std"] = tensor[0]
            continue
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        renamed[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return renamed


def trained(policy: nn.Module, batch: TrainBatch, steps: int = 1, **options: Any) -> dict[str, float]:
    """Runs one optimizer step of a minibatch of all rows; the gradients stay in the parameters."""
    algorithm = PpoAlgorithmConfig(
        **{"update_epochs": 1, "normalize_advantages": "none", "clip_ratio_high": 0.28, "value_coef": 1.0, **options}
    )
    optim = OptimConfig(clip_grad=None)
    update = PolicyUpdate(
        algorithm, replicated(policy, optim), batch_size=len(batch), micro_batch=3, seed=0, sequence_length=steps
    )
    return update.run(batch, range(len(batch)), len(batch), 0, 1e-3)


def same_gradients(policy: nn.Module, expected: dict[str, Tensor], factor: float = 1.0) -> None:
    found = {name: parameter.grad for name, parameter in policy.named_parameters()}
    for name, gradient in of_mlp(expected).items():
        close(found[name], factor * gradient)


@pytest.mark.parametrize("index", range(3))
def test_the_ppo_loss_of_an_mlp_and_its_gradient_are_rlinfs(index: int) -> None:
    """With `value_coef: 1`, which RLinf has built in; `huber_delta` of 10000 is quadratic everywhere."""
    recorded = numbers("ppo")
    case, rows = recorded["cases"][index], tensors(recorded["batch"])
    batch = TrainBatch(
        obs=rows["states"],
        actions=rows["action"][:, None],
        logprobs=rows["old_logprobs"].sum(1),
        values=rows["old_values"][:, 0],
        advantages=rows["advantages"][:, 0],
        returns=rows["returns"][:, 0],
        mask=torch.ones(len(rows["states"])),
    )
    policy = mlp(tensors(recorded["weights"]))
    delta = None if case["huber_delta"] == 1e4 else case["huber_delta"]
    metrics = trained(policy, batch, value_clip=0.4, huber_delta=delta)
    assert metrics["policy_loss"] == pytest.approx(case["policy_loss"], rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(case["value_loss"], rel=1e-5)
    same_gradients(policy, tensors(case["gradients"]))


def test_a_huber_loss_matters_in_the_recorded_batch() -> None:
    quadratic, wide, narrow, warming = numbers("ppo")["cases"]
    assert quadratic["value_loss"] == wide["value_loss"] > 1.2 * narrow["value_loss"]
    assert warming["policy_loss"] == 0 and warming["value_loss"] == narrow["value_loss"]
    assert set(warming["gradients"]) == {name for name in narrow["gradients"] if "value_head" in name}


@pytest.mark.parametrize("index", range(3))
def test_the_loss_of_asynchronous_ppo_is_rlinfs(index: int) -> None:
    """With dual clip, around a proximal policy between the one that acted and the trained one. RLinf's mean is over the tokens
    that `behave_weight_threshold` keeps, rlhpc's over the minibatch."""
    recorded = numbers("asynchronous")
    case, rows = recorded["cases"][index], tensors(recorded["batch"])
    zeros = torch.zeros(len(rows["states"]))
    batch = TrainBatch(
        obs=rows["states"], actions=rows["action"][:, None], logprobs=rows["old_logprobs"].sum(1), values=zeros,
        advantages=rows["advantages"][:, 0], returns=zeros, mask=torch.ones_like(zeros), lags=rows["lags"].float(),
    )  # fmt: skip
    policy = mlp(tensors(recorded["weights"]))
    options = {name: case[name] for name in ("clip_ratio_c", "behave_weight_threshold")}
    metrics = trained(
        policy, batch, loss_type="decoupled_ppo", proximal_policy="interpolated", **options, value_coef=0.0
    )
    assert metrics["policy_loss"] == pytest.approx(case["kept"] * case["loss"], rel=1e-5)
    same_gradients(policy, tensors(case["gradients"]), case["kept"])


def test_dual_clip_and_the_threshold_matter_in_the_recorded_batch() -> None:
    plain, dual, kept = numbers("asynchronous")["cases"]
    assert plain["loss"] > dual["loss"] + 0.01 and plain["kept"] == dual["kept"] == 1 and 0 < kept["kept"] < 1


@pytest.mark.parametrize("index", range(4))
def test_the_ppo_loss_of_a_flow_and_its_gradient_are_rlinfs(index: int) -> None:
    """RLinf has no on-policy training of its `flow_policy`, whose training pass draws new actions; its formulas are π0's. It
    reports entropies of learned noise alone."""
    recorded = numbers("flow")
    case, rows = recorded["cases"][index], tensors(recorded["batch"])
    options = {name: recorded[name] for name in ("num_steps", "noise_level", "noise_range")}
    options |= {"noise_method": case["noise_method"], "noise_steps": "one" if case["takes_one"] else "all"}
    model = ModelConfig(model_type="flow", hidden_sizes=[4, 4], activation="tanh", num_action_chunks=2, kwargs=options)
    policy = build_model(model, OBS, ACTION, seed=0)
    policy.velocity.load_state_dict(tensors(case["weights"]))
    chain, indices = torch.tensor(case["chains"]), torch.arange(len(case["chains"]))
    if case["takes_one"]:
        drawn = rows["drawn"]
        before, after = chain[indices, drawn], chain[indices, drawn + 1]
        chain = torch.stack([before, after, drawn[:, None, None].expand_as(before), chain[:, -1]], 1)
    policy.logprob_type = "token_level"
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # sums of terms up to 3
    outputs = policy.default_forward({"obs": rows["states"], "chain": chain}, True, True)
    close(outputs["logprobs"].reshape(-1), torch.tensor(case["logprobs"]).reshape(-1), **tolerance)
    if case["noise_method"] == "flow_noise":
        close(outputs["entropy"].reshape(-1), torch.tensor(case["entropies"]).reshape(-1), **tolerance)
    policy.logprob_type = "chunk_level"
    zeros = torch.zeros(len(indices))
    batch = TrainBatch(
        obs=rows["states"], actions=chain[:, -1], logprobs=torch.tensor(case["old_logprobs"])[:, 0], values=zeros,
        advantages=rows["advantages"][:, 0], returns=zeros, mask=torch.ones_like(zeros), inputs={"inputs.chain": chain},
    )  # fmt: skip
    metrics = trained(policy, batch, value_coef=0.0)
    assert metrics["policy_loss"] == pytest.approx(case["loss"], rel=1e-5)
    found = {name: parameter.grad for name, parameter in policy.velocity.named_parameters()}
    for name, gradient in tensors(case["gradients"]).items():
        close(found[name], gradient, **tolerance)


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("index", range(4))
def test_grpo_of_episodes_is_rlinfs(index: int, loss_agg: str) -> None:
    """RLinf's embodied loss gives all episodes the same weight (here `seq-mean-token-mean`), and counts filtered groups
    in the mean over episodes, which is `count_filtered_groups`."""
    recorded = numbers("grpo")
    case, group_size = recorded["cases"][index], recorded["group_size"]
    rewards, terminations = (torch.tensor(recorded[name]).T.numpy() for name in ("rewards", "terminations"))
    columns = {name: tensor.transpose(0, 1) for name, tensor in tensors(recorded["batch"]).items()}
    before = np.cumsum(terminations, 1) - terminations
    rollout = RolloutBatch(
        obs=columns["states"].numpy(),
        actions=columns["action"][:, :, None].numpy(),
        rewards=rewards,
        terminations=terminations,
        truncations=np.zeros_like(terminations),
        logprobs=columns["old_logprobs"].sum(-1).numpy(),
        values=np.zeros_like(rewards),
        valid=before == 0,
    )
    if case["bounds"]:
        rollout = rollout.drop_groups(group_size, *case["bounds"])
    sequence = rollout.to_tensors(torch.device("cpu")).reward_sequence()
    close(sequence.valid.T, torch.tensor(case["mask"]))
    advantages, returns = calculate_adv_and_returns(
        "grpo", **sequence.estimator_inputs(), group_ids=torch.arange(len(rewards)) // group_size
    )
    close(advantages.T, case["advantages"])
    batch = rollout.to_tensors(torch.device("cpu")).with_advantages(advantages, returns, sequence).flatten()
    policy = mlp(tensors(recorded["weights"]))
    counts = loss_agg == "seq-mean-token-mean"
    metrics = trained(policy, batch, steps=rewards.shape[1], loss_agg=loss_agg, count_filtered_groups=counts)
    expected = case["losses"][loss_agg]
    if not expected["gradients"] or not sequence.valid.any():
        assert metrics["empty_minibatches"] == 1
        return
    assert metrics["policy_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    same_gradients(policy, tensors({k: v for k, v in expected["gradients"].items() if "value_head" not in k}))


# -- off-policy -------------------------------------------------------------------------------------------------------

#: What the importer writes for RLinf's CrossQ, which normalises in the critics alone, from the first batch on.
CROSSQ = {"critic_activation": "relu", "actor_renorm": False, "renorm_rate": 0.001, "renorm_warmup": 0}


def actor_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of RLinf's actor under rlhpc's names."""
    names = ("0", "2", "4")
    return {
        f"{names[0]}.weight": values["backbone.0.weight"],
        f"{names[0]}.bias": values["backbone.0.bias"],
        f"{names[1]}.weight": values["backbone.2.weight"],
        f"{names[1]}.bias": values["backbone.2.bias"],
        f"{names[2]}.weight": torch.cat([values["actor_mean.weight"], values["actor_logstd.weight"]]),
        f"{names[2]}.bias": torch.cat([values["actor_mean.bias"], values["actor_logstd.bias"]]),
    }


def critics_of(values: dict[str, Tensor], crossq: bool) -> dict[str, Tensor]:
    """Weights or gradients of RLinf's critics under rlhpc's names; SAC's two critics share their first layer's tensor."""
    found = {}
    for number, name in enumerate(("one", "two")):
        prefix = f"q_head.qs.{number}."
        own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        for key, value in own.items():
            kind, layer, part = key.split(".")
            if crossq:  # RLinf: normalisations and layers in two lists; rlhpc: in one
                found[f"{name}.{int(layer) // 2 * 3 + (kind == 'net')}.{part}"] = value
            elif int(layer):
                found[f"{name}.{int(layer) - 1}.{part}"] = value
    if not crossq:
        for part in ("weight", "bias"):
            found[f"first.{part}"] = torch.cat([values[f"q_head.qs.{number}.net.0.{part}"] for number in range(2)])
    return found


def same_flat_gradients(flat: FlatModule, expected: dict[str, Tensor], factor: float) -> None:
    found = dict(zip(flat.names, flat.split(flat.gradients), strict=True))
    assert expected.keys() <= found.keys()
    for name, gradient in expected.items():
        close(found[name], factor * gradient)


def off_policy(name: str, kind: str, **changes: Any) -> tuple[dict[str, Any], Any, TransitionBatch]:
    """The recorded numbers, an update with the recorded weights, and the batch."""
    recorded, is_crossq = numbers(name), name == "crossq"
    model = SacModelConfig(
        model_type=name,
        hidden_sizes=[4, 4],
        activation="tanh",
        critic_layer_norm=not is_crossq,
        kwargs=CROSSQ if is_crossq else {},
    )
    policy = build_model(model, OBS, ACTION, seed=0)
    weights = tensors(recorded["weights"])
    policy.critics.load_state_dict(critics_of(weights, is_crossq), strict=False)
    policy.actor.load_state_dict(actor_of(weights))
    algorithm = SacAlgorithmConfig(
        name=name, gamma=recorded["gamma"], initial_alpha=recorded["alpha"], bootstrap_type=kind,
        target_entropy=recorded["target_entropy"], **changes,
    )  # fmt: skip
    update = (CrossQUpdate if is_crossq else SacUpdate)(algorithm, SacOptimConfig(), policy)
    if not is_crossq:
        update.targets["critics"].module.load_state_dict(critics_of(tensors(recorded["target_weights"]), False))
    rows = tensors(recorded["batch"])
    batch = TransitionBatch(
        obs=rows["obs"], actions=rows["actions"][:, None], rewards=rows["rewards"], next_obs=rows["next_obs"],
        terminations=rows["terminations"], noise=torch.tensor(recorded["noise"]), total=len(rows["obs"]),
    )  # fmt: skip
    return recorded, update, batch


@pytest.mark.parametrize("kind", ["standard", "always"])
@pytest.mark.parametrize("name", ["sac", "crossq"])
def test_the_loss_of_critics_and_its_gradient_are_rlinfs(name: str, kind: str) -> None:
    """rlhpc adds the losses of both critics, of which RLinf takes the mean: a factor of 2, which Adam does not see."""
    recorded, update, batch = off_policy(name, kind)
    compute = update._joint_pass if name == "crossq" else update._critic_pass
    metrics = compute((batch.obs, batch.next_obs, batch))
    assert float(metrics["loss"]) == pytest.approx(2 * recorded[kind]["critic_loss"], rel=1e-5)
    expected = critics_of(tensors(recorded[kind]["critic_gradients"]), name == "crossq")
    same_flat_gradients(update.critic, expected, 2.0)
    assert recorded["standard"]["critic_loss"] != recorded["always"]["critic_loss"]


@pytest.mark.parametrize("name", ["sac", "crossq"])
def test_the_loss_of_actor_and_temperature_and_their_gradients_are_rlinfs(name: str) -> None:
    recorded, update, batch = off_policy(name, "standard")
    metrics = update._actor_pass((batch.obs, batch))
    assert float(metrics["loss"]) == pytest.approx(recorded["actor_loss"], rel=1e-5)
    assert float(metrics["entropy"]) == pytest.approx(recorded["entropy"], rel=1e-5)
    same_flat_gradients(update.actor, actor_of(tensors(recorded["actor_gradients"])), 1.0)
    if name == "sac":
        update.train_actor(batch.obs, batch)
        assert float(update._alpha_gradient) == pytest.approx(recorded["alpha_gradient"], rel=1e-5)


def test_a_temperature_by_softplus_is_rlinfs() -> None:
    """With a bound of its gradient, which RLinf's `clip_grad_norm_` of one number computes, too."""
    for clip in (None, 0.1):
        recorded, update, batch = off_policy("sac", "standard", alpha_type="softplus", alpha_clip_grad=clip)
        assert float(update.alpha) == pytest.approx(recorded["alpha"], rel=1e-6)
        update.train_actor(batch.obs, batch)
        gradient = recorded["softplus_gradient"]
        assert abs(gradient) > 0.1 and gradient != pytest.approx(recorded["alpha_gradient"], rel=0.05)
        expected = gradient if clip is None else math.copysign(clip, gradient)
        assert float(update._alpha_gradient) == pytest.approx(expected, rel=1e-5)
        assert float(update.alpha) == pytest.approx(float(torch.nn.functional.softplus(update.raw_alpha)))
        other = off_policy("sac", "standard", alpha_type="softplus")[1]
        other.restore(update.state_dict())
        assert torch.equal(other.alpha, update.alpha)


# -- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(2))
def test_steps_with_a_learning_rate_of_values_and_a_warm_up_are_rlinfs(index: int) -> None:
    """After the warm-up RLinf builds its optimizer anew, so that also the value head begins with empty averages; rlhpc
    keeps them. Until then, and for the policy, all steps are the same."""
    recorded = numbers("optimizer")
    case, optim = recorded["cases"][index], recorded["optim"]
    module = nn.ModuleDict({"value_head": nn.Linear(2, 1), "body": nn.Linear(2, 2)})
    module.load_state_dict(tensors(case["weights"]))
    warmup = case["critic_warmup_steps"]
    options = PpoOptimConfig(**{**optim, "clip_grad": None, "name": "adamw"}, critic_warmup_steps=warmup)
    flat = FlatModule(module, AdamOptions.from_config(options), is_value=lambda name: name.startswith("value_head."))
    for number, (given, expected) in enumerate(zip(case["gradients"], case["steps"], strict=True)):
        for name, parameter in module.named_parameters():
            parameter.grad.copy_(torch.tensor(given[name]))
        flat.optimizer_step(options.lr)
        for name, parameter in module.named_parameters():
            if name.startswith("body.") or number < max(warmup, 1) or not warmup:
                close(parameter.detach(), expected[name])
        if number < warmup:
            close(module["body"].weight.detach(), case["weights"]["body.weight"], rtol=0, atol=0)


def test_the_cosine_schedule_ends_at_min_lr_as_at_rlinfs_min_lr_rate() -> None:
    """RLinf's own `min_lr` is divided by torch's default of 1e-3 rather than by `lr`, and so ends at another rate."""
    recorded = numbers("schedule")
    by_rate, by_min_lr = recorded["cases"]
    lr, total = recorded["lr"], recorded["total"]
    optim = SimpleNamespace(
        lr=lr, min_lr=lr * by_rate["min_lr_rate"], lr_warmup_steps=0, lr_scheduler="cosine", lr_decay_steps=None
    )
    actor = SimpleNamespace(
        section=SimpleNamespace(optim=optim),
        total=total,
        cfg=SimpleNamespace(algorithm=SimpleNamespace(anneal_lr=False)),
    )
    found = [LanguageActor._compute_learning_rate(actor, step) for step in range(1, total + 1)]  # type: ignore[arg-type]
    assert found == pytest.approx(by_rate["rates"], rel=1e-5)
    assert lr * decay_factor(optim, 0.0) == pytest.approx(optim.min_lr)  # type: ignore[arg-type]
    assert by_min_lr["min_lr"] == optim.min_lr and by_min_lr["rates"][-1] < optim.min_lr


# -- language models --------------------------------------------------------------------------------------------------


def test_advantages_of_groups_are_rlinfs() -> None:
    recorded = numbers("language")
    lengths = torch.tensor(recorded["lengths"])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(lengths)), lengths - 1] = torch.tensor(recorded["rewards"])
    groups = torch.arange(len(lengths)) // recorded["group_size"]
    advantages, _ = calculate_adv_and_returns("grpo", rewards=rewards, loss_mask=mask, group_ids=groups)
    close(advantages, recorded["advantages"])


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_loss_of_grpo_and_its_gradient_are_rlinfs(loss_agg: str) -> None:
    recorded = numbers("language")
    loss, metrics, logprobs = language_loss(recorded, slice(None), loss_agg)
    close(loss.detach(), recorded["losses"][loss_agg]["loss"])
    close(metrics["ratio"], recorded["ratio"])
    loss.backward()
    close(logprobs.grad, recorded["losses"][loss_agg]["gradient"])


def test_token_mean_is_rlinfs_valid_token_scale() -> None:
    """RLinf's `token-mean` alone is the mean over micro-batches of the mean over their tokens."""
    recorded = numbers("language")
    total = float(sum(recorded["lengths"]))
    gradients, losses = [], []
    for rows in (slice(0, 4), slice(4, 8)):
        loss, _, logprobs = language_loss(recorded, rows, "token-mean", kl_coef=0.0, global_tokens=total)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(logprobs.grad)
    close(sum(losses), recorded["valid_token_scale"]["loss"])
    close(torch.cat(gradients), recorded["valid_token_scale"]["gradient"])


def language_loss(
    recorded: dict[str, Any], rows: slice, loss_agg: str, kl_coef: float = 0.1, **counts: Any
) -> tuple[Tensor, dict[str, Any], Tensor]:
    batch = {name: tensor[rows] for name, tensor in tensors(recorded["batch"]).items()}
    lengths, logprobs = torch.tensor(recorded["lengths"]), batch["logprobs"].requires_grad_()
    mask = (torch.arange(int(lengths.max())) < lengths[:, None])[rows]
    loss, metrics = policy_loss(
        "ppo", logprobs=logprobs, old_logprobs=batch["old_logprobs"],
        advantages=torch.tensor(recorded["advantages"])[rows], loss_mask=mask, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=3.0, loss_agg=loss_agg, **counts,
    )  # fmt: skip
    penalty = kl_penalty(logprobs, batch["ref_logprobs"], "low_var_kl")
    return loss + kl_coef * aggregate(penalty, mask, loss_agg, **counts), metrics, logprobs


@pytest.mark.parametrize("index", range(3))
def test_a_ratio_beyond_the_limit_leaves_out_what_rlinf_leaves_out(index: int) -> None:
    """RLinf sets the loss of a micro-batch to 0, rlhpc takes no optimizer step for a minibatch; here it is one micro-batch."""
    recorded = numbers("early_stop")
    case, columns = recorded["cases"][index], ("logprobs", "recomputed_logprobs", "advantages", "response_mask")
    logprobs, old_logprobs, advantages, mask = (torch.tensor(recorded[name]) for name in columns)
    loss, metrics = policy_loss(
        "ppo", logprobs=logprobs.requires_grad_(), old_logprobs=old_logprobs, advantages=advantages, loss_mask=mask,
        clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg="token-mean",
    )  # fmt: skip
    close(metrics["ratio"], case["ratio"])
    actor: Any = SimpleNamespace(cfg=GrpoConfig())
    actor.cfg.algorithm.early_stop_imp_ratio = case["limit"]
    is_left_out = GrpoActor._exceeds_ratio(actor, {"ratio": float(metrics["ratio"])})
    assert is_left_out == (case["limit"] == 1.2)
    loss.backward()
    assert logprobs.grad is not None
    close(logprobs.grad * (not is_left_out), case["gradient"])
    assert float(loss) * (not is_left_out) == pytest.approx(case["loss"], rel=1e-5)


@pytest.mark.parametrize("index", range(6))
def test_the_weights_that_act_are_those_of_rlinfs_runners(index: int) -> None:
    """RLinf's asynchronous runner also sends the weights of the last update, with which nothing acts any more."""
    recorded = numbers("weight_sync")
    case, sent, num_steps = recorded["cases"][index], list[int](), recorded["steps"]
    sources: Any = SimpleNamespace(sync=lambda version: sent.append(version) or [], begin=lambda step: None)
    loop = SyncRolloutLoop(sources, Any, "receive", 1.0, weight_sync_interval=case["interval"])
    loop.begin(0)
    for step in range(1, num_steps + 1):
        loop._sync_if_due(step)
    assert sent == [version for version in case["sent"] if version < num_steps]


def test_token_weights_by_sequence_are_rlinfs_loss_scales() -> None:
    """RLinf's three `loss_scales` with micro-batches of one turn are `seq-mean-token-mean`, while an episode has one agent.
    Of several agents RLinf takes the mean within an episode, and rlhpc counts each as a sequence."""
    recorded = numbers("turns")
    lengths, episode, agent = (torch.tensor(recorded[name]) for name in ("lengths", "episode", "agent"))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    recorded_weights = torch.tensor(recorded["token_scales"]) / lengths[:, None] / len(lengths)
    sequences = torch.unique(torch.stack([episode, agent]), dim=1, return_inverse=True)[1]
    sequence_tokens = torch.zeros(5, dtype=torch.long).index_add(0, sequences, lengths)[sequences]
    weights = token_weights(
        mask, "seq-mean-token-mean", tokens=0, seqs=4, seq_tokens=sequence_tokens[:, None], length=1.0
    )
    alone = episode != 2
    close(weights[alone], recorded_weights[alone])
    close(weights[~alone] / 2, recorded_weights[~alone])


@pytest.mark.parametrize(("mode", "credit"), [("trajectory", "episode"), ("turn", "all_turns")])
def test_advantages_of_turns_are_rlinfs_grpo_dynamic(mode: str, credit: str) -> None:
    """With the reward of the episode for each of its turns, which is what RLinf's agents give."""
    recorded = numbers("turns")
    cfg = default_section(GrpoConfig)
    OmegaConf.update(cfg, "algorithm.credit", credit)
    cfg = typed(GrpoConfig, cfg)
    episode, lengths = torch.tensor(recorded["episode"]), torch.tensor(recorded["lengths"])
    turn = [recorded["episode"][:index].count(number) for index, number in enumerate(recorded["episode"])]
    mask = torch.cat([torch.tensor([False] + [True] * length) for length in recorded["lengths"]])
    batch = TokenBatch(
        cumulate((lengths + 1).tolist()), torch.zeros(len(mask), dtype=torch.long), mask,
        torch.tensor(turn).repeat_interleave(lengths + 1), episode, torch.zeros_like(episode),
        episode // recorded["group_size"], torch.tensor(recorded["rewards"])[episode],
    )  # fmt: skip
    advantages = PolicyGradient(cfg).advantages(batch, None)
    close(advantages[mask], torch.tensor(recorded["advantages"][mode]).repeat_interleave(lengths))


@pytest.mark.parametrize("index", range(4))
def test_log_probs_of_action_tokens_are_rlinfs(index: int) -> None:
    """RLinf's training pass cuts to `top_k` before it excludes words that are no bins, its rollout after that; here no word
    but bins is among the likeliest."""
    need_extra("llm")
    from rlhpc.embodied.models.action_tokens import ActionTokens, TokenPolicy

    recorded = numbers("sampling")
    case = recorded["cases"][index]
    options = ActionTokenOptions(temperature_train=case["temperature"], top_k=case["top_k"] or -1)
    policy: Any = SimpleNamespace(_logits=lambda hidden: hidden, tokens=ActionTokens(256), options=options)
    logprobs = TokenPolicy._compute_bin_logprobs(policy, torch.tensor(recorded["logits"]), options.temperature_train)
    chosen = torch.tensor(case["bins"])[..., None]
    close(logprobs.gather(-1, chosen)[..., 0], case["logprobs"])
    if case["top_k"] != 4:  # RLinf's entropy with excluded words is not a number
        close(-(logprobs.exp() * logprobs).sum(-1), case["entropy"])


def test_the_default_of_ppo_is_without_these_keys() -> None:
    algorithm, optim = PpoConfig().algorithm, PpoConfig().actor.optim
    assert (algorithm.huber_delta, algorithm.filter_rewards, algorithm.bootstrap_type) == (None, False, "standard")
    assert (optim.value_lr, optim.critic_warmup_steps, optim.min_lr) == (None, 0, 0.0)
