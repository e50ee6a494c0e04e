"""Scalers for pipelines that tell nobody about anybody: by own rows, or by public constants.

As `coterie.standardise_clients` and `coterie.apply_constants`: a client's rows are scaled by that
client's own mean and deviation, remembered for its later rows and for no other client's; or by
numbers that were declared. Where the pipeline is to hand `clients` on, switch metadata routing on
(`sklearn.set_config(enable_metadata_routing=True)`); both ends ask for it by themselves.
"""

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from coterie.data.scaling import LIMIT
from coterie.estimators.numbering import Numbering, labels_of, number

Floats = NDArray[np.float64]
_TYPES = (np.float64, np.float32)
_ROUNDING = 1e-7  # of float32, which models compute in
_NOBODY: tuple[Hashable, ...] = ("all rows",)


class PerClientScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Centres and scales each client's features by that client's own rows.

    What is learnt of a client serves that client alone. A column that does not vary in a client's
    rows is 0 there; what is scaled is cut at +-15. Sparse rows are scaled and not centred. Without
    `clients` all rows are one client's.

    Attributes:
        clients_: Ids of the clients, in the order of the constants.
        center_: Means, (clients, features); zeros for sparse rows.
        scale_: Deviations, (clients, features); infinite where a column does not vary.
    """

    __metadata_request__fit: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__transform: ClassVar[dict[str, bool]] = {"clients": True}

    def fit(self, X: Any, y: Any = None, clients: Any = None) -> "PerClientScaler":
        """Learn each client's own means and deviations."""
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES)
        labels = rows_labels(clients, X.shape[0])
        self._numbering = number(labels)
        self.clients_ = self._numbering.array
        self.center_, self.scale_ = own_constants(X, self._numbering.codes(labels))
        return self

    def transform(self, X: Any, clients: Any = None) -> Any:
        """Scale rows by the constants of their own client.

        Raises:
            ValueError: For rows of a client that was not fitted.
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_TYPES, reset=False)
        codes = self._codes(clients, X.shape[0])
        return scaled(X, codes, self.center_, self.scale_)

    def fit_transform(self, X: Any, y: Any = None, clients: Any = None) -> Any:
        """Learn each client's own constants, and scale its rows by them."""
        return self.fit(X, y, clients).transform(X, clients)

    def _codes(self, clients: Any, rows: int) -> NDArray[np.int64]:
        known: Numbering = self._numbering
        if clients is None and known.ids != _NOBODY:
            raise ValueError(
                "clients = None, but the scaler was fitted with clients: give each row's client"
            )
        labels = rows_labels(clients, rows)
        missing = known.unknown(labels)
        if missing:
            raise ValueError(
                f"client {missing[0]!r} was not fitted and has no constants of its own"
                f"{known.close(missing[0])}: fit with its rows too, or use ConstantScaler"
            )
        return known.codes(labels)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class ConstantScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Scales features to (x - center) / scale by constants that are public; learns nothing.

    The constants have to be known without a look at the rows: bounds, units, last year's report.

    Args:
        center: One number, or one for each column; 0 for sparse rows.
        scale: One positive number, or one for each column.
        clip: Cut what is scaled at +-clip; None for no cut.
    """

    def __init__(
        self, center: ArrayLike = 0.0, scale: ArrayLike = 1.0, clip: float | None = None
    ) -> None:
        self.center = center
        self.scale = scale
        self.clip = clip

    def fit(self, X: Any, y: Any = None) -> "ConstantScaler":
        """Check the constants against the shape of the rows; nothing is learnt."""
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
                f"{np.shape(self.scale)}: expected one number, or {X.shape[1]}, one a column"
            ) from error
        if not (np.isfinite(center).all() and np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("center has to be finite, scale finite and positive")
        if sparse.issparse(X) and center.any():
            raise ValueError("sparse rows cannot be centred: give center = 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip = {self.clip}: expected a positive number, or None for no cut")
        return center, scale

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = not np.any(self.center)
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def rows_labels(clients: Any, rows: int) -> Sequence[Hashable]:
    """Read the clients of rows; without any, all rows are one client's."""
    return _NOBODY * rows if clients is None else labels_of(clients, rows)


def own_constants(X: Any, codes: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Find each client's means (zeros for sparse rows) and deviations, (clients, features) each.

    By own rows alone; a deviation of 0 is given as infinity, which scales the column to 0.
    """
    clients = int(codes.max()) + 1
    counts = np.bincount(codes, minlength=clients).astype(np.float64)[:, None]
    owner = sparse.csr_matrix(
        (np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(clients, len(codes))
    )
    if sparse.issparse(X):
        return _sparse_constants(X.tocsr(), codes, (owner @ X).toarray() / counts, counts)
    rows = np.asarray(X, dtype=np.float64)
    mean = (owner @ rows) / counts
    deviation = np.sqrt((owner @ np.square(rows - mean[codes])) / counts)
    # Rounding of a mean must not pass for variation of a constant column.
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(clients))
    lowest, highest = (
        extreme.reduceat(rows[order], starts, axis=0) for extreme in (np.minimum, np.maximum)
    )
    return mean, np.where((lowest == highest) | (deviation == 0), np.inf, deviation)


def _sparse_constants(
    X: Any, codes: NDArray[np.int64], mean: Floats, counts: Floats
) -> tuple[Floats, Floats]:
    place = np.repeat(codes, np.diff(X.indptr)) * X.shape[1] + X.indices
    apart = np.square(X.data.astype(np.float64) - mean.reshape(-1)[place])
    square = np.bincount(place, apart, mean.size).reshape(mean.shape)
    stored = np.bincount(place, minlength=mean.size).reshape(mean.shape)
    # Entries that are not stored are zeros, each mean^2 away from the mean.
    deviation = np.sqrt((square + (counts - stored) * mean**2) / counts)
    # Rounding of a mean must not pass for variation of a constant column.
    deviation[deviation <= _ROUNDING * np.abs(mean)] = 0.0
    return np.zeros_like(mean), np.where(deviation == 0, np.inf, deviation)


def scaled(X: Any, codes: NDArray[np.int64], center: Floats, scale: Floats) -> Any:
    """Scale each row by its client's constants, cut at +-15."""
    if sparse.issparse(X):
        found = X.tocsr(copy=True)
        place = np.repeat(codes, np.diff(found.indptr))
        values = found.data / scale[place, found.indices]
        found.data = np.clip(values, -LIMIT, LIMIT).astype(X.dtype)
        found.eliminate_zeros()
        return found
    with np.errstate(over="ignore"):  # what is too large is infinite until it is cut
        values = (np.asarray(X, dtype=np.float64) - center[codes]) / scale[codes]
    return np.clip(values, -LIMIT, LIMIT).astype(X.dtype)
