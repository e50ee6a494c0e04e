"""Reconstruct a client's rows and labels from its messages in an MTL-SVM run.

The attacker sees every shared w and one message of the client per round: a server sees clipped
messages before noise; all other clients together subtract their own contributions from a release
and see the message plus noise. It knows the step rule, clip and noise, the number of rows, and,
since v_k starts at 0 and moves by dw_k / C2, also v_k (Ponomarenko-Timofeev et al., section 6.1),
unless contributions are masked and duals are not.

It looks for rows u_i = y_i x_i that would have produced the messages. Messages lie in the span of
the rows, so one message reveals one row. Serial steps, and simultaneous ones, separate rows as soon
as w moves enough for rows to reach the ends of their boxes. A row that never moves is never seen. A
Bernoulli mask helps the attacker, because steps that are exactly 0 separate rows. A clip hides the
size of a message, not its direction. For noisy messages the attack is simple (means and main
directions). A better attack may find more: only noise with a budget has a proof.

Exact search. Messages are M = D U: D (T, n) the steps of alpha, U (n, d) the rows. Where the rows
are independent, each row has a *functional* g_i with g_i . u_j = 1 for j = i and else 0, and M g_i
is the series of its steps. Steps are often exactly 0 (a row at an end of its box, or masked), and
their sums lie in [0, C1] and often at its ends. Both are vertices of polytopes, which linear
programs find (the first is the recovery of sparsely used dictionaries; Spielman, Wang, Wright
2012). In serial steps the row that moved last in a round has margin 1 at its end,
u . (w + v + a dw) = 1, where only u is unknown: a row that was last in more rounds than it has
unknowns is found by consensus (Fischler and Bolles 1981).

Fit. With w + v known, rows do not interact within a simultaneous round: alpha_i(t + 1) =
clip(alpha_i(t) + (1 - q_t . u_i) / (a |u_i|^2)), and the message is the sum over rows of steps
times u_i. It is fitted by Levenberg-Marquardt from many starts.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, linprog

from coterie.core.rng import Rng

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
MaskKind = Literal["none", "step", "paper"]
REVEALED = 0.99
_PARALLEL = 1e-12
_ALIKE = 0.9999
_SAME = 1e-9
_MISS = 1e-8
_NEAR = 1e-3
_MOST_ROUNDS = 150
_CHUNK = 2000
_MOST_STEPS = 80


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The public step rule of a client, hinge loss, u_i = y_i x_i.

    "simultaneous" moves all rows at once, as published: from alpha_i to
    alpha_i + (1 - (w + v) . u_i) / (a |u_i|^2), a = sigma + 1/C2 (published with sigma = 1),
    clipped to [0, C1]. "serial" moves them one by one, in a new order in each pass, with
    w + v + a dw for w + v: the library's safe steps.

    Attributes:
        c1: The box.
        c2: The weight of the personal parts.
        sigma: The number of clients whose steps are summed.
        steps: "serial" or "simultaneous".
    """

    c1: float = 1.0
    c2: float = 1.0
    sigma: float = 1.0
    steps: Literal["serial", "simultaneous"] = "serial"

    @property
    def curvature(self) -> float:
        """The factor a = sigma + 1/C2 of |x|^2 in the denominator of a step."""
        return self.sigma + 1 / self.c2


@dataclass(frozen=True, kw_only=True)
class View:
    """An attacker's view of one client over T rounds with D features.

    Attributes:
        shared: w before each round, (T, D).
        messages: The observed contribution of the client to each round, (T, D).
        rule: The public step rule.
        clip: The bound on a contribution; None for none.
        noise: Standard deviation of the noise per coordinate of a message.
        mask: "none"; "step" if dual steps are masked; "paper" if only contributions are, so that
            v is unknown.
        rows: The number of rows of the client.
    """

    shared: Array
    messages: Array
    rule: Rule
    rows: int
    clip: float | None = None
    noise: float = 0.0
    mask: MaskKind = "none"

    @property
    def starts(self) -> Array:
        """The vectors w + v before each round, with v from the messages."""
        before = np.cumsum(self.messages, axis=0) - self.messages
        return self.shared + before / self.rule.c2

    @property
    def ends(self) -> Array:
        """The vectors w + v + a dw after each round: the last row that moved has margin 1 there."""
        return self.starts + self.rule.curvature * self.messages

    @property
    def uncut(self) -> NDArray[np.bool_]:
        """The rounds with a message that is neither clipped nor rounding."""
        size = np.linalg.norm(self.messages, axis=1)
        heard: NDArray[np.bool_] = size > 1e-6 * size.max(initial=0.0)
        # A mechanism clips slightly below its bound, for rounding.
        return heard if self.clip is None else heard & (size < 0.99 * self.clip)


