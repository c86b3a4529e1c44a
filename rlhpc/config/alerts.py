"""Section `runner.alerts` of a configuration. The docstring under a field is its entry in the reference."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from rlhpc.config.constraints import Fail, check_name
from rlhpc.config.typed import plain
from rlhpc.runtime.env_references import variable_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import ANY, COUNT, FRACTION, POSITIVE, Range
from rlhpc.runtime.text import short_repr

#: Rules for events of a run, as opposed to rules for its metrics.
EVENT_RULES = ("completed", "failed", "cancelled", "preempted", "lost", "stalled")
_RULE_NAME = r"[a-z0-9][a-z0-9_-]{0,39}"


@dataclass
class AlertRuleConfig:
    """Rule for metrics. It alerts when all of its conditions hold for a metric in `steps` consecutive values."""

    name: str = MISSING
    """Name of the rule, in lower case. A rule with the name of a default rule replaces it."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of the rule, by their names in `metrics.jsonl`; `*` stands for any characters, as in `train/*grad_norm`."""
    above: Annotated[float | None, ANY] = None
    """The value is greater than this number."""
    below: Annotated[float | None, ANY] = None
    """The value is smaller than this number."""
    rises: Annotated[float | None, Range(1, above=True)] = None
    """The value is greater than this factor times the median of the `window` values before; for metrics without negative
    values."""
    falls: Annotated[float | None, FRACTION] = None
    """The mean of the last `window` values is below the best such mean by more than this share, and by more than three
    standard deviations of the values. The share is that of the best mean or of its gain over the first one, whichever is
    larger."""
    nonfinite: bool = False
    """The value is NaN or infinite. Not together with other conditions."""
    window: Annotated[int, COUNT] = 20
    """Number of values for `rises` and `falls`."""
    steps: Annotated[int, COUNT] = 1
    """Number of consecutive values for which the conditions must hold."""


@dataclass
class AlertsConfig:
    """Alerts when a run ends, stalls, diverges or loses ranks. Without a command and a webhook, nothing is sent: the run only
    prints what the rules for metrics find, and `rlhpc status` lists it."""

    command: Any = None
    """Command that is started for each alert, as a list of words or as a text that is split like a shell's words, without a
    shell. It reads the alert as JSON from its standard input, and finds it in the environment variables `RLHPC_ALERT_…`."""
    webhook: str | None = None
    """URL to which each alert is posted as JSON, such as an incoming webhook of Slack, Mattermost or Discord. It must be a
    reference to an environment variable: `${oc.env:ALERT_WEBHOOK,null}`."""
    timeout_s: Annotated[float, Range(0, 300, above=True)] = 10.0
    """Seconds after which the command is killed and the post is abandoned."""
    stall_factor: Annotated[float, Range(1, above=True)] = 10.0
    """A run stalls if no step ends within this factor times the median duration of its last steps, but see `stall_floor_s`."""
    stall_floor_s: Annotated[float, POSITIVE] = 600.0
    """Minimum seconds without a finished step before a run counts as stalled. Before the first step of a start, the minimum
    is `runner.rendezvous_timeout_s` plus `runner.step_timeout_s`, if that is more."""
    silenced: list[str] = field(default_factory=list)
    """Names of rules that do not alert: `completed`, `failed`, `cancelled`, `preempted`, `lost`, `stalled`, or of a rule for
    metrics."""
    rules: list[AlertRuleConfig] = field(default_factory=list)
    """Rules for metrics, in addition to the default rules."""


def has_hook(alerts: AlertsConfig) -> bool:
    """Returns whether the section has a command or a webhook; otherwise no alerts are sent."""
    return alerts.command is not None or alerts.webhook is not None


def command_words(command: Any) -> list[str]:
    """Returns the words of `runner.alerts.command`; [] if there is no command.

    Raises:
        ValueError: The command is neither a string nor a list of strings, or a quote in it is not closed.
    """
    command = plain(command)
    if command is None:
        return []
    if isinstance(command, str):
        return shlex.split(command)
    if isinstance(command, list) and all(isinstance(argument, str) for argument in command):
        return [*command]
    raise ValueError("write a list of words, or a text")


def check_alerts(alerts: AlertsConfig, default_rules: Sequence[str], fail: Fail) -> None:
    """Checks section `runner.alerts` beyond its types.

    Args:
        alerts: The section.
        default_rules: Names of the default rules for metrics.
        fail: Builds the error.

    Raises:
        ConfigError: A rule is broken.
    """
    try:
        command_arguments = command_words(alerts.command)
    except ValueError as error:
        raise fail("runner.alerts.command", f"it cannot be started ({error})") from None
    if alerts.command is not None and not (command_arguments and command_arguments[0]):
        raise fail("runner.alerts.command", "it is empty; write the program first, or null for no command")
    if (
        command_arguments
        and "/" in command_arguments[0]
        and not command_arguments[0].startswith("~")
        and not PurePath(command_arguments[0]).is_absolute()
    ):
        raise fail(
            "runner.alerts.command",
            f"{short_repr(command_arguments[0])} is relative, and alerts start in several folders; write an absolute "
            f"path, ~/…, or the "
            "name of a program on PATH",
        )
    reference = plain(alerts, resolve=False)["webhook"]
    if reference is not None and variable_of(reference) is None:
        # not by `fail`, which would show the URL
        raise ConfigError(
            "runner.alerts.webhook is written in clear; write a reference to an environment variable, ${oc.env:NAME,null} "
            "or ${oc.env:NAME}, so that the URL is in no file of the run"
        )
    if alerts.webhook is not None and urlsplit(alerts.webhook).scheme not in ("http", "https"):
        raise fail("runner.alerts.webhook", "its value must begin with https:// or http://")
    for index, rule in enumerate(alerts.rules):
        _check_rule(rule, f"runner.alerts.rules[{index}]", fail)
    rule_names = [rule.name for rule in alerts.rules]
    for index, name in enumerate(rule_names):
        if name in rule_names[:index]:
            raise fail(f"runner.alerts.rules[{index}].name", "another rule has the same name")
    for name in alerts.silenced:
        check_name("runner.alerts.silenced", name, dict.fromkeys((*EVENT_RULES, *default_rules, *rule_names)), fail)


def _check_rule(rule: AlertRuleConfig, key: str, fail: Fail) -> None:
    if not re.fullmatch(_RULE_NAME, rule.name) or rule.name in EVENT_RULES:
        raise fail(
            f"{key}.name",
            "use lower-case letters, digits, '_' and '-' (at most 40), and none of the names of events: "
            f"{', '.join(EVENT_RULES)}",
        )
    if not rule.metrics:
        raise fail(f"{key}.metrics", "give at least one metric, such as train/grad_norm")
    conditions = [name for name in ("above", "below", "rises", "falls") if getattr(rule, name) is not None]
    if rule.nonfinite and conditions:
        raise fail(f"{key}.nonfinite", f"a value that is not finite has no size; give no {conditions[0]} beside it")
    if not rule.nonfinite and not conditions:
        raise fail(
            f"{key}.name", f"the rule has no condition; set one of {key}.above, below, rises, falls or nonfinite"
        )
