"""DPFedMTL: what is printed for its noise, and what is true of it.

Wu et al., "A Theoretical Perspective on Differentially Private Federated Multi-Task Learning". Of M
clients K are expected in a step, by Poisson sampling with p = K/M; each adds N(0, (sigma S)^2) with
S = 2 C K/M to its own gradient, and the server averages over K. Their Lemma 4.1 gives a client the
weight K/M in that average; it has 1/K. So where they account for steps of noise multiplier sigma,
replacing a client moves the sum by 2 C, and the noise in the sum of K messages is sqrt(K) sigma S:
in units of C a multiplier of z = 2 sigma K^(3/2)/M, which halves under replace. And the server sees
every message by itself, with a sensitivity of 2 C against noise sigma S: mu = M/(K sigma).
"""

import math
from dataclasses import dataclass

from coterie.privacy.accounting import Gaussian, Guarantee, Participation, profile
from coterie.privacy.profiles import GaussianProfile
from coterie.privacy.published import printed_epsilon
from coterie.privacy.tradeoff import gdp_approximation


@dataclass(frozen=True)
class Claims:
    """The printed scheme's epsilons at one sigma: claimed, and true.

    Attributes:
        label: sqrt(2 log(1.25/delta))/sigma, with which the paper labels its noise: a bound for one
            release, without sampling, below 1 alone.
        theorem_41: Theorem 4.1, for what it describes: T steps of a Poisson-sampled Gaussian of
            noise multiplier sigma, composed exactly, the worse of both directions.
        theorem_41_symmetric: The same with C_p(G_(1/sigma)) made symmetric in every step before
            composition, as its formula is printed: larger, and no less right for the same noise.
        theorem_42: Theorem 4.2 as printed, mu = p sqrt(T) sqrt(T (e^(1/sigma^2) - 1)), which counts
            T twice; an approximation even when corrected. May be infinite.
        approximation_mu: mu of the corrected limit, p sqrt(T (e^(1/sigma^2) - 1)): approximation,
            not a bound.
        approximation_epsilon: Its epsilon: approximation, not a bound.
        noise_multiplier: z of the sum of K messages, in units of the clip.
        true_zero_out: True epsilon of all posts for an outsider who does not see cohorts, which are
            taken to hold the noise of K clients: a fixed number, as in the paper, where Poisson
            cohorts vary, and a smaller one has less noise. So even this column flatters the scheme.
        true_replace: The same under replace, the paper's own relation.
        server_mu: Gaussian DP of one message, as the server sees it, under replace.
        server_epsilon: Epsilon of one message, as the server sees it, under replace.
        server_total: Epsilon of all messages of a client, under replace: how often it takes part is
            binomial, and seen.
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
    """Set what the paper prints for its noise beside what is true of it.

    Args:
        clients: M.
        cohort: K, the expected cohort.
        rounds: T, the steps.
        sigma: The printed noise.
        delta: At which all epsilons are stated.

    **Guarantee:** the `true` columns, under the assumption stated there, and the `server` columns
    are upper bounds for the printed noise with contributions that are clipped (the printed
    algorithm never clips; then nothing is true of it). The others are claims.
    `tests/accounting/test_claims.py`.
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
        label=printed_epsilon(sigma, delta),
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
