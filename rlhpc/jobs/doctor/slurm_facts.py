"""Slurm facts of the doctor: queries to Slurm, and parsers of the answers."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhpc.runtime.cluster import read_key
from rlhpc.runtime.cluster_config import Key, SectionSource
from rlhpc.runtime.slurm import CommandOutput, ask
from rlhpc.runtime.text import format_names

Record = Mapping[str, str]


def parse_config(config_text: str) -> dict[str, str]:
    """Parses the output of `scontrol show config` into names and values."""
    assignments = (line.split("=", 1) for line in config_text.splitlines() if re.match(r"[A-Za-z]\S*\s*=", line))
    return {name.strip(): setting_value.strip() for name, setting_value in assignments}


def seconds_of(time_text: str) -> int | None:
    """Parses seconds such as `600 sec` into 600; returns None if there is no number."""
    match = re.match(r"\d+", time_text or "")
    return int(match[0]) if match else None


def version_of(version_text: str) -> tuple[int, ...]:
    """Parses a version such as `slurm-wlm 22.05.8` into (22, 5, 8); returns () without a version."""
    match = re.search(r"\d+(?:\.\d+)+", version_text)
    return tuple(int(digits) for digits in match[0].split(".")) if match else ()


def gres_of(text: str) -> list[tuple[str, str, int]]:
    """Parses a node's generic resources, such as `gpu:a100:4(S:0-1),nvme:1`, into (name, type, number)."""
    resources = []
    for gres_text in re.sub(r"\([^)]*\)", "", text or "").split(","):
        fields = gres_text.strip().split(":")
        if fields[0] and fields[0] != "null":
            num_gpus = int(fields[-1]) if len(fields) > 1 and fields[-1].isdigit() else 1
            resources.append((fields[0], fields[1] if len(fields) > 1 and not fields[1].isdigit() else "", num_gpus))
    return resources


@dataclass(frozen=True)
class SiteNodeGroup:
    """Node group of the site, with the options that request its nodes."""

    label: str = "cluster"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    time: str | None = None

    def matches(self, gres: str) -> int:
        """Returns the number of the group's GPUs that a node with these resources has."""
        name, gres_type = (*(self.gres or "gpu").split(":"), "")[:2]
        return sum(
            n
            for gres_name, node_gres_type, n in gres_of(gres)
            if gres_name == name and (not gres_type or gres_type == node_gres_type)
        )


@dataclass(frozen=True)
class Site:
    """Site description from a site file."""

    groups: tuple[SiteNodeGroup, ...] = (SiteNodeGroup(),)
    interface: str | None = None
    scratch: str | None = None
    setup: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    container_python: str | None = None
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    signal_lead_s: int = 120

    @classmethod
    def from_config(cls, section: SectionSource) -> Site:
        """Reads the section `cluster` of a configuration."""

        def make_group(raw_group: SectionSource) -> SiteNodeGroup:
            def text_of(key: Key) -> str | None:
                raw_value = read_key(raw_group, key, read_key(section, key))
                return None if raw_value is None else str(raw_value)

            gres = next(
                (gres_part for gres_part in (text_of("gres") or "").split(",") if gres_part.startswith("gpu")), None
            )
            gres_name = ":".join(
                gres_field for gres_field in (gres or text_of("gres_name") or "").split(":") if not gres_field.isdigit()
            )
            label = str(read_key(raw_group, "label", "cluster"))
            return SiteNodeGroup(
                label,
                text_of("partition"),
                text_of("account"),
                text_of("qos"),
                text_of("constraint"),
                gres_name or None,
                text_of("time"),
            )

        raw_groups = list(read_key(section, "node_groups", ())) or [None]
        return cls(
            groups=tuple(make_group(raw_group) for raw_group in raw_groups),
            interface=read_key(section, "interface"),
            scratch=read_key(section, "scratch"),
            setup=tuple(str(line) for line in read_key(section, "setup", ())),
            container=tuple(str(argument) for argument in read_key(section, "container", ())),
            container_python=read_key(section, "container_python"),
            sbatch=tuple(str(argument) for argument in read_key(section, "sbatch", ())),
            srun=tuple(str(argument) for argument in read_key(section, "srun", ())),
            signal_lead_s=int(read_key(section, "signal_lead_s", 120)),
        )


