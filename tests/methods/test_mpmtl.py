"""MP-MTL: against proximal operators, optima, learning alone, and the paper's own figures."""

import itertools
import math
from dataclasses import replace

import cvxpy
import numpy as np
import pytest
import torch

from coterie.core.rng import Rng
from coterie.data.federated import DataError
from coterie.data.load import from_arrays
from coterie.data.synthetic import figure2, mpmtl_group_sparse, mpmtl_low_rank, synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate, noise_to_signal
from coterie.methods.baselines import MTL, Single
from coterie.methods.mpmtl import MPMTL, framework
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import resolve
from coterie.privacy.calibrate import Geometric, Power, Theorem
from coterie.privacy.noise import LaplaceNoise, PublishedWishart, WishartNoise
from coterie.privacy.published import published_composition
from coterie.privacy.sampling import Poisson
from coterie.solvers.multitask import fit_multitask
from coterie.solvers.structured import OwnUnits

pytestmark = pytest.mark.full

PLAIN = Linear(bias=False)
STRUCTURES = ["low_rank", "group_sparse"]
both = pytest.mark.parametrize("structure", STRUCTURES)


def unit_clients(task="regression", clients=12, rows=8, features=5, seed=0, kind="low_rank"):
    """Rows of unit norm and no intercept: own units are then the units of the rows."""
    return synthetic(
        kind, clients=clients, rows=rows, features=features, task=task, unit_rows=True,
        intercept=False, noise=0.2, seed=seed,
    ).data  # fmt: skip


def run(method, data, epsilon=math.inf, rounds=1, seed=0, **privacy):
    chosen = Privacy(epsilon=epsilon, **privacy)
    return simulate(Plan(method=method, privacy=chosen, rounds=rounds, simulation_seed=seed), data)


def weights(outcome):
    return outcome.models.leaves["weight"][:, 0].double()


# ---- the paper's steps ---------------------------------------------------------------------------


@both
def test_one_shrinkage_is_the_proximal_operator(structure):
    data = unit_clients()
    lam = 1.7
    method = MPMTL(model=PLAIN, structure=structure, solver="steps", lam=lam, lam_scale="absolute")
    start = weights(run(Single(model=PLAIN), data)).numpy()
    W = cvxpy.Variable(start.shape)
    norm = cvxpy.normNuc(W) if structure == "low_rank" else cvxpy.sum(cvxpy.norm(W, 2, axis=0))
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(W - start) / 2 + lam * norm)).solve(
        solver="CLARABEL"
    )
    found = weights(run(method, data)).numpy()
    np.testing.assert_allclose(found, W.value, atol=2e-5)
    assert np.abs(found - start).max() > 0.1


@pytest.mark.parametrize(
    ("structure", "task", "acceleration", "mu"),
    [
        ("low_rank", "regression", "off", 0.0),
        ("group_sparse", "binary", "off", 0.0),
        ("low_rank", "binary", "on", 0.0),
        ("group_sparse", "regression", "on", 0.0),
        ("low_rank", "regression", "strong", 0.05),
        ("group_sparse", "binary", "strong", 0.05),
    ],
)
def test_steps_without_noise_reach_the_optimum(structure, task, acceleration, mu):
    data = unit_clients(task)
    lam = 0.15 if task == "regression" else 0.05
    penalty = "trace" if structure == "low_rank" else "l21"
    best = fit_multitask(
        data.clients(np.arange(12)), penalty=penalty, lam=lam, mu=mu, bias=False, tol=1e-9
    )
    method = MPMTL(
        model=PLAIN, structure=structure, solver="steps", lam=lam, lam_scale="absolute",
        acceleration=acceleration, mu=mu,
    )  # fmt: skip
    found = weights(run(method, data, rounds=400 if acceleration == "off" else 200))
    reached = objective(data, found, lam, structure, mu)
    assert best.objective <= reached * (1 + 1e-9)
    assert reached <= best.objective * (1 + 2e-4)


