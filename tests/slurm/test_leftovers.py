"""Two users, jobs of two nodes, and every way in which a job ends: nothing of it stays on any node.

`RLHPC_LEFTOVERS` sets how many jobs end (`make leftovers` takes 20) and `RLHPC_LEFTOVERS_SEED` the order.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .cluster import SlurmCluster
from .runs import ROOT, kill, until

COUNT = int(os.environ.get("RLHPC_LEFTOVERS", "6"))
SEED = int(os.environ.get("RLHPC_LEFTOVERS_SEED", "1"))
#: How a job ends, and whether all of its processes on a node can be dead before one of them could tidy up: then the same
#: user's next start there does it, or `rlhpc clean`.
ENDS = {"finished": False, "cancelled": False, "rank killed": False, "requeued": False, "preempted": False,
        "driver killed": True}  # fmt: skip
USERS = ("root", "nobody")
#: So many jobs at a time.
TOGETHER = 6

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240 + 25 * COUNT)]

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker

class Idle(Worker):
    def rest(self):
        time.sleep(0.2)
        return os.getpid()

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    session = Session.start(registry_root=folder / "registry", log_dir=folder / "logs")
    idle = Idle.create_group().launch(Cluster(), placement_strategy=NodePlacementStrategy([0, 1, 1]), name="idle")
    pids = idle.rest().wait()
    (folder / "up.new").write_text(json.dumps({"driver": os.getpid(), "ranks": pids, "token": session.scratch.token}))
    (folder / "up.new").rename(folder / "up.json")
    while not (folder / "go").exists():
        idle.rest().wait()
    idle.shutdown()
    print("ended well", flush=True)
"""


@dataclass
class Job:
    """One job of two nodes: its driver and a rank on the first, two ranks on the second."""

    cluster: SlurmCluster
    folder: Path
    user: str
    how: str
    options: tuple[str, ...] = ()
    id: str = ""
    up: dict[str, Any] = field(default_factory=dict)

    def submit(self) -> None:
        account = pwd.getpwnam(self.user)
        self.folder.mkdir(mode=0o700)
        script = self.folder / "entry.py"
        script.write_text(SCRIPT)
        for path in (self.folder, script):
            os.chown(path, account.pw_uid, account.pw_gid)
        partition = "preempt" if self.how == "preempted" else "all"
        command = f"cd {self.folder}; exec {sys.executable} {script} {self.folder}"
        self.id = self.cluster.run(
            "sbatch", "--parsable", f"--partition={partition}", "--nodes=2", "--ntasks-per-node=1", "--mem=500",
            "--requeue", f"--chdir={self.folder}", f"--output={self.folder}/out", "--open-mode=append",
            f"--export=PATH=/usr/bin:/bin,HOME={self.folder},PYTHONPATH={ROOT},OMP_NUM_THREADS=1,SLURM_CONF="
            f"{self.cluster.slurm_conf}", *self.options, "--wrap", command, user=self.user,
        ).strip()  # fmt: skip

    def wait_up(self) -> None:
        until(lambda: (self.folder / "up.json").exists(), f"job {self.id} ({self.how}) is up\n{self.account()}", 120)
        self.up = json.loads((self.folder / "up.json").read_text())

    def account(self) -> str:
        logs = [self.folder / "out", *self.folder.glob("logs/*")]
        said = "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs if path.is_file())
        return f"{said}\n{self.cluster.run('squeue', '--all')}"

    @property
    def state(self) -> str:
        return self.cluster.run("squeue", "--noheader", "--states=all", f"--jobs={self.id}", "--format=%T").strip()

    def end(self) -> None:
        run = self.cluster.run
        if self.how == "finished":
            (self.folder / "go").touch()
        elif self.how == "cancelled":
            run("scancel", self.id)
        elif self.how == "rank killed":
            kill(self.up["ranks"][2])
        elif self.how == "driver killed":
            kill(self.up["driver"])
        elif self.how == "requeued":
            run("scontrol", "requeue", self.id)
        elif self.how == "preempted":
            nodes = run("squeue", "--noheader", f"--jobs={self.id}", "--format=%N").strip()
            run("sbatch", "--partition=all", f"--nodelist={nodes}", "--nodes=2", "--exclusive", "--time=1",
                "--output=/dev/null", "--wrap", "true")  # fmt: skip

    def wait_ended(self) -> None:
        """Its processes are gone; one that is to start again is taken out of the queue before it does."""
        over = ("PENDING", "COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED", "")
        until(lambda: self.state in over, f"job {self.id} has ended ({self.how})\n{self.account()}", 120)
        self.wait_gone()
        if self.state == "PENDING":
            self.cluster.run("scancel", self.id)

    def wait_gone(self) -> None:
        pids = [self.up["driver"], *self.up["ranks"]]
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"{self.how}: processes end", 60)


