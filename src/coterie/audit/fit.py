"""Rows fitted to messages of simultaneous steps: nonlinear least squares from many starts.

With w + v known, rows do not act on one another within such a round: each goes its own way,
alpha_i(t + 1) = clip(alpha_i(t) + (1 - q_t . u_i) / (a |u_i|^2)), and the message is the sum over
rows of its steps times u_i. The sum is fitted by Levenberg-Marquardt from all starts side by side.

Without a box (the step as printed) the message is s - G q, with s = sum u_i / (a |u_i|^2) and
G = sum u_i u_i^T / (a |u_i|^2): all that any number of rounds can tell. Write u_i = r_i e_i, E for
the matrix of the e_i and c for the 1/r_i: a G = E^T E and a s = E^T c stay as they are if E and c
are turned to R E and R c, and that is a client again if the rows of R E have norm 1. There are
n (n - 1) / 2 turns and n - 1 conditions, so from three rows on a client is never determined: many
different ones fit without error.
"""

from dataclasses import dataclass

import numpy as np

from coterie.audit.view import Array, Rule


@dataclass(frozen=True)
class Fit:
    """Rows (n, m), and the squared misfit relative to the messages'."""

    rows: Array
    misfit: float


def fit(messages: Array, starts: Array, rule: Rule, guesses: Array, *, most_steps: int = 80) -> Fit:
    """Fit rows to messages (T, m), from guesses (starts, n, m); give the best."""
    scale = max(float((messages**2).sum()), 1e-300)
    now, damping = guesses.copy(), np.full(len(guesses), 1e-2)
    errors, slopes = _misses(now, messages, starts, rule)
    cost = (errors**2).sum(axis=1) / scale
    for _ in range(most_steps):
        if cost.min() < 1e-22 or damping.min() > 1e8:
            break
        trial = now + _step(errors, slopes, damping).reshape(now.shape)
        new_errors, new_slopes = _misses(trial, messages, starts, rule)
        new_cost = (new_errors**2).sum(axis=1) / scale
        better = new_cost < cost
        now[better], errors[better], cost[better] = (
            trial[better],
            new_errors[better],
            new_cost[better],
        )
        slopes[better] = new_slopes[better]
        damping = np.clip(np.where(better, damping / 4, damping * 3), 1e-12, 1e9)
    best = int(np.argmin(cost))
    return Fit(now[best], float(cost[best]))


def _step(errors: Array, slopes: Array, damping: Array) -> Array:
    """Solve the damped normal equations of each start."""
    curve = np.matmul(slopes.transpose(0, 2, 1), slopes)
    pull = np.einsum("spq,sp->sq", slopes, errors)
    diagonal = np.einsum("sqq->sq", curve)
    places = np.arange(curve.shape[1])
    curve[:, places, places] = diagonal * (1 + damping[:, None]) + 1e-12 * diagonal.max() + 1e-300
    step: Array = -np.linalg.solve(curve, pull[..., None])[..., 0]
    return step


def _misses(rows: Array, messages: Array, starts: Array, rule: Rule) -> tuple[Array, Array]:
    """Play the rule: what is sent too much, (s, T m), and its slopes in the rows, (s, T m, n m)."""
    count, n, m = rows.shape
    rounds, low = len(messages), 0.0 if np.isfinite(rule.c1) else -np.inf
    square = np.maximum((rows**2).sum(axis=2), 1e-12)
    alpha, bend = np.zeros((count, n)), np.zeros((count, n, m))
    misses, slopes = np.zeros((count, rounds, m)), np.zeros((count, rounds, m, n, m))
    eye = np.eye(m)
    for turn in range(rounds):
        step = (1 - rows @ starts[turn]) / (rule.slope * square)
        aim = alpha + step
        inside = (aim > low) & (aim < rule.c1)
        slope = -starts[turn] / (rule.slope * square[..., None])
        slope = (bend + slope - 2 * (step / square)[..., None] * rows) * inside[..., None]
        moved = np.clip(aim, low, rule.c1) - alpha
        misses[:, turn] = np.einsum("sn,snm->sm", moved, rows) - messages[turn]
        slopes[:, turn] = np.einsum("snk,snj->sknj", rows, slope - bend)
        slopes[:, turn] += np.einsum("sn,kj->sknj", moved, eye)
        alpha, bend = alpha + moved, slope
    return misses.reshape(count, -1), slopes.reshape(count, rounds * m, n * m)
