"""Data by name: what can be opened without a file."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from coterie.data.embedded import digits, districts
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.papers import mpmtl_group_sparse, mpmtl_low_rank
from coterie.data.papers_svm import mtlsvm_regression
from coterie.data.synthetic import KINDS, Synthetic, synthetic

_MAKERS: dict[str, Callable[..., FederatedDataset | Synthetic]] = {
    "districts": districts,
    "digits": digits,
    "synthetic": synthetic,
    **{f"synthetic:{kind}": partial(synthetic, kind) for kind in KINDS},
    "mpmtl:low_rank": mpmtl_low_rank,
    "mpmtl:group_sparse": mpmtl_group_sparse,
    "mtlsvm:regression": mtlsvm_regression,
}
NAMES: tuple[str, ...] = tuple(_MAKERS)


def open_named(name: str, **options: Any) -> FederatedDataset:
    """Open data by name, with the options of the function that makes it.

    Raises:
        DataError: If there is no such name or option.
    """
    if name not in _MAKERS:
        raise DataError(
            f"no data named {name!r}; the names are {', '.join(NAMES)}; "
            "a path to a file also works, if the file exists"
        )
    known = inspect.signature(_MAKERS[name]).parameters
    for option in options:
        if option not in known:
            offered = f"its options are {', '.join(known)}" if known else "it has no options"
            raise DataError(f"{name} has no option {option!r}; {offered}")
    try:
        made = _MAKERS[name](**options)
    except TypeError as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise DataError(f"{name} with {given}: a value of the wrong type ({error})") from error
    return made.data if isinstance(made, Synthetic) else made
