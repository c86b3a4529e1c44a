"""Every line that the doctor can print, over facts that vary: `python -m tests.unit.jobs.doctor.test_findings` writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhpc.jobs.doctor import Finding, render, slurm_checks
from rlhpc.jobs.doctor import node_checks as nodes
from rlhpc.jobs.doctor.probe_jobs import Probed, ProbeJob
from rlhpc.jobs.doctor.slurm_facts import CommandOutput, SiteNodeGroup
from tests.unit.jobs.doctor.cluster import FOLDERS, SPACE, facts, hello, probed, site
from tests.unit.jobs.doctor.test_node_checks import FINE

GOLDEN = Path(__file__).parent / "golden" / "findings.txt"
_REFUSED = CommandOutput(1, "", "Problem talking to the database")


def _slurm() -> Iterator[tuple[str, Any]]:
    """Yields a title and what a check of Slurm says."""
    ready = facts()
    for present in ((), ("sbatch", "srun"), slurm_checks.COMMANDS):
        yield (
            f"commands {len(present)}",
            slurm_checks.commands(lambda name, given=present: name if name in given else None),
        )
    for text in ("", "slurm 20.02.1", "slurm 21.08.8-2", "slurm 22.05.8", "slurm 26.11.0"):
        changed = replace(ready, version=CommandOutput(not text, text), config={})
        yield f"version {text}", slurm_checks.version(changed)
    yield "version by the controller", slurm_checks.version(replace(ready, version=_REFUSED))
    yield "controller", slurm_checks.controller(ready)
    yield "no controller", slurm_checks.controller(replace(ready, config_output=_REFUSED))
    groups = [
        SiteNodeGroup("a", "gpu"),
        SiteNodeGroup("b", "cpu"),
        SiteNodeGroup("c", "gpux"),
        SiteNodeGroup("d", "old"),
    ]
    yield "partitions", slurm_checks.partitions(ready, site(*groups, SiteNodeGroup("e")))
    bare = replace(ready, partitions=[{**row, "Default": "NO"} for row in ready.partitions])
    yield "no default partition", slurm_checks.partitions(bare, site(SiteNodeGroup("a")))
    for state in ("DOWN", "IDLE+POWERED_DOWN"):
        hosts = [{**node, "State": state} for node in ready.nodes]
        yield f"nodes {state}", slurm_checks.partitions(replace(ready, nodes=hosts), site())
    yield "partition without nodes", slurm_checks.partitions(replace(ready, nodes=[]), site())
    accounts = site(
        SiteNodeGroup("a", "gpu", "rlhpc", "long"), SiteNodeGroup("b", "gpu", "foo"), SiteNodeGroup("c", qos="none"),
        SiteNodeGroup("d", "gpu", "root", "long"), SiteNodeGroup("e", "gpu", "rlhpc"),
    )  # fmt: skip
    enforced = facts(AccountingStorageEnforce="associations,limits")
    for found in (ready, enforced, replace(ready, associations=_REFUSED)):
        yield "accounts", slurm_checks.accounts(found, accounts)
    for found in (ready, enforced, replace(enforced, associations=CommandOutput(0, ""))):
        yield "no account", slurm_checks.accounts(found, site())
    gres = [
        SiteNodeGroup(name, name, gres=f"gpu:{kind}") for name, kind in (("gpu", "fake"), ("gpu", "a100"), ("cpu", "x"))
    ]
    yield (
        "resources",
        slurm_checks.resources(ready, site(*gres, SiteNodeGroup("d", gres="gpu:a"), SiteNodeGroup("e", "x"))),
    )
    for changed in (
        {}, {"SchedulerType": "sched/builtin"}, {"SchedulerType": ""}, {"SchedulerParameters": "disable_hetero_steps"},
        {"SchedulerParameters": "bf_interval=600"}, {"SchedulerParameters": ""},
    ):  # fmt: skip
        yield f"het jobs {changed}", slurm_checks.het_jobs(facts(**changed), None)
    for words in ("Invalid partition", "no such feature"):
        yield f"het jobs {words}", slurm_checks.het_jobs(ready, words)
    for flag in ("", "0", "1"):
        job = replace(probed(hello("n1")).jobs[0], requeue=flag)
        for default in ("0", "1"):
            found = facts(JobRequeue=default)
            yield f"requeue {flag} {default}", slurm_checks.requeue(found, [job], {}, site())
        yield f"requeue {flag} shell", slurm_checks.requeue(ready, [job], {"SBATCH_NO_REQUEUE": "1"}, site())
        yield f"requeue {flag} site", slurm_checks.requeue(ready, [job], {}, site(sbatch=("--no-requeue",)))
    without = facts(AccountingStorageType="accounting_storage/none", MinJobAge="60 sec")
    for found in (ready, without, facts(AccountingStorageType=""), facts(AccountingStorageTRES="cpu", MinJobAge="60 sec"),
                  replace(facts(MinJobAge=""), accounting=_REFUSED)):  # fmt: skip
        yield "accounting", [*_lines(slurm_checks.accounting(found)), *_lines(slurm_checks.min_job_age(found))]
    times = [SiteNodeGroup(str(time), "gpu", time=time) for time in (None, "2-00:00:00", "3", "60", "UNLIMITED")]
    for lead in (120, 10, 40000):
        yield (
            f"walltime {lead}",
            slurm_checks.walltime(ready, site(*times, SiteNodeGroup("x", "x"), signal_lead_s=lead)),
        )
    timed = replace(
        ready, partitions=[{**row, "DefaultTime": "01:00:00", "MaxTime": "UNLIMITED"} for row in ready.partitions]
    )
    yield "walltime of the partition", slurm_checks.walltime(timed, site(*times))
    for mode in ("OFF", "REQUEUE", "CANCEL", "SUSPEND"):
        rows = [{**row, "PreemptMode": mode} for row in ready.partitions]
        for parameters in ("preempt_send_user_signal", ""):
            found = replace(facts(SlurmctldParameters=parameters), partitions=rows)
            yield f"preemption {mode} {parameters}", slurm_checks.preemption(found, site(SiteNodeGroup("a"), *groups))
    yield "no preemption", slurm_checks.preemption(facts(PreemptType="preempt/none"), site())
    yield "het script", [Finding("pass", "script", slurm_checks.het_script([*accounts.groups[:2]]))]


def _lines(result: Finding | Iterable[Finding]) -> list[Finding]:
    return [result] if isinstance(result, Finding) else list(result)


def _job(**changed: Any) -> ProbeJob:
    return replace(ProbeJob("cpu", ("cpu",), (), None, 0, 2, 2, job_id="7"), **changed)


def _nodes() -> Iterator[tuple[str, Any]]:
    """Yields a title and what a check of nodes says."""
    two = probed(hello("n1"), hello("n2"))
    none = Probed(Path("/runs"), [])
    jobs = [
        _job(error="sbatch: Invalid account"), _job(error="did not start within 60 s (Resources)", gres="gpu:2"),
        _job(error="its srun said: nothing"), _job(hello={"n1": hello("n1")}), _job(hello=two.hellos, partition=None),
    ]  # fmt: skip
    yield "started", nodes.job_starts(jobs)
    yield "unwritable folder", nodes.shared_folder(replace(none, folder_error="Permission denied"))
    yield "no nodes", [
        line for check in (nodes.shared_folder, nodes.ports, nodes.python, nodes.shared_memory, nodes.simulators, nodes.clocks,
                           nodes.limits) for line in _lines(check(none))
    ]  # fmt: skip
    canaries = [
        {"error": "no such file", "parent": True}, {"error": "no such file", "parent": False},
        {"ms": 1.0, "parent": True, "write_error": "Disk quota exceeded"}, {"ms": 1.0, "parent": True},
        {"ms": 1.0, "parent": True}, {"ms": 9.0, "parent": True},
    ]  # fmt: skip
    unshared = probed(*(hello(f"n{i}", canary=canary) for i, canary in enumerate(canaries)))
    unshared.jobs[0].canary_views["n3"] = {"error": "no such file"}
    unshared.jobs[0].peers["n4"]["second"] = {"error": "no such file"}
    yield "shared folder", [*_lines(nodes.shared_folder(two)), *_lines(nodes.shared_folder(unshared))]
    yield "slow folder", nodes.shared_folder(probed(hello("n1", canary={"ms": 4000.0, "parent": True})))
    for name in ("ib0", "eth0", None):
        yield (
            f"interface {name}",
            [*_lines(nodes.interface(two, site(interface=name), {})), *_lines(nodes.interface(none, site(), {}))],
        )
    fast = {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    yield "fast interface", nodes.interface(probed(*(hello(f"n{i}", interfaces=fast) for i in range(8))), site(), {})
    local = probed(hello("n1"), hello("n2"), reach={"ms": 1.0, "interface": "docker0", "address": "1.1.1.1"})
    yield (
        "local interface",
        [*_lines(nodes.interface(local, site(), {})), *_lines(nodes.interface(probed(hello("n1")), site(), {}))],
    )
    for reach in (
        {"ms": 1.0, "interface": "eth0", "address": "10.0.0.1", "interfaces": ["data0", "eth0"]},
        {"ms": 1.0, "interface": "eth0", "address": "10.0.0.1", "interfaces": []},
    ):
        found = probed(hello("n1"), hello("n2"), reach=reach)
        found.jobs[0].peers["n2"]["reach"]["n1"] = {**reach, "interface": "eth1"}
        yield (
            f"interfaces {reach['interfaces']}",
            [
                *_lines(nodes.interface(probed(hello("n1"), hello("n2"), reach=reach), site(), {})),
                *_lines(nodes.interface(found, site(), {})),
            ],
        )
    many = probed(*(hello(f"n{i}") for i in range(3)))
    many.jobs[0].peers["n0"]["reach"]["n2"] = {"ms": 1.0, "interface": "eth1", "address": "10.1.0.1"}
    yield "routes of a node", nodes.interface(many, site(), {})
    for value in ("ib0", "eth", "=eth", "^lo", "ib,eth0"):
        environ = {"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": "eth0"}
        yield f"inherited interface {value}", nodes.interface(two, site(), environ)
    yield from _steps_and_folders(two, none)
    closed = probed(hello("n1"), hello("n2"), reach={"error": "timed out"})
    yield "ports", [line for found in (two, closed, probed(hello("n1"))) for line in _lines(nodes.ports(found))]
    for gpus in (0, 1):
        found = probed(hello("n1", mask="7"), hello("n2"), hello("n3", mask="0,1"), hello("n4", mask=""), gpus=gpus)
        for environ in ({}, {"CUDA_VISIBLE_DEVICES": "7"}):
            yield f"masks {gpus} {environ}", nodes.gpu_masks(found, environ)
    yield "mask", [*_lines(nodes.gpu_masks(two, {})), *_lines(nodes.gpu_masks(probed(hello("n1"), gpus=1), {}))]
    for changed in (
        {}, {"nccl": None}, {"torch": None, "words": "Killed", "code": -9}, {"seen": None, "hung_s": 60.0}, {"seen": 1},
        {"seen": 0, "torch": "2.13.0+cpu", "cuda": None, "driver": ""}, {"seen": 0, "warning": "too old"},
        {"computes": None, "error": "RuntimeError: busy"}, {"vllm": None, "error": "ImportError: libcudart.so.13"},
        {"vllm": True}, {"nccl": False}, {"error": "RuntimeError: NCCL"},
        {"hung_s": 60.0, "code": None}, {"code": 1, "words": "aborted"},
    ):  # fmt: skip
        found = probed(hello("n1", mask="0,1"), gpus=2)
        absent = {key for key, value in changed.items() if value is None and key != "cuda"}
        found.jobs[0].torch["n1"] = {key: value for key, value in {**FINE, **changed}.items() if key not in absent}
        yield f"torch {changed}", nodes.gpus_in_torch(found, {})
    gpu = probed(hello("n1"), hello("n2", packages={"torch": False}), gpus=1)
    for environ in ({}, {"RLHPC_VIRTUAL_ACCELERATORS": "1"}):
        yield (
            f"torch {environ}",
            [*_lines(nodes.gpus_in_torch(gpu, environ)), *_lines(nodes.gpus_in_torch(two, environ))],
        )
    full, broken = {**SPACE, "free": 64 * 2**20}, {"error": "No such file or directory"}
    infiniband = {"ib0": "10.1.0.1"}
    poor = probed(
        hello("n1", packages={"rlhpc": False, "torch": False}, executable="python"),
        hello("n2", python=[3, 9, 1], executable="python"),
        hello("n3", space={**hello("n")["space"], "/dev/shm": full, "/tmp": full}),
        hello("n4", space={**hello("n")["space"], "/dev/shm": broken, "scratch": broken},
              vulkan={"loader": True, "drivers": []}),
        hello("n5", vulkan={"loader": False, "drivers": []}, limits={"nofile": 1024, "nproc": -1, "memlock": -1}),
        hello("n6", limits={"nofile": -1, "nproc": 100, "memlock": -1}, interfaces=infiniband),
        hello("n7", limits={"nofile": -1, "nproc": -1, "memlock": 65536}, interfaces=infiniband),
    )  # fmt: skip
    for found in (two, poor):
        yield "nodes", [
            *_lines(nodes.python(found, "python")), *_lines(nodes.shared_memory(found)), *_lines(nodes.limits(found)),
            *_lines(nodes.node_disks(found, site())), *_lines(nodes.node_disks(found, site(scratch="/fast"))),
            *_lines(nodes.simulators(found)),
        ]  # fmt: skip
    yield (
        "simulators of GPU nodes",
        nodes.simulators(replace(poor, jobs=[*poor.jobs, *probed(hello("g1"), gpus=1).jobs])),
    )
    for offsets in (
        {"n1": (0.2, 0.01), "n2": (-0.1, 0.01)},
        {"n1": (-40.0, 0.1), "n2": (6.0, 0.1)},
        {"n1": (-4.0, 0.1), "n2": (4.0, 0.1)},
    ):
        yield f"clocks {offsets}", nodes.clocks(Probed(Path("/runs"), [_job(offsets=offsets)]))
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "7", "SBATCH_PARTITION": "gpu", "SALLOC_QOS": "x"},
                    {"CUDA_VISIBLE_DEVICES": "7", "SLURM_JOB_ID": "1"}):  # fmt: skip
        yield f"environment {environ}", nodes.environment(environ)
    plugin = "snakemake-executor-plugin-slurm"
    for conf in (None, "/other/slurm.conf"):
        names = {"snakemake": "8.1", plugin: None, f"{plugin}-jobstep": "0.6.1", "submitit": None}
        yield f"packages {conf}", nodes.packages(names, conf)
    for status in (
        SPACE,
        {**SPACE, "inodes_free": 5},
        {**SPACE, "inodes": 0},
        {**SPACE, "writable": False},
        full,
        broken,
    ):
        yield "disk", nodes.disk("home", "/home/me", status)
    yield (
        "quotas",
        nodes.quotas(
            "Disk quotas for user me (uid 1000): \n"
            "     Filesystem   space   quota   limit   grace   files   quota   limit   grace\n"
            " server:/home 20400000*  20480000  20971520     0   12000  100000  110000       0\n"
            " server:/data 10  0  20971520     0   120000  0  110000       0\n server:/free 10 0 0 0 10 0 0 0\n"
        ),
    )


def _steps_and_folders(two: Probed, none: Probed) -> Iterator[tuple[str, Any]]:
    """Yields a title and what a check of steps, of their folders, of locks and of names says."""
    options = site(srun=("--network=x", "--foo"))
    refused = replace(two, jobs=[_job(hello=two.hellos, srun_error="srun: unrecognized option '--foo'")])
    for found in (two, refused, none):
        yield "srun options", [*_lines(nodes.srun_options(found, options)), *_lines(nodes.srun_options(found, site()))]
    gpus = probed(hello("n1", mask="0,1"), hello("n2", mask="0,1"), gpus=2)
    job = gpus.jobs[0]
    job.gres = "gpu:2"
    yield "overlapping steps", [*_lines(nodes.overlapping_steps(two)), *_lines(nodes.overlapping_steps(gpus))]
    job.second_steps["n2"] = {**job.second_steps["n2"], "mask": "2,3"}
    yield "other GPUs", list(nodes.overlapping_steps(gpus))
    del job.second_steps["n2"]
    job.second_step_error = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    yield "no second step", nodes.overlapping_steps(gpus)
    yield "no second step", nodes.overlapping_steps(replace(none, jobs=[_job(hello=two.hellos)]))
    other = {**FOLDERS, "/tmp": "44.1"}
    for batch, neighbour, second in (
        ({}, {}, FOLDERS), (FOLDERS, FOLDERS, FOLDERS), (FOLDERS, other, FOLDERS), (other, {}, FOLDERS),
        (FOLDERS, {}, {"/tmp": "44.1", "/dev/shm": "45.1"}),
    ):  # fmt: skip
        found = probed(hello("n1"), hello("n2"))
        found.jobs[0].batch_folders = {"n1": batch} if batch else {}
        found.jobs[0].neighbour_folders = {"n1": neighbour} if neighbour else {}
        found.jobs[0].second_steps["n2"]["folders"] = second
        yield "folders", nodes.meeting_folders(found)
    yield "no folders", [*_lines(nodes.meeting_folders(none)), *_lines(nodes.file_locks(none))]
    for errors in (("held", "held"), ("held", ""), ("", "Function not implemented"), (None, "held")):
        yield (
            f"locks {errors}",
            nodes.file_locks(probed(*(hello(f"n{i}", lock=error) for i, error in enumerate(errors)))),
        )
    yield "locks", nodes.file_locks(replace(two, lock_error="No locks available"))
    yield "locks", nodes.file_locks(replace(two, folder_error="Permission denied"))
    unknown = probed(hello("n1"), hello("n2"))
    for node, host, answer in (
        ("n1", "n2", {"error": "Name or service not known"}), ("n2", "n1", {"error": "Name or service not known"}),
        ("n2", "n2", {"addresses": ["127.0.1.1"]}),
    ):  # fmt: skip
        unknown.jobs[0].peers[node]["names"][host] = answer
    yield "names", [line for found in (two, unknown, none) for line in _lines(nodes.host_names(found))]


def findings() -> str:
    """Returns all lines, under a title for each case."""
    return "".join(f"## {title}\n{render(_lines(result))}\n\n" for title, result in (*_slurm(), *_nodes()))


def test_findings_are_worded_as_recorded() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    assert findings().replace(version, "PYTHON") == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(findings().replace(".".join(map(str, sys.version_info[:3])), "PYTHON"))
