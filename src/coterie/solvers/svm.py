"""Linear SVMs of many clients: what rows cost, and the clients as kernels see them."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients

Array = NDArray[Any]
# Flat rows: one dense (N, d) array of float32, or data, indices and indptr of CSR. How many arrays
# there are is known to the compiler, so each layout is compiled by itself: with both in one loop,
# the references to the arrays would be counted at every row, by all threads.
Rows = tuple[Any, ...]
F = TypeVar("F", bound=Callable[..., Any])
_SMALL = 1 << 20  # multiplications that one thread does before another has woken up
_REGRESSION, _SIGNS, _CLASSES = 0, 1, 2
_UNREADABLE, _BAD_TARGET, _BROKEN = 1, 2, 3
_UNKNOWN = -1.0  # instead of a squared norm

# Sums may be reordered and products fused, which vectorises them; NaN and infinity keep their
# meaning.
_FAST = {"reassoc", "contract", "nsz"}


def compiler(*sources: str | None) -> Callable[[F], F]:
    """Make a decorator for kernels that let go of the interpreter, so that threads can share work.

    numba keeps what it compiled until a kernel's own file changes. `sources` are other files that
    kernels are made from: their content goes into the name that kernels are kept under.
    """
    content = b"".join(Path(source).read_bytes() for source in sources if source)
    stamp = hashlib.blake2b(content, digest_size=8).hexdigest()

    def decorate(function: F) -> F:
        function.__qualname__ += f"_{stamp}"
        made = numba.njit(cache=True, nogil=True, fastmath=_FAST, error_model="numpy")(function)
        return cast(F, made)

    return decorate


_compiled = compiler()


class Stack(NamedTuple):
    """Who has which rows, and what they are about.

    Client k has the rows `starts[k]` .. of the flat arrays; its numbers in `y` and `cost`, (o, P),
    are at `bases[k]` ... `fault` (c, o) is not 0 where there is nothing to be computed.
    """

    starts: Array
    counts: Array
    bases: Array
    squares: Array
    y: Array
    cost: Array
    fault: Array
    two_sided: bool
    tube: float
    bias: bool


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What rows cost: c1 times the hinge, or the epsilon-insensitive loss for regression.

    Attributes:
        c1: The price of a unit of loss.
        tube: How far a regression may be off at no cost.
        class_weight: What multiplies c1. "balanced": n / (2 n_c), from the client's own rows, of
            the two sides of each output. Numbers: of class 0 and 1 (binary, multilabel), or of
            each class (multiclass: that of the row's own class, in all outputs).
    """

    c1: float
    tube: float = 0.1
    class_weight: Literal["none", "balanced"] | tuple[float, ...] = "none"

    def __post_init__(self) -> None:
        if not 0 < self.c1 < math.inf:
            raise ValueError(f"c1: given {self.c1}; expected a finite number > 0, such as 1")
        if not 0 <= self.tube < math.inf:
            raise ValueError(f"tube: given {self.tube}; expected a finite number >= 0, such as 0.1")
        if isinstance(self.class_weight, str):
            sound = self.class_weight in ("none", "balanced")
        else:
            sound = all(0 < weight < math.inf for weight in self.class_weight)
        if not sound:
            raise ValueError(
                f"class_weight: given {self.class_weight!r}; expected 'none', 'balanced' or one "
                "finite number > 0 a class"
            )

    def weights(self, task: str, outputs: int) -> NDArray[np.float64]:
        """Return one number a class, none without numbers, and check that they fit the task."""
        if self.class_weight != "none" and task == "regression":
            raise ValueError("class_weight: given for regression, which has no classes; use 'none'")
        if isinstance(self.class_weight, str):
            return np.zeros(0)
        expected = outputs if task == "multiclass" else 2
        if len(self.class_weight) != expected:
            raise ValueError(
                f"class_weight: given {len(self.class_weight)} numbers; expected {expected}, one a "
                "class"
            )
        return np.array(self.class_weight, dtype=np.float64)


