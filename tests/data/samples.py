"""Small data, and equality of datasets."""

import numpy as np
import torch

from coterie.data.federated import FederatedDataset

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
