"""Checkpoints, exports, configurations and data sets that want to run code, read this user's files and variables, or never end.

    python tests/attack/files.py               # all of them; exits with 1 where one got through
    python tests/attack/files.py config hdf5   # those whose name has one of the words

Each is refused with an error of rlhpc's own, soon, and nothing of the secret or of the planted module shows.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np

from rlhpc.checkpoint import CheckpointWriter, verify
from rlhpc.checkpoint.state import dump_tensors
from rlhpc.cli import main as cli
from rlhpc.embodied.data.lerobot_reader import read_lerobot, video_name
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.embodied.data.trajectories import read_maniskill
from rlhpc.embodied.evaluation.evaluate import evaluate_checkpoint
from rlhpc.embodied.export import export_checkpoint, load_exported
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.data.table_sources import Hdf5File, JsonLines
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError

SECRET = "hunter2-of-the-user"
VARIABLE = "ATTACKED_SECRET"
MODULE = "planted_by_attack"
SLOW_S = 10.0

RUN: dict[str, Any] = {
    "runner": {"name": "run", "task_type": "embodied", "seed": 0},
    "env": {"train": {"env_id": "CartPole-v1"}, "eval": {"num_envs": 1, "num_episodes": 1}},
    "actor": {"model": {"model_type": "mlp"}},
}


class Place:
    """A folder with a secret, a module that leaves a mark where it is imported, and a checkpoint to be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.secret, self.mark = root / "id_rsa", root / "imported"
        self.secret.write_text(SECRET * 4)
        (root / f"{MODULE}.py").write_text(
            f"open({str(self.mark)!r}, 'w').close()\ndef Policy(*a, **k): raise SystemExit\nEnv = Wrap = judge = Policy\n"
        )

    def checkpoint(
        self, config: str | None = None, files: dict[str, bytes] | None = None, *, own: bool = False, **model: Any
    ) -> Path:
        """Writes a sound checkpoint, but for what is given: text of config.yaml, other files, keys of `actor.model` in
        model.json. It is a stranger's, unless it is to be this user's own."""
        import gymnasium
        from omegaconf import OmegaConf

        from rlhpc.embodied.config import ModelConfig
        from rlhpc.embodied.models import build_model

        env = gymnasium.make("CartPole-v1")
        policy = build_model(
            OmegaConf.structured(ModelConfig(model_type="mlp")), env.observation_space, env.action_space, 0
        )
        spec = policy.spec()
        spec["model"] |= model
        written = {
            "model.safetensors": dump_tensors(policy.state_dict()), "model.json": json.dumps(spec).encode(),
            "config.yaml": (json.dumps(RUN) if config is None else config).encode(), **(files or {}),
        }  # fmt: skip
        with CheckpointWriter(RunPaths(self.root / "runs" / "run"), 4) as writer:
            for name, data in written.items():
                writer.add_bytes(name, data)
            home = os.environ.get("XDG_STATE_HOME", "") if own else str(self.root / "stranger")
            with mock.patch.dict(os.environ, XDG_STATE_HOME=home):
                return writer.commit()


def changed(*path: Any, value: Any) -> str:
    """The configuration as YAML with one key changed."""
    config: Any = json.loads(json.dumps(RUN))
    at = config
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    return json.dumps(config)


def commanded(config: str) -> Callable[[Place], object]:
    """By the command line alone."""

    def attack(place: Place) -> object:
        code = cli(["eval", "--checkpoint", str(place.checkpoint(config)), "--output", str(place.root / "out.json")])
        if code == 2:
            raise ConfigError("refused")
        return code

    return attack


def evaluated(config: str) -> Callable[[Place], object]:
    """By the command line, and by Python."""

    def attack(place: Place) -> object:
        folder = place.checkpoint(config)
        code = cli(["eval", "--checkpoint", str(folder), "--episodes", "1", "--output", str(place.root / "out.json")])
        if code == 0:
            raise AssertionError("rlhpc eval took it")
        return evaluate_checkpoint(folder, episodes=1)

    return attack


def described(**model: Any) -> Callable[[Place], object]:
    """By the model's description: a checkpoint, and its export."""

    def attack(place: Place) -> object:
        folder = place.checkpoint(**model)
        try:
            load_exported(export_checkpoint(folder))
        except RlhpcError:
            return load_exported(folder)
        raise AssertionError("the export was built")

    return attack


