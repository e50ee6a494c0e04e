"""The diagonal of the empirical Fisher information of every client's model, on its own rows.

    F_j = mean over own rows of (d loss(row) / d w_j)^2

(Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural networks"; with the rows'
own targets, as in the finetuning of Hu, Wu and Smith.)
"""

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.federated import Clients
from coterie.models import Model
from coterie.solvers.objective import Batch, stacked_gradient


def fisher(model: Model, params: Tree, clients: Clients) -> Tree:
    """Return the mean squared gradient of one row's loss, stacked; zeros for clients without rows.

    Row by row, of all clients at once: a gradient of a batch of one is a gradient of that row.
    """
    names = list(params)
    gradient = stacked_gradient(model, clients.spec.task, names)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    found = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    index, mask = clients.index, clients.mask
    for row in range(clients.longest):
        at, real = index[:, row : row + 1], mask[:, row : row + 1]
        x, y = clients.rows(at, real), clients.labels(at, real)
        like = next(iter(params.values()))
        batch = Batch(x.to(like), y, real.to(like), None)
        for name, grad in zip(names, gradient(leaves, batch, None), strict=True):
            found[name] += torch.where(_spread(real[:, 0], grad), grad, 0).square()
    counts = clients.counts.clamp_min(1).to(mask.device)
    return {name: leaf / _spread(counts, leaf).to(leaf) for name, leaf in found.items()}


def _spread(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))
