"""Checks of a Slurm site. Each check turns collected facts into findings and runs no Slurm command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from rlhpc.jobs.doctor.probe_jobs import ProbeJob
from rlhpc.jobs.doctor.slurm_facts import (
    Finding,
    Level,
    Site,
    SiteNodeGroup,
    SlurmFacts,
    decide,
    gres_of,
    is_asleep,
    is_out_of_service,
    is_usable,
    names,
    seconds_of,
    version_of,
)
from rlhpc.jobs.slurm import minutes_of

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
_MIN_SLURM = (20, 11)
#: Versions that the tests run on (`tests/slurm/roots.sh`); docs/how-to/administer.md lists the differences.
TESTED_SLURM = ((22, 5), (24, 11), (26, 5))
_MIN_JOB_AGE_S = 120


def commands(find_program: Callable[[str], str | None]) -> Finding:
    missing_commands = [name for name in COMMANDS if not find_program(name)]
    return decide(
        "Slurm commands", ", ".join(COMMANDS),
        (len(missing_commands) == len(COMMANDS), "warn", "none here, so this machine alone was looked at",
         "on a cluster, call this on a login node (or load its slurm module)"),
        (missing_commands, "fail", f"not found: {', '.join(missing_commands)}", "put Slurm's bin folder on PATH"),
    )  # fmt: skip


def version(facts: SlurmFacts) -> Finding:
    output = facts.version.text or facts.config.get("SLURM_VERSION", "")
    version_number, version_text = version_of(output), (output.split() or [""])[-1]
    versions_text = ", ".join(f"{year}.{month:02}" for year, month in TESTED_SLURM)
    return decide(
        "Slurm version", f"{version_text}; rlhpc is tested with {versions_text}",
        (not version_number, "fail", facts.version.last_line, "sbatch --version should print it"),
        (version_number < _MIN_SLURM, "fail", version_text, "srun --overlap came with 20.11; ask for an upgrade"),
        (version_number < TESTED_SLURM[0], "warn", version_text,
         f"rlhpc is tested with {versions_text}; try a short run first"),
    )  # fmt: skip


def controller(slurm_facts: SlurmFacts) -> Finding:
    return decide(
        "Slurm controller", f"cluster {slurm_facts.config.get('ClusterName', '?')} answers",
        (
            slurm_facts.config_output.code, "fail", slurm_facts.config_output.last_line,
            "is slurmctld up, and SLURM_CONF right?",
        ),
    )  # fmt: skip


def partitions(slurm_facts: SlurmFacts, site: Site) -> Iterator[Finding]:
    """Checks that the site's partitions exist, are up, and have working nodes."""
    partition_names = ", ".join(record.get("PartitionName", "") for record in slurm_facts.partitions)
    for name in dict.fromkeys(group.partition for group in site.groups):
        labels = ", ".join(group.label for group in site.groups if group.partition == name)
        record, nodes = slurm_facts.partition(name), slurm_facts.nodes_of(name)
        partition_state = "UP" if record is None else record.get("State", "UP")
        unavailable_nodes = [node.get("NodeName", "?") for node in nodes if is_out_of_service(node)]
        summary = f"up; {len(nodes)} nodes, {sum(map(is_usable, nodes))} of them free"
        if num_asleep := sum(map(is_asleep, nodes)):
            summary += f", {num_asleep} asleep, which Slurm starts for jobs"
        yield decide(
            f"partition {name or '(default)'}", summary,
            (record is None and name is None, "fail", f"there is none; there are: {partition_names}",
             "name one in the site file"),
            (record is None, "fail", f"there is no such partition; there are: {partition_names}",
             f"correct partition of {labels} in the site file"),
            (partition_state != "UP", "fail", f"is {partition_state}",
             f"use another partition for {labels}, or wait until it is up"),
            (len(unavailable_nodes) == len(nodes), "fail", "no node of it works", "ask the site's administrators"),
            (unavailable_nodes, "warn", f"{summary}; out of service: {names(unavailable_nodes)}",
             "sinfo --list-reasons says why"),
        )  # fmt: skip


def accounts(slurm_facts: SlurmFacts, site: Site) -> Iterator[Finding]:
    """Checks that the site's account and QOS exist, if sacctmgr answers."""
    account_qos_pairs = sorted(
        {(group.account, group.qos) for group in site.groups if group.account or group.qos}, key=str
    )
    rows = [line.strip().split("|") for line in slurm_facts.associations.text.splitlines() if line.count("|") >= 2]
    accounts_text = ", ".join(sorted({row[0] for row in rows})) or "none"
    is_enforced = "associations" in slurm_facts.config.get("AccountingStorageEnforce", "").lower()
    severity: Level = "fail" if is_enforced else "warn"
    has_answered = slurm_facts.associations.code == 0
    for account, qos in account_qos_pairs:
        request_text = " ".join(filter(None, (account, f"with QOS {qos}" if qos else "")))
        matching_rows = [row for row in rows if account in (None, row[0])]
        levels = sorted({name for row in matching_rows for name in row[2].split(",") if name})
        yield decide(
            "account", request_text,
            (not has_answered, "warn", f"{request_text} could not be looked up: {slurm_facts.associations.last_line}",
             "a wrong one shows when a job is submitted"),
            (account and not matching_rows, severity, f"{account} is none of yours ({accounts_text})",
             "correct account in the site file"),
            (qos and qos not in levels, severity, f"{request_text}: that QOS is none of {', '.join(levels) or 'none'}",
             "correct qos in the site file"),
        )  # fmt: skip
    if has_answered and not account_qos_pairs and is_enforced and not rows:
        advice = "ask for an account and name it in the site file"
        yield Finding("fail", "account", "you have none, and jobs need one", advice)


