"""The base of both estimators: validate rows of named clients, plan, run, and predict by client."""

import difflib
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from coterie.core.config import from_table
from coterie.core.rng import Rng
from coterie.core.tree import Tree, take, to
from coterie.data.config import Source
from coterie.data.effects import Effects, parse
from coterie.data.federated import DataError, FederatedDataset, Spec, Task
from coterie.data.load import from_arrays
from coterie.engine.simulate import Outcome, onboard, simulate
from coterie.estimators.scalers import (
    ClientIds,
    Floats,
    Integers,
    PooledScalingError,
    client_moments,
    find_pooled,
    number,
    pooled_message,
    read_ids,
    scale_rows,
    split_column,
)
from coterie.evaluation.baselines import local_method
from coterie.methods.auto import Auto
from coterie.methods.base import Method, Shape, choices, shared_leaves
from coterie.models import Model
from coterie.planning.plan import Privacy, Speed
from coterie.planning.rules import advice_for, plan_for
from coterie.privacy.guarantee import round_up, show_delta
from coterie.privacy.sampling import Poisson, Sampler
from coterie.serve.predict import model_outputs

Hashes = NDArray[np.uint64]
_TYPES = (np.float64, np.float32)
_CALLER = 3  # frames between a warning and the call of fit
_UNPICKLED = ("outcome_", "_train")
"""In memory only: the run with its open files, and rows of clients."""
_NESTED = "method__"
_TEXT_ERROR = "could not convert string to float"
_NAMED = 3  # clients named in a message
_SPLIT = "In a search or cross-validation, split inside clients with cv=WithinClientKFold(...)"
NO_WEIGHTS = (
    "sample_weight is not supported: the bound on a client's contribution, and so epsilon, applies "
    "to whole clients, and every row of a client counts alike; leave it out"
)


class PrivacyWarning(UserWarning):
    """The stated epsilon does not cover something, or protects nobody."""


class NewClientWarning(UserWarning):
    """The shared model predicts rows of a client that did not take part in training."""


@dataclass(frozen=True)
class Targets:
    """The task, its classes, and what was assumed from the rows."""

    task: Task
    classes: int | None = None
    assumed: tuple[str, ...] = ()


