"""The audit: honest code stays below its claim, planted bugs do not."""

import numpy as np
import pytest

from coterie.audit import empirical
from coterie.audit.empirical import Attack, Canary, audit
from coterie.core.rng import Rng
from coterie.core.tree import map_leaves
from coterie.data.federated import FederatedDataset
from coterie.data.synthetic import synthetic
from coterie.engine import rounds
from coterie.methods.base import registered
from coterie.plan.plan import Plan, Privacy
from coterie.privacy.billboard import Billboard, Release
from coterie.privacy.entropy import SeededEntropy
from coterie.privacy.mechanisms import GaussianSum
from coterie.privacy.profiles import gaussian_mu
from coterie.privacy.sampling import Poisson

CLIENTS, EPSILON, DELTA = 30, 4.0, 1e-5
LOUD = Attack(canary=Canary("alternating", 1e3, 8))


@pytest.fixture(scope="module")
def data():
    return synthetic("mean", clients=CLIENTS, rows=12, features=3, seed=0).data


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def plan_of(kind="pmtl", rounds=2, epsilon=EPSILON, **more):
    privacy = Privacy(epsilon=epsilon, delta=DELTA)
    return Plan(method=registered()[kind](), privacy=privacy, rounds=rounds, **more)


@pytest.mark.parametrize(
    ("kind", "trials"),
    [slow("pmtl", 1000), ("pfeb", 300), slow("mpmtl", 1000), slow("dpfedmtl", 1000)],
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

    def same(self, index):
        mechanism, shapes, _ = opened(self, index)
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


@pytest.mark.parametrize(
    ("bug", "attack"),
    [
        (double_clip, Attack()),
        slow(halve_noise, LOUD),
        slow(weigh_by_rows, LOUD),
        slow(reuse_noise, Attack(canary=Canary("random", 1.0, 8))),
        slow(divide_by_realised_cohort, LOUD),
        slow(share_streams, Attack(canary=LOUD.canary, split=by_split, others=20)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_planted_bug_is_found(data, monkeypatch, bug, attack):
    """Each is caught in 100 trials; the claim is epsilon 4 at delta 1e-5."""
    plan = plan_of()
    assert audit(plan, data, trials=50, attack=attack).holds
    bug(monkeypatch)
    found = audit(plan, data, trials=100, attack=attack)
    assert not found.holds and found.best.epsilon > 4.5


def test_what_cannot_be_audited_is_refused(data):
    with pytest.raises(ValueError, match="no claim to audit"):
        audit(plan_of(epsilon=float("inf")), data)
    with pytest.raises(ValueError, match="at least 50"):
        audit(plan_of(), data, trials=10)
