"""Services' loggers: configuration without secrets, starts that hang, torn files."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlhpc.metrics.loggers.base import RunFacts, printing_to_stderr, public_config, records
from tests.unit.metrics.loggers.own_loggers import fragment


def test_the_former_name_of_a_loggers_state_is_the_same_state(tmp_path: Path) -> None:
    run = RunFacts("one", tmp_path)
    with pytest.warns(FutureWarning, match=r"RunFacts\.memory is now saved_state"):
        run.memory["id"] = "a"  # type: ignore[attr-defined]
    assert run.saved_state == {"id": "a"}


def test_a_services_config_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    cfg = OmegaConf.create(
        {
            "runner": {"name": "a", "copy": "${runner.name}-b"},
            "rollout": {
                "max_new_tokens": 256, "logprob_type": "token_level", "hf_token": "s3cret", "seed": "${oc.env:OWN_TOKEN}"
            },
            "terms": [{"kwargs": {"url": "http://me:s3cret@host/x?api_key=s3cret&n=1", "headers": {"X-Own": "s3cret"}}}],
            "apiKey": "s3cret", "empty_token": None, "actor": {"author": "me"},
        }
    )  # fmt: skip
    shown = public_config(OmegaConf.to_container(cfg), OmegaConf.to_container(cfg, resolve=True))
    assert "s3cret" not in json.dumps(shown)
    assert shown["runner"] == {"name": "a", "copy": "a-b"} and shown["actor"] == {"author": "me"}
    assert shown["rollout"] == {
        "max_new_tokens": 256, "logprob_type": "token_level", "hf_token": "***", "seed": "${oc.env:OWN_TOKEN}"
    }  # fmt: skip
    assert shown["terms"][0]["kwargs"]["url"] == "http://***@host/x?api_key=***&n=1" and shown["empty_token"] is None


def test_a_service_that_hangs_holds_up_no_other_and_stdout_comes_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with printing_to_stderr():
            inside.set()
            leave.wait(60)

    def come_and_go() -> None:
        with printing_to_stderr():
            assert sys.stdout is sys.stderr

    before = sys.stdout
    hanging, other = (threading.Thread(target=target, daemon=True) for target in (hang, come_and_go))
    hanging.start()
    assert inside.wait(30)
    other.start()
    other.join(30)
    assert not other.is_alive() and sys.stdout is sys.stderr
    leave.set()
    hanging.join(30)
    assert sys.stdout is before


def test_records_of_a_torn_file(tmp_path: Path) -> None:
    room = 32768 - 7 - len(fragment(1, b"one")) - 7
    whole = b"HEADER!" + fragment(1, b"one") + fragment(2, b"a" * room) + fragment(4, b"bc") + fragment(1, b"last")
    file = tmp_path / "log"
    file.write_bytes(whole)
    assert list(records(file)) == [b"one", b"a" * room + b"bc", b"last"]
    file.write_bytes(whole[:-1])
    assert list(records(file)) == [b"one", b"a" * room + b"bc"]
    padded = b"HEADER!" + fragment(1, b"x" * (room + 4)) + b"\0" * (32768 - 14 - room - 4)
    file.write_bytes(padded + fragment(1, b"next block"))
    assert [len(record) for record in records(file)] == [room + 4, 10]


def test_the_section_of_simulators_is_no_environment_of_variables() -> None:
    config = {
        "env": {"train": {"env_id": "CartPole-v1"}},
        "agent": {"env": {"A": "b"}, "services": [{"env": {"C": "d"}}]},
    }
    shown = public_config(config, config)
    assert shown["env"] == config["env"]
    assert shown["agent"] == {"env": {"A": "***"}, "services": [{"env": {"C": "***"}}]}
