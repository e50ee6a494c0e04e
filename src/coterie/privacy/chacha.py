"""Standard normals from a key: ChaCha20 (RFC 8439) and the inverse normal distribution function.

Normal i of a key takes the words 4 (i mod 4) to 4 (i mod 4) + 3 of block i // 4 of the key stream,
with nonce 0. Of these 128 bits one is the sign and 127 are the tail probability p, which
|x| = -Phi^-1(p) inverts in float64: Wichura 1988, "Algorithm AS 241: the percentage points of the
normal distribution", routine PPND16, about one part in 10^16. Every operation is one of IEEE 754
(+, -, *, /, sqrt, and a logarithm made of them; no product is fused with a sum), so that every
processor and every GPU computes the same number to the last bit from the same key.

**Guarantee:** if the key is uniform and nobody learns it, the words are indistinguishable from
uniform ones to any feasible computation, which is the assumption under which the operating
system's own generator is used (Linux: ChaCha20 as well; ADR 9). A key serves once: it has no
second stream. Tests: tests/privacy/test_chacha.py (RFC 8439, the package cryptography, a sampler
of arbitrary precision, exact cell counts), tests/statistics/test_noise.py.

One file holds all kernels because numba's cache does not see changes in other files.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
from numba import get_num_threads, njit
from numpy.typing import NDArray

from coterie.core.kernels import compiled

Fun = TypeVar("Fun", bound=Callable[..., Any])

MOST_NORMALS = 1 << 34
"""A block counter of 32 bits, four normals per block."""
LANES = 16  # blocks that are computed together, so that the compiler uses vectors
_TASK = 64  # least groups of lanes per task of a thread
_SCALE = 2.0**-64
CENTRE = 0.075  # smaller tail probabilities take the logarithm

# Coefficients of PPND16, from the highest power down: numerators and denominators of its three
# parts (the denominators end with 1).
A = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
B = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
C = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
D = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
E = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
F = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)
# The logarithm: fdlibm's e_log.c, below one unit in the last place.
LOG = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)
LN2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)


def normals_of_keys(keys: NDArray[np.uint32], count: int) -> NDArray[np.float64]:
    """Return `count` standard normals of each key, (k, count); keys are (k, 8) words."""
    check_keys(keys, count)
    keys = keys.copy()  # writable and contiguous: one compiled type
    out = np.empty((len(keys), count))
    groups = -(-count // (4 * LANES))
    share = max(_TASK, groups * len(keys) // (4 * get_num_threads()))
    tasks = [
        (key, first, min(first + share, groups), row)
        for key, row in zip(keys, out, strict=True)
        for first in range(0, groups, share)
    ]
    if len(tasks) == 1 or get_num_threads() == 1:
        for task in tasks:
            _fill(*task)
    else:
        with ThreadPoolExecutor(get_num_threads()) as pool:
            for _ in pool.map(lambda task: _fill(*task), tasks):
                pass
    return out


def stream(key: NDArray[np.uint32], blocks: int) -> NDArray[np.uint32]:
    """Return the first blocks of a key's stream, (blocks, 16) words: for tests and comparisons."""
    groups = -(-blocks // LANES)
    out = np.empty((groups * LANES, 16), dtype=np.uint32)
    words = np.empty((16, LANES), dtype=np.uint32)
    key = key.copy()
    for group in range(groups):
        _blocks(key, group * LANES, words)
        out[group * LANES : (group + 1) * LANES] = words.T
    return out[:blocks]


def magnitudes(tails: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -Phi^-1 of probabilities from 2^-129 to 1/2, as the kernels compute it."""
    flat = np.ascontiguousarray(tails, dtype=np.float64).reshape(-1)
    out = np.empty_like(flat)
    _invert(flat, flat.view(np.int64), out)
    return out.reshape(np.shape(tails))


def check_keys(keys: NDArray[np.uint32], count: int) -> None:
    """Raise ValueError for keys of another type or shape, or more normals than a key has."""
    if keys.dtype != np.uint32 or keys.ndim != 2 or keys.shape[1] != 8:
        raise ValueError(f"keys of {keys.dtype} and shape {keys.shape}: expected uint32, (k, 8)")
    if not 0 <= count <= MOST_NORMALS:
        raise ValueError(f"count = {count}: expected 0 to {MOST_NORMALS}, the length of a stream")


def _compiled(function: Fun) -> Fun:
    return compiled(nogil=True, error_model="numpy")(function)


def _inlined(function: Fun) -> Fun:
    return cast(Fun, njit(inline="always", error_model="numpy")(function))


@_inlined
def _turn(x: Any, by: int) -> Any:
    return np.uint32(x << np.uint32(by)) | np.uint32(x >> np.uint32(32 - by))


@_inlined
def _quarter(x: Any, a: int, b: int, c: int, d: int) -> None:
    for i in range(LANES):
        xa, xb, xc, xd = x[a, i], x[b, i], x[c, i], x[d, i]
        xa = np.uint32(xa + xb)
        xd = _turn(np.uint32(xd ^ xa), 16)
        xc = np.uint32(xc + xd)
        xb = _turn(np.uint32(xb ^ xc), 12)
        xa = np.uint32(xa + xb)
        xd = _turn(np.uint32(xd ^ xa), 8)
        xc = np.uint32(xc + xd)
        xb = _turn(np.uint32(xb ^ xc), 7)
        x[a, i], x[b, i], x[c, i], x[d, i] = xa, xb, xc, xd


@_compiled
def _blocks(key: Any, first: int, x: Any) -> None:
    """Fill x, (16, lanes), with the blocks of numbers first to first + lanes - 1."""
    for i in range(LANES):
        x[0, i], x[1, i] = 0x61707865, 0x3320646E
        x[2, i], x[3, i] = 0x79622D32, 0x6B206574
        for k in range(8):
            x[4 + k, i] = key[k]
        x[12, i] = first + i
        x[13, i], x[14, i], x[15, i] = 0, 0, 0
    for _ in range(10):
        for k in range(4):
            _quarter(x, k, k + 4, k + 8, k + 12)
        _quarter(x, 0, 5, 10, 15)
        _quarter(x, 1, 6, 11, 12)
        _quarter(x, 2, 7, 8, 13)
        _quarter(x, 3, 4, 9, 14)
    for i in range(LANES):
        x[0, i] += np.uint32(0x61707865)
        x[1, i] += np.uint32(0x3320646E)
        x[2, i] += np.uint32(0x79622D32)
        x[3, i] += np.uint32(0x6B206574)
        for k in range(8):
            x[4 + k, i] += key[k]
        x[12, i] += np.uint32(first + i)


@_inlined
def _poly(x: Any, by: Any) -> Any:
    total = by[0]
    for k in range(1, 8):
        total = total * x + by[k]
    return total


@_inlined
def _minus_log(bits: Any) -> Any:
    """Return -log of a normal number from its bits."""
    power = (bits >> 52) - 1023
    mantissa = 1.0 + (bits & 0xFFFFFFFFFFFFF) * 2.0**-52
    if mantissa > 1.4142135623730951:
        mantissa *= 0.5
        power += 1
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    rest = LOG[0]
    for k in range(1, 7):
        rest = rest * z + LOG[k]
    rest *= z
    half = 0.5 * f * f
    return half - (s * (half + rest) + power * LN2[1]) - f - power * LN2[0]


@_compiled
def _invert(tails: Any, bits: Any, out: Any) -> None:
    """Put -Phi^-1 of tail probabilities, given with their bits, into out."""
    for i in range(len(tails)):
        q = 0.5 - tails[i]
        r = 0.180625 - q * q
        out[i] = q * _poly(r, A) / _poly(r, B)
    for i in range(len(tails)):
        if tails[i] < CENTRE:
            r = np.sqrt(_minus_log(bits[i]))
            if r <= 5.0:
                out[i] = _poly(r - 1.6, C) / _poly(r - 1.6, D)
            else:
                out[i] = _poly(r - 5.0, E) / _poly(r - 5.0, F)


@_compiled
def _split(x: Any, tails: Any, signs: Any) -> None:
    """Put the tail probabilities and signs of blocks x into arrays, first normals first."""
    for k in range(4):
        for i in range(LANES):
            word = np.uint64(x[4 * k, i]) | np.uint64(x[4 * k + 1, i]) << np.uint64(32)
            finer = np.uint64(x[4 * k + 2, i]) | np.uint64(x[4 * k + 3, i]) << np.uint64(32)
            fraction = (np.float64(finer) + 0.5) * _SCALE
            tails[k * LANES + i] = (np.float64(word >> np.uint64(1)) + fraction) * _SCALE
            signs[k * LANES + i] = 1.0 - 2.0 * np.float64(word & np.uint64(1))


@_compiled
def _fill(key: Any, first: int, last: int, row: Any) -> None:
    """Put the normals of groups first to last - 1 of a key into their places of row."""
    x = np.empty((16, LANES), dtype=np.uint32)
    tails, found = np.empty(4 * LANES), np.empty(4 * LANES)
    signs, bits = np.empty(4 * LANES), tails.view(np.int64)
    for group in range(first, last):
        _blocks(key, group * LANES, x)
        _split(x, tails, signs)
        _invert(tails, bits, found)
        start = group * 4 * LANES
        for i in range(LANES):
            for k in range(4):
                at = start + 4 * i + k
                if at < len(row):
                    row[at] = signs[k * LANES + i] * found[k * LANES + i]
