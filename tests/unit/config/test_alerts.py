"""Section `runner.alerts`: each wrong value is refused with its key, and the webhook's URL is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config import config_to_yaml
from rlhpc.config.alerts import AlertsConfig, command_words
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
URL = "https://hooks.example/services/very-secret"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("command=[]", "runner.alerts.command is []; it is empty"),
        ("command=''", "runner.alerts.command is ''; it is empty"),
        ("command=7", "write a list of words, or a text"),
        ("command=[sh, 7]", "write a list of words, or a text"),
        ("command={sh: x}", "write a list of words, or a text"),
        ("command='sh \"x'", "No closing quotation"),
        ("command=hooks/mine.sh", "is relative, and alerts start in several folders"),
        ("timeout_s=0", "runner.alerts.timeout_s is 0.0"),
        ("stall_factor=0.5", "runner.alerts.stall_factor is 0.5"),
        ("silenced=[stall]", "did you mean 'stalled'?"),
        ("rules=[{metrics: [a], above: 1}]", "runner.alerts.rules"),
        ("rules=[{name: x, metrics: [], above: 1}]", "runner.alerts.rules[0].metrics"),
        ("rules=[{name: x, metrics: [a]}]", "the rule has no condition"),
        ("rules=[{name: x, metrics: [a], above: 1, nonfinite: true}]", "give no above beside it"),
        ("rules=[{name: ../x, metrics: [a], above: 1}]", "use lower-case letters"),
        ("rules=[{name: failed, metrics: [a], above: 1}]", "none of the names of events"),
        (
            "rules=[{name: x, metrics: [a], above: 1}, {name: x, metrics: [b], above: 1}]",
            "another rule has the same name",
        ),
        ("rules=[{name: x, metrics: [a], falls: 2}]", "falls"),
        ("rules=[{name: x, metrics: [a], above: 1, window: 0}]", "window"),
        ("webhook=${oc.env:NO_SUCH_X}", "the environment variable NO_SUCH_X is not set"),
        ("webhook=ftp://x", "runner.alerts.webhook is written in clear"),
    ],
)
def test_a_wrong_value(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(QUICKSTART, [f"runner.alerts.{override}"])
    assert message in str(refused.value)


@pytest.mark.parametrize("written", [URL, f"${{oc.env:NO_SUCH_X,{URL}}}", "x${oc.env:HOME}", f"{URL}/${{oc.env:HOME}}"])
def test_a_url_in_clear_is_refused_and_not_shown(written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(QUICKSTART, [f"runner.alerts.webhook={written}"])
    assert "written in clear" in str(refused.value) and "secret" not in str(refused.value)


def test_a_url_from_the_environment_stays_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ALERTS", URL)
    cfg = load_config(QUICKSTART, ["runner.alerts.webhook=${oc.env:MY_ALERTS}"])
    assert cfg.runner.alerts.webhook == URL and "secret" not in config_to_yaml(cfg)
    monkeypatch.setenv("MY_ALERTS", "file:///very/secret")
    with pytest.raises(ConfigError) as refused:
        load_config(QUICKSTART, ["runner.alerts.webhook=${oc.env:MY_ALERTS}"])
    assert "must begin with https://" in str(refused.value) and "very/secret" not in str(refused.value)
    monkeypatch.delenv("MY_ALERTS")
    assert load_config(QUICKSTART, ["runner.alerts.webhook=${oc.env:MY_ALERTS,null}"]).runner.alerts.webhook is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (None, []), ("mail -s 'a b' me", ["mail", "-s", "a b", "me"]), (["x", "$HOME"], ["x", "$HOME"]),
        ("x; rm -rf $HOME", ["x;", "rm", "-rf", "$HOME"]),
    ],
)  # fmt: skip
def test_the_words_of_a_command(command: object, words: list[str]) -> None:
    assert command_words(command) == words


def test_without_hooks_there_are_no_alerts() -> None:
    cfg = load_config(QUICKSTART, [])
    assert cfg.runner.alerts.command is None and cfg.runner.alerts.webhook is None
    assert AlertsConfig().command is None and AlertsConfig().rules == []
