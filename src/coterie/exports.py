"""One client's model, to be handed to that client: its own numbers and public facts, nothing else.

The file is safetensors: the model's parameters, and, where features were scaled by each client's
own training rows, that client's means (`scaling.center`) and deviations (`scaling.scale`). Its
metadata say how rows are read and what comes out: task, features, classes, the model, the declared
constants, and the guarantee of the run as others see it. Who gives the file away gives away what
the model learnt of its rows.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from coterie import __version__
from coterie.config import ConfigError, from_table, to_table
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.scaling import Moments, client_moments
from coterie.data.source import Source
from coterie.data.text import plan_tags, read_words
from coterie.evaluation.holdout import FOLDER, hold_out
from coterie.finished_models import client_model, client_names, client_scaling
from coterie.full_disks import how_to_finish
from coterie.models import Model
from coterie.privacy.accounting import Guarantee
from coterie.privacy.files import write_atomically
from coterie.privacy.words import OTHERS, OUTSIDER
from coterie.recognition import facts_of, recognise_rows
from coterie.run_plan import RunPlan, load_plan
from coterie.summary import promised
from coterie.tree import Tree

FORMAT = "coterie-client-model/1"
_CENTER, _SCALE, _LEAF = "scaling.center", "scaling.scale", "model."


@dataclass(frozen=True)
class Kind:
    """What is public of the models of a run: how rows are read, and what comes out.

    Attributes:
        model: The network.
        spec: Shape of a row, outputs and task; of one client.
        source: How files are read, with words in place of the names of files.
        columns: The features by name, where they have names.
        classes: Names of the classes or labels; () for regression.
        scaled: Whether rows are scaled by each client's own training rows.
        guarantee: What the run guarantees, as `coterie run --json` says it.
    """

    model: Model
    spec: Spec
    source: Source
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    scaled: bool = False
    guarantee: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientModel:
    """One client's model; `moments` are its own means and deviations, where rows are scaled."""

    client: str
    kind: Kind
    params: Tree
    moments: Moments | None = None


def read_kind(folder: Path) -> tuple[RunPlan, Kind]:
    """Read what is public of a finished run's models.

    Raises:
        ConfigError: If the folder holds no finished run.
    """
    _check_folder(folder)
    run_plan = load_plan(folder / "plan.toml")
    facts = _facts(folder, run_plan)
    spec = Spec(tuple(facts["shape"]), facts["outputs"], facts["task"], 1)
    source, columns = run_plan.data.source, tuple(facts["columns"])
    kind = Kind(
        model=_without_start(run_plan.method.model),
        spec=spec,
        source=_portable(source),
        columns=columns,
        classes=_classes(source, spec, signed=bool(facts.get("signed"))),
        scaled=run_plan.data.standardise == "client",
        guarantee=_promise(folder),
    )
    return run_plan, kind


def read_clients(folder: Path, names: Sequence[str]) -> list[ClientModel]:
    """Read the models of some clients of a finished run, each ready to be handed over.

    Raises:
        ValueError: If there is no such client, or a model needs its client's training rows and
            these are gone.
    """
    run_plan, kind = read_kind(folder)
    params = [client_model(folder, name, _place(folder, name)) for name in names]
    if not kind.scaled:
        return [ClientModel(*pair) for pair in zip(names, [kind] * len(names), params, strict=True)]
    center, scale = _moments(folder, run_plan, names)
    return [
        ClientModel(name, kind, leaves, (center[at], scale[at]))
        for at, (name, leaves) in enumerate(zip(names, params, strict=True))
    ]


def all_clients(folder: Path) -> list[str]:
    """Name all clients of a finished run, those who joined afterwards last."""
    _check_folder(folder)
    known = client_names(folder)
    held = client_names(folder, FOLDER) if (folder / FOLDER / "clients.json").exists() else []
    return [*known, *held]


def training_rows(folder: Path, run_plan: RunPlan, *, scaled: bool) -> FederatedDataset:
    """Read the training rows of a run again, of all its clients and of those who joined.

    Args:
        folder: The run folder.
        run_plan: Its plan, which names the data.
        scaled: Whether to scale them by each client's own rows, where the run does.

    Raises:
        ValueError: If they are gone, or are others than the run was trained with.
    """
    train, _ = _split(folder, run_plan.data)
    kept = train
    if run_plan.newcomers is not None:
        kept, _ = hold_out(train, run_plan.newcomers, run_plan.data.split_seed)
    if (folder / "data.json").exists():
        recognise_rows(folder, kept)
    if scaled or run_plan.data.standardise == "none":
        return train
    return _split(folder, replace(run_plan.data, standardise="none"))[0]


