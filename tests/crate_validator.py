"""Validation of an RO-Crate by the community's validator, without network: python tests/crate_validator.py CRATE PROFILE…

Runs in the Python of `envs/crate.txt`. The context of RO-Crate 1.1 (CC0, https://w3id.org/ro/crate/1.1/context) is read from
tests/data instead of its address. Prints one JSON object: profile → messages of the faults.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import requests
from rocrate_validator import models, services
from rocrate_validator.utils import http

_CONTEXT = Path(__file__).resolve().parent / "data" / "ro_crate" / "context-1.1.jsonld"
_attribute_of_requester = http.HttpRequester.__getattr__


def _answer(url: str) -> requests.Response:
    """Returns the context for its address, and an error for any other address."""
    response = requests.Response()
    response.url, response.encoding, response.status_code = url, "utf-8", 404
    if "ro/crate/1.1/context" in url:
        response.status_code, response._content = 200, _CONTEXT.read_bytes()
        response.headers["Content-Type"] = "application/ld+json"
    return response


def _attribute(requester: Any, name: str) -> Any:
    if name in ("get", "head"):
        return lambda url, **options: _answer(url)
    return _attribute_of_requester(requester, name)


def faults(crate: str, profile: str) -> list[str]:
    """Returns the messages of the requirements of a profile that a crate does not meet."""
    settings = services.ValidationSettings(
        rocrate_uri=crate, profile_identifier=profile, requirement_severity=models.Severity.REQUIRED, offline=True
    )
    issues = services.validate(settings).get_issues()
    return [f"{issue.severity.name} {issue.check.identifier}: {issue.message}" for issue in issues]


if __name__ == "__main__":
    http.HttpRequester.__getattr__ = _attribute
    print(json.dumps({profile: faults(sys.argv[1], profile) for profile in sys.argv[2:]}))
