"""Flat parameters: a module whose trainable weights and gradients are views of two buffers, for one all-reduce per step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.algorithms.nonfinite import bad_tensors, skips_step
from rlhpc.runtime.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rlhpc.config.sections import OptimConfig, ScheduledOptimConfig
    from rlhpc.training.loss_scale import LossScaler


NAMES = ("adam", "adamw")
#: Maximum number of elements per fused kernel, well within the range of a 32-bit index.
_MAX_KERNEL_ELEMENTS = 1 << 30


@dataclass(frozen=True)
class AdamOptions:
    """Section `actor.optim`, in the form the optimizers need.

    Attributes:
        name: One of `NAMES`; weight decay is coupled in adam and decoupled in adamw.
        clip_grad: Largest gradient norm; 0 turns clipping off.
        value_lr: Learning rate of the value parameters (`Blueprint.is_value`); None for `lr`.
        critic_warmup_steps: Number of first optimizer steps that update the value parameters alone.
    """

    name: str
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_grad: float
    value_lr: float | None = None
    critic_warmup_steps: int = 0

    @classmethod
    def from_config(cls, optim: OptimConfig) -> AdamOptions:
        """Returns the options of the section.

        Raises:
            ConfigError: The optimizer's name is unknown.
        """
        name = optim.name
        if name not in NAMES:
            raise ConfigError(f"actor.optim.name is {optim.name!r}; choose from {', '.join(NAMES)}")
        return cls(
            name,
            lr=optim.lr,
            beta1=optim.adam_beta1,
            beta2=optim.adam_beta2,
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
            clip_grad=0.0 if optim.clip_grad is None else optim.clip_grad,
            value_lr=getattr(optim, "value_lr", None),
            critic_warmup_steps=getattr(optim, "critic_warmup_steps", 0),
        )

    @property
    def separates_values(self) -> bool:
        """True if value parameters are updated differently from the policy's."""
        return self.value_lr is not None or self.critic_warmup_steps > 0

    def group_lrs(self, lr: float) -> tuple[float, float]:
        """Returns the learning rates of policy and value parameters while the schedule's learning rate is `lr`. The schedule
        multiplies both by the same factor.
        """
        return lr, lr if self.value_lr is None else self.value_lr * (lr / self.lr)

    def torch_optimizer(self, parameters: list[torch.nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Builds torch's fused optimizer over parameters or parameter groups. The other variants need temporary tensors as
        large as the trained weights.
        """
        optimizer_class = torch.optim.AdamW if self.name == "adamw" else torch.optim.Adam
        return optimizer_class(parameters, **self.torch_options(), fused=True)

    def torch_options(self) -> dict[str, Any]:
        """Returns the options by torch's names."""
        betas = self.beta1, self.beta2
        return {"lr": self.lr, "betas": betas, "eps": self.eps, "weight_decay": self.weight_decay}


def remaining_fraction(schedule: str, progress: float) -> float:
    """Returns the fraction of a schedule's decay that remains after a fraction of the run.

    Args:
        schedule: `constant`, `linear` or `cosine`.
        progress: Fraction of the run.
    """
    fractions = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return fractions[schedule]


def decay_factor(optim: OptimConfig, fraction: float) -> float:
    """Returns the factor by which a schedule multiplies learning rates: 1 for a fraction of 1, `min_lr / lr` for 0, linear in
    between.
    """
    return fraction + optim.min_lr / optim.lr * (1.0 - fraction)


def schedule_factor(
    optim: ScheduledOptimConfig, num_steps: int, progress: float, *, is_annealed: bool = False
) -> float:
    """Returns the factor by which the schedule of an optimizer's section multiplies the next step's learning rates.

    Args:
        optim: The optimizer's section.
        num_steps: Number of completed steps.
        progress: Completed fraction of the run.
        is_annealed: `algorithm.anneal_lr`.
    """
    warmup = optim.lr_warmup_steps
    if num_steps < warmup:
        return (num_steps + 1) / (warmup + 1)
    if warmup or optim.lr_decay_steps:
        end = optim.lr_decay_steps or (round(num_steps / progress) if progress else 1)
        progress = min(1.0, (num_steps - warmup) / max(end - warmup, 1))
    return decay_factor(optim, remaining_fraction("linear" if is_annealed else optim.lr_scheduler, progress))


class FlatAdam:
    """Adam (Kingma & Ba 2015) with torch's conventions: eps outside the root, weight decay coupled or decoupled (AdamW).

    On an accelerator a step is torch's fused kernel, which reads and writes each element once and needs no temporary tensor.
    On the CPU a step is five operations, and one needs a tensor as large as the parameter. The results differ by rounding.

    Args:
        parameter, gradient: Flat tensors of the same size; the parameter is updated in place.
        options: The optimizer's options.
        num_policy: Number of elements before the value parameters; None if all elements have the same options.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        options: AdamOptions,
        num_policy: int | None = None,
    ) -> None:
        self.options, self.lr = options, options.lr
        self.parameter, self.gradient = parameter, gradient
        self.steps, self._num_policy = 0, num_policy
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @property
    def warms_critic(self) -> bool:
        """True if the next step updates the value parameters alone."""
        return self._num_policy is not None and self.steps < self.options.critic_warmup_steps

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Updates the parameter from the gradient. A given learning rate replaces the current one."""
        if lr is not None:
            self.lr = lr
        self.steps += 1
        if self._num_policy is None:
            self._update_elements(slice(None), self.lr, self.steps)
            return
        policy_lr, value_lr = self.options.group_lrs(self.lr)
        policy_steps = self.steps - self.options.critic_warmup_steps
        if policy_steps > 0:
            self._update_elements(slice(self._num_policy), policy_lr, policy_steps)
        self._update_elements(slice(self._num_policy, None), value_lr, self.steps)

    def drop_policy_gradient(self) -> None:
        """Sets the gradient of all elements but the value parameters to 0, while the critic warms up."""
        if self.warms_critic:
            self.gradient[: self._num_policy].zero_()

    def _update_elements(self, part: slice, lr: float, num_steps: int) -> None:
        """Updates a part of the elements, for which this is step number `num_steps`."""
        flat_tensors = (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)
        parameter, gradient, exp_avg, exp_avg_sq = (flat_tensor[part] for flat_tensor in flat_tensors)
        if self.fuses:
            self._fused_update((parameter, gradient, exp_avg, exp_avg_sq), lr, num_steps)
            return
        beta1, beta2 = self.options.beta1, self.options.beta2
        if self.options.weight_decay and self.options.name == "adamw":
            parameter.mul_(1 - lr * self.options.weight_decay)
        elif self.options.weight_decay:
            gradient = gradient.add(parameter, alpha=self.options.weight_decay)
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = 1 - beta1**num_steps, 1 - beta2**num_steps
        denominator = exp_avg_sq.sqrt().mul_(correction2**-0.5).add_(self.options.eps)
        parameter.addcdiv_(exp_avg, denominator, value=-lr / correction1)

    def resume_at(self, num_steps: int) -> None:
        """Sets the number of steps taken, after the averages have been restored."""
        self.steps = num_steps

    @property
    def fuses(self) -> bool:
        """True if a step is one fused kernel."""
        return self.parameter.device.type != "cpu"

    def _fused_update(self, flat_tensors: tuple[torch.Tensor, ...], lr: float, num_steps: int) -> None:
        fused_kernel = torch._fused_adamw_ if self.options.name == "adamw" else torch._fused_adam_
        parameters, gradients, exp_avgs, exp_avg_sqs = (
            list(flat_tensor.split(_MAX_KERNEL_ELEMENTS)) for flat_tensor in flat_tensors
        )
        step_count = torch.full((), float(num_steps), device=self.parameter.device)
        fused_kernel(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step_count] * len(parameters),
            lr=lr,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            weight_decay=self.options.weight_decay,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
        )


Reduce = Callable[[torch.Tensor], torch.Tensor]


class FlatModule:
    """Module and optimizer with flat buffers of weights and gradients, replicated on every rank.

    Losses are sums over a rank's part divided by the *global* count, so the ranks' gradients add up to the gradient of
    the whole minibatch, whatever the split. Once wrapped, the module must not be moved.

    Args:
        module: The module, already on its device.
        options: Options of the optimizer.
        reduce: Sums a tensor over the group, in place.
        num_ranks: World size of the group.
        reads_norm: Read each gradient norm before the update, even if that means waiting for the device.
        dtype: Dtype of the computation; None for the dtype of the weights (float32). With a different dtype, the module gets
            copies of the weights, and each micro-batch's gradient is added to the flat buffer as soon as it is computed.
        is_included: Selects the trainable parameters by name; None selects all.
        is_value: Selects the value parameters by name, if the options separate them. They come last in the flat buffers.
        scaler: Loss scale, by which gradients are divided; each gradient norm is then read before the update.

    Raises:
        ConfigError: There is no trainable parameter, or they differ in device or dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        options: AdamOptions,
        reduce: Reduce = lambda t: t,
        num_ranks: int = 1,
        *,
        reads_norm: bool = False,
        dtype: torch.dtype | None = None,
        is_included: Callable[[str], bool] | None = None,
        is_value: Callable[[str], bool] | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        self.module, self.base_lr, self.clip_grad = module, options.lr, options.clip_grad
        self._reduce, self._ranks, self._reads_norm = reduce, num_ranks, reads_norm or scaler is not None
        self._scaler = scaler
        trained_parameters = [
            (name, p)
            for name, p in module.named_parameters()
            if p.requires_grad and (is_included is None or is_included(name))
        ]
        num_policy: int | None = None
        if is_value is not None and options.separates_values:
            trained_parameters.sort(key=lambda name_and_parameter: is_value(name_and_parameter[0]))  # stable
            num_policy = sum(p.numel() for name, p in trained_parameters if not is_value(name))
        self.names, self._parameters = [name for name, _ in trained_parameters], [p for _, p in trained_parameters]
        if not trained_parameters:
            raise ConfigError("actor.model has no trainable parameters")
        if len({(p.dtype, p.device) for p in self._parameters}) != 1:
            raise ConfigError("actor.training_backend=local needs all trainable parameters on one device, in one dtype")
        self._sizes, self._shapes = [p.numel() for p in self._parameters], [p.shape for p in self._parameters]
        self._weights = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._gradients = torch.zeros_like(self._weights)
        self._compute = self._weights if dtype in (None, self._weights.dtype) else self._weights.to(dtype)
        self._attach()
        if self.mixed:
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(self._adder(index))
        self.optimizer = FlatAdam(self._weights, self._gradients, options, num_policy)

    @property
    def mixed(self) -> bool:
        """True if the module computes with copies of the weights."""
        return self._compute is not self._weights

    def _attach(self) -> None:
        """Makes parameters and gradients views of the flat buffers."""
        self._grad_views = self.split(self._gradients)
        views = zip(self._parameters, self.split(self._compute), self._grad_views, strict=True)
        for parameter, weight, gradient in views:
            parameter.grad = None  # torch would refuse new data while a gradient of the old data is attached
            parameter.data = weight
            if not self.mixed:
                parameter.grad = gradient

    def _adder(self, index: int) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._grad_views[index].add_(parameter.grad)
            parameter.grad = None

        return add

    def split(self, flat_tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a flat tensor in the parameters' shapes."""
        return [piece.view(shape) for piece, shape in zip(flat_tensor.split(self._sizes), self._shapes, strict=True)]

    @property
    def weights(self) -> torch.Tensor:
        """All trainable parameters as one flat view."""
        return self._weights

    @property
    def gradients(self) -> torch.Tensor:
        """All gradients as one flat view."""
        return self._gradients

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Returns views of the optimizer's weights, by parameter name."""
        return dict(zip(self.names, self.split(self._weights), strict=True))

    def zero_grad(self) -> None:
        """Clears the gradients."""
        self._gradients.zero_()

    @torch.no_grad()
    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Sums the gradients over the ranks, clips them and updates the weights, unless `is_step_skipped(norm)`.

        Returns:
            The global gradient norm before clipping, as a tensor: on the host with `reads_norm`, on the device otherwise
            (reading it would wait for the device).
        """
        norm = self.gradient_norm()
        returned_norm = norm.cpu() if self._reads_norm else norm
        if not self.is_step_skipped(returned_norm):
            self.step(norm, lr)
        return returned_norm

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Sums the gradients over the ranks and returns their norm. Gradients of parameters that the next step does not
        update are 0.
        """
        if self._ranks > 1:
            self._reduce(self._gradients)
        if self._scaler is not None:
            self._scaler.unscale([self._gradients])
        self.optimizer.drop_policy_gradient()
        return torch.linalg.vector_norm(self._gradients)

    @torch.no_grad()
    def step(self, norm: torch.Tensor, lr: float) -> None:
        """Clips the gradients by their norm and updates the weights."""
        if self.clip_grad > 0:
            self._gradients.mul_((self.clip_grad / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step(lr)
        self._update_copies()

    @torch.no_grad()
    def _update_copies(self) -> None:
        if self.mixed:
            self._compute.copy_(self._weights)

    def is_step_skipped(self, norm: torch.Tensor) -> bool:
        """Returns whether a step was skipped because its gradient norm, which `optimizer_step` returned, is not finite. Of a
        norm on an accelerator, it returns False, and the caller reads the norms at the end of its update, before weights are
        sent.
        """
        return skips_step(norm)

    def bad_gradients(self) -> list[str]:
        """Returns the parameters whose gradient, summed over the ranks, is not finite."""
        return bad_tensors(zip(self.names, self.split(self._gradients), strict=True))

    # -- state ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def replace(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the values of all trained weights, and keeps the optimizer's state."""
        for name, weight in self.named_weights().items():
            weight.copy_(tensors[name])
        self._update_copies()

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, by parameter name; tensors are views of it."""
        averages = zip(
            self.names, self.split(self.optimizer.exp_avg), self.split(self.optimizer.exp_avg_sq), strict=True
        )
        state = {name: {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq} for name, exp_avg, exp_avg_sq in averages}
        return {"optimizer": self.optimizer.options.name, "steps": self.optimizer.steps, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict`; also accepts the flat state of early language model checkpoints. Options
        such as the learning rate keep their configured values.

        Raises:
            CheckpointError: The state is from a model with other parameters.
        """
        averages = (("exp_avg", self.optimizer.exp_avg), ("exp_avg_sq", self.optimizer.exp_avg_sq))
        mismatch_error = CheckpointError(
            "actor.model: the checkpoint's optimizer belongs to a model with other parameters"
        )
        if "state" not in state:
            if any(state[moment].shape != flat_tensor.shape for moment, flat_tensor in averages):
                raise mismatch_error
            for moment, flat_tensor in averages:
                flat_tensor.copy_(state[moment])
        else:
            saved_state, shapes = state["state"], dict(zip(self.names, map(tuple, self._shapes), strict=True))
            if {name: tuple(moments["exp_avg"].shape) for name, moments in saved_state.items()} != shapes:
                raise mismatch_error
            for moment, flat_tensor in averages:
                flat_tensor.copy_(torch.cat([saved_state[name][moment].reshape(-1) for name in self.names]))
        self.optimizer.resume_at(int(state["steps"]))

    def state(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that cannot be recreated: weights and the optimizer's averages."""
        return self._weights, self.optimizer.exp_avg, self.optimizer.exp_avg_sq

    def scratch(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `renew` recreates: gradients and, in mixed precision, the copies of the weights."""
        return (self._gradients, self._compute) if self.mixed else (self._gradients,)

    def renew(self) -> None:
        """Recreates the tensors of `scratch` from `state`, with zero gradients."""
        self.zero_grad()
        self._update_copies()
