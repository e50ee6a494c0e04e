"""Onboard clients after training: fit each new client's model from the shared parameters.

New clients release nothing, so onboarding costs no privacy. The shared parameters are public under
the guarantee of the run. That guarantee, and not epsilon 0, holds for a client that took part in
training and is onboarded again.

Rows must be read and scaled as in training: `choose` takes that from the run's plan, and `onboard`
refuses rows that are read differently.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coterie.core.config import ConfigError, from_table, read_toml, to_table
from coterie.core.files import how_to_resume
from coterie.core.rng import Rng
from coterie.core.tree import Tree, take
from coterie.data.config import DataConfig
from coterie.data.datasets import NAMES
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.load import file_columns
from coterie.data.tables import TABLES
from coterie.engine.models import client_names, write_models
from coterie.engine.simulate import onboard as onboard_models
from coterie.evaluation.baselines import score_local
from coterie.evaluation.metrics import Score
from coterie.evaluation.score import evaluate
from coterie.methods.base import Method
from coterie.plan.plan import Plan
from coterie.privacy.guarantee import Guarantee
from coterie.run.folder import check_model
from coterie.serve.predict import read_shared

_MAY_DIFFER = ("client", "target", "split", "splits", "missing", "memory_map", "images")
"""Settings that may differ from training: names of columns, and paths."""
_OPTIONAL = ("task", "classes", "features", "levels")
"""Settings that a plan may leave to the file; compared if both are given."""
_FILES = ("vocabulary", "tags")


@dataclass(frozen=True)
class Onboarded:
    """Models of new clients, with scores on their own held-out rows.

    Attributes:
        models: One model per client, stacked.
        names: The clients.
        score: The score of these models.
        local: The score of the local baseline.
        guarantee: The guarantee of the run.
        notes: The run's caveats and tuning label.
        known: Clients that also took part in training; None if the run has no names.
        selection: The charged selection in the run's certificate, if any.
    """

    models: Tree
    names: list[str]
    score: Score
    local: Score
    guarantee: Guarantee
    notes: dict[str, Any]
    known: list[str] | None = None
    selection: dict[str, Any] | None = None


def choose(folder: Path, table: Mapping[str, Any]) -> DataConfig:
    """Return the data config of new clients: as in training, unless the table differs.

    Args:
        folder: The folder of a finished run.
        table: Where the rows are (`name`), and other keys of a plan's `data`.

    Raises:
        ConfigError: If the folder holds no run, or the table is invalid.
    """
    kept, facts = Plan.load(folder / "plan.toml").data, _facts(folder)
    given = dict(table)
    given.setdefault("standardise", kept.standardise)
    name = str(given.get("name", ""))
    if name in NAMES:
        return from_table(DataConfig, given, "data")
    source = {**to_table(kept.source), "memory_map": None, **(given.get("source") or {})}
    source.setdefault("task", facts.get("task"))
    if source["task"] == "multiclass":  # new clients may lack rows of some classes
        source.setdefault("classes", facts.get("outputs"))
    given["source"] = {key: value for key, value in source.items() if value is not None}
    choice = from_table(DataConfig, given, "data")
    if name.lower().endswith(TABLES) and not choice.source.text:
        columns = file_columns(choice.source, facts.get("columns") or ())
        choice = replace(choice, source=replace(choice.source, features=columns))
    return choice


def onboard(folder: Path, choice: DataConfig, out: Path | None = None) -> Onboarded:
    """Fit models of new clients from a finished run and their own rows.

    Args:
        folder: The folder of a finished run.
        choice: Their rows; see `choose`.
        out: Where to write the models.

    Raises:
        ConfigError: If the folder holds no finished run.
        ValueError: If the rows differ from the run's in kind, or in how they are read.
    """
    run_plan = Plan.load(folder / "plan.toml")
    shared, stated, result = _read(folder)
    guarantee = Guarantee.from_json(stated)
    _check_choice(folder, run_plan.data, choice)
    train, test = choice.split()
    _check_rows(folder, train, result)
    method, spec = run_plan.method, replace(train.spec, clients=guarantee.clients)
    _check_shared(method, spec, shared, folder)
    models = onboard_models(method, shared, spec, train, run_plan.simulation_seed)
    names = [str(name) for name in train.names]
    found = Onboarded(
        models=models,
        names=names,
        score=evaluate(method.model, lambda ids: take(models, torch.from_numpy(ids)), test),
        local=score_local(method, train, test),
        guarantee=guarantee,
        notes={key: result.get(key) for key in ("caveats", "tuning")},
        known=_known(folder, names),
        selection=stated.get("selection"),
    )
    if out is not None:
        write_models(out, found.models, found.names)
    return found


def _known(folder: Path, names: list[str]) -> list[str] | None:
    """Return the names of clients that took part in training; None if unknown."""
    federation = folder / "federation.toml"  # a deployment keeps no models here
    sites = read_toml(federation).get("sites", {}) if federation.exists() else {}
    trained = {str(name) for site in sites.values() for name in site.get("clients", ())}
    try:
        trained = trained or set(client_names(folder))
    except (OSError, ValueError):
        return None
    return [name for name in names if name in trained]


def _facts(folder: Path) -> dict[str, Any]:
    """Read the public facts of the training rows; runs of older versions do not have them."""
    try:
        return dict(json.loads((folder / "data.json").read_text(encoding="utf-8"))["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read(folder: Path) -> tuple[Tree, dict[str, Any], dict[str, Any]]:
    try:
        shared = read_shared(folder)
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        Guarantee.from_json(stated)  # raises here, so that the error names the run
        return shared, dict(stated), dict(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: no finished run ({error!r}); {how_to_resume(folder)}, or restore "
            "shared.npz and guarantee.json"
        ) from error


def _check_choice(folder: Path, kept: DataConfig, given: DataConfig) -> None:
    """Raise if rows are scaled or read differently than in training.

    A named data set has its own way of reading, which is not compared.
    """
    pairs = {"standardise": (kept.standardise, given.standardise)}
    if kept.name not in NAMES:
        for name in to_table(kept.source).keys() | to_table(given.source).keys():
            if name not in _MAY_DIFFER:
                pairs[f"source.{name}"] = (getattr(kept.source, name), getattr(given.source, name))
    for name in sorted(pairs):
        ours, theirs = pairs[name]
        if not _is_same(name.removeprefix("source."), ours, theirs):
            raise ValueError(
                f"data.{name}: {folder} was trained with {_short(ours)}, but the new clients' rows "
                f"would be read with {_short(theirs)}, which its models do not fit; leave it out "
                "to use the setting of the training"
            )


def _is_same(name: str, ours: Any, theirs: Any) -> bool:
    if name in _OPTIONAL and (not ours or not theirs):
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


def _short(value: Any) -> str:
    text = repr(to_table(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_rows(folder: Path, train: FederatedDataset, result: Mapping[str, Any]) -> None:
    """Raise if rows have another task, or other features or another order of features."""
    if train.spec.task != result.get("task", train.spec.task):
        raise ValueError(
            f"{folder} is a run on a {result['task']} task, but the new clients' rows are "
            f"{train.spec.task}: give rows of the same task (--task)"
        )
    ours, theirs = list(_facts(folder).get("columns") or ()), [str(one) for one in train.columns]
    if ours and theirs and ours != theirs and len(ours) == len(theirs):
        at = next(at for at, name in enumerate(ours) if name != theirs[at])
        raise ValueError(
            f"{folder}: feature {at} (from 0) of the training is {ours[at]!r}, that of the new "
            f"clients {theirs[at]!r}; give the same features in the same order (--features "
            f"{','.join(ours[:12])}{',...' if len(ours) > 12 else ''})"
        )


def _check_shared(method: Method, spec: Spec, shared: Tree, folder: Path) -> None:
    method.check(spec)
    expected, given = (
        {name: tuple(leaf.shape) for name, leaf in tree.items()}
        for tree in (method.init(spec, Rng.seeded(0)), shared)
    )
    if expected != given:
        raise ValueError(
            f"{folder}: its shared parameters have shapes {given}, but the new clients' rows need "
            f"{expected}; give rows with the features and classes of the training"
        )
    if (folder / "model.json").exists():
        check_model(folder, method.model, spec)