class Federated(BaseEstimator):  # type: ignore[misc]
    """An estimator with one model per client; see `CoterieClassifier` and `CoterieRegressor`."""

    __metadata_request__fit: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__predict: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__score: ClassVar[dict[str, bool]] = {"clients": True}

    method_settings: Mapping[str, Any] | None
    _moments: tuple[Floats, Floats] | None
    _models: Tree
    _ids: ClientIds
    _shared: Tree
    _spec: Spec

    def _store(self, given: Mapping[str, Any]) -> None:
        """Set the parameters, untouched, from the arguments of `__init__`."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters; if deep, also `method_settings` as `method__name`."""
        found: dict[str, Any] = super().get_params(deep=deep)
        given = self.method_settings
        if deep and isinstance(given, Mapping):
            found |= {f"{_NESTED}{key}": value for key, value in given.items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters; `method__name` is one of `method_settings`."""
        nested = {key: params.pop(key) for key in list(params) if key.startswith(_NESTED)}
        super().set_params(**params)
        if nested:
            added = {key.removeprefix(_NESTED): value for key, value in nested.items()}
            self.method_settings = {**(self.method_settings or {}), **added}
        return self

    def onboard(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Add clients after training: each fits its own part of the model to its own rows.

        They release nothing, so it costs no privacy, and `epsilon_` does not change. Raises
        ValueError if a client has a model already, or the method cannot onboard.
        """
        check_is_fitted(self)
        X, clients = self._split_clients(X, clients)
        X, targets = self._checked(X, y, reset=False)
        labels = read_ids(clients, X.shape[0])
        new = number(labels)
        if known := [label for label in new.ids if label in self._ids.places]:
            raise ValueError(
                f"client {known[0]!r} has a model already: give rows of new clients only, or fit "
                "again"
            )
        codes, moments = new.codes(labels), self._moments
        if moments is not None:
            own = client_moments(X, codes)
            X = scale_rows(X, codes, *own)
            moments = np.concatenate([moments[0], own[0]]), np.concatenate([moments[1], own[1]])
        data = self._data(X, targets, codes, new)
        method, seed = self.plan_.method, self.plan_.simulation_seed
        models = to(onboard(method, self._shared, self._spec, data, seed), "cpu")
        self._models, self._moments = _with_models(self._models, models), moments
        self._ids = ClientIds((*self._ids.ids, *new.ids))
        self.clients_ = self._ids.array
        return self

    join = onboard  # the method's former name

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {key: value for key, value in state.items() if key not in _UNPICKLED}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- fit ------------------------------------------------------------------

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, NDArray[Any]]:
        """Return validated rows, and targets as `FederatedDataset` holds them."""
        raise NotImplementedError

    def _targets(self) -> Targets:
        """Return the kind of the checked targets."""
        raise NotImplementedError

    def fit(self, X: Any, y: Any, clients: Any = None, **refused: Any) -> Self:
        """Train one model per client; `clients` holds any hashable id per row, None for one client.

        `sample_weight` raises a TypeError.
        """
        if refused:
            weights = "sample_weight" in refused
            raise TypeError(NO_WEIGHTS if weights else f"fit does not know {list(refused)}")
        X, clients = self._split_clients(X, clients)
        X, targets = self._checked(X, y, reset=True)
        self._kind = self._targets()
        labels = [None] * X.shape[0] if clients is None else read_ids(clients, X.shape[0])
        self._given = clients is not None
        self._ids = number(labels)
        codes = self._ids.codes(labels)
        method = method_of(self.method, self.model, self.method_settings)
        self._check_pooled(X, targets, codes, method)
        self._moments = client_moments(X, codes) if self._standardises else None
        rows = X if self._moments is None else scale_rows(X, codes, *self._moments)
        train = replace(self._data(rows, targets, codes, self._ids), assumed=self._kind.assumed)
        self._keep(self._run(method, train), train)
        self._warn(X, targets, codes)
        return self

    def _split_clients(self, X: Any, clients: Any) -> tuple[Any, Any]:
        """Return rows and ids; the ids may be a column of X, that of the formula too."""
        X, found = self._by_formula(X)
        column = found if self.client_column is None and clients is None else self.client_column
        if column is None:
            return X, clients
        if clients is not None:
            raise ValueError(
                f"clients and client_column = {self.client_column!r} are both given: give one of "
                "them"
            )
        return split_column(X, column)

    def _by_formula(self, X: Any) -> tuple[Any, str | None]:
        """Return a frame's rows without the formula's target, and the formula's client column."""
        if self.formula in (None, "spline") or not hasattr(X, "columns"):
            return X, None
        named = parse(self.formula)
        if named.target and named.target in list(X.columns):
            X, _ = split_column(X, named.target)
        known = named.client and named.client in list(X.columns)
        return X, named.client if known else None

    def _validated(self, X: Any, **how: Any) -> Any:
        """Validate rows as scikit-learn does; text in X may be a column of ids."""
        try:
            return validate_data(self, X, accept_sparse="csr", dtype=_TYPES, **how)
        except ValueError as error:
            if _TEXT_ERROR not in str(error) or not _has_text(X):
                raise
            raise ValueError(
                f"X holds text, expected numbers: {error}; if a column holds the clients' ids, "
                "give them as clients= or name it by client_column=, and turn other text into "
                "numbers first"
            ) from error

    def _run(self, method: Method, train: FederatedDataset) -> Outcome:
        local = len(train) == 1
        plan = plan_for(
            train.spec,
            Privacy(
                epsilon=None if self.epsilon is None else float(self.epsilon),
                noise_multiplier=self.noise_multiplier,
                delta=self.delta,
                relation=self.relation,
                clip=self.clip,
                noise=self.noise,
            ),
            method=local_method(method) if local and method.shape is not Shape.NONE else method,
            sampler=None if local else _sampler_of(self.cohort),
            rounds=None if local else self.rounds,
            simulation_seed=_seed_of(self.random_state),
        )
        try:
            return simulate(plan, train, speed=Speed(device=self.device), progress=False)
        except DataError as error:
            ways = (
                "; of an estimator: standardise='client', PerClientScaler or ConstantScaler for X, "
                "target_center and target_scale for y"
            )
            size = f" (n_samples = {len(train.targets)}, clients = {len(train)})"
            raise DataError(f"{error}{ways if 'unit size' in str(error) else size}") from error

    def _keep(self, outcome: Outcome, train: FederatedDataset) -> None:
        """Set the fitted attributes."""
        method, guarantee = outcome.plan.method, outcome.guarantee
        self.outcome_, self._train = outcome, train
        self.plan_, self.guarantee_ = outcome.plan, guarantee
        self.epsilon_ = guarantee.epsilon
        self.delta_ = guarantee.delta
        self._trained = self._ids
        self.clients_ = self._ids.array
        self._spec = outcome.spec
        self._shared = to(outcome.shared, "cpu")
        self._models = {name: leaf.cpu() for name, leaf in outcome.models.leaves.items()}
        self._common = _shared_model(outcome, train)
        self.caveats_ = method.notes(
            private=bool(guarantee.events) and self.epsilon_ < np.inf
        ).caveats
        advice = advice_for(outcome.plan, outcome.spec) if outcome.plan.chosen else None
        if advice is not None and advice.verdict == "learn alone":
            self.caveats_ = (
                *self.caveats_,
                f"{advice} method='local' trains every client on its own rows and spends nothing",
            )

    def _warn(self, X: Any, targets: NDArray[Any], codes: Integers) -> None:
        """Warn of what epsilon does not cover."""
        if not self.guarantee_.events or self.epsilon_ == np.inf:
            return
        if self.guarantee_.simulation:
            text = (
                f"random_state = {self.random_state!r} makes the noise reproducible: the fit is a "
                "simulation and protects nobody; leave random_state out for a private fit"
            )
            warnings.warn(text, PrivacyWarning, stacklevel=_CALLER)
            self.caveats_ = (*self.caveats_, text)
            return
        sketch = sketch_rows(X, targets, codes, self._ids.names)
        spent = count_fit(sketch, self.epsilon_, self.delta_)
        if spent.fits == 1:
            return
        text = (
            f"fit {spent.fits} of these rows in this process: each spends its own epsilon, "
            f"together up to {round_up(spent.epsilon)} (delta {show_delta(spent.delta)}), and a "
            "choice among fits (GridSearchCV, cross_val_score) is covered by none of them: choose "
            "on public rows"
        )
        if spent.fits == 2:  # warn once; caveats_ goes on counting
            warnings.warn(text, PrivacyWarning, stacklevel=_CALLER)
        self.caveats_ = (*self.caveats_, text)

    def _check_pooled(self, X: Any, targets: NDArray[Any], codes: Integers, method: Method) -> None:
        if self.on_pooled not in ("raise", "warn", "ignore"):
            raise ValueError(
                f"on_pooled = {self.on_pooled!r}: expected 'raise', 'warn' or 'ignore'"
            )
        promises = self.epsilon != np.inf or method.shape is Shape.NONE
        if len(self._ids) == 1 or self.on_pooled == "ignore" or not promises:
            return
        # Standardising per client removes any earlier scaling.
        seen = np.zeros((X.shape[0], 1)) if self._standardises else X
        found = find_pooled(seen, targets if self._kind.task == "regression" else None, codes)
        if found is None:
            return
        if self.on_pooled == "raise":
            raise PooledScalingError(pooled_message(found))
        warnings.warn(pooled_message(found), PrivacyWarning, stacklevel=_CALLER)

    @property
    def _standardises(self) -> bool:
        if self.standardise not in ("none", "client"):
            raise ValueError(f"standardise = {self.standardise!r}: expected 'none' or 'client'")
        return bool(self.standardise == "client")

    def _data(
        self, X: Any, targets: NDArray[Any], codes: Integers, ids: ClientIds
    ) -> FederatedDataset:
        """Return federated data of validated, scaled rows."""
        columns = getattr(self, "feature_names_in_", None)
        data = from_arrays(
            X,
            targets,
            codes,
            task=self._kind.task,
            classes=self._kind.classes,
            names=ids.names,
            columns=None if columns is None else list(columns),
            title="X",
            source=Source(shape=tuple(self.row_shape or ())),
        )
        if self.formula is None:
            return data
        spline = self.formula == "spline"
        effects = Effects(basis="spline") if spline else Effects(formula=self.formula)
        return effects.expand(data)

    # --- predict --------------------------------------------------------------

    def _outputs(self, X: Any, clients: Any) -> Floats:
        """Return the output of each row's own client's model: (rows,) or (rows, outputs)."""
        X, codes = self._rows(X, clients)
        models = self._models
        if (codes < 0).any():
            assert self._common is not None
            shared = {name: leaf.unsqueeze(0) for name, leaf in self._common.items()}
            models = _with_models(models, shared)
            codes = np.where(codes < 0, len(self._ids), codes)
        present, places = np.unique(codes, return_inverse=True)
        blank = np.zeros(X.shape[0], dtype=np.int64)
        data = self._data(X, blank, places, ClientIds(tuple(range(len(present)))))
        chosen = take(models, torch.from_numpy(present))
        return in_given_order(model_outputs(self.plan_.method.model, chosen, data), places)

    def _rows(self, X: Any, clients: Any) -> tuple[Any, Integers]:
        """Return validated, scaled rows and the numbers of their clients (-1 for new ones)."""
        check_is_fitted(self)
        X, clients = self._split_clients(X, clients)
        X = self._validated(X, reset=False)
        codes = self._codes(clients, X.shape[0])
        return X if self._moments is None else scale_rows(X, codes, *self._moments), codes

    def _codes(self, clients: Any, rows: int) -> Integers:
        known: ClientIds = self._ids
        if clients is None and len(known) == 1:
            return np.zeros(rows, dtype=np.int64)
        if clients is None:
            raise ValueError(
                f"clients = None, but there are {len(known)} clients with a model each: give the "
                "client of each row"
            )
        if not self._given and len(known) == 1:
            raise ValueError(
                "clients were given, but not in fit, where all rows belong to one client: leave "
                "clients out, or fit with them"
            )
        labels = read_ids(clients, rows)
        new = known.unknown(labels)
        if new:
            self._check_new(new, known)
        return known.codes(labels)

    def _check_new(self, new: list[Any], known: ClientIds) -> None:
        """Warn of clients without a model, or raise if no shared model can predict for them."""
        listed = ", ".join(repr(label) for label in new[:_NAMED])
        named = f"{listed}{', ...' if len(new) > _NAMED else ''}{known.close(new[0])}"
        if self._moments is not None:
            raise ValueError(
                f"clients {named} did not take part in training: standardise='client' has no means "
                f"of theirs; call onboard with their rows first. {_SPLIT}"
            )
        if self._common is None:
            raise ValueError(
                f"clients {named} did not take part in training, and {self.plan_.method.kind} has "
                "no shared model for them: call onboard with their rows, fit with them, or use a "
                f"method with a shared model, such as pfeb, pmtl or fedavg. {_SPLIT}"
            )
        warnings.warn(
            f"clients {named} did not take part in training: the shared model predicts their rows; "
            f"call onboard with their rows for models of their own. {_SPLIT}",
            NewClientWarning,
            stacklevel=_CALLER + 3,
        )


