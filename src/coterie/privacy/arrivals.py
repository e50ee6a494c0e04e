"""Arrivals: what a sum that travelled may be, whoever sent it.

A site hosts one client or several and sends the sum of their bounded contributions as plain
numbers. It may be broken or hostile. Before its numbers meet anybody else's they are brought into
what such a sum can be at all: finite, inside the norm of that many clients, on the public grid.

`hold`: a site's own sum, on its own
------------------------------------
Every honest sum x of n clients obeys |x| <= n B in the mechanism's own norm, and lies on the grid:
`clip` and `reduce` make it so, exactly. `hold` is the identity on all of these, bit for bit. What
is longer is scaled onto the limit, then rounded towards zero, which makes no norm longer.

**Guarantee:** posts stay as private as the ledger says for every client of an honest site, whatever
the other sites send. Write s_i for what site i sends. A round posts sum_i hold(s_i) + noise. A
client of site j moves s_j alone, and hold(s_j) = s_j: so neighbours differ by at most
`sensitivity(relation)`, on the grid, around a sum of the others that is the same for both. The
norm is computed in floats, so a sum may exceed its limit by a relative 2^-51 a number before it is
touched. That room is harmless: it only says how much a *hostile* site may send, and no honest
client's sensitivity depends on it. Over rounds: the others choose s_i after they saw all earlier
posts, but not this round's contributions. Given those posts s_i is fixed, or drawn from coins of
their own, so each round is dominated by the pair of distributions that the ledger counts, and
adaptive composition holds for such pairs (Dong, Roth and Su 2022; Zhu, Dong and Wang 2022).
Cohorts are as hidden as the plan's account assumes; nothing here adds to that. Where clients add
the noise themselves a message is private before it arrives, and all of this is post-processing.

`hold_sum`: one sum over all sites, out of secure aggregation
-------------------------------------------------------------
Here hostile numbers h are inside before anybody can look: the ring gives t = x + h mod 2^64, and
what is done to t depends on honest data. Projecting t onto a ball is 1-Lipschitz in l2, rounding
to the grid afterwards is not. Clamping every number is so on the line, but not on the ring: with h
just below 2^63, one step more of x turns the largest number into the smallest, and what is clamped
jumps from n B to -n B. So every number is *folded*, in whole grid steps, with m = floor(n B / g):

    f(t) = t for |t| <= m,   sign(t) (2 m - |t|) for m <= |t| <= 2 m,   0 beyond,

where numbers that are never negative have f(t) = 0 for t < 0.

**Guarantee:** posts are as private as the ledger says for every client of an honest site, whatever
other sites put into the sum. f has slope 1, -1 or 0, and is 0 around the place where the ring turns
over, hence |f(t) - f(t')| <= |t - t'| for the distance on the ring, in whole numbers, exactly. A
client that moves x by d moves the folded sum by at most |d_k| in number k: by at most as much as x
in l1, in l2, in Frobenius norm and block by block. Honest sums lie where f is the identity. m must
not depend on who was drawn, which is hidden: count *all* clients of the sites whose numbers are in
the sum. Wishart noise is refused: its account needs the change to be w w^T itself, not something
shorter. Whether anything was folded is a function of the sum without noise: it is not told.

Tests: tests/privacy/test_arrivals.py, tests/properties/test_arrivals.py,
tests/statistics/test_arrivals.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.core.tree import Tree, map_arrays
from coterie.privacy.limits import Ball, balls
from coterie.privacy.mechanisms import Exact, Mechanism, Shape, Shapes
from coterie.privacy.moments import GaussianRows, WishartGram

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]
Word = Literal["taken", "mended", "scaled", "zeroed"]
Why = Literal["", "not_finite", "nobody", "rows", "symmetry", "sign", "norm", "range", "grid"]

_EXACT = 1 << 53
"""Grid steps up to which float64 holds every whole number."""


@dataclass(frozen=True)
class Verdict:
    """What became of a site's sum.

    An honest one is always "taken": nothing here tells of honest data, all of it may be logged.

    Attributes:
        word: "taken" as it came; "mended" (see `why`); "scaled" onto the limit; "zeroed" whole.
        why: The gravest reason, one word: "not_finite"; "nobody", none of its clients was asked;
            "rows" of others; "symmetry"; "sign"; "norm"; "range" of a single number; "grid".
        clients: How many clients the sum was said to be of.
        kept: The smallest factor of a scaling.
        changed: How many numbers are not as they came.
    """

    word: Word
    why: Why
    clients: int
    kept: float = 1.0
    changed: int = 0

    @property
    def taken(self) -> bool:
        """Whether the sum counts as it came."""
        return self.word == "taken"

    @property
    def zeroed(self) -> bool:
        """Whether nothing of it counts."""
        return self.word == "zeroed"


def steps(mechanism: Mechanism, totals: Shapes) -> dict[str, float] | None:
    """Return the public grid step of each leaf of a sum, a power of two; None if there is no grid.

    >>> from coterie.privacy.laplace import LaplaceSum
    >>> steps(LaplaceSum(1.0, 0.5), {"w": (3,)}) == {"w": 2.0**-29}
    True
    """
    found = balls(mechanism, totals)
    return {name: ball.step for ball in found for name in ball.shapes} if found else None


def hold(mechanism: Mechanism, total: Tree, ids: NDArray[np.int64]) -> tuple[Tree, Verdict]:
    """Bring a site's sum into what a sum of these clients can be: see the head of this file.

    Args:
        mechanism: Of the round.
        total: As it came, in float64; left as it is.
        ids: Numbers over the federation of the site's clients that were asked this round.

    Returns:
        The sum to count, and what was done. An honest sum is taken as it came, bit for bit; one
        with local noise, all but with probability 2e-13.

    Raises:
        ValueError: If ids are not different clients.
    """
    came = {name: leaf.numpy() for name, leaf in total.items()}
    ids = _checked(mechanism, ids)
    clients = len(ids)
    broken = not all(bool(np.isfinite(leaf).all()) for leaf in came.values())
    if broken or (not clients and any(bool(leaf.any()) for leaf in came.values())):
        held: Arrays = {name: np.zeros_like(leaf) for name, leaf in came.items()}
        why: Why = "not_finite" if broken else "nobody"
        verdict = Verdict("zeroed", why, clients, 0.0, _changed(came, held))
        return map_arrays(held), verdict
    held, kept, reasons = _hold(mechanism, came, ids)
    word: Word = "scaled" if "norm" in reasons else "mended" if reasons else "taken"
    why = "norm" if word == "scaled" else reasons[0] if reasons else ""
    return map_arrays(held), Verdict(word, why, clients, kept, _changed(came, held))


def hold_sum(mechanism: Mechanism, total: Tree, ids: NDArray[np.int64]) -> Tree:
    """Fold a sum over sites, out of secure aggregation: see the head of this file.

    Args:
        mechanism: Of the round.
        total: Whole multiples of `steps`, in float64, as the ring gave them.
        ids: Numbers of *all* clients of the sites in the sum, drawn or not.

    Raises:
        ValueError: If the mechanism has no sum that could be folded; if the clients are too many;
            if a number lies off the grid, which no ring gives.
    """
    check_sum(mechanism)
    ids = _checked(mechanism, ids)
    came = _place(mechanism, {name: leaf.numpy() for name, leaf in total.items()}, ids)
    held = {}
    for ball in balls(mechanism, {name: leaf.shape for name, leaf in came.items()}):
        most = ball.most(ball.clients(ids))
        if 2 * most > _EXACT:
            raise ValueError(
                f"{len(ids)} clients: their sum could pass 2^52 grid steps and no longer be exact "
                "in float64; share them out over several federations"
            )
        for name in ball.shapes:
            with np.errstate(over="ignore"):
                whole = came[name] / ball.step
            if not np.array_equal(whole, np.rint(whole)) or not np.isfinite(whole).all():
                raise ValueError(
                    f"{name} is not in whole steps of {ball.step}, which all numbers out of a ring "
                    "are: give what `secagg.from_ring` made with the same steps"
                )
            held[name] = _mend(ball, _fold(whole, most))[0] * ball.step
    return map_arrays(held)


def check_sum(mechanism: Mechanism) -> None:
    """Refuse a mechanism whose sum over sites cannot be brought into bounds without a cost.

    Raises:
        ValueError: For sums without a grid, and for Wishart noise.
    """
    if isinstance(mechanism, Exact):
        raise ValueError(
            "a sum without noise lies on no grid, and a ring takes whole numbers alone: give the "
            "plan a budget, or use trust = 'server'"
        )
    if isinstance(mechanism, WishartGram):
        raise ValueError(
            "wishart noise is accounted for changes w w^T alone, which the bound on a sum out of "
            "secure aggregation does not keep: use gaussian noise, or trust = 'server'"
        )


def _hold(
    mechanism: Mechanism, came: Arrays, ids: NDArray[np.int64]
) -> tuple[Arrays, float, list[Why]]:
    reasons: list[Why] = []
    held = _place(mechanism, came, ids)
    if _changed(came, held):
        reasons.append("rows")
    if isinstance(mechanism, Exact) and mechanism.shape is Shape.SQUARES:
        held = {name: np.where(leaf < 0, 0.0, leaf) for name, leaf in held.items()}
        reasons += ["sign"] if _changed(came, held) else []
    kept = 1.0
    for ball in balls(mechanism, {name: leaf.shape for name, leaf in held.items()}):
        mended = {}
        for name in ball.shapes:
            mended[name], found = _mend(ball, held[name])
            reasons += found
        clients = ball.clients(ids)
        matrix = np.concatenate([leaf.reshape(ball.rows, -1) for leaf in mended.values()], axis=1)
        matrix, factor = _shrink(ball, matrix, ball.reach(clients))
        kept = min(kept, factor)
        matrix, found = _round(ball, matrix, ball.most(clients))
        reasons += found
        if factor < 1:
            reasons.append("norm")
        held = {**held, **_split(ball, matrix)}
    return held, kept, reasons


def _mend(ball: Ball, leaf: Array) -> tuple[Array, list[Why]]:
    """Make symmetric what is a second moment, and cut what cannot be negative.

    The lower triangle counts: a mirror, unlike a mean, stays on the grid and moves by no more than
    a symmetric change does.
    """
    found: list[Why] = []
    bare = np.zeros(leaf.shape, dtype=bool)
    if ball.gram:
        np.fill_diagonal(bare, val=True)
        if not np.array_equal(leaf, leaf.T):
            found.append("symmetry")
            leaf = np.tril(leaf) + np.tril(leaf, -1).T
    elif ball.positive:
        bare[...] = True
    if bool((leaf[bare] < 0).any()):
        found.append("sign")
        leaf = np.where(bare & (leaf < 0), 0.0, leaf)
    return leaf, found


def _shrink(ball: Ball, matrix: Array, limit: float) -> tuple[Array, float]:
    """Scale rows that are longer than the limit onto it; give the smallest factor kept."""
    # In units of the largest entry: squares of huge numbers would overflow.
    largest = np.abs(matrix).max(axis=1, initial=0.0, keepdims=True)
    unit = np.maximum(largest, np.finfo(np.float64).tiny)
    scaled = matrix / unit
    sizes = _sizes(ball, scaled)
    # A computed norm is off by a relative (numbers + a few) 2^-53 at most: no honest one is cut.
    room = 1 + (ball.numbers + 16) * 2.0**-51
    with np.errstate(over="ignore"):
        over = sizes > limit / unit * room
    if not bool(over.any()):
        return matrix, 1.0
    factor = np.where(over, limit / np.maximum(sizes * room, 1.0), 1.0) * (1 - 2.0**-50)
    with np.errstate(under="ignore"):
        kept = float(np.min((factor / unit)[over]))
    return np.where(over, scaled * factor, matrix), kept


def _sizes(ball: Ball, scaled: Array) -> Array:
    if ball.order == 1:
        return np.asarray(np.abs(scaled).sum(axis=1, keepdims=True))
    sizes = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
    if ball.gram:
        # The trace of a sum of w w^T is the sum of the |w|^2: at most the bound as well.
        eyes = [np.eye(shape[0]).ravel() for shape in ball.shapes.values()]
        sizes = np.maximum(sizes, (scaled * np.concatenate(eyes)).sum(axis=1, keepdims=True))
    return np.asarray(sizes)


def _round(ball: Ball, matrix: Array, most: int) -> tuple[Array, list[Why]]:
    """Round towards zero onto the grid, no number above the most: sums over sites stay exact."""
    found: list[Why] = []
    whole = np.trunc(matrix / ball.step)
    if not np.array_equal(whole * ball.step, matrix):
        found.append("grid")
    if bool((np.abs(whole) > most).any()):
        found.append("range")
        whole = np.clip(whole, -most, most)
    return whole * ball.step, found


def _fold(whole: Array, most: int) -> Array:
    size = np.abs(whole)
    return np.asarray(np.copysign(np.maximum(np.minimum(size, 2.0 * most - size), 0.0), whole))


def _split(ball: Ball, matrix: Array) -> Arrays:
    found, used = {}, 0
    for name, shape in ball.shapes.items():
        width = math.prod(shape) // ball.rows
        found[name] = matrix[:, used : used + width].reshape(shape)
        used += width
    return found


def _place(mechanism: Mechanism, came: Arrays, ids: NDArray[np.int64]) -> Arrays:
    """Keep the rows of these clients alone, where each client has one."""
    if not _in_rows(mechanism):
        return came
    placed = {name: np.zeros_like(leaf) for name, leaf in came.items()}
    for name, leaf in came.items():
        placed[name][ids] = leaf[ids]
    return placed


def _in_rows(mechanism: Mechanism) -> bool:
    if isinstance(mechanism, Exact):
        return mechanism.shape is Shape.ROWS
    return isinstance(mechanism, GaussianRows)


def _checked(mechanism: Mechanism, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    listed = np.asarray(ids)
    if listed.ndim != 1 or (len(listed) and not np.issubdtype(listed.dtype, np.integer)):
        raise ValueError(f"ids of {listed.dtype}, shape {listed.shape}: expected a list of int64")
    ordered = np.sort(listed)
    if bool((ordered[1:] == ordered[:-1]).any()) or bool((listed < 0).any()):
        raise ValueError("ids name a client twice, or none: give each client's number once")
    if isinstance(mechanism, Exact | GaussianRows) and _in_rows(mechanism):
        above = listed[listed >= mechanism.clients]
        if len(above):
            raise ValueError(f"id {above[0]}: expected a number below {mechanism.clients} clients")
    return listed.astype(np.int64)


def _changed(came: Arrays, held: Arrays) -> int:
    return sum(int((came[name] != leaf).sum()) for name, leaf in held.items())
