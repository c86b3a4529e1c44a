"""Registry of language-model algorithms. Users register a class, add an entry point of group `rlhpc.language_algorithms`, or
name a `module:Class`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhpc.config.options import check_options
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.language.algorithms.base import LanguageAlgorithm
    from rlhpc.language.config.run import GrpoConfig

ALGORITHMS: Registry[Callable[..., LanguageAlgorithm]] = Registry(
    "algorithm", "algorithm.name", "rlhpc.language_algorithms",
    {
        "policy_gradient": "rlhpc.language.algorithms.policy_gradient:PolicyGradient",
        "distillation": "rlhpc.language.algorithms.distillation:Distillation",
    },
)  # fmt: skip
register_algorithm = ALGORITHMS.register


def make_algorithm(cfg: GrpoConfig) -> LanguageAlgorithm:
    """Builds the algorithm of `algorithm.name`.

    Raises:
        ConfigError: The name is unknown or not an algorithm, the class does not accept `algorithm.kwargs`, or a column has a
            reserved or repeated name.
    """
    from rlhpc.language.algorithms.base import ADVANTAGES, ROLLOUT_LOGPROBS, VERSIONS, LanguageAlgorithm

    name = cfg.algorithm.name
    factory = ALGORITHMS.find(name)
    if not (isinstance(factory, type) and issubclass(factory, LanguageAlgorithm)):
        raise ConfigError(f"algorithm.name is {name!r}, which is no subclass of rlhpc.LanguageAlgorithm")
    algorithm = factory(cfg, **check_options(factory, cfg.algorithm.kwargs, "algorithm.kwargs", f"algorithm {name}", 1))
    column_names = [column.name for column in algorithm.columns]
    reserved_names = [
        n for n in column_names if n in (ADVANTAGES, ROLLOUT_LOGPROBS, VERSIONS) or column_names.count(n) > 1
    ]
    if reserved_names:
        raise ConfigError(
            f"algorithm.name is {name!r}, whose column {reserved_names[0]!r} is there already: give it another name"
        )
    return algorithm
