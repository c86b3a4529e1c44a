"""MLflow logger."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from rlhpc.metrics.loggers.base import RunFacts, flatten_config, require

#: Maximum batch sizes of MLflow.
_MAX_PARAMS, _MAX_METRICS = 100, 1000
_MAX_VALUE_LENGTH = 6000


class MLflowLogger:
    """Logger to an MLflow run; without a server it writes to the run's own database, `<run>/mlflow.db`."""

    def __init__(
        self, *, tracking_uri: str | None = None, experiment: str = "rlhpc", tags: Mapping[str, str] | None = None
    ) -> None:
        """Creates the logger.

        Args:
            tracking_uri: The server or store; by default `MLFLOW_TRACKING_URI`, else the run's own database.
            experiment: MLflow's experiment; created if it does not exist.
            tags: Tags of the run.
        """
        self._uri, self._experiment, self._tags = tracking_uri, experiment, dict(tags or {})
        self._client: Any = None
        self._run_id = ""

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        require("mlflow")
        from mlflow.tracking import MlflowClient

        local_uri = f"sqlite:///{run.folder / 'mlflow.db'}"
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri
        self._client = MlflowClient(tracking_uri=uri)
        if run.saved_state.get("run_id"):
            self._run_id = run.saved_state["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            return self._last_step()
        existing_experiment = self._client.get_experiment_by_name(self._experiment)
        if existing_experiment is not None:
            experiment_id = existing_experiment.experiment_id
        else:
            artifact_location = str(run.folder / "mlflow") if uri == local_uri else None
            experiment_id = self._client.create_experiment(self._experiment, artifact_location=artifact_location)
        mlflow_run = self._client.create_run(experiment_id, run_name=run.name, tags=self._tags)
        self._run_id = run.saved_state["run_id"] = mlflow_run.info.run_id
        self._log_config(run.config)
        return None

    def log(self, step: int, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(_to_allowed_name(name), float(metric_value), now_ms, step) for name, metric_value in row.items()
        ]
        for batch_start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(
                self._run_id, metrics=metrics[batch_start : batch_start + _MAX_METRICS], synchronous=True
            )

    def commit(self) -> None:
        """Does nothing: each row was a transaction."""

    def close(self) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id)

    def _last_step(self) -> int | None:
        logged_metrics = self._client.get_run(self._run_id).data.metrics
        # Every row has this metric, so its history contains the last step.
        names_to_read = ["time/wall_s"] if "time/wall_s" in logged_metrics else list(logged_metrics)
        steps = [
            metric.step for name in names_to_read for metric in self._client.get_metric_history(self._run_id, name)
        ]
        return max(steps, default=None)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(_to_allowed_name(name), str(param_value)[:_MAX_VALUE_LENGTH])
            for name, param_value in flatten_config(config).items()
        ]
        for batch_start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(
                self._run_id, params=params[batch_start : batch_start + _MAX_PARAMS], synchronous=True
            )


def _to_allowed_name(name: str) -> str:
    """Replaces characters of a name that MLflow does not allow; it allows letters, digits and `_-. /`."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]
