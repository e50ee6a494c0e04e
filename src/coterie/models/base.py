"""The model interface: a pure function of a tree of parameters, for one client or for many.

A model is a frozen dataclass whose fields are its architecture; it holds no parameters. `apply` is
written for one client; `apply_stacked` runs the models of many clients at once, each on its own
rows; solvers call it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import FederatedDataset, Spec, Task

M = TypeVar("M", bound=type["Model"])
MODELS: dict[str, type["Model"]] = {}


class Model(ABC):
    """A frozen dataclass whose fields are its architecture.

    Class attributes:
        kind: Its registered name.
        clients_per_thread: Clients per CPU thread and batch of work; 0 lets the solver choose by
            the number of parameters.
    """

    kind: ClassVar[str] = ""
    clients_per_thread: ClassVar[int] = 0

    @abstractmethod
    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Return one client's initial parameters, unstacked, from public facts only."""

    @abstractmethod
    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict rows (n, *shape) of one client: (n,) for a single output, else (n, outputs).

        `seed` is an integer that determines all randomness (dropout) in training, None for
        predictions; models without dropout ignore it.
        """

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict rows (c, n, *shape) of c clients by their own parameters: (c, n[, outputs]).

        `seeds`, (c,), holds one seed per client.
        """
        if seeds is None:
            outputs: Tensor = torch.func.vmap(self.apply)(dict(params), x)
        else:
            outputs = torch.func.vmap(self.apply)(dict(params), x, seeds)
        return outputs

    @property
    def draws(self) -> bool:
        """Whether training needs seeds."""
        return False

    def losses(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row, shape (..., n); by default that of the task."""
        return row_losses(task, outputs, targets)

    @property
    def has_usual_losses(self) -> bool:
        """Whether `losses` are those of the task, which a GPU computes by one kernel."""
        return type(self).losses is Model.losses

    def head(self, spec: Spec) -> tuple[str, ...]:
        """Return the leaves of the last linear layer: the personal part if layers are shared."""
        names = tuple(self.init(spec, Rng.seeded(0)))
        layer = names[-1].rpartition(".")[0]
        return tuple(name for name in names if name.rpartition(".")[0] == layer)

    def check_data(self, data: FederatedDataset) -> None:
        """Raise DataError on rows that the model cannot use, before any budget is spent."""
        return None

    def alias(self, spec: Spec, path: str) -> str | None:
        """Return the leaf with which a leaf or layer is tied; None if there is none."""
        return None

    @classmethod
    def choices(cls) -> Mapping[str, type["Model"]]:
        """Return the registered models by name."""
        return MODELS


def register_model(name: str) -> Callable[[M], M]:
    """Register a model under a name."""

    def put(cls: M) -> M:
        if name in MODELS and MODELS[name].__module__ != cls.__module__:
            raise ValueError(
                f"model name {name!r} is taken by {MODELS[name].__module__}; choose another"
            )
        cls.kind = name
        MODELS[name] = cls
        return cls

    return put


def row_losses(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every row, shape (..., n).

    1/2 (p - y)^2 for regression, logistic on 0/1 for binary, cross-entropy for multiclass, the sum
    over labels of logistic for multilabel; `outputs` are predictions, (..., n) for one output, else
    (..., n, outputs).
    """
    if task == "multiclass":
        flat = functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten().long(), reduction="none"
        )
        return flat.reshape(targets.shape)
    wanted = targets.to(outputs.dtype)
    if task == "regression":
        return 0.5 * (outputs - wanted).square()
    logistic = functional.binary_cross_entropy_with_logits(
        outputs.reshape(wanted.shape), wanted, reduction="none"
    )
    return logistic.sum(dim=-1) if task == "multilabel" else logistic


def squeezed(outputs: Tensor) -> Tensor:
    """Drop the last axis of a single output."""
    return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
