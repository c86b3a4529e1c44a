"""Upload of exports: with the unmodified client of the hub, to a server in this test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.checkpoint.export_folder import format_card_header
from rlhpc.publishing.hub import check_export
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.hub_server import HubServer, serve_hub

need_extra("llm")

SECRET = "wandb-0123456789abcdef0123456789"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve_hub() as server:
        yield server


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / "runs" / "sums" / "export" / "global_step_4"
    folder.mkdir(parents=True)
    card = format_card_header(library="transformers", task="text-generation", licence=None, name="sums", tags=["rlhpc"])
    (folder / "README.md").write_text(f"{card}# sums\n\nTrained in {tmp_path}/home/runs by alice@login01.\n")
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}\n')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad-token-00001>"}\n')
    (folder / "conversion.json").write_text(json.dumps({"from": f"{tmp_path}/home/runs/sums", "note": SECRET}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def push(hub: HubServer, export: Path, *words: str, token: str = "hf_test_writer") -> subprocess.CompletedProcess[str]:
    home = export.parents[3]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(home),
        "WANDB_API_KEY": SECRET, **({"HF_TOKEN": token} if token else {}),
    }  # fmt: skip
    command = [sys.executable, "-m", "rlhpc.cli", "push", str(export), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_an_export_arrives_whole_private_and_without_secrets(hub: HubServer, export: Path) -> None:
    done = push(hub, export, "me/sums")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.address}/me/sums"
    assert hub.private == {"me/sums": True}
    files = hub.files["me/sums"]
    assert set(files) == {path.name for path in export.iterdir()}
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        assert files[name] == (export / name).read_bytes()
    texts = b"".join(files.values()).decode(errors="replace")
    assert SECRET not in texts and str(export.parents[3]) not in texts and "alice" not in texts
    assert files["README.md"].startswith(b"---\nlibrary_name: transformers\n")
    assert len(hub.commits) == 1


def test_a_public_repository_needs_the_word(hub: HubServer, export: Path) -> None:
    hub.private["me/open"] = False
    refused = push(hub, export, "me/open")
    assert refused.returncode == 2 and "everybody can read it; add --public" in refused.stderr
    assert hub.files == {}
    assert push(hub, export, "me/open", "--public").returncode == 0
    assert "model.safetensors" in hub.files["me/open"]


@pytest.mark.parametrize(
    ("token", "code", "message"),
    [
        ("", 2, "push needs credentials of the hub, and there are none"),
        ("hf_of_a_stranger", 1, "Check the token's rights"),
    ],
)
def test_credentials(hub: HubServer, export: Path, token: str, code: int, message: str) -> None:
    refused = push(hub, export, "me/sums", token=token)
    assert refused.returncode == code, refused.stderr
    assert message in refused.stderr and "Traceback" not in refused.stderr
    assert refused.stderr.count("rlhpc: error") == 1
    assert hub.files == {}


def test_a_bad_name_and_a_hub_that_is_gone_are_messages(hub: HubServer, export: Path) -> None:
    bad = push(hub, export, "me/a/b")
    assert bad.returncode == 2 and "write OWNER/NAME" in bad.stderr
    hub.address = "http://127.0.0.1:9"
    gone = push(hub, export, "me/sums")
    assert gone.returncode == 1 and "127.0.0.1:9" in gone.stderr and "Traceback" not in gone.stderr


def test_weights_with_a_secret_are_refused_by_name(hub: HubServer, export: Path) -> None:
    (export / "model.safetensors").write_bytes(b"\0\xff" * 100 + SECRET.encode() + b"\0")
    refused = push(hub, export, "me/sums")
    assert refused.returncode == 2 and "model.safetensors: it has a secret" in refused.stderr
    assert hub.private == {}


def test_other_folders_are_refused(tmp_path: Path, export: Path) -> None:
    check_export(export)
    run = export.parents[1]
    for make, message in {
        run: "is a run, not an export; push one of its exports",
        tmp_path / "nothing": "no such folder",
        tmp_path / "home": "it has no a model card of rlhpc",
    }.items():
        (run / "checkpoints").mkdir(exist_ok=True)
        (run / "config.yaml").touch()
        with pytest.raises(ConfigError, match=message):
            check_export(make)
    (export / "COMPLETE").touch()
    with pytest.raises(ConfigError, match="is a checkpoint, not an export"):
        check_export(export)
    (export / "COMPLETE").unlink()
    (export / "more").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="more: it is a link"):
        check_export(export)
    (export / "more").unlink()
    (export / "README.md").write_text("# by hand\n")
    with pytest.raises(ConfigError, match="a model card of rlhpc"):
        check_export(export)


def test_several_policies_are_pushed_one_by_one(export: Path) -> None:
    (export / "solver").mkdir()
    (export / "README.md").rename(export / "solver" / "README.md")
    with pytest.raises(ConfigError, match="push them one by one: solver"):
        check_export(export)
