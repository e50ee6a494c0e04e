"""Mechanisms: clip on the client, sum, perturb on the server, and state the event of the release.

A mechanism owns everything that is known about it: sensitivity, event, norm bounds of incoming
sums, public grid, and the standard deviation of its noise. No other module tests its type.

A mechanism of another package is a frozen dataclass that derives from `Mechanism` (or from a class
below) and has the fields `bound` and `noise_multiplier`. It defines six members:

- `clip(rows)`: the bounded rows, and the factor kept of each;
- `perturb(total, entropy)`: a sum plus noise, drawn from `entropy` only;
- `event()`: `Gaussian` for mu-GDP, `Laplace` for pure epsilon-DP, more private with more noise;
- `norm_bounds(totals)`: norm, bound and grid step of one client's part of a sum;
- `standard_deviations(totals)` and `noise_over_bound`: the size of the noise.

`coterie.privacy.noise.register_mechanism("name")`, or an entry point `name` in the group
`coterie.mechanisms`, makes it a choice of `Privacy(noise="name")`: calibration searches for the
least `noise_multiplier` whose events meet the budget.

Grids
-----
`GaussianSum` works on a public grid of step g, a power of two. A clipped row is rounded to the grid
*before* it leaves the client, with the clip lowered so that the norm after rounding is at most the
bound. Sums of multiples of g are exact in float64, in any order, and the noise is rounded to the
same grid. As rounding x + N to a grid that x lies on equals x + rounded N, the release is a
function of the ideal, real-valued Gaussian mechanism: no low-order bits of a sum survive for a
floating-point attack (Mironov 2012, "On significance of the least significant bits for differential
privacy"). ADR 0009 describes what remains. `LaplaceSum` draws integers exactly.

Blocks
------
A contribution may hold blocks of different units, such as a mean, variances and a residual. Block b
is clipped to l2 norm B_b and gets the share f_b of mu^2, with sum_b f_b = 1: noise of standard
deviation z B_b / sqrt(f_b). All blocks are one Gaussian release: see `BlockSum`.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.tree import Tree, clip_rows, map_arrays, map_leaves, send, size
from coterie.privacy.entropy import ClientSources, Entropy, draw_keys, normals
from coterie.privacy.events import (
    SQRT2,
    Event,
    Gaussian,
    Laplace,
    LocalGaussian,
    NonPrivate,
    Relation,
    check_relation,
)

if TYPE_CHECKING:  # needs Triton, which is imported where a GPU makes a release
    from coterie.privacy.sums_gpu import Facts

Array = NDArray[np.float64]
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a contribution or of a release, by leaf, without the client axis."""
ClientEntropy = Callable[[int], Entropy]
"""Opens the source of a client's own noise, by its id."""
Past = tuple[Array, ...]
"""What noise needs of that of earlier rounds, the last first: a secret of whoever adds noise."""

MOST_CLIENTS = 1 << 22
"""Sums over more clients in a round could exceed 2^53 grid steps, and would not be exact."""
_SHARE_TOLERANCE = 1e-12
"""Shares add up to 1 within this, and the noise is larger by it, as float sums are inexact."""
_MOST_LOCAL_NOISE = 1e5
"""Noise of 2^22 clients of 10^8 numbers then stays below 2^53 grid steps: sums are exact."""
_RARE = 1e-13
"""Largest probability that honest local noise exceeds one limit; there are two, norm and range."""


class Shape(Enum):
    """The function of the clients' contributions that a method needs released.

    NONE: nothing. SUM: their sum. GRAM: the sum of w w^T over vectors w, a symmetric matrix.
    SQUARES: its diagonal only. ROWS: each client's own, in a row of its own.
    POOLED: all rows in clear, in one place; never private, for baselines.
    """

    NONE = "none"
    SUM = "sum"
    GRAM = "gram"
    SQUARES = "squares"
    ROWS = "rows"
    POOLED = "pooled"


@dataclass(frozen=True)
class NormBound:
    """A bound on the leaves of one client's part of a sum, which are bounded together.

    The sum of n clients has norm (l1 or l2, `order`) at most n times the bound, no number above n
    times the bound, and lies on a public grid. Local noise inside the sum extends both limits.

    Attributes:
        shapes: The leaves, with their shapes in a sum.
        gram: Whether leaves are symmetric matrices without negative diagonal entries.
        rows: How many rows have a limit each: the number of clients, if each has its own row.
        noise: Standard deviation of one client's noise in the sum.
    """

    shapes: Shapes
    bound: Fraction
    step: float
    order: Literal[1, 2] = 2
    nonnegative: bool = False
    gram: bool = False
    rows: int = 1
    noise: float = 0.0

    @property
    def numbers(self) -> int:
        """How many numbers share one limit."""
        return count_numbers(self.shapes) // self.rows

    def clients(self, ids: NDArray[np.int64]) -> int:
        """Return the number of clients under one limit: one if each has a row of its own."""
        return len(ids) if self.rows == 1 else 1

    def norm_limit(self, clients: int) -> float:
        """Return the limit of the norm of a sum over this many clients.

        With noise: P(|N| > sqrt(d) + t) <= exp(-t^2/2) for d standard normals N, and each of them
        is rounded by at most half a step.
        """
        limit = float(clients * self.bound)
        if self.noise:
            far = math.sqrt(self.numbers) + math.sqrt(-2 * math.log(_RARE))
            limit += self.noise * math.sqrt(clients) * far
            limit += clients * self.step * math.sqrt(self.numbers) / 2
        return limit

    def step_limit(self, clients: int) -> int:
        """Return the limit of a single number of a sum, in whole steps.

        With noise: P(|N| > t) <= exp(-t^2/2) for a normal N; over all numbers, a union bound.
        """
        limit = clients * self.bound / Fraction(self.step)
        if self.noise:
            far = math.sqrt(2 * math.log(max(self.numbers, 1) / _RARE))
            limit += math.ceil(self.noise / self.step * math.sqrt(clients) * far) + clients
        return math.floor(limit)