def span(messages: Array, tolerance: float = 1e-9) -> Array:
    """Return an orthonormal basis, (d, m), of the space that messages lie in."""
    _, sizes, basis = np.linalg.svd(messages, full_matrices=False)
    kept: Array = basis[sizes > tolerance * sizes.max(initial=0.0)].T
    return kept


@dataclass(frozen=True)
class Found:
    """A candidate and the rounds that support it."""

    value: Array
    rounds: Flags

    @property
    def count(self) -> int:
        """The number of rounds that support it."""
        return int(self.rounds.sum())


def functionals(steps: Array, c1: float, tries: int, rng: np.random.Generator) -> list[Found]:
    """Return functionals g, (m,), of messages in coordinates of their span, best first."""
    size = np.linalg.norm(steps, axis=1)
    heard = np.flatnonzero(size > 1e-7 * size.max())
    sums = np.cumsum(steps, axis=0)[heard]
    if len(heard) > _MOST_ROUNDS:
        heard = np.sort(rng.choice(heard, _MOST_ROUNDS, replace=False))
        sums = np.cumsum(steps, axis=0)[heard]
    if len(heard) < steps.shape[1] + 3:
        return []
    found = _still(steps[heard] / size[heard, None], tries, rng) + _boxed(sums, c1, tries, rng)
    return _choose(found, steps.shape[1])


def _still(steps: Array, tries: int, rng: np.random.Generator) -> list[Found]:
    """Minimise the sum of |steps . g| with one round fixed to 1: steps that are often 0."""
    rounds, width = steps.shape
    white, shape = np.linalg.qr(steps)
    white = white * np.sqrt(rounds)
    goal = np.concatenate([np.zeros(width), np.ones(rounds)])
    eye = np.eye(rounds)
    sides = np.block([[white, -eye], [-white, -eye]])
    found = []
    for turn in rng.permutation(rounds)[:tries]:
        held = np.concatenate([white[turn], np.zeros(rounds)])[None]
        solved = _solve(goal, sides, np.zeros(2 * rounds), held)
        if solved is not None:
            moved = white @ solved[:width]
            found.append(Found(np.linalg.solve(shape, solved[:width]), np.abs(moved) < _SAME))
    return found


def _boxed(sums: Array, c1: float, tries: int, rng: np.random.Generator) -> list[Found]:
    """Return vertices of {g: 0 <= sums . g <= C1}: alphas often at an end of the box."""
    white, shape = np.linalg.qr(sums)
    white = white * np.sqrt(len(sums))
    sides = np.concatenate([white, -white])
    ends = np.concatenate([np.full(len(sums), c1), np.zeros(len(sums))])
    found = []
    for turn in range(tries):
        pair = white[rng.integers(len(sums), size=2)]
        goal = pair[1] - pair[0] if turn % 2 else rng.standard_normal(white.shape[1])
        solved = _solve(goal, sides, ends)
        if solved is None:
            continue
        alpha = white @ solved
        low, high = np.abs(alpha) < _SAME * c1, np.abs(alpha - c1) < _SAME * c1
        if alpha.max() > 1e-6 * c1:
            found.append(Found(np.linalg.solve(shape, solved) * np.sqrt(len(sums)), low | high))
    return found


def _solve(goal: Array, sides: Array, ends: Array, held: Array | None = None) -> Array | None:
    equal: dict[str, Any] = {} if held is None else {"A_eq": held, "b_eq": [1.0]}
    solved = linprog(goal, sides, ends, bounds=(None, None), method="highs-ds", **equal)
    return solved.x if solved.status == 0 else None