@dataclass(frozen=True)
class SlurmFacts:
    """Answers to one round of queries to Slurm."""

    version: CommandOutput
    config: Mapping[str, str]
    config_output: CommandOutput
    partitions: Sequence[Record]
    nodes: Sequence[Record]
    associations: CommandOutput
    accounting: CommandOutput

    @classmethod
    def gather(cls, user: str) -> SlurmFacts:
        config = ask("scontrol", "show", "config")
        if config.code != 0:
            no_answer = CommandOutput(1, "", "slurmctld does not answer")
            return cls(ask("sbatch", "--version"), {}, config, (), (), no_answer, no_answer)
        return cls(
            version=ask("sbatch", "--version"),
            config=parse_config(config.text),
            config_output=config,
            partitions=ask("scontrol", "--oneliner", "--all", "show", "partition").records,
            nodes=ask("scontrol", "--oneliner", "show", "node").records,
            associations=ask(
                "sacctmgr", "--noheader", "--parsable2", "show", "association", f"user={user}",
                "format=Account,Partition,QOS",
            ),
            accounting=ask("sacct", "--noheader", "--parsable2", "-X", "--format=JobID,State"),
        )  # fmt: skip

    def partition(self, name: str | None) -> Record | None:
        """Returns the partition with this name, or the default partition if the name is None; None if it does not exist."""
        for record in self.partitions:
            if record.get("PartitionName") == name or (name is None and record.get("Default") == "YES"):
                return record
        return None

    def nodes_of(self, name: str | None) -> list[Record]:
        """Returns the nodes of a partition."""
        record = self.partition(name)
        partition_name = record.get("PartitionName", "") if record else ""
        return [
            node for node in self.nodes if partition_name and partition_name in node.get("Partitions", "").split(",")
        ]


#: States of a node that does not work, from slurm.conf(5) and sinfo(1) of Slurm 20.11 to 26.05.
_OUT_OF_SERVICE = frozenset(
    [
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "ERROR",
        "INVAL",
        "INVALID",
        "INVALID_REG",
        "UNKNOWN",
        "FUTURE",
    ]
)
#: States of a node that is switched off to save power, or not rented yet; Slurm starts the node for a job.
_ASLEEP = frozenset(["POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP", "POWER"])
#: States of a node that is currently unavailable for other reasons.
_UNAVAILABLE = frozenset(["MAINT", "MAINTENANCE", "RESERVED", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "BLOCKED"])


def state_words(node: Record) -> frozenset[str]:
    """Splits a node's state, such as `IDLE+CLOUD+POWERED_DOWN` or `DOWN*+DRAIN`, into its words; a star is NOT_RESPONDING."""
    state_text = node.get("State", "").upper()
    flags = {state_flag.rstrip("*~#!%$@^-") for state_flag in state_text.split("+")} - {""}
    return frozenset(flags | ({"NOT_RESPONDING"} if "*" in state_text else set()))


def is_asleep(node: Record) -> bool:
    """Returns whether the node is off or starting, and accepts jobs after its start."""
    flags = state_words(node)
    return bool(flags & _ASLEEP) and not flags & _OUT_OF_SERVICE


def is_out_of_service(node: Record) -> bool:
    """Returns whether an administrator must repair or release the node before it accepts jobs."""
    flags = state_words(node)
    return bool(flags & _OUT_OF_SERVICE) or ("NOT_RESPONDING" in flags and not is_asleep(node))


def is_usable(node: Record) -> bool:
    """Returns whether the node's state allows a job to start there at once."""
    flags = state_words(node)
    obstacles = flags & (_OUT_OF_SERVICE | _ASLEEP | _UNAVAILABLE | {"NOT_RESPONDING"})
    return bool(flags & {"IDLE", "MIXED"}) and not obstacles


Level = Literal["pass", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("pass", "warn", "fail")
_WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        level: `fail` if runs cannot work; `warn` for a disadvantage, or for a check that was not possible; otherwise `pass`.
        check: Subject of the check.
        result: Observation.
        advice: Advice to the user; empty if the check passed.
    """

    level: Level
    check: str
    result: str
    advice: str = ""


#: Row of a check's decision table: condition, level, result, advice.
FindingRow = tuple[object, Level, str, str]


def decide(subject: str, pass_result: str, *rows: FindingRow) -> Finding:
    """Returns the finding of the first row with a true condition; without such a row, `pass` with `pass_result`."""
    findings = (Finding(level, subject, result, advice) for is_failing, level, result, advice in rows if is_failing)
    return next(findings, Finding("pass", subject, pass_result))


def names(nodes: Iterable[str]) -> str:
    """Formats node names for a message: up to five names, and the number of the remaining nodes."""
    return format_names(sorted(set(nodes)), limit=5)


def worst_level(lines: Sequence[Finding]) -> Level:
    return max((line.level for line in lines), key=LEVELS.index, default="pass")


def render(lines: Sequence[Finding]) -> str:
    """Formats the findings as text, with a last line that counts the levels."""
    column = max((len(line.check) for line in lines), default=0) + 2
    indent = " " * (6 + column)
    wrapped_lines = []
    for line in lines:
        wrapped_lines += textwrap.wrap(
            line.result, _WIDTH, initial_indent=f"{line.level}  {line.check:<{column}}", subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if line.advice:
            wrapped_lines += textwrap.wrap(
                line.advice, _WIDTH, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    level_counts = Counter(line.level for line in lines)
    return "\n".join(
        [*wrapped_lines, "", f"{len(lines)} checks: " + ", ".join(f"{level_counts[level]} {level}" for level in LEVELS)]
    )


def to_json(lines: Sequence[Finding]) -> str:
    """Formats the findings as JSON: `{"level": …, "lines": [{"level", "what", "found", "do"}, …]}`."""
    findings = [{"level": line.level, "what": line.check, "found": line.result, "do": line.advice} for line in lines]
    return json.dumps({"level": worst_level(lines), "lines": findings}, indent=1, ensure_ascii=False)