class Mechanism(ABC):
    """One release: clip, reduce, perturb, and what is known about the result.

    Subclasses are frozen dataclasses.

    Attributes:
        shapes: The shapes that it releases, for mechanisms of other packages.
        order: The norm of `bound`, l1 or l2.
        local: Whether clients add the noise themselves, in `perturb_rows`.
        in_shares: Whether every client adds a share of the noise to the sum, in `add_shares`.
        correlated: Whether noise depends on that of earlier rounds, in `perturb_after`.
        honest: How many clients are trusted to add their noise; 0 for central noise.
    """

    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM,)
    order: ClassVar[Literal[1, 2]] = 2
    local: ClassVar[bool] = False
    in_shares: ClassVar[bool] = False
    correlated: ClassVar[bool] = False
    honest: int = 0
    bound: float

    @property
    def needed(self) -> int:
        """How many clients' noise a sum must carry before it may be released."""
        return self.honest

    @property
    def rows(self) -> int:
        """How many clients have a row of their own in a sum; 0 if rows are added."""
        return 0

    @property
    def nonnegative(self) -> bool:
        """Whether no number of a sum is negative, although it has no norm bound."""
        return False

    @abstractmethod
    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return each client's bounded row, on the grid, and the factor kept of each."""

    def perturb_rows(self, rows: Tree, ids: Tensor, entropy: ClientEntropy) -> Tree:
        """Return clipped rows plus each client's own noise: the last step of local noise."""
        return rows

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Return the sum of bounded rows over clients, exactly; additive over blocks of clients."""
        return sum_rows(rows)

    def sum_bounded(
        self, rows: Tree, ids: Tensor | None, entropy: ClientEntropy | None
    ) -> tuple[Tree, Tensor]:
        """Return the sum of the clipped rows, and the factor kept of each.

        Under local noise each row gets its client's own noise before it is added.
        """
        clipped, kept = self.clip(rows)
        if self.local and ids is not None and entropy is not None:
            clipped = self.perturb_rows(clipped, ids, entropy)
        return self.reduce(clipped, ids), kept

    def fused_on(self, device: torch.device, totals: Shapes) -> bool:
        """Return whether sums and noise are made by kernels on this device, and stay there."""
        return False

    def add_shares(self, total: Tree, ids: Tensor, entropy: ClientEntropy) -> Tree:
        """Return a sum plus these clients' shares of the noise, under noise in shares."""
        return total

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a release for contributions of these shapes."""
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Return how many normals one release needs, to draw them ahead; 0 if none."""
        return 0

    def sensitivity(self, relation: Relation) -> float:
        """Return the largest change of `reduce(clip(rows))` by one client, in the noise's norm."""
        check_relation(relation)
        return self.bound * (2.0 if relation == "replace" else 1.0)

    @abstractmethod
    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return a sum plus noise."""

    def perturb_after(self, total: Tree, entropy: Entropy, past: Past) -> tuple[Tree, Past]:
        """Return a sum plus noise that may depend on earlier noise, and what later noise needs."""
        return self.perturb(total, entropy), ()

    @abstractmethod
    def event(self) -> Event:
        """Return the release as the ledger records it."""

    @abstractmethod
    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return the bounds of one client's part of a sum; none for sums without privacy."""

    @abstractmethod
    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return the standard deviation of the noise of one number, by leaf; the largest in it."""

    @property
    @abstractmethod
    def noise_over_bound(self) -> float:
        """Standard deviation of the noise of one number over the bound on one client's part.

        Of the first block, where blocks have bounds of their own.
        """

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise: a public number, for post-processing.

        For symmetric matrices, about its spectral norm.
        """
        numbers = max(count_numbers(totals), 2)
        return max(self.standard_deviations(totals).values()) * math.sqrt(2 * math.log(numbers))

    def grid(self, totals: Shapes) -> dict[str, float] | None:
        """Return the public grid step of a release by leaf, powers of two; None without a grid."""
        found = self.norm_bounds(totals)
        return {name: one.step for one in found for name in one.shapes} if found else None

    def check_secure_sum(self) -> None:  # noqa: B027
        """Raise ValueError if sums out of secure aggregation cannot be bounded at no cost."""

    def of_message(self) -> "Mechanism":
        """Return the central mechanism with the noise of one message; itself if it is central."""
        return self

    def typical_noise(self, like: Tree, entropy: Entropy) -> Tree:
        """Return noise as releases carry it, for sums of these shapes."""
        return self.perturb(map_leaves(torch.zeros_like, like), entropy)

    def reported(self, tree: Tree) -> Tree:
        """Return the leaves of a release whose relative error is reported."""
        return tree


