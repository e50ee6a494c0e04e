"""Client ids, folds inside clients, scalers that pool nothing, and detection of pooled scaling.

`PerClientScaler` scales a client's rows by that client's own mean and standard deviation,
`ConstantScaler` by declared constants. A pipeline passes `clients` on if metadata routing is
enabled (`sklearn.set_config(enable_metadata_routing=True)`); scalers and estimators request it.
"""

import difflib
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.utils.validation import check_is_fitted, validate_data

from coterie.data.scaling import LIMIT

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_TYPES = (np.float64, np.float32)
_ROUNDING = 1e-7  # of float32
_ONE_CLIENT: tuple[Hashable, ...] = ("all rows",)
_MISSING_IDS = ("", "None", "nan", "NaT", "<NA>")
_NAMED, _LISTED = 3, 8  # clients and columns named in a message


# --- client ids ---------------------------------------------------------------


@dataclass(frozen=True)
class ClientIds:
    """Ids of clients, any hashable values, in the order of their models."""

    ids: tuple[Hashable, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def places(self) -> dict[Hashable, int]:
        """The number of each client."""
        return {label: place for place, label in enumerate(self.ids)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The ids as text; with quotes if two would be equal without (1 and "1")."""
        plain = tuple(str(label) for label in self.ids)
        return plain if len(set(plain)) == len(plain) else tuple(repr(label) for label in self.ids)

    @property
    def array(self) -> NDArray[Any]:
        """The ids as an array of numbers, of text or of objects."""
        kinds = {type(label) for label in self.ids}
        if kinds in ({int}, {str}, {float}):
            return np.array(self.ids)
        found = np.empty(len(self.ids), dtype=object)
        found[:] = self.ids
        return found

    def codes(self, labels: Sequence[Hashable]) -> Integers:
        """Return the number of each row's client; -1 if it is unknown."""
        places = self.places
        return np.array([places.get(label, -1) for label in labels], dtype=np.int64)

    def unknown(self, labels: Sequence[Hashable]) -> list[Hashable]:
        """Return unknown ids, each once."""
        return [label for label in dict.fromkeys(labels) if label not in self.places]

    def close(self, label: Hashable) -> str:
        """Return known ids with a similar spelling, as text; "" without any."""
        spelled = {str(known): known for known in self.ids}
        found = difflib.get_close_matches(str(label), list(spelled), n=_NAMED)
        return f" (close: {', '.join(repr(spelled[one]) for one in found)})" if found else ""


def read_ids(clients: Any, rows: int) -> list[Hashable]:
    """Return one hashable id per row; the integer 1 and the float 1.0 are the same id."""
    given = clients.to_numpy() if hasattr(clients, "to_numpy") else clients
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise ValueError(f"clients = {given!r}: expected one id for each of the {rows} rows")
    labels = [_plain(one) for one in (given.tolist() if isinstance(given, np.ndarray) else given)]
    if len(labels) != rows:
        raise ValueError(f"clients has {len(labels)} entries for {rows} rows: give one per row")
    for row, label in enumerate(labels):
        if isinstance(label, str) and label:
            continue
        if isinstance(label, list | dict | set) or (
            not isinstance(label, tuple) and str(label) in _MISSING_IDS
        ):
            raise ValueError(
                f"clients: row {row} (from 0) has {label!r}, expected an id: text, a number or "
                "another hashable value for each row"
            )
    return labels


def number(labels: Sequence[Hashable]) -> ClientIds:
    """Return the ids as `coterie.from_arrays` orders them: numbers sorted, others as they come."""
    found: list[Any] = list(dict.fromkeys(labels))
    if all(type(label) in (int, float) for label in found):
        found.sort()
    return ClientIds(tuple(found))


def split_column(X: Any, column: Any) -> tuple[Any, Any]:
    """Return the rows without the column of ids, and the ids."""
    if hasattr(X, "columns"):
        if column not in list(X.columns):
            raise ValueError(
                f"client_column = {column!r}: expected one of the columns, "
                f"{', '.join(repr(name) for name in list(X.columns)[:_LISTED])}"
            )
        return X[[name for name in X.columns if name != column]], X[column]
    whole = isinstance(column, int | np.integer) and not isinstance(column, bool)
    rows = X if sparse.issparse(X) else np.asarray(X)
    if not whole or rows.ndim != 2 or not -rows.shape[1] <= column < rows.shape[1]:
        raise ValueError(
            f"client_column = {column!r}: X has no column names and shape {rows.shape}, expected "
            "the index of a column, from 0"
        )
    others = np.delete(np.arange(rows.shape[1]), column)
    if sparse.issparse(X):
        by_column = X.tocsc()
        return by_column[:, others].tocsr(), by_column[:, [column]].toarray().reshape(-1)
    return rows[:, others], rows[:, column]


class WithinClientKFold(StratifiedKFold):  # type: ignore[misc]
    """Splits each client's rows into folds, so that every client takes part in every fit.

    Give client ids as `clients` (with metadata routing) or `groups` to the search, or name the
    column of `X` that has them. Clients with fewer rows than folds have rows in some folds only.

    >>> clients = np.array(["a"] * 4 + ["b"] * 4)
    >>> folds = WithinClientKFold(2).split(np.zeros((8, 1)), groups=clients)
    >>> all(set(clients[test]) == set("ab") for _, test in folds)
    True
    """

    __metadata_request__split: ClassVar[dict[str, bool]] = {"clients": True}

    def __init__(
        self,
        n_splits: int = 5,
        *,
        shuffle: bool = False,
        random_state: Any = None,
        client_column: Any = None,
    ) -> None:
        super().__init__(n_splits, shuffle=shuffle, random_state=random_state)
        self.client_column = client_column

    def get_n_splits(
        self, X: Any = None, y: Any = None, groups: Any = None, clients: Any = None
    ) -> int:
        """Return the number of folds."""
        return int(self.n_splits)

    def split(
        self, X: Any, y: Any = None, groups: Any = None, clients: Any = None
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield numbers of rows to fit and to test."""
        clients = groups if clients is None else clients
        if self.client_column is not None:
            clients = split_column(X, self.client_column)[1]
        if clients is None:
            raise ValueError(
                "WithinClientKFold needs the client of each row: give groups= (or clients=, with "
                "metadata routing) to fit of the search, or name the column by client_column="
            )
        codes = np.unique(np.asarray([str(one) for one in clients]), return_inverse=True)[1]
        with warnings.catch_warnings():
            # Clients with fewer rows than folds are no mistake here.
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)
            yield from super().split(np.zeros(len(codes)), codes)


def _plain(label: Any) -> Any:
    label = label.item() if isinstance(label, np.generic) else label
    return int(label) if isinstance(label, float) and label.is_integer() else label


def _ids_of_rows(clients: Any, rows: int) -> Sequence[Hashable]:
    return _ONE_CLIENT * rows if clients is None else read_ids(clients, rows)


# --- scalers ------------------------------------------------------------------


class PerClientScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Centres and scales each client's features by that client's own rows.

    A column that is constant in a client's rows becomes 0 there; scaled values are clipped at +-15.
    Sparse rows are scaled and not centred. Without `clients` all rows belong to one client.

    Attributes:
        clients_: Ids of the clients, in the order of the moments.
        center_: Means, (clients, features); zeros for sparse rows.
        scale_: Standard deviations, (clients, features); infinite for constant columns.
    """

    __metadata_request__fit: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__transform: ClassVar[dict[str, bool]] = {"clients": True}

    def fit(self, X: Any, y: Any = None, clients: Any = None) -> "PerClientScaler":
        """Compute each client's own means and standard deviations."""
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES)
        labels = _ids_of_rows(clients, X.shape[0])
        self._ids = number(labels)
        self.clients_ = self._ids.array
        self.center_, self.scale_ = client_moments(X, self._ids.codes(labels))
        return self

    def transform(self, X: Any, clients: Any = None) -> Any:
        """Scale rows by the moments of their own client, which must have been fitted."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES, reset=False)
        codes = self._codes(clients, X.shape[0])
        return scale_rows(X, codes, self.center_, self.scale_)

    def fit_transform(self, X: Any, y: Any = None, clients: Any = None) -> Any:
        """Fit to rows, and scale them."""
        return self.fit(X, y, clients).transform(X, clients)

    def _codes(self, clients: Any, rows: int) -> Integers:
        known: ClientIds = self._ids
        if clients is None and known.ids != _ONE_CLIENT:
            raise ValueError(
                "clients = None, but the scaler was fitted with clients: give each row's client"
            )
        labels = _ids_of_rows(clients, rows)
        missing = known.unknown(labels)
        if missing:
            raise ValueError(
                f"client {missing[0]!r} was not fitted{known.close(missing[0])}: fit with its rows "
                "too, or use ConstantScaler"
            )
        return known.codes(labels)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class ConstantScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Scales features to (x - center) / scale by public constants; learns nothing.

    The constants must be known without looking at the rows: bounds, units, a published report.

    Args:
        center: One number, or one for each column; 0 for sparse rows.
        scale: One positive number, or one for each column.
        clip: Clip scaled values at +-clip; None for no clipping.
    """

    def __init__(
        self, center: ArrayLike = 0.0, scale: ArrayLike = 1.0, clip: float | None = None
    ) -> None:
        self.center = center
        self.scale = scale
        self.clip = clip

    def fit(self, X: Any, y: Any = None) -> "ConstantScaler":
        """Check the constants against the shape of the rows."""
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES)
        self._constants(X)
        return self

    def transform(self, X: Any) -> Any:
        """Scale rows."""
        X = validate_data(
            self, X, accept_sparse="csr", dtype=_TYPES, reset=not hasattr(self, "n_features_in_")
        )
        center, scale = self._constants(X)
        if sparse.issparse(X):
            found = X.multiply(1.0 / scale).tocsr().astype(X.dtype)
            if self.clip is not None:
                np.clip(found.data, -self.clip, self.clip, out=found.data)
            return found
        dense = ((X - center) / scale).astype(X.dtype)
        return dense if self.clip is None else np.clip(dense, -self.clip, self.clip)

    def _constants(self, X: Any) -> tuple[Floats, Floats]:
        try:
            center, scale = (
                np.broadcast_to(np.asarray(given, dtype=np.float64), (X.shape[1],))
                for given in (self.center, self.scale)
            )
        except ValueError as error:
            raise ValueError(
                f"center of shape {np.shape(self.center)} and scale of shape "
                f"{np.shape(self.scale)}: expected one number, or {X.shape[1]}, one per column"
            ) from error
        if not (np.isfinite(center).all() and np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("center has to be finite, scale finite and positive")
        if sparse.issparse(X) and center.any():
            raise ValueError("sparse rows cannot be centred: give center = 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip = {self.clip}: expected a positive number, or None")
        return center, scale

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = not np.any(self.center)
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def client_moments(X: Any, codes: Integers) -> tuple[Floats, Floats]:
    """Return each client's means (zeros for sparse rows) and standard deviations, by own rows.

    A standard deviation of 0 becomes infinity, which scales the column to 0.
    """
    clients = int(codes.max()) + 1
    counts = np.bincount(codes, minlength=clients).astype(np.float64)[:, None]
    owner = sparse.csr_matrix(
        (np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(clients, len(codes))
    )
    if sparse.issparse(X):
        return _sparse_moments(X.tocsr(), codes, (owner @ X).toarray() / counts, counts)
    rows = np.asarray(X, dtype=np.float64)
    mean = (owner @ rows) / counts
    deviation = np.sqrt((owner @ np.square(rows - mean[codes])) / counts)
    # The rounding error of a mean must not count as variation of a constant column.
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(clients))
    lowest, highest = (
        extreme.reduceat(rows[order], starts, axis=0) for extreme in (np.minimum, np.maximum)
    )
    return mean, np.where((lowest == highest) | (deviation == 0), np.inf, deviation)


def _sparse_moments(X: Any, codes: Integers, mean: Floats, counts: Floats) -> tuple[Floats, Floats]:
    place = np.repeat(codes, np.diff(X.indptr)) * X.shape[1] + X.indices
    apart = np.square(X.data.astype(np.float64) - mean.reshape(-1)[place])
    square = np.bincount(place, apart, mean.size).reshape(mean.shape)
    stored = np.bincount(place, minlength=mean.size).reshape(mean.shape)
    # Entries that are not stored are zeros, each mean^2 away from the mean.
    deviation = np.sqrt((square + (counts - stored) * mean**2) / counts)
    deviation[deviation <= _ROUNDING * np.abs(mean)] = 0.0
    return np.zeros_like(mean), np.where(deviation == 0, np.inf, deviation)


def scale_rows(X: Any, codes: Integers, center: Floats, scale: Floats) -> Any:
    """Scale each row by its client's moments, clipped at +-15."""
    if sparse.issparse(X):
        found = X.tocsr(copy=True)
        place = np.repeat(codes, np.diff(found.indptr))
        values = found.data / scale[place, found.indices]
        found.data = np.clip(values, -LIMIT, LIMIT).astype(X.dtype)
        found.eliminate_zeros()
        return found
    with np.errstate(over="ignore"):  # overflow is infinite until it is clipped
        values = (np.asarray(X, dtype=np.float64) - center[codes]) / scale[codes]
    return np.clip(values, -LIMIT, LIMIT).astype(X.dtype)


# --- pooled scaling -----------------------------------------------------------

_TOLERANCE = {4: 2e-6, 8: 1e-8}  # by bytes of a float
_FEWEST_ROWS = 5  # fewer rows may have any mean and standard deviation by design
_OWN_MEAN = 1e-5  # a client's own mean that is 0 up to rounding, in float32 too
_UNCENTRED = "every column of X with deviation 1 (StandardScaler without the mean)"


class PooledScalingError(ValueError):
    """Raised for rows that were scaled by statistics of all clients together."""


def find_pooled(X: Any, y: Floats | None = None, codes: Integers | None = None) -> str | None:
    """Return the scaler of all rows together that X or the target went through, as text.

    A scaler fitted on the rows of all clients releases their mean, standard deviation or extremes
    without noise. It leaves a mark over all rows, up to rounding: mean 0 and deviation 1
    (StandardScaler), median 0 and quartiles 1 apart (RobustScaler), extremes 0 and 1
    (MinMaxScaler), largest size 1 (MaxAbsScaler). Mean and deviation of n other rows are within t
    of 0 and 1 with probability of about n t^2: 1e-12 for t = 1e-8 and ten thousand rows. Columns
    that have such values by design are left out: integers, two values, and, for extremes, columns
    that reach them more than once (shares, pixels). Scaling that was fitted on other rows too,
    before a split for example, leaves no mark.

    `codes` are the numbers of the rows' clients: columns with mean 0 in every client were centred
    per client and are left out. `y` are targets of a regression.
    """
    if X.shape[0] < _FEWEST_ROWS:
        return None
    tolerance = _TOLERANCE[4 if X.dtype.itemsize <= 4 else 8]
    if sparse.issparse(X):
        found = _find_sparse(X, tolerance)
    else:
        values = np.asarray(X.reshape(len(X), -1), dtype=np.float64)
        found = _find_dense(values, tolerance, _not_centred(values, codes))
    if found is None and y is not None:
        targets = y.astype(np.float64)[:, None]
        if _standardised(targets, _TOLERANCE[8]).any() and len(_not_centred(targets, codes)):
            found = "the target with mean 0 and deviation 1"
    return found


def pooled_message(found: str) -> str:
    """Return an error message for pooled rows."""
    return (
        f"{found} over the rows of all clients together: it was scaled by statistics of all of "
        "them, which epsilon does not cover; scale each client by its own rows "
        "(standardise='client' here, or coterie.PerClientScaler in the pipeline) or by public "
        "constants (coterie.ConstantScaler(center=..., scale=...)); if the constants or the rows "
        "are public, set on_pooled='ignore'"
    )


def _not_centred(values: Floats, codes: Integers | None) -> Integers:
    """Return the columns that are not centred per client."""
    if codes is None:
        return np.arange(values.shape[1])
    owner = sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))))
    counts = np.maximum(np.bincount(codes), 1)[:, None]
    return np.flatnonzero((np.abs(owner @ values) / counts > _OWN_MEAN).any(axis=0))


