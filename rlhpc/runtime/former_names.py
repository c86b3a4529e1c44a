"""Former names of modules, module attributes, class members and keyword arguments.

A former name works for two releases, with a warning, in imports, configurations, entry points and calls.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

#: Former module or package → current one. A module of a former package is searched in the current package.
FORMER_MODULES: dict[str, str] = {
    "rlhpc.checkpoint.boxes": "rlhpc.checkpoint.tensor_slice",
    "rlhpc.config.ranges": "rlhpc.config.constraints",
    "rlhpc.config.yaml_loader": "rlhpc.config.yaml_files",
    "rlhpc.embodied.data.replay": "rlhpc.embodied.data.replay_buffer",
    "rlhpc.embodied.envs.robot": "rlhpc.embodied.robots.robot_env",
    "rlhpc.embodied.envs.simulated_robot": "rlhpc.embodied.robots.simulated_robot",
    "rlhpc.embodied.envs.slotwise": "rlhpc.embodied.envs.sync_vector_env",
    "rlhpc.embodied.envs.timing": "rlhpc.embodied.envs.base",
    "rlhpc.embodied.evaluation.intervention": "rlhpc.embodied.interventions.sources",
    "rlhpc.embodied.intervention": "rlhpc.embodied.interventions.sources",
    "rlhpc.embodied.models.actor_critic": "rlhpc.embodied.models.off_policy",
    "rlhpc.embodied.robots.keys": "rlhpc.embodied.robots.joining",
    "rlhpc.embodied.roles": "rlhpc.embodied.workers",
    "rlhpc.embodied.roles.env": "rlhpc.embodied.workers.env",
    "rlhpc.embodied.roles.parts": "rlhpc.embodied.rollout.work_sharing",
    "rlhpc.embodied.roles.ppo": "rlhpc.embodied.workers.ppo_actor",
    "rlhpc.embodied.roles.rollout": "rlhpc.embodied.workers.rollout",
    "rlhpc.embodied.roles.slots": "rlhpc.embodied.rollout.slot_map",
    "rlhpc.embodied.runners.ppo": "rlhpc.embodied.runners.rollout_runner",
    "rlhpc.embodied.runners.sac": "rlhpc.embodied.runners.rollout_runner",
    "rlhpc.embodied.update": "rlhpc.embodied.algorithms",
    "rlhpc.embodied.update.off_policy": "rlhpc.embodied.algorithms.off_policy",
    "rlhpc.embodied.update.sac": "rlhpc.embodied.algorithms.sac",
    "rlhpc.jobs.walltime": "rlhpc.jobs.slurm",
    "rlhpc.jobs.watcher": "rlhpc.jobs.wait_server",
    "rlhpc.language.agent_config": "rlhpc.language.config",
    "rlhpc.language.agents.parsers": "rlhpc.language.agents.gateway.output_parsers",
    "rlhpc.language.agents.sessions": "rlhpc.language.agents.gateway.sessions",
    "rlhpc.language.algorithm": "rlhpc.language.algorithms",
    "rlhpc.language.algorithm.base": "rlhpc.language.algorithms.base",
    "rlhpc.language.algorithm.policy_gradient": "rlhpc.language.algorithms.policy_gradient",
    "rlhpc.language.algorithm.registry": "rlhpc.language.algorithms.registry",
    "rlhpc.language.compare": "rlhpc.language.reporting.sample_pages",
    "rlhpc.language.data.builtin": "rlhpc.language.models.builtin",
    "rlhpc.language.data.packaged": "rlhpc.language.models.builtin",
    "rlhpc.language.data.tiny": "rlhpc.language.models.tiny",
    "rlhpc.language.data.tiny_vision": "rlhpc.language.models.tiny_vision",
    "rlhpc.language.dpo_config": "rlhpc.language.config",
    "rlhpc.language.engines.engine": "rlhpc.language.engines.common",
    "rlhpc.language.engines.sampling": "rlhpc.language.engines.hf",
    "rlhpc.language.environments": "rlhpc.language.envs",
    "rlhpc.language.environments.base": "rlhpc.language.envs.base",
    "rlhpc.language.environments.kuhn": "rlhpc.language.envs.games",
    "rlhpc.language.environments.numbers": "rlhpc.language.envs.games",
    "rlhpc.language.environments.registry": "rlhpc.language.envs.registry",
    "rlhpc.language.group_config": "rlhpc.language.config",
    "rlhpc.language.memory": "rlhpc.language.planning",
    "rlhpc.language.memory.known": "rlhpc.language.planning.model_size",
    "rlhpc.language.memory.layers": "rlhpc.language.planning.memory_model",
    "rlhpc.language.memory.tables": "rlhpc.language.planning.memory_tables",
    "rlhpc.language.model_config": "rlhpc.language.config",
    "rlhpc.language.pass_at_k": "rlhpc.language.reporting.eval_metrics",
    "rlhpc.language.reward_config": "rlhpc.language.config",
    "rlhpc.language.rewards.sandbox": "rlhpc.language.sandbox.python",
    "rlhpc.language.roles": "rlhpc.language.workers",
    "rlhpc.language.roles.probe": "rlhpc.language.training.weight_sync",
    "rlhpc.language.roles.prompts": "rlhpc.language.training.prompt_dispatch",
    "rlhpc.language.roles.work": "rlhpc.language.rollout.prompt_queue",
    "rlhpc.language.runners.dpo": "rlhpc.language.runners.supervised",
    "rlhpc.language.runners.reward_model": "rlhpc.language.runners.supervised",
    "rlhpc.language.runners.sft": "rlhpc.language.runners.supervised",
    "rlhpc.language.samples_page": "rlhpc.language.reporting.sample_pages",
    "rlhpc.language.scoring.base": "rlhpc.language.scoring.registry",
    "rlhpc.language.tokens": "rlhpc.language.models",
    "rlhpc.language.tokens.batches": "rlhpc.language.models.token_batch",
    "rlhpc.language.tokens.cutting": "rlhpc.language.models.micro_batching",
    "rlhpc.language.tokens.model": "rlhpc.language.models.loading",
    "rlhpc.language.tokens.scores": "rlhpc.language.models.logprobs",
    "rlhpc.language.tokens.trainer": "rlhpc.language.training.trainer",
    "rlhpc.metrics.bars": "rlhpc.metrics.charts",
    "rlhpc.metrics.progress": "rlhpc.metrics.logger",
    "rlhpc.metrics.results": "rlhpc.metrics.provenance",
    "rlhpc.metrics.svg": "rlhpc.metrics.charts",
    "rlhpc.runs.changes": "rlhpc.runs.config_changes",
    "rlhpc.runs.kinds": "rlhpc.runs.task_type",
    "rlhpc.runs.sweeps": "rlhpc.runs.sweep",
    "rlhpc.runs.tuning.measure": "rlhpc.runs.tuning.calibrate",
    "rlhpc.runtime.comm.sockets": "rlhpc.runtime.comm.zmq_sockets",
    "rlhpc.runtime.context": "rlhpc.runtime.comm.context",
    "rlhpc.runtime.device": "rlhpc.runtime.devices",
    "rlhpc.runtime.group": "rlhpc.runtime.worker_group",
    "rlhpc.runtime.lazy": "rlhpc.runtime.imports",
    "rlhpc.runtime.process": "rlhpc.runtime.worker_process",
    "rlhpc.runtime.spec": "rlhpc.runtime.worker_spec",
    "rlhpc.training.regions": "rlhpc.training.shard_layout",
    "rlhpc.weights.broadcast": "rlhpc.weights.transport",
    "rlhpc.weights.elements": "rlhpc.weights.delta",
    "rlhpc.weights.publish": "rlhpc.weights.sender",
    "rlhpc.weights.receipt": "rlhpc.weights.verification",
    "rlhpc.weights.target": "rlhpc.weights.receiver",
}

#: Module → former attribute → current attribute. Each module sets its `__getattr__` to `former_attributes(__name__)`.
FORMER_ATTRIBUTES: dict[str, dict[str, str]] = {
    "rlhpc.language.algorithms.base": {"Whole": "MinibatchCounts"},
    "rlhpc.language.envs.base": {"Said": "EnvResponse"},
    "rlhpc.runs.task_type": {
        "KINDS": "TASK_TYPES",
        "all_kinds": "all_task_types",
        "find_kind": "find_task_type",
        "kind_names": "task_type_names",
        "kind_of": "task_type_of",
        "kind_of_checkpoint": "task_type_of_checkpoint",
        "kind_of_run": "task_type_of_run",
    },
    "rlhpc.weights.base": {"Receipt": "VersionDigests"},
}


def current_module(name: str) -> str | None:
    """Returns the current path of a former module; None if the name is not a former module."""
    if name in FORMER_MODULES:
        return FORMER_MODULES[name]
    package, _, leaf = name.rpartition(".")
    return f"{FORMER_MODULES[package]}.{leaf}" if package in FORMER_MODULES else None


def _warn(former_name: str, current_name: str, stacklevel: int = 3) -> None:
    warnings.warn(
        f"{former_name} is now {current_name}; the old name works for two releases",
        FutureWarning,
        stacklevel=stacklevel,
    )


def former_attributes(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` function for a module with an entry in `FORMER_ATTRIBUTES`."""

    def find(name: str) -> Any:
        if (current_name := FORMER_ATTRIBUTES[module].get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", current_name)
        return getattr(sys.modules[module], current_name)

    return find


def former_keywords(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a function with renamed keyword arguments.

    Args:
        names: Former name → current name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for former_name, current_name in names.items():
                if former_name in kwargs:  # one look-up per name is fast enough for functions on hot paths
                    _warn(f"argument {former_name} of {function.__qualname__}", current_name)
                    kwargs[current_name] = kwargs.pop(former_name)
            return function(*args, **kwargs)

        call.former_keywords = names  # type: ignore[attr-defined]
        return call

    return decorate


def current_keywords(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of a function or class under their current names, without a warning."""
    target = getattr(function, "__init__", None) if isinstance(function, type) else function
    former_keywords = getattr(target, "former_keywords", {})
    return {former_keywords.get(name, name): keyword_value for name, keyword_value in kwargs.items()}


def former_members(**names: str) -> Callable[[C], C]:
    """Returns a decorator for a class with renamed fields, methods or constructor arguments.

    A former name can be read, set and passed to the constructor. If a subclass defines a former name, this also defines the
    current member.

    Args:
        names: Former name → current name.
    """

    def decorate(cls: C) -> C:
        for former_name, current_name in names.items():
            setattr(cls, former_name, _FormerMember(former_name, current_name))
        cls.__init__ = former_keywords(**names)(cls.__init__)  # type: ignore[misc]

        own_hook = vars(cls).get("__init_subclass__")

        def adopt_former_names(subclass: type, **kwargs: Any) -> None:
            for former_name, current_name in names.items():
                if former_name in vars(subclass):
                    _warn(f"{subclass.__qualname__}.{former_name}", current_name)
                    setattr(subclass, current_name, vars(subclass)[former_name])
            # The class's own hook comes last, so that it sees the current names.
            hook = super(cls, subclass).__init_subclass__ if own_hook is None else own_hook.__get__(None, subclass)  # type: ignore[arg-type]
            hook(**kwargs)

        cls.__init_subclass__ = classmethod(adopt_former_names)  # type: ignore[assignment]
        return cls

    return decorate


class _FormerMember:
    """Descriptor of a member's former name.

    Args:
        former_name: Former name of the member.
        current_name: Current name of the member.
    """

    def __init__(self, former_name: str, current_name: str) -> None:
        self.former, self.current = former_name, current_name

    def __get__(self, instance: Any, owner: type) -> Any:
        """Returns the current member."""
        _warn(f"{owner.__qualname__}.{self.former}", self.current)
        return getattr(owner if instance is None else instance, self.current)

    def __set__(self, instance: Any, value: Any) -> None:
        """Sets the current member."""
        _warn(f"{type(instance).__qualname__}.{self.former}", self.current)
        setattr(instance, self.current, value)


class FormerModuleFinder:
    """Import finder that resolves former module names to current modules; both names are the same module object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec for a former module; None for any other module."""
        current_name = current_module(fullname)
        loader: Any = self
        return None if current_name is None else importlib.machinery.ModuleSpec(fullname, loader, origin=current_name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Returns None, so that `importlib` creates the module object. `importlib.abc.Loader` does the same, but its
        import is slow.
        """

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the former module by the current module in `sys.modules`; `importlib` returns the module from there."""
        current_name = str(current_module(module.__name__))
        warnings.warn(
            f"{module.__name__} is now {current_name}; the old name works for two releases", FutureWarning, stacklevel=2
        )
        sys.modules[module.__name__] = importlib.import_module(current_name)


def install() -> None:
    """Installs the finder before all other finders, which would load a module of a former package a second time."""
    if not any(isinstance(finder, FormerModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerModuleFinder())