@dataclass(frozen=True)
class Exact(Mechanism):
    """A release without clipping, noise or privacy.

    **Guarantee:** none; its event makes every epsilon infinite.
    """

    shape: Shape = Shape.SUM
    clients: int = 0

    @property
    def rows(self) -> int:
        """The number of clients, if each has a row of its own."""
        return self.clients if self.shape is Shape.ROWS else 0

    @property
    def nonnegative(self) -> bool:
        """Whether the sum is of squares."""
        return self.shape is Shape.SQUARES

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return zeros for rows that are not finite, and the others unchanged."""
        return clip_rows(rows, math.inf)

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Return the function of the rows that `shape` names; a sum on a GPU stays there."""
        if self.shape is Shape.GRAM:
            return gram_rows(rows)
        if self.shape is Shape.SQUARES:
            return sum_rows(map_leaves(torch.square, rows))
        if self.shape is Shape.SUM and is_on_gpu(rows):
            return {name: leaf.sum(dim=0) for name, leaf in rows.items()}
        return sum_rows(rows) if self.shape is Shape.SUM else place_rows(rows, ids, self.clients)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a release."""
        if self.shape is Shape.GRAM:
            return square_shapes(contribution)
        if self.shape is Shape.ROWS:
            return {name: (self.clients, *shape) for name, shape in contribution.items()}
        return contribution

    def sensitivity(self, relation: Relation) -> float:
        """Return infinity."""
        return math.inf

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum unchanged."""
        return dict(total)

    def event(self) -> Event:
        """Return a release without privacy."""
        return NonPrivate()

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return none."""
        return ()

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return zeros."""
        return dict.fromkeys(totals, 0.0)

    @property
    def noise_over_bound(self) -> float:
        """Zero."""
        return 0.0

    def check_secure_sum(self) -> None:
        """Raise ValueError: there is no grid."""
        raise ValueError(
            "a sum without noise has no grid, and secure aggregation adds whole numbers only: give "
            "the plan a budget, or use trust = 'server'"
        )


