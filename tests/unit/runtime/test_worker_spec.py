"""Specification of a rank: as JSON, through a pipe, its devices, and its end with the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.placement import PackedPlacementStrategy
from rlhpc.runtime.worker_spec import LEAVE, WorkerSpec, for_input, read_specs, spec_of, step_devices

SPEC = WorkerSpec(
    group="actor", rank=3, world_size=4, node="n1", node_rank=1, local_rank=1, local_world_size=2, accelerators=(0, 2),
    registry="/registry", token="abc", body=b"\x00\xffbody", log_out="out", log_err="err", env={"A": "1"},
    sys_path=["/code"], threads=2, driver={"tcp": "tcp://h:1"}, incarnation="i1",
)  # fmt: skip


def test_a_specification_is_read_back_from_json() -> None:
    assert WorkerSpec.from_json(SPEC.to_json()) == SPEC
    assert SPEC.name == "actor-3" and SPEC.identity == ("actor-3", "i1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", "3"), ("rank", True), ("rank", -1), ("rank", 1.0), ("bind_cores", 1), ("accelerators", "0"),
        ("accelerators", ["0"]), ("env", {"A": 1}), ("sys_path", [1]), ("driver", []), ("tcp_address", 7), ("body", "é"),
        ("wait_deadline", "soon"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(field: str, value: Any) -> None:
    text = json.dumps({**json.loads(SPEC.to_json()), field: value}).encode()
    with pytest.raises(ValueError):
        WorkerSpec.from_json(text)


def test_another_set_of_fields_is_refused() -> None:
    content = json.loads(SPEC.to_json())
    for changed in ({**content, "more": 1}, {k: v for k, v in content.items() if k != "rank"}, [1], "text"):
        with pytest.raises(ValueError, match="no specification of a rank"):
            WorkerSpec.from_json(json.dumps(changed).encode())


def test_the_specifications_of_thousands_of_ranks_take_little() -> None:
    """Each task of a step reads those of all tasks, so the bytes grow with the square of their number."""
    sizes = {
        ranks: len(for_input([replace(SPEC, rank=rank, log_out=f"/logs/actor-{rank}.out") for rank in range(ranks)]))
        for ranks in (1000, 2000)
    }
    assert (sizes[2000] - sizes[1000]) / 1000 < 40


def test_specifications_go_through_a_pipe() -> None:
    reading, writing = os.pipe()
    specs = [SPEC, replace(SPEC, rank=2, body=bytes(1 << 14))]
    os.write(writing, for_input(specs))
    assert read_specs(reading) == specs
    os.write(writing, for_input(specs)[:100])
    os.close(writing)
    with pytest.raises(EOFError, match="the driver was gone"):
        read_specs(reading)
    os.close(reading)


def test_a_rank_has_its_nodes_cores_and_its_groups_variables() -> None:
    groups = [{"label": "gpu", "node_ranks": "0-1", "env_vars": {"A": "group", "B": "group"}}]
    cluster = Cluster.local(2, 4, groups)
    placement = PackedPlacementStrategy(4, 5, node_group="gpu").place(cluster)[0]
    common: dict[str, Any] = {"registry": "r", "token": "t", "body": b""}
    spec = spec_of("env", placement, 2, cluster, {"B": "own"}, 10**6, Path("/logs"), **common)
    assert spec.name == "env-0" and spec.node_rank == 1 and spec.accelerators == (0,)
    assert spec.env["A"] == "group" and spec.env["B"] == "own"
    assert spec.threads == 1 and spec.log_out == "/logs/env-0.out"
    assert spec_of("env", placement, 2, cluster, {}, 1, Path("/logs"), **common).threads == cluster.nodes[1].cpus


@pytest.mark.parametrize(
    ("accelerators", "environ", "visible", "devices"),
    [
        ((), {"CUDA_VISIBLE_DEVICES": "0,1"}, ["0", "1"], ""),
        ((0, 2), {}, [], "0,2"),  # the site masks nothing
        ((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5,7"}, ["4", "5", "7"], "4,7"),
    ],
)
def test_devices_are_those_that_the_step_was_granted(
    accelerators: tuple[int, ...], environ: dict[str, str], visible: list[str], devices: str
) -> None:
    assert step_devices(replace(SPEC, accelerators=accelerators), environ, visible) == devices


def test_a_step_with_too_few_devices_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"actor-3 on node n1 is placed on accelerator 2, but the step was given 1 there"
    ):
        step_devices(SPEC, {"CUDA_VISIBLE_DEVICES": "4"}, ["4"])


WATCHING = """
import sys, time
from rlhpc.runtime.worker_spec import exit_on_input_end
exit_on_input_end(0, lambda: print("left", flush=True), lambda: len(sys.argv) > 1)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "words", "message"),
    [(b"", [], "the driver of this run is gone"), (LEAVE, [], "was told to leave"), (LEAVE, ["busy"], "is gone")],
    ids=["the driver ends", "told to leave", "ends by itself"],
)
def test_a_process_ends_with_its_input(sent: bytes, words: list[str], message: str) -> None:
    command = [sys.executable, "-c", WATCHING, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        output, errors = process.communicate(sent, timeout=60)
    assert process.returncode == 1 and output == b"left\n" and message in errors.decode()
