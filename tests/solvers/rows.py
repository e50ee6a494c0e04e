"""Clients for the tests of solvers."""

import numpy as np
import torch
from scipy import sparse

from coterie.data.federated import FederatedDataset, Spec


def federate(task, counts, x, y, outputs=1):
    """Return clients with these numbers of rows, dense or CSR."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = x if sparse.issparse(x) else torch.as_tensor(x)
    spec = Spec(tuple(x.shape[1:]), outputs, task, len(counts))
    names = [str(place) for place in range(len(counts))]
    return FederatedDataset(spec, names, offsets, rows, torch.as_tensor(y))


def everyone(data):
    return data.clients(np.arange(len(data)))


def own_rows(data, client):
    """Return a client's rows and targets in float64."""
    begin, end = data.offsets[client : client + 2]
    x = data.features[begin:end]
    x = x.toarray() if data.is_sparse else x.flatten(1).numpy()
    return x.astype(np.float64), data.targets[begin:end].numpy().astype(np.float64)


def spoil(data, client, value):
    """Put a value that is not finite into a client's rows."""
    if data.is_sparse:
        data.features.data[data.features.indptr[data.offsets[client] + 2]] = value
    else:
        # The first row is the one that padding repeats.
        data.features[data.offsets[client], 2] = value
    data.forget()