def _has_text(X: Any) -> bool:
    try:
        check_array(X, accept_sparse=True, dtype=_TYPES, ensure_all_finite=False)
    except ValueError as error:
        return _TEXT_ERROR in str(error)
    return False  # the text is in the targets


def _shared_model(outcome: Outcome, train: FederatedDataset) -> Tree | None:
    """Return the model that all clients share; None if there is none, or only a part of one."""
    method, spec = outcome.plan.method, outcome.spec
    if method.shape is not Shape.SUM or method.serving.fixed_membership:
        return None
    leaves = method.model.init(spec, Rng.seeded(0)).keys()
    if set(shared_leaves(method, spec)) != set(leaves):
        return None
    found = method.serving.shared_model(to(outcome.shared, "cpu"), train.clients(np.arange(1)))
    return {name: found[name] for name in leaves}


def _with_models(models: Tree, more: Tree) -> Tree:
    return {
        name: torch.cat([leaf, more[name].to(leaf.dtype).reshape(-1, *leaf.shape[1:])])
        for name, leaf in models.items()
    }


def in_given_order(by_client: torch.Tensor, owners: Integers) -> Floats:
    """Return values that are sorted by client in the order of the given rows."""
    found = np.empty(by_client.shape, dtype=np.float64)
    found[np.argsort(owners, kind="stable")] = by_client.numpy()
    return found


