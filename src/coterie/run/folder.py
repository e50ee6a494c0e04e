"""The folder of a run: everything a person keeps.

- `plan.toml`: the resolved plan, data included; `coterie run --resume FOLDER` needs no more
- `ledger.jsonl`: what was charged and released, in order
- `log.jsonl`: what happened when (private)
- `data.json`: a fingerprint of the training rows, so that a run never resumes with others
- `model.json`: outputs of the network on synthetic rows, so that a run never resumes with another
- `posts/`: the public transcript, one file per release; `posts.npz` when the run is done
- `personal/`: personal state between rounds, and the journal of the round in progress
- `models/`: one model per client, a row each, in `clients.safetensors` (`clients.json` names them)
- `shared.npz`: the shared tree after the last release, from which new clients are onboarded
- `guarantee.json`: the certificate that `coterie verify` checks
- `history.parquet`: with a virtual clock, or on request: the score of every round (not private)
- `metrics.parquet`: per client: test rows, error, other metrics of the task, error of the local
  baseline (not private)
- `result.json`: the summary that `coterie run --json` prints; written last, it marks a finished run
"""

import hashlib
import io
import json
import math
import os
import platform
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coterie.core.config import read_toml, to_toml
from coterie.core.files import how_to_resume, write_atomically
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.labels import SIGNED
from coterie.engine.simulate import Observer, Outcome, Progress
from coterie.models import Model
from coterie.plan.plan import Plan
from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.selection import BEFORE_CHOICE, charged_statement
from coterie.run.certificate import certify
from coterie.run.models import MODELS, write_models
from coterie.run.summary import TUNING
from coterie.scores import Array, Score

_PARTS = ("ledger.jsonl", "posts", "posts.npz", "personal", "models", "result.json")
_PACKAGES = ("coterie", "dp-accounting", "numpy", "scipy", "torch")
_MARKS = 8
_ROWS = 4
_NEAR = 1e-3
_NOTHING: Mapping[str, Array] = {}


def claim(folder: Path, plan: Plan) -> None:
    """Write plan.toml into the folder, or check that the folder holds a run of this plan.

    Raises:
        FileExistsError: If the folder holds another run.
    """
    text = to_toml(plan.to_table())
    path = folder / "plan.toml"
    if not path.exists():
        if any((folder / part).exists() for part in _PARTS):
            raise FileExistsError(
                f"{folder} holds parts of a run without its plan.toml; choose another folder"
            )
        write_atomically(path, text.encode())
    elif read_toml(path) != tomllib.loads(text):
        raise FileExistsError(
            f"{folder} holds a run of another plan; {how_to_resume(folder)}, or choose another "
            f"folder{_unspent(folder)}"
        )


def _unspent(folder: Path) -> str:
    """Return a hint that a folder without a charge and without a result may be removed."""
    if (folder / "result.json").exists():
        return ""
    try:
        charged = b'"charge"' in (folder / "ledger.jsonl").read_bytes()
    except FileNotFoundError:
        charged = False
    return "" if charged else "; nothing was charged in this one: it may be removed"


