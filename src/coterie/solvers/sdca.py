"""Dual coordinate ascent for linear SVMs of many clients, each on its own rows.

A client's dual variables b_i (a hinge's alpha_i y_i, or those of the epsilon-insensitive loss) live
in boxes, and its model moves with them. One step (Hsieh et al. 2008; Ho and Lin 2012) sets one
b_i to where the dual is best, the others fixed: with margins taken from q, r = q.x_i - y_i and the
curvature a = scale |x_i|^2,

    b_i' = clip( soft(a b_i - r, tube) / a, box_i ),    q += scale (b_i' - b_i) x_i

For one SVM alone, q is its weights and scale is 1. In a round of the federated multi-task SVM
(Ponomarenko-Timofeev et al.) min 1/2 |w|^2 + C2/2 sum_k |v_k|^2 + sum_ik C_ik loss, q = w + v_k
and scale = sigma' + 1/C2: with sigma' the most clients that are added up in a round, the sum of
their moves never makes the dual worse (CoCoA+, Ma et al. 2015). `certify` gives the parts of the
duality gap, which bounds what is left to gain; every term of it is >= 0 (Fenchel and Young).

`fit_alone` and `fit_joint` take such steps, leave out rows that are stuck at a bound, and move the
others by conjugate gradients in between, until the gap is small. Their answers depend on the seed
within that gap; how many threads there are changes nothing.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.data.federated import Clients
from coterie.solvers import _fits, _sdca
from coterie.solvers._joint import Joint
from coterie.solvers.svm import Losses, Problem, share

__all__ = ["Fit", "JointFit", "Losses", "certify", "fit_alone", "fit_joint", "take_steps"]
Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class Fit:
    """SVMs of clients alone: weights (c, o, D), duals (c, L, o); per client (c,) the rest."""

    weight: Tensor
    dual: Tensor
    primal: Tensor
    gap: Tensor
    epochs: Tensor


@dataclass(frozen=True)
class JointFit:
    """A multi-task SVM: w (o, D), v_k (c, o, D), duals (c, L, o), and its objective and gap."""

    shared: Tensor
    own: Tensor
    dual: Tensor
    primal: float
    gap: float
    epochs: int


def take_steps(  # noqa: PLR0913 - the state of a round, and how to move it
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
    """Take steps on every client's duals, each on its own rows alone.

    A client whose rows, targets or start hold a NaN or an infinity gets NaN, and nobody else does.
    A row of zeros, without a bias, can be moved by nothing: its dual is 0 and its loss not counted.

    Args:
        clients: Their rows, dense or CSR, read in place.
        start: q of each client, (c, o, d), or (c, o, d + 1) where the last column is a bias: the
            weight of a feature that is always 1. Its type, float32 or float64, is the precision.
        scale: By how much q moves with the duals, one number or one a client (c,).
        dual: Signed duals b (c, L, o), cut into their boxes first; those of rows beyond L are 0.
        losses: What rows cost.
        keys: Streams of the orders, (c,).
        epochs: How often to go through a client's rows, each time in a new order. From two on,
            rows stuck at a bound are left out of epochs between the first and the last.
        tol: A client stops once an epoch over all its rows finds none that is off its optimum by
            more than this, as a slope of the dual.
        mask: (c, L) in [0, 1]: the share of its step that a row takes.
        paper_mask: Mask the returned sum alone, while duals and q take the whole step. This is
            what the paper prints; the sum then no longer belongs to the duals.
        replace: Draw the rows of an epoch with replacement.

    Returns:
        The duals (c, max(L, longest), o), padding as it was given, and what they moved:
        sum_i (b_i' - b_i) x_i, of the shape of `start`.

    Raises:
        ValueError: On shapes or numbers that do not fit, or targets other than 0 and 1.
    """
    begin_at = _points("start", start, clients)
    problem = Problem.of(clients, losses, bias=start.shape[2] > clients.spec.features)
    scales = _scales(scale, len(clients))
    before = problem.padded(dual, start.dtype)
    after, moved = before.clone(), torch.zeros_like(begin_at)
    shares = _shares(mask, len(clients), problem.longest)
    if epochs < 1:
        raise ValueError(f"epochs: given {epochs}; expected a whole number of at least 1")
    _check_keys(keys, len(clients))
    share(
        lambda begin, end: _sdca.steps(
            problem.rows, problem.stack, keys, scales, begin_at.numpy(), before.numpy(),
            after.numpy(), moved.numpy(), shares, paper_mask, epochs, tol, replace, begin, end,
        ),
        len(problem),
        problem.work(epochs),
    )  # fmt: skip
    return after.to(start.device), moved.to(start.device)


def certify(clients: Clients, point: Tensor, dual: Tensor, losses: Losses) -> tuple[Tensor, Tensor]:
    """Return every client's loss and its part of the duality gap.

    With p_i = point.x_i, a client's part is sum_i [C_i loss(p_i) + C_i loss*(-b_i) + b_i p_i]. If
    the points are the models that belong to the duals, the parts of all clients add up to the gap
    of the joint problem; that of an SVM alone is its own gap.

    Args:
        clients: Their rows.
        point: Where margins are taken from, (c, o, D) as the `start` of `take_steps`.
        dual: Signed duals (c, L, o), cut into their boxes.
        losses: What rows cost.

    Returns:
        Sums of C_i loss_i and of the gap's terms, (c,) float64.
    """
    at = _points("point", point, clients).numpy()
    problem = Problem.of(clients, losses, bias=point.shape[2] > clients.spec.features)
    held = problem.padded(dual, torch.float64).numpy()
    out = np.zeros((len(clients), problem.outputs, 3))
    share(
        lambda begin, end: _sdca.gaps(problem.rows, problem.stack, at, held, begin, end, out),
        len(problem),
        problem.work(1),
    )
    total = torch.from_numpy(out.sum(axis=1))
    return total[:, 0].contiguous(), total[:, 1].contiguous()


def fit_alone(
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
    """Fit every client alone: min 1/2 |w|^2 + sum_i C_i loss(w.x_i), once an output.

    A client without rows gets zeros; one whose rows or targets hold a NaN or an infinity gets NaN,
    and nobody else does.

    Args:
        clients: Their rows.
        losses: What rows cost.
        bias: Whether the last weight is that of a feature that is always 1, penalised as the rest.
        tol: The largest duality gap as a share of the objective.
        most: How many epochs an output may take.
        keys: Streams of the orders, (c,).
        dtype: The precision to work in; in float32 gaps below 1e-5 may be out of reach.
        strict: Refuse gaps above `tol`; else give what `most` epochs reach.

    Raises:
        RuntimeError: If a gap is above `tol` after `most` epochs, and `strict`.
    """
    problem = Problem.of(clients, losses, bias=bias)
    keys = _checked(keys, clients, tol, most)
    weight = torch.zeros(len(clients), problem.outputs, problem.features + bias, dtype=dtype)
    dual = problem.padded(torch.zeros(len(clients), 0, problem.outputs), dtype)
    out = np.zeros((len(clients), problem.outputs, 4))
    share(
        lambda begin, end: _fits.alone(
            problem.rows, problem.stack, keys, tol, most, weight.numpy(), dual.numpy(), begin, end,
            out,
        ),
        len(problem),
        problem.work(10),
    )  # fmt: skip
    over = strict & (out[..., 1] > tol * out[..., 0] + out[..., 3])
    for place, output in np.argwhere(over):
        gap = out[place, output, 1] / out[place, output, 0]
        _unfinished(f"client {problem.ids[place]}", gap, tol, most, losses.c1)
    primal, gap = torch.from_numpy(out.sum(axis=1)[:, :2].T.copy())
    epochs = torch.from_numpy(np.nan_to_num(out[..., 2]).max(axis=1).astype(np.int64))
    return Fit(weight, dual, primal, gap, epochs)


def fit_joint(  # noqa: PLR0913 - the problem, and how exactly it is to be solved
    clients: Clients,
    losses: Losses,
    *,
    c2: float,
    bias: bool,
    tol: float = 1e-3,
    most: int = 100_000,
    keys: Keys | None = None,
    dtype: torch.dtype = torch.float64,
    parts: int = 1,
    strict: bool = True,
) -> JointFit:
    """Solve min 1/2 |w|^2 + C2/2 sum_k |v_k|^2 + sum_ik C_ik loss((w + v_k).x_ik) in one place.

    Each epoch goes through the rows, a few of one client at a time and in a new order, against a w
    that is up to date; now and then all duals inside their boxes are moved at once.

    Args:
        clients: Their rows.
        losses: What rows cost.
        c2: What being different costs, > 0; infinite for one SVM of all rows, v_k = 0.
        bias: Whether the last weight is that of a feature that is always 1, penalised as the rest.
        tol: The largest duality gap as a share of the objective, both summed over outputs.
        most: How many epochs an output may take.
        keys: Streams of the orders, (c,).
        dtype: The precision to work in; in float32 gaps below 1e-5 may be out of reach.
        parts: Groups of clients, one a thread, which see each other's moves once an epoch. They
            take shorter steps for that (sigma' = parts), and so many more epochs: worth it only
            where clients hardly share.
        strict: Refuse a gap above `tol`; else give what `most` epochs reach.

    Raises:
        ValueError: On a client whose rows or targets hold a NaN or an infinity, or numbers that do
            not fit.
        RuntimeError: If the gap is above `tol` after `most` epochs, and `strict`.
    """
    if not c2 > 0:
        raise ValueError(f"c2: given {c2}; expected a number > 0, or math.inf for one SVM")
    if parts < 1:
        raise ValueError(f"parts: given {parts}; expected a whole number of at least 1")
    problem = Problem.of(clients, losses, bias=bias)
    keys = _checked(keys, clients, tol, most)
    for place in np.flatnonzero(problem.stack.fault.any(axis=1)):
        raise ValueError(
            f"client {problem.ids[place]} has a NaN or an infinity among its rows or targets: "
            "leave it out of a joint fit"
        )
    found = [
        Joint.begun(problem.single(output), dtype, c2, parts).solve(keys, tol, most)
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
    if keys is None:
        return Rng.seeded(0).keys(clients.ids)
    _check_keys(keys, len(clients))
    return keys


def _unfinished(who: str, gap: float, tol: float, most: int, c1: float) -> NoReturn:
    raise RuntimeError(
        f"{who}: relative gap {gap:.1e} after {most} epochs; expected <= {tol:.1e}: raise most or "
        f"tol, lower c1 (now {c1:g}), or scale the features to like sizes"
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
            f"scale: given shape {tuple(found.shape)}; expected one number, or one a client "
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
        raise ValueError("mask: given numbers outside [0, 1]; expected shares of a step")
    return np.ascontiguousarray(mask.detach().cpu().double().numpy())


def _check_keys(keys: Keys, clients: int) -> None:
    if keys.dtype != np.uint64 or keys.shape != (clients,):
        raise ValueError(
            f"keys: given {keys.dtype} of shape {keys.shape}; expected uint64 of shape "
            f"({clients},), such as rng.keys(clients.ids)"
        )
