"""Public encoders: a frozen network maps each row to features, before anything else is learned.

With few clients no budget supports a network, but a linear model on features of a public one may
(`--encoder nets:Encoder`). The module is made once, in evaluation mode, without gradients, and from
a fixed random stream, so that random features are the same in a run and in its predictions.

**Guarantee:** none is needed: the map is applied inside each client, row by row, always to 64 rows
that are padded with zeros (`coterie.data.scaling.embed`), and nothing of it is released. Assumes
that the module is public: its weights were not made from the rows of these clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.scaling import embed


@dataclass(frozen=True)
class Encoded:
    """A public map of rows to features, by a module; like `effects.Design`.

    Attributes:
        columns: The names of the columns that it reads, if they have names.
        shape: The shape of a row that it reads.
        width: How many features it makes.
        module: The module.
    """

    columns: tuple[str, ...]
    shape: tuple[int, ...]
    width: int
    module: nn.Module = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, make: Callable[..., Any], columns: Sequence[str], shape: Sequence[int]
    ) -> "Encoded":
        """Return the map of rows of this shape; raise DataError if the module does not fit them."""
        module, shape = made(make), tuple(shape)
        name = getattr(make, "__name__", type(make).__name__)
        try:
            with torch.no_grad():
                found = module(torch.zeros(2, *shape))
        except Exception as error:  # a user's module can fail in any way
            raise DataError(
                f"encoder = {name}: it failed on rows of shape {shape}: {type(error).__name__}: "
                f"{error}; it takes rows (n, {', '.join(map(str, shape))})"
            ) from error
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != 2:
            kind = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise DataError(
                f"encoder = {name}: for 2 rows of shape {shape} it returned {kind}; expected "
                "(2, features): end it with nn.Flatten()"
            )
        return cls(tuple(map(str, columns)), shape, found.shape[1], module)

    def spec(self, given: Spec) -> Spec:
        """Return the spec of the features."""
        return replace(given, shape=(self.width,))

    def expand(self, data: FederatedDataset) -> FederatedDataset:
        """Return the data with every row replaced by its features."""
        if data.is_sparse or data.spec.shape != self.shape:
            kind = "sparse" if data.is_sparse else f"of shape {data.spec.shape}"
            raise DataError(
                f"{data.title}: rows are {kind}; the encoder takes dense rows of shape {self.shape}"
            )
        return replace(embed(data, self.module), design=self)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the features of rows (n, columns) or (n, *shape)."""
        found: Tensor = self.module(rows.reshape(-1, *self.shape).float())
        return found


@lru_cache(maxsize=8)
def made(make: Callable[..., Any]) -> nn.Module:
    """Return the module, frozen and in evaluation mode.

    Raises:
        DataError: If `make` cannot be called without arguments, or makes something else.
    """
    name = getattr(make, "__name__", type(make).__name__)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = make()
    except Exception as error:  # a user's code can fail in any way
        raise DataError(
            f"encoder = {name}: called without arguments, it failed: {type(error).__name__}: "
            f"{error}; name a class or function that makes a torch.nn.Module"
        ) from error
    if not isinstance(module, nn.Module):
        raise DataError(
            f"encoder = {name}: it made {type(module).__name__}; expected a torch.nn.Module"
        )
    return module.eval().requires_grad_(requires_grad=False)
