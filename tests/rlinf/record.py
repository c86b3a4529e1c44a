"""Records inputs and outputs of RLinf's losses, advantages and optimizers: `python -m tests.rlinf.record FOLDER`.

FOLDER is a source tree of RLinf, and `--commit` names its commit. RLinf's scheduler, which needs Ray, and prismatic
are replaced by empty modules; all formulas are RLinf's. The tests read the file that this program writes, and need no RLinf.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

#: Folder of the recorded numbers, one file for each subject.
FOLDER = Path(__file__).parent.parent / "data" / "rlinf"
#: Modules that are replaced, because they need packages that the formulas do not.
_REPLACED = (
    "rlinf.scheduler", "prismatic", "openpi", "einops", "megatron", "rlinf.hybrid_engines.megatron",
    "rlinf.workers.megatron_worker", "rlinf.workers.rollout", "rlinf.utils.resharding",
)  # fmt: skip


class _Empty(type):
    """Class whose attributes are decorators without effect, such as `Worker.timer("name")`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: lambda function: function


class _EmptyModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        metaclass = _Empty if self.__name__.startswith("rlinf.") else type
        return metaclass(name, (object,), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        is_replaced = any(fullname == name or fullname.startswith(f"{name}.") for name in _REPLACED)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_replaced else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def give_openpi_names() -> None:
    """Gives the module that stands for openpi the names that RLinf's annotations and base classes have."""
    for module, names in {"transforms": ["DataTransformFn"], "models.model": ["Observation", "Actions"]}.items():
        package, _, name = f"openpi.{module}".rpartition(".")
        replacement = types.ModuleType(f"openpi.{module}")
        vars(replacement).update(dict.fromkeys(names, object))
        setattr(importlib.import_module(package), name, replacement)


class Cfg(dict):
    """Configuration with attributes and `get`, such as OmegaConf's."""

    def __init__(self, **values: Any) -> None:
        super().__init__({key: Cfg(**value) if type(value) is dict else value for key, value in values.items()})

    __getattr__ = dict.__getitem__


def normal(*shape: int) -> Tensor:
    """Draws normal numbers with two decimals, which are short in a file."""
    return (torch.randn(*shape) * 100).round() / 100


def uniform(*shape: int) -> Tensor:
    """Draws numbers in [0, 1) with two decimals."""
    return (torch.rand(*shape) * 100).floor() / 100


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients that are there, by parameter name, and clears them."""
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def mlp_policy(width: int = 4, **options: Any) -> nn.Module:
    """Builds RLinf's MLP policy for 3 observations and 2 action components, with two hidden layers of `width`."""
    from rlinf.models.embodiment.mlp_policy.mlp_policy import MLPPolicy
    from rlinf.models.embodiment.modules.q_head import MultiCrossQHead, MultiQHead
    from rlinf.models.embodiment.modules.value_head import ValueHead

    policy = MLPPolicy(obs_dim=3, action_dim=2, num_action_chunks=1, **options)
    policy.backbone = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    policy.actor_mean = nn.Linear(width, 2)
    if options["add_value_head"]:
        policy.value_head = ValueHead(3, hidden_sizes=(width, width), activation="tanh", output_dim=1)
    if options["add_q_head"]:
        policy.actor_logstd = nn.Linear(width, 2)
        head = MultiCrossQHead if options.get("q_head_type") == "crossq" else MultiQHead
        policy.q_head = head(hidden_size=3, hidden_dims=[width, width], num_q_heads=2, action_feature_dim=2)
    for parameter in policy.parameters():
        parameter.data = normal(*parameter.shape) / 2
    return policy


# -- embodied, on-policy ----------------------------------------------------------------------------------------------


def gae() -> dict[str, Any]:
    """GAE with both types of bootstrapping, and normalised. Shapes are `[T, B]`."""
    from rlinf.algorithms.registry import calculate_adv_and_returns
    from rlinf.workers.env.env_worker import EnvWorker

    steps, slots, gamma = 6, 3, 0.9
    inputs = {
        "rewards": normal(steps, slots),
        "values": normal(steps + 1, slots),
        "final_values": normal(steps, slots),
        "terminations": torch.rand(steps, slots) < 0.25,
    }
    inputs["truncations"] = (torch.rand(steps, slots) < 0.25) & ~inputs["terminations"]
    dones = inputs["terminations"] | inputs["truncations"]
    results: dict[str, Any] = {"inputs": inputs, "gamma": gamma, "gae_lambda": 0.8}
    for kind in ("standard", "always"):
        env = SimpleNamespace(
            cfg=Cfg(env={"train": {"auto_reset": True}}, algorithm={"gamma": gamma, "bootstrap_type": kind}),
            env_reward_weight=1.0,
            reward_weight=0.0,
        )
        rewards = [
            EnvWorker.compute_bootstrap_rewards(
                env,
                SimpleNamespace(
                    rewards=inputs["rewards"][t][:, None],
                    dones=dones[t][:, None],
                    truncations=inputs["truncations"][t][:, None],
                ),
                inputs["final_values"][t][:, None],
                None,
            )
            for t in range(steps)
        ]
        for name, normalizes in (("advantages", False), ("normalized", True)):
            found = calculate_adv_and_returns(
                task_type="embodied",
                adv_type="gae",
                rewards=torch.stack(rewards),
                dones=torch.cat([torch.zeros(1, slots, dtype=torch.bool), dones])[..., None],
                values=inputs["values"][..., None],
                gamma=gamma,
                gae_lambda=0.8,
                reward_type="action_level",
                loss_mask=torch.ones(steps, slots, 1, dtype=torch.bool),
                normalize_advantages=normalizes,
            )
            results.setdefault(kind, {})[name] = found["advantages"][..., 0]
            results[kind]["returns"] = found["returns"][..., 0]
    return results


def ppo() -> dict[str, Any]:
    """Loss of an MLP actor-critic on a minibatch, and its gradients."""
    from rlinf.algorithms.registry import policy_loss

    policy, rows = mlp_policy(add_value_head=True, add_q_head=False), 8
    batch = {
        "states": normal(rows, 3),
        "action": normal(rows, 2),
        "old_logprobs": normal(rows, 2) * 0.25 - 2,
        "advantages": normal(rows, 1),
        "returns": normal(rows, 1) * 3,
        "old_values": normal(rows, 1),
    }
    results: dict[str, Any] = {"weights": weights(policy), "batch": batch, "cases": []}
    for options in (
        {"huber_delta": 1e4},
        {"huber_delta": 10.0},
        {"huber_delta": 0.5},
        {"huber_delta": 0.5, "critic_warmup": True},
    ):
        outputs = policy.default_forward({"states": batch["states"], "action": batch["action"]})
        loss, metrics = policy_loss(
            task_type="embodied",
            loss_type="actor_critic",
            logprob_type="chunk_level",
            reward_type="chunk_level",
            single_action_dim=2,
            logprobs=outputs["logprobs"],
            values=outputs["values"],
            old_logprobs=batch["old_logprobs"],
            advantages=batch["advantages"],
            returns=batch["returns"],
            prev_values=batch["old_values"],
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            value_clip=0.4,
            loss_mask=None,
            loss_mask_sum=None,
            max_episode_steps=None,
            **options,
        )
        loss.backward()
        results["cases"].append(
            {
                **options,
                "loss": loss.detach(),
                "policy_loss": metrics["actor/policy_loss"],
                "value_loss": metrics["critic/value_loss"],
                "gradients": gradients(policy),
            }
        )
    return results


def asynchronous() -> dict[str, Any]:
    """Loss of asynchronous PPO, whose proximal policy is interpolated by the age of the weights, and its gradients."""
    from rlinf.algorithms.registry import policy_loss

    policy, rows, version = mlp_policy(add_value_head=True, add_q_head=False), 8, 5
    batch = {
        "states": normal(rows, 3),
        "action": normal(rows, 2),
        "old_logprobs": normal(rows, 2) - 2,
        "advantages": normal(rows, 1),
        "lags": torch.arange(rows) % 4,
    }
    results: dict[str, Any] = {"weights": weights(policy), "batch": batch, "cases": []}
    for options in (
        {"clip_ratio_c": None, "behave_weight_threshold": None},
        {"clip_ratio_c": 1.3, "behave_weight_threshold": None},
        {"clip_ratio_c": 1.3, "behave_weight_threshold": 2.0},
    ):
        outputs = policy.default_forward({"states": batch["states"], "action": batch["action"]}, compute_values=False)
        loss, metrics = policy_loss(
            task_type="embodied",
            loss_type="decoupled_actor_critic",
            logprob_type="chunk_level",
            reward_type="chunk_level",
            single_action_dim=2,
            logprobs=outputs["logprobs"],
            values=torch.zeros(rows, 1),
            old_logprobs=batch["old_logprobs"],
            proximal_logprobs=None,
            versions=(version - batch["lags"])[:, None].expand(-1, 2),
            current_version=version + 1,
            advantages=batch["advantages"],
            returns=torch.zeros(rows, 1),
            prev_values=torch.zeros(rows, 1),
            value_clip=1.0,
            huber_delta=1.0,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            loss_mask=None,
            loss_mask_sum=None,
            max_episode_steps=None,
            **options,
        )
        loss.backward()
        kept = 1.0 - metrics["actor/behav_clip_fraction"]
        results["cases"].append({**options, "kept": kept, "loss": loss.detach(), "gradients": gradients(policy)})
    return results


def flow() -> dict[str, Any]:
    """PPO's loss of a policy that acts by a flow, its gradients and entropies, by RLinf's formulas of π0's chains. A small
    network, which stands for π0's expert, gives velocities and, for `flow_noise`, standard deviations.
    """
    give_openpi_names()
    from rlinf.algorithms.registry import policy_loss
    from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0ForRLActionPrediction as Model

    rows, chunk, dim, steps, noise_level, noise_range = 6, 2, 2, 3, 0.4, (0.1, 0.4)
    batch = {
        "states": normal(rows, 3),
        "drawn": torch.arange(rows) % steps,
        "advantages": normal(rows, 1),
    }
    sizes = {"num_steps": steps, "noise_level": noise_level, "noise_range": noise_range}
    results: dict[str, Any] = {**sizes, "batch": batch, "cases": []}
    for method, takes_one in (("flow_sde", False), ("flow_sde", True), ("flow_noise", False), ("flow_noise", True)):
        outputs = chunk * dim * (2 if method == "flow_noise" else 1)
        network = nn.Sequential(
            nn.Linear(3 + chunk * dim + 32, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, outputs)
        )
        for parameter in network.parameters():
            parameter.data = normal(*parameter.shape) / 2

        def velocity(
            state: Tensor, x: Tensor, t: Tensor, *_: Any, network: nn.Module = network
        ) -> tuple[Tensor, Tensor]:
            phases = t[:, None] * torch.exp(torch.linspace(0, math.log(100), 16))
            result = network(torch.cat([state, x.flatten(1), phases.sin(), phases.cos()], 1)).reshape(*x.shape[:2], -1)
            return result[..., :dim], result[..., dim:]

        model = SimpleNamespace(
            config=SimpleNamespace(add_value_head=False, value_after_vlm=False, safe_get_logprob=False),
            _get_noise_level=lambda device, dtype: torch.tensor(noise_level),
            _get_timesteps=lambda count, device: Model._get_timesteps(None, count, device),
            get_velocity=velocity,
            noise_head=lambda raw: noise_range[0] * (noise_range[1] / noise_range[0]) ** ((raw.tanh() + 1) / 2),
        )

        def moments(x: Tensor, step: Tensor, model: Any = model, method: str = method) -> tuple[Tensor, Tensor]:
            mean, std, *_ = Model.sample_mean_var_val(model, x, step, batch["states"], None, None, method, steps)
            return mean, std

        states = [normal(rows, chunk, dim)]
        for number in range(steps):
            mean, std = moments(states[-1], torch.full((rows,), number))
            states.append(((mean + std * normal(rows, chunk, dim)).detach() * 100).round() / 100)
        chains, indices = torch.stack(states, 1), torch.arange(rows)
        logprobs, entropies = torch.zeros(rows, chunk, dim), torch.zeros(rows, chunk, dim)
        for step in [batch["drawn"]] if takes_one else [torch.full((rows,), k) for k in range(steps)]:
            mean, std = moments(chains[indices, step], step)
            following = chains[indices, step + 1]
            logprobs = logprobs + Model.get_logprob_norm(model, following, mean, std)
            entropies = entropies + Model.gaussian_entropy(model, std)
        old_logprobs = (logprobs.detach().sum((1, 2), keepdim=True) + normal(rows, 1, 1) * 0.3)[:, 0]
        loss, _ = policy_loss(
            task_type="embodied", loss_type="actor", logprob_type="chunk_level", reward_type="chunk_level",
            single_action_dim=dim, logprobs=logprobs.flatten(1),
            old_logprobs=old_logprobs.expand(-1, chunk * dim) / (chunk * dim), values=None, advantages=batch["advantages"],
            returns=None, prev_values=None, clip_ratio_low=0.2, clip_ratio_high=0.28, loss_mask=None, loss_mask_sum=None,
            max_episode_steps=None,
        )  # fmt: skip
        loss.backward()
        case = {
            "noise_method": method,
            "takes_one": takes_one,
            "weights": weights(network),
            "chains": chains,
            "logprobs": logprobs.detach(),
        }
        case |= {"entropies": entropies.detach(), "old_logprobs": old_logprobs, "loss": loss.detach()}
        results["cases"].append({**case, "gradients": gradients(network)})
    return results


def grpo() -> dict[str, Any]:
    """GRPO of episodes that end early: filtered groups, advantages, and the loss in which episodes count alike."""
    from rlinf.algorithms.registry import calculate_adv_and_returns, policy_loss
    from rlinf.workers.actor.embodied_fsdp_actor_worker import EmbodiedFSDPActor

    steps, slots, group_size = 5, 8, 4
    policy = mlp_policy(add_value_head=True, add_q_head=False)
    ends = torch.tensor([2, 4, 9, 3, 1, 9, 9, 5])  # a slot's episode ends with this decision; 9: not at all
    terminations = torch.arange(steps)[:, None] == ends - 1
    rewards = uniform(steps, slots)
    batch = {"states": normal(steps, slots, 3), "action": normal(steps, slots, 2)}
    batch["old_logprobs"] = normal(steps, slots, 2) * 0.25 - 2
    results: dict[str, Any] = {
        "weights": weights(policy), "batch": batch, "rewards": rewards, "terminations": terminations,
        "group_size": group_size, "cases": [],
    }  # fmt: skip
    for bounds in (None, (1.7, 9.0), (0.0, 1.7), (0.0, 0.1)):
        lower, upper = bounds or (0.0, 0.0)
        cfg = Cfg(
            env={"train": {"rollout_epoch": 1, "auto_reset": False, "ignore_terminations": False}},
            algorithm={
                "reward_type": "action_level",
                "filter_rewards": bounds is not None,
                "group_size": group_size,
                "rewards_lower_bound": lower,
                "rewards_upper_bound": upper,
            },
        )
        dones = torch.cat([torch.zeros(1, slots, dtype=torch.bool), terminations])[..., None]
        rollout = EmbodiedFSDPActor._process_received_rollout_batch(
            SimpleNamespace(cfg=cfg), {"rewards": rewards[..., None], "dones": dones}
        )
        found = calculate_adv_and_returns(
            task_type="embodied",
            adv_type="grpo",
            rewards=rollout["rewards"],
            dones=rollout["dones"],
            loss_mask=rollout["loss_mask"],
            loss_mask_sum=rollout["loss_mask_sum"],
            group_size=group_size,
            reward_type="action_level",
        )
        flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        outputs = policy.default_forward({"states": flat["states"], "action": flat["action"]}, compute_values=False)
        losses = {}
        for name, length in (("token-mean", None), ("seq-mean-token-mean", steps)):
            loss, _ = policy_loss(
                task_type="embodied",
                loss_type="actor",
                logprob_type="chunk_level",
                reward_type="chunk_level",
                single_action_dim=2,
                logprobs=outputs["logprobs"],
                old_logprobs=flat["old_logprobs"],
                advantages=found["advantages"].flatten(0, 1),
                clip_ratio_low=0.2,
                clip_ratio_high=0.28,
                loss_mask=rollout["loss_mask"].flatten(0, 1),
                loss_mask_sum=rollout["loss_mask_sum"].flatten(0, 1),
                max_episode_steps=length,
            )
            if loss.requires_grad:
                loss.backward(retain_graph=True)
            losses[name] = {"loss": loss.detach(), "gradients": gradients(policy)}
        results["cases"].append(
            {
                "bounds": bounds,
                "mask": rollout["loss_mask"][..., 0],
                "advantages": found["advantages"][..., 0],
                "losses": losses,
            }
        )
    return results


# -- embodied, off-policy ---------------------------------------------------------------------------------------------


def off_policy(name: str) -> dict[str, Any]:
    """Losses of SAC's or CrossQ's critics, actor and temperature, and their gradients. The noise of the Gaussian is fixed."""
    from rlinf.models.embodiment.modules.entropy_tunning import EntropyTemperature
    from rlinf.workers.actor.fsdp_sac_policy_worker import EmbodiedSACFSDPPolicy as Worker

    rows = 6
    options = {"add_value_head": False, "add_q_head": True, "q_head_type": "crossq" if name == "crossq" else "default"}
    model, target = mlp_policy(**options), mlp_policy(**options)
    batch = {
        "obs": normal(rows, 3),
        "actions": uniform(rows, 2) * 2 - 1,
        "rewards": normal(rows),
        "next_obs": normal(rows, 3),
        "terminations": torch.arange(rows) % 3 == 1,
    }
    noise = normal(2, rows, 2)
    results: dict[str, Any] = {
        "weights": weights(model), "batch": batch, "noise": noise, "gamma": 0.9, "alpha": 0.3, "target_entropy": -2.0,
    }  # fmt: skip
    if name == "sac":
        results["target_weights"] = {key: value for key, value in weights(target).items() if key.startswith("q_head")}
    data = {
        "curr_obs": {"states": batch["obs"]},
        "next_obs": {"states": batch["next_obs"]},
        "actions": batch["actions"],
        "rewards": batch["rewards"][:, None],
        "terminations": batch["terminations"][:, None],
    }
    temperature = EntropyTemperature(0.3, alpha_type="exp")

    def with_noise(index: int, function: Any) -> Any:
        """Runs RLinf's code with one draw of the policy's Gaussian fixed."""
        original = torch.distributions.Normal.rsample
        torch.distributions.Normal.rsample = lambda self, shape=(): self.loc + self.scale * noise[index]
        try:
            return function()
        finally:
            torch.distributions.Normal.rsample = original

    for kind in ("standard", "always"):
        algorithm = {"gamma": 0.9, "bootstrap_type": kind, "q_head_type": options["q_head_type"]}
        cfg = Cfg(algorithm=algorithm, actor={"model": {"model_type": "mlp_policy"}})
        worker = SimpleNamespace(
            cfg=cfg, model=model, target_model=target, entropy_temp=temperature, torch_dtype=torch.float32,
            critic_subsample_size=-1, use_dsrl=False, device=torch.device("cpu"), target_entropy=-2.0,
        )  # fmt: skip
        initial = {key: value.clone() for key, value in model.state_dict().items()}
        critic_loss, _ = with_noise(0, lambda worker=worker: Worker.forward_critic(worker, data))
        critic_loss.backward()
        critic_gradients = {key: value for key, value in gradients(model).items() if key.startswith("q_head")}
        model.load_state_dict(initial)  # the running statistics
        results[kind] = {"critic_loss": critic_loss.detach(), "critic_gradients": critic_gradients}
    actor_loss, entropy, _ = with_noise(1, lambda: Worker.forward_actor(worker, data))
    actor_loss.backward()
    results["actor_loss"], results["entropy"] = actor_loss.detach(), entropy.detach()
    results["actor_gradients"] = {k: v for k, v in gradients(model).items() if not k.startswith("q_head")}
    alpha_loss = with_noise(1, lambda: Worker.forward_alpha(worker, data))
    alpha_loss.backward()
    results["alpha_gradient"] = temperature.base_alpha.grad
    worker.entropy_temp = EntropyTemperature(0.3, alpha_type="softplus")
    with_noise(1, lambda: Worker.forward_alpha(worker, data)).backward()
    results["softplus_gradient"] = worker.entropy_temp.base_alpha.grad
    return results


# -- optimizer --------------------------------------------------------------------------------------------------------


def optimizer() -> dict[str, Any]:
    """Steps with a learning rate of the value head, and with a critic warm-up."""
    from rlinf.hybrid_engines.fsdp.fsdp_model_manager import FSDPModelManager as Manager

    results: dict[str, Any] = {"cases": []}
    for warmup in (0, 2):
        torch.manual_seed(1)
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "value_head": nn.Linear(2, 1)})
        optim = Cfg(
            lr=1e-2, value_lr=3e-2, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, weight_decay=0.01, clip_grad=1e9
        )

        class Fake(SimpleNamespace):
            build_optimizer = Manager.build_optimizer
            build_lr_scheduler = Manager.build_lr_scheduler

        manager = Fake(
            _cfg=Cfg(optim=dict(optim), fsdp_config={}), _logger=SimpleNamespace(info=lambda *a: None), model=model,
            store_requires_grad_param_name=[], optimizer_steps=0, critic_warmup_steps=warmup,
            grad_scaler=torch.amp.GradScaler("cpu", enabled=False),
            _strategy=SimpleNamespace(clip_grad_norm_=lambda model: torch.zeros(())),
        )  # fmt: skip
        manager.optimizer = manager.build_optimizer(model, enable_critic_warmup=warmup > 0)
        case: dict[str, Any] = {"critic_warmup_steps": warmup, "weights": weights(model), "gradients": [], "steps": []}
        for _ in range(4):
            given = {name: normal(*p.shape) for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.grad = given[name].clone() if parameter.requires_grad else None
            Manager.optimizer_step(manager)
            manager.optimizer.zero_grad()
            case["gradients"].append(given)
            case["steps"].append(weights(model))
        results["cases"].append(case)
    return {**results, "optim": dict(optim)}


def schedule() -> dict[str, Any]:
    """Learning rates of the cosine schedule with a lowest rate, given as a rate, and as `min_lr`."""
    from rlinf.hybrid_engines.fsdp.utils import get_lr_scheduler

    results: dict[str, Any] = {"lr": 2e-4, "total": 10, "cases": []}
    for options in ({"min_lr_rate": 0.1}, {"min_lr": 2e-5}):
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 2e-4}]
        adam = torch.optim.AdamW(
            groups
        )  # as RLinf builds it: groups have learning rates, the optimizer has torch's default
        scheduler = get_lr_scheduler("cosine", adam, num_warmup_steps=0, num_training_steps=10, **options)
        rates = []
        for _ in range(10):
            rates.append(adam.param_groups[0]["lr"])
            adam.step()
            scheduler.step()
        results["cases"].append({**options, "rates": rates})
    return results


