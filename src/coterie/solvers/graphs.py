"""CUDA graphs of local steps: record one step of a stack of clients, replay it with other numbers.

A step of a small network is some hundred launches; issued one by one they take longer than the
arithmetic. A recording is made once for each recipe (model, stack, settings) and kept with the
memory it works in; a run that changes nothing but numbers replays it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor, Tensor]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# Steps leaves in place: (leaves, speeds, anchors, x, y, share) -> None.
Step = Callable[[dict[str, Tensor], list[Tensor], list[Tensor], Batch], None]
_KEPT = 16
_WARM_UP = 3


@dataclass(frozen=True)
class Recipe:
    """Everything a recording depends on but numbers; `maker` makes the step, and is part of it."""

    maker: Callable[[], Step]
    leaves: Shapes
    clients: int
    row: tuple[int, ...]
    label: tuple[int, ...]
    label_type: torch.dtype
    batch: int
    pulled: bool
    heavy: bool
    device: torch.device


def bucket(clients: int) -> int:
    """Round a stack up, so that cohorts of nearly the same size share a recording."""
    return clients if clients < 32 else -(-clients // 4) * 4


class Recording:
    """One recorded step and the memory it reads and writes."""

    def __init__(self, recipe: Recipe) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(recipe.clients, *shape, dtype=dtype, device=recipe.device)

        self._params = {name: zeros(*shape).requires_grad_() for name, shape in recipe.leaves}
        self._speeds = [zeros(*shape) for _, shape in recipe.leaves] if recipe.heavy else []
        self._anchors = [zeros(*shape) for _, shape in recipe.leaves] if recipe.pulled else []
        self._x = zeros(recipe.batch, *recipe.row)
        self._y = zeros(recipe.batch, *recipe.label, dtype=recipe.label_type)
        self._share = zeros(recipe.batch)
        self._graph = torch.cuda.CUDAGraph()
        step = recipe.maker()
        static = (self._params, self._speeds, self._anchors, (self._x, self._y, self._share))
        stream = torch.cuda.Stream(recipe.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(recipe.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                step(*static)
        torch.cuda.current_stream(recipe.device).wait_stream(stream)
        with torch.cuda.graph(self._graph):
            step(*static)

    def run(
        self, params: dict[str, Tensor], anchors: list[Tensor], batches: Iterable[Batch]
    ) -> None:
        """Take a step for each batch, from `params`, and leave the result there."""
        clients = len(next(iter(params.values())))
        with torch.no_grad():
            for mine, given in zip(self._params.values(), params.values(), strict=True):
                _fill(mine, given)
            for mine, given in zip(self._anchors, anchors, strict=True):
                _fill(mine, given)
            for speed in self._speeds:
                speed.zero_()
            for x, y, share in batches:
                for mine, given in ((self._x, x), (self._y, y), (self._share, share)):
                    _fill(mine, given)
                self._graph.replay()
            for mine, given in zip(self._params.values(), params.values(), strict=True):
                given.copy_(mine[:clients])


def _fill(static: Tensor, given: Tensor) -> None:
    # Places beyond the stack hold zeros: they are computed with the rest, and never read.
    static[: len(given)].copy_(given)
    if len(given) < len(static):
        static[len(given) :].zero_()


@lru_cache(maxsize=_KEPT)
def record(recipe: Recipe) -> Recording | None:
    """Record the step of a recipe; None if the model does something that cannot be recorded."""
    try:
        return Recording(recipe)
    except RuntimeError:
        torch.cuda.synchronize(recipe.device)
        return None
