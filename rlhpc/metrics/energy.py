"""Energy of a run by role and phase, from the energy counters around the calls of its ranks, and its section of the report.

The readings of all ranks that can see a counter divide its time into intervals. The energy of an interval belongs to the calls
that were in progress, in equal parts, or to no role (idle). The parts of each counter therefore sum to its total.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.metrics.logger import series
from rlhpc.metrics.page import Cell, render_placeholder, table
from rlhpc.runtime.energy import EnergyReport
from rlhpc.runtime.files import is_number, replace_durably

#: Kinds of counters.
KINDS = ("gpu", "cpu")
#: Role of the time in which no rank that uses a counter had a call.
IDLE = "idle"
#: Microjoules by which a counter may fall back without being reset: two ranks read it at nearly the same moment.
_RESET_UJ = 10**9
#: Seconds between two writes of a run's account.
_WRITE_INTERVAL_S = 30.0
#: Group and rank.
_Rank = tuple[str, int]


#: Kind, role and phase.
_Key = tuple[str, str, str]
#: Call of a rank: its start, its end, and the key of its energy.
_Call = tuple[float, float, _Key]


@dataclass
class _CounterLog:
    """Readings of one counter that are not attributed yet.

    Attributes:
        readings: Time and value.
        calls: Calls that have not ended before the last attributed time.
        last_reports: Last time that each rank has reported.
        last_reading: Last attributed time, and value at that time.
    """

    kind: str
    wraps_at: int
    readings: list[tuple[float, int]] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    last_reports: dict[_Rank, float] = field(default_factory=dict)
    last_reading: tuple[float, int] | None = None


@dataclass
class EnergyShares:
    """Energy and time of each role and phase.

    Attributes:
        microjoules: (kind, role, phase) → energy; the role of idle time is `idle`, its phase "".
        seconds: (kind, role, phase) → time of counters, so for `gpu` the time of cards.
        num_resets: Kind → number of times that a counter was reset, such as by a new driver. The energy before is unknown.
    """

    microjoules: collections.Counter[_Key] = field(default_factory=collections.Counter)
    seconds: collections.defaultdict[_Key, float] = field(default_factory=lambda: collections.defaultdict(float))
    num_resets: collections.Counter[str] = field(default_factory=collections.Counter)

    def credit(self, key: _Key, energy_uj: int, duration_s: float) -> None:
        """Adds energy and time to a role's phase."""
        if energy_uj or duration_s:
            self.microjoules[key] += energy_uj
            self.seconds[key] += duration_s

    def add(self, added_shares: EnergyShares) -> None:
        self.microjoules.update(added_shares.microjoules)
        self.num_resets.update(added_shares.num_resets)
        for key, key_seconds in added_shares.seconds.items():
            self.seconds[key] += key_seconds

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a step, in joules: totals, roles, idle time, and the phases of each role."""
        joules_by_metric: collections.Counter[str] = collections.Counter()
        for (device_kind, role, phase), energy in self.microjoules.items():
            metric_names = [f"energy/{device_kind}_j", f"energy/{role}_{device_kind}_j"] + (
                [f"energy/{role}/{phase}_{device_kind}_j"] if phase else []
            )
            for name in metric_names:
                joules_by_metric[name] += energy
        return {name: energy / 1e6 for name, energy in sorted(joules_by_metric.items())}


class EnergyLedger:
    """Attribution of energy to the calls of ranks."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, str], _CounterLog] = {}

    def add(self, record: Mapping[str, Any], method: str, report: EnergyReport) -> None:
        """Adds the readings around a call of a rank.

        Args:
            record: The rank's record, with its group, rank, host and counters.
            method: Method of the call, which is its phase.
            report: The readings.
        """
        rank, host = (str(record["group"]), int(record["rank"])), str(record["host"])
        start_time, values_before, end_time, values_after = report
        counters = zip(record["energy"]["counters"], values_before, values_after, strict=True)
        for (device_kind, name, wraps_at), old_count, new_count in counters:
            log = self._logs.setdefault((host, name), _CounterLog(device_kind, wraps_at))
            log.last_reports[rank] = end_time
            log.readings += [(start_time, old_count), (end_time, new_count)]
            log.calls.append((start_time, end_time, (device_kind, rank[0], method)))

    def pop(self, busy_keys: Iterable[_Rank] = ()) -> EnergyShares:
        """Returns the energy since the last such call, as far as it can be attributed already.

        Args:
            busy_keys: Ranks that have a call in progress. Nothing after the last report of such a rank is attributed yet.
        """
        energy_shares, busy_ranks = EnergyShares(), set(busy_keys)
        for log in self._logs.values():
            end_time = min(
                (log.last_reports[rank] for rank in log.last_reports if rank in busy_ranks), default=float("inf")
            )
            _attribute_energy(log, end_time, energy_shares)
        return energy_shares


