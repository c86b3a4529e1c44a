"""One start of a run whose rows go to all tracking services; run by test_tracking_services.py in a Python that has them.

python tracking_services.py FOLDER write FIRST LAST RESUME MARK    (RESUME `-`: a fresh start; MARK `kill`: dies at the end)
python tracking_services.py FOLDER read                            prints what each service's own reader finds
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import MetricLogger
from rlhpc.metrics.loggers import feed as feeds

SERVICES = ("wandb", "mlflow", "swanlab", "trackio")
CONFIG = {"algorithm": {"gamma": 0.9}, "reward": {"api_key": "***"}}


def watch_the_network() -> None:
    """A connection to anywhere else than this machine ends the process."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            host = str(arguments[1][0])
            if not host.startswith("127.") and host not in ("::1", "localhost"):
                print(f"connects to {arguments[1]}", file=sys.stderr, flush=True)
                os._exit(9)

    sys.addaudithook(hook)


def write(paths: RunPaths, first: int, last: int, resume: int | None, mark: str) -> None:
    feeds.CLOSE_S = 240.0  # a loaded machine takes minutes to import all four
    with MetricLogger(paths, ["jsonl", *SERVICES], resume, {"wandb": {"project": "own"}}, CONFIG) as logger:
        for step in range(first, last + 1):
            row = {"train/return": 10 * step + (mark == "kill"), "rollout/pass@1": math.nan, "time/wall_s": step / 2}
            logger.log(step, row)
        logger.commit()
        if mark == "kill":
            deadline = time.monotonic() + 240
            while any(feed._queue.unfinished_tasks for feed in logger._feeds):  # until all have been given all rows
                assert time.monotonic() < deadline and not any(feed._has_ended for feed in logger._feeds)
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def read(paths: RunPaths) -> dict[str, Any]:
    memory = json.loads(paths.loggers.read_text())
    return {name: globals()[f"read_{name}"](paths.root, memory[name]) for name in SERVICES}


def read_wandb(root: Path, memory: dict[str, str]) -> dict[str, Any]:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    rows, runs, config = [], set(), {}
    for path in sorted((root / "wandb").glob("offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(path)
            for record in map(Record.FromString, iter(reader.scan, None)):
                if record.WhichOneof("record_type") == "run":
                    runs.add((record.run.run_id, record.run.project, record.run.display_name))
                    for item in record.run.config.update:
                        config[item.key or item.nested_key[0]] = json.loads(item.value_json)
                if record.WhichOneof("record_type") == "history":
                    items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                    rows.append([record.history.step.num, items["train/return"], items["rollout/pass@1"]])
    assert runs == {(memory["id"], "own", "run")}, runs
    return {"rows": rows, "gamma": config["algorithm"]["gamma"]}


def read_mlflow(root: Path, memory: dict[str, str]) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("rlhpc").experiment_id])
    assert run.info.run_id == memory["run_id"] and run.info.run_name == "run" and run.info.status == "FINISHED"
    returns = client.get_metric_history(run.info.run_id, "train/return")
    passes = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "rollout/pass_1")}
    return {"rows": [[m.step, m.value, passes[m.step]] for m in returns], "gamma": run.data.params["algorithm.gamma"]}


def whole(reader: Any) -> Iterator[bytes]:
    """A killed start's file ends within a record."""
    from swanlab.exceptions import DataStoreError

    with contextlib.suppress(DataStoreError):
        yield from iter(reader.scan, None)


def read_swanlab(root: Path, memory: dict[str, str]) -> dict[str, Any]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: dict[str, list[tuple[int, float]]] = {"train/return": [], "rollout/pass@1": []}
    for path in sorted((root / "swanlab").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for data in whole(reader):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "start":
                assert (record.start.id, record.start.name) == (memory["id"], "run")
            if record.WhichOneof("record_type") == "scalar" and record.scalar.key in found:
                found[record.scalar.key].append((record.scalar.step, record.scalar.value.number))
        config = yaml.safe_load((path.parent / "files/config.yaml").read_text())
    passes = dict(found["rollout/pass@1"])
    rows = [[step, value, passes[step]] for step, value in found["train/return"]]
    return {"rows": rows, "gamma": config["algorithm"]["value"]["gamma"]}


def read_trackio(root: Path, memory: dict[str, str]) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(root / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    [record] = SQLiteStorage.get_run_records("rlhpc")
    assert record["id"] == memory["id"] and record["name"] == "run"
    rows = [[row["step"], row["train/return"], row["rollout/pass@1"]] for row in SQLiteStorage.get_logs("rlhpc", "run")]
    return {"rows": rows, "gamma": SQLiteStorage.get_run_config("rlhpc", "run")["algorithm"]["gamma"]}


if __name__ == "__main__":
    watch_the_network()
    run_paths = RunPaths.from_run_dir(sys.argv[1], "run")
    if sys.argv[2] == "read":
        print(json.dumps(read(run_paths)))
    else:
        begin, end, start, how = sys.argv[3:]
        write(run_paths, int(begin), int(end), None if start == "-" else int(start), how)
