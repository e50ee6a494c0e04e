"""Sums of clipped rows with noise on a GPU, in Triton: the releases of `mechanisms`, fused.

`sum_rows` reads the rows twice. The first pass adds each row's squares in float64. The second cuts
the row to the bound, rounds it to the public grid, adds the client's own noise under local noise,
and adds the multiples of the grid over clients, atomically: such sums are exact in float64, so no
order moves a bit. `add_noise` adds central noise to a sum and rounds it to the grid of releases.

Bounds and grid steps come in a float64 tensor: Triton may take a Python float as float32, and a
bound that is rounded up would be exceeded. No product is fused with a sum. Integers are rounded by
adding and subtracting 1.5 * 2^52, which is exact below 2^51.

**Guarantee:** a row that leaves `sum_rows` is, bit by bit, the one of the CPU path for the same
norm, and noise is bit by bit that of `chacha` for the same key. Norms are summed in another order
and may differ by a relative 2^-52 times a few; both are raised by more than their error, so the
bound holds in each. `serves` compares a device with the CPU before its first use, and says no if
any number differs. Tests: tests/privacy/test_sums_gpu.py.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from coterie.privacy import chacha
from coterie.privacy.chacha_gpu import _TABLE, _blocks, _normal

Floats = NDArray[np.float64]
_LARGEST = 2.0**50
"""Grid steps of noise that the kernels round exactly."""
_FARTHEST = 14.0
"""No normal of `chacha` is as large: tail probabilities are at least 2^-129."""
_FACTS = len(_TABLE)  # where the facts begin in the table
_SPLIT, _LANES = 16, 1024  # programs for a row's norm, and numbers that one reads at a time
_COLUMNS, _CLIENTS = 512, 8  # columns and clients of a program of a sum
_SENDERS = 4  # clients of a program of a sum of messages
_STREAM = 256  # blocks of the key stream of its program


@dataclass(frozen=True)
class Facts:
    """The public numbers of a Gaussian release.

    Attributes:
        limit: The bound on a row's norm before it is rounded.
        raised: Factor by which a computed norm is raised, for rounding errors.
        step: The grid of sums.
        noise: Standard deviation of the noise, in grid steps.
        coarse: The grid of releases, or of messages.
    """

    limit: float
    raised: float
    step: float
    noise: float
    coarse: float

    @property
    def fits(self) -> bool:
        """Return whether the noise stays in the range of exact rounding."""
        return _FARTHEST * self.noise < _LARGEST


def sum_rows(
    rows: Tensor, facts: Facts, keys: NDArray[np.uint32] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of clipped, rounded rows (c, n), and the factor kept of each.

    With `keys`, each row gets the noise of its own key, as a message of local noise.
    """
    clients, numbers = rows.shape
    table, kept = _table(facts, rows.device), _factors(rows, facts)
    total = torch.zeros(numbers, dtype=torch.float64, device=rows.device)
    how = {"FACTS": _FACTS, "enable_fp_fusion": False}
    if keys is None:
        _sum[(triton.cdiv(numbers, _COLUMNS), triton.cdiv(clients, _CLIENTS))](
            rows, kept, table, total, numbers, clients, COLUMNS=_COLUMNS, EACH=_CLIENTS, **how
        )
    else:
        chacha.check_keys(keys, numbers)
        blocks = triton.cdiv(numbers, 4)
        _sum_messages[(triton.cdiv(blocks, _STREAM), triton.cdiv(clients, _SENDERS))](
            rows, kept, table, _sent(keys, rows.device), total, numbers, clients,
            STREAM=_STREAM, EACH=_SENDERS, **how,
        )  # fmt: skip
    return total, kept


