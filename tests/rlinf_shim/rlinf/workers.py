"""RLinf's `Worker`, `WorkerGroup`, `Channel` and `Cluster`: signatures of RLinf, on rlhpc's classes."""

from __future__ import annotations

import contextlib
import enum
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

import rlhpc
from rlhpc.config.constraints import parse_steps
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.launchers.srun_commands import nsys_command, nsys_options
from rlhpc.runtime.worker_group import WorkerGroup as _WorkerGroup
from tests.rlinf_shim.run import PROFILING

#: Rules in rlhpc's words → in RLinf's, which RLinf's tests look for.
_WORDS = {
    "lie on nodes": "same node",
    "accelerator .* does not exist": "out of range",
    "every process needs an accelerator": "must not be empty",
    "rule: ascending and unique": "must be unique",
    "write ranks like": "Invalid rank format",
    "resource ranks are unique and ascending": "Resource ranks must be unique",
    "process ranks start at .* instead of": "Process ranks must be in ascending order",
    "has no component 'actor'": "Actor GPUs",
    "num_nodes is .*; it must be a whole number, 1 or more": "'num_nodes' must be a positive integer",
    "node_ranks .* does not exist": "Error parsing node_ranks",
}


#: Rules that RLinf reports by another error than AssertionError.
_ERRORS: dict[str, type[Exception]] = {
    "node_ranks is .* write ranks like": ValueError,
    r"NodePlacementStrategy\(.*: node .* does not exist": IndexError,
}


@contextlib.contextmanager
def as_assertion() -> Iterator[None]:
    """Raises an error of rlhpc about a configuration or a placement as RLinf raises it: mostly as an AssertionError."""
    try:
        yield
    except RlhpcError as error:
        words = [words for pattern, words in _WORDS.items() if re.search(pattern, str(error))]
        kinds = [kind for pattern, kind in _ERRORS.items() if re.search(pattern, str(error))]
        raise (kinds or [AssertionError])[0]("\n".join([str(error), *words])) from error


class AcceleratorType(enum.Enum):
    """Kinds of accelerators that RLinf's tests treat specially."""

    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"


class ClusterEnvVar(enum.Enum):
    """Settings of RLinf that are environment variables."""

    PATH_ENV_MERGE_MODE = "PATH_ENV_MERGE_MODE"


class PathEnvMergeMode(enum.Enum):
    """What RLinf does with a PATH-like variable of the configuration: it puts it before the driver's, or replaces that."""

    APPEND = "append"
    OVERRIDE = "override"


@dataclass(frozen=True)
class WorkerAddress:
    """Name of a rank: that of its group, and its number."""

    root_group_name: str
    ranks: int

    @property
    def rank(self) -> int:
        return self.ranks

    def get_name(self) -> str:
        return f"{self.root_group_name}:{self.ranks}"


class CollectiveGroupOptions:
    """Options of NCCL's communicators, which rlhpc does not need; accepted and dropped."""

    def __init__(self, **options: Any) -> None:
        self.options = options


@dataclass
class WorkerRank:
    """A rank of a group, as `WorkerGroup.worker_info_list` has it."""

    worker: Any
    rank: int


class WorkerGroup(_WorkerGroup):
    """rlhpc's group with RLinf's names."""

    def launch(
        self, cluster: rlhpc.Cluster, placement_strategy: Any = None, name: str | None = None, **ray: Any
    ) -> Any:
        """Launches the group; as in RLinf, by default with a rank on each accelerator. Options of Ray actors are dropped."""
        del ray
        if placement_strategy is None and cluster.num_accelerators:
            placement_strategy = rlhpc.PackedPlacementStrategy(0, cluster.num_accelerators - 1)
        return super().launch(cluster, placement_strategy, name)

    @property
    def worker_info_list(self) -> list[WorkerRank]:
        return [WorkerRank(self, rank) for rank in range(self.world_size)]

    def _close(self) -> None:
        self.shutdown()


