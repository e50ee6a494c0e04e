"""`run_coordinator`: its report, its durations, another plan, a restarted site."""

from dataclasses import replace

import pytest
from tests.deploy.deployed import deploy

import coterie as ct
from coterie.deploy.coordinator import IncompleteRoundError, run_coordinator
from coterie.privacy.sampling import Everyone

pytestmark = pytest.mark.full


def said(made):
    lines = []
    run_coordinator(
        made.agreement,
        made.run,
        made.root / "coordinator.key",
        lambda note: made.hood,
        lines.append,
    )
    return lines


def test_a_line_is_said_for_each_round(tmp_path):
    made = deploy(tmp_path, sampler=Everyone(), minimum=0.0, patience=0, rounds=2, deadline=0.05)
    made.hood.absent = {"site2"}
    line = "8 of 12 clients answered (sites: 1 silent)"
    assert said(made) == [f"round 1 of 2: {line}", f"round 2 of 2: {line}"]


def test_under_a_hidden_cohort_no_counts_are_said(tmp_path):
    made = deploy(tmp_path, rounds=2)
    assert said(made) == ["round 1 of 2: released", "round 2 of 2: released"]


@pytest.mark.parametrize(("sampler", "found"), [(ct.Poisson(6), False), (ct.Poisson(12), True)])
def test_how_long_it_took_is_hidden_with_the_cohort_alone(tmp_path, sampler, found):
    summary = deploy(tmp_path, sampler=sampler).coordinate()
    assert (summary["seconds"] is not None) is found
    assert summary["deployment"]["hidden_cohort"] is not found


def test_another_plan_is_refused_with_what_can_be_done(tmp_path):
    made = deploy(tmp_path, deadline=0.05)
    made.hood.absent = set(made.hood.sites)
    with pytest.raises(IncompleteRoundError, match=r"worker\.log"):
        made.coordinate()
    other = replace(made.agreement, plan=replace(made.agreement.plan, rounds=2))
    key = made.root / "coordinator.key"
    with pytest.raises(FileExistsError) as refusal:
        run_coordinator(other, made.run, key, lambda note: made.hood)
    words = str(refusal.value)
    assert f"coterie deploy status {made.run}" in words and "--resume" not in words
    assert "nothing was charged in this one: it may be removed" in words
    made.hood.absent = set()
    made.coordinate()
    with pytest.raises(FileExistsError) as refusal:
        run_coordinator(other, made.run, key, lambda note: made.hood)
    assert "removed" not in str(refusal.value)
