"""The test cluster is what the other tests of this folder take it for."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.slurm import hosts, jobs, processes
from tests.slurm.cluster import ClusterError, SlurmCluster, Variant, main
from tests.slurm.processes import wait_until
from tests.slurm.slurm_conf import REQUEUE_DELAY_S

NewCluster = Callable[[Variant], AbstractContextManager[SlurmCluster]]


def submit(cluster: SlurmCluster, script: str, output: Path, *options: str) -> str:
    """The id of a batch job that writes its output to `output`."""
    return cluster.run("sbatch", "--parsable", "--output", output, *options, "--wrap", script).strip()


def state(cluster: SlurmCluster, job: str) -> str:
    """The state of a job and why it waits, as in "PENDING BeginTime"; empty where squeue no longer shows it."""
    return cluster.run("squeue", "--noheader", "--states=all", "--jobs", job, "--format", "%T %r").strip()


def wait_for(cluster: SlurmCluster, job: str, *prefixes: str, deadline_s: float = 60) -> None:
    what = f"job {job} to be {' or '.join(prefixes)}"
    wait_until(lambda: state(cluster, job).startswith(prefixes), what, deadline_s=deadline_s, poll_s=0.2)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_every_node_is_idle_and_offers_what_was_asked(slurm: SlurmCluster) -> None:
    assert slurm.nodes == ["gpu1", "gpu2", "cpu1", "cpu2"]
    assert slurm.gpu_nodes == ["gpu1", "gpu2"]
    lines = slurm.run("sinfo", "--Node", "--noheader", "--partition", "all", "--format", "%N %c %G").splitlines()
    assert lines == ["cpu1 8 (null)", "cpu2 8 (null)", "gpu1 8 gpu:fake:4", "gpu2 8 gpu:fake:4"]
    partitions = slurm.run("sinfo", "--noheader", "--format", "%R").split()
    assert set(partitions) == {"gpu", "cpu", "all", "preempt"}


def test_slurm_conf_alone_is_enough_to_use_it(slurm: SlurmCluster, tmp_path: Path) -> None:
    environment = {"SLURM_CONF": slurm.env()["SLURM_CONF"], "PATH": os.environ["PATH"]}
    for argv in (["squeue"], ["srun", "-pcpu", "/bin/true"], ["sbatch", "--output=/dev/null", "--wrap=true"]):
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode == 0, done.stderr


def test_a_node_that_slurm_gave_up_is_taken_back(slurm: SlurmCluster) -> None:
    slurm.freeze_slurmd("cpu2")  # a node that is down is back at its next registration: the first minutes have many
    try:
        slurm.run("scontrol", "update", "nodename=gpu1", "state=drain", "reason=Kill task failed")
        slurm.run("scontrol", "update", "nodename=cpu2", "state=down", "reason=Not responding")
        # On a machine without time to spare Slurm gives up other nodes, too.
        rows = {row.split()[0]: row for row in slurm.given_up_nodes()}
        assert {"cpu2", "gpu1"} <= {*rows} and "Kill task failed" in rows["gpu1"] and "Not responding" in rows["cpu2"]
    finally:
        slurm.thaw_slurmd("cpu2")
    slurm.repair_nodes()
    assert not {"cpu2", "gpu1"} & {row.split()[0] for row in slurm.given_up_nodes()}
    slurm.run("srun", "-wgpu1,cpu2", "-N2", "/bin/true")


def test_a_job_whose_end_slurm_missed_is_ended_and_others_are_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The second component of a het job, on a node whose slurmd did not answer in time that it has ended."""
    components = ["--nodelist=gpu1", "--mem=100", ":", "--nodelist=cpu1", "--mem=100"]
    script = tmp_path / "asleep.sh"
    script.write_text(f"#!/bin/bash\nsleep 600 &\ntouch {tmp_path}/up\nwait\n")
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", *components, script).strip()
    wait_until((tmp_path / "up").exists, "the job to run", deadline_s=60)
    named = rf"(?s)job {job}\+0 .asleep.sh. is RUNNING, reason None, on gpu1\n  gpu1 is \w+; there runs:\n.*sleep 600"
    with pytest.raises(AssertionError, match=named):
        jobs.wait_gone(slurm, job, deadline_s=0)
    slurm.freeze_slurmd("cpu1")
    slurm.run("scancel", job)
    wait_until(lambda: slurm.node_state("cpu1").endswith("*"), "Slurm to have no answer", deadline_s=30, poll_s=0.2)
    slurm.thaw_slurmd("cpu1")
    with pytest.warns(UserWarning, match=rf"(?s)on cpu1:\njob {job}\+1 .* is COMPLETING.*nothing but slurmd"):
        jobs.end_jobs(slurm, asked_again_s=2)
    slurm.run("srun", "--nodelist=cpu1", "/bin/true")


