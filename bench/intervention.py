"""Human-gated DAgger (HG-DAgger) compared with behaviour cloning on the same demonstrations; a script intervenes.

    make setup-simulators
    python -m bench.intervention --seeds 3

A Panda arm picks a cube (gym-hil, from states). A script demonstrates `--demonstrations` episodes, and a policy clones
them. In each round the clone plays `--episodes` episodes, and the script takes over if the clone strays for three consecutive
steps; the clone also learns from the steps of the script. There are two controls: cloning of the same demonstrations with as
many updates as all rounds have together, and cloning of more demonstrations, with at least as many steps as the original
demonstrations and the interventions together. `rlhpc eval` measures success over 100 episodes without interventions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import write
from bench.robot import run_rlhpc

CONFIG = "configs/embodied/panda_pick_hil.yaml"
EXPERT = "rlhpc.embodied.envs.gym_hil:pick"
PERSON = json.dumps({"scripted": {"expert": EXPERT}})
STEPS = 60


def record_demos(file: Path, seed: int, num_episodes: int) -> None:
    """Records demonstrations by the scripted expert."""
    run_rlhpc("record", "--expert", EXPERT, "--config", CONFIG, "--episodes", str(num_episodes), "--output", str(file),
          f"runner.seed={seed}")  # fmt: skip


def count_steps(file: Path) -> int:
    """Returns the number of steps in a file of episodes."""
    return sum(
        int(episode["elapsed_steps"]) for episode in json.loads(file.with_suffix(".json").read_text())["episodes"]
    )


def measure_success(run_folder: Path) -> float:
    """Returns the share of 100 episodes of the newest checkpoint that succeeded."""
    output = run_folder / "result.json"
    run_rlhpc(
        "eval",
        "--run",
        str(run_folder),
        "--step",
        "latest",
        "--episodes",
        "100",
        "--output",
        str(output),
        "--trust-checkpoint-code",
    )
    return float(json.loads(output.read_text())["success_once"])


def train_clone(folder: Path, name: str, demos: Path, seed: int, num_steps: int) -> Path:
    """Trains a policy by behaviour cloning; returns the run folder."""
    run_rlhpc("train", CONFIG, f"runner.run_dir={folder}", f"runner.name={name}", f"runner.seed={seed}", f"demos.path={demos}",
          f"runner.max_steps={num_steps}", "runner.segments=1")  # fmt: skip
    return folder / name


def measure(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one seed."""
    demos, corrections = folder / "demos.h5", folder / "more.h5"
    record_demos(demos, seed, options.demonstrations)
    run_rlhpc("dagger", CONFIG, "--intervene", PERSON, "--rounds", str(options.rounds), "--episodes", str(options.episodes),
          f"demos.path={demos}", f"runner.run_dir={folder}", f"runner.seed={seed}", "runner.name=hil",
          f"runner.max_steps={STEPS}", "runner.segments=1")  # fmt: skip
    taken_over_steps = [count_steps(file) for file in sorted((folder / "hil-dagger").glob("round_*.h5"))]
    rounds = [
        measure_success(folder / f"hil-round{k}")
        for k in range(options.rounds + 1)
        if (folder / f"hil-round{k}").is_dir()
    ]
    needed_steps, count = count_steps(demos) + sum(taken_over_steps), options.demonstrations
    record_demos(corrections, seed, count)
    while count_steps(corrections) < needed_steps:
        count += 1
        corrections.unlink()
        record_demos(corrections, seed, count)
    longer_success = measure_success(train_clone(folder, "longer", demos, seed, STEPS * len(rounds)))
    return {
        "seed": seed, "demonstrated steps": count_steps(demos), "steps taken over, by round": taken_over_steps,
        "BC": rounds[0],
        "BC, as many updates": longer_success, "HG-DAgger, by round": rounds[1:], "HG-DAgger": rounds[-1],
        "BC from more demonstrations": measure_success(train_clone(folder, "more", corrections, seed, STEPS * len(rounds))),
        "steps of more demonstrations": count_steps(corrections),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all seeds, and writes `results/intervention.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demonstrations", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=8, help="episodes that are watched in a round")
    options = parser.parse_args(argv)
    rows = []
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), seed, options))
            print(rows[-1], flush=True)
    names = ("BC", "BC, as many updates", "BC from more demonstrations", "HG-DAgger")
    medians = {name: statistics.median(row[name] for row in rows) for name in names}
    command = f"python -m bench.intervention --seeds {options.seeds} --demonstrations {options.demonstrations}"
    print(write("intervention", command, {"rows": rows, "medians": medians}))


if __name__ == "__main__":
    main()