@dataclass(frozen=True)
class GaussianSum(Mechanism):
    """Sum of rows clipped to l2 norm `bound`, plus N(0, (noise_multiplier * bound)^2 I).

    **Guarantee:** one release that includes the client is mu-GDP for ideal normals (ADR 9 states
    the distance of ours), mu = s / noise_multiplier, s = 1 under zero_out (the client's row becomes
    zeros) and 2 under replace, provided `entropy` returns independent uniform words that nobody
    else learns. The bound holds after floating-point rounding, for rows of any size, NaN and
    infinity included. Tests: tests/properties/test_sensitivity.py, tests/statistics/test_noise.py.
    """

    bound: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        # Far from the limits of float64, so that squares and grid steps are normal numbers.
        check_range("bound", self.bound, 1e-100, 1e100)
        check_range("noise_multiplier", self.noise_multiplier, 1e-100, 1e100)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of one number."""
        return self.noise_multiplier * self.bound

    def step(self, numbers: int) -> float:
        """Return the public grid step for rows of this many numbers, a power of two.

        It is fine against the noise (2^-20 of its standard deviation) and against the clip
        (rounding moves a row by at most 2^-10 of the bound), but at least 2^-30 of the bound, so
        that sums over 2^22 clients are exact in float64.
        """
        fine = min(self.noise_multiplier * 2.0**-20, 2.0**-9 / math.sqrt(max(numbers, 1)))
        return float(2.0 ** math.floor(math.log2(self.bound * max(fine, 2.0**-30))))

    def release_step(self, numbers: int) -> float:
        """Return the public grid step of a release: coarser than `step` if the noise is large.

        A sampler of normals with finitely many outcomes has a lattice of its own. On a grid far
        below the noise a release would show it: at z = 10^6 and 10^6 numbers with a
        log-likelihood ratio of 0.09, where mu = 10^-6 is allowed. On a grid of about 2^-20 of the
        standard deviation every cell collects many outcomes. Rounding is post-processing.
        """
        return max(self.step(numbers), float(2.0 ** math.floor(math.log2(self.deviation) - 20)))

    def on_grid(self, drawn: Array, step: float) -> Array:
        """Return noise from standard normals, rounded to the grid of sums."""
        found = np.asarray(np.multiply(drawn, self.deviation / step))  # of a scalar too
        np.rint(found, out=found)
        found *= step
        return found

    def noisy(self, values: Array, drawn: Array, numbers: int) -> Array:
        """Return values on the grid of sums plus noise, rounded to the grid of releases."""
        coarse = self.release_step(numbers)
        found = self.on_grid(drawn, self.step(numbers))
        found += values
        found /= coarse
        np.rint(found, out=found)
        found *= coarse
        return found

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return rows clipped to the bound minus the rounding, then rounded to the grid."""
        numbers = numbers_per_row(rows)
        step = self.step(numbers)
        clipped, kept = clip_rows(rows, self.bound - step * math.sqrt(numbers) / 2)
        return round_rows(clipped, step), kept

    def fused_on(self, device: torch.device, totals: Shapes) -> bool:
        """Return whether a GPU makes sums and noise: the numbers of the CPU, see `sums_gpu`."""
        if device.type != "cuda" or type(self) not in _FUSED:
            return False
        kernels = _kernels()
        numbers = count_numbers(totals) // max(self.rows, 1)
        return kernels is not None and facts_of(self, numbers).fits and kernels.serves(device)

    def sum_bounded(
        self, rows: Tree, ids: Tensor | None, entropy: ClientEntropy | None
    ) -> tuple[Tree, Tensor]:
        """Return the sum of the clipped rows, on a GPU by one pass over them."""
        leaf, shapes = next(iter(rows.values())), {n: tuple(t.shape[1:]) for n, t in rows.items()}
        plain = all(row.dtype == torch.float32 for row in rows.values())
        if not (plain and len(leaf) and self.fused_on(leaf.device, self.totals(shapes))):
            return super().sum_bounded(rows, ids, entropy)
        from coterie.privacy import sums_gpu

        flat = sums_gpu.flat_rows([rows[name] for name in sorted(rows)])
        return self._sum_on(flat, shapes, ids, entropy)

    def _sum_on(
        self, flat: Tensor, shapes: Shapes, ids: Tensor | None, entropy: ClientEntropy | None
    ) -> tuple[Tree, Tensor]:
        """Return what `sum_bounded` does, of float32 rows side by side on a GPU."""
        from coterie.privacy import sums_gpu

        total, kept = sums_gpu.sum_rows(flat, facts_of(self, flat.shape[1]))
        return split_flat(total, shapes), kept

    def draws(self, totals: Shapes) -> int:
        """Return one normal per number."""
        return count_numbers(totals)

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus Gaussian noise, rounded to the grid of releases."""
        if is_on_gpu(total):
            return self._perturb_on(total, entropy, size(total))
        return self.add_normals(total, normals(entropy, size(total)))

    def _perturb_on(self, total: Tree, entropy: Entropy, numbers: int) -> Tree:
        """Return what `perturb` does, of a sum on a GPU over rows of this many numbers."""
        from coterie.privacy import sums_gpu

        flat = torch.cat([total[name].reshape(-1) for name in sorted(total)])
        noisy = sums_gpu.add_noise(flat, facts_of(self, numbers), draw_keys([entropy]))
        return split_flat(noisy, {name: tuple(leaf.shape) for name, leaf in total.items()})

    def add_normals(self, total: Tree, drawn: Array) -> Tree:
        """Return the sum plus noise of these normals, rounded to the grid of releases."""
        numbers, parts = size(total), split(drawn, total)
        noisy = {name: self.noisy(total[name].numpy(), z, numbers) for name, z in parts.items()}
        return map_arrays(noisy)

    def grid(self, totals: Shapes) -> dict[str, float]:
        """Return the grid of a release, coarser than that of a sum if the noise is large."""
        (one,) = self.norm_bounds(totals)
        numbers = one.numbers
        return dict.fromkeys(totals, self.release_step(numbers))

    def event(self) -> Event:
        """Return a Gaussian release."""
        return Gaussian(self.noise_multiplier)

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return one l2 bound on all leaves."""
        return (NormBound(totals, Fraction(self.bound), self.step(count_numbers(totals))),)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return the same for every leaf."""
        return dict.fromkeys(totals, self.deviation)

    @property
    def noise_over_bound(self) -> float:
        """The noise multiplier."""
        return self.noise_multiplier


@dataclass(frozen=True)
class GaussianRows(GaussianSum):
    """Each client's row clipped to `bound`, in a row of its own, plus Gaussian noise everywhere.

    **Guarantee:** as `GaussianSum`: a client changes only its own row, by at most the bound (twice
    under replace). The order of clients is public. tests/properties/test_moments.py.
    """

    clients: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients < 1:
            raise ValueError(f"clients = {self.clients}: expected at least 1")

    @property
    def rows(self) -> int:
        """The number of clients."""
        return self.clients

    def reduce(self, rows: Tree, ids: Tensor | None = None) -> Tree:
        """Return each row in its place."""
        return place_rows(rows, ids, self.clients)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return shapes with a row for every client."""
        return {name: (self.clients, *shape) for name, shape in contribution.items()}

    def _sum_on(
        self, flat: Tensor, shapes: Shapes, ids: Tensor | None, entropy: ClientEntropy | None
    ) -> tuple[Tree, Tensor]:
        """Return each clipped row in its place, on a GPU."""
        from coterie.privacy import sums_gpu

        clipped, kept = sums_gpu.clip_rows(flat, facts_of(self, flat.shape[1]))
        places = send(_places(ids), flat.device)
        total, used = {}, 0
        for name in sorted(shapes):
            width = math.prod(shapes[name])
            rows = clipped.new_zeros(self.clients, width)
            rows.index_copy_(0, places, clipped[:, used : used + width])
            total[name], used = rows.reshape(self.clients, *shapes[name]), used + width
        return total, kept

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the rows plus Gaussian noise, rounded to the grid of a single row's release."""
        numbers = numbers_per_row(total)
        if is_on_gpu(total):
            return self._perturb_on(total, entropy, numbers)
        drawn = split(normals(entropy, self.clients * numbers), total)
        noisy = {name: self.noisy(total[name].numpy(), z, numbers) for name, z in drawn.items()}
        return map_arrays(noisy)

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return one l2 bound on each row."""
        step = self.step(count_numbers(totals) // self.clients)
        return (NormBound(totals, Fraction(self.bound), step, rows=self.clients),)


@dataclass(frozen=True)
class LocalGaussianSum(GaussianSum):
    """Sum of rows clipped to l2 norm `bound`, each plus N(0, (noise_multiplier * bound)^2 I).

    Each client clips, adds noise from a source of its own, and sends the noisy row; the server only
    adds rows. A sum over n clients carries noise of deviation z C sqrt(n), where central noise of
    the same epsilon against other clients is z C: the cost of a server that is not trusted.

    `noise_multiplier` is of one client; `cohort` is the expected number of clients in a round, a
    public number; for `honest` and `claimed` see `LocalGaussian`.

    **Guarantee:** one message is mu-GDP for ideal normals (ADR 9), mu = s / noise_multiplier, s = 1
    under zero_out (the row becomes zeros, its noise stays) and 2 under replace, against everybody
    who observes it, the server included, provided the client's entropy returns independent uniform
    words that nobody else learns, and the client sends one message per round: an engine must not
    send a second one after a crash. The bound holds after floating-point rounding, for rows of any
    size, NaN and infinity included. For an adversary who observes only the sum, the noise of
    `honest` clients adds up to a Gaussian of deviation sqrt(honest) * noise_multiplier * bound.
    (Sums of rounded normals are not rounded sums. But by Poisson summation their law on the grid
    is, to a factor 1 + exp(-2 pi^2 D^2), D the deviation of a client in grid steps and above 10^4
    for multipliers above 10^-5, that of the ideal sum plus honest - 1 uniform numbers of one step,
    rounded: post-processing of the ideal sum.)
    Tests: tests/properties/test_local.py, tests/statistics/test_local.py.
    """

    local: ClassVar[bool] = True
    cohort: float
    honest: int = 1
    claimed: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.event()
        if self.noise_multiplier > _MOST_LOCAL_NOISE:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier}: expected at most "
                f"{_MOST_LOCAL_NOISE:g} for each client; sums of more noise are not exact"
            )
        if not 0 < self.cohort < math.inf:
            raise ValueError(f"cohort = {self.cohort}: expected a positive number of clients")

    def summed(self) -> GaussianSum:
        """Return the central mechanism with the noise of an expected cohort."""
        return GaussianSum(self.bound, self.noise_multiplier * math.sqrt(self.cohort))

    def of_message(self) -> GaussianSum:
        """Return the central mechanism with the noise of one message."""
        return GaussianSum(self.bound, self.noise_multiplier)

    def perturb_rows(self, rows: Tree, ids: Tensor, entropy: ClientEntropy) -> Tree:
        """Add each client's own noise to its clipped row, in place; `ids` name the sources."""
        numbers = numbers_per_row(rows)
        step, coarse = self.step(numbers), self.release_step(numbers)
        device = next(iter(rows.values())).device
        noise = normals_on(device, _keys_of(ids, entropy, rows), numbers)
        noise.mul_(self.deviation / step).round_().mul_(step)
        used = 0
        for name in sorted(rows):
            width = math.prod(rows[name].shape[1:])
            rows[name].add_(noise[:, used : used + width].reshape(rows[name].shape))
            used += width
            rows[name].div_(coarse).round_().mul_(coarse)
        return rows

    def _sum_on(
        self, flat: Tensor, shapes: Shapes, ids: Tensor | None, entropy: ClientEntropy | None
    ) -> tuple[Tree, Tensor]:
        """Return the sum of the clients' messages, made on a GPU."""
        from coterie.privacy import sums_gpu

        if entropy is None:
            raise ValueError("each client adds noise of its own: give the clients' entropy")
        keys = _keys_of(_places(ids), entropy, {"": flat})
        total, kept = sums_gpu.sum_rows(flat, facts_of(self, flat.shape[1]), keys)
        return split_flat(total, shapes), kept

    def draws(self, totals: Shapes) -> int:
        """Return 0: messages carry the noise."""
        return 0

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum unchanged: the server adds nothing."""
        return dict(total)

    def event(self) -> Event:
        """Return a round of local noise."""
        return LocalGaussian(self.noise_multiplier, self.honest, self.claimed)

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return one l2 bound on all leaves, with noise inside the sum."""
        (one,) = super().norm_bounds(totals)
        step = self.release_step(count_numbers(totals))
        return (replace(one, noise=self.deviation, step=step),)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return the noise of an expected cohort."""
        return self.summed().standard_deviations(totals)

    @property
    def noise_over_bound(self) -> float:
        """The noise multiplier of the sum of an expected cohort."""
        return self.summed().noise_multiplier

    def typical_noise(self, like: Tree, entropy: Entropy) -> Tree:
        """Return the noise of an expected cohort."""
        return self.summed().typical_noise(like, entropy)


BlockKind = Literal["signed", "positive", "single"]
_REPLACED: Mapping[BlockKind, float] = {"signed": 2.0, "positive": SQRT2, "single": 1.0}


@dataclass(frozen=True)
class Block:
    """The bound on one leaf of a contribution, and its share of the budget.

    Attributes:
        name: The leaf.
        bound: Of its l2 norm.
        share: Its share of mu^2, the square of the Gaussian DP parameter of a release.
        kind: "signed"; "positive", whose entries below 0 become 0 before the clip; "single", one
            number that is not negative.
        per_root: Whether the bound is multiplied by the square root of the leaf's size.
    """

    name: str
    bound: float
    share: float
    kind: BlockKind = "signed"
    per_root: bool = False

    def __post_init__(self) -> None:
        check_range("bound", self.bound, 1e-80, 1e80, f" of block {self.name!r}")
        # A part of the budget: the shares of all blocks add up to 1.
        check_range("share", self.share, 1e-12, 1, f" of block {self.name!r}")
        if self.kind not in get_args(BlockKind):
            raise ValueError(
                f"kind = {self.kind!r} of block {self.name!r}: expected one of "
                f"{', '.join(get_args(BlockKind))}"
            )

    def bound_of(self, numbers: int) -> float:
        """Return the bound on a leaf of this many numbers; raise ValueError for another size."""
        if self.kind == "single" and numbers != 1:
            raise ValueError(
                f"block {self.name!r} is of a single number, and the leaf has {numbers}: make it "
                "'positive' or 'signed'"
            )
        return self.bound * math.sqrt(max(numbers, 1)) if self.per_root else self.bound


def check_blocks(blocks: Sequence[Block]) -> None:
    """Raise ValueError for no blocks, duplicate names, or shares that do not add up to 1."""
    names = [block.name for block in blocks]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"blocks are of {names}: expected at least one, each leaf once")
    total = math.fsum(block.share for block in blocks)
    if abs(total - 1) > _SHARE_TOLERANCE:
        shares = {block.name: block.share for block in blocks}
        raise ValueError(
            f"shares {shares} add up to {total}: expected 1, all of the budget; divide each by "
            "their sum"
        )


def replaced_by(blocks: Sequence[Block]) -> float:
    """Return the sensitivity under replace over that under zero_out, from 1 to 2.

    >>> replaced_by([Block("mean", 1.0, 0.5), Block("residual", 3.0, 0.5, "single")])
    1.5811388300841898
    """
    square = math.fsum(block.share * _REPLACED[block.kind] ** 2 for block in blocks)
    return min(2.0, max(1.0, math.sqrt(square)))


@dataclass(frozen=True)
class BlockSum(Mechanism):
    """Sum of contributions clipped block by block, plus Gaussian noise scaled to each block.

    Each block is a `GaussianSum` of bound B_b and noise multiplier z / sqrt(f_b) on a public grid
    of its own; all blocks are one release, charged once. A client whose contribution has a NaN or
    an infinity in any block counts as zeros in all of them.

    **Guarantee:** one release that includes the client is mu-GDP for ideal normals (ADR 9), mu = s
    / noise_multiplier, s = 1 under zero_out and s = sqrt(sum_b f_b r_b^2) under replace, provided
    `entropy` returns independent uniform words that nobody else learns. Proof: divide block b by
    B_b / sqrt(f_b), a public number. Noise is then N(0, z^2 I). zero_out: a client with |x_b| <=
    B_b moves the sum by sqrt(sum_b f_b |x_b|^2 / B_b^2) <= sqrt(sum_b f_b) = 1. replace: x by y
    moves it by sqrt(sum_b f_b |x_b - y_b|^2 / B_b^2), and |x_b - y_b| <= r_b B_b with r = 2 for
    signed blocks; sqrt(2) where no entry is negative, as |a - b|^2 = |a|^2 + |b|^2 - 2 a.b <= 2
    B^2; 1 for one number from 0 to B_b. Both are
    attained: by any x with |x_b| = B_b, and by x_b = -y_b, by two different axes of length B_b
    (a positive block of at least two numbers), by B_b and 0. A release is a function of a Gaussian
    release of that sensitivity, also under hidden sampling. The bounds hold after rounding, for
    rows of any size. Tests: tests/properties/test_blocks.py, tests/statistics/test_blocks.py,
    tests/privacy/test_mechanisms_blocks.py.

    There is one block for each leaf; relative errors are reported for the first.
    """

    blocks: tuple[Block, ...]
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        check_blocks(self.blocks)
        GaussianSum(1.0, self.noise_multiplier)  # raises for an invalid multiplier

    @property
    def first(self) -> Block:
        """The block for which relative errors and clipping factors are reported."""
        return self.blocks[0]

    def each(self, numbers: Mapping[str, int]) -> dict[str, GaussianSum]:
        """Return the mechanism of each leaf, for leaves of these sizes, or raise ValueError."""
        names = {block.name for block in self.blocks}
        if set(numbers) != names:
            raise ValueError(
                f"a contribution has leaves {sorted(numbers)}, its blocks are of {sorted(names)}: "
                "give one block for each leaf"
            )
        return {
            block.name: GaussianSum(
                block.bound_of(numbers[block.name]),
                self.noise_multiplier / math.sqrt(block.share) * (1 + _SHARE_TOLERANCE),
            )
            for block in self.blocks
        }

    def _each(self, totals: Shapes) -> dict[str, GaussianSum]:
        return self.each({name: math.prod(shape) for name, shape in totals.items()})

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return rows with each block clipped to its bound, and the factors of the first block."""
        each = self.each({name: math.prod(leaf.shape[1:]) for name, leaf in rows.items()})
        # Before negative entries are cut: minus infinity must not pass for a zero.
        broken = torch.stack([_not_finite(leaf) for leaf in rows.values()]).any(dim=0)
        clipped, kept = {}, {}
        for block in self.blocks:
            leaf = rows[block.name]
            leaf = leaf if block.kind == "signed" else leaf.clamp_min(0.0)
            cut, kept[block.name] = each[block.name].clip({block.name: leaf})
            flags = broken.reshape(-1, *[1] * (leaf.dim() - 1))
            clipped[block.name] = cut[block.name].masked_fill_(flags, 0.0)
        return clipped, kept[self.first.name].masked_fill(broken, 0.0)

    def totals(self, contribution: Shapes) -> Shapes:
        """Return the shapes of a contribution; raise ValueError for leaves without a block."""
        self._each(contribution)
        return contribution

    def draws(self, totals: Shapes) -> int:
        """Return one normal per number."""
        return count_numbers(totals)

    def sensitivity(self, relation: Relation) -> float:
        """Return 1, or the root of sum_b f_b r_b^2 under replace: in units of B_b / sqrt(f_b)."""
        check_relation(relation)
        return replaced_by(self.blocks) if relation == "replace" else 1.0

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus Gaussian noise, each block rounded to the grid of its release."""
        # All at once: drawn ahead or not, a seed returns the same numbers.
        return self.add_normals(total, normals(entropy, size(total)))

    def add_normals(self, total: Tree, drawn: Array) -> Tree:
        """Return the sum plus noise of these normals, each block on the grid of its release."""
        each, parts = self._each({n: tuple(t.shape) for n, t in total.items()}), split(drawn, total)
        return map_arrays(
            {name: each[name].noisy(total[name].numpy(), z, z.size) for name, z in parts.items()}
        )

    def grid(self, totals: Shapes) -> dict[str, float]:
        """Return the grid of each block's release."""
        each = self._each(totals)
        return {name: one.release_step(math.prod(totals[name])) for name, one in each.items()}

    def event(self) -> Gaussian:
        """Return one Gaussian release."""
        return Gaussian(self.noise_multiplier, replaced_by(self.blocks))

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return one l2 bound on each leaf."""
        each, found = self._each(totals), []
        for block in self.blocks:
            (one,) = each[block.name].norm_bounds({block.name: totals[block.name]})
            found.append(replace(one, nonnegative=block.kind != "signed"))
        return tuple(found)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return that of each block."""
        return {name: one.deviation for name, one in self._each(totals).items()}

    @property
    def noise_over_bound(self) -> float:
        """The noise multiplier of the first block."""
        return self.noise_multiplier / math.sqrt(self.first.share)

    def radius(self, totals: Shapes) -> float:
        """Return about the largest entry of the noise of the noisiest block."""
        each = self._each(totals)
        return max(one.radius({name: totals[name]}) for name, one in each.items())

    def reported(self, tree: Tree) -> Tree:
        """Return the first block only: units of blocks differ."""
        return {self.first.name: tree[self.first.name]}