def _choose(found: list[Found], width: int) -> list[Found]:
    """Return independent candidates with more support than any vertex, best first."""
    kept: list[Found] = []
    basis = np.zeros((width, 0))
    for one in sorted(found, key=lambda one: -one.count):
        if one.count < width + 2 or len(kept) == width:
            break
        unit = one.value / np.linalg.norm(one.value)
        apart = unit - basis @ (basis.T @ unit)
        # A mixture of two functionals has, but for accidents, the rounds that both have.
        mixed = any((one.rounds & ~other.rounds).sum() <= 3 for other in kept)
        if np.linalg.norm(apart) > 1e-5 and not mixed:
            kept.append(Found(unit, one.rounds))
            basis = np.column_stack([basis, apart / np.linalg.norm(apart)])
    return kept


def consensus(
    left: Array,
    right: Array,
    scale: Array,
    rng: np.random.Generator,
    *,
    tries: int,
    largest: float = math.inf,
) -> list[Found]:
    """Return x with left @ x = right in more rounds than unknowns, best first.

    `left` is (T, r), `right` is (T,), and `scale` the unit of a residual in each round. Of `tries`
    choices of r rounds those count with |x| < `largest`: nearly equal rounds have huge solutions.
    """
    rounds, unknowns = left.shape
    if rounds < unknowns + 3 or not unknowns:
        return []
    found: list[Found] = []
    for _ in range(0, tries, _CHUNK):
        # One row is last in a round: choose among rounds without a row so far.
        taken = np.zeros(rounds, dtype=bool)
        for one in found:
            near = _NEAR * (1 + np.linalg.norm(one.value)) * scale
            taken |= np.abs(left @ one.value - right) <= near
        open_rounds = np.flatnonzero(~taken)
        if len(open_rounds) < unknowns:
            break
        drawn = rng.random((min(tries, _CHUNK), len(open_rounds)))
        chosen = open_rounds[np.argsort(drawn, axis=1)[:, :unknowns]]
        systems = left[chosen]
        sign, _ = np.linalg.slogdet(systems)
        systems, goals = systems[sign != 0], right[chosen][sign != 0]
        solved = np.linalg.solve(systems, goals[..., None])[..., 0]
        size = np.linalg.norm(solved, axis=1)
        solved, size = solved[size < largest], size[size < largest]
        reach = _MISS * (1 + size)[:, None] * scale
        fits = np.abs(solved @ left.T - right) <= reach
        found += _refined(left, right, scale, fits)
        found = _distinct(found)
    return found


def _refined(left: Array, right: Array, scale: Array, fits: Flags) -> list[Found]:
    """Solve again with all rounds that fit, for distinct candidates, best first."""
    fits = fits[fits.sum(axis=1) >= left.shape[1] + 2]
    refined = []
    while len(fits):
        here = fits[int(np.argmax(fits.sum(axis=1)))]
        weighted, aims = left[here] / scale[here, None], right[here] / scale[here]
        # Equal rounds count once: no unknown may depend on a single round.
        if (np.linalg.qr(weighted)[0] ** 2).sum(axis=1).max() < 0.999:
            refined.append(Found(np.linalg.lstsq(weighted, aims, rcond=None)[0], here))
        # The same row again, or a mixture of rows, which fits where they all fit.
        fits = fits[(fits & ~here).sum(axis=1) > 2]
    return refined


def _distinct(found: list[Found]) -> list[Found]:
    kept: list[Found] = []
    for one in sorted(found, key=lambda one: -one.count):
        if not any((one.rounds & ~other.rounds).sum() <= 2 for other in kept):
            kept.append(one)
    return kept


