"""What models say of rows in a file: a line a row, in the file's order.

Each row is answered by its client's own model, from a run or from one exported file, after the same
scaling that training had. For whoever holds the rows; not private.
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

from coterie.choice import DataChoice
from coterie.data.catalogue import NAMES
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.scaling import scale_by, standardise_clients
from coterie.data.unlabelled import Unlabelled, load_unlabelled, target_constants
from coterie.evaluation.holdout import FOLDER
from coterie.evaluation.predict import BLOCK, decide, outputs_by_block
from coterie.exports import ClientModel, Kind, all_clients, read_kind, training_rows
from coterie.finished_models import client_model, client_names, client_scaling, stacked_models
from coterie.methods.base import Method
from coterie.rng import Rng
from coterie.run_plan import RunPlan
from coterie.tree import Tree, stack, take

Newcomers = Literal["refuse", "shared"]
Array = NDArray[Any]


@dataclass(frozen=True)
class Answers:
    """Answers to rows of a file, sorted by client as the rows are.

    Attributes:
        kind: What the models are, and what comes out of them.
        rows: The rows, and the number of each in its file.
        outputs: What models say, (rows,) or (rows, outputs), in the units of training.
        deviations: Standard deviations of the same, where they were asked for.
        strangers: Clients that the run does not know, answered by the shared model.
    """

    kind: Kind
    rows: Unlabelled
    outputs: Tensor
    deviations: Tensor | None = None
    strangers: tuple[str, ...] = ()

    def table(self) -> pa.Table:
        """Return a line a row, in the file's order: client, prediction, decision values.

        Predictions are values in the target's own units, names of classes, or a 0 or 1 for each
        label; a decision value decides for class 1 where it is positive, or for the class where it
        is largest.
        """
        data, back = self.rows.data, np.argsort(self.rows.order, kind="stable")
        owner = np.repeat(np.arange(len(data)), data.counts)[back]
        names = np.array(data.names, dtype=object)
        columns: dict[str, Any] = {
            "row": self.rows.order[back],
            "client": pa.array(names[owner].tolist(), pa.string()),
        }
        if self.strangers:
            known = np.isin(names, np.array(self.strangers, dtype=object), invert=True)[owner]
            columns["model"] = np.where(known, "own", "shared")
        columns |= _told(self.kind, self.outputs[back], self.deviations, back)
        return pa.table(columns)


def predict_run(
    folder: Path,
    given: str,
    *,
    client: str | None = None,
    client_column: str | None = None,
    newcomers: Newcomers = "refuse",
    deviations: bool = False,
) -> Answers:
    """Predict rows of a run's clients by their own models.

    Args:
        folder: A finished run.
        given: A file of rows, or a name of the catalogue.
        client: Take every row to be this client's.
        client_column: The column that names clients, where it is not the training's.
        newcomers: What to do with clients that the run does not know: refuse them, or take the
            shared model.
        deviations: Whether to give standard deviations as well.

    Raises:
        ValueError: If rows or clients are not those of the run, or it cannot give what is asked.
    """
    run_plan, kind = read_kind(folder)
    if client_column is not None:
        kind = replace(kind, source=replace(kind.source, client=client_column))
    rows = _read(given, kind, client, run_plan)
    known = set(all_clients(folder))
    strangers = tuple(name for name in rows.data.names if name not in known)
    if strangers and (newcomers == "refuse" or client is not None):
        raise ValueError(_unknown(folder, strangers, sorted(known)))
    data = _as_trained(rows.data, kind)
    if kind.scaled:
        data = _scaled(folder, run_plan, data, strangers)
    models = _models(folder, run_plan.method, data, strangers)
    outputs = _outputs(kind, models, data)
    wide = _deviations(folder, run_plan, data, strangers) if deviations else None
    return Answers(kind, rows, outputs, wide, strangers)


def predict_model(
    model: ClientModel, given: str, *, every: bool = False, client_column: str | None = None
) -> Answers:
    """Predict rows of one client by its exported model.

    Args:
        model: The model.
        given: A file of rows, or a name of the catalogue.
        every: Take every row to be this client's, whatever the file says.
        client_column: The column that names clients, where it is not the training's.

    Raises:
        ValueError: If the rows are not of the kind that the model was made for, or the file says
            that they are another client's.
    """
    kind, client = model.kind, model.client
    if client_column is not None:
        kind = replace(kind, source=replace(kind.source, client=client_column))
    if every or given in NAMES:
        rows = _read(given, kind, client, None)
    else:
        rows = _read(given, kind, None, None, owner=client)
        _check_owner(given, rows.data, client)
    data = _as_trained(rows.data, model.kind)
    if model.moments is not None:
        center, scale = model.moments
        data = scale_by(data, center[None], scale[None])
    return Answers(model.kind, rows, _outputs(model.kind, stack(model.params, 1), data))


def _check_owner(given: str, data: FederatedDataset, client: str) -> None:
    others = [name for name in data.names if name != client]
    if others:
        listed = ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{given} has rows of {listed}, and the model is that of {client!r}: give that "
            f"client's rows alone, or say that all rows are its own with --client {client!r}"
        )


def _read(
    given: str,
    kind: Kind,
    client: str | None,
    run_plan: RunPlan | None,
    *,
    owner: str | None = None,
) -> Unlabelled:
    if given in NAMES:
        choice = DataChoice(name=given)
        if run_plan is not None and run_plan.data.name == given:
            choice = replace(run_plan.data, standardise="none")
        data = choice.open()
        if client is not None and client not in data.names:
            raise DataError(f"{given} has no client {client!r}; give a file with its rows")
        if client is not None:
            data = data.only([list(data.names).index(client)])
        rows = Unlabelled(data, np.arange(len(data.targets)))
    else:
        rows = load_unlabelled(
            Path(given), kind.source, columns=kind.columns, client=client, owner=owner
        )
    if rows.data.spec.shape != kind.spec.shape:
        raise DataError(
            f"{given}: rows of shape {rows.data.spec.shape}, expected {kind.spec.shape}, as in "
            f"training{_listed(kind.columns)}; give the same features in the same order"
        )
    return rows


def _as_trained(data: FederatedDataset, kind: Kind) -> FederatedDataset:
    """Return rows the task of the models; targets, which nothing looks at, are zeros."""
    width = (kind.spec.outputs,) if kind.spec.task == "multilabel" else ()
    number = torch.int64 if kind.spec.task == "multiclass" else torch.float32
    zeros = torch.zeros(len(data.targets), *width, dtype=number)
    return replace(data, spec=replace(kind.spec, clients=len(data)), targets=zeros)


def _listed(columns: Sequence[str], most: int = 12) -> str:
    if not columns:
        return ""
    more = ", ..." if len(columns) > most else ""
    return f" ({', '.join(columns[:most])}{more})"


def _unknown(folder: Path, strangers: Sequence[str], known: Sequence[str]) -> str:
    first = strangers[0]
    near = difflib.get_close_matches(first, known, n=3, cutoff=0.5)
    told = f"nearest are {', '.join(map(repr, near))}" if near else f"one of them is {known[0]!r}"
    more = f" (and {len(strangers) - 1} more clients)" if len(strangers) > 1 else ""
    return (
        f"client {first!r}{more}: not among the {len(known)} clients of {folder}, {told}; correct "
        "the name, let the client join (coterie join), or take the shared model for those who are "
        "not known (--newcomers shared)"
    )


def _scaled(
    folder: Path, run_plan: RunPlan, data: FederatedDataset, strangers: Sequence[str]
) -> FederatedDataset:
    if strangers:
        raise ValueError(
            f"client {strangers[0]!r}: rows of this run are scaled by each client's own training "
            "rows, and a newcomer has none; let it join with rows of its own (coterie join)"
        )
    kept = client_scaling(folder, data.names)
    if kept is not None:
        return scale_by(data, *kept)
    train = training_rows(folder, run_plan, scaled=False)
    ids = _places(list(train.names), data.names)
    own = replace(train.only(ids), names=data.names)
    scaled = standardise_clients(own, data)[1]
    assert scaled is not None
    return scaled


def _places(names: Sequence[str], wanted: Sequence[str]) -> NDArray[np.int64]:
    index = {name: at for at, name in enumerate(names)}
    return np.array([index[name] for name in wanted], dtype=np.int64)


def _models(folder: Path, method: Method, data: FederatedDataset, strangers: Sequence[str]) -> Tree:
    """Return the model of every client of the rows, stacked in their order."""
    if len(data) == 1 and not strangers:
        return stack(_one(folder, data.names[0]), 1)
    parts = [(list(client_names(folder)), stacked_models(folder))]
    if (folder / FOLDER / "clients.json").exists():
        parts.append((client_names(folder, FOLDER), stacked_models(folder, FOLDER)))
    if strangers:
        parts.append((list(strangers), _shared(folder, method, data, strangers)))
    names = [name for known, _ in parts for name in known]
    whole = {leaf: torch.cat([tree[leaf] for _, tree in parts]) for leaf in parts[0][1]}
    return take(whole, torch.from_numpy(_places(names, data.names)))


def _one(folder: Path, name: str) -> Tree:
    return client_model(folder, name, "models" if name in client_names(folder) else FOLDER)


def _shared(folder: Path, method: Method, data: FederatedDataset, strangers: Sequence[str]) -> Tree:
    """Return the shared model for each stranger.

    Raises:
        ValueError: If the method shares no whole model.
    """
    first = method.model.init(data.spec, Rng.seeded(0))
    if set(method.shared_leaves(data.spec)) != set(first):
        raise ValueError(
            f"--newcomers shared: {method.title} has no shared model that is whole; let newcomers "
            "join with rows of their own (coterie join)"
        )
    clients = data.clients(_places(list(data.names), strangers))
    found = method.shared_model(_shared_tree(folder), clients)
    return {
        name: leaf if leaf.dim() > first[name].dim() else stack({name: leaf}, len(clients))[name]
        for name, leaf in ((name, found[name]) for name in first)
    }


def _shared_tree(folder: Path) -> Tree:
    with np.load(folder / "shared.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _outputs(kind: Kind, models: Tree, data: FederatedDataset) -> Tensor:
    """Return what the clients' models say of all rows, sorted by client."""
    width = () if kind.spec.task in ("regression", "binary") else (kind.spec.outputs,)
    found = torch.empty(len(data.targets), *width)
    for clients, outputs in outputs_by_block(
        kind.model, lambda ids: take(models, torch.from_numpy(ids)), data
    ):
        found[clients.index[clients.mask]] = outputs[clients.mask]
    return found


