"""The local problem that several methods share, and its solvers.

    min_w  mean over own rows of loss(w) + lam/2 |w - anchor|^2

Small linear models are solved exactly, by one linear system (regression) or Newton's method
(classes, to 1e-9); all others by SGD from a given start. On squared
loss a client with large rows halves its learning rate until steps are stable: gradient steps are
stable below 2 / L, L = largest |x|^2 (+ 1 for the bias) + lam. A client uses its own L and releases
nothing about it, so this costs no privacy.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree, by_row, map_leaves, send, take
from coterie.data.federated import Clients, Spec
from coterie.models import Linear, Model
from coterie.models.linear import head_of, matrix_of
from coterie.solvers.posterior import Prior, posterior
from coterie.solvers.ridge import solve_ridge
from coterie.solvers.sgd import SGD, Batch, Near, Schedule, fused_growth, stacked_gradient

How = Literal["auto", "exact", "sgd"]
_SMALL = 1024  # features of least squares
_SMALL_CLASSES, _SMALL_WEIGHTS = 256, 2048  # features, and features times outputs, of classes
# Rows of a client, and parameters of all, in one piece of the Fisher information.
_FISHER_ROWS, _FISHER = 64, {"cpu": 1 << 22, "cuda": 1 << 27}


_FAR = 10.0  # times the norm of the shared model: a model that is kept is looked at again


class Doubts:
    """Which models have grown, noted on a GPU while the host goes on.

    Steps without doubts need no check of losses. Whoever collects doubts takes the steps again,
    outside of `checked_later`, if there are any.
    """

    def __init__(self) -> None:
        self._flags: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def note(self, doubtful: Tensor) -> None:
        """Ask the GPU for these flags."""
        flag, event = doubtful.any(), None
        if flag.is_cuda:
            here = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag = here.copy_(flag, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._flags.append((flag, event))

    def any(self) -> bool:
        """Wait for the flags, and return whether one is set."""
        for flag, event in self._flags:
            if event is not None:
                event.synchronize()
            if bool(flag):
                return True
        return False


_LATER: ContextVar[Doubts | None] = ContextVar("later", default=None)


@contextmanager
def checked_later(doubts: Doubts | None) -> Iterator[None]:
    """Note doubts about steps on a GPU in this block, in place of waiting for them."""
    before = _LATER.set(doubts)
    try:
        yield
    finally:
        _LATER.reset(before)


@dataclass(frozen=True, kw_only=True)
class LocalProblem:
    """The regularised local problem of stacked clients.

    Attributes:
        model: The model.
        how: "exact" (linear models with lam > 0), "sgd", or "auto": exact where that is fast, for
            at most 1024 features, of classes 256 and 2048 weights.
        sgd: The settings of SGD.
        lam: The weight of the proximal term.
        lams: In place of `lam`, one weight per client, (c,).
        weights: In place of `lam`, weights per coordinate, stacked (SGD only).
        near: Penalty on the distance from the predictions of fixed models (SGD only).
    """

    model: Model
    how: How
    sgd: SGD
    lam: float
    lams: Tensor | None = None
    weights: Tree | None = None
    near: Near | None = None

    def is_exact(self, spec: Spec) -> bool:
        """Return whether the problem is solved in closed form."""
        linear, squares = isinstance(self.model, Linear), spec.task == "regression"
        possible = linear and self.lam > 0 and self.weights is None and self.near is None
        possible = possible and (squares or self.lams is None)
        if self.how == "exact" and not possible:
            raise ValueError(
                f'solver = "exact" solves linear models with lam > 0; this is '
                f'{type(self.model).__name__} on {spec.task} with lam = {self.lam}: use "sgd"'
            )
        weights = spec.features * spec.outputs
        small = spec.features <= _SMALL_CLASSES and weights <= _SMALL_WEIGHTS
        fast = spec.features <= _SMALL if squares else small
        return possible and (self.how == "exact" or (self.how == "auto" and fast))

    def solve(
        self,
        start: Tree,
        clients: Clients,
        rng: Rng,
        *,
        round: int,
        anchor: Tree | None,
        only: Collection[str] | None = None,
        keep_failed: bool = False,
    ) -> Tree:
        """Return the solutions of all clients, stacked; arguments are those of `SGD`.

        With `keep_failed`, models that are not finite are returned as they are: the clip turns
        their contribution into zero and counts it. Otherwise such clients keep their start.
        """
        if only is None and self.is_exact(clients.spec):
            assert isinstance(self.model, Linear)
            if clients.spec.task == "regression":
                lam = self.lam if self.lams is None else self.lams
                after = solve_ridge(clients, anchor=anchor, lam=lam, bias=self.model.bias)
            else:
                after = _classes(clients, anchor, self.lam, bias=self.model.bias)
            return after if keep_failed else _where(_norms(after).isfinite(), after, start)
        if self.lams is not None:
            rows = self.lams.to(clients.device)
            weights = map_leaves(lambda leaf: by_row(rows.to(leaf), leaf).expand_as(leaf), start)
            plain = replace(self, lam=float(rows.amax()), lams=None, weights=weights)
            return plain.solve(
                start, clients, rng, round=round, anchor=anchor, only=only, keep_failed=keep_failed
            )
        rates = list(self._rates(clients, round))
        if len(rates) == 1:
            after = self._steps(rates[0][1], start, clients, rng, round, anchor, only)
            return self._guard(start, after, clients, keep_failed)
        after = dict(start)
        for places, sgd in rates:
            here = places.to(clients.device)
            some = replace(
                self,
                weights=None if self.weights is None else take(self.weights, here),
                near=None if self.near is None else self.near.at(here),
            )
            centre = None if anchor is None else _rows_of(anchor, start, here)
            part = clients.at(places)
            steps = some._steps(sgd, take(start, here), part, rng, round, centre, only)
            for name, leaf in steps.items():
                after[name] = after[name].index_copy(0, here, leaf)
        return self._guard(start, after, clients, keep_failed)

    def draw_ahead(self, clients: Clients, rng: Rng) -> None:
        """Draw the batches of a `solve` by steps with this stream; see `Clients.ahead`."""
        linear = isinstance(self.model, Linear) and clients.spec.task == "regression"
        if not (linear or self.is_exact(clients.spec)):
            self.sgd.draw_ahead(self.model, clients, rng)

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

    def _rates(self, clients: Clients, round: int) -> Iterator[tuple[Tensor, SGD]]:
        """Halve the learning rate of clients with large rows (linear least squares)."""
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

    def _guard(
        self, start: Tree, after: Tree, clients: Clients, keep_failed: bool, far: float = 2.0
    ) -> Tree:
        """Reset a client whose steps diverged to its start, which releases nothing.

        A model has diverged if it is not finite, or if it grew and increased the loss on own rows
        (steps on squared loss are unbounded and could grow from round to round).
        """
        sizes, doubtful = _growth(after, start, far)
        later = _LATER.get()
        if later is not None:
            later.note(doubtful)
            return after
        if not bool(doubtful.any()):
            return after
        good = sizes.isfinite()
        if doubtful.is_cuda:  # one at a time a GPU would mostly wait
            before, now = self._stacked_losses((start, after), clients)
            good &= (now <= before) | ~doubtful
        else:
            for place in torch.nonzero(doubtful):
                # One at a time: rows of others would change the shapes of sums, and so their bits.
                one = clients.at(place.cpu())
                before, now = (self._losses(take(tree, place), one) for tree in (start, after))
                good[place] &= now <= before
        return _where(good | ~sizes.isfinite() if keep_failed else good, after, start)

    @torch.no_grad()
    def _stacked_losses(self, models: tuple[Tree, Tree], clients: Clients) -> Tensor:
        """Return each client's mean loss, (2, c), in a stack of public shape as steps are taken in.

        So it is a function of the client's own rows to the last bit, and of all clients at once.
        """
        counts, batch = clients.counts.numpy(), self.sgd.batch
        steps = -(-counts // batch)
        rows = np.arange(int(steps.max(initial=0)) * batch).reshape(1, -1, batch)
        batches = np.where(rows < counts[:, None, None], rows, -1)
        like = next(iter(models[0].values()))
        width = self.sgd.stack_width(self.model, models[0], clients)
        schedule = Schedule.plan(clients, batches, steps, width, like)
        held = [map_leaves(lambda leaf: leaf.new_zeros(width, *leaf.shape[1:]), m) for m in models]
        sums, found = like.new_zeros(2, width), like.new_zeros(2, len(clients))
        for step in range(len(schedule) + 1):
            if step in schedule.ends:
                who, places = schedule.ends[step]
                found[:, who] = sums[:, places]
            if step in schedule.starts:
                who, places = schedule.starts[step]
                sums[:, places] = 0
                for mine, given in zip(held, models, strict=True):
                    for name, leaf in given.items():
                        mine[name][places] = leaf[who]
            if step < len(schedule):
                x, y, share, _ = schedule.at(step)
                for number, params in enumerate(held):
                    outputs = self.model.apply_stacked(params, x)
                    losses = self.model.losses(clients.spec.task, outputs, y)
                    sums[number] += torch.where(share > 0, losses, 0).sum(dim=1)
        return found / send(clients.counts, like.device).clamp_min(1)

    def settle(self, fallback: Tree, after: Tree, clients: Clients) -> Tree:
        """Return models, and a fallback for clients whose model has diverged since it was that.

        Models that are kept over rounds can grow a little in each of them.
        """
        return self._guard(fallback, after, clients, keep_failed=False, far=_FAR)

    def _losses(self, params: Tree, clients: Clients) -> Tensor:
        with torch.no_grad():
            outputs = self.model.apply_stacked(params, clients.x)
            losses = self.model.losses(clients.spec.task, outputs, clients.y)
            rows = clients.mask.sum(dim=1).clamp_min(1)
            return torch.where(clients.mask, losses, 0).sum(dim=1) / rows


def _classes(clients: Clients, anchor: Tree | None, lam: float, *, bias: bool) -> Tree:
    """Return the minima for classes, by Newton's method; NaN where the anchor is not finite."""
    spec = clients.spec
    zero = torch.zeros(spec.outputs, spec.features + bias)
    near = zero if anchor is None else matrix_of(anchor)
    found = by_anchor(clients, near, lambda some, center: _modes(some, center, lam, bias=bias))
    return head_of(found, bias)


