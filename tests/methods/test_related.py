"""Clusters and relations: against the joint problem solved at once, and against each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse

from coterie.core.rng import Rng
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.methods.finetune import Finetune
from coterie.methods.pmtl import PMTL
from coterie.methods.related import Related
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.billboard import bound
from coterie.privacy.sampling import Poisson
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.sgd import SGD
from coterie.solvers.structured import Decomposition, decompose, mean_relation

pytestmark = pytest.mark.full

BARE = Privacy(epsilon=math.inf)
PLAIN = Linear(bias=False)
CLUSTERS = (0, 1, 0, 1, 1, 0)


def few(task="regression", clients=6, seed=3):
    return synthetic(
        "mean", clients=clients, rows=(4, 5), features=3, task=task, spread=0.8, seed=seed
    ).data


def fit(method, data, rounds=60, privacy=BARE, **kwargs):
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=0, **kwargs)
    return simulate(plan, data)


def rows(matrix):
    return tuple(tuple(map(float, row)) for row in matrix)


# ---- relations of six clients --------------------------------------------------------------------

ONES = np.ones((6, 6))
MEAN = np.eye(6) - ONES / 6
TWO = np.eye(6) - np.array([[1 / 3 * (a == b) for a in CLUSTERS] for b in CLUSTERS])
# Clients 0 and 1 should be opposites: (w_0 + w_1)^2, and everybody small.
OPPOSED = np.eye(6) + np.pad(np.ones((2, 2)), (0, 4))
PATH = np.diag([1.0, 2, 2, 2, 2, 1]) - np.eye(6, k=1) - np.eye(6, k=-1)
RANDOM = np.cov(np.random.default_rng(0).normal(size=(6, 9)))
HARD = 0.1 * np.eye(6) + ONES  # all unlike all
DEGREES = PATH + 0.3 * np.eye(6)
CASES = {
    "mean": (MEAN, ()),
    "two": (TWO, ()),
    "opposed": (OPPOSED, ()),
    "path": (PATH, ()),
    "random": (RANDOM, ()),
    "hard": (HARD, ()),
    "degrees": (DEGREES, tuple(np.diag(DEGREES))),
    "uneven": (MEAN, (0.7, 1.5, 1.0, 2.0, 1.0, 0.9)),
}


def solved(data, omega, lam):
    """The joint problem for squared loss: one linear system of all clients' numbers."""
    m, d = len(data), data.spec.features
    system, right = 2 * lam * np.kron(omega, np.eye(d)), np.zeros(m * d)
    for k in range(m):
        own = slice(data.offsets[k], data.offsets[k + 1])
        x, y = data.features[own].double().numpy(), data.targets[own].double().numpy()
        at = slice(k * d, (k + 1) * d)
        system[at, at] += x.T @ x / len(y)
        right[at] = x.T @ y / len(y)
    return np.linalg.solve(system, right).reshape(m, d)


# ---- the decomposition ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_decompositions_are_exact(name):
    omega, diagonal = CASES[name]
    chosen = torch.tensor(diagonal, dtype=torch.float64) if diagonal else None
    found = decompose(torch.from_numpy(omega), chosen)
    assert float((found.omega - torch.from_numpy(omega)).abs().max()) < 1e-10
    assert float(found.diagonal.min()) > 0
    assert set(found.signs.tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    "name,columns", [("mean", 1), ("two", 2), ("opposed", 1), ("hard", 1), ("path", 5)]
)
def test_as_few_columns_as_can_be(name, columns):
    found = decompose(torch.from_numpy(CASES[name][0]))
    assert found.factors.shape == (6, columns)