@both
def test_solves_without_noise_reach_the_optimum(structure):
    """Reweighted solves: the variational form of the norms."""
    data = unit_clients()
    best = fit_multitask(
        data.clients(np.arange(12)),
        penalty="trace" if structure == "low_rank" else "l21",
        lam=0.15, bias=False, tol=1e-9,
    )  # fmt: skip
    method = MPMTL(model=PLAIN, structure=structure, lam=0.15, lam_scale="absolute")
    reached = objective(data, weights(run(method, data, rounds=100)), 0.15, structure, 0.0)
    assert best.objective <= reached * (1 + 1e-9) and reached <= best.objective * 1.002


def objective(data, weight, lam, structure, mu):
    """The objective, written out once more."""
    total = mu / 2 * float(weight.square().sum())
    for k in range(len(data)):
        own = slice(data.offsets[k], data.offsets[k + 1])
        scores = data.features[own].double() @ weight[k]
        y = data.targets[own].double()
        if data.spec.task == "regression":
            total += float((scores - y).square().mean() / 2)
        else:
            total += float(torch.nn.functional.softplus(-(2 * y - 1) * scores).mean())
    if structure == "low_rank":
        return total + lam * float(torch.linalg.svdvals(weight).sum())
    return total + lam * float(weight.norm(dim=0).sum())


def test_acceleration_helps():
    train, test = mpmtl_low_rank(clients=80, test=40, seed=1).data.split_by_source()
    errors = {}
    for acceleration in ("off", "on"):
        method = MPMTL(
            model=PLAIN, solver="steps", lam=0.3, lam_scale="absolute", acceleration=acceleration
        )
        errors[acceleration] = evaluate(PLAIN, run(method, train, rounds=30).rows, test).value
    assert errors["on"] < 0.9 * errors["off"]


def test_clip_own_goes_on_with_the_clipped_model():
    data = unit_clients()
    kept, cut = (
        MPMTL(model=PLAIN, solver="steps", lam=0.01, clip_own=own) for own in (False, True)
    )
    settings = {"epsilon": 1e4, "rounds": 1, "clip": 0.25, "delta": 1e-3}
    long, short = weights(run(kept, data, **settings)), weights(run(cut, data, **settings))
    assert float(short.norm(dim=1).max()) <= 0.25
    directions = (long * short).sum(dim=1) / long.norm(dim=1) / short.norm(dim=1)
    assert float(directions.min()) > 0.999 and float(long.norm(dim=1).min()) > 0.3


# ---- towards learning alone ----------------------------------------------------------------------


@both
@pytest.mark.parametrize(("task", "mu"), [("regression", 0.0), ("binary", 0.05)])
def test_without_budget_it_is_learning_alone(structure, task, mu):
    """Proposition 1: as epsilon -> 0 nothing stands out of the noise, and no direction is shrunk.

    A public multiple of the identity, 1.2 times the noise's radius, is the level below which
    eigenvalues are made alike. Noise that stands out by chance moves a model: for the diagonal with
    probability .075 (200 seeds). More than 10 of 20 seeds then have a probability below 1e-7.
    """
    data = unit_clients(task, clients=30, features=8, rows=12)
    method = MPMTL(model=PLAIN, structure=structure, mu=mu)
    alone = weights(run(method.baselines().local, data))
    moved = []
    for seed in range(20):
        found = weights(run(method, data, epsilon=1e-6, delta=1e-6, seed=seed))
        moved.append(float((found - alone).norm() / alone.norm()))
    assert sorted(moved)[9] < 0.02, moved


def test_printed_steps_without_budget_are_gradient_steps_on_own_rows():
    """Proposition 1 as printed: 1.5 times the noise's radius, times the identity, is added."""
    data = unit_clients(clients=10, features=4, rows=6)
    method = MPMTL(
        model=PLAIN, solver="steps", lam=0.05, lam_scale="absolute", acceleration="off", lift="add"
    )
    found = weights(run(method, data, epsilon=1e-7, delta=1e-7, rounds=5)).numpy()
    expected = weights(run(Single(model=PLAIN), data)).numpy()
    for k in range(10):
        own = slice(data.offsets[k], data.offsets[k + 1])
        X, y = data.features[own].double().numpy(), data.targets[own].double().numpy()
        for _ in range(4):  # the last post has no step after it
            expected[k] -= X.T @ (X @ expected[k] - y) / len(y)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@both
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 10.0])
def test_never_much_worse_than_alone(structure, epsilon):
    kind = mpmtl_low_rank if structure == "low_rank" else mpmtl_group_sparse
    train, test = kind(clients=100, test=60, seed=3).data.split_by_source()
    method = MPMTL(model=PLAIN, structure=structure)
    alone = evaluate(PLAIN, run(method.baselines().local, train).rows, test).value
    joined = evaluate(PLAIN, run(method, train, epsilon=epsilon, rounds=2).rows, test).value
    assert joined < 1.05 * alone


