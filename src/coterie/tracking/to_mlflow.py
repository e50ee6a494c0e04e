"""What a tracked run asks of MLflow, by its client alone: no global state, no autologging."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coterie.tracking.record import Record

EXPERIMENT = "coterie"
_BATCH = 900
"""Metrics a call: MLflow takes 1,000 things in one."""
_PARAMS = 90
_LONGEST = 6000
T = TypeVar("T")


class Store:
    """A place of MLflow's: that of MLFLOW_TRACKING_URI, else files in a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        for name in ("mlflow", "alembic"):  # their news of tables and stores would drown ours
            logging.getLogger(name).setLevel(logging.WARNING)
        given = os.environ.get("MLFLOW_TRACKING_URI", "")
        files = (Path("mlruns") if folder is None else folder).resolve().as_uri()
        self.uri = given if given and folder is None else files
        if not self.uri.partition("://")[0] or self.uri.startswith("file:"):
            # Files need no database, and MLflow still reads them where it is asked to.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)

    def begin(self, name: str, tags: Mapping[str, str], parent: str | None) -> str:
        """Begin a run, nested if a parent is given; give its id."""
        nested = {} if parent is None else {"mlflow.parentRunId": parent}
        found = self._client.get_experiment_by_name(EXPERIMENT)
        place = self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        run = self._client.create_run(
            place, run_name=name, tags={**tags, **nested, "mlflow.source.name": "coterie"}
        )
        return str(run.info.run_id)

    def fill(self, run: str, record: Record) -> None:
        """Log all of a record and end the run."""
        from mlflow.entities import Metric, Param

        now = int(time.time() * 1000)
        settings = [Param(key, value[:_LONGEST]) for key, value in record.settings.items()]
        for part in _parts(settings, _PARAMS):
            self._client.log_batch(run, params=part)
        last = max((step for step, _, _ in record.by_round), default=0)
        metrics = [Metric(key, value, now, last) for key, value in record.metrics.items()]
        metrics += [Metric(key, value, now, step) for step, key, value in record.by_round]
        for batch in _parts(metrics, _BATCH):
            self._client.log_batch(run, metrics=batch)
        self.end(run, record.artefacts)

    def end(self, run: str, artefacts: Sequence[Path]) -> None:
        """Keep files with a run, and end it."""
        for path in artefacts:
            self._client.log_artifact(run, str(path))
        self._client.set_terminated(run)

    def is_finished(self, run: str) -> bool:
        """Return whether a run is there and was ended."""
        found = self._find(run)
        return found is not None and found.info.status == "FINISHED"

    def exists(self, run: str) -> bool:
        """Return whether a run is there."""
        return self._find(run) is not None

    def discard(self, run: str) -> None:
        """Take away a run that was begun and never ended."""
        if self._find(run) is not None:
            self._client.delete_run(run)

    def _find(self, run: str) -> Any:
        from mlflow.exceptions import MlflowException

        if not run:
            return None
        try:
            found = self._client.get_run(run)
        except MlflowException:
            return None
        return found if found.info.lifecycle_stage == "active" else None


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
