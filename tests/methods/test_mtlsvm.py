"""MTL-SVM: the optimum, its limits, safe sums, clipping, masks, and what is refused.

Oracle: scikit-learn's liblinear on the expanded features [x, 0, .., x / sqrt(C2), .., 0], of which
the multi-task problem is a plain SVM without intercept.
"""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import cvxpy as cp
import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.svm import LinearSVC, LinearSVR

from coterie.core.rng import Rng
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.load import from_arrays
from coterie.data.synthetic import synthetic
from coterie.engine.simulate import Progress, simulate
from coterie.evaluation.score import evaluate
from coterie.methods.mocha import MOCHA
from coterie.methods.mtlsvm import MTLSVM, combine
from coterie.methods.svm import GlobalSVM, LocalSVM, joined
from coterie.models import MLP, Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import resolve, rounds_by_rule
from coterie.privacy.entropy import open_entropy
from coterie.privacy.noise import LaplaceNoise
from coterie.privacy.sampling import FixedSize, Poisson
from coterie.runs.run import execute

pytestmark = pytest.mark.full

PLAIN = Linear(bias=False)
SMALL = {"clients": 3, "rows": (5, 9)}


def toy(task="binary", clients=4, rows=(8, 20), features=3, seed=0, spread=0.7):
    return synthetic(
        "mean", clients=clients, rows=rows, features=features, task=task, spread=spread,
        noise=0.7, seed=seed,
    ).data  # fmt: skip


def run(method, data, *, rounds=400, privacy=None, seed=0, **more):
    privacy = privacy or Privacy(epsilon=math.inf)
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=seed, **more)
    return simulate(plan, data)


def pieces(data):
    owner = np.repeat(np.arange(len(data)), data.counts)
    return data.features.double().numpy(), data.targets.double().numpy(), owner


def expanded(data, c2):
    x, _, owner = pieces(data)
    wide = np.zeros((len(x), x.shape[1] * (len(data) + 1)))
    wide[:, : x.shape[1]] = x
    for row, k in enumerate(owner):
        start = x.shape[1] * (k + 1)
        wide[row, start : start + x.shape[1]] = x[row] / math.sqrt(c2)
    return wide


def objective(data, method, shared, models):
    """The primal, from the shared weights and each client's whole model."""
    x, y, owner = pieces(data)
    w, whole = shared.reshape(-1), models.reshape(len(data), -1)
    scores = (x * whole[owner]).sum(axis=1)
    if data.spec.task == "regression":
        loss = np.maximum(np.abs(scores - y) - method.tube, 0)
    else:
        loss = np.maximum(1 - (2 * y - 1) * scores, 0)
    own = whole - w
    return 0.5 * w @ w + method.c2 / 2 * (own**2).sum() + method.c1 * loss.sum()


def weights(outcome):
    return outcome.models.leaves["weight"].double().numpy()[:, 0]


def dual_value(method, data, shared, store):
    """The dual objective that rounds must never raise, from the duals alone."""
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    personal = store.take(
        np.arange(len(data)), lambda n: method.init_client_state(shared, data.spec, n)
    )
    dual = personal["dual"]
    sums = combine(clients, dual, data.spec.features)
    total = sums.sum(dim=0)
    y = clients.y[:, :, None].double()
    if data.spec.task == "regression":
        linear = (dual * y).sum() - method.tube * dual.abs().sum()
    else:
        linear = dual.abs().sum()
    return float(0.5 * total.square().sum() + sums.square().sum() / (2 * method.c2) - linear)


