"""The caller's end: which commands are started warm, and a Popen that has a server fork them."""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib.util
import os
import pickle
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import Any

import cloudpickle

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "TimeoutExpired", "run"]

ROOT = Path(__file__).resolve().parents[2]
#: Read when an interpreter starts, a library is loaded or a package imported: a server is for one setting of them.
READ_EARLY = (
    "PYTHON", "LANG", "LC_", "LD_", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "CUDA_", "TORCH", "PYTORCH",
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "DS_", "XDG_", "TRITON_", "RLHPC_CARD",
)  # fmt: skip
#: Of those, what each process is given anew, or says what is true of a server anyway.
SET_ANEW = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "VLLM_CPU_KVCACHE_SPACE",
    "HF_HUB_OFFLINE", "DS_ACCELERATOR", "PYTORCH_NVML_BASED_CUDA_CHECK",
    # What an engine of vLLM leaves in the process that has built it.
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK",
    "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_DIST_IDENT", "VLLM_SSM_CONV_STATE_LAYOUT",
    "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
)  # fmt: skip
#: What a run's processes import, which takes them 3 s each.
PRELOAD = (
    "numpy", "yaml", "omegaconf", "zmq", "cloudpickle", "psutil", "tqdm", "fsspec", "torch", "torch.distributed",
    "torch._dynamo",  # which the first step of an optimizer imports
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "safetensors.torch", "gymnasium", "PIL.Image", "submitit", "tensorboard.summary.writer.record_writer", "rlhpc.cli",
    "rlhpc.runs.train", "rlhpc.embodied.workers", "rlhpc.embodied.runners", "rlhpc.embodied.envs.gymnasium_env",
    "rlhpc.embodied.models.mlp", "rlhpc.runtime.worker_process", "rlhpc.runtime.worker", "rlhpc.metrics.loggers",
    "rlhpc.embodied.workers.ppo_actor", "rlhpc.embodied.workers.rollout", "rlhpc.embodied.workers.env",
    "rlhpc.embodied.runners.rollout_runner",
    "rlhpc.training.fsdp", "rlhpc.runtime.comm.gloo_auth", "rlhpc.metrics.provenance", "rlhpc.runs.report",
    "rlhpc.embodied.evaluation.evaluate", "rlhpc.embodied.export",
)  # fmt: skip
#: Others' besides: a language model's takes 8 s, 20 with vLLM. Where this process has imported the first itself.
PRELOAD_WITH = {
    "mani_skill": ("mani_skill.envs", "mani_skill.vector.wrappers.gymnasium"),
    "transformers": (
        "transformers",
        "transformers.models.llama.modeling_llama",
        "peft",
        "datasets",
        "pyarrow.parquet",
        "rlhpc.language.task_types",
        "rlhpc.language.workers.grpo_actor",
        "rlhpc.language.workers.rollout",
        "rlhpc.language.workers.critic",
        "rlhpc.language.workers.supervised_actors",
        "rlhpc.language.workers.supervised_actors",
        "rlhpc.language.workers.supervised_actors",
        "rlhpc.language.workers.scoring",
        "rlhpc.language.workers.scoring",
        "rlhpc.language.runners.grpo",
        "rlhpc.language.runners.supervised",
        "rlhpc.language.runners.supervised",
        "rlhpc.language.runners.supervised",
        "rlhpc.language.engines.hf",
        "rlhpc.language.evaluation.evaluate",
        "rlhpc.language.export",
        "rlhpc.weights.transport",
    ),
    "deepspeed": (
        "deepspeed",
        "deepspeed.checkpoint.ds_to_universal",
        "deepspeed.runtime.zero.muon.muon_optimizer",  # and with it the compiler, when an optimizer is chosen
    ),
    "vllm": (
        "vllm.entrypoints.llm",
        "vllm.v1.worker.cpu_worker",  # and what else an engine imports once it knows where it runs, and which model
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.transformers",
        "vllm.plugins.lora_resolvers.filesystem_resolver",
        "vllm.plugins.lora_resolvers.hf_hub_resolver",
        "rlhpc.language.engines.vllm",
    ),
    "tests.warm.commands": ("snakemake.cli",),
}
#: What tests import themselves besides.
TESTING = ("pytest", "xdist.remote", "hypothesis", "scipy.stats")
#: Of kinds of runs whose keys a server reads, with what they need.
CONFIGS = {
    "rlhpc.cli": ("quickstart", "base/sac"),
    "rlhpc.language.task_types": ("reasoning/demo", "reasoning/demo_sft", "reasoning/reward_model", "reasoning/dpo"),
}
#: Python ignores these itself, and restores them (`restore_signals`) for what it starts.
PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
LIMITS = tuple(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))
#: Where NVIDIA's and AMD's drivers are talked to.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
#: clone's number is the machine's, and CLONE_PARENT is Linux's. Elsewhere all processes start cold.
CAN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")

