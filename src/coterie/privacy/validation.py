"""Validation of incoming sums, from sites that may be faulty or hostile.

A site hosts one or several clients and sends the sum of their bounded contributions as plain
numbers. Before these are added to others, they are brought into the set of possible sums: finite,
inside the norm bound of that many clients, on the public grid.

`validate`: the sum of one site
-------------------------------
Every honest sum x of n clients obeys |x| <= n B in the mechanism's norm, and lies on the grid:
`clip` and `reduce` make it so, exactly. `validate` is the identity on all of these, bit for bit. A
longer sum is scaled onto the limit, then rounded towards zero, which increases no norm.

**Guarantee:** releases stay as private as the ledger states for every client of an honest site,
whatever the other sites send. Let s_i be the message of site i. A round releases sum_i
validate(s_i) + noise. A client of site j changes only s_j, and in s_j only its own summand: a
client that cannot be computed is a summand of zeros, and no other client of the site is
(`engine.rounds`). Since validate(s_j) = s_j, neighbours differ by at most `sensitivity(relation)`,
on the grid, around a sum of the others that is the same for both. This assumes that whether s_j
arrives does not depend on one client's rows, which the certificate lists. The norm is computed in
floats, so a sum may exceed its limit by a relative 2^-51 per number before it is changed. That is
harmless: it only limits a *hostile* site, and no honest client's sensitivity depends on it. Over
rounds: the others choose s_i after they observe all earlier releases, but not this round's
contributions. Given those releases s_i is fixed, or random independently of them, so each round is
dominated by the pair of distributions that the ledger counts, and adaptive composition holds for
such pairs (Dong, Roth and Su 2022; Zhu, Dong and Wang 2022). Cohorts are as hidden as the plan's
account assumes. Under local noise a message is private before it arrives, and all of this is
post-processing.

`fold`: one sum over all sites, out of secure aggregation
---------------------------------------------------------
Here hostile numbers h are inside the sum before anybody can check them: the ring returns
t = x + h mod 2^64, and any function of t depends on honest data. Projecting t onto a ball is
1-Lipschitz in l2, rounding to the grid afterwards is not. Clamping every number is 1-Lipschitz on
the line, but not on the ring: with h just below 2^63, one step more of x turns the largest number
into the smallest, and the clamped number jumps from n B to -n B. So every number is *folded*, in
whole grid steps, with m = floor(n B / g):

    f(t) = t for |t| <= m,   sign(t) (2 m - |t|) for m <= |t| <= 2 m,   0 beyond,

where numbers that are never negative have f(t) = 0 for t < 0.

**Guarantee:** releases are as private as the ledger states for every client of an honest site,
whatever other sites put into the sum. f has slope 1, -1 or 0, and is 0 around the point where the
ring wraps, hence |f(t) - f(t')| <= |t - t'| for the distance on the ring, in whole numbers,
exactly. A client that moves x by d moves the folded sum by at most |d_k| in number k: by at most as
much as x in l1, in l2, in Frobenius norm and block by block. Honest sums lie where f is the
identity. m must not depend on the cohort, which is hidden: count *all* clients of the sites whose
numbers are in the sum. Wishart noise is refused: its account needs the change to be w w^T itself.
Whether anything was folded is a function of the sum without noise: it is not reported.

Tests: tests/privacy/test_validation.py, tests/properties/test_validation.py,
tests/statistics/test_validation.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.core.tree import Tree, map_arrays
from coterie.privacy.mechanisms import Mechanism, NormBound, Shapes

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]
Status = Literal["taken", "mended", "scaled", "zeroed"]
Why = Literal["", "not_finite", "nobody", "rows", "symmetry", "sign", "norm", "range", "grid"]

_EXACT = 1 << 53
"""Largest number of grid steps that float64 represents exactly."""


@dataclass(frozen=True)
class Verdict:
    """What validation changed in a site's sum.

    An honest sum is always "taken", so a verdict reveals nothing about honest data and may be
    logged.

    Attributes:
        status: "taken" unchanged; "mended" (see `why`); "scaled" onto the limit; "zeroed".
        why: The gravest reason: "not_finite"; "nobody", if none of its clients was sampled; "rows"
            of others; "symmetry"; "sign"; "norm"; "range" of a single number; "grid".
        kept: The smallest factor of a scaling.
        changed: How many numbers were changed.
    """

    status: Status
    why: Why
    clients: int
    kept: float = 1.0
    changed: int = 0

    @property
    def taken(self) -> bool:
        """Whether the sum counts unchanged."""
        return self.status == "taken"

    @property
    def zeroed(self) -> bool:
        """Whether the whole sum counts as zeros."""
        return self.status == "zeroed"


def grid_steps(mechanism: Mechanism, totals: Shapes) -> dict[str, float] | None:
    """Return the public grid step of each leaf of a sum, a power of two; None without a grid.

    >>> from coterie.privacy.mechanisms import LaplaceSum
    >>> grid_steps(LaplaceSum(1.0, 0.5), {"w": (3,)}) == {"w": 2.0**-29}
    True
    """
    found = mechanism.norm_bounds(totals)
    return {name: one.step for one in found for name in one.shapes} if found else None


def validate(mechanism: Mechanism, total: Tree, ids: NDArray[np.int64]) -> tuple[Tree, Verdict]:
    """Return a site's sum within the bounds of these clients, and what was changed.

    An honest sum is unchanged, bit for bit; with local noise, except with probability 2e-13. See
    the module docstring. Raise ValueError if `ids`, the site's clients in this round, are not
    different clients.
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
    held, kept, reasons = _validate(mechanism, came, ids)
    status: Status = "scaled" if "norm" in reasons else "mended" if reasons else "taken"
    why = "norm" if status == "scaled" else reasons[0] if reasons else ""
    return map_arrays(held), Verdict(status, why, clients, kept, _changed(came, held))


