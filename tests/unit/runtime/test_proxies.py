"""Hosts without a proxy: what the user has set in either spelling stays, and the run's own hosts come to it."""

from __future__ import annotations

import pytest

from rlhpc.language.agents.runner.task import environment_of
from rlhpc.runtime.proxies import LOOPBACK, without_proxy


@pytest.mark.parametrize("large", [None, "c.site", "a.site,*"])
@pytest.mark.parametrize("small", [None, "", "a.site, .b", "*"])
def test_both_spellings_are_read_and_written(small: str | None, large: str | None) -> None:
    environ = {name: value for name, value in (("no_proxy", small), ("NO_PROXY", large)) if value is not None}
    made = without_proxy(["10.0.0.5"], environ)
    assert made["no_proxy"] == made["NO_PROXY"]
    entries = made["no_proxy"].split(",")
    user = {entry.strip() for value in environ.values() for entry in value.split(",") if entry.strip()}
    if "*" in user:
        assert made["no_proxy"] == "*", "with anything else beside it, Python's own clients do not know it"
    else:
        assert set(entries) == user | {*LOOPBACK, "10.0.0.5"} and len(entries) == len(set(entries))


def test_an_agent_reaches_the_endpoint_and_its_services_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.site:3128")
    monkeypatch.setenv("no_proxy", "search.site,.cluster.local")
    monkeypatch.delenv("NO_PROXY", raising=False)
    ticket = {
        "base_url": "http://10.0.0.5:4321/v1",
        "api_key": "k",
        "socket": "/s",
        "process_key": "p",
        "session_id": "s",
    }
    made = environment_of(ticket)
    for name in ("no_proxy", "NO_PROXY"):
        assert {"10.0.0.5", "search.site", ".cluster.local", *LOOPBACK} <= set(made[name].split(","))