# ---- the paper's simulations ---------------------------------------------------------------------


def frontier(seeds, epsilons=((1.0, 2), (10.0, 4))):
    columns = {"alone": [], "mtl": [], **{e: [] for e, _ in epsilons}}
    delta = 1 / (320 * math.log(320))
    for seed in seeds:
        train, test = mpmtl_low_rank(seed=seed).data.split_by_source()
        for name, method in (("alone", Single(model=PLAIN)), ("mtl", MTL(model=PLAIN, tol=1e-4))):
            columns[name].append(evaluate(PLAIN, run(method, train).rows, test).value)
        for epsilon, rounds in epsilons:
            outcome = run(
                MPMTL(model=PLAIN), train, epsilon=epsilon, rounds=rounds, seed=seed, delta=delta
            )
            assert outcome.guarantee.epsilon <= epsilon
            columns[epsilon].append(evaluate(PLAIN, outcome.rows, test).value)
    return {name: np.array(values) for name, values in columns.items()}


def check_frontier(found):
    """Between learning alone and non-private learning, or better; differences paired by seed."""
    for better, worse in ((1.0, "alone"), (10.0, 1.0)):
        gains = found[worse] - found[better]
        error = gains.std(ddof=1) / math.sqrt(len(gains))
        assert gains.mean() > 3 * error, (better, worse, gains.mean(), error)
    assert found["mtl"].mean() < found[1.0].mean() < found["alone"].mean()
    assert found[10.0].mean() < 1.1 * found["mtl"].mean()


def test_low_rank_simulation_lies_between():
    check_frontier(frontier(range(4)))


@pytest.mark.slow
def test_low_rank_simulation_lies_between_over_twenty_seeds():
    found = frontier(range(100, 120))
    check_frontier(found)
    print({name: (v.mean(), v.std(ddof=1) / math.sqrt(20)) for name, v in found.items()})
    assert found[1.0].mean() < 0.428 and found[10.0].mean() < 0.268  # the prototype's


def test_group_sparse_simulation_gains():
    train, test = mpmtl_group_sparse(clients=160, test=60, seed=0).data.split_by_source()
    method = MPMTL(model=PLAIN, structure="group_sparse", lam=0.001)
    alone = evaluate(PLAIN, run(method.baselines().local, train).rows, test).value
    joined = evaluate(PLAIN, run(method, train, epsilon=1.0, rounds=2).rows, test).value
    assert joined < 0.5 * alone


def leak(noisy, seed):
    """How far the nine ordinary models of Figure 2 turn towards the outlier, on average.

    Mean over them of |cos(model, outlier)| after joining, less the same before.
    """
    truth = figure2(seed).T  # one client a row
    rows = np.tile(np.eye(5), (10, 1))
    # The ridge fit that starts a client shrinks by 0.2 / (0.2 + 0.06), its curvature and penalty.
    data = from_arrays(
        rows, 1.3 * truth.reshape(-1), np.repeat(np.arange(10), 5), task="regression"
    )
    method = MPMTL(model=PLAIN, solver="steps", lam=50.0, lam_scale="absolute", lift="add")
    settings = {"epsilon": 0.1, "delta": 1e-5} if noisy else {}
    after = weights(run(method, data, seed=seed, clip=100 * math.sqrt(5), **settings)).numpy()
    outlier = truth[-1] / np.linalg.norm(truth[-1])

    def towards(models):
        sizes = np.linalg.norm(models, axis=1)
        return np.abs(models @ outlier) / np.maximum(sizes, 1e-12)

    return float((towards(after[:9]) - towards(truth[:9])).mean())


def test_figure_2_an_outlier_shows_without_noise_and_not_with_it():
    """The statistic of `leak`: without noise models turn to the outlier, with it they do not."""
    bare = [leak(False, seed) for seed in range(10)]
    private = [leak(True, seed) for seed in range(10)]
    assert min(bare) > 0.05, bare
    assert np.abs(private).max() < 0.01, private