@dataclass(frozen=True)
class Problem:
    """Clients as the kernels see them: o problems a client, numbered client by client."""

    rows: Rows
    stack: Stack
    ids: NDArray[np.int64]
    features: int
    outputs: int
    longest: int

    @classmethod
    def of(cls, clients: Clients, losses: Losses, *, bias: bool) -> "Problem":
        """Read the clients in place.

        Raises:
            ValueError: On targets other than 0 and 1, weights that do not fit, or broken CSR rows.
        """
        spec, counts = clients.spec, np.ascontiguousarray(clients.counts.numpy())
        weights = losses.weights(spec.task, spec.outputs)
        rows, squares = _rows(clients)
        total = int(counts.sum())
        stack = Stack(
            starts=np.ascontiguousarray(clients.starts.numpy()),
            counts=counts,
            bases=np.cumsum(counts) - counts,
            squares=squares,
            y=np.empty((spec.outputs, total), dtype=np.float32),
            cost=np.empty((spec.outputs, total)),
            fault=np.zeros((len(counts), spec.outputs), dtype=np.int8),
            two_sided=spec.task == "regression",
            tube=float(losses.tube) if spec.task == "regression" else 0.0,
            bias=bool(bias),
        )
        problem = cls(
            rows, stack, clients.ids.numpy(), spec.features, spec.outputs, clients.longest
        )
        price = float(losses.c1), losses.class_weight == "balanced", weights
        given = _targets(clients)
        share(
            lambda begin, end: _fill(rows, stack, spec.features, *given, *price, begin, end),
            len(counts),
            problem.work(1),
        )
        problem._refuse()
        return problem

    def __len__(self) -> int:
        return len(self.ids) * self.outputs

    def work(self, epochs: int) -> int:
        """Say how many multiplications epochs take, about."""
        return int(self.stack.counts.sum()) * self.features * self.outputs * epochs

    def single(self, output: int) -> "Problem":
        """Return the problem of one output."""
        one = slice(output, output + 1)
        stack, fault = self.stack, np.ascontiguousarray(self.stack.fault[:, one])
        part = stack._replace(y=stack.y[one], cost=stack.cost[one], fault=fault)
        return replace(self, stack=part, outputs=1)

    def padded(self, dual: Tensor, kind: torch.dtype) -> Tensor:
        """Return duals (c, L', o) with room for the longest client, as a copy."""
        if dual.dim() != 3 or dual.shape[0] != len(self.ids) or dual.shape[2] != self.outputs:
            raise ValueError(
                f"dual: given shape {tuple(dual.shape)}; expected ({len(self.ids)}, rows, "
                f"{self.outputs}): clients, rows (any number), outputs"
            )
        length = max(dual.shape[1], self.longest)
        found = torch.zeros(len(self.ids), length, self.outputs, dtype=kind)
        found[:, : dual.shape[1]] = dual
        return found

    def _refuse(self) -> None:
        worst = self.stack.fault.max(axis=1, initial=0)
        for place in np.flatnonzero(worst > _UNREADABLE):
            reason = (
                "a target other than 0 and 1: recode its targets"
                if worst[place] == _BAD_TARGET
                else "a CSR row with a broken indptr or a column outside "
                f"0 .. {self.features - 1}: rebuild the matrix"
            )
            raise ValueError(f"client {self.ids[place]} has {reason}")


def share(work: Callable[[int, int], object], problems: int, cost: int) -> None:
    """Do `work(begin, end)` over all problems, by threads if there is enough of it.

    Kernels let go of the interpreter. Portions are small and taken as threads become free, since
    clients need very different numbers of steps.
    """
    threads = min(int(numba.get_num_threads()), problems)
    if problems and (threads < 2 or cost < _SMALL):
        work(0, problems)
    elif problems:
        edges = np.linspace(0, problems, min(problems, 16 * threads) + 1).astype(int).tolist()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, edges[:-1], edges[1:]))


def _rows(clients: Clients) -> tuple[Rows, NDArray[np.float64]]:
    # Kept with the data, since rounds come back to the same rows.
    kept = clients.memory.get("svm rows")
    if kept is None or kept[0] is not clients.features:
        squares = np.full(clients.features.shape[0], _UNKNOWN)
        kept = clients.features, _host_rows(clients.features), squares
        clients.memory["svm rows"] = kept
    return kept[1], kept[2]


def _host_rows(features: Any) -> Rows:
    if isinstance(features, Tensor):
        flat = features.detach().flatten(1).cpu().contiguous().numpy()
        return (flat.astype(np.float32, copy=False),)
    if not features.has_canonical_format:  # squared norms need each column once
        features = features.copy()
        features.sum_duplicates()
    values = features.data.astype(np.float32, copy=False)
    return values, features.indices, features.indptr


