"""A plan and its guarantee."""

import pytest

from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import FixedSize


@pytest.mark.parametrize(("method", "amplified"), [(FedAvg(), True), (PMTL(), False)], ids=str)
def test_hidden_cohorts_of_a_fixed_size_amplify_for_methods_without_state_only(method, amplified):
    """Who took part before decides on the state of others, and so on later contributions."""
    privacy = Privacy(noise_multiplier=2.0, relation="replace")
    plan = Plan(method=method, privacy=privacy, sampler=FixedSize(5), rounds=3)
    guarantee = plan.guarantee(20)
    assert (guarantee.views["outsider"] < 0.9 * guarantee.epsilon) == amplified
    assert guarantee.views["outsider"] <= guarantee.views["other_clients"]
