"""The entry script of an embodied run, as one would write it oneself. `rlhpc train` does the same and more.

python examples/train_embodied.py configs/quickstart.yaml runner.max_steps=20
"""

import argparse
import sys

from rlhpc import (
    Cluster,
    EmbodiedActor,
    EmbodiedRunner,
    EnvWorker,
    HybridComponentPlacement,
    MultiStepRolloutWorker,
    load_config,
)
from rlhpc.runtime.exit_codes import report_errors


def train(path: str, overrides: list[str]) -> int:
    """Trains what the configuration describes; returns the exit code."""
    cfg = load_config(path, overrides)
    cluster = Cluster(cfg.cluster)  # Slurm's variables when inside a job, else this machine
    placement = HybridComponentPlacement(cfg, cluster)
    actor = EmbodiedActor.create_group(cfg).launch(
        cluster, placement_strategy=placement.get_strategy("actor"), name="actor"
    )
    rollout = MultiStepRolloutWorker.create_group(cfg).launch(
        cluster, placement_strategy=placement.get_strategy("rollout")
    )
    env = EnvWorker.create_group(cfg).launch(cluster, placement_strategy=placement.get_strategy("env"))
    runner = EmbodiedRunner(cfg=cfg, actor=actor, rollout=rollout, env=env)
    runner.init_workers()
    runner.run()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a policy.")
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    sys.exit(report_errors(lambda: train(args.config, args.overrides)))
