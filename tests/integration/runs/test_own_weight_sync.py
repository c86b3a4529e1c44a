"""A strategy of one's own, named by import path, carries the weights of both wings' runs, bit for bit as the built-in one
does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_reasoning import LanguageRun
from tiny_run import TinyRun

ROAD = '''
from pathlib import Path

from rlhpc.weights import Update


class Mine:
    """One message a version. Each end leaves a line of what it did."""

    def __init__(self, worker, src, receivers, delta, whole):
        self.worker, self.src, self.receivers = worker, src, receivers

    def _note(self, word, version):
        with Path(__file__).with_name("said.txt").open("a") as file:
            file.write(f"{word} {version}\\n")

    def send(self, version, tensors, *, frozen=()):
        message = version, {name: tensor.detach().cpu().clone() for name, tensor in tensors}
        self.worker.broadcast(message, self.receivers, self.src)
        self._note("sent", version)

    def receive(self):
        version, tensors = self.worker.broadcast(None, self.receivers, self.src)
        self._note("received", version)
        return Update(version, True, iter(tensors.items()))

    def forget(self):
        pass
'''

EMBODIED = ("runner.max_steps=3", "algorithm.rollout_steps=32", "algorithm.update_epochs=1")
LANGUAGE = ("runner.max_steps=3", "runner.save_interval=3")
OWN = ("rollout.weight_sync=my_road:Mine", 'rollout.weight_delta="off"')  # YAML takes a bare off for false


@pytest.mark.parametrize("wing", ["embodied", "language"])
def test_a_strategy_of_ones_own_carries_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wing: str) -> None:
    (tmp_path / "my_road.py").write_text(ROAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = []
    for name, words in (("built_in", ("rollout.weight_sync=broadcast",)), ("own", OWN)):
        run: TinyRun | LanguageRun
        if wing == "embodied":
            run = TinyRun(tmp_path / name, *EMBODIED, *words)
        else:
            run = LanguageRun(tmp_path / name, *LANGUAGE, *words)
            run.environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
        run.train()
        found.append((run.rows(), load_file(run.root / "checkpoints" / "global_step_3" / "model.safetensors")))
    (rows, weights), (own_rows, own_weights) = found
    assert own_rows == rows
    assert own_weights.keys() == weights.keys()
    assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())
    said = (tmp_path / "said.txt").read_text().split("\n")
    sent = [line.partition(" ")[2] for line in said if line.startswith("sent")]
    # The rows and weights above are those of policies that got these; the proof of engines sends the first, too.
    assert list(dict.fromkeys(sent)) == ["0", "1", "2"]
    assert sorted(line.partition(" ")[2] for line in said if line.startswith("received")) == sorted(sent)


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    said = TinyRun(tmp_path, "rollout.weight_sync=carrier").train(code=2)
    assert "rollout.weight_sync is 'carrier'" in said
    assert "allowed: auto, broadcast, gloo, host, ipc, nccl, shards, or module:Class" in said
    assert not (tmp_path / "quickstart").exists()