def spelled(text: bytes) -> Callable[[Place], object]:
    """By the bytes of model.json."""
    return lambda place: load_exported(place.checkpoint(files={"model.json": text}))


def configured(text: str | bytes) -> Callable[[Place], object]:
    """By a configuration that the user downloaded and looks at with `rlhpc plan` or the like."""

    def attack(place: Place) -> object:
        path = place.root / "downloaded.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path)

    return attack


def hdf5(fill: Callable[[Any, Place], None]) -> Callable[[Place], object]:
    """As a table of problems, and as trajectories."""

    def attack(place: Place) -> object:
        path = place.root / "data.h5"
        with h5py.File(path, "w") as file:
            fill(file, place)
        try:
            table = Hdf5File(path)
            if SECRET in str([table.row(i) for i in range(len(table))]):
                return "the secret is in the table"
        except RlhpcError:
            pass
        return [
            str(episode["obs"].tobytes() if hasattr(episode["obs"], "tobytes") else episode)
            for episode in read_maniskill(path)
        ]

    return attack


def _other(place: Place) -> Path:
    other = place.root / "other.h5"
    with h5py.File(other, "w") as file:
        file["x"] = np.frombuffer(SECRET.encode()[:6], np.uint8).reshape(2, 3)
        episode = file.create_group("traj_0")
        _episode(episode)
    return other


def _episode(group: Any, **given: Any) -> None:
    parts = {
        "obs": np.zeros((2, 3)),
        "actions": np.zeros((1, 2)),
        "terminated": np.zeros(1, bool),
        "truncated": np.zeros(1, bool),
    }
    for name, value in {**parts, **given}.items():
        if value is not None:
            group[name] = value


def _external(file: Any, place: Place, *, where: str = "answer") -> None:
    file.create_dataset(where, (4,), f"S{len(SECRET)}", external=[(str(place.secret), 0, 4 * len(SECRET))])


def _external_obs(file: Any, place: Place) -> None:
    group = file.create_group("traj_0")
    _episode(group, obs=None)
    group.create_dataset("obs", (2, 3), "u1", external=[(str(place.secret), 0, 6)])


def _virtual(file: Any, place: Place, *, group: bool = False) -> None:
    layout = h5py.VirtualLayout((2, 3), "u1")
    layout[:] = h5py.VirtualSource(str(_other(place)), "x", (2, 3))
    target = file
    if group:
        target = file.create_group("traj_0")
        _episode(target, obs=None)
    target.create_virtual_dataset("obs", layout)


def _link(name: str, into: str = "/x", *, soft: str | None = None, below: str = "") -> Callable[[Any, Place], None]:
    def fill(file: Any, place: Place) -> None:
        group = file
        if below:
            group = file.create_group(below)
            _episode(group, obs=None)
        group["away" if soft else name] = h5py.ExternalLink(str(_other(place)), into)
        if soft:
            group[name] = h5py.SoftLink(soft)

    return fill


def _circle(file: Any, place: Place) -> None:
    group = file.create_group("traj_0")
    _episode(group, obs=None)
    group["obs"] = group


def _soft_circle(file: Any, place: Place) -> None:
    group = file.create_group("traj_0")
    _episode(group, obs=None)
    group["obs"] = h5py.SoftLink("/traj_0/obs")


def _huge(file: Any, place: Place) -> None:
    group = file.create_group("traj_0")
    _episode(group, obs=None)
    group.create_dataset("obs", (1 << 40,), "u1", chunks=(1 << 20,))


def _typed(file: Any, place: Place) -> None:
    group = file.create_group("traj_0")
    _episode(group, obs=None)
    group["obs"] = np.dtype("f8")


def _compound(file: Any, place: Place) -> None:
    _episode(file.create_group("traj_0"), actions=np.zeros(1, [("a", "f4"), ("b", "S3")]))


def _scalar(file: Any, place: Place) -> None:
    _episode(file.create_group("traj_0"), actions=np.float32(1))


def _json_column(file: Any, place: Place) -> None:
    file.create_dataset("tests", data=["[" * 100000], dtype=h5py.string_dtype()).attrs["encoding"] = "json"


