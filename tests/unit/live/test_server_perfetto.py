"""Perfetto's interface: what is served, and what is not."""

from __future__ import annotations

import importlib.util
import re

import pytest

from rlhpc.live.server import PerfettoApp, Query
from rlhpc.runtime.errors import ConfigError, UserError
from tests.extras import need_extra


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rlhpc\[trace\]'"):
        PerfettoApp(b"trace")


@pytest.fixture
def app() -> PerfettoApp:
    need_extra("trace")
    return PerfettoApp(b"trace")


def content(app: PerfettoApp, path: str) -> bytes:
    found = app.respond(path, Query("")).content
    return found if isinstance(found, bytes) else found.read_bytes()


def test_the_interface_and_the_trace(app: PerfettoApp) -> None:
    index = content(app, "/")
    assert b"Perfetto" in index
    assert content(app, "/localtrace") == b"trace"
    (version,) = set(re.findall(rb"v\d+\.\d+-\w+", index))
    bundle = content(app, f"/{version.decode()}/frontend_bundle.js")
    assert b"is_internal_user.js" not in bundle
    assert content(app, "/no_script.js") == b""
    answer = app.respond(f"/{version.decode()}/trace_processor.wasm", Query(""))
    assert answer.media_type == "application/wasm"
    assert "connect-src 'self' blob: data:;" in answer.policy
    assert "http" not in answer.policy


@pytest.mark.parametrize(
    "path", ["/../viewer.py", "/../../../../etc/passwd", "//etc/passwd", "/LICENSE", "/trace_processor", "/nothing.js"]
)
def test_no_other_file_is_served(app: PerfettoApp, path: str) -> None:
    with pytest.raises(UserError, match="has no file"):
        app.respond(path, Query(""))
