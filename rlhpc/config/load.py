"""From files and overrides to one read-only, typed configuration. Every mistake is one message."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc import share
from rlhpc.config.files import find_config, read_files
from rlhpc.config.schema import Config
from rlhpc.config.validate import validate
from rlhpc.config.yaml_loader import UniqueKeys
from rlhpc.runtime import environment_values
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plain import read_yaml
from rlhpc.runtime.shown import cut, shown
from rlhpc.runtime.trust import Trust

#: What other projects call a key of ours.
_ALSO_KNOWN_AS = {
    "learning_rate": "lr",
    "lambda": "gae_lambda",
    "batch_size": "global_batch_size",
    "epsilon": "adam_eps",
    "clip_range": "clip_ratio_high",
    "n_steps": "rollout_steps",
    "num_steps": "rollout_steps",
    "n_envs": "num_envs",
    "n_epochs": "update_epochs",
    "max_grad_norm": "clip_grad",
    "ent_coef": "entropy_coef",
    "vf_coef": "value_coef",
    "env": "env_id",
}


def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _nearest(key: str, allowed: Iterable[str], everywhere: Iterable[str], prefix: str) -> str:
    allowed = list(allowed)
    key = _ALSO_KNOWN_AS.get(key, key)
    near = [key] if key in allowed else difflib.get_close_matches(key, allowed, 1, 0.5)
    if near:
        return f"did you mean {prefix}{near[0]}? "
    same = [path for path in everywhere if path.rsplit(".", 1)[-1] == key]
    same = same or difflib.get_close_matches(f"{prefix}{key}", list(everywhere), 1, 0.6)
    return f"did you mean {same[0]}? " if same else ""


def all_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    """Every key of the schema, dotted."""
    keys = []
    for name, kind in _fields(cls).items():
        if dataclasses.is_dataclass(kind):
            keys += all_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _check_keys(content: Any, cls: Any, prefix: str, source: str) -> None:
    """Unknown keys and wrong shapes, with the nearest valid key."""
    if not isinstance(content, dict):
        raise ConfigError(
            f"{source}: {prefix.rstrip('.')} is {shown(content)}; it is a section with the keys {', '.join(_fields(cls))}"
        )
    known = _fields(cls)
    for key, value in content.items():
        if key not in known:
            hint = _nearest(str(key), known, all_keys(), prefix)
            raise ConfigError(f"{source}: unknown key {cut(f'{prefix}{key}')}; {hint}allowed here: {', '.join(known)}")
        kind = known[key]
        if dataclasses.is_dataclass(kind):
            _check_keys(value, kind, f"{prefix}{key}.", source)
        elif typing.get_origin(kind) is list and dataclasses.is_dataclass(typing.get_args(kind)[0]):
            if not isinstance(value, list):
                raise ConfigError(f"{source}: {prefix}{key} is {shown(value)}; it is a list")
            for index, item in enumerate(value):
                _check_keys(item, typing.get_args(kind)[0], f"{prefix}{key}[{index}].", source)
        elif isinstance(value, dict) and kind is not Any and typing.get_origin(kind) is not dict:
            raise ConfigError(f"{source}: {prefix}{key} is {shown(value)}; it must be {_type_name(f'{prefix}{key}')}")


def _type_name(path: str) -> str:
    cls: Any = Config
    for part in path.split("."):
        fields = _fields(cls) if dataclasses.is_dataclass(cls) else {}
        if part not in fields:
            return "another type"
        cls = fields[part]
    return str(getattr(cls, "__name__", cls)).replace("NoneType", "null").replace("typing.", "") if not hasattr(
        cls, "__args__") else str(cls).replace("None", "null")  # fmt: skip


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" not in _OPEN:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_OPEN = frozenset(
    key for key in all_keys() if key.endswith(("kwargs", "component_placement", "env_vars", "deepspeed.config"))
)


def _merge(cfg: DictConfig, content: dict[str, Any], source: str, sources: dict[str, str]) -> None:
    _check_keys(content, Config, "", source)
    for path, value in _leaves(content):
        sources[path] = source
        if isinstance(value, bool) and _type_name(path) in ("int", "float"):
            raise ConfigError(f"{source}: {path} is {shown(value)}; it must be {_type_name(path)}")
        try:
            if (cls := _element(path)) is not None:
                value = [_structured(item, cls, f"{path}[{index}]", source) for index, item in enumerate(value)]
            if path in _OPEN and isinstance(value, dict):
                # A later file replaces such a mapping as a whole: its keys are the user's own.
                OmegaConf.update(cfg, path, value, merge=False)
            else:
                OmegaConf.update(cfg, path, value, merge=isinstance(value, dict))
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{source}: {path} is {shown(value)}; it must be {_type_name(path)} ({_reason(error)})"
            ) from None


def _reason(error: OmegaConfBaseException) -> str:
    return cut(str(error).splitlines()[0], 200)


def _element(path: str) -> Any:
    """The class of a list's elements, where they are sections; else None."""
    cls: Any = Config
    for part in path.split("."):
        cls = _fields(cls).get(part) if dataclasses.is_dataclass(cls) else None
    found = typing.get_args(cls)[0] if typing.get_origin(cls) is list else None
    return found if dataclasses.is_dataclass(found) else None