@dataclass(frozen=True)
class LaplaceSum(Mechanism):
    """Sum of rows clipped to l1 norm `bound`, plus discrete Laplace noise of scale bound / epsilon.

    Contributions are multiples of a public power of two g. The noise is g times an integer X with
    P(X = x) proportional to exp(-|x| g / b), drawn exactly from uniform words by rejection with
    whole numbers only (Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential
    privacy", algorithms 1 and 2). Floating-point samplers have gaps that reveal inputs (Mironov
    2012) and support a small delta at best.

    **Guarantee:** one release that includes the client is epsilon-DP under zero_out and 2
    epsilon-DP under replace, with delta = 0, provided `entropy` returns independent uniform words
    that nobody else learns. Neighbouring sums differ by multiples of g of l1 norm at most the bound
    (twice under replace), after rounding, for rows of any size, NaN and infinity included. Tests:
    tests/properties/test_moments.py, tests/statistics/test_moments.py.
    """

    order: ClassVar[Literal[1, 2]] = 1
    bound: float
    epsilon: float

    def __post_init__(self) -> None:
        check_range("bound", self.bound, 1e-80, 1e80)
        check_range("epsilon", self.epsilon, 1e-4, 1e4)

    def step(self) -> float:
        """Return the public grid step, 2^-30 of the bound or a little more, a power of two."""
        return float(2.0 ** (math.floor(math.log2(self.bound)) - 29))

    def clip(self, rows: Tree) -> tuple[Tree, Tensor]:
        """Return rows clipped in l1, then rounded towards zero, which increases no norm."""
        numbers = numbers_per_row(rows)
        # |x|_1 >= |x|_2: rows cut here are cut below anyway, and nothing overflows afterwards.
        shorter, kept = clip_rows(rows, 2 * self.bound)
        flats = [leaf.reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in shorter.values()]
        norms = torch.stack([flat.abs().sum(dim=1) for flat in flats]).sum(dim=0)
        norms = norms * (1 + (numbers + 16) * 2.0**-52)
        part = torch.where(norms > self.bound, self.bound / norms.clamp_min(1e-300), 1.0)
        step = self.step()
        clipped = {}
        for name, leaf in shorter.items():
            factor = part.reshape(-1, *[1] * (leaf.dim() - 1))
            # The factor may be rounded up: 2^-50 less leaves no norm above the bound.
            cut = torch.where(factor < 1, leaf * factor * (1 - 2.0**-50), leaf)
            clipped[name] = (cut / step).trunc() * step
        return clipped, kept * part

    def perturb(self, total: Tree, entropy: Entropy) -> Tree:
        """Return the sum plus discrete Laplace noise on its grid."""
        step = self.step()
        # In grid steps, as exact fractions of the floats; rounded up, so never too little noise.
        scale = math.ceil(Fraction(self.bound) / Fraction(step) / Fraction(self.epsilon))
        words = _Words(entropy)
        noisy = {}
        for name in sorted(total):
            leaf = total[name].numpy()
            # Integers until the sum is made: the release is a function of the exact sum.
            steps = [int(number) for number in (leaf / step).reshape(-1)]
            sums = [float(number + discrete_laplace(scale, words)) for number in steps]
            noisy[name] = np.array(sums).reshape(leaf.shape) * step
        return map_arrays(noisy)

    def event(self) -> Event:
        """Return a pure release."""
        return Laplace(self.epsilon)

    def norm_bounds(self, totals: Shapes) -> tuple[NormBound, ...]:
        """Return one l1 bound on all leaves."""
        return (NormBound(totals, Fraction(self.bound), self.step(), order=1),)

    def standard_deviations(self, totals: Shapes) -> Mapping[str, float]:
        """Return the same for every leaf."""
        return dict.fromkeys(totals, SQRT2 * self.bound / self.epsilon)

    @property
    def noise_over_bound(self) -> float:
        """sqrt(2) / epsilon."""
        return SQRT2 / self.epsilon

    def radius(self, totals: Shapes) -> float:
        """Return about the largest of as many Laplace numbers."""
        return self.bound / self.epsilon * (math.log(max(count_numbers(totals), 1)) + 1)


