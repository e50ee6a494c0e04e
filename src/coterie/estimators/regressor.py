"""CoterieRegressor: numbers to predict, one model per client, with a stated epsilon."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from coterie.estimators.answers import deviations
from coterie.estimators.base import Federated, Targets

Floats = NDArray[np.float64]


class CoterieRegressor(RegressorMixin, Federated):  # type: ignore[misc]
    """A regressor with one model per client, learnt together under differential privacy.

    The arguments are those of a plan (`coterie.Privacy`, `coterie.Plan`), and mean what they mean
    there. Without clients (or with one) nothing is released: the rows learn alone, `epsilon_` is 0.

    Args:
        method: A registered name, "auto" to have one picked by rule, or a method such as
            `coterie.PMTL(lam=0.3)`.
        model: The model of every client: a name such as "linear" or "mlp", a model, a torch module
            or what makes one; None for the method's usual one.
        method_settings: Settings of the method by name; `set_params(method__lam=0.3)` sets one.
        epsilon: The budget; infinity for none. None where `noise_multiplier` is given.
        delta: None for min(1e-5, 1 / (10 clients)).
        relation: "zero_out" or "replace".
        noise_multiplier: Noise in units of the clip, instead of epsilon.
        clip: None for the method's usual one.
        noise: The kind of noise by name, or a value.
        rounds: None for as many as the rule takes.
        cohort: The expected number of clients in a round, or a sampler; None for everyone.
        target_center: A public constant that is subtracted from y, and added to predictions.
        target_scale: A public constant that y is divided by; clips are made for size 1.
        standardise: "client" scales each client's features by its own rows; "none".
        on_pooled: What to do with rows that were scaled by statistics of all clients together:
            "raise", "warn" or "ignore".
        client_column: The column of X that holds each row's client, by name (of frames) or place,
            instead of `clients`: for tools that know nothing of clients.
        row_shape: The shape of a row whose columns are an image, (28, 28) say.
        random_state: None for noise from the operating system. A number makes the fit a
            simulation: reproducible, and protecting nobody.
        device: "cpu" or "cuda".

    Attributes:
        clients_: Ids of the clients with models.
        epsilon_: What the fit spent, in the view of the other clients.
        delta_: At this delta.
        guarantee_: All of it: relation, views, what was assumed, whether it is a simulation.
        caveats_: What must be read beside it, in sentences.
        plan_: The plan, with what rules filled in.
        outcome_: The run; not part of a pickle.
        n_features_in_: Columns of X.
        feature_names_in_: Their names, where X has them.
    """

    def __init__(  # noqa: PLR0913  (settings are named one by one, as scikit-learn has them)
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
        target_center: float = 0.0,
        target_scale: float = 1.0,
        standardise: str = "none",
        on_pooled: str = "raise",
        client_column: Any = None,
        row_shape: tuple[int, ...] | None = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.method = method
        self.model = model
        self.method_settings = method_settings
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.noise_multiplier = noise_multiplier
        self.clip = clip
        self.noise = noise
        self.rounds = rounds
        self.cohort = cohort
        self.target_center = target_center
        self.target_scale = target_scale
        self.standardise = standardise
        self.on_pooled = on_pooled
        self.client_column = client_column
        self.row_shape = row_shape
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any, clients: Any = None, **refused: Any) -> "CoterieRegressor":
        """Learn one model per client.

        Args:
            X: Rows, dense or sparse.
            y: A number for each row.
            clients: The id of each row's client, any hashable value; None for one client.
            refused: `sample_weight` is refused with a reason.
        """
        self._learn(X, y, clients, refused)
        return self

    def predict(
        self, X: Any, clients: Any = None, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Return the number for each row, by its own client's model.

        Args:
            X: Rows.
            clients: The client of each row; None where there is one client.
            return_std: Also give the standard deviation of each outcome, residual noise included,
                of methods that know it (pfeb). An interval that holds about 90 % of outcomes is
                prediction +- 1.645 std. Needs the training rows, which are not part of a pickle.

        Raises:
            NotImplementedError: If the method has no uncertainties.
        """
        values = self._outputs(X, clients) * self.target_scale + self.target_center
        if not return_std:
            return values
        return values, self._deviations(X, clients) * self.target_scale

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Return R^2 over all rows. Not private."""
        return float(r2_score(y, self.predict(X, clients), sample_weight=sample_weight))

    def _deviations(self, X: Any, clients: Any) -> Floats:
        train = getattr(self, "_train", None)
        if train is None:
            raise ValueError(
                "return_std = True needs the rows that were trained with, and a pickle does not "
                "hold them: fit again"
            )
        rows, codes = self._rows(X, clients)
        if (codes < 0).any() or codes.max() >= len(train):
            raise ValueError(
                "return_std = True is for clients that were trained with: leave newcomers' rows out"
            )
        blank = np.zeros(rows.shape[0])
        # The same numbers as in training: uncertainty is of a client's own training rows.
        data = self._data(rows, blank, codes, self._trained)
        return deviations(self.plan_.method, self._shared, train, data, codes)

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, NDArray[Any]]:
        center, scale = self.target_center, self.target_scale
        if not (np.isfinite(center) and np.isfinite(scale) and scale > 0):
            raise ValueError(
                f"target_center = {center}, target_scale = {scale}: expected a number and a "
                "positive number"
            )
        X, y = self._validated(X, y=y, y_numeric=True, reset=reset)
        return X, (np.asarray(y, dtype=np.float64) - center) / scale

    def _targets(self) -> Targets:
        return Targets("regression")