def by_anchor(clients: Clients, near: Tensor, fit: Callable[[Clients, Tensor], Tensor]) -> Tensor:
    """Return each client's fit (outputs, features) near its anchor; NaN where that is not finite.

    `near` is one anchor, or one per client of which few differ. `fit` takes clients and the
    anchor that they share.
    """
    near = near.cpu().double()
    if near.dim() == 2:
        return fit(clients, near)
    found = torch.full((len(clients), *near.shape[1:]), torch.nan, dtype=torch.float64)
    sound = near.isfinite().flatten(1).all(dim=1)
    centers, which = torch.unique(near, dim=0, return_inverse=True)
    for number in which[sound].unique():
        here = torch.nonzero(which == number)[:, 0]
        found[here] = fit(clients.at(here), centers[number]).cpu().double()
    return found.to(clients.device)


def _modes(clients: Clients, center: Tensor, lam: float, *, bias: bool) -> Tensor:
    prior = Prior(center, torch.full_like(center, 1 / lam), per_row=True)
    found = posterior(clients, prior, bias=bias).deviation
    minimum: Tensor = found / lam**0.5 + center.to(found.device)
    return minimum


def _rows_of(anchor: Tree, start: Tree, places: Tensor) -> Tree:
    """Return the anchor of some clients, where it has a row per client."""
    stacked = {name: leaf.dim() == start[name].dim() for name, leaf in anchor.items()}
    return {name: leaf[places] if stacked[name] else leaf for name, leaf in anchor.items()}