def clip_rows(rows: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
    """Return clipped rows on the grid of sums, (c, n) in float64, and the factor kept of each."""
    clients, numbers = rows.shape
    out = torch.empty(clients, numbers, dtype=torch.float64, device=rows.device)
    kept = _factors(rows, facts)
    _clip[(triton.cdiv(numbers, _COLUMNS), clients)](
        rows, kept, _table(facts, rows.device), out, numbers, COLUMNS=_COLUMNS,
        FACTS=_FACTS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, kept


def add_noise(total: Tensor, facts: Facts, key: NDArray[np.uint32]) -> Tensor:
    """Return a flat sum plus the noise of a key, (1, 8), rounded to the grid of releases."""
    chacha.check_keys(key, total.numel())
    out, blocks = torch.empty_like(total), triton.cdiv(total.numel(), 4)
    stream = 128 if blocks < 1 << 18 else 512  # few programs would leave a GPU idle
    _noisy[(triton.cdiv(blocks, stream),)](
        total, _sent(key, total.device), _table(facts, total.device), out, total.numel(),
        STREAM=stream, FACTS=_FACTS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def serves(device: torch.device) -> bool:
    """Return whether this device makes the sums and the noise of the CPU."""
    return device.type == "cuda" and _agrees(device)


@cache
def _agrees(device: torch.device) -> bool:
    try:
        why = differing(device)
    except Exception as error:  # no compiler, an old GPU: the CPU makes the same releases
        why = f"{type(error).__name__}: {error}"
    if why:
        warnings.warn(f"releases are made on the CPU, not on {device}: {why}", stacklevel=4)
    return not why


def differing(device: torch.device, clients: int = 19, numbers: int = 4099) -> str:
    """Return what a device computes otherwise than the CPU, on made-up rows and keys; or ""."""
    facts = Facts(0.7, 1 + (numbers + 16) * 2.0**-52, 2.0**-21, 0.7 * 1.3 * 2**21, 2.0**-18)
    made = np.random.default_rng(0).standard_normal((clients, numbers)).astype(np.float32)
    made *= np.float32(2.0) ** np.arange(-12, clients - 12, dtype=np.float32)[:, None]
    made[3, -1], made[7, 0], made[8, numbers // 2] = np.nan, np.inf, 1e38
    keys = np.arange(8 * clients, dtype=np.uint32).reshape(clients, 8)
    rows = torch.from_numpy(made).to(device)
    wanted, factors = on_cpu(made, facts)
    plain, kept = sum_rows(rows, facts)
    clipped, again = clip_rows(rows, facts)
    own = np.rint(chacha.normals_of_keys(keys, numbers) * facts.noise) * facts.step
    messages = np.rint((wanted + own) / facts.coarse) * facts.coarse
    noisy = np.rint((wanted.sum(axis=0) + own[0]) / facts.coarse) * facts.coarse
    found = {
        "factors": torch.equal(kept, again)
        and np.allclose(kept.cpu().numpy(), factors, rtol=1e-12, atol=0),
        "sums": np.array_equal(plain.cpu().numpy(), wanted.sum(axis=0)),
        "rows": np.array_equal(clipped.cpu().numpy(), wanted),
        "messages": np.array_equal(
            sum_rows(rows, facts, keys)[0].cpu().numpy(), messages.sum(axis=0)
        ),
        "noise": np.array_equal(add_noise(plain, facts, keys[:1]).cpu().numpy(), noisy),
    }
    wrong = [name for name, same in found.items() if not same]
    return f"its {', '.join(wrong)} differ from those of the CPU" if wrong else ""


def on_cpu(
    rows: NDArray[np.float32], facts: Facts
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return clipped rows on the grid and their factors, by NumPy: for comparison."""
    wide = rows.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.sqrt(np.square(wide).sum(axis=1)) * facts.raised
        good = np.isfinite(norms)
        factors = np.where(norms > facts.limit, facts.limit / np.where(norms > 0, norms, 1), 1.0)
        factors = np.where(good, factors, 0.0)
        cut = np.where(good[:, None], wide * factors[:, None], 0.0)
    return np.rint(cut / facts.step) * facts.step, factors


def flat_rows(leaves: Sequence[Tensor]) -> Tensor:
    """Return stacked leaves side by side, (c, n)."""
    flats = [leaf.reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in leaves]
    return torch.cat(flats, dim=1) if len(flats) > 1 else flats[0].contiguous()


def _factors(rows: Tensor, facts: Facts) -> Tensor:
    """Return the factor kept of each row."""
    clients, numbers = rows.shape
    part = torch.empty(clients, _SPLIT, dtype=torch.float64, device=rows.device)
    kept = torch.empty(clients, dtype=torch.float64, device=rows.device)
    _squares[(_SPLIT, clients)](
        rows, part, numbers, TRIPS=triton.cdiv(numbers, _SPLIT * _LANES), SPLIT=_SPLIT,
        LANES=_LANES, enable_fp_fusion=False,
    )  # fmt: skip
    table = _table(facts, rows.device)
    _kept[(clients,)](part, table, kept, FACTS=_FACTS, SPLIT=_SPLIT, enable_fp_fusion=False)
    return kept


@lru_cache(maxsize=64)
def _table(facts: Facts, device: torch.device) -> Tensor:
    numbers = (facts.limit, facts.raised, 1 / facts.step, facts.step, facts.noise,
               1 / facts.coarse, facts.coarse, 1.5 * 2.0**52, math.inf, 2.0**51)  # fmt: skip
    return torch.tensor([*_TABLE, *numbers], dtype=torch.float64, device=device)


def _sent(keys: NDArray[np.uint32], device: torch.device) -> Tensor:
    return torch.from_numpy(keys.view(np.int32).copy()).to(device, non_blocking=True)


@triton.jit
def _squares(
    rows, part, numbers, TRIPS: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    client, split = tl.program_id(1).to(tl.int64), tl.program_id(0)
    total = tl.zeros((LANES,), tl.float64)
    for trip in range(TRIPS):
        j = (trip * SPLIT + split) * LANES + tl.arange(0, LANES)
        x = tl.load(rows + client * numbers + j, mask=j < numbers, other=0.0).to(tl.float64)
        total += x * x
    tl.store(part + client * SPLIT + split, tl.sum(total, axis=0))


@triton.jit
def _rint(x, table, FACTS: tl.constexpr):
    """Round to whole numbers, halves to even; larger numbers than that holds for are whole."""
    large, size = tl.load(table + FACTS + 7), tl.abs(x)
    size = tl.where(size < tl.load(table + FACTS + 9), (size + large) - large, size)
    return tl.where(x < 0, -size, size)


@triton.jit
def _kept(part, table, kept, FACTS: tl.constexpr, SPLIT: tl.constexpr):
    """Store the factor of a client, 0 if a number of its row is not finite."""
    client = tl.program_id(0)
    limit, one = tl.load(table + FACTS), tl.load(table + 10)
    squares = tl.sum(tl.load(part + client * SPLIT + tl.arange(0, SPLIT)), axis=0)
    norm = tl.sqrt(squares) * tl.load(table + FACTS + 1)
    factor = tl.where(norm > limit, limit / tl.where(norm > 0, norm, one), one)
    good = norm < tl.load(table + FACTS + 8)  # false for NaN as well
    tl.store(kept + client, tl.where(good, factor, one * 0))


@triton.jit
def _steps(rows, at, mask, factor, table, FACTS: tl.constexpr):
    """Return numbers of a clipped row in whole grid steps."""
    x = tl.load(rows + at, mask=mask, other=0.0).to(tl.float64)
    cut = _rint(x * factor * tl.load(table + FACTS + 2), table, FACTS)
    return tl.where(factor > 0, cut, 0.0)


@triton.jit
def _sum(
    rows, kept, table, total, numbers, clients,
    COLUMNS: tl.constexpr, EACH: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * EACH
    found = tl.zeros((COLUMNS,), tl.float64)
    for k in range(EACH):
        client = tl.minimum(first + k, clients - 1)
        mask = (j < numbers) & (first + k < clients)
        factor = tl.load(kept + client)
        found += _steps(rows, client.to(tl.int64) * numbers + j, mask, factor, table, FACTS)
    tl.atomic_add(total + j, found * tl.load(table + FACTS + 3), mask=j < numbers)


@triton.jit
def _clip(
    rows, kept, table, out, numbers, COLUMNS: tl.constexpr, FACTS: tl.constexpr
):  # fmt: skip
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    client = tl.program_id(1).to(tl.int64)
    factor = tl.load(kept + client)
    at = client * numbers + j
    found = _steps(rows, at, j < numbers, factor, table, FACTS) * tl.load(table + FACTS + 3)
    tl.store(out + at, found, mask=j < numbers)


@triton.jit
def _coarse(steps, table, FACTS: tl.constexpr):
    """Return whole steps of the grid of sums, rounded to the grid of releases."""
    value = steps * tl.load(table + FACTS + 3) * tl.load(table + FACTS + 5)
    return _rint(value, table, FACTS) * tl.load(table + FACTS + 6)


@triton.jit
def _message(rows, at, mask, factor, drawn, table, FACTS: tl.constexpr):
    """Return a client's numbers with its noise, as it sends them; 0 outside the mask."""
    noise = _rint(drawn * tl.load(table + FACTS + 4), table, FACTS)
    sent = _coarse(_steps(rows, at, mask, factor, table, FACTS) + noise, table, FACTS)
    return tl.where(mask, sent, 0.0)


@triton.jit
def _sum_messages(
    rows, kept, table, keys, total, numbers, clients,
    STREAM: tl.constexpr, EACH: tl.constexpr, FACTS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * STREAM + tl.arange(0, STREAM)
    j, first = 4 * i, tl.program_id(1) * EACH
    a0 = tl.zeros((STREAM,), tl.float64)
    a1, a2, a3 = a0, a0, a0
    for k in range(EACH):
        client, inside = tl.minimum(first + k, clients - 1), first + k < clients
        factor = tl.load(kept + client)
        at = client.to(tl.int64) * numbers + j
        x = _blocks(keys + client * 8, i.to(tl.uint32))
        z = _normal(x[0], x[1], x[2], x[3], table)
        a0 += _message(rows, at, inside & (j < numbers), factor, z, table, FACTS)
        z = _normal(x[4], x[5], x[6], x[7], table)
        a1 += _message(rows, at + 1, inside & (j + 1 < numbers), factor, z, table, FACTS)
        z = _normal(x[8], x[9], x[10], x[11], table)
        a2 += _message(rows, at + 2, inside & (j + 2 < numbers), factor, z, table, FACTS)
        z = _normal(x[12], x[13], x[14], x[15], table)
        a3 += _message(rows, at + 3, inside & (j + 3 < numbers), factor, z, table, FACTS)
    tl.atomic_add(total + j, a0, mask=j < numbers)
    tl.atomic_add(total + j + 1, a1, mask=j + 1 < numbers)
    tl.atomic_add(total + j + 2, a2, mask=j + 2 < numbers)
    tl.atomic_add(total + j + 3, a3, mask=j + 3 < numbers)


@triton.jit
def _noisy(total, key, table, out, numbers, STREAM: tl.constexpr, FACTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * STREAM + tl.arange(0, STREAM)
    x = _blocks(key, i.to(tl.uint32))
    for k in tl.static_range(4):
        j = 4 * i + k
        drawn = _normal(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], table)
        noise = _rint(drawn * tl.load(table + FACTS + 4), table, FACTS)
        steps = tl.load(total + j, mask=j < numbers, other=0.0) * tl.load(table + FACTS + 2)
        tl.store(out + j, _coarse(steps + noise, table, FACTS), mask=j < numbers)
