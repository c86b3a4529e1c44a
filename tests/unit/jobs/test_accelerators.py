"""The number of accelerators that a submission requests, with a sinfo that prints what Slurm prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs import slurm
from rlhpc.jobs.accelerators import with_accelerators, with_likely_accelerators
from rlhpc.jobs.plan import build_plan
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError, PlacementError

Partitions = Callable[..., None]
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
SHIPPED = sorted(
    path for path in CONFIGS.rglob("*.yaml") if path.relative_to(CONFIGS).parts[0] not in ("base", "site", "sweeps")
)
ON = "cluster.component_placement={{'actor,rollout,env': '{}'}}"


@pytest.fixture
def partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Partitions:
    """Returns a function that defines what sinfo prints (partition|gres, the default with a star) on a login node."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script = (
        '#!/bin/sh\nfor word in "$@"; do case $word in --partition=*) '
        f'exec grep "^${{word#--partition=}}[*]\\\\?|" {tmp_path}/rows;; esac; done\nexec cat {tmp_path}/rows\n'
    )
    for name, text in (("sinfo", script), ("sbatch", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def define(*rows: str) -> None:
        slurm.forget_partitions()
        (tmp_path / "rows").write_text("".join(f"{row}\n" for row in rows))

    return define


def requested(*overrides: str) -> list[str | None]:
    """Returns the option `--gres` of each component of the job that a submission requests."""
    plan = build_plan(with_accelerators(load_config(QUICKSTART, overrides)), launcher="slurm")
    return [dict(component.options).get("gres") for component in plan.components]


@pytest.mark.parametrize(
    ("rows", "overrides", "gres"),
    [
        (["gpu*|gpu:a100:4"], [], "gpu:1"),
        (["gpu*|gpu:4", "cpu|(null)"], ["cluster.partition=cpu"], None),
        (["cpu*|(null)", "gpu|gpu:4"], ["cluster.partition=gpu", ON.format("0-1")], "gpu:2"),
        (["all*|(null)", "all*|gpu:2"], [], "gpu:1"),
        (["gpu*|gpu:4"], [ON.format("all")], "gpu:4"),
        (["gpu*|gpu:8"], ["cluster.num_nodes=2", ON.format("0-7")], "gpu:4"),
        (["gpu*|gpu:4"], ["cluster.component_placement={'actor,rollout,env': {node_group: node, placement: 0}}"], None),
        (["gpu*|gpu:4"], ["cluster.accelerators_per_node=2"], "gpu:2"),
        (["gpu*|gpu:4"], ["cluster.accelerators_per_node=0"], None),
        (["gpu*|gpu:4"], ["cluster.gres='gpu:a100:3'"], "gpu:a100:3"),
        (["gpu*|gpu:4"], ["cluster.gres_name='gpu:a100'"], "gpu:a100:1"),
    ],
)  # fmt: skip
def test_a_submission_requests_what_its_placement_needs(
    partitions: Partitions, rows: list[str], overrides: list[str], gres: str | None
) -> None:
    partitions(*rows)
    assert requested(*overrides) == [gres]


TWO_GROUPS = (
    "cluster.num_nodes=2",
    "cluster.node_groups=[{label: learn, partition: gpu, num_nodes: 1}, {label: play, partition: cpu, num_nodes: 1}]",
    "cluster.component_placement={actor: {node_group: learn, placement: 0-1}, "
    "'rollout,env': {node_group: play, placement: '0:0-1'}}",
)


def test_each_node_group_requests_the_gpus_of_its_partition(partitions: Partitions) -> None:
    partitions("cpu*|(null)", "gpu|gpu:4")
    assert requested(*TWO_GROUPS) == ["gpu:2", None]
    partitions("cpu*|gpu:1", "gpu|gpu:4")
    assert requested(*TWO_GROUPS) == ["gpu:2", "gpu:1"]


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([], [], r"cluster\.accelerators_per_node is null.*the default partition.*set cluster\.accelerators_per_node"),
        (["cpu*|(null)"], ["cluster.partition=gpu"], "partition gpu"),
        (["all*|gpu:2", "all*|gpu:4"], [ON.format("all")], "2 or 4: set cluster.accelerators_per_node"),
        (["cpu*|(null)"], TWO_GROUPS[:2], r"set cluster\.node_groups\[0\]\.accelerators_per_node"),
    ],
)
def test_what_neither_site_nor_slurm_says_is_refused(
    partitions: Partitions, rows: list[str], overrides: list[str], message: str
) -> None:
    partitions(*rows)
    cfg = load_config(QUICKSTART, overrides)
    with pytest.raises(ConfigError, match=message):
        with_accelerators(cfg)


def test_a_plan_notes_a_silent_slurm_unless_slurm_is_requested(
    partitions: Partitions, capsys: pytest.CaptureFixture[str]
) -> None:
    partitions()
    cfg = load_config(QUICKSTART)
    assert with_likely_accelerators(cfg, "auto") is cfg and with_likely_accelerators(cfg, "auto") is cfg
    [line] = capsys.readouterr().err.splitlines()
    assert "a submission would be refused: cluster.accelerators_per_node is null" in line
    assert with_likely_accelerators(cfg, "local") is cfg
    with pytest.raises(ConfigError, match=r"set cluster\.accelerators_per_node"):
        with_likely_accelerators(cfg, "slurm")


def test_more_than_the_nodes_have_is_a_broken_placement(partitions: Partitions) -> None:
    partitions("gpu*|gpu:4")
    with pytest.raises(PlacementError, match=r"the cluster has 4 accelerators \(0 to 3\)"):
        load_config(QUICKSTART, [ON.format("0-7")])


def test_in_a_job_and_on_this_machine_the_visible_ones_count(
    partitions: Partitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions("gpu*|gpu:4")
    cfg = load_config(QUICKSTART)
    assert with_accelerators(cfg, "local") is cfg
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert with_accelerators(cfg) is cfg


def test_the_site_file_has_precedence(partitions: Partitions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partitions("gpu*|gpu:4")
    (tmp_path / "mine.yaml").write_text("cluster: {accelerators_per_node: 2}\n")
    monkeypatch.setenv("RLHPC_SITE", str(tmp_path / "mine.yaml"))
    assert requested() == ["gpu:2"]


@pytest.mark.parametrize("num_visible", [1, 8])
@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_configuration_uses_the_visible_gpus(
    config: Path, num_visible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_visible))))
    # iql reads a buffer that another run leaves
    overrides = ["algorithm.demo_buffer.load_path=."] if config.stem == "iql" else []
    placements = build_plan(load_config(config, overrides), launcher="local").placements
    assert any(rank.accelerators for ranks in placements.values() for rank in ranks)
