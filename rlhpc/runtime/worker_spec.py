"""Specification of a rank, which its process receives when it starts."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime import pickle_stream
from rlhpc.runtime.devices import VIRTUAL
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import is_count, read_json
from rlhpc.runtime.imports import import_paths
from rlhpc.runtime.text import short_repr

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import Placement

#: Argument of a rank's program in place of its parent's pid, if its parent is the program of `WorkerSpec.command_prefix`.
BEHIND_PREFIX = "prefixed"
#: Requests of the driver to a rank besides method calls: to end, and in a recovery to be idle and to resume.
EXIT, IDLE, RESUME = "\0exit", "\0idle", "\0resume"


@dataclass
class WorkerSpec:
    """Specification of a rank, sent to the rank's process through a pipe and never through files or the environment.

    Attributes:
        group, rank, world_size: Identity of the rank.
        node, node_rank, local_rank, local_world_size, accelerators, visible: Placement of the rank.
        registry: The generation's registry folder.
        token: Scratch token of the session on this host.
        body: Pickled (class, args, kwargs) of the worker object.
        log_out, log_err: Files for stdout and stderr.
        env: Environment variables to set.
        sys_path, cwd: Import path and working directory of the driver, so that the worker imports the same modules.
        threads: Number of threads of OpenMP and torch.
        bind_cores: Whether the rank is bound to cores near its accelerators.
        tcp_address: Address to listen on for other hosts; None if all processes share this host.
        interface: Network interface for that address; None means the interface on the route to the driver.
        driver: Endpoints of the driver's service, for notes such as ready and alive.
        wait_deadline: Seconds after which a wait fails.
        interpreter: Python that runs the rank in a new process; empty to fork.
        incarnation: Identifier of this start of the rank; a restarted rank has a new one.
        preload: Modules, and functions that import (`module:function`), that a node runs once for the group's ranks there,
            before it forks them. Empty if the ranks are not forked.
        command_prefix: Command that starts the rank's interpreter, such as a profiler; empty to start it directly.
    """

    group: str
    rank: int
    world_size: int
    node: str
    node_rank: int
    local_rank: int
    local_world_size: int
    accelerators: tuple[int, ...]
    registry: str
    token: str
    body: bytes
    log_out: str
    log_err: str
    env: dict[str, str] = field(default_factory=dict)
    sys_path: list[str] = field(default_factory=list)
    cwd: str = "."
    threads: int = 1
    bind_cores: bool = False
    tcp_address: str | None = None
    interface: str | None = None
    driver: dict[str, str] = field(default_factory=dict)
    wait_deadline: float = 1800.0
    interpreter: str = ""
    incarnation: str = ""
    visible: tuple[int, ...] = ()
    command_prefix: list[str] = field(default_factory=list)
    preload: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.group}-{self.rank}"

    @property
    def shared_imports(self) -> list[str]:
        """Imports that the node makes once for the ranks with which the group starts there; [] if this is the only one."""
        return self.preload if self.local_world_size > 1 else []

    def to_json(self) -> bytes:
        """Returns the specification as JSON, which a joining process can read without executing code."""
        return json.dumps({**asdict(self), "body": base64.b64encode(self.body).decode()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> WorkerSpec:
        """Parses a specification from `to_json`.

        Raises:
            ValueError: The text is not a specification.
        """
        fields = read_json(text)
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"no specification of a rank: {short_repr(fields)}")
        for name, field_type in _KINDS.items():
            if not isinstance(fields[name], field_type) or isinstance(fields[name], bool) != (field_type is bool):
                raise ValueError(f"{name} of a rank's specification is {short_repr(fields[name])}")
        count_fields = [
            *fields["accelerators"],
            *fields["visible"],
            *(fields[name] for name, field_type in _KINDS.items() if field_type is int),
        ]
        text_fields = [
            *fields["sys_path"],
            *fields["command_prefix"],
            *fields["preload"],
            *fields["env"].values(),
            *fields["driver"].values(),
        ]
        text_fields += [fields["tcp_address"] or "", fields["interface"] or ""]
        if not all(map(is_count, count_fields)) or not all(isinstance(text_field, str) for text_field in text_fields):
            raise ValueError(f"no specification of a rank: {short_repr(fields)}")
        class_pickle = base64.b64decode(fields["body"], validate=True)
        indices = {name: tuple(fields[name]) for name in ("accelerators", "visible")}
        return cls(**{**fields, "body": class_pickle, **indices})

    @property
    def device_mask(self) -> tuple[int, ...]:
        """Indices of the node's accelerators that the process sees, in the order in which it counts them."""
        return self.visible or self.accelerators

    @property
    def identity(self) -> tuple[str, str]:
        """Name and incarnation, which identify one start of a rank."""
        return self.name, self.incarnation


#: Types of a specification's values in JSON; values that may be None are checked separately.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(
        ("group", "node", "registry", "token", "body", "log_out", "log_err", "cwd", "interpreter", "incarnation"), str
    ),
    **dict.fromkeys(("rank", "world_size", "node_rank", "local_rank", "local_world_size", "threads"), int),
    "accelerators": list, "visible": list, "env": dict, "sys_path": list, "bind_cores": bool, "driver": dict,
    "command_prefix": list, "preload": list, "wait_deadline": (int, float),
}  # fmt: skip


