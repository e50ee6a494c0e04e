"""Tracking: a finished run as MLflow or TensorBoard show it, next to others.

What is logged: see `coterie.tracking.record`. Metrics are of clients' rows and not covered by
epsilon: a tag says so, and whoever may read the tracking server may read them. The page that MLflow
is given is made for it, without clients: report.html of the run folder names them.

MLflow goes where MLFLOW_TRACKING_URI says, else to files in ./mlruns; TensorBoard to
RUN/tensorboard, by its own writer without torch. A run that is tracked again is not logged twice.
"""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from coterie.core.environment import SWITCH, is_offline
from coterie.core.files import write_atomically
from coterie.tracking.record import read_record

Kind = Literal["mlflow", "tensorboard"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_NOTE, _PAGE = "tracking.json", "report.html"
_LOCAL = ("", "file", "sqlite")


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse what cannot be tracked with, before anything is spent.

    Raises:
        ValueError: If a kind is unknown or not installed, or would need the network while offline.
    """
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
    """Read the name of what is tracked with."""
    for known in KINDS:
        if kind == known:
            return known
    raise ValueError(f"--track {kind}: expected {' or '.join(KINDS)}")


def track(folder: Path, kind: Kind, *, parent: str | None = None, where: Path | None = None) -> str:
    """Log a finished run; give MLflow's run id, or the folder of TensorBoard's file.

    Args:
        folder: A finished run: it has result.json and guarantee.json.
        kind: "mlflow" or "tensorboard".
        parent: What `open_parent` gave, to nest the run under a comparison.
        where: MLflow's folder, or that of TensorBoard's logs; None for the usual one.

    Raises:
        ValueError: If the run is not finished, or what is needed is not installed.
    """
    check_kinds([kind])
    record = read_record(folder)
    if kind == "tensorboard":
        from coterie.tracking.to_tensorboard import write_events

        place = folder / "tensorboard" if where is None else where / (parent or "") / record.name
        return str(write_events(record, place))
    from coterie.tracking.to_mlflow import Store

    store = Store(where)
    known = _noted(folder).get("mlflow", {})
    if known.get("uri") == store.uri and store.is_finished(known.get("run", "")):
        return str(known["run"])
    store.discard(known.get("run", "") if known.get("uri") == store.uri else "")
    run = store.begin(record.name, record.tags, parent)
    _note(folder, {"mlflow": {"uri": store.uri, "run": run}})
    with _page(folder, [folder]) as pages:
        store.fill(run, replace(record, artefacts=(*record.artefacts, *pages)))
    return run


def open_parent(folder: Path, kind: Kind, *, where: Path | None = None) -> str:
    """Begin what the runs of a comparison are nested under; give what `track` takes as `parent`."""
    check_kinds([kind])
    if kind == "tensorboard":
        return folder.name
    from coterie.tracking.to_mlflow import Store

    store = Store(where)
    known = _noted(folder).get("mlflow", {})
    if known.get("uri") == store.uri and store.exists(known.get("run", "")):
        return str(known["run"])
    run = store.begin(folder.name, {"coterie.comparison.plan": "true"}, None)
    _note(folder, {"mlflow": {"uri": store.uri, "run": run}})
    return run


def close_parent(
    folder: Path,
    kind: Kind,
    parent: str,
    runs: Sequence[Path] | Mapping[Path, str],
    *,
    where: Path | None = None,
) -> None:
    """End a comparison: a page of its runs goes with it, without clients.

    Args:
        folder: Of the comparison.
        kind: "mlflow" or "tensorboard".
        parent: What `open_parent` gave.
        runs: Its finished runs, with their names if they have any.
        where: As for `track`.
    """
    if kind == "mlflow":
        from coterie.tracking.to_mlflow import Store

        with _page(folder, runs) as pages:
            Store(where).end(parent, pages)


@contextmanager
def _page(folder: Path, runs: Sequence[Path] | Mapping[Path, str]) -> Iterator[list[Path]]:
    """Make the page of a folder anew for a while, without clients; none where it has no page."""
    if not runs or not (folder / _PAGE).exists():
        yield []
        return
    from coterie.report.page import write_report

    names = runs if isinstance(runs, Mapping) else None
    with TemporaryDirectory() as place:
        yield [write_report(list(runs), Path(place) / _PAGE, names=names, clients=False)]


def _noted(folder: Path) -> dict[str, Any]:
    """Read what is known of earlier tracking; whatever is broken is as good as nothing."""
    try:
        found = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(folder: Path, facts: Mapping[str, Any]) -> None:
    kept = json.dumps(_noted(folder) | dict(facts), indent=2)
    write_atomically(folder / _NOTE, kept.encode())
