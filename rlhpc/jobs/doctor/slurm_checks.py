"""Checks of Slurm by its own answers: each turns collected facts into findings, and queries nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from rlhpc.jobs.doctor.probe_jobs import ProbeJob
from rlhpc.jobs.doctor.slurm_facts import (
    Finding,
    Site,
    SiteNodeGroup,
    SlurmFacts,
    gres_of,
    is_asleep,
    is_out_of_service,
    names,
    seconds_of,
    usable,
    version_of,
)
from rlhpc.jobs.slurm import minutes_of

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
_OLDEST_SLURM = (20, 11)
#: Versions that the tests run on (`tests/slurm/roots.sh`); docs/how-to/administer.md lists the differences.
TESTED_SLURM = ((22, 5), (24, 11), (26, 5))
_LEAST_JOB_AGE_S = 120


def commands(which: Callable[[str], str | None]) -> Finding:
    missing_commands = [name for name in COMMANDS if not which(name)]
    if len(missing_commands) == len(COMMANDS):
        return Finding(
            "warn", "Slurm commands", "none here, so this machine alone was looked at",
            "on a cluster, call this on a login node (or load its slurm module)",
        )  # fmt: skip
    if missing_commands:
        return Finding(
            "fail", "Slurm commands", f"not found: {', '.join(missing_commands)}", "put Slurm's bin folder on PATH"
        )
    return Finding("pass", "Slurm commands", ", ".join(COMMANDS))


def version(facts: SlurmFacts) -> Finding:
    version_number = version_of(facts.version.text or facts.config.get("SLURM_VERSION", ""))
    if not version_number:
        return Finding("fail", "Slurm version", facts.version.words, "sbatch --version should print it")
    version_text = (facts.version.text or facts.config.get("SLURM_VERSION", "")).strip().split()[-1]
    if version_number < _OLDEST_SLURM:
        return Finding("fail", "Slurm version", version_text, "srun --overlap came with 20.11; ask for an upgrade")
    tested_versions = ", ".join(f"{year}.{month:02}" for year, month in TESTED_SLURM)
    if version_number < TESTED_SLURM[0]:
        return Finding(
            "warn", "Slurm version", version_text, f"rlhpc is tested with {tested_versions}; try a short run first"
        )
    return Finding("pass", "Slurm version", f"{version_text}; rlhpc is tested with {tested_versions}")


def controller(facts: SlurmFacts) -> Finding:
    if facts.config_answer.code != 0:
        return Finding("fail", "Slurm controller", facts.config_answer.words, "is slurmctld up, and SLURM_CONF right?")
    return Finding("pass", "Slurm controller", f"cluster {facts.config.get('ClusterName', '?')} answers")


def partitions(facts: SlurmFacts, site: Site) -> list[Finding]:
    """Checks that the site's partitions exist, are up, and have working nodes."""
    lines = []
    partition_names = [record.get("PartitionName", "") for record in facts.partitions]
    for name in dict.fromkeys(group.partition for group in site.groups):
        subject = f"partition {name or '(default)'}"
        labels = ", ".join(group.label for group in site.groups if group.partition == name)
        record = facts.partition(name)
        if record is None and name is None:
            lines.append(
                Finding(
                    "fail",
                    subject,
                    f"there is none; there are: {', '.join(partition_names)}",
                    "name one in the site file",
                )
            )
        elif record is None:
            lines.append(
                Finding("fail", subject, f"there is no such partition; there are: {', '.join(partition_names)}",
                     f"correct partition of {labels} in the site file")
            )  # fmt: skip
        elif record.get("State", "UP") != "UP":
            lines.append(
                Finding(
                    "fail",
                    subject,
                    f"is {record['State']}",
                    f"use another partition for {labels}, or wait until it is up",
                )
            )
        else:
            lines.append(_nodes_line(subject, facts, name))
    return lines


