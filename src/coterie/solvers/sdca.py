"""Dual coordinate ascent for linear SVMs of many clients, each on its own rows.

A client's dual variables b_i (a hinge's alpha_i y_i, or those of the epsilon-insensitive loss) live
in boxes, and its model moves with them. One step (Hsieh et al. 2008; Ho and Lin 2012) sets one
b_i to its optimum, the others fixed: with margins taken from q, r = q.x_i - y_i and the second
derivative a = scale |x_i|^2,

    b_i' = clip( soft(a b_i - r, tube) / a, box_i ),    q += scale (b_i' - b_i) x_i

For a single SVM, q is its weights and scale is 1. In a round of the federated multi-task SVM
(Ponomarenko-Timofeev et al.) min 1/2 |w|^2 + C2/2 sum_k |v_k|^2 + sum_ik C_ik loss, q = w + v_k
and scale = sigma' + 1/C2: with sigma' the largest number of clients summed in a round, the sum of
their steps never decreases the dual (CoCoA+, Ma et al. 2015). `certify` returns the parts of the
duality gap; every term of it is >= 0 (Fenchel and Young).

`fit_local` and `fit_joint` iterate until the gap is small. They skip rows that stay at a bound, and
between sweeps they move all free duals at once: those minimise a quadratic, so a few conjugate
gradients suffice. Moves are clipped to the boxes and halved until the dual improves by a tenth of
the predicted decrease (Bertsekas 1982, projected Newton). Results depend on the seed within the
gap, and never on the number of threads.

One thread computes one output of one client from start to end, from its own random stream, so its
result is the same to the last bit in any company.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.data.federated import Clients
from coterie.solvers.sdca_kernels import (
    BAD_TARGET,
    CLASSES,
    REGRESSION,
    ROUNDING,
    SELDOM,
    SIGNS,
    UNKNOWN,
    UNREADABLE,
    Array,
    Rows,
    Stack,
    accelerate,
    fill_stack,
    find_gaps,
    rebuild_all,
    solve_all,
    take_steps_of,
    visit,
)

Keys = NDArray[np.uint64]
_SMALL = 1 << 20  # multiplications that one thread does before another has woken up
_BURST = 10  # epochs between two moves of all free duals
_TURNS = 20  # conjugate gradients of one move
_CHUNK = 32  # consecutive rows of one client in a joint sweep


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses of rows: c1 times the hinge, or the epsilon-insensitive loss for regression.

    Attributes:
        c1: The weight of the loss.
        tube: Errors of a regression up to this cost nothing.
        class_weight: Factors of c1. "balanced": n / (2 n_c) from the client's own rows, for the
            two sides of each output. Numbers: for class 0 and 1 (binary, multilabel), or for each
            class (multiclass: that of the row's own class, in all outputs).
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
                "finite number > 0 per class"
            )

    def weights(self, task: str, outputs: int) -> NDArray[np.float64]:
        """Return one weight per class, empty without weights; raise ValueError on a misfit."""
        if self.class_weight != "none" and task == "regression":
            raise ValueError("class_weight: given for regression, which has no classes; use 'none'")
        if isinstance(self.class_weight, str):
            return np.zeros(0)
        expected = outputs if task == "multiclass" else 2
        if len(self.class_weight) != expected:
            raise ValueError(
                f"class_weight: given {len(self.class_weight)} numbers; expected {expected}, one "
                "per class"
            )
        return np.array(self.class_weight, dtype=np.float64)


@dataclass(frozen=True)
class Problem:
    """Clients as kernels read them: o problems per client, numbered client by client."""

    rows: Rows
    stack: Stack
    ids: NDArray[np.int64]
    features: int
    outputs: int
    longest: int

    @classmethod
    def of(cls, clients: Clients, losses: Losses, *, bias: bool) -> "Problem":
        """Return the problem of clients, whose rows are read in place.

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
        cost = float(losses.c1), losses.class_weight == "balanced", weights
        problem.in_threads(fill_stack, spec.features, *_targets(clients), *cost, of=len(counts))
        problem._raise_faults()
        return problem

    def __len__(self) -> int:
        return len(self.ids) * self.outputs

    def in_threads(
        self, kernel: Callable[..., None], *given: Any, epochs: int = 1, of: int | None = None
    ) -> None:
        """Call a kernel on all problems (or on `of` clients), in threads if there is enough work.

        Portions are small and taken as threads become free, since clients need very different
        numbers of steps.
        """
        problems = len(self) if of is None else of
        threads = min(int(numba.get_num_threads()), problems)
        products = int(self.stack.counts.sum()) * self.features * self.outputs * epochs

        def work(begin: int, end: int) -> None:
            kernel(self.rows, self.stack, *given, begin, end)

        if problems and (threads < 2 or products < _SMALL):
            work(0, problems)
        elif problems:
            edges = np.linspace(0, problems, min(problems, 16 * threads) + 1).astype(int).tolist()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, edges[:-1], edges[1:]))

    def single(self, output: int) -> "Problem":
        """Return the problem of one output."""
        one = slice(output, output + 1)
        stack, fault = self.stack, np.ascontiguousarray(self.stack.fault[:, one])
        part = stack._replace(y=stack.y[one], cost=stack.cost[one], fault=fault)
        return replace(self, stack=part, outputs=1)

    def padded(self, dual: Tensor, kind: torch.dtype) -> Tensor:
        """Return a copy of duals (c, L, o), padded to the longest client."""
        if dual.dim() != 3 or dual.shape[0] != len(self.ids) or dual.shape[2] != self.outputs:
            raise ValueError(
                f"dual: given shape {tuple(dual.shape)}; expected ({len(self.ids)}, rows, "
                f"{self.outputs}): clients, rows (any number), outputs"
            )
        length = max(dual.shape[1], self.longest)
        found = torch.zeros(len(self.ids), length, self.outputs, dtype=kind)
        found[:, : dual.shape[1]] = dual
        return found

    def _raise_faults(self) -> None:
        worst = self.stack.fault.max(axis=1, initial=0)
        for place in np.flatnonzero(worst > UNREADABLE):
            reason = (
                "a target other than 0 and 1: recode its targets"
                if worst[place] == BAD_TARGET
                else "a CSR row with a broken indptr or a column outside "
                f"0 .. {self.features - 1}: rebuild the matrix"
            )
            raise ValueError(f"client {self.ids[place]} has {reason}")