def _attribute_energy(log: _CounterLog, end_time: float, energy_shares: EnergyShares) -> None:
    """Adds the energy of the intervals up to a time to `energy_shares`, and removes intervals that are no longer needed.

    A reading costs the same however many calls are in progress: it adds to the sums that one call would have got since the
    beginning, and a call is credited once, with their difference between its start and its end.
    """
    log.readings.sort()
    log.calls.sort()
    pending_calls = collections.deque(log.calls)
    #: End, key, and both sums at the start of each call in progress, the earliest end first.
    active_calls: list[tuple[float, _Key, int, float]] = []
    sum_uj, sum_s, idle_uj, idle_s = 0, 0.0, 0, 0.0
    #: Energy that could not be divided into equal parts; the next interval gets it, or else the first call in progress.
    carry_uj = 0
    num_readings = 0
    for time, counter_value in log.readings:
        if time > end_time:
            break
        num_readings += 1
        if log.last_reading is None:
            log.last_reading = (time, counter_value)
            continue
        last_time, last_value = log.last_reading
        if time < last_time:  # a rank reported late, and the interval is attributed already
            continue
        energy = (counter_value - last_value) % log.wraps_at
        if energy > log.wraps_at // 2:  # read at nearly the same moment in another order, or the counter was reset
            energy, is_reset = 0, last_value - counter_value >= _RESET_UJ
            counter_value = counter_value if is_reset else last_value
            energy_shares.num_resets[log.kind] += is_reset
        if time > last_time:
            while pending_calls and pending_calls[0][0] <= last_time:
                _, call_end, key = pending_calls.popleft()
                if call_end > last_time:
                    heapq.heappush(active_calls, (call_end, key, sum_uj, sum_s))
            while active_calls and active_calls[0][0] <= last_time:
                _, key, start_uj, start_s = heapq.heappop(active_calls)
                energy_shares.credit(key, sum_uj - start_uj, sum_s - start_s)
        energy += carry_uj
        if active_calls:
            part_uj, carry_uj = divmod(energy, len(active_calls))
            sum_uj += part_uj
            sum_s += (time - last_time) / len(active_calls)
        else:
            idle_uj, idle_s, carry_uj = idle_uj + energy, idle_s + time - last_time, 0
        log.last_reading = (time, counter_value)
    for _, key, start_uj, start_s in active_calls:
        energy_shares.credit(key, sum_uj - start_uj + carry_uj, sum_s - start_s)
        carry_uj = 0
    energy_shares.credit((log.kind, IDLE, ""), idle_uj, idle_s)
    del log.readings[:num_readings]
    if log.last_reading is not None:
        last_time = log.last_reading[0]
        log.calls = [call for call in log.calls if call[1] > last_time]


# -- the run's account --------------------------------------------------------------------------------------------------


