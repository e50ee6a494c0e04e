"""Tracking: finished runs in MLflow or TensorBoard.

A tracker gets the plan's settings, the guarantee, epsilon after each round, the scores and losses
of each round where the run kept them (`--history`) and the final metrics. Artefacts are the
certificate, the plan and a page without clients. Models, names and numbers of single clients, and
the number of clients that answered a round, are never logged. Metrics are computed from clients'
rows and are not covered by epsilon; a tag states this.

MLflow writes to MLFLOW_TRACKING_URI, or else to files in ./mlruns, through its client only: no
global state, no autologging. TensorBoard's event file is written to RUN/tensorboard by its own
writer, without torch. A run that is tracked twice is logged once.
"""

import importlib.util
import json
import logging
import math
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar, get_args

from coterie.core.environment import SWITCH, is_offline
from coterie.core.files import write_atomically
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.selection import CHOSEN_ONLY, charged_statement, chosen_alone
from coterie.report.read import read_summary

Kind = Literal["mlflow", "tensorboard"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ARTEFACTS = ("guarantee.json", "plan.toml")
"""Files that are logged as they are; report.html names clients and is written anew without them."""
EXPERIMENT = "coterie"
NOT_COVERED = "metrics are computed from clients' rows and are not covered by epsilon"
_NOTE, _PAGE, _EVENTS = "tracking.json", "report.html", "events.out.tfevents.coterie"
_LOCAL = ("", "file", "sqlite")
_HIDDEN = ("round", "seconds", "answered")
"""Columns of a history that are not metrics."""
_WORST = "_worst"
"""Suffix of metrics of a single client."""
_MARKS = 50
"""Rounds after which epsilon is logged, at most: each needs an account of its own."""
_BATCH, _PARAMS, _LONGEST = 900, 90, 6000
"""Limits of MLflow: items per call, parameters per call, characters per parameter."""
T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """The values of a finished run for a tracker, without anything of a single client."""

    name: str
    settings: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    by_round: tuple[tuple[int, str, float], ...]
    artefacts: tuple[Path, ...]
    statement: str

    @property
    def last(self) -> int:
        """The last round."""
        return max((step for step, _, _ in self.by_round), default=0)


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise a ValueError for a tracker that is unknown, not installed or not allowed offline."""
    for kind in map(as_kind, kinds):
        if importlib.util.find_spec(kind) is None:
            raise ValueError(
                f"--track {kind} needs {kind}, which is not installed: pip install 'coterie[track]'"
            )
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if "mlflow" in kinds and is_offline() and uri.partition("://")[0] not in _LOCAL:
        raise ValueError(
            f"--track mlflow: MLFLOW_TRACKING_URI = {uri} is not on this machine, and --offline "
            f"(or {SWITCH}=1) allows nothing else; unset it, or give a file: or sqlite: address"
        )


def as_kind(kind: str) -> Kind:
    """Return the tracker of this name."""
    if kind not in KINDS:
        raise ValueError(f"--track {kind}: expected {' or '.join(KINDS)}")
    return kind


def track(folder: Path, kind: Kind, *, parent: str | None = None, where: Path | None = None) -> str:
    """Log a finished run; return MLflow's run id, or the folder of TensorBoard's file.

    `parent` is the result of `open_parent`, to nest the run under a comparison. `where` is MLflow's
    folder, or the folder of TensorBoard's logs.

    Raises:
        ValueError: If the run is not finished, or the tracker is not installed.
    """
    check_kinds([kind])
    record = read_record(folder)
    if kind == "tensorboard":
        place = folder / "tensorboard" if where is None else where / (parent or "") / record.name
        return str(_write_events(record, place))
    store = _Store(where)
    known = store.known(folder)
    if store.status(known) == "FINISHED":
        return known
    store.discard(known)
    run = store.begin(folder, record.name, record.tags, parent)
    with _page(folder, [folder]) as pages:
        store.fill(run, replace(record, artefacts=(*record.artefacts, *pages)))
    return run


def open_parent(folder: Path, kind: Kind, *, where: Path | None = None) -> str:
    """Start the parent of a comparison's runs; return what `track` takes as `parent`."""
    check_kinds([kind])
    if kind == "tensorboard":
        return folder.name
    store = _Store(where)
    known = store.known(folder)
    if store.status(known) is not None:
        return known
    return store.begin(folder, folder.name, {"coterie.comparison": "true"}, None)


def close_parent(
    folder: Path,
    kind: Kind,
    parent: str,
    runs: Sequence[Path] | Mapping[Path, str],
    *,
    where: Path | None = None,
) -> None:
    """End the parent of a comparison with a page, without clients, of its runs and their labels."""
    if kind == "mlflow":
        with _page(folder, runs) as pages:
            _Store(where).end(parent, pages)


def read_record(folder: Path) -> Record:
    """Return the values of a finished run for a tracker.

    Raises:
        ValueError: If the folder has no finished run.
    """
    result, stated, guarantee = read_summary(folder)
    selection = stated.get("selection")
    chosen = chosen_alone(guarantee, selection)
    plan = tomllib.loads((folder / "plan.toml").read_text(encoding="utf-8"))
    # The epsilon of a selected run by its own events is not a guarantee to anyone.
    spent = _epsilons(guarantee) if chosen is None else ()
    return Record(
        name=folder.name,
        settings={key: _text(value) for key, value in flatten(plan).items()},
        tags=_tags(result, guarantee) | ({} if chosen is None else {"coterie.view": CHOSEN_ONLY}),
        metrics=_final(result, guarantee, chosen),
        by_round=(*spent, *_history(folder / "history.parquet")),
        artefacts=tuple(path for name in ARTEFACTS if (path := folder / name).exists()),
        statement=charged_statement(guarantee, selection),
    )


def flatten(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names.

    >>> flatten({"rounds": 3, "method": {"kind": "pmtl", "lam": 0.3}})
    {'rounds': 3, 'method.kind': 'pmtl', 'method.lam': 0.3}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _tags(result: Mapping[str, Any], guarantee: Guarantee) -> dict[str, str]:
    stated = guarantee.to_json()
    return {
        "coterie.method": str(result.get("method")),
        "coterie.data": str(result.get("data")),
        "coterie.simulation": str(guarantee.simulation).lower(),
        "coterie.relation": guarantee.relation,
        "coterie.view": stated["view"],
        "coterie.sampling": stated["sampling"],
        "coterie.accountant": stated["accountant"],
        "coterie.tuning": str(result.get("tuning", "none")),
        "coterie.not_covered": NOT_COVERED,
    }


def _final(
    result: Mapping[str, Any], guarantee: Guarantee, chosen: float | None
) -> dict[str, float]:
    """Return the finite numbers of the summary, with epsilon recomputed; a tag names its view."""
    numbers = {
        key: float(value)
        for key, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if not key.endswith(_WORST)
    }
    if isinstance(result.get("metric"), str) and "value" in numbers:
        numbers[result["metric"]] = numbers["value"]
    numbers["epsilon"] = guarantee.epsilon if chosen is None else chosen
    numbers["delta"] = guarantee.delta
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def _epsilons(guarantee: Guarantee) -> list[tuple[int, str, float]]:
    """Return epsilon after some rounds, with the last one."""
    rounds = len(guarantee.events)
    marks = sorted({math.ceil(rounds * part / _MARKS) for part in range(1, _MARKS + 1)} - {0})
    spent = epsilon_by_round(
        guarantee.events, guarantee.participation, guarantee.relation, guarantee.delta, marks
    )
    found = zip(marks, spent, strict=True)
    return [(mark, "epsilon_by_round", epsilon) for mark, epsilon in found if epsilon < math.inf]


def _history(path: Path) -> list[tuple[int, str, float]]:
    if not path.exists():
        return []
    import pyarrow.parquet as pq

    return [
        (int(line["round"]), f"round_{key}", float(value))
        for line in pq.read_table(path).to_pylist()
        for key, value in line.items()
        if key not in _HIDDEN and isinstance(value, int | float) and math.isfinite(value)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


@contextmanager
def _page(folder: Path, runs: Sequence[Path] | Mapping[Path, str]) -> Iterator[list[Path]]:
    """Write a temporary page without clients, if the folder has a page."""
    if not runs or not (folder / _PAGE).exists():
        yield []
        return
    from coterie.report.page import write_report

    names = runs if isinstance(runs, Mapping) else None
    with TemporaryDirectory() as place:
        yield [write_report(list(runs), Path(place) / _PAGE, names=names, clients=False)]


# --- MLflow


class _Store:
    """MLflow's store: MLFLOW_TRACKING_URI, or files in a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        for name in ("mlflow", "alembic"):  # their messages on tables would hide ours
            logging.getLogger(name).setLevel(logging.WARNING)
        given = os.environ.get("MLFLOW_TRACKING_URI", "")
        files = (Path("mlruns") if folder is None else folder).resolve().as_uri()
        self.uri = given if given and folder is None else files
        if not self.uri.partition("://")[0] or self.uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)

    def known(self, folder: Path) -> str:
        """Return the run id that an earlier call noted in a folder for this store, or ""."""
        found = _noted(folder).get("mlflow", {})
        return str(found.get("run", "")) if found.get("uri") == self.uri else ""

    def begin(self, folder: Path, name: str, tags: Mapping[str, str], parent: str | None) -> str:
        """Start a run, nested if a parent is given, and note its id in the folder."""
        nested = {} if parent is None else {"mlflow.parentRunId": parent}
        found = self._client.get_experiment_by_name(EXPERIMENT)
        place = self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        tags = {**tags, **nested, "mlflow.source.name": "coterie"}
        run = str(self._client.create_run(place, run_name=name, tags=tags).info.run_id)
        kept = json.dumps(_noted(folder) | {"mlflow": {"uri": self.uri, "run": run}}, indent=2)
        write_atomically(folder / _NOTE, kept.encode())
        return run

    def fill(self, run: str, record: Record) -> None:
        """Log a record and end the run."""
        from mlflow.entities import Metric, Param

        now = int(time.time() * 1000)
        settings = [Param(key, value[:_LONGEST]) for key, value in record.settings.items()]
        for part in _parts(settings, _PARAMS):
            self._client.log_batch(run, params=part)
        metrics = [Metric(key, value, now, record.last) for key, value in record.metrics.items()]
        metrics += [Metric(key, value, now, step) for step, key, value in record.by_round]
        for batch in _parts(metrics, _BATCH):
            self._client.log_batch(run, metrics=batch)
        self.end(run, record.artefacts)

    def end(self, run: str, artefacts: Sequence[Path]) -> None:
        """Log files and end the run."""
        for path in artefacts:
            self._client.log_artifact(run, str(path))
        self._client.set_terminated(run)

    def status(self, run: str) -> str | None:
        """Return the status of a run; None where there is no such run."""
        from mlflow.exceptions import MlflowException

        if not run:
            return None
        try:
            found = self._client.get_run(run)
        except MlflowException:
            return None
        return str(found.info.status) if found.info.lifecycle_stage == "active" else None

    def discard(self, run: str) -> None:
        """Delete a run that was started and never ended."""
        if self.status(run) is not None:
            self._client.delete_run(run)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _noted(folder: Path) -> dict[str, Any]:
    """Return the notes of earlier tracking; damaged notes count as none."""
    try:
        found = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- TensorBoard


def _write_events(record: Record, folder: Path) -> Path:
    """Write TensorBoard's event file, in place of an earlier one."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{_EVENTS}.partial"
    with partial.open("wb") as file:
        writer = RecordWriter(file)
        for event in _events(record):
            writer.write(event.SerializeToString())
        writer.flush()
    partial.replace(folder / _EVENTS)
    return folder


def _events(record: Record) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    now = time.time()
    yield Event(wall_time=now, file_version="brain.Event:2")
    settings = "\n".join(f"    {key} = {value}" for key, value in record.settings.items())
    tags = "\n".join(f"- {key}: {value}" for key, value in record.tags.items())
    for name, text in (("plan", settings), ("guarantee", record.statement), ("tags", tags)):
        yield Event(wall_time=now, step=0, summary=Summary(value=[_text_value(name, text)]))
    final = [(record.last, f"final/{key}", value) for key, value in record.metrics.items()]
    for step, key, number in (*record.by_round, *final):
        value = Summary.Value(tag=key, simple_value=number)
        yield Event(wall_time=now, step=step, summary=Summary(value=[value]))


def _text_value(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=name,
        tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        metadata=SummaryMetadata(plugin_data=plugin),
    )