def test_mean_relation_is_the_mean():
    np.testing.assert_allclose(mean_relation(6).omega, MEAN, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_extremes_are_those_of_the_whole_matrix(name):
    omega, diagonal = CASES[name]
    found = decompose(torch.from_numpy(omega), torch.tensor(diagonal) if diagonal else None)
    short = found.diagonal.rsqrt()
    rest = short[:, None] * (found.omega - torch.diag(found.diagonal)) * short
    values = torch.linalg.eigvalsh(rest)
    least, most = min(0.0, float(values[0])), max(0.0, float(values[-1]))
    assert found.extremes == pytest.approx((least, most), abs=1e-6)


# ---- what it converges to ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change_from"),
    # By turns, and once a relation with all unlike pairs and one with uneven pulls both ways.
    [*zip(CASES, ["anchor", "start"] * 4, strict=True), ("hard", "anchor"), ("uneven", "anchor")],
)
def test_related_solves_the_joint_problem(name, change_from):
    omega, diagonal = CASES[name]
    data, lam = few(), 0.4
    method = Related(
        model=PLAIN, lam=lam, omega=rows(omega), diagonal=diagonal, change_from=change_from
    )
    outcome = fit(method, data, rounds=100 if name == "path" else 60)
    found = outcome.models.leaves["weight"][:, 0].numpy()
    np.testing.assert_allclose(found, solved(data, omega, lam), atol=2e-4)


def test_factors_spelt_out_are_the_omega_that_they_make():
    data, found = few(), decompose(torch.from_numpy(OPPOSED))
    spelt = Related(
        diagonal=tuple(found.diagonal.tolist()),
        factors=rows(found.factors),
        signs=tuple(found.signs.tolist()),
    )
    left = fit(spelt, data, rounds=5)
    right = fit(Related(omega=rows(OPPOSED)), data, rounds=5)
    torch.testing.assert_close(left.models.leaves["weight"], right.models.leaves["weight"])


def test_a_plan_says_the_decomposition_that_was_used():
    """Eigenvectors may differ from machine to machine: everybody must use the same."""
    method = Related(omega=rows(TWO))
    budget = {"n_mu": math.inf, "cohort": 6}
    spelt = method.resolve(few().spec, **budget)
    assert spelt.factors and not spelt.omega
    assert Related().resolve(few().spec, **budget) == Related()
    for name in ("diagonal", "factors", "signs"):
        assert torch.equal(getattr(spelt.relation(6), name), getattr(method.relation(6), name))


def test_rounds_without_damping_would_diverge(monkeypatch):
    data, method = few(), Related(model=PLAIN, lam=0.4, omega=rows(HARD))
    assert method.relation(6).step < 0.1 and "unlike" in method.notes().settings[0]
    monkeypatch.setattr(Decomposition, "step", 1.0)
    sums = fit(method, data, rounds=60).shared["related.weight"]
    assert not float(sums.abs().max()) < 1e3


@pytest.mark.parametrize("omega", [(), rows(MEAN)])
@pytest.mark.parametrize("solver", ["auto", "sgd"])
def test_the_mean_relation_is_pmtl_round_by_round(omega, solver):
    """The same posts, noise and cohorts included, with half of PMTL's lam."""
    data = few()
    settings = {"rounds": 6, "privacy": Privacy(epsilon=2.0), "sampler": Poisson(3.0)}
    left = fit(Related(lam=0.2, omega=omega, solver=solver), data, **settings)
    right = fit(PMTL(lam=0.4, solver=solver), data, **settings)
    for one, other in zip(left.posts, right.posts, strict=True):
        torch.testing.assert_close(one.value["weight"][0], other.value["weight"], atol=1e-4, rtol=0)
    for name, leaf in right.models.leaves.items():
        torch.testing.assert_close(left.models.leaves[name], leaf, atol=1e-4, rtol=1e-4)


def test_two_blocks_are_two_clusters():
    data = few()
    left = fit(Related(model=PLAIN, lam=0.2, omega=rows(TWO)), data, rounds=50)
    right = fit(PMTL(model=PLAIN, lam=0.4, clusters=CLUSTERS), data, rounds=50)
    torch.testing.assert_close(
        left.models.leaves["weight"], right.models.leaves["weight"], atol=1e-4, rtol=1e-4
    )


def test_opposed_clients_end_on_opposite_sides():
    """Two clients with the same rows: related, they agree; opposed, they do not."""
    data = few()
    alike = np.array([[1.0, -1], [-1, 1]])
    products = {}
    for name, pair in (("alike", alike), ("opposed", np.abs(alike))):
        omega = 0.01 * np.eye(6)
        omega[:2, :2] += 20 * pair
        w = fit(Related(model=PLAIN, lam=0.4, omega=rows(omega)), data, rounds=150)
        first, second = w.models.leaves["weight"][:2, 0]
        products[name] = float(first @ second / (first.norm() * second.norm()))
    assert products["alike"] > 0.9 and products["opposed"] < -0.9


