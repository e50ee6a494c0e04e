"""scikit-learn estimators with one model per client, and scalers that pool nothing.

`CoterieClassifier` and `CoterieRegressor` plan and run a method in `fit`; `clients=` holds the id
of each row's client. `epsilon_` and `guarantee_` state the privacy cost of a fit. Needs the extra
`sklearn`.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:  # pragma: no cover - the tests' environment has it
    raise ImportError(
        "the estimators of coterie need scikit-learn, which is not installed: "
        "pip install 'coterie[sklearn]'"
    ) from error

from coterie.estimators.base import NewClientWarning, PrivacyWarning
from coterie.estimators.classifier import CoterieClassifier
from coterie.estimators.regressor import CoterieRegressor
from coterie.estimators.scalers import (
    ConstantScaler,
    PerClientScaler,
    PooledScalingError,
    WithinClientKFold,
    check_pipeline,
)

__all__ = [
    "ConstantScaler",
    "CoterieClassifier",
    "CoterieRegressor",
    "NewClientWarning",
    "PerClientScaler",
    "PooledScalingError",
    "PrivacyWarning",
    "WithinClientKFold",
    "check_pipeline",
]
