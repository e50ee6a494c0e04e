"""Bounds that the papers publish on the error of their algorithms, as functions to compute.

PMTL (Hu, Wu and Smith, Theorems 3, 5, 6, 7 and Corollaries 4, 8) and MP-MTL (Liang et al., Theorems
2 to 6, Table 1) hide constants in O(.): `pmtl_bound` and `mpmtl_utility` take every constant as 1,
so that only their shape means anything: exponents, and where they are least. DPFedMTL (Wu, Chen and
Wang, Theorems 5.1 to 5.3) has explicit constants: `Convergence` can be compared with measured
errors.

`mean_estimation_error` is no bound: it is the exact expected error of PMTL's published Algorithm 1,
and of PMTL with changes from the shared model, on the paper's own example of mean estimation.
docs/papers/theory.md draws all of them over measured errors. None of them has to do with a
guarantee of privacy.
"""

import math
from dataclasses import dataclass

from coterie.privacy.published import theorem_1_sigma


def pmtl_bound(  # noqa: PLR0913 - the terms of the theorem
    rounds: float,
    *,
    epsilon: float,
    delta: float,
    clients: int,
    dimension: int,
    gamma: float,
    lam: float,
    steps: int = 1,
    loss: float = 0.0,
) -> float:
    """Return PMTL's bound on the mean squared gradient, lam/T + lam B/E + d lam sigma^2/E.

    For nonconvex losses (Theorem 6), every constant 1, with Theorem 1's sigma after T rounds of E
    local `steps`; B is the largest `loss`.

    >>> setting = dict(epsilon=2.0, delta=1e-3, dimension=10, gamma=1.0, lam=1.0)
    >>> [round(pmtl_bound(10.0, clients=m, **setting), 3) for m in (100, 1000)]
    [0.376, 0.103]
    """
    if rounds <= 0:
        raise ValueError(f"rounds = {rounds}: expected a positive number")
    # sigma^2 is proportional to the rounds, which need not be whole here.
    per_round = theorem_1_sigma(epsilon, delta, clients, 1, gamma) ** 2
    return lam / rounds + lam * loss / steps + dimension * lam * per_round * rounds / steps


def pmtl_rounds(*, clients: int, dimension: int, gamma: float, lam: float) -> float:
    """Return the rounds of Corollaries 4 and 8, T = m / (lam d gamma^2): epsilon is not in them."""
    return clients / (lam * dimension * gamma**2)


def pmtl_best_rounds(
    *, epsilon: float, delta: float, clients: int, dimension: int, gamma: float, steps: int = 1
) -> float:
    """Return the rounds of the least `pmtl_bound`, m epsilon sqrt(E/(16 d log(1/delta)))/gamma.

    >>> round(pmtl_best_rounds(epsilon=2.0, delta=1e-3, clients=100, dimension=10, gamma=1.0), 2)
    6.02
    """
    per_round = theorem_1_sigma(epsilon, delta, clients, 1, gamma)
    return math.sqrt(steps / dimension) / per_round


def pmtl_strongly_convex_bound(rounds: int, *, start: float, loss: float, steps: int = 1) -> float:
    """Return the bound of Theorems 5 and 7 without noise, per client.

    (1/m) Delta_T <= 2^-T ((1/m) Delta_0 - B) + B / (1 - 2^-E), with `start` = Delta_0 / m. B is the
    largest loss of a client in any round, so the bound is never below B: for losses of at least 0,
    whose excess is at most the loss, it says nothing.
    """
    return float(2.0**-rounds * (start - loss) + loss / (1 - 2.0**-steps))


def mean_estimation_error(
    rounds: int,
    *,
    sigma: float,
    lam: float,
    lr: float,
    start: float,
    spread: float,
    dimension: int,
    change_from: str = "own",
) -> float:
    """Return the exact expected excess objective of PMTL after T rounds of mean estimation.

    Client k has the loss |w - a_k|^2/2, all clients start at 0, take one gradient step of `lr` per
    round, and none is clipped. `start` is |mean of a_k|^2, `spread` the mean of
    |a_k - their mean|^2, `sigma` the noise per coordinate of a released mean. With
    `change_from = "own"` (Algorithm 1 as published) the shared model is the clients' mean plus the
    sum of all noise so far: nothing pulls it back. With "shared" it has the noise of the last round
    only. The excess is that of F(W) = (1/m) sum_k lam/2 |w_k - mean|^2 + |w_k - a_k|^2/2.

    >>> setting = dict(lam=1.0, lr=0.5, start=0.0, spread=0.0, dimension=1, sigma=1.0)
    >>> [round(mean_estimation_error(3, change_from=c, **setting), 4) for c in ("own", "shared")]
    [0.4062, 0.1562]
    """
    if change_from not in ("own", "shared"):
        raise ValueError(f"change_from = {change_from!r}: expected own or shared")
    keep = 1 - lr
    error, both, noise = 0.0, 0.0, 0.0  # of the clients' mean, with the shared model's, of that
    for _ in range(rounds):
        error = keep**2 * error + 2 * keep * lr * lam * both + (lr * lam) ** 2 * noise
        if change_from == "own":
            both, noise = keep * both + lr * lam * noise, noise + sigma**2
        else:
            noise = sigma**2
    apart = (1 - lr * (1 + lam)) ** (2 * rounds) * spread / (1 + lam)
    return (keep ** (2 * rounds) * start + dimension * error + apart) / 2


