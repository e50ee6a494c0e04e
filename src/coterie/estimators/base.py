"""What both estimators share: rows of named clients in, a plan, a run, and models by client out."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from coterie.data.config import Source
from coterie.data.federated import DataError, FederatedDataset, Spec, Task
from coterie.data.load import from_arrays
from coterie.engines.outcome import Outcome, join_shared
from coterie.engines.simulate import Speed, simulate
from coterie.estimators.answers import common_model, outputs, with_model
from coterie.estimators.numbering import Numbering, labels_of, number, split_column
from coterie.estimators.pooled import PooledScalingError, explain, find_pooled
from coterie.estimators.repeats import Rows, remember
from coterie.estimators.scalers import own_constants, scaled
from coterie.estimators.settings import alone_of, method_of, sampler_of, seed_of
from coterie.estimators.signals import NewClientWarning, PrivacyWarning
from coterie.methods.base import Method, Shape
from coterie.plan import Privacy
from coterie.rules import plan_for
from coterie.tree import Tree, take, to

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
_TYPES = (np.float64, np.float32)
_CALLER = 5  # frames between a warning and the call of fit
_UNPICKLED = ("outcome_", "_train")
"""Held in memory alone: the run with its open ends, and rows of clients."""
_NESTED = "method__"
_NOT_A_NUMBER = "could not convert string to float"
_NAMED = 3  # clients named in a message
NO_WEIGHTS = (
    "sample_weight is not supported: bounds on a client's contribution, and so epsilon, are of "
    "whole clients, and every row of a client counts alike; leave it out"
)


@dataclass(frozen=True)
class Targets:
    """What the targets are: the task, its classes, and what of it was read off the rows."""

    task: Task
    classes: int | None = None
    assumed: tuple[str, ...] = ()


def _has_text(X: Any) -> bool:
    try:
        check_array(X, accept_sparse=True, dtype=_TYPES, ensure_all_finite=False)
    except ValueError as error:
        return _NOT_A_NUMBER in str(error)
    return False  # the targets have it


class Federated(BaseEstimator):  # type: ignore[misc]
    """An estimator with one model per client; see `CoterieClassifier` and `CoterieRegressor`."""

    __metadata_request__fit: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__predict: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__score: ClassVar[dict[str, bool]] = {"clients": True}

    method_settings: Mapping[str, Any] | None
    _constants: tuple[Floats, Floats] | None
    _models: Tree
    _numbering: Numbering
    _shared: Tree
    _spec: Spec

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings; deep, those in `method_settings` also as `method__name`."""
        found: dict[str, Any] = super().get_params(deep=deep)
        given = self.method_settings
        if deep and isinstance(given, Mapping):
            found |= {f"{_NESTED}{key}": value for key, value in given.items()}
        return found

    def set_params(self, **params: Any) -> "Federated":
        """Set parameters; `method__name` is one of `method_settings`."""
        nested = {key: params.pop(key) for key in list(params) if key.startswith(_NESTED)}
        super().set_params(**params)
        if nested:
            added = {key.removeprefix(_NESTED): value for key, value in nested.items()}
            self.method_settings = {**(self.method_settings or {}), **added}
        return self

    def join(self, X: Any, y: Any, clients: Any = None) -> "Federated":
        """Let clients join who come after training: each fits its own part to its own rows.

        Nothing of theirs is posted, so it costs nobody anything, and `epsilon_` stays as it is.

        Args:
            X: Rows of the newcomers.
            y: Their targets.
            clients: The id of each row's client, unless a column of X holds them; none may have
                been trained with.

        Raises:
            ValueError: If a client is known already, or the method cannot be joined.
        """
        check_is_fitted(self)
        X, clients = self._apart(X, clients)
        X, targets = self._checked(X, y, reset=False)
        labels = labels_of(clients, X.shape[0])
        coming = number(labels)
        known = [label for label in coming.ids if label in self._numbering.places]
        if known:
            raise ValueError(
                f"client {known[0]!r} has a model already: give newcomers' rows alone, or fit again"
            )
        codes = coming.codes(labels)
        if self._constants is not None:
            own = own_constants(X, codes)
            X = scaled(X, codes, *own)
            pairs = zip(self._constants, own, strict=True)
            center, scale = (np.concatenate(pair) for pair in pairs)
        data = self._data(X, targets, codes, coming)
        method, seed = self.plan_.method, self.plan_.simulation_seed
        models = to(join_shared(method, self._shared, self._spec, data, seed), "cpu")
        self._models = {
            name: torch.cat([leaf, models[name].to(leaf.dtype)])
            for name, leaf in self._models.items()
        }
        if self._constants is not None:
            self._constants = center, scale
        self._numbering = Numbering((*self._numbering.ids, *coming.ids))
        self.clients_ = self._numbering.array
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {key: value for key, value in state.items() if key not in _UNPICKLED}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _apart(self, X: Any, clients: Any) -> tuple[Any, Any]:
        """Take the clients from the column of X that holds them, where one does."""
        if self.client_column is None:
            return X, clients
        if clients is not None:
            raise ValueError(
                f"clients were given, and client_column = {self.client_column!r} too: give one of "
                "them"
            )
        return split_column(X, self.client_column)

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, NDArray[Any]]:
        """Validate rows and targets, and give targets as `FederatedDataset` holds them."""
        raise NotImplementedError

    def _targets(self) -> Targets:
        """Say what the targets are, once they are checked."""
        raise NotImplementedError

    def _validated(self, X: Any, **how: Any) -> Any:
        """Validate rows as scikit-learn does; say where ids of clients belong."""
        try:
            return validate_data(self, X, accept_sparse="csr", dtype=_TYPES, **how)
        except ValueError as error:
            if _NOT_A_NUMBER not in str(error) or not _has_text(X):
                raise
            raise ValueError(
                f"X holds text, expected numbers: {error}; if a column holds the clients' ids, "
                "give them as clients= or name it by client_column=, and turn other text into "
                "numbers first"
            ) from error

    def _learn(self, X: Any, y: Any, clients: Any, refused: Mapping[str, Any]) -> None:
        """Validate, plan and run: what `fit` does."""
        if refused:
            raise TypeError(
                NO_WEIGHTS if "sample_weight" in refused else f"fit does not know {list(refused)}"
            )
        X, clients = self._apart(X, clients)
        X, targets = self._checked(X, y, reset=True)
        self._fit(X, targets, clients, self._targets())

    def _fit(self, X: Any, targets: NDArray[Any], clients: Any, kind: Targets) -> None:
        """Plan and run on validated rows."""
        labels = [None] * X.shape[0] if clients is None else labels_of(clients, X.shape[0])
        self._given, self._kind = clients is not None, kind
        self._numbering = number(labels)
        codes = self._numbering.codes(labels)
        method = method_of(self.method, self.model, self.method_settings)
        self._check_pooled(X, targets, codes, method)
        self._constants = own_constants(X, codes) if self._standardises else None
        rows = X if self._constants is None else scaled(X, codes, *self._constants)
        train = self._data(rows, targets, codes, self._numbering)
        train = replace(train, assumed=kind.assumed)
        self._keep(self._run(method, train), train)
        self._warn(Rows(X, targets, codes, self._numbering.names))

    def _run(self, method: Method, train: FederatedDataset) -> Outcome:
        alone = len(train) == 1
        plan = plan_for(
            train.spec,
            self._privacy,
            method=alone_of(method) if alone else method,
            sampler=None if alone else sampler_of(self.cohort),
            rounds=None if alone else self.rounds,
            simulation_seed=seed_of(self.random_state),
        )
        try:
            return simulate(plan, train, speed=Speed(device=self.device))
        except DataError as error:
            ways = (
                "; of an estimator: standardise='client', PerClientScaler or ConstantScaler for X, "
                "target_center and target_scale for y"
            )
            size = f" (n_samples = {len(train.targets)}, clients = {len(train)})"
            raise DataError(f"{error}{ways if 'unit size' in str(error) else size}") from error

    @property
    def _privacy(self) -> Privacy:
        return Privacy(
            epsilon=None if self.epsilon is None else float(self.epsilon),
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            relation=self.relation,
            clip=self.clip,
            noise=self.noise,
        )

    def _keep(self, outcome: Outcome, train: FederatedDataset) -> None:
        """Keep what predictions need beside the run itself."""
        method, guarantee = outcome.plan.method, outcome.guarantee
        self.outcome_, self._train = outcome, train
        self.plan_, self.guarantee_ = outcome.plan, guarantee
        self.epsilon_ = guarantee.for_others.epsilon
        self.delta_ = guarantee.delta
        self._trained = self._numbering
        self.clients_ = self._numbering.array
        self._spec = outcome.spec
        self._shared = to(outcome.shared, "cpu")
        self._models = {name: leaf.cpu() for name, leaf in outcome.models.leaves.items()}
        self._common = common_model(outcome, train)
        self.caveats_ = method.caveats(bool(guarantee.events) and self.epsilon_ < np.inf)

    def _warn(self, rows: Rows) -> None:
        """Say what the epsilon of a federation's fit does not cover."""
        if not self.guarantee_.events or self.epsilon_ == np.inf:
            return
        if self.guarantee_.simulation:
            said = (
                f"random_state = {self.random_state!r} makes the noise reproducible: the fit is a "
                "simulation and protects nobody; leave random_state out for a private fit"
            )
            warnings.warn(said, PrivacyWarning, stacklevel=_CALLER)
            self.caveats_ = (*self.caveats_, said)
            return
        spent = remember(rows, self.epsilon_, self.delta_)
        if spent.fits == 1:
            return
        said = (
            f"fit {spent.fits} of these rows in this process: each spends its own epsilon, "
            f"together up to {spent.epsilon:.4g} (delta {spent.delta:.3g}), and a choice among "
            "fits (GridSearchCV, cross_val_score) is covered by none of them: choose on public rows"
        )
        if spent.fits == 2:  # said once; caveats_ goes on counting
            warnings.warn(said, PrivacyWarning, stacklevel=_CALLER)
        self.caveats_ = (*self.caveats_, said)

    def _check_pooled(self, X: Any, targets: NDArray[Any], codes: Whole, method: Method) -> None:
        if self.on_pooled not in ("raise", "warn", "ignore"):
            raise ValueError(
                f"on_pooled = {self.on_pooled!r}: expected 'raise', 'warn' or 'ignore'"
            )
        promises = self.epsilon != np.inf or method.shape is Shape.NONE
        if len(self._numbering) == 1 or self.on_pooled == "ignore" or not promises:
            return
        # What is scaled by own rows afterwards forgets what it was scaled by before.
        seen = np.zeros((X.shape[0], 1)) if self._standardises else X
        found = find_pooled(seen, targets if self._kind.task == "regression" else None, codes)
        if found is None:
            return
        if self.on_pooled == "raise":
            raise PooledScalingError(explain(found))
        warnings.warn(explain(found), PrivacyWarning, stacklevel=_CALLER)

    @property
    def _standardises(self) -> bool:
        if self.standardise not in ("none", "client"):
            raise ValueError(f"standardise = {self.standardise!r}: expected 'none' or 'client'")
        return bool(self.standardise == "client")

    def _data(
        self, X: Any, targets: NDArray[Any], codes: Whole, numbering: Numbering
    ) -> FederatedDataset:
        """Make federated data of validated, scaled rows."""
        columns = getattr(self, "feature_names_in_", None)
        return from_arrays(
            X,
            targets,
            codes,
            task=self._kind.task,
            classes=self._kind.classes,
            names=numbering.names,
            columns=None if columns is None else list(columns),
            title="X",
            source=Source(shape=tuple(self.row_shape or ())),
        )

    def _outputs(self, X: Any, clients: Any) -> NDArray[np.float64]:
        """Return what each row's own client's model says of it: (rows,) or (rows, outputs)."""
        X, codes = self._rows(X, clients)
        models = self._models
        if (codes < 0).any():
            assert self._common is not None
            models = with_model(models, self._common)
            codes = np.where(codes < 0, len(self._numbering), codes)
        present, places = np.unique(codes, return_inverse=True)
        blank = np.zeros(X.shape[0], dtype=np.int64)
        data = self._data(X, blank, places, Numbering(tuple(range(len(present)))))
        chosen = take(models, torch.from_numpy(present))
        return outputs(self.plan_.method.model, chosen, data, places)

    def _rows(self, X: Any, clients: Any) -> tuple[Any, Whole]:
        """Validate rows to predict, number their clients (-1 for new ones) and scale them."""
        check_is_fitted(self)
        X, clients = self._apart(X, clients)
        X = self._validated(X, reset=False)
        codes = self._codes(clients, X.shape[0])
        return X if self._constants is None else scaled(X, codes, *self._constants), codes

    def _codes(self, clients: Any, rows: int) -> Whole:
        known: Numbering = self._numbering
        if clients is None and len(known) == 1:
            return np.zeros(rows, dtype=np.int64)
        if clients is None:
            raise ValueError(
                f"clients = None, but there are {len(known)} clients with a model each: give the "
                "client of each row"
            )
        if not self._given and len(known) == 1:
            raise ValueError(
                "clients were given, but the fit was without: all its rows were one client's; "
                "leave clients out, or fit with them"
            )
        labels = labels_of(clients, rows)
        new = known.unknown(labels)
        if new:
            self._meet(new, known)
        return known.codes(labels)

    def _meet(self, new: list[Any], known: Numbering) -> None:
        """Warn of clients without a model of their own, or refuse them."""
        listed = ", ".join(repr(label) for label in new[:_NAMED])
        named = f"{listed}{', ...' if len(new) > _NAMED else ''}{known.close(new[0])}"
        kind = self.plan_.method.kind
        if self._constants is not None:
            raise ValueError(
                f"clients {named} were not trained with: standardise='client' knows no constants "
                "of theirs; call join with rows of theirs first"
            )
        if self._common is None:
            raise ValueError(
                f"clients {named} were not trained with, and {kind} has no shared model to answer "
                "for them: call join with rows of theirs, fit with them, or use a method with a "
                "shared model, such as pfeb, pmtl or fedavg"
            )
        warnings.warn(
            f"clients {named} were not trained with: their rows are answered by the shared model; "
            "call join with rows of theirs for models of their own",
            NewClientWarning,
            stacklevel=_CALLER + 1,
        )
