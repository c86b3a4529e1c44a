"""Energy by role and phase: shares that sum to the counters' totals, whatever ranks share them and when they report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.energy import EnergyLedger, EnergyShares, RunEnergy, energy_figures, energy_section, format_joules

WRAP = 1 << 64
J = 10**6


def record(group: str, rank: int = 0, *, host: str = "n1", card: str = "a", wraps_at: int = WRAP) -> dict[str, Any]:
    return {"group": group, "rank": rank, "host": host,
            "energy": {"counters": [["gpu", card, wraps_at]], "missing": {"cpu": "no RAPL"}}}  # fmt: skip


def test_two_roles_that_share_a_card_by_hand() -> None:
    """The card takes 100 W for 10 s: the actor works from 0 to 4, the rollout from 2 to 8, and nobody from 8 to 10."""
    ledger = EnergyLedger()
    ledger.add(record("actor"), "train", (0.0, [0], 4.0, [400 * J]))
    ledger.add(record("rollout"), "generate", (2.0, [200 * J], 8.0, [800 * J]))
    ledger.add(record("actor"), "sync", (10.0, [1000 * J], 10.0, [1000 * J]))
    shares = ledger.pop()
    assert shares.metrics() == {
        "energy/actor/train_gpu_j": 300.0,  # 2 s alone, and half of 2 s
        "energy/actor_gpu_j": 300.0,
        "energy/gpu_j": 1000.0,
        "energy/idle_gpu_j": 200.0,
        "energy/rollout/generate_gpu_j": 500.0,
        "energy/rollout_gpu_j": 500.0,
    }
    assert shares.seconds["gpu", "actor", "train"] == 3.0 and shares.seconds["gpu", "rollout", "generate"] == 5.0


def test_cards_of_several_hosts_are_counted_each() -> None:
    ledger = EnergyLedger()
    for host in ("n1", "n2"):
        ledger.add(record("actor", host=host), "train", (0.0, [5 * J], 1.0, [8 * J]))
    assert ledger.pop().metrics()["energy/gpu_j"] == 6.0


def test_nothing_is_attributed_while_a_rank_that_uses_the_card_is_busy() -> None:
    ledger = EnergyLedger()
    for group in ("actor", "rollout"):
        ledger.add(record(group), "init", (0.0, [0], 1.0, [1 * J]))
    ledger.add(record("actor"), "train", (1.0, [1 * J], 5.0, [9 * J]))
    busy = [("rollout", 0)]
    assert ledger.pop(busy).metrics()["energy/gpu_j"] == 1.0
    assert ledger.pop(busy).metrics() == {}
    ledger.add(record("rollout"), "generate", (1.0, [1 * J], 5.0, [9 * J]))
    assert ledger.pop().metrics() == {
        "energy/actor/train_gpu_j": 4.0, "energy/actor_gpu_j": 4.0, "energy/gpu_j": 8.0,
        "energy/rollout/generate_gpu_j": 4.0, "energy/rollout_gpu_j": 4.0,
    }  # fmt: skip


def test_a_counter_that_wraps_and_one_that_is_reset() -> None:
    ledger = EnergyLedger()
    ledger.add(record("env", wraps_at=1000), "step", (0.0, [900], 1.0, [100]))
    assert ledger.pop().microjoules["gpu", "env", "step"] == 200
    ledger = EnergyLedger()
    ledger.add(record("env"), "step", (0.0, [10**12], 1.0, [5]))
    ledger.add(record("env"), "step", (2.0, [6], 3.0, [10]))
    shares = ledger.pop()
    assert shares.microjoules["gpu", "env", "step"] == 4 and shares.num_resets["gpu"] == 1


def test_a_reading_that_is_a_little_older_than_its_time_takes_nothing_away() -> None:
    ledger = EnergyLedger()
    ledger.add(record("actor"), "train", (0.0, [0], 2.0, [200 * J]))
    ledger.add(record("rollout"), "generate", (0.0, [0], 2.0000001, [199 * J]))
    ledger.add(record("actor"), "train", (3.0, [300 * J], 3.0, [300 * J]))
    shares = ledger.pop()
    assert sum(shares.microjoules.values()) == 300 * J and shares.num_resets["gpu"] == 0


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_sum_to_what_the_counters_say(seed: int) -> None:
    """Ranks of random roles on random cards, whose calls overlap at will and are reported in several steps, in any order."""
    draw = random.Random(seed)
    cards = {f"card{k}": draw.randrange(10**6) for k in range(draw.randint(1, 3))}
    powers = {card: [draw.randint(0, 500) * 1000 + draw.randint(0, 7) for _ in range(400)] for card in cards}

    def value(card: str, tick: int) -> int:
        return cards[card] + sum(powers[card][:tick])

    ledger, totals, edges = EnergyLedger(), dict.fromkeys(cards, 0), {card: set[int]() for card in cards}
    reports: list[tuple[dict[str, Any], str, Any]] = []
    for rank in range(draw.randint(1, 6)):
        card, tick = draw.choice(sorted(cards)), 0
        while (tick := tick + draw.randint(0, 20)) < 380:
            end = tick + draw.randint(0, 19)
            named = record(draw.choice("ab") + str(rank), rank, card=card)
            reports.append((named, draw.choice("xyz"), (tick / 16, [value(card, tick)], end / 16, [value(card, end)])))
            edges[card] |= {tick, end}
            tick = end
    draw.shuffle(reports)
    for report in reports:
        ledger.add(*report)
    shares = ledger.pop()
    for card, ticks in edges.items():
        totals[card] = value(card, max(ticks)) - value(card, min(ticks)) if ticks else 0
    assert sum(shares.microjoules.values()) == sum(totals.values())
    span = sum((max(ticks) - min(ticks)) / 16 for ticks in edges.values() if ticks)
    assert sum(shares.seconds.values()) == pytest.approx(span)
    metrics = shares.metrics()
    roles = sum(v for name, v in metrics.items() if name.count("/") == 1 and name != "energy/gpu_j")
    assert roles == pytest.approx(metrics["energy/gpu_j"])


def test_a_call_is_credited_once_however_many_ranks_share_its_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 ranks in 64 roles on one counter, whose calls overlap: work grows with the calls, not with those at once."""
    credits = 0
    credit = EnergyShares.credit

    def counted(self: EnergyShares, *args: Any) -> None:
        nonlocal credits
        credits += 1
        credit(self, *args)

    monkeypatch.setattr(EnergyShares, "credit", counted)
    ledger = EnergyLedger()
    for rank in range(1024):
        start, end = rank / 1024, 2 + rank / 1024
        ledger.add(record(f"role{rank % 64}", rank), "step", (start, [int(start * J)], end, [int(end * J)]))
    shares = ledger.pop()
    assert credits <= 1024 + 1
    assert sum(shares.microjoules.values()) == int((2 + 1023 / 1024) * J)
    assert sum(shares.seconds.values()) == pytest.approx(2 + 1023 / 1024)