def reconstruct(
    view: View, *, positive: int | None = None, seed: int = 0, tries: int = 60
) -> tuple[Array, Array]:
    """Return rows, (n, d), and labels, -1 or +1, of one client.

    `positive` is a column known to be positive in every row, which determines labels; without it
    (x, y) and (-x, -y) are indistinguishable, and labels are +1. `tries` is the number of linear
    programs of each kind.
    """
    rng, count = Rng.seeded(seed).at("attack").numpy(), view.rows
    if not np.any(view.messages):
        signed = rng.standard_normal((count, view.messages.shape[1]))
    elif view.noise:
        signed = _sized(view, _rough(view.messages, count, rng))
    else:
        found = _search(view, count, rng, tries)
        signed = _sized(view, _fill(view, found.rows, count, rng))
        signed[: len(found)][found.sized] = found.rows[found.sized]
    labels = np.ones(count)
    if positive is not None:
        labels = np.where(signed[:, positive] < 0, -1.0, 1.0)
    return labels[:, None] * signed, labels


class _Directions:
    """At most `count` rows with distinct directions; rows of unknown size have unit norm."""

    def __init__(self, width: int, count: int) -> None:
        self.count = count
        self.rows, self.sized = np.zeros((0, width)), np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Array, *, sized: bool) -> None:
        """Add new directions."""
        for row in rows:
            size = float(np.linalg.norm(row))
            cosines = self.rows @ row / size / np.linalg.norm(self.rows, axis=1)
            if len(self) < self.count and not np.any(np.abs(cosines) > _ALIKE):
                self.rows = np.vstack([self.rows, row if sized else row / size])
                self.sized = np.append(self.sized, sized)


def _search(view: View, count: int, rng: np.random.Generator, tries: int) -> _Directions:
    """Return rows that the messages support."""
    found = _Directions(view.messages.shape[1], count)
    rest = _peel(view, found, rng, tries)
    if len(found) < count and view.rule.steps == "serial" and view.mask != "paper":
        found.add(_last_movers(view, span(rest), count, rng), sized=True)
    elif len(found) < count and view.mask == "none":
        rows = _fitted(view, count, rng)
        found = _Directions(rows.shape[1], count) if len(rows) else found
        found.add(rows, sized=True)
    return found


def _peel(view: View, found: _Directions, rng: np.random.Generator, tries: int) -> Array:
    """Find rows with known steps and subtract them; return the remaining messages."""
    rest = view.messages
    while len(found) < found.count and np.linalg.norm(rest) > 1e-9 * np.linalg.norm(view.messages):
        basis = span(rest)
        if basis.shape[1] == 1:
            found.add(basis.T, sized=False)
            break
        steps, left = rest @ basis, found.count - len(found)
        # Functionals exist where the rows that are left are independent.
        known = functionals(steps, view.rule.c1, tries, rng) if left == basis.shape[1] else []
        if len(known) == left:
            found.add(np.linalg.inv([one.value for one in known]).T @ basis.T, sized=False)
            break
        pairs = _paired(view, basis, steps, known, rng) if view.mask != "paper" else []
        for functional, row in pairs:
            found.add((basis @ row)[None], sized=True)
            rest = rest - np.outer(steps @ functional / (functional @ row), basis @ row)
        if not pairs:
            break
    return rest


def _paired(
    view: View, basis: Array, steps: Array, known: list[Found], rng: np.random.Generator
) -> list[tuple[Array, Array]]:
    """Return pairs of a functional and its row, in coordinates of the basis."""
    pairs = []
    size = np.linalg.norm(view.messages, axis=1)
    for place, one in enumerate(known):
        others = [other.value for k, other in enumerate(known) if k != place]
        if view.rule.steps == "serial":
            # The row is 0 under all other functionals.
            free = _null(np.array(others).reshape(-1, basis.shape[1]))
            left = (view.ends @ basis @ free)[view.uncut]
            spoken = consensus(
                left, np.ones(len(left)), view.rule.curvature * size[view.uncut], rng, tries=4000
            )
            rows = [free @ other.value for other in spoken[:1]]
        else:
            moved = steps @ one.value
            use = view.uncut & (np.abs(moved) > 1e-9 * np.abs(moved).max())
            left = np.column_stack([np.ones(use.sum()), -(view.starts @ basis)[use]])
            scale = np.abs(view.rule.curvature * moved[use])
            spoken = consensus(left, view.rule.curvature * moved[use], scale, rng, tries=4000)
            rows = [other.value[1:] / other.value[0] for other in spoken[:1]]
        pairs += [(one.value, row) for row in rows if abs(one.value @ row) > 1e-9]
    return pairs


