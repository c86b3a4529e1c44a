"""Trust in code that files name: what a foreign file may name, and what only the user may allow."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trust import FLAG, Trust, named_code, without_variables


@pytest.mark.parametrize(
    ("content", "key", "reason"),
    [
        ({"env": {"env_id": "evil.module:Env"}}, "env.env_id", "names code to be imported and run"),
        ({"reward": {"terms": [{"name": "exact"}, {"name": "my:Reward"}]}}, "reward.terms[1].name", "names code"),
        ({"env": {"wrappers": [{"my.wrappers:Cheat": {"x": 1}}]}}, "env.wrappers[0]", "names code"),
        ({"env": {"wrappers": ["gymnasium.wrappers:RecordVideo"]}}, "env.wrappers[0]", "names code"),
        ({"rollout": {"engine_kwargs": {"worker_cls": "my.engine.Worker"}}}, "engine_kwargs.worker_cls", "names code"),
        ({"env": {"simulator_python": "/opt/python"}}, "env.simulator_python", "starts a program"),
        ({"actor": {"model": {"trust_remote_code": True}}}, "actor.model.trust_remote_code", "comes with a model"),
        ({"agent": {"servers": [{"command": ["x"]}]}}, "agent.servers[0].command[0]", "asks one elsewhere"),
        (
            {"reward": {"terms": [{"kwargs": {"token_env": "HOME"}}]}},
            "kwargs.token_env",
            "a variable of your environment",
        ),
    ],
)
def test_code_and_secrets_in_a_foreign_file_are_refused_by_key(content: Any, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Trust().check(content, "export/config.yaml")
    message = str(refusal.value)
    assert message.startswith("export/config.yaml: ") and f"{key} is " in message
    assert reason in message and FLAG in message
    Trust(everything=True).check(content, "export/config.yaml")


@pytest.mark.parametrize(
    "content",
    [
        {"env": {"wrappers": ["gymnasium.wrappers:FlattenObservation"], "env_id": "CartPole-v1"}},
        {"actor": {"model": {"model_path": "builtin:tiny", "trust_remote_code": False}}},
        {"cluster": {"python_interpreter": "my:Python"}, "runner": {"logger": "my:Logger"}},  # read by training alone
        {"rollout": {"name": "dotted.name.outside.of.engine_kwargs"}, "steps": [1, 2.0, None]},
    ],
)
def test_what_names_no_code_passes(content: Any) -> None:
    Trust().check(content, "export/config.yaml")


def test_names_and_switches_of_the_users_own_configuration_are_trusted() -> None:
    mine = {"env": {"env_id": "my.module:Env", "simulator_python": "/opt/python"}, "note": "no code"}
    trust = Trust.from_config(mine)
    assert trust.names == {"my.module:Env", "simulator_python"}
    trust.check({"env": {"env_id": "my.module:Env", "simulator_python": "/another"}}, "export")
    with pytest.raises(ConfigError, match=r"'my\.module:Other'"):
        trust.check({"env": {"env_id": "my.module:Other"}}, "export")


def test_overrides_are_read_as_yaml_where_they_are() -> None:
    trust = Trust.from_overrides(["env.env_id=a.b:C", "env.wrappers=[d:E, f]", "text={broken", "flag"])
    assert trust.names == {"a.b:C", "d:E"}
    assert Trust.from_overrides([], everything=True).everything


def test_resolvers_of_a_foreign_file_become_text_or_are_refused() -> None:
    content = {
        "runner": {"run_dir": "${oc.env:HOME}/runs", "name": "${runner.task_type}"},
        "env": {"seeds": [1, "${runner.seed}"]},
    }
    assert without_variables(content, Trust(), "export") == {
        "runner": {"run_dir": "$ {oc.env:HOME}/runs", "name": "${runner.task_type}"},
        "env": {"seeds": [1, "${runner.seed}"]},
    }
    for section, key in (({"env": {"path": "${oc.env:TOKEN}"}}, "env.path"), ({"a": [{"b": "x${f:}"}]}, r"a\[0\]\.b")):
        with pytest.raises(ConfigError, match=rf"export: {key} is .* reads a variable of your environment"):
            without_variables(section, Trust(), "export")


def test_all_sections_are_searched_for_code_and_variables() -> None:
    config = {
        "runner": {"task_type": "my_kind:Kind", "logger": {"kwargs": {"wandb": {"key": "${oc.env:WANDB_API_KEY}"}}}},
        "cluster": {"setup": ["module load cuda"], "sbatch": []},
        "env": {"train": {"wrappers": [{"my_wrap:Wrap": {"n": 1}}, "gymnasium.wrappers:ClipAction"]}},
        "actor": {"model": {"trust_remote_code": True, "model_path": "${runner.run_dir}/a"}},
        "rollout": {"engine_kwargs": {"worker_cls": "my_engine.Worker"}},
    }
    assert {(entry.key, entry.value, entry.module) for entry in named_code(config)} == {
        ("runner.task_type", "my_kind:Kind", "my_kind"),
        ("runner.logger.kwargs.wandb.key", "${oc.env:WANDB_API_KEY}", ""),
        ("cluster.setup[0]", "module load cuda", ""),
        ("env.train.wrappers[0]", "my_wrap:Wrap", "my_wrap"),
        ("actor.model.trust_remote_code", "True", ""),
        ("rollout.engine_kwargs.worker_cls", "my_engine.Worker", "my_engine"),
    }
