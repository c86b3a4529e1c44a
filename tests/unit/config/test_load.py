"""Files, includes and overrides become one typed, read-only configuration."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from rlhpc.config import config_to_yaml
from rlhpc.config.constraints import null_numbers
from rlhpc.config.merge import ConfigLayers
from rlhpc.reference import render_config
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import TaskType, all_task_types
from rlhpc.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
RUNS = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("base", "site", "sweeps"))


@pytest.fixture
def write(tmp_path: Path) -> typing.Callable[..., Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


MINIMAL = "runner: {name: x, max_steps: 1}\nenv: {train: {env_id: CartPole-v1}}\n" + (
    "cluster: {accelerators_per_node: 0, component_placement: {'actor,rollout,env': 0}}\n"
)


#: Folders that other runs leave, by the configuration that reads one before it starts.
LEFT_BY_RUNS = {"algorithms/iql.yaml": "algorithm.demo_buffer.load_path"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_configuration_is_valid(path: Path, tmp_path: Path) -> None:
    key = LEFT_BY_RUNS.get(str(path.relative_to(CONFIGS)))
    cfg = load_config(path, [f"{key}={tmp_path}"] if key else [])
    assert cfg.runner.name == path.stem


def test_minimal(write: typing.Callable[..., Path]) -> None:
    cfg = load_config(write("c.yaml", MINIMAL))
    assert cfg.algorithm.gamma == 0.99 and cfg.env.eval.env_id == "CartPole-v1"


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_null_is_none_for_every_interval(kind: TaskType[Any]) -> None:
    """The number that an interval has for none may be written as null; elsewhere null is refused in one sentence."""
    nulls = null_numbers(kind.keys.by_path)
    # Weights reach the rollout ranks some time, and a loss scale that never grew would be too small after an overflow.
    always = ("runner.weight_sync_interval", ".grad_scaler.growth_interval")
    intervals = [key for key in kind.schema.keys if key.endswith("_interval") and not key.endswith(always)]
    assert "runner.save_interval" in intervals and set(intervals) <= set(nulls)
    for key in nulls:
        if key in kind.schema:
            layers = ConfigLayers(kind.schema, kind.keys, nulls)
            layers.override(f"{key}=null")
            assert OmegaConf.select(layers.cfg, key) == nulls[key], key
    with pytest.raises(ConfigError, match=r"runner\.seed is null; it must be int$"):
        layers.override("runner.seed=null")


def test_intervals_of_a_file_may_be_null(write: typing.Callable[..., Path]) -> None:
    text = MINIMAL.replace(
        "max_steps: 1", "max_steps: 1, save_interval: null, val_check_interval: null, max_epochs: null"
    )
    runner = load_config(write("c.yaml", text)).runner
    assert (runner.save_interval, runner.val_check_interval, runner.max_epochs) == (-1, -1, -1)


def test_read_only(write: typing.Callable[..., Path]) -> None:
    cfg = load_config(write("c.yaml", MINIMAL))
    with pytest.raises(ReadonlyConfigError):
        cfg.runner.seed = 5
    with pytest.raises(ReadonlyConfigError):
        cfg.env.train.kwargs["x"] = 5


def test_later_wins(write: typing.Callable[..., Path]) -> None:
    write("base/deep.yaml", MINIMAL + "algorithm: {gamma: 0.5, gae_lambda: 0.5, update_epochs: 5}\n")
    write("base/b.yaml", "defaults: [deep.yaml]\nalgorithm: {gae_lambda: 0.6, update_epochs: 6}\n")
    path = write("run/c.yaml", "defaults: [../base/b.yaml]\nalgorithm: {update_epochs: 7, gamma: 0.4}\n")
    cfg = load_config(path, ["algorithm.gamma=0.1", "algorithm.gamma=0.2"])
    assert (cfg.algorithm.gamma, cfg.algorithm.gae_lambda, cfg.algorithm.update_epochs) == (0.2, 0.6, 7)


def test_a_word_that_yaml_takes_for_a_boolean_needs_no_quotes(write: typing.Callable[..., Path]) -> None:
    path = write("c.yaml", MINIMAL + "rollout: {weight_delta: off}\n")
    assert load_config(path).rollout.weight_delta == "off"
    assert load_config(write("d.yaml", MINIMAL), ["rollout.weight_delta=off"]).rollout.weight_delta == "off"
    assert load_config(write("d.yaml", MINIMAL), ["algorithm.anneal_lr=on"]).algorithm.anneal_lr is True


def test_a_resolved_configuration_reads_back_the_same(write: typing.Callable[..., Path]) -> None:
    overrides = [
        "cluster.node_groups=[{label: a, time: 02:00:00, node_ranks: '0'}]",
        "cluster.component_placement={actor: '0:0', 'rollout,env': 0}",
        "env.train.kwargs.render_mode=rgb_array",
        "runner.name=2026-01-01",
        "runner.stop_return=475",
        "actor.optim.lr=1e-3",
    ]
    cfg = load_config(CONFIGS / "quickstart.yaml", overrides)
    text = config_to_yaml(cfg)
    again = load_config(write("config.yaml", text))
    assert config_to_yaml(again) == text and "${" not in text
    assert OmegaConf.to_container(OmegaConf.load(write("config.yaml", text))) == OmegaConf.to_container(
        cfg, resolve=True
    )


def test_survives_pickling() -> None:
    cfg = pickle.loads(pickle.dumps(load_config(CONFIGS / "quickstart.yaml")))
    assert cfg.env.eval.env_id == "CartPole-v1"


class TestValues:
    """What YAML means here."""

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1e-3", 1e-3),
            ("1.e-3", 1e-3),
            ("2.5e-4", 2.5e-4),
            (".5", 0.5),
            ("1E2", 100.0),
            ("3", 3.0),
            ("1_000", 1000.0),
        ],
    )
    def test_numbers(self, text: str, value: float) -> None:
        assert load_config(CONFIGS / "quickstart.yaml", [f"runner.stop_return={text}"]).runner.stop_return == value

    @pytest.mark.parametrize("text", ["1:0", "1:3-4", "0:0-1", "1", "0-1:0-3,2:4", "all"])
    def test_a_placement_is_text(self, text: str) -> None:
        cfg = load_config(CONFIGS / "quickstart.yaml", [f"cluster.component_placement.actor={text}"], check=False)
        assert str(cfg.cluster.component_placement.actor) == text

    def test_a_walltime_is_text(self) -> None:
        groups = "cluster.node_groups=[{label: a, time: 12:30:00, mem: 64G}]"
        group = load_config(CONFIGS / "quickstart.yaml", [groups]).cluster.node_groups[0]
        assert (group.time, group.mem, group.partition) == ("12:30:00", "64G", None)

    def test_empty_is_null(self) -> None:
        assert load_config(CONFIGS / "quickstart.yaml", ["actor.optim.clip_grad="]).actor.optim.clip_grad is None

    def test_value_with_an_equals_sign(self) -> None:
        cfg = load_config(CONFIGS / "quickstart.yaml", ["env.train.kwargs.text=a=b"], check=False)
        assert cfg.env.train.kwargs.text == "a=b"

    def test_reference_to_another_key(self) -> None:
        cfg = load_config(CONFIGS / "quickstart.yaml", ["runner.name=seed-${runner.seed}", "runner.seed=7"])
        assert cfg.runner.name == "seed-7"


class TestEvaluationFollowsTraining:
    """The policy is evaluated in what it was trained on, unless the user says otherwise."""

    def test_follows(self) -> None:
        overrides = [
            "env.train.env_id=Acrobot-v1",
            "env.train.max_episode_steps=50",
            "env.train.kwargs.render_mode=ansi",
        ]
        side = load_config(CONFIGS / "quickstart.yaml", overrides, check=False).env.eval
        assert (side.env_id, side.max_episode_steps, side.kwargs.render_mode) == ("Acrobot-v1", 50, "ansi")

    def test_own_value(self) -> None:
        overrides = ["env.train.max_episode_steps=50", "env.eval.max_episode_steps=1000"]
        cfg = load_config(CONFIGS / "quickstart.yaml", overrides)
        assert (cfg.env.train.max_episode_steps, cfg.env.eval.max_episode_steps) == (50, 1000)

    def test_one_argument_more(self) -> None:
        overrides = ["env.train.kwargs.a=1", "env.eval.kwargs.b=2"]
        cfg = load_config(CONFIGS / "quickstart.yaml", overrides, check=False)
        assert dict(cfg.env.train.kwargs) == {"a": 1} and dict(cfg.env.eval.kwargs) == {"a": 1, "b": 2}

    def test_an_argument_within_an_argument(self) -> None:
        overrides = ["env.train.kwargs={a: {b: 1, c: 2}, d: 3}", "env.train.kwargs.a.b=5"]
        cfg = load_config(CONFIGS / "quickstart.yaml", overrides, check=False)
        assert OmegaConf.to_container(cfg.env.train.kwargs) == {"a": {"b": 5, "c": 2}, "d": 3}


class TestPlacementOverrides:
    """One component moves, or all are placed anew."""

    def test_one_moves(self) -> None:
        cfg = load_config(CONFIGS / "quickstart.yaml", ["cluster.component_placement.env=0:0-1"])
        assert dict(cfg.cluster.component_placement) == {"actor,rollout": 0, "env": "0:0-1"}

    def test_all_anew(self) -> None:
        placement = "cluster.component_placement={actor: 0, 'rollout,env': '0:0-1'}"
        cfg = load_config(CONFIGS / "quickstart.yaml", [placement])
        assert dict(cfg.cluster.component_placement) == {"actor": 0, "rollout,env": "0:0-1"}


class TestMessages:
    """The file or override at fault is the one that is named."""

    def test_the_include_is_named(self, write: typing.Callable[..., Path]) -> None:
        base = write("base.yaml", "algorithm: {gama: 1}\n")
        with pytest.raises(ConfigError, match=rf"{base}: unknown key algorithm\.gama"):
            load_config(write("c.yaml", "defaults: [base.yaml]\n" + MINIMAL))

    def test_the_include_that_set_the_value_is_named(self, write: typing.Callable[..., Path]) -> None:
        base = write("base.yaml", "algorithm: {gamma: 2}\n")
        with pytest.raises(ConfigError, match=rf"{base}: algorithm\.gamma is 2"):
            load_config(write("c.yaml", "defaults: [base.yaml]\n" + MINIMAL))

    def test_the_override_that_set_the_value_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"override 'algorithm\.gamma=2': algorithm\.gamma is 2"):
            load_config(CONFIGS / "quickstart.yaml", ["algorithm.gae_lambda=0.9", "algorithm.gamma=2"])

    def test_evaluation_alone_needs_no_placement(self) -> None:
        overrides = ["cluster.component_placement={actor: 7}", "actor.global_batch_size=300"]
        load_config(CONFIGS / "quickstart.yaml", overrides, training=False)
        with pytest.raises(ConfigError, match=r"env\.eval\.num_envs is -1"):
            load_config(CONFIGS / "quickstart.yaml", [*overrides, "env.eval.num_envs=-1"], training=False)


def _classes(cls: type) -> list[type]:
    found = [cls]
    for kind in typing.get_type_hints(cls).values():
        for inner in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(inner):
                found += _classes(typing.cast(type, inner))
    return found


def test_a_saved_configuration_may_say_what_its_kind_of_run_has_no_more(tmp_path: Path) -> None:
    saved = OmegaConf.create(config_to_yaml(load_config(CONFIGS / "reasoning/demo_sft.yaml")))
    saved.reward.max_failed_steps = 0
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(saved))
    assert "max_failed_steps" not in load_config(path).reward
    del saved.runner.step_timeout_s  # as somebody would write it
    path.write_text(OmegaConf.to_yaml(saved))
    with pytest.raises(ConfigError, match=r"reward\.max_failed_steps is for a task type that this one .* reasoning"):
        load_config(path)


class TestReference:
    """docs/reference/config.md."""

    def test_current(self) -> None:
        page = ROOT / "docs" / "reference" / "config.md"
        assert page.read_text() == render_config(), f"run: python -m rlhpc.reference config > {page.relative_to(ROOT)}"

    def test_every_key_is_in_it(self) -> None:
        page = render_config()
        assert [key for kind in all_task_types() for key in kind.schema.keys if f"| `{key}` |" not in page] == []

    @pytest.mark.parametrize(
        "cls",
        sorted({cls for kind in all_task_types() for cls in _classes(kind.config)[1:]}, key=lambda cls: cls.__name__),
        ids=lambda cls: cls.__name__,
    )
    def test_every_field_is_described(self, cls: type) -> None:
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef) and cls.__doc__
        for item, following in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign):
                assert isinstance(following, ast.Expr), f"{cls.__name__}.{ast.unparse(item.target)} has no docstring"


@pytest.mark.parametrize("name", ["quickstart.yaml", "reasoning/demo.yaml", "reasoning/dpo.yaml"])
def test_loading_imports_no_torch(name: str) -> None:
    code = (
        "import sys; from rlhpc import load_config; load_config(sys.argv[1]); "
        "sys.exit(int('torch' in sys.modules or 'submitit' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code, str(CONFIGS / name)], check=True, timeout=60)
