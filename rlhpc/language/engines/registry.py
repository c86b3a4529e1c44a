"""Generation engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rlhpc.config.typed import changed, plain
from rlhpc.language.engines.base import AwaitsWeights, EngineFactory, RolloutBackend, SaysForkable
from rlhpc.language.engines.common import adapters_apart
from rlhpc.language.multi_policy import folders_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    import torch

    from rlhpc.language.config.run import LanguageConfig
    from rlhpc.language.engines.multi_rank import EngineLink

Run = TypeVar("Run", bound="LanguageConfig")
ENGINES: Registry[EngineFactory] = Registry(
    "generation engine", "rollout.rollout_backend", "rlhpc.engines",
    {"hf": "rlhpc.language.engines.hf:HFRollout", "vllm": "rlhpc.language.engines.vllm:VLLMRollout"},
)  # fmt: skip


def make_rollout(
    cfg: LanguageConfig, *, model_path: str, device: str | torch.device, seed: int, link: EngineLink | None = None
) -> RolloutBackend:
    """Builds the engine of `rollout.rollout_backend`.

    Args:
        cfg: The run's configuration; sections `rollout` and `actor.model` are read.
        model_path: Hugging Face folder or hub name of the weights to start from, with its tokenizer.
        device: Where it computes.
        seed: Of the engine; what a request draws depends on the request's own.
        link: To the other ranks of an engine that has several; all of them build theirs at the same time.

    Raises:
        ConfigError: It cannot be built: an unknown name, a library that is not installed, a model that is not there, or
            memory that does not suffice.
    """
    more = {} if link is None else {"link": link}
    return ENGINES.find(cfg.rollout.rollout_backend)(cfg, model_path=model_path, device=device, seed=seed, **more)


def make_engine(
    cfg: LanguageConfig, *, model_path: str, device: str | torch.device, seed: int, link: EngineLink | None = None
) -> RolloutBackend:
    """Builds the engine of a run, of one policy or several (`agent.policies`).

    Args:
        cfg, device, seed, link: See `make_rollout`.
        model_path: See there; several policies may have folders of their own in it (`folders_of`).

    Raises:
        ConfigError: See `make_rollout`.
    """
    folders = folders_of(cfg, model_path)
    begun = {*folders.values()} == {model_path}
    if "" in folders or (begun and adapters_apart(cfg)):
        return make_rollout(cfg, model_path=model_path, device=device, seed=seed, link=link)
    if cfg.rollout.rollout_backend.lower() != "hf":
        raise ConfigError(
            f"rollout.rollout_backend is {cfg.rollout.rollout_backend}, which gets several policies (agent.policies) from a "
            "trainer, as adapters; what was trained is asked by hf: evaluate with --backend hf"
        )
    from rlhpc.language.engines.multi_policy import SeveralPolicies

    def make(name: str) -> RolloutBackend:
        return make_rollout(cfg, model_path=folders[name], device=device, seed=seed)

    return SeveralPolicies([*folders], make)


def awaiting_weights(cfg: Run) -> Run:
    """The configuration for an engine that writes nothing before an update has brought all weights: one that can need not
    read them from the model's files, unless `rollout.engine_kwargs` says how they are loaded."""
    engine = ENGINES.find(cfg.rollout.rollout_backend)
    if adapters_apart(cfg) or not isinstance(
        engine, AwaitsWeights
    ):  # the model's own weights never come, or have to be there
        return cfg
    return changed(cfg, "rollout.engine_kwargs", {**engine.awaiting, **plain(cfg.rollout.engine_kwargs)})


def forkable(name: str) -> bool:
    """Whether the ranks of an engine of `rollout.rollout_backend` may be forked.

    Raises:
        ConfigError: There is none of that name.
    """
    engine = ENGINES.find(name)
    return engine.forkable if isinstance(engine, SaysForkable) else True