def _rows(clients: Clients) -> tuple[Rows, NDArray[np.float64]]:
    # Kept with the data: rounds reuse the same rows.
    kept = clients.memory.get("svm rows")
    if kept is None or kept[0] is not clients.features:
        squares = np.full(clients.features.shape[0], UNKNOWN)
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
    # As numbers (N, o) or as classes (N,), the unused one empty.
    targets = clients.targets.detach().cpu().contiguous()
    if clients.spec.task == "multiclass":
        return np.zeros((0, 1), np.float32), targets.long().numpy(), CLASSES
    values = targets.float().reshape(len(targets), clients.spec.outputs).numpy()
    kind = REGRESSION if clients.spec.task == "regression" else SIGNS
    return values, np.zeros(0, np.int64), kind


@dataclass(frozen=True)
class Fit:
    """Separate SVMs: weights (c, o, D), duals (c, L, o); per client (c,) the rest."""

    weight: Tensor
    dual: Tensor
    primal: Tensor
    gap: Tensor
    epochs: Tensor


@dataclass(frozen=True)
class JointFit:
    """A multi-task SVM: w (o, D), v_k (c, o, D), duals (c, L, o), objective and gap."""

    shared: Tensor
    own: Tensor
    dual: Tensor
    primal: float
    gap: float
    epochs: int


