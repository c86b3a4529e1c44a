"""What a worker process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class WorkerSpec:
    """Everything one rank needs, passed through the fork server's pipe (never through files or the environment).

    Attributes:
        group, rank, world_size: Who it is.
        node, node_rank, local_rank, local_world_size, accelerators: Where it is.
        registry: The generation's folder.
        token: Scratch token of the session on this host.
        body: Pickled (class, args, kwargs) of the worker object.
        log_out, log_err: Files for stdout and stderr.
        env: Environment variables to set.
        sys_path, cwd: So that the worker imports what the driver imports.
        threads: Cores granted to the rank, for OpenMP and torch.
        tcp_address: Address to listen on for other hosts; None where all processes share this host.
        interface: Network interface for that address; None takes the one on the route to the driver.
        driver: The driver's data endpoint, for HELLO and heartbeats.
        wait_deadline: Seconds after which any wait gives up.
        interpreter: Python to start instead of forking; empty means fork.
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
    tcp_address: str | None = None
    interface: str | None = None
    driver: dict[str, str] = field(default_factory=dict)
    wait_deadline: float = 1800.0
    interpreter: str = ""
    incarnation: str = ""

    @property
    def name(self) -> str:
        return f"{self.group}-{self.rank}"