# ---- variants ------------------------------------------------------------------------------------


def test_decomposed_models_keep_outlying_features_to_themselves():
    """Every client has one strong feature of its own, off the common subspace."""
    made = synthetic(
        "low_rank", clients=12, rows=40, features=12, rank=2, spread=1.0, noise=0.1,
        intercept=False, unit_rows=True, seed=0,
    )  # fmt: skip
    data, generator = made.data, np.random.default_rng(0)
    own = generator.integers(12, size=12)
    extra = data.features[torch.arange(len(data.targets)), own.repeat(40)]
    data = replace(data, targets=data.targets + 8 * extra)
    train, test = data.split(0.5, 0)
    plain = MPMTL(model=PLAIN, lam=0.02)
    parts = MPMTL(model=PLAIN, lam=0.02, decompose=0.02)
    errors = [evaluate(PLAIN, run(m, train).rows, test).value for m in (plain, parts)]
    assert errors[1] < 0.9 * errors[0]
    heavy = MPMTL(model=PLAIN, lam=0.02, decompose=1e6)
    same = weights(run(heavy, train)) - weights(run(plain, train))
    assert float(same.abs().max()) < 1e-2  # no own part is left


@both
@pytest.mark.parametrize("solver", ["solve", "steps"])
@pytest.mark.parametrize(("task", "bias"), [("regression", False), ("binary", True)])
def test_sparse_rows_are_rows(structure, solver, task, bias):
    data = synthetic(
        "mean", clients=10, rows=(4, 30), features=12, task=task, sparse=True, density=0.3, seed=0
    ).data
    dense = replace(data, features=torch.from_numpy(data.features.toarray()))
    method = MPMTL(model=Linear(bias=bias), structure=structure, solver=solver)
    left, right = (run(method, rows, epsilon=2.0, rounds=3).models.leaves for rows in (data, dense))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-4)


def test_moments_kept_with_the_data_give_the_same_steps():
    data = unit_clients(clients=6, rows=50, features=5)
    block = data.clients(np.arange(6))
    units = OwnUnits.of(block, bias=True)
    points = torch.randn(6, 6, dtype=torch.float64)
    kept = units.gradients(points)
    assert any("moments" in name for name in block.memory)
    few = replace(block, spec=replace(block.spec, clients=1 << 40), memory={})  # too many to keep
    torch.testing.assert_close(OwnUnits.of(few, bias=True).gradients(points), kept)
    assert not any("moments" in name for name in few.memory)


@pytest.mark.parametrize("features", [13, 30])
@pytest.mark.parametrize("solver", ["solve", "steps"])
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_how_many_rows_a_client_has_is_nobody_elses_business(features, solver, task):
    """With a real moment, wide enough for blocked products, and a client that crosses n = d."""
    data = synthetic("mean", clients=40, rows=60, features=features, task=task, seed=0).data
    owner = np.repeat(np.arange(40), 60)
    less = data.where((owner != 7) | (np.arange(len(owner)) % 60 < features - 2))
    method = MPMTL(solver=solver)
    outcome = run(method, data, epsilon=3.0, rounds=2)
    found = []
    for rows in (data, less):
        clients = rows.clients(np.arange(40))
        personal = method.init_client_state(outcome.shared, data.spec, 40)
        personal, _ = method.local_update(outcome.shared, personal, clients, Rng.seeded(0), 1)
        after, sent = method.local_update(outcome.shared, personal, clients, Rng.seeded(0), 2)
        final = method.personalise(outcome.shared, after, clients, Rng.seeded(0))
        found.append({**after, **sent, **final})
    rest = torch.arange(40) != 7
    for name, leaf in found[0].items():
        assert torch.equal(leaf[rest], found[1][name][rest]), name


def test_rows_changed_in_place_are_seen():
    data = synthetic("mean", clients=20, rows=30, features=5, intercept=False, seed=0).data
    before = weights(run(MPMTL(model=PLAIN), data))
    data.targets[:30].mul_(-1)
    after = weights(run(MPMTL(model=PLAIN), data))
    assert float((before[0] + after[0]).norm()) < 0.5 * float(before[0].norm())


