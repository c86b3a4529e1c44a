"""A network that others use, too: the step page of a run on two hosts names it, and its advice makes steps shorter."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bottlenecks import advised, assert_advice_helps, named, step_s
from tests.extras import need_programs

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SlurmRun

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]

#: Speed of the contended cable, and number of transfers of others that never end.
RATE, NUM_OTHERS = "50mbit", 3
CONFIG = """
defaults: [{root}/configs/base/ppo.yaml]
runner: {{max_steps: 10, save_interval: -1, trace: {{steps: "4-8"}}}}
algorithm: {{rollout_steps: 64}}
actor: {{model: {{hidden_sizes: [512, 512, 512]}}}}
rollout: {{weight_delta: "off"}}
env: {{train: {{env_id: CartPole-v1}}}}
cluster:
  num_nodes: 2
  accelerators_per_node: null
  node_groups:
    - {{label: gpu, het_component: 0, num_nodes: 1, accelerators_per_node: 1, cpus_per_node: 2, mem: 8G}}
    - {{label: cpu, het_component: 1, num_nodes: 1, accelerators_per_node: 0, cpus_per_node: 2, mem: 8G}}
  component_placement:
    actor: {{node_group: gpu, placement: 0}}
    rollout,env: {{node_group: cpu, placement: 0}}
"""
_SINK = """
import socket, threading
listener = socket.create_server((ADDRESS, 0))
print(listener.getsockname()[1], flush=True)
def read(connection):
    while connection.recv(1 << 16):
        pass
while True:
    threading.Thread(target=read, args=(listener.accept()[0],), daemon=True).start()
"""
_SOURCE = """
import socket
connection, content = socket.create_connection((ADDRESS, PORT)), bytes(1 << 16)
while True:
    connection.sendall(content)
"""


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


@contextlib.contextmanager
def contended(slurm: SlurmCluster, node: str) -> Iterator[None]:
    """Makes the way to a node a cable of `RATE`, and keeps it full of what a program outside the job sends there."""
    cable, address = slurm.cable(node), slurm.address(node)
    limit = ["root", "tbf", "rate", RATE, "burst", "64kb", "latency", "50ms"]
    with contextlib.ExitStack() as stack:
        subprocess.run(["tc", "qdisc", "replace", "dev", cable, *limit], check=True)
        stack.callback(subprocess.run, ["tc", "qdisc", "del", "dev", cable, "root"], check=False)
        sink = [*slurm.enter(node), sys.executable, "-c", _SINK.replace("ADDRESS", repr(address))]
        receiver = stack.enter_context(subprocess.Popen(sink, stdout=subprocess.PIPE, text=True))
        stack.callback(receiver.kill)
        assert receiver.stdout is not None
        source = _SOURCE.replace("ADDRESS", repr(address)).replace("PORT", receiver.stdout.readline().strip())
        for _ in range(NUM_OTHERS):
            sender = stack.enter_context(subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.DEVNULL))
            stack.callback(sender.kill)
        started, before = time.monotonic(), _sent_bytes(cable)
        time.sleep(2.0)
        rate = 8e-6 * (_sent_bytes(cable) - before) / (time.monotonic() - started)
        assert 30 < rate < 55, f"the others take {rate:.0f} Mbit/s of a cable of {RATE}"
        yield


def _sent_bytes(cable: str) -> int:
    return int(Path(f"/sys/class/net/{cable}/statistics/tx_bytes").read_text())


def test_it_is_named_and_the_advice_helps(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    need_programs("tc")
    nodes = [name for name in slurm_hosts.nodes if name not in slurm_hosts.gpu_nodes]  # Slurm chooses one of them

    def train(name: str, *overrides: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.yaml").write_text(CONFIG.format(root=ROOT))
        run = SlurmRun(slurm_hosts, folder, *overrides, config=folder / "run.yaml", light=True)
        run.finish(run.submit(), 300)
        return run.root

    free = train("free")
    assert "slow_network" not in named(free)
    with contextlib.ExitStack() as network:
        for node in nodes:
            network.enter_context(contended(slurm_hosts, node))
        slow = train("contended")
        causes = named(slow)
        assert "slow_network" in causes, causes
        assert causes["slow_network"].key == "runner.weight_sync_interval"
        helped = train("advised", advised(causes["slow_network"]))
    assert step_s(free) < 0.75 * step_s(slow)
    assert_advice_helps(slow, helped, causes["slow_network"])
    assert step_s(helped) < step_s(slow)
