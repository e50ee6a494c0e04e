r"""Curves that a federation has to earn: common splines and products beside linear models.

Client k has y = x' w_k + s(x)' b + noise, with public columns s (`coterie.data.effects.curves`) and
the same b for all. While b = 0 the model is linear. In a search a client contributes, beside what a
linear model releases,

    sqrt(c) S_k' (S + c S_k S_k')^-1 (y_k - X_k w),       l2 norm at most 1,

S the covariance of its outcomes under the prior, with 1 added to the variances of its weights so
that what a linear model lacks is no curve, and c = 0.02: the mean of b in units of its working
variance, an estimating equation with mean 0 where b = 0 (Liang and Zeger 1986). Under b = 0 the
mean of R releases over m clients has the expected square q v / R + 1/m at most, q its length and v
the variance of its noise, a public number. If it exceeds that by 4 v sqrt(2 q) / R + 4 / m, four
standard deviations of the noise's square and as much as drawing clients could make, the curves are
earned: b starts from the mean, shrunk by what noise has made (James and Stein 1961), and every
later release moves it. The working variance then falls as 0.1 / (1 + rounds / 2), so that steps are
large at first (Robbins and Monro 1951). After a third of the rounds the search ends: the block then
carries the others' releases a second time.

Linear parts are drawn together as ever, on outcomes less s(x)' b, and keep their own blocks and
clips, so what they lose is the share of the budget of the search.

**Guarantee:** none of its own. The block is one of those that `privacy.mechanisms.BlockSum` clips
and pays for in every round, whatever it carries. What it carries, b, c and the end of the search
are functions of earlier releases alone; clients choose nothing. Assumes that S_k' is a map of the
client's own rows: splines have no constants from rows, and are evaluated row by row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.data.effects import MOST_PRODUCTS, Design, curves
from coterie.data.federated import Clients, Spec
from coterie.solvers.posterior import Prior, add_in_turn, posterior

SEARCHING, EARNED, DROPPED = 1.0, 2.0, 0.0
WAIT = 2.0  # rounds until linear models have arrived
SHARE = 0.2  # of the budget
_WORKING, _START = 0.02, 0.1  # variances: of the search, and of the first step
_FREE = 1.0  # added to variances of linear effects: what linear models lack is no curve
_STEP = 4 / 3
_FACTOR = 4.0  # standard deviations beyond which curves are earned
_PART = 3  # of the rounds that are searched, one in so many
_WORTH = 0.11  # the square that a search must be able to show


def search_of(spec: Spec, n_mu: float, rounds: int) -> int:
    """Return the rounds of a search by rule, of so many; 0 where it could not show enough."""
    if spec.features > MOST_PRODUCTS or len(spec.shape) != 1:
        return 0
    spread = math.sqrt(2 * len(curves(spec.features).names))
    shown = _PART * _FACTOR * spread / (n_mu**2 * SHARE)
    return max(2, rounds // _PART) if shown <= _WORTH else 0


def straight(size: int) -> dict[str, Tensor]:
    """Return the state before any release."""
    zeros = torch.zeros(size, dtype=torch.float64)
    return {"curves": zeros, "bends": zeros.clone(), "seen_bends": _one(0), "bending": _one(1)}


def rows_of(clients: Clients) -> tuple[Tensor, Tensor]:
    """Return the numbers of the clients' own rows, client by client, and the rows, float64."""
    index = clients.index[clients.mask.cpu()]
    if isinstance(clients.features, Tensor):
        return index, clients.features[index.to(clients.device)].flatten(1).cpu().double()
    return index, torch.from_numpy(clients.features[index.numpy()].toarray()).double()


def below(clients: Clients, shared: Tree) -> Clients:
    """Return the clients with outcomes less what the shared curves explain."""
    if float(shared["bending"]) != EARNED:
        return clients
    index, x = rows_of(clients)
    made = curves(x.shape[1])(x)
    explained = add_in_turn((made * shared["curves"].cpu()).T)
    targets = clients.targets.clone()
    at = index.to(targets.device)
    targets[at] = (targets[at].double().cpu() - explained).to(targets)
    return replace(clients, targets=targets, memory={})


def bends(clients: Clients, prior: Prior, shared: Tree, *, bias: bool) -> Tensor:
    """Return the clients' contributions to the curves, (c, q), unclipped; see the module.

    `clients` are those of `below`, and `prior` that of their linear models.
    """
    index, x = rows_of(clients)
    design = curves(x.shape[1])
    wide = torch.cat([x, design(x)], dim=1)
    starts = clients.counts.cumsum(0) - clients.counts
    whole = replace(
        clients,
        spec=replace(clients.spec, shape=(wide.shape[1],)),
        starts=starts,
        features=wide.float().to(clients.device),
        targets=clients.targets[index.to(clients.device)],
        memory={},
    )
    found = posterior(whole, _widened(prior, design, unit(shared), bias), bias=bias)
    return found.deviation[:, 0, len(design.columns) : wide.shape[1]]


def _widened(prior: Prior, design: Design, variance: float, bias: bool) -> Prior:
    """Return the prior with the curves between the columns and the bias."""
    width, size = len(design.columns), len(design.names)
    free = prior.variances + _FREE
    zeros = torch.zeros(1, size, dtype=torch.float64)
    parts = [
        torch.cat([given[:, :width], middle, given[:, width : width + bias]], dim=1)
        for given, middle in ((prior.center, zeros), (free, zeros + variance))
    ]
    return replace(prior, center=parts[0], variances=parts[1], mixing=None)


def unit(shared: Mapping[str, Tensor]) -> float:
    """Return the working variance of the curves."""
    if float(shared["bending"]) == SEARCHING:
        return _WORKING
    return _START / (1 + float(shared["seen_bends"]) / 2)


def searches(shared: Mapping[str, Tensor]) -> bool:
    """Return whether the block carries bends: in a search that has begun, and once earned."""
    began = float(shared["posts"]) >= WAIT
    return float(shared["bending"]) == EARNED or (float(shared["bending"]) == SEARCHING and began)


@dataclass(frozen=True)
class Bends:
    """A released mean of bends, and the deviation of the noise of each of its numbers."""

    mean: Tensor
    noise: float

    def learn(self, shared: Mapping[str, Tensor], cohort: float, search: int) -> dict[str, Tensor]:
        """Return what becomes of the state of the curves, in a search of so many rounds."""
        seen = float(shared["seen_bends"]) + 1
        if float(shared["bending"]) == EARNED:
            step = _STEP * math.sqrt(unit(shared)) * self.mean
            return {"curves": shared["curves"] + step, "seen_bends": _one(seen)}
        mean = shared["bends"] + (self.mean - shared["bends"]) / seen
        variance, size = self.noise**2 / seen, len(mean)
        made = size * variance + 1 / cohort
        edge = _FACTOR * (variance * math.sqrt(2 * size) + 1 / cohort)
        beyond = float(mean.square().sum()) - made
        if beyond > edge:
            start = _STEP * math.sqrt(_WORKING) * beyond / (beyond + made) * mean
            return straight(size) | {"curves": start, "bending": _one(EARNED)}
        if seen >= search:
            return straight(size) | {"bending": _one(DROPPED)}
        return {"bends": mean, "seen_bends": _one(seen)}


def _one(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64)