def fold(mechanism: Mechanism, total: Tree, ids: NDArray[np.int64]) -> Tree:
    """Return a sum over sites, out of secure aggregation, folded into its bounds.

    `ids` are *all* clients of the sites in the sum, sampled or not. See the module docstring. Raise
    ValueError if the mechanism has no sum that can be folded, for too many clients, or if a number
    is not a whole multiple of `grid_steps`.
    """
    mechanism.check_secure_sum()
    ids = _checked(mechanism, ids)
    came = _place(mechanism, {name: leaf.numpy() for name, leaf in total.items()}, ids)
    held = {}
    for limit in mechanism.norm_bounds({name: leaf.shape for name, leaf in came.items()}):
        most = limit.step_limit(limit.clients(ids))
        if 2 * most > _EXACT:
            raise ValueError(
                f"{len(ids)} clients: their sum could exceed 2^52 grid steps, which float64 does "
                "not represent exactly; split the federation"
            )
        for name in limit.shapes:
            with np.errstate(over="ignore"):
                whole = came[name] / limit.step
            if not np.array_equal(whole, np.rint(whole)) or not np.isfinite(whole).all():
                raise ValueError(
                    f"{name} is not in whole steps of {limit.step}: expected the output of "
                    "`secagg.from_ring` with the same steps"
                )
            held[name] = _mend(limit, _fold(whole, most))[0] * limit.step
    return map_arrays(held)


def _validate(
    mechanism: Mechanism, came: Arrays, ids: NDArray[np.int64]
) -> tuple[Arrays, float, list[Why]]:
    held = _place(mechanism, came, ids)
    reasons: list[Why] = ["rows"] if _changed(came, held) else []
    if mechanism.nonnegative:
        held = {name: np.where(leaf < 0, 0.0, leaf) for name, leaf in held.items()}
        reasons += ["sign"] if _changed(came, held) else []
    kept = 1.0
    for limit in mechanism.norm_bounds({name: leaf.shape for name, leaf in held.items()}):
        mended = {}
        for name in limit.shapes:
            mended[name], found = _mend(limit, held[name])
            reasons += found
        clients = limit.clients(ids)
        matrix = np.concatenate([leaf.reshape(limit.rows, -1) for leaf in mended.values()], axis=1)
        matrix, factor = _shrink(limit, matrix, limit.norm_limit(clients))
        kept = min(kept, factor)
        matrix, found = _round(limit, matrix, limit.step_limit(clients))
        reasons += found
        if factor < 1:
            reasons.append("norm")
        held = {**held, **_split(limit, matrix)}
    return held, kept, reasons


