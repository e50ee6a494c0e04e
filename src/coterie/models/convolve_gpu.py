"""Chains of convolutions on a GPU by kernels made for their shapes: source, compiler and launches.

The source is convolve.cu, for images with rows first (c, n, C, H, W). NVRTC, which comes with torch
for CUDA, compiles it once for each shape; the result is kept in memory and in the user's cache. The
first use of a shape compares output and all gradients with `layers.convolve` in float64, on small
whole numbers: every product and sum of them is exact in float32, also ties are, so both must be
equal to the bit. Where anything is wrong, `convolutions` warns once and returns None.

A number depends on the client's own images and filters and on the shapes alone, not on the number
of clients, and sums have a fixed order. Products are FFMA in float32; where torch may round factors
to TF32, the kernels of the forward pass do so if they can. Imported only for tensors on
CUDA. Tests: tests/models/test_convolve_gpu.py, which on the CPU emulates the kernels.
"""

import ctypes
import hashlib
import re
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.core.cache import kept
from coterie.models.layers import Block, convolve, pad_images, rows_last
from coterie.models.tiles import Layer, tiles_of

_SOURCE = Path(__file__).with_name("convolve.cu")
_SPLIT = 12  # images, or bands of them, in one part of a gradient's sum
_OLDEST = (8, 0)  # asynchronous copies


class Kernels:
    """The kernels of one layer. `run` launches one; a subclass may emulate it."""

    def __init__(self, layer: Layer, facts: Mapping[str, Sequence[int]], dense: "Kernels | None"):
        self.layer, self._facts, self._dense = layer, facts, dense

    def run(self, name: str, blocks: int, threads: int, shared: int, *given: Any) -> None:
        """Launch a kernel on the current stream."""
        raise NotImplementedError

    def _start(self, name: str, times: int, *given: Any) -> None:
        threads, shared, parts, _ = self._facts[name]
        self.run(name, times * parts, threads, shared, *given)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return outputs (c, n, O, h, w), and the places of maxima in their windows."""
        layer = self.layer
        packed = x.new_empty(len(x), layer.inputs, -(-layer.filters // 4) * 4)
        tiles = -(-layer.inputs // 32) * -(-packed.shape[2] // 32)
        self.run("pack", len(x) * tiles, 256, 4 * 32 * 33, weight, packed)
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
            self.run(
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
            run.run("total", blocks, 256, 0, *self.pieces, self.weight, self.bias, self.parts)


class Long(int):
    """A whole number of 64 bits among the arguments of a kernel."""


class Launched(Kernels):
    """Kernels on a GPU."""

    def __init__(
        self, layer: Layer, tiles: Mapping[str, int], device: torch.device, dense: Kernels | None
    ):
        self._module = _Module(_compiled(layer, tiles, device), device)
        names = [
            f"facts_{name}" for name in ("forward", "forward_tf32", "filters", "few", "images")
        ]
        facts = {name[6:]: self._module.numbers(name) for name in names}
        super().__init__(layer, {name: each for name, each in facts.items() if each}, dense)

    def run(self, name: str, blocks: int, threads: int, shared: int, *given: Any) -> None:
        """Launch a kernel on the current stream."""
        if blocks:
            self._module.launch(name, blocks, threads, shared, given)


def kernels_of(layer: Layer, device: torch.device, tf32: bool = False, **other: int) -> Kernels:
    """Return the kernels of a layer, with other tiles than usual; raise what goes wrong."""
    tiles = tiles_of(layer, tf32) | other
    dense = None
    if "X_NR" not in tiles:
        back = layer.turned
        only = {name: size for name, size in tiles_of(back).items() if name.startswith("F_")}
        dense = Launched(back, only, device, None)
    return Launched(layer, tiles, device, dense)


def convolutions(x: Tensor, blocks: Sequence[Block]) -> Tensor | None:
    """Return images (c, n, C, H, W) after blocks; None if these kernels cannot compute them."""
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
        layer = Layer(depth, height, width, count, kernel, pool, padding)
        found = _checked(layer, x.device, low or _may_round())
        if found is None:
            return None
        chain.append(found)
        depth, (height, width) = count, layer.pooled
    filters = [part for block in blocks for part in (block.weight, block.bias)]
    made: Tensor = _Chain.apply(x, chain, *filters)  # type: ignore[no-untyped-call]
    return made


def _may_round() -> bool:
    matmul: Any = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")  # torch 2.9
    return bool(matmul.fp32_precision == "tf32" if newer else matmul.allow_tf32)


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
                with torch.cuda.stream(beside):
                    sums.start()
                grad = chain[at].images(grad, codes[at], weights[at])
        here.wait_stream(beside)
        flat = [part for sums in found for part in (sums.weight, sums.bias)]
        return (grad if ctx.needs_input_grad[0] else None, None, *flat)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_FOUND: dict[tuple[Layer, torch.device, bool], Kernels | None] = {}


def _checked(layer: Layer, device: torch.device, tf32: bool) -> Kernels | None:
    """Return the kernels of a shape after a comparison; None if they cannot be used."""
    key = (layer, device, tf32)
    if key not in _FOUND:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # nothing may be compiled or compared now
        _FOUND[key] = None
        try:
            made = kernels_of(layer, device, tf32)
            why = "" if agrees(made, device) else "the results differ from those of torch"
            _FOUND[key] = None if why else made
        except Exception as error:  # no compiler, an old GPU, a shape without tiles
            why = f"{type(error).__name__}: {error}"
        if why:
            warnings.warn(f"{layer} is computed by torch: {why}", stacklevel=2)
    return _FOUND[key]


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


# The compiler and the driver. Every call returns 0 where all is well.


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _compiler() -> Any:
    """Return NVRTC, preferably the one that came with torch."""
    wanted = (torch.version.cuda or "").partition(".")[0]
    roots = [Path(path) for path in sys.path if path and Path(path, "nvidia").is_dir()]
    paths = [str(path) for root in roots for path in root.glob("nvidia/*/lib/libnvrtc.so.*")]
    paths = [path for path in paths if re.search(r"libnvrtc\.so\.\d+$", path)]
    paths.sort(key=lambda path: not path.endswith(f".{wanted}"))
    for path in (*paths, f"libnvrtc.so.{wanted}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError("no NVRTC; expected the wheel nvidia-cuda-nvrtc, which comes with torch for CUDA")


def _check(code: int, what: str, log: str = "") -> None:
    if code:
        raise RuntimeError(f"{what} returned {code} {log}".strip())


def _compiled(layer: Layer, tiles: Mapping[str, int], device: torch.device) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _OLDEST:
        raise RuntimeError(f"compute capability {major}.{minor}; expected at least 8.0")
    source = _SOURCE.read_bytes()
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    options += [f"-D{name}={size}" for name, size in {**layer.defines, **tiles}.items()]
    version = (ctypes.c_int * 2)()
    nvrtc = _compiler()
    _check(nvrtc.nvrtcVersion(ctypes.byref(version), ctypes.byref(version, 4)), "nvrtcVersion")
    mark = hashlib.sha256(source + repr((options, list(version))).encode()).hexdigest()[:32]
    return kept(f"convolve-{mark}.cubin", lambda: compile_source(source, options))


def compile_source(source: bytes, options: Sequence[str]) -> bytes:
    """Return machine code for a GPU; raise RuntimeError with the compiler's words."""
    nvrtc, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"convolve.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    _check(code, "nvrtcCompileProgram", log.value.decode(errors="replace")[:2000])
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


