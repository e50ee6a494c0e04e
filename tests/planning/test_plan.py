"""A plan and its guarantee."""

import pytest

from coterie.data.federated import Spec
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.mechanisms import MOST_CLIENTS
from coterie.privacy.noise import GaussianNoise, SharedNoise
from coterie.privacy.sampling import FixedSize, Poisson


@pytest.mark.parametrize(("method", "amplified"), [(FedAvg(), True), (PMTL(), False)], ids=str)
def test_hidden_cohorts_of_a_fixed_size_amplify_for_methods_without_state_only(method, amplified):
    """Who took part before decides on the state of others, and so on later contributions."""
    privacy = Privacy(noise_multiplier=2.0, relation="replace")
    plan = Plan(method=method, privacy=privacy, sampler=FixedSize(5), rounds=3)
    guarantee = plan.guarantee(20)
    assert (guarantee.views["outsider"] < 0.9 * guarantee.epsilon) == amplified
    assert guarantee.views["outsider"] <= guarantee.views["other_clients"]


MANY = MOST_CLIENTS + 1


@pytest.mark.parametrize(
    ("sampler", "noise", "is_exact"),
    [
        (FixedSize(100), GaussianNoise(), True),
        (FixedSize(MOST_CLIENTS), GaussianNoise(), True),
        (FixedSize(MANY), GaussianNoise(), False),
        (Poisson(100), GaussianNoise(), False),  # nothing keeps everybody from being drawn
        (FixedSize(100), SharedNoise(), False),  # every client adds a share in every round
    ],
)
def test_sums_of_more_clients_than_are_exact_are_refused(sampler, noise, is_exact):
    privacy = Privacy(noise_multiplier=1.0, noise=noise, relation="replace")
    plan = Plan(method=PMTL(), privacy=privacy, sampler=sampler, rounds=1)
    spec = Spec(shape=(2,), outputs=1, task="regression", clients=MANY)
    if is_exact:
        plan.open(spec).ledger.close()
        return
    with pytest.raises(ValueError, match="sums are exact for at most 4194304 in a round"):
        plan.open(spec)
