"""What a data set looks like, for `coterie data show`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.federated import FederatedDataset


def describe(data: FederatedDataset) -> dict[str, Any]:
    """Summarise a data set in plain numbers that JSON can hold.

    For the data's owner: nothing here is private in the sense of a guarantee, and none of it may
    be handed to a method or published as it is.

    `sd` and `skew` are those of the clients at hand (divisor m); the skew of equal counts is 0.
    `classes_per_client` counts the labels that occur in a client, and is absent for regression.
    """
    found: dict[str, Any] = {
        "title": data.title,
        "task": data.spec.task,
        "outputs": data.spec.outputs,
        "clients": len(data),
        "rows": int(data.offsets[-1]),
        "rows_per_client": _spread(data.counts),
        "features": data.spec.features,
        "shape": list(data.spec.shape),
        "sparse": data.is_sparse,
        "split": None,
        "notes": list(data.notes),
    }
    if data.source_split is not None:
        test = int((data.source_split == 1).sum())
        found["split"] = {"train": found["rows"] - test, "test": test}
    if data.spec.task != "regression":
        spread = _spread(_classes(data))
        found["classes_per_client"] = {name: spread[name] for name in ("min", "median", "max")}
    return found


def _spread(counts: NDArray[np.int64]) -> dict[str, float]:
    mean, sd = float(counts.mean()), float(counts.std())
    return {
        "min": int(counts.min()),
        "median": float(np.median(counts)),
        "max": int(counts.max()),
        "mean": mean,
        "sd": sd,
        "skew": float(((counts - mean) ** 3).mean() / sd**3) if sd > 0 else 0.0,
    }


def _classes(data: FederatedDataset) -> NDArray[np.int64]:
    """Count the labels that occur in each client."""
    y = data.targets.cpu().numpy()
    owner = np.repeat(np.arange(len(data)), data.counts)
    if data.spec.task == "multilabel":
        rows, labels = np.nonzero(y)
        pairs = owner[rows] * data.spec.outputs + labels
        size = data.spec.outputs
    else:
        size = max(data.spec.outputs, 2)
        pairs = owner * size + y.astype(np.int64)
    return np.bincount(np.unique(pairs) // size, minlength=len(data))