# -- language models --------------------------------------------------------------------------------------------------


def language() -> dict[str, Any]:
    """Advantages by group, and the loss of two micro-batches of different length."""
    from rlinf.algorithms.registry import calculate_adv_and_returns, policy_loss
    from rlinf.algorithms.utils import kl_penalty
    from rlinf.utils.utils import get_loss_agg_func

    rows, width, group_size = 8, 6, 4
    lengths = torch.tensor([6, 2, 4, 5, 1, 3, 6, 2])
    mask = torch.arange(width) < lengths[:, None]
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.0, 0.75])
    advantages, _ = calculate_adv_and_returns(
        task_type="reasoning", adv_type="grpo", rewards=rewards, loss_mask=mask, group_size=group_size
    )
    batch = {
        "old_logprobs": normal(rows, width) * 0.25 - 2,
        "logprobs": normal(rows, width) * 0.25 - 2,
        "ref_logprobs": normal(rows, width) * 0.25 - 2,
    }
    results: dict[str, Any] = {
        "batch": batch, "lengths": lengths, "rewards": rewards, "group_size": group_size, "advantages": advantages,
        "losses": {},
    }  # fmt: skip
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        logprobs = batch["logprobs"].clone().requires_grad_()
        aggregate = get_loss_agg_func(aggregation)
        common = {"task_type": "reasoning", "loss_type": "actor", "loss_agg_func": aggregate}
        limits = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
        loss, metrics = policy_loss(
            **common,
            **limits,
            logprobs=logprobs,
            old_logprobs=batch["old_logprobs"],
            advantages=advantages,
            loss_mask=mask,
        )
        loss = loss + 0.1 * aggregate(kl_penalty(logprobs, batch["ref_logprobs"], "low_var_kl"), mask)
        loss.backward()
        results["losses"][aggregation] = {"loss": loss.detach(), "gradient": logprobs.grad}
        results["ratio"] = metrics["actor/ratio"]
    # `use_valid_token_scale`: the worker multiplies the mean over each micro-batch by its fraction of all trained tokens
    # (workers/actor/megatron_actor_worker.py, whose loop divides by the number of micro-batches and ranks again).
    logprobs = batch["logprobs"].clone().requires_grad_()
    scaled_loss = torch.zeros(())
    for part in (slice(0, 4), slice(4, 8)):
        loss, _ = policy_loss(
            **{**common, "loss_agg_func": get_loss_agg_func("token-mean")}, **limits, logprobs=logprobs[part],
            old_logprobs=batch["old_logprobs"][part], advantages=advantages[part], loss_mask=mask[part],
        )  # fmt: skip
        scaled_loss = scaled_loss + loss * (mask[part].sum() / mask.sum()).item()
    scaled_loss.backward()
    results["valid_token_scale"] = {"loss": scaled_loss.detach(), "gradient": logprobs.grad}
    return results


