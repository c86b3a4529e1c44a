"""Configuration loading: `load_config` reads files and overrides into a typed configuration and checks the values."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from rlhpc.config.files import ConfigSource, source_name
from rlhpc.config.load import complete, read_layers
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import typed
from rlhpc.runs.checks import validate
from rlhpc.runs.task_type import task_type_keys, task_type_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_keywords
from rlhpc.runtime.trust import Trust


@former_keywords(theirs="trust")
def load_config(
    config: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    check: bool = True,
    training: bool = True,
    site: str | None = None,
    trust: Trust | None = None,
) -> RunConfig:
    """Reads a configuration.

    Args:
        config: YAML file; the files under its key `defaults:` (relative to it) are read first. Or a mapping in place of the
            file's content, whose `defaults` are relative to the working directory.
        overrides: `key=value` in order, the value in YAML.
        site: Name or file of the cluster's site file, which fills what neither file nor overrides set under `cluster`, and
            of the workflow's jobs; by default the value of `RLHPC_SITE`.
        check: Also run `validate`.
        training: Also check what only training needs: batches, placement, run folder, the suites of later evaluations.
        trust: Code that the file and the overrides may name, if the file came with a checkpoint.

    Returns:
        A typed, read-only OmegaConf mapping with every key of its task type: `typed(PpoConfig, …)` tells a type checker
        which keys these are.

    Raises:
        ConfigError: Names file or override, key, value, and the allowed values.
    """
    source = source_name(config)
    layers = read_layers(config, overrides, task_type_keys, site=site, trust=trust)
    cfg = typed(RunConfig, layers.cfg)
    if check:
        validate(cfg, source, layers.sources, training=training)
        if training:
            _check_suites(layers, source)
    OmegaConf.set_readonly(layers.cfg, True)
    return cfg


def _check_suites(layers: ConfigLayers, source_name: str) -> None:
    """Checks the changes of each suite as its evaluation will read them, so that mistakes appear before training."""
    for name, suite_changes in typed(RunConfig, layers.cfg).workflow.suites.items():
        suite_layers = layers.copy()
        try:
            for override_text in suite_changes:
                suite_layers.override(override_text)
            cfg = typed(RunConfig, suite_layers.cfg)
            complete(suite_layers, task_type_of(cfg).keys, source_name)
            validate(cfg, source_name, suite_layers.sources, training=False)
        except ConfigError as error:
            raise ConfigError(
                f"{layers.sources.get(f'workflow.suites.{name}', source_name)}: workflow.suites.{name}: {error}"
            ) from None
