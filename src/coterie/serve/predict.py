"""Predict the rows of a file, each by its client's own model, from a run or an exported file.

Rows are read and scaled as in training. Predictions are for the owner of the rows; they are not
private.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.config import ConfigError
from coterie.core.files import explain_damage, how_to_resume
from coterie.core.rng import Rng
from coterie.core.tree import Tree, stack, take
from coterie.data.config import DAMAGED, DataConfig
from coterie.data.datasets import NAMES
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.load import Unlabelled, load_unlabelled
from coterie.data.scaling import fill_by, scale_by
from coterie.data.tables import target_constants
from coterie.engine.models import client_model, client_names, stacked_models
from coterie.evaluation.holdout import FOLDER
from coterie.evaluation.predict import BLOCK, decide, outputs_by_block
from coterie.methods.base import Method, predictive_std, shared_leaves
from coterie.models import Model
from coterie.plan.plan import Plan
from coterie.serve.export import (
    ClientModel,
    ModelInfo,
    all_clients,
    held_out,
    read_info,
    read_scaling,
    training_rows,
)

UnknownClients = Literal["refuse", "shared"]


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a file, sorted by client."""

    info: ModelInfo  # public metadata of the models
    rows: Unlabelled  # the rows, and the number of each in its file
    outputs: Tensor  # model outputs, (rows,) or (rows, outputs), in the units of training
    std: Tensor | None = None  # standard deviations of the outputs, if they were asked for
    # Clients that the run does not know, predicted by the shared model
    unknown: tuple[str, ...] = ()

    def table(self, keep: pa.Table | None = None) -> pa.Table:
        """Return one line per row, in the file's order: client, prediction, probabilities.

        Predictions are values in the target's own units, names of classes, or a 0 or 1 for each
        label. Support vector machines have no probabilities. A positive decision value decides for
        class 1, the largest one for its class. `keep` has columns of the file to copy.
        """
        data, back = self.rows.data, np.argsort(self.rows.order, kind="stable")
        owner = np.repeat(np.arange(len(data)), data.counts)[back]
        names = np.array(data.names, dtype=object)
        columns: dict[str, Any] = {
            "row": self.rows.order[back],
            "client": pa.array(names[owner].tolist(), pa.string()),
        }
        # Rows that were left out for a gap have no prediction.
        lines = None if keep is None else keep.take(pa.array(self.rows.order[back]))
        kept = {} if lines is None else {name: lines[name] for name in lines.column_names}
        if self.info.source.client == "client":
            kept.pop("client", None)  # the table has it already
        if self.unknown:
            known = np.isin(names, np.array(self.unknown, dtype=object), invert=True)[owner]
            columns["model"] = np.where(known, "own", "shared")
        std = None if self.std is None else self.std[back]
        found = _columns(self.info, self.outputs[back], std)
        if taken := sorted(kept.keys() & (columns | found).keys()):
            raise ValueError(f"--keep {taken[0]}: predictions have a column of this name already")
        return pa.table(columns | kept | found)


def predict_run(
    folder: Path,
    given: str,
    *,
    client: str | None = None,
    client_column: str | None = None,
    unknown_clients: UnknownClients = "refuse",
    std: bool = False,
    trust: bool = False,
) -> Predictions:
    """Predict rows of a run's clients by their own models.

    Args:
        folder: A finished run.
        given: A file of rows, or the name of a dataset.
        client: Treat every row as this client's.
        client_column: The column that names clients, if it differs from the training's.
        unknown_clients: Refuse clients that the run does not know, or use the shared model.
        std: Whether to return standard deviations as well.
        trust: Import and run a module that the run's plan names.
    """
    with explain_damage(folder):
        run_plan, info = read_info(folder, trust=trust)
        rows = _read(given, info, client, run_plan, column=client_column)
        known = set(all_clients(folder))
        unknown = tuple(name for name in rows.data.names if name not in known)
        if unknown and (unknown_clients == "refuse" or client is not None):
            raise ValueError(_unknown(folder, unknown, sorted(known)))
        data = _prepared(folder, run_plan, _as_trained(rows.data, info), unknown)
        models = _models(folder, run_plan.method, data, unknown)
        outputs = model_outputs(info.model, models, data)
        deviations = _std(folder, run_plan, data, unknown) if std else None
        return Predictions(info, rows, outputs, deviations, unknown)