def turns() -> dict[str, Any]:
    """Advantages of agents' turns (`grpo_dynamic`), and the weights of their tokens (`loss_scales`)."""
    from rlinf.algorithms.registry import calculate_adv_and_returns, get_loss_scales

    # Two questions with two episodes each; an episode has one or several turns, of one or two agents.
    trajectory = [0, 0, 1, 2, 2, 2, 3, 3]
    agent = [0, 0, 0, 0, 1, 1, 0, 0]
    lengths = torch.tensor([2, 3, 1, 4, 2, 3, 1, 2])
    mask = torch.arange(4) < lengths[:, None]
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25])
    results: dict[str, Any] = {
        "episode": trajectory, "agent": agent, "lengths": lengths, "rewards": rewards, "group_size": 2, "advantages": {},
    }  # fmt: skip
    for mode in ("trajectory", "turn"):
        advantages, _ = calculate_adv_and_returns(
            task_type="reasoning", adv_type="grpo_dynamic", rewards=rewards[trajectory], loss_mask=mask, group_size=2,
            idx_to_traj=trajectory, advantage_mode=mode, num_sequence=len(trajectory),
        )  # fmt: skip
        results["advantages"][mode] = advantages[:, 0]
    context: dict[str, Any] = defaultdict(list, data_parallel_world_size=1, actor_global_batch_size=4)
    batch = {
        "idx_to_traj": trajectory, "extra:idx_to_sub_traj": torch.tensor(agent), "response_mask": mask,
        "advantages": mask.float(), "loss_scales": mask.float(),
    }  # fmt: skip
    for scale in get_loss_scales(["group_level", "agent_level", "turn_level"]):
        batch = scale(context, batch)
    results["token_scales"] = batch["advantages"] * batch["loss_scales"]
    return results


