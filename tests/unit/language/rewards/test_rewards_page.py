"""The page about rewards: its code runs, and its examples are accepted."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.agents.registry import make_agent
from rlhpc.language.config.rewards import RewardConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rewards import Sample, make_reward
from rlhpc.language.rewards.registry import REWARDS, check_arguments

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "docs/how-to/rewards.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.S)


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """The modules of the page, where Python finds them."""
    for language, content in BLOCKS:
        named = re.match(r"# (\w+\.py)\n", content)
        if language == "python" and named:
            (tmp_path / named[1]).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_code_runs(files):
    scripts = [content for language, content in BLOCKS if language == "python" and not content.startswith("# ")]
    assert len(scripts) == 2
    for script in scripts:
        done = subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONPATH": f"{files}:{ROOT}", "PATH": ""}, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_the_configurations_are_accepted(files):
    documents = [yaml.safe_load(content) for language, content in BLOCKS if language == "yaml"]
    for document in documents:
        OmegaConf.merge(default_section(GrpoConfig), document)
    sections = [document["reward"] for document in documents if "reward" in document]
    assert len(sections) == len(documents) - 1 == 4
    for section in sections:
        cfg = OmegaConf.merge(default_section(RewardConfig), section)
        for term in cfg.terms:
            if term.name == "judge":
                continue
            check_arguments(term.name, REWARDS.find(term.name), dict(term.kwargs))
    (tmp,) = (s for s in sections if s["terms"][0]["name"] == "my_rewards:vowels")
    with make_reward(OmegaConf.merge(default_section(RewardConfig), tmp)) as pool:
        assert pool.score([Sample("q", "aeiou")])[0].total == 0.25


def test_the_table_has_every_reward_and_argument():
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", TEXT, re.M))
    assert set(rows) == set(REWARDS.built_in)
    import inspect

    for name, told in rows.items():
        arguments = list(inspect.signature(REWARDS.find(name)).parameters)
        assert re.findall(r"`(\w+)`", told) == [a for a in re.findall(r"`(\w+)`", told) if a in arguments]
        assert set(re.findall(r"`(\w+)`", told)) == set(arguments), name


class ChatModel(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][0]["content"]
        said = "Good.\nMark: 8" if "Answer:\n42" in text else "I would rather not say."
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

    def log_message(self, *_):
        pass


def test_a_language_model_as_judge(files):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ChatModel)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    kwargs = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "judge"}
    section = {"terms": [{"name": "my_judge:LanguageModelJudge", "kwargs": kwargs}], "failed": -1.0, "processes": 2}
    try:
        with make_reward(OmegaConf.merge(default_section(RewardConfig), section)) as pool:
            right, silent = pool.score([Sample("q", "42", "42"), Sample("q", "?", "42")])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert right.total == 0.8 and not right.failed
    assert silent.total == -1 and "no mark in" in silent.reason


def test_an_agent_of_ones_own(files):
    agent = make_agent("my_search:SearchAgent")
    said = agent.respond(None, "<tool>search: capital of France</tool>")
    assert said == "<result>Paris has been the capital of France since 987.</result>\n"