class RunEnergy:
    """Energy of a run over all its starts (`energy.json`), including repeated steps.

    Args:
        path: File of the account. It is written if a rank has a counter or an accelerator.
        is_continued: Whether this start continues the run; a fresh run begins a new account.
    """

    def __init__(self, path: Path, *, is_continued: bool) -> None:
        self._path, self._ledger, self._shares = path, EnergyLedger(), EnergyShares()
        self._missing_counters: dict[str, dict[str, list[str]]] = {device_kind: {} for device_kind in KINDS}
        self._written_at: float | None = None
        if is_continued:
            self._load_content(read_json_file(path) or {})

    def _load_content(self, content: Mapping[str, Any]) -> None:
        for device_kind in KINDS:
            for role, role_entry in ((content.get(device_kind) or {}).get("roles") or {}).items():
                for phase, phase_entry in (role_entry.get("phases") or {}).items():
                    if is_number(phase_entry.get("j")) and is_number(phase_entry.get("hours")):
                        self._shares.microjoules[device_kind, role, phase] += round(phase_entry["j"] * 1e6)
                        self._shares.seconds[device_kind, role, phase] += phase_entry["hours"] * 3600
            for reason, groups in (content.get(f"{device_kind}_missing") or {}).items():
                self._missing_counters[device_kind][str(reason)] = list(map(str, groups))

    def collect(
        self, answers: Iterable[tuple[Mapping[str, Any], str, EnergyReport]], busy_ranks: Iterable[_Rank] = ()
    ) -> dict[str, float]:
        """Attributes the energy around calls; returns the metrics of the step. They are empty if there are no counters.

        Args:
            answers: Records of ranks, methods of calls, and the readings around the calls.
            busy_ranks: Ranks that have a call in progress.
        """
        for record, method, report in answers:
            self._ledger.add(record, method, report)
        energy_shares = self._ledger.pop(busy_ranks)
        self._shares.add(energy_shares)
        return energy_shares.metrics()

    def write(self, records: Iterable[Mapping[str, Any]], now: float | None = None) -> None:
        """Replaces the file, at most every 30 seconds unless `now` is None; ignores a full disk, which must not stop training.

        Args:
            records: Records of all ranks, which have the reasons for missing counters.
            now: Monotonic time in seconds.
        """
        if now is not None and self._written_at is not None and now - self._written_at < _WRITE_INTERVAL_S:
            return
        self._written_at = now
        for record in records:
            for device_kind, reason in (record.get("energy") or {}).get("missing", {}).items():
                groups = self._missing_counters[device_kind].setdefault(reason, [])
                if record["group"] not in groups:
                    groups.append(record["group"])
        if self._shares.microjoules or self._missing_counters["gpu"]:
            with contextlib.suppress(OSError):
                if self._path.parent.is_dir():
                    replace_durably(self._path, json.dumps(self.content(), indent=1).encode() + b"\n")

    def content(self) -> dict[str, Any]:
        """Returns the content of the file. A kind that no rank could read is null, and `…_missing` has the reasons: reason →
        groups.
        """
        file_content: dict[str, Any] = {"format": 1}
        for device_kind in KINDS:
            reasons = dict(self._missing_counters[device_kind])
            if self._shares.num_resets[device_kind]:
                reasons["a counter was reset, so a part is unknown"] = []
            file_content[device_kind] = self._kind(device_kind)
            if not file_content[device_kind] and not reasons:
                reasons["no rank has an accelerator" if device_kind == "gpu" else "no rank has reported"] = []
            file_content[f"{device_kind}_missing"] = reasons
        return file_content

    def _kind(self, kind: str) -> dict[str, Any] | None:
        kind_keys = sorted(key for key in self._shares.microjoules if key[0] == kind)
        if not kind_keys:
            return None
        roles: dict[str, dict[str, Any]] = {}
        for key in kind_keys:
            phase_entry = {"j": self._shares.microjoules[key] / 1e6, "hours": self._shares.seconds[key] / 3600}
            roles.setdefault(key[1], {"phases": {}})["phases"][key[2]] = phase_entry
        for role in roles.values():
            role |= {
                unit_key: sum(phase_entry[unit_key] for phase_entry in role["phases"].values())
                for unit_key in ("j", "hours")
            }
        return {
            **{unit_key: sum(role[unit_key] for role in roles.values()) for unit_key in ("j", "hours")},
            "roles": roles,
        }


#: Metrics that count the samples of a run since it began, and their unit; a run has the first of them that its rows have.
_SAMPLES = (("rollout/samples", "responses"), ("rollout/env_steps", "environment steps"), ("train/samples", "samples"),
            ("train/tokens_total", "tokens"))  # fmt: skip
_TITLES = {"gpu": "accelerators", "cpu": "processors"}


@dataclass(frozen=True)
class EnergyFigures:
    """Energy of a run by one kind of counter.

    Attributes:
        joules, hours: Energy, and hours of the counters (of cards); None if unknown.
        per_thousand, hours_per_thousand: Joules, and hours of the counters, per thousand samples; None if unknown.
        unit: Kind of the samples.
        reason: Why figures are unknown, or what they leave out; "" if they are complete.
    """

    joules: float | None
    hours: float | None
    per_thousand: float | None
    hours_per_thousand: float | None
    unit: str
    reason: str


