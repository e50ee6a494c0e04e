"""The kernels of `chacha` on a GPU, in Triton: the same bits from the same key.

Imported only where the noise is wanted on a GPU. Constants come in a float64 tensor, since Triton
may take a Python float as float32, and no product is fused with a sum. `normals_on` compares with
the CPU before the first use on a device. Tests: tests/privacy/test_chacha.py, without a GPU in
Triton's interpreter.
"""

import warnings
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from coterie.privacy import chacha

_BLOCKS = 128  # blocks of the key stream per program
_TABLE = [
    *(2.0**-64, 0.5, 0.180625, chacha.CENTRE, 2.0**-52, 2.0**0.5, 1.6, 5.0),
    *(*chacha.LN2, 1.0, 2.0, *[0.0] * 4, *chacha.LOG, 0.0),
    *(*chacha.A, *chacha.B, *chacha.C, *chacha.D, *chacha.E, *chacha.F),
]


def normals_on(device: torch.device, keys: NDArray[np.uint32], count: int) -> Tensor | None:
    """Return the normals of `chacha.normals_of_keys` on a GPU; None if it cannot compute them."""
    return normals_of_keys(keys, count, device) if _agrees(device) else None


@cache
def _agrees(device: torch.device) -> bool:
    """Return whether the device computes the bits of the CPU, on keys for this test only."""
    keys = np.arange(24, dtype=np.uint32).reshape(3, 8)
    try:
        found = normals_of_keys(keys, 50_001, device).cpu().numpy()
        if np.array_equal(found, chacha.normals_of_keys(keys, 50_001)):
            return True
        why = "its normals differ from those of the CPU"
    except Exception as error:  # no compiler, an old GPU: the CPU draws the same numbers
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"noise is drawn on the CPU, not on {device}: {why}", stacklevel=3)
    return False


def normals_of_keys(keys: NDArray[np.uint32], count: int, device: torch.device) -> Tensor:
    """Return what `chacha.normals_of_keys` returns, as a tensor on the device."""
    chacha.check_keys(keys, count)
    out = torch.empty(len(keys), count, dtype=torch.float64, device=device)
    blocks = -(-count // 4)
    given = torch.from_numpy(keys.view(np.int32).copy()).to(device)
    table = torch.tensor(_TABLE, dtype=torch.float64, device=device)
    if len(keys) and count:
        grid = (triton.cdiv(blocks, _BLOCKS), len(keys))
        _fill[grid](given, table, out, blocks, count, BLOCKS=_BLOCKS, enable_fp_fusion=False)
    return out


@triton.jit
def _turn(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _turn(d ^ a, 16)
    c += d
    b = _turn(b ^ c, 12)
    a += b
    d = _turn(d ^ a, 8)
    c += d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(key, place, like):
    return tl.load(key + place).to(tl.uint32, bitcast=True) + like


@triton.jit
def _blocks(key, count):
    nil = count * 0
    k0, k1, k2, k3 = _word(key, 0, nil), _word(key, 1, nil), _word(key, 2, nil), _word(key, 3, nil)
    k4, k5, k6, k7 = _word(key, 4, nil), _word(key, 5, nil), _word(key, 6, nil), _word(key, 7, nil)
    c0, c1, c2, c3 = nil + 0x61707865, nil + 0x3320646E, nil + 0x79622D32, nil + 0x6B206574
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, count, nil, nil, nil
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3, x4, x5 = x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1
    x6, x7, x8, x9, x10, x11 = x6 + k2, x7 + k3, x8 + k4, x9 + k5, x10 + k6, x11 + k7
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12 + count, x13, x14, x15


@triton.jit
def _poly(x, table, at: tl.constexpr):
    total = tl.load(table + at) + x * tl.load(table + 12)
    for k in tl.static_range(1, 8):
        total = total * x + tl.load(table + at + k)
    return total


@triton.jit
def _minus_log(value, table):
    bits = value.to(tl.int64, bitcast=True)
    power = (bits >> 52) - 1023
    mantissa = tl.load(table + 10) + (bits & 0xFFFFFFFFFFFFF).to(tl.float64) * tl.load(table + 4)
    large = mantissa > tl.load(table + 5)
    mantissa = tl.where(large, mantissa * tl.load(table + 1), mantissa)
    exponent = tl.where(large, power + 1, power).to(tl.float64)
    f = mantissa - tl.load(table + 10)
    s = f / (tl.load(table + 11) + f)
    z = s * s
    rest = tl.load(table + 16) + z * tl.load(table + 12)
    for k in tl.static_range(1, 7):
        rest = rest * z + tl.load(table + 16 + k)
    rest = rest * z
    half = tl.load(table + 1) * f * f
    return (half - (s * (half + rest) + exponent * tl.load(table + 9)) - f) - exponent * tl.load(
        table + 8
    )


@triton.jit
def _normal(a, b, c, d, table):
    word = a.to(tl.uint64) | (b.to(tl.uint64) << 32)
    finer = c.to(tl.uint64) | (d.to(tl.uint64) << 32)
    scale, half = tl.load(table), tl.load(table + 1)
    fraction = (finer.to(tl.float64) + half) * scale
    tail = ((word >> 1).to(tl.float64) + fraction) * scale
    q = half - tail
    r = tl.load(table + 2) - q * q
    centre = q * _poly(r, table, 24) / _poly(r, table, 32)
    r = tl.sqrt(_minus_log(tail, table))
    near, far = r - tl.load(table + 6), r - tl.load(table + 7)
    middle = _poly(near, table, 40) / _poly(near, table, 48)
    end = _poly(far, table, 56) / _poly(far, table, 64)
    size = tl.where(r <= tl.load(table + 7), middle, end)
    size = tl.where(tail < tl.load(table + 3), size, centre)
    return tl.where((word & 1) == 1, -size, size)


@triton.jit
def _fill(key, table, out, blocks, count, BLOCKS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    x = _blocks(key + row * 8, i.to(tl.uint32))
    at = out + row * count
    for k in tl.static_range(4):
        place = 4 * i + k
        drawn = _normal(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], table)
        tl.store(at + place, drawn, mask=place < count)