def _targets(clients: Clients) -> tuple[Array, Array, int]:
    # As numbers (N, o) or as classes (N,), the one not used empty.
    targets = clients.targets.detach().cpu().contiguous()
    if clients.spec.task == "multiclass":
        return np.zeros((0, 1), np.float32), targets.long().numpy(), _CLASSES
    values = targets.float().reshape(len(targets), clients.spec.outputs).numpy()
    kind = _REGRESSION if clients.spec.task == "regression" else _SIGNS
    return values, np.zeros(0, np.int64), kind


@_compiled
def _fill(  # noqa: PLR0913, PLR0917 - flat arrays, named one by one
    rows: Rows, stack: Stack, features: int, values: Array, classes: Array, kind: int,
    c1: float, balanced: bool, weights: Array, begin: int, end: int,
) -> None:  # fmt: skip
    for client in range(begin, end):
        first, n, base = stack.starts[client], stack.counts[client], stack.bases[client]
        state = _measure(stack.squares, first, n, features, rows)
        for output in range(len(stack.y)):
            y, cost = stack.y[output, base : base + n], stack.cost[output, base : base + n]
            wrong = 0
            if kind == _CLASSES:
                _fill_sides(classes, first, output, y)
            else:
                wrong = _fill_numbers(values, first, output, kind == _SIGNS, y)
            stack.fault[client, output] = max(wrong, state)
            above, below = _find_sides(y, balanced, weights if kind != _CLASSES else weights[:0])
            _fill_costs(y, c1 * above, c1 * below, cost)
            if len(weights) and kind == _CLASSES:
                _weigh(classes, first, weights, cost)
            if not stack.bias:
                _drop_zeros(stack.squares, first, cost)


@_compiled
def _find_sides(y: Array, balanced: bool, weights: Array) -> tuple[float, float]:
    if balanced:
        positive = 0
        for i in range(len(y)):
            positive += 1 if y[i] > 0 else 0
        return len(y) / (2.0 * max(positive, 1)), len(y) / (2.0 * max(len(y) - positive, 1))
    return (weights[1], weights[0]) if len(weights) else (1.0, 1.0)


@_compiled
def _fill_costs(y: Array, above: float, below: float, cost: Array) -> None:
    for i in range(len(y)):
        cost[i] = above if y[i] > 0 else below


@_compiled
def _weigh(classes: Array, first: int, weights: Array, cost: Array) -> None:
    for i in range(len(cost)):
        cost[i] *= weights[classes[first + i]]


@_compiled
def _drop_zeros(squares: Array, first: int, cost: Array) -> None:
    # No step can do anything about a row of zeros.
    for i in range(len(cost)):
        if squares[first + i] == 0:
            cost[i] = 0


@_compiled
def _measure(squares: Array, first: int, n: int, features: int, x: Rows) -> int:
    state = 0
    for row in range(first, first + n):
        if squares[row] == _UNKNOWN:
            squares[row] = _square(row, features, x)
        if squares[row] == _UNKNOWN:
            return _BROKEN
        if not np.isfinite(squares[row]):
            state = _UNREADABLE
    return state


@_compiled
def _square(row: int, features: int, x: Rows) -> float:
    total = 0.0
    if len(x) == 1:
        dense = x[0]
        for column in range(dense.shape[1]):
            total += np.float64(dense[row, column]) * np.float64(dense[row, column])
    else:
        data, indices, indptr = x
        if not 0 <= indptr[row] <= indptr[row + 1] <= len(indices):
            return _UNKNOWN
        for entry in range(indptr[row], indptr[row + 1]):
            if not 0 <= indices[entry] < features:
                return _UNKNOWN
            total += np.float64(data[entry]) * np.float64(data[entry])
    return total


@_compiled
def _fill_sides(classes: Array, first: int, output: int, y: Array) -> None:
    for i in range(len(y)):
        y[i] = 1 if classes[first + i] == output else -1


@_compiled
def _fill_numbers(values: Array, first: int, output: int, signs: bool, y: Array) -> int:
    wrong = 0
    for i in range(len(y)):
        value = values[first + i, output]
        y[i] = 2 * value - 1 if signs else value
        if not np.isfinite(value):
            wrong = max(wrong, _UNREADABLE)
        elif signs and value * (value - 1) != 0:
            wrong = _BAD_TARGET
    return wrong
