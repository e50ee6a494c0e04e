"""A site's rows: the hook that its owner fills, and the data set that is made of what it returns.

The hook is a file with a function `rows(config)`, in the app (`rows.py`) or wherever the site's
`--node-config 'hook="..."'` says; it returns {client name: (X, y)} for the site's clients, or a
`FederatedDataset`. The rows are put into a data set shaped like the whole federation, in which
others' clients have no rows: so a client has the same number, the same split and the same coins as
in a simulation of the same plan.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.scaling import Moments, client_moments, scaling_hint
from coterie.deployment.agreement import Agreement
from coterie.engines.federation import Federation

Rows = tuple[NDArray[Any], NDArray[Any]]


def load_rows(
    agreement: Agreement, site: str, app: Path, config: Mapping[str, Any]
) -> tuple[FederatedDataset, FederatedDataset, Moments | None]:
    """Return a site's training and test rows, and what its clients' own are scaled by, if they are.

    The means and deviations are kept at the site beside the models, which answer scaled rows.

    Args:
        agreement: Plan and federation.
        site: Its name.
        app: The app's folder, where the usual hook lies.
        config: What the site was started with (`--node-config`).
    """
    hook = Path(str(config.get("hook", app / "rows.py")))
    found = _call(hook, {**config, "app": str(app), "site": site})
    federation, choice = agreement.federation, agreement.run_plan.data
    if isinstance(found, FederatedDataset):
        whole = place(found, federation, site, str(hook))
    else:
        whole = spread(_by_client(found, hook), federation, site, str(hook))
    moments = None
    if choice.standardise == "client":
        bare = replace(choice, standardise="none").split(whole)[0]
        moments = client_moments(bare.only(federation.numbers[site]))
    return *choice.split(whole), moments


def hints_on(agreement: Agreement, site: str, train: FederatedDataset) -> tuple[str, ...]:
    """Say what the owner of a site's rows should know of them; for the site alone."""
    own = train.only(agreement.federation.numbers[site])
    scaled = scaling_hint(replace(own, title=train.title))
    method = agreement.run_plan.method
    return (*([] if scaled is None else [scaled]), *method.notes(data=own).data)


