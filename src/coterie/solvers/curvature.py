"""How large a step a client's own rows bear: the largest squared row norm.

Gradient steps on squared loss are stable below 2 / L, L = largest |x|^2 (+ 1 for the bias) + lam. A
client knows its own L; taking smaller steps because of it tells nobody anything.
"""

import numpy as np
import torch
from torch import Tensor

from coterie.data.federated import Clients


def largest_squares(clients: Clients) -> Tensor:
    """Return the largest squared norm of a row of each client, shape (c,); 0 without rows."""
    if not len(clients) or not clients.longest:
        return torch.zeros(len(clients), device=clients.device)
    counts = clients.counts.numpy()
    before = np.cumsum(counts) - counts
    rows = np.repeat(clients.starts.numpy() - before, counts) + np.arange(int(counts.sum()))
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(clients.device)
    if isinstance(clients.features, Tensor):
        picked = clients.features[torch.from_numpy(rows).to(clients.device)]
        squares = picked.flatten(1).square().sum(dim=1)
    else:
        picked = clients.features[rows]
        sums = np.asarray(picked.multiply(picked).sum(axis=1), dtype=np.float32).reshape(-1)
        squares = torch.from_numpy(sums)
    largest = torch.zeros(len(counts), dtype=squares.dtype, device=squares.device)
    return largest.scatter_reduce(0, owner, squares, "amax")
