"""Private federated multi-task learning: one model per client, and an epsilon that is true.

Names are loaded on first use, so that planning a budget does not load torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# No dependency of this project may phone home because of it.
TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SCARF_NO_ANALYTICS": "true",
}
for _name, _value in TELEMETRY_OFF.items():
    os.environ.setdefault(_name, _value)
if os.environ.get("COTERIE_OFFLINE", "") not in ("", "0"):
    importlib.import_module("coterie.offline").go_offline()

__version__ = "0.1.0"

_HOMES = {
    "FederatedDataset": "coterie.data.federated",
    "DataError": "coterie.data.federated",
    "Source": "coterie.data.source",
    "load": "coterie.data.formats",
    "from_arrays": "coterie.data.formats",
    "from_targets": "coterie.data.formats",
    "standardise_clients": "coterie.data.scaling",
    "apply_constants": "coterie.data.scaling",
    "open_named": "coterie.data.catalogue",
    "synthetic": "coterie.data.synthetic",
    "Everyone": "coterie.privacy.sampling",
    "FixedSize": "coterie.privacy.sampling",
    "Poisson": "coterie.privacy.sampling",
    "Guarantee": "coterie.privacy.accounting",
    "Advice": "coterie.advice",
    "advise": "coterie.advice",
    "plan_for": "coterie.rules",
    "Plan": "coterie.plan",
    "Privacy": "coterie.plan",
    "Speed": "coterie.engines.simulate",
    "simulate": "coterie.engines.simulate",
    "evaluate": "coterie.evaluation.score",
    "decision_function": "coterie.evaluation.predict",
    "predict": "coterie.evaluation.predict",
    "SGD": "coterie.solvers.sgd",
    "Linear": "coterie.models",
    "MLP": "coterie.models",
    "CNN": "coterie.models",
    "Module": "coterie.models",
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
    from coterie.advice import Advice as Advice
    from coterie.advice import advise as advise
    from coterie.data.catalogue import open_named as open_named
    from coterie.data.federated import DataError as DataError
    from coterie.data.federated import FederatedDataset as FederatedDataset
    from coterie.data.formats import from_arrays as from_arrays
    from coterie.data.formats import from_targets as from_targets
    from coterie.data.formats import load as load
    from coterie.data.scaling import apply_constants as apply_constants
    from coterie.data.scaling import standardise_clients as standardise_clients
    from coterie.data.source import Source as Source
    from coterie.data.synthetic import synthetic as synthetic
    from coterie.engines.simulate import Speed as Speed
    from coterie.engines.simulate import simulate as simulate
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
    from coterie.plan import Plan as Plan
    from coterie.plan import Privacy as Privacy
    from coterie.privacy.accounting import Guarantee as Guarantee
    from coterie.privacy.sampling import Everyone as Everyone
    from coterie.privacy.sampling import FixedSize as FixedSize
    from coterie.privacy.sampling import Poisson as Poisson
    from coterie.rules import plan_for as plan_for
    from coterie.solvers.sgd import SGD as SGD


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"coterie.{name}")
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")