def _find_dense(whole: Floats, tolerance: float, columns: Integers) -> str | None:
    if not len(columns):
        return None
    values = whole[:, columns]
    for looks, text in (
        (_standardised, "mean 0 and deviation 1 (StandardScaler)"),
        (_robust, "median 0 and quartiles 1 apart (RobustScaler)"),
    ):
        marked = columns[looks(values, tolerance)]
        if len(marked):
            named = ", ".join(map(str, marked[:_NAMED]))
            more = f" and {len(marked) - _NAMED} more" if len(marked) > _NAMED else ""
            return f"column{'s' * (len(marked) > 1)} {named}{more} (from 0) of X with {text}"
    low, high, sizes = values.min(axis=0), values.max(axis=0), np.abs(values)
    top = 1 - tolerance
    spans = (np.abs(low) <= tolerance) & (np.abs(high - 1) <= tolerance)
    once = ((values <= tolerance).sum(axis=0) == 1) & ((values >= top).sum(axis=0) == 1)
    if _all_fit(values, spans, once):
        return "every column of X with least 0 and largest 1 (MinMaxScaler)"
    if _all_fit(
        values, np.abs(sizes.max(axis=0) - 1) <= tolerance, (sizes >= top).sum(axis=0) == 1
    ):
        return "every column of X with largest size 1 (MaxAbsScaler)"
    unit = np.abs(values.std(axis=0) - 1) <= tolerance
    return _UNCENTRED if _all_fit(values, unit, unit) else None


