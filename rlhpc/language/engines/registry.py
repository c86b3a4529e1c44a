"""Registry of generation engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from rlhpc.config.typed import plain, with_value
from rlhpc.language.engines.base import EngineFactory, RolloutBackend, with_base_class
from rlhpc.language.engines.common import has_separate_adapters
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
    """Builds the engine that `rollout.rollout_backend` names.

    Args:
        cfg: The run's configuration; sections `rollout` and `actor.model` are read.
        model_path: Hugging Face folder or hub name of the initial weights, with its tokenizer.
        device: Device of the computation.
        seed: Seed of the engine; the tokens of a request depend on the request's seed.
        link: Connection to the other ranks of an engine group; all of them build their engines at the same time.

    Raises:
        ConfigError: The engine cannot be built: its name is unknown, a library or the model is missing, or memory is too
            small.
    """
    link_kwargs = {} if link is None else {"link": link}
    return _factory(cfg.rollout.rollout_backend)(cfg, model_path=model_path, device=device, seed=seed, **link_kwargs)


def make_engine(
    cfg: LanguageConfig, *, model_path: str, device: str | torch.device, seed: int, link: EngineLink | None = None
) -> RolloutBackend:
    """Builds the engine of a run with one or several policies (`agent.policies`).

    Args:
        cfg, device, seed, link: See `make_rollout`.
        model_path: See `make_rollout`; with several policies it may contain a folder for each policy (`folders_of`).

    Raises:
        ConfigError: See `make_rollout`.
    """
    folders = folders_of(cfg, model_path)
    is_initial = {*folders.values()} == {model_path}
    if "" in folders or (is_initial and has_separate_adapters(cfg)):
        return make_rollout(cfg, model_path=model_path, device=device, seed=seed, link=link)
    if cfg.rollout.rollout_backend != "hf":
        raise ConfigError(
            f"rollout.rollout_backend is {cfg.rollout.rollout_backend}, which gets several policies (agent.policies) from a "
            "trainer, as adapters; what was trained is asked by hf: evaluate with --backend hf"
        )
    from rlhpc.language.engines.multi_policy import MultiPolicyEngine

    def make(name: str) -> RolloutBackend:
        return make_rollout(cfg, model_path=folders[name], device=device, seed=seed)

    return MultiPolicyEngine([*folders], make)


def awaiting_weights(cfg: Run) -> Run:
    """Returns the configuration for an engine that gets a complete weight update before it samples.

    If the engine supports this (`RolloutBackend.awaiting`), it does not read weights from the model's files, unless
    `rollout.engine_kwargs` sets how they are loaded.
    """
    engine_kwargs = getattr(_factory(cfg.rollout.rollout_backend), "awaiting", None)
    if (
        has_separate_adapters(cfg) or engine_kwargs is None
    ):  # updates omit the base weights, or the engine always loads them
        return cfg
    return with_value(cfg, "rollout.engine_kwargs", {**engine_kwargs, **plain(cfg.rollout.engine_kwargs)})


def is_forkable(name: str) -> bool:
    """Returns whether ranks with this engine (`rollout.rollout_backend`) may be forked.

    Raises:
        ConfigError: The name is unknown.
    """
    return bool(getattr(_factory(name), "forkable", True))


def engine_preload(name: str) -> Sequence[str]:
    """Returns the modules that a node imports once for its ranks with this engine (`Worker.preloads`).

    Raises:
        ConfigError: The name is unknown.
    """
    return tuple(getattr(_factory(name), "preload", ()))


def _factory(name: str) -> EngineFactory:
    """Returns the factory of an engine; a class that does not derive from `RolloutBackend` is wrapped."""
    factory = ENGINES.find(name)
    if isinstance(factory, type) and not issubclass(factory, RolloutBackend):
        return with_base_class(factory)
    return factory