def _nodes_line(subject: str, facts: SlurmFacts, name: str | None) -> Finding:
    nodes = facts.nodes_of(name)
    unavailable = [node.get("NodeName", "?") for node in nodes if is_out_of_service(node)]
    num_ready, num_asleep = sum(usable(node) for node in nodes), sum(is_asleep(node) for node in nodes)
    summary = f"up; {len(nodes)} nodes, {num_ready} of them free"
    if num_asleep:
        summary += f", {num_asleep} asleep, which Slurm starts for jobs"
    if len(unavailable) == len(nodes):
        return Finding("fail", subject, "no node of it works", "ask the site's administrators")
    if unavailable:
        return Finding(
            "warn", subject, f"{summary}; out of service: {names(unavailable)}", "sinfo --list-reasons says why"
        )
    return Finding("pass", subject, summary)


def accounts(facts: SlurmFacts, site: Site) -> list[Finding]:
    """Checks that the site's account and QOS exist, if sacctmgr answers."""
    account_qos_pairs = {(group.account, group.qos) for group in site.groups if group.account or group.qos}
    if facts.associations.code != 0:
        return [
            Finding("warn", "account", f"{_words(account, qos)} could not be looked up: {facts.associations.words}",
                 "a wrong one shows when a job is submitted")
            for account, qos in sorted(account_qos_pairs, key=str)
        ]  # fmt: skip
    rows = [line.strip().split("|") for line in facts.associations.text.splitlines() if line.count("|") >= 2]
    user_accounts = sorted({row[0] for row in rows})
    enforced = "associations" in facts.config.get("AccountingStorageEnforce", "").lower()
    lines = []
    for account, qos in sorted(account_qos_pairs, key=str):
        matching_rows = [row for row in rows if account in (None, row[0])]
        levels = sorted({name for row in matching_rows for name in row[2].split(",") if name})
        if account and not matching_rows:
            lines.append(
                Finding(
                    "fail" if enforced else "warn",
                    "account",
                    f"{account} is none of yours ({', '.join(user_accounts) or 'none'})",
                    "correct account in the site file",
                )
            )
        elif qos and qos not in levels:
            lines.append(
                Finding("fail" if enforced else "warn", "account", f"{_words(account, qos)}: that QOS is none of "
                     f"{', '.join(levels) or 'none'}", "correct qos in the site file")
            )  # fmt: skip
        else:
            lines.append(Finding("pass", "account", _words(account, qos)))
    if not account_qos_pairs and enforced and not rows:
        lines.append(
            Finding(
                "fail", "account", "you have none, and jobs need one", "ask for an account and name it in the site file"
            )
        )
    return lines


def _words(account: str | None, qos: str | None) -> str:
    return " ".join(filter(None, (account, f"with QOS {qos}" if qos else "")))


def resources(facts: SlurmFacts, site: Site) -> list[Finding]:
    """Checks that the partition has nodes with GPUs of the name that the site gives."""
    lines = []
    for group in site.groups:
        nodes = facts.nodes_of(group.partition)
        if group.gres is None or not nodes:
            continue
        matching_nodes = [node for node in nodes if group.matches(node.get("Gres", ""))]
        subject = f"GPUs of {group.label}"
        if matching_nodes:
            counts = sorted({group.matches(node["Gres"]) for node in matching_nodes})
            lines.append(
                Finding(
                    "pass",
                    subject,
                    f"{group.gres}: {'/'.join(map(str, counts))} a node, on {len(matching_nodes)} of {len(nodes)} nodes",
                )
            )
            continue
        available = sorted(
            {
                ":".join(filter(None, (name, gres_type)))
                for node in nodes
                for name, gres_type, _ in gres_of(node.get("Gres", ""))
            }
        )
        lines.append(
            Finding("fail", subject, f"no node of partition {group.partition or '(default)'} has {group.gres}; its nodes "
                 f"have: {', '.join(available) or 'nothing of the kind'}", "correct gres_name in the site file")
        )  # fmt: skip
    return lines


