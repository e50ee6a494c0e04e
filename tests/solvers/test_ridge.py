"""Ridge against scikit-learn and plain normal equations, one client at a time."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Ridge
from tests.solvers.rows import everyone, federate, own_rows, spoil

from coterie.solvers import ridge
from coterie.solvers.ridge import solve_ridge

COUNTS = (7, 1, 0, 25, 3, 0)
LAM = 0.3


def dataset(counts=COUNTS, features=5, is_sparse=False, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(sum(counts), features)).astype(np.float32)
    if is_sparse:
        x = sparse.csr_matrix(x * (generator.random(x.shape) < 0.4))
    y = torch.from_numpy(generator.normal(size=sum(counts)).astype(np.float32)) * 3 + 1
    return federate("regression", counts, x, y)


def anchor_of(kind, clients, features=5):
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(1)
    lead = () if kind == "shared" else (clients,)
    return {
        "weight": torch.randn(*lead, 1, features, generator=generator),
        "bias": torch.randn(*lead, 1, generator=generator),
    }


def own_anchor(anchor, client, size, bias):
    if anchor is None:
        return np.zeros(size + bias)
    stacked = anchor["weight"].dim() == 3
    leaves = [anchor[name][client] if stacked else anchor[name] for name in ("weight", "bias")]
    return np.concatenate([leaf.numpy().ravel() for leaf in leaves[: 1 + bias]]).astype(np.float64)


def without_bias(anchor, bias):
    return anchor if anchor is None or bias else {"weight": anchor["weight"]}


def joined(tree, bias):
    weight = tree["weight"][:, 0]
    return (torch.cat([weight, tree["bias"]], dim=1) if bias else weight).numpy()


@pytest.mark.parametrize("features", [5, 12, 40])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["none", "shared", "stacked"])
def test_matches_scikit_learn_and_numpy(features, is_sparse, bias, kind):
    data = dataset(features=features, is_sparse=is_sparse)
    anchor = anchor_of(kind, len(data), features)
    tree = solve_ridge(everyone(data), anchor=without_bias(anchor, bias), lam=LAM, bias=bias)
    assert tree["weight"].shape == (len(data), 1, features)
    assert tree["weight"].dtype == torch.float32
    assert set(tree) == ({"weight", "bias"} if bias else {"weight"})
    solved = joined(tree, bias)
    for client in range(len(data)):
        x, y = own_rows(data, client)
        start = own_anchor(anchor, client, features, bias)
        if len(y) == 0:
            np.testing.assert_array_equal(solved[client], start.astype(np.float32))
            continue
        x = np.hstack([x, np.ones((len(y), 1))]) if bias else x
        # The mean loss against a sum: alpha = lam * n.
        fit = Ridge(alpha=LAM * len(y), fit_intercept=False).fit(x, y - x @ start)
        np.testing.assert_allclose(solved[client], start + fit.coef_, rtol=1e-5, atol=1e-6)
        normal = x.T @ x / len(y) + LAM * np.eye(x.shape[1])
        direct = np.linalg.solve(normal, x.T @ y / len(y) + LAM * start)
        np.testing.assert_allclose(solved[client], direct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("features", "poison"), [(5, np.nan), (40, np.inf)])
def test_a_non_finite_client_spoils_itself_only(is_sparse, features, poison):
    data = dataset(features=features, is_sparse=is_sparse)
    before = solve_ridge(everyone(data), anchor=None, lam=LAM, bias=True)
    spoil(data, 3, poison)
    after = solve_ridge(everyone(data), anchor=None, lam=LAM, bias=True)
    for name, leaf in after.items():
        assert leaf[3].isnan().all()
        others = torch.arange(len(data)) != 3
        torch.testing.assert_close(leaf[others], before[name][others], rtol=0, atol=0)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_inputs_stay_and_blocks_agree(monkeypatch, is_sparse):
    data = dataset(is_sparse=is_sparse)
    anchor = anchor_of("stacked", len(data))
    copies = {name: leaf.clone() for name, leaf in anchor.items()}
    values = data.features.data.copy() if is_sparse else data.features.numpy().copy()
    targets = data.targets.clone()
    together = joined(solve_ridge(everyone(data), anchor=anchor, lam=LAM, bias=True), True)
    now = data.features.data if is_sparse else data.features.numpy()
    np.testing.assert_array_equal(now, values)
    assert torch.equal(targets, data.targets)
    assert all(torch.equal(anchor[name], copies[name]) for name in anchor)
    monkeypatch.setattr(ridge, "_BLOCK", 1)
    apart = joined(solve_ridge(everyone(data), anchor=anchor, lam=LAM, bias=True), True)
    np.testing.assert_allclose(together, apart, rtol=1e-6)
    for client in range(len(data)):
        one = {name: leaf[client : client + 1] for name, leaf in anchor.items()}
        alone = solve_ridge(data.clients(np.array([client])), anchor=one, lam=LAM, bias=True)
        np.testing.assert_allclose(joined(alone, True)[0], together[client], rtol=1e-6)


def test_lam_lost_in_rounding_is_still_solved():
    # Two equal columns: the minimiser is on the diagonal for any lam; Cholesky may break down.
    data = dataset(counts=(30,), features=2)
    data.features[:, 1] = data.features[:, 0]
    tree = solve_ridge(everyone(data), anchor=None, lam=1e-18, bias=False)
    x, y = own_rows(data, 0)
    slope = x[:, 0] @ y / (x[:, 0] @ x[:, 0])
    np.testing.assert_allclose(tree["weight"][0, 0].sum(), slope, rtol=1e-5)


def test_rows_of_any_shape_and_no_clients():
    data = dataset(features=6)
    shaped = federate("regression", COUNTS, data.features.reshape(-1, 2, 3), data.targets)
    flat = solve_ridge(everyone(data), anchor=None, lam=LAM, bias=True)
    assert torch.equal(
        flat["weight"], solve_ridge(everyone(shaped), anchor=None, lam=LAM, bias=True)["weight"]
    )
    nobody = solve_ridge(data.clients(np.arange(0)), anchor=None, lam=LAM, bias=True)
    assert nobody["weight"].shape == (0, 1, 6)
    assert nobody["bias"].shape == (0, 1)


@pytest.mark.parametrize("lam", [0.0, -1.0, float("nan"), float("inf")])
def test_lam_must_be_positive(lam):
    with pytest.raises(ValueError, match="lam: given"):
        solve_ridge(everyone(dataset()), anchor=None, lam=lam, bias=True)


def test_an_anchor_that_does_not_fit_is_refused():
    clients = everyone(dataset())
    with pytest.raises(ValueError, match="anchor: given leaves"):
        solve_ridge(clients, anchor=anchor_of("stacked", 2), lam=LAM, bias=True)
    with pytest.raises(ValueError, match="anchor: given leaves"):
        solve_ridge(clients, anchor={"weight": torch.zeros(1, 5)}, lam=LAM, bias=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("features", [5, 40])
def test_a_gpu_agrees_with_the_cpu(features):
    data = dataset(features=features)
    data.features[data.offsets[3], 0] = torch.nan
    anchor = anchor_of("stacked", len(data), features)
    here = joined(solve_ridge(everyone(data), anchor=anchor, lam=LAM, bias=True), True)
    moved = solve_ridge(everyone(data.to("cuda")), anchor=anchor, lam=LAM, bias=True)
    assert moved["weight"].is_cuda
    there = joined({name: leaf.cpu() for name, leaf in moved.items()}, True)
    np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


def test_how_a_client_is_solved_does_not_depend_on_its_neighbours_rows():
    """With a long neighbour in the stack, short clients must not be solved in another form.

    The primal and the dual form differ in the last bits where rows are far from the origin, so a
    neighbour's number of rows would show in this client's model.
    """

    def solve(first):
        counts = np.array([first] + [8] * 29)
        generator = np.random.default_rng(0)
        rest = 1e5 + 1e4 * generator.standard_normal((29 * 8, 12))
        x = np.concatenate([np.full((first, 12), 1e5), rest]).astype(np.float32)
        y = np.cos(np.arange(len(x)) - first).astype(np.float32)
        data = federate("regression", counts, x, y)
        return solve_ridge(everyone(data), anchor=None, lam=0.1, bias=True)

    short, long = solve(8), solve(40)
    for name in short:
        assert torch.equal(short[name][1:], long[name][1:])


@pytest.mark.parametrize(("rows", "features"), [(7, 4), (9, 4), (16, 12), (5, 20), (21, 20)])
def test_the_position_of_a_client_does_not_change_a_bit(rows, features):
    """In float64, before rounding to float32 hides it."""
    data = dataset(counts=(rows,) * 40, features=features)
    start, lam = torch.ones(1, features + 1).double(), torch.tensor([LAM]).double()
    together = ridge._shifts(everyone(data), start, lam, True)
    for ids in ([0], [1], [7, 3], [39, 20, 5], list(range(1, 40))):
        some = ridge._shifts(data.clients(np.array(ids)), start, lam, True)
        assert torch.equal(some, together[ids])
