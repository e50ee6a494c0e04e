"""The audit: honest code stays below its claim, planted bugs do not."""

import numpy as np
import pytest

from coterie.audit import empirical
from coterie.audit.empirical import Attack, Canary, audit, audit_one_run
from coterie.core.rng import Rng
from coterie.core.tree import map_leaves
from coterie.data.federated import FederatedDataset
from coterie.data.synthetic import synthetic
from coterie.engine import rounds
from coterie.methods.base import registered
from coterie.models import MLP
from coterie.planning.plan import Plan, Privacy
from coterie.privacy import banded, mechanisms
from coterie.privacy.billboard import Billboard, Release
from coterie.privacy.entropy import SeededEntropy
from coterie.privacy.mechanisms import GaussianSum
from coterie.privacy.noise import BandedNoise, SharedNoise
from coterie.privacy.profiles import gaussian_mu
from coterie.privacy.sampling import Cyclic, Poisson
from coterie.privacy.shares import GaussianShares

CLIENTS, EPSILON, DELTA = 30, 4.0, 1e-5
LOUD = Attack(canary=Canary("alternating", 1e3, 8))


@pytest.fixture(scope="module")
def data():
    return synthetic("mean", clients=CLIENTS, rows=12, features=3, seed=0).data


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def plan_of(kind="pmtl", rounds=2, epsilon=EPSILON, model=None, **more):
    privacy = Privacy(epsilon=epsilon, delta=DELTA)
    method = registered()[kind]() if model is None else registered()[kind](model=model)
    return Plan(method=method, privacy=privacy, rounds=rounds, **more)


@pytest.mark.parametrize(
    ("kind", "trials"),
    [slow("pmtl", 1000), ("pfeb", 200), slow("mpmtl", 1000), slow("dpfedmtl", 1000)],
)
def test_the_bound_is_below_the_claim_and_tight(data, kind, trials):
    found = audit(plan_of(kind), data, trials=trials)
    assert found.holds and found.best.estimator == "gaussian"
    assert found.best.epsilon > 0.6 * found.claimed
    allowed = gaussian_mu(EPSILON, DELTA)
    assert 0.9 * allowed < found.canary["mu"] <= 1.001 * allowed


@pytest.mark.slow
def test_laplace_noise_and_hidden_cohorts_have_a_threshold_bound_only(data):
    laplace = Privacy(epsilon=2.0, delta=0.0, noise="laplace")
    plans = [
        Plan(method=registered()["pmtl"](), privacy=laplace, rounds=1),
        plan_of(sampler=Poisson(15)),
    ]
    for plan in plans:
        found = audit(plan, data, trials=100, attack=LOUD)
        assert found.holds and {one.estimator.split("_")[0] for one in found.bounds} == {
            "threshold"
        }


def double_clip(monkeypatch):
    clip = GaussianSum.clip
    monkeypatch.setattr(
        GaussianSum, "clip", lambda self, rows: clip(GaussianSum(2 * self.bound, 1.0), rows)
    )


def halve_noise(monkeypatch):
    on_grid = GaussianSum.on_grid
    monkeypatch.setattr(
        GaussianSum, "on_grid", lambda self, drawn, step: on_grid(self, drawn / 2, step)
    )
    drawn = mechanisms.normals_on  # by clients that add their own
    monkeypatch.setattr(mechanisms, "normals_on", lambda *given: drawn(*given) / 2)


def weigh_by_rows(monkeypatch):
    half = rounds.bound

    def weighted(mechanism, rows, ids=None, entropy=None):
        part, kept = half(mechanism, rows, ids, entropy)
        if ids is not None and 0 in ids.tolist():
            alone = map_leaves(lambda leaf: leaf[:1], rows)
            for _ in range(7):  # 8 rows count eight times
                part = part + half(mechanism, alone, ids[:1], entropy)[0]
        return part, kept

    monkeypatch.setattr(rounds, "bound", weighted)


