"""Predict rows, each by its client's own model, from a run or an exported file.

Rows are read and scaled as in training. Predictions are for the owner of the rows; they are not
private.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.config import ConfigError
from coterie.core.files import explain_damage, how_to_resume
from coterie.core.rng import Rng
from coterie.core.suggest import counted
from coterie.core.tree import Tree, stack, take
from coterie.data.config import DAMAGED, DataConfig
from coterie.data.datasets import NAMES
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.frames import FRAME
from coterie.data.load import NOBODY, Unlabelled, load_unlabelled, written_as
from coterie.data.scaling import fill_by, scale_by
from coterie.data.tables import target_constants
from coterie.engine.models import client_model, client_names, stacked_models
from coterie.evaluation.predict import BLOCK, decide, outputs_by_block, std_by
from coterie.methods.base import Method, predictive_std, shared_leaves
from coterie.models import Model
from coterie.planning.plan import Plan
from coterie.serve.export import (
    ClientModel,
    ModelInfo,
    all_clients,
    places_of,
    public_folder,
    read_info,
    read_scaling,
    training_rows,
)

UnknownClients = Literal["shared", "refuse"]
_KEPT = "_kept"  # ends the name of a column that is kept beside one of predictions


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a file, sorted by client.

    Attributes:
        info: Public metadata of the models.
        rows: The rows, and the number of each in its file.
        outputs: Model outputs, (rows,) or (rows, outputs), in the units of training; NaN for a row
            that no model can predict.
        std: Standard deviations of the outputs, if they were asked for.
        unknown: Clients that the run does not know, predicted by the shared model.
        notes: What the owner of the rows should know, such as cells that were read as gaps.
    """

    info: ModelInfo
    rows: Unlabelled
    outputs: Tensor
    std: Tensor | None = None
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def table(self, keep: pa.Table | None = None, quantiles: Sequence[float] = ()) -> pa.Table:
        """Return one line per row, in the file's order: client, prediction, probabilities.

        Predictions are values in the target's own units, names of classes, or a 0 or 1 for each
        label; null for a row that no model can predict. The probability of a binary task is that of
        the last of its classes. Support vector machines have none. A positive decision value
        decides for that class, the largest one for its class. `keep` has columns of the file to
        copy; one whose name is taken gets "_kept" after it. `quantiles` of a regression are those
        of a normal distribution with the prediction and its standard deviation, which they need.
        """
        data, back = self.rows.data, np.argsort(self.rows.order, kind="stable")
        owner = np.repeat(np.arange(len(data)), data.counts)[back]
        names = np.array(["" if name == NOBODY else name for name in data.names], dtype=object)
        columns: dict[str, Any] = {
            "row": self.rows.order[back],
            "client": pa.array(names[owner].tolist(), pa.string()),
        }
        if self.unknown:
            shared = np.isin(np.array(data.names, dtype=object), np.array(self.unknown))[owner]
            columns["model"] = np.where(shared, "shared", "own")
        std = None if self.std is None else self.std[back]
        found = _columns(self.info, self.outputs[back], std, quantiles)
        kept: dict[str, Any] = {}
        lines = pa.table({}) if keep is None else keep.take(pa.array(self.rows.order[back]))
        for name in lines.column_names:
            if name == "client" == self.info.source.client:
                continue  # the table has it already
            kept[name if name not in columns | found else f"{name}{_KEPT}"] = lines[name]
        return pa.table(columns | kept | found)