class _Words:
    """Unbiased whole numbers from a source of words."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self._left: list[int] = []

    def below(self, limit: int) -> int:
        """Draw a whole number from 0 to limit - 1."""
        bits = (limit - 1).bit_length()
        while True:
            number = 0
            for _ in range(0, bits, 64):
                number = (number << 64) | self._word()
            number &= (1 << bits) - 1
            if number < limit:
                return number

    def _word(self) -> int:
        if not self._left:
            self._left = [int(word) for word in self._entropy.words(64)]
        return self._left.pop()


def _bernoulli_exp(over: int, under: int, words: _Words) -> bool:
    """Draw True with probability exp(-over/under), 0 <= over <= under (CKS, algorithm 1)."""
    count = 1
    while over and words.below(under * count) < over:
        count += 1
    return over == 0 or count % 2 == 1


def discrete_laplace(scale: int, words: _Words) -> int:
    """Draw an integer x with probability proportional to exp(-|x| / scale) (CKS, algorithm 2)."""
    while True:
        rest = words.below(scale)
        if not _bernoulli_exp(rest, scale, words):
            continue
        whole = 0
        while _bernoulli_exp(1, 1, words):
            whole += 1
        size = rest + scale * whole
        if words.below(2):
            return size
        if size:
            return -size


_FUSED: tuple[type[GaussianSum], ...] = (GaussianSum, GaussianRows, LocalGaussianSum)
"""The classes whose sums and noise a GPU makes; not what is derived from them elsewhere."""


@lru_cache(maxsize=64)
def facts_of(one: GaussianSum, numbers: int) -> "Facts":
    """Return the public numbers of a release of rows of this many numbers, for kernels."""
    from coterie.privacy.sums_gpu import Facts

    step = one.step(numbers)
    return Facts(
        limit=one.bound - step * math.sqrt(numbers) / 2,
        raised=1 + (numbers + 16) * 2.0**-52,
        step=step,
        noise=one.deviation / step,
        coarse=one.release_step(numbers),
    )


@cache
def _kernels() -> Any:
    """Return the module of kernels on a GPU; None without Triton, which some systems lack."""
    try:
        from coterie.privacy import sums_gpu
    except Exception as error:
        warnings.warn(f"releases are made on the CPU, not on a GPU: {error}", stacklevel=2)
        return None
    return sums_gpu


def is_on_gpu(tree: Tree) -> bool:
    """Return whether a tree is on a GPU."""
    return any(leaf.is_cuda for leaf in tree.values())


def normals_on(device: torch.device, keys: NDArray[np.uint32], count: int) -> Tensor:
    """Return standard normals of each key, (k, count) on the device: those of `normals`."""
    from coterie.privacy.chacha import normals_of_keys

    found = None
    if device.type == "cuda":
        found = _on_gpu(device, keys, count)
    return torch.from_numpy(normals_of_keys(keys, count)).to(device) if found is None else found


def _on_gpu(device: torch.device, keys: NDArray[np.uint32], count: int) -> Tensor | None:
    try:
        from coterie.privacy import chacha_gpu
    except Exception:  # torch has no Triton on some systems
        return None
    return chacha_gpu.normals_on(device, keys, count)


def check_range(name: str, value: float, low: float, high: float, of: str = "") -> None:
    """Raise ValueError for a number outside this range."""
    if not low <= value <= high:
        raise ValueError(
            f"{name} = {value}{of}: expected a positive number between {low:g} and {high:g}; for a "
            "run without privacy ask for epsilon = inf instead"
        )


def count_numbers(shapes: Shapes) -> int:
    """Return how many numbers a tree of these shapes has."""
    return sum(math.prod(shape) for shape in shapes.values())


def numbers_per_row(rows: Tree) -> int:
    """Return how many numbers one client has in stacked leaves; 0 without clients."""
    return sum(leaf[0].numel() if len(leaf) else 0 for leaf in rows.values())


def sum_rows(rows: Tree) -> Tree:
    """Return the sum over clients, on the CPU after one transfer."""
    sums = {name: leaf.sum(dim=0) for name, leaf in rows.items()}
    flat = torch.cat([leaf.reshape(-1) for leaf in sums.values()]).cpu()
    parts = torch.split(flat, [leaf.numel() for leaf in sums.values()])
    return {
        name: part.reshape(leaf.shape)
        for (name, leaf), part in zip(sums.items(), parts, strict=True)
    }


def gram_rows(rows: Tree) -> Tree:
    """Return the sum of w w^T over clients: one product (features, clients) (clients, features)."""
    return {name: (leaf.mT @ leaf).cpu() for name, leaf in rows.items()}


def square_shapes(contribution: Shapes) -> Shapes:
    """Return the shapes of second moments; raise ValueError for contributions but vectors."""
    for name, shape in contribution.items():
        if len(shape) != 1:
            raise ValueError(
                f"{name} has shape {shape}: a second moment is released of vectors; "
                "contribute one vector per client"
            )
    return {name: (*shape, *shape) for name, shape in contribution.items()}


def place_rows(rows: Tree, ids: Tensor | None, clients: int) -> Tree:
    """Return each client's row at the index of its id, among zeros."""
    places, placed = _places(ids), {}
    for name, leaf in rows.items():
        total = torch.zeros(clients, *leaf.shape[1:], dtype=leaf.dtype)
        placed[name] = total.index_copy(0, places, leaf.cpu())
    return placed