class _Module:
    # Loaded machine code. Kernels of one process share torch's primary context.

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self._device = device
        self._here = threading.local()
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}  # bytes a kernel may use
        self._enter()
        self._module = ctypes.c_void_p()
        loaded = _driver().cuModuleLoadData(ctypes.byref(self._module), cubin)
        _check(loaded, "cuModuleLoadData")

    def _enter(self) -> None:
        # Autograd's own threads begin without a context.
        if getattr(self._here, "entered", False):
            return
        driver, context = _driver(), ctypes.c_void_p()
        _check(driver.cuInit(0), "cuInit")
        driver.cuCtxGetCurrent(ctypes.byref(context))
        if not context.value:
            device = ctypes.c_int()
            index = self._device.index
            index = torch.cuda.current_device() if index is None else index
            _check(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
            _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "context")
            _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self._here.entered = True

    def numbers(self, name: str) -> list[int]:
        """Return an array of the source; empty if it has none of this name."""
        place, size = ctypes.c_uint64(), ctypes.c_size_t()
        driver = _driver()
        if driver.cuModuleGetGlobal_v2(
            ctypes.byref(place), ctypes.byref(size), self._module, name.encode()
        ):
            return []
        found = (ctypes.c_int * (size.value // 4))()
        _check(driver.cuMemcpyDtoH_v2(found, place, size), "cuMemcpyDtoH")
        return list(found)

    def launch(
        self, name: str, blocks: int, threads: int, shared: int, given: Sequence[Any]
    ) -> None:
        self._enter()
        values = [_argument(each) for each in given]
        places = [ctypes.cast(ctypes.pointer(each), ctypes.c_void_p) for each in values]
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        done = _driver().cuLaunchKernel(
            self._function(name, shared), blocks, 1, 1, threads, 1, 1, shared, stream,
            (ctypes.c_void_p * len(places))(*places), None,
        )  # fmt: skip
        _check(done, f"{name}: cuLaunchKernel")

    def _function(self, name: str, shared: int) -> Any:
        driver = _driver()
        if name not in self._functions:
            found = ctypes.c_void_p()
            got = driver.cuModuleGetFunction(ctypes.byref(found), self._module, name.encode())
            _check(got, f"{name}: cuModuleGetFunction")
            self._functions[name], self._shared[name] = found, 48 << 10
        if shared > self._shared[name]:
            allowed = driver.cuFuncSetAttribute(self._functions[name], 8, shared)
            _check(allowed, f"{name}: {shared} bytes of shared memory")
            self._shared[name] = shared
        return self._functions[name]

    def attributes(self, name: str) -> dict[Literal["registers", "spilled"], int]:
        """Return the registers of a kernel, and its bytes of local memory per thread."""
        found = [ctypes.c_int(), ctypes.c_int()]
        function = self._function(name, 0)
        _check(_driver().cuFuncGetAttribute(ctypes.byref(found[0]), 4, function), "attribute")
        _check(_driver().cuFuncGetAttribute(ctypes.byref(found[1]), 3, function), "attribute")
        return {"registers": found[0].value, "spilled": found[1].value}


def _argument(given: Any) -> Any:
    if given is None:
        return ctypes.c_void_p()
    if isinstance(given, Tensor):
        return ctypes.c_void_p(given.data_ptr())
    return (ctypes.c_longlong if isinstance(given, Long) else ctypes.c_int)(given)