def predict_run(
    folder: Path,
    given: Any,
    *,
    client: str | None = None,
    client_column: str | None = None,
    unknown_clients: UnknownClients = "shared",
    std: bool = False,
    trust: bool = False,
    memory: FederatedDataset | None = None,
) -> Predictions:
    """Predict rows of a run's clients by their own models.

    Args:
        folder: A finished run, or a folder of clients that were onboarded to one.
        given: A file of rows, a data frame, a dataset, or the name of one.
        client: Treat every row as this client's.
        client_column: The column that names clients, if it differs from the training's.
        unknown_clients: Use the shared model for clients that the run does not know, or refuse
            them. Where there is no shared model, their rows have no prediction.
        std: Whether to return standard deviations as well.
        trust: Import and run a module that the run's plan names.
        memory: All rows of the run, where they are in memory; where matrices of standard deviations
            are not kept, `std` needs them.
    """
    with explain_damage(folder):
        run_plan, info = read_info(folder, trust=trust)
        known = all_clients(folder)
        client = None if client is None else written_as(client, known)
        rows = _read(given, info, client, run_plan, column=client_column, known=known)
        unknown = tuple(name for name in rows.data.names if name not in set(known))
        if unknown and (unknown_clients == "refuse" or client is not None):
            raise ValueError(_unknown(folder, unknown, sorted(known)))
        data, kept = _prepared(folder, run_plan, info, _as_trained(rows.data, info))
        models = _models(folder, run_plan.method, data, unknown)
        outputs = model_outputs(info.model, models, data)
        lost = _lost(data, outputs)
        if unknown and lost.all():
            raise ValueError(_unknown(folder, unknown, sorted(known)))
        deviations = _std(folder, run_plan, data, kept, memory) if std else None
        notes = tuple(_notes(run_plan, data, unknown, lost, known))
        return Predictions(info, rows, outputs, deviations, unknown, (*rows.notes, *notes))


def predict_model(
    model: ClientModel,
    given: Any,
    *,
    all_rows: bool = False,
    client_column: str | None = None,
    std: bool = False,
) -> Predictions:
    """Predict rows of one client by its exported model; the arguments are those of `predict_run`.

    `all_rows` treats every row as this client's, regardless of the file's client column.
    """
    info, client = model.info, model.client
    if std and model.variance is None:
        raise ValueError(
            f"--std: the model of {client!r} holds no standard deviations: its method has none, or "
            "they need the training rows; give the run folder"
        )
    if all_rows or (isinstance(given, str) and given in NAMES):
        rows = _read(given, info, client, None, column=client_column)
    else:
        rows = _read(given, info, None, None, column=client_column, owner=client, known=[client])
        _check_owner(given, rows.data, client)
    data = _as_trained(rows.data, info)
    if model.fills is not None:
        data = fill_by(data, model.fills[None])
    if model.moments is not None:
        center, scale = model.moments
        data = scale_by(data, center[None], scale[None])
    data = info.expand(data)
    outputs = model_outputs(info.model, stack(model.params, 1), data)
    found = None
    if std and model.variance is not None:
        found = torch.from_numpy(std_by(data, model.variance[None]))
    lost = _gap_note(info.source.missing, int(_lost(data, outputs).sum()))
    return Predictions(info, rows, outputs, found, notes=(*rows.notes, *lost))


def program_rows(given: Any, model: ClientModel) -> Tensor:
    """Return rows as an exported torch program takes them, (rows, features) in the file's order.

    Tensors hold neither text nor dates: levels are 0/1 columns, dates four numbers, and gaps NaN.
    The program scales them and fills the gaps.
    """
    source = model.info.source
    raw = replace(source, ranges={}, center={}, scale={}, clip=None, unit_rows=False)
    if source.fills:
        raw = replace(raw, fill={}, missing="client-median")
    rows = _read(given, replace(model.info, source=raw), model.client, None, column=None)
    back = np.argsort(rows.order, kind="stable")
    return rows.data.features[torch.from_numpy(back)]


def _lost(data: FederatedDataset, outputs: Tensor) -> NDArray[np.bool_]:
    """Return which rows no model can predict."""
    lost: NDArray[np.bool_] = ~outputs.reshape(len(data.targets), -1).isfinite().all(dim=1).numpy()
    return lost


def _notes(
    run_plan: Plan,
    data: FederatedDataset,
    unknown: Sequence[str],
    lost: NDArray[np.bool_],
    known: Sequence[str],
) -> Iterator[str]:
    """Yield which rows have no prediction, and who was predicted by the shared model."""
    strange = np.isin(np.array(data.names, dtype=object), np.array(unknown, dtype=object))
    strange = strange[data.owners]
    yield from _gap_note(run_plan.data.source.missing, int((lost & ~strange).sum()))
    if not unknown:
        return
    how = "predicted by the shared model"
    if (lost & strange).any():
        rows = counted(int((lost & strange).sum()), "row")
        how = f"{rows} without a prediction: there is no model for them"
    if nobody := int(data.counts[data.names.index(NOBODY)]) if NOBODY in unknown else 0:
        yield f"{nobody} row{'s name' if nobody > 1 else ' names'} no client: {how}"
    if named := [name for name in unknown if name != NOBODY]:
        listed = ", ".join(named[:5]) + (", ..." if len(named) > 5 else "")
        written = {name.casefold(): name for name in known}
        twin = next(filter(None, (written.get(name.casefold()) for name in named)), None)
        yield (
            f"the run does not know {counted(len(named), 'client')} ({listed}), {how}; coterie "
            f"onboard makes their own models{f'; did you mean {twin!r}?' if twin else ''}"
        )


