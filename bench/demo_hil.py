"""A robot arm learns to pick a cube, with and without a scripted person who takes over now and then (RLPD, as in HIL-SERL).

    make setup-simulators
    python -m bench.demo_hil --seeds 1

gym-hil's Panda arm, from states, with a sparse reward and a cube at random places. Both arms of the comparison begin with the
same demonstrations of a script, and take the same number of environment steps and updates. In one of them the script also
takes over at random moments for a while, as a person would (`env.train.intervene`). Success is measured over episodes without
help.

Prints the successes of each seed, writes bench/results/demo_hil.json, and a video of the helped policy with a person beside it
(`hil.mp4` in --runs): the border is orange while the person leads, and grey while the policy does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.demo_agent import run_rlhpc
from bench.machine import write

CONFIG, EXPERT = "configs/base/sac.yaml", "rlhpc.embodied.envs.gym_hil:pick"
ENV = {
    "env_id": "gym_hil:gym_hil/PandaPickCube-v0",
    "num_envs": 1,
    "max_episode_steps": 60,
    "simulator_python": ".venv-simulators/bin/python",
    "kwargs": {"random_block_position": True, "reset_delay_seconds": 0.0, "gripper_penalty": 0.0},
    "wrappers": ["panda_state", {"rescale_action": {"min_action": -1, "max_action": 1}}],
}
PERSON = {"expert": EXPERT, "apart": 0.0, "patience": 1, "hold": 10, "max_hold": 25, "chance": 0.05, "noise": 0.1}
_BORDER, _ORANGE, _GREY = 6, (230, 140, 20), (90, 90, 90)


def build_overrides(runs: Path, seed: int, num_steps: int) -> list[str]:
    """Returns the overrides of both arms."""
    values: dict[str, Any] = {
        "runner.run_dir": str(runs),
        "runner.seed": seed,
        "runner.max_steps": num_steps // 50,
        "runner.save_interval": num_steps // 50,
        "runner.logger.logger_backends": ["jsonl"],
        "algorithm.gamma": 0.96,
        "algorithm.tau": 0.02,
        "algorithm.initial_alpha": 0.01,
        "algorithm.backup_entropy": False,
        "algorithm.actor_agg_q": "mean",
        "algorithm.critic_subsample_size": 2,
        "algorithm.random_steps": 0,
        "algorithm.rollout_steps": 50,
        "algorithm.update_to_data": 2,
        "algorithm.replay_buffer": {"size": 100_000, "min_buffer_size": 100},
        "env.train": ENV,
        "env.eval": {"num_envs": 2, "num_episodes": 40},
        "actor.global_batch_size": 128,
        "actor.model": {"hidden_sizes": [128, 128], "num_q_heads": 10, "critic_layer_norm": True},
        "actor.optim": {"lr": 3.0e-4, "value_lr": 3.0e-4},
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs demonstrations and both arms at one seed; returns their successes, and the share of steps with an intervention."""
    shared_overrides = build_overrides(options.runs, seed, options.steps)
    demos = options.runs / f"hil-{seed}.h5"
    demos.unlink(missing_ok=True)
    run_rlhpc("record", "--expert", EXPERT, "--config", CONFIG, "--episodes", str(options.demonstrations), "--only-success",
          "--output", str(demos), "runner.name=hil-demos", *shared_overrides)  # fmt: skip
    row: dict[str, Any] = {"seed": seed}
    for name, source in {"help": {"source": "scripted", "kwargs": PERSON}, "none": {"source": None}}.items():
        run_folder = options.runs / f"hil-{name}-{seed}"
        run_rlhpc("train", CONFIG, *shared_overrides, f"runner.name={run_folder.name}",
            f"algorithm.demo_buffer.load_path={demos}",
              f"env.train.intervene={json.dumps(source)}")  # fmt: skip
        output = run_folder / "success.json"
        run_rlhpc("eval", "--run", str(run_folder), "--step", "latest", "--output", str(output))
        row[name] = json.loads(output.read_text())["success_once"]
        lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
        if name == "help":
            row["led"] = statistics.mean(line["rollout/intervention_rate"] for line in lines)
        row[f"{name} curve"] = [
            (line["rollout/env_steps"], line["train/success_once"]) for line in lines if "train/success_once" in line
        ]
    return row


def record_video(run_folder: Path, path: Path, num_episodes: int) -> int:
    """Runs episodes of a policy with the scripted person, and writes a video whose border shows interventions. Returns the
    number of pictures with an intervention.
    """
    from rlhpc.checkpoint.start import find_weights
    from rlhpc.config.typed import with_value
    from rlhpc.embodied.data.video import write_video
    from rlhpc.embodied.envs import make_env
    from rlhpc.embodied.interventions.intervention_env import InterventionEnv
    from rlhpc.embodied.interventions.sources import build_intervention
    from rlhpc.embodied.models.registry import load_policy
    from rlhpc.jobs.paths import CONFIG as FILE
    from rlhpc.runs.configuration import load_config
    from rlhpc.runtime.trust import Trust

    cfg: Any = load_config(str(run_folder / FILE), [])
    section = with_value(cfg.env.eval, "num_envs", 1)
    env = InterventionEnv(
        make_env(section, 1, seed=5), build_intervention("scripted", PERSON, "--intervene"), section, range(1), seed=5
    )
    policy = load_policy(find_weights(str(run_folder), "--run"), Trust())
    frames, num_led, num_ended = [], 0, 0
    try:
        obs, _ = env.reset(seed=5)
        while num_ended < num_episodes:
            with torch.inference_mode():
                actions, _ = policy.predict_action_batch(torch.from_numpy(np.asarray(obs)), mode="eval")
            picture = env.render([0])
            obs, _, terminations, truncations, infos = env.chunk_step(actions.numpy())
            is_led = bool(infos["intervened"].any())
            num_led += is_led
            num_ended += int(terminations[0] | truncations[0])
            if picture is not None:
                frames.append(_add_border(picture[0], is_led))
    finally:
        env.close()
    write_video(path, frames, fps=10)
    return num_led


def _add_border(picture: np.ndarray, is_intervention: bool) -> np.ndarray:
    framed_picture = picture.copy()
    for border in (np.s_[:_BORDER], np.s_[-_BORDER:], np.s_[:, :_BORDER], np.s_[:, -_BORDER:]):
        framed_picture[border] = _ORANGE if is_intervention else _GREY
    return framed_picture


def main() -> int:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000, help="environment steps of each arm")
    parser.add_argument("--demonstrations", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo_hil"))
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    rows = [run_seed(seed, options) for seed in range(1, options.seeds + 1)]
    for row in rows:
        print(
            f"seed {row['seed']}: success {row['help']:.2f} with help in {row['led']:.0%} of the steps, "
            f"{row['none']:.2f} without"
        )
    num_intervention_pictures = record_video(options.runs / "hil-help-1", options.runs / "hil.mp4", num_episodes=2)
    print(f"{options.runs / 'hil.mp4'}: the script leads in {num_intervention_pictures} pictures")
    print(
        write("demo_hil", f"python -m bench.demo_hil --seeds {options.seeds}", {"steps": options.steps, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