def _call(hook: Path, config: Mapping[str, Any]) -> Any:
    spec = importlib.util.spec_from_file_location("coterie_site_rows", hook)
    if not hook.is_file() or spec is None or spec.loader is None:
        raise DataError(f"{hook}: no such data hook; give a Python file with rows(config)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(f"{hook}: cannot be loaded ({_line(error)}); mend it") from error
    function = getattr(module, "rows", None)
    if not callable(function):
        raise DataError(f"{hook}: expected a function rows(config) that returns the site's rows")
    try:
        return function(config)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{hook}: rows(config) failed ({_line(error)}); mend it") from error


def _line(error: Exception) -> str:
    """Say what went wrong in one line; it is read at the site alone."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _by_client(found: Any, hook: Path) -> dict[str, Rows]:
    if not isinstance(found, Mapping):
        raise DataError(
            f"{hook}: rows(config) returned {type(found).__name__}; expected "
            "{client name: (X, y)} or a FederatedDataset"
        )
    if len({str(name) for name in found}) < len(found):
        raise DataError(f"{hook}: two clients have the same name; give each client's rows once")
    return {str(name): _pair(f"{hook}: client {name!r}", pair) for name, pair in found.items()}


def _pair(who: str, pair: Any) -> Rows:
    try:
        x, y = pair
    except (TypeError, ValueError) as error:
        raise DataError(f"{who}: expected a pair (X, y), got {type(pair).__name__}") from error
    if np.ma.is_masked(x) or np.ma.is_masked(y):
        raise DataError(f"{who}: masked entries: drop these rows, or fill them")
    if hasattr(x, "toarray"):
        raise DataError(f"{who}: sparse rows: return dense arrays")
    try:
        return np.asarray(x), np.asarray(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{who}: X or y is no array: expected rows of one length") from error


def spread(
    rows: Mapping[str, Rows], federation: Federation, site: str, where: str
) -> FederatedDataset:
    """Put a site's rows among the clients of the whole federation."""
    own = _check_clients(list(rows), federation, site, where)
    spec = federation.spec
    for name, (x, y) in rows.items():
        _check(f"{where}: client {name!r}", x, y, federation)
    counts = [len(rows[name][1]) if name in rows else 0 for name in federation.clients]
    x = np.concatenate([np.asarray(rows[n][0], dtype=np.float32) for n in own])
    kind = np.int64 if spec.task == "multiclass" else np.float32
    y = np.concatenate([np.asarray(rows[n][1], dtype=kind) for n in own])
    return FederatedDataset(
        spec=spec,
        names=federation.clients,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        features=torch.from_numpy(x),
        targets=torch.from_numpy(y),
        title=f"site {site}",
        assumed=federation.assumed,
    )


def place(
    data: FederatedDataset, federation: Federation, site: str, where: str
) -> FederatedDataset:
    """Put a data set of a site's clients, dense or sparse, among those of the whole federation."""
    own = _check_clients(list(data.names), federation, site, where)
    spec, wanted = data.spec, federation.spec
    if (spec.shape, spec.outputs, spec.task) != (wanted.shape, wanted.outputs, wanted.task):
        raise DataError(
            f"{where}: rows of shape {spec.shape}, {spec.outputs} outputs, {spec.task}; the "
            f"federation has agreed on {wanted.shape}, {wanted.outputs}, {wanted.task}"
        )
    places = {name: at for at, name in enumerate(data.names)}
    data = data.only([places[name] for name in own])
    empty = [name for name, count in zip(own, data.counts, strict=True) if not count]
    if empty:
        raise DataError(f"{where}: client {empty[0]!r}: no rows; expected at least 1")
    values = data.features if isinstance(data.features, torch.Tensor) else data.features.data
    if not (np.isfinite(np.asarray(values)).all() and np.isfinite(data.targets.numpy()).all()):
        raise DataError(f"{where}: rows with gaps or infinite numbers; drop or fill them")
    counts = np.zeros(wanted.clients, dtype=np.int64)
    counts[federation.numbers[site]] = data.counts
    return replace(
        data,
        spec=wanted,
        names=federation.clients,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        title=f"site {site}",
        assumed=federation.assumed,
    )


def _check_clients(
    names: list[str], federation: Federation, site: str, where: str
) -> tuple[str, ...]:
    """Return a site's clients; refuse rows of others, and clients without."""
    if site not in federation.sites:
        raise DataError(
            f"{where}: site {site!r} is not in the federation: expected one of "
            f"{', '.join(federation.sites)}"
        )
    own = federation.sites[site].clients
    odd = sorted(set(names) - set(own))
    if odd:
        raise DataError(
            f"{where}: rows of client {odd[0]!r}, who is not at site {site}: expected "
            f"{', '.join(own[:5])}{', ...' if len(own) > 5 else ''}"
        )
    missing = [name for name in own if name not in names]
    if missing:
        raise DataError(f"{where}: no rows of client {missing[0]!r} of site {site}: return them")
    return own


def _check(who: str, x: NDArray[Any], y: NDArray[Any], federation: Federation) -> None:
    spec = federation.spec
    if y.ndim == 0 or not len(y):
        raise DataError(f"{who}: no rows; expected at least 1, or leave the client out of the list")
    if x.shape != (len(y), *spec.shape):
        raise DataError(
            f"{who}: X has shape {x.shape}, expected ({len(y)}, "
            f"{', '.join(map(str, spec.shape))}): as many rows as y, and the federation's shape"
        )
    wide = (len(y), spec.outputs) if spec.task == "multilabel" else (len(y),)
    if y.shape != wide:
        raise DataError(f"{who}: y has shape {y.shape}, expected {wide}")
    _check_finite(who, x)
    _check_finite(who, y)
    _check_targets(who, np.asarray(y, dtype=float), spec)


def _check_finite(who: str, array: NDArray[Any]) -> None:
    words = DataError(f"{who}: rows that are not numbers; encode them first")
    if array.dtype.kind not in "biufO":
        raise words
    try:
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.asarray(array, dtype=np.float32)).all()
    except (TypeError, ValueError) as error:
        raise words from error
    if not finite:
        raise DataError(
            f"{who}: rows with gaps, or with numbers beyond those of float32; drop or fill them"
        )


def _check_targets(who: str, y: NDArray[np.float64], spec: Spec) -> None:
    if spec.task == "multiclass" and (
        (y != np.floor(y)).any() or y.min() < 0 or y.max() >= spec.outputs
    ):
        raise DataError(f"{who}: y holds other classes than 0 to {spec.outputs - 1}")
    if spec.task in ("binary", "multilabel") and not np.isin(y, (0, 1)).all():
        raise DataError(f"{who}: y holds other numbers than 0 and 1")
