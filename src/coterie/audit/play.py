"""One client's messages, played in plain NumPy: what an attack is tried on.

It is written apart from the library's own solver and method, from the formulas alone, so that an
attack that works on both works on what is said here. The other clients are a walk of w.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from coterie.audit.view import Array, MaskKind, Rule, View
from coterie.core.rng import Rng

Mask = tuple[Literal["bernoulli"], float] | tuple[Literal["beta"], float, float, float]


@dataclass(frozen=True, kw_only=True)
class Defence:
    """What is done to a client's messages.

    Attributes:
        mask: None; ("bernoulli", keep): a row's step is kept with this probability; or ("beta", a,
            b, untouched): it is multiplied by Beta(a, b), but for this share of rows.
        mask_kind: "step" makes the mask a dual step size, so that alpha, v and what is sent agree;
            "paper" masks what is sent alone, as printed.
        clip: Bound on a message's norm; alpha and v take the same part of the step.
        noise: Standard deviation of the noise on each number of a post.
    """

    mask: Mask | None = None
    mask_kind: Literal["step", "paper"] = "step"
    clip: float | None = None
    noise: float = 0.0

    def draw(self, count: int, coins: np.random.Generator) -> Array:
        """Draw a factor for each row."""
        if self.mask is None:
            return np.ones(count)
        if self.mask[0] == "bernoulli":
            return (coins.random(count) < self.mask[1]).astype(np.float64)
        _, a, b, untouched = self.mask
        return np.where(coins.random(count) < untouched, 1.0, coins.beta(a, b, count))


def client_messages(
    rows: Array,
    labels: Array,
    rule: Rule,
    *,
    rounds: int,
    defence: Defence | None = None,
    others: float = 3.0,
    absent: bool = False,
    seed: int = 0,
) -> tuple[View, View]:
    """Play a client with these rows (n, d) and labels (n,) of -1 and +1.

    Args:
        rows: The client's rows.
        labels: Their labels.
        rule: Its step rule.
        rounds: How many rounds.
        defence: What is done to its messages; None for nothing.
        others: About the norm of what the other clients have in w; it walks, so that w explores.
        absent: The client's contributions are zeros: the neighbouring run of the guarantee.
        seed: Of everything random.

    Returns:
        The server's view of the run, and that of all other clients together.
    """
    if set(np.unique(labels)) - {-1.0, 1.0}:
        raise ValueError(f"labels are {np.unique(labels)[:5]}: expected -1 and +1")
    defence, coins, (count, width) = (
        defence or Defence(),
        Rng.seeded(seed).at("play").numpy(),
        rows.shape,
    )
    signed = labels[:, None] * rows
    alpha, v, own, walk = np.zeros(count), np.zeros(width), np.zeros(width), np.zeros(width)
    shared, sent, noises = np.zeros((3, rounds, width))
    for turn in range(rounds):
        shared[turn] = own + walk
        mask = defence.draw(count, coins)
        steps = mask if defence.mask_kind == "step" else np.ones(count)
        moved = _local(signed, alpha, shared[turn] + v, rule, steps, coins)
        full = moved @ signed
        message = full if defence.mask_kind == "step" else (mask * moved) @ signed
        kept = 0.0 if absent else _kept(message, defence.clip)
        alpha, v, sent[turn] = alpha + kept * moved, v + kept * full / rule.c2, kept * message
        noises[turn] = defence.noise * coins.standard_normal(width)
        own = own + sent[turn] + noises[turn]
        walk = 0.8 * walk + 0.6 * others / np.sqrt(width) * coins.standard_normal(width)
    kind: MaskKind = "none" if defence.mask is None else defence.mask_kind
    server = View.server(shared, sent, rule, clip=defence.clip, mask=kind, rows=count)
    walked = np.diff(shared + 0.0, axis=0, append=(own + walk)[None]) - sent - noises
    posts = sent + noises + walked
    return server, server.others(posts, walked, noise=defence.noise)


def _kept(message: Array, clip: float | None) -> float:
    return 1.0 if clip is None else min(1.0, clip / max(float(np.linalg.norm(message)), 1e-300))


def _local(
    signed: Array,
    alpha: Array,
    start: Array,
    rule: Rule,
    mask: Array,
    coins: np.random.Generator,
) -> Array:
    """Return the change of alpha in a round."""
    low = 0.0 if np.isfinite(rule.c1) else -np.inf
    curve = rule.slope * (signed**2).sum(axis=1)
    if rule.steps == "simultaneous":
        aim = np.clip(alpha + (1 - signed @ start) / curve, low, rule.c1)
        moved: Array = mask * (aim - alpha)
        return moved
    now, dw = alpha.copy(), np.zeros(len(start))
    for _ in range(rule.passes):
        for i in coins.permutation(len(signed)):
            slack = 1 - signed[i] @ (start + rule.slope * dw)
            step = mask[i] * (np.clip(now[i] + slack / curve[i], low, rule.c1) - now[i])
            now[i] += step
            dw += step * signed[i]
    return now - alpha
