"""Pure releases: each client's odds move by at most a factor e^epsilon, whatever comes out.

Any epsilon-DP release is a post-processing of randomised response with the same epsilon (Kairouz,
Oh and Viswanath 2015), so randomised responses in its place bound every composition, and no smaller
bound knows the epsilons alone.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from scipy import special

from coterie.privacy.events import Counted, Laplace, Participation, Relation
from coterie.privacy.losses import Law
from coterie.privacy.profiles import Array, Groups, smallest_epsilon


def amplify(epsilon: float, participation: Participation, relation: Relation) -> float:
    """Bound the loss of one release that is epsilon-DP (`zero_out`) for a client taking part.

    With P0 the law of the output when the client stays away, P1 and Q1 when it takes part with
    either neighbour's data, and q the rate, a hidden cohort gives P = (1-q) P0 + q P1 against Q =
    (1-q) P0 + q Q1.

    Poisson: the client's coin changes nothing else, so P1 and Q1 are within e^epsilon of P0.
    `zero_out` has Q1 = P0: P/Q <= 1 - q + q e^epsilon, and Q/P <= 1 / (1 - q + q e^-epsilon), which
    is smaller (harmonic and arithmetic mean). `replace`: P/Q is at most the product of both.

    Fixed size under `replace`: staying away means that somebody else is drawn, a replacement, so
    P0, P1 and Q1 are pairwise within a = e^(2 epsilon). Then (1 + q (a - 1)) Q - P = q ((1-q)(a-1)
    P0 + (1 + q (a-1)) Q1 - P1) >= 0, since the weights of P0 and Q1 add up to a.

    Elsewhere nothing is amplified: a visible coin is no worse than always taking part, and hiding
    a cohort is post-processing.

    **Guarantee:** the release is purely DP with the epsilon returned;
    `tests/accounting/test_pure.py`.
    """
    rate = participation.rate
    whole = epsilon * (2 if relation == "replace" else 1)
    if rate == 1 or participation.visible:
        return whole
    if participation.kind == "poisson":
        up = _log_mean(epsilon, rate)
        return up if relation == "zero_out" else min(whole, up - _log_mean(-epsilon, rate))
    return _log_mean(whole, rate) if relation == "replace" else whole


def _log_mean(exponent: float, rate: float) -> float:
    """Compute log(1 - rate + rate e^exponent)."""
    if exponent < 30:
        return math.log1p(rate * math.expm1(exponent))
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))


def pure_groups(counted: Counted, participation: Participation, relation: Relation) -> Groups:
    """Count the pure releases of a plan by the epsilon that each costs."""
    counts: Counter[float] = Counter()
    for event, count in counted:
        if isinstance(event, Laplace):
            counts[amplify(event.epsilon, participation, relation)] += count
    return tuple(sorted(counts.items()))


def add_up(groups: Groups) -> float:
    """Add epsilons up: what pure releases cost at delta 0."""
    return math.fsum(epsilon * count for epsilon, count in groups)


def response_law(epsilon: float) -> Law:
    """Return the loss of randomised response: epsilon or -epsilon, e^epsilon times as likely."""
    log_yes = -math.log1p(math.exp(-epsilon))

    def tails(losses: Array) -> tuple[Array, Array]:
        none, all_ = losses >= epsilon, losses < -epsilon
        upper = np.where(none, 0.0, np.where(all_, 1.0, math.exp(log_yes)))
        return upper, np.where(none, -np.inf, np.where(all_, 0.0, log_yes - epsilon))

    return Law(-epsilon, epsilon, tails)


@dataclass(frozen=True)
class PureProfile:
    """Equal pure releases, each charged as a randomised response.

    **Guarantee:** exact for randomised responses, hence the best bound that holds for all
    `rounds`-fold adaptive compositions of `step`-DP releases (Kairouz, Oh and Viswanath 2015,
    theorem 3.3); `tests/accounting/test_pure.py`.

    >>> round(PureProfile(0.1, 100).epsilon(1e-5), 3), PureProfile(0.125, 8).epsilon(0.0)
    (4.307, 1.0)
    """

    step: float
    rounds: int
    accountant: str = "optimal composition of pure releases (as randomised responses)"

    def log_delta(self, epsilon: float) -> float:
        """Take the logarithm of delta at this epsilon."""
        yes = np.arange(self.rounds + 1, dtype=np.float64)
        loss = (2 * yes - self.rounds) * self.step
        kept = yes[loss > epsilon]
        if len(kept) == 0 or epsilon >= add_up(((self.step, self.rounds),)):
            return -math.inf
        no = self.rounds - kept
        ways = (
            special.gammaln(self.rounds + 1) - special.gammaln(kept + 1) - special.gammaln(no + 1)
        )
        log_mass = ways - self.rounds * math.log1p(math.exp(-self.step)) - no * self.step
        gain = np.log(-np.expm1(epsilon - loss[loss > epsilon]))
        return min(0.0, float(special.logsumexp(log_mass + gain)))

    def delta(self, epsilon: float) -> float:
        """Compute delta at this epsilon."""
        return math.exp(self.log_delta(epsilon))

    def epsilon(self, delta: float) -> float:
        """Compute epsilon at this delta."""
        together = add_up(((self.step, self.rounds),))
        return together if delta == 0 else min(together, smallest_epsilon(self.log_delta, delta))
