"""Policies of a run with several roles: the policy of each role of an agent's episode (`agent.policies`).

Each policy is a LoRA adapter of the model, with a separate optimizer. A sample belongs to the policy of its role.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhpc.config.typed import plain, select
from rlhpc.language.envs.registry import find_environment

if TYPE_CHECKING:
    import torch

    from rlhpc.language.config.run import LanguageConfig

#: Kind of agent in which an environment answers the model (`agent.kind`).
ENVIRONMENT = "environment"


class Policies(NamedTuple):
    """Policies of a run.

    Attributes:
        names: Names in alphabetical order; empty if the model is the only policy.
        by_role: Index of the policy of each role.
    """

    names: tuple[str, ...] = ()
    by_role: tuple[int, ...] = ()

    def indices_of(self, roles: torch.Tensor) -> torch.Tensor:
        """Returns the policy index of each role index."""
        return roles.new_tensor(self.by_role)[roles]


#: Policies of a run in which the model is the only policy.
ONE = Policies()


def roles_of(cfg: LanguageConfig) -> tuple[str, ...]:
    """Returns the roles of an agent's episode; empty if the configuration names none."""
    if cfg.agent.kind == ENVIRONMENT:
        return tuple(find_environment(str(cfg.agent.target), plain(cfg.agent.kwargs)).roles)
    return tuple(cfg.agent.roles)


def policies_of(cfg: LanguageConfig) -> Policies:
    """Returns the policies of a configuration; `check_policies` has to accept it before."""
    policy_by_role = plain(select(cfg, "agent.policies") or {})
    if not policy_by_role:
        return ONE
    policy_names = tuple(sorted({*policy_by_role.values()}))
    return Policies(policy_names, tuple(policy_names.index(policy_by_role[role]) for role in roles_of(cfg)))


def policy_tensor_name(policy: str, name: str) -> str:
    """Returns the name of a policy's tensor in weight updates of engines."""
    return f"{policy}/{name}"


def folders_of(cfg: LanguageConfig, folder: str) -> dict[str, str]:
    """Returns the folder of each policy by name; a single policy has the name "".

    The folder is the policy's subfolder, which `export_language_model` writes for several policies. Without subfolders all
    policies start from the model's folder.
    """
    policy_names = policies_of(cfg).names or ("",)
    return {name: str(Path(folder) / name) if (Path(folder) / name).is_dir() else folder for name in policy_names}
