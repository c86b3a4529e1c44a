"""Embodied loop from end to end: SAC on an environment without cost, compared with the same loop in one process.

A step has 100 environment steps of one slot, one update from a batch of 256, and a weight sync to the acting policy. The
networks are MLPs with two layers of 256 units. `first step` is the time from the command to the first row of metrics.

    python -m bench.embodied_loop --repeat 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import goal, spread, write

HERE = Path(__file__).resolve().parent
ENV_STEPS, STEPS = 100, 60
#: What RLinf 0.3.0 on Ray took for such a step, and from its start to the first one, on two shared cores.
RLINF_STEP_S, RLINF_FIRST_S = 8.8, 109.0


def run_rlhpc() -> dict[str, float]:
    """Runs the workload as an rlhpc run; returns the seconds to the first step and per step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "rlhpc.cli", "train", str(HERE.parent / "configs" / "embodied" / "halfcheetah_sac.yaml"),
            f"runner.run_dir={folder}", "runner.name=loop", f"runner.max_steps={STEPS}", "runner.save_interval=-1",
            "env.train.env_id=bench.peers.dummy_env:RlhpcDummy-v0", f"algorithm.rollout_steps={ENV_STEPS}",
            f"algorithm.update_to_data={1 / ENV_STEPS}", "runner.logger.logger_backends=[jsonl]",
            "algorithm.replay_buffer={size: 100000, min_buffer_size: 100}",
        ]  # fmt: skip
        metrics = Path(folder) / "loop" / "metrics.jsonl"
        start_s = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
                time.sleep(0.005)
            first_step_s = time.perf_counter() - start_s
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(rows) == STEPS
    assert rows[-1]["rollout/env_steps"] == STEPS * ENV_STEPS
    return {"first step (s)": first_step_s, "step (s)": statistics.median(row["time/step_s"] for row in rows[5:])}


def run_single_process() -> dict[str, float]:
    """Runs the same workload in one process."""
    import gymnasium
    import torch

    import bench.peers.dummy_env  # noqa: F401
    from bench.single_process_sac import Buffer, SacLearner

    torch.set_num_threads(1)
    env = gymnasium.make("RlhpcDummy-v0")
    assert isinstance(env.action_space, gymnasium.spaces.Box)
    learner, buffer = SacLearner(17, env.action_space), Buffer(100_000, 17, 6)
    obs, step_times = env.reset(seed=1)[0], []
    for step in range(STEPS):
        start_s = time.perf_counter()
        for _ in range(ENV_STEPS):
            with torch.no_grad():
                action = learner.actor.act(torch.as_tensor(obs)[None])[0][0].numpy()
            next_obs, reward, terminated, _, _ = env.step(action)
            buffer.add(obs, next_obs, action, float(reward), terminated)
            obs = next_obs
        learner.update(2 * step, buffer.sample(256))
        step_times.append(time.perf_counter() - start_s)
    return {"step (s)": statistics.median(step_times[5:])}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/embodied_loop.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.single:
        print(json.dumps(run_single_process()))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    rows: dict[str, list[dict[str, float]]] = {"rlhpc": [], "single process": []}
    for _ in range(args.repeat):
        rows["rlhpc"].append(run_rlhpc())
        result = subprocess.run(
            [sys.executable, "-m", "bench.embodied_loop", "--single"], check=True, stdout=subprocess.PIPE
        )
        rows["single process"].append(json.loads(result.stdout))
        print(json.dumps({side: side_rows[-1] for side, side_rows in rows.items()}), flush=True)
    figures = {
        side: {name: spread([row[name] for row in side_rows]) for name in side_rows[0]}
        for side, side_rows in rows.items()
    }
    step, first_step_s = (figures["rlhpc"][name]["median"] for name in ("step (s)", "first step (s)"))
    goals = [
        goal("step / RLinf's on Ray", step / RLINF_STEP_S, at_most=1 / 20),
        goal("start to the first step (s)", first_step_s, at_most=8),
    ]
    ratio = step / figures["single process"]["step (s)"]["median"]
    print(f"step {step:.4f} s, {ratio:.2f} of one process's; first step after {first_step_s:.2f} s")
    content = {"figures": figures, "step_over_single_process": ratio, "goals": goals}
    print(write("embodied_loop", f"python -m bench.embodied_loop --repeat {args.repeat}", content))


if __name__ == "__main__":
    main()
