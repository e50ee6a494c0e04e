"""Conversions, compositions and claims as published, for baselines and reproductions.

A run's guarantee is always the ledger's account of the noise that was added; these functions only
determine how much noise a published recipe uses, and what its paper claims.

`claims` compares DPFedMTL (Wu et al., "A Theoretical Perspective on Differentially Private
Federated Multi-Task Learning") with its true account. Of M clients K are expected in a step, by
Poisson sampling with p = K/M; each adds N(0, (sigma S)^2) with S = 2 C K/M to its own gradient, and
the server averages over K. Their Lemma 4.1 gives a client the weight K/M in that average; it has
1/K. They account for steps of noise multiplier sigma, but replacing a client moves the sum by 2 C,
and the noise in the sum of K messages is sqrt(K) sigma S: in units of C a multiplier of
z = 2 sigma K^(3/2)/M, which halves under replace. The server observes every message separately,
with a sensitivity of 2 C against noise sigma S: mu = M/(K sigma).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import optimize

from coterie.privacy.accounting import profile
from coterie.privacy.events import Gaussian, Participation, check_delta
from coterie.privacy.guarantee import Guarantee, gdp_approximation
from coterie.privacy.profiles import GaussianProfile, gaussian_mu

_MOST = 500.0


def published_composition(epsilons: Sequence[float], delta: float) -> float:
    """Return the composition of pure releases by formula (7) of Liang et al.

    (Kairouz, Oh and Viswanath 2017).

    >>> published_composition([0.5, 0.5], 0.0), round(published_composition([0.01] * 100, 1e-5), 3)
    (1.0, 0.434)
    """
    simple = math.fsum(epsilons)
    if delta == 0:
        return simple
    drift = math.fsum(e * math.tanh(e / 2) for e in epsilons)
    squares = math.fsum(e * e for e in epsilons)
    first = drift + math.sqrt(2 * squares * math.log(1 / delta))
    second = drift + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / delta))
    return min(simple, first, second)


def published_spending(epsilon: float, delta: float, weights: Sequence[float]) -> tuple[float, ...]:
    """Return the largest budgets, proportional to the weights, whose published composition fits."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: expected a positive number")

    def excess(base: float) -> float:
        return published_composition([base * weight for weight in weights], delta) - epsilon

    high = epsilon
    while excess(high) < 0:
        high *= 2
    base = float(optimize.brentq(excess, 0.0, high, xtol=1e-14, rtol=1e-12))
    return tuple(base * weight for weight in weights)


def published_sigma(epsilon: float, delta: float) -> float:
    """Return the noise of Wu et al. (DPFedMTL): sqrt(2 log(1.25/delta))/epsilon, for all rounds.

    The classic bound for one release without sampling, proved for epsilon below 1 only. The same
    formula gives the epsilon that they claim for a noise, which is not the true one.

    >>> [round(published_sigma(epsilon, 1e-5), 4) for epsilon in (45, 8, 2, 0.5)]
    [0.1077, 0.6056, 2.4224, 9.6896]
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def theorem_1_sigma(epsilon: float, delta: float, clients: int, rounds: int, gamma: float) -> float:
    """Return the noise on the mean that Theorem 1 of Hu et al. (PMTL) publishes for q = m.

    sigma = 4 gamma sqrt(T log(1/delta)) / (epsilon m).

    >>> round(theorem_1_sigma(2.0, 1 / 205, 205, 1000, 0.2), 4)
    0.1424
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon}: expected a positive number")
    return 4 * gamma * math.sqrt(rounds * math.log(1 / delta)) / (epsilon * clients)


@dataclass(frozen=True)
class PublishedMean:
    """The account of PMTL's published noise: sigma on the mean of a cohort, clipped to gamma.

    Attributes:
        noise_multiplier: z = q sigma / gamma, of the sum of q contributions.
        claimed: Epsilon as the authors compute it: Renyi DP of hidden Poisson cohorts of rate q/m
            under zero_out, although cohorts have a fixed size.
        zero_out: The exact account of what they compute.
        replace: The same under replace, the paper's own relation.
        other_clients: Epsilon under replace against all other clients, who know a cohort of fixed
            size: sampling hides nothing from them.
    """

    noise_multiplier: float
    claimed: float
    zero_out: float
    replace: float
    other_clients: float


def published_mean(
    clients: int, cohort: int, rounds: int, sigma: float, gamma: float, delta: float | None = None
) -> PublishedMean:
    """Return the account of PMTL's noise for m clients, q of them in each of T rounds.

    **Guarantee:** all but `claimed` are upper bounds at `delta` (default 1 / m), if cohorts are as
    the attribute states and contributions are clipped to gamma; `claimed` is one too, but for
    Poisson cohorts, which the paper does not draw. `tests/privacy/test_published_claims.py`.
    """
    delta, z = 1 / clients if delta is None else delta, cohort * sigma / gamma
    events, rate = [Gaussian(z)] * rounds, cohort / clients
    hidden, fixed = Participation("poisson", rate), Participation("fixed", rate)
    return PublishedMean(
        noise_multiplier=z,
        claimed=_renyi_epsilon(z, rate, rounds, delta),
        zero_out=profile(events, hidden, "zero_out").epsilon(delta),
        replace=profile(events, hidden, "replace").epsilon(delta),
        other_clients=profile(events, fixed.to_others, "replace").epsilon(delta),
    )


