"""The folder of a run: everything a person keeps.

- `plan.toml`: the resolved plan, data included; `coterie run --resume FOLDER` needs no more
- `ledger.jsonl`: what was charged and released, in order
- `log.jsonl`: what happened when (private)
- `budget.json`: connects the run to its entry in the budget register, and says what was spent on
  the same clients when it was entered (private)
- `data.json`: a fingerprint of the training rows, so that a run never resumes with others
- `model.json`: outputs of the network on synthetic rows, so that a run never resumes with another
- `posts/`: the public transcript, one file per release; `posts.npz` when the run is done
- `personal/`: personal state between rounds, and the journal of the round in progress; with several
  processes (`torchrun`), a folder for the clients of each
- `models/`: one model per client, a row each, in `clients.safetensors` (`clients.json` names them)
- `shared.npz`: the shared tree after the last release, from which new clients are onboarded
- `guarantee.json`: the certificate that `coterie verify` checks
- `history.parquet`: with a virtual clock, or on request: the score of every round (not private)
- `metrics.parquet`: per client: test rows, error, other metrics of the task, error of the local
  baseline (not private)
- `audit.json`: what `coterie audit` found of its plan, if it was run
- `result.json`: the summary that `coterie run --json` prints; written last, it marks a finished run
"""

import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.config import read_toml, to_toml
from coterie.core.files import how_to_resume, write_atomically
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.assemble import SIGNED
from coterie.data.federated import FederatedDataset, Spec
from coterie.engine.models import MODELS, write_models
from coterie.engine.simulate import Outcome
from coterie.evaluation.metrics import Array, Score, write_metrics
from coterie.evaluation.predict import variances
from coterie.models import Model
from coterie.planning.plan import Plan
from coterie.runs.certificate import keep_certificate
from coterie.runs.log import Log

_PARTS = ("ledger.jsonl", "posts", "posts.npz", "personal", "models", "result.json")
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


def check_rows(folder: Path, train: FederatedDataset) -> None:
    """Raise ValueError if the rows are not those that the run was started with.

    The fingerprint is as private as the rows. The file also holds public facts (shape, task, names
    of columns), so that models can be used where the rows are gone.
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


def check_personal(folder: Path) -> None:
    """Raise ValueError if a file of personal models is damaged."""
    for path in sorted((folder / "personal").rglob("*.npy")):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header can trip NumPy's parser anywhere
            raise ValueError(
                f"{path}: damaged ({error}); restore it, or start a new run in a new folder"
            ) from error


def facts_of(data: FederatedDataset) -> dict[str, Any]:
    """Return public facts of a dataset: enough to read other rows of the same kind.

    Shape and columns are those before effects: columns that are made of them are in the plan.
    """
    shape = data.spec.shape if data.design is None else data.design.shape
    return {
        "shape": list(shape),
        "outputs": data.spec.outputs,
        "task": data.spec.task,
        "columns": [str(name) for name in columns_read(data)],
        "signed": SIGNED in data.notes,
    }


def columns_read(data: FederatedDataset) -> Sequence[str]:
    """Return the columns of a dataset before effects."""
    return data.columns if data.design is None else data.design.columns


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
    kept = {**train.scaling, **variances(outcome.plan.method, outcome.shared, train)}
    write_models(folder / MODELS, outcome.models.leaves, train.names, kept)
    outcome.models.drop()
    log.note("packed")
    keep_shared(folder, outcome.shared)
    write_metrics(folder / "metrics.parquet", train, score, local, errors)
    keep_certificate(folder, summary, outcome.guarantee, outcome.plan, outcome.billboard, log)
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
