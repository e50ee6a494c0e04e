"""A guarantee read back: damage is refused, and never makes epsilon smaller."""

import json
import math

import pytest

from coterie.privacy.events import Gaussian, Laplace, NonPrivate, Participation, Wishart
from coterie.privacy.guarantee import Guarantee, describe_noise, spent_together

POISSON = Participation("poisson", 0.01, visible=True)


def stated(**changes):
    return Guarantee(
        events=(Gaussian(5.0),) * 10, participation=POISSON, relation="zero_out", delta=1e-5,
        clients=100,
    ).to_json() | changes  # fmt: skip


@pytest.mark.parametrize("rounds", [0, -3, 2.9, "10", None])
def test_strange_counts_are_refused(rounds):
    data = json.loads(json.dumps(stated()))
    data["events"][0]["rounds"] = rounds
    with pytest.raises((ValueError, TypeError)):
        Guarantee.from_json(data)


@pytest.mark.parametrize("changes", [{"cohort": "Visible"}, {"cohort": ""}, {"rounds": 9}])
def test_what_does_not_fit_is_refused(changes):
    with pytest.raises(ValueError, match=r"cohort|rounds"):
        Guarantee.from_json(stated(**changes))


def test_a_tiny_delta_is_refused_rather_than_searched_for_ever():
    for delta in (1e-90, 1e-31, 5e-324):
        with pytest.raises(ValueError, match="1e-30"):
            Guarantee(
                events=(Gaussian(5.0),), participation=POISSON, relation="zero_out", delta=delta,
                clients=100,
            )  # fmt: skip


def test_noise_is_described_beside_releases_without_any():
    assert describe_noise([NonPrivate()]) == describe_noise([]) == "no noise"
    assert describe_noise([NonPrivate(), Laplace(0.5), Laplace(0.25)]).endswith("e = 0.25 to 0.5")


def number(text):
    return float(text.split("epsilon = ")[1].split()[0])


def one(event=Gaussian(5.0), rounds=10, delta=1e-5, relation="zero_out", who=None):  # noqa: B008
    return Guarantee(
        events=(event,) * rounds, participation=who or Participation("everyone"),
        relation=relation, delta=delta, clients=200,
    )  # fmt: skip


def test_runs_together_cost_no_less_than_any_of_them():
    fixed = Participation("fixed", 0.05)
    hidden = Participation("poisson", 0.01)
    for runs in (
        [one(who=hidden), one()],
        [one(), one(relation="replace")],
        [one(relation="replace", who=fixed)] * 2,
        [one(Laplace(0.2), 3, 0.0), one()],
        [one(Wishart(300, 0.5), 2), one()],
    ):
        together = number(spent_together(runs))
        assert together >= max(run.views["other_clients"] for run in runs)
        assert math.isfinite(together)
