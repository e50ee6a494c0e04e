"""Models: pure functions of a tree of parameters, for one client or for many side by side."""

from coterie.models.base import MODELS, Model, register_model, row_losses
from coterie.models.linear import MLP, Additive, Linear
from coterie.models.module import Module, as_model, replace_batchnorm
from coterie.models.zoo import CNN, CelebaCNN, CharLSTM, FemnistCNN, FemnistLeaf, TagLogistic

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "Additive",
    "CelebaCNN",
    "CharLSTM",
    "FemnistCNN",
    "FemnistLeaf",
    "Linear",
    "Model",
    "Module",
    "TagLogistic",
    "as_model",
    "register_model",
    "replace_batchnorm",
    "row_losses",
]
