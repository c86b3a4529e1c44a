"""Off-policy algorithms by name: built in, registered, an entry point of group `rlhpc.off_policy_algorithms`, or
`module:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate
    from rlhpc.embodied.models.base import Policy

#: Of subclasses of `OffPolicyUpdate`.
ALGORITHMS: Registry[Any] = Registry(
    "off-policy algorithm", "algorithm.name", "rlhpc.off_policy_algorithms",
    {
        "sac": "rlhpc.embodied.algorithms.sac:SacUpdate",
        "crossq": "rlhpc.embodied.algorithms.sac:CrossQUpdate",
        "iql": "rlhpc.embodied.algorithms.iql:IqlUpdate",
        "td3": "rlhpc.embodied.algorithms.td3:Td3Update",
    },
)  # fmt: skip
register_off_policy_algorithm = ALGORITHMS.register


def algorithm_for(name: str, policy: Policy, model_type: str) -> type[OffPolicyUpdate[Any]]:
    """The algorithm of `algorithm.name`, which trains a policy.

    Args:
        name: `algorithm.name`.
        policy: As `actor.model` describes it.
        model_type: `actor.model.model_type`, for the message.

    Raises:
        ConfigError: Unknown, no algorithm, or the policy is not what it trains.
    """
    from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate

    found = ALGORITHMS.find(name)
    if not (isinstance(found, type) and issubclass(found, OffPolicyUpdate)):
        raise ConfigError(f"algorithm.name is {name!r}, which is no subclass of rlhpc's OffPolicyUpdate")
    if not isinstance(policy, found.networks):
        raise ConfigError(
            f"actor.model.model_type is {model_type!r}, a {type(policy).__name__}; algorithm.name {name!r} trains a "
            f"{found.networks.__name__}, such as model_type {name.lower()!r} has"
        )
    return found