def test_uneven_pulls_by_sgd_are_those_of_the_exact_solver():
    data, diagonal = few(), CASES["uneven"][1]
    settings = {"omega": rows(MEAN), "diagonal": diagonal, "lam": 0.4, "model": PLAIN}
    exact = fit(Related(**settings), data, rounds=40).models.leaves["weight"]
    steps = SGD(lr=0.1, steps=30, batch=1000)
    near = fit(Related(**settings, solver="sgd", sgd=steps), data, rounds=25)
    torch.testing.assert_close(near.models.leaves["weight"], exact, atol=5e-3, rtol=0)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_ridges_with_a_strength_for_each_client(is_sparse):
    data = few()
    if is_sparse:
        data = replace(data, features=sparse.csr_matrix(data.features.numpy()))
    everyone, lams = data.clients(np.arange(6)), torch.tensor([0.1, 2.0, 0.5, 0.1, 30.0, 1e-3])
    together = solve_ridge(everyone, anchor=None, lam=lams, bias=True)
    for k in range(6):
        one = data.clients(np.array([k]))
        alone = solve_ridge(one, anchor=None, lam=float(lams[k]), bias=True)
        for leaf, found in together.items():
            torch.testing.assert_close(found[k : k + 1], alone[leaf], atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="one for each of 6 clients"):
        solve_ridge(everyone, anchor=None, lam=lams[:5], bias=True)
    with pytest.raises(ValueError, match="finite number > 0"):
        solve_ridge(everyone, anchor=None, lam=-lams, bias=True)


# ---- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change_from", ["shared", "own"])
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_clusters_without_noise_are_runs_of_their_own(change_from, task):
    """A run of each cluster's clients alone ends where the run of all clusters does."""
    data = few(task)
    steps = SGD(lr=0.1, steps=5, batch=1000)
    method = PMTL(lam=0.5, change_from=change_from, sgd=steps)
    both = fit(replace(method, clusters=CLUSTERS), data, rounds=15)
    for cluster in (0, 1):
        members = np.flatnonzero(np.array(CLUSTERS) == cluster)
        alone = fit(method, data.only(members), rounds=15)
        for name, leaf in alone.models.leaves.items():
            torch.testing.assert_close(both.models.leaves[name][members], leaf, atol=1e-4, rtol=0)
            torch.testing.assert_close(
                both.shared[name][cluster], alone.shared[name], atol=1e-4, rtol=0
            )


def test_a_client_contributes_to_its_own_cluster_alone():
    """So the clip of the whole contribution is the clip of its slot: one slot's sensitivity."""
    data, method = few(), PMTL(clusters=CLUSTERS)
    plan = Plan(method=method, privacy=Privacy(noise_multiplier=1.0, clip=0.2), rounds=1)
    shared = method.init(data.spec, Rng.seeded(0))
    everyone = data.clients(np.arange(6))
    personal = method.init_client_state(shared, data.spec, 6)
    _, sent = method.local_update(shared, personal, everyone, Rng.seeded(1), 0)
    for leaf in sent.values():
        assert bool(leaf[torch.arange(6), 1 - torch.tensor(CLUSTERS)].eq(0).all())
    mechanism = plan.mechanisms(6)[0]
    for k in range(6):
        one = {name: leaf[k : k + 1] for name, leaf in sent.items()}
        total = bound(mechanism, one, torch.tensor([k]))[0].total
        squares = [total[name].square().flatten(1).sum(dim=1) for name in total]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        assert float(norms[CLUSTERS[k]]) <= 0.2 and float(norms[1 - CLUSTERS[k]]) == 0


@pytest.mark.parametrize("cohort", [None, 3.0])
def test_a_cluster_is_divided_by_its_own_expected_cohort(cohort):
    data, clusters = few(), (0, 1, 0, 0, 0, 0)
    method = PMTL(clusters=clusters)
    privacy = Privacy(noise_multiplier=1.0)
    outcome = fit(method, data, rounds=1, privacy=privacy, sampler=Poisson(cohort))
    rate = 1.0 if cohort is None else 0.5
    for name, leaf in outcome.shared.items():
        for cluster, members in enumerate((5, 1)):
            moved = outcome.posts[0].value[name][cluster] / (rate * members)
            torch.testing.assert_close(leaf[cluster].double(), moved, atol=1e-5, rtol=1e-5)


