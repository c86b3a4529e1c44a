"""Trainer and engine on one accelerator in turn: never both at once, and nothing is lost to it (`turns.py`)."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm", "deepspeed")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun

SHORT = ("runner.max_steps=4", "runner.save_interval=1", "data.prompts_per_step=4", "actor.global_batch_size=32")
TURNS = (
    "actor.offload_in_rollout=true", "rollout.rollout_backend=turns:SleepingEngine",
    "rollout.probe_interval=1",  # each version: the trainer also computes while it is away
)  # fmt: skip


class SharedRun(LanguageRun):
    """A run whose ledger says who held the accelerator."""

    def __init__(self, folder: Path, *overrides: str, **environment: str) -> None:
        super().__init__(folder, *SHORT, *TURNS, *overrides)
        self.ledger = folder / "ledger"
        self.environment |= {"RLHPC_TEST_LEDGER": str(self.ledger), **environment}

    def bytes_held(self) -> list[dict[str, int]]:
        """How many each role had of it, one after the other."""
        held, seen = {"actor": 0, "rollout": 0}, list[dict[str, int]]()
        for line in self.ledger.read_text().splitlines():
            role, nbytes, _ = line.split()
            held = held | {role: int(nbytes)}
            seen.append(held)
        return seen


BACKENDS = {
    "local": ("ParkingReplicas",), "fsdp": ("ParkingShards",), "zero 2": ("ParkingZero", "actor.deepspeed.zero_stage=2"),
    "zero 3": ("ParkingZero", "actor.deepspeed.zero_stage=3"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", BACKENDS)
def test_trainer_and_engine_never_hold_the_accelerator_at_once(kind: str, tmp_path: Path) -> None:
    """Checkpoints are written and read and weights sent while the trainer's memory is given away; and the engine's process
    dies while the trainer holds the accelerator."""
    backend, *more = BACKENDS[kind]
    given = (f"actor.training_backend=turns:{backend}", *more)
    run = SharedRun(tmp_path / "turns", *given, RLHPC_TEST_KILL_AT="3", RLHPC_MAX_RESTARTS="1")
    assert "rollout[0] start again from global_step_2" in run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    clock = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["time/turns_s"] < row["time/step_s"] for row in clock)
    # The engine had the trainer's weights in each step, also in those after the checkpoint was read.
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    held = run.bytes_held()
    most = {role: max(one[role] for one in held) for role in ("actor", "rollout")}
    assert most["rollout"] > 400_000 and most["actor"] > 4 * most["rollout"]  # weights; and averages and gradients, too
    together = max(sum(one.values()) for one in held)
    assert together < 1.01 * max(most.values()), "as much as the larger one has alone"
    # The start and five updates; one that parks is also woken to save, to load and to send.
    for role, times in (("actor", 10), ("rollout", 6)):
        came = [after for before, after in itertools.pairwise(held) if before[role] < 0.1 * most[role] < after[role]]
        assert len(came) >= times
