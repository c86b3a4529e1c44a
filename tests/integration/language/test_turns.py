"""Trainer and engine on one accelerator in turn: never both at once, and nothing is lost to it (`turns.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra llm")
pytest.importorskip("deepspeed", reason="needs the extra deepspeed")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun

SHORT = ("runner.max_steps=4", "runner.save_interval=1", "data.prompts_per_step=4", "actor.global_batch_size=32")
STAGE_3 = "actor.deepspeed.zero_stage=3"
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

    def turns(self) -> list[str]:
        """Who held it, one after the other; `both` where two did at once."""
        held, seen = set[str](), list[str]()
        for line in self.ledger.read_text().splitlines():
            role, what, _ = line.split()
            held = held | {role} if what == "in" else held - {role}
            seen += ["both"] if len(held) > 1 else sorted(held)
        return seen


@pytest.mark.parametrize("backend", ["ParkingZero", "ParkingReplicas", "ParkingShards"])
def test_trainer_and_engine_never_hold_the_accelerator_at_once(backend: str, tmp_path: Path) -> None:
    """Checkpoints are written and read and weights sent while the trainer's memory is given away; and the engine's process
    dies while the trainer holds the accelerator."""
    given = (f"actor.training_backend=turns:{backend}", *([STAGE_3] if backend == "ParkingZero" else []))
    run = SharedRun(tmp_path / "turns", *given, RLHPC_TEST_KILL_AT="3", RLHPC_MAX_RESTARTS="1")
    assert "rollout[0] start again from global_step_2" in run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # The engine had the trainer's weights in each step, also in those after the checkpoint was read.
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    turns = run.turns()
    assert "both" not in turns
    # The start and five updates; one that parks is also woken to save, to load and to send.
    assert turns.count("rollout") >= 6 and turns.count("actor") >= 10