def test_the_account_of_a_run_goes_on_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    for start in range(2):
        energy = RunEnergy(path, is_continued=start > 0)
        row = energy.collect([(record("actor"), "train", (0.0, [0], 3600.0, [50 * J]))])
        assert row["energy/actor_gpu_j"] == 50.0
        energy.write([record("actor"), record("env") | {"energy": None}])
    content = json.loads(path.read_text())
    assert content["gpu"]["j"] == 100.0 and content["gpu"]["hours"] == pytest.approx(2.0)
    assert content["gpu"]["roles"]["actor"]["phases"]["train"] == {"j": 100.0, "hours": pytest.approx(2.0)}
    assert content["cpu"] is None and content["cpu_missing"] == {"no RAPL": ["actor"]} and content["gpu_missing"] == {}
    assert RunEnergy(path, is_continued=False).content()["gpu"] is None


def test_missing_counters_are_named_and_a_run_without_any_has_no_file(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    without = {"group": "env", "rank": 0, "host": "n", "energy": {"counters": [], "missing": {"cpu": "no RAPL"}}}
    RunEnergy(path, is_continued=False).write([without, {"group": "driver"}])
    assert not path.exists()
    failed = {"group": "actor", "rank": 0, "host": "n", "energy": {"counters": [], "missing": {"gpu": "no NVML"}}}
    RunEnergy(path, is_continued=False).write([without, failed])
    content = json.loads(path.read_text())
    assert content["gpu"] is None and content["gpu_missing"] == {"no NVML": ["actor"]}


def test_the_file_is_not_written_at_each_step(tmp_path: Path) -> None:
    path, energy = tmp_path / "energy.json", RunEnergy(tmp_path / "energy.json", is_continued=False)
    energy.collect([(record("actor"), "train", (0.0, [0], 1.0, [J]))])
    energy.write([], now=100.0)
    path.unlink()
    energy.write([], now=129.0)
    assert not path.exists()
    energy.write([], now=131.0)
    assert path.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"gpu": {"roles": {"a": {"phases": {"x": {"j": "many"}}}}}}', '{"gpu": null}']
)
def test_a_damaged_account_begins_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "energy.json"
    path.write_text(content)
    assert RunEnergy(path, is_continued=True).content()["gpu"] is None


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    energy = RunEnergy(tmp_path / "gone" / "energy.json", is_continued=False)
    energy.collect([(record("actor"), "train", (0.0, [0], 1.0, [J]))])
    energy.write([])
    assert not (tmp_path / "gone").exists()


