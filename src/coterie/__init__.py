"""Private federated multi-task learning: one model per client, and an epsilon that is true.

Names are loaded on first use, so that planning a budget does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "FederatedDataset": "coterie.data.federated",
    "DataError": "coterie.data.federated",
    "Source": "coterie.data.config",
    "load": "coterie.data.load",
    "from_arrays": "coterie.data.load",
    "from_targets": "coterie.data.load",
    "standardise_clients": "coterie.data.scaling",
    "apply_constants": "coterie.data.scaling",
    "open_named": "coterie.data.datasets",
    "synthetic": "coterie.data.synthetic",
    "Everyone": "coterie.privacy.sampling",
    "FixedSize": "coterie.privacy.sampling",
    "Poisson": "coterie.privacy.sampling",
    "Guarantee": "coterie.privacy.accounting",
    "Advice": "coterie.plan.advice",
    "advise": "coterie.plan.advice",
    "plan_for": "coterie.plan.rules",
    "Plan": "coterie.plan.plan",
    "Privacy": "coterie.plan.plan",
    "Speed": "coterie.engine.simulate",
    "simulate": "coterie.engine.simulate",
    "evaluate": "coterie.evaluation.score",
    "decision_function": "coterie.evaluation.predict",
    "predict": "coterie.evaluation.predict",
    "SGD": "coterie.solvers.sgd",
    "Linear": "coterie.models",
    "MLP": "coterie.models",
    "CNN": "coterie.models",
    "Module": "coterie.models",
    "Method": "coterie.methods.base",
    "register": "coterie.methods.base",
    "Post": "coterie.privacy.billboard",
    "Clients": "coterie.data.federated",
    "Spec": "coterie.data.federated",
    "Tree": "coterie.core.tree",
    "Auto": "coterie.methods.auto",
    "PFEB": "coterie.methods.pfeb",
    "PMTL": "coterie.methods.pmtl",
    "DPFedMTL": "coterie.methods.dpfedmtl",
    "Finetune": "coterie.methods.finetune",
    "FedAvg": "coterie.methods.fedavg",
    "Local": "coterie.methods.local",
    "CoterieClassifier": "coterie.estimators",
    "CoterieRegressor": "coterie.estimators",
    "PerClientScaler": "coterie.estimators",
    "ConstantScaler": "coterie.estimators",
    "check_pipeline": "coterie.estimators",
    "PooledScalingError": "coterie.estimators",
    "PrivacyWarning": "coterie.estimators",
    "NewClientWarning": "coterie.estimators",
}
# Rooms that are spoken of by name, such as coterie.models.replace_batchnorm.
_ROOMS = ("methods", "models")
__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:
    from coterie.data.config import Source as Source
    from coterie.data.datasets import open_named as open_named
    from coterie.data.federated import DataError as DataError
    from coterie.data.federated import FederatedDataset as FederatedDataset
    from coterie.data.load import from_arrays as from_arrays
    from coterie.data.load import from_targets as from_targets
    from coterie.data.load import load as load
    from coterie.data.scaling import apply_constants as apply_constants
    from coterie.data.scaling import standardise_clients as standardise_clients
    from coterie.data.synthetic import synthetic as synthetic
    from coterie.engine.simulate import simulate as simulate
    from coterie.estimators import ConstantScaler as ConstantScaler
    from coterie.estimators import CoterieClassifier as CoterieClassifier
    from coterie.estimators import CoterieRegressor as CoterieRegressor
    from coterie.estimators import NewClientWarning as NewClientWarning
    from coterie.estimators import PerClientScaler as PerClientScaler
    from coterie.estimators import PooledScalingError as PooledScalingError
    from coterie.estimators import PrivacyWarning as PrivacyWarning
    from coterie.estimators import check_pipeline as check_pipeline
    from coterie.evaluation.predict import decision_function as decision_function
    from coterie.evaluation.predict import predict as predict
    from coterie.evaluation.score import evaluate as evaluate
    from coterie.methods.auto import Auto as Auto
    from coterie.methods.base import Method as Method
    from coterie.methods.base import register as register
    from coterie.methods.dpfedmtl import DPFedMTL as DPFedMTL
    from coterie.methods.fedavg import FedAvg as FedAvg
    from coterie.methods.finetune import Finetune as Finetune
    from coterie.methods.local import Local as Local
    from coterie.methods.pfeb import PFEB as PFEB
    from coterie.methods.pmtl import PMTL as PMTL
    from coterie.models import CNN as CNN
    from coterie.models import MLP as MLP
    from coterie.models import Linear as Linear
    from coterie.models import Module as Module
    from coterie.plan.plan import Plan as Plan
    from coterie.plan.plan import Privacy as Privacy
    from coterie.plan.rules import plan_for as plan_for
    from coterie.privacy.guarantee import Guarantee as Guarantee
    from coterie.privacy.sampling import Everyone as Everyone
    from coterie.privacy.sampling import FixedSize as FixedSize
    from coterie.privacy.sampling import Poisson as Poisson
    from coterie.solvers.sgd import SGD as SGD


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"coterie.{name}")
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")
