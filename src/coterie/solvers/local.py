"""The local problem that several methods share, and who solves it.

    min_w  mean over own rows of loss(w) + lam/2 |w - anchor|^2

Small least-squares models are solved exactly; everything else by SGD from the start given. On
squared loss a client whose rows are too large for the step size halves it until it is stable:
its own business, so free.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.data.federated import Clients, Spec
from coterie.models import Linear, Model, row_losses
from coterie.rng import Rng
from coterie.solvers.curvature import largest_squares
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.sgd import SGD
from coterie.tree import Tree, map_leaves, take

How = Literal["auto", "exact", "sgd"]
_SMALL = 1024


@dataclass(frozen=True, kw_only=True)
class LocalProblem:
    """Solves the regularised local problem of stacked clients.

    Attributes:
        model: The model.
        how: "exact" (linear least squares with lam > 0), "sgd", or "auto": exact where it can be.
        sgd: The settings of SGD.
        lam: The weight of the pull towards the anchor.
    """

    model: Model
    how: How
    sgd: SGD
    lam: float

    def is_exact(self, spec: Spec) -> bool:
        """Say whether these clients' problem is solved in closed form."""
        possible = isinstance(self.model, Linear) and spec.task == "regression" and self.lam > 0
        if self.how == "exact" and not possible:
            raise ValueError(
                f'solver = "exact" solves linear least squares with lam > 0; this is '
                f'{type(self.model).__name__} on {spec.task} with lam = {self.lam}: use "sgd"'
            )
        return possible and (
            self.how == "exact" or (self.how == "auto" and spec.features <= _SMALL)
        )

    def solve(
        self, start: Tree, clients: Clients, rng: Rng, *, round: int, anchor: Tree | None
    ) -> Tree:
        """Solve from a stacked start; the anchor is the shared tree, or None for zero."""
        if self.is_exact(clients.spec):
            assert isinstance(self.model, Linear)
            return solve_ridge(clients, anchor=anchor, lam=self.lam, bias=self.model.bias)
        paces = list(self._paces(clients, round))
        after = dict(start)
        for places, sgd in paces:
            whole = len(paces) == 1
            part = clients if whole else _some(clients, places)
            begun = start if whole else take(start, places.to(clients.device))
            steps = sgd(self.model, begun, part, rng, round=round, anchor=anchor, lam=self.lam)
            for name, leaf in steps.items():
                after[name] = (
                    leaf if whole else after[name].index_copy(0, places.to(leaf.device), leaf)
                )
        return self._guard(start, after, clients)

    def _paces(self, clients: Clients, round: int) -> Iterator[tuple[Tensor, SGD]]:
        """Halve the step of clients whose rows are too large for it (linear least squares)."""
        everyone = torch.arange(len(clients))
        if not (isinstance(self.model, Linear) and clients.spec.task == "regression"):
            yield everyone, self.sgd
            return
        curvature = largest_squares(clients).double().cpu() + self.model.bias + self.lam
        halvings = torch.log2(self.sgd.rate(round) * curvature).ceil().clamp(0, 60)
        halvings = torch.nan_to_num(halvings, nan=0.0)
        for count in sorted(set(halvings.tolist())):
            slower = replace(self.sgd, lr=self.sgd.lr * 0.5**count)
            yield everyone[halvings == count], slower

    def _guard(self, start: Tree, after: Tree, clients: Clients) -> Tree:
        """Let a client whose steps blew up stay where it was: its own business, so free.

        Blown up is a model that is not finite, or that grew and makes the loss on own rows larger
        than it was (squared loss has no bound on its steps, and would grow from round to round).
        """
        sizes = _norms(after)
        if sizes.is_cuda:
            # No look at single clients: it would make the host wait for the device.
            return _where(sizes.isfinite(), after, start)
        doubtful = ~(sizes <= 2 * _norms(start) + 1)  # NaN is doubtful too
        if not bool(doubtful.any()):
            return after
        places = torch.nonzero(doubtful).flatten()
        some = _some(clients, places.cpu())
        before = self._losses(take(start, places), some)
        good = sizes.isfinite()
        good[places] &= self._losses(take(after, places), some) <= before
        return _where(good, after, start)

    def _losses(self, params: Tree, clients: Clients) -> Tensor:
        with torch.no_grad():
            outputs = self.model.apply_stacked(params, clients.x)
            losses = row_losses(clients.spec.task, outputs, clients.y)
            rows = clients.mask.sum(dim=1).clamp_min(1)
            return torch.where(clients.mask, losses, 0).sum(dim=1) / rows


def _some(clients: Clients, places: Tensor) -> Clients:
    if len(places) == len(clients):
        return clients
    return replace(
        clients,
        ids=clients.ids[places],
        starts=clients.starts[places],
        counts=clients.counts[places],
    )


def _where(good: Tensor, after: Tree, start: Tree) -> Tree:
    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(good.reshape(-1, *[1] * (new.dim() - 1)), new, old)

    return map_leaves(pick, after, start)


def _norms(tree: Tree) -> Tensor:
    squares = [leaf.flatten(1).square().sum(dim=1) for leaf in tree.values()]
    return torch.stack(squares).sum(dim=0).sqrt()
