"""Another user of the node against runs of this one: their ports, processes, files and memory. Needs root, to be two users.

    python tests/attack/strangers.py             # 15 runs, five of each way to attack the ports while ranks meet
    python tests/attack/strangers.py --runs 3    # fewer

Each run trains with two ranks a role. From before its start on, the stranger connects to every port that the run opens: takes
a rank's place (`join`), says nonsense (`noise`), or holds as many connections as he may (`crowd`). That is the window in which
a start can be ended; it must then end with a message, and the run that nobody disturbs must be the one that a run has which
went through. Once ranks train, he tries everything that he can name: nothing of that may succeed or show.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STRANGER_UID = 65534
WAYS = {"join": [struct.pack("<q", number) for number in (0, 1)], "noise": [os.urandom(4096)], "crowd": [b""]}
TRAIN = (
    "runner.segments=1", "runner.max_steps=40", "runner.save_interval=20", "algorithm.rollout_steps=128",
    "algorithm.update_epochs=2", "runner.logger.logger_backends=[jsonl]",
    'cluster.component_placement={actor: "0:0-1", rollout: "0:0-1", env: "0:0-1"}',
)  # fmt: skip

#: The race: arguments are the victim's uid, most connections to hold, and what to say, in hexadecimal.
RACE = """
import os, resource, select, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
victim, most, *words = sys.argv[1:]
most = min(int(most), resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 50)
held, met, before = [], set(), None
ended = select.poll()
ended.register(0, select.POLLIN)
while True:
    lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    doors = [l[1] for l in lines if l[3] == "0A" and l[7] == victim]
    if before is None:
        before = set(doors)
        print("looking", flush=True)
    for door in doors:
        if door in before:
            continue
        met.add(door)
        address, port = door.split(":")
        where = socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)
        for word in words if len(held) < most else ():
            for _ in range(1 if word else 500):
                sock = socket.socket()
                sock.settimeout(0.05)
                try:
                    sock.connect(where)
                    sock.sendall(bytes.fromhex(word))
                except OSError:
                    sock.close()
                    break
                held.append(sock)
    if ended.poll(0):
        break
print(len(met), len(held), flush=True)
"""

#: What the other user tries once the run trains: prints a pair of JSON lists, [name] tried and [name] that succeeded.
TRIES = """
import ctypes, json, os, pathlib, signal, socket, stat, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
given = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
tried, won = [], []

def attempt(name, what):
    tried.append(name)
    try:
        got = what()
    except (OSError, ValueError):
        return
    if got or got is None:
        won.append(name)

def inside(path):
    def read():
        with open(path, "rb") as file:
            return bool(file.read(1))
    return read

def written(path):
    def write():
        os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW))
    return write

def vm_read(pid):
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    buffer = ctypes.create_string_buffer(8)
    def read():
        return libc.process_vm_readv(pid, ctypes.byref(Part(ctypes.addressof(buffer), 8)), 1, ctypes.byref(Part(0x400000, 8)), 1, 0) > 0
    return read

def traced(pid):
    def attach():
        if libc.ptrace(16, pid, 0, 0) == 0:
            libc.ptrace(17, pid, 0, 0)
            return True
        return False
    return attach

for pid in given["pids"]:
    for number in (0, signal.SIGTERM, signal.SIGUSR2, signal.SIGKILL):
        attempt(f"kill -{int(number)} {pid}", lambda: os.kill(pid, number))
    for name in ("environ", "mem", "maps", "stack", "io"):
        attempt(f"read /proc/{pid}/{name}", inside(f"/proc/{pid}/{name}"))
    for name in ("fd", "cwd", "map_files"):
        attempt(f"list /proc/{pid}/{name}", lambda: bool(os.listdir(f"/proc/{pid}/{name}")))
    attempt(f"ptrace {pid}", traced(pid))
    attempt(f"process_vm_readv {pid}", vm_read(pid))
    attempt(f"pidfd_getfd {pid}", lambda: os.close(libc.syscall(438, os.pidfd_open(pid), 3, 0)))
for folder in given["folders"]:
    if folder != given["folders"][0]:  # a run's folder is for colleagues to look at
        attempt(f"list {folder}", lambda: bool(os.listdir(folder)))
    attempt(f"write into {folder}", lambda: os.close(os.open(folder + "/planted", os.O_CREAT | os.O_WRONLY)))
    attempt(f"rename {folder}", lambda: os.rename(folder, folder + ".gone"))
for path in given["secret"]:
    attempt(f"read {path}", inside(path))
for path in given["secret"] + given["open"]:
    attempt(f"write {path}", written(path))
    attempt(f"remove {path}", lambda: os.unlink(path))
    attempt(f"replace {path}", lambda: os.rename("/etc/hostname", path))
for path in given["sockets"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        def connect():
            with socket.socket(socket.AF_UNIX, kind) as sock:
                sock.connect(path)
        attempt(f"connect to {path} ({kind})", connect)
for line in open("/proc/net/unix").readlines()[1:]:
    name = line.split()[-1]
    if name.startswith("@") and "rlhpc" in name:
        def abstract():
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\\0" + name[1:])
        attempt(f"connect to {name}", abstract)
for door in given["ports"]:
    address, port = door.split(":")
    where = socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)
    attempt(f"connect to {where}", lambda: socket.create_connection(where, 0.5).close())
