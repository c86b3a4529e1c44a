"""Algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import COUNT, FRACTION, NOT_NEGATIVE, PART, POSITIVE, Choices, Range, Registered


@dataclass
class LanguageAlgorithmConfig:
    """The learning rate's course."""

    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""


@dataclass
class DistillationConfig:
    """On-policy distillation (`algorithm.name: distillation`): the model learns what section `teacher` says of its answers."""

    mode: Annotated[str, Choices("sampled", "topk", "full")] = "sampled"
    """Values of the teacher for each token: `sampled`, its log-prob alone, for a policy gradient; `topk`, those of its most
    likely tokens, and of all other ones in sum; `full`, its full distribution, for which it must be on the actor's ranks."""
    topk: Annotated[int, COUNT] = 64
    """Tokens in mode topk."""
    beta: Annotated[float, FRACTION] = 1.0
    """Divergence, in the modes topk and full: 1 is the reverse KL(model ‖ teacher), 0 the forward KL(teacher ‖ model), between
    them generalized Jensen-Shannon."""
    coef: Annotated[float, POSITIVE] = 1.0
    """Weight of the distillation."""
    task_reward_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the advantages that the reward gives by `algorithm.adv_type`; 0 distils alone, and the reward is logged."""


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
    """Average of the losses of tokens: token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum or
    seq-mean-token-sum-norm (Dr. GRPO: divided by the tokens that an episode may have, `rollout.max_new_tokens` or, with an
    agent outside, `agent.max_tokens`). A sequence is what one role says in an episode."""
    gamma: Annotated[float, FRACTION] = 1.0
    """Discount, from token to token."""
    credit: Annotated[str, Choices("episode", "turn", "state")] = "episode"
    """What a turn of an agent's is credited with: `episode`, what the whole was worth; `turn`, what was paid from it on,
    compared with the same turn of the group's other episodes; `state`, as `episode`, and compared with turns that had just
    read the same (GiGPO). The last two are for estimators that compare: grpo, dr_grpo, rloo."""
    turn_gamma: Annotated[float, FRACTION] = 1.0
    """Discount from turn to turn, for `algorithm.credit`."""
    turn_coef: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the comparison of states, for `credit: state`."""
    gae_lambda: Annotated[float, FRACTION] = 1.0
    """Trace decay of GAE, from token to token."""
    value_clip: Annotated[float | None, POSITIVE] = None
    """Clip range of the critic's loss; null is off."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of the loss of values that come from the model's own head (`actor.model.value_head`)."""
    normalize_advantages: Annotated[str, Choices("auto", "batch", "none")] = "auto"
    """`batch` (over all ranks) or `none`; `auto` is none, as the estimators compare within groups, but for gae, where it is
    batch."""
    clip_ratio_low: Annotated[float, PART] = 0.2
    """PPO's ε below 1."""
    clip_ratio_high: Annotated[float, NOT_NEGATIVE] = 0.2
    """PPO's ε above 1."""
    clip_ratio_c: Annotated[float | None, Range(1, above=True)] = None
    """Dual clip's c (> 1); null is off."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy bonus."""
    update_epochs: Annotated[int, COUNT] = 1
    """Passes over each rollout."""
    group_size: Annotated[int, COUNT] = 8
    """Responses to each prompt."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the KL to the reference policy; 0 does without the reference."""
    kl_type: Annotated[str, Choices("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl")] = "k3"
    """Estimator of that KL: k1, k2, k3 or abs. In the loss, k2 has the gradient of the KL, k3 and abs one close to it, and k1,
    which has none, is refused."""
    kl_in: Annotated[str, Choices("loss", "reward")] = "loss"
    """Place of the KL penalty: `loss`, or `reward` (per token)."""
    recompute_logprobs: bool = False
    """Old log-probs come from the trainer rather than from the rollout engine."""
    tis_cap: Annotated[float | None, POSITIVE] = None
    """Cap of the truncated importance weight between trainer and rollout engine (with `decoupled_ppo` between the
    policy from before the update and the one that wrote); null is off."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: groups whose rewards, without penalties on length, are all equal are dropped and refilled."""
    max_refills: Annotated[int, NOT_NEGATIVE] = 4
    """Rounds of refilling in a step before it goes on with what it has."""
    overlong_buffer: Annotated[int, NOT_NEGATIVE] = 0
    """DAPO's soft length penalty: how many tokens before `rollout.max_new_tokens` it begins; 0 is off."""
    overlong_filter: bool = False
    """Responses cut off at the length limit are left out: not trained on, and in no mean or spread of their group. The others
    have the advantages that they would have if the cut ones had not been drawn."""
    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of versions by which the policy that wrote a token may lag behind the trained one; 0 is sync."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """On-policy distillation (`algorithm.name: distillation`)."""


@dataclass
class DpoAlgorithmConfig(LanguageAlgorithmConfig):
    """The loss."""

    loss_type: Annotated[str, Choices("sigmoid", "ipo")] = "sigmoid"
    """Loss: sigmoid (DPO: −log σ of the difference of rewards), or ipo (its square distance from 1 / (2 β))."""
    beta: Annotated[float, POSITIVE] = 0.1
    """β: how strongly the policy is held to the reference. The reward of a completion is β · (log π − log π_ref)."""
    label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.0
    """Probability that a pair is the wrong way round (conservative DPO)."""


@dataclass
class RewardAlgorithmConfig(LanguageAlgorithmConfig):
    """The loss."""

    loss_type: Annotated[str, Registered("rlhpc.algorithms.registry:REWARD_LOSSES")] = "bradley_terry"
    """Loss: bradley_terry (of pairs), regression (of labels), a registered name, or `module:function`."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the loss: `bradley_terry`: {centering: 0.01}, the weight of (r_chosen + r_rejected)²."""
