"""Engine probe of `rlhpc doctor`: starts one vLLM engine of several ranks, as a run does, and generates with it.

The doctor calls `main` in a process on a node. The process prints a line of JSON after each stage, so that the last line shows
the last completed stage if the engine hangs or dies.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.engines import GrpoRolloutConfig
from rlhpc.language.config.run import LanguageActorConfig
from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.language.engines.registry import make_rollout
from rlhpc.language.models.tiny import make_tiny_model
from rlhpc.language.rollout.engine_group import EngineRank, RunLink, leader_only
from rlhpc.runs.device import worker_device
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.placement import NodePlacementStrategy, PackedPlacementStrategy
from rlhpc.runtime.session import Session
from rlhpc.runtime.text import first_line
from rlhpc.runtime.worker import Worker

_PROMPT, _NUM_TOKENS = (3, 4, 5, 6), 4
#: Settings that keep the engine small: it may run beside other processes of the user.
_ROLLOUT = {"rollout_backend": "vllm", "max_batch_size": 4, "max_model_len": 64, "gpu_memory_utilization": 0.1}


def _select_engine_configuration(num_ranks: int) -> Any:
    """Returns the sections of a run's configuration that an engine reads."""
    rollout = OmegaConf.merge(
        OmegaConf.structured(GrpoRolloutConfig), OmegaConf.create({**_ROLLOUT, "parallel": {"tensor": num_ranks}})
    )
    return OmegaConf.create({"rollout": rollout, "actor": default_section(LanguageActorConfig)})


class ProbedRank(Worker):
    """Rank of the probed engine.

    Args:
        num_ranks: Number of ranks of the engine.
        model_path: Folder of the model.
    """

    def __init__(self, num_ranks: int, model_path: str) -> None:
        super().__init__()
        self._ranks, self._model_path = num_ranks, model_path

    @classmethod
    def forks(cls, *args: Any, **kwargs: Any) -> bool:
        """Returns False, because vLLM starts threads at import."""
        return False

    @classmethod
    def ranks_sharing_devices(cls, num_ranks: int, model_path: str) -> int:
        """Returns the number of ranks of the engine, which see each other's accelerators."""
        return num_ranks

    def start_engine(self) -> str:
        """Builds this rank's part of the engine; returns the device type."""
        link, device = RunLink(self, self._ranks), worker_device(self)
        engine = make_rollout(
            _select_engine_configuration(self._ranks), model_path=self._model_path, device=device, seed=0, link=link
        )
        self.engine_rank = EngineRank(engine, link, lambda: None)
        return device.type

    @leader_only
    def generate(self) -> list[int]:
        """Returns the tokens that the engine samples after a fixed prompt."""
        sampling = SamplingParams(max_new_tokens=_NUM_TOKENS, temperature=0.0)
        (completion,) = self.engine_rank.engine.generate([Request(0, _PROMPT, sampling, seed=0)])
        return list(completion.token_ids)


def _print_values(**printed_values: Any) -> None:
    print(json.dumps(printed_values), flush=True)


def probe_engine(num_ranks: int, *, is_on_accelerator: bool) -> None:
    """Starts the engine, generates and prints the stages: `num_ranks` and `launch_s`, `device` and `start_s`, `tokens`.

    Args:
        num_ranks: Number of ranks of the engine.
        is_on_accelerator: Whether each rank computes on an accelerator of this machine, or all on the CPU.

    Raises:
        RlhpcError: A stage failed.
    """
    cluster = Cluster({"num_nodes": 1, "accelerators_per_node": num_ranks if is_on_accelerator else 0})
    strategy = (
        PackedPlacementStrategy(0, num_ranks - 1) if is_on_accelerator else NodePlacementStrategy([0] * num_ranks)
    )
    with tempfile.TemporaryDirectory(prefix="rlhpc-engine-probe-") as folder:
        make_tiny_model(folder, hidden=64 * num_ranks, layers=1, heads=num_ranks)  # each rank gets one attention head
        session = Session.start()
        try:
            start_time = time.monotonic()
            group = ProbedRank.create_group(num_ranks, folder).launch(cluster, strategy, "rollout")
            _print_values(ranks=num_ranks, launch_s=time.monotonic() - start_time)
            start_time = time.monotonic()
            devices = group.start_engine().wait()
            _print_values(device=devices[0], start_s=time.monotonic() - start_time)
            _print_values(tokens=len(group.generate().wait()[0]))
        finally:
            session.stop()


def main() -> None:
    """Runs the probe: `<number of ranks> <cpu or accelerators>` on the command line."""
    num_ranks, device = int(sys.argv[1]), sys.argv[2]
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # the ranks run on this node, and not as job steps
    try:
        probe_engine(num_ranks, is_on_accelerator=device != "cpu")
    except RlhpcError as error:
        _print_values(error=first_line(error)[:400])
        raise SystemExit(1) from None