def _deviations(
    folder: Path, run_plan: RunPlan, data: FederatedDataset, strangers: Sequence[str]
) -> Tensor:
    method = run_plan.method
    if strangers:
        raise ValueError(
            f"client {strangers[0]!r}: the run has no uncertainty of clients that it does not "
            "know; leave --std or --newcomers out"
        )
    train = training_rows(folder, run_plan, scaled=True)
    places, shared = _places(list(train.names), data.names), _shared_tree(folder)
    width = () if data.spec.task in ("regression", "binary") else (data.spec.outputs,)
    found = torch.empty(len(data.targets), *width)
    for rows in data.blocks(np.flatnonzero(data.counts > 0), BLOCK):
        clients = train.clients(places[rows.ids.numpy()])
        try:
            wide = method.uncertainty(shared, clients, rows)
        except NotImplementedError as error:
            raise ValueError(
                f"--std: {method.title} gives models without their uncertainty; run pfeb, or leave "
                "--std out"
            ) from error
        found[rows.index[rows.mask]] = wide[rows.mask].to(found.dtype)
    return found


def _told(kind: Kind, outputs: Tensor, deviations: Tensor | None, back: Any) -> dict[str, Any]:
    """Return the columns that say what is predicted, how surely, and how uncertain it is."""
    center, scale = target_constants(kind.source, kind.columns)
    spread = None if deviations is None else deviations[back]
    if kind.spec.task == "regression":
        told = {"prediction": (outputs * scale + center).numpy()}
        return told if spread is None else {**told, "std": (spread * abs(scale)).numpy()}
    answers = decide(kind.spec.task, outputs).numpy()
    if kind.spec.task == "multilabel":
        columns = {f"prediction_{name}": answers[:, at] for at, name in enumerate(kind.classes)}
    else:
        columns = {"prediction": pa.array([kind.classes[at] for at in answers], pa.string())}
    if kind.spec.task == "binary":
        columns["decision"] = outputs.numpy()
        return columns if spread is None else {**columns, "std": spread.numpy()}
    columns |= {f"decision_{name}": outputs[:, at].numpy() for at, name in enumerate(kind.classes)}
    if spread is not None:
        columns |= {f"std_{name}": spread[:, at].numpy() for at, name in enumerate(kind.classes)}
    return columns
