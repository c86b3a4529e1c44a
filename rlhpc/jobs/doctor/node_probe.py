"""Node probe of the doctor. It runs on every node in the node's Python: standard library only, no import of rlhpc.

The probe communicates through its job step: it reads lines of JSON from stdin and writes JSON to stdout, in short pieces that
srun does not split. First it reports facts about its node. After it has received the addresses of the other nodes, it reports
the connections to them.
"""

from __future__ import annotations

import base64
import concurrent.futures
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
from collections.abc import Sequence
from typing import Any

MARK = "RLHPC-DOCTOR"
_PIECE_LENGTH = 600


def print_stage(stage: str, stage_content: dict[str, Any]) -> None:
    encoded_stage = base64.b64encode(json.dumps(stage_content).encode()).decode()
    text_pieces = [encoded_stage[i : i + _PIECE_LENGTH] for i in range(0, len(encoded_stage), _PIECE_LENGTH)]
    task = os.environ.get("SLURM_PROCID", "0")
    for piece_index, text_piece in enumerate(text_pieces):
        os.write(1, f"{MARK} {task} {stage} {piece_index} {len(text_pieces)} {text_piece}\n".encode())


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


def wait_for(path: str, expected_content: str, timeout_s: float) -> dict[str, Any]:
    """Waits for a file that another host writes; returns the time until the file appeared in ms, or the error."""
    start_time, problem = time.monotonic(), "no such file"
    while time.monotonic() - start_time < timeout_s:
        try:
            with open(path) as file:
                if file.read() == expected_content:
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


