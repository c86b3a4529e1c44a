"""Kinds of run whose processes write down which keys of the configuration their code reads; named as `read_keys:PPO`.

They are the package's own kinds, but for the fork server, which imports this module, too: from then on every read of a key by
name is noted, once a process, in a file that `RLHPC_TEST_READS` names. What loads, checks, compares, shows or saves a
configuration reads all of it, so that its reads say nothing about whether a key does something: they are left out.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhpc.config import typed
from rlhpc.embodied import task_types as embodied
from rlhpc.embodied.interventions.sources import Intervention, Mark, Signals
from rlhpc.language import task_types as language
from rlhpc.runs.task_type import TaskType
from rlhpc.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
#: Where the files whose reads count are.
OURS = (f"{ROOT}/rlhpc/", f"{ROOT}/workflow/")
#: Files that read keys for others: those of the next frame are meant.
FOR_OTHERS = (f"{ROOT}/rlhpc/config/",)
FUNCTIONS_FOR_OTHERS = ("read_key",)
#: What passes over whole configurations.
LOOKS_ONLY = (
    "/checks.py", "/metrics/provenance.py", "/runtime/env_references.py", "/runs/config_changes.py", "/runs/run_identity.py",
    "/embodied/export.py", "/checkpoint/export_folder.py", "/report.py", "/metrics/curves.py", "/runs/compare.py",
    "/language/reporting/sample_pages.py", "/conditional_keys.py", "/config/constraints.py", "/runs/configuration.py",
    "/language/planning/memory_accounts.py", "/embodied/planning.py",
)  # fmt: skip
for _ending in LOOKS_ONLY:
    assert any(str(path).endswith(_ending) for path in (ROOT / "rlhpc").rglob("*.py")), (
        f"no module is named {_ending} any more"
    )
_seen: set[str] = set()


def _reader() -> str:
    """Whose code asks: the nearest frame of the package's that reads for itself; empty where it only looks or checks."""
    frame, found, looks = sys._getframe(2), "", False
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name.startswith(OURS):
            function = code.co_name
            looks = looks or name.endswith(LOOKS_ONLY) or function.startswith(("check", "find_missing", "require"))
            if function == "init_worker":  # a rank that builds with what checks by building
                return found or f"{name.removeprefix(str(ROOT) + '/')}:{function}"
            if not found and not name.startswith(FOR_OTHERS) and function not in FUNCTIONS_FOR_OTHERS:
                found = f"{name.removeprefix(str(ROOT) + '/')}:{function}"
        frame = frame.f_back  # type: ignore[assignment]
    return "" if looks else found


def note(node: Any, key: Any) -> None:
    """Writes down that a key below a node was read."""
    out = os.environ.get("RLHPC_TEST_READS")
    if not out or not isinstance(key, str):
        return
    full = str(node._get_full_key(key))
    full = f"{node.__dict__['_taken_from']}.{full}" if "_taken_from" in node.__dict__ else full
    if full in _seen or not (reader := _reader()):
        return
    _seen.add(full)
    with open(out, "a") as file:
        file.write(f"{os.environ['RLHPC_TEST_KIND']}\t{full}\t{reader}\n")
    below = OmegaConf.to_container(node, resolve=False)
    for part in key.split("."):
        below = below.get(part) if isinstance(below, dict) else None
    if isinstance(below, str) and (other := re.fullmatch(r"\$\{([\w.]+)\}", below)):  # what it stands for is read, too
        note(node._get_root(), other[1])