def _structured(item: dict[str, Any], cls: Any, where: str, source: str) -> DictConfig:
    """One element of a list of sections, typed."""
    section = OmegaConf.structured(cls)
    for key, value in item.items():
        try:
            OmegaConf.update(section, key, value, merge=False)
        except OmegaConfBaseException as error:
            rule = str(_fields(cls)[key]).replace("None", "null")
            raise ConfigError(
                f"{source}: {where}.{key} is {shown(value)}; it must be {rule} ({_reason(error)})"
            ) from None
    return section


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return typing.cast(dict[str, Any], value)


def _override(cfg: DictConfig, text: str) -> dict[str, Any]:
    """`a.b=c` as a nested mapping.

    Below a mapping whose keys are the user's own (`env.train.kwargs.x=1`) it is that mapping with one entry changed.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {shown(text)}: write key=value, for example runner.max_steps=20")
    try:
        value = read_yaml(raw, UniqueKeys) if raw.strip() else None
    except ValueError as error:
        raise ConfigError(f"override {cut(key)}=…: the value is {error}") from None
    except yaml.YAMLError:
        raise ConfigError(f"override {shown(text)}: the value {shown(raw)} is not valid YAML; quote it") from None
    parent = next((path for path in _OPEN if key.startswith(f"{path}.")), None)
    if parent is None:
        return _nest(key.split("."), value)
    own = key.removeprefix(f"{parent}.")
    if not all(part.strip() for part in own.split(".")):
        raise ConfigError(f"override {shown(text)}: {cut(key)} has an empty part; write {parent}.name=value")
    node = OmegaConf.select(cfg, parent)
    entries = typing.cast(dict[str, Any], OmegaConf.to_container(node) if node else {})
    if parent == "cluster.component_placement":
        entries = _placed(entries, own, value)
    else:
        *path, last = own.split(".")
        at = entries
        for part in path:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[last] = value
    return _nest(parent.split("."), entries)


def _placed(placement: dict[str, Any], components: str, value: Any) -> dict[str, Any]:
    """A placement with some components moved: `env=1` takes env out of `actor,rollout,env: 0`."""
    moved = {name.strip() for name in components.split(",")}
    kept = {}
    for names, place in placement.items():
        if left := [name.strip() for name in str(names).split(",") if name.strip() not in moved]:
            kept[",".join(left)] = place
    return {**kept, components: value}


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    check: bool = True,
    training: bool = True,
    site: str | None = None,
    theirs: Trust | None = None,
) -> DictConfig:
    """Reads a configuration.

    Args:
        path: YAML file; the files under its key `defaults:` (relative to it) are read first.
        overrides: `key=value` in order, the value in YAML.
        site: Name or file of the cluster's site file, which fills what neither file nor overrides set under `cluster`, and
            of the workflow's jobs; by default what `RLHPC_SITE` says.
        check: Also run `validate`.
        training: Also check what only training needs: batches, placement, run folder, the suites of later evaluations.
        theirs: The file came with a checkpoint: what it, and the overrides, may name of code.

    Returns:
        A typed, read-only OmegaConf mapping with every key of the schema.

    Raises:
        ConfigError: With file or override, key, what was found, what is allowed.
    """
    cfg = OmegaConf.structured(Config)
    given = find_config(path)
    sources: dict[str, str] = {}
    environment_values.watch()
    for source, content in read_files(given, theirs):
        _merge(cfg, content, source, sources)
    for text in overrides:
        _merge(cfg, _override(cfg, text), f"override {shown(text)}", sources)
    site = os.environ.get("RLHPC_SITE") if site is None else site
    if site:
        _apply_site(cfg, find_site(site), sources)
    _require(cfg, str(given))
    if theirs is not None:
        theirs.check(OmegaConf.to_container(cfg, resolve=True), str(given))
    if check:
        validate(cfg, str(given), sources, training=training)
        if training:
            _check_suites(cfg, str(given), sources)
    OmegaConf.set_readonly(cfg, True)
    return cfg


def _check_suites(cfg: DictConfig, source: str, sources: dict[str, str]) -> None:
    """What each suite changes, as its evaluation will read it: said now and not after the training."""
    for name, changes in cfg.workflow.suites.items():
        own, origin = copy.deepcopy(cfg), dict(sources)
        try:
            for text in changes:
                _merge(own, _override(own, str(text)), f"override {shown(text)}", origin)
            _require(own, source)
            validate(own, source, origin, training=False)
        except ConfigError as error:
            raise ConfigError(
                f"{sources.get(f'workflow.suites.{name}', source)}: workflow.suites.{name}: {error}"
            ) from None


def site_folders() -> list[Path]:
    """Where a site is looked for by name: below the working directory, this project, the user's and the system's."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    system = [Path(p) for p in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if p]
    here = [Path("configs/site"), share.path("configs", "site")]
    return [*here, home / "rlhpc" / "site", *(folder / "rlhpc" / "site" for folder in system)]


