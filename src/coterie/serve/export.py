"""Export one client's model as a file for that client: safetensors, torch.export or ONNX.

The file holds the client's parameters, its own means and standard deviations if features were
standardised per client, and public metadata: task, features, classes, model, declared constants and
the guarantee of the run. It holds nothing of any other client. A model discloses what it learnt
from its client's rows, so give it to that client only.

The safetensors file has the parameters and metadata. The torch and ONNX programs map features,
(rows, features) or (rows, *shape) in the order of the file's columns, to the outputs of
`coterie predict`: values in the target's own units, or a decision value for each class.
"""

import copy
import hashlib
import importlib.util
import io
import json
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from coterie import __version__
from coterie.core.config import ConfigError, from_table, naming, refuse_code, to_table
from coterie.core.files import explain_damage, how_to_resume, refuse_special, write_atomically
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.config import DataConfig, Source
from coterie.data.effects import Design, Effects
from coterie.data.encoder import Encoded
from coterie.data.federated import TASKS, FederatedDataset, Spec
from coterie.data.scaling import LIMIT, Moments, client_moments
from coterie.data.tables import feature_constants, fill_constants, target_constants
from coterie.data.text_images import plan_tags, read_words
from coterie.engine.models import MODELS, client_model, client_names, client_scaling
from coterie.evaluation.holdout import FOLDER, hold_out
from coterie.methods.svm import Machines
from coterie.models import Model
from coterie.models.base import squeezed
from coterie.models.module import Networked, assembled
from coterie.planning.plan import Plan
from coterie.privacy.guarantee import Guarantee
from coterie.runs.folder import check_rows, facts_of
from coterie.runs.summary import promised

FORMAT = "coterie-client-model/1"
PUBLIC = "run"
"""The part of a folder of onboarded clients with the public files of the run."""
ONBOARDED = "onboarded.json"
"""The file of a run folder that lists the folders of clients that were onboarded afterwards."""
_CENTER, _SCALE, _FILLS, _LEAF = "scaling.center", "scaling.scale", "scaling.fills", "model."
_VARIANCE = "scaling.variance"
_PARSED = ("model", "source", "shape", "columns", "classes", "guarantee")  # metadata as JSON
_EXAMPLE_ROWS = 3  # rows that a program is traced with


@dataclass(frozen=True)
class ModelInfo:
    """Public metadata of a run's models."""

    model: Model  # the model class with its settings
    spec: Spec  # shape of a row, outputs and task; of one client, before effects
    source: Source  # how files are read; vocabularies in place of file names
    columns: tuple[str, ...] = ()  # names of the features, if they have names
    classes: tuple[str, ...] = ()  # names of the classes or labels; () for regression
    scaled: bool = False  # whether features are standardised per client
    odds: bool = True  # whether outputs are log-odds; those of support vector machines are not
    # The guarantee of the run, as in `coterie run --json`
    guarantee: Mapping[str, Any] = field(default_factory=dict)
    effects: Effects | None = None  # columns that are made of scaled rows

    @cached_property
    def design(self) -> Design | Encoded | None:
        """What makes the columns of the model, if effects were declared."""
        if self.effects is None:
            return None
        return self.effects.design_of(self.columns, self.spec.shape, self.source)

    @property
    def model_spec(self) -> Spec:
        """The spec of the rows that the model predicts."""
        return self.spec if self.design is None else self.design.spec(self.spec)

    def expand(self, data: FederatedDataset) -> FederatedDataset:
        """Return scaled rows with the columns of the model."""
        return data if self.design is None else self.design.expand(data)


@dataclass(frozen=True)
class ClientModel:
    """One client's model.

    `moments` are its means and standard deviations, `fills` its medians, `variance` the matrix of
    its standard deviations (`evaluation.predict.variances`).
    """

    client: str
    info: ModelInfo
    params: Tree
    moments: Moments | None = None
    fills: NDArray[Any] | None = None
    variance: NDArray[Any] | None = None


# --- from a run folder --------------------------------------------------------


