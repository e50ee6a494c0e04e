"""Reconstruct a client's rows and labels from what an attacker sees of it.

The curious server of Ponomarenko-Timofeev et al., section 6.1, as an attack: it sees w and a
client's dw_k in every round, knows v_k, and looks for rows u_i = y_i x_i that would have sent just
that. Every message lies in the span of the client's rows; one row is revealed by one message. The
paper counts equations ((d + 1) n_k epochs); what is found here depends on the rule instead:

- serial steps, and simultaneous ones in a box, tell rows apart as soon as w moves enough for rows
  to reach the ends of their boxes, or to be last in enough rounds (`exact`, `fit`);
- simultaneous steps without a box, as printed, never do from three rows on (`fit` has the proof);
- a row that never moves, far on the right side of the margin, is never seen at all;
- a Bernoulli mask helps the attacker: steps that are exactly 0 tell rows apart. A Beta mask makes
  the search harder, and hides no row that is alone. If what is sent is masked and the duals are
  not, v is not known, and sizes are not found, only directions;
- a clip alone hides the size of a message, not its direction;
- central noise hides the client from all others. It does not hide it from the server, which sees
  contributions before noise.

What fails here may be found by a better attack: only noise with a budget has a proof. For noisy
views the attack is the plain one (means and main directions); whatever is tried, its success is
bounded by epsilon.
"""

from dataclasses import dataclass

import numpy as np

from coterie.audit.exact import Found, consensus, functionals, span
from coterie.audit.fit import fit
from coterie.audit.view import Array, View
from coterie.core.rng import Rng

_PARALLEL = 1e-12
_ALIKE = 0.9999


@dataclass(frozen=True)
class Reconstruction:
    """What an attacker believes of a client.

    Attributes:
        rows: (n, d).
        labels: -1 or +1 of each; +1 where nothing tells (x, y) from (-x, -y).
        residual: How much of the messages the found rows cannot make up, relative; 0 also for
            wrong rows with the right span.
        exact: How many of the rows, the first ones, the messages speak for with more rounds than
            there are unknowns.
    """

    rows: Array
    labels: Array
    residual: float
    exact: int


def reconstruct(
    view: View,
    *,
    rows: int | None = None,
    positive: int | None = None,
    seed: int = 0,
    tries: int = 60,
) -> Reconstruction:
    """Attack one client.

    Args:
        view: What the attacker sees.
        rows: How many rows to look for; by default the view's, else the rank of its messages.
        positive: A column known to be positive in every row: it tells labels.
        seed: Of the search.
        tries: How long to search: linear programs of each kind.
    """
    coins = Rng.seeded(seed).at("attack").numpy()
    messages = view.messages
    count = rows or view.rows or max(span(messages, 1e-6).shape[1], 1)
    if not np.any(messages):
        return _answer(view, coins.standard_normal((count, messages.shape[1])), positive, 0)
    if view.noise:
        return _answer(view, _sized(view, _rough(messages, count, coins)), positive, 0)
    found = _search(view, count, coins, tries)
    filled = _fill(view, found.rows, count, coins)
    signed = _sized(view, filled)
    signed[: len(found)][found.sized] = found.rows[found.sized]
    return _answer(view, signed, positive, len(found))


def _answer(view: View, signed: Array, positive: int | None, exact: int) -> Reconstruction:
    labels = np.ones(len(signed))
    if positive is not None:
        labels = np.where(signed[:, positive] < 0, -1.0, 1.0)
    basis = np.linalg.qr(signed.T)[0]
    total = max(float(np.linalg.norm(view.messages)), 1e-300)
    left = view.messages - view.messages @ basis @ basis.T
    return Reconstruction(
        labels[:, None] * signed, labels, float(np.linalg.norm(left)) / total, exact
    )


class _Directions:
    """Rows with distinct directions, never more than `count`.

    Those whose size and sign are not known have unit norm.
    """

    def __init__(self, width: int, count: int) -> None:
        self.count = count
        self.rows, self.sized = np.zeros((0, width)), np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Array, *, sized: bool) -> None:
        """Take directions that are new."""
        for row in rows:
            size = float(np.linalg.norm(row))
            cosines = self.rows @ row / size / np.linalg.norm(self.rows, axis=1)
            if len(self) < self.count and not np.any(np.abs(cosines) > _ALIKE):
                self.rows = np.vstack([self.rows, row if sized else row / size])
                self.sized = np.append(self.sized, sized)