def early_stop() -> dict[str, Any]:
    """Loss of a micro-batch of Megatron's actor, and its gradient, by `early_stop_imp_ratio`."""
    from rlinf.workers.actor import megatron_actor_worker as module

    rows, length = 4, 5
    batch = {
        "recomputed_logprobs": normal(rows, length) * 0.25 - 2,
        "advantages": normal(rows, length),
        "response_mask": torch.arange(length) < torch.tensor([[5], [3], [1], [4]]),
    }
    logprobs = normal(rows, length) * 0.5 - 1.5
    results: dict[str, Any] = {**batch, "logprobs": logprobs, "cases": []}
    padding = torch.zeros(rows, 1)
    ids = torch.zeros(rows, length + 1, dtype=torch.long)
    module.parallel_state = SimpleNamespace(get_data_parallel_group=lambda: None)
    module.average_losses_across_data_parallel_group = lambda losses: losses[0]
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.distributed, "all_reduce", lambda *args, **kwargs: None),
    ):
        for limit in (None, 1.2, 5.0):
            trained = logprobs.clone().requires_grad_()
            algorithm = {
                "early_stop_imp_ratio": limit, "loss_type": "actor", "use_valid_token_scale": False,
                "sampling_params": {"temperature": 1.0},
            }  # fmt: skip
            actor = SimpleNamespace(
                cfg=Cfg(algorithm=algorithm, runner={"task_type": "reasoning"}),
                variable_seq_lengths=True, response_len=length, return_loss=True, calculate_entropy=False,
                calculate_entropy_loss=False, kl_beta=0.0, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=None,
                loss_agg_func=get_masked_mean(), transformer_config=SimpleNamespace(sequence_parallel=False),
                log_warning=lambda text: None,
                custom_forward=lambda *args, trained=trained, **kwargs: {"log_probs": torch.cat([trained, padding], 1)},
            )  # fmt: skip
            tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool(), "position_ids": ids}
            forward = module.MegatronActor.get_forward_step_func(actor)
            output, compute_loss = forward(iter([{**tokens, **batch}]), None)
            loss, metrics = compute_loss(output)
            loss.backward()
            case = {"limit": limit, "ratio": metrics["actor/ratio"], "loss": loss.detach(), "gradient": trained.grad}
            results["cases"].append(case)
    return results