def test_clusters_cost_nothing():
    plans = [
        Plan(method=PMTL(clusters=clusters), privacy=Privacy(noise_multiplier=3.0), rounds=4)
        for clusters in ((), CLUSTERS)
    ]
    assert plans[0].guarantee(6).epsilon == plans[1].guarantee(6).epsilon


# ---- models between rounds and after the run -----------------------------------------------------

SIX = {"clusters": PMTL(clusters=CLUSTERS), "opposed": Related(omega=rows(OPPOSED))}


def test_a_client_that_has_not_taken_part_stands_where_its_cluster_does():
    data, method = few(), SIX["clusters"]
    shared = {
        name: leaf + 0.1 + torch.arange(2.0).reshape(-1, *[1] * (leaf.dim() - 1))
        for name, leaf in method.init(data.spec, Rng.seeded(0)).items()
    }
    personal = method.init_client_state(shared, data.spec, 6)
    models = method.current_models(shared, personal, data.clients(np.arange(6)))
    torch.testing.assert_close(models["bias"][:, 0], torch.tensor(CLUSTERS) + 0.1)


@pytest.mark.parametrize("name", ["clusters", "opposed"])
def test_finetuning_stays_near_what_a_client_was_pulled_to(name):
    data = few()
    settings = {"how": "mean", "lam": 1e3, "sgd": SGD(lr=1e-3, steps=30)}
    outcome = fit(Finetune(base=SIX[name], **settings), data, rounds=5)
    pulled = SIX[name].serving.shared_model(outcome.shared, data.clients(np.arange(6)))
    for leaf, model in outcome.models.leaves.items():
        torch.testing.assert_close(model, pulled[leaf], atol=2e-2, rtol=0)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"omega": ((1.0, 0.5), (0.4, 1.0))}, "symmetric"),
        ({"omega": ((1.0, 0.5),)}, "symmetric"),
        ({"omega": ((1.0, 0.5), (0.5,))}, "different lengths"),
        ({"omega": ((1.0, math.nan), (math.nan, 1.0))}, "not finite"),
        ({"omega": ((1.0, 2.0), (2.0, 1.0))}, "negative eigenvalue"),
        ({"omega": ((-1.0, 0.0), (0.0, -2.0))}, "no positive eigenvalue"),
        ({"omega": ((2.0, 0.0), (0.0, 2.0))}, "use local"),
        ({"omega": rows(MEAN), "diagonal": (1.0, 2.0)}, "expected 6"),
        ({"omega": rows(MEAN), "diagonal": (1.0, 1, 1, 0, 1, 1)}, "client 3 has 0"),
        ({"diagonal": (1.0, 1.0)}, "with factors"),
        ({"factors": ((1.0,), (1.0,)), "diagonal": (1.0, 1.0)}, "one of signs a column"),
        ({"factors": ((0.5,), (0.5,)), "diagonal": (1.0, 1.0), "signs": (2.0,)}, "-1 or 1"),
        ({"lam": 0.0}, "lam = "),
        ({"last_epochs": 0}, "last_epochs = "),
    ],
)
def test_bad_relations(settings, said):
    with pytest.raises(ValueError, match=said):
        Related(**settings)


@pytest.mark.parametrize("clusters", [(0, 2), (1, 1), (-1, 0)])
def test_bad_clusters(clusters):
    with pytest.raises(ValueError, match="clusters: "):
        PMTL(clusters=clusters)


@pytest.mark.parametrize("method", [PMTL(clusters=(0, 1, 1)), Related(omega=rows(np.eye(3) - 0.2))])
def test_every_client_needs_a_place(method):
    with pytest.raises(ValueError, match=r"for 3 clients, but there are 6"):
        fit(method, few(), rounds=1)


def test_new_clients_may_join_the_mean_relation():
    outcome = fit(Related(lam=0.2), few(), rounds=20)
    other = fit(PMTL(lam=0.4), few(), rounds=20)
    new = few(clients=2, seed=8)
    torch.testing.assert_close(
        outcome.onboard(new)["weight"], other.onboard(new)["weight"], atol=1e-4, rtol=1e-4
    )