def _where(good: Tensor, after: Tree, start: Tree) -> Tree:
    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(good.reshape(-1, *[1] * (new.dim() - 1)), new, old)

    return map_leaves(pick, after, start)


def _growth(after: Tree, before: Tree, far: float) -> tuple[Tensor, Tensor]:
    """Return the norm of each client's model, and whether it has grown since, or is no number."""
    fused = fused_growth(list(after.values()), [before[name] for name in after], far)
    if fused is not None:
        return fused
    sizes = _norms(after)
    return sizes, ~(sizes <= far * _norms(before) + far / 2)


def _norms(tree: Tree) -> Tensor:
    norms = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in tree.values()]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return whole


def largest_squares(clients: Clients) -> Tensor:
    """Return each client's largest squared row norm, (c,); 0 without rows."""
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


def fisher(model: Model, params: Tree, clients: Clients) -> Tree:
    """Return the diagonal of every client's empirical Fisher information, stacked.

    F_j = mean over own rows of (d loss(row) / d w_j)^2, with the rows' own targets (Kirkpatrick et
    al. 2017; Hu, Wu and Smith); zeros for clients without rows.

    Some rows of each client are computed at once, as a stack of models with one row each; their
    number follows from public sizes, since bits depend on the shape of a stack.
    """
    names, like = list(params), next(iter(params.values()))
    gradient = stacked_gradient(model, clients.spec.task, names)
    entries = sum(leaf.numel() for leaf in params.values())
    most = _FISHER.get(like.device.type, _FISHER["cpu"])
    width = max(1, min(_FISHER_ROWS, most // max(1, entries)))
    copies = {
        name: leaf.detach().repeat_interleave(width, dim=0).requires_grad_()
        for name, leaf in params.items()
    }
    found = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    index, mask = (functional.pad(part, (0, width)) for part in (clients.index, clients.mask))
    for row in range(0, clients.longest, width):
        at, real = index[:, row : row + width], mask[:, row : row + width]
        x, y = clients.rows(at, real).to(like), clients.labels(at, real)
        one = (part.flatten(0, 1)[:, None] for part in (x, y, real.to(like)))
        for name, grad in zip(names, gradient(copies, Batch(*one), None), strict=True):
            squares = torch.where(_per_client(real.flatten(), grad), grad, 0).square()
            found[name] += squares.reshape(len(at), width, *grad.shape[1:]).sum(dim=1)
    counts = clients.counts.clamp_min(1).to(mask.device)
    return {name: leaf / _per_client(counts, leaf).to(leaf) for name, leaf in found.items()}


def _per_client(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))