def read_info(folder: Path, *, trust: bool = False) -> tuple[Plan, ModelInfo]:
    """Read the plan of a finished run, and the public metadata of its models.

    `trust` imports and runs a module that the plan names.
    """
    _check_folder(folder)
    folder = public_folder(folder)
    run_plan = Plan.load(folder / "plan.toml", trust=trust)
    # Runs of older versions have no facts of their rows.
    facts = read_facts(folder) or facts_of(
        _split(folder, replace(run_plan.data, standardise="none", effects=None))[0]
    )
    spec = Spec(tuple(facts["shape"]), facts["outputs"], facts["task"], 1)
    guarantee, selection, result = read_guarantee(folder)
    model: Any = run_plan.method.model
    info = ModelInfo(
        # A file of initial parameters is not needed, and others do not have it.
        model=model if getattr(model, "start", None) is None else replace(model, start=None),
        spec=spec,
        source=_without_files(run_plan.data.source),
        columns=tuple(facts["columns"]),
        classes=_classes(run_plan.data.source, spec, signed=bool(facts.get("signed"))),
        scaled=run_plan.data.standardise == "client",
        odds=not isinstance(run_plan.method, Machines),
        guarantee={
            **promised(guarantee, selection),
            **{key: result.get(key) for key in ("tuning", "caveats")},
        },
        effects=run_plan.data.effects,
    )
    return run_plan, info


def read_clients(folder: Path, names: Sequence[str], *, trust: bool = False) -> list[ClientModel]:
    """Read the models of some clients of a finished run; `trust` as in `read_info`."""
    with explain_damage(folder):
        run_plan, info = read_info(folder, trust=trust)
        owners = places_of(folder)
        params = [client_model(folder, name, owners.get(name, MODELS)) for name in names]
        kept = read_scaling(folder, run_plan, names, info.spec.features)
    return [
        ClientModel(
            name,
            info,
            params[at],
            (kept["center"][at], kept["scale"][at]) if info.scaled else None,
            kept["fills"][at] if "fills" in kept else None,
            _known(kept["variance"][at]) if "variance" in kept else None,
        )
        for at, name in enumerate(names)
    ]


def _known(values: NDArray[Any]) -> NDArray[Any] | None:
    return values if np.isfinite(values).all() else None


def all_clients(folder: Path) -> list[str]:
    """Return the names of all clients of a finished run, held-out and onboarded clients last."""
    return list(places_of(folder))


def places_of(folder: Path) -> dict[str, str]:
    """Return the place of each client's model, by name: a subfolder, or another folder.

    Clients that took part in training come first, then those held out, then those onboarded; of a
    client with several models the last one counts.
    """
    _check_folder(folder)
    with explain_damage(folder):
        found = dict[str, str]()
        for place in _places(folder):
            found |= dict.fromkeys(client_names(folder, place), place)
        return found


def _places(folder: Path) -> list[str]:
    if public_folder(folder) != folder:
        return [""]
    held = [FOLDER] if (folder / FOLDER / "clients.json").exists() else []
    return [MODELS, *held, *read_onboarded(folder)]


def read_onboarded(folder: Path) -> list[str]:
    """Return the folders of clients that were onboarded to a run, those that still exist."""
    path = folder / ONBOARDED
    if not path.exists():
        return []
    refuse_special(path)
    try:
        listed = [str(place) for place in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error}); restore it, or remove it") from error
    return [place for place in listed if (folder / place / "clients.json").exists()]


def public_folder(folder: Path) -> Path:
    """Return where the public files of a run are, given its folder or that of onboarded clients."""
    inner = folder / PUBLIC
    return (
        inner if (inner / "plan.toml").exists() and (folder / "clients.json").exists() else folder
    )


