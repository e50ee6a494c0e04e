"""Small data, equality of datasets, and calls that are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from coterie.data.federated import DataError, FederatedDataset

LABELS = np.array([0, 3, 1, 2, 3, 0, 1, 3])
OWNERS = np.array([0, 0, 0, 0, 1, 1, 1, 1])
X = np.arange(16.0).reshape(8, 2)


def equal(one: FederatedDataset, other: FederatedDataset) -> bool:
    def dense(data: FederatedDataset) -> np.ndarray:
        rows = data.features
        return rows.numpy() if isinstance(rows, torch.Tensor) else rows.toarray()

    return (
        one.spec == other.spec
        and list(one.names) == list(other.names)
        and np.array_equal(one.offsets, other.offsets)
        and np.array_equal(dense(one), dense(other))
        and torch.equal(one.targets, other.targets)
    )


def refused(words: str, act: Callable[..., Any], *given: Any, **options: Any) -> None:
    """Assert that a call raises a DataError whose message matches."""
    with pytest.raises(DataError, match=words):
        act(*given, **options)