def found(cluster: SlurmCluster, token: str = "") -> list[str]:
    """What runs have on the nodes (of one session)."""
    pattern = f"rlhpc-*-{token}*"
    folders = [(node, cluster.files(node) / root) for node in cluster.nodes for root in ("tmp", "dev/shm")]
    names = [f"{node}: {path.name}" for node, folder in folders for path in folder.glob(pattern)]
    return sorted(name for name in names if "rlhpc-slurm" not in name)


def processes_of(job: Job, node: str) -> list[int]:
    """All processes of a job's steps on a node, by their environment: tasks, what forks their ranks, and ranks."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if {f"SLURM_JOB_ID={job.id}".encode(), f"SLURMD_NODENAME={node}".encode()} <= set(variables):
                pids.append(int(folder.name))
    assert set(job.up["ranks"][1:]) <= set(pids)
    return pids


def clean(cluster: SlurmCluster, user: str, *nodes: str) -> str:
    """`srun rlhpc clean`, on these nodes."""
    return cluster.run(
        "srun", f"--nodes={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--mem=100",
        "--chdir=/", f"--export=PATH=/usr/bin:/bin,HOME=/,PYTHONPATH={ROOT},SLURM_CONF={cluster.slurm_conf}",
        sys.executable, "-m", "rlhpc.cli", "clean", user=user,
    )  # fmt: skip


#: Where the way to Python is closed to others (root's own one), a node shows them what lies there, less what is secret by
#: its own mode. Only this node sees it so.
_OPEN = """set -e
for closed in "$@"; do
  stage=$(mktemp -d)
  mount --bind "$closed" "$stage"
  mount -t tmpfs -o mode=755 rlhpc-open "$closed"
  for inner in "$stage"/* "$stage"/.[!.]*; do
    if [ -d "$inner" ] && [ ! -L "$inner" ]; then
      mkdir "$closed/$(basename "$inner")"
      mount --bind "$inner" "$closed/$(basename "$inner")"
    fi
  done
  umount --lazy "$stage"
done
"""


@pytest.fixture(scope="module")
def shared(slurm: SlurmCluster) -> Iterator[Path]:
    """A folder of all users on nodes on which all users can run this Python."""
    if not slurm.nodes_are_hosts:
        pytest.skip("the nodes of the small cluster share one /tmp and one user")
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    above = {parent for path in needed for parent in (path, *path.parents) if not parent.stat().st_mode & 0o001}
    for node in slurm.nodes if above else ():
        slurm.run_on(node, "bash", "-c", _OPEN, "open", *sorted(above))
    folder = slurm.root / "leftovers"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    for user in USERS:
        slurm.run("scancel", f"--user={user}")


def test_nothing_stays_on_the_nodes(slurm: SlurmCluster, shared: Path) -> None:
    draw = random.Random(SEED)
    hows = [*ENDS, *draw.choices(list(ENDS), k=max(0, COUNT - len(ENDS)))][:COUNT]
    draw.shuffle(hows)
    jobs = [Job(slurm, shared / f"job{n}", USERS[n % len(USERS)], how) for n, how in enumerate(hows)]
    late: list[str] = []
    for first in range(0, COUNT, TOGETHER):
        batch = jobs[first : first + TOGETHER]
        for job in batch:
            job.submit()
        for job in batch:
            job.wait_up()
        assert all(found(slurm, job.up["token"]) for job in batch), "a session has folders while it lives"
        # a preemption takes whole nodes, so it comes when the others have ended
        for job in sorted(batch, key=lambda job: job.how == "preempted"):
            if job.how == "preempted":
                for other in batch:
                    if other.how != "preempted":
                        other.wait_ended()
            job.end()
        for job in batch:
            job.wait_ended()
            until(lambda job=job: ENDS[job.how] or not found(slurm, job.up["token"]),
                  f"job {job.id} ({job.how}) leaves nothing\n{found(slurm)}\n{job.account()}", 60)  # fmt: skip
            if left := found(slurm, job.up["token"]):
                late += [f"{job.how}: {name}" for name in left]
    print(f"\n{COUNT} ends ({', '.join(hows)}); left until the user's next start: {late or 'nothing'}")
    for user in USERS:
        clean(slurm, user, *slurm.nodes)
    assert not found(slurm)


def test_a_node_that_is_lost_is_clean_after_the_next_start_there(slurm: SlurmCluster, shared: Path) -> None:
    """Everything on the node dies at once, of both users; each user's next job there tidies up what is his."""
    other, lost = "cpu1", "cpu2"
    on = (f"--nodelist={other},{lost}",)
    jobs = [Job(slurm, shared / f"lost-{user}", user, "finished", on) for user in USERS]
    for job in jobs:
        job.submit()
    for job in jobs:
        job.wait_up()
    for job in jobs:
        slurm.run("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    # At once: one that outlives the others by a moment tidies up. A process that was listed may have forked meanwhile.
    stopped, pids = set[int](), {pid for job in jobs for pid in processes_of(job, lost)}
    while pids - stopped:
        for pid in pids - stopped:
            os.kill(pid, signal.SIGSTOP)
        stopped |= pids
        pids = {pid for job in jobs for pid in processes_of(job, lost)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    slurm.kill_slurmd(lost)
    for job in jobs:
        slurm.run("scancel", job.id)
        job.wait_gone()
    slurm.start_slurmd(lost)
    left = {user: [name for name in found(slurm) if f"rlhpc-{pwd.getpwnam(user).pw_uid}-" in name] for user in USERS}
    assert all(name.startswith(f"{lost}: ") for names in left.values() for name in names), left
    assert all(left.values()), "the two users had folders there"
    said = clean(slurm, "nobody", lost)
    assert said.count(": removed /") == len(left["nobody"]), said
    assert found(slurm) == sorted(left["root"]), "only his own"
    again = Job(slurm, shared / "again", "root", "finished", on)
    again.submit()
    again.wait_up()
    (again.folder / "go").touch()
    again.wait_ended()
    assert not found(slurm), "that start has removed them, and its own are gone, too"


def test_a_planted_link_on_a_node_harms_nobody(slurm: SlurmCluster, shared: Path) -> None:
    """What one user puts under another's names neither stops his job there nor loses him anything."""
    precious = shared / "precious"
    (precious / "spill").mkdir(parents=True)
    (precious / "spill" / "data").touch()
    precious.chmod(0o700)
    os.utime(precious, (1, 1))
    plant = (f"cd /tmp; ln -s {precious} rlhpc-0-aaaaaaaa; ln -s /nothing/x rlhpc-0-bbbbbbbb; mkdir -m 700 rlhpc-0-cccccccc; "
             "touch -h -d '1 hour ago' rlhpc-0-aaaaaaaa rlhpc-0-bbbbbbbb rlhpc-0-cccccccc")  # fmt: skip
    nodes = slurm.nodes
    slurm.run("srun", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--mem=100", "--chdir=/", "bash", "-c", plant,
              user="nobody")  # fmt: skip
    job = Job(slurm, shared / "besieged", "root", "finished")
    job.submit()
    job.wait_up()
    job.end()
    job.wait_ended()
    assert (precious / "spill" / "data").exists()
    assert "ended well" in (job.folder / "out").read_text()
    assert len(found(slurm)) == 3 * len(nodes), "theirs stay theirs"
    for node in nodes:
        subprocess.run([*slurm.enter(node), "bash", "-c", "rm -rf /tmp/rlhpc-0-*"], check=True)