def replay(file: str) -> Callable[[Place], object]:
    """A stored replay buffer whose index names `file`."""

    def attack(place: Place) -> object:
        folder = place.root / "replay"
        folder.mkdir()
        np.save(place.root / "private.npy", np.zeros((1, 1), [("rewards", "f4")]))
        index = {"format": 1, "slots": [0, 1], "num_envs": 1, "decisions": 1, "held": 1}
        segment = {"file": file.replace("ROOT", str(place.root)), "first": 0, "stop": 1}
        (folder / "index-0.json").write_text(json.dumps({**index, "segments": [segment]}))
        return StoredReplay(folder)

    return attack


def index_of(text: bytes) -> Callable[[Place], object]:
    """A stored replay buffer with these bytes as its index."""

    def attack(place: Place) -> object:
        (place.root / "index-0.json").write_bytes(text)
        return StoredReplay(place.root)

    return attack


def video(pattern: str, key: str = "cam") -> Callable[[Place], object]:
    """The `video_path` of a LeRobot data set."""
    fields = {"video_key": key, "episode_chunk": 0, "episode_index": 1, "chunk_index": 0, "file_index": 0}
    return lambda place: video_name(pattern, "info.json", **fields)


def lerobot(text: bytes) -> Callable[[Place], object]:
    """The `info.json` of one."""

    def attack(place: Place) -> object:
        (place.root / "meta").mkdir()
        (place.root / "meta" / "info.json").write_bytes(text)
        return list(read_lerobot(place.root))

    return attack


def reported(text: bytes) -> Callable[[Place], object]:
    """A run folder with these bytes as its config.yaml: its report is written all the same, without what is not its own."""

    def attack(place: Place) -> object:
        folder = place.checkpoint().parents[1]
        (folder / "config.yaml").write_bytes(text)
        code = cli(["report", str(folder)])
        if code == 1:
            raise AssertionError("rlhpc report failed by a fault of its own")
        raise ConfigError(
            "".join(
                page.read_text(errors="replace")
                for page in (folder / "report").glob("*.html")
                if SECRET in page.read_text(errors="replace")
            )
        )

    return attack


def manifest(text: bytes) -> Callable[[Place], object]:
    """These bytes as manifest.json, sealed."""

    def attack(place: Place) -> object:
        import hashlib

        folder = place.checkpoint()
        (folder / "manifest.json").write_bytes(text)
        (folder / "COMPLETE").write_text(json.dumps({"manifest_sha256": hashlib.sha256(text).hexdigest()}))
        if not verify(folder):
            raise AssertionError("it was taken for sound")
        return load_exported(export_checkpoint(folder))

    return attack


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [" + ", ".join([f"*{chr(97 + i)}"] * 9) + "]\n" for i in range(9)
)
_NAME = f"{MODULE}:Policy"
_ENV = f"${{oc.env:{VARIABLE}}}"
_DEEP = b"[" * 100000

