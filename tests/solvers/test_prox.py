"""Proximal operators against cvxpy, the SVD and their optimality conditions."""

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.solvers.prox import group_scale, shrink_groups, shrink_spectrum, spectrum_map

SHAPES = [(7, 3), (3, 7), (5, 5), (1, 4), (4, 1)]


def matrix(shape, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale)


def by_svd(weight, threshold):
    left, values, right = np.linalg.svd(weight.numpy(), full_matrices=False)
    return left @ np.diag(np.maximum(values - threshold, 0)) @ right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["trace", "l21"])
def test_is_the_argmin_that_cvxpy_finds(shape, kind):
    weight, threshold = matrix(shape), 0.8
    found = cvxpy.Variable(shape)
    norm = cvxpy.normNuc(found) if kind == "trace" else cvxpy.sum(cvxpy.norm(found, axis=0))
    squares = cvxpy.sum_squares(found - weight.numpy())
    cvxpy.Problem(cvxpy.Minimize(squares / 2 + threshold * norm)).solve(
        solver=cvxpy.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11
    )
    shrink = shrink_spectrum if kind == "trace" else shrink_groups
    np.testing.assert_allclose(shrink(weight, threshold), found.value, atol=1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (200, 30), (30, 200)])
@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.5, 3.0, 1e3])
def test_is_soft_thresholding_of_singular_values(shape, threshold):
    weight = matrix(shape, 1)
    np.testing.assert_allclose(
        shrink_spectrum(weight, threshold), by_svd(weight, threshold), atol=1e-10
    )


@pytest.mark.parametrize("shape", [(40, 6), (6, 40)])
def test_small_singular_values_are_wrong_by_no_more_than_said(shape):
    left, _, right = torch.linalg.svd(matrix(shape), full_matrices=False)
    values = torch.logspace(0, -9, 6, dtype=torch.float64)
    weight = left @ torch.diag(values) @ right
    for threshold in (1e-2, 1e-4, 1e-6, 1e-9):
        error = np.abs(shrink_spectrum(weight, threshold).numpy() - by_svd(weight, threshold)).max()
        assert error <= min(20 * 2.3e-16 / threshold, threshold) + 1e-14


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 8),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    share=st.floats(0.01, 1.5),
)
def test_optimality_conditions(rows, columns, seed, scale, share):
    """W - V = t G, G a subgradient of the norm at V: |G| <= 1 in the dual norm, <G, V> = |V|."""
    weight = matrix((rows, columns), seed, scale)
    threshold = share * scale
    slope = (weight - shrink_spectrum(weight, threshold)) / threshold
    assert torch.linalg.matrix_norm(slope, 2) <= 1 + 1e-9
    shrunk = shrink_spectrum(weight, threshold)
    whole = torch.linalg.svdvals(shrunk).sum()
    np.testing.assert_allclose((slope * shrunk).sum(), whole, rtol=1e-7, atol=1e-7 * scale)
    shrunk = shrink_groups(weight, threshold)
    slope = (weight - shrunk) / threshold
    assert slope.norm(dim=0).max() <= 1 + 1e-12
    np.testing.assert_allclose((slope * shrunk).sum(), shrunk.norm(dim=0).sum(), atol=1e-9 * scale)


def test_maps_are_what_the_operators_apply():
    weight = matrix((50, 6))
    shrunk = weight @ spectrum_map(weight.mT @ weight, 5.0)
    torch.testing.assert_close(shrunk, shrink_spectrum(weight, 5.0))
    scale = group_scale(weight.square().sum(dim=0), 5.0)
    torch.testing.assert_close(weight * scale, shrink_groups(weight, 5.0))


def test_noisy_moments():
    noise = matrix((6, 6), 3)
    gram = noise + noise.mT
    values, vectors = torch.linalg.eigh(gram)
    assert values.min() < 0
    expected = torch.where(values > 0.25, 1 - 0.5 / values.abs().sqrt(), 0.0)
    found = spectrum_map(gram, 0.5)
    np.testing.assert_allclose(found, (vectors * expected) @ vectors.mT, atol=1e-12)
    torch.testing.assert_close(
        found, spectrum_map(gram + torch.triu(noise) - torch.triu(noise).mT, 0.5)
    )
    torch.testing.assert_close(spectrum_map(gram, 0.0), torch.eye(6, dtype=torch.float64))
    assert group_scale(torch.tensor([-1.0, 0.0, 4.0]), 1.0).tolist() == [0.0, 0.0, 0.5]
    assert group_scale(torch.tensor([-1.0, 0.0, 4.0]), 0.0).tolist() == [1.0, 1.0, 1.0]


def test_numbers_that_are_not_finite():
    broken = matrix((4, 3))
    broken[1, 2] = torch.nan
    assert shrink_spectrum(broken, 0.1).isnan().all()
    shrunk = shrink_groups(broken, 0.1)
    assert shrunk[:, 2].isnan().all()
    torch.testing.assert_close(shrunk[:, :2], shrink_groups(broken[:, :2], 0.1))
    gram = torch.eye(3)
    gram[0, 0] = torch.inf
    assert spectrum_map(gram, 0.1).isnan().all()
    scale = group_scale(torch.tensor([torch.nan, torch.inf, 4.0]), 1.0)
    assert scale[0].isnan() and scale[1:].tolist() == [1.0, 0.5]


def test_extremes_of_size():
    for size in (1e-200, 1e200):
        weight = torch.tensor([[3.0], [4.0]], dtype=torch.float64) * size
        torch.testing.assert_close(shrink_groups(weight, 2.5 * size) / size, weight / size / 2)
    assert shrink_spectrum(torch.zeros(3, 2), 1.0).abs().max() == 0
    assert shrink_groups(torch.zeros(0, 2), 1.0).shape == (0, 2)
    assert shrink_spectrum(torch.zeros(0, 2), 1.0).shape == (0, 2)
    assert shrink_spectrum(matrix((4, 3)).float(), 1.0).dtype == torch.float64


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_refusals(threshold):
    for function in (shrink_spectrum, shrink_groups, spectrum_map):
        with pytest.raises(ValueError, match="threshold: given"):
            function(torch.eye(2), threshold)
    with pytest.raises(ValueError, match="threshold: given"):
        group_scale(torch.ones(2), threshold)
    with pytest.raises(ValueError, match="expected a matrix"):
        shrink_spectrum(torch.ones(2, 1, 2), 1.0)
    with pytest.raises(ValueError, match="square second moment"):
        spectrum_map(torch.ones(2, 3), 1.0)
