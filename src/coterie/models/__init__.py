"""Models: pure functions of a tree of parameters, for one client or for many side by side."""

from coterie.models.base import MODELS, Model, register_model, row_losses
from coterie.models.cnn import CNN
from coterie.models.dense import MLP, Linear
from coterie.models.module import as_model

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "Linear",
    "Model",
    "as_model",
    "register_model",
    "row_losses",
]
