"""The scikit-learn face: estimators whose rows belong to clients, and scaling that pools nothing.

`CoterieClassifier` and `CoterieRegressor` are a plan, a run and its models behind `fit` and
`predict`; what scikit-learn does not know, whose row a row is, comes as `clients=`. `epsilon_` and
`guarantee_` state what a fit cost in privacy. Needs the extra `sklearn`.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:  # pragma: no cover - the tests' environment has it
    raise ImportError(
        "the estimators of coterie need scikit-learn, which is not installed: "
        "pip install 'coterie[sklearn]'"
    ) from error

from coterie.estimators.classifier import CoterieClassifier
from coterie.estimators.pipelines import check_pipeline
from coterie.estimators.pooled import PooledScalingError
from coterie.estimators.regressor import CoterieRegressor
from coterie.estimators.scalers import ConstantScaler, PerClientScaler
from coterie.estimators.signals import NewClientWarning, PrivacyWarning

__all__ = [
    "ConstantScaler",
    "CoterieClassifier",
    "CoterieRegressor",
    "NewClientWarning",
    "PerClientScaler",
    "PooledScalingError",
    "PrivacyWarning",
    "check_pipeline",
]
