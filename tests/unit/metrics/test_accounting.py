"""Accounting from recorded sacct outputs (Slurm 22.05), and where sacct cannot help."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.elastic.records import HelperJobRecord, HelperRecord
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.accounting import (
    FIELDS,
    AccountingRow,
    JobIds,
    NoAccounting,
    _parse_bytes,
    _parse_seconds,
    account,
    job_ids,
    parse,
    query,
    write_accounting,
)
from rlhpc.metrics.provenance import placed_starts, read_provenance, record_placement, write_provenance
from rlhpc.runs.report import write_report

RECORDED = Path(__file__).parent / "sacct"
HET = {
    "actor": [{"rank": 0, "node_rank": 0, "accelerators": [0]}],
    "rollout": [{"rank": 0, "node_rank": 0, "accelerators": [1]}],
    "env": [{"rank": 0, "node_rank": 1, "accelerators": []}],
}
JOB = JobIds(("1",), submitted_ids=frozenset({"1"}))


def recorded(name: str) -> list[AccountingRow]:
    return parse((RECORDED / f"{name}.txt").read_text().splitlines())


def row(job: str, state: str = "COMPLETED", elapsed: int = 3600, start: int = 0, **cells: Any) -> str:
    """A line of sacct's; `start` is an hour of the day."""
    given = {
        "JobID": job,
        "State": state,
        "ElapsedRaw": elapsed,
        "Start": f"2026-03-01T{start:02d}:00:00",
        "End": "Unknown",
        "AllocCPUS": 4,
        "AllocTRES": "cpu=4,mem=4G,node=1",
        "TotalCPU": "02:00:00",
        "MaxRSS": "" if "." not in job else "1048576",
        "NodeList": "n1",
        "Partition": "gpu",
        "ConsumedEnergyRaw": "",
        "JobName": "rlhpc-run-0-abc",
        **cells,
    }
    return "|".join(str(given[name]) for name in FIELDS)


def test_a_het_job_that_was_requeued() -> None:
    found = account(recorded("het_requeued"), HET, JOB)
    assert found["complete"] and found["requeues"] == 1 and found["jobs"] == ["1"]
    assert list(found["roles"]) == ["actor", "rollout", "env", "driver"]
    actor, env, driver = (found["roles"][name] for name in ("actor", "env", "driver"))
    # 16 s and 15 s on one of the two GPUs that the step was given, with 2 cores
    assert actor["elapsed_s"] == 31 and actor["restarts"] == 1
    assert actor["gpu_hours"] == pytest.approx(31 / 3600, abs=1e-6)
    assert actor["cpu_hours"] == pytest.approx(62 / 3600, abs=1e-6)
    assert actor["cpu_hours_used"] == pytest.approx((4.298 + 3.798) / 3600, abs=1e-6)
    assert actor["idle_share"] == pytest.approx(1 - (4.298 + 3.798) / 62, abs=1e-4)
    assert actor["max_rss_bytes"] == 166006784
    assert env["gpu_hours"] == 0 and env["components"] == [1] and driver["max_rss_bytes"] == 230408192
    gpu, cpu = found["components"]
    assert gpu["gpu_hours"] == pytest.approx(2 * 50 / 3600, abs=1e-6)
    assert gpu["gpu_hours_used"] == pytest.approx(2 * 31 / 3600, abs=1e-6)
    assert gpu["cpu_hours"] == pytest.approx(200 / 3600, abs=1e-6)
    assert gpu["cpu_hours_used"] == pytest.approx((13.718 + 12.496) / 3600, abs=1e-6)  # as Slurm adds it up
    assert (gpu["memory_bytes"], gpu["restarts"], gpu["partitions"]) == (4 << 30, 1, ["gpu"])
    assert cpu["gpu_hours"] == cpu["gpu_hours_used"] == 0 and cpu["nodes"] == 1


def test_a_start_whose_time_was_lost() -> None:
    """A requeued job that is updated in that moment has neither Start nor Elapsed; its steps have."""
    found = account(recorded("het_start_lost"), HET, JobIds(("5",)))
    assert found["requeues"] == 1 and found["roles"]["actor"]["restarts"] == 1
    assert found["components"][0]["elapsed_s"] == found["components"][1]["elapsed_s"] == 18 + 32
    assert found["components"][0]["gpu_hours"] == pytest.approx(2 * 50 / 3600, abs=1e-6)


