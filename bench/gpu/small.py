"""Updates of small policies on one card: PPO and SAC as they are, with networks that torch.compile has compiled, and with
passes that are recorded and replayed.
"""

from __future__ import annotations

from typing import Any

from bench.gpu.part import Report, timed

#: Width of observations and actions, as of an arm; transitions of a PPO rollout and of its minibatches.
OBS, ACTIONS = 42, 8
REPEAT = 3


#: How the passes of an update run.
MODES = ("eager", "compiled", "captured")


def compile_networks(report: Report, *networks: Any) -> None:
    """Compiles the passes of networks. On a CPU, PyTorch runs the graphs operation by operation, because their code takes a
    minute to compile."""
    for network in networks:
        network.compile(backend="aot_eager" if report.small else "inductor")


def ppo(report: Report, mode: str) -> list[float]:
    """Returns the seconds of a minibatch of PPO, with its optimizer step."""
    import gymnasium
    import torch
    from omegaconf import OmegaConf

    from rlhpc import Worker
    from rlhpc.config.typed import typed
    from rlhpc.embodied.algorithms.ppo import PolicyUpdate
    from rlhpc.embodied.config import PpoConfig
    from rlhpc.embodied.data.batches import TrainBatch
    from rlhpc.embodied.training import PolicyBlueprint
    from rlhpc.training.registry import make_backend

    total, size = (256, 64) if report.small else (65536, 8192)
    cfg = OmegaConf.structured(PpoConfig)
    cfg.actor.model.model_type, cfg.actor.capture_graphs = "mlp", mode == "captured"
    cfg = typed(PpoConfig, cfg)
    spaces = gymnasium.spaces.Box(-10, 10, (OBS,)), gymnasium.spaces.Box(-1, 1, (ACTIONS,))
    worker, device = Worker(), torch.device(report.device)
    worker.accelerators = () if report.small else (0,)
    backend = make_backend(PolicyBlueprint(cfg.actor, spaces, device, seed=0, reads_norm=False), cfg.actor, worker)
    if mode == "compiled":
        compile_networks(report, backend.module.actor, backend.module.critic)
    update = PolicyUpdate(cfg.algorithm, backend, batch_size=size, micro_batch=None, seed=0)
    column = torch.randn(total, device=device)
    batch = TrainBatch(
        obs=torch.randn(total, OBS, device=device), actions=torch.randn(total, 1, ACTIONS, device=device).clamp(-1, 1),
        logprobs=-column.abs(), values=column, advantages=column, returns=column, mask=torch.ones_like(column),
    )  # fmt: skip
    minibatches = cfg.algorithm.update_epochs * total // size
    run = lambda step: update.run(batch, range(total), total, step, 1e-4)  # noqa: E731
    run(0)
    return [timed(lambda s=s: run(s)) / minibatches for s in range(1, REPEAT + 1)]  # type: ignore[misc]


def sac(report: Report, mode: str) -> list[float]:
    """Returns the seconds of an update of SAC."""
    import gymnasium
    import torch
    from omegaconf import OmegaConf

    from rlhpc.config.typed import typed
    from rlhpc.embodied.algorithms.off_policy import TransitionBatch
    from rlhpc.embodied.algorithms.sac import SacUpdate
    from rlhpc.embodied.config import SacConfig
    from rlhpc.embodied.models.registry import build_model

    cfg: Any = typed(SacConfig, OmegaConf.structured(SacConfig))
    spaces = gymnasium.spaces.Box(-10, 10, (OBS,)), gymnasium.spaces.Box(-1, 1, (ACTIONS,))
    device, rows = torch.device(report.device), cfg.actor.global_batch_size
    policy: Any = build_model(cfg.actor.model, *spaces, seed=0)
    update = SacUpdate(cfg.algorithm, cfg.actor.optim, policy.to(device).train())
    if mode == "compiled":
        compile_networks(report, policy.actor, policy.critics, update.targets["critics"].module)
    if mode == "captured" and not report.small:
        update.capture_passes()
    batch = TransitionBatch(
        obs=torch.randn(rows, OBS, device=device), actions=torch.randn(rows, 1, ACTIONS, device=device).clamp(-1, 1),
        rewards=torch.randn(rows, device=device), next_obs=torch.randn(rows, OBS, device=device),
        terminations=torch.zeros(rows, dtype=torch.bool, device=device),
        noise=torch.randn(2, rows, ACTIONS, device=device), total=rows,
    )  # fmt: skip
    count = 5 if report.small else 200

    def run() -> None:
        for _ in range(count):
            update.step(batch)

    run()
    return [timed(run) / count for _ in range(REPEAT)]


def measure(report: Report) -> None:
    """Measures each update in each mode; a CPU captures no passes."""
    for name, seconds_of in (("PPO, a minibatch", ppo), ("SAC, an update", sac)):
        best = dict[str, float]()
        for mode in MODES:
            with report.piece(f"{name}, {mode}"):
                seconds = seconds_of(report, mode)
                best[mode] = min(seconds)
                report.figure(f"{name}, {mode}", [1000 * s for s in seconds], "ms")
                if mode != "eager" and "eager" in best:
                    report.figure(f"{name}, {mode}, faster than eager", best["eager"] / best[mode], "times")
