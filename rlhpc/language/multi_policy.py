"""Several policies in one run: the policy of each role of an agent's episode (`agent.policies`).

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

#: The kind of agent that has an environment answer the model.
ENVIRONMENT = "environment"


class Policies(NamedTuple):
    """Policies of a run.

    Attributes:
        names: Names in alphabetical order; empty if the model is the only policy.
        by_role: Index of the policy of each role.
    """

    names: tuple[str, ...] = ()
    by_role: tuple[int, ...] = ()

    def of(self, roles: torch.Tensor) -> torch.Tensor:
        """Returns the policy indices of role numbers."""
        return roles.new_tensor(self.by_role)[roles]


#: Policies of a run with one.
ONE = Policies()


def roles_of(cfg: LanguageConfig) -> tuple[str, ...]:
    """Returns the roles of an agent's episode, if it has several."""
    if cfg.agent.kind == ENVIRONMENT:
        return tuple(find_environment(str(cfg.agent.target), plain(cfg.agent.kwargs)).roles)
    return tuple(cfg.agent.roles)


def policies_of(cfg: LanguageConfig) -> Policies:
    """Returns the policies of a checked configuration."""
    policy_by_role = plain(select(cfg, "agent.policies") or {})
    if not policy_by_role:
        return ONE
    names = tuple(sorted({*policy_by_role.values()}))
    return Policies(names, tuple(names.index(policy_by_role[role]) for role in roles_of(cfg)))


def of_policy(policy: str, name: str) -> str:
    """Returns the name of a policy's tensor in messages to engines."""
    return f"{policy}/{name}"


def folders_of(cfg: LanguageConfig, folder: str) -> dict[str, str]:
    """Returns the folder of each policy by name: its folder within one that `export_language_model` wrote of several
    policies, or the model's folder, from which all policies start. For one policy it is the model's folder."""
    names = policies_of(cfg).names or ("",)
    return {name: str(Path(folder) / name) if (Path(folder) / name).is_dir() else folder for name in names}