def _all_fit(values: Floats, fits: NDArray[np.bool_], clear: NDArray[np.bool_]) -> bool:
    """Return whether all continuous columns fit, and at least half of them clearly."""
    if any(_is_continuous(column) for column in values[:, ~fits].T):
        return False
    seen = [at for at in np.flatnonzero(fits) if _is_continuous(values[:, at])]
    return len(seen) >= 2 and 2 * int(clear[seen].sum()) >= len(seen)


def _find_sparse(X: Any, tolerance: float) -> str | None:
    """Return what was found in sparse rows, which are never centred."""
    held = sparse.csc_matrix(X, dtype=np.float64)
    counts = np.diff(held.indptr)
    used = np.flatnonzero(counts > 2)  # of fewer stored values one may well be 1
    if len(used) < 2:
        return None
    rows = X.shape[0]
    mean = np.asarray(held.sum(axis=0)).reshape(-1)[used] / rows
    square = np.asarray(held.multiply(held).sum(axis=0)).reshape(-1)[used] / rows
    if bool((np.abs(np.sqrt(square - mean**2) - 1) <= tolerance).all()):
        return _UNCENTRED
    sizes = np.abs(held.data)
    top = np.maximum.reduceat(sizes, held.indptr[:-1][used])
    owner = np.repeat(np.arange(X.shape[1]), counts)
    touching = np.bincount(owner[sizes >= 1 - tolerance], minlength=X.shape[1])[used]
    if bool((np.abs(top - 1) <= tolerance).all()) and 2 * int((touching == 1).sum()) >= len(used):
        return "every column of X with largest size 1 (MaxAbsScaler)"
    return None