def save_client(path: Path, model: ClientModel) -> None:
    """Write one client's model as safetensors."""
    tensors = {f"{_LEAF}{name}": leaf.contiguous() for name, leaf in model.params.items()}
    if model.moments is not None:
        center, scale = (torch.from_numpy(np.ascontiguousarray(part)) for part in model.moments)
        tensors |= {_CENTER: center, _SCALE: scale}
    write_atomically(path, save(tensors, metadata=metadata(model)))


def metadata(model: ClientModel) -> dict[str, str]:
    """Return what a file says of a client's model: public facts alone, as text."""
    kind = model.kind
    promise = kind.guarantee
    epsilon, view = _risked(promise)
    return {
        "format": FORMAT,
        "coterie": __version__,
        "client": model.client,
        "task": kind.spec.task,
        "outputs": str(kind.spec.outputs),
        "shape": json.dumps(list(kind.spec.shape)),
        "columns": json.dumps(list(kind.columns)),
        "classes": json.dumps(list(kind.classes)),
        "model": json.dumps(to_table(kind.model)),
        "source": json.dumps(to_table(kind.source)),
        "scaled": "client" if kind.scaled else "none",
        "leaves": json.dumps(list(model.params)),
        "epsilon": str(epsilon),
        "view": view,
        "delta": str(promise.get("delta")),
        "guarantee": json.dumps(dict(promise), allow_nan=False),
    }


def _risked(promise: Mapping[str, Any]) -> tuple[Any, str]:
    """Return epsilon as a client reads it, and whose view it is: never an outsider's smaller one."""
    epsilon, view = promise.get("epsilon"), str(promise.get("view"))
    if view == OUTSIDER:
        return promise["views"]["other_clients"], OTHERS
    return epsilon, view


