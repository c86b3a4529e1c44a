"""A real Slurm of this machine's own, for tests: `python -m tests.slurm.cluster up`, then `eval "$(… env)"` and sbatch away.

Variants:

- full: munge, slurmdbd on MariaDB, slurmctld, and four slurmd on hosts of their own (`hosts.py`): gpu1 and gpu2 with fake
  GPUs, cpu1 and cpu2. Needs root.
- noaccounting: the same without slurmdbd.
- small: no root and no munge; the nodes share this host's name and network, so none can be cut off.

Everything lives under one folder, on free ports and a free network, so several clusters can be up at once. `down` ends every
process of the cluster and deletes the folder. install.sh installs what it needs on Debian.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import random
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from . import hosts, processes
from .processes import ClusterError, Process
from .slurm_conf import GPUS_PER_NODE, Layout, Node, gres_conf, slurm_conf, slurmdbd_conf

Variant = Literal["full", "small", "noaccounting"]

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
LONGEST_SOCKET = 107
CONTROLLER, ACCOUNTING, DATABASE, MUNGE = "slurmctld", "slurmdbd", "mariadbd", "munged"
#: Name of the host from which `add_login` lets users submit.
LOGIN = "login"


def best_variant() -> Variant:
    """full where it can run, else small."""
    return "full" if not missing("full") else "small"


def commands_of(variant: Variant) -> list[str]:
    """The programs that the variant runs."""
    commands = ["slurmctld", "slurmd", "sbatch", "scontrol"]
    if variant != "small":
        commands += ["munged", "mungekey", "ip", "nsenter", "unshare"]
    if variant == "full":
        commands += ["slurmdbd", "mariadbd", "mariadb-install-db", "mariadb-admin"]
    return commands


def missing(variant: Variant) -> str:
    """Why the variant cannot run on this machine; empty where it can."""
    if absent := [command for command in commands_of(variant) if not shutil.which(command, path=PATH)]:
        return f"not installed: {', '.join(absent)} (tests/slurm/install.sh installs them)"
    if variant != "small" and os.geteuid() != 0:
        return f"the variant {variant} needs root"
    if variant != "small" and not hosts.allowed():
        return f"the variant {variant} needs to make network namespaces, which this container forbids"
    return ""


class SlurmCluster:
    """One cluster. Methods that wait have a deadline, and raise ClusterError with the daemons' last log lines past it.

    `root` is where everything lives; its state is there too, so another process may take the cluster over with
    `SlurmCluster(root)` and end it. Nodes that are hosts have a /tmp of their own; of the real one they see `root`, pytest's
    folder, this checkout and its Python where these are there, and what `shared` names.
    """

    def __init__(
        self,
        root: Path | str,
        variant: Variant | None = None,
        shared: Sequence[Path] = (),
        *,
        measures_energy: bool = False,
    ) -> None:
        self.root, self._measures_energy = Path(root).absolute(), measures_energy
        self._shared = shared
        self._processes: dict[str, Process] = {}
        self._bridge = ""
        self._layout: Layout | None = None
        if self._state_file.exists():
            self._load()
            if variant not in (None, self.variant):
                raise ClusterError(
                    f"{self.root} holds a cluster of variant {self.variant}, not {variant}: take it down"
                )
        else:
            self.variant: Variant = variant or best_variant()

    # What it is

    @property
    def nodes(self) -> list[str]:
        return [node.name for node in self._layout.nodes] if self._layout else []

    @property
    def gpu_nodes(self) -> list[str]:
        return [node.name for node in self._layout.nodes if node.gpus] if self._layout else []

    @property
    def nodes_are_hosts(self) -> bool:
        return self.variant != "small"

    @property
    def has_accounting(self) -> bool:
        return self.variant == "full"

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    @property
    def pm_counters(self) -> Path:
        """The counters of energy that all nodes have as `/sys/cray/pm_counters`, where they have any."""
        return self.root / "pm_counters"

    @property
    def local(self) -> Path:
        """A folder that each node has for itself under one name: what an unshared scratch folder looks like."""
        return self.root / "local"

    @property
    def login_address(self) -> str:
        """Where nodes reach a process on this side."""
        return self._up.address

    def address(self, node: str) -> str:
        return self._node(node).address

    def add_login(self) -> None:
        """Adds a login node, where there is none: a host of its own, without slurmd, on which `enter(LOGIN)` runs commands.

        Without it they run on the host of the controller, from which no network parts them.
        """
        if f"node-{LOGIN}" not in self._processes:
            self._add_host(LOGIN)

    def env(self) -> dict[str, str]:
        """What a process on the login side needs to use this cluster."""
        return {"SLURM_CONF": str(self.slurm_conf)}

    # Up and down

    def up(self) -> None:
        """Start it and return when every node is idle; where it is up already, do nothing."""
        if self._state_file.exists():
            if self.is_up():
                return
            self.down()
        if reason := missing(self.variant):
            raise ClusterError(f"{reason}; `--variant small` needs Slurm alone")
        if len(os.fsencode(self.root / "run" / "mariadb.sock.lock")) > LONGEST_SOCKET:
            raise ClusterError(f"{self.root} is too long for a UNIX socket in it: pass a shorter root")
        if self.root.exists() and any(self.root.iterdir()):
            raise ClusterError(f"{self.root} is not empty and holds no cluster: pass another root")
        try:
            self._bring_up()
        except BaseException as error:
            try:
                self.down()
            except (ClusterError, OSError) as second:
                error.add_note(f"and it could not be taken down again: {second}")
            raise

    def is_up(self) -> bool:
        return bool(self._processes) and all(process.alive() for process in self._processes.values())

    def down(self) -> None:
        """End every process of the cluster, and delete its network and its folder. Safe to repeat."""
        if self._state_file.exists():
            self._load()
        daemons = {name: process for name, process in self._processes.items() if not name.startswith("node-")}
        # Submission stops first, then everything on the nodes, whatever a job made of itself.
        processes.end([daemons.pop(CONTROLLER)] if CONTROLLER in daemons else [], grace_s=3)
        self._end_nodes()
        processes.end([daemons.pop(ACCOUNTING)] if ACCOUNTING in daemons else [], grace_s=3)
        processes.end(daemons.values())
        holders = [process for name, process in self._processes.items() if name.startswith("node-")]
        if self._bridge and hosts.is_bridge_of(self.root, self._bridge):
            for node in (*self.nodes, LOGIN):
                hosts.disconnect(self._bridge, node)
            with suppress(ClusterError):
                hosts.ip("link", "del", self._bridge)
        processes.end(holders)
        self._processes, self._bridge, self._layout = {}, "", None
        # A job may have been at the folder until a moment ago.
        processes.wait_until(self._delete_root, f"{self.root} to be deleted", deadline_s=5)

    def _delete_root(self) -> bool:
        shutil.rmtree(self.root, ignore_errors=True)
        return not self.root.exists()

    def _bring_up(self) -> None:
        for folder in ("", "etc", "log", "run", "state", "dev", "local", "munge"):
            path = self.root / folder
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o755)  # other users' jobs pass through here
        self._layout = self._plan()
        self._save()
        for node in self._layout.nodes:
            for folder in (f"nodes/{node.name}/spool", f"nodes/{node.name}/local"):
                (self.root / folder).mkdir(parents=True)
            (self.root / "nodes" / node.name / "local").chmod(0o1777)
        self.local.chmod(0o1777)
        if self._measures_energy:
            self.pm_counters.mkdir()
            for name, unit in (("energy", "J"), ("power", "W")):
                (self.pm_counters / name).write_text(f"1 {unit} 1 us\n")
        self._make_devices()
        self._write("slurm.conf", slurm_conf(self._layout))
        self._write("gres.conf", gres_conf(self._layout))
        if self.has_accounting:
            self._write("slurmdbd.conf", slurmdbd_conf(self._layout), mode=0o600)
            self._start_database()
        if self.nodes_are_hosts:
            self._start_munge()
            for node in self._layout.nodes:
                self._add_namespaces(node.name)
            for node in self._layout.nodes:
                self._connect(node.name)
        if self.has_accounting:
            self.start_accounting()
            # slurmctld is only accepted as a cluster that the database knows.
            self.run("sacctmgr", "--immediate", "add", "cluster", self._layout.cluster)
            self.run("sacctmgr", "--immediate", "add", "account", "rlhpc", f"cluster={self._layout.cluster}")
            self.run("sacctmgr", "--immediate", "add", "user", self._layout.user, "account=rlhpc")
        self.start_controller()
        for node in self._layout.nodes:
            self.start_slurmd(node.name, wait=False)
        self.wait_for_nodes()

    def _add_namespaces(self, name: str) -> None:
        (self.root / "nodes" / name).mkdir(parents=True, exist_ok=True)
        self._processes[f"node-{name}"] = hosts.add_node(self.root, name, self._seen_by_all())
        self._save()

    def _connect(self, name: str) -> None:
        holder = self._processes[f"node-{name}"]
        hosts.wait_for_node(self.root, name, holder)
        hosts.connect(self._bridge, name, holder, self._host_address(name))

    def _add_host(self, name: str) -> None:
        self._add_namespaces(name)
        self._connect(name)

    def _host_address(self, name: str) -> str:
        """Address of a node, of the login node, or of the controller's host."""
        if name == LOGIN:
            return f"{self._up.address.rpartition('.')[0]}.10"
        return self._up.address if name == CONTROLLER else self._node(name).address

    def _seen_by_all(self) -> list[Path]:
        """Folders below /tmp that every node sees beside the cluster's own, none of them inside another."""
        of_pytest = Path("/tmp") / f"pytest-of-{pwd.getpwuid(os.geteuid()).pw_name}"
        of_pytest.mkdir(mode=0o700, exist_ok=True)
        wanted = {
            Path(sys.prefix),
            Path(__file__).resolve().parents[2],
            of_pytest,
            *(p.absolute() for p in self._shared),
        }
        below = sorted(path for path in wanted if path.is_relative_to("/tmp") and path != Path("/tmp"))
        covered = {
            path for path in below for other in (*below, self.root) if path != other and path.is_relative_to(other)
        }
        return [path for path in below if path not in covered and path != self.root]

    def _plan(self) -> Layout:
        ports = iter(_free_ports(6))
        host = socket.gethostname().partition(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        gpus = {"gpu1": GPUS_PER_NODE, "gpu2": GPUS_PER_NODE, "cpu1": 0, "cpu2": 0}
        if self.nodes_are_hosts:
            self._bridge, prefix = hosts.add_bridge(self.root)
            address = f"{prefix}.1"
            nodes = [Node(name, f"{prefix}.{11 + i}", 6818, count) for i, (name, count) in enumerate(gpus.items())]
        else:
            address = "127.0.0.1"
            nodes = [Node(name, address, next(ports), count) for name, count in gpus.items()]
        return Layout(
            root=self.root,
            cluster=self._bridge or f"small{os.getpid()}",
            user=user,
            host=host,
            address=address,
            controller_port=next(ports),
            nodes=nodes,
            munge_socket=self.root / "munge" / "socket" if self.nodes_are_hosts else None,
            accounting_port=next(ports) if self.has_accounting else None,
            nodes_are_hosts=self.nodes_are_hosts,
            measures_energy=self._measures_energy,
        )

    def _make_devices(self) -> None:
        """Fake GPUs: device nodes that are /dev/null by another name, or, for who may make none, links to it."""
        for number in range(GPUS_PER_NODE):
            device = self.root / "dev" / f"gpu{number}"
            try:
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            except PermissionError:
                device.symlink_to("/dev/null")

    # Use

    def run(self, *argv: str | Path, timeout_s: float = 60, user: str | None = None) -> str:
        """What a command, run on the login side (as another user), prints.

        Raises:
            ClusterError: it failed or took too long; the message has what it wrote and the daemons' last log lines.
        """
        return self._run([str(part) for part in argv], timeout_s, user)

    def run_on(self, node: str, *argv: str | Path, timeout_s: float = 60) -> str:
        """What a command prints that runs on a node, beside Slurm."""
        return self._run([*self.enter(node), *map(str, argv)], timeout_s, None)

    def enter(self, node: str) -> list[str]:
        """What to put before a command to run it on a node, outside any job."""
        name = node if node == LOGIN else self._node(node).name
        return list(hosts.enter(self._processes[f"node-{name}"])) if self.nodes_are_hosts else []

    def cable(self, node: str) -> str:
        """The network device of this side through which packets go to a node that is a host of its own."""
        return hosts.link(self._bridge, self._node(node).name)

    def files(self, node: str) -> Path:
        """A node's root folder as it is reached from here: its /tmp and /dev/shm are in there."""
        return hosts.files(self._processes[f"node-{self._node(node).name}"]) if self.nodes_are_hosts else Path("/")

    def _run(self, argv: Sequence[str], timeout_s: float, user: str | None) -> str:
        try:
            done = subprocess.run(
                argv,
                env=self._environment(),
                user=user,
                group=pwd.getpwnam(user).pw_gid if user else None,
                extra_groups=[] if user else None,
                cwd="/" if user else None,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shlex.join(argv)}: still running after {timeout_s:g} s\n{self.logs()}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise ClusterError(f"{shlex.join(argv)}: exit code {done.returncode}\n{said}\n{self.logs()}")
        return done.stdout

    def node_state(self, node: str) -> str:
        """As sinfo says it: "idle", "mixed", "down*" (the star: it does not answer)."""
        return self.run("sinfo", "--noheader", "--nodes", node, "--partition", "all", "--format", "%T").strip()

    def wait_for_nodes(self, *nodes: str, deadline_s: float = 90) -> None:
        """Until the nodes (all of them) answer and take jobs."""
        wanted = nodes or self.nodes
        processes.wait_until(
            lambda: all(self.node_state(node) in ("idle", "mixed", "allocated", "completing") for node in wanted),
            f"{', '.join(wanted)} to be ready",
            deadline_s=deadline_s,
            logs=self._logs(),
            poll_s=0.1,
        )

    def given_up_nodes(self) -> list[str]:
        """Rows of the nodes that Slurm holds down or drained: name, state, what it has against the node."""
        rows = self.run("sinfo", "--noheader", "--Node", "--partition", "all", "--format", "%N %T %E").splitlines()
        return [row for row in rows if row.split()[1].startswith(("down", "drain"))]

    def repair_nodes(self) -> list[str]:
        """Takes the given-up nodes back, and returns their rows."""
        rows = self.given_up_nodes()
        for row in rows:
            self.take_back(row.split()[0])
        if rows:
            self.wait_for_nodes()
        return rows

    def take_back(self, node: str) -> None:
        """Ends whatever Slurm waits for on a node.

        A node that Slurm waits for cannot be resumed unless it is down, and one that was down may have registered since.
        """
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=repair")
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def running_on(self, node: str) -> list[str]:
        """What runs on a node beside slurmd, as command lines with their pids: of jobs, and of what is left of them."""
        slurmd = self._processes[f"slurmd-{self._node(node).name}"]
        words = {p.pid: processes.command_line(p.pid).replace("\0", " ") for p in self._running_on(node) if p != slurmd}
        return [f"{pid} {command.strip()}" for pid, command in sorted(words.items())]

    def logs(self, lines: int = 15) -> str:
        return processes.tail(self._logs(), lines)

    def _logs(self) -> list[Path]:
        return sorted([*self.root.glob("log/*.log"), *self.root.glob("log/*.out")])

    # Harm and repair

    def cut(self, node: str) -> None:
        """Take the node off the network; what runs on it runs on."""
        hosts.ip("link", "set", self._link(node), "down")

    def restore(self, node: str) -> None:
        hosts.ip("link", "set", self._link(node), "up")

    def add_interface(self, node: str, interface: str, address: str) -> None:
        """A second cable of the node, in a network of 256 addresses; `remove_interface` takes it away."""
        hosts.connect(self._bridge, node, self._processes[f"node-{self._node(node).name}"], address, interface)

    def remove_interface(self, node: str, interface: str) -> None:
        hosts.ip("link", "del", hosts.link(self._bridge, self._node(node).name, interface))

    def part(self, one: str, other: str) -> None:
        """Has no packet pass between two hosts, in either direction; both still reach all others.

        Args:
            one, other: Nodes, LOGIN, or CONTROLLER, whose host also has the accounting.
        """
        self._on_both_ends(hosts.drop_packets_to, one, other)

    def rejoin(self, one: str, other: str) -> None:
        """Ends `part`."""
        self._on_both_ends(hosts.pass_packets_to, one, other)

    def _on_both_ends(self, change: Callable[[str, str, Process | None], None], one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            holder = None if here == CONTROLLER else self._processes[f"node-{here}"]
            change(self._host_address(there), "eth0" if holder else self._bridge, holder)

    def lose_node(self, node: str) -> None:
        """Ends a node as a power cut does: its processes, its /tmp, its /dev/shm and its network are gone."""
        self.kill_slurmd(node)
        processes.end([self._processes[f"node-{self._node(node).name}"]])
        hosts.disconnect(self._bridge, node)

    def bring_node_back(self, node: str) -> None:
        """Starts a node that was lost, with the same name and address, and with an empty /tmp and /dev/shm."""
        (self.root / "nodes" / node / "ready").unlink(missing_ok=True)
        self._add_host(node)
        self.start_slurmd(node, wait=False)

    def kill_slurmd(self, node: str, steps: bool = True) -> None:
        """SIGKILL the node's slurmd, and with `steps` everything else on the node, as when the machine dies.

        Slurm sees it after SlurmdTimeout, 20 to 40 s. Where slurmd is back before that, it sees at once that a batch job is
        gone, but not that of a job in its first 20 s (BatchStartTimeout and MessageTimeout): that one stays "running".
        """
        processes.end([self._processes[f"slurmd-{self._node(node).name}"]])
        if steps:
            self._end_everything_on(node)

    def freeze_slurmd(self, node: str) -> None:
        """It takes messages, and answers none until `thaw_slurmd`, as on a machine that is too busy."""
        self._processes[f"slurmd-{self._node(node).name}"].kill(signal.SIGSTOP)

    def thaw_slurmd(self, node: str) -> None:
        self._processes[f"slurmd-{self._node(node).name}"].kill(signal.SIGCONT)

    def start_slurmd(self, node: str, *, wait: bool = True) -> None:
        name = f"slurmd-{self._node(node).name}"
        argv: list[str | Path] = [*self.enter(node), "slurmd", "-D", "-f", self.slurm_conf, "-N", node]
        self._start(name, argv, self._environment())
        if wait:
            self.wait_for_nodes(node)

    def stop_controller(self, *, kill: bool = False) -> None:
        """End slurmctld; running jobs run on. With `kill` it may save nothing first."""
        processes.end([self._processes[CONTROLLER]], grace_s=0 if kill else 10)

    def start_controller(self) -> None:
        self._start(CONTROLLER, ["slurmctld", "-D", "-f", self.slurm_conf], self._environment())
        self._wait(CONTROLLER, ["scontrol", "ping"], "slurmctld to answer", says=" is UP")

    def stop_accounting(self) -> None:
        """End slurmdbd: sacct fails, and slurmctld keeps its records until it is back."""
        processes.end([self._processes[ACCOUNTING]], grace_s=10)

    def start_accounting(self) -> None:
        environment = self._environment() | {"MYSQL_UNIX_PORT": str(self._database_socket)}
        self._start(ACCOUNTING, ["slurmdbd", "-D"], environment)
        self._wait(ACCOUNTING, ["sacctmgr", "--noheader", "show", "cluster"], "slurmdbd to answer")

    # Daemons

    @property
    def _database_socket(self) -> Path:
        return self.root / "run" / "mariadb.sock"

    def _start_database(self) -> None:
        user = self._up.user
        folder = self.root / "database"
        # Of its own, for a server that starts deletes the temporary tables that it finds in its folder, of whomever.
        temporary = self.root / "database-temporary"
        temporary.mkdir(mode=0o700)
        shutil.chown(temporary, user)
        # A database of one test: it may lose what it has when the machine stops, and is fast for it.
        fast = ["--innodb-flush-method=nosync", "--innodb-doublewrite=0", "--innodb-flush-log-at-trx-commit=0"]
        small = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-lock-wait-timeout=900"]
        common = ["--no-defaults", f"--datadir={folder}", f"--user={user}", f"--tmpdir={temporary}", *fast, *small]
        self._run(
            ["mariadb-install-db", *common, "--auth-root-authentication-method=socket", "--skip-test-db"], 60, None
        )
        socket_ = f"--socket={self._database_socket}"
        pid_file = f"--pid-file={self.root}/run/mariadbd.pid"
        self._start(DATABASE, ["mariadbd", *common, socket_, pid_file, "--skip-networking"], self._environment())
        self._wait(DATABASE, ["mariadb-admin", "--no-defaults", socket_, "ping"], "MariaDB to answer")

    def _start_munge(self) -> None:
        key = self.root / "munge" / "private" / "key"
        key.parent.mkdir(mode=0o700)
        self._run(["mungekey", "--create", f"--keyfile={key}"], 10, None)
        paths = [
            f"--key-file={key}",
            f"--socket={self._up.munge_socket}",
            f"--log-file={key.parent}/munged.log",
            f"--pid-file={key.parent}/munged.pid",
            f"--seed-file={key.parent}/munged.seed",
        ]
        self._start(MUNGE, ["munged", "--foreground", *paths], self._environment())
        self._wait(MUNGE, ["munge", "--no-input", f"--socket={self._up.munge_socket}"], "munged to answer")

    def _start(self, name: str, argv: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        if (old := self._processes.get(name)) and old.alive():
            raise ClusterError(f"{name} already runs as {old.pid}")
        self._processes[name] = processes.start(argv, env=environment, output=self.root / "log" / f"{name}.out")
        self._save()

    def _wait(self, name: str, probe: Sequence[str], what: str, *, says: str = "", deadline_s: float = 30) -> None:
        def answers() -> bool:
            if not self._processes[name].alive():
                raise ClusterError(f"{name} ended at its start\n{self.logs()}")
            try:
                done = subprocess.run(
                    probe, env=self._environment(), capture_output=True, text=True, check=False, timeout=10
                )
            except subprocess.TimeoutExpired:
                return False
            return done.returncode == 0 and says in done.stdout

        processes.wait_until(answers, what, deadline_s=deadline_s, logs=self._logs())

    def _environment(self) -> dict[str, str]:
        """This process's, less what an outer Slurm or this cluster's own job put there."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH_", "SALLOC_"))}
        return kept | {"PATH": PATH} | self.env()

    def _end_nodes(self) -> None:
        daemons = [process for name, process in self._processes.items() if name.startswith("slurmd-")]
        processes.end(daemons)
        for node in self.nodes:
            self._end_everything_on(node)

    def _end_everything_on(self, node: str) -> None:
        """Kill until nothing is left, for what is killed may just have started something."""

        def nothing_left() -> bool:
            running = self._running_on(node)
            for process in running:
                process.kill()
            return not running

        processes.wait_until(nothing_left, f"everything on {node} to be gone", deadline_s=10)

    def _running_on(self, node: str) -> list[Process]:
        if not self.nodes_are_hosts:
            return processes.of_steps(self.root / "log" / f"slurmd-{node}.log", self.slurm_conf, node)
        holder = self._processes.get(f"node-{node}")
        namespace = hosts.namespace(holder) if holder is not None and holder.alive() else ""
        if holder is None or not namespace:
            return []
        return [p for p in processes.in_network_namespace(namespace) if p.pid != holder.pid and p.alive()]

    # Details

    @property
    def _up(self) -> Layout:
        if self._layout is None:
            raise ClusterError(
                f"no cluster is up in {self.root}: `python -m tests.slurm.cluster up --root {self.root}`"
            )
        return self._layout

    def _node(self, name: str) -> Node:
        for node in self._up.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"no node {name}: there are {', '.join(self.nodes)}")

    def _link(self, node: str) -> str:
        if not self.nodes_are_hosts:
            raise ClusterError("the nodes of the small variant share this host's network: none can be cut off")
        return hosts.link(self._bridge, self._node(node).name)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.root / "etc" / name
        path.touch(mode=mode)
        path.chmod(mode)
        path.write_text(text)

    @property
    def _state_file(self) -> Path:
        return self.root / "cluster.json"

    def _save(self) -> None:
        """After every start: whoever takes the cluster down must find all of it."""
        layout = self._up
        state = {
            "variant": self.variant,
            "bridge": self._bridge,
            "processes": {name: [process.pid, process.started] for name, process in self._processes.items()},
            "layout": {
                "cluster": layout.cluster,
                "user": layout.user,
                "host": layout.host,
                "address": layout.address,
                "controller_port": layout.controller_port,
                "accounting_port": layout.accounting_port,
                "nodes": [node.as_dict() for node in layout.nodes],
            },
        }
        new = self._state_file.with_suffix(".new")
        new.write_text(json.dumps(state, indent=1))
        new.replace(self._state_file)

    def _load(self) -> None:
        state = json.loads(self._state_file.read_text())
        self.variant = state["variant"]
        self._bridge = state["bridge"]
        self._processes = {name: Process(*numbers) for name, numbers in state["processes"].items()}
        saved = state["layout"]
        nodes = [Node(**node) for node in saved.pop("nodes")]
        self._layout = Layout(
            **saved,
            nodes=nodes,
            root=self.root,
            munge_socket=self.root / "munge" / "socket" if self.nodes_are_hosts else None,
            nodes_are_hosts=self.nodes_are_hosts,
        )


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to outgoing connections: a stopped daemon finds its own free again."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ClusterError("no free ports between 20000 and 32000")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description="A real Slurm for tests.")
    parser.add_argument("command", choices=["up", "down", "status", "env"])
    parser.add_argument("--variant", choices=get_args(Variant), help="of a new cluster (full as root, else small)")
    default = Path(tempfile.gettempdir()) / f"rlhpc-slurm-{os.getuid()}"
    parser.add_argument("--root", type=Path, default=default, help="the cluster's folder (%(default)s)")
    options = parser.parse_args(argv)
    try:
        cluster = SlurmCluster(options.root, options.variant)
        if options.command == "up":
            cluster.up()
        elif options.command == "down":
            cluster.down()
            return 0
        elif options.command == "status":
            print(f"{cluster.variant} cluster in {cluster.root}: {'up' if cluster.is_up() else 'not up'}")
            print(cluster.run("sinfo", "--long", "--Node") + cluster.run("squeue"), end="")
            return 0 if cluster.is_up() else 1
        elif not cluster.slurm_conf.exists():
            raise ClusterError(f"no cluster is up in {cluster.root}")
        for name, value in cluster.env().items():
            print(f"export {name}={shlex.quote(value)}")
    except ClusterError as error:
        print(f"tests.slurm.cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