def training_rows(
    folder: Path, run_plan: Plan, *, scaled: bool, memory: FederatedDataset | None = None
) -> FederatedDataset:
    """Return the training rows of a run again, including those of held-out clients.

    `scaled` standardises them, if the run does. `memory` are all rows, if they are in memory; else
    they are read. Raises ValueError if rows are missing or changed.
    """
    train, _ = _split(folder, run_plan.data, memory)
    kept = train
    if run_plan.newcomers is not None:
        kept, _ = hold_out(train, run_plan.newcomers, run_plan.data.split_seed)
    if (folder / "data.json").exists():
        check_rows(folder, kept)
    if scaled or (run_plan.data.standardise == "none" and run_plan.data.effects is None):
        return train
    return _split(folder, replace(run_plan.data, standardise="none", effects=None), memory)[0]


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder; check the path")
    refuse_special(folder)
    if (folder / "members.json").exists():
        names = ", ".join(sorted(path.parent.name for path in folder.glob("*/result.json")))
        raise ConfigError(
            f"{folder} holds several runs; name one of them: {names or 'none is done'}"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the public facts of a run's rows; {} if it has none (runs of older versions)."""
    folder = public_folder(folder)
    try:
        return dict(json.loads((folder / "data.json").read_text(encoding="utf-8"))["facts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def read_guarantee(folder: Path) -> tuple[Guarantee, dict[str, Any] | None, dict[str, Any]]:
    """Return the guarantee of a finished run, its charged selection, and its result."""
    folder = public_folder(folder)
    try:
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        guarantee, selection = Guarantee.from_json(stated), stated.get("selection")
        promised(guarantee, selection)  # raises here, so that the error names the run
        return guarantee, selection, dict(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: no finished run ({_said(error)}); {how_to_resume(folder)}, or restore "
            "guarantee.json and result.json"
        ) from error


def _said(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"no {Path(error.filename).name}"
    return repr(error)


def read_scaling(
    folder: Path, run_plan: Plan, names: Sequence[str], width: int
) -> dict[str, NDArray[Any]]:
    """Return what prepares the rows of clients, as `ClientArrays.scaling`, in the order of `names`.

    Clients that the run does not know have medians of 0, the declared center, and NaN for all else.
    Moments that are not kept (those of large sparse rows) are computed from the training rows.
    """
    choice, found = run_plan.data, dict[str, NDArray[Any]]()
    owners = places_of(folder)
    for place in dict.fromkeys(owners.values()):
        at = [row for row, name in enumerate(names) if owners.get(name) == place]
        kept = client_scaling(folder, [names[row] for row in at], place) if at else {}
        for name, values in kept.items():
            empty = np.full((len(names), *values.shape[1:]), 0.0 if name == "fills" else np.nan)
            found.setdefault(name, empty)[at] = values
    if choice.source.missing == "client-median":
        found.setdefault("fills", np.zeros((len(names), width)))
    if choice.standardise == "client" and "center" not in found:
        found |= _moments(
            folder, run_plan, [name if name in owners else "" for name in names], width
        )
    return found


def _moments(
    folder: Path, run_plan: Plan, names: Sequence[str], width: int
) -> dict[str, NDArray[Any]]:
    """Return moments computed from the training rows; NaN for clients without any."""
    found = {name: np.full((len(names), width), np.nan) for name in ("center", "scale")}
    if any(names):
        rows = training_rows(folder, run_plan, scaled=False)
        index = {name: at for at, name in enumerate(rows.names)}
        at = [row for row, name in enumerate(names) if name in index]
        own = client_moments(rows.only([index[names[row]] for row in at]))
        for name, values in zip(("center", "scale"), own, strict=True):
            found[name][at] = values
    return found


def _split(
    folder: Path, choice: DataConfig, memory: FederatedDataset | None = None
) -> tuple[FederatedDataset, FederatedDataset]:
    try:
        return choice.split(memory)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: its training rows are needed for each client's means and standard "
            f"deviations, or its uncertainty, and cannot be read: {error}; restore {choice.name}, "
            "or work in a folder from which its path is valid"
        ) from error


def _without_files(source: Source) -> Source:
    """Return the reading options without names of files, which others do not have."""
    words: Any = source.vocabulary
    if source.text:
        kind = source.tokens or "words"
        words = read_words(words, source.vocabulary_size, "vocabulary", kind)
    return replace(source, memory_map=None, tags=(), vocabulary=words)


def _classes(source: Source, spec: Spec, *, signed: bool) -> tuple[str, ...]:
    """Return the declared names of the classes, or their numbers."""
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


# --- safetensors --------------------------------------------------------------


def save_client(path: Path, model: ClientModel) -> None:
    """Write one client's model as safetensors."""
    tensors = {f"{_LEAF}{name}": leaf.contiguous() for name, leaf in model.params.items()}
    if model.moments is not None:
        center, scale = (torch.from_numpy(np.ascontiguousarray(part)) for part in model.moments)
        tensors |= {_CENTER: center, _SCALE: scale}
    if model.fills is not None:
        tensors[_FILLS] = torch.from_numpy(np.ascontiguousarray(model.fills))
    if model.variance is not None:
        tensors[_VARIANCE] = torch.from_numpy(np.ascontiguousarray(model.variance))
    write_atomically(path, save(tensors, metadata=metadata(model)))


def metadata(model: ClientModel) -> dict[str, str]:
    """Return the public metadata of an exported file, as text."""
    info = model.info
    return {
        "format": FORMAT,
        "coterie": __version__,
        "client": model.client,
        "task": info.spec.task,
        "outputs": str(info.spec.outputs),
        "shape": json.dumps(list(info.spec.shape)),
        "columns": json.dumps(list(info.columns)),
        "classes": json.dumps(list(info.classes)),
        "model": json.dumps(to_table(info.model)),
        "source": json.dumps(to_table(info.source)),
        "scaled": "client" if info.scaled else "none",
        "scores": "log-odds" if info.odds else "margins",
        "leaves": json.dumps(list(model.params)),
        "epsilon": str(info.guarantee.get("epsilon")),
        "view": str(info.guarantee.get("view")),
        "delta": str(info.guarantee.get("delta")),
        "guarantee": json.dumps(dict(info.guarantee), allow_nan=False),
        **({} if info.effects is None else {"effects": json.dumps(to_table(info.effects))}),
    }


def load_client(path: str | Path, *, trust: bool = False) -> ClientModel:
    """Read an exported safetensors model; `trust` imports and runs a module that it names.

    Raises ValueError if it is another kind of file, is damaged, or names code without `trust`.
    """
    path = Path(path)
    refuse_special(path)
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file; check the path") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a safetensors file ({error}); export it again") from error
    if text.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format {text.get('format')!r}, expected {FORMAT!r}: give a file that "
            "`coterie export` wrote"
        )
    with naming(path):
        try:
            info = _parse_info(path, text, trust)
            params = {name: tensors[f"{_LEAF}{name}"] for name in json.loads(text["leaves"])}
            moments = (tensors[_CENTER].numpy(), tensors[_SCALE].numpy()) if info.scaled else None
            medians = info.source.missing == "client-median"
            fills = tensors[_FILLS].numpy() if medians else None
            variance = tensors[_VARIANCE].numpy() if _VARIANCE in tensors else None
            model = ClientModel(text["client"], info, params, moments, fills, variance)
            _check_client(model)
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise ValueError(f"damaged ({error!r}); export it again") from error
    return model


def _parse_info(path: Path, text: Mapping[str, str], trust: bool) -> ModelInfo:
    table = {key: json.loads(text[key]) for key in _PARSED}
    effects = json.loads(text["effects"]) if "effects" in text else None
    if not trust:
        refuse_code({"model": table["model"], "effects": effects}, path)
    spec = Spec(tuple(table["shape"]), int(text["outputs"]), text["task"], 1)  # type: ignore[arg-type]
    return ModelInfo(
        model=from_table(Model, table["model"], "model"),  # type: ignore[type-abstract]
        spec=spec,
        source=from_table(Source, table["source"], "source"),
        columns=tuple(table["columns"]),
        classes=tuple(table["classes"]),
        scaled=text.get("scaled", "") == "client",
        odds=text.get("scores", "") != "margins",
        guarantee=dict(table["guarantee"]),
        effects=None if effects is None else from_table(Effects, effects, "effects"),
    )


def _check_client(model: ClientModel) -> None:
    """Raise ValueError if the parts of an exported file do not fit one another."""
    info, spec = model.info, model.info.spec
    width, made = math.prod(spec.shape), info.model_spec.features
    labels = {"regression": 0, "binary": 2}.get(spec.task, spec.outputs)
    single = spec.task in ("regression", "binary")
    own = () if model.moments is None else model.moments
    own = own if model.fills is None else (*own, model.fills)
    each = () if spec.outputs == 1 else (spec.outputs,)
    fits = {
        "task": spec.task in TASKS and (spec.outputs == 1 if single else spec.outputs >= 1),
        "shape": all(type(side) is int and side > 0 for side in spec.shape),
        "columns": all(isinstance(name, str) for name in info.columns)
        and len(info.columns) in (0, width),
        "classes": all(isinstance(name, str) for name in info.classes)
        and len(info.classes) == labels,
        "scaling": all(part.shape == (width,) and part.dtype.kind == "f" for part in own),
        "variance": model.variance is None or model.variance.shape == (*each, made + 1, made + 1),
    }
    wrong = [name for name, fit in fits.items() if not fit]
    wanted = {} if wrong else info.model.init(info.model_spec, Rng.seeded(0))
    if not wrong and {name: leaf.shape for name, leaf in model.params.items()} != {
        name: leaf.shape for name, leaf in wanted.items()
    }:
        wrong = ["parameters"]
    if wrong or not all(leaf.is_floating_point() for leaf in model.params.values()):
        raise ValueError(
            f"damaged: its {', '.join(wrong or ['parameters'])} do not fit its other metadata; "
            "export it again"
        )


def file_name(client: str, suffix: str, *, capitals: bool = True) -> str:
    """Return a file name for a client; no client's name leads out of the folder.

    >>> file_name("North/12", ".safetensors"), file_name("..", ".onnx")
    ('North%2F12.safetensors', '%2E%2E.onnx')
    """
    safe = "".join(
        quote(one, safe=" ") if capitals or one not in ascii_uppercase else f"%{ord(one):02X}"
        for one in client
    )
    safe = safe.replace(".", "%2E") if not safe.strip(".") else safe
    if len(safe.encode()) + len(suffix) > 200:  # the hash distinguishes truncated names
        safe = f"{safe[:120]}-{hashlib.sha256(client.encode()).hexdigest()[:16]}"
    return f"{safe}{suffix}"


def file_names(clients: Sequence[str], suffix: str) -> list[str]:
    """Return a file name for each client; all differ on file systems that ignore case.

    >>> file_names(["Ward 1", "ward 1", "Ward 2"], ".onnx")
    ['%57ard 1.onnx', 'ward 1.onnx', 'Ward 2.onnx']
    """
    plain = [file_name(client, suffix) for client in clients]
    alike = Counter(name.lower() for name in plain)
    return [
        file_name(client, suffix, capitals=alike[name.lower()] == 1)
        for client, name in zip(clients, plain, strict=True)
    ]


# --- torch.export and ONNX ----------------------------------------------------


class Predictor(nn.Module):
    """One client's model from raw rows to outputs, as a torch module."""

    def __init__(self, model: ClientModel) -> None:
        super().__init__()
        info, width = model.info, model.info.spec.features
        self._shape, self._model = info.spec.shape, info.model
        self._clip, self._unit_rows = info.source.clip, info.source.unit_rows
        self._target = target_constants(info.source, info.columns)
        centers, scales = feature_constants(info.source, info.columns, width)
        self._declared = bool((centers != 0).any() or (scales != 1).any())
        self._own, self._design = model.moments is not None, info.design
        fills = model.fills
        if info.source.missing == "constant":
            fills = fill_constants(info.source, info.columns, width)
        self._fills = fills is not None
        self.register_buffer(
            "fills", torch.from_numpy(np.array(0.0 if fills is None else fills, dtype=np.float64))
        )
        own = (np.zeros(width), np.ones(width)) if model.moments is None else model.moments
        for name, numbers in zip(
            ("center", "scale", "own_center", "own_scale"), (centers, scales, *own), strict=True
        ):
            self.register_buffer(name, torch.from_numpy(np.array(numbers, dtype=np.float64)))
        self._network: nn.Module | None = None
        if isinstance(info.model, Networked):
            self._network = assembled(info.model, info.model_spec, model.params)
        else:
            self._leaves = {name: f"leaf{at}" for at, name in enumerate(model.params)}
            for name, place in self._leaves.items():
                self.register_buffer(place, model.params[name].clone())

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs for raw rows."""
        x = self._scale(rows.flatten(1))
        made = x.reshape(-1, *self._shape) if self._design is None else self._design(x).float()
        outputs = self._outputs(made)
        center, scale = self._target
        # No multiplication by 1: programs stay as short as the model.
        return outputs if (center, scale) == (0.0, 1.0) else outputs * scale + center

    def _scale(self, rows: Tensor) -> Tensor:
        # In float64, as files are read: float32 would lose digits of values far from zero.
        x: Any = rows
        if self._declared:
            x = (x.double() - self.center) / self.scale
        if self._clip is not None:
            x = x.clamp(-float(self._clip), float(self._clip))
        if self._fills:
            x = torch.where(torch.isnan(x), self.get_buffer("fills").to(x.dtype), x)
        x = x.float()
        if self._unit_rows:
            norms = x.double().square().sum(dim=1, keepdim=True).sqrt()
            x = (x.double() / torch.where(norms > 0, norms, 1.0)).float()
        if self._own:
            x = ((x.double() - self.own_center) / self.own_scale).clamp(-LIMIT, LIMIT).float()
        found: Tensor = x
        return found

    def _outputs(self, x: Tensor) -> Tensor:
        if self._network is not None:
            outputs: Tensor = self._network(x)
            return squeezed(outputs) if outputs.dim() > 1 else outputs
        params = {name: self.get_buffer(place) for name, place in self._leaves.items()}
        return self._model.apply(params, x)


def save_torch(path: Path, model: ClientModel) -> None:
    """Write a program for `torch.export.load(path).module()(rows)`."""
    buffer, text = io.BytesIO(), json.dumps(metadata(model))
    with _quiet():
        torch.export.save(_program(model), buffer, extra_files={"coterie.json": text})
    write_atomically(path, buffer.getvalue())


def save_onnx(path: Path, model: ClientModel) -> None:
    """Write an ONNX graph with the output "outputs", and classes' names and probabilities.

    Its inputs are the columns of a table that is prepared (`raw_columns`), else one, "rows".
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"format onnx needs {' and '.join(missing)}: install coterie[onnx], or choose "
            "--format torch or safetensors"
        )
    from coterie.serve.raw_columns import OPSETS, append_results, has_columns, prepend_columns

    info, more = model.info, metadata(model)
    prepared = has_columns(info.source, info.columns)
    with _quiet():
        found: Any = torch.onnx.export(
            _program(model, torch.float64 if prepared else torch.float32),
            input_names=["rows"],
            output_names=["outputs"],
            opset_version=OPSETS[""],
            dynamo=True,
        )
        made = found.model_proto
    if prepared:
        inputs = prepend_columns(made, info.source, info.columns)
        more["inputs"] = json.dumps(inputs.described())
        made.opset_import.add(domain="ai.onnx.ml", version=OPSETS["ai.onnx.ml"])
    append_results(made, info.spec.task, info.classes, odds=info.odds)
    for key, value in more.items():
        made.metadata_props.add(key=key, value=value)
    write_atomically(path, made.SerializeToString())


def _program(model: ClientModel, kind: torch.dtype = torch.float32) -> Any:
    """Return the program of a model for any number of rows of a type."""
    predictor = copy.deepcopy(Predictor(model)).eval()
    example = torch.zeros(_EXAMPLE_ROWS, *model.info.spec.shape, dtype=kind)
    rows = torch.export.Dim("rows", min=1)
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(predictor, (example,), dynamic_shapes=({0: rows},))
    except Exception as error:  # tracing a user's module may raise anything
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{type(model.info.model).__name__} cannot be traced as one program ({reason}); choose "
            "--format safetensors, and load its parameters into the module yourself"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages of torch's exporters: stdout is for results."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