def _gap_note(missing: str, rows: int) -> Iterator[str]:
    if rows:
        yield (
            f"{counted(rows, 'row')} without a prediction: gaps, which models trained with "
            f'missing = "{missing}" do not fill; train with --missing client-median'
        )


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
    folder = public_folder(folder)
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
    given: Any,
    info: ModelInfo,
    client: str | None,
    run_plan: Plan | None,
    *,
    column: str | None,
    owner: str | None = None,
    known: Sequence[str] = (),
) -> Unlabelled:
    source = info.source if column is None else replace(info.source, client=column)
    where = given if isinstance(given, str) else FRAME
    if isinstance(given, FederatedDataset):
        rows, where = _of_client(given, client), given.title
    elif isinstance(given, str) and given in NAMES:
        rows = _read_named(given, client, run_plan)
    else:
        path = Path(given) if isinstance(given, str) else given
        rows = load_unlabelled(
            path, source, columns=info.columns, client=client, owner=owner, known=known
        )
    if rows.data.spec.shape != info.spec.shape:
        listed = ", ".join(info.columns[:12]) + (", ..." if len(info.columns) > 12 else "")
        raise DataError(
            f"{where}: rows of shape {rows.data.spec.shape}, expected {info.spec.shape}, as in "
            f"training{f' ({listed})' if listed else ''}; give the same features in the same order"
        )
    return rows


def _read_named(name: str, client: str | None, run_plan: Plan | None) -> Unlabelled:
    choice = DataConfig(name=name)
    if run_plan is not None and run_plan.data.name == name:
        choice = replace(run_plan.data, standardise="none", effects=None)
    return _of_client(choice.open(), client)


def _of_client(data: FederatedDataset, client: str | None) -> Unlabelled:
    """Return the rows of a dataset, or those of one client."""
    if client is not None and client not in data.names:
        raise DataError(f"{data.title} has no client {client!r}; give its rows")
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
        "the name, or onboard the client (coterie onboard)"
    )


def _prepared(
    folder: Path, run_plan: Plan, info: ModelInfo, data: FederatedDataset
) -> tuple[FederatedDataset, dict[str, NDArray[Any]]]:
    """Fill, scale and expand rows as in training; also return what the run keeps of each client."""
    kept = read_scaling(folder, run_plan, data.names, data.spec.features)
    if run_plan.data.source.missing == "client-median":
        data = fill_by(data, kept["fills"])
    if run_plan.data.standardise == "client":
        data = scale_by(data, kept["center"], kept["scale"])
    return info.expand(data), kept


def _places(names: Sequence[str], wanted: Sequence[str]) -> NDArray[np.int64]:
    index = {name: at for at, name in enumerate(names)}
    return np.array([index[name] for name in wanted], dtype=np.int64)


def _models(folder: Path, method: Method, data: FederatedDataset, unknown: Sequence[str]) -> Tree:
    """Return the model of each client of the rows, stacked in their order."""
    owners = places_of(folder)
    if len(data) == 1 and not unknown:
        name = data.names[0]
        return stack(client_model(folder, name, owners[name]), 1)
    parts = []
    for place in dict.fromkeys(owners.values()):
        names = [f"{place}/{name}" for name in client_names(folder, place)]
        parts.append((names, stacked_models(folder, place)))
    if unknown:
        owners |= dict.fromkeys(unknown, "unknown")
        names = [f"unknown/{name}" for name in unknown]
        parts.append((names, _shared_models(folder, method, data, unknown)))
    names = [name for known, _ in parts for name in known]
    whole = {leaf: torch.cat([tree[leaf] for _, tree in parts]) for leaf in parts[0][1]}
    wanted = [f"{owners[name]}/{name}" for name in data.names]
    return take(whole, torch.from_numpy(_places(names, wanted)))