print(json.dumps([tried, won]))
"""


def own_network() -> None:
    """A network of this process and what it starts, so that nobody else's ports are met."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # lo: SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x41))


def ports(uid: int) -> set[str]:
    """TCP ports of a user that listen, as /proc/net/tcp writes them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[7] == str(uid)}


def stranger(code: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    """The other user at work."""
    command = [sys.executable, "-S", "-c", code, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def descend(pid: int) -> list[int]:
    """A process and what it started."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        for child in (thread / "children").read_text().split():
            found += descend(int(child))
    return found


def seen_by_all(path: Path) -> bool:
    """Whether what a user of the group of others may read is meant to be read by them: a run's logs, metrics and weights."""
    return bool(path.stat().st_mode & 0o004)


def targets(pid: int, root: Path, before: set[str]) -> dict[str, Any]:
    """What there is of a run that trains."""
    held = [
        Path(line.split()[-1])
        for each in descend(pid)
        for line in _maps(each)
        if "/rlhpc" in line and "/dev/shm" in line
    ]
    scratch = [path for base in ("/tmp", "/dev/shm") for path in Path(base).glob(f"rlhpc-{os.getuid()}-*")]
    files = [path for base in (root, *scratch) for path in base.rglob("*") if not path.is_symlink()]
    secret = [
        path for path in {*files, *held} if path.is_file() and (not seen_by_all(path) or "registry" in path.parts)
    ]
    return {
        "pids": descend(pid),
        "folders": [str(path) for path in [root, root / "registry", root / "checkpoints", *scratch]],
        "secret": [str(path) for path in secret],
        "open": [str(path) for path in files if path.is_file() and path not in secret],
        "sockets": [str(path) for path in files if path.is_socket()],
        "ports": sorted(ports(os.getuid()) - before),
    }  # fmt: skip


def _maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []


def one_run(folder: Path, way: str | None) -> dict[str, Any]:
    """A run, attacked in a way, or (None) by nobody."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = ports(os.getuid())
    racing = None
    if way:
        words = [word.hex() for word in WAYS[way]]
        racing = stranger(RACE, str(os.getuid()), "100000" if way == "crowd" else "64", *words)
        assert racing.stdout and racing.stdout.readline() == "looking\n"
    command = [
        sys.executable,
        "-m",
        "rlhpc.cli",
        "train",
        str(ROOT / "configs/quickstart.yaml"),
        *TRAIN,
        f"runner.run_dir={folder}",
    ]
    train = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    root = folder / "quickstart"
    found: dict[str, Any] = {"way": way, "tried": [], "won": []}
    metrics = root / "metrics.jsonl"
    while train.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    if racing:
        found["ports_met"], found["held"] = map(int, racing.communicate("\n", timeout=60)[0].split())
    if train.poll() is None and way:
        given = targets(train.pid, root, before)
        done = stranger(TRIES, json.dumps(given)).communicate(timeout=100)[0]
        found["tried"], found["won"] = json.loads(done)
        found["ports_open"] = len(given["ports"])
    said = train.communicate(timeout=300)[0]
    found["code"] = train.returncode
    found["said"] = said[-1500:]
    if train.returncode == 0:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        found["rows"] = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
    return found


def verdict(found: dict[str, Any], undisturbed: list[dict[str, Any]]) -> str:
    """What came of it, in a word; `HARMED` for what must not be."""
    if found["code"] == 0:
        return "went on" if found["rows"] == undisturbed else "HARMED: other numbers"
    if "Traceback" in found["said"] or "rlhpc: error:" not in found["said"]:
        return f"HARMED: ended without a message: {found['said']}"
    return "the start ended with a message" if not found["tried"] else f"HARMED: ended later: {found['said']}"


def main() -> int:
    """Runs them all; the number that got through after ranks had met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    if os.getuid() != 0:
        print("strangers: left out; needs root, to be two users")
        return 0
    own_network()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    bad, tried, ends = [], 0, {}
    with tempfile.TemporaryDirectory(prefix="strangers-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        undisturbed = one_run(Path(top) / "alone", None)["rows"]
        for number in range(args.runs):
            way = list(WAYS)[number % len(WAYS)]
            found = one_run(Path(top) / f"{number}", way)
            word = verdict(found, undisturbed)
            tried += len(found["tried"])
            bad += [f"run {number} ({way}): {won}" for won in found["won"]]
            bad += [f"run {number} ({way}): {word}"] if word.startswith("HARMED") else []
            counts = ends.setdefault(way, {})
            counts[word.split(":")[0]] = counts.get(word.split(":")[0], 0) + 1
            print(
                f"run {number}: {way}: {found['ports_met']} ports met, {found['held']} connections held; {word}; then "
                f"{found.get('ports_open', 0)} ports open, {len(found['tried'])} tries, {len(found['won'])} got through",
                flush=True,
            )
    print(f"while ranks meet: {json.dumps(ends)}", f"afterwards: {tried} tries, {len(bad)} got through", *bad, sep="\n")
    return len(bad)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