def get_masked_mean() -> Any:
    """Returns RLinf's aggregation `token-mean`."""
    from rlinf.utils.utils import get_loss_agg_func

    return get_loss_agg_func("token-mean")


def weight_sync() -> dict[str, Any]:
    """Numbers of updates of the weights that RLinf's runners send, in the order of the run, by `weight_sync_interval`."""
    from rlinf.runners import async_embodied_runner, embodied_runner

    runners = {"sync": embodied_runner.EmbodiedRunner, "async": async_embodied_runner.AsyncEmbodiedRunner}
    results: dict[str, Any] = {"steps": 7, "cases": []}
    for name, runner_class in runners.items():
        for interval in (1, 2, 3):
            sent: list[int] = []
            runner = mock.MagicMock(global_step=0, max_steps=7, weight_sync_interval=interval)
            runner.cfg.runner = Cfg(val_check_interval=-1, save_interval=-1)
            runner._should_profile_step.return_value = False
            runner.use_training_pipeline = False
            runner.update_rollout_weights = lambda runner=runner, sent=sent, **_: sent.append(runner.global_step)
            runner.actor.run_training.return_value.wait.return_value = [{"loss": 0.0}]
            runner.actor.run_training.return_value.consume_durations.return_value = ({}, [])
            runner.get_env_metrics.return_value = ({}, [], [])
            runner.get_rollout_metrics.return_value = ({}, [])
            runner_class.run(runner)
            results["cases"].append({"runner": name, "interval": interval, "sent": sent})
    return results