def _null(rows: Array) -> Array:
    """Return an orthonormal basis, (m, m - k), of the null space of k functionals."""
    if not len(rows):
        return np.eye(rows.shape[1])
    full: Array = np.linalg.qr(rows.T, mode="complete")[0][:, len(rows) :]
    return full


def _last_movers(view: View, basis: Array, count: int, rng: np.random.Generator) -> Array:
    """Return rows with margin 1 at the end of more rounds than by chance."""
    width = basis.shape[1]
    if count ** max(width - 1, 0) > 1e6 or not view.uncut.any():
        return np.zeros((0, len(basis)))
    size = np.linalg.norm(view.messages, axis=1)[view.uncut]
    ends = (view.ends @ basis)[view.uncut]
    # A row with margin 1 at z has a norm of 1 / |z| over the cosine between them.
    largest = 100 / max(float(np.median(np.linalg.norm(ends, axis=1))), 1e-9)
    spoken = consensus(
        ends, np.ones(len(ends)), view.rule.curvature * size, rng, tries=20_000, largest=largest
    )
    return np.array([one.value @ basis.T for one in spoken]).reshape(-1, len(basis))


def _repeated(view: View, units: Array) -> Array:
    """Return directions of several messages: rounds in which one row moved."""
    if view.rule.steps == "simultaneous" and view.mask == "none":
        return units[:0]  # rows that move between the ends of their boxes together repeat too
    alike = np.abs(units @ units.T) > 1 - _PARALLEL
    several: Array = units[alike.sum(axis=1) > 1]
    return several