@both
def test_noise_below_zero_is_no_structure(structure):
    data = unit_clients(clients=5, features=2)
    method = MPMTL(model=PLAIN, structure=structure, lift_by=0.0)
    for seed in range(20):
        found = weights(run(method, data, epsilon=1e-3, delta=1e-6, seed=seed))
        assert bool(found.isfinite().all())


def test_a_cohort_stands_for_everybody():
    data = unit_clients(clients=200, rows=12)
    method = MPMTL(model=PLAIN, lam=0.1, lam_scale="absolute")
    whole = weights(run(method, data, rounds=4))
    plan = Plan(
        method=method, privacy=Privacy(epsilon=math.inf), sampler=Poisson(100), rounds=4,
        simulation_seed=0,
    )  # fmt: skip
    part = weights(simulate(plan, data))
    assert float((whole - part).norm() / whole.norm()) < 0.1


def test_one_row_is_enough():
    data = synthetic("mean", clients=20, rows=(1, 4), features=6, seed=0).data
    for solver in ("solve", "steps"):
        found = run(MPMTL(solver=solver), data, epsilon=1.0, rounds=2).models.leaves
        assert all(bool(leaf.isfinite().all()) for leaf in found.values())


def test_noise_to_signal_grows_with_less_budget():
    data = unit_clients(clients=50, rows=12)
    ratios = {
        epsilon: noise_to_signal(run(MPMTL(model=PLAIN), data, epsilon=epsilon, rounds=3))
        for epsilon in (0.5, 5.0)
    }
    assert all(a > 3 * b for a, b in zip(ratios[0.5], ratios[5.0], strict=True))
    exact = noise_to_signal(run(MPMTL(model=PLAIN), data, rounds=2))
    assert exact == [0.0, 0.0]


@pytest.mark.parametrize(
    "structure,noise,delta",
    [
        ("low_rank", WishartNoise(degrees=50), 1e-4),
        ("low_rank", PublishedWishart(), 1e-4),
        ("group_sparse", LaplaceNoise(), 0.0),
    ],
)
def test_other_kinds_of_noise(structure, noise, delta):
    data = unit_clients(clients=60, rows=12)
    method = MPMTL(model=PLAIN, structure=structure)
    outcome = run(method, data, epsilon=2.0, rounds=2, noise=noise, delta=delta)
    printed = isinstance(noise, PublishedWishart)
    assert outcome.guarantee.epsilon == (math.inf if printed else pytest.approx(2.0, rel=1e-2))
    assert ("NOT A GUARANTEE" in outcome.guarantee.statement()) == printed
    assert bool(weights(outcome).isfinite().all())


@pytest.mark.parametrize("spend", [Power(0.4), Geometric(0.8)])
def test_budget_shapes_spend_the_budget_and_noise_falls(spend):
    data = unit_clients(clients=40)
    outcome = run(MPMTL(model=PLAIN), data, epsilon=1.0, rounds=6, spend=spend)
    noise = outcome.plan.noise_multipliers(40)
    assert all(later < earlier for earlier, later in itertools.pairwise(noise))
    assert 0.999 <= outcome.guarantee.epsilon <= 1.0


