"""The audit through deployed sites: the same scores as without them; bugs of sites are found."""

import json

import numpy as np
import pytest

from coterie.audit.empirical import Attack, Canary, audit
from coterie.cli.main import main
from coterie.data.synthetic import synthetic
from coterie.deploy.site import SiteRun
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import Poisson

CANARY = Canary("alternating", 1e3, 8)


@pytest.fixture(scope="module")
def data():
    return synthetic("mean", clients=6, rows=8, features=3, seed=0).data


def plan_of(noise, rounds=2, **more):
    privacy = Privacy(epsilon=4.0, delta=1e-5, noise=noise)
    return Plan(method=PMTL(), privacy=privacy, rounds=rounds, **more)


def test_sites_answer_what_a_simulation_computes(data):
    plan = plan_of("gaussian", rounds=1)
    direct, sites = (
        audit(plan, data, trials=50, attack=Attack(canary=CANARY, sites=many)) for many in (0, 2)
    )
    for one, other in zip(direct.scores, sites.scores, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sites.holds


def answers_twice(monkeypatch):
    """Compute a round again whenever it is asked for."""
    monkeypatch.setattr(SiteRun, "_check_round", lambda self, number: None)
    monkeypatch.setattr(SiteRun, "_stored", lambda self, number: None)


@pytest.mark.slow
def test_a_site_that_answers_twice_is_found(data, monkeypatch):
    answers_twice(monkeypatch)
    hostile = Attack(canary=CANARY, sites=2, hostile=True)
    found = audit(plan_of("local", rounds=1), data, trials=50, attack=hostile)
    assert found.view == "server" and not found.holds


def test_what_sites_cannot_show_is_refused(data, capsys):
    with pytest.raises(ValueError, match="no epsilon is claimed against it"):
        audit(plan_of("gaussian"), data, attack=Attack(canary=CANARY, sites=2, hostile=True))
    with pytest.raises(ValueError, match="all clients take part"):
        sampled = plan_of("gaussian", sampler=Poisson(3))
        audit(sampled, data, attack=Attack(canary=CANARY, sites=2))
    for flags, wanted in (
        (("--sites", "1"), "--sites 1: expected 2 or more"),
        (("--hostile",), "add --sites 2"),
        (("--sites", "999"), "--sites 999: expected 2 to "),
    ):
        assert main(["audit", "--data", "synthetic", *flags]) == 2
        assert wanted in capsys.readouterr().err


@pytest.mark.slow
def test_a_hostile_coordinator_learns_no_more(capsys):
    flags = "--data synthetic --clients 6 --rows 8 --method pmtl --rounds 1 --epsilon 4"
    words = f"audit {flags} --noise local --trials 50 --sites 2 --hostile --json".split()
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["view"] == "server" and found["holds"] and found["trials"] == 50
