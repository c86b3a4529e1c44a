"""Node probe of the doctor. It runs on every node in the node's Python: standard library only, no import of rlhpc.

The probe communicates through its job step: it reads lines of JSON from stdin and writes JSON to stdout, in short pieces that
srun does not split. First it reports facts about its node. After it has received the addresses of the other nodes, it reports
the connections to them.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import glob
import hmac
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

MARK = "RLHPC-DOCTOR"
_PIECE_LENGTH = 600


def say(stage: str, content: dict[str, Any]) -> None:
    encoded = base64.b64encode(json.dumps(content).encode()).decode()
    pieces = [encoded[i : i + _PIECE_LENGTH] for i in range(0, len(encoded), _PIECE_LENGTH)]
    task = os.environ.get("SLURM_PROCID", "0")
    for piece_index, piece in enumerate(pieces):
        os.write(1, f"{MARK} {task} {stage} {piece_index} {len(pieces)} {piece}\n".encode())


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def interfaces() -> dict[str, str]:
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def space(path: str) -> dict[str, Any]:
    """Returns size, free space and inodes of a filesystem, and whether this user may write there."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return {"error": error.strerror}
    return {
        "total": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize,
        "inodes": stat.f_files, "inodes_free": stat.f_favail, "writable": os.access(path, os.W_OK),
    }  # fmt: skip


def wait_for(path: str, content: str, timeout_s: float) -> dict[str, Any]:
    """Waits for a file that another host writes; returns the time until the file appeared in ms, or the error."""
    start_time, problem = time.monotonic(), "no such file"
    while time.monotonic() - start_time < timeout_s:
        try:
            with open(path) as file:
                if file.read() == content:
                    return {"ms": 1000 * (time.monotonic() - start_time)}
            problem = "other content"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(0.005)
    return {"error": problem}


def exchange_canaries(plan: dict[str, Any]) -> dict[str, Any]:
    """Reads the file that the doctor's host wrote, and writes a file of this node next to it; returns the result."""
    folder = plan["canary"]
    canary_status = wait_for(os.path.join(folder, "login"), plan["token"], plan["timeout_s"])
    canary_status["parent"] = os.path.isdir(os.path.dirname(folder))
    if "error" in canary_status:
        return canary_status
    os.path.exists(os.path.join(folder, "second"))  # still missing; detects a client that caches missing names
    path = os.path.join(folder, f"node-{node_name()}")
    try:
        with open(path + ".new", "w") as file:
            file.write(plan["token"])
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".new", path)
    except OSError as error:
        canary_status["write_error"] = error.strerror
    return canary_status


def vulkan() -> dict[str, Any]:
    """Returns whether the Vulkan loader exists, and the drivers that are registered with the loader."""
    try:
        ctypes.CDLL("libvulkan.so.1")
        has_loader = True
    except OSError:
        has_loader = False
    driver_paths = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    folders = ("/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
    drivers = (
        driver_paths.split(":")
        if driver_paths
        else [path for folder in folders for path in glob.glob(folder + "/*.json")]
    )
    return {"loader": has_loader, "drivers": sorted(os.path.basename(path) for path in drivers if os.path.exists(path))}


def physx() -> bool:
    """Returns whether SAPIEN's library for simulation on GPUs is where `sapien.physx.enable_gpu` looks for it."""
    return bool(glob.glob(os.path.expanduser("~/.sapien/physx/*/libPhysXGpu_64.so")))


def limits() -> dict[str, int]:
    names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    return {name: resource.getrlimit(limit_id)[0] for name, limit_id in names.items()}


def has_package(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def listen(token: str) -> int:
    """Listens on a port, and echoes the token to every client that sends it; returns the port."""
    server = socket.create_server(("", 0), backlog=64)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            if hmac.compare_digest(connection.recv(64), token.encode()):
                connection.sendall(token.encode())

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def try_connection(address: str, port: int, token: str) -> dict[str, Any]:
    """Connects to another node; returns the time in ms and this node's interface and address, or the error."""
    start_time = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=4) as connection:
            connection.sendall(token.encode())
            reply = connection.recv(64)
            local_address = connection.getsockname()[0]
    except OSError as error:
        return {"error": error.strerror or str(error)}
    if reply != token.encode():
        return {"error": "something else answers there"}
    interface = next((name for name, host in interfaces().items() if host == local_address), "")
    return {"ms": 1000 * (time.monotonic() - start_time), "interface": interface, "address": local_address}


def ask_torch(source: str, timeout_s: float) -> dict[str, Any]:
    """Runs the torch probe in a child process; returns its report with the exit code, or with `hung_s` after a timeout."""
    child = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    report: dict[str, Any] = {}

    def read_report() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            try:
                report.update(json.loads(line))
            except (ValueError, TypeError):
                report["words"] = line.strip()[:200] or report.get("words", "")

    reader = threading.Thread(target=read_report, daemon=True)
    reader.start()
    reader.join(timeout_s)
    if reader.is_alive():
        child.kill()  # does not wait, because a process that hangs in the driver ignores the signal
        return {**report, "hung_s": timeout_s}
    return {**report, "code": child.wait()}


def collect_facts(plan: dict[str, Any]) -> dict[str, Any]:
    """Collects facts about this node."""
    folders = {name: name for name in ("/tmp", "/dev/shm")}
    folders |= {"runs": os.path.dirname(plan["canary"]), "home": os.path.expanduser("~")}
    if plan.get("scratch"):
        folders["scratch"] = plan["scratch"]
    return {
        "host": os.uname().nodename,
        "node": node_name(),
        "interfaces": interfaces(),
        "mask": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "packages": {name: has_package(name) for name in plan.get("packages", ())},
        "vulkan": vulkan(),
        "physx": physx() if has_package("sapien") else None,
        "limits": limits(),
        "space": {name: space(path) for name, path in folders.items()},
    }


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    signal.alarm(int(plan["limit_s"]))  # limits the time for which the probe outlives the doctor
    port = listen(plan["token"])
    torch: dict[str, Any] = {}
    torch_thread = threading.Thread(target=lambda: torch.update(ask_torch(plan["torch"], plan["torch_s"])), daemon=True)
    if plan.get("torch"):
        torch_thread.start()
    say("hello", {**collect_facts(plan), "canary": exchange_canaries(plan), "port": port})
    instructions = json.loads(sys.stdin.readline() or "{}")
    say("clock", {"now": time.time()})
    second_status: dict[str, Any] = {}
    if instructions.get("second"):
        second_status = wait_for(os.path.join(plan["canary"], "second"), plan["token"], plan["timeout_s"])
    peers = instructions.get("peers", ())
    connections = {name: try_connection(address, port_number, plan["token"]) for name, address, port_number in peers}
    say("peers", {"second": second_status, "reach": connections})
    if plan.get("torch"):
        torch_thread.join(plan["torch_s"] + 5)
        say("torch", torch)
    sys.stdin.readline()  # other nodes may still connect to this one


if __name__ == "__main__":
    main()
