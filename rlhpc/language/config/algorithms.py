"""Sections `algorithm` of language runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    Choices,
    OptionsOf,
    Range,
    Registered,
)


@dataclass
class LanguageAlgorithmConfig:
    """Learning rate schedule."""

    anneal_lr: bool = False
    """Lowers the learning rate linearly to `actor.optim.min_lr` over the run."""


@dataclass
class DistillationConfig:
    """On-policy distillation (`algorithm.name: distillation`): the model learns from the distributions of section `teacher`
    on its own responses."""

    mode: Annotated[str, Choices("sampled", "topk", "full")] = "sampled"
    """Output of the teacher for each token: `sampled`, the token's log-prob, for a policy gradient; `topk`, the log-probs of
    its most likely tokens and of the sum of all others; `full`, its full distribution, which requires it on the actor's
    ranks."""
    topk: Annotated[int, COUNT] = 64
    """Number of tokens in mode topk."""
    beta: Annotated[float, FRACTION] = 1.0
    """Divergence in the modes topk and full: 1 is the reverse KL(model ‖ teacher), 0 the forward KL(teacher ‖ model), values
    in between are generalized Jensen-Shannon divergences."""
    coef: Annotated[float, POSITIVE] = 1.0
    """Weight of the distillation loss."""
    task_reward_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the advantages computed from the reward by `algorithm.adv_type`; with 0 the reward is only logged."""


@dataclass
class CorrectionConfig:
    """Correction for the gap between trainer and rollout engine: importance weights, or rejected tokens."""

    name: Annotated[str, Registered("rlhpc.algorithms.registry:CORRECTIONS")] = "token_tis"
    """Correction: token_tis, sequence_tis, sequence_mis, icepop, token_rejection, geometric (alias seq_mean_k1), k2 (alias
    seq_mean_k2), k3 (alias seq_mean_k3), binary_tv, a registered name, or `module:Class`."""
    kwargs: Annotated[dict[str, Any], OptionsOf("name", "rlhpc.algorithms.registry:CORRECTION_OPTIONS")] = field(
        default_factory=dict
    )
    """Options of the correction, such as its thresholds."""