def reuse_noise(monkeypatch):
    opened = Billboard._opened

    def same(self, index, device):
        mechanism, shapes, _ = opened(self, index, device)
        seed = self._entropy(0).seed
        return mechanism, shapes, SeededEntropy(seed, "noise", 0)

    monkeypatch.setattr(Billboard, "_opened", same)


def share_streams(monkeypatch):
    def draw(self, wanted, rng):
        words = Rng.seeded(0).at("all").numpy().random(len(self.owners))
        order = np.lexsort((words, self.owners))
        rank = np.arange(len(self.owners)) - self.offsets[:-1][self.owners]
        drawn = np.zeros(len(self.owners), dtype=bool)
        drawn[order] = rank < wanted[self.owners]
        return drawn

    monkeypatch.setattr(FederatedDataset, "_draw", draw)


def divide_by_realised_cohort(monkeypatch):
    half, add, publish = empirical.client_half, Release.add, Release.publish
    sizes = {}

    def counted(state, personal, clients):
        found = half(state, personal, clients)
        sizes[found.part.marks] = len(clients)
        return found

    def added(self, part):
        self.size = sizes[part.marks]
        add(self, part)

    def divided(self):
        self._total = {name: total * CLIENTS / self.size for name, total in self._total.items()}
        return publish(self)

    monkeypatch.setattr(empirical, "client_half", counted)
    monkeypatch.setattr(Release, "add", added)
    monkeypatch.setattr(Release, "publish", divided)


def by_split(data):
    return data.split(0.5, 0)[0]


BUGS = (
    (double_clip, Attack(canary=Canary("one", 1e3, 1))),
    (halve_noise, LOUD),
    (weigh_by_rows, LOUD),
    (reuse_noise, Attack(canary=Canary("random", 1.0, 8))),
    (divide_by_realised_cohort, LOUD),
    (share_streams, Attack(canary=LOUD.canary, split=by_split, others=20)),
)


