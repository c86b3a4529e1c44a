"""The process that has imported the heavy packages and forks from there. It has no thread and runs no operator of torch.

What it forks is a child of whoever asked (CLONE_PARENT), who therefore waits for it and sees its status as always.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import mmap
import os
import pickle
import platform
import resource
import runpy
import signal
import socket
import struct
import sys
import threading
import types
import warnings
import weakref
from typing import Any, NoReturn

from tests.warm import engines, starting

CLONE_PARENT, PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_MM, PR_SET_MM_MAP = 0x8000, 1, 15, 35, 14
LARGE_PAGE, MADV_COLLAPSE = 1 << 21, 25
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), -1)
#: Sent to a terminal's or a test's process group. A server ends when its caller is gone, not by these.
LEFT_ALONE = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
#: Programs that start no Pythons. Any other has a server of its own, which is forked with it.
ALONE = {"rlhpc.runtime.launchers.fork_server"}
_libc = ctypes.PyDLL(None, use_errno=True)
_kept: list[Any] = []
_standard: list[str] = []


def main() -> None:
    """`FD MODULE…`: serves with these modules imported, as far as they are installed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _standard[:] = sys.path[1:]  # without what `Server.start` has put before it
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    _look_around()
    _leave_exits_alone()
    _stand_being_looked_at()
    if "vllm.platforms" in sys.modules:
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # it is an acceleration only
            engines.replace_kernels_once().register_triton_kernel_overrides()
    _forget_what_was_not_there()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(
            f"tests.warm: one of {', '.join(sys.argv[2:])} starts threads when it is imported: there are {threads}"
        )
    gc.enable()
    gc.collect()
    gc.freeze()  # what is shared stays so, and also when an engine of vLLM ends, which would take that back
    gc.unfreeze = lambda: None
    _in_large_pages()
    _serve(control)