def test_nodes_are_hosts_of_their_own(slurm_hosts: SlurmCluster) -> None:
    cluster = slurm_hosts
    program = "echo $(hostname) $(readlink /proc/self/ns/net /proc/self/ns/uts) $(ip -4 -br addr show eth0)"
    said = cluster.run("srun", "--partition=all", "--nodes=4", "--label", "bash", "-c", program).splitlines()
    rows = [line.split()[1:] for line in said]
    assert {row[0]: row[-1] for row in rows} == {name: f"{cluster.address(name)}/24" for name in cluster.nodes}
    namespaces = {part for row in rows for part in row[1:3]}
    assert len(namespaces) == 8
    assert not namespaces & {os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/uts")}


def test_a_local_folder_is_another_one_on_each_node(slurm_hosts: SlurmCluster) -> None:
    cluster = slurm_hosts
    cluster.run(
        "srun", "-wgpu1,cpu1", "-N2", "bash", "-c", f"hostname > {cluster.local}/name; hostname > /dev/shm/name"
    )
    for node in ("gpu1", "cpu1"):
        assert cluster.run_on(node, "cat", cluster.local / "name", "/dev/shm/name").split() == [node, node]
    assert not list(cluster.local.iterdir())


def test_a_het_job_runs_over_both_partitions(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "het.sh"
    script.write_text(
        f"""#!/bin/bash
#SBATCH --partition=gpu --nodes=1 --gres=gpu:2 --output={tmp_path}/out
#SBATCH hetjob
#SBATCH --partition=cpu --nodes=2 --ntasks-per-node=1
srun --het-group=0 --nodes=1 --ntasks=1 --gres=gpu:2 bash -c 'echo 0 $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'
unset CUDA_VISIBLE_DEVICES
srun --het-group=1 --nodes=2 --ntasks=2 bash -c 'echo 1 $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'
"""
    )
    job = slurm.run("sbatch", "--parsable", "--wait", script).strip()
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["0 gpu1 0,1", "1 cpu1", "1 cpu2"]
    if not slurm.has_accounting:
        with pytest.raises(ClusterError):
            slurm.run("sacct", "--jobs", job)
        return

    def recorded() -> str:
        return slurm.run("sacct", "--noheader", "--parsable2", "--jobs", job, "--format=JobID,State,NodeList")

    rows = [
        *(f"{job}+0|COMPLETED|gpu1", f"{job}+0.batch|COMPLETED|gpu1", f"{job}+0.0|COMPLETED|gpu1"),
        *(f"{job}+1|COMPLETED|cpu[1-2]", f"{job}+1.1|COMPLETED|cpu[1-2]"),
    ]
    wait_until(lambda: recorded().splitlines() == rows, f"sacct to say {rows}", deadline_s=20, poll_s=0.2)


def test_two_jobs_on_a_node_get_other_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    jobs = []
    for number in range(2):
        script = (
            f"echo $CUDA_VISIBLE_DEVICES; touch {tmp_path}/up{number}; until [ -e {tmp_path}/go ]; do sleep 0.1; done"
        )
        jobs.append(submit(slurm, script, tmp_path / str(number), "--nodelist=gpu2", "--gres=gpu:2", "--partition=gpu"))
    wait_until(lambda: len(list(tmp_path.glob("up*"))) == 2, "both jobs to run", deadline_s=30)
    (tmp_path / "go").touch()
    assert sorted(read(tmp_path / str(number)).strip() for number in range(2)) == ["0,1", "2,3"]
    for job in jobs:
        wait_for(slurm, job, "COMPLETED")


def test_nodes_reach_each_other_and_the_login_side(slurm_hosts: SlurmCluster) -> None:
    cluster = slurm_hosts
    greet = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(9).decode())"
    with socket.create_server((cluster.login_address, 0)) as server:
        port = str(server.getsockname()[1])

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert (
            cluster.run("srun", "-wgpu1", sys.executable, "-c", greet, cluster.login_address, port).strip() == "hello"
        )
        thread.join(5)
    listen = (
        "import socket; s = socket.create_server(('', 7070)); s.settimeout(20); c, _ = s.accept(); c.sendall(b'hello')"
    )
    server_on_node = subprocess.Popen([*cluster.enter("cpu1"), sys.executable, "-c", listen])
    try:
        wait_until(lambda: ":7070" in cluster.run_on("cpu1", "ss", "-ltn"), "cpu1 to listen", deadline_s=10)
        address = cluster.address("cpu1")
        assert cluster.run("srun", "-wgpu2", sys.executable, "-c", greet, address, "7070").strip() == "hello"
        assert server_on_node.wait(10) == 0
    finally:
        server_on_node.kill()
        server_on_node.wait()


def test_a_cut_node_is_out_of_reach_until_it_is_restored(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    cluster = slurm_hosts
    ping = ("ping", "-c1", "-W1", cluster.address("cpu2"))
    log = tmp_path / "beats"
    job = submit(cluster, f"for i in $(seq 600); do echo $i >> {log}; sleep 0.1; done", tmp_path / "out", "-wcpu2")
    wait_until(lambda: read(log), "the job's first beat", deadline_s=30)
    cluster.cut("cpu2")
    try:
        with pytest.raises(ClusterError):
            cluster.run_on("gpu1", *ping)
        before = len(read(log))
        wait_until(lambda: len(read(log)) > before, "the job to run on alone", deadline_s=5)
    finally:
        cluster.restore("cpu2")

    def answers() -> bool:
        with suppress(ClusterError):
            cluster.run_on("gpu1", *ping)
            return True
        return False

    wait_until(answers, "the node to be within reach", deadline_s=30)
    cluster.wait_for_nodes("cpu2")
    assert state(cluster, job).startswith("RUNNING")
    cluster.run("scancel", job)
    wait_for(cluster, job, "CANCELLED")


def test_a_node_that_died_comes_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"srun bash -c 'echo $$ > {pid}; exec sleep 600'"
    job = submit(slurm, script, tmp_path / "out", "--nodelist=cpu1", "--no-requeue")
    wait_until(lambda: read(pid), "the job's step", deadline_s=30)
    task = processes.Process.of(int(read(pid)))
    assert task and task.alive()
    slurm.kill_slurmd("cpu1")
    assert not task.alive()
    wait_for(slurm, job, "NODE_FAIL")
    assert slurm.node_state("cpu1") == "down*"
    slurm.start_slurmd("cpu1")
    assert slurm.run("srun", "--nodelist=cpu1", "printenv", "SLURMD_NODENAME").strip() == "cpu1"


def test_steps_outlive_their_slurmd(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/up; until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo done"
    job = submit(slurm, script, tmp_path / "out", "--nodelist=cpu1")
    wait_until((tmp_path / "up").exists, "the job to run", deadline_s=30)
    slurm.kill_slurmd("cpu1", steps=False)
    slurm.start_slurmd("cpu1")
    (tmp_path / "go").touch()
    wait_for(slurm, job, "COMPLETED")
    assert read(tmp_path / "out") == "done\n"


@pytest.mark.parametrize("kill", [False, True])
def test_jobs_outlive_the_controller(slurm: SlurmCluster, tmp_path: Path, kill: bool) -> None:
    script = f"touch {tmp_path}/up; until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo done"
    job = submit(slurm, script, tmp_path / "out")
    wait_until((tmp_path / "up").exists, "the job to run", deadline_s=30)
    # What is killed loses what it has not yet saved, and it saves every few seconds.
    time.sleep(6 if kill else 0)
    slurm.stop_controller(kill=kill)
    try:
        assert (
            "DOWN"
            in subprocess.run(
                ["scontrol", "ping"], env=os.environ | slurm.env(), capture_output=True, text=True, check=False
            ).stdout
        )
    finally:
        slurm.start_controller()
    slurm.wait_for_nodes()
    (tmp_path / "go").touch()
    wait_for(slurm, job, "COMPLETED")


def test_accounting_goes_away_and_comes_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    if not slurm.has_accounting:
        pytest.skip("the small cluster has no accounting")
    slurm.stop_accounting()
    try:
        with pytest.raises(ClusterError, match="sacct"):
            slurm.run("sacct")
        job = submit(slurm, "true", tmp_path / "out", "--wait")
    finally:
        slurm.start_accounting()

    def recorded() -> bool:
        return "COMPLETED" in slurm.run("sacct", "--noheader", "--allocations", "--jobs", job, "--format=State")

    wait_until(recorded, f"the record of job {job}", deadline_s=60, poll_s=0.2)


def test_a_requeued_job_waits_as_long_as_a_credential_lives(slurm: SlurmCluster, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt"
    script = f"echo ${{SLURM_RESTART_COUNT:-0}} >> {attempt}; [ ${{SLURM_RESTART_COUNT:-0}} = 1 ] || sleep 600"
    job = submit(slurm, script, tmp_path / "out")
    wait_until(lambda: read(attempt), "the first attempt", deadline_s=30)
    slurm.run("scontrol", "requeue", job)
    begun = time.monotonic()
    wait_for(slurm, job, "PENDING BeginTime")
    wait_for(slurm, job, "COMPLETED")
    assert read(attempt).split() == ["0", "1"]
    assert REQUEUE_DELAY_S - 2 < time.monotonic() - begun < REQUEUE_DELAY_S + 10


def test_a_preempted_job_is_warned_and_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/warned; exit 0' USR2; touch {tmp_path}/up; while sleep 0.1; do :; done"
    options = ["--partition=preempt", "--nodelist=gpu1", "--gres=gpu:4", "--signal=B:USR2@60", "--time=60"]
    job = submit(slurm, script, tmp_path / "out", *options)
    wait_until((tmp_path / "up").exists, "the job to run", deadline_s=30)
    slurm.run("srun", "--partition=gpu", "--nodelist=gpu1", "--gres=gpu:4", "true")
    assert (tmp_path / "warned").exists()
    wait_for(slurm, job, "COMPLETED", "PENDING", "RUNNING")
    slurm.run("scancel", job)


def test_a_job_of_another_user_runs_as_that_user(slurm: SlurmCluster) -> None:
    if os.geteuid() != 0 or not slurm.nodes_are_hosts:
        pytest.skip("only root may run a command as another user")
    said = slurm.run("srun", "--chdir=/", "--partition=cpu", "id", "--user", user="nobody")
    assert int(said) == pwd.getpwnam("nobody").pw_uid
    with pytest.raises(ClusterError):
        slurm.run("cat", slurm.root / "munge" / "private" / "key", user="nobody")
    with pytest.raises(ClusterError):
        slurm.run("scontrol", "update", "NodeName=cpu1", "State=DOWN", "Reason=no", user="nobody")


def test_errors_show_the_logs(slurm: SlurmCluster) -> None:
    with pytest.raises(ClusterError, match=r"(?s)exit code 1\n.*invalid partition.*slurmctld\.log"):
        slurm.run("sbatch", "--partition=none", "--wrap=true")


def test_without_accounting_jobs_run_and_sacct_fails(slurm_without_accounting: SlurmCluster) -> None:
    cluster = slurm_without_accounting
    assert cluster.run("srun", "--partition=gpu", "--gres=gpu:1", "printenv", "CUDA_VISIBLE_DEVICES").strip() == "0"
    with pytest.raises(ClusterError, match="accounting storage is disabled"):
        cluster.run("sacct")


def test_down_leaves_nothing(slurm: SlurmCluster, new_cluster: NewCluster) -> None:
    """Beside a cluster that stays up, and with jobs that run."""
    seconds = 10**6 + os.getpid()
    asleep = f"sleep\0{seconds}"
    with new_cluster(slurm.variant) as other:
        root = other.root
        namespaces = {other.run_on(node, "readlink", "/proc/self/ns/net").strip() for node in other.nodes}
        step = f"srun --nodes=4 /bin/bash -c 'setsid sleep {seconds} >/dev/null 2>&1 & exec sleep {seconds}'"
        job = submit(other, step, Path("/dev/null"), "--nodes=4")
        wait_until(lambda: len(_mentioning(asleep)) == 8, f"the processes of job {job}", deadline_s=30)
        assert len(_links(root)) == (1 if other.nodes_are_hosts else 0)
        assert main(["status", "--root", str(root)]) == 0
        assert main(["down", "--root", str(root)]) == 0
    assert not root.exists()
    assert not _mentioning(str(root))
    assert not _mentioning(asleep)
    assert not _links(root)
    assert str(root) not in Path("/proc/mounts").read_text()
    if slurm.nodes_are_hosts:
        assert not any(processes.in_network_namespace(namespace) for namespace in namespaces)
    slurm.wait_for_nodes()


@pytest.mark.parametrize("second", ["", "rm: not permitted"])
def test_a_node_that_cannot_be_made(slurm_hosts: SlurmCluster, monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    """Its own error is the one that is raised, whatever happens while the rest is taken down, which leaves nothing."""
    root = Path(tempfile.mkdtemp(prefix="rlhpc-broken-", dir="/tmp"))
    cluster = SlurmCluster(root, "noaccounting")
    monkeypatch.setattr(hosts, "_SETUP", "echo no mount here >&2; exit 127")
    if second:
        monkeypatch.setattr(SlurmCluster, "_end_nodes", lambda self: (_ for _ in ()).throw(ClusterError(second)))
    with pytest.raises(ClusterError, match="no mount here") as caught:
        cluster.up()
    assert second in "".join(getattr(caught.value, "__notes__", []))
    monkeypatch.undo()
    cluster.down()
    assert not root.exists() and not _links(root) and not _mentioning(str(root))


def test_a_node_that_is_going_has_no_processes() -> None:
    """Its holder may have lost its namespaces and not its number."""
    child = subprocess.Popen(["true"])
    process = processes.Process.of(child.pid)
    assert process is not None
    child.wait()
    assert hosts.namespace(process) == ""


def test_a_node_that_is_not_made_yet_has_no_processes() -> None:
    """Its holder is still in this host's namespace, and everything here would be ended with the node."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = processes.Process.of(child.pid)
        assert process is not None and hosts.namespace(process) == ""
        child.kill()
    with pytest.raises(ClusterError, match="this host's own"):
        processes.in_network_namespace(processes.own_network_namespace())


def test_a_small_cluster_needs_no_root(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests show it: they run without root")
    root = Path("/tmp") / f"rlhpc-small-{os.getpid()}"
    repository = Path(__file__).parents[2]
    prefix = ["runuser", "--user=nobody", "--"]
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no /usr/bin/python3 for the user nobody")
    if subprocess.run([*prefix, "ls", repository], capture_output=True, check=False).returncode:
        pytest.skip(f"the user nobody may not read {repository}")

    def command(*argv: str) -> str:
        done = subprocess.run([*prefix, *argv], cwd=repository, capture_output=True, text=True, check=False, timeout=90)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Not this environment's Python, which may be in root's home.
    module = ["/usr/bin/python3", "-m", "tests.slurm.cluster"]
    try:
        assert (
            command(*module, "up", "--variant=small", f"--root={root}") == f"export SLURM_CONF={root}/etc/slurm.conf\n"
        )
        srun = ["env", f"SLURM_CONF={root}/etc/slurm.conf", "srun", "--chdir=/", "--partition=gpu", "--gres=gpu:2"]
        assert command(*srun, "/usr/bin/printenv", "CUDA_VISIBLE_DEVICES") == "0,1\n"
    finally:
        command(*module, "down", f"--root={root}")
    assert not root.exists()
    assert not _mentioning(str(root))


def _mentioning(text: str) -> list[str]:
    """Command lines, with their NUL bytes, of living processes that have `text` in them."""
    found = []
    for process in processes.every():
        command = processes.command_line(process.pid)
        if text in command and process.alive() and process.pid != os.getpid():
            found.append(command)
    return found


def _links(root: Path) -> list[str]:
    """The bridge of the cluster in `root`, which carries its name."""
    return [
        str(alias.parent)
        for alias in Path("/sys/class/net").glob("*/ifalias")
        if alias.read_text().strip() == str(root)
    ]