# -- sampling of action tokens ----------------------------------------------------------------------------------------


def sampling() -> dict[str, Any]:
    """Log-probs and entropies of action tokens with a temperature and `top_k`, in the training pass of OpenVLA-OFT."""
    import rlinf.models.embodiment.openvla_oft.rlinf.openvla_oft_action_model as module

    rows, tokens, bins, vocabulary = 2, 2, 256, 260
    stop = 2
    module.STOP_INDEX = stop
    base = (torch.randn(rows, tokens, bins) * 10).round() / 10 + torch.arange(bins) * 1e-3  # no ties
    results: dict[str, Any] = {"logits": base, "cases": []}
    for temperature, top_k in ((1.0, 0), (1.6, 0), (0.5, 1_000_000), (1.6, 4)):
        logits = torch.full((rows, tokens + 2, vocabulary), -50.0)
        logits[:, :tokens, :bins] = base
        # RLinf cuts to `top_k` before it excludes the other words; with unlikely others, that is the same.
        chosen = base.topk(3, -1).indices[..., 1]
        ids = torch.tensor([[1, 29871, *[5] * tokens, stop]] * rows)
        model = SimpleNamespace(
            action_dim=tokens, num_action_chunks=1, vocab_size=bins, config=SimpleNamespace(n_action_bins=bins),
            preprocess_for_train=lambda data: data,
            _prepare_input_for_action_prediction=lambda input_ids, mask, ids=ids: (ids, torch.ones_like(ids)),
            _build_embedding=lambda input_ids, mask, pixels, ids=ids: (None, torch.ones_like(ids)),
            language_model=lambda logits=logits, **kwargs: SimpleNamespace(
                logits=torch.cat([torch.zeros(rows, 1, vocabulary), logits[:, :tokens], logits[:, -1:]], 1)
            ),
        )  # fmt: skip
        outputs = module.OpenVLAOFTForRLActionPrediction.default_forward(
            model,
            forward_inputs={
                "input_ids": torch.tensor([[1, 29871]] * rows), "attention_mask": torch.ones(rows, 2),
                "pixel_values": None, "action_tokens": chosen,
            },
            compute_logprobs=True, compute_entropy=True, temperature=temperature, top_k=top_k,
        )  # fmt: skip
        results["cases"].append(
            {
                "temperature": temperature, "top_k": top_k, "bins": chosen, "logprobs": outputs["logprobs"],
                "entropy": outputs["entropy"],
            }
        )  # fmt: skip
    return results