def test_the_framework_takes_any_two_functions():
    """Project on the strongest direction posted: clients along one line get it back."""
    generator = np.random.default_rng(0)
    line = generator.standard_normal(6)
    line /= np.linalg.norm(line)
    rows = generator.standard_normal((300 * 5, 6))
    along = np.repeat(generator.standard_normal(300), 5)
    data = from_arrays(
        rows, along * (rows @ line) + 0.1 * generator.standard_normal(1500),
        np.repeat(np.arange(300), 5), task="regression",
    )  # fmt: skip

    def share(before, moment, radius):
        return {"direction": torch.linalg.eigh(moment)[1][:, -1:]}

    def solve(known, clients):
        x, y = clients.x.double(), clients.y.double()
        basis = known.get("direction", torch.eye(6).double())
        z = x @ basis
        gram = z.mT @ z + 0.1 * torch.eye(basis.shape[1]).double()
        return torch.linalg.solve(gram, (z.mT @ y[..., None]))[..., 0] @ basis.mT

    outcome = run(framework("line", share, solve), data, epsilon=4.0, rounds=1)
    found = weights(outcome).numpy()
    truth = np.outer(along[::5], line)
    alone = solve({}, data.clients(np.arange(300))).numpy()
    assert np.square(found - truth).sum() < 0.3 * np.square(alone - truth).sum()
    assert outcome.guarantee.epsilon == pytest.approx(4.0, rel=1e-3)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"lam": 0.0}, "lam = 0.0: expected a finite number > 0"),
        ({"lam": -1.0}, "lam = -1.0"),
        ({"lam": math.nan}, "lam = nan"),
        ({"lam_scale": "absolute"}, "needs a lam"),
        ({"mu": -1.0}, "mu = -1.0"),
        ({"acceleration": "strong"}, "needs mu > 0"),
        ({"decompose": 0.0}, "decompose = 0.0"),
        ({"clip_own": True}, "clip_own belongs to"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        MPMTL(**settings)


@pytest.mark.parametrize(
    "privacy,words",
    [
        ({"epsilon": 1.0, "clip": 0.0}, "clip = 0"),
        ({"epsilon": 1.0, "clip": -1.0}, "clip = -1"),
        ({"epsilon": 0.0}, "epsilon = 0"),
        ({"epsilon": -1.0}, "epsilon = -1"),
    ],
)
def test_bad_budgets_are_refused(privacy, words):
    with pytest.raises(ValueError, match=words):
        Privacy(**privacy)


def test_a_budget_shape_that_gives_a_round_nothing_is_refused():
    with pytest.raises(ValueError, match="its release is only noise"):
        Plan(method=MPMTL(), privacy=Privacy(epsilon=1.0, spend=Power(-40.0)), rounds=10)


def test_wide_rows_are_refused_for_the_matrix_and_taken_for_its_diagonal():
    wide = synthetic(
        "mean", clients=8, rows=5, features=4097, sparse=True, density=0.002, seed=0
    ).data
    with pytest.raises(ValueError, match="group_sparse"):
        run(MPMTL(), wide, epsilon=1.0)
    outcome = run(MPMTL(structure="group_sparse"), wide, epsilon=1.0)
    assert outcome.models.leaves["weight"].shape == (8, 1, 4097)


def test_rows_that_teach_nothing_are_refused():
    data = unit_clients()
    with pytest.raises(DataError, match="every target is 1"):
        run(MPMTL(), replace(data, targets=torch.ones_like(data.targets)), epsilon=1.0)
    binary = unit_clients("binary")
    with pytest.raises(DataError, match="class"):
        run(MPMTL(), replace(binary, targets=torch.ones_like(binary.targets)), epsilon=1.0)
    empty = data.where(np.repeat(np.arange(12), data.counts) != 3)
    with pytest.raises(DataError, match="client 3"):
        run(MPMTL(), empty, epsilon=1.0)


def test_models_in_two_parts_are_solved_to_the_end():
    """Before the first post the problem is client by client: cvxpy solves it too."""
    data = unit_clients(clients=4, rows=12, features=6)
    method = MPMTL(model=PLAIN, lam=0.05, decompose=0.03)
    clients = data.clients(np.arange(4))
    shared = method.init(data.spec, Rng.seeded(0))
    personal = method.init_client_state(shared, data.spec, 4)
    after, sent = method.local_update(shared, personal, clients, Rng.seeded(0), 0)
    assert torch.equal(sent["moment"], after["model"][:, :-1]), "only the shared part is posted"
    for k in range(4):
        own = slice(data.offsets[k], data.offsets[k + 1])
        X, y = data.features[own].double().numpy(), data.targets[own].double().numpy()
        p, q = cvxpy.Variable(6), cvxpy.Variable(6)
        loss = cvxpy.sum_squares(X @ (p + q) - y) / (2 * len(y))
        problem = cvxpy.Problem(
            cvxpy.Minimize(loss + 0.025 * cvxpy.sum_squares(p) + 0.03 * cvxpy.norm1(q))
        )
        problem.solve(solver="CLARABEL")
        mine, part = after["model"][k, :-1].numpy(), after["own"][k].numpy()
        reached = np.square(X @ (mine + part) - y).sum() / (2 * len(y))
        reached += 0.025 * np.square(mine).sum() + 0.03 * np.abs(part).sum()
        assert reached <= problem.value * (1 + 1e-5) + 1e-9


def test_a_large_constant_column_does_no_harm():
    data = synthetic("mean", clients=20, rows=30, features=4, noise=0.1, seed=0).data
    wide = torch.cat([data.features, torch.full((len(data.features), 1), 5e5)], dim=1)
    more = replace(data, features=wide, spec=replace(data.spec, shape=(5,)))
    errors = []
    for rows in (data, more):
        train, test = rows.split(0.3, 0)
        method = MPMTL(lam=0.05)
        errors.append(evaluate(method.model, run(method, train, rounds=2).rows, test).value)
    assert errors[1] < errors[0] + 0.02


# --- as published


@pytest.mark.parametrize("algorithm", [1, 2, 3])
def test_published_algorithms_run_and_state_what_is_true(algorithm):
    data = unit_clients(clients=60, rows=12)
    plan = MPMTL.published(algorithm, epsilon=2.0, delta=1e-4, clip=1.0, rounds=2, lam=0.1)
    outcome = simulate(replace(resolve(plan, data.spec), simulation_seed=0), data)
    assert "NOT A GUARANTEE" in outcome.guarantee.statement()
    assert outcome.guarantee.claimed_epsilon == pytest.approx(2.0)
    assert bool(weights(outcome).isfinite().all())
    features = data.spec.features
    assert all(post.value["moment"].shape == (features, features) for post in outcome.posts)


@pytest.mark.parametrize(("acceleration", "mu"), [("off", 0.0), ("on", 1e-3), ("strong", 1e-3)])
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_published_plans_run_with_any_steps(task, acceleration, mu):
    """The shape of the budget is there without `resolve`, and is that of Theorem 6 for the task."""
    data = unit_clients(task, clients=20)
    plan = MPMTL.published(
        2, epsilon=2.0, delta=1e-4, clip=4.0, rounds=3, lam=0.1, task=task, mu=mu,
        acceleration=acceleration,
    )  # fmt: skip
    assert bool(weights(simulate(replace(plan, simulation_seed=0), data)).isfinite().all())
    theorem = replace(plan, privacy=replace(plan.privacy, spend=Theorem()))
    assert resolve(theorem, data.spec).privacy.spend == plan.privacy.spend


# --- Algorithm 1 with W^T W: a curator's simulation


def tasks(data, epsilon, *, rounds=1, lam=0.1, clip=100.0, **settings):
    plan = MPMTL.published(
        1, matrix="tasks", epsilon=epsilon, delta=1e-3, clip=clip, rounds=rounds, lam=lam,
        **settings,
    )  # fmt: skip
    return simulate(plan, data)


def test_the_task_matrix_without_noise_is_the_proximal_operator():
    data, lam = unit_clients(), 1.7
    start = weights(run(Single(model=PLAIN), data)).numpy()
    W = cvxpy.Variable(start.shape)
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(W - start) / 2 + lam * cvxpy.normNuc(W))).solve(
        solver="CLARABEL"
    )
    found = weights(tasks(data, 1e15, lam=lam)).numpy()
    np.testing.assert_allclose(found, W.value, atol=2e-5)