def predict_model(
    model: ClientModel, given: str, *, all_rows: bool = False, client_column: str | None = None
) -> Predictions:
    """Predict rows of one client by its exported model; the arguments are those of `predict_run`.

    `all_rows` treats every row as this client's, regardless of the file's client column.
    """
    info, client = model.info, model.client
    if all_rows or given in NAMES:
        rows = _read(given, info, client, None, column=client_column)
    else:
        rows = _read(given, info, None, None, column=client_column, owner=client)
        _check_owner(given, rows.data, client)
    data = _as_trained(rows.data, info)
    if model.fills is not None:
        data = fill_by(data, model.fills[None])
    if model.moments is not None:
        center, scale = model.moments
        data = scale_by(data, center[None], scale[None])
    outputs = model_outputs(info.model, stack(model.params, 1), data)
    return Predictions(info, rows, outputs)


def model_outputs(model: Model, models: Tree, data: FederatedDataset) -> Tensor:
    """Return the outputs of the clients' own models, stacked, for all rows, sorted by client."""
    found = torch.empty(len(data.targets), *_width(data))
    for clients, outputs in outputs_by_block(
        model, lambda ids: take(models, torch.from_numpy(ids)), data
    ):
        found[clients.index[clients.mask]] = outputs[clients.mask].cpu()
    return found


def model_std(
    method: Method,
    shared: Tree,
    train: FederatedDataset,
    data: FederatedDataset,
    places: NDArray[np.int64],
) -> Tensor:
    """Return the standard deviations of all rows, sorted by client.

    `places` are the numbers in `train` of the clients of `data`. Raises NotImplementedError if the
    method has no uncertainty.
    """
    found = torch.empty(len(data.targets), *_width(data), dtype=torch.float64)
    for rows in data.blocks(np.flatnonzero(data.counts > 0), BLOCK):
        clients = train.clients(places[rows.ids.numpy()])
        # Rows of a file number its clients otherwise than training does.
        std = predictive_std(method, shared, clients, replace(rows, ids=clients.ids))
        found[rows.index[rows.mask]] = std[rows.mask].cpu().double()
    return found


def _width(data: FederatedDataset) -> tuple[int, ...]:
    return () if data.spec.task in ("regression", "binary") else (data.spec.outputs,)


def read_shared(folder: Path) -> Tree:
    """Read the shared parameters of a finished run."""
    try:
        with np.load(folder / "shared.npz", allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (*DAMAGED, KeyError) as error:
        why = f"{folder}: no finished run ({error!r}); {how_to_resume(folder)}"
        raise ConfigError(f"{why}, or restore shared.npz") from error


def _check_owner(given: str, data: FederatedDataset, client: str) -> None:
    others = [name for name in data.names if name != client]
    if others:
        listed = ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{given} has rows of {listed}, and this is the model of {client!r}: give only that "
            f"client's rows, or treat all rows as its own with --client {client!r}"
        )


def _read(
    given: str,
    info: ModelInfo,
    client: str | None,
    run_plan: Plan | None,
    *,
    column: str | None,
    owner: str | None = None,
) -> Unlabelled:
    source = info.source if column is None else replace(info.source, client=column)
    if given in NAMES:
        rows = _read_named(given, client, run_plan)
    else:
        rows = load_unlabelled(
            Path(given), source, columns=info.columns, client=client, owner=owner
        )
    if rows.data.spec.shape != info.spec.shape:
        listed = ", ".join(info.columns[:12]) + (", ..." if len(info.columns) > 12 else "")
        raise DataError(
            f"{given}: rows of shape {rows.data.spec.shape}, expected {info.spec.shape}, as in "
            f"training{f' ({listed})' if listed else ''}; give the same features in the same order"
        )
    return rows


def _read_named(name: str, client: str | None, run_plan: Plan | None) -> Unlabelled:
    choice = DataConfig(name=name)
    if run_plan is not None and run_plan.data.name == name:
        choice = replace(run_plan.data, standardise="none")
    data = choice.open()
    if client is not None and client not in data.names:
        raise DataError(f"{name} has no client {client!r}; give a file with its rows")
    if client is not None:
        data = data.only([list(data.names).index(client)])
    return Unlabelled(data, np.arange(len(data.targets)))


def _as_trained(data: FederatedDataset, info: ModelInfo) -> FederatedDataset:
    """Return rows with the task of the models; targets are zeros and never read."""
    width = (info.spec.outputs,) if info.spec.task == "multilabel" else ()
    number = torch.int64 if info.spec.task == "multiclass" else torch.float32
    zeros = torch.zeros(len(data.targets), *width, dtype=number)
    return replace(data, spec=replace(info.spec, clients=len(data)), targets=zeros)


def _unknown(folder: Path, unknown: Sequence[str], known: Sequence[str]) -> str:
    first = unknown[0]
    near = difflib.get_close_matches(first, known, n=3, cutoff=0.5)
    text = f"nearest are {', '.join(map(repr, near))}" if near else f"one of them is {known[0]!r}"
    more = f" (and {len(unknown) - 1} more clients)" if len(unknown) > 1 else ""
    return (
        f"client {first!r}{more}: not among the {len(known)} clients of {folder}, {text}; correct "
        "the name, onboard the client (coterie onboard), or use the shared model for unknown "
        "clients (--unknown-clients shared)"
    )