def test_what_still_runs_is_not_measured_yet() -> None:
    placement = {"actor": [{"rank": r, "node_rank": r, "accelerators": [0, 1]} for r in (0, 1)]}
    found = account(recorded("running"), placement, JobIds(("3", "4")))
    assert not found["complete"] and found["allocations"] == ["3", "4"] and found["requeues"] == 0
    actor = found["roles"]["actor"]
    assert actor["gpu_hours"] == pytest.approx(4 * 11 / 3600, abs=1e-6) and actor["restarts"] == 1
    assert actor["idle_share"] == pytest.approx(1 - 2.096 / 12, abs=1e-4)
    assert "rm" not in found["roles"] and found["roles"]["driver"]["idle_share"] is None
    assert found["components"][0]["nodes"] == 2  # the pending job has not cost anything
    assert set(account(recorded("running"), {}, JobIds(("3",)))["roles"]) == {"actor", "driver", "rm"}


def test_a_group_on_two_components() -> None:
    lines = [
        row("7+0", NodeList="g1"), row("7+0.batch", JobName="batch"),
        row("7+0.0", JobName="env"), row("7+0.3", JobName="env", start=2),
        row("7+1", NodeList="c[1-2]", AllocCPUS=8), row("7+1.1", JobName="env", NodeList="c[1-2]"),
    ]  # fmt: skip
    found = account(parse(lines), {"env": [{"rank": r, "node_rank": r} for r in range(3)]}, JobIds(("7",)))
    env = found["roles"]["env"]
    assert env["components"] == [0, 1] and env["restarts"] == 1
    assert env["elapsed_s"] == 2 * 3600, "hours in which it ran in both count once"
    assert env["cpu_hours"] == 3 * 4


def test_segments_are_not_restarts() -> None:
    lines = [row("7"), row("7.0", JobName="actor"), row("8", start=3), row("8.0", JobName="actor", start=3)]
    found = account(parse(lines), {}, JobIds(("7", "8")))
    assert found["requeues"] == 0 and found["components"][0]["restarts"] == 0
    assert found["components"][0]["elapsed_s"] == 7200


def test_a_site_that_does_not_count_gpus() -> None:
    lines = [row("7"), row("7.0", JobName="actor")]
    found = account(parse(lines), {"actor": [{"rank": 0, "node_rank": 0, "accelerators": [0, 1]}]}, JobIds(("7",)))
    assert found["components"][0]["gpu_hours"] is None and found["components"][0]["gpu_hours_used"] == 2
    assert found["roles"]["actor"]["gpu_hours"] == 2


def test_groups_that_share_a_gpu_hold_it_once() -> None:
    tres = {"AllocTRES": "cpu=4,gres/gpu:a100=1,mem=4G,node=1"}
    lines = [row("7", **tres), row("7.0", JobName="actor", **tres), row("7.1", JobName="rollout", **tres)]
    [part] = account(parse(lines), {}, JobIds(("7",)))["components"]
    assert part["gpu_hours"] == part["gpu_hours_used"] == 1


def test_a_site_that_measures_nothing() -> None:
    lines = [row("7"), row("7.0", JobName="actor", TotalCPU="00:00:00", MaxRSS="")]
    found = account(parse(lines), {}, JobIds(("7",)))["roles"]["actor"]
    assert found["idle_share"] is None and found["max_rss_bytes"] is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:13.718", 13.718), ("02:00:01", 7201), ("1-00:00:00", 86400), ("3-01:00:00.500", 262800.5), ("", 0), ("?", 0)],
)
def test_times(text: str, seconds: float) -> None:
    assert _parse_seconds(text) == pytest.approx(seconds)


def test_sizes_and_odd_lines() -> None:
    assert [_parse_bytes(t) for t in ("225008K", "2.5G", "166006784", "4000Mn", "0", "", "?")] == [
        225008 << 10, 5 << 29, 166006784, 4000 << 20, 0, None, None,
    ]  # fmt: skip
    assert parse(["", "sacct: warning", "12|RUNNING", row("5_[0-3]"), row("9.0", JobName="of no job")]) == []
    [start] = parse([row("5_3", NodeList="n[1-", State="OUT_OF_MEMORY"), row("5_3.extern", JobName="extern")])
    assert start.job_id == "5_3" and start.nodes == [] and len(start.steps) == 1


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    paths.submit.mkdir(parents=True)
    return paths


def submitted(run: RunPaths, segment: int, job_id: str, executor: str = "slurm", attempts: int = 1) -> None:
    record = {"executor": executor, "job_id": job_id, "token": f"t{segment}", "attempt": 1, "submitted": time.time()}
    (run.submit / f"segment_{segment}.json").write_text(json.dumps(record))
    rows = [{"number": n, "job_id": job_id, "step": n} for n in range(attempts)]
    (run.submit / f"segment_{segment}.attempts.json").write_text(json.dumps({"token": f"t{segment}", "attempts": rows}))