@pytest.mark.parametrize(("acceleration", "mu"), [("off", 0.0), ("on", 0.0), ("strong", 0.05)])
@pytest.mark.parametrize("task", ["regression", "binary"])
def test_both_matrices_take_the_same_steps_without_noise(task, acceleration, mu):
    data = unit_clients(task)
    settings = {"acceleration": acceleration, "mu": mu}
    method = MPMTL(
        model=PLAIN, solver="steps", clip_own=True, lam=0.1, lam_scale="absolute", lift_by=0.0,
        **settings,
    )  # fmt: skip
    given = Privacy(noise_multiplier=1e-5, delta=1e-3, clip=0.3)
    plan = Plan(method=method, privacy=given, rounds=6, simulation_seed=0)
    found = weights(tasks(data, 1e15, rounds=6, clip=0.3, **settings))
    torch.testing.assert_close(found, weights(simulate(plan, data)), atol=1e-4, rtol=0)


def test_much_noise_on_the_task_matrix_leaves_the_clipped_models():
    data = unit_clients()
    start = weights(run(Single(model=PLAIN), data))
    kept = start / (start.norm(dim=1, keepdim=True) / 0.3).clamp_min(1)
    torch.testing.assert_close(weights(tasks(data, 1e-9, clip=0.3)), kept, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("sensitivity", "s"), [(None, 9.0), ("2K", 6.0)])