def _places(ids: Tensor | None) -> Tensor:
    if ids is None:
        raise ValueError("each client has a row of its own: give the clients' ids")
    return ids.cpu()


def round_rows(clipped: Tree, step: float) -> Tree:
    """Round clipped rows to the grid, in place: they are copies."""
    return map_leaves(lambda leaf: leaf.mul_(1 / step).round_().mul_(step), clipped)


def split(numbers: Array, like: Tree) -> dict[str, Array]:
    """Return numbers cut along the last axis into leaves of these shapes, by name."""
    found, used = {}, 0
    for name in sorted(like):
        shape = like[name].shape
        width = math.prod(shape[numbers.ndim - 1 :])
        found[name] = numbers[..., used : used + width].reshape(shape)
        used += width
    return found


def split_flat(flat: Tensor, shapes: Shapes) -> Tree:
    """Return a vector cut into leaves of these shapes, in the order of their names."""
    names = sorted(shapes)
    parts = torch.split(flat, [math.prod(shapes[name]) for name in names])
    found = {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    return {name: found[name] for name in shapes}


def _keys_of(ids: Tensor, entropy: ClientEntropy, rows: Tree) -> NDArray[np.uint32]:
    """Return a fresh key of each client."""
    clients = ids.tolist()
    _check_ids(clients, rows)
    if isinstance(entropy, ClientSources):
        return entropy.keys(clients)
    return draw_keys([entropy(client) for client in clients])


def _check_ids(clients: list[int], rows: Tree) -> None:
    count = {len(leaf) for leaf in rows.values()}
    if count != {len(clients)}:
        raise ValueError(f"{len(clients)} ids for rows of {sorted(count)} clients: give one each")
    if len(set(clients)) != len(clients):
        # In a simulation both rows would carry the same noise.
        raise ValueError("a client is listed twice; it sends one message per round")


def _not_finite(leaf: Tensor) -> Tensor:
    flat = leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
    # x - x is 0 for finite x and NaN otherwise; many times faster than isfinite.
    return (flat - flat).sum(dim=1) != 0
