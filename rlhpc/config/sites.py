"""Site files: a cluster's values for keys that configurations leave open."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc import share
from rlhpc.config.files import read_files
from rlhpc.config.merge import ConfigLayers, reason
from rlhpc.config.schema import Schema
from rlhpc.config.sections import JobConfig
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.launchers.srun_commands import broken_srun_rule
from rlhpc.runtime.plugins import suggest_name
from rlhpc.runtime.text import short_repr


@dataclass
class SiteJobs:
    """Job resources of a site, for jobs other than training."""

    eval_job: JobConfig = field(default_factory=JobConfig)
    convert_job: JobConfig = field(default_factory=lambda: JobConfig(mem="8G"))


@dataclass
class SiteConfig:
    """Sections of a site file."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    workflow: SiteJobs = field(default_factory=SiteJobs)


def site_folders() -> list[Path]:
    """Returns the folders that are searched for a site by name.

    They are in the working directory, in rlhpc, in the user's configuration folder and in the system's configuration folders.
    """
    config_home = expand_home(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    system_folders = [Path(p) for p in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if p]
    local_folders = [Path("configs/site"), share.path("configs", "site")]
    return [*local_folders, config_home / "rlhpc" / "site", *(folder / "rlhpc" / "site" for folder in system_folders)]


def find_site(name: str) -> Path:
    """Returns the site file of a cluster.

    Raises:
        ConfigError: No site has that name; the message lists the existing sites.
    """
    location = expand_home(name)
    if location.suffix in (".yaml", ".yml") or len(location.parts) > 1:
        if location.is_file():
            return location
        raise ConfigError(f"no site file {location}")
    for folder in site_folders():
        if (site_file := folder / f"{name}.yaml").is_file():
            return site_file
    site_names = sorted({path.stem for folder in site_folders() for path in folder.glob("*.yaml")})
    raise ConfigError(
        f"no site {short_repr(name)}; {suggest_name(name, site_names)}there are: {', '.join(site_names) or 'none'} "
        f"(looked in {', '.join(str(folder) for folder in site_folders())})"
    )


def load_site(name: str) -> DictConfig:
    """Returns section `cluster` of a site file, typed.

    Raises:
        ConfigError: The site does not exist, or its file has a key that site files cannot have.
    """
    cluster: DictConfig = _read_site(find_site(name)).cfg.cluster
    return cluster


def _read_site(path: Path) -> ConfigLayers:
    """Reads a site file, merged onto the defaults."""
    layers = ConfigLayers(Schema(SiteConfig))
    for source, content in read_files(path):
        unknown_keys = [key for key in content if key not in ("cluster", "workflow")]
        jobs = content.get("workflow")
        job_keys = layers.schema.type_of("workflow").__dataclass_fields__
        unknown_keys += [f"workflow.{key}" for key in jobs if key not in job_keys] if isinstance(jobs, dict) else []
        if unknown_keys:
            raise ConfigError(
                f"{source}: {unknown_keys[0]}: a site file has the sections cluster, workflow.eval_job and "
                f"workflow.convert_job "
                "only; it says where, not what"
            )
        layers.add(content, source)
    sources = layers.sources
    if run_keys := [key for key in ("component_placement", "num_nodes") if f"cluster.{key}" in sources]:
        raise ConfigError(f"{sources[f'cluster.{run_keys[0]}']}: cluster.{run_keys[0]} belongs to a run, not to a site")
    if rule := broken_srun_rule(layers.cfg.cluster.srun):
        raise ConfigError(
            f"{sources['cluster.srun']}: cluster.srun is {short_repr(list(layers.cfg.cluster.srun))}; {rule}"
        )
    return layers


def apply_site(layers: ConfigLayers, path: Path) -> None:
    """Fills in values that a configuration leaves open.

    Node groups of the site that the configuration does not have are ignored.

    Raises:
        ConfigError: The site file has a key that site files cannot have.
    """
    site, cfg = _read_site(path), layers.cfg
    for key, source in site.sources.items():
        if "." in key and key != "cluster.node_groups" and key not in layers.sources:
            try:
                site_value = OmegaConf.select(site.cfg, key)
            except OmegaConfBaseException as error:
                raise ConfigError(f"{source}: {key}: {reason(error)}") from None
            OmegaConf.update(cfg, key, site_value, merge=False)
            layers.sources[key] = source
    groups = "cluster.node_groups"
    site_values_by_label = {
        str(group.label): {key: group[key] for key in keys}
        for group, keys in zip(site.cfg.cluster.node_groups, site.element_keys.get(groups, []), strict=True)
    }
    for group, keys in zip(cfg.cluster.node_groups, layers.element_keys.get(groups, []), strict=True):
        for key, site_value in site_values_by_label.get(str(group.label), {}).items():
            if key not in keys:  # a 0 or {} that the run sets has precedence, too
                group[key] = site_value