def test_the_task_matrix_has_the_published_noise(sensitivity, s):
    """Wishart_m(m + 1, s/(2 epsilon) I) on the products, by the same normal numbers, in numpy."""
    data, lam, epsilon = unit_clients(clients=6), 0.5, 0.7
    start = weights(run(Single(model=PLAIN), data)).numpy()
    assert np.linalg.norm(start, axis=1).max() < 3
    found = weights(tasks(data, epsilon, lam=lam, clip=3.0, sensitivity=sensitivity, seed=4))
    vectors = Rng.seeded(4).at("W^T W").numpy().standard_normal((7, 6))
    values, sides = np.linalg.eigh(start @ start.T + s / (2 * epsilon) * vectors.T @ vectors)
    shrink = np.maximum(0, 1 - lam / np.sqrt(values))
    expected = sides @ np.diag(shrink) @ sides.T @ start
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_the_task_matrix_is_not_private_and_states_it():
    data = unit_clients()
    plan = MPMTL.published(1, matrix="tasks", epsilon=2.0, delta=1e-3, clip=1.0, rounds=3, lam=0.1)
    outcome = simulate(plan, data)
    assert outcome.guarantee.epsilon == math.inf and "NOT PRIVATE" in outcome.guarantee.statement()
    (caveat,) = plan.method.notes(private=False).caveats
    assert "As published; not a guarantee" in caveat and "every model" in caveat
    assert published_composition(plan.method.budgets, 1e-3) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="not private"):
        replace(plan, privacy=Privacy(epsilon=1.0)).guarantee(12)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"algorithm": 2}, "published for algorithm 1 only"),
        ({"matrix": "W^T W"}, "expected features .W W.T. or tasks"),
        ({"rounds": 0}, "rounds = 0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"epsilon": math.inf}, "epsilon = inf"),
        ({"sensitivity": "K"}, "width = 'K'"),
        ({"clip": 0.0}, "clip = 0.0"),
    ],
)
def test_task_matrices_that_were_not_published_are_refused(given, told):
    usual = {"algorithm": 1, "matrix": "tasks", "epsilon": 1.0, "delta": 1e-3, "clip": 1.0}
    with pytest.raises(ValueError, match=told):
        MPMTL.published(**{**usual, "lam": 0.1, **given})


def test_algorithm_3_uses_the_diagonal_of_what_algorithm_2_releases():
    data = unit_clients(clients=40)
    plan = MPMTL.published(3, epsilon=5.0, delta=1e-4, clip=1.0, rounds=1, lam=0.1)
    outcome = simulate(replace(resolve(plan, data.spec), simulation_seed=0), data)
    expected = outcome.posts[0].value["moment"].diagonal()
    torch.testing.assert_close(outcome.shared["moment"], expected)
    with pytest.raises(ValueError, match="whole is for structure"):
        MPMTL(whole=True)


@pytest.mark.parametrize(
    ("acceleration", "mu", "expected"),
    [
        ("off", 0.0, ("power", 0.0)),
        ("on", 0.0, ("power", 0.4)),
        ("off", 1e-3, ("geometric", (1 - 1e-3 / 1.001) ** 0.4)),
        ("strong", 1e-3, ("geometric", (1 - math.sqrt(1e-3 / 1.001)) ** 0.2)),
    ],
)
def test_theorem_6_chooses_the_shape_of_the_budget(acceleration, mu, expected):
    data = unit_clients(clients=40)
    method = MPMTL(model=PLAIN, solver="steps", acceleration=acceleration, mu=mu)
    plan = Plan(method=method, privacy=Privacy(epsilon=1.0, spend=Theorem()), rounds=5)
    with pytest.raises(ValueError, match="resolve"):
        plan.guarantee(40)
    spend = resolve(plan, data.spec).privacy.spend
    kind, number = expected
    assert spend.kind == kind
    assert spend == (Power(number) if kind == "power" else Geometric(number))
    assert resolve(plan, data.spec).guarantee(40).epsilon <= 1.0
    with pytest.raises(ValueError, match="no theorem for mpmtl"):
        resolve(replace(plan, method=MPMTL(model=PLAIN)), data.spec)
