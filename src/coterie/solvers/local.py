"""The local problem that several methods share, and who solves it.

    min_w  mean over own rows of loss(w) + lam/2 |w - anchor|^2

Small least-squares models are solved exactly; everything else by SGD from the start given. On
squared loss a client whose rows are too large for the step size halves it until it is stable:
its own business, so free.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree, map_leaves, take
from coterie.data.federated import Clients, Spec
from coterie.models import Linear, Model
from coterie.solvers.curvature import largest_squares
from coterie.solvers.objective import Near
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.sgd import SGD

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
        weights: In place of `lam`, weights of single coordinates, stacked (SGD only).
        near: Fixed models whose predictions to stay near to (SGD only).
    """

    model: Model
    how: How
    sgd: SGD
    lam: float
    weights: Tree | None = None
    near: Near | None = None

    def is_exact(self, spec: Spec) -> bool:
        """Return whether these clients' problem is solved in closed form."""
        linear = isinstance(self.model, Linear) and spec.task == "regression"
        possible = linear and self.lam > 0 and self.weights is None and self.near is None
        if self.how == "exact" and not possible:
            raise ValueError(
                f'solver = "exact" solves linear least squares with lam > 0; this is '
                f'{type(self.model).__name__} on {spec.task} with lam = {self.lam}: use "sgd"'
            )
        return possible and (
            self.how == "exact" or (self.how == "auto" and spec.features <= _SMALL)
        )

    def solve(
        self,
        start: Tree,
        clients: Clients,
        rng: Rng,
        *,
        round: int,
        anchor: Tree | None,
        only: Collection[str] | None = None,
        tell: bool = False,
    ) -> Tree:
        """Solve from a stacked start; the anchor is the shared tree, or None for zero.

        Args:
            start: Stacked parameters.
            clients: Their rows.
            rng: The stream of the batches.
            round: For the learning rate.
            anchor: What `lam` pulls to, unstacked or stacked.
            only: Names of the leaves to train, by SGD; None for all.
            tell: Give clients whose model is not finite as they are: a contribution made of it
                becomes zero in the clip, and is counted. Else they stay where they start.
        """
        if only is None and self.is_exact(clients.spec):
            assert isinstance(self.model, Linear)
            after = solve_ridge(clients, anchor=anchor, lam=self.lam, bias=self.model.bias)
            return after if tell else _where(_norms(after).isfinite(), after, start)
        paces = list(self._paces(clients, round))
        if len(paces) == 1:
            after = self._steps(paces[0][1], start, clients, rng, round, anchor, only)
            return self._guard(start, after, clients, tell)
        after = dict(start)
        for places, sgd in paces:
            here = places.to(clients.device)
            part, begun = _some(clients, places), take(start, here)
            some = replace(
                self,
                weights=None if self.weights is None else take(self.weights, here),
                near=None if self.near is None else self.near.at(here),
            )
            pulled = None if anchor is None else _rows_of(anchor, start, here)
            steps = some._steps(sgd, begun, part, rng, round, pulled, only)
            for name, leaf in steps.items():
                after[name] = after[name].index_copy(0, here, leaf)
        return self._guard(start, after, clients, tell)

    def _steps(
        self,
        sgd: SGD,
        start: Tree,
        clients: Clients,
        rng: Rng,
        round: int,
        anchor: Tree | None,
        only: Collection[str] | None,
    ) -> Tree:
        return sgd(
            self.model,
            start,
            clients,
            rng,
            round=round,
            anchor=anchor,
            lam=self.lam if self.weights is None else self.weights,
            only=only,
            near=self.near,
        )

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

    def _guard(self, start: Tree, after: Tree, clients: Clients, tell: bool) -> Tree:
        """Let a client whose steps blew up stay where it was: its own business, so free.

        Blown up is a model that is not finite, or that grew and makes the loss on own rows larger
        than it was (squared loss has no bound on its steps, and would grow from round to round).
        """
        sizes = _norms(after)
        if sizes.is_cuda:
            # No look at single clients: it would make the host wait for the device.
            return after if tell else _where(sizes.isfinite(), after, start)
        doubtful = ~(sizes <= 2 * _norms(start) + 1)  # NaN is doubtful too
        if not bool(doubtful.any()):
            return after
        places = torch.nonzero(doubtful).flatten()
        some = _some(clients, places.cpu())
        before = self._losses(take(start, places), some)
        good = sizes.isfinite()
        good[places] &= self._losses(take(after, places), some) <= before
        return _where(good | ~sizes.isfinite() if tell else good, after, start)

    def _losses(self, params: Tree, clients: Clients) -> Tensor:
        with torch.no_grad():
            outputs = self.model.apply_stacked(params, clients.x)
            losses = self.model.losses(clients.spec.task, outputs, clients.y)
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


def _rows_of(anchor: Tree, start: Tree, places: Tensor) -> Tree:
    """Pick clients of an anchor, where it has a row for each."""
    stacked = {name: leaf.dim() == start[name].dim() for name, leaf in anchor.items()}
    return {name: leaf[places] if stacked[name] else leaf for name, leaf in anchor.items()}


def _where(good: Tensor, after: Tree, start: Tree) -> Tree:
    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(good.reshape(-1, *[1] * (new.dim() - 1)), new, old)

    return map_leaves(pick, after, start)


def _norms(tree: Tree) -> Tensor:
    squares = [leaf.reshape(len(leaf), -1).square().sum(dim=1) for leaf in tree.values()]
    return torch.stack(squares).sum(dim=0).sqrt()