def load_client(path: Path, *, trust: bool = False) -> ClientModel:
    """Read an exported model.

    Args:
        path: A file that `coterie export` wrote.
        trust: Whether a module that the file names may be imported, and so run.

    Raises:
        ValueError: If it is no such file, is damaged, or names code that is not trusted.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file; check the path") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: no safetensors file ({error}); export it again") from error
    if told.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format {told.get('format')!r}, expected {FORMAT!r}: give a file that "
            "`coterie export` wrote"
        )
    try:
        kind = _read_kind(path, told, trust)
        params = {name: tensors[f"{_LEAF}{name}"] for name in json.loads(told["leaves"])}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: damaged ({error!r}); export it again") from error
    moments = None
    if kind.scaled:
        moments = tensors[_CENTER].numpy(), tensors[_SCALE].numpy()
    return ClientModel(told["client"], kind, params, moments)


def file_name(client: str, suffix: str, *, capitals: bool = True) -> str:
    """Name the file of a client: any name is taken, none leads out of the folder.

    >>> file_name("North/12", ".safetensors"), file_name("..", ".onnx")
    ('North%2F12.safetensors', '%2E%2E.onnx')
    """
    safe = "".join(
        quote(one, safe=" ") if capitals or one not in ascii_uppercase else f"%{ord(one):02X}"
        for one in client
    )
    safe = safe.replace(".", "%2E") if not safe.strip(".") else safe
    if len(safe.encode()) + len(suffix) > 200:  # the hash keeps cut names apart
        safe = f"{safe[:120]}-{hashlib.sha256(client.encode()).hexdigest()[:16]}"
    return f"{safe}{suffix}"


def file_names(clients: Sequence[str], suffix: str) -> list[str]:
    """Name a file for each client; no two differ in capitals alone, which some disks do not tell.

    >>> file_names(["Ward 1", "ward 1", "Ward 2"], ".onnx")
    ['%57ard 1.onnx', 'ward 1.onnx', 'Ward 2.onnx']
    """
    plain = [file_name(client, suffix) for client in clients]
    alike = Counter(name.lower() for name in plain)
    return [
        file_name(client, suffix, capitals=alike[name.lower()] == 1)
        for client, name in zip(clients, plain, strict=True)
    ]


def _read_kind(path: Path, told: Mapping[str, str], trust: bool) -> Kind:
    table = json.loads(told["model"])
    if table.get("kind") == "module" and not trust:
        raise ValueError(
            f"{path}: its model is made by {table.get('make')!r}, which is code of its own: "
            "--trust imports and runs it; do so only if the file is from someone you trust"
        )
    spec = Spec(tuple(json.loads(told["shape"])), int(told["outputs"]), told["task"], 1)  # type: ignore[arg-type]
    return Kind(
        model=from_table(Model, table, "model"),  # type: ignore[type-abstract]
        spec=spec,
        source=from_table(Source, json.loads(told["source"]), "source"),
        columns=tuple(json.loads(told["columns"])),
        classes=tuple(json.loads(told["classes"])),
        scaled=told.get("scaled", "") == "client",
        guarantee=json.loads(told["guarantee"]),
    )


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; check the path")
    if (folder / "members.json").exists():
        names = ", ".join(sorted(path.parent.name for path in folder.glob("*/result.json")))
        raise ConfigError(
            f"{folder} holds several runs; name one of them: {names or 'none is done'}"
        )


def _facts(folder: Path, run_plan: RunPlan) -> dict[str, Any]:
    """Read what is public of the rows; runs of older versions did not keep it."""
    try:
        kept = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        return dict(kept["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return facts_of(_split(folder, replace(run_plan.data, standardise="none"))[0])


def _promise(folder: Path) -> dict[str, Any]:
    try:
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        told = promised(Guarantee.from_json(stated), stated.get("selection"))
        return {**told, **{key: result.get(key) for key in ("tuning", "caveats")}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: no finished run ({error!r}); {how_to_finish(folder)}, or restore "
            "guarantee.json and result.json"
        ) from error


def _moments(folder: Path, run_plan: RunPlan, names: Sequence[str]) -> Moments:
    """Return some clients' means and deviations: as they were kept, or of the training rows."""
    kept = client_scaling(folder, names)
    if kept is not None:
        return kept
    rows = training_rows(folder, run_plan, scaled=False)
    index = {name: at for at, name in enumerate(rows.names)}
    return client_moments(rows.only([index[name] for name in names]))


def _place(folder: Path, name: str) -> str:
    held = (folder / FOLDER / "clients.json").exists() and name in client_names(folder, FOLDER)
    return FOLDER if held else "models"


def _split(folder: Path, choice: Any) -> tuple[FederatedDataset, FederatedDataset]:
    try:
        rows: tuple[FederatedDataset, FederatedDataset] = choice.split()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: the rows that it was trained with are needed (each client's own means and "
            f"deviations, or its uncertainty, follow from them), and cannot be read: {error}; "
            f"restore {choice.name}, or go where its path leads to it"
        ) from error
    return rows


def _portable(source: Source) -> Source:
    """Return the options of reading without names of files, which others do not have."""
    if not source.text:
        return replace(source, memory_map=None, tags=())
    words = read_words(
        source.vocabulary, source.vocabulary_size, "vocabulary", source.tokens or "words"
    )
    return replace(source, memory_map=None, tags=(), vocabulary=words)


def _without_start(model: Model) -> Model:
    """Drop the file that a model was started from: what it has learnt is in its parameters."""
    started = getattr(model, "start", None)
    return replace(model, start=None) if started is not None else model  # type: ignore[type-var]


def _classes(source: Source, spec: Spec, *, signed: bool) -> tuple[str, ...]:
    """Name the classes as the data's owner does; by number where nobody gave names."""
    if spec.task == "regression":
        return ()
    named: tuple[str, ...] = source.classes if isinstance(source.classes, tuple) else ()
    if source.tags:
        named = tuple(plan_tags(source).index)
    if source.positives:
        which = " or ".join(source.positives)
        named = (f"not {which}", which)
    elif spec.task == "multilabel" and len(source.targets) == spec.outputs:
        named = source.targets
    elif signed:
        named = ("-1", "1")
    count = 2 if spec.task == "binary" else spec.outputs
    return named if len(named) == count else tuple(str(at) for at in range(count))
