"""Kernels of linear layers: emulated on the CPU, and on CUDA compared with torch."""

import pytest
import torch
from tests.models.emulation import COMPILES, Emulated

from coterie.models import linear_gpu
from coterie.models.layers import stacked_linear
from coterie.models.linear_gpu import Products, Shape, agrees, products

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SHAPES = [Shape(10, 1024, 62), Shape(1, 132, 1), Shape(7, 520, 33), Shape(16, 128, 512)]


@COMPILES
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_products_are_exact(shape, tmp_path):
    module = Emulated(linear_gpu._SOURCE, shape.constants, tmp_path)
    assert agrees(Products(shape, module), torch.device("cpu"))


def test_other_shapes_and_types_are_left_to_torch():
    weight = torch.zeros(2, 5, 128)
    assert products(torch.zeros(2, 17, 128), weight) is None
    assert products(torch.zeros(2, 3, 128).double(), weight.double()) is None
    assert products(torch.zeros(2, 3, 126), torch.zeros(2, 5, 126)) is None
    assert products(torch.zeros(2, 128, 3).mT, weight) is None


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=CUDA) for shape in SHAPES])
def test_products_on_cuda(shape):
    draw = torch.Generator().manual_seed(0)
    sizes = [(3, shape.rows, shape.inputs), (3, shape.outputs, shape.inputs), (3, shape.outputs)]
    given = [torch.randn(size, generator=draw).cuda() for size in sizes]
    assert products(*given[:2]) is not None

    def made(dtype):
        leaves = [leaf.to(dtype).requires_grad_() for leaf in given]
        out = stacked_linear(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for found, wanted in zip(made(torch.float32), made(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)
