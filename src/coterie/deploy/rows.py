"""A site's rows: the data hook that its owner may write, and the dataset made of its result.

The hook is a file with a function `rows(config)`, in the app (`rows.py`) or where the site's
`--node-config 'hook="..."'` points. It returns {client name: (X, y)} for the site's clients, or a
`FederatedDataset`. The rows are placed in a dataset shaped like the whole federation, in which
clients of other sites have no rows. A client therefore has the same id, the same split and the same
random stream as in a simulation of the same plan.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.datasets import NAMES
from coterie.data.federated import DataError, FederatedDataset, Spec, offsets_of
from coterie.data.scaling import scaling_hint
from coterie.data.tables import UNDECLARED_COLUMNS
from coterie.deploy.federation import Agreement, Federation, load_agreement

_SHOWN = 12


def load_rows(
    agreement: Agreement, site: str, app: Path, config: Mapping[str, Any]
) -> tuple[FederatedDataset, FederatedDataset]:
    """Return a site's training and test rows."""
    hook = Path(str(config.get("hook", app / "rows.py")))
    found = _call(hook, {**config, "app": str(app), "site": site})
    return agreement.plan.data.split(place_rows(found, agreement.federation, site, str(hook)))


def row_hints(agreement: Agreement, site: str, train: FederatedDataset) -> tuple[str, ...]:
    """Return hints for the owner of a site's rows; for the site only."""
    own = train.only(agreement.federation.client_ids[site])
    scaled = scaling_hint(replace(own, title=train.title))
    method = agreement.plan.method
    return (*([] if scaled is None else [scaled]), *method.notes(data=own).data)


def read_rows(config: Mapping[str, Any]) -> FederatedDataset:
    """Return a site's rows from `config["data"]`, read as the plan's [data.source] describes.

    `config` is the `--node-config` of the site (site, data), with `app`, the app folder.
    """
    agreement = load_agreement(Path(config["app"]))
    federation, site = agreement.federation, str(config["site"])
    path = config.get("data")
    if path is None:
        raise DataError(
            f'site {site} was started without data: add data="/path/to/rows.csv" to the '
            'SuperNode\'s --node-config, or fill in rows.py and name it: hook="/path/rows.py"'
        )
    data = replace(agreement.plan.data, name=str(path), clients=None).open()
    _check_spec(data, federation, str(path))
    accepted = agreement.plan.data.source.accepted  # declared for all sites
    known = {*accepted, UNDECLARED_COLUMNS}  # the spec of columns is checked above
    inferred = [fact for fact in data.assumed if fact not in known]
    if inferred and data.spec.task in ("binary", "multiclass") and path not in NAMES:
        # Inferred from the rows of one site, a value could mean another class than elsewhere.
        raise DataError(
            f"{path}: {inferred[0]}; sites could infer it differently: declare it in the "
            "plan's [data.source]"
        )
    own, names = federation.sites[site].clients, list(data.names)
    missing = sorted(set(own) - set(names), key=own.index)
    if missing:
        raise DataError(
            f"{path}: no rows of client {missing[0]!r} of site {site}; it has {_some(names)}"
        )
    return _only(data, own)


