"""Products of few rows of many clients with their own weights, on a GPU (see linear.cu).

cuBLAS takes long for a batch of ten rows, also with rounded factors. As in `convolve_gpu`, each
shape is compared with torch on small whole numbers before its first use, and a client's numbers
depend on its own alone.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coterie.core.nvrtc import Module, are_plain, module_of, tried

_SOURCE = Path(__file__).with_name("linear.cu")
_ROWS = 16  # more are faster by cuBLAS
_PIECE, _THREADS, _OUTPUTS = 512, 128, 16  # as in the source: inputs at once, outputs of a block


@dataclass(frozen=True)
class Shape:
    """A linear layer for a batch of rows."""

    rows: int
    inputs: int
    outputs: int

    @property
    def constants(self) -> dict[str, int]:
        """The shape as constants of the source."""
        return {"N": self.rows, "I": self.inputs, "O": self.outputs}


class Products:
    """The kernels of one shape; a subclass of the module of a GPU may emulate them."""

    def __init__(self, shape: Shape, module: Module) -> None:
        self.shape, self._module = shape, module

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x (c, n, in) times weights (c, out, in), plus biases (c, out)."""
        rows, outputs = self.shape.rows, self.shape.outputs
        made = x.new_empty(len(x), rows, outputs)
        shared = 4 * rows * max(_PIECE, 4 * 4 * 33)
        blocks = len(x) * -(-outputs // _OUTPUTS)
        self._module.launch("linear", blocks, _THREADS, shared, (x, weight, bias, made))
        return made

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, wants_rows: bool, wants_biases: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the gradients of rows, weights and biases; rows and biases only if needed."""
        rows = torch.empty_like(x) if wants_rows else None
        weights = torch.empty_like(weight)
        biases = weight.new_empty(weight.shape[:2]) if wants_biases else None
        shared = 4 * self.shape.outputs * -(-self.shape.rows // 4) * 4
        blocks = len(x) * -(-self.shape.inputs // _THREADS)
        given = (grad.contiguous(), x, weight, rows, weights, biases)
        self._module.launch("linear_back", blocks, _THREADS, shared, given)
        return rows, weights, biases


def products(x: Tensor, weight: Tensor) -> Products | None:
    """Return the kernels for rows (c, n, in) and weights (c, out, in); None if there are none."""
    (clients, rows, inputs), outputs = x.shape, weight.shape[1]
    small = 0 < rows <= _ROWS and inputs % 4 == 0 and inputs >= _THREADS and outputs <= 512
    plain = are_plain(x, weight) and all(map(_is_aligned, (x, weight)))
    if not (small and plain and clients):
        return None
    shape = Shape(rows, inputs, outputs)
    return tried(
        shape,
        x.device,
        lambda: Products(shape, module_of(_SOURCE, shape.constants, x.device)),
        agrees,
    )


def _is_aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def agrees(kernels: Products, device: torch.device) -> bool:
    """Return whether the kernels are exact on small whole numbers."""
    shape, draw = kernels.shape, torch.Generator().manual_seed(0)
    sizes = [(shape.rows, shape.inputs), (shape.outputs, shape.inputs), (shape.outputs,)]
    drawn = [
        torch.randint(-3, 4, (2, *size), generator=draw)
        for size in (*sizes, (shape.rows, shape.outputs))
    ]
    x, weight, bias, grad = (each.to(device=device, dtype=torch.float32) for each in drawn)
    found = (kernels.forward(x, weight, bias), *kernels.backward(grad, x, weight, True, True))
    a, w, b, g = (each.double() for each in (x, weight, bias, grad))
    wanted = (a @ w.mT + b[:, None], g @ w, g.mT @ a, g.sum(dim=1))
    pairs = zip(found, wanted, strict=True)
    return all(ours is not None and torch.equal(ours.double(), theirs) for ours, theirs in pairs)