@pytest.mark.parametrize(
    ("task", "c2", "gamma"),
    [
        ("binary", 0.5, "average"),
        ("binary", 10.0, "add"),
        ("regression", 0.5, "add"),
        ("regression", 2.0, "average"),
    ],
)
def test_rounds_end_at_the_optimum_of_scikit_learn(task, c2, gamma):
    data = toy(task, **SMALL)
    method = MTLSVM(model=PLAIN, c1=0.7, c2=c2, gamma=gamma, stop=1e-8, epochs=50)
    outcome = run(method, data, rounds=3000)
    assert outcome.gap <= 1e-8
    _, y, _ = pieces(data)
    wide = expanded(data, c2)
    if task == "binary":
        oracle = LinearSVC(C=0.7, loss="hinge", fit_intercept=False, tol=1e-10, max_iter=10**6)
        oracle.fit(wide, y)
    else:
        oracle = LinearSVR(
            C=0.7, epsilon=0.1, loss="epsilon_insensitive", fit_intercept=False, tol=1e-10,
            max_iter=10**6,
        )  # fmt: skip
        oracle.fit(wide, y)
    best = oracle.coef_.reshape(len(data) + 1, -1)
    theirs = objective(data, method, best[0], best[0] + best[1:] / math.sqrt(c2))
    ours = objective(data, method, outcome.shared["weight"].numpy(), weights(outcome))
    assert ours == pytest.approx(theirs, rel=1e-6)
    np.testing.assert_allclose(outcome.shared["weight"].numpy()[0], best[0], atol=2e-3)


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_large_c2_gives_one_machine_for_all(task):
    data = toy(task, **SMALL)
    outcome = run(MTLSVM(model=PLAIN, c1=0.5, c2=1e6, stop=1e-9, epochs=50), data, rounds=3000)
    pooled = run(GlobalSVM(model=PLAIN, c=0.5, tol=1e-9), data, rounds=1)
    np.testing.assert_allclose(weights(outcome), weights(pooled), atol=2e-4)


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_small_c2_at_a_fixed_ratio_gives_machines_of_their_own(task):
    data = toy(task, **SMALL)
    method = MTLSVM(model=PLAIN, c1=0.5e-4, c2=1e-4, stop=1e-9, epochs=50)
    outcome = run(method, data, rounds=2000)
    alone = run(method.baselines().local, data, rounds=1)
    assert isinstance(method.baselines().local, LocalSVM) and method.baselines().local.c == 0.5
    np.testing.assert_allclose(weights(outcome), weights(alone), atol=2e-3)
    # With C1 held fixed in its place the two differ: the ratio is the constant.
    other = run(MTLSVM(model=PLAIN, c1=0.5, c2=1e-4, stop=1e-6), data, rounds=50)
    assert np.abs(weights(other) - weights(alone)).max() > 0.02


@pytest.mark.parametrize("task", ["binary", "regression"])
@pytest.mark.parametrize("gamma", ["add", "average", 0.4])
def test_the_dual_never_rises_whoever_answers(task, gamma):
    data = toy(task, clients=10, spread=0.1)
    method = MTLSVM(model=PLAIN, c1=1.0, c2=10.0, gamma=gamma, epochs=3, stop=1e-12)
    seen = []
    plan = Plan(
        method=method, privacy=Privacy(epsilon=math.inf), rounds=40, simulation_seed=3,
        sampler=Poisson(4.0),
    )  # fmt: skip
    simulate(plan, data, observe=lambda p: seen.append(dual_value(method, data, p.shared, p.store)))
    assert len(seen) == 40
    assert all(after <= before + 1e-9 for before, after in pairwise(seen))
    assert seen[-1] < seen[0] - 0.01


def test_plain_sums_overshoot_where_safe_ones_do_not():
    """K identical clients with one row x = y = 1 at C2 = 10: plain sums go 2.7, -2.2, 6.8, ..."""
    k, c2 = 3, 10.0
    w, seen = 0.0, []
    for _ in range(4):
        # One client's exact unboxed step against the same w, added K times.
        a = (1 + 1 / c2) * 1.0
        step = (1 - (w + w / (k * c2))) / a
        w += k * step
        seen.append(w)
    assert seen[0] == pytest.approx(2.727, abs=1e-3) and seen[1] < -2 and seen[2] > 6
    data = FederatedDataset(
        Spec((1,), 1, "binary", k), [f"c{i}" for i in range(k)], np.arange(k + 1),
        torch.ones(k, 1), torch.ones(k),
    )  # fmt: skip
    method = MTLSVM(model=PLAIN, c1=100.0, c2=c2, stop=1e-12)
    shared, personal = method.init(data.spec, None), None
    personal = method.init_client_state(shared, data.spec, k)
    clients = data.clients(np.arange(k, dtype=np.int64))
    for number in range(30):
        personal, sent = method.local_update(shared, personal, clients, Rng.seeded(0), number)
        shared = {"weight": shared["weight"] + sent["weight"].sum(dim=0)}
    assert float(shared["weight"]) == pytest.approx(1 / (1 + 1 / (k * c2)), rel=1e-6)