def find_site(name: str) -> Path:
    """The site file of a cluster.

    Raises:
        ConfigError: There is none of that name; says which there are.
    """
    given = Path(name).expanduser()
    if given.suffix in (".yaml", ".yml") or len(given.parts) > 1:
        if given.is_file():
            return given
        raise ConfigError(f"no site file {given}")
    for folder in site_folders():
        if (found := folder / f"{name}.yaml").is_file():
            return found
    there = sorted({path.stem for folder in site_folders() for path in folder.glob("*.yaml")})
    near = difflib.get_close_matches(name, there, 1)
    raise ConfigError(
        f"no site {shown(name)}; {f'did you mean {near[0]!r}? ' if near else ''}there are: {', '.join(there) or 'none'} "
        f"(looked in {', '.join(str(folder) for folder in site_folders())})"
    )


def load_site(name: str) -> DictConfig:
    """The section `cluster` of a site file, typed.

    Raises:
        ConfigError: There is no such site, or it has what no site file has.
    """
    return _read_site(find_site(name))[0].cluster


def _read_site(path: Path) -> tuple[DictConfig, dict[str, str]]:
    """A site file on the defaults, and the keys that it gives."""
    layer = OmegaConf.structured(Config)
    given: dict[str, str] = {}
    for source, content in read_files(path):
        stray = [key for key in content if key not in ("cluster", "workflow")]
        jobs = content.get("workflow")
        stray += [f"workflow.{key}" for key in jobs if key not in _SITE_JOBS] if isinstance(jobs, dict) else []
        if stray:
            raise ConfigError(
                f"{source}: {stray[0]}: a site file has the sections cluster, workflow.eval_job and workflow.convert_job "
                "only; it says where, not what"
            )
        _merge(layer, content, source, given)
    if unfit := [key for key in ("component_placement", "num_nodes") if f"cluster.{key}" in given]:
        raise ConfigError(f"{given[f'cluster.{unfit[0]}']}: cluster.{unfit[0]} belongs to a run, not to a site")
    return layer, given


#: What a site says of the jobs beside training.
_SITE_JOBS = ("eval_job", "convert_job")


def _apply_site(cfg: DictConfig, path: Path, sources: dict[str, str]) -> None:
    """Fills what the configuration left open; groups that it does not have are left out."""
    layer, given = _read_site(path)
    for key in given:
        if key.startswith(("cluster.", "workflow.")) and key != "cluster.node_groups" and key not in sources:
            try:
                value = OmegaConf.select(layer, key)
            except OmegaConfBaseException as error:
                raise ConfigError(f"{given[key]}: {key}: {_reason(error)}") from None
            OmegaConf.update(cfg, key, value, merge=False)
            sources[key] = given[key]
    by_label = {str(group.label): group for group in layer.cluster.node_groups}
    for group in cfg.cluster.node_groups:
        for key, value in by_label.get(str(group.label), {}).items():
            if value and not group[key]:
                group[key] = value


def _require(cfg: DictConfig, source: str) -> None:
    """Mandatory values that are missing, and `${...}` that lead nowhere."""
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        # env.eval follows env.train, so that what is missing there shows twice.
        missing = [
            key for key in missing if key.replace("env.eval.", "env.train.") not in missing or "env.eval." not in key
        ]
        if str(cfg.runner.task_type).lower() in ("embodied", "off_policy", "bc") and not cfg.env.train.env_id:
            missing.append("env.train.env_id")
        if missing:
            raise ConfigError(f"{source}: {missing[0]} is missing; set it in the file or with {missing[0]}=…")
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{source}: {key}{_reason(error)}") from None


def config_to_yaml(cfg: DictConfig | ListConfig) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to the same.

    What depends on the environment (`${oc.env:…}`) stays as it was written: it may be a secret, and a run that is started
    again reads its own.
    """
    return OmegaConf.to_yaml(OmegaConf.create(environment_values.to_plain(cfg)))


def total_steps(cfg: Any) -> int:
    """Steps of the whole run: `runner.max_steps`, or `runner.max_epochs` where that is -1."""
    steps = int(cfg.runner.max_steps)
    return steps if steps >= 0 else int(cfg.runner.max_epochs)


def segment_end(total: int, segment: int, segments: int) -> int:
    """The step at which a segment ends."""
    return math.ceil(total * (segment + 1) / segments)


def segment_ends(cfg: Any) -> list[int]:
    """The step at which each of the run's segments ends, as planned."""
    count = int(cfg.runner.segments)
    return [segment_end(total_steps(cfg), k, count) for k in range(count)]