def _call(hook: Path, config: Mapping[str, Any]) -> Any:
    spec = importlib.util.spec_from_file_location("coterie_site_rows", hook)
    if not hook.is_file() or spec is None or spec.loader is None:
        raise DataError(f"{hook}: no such data hook; give a Python file with rows(config)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(f"{hook}: cannot be loaded ({_line(error)}); correct it") from error
    function = getattr(module, "rows", None)
    if not callable(function):
        raise DataError(f"{hook}: expected a function rows(config) that returns the site's rows")
    try:
        return function(config)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{hook}: rows(config) failed ({_line(error)}); correct it") from error


def _line(error: Exception) -> str:
    """Return an error as one line; it is shown at the site only."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def place_rows(found: Any, federation: Federation, site: str, where: str) -> FederatedDataset:
    """Return a dataset of the whole federation in which only a site's clients have rows.

    `found` is {client name: (X, y)}, or a dataset of its clients, dense or sparse; `where` is
    where it comes from, for errors.
    """
    if isinstance(found, FederatedDataset):
        own = _check_clients(list(found.names), federation, site, where)
        data = _check_dataset(found, federation, own, where)
    else:
        data = _dataset(found, federation, site, where)
    counts = np.zeros(federation.spec.clients, dtype=np.int64)
    counts[federation.client_ids[site]] = data.counts
    scaling = {}
    for name, own_values in data.scaling.items():
        scaling[name] = np.zeros((len(counts), own_values.shape[1]), dtype=own_values.dtype)
        scaling[name][federation.client_ids[site]] = own_values
    return replace(
        data,
        scaling=scaling,
        spec=federation.spec,
        names=federation.clients,
        offsets=offsets_of(counts),
        title=f"site {site}",
        assumed=federation.assumed,
    )


def _check_dataset(
    data: FederatedDataset, federation: Federation, own: Sequence[str], where: str
) -> FederatedDataset:
    _check_spec(data, federation, where)
    data = _only(data, own)
    empty = [name for name, count in zip(own, data.counts, strict=True) if not count]
    if empty:
        raise DataError(f"{where}: client {empty[0]!r}: no rows; expected at least 1")
    values = data.features if isinstance(data.features, torch.Tensor) else data.features.data
    if not (np.isfinite(np.asarray(values)).all() and np.isfinite(data.targets.numpy()).all()):
        raise DataError(f"{where}: rows with gaps or infinite numbers; drop or fill them")
    return data


def _dataset(found: Any, federation: Federation, site: str, where: str) -> FederatedDataset:
    """Return a dataset of {client name: (X, y)}."""
    if not isinstance(found, Mapping):
        raise DataError(
            f"{where}: rows(config) returned {type(found).__name__}; expected "
            "{client name: (X, y)} or a FederatedDataset"
        )
    if len({str(name) for name in found}) < len(found):
        raise DataError(f"{where}: two clients have the same name; return each client once")
    rows = {str(name): _pair(f"{where}: client {name!r}", pair) for name, pair in found.items()}
    own, spec = _check_clients(list(rows), federation, site, where), federation.spec
    for name, (x, y) in rows.items():
        _check(f"{where}: client {name!r}", x, y, spec)
    kind = np.int64 if spec.task == "multiclass" else np.float32
    return FederatedDataset(
        spec=replace(spec, clients=len(own)),
        names=own,
        offsets=offsets_of([len(rows[name][1]) for name in own]),
        features=torch.from_numpy(np.concatenate([rows[n][0].astype(np.float32) for n in own])),
        targets=torch.from_numpy(np.concatenate([rows[n][1].astype(kind) for n in own])),
        title=f"site {site}",
    )


def _pair(where: str, pair: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        x, y = pair
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: expected a pair (X, y), got {type(pair).__name__}") from error
    if np.ma.is_masked(x) or np.ma.is_masked(y):
        raise DataError(f"{where}: masked entries: drop these rows, or fill them")
    if hasattr(x, "toarray"):
        raise DataError(f"{where}: sparse rows: return dense arrays")
    try:
        return np.asarray(x), np.asarray(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: X or y is not an array: expected rows of one length") from error


def _only(data: FederatedDataset, names: Sequence[str]) -> FederatedDataset:
    places = {name: at for at, name in enumerate(data.names)}
    return data.only([places[name] for name in names])


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _check_clients(
    names: list[str], federation: Federation, site: str, where: str
) -> tuple[str, ...]:
    """Return a site's clients; refuse rows of other clients, and clients without rows."""
    if site not in federation.sites:
        raise DataError(
            f"{where}: site {site!r} is not in the federation: expected one of "
            f"{', '.join(federation.sites)}"
        )
    own = federation.sites[site].clients
    odd = sorted(set(names) - set(own))
    if odd:
        raise DataError(
            f"{where}: rows of client {odd[0]!r}, who is not at site {site}: expected {_some(own)}"
        )
    missing = [name for name in own if name not in names]
    if missing:
        raise DataError(f"{where}: no rows of client {missing[0]!r} of site {site}: return them")
    return own


def _check_spec(data: FederatedDataset, federation: Federation, where: str) -> None:
    spec, expected = data.spec, federation.spec
    if (spec.shape, spec.outputs, spec.task) != (expected.shape, expected.outputs, expected.task):
        raise DataError(
            f"{where}: rows of shape {spec.shape}, {spec.outputs} outputs, {spec.task}; expected "
            f"{expected.shape}, {expected.outputs}, {expected.task}, as in federation.toml"
            f"{_columns(data)}"
        )


def _columns(data: FederatedDataset) -> str:
    """Return which columns were read as features, and the reader's notes on columns left out."""
    read = f"; columns read: {', '.join(list(data.columns)[:_SHOWN])}" if data.columns else ""
    more = ", ..." if len(data.columns) > _SHOWN else ""
    left_out = [note for note in data.notes if "left out" in note]
    return read + more + "".join(f"; {note}" for note in left_out)


def _check(where: str, x: NDArray[Any], y: NDArray[Any], spec: Spec) -> None:
    if y.ndim == 0 or not len(y):
        raise DataError(
            f"{where}: no rows; expected at least 1, or remove the client from the list"
        )
    if x.shape != (len(y), *spec.shape):
        raise DataError(
            f"{where}: X has shape {x.shape}, expected ({len(y)}, "
            f"{', '.join(map(str, spec.shape))}): as many rows as y, and the federation's shape"
        )
    expected = (len(y), spec.outputs) if spec.task == "multilabel" else (len(y),)
    if y.shape != expected:
        raise DataError(f"{where}: y has shape {y.shape}, expected {expected}")
    _check_finite(where, x)
    _check_finite(where, y)
    _check_targets(where, np.asarray(y, dtype=float), spec)


def _check_finite(where: str, array: NDArray[Any]) -> None:
    not_numbers = DataError(f"{where}: rows that are not numbers; encode them first")
    if array.dtype.kind not in "biufO":
        raise not_numbers
    try:
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.asarray(array, dtype=np.float32)).all()
    except (TypeError, ValueError) as error:
        raise not_numbers from error
    if not finite:
        raise DataError(
            f"{where}: rows with gaps, or with numbers beyond the range of float32; drop or fill "
            "them"
        )


def _check_targets(where: str, y: NDArray[np.float64], spec: Spec) -> None:
    if spec.task == "multiclass" and (
        (y != np.floor(y)).any() or y.min() < 0 or y.max() >= spec.outputs
    ):
        raise DataError(f"{where}: y has other classes than 0 to {spec.outputs - 1}")
    if spec.task in ("binary", "multilabel") and not np.isin(y, (0, 1)).all():
        raise DataError(f"{where}: y has other values than 0 and 1")