def resources(slurm_facts: SlurmFacts, site: Site) -> Iterator[Finding]:
    """Checks that the partitions have nodes with the GPUs that the site file names."""
    for group in site.groups:
        nodes = slurm_facts.nodes_of(group.partition)
        if group.gres is None or not nodes:
            continue
        gpu_counts = [num_gpus for node in nodes if (num_gpus := group.matches(node.get("Gres", "")))]
        resource_fields = [gres[:2] for node in nodes for gres in gres_of(node.get("Gres", ""))]
        available_gres = sorted({":".join(filter(None, fields)) for fields in resource_fields})
        yield decide(
            f"GPUs of {group.label}",
            f"{group.gres}: {'/'.join(map(str, sorted(set(gpu_counts))))} a node, on {len(gpu_counts)} of {len(nodes)} nodes",
            (not gpu_counts, "fail", f"no node of partition {group.partition or '(default)'} has {group.gres}; its nodes "
             f"have: {', '.join(available_gres) or 'nothing of the kind'}", "correct gres_name in the site file"),
        )  # fmt: skip


def het_jobs(slurm_facts: SlurmFacts, refusal: str | None = None) -> Finding:
    """Checks heterogeneous jobs, which need backfill; `refusal` is the message if `sbatch --test-only` refused such a job."""
    scheduler, parameters = (
        slurm_facts.config.get("SchedulerType", ""),
        slurm_facts.config.get("SchedulerParameters", ""),
    )
    advice = "runs whose nodes are all alike work; for unlike nodes ask the administrators"
    is_site_error = re.search(r"account|partition|qos|node count|walltime|time limit", refusal or "", re.IGNORECASE)
    interval_match = re.search(r"bf_interval=(\d+)", parameters)
    interval_s = int(interval_match[1]) if interval_match else 30
    summary = f"allowed; started by backfill every {interval_s} s"
    return decide(
        "het jobs", summary,
        (scheduler != "sched/backfill", "fail",
         f"SchedulerType={scheduler or '?'}: only sched/backfill starts them", advice),
        (re.search(r"disable_het(ero)?_?(job_)?steps", parameters), "fail",
         f"steps in them are disabled (SchedulerParameters={parameters})", advice),
        (is_site_error, "fail", f"Slurm refused one: {refusal}",
         "the site file's values are at fault, not het jobs as such: see the lines on partition and account"),
        (refusal, "fail", f"Slurm refused one: {refusal}", advice),
        (interval_s > 300, "warn", summary, "they wait that long, even where nodes are free"),
    )  # fmt: skip


def requeue(facts: SlurmFacts, jobs: Iterable[ProbeJob], environ: Mapping[str, str], site: Site) -> Finding:
    """Checks that jobs that were submitted with --requeue may be requeued."""
    probe_flags = {job.requeue for job in jobs}
    default = facts.config.get("JobRequeue", "?")
    refusal = "disabled: a job submitted with --requeue got Requeue=0: "
    is_refused, is_allowed = "0" in probe_flags, "1" in probe_flags
    probe_text = "a job that asks for it may (Requeue=1 on the probe)" if is_allowed else (
        "no probe showed whether a job may ask"
    )  # fmt: skip
    return decide(
        "requeue", f"JobRequeue={default}" + (", Requeue=1 on the probe" if is_allowed else ""),
        (is_refused and "SBATCH_NO_REQUEUE" in environ, "fail", f"{refusal}SBATCH_NO_REQUEUE is set in this shell",
         "unset SBATCH_NO_REQUEUE"),
        (is_refused and "--no-requeue" in site.sbatch, "fail", f"{refusal}the site file has sbatch: --no-requeue",
         "remove it there"),
        (is_refused, "fail",
         f"{refusal}JobRequeue={default}, and Slurm took --requeue back (a submit plugin, perhaps)",
         "ask the administrators to allow it; until then give a job enough walltime, or runner.segments"),
        (default == "0", "warn", f"disabled by default (JobRequeue=0); {probe_text}",
         "rlhpc asks with --requeue; jobs of scripts of your own need it, too"),
    )  # fmt: skip


def _has_database(slurm_facts: SlurmFacts) -> bool:
    return slurm_facts.config.get("AccountingStorageType", "").endswith("slurmdbd")