@dataclass(frozen=True)
class Utility:
    """The utility theorems of MP-MTL at one setting.

    Attributes:
        base: What the theorems raise to a power: larger for more noise per client.
        exponent: The power, phi.
        bound: base^phi, every constant 1.
        steps: The recommended number of steps, every constant 1.
    """

    base: float
    exponent: float
    bound: float
    steps: float


def mpmtl_utility(  # noqa: PLR0913 - the terms of the theorems
    *,
    epsilon: float,
    delta: float,
    clients: int,
    dimension: int,
    kept: int,
    structure: str = "low_rank",
    clip: float = 1.0,
    accelerated: bool = False,
    strongly_convex: bool = False,
) -> Utility:
    """Return the utility bound of Theorems 2 to 5 (Table 1) and the steps it recommends.

    base = k d log(d) c / (sqrt(m) epsilon) (low rank) or k log(d) c / (K m epsilon) (group-sparse),
    c = sqrt(log(e + epsilon/(sqrt(2) delta)) + 2 epsilon), k the directions or features `kept`, K
    the `clip`. Budgets are those of Theorem 6. The power is 2/5 for convex losses, 4/9 with
    acceleration, 1/2 and 1 for strongly convex ones.

    >>> found = mpmtl_utility(epsilon=1.0, delta=1e-3, clients=320, dimension=30, kept=5)
    >>> round(found.base, 1), found.exponent, round(found.bound, 1)
    (83.5, 0.4, 5.9)
    """
    if structure not in ("low_rank", "group_sparse"):
        raise ValueError(f"structure = {structure!r}: expected low_rank or group_sparse")
    growth = math.sqrt(math.log(math.e + epsilon / (math.sqrt(2) * delta)) + 2 * epsilon)
    base = kept * math.log(dimension) * growth / epsilon
    if structure == "low_rank":
        base *= dimension / math.sqrt(clients)
    else:
        base /= clip * clients
    exponents = {(False, False): 2 / 5, (True, False): 4 / 9, (False, True): 1 / 2}
    exponent = exponents.get((accelerated, strongly_convex), 1.0)
    if strongly_convex:
        steps = max(math.log(1 / base), 1.0)
    else:
        steps = base ** (-exponent / 2 if accelerated else -exponent)
    return Utility(base, exponent, base**exponent, steps)


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The convergence bounds of DPFedMTL, Theorems 5.1 to 5.3, for one client per step (K = 1).

    Attributes:
        clients: M.
        smoothness: L, the largest of a client's loss.
        gradient: B, the bound on gradients of the shared part.
        dimension: n, of the shared part.
        noise: sigma S, the deviation of the noise on every local gradient.
        diversity: lam, the bound on the gradients' diversity; the step size is 1/(lam L).
        interval: H, local steps per round.
    """

    clients: int
    smoothness: float
    gradient: float
    dimension: int
    noise: float
    diversity: float = 1.0
    interval: int = 1

    @property
    def variance(self) -> float:
        """V = (2 H^2 + 1/(2 M L)) n (sigma S)^2."""
        factor = 2 * self.interval**2 + 1 / (2 * self.clients * self.smoothness)
        return factor * self.dimension * self.noise**2

    @property
    def _floor(self) -> float:
        drift = self.interval**2 * self.gradient**2 / (2 * self.diversity**2)
        return drift + self.variance / self.diversity**2

    def nonconvex(self, steps: int, gap: float) -> float:
        """Return the bound on the mean squared gradient over T steps (5.1); `gap` is f(0) - f*."""
        scale = self.clients * self.smoothness
        drift = scale * self.interval**2 * self.gradient**2 / self.diversity
        noise = 2 * scale / self.diversity * self.variance
        return drift + noise + 2 * self.diversity * scale / steps * gap

    def convex(self, steps: int, distance: float) -> float:
        """Return the bound on f - f* after T steps (5.2); `distance` is that of the start."""
        scale = 2 * self.diversity * self.clients * self.smoothness * distance**2
        return scale / steps + math.sqrt(scale * self._floor)

    def strongly_convex(self, steps: int, gap: float, convexity: float) -> float:
        """Return the bound on f - f* after T steps (5.3), c the strong `convexity` of f."""
        ratio = self.diversity * self.clients * self.smoothness / convexity
        beta = ratio * self._floor
        return float(beta + (1 - 1 / ratio) ** steps * (gap - beta))
