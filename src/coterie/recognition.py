"""Is this still what the run was begun with? Rows and network, recognised when a run goes on.

Rows by a fingerprint, private as they are; beside it stand facts of them that are public (shape,
task, names of columns), so that models can be used where the rows are gone. The network by what it
answers: a plan names a user's module by where it is imported from, and that file may have changed
since. `model.json` holds the shapes of its leaves and its outputs, from the start of seed 0, on a
few made-up rows: public facts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data.assemble import SIGNED
from coterie.data.federated import FederatedDataset, Spec
from coterie.models import Model
from coterie.privacy.files import write_atomically
from coterie.rng import Rng

_ROWS = 4
_NEAR = 1e-3


def recognise_rows(folder: Path, train: FederatedDataset) -> None:
    """Refuse to go on with other rows than the run was started with."""
    digest = train.fingerprint()
    path = folder / "data.json"
    if not path.exists():
        told = {"fingerprint": digest, "facts": facts_of(train)}
        write_atomically(path, json.dumps(told).encode())
    elif digest not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"{path}: the training rows are not those the run was started with; "
            "restore them, or start a new run"
        )


def facts_of(data: FederatedDataset) -> dict[str, Any]:
    """Return what is public of rows: enough to read others of the same kind."""
    return {
        "shape": list(data.spec.shape),
        "outputs": data.spec.outputs,
        "task": data.spec.task,
        "columns": [str(name) for name in data.columns],
        "signed": SIGNED in data.notes,
    }


def recognise_model(folder: Path, model: Model, spec: Spec) -> None:
    """Refuse to go on with a network that answers otherwise than when the run was started.

    Raises:
        ValueError: If it does; or if what was kept cannot be read.
    """
    path, found = folder / "model.json", _answers(model, spec)
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


def _answers(model: Model, spec: Spec) -> dict[str, Any]:
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