#: name: what is done with it. It must end in an error of rlhpc's own, which does not hold the secret.
FILES: dict[str, Callable[[Place], object]] = {
    "config: env_type": evaluated(changed("env", "eval", "env_type", value=f"{MODULE}:Env")),
    "config: env_type of train": evaluated(changed("env", "train", "env_type", value=f"{MODULE}:Env")),
    "config: env_id": evaluated(changed("env", "train", "env_id", value=f"{MODULE}:Env-v0")),
    "config: wrappers": evaluated(changed("env", "train", "wrappers", value=[f"{MODULE}:Wrap"])),
    "config: an installed callable": evaluated(changed("env", "train", "env_type", value="webbrowser:open")),
    "config: a name put together": evaluated(json.dumps({**RUN, "env": {"train": {"env_id": "CartPole-v1", "env_type": MODULE + "${env.train.kwargs.s}Env", "kwargs": {"s": ":"}}}})),
    "config: interpreter": evaluated(changed("env", "train", "simulator_python", value="/bin/false")),
    "config: reward": evaluated(changed("reward", "terms", value=[{"name": "subprocess:Popen", "kwargs": {"args": "touch gotcha", "shell": True}}])),
    "config: agent": evaluated(changed("rollout", "agent", value=_NAME)),
    "config: rollout backend": evaluated(changed("rollout", "rollout_backend", value=_NAME)),
    "config: engine": evaluated(changed("rollout", "engine_kwargs", value={"worker_cls": f"{MODULE}.Policy"})),
    "config: training backend": evaluated(changed("actor", "training_backend", value=_NAME)),
    "config: model type": evaluated(changed("actor", "model", "model_type", value=_NAME)),
    "config: remote code": evaluated(changed("actor", "model", "trust_remote_code", value=True)),
    "config: loss": evaluated(changed("algorithm", "loss_type", value=_NAME)),
    "config: advantage": evaluated(changed("algorithm", "adv_type", value=_NAME)),
    "config: data source": evaluated(changed("data", "eval", value=[{"name": "x", "source": _NAME}])),
    "config: no sandbox": evaluated(changed("reward", "terms", value=[{"name": "code", "kwargs": {"sandbox": {"allow_unconfined": True}}}])),
    "config: variable as a token": evaluated(changed("reward", "terms", value=[{"name": "http", "kwargs": {"url": "http://127.0.0.1:9", "token_env": VARIABLE}}])),
    "config: variable": evaluated(changed("env", "train", "env_id", value=_ENV)),
    "config: variable in kwargs": evaluated(changed("env", "train", "kwargs", value={"render_mode": _ENV})),
    "config: variable, decoded": evaluated(changed("env", "train", "env_id", value=f"${{oc.decode:{_ENV}}}")),
    "config: variable, spaced": evaluated(changed("env", "train", "env_id", value=f"${{ oc.env : {VARIABLE} }}")),
    "config: variable, name put together": evaluated(changed("env", "train", "kwargs", value={"n": "oc.env", "render_mode": "${${env.train.kwargs.n}:" + VARIABLE + "}"})),
    "config: suite": commanded(changed("workflow", "suites", value={"default": [f"env.eval.env_type={MODULE}:Env"]})),
    "config: suite of others": commanded(changed("workflow", "suites", value={"default": [f"env.eval.wrappers=[{MODULE}:Wrap]"]})),
    "config: suite with a variable": commanded(changed("workflow", "suites", value={"default": [f"env.eval.env_id={_ENV}"]})),
    "config: other files": evaluated("defaults: [/etc/passwd]\n" + json.dumps(RUN)),
    "config: bomb": evaluated(_BOMB),
    "config: bomb in a section": evaluated(_BOMB.replace("a: &a", "env: {train: {env_id: CartPole-v1}}\na: &a")),
    "config: deep": evaluated("a: " + "[" * 5000),
    "config: python object": evaluated("env: !!python/object/apply:os.system [touch gotcha]"),
    "config: not text": evaluated("env: \udcff".encode("utf-8", "surrogateescape").decode("latin-1")),
    "downloaded: bomb": configured(_BOMB),
    "downloaded: deep": configured("a: " + "[" * 5000),
    "downloaded: deep and closed": configured("a: " + "[" * 500 + "]" * 500),
    "downloaded: long comment": configured("# " + "x" * (30 << 20)),
    "downloaded: long comments": configured("# x\n" * (8 << 20)),
    "downloaded: not text": configured(b"\xff\xfe\x00env"),
    "downloaded: alias of itself": configured("a: &a [*a]"),
    "convert: bomb": lambda place: export_checkpoint(place.checkpoint(_BOMB)),
    "convert: deep": lambda place: export_checkpoint(place.checkpoint("a: " + "[" * 5000)),
    "model: type": described(model_type=_NAME),
    "model: an installed callable": described(model_type="webbrowser:open"),
    "model: kwargs": described(kwargs={"encoder": _NAME}),
    "model: variable": described(activation=_ENV),
    "model: remote code": described(trust_remote_code=True),
    "model: unknown": described(model_type="nothing"),
    "model: huge": described(hidden_sizes=[1 << 40]),
    "model: sizes of text": described(hidden_sizes="many"),
    "model: deep": spelled(_DEEP),
    "model: a list": spelled(b"[]"),
    "model: empty": spelled(b"{}"),
    "model: no space": spelled(b'{"model": {"model_type": "mlp"}, "observation_space": 1, "action_space": 2}'),
    "model: not text": spelled(b"\xff\xfe"),
    "manifest: deep": manifest(_DEEP),
    "manifest: name above": manifest(b'{"format": 1, "global_step": 4, "files": {"../x": {"size": 1, "sha256": ""}}}'),
    "manifest: absolute name": manifest(b'{"format": 1, "global_step": 4, "files": {"/etc/passwd": {"size": 1, "sha256": ""}}}'),
    "weights: a pickle": lambda place: load_exported(place.checkpoint(files={"model.safetensors": b"cposix\nsystem\n(S'touch gotcha'\ntR."})),
    "weights: header of 2^60": lambda place: load_exported(place.checkpoint(files={"model.safetensors": struct.pack("<Q", 1 << 60) + b"{}"})),
    "hdf5: external storage": hdf5(_external),
    "hdf5: external storage of obs": hdf5(_external_obs),
    "hdf5: virtual": hdf5(_virtual),
    "hdf5: virtual obs": hdf5(lambda file, place: _virtual(file, place, group=True)),
    "hdf5: external link": hdf5(_link("answer")),
    "hdf5: external link to an episode": hdf5(_link("traj_0", "/traj_0")),
    "hdf5: external link to obs": hdf5(_link("obs", below="traj_0")),
    "hdf5: soft link over one": hdf5(_link("obs", "/", soft="away/x", below="traj_0")),
    "hdf5: soft link from the root": hdf5(_link("obs", "/", soft="/traj_0/away/x", below="traj_0")),
    "hdf5: group in itself": hdf5(_circle),
    "hdf5: link to itself": hdf5(_soft_circle),
    "hdf5: huge": hdf5(_huge),
    "hdf5: a type": hdf5(_typed),
    "hdf5: compound": hdf5(_compound),
    "hdf5: scalar": hdf5(_scalar),
    "hdf5: deep JSON": hdf5(_json_column),
    "rows: deep": lambda place: JsonLines(_written(place.root / "rows.jsonl", b'{"a": ' + _DEEP)).row(0),
    "replay: above": replay("../private.npy"),
    "replay: absolute": replay("ROOT/private.npy"),
    "replay: below": replay("a/../../private.npy"),
    "replay: another kind": replay("../id_rsa"),
    "replay: deep index": index_of(_DEEP),
    "replay: list as index": index_of(b"[1]"),
    "lerobot: absolute": video("/etc/passwd"),
    "lerobot: above": video("../../id_rsa"),
    "lerobot: above by the camera": video("videos/{video_key}.mp4", "../../id_rsa"),
    "lerobot: attribute": video("{video_key.__class__}"),
    "lerobot: item": video("{video_key[0]}"),
    "lerobot: wide": video("{episode_index:0300000000d}"),
    "lerobot: wide text": video("{video_key:>300000000}"),
    "lerobot: unknown field": video("{secret}.mp4"),
    "lerobot: stray brace": video("{{episode_index}.mp4"),
    "lerobot: deep": lerobot(_DEEP),
    "report: not text": reported(b"\xff\xfe\x00\x80"),
    "report: bomb": reported(_BOMB.encode()),
    "report: deep": reported(b"a: " + b"[" * 5000),
}  # fmt: skip


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def attacked(name: str) -> str:
    """What a file gained, "" for nothing."""
    import contextlib
    import io

    os.environ[VARIABLE] = SECRET
    sys.modules.pop(MODULE, None)
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="attacked-") as folder:
        place, started = Place(Path(folder)), time.monotonic()
        sys.path.insert(0, folder)
        got = ""
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                got = f"taken: {str(FILES[name](place))[:200]}"
        except (ConfigError, CheckpointError) as error:
            said.write(str(error))
        except BaseException as error:
            got = f"no error of rlhpc's own: {type(error).__name__}: {str(error)[:200]}"
        finally:
            sys.path.remove(folder)
            del os.environ[VARIABLE]
        if place.mark.exists():
            got = "code was imported"
        if SECRET in said.getvalue() or any(
            SECRET in text.read_text(errors="replace") for text in place.root.rglob("*.json")
        ):
            got = "the secret was told"
        if "a fault of rlhpc itself" in said.getvalue():
            got = "a fault of rlhpc itself"
        if Path("gotcha").exists():
            Path("gotcha").unlink()
            got = "a command ran"
        if time.monotonic() - started > SLOW_S:
            got = got or f"it took {time.monotonic() - started:.0f} s"
    return got


def main(words: list[str]) -> int:
    """Runs them all; the number that got through."""
    names = [name for name in FILES if not words or any(word in name for word in words)]
    wins = [f"{name!r}: {got}" for name in names if (got := attacked(name))]
    print(f"files: {len(names)}, {len(wins)} got through", *wins, sep="\n  ")
    return len(wins)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