def take_steps(  # noqa: PLR0913 - the state of a round and its settings
    clients: Clients,
    start: Tensor,
    scale: float | Tensor,
    dual: Tensor,
    losses: Losses,
    *,
    keys: Keys,
    epochs: int = 1,
    tol: float = 0.0,
    mask: Tensor | None = None,
    paper_mask: bool = False,
    replace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Take steps on every client's duals, each on its own rows only.

    A client whose rows, targets or start hold a NaN or an infinity gets NaN; others are unaffected.
    Without a bias a row of zeros has the dual 0 and no loss.

    Args:
        clients: Their rows, dense or CSR, read in place.
        start: q of each client, (c, o, d), or (c, o, d + 1) with a bias last: the weight of a
            feature that is always 1. Its type, float32 or float64, is the precision.
        scale: Factor of a dual step in q, one number or one per client (c,).
        dual: Signed duals b (c, L, o), clipped to their boxes first; 0 for rows beyond L.
        losses: Losses of rows.
        keys: Random streams of the orders, (c,).
        epochs: Passes over a client's rows, each in a new order. From two on, rows that stay at a
            bound are left out between the first and the last.
        tol: A client stops after a full pass in which no gradient of the dual exceeds this.
        mask: (c, L) in [0, 1]: the fraction of its step that a row takes.
        paper_mask: As published: mask the returned sum only, while duals and q take the whole
            step. The sum then no longer belongs to the duals.
        replace: Draw the rows of an epoch with replacement.

    Returns:
        The duals (c, max(L, longest), o), padding unchanged, and sum_i (b_i' - b_i) x_i, of the
        shape of `start`.

    Raises:
        ValueError: On invalid shapes or values, or targets other than 0 and 1.
    """
    begin_at = _points("start", start, clients)
    problem = Problem.of(clients, losses, bias=start.shape[2] > clients.spec.features)
    scales = _scales(scale, len(clients))
    before = problem.padded(dual, start.dtype)
    after, moved = before.clone(), torch.zeros_like(begin_at)
    shares = _shares(mask, len(clients), problem.longest)
    if epochs < 1:
        raise ValueError(f"epochs: given {epochs}; expected a whole number of at least 1")
    _checked_keys(keys, len(clients))
    problem.in_threads(
        take_steps_of, keys, scales, begin_at.numpy(), before.numpy(), after.numpy(),
        moved.numpy(), shares, paper_mask, epochs, tol, replace, epochs=epochs,
    )  # fmt: skip
    return after.to(start.device), moved.to(start.device)


def certify(clients: Clients, point: Tensor, dual: Tensor, losses: Losses) -> tuple[Tensor, Tensor]:
    """Return every client's loss and its part of the duality gap, (c,) float64 each.

    With p_i = point.x_i, a client's part is sum_i [C_i loss(p_i) + C_i loss*(-b_i) + b_i p_i]. If
    the points are the models of the duals, the parts of all clients sum to the gap of the joint
    problem; for a single SVM it is the gap itself. Arguments are those of `take_steps`.
    """
    at = _points("point", point, clients).numpy()
    problem = Problem.of(clients, losses, bias=point.shape[2] > clients.spec.features)
    held = problem.padded(dual, torch.float64).numpy()
    out = np.zeros((len(clients), problem.outputs, 3))
    problem.in_threads(find_gaps, at, held, out)
    total = torch.from_numpy(out.sum(axis=1))
    return total[:, 0].contiguous(), total[:, 1].contiguous()


def fit_local(
    clients: Clients,
    losses: Losses,
    *,
    bias: bool,
    tol: float = 1e-3,
    most: int = 100_000,
    keys: Keys | None = None,
    dtype: torch.dtype = torch.float64,
    strict: bool = True,
) -> Fit:
    """Fit one SVM per client and output: min 1/2 |w|^2 + sum_i C_i loss(w.x_i).

    A client without rows gets zeros. A client whose rows or targets hold a NaN or an infinity gets
    NaN; others are unaffected.

    Args:
        clients: Their rows.
        losses: Losses of rows.
        bias: Whether the last weight is a bias, penalised like the others.
        tol: The largest relative duality gap.
        most: The largest number of epochs per output.
        keys: Random streams of the orders, (c,).
        dtype: The precision; float32 may not reach gaps below 1e-5.
        strict: Raise on gaps above `tol`; otherwise return the result of `most` epochs.

    Raises:
        RuntimeError: If a gap is above `tol` after `most` epochs, and `strict`.
    """
    problem = Problem.of(clients, losses, bias=bias)
    keys = _checked(keys, clients, tol, most)
    weight = torch.zeros(len(clients), problem.outputs, problem.features + bias, dtype=dtype)
    dual = problem.padded(torch.zeros(len(clients), 0, problem.outputs), dtype)
    out = np.zeros((len(clients), problem.outputs, 4))
    problem.in_threads(solve_all, keys, tol, most, weight.numpy(), dual.numpy(), out, epochs=10)
    over = strict & (out[..., 1] > tol * out[..., 0] + out[..., 3])
    for place, output in np.argwhere(over):
        gap = out[place, output, 1] / out[place, output, 0]
        _unfinished(f"client {problem.ids[place]}", gap, tol, most, losses.c1)
    primal, gap = torch.from_numpy(out.sum(axis=1)[:, :2].T.copy())
    epochs = torch.from_numpy(np.nan_to_num(out[..., 2]).max(axis=1).astype(np.int64))
    return Fit(weight, dual, primal, gap, epochs)


def fit_joint(  # noqa: PLR0913 - a problem and its tolerances
    clients: Clients,
    losses: Losses,
    *,
    c2: float,
    bias: bool,
    tol: float = 1e-3,
    most: int = 100_000,
    keys: Keys | None = None,
    dtype: torch.dtype = torch.float64,
    strict: bool = True,
) -> JointFit:
    """Solve min 1/2 |w|^2 + C2/2 sum_k |v_k|^2 + sum_ik C_ik loss((w + v_k).x_ik) centrally.

    Each epoch visits the rows in a new order, a few of one client at a time, with an up-to-date w.
    C2 > 0 is the weight of the personal parts; infinite for one SVM of all rows, v_k = 0. The other
    arguments are those of `fit_local`; `tol` is for the gap summed over outputs.

    Raises:
        ValueError: On a client whose rows or targets hold a NaN or an infinity, or invalid values.
        RuntimeError: If the gap is above `tol` after `most` epochs, and `strict`.
    """
    if not c2 > 0:
        raise ValueError(f"c2: given {c2}; expected a number > 0, or math.inf for one SVM")
    problem = Problem.of(clients, losses, bias=bias)
    keys = _checked(keys, clients, tol, most)
    for place in np.flatnonzero(problem.stack.fault.any(axis=1)):
        raise ValueError(
            f"client {problem.ids[place]} has a NaN or an infinity among its rows or targets: "
            "remove it from the joint fit"
        )
    found = [
        _Joint.zero(problem.single(output), dtype, c2).solve(keys, tol, most)
        for output in range(problem.outputs)
    ]
    for joint in found:
        if strict and joint.gap > tol * joint.primal + joint.floor:
            _unfinished("joint fit", joint.gap / joint.primal, tol, most, losses.c1)
    return JointFit(
        shared=torch.from_numpy(np.stack([joint.shared for joint in found])),
        own=torch.from_numpy(np.stack([joint.own for joint in found], axis=1)),
        dual=torch.from_numpy(np.concatenate([joint.dual for joint in found], axis=2)),
        primal=sum(joint.primal for joint in found),
        gap=sum(joint.gap for joint in found),
        epochs=max(joint.epochs for joint in found),
    )


def _checked(keys: Keys | None, clients: Clients, tol: float, most: int) -> Keys:
    if not 0 < tol < math.inf:
        raise ValueError(f"tol: given {tol}; expected a finite number > 0")
    if most < 1:
        raise ValueError(f"most: given {most}; expected a whole number of at least 1")
    return Rng.seeded(0).keys(clients.ids) if keys is None else _checked_keys(keys, len(clients))


def _unfinished(who: str, gap: float, tol: float, most: int, c1: float) -> NoReturn:
    raise RuntimeError(
        f"{who}: relative gap {gap:.1e} after {most} epochs; expected <= {tol:.1e}: raise most or "
        f"tol, lower c1 (now {c1:g}), or scale the features to similar sizes"
    )


def _points(name: str, given: Tensor, clients: Clients) -> Tensor:
    features = clients.spec.features
    wanted = (len(clients), clients.spec.outputs)
    if given.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: given {given.dtype}; expected float32 or float64")
    if given.shape[:-1] != wanted or given.shape[-1] not in (features, features + 1):
        raise ValueError(
            f"{name}: given shape {tuple(given.shape)}; expected {(*wanted, features)} (clients, "
            "outputs, features), or one more column for a bias"
        )
    return given.detach().cpu().contiguous()


def _scales(scale: float | Tensor, clients: int) -> NDArray[np.float64]:
    found = torch.as_tensor(scale, dtype=torch.float64).cpu()
    if found.dim() > 1 or (found.dim() == 1 and len(found) != clients):
        raise ValueError(
            f"scale: given shape {tuple(found.shape)}; expected one number, or one per client "
            f"({clients},)"
        )
    if not bool(((found > 0) & (found < math.inf)).all()):
        raise ValueError(f"scale: given {scale}; expected finite numbers > 0")
    return np.ascontiguousarray(found.expand(clients).numpy())


def _shares(mask: Tensor | None, clients: int, longest: int) -> NDArray[np.float64]:
    if mask is None:
        return np.zeros((0, 0))
    if mask.dim() != 2 or len(mask) != clients or mask.shape[1] < longest:
        raise ValueError(
            f"mask: given shape {tuple(mask.shape)}; expected ({clients}, {longest}): clients and "
            "rows of the longest"
        )
    if not bool(((mask >= 0) & (mask <= 1)).all()):
        raise ValueError("mask: given numbers outside [0, 1]; expected fractions of a step")
    return np.ascontiguousarray(mask.detach().cpu().double().numpy())


def _checked_keys(keys: Keys, clients: int) -> Keys:
    if keys.dtype != np.uint64 or keys.shape != (clients,):
        raise ValueError(
            f"keys: given {keys.dtype} of shape {keys.shape}; expected uint64 of shape "
            f"({clients},), such as rng.keys(clients.ids)"
        )
    return keys


@dataclass
class _Joint:
    """One output of the joint problem: duals (c, L, 1), w (D,), v_k (c, D), objective and gap."""

    problem: Problem
    c2: float
    order: Array
    dual: Array
    shared: Array
    own: Array
    primal: float = math.inf
    gap: float = math.inf
    floor: float = 0.0
    epochs: int = 0

    @classmethod
    def zero(cls, problem: Problem, dtype: torch.dtype, c2: float) -> "_Joint":
        """Return the problem at zero."""
        stack, clients = problem.stack, len(problem.ids)
        dual = problem.padded(torch.zeros(clients, 0, 1), dtype).numpy()
        own = np.zeros((clients, problem.features + stack.bias), dual.dtype)
        order = np.arange(stack.counts.sum()) - np.repeat(stack.bases, stack.counts)
        return cls(problem, c2, order, dual, np.zeros(own.shape[1], dual.dtype), own)

    def solve(self, keys: Keys, tol: float, most: int) -> "_Joint":
        """Sweep until the gap is small enough; the sweeps estimate when to compute it."""
        self._certify()
        limit, due, active = math.inf, SELDOM, self.problem.stack.counts.copy()
        while self.gap > tol * self.primal + self.floor and self.epochs < most:
            self.epochs += 1
            limit, guess = self._epoch(keys, active, limit)
            look = guess <= tol * self.primal or not active.any()
            if self.epochs % _BURST == 0:
                self._accelerate()
            if look or self.epochs >= min(due, most):
                self._certify()
                active[:], limit = self.problem.stack.counts, math.inf
                due = max(SELDOM, 2 * self.epochs)
        return self

    def _epoch(self, keys: Keys, active: Array, limit: float) -> tuple[float, float]:
        # Visit the active rows once.
        key = Rng(int(keys[0])).at("epoch", self.epochs, 0).key
        shared = self.shared.copy()
        largest, gap = visit(
            self.problem.rows, self.problem.stack, np.uint64(key), np.arange(len(self.own)),
            _CHUNK, self.order, active, limit, 1.0, 1 / self.c2, shared, self.own, self.dual,
        )  # fmt: skip
        # By differences, as for several groups of clients: results stay equal to the last bit.
        self.shared = self.shared + (shared - self.shared)
        return largest, gap

    def _accelerate(self) -> None:
        # Move all free duals at once.
        own = self.own if self.c2 < math.inf else self.own[:0]
        accelerate(
            self.problem.rows, self.problem.stack, 0, np.arange(len(self.own)), 1 / self.c2,
            self.shared, own, self.dual, _TURNS,
        )  # fmt: skip

    def _certify(self) -> None:
        # Recompute the models from the duals, their objective and gap.
        sums, out = np.zeros_like(self.own), np.zeros((len(self.own), 1, 3))
        self.problem.in_threads(rebuild_all, self.dual, sums)
        self.shared, self.own = sums.sum(axis=0), (sums / self.c2).astype(sums.dtype)
        self.problem.in_threads(find_gaps, (self.shared + self.own)[:, None], self.dual, out)
        loss, self.gap, size = out.sum(axis=(0, 1)).tolist()
        self.primal = loss + 0.5 * float((self.shared.astype(np.float64) ** 2).sum())
        if self.c2 < math.inf:
            self.primal += 0.5 * self.c2 * float((self.own.astype(np.float64) ** 2).sum())
        precision = float(np.finfo(self.dual.dtype).eps)
        self.floor = ROUNDING * precision * (size + self.primal)