def test_the_jobs_of_a_run(run: RunPaths) -> None:
    submitted(run, 0, "12", attempts=3)
    submitted(run, 1, "15")
    submitted(run, 2, "4711", executor="local")
    (run.submit / "segment_1.claim.2.json").write_text(json.dumps({"executor": "slurm", "job_id": "15"}))
    starts = [
        {"started": "2026-03-01T10:00:00+00:00", "slurm": {"JOB_ID": "9", "JOB_NAME": "rlhpc-run-0-abc"}},
        {"started": "2026-03-02T10:00:00+00:00", "slurm": {"JOB_ID": "14", "JOB_NAME": "interactive"}},
        {"started": "nonsense", "slurm": {}},
    ]
    run.provenance.write_text(json.dumps({"segments": starts}))
    found = job_ids(run)
    assert found.ids == ("12", "15", "9", "14") and found.submitted_ids == {"12", "15", "9"} and found.num_drivers == 4
    assert found.since == pytest.approx(1772359200 - 3600)


def sacct(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A sacct that counts its calls."""
    command = folder / "bin" / "sacct"
    command.parent.mkdir(exist_ok=True)
    calls = folder / "calls"
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    return calls


def test_one_query_for_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunPaths) -> None:
    submitted(run, 0, "1", attempts=2)
    submitted(run, 1, "5")
    run.provenance.write_text(json.dumps({"placement": HET}))
    calls = sacct(tmp_path, monkeypatch, f"cat {RECORDED}/het_requeued.txt")
    text = write_report(run).read_text()
    [call] = calls.read_text().splitlines()
    assert "--jobs=1,5" in call and "--duplicates --parsable2" in call and "--starttime=20" in call
    found = json.loads(run.accounting.read_text())
    assert found["roles"]["actor"]["restarts"] == 1 and found["driver_starts"] == 3
    assert "<h2>Accounting</h2>" in text and "Requeued 1 time." in text and ">rollout</td>" in text


def test_a_failing_sacct_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'[ $(wc -l < {tmp_path}/calls) -lt 3 ] && echo "sacct: error: database" >&2 && exit 1\n'
    calls = sacct(tmp_path, monkeypatch, script + f"cat {RECORDED}/het_requeued.txt")
    pauses: list[float] = []
    assert len(query(JOB, sleep=pauses.append)) == 4
    assert len(calls.read_text().splitlines()) == 3 and pauses == [0.5, 1.0]


@pytest.mark.parametrize(
    ("script", "said", "calls"),
    [
        ("echo 'sacct: error: Problem talking to the database' >&2; exit 1", "Problem talking", 4),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", "storage is disabled", 1),
        ("echo 'sacct: fatal: Could not establish a configuration source' >&2; exit 1", "configuration source", 1),
        ("exit 0", "knows nothing of job 1", 1),
        ("exit 3", "exit code 3", 4),
        ("exec sleep 60", "did not answer within", 4),
    ],
)
def test_without_an_answer(
    script: str, said: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunPaths
) -> None:
    asked = sacct(tmp_path, monkeypatch, script)
    with pytest.raises(NoAccounting, match=said):
        query(JOB, timeout_s=0.2, sleep=lambda _: None)
    assert len(asked.read_text().splitlines()) == calls


def test_no_sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunPaths) -> None:
    """The report says so; numbers of an earlier report stay."""
    submitted(run, 0, "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    text = write_report(run).read_text()
    assert "Accounting is not available for job 1: there is no sacct on this machine." in text
    assert json.loads(run.accounting.read_text())["available"] is False
    sacct(tmp_path, monkeypatch, f"cat {RECORDED}/het_requeued.txt")
    assert "not available" not in write_report(run).read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    text = write_report(run).read_text()
    assert "Numbers of an earlier report" in text and ">actor</td>" in text
    assert json.loads(run.accounting.read_text())["available"] is True


def test_a_run_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunPaths) -> None:
    calls = sacct(tmp_path, monkeypatch, "exit 1")
    submitted(run, 0, "4711", executor="local")
    assert write_accounting(run) is None
    assert "Accounting" not in write_report(run).read_text()
    assert not run.accounting.exists() and not calls.exists()


def test_further_segments_are_no_restarts() -> None:
    """Three jobs after each other, in the last of which the driver started the group a second time."""
    names = {"JobName": "actor", "NodeList": "n1"}
    lines = [line for job in (9, 12, 17) for line in (row(str(job)), row(f"{job}.0", **names))]
    three = JobIds(("9", "12", "17"), submitted_ids=frozenset({"9", "12", "17"}))
    assert account(parse(lines), {}, three)["roles"]["actor"]["restarts"] == 0
    assert account(parse([*lines, row("17.1", **names)]), {}, three)["roles"]["actor"]["restarts"] == 1


def test_ranks_that_joined_are_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunPaths) -> None:
    """By the driver's own record, whatever sacct says."""
    submitted(run, 0, "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Ranks that joined" not in write_report(run).read_text()
    place = {"event": "joined", "group": "rollout", "node": "n7", "job": "9", "accelerators": 2}
    events = [
        {**place, "incarnation": "a", "rank": 1, "time": 3600.0},
        {"event": "works", "incarnation": "a", "time": 3700.0},
        {"event": "left", "incarnation": "a", "time": 9000.0, "why": "it was told to leave <now>"},
    ]
    run.attendance.write_text("".join(json.dumps(event) + "\n" for event in events))
    record = HelperRecord()
    record.jobs["9"] = HelperJobRecord("9", "rollout", 2, 3000.0, started=3600.0, finished=10800.0)
    record.write(run, "rollout")
    text = write_report(run).read_text()
    assert (
        "<h2>Ranks that joined</h2>" in text
        and "it was told to leave &lt;now&gt;" in text
        and ">rollout-1</td>" in text
    )
    joined = json.loads(run.accounting.read_text())["joined"]
    assert joined == {"ranks": 1, "rank_hours": 1.5, "accelerator_hours": 3.0, "jobs": ["9"], "budget_hours": 4.0}


def cards(actor: int, rollout: int) -> dict[str, Any]:
    """Ranks with an accelerator each: the actor's first."""
    every = range(actor + rollout)
    ranks = [{"rank": number, "node_rank": 0, "accelerators": [number]} for number in every]
    return {"actor": ranks[:actor], "rollout": ranks[actor:]}


def test_each_start_is_counted_with_its_own_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunPaths
) -> None:
    """Two jobs, of which the second is requeued: 4 + 4 accelerators, 6 + 2, and then 2 + 6, for an hour each."""
    card = {"AllocTRES": "cpu=4,gres/gpu=8,mem=4G,node=1"}
    lines = list[str]()
    for job, start, sizes in (("7", 0, (4, 4)), ("8", 2, (6, 2)), ("8", 5, (2, 6))):
        lines += [row(job, start=start, **card), row(f"{job}.batch", start=start, JobName="batch")]
        lines += [row(f"{job}.{n}", start=start, JobName=name, **card) for n, name in enumerate(("actor", "rollout"))]
        monkeypatch.setenv("SLURM_JOB_ID", job)
        write_provenance(run, {"lr": 1}, "rlhpc train x.yaml")
        record_placement(run, cards(*sizes))
        record = read_provenance(run)
        record["segments"][-1]["started"] = f"2026-03-01T{start:02d}:00:00"
        run.provenance.write_text(json.dumps(record))
    found = account(
        parse(lines), read_provenance(run)["placement"], JobIds(("7", "8")), placed_starts(read_provenance(run))
    )
    assert [found["roles"][name]["gpu_hours"] for name in ("actor", "rollout")] == [4 + 6 + 2, 4 + 2 + 6]
    assert found["components"][0]["gpu_hours_used"] == 24
    calls = sacct(tmp_path, monkeypatch, "cat <<'END'\n" + "\n".join(lines) + "\nEND")
    submitted(run, 0, "7")
    submitted(run, 1, "8")
    written = write_accounting(run)
    assert written is not None and calls.exists() and written["roles"] == found["roles"]


def test_starts_without_a_placement_of_their_own_have_the_last_one() -> None:
    lines = [row("7"), row("7.0", JobName="actor")]
    for said in ({}, {"segments": [{"started": "2026-03-01T00:00:00", "slurm": {"JOB_ID": "7"}}, {"slurm": None}]}):
        assert (
            account(parse(lines), cards(3, 0), JobIds(("7",)), placed_starts(said))["roles"]["actor"]["gpu_hours"] == 3
        )


def test_the_energy_of_a_component_is_that_of_the_step_that_lasts_as_long() -> None:
    lines = [
        row("1", ConsumedEnergyRaw="9"), row("1.batch", ConsumedEnergyRaw="5000"), row("1.0", ConsumedEnergyRaw="4000"),
        row("1.1", ConsumedEnergyRaw="3000"),
    ]  # fmt: skip

    def energy(*lines: str) -> tuple[Any, str]:
        [component] = account(parse(lines), {}, JOB)["components"]
        return component["energy_j"], component["energy_missing"]

    assert energy(*lines) == (5000, "")
    assert energy(*lines, row("1.extern", ConsumedEnergyRaw="5100")) == (5100, "")
    requeued = [row("1", start=2), row("1.batch", start=2, ConsumedEnergyRaw="70")]
    assert energy(*lines, *requeued) == (5070, "")
    two_nodes = [row("1", NodeList="n[1-2]"), row("1.batch", ConsumedEnergyRaw="5000"), row("1.0", NodeList="n[1-2]")]
    assert energy(*two_nodes) == (None, "no step lasts as long as the job on all of its nodes")
    for unmeasured in ("", "0", "18446744073709551614", "1.5K"):
        assert energy(row("1"), row("1.batch", ConsumedEnergyRaw=unmeasured)) == (
            None, "Slurm measures no energy here (AcctGatherEnergyType)",
        )  # fmt: skip
