"""The entry script of an embodied run, as one would write it oneself. `rlhpc train` does the same and more.

python examples/train_embodied.py configs/quickstart.yaml runner.max_steps=20
"""

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


def main(path: str, overrides: list[str]) -> None:
    """Trains what the configuration describes."""
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