def _standardised(values: Floats, tolerance: float) -> NDArray[np.bool_]:
    """Return which columns have mean 0 and deviation 1, by n or by n - 1."""
    rows, deviation = len(values), values.std(axis=0)
    unit = np.abs(deviation - 1) <= tolerance
    unit |= np.abs(deviation * np.sqrt(rows / (rows - 1)) - 1) <= tolerance
    marked: NDArray[np.bool_] = (np.abs(values.mean(axis=0)) <= tolerance) & unit
    for column in np.flatnonzero(marked):
        marked[column] = _is_continuous(values[:, column])
    return marked


def _robust(values: Floats, tolerance: float) -> NDArray[np.bool_]:
    """Return which columns have median 0 and quartiles 1 apart, and few repeated values."""
    low, middle, high = np.percentile(values, (25, 50, 75), axis=0)
    marked: NDArray[np.bool_] = np.abs(middle) <= tolerance
    marked &= np.abs(high - low - 1) <= tolerance
    for column in np.flatnonzero(marked):
        marked[column] = 2 * len(np.unique(values[:, column])) > len(values)
    return marked


def _is_continuous(column: Floats) -> bool:
    """Return whether a column has more than two values, and not only integers."""
    return not bool((column == np.rint(column)).all()) and len(np.unique(column)) > 2


