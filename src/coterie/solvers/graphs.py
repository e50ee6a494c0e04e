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

from coterie.solvers.objective import Batch

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# Steps leaves in place: (leaves, speeds, anchors, batch) -> None.
Step = Callable[[dict[str, Tensor], list[Tensor], list[Tensor], Batch], None]
_KEPT = 16
_WARM_UP = 3


@dataclass(frozen=True)
class Recipe:
    """Everything a recording depends on but numbers; `maker` makes the step, and is part of it."""

    maker: Callable[[], Step]
    leaves: Shapes
    trained: tuple[str, ...]
    clients: int
    row: tuple[int, ...]
    label: tuple[int, ...]
    label_type: torch.dtype
    batch: int
    pulled: bool
    heavy: bool
    draws: bool
    device: torch.device


def bucket(clients: int) -> int:
    """Round a stack up, so that cohorts of nearly the same size share a recording."""
    return clients if clients < 32 else -(-clients // 4) * 4


class Recording:
    """One recorded step and the memory it reads and writes."""

    def __init__(self, recipe: Recipe) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(recipe.clients, *shape, dtype=dtype, device=recipe.device)

        self._params = {
            name: zeros(*shape).requires_grad_(name in recipe.trained)
            for name, shape in recipe.leaves
        }
        moved = [shape for name, shape in recipe.leaves if name in recipe.trained]
        self._speeds = [zeros(*shape) for shape in moved] if recipe.heavy else []
        self._anchors = [zeros(*shape) for shape in moved] if recipe.pulled else []
        self._batch = Batch(
            zeros(recipe.batch, *recipe.row),
            zeros(recipe.batch, *recipe.label, dtype=recipe.label_type),
            zeros(recipe.batch),
            zeros(dtype=torch.int64) if recipe.draws else None,
        )
        self._graph = torch.cuda.CUDAGraph()
        step = recipe.maker()
        static = (self._params, self._speeds, self._anchors, self._batch)
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
            for batch in batches:
                for static, now in zip(self._batch, batch, strict=True):
                    if static is not None and now is not None:
                        _fill(static, now)
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