def het_jobs(facts: SlurmFacts, test: str | None = None) -> Finding:
    """Checks heterogeneous jobs, which need backfill; `test` is the message with which `sbatch --test-only` refused one."""
    scheduler, parameters = facts.config.get("SchedulerType", ""), facts.config.get("SchedulerParameters", "")
    subject, way_out = "het jobs", "runs whose nodes are all alike work; for unlike nodes ask the administrators"
    if scheduler != "sched/backfill":
        return Finding("fail", subject, f"SchedulerType={scheduler or '?'}: only sched/backfill starts them", way_out)
    if re.search(r"disable_het(ero)?_?(job_)?steps", parameters):
        return Finding("fail", subject, f"steps in them are disabled (SchedulerParameters={parameters})", way_out)
    if test:
        if re.search(r"account|partition|qos|node count|walltime|time limit", test, re.IGNORECASE):
            way_out = (
                "the site file's values are at fault, not het jobs as such: see the lines on partition and account"
            )
        return Finding("fail", subject, f"Slurm refused one: {test}", way_out)
    interval = re.search(r"bf_interval=(\d+)", parameters)
    summary = f"allowed; started by backfill every {interval[1] if interval else '30'} s"
    if interval and int(interval[1]) > 300:
        return Finding("warn", subject, summary, "they wait that long, even where nodes are free")
    return Finding("pass", subject, summary)


def requeue(facts: SlurmFacts, jobs: Iterable[ProbeJob], environ: Mapping[str, str], site: Site) -> Finding:
    """Checks that jobs may be requeued; they request it themselves with --requeue."""
    subject = "requeue"
    refused_jobs = [job for job in jobs if job.requeue == "0"]
    default = facts.config.get("JobRequeue", "?")
    if refused_jobs:
        if "SBATCH_NO_REQUEUE" in environ:
            reason, way_out = "SBATCH_NO_REQUEUE is set in this shell", "unset SBATCH_NO_REQUEUE"
        elif "--no-requeue" in site.sbatch:
            reason, way_out = "the site file has sbatch: --no-requeue", "remove it there"
        else:
            reason = f"JobRequeue={default}, and Slurm took --requeue back (a submit plugin, perhaps)"
            way_out = "ask the administrators to allow it; until then give a job enough walltime, or runner.segments"
        return Finding("fail", subject, f"disabled: a job submitted with --requeue got Requeue=0: {reason}", way_out)
    is_allowed = any(job.requeue == "1" for job in jobs)
    if default == "0":
        requeue_text = (
            "a job that asks for it may (Requeue=1 on the probe)"
            if is_allowed
            else "no probe showed whether a job may ask"
        )
        return Finding(
            "warn", subject, f"disabled by default (JobRequeue=0); {requeue_text}",
            "rlhpc asks with --requeue; jobs of scripts of your own need it, too",
        )  # fmt: skip
    return Finding("pass", subject, f"JobRequeue={default}" + (", Requeue=1 on the probe" if is_allowed else ""))


def accounting(facts: SlurmFacts) -> Finding:
    storage_type = facts.config.get("AccountingStorageType", "")
    if not storage_type.endswith("slurmdbd"):
        return Finding(
            "warn", "accounting", f"none (AccountingStorageType={storage_type or '?'})",
            "runs work; use profiles/slurm-no-accounting; reports have no GPU-hours",
        )  # fmt: skip
    if facts.accounting.code != 0:
        return Finding(
            "warn", "accounting", f"sacct does not answer: {facts.accounting.words}",
            "runs go on; if it stays so, use profiles/slurm-no-accounting",
        )  # fmt: skip
    if "gres/gpu" not in facts.config.get("AccountingStorageTRES", ""):
        return Finding(
            "warn", "accounting", "sacct answers, but does not count GPUs", "ask for AccountingStorageTRES=gres/gpu"
        )
    return Finding("pass", "accounting", "sacct answers and counts GPUs")


def min_job_age(facts: SlurmFacts) -> Finding:
    age_text = facts.config.get("MinJobAge", "")
    age = seconds_of(age_text)
    no_database = not facts.config.get("AccountingStorageType", "").endswith("slurmdbd")
    if age is not None and age < _LEAST_JOB_AGE_S:
        return Finding(
            "fail" if no_database else "warn", "MinJobAge",
            f"{age_text}: Slurm forgets how a job ended before it is asked" + ("" if no_database else ", where sacct fails"),
            f"ask for MinJobAge={_LEAST_JOB_AGE_S} or more",
        )  # fmt: skip
    return Finding("pass", "MinJobAge", age_text or "not told")