class Worker(rlhpc.Worker):
    """rlhpc's worker with the names that RLinf's tests use."""

    current_worker = None
    torch_platform = None
    torch_device_type = None
    accelerator_type = None

    def __init__(self) -> None:
        super().__init__()
        self._cluster_node_rank = self.node_rank
        self._local_accelerator_rank = self.accelerators[0] if self.accelerators else -1
        self._node_local_rank = self.local_rank
        self._worker_address = WorkerAddress(self.group_name, self.rank)

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> WorkerGroup:
        return WorkerGroup(cls, args, kwargs)

    def send(self, obj: Any, dst_group_name: str, dst_rank: int, async_op: bool = False, options: Any = None) -> Any:
        return super().send(obj, dst_group_name, dst_rank, async_op)

    def recv(self, src_group_name: str, src_rank: int, async_op: bool = False, options: Any = None) -> Any:
        return super().recv(src_group_name, src_rank, async_op)

    def broadcast(self, object: Any = None, groups: Any = None, src: Any = None, async_op: bool = False) -> Any:
        return super().broadcast(object, groups, src, async_op)


class ChannelWorker(Worker):
    """Process that holds queues; in rlhpc the service of any rank does."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.maxsize = maxsize


class Channel(rlhpc.Channel):
    """rlhpc's channel with RLinf's way to create one from a group that holds its queues."""

    def __init__(self, *args: Any) -> None:
        if args:
            super().__init__(*args)
        self._distributed = False

    def _initialize(
        self, channel_name: str, channel_worker_group: Any, channel_actors: Any, maxsize: int = 0, **handles: Any
    ) -> None:
        del handles
        created = rlhpc.Channel.create(channel_name, maxsize, home=channel_worker_group.name)
        rlhpc.Channel.__init__(self, *created.__reduce__()[1])
        self._distributed, self._channel_actors_by_rank = len(channel_actors) > 1, channel_actors


class Cluster(rlhpc.Cluster):
    """rlhpc's cluster with RLinf's arguments."""

    NAMESPACE = SYS_NAME = "RLinf"
    DEFAULT_SYS_ENV_VAR: ClassVar[dict[ClusterEnvVar, str]] = {
        ClusterEnvVar.PATH_ENV_MERGE_MODE: PathEnvMergeMode.APPEND.value
    }

    def __init__(self, num_nodes: int | None = None, cluster_cfg: DictConfig | None = None) -> None:
        with as_assertion():
            super().__init__(translated(cluster_cfg) if cluster_cfg is not None else None, num_nodes=num_nodes)

    @property
    def _num_nodes(self) -> int:
        return self.num_nodes

    @staticmethod
    def modify_profile_context(python_interpreter_path: str, worker_name: str, profiling_cfg: NsightConfig) -> str:
        """Returns the command of a rank, with Nsight Systems in front of it for the groups that it records."""
        group = worker_name.partition(":")[0]
        if not profiling_cfg.enabled or group not in profiling_cfg.worker_groups:
            return python_interpreter_path
        return " ".join([*nsys_command(Path("reports"), group, profiling_cfg.options), python_interpreter_path])

    @staticmethod
    def get_full_env_var_name(variable: ClusterEnvVar) -> str:
        return f"RLINF_{variable.value}"

    @staticmethod
    def _merge_path_like_env_value(env_var_name: str, existing_value: str | None, incoming_value: str) -> str:
        """Puts a PATH-like variable of the configuration before the driver's, each folder once."""
        if env_var_name not in _PATH_LIKE or not existing_value:
            return incoming_value
        folders = [*incoming_value.split(os.pathsep), *existing_value.split(os.pathsep)]
        return os.pathsep.join(dict.fromkeys(folders))

    @classmethod
    def merge_worker_env_vars(
        cls, base_env_vars: Mapping[str, str], incoming_env_vars: Mapping[str, str], mode: PathEnvMergeMode
    ) -> dict[str, str]:
        """Merges variables as RLinf means them: rlhpc replaces variables, and RLinf prepends to those that are PATH-like."""
        if mode is PathEnvMergeMode.OVERRIDE:
            return {**base_env_vars, **incoming_env_vars}
        merged = {
            name: cls._merge_path_like_env_value(name, base_env_vars.get(name), value)
            for name, value in incoming_env_vars.items()
        }
        return {**base_env_vars, **merged}


