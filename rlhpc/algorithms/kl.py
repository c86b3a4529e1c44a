"""KL estimators per token (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from torch import Tensor

from rlhpc.runtime.errors import ConfigError

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy ‖ reference) from samples of the policy.

    Args:
        logprobs: `[B, T]` of the policy.
        ref_logprobs: `[B, T]` of the reference. The order matters: k1 and k3 are not symmetric.
        kind: "k1" = logp − ref (alias kl); "k2" = k1²/2 (mse); "k3" = exp(−k1) + k1 − 1 (low_var_kl); "abs" = |k1|.

    Returns:
        `[B, T]`.

    Raises:
        ConfigError: Unknown kind.
    """
    ratio = logprobs - ref_logprobs
    name = _ALIASES.get(kind.lower(), kind.lower())
    if name == "k1":
        return ratio
    if name == "abs":
        return ratio.abs()
    if name == "k2":
        return ratio.square() / 2
    if name == "k3":
        other = (-ratio).clamp(-20, 20)
        return other.exp() - other - 1
    raise ConfigError(f"kl_penalty is {kind!r}; allowed: k1 (kl), k2 (mse), k3 (low_var_kl), abs")