def test_a_fixed_cohort_needs_a_smaller_factor():
    data = toy(clients=10)
    method = MTLSVM(model=PLAIN)
    assert method.resolve(data.spec, n_mu=math.inf, cohort=4).together == 4
    privacy = Privacy(epsilon=math.inf, relation="replace")
    with pytest.raises(ValueError, match="together = 3, but a round may have 4"):
        run(replace(method, together=3), data, rounds=2, privacy=privacy, sampler=FixedSize(4))
    with pytest.raises(ValueError, match="a round may have 10"):
        run(replace(method, together=4), data, rounds=2)
    seen = []
    plan = Plan(
        method=replace(method, together=4, stop=1e-12), privacy=privacy, rounds=30,
        simulation_seed=1, sampler=FixedSize(4),
    )  # fmt: skip
    simulate(
        plan, data, observe=lambda p: seen.append(dual_value(plan.method, data, p.shared, p.store))
    )
    assert all(after <= before + 1e-9 for before, after in pairwise(seen))


def sums_of(method, data, outcome_store, shared):
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    personal = outcome_store.take(
        np.arange(len(data)), lambda n: method.init_client_state(shared, data.spec, n)
    )
    width = data.spec.features + ("bias" in shared)
    return personal, combine(clients, personal["dual"], width)


@pytest.mark.parametrize("task", ["binary", "regression", "multiclass"])
@pytest.mark.parametrize("mask", ["none", "step"])
def test_clipping_and_masking_keep_the_sums(task, mask):
    """w = xi + sum of own sums, C2 v = own sum: duals, v and w are cut by the same factor."""
    data = toy(task, clients=6)
    method = MTLSVM(c1=1.0, c2=3.0, mask=mask, epochs=5)
    last = []
    plan = Plan(
        method=method, privacy=Privacy(noise_multiplier=0.01, clip=0.05), rounds=12,
        simulation_seed=2, sampler=Poisson(4.0),
    )  # fmt: skip
    outcome = simulate(plan, data, observe=last.append)
    shared, store = last[-1].shared, last[-1].store
    personal, own = sums_of(method, data, store, shared)
    np.testing.assert_allclose(joined(personal).numpy() * method.c2, own.numpy(), atol=1e-9)
    noise = torch.zeros_like(joined(shared))
    for post in outcome.posts:
        mechanism = outcome.billboard.mechanism(post.index)
        zeros = {name: torch.zeros_like(leaf) for name, leaf in post.value.items()}
        noise += joined(mechanism.perturb(zeros, open_entropy(2, "noise", post.index)))
    # What is sent is rounded to a public grid, 2^-10 of the clip at most: 12 rounds, 6 clients.
    left = joined(shared) - noise - own.sum(dim=0)
    assert float(left.abs().max()) < 12 * 6 * 0.05 * 2**-10
    assert float(noise.abs().max()) > 1e-4
    # The clip was felt, or this shows nothing.
    assert float(own.flatten(1).norm(dim=1).max()) <= 12 * 0.05 + 1e-9


class ClippedInTheShared(MTLSVM):
    """What cutting the shared weights alone would do."""

    def on_clipped(self, before, after, kept):
        return after


def test_clipping_alone_ends_at_the_optimum():
    """Cutting the shared weights alone does not."""
    data, ends = toy(**SMALL), {}
    best = run(MTLSVM(model=PLAIN, c1=1.0, c2=2.0, stop=1e-9, epochs=50), data, rounds=3000)
    for kind in (MTLSVM, ClippedInTheShared):
        method = kind(model=PLAIN, c1=1.0, c2=2.0, epochs=20, last_solve=False)
        cut = run(method, data, rounds=100, privacy=Privacy(noise_multiplier=1e-5, clip=0.05))
        ends[kind] = objective(data, method, cut.shared["weight"].numpy(), weights(cut))
        target = objective(data, method, best.shared["weight"].numpy(), weights(best))
    assert ends[MTLSVM] == pytest.approx(target, rel=2e-4)
    assert ends[ClippedInTheShared] > target * 1.001


