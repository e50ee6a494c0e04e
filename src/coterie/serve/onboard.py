"""Onboard clients after training: fit each new client's model from the shared parameters.

New clients release nothing, so onboarding costs no privacy. The shared parameters are public under
the guarantee of the run. That guarantee, and not epsilon 0, holds for a client that took part in
training and is onboarded again.

Rows must be read and scaled as in training: `choose` takes that from the run's plan, and `onboard`
refuses rows that are read differently. The folder with the new models also holds the public files
of the run, so it is enough to predict from; and the run folder lists it, so that predictions from
the run folder know the new clients too.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from coterie.core.config import from_table, naming, read_toml, to_table
from coterie.core.files import explain_damage, refuse_special, write_atomically
from coterie.core.rng import Rng
from coterie.core.tree import Tree, take
from coterie.data.config import DataConfig
from coterie.data.datasets import NAMES
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.load import file_columns, load_few
from coterie.data.tables import TABLES
from coterie.engine.models import client_names, write_models
from coterie.engine.simulate import onboard as onboard_models
from coterie.evaluation.baselines import score_local
from coterie.evaluation.metrics import Score
from coterie.evaluation.predict import variances
from coterie.evaluation.score import evaluate
from coterie.methods.base import Method
from coterie.planning.plan import Plan
from coterie.privacy.guarantee import Guarantee
from coterie.runs.folder import check_model, columns_read
from coterie.serve.export import (
    ONBOARDED,
    PUBLIC,
    public_folder,
    read_facts,
    read_guarantee,
    read_onboarded,
)
from coterie.serve.predict import read_shared

_MAY_DIFFER = ("client", "target", "split", "splits", "missing", "memory_map", "images")
"""Settings that may differ from training: names of columns, and paths."""
_OPTIONAL = ("task", "classes", "features", "levels")
"""Settings that a plan may leave to the file; compared if both are given."""
_FILES = ("vocabulary", "tags")


@dataclass(frozen=True)
class Onboarded:
    """Models of new clients, with scores on their own held-out rows."""

    models: Tree  # one model per client, stacked
    names: list[str]  # the clients
    score: Score  # the score of these models
    local: Score  # the score of the local baseline
    guarantee: Guarantee  # the guarantee of the run
    notes: dict[str, Any]  # the run's caveats and tuning label
    # Clients that also took part in training; None if the run has no names
    known: list[str] | None = None
    # The charged selection in the run's certificate, if any
    selection: dict[str, Any] | None = None
    read: tuple[str, ...] = ()  # on cells that were taken for gaps


def choose(folder: Path, table: Mapping[str, Any]) -> DataConfig:
    """Return the data config of new clients: as in training, unless the table differs.

    The table says where the rows are (`name`), and may have other keys of a plan's `data`.
    """
    path = public_folder(folder) / "plan.toml"
    with naming(path):
        kept = from_table(DataConfig, read_toml(path).get("data", {}), "data")
    facts = read_facts(folder)
    given = dict(table)
    given.setdefault("standardise", kept.standardise)
    if kept.effects is not None:
        given.setdefault("effects", to_table(kept.effects))
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


def onboard(
    folder: Path, choice: DataConfig, out: Path | None = None, *, trust: bool = False
) -> Onboarded:
    """Fit models of new clients from a finished run and their own rows; write them to `out`.

    `trust` imports and runs a module that the run's plan names. Raises ValueError if it names one
    without `trust`, or if rows differ from the run's in kind, or in how they are read (`choose`).
    """
    with explain_damage(folder):
        refuse_special(folder)
        folder = public_folder(folder)
        run_plan = Plan.load(folder / "plan.toml", trust=trust)
        guarantee, selection, result = read_guarantee(folder)
        shared = read_shared(folder)
        _check_choice(folder, run_plan.data, choice)
        data, notes = None, tuple[str, ...]()
        if choice.name not in NAMES:
            data, notes = load_few(Path(choice.name), choice.source)
            data = data if choice.clients is None else data.first(choice.clients)
        train, test = choice.split(data)
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
            selection=selection,
            read=notes,
        )
        if out is not None:
            kept = {**train.scaling, **variances(method, shared, train)}
            write_models(out, found.models, found.names, kept)
            _write_public(out / PUBLIC, folder, result)
            _register(folder, out)
        return found


def _write_public(place: Path, folder: Path, result: Mapping[str, Any]) -> None:
    """Write the public files of a run; nothing of its clients."""
    place.mkdir(exist_ok=True)
    for name in ("guarantee.json", "shared.npz", "plan.toml"):
        write_atomically(place / name, (folder / name).read_bytes())
    facts = {"facts": read_facts(folder)}
    stated = {key: result.get(key) for key in ("task", "tuning", "caveats")}
    for name, found in (("data.json", facts), ("result.json", stated)):
        write_atomically(place / name, json.dumps(found).encode())


def _register(folder: Path, out: Path) -> None:
    """List a folder of onboarded clients in the run folder, if that can be written."""
    place, home = out.resolve(), folder.resolve()
    inside = place.is_relative_to(home)
    named = str(place.relative_to(home) if inside else place)
    listed = [one for one in read_onboarded(folder) if one != named]
    with suppress(OSError):
        write_atomically(folder / ONBOARDED, json.dumps([*listed, named], indent=2).encode())


def new_place(folder: Path) -> Path:
    """Return a new subfolder of a run for onboarded clients."""
    numbers = chain([""], (f"-{number}" for number in count(2)))
    return next(one for n in numbers if not (one := folder / f"onboarded{n}").exists())


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


def _check_choice(folder: Path, kept: DataConfig, given: DataConfig) -> None:
    """Raise if rows are scaled or read differently than in training.

    A named dataset has its own way of reading, which is not compared.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(kept, name), getattr(given, name)) for name in ("standardise", "effects")
    }
    if kept.name not in NAMES:
        for name in to_table(kept.source).keys() | to_table(given.source).keys():
            if name not in _MAY_DIFFER:
                own = "positives" if name == "positive" else name
                pairs[f"source.{name}"] = (getattr(kept.source, own), getattr(given.source, own))
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
    return bool(to_table(ours) == to_table(theirs))  # lists for tuples, at any depth


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
    ours = list(read_facts(folder).get("columns") or ())
    theirs = [str(one) for one in columns_read(train)]
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
