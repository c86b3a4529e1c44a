"""A real Slurm for the tests of this folder, one a session. They are all marked `slurm`: `make test-slurm` runs them.

RLHPC_SLURM_ROOT=DIR uses the cluster that is up there and leaves it up, so that a test can be tried again at once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.extras import need_programs
from tests.slurm.cluster import SlurmCluster, Variant, best_variant, commands_of, missing
from tests.slurm.runs import SlurmRun


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session", autouse=True)
def virtual_accelerators() -> Iterator[None]:
    """The cluster's GPUs are numbers. For these tests alone: the others, too, load this file."""
    with pytest.MonkeyPatch.context() as patch:
        if "RLHPC_VIRTUAL_ACCELERATORS" not in os.environ:
            patch.setenv("RLHPC_VIRTUAL_ACCELERATORS", "1")
        yield


@pytest.fixture(autouse=True)
def no_command_waits() -> Iterator[None]:
    """When a test has ended, for whatever reason, nobody waits for its runs, on a cluster that is soon gone."""
    yield
    while SlurmRun.submitted:
        process = SlurmRun.submitted.pop()
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def nodes_are_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """A node that a test (or a starved machine) left unusable fails no test after it; what was wrong is in the log."""
    yield
    if "slurm" in request.fixturenames:
        cluster: SlurmCluster = request.getfixturevalue("slurm")
        for found in cluster.repair_nodes():
            warnings.warn(f"{request.node.name} left a node that Slurm does not use: {found}", stacklevel=1)


@contextmanager
def cluster_of(variant: Variant, *shared: Path, measures_energy: bool = False) -> Iterator[SlurmCluster]:
    need_programs(*commands_of(variant))
    if reason := missing(variant):
        pytest.skip(f"no Slurm for tests: {reason}")
    # Short, for UNIX sockets, and not under pytest's own folder, which other users may not enter.
    root = tempfile.mkdtemp(prefix="rlhpc-slurm-", dir="/tmp")
    cluster = SlurmCluster(root, variant, shared, measures_energy=measures_energy)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], object]:
    """A context manager that brings up another cluster, for a test that ruins it."""
    return lambda variant: cluster_of(variant, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster: full, or small where this user may make no hosts. What a test breaks it also repairs."""
    if root := os.environ.get("RLHPC_SLURM_ROOT"):
        yield SlurmCluster(root)
        return
    with cluster_of(best_variant(), tmp_path_factory.getbasetemp()) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_without_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster where sacct fails."""
    variant: Variant = "noaccounting" if not missing("noaccounting") else "small"
    with cluster_of(variant, tmp_path_factory.getbasetemp()) as cluster:
        yield cluster


@pytest.fixture
def slurm_with_energy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster whose accounting has the energy of nodes, by the counters in its folder `pm_counters`."""
    if reason := missing("full"):
        pytest.skip(f"energy is accounted where slurmdbd is: {reason}")
    with cluster_of("full", tmp_path_factory.getbasetemp(), measures_energy=True) as cluster:
        yield cluster


@pytest.fixture
def slurm_hosts(slurm: SlurmCluster) -> SlurmCluster:
    """`slurm`, where its nodes are hosts of their own."""
    if not slurm.nodes_are_hosts:
        pytest.skip("the nodes of the small cluster share this host's name and network")
    return slurm
