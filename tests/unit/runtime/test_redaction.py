"""Redaction: what is taken out of texts, values, programs and binary files, and what stays."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from rlhpc.runtime.redaction import Redactor, is_secret_key, secret_values

KEY = "0123456789abcdef0123456789abcdef01234567"


def redactor(*secrets: str) -> Redactor:
    return Redactor(secrets, homes=["/gpfs/home/alice"], users=["alice"])


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("token hf_AbCdEfGhIjKlMnOpQrSt in a log", "token <redacted> in a log"),
        ("sk-proj-abcdefghijklmnop1234", "<redacted>"),
        ("ghp_abcdefghijklmnopqrstuvwxyz012345", "<redacted>"),
        (f"WANDB_API_KEY={KEY}", "WANDB_API_KEY=<redacted>"),
        (f'"wandb_api_key": "{KEY}", "x": 1', '"wandb_api_key": "<redacted>", "x": 1'),
        ("password: 'open sesame'", "password: 'open sesame'"),  # two words: no key, and nothing says where it ends
        ("password: 'opensesame'", "password: '<redacted>'"),
        ("&quot;secret&quot;: &quot;opensesame&quot;", "&quot;secret&quot;: &quot;<redacted>&quot;"),
        ("https://bot:glpat-x@git.example.org/a.git", "https://<redacted>@git.example.org/a.git"),
        ("https://abcdef0123@git.example.org/a.git", "https://<redacted>@git.example.org/a.git"),
        ("GET /x?token=abc123&n=2", "GET /x?token=<redacted>&n=2"),
        ("Authorization: Bearer abcdef0123456789abcdef", "Authorization: <redacted>"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\ndef\n-----END OPENSSH PRIVATE KEY-----\n", "<redacted>\n"),
        ("in /gpfs/home/alice/runs/a", "in ~/runs/a"),
        ("in /home/bob/runs and /Users/eve/x", "in ~/runs and ~/x"),
        ("/scratch/alice/runs", "/scratch/<user>/runs"),
        ("ssh alice@login01 and bob@node7.example.org", "ssh <account> and <account>"),
    ],
)
def test_texts(text: str, redacted: str) -> None:
    assert redactor().text(text) == redacted
    assert redactor().text(redacted) == redacted, "twice is the same as once"


@pytest.mark.parametrize(
    "text",
    [
        "max_new_tokens: 24", '"eos_token": "<|im_end|>", "pad_token": "[PAD-0001-token]"', "tokens_per_s: 1234567890123456",
        f"commit {KEY}", "pass@4 70.0%, recall@k", "W@x.T + b", "git@github.com:org/project.git", "auth: null",
        "https://w3id.org/ro/crate/1.1/context", "/work/runs/home.txt",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redactor().text(text) == text


def test_known_values_in_all_their_spellings() -> None:
    secret = 'p"ss/wörd+1'
    found = redactor(secret)
    encoded = base64.b64encode(secret.encode()).decode()
    for text in (secret, "p%22ss%2Fw%C3%B6rd%2B1", 'p\\"ss/w\\u00f6rd+1', f"Basic {encoded}"):
        assert "<redacted>" in found.text(text) and "ss/w" not in found.text(text)
    assert found.counts["secret"] >= 4
    assert redactor("12345").text("12345 steps") == "12345 steps", "short values occur in any text"


@pytest.mark.parametrize(
    "program",
    [
        "def f(self, token: str) -> str:\n    return self.password\n",
        'url = f"http://{host}:{port}/?token={self.token}"\n',
        'remote = f"https://{user}:{token}@{host}/x.git"\n',
        "y = hidden@self.weights + bias@scale.values\n",
        'api_key = os.environ["WANDB_API_KEY"]\n',
        'binds = ["/root", "/home"]\n',
    ],
)
def test_programs_stay_as_they_are(program: str) -> None:
    assert Redactor([], homes=["/root"], users=["root"]).text(program, is_code=True) == program


@pytest.mark.parametrize(
    "line", [f'api_key = "{KEY}"', 'push("https://bot:abcdef123456@git.example.org")', 'open("/gpfs/home/alice/x")',
             'run("ssh bob@login01 squeue")', 'x = "hf_AbCdEfGhIjKlMnOpQrSt"'],
)  # fmt: skip
def test_programs_lose_what_is_certain(line: str) -> None:
    redacted = redactor().text(line, is_code=True)
    assert redacted != line
    compile(redacted, "line.py", "exec")


def test_configurations_lose_values_by_key_and_section() -> None:
    config = {
        "env": {"train": {"env_id": "CartPole-v1"}},
        "runner": {"logger": {"kwargs": {"wandb": {"api_key": "short1", "headers": {"X-Team": "ours-alone"}}}}},
        "rollout": {"engine_kwargs": {"hf_token": "${oc.env:HF_TOKEN}", "eos_token": "</s>"}},
        "data": [{"path": "/gpfs/home/alice/data", "password": "hunter22"}],
    }
    assert secret_values(config, is_config=True) == ["short1", "ours-alone", "hunter22"]
    assert redactor().config(config) == {
        "env": {"train": {"env_id": "CartPole-v1"}},
        "runner": {"logger": {"kwargs": {"wandb": {"api_key": "<redacted>", "headers": {"X-Team": "<redacted>"}}}}},
        "rollout": {"engine_kwargs": {"hf_token": "${oc.env:HF_TOKEN}", "eos_token": "</s>"}},
        "data": [{"path": "~/data", "password": "<redacted>"}],
    }
    placement = {"placement": {"env": [{"node_group": "cluster"}]}}
    assert redactor().value(placement) == placement and secret_values(placement, is_config=False) == []


def test_names_of_secrets() -> None:
    assert all(map(is_secret_key, ("HF_TOKEN", "token", "WANDB_API_KEY", "db.password", "AWS_SECRET_ACCESS_KEY")))
    assert not any(map(is_secret_key, ("eos_token", "max_new_tokens", "token_level", "tokens", "author")))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\0" * 5_000_000, ""),
        (b"\0" * ((1 << 22) - 10) + b"opensesame-0123" + b"\0" * 100, "a secret"),  # across two parts that are read
        (b"\0hf_AbCdEfGhIjKlMnOpQrSt\0", "a secret"),
        (b"\xff/gpfs/home/alice/runs\0", "the path of a home folder"),
    ],
)
def test_binary_files(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    assert redactor("opensesame-0123").find_in_binary(tmp_path / "file.pt") == found


def test_the_users_credentials_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "token").write_text("stored-token-of-the-hub\n")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password netrc-password-1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    monkeypatch.setenv("SITE_SERVICE_KEY", "key-of-a-service")
    text = f"stored-token-of-the-hub netrc-password-1 key-of-a-service {tmp_path}/x"
    assert Redactor.of_user().text(text) == "<redacted> <redacted> <redacted> ~/x"


def test_long_lines_end() -> None:
    """A report has pictures in lines of megabytes: a pattern that looks back from each character would take hours."""
    text = "data:image/png;base64," + "QUJDREVGtoken" * (1 << 18)
    assert redactor(KEY).text(text) == text
