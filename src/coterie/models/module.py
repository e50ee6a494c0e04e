"""Any `torch.nn.Module` as a model: made functional, and stacked over clients."""

from typing import Any

from coterie.models.base import Model


def as_model(given: Any) -> Model:
    """Take a model as it is; make one of a torch module, or of a function or class that makes it.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(given, Model):
        return given
    raise ValueError(f"model = {given!r}: expected a model such as Linear() or MLP()")
