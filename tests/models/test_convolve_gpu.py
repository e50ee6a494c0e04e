"""Kernels of convolutions: emulated on the CPU, and on CUDA compared with torch."""

import itertools

import pytest
import torch
from tests.models.emulation import COMPILES, Emulated

from coterie.core import nvrtc
from coterie.models import convolve_gpu
from coterie.models.convolve_gpu import agrees, built, convolutions, kernels_of
from coterie.models.layers import Block, convolved
from coterie.models.tiles import Layer, tiles_of

CPU = torch.device("cpu")
NEEDS = {
    "forward": "F_TO", "forward_tf32": "M_NT", "filters": "D_FW", "few": "E_NW", "images": "X_NR",
    "spread": "C",
}  # fmt: skip


def emulated(layer, folder, tf32=False, source=convolve_gpu._SOURCE):
    return built(
        layer, tiles_of(layer, tf32), lambda given: Emulated(source, given, folder, NEEDS.items())
    )


LAYERS = {
    "small": Layer(1, 10, 9, 5, 3, 2, 1),
    "deep": Layer(9, 8, 8, 6, 3, 2),
    "femnist_cnn 1": Layer(1, 28, 28, 32, 5, 2),
    "femnist_cnn 2": Layer(32, 12, 12, 64, 5, 2),
    "femnist_leaf 1": Layer(1, 28, 28, 32, 5, 2, 2),
    "femnist_leaf 2": Layer(32, 14, 14, 64, 5, 2, 2),
    "celeba_cnn 1": Layer(3, 84, 84, 32, 3, 1, 1, relu=False),
    "celeba_cnn 4": Layer(32, 10, 10, 32, 3, 1, 1, relu=False),
    "windows of 3": Layer(33, 13, 11, 7, 3, 3, 1),
    "one": Layer(10, 7, 7, 3, 1, 2),
    "even": Layer(12, 9, 10, 5, 4, 2, 1),
    "even of 8": Layer(8, 7, 8, 13, 4, 2, 1),
    "no windows": Layer(12, 9, 10, 37, 5, 1, 2),
    "large": Layer(12, 40, 33, 6, 3, 2, 1),
    "few and large": Layer(3, 40, 33, 6, 5, 3, 1),
    "windows of 5": Layer(2, 31, 32, 5, 7, 5, 6),
}


DAILY = ("small", "deep", "femnist_cnn 2", "windows of 3", "large")
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@COMPILES
@pytest.mark.parametrize(
    "name",
    [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS],
)
def test_emulated_kernels_equal_torch(name, tmp_path):
    assert agrees(emulated(LAYERS[name], tmp_path), CPU)


@COMPILES
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("femnist_cnn 2", marks=pytest.mark.slow),
        pytest.param("femnist_leaf 2", marks=pytest.mark.slow),
        pytest.param("celeba_cnn 4", marks=pytest.mark.slow),
        "even of 8",
    ],
)
def test_emulated_products_in_tf32_equal_torch(name, tmp_path):
    kernels = emulated(LAYERS[name], tmp_path, tf32=True)
    assert "forward_tf32" in kernels._facts
    assert agrees(kernels, CPU)


@COMPILES
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("now > m.best ||", "now >= m.best ||"), ("m.best <= 0.f", "m.best < -1.f")],
)
def test_the_comparison_finds_wrong_kernels(right, wrong, tmp_path):
    text = convolve_gpu._SOURCE.read_text()
    assert text.count(right) == 1
    source = tmp_path / "wrong.cu"
    source.write_text(text.replace(right, wrong))
    assert not agrees(emulated(LAYERS["small"], tmp_path, source=source), CPU)


@COMPILES
def test_nan_stays_with_its_client_and_row(tmp_path):
    layer = LAYERS["small"]
    kernels = emulated(layer, tmp_path)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 1, 10, 9, generator=draw)
    weight, bias = torch.randn(3, 5, 1, 3, 3, generator=draw), torch.randn(3, 5, generator=draw)
    clean, _ = kernels.forward(x, weight, bias)
    x[1, 2] = torch.nan
    found, code = kernels.forward(x, weight, bias)
    assert found[1, 2].isnan().all()
    grad = torch.randn(found.shape, generator=draw)
    sums = kernels.filters(x, grad, code)
    sums.start()
    assert sums.weight[1].isnan().all()
    assert sums.weight[[0, 2]].isfinite().all()
    found[1, 2] = clean[1, 2]
    assert torch.equal(found, clean)


def test_every_shape_has_tiles_or_a_reason():
    for channels, side, filters, kernel, pool in itertools.product(
        (1, 3, 8, 32), (7, 28, 84, 200), (3, 32, 100), (1, 3, 4, 7), (1, 2, 3, 8)
    ):
        layer = Layer(channels, side, side, filters, kernel, pool, kernel // 2)
        if min(layer.pooled) > 0:
            tiles = tiles_of(layer)
            assert tiles["F_OB"] % tiles["F_TO"] == channels % tiles["F_CK"] == 0
            assert max(tiles["F_RX"] % pool, tiles["F_RY"] % pool) == 0
            tiles_of(layer.turned)
    with pytest.raises(ValueError, match="at most 7 x 7 and windows of at most 8 x 8"):
        tiles_of(Layer(1, 28, 28, 4, 9))


def test_what_is_wrong_is_said_once_and_computed_by_torch(monkeypatch):
    def missing(*given):
        raise OSError("no NVRTC")

    monkeypatch.setattr(nvrtc, "_TRIED", {})
    monkeypatch.setattr(convolve_gpu, "module_of", missing)
    block = Block(torch.zeros(2, 4, 1, 3, 3), torch.zeros(2, 4), 2, 0)
    x = torch.zeros(2, 5, 1, 8, 8)
    with pytest.warns(UserWarning, match="is computed by torch: OSError: no NVRTC"):
        assert convolutions(x, [block]) is None
    assert convolutions(x, [block]) is None  # without a warning
    assert convolutions(x.double(), [block]) is None
    assert convolutions(x[:, :0], [block]) is None


@pytest.mark.parametrize("name", [pytest.param(name, marks=CUDA) for name in LAYERS])
def test_kernels_on_cuda_equal_torch(name):
    device = torch.device("cuda", torch.cuda.current_device())
    assert agrees(kernels_of(LAYERS[name], device), device)


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=CUDA) for rows in (1, 7, 40)])
def test_chains_on_cuda_are_near_torch_in_float64(rows):
    draw = torch.Generator().manual_seed(rows)
    shapes = [(4, rows, 3, 30, 27), (4, 20, 3, 5, 5), (4, 20), (4, 33, 20, 3, 3), (4, 33)]
    x, *filters = (torch.rand(shape, generator=draw).sub(0.5).cuda() for shape in shapes)

    def made(dtype):
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (x, *filters)]
        first = Block(leaves[1], leaves[2], 2, 1)
        out = convolved(leaves[0], [first, Block(leaves[3], leaves[4], 3, 0)])
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for found, wanted in zip(made(torch.float32), made(torch.float64), strict=True):
        # A maximum that is nearly two pixels moves a part of the gradient.
        assert (found - wanted).norm() < 1e-2 * wanted.norm()
