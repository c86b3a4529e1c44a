"""A simulated arm on a machine of its own, and an sshd that nobody else can enter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests import warm
from tests.eventually import wait_until
from tests.extras import find_program, need_programs


@contextmanager
def sshd(folder: Path) -> Iterator[str]:
    """The words that ssh needs for it. When it is left, nobody may be logged in any more."""
    need_programs("sshd", "ssh", "ssh-keygen")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host login\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        "  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n  LogLevel ERROR\n  BatchMode yes\n"
    )
    with (folder / "sshd.log").open("w") as log:
        daemon = psutil.Popen([find_program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        wait_until(lambda: "Server listening" in (folder / "sshd.log").read_text(), 20)
        yield f"-F {folder}/ssh_config login"
        wait_until(lambda: not daemon.children(), 20)
    finally:
        daemon.terminate()
        daemon.wait()


class Arm:
    """The robot's machine: nothing of this process's environment, in a folder of its own."""

    def __init__(self, folder: Path, key: Path, ssh: str) -> None:
        folder.mkdir()
        key.rename(folder / "arm.key")
        self._said = folder / "said.txt"
        with self._said.open("w") as said:
            self.process = warm.Popen(
                [sys.executable, "-m", "rlhpc.cli", "robot", "serve", "arm.key", "--ssh", ssh, "--patience", "3",
                 "--robot", "rlhpc.embodied.robots.simulated_robot:SimulatedRobot", "--kwargs", "simulates: Pendulum-v1"],
                cwd=folder, env={"HOME": str(folder), "PATH": "/usr/bin:/bin"}, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def tunnel(self) -> psutil.Process:
        """Its child."""
        [found] = [child for child in psutil.Process(self.process.pid).children() if child.name() == "ssh"]
        return found