def _shared_models(
    folder: Path, method: Method, data: FederatedDataset, unknown: Sequence[str]
) -> Tree:
    """Return the shared model for each unknown client; NaN if there is no complete one."""
    first = method.model.init(data.spec, Rng.seeded(0))
    if set(shared_leaves(method, data.spec)) != set(first):
        return stack(
            {name: torch.full_like(leaf, np.nan) for name, leaf in first.items()}, len(unknown)
        )
    clients = data.clients(_places(data.names, unknown))
    found = method.serving.shared_model(read_shared(folder), clients)
    return {
        name: leaf if leaf.dim() > first[name].dim() else stack({name: leaf}, len(clients))[name]
        for name, leaf in ((name, found[name]) for name in first)
    }


def _std(
    folder: Path,
    run_plan: Plan,
    data: FederatedDataset,
    kept: Mapping[str, NDArray[Any]],
    memory: FederatedDataset | None,
) -> Tensor:
    """Return standard deviations by the matrices that the run keeps, else by its training rows.

    A client that the run does not know has the prior.
    """
    method, shared = run_plan.method, read_shared(folder)
    if method.serving.uncertainty is None:
        raise ValueError(
            f"{method} has no uncertainty: run pfeb, or leave --std and --quantiles out"
        )
    owners = places_of(folder)
    strange = np.array([name not in owners for name in data.names])
    known = np.flatnonzero(~strange)
    form, own = method.serving.variance, kept.get("variance")
    kept_here = own is not None and bool(np.isfinite(own[known]).all())
    found = torch.empty(len(data.targets), *_width(data), dtype=torch.float64)
    try:
        if len(known):
            rows, places = data.only(known), np.arange(len(known))
            if form is not None and own is not None and kept_here:
                part = torch.from_numpy(std_by(rows, own[known]))
            else:
                train = training_rows(folder, run_plan, scaled=True, memory=memory)
                places = _trained(train, rows.names)
                part = model_std(method, shared, train, rows, places)
            found[torch.from_numpy(~strange[data.owners])] = part.double()
        if strange.any():
            rows = data.only(np.flatnonzero(strange))
            nobody = rows.where(np.zeros(len(rows.targets), dtype=bool))
            part = model_std(method, shared, nobody, rows, np.arange(len(rows)))
            found[torch.from_numpy(strange[data.owners])] = part
    except NotImplementedError as error:
        raise ValueError(f"--std: {error}") from error
    return found


def _trained(train: FederatedDataset, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the places of clients among those of training; raise ValueError for others."""
    if others := [name for name in names if name not in set(train.names)]:
        raise ValueError(
            f"client {others[0]!r}: the run has no uncertainty for clients without training rows; "
            "leave --std out, or these clients"
        )
    return _places(train.names, names)


def _columns(
    info: ModelInfo, outputs: Tensor, std: Tensor | None, quantiles: Sequence[float]
) -> dict[str, Any]:
    """Return the columns of predictions, decision values and standard deviations."""
    task, classes = info.spec.task, info.classes
    center, scale = target_constants(info.source, info.columns)
    known = outputs.reshape(len(outputs), -1).isfinite().all(dim=1).numpy()
    if task == "regression":
        columns = {"prediction": outputs * scale + center}
        columns |= {} if std is None else {"std": std * abs(scale)}
        for share in quantiles if std is not None else ():
            columns[f"quantile_{share:g}"] = (
                columns["prediction"] + NormalDist().inv_cdf(share) * columns["std"]
            )
        return {name: _nullable(values.numpy(), known) for name, values in columns.items()}
    decided = decide(task, outputs).numpy()
    if task == "multilabel":
        found = {f"prediction_{name}": decided[:, at] for at, name in enumerate(classes)}
    else:
        found = {"prediction": np.array(classes, dtype=object)[decided]}
    odds = None if not info.odds else torch.sigmoid(outputs)
    if odds is not None and task == "multiclass":
        odds = torch.softmax(outputs, dim=1)
    for title, values in (("probability", odds), ("decision", outputs), ("std", std)):
        if values is not None and task == "binary":
            found[title] = values.numpy()
        elif values is not None:
            found |= {f"{title}_{name}": values[:, at].numpy() for at, name in enumerate(classes)}
    return {name: _nullable(values, known) for name, values in found.items()}


def _nullable(values: NDArray[Any], known: NDArray[np.bool_]) -> pa.Array:
    """Return values as an Arrow array, null for rows without a prediction."""
    return pa.array(values, mask=~known)
