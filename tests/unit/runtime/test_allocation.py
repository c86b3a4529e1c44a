"""Allocation of a job: its GPUs, however they were requested."""

from __future__ import annotations

import pytest

from rlhpc.runtime.allocation import gpus_per_node


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ("NumNodes=2 NumTasks=2 TresPerJob=gres:gpu:4", 2),  # 22.05
        ("NumNodes=2 NumTasks=4 TresPerTask=gres:gpu:2", 4),
        ("NumNodes=2 NumTasks=2 TresPerNode=gres:gpu:3", 3),
        ("NumNodes=2 NumTasks=2 TresPerJob=gres/gpu:fake:4", 2),  # 24.11 and 26.05
        ("NumNodes=2 NumTasks=2 TresBind=gres/gpu:per_task:2 TresPerTask=cpu=2,gres/gpu=2", 2),
        ("NumNodes=2 NumTasks=2 TresPerNode=gres/gpu:3 TresPerTask=cpu=2", 3),
        ("NumNodes=2 NumTasks=2 TresPerJob=gres/gpu:3", None),
        ("NumNodes=2 NumTasks=2 TresPerTask=cpu=2", None),
    ],
)
def test_gpus_of_a_job_however_they_were_asked_for(fields: str, count: int | None) -> None:
    assert gpus_per_node(dict(field.split("=", 1) for field in fields.split())) == count