def check_charged(plan: Plan, folder: Path | None) -> None:
    """Raise ValueError if the plan belongs to a charged selection and the folder does not.

    The epsilon of such a run would leave out the releases of the selection.
    """
    if plan.charged is None:
        return
    begun = folder is not None and (folder / "plan.toml").exists()
    if not begun and (folder is None or not (folder.parent.parent / "selection.json").exists()):
        raise ValueError(
            "charged: the plan belongs to a run of a charged selection; to run its settings "
            "again, leave out the table [charged]: the new run's epsilon comes on top"
        )


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute a run."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Log:
    """The log of a run, `log.jsonl`: one JSON object per event, in order, only ever appended.

    Events are started, resumed, round, packed, finished, interrupted and failed. The log is
    private: how long a round took depends on who took part and on their rows, which no epsilon
    covers. It never holds rows or a seed. Lines that are not synced may be lost in a crash: the
    ledger, not the log, is the account.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        held = path.read_bytes() if path.exists() else b""
        self.begun = _first(held)
        self._torn = bool(held) and not held.endswith(b"\n")  # a crash cut the last line off

    def note(self, event: str, *, sync: bool = False, **facts: Any) -> None:
        """Add an event."""
        line = json.dumps({"time": now(), "event": event, **facts}, allow_nan=False)
        with self.path.open("ab") as file:
            file.write((b"\n" if self._torn else b"") + line.encode() + b"\n")
            self._torn = False
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def open(self) -> None:
        """Log that a run is started or resumed."""
        self.note("resumed" if self.begun else "started", sync=True, versions=versions())
        self.begun = self.begun or _first(self.path.read_bytes())


class Logged:
    """An observer that logs every round and then calls another observer.

    Every eighth of the rounds it logs epsilon so far too, where that is cheap to compute: for many
    unlike rounds with hidden cohorts it is not.
    """

    def __init__(self, log: Log, guarantee: Guarantee, then: Observer | None = None) -> None:
        self._log, self._guarantee, self._then = log, guarantee, then
        posts = len(guarantee.events)
        cheap = guarantee.participation.rate == 1 or len(set(guarantee.events)) <= _MARKS
        parts = range(1, _MARKS + 1) if cheap else ()
        self._marks = {math.ceil(posts * part / _MARKS) for part in parts}

    def __call__(self, progress: Progress) -> None:
        """Log a round."""
        facts: dict[str, Any] = {"round": progress.round}
        if progress.round in self._marks:
            facts["epsilon"] = self._spent(progress.round)
        self._log.note("round", **facts)
        if self._then is not None:
            self._then(progress)

    def _spent(self, round: int) -> float | str:
        promised = self._guarantee
        (spent,) = epsilon_by_round(
            promised.events, promised.participation, promised.relation, promised.delta, [round]
        )
        return "inf" if spent == math.inf else spent


def _first(held: bytes) -> str:
    """Return the time of the first line; empty if none can be read."""
    try:
        line: Mapping[str, Any] = json.loads(held.partition(b"\n")[0].decode())
        return str(line["time"])
    except (ValueError, KeyError, TypeError):
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def check_rows(folder: Path, train: FederatedDataset) -> None:
    """Raise ValueError if the rows are not those that the run was started with.

    The fingerprint is as private as the rows. Beside it stand public facts (shape, task, names of
    columns), so that models can be used where the rows are gone.
    """
    digest = train.fingerprint()
    path = folder / "data.json"
    if not path.exists():
        found = {"fingerprint": digest, "facts": facts_of(train)}
        write_atomically(path, json.dumps(found).encode())
    elif digest not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"{path}: the training rows are not those the run was started with; "
            "restore them, or start a new run"
        )


def facts_of(data: FederatedDataset) -> dict[str, Any]:
    """Return public facts of a dataset: enough to read other rows of the same kind."""
    return {
        "shape": list(data.spec.shape),
        "outputs": data.spec.outputs,
        "task": data.spec.task,
        "columns": [str(name) for name in data.columns],
        "signed": SIGNED in data.notes,
    }


def check_model(folder: Path, model: Model, spec: Spec) -> None:
    """Raise ValueError if the network has changed since the run was started.

    A plan names a user's module by where it is imported from, and that file may change. So
    `model.json` holds the shapes of its leaves and its outputs on a few synthetic rows.
    """
    path, found = folder / "model.json", _outputs(model, spec)
    if not path.exists():
        write_atomically(path, json.dumps(found).encode())
        return
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        same = kept["leaves"] == found["leaves"] and np.allclose(
            kept["outputs"], found["outputs"], rtol=_NEAR, atol=_NEAR, equal_nan=True
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); restore it") from error
    if not same:
        raise ValueError(
            f"{path}: the model ({_named(model)}) has changed since this run began; restore the "
            "code that it was begun with, or start a new run"
        )


def _outputs(model: Model, spec: Spec) -> dict[str, Any]:
    params = model.init(spec, Rng.seeded(0))
    bits = Rng.seeded(0).at("recognition").numpy().integers(0, 2, (_ROWS, *spec.shape))
    with torch.no_grad():
        outputs = model.apply(params, torch.from_numpy(bits.astype(np.float32)))
    return {
        "leaves": {name: list(leaf.shape) for name, leaf in params.items()},
        "outputs": outputs.double().tolist(),
    }


def _named(model: Model) -> str:
    make = getattr(model, "make", None)
    if callable(make):
        return f"{make.__module__}:{getattr(make, '__qualname__', type(make).__qualname__)}"
    return type(model).__name__


def keep(
    folder: Path,
    summary: Mapping[str, Any],
    outcome: Outcome,
    train: FederatedDataset,
    *,
    score: Score,
    local: Score | None,
    errors: Mapping[str, Array] = _NOTHING,
    log: Log | None = None,
) -> None:
    """Write the files of a finished run; `result.json` comes last and marks it as done.

    Releases are packed and models written before it, so that a run cut off in between resumes.
    `errors` are further columns of the metrics: clients' errors under baselines, by name.
    """
    log = log or Log(folder / "log.jsonl")
    outcome.billboard.pack()
    write_models(folder / MODELS, outcome.models.leaves, train.names)
    outcome.models.drop()
    log.note("packed")
    keep_shared(folder, outcome.shared)
    write_metrics(folder / "metrics.parquet", train, score, local, errors)
    released = outcome.billboard.ledger.released
    keep_certificate(folder, summary, outcome.guarantee, outcome.plan.method.kind, released, log)
    keep_summary(folder, summary)


def keep_shared(folder: Path, shared: Tree) -> None:
    """Write the shared tree after the last release, from which new clients are onboarded."""
    buffer = io.BytesIO()
    arrays = {name: leaf.cpu().numpy() for name, leaf in shared.items()}
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(folder / "shared.npz", buffer.getvalue())


def keep_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write result.json: the run is finished."""
    text = json.dumps(dict(summary), indent=2, allow_nan=False)
    write_atomically(folder / "result.json", text.encode())