# --- pipelines ----------------------------------------------------------------

_FIT_WITHOUT_VALUES = (
    "AdditiveChi2Sampler",
    "FeatureHasher",
    "HashingVectorizer",
    "PolynomialFeatures",
    "PolynomialCountSketch",
)
"""Steps of scikit-learn that use only the number of columns in fit."""
_DECLARED = {"OneHotEncoder": "categories", "OrdinalEncoder": "categories"}
"""Steps that learn from rows unless this setting is declared."""
_INSTEAD = {
    "StandardScaler": "PerClientScaler() or ConstantScaler(center=..., scale=...)",
    "MinMaxScaler": "ConstantScaler with public bounds",
    "MaxAbsScaler": "ConstantScaler with public bounds",
    "RobustScaler": "PerClientScaler() or ConstantScaler(center=..., scale=...)",
    "OneHotEncoder": "OneHotEncoder(categories=[...]) with declared categories",
    "OrdinalEncoder": "OrdinalEncoder(categories=[...]) with declared categories",
    "CountVectorizer": "HashingVectorizer, or a public vocabulary with text='bag' of ct.load",
    "TfidfVectorizer": "HashingVectorizer, or a public vocabulary with text='bag' of ct.load",
    "SimpleImputer": "SimpleImputer(strategy='constant', fill_value=...)",
}
_DEFAULT = "a step with public constants, or the same step fitted on public rows beforehand"


