"""Between numbers on a public grid and the ring Z/2^64 that masks live in.

Contributions are whole multiples of their mechanism's public step, a power of two, so that nothing
is rounded here: x becomes x/step, negative numbers from the top of the ring (two's complement), and
sums in the ring are the sums of the contributions, exactly. A sum outside -2^63 <= x/step < 2^63
wraps; honest sums are at most 2^53 steps, and what a hostile site adds is bounded afterwards.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

MOST_STEPS = 1 << 62
"""A number of a site must be below this many steps."""


def to_ring(
    arrays: Mapping[str, NDArray[np.float64]], steps: Mapping[str, float]
) -> NDArray[np.uint64]:
    """Write arrays as one vector of the ring: leaves in the order of their names, flattened.

    Raises:
        ValueError: If a number is not a whole multiple of its leaf's step, or too large.
    """
    _check_steps(set(arrays), steps)
    parts = [_count(name, arrays[name], steps[name]) for name in sorted(arrays)]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def from_ring(
    vector: NDArray[np.uint64], shapes: Mapping[str, tuple[int, ...]], steps: Mapping[str, float]
) -> dict[str, NDArray[np.float64]]:
    """Read arrays from a vector of the ring; numbers above the middle of the ring are negative.

    Raises:
        ValueError: If the vector is not of these shapes.
    """
    _check_steps(set(shapes), steps)
    sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
    if vector.dtype != np.uint64 or vector.shape != (sum(sizes.values()),):
        raise ValueError(
            f"a vector of {vector.dtype} {vector.shape}: expected uint64 ({sum(sizes.values())},)"
        )
    signed, found, at = np.ascontiguousarray(vector).view(np.int64), {}, 0
    for name, size in sizes.items():
        counts = signed[at : at + size].astype(np.float64)
        found[name] = (counts * steps[name]).reshape(shapes[name])
        at += size
    return found


def _count(name: str, array: NDArray[np.float64], step: float) -> NDArray[np.uint64]:
    numbers = np.asarray(array, dtype=np.float64).ravel()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        counts = numbers / step
        # The product finds what the division lost: a number far below the step becomes 0 in it.
        whole = np.isfinite(counts) & (np.floor(counts) == counts) & (counts * step == numbers)
    if not whole.all():
        at = int(np.argmin(whole))
        raise ValueError(
            f"{name}[{at}] = {numbers[at]!r} is not a whole multiple of {step!r}: put "
            "contributions on the mechanism's grid first"
        )
    if np.any(np.abs(counts) >= MOST_STEPS):
        at = int(np.argmax(np.abs(counts)))
        raise ValueError(
            f"{name}[{at}] = {numbers[at]!r} is 2^62 steps of {step!r} or more: bound it first"
        )
    return counts.astype(np.int64).view(np.uint64)


def _check_steps(names: set[str], steps: Mapping[str, float]) -> None:
    if names != set(steps):
        raise ValueError(
            f"leaves {sorted(names)} with steps for {sorted(steps)}: expected one step a leaf"
        )
    for name, step in steps.items():
        if not 0 < step < math.inf or math.frexp(step)[0] != 0.5:
            raise ValueError(f"step {step!r} of {name}: expected a power of two")