def keep_certificate(
    folder: Path,
    summary: Mapping[str, Any],
    guarantee: Guarantee,
    method: str,
    released: Mapping[int, str],
    log: Log,
) -> None:
    """Write the certificate; the log holds its hash."""
    more: dict[str, Any] = {"method": method}
    if summary["tuning"] != TUNING["no"]:
        more["tuning"] = summary["tuning"]
    if summary["caveats"]:
        more["caveats"] = summary["caveats"]
    if (deployment := summary.get("deployment")) is not None:
        # Hashed here and not among the files: a simulated run has no such file.
        federation = hashlib.sha256((folder / "federation.toml").read_bytes()).hexdigest()
        more["deployment"] = {**deployment, "federation": federation}
    if (selection := summary.get("selection")) is not None:
        # Epsilon by events alone stays what the events come to; it is true of nobody any more.
        more |= {"selection": selection, "view": BEFORE_CHOICE}
        more["statement"] = charged_statement(guarantee, selection)
    finished = now()
    begun = log.begun or finished
    if deployment is not None:
        # To the day: how long rounds were waited for would tell who was drawn.
        begun, finished = (f"{time[:10]}T00:00" for time in (begun, finished))
    certificate = certify(
        folder,
        guarantee,
        released,
        begun=begun,
        finished=finished,
        versions=versions(),
        more=more,
    )
    text = json.dumps(certificate, indent=2, allow_nan=False)
    write_atomically(folder / "guarantee.json", text.encode())
    epsilon, posts = certificate["epsilon"], len(certificate["posts"])
    told = certificate["sha256"]
    log.note("finished", sync=True, posts=posts, epsilon=epsilon, certificate=told)


def write_metrics(
    path: Path,
    train: FederatedDataset,
    score: Score,
    local: Score | None,
    errors: Mapping[str, Array] = _NOTHING,
) -> None:
    """Write one row per client: rows, errors, metrics, errors of the baselines."""
    columns = {
        "client": pa.array(list(train.names)),
        "train_rows": pa.array(train.counts),
        "test_rows": pa.array(score.rows),
        "error": pa.array(score.clients),
    }
    for key, own in {**score.per_client, "calibration_error": score.calibration}.items():
        if own is not None:
            columns[key] = pa.array(own.clients)
    if local is not None:
        columns["error_alone"] = pa.array(local.clients)
        if local.calibration is not None:
            columns["calibration_error_alone"] = pa.array(local.calibration.clients)
    columns |= {name: pa.array(found) for name, found in errors.items()}
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    write_atomically(path, buffer.getvalue().to_pybytes())