def check_pipeline(pipeline: Any) -> tuple[str, ...]:
    """Return one sentence for each step of a pipeline that learns from the rows of all clients.

    Looks into nested pipelines, unions and column transformers. Steps of other packages are assumed
    to learn from rows unless their tags state that they need no fit.

    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from coterie import CoterieRegressor
    >>> for step in check_pipeline(make_pipeline(StandardScaler(), CoterieRegressor())):
    ...     print(step)
    standardscaler: StandardScaler learns from the rows of all clients, which epsilon does not \
cover; use PerClientScaler() or ConstantScaler(center=..., scale=...)
    """
    return tuple(
        f"{name}: {type(step).__name__} learns from the rows of all clients, which epsilon does "
        f"not cover; use {_INSTEAD.get(type(step).__name__, _DEFAULT)}"
        for name, step in _transformers(pipeline, "", last=True)
        if not _is_public(step)
    )


def _transformers(step: Any, name: str, *, last: bool) -> Iterator[tuple[str, Any]]:
    """Yield transformers with their paths; the last step of a pipeline predicts."""
    if isinstance(step, Pipeline):
        parts = [(key, inner, key == step.steps[-1][0] and last) for key, inner in step.steps]
    elif isinstance(step, FeatureUnion):
        parts = [(key, inner, False) for key, inner in step.transformer_list]
    elif isinstance(step, ColumnTransformer):
        parts = [(key, inner, False) for key, inner, _ in step.transformers]
        parts.append(("remainder", step.remainder, False))
    else:
        if isinstance(step, BaseEstimator) and not (last and not hasattr(step, "transform")):
            yield name or type(step).__name__.lower(), step
        return
    for key, inner, ends in parts:
        yield from _transformers(inner, f"{name}.{key}" if name else key, last=ends)


def _is_public(step: Any) -> bool:
    kind = type(step).__name__
    if isinstance(step, PerClientScaler | ConstantScaler) or kind in _FIT_WITHOUT_VALUES:
        return True
    if kind in _DECLARED:
        return not isinstance(getattr(step, _DECLARED[kind]), str)
    if kind == "SimpleImputer":
        return bool(step.strategy == "constant" and step.fill_value is not None)
    return not step.__sklearn_tags__().requires_fit