@dataclass
class GrpoAlgorithmConfig(LanguageAlgorithmConfig):
    """Advantages, losses and the shape of a rollout."""

    name: Annotated[str, Registered("rlhpc.language.algorithms.registry:ALGORITHMS")] = "policy_gradient"
    """The algorithm: `policy_gradient` (to which the keys below belong), `distillation` (which also has
    `algorithm.distillation`), a registered name, or `module:Class`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the algorithm's constructor."""
    adv_type: Annotated[str, Registered("rlhpc.algorithms.registry:ADVANTAGES")] = "grpo"
    """Advantage estimator: grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, raw, gae (with a group `critic`, or
    `actor.model.value_head`), a registered name, or `module:function`."""
    loss_type: Annotated[str, Registered("rlhpc.algorithms.registry:POLICY_LOSSES")] = "ppo"
    """Policy loss: ppo (alias actor, actor_critic), gspo, cispo, decoupled_ppo, a registered name, or `module:function`."""
    loss_agg: Annotated[
        str, Choices("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ] = "token-mean"
    """Aggregation of token losses: token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum or
    seq-mean-token-sum-norm (Dr. GRPO: divided by the maximum number of tokens of an episode, `rollout.max_new_tokens` or, with
    an external agent, `agent.max_tokens`). A sequence consists of one role's tokens in an episode."""
    gamma: Annotated[float, FRACTION] = 1.0
    """Discount factor per token."""
    credit: Annotated[str, Choices("episode", "turn", "all_turns", "state")] = "episode"
    """Credit of a turn of an agent: `episode`, the reward of the whole episode; `turn`, the rewards from this turn on,
    compared with the same turn of the group's other episodes; `all_turns`, the same rewards, compared with all turns of the
    group, so that long episodes count more in mean and spread; `state`, as `episode`, plus a comparison with turns that had
    just read the same (GiGPO). All but `episode` require an estimator that compares within groups: grpo, dr_grpo, rloo."""
    turn_gamma: Annotated[float, FRACTION] = 1.0
    """Discount factor per turn, for `algorithm.credit`."""
    turn_coef: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the comparison with equal states, for `credit: state`."""
    gae_lambda: Annotated[float, FRACTION] = 1.0
    """λ of GAE, per token."""
    value_clip: Annotated[float | None, POSITIVE] = None
    """Clip range of the value loss; null turns clipping off."""
    huber_delta: Annotated[float | None, POSITIVE] = None
    """Error of a value up to which its loss is quadratic; it is linear beyond (Huber). null is quadratic everywhere."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of the value loss if the values come from the model's value head (`actor.model.value_head`)."""
    normalize_advantages: Annotated[str, Choices("auto", "batch", "none")] = "auto"
    """Normalization of advantages: `batch` (over all ranks) or `none`; `auto` is batch for gae, and none for the other
    estimators, which compare within groups."""
    clip_ratio_low: Annotated[float, PART] = 0.2
    """ε of PPO's lower clip bound 1 − ε."""
    clip_ratio_high: Annotated[float, NOT_NEGATIVE] = 0.2
    """ε of PPO's upper clip bound 1 + ε."""
    clip_ratio_c: Annotated[float | None, Range(1, above=True)] = None
    """c of dual-clip PPO (> 1); null turns it off."""
    early_stop_imp_ratio: Annotated[float | None, Range(1, above=True)] = None
    """Leaves out the optimizer step of a minibatch whose mean importance ratio (new policy over old) exceeds this; the later
    minibatches of the step are tried. null is off. Not with `training_backend: deepspeed`."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy bonus."""
    update_epochs: Annotated[int, COUNT] = 1
    """Number of passes over each rollout."""
    group_size: Annotated[int, COUNT] = 8
    """Number of responses to each prompt."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the KL divergence from the reference policy; with 0 there is no reference."""
    kl_type: Annotated[str, Choices("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl")] = "k3"
    """Estimator of this KL divergence: k1, k2, k3 or abs. In the loss, k2 has the gradient of the KL, k3 and abs have a
    similar one, and k1 has none and is rejected."""
    kl_in: Annotated[str, Choices("loss", "reward")] = "loss"
    """Where the KL penalty is added: `loss`, or `reward` (per token)."""
    recompute_logprobs: bool = False
    """Whether the trainer computes the old log-probs; otherwise the rollout engine's are used."""
    tis_cap: Annotated[float | None, POSITIVE] = None
    """Cap of the truncated importance weight between trainer and rollout engine (with `decoupled_ppo`, between the policy
    before the update and the policy that sampled); null turns it off. It is the correction `token_tis`."""
    corrections: list[CorrectionConfig] = field(default_factory=list)
    """Corrections for the gap between trainer and rollout engine, which are combined: at most one that weighs tokens, and any
    that reject them. All but `binary_tv` compare the engine's log-probs with recomputed ones
    (`algorithm.recompute_logprobs`)."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: groups whose rewards, without penalties on length, are all equal are dropped and refilled."""
    max_refills: Annotated[int, NOT_NEGATIVE] = 4
    """Maximum number of refill rounds in a step; then the step continues with the groups that it has."""
    overlong_buffer: Annotated[int, NOT_NEGATIVE] = 0
    """DAPO's soft length penalty: number of tokens before `rollout.max_new_tokens` at which it begins; 0 turns it off."""
    overlong_filter: bool = False
    """Whether responses truncated at the length limit are excluded from training and from their group's mean and spread. The
    other responses get the advantages that they would have without the truncated ones."""
    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of versions by which the policy that sampled a token may lag behind the trained policy; 0 is
    synchronous."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """On-policy distillation (`algorithm.name: distillation`)."""


@dataclass
class DpoAlgorithmConfig(LanguageAlgorithmConfig):
    """Loss of DPO."""

    loss_type: Annotated[str, Choices("sigmoid", "ipo")] = "sigmoid"
    """Loss: sigmoid (DPO: −log σ of the difference of rewards), or ipo (its squared distance from 1 / (2 β))."""
    beta: Annotated[float, POSITIVE] = 0.1
    """β, the strength of the constraint to the reference. The reward of a response is β · (log π − log π_ref)."""
    label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.0
    """Probability that the responses of a pair are swapped (conservative DPO)."""


@dataclass
class RewardAlgorithmConfig(LanguageAlgorithmConfig):
    """Loss of reward models."""

    loss_type: Annotated[str, Registered("rlhpc.algorithms.registry:REWARD_LOSSES")] = "bradley_terry"
    """Loss: bradley_terry (for pairs), regression (for labels), a registered name, or `module:function`."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the loss: `bradley_terry`: {centering: 0.01}, the weight of (r_chosen + r_rejected)²."""