def _search(view: View, count: int, coins: np.random.Generator, tries: int) -> _Directions:
    """Find rows that the messages speak for."""
    found = _Directions(view.messages.shape[1], count)
    rest = _peel(view, found, coins, tries)
    if len(found) < count and view.rule.steps == "serial" and view.mask != "paper":
        found.add(_last_movers(view, span(rest), count, coins), sized=True)
    elif len(found) < count and view.mask == "none":
        rows = _fitted(view, count, coins)
        found = _Directions(rows.shape[1], count) if len(rows) else found
        found.add(rows, sized=True)
    return found


def _peel(view: View, found: _Directions, coins: np.random.Generator, tries: int) -> Array:
    """Find rows whose steps are known too, and take them off the messages; give what is left."""
    rest = view.messages
    while len(found) < found.count and np.linalg.norm(rest) > 1e-9 * np.linalg.norm(view.messages):
        basis = span(rest)
        if basis.shape[1] == 1:
            found.add(basis.T, sized=False)
            break
        steps, left = rest @ basis, found.count - len(found)
        # Functionals exist where the rows that are left are independent.
        known = functionals(steps, view.rule.c1, tries, coins) if left == basis.shape[1] else []
        if len(known) == left:
            found.add(np.linalg.inv([one.value for one in known]).T @ basis.T, sized=False)
            break
        pairs = _paired(view, basis, steps, known, coins) if view.mask != "paper" else []
        for functional, row in pairs:
            found.add((basis @ row)[None], sized=True)
            rest = rest - np.outer(steps @ functional / (functional @ row), basis @ row)
        if not pairs:
            break
    return rest


def _paired(
    view: View, basis: Array, steps: Array, known: list[Found], coins: np.random.Generator
) -> list[tuple[Array, Array]]:
    """Find the row of each functional, in coordinates of the basis."""
    pairs = []
    size = np.linalg.norm(view.messages, axis=1)
    for place, one in enumerate(known):
        others = [other.value for k, other in enumerate(known) if k != place]
        if view.rule.steps == "serial":
            # The row is 0 under all other functionals.
            free = _null(np.array(others).reshape(-1, basis.shape[1]))
            left = (view.ends @ basis @ free)[view.uncut]
            spoken = consensus(
                left, np.ones(len(left)), view.rule.slope * size[view.uncut], coins, tries=4000
            )
            rows = [free @ other.value for other in spoken[:1]]
        else:
            moved = steps @ one.value
            use = view.uncut & (np.abs(moved) > 1e-9 * np.abs(moved).max())
            left = np.column_stack([np.ones(use.sum()), -(view.starts @ basis)[use]])
            scale = np.abs(view.rule.slope * moved[use])
            spoken = consensus(left, view.rule.slope * moved[use], scale, coins, tries=4000)
            rows = [other.value[1:] / other.value[0] for other in spoken[:1]]
        pairs += [(one.value, row) for row in rows if abs(one.value @ row) > 1e-9]
    return pairs


def _null(rows: Array) -> Array:
    """Return an orthonormal basis, (m, m - k), of what is 0 under k independent functionals."""
    if not len(rows):
        return np.eye(rows.shape[1])
    full: Array = np.linalg.qr(rows.T, mode="complete")[0][:, len(rows) :]
    return full


def _last_movers(view: View, basis: Array, count: int, coins: np.random.Generator) -> Array:
    """Find rows with margin 1 at the end of more rounds than chance would have."""
    width = basis.shape[1]
    if count ** max(width - 1, 0) > 1e6 or not view.uncut.any():
        return np.zeros((0, len(basis)))
    size = np.linalg.norm(view.messages, axis=1)[view.uncut]
    ends = (view.ends @ basis)[view.uncut]
    # A row with margin 1 at z has a norm of 1 / |z| over the cosine between them.
    largest = 100 / max(float(np.median(np.linalg.norm(ends, axis=1))), 1e-9)
    spoken = consensus(
        ends, np.ones(len(ends)), view.rule.slope * size, coins, tries=20_000, largest=largest
    )
    return np.array([one.value @ basis.T for one in spoken]).reshape(-1, len(basis))


