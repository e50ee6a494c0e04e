"""Claims that an audit must not disprove; each test fails for a mutant of tools/mutants.py."""

import pytest

from coterie.audit.empirical import Attack, Canary, audit
from coterie.data.synthetic import synthetic
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import Everyone, Poisson

pytestmark = pytest.mark.slow
LOUD = Canary("alternating", 1e3, 8)
# The attack, the claim, the sampler, and the trials that find a planted bug.
CASES = {
    "one": (Attack(canary=Canary("one", 1e3, 1)), 4.0, Everyone(), 100),
    "loud": (Attack(canary=LOUD), 4.0, Everyone(), 100),
    "random": (Attack(canary=Canary("random", 1.0, 8)), 4.0, Everyone(), 100),
    "split": (
        Attack(canary=LOUD, split=lambda data: data.split(0.5, 0)[0], others=20),
        4.0,
        Everyone(),
        100,
    ),
    "visible": (Attack(canary=LOUD), 1.0, Poisson(3, visible=True), 500),
    "sites": (Attack(canary=LOUD, sites=2), 4.0, Everyone(), 50),
}


@pytest.mark.parametrize("name", CASES)
def test_the_claim_holds(name):
    attack, epsilon, sampler, trials = CASES[name]
    data = synthetic("mean", clients=30, rows=12, features=3, seed=0).data
    plan = Plan(
        method=PMTL(),
        privacy=Privacy(epsilon=epsilon, delta=1e-5),
        rounds=1 if name == "visible" else 2,
        sampler=sampler,
    )
    found = audit(plan, data, trials=trials, attack=attack)
    assert found.holds and found.guarantee.epsilon <= epsilon
