"""Newcomers: clients who come after training take the shared tree and fit their own part alone.

Nothing of theirs is posted, so nobody learns anything of them, and the run that they join spends
nothing. What they are given was posted, and is public under that run's guarantee.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.choice import DataChoice
from coterie.config import ConfigError
from coterie.data.federated import Spec
from coterie.engines.outcome import join_shared
from coterie.finished_models import write_models
from coterie.methods.base import Method
from coterie.newcomers import score_alone
from coterie.privacy.accounting import Guarantee
from coterie.recognition import recognise_model
from coterie.rng import Rng
from coterie.run_plan import load_plan
from coterie.scores import Score, evaluate
from coterie.tree import Tree, take


@dataclass(frozen=True)
class Joined:
    """Models of newcomers, with scores on rows that they held out: joined, and alone."""

    models: Tree
    names: list[str]
    score: Score
    alone: Score
    guarantee: Guarantee
    said: dict[str, Any]  # what must be read beside the guarantee of the run that was joined


def join(folder: Path, choice: DataChoice, out: Path | None = None) -> Joined:
    """Fit newcomers from a finished run's folder and their own rows; keep the models in `out`.

    Raises:
        ConfigError: If the folder holds no finished run.
        ValueError: If the rows are of another kind than the run's.
    """
    run_plan = load_plan(folder / "plan.toml")
    shared, guarantee, result = _read(folder)
    train, test = choice.split()
    if train.spec.task != result.get("task", train.spec.task):
        raise ValueError(
            f"{folder} is a run on a {result['task']} task, the newcomers' rows are "
            f"{train.spec.task}: give rows of the same kind (--task)"
        )
    method, spec = run_plan.method, replace(train.spec, clients=guarantee.clients)
    _check(method, spec, shared, folder)
    seed = run_plan.simulation_seed
    models = join_shared(method, shared, spec, train, seed)
    score = evaluate(method.model, lambda ids: take(models, torch.from_numpy(ids)), test)
    found = Joined(
        models,
        [str(name) for name in train.names],
        score,
        score_alone(method, train, test),
        guarantee,
        {key: result.get(key) for key in ("caveats", "tuning")},
    )
    if out is not None:
        write_models(out, found.models, found.names)
    return found


def _read(folder: Path) -> tuple[Tree, Guarantee, dict[str, Any]]:
    try:
        with np.load(folder / "shared.npz", allow_pickle=False) as arrays:
            shared = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return shared, Guarantee.from_json(stated), dict(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: no finished run that can be joined ({error!r}); finish it with "
            f"`coterie run --resume {folder}`, or restore shared.npz and guarantee.json"
        ) from error


def _check(method: Method, spec: Spec, shared: Tree, folder: Path) -> None:
    method.check(spec)
    expected = {name: leaf.shape for name, leaf in method.init(spec, Rng.seeded(0)).items()}
    given = {name: leaf.shape for name, leaf in shared.items()}
    if expected != given:
        raise ValueError(
            f"{folder}: its shared tree has shapes {_plain(given)}, the newcomers' rows call for "
            f"{_plain(expected)}; give rows with the features and classes of the training"
        )
    if (folder / "model.json").exists():
        recognise_model(folder, method.model, spec)


def _plain(shapes: dict[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in shapes.items()}
