"""What a run's driver holds does not grow with the model: weights pass it by, in updates and in checkpoints."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun

from rlhpc.language.models.tiny import make_tiny_model

pytestmark = pytest.mark.long

#: MiB by which the peaks of two drivers may differ, whatever they drive.
NOISE = 10.0
SETTINGS = (
    "cluster.component_placement={actor: '0:0-1', rollout: '0'}", "actor.training_backend=fsdp", "runner.max_steps=2",
    "runner.save_interval=2", "runner.val_check_interval=-1", "data.prompts_per_step=2", "algorithm.group_size=2",
    "actor.global_batch_size=4", "rollout.max_new_tokens=4",
)  # fmt: skip


def _peak(process: subprocess.Popen[str]) -> float:
    """MiB that a process had resident at most, as long as it was there to be asked."""
    most, status = 0, Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text().splitlines()
        most = max([most, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
        time.sleep(0.02)
    assert process.returncode == 0, "".join(process.communicate())
    return most / 1024


@pytest.mark.long
def test_it_is_the_same_for_a_model_ten_times_as_large(tmp_path: Path) -> None:
    """The peaks of the run's own process, and of the one that exports its last checkpoint."""
    sizes, peaks = list[float](), list[list[float]]()
    for hidden in (256, 832):
        folder = tmp_path / str(hidden)
        make_tiny_model(folder / "model", hidden=hidden, layers=3)
        run = LanguageRun(folder, *SETTINGS, f"actor.model.model_path={folder / 'model'}", "actor.model.kwargs={}")
        peaks.append([_peak(run.start()), _peak(run.begin("convert", "--run", str(run.root)))])
        assert [row["step"] for row in run.rows()] == [1, 2]
        sizes.append((folder / "model/model.safetensors").stat().st_size / 2**20)
    print(sizes, peaks)
    assert sizes[1] > 10 * sizes[0] > 10 * NOISE / 2
    assert all(abs(large - small) < NOISE for small, large in zip(*peaks, strict=True)), peaks
