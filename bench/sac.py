"""SAC updates per second, compared with a single-process loop. (Learning curves: `bench.learning`.)

Both draw batches of 256 from 20 000 transitions (17 numbers an observation, 6 an action) and train on them, MLPs of two layers
of 256, one thread, alternating every half a second of CPU time.

    python -m bench.sac --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import spread, write

OBS, ACT, ROWS, SLICE_S = 17, 6, 20_000, 0.5


def make_rlhpc_update() -> Callable[[], None]:
    """Returns a function that runs one update of rlhpc, with its batch."""
    import numpy as np
    import torch
    from gymnasium import spaces

    from rlhpc.embodied.algorithms.off_policy import TransitionBatch
    from rlhpc.embodied.algorithms.sac import SacUpdate
    from rlhpc.embodied.config import SacAlgorithmConfig, SacModelConfig, SacOptimConfig
    from rlhpc.embodied.data.mixture import DrawOptions, Mixture
    from rlhpc.embodied.data.replay_buffer import ReplayBuffer
    from rlhpc.embodied.models import build_model
    from rlhpc.embodied.models.off_policy import SACPolicy

    model = SacModelConfig(hidden_sizes=[256, 256], activation="relu", ortho_init=False)
    action_space = spaces.Box(-1, 1, (ACT,), np.float32)
    policy = build_model(model, spaces.Box(-np.inf, np.inf, (OBS,), np.float32), action_space, seed=1)
    assert isinstance(policy, SACPolicy)
    algorithm = SacAlgorithmConfig(gamma=0.99, tau=0.005)
    optim = SacOptimConfig(lr=3e-4, value_lr=1e-3, adam_eps=1e-8, clip_grad=None)
    update = SacUpdate(algorithm, optim, policy)
    random = np.random.default_rng(1)
    replay = ReplayBuffer(ROWS, range(1), 1, 0, Path(tempfile.gettempdir()))
    sample = lambda *shape: random.standard_normal((1, ROWS, *shape), np.float32)  # noqa: E731
    replay.add({
        "obs": sample(OBS), "next_obs": sample(OBS), "actions": np.tanh(sample(1, ACT)), "rewards": sample(),
        "terminations": sample() > 3,
    })  # fmt: skip
    mixture = Mixture(replay, None, DrawOptions(256, 0.0, ACT), seed=1)

    def step() -> None:
        batch = mixture.draw(update.num_updates)
        columns = {name: torch.from_numpy(column) for name, column in batch.columns.items()}
        update.step(TransitionBatch(**columns, noise=torch.from_numpy(batch.noise), total=batch.total))

    return step


def make_plain_update() -> Callable[[], None]:
    """Returns a function that runs one update of the single-process loop, with its batch."""
    import numpy as np
    from gymnasium import spaces

    from bench.single_process_sac import Buffer, SacLearner

    learner, buffer = SacLearner(OBS, spaces.Box(-1, 1, (ACT,), np.float32)), Buffer(ROWS, OBS, ACT)
    random = np.random.default_rng(1)
    for name in ("obs", "next_obs", "actions", "rewards"):
        getattr(buffer, name)[:] = random.standard_normal(getattr(buffer, name).shape, np.float32)
    buffer.full = True
    count = 0

    def step() -> None:
        nonlocal count
        learner.update(count, buffer.sample(256))
        count += 1

    return step


def measure_updates(num_rounds: int) -> dict[str, Any]:
    """Returns updates per second of CPU time; the loops alternate. CPU time of other processes does not count."""
    import torch

    torch.set_num_threads(1)
    contenders = {"rlhpc": make_rlhpc_update(), "single_process": make_plain_update()}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(10):
            step()
    for _ in range(num_rounds):
        for name, step in contenders.items():
            start_s, num_updates = time.process_time(), 0
            while time.process_time() - start_s < SLICE_S:
                step()
                step()  # the single process trains its actor every second time
                num_updates += 2
            rates[name].append(num_updates / (time.process_time() - start_s))
    ratios = [a / b for a, b in zip(rates["rlhpc"], rates["single_process"], strict=True)]
    return {
        "updates_per_cpu_s": {name: spread(side_rates) for name, side_rates in rates.items()},
        "ratio": spread(ratios),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/sac.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    update_rates = measure_updates(args.rounds)
    print(json.dumps(update_rates), flush=True)
    print(write("sac", f"python -m bench.sac --rounds {args.rounds}", update_rates))


if __name__ == "__main__":
    main()
