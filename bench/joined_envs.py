"""Benefit of env ranks that join a run of SAC: steps with one initial and one joined rank, compared with two initial ranks.

    python -m bench.joined_envs --repeat 1

Environments and updates sleep, so the speed of a rank does not depend on the number of ranks on these cores: one rank plays a
step in a second, and the updates of a step take a tenth, a half or all of a second. In both runs, env ranks are one or two
steps ahead of the actor (`algorithm.max_staleness`). The comparison uses the steps after the joined rank's first step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from bench.helpers import ROOT, STEPS, HelperRun
from bench.idle import SleepingEnv
from bench.machine import spread, write
from rlhpc.embodied.models.off_policy import SACPolicy, TwinCritic

SLOTS, DECISIONS, STEP_S = 4, 10, 1.0
#: Seconds of a step's updates.
SHARES = (0.1, 0.5, 1.0)
#: Updates of a step, each of which trains critics and actor once.
UPDATES = 10


class Sleeping(SleepingEnv):
    """`SleepingEnv` with continuous actions."""

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)


class SleepingCritic(TwinCritic):
    """Critic whose forward pass sleeps during training."""

    seconds = 0.0

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Implements `TwinCritic.forward`."""
        if torch.is_grad_enabled():
            time.sleep(self.seconds)
        return super().forward(obs, actions)


class SleepingSAC(SACPolicy):
    """SAC policy whose critics sleep `actor.model.kwargs.seconds` in each forward pass of training."""

    def __init__(self, cfg: Any, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.critics.__class__ = SleepingCritic
        SleepingCritic.seconds = float(cfg.kwargs["seconds"])


class SacRun(HelperRun):
    """Running SAC process that env ranks can join.

    Args:
        folder: Folder of this run alone.
        num_ranks: Number of env ranks at its start.
        updates_s: Seconds of a step's updates.
        max_staleness: `algorithm.max_staleness`.
    """

    def __init__(self, folder: Path, num_ranks: int, updates_s: float, max_staleness: int) -> None:
        self.folder, self.root = folder, folder / "run"
        folder.mkdir(parents=True)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        overrides = (
            "runner.name=run", f"runner.run_dir={folder}", "runner.max_steps=1000", "runner.save_interval=-1",
            "runner.val_check_interval=-1",
            f"cluster.component_placement={{actor: '0', rollout: '0', env: '0:0-{num_ranks - 1}'}}",
            f"algorithm.rollout_steps={DECISIONS}", f"algorithm.max_staleness={max_staleness}",
            f"algorithm.update_to_data={UPDATES / SLOTS / DECISIONS}", "algorithm.critic_actor_ratio=1",
            "algorithm.replay_buffer={size: 100000, min_buffer_size: 4}",
            "env.train.env_type=bench.joined_envs:Sleeping", "env.train.env_id=sleep", f"env.train.num_envs={SLOTS}",
            f"env.train.kwargs={{seconds: {STEP_S / SLOTS / DECISIONS}}}",
            "actor.model.model_type=bench.joined_envs:SleepingSAC", "actor.model.hidden_sizes=[8]",
            f"actor.model.kwargs={{seconds: {updates_s / 2 / UPDATES}}}", "actor.global_batch_size=8",
        )  # fmt: skip
        self._log = (folder / "said.txt").open("w")
        self.process = self._start("train", str(ROOT / "configs" / "embodied" / "pendulum_sac.yaml"), *overrides)


def measure(folder: Path, updates_s: float, max_staleness: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps of both runs."""
    static_run = SacRun(folder / "static", 2, updates_s, max_staleness)
    static_s = static_run.read_step_times(4)
    static_run.end()
    joined_run = SacRun(folder / "joined", 1, updates_s, max_staleness)
    joined_run.wait_until("two steps", lambda: len(joined_run.read_rows()) >= 2)
    helper = joined_run._start("join", str(joined_run.root), "--group", "env")
    joined_run.wait_until("the helper", lambda: any("env/joined_transitions" in row for row in joined_run.read_rows()))
    joined_steps = joined_run.read_step_times(len(joined_run.read_rows()) + 1, 2 * STEPS)
    joined_run.end(helper)
    return static_s, joined_steps


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/joined_envs.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args(argv)
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repetition, env_share, max_ahead in itertools.product(range(args.repeat), SHARES, (1, 2)):
            static_s, joined_s = measure(Path(folder) / f"{repetition}-{env_share}-{max_ahead}", env_share, max_ahead)
            name = f"throughput, updates of {env_share:g} s, {max_ahead} ahead"
            ratios.setdefault(name, []).append(statistics.fmean(static_s) / statistics.fmean(joined_s))
            print(f"{name}: {statistics.fmean(static_s):.2f} s a step with two ranks, {statistics.fmean(joined_s):.2f} s with "
                  f"one and one that joined: {ratios[name][-1]:.2f}", flush=True)  # fmt: skip
    content = {name: spread(values) for name, values in ratios.items()}
    print(write("joined_envs", f"python -m bench.joined_envs --repeat {args.repeat}", content))


if __name__ == "__main__":
    main()
