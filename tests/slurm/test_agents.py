"""Agents on CPU nodes, the engine on another; what runs agents on one of these is lost in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.extras import need_extra

need_extra("llm")

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SlurmRun, kill, until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(900)]

CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{max_steps: 6, save_interval: 100, max_restarts: 3}}
cluster:
  num_nodes: 3
  accelerators_per_node: null
  node_groups:
    - {{label: gpu, het_component: 0, num_nodes: 1, accelerators_per_node: 1, cpus_per_node: 2, mem: 8G}}
    - {{label: cpu, het_component: 1, num_nodes: 2, accelerators_per_node: 0, cpus_per_node: 2, mem: 8G}}
  component_placement:
    'actor,rollout': {{node_group: gpu, placement: 0}}
    agent: {{node_group: cpu, placement: 0-1}}
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  eval: [{{name: held_out, source: arithmetic, size: 10, kwargs: {{digits: 1}}}}]
  max_prompt_tokens: 16
  prompts_per_step: 4
agent: {{kind: python, target: "node_agent:solve", timeout_s: 60, episodes_per_rank: 4}}
reward: {{terms: [{{name: agent}}]}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 4}}
rollout: {{rollout_backend: hf, max_new_tokens: 6, max_batch_size: 64}}
actor:
  global_batch_size: 16
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 32, layers: 2, heads: 2}}}}
  optim: {{lr: 3.0e-3}}
"""
#: Asks over the network, and by the socket that a sandbox would have; leaves a process behind.
AGENT = """
import http.client
import json
import os
import socket
import subprocess
import sys
import time

class Local(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["RLHPC_SOCKET"])

def by_socket(model, messages):
    connection = Local("localhost")
    head = {"Authorization": "Bearer " + model.api_key}
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}), head)
    return json.loads(connection.getresponse().read())["choices"][0]["message"]

def solve(task, model):
    pause = os.environ["RLHPC_TEST_PAUSE"]
    assert "127.0.0.1" not in model.base_url, model.base_url
    messages = [*task.messages, model.chat(task.messages)]
    if os.path.exists(pause):
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        with open(f"{pause}-{left.pid}", "w") as file:
            file.write(os.uname().nodename)
        time.sleep(4)
    said = by_socket(model, [*messages, {"role": "user", "content": "+1="}])["content"]
    return sum(letter in "13579" for letter in said) / max(len(said), 1)
"""


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def test_a_rank_with_agents_is_lost_in_the_middle(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its episodes are begun again on the other node: nothing else is started again, no step made anew, no sample missing."""
    config, pause = tmp_path / "language.yaml", tmp_path / "pause"
    config.write_text(CONFIG.format(root=ROOT))
    (tmp_path / "node_agent.py").write_text(AGENT)
    pause.touch()
    run = SlurmRun(slurm, tmp_path, config=config)
    run.environment |= {
        "RLHPC_MODELS": str(tmp_path / "models"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path),
        "RLHPC_TEST_PAUSE": str(pause),
    }  # fmt: skip
    process = run.submit()

    def left() -> list[int]:
        return [int(path.name[6:]) for path in tmp_path.glob("pause-*")]

    def under_way() -> bool:
        """Whether both nodes have episodes."""
        marks = [path for path in tmp_path.glob("pause-*") if psutil.pid_exists(int(path.name[6:]))]
        return len({path.read_text() for path in marks} - {""}) == 2

    try:
        until(under_way, "both nodes run agents", 200)
    except AssertionError:
        raise AssertionError(run.account()) from None
    before = len(left())
    ranks, driver = run.members(), run.root / "logs" / "segment_0" / "driver.err"
    nodes = {name: ranks[name]["node"] for name in ("rollout-0", "agent-0", "agent-1")}
    assert len({*nodes.values()}) == 3, nodes
    kill(ranks["agent-1"]["pid"])  # all that it had started there ends with it
    until(lambda: len(left()) > before, f"the others go on\n{run.account()}", 60)
    pause.unlink()
    until(lambda: run.step() >= 1, f"the step ends, within the time limit\n{run.account()}", 65)
    told = "agent[1] ended; other ranks begin its episodes again, and nothing else is lost"
    until(lambda: told in driver.read_text(), f"it is told\n{run.account()}", 60)
    run.finish(process, 300)
    assert len(run.attempts) == 1 and not run.recoveries
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert [row["rollout/samples"] for row in rows] == [16.0 * step for step in range(1, 7)]
    assert rows[0]["agent/begun_again"] > 0 and max(row["train/mismatch_abs"] for row in rows) < 1e-5
    until(lambda: not [pid for pid in left() if psutil.pid_exists(pid)], "nothing of any episode is left", 30)