def _renyi_epsilon(z: float, rate: float, rounds: int, delta: float) -> float:
    """Return the Renyi account of Poisson-sampled Gaussian releases, by whole orders."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, rdp

    accountant = rdp.RdpAccountant([*range(2, 64), 128, 256, 512])
    step = PoissonSampledDpEvent(rate, GaussianDpEvent(z))
    return float(accountant.compose(SelfComposedDpEvent(step, rounds)).get_epsilon(delta))


def rows_to_clients(epsilon: float, delta: float, weights: Sequence[float], rows: int) -> float:
    """Return the noise multiplier of a recipe that protects rows, for clients of this many rows.

    Proposition 3 of Liang et al.: (epsilon, delta) for whole clients of at most n rows follows from
    (epsilon/n, delta/(n e^epsilon)) for one row. One row of n moves a client's strongly convex fit,
    whose norm is at most the bound B, by at most 2 B/n, so the noise is (2/n)/mu' in units of B,
    mu' the Gaussian DP of that row-level budget, with rounds composed exactly.

    `epsilon` and `delta` are of the client-level target; a round gets the noise multiplier returned
    over its weight; `rows` is the most rows of a client, a public number.

    **Guarantee:** never less noise than the exact client-level account requires under zero_out or
    replace: n times mu' is below the mu of (epsilon, delta), as group privacy loses.
    `tests/privacy/test_published.py`.
    """
    if rows < 1:
        raise ValueError(f"rows = {rows}: expected the most rows of a client, at least 1")
    check_delta(delta, (Gaussian(1.0),))
    if not 0 < epsilon <= _MOST:
        raise ValueError(
            f"epsilon = {epsilon}: expected a positive number of at most {_MOST:g}, beyond which "
            "the delta for one row vanishes; for no noise, run with epsilon inf"
        )
    mu = gaussian_mu(epsilon / rows, delta / rows * math.exp(-epsilon))
    # The margin is that of `calibrate`: it covers rounding and is negligible.
    return 2 / rows * math.sqrt(math.fsum(weight**2 for weight in weights)) / mu * (1 + 1e-8)


@dataclass(frozen=True)
class Claims:
    """The published scheme's epsilons at one sigma: claimed, and true.

    Attributes:
        label: sqrt(2 log(1.25/delta))/sigma, with which the paper labels its noise: a bound for one
            release, without sampling, below 1 only.
        theorem_41: Theorem 4.1, for what it describes: T steps of a Poisson-sampled Gaussian of
            noise multiplier sigma, composed exactly, the worse of both directions.
        theorem_41_symmetric: The same with C_p(G_(1/sigma)) made symmetric in every step before
            composition, as its formula is published: larger, and equally valid for the same noise.
        theorem_42: Theorem 4.2 as published, mu = p sqrt(T) sqrt(T (e^(1/sigma^2) - 1)), which
            counts T twice; an approximation even when corrected. May be infinite.
        approximation_mu: mu of the corrected limit, p sqrt(T (e^(1/sigma^2) - 1)): approximation,
            not a bound.
        approximation_epsilon: Its epsilon: approximation, not a bound.
        noise_multiplier: z of the sum of K messages, in units of the clip.
        true_zero_out: True epsilon of all releases for an outsider who does not observe cohorts,
            which are assumed to have the noise of K clients: a fixed number, as in the paper,
            although Poisson cohorts vary, and a smaller one has less noise: an
            optimistic column.
        true_replace: The same under replace, the paper's own relation.
        server_mu: Gaussian DP of one message, as the server observes it, under replace.
        server_epsilon: Epsilon of one message, as the server observes it, under replace.
        server_total: Epsilon of all messages of a client, under replace: how often it takes part is
            binomial, and observed.
    """

    label: float
    theorem_41: float
    theorem_41_symmetric: float
    theorem_42: float
    approximation_mu: float
    approximation_epsilon: float
    noise_multiplier: float
    true_zero_out: float
    true_replace: float
    server_mu: float
    server_epsilon: float
    server_total: float


def claims(clients: int, cohort: float, rounds: int, sigma: float, delta: float) -> Claims:
    """Return the epsilons that the paper claims for its noise, and the true ones.

    There are M `clients`, K of them expected in a `cohort`, and T `rounds`.

    **Guarantee:** the `true` columns, under the assumption stated there, and the `server` columns
    are upper bounds for the published noise with clipped contributions (the published algorithm
    never clips, and then has no guarantee). The others are claims.
    `tests/privacy/test_published_claims.py`.
    """
    rate = cohort / clients
    hidden = Participation("poisson", rate)
    z = 2 * sigma * cohort * math.sqrt(cohort) / clients
    # C_p of a step is symmetric; so is the account of a replaced client at twice the noise.
    symmetric = profile([Gaussian(2 * sigma)] * rounds, Participation("fixed", rate), "replace")
    plan = Guarantee(
        events=(Gaussian(sigma),) * rounds,
        participation=hidden,
        relation="zero_out",
        delta=delta,
        clients=clients,
    )
    limit = gdp_approximation(plan)
    twice = GaussianProfile(math.sqrt(rounds) * limit.mu)
    server = clients / (cohort * sigma)
    every = profile([Gaussian(2 / server)] * rounds, hidden.shown, "replace")
    summed = [Gaussian(z)] * rounds
    return Claims(
        label=published_sigma(sigma, delta),
        theorem_41=plan.epsilon,
        theorem_41_symmetric=symmetric.epsilon(delta),
        theorem_42=twice.epsilon(delta),
        approximation_mu=limit.mu,
        approximation_epsilon=limit.epsilon(delta),
        noise_multiplier=z,
        true_zero_out=profile(summed, hidden, "zero_out").epsilon(delta),
        true_replace=profile(summed, hidden, "replace").epsilon(delta),
        server_mu=server,
        server_epsilon=GaussianProfile(server).epsilon(delta),
        server_total=every.epsilon(delta),
    )