def spec_of(
    group: str,
    placement: Placement,
    world_size: int,
    cluster: Cluster,
    env_vars: dict[str, str],
    num_sharing: int,
    log_dir: Path,
    *,
    in_step: bool = False,
    default_interpreter: str = "",
    **common_fields: Any,
) -> WorkerSpec:
    """Builds the specification of a rank.

    Args:
        group, placement, world_size: Identity and placement of the rank.
        cluster: The nodes.
        env_vars: Environment variables; they take precedence over those of the node group.
        num_sharing: Number of ranks that share the cores of the node.
        log_dir: Folder for the rank's logs.
        in_step: Whether the rank is a task of a job step.
        default_interpreter: Python of the rank if its node group and its container have no separate one; empty for the
            launcher's default.
        common_fields: Fields with the same values for all ranks of the session or the group.
    """
    node = cluster.nodes[placement.node_rank]
    node_group = cluster.node_group(placement.node_group) if placement.node_group else None
    env = {**(dict(node_group.env_vars or {}) if node_group else {}), **env_vars}
    if cluster.source == "virtual":
        env.setdefault(VIRTUAL, "1")
    interpreter = cluster.interpreter(placement.node_group, in_step=in_step) or default_interpreter
    stem = log_dir / f"{group}-{placement.rank}"
    return WorkerSpec(
        group=group, rank=placement.rank, world_size=world_size, node=node.name, node_rank=placement.node_rank,
        local_rank=placement.local_rank, local_world_size=placement.local_world_size,
        accelerators=tuple(placement.accelerators), visible=tuple(placement.visible), log_out=f"{stem}.out",
        log_err=f"{stem}.err", env=env,
        sys_path=import_paths(foreign=bool(interpreter)), cwd=os.getcwd(), threads=max(1, node.cpus // num_sharing),
        bind_cores=cluster.bind_cores,
        interpreter=interpreter, **common_fields,
    )  # fmt: skip


#: Byte on the standard input of a joined rank that is a notice to leave.
LEAVE = b"L"


def for_input(worker_specs: Sequence[WorkerSpec]) -> bytes:
    """Encodes the specifications for the tasks of a job step, in order.

    Every task reads the specifications of all tasks. They hardly differ, so compression leaves a twentieth of the bytes.
    """
    return pickle_stream.encode(zlib.compress(pickle.dumps(list(worker_specs))))


def read_specs(stream: int) -> list[WorkerSpec]:
    """Reads specifications that `for_input` encoded.

    Raises:
        EOFError: The driver has ended.
    """
    try:
        worker_specs: list[WorkerSpec] = pickle.loads(
            zlib.decompress(pickle_stream.decode(functools.partial(os.read, stream)))
        )
    except EOFError:
        raise EOFError("the driver was gone before it said what to do") from None
    return worker_specs


def exit_on_input_end(stream: int, leave: Callable[[], None], ends_itself: Callable[[], bool] = lambda: True) -> None:
    """Starts a thread that ends this process at the end of its input, which means that the driver or srun has ended.

    Args:
        stream: File descriptor of the input.
        leave: Function to call before the process ends.
        ends_itself: Called when the input contains `LEAVE`; returns whether this process will end by itself. If not, the
            thread ends the process at once.
    """

    def watch() -> None:
        reason = b"the driver of this run is gone; this rank ends\n"
        with contextlib.suppress(OSError):
            while received_bytes := os.read(stream, 4096):
                if LEAVE in received_bytes and not ends_itself():
                    reason = b"this rank was told to leave, and has nothing under way; it ends\n"
                    break
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, reason)
        with contextlib.suppress(Exception):
            leave()
        os._exit(1)

    threading.Thread(target=watch, name="rlhpc-lifeline", daemon=True).start()


def step_devices(worker_spec: WorkerSpec, environ: Mapping[str, str], visible_devices: Sequence[str]) -> str:
    """Returns the rank's `CUDA_VISIBLE_DEVICES`. Index i of an accelerator means the i-th device of the step on the node.

    Args:
        worker_spec: Specification of the rank.
        environ: Environment of the task.
        visible_devices: Devices of the step on the node.

    Raises:
        ConfigError: The step has fewer devices than the placement needs.
    """
    if not worker_spec.accelerators:
        return ""
    if not visible_devices and "CUDA_VISIBLE_DEVICES" not in environ:
        return ",".join(str(i) for i in worker_spec.device_mask)  # a site that sets no mask
    if max(worker_spec.device_mask) >= len(visible_devices):
        raise ConfigError(
            f"{worker_spec.name} on node {worker_spec.node} is placed on accelerator {max(worker_spec.device_mask)}, "
            f"but the step was given "
            f"{len(visible_devices)} there (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r})"
        )
    return ",".join(visible_devices[i] for i in worker_spec.device_mask)
