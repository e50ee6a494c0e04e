"""Huber's estimates by modified outcomes, for posteriors of linear regression.

An outcome that is farther than a bound from the client's own fit counts as that far, and the fit is
repeated: the modified residuals of Huber, "Robust Statistics" (1981), section 7.8, whose limit is
Huber's M-estimate under the same prior. All of it depends on a client's own rows alone.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from coterie.data.federated import Clients
from coterie.solvers.posterior import Prior, add_in_turn, posterior, row_totals

_STEPS = 3


def bounded_share(bound: float) -> float:
    """Return the mean square of a standard normal error that counts as at most the bound.

    >>> round(bounded_share(1.345), 3)
    0.71
    """
    inside = math.erf(bound / math.sqrt(2))
    density = math.exp(-(bound**2) / 2) / math.sqrt(2 * math.pi)
    return inside - 2 * bound * density + bound**2 * (1 - inside)


def pulled_in(
    clients: Clients, prior: Prior, bound: float, *, bias: bool
) -> tuple[Clients, Tensor]:
    """Return the clients with outcomes within `bound` residual deviations of their own fits.

    Also returns by how much their mean squared residuals, in units of the residual variance, fall
    short of those of normal errors, (c,) float64.
    """
    reach, now = bound * math.sqrt(prior.residual), clients
    x, y, mask = clients.x.flatten(2).cpu().double(), clients.y.cpu().double(), clients.mask.cpu()
    left = torch.zeros_like(y)
    for _ in range(_STEPS):
        fit = prior.weights(posterior(now, prior, bias=bias).deviation)[:, 0].cpu()
        terms = [x[:, :, at] * fit[:, None, at] for at in range(x.shape[2])]
        terms += [fit[:, None, -1].expand_as(y)] if bias else []
        values = add_in_turn(torch.stack(terms))
        left = (y - values).clamp(-reach, reach)
        targets = clients.targets.clone()
        inside = clients.index[mask].to(targets.device)
        targets[inside] = (values + left)[mask].to(targets)
        now = replace(clients, targets=targets, memory={})
    rows = clients.counts.clamp_min(1).double()
    square = row_totals(left.square(), clients).cpu() / rows / prior.residual
    return now, square * (1 / bounded_share(bound) - 1)