def _fitted(view: View, count: int, rng: np.random.Generator) -> Array:
    """Return rows fitted by the simultaneous rule; none if no start gives a perfect fit."""
    basis = span(view.messages)
    width = basis.shape[1]
    size = np.linalg.norm(view.messages, axis=1)
    if (
        count > 10
        or count * width > 60
        or (view.clip is not None and size.max() > 0.99 * view.clip)
    ):
        return np.zeros((0, len(basis)))
    number = int(np.clip(5000 // (count * width), 8, 200))
    guesses = rng.standard_normal((number, count, width))
    guesses /= np.linalg.norm(guesses, axis=2, keepdims=True)
    first = view.messages[0] @ basis
    guesses *= np.where(guesses @ first < 0, -1.0, 1.0)[..., None]
    guesses *= np.exp(0.4 * rng.standard_normal((number, count, 1)))
    rows, misfit = fit(view.messages @ basis, view.starts @ basis, view.rule, guesses)
    return rows @ basis.T if misfit < 1e-16 else np.zeros((0, len(basis)))


def _sized(view: View, units: Array) -> Array:
    """Return directions e with signs and sizes r.

    Alpha starts at 0, so the first of m, a row's parts of the messages, is not negative, nor are
    their sums, r alpha. 1/r is the value on which most rounds agree of e . (w + v + a dw), where
    the row moved last, and of e . (w + v) + a m, where it moved first, or rows moved at once.
    Otherwise, sums that return to their maximum are r C1 there.
    """
    parts = np.linalg.lstsq(units.T, view.messages.T, rcond=None)[0].T
    sums = np.cumsum(parts, axis=0)
    begun = np.abs(parts[0]) > 1e-3 * np.abs(parts).max(axis=0)
    signs = np.where(np.where(begun, parts[0], sums.sum(axis=0)) < 0, -1.0, 1.0)
    units, parts, sums = signs[:, None] * units, signs * parts, signs * sums
    if view.mask == "paper":
        # v is known in the first round only: a step from 0 there is 1 / (a r).
        sizes = np.where(begun, 1 / (view.rule.curvature * np.maximum(parts[0], 0.01)), 1.0)
        return np.asarray(sizes[:, None] * units)
    moved = np.abs(parts) > 1e-9 * np.abs(parts).max(initial=1e-300)
    first, last = view.starts @ units.T + view.rule.curvature * parts, view.ends @ units.T
    sizes = np.ones(len(units))
    for place in range(len(units)):
        use = view.uncut & moved[:, place]
        agreed = _densest(np.sort(np.concatenate([first[use, place], last[use, place]])))
        highest = float(sums[:, place].max())
        back = int((sums[:, place] > highest * (1 - 1e-9)).sum())
        if agreed:
            sizes[place] = 1 / agreed
        elif back >= 3 and highest > 0:
            sizes[place] = highest / view.rule.c1
    return np.asarray(sizes[:, None] * units)


def _densest(values: Array) -> float:
    """Return the value on which at least three of the sorted values agree, else 0."""
    wide = values + 1e-6 * np.abs(values)
    counts = np.searchsorted(values, wide, side="right") - np.arange(len(values))
    if counts.max(initial=0) < 3:
        return 0.0
    best = int(np.argmax(counts))
    agreed = float(values[best : best + counts[best]].mean())
    return agreed if abs(agreed) > 1e-3 else 0.0


def _fill(view: View, found: Array, count: int, rng: np.random.Generator) -> Array:
    """Guess missing rows: the messages that are least similar to the rows."""
    size = np.linalg.norm(view.messages, axis=1)
    loud = size > 1e-6 * size.max()
    units = view.messages[loud] / size[loud, None]
    rows = found / np.linalg.norm(found, axis=1, keepdims=True)
    for unit in _repeated(view, units):
        if len(rows) < count and not np.any(np.abs(rows @ unit) > 1 - 1e-8):
            rows = np.vstack([rows, unit])
    while len(rows) < count:
        alike = np.abs(units @ rows.T).max(axis=1, initial=0.0)
        far = units[int(np.argmin(alike))]
        if alike.min() > 1 - 1e-9:  # all messages are used: any direction of their span
            basis = span(view.messages)
            far = basis @ rng.standard_normal(basis.shape[1])
        rows = np.vstack([rows, far / np.linalg.norm(far)])
    first: Array = rows[:count]
    return first


def _rough(messages: Array, count: int, rng: np.random.Generator) -> Array:
    """Guess from noisy messages: mean, main directions, then random directions."""
    main = np.linalg.svd(messages, full_matrices=False)[2]
    mean = messages.sum(axis=0)[None]
    rest = rng.standard_normal((max(count - 1 - len(main), 0), messages.shape[1]))
    rows = np.vstack([mean, main, rest])[:count]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    signed: Array = np.where(rows @ mean[0] < 0, -1.0, 1.0)[:, None] * rows
    return signed


def fit(messages: Array, starts: Array, rule: Rule, guesses: Array) -> tuple[Array, float]:
    """Return the best fit of rows (n, m) to messages (T, m), and its relative squared misfit.

    `guesses` are (starts, n, m).
    """
    scale = max(float((messages**2).sum()), 1e-300)
    now, damping = guesses.copy(), np.full(len(guesses), 1e-2)
    errors, jacobian = _residuals(now, messages, starts, rule)
    cost = (errors**2).sum(axis=1) / scale
    for _ in range(_MOST_STEPS):
        if cost.min() < 1e-22 or damping.min() > 1e8:
            break
        trial = now + _step(errors, jacobian, damping).reshape(now.shape)
        new_errors, new_jacobian = _residuals(trial, messages, starts, rule)
        new_cost = (new_errors**2).sum(axis=1) / scale
        better = new_cost < cost
        now[better], errors[better], cost[better] = (
            trial[better],
            new_errors[better],
            new_cost[better],
        )
        jacobian[better] = new_jacobian[better]
        damping = np.clip(np.where(better, damping / 4, damping * 3), 1e-12, 1e9)
    best = int(np.argmin(cost))
    return now[best], float(cost[best])


def _step(errors: Array, jacobian: Array, damping: Array) -> Array:
    """Return the damped Gauss-Newton step of each start."""
    normal = np.matmul(jacobian.transpose(0, 2, 1), jacobian)
    gradient = np.einsum("spq,sp->sq", jacobian, errors)
    diagonal = np.einsum("sqq->sq", normal)
    places = np.arange(normal.shape[1])
    normal[:, places, places] = diagonal * (1 + damping[:, None]) + 1e-12 * diagonal.max() + 1e-300
    step: Array = -np.linalg.solve(normal, gradient[..., None])[..., 0]
    return step


def _residuals(rows: Array, messages: Array, starts: Array, rule: Rule) -> tuple[Array, Array]:
    """Return residuals of the rule, (s, T m), and their Jacobians, (s, T m, n m)."""
    count, n, m = rows.shape
    rounds = len(messages)
    square = np.maximum((rows**2).sum(axis=2), 1e-12)
    alpha, bend = np.zeros((count, n)), np.zeros((count, n, m))
    residuals, jacobian = np.zeros((count, rounds, m)), np.zeros((count, rounds, m, n, m))
    eye = np.eye(m)
    for turn in range(rounds):
        step = (1 - rows @ starts[turn]) / (rule.curvature * square)
        aim = alpha + step
        inside = (aim > 0) & (aim < rule.c1)
        derivative = -starts[turn] / (rule.curvature * square[..., None])
        derivative = (bend + derivative - 2 * (step / square)[..., None] * rows) * inside[..., None]
        moved = np.clip(aim, 0.0, rule.c1) - alpha
        residuals[:, turn] = np.einsum("sn,snm->sm", moved, rows) - messages[turn]
        jacobian[:, turn] = np.einsum("snk,snj->sknj", rows, derivative - bend)
        jacobian[:, turn] += np.einsum("sn,kj->sknj", moved, eye)
        alpha, bend = alpha + moved, derivative
    return residuals.reshape(count, -1), jacobian.reshape(count, rounds * m, n * m)


@dataclass(frozen=True)
class Success:
    """The similarity of found and true rows, matched one to one.

    Attributes:
        cosine: Mean |cos| of matched rows.
        revealed: Share of rows matched with |cos| above 0.99.
        relative_error: Median of |found - true| / |true| of y x.
        labels_right: Share of matched rows with the right label; 1/2 by chance if the sign of a row
            cannot be known.
    """

    cosine: float
    revealed: float
    relative_error: float
    labels_right: float


def match(truth_rows: Array, truth_labels: Array, rows: Array, labels: Array) -> Success:
    """Match found rows to true ones by the Hungarian method.

    The sum of log(1 - |cos|) is minimised: unlike the sum of cosines, it keeps a row that was found
    matched to itself.

    >>> eye = np.eye(2)
    >>> match(eye, np.ones(2), -3 * eye[::-1], np.array([-1.0, 1.0])).cosine
    1.0
    """
    cosines = np.abs(_unit(truth_rows) @ _unit(rows).T)
    true, found = linear_sum_assignment(np.log(np.maximum(1 - cosines, 1e-9)))
    matched = np.zeros(len(truth_rows))  # an unmatched row scores 0
    matched[true] = cosines[true, found]
    signed = truth_labels[true, None] * truth_rows[true]
    error = np.linalg.norm(labels[found, None] * rows[found] - signed, axis=1)
    errors = np.ones(len(truth_rows))
    errors[true] = error / np.linalg.norm(signed, axis=1)
    right = np.zeros(len(truth_rows))
    right[true] = labels[found] == truth_labels[true]
    return Success(
        cosine=float(matched.mean()),
        revealed=float((matched > REVEALED).mean()),
        relative_error=float(np.median(errors)),
        labels_right=float(right.mean()),
    )


def chance(rows: Array, *, seed: int = 0, tries: int = 50) -> float:
    """Return the mean |cos| of as many random directions."""
    rng = Rng.seeded(seed).at("chance").numpy()
    labels = np.ones(len(rows))
    guesses = (rng.standard_normal(rows.shape) for _ in range(tries))
    return float(np.mean([match(rows, labels, guess, labels).cosine for guess in guesses]))


def _unit(rows: Array) -> Array:
    scaled: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    return scaled