def test_noise_is_a_random_centre_of_the_regulariser():
    """With w = xi + sums, further rounds solve the problem with 1/2 |w - xi|^2 exactly."""
    data, method = toy("regression"), MTLSVM(model=PLAIN, c1=0.8, c2=2.0, epochs=50)
    xi = torch.tensor([[0.4, -0.7, 1.1]], dtype=torch.float64)
    shared = {"weight": xi.clone()}
    personal = method.init_client_state(shared, data.spec, len(data))
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    for number in range(800):
        personal, sent = method.local_update(
            shared, personal, clients, Rng.seeded(1).at(number), number
        )
        shared = {"weight": shared["weight"] + sent["weight"].sum(dim=0)}
    x, y, owner = pieces(data)
    w, v = cp.Variable(3), cp.Variable((len(data), 3))
    scores = x @ w + cp.sum(cp.multiply(x, v[owner]), axis=1)
    loss = cp.sum(cp.pos(cp.abs(scores - y) - method.tube))
    cost = 0.5 * cp.sum_squares(w - xi.numpy()[0]) + 1.0 * cp.sum_squares(v) + 0.8 * loss
    cp.Problem(cp.Minimize(cost)).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(shared["weight"].numpy()[0], w.value, atol=1e-4)
    np.testing.assert_allclose(personal["weight"].numpy()[:, 0], v.value, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("law", ["bernoulli", "beta"])
def test_a_mask_as_step_size_keeps_the_solution_and_the_printed_one_does_not(law):
    data = toy(clients=3, rows=8)
    plain = MTLSVM(model=PLAIN, c1=1.0, c2=2.0, stop=1e-7, last_solve=False)
    best = run(replace(plain, epochs=50), data, rounds=3000)
    target = objective(data, plain, best.shared["weight"].numpy(), weights(best))
    masked = replace(plain, mask="step", mask_law=law, mask_beta=(2.0, 2.0), epochs=3)
    ours = run(masked, data, rounds=3000)
    assert ours.gap <= 1e-7
    assert objective(data, plain, ours.shared["weight"].numpy(), weights(ours)) == pytest.approx(
        target, rel=1e-6
    )
    ends = []
    for seed in range(3):
        printed = run(replace(masked, mask="paper", stop=1e-12), data, rounds=60, seed=seed)
        ends.append(objective(data, plain, printed.shared["weight"].numpy(), weights(printed)))
    assert min(ends) > target * 1.0005
    assert max(ends) - min(ends) > 1e-4 * target, "the end point of the printed mask is random"


def test_untouched_rows_and_keeping_all_are_no_mask():
    data = toy()
    plain = MTLSVM(model=PLAIN, epochs=2, stop=1e-12)
    bare = run(plain, data, rounds=5)
    for settings in ({"mask_untouched": 1.0, "mask_keep": 0.0}, {"mask_keep": 1.0}):
        masked = run(replace(plain, mask="step", **settings), data, rounds=5)
        np.testing.assert_allclose(weights(masked), weights(bare), rtol=1e-6)


def test_a_private_run_does_all_its_rounds():
    data = toy(clients=6)
    method = MTLSVM(stop=0.9)
    assert len(run(method, data, rounds=30).posts) < 30
    private = run(method, data, rounds=30, privacy=Privacy(epsilon=1.0))
    assert len(private.posts) == 30 and private.gap is None


def test_the_default_plan_has_few_rounds_and_a_clip_to_match():
    from coterie.data.config import DataConfig
    from coterie.planning.plan import Plan

    data = toy("regression", clients=300, rows=5, features=4)
    plan = Plan(data=DataConfig(name="synthetic"), method=MTLSVM(), privacy=Privacy(epsilon=1.0))
    found = resolve(plan, data.spec)
    assert found.rounds == rounds_by_rule(plan.method, plan.privacy, data.spec)
    assert 1 <= found.rounds <= 5
    assert found.privacy.clip == pytest.approx(3 / (300 * found.rounds))
    assert found.method.together == 300
    told = found.method.notes(rounds=found.rounds, clip=found.privacy.clip).settings[0]
    assert "few rounds" in told and "clip" in told
    free = resolve(replace(plan, privacy=Privacy(epsilon=math.inf)), data.spec)
    assert free.rounds == 1000


def test_private_sharing_beats_learning_alone():
    data = synthetic(
        "mean", clients=300, rows=20, features=8, task="binary", spread=0.3, noise=0.5, seed=0
    ).data
    train, test = data.split(0.3, 0)
    method = MTLSVM()
    alone = evaluate(method.model, run(method.baselines().local, train, rounds=1).rows, test)
    scores = [
        evaluate(
            method.model,
            run(method, train, rounds=3, privacy=Privacy(epsilon=1.0), seed=seed).rows,
            test,
        )
        for seed in range(2)
    ]
    for score in scores:
        assert score.value > alone.value + 3 * alone.standard_error


def test_a_budget_that_buys_nothing_costs_little():
    """10 clients, 60 features, epsilon 0.3: what is posted is noise, and w is shortened to it."""
    data = toy(clients=10, rows=100, features=60, spread=1.0)
    train, test = data.split(0.5, 0)
    method = MTLSVM()
    alone = evaluate(method.model, run(method.baselines().local, train, rounds=1).rows, test)
    for seed in range(3):
        privacy = Privacy(epsilon=0.3)
        shrunk = run(method, train, rounds=1, privacy=privacy, seed=seed)
        w = joined(shrunk.shared)
        noise, square = float(shrunk.shared["noise"]), float(w.square().sum())
        assert noise == pytest.approx(square, rel=0.5), "the noise is known, and is nearly all"
        bare = run(replace(method, shrink=False), train, rounds=1, privacy=privacy, seed=seed)
        ours, theirs = (evaluate(method.model, o.rows, test).value for o in (shrunk, bare))
        assert ours > alone.value - alone.standard_error
        assert theirs < alone.value - 3 * alone.standard_error
    free = [run(replace(method, shrink=s), train, rounds=5) for s in (True, False)]
    assert torch.equal(free[0].models.leaves["weight"], free[1].models.leaves["weight"])


def test_the_noise_that_is_noted_is_the_noise_that_was_added():
    data = toy(clients=6, features=40)
    plan = Plan(
        method=MTLSVM(), privacy=Privacy(noise_multiplier=2.0, clip=0.1), rounds=3,
        simulation_seed=0,
    )  # fmt: skip
    outcome = simulate(plan, data)
    assert float(outcome.shared["noise"]) == pytest.approx(3 * 41 * 0.2**2, rel=1e-6)
    laplace = Privacy(epsilon=2.0, delta=0.0, clip=0.1, noise=LaplaceNoise())
    other = simulate(replace(plan, privacy=laplace), data)
    scale = 0.1 / (2.0 / 3)
    assert float(other.shared["noise"]) == pytest.approx(3 * 41 * 2 * scale**2, rel=1e-3)


def test_the_printed_mask_has_no_certificate():
    outcome = run(MTLSVM(mask="paper", stop=0.5, epochs=1), toy(), rounds=40)
    assert outcome.gap is None and len(outcome.posts) == 40


def test_own_sums_do_not_depend_on_a_neighbour_s_row_count():
    for sparse in (False, True):
        data = toy(clients=3, rows=9, features=7)
        if sparse:
            data = replace(data, features=scipy.sparse.csr_matrix(data.features.numpy()))
        dual = torch.randn(3, 9, 2, generator=torch.Generator().manual_seed(0)).double()
        whole = combine(data.clients(np.arange(3)), dual, 8)
        for k in range(3):
            alone = combine(data.clients(np.array([k])), dual[k : k + 1], 8)
            assert torch.equal(alone[0], whole[k])
        x = data.features.toarray() if sparse else data.features.numpy()
        rows = np.c_[x.astype(float), np.ones(27)].reshape(3, 9, 8)
        np.testing.assert_allclose(whole, np.einsum("cno,cnd->cod", dual, rows), atol=1e-12)


def test_without_rounds_a_noise_multiplier_gets_few():
    data = toy(clients=6)
    assert rounds_by_rule(MTLSVM(), Privacy(noise_multiplier=10.0), data.spec) == 5


def test_new_clients_fit_their_own_part():
    data = toy(clients=12, rows=20)
    owner = np.repeat(np.arange(12), data.counts)
    method = MTLSVM(stop=1e-6, epochs=50)
    old = data.only(np.arange(9))
    outcome = run(method, old, rounds=500)
    new = data.only(np.arange(9, 12))
    models = outcome.onboard(new)
    w = joined(outcome.shared).numpy().reshape(-1)
    for place, k in enumerate(range(9, 12)):
        x = np.c_[data.features.double().numpy()[owner == k], np.ones((owner == k).sum())]
        y = 2 * data.targets.double().numpy()[owner == k] - 1
        v = cp.Variable(4)
        loss = cp.sum(cp.pos(1 - cp.multiply(y, x @ (w + v))))
        cp.Problem(cp.Minimize(method.c2 / 2 * cp.sum_squares(v) + loss)).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(joined(models)[place, 0].numpy(), w + v.value, atol=2e-3)
    with pytest.raises(ValueError, match="expected the training spec"):
        outcome.onboard(toy(features=4))
    with pytest.raises(ValueError, match="training clients only"):
        run(MOCHA(), old, rounds=2).onboard(new)


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_mocha_with_mean_regularisation_has_the_same_optimum(task):
    data = toy(task, **SMALL)
    ours = run(MTLSVM(model=PLAIN, c1=0.7, c2=2.0, stop=1e-8, epochs=50), data, rounds=3000)
    theirs = run(MOCHA(model=PLAIN, c1=0.7, c2=2.0, stop=1e-8, epochs=20), data, rounds=5000)
    assert theirs.gap <= 1e-8
    np.testing.assert_allclose(weights(theirs), weights(ours), atol=1e-3)


def test_mocha_learns_who_is_alike():
    """Two groups of opposite clients: the learned relation separates them, the mean cannot."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 30, 5))
    truth = np.where(np.arange(20) % 2, 1.0, -1.0)[:, None] * np.array([1.0, -1, 0.5, 0, 2])
    y = np.einsum("knd,kd->kn", x, truth) + 0.5 * rng.standard_normal((20, 30)) > 0
    data = FederatedDataset(
        Spec((5,), 1, "binary", 20), [f"c{i}" for i in range(20)],
        np.arange(21, dtype=np.int64) * 30, torch.from_numpy(x.reshape(-1, 5)).float(),
        torch.from_numpy(y.reshape(-1)).float(),
    )  # fmt: skip
    outcome = run(MOCHA(model=PLAIN, relation="learned", epochs=5), data, rounds=40)
    matrix = outcome.shared["matrix"].numpy()
    same = np.equal.outer(np.arange(20) % 2, np.arange(20) % 2)
    assert (np.sign(matrix) == np.where(same, 1, -1)).mean() > 0.9
    assert matrix[same].mean() > 0.1 and matrix[~same].mean() < -0.1


@pytest.mark.parametrize("settings,told", [
    ({"c1": 0.0}, "c1 = 0.0: expected a finite number > 0"),
    ({"c1": -1.0}, "c1 = -1.0"),
    ({"c2": 0.0}, "c2 = 0.0"),
    ({"c2": math.inf}, "c2 = inf"),
    ({"stop": 0.0}, "stop = 0.0"),
    ({"epochs": 0}, "epochs = 0"),
    ({"together": 0}, "together = 0"),
    ({"gamma": 0.0}, "gamma = 0.0"),
    ({"gamma": 2.0}, "gamma = 2.0"),
    ({"gamma": "adding"}, "gamma = 'adding'"),
    ({"tube": -0.1}, "tube: given -0.1"),
    ({"mask_keep": 1.5}, "mask_keep = 1.5"),
    ({"mask_keep": 0.0}, "no step would ever be taken"),
    ({"mask": "Step"}, "mask = 'Step': expected one of none, step, paper"),
    ({"mask_law": "bernouli"}, "mask_law = 'bernouli'"),
    ({"epochs": 1.5}, "epochs = 1.5"),
    ({"gamma": True}, "gamma = True"),
    ({"c1": True}, "c1 = True"),
    ({"c1": "1"}, "c1 = 1: expected"),
    ({"mask_untouched": -0.5}, "mask_untouched = -0.5"),
    ({"mask_beta": (2.0, 0.0)}, "mask_beta"),
    ({"class_weight": (1.0, -1.0)}, "class_weight"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        MTLSVM(**settings)


@pytest.mark.parametrize("method", [MTLSVM(), LocalSVM(), MOCHA(), GlobalSVM()])
def test_bad_rows_are_refused(method):
    data = toy()
    broken = data.features.clone()
    broken[3, 1] = math.nan
    with pytest.raises(DataError, match=r"row 3 .*infinite or not a number"):
        run(method, replace(data, features=broken), rounds=1)
    three = data.targets.clone()
    three[5] = 2.0
    with pytest.raises(DataError, match=r"expected 0 or 1|0 and 1"):
        run(method, replace(data, targets=three), rounds=1)
    with pytest.raises(ValueError, match="linear models, not MLP; use pmtl"):
        replace(method, model=MLP()).check(data.spec)


def test_zero_rows_are_left_out_and_one_class_is_allowed_and_both_are_said():
    data = toy(clients=3, rows=7)
    features, targets = data.features.clone(), data.targets.clone()
    features[2] = 0
    features[10] = 0
    targets[data.offsets[2] :] = 1
    targets[: data.offsets[2]] = torch.arange(14) % 2
    odd = replace(data, features=features, targets=targets)
    method = MTLSVM(model=PLAIN, stop=1e-8, epochs=50)
    told = method.notes(data=odd).data
    assert "2 rows are all zeros" in told[0]
    assert told[1] == "1 client has rows of one class only"  # no client is named
    assert MTLSVM().notes(data=odd).data[0] == told[1], "with a bias a zero row has a step"
    outcome = run(method, odd, rounds=2000)
    assert outcome.gap <= 1e-8 and np.isfinite(weights(outcome)).all()
    keep = np.ones(21, dtype=bool)
    keep[[2, 10]] = False
    without = run(method, odd.where(keep), rounds=2000)
    np.testing.assert_allclose(weights(outcome), weights(without), atol=1e-3)


def test_class_weights_are_those_of_scikit_learn():
    """One client: balanced by its own counts, or given; a bias is a feature that is 1."""
    data = toy(clients=1, rows=60, spread=0.2)
    data = replace(data, targets=(data.features[:, 0] > 0.8).float())
    x, y, _ = pieces(data)
    for given, theirs in (("balanced", "balanced"), ((1.0, 4.0), {0: 1.0, 1: 4.0})):
        method = LocalSVM(c=0.5, class_weight=given, tol=1e-9)
        oracle = LinearSVC(
            C=0.5, loss="hinge", class_weight=theirs, tol=1e-10, max_iter=10**6,
            intercept_scaling=1.0,
        ).fit(x, y)  # fmt: skip
        ours = run(method, data, rounds=1).model(0)
        np.testing.assert_allclose(ours["weight"][0].numpy(), oracle.coef_[0], atol=2e-3)
        np.testing.assert_allclose(ours["bias"].numpy(), oracle.intercept_, atol=2e-3)
    with pytest.raises(ValueError, match="which has no classes"):
        MTLSVM(class_weight="balanced").check(toy("regression").spec)
    with pytest.raises(ValueError, match="3 numbers, expected 2"):
        MTLSVM(class_weight=(1.0, 2.0, 3.0)).check(data.spec)


def test_balanced_weights_are_each_client_s_own_business():
    data, method = toy(clients=5, rows=10), MTLSVM(class_weight="balanced", epochs=3)
    targets = data.targets.clone()
    targets[: data.offsets[1]] = 1.0
    shared = method.init(data.spec, None)
    found = []
    for labels in (data.targets, targets):
        clients = replace(data, targets=labels).clients(np.arange(5, dtype=np.int64))
        personal = method.init_client_state(shared, data.spec, 5)
        found.append(method.local_update(shared, personal, clients, Rng.seeded(0), 0)[1])
    assert torch.equal(found[0]["weight"][1:], found[1]["weight"][1:])
    assert not torch.equal(found[0]["weight"][0], found[1]["weight"][0])


def test_several_classes_are_one_against_the_rest():
    data = toy("multiclass", clients=3, rows=40)
    outcome = run(LocalSVM(model=PLAIN, c=0.3, tol=1e-9), data, rounds=1)
    x, y, owner = pieces(data)
    for k in range(3):
        for output in range(data.spec.outputs):
            mine = y[owner == k] == output
            if mine.all() or not mine.any():
                continue
            oracle = LinearSVC(
                C=0.3, loss="hinge", fit_intercept=False, tol=1e-10, max_iter=10**6
            ).fit(x[owner == k], mine)
            found = outcome.model(k)["weight"][output].numpy()
            np.testing.assert_allclose(found, oracle.coef_[0], atol=2e-3)


def test_a_mask_says_that_it_is_no_privacy():
    assert MTLSVM().notes(private=False).caveats == ()
    assert "NOT differential privacy" in MTLSVM(mask="step").notes(private=False).caveats[0]
    assert "NOT differential privacy" in MTLSVM(mask="paper").notes(private=False).caveats[0]
    assert "comes from the noise" in MTLSVM(mask="step").notes(private=True).caveats[0]


# --- as published


def alike(clients: int) -> FederatedDataset:
    """Clients with one row each, all the same; the last one stands apart, with the other class."""
    rows = np.array([[1.0, 0.0]] * clients + [[0.0, 1.0]])
    return from_arrays(rows, [1] * clients + [0], [f"c{k}" for k in range(clients + 1)])


@pytest.mark.parametrize("c2", [0.5, 2.0, 10.0])
def test_published_regression_ends_at_the_fixed_point_of_step_27(c2: float) -> None:
    """(1/C2 - 1) b = y -+ tube and w + v = (1 + 1/C2) b, not b (1 + 1/C2) = y -+ tube."""
    data = from_arrays(np.eye(2), [1.0, -3.0], ["a", "b"], task="regression")
    outcome = simulate(MTLSVM.published(c2=c2, rounds=20, update="add"), data)
    dual = np.array([1.0 - 0.1, -3.0 + 0.1]) / (1 / c2 - 1)
    np.testing.assert_allclose(outcome.shared["weight"][0], dual, rtol=1e-9)
    np.testing.assert_allclose(outcome.model(0)["weight"][0, 0], dual[0] * (1 + 1 / c2), rtol=1e-6)
    with pytest.raises(ValueError, match="divides by"):
        simulate(MTLSVM.published(c2=1.0), data)


def test_published_steps_without_a_box_leave_the_optimum() -> None:
    """One client, so that no sum overshoots, and rows that no line separates (C1 = 1, C2 = 2)."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((15, 3))
    labels = (rng.random(15) < 0.5).astype(float)
    w, v, signs = cp.Variable(3), cp.Variable(3), 2 * labels - 1
    hinge = cp.sum(cp.pos(1 - cp.multiply(signs, rows @ (w + v))))
    best = cp.Problem(cp.Minimize(cp.sum_squares(w) / 2 + cp.sum_squares(v) + hinge)).solve(
        solver="CLARABEL"
    )
    assert best == pytest.approx(13.512, abs=1e-3)
    data, found = from_arrays(rows, labels, ["a"] * 15, task="binary"), []
    for rounds, seed in ((10, 0), (100, 0), (100, 1), (1000, 0)):
        plan = MTLSVM.published(rounds=rounds, update="add", c2=2.0)
        outcome = simulate(replace(plan, simulation_seed=seed), data)
        shared = outcome.shared["weight"][0].numpy()
        own = outcome.model(0)["weight"][0].double().numpy() - shared
        losses = np.maximum(0, 1 - signs * (rows @ (shared + own)))
        found.append(shared @ shared / 2 + own @ own + losses.sum())
    assert min(found) > 1.3 * best, "it wanders, and does not come nearer"


@pytest.mark.parametrize("clients", [3, 20])
def test_published_sums_multiply_the_error_by_one_minus_the_clients(clients: int) -> None:
    seen: list[float] = []

    def watch(progress: Progress) -> None:
        seen.append(float(progress.shared["weight"][0, 0]))

    plan = MTLSVM.published(rounds=8, update="add")
    outcome = simulate(plan, alike(clients), observe=watch)
    step, w, v = 1 / 1.1, 0.0, 0.0
    for found in seen:
        change = (1 - w - v) * step  # of each client; the box is missing
        w, v = w + clients * change, v + change / 10
        assert found == pytest.approx(w, rel=1e-6)
    if clients == 20:
        assert "diverged" in plan.method.rounds(outcome.spec).diverged(outcome.shared)
        assert len(outcome.posts) == len(seen) < 9


def test_line_15_as_published_replaces_the_shared_weights() -> None:
    plans = [MTLSVM.published(rounds=2, update=update) for update in ("add", "replace")]
    first, second = (simulate(plan, alike(3)).shared["weight"][0, 0] for plan in plans)
    w = 3 / 1.1
    change = (1 - w - (1 / 1.1) / 10) / 1.1
    assert float(first) == pytest.approx(w + 3 * change, rel=1e-6)
    assert float(second) == pytest.approx(3 * change, rel=1e-6)


def test_a_run_as_published_says_that_it_diverged_and_ends(tmp_path: Path) -> None:
    data = alike(20)
    x = data.features.numpy()
    np.savez(tmp_path / "rows.npz", X=np.repeat(x, 4, 0), y=np.repeat(data.targets.numpy(), 4),
             client=np.repeat(np.arange(21), 4))  # fmt: skip
    source = {"name": str(tmp_path / "rows.npz"), "source": {"task": "binary"}}
    table = MTLSVM.published().to_table() | {"data": source}
    summary = execute(Plan.from_table(table), folder=tmp_path / "run").summary
    (note,) = (note for note in summary["notices"] if "diverged" in note)
    assert "of 100 rounds" in note and summary["rounds"] < 100 and summary["epsilon"] == "inf"


def test_published_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match='update = "replace" is for'):
        MTLSVM(update="replace")
    with pytest.raises(ValueError, match='mask = "step" is for safe steps'):
        MTLSVM(steps="published", mask="step")
    with pytest.raises(ValueError, match="steps = 'fast'"):
        MTLSVM(steps="fast")  # type: ignore[arg-type]