def _prepared(
    folder: Path, run_plan: Plan, data: FederatedDataset, unknown: Sequence[str]
) -> FederatedDataset:
    """Fill gaps and scale rows as in training, by what the run keeps of each client."""
    scaled = run_plan.data.standardise == "client"
    medians = run_plan.data.source.missing == "client-median"
    if not scaled and not medians:
        return data
    if unknown and scaled:
        raise ValueError(
            f"client {unknown[0]!r}: this run standardises rows by each client's own training "
            "rows, and this client has none; onboard it with its own rows (coterie onboard)"
        )
    kept = read_scaling(folder, run_plan, data.names, data.spec.features)
    data = fill_by(data, kept["fills"]) if medians else data
    return scale_by(data, kept["center"], kept["scale"]) if scaled else data


def _places(names: Sequence[str], wanted: Sequence[str]) -> NDArray[np.int64]:
    index = {name: at for at, name in enumerate(names)}
    return np.array([index[name] for name in wanted], dtype=np.int64)


def _models(folder: Path, method: Method, data: FederatedDataset, unknown: Sequence[str]) -> Tree:
    """Return the model of each client of the rows, stacked in their order."""
    if len(data) == 1 and not unknown:
        name = data.names[0]
        place = "models" if name in client_names(folder) else FOLDER
        return stack(client_model(folder, name, place), 1)
    parts = [(client_names(folder), stacked_models(folder))]
    if held := held_out(folder):
        parts.append((held, stacked_models(folder, FOLDER)))
    if unknown:
        parts.append((list(unknown), _shared_models(folder, method, data, unknown)))
    names = [name for known, _ in parts for name in known]
    whole = {leaf: torch.cat([tree[leaf] for _, tree in parts]) for leaf in parts[0][1]}
    return take(whole, torch.from_numpy(_places(names, data.names)))


def _shared_models(
    folder: Path, method: Method, data: FederatedDataset, unknown: Sequence[str]
) -> Tree:
    """Return the shared model for each unknown client; raise ValueError if there is none."""
    first = method.model.init(data.spec, Rng.seeded(0))
    if set(shared_leaves(method, data.spec)) != set(first):
        raise ValueError(
            f"--unknown-clients shared: {method} has no complete shared model; onboard these "
            "clients with their own rows (coterie onboard)"
        )
    clients = data.clients(_places(data.names, unknown))
    found = method.serving.shared_model(read_shared(folder), clients)
    return {
        name: leaf if leaf.dim() > first[name].dim() else stack({name: leaf}, len(clients))[name]
        for name, leaf in ((name, found[name]) for name in first)
    }


def _std(folder: Path, run_plan: Plan, data: FederatedDataset, unknown: Sequence[str]) -> Tensor:
    if unknown:
        raise ValueError(
            f"client {unknown[0]!r}: the run has no uncertainty for unknown clients; leave --std "
            "or --unknown-clients out"
        )
    train = training_rows(folder, run_plan, scaled=True)
    places, shared = _places(train.names, data.names), read_shared(folder)
    try:
        return model_std(run_plan.method, shared, train, data, places).float()
    except NotImplementedError as error:
        raise ValueError(
            f"--std: {run_plan.method} has no uncertainty; run pfeb, or leave --std out"
        ) from error


def _columns(info: ModelInfo, outputs: Tensor, std: Tensor | None) -> dict[str, Any]:
    """Return the columns of predictions, decision values and standard deviations."""
    task, classes = info.spec.task, info.classes
    center, scale = target_constants(info.source, info.columns)
    if task == "regression":
        found = {"prediction": (outputs * scale + center).numpy()}
        return found if std is None else {**found, "std": (std * abs(scale)).numpy()}
    decided = decide(task, outputs).numpy()
    if task == "multilabel":
        columns = {f"prediction_{name}": decided[:, at] for at, name in enumerate(classes)}
    else:
        columns = {"prediction": pa.array([classes[at] for at in decided], pa.string())}
    odds = None if not info.odds else torch.sigmoid(outputs)
    if odds is not None and task == "multiclass":
        odds = torch.softmax(outputs, dim=1)
    for title, values in (("probability", odds), ("decision", outputs), ("std", std)):
        if values is not None and task == "binary":
            columns[title] = values.numpy()
        elif values is not None:
            columns |= {f"{title}_{name}": values[:, at].numpy() for at, name in enumerate(classes)}
    return columns