def lock(path: str, timeout_s: float) -> tuple[int | None, str]:
    """Tries for an exclusive flock on a file.

    Args:
        path: The file, which is created if it does not exist.
        timeout_s: Maximum seconds, because a filesystem may not answer.

    Returns:
        Descriptor that has the lock, or None; and the error, "held" if another process has the lock.
    """
    outcomes: list[tuple[int | None, str]] = []

    def try_lock() -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            outcomes.append((None, f"cannot open {path}: {error.strerror}"))
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            outcomes.append((descriptor, ""))
        except BlockingIOError:
            os.close(descriptor)
            outcomes.append((None, "held"))
        except OSError as error:
            os.close(descriptor)
            outcomes.append((None, error.strerror or str(error)))

    thread = threading.Thread(target=try_lock, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcomes[0] if outcomes else (None, f"no answer within {timeout_s:.0f} s")


#: Folders of UNIX sockets and of shared memory. Processes of a node that see the same ones are one host of a run.
MEETING_FOLDERS = ("/tmp", "/dev/shm")


def folder_ids() -> dict[str, str]:
    """Returns device and inode of the folders through which processes of a node meet, as `stat -c %D.%i` prints them."""
    ids = {}
    for folder in MEETING_FOLDERS:
        try:
            status = os.stat(folder)
            ids[folder] = f"{status.st_dev:x}.{status.st_ino}"
        except OSError:
            ids[folder] = "none"
    return ids


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
    """Returns whether SAPIEN's library for GPU simulation is in the folder that `sapien.physx.enable_gpu` searches."""
    return bool(glob.glob(os.path.expanduser("~/.sapien/physx/*/libPhysXGpu_64.so")))


def limits() -> dict[str, int]:
    limit_names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    # processes of a run raise their soft limit of open files to the hard one
    return {name: resource.getrlimit(limit_id)[name == "nofile"] for name, limit_id in limit_names.items()}


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


def try_connection(address: str, port: int, token: str, source_address: str = "") -> dict[str, Any]:
    """Connects to another node; returns the time in ms and this node's interface and address, or the error.

    Args:
        address: Address of the other node.
        port: Port of the other node.
        token: Text that the other node echoes.
        source_address: Address of this node from which to connect; by default that of the route.
    """
    start_time = time.monotonic()
    try:
        with socket.create_connection(
            (address, port), 4, (source_address, 0) if source_address else None
        ) as connection:
            connection.sendall(token.encode())
            reply = connection.recv(64)
            local_address = connection.getsockname()[0]
    except OSError as error:
        return {"error": error.strerror or str(error)}
    if reply != token.encode():
        return {"error": "something else answers there"}
    interface = next((name for name, host in interfaces().items() if host == local_address), "")
    return {"ms": 1000 * (time.monotonic() - start_time), "interface": interface, "address": local_address}


def meet_peer(peer: dict[str, Any], token: str) -> dict[str, Any]:
    """Connects to another node by the route, and by each interface that both nodes have.

    Args:
        peer: Address, port and interfaces of the other node.
        token: Text that the other node echoes.

    Returns:
        The result of `try_connection`, with the `interfaces` by which the other node was reached.
    """
    pairs = {
        name: (source_address, peer["interfaces"][name])
        for name, source_address in interfaces().items()
        if not source_address.startswith("127.") and peer["interfaces"].get(name, source_address) != source_address
    }
    with concurrent.futures.ThreadPoolExecutor(len(pairs) + 1) as pool:
        by_route = pool.submit(try_connection, peer["address"], peer["port"], token)
        attempts = {
            name: pool.submit(try_connection, address, peer["port"], token, source_address)
            for name, (source_address, address) in pairs.items()
        }
        reached_addresses = sorted(name for name, attempt in attempts.items() if "ms" in attempt.result())
        return {**by_route.result(), "interfaces": reached_addresses}


def resolve(hosts: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Looks up host names; returns the IPv4 addresses of each name, or the error."""
    answers: dict[str, dict[str, Any]] = {}

    def look_up(host: str) -> None:
        try:
            address_infos = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            answers[host] = {"addresses": sorted({str(address_info[4][0]) for address_info in address_infos})}
        except (OSError, UnicodeError) as error:
            answers[host] = {"error": getattr(error, "strerror", None) or str(error)}

    threads = [threading.Thread(target=look_up, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    no_answer = {"error": f"no answer within {timeout_s:.0f} s"}
    return {host: answers.get(host, no_answer) for host in hosts}


def ask_child(source_code: str, timeout_s: float) -> dict[str, Any]:
    """Runs a probe's source in a child process; returns its report with the exit code, or with `hung_s` after a timeout."""
    child = subprocess.Popen(
        [sys.executable, "-c", source_code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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


def can_start_engine(torch: dict[str, Any]) -> bool:
    """Returns whether this node starts an engine of two ranks: the first node of a job, if two GPUs and vLLM work there."""
    return os.environ.get("SLURM_PROCID", "0") == "0" and torch.get("seen", 0) >= 2 and bool(torch.get("vllm"))


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
        "folders": folder_ids(),
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
    if plan.get("is_second_step"):
        print_stage(
            "second_step",
            {"node": node_name(), "folders": folder_ids(), "mask": os.environ.get("CUDA_VISIBLE_DEVICES")},
        )
        sys.stdin.readline()
        return
    port = listen(plan["token"])
    torch: dict[str, Any] = {}
    torch_thread = threading.Thread(target=lambda: torch.update(ask_child(plan["torch"], plan["torch_s"])), daemon=True)
    if plan.get("torch"):
        torch_thread.start()
    canary_report = exchange_canaries(plan)
    lock_report = None if "error" in canary_report else lock(os.path.join(plan["canary"], "lock"), 5.0)
    print_stage(
        "hello", {**collect_facts(plan), "canary": canary_report, "port": port, "lock": lock_report and lock_report[1]}
    )
    instructions = json.loads(sys.stdin.readline() or "{}")
    print_stage("clock", {"now": time.time()})
    second_status: dict[str, Any] = {}
    if instructions.get("second"):
        second_status = wait_for(os.path.join(plan["canary"], "second"), plan["token"], plan["timeout_s"])
    peers = instructions.get("peers", ())
    hosts = sorted({peer["host"] for peer in peers})
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        resolved_hosts = pool.submit(resolve, hosts, 10.0)
        meetings = {peer["node"]: pool.submit(meet_peer, peer, plan["token"]) for peer in peers}
        connections = {node: future.result() for node, future in meetings.items()}
    print_stage("peers", {"second": second_status, "reach": connections, "names": resolved_hosts.result()})
    if plan.get("torch"):
        torch_thread.join(plan["torch_s"] + 5)
        print_stage("torch", torch)
    if plan.get("engine"):
        print_stage("engine", ask_child(plan["engine"], plan["engine_s"]) if can_start_engine(torch) else {})
    sys.stdin.readline()  # other nodes may still connect to this one


if __name__ == "__main__":
    main()