# --- arguments ----------------------------------------------------------------


def method_of(method: Any, model: Any, settings: Mapping[str, Any] | None) -> Method:
    """Return the method of a name or a value; raise ValueError for unknown names or settings."""
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"method_settings = {settings!r}: expected settings by name, or None")
    given = dict(settings or {})
    if model is not None:
        given["model"] = _model_of(model)
    if isinstance(method, str):
        return _named_method(method, given)
    if not isinstance(method, Method):
        raise ValueError(
            f"method = {method!r}: expected a name such as 'auto' or 'pmtl', or a method such as "
            "coterie.PMTL(lam=0.3)"
        )
    _check_settings(method.kind, type(method), given)
    return replace(method, **given) if given else method  # type: ignore[type-var]


def _named_method(name: str, given: dict[str, Any]) -> Method:
    known = choices()
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=3)
        hint = f" (close: {', '.join(close)})" if close else ""
        raise ValueError(f"method = {name!r}: expected one of {', '.join(sorted(known))}{hint}")
    _check_settings(name, known[name], given)
    objects = {key: value for key, value in given.items() if _is_object(value)}
    plain = {key: value for key, value in given.items() if key not in objects}
    made = from_table(Method, {"kind": name, **plain}, "method")  # type: ignore[type-abstract]
    return replace(made, **objects) if objects else made  # type: ignore[type-var]