def _minutes(text: str | None) -> int | None:
    """Returns a walltime in minutes; None if it is missing or unlimited."""
    try:
        return minutes_of(text) if text else None
    except ValueError:
        return None


def walltime(facts: SlurmFacts, site: Site) -> list[Finding]:
    """Checks that the site's time fits the partition, and the lead of the signal fits the time."""
    lines = []
    for group in site.groups:
        record = facts.partition(group.partition)
        if record is None:
            continue
        subject, max_time = f"walltime of {group.label}", record.get("MaxTime", "UNLIMITED")
        default = record.get("DefaultTime", "NONE")
        requested_minutes, max_minutes = _minutes(group.time), _minutes(max_time)
        minutes = requested_minutes or _minutes(default) or max_minutes
        summary = f"{group.time or f'not set (the partition has {default})'}; at most {max_time}"
        if requested_minutes is not None and max_minutes is not None and requested_minutes > max_minutes:
            lines.append(Finding("fail", subject, summary, f"lower time in the site file to {max_time}"))
        elif minutes is not None and site.signal_lead_s > minutes * 60 / 2:
            lines.append(
                Finding("fail", subject, f"{summary}; signal_lead_s={site.signal_lead_s} is more than half of it",
                     "raise time or lower signal_lead_s")
            )  # fmt: skip
        elif site.signal_lead_s < 30:
            lines.append(
                Finding(
                    "warn",
                    subject,
                    f"{summary}; signal_lead_s={site.signal_lead_s}",
                    "a save may take longer; raise it",
                )
            )
        elif group.time is None and default not in ("NONE", "UNLIMITED"):
            lines.append(Finding("warn", subject, summary, "set time in the site file"))
        else:
            lines.append(Finding("pass", subject, f"{summary}; told {site.signal_lead_s} s before the end"))
    return lines


def preemption(facts: SlurmFacts, site: Site) -> list[Finding]:
    if facts.config.get("PreemptType", "preempt/none").endswith("none"):
        return []
    lines = []
    for name in dict.fromkeys(group.partition for group in site.groups):
        record = facts.partition(name)
        mode = (record or {}).get("PreemptMode", "OFF")
        subject = f"preemption in {name or '(default)'}"
        if record is None or mode == "OFF":
            continue
        grace = seconds_of(record.get("GraceTime", "0")) or 0
        has_user_signal = "preempt_send_user_signal" in facts.config.get("SlurmctldParameters", "")
        summary = f"PreemptMode={mode}, GraceTime={grace}" + (", preempt_send_user_signal" if has_user_signal else "")
        if mode == "CANCEL":
            lines.append(
                Finding("warn", subject, summary, "a preempted run ends; start it again with the same command")
            )
        elif mode == "REQUEUE" and not (grace and has_user_signal):
            lines.append(
                Finding("warn", subject, f"{summary}: a preempted run is not warned, and loses the steps since its last "
                     "checkpoint", "save often (runner.save_interval), or ask for a GraceTime and preempt_send_user_signal")
            )  # fmt: skip
        else:
            lines.append(Finding("pass", subject, summary))
    return lines


def het_script(groups: Iterable[SiteNodeGroup]) -> str:
    """Returns a batch script for `sbatch --test-only` that requests two components."""
    group_options = []
    for group in groups:
        keys = ("partition", "account", "qos", "constraint")
        group_options.append(
            " ".join(f"--{key}={option_value}" for key in keys if (option_value := getattr(group, key)))
        )
    first, second = (*group_options, group_options[0])[:2]
    common = "--nodes=1 --ntasks=1 --mem=500M --time=1"
    return f"#!/bin/bash\n#SBATCH {common} {first}\n#SBATCH hetjob\n#SBATCH {common} {second}\ntrue\n"