_servers: dict[frozenset[tuple[str, str]], Server] = {}
_lock = threading.Lock()
_may_start = CAN
_ColdPopen = subprocess.Popen


class Server:
    """A connection to a process that has imported the heavy packages, and forks."""

    def __init__(self, control: socket.socket) -> None:
        self.control, self.owner, self.lock = control, os.getpid(), threading.Lock()

    @classmethod
    def start(cls, environment: dict[str, str], modules: tuple[str, ...]) -> Server:
        """Starts one, which answers once it has imported these."""
        mine, theirs = socket.socketpair()
        environment = {"GOMP_SPINCOUNT": "1000", **environment, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # a thread of pyarrow's
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a driver that is awake does not survive a fork
        environment.pop("PYTHONPATH", None)
        if library := environment.get("RLHPC_CARD"):  # torch looks for devices from outside when it is imported
            environment["PYTHONPATH"] = os.pathsep.join((str(Path(library).parent), str(ROOT / "tests/card")))
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.warm.server import main; main()"
        process = _ColdPopen(
            [sys.executable, "-P", "-c", code, str(theirs.fileno()), *modules], pass_fds=[theirs.fileno()],
            env=environment, stdin=DEVNULL, stdout=DEVNULL, cwd="/",
        )  # fmt: skip
        theirs.close()
        server = cls(mine)
        atexit.register(server.end, process)
        return server

    def end(self, process: subprocess.Popen[bytes]) -> None:
        if os.getpid() == self.owner:
            self.control.close()
            process.wait()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The pid of the new process, which is what was asked for when this returns.

        Raises:
            OSError: It could not become that.
        """
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as answer:
            try:
                body, data = pickle.dumps(request), array.array("i", [writer, *descriptors]).tobytes()
                with self.lock:
                    length = len(body).to_bytes(8, "little")
                    self.control.sendmsg([length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)])
                    self.control.sendall(body)
            finally:
                os.close(writer)
            kind, _, value = answer.read().decode().partition(" ")
        if kind != "pid":
            raise OSError(value or "the server of warm processes has died; its stderr says why")
        return int(value)


def inherit(control: socket.socket, environment: dict[str, str]) -> None:
    """In a warm process: what it starts comes from the server that was forked with it."""
    global _may_start
    _servers.clear()
    _may_start = False
    _servers[_read_early(environment)] = Server(control)
    subprocess.Popen = Popen  # type: ignore[misc]


def only_where_asked() -> None:
    """In a warm process that tests: `subprocess` is Python's again, and there may be servers for other environments."""
    global _may_start
    subprocess.Popen = _ColdPopen  # type: ignore[misc]
    _may_start = CAN


def preload_everything() -> bool:
    """Starts this process's server with all that any test may ask for; whether it may have one."""
    if CAN:
        with_those = _with(main for main in PRELOAD_WITH if importlib.util.find_spec(main))
        _servers[_read_early(os.environ)] = Server.start(dict(os.environ), PRELOAD + TESTING + with_those)
    return CAN


def options_of(words: list[str]) -> int:
    """How many of -P and -u come before the program."""
    return next((n for n, word in enumerate(words[1:]) if word not in ("-P", "-u")), len(words) - 1)


def _read_early(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value) for name, value in environment.items() if name.startswith(READ_EARLY) and name not in SET_ANEW
    )


def _preload() -> tuple[str, ...]:
    """What a server imports."""
    return PRELOAD + _with(main for main in PRELOAD_WITH if main in sys.modules)


