"""Adaptive clipping: the clip follows the norms, and its release is paid for."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.privacy.oracles import ALARM

import coterie as ct
from coterie.core.rng import Rng
from coterie.core.tree import take
from coterie.data.synthetic import synthetic
from coterie.methods.adaptive import CLIP, Adaptive
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models import MLP
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import resolve
from coterie.privacy.billboard import bound
from coterie.privacy.entropy import SeededEntropy
from coterie.privacy.mechanisms import BlockSum

NET = MLP(hidden=(3,))
BASES = (FedAvg(model=NET), PMTL(model=NET), DPFedMTL(model=NET))


def toy(clients=8):
    return synthetic("mean", clients=clients, rows=(3, 9), features=4, spread=0.3, seed=0).data


def mechanism_of(method, spec, multiplier=2.0):
    blocks = method.clipping(spec.clients, 1).blocks
    return BlockSum(blocks, multiplier)


@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_contribution_is_the_change_in_units_of_the_clip(base):
    data = toy()
    clients = data.clients(np.arange(len(data)))
    method = Adaptive(base=base, start=0.02)
    shared = method.init(data.spec, Rng.seeded(0))
    plain = base.init(data.spec, Rng.seeded(0))
    state = method.init_client_state(shared, data.spec, len(data))
    _, found = method.local_update(shared, state, clients, Rng.seeded(1), 0)
    _, change = base.local_update(plain, state, clients, Rng.seeded(1), 0)
    rows = torch.cat([leaf.flatten(1) for leaf in change.values()], dim=1).double()
    np.testing.assert_allclose(found["change"] * np.float32(0.02), rows, rtol=1e-6)
    inside = rows.norm(dim=1) <= np.float32(0.02)
    assert found["within"][:, 0].tolist() == [0.5 if one else -0.5 for one in inside]
    shapes = {name: leaf.shape[1:] for name, leaf in found.items()}
    assert shapes == {name: leaf.shape for name, leaf in method.contribution(data.spec).items()}


@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_release_moves_the_shared_model_and_the_clip(base):
    data = toy(clients=40)
    method = Adaptive(base=base, quantile=0.4, rate=0.3, start=0.02)
    plan = Plan(method=method, privacy=Privacy(epsilon=8.0), rounds=1, simulation_seed=0)
    outcome = ct.simulate(plan, data)
    (post,) = outcome.posts
    before = method.init(data.spec, Rng.seeded(0).at("init"))
    released = post.mean["change"].numpy() * np.float32(0.02)
    after = np.concatenate(
        [
            (outcome.shared[name] - before[name]).numpy().ravel()
            for name in base.contribution(data.spec)
        ]
    )
    np.testing.assert_allclose(after, released, rtol=1e-3, atol=1e-6)
    for name in set(before) - set(base.contribution(data.spec)) - {CLIP}:
        assert torch.equal(outcome.shared[name], before[name])
    noise = post.deviations["within"] / 40
    share = float(post.mean["within"]) + 0.5
    step = 0.3 / (1 + (noise / 0.1) ** 2) * np.clip(share - 0.4, -1, 1)
    assert float(outcome.shared[CLIP]) == pytest.approx(0.02 * math.exp(-step), rel=1e-5)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    odd=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    clip=st.floats(1e-6, 1e6),
    share=st.floats(0.001, 0.9),
)
def test_one_client_moves_a_release_by_at_most_what_its_event_says(seed, scale, odd, clip, share):
    """Exactly, in fractions: sums lie on grids, and noise is measured as it is drawn."""
    data = toy(clients=4)

    class Wild(FedAvg):
        def local_update(self, shared, personal, clients, rng, round):
            drawn = np.random.default_rng([seed, *clients.ids.tolist()]).standard_normal
            change = {
                name: torch.from_numpy(scale * drawn((len(clients), *leaf.shape)))
                for name, leaf in shared.items()
            }
            next(iter(change.values())).view(-1)[0] += odd
            return personal, change

    method = Adaptive(base=Wild(model=NET), share=share, start=clip)
    shared, clients = method.init(data.spec, Rng.seeded(0)), data.clients(np.arange(4))
    _, rows = method.local_update(shared, {}, clients, Rng.seeded(0), 0)
    mechanism = mechanism_of(method, data.spec)
    whole = bound(mechanism, rows)[0].total
    rest = bound(mechanism, take(rows, torch.tensor([1, 2, 3])))[0].total  # client 0 as zeros
    noise = mechanism.standard_deviations({n: tuple(leaf.shape) for n, leaf in whole.items()})
    moved = sum(
        sum(Fraction(float(one)) ** 2 for one in (whole[name] - rest[name]).ravel())
        / Fraction(noise[name]) ** 2
        for name in whole
    )
    assert moved <= 1 / Fraction(mechanism.noise_multiplier) ** 2
    assert mechanism.event().noise_multiplier == mechanism.noise_multiplier


def test_both_numbers_cost_what_the_paper_says():
    """Theorem 1 of Andrew et al.: z^-2 = z_change^-2 + (2 sigma_b)^-2."""
    method = Adaptive(share=0.1)
    mechanism = mechanism_of(method, toy().spec, multiplier=3.0)
    sizes = {"change": (5,), "within": (1,)}
    change, within = (mechanism.standard_deviations(sizes)[name] for name in sizes)
    assert change**-2 + (2 * within) ** -2 == pytest.approx(3.0**-2)
    plan = Plan(method=method, privacy=Privacy(epsilon=1.0), rounds=7)
    fixed = replace(plan, method=FedAvg())
    assert plan.guarantee(50).epsilon == pytest.approx(fixed.guarantee(50).epsilon, rel=1e-6)
    assert plan.noise_multipliers(50) == pytest.approx(fixed.noise_multipliers(50))
    assert plan.relative_error(toy().spec) > fixed.relative_error(toy().spec)


class Norms(FedAvg):
    """Changes of fixed norms: client i has (i + 1) / 100."""

    def local_update(self, shared, personal, clients, rng, round):
        change = {n: torch.zeros(len(clients), *leaf.shape) for n, leaf in shared.items()}
        change["weight"][:, 0, 0] = (clients.ids + 1) / 100
        return personal, change


@pytest.mark.parametrize(
    ("epsilon", "quantile", "most"),
    [(math.inf, 0.2, 0.03), (math.inf, 0.9, 0.03), (30.0, 0.5, 0.2)],
)
def test_the_clip_finds_the_quantile(epsilon, quantile, most):
    data = toy(clients=50)
    method = Adaptive(base=Norms(), quantile=quantile, start=0.06, rate=1.0)
    plan = Plan(method=method, privacy=Privacy(epsilon=epsilon), rounds=25, simulation_seed=0)
    found = float(ct.simulate(plan, data).shared[CLIP])
    assert abs(2 * found - quantile) < most  # of 50 clients


def test_the_noise_of_the_number_of_clients_is_as_stated():
    """False alarm: at most 1e-6. Half the stated noise is rejected."""
    mechanism = mechanism_of(Adaptive(share=0.05), toy().spec, multiplier=1.5)
    zeros = {"change": torch.zeros(3, dtype=torch.float64), "within": torch.zeros(1).double()}
    drawn = np.array(
        [
            float(mechanism.perturb(zeros, SeededEntropy(seed, "noise", 0))["within"])
            for seed in range(4000)
        ]
    )

    def fits(deviation):
        square = (drawn**2).sum() / deviation**2
        low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], len(drawn))
        return low < square < high

    stated = 1.5 * 0.5 / math.sqrt(0.05)
    assert fits(stated) and not fits(stated / 2)


def test_a_clip_stays_where_the_number_of_clients_is_mostly_noise():
    data = toy(clients=6)
    method = Adaptive(base=FedAvg(), start=0.1)
    plan = Plan(method=method, privacy=Privacy(epsilon=0.1), rounds=30, simulation_seed=0)
    assert float(ct.simulate(plan, data).shared[CLIP]) == pytest.approx(0.1, rel=0.05)


def test_what_cannot_be_adaptive_is_refused():
    with pytest.raises(ValueError, match="one mean change"):
        Adaptive(base=PFEB())
    with pytest.raises(ValueError, match="without clusters"):
        Adaptive(base=PMTL(clusters=(0, 1)))
    for wrong in ({"quantile": 1.0}, {"share": 0.0}, {"start": 0.0}, {"rate": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Adaptive(**wrong)
    with pytest.raises(ValueError, match="bounds change, within separately"):
        noise = ct.privacy.noise.LaplaceNoise()
        ct.simulate(
            Plan(method=Adaptive(), privacy=Privacy(epsilon=1.0, noise=noise), rounds=2), toy()
        )


def test_it_is_finetuned_and_resolved_like_its_base():
    data = toy(clients=20)
    method = Finetune(base=Adaptive(base=DPFedMTL(model=NET)))
    plan = resolve(Plan(method=method, privacy=Privacy(epsilon=4.0)), data.spec)
    fixed = resolve(
        Plan(method=Finetune(base=DPFedMTL(model=NET)), privacy=Privacy(epsilon=4.0)), data.spec
    )
    assert plan.rounds == fixed.rounds and plan.privacy.clip == 1.0  # in units of what adapts
    assert "follows the norms" in " ".join(method.notes().settings)
    outcome = ct.simulate(replace(plan, rounds=2, simulation_seed=0), data)
    assert set(outcome.rows(np.arange(2))) == set(NET.init(data.spec, Rng.seeded(0)))
