"""CoterieClassifier: one classifier per client, with a stated epsilon."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from coterie.estimators.base import Federated, Targets, method_of
from coterie.methods.svm import Machines

_LISTED = 8  # classes named in a message


def _has_odds(estimator: "CoterieClassifier") -> bool:
    """Return whether outputs are log-odds; those of support vector machines are not."""
    try:
        method = method_of(estimator.method, estimator.model, estimator.method_settings)
    except ValueError:  # fit raises it
        return True
    if isinstance(method, Machines):
        raise AttributeError(
            f"{method.kind} has no probabilities: its outputs are distances from a margin; use "
            "decision_function, or another method"
        )
    return True


class CoterieClassifier(ClassifierMixin, Federated):  # type: ignore[misc]
    """A classifier with one model per client, trained together under differential privacy.

    The arguments have the meaning of those of a plan (`coterie.Privacy`, `coterie.Plan`). Without
    clients (or with one) nothing is released: the fit is local, and `epsilon_` is 0.

    Args:
        method: A registered name, "auto" to select one by rule, or a method such as
            `coterie.PMTL(lam=0.3)`.
        model: The model of every client: a name such as "linear" or "mlp", a model, a torch module
            or a function that makes one; None for the method's default.
        method_settings: Settings of the method by name; `set_params(method__lam=0.3)` sets one.
        epsilon: The budget; infinity for none. None if `noise_multiplier` is given.
        delta: None for min(1e-5, 1 / (10 clients)).
        relation: "zero_out" or "replace".
        noise_multiplier: Noise in units of the clipping norm, instead of epsilon.
        clip: The clipping norm; None for the method's default.
        noise: The kind of noise by name, or a value.
        rounds: None to select them by rule.
        cohort: The expected number of clients in a round, or a sampler; None for full
            participation.
        classes: The classes, declared. Without them they are read from y, which counts as public
            knowledge, and `guarantee_.assumed` states it.
        standardise: "client" standardises each client's features by its own rows; "none".
        formula: Fixed and random effects over columns of X, such as "~ bs(age, 5) + sex * stay +
            (1 + age | client)" (`coterie.data.effects`), after all scaling; "spline" makes it by
            rule. Columns without names are x0, x1, ... Where X is a frame, the client column of the
            formula holds the clients, and its target is no feature.
        on_pooled: What to do with rows that were scaled by statistics of all clients together:
            "raise", "warn" or "ignore".
        client_column: The column of X that holds each row's client, by name (of frames) or index,
            instead of `clients`: for tools that do not pass `clients`.
        row_shape: The shape of a row that is an image, such as (28, 28).
        random_state: None for noise from the operating system. A number makes the fit a
            reproducible simulation that protects nobody.
        device: "cpu" or "cuda".

    Attributes:
        classes_: The classes.
        clients_: Ids of the clients with models.
        epsilon_: The epsilon of the fit against the other clients.
        delta_: Its delta.
        guarantee_: The complete guarantee: relation, views, assumptions, whether it is a
            simulation.
        caveats_: Sentences that qualify it.
        plan_: The resolved plan.
        outcome_: The run; not part of a pickle.
        n_features_in_: Number of columns of X.
        feature_names_in_: Their names, if X has them.
    """

    __metadata_request__predict_proba: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__predict_log_proba: ClassVar[dict[str, bool]] = {"clients": True}
    __metadata_request__decision_function: ClassVar[dict[str, bool]] = {"clients": True}

    def __init__(  # noqa: PLR0913  (scikit-learn needs one parameter per setting)
        self,
        method: Any = "auto",
        *,
        model: Any = None,
        method_settings: Mapping[str, Any] | None = None,
        epsilon: float | None = 1.0,
        delta: float | None = None,
        relation: str = "zero_out",
        noise_multiplier: float | None = None,
        clip: float | None = None,
        noise: Any = "gaussian",
        rounds: int | None = None,
        cohort: Any = None,
        classes: Sequence[Any] | None = None,
        standardise: str = "none",
        formula: str | None = None,
        on_pooled: str = "raise",
        client_column: Any = None,
        row_shape: tuple[int, ...] | None = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self._store(locals())

    def predict(self, X: Any, clients: Any = None) -> NDArray[Any]:
        """Return the class of each row, by its own client's model."""
        outputs = self._outputs(X, clients)
        chosen = (outputs > 0).astype(int) if outputs.ndim == 1 else outputs.argmax(axis=1)
        found: NDArray[Any] = self.classes_[chosen]
        return found

    def decision_function(self, X: Any, clients: Any = None) -> NDArray[np.float64]:
        """Return scores: (rows,) for two classes (positive for the second), else (rows, k)."""
        return self._outputs(X, clients)

    @available_if(_has_odds)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, clients: Any = None) -> NDArray[np.float64]:
        """Return the probability of each class, (rows, classes): logistic or softmax of the scores.

        They are only as calibrated as the loss of the method makes them.
        """
        return self._probabilities(self._outputs(X, clients))

    @available_if(_has_odds)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any, clients: Any = None) -> NDArray[np.float64]:
        """Return the logarithms of the probabilities."""
        with np.errstate(divide="ignore"):
            return np.log(self._probabilities(self._outputs(X, clients)))

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy over all rows. Not private."""
        predicted = self.predict(X, clients)
        return float(accuracy_score(y, predicted, sample_weight=sample_weight))

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, NDArray[Any]]:
        X, y = self._validated(X, y=y, reset=reset)
        if reset:
            check_classification_targets(y)
            self.classes_ = self._classes_of(y)
        return X, self._numbers(y)

    def _targets(self) -> Targets:
        several = len(self.classes_) > 2
        return Targets("multiclass" if several else "binary", len(self.classes_), self._assumed())

    def _classes_of(self, y: NDArray[Any]) -> NDArray[Any]:
        found = np.unique(y if self.classes is None else np.asarray(self.classes))
        if len(found) < 2:
            where = "y" if self.classes is None else "classes"
            raise ValueError(
                f"{where} has one class, {found.tolist()}: expected at least two; declare classes= "
                "if y has rows of one class only"
            )
        return found

    def _assumed(self) -> tuple[str, ...]:
        if self.classes is not None:
            return ()
        named = ", ".join(str(one) for one in self.classes_[:_LISTED])
        more = f", ... ({len(self.classes_)} in all)" if len(self.classes_) > _LISTED else ""
        return (
            f"classes taken from the labels of y ({named}{more}): declare classes= to make this "
            "public knowledge explicit",
        )

    def _numbers(self, y: Any) -> NDArray[np.int64]:
        y = column_or_1d(y)
        places = np.searchsorted(self.classes_, y)
        places = np.clip(places, 0, len(self.classes_) - 1)
        wrong = np.flatnonzero(self.classes_[places] != y)
        if len(wrong):
            raise ValueError(
                f"y: row {wrong[0]} (from 0) has the class {y[wrong[0]]!r}, which is not among the "
                f"declared classes {self.classes_.tolist()[:_LISTED]}; declare it, or correct y"
            )
        numbers: NDArray[np.int64] = places.astype(np.int64)
        return numbers

    def _probabilities(self, outputs: NDArray[np.float64]) -> NDArray[np.float64]:
        if outputs.ndim > 1:
            return np.asarray(softmax(outputs, axis=1))
        return np.column_stack([expit(-outputs), expit(outputs)])