def _check_settings(name: str, kind: type[Method], given: Mapping[str, Any]) -> None:
    settings = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(given) - settings - {"model"})
    if unknown and kind is Auto:
        raise ValueError(
            f"method_settings has {unknown[0]!r}, but no method is named: auto selects one by rule "
            "and has no settings but the model; name the method"
        )
    if unknown:
        raise ValueError(
            f"method_settings has {unknown[0]!r}, which {name} does not know: expected one of "
            f"{', '.join(sorted(settings))}"
        )


def _is_object(value: Any) -> bool:
    """Return whether a value is an object, and not a plain value as in a TOML plan."""
    plain = isinstance(value, str | int | float | bool | Mapping | list | tuple | None)
    return not plain or is_dataclass(value)


def _model_of(model: Any) -> Any:
    if not isinstance(model, str):
        return model
    known = Model.choices()
    if model not in known:
        raise ValueError(f"model = {model!r}: expected one of {', '.join(sorted(known))}")
    return known[model]()


def _sampler_of(cohort: Any) -> Sampler | None:
    if cohort is None or isinstance(cohort, Sampler):
        return cohort
    if isinstance(cohort, int | float | np.number) and not isinstance(cohort, bool):
        return Poisson(cohort=float(cohort))
    raise ValueError(
        f"cohort = {cohort!r}: expected the expected number of clients in a round, a sampler such "
        "as coterie.FixedSize(20), or None for full participation"
    )


def _seed_of(random_state: Any) -> int | None:
    if random_state is None:
        return None
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(np.iinfo(np.int32).max))
    whole = isinstance(random_state, int | np.integer) and not isinstance(random_state, bool)
    if whole and random_state >= 0:
        return int(random_state)
    raise ValueError(
        f"random_state = {random_state!r}: expected None for private noise, or an integer >= 0 for "
        "a simulation, which protects nobody"
    )