def accounting(slurm_facts: SlurmFacts) -> Finding:
    return decide(
        "accounting", "sacct answers and counts GPUs",
        (not _has_database(slurm_facts), "warn",
         f"none (AccountingStorageType={slurm_facts.config.get('AccountingStorageType') or '?'})",
         "runs work; use profiles/slurm-no-accounting; reports have no GPU-hours"),
        (slurm_facts.accounting.code, "warn", f"sacct does not answer: {slurm_facts.accounting.last_line}",
         "runs go on; if it stays so, use profiles/slurm-no-accounting"),
        ("gres/gpu" not in slurm_facts.config.get("AccountingStorageTRES", ""), "warn",
         "sacct answers, but does not count GPUs", "ask for AccountingStorageTRES=gres/gpu"),
    )  # fmt: skip


def min_job_age(slurm_facts: SlurmFacts) -> Finding:
    age_text = slurm_facts.config.get("MinJobAge", "")
    min_age_s, has_database = seconds_of(age_text), _has_database(slurm_facts)
    return decide(
        "MinJobAge", age_text or "not told",
        (min_age_s is not None and min_age_s < _MIN_JOB_AGE_S, "warn" if has_database else "fail",
         f"{age_text}: Slurm forgets how a job ended before it is asked" + (", where sacct fails" if has_database else ""),
         f"ask for MinJobAge={_MIN_JOB_AGE_S} or more"),
    )  # fmt: skip


def _parse_minutes(time_text: str | None) -> int | None:
    """Returns a walltime in minutes; None if it is missing or unlimited."""
    try:
        return minutes_of(time_text) if time_text else None
    except ValueError:
        return None


def walltime(facts: SlurmFacts, site: Site) -> Iterator[Finding]:
    """Checks that the site's walltime is within the partition's limit, and that the signal's lead time fits the walltime."""
    lead_s = site.signal_lead_s
    for group in site.groups:
        record = facts.partition(group.partition)
        if record is None:
            continue
        max_time, default = record.get("MaxTime", "UNLIMITED"), record.get("DefaultTime", "NONE")
        requested_minutes, max_minutes = _parse_minutes(group.time), _parse_minutes(max_time)
        limit_minutes = requested_minutes or _parse_minutes(default) or max_minutes
        summary = f"{group.time or f'not set (the partition has {default})'}; at most {max_time}"
        yield decide(
            f"walltime of {group.label}", f"{summary}; told {lead_s} s before the end",
            (requested_minutes is not None and max_minutes is not None and requested_minutes > max_minutes, "fail", summary,
             f"lower time in the site file to {max_time}"),
            (limit_minutes is not None and lead_s > limit_minutes * 60 / 2, "fail",
             f"{summary}; signal_lead_s={lead_s} is more than half of it", "raise time or lower signal_lead_s"),
            (lead_s < 30, "warn", f"{summary}; signal_lead_s={lead_s}", "a save may take longer; raise it"),
            (group.time is None and default not in ("NONE", "UNLIMITED"), "warn", summary, "set time in the site file"),
        )  # fmt: skip


def preemption(slurm_facts: SlurmFacts, site: Site) -> Iterator[Finding]:
    has_user_signal = "preempt_send_user_signal" in slurm_facts.config.get("SlurmctldParameters", "")
    for name in dict.fromkeys(group.partition for group in site.groups):
        record = slurm_facts.partition(name) or {}
        preempt_mode = record.get("PreemptMode", "OFF")
        if preempt_mode == "OFF" or slurm_facts.config.get("PreemptType", "preempt/none").endswith("none"):
            continue
        grace_s = seconds_of(record.get("GraceTime", "0")) or 0
        summary = f"PreemptMode={preempt_mode}, GraceTime={grace_s}" + (
            ", preempt_send_user_signal" if has_user_signal else ""
        )
        yield decide(
            f"preemption in {name or '(default)'}", summary,
            (preempt_mode == "CANCEL", "warn", summary, "a preempted run ends; start it again with the same command"),
            (preempt_mode == "REQUEUE" and not (grace_s and has_user_signal), "warn",
             f"{summary}: a preempted run is not warned, and loses the steps since its last checkpoint",
             "save often (runner.save_interval), or ask for a GraceTime and preempt_send_user_signal"),
        )  # fmt: skip


def het_script(groups: Iterable[SiteNodeGroup]) -> str:
    """Returns a batch script for `sbatch --test-only` that requests two components."""
    group_options = []
    for group in groups:
        directive_keys = ("partition", "account", "qos", "constraint")
        group_options.append(
            " ".join(f"--{key}={option_value}" for key in directive_keys if (option_value := getattr(group, key)))
        )
    first_options, second_options = (*group_options, group_options[0])[:2]
    common_directives = "--nodes=1 --ntasks=1 --mem=500M --time=1"
    return (
        f"#!/bin/bash\n#SBATCH {common_directives} {first_options}\n#SBATCH hetjob\n"
        f"#SBATCH {common_directives} {second_options}\ntrue\n"
    )