def install() -> None:
    """Notes what is read of any configuration in this process."""
    plain_attribute, plain_item, plain_get, plain_select = (
        DictConfig.__getattr__, DictConfig.__getitem__, DictConfig.get, OmegaConf.select,
    )  # fmt: skip

    def attribute(self: Any, key: str) -> Any:
        if not key.startswith("_"):
            note(self, key)
        return plain_attribute(self, key)

    def item(self: Any, key: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(OURS):  # not OmegaConf itself, going over all
            note(self, key)
        return plain_item(self, key)

    def get(self: Any, key: Any, default_value: Any = None) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(OURS):
            note(self, key)
        return plain_get(self, key, default_value)

    def select(cfg: Any, key: str, **options: Any) -> Any:
        note(cfg, key)
        return plain_select(cfg, key, **options)

    def alone(section: Any) -> Any:
        copy = plain_alone(section)
        copy.__dict__["_taken_from"] = section._get_full_key(None)
        return copy

    plain_alone, typed.alone = typed.alone, alone  # a section by itself, for another process
    DictConfig.__getattr__ = attribute  # type: ignore[method-assign]
    DictConfig.__getitem__ = item  # type: ignore[method-assign]
    DictConfig.get = get  # type: ignore[method-assign]
    OmegaConf.select = staticmethod(select)  # type: ignore[method-assign]


install()
ME = (Path(__file__).stem,)


def with_me(kind: TaskType[Any]) -> TaskType[Any]:
    """The task type, whose fork server also imports this module."""
    groups = copy.copy(kind.groups)
    groups.preload = (*groups.preload, *ME)
    return TaskType(
        kind.name,
        kind.config,
        groups,
        kind.runner,
        checks=kind.checks,
        offline=kind.offline,
        reporting=kind.reporting,
        planning=kind.planning,
    )


PPO, SAC, BC = (with_me(kind) for kind in (embodied.PPO, embodied.SAC, embodied.BC))
GRPO, SFT, REWARD_MODEL, DPO = (
    with_me(kind) for kind in (language.GRPO, language.SFT, language.REWARD_MODEL, language.DPO)
)


def expert(obs: Any) -> Any:
    """Pendulum's: some torque, whatever it sees."""
    return obs[:, :1] * 0 + 0.5


class Marks(Intervention):
    """Never leads, and marks every third step, as a success and as a failure in turn."""

    one_slot = True

    def __init__(self) -> None:
        self._calls = 0

    def act(self, obs: Any, actions: Any, picture: Any) -> tuple[Any, Any]:
        return actions, actions[:, 0] != actions[:, 0]

    def signals(self) -> Signals:
        self._calls += 1
        return Signals((Mark.SUCCESS, Mark.FAILURE)[self._calls // 3 % 2] if self._calls % 3 == 0 else Mark.NONE)


def beside_runs(config: str, overrides: list[str]) -> None:
    """Calls what a small run does not reach: the plan for Slurm, DeepSpeed's options, simulators' processes, networks."""
    from rlhpc.jobs.plan import build_plan
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.memory.plan import compute_memory_plan

    cfg: Any = load_config(config, overrides, training=False)
    compute_memory_plan(cfg, build_plan(cfg, launcher="slurm"))
    if "deepspeed" in cfg.actor:
        import torch

        from rlhpc.training.deepspeed_config import deepspeed_config

        for section in ("actor", "critic"):
            if section in cfg:
                deepspeed_config(cfg[section], torch.float32)
    if "data" in cfg and "label_key" in cfg.data.train:
        from rlhpc.language.data.preferences import Preferences

        for form in ("pairs", "labels"):  # a run reads one of them
            Preferences(cfg.data.train, form)
            Preferences(cfg.data.eval[0], form, "eval")
    if "env" not in cfg:
        return
    from gymnasium.spaces import Box

    from rlhpc.config.typed import with_value
    from rlhpc.embodied.envs.registry import make_env
    from rlhpc.embodied.models import build_model, policy_section

    for side in (cfg.env.train, cfg.env.eval) if "num_envs" in cfg.env.train else (cfg.env.eval,):
        make_env(with_value(side, "simulators", 1), 1, slot_offset=0, seed=0, stage="eval").close()
    if "lora" not in cfg.actor:
        return
    policy_section(with_value(cfg.actor, "lora.rank", 2))
    numbers, pictures = Box(-1, 1, (3,)), Box(0, 255, (8, 8, 3), "uint8")
    networks = [("vla", path, pictures) for path in ("no/folder", "builtin:tiny")]
    networks += [("sac", None, numbers)] if "critic_layer_norm" in cfg.actor.model else []
    for name, path, observations in networks:
        model = with_value(with_value(cfg.actor.model, "model_type", name), "model_path", path)
        with contextlib.suppress(ConfigError):  # there is no such folder, after all
            build_model(model, observations, Box(-1, 1, (1,)))


if __name__ == "__main__":
    beside_runs(sys.argv[1], sys.argv[2:])