def aloha() -> dict[str, Any]:
    """Joint spaces of two ALOHA arms (openpi's `adapt_to_pi`): states, executed actions, and actions to learn from."""
    give_openpi_names()
    from rlinf.models.embodiment.openpi.policies import aloha_policy as policy

    rows = np.random.default_rng(0).uniform(0, 1, (3, 14))
    return {
        "rows": rows.tolist(),
        "states": [policy._decode_state(row.copy(), adapt_to_pi=True).tolist() for row in rows],
        "executed": policy._encode_actions(rows.copy(), adapt_to_pi=True).tolist(),
        "learned": policy._encode_actions_inv(rows.copy(), adapt_to_pi=True).tolist(),
    }


def plain(value: Any) -> Any:
    """Returns nested dicts and lists of numbers; numbers are the shortest that give the same float32."""
    if isinstance(value, Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, dict):
        return {str(key): plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="source tree of RLinf")
    parser.add_argument("--commit", required=True, help="commit of the source tree")
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(arguments.folder))
    sys.meta_path.insert(0, _Finder())
    import rlinf.algorithms  # noqa: F401 (registers the formulas)

    records = {
        "gae": gae, "ppo": ppo, "asynchronous": asynchronous, "grpo": grpo, "sac": lambda: off_policy("sac"),
        "crossq": lambda: off_policy("crossq"), "optimizer": optimizer, "schedule": schedule, "language": language,
        "turns": turns, "sampling": sampling, "flow": flow, "early_stop": early_stop,
        "weight_sync": weight_sync, "aloha": aloha,
    }  # fmt: skip
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, record in records.items():
        torch.manual_seed(0)
        numbers = {"commit": arguments.commit, **plain(record())}
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(numbers, separators=(",", ":")) + "\n")
        print(f"wrote {path} ({path.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