@pytest.mark.parametrize(
    ("bug", "attack"),
    [BUGS[0], *(slow(*bug) for bug in BUGS[1:])],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_planted_bug_is_found(data, monkeypatch, bug, attack):
    """Each is caught in 100 trials; the claim is epsilon 4 at delta 1e-5."""
    bug(monkeypatch)
    found = audit(plan_of(), data, trials=100, attack=attack)
    assert not found.holds and found.best.epsilon > 4.5


@pytest.mark.slow
def test_a_visible_cohort_has_no_amplification(data):
    """The claim is that of a hidden cohort; the adversary observes who takes part."""
    plan = plan_of(epsilon=1.0, sampler=Poisson(3), rounds=1)
    assert audit(plan, data, trials=50, attack=LOUD).holds
    seen = Attack(canary=LOUD.canary, sees_cohort=True)
    found = audit(plan, data, trials=500, attack=seen)
    assert not found.holds and found.best.estimator == "gaussian"


def test_the_server_sees_messages_where_clients_add_the_noise(data, monkeypatch):
    """Its bound is below the claim, and above it if half of a client's noise is missing."""
    privacy = Privacy(epsilon=EPSILON, delta=DELTA, noise="local")
    plan = Plan(method=registered()["pmtl"](), privacy=privacy, rounds=2)
    found = audit(plan, data, trials=100, attack=LOUD)
    assert found.view == "server" and found.holds and found.best.epsilon > 0.4 * found.claimed
    halve_noise(monkeypatch)
    assert not audit(plan, data, trials=50, attack=LOUD).holds


def test_one_run_with_many_canaries(monkeypatch):
    data = synthetic("mean", clients=200, rows=3, features=30, seed=0).data
    plan = plan_of("fedavg", rounds=1, model=MLP(hidden=(32,)))
    found = audit_one_run(plan, data)
    assert found.holds and found.best.epsilon > 0 and found.best.estimator == "one_run"
    assert found.canary["canaries"] == 100 == sum(map(len, found.scores))
    assert audit_one_run(plan, data).best == found.best
    on_grid = GaussianSum.on_grid
    monkeypatch.setattr(
        GaussianSum, "on_grid", lambda self, drawn, step: on_grid(self, drawn / 20, step)
    )
    weak = plan_of("fedavg", rounds=1, epsilon=0.5, model=MLP(hidden=(32,)))
    assert not audit_one_run(weak, data).holds


def test_a_single_run_needs_all_clients_and_noise_on_sums(data):
    with pytest.raises(ValueError, match="noise on sums of all clients"):
        audit_one_run(plan_of(sampler=Poisson(3)), data)
    with pytest.raises(ValueError, match="expected 2 to 30"):
        audit_one_run(plan_of(), data, canaries=31)


def test_errors_are_those_of_the_attack(data):
    found = audit(plan_of(), data, trials=50, attack=LOUD)
    out, inside = found.scores
    errors = found.errors
    assert errors[0].tolist() == [1.0, 0.0] and errors[-1].tolist() == [0.0, 1.0]
    assert (np.diff(errors[:, 0]) <= 0).all() and (np.diff(errors[:, 1]) >= 0).all()
    area = float(np.trapezoid(1 - errors[::-1, 1], errors[::-1, 0]))
    wins = (inside[:, None] > out[None, :]).mean() + (inside[:, None] == out[None, :]).mean() / 2
    assert area == pytest.approx(float(wins), abs=0.02)


def test_what_cannot_be_audited_is_refused(data):
    with pytest.raises(ValueError, match="no claim to audit"):
        audit(plan_of(epsilon=float("inf")), data)
    with pytest.raises(ValueError, match="at least 50"):
        audit(plan_of(), data, trials=10)


def of_shares(kind):
    noise = SharedNoise(minimum_clients=20, corrupt=4)
    privacy = Privacy(epsilon=EPSILON, delta=DELTA, noise=noise)
    return Plan(method=registered()[kind](), privacy=privacy, rounds=2)


@pytest.mark.parametrize(("kind", "trials"), [("pmtl", 150), slow("pfeb", 500), slow("mpmtl", 500)])
def test_the_coordinator_with_corrupt_clients_stays_below_the_claim(data, kind, trials):
    """It subtracts all shares of the noise but 16: what is left is the planned noise, barely."""
    found = audit(of_shares(kind), data, trials=trials)
    assert found.view == "coordinator_and_corrupt" and found.claimed <= EPSILON
    assert found.holds and found.best.epsilon > 0.5 * found.claimed
    assert found.canary["mu"] <= 1.001 * gaussian_mu(EPSILON, DELTA)


def test_shares_that_are_too_small_are_found(data, monkeypatch):
    honest = GaussianShares._variance
    monkeypatch.setattr(GaussianShares, "_variance", lambda self, square: honest(self, square) // 6)
    found = audit(of_shares("pmtl"), data, trials=150)
    assert not found.holds


def of_schedule(noise):
    privacy = Privacy(epsilon=EPSILON, delta=DELTA, noise=noise)
    return Plan(method=registered()["pmtl"](), privacy=privacy, rounds=3, sampler=Cyclic(15))


@pytest.mark.slow
def test_banded_noise_stays_below_the_claim_and_is_tight(data):
    """The adversary takes correlated noise off: what is left is that of the account."""
    found = audit(of_schedule(BandedNoise()), data, trials=300, attack=LOUD)
    assert found.holds and found.best.estimator == "gaussian"
    assert found.best.epsilon > 0.5 * found.claimed
    allowed = gaussian_mu(EPSILON, DELTA)
    assert 0.9 * allowed < found.canary["mu"] <= 1.001 * allowed


def test_banded_noise_that_is_too_small_is_found(data, monkeypatch):
    honest = banded.normals
    monkeypatch.setattr(banded, "normals", lambda *given: 0.5 * honest(*given))
    assert not audit(of_schedule(BandedNoise()), data, trials=60, attack=LOUD).holds