def _mend(limit: NormBound, leaf: Array) -> tuple[Array, list[Why]]:
    """Return symmetric second moments, and zeros where numbers cannot be negative.

    The lower triangle counts: unlike a mean of both, it stays on the grid and moves by no more than
    a symmetric change does.
    """
    found: list[Why] = []
    bare = np.zeros(leaf.shape, dtype=bool)
    if limit.gram:
        # With clients' noise inside the sum a diagonal entry may be negative.
        np.fill_diagonal(bare, val=limit.noise == 0)
        if not np.array_equal(leaf, leaf.T):
            found.append("symmetry")
            leaf = np.tril(leaf) + np.tril(leaf, -1).T
    elif limit.nonnegative:
        bare[...] = True
    if bool((leaf[bare] < 0).any()):
        found.append("sign")
        leaf = np.where(bare & (leaf < 0), 0.0, leaf)
    return leaf, found


def _shrink(limit: NormBound, matrix: Array, largest_norm: float) -> tuple[Array, float]:
    """Return rows scaled onto the limit if longer, and the smallest factor."""
    # In units of the largest entry: squares of huge numbers would overflow.
    largest = np.abs(matrix).max(axis=1, initial=0.0, keepdims=True)
    unit = np.maximum(largest, np.finfo(np.float64).tiny)
    scaled = matrix / unit
    sizes = _sizes(limit, scaled)
    # A computed norm is off by a relative (numbers + a few) 2^-53 at most: no honest one is cut.
    slack = 1 + (limit.numbers + 16) * 2.0**-51
    with np.errstate(over="ignore"):
        over = sizes > largest_norm / unit * slack
    if not bool(over.any()):
        return matrix, 1.0
    factor = np.where(over, largest_norm / np.maximum(sizes * slack, 1.0), 1.0) * (1 - 2.0**-50)
    with np.errstate(under="ignore"):
        kept = float(np.min((factor / unit)[over]))
    return np.where(over, scaled * factor, matrix), kept


def _sizes(limit: NormBound, scaled: Array) -> Array:
    if limit.order == 1:
        return np.asarray(np.abs(scaled).sum(axis=1, keepdims=True))
    sizes = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
    if limit.gram:
        # The trace of a sum of w w^T is the sum of the |w|^2: at most the bound as well.
        eyes = [np.eye(shape[0]).ravel() for shape in limit.shapes.values()]
        sizes = np.maximum(sizes, (scaled * np.concatenate(eyes)).sum(axis=1, keepdims=True))
    return np.asarray(sizes)


def _round(limit: NormBound, matrix: Array, most: int) -> tuple[Array, list[Why]]:
    """Return numbers rounded towards zero onto the grid, within the limit: sums stay exact."""
    found: list[Why] = []
    whole = np.trunc(matrix / limit.step)
    if not np.array_equal(whole * limit.step, matrix):
        found.append("grid")
    if bool((np.abs(whole) > most).any()):
        found.append("range")
        whole = np.clip(whole, -most, most)
    return whole * limit.step, found


def _fold(whole: Array, most: int) -> Array:
    size = np.abs(whole)
    return np.asarray(np.copysign(np.maximum(np.minimum(size, 2.0 * most - size), 0.0), whole))


def _split(limit: NormBound, matrix: Array) -> Arrays:
    found, used = {}, 0
    for name, shape in limit.shapes.items():
        width = math.prod(shape) // limit.rows
        found[name] = matrix[:, used : used + width].reshape(shape)
        used += width
    return found


def _place(mechanism: Mechanism, came: Arrays, ids: NDArray[np.int64]) -> Arrays:
    """Return only the rows of these clients, if each client has one."""
    if not mechanism.rows:
        return came
    placed = {name: np.zeros_like(leaf) for name, leaf in came.items()}
    for name, leaf in came.items():
        placed[name][ids] = leaf[ids]
    return placed


def _checked(mechanism: Mechanism, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    listed = np.asarray(ids)
    if listed.ndim != 1 or (len(listed) and not np.issubdtype(listed.dtype, np.integer)):
        raise ValueError(f"ids of {listed.dtype}, shape {listed.shape}: expected a list of int64")
    ordered = np.sort(listed)
    if bool((ordered[1:] == ordered[:-1]).any()) or bool((listed < 0).any()):
        raise ValueError(
            "ids contain a client twice, or a negative number: give each client's id once"
        )
    if mechanism.rows:
        above = listed[listed >= mechanism.rows]
        if len(above):
            raise ValueError(f"id {above[0]}: expected a number below {mechanism.rows} clients")
    return listed.astype(np.int64)


def _changed(came: Arrays, held: Arrays) -> int:
    return sum(int((came[name] != leaf).sum()) for name, leaf in held.items())
