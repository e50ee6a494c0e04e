"""CUDA kernels from source at run time, without a system compiler.

NVRTC, which comes with torch for CUDA, makes machine code for one GPU and one set of constants. It
is kept in the user's cache. The CUDA driver loads it, and launches it on torch's current stream,
also while a graph is recorded. Every call of both returns 0 where all is well. Imported only for
tensors on CUDA.
"""

import ctypes
import hashlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from coterie.core.cache import kept

Kernels = TypeVar("Kernels")
_OLDEST = (8, 0)  # asynchronous copies
_TRIED: dict[Any, Any] = {}


class Long(int):
    """A whole number of 64 bits among the arguments of a kernel."""


def tried(
    shape: Hashable,
    device: torch.device,
    make: Callable[[], Kernels],
    agrees: Callable[[Kernels, torch.device], bool],
) -> Kernels | None:
    """Return the kernels of a shape after a comparison; None, and a warning, if they are unusable.

    Args:
        shape: The key under which they are kept, and their name in the warning.
        device: Where they run.
        make: Makes them.
        agrees: Returns whether they compute what torch computes.
    """
    key = (shape, device)
    if key not in _TRIED:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # nothing may be compiled or compared now
        _TRIED[key], why = None, ""
        try:
            made = make()
            if agrees(made, device):
                _TRIED[key] = made
            else:
                why = "the results differ from those of torch"
        except Exception as error:  # no compiler, an old GPU, a shape without kernels
            why = f"{type(error).__name__}: {error}"
        if why:
            warnings.warn(f"{shape} is computed by torch: {why}", stacklevel=2)
    found: Kernels | None = _TRIED[key]
    return found


def are_plain(*given: Tensor) -> bool:
    """Return whether kernels may read these tensors: float32, and not wrapped by `torch.func`."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(each.dtype == torch.float32 and not wrapped(each) for each in given)


def may_round() -> bool:
    """Return whether torch may round the factors of products to TF32."""
    matmul: Any = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")  # torch 2.9
    return bool(matmul.fp32_precision == "tf32" if newer else matmul.allow_tf32)


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


def module_of(path: Path, constants: Mapping[str, int], device: torch.device) -> "Module":
    """Return the kernels of a file, compiled with these constants; raise what goes wrong."""
    return Module(compiled(path, constants, device), device)


def compiled(path: Path, constants: Mapping[str, int], device: torch.device) -> bytes:
    """Return machine code of a file, compiled now or before."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _OLDEST:
        raise RuntimeError(f"compute capability {major}.{minor}; expected at least 8.0")
    source = path.read_bytes()
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    options += [f"-D{name}={size}" for name, size in constants.items()]
    version = (ctypes.c_int * 2)()
    nvrtc = _compiler()
    _check(nvrtc.nvrtcVersion(ctypes.byref(version), ctypes.byref(version, 4)), "nvrtcVersion")
    mark = hashlib.sha256(source + repr((options, list(version))).encode()).hexdigest()[:32]
    return kept(f"{path.stem}-{mark}.cubin", lambda: compile_source(source, options))


def compile_source(source: bytes, options: Sequence[str]) -> bytes:
    """Return machine code for a GPU; raise RuntimeError with the compiler's words."""
    nvrtc, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None),
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


class Module:
    """Loaded machine code, in torch's context of a GPU."""

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
        """Launch a kernel with this many blocks, threads and bytes of shared memory."""
        if not blocks:
            return
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
