"""Checkpoints, exports, configurations and data sets from elsewhere: they name no code, and read nothing of the user's."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc.cli import main
from rlhpc.config import config_to_yaml
from rlhpc.embodied.export import export_checkpoint, load_exported
from rlhpc.embodied.models.registry import MODELS
from rlhpc.runs.configuration import load_config
from rlhpc.runs.run_folder import RunFolder
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.trust import Trust
from tests.attack.files import FILES, RUN, Place, attacked, changed
from tests.drawn import drawn

SHORT = drawn("files", FILES, least=4, always=[
    "config: env_type", "config: wrappers", "config: reward", "config: variable", "config: interpreter", "config: remote code",
    "config: suite",
    "config: bomb", "downloaded: deep", "model: type", "manifest: deep", "hdf5: external storage of obs", "hdf5: virtual obs",
    "hdf5: external link to obs", "hdf5: soft link over one", "replay: above", "lerobot: absolute", "lerobot: attribute",
    "lerobot: wide", "report: not text",
])  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", SHORT)
def test_files_from_elsewhere(name, tmp_path, monkeypatch):
    """Those that once gained something, and a part of all."""
    monkeypatch.chdir(tmp_path)
    assert attacked(name) == ""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkpoint whose environment is of a module of the user's own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Place(tmp_path)
    (tmp_path / "own_env.py").write_text(
        "import gymnasium\nfrom rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv\n"
        "class Own(GymnasiumVectorEnv): pass\nclass Mine(Own): pass\nclass Same(gymnasium.Wrapper): pass\n"
    )
    yield made
    sys.modules.pop("own_env", None)


def test_a_checkpoint_that_an_own_run_wrote_is_trusted_until_it_is_changed(place, tmp_path, capsys):
    folder = place.checkpoint(changed("env", "train", "env_type", value="own_env:Mine"), own=True)
    words = ["eval", "--checkpoint", str(folder), "--episodes", "1", "--output", str(tmp_path / "result.json")]
    assert main(words) == 0
    capsys.readouterr()
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("own_env:Mine", "own_env:New"))
    assert main(words) == 2
    assert "env.train.env_type is 'own_env:New'" in capsys.readouterr().err


def test_a_checkpoint_of_a_stranger(place, tmp_path, capsys):
    """The flag, or the user's configuration, lets it name what it needs; the message says so."""
    folder = place.checkpoint(changed("env", "train", "env_type", value="own_env:Own"))
    result = tmp_path / "result.json"
    words = ["eval", "--checkpoint", str(folder), "--episodes", "1", "--output", str(result)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert (
        "env.train.env_type is 'own_env:Own'" in said
        and "--trust-checkpoint-code" in said
        and "own_env" not in sys.modules
    )
    assert main([*words, "--trust-checkpoint-code"]) == 0 and json.loads(result.read_text())["episodes"] == 1
    (tmp_path / "mine.yaml").write_text(changed("env", "train", "env_type", value="own_env:Own"))
    assert main([*words, "--config", str(tmp_path / "mine.yaml")]) == 0
    plain = place.checkpoint()
    words[2] = str(plain)
    assert main([*words, "env.eval.wrappers=[own_env:Same]"]) == 0  # the user's own words are no part of the checkpoint
    assert main(["convert", "--checkpoint", str(folder), "--output", str(tmp_path / "out")]) == 0  # it builds nothing


def test_a_model_of_the_users_own(place, tmp_path):
    (tmp_path / "own_model.py").write_text("from rlhpc.embodied.models.mlp import MLPPolicy as Own\n")
    folder = export_checkpoint(place.checkpoint(model_type="own_model:Own"))
    with pytest.raises(ConfigError, match=r"actor\.model\.model_type is 'own_model:Own'.*trust_code=True"):
        load_exported(folder)
    assert "own_model" not in sys.modules and "mlp" in MODELS.names()
    assert load_exported(folder, trust_code=True).state_dict()
    sys.modules.pop("own_model")


def test_names_that_are_no_code():
    Trust().check(
        {"env": {"wrappers": ["gymnasium.wrappers:FlattenObservation"], "kwargs": {"note": "a: b", "time": "10:30"}},
         "actor": {"model": {"model_path": "builtin:tiny"}},
         "workflow": {"demos_expert": "rlhpc.embodied.envs.experts:push_cube"},
         "reward": {"terms": [{"name": "http", "kwargs": {"url": "http://host:80/x"}}]}}, "config.yaml",
    )  # fmt: skip
    for wrapper in ("a.b:C", "gymnasium.wrappers:RecordVideo"):  # which writes files wherever it is told to
        with pytest.raises(ConfigError, match=rf"there: env\.wrappers\[0\] is '{wrapper}'"):
            Trust().check({"env": {"wrappers": [{wrapper: {"video_folder": "/tmp"}}]}}, "there")
    with pytest.raises(ConfigError, match=r"there: rollout\.agent is 'a\.b:C'"):
        Trust().check({"rollout": {"agent": "a.b:C"}}, "there")
    Trust.from_config({"reward": {"terms": [{"name": "a.b:C"}]}}).check({"rollout": {"agent": "a.b:C"}}, "there")
    program = {"agent": {"kind": "command", "command": ["rm", "-r"]}}
    for agent in (program, {"agent": {"python": "/tmp/python"}}):
        with pytest.raises(ConfigError, match=r"there: agent\.(command\[0\]|python) is .*, which starts a program"):
            Trust().check(agent, "there")
    elsewhere = [
        ({"servers": [{"command": ["rm"]}]}, r"servers\[0\]\.command\[0\]"),
        ({"servers": [{"url": "http://1.2.3.4"}]}, r"servers\[0\]\.url"),
        ({"services": [{"name": "db", "command": ["rm"]}]}, r"services\[0\]"),
        ({"framework": {"taskset": {"id": "theirs"}}}, r"framework\.taskset\.id"),
    ]
    for section, key in elsewhere:
        with pytest.raises(ConfigError, match=rf"there: agent\.{key}"):
            Trust().check({"agent": section}, "there")
        Trust.from_config({"agent": section}).check({"agent": section}, "there")
    Trust.from_config(program).check(program, "there")
    Trust().check({"env": {"kwargs": {"python": "x", "command": ["y"]}}}, "there")


def test_values_of_the_environment_are_not_written_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATTACKED_TOKEN", "hunter2-of-the-user")
    monkeypatch.setenv("ATTACKED_STEPS", "7")
    config = json.loads(json.dumps(RUN))
    config["runner"] |= {"run_dir": str(tmp_path / "runs"), "max_steps": "${oc.env:ATTACKED_STEPS}"}
    config["env"]["train"]["kwargs"] = {"token": "${oc.env:ATTACKED_TOKEN}", "twin": "${env.train.kwargs.token}!"}
    config["actor"]["model"]["kwargs"] = {"actor_gain": 0.5, "note": "${oc.env:ATTACKED_TOKEN}"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    cfg = load_config(tmp_path / "run.yaml", check=False)
    assert cfg.env.train.kwargs.twin == "hunter2-of-the-user!" and cfg.runner.max_steps == 7
    RunFolder.plan(cfg).open(cfg)
    written = tmp_path / "runs" / "run" / "config.yaml"
    everything = "".join(path.read_text() for path in written.parent.rglob("*") if path.is_file())
    assert "hunter2" not in everything and "twin: ${env.train.kwargs.token}!" in everything
    monkeypatch.setenv("ATTACKED_TOKEN", "another-secret")  # what is started again reads its own
    monkeypatch.setenv("ATTACKED_STEPS", "9")
    again = load_config(written, check=False)
    assert again.env.eval.kwargs.twin == "another-secret!" and again.runner.max_steps == 9
    assert config_to_yaml(again) == written.read_text()
    (tmp_path / "wrong.yaml").write_text(
        "runner: {name: x, max_steps: 1}\nenv: {train: {env_id: CartPole-v1, env_type: '${oc.env:ATTACKED_TOKEN}'}}"
    )
    assert main(["plan", str(tmp_path / "wrong.yaml")]) == 2
    said = capsys.readouterr().err
    assert "another-secret" not in said and "${oc.env:ATTACKED_TOKEN}" in said


def test_a_model_keeps_the_reference(monkeypatch):
    import gymnasium

    from rlhpc.embodied.config import ModelConfig
    from rlhpc.embodied.models import build_model

    monkeypatch.setenv("ATTACKED_ACTIVATION", "tanh")
    env = gymnasium.make("CartPole-v1")
    section = OmegaConf.structured(ModelConfig(activation="${oc.env:ATTACKED_ACTIVATION}"))
    spec = build_model(section, env.observation_space, env.action_space, 0).spec()
    assert spec["model"]["activation"] == "${oc.env:ATTACKED_ACTIVATION}"


def test_yaml_that_is_more_than_it_seems():
    assert read_yaml("a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}
    for text, told in (
        ("# x\n" * (1 << 20), "characters"),
        ("a: " + "[" * 200 + "]" * 200, "nested"),
        (b"\xff", "UTF-8"),
    ):
        with pytest.raises(ValueError, match=told):
            read_yaml(text)