def _repeated(view: View, units: Array) -> Array:
    """Return directions that several messages have: rounds in which one row moved alone."""
    if view.rule.steps == "simultaneous" and view.mask == "none":
        return units[:0]  # rows that go from end to end of their boxes together repeat as well
    alike = np.abs(units @ units.T) > 1 - _PARALLEL
    several: Array = units[alike.sum(axis=1) > 1]
    return several


def _fitted(view: View, count: int, coins: np.random.Generator) -> Array:
    """Fit all rows through the simultaneous rule; none where no start ends in a perfect fit."""
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
    guesses = coins.standard_normal((number, count, width))
    guesses /= np.linalg.norm(guesses, axis=2, keepdims=True)
    first = view.messages[0] @ basis
    guesses *= np.where(guesses @ first < 0, -1.0, 1.0)[..., None]
    guesses *= np.exp(0.4 * coins.standard_normal((number, count, 1)))
    best = fit(view.messages @ basis, view.starts @ basis, view.rule, guesses)
    return best.rows @ basis.T if best.misfit < 1e-16 else np.zeros((0, len(basis)))


def _sized(view: View, units: Array) -> Array:
    """Return directions e their signs and sizes r.

    Alpha starts at 0, so the first of m, a row's parts of the messages, is not negative, nor are
    their sums, r alpha. 1/r is the value that most rounds agree on of e . (w + v + a dw), where the
    row moved last, and of e . (w + v) + a m, where it moved first, or rows moved at once. Where
    none agree, sums that keep coming back to their highest are r C1 there.
    """
    parts = np.linalg.lstsq(units.T, view.messages.T, rcond=None)[0].T
    sums = np.cumsum(parts, axis=0)
    begun = np.abs(parts[0]) > 1e-3 * np.abs(parts).max(axis=0)
    signs = np.where(np.where(begun, parts[0], sums.sum(axis=0)) < 0, -1.0, 1.0)
    units, parts, sums = signs[:, None] * units, signs * parts, signs * sums
    if view.mask == "paper":
        # v is known in the first round alone: a step from 0 there is 1 / (a r).
        sizes = np.where(begun, 1 / (view.rule.slope * np.maximum(parts[0], 0.01)), 1.0)
        return np.asarray(sizes[:, None] * units)
    moved = np.abs(parts) > 1e-9 * np.abs(parts).max(initial=1e-300)
    first, last = view.starts @ units.T + view.rule.slope * parts, view.ends @ units.T
    sizes = np.ones(len(units))
    for place in range(len(units)):
        use = view.uncut & moved[:, place]
        agreed = _densest(np.sort(np.concatenate([first[use, place], last[use, place]])))
        highest = float(sums[:, place].max())
        back = int((sums[:, place] > highest * (1 - 1e-9)).sum())
        if agreed:
            sizes[place] = 1 / agreed
        elif back >= 3 and highest > 0 and np.isfinite(view.rule.c1):
            sizes[place] = highest / view.rule.c1
    return np.asarray(sizes[:, None] * units)


def _densest(values: Array) -> float:
    """Return the value that three or more of the sorted values agree on, else 0."""
    wide = values + 1e-6 * np.abs(values)
    counts = np.searchsorted(values, wide, side="right") - np.arange(len(values))
    if counts.max(initial=0) < 3:
        return 0.0
    best = int(np.argmax(counts))
    agreed = float(values[best : best + counts[best]].mean())
    return agreed if abs(agreed) > 1e-3 else 0.0


def _fill(view: View, found: Array, count: int, coins: np.random.Generator) -> Array:
    """Guess the rows that were not found: the messages that are least like what there is."""
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
        if alike.min() > 1 - 1e-9:  # every message is there: any direction of their span
            basis = span(view.messages)
            far = basis @ coins.standard_normal(basis.shape[1])
        rows = np.vstack([rows, far / np.linalg.norm(far)])
    first: Array = rows[:count]
    return first


def _rough(messages: Array, count: int, coins: np.random.Generator) -> Array:
    """Guess from noisy messages: their mean, their main directions, and then anything."""
    main = np.linalg.svd(messages, full_matrices=False)[2]
    mean = messages.sum(axis=0)[None]
    rest = coins.standard_normal((max(count - 1 - len(main), 0), messages.shape[1]))
    rows = np.vstack([mean, main, rest])[:count]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    signed: Array = np.where(rows @ mean[0] < 0, -1.0, 1.0)[:, None] * rows
    return signed
