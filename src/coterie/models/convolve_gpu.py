"""Chains of convolutions on a GPU by kernels made for their shapes (see convolve.cu).

Images have rows first (c, n, C, H, W). The first use of a shape compares output and all gradients
with `layers.convolve` in float64, on small whole numbers: every product and sum of them is exact in
float32, also ties are, so both must be equal to the bit. Where anything is wrong, there is one
warning, and `convolutions` returns None.

A number depends on the client's own images and filters and on the shapes alone, not on the number
of clients, and sums have a fixed order. Products are FFMA in float32; where torch may round factors
to TF32, the kernels of the forward pass do so if they can. Imported only for tensors on CUDA.
Tests: tests/models/test_convolve_gpu.py, which on the CPU emulates the kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.core.nvrtc import Long, may_round, module_of, tried
from coterie.models.layers import Block, convolve, pad_images, rows_last
from coterie.models.tiles import Layer, tiles_of

_SOURCE = Path(__file__).with_name("convolve.cu")
_KERNELS = ("forward", "forward_tf32", "filters", "few", "images")
_SPLIT = 12  # images, or bands of them, in one part of a gradient's sum


class Kernels:
    """The kernels of one layer, in a module of `core.nvrtc` or one that emulates it."""

    def __init__(self, layer: Layer, module: Any, dense: "Kernels | None") -> None:
        self.layer, self._module, self._dense = layer, module, dense
        facts = {name: module.numbers(f"facts_{name}") for name in _KERNELS}
        self._facts = {name: each for name, each in facts.items() if each}

    def _run(self, name: str, blocks: int, threads: int, shared: int, *given: Any) -> None:
        self._module.launch(name, blocks, threads, shared, given)

    def _start(self, name: str, times: int, *given: Any) -> None:
        threads, shared, parts, _ = self._facts[name]
        self._run(name, times * parts, threads, shared, *given)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return outputs (c, n, O, h, w), and the places of maxima in their windows."""
        layer = self.layer
        packed = x.new_empty(len(x), layer.inputs, -(-layer.filters // 4) * 4)
        tiles = -(-layer.inputs // 32) * -(-packed.shape[2] // 32)
        self._run("pack", len(x) * tiles, 256, 4 * 32 * 33, weight, packed)
        return self._packed(x, packed, bias, places=layer.pool > 1)

    def _packed(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, places: bool
    ) -> tuple[Tensor, Tensor]:
        layer, (clients, rows) = self.layer, x.shape[:2]
        height, width = layer.pooled
        out = x.new_empty(clients, rows, layer.filters, height, width)
        wide = -(-width // 4) * 4 if places else 0
        code = x.new_empty(clients, rows, layer.filters, height, wide, dtype=torch.uint8)
        name = "forward_tf32" if "forward_tf32" in self._facts else "forward"
        given = (x, packed, bias, out, code if places else None, rows)
        self._start(name, clients * -(-rows // self._facts[name][3]), *given)
        return out, code

    def filters(self, x: Tensor, grad: Tensor, code: Tensor) -> "Sums":
        """Return the gradients of weights and biases, not yet computed."""
        layer, (clients, rows) = self.layer, x.shape[:2]
        few = "few" in self._facts
        _, _, blocks, last = self._facts["few" if few else "filters"]
        shape = (layer.filters, layer.channels, layer.kernel, layer.kernel)
        if few:
            bands = blocks // -(-layer.filters // 32)
            parts = -(-rows // last) * bands
        else:
            parts = -(-rows * last // _SPLIT)

        def new(*shape: int) -> Tensor:
            return x.new_empty(clients, *shape)

        pieces = (new(parts, *shape), new(parts, layer.filters)) if parts > 1 else None
        return Sums(self, x, grad, code, new(*shape), new(layer.filters), pieces, parts)

    def images(self, grad: Tensor, code: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the images."""
        layer, (clients, rows) = self.layer, grad.shape[:2]
        if self._dense is not None:
            return self._densely(grad, code, weight)
        made = grad.new_empty(clients, rows, layer.channels, layer.height, layer.width)
        groups = -(-rows // self._facts["images"][3])
        self._start("images", clients * groups, grad, code, weight, made, rows)
        return made

    def _densely(self, grad: Tensor, code: Tensor, weight: Tensor) -> Tensor:
        # The convolution of the padded gradient with turned filters.
        assert self._dense is not None
        if self.layer.pool > 1:
            full = grad.new_empty(*grad.shape[:3], *self.layer.convolved)
            self._run(
                "spread", -(-full.numel() // 256), 256, 0, grad, code, full, Long(full.numel())
            )
            grad = full
        width = -(-self.layer.channels // 4) * 4
        turned = weight.flip(-2, -1).permute(0, 1, 3, 4, 2)
        packed = weight.new_zeros(*turned.shape[:-1], width)
        packed[..., : turned.shape[-1]] = turned
        return self._dense._packed(grad, packed, None, places=False)[0]


@dataclass(frozen=True, eq=False)
class Sums:
    """The gradients of a layer's filters: memory, and the launches that fill it."""

    kernels: Kernels
    x: Tensor
    grad: Tensor
    code: Tensor
    weight: Tensor
    bias: Tensor
    pieces: tuple[Tensor, Tensor] | None
    parts: int

    def start(self) -> None:
        """Launch the kernels."""
        run, (clients, rows) = self.kernels, self.x.shape[:2]
        to = self.pieces or (self.weight, self.bias)
        given = (self.x, self.grad, self.code, *to, rows)
        if "few" in run._facts:
            run._start("few", clients * -(-rows // run._facts["few"][3]), *given)
        else:
            run._start("filters", clients * self.parts, *given, self.parts)
        if self.pieces is not None:
            blocks = clients * -(-(self.weight[0].numel() + self.bias.shape[1]) // 256)
            run._run("total", blocks, 256, 0, *self.pieces, self.weight, self.bias, self.parts)


def kernels_of(layer: Layer, device: torch.device, tf32: bool = False, **other: int) -> Kernels:
    """Return the kernels of a layer, with other tiles than usual; raise what goes wrong."""
    return built(
        layer,
        tiles_of(layer, tf32) | other,
        lambda constants: module_of(_SOURCE, constants, device),
    )


def built(
    layer: Layer, tiles: Mapping[str, int], make: Callable[[Mapping[str, int]], Any]
) -> Kernels:
    """Return the kernels of a layer in the modules that `make` makes of constants."""
    dense = None
    if "X_NR" not in tiles:
        back = layer.turned
        only = {name: size for name, size in tiles_of(back).items() if name.startswith("F_")}
        dense = Kernels(back, make({**back.constants, **only}), None)
    return Kernels(layer, make({**layer.constants, **tiles}), dense)


def convolutions(x: Tensor, blocks: Sequence[Block], relu: bool = True) -> Tensor | None:
    """Return images (c, n, C, H, W) after blocks; None if these kernels cannot compute them.

    Without `relu` they are not rectified.
    """
    low = torch.is_autocast_enabled(x.device.type)
    # Also under bfloat16: with rounded factors they are faster than products with its patches.
    x = x.float() if low and x.dtype == torch.bfloat16 else x
    types = {x.dtype, *(each.weight.dtype for each in blocks)}
    if types != {torch.float32} or not x.numel():
        return None
    depth, height, width = x.shape[2:]
    chain = []
    for weight, _, pool, padding in blocks:
        count, given, kernel, wide = weight.shape[1:]
        if given != depth or kernel != wide:
            return None
        layer = Layer(depth, height, width, count, kernel, pool, padding, relu)
        found = _tried(layer, x.device, low or may_round())
        if found is None:
            return None
        chain.append(found)
        depth, (height, width) = count, layer.pooled
    filters = [part for block in blocks for part in (block.weight, block.bias)]
    made: Tensor = _Chain.apply(x, chain, *filters)  # type: ignore[no-untyped-call]
    return made


def _tried(layer: Layer, device: torch.device, tf32: bool) -> Kernels | None:
    shape = (layer, "tf32") if tf32 else layer
    return tried(shape, device, lambda: kernels_of(layer, device, tf32), agrees)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: list[Kernels], *filters: Tensor) -> Tensor:
        parts = [_aligned(part) for part in filters]
        images, codes = [_aligned(x)], []
        for at, kernels in enumerate(chain):
            made, code = kernels.forward(images[-1], parts[2 * at], parts[2 * at + 1])
            images.append(made)
            codes.append(code)
        ctx.save_for_backward(*images, *codes, *parts[::2])
        ctx.chain = chain
        return images[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chain, saved, count = ctx.chain, ctx.saved_tensors, len(ctx.chain)
        images, codes, weights = (
            saved[: count + 1],
            saved[count + 1 : 2 * count + 1],
            saved[2 * count + 1 :],
        )
        # The gradients of filters run beside those of images. All memory belongs to this stream and
        # is held until both are done.
        here, beside = torch.cuda.current_stream(grad.device), _beside(grad.device)
        found: list[Sums] = []
        forked = False
        for at in reversed(range(count)):
            grad = _aligned(grad)
            if chain[at].layer.relu and chain[at].layer.pool == 1:
                grad = torch.ops.aten.threshold_backward(grad, images[at + 1], 0)
            sums = chain[at].filters(images[at], grad, codes[at])
            found.insert(0, sums)
            last = at == 0 and not ctx.needs_input_grad[0]
            if last:
                sums.start()
            else:
                beside.wait_stream(here)
                forked = True
                with torch.cuda.stream(beside):
                    sums.start()
                grad = chain[at].images(grad, codes[at], weights[at])
        if forked:  # a graph that is recorded may wait for its own work alone
            here.wait_stream(beside)
        flat = [part for sums in found for part in (sums.weight, sums.bias)]
        return (grad if ctx.needs_input_grad[0] else None, None, *flat)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def agrees(kernels: Kernels, device: torch.device) -> bool:
    """Return whether the kernels and `layers.convolve` are equal on small whole numbers."""
    layer = kernels.layer
    draw = torch.Generator().manual_seed(0)

    def whole(*shape: int, most: int = 3) -> Tensor:
        drawn = torch.randint(-most, most + 1, (2, *shape), generator=draw)
        return drawn.to(device=device, dtype=torch.float32)

    x = whole(3, layer.channels, layer.height, layer.width)
    weight = whole(layer.filters, layer.channels, layer.kernel, layer.kernel)
    bias, grad = whole(layer.filters), whole(3, layer.filters, *layer.pooled)
    with torch.no_grad():
        out, code = kernels.forward(x, weight, bias)
        inward = grad
        if layer.relu and layer.pool == 1:
            inward = torch.ops.aten.threshold_backward(grad, out, 0)
        sums = kernels.filters(x, inward, code)
        sums.start()
        found = (out, kernels.images(inward, code, weight), sums.weight, sums.bias)
    wanted = _plainly(layer, x, weight, bias, grad)
    return all(
        torch.equal(ours.double(), theirs) for ours, theirs in zip(found, wanted, strict=True)
    )


def _plainly(layer: Layer, *given: Tensor) -> tuple[Tensor, ...]:
    # Output and gradients in float64, by torch.
    leaves = [each.detach().double().requires_grad_() for each in given[:3]]
    with torch.enable_grad():
        images = pad_images(rows_last(leaves[0]), layer.padding)
        if layer.relu:
            made = convolve(images, leaves[1], leaves[2], layer.pool).permute(0, 4, 1, 2, 3)
        else:
            made = torch.stack([
                torch.nn.functional.conv2d(x, w, b, padding=layer.padding)
                for x, w, b in zip(*leaves, strict=True)
            ])  # fmt: skip
        grads = torch.autograd.grad(made, leaves, given[3].double())
    return (made.detach(), *grads)
