"""Newcomers: clients who come after training take the shared tree and fit their own part alone.

Nothing of theirs is posted, so nobody learns anything of them, and the run that they join spends
nothing. What they are given was posted, and is public under that run's guarantee. That guarantee,
and no epsilon of 0, is what holds for a client that was trained with and joins once more.

Their rows have to be read and scaled as those of the training were: `choose` takes that from the
run's plan, and `join` refuses rows that are read otherwise.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.choice import DataChoice
from coterie.config import ConfigError, from_table, to_table
from coterie.data.catalogue import NAMES
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.table_files import TABLES
from coterie.data.unlabelled import file_columns
from coterie.engines.outcome import join_shared
from coterie.evaluation.baselines import score_local
from coterie.evaluation.metrics import Score
from coterie.evaluation.score import evaluate
from coterie.finished_models import client_names, write_models
from coterie.full_disks import how_to_finish
from coterie.methods.base import Method
from coterie.privacy.accounting import Guarantee
from coterie.recognition import recognise_model
from coterie.rng import Rng
from coterie.run_plan import load_plan, read_toml
from coterie.tree import Tree, take

_OWN = ("client", "target", "split", "splits", "missing", "memory_map", "images")
"""What newcomers' files may have otherwise than the training's: names of columns, and places."""
_OPEN = ("task", "classes", "features", "levels")
"""What a plan may leave to the file; compared where both say it."""
_FILES = ("vocabulary", "tags")


@dataclass(frozen=True)
class Joined:
    """Models of newcomers, with scores on rows that they held out: joined, and alone.

    Attributes:
        models: A model each, stacked.
        names: Whose they are.
        score: Of these models.
        alone: Of learning alone.
        guarantee: Of the run that was joined.
        said: What must be read beside it.
        known: Names that clients of the training bear too; None where the run names none.
        selection: What the run's certificate says of the private choice that it came of, if any.
    """

    models: Tree
    names: list[str]
    score: Score
    alone: Score
    guarantee: Guarantee
    said: dict[str, Any]
    known: list[str] | None = None
    selection: dict[str, Any] | None = None


def choose(folder: Path, table: Mapping[str, Any]) -> DataChoice:
    """Choose newcomers' rows: read and scaled as the run's were, where the table does not say.

    Args:
        folder: The folder of a finished run.
        table: Where the rows are (`name`), and what is to be read otherwise, as in a plan's
            `data`.

    Raises:
        ConfigError: If the folder holds no run, or the table does not fit.
    """
    kept, facts = load_plan(folder / "plan.toml").data, _facts(folder)
    given = dict(table)
    given.setdefault("standardise", kept.standardise)
    name = str(given.get("name", ""))
    if name in NAMES:
        return from_table(DataChoice, given, "data")
    source = {**to_table(kept.source), "memory_map": None, **(given.get("source") or {})}
    source.setdefault("task", facts.get("task"))
    if source["task"] == "multiclass":  # newcomers may have rows of some classes only
        source.setdefault("classes", facts.get("outputs"))
    given["source"] = {key: value for key, value in source.items() if value is not None}
    choice = from_table(DataChoice, given, "data")
    if name.lower().endswith(TABLES) and not choice.source.text:
        columns = file_columns(choice.source, facts.get("columns") or ())
        choice = replace(choice, source=replace(choice.source, features=columns))
    return choice


def join(folder: Path, choice: DataChoice, out: Path | None = None) -> Joined:
    """Fit newcomers from a finished run's folder and their own rows; keep the models in `out`.

    Args:
        folder: The folder of a finished run.
        choice: Their rows; `choose` reads them as the run's were.
        out: Where to keep the models.

    Raises:
        ConfigError: If the folder holds no finished run.
        ValueError: If the rows are of another kind than the run's, or are read otherwise.
    """
    run_plan = load_plan(folder / "plan.toml")
    shared, stated, result = _read(folder)
    guarantee = Guarantee.from_json(stated)
    _agree(folder, run_plan.data, choice)
    train, test = choice.split()
    _check_rows(folder, train, result)
    method, spec = run_plan.method, replace(train.spec, clients=guarantee.clients)
    _check(method, spec, shared, folder)
    seed = run_plan.simulation_seed
    models = join_shared(method, shared, spec, train, seed)
    score = evaluate(method.model, lambda ids: take(models, torch.from_numpy(ids)), test)
    names = [str(name) for name in train.names]
    found = Joined(
        models,
        names,
        score,
        score_local(method, train, test),
        guarantee,
        {key: result.get(key) for key in ("caveats", "tuning")},
        _known(folder, names),
        stated.get("selection"),
    )
    if out is not None:
        write_models(out, found.models, found.names)
    return found


def _known(folder: Path, names: list[str]) -> list[str] | None:
    """List those who were trained with, by name; None where nobody knows."""
    try:
        trained = set(_federated(folder) or client_names(folder))
    except (OSError, ValueError):
        return None
    return [name for name in names if name in trained]


def _federated(folder: Path) -> list[str]:
    """Name the clients of a deployment, whose models are not here; none of a simulated run."""
    path = folder / "federation.toml"
    sites = read_toml(path).get("sites", {}) if path.exists() else {}
    return [str(name) for site in sites.values() for name in site.get("clients", ())]


def _facts(folder: Path) -> dict[str, Any]:
    """Read what is public of the training rows; runs of older versions did not keep it."""
    try:
        return dict(json.loads((folder / "data.json").read_text(encoding="utf-8"))["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read(folder: Path) -> tuple[Tree, dict[str, Any], dict[str, Any]]:
    try:
        with np.load(folder / "shared.npz", allow_pickle=False) as arrays:
            shared = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        Guarantee.from_json(stated)  # refused here, where it says which run
        return shared, dict(stated), dict(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: no finished run that can be joined ({error!r}); "
            f"{how_to_finish(folder)}, or restore shared.npz and guarantee.json"
        ) from error


def _agree(folder: Path, kept: DataChoice, given: DataChoice) -> None:
    """Refuse rows that would be scaled or read otherwise than those of the training.

    How a data set of the catalogue is read is its own affair: nothing is said of it.
    """
    pairs = {"standardise": (kept.standardise, given.standardise)}
    if kept.name not in NAMES:
        for name in to_table(kept.source).keys() | to_table(given.source).keys():
            if name not in _OWN:
                ours, theirs = getattr(kept.source, name), getattr(given.source, name)
                pairs[f"source.{name}"] = (ours, theirs)
    for name in sorted(pairs):
        ours, theirs = pairs[name]
        if not _same(name.removeprefix("source."), ours, theirs):
            raise ValueError(
                f"data.{name}: {folder} was trained with {_said(ours)}, and the newcomers' rows "
                f"would be read with {_said(theirs)}, which its models do not fit; leave it out, "
                "and it is as in the training"
            )


def _same(name: str, ours: Any, theirs: Any) -> bool:
    if name in _OPEN and (not ours or not theirs):
        return True
    if name in _FILES and isinstance(ours, str) and isinstance(theirs, str):
        return ours == theirs or _content(ours) == _content(theirs)
    if name == "positive":
        ours, theirs = (_texts(value) for value in (ours, theirs))
    return bool(to_table(ours) == to_table(theirs))  # lists for tuples, at any depth


def _texts(value: Any) -> list[str]:
    given = value if isinstance(value, tuple) else () if value is None else (value,)
    return [str(one) for one in given]


def _content(path: str) -> bytes | str:
    try:
        return Path(path).read_bytes()
    except OSError:
        return path


def _said(value: Any) -> str:
    text = repr(to_table(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_rows(folder: Path, train: FederatedDataset, result: Mapping[str, Any]) -> None:
    """Refuse rows of another task, or whose features are others or stand in another order."""
    if train.spec.task != result.get("task", train.spec.task):
        raise ValueError(
            f"{folder} is a run on a {result['task']} task, the newcomers' rows are "
            f"{train.spec.task}: give rows of the same kind (--task)"
        )
    ours, theirs = list(_facts(folder).get("columns") or ()), [str(one) for one in train.columns]
    if ours and theirs and ours != theirs and len(ours) == len(theirs):
        at = next(at for at, name in enumerate(ours) if name != theirs[at])
        raise ValueError(
            f"{folder}: feature {at} (from 0) of the training is {ours[at]!r}, that of the "
            f"newcomers {theirs[at]!r}; give the same features in the same order (--features "
            f"{','.join(ours[:12])}{',...' if len(ours) > 12 else ''})"
        )


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