def _with(packages: Iterable[str]) -> tuple[str, ...]:
    """What a server imports with these. Where there is an accelerator, neither DeepSpeed nor vLLM: to import them wakes its
    driver, which has a thread and does not survive a fork."""
    wakes = {"deepspeed", "vllm"} if any(Path(name).exists() for name in DRIVERS) else set()
    return tuple(name for main in packages if main not in wakes for name in PRELOAD_WITH[main])


def _server_for(environment: dict[str, str]) -> Server | None:
    """None where there is none for such an environment."""
    key, own = _read_early(environment), _read_early(os.environ)
    with _lock:
        for known, server in [*_servers.items()]:
            if server.owner != os.getpid():  # this process was forked from the owner
                del _servers[known]
        if key not in _servers and _may_start and key == own:
            _servers[key] = Server.start(environment, _preload())
        return _servers.get(key)


def _words_of(command: Any) -> list[str] | None:
    """argv where it is this Python's, or a script's of its environment, and a warm process can do the same."""
    if not CAN or isinstance(command, (str, bytes, os.PathLike)):
        return None
    words = [os.fspath(word) for word in command]
    if not words or not all(isinstance(word, str) for word in words):
        return None
    if words[0] in (f"{Path(sys.executable).parent}/{name}" for name in ("rlhpc", "snakemake")):
        return [sys.executable, *words]
    rest = words[1 + options_of(words) :]
    allowed = rest and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
    return words if words[0] == sys.executable and allowed else None


def _hides_what_is_loaded(environment: Mapping[str, str], folder: str) -> bool:
    """Whether a new interpreter would find modules there in the place of those that a server has loaded."""
    loaded = {name.partition(".")[0] for name in _preload()} | {"sitecustomize", "usercustomize"}
    for path in {folder, *environment.get("PYTHONPATH", "").split(os.pathsep)}:
        if path and os.path.realpath(path) != str(ROOT) and path not in sys.path:
            with contextlib.suppress(OSError):
                if loaded & {name.partition(".")[0] for name in os.listdir(path)}:
                    return True
    return False


def _can_go_along(preexec_fn: Any) -> bool:
    """Whether a server knows what such a function is made of: one of the package's own."""
    return preexec_fn is None or str(preexec_fn.__module__).startswith("rlhpc.")


def _umask() -> int:
    """Without setting it, which another thread could notice."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")]
    return int(line.split()[1], 8)


class Popen(_ColdPopen):
    """subprocess.Popen, whose process is forked from a warm interpreter where that makes no difference."""

    def _execute_child(self, *given: Any) -> None:
        (
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite,
            errread, errwrite, restore_signals, gid, gids, uid, umask, session, group,
        ) = given  # fmt: skip
        words = _words_of(args)
        asked = [executable, gid, gids, uid]
        folder = os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd))
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        alike = asked == [None] * 4 and close_fds and not shell and restore_signals and umask < 0
        alike = (
            alike
            and _can_go_along(preexec_fn)
            and os.path.isdir(folder)
            and not _hides_what_is_loaded(environment, folder)
        )
        server = _server_for(environment) if words and alike else None
        if server is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        request = {
            "words": words,
            "name": os.path.basename(args[0]),
            "environment": environment,
            "folder": folder,
            "targets": [0, 1, 2, *pass_fds],
            "first": preexec_fn and cloudpickle.dumps(preexec_fn),
            "session": session,
            "group": None if group is None or group < 0 else group,
            "umask": _umask(),
            "limits": {limit: resource.getrlimit(limit) for limit in LIMITS},
            "cores": os.sched_getaffinity(0),
            "ignored": {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN} - {*PYTHONS_OWN},
        }
        standard = (p2cread, c2pwrite, errwrite)
        try:
            self.pid = server.fork(request, [n if one == -1 else one for n, one in enumerate(standard)] + [*pass_fds])
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._child_created = True


def run(*command: Any, input: Any = None, capture_output: bool = False, timeout: float | None = None, check: bool = False,
        **options: Any) -> CompletedProcess[Any]:  # fmt: skip
    """subprocess.run with the Popen above."""
    if input is not None:
        options["stdin"] = PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = PIPE
    with Popen(*command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done