# --- repeated fits ------------------------------------------------------------

_KEPT_HASHES = 64  # of a fit
_KEPT_SETS = 256  # sets of rows
_IN_COMMON = 2  # a row of zeros may belong to any set


@dataclass(frozen=True)
class FitsSpent:
    """The sum of what private fits of the same rows have spent."""

    fits: int = 0
    epsilon: float = 0.0
    delta: float = 0.0

    def __add__(self, other: "FitsSpent") -> "FitsSpent":
        return FitsSpent(
            self.fits + other.fits, self.epsilon + other.epsilon, self.delta + other.delta
        )


_PAST_FITS: dict[frozenset[int], FitsSpent] = {}
"""By the sketch of their rows, the oldest first; in the memory of this process only."""


def count_fit(sketch: frozenset[int], epsilon: float, delta: float) -> FitsSpent:
    """Record a private fit; return what all fits of this process with common rows have spent.

    `GridSearchCV` and `cross_val_score` fit the same clients repeatedly, and no fit's epsilon
    covers a choice among fits. Beyond 256 sets of rows the two oldest are merged, so a total may be
    too large, but never too small. Rows are not recognised in another process; nor if a step of a
    pipeline changed the features and targets are classes; nor if fewer than two hashes agree.
    """
    least = min(_IN_COMMON, len(sketch))
    _PAST_FITS[sketch] = _PAST_FITS.get(sketch, FitsSpent()) + FitsSpent(1, epsilon, delta)
    while len(_PAST_FITS) > _KEPT_SETS:
        first, second = list(_PAST_FITS)[:2]
        merged = {first | second: _PAST_FITS.pop(first) + _PAST_FITS.pop(second)}
        for known, spent in _PAST_FITS.items():
            merged[known] = merged.get(known, FitsSpent()) + spent
        _PAST_FITS.clear()
        _PAST_FITS.update(merged)
    shared = [spent for known, spent in _PAST_FITS.items() if len(known & sketch) >= least]
    return sum(shared, FitsSpent())


def sketch_rows(X: Any, y: NDArray[Any], codes: Integers, names: Sequence[str]) -> frozenset[int]:
    """Return the least hashes of rows (Broder 1997): sets with many common rows share some.

    If targets distinguish rows, hashes of targets by client are added: they stay the same if a
    step of a pipeline changes the features.
    """
    found = _least(_row_hashes(X, y))
    if 2 * len(np.unique(y)) <= len(y):
        return found
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    owners = np.array([int.from_bytes(one, "little") for one in digests], dtype=np.uint64)
    return found | _least(_mixed(_mixed(_bits(y)) + owners[codes]))


def _least(hashes: Hashes) -> frozenset[int]:
    return frozenset(np.unique(hashes)[:_KEPT_HASHES].tolist())


def _row_hashes(X: Any, y: NDArray[Any]) -> Hashes:
    """Return a hash of each row with its target; equal rows have equal hashes."""
    width = int(np.prod(X.shape[1:]))
    factors = _mixed(np.arange(1, width + 2, dtype=np.uint64)) | np.uint64(1)
    if sparse.issparse(X):
        terms = _bits(X.data) * factors[X.indices]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
        rows = sums[X.indptr[1:]] - sums[X.indptr[:-1]]
    else:
        rows = (_bits(X).reshape(len(X), width) * factors[:width]).sum(axis=1, dtype=np.uint64)
    return _mixed(rows + _bits(y) * factors[width])


def _bits(values: NDArray[Any]) -> Hashes:
    # Adding 0.0 turns -0.0 into 0.0.
    return np.ascontiguousarray(np.asarray(values, dtype=np.float64) + 0.0).view(np.uint64)


def _mixed(bits: Hashes) -> Hashes:
    """Return mixed bits (the finaliser of SplitMix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = bits ^ (bits >> np.uint64(31))
    return mixed
