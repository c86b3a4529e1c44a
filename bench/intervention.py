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
from bench.robot import rlhpc

CONFIG = "configs/embodied/panda_pick_hil.yaml"
EXPERT = "rlhpc.embodied.envs.gym_hil:pick"
PERSON = json.dumps({"scripted": {"expert": EXPERT}})
STEPS = 60


def record(file: Path, seed: int, episodes: int) -> None:
    """Records demonstrations by the scripted expert."""
    rlhpc("record", "--expert", EXPERT, "--config", CONFIG, "--episodes", str(episodes), "--output", str(file),
          f"runner.seed={seed}")  # fmt: skip


def steps_of(file: Path) -> int:
    """Returns the number of steps in a file of episodes."""
    return sum(
        int(episode["elapsed_steps"]) for episode in json.loads(file.with_suffix(".json").read_text())["episodes"]
    )


def success(run: Path) -> float:
    """Returns the share of 100 episodes of the newest checkpoint that succeeded."""
    output = run / "result.json"
    rlhpc(
        "eval",
        "--run",
        str(run),
        "--step",
        "latest",
        "--episodes",
        "100",
        "--output",
        str(output),
        "--trust-checkpoint-code",
    )
    return float(json.loads(output.read_text())["success_once"])


def clone(folder: Path, name: str, demos: Path, seed: int, steps: int) -> Path:
    """Trains a policy by behaviour cloning; returns the run folder."""
    rlhpc("train", CONFIG, f"runner.run_dir={folder}", f"runner.name={name}", f"runner.seed={seed}", f"demos.path={demos}",
          f"runner.max_steps={steps}", "runner.segments=1")  # fmt: skip
    return folder / name


def measure(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one seed."""
    demos, corrections = folder / "demos.h5", folder / "more.h5"
    record(demos, seed, options.demonstrations)
    rlhpc("dagger", CONFIG, "--intervene", PERSON, "--rounds", str(options.rounds), "--episodes", str(options.episodes),
          f"demos.path={demos}", f"runner.run_dir={folder}", f"runner.seed={seed}", "runner.name=hil",
          f"runner.max_steps={STEPS}", "runner.segments=1")  # fmt: skip
    taken_over_steps = [steps_of(file) for file in sorted((folder / "hil-dagger").glob("round_*.h5"))]
    rounds = [
        success(folder / f"hil-round{k}") for k in range(options.rounds + 1) if (folder / f"hil-round{k}").is_dir()
    ]
    needed_steps, count = steps_of(demos) + sum(taken_over_steps), options.demonstrations
    record(corrections, seed, count)
    while steps_of(corrections) < needed_steps:
        count += 1
        corrections.unlink()
        record(corrections, seed, count)
    longer_success = success(clone(folder, "longer", demos, seed, STEPS * len(rounds)))
    return {
        "seed": seed, "demonstrated steps": steps_of(demos), "steps taken over, by round": taken_over_steps, "BC": rounds[0],
        "BC, as many updates": longer_success, "HG-DAgger, by round": rounds[1:], "HG-DAgger": rounds[-1],
        "BC from more demonstrations": success(clone(folder, "more", corrections, seed, STEPS * len(rounds))),
        "steps of more demonstrations": steps_of(corrections),
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
