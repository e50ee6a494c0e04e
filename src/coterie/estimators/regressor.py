"""CoterieRegressor: one regressor per client, with a stated epsilon."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from coterie.estimators.base import Federated, Targets, in_given_order
from coterie.estimators.scalers import Floats
from coterie.serve.predict import model_std


class CoterieRegressor(RegressorMixin, Federated):  # type: ignore[misc]
    """A regressor with one model per client, trained together under differential privacy.

    All other arguments and attributes are those of `CoterieClassifier`.

    Args:
        target_center: A public constant that is subtracted from y, and added to predictions.
        target_scale: A public constant that divides y; clipping norms assume targets of size 1.
    """

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
        target_center: float = 0.0,
        target_scale: float = 1.0,
        standardise: str = "none",
        formula: str | None = None,
        on_pooled: str = "raise",
        client_column: Any = None,
        row_shape: tuple[int, ...] | None = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self._store(locals())

    def predict(
        self, X: Any, clients: Any = None, return_std: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Return the prediction for each row, by its own client's model.

        With `return_std` also the predictive standard deviation of each row, including residual
        noise, if the method has it (pfeb; others raise NotImplementedError). About 90 % of targets
        are within prediction +- 1.645 std. Needs the training rows, which no pickle holds.
        """
        values: Floats = self._outputs(X, clients) * self.target_scale + self.target_center
        if not return_std:
            return values
        return values, self._std(X, clients) * self.target_scale

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Return R^2 over all rows. Not private."""
        return float(r2_score(y, self.predict(X, clients), sample_weight=sample_weight))

    def _std(self, X: Any, clients: Any) -> Floats:
        train = getattr(self, "_train", None)
        if train is None:
            raise ValueError(
                "return_std = True needs the training rows, and a pickle does not hold them: fit "
                "again"
            )
        rows, codes = self._rows(X, clients)
        if (codes < 0).any() or codes.max() >= len(train):
            raise ValueError(
                "return_std = True is for clients of the training: leave rows of new clients out"
            )
        blank = np.zeros(rows.shape[0])
        # The same numbers as in training: uncertainty depends on a client's own training rows.
        data = self._data(rows, blank, codes, self._trained)
        places = np.arange(len(data))
        return in_given_order(
            model_std(self.plan_.method, self._shared, train, data, places), codes
        )

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
