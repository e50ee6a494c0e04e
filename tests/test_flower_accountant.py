"""`CoterieAccountant` against Gaussian DP, Flower's own accountant, and crashes."""

import json
import math
from dataclasses import replace

import pytest
from scipy import optimize, stats

flwr = pytest.importorskip("flwr.serverapp")

from coterie.cli.main import main  # noqa: E402
from coterie.flower import CoterieAccountant  # noqa: E402
from coterie.flower.accountant import LEDGER  # noqa: E402

Event = flwr.GaussianPrivacyEvent
FULL = flwr.PrivacyConfig(
    target_delta=1e-5,
    population_size=205,
    neighboring_relation=flwr.NeighboringRelation.ADD_OR_REMOVE_ONE,
    sampling_method=flwr.SamplingMethod.NO_AMPLIFICATION,
)
POISSON = replace(FULL, sampling_method=flwr.SamplingMethod.POISSON)
FIXED = replace(
    FULL,
    sampling_method=flwr.SamplingMethod.WITHOUT_REPLACEMENT,
    neighboring_relation=flwr.NeighboringRelation.REPLACE_ONE,
)


def epsilon_of(mu, delta):
    def excess(epsilon):
        upper = stats.norm.cdf(-epsilon / mu + mu / 2)
        return upper - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2) - delta

    return optimize.brentq(excess, 0, 200)


def test_it_has_the_members_of_the_protocol():
    wanted = {name for name in vars(flwr.PrivacyAccountant) if not name.startswith("_")}
    assert wanted and wanted <= set(dir(CoterieAccountant))


@pytest.mark.parametrize(
    "config, size, flowers, ours", [(FULL, 205, 5.024, 4.653), (POISSON, 100, 2.238, 2.059)]
)
def test_it_is_tighter_than_flowers_own(config, size, flowers, ours):
    pytest.importorskip("dp_accounting")
    event = Event(30.0, size, 205)
    theirs, mine = flwr.RdpAccountant(config), CoterieAccountant(config)
    for accountant in (theirs, mine):
        accountant.compose(event, 1000)
    assert theirs.get_epsilon(1e-5) == pytest.approx(flowers, abs=2e-3)
    assert mine.get_epsilon(1e-5) == pytest.approx(ours, abs=2e-3)
    assert mine.get_privacy_spent().num_releases == 1000


def test_full_participation_is_gaussian_dp_also_of_different_noise():
    accountant = CoterieAccountant(FULL)
    assert accountant.get_epsilon(1e-5) == accountant.get_delta(1.0) == 0
    accountant.compose(Event(20.0, 205, 205), 100)
    accountant.compose(Event(40.0, 150, 205), 300)  # who answers does not matter here
    mu = math.sqrt(100 / 20**2 + 300 / 40**2)
    epsilon = accountant.get_epsilon(1e-5)
    assert epsilon == pytest.approx(epsilon_of(mu, 1e-5), rel=1e-6)
    assert accountant.get_delta(epsilon) == pytest.approx(1e-5, rel=1e-3)


def test_a_fixed_cohort_is_known_to_all_others():
    fixed, full = CoterieAccountant(FIXED), CoterieAccountant(FULL)
    for one, size in ((fixed, 100), (full, 205)):
        one.compose(Event(30.0, size, 205), 50)
    assert fixed.get_epsilon(1e-5) > full.get_epsilon(1e-5)  # replace: twice the sensitivity


def test_a_limit_is_asked_of_before_a_round():
    config = replace(FULL, max_epsilon=1.0)
    accountant, event, rounds = CoterieAccountant(config), Event(20.0, 205, 205), 0
    while not accountant.would_exceed(event):
        accountant.compose(event)
        rounds += 1
    assert epsilon_of(math.sqrt(rounds) / 20, 1e-5) <= 1.0
    assert epsilon_of(math.sqrt(rounds + 1) / 20, 1e-5) > 1.0
    assert not accountant.would_exceed(event, max_epsilon=2.0)
    with pytest.raises(ValueError, match="max_epsilon"):
        CoterieAccountant(FULL).would_exceed(event)


@pytest.mark.parametrize("crash", ["after compose", "after a round was permitted", "torn"])
def test_the_ledger_survives_a_crash(tmp_path, crash):
    config, event = replace(FULL, max_epsilon=9.0), Event(20.0, 205, 205)
    first = CoterieAccountant(config, tmp_path)
    for _ in range(3):
        assert not first.would_exceed(event)
        first.compose(event)
    expected = 3
    if crash == "after a round was permitted":
        assert not first.would_exceed(event)
        expected = 4
    path = tmp_path / LEDGER
    del first
    if crash == "torn":
        path.write_bytes(path.read_bytes()[:-9])
    again = CoterieAccountant(config, tmp_path)
    assert again.num_releases == expected
    del again
    assert CoterieAccountant(config, tmp_path).num_releases == expected  # and not once more


def test_a_folder_has_one_configuration_and_one_process(tmp_path):
    kept = CoterieAccountant(FULL, tmp_path)
    with pytest.raises(Exception, match="in use"):
        CoterieAccountant(FULL, tmp_path)
    del kept
    with pytest.raises(ValueError, match="another configuration"):
        CoterieAccountant(POISSON, tmp_path)


def test_state_is_restored_and_never_shrinks():
    accountant, event = CoterieAccountant(POISSON), Event(20.0, 100, 205)
    accountant.compose(event, 5)
    state = json.loads(json.dumps(accountant.state_dict()))
    other = CoterieAccountant(POISSON)
    other.load_state_dict(state)
    assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    other.compose(event)
    with pytest.raises(ValueError, match="does not contain"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="configuration"):
        CoterieAccountant(FULL).load_state_dict(state)


@pytest.mark.parametrize(
    "event, count, text",
    [
        (Event(20.0, 100, 300), 1, "population_size"),
        (Event(20.0, 50, 205), 1, "sample_size = 50 after 100"),
        (Event(20.0, 100, 205), 0, "count"),
    ],
)
def test_what_has_no_account_is_refused(event, count, text):
    accountant = CoterieAccountant(POISSON)
    accountant.compose(Event(20.0, 100, 205))
    with pytest.raises(ValueError, match=text):
        accountant.compose(event, count)
    assert accountant.num_releases == 1


@pytest.mark.parametrize("config, size", [(FULL, 205), (POISSON, 100), (FIXED, 100)])
def test_verify_accepts_the_certificate_and_no_other(tmp_path, capsys, config, size):
    accountant = CoterieAccountant(config, tmp_path)
    accountant.compose(Event(20.0, size, 205), 4)
    accountant.compose(Event(25.0, size, 205), 2)
    assert accountant.certify() == tmp_path
    assert main(["verify", str(tmp_path)]) == 0
    path = tmp_path / "guarantee.json"
    text = path.read_text()
    for altered in (
        text.replace('"rounds": 6', '"rounds": 5'),
        text.replace('"delta": 1e-05', '"delta": 0.0001'),
    ):
        assert altered != text
        path.write_text(altered)
        assert main(["verify", str(tmp_path)]) == 1
    stated = json.loads(text)
    from coterie.runs.certificate import seal

    for key in ("epsilon", "rate", "clients"):
        forged = {**stated, key: stated[key] * 0.9 if key != "clients" else 300}
        forged["sha256"] = seal(forged)
        path.write_text(json.dumps(forged))
        assert main(["verify", str(tmp_path)]) == 1, key
    path.write_text(text)
    accountant.compose(Event(25.0, size, 205))
    assert main(["verify", str(tmp_path)]) == 1
    assert "certify again" in capsys.readouterr().out