GPU = {
    "j": 7200.0, "hours": 0.5,
    "roles": {
        "actor": {
            "j": 6000.0, "hours": 0.3, "phases": {"train": {"j": 5000.0, "hours": 0.2}, "sync": {"j": 1000.0, "hours": 0.1}},
        },
        "idle": {"j": 1200.0, "hours": 0.2, "phases": {"": {"j": 1200.0, "hours": 0.2}}},
    },
}  # fmt: skip


def run_with(folder: Path, **content: Any) -> RunPaths:
    (folder / "energy.json").write_text(json.dumps({"format": 1, **content}))
    return RunPaths(folder)


@pytest.mark.parametrize(
    ("metric", "unit"),
    [("rollout/samples", "responses"), ("rollout/env_steps", "environment steps"), ("train/tokens_total", "tokens")],
)
def test_energy_of_a_thousand_samples_by_hand(tmp_path: Path, metric: str, unit: str) -> None:
    paths = run_with(tmp_path, gpu=GPU, gpu_missing={})
    figures = energy_figures(paths, [{"step": 1, metric: 100}, {"step": 2, metric: 3600}])
    assert (figures.joules, figures.hours, figures.per_thousand, figures.unit) == (7200.0, 0.5, 2000.0, unit)
    assert figures.hours_per_thousand == pytest.approx(0.5 / 3.6)
    assert energy_figures(paths, []).per_thousand is None and figures.reason == ""


def test_what_is_missing_has_a_reason(tmp_path: Path) -> None:
    paths = run_with(tmp_path, gpu=None, gpu_missing={"no <NVML>": ["actor", "env"], "a counter was reset": []})
    figures = energy_figures(paths, [])
    assert figures.joules is None and figures.reason == "no <NVML> (actor, env); a counter was reset"
    assert "not measured: no &lt;NVML&gt; (actor, env)" in energy_section(paths, [])
    nothing = RunPaths(tmp_path / "none")
    assert energy_section(nothing, []) == "" and energy_figures(nothing, []).joules is None


def test_the_section_has_roles_and_phases(tmp_path: Path) -> None:
    html = energy_section(run_with(tmp_path, gpu=GPU, gpu_missing={"no NVML": ["env"]}, cpu=None), [])
    assert [html.count(text) for text in ("83.3%", "69.4%", "13.9%", "16.7%")] == [1, 1, 1, 1]
    assert "7.2 kJ in 0.5 hours" in html and "Not complete: no NVML (env)" in html
    assert html.index("actor") < html.index("idle") and "per 1000" not in html


def test_each_role_and_phase_has_its_energy_and_hours_of_a_thousand_samples(tmp_path: Path) -> None:
    paths = run_with(tmp_path, gpu=GPU, gpu_missing={}, cpu=None)
    html = energy_section(paths, [{"step": 2, "rollout/samples": 2000}])
    assert "3.6 kJ per 1000 responses, in 0.25 hours" in html
    assert "energy per 1000 responses" in html and "hours per 1000 responses" in html
    for text in ("3.0 kJ", "2.5 kJ", "500 J", "600 J", ">0.15<", ">0.1<", ">0.05<"):  # of 6000, 5000, 1000 and 1200 J
        assert text in html, text


@pytest.mark.parametrize(
    "gpu", [{}, {"j": "many"}, [], {"j": 1.0, "hours": 1.0, "roles": {"a": {"phases": {"x": {"j": None}}}}}]
)
def test_damaged_content_is_no_traceback(tmp_path: Path, gpu: Any) -> None:
    energy_section(run_with(tmp_path, gpu=gpu, gpu_missing=[]), [])


def test_units() -> None:
    assert [format_joules(j) for j in (None, 0.0, 12.34, 1500.0, 7.2e6)] == [
        "not measured", "0 J", "12.3 J", "1.5 kJ", "2.00 kWh",
    ]  # fmt: skip
