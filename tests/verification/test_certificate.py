"""Certificates against plans: noise, budget and bounds, without a run."""

import pytest

from coterie.verification.certificate import wrong_bounds, wrong_budget

FIELDS = {
    "gaussian": {"noise_multiplier": 4.0, "replaced": 2.0},
    "local_gaussian": {"noise_multiplier": 4.0, "honest": 1, "claimed": None},
    "laplace": {"epsilon": 0.25},
    "wishart": {"degrees": 1000, "ratio": 0.25, "claimed": None},
}
NOISES = {
    "gaussian": "gaussian",
    "laplace": "laplace",
    "wishart": "wishart",
    "local": "local_gaussian",
    "local_paper": "local_gaussian",
    "wishart_paper": "wishart",
}


def stated(event="gaussian", epsilon=2.0, **changes):
    fields = {"event": event, **FIELDS[event]}
    fields |= {key: changes.pop(key) for key in tuple(changes) if key in fields}
    usual = {
        "events": [{**fields, "rounds": 3}],
        "rounds": 3,
        "epsilon": epsilon,
        "views": {"other_clients": epsilon},
        "sampling": "everyone",
        "cohort": "hidden",
        "protected_rows": None,
        "shape": "sum",
    }
    return {**usual, **changes}


def plan(noise="gaussian", **privacy):
    given = privacy or {"epsilon": 2.0}
    return {"privacy": {"noise": noise, "clip": 0.5, **given}}


@pytest.mark.parametrize("event", FIELDS)
@pytest.mark.parametrize("noise", NOISES)
def test_built_in_noise_has_its_own_event(noise, event):
    claim = {"claimed": 2 / 3} if "claimed" in FIELDS[event] and "paper" in noise else {}
    total = {"claimed_epsilon": 2.0} if claim else {}
    found = wrong_budget(plan(noise), stated(event, **claim, **total))
    assert (found == []) == (NOISES[noise] == event), found
    assert wrong_budget(plan("of_another_package"), stated(event, **claim, **total)) == []


@pytest.mark.parametrize("noise", ["local", "wishart"])
def test_a_claim_does_not_replace_the_budget(noise):
    """With a claim the certificate is a reproduction's, whose noise no budget limits."""
    forged = stated(NOISES[noise], epsilon=30.0, claimed=2 / 3, claimed_epsilon=2.0)
    (text,) = wrong_budget(plan(noise), forged)
    assert "claim" in text
    honest = stated(NOISES[noise], epsilon=30.0)
    assert wrong_budget(plan(f"{noise}_paper"), honest)


def test_the_budget_holds_against_the_other_clients():
    """Noise made for the smaller epsilon of an outsider is too little."""
    fixed = {"sampling": "fixed", "views": {"other_clients": 3.6, "outsider": 2.0}}
    assert wrong_budget(plan(), stated(epsilon=3.6, **fixed)) != []
    assert wrong_budget(plan(), stated(epsilon=2.0, **fixed)) == []
    assert wrong_budget(plan(), stated(epsilon=1.9)) != []


@pytest.mark.parametrize("shape", ["sum", "rows", "gram", "squares"])
@pytest.mark.parametrize("first", [0.5, 0.25, 0.6])
def test_the_first_block_is_bounded_by_the_clip(first, shape):
    good = first == (0.25 if shape in ("gram", "squares") else 0.5)
    parts = [
        {"leaves": ["mean"], "norm": 2, "bound": first, "grid": 2.0**-20},
        {"leaves": ["spread"], "norm": 2, "bound": 1.5, "grid": 2.0**-20},
    ]
    for count in (1, 2):
        released = stated(releases=[{"rounds": 3, "parts": parts[:count]}], shape=shape)
        assert (wrong_bounds(plan(), released) == []) == good
