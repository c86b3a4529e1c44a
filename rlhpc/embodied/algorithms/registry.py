"""Registry of off-policy algorithms: built in, registered, an entry point of group `rlhpc.off_policy_algorithms`, or
`module:Class`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate
    from rlhpc.embodied.models.base import Policy

#: Registry of `OffPolicyUpdate` subclasses.
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
    """Returns the algorithm class that `algorithm.name` selects, after checking that it can train the policy.

    Args:
        name: `algorithm.name`.
        policy: Policy that `actor.model` describes.
        model_type: `actor.model.model_type`, for the message.

    Raises:
        ConfigError: The name is unknown or is not an algorithm, or the algorithm cannot train this policy.
    """
    from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate

    update_class = ALGORITHMS.find(name)
    if not (isinstance(update_class, type) and issubclass(update_class, OffPolicyUpdate)):
        raise ConfigError(f"algorithm.name is {name!r}, which is no subclass of rlhpc's OffPolicyUpdate")
    if not isinstance(policy, update_class.networks):
        raise ConfigError(
            f"actor.model.model_type is {model_type!r}, a {type(policy).__name__}; algorithm.name {name!r} trains a "
            f"{update_class.networks.__name__}, such as model_type {name.lower()!r} has"
        )
    return update_class