def energy_figures(paths: RunPaths, rows: Sequence[Mapping[str, Any]], kind: str = "gpu") -> EnergyFigures:
    """Returns the energy of a run. What was not measured is None, with the reason."""
    energy_content = read_json_file(paths.energy)
    if energy_content is None:
        return EnergyFigures(None, None, None, None, "", "no counter was read (energy.json)")
    kind_entry, reason = energy_content.get(kind), _format_reasons(energy_content, kind)
    total_j, total_hours = (
        float(kind_entry[unit_key]) if isinstance(kind_entry, dict) and is_number(kind_entry.get(unit_key)) else None
        for unit_key in ("j", "hours")
    )
    num_samples, sample_unit = _count_samples(rows)
    per_thousand, hours_per_thousand = (
        1000 * total / num_samples if total is not None and num_samples else None for total in (total_j, total_hours)
    )
    return EnergyFigures(total_j, total_hours, per_thousand, hours_per_thousand, sample_unit, reason)


def _format_reasons(energy_content: Mapping[str, Any], device_kind: str) -> str:
    missing_reasons = energy_content.get(f"{device_kind}_missing")
    reasons = missing_reasons if isinstance(missing_reasons, dict) else {}
    return "; ".join(
        f"{reason} ({', '.join(map(str, groups))})" if isinstance(groups, list) and groups else str(reason)
        for reason, groups in reasons.items()
    )


def _count_samples(rows: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    for name, sample_unit in _SAMPLES:
        if metric_values := series(rows, name)[1]:
            return metric_values[-1], sample_unit
    return 0.0, ""


def format_joules(energy_j: float | None) -> str:
    """Formats an energy with a fitting unit; "not measured" for None."""
    if energy_j is None:
        return "not measured"
    if energy_j >= 3.6e6:
        return f"{energy_j / 3.6e6:,.2f} kWh"
    return f"{energy_j / 1e3:.1f} kJ" if energy_j >= 1e3 else f"{energy_j:.3g} J"


def energy_section(paths: RunPaths, rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders a table of roles and phases for each kind of counter; "" for a run without `energy.json`."""
    energy_content = read_json_file(paths.energy)
    if energy_content is None:
        return ""
    html = []
    for device_kind in KINDS:
        kind_figures = energy_figures(paths, rows, device_kind)
        if kind_figures.joules is None:
            html.append(
                render_placeholder(
                    f"Energy of the {_TITLES[device_kind]}: not measured: {escape(kind_figures.reason)}."
                )
            )
            continue
        rate = (
            ""
            if kind_figures.per_thousand is None
            else f"; {format_joules(kind_figures.per_thousand)} per 1000 {kind_figures.unit}, in "
            f"{kind_figures.hours_per_thousand or 0.0:.3g} hours"
        )
        gap = f" Not complete: {kind_figures.reason}." if kind_figures.reason else ""
        legend = (
            f"Energy of the {_TITLES[device_kind]}: {format_joules(kind_figures.joules)} in "
            f"{kind_figures.hours or 0.0:.3g} hours of them"
            f"{rate}. Over all starts of the run. Calls that used one at the same time share its energy by time.{gap}"
        )
        num_thousands, sample_unit = _count_samples(rows)[0] / 1000, kind_figures.unit
        header = ["role", "phase", "energy", "share", "hours"]
        header += [f"energy per 1000 {sample_unit}", f"hours per 1000 {sample_unit}"] if num_thousands else []
        table_rows = _make_rows(energy_content[device_kind], kind_figures.joules, num_thousands)
        body = table(header, table_rows, text_columns={0, 1})
        html.append(f'<p class="legend">{escape(legend)}</p><div class="scroll">{body}</div>')
    return "".join(html)


def _make_rows(kind_entry: Mapping[str, Any], total_j: float, num_thousands: float) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    roles = sorted(
        (kind_entry.get("roles") or {}).items(), key=lambda named_role: (named_role[0] == IDLE, named_role[0])
    )
    for role, role_entry in roles:
        phases = [(phase, p) for phase, p in (role_entry.get("phases") or {}).items() if phase]
        for name, p in [("", role_entry), *(phases if len(phases) > 1 else [])]:
            if is_number(p.get("j")) and is_number(p.get("hours")):
                share_text = f"{p['j'] / total_j:.1%}" if total_j else "–"
                row: list[Cell] = [
                    role if not name else "",
                    name,
                    format_joules(p["j"]),
                    share_text,
                    f"{p['hours']:.4g}",
                ]
                if num_thousands:
                    row += [format_joules(p["j"] / num_thousands), f"{p['hours'] / num_thousands:.4g}"]
                rows.append(row)
    return rows