_PATH_LIKE = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PYTHONPATH")


def merged(name: str, value: str) -> str:
    """Returns a variable for rlhpc's `env_vars`, which replaces the driver's."""
    variable = ClusterEnvVar.PATH_ENV_MERGE_MODE
    mode = os.environ.get(Cluster.get_full_env_var_name(variable), Cluster.DEFAULT_SYS_ENV_VAR[variable])
    return Cluster.merge_worker_env_vars(os.environ, {name: value}, PathEnvMergeMode(mode))[name]


def translated(section: DictConfig) -> dict[str, Any]:
    """Translates RLinf's section `cluster` as far as rlhpc has its keys."""
    keys: dict[str, Any] = OmegaConf.to_container(section, resolve=True)  # type: ignore[assignment]
    if keys.get("profiling") is not None:
        raise NotImplementedError(PROFILING)
    if keys.get("auto_scheduler") is not None:
        raise NotImplementedError("rlhpc has no cluster.auto_scheduler")
    groups = keys.get("node_groups") or []
    for group in groups:
        assert isinstance(group, dict), "Each node yaml config must be a dictionary"
        if "hardware" in group:
            raise NotImplementedError("rlhpc has no cluster.node_groups.hardware: robots are not resources of nodes")
        for node in group.pop("env_configs", []):
            if str(node["node_ranks"]) != str(group["node_ranks"]):
                raise NotImplementedError("rlhpc has environment variables of whole node groups")
            pairs = node.get("env_vars", [])  # one mapping in rlhpc
            for pair in pairs:
                assert isinstance(pair, dict), "Each node env_var must be a dict"
                assert len(pair) == 1, f"{pair}: exactly one key-value pair is allowed"
            group["env_vars"] = {name: merged(name, value) for pair in pairs for name, value in pair.items()}
            if "python_interpreter_path" in node:
                group["python_interpreter"] = node["python_interpreter_path"]
    return {"num_nodes": keys["num_nodes"], "node_groups": groups}


class NsightConfig:
    """RLinf's options of Nsight Systems, on those of `runner.trace.profile`."""

    def __init__(
        self,
        backend: str = "nsight",
        enabled: bool = True,
        worker_groups: list[str] | None = None,
        steps: list[int] | None = None,
        options: Mapping[str, Any] | None = None,
        flags: list[str] | None = None,
    ) -> None:
        del backend
        self.enabled, self.worker_groups, self.flags = enabled, worker_groups or [], flags or []
        self.steps = None if steps is None else parse_steps(",".join(map(str, steps)), first=0)
        assert steps is None or self.steps is not None, f"{steps}: steps are non-negative"
        self.user_options = {**(options or {}), **dict.fromkeys(self.flags, True)}
        self.options = nsys_options(self.user_options, self.steps or ())

    def to_cli_tokens(self) -> list[str]:
        """Returns the words of the user's options in rlhpc's command."""
        command = nsys_command(Path("reports"), "actor", self.options)
        return [word for word in command if word.lstrip("-").partition("=")[0] in self.user_options]

    def should_profile_step(self, step: int) -> bool:
        """Returns whether a step is recorded, as `TraceControl.begin_step` decides it."""
        return self.enabled and (self.steps is None or step in self.steps)


class ClusterConfig:
    """RLinf's parsed section `cluster`."""

    @staticmethod
    def from_dict_cfg(section: DictConfig) -> rlhpc.Cluster:
        """Checks the section: rlhpc does so when it plans the nodes."""
        with as_assertion():
            return rlhpc.Cluster.planned(translated(section), {})
