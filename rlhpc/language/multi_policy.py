"""Several policies in one run: which role of an agent's episode speaks by which (`agent.policies`).

Each is a LoRA adapter of the one model, with an optimizer of its own. A sample is of the policy by which its role speaks.
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
    """The policies of a run.

    Attributes:
        names: In alphabetical order; none where all speak by one, the model.
        by_role: Which of them, by role.
    """

    names: tuple[str, ...] = ()
    by_role: tuple[int, ...] = ()

    def of(self, roles: torch.Tensor) -> torch.Tensor:
        """The policy of each role's number."""
        return roles.new_tensor(self.by_role)[roles]


#: All speak by one.
ONE = Policies()


def roles_of(cfg: LanguageConfig) -> tuple[str, ...]:
    """Who speaks in an agent's episode, where several do."""
    if cfg.agent.kind == ENVIRONMENT:
        return tuple(find_environment(str(cfg.agent.target), plain(cfg.agent.kwargs)).roles)
    return tuple(cfg.agent.roles)


def policies_of(cfg: LanguageConfig) -> Policies:
    """Those of a configuration that has been checked."""
    found = plain(select(cfg, "agent.policies") or {})
    if not found:
        return ONE
    names = tuple(sorted({*found.values()}))
    return Policies(names, tuple(names.index(found[role]) for role in roles_of(cfg)))


def of_policy(policy: str, name: str) -> str:
    """What a policy's tensor is called on its way to engines."""
    return f"{policy}/{name}"


def folders_of(cfg: LanguageConfig, folder: str) -> dict[str, str]:
    """The folder of each of several policies, by name: one within a folder that `export_language_model` wrote of them, or the
    model's own, from which all begin. Of one policy it is the model's."""
    names = policies_of(cfg).names or ("",)
    return {name: str(Path(folder) / name) if (Path(folder) / name).is_dir() else folder for name in names}