def _in_large_pages() -> None:
    """What the packages have put into memory lies in pages of 2 MB where the kernel has such: a fork copies no memory, but
    the table of all pages, which for half a gigabyte of small ones takes longer than many a test."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    for area, rights, *_, name in (line if len(line) > 5 else [*line, ""] for line in lines):
        if rights == "rw-p" and name in ("", "[heap]"):
            start, end = (int(text, 16) for text in area.split("-"))
            start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
            if start < end:
                _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def _look_around() -> None:
    """Reads configurations, so that what does so later finds their keys, the parsers' tables and the packages' entry points
    known; and has transformers make its table of how weights are named."""
    for module, names in starting.CONFIGS.items():
        for name in names if module in sys.modules else ():
            with contextlib.suppress(Exception):  # it is an acceleration only
                from rlhpc.config.load import config_to_yaml
                from rlhpc.runs.configuration import load_config

                config_to_yaml(load_config(starting.ROOT / "configs" / f"{name}.yaml", check=False))
    if "transformers" in sys.modules:
        with contextlib.suppress(Exception):
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping

            get_checkpoint_conversion_mapping("llama")  # makes the patterns of all models, which takes 0.3 s


def _leave_exits_alone() -> None:
    """What the imported packages do at an interpreter's end is of no use in a process that ends without taking itself apart.

    PyTorch's compiler writes a table of its times, and its libraries take each of their thousand operators back: even to see
    that it need not would have a process copy the pages of all of them.
    """
    if "torch._dynamo.utils" in sys.modules:
        atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]


def _forget_what_was_not_there() -> None:
    """Folders of sys.path that were not there: a program may have them by now. Those that were are looked at anew anyway, once
    they have changed; `importlib.invalidate_caches` would have each new process copy the pages of what is known of them."""
    for path in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[path]


def _stand_being_looked_at() -> None:
    """trimesh's stands for packages that are not there raise ImportError whatever one asks them, and vLLM asks all there is
    in any module for its `__dict__`. That both are imported is only so here."""
    if module := sys.modules.get("trimesh.exceptions"):
        raises = module.ExceptionWrapper.__getattribute__

        def look(self: Any, name: str) -> Any:
            if name == "__dict__":
                raise AttributeError(name)
            return raises(self, name)

        module.ExceptionWrapper.__getattribute__ = look


def _read_again() -> None:
    """What the imported packages took from the server's environment, from that of this process."""
    if hub := sys.modules.get("huggingface_hub.constants"):
        said = (os.environ.get(name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        hub.HF_HUB_OFFLINE = hub._is_true(next(filter(None, said), None))
        if datasets := sys.modules.get("datasets.config"):
            datasets.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE
    if "DS_ACCELERATOR" in os.environ and (accelerator := sys.modules.get("deepspeed.accelerator.real_accelerator")):
        accelerator.ds_accelerator = None


def _serve(control: socket.socket) -> NoReturn:
    """Until the caller is gone. Does not return; nor does it in the new processes."""
    while True:
        request, descriptors = _receive(control)
        if request is None:
            os._exit(0)
        try:
            child = _clone()
        except OSError as error:
            os.write(descriptors[0], f"error {error}".encode())
            child = -1
        if child == 0:
            control.close()
            _become(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        head, ancillary, _, _ = control.recvmsg(8, socket.CMSG_SPACE(200 * 4))
    except ConnectionError:
        return None, []
    if not head:
        return None, []
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    length, body = int.from_bytes(head, "little"), bytearray()
    while len(body) < length:
        body += control.recv(length - len(body))
    return pickle.loads(body), list(descriptors)


def _clone() -> int:
    """os.fork, but what is born is the caller's sibling."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return int(pid)


def _become(request: dict[str, Any], answer: int, *given: int) -> NoReturn:
    """Makes this new process what the caller asked for, and runs its program."""
    words: list[str] = request["words"]
    _libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    if request["session"]:
        os.setsid()
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    own = -1 if ALONE & {*words[:5]} else _server_of_its_own()
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    answer, own = _place(dict(zip(request["targets"], given, strict=True)), answer, own)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in request["limits"].items():
        resource.setrlimit(limit, values)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _read_again()
    _name(request["name"], words, request["environment"])
    _streams(unbuffered="-u" in words[1 : 1 + starting.options_of(words)])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if own != -1:
        starting.inherit(socket.socket(fileno=own), request["environment"])
    if request["first"]:
        pickle.loads(request["first"])()
    os.write(answer, f"pid {os.getpid()}".encode())
    os.close(answer)
    _end(_status_of(words))


def _server_of_its_own() -> int:
    """Forks a server for what the new process will start, while it has no state; returns the connection."""
    mine, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return mine.detach()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    _place({0: nothing, 1: nothing, 2: nothing, 3: theirs.detach()}, -1, -1)
    os.chdir("/")
    _serve(socket.socket(fileno=3))


def _place(wanted: dict[int, int], *kept: int) -> list[int]:
    """Puts each descriptor where it belongs and closes every other one but `kept`, which may move."""
    high = max(wanted) + 10
    sources = {target: fcntl.fcntl(source, fcntl.F_DUPFD, high) for target, source in wanted.items()}
    moved = [-1 if source == -1 else fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, high) for source in kept]
    for target, source in sources.items():
        os.dup2(source, target)
    stay = {*wanted, *moved}
    for text in os.listdir("/proc/self/fd"):
        if int(text) not in stay:
            with contextlib.suppress(OSError):
                os.close(int(text))
    return moved


def _name(name: str, words: list[str], environment: dict[str, str]) -> None:
    """What /proc says of the process: its command and environment."""
    _libc.prctl(PR_SET_NAME, os.fsencode(name)[:15], 0, 0, 0)
    arguments = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(arguments) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(arguments + variables)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/stat") as file:
        stat = [0, 0, 0, *file.read().rpartition(")")[2].split()]  # numbered as in proc(5), from 1
    _libc.sbrk.restype = ctypes.c_void_p
    numbers = [int(stat[n]) for n in (26, 27, 45, 46, 47)]
    middle = start + len(arguments)
    addresses = [*numbers, _libc.sbrk(0), int(stat[28]), start, middle, middle, middle + len(variables), 0]
    told = struct.pack("=12QIi", *addresses, 0, -1)
    _libc.prctl(
        PR_SET_MM, PR_SET_MM_MAP, told, len(told), 0
    )  # without CONFIG_CHECKPOINT_RESTORE: the server's are shown


def _streams(unbuffered: bool) -> None:
    """sys.stdin, stdout and stderr for the descriptors that are there now, as an interpreter opens them."""
    unbuffered = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffer = io.BufferedReader(raw) if number == 0 else raw if unbuffered else io.BufferedWriter(raw)
        lines = not unbuffered and (number == 2 or raw.isatty())
        stream = io.TextIOWrapper(buffer, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered)
        stream.mode = "r" if number == 0 else "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _status_of(words: list[str]) -> int:
    """Runs the program; says of what ends it what an interpreter says."""
    try:
        _run(words)
    except SystemExit as said:
        if said.code is None or isinstance(said.code, int):
            return (said.code or 0) & 0xFF
        print(said.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> NoReturn:
    """Ends the process as an interpreter does, but for its modules: taking those apart costs a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {sys.stdout!r}\n{type(error).__name__}: {error}", file=sys.stderr)
        status = 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


class _Flags:
    """sys.flags, which no one may make, with another `safe_path`."""

    def __init__(self, flags: Any, safe_path: bool) -> None:
        self._flags, self.safe_path = flags, safe_path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flags, name)


def _run(words: list[str]) -> None:
    """Runs the program as an interpreter does after it has started."""
    options = words[1 : 1 + starting.options_of(words)]
    kind, *rest = words[1 + len(options) :]
    safe = "-P" in options or bool(os.environ.get("PYTHONSAFEPATH"))
    sys.flags = _Flags(sys.flags, safe)  # type: ignore[assignment]
    sys.orig_argv = words
    added = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-m": os.getcwd(), "-c": ""}.get(kind) if kind in ("-m", "-c") else os.path.dirname(os.path.realpath(kind))
    sys.path[:] = [*([] if safe else [first]), *dict.fromkeys([*added, *_standard])]
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = program
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), program.__dict__)
    else:
        sys.argv = [kind, *rest]
        program.__file__ = kind
        with open(kind, "rb") as file:
            source = file.read()
        exec(compile(source, kind, "exec"), program.__dict__)
