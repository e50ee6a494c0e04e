"""What a local step descends: the mean loss of a batch, a pull towards an anchor, a nearness.

    mean over the batch of loss(w) + sum_j lam_j/2 (w_j - anchor_j)^2
        + kl/2 mean over the batch of [KL(p_toward || p_w) + KL(p_w || p_toward)]

`lam` is one number, or one for each coordinate of each client (elastic weight consolidation,
Kirkpatrick et al. 2017); p are the predicted distributions (symmetrised KL, as in Hu, Wu and Smith;
for regression normals of variance 1, where it is the squared difference of the means).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.tree import Tree
from coterie.data.federated import Task
from coterie.models import Model
from coterie.solvers.precision import lowered


class Batch(NamedTuple):
    """A step's rows (c, batch, ...), targets, the share of every row, and the clients' coins."""

    x: Tensor
    y: Tensor
    share: Tensor
    coins: Tensor | None = None


# Gradients of the stacked leaves that are trained, in their order, from all leaves and a batch.
Gradient = Callable[[dict[str, Tensor], Batch, "Near | None"], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Near:
    """Stay near the predictions of fixed models.

    Attributes:
        weight: Of the symmetrised KL divergence, halved.
        toward: The fixed models, stacked as the clients are.
    """

    weight: float
    toward: Tree

    def at(self, places: Tensor) -> "Near":
        """Pick clients."""
        return Near(self.weight, {name: leaf[places] for name, leaf in self.toward.items()})

    def first(self, clients: int) -> "Near":
        """Keep the first clients."""
        return Near(self.weight, {name: leaf[:clients] for name, leaf in self.toward.items()})


@dataclass(frozen=True, eq=False)
class Pull:
    """The pull of trained leaves towards an anchor.

    Attributes:
        lam: Its strength, where it is one number; 0 for none.
        anchors: Leaves of the type and device of the parameters, with a client axis of c or 1.
        weights: Strengths of single coordinates in place of `lam`, stacked; empty for none.
    """

    lam: float
    anchors: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def checked(
        cls, start: Tree, anchor: Tree | None, clients: int, lam: float | Tree, trained: list[str]
    ) -> "Pull":
        """Check trees against the clients and one another."""
        _check_stacked(start, clients)
        if isinstance(lam, int | float):
            if not 0 <= lam < float("inf"):
                raise ValueError(f"lam: given {lam}; expected a finite number >= 0")
            if lam == 0:
                return cls(0.0, {}, {})
        if anchor is not None and not set(trained) <= anchor.keys() <= start.keys():
            raise ValueError(
                f"anchor: given leaves {sorted(anchor)}; expected those of the start, "
                f"{sorted(start)}"
            )
        anchors = {name: _anchor(name, anchor, start[name]) for name in trained}
        if isinstance(lam, int | float):
            return cls(float(lam), anchors, {})
        weights = {
            name: lam[name].to(start[name]) if name in lam else torch.zeros_like(start[name])
            for name in trained
        }
        return cls(0.0, anchors, weights)

    def at(self, places: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return anchors and weights of clients."""
        # Repeated for every client where that saves launches; in cache it would only take room.
        anchors = [
            (leaf.expand(len(places), *leaf.shape[1:]).contiguous() if leaf.is_cuda else leaf)
            if len(leaf) == 1
            else leaf[places]
            for leaf in self.anchors.values()
        ]
        return anchors, [leaf[places] for leaf in self.weights.values()]


def _check_stacked(start: Tree, clients: int) -> None:
    for name, leaf in start.items():
        if leaf.shape[:1] != (clients,):
            raise ValueError(
                f"start[{name!r}]: given shape {tuple(leaf.shape)}; expected one row for each "
                f"of {clients} clients: stack the tree first"
            )


def _anchor(name: str, anchor: Tree | None, like: Tensor) -> Tensor:
    if anchor is None:
        return like.new_zeros(1, *like.shape[1:])
    given = anchor[name].detach().to(like)
    if given.shape not in (like.shape, like.shape[1:]):
        raise ValueError(
            f"anchor[{name!r}]: given shape {tuple(given.shape)}; expected "
            f"{tuple(like.shape[1:])}, or {tuple(like.shape)} for one a client"
        )
    return given if given.shape == like.shape else given[None]


def trained_leaves(start: Tree, only: Collection[str] | None) -> list[str]:
    """Name the leaves that are trained, in the order of the tree."""
    if only is None:
        return list(start)
    unknown = sorted(set(only) - start.keys())
    if unknown or not only:
        raise ValueError(
            f"only = {sorted(only)}: expected leaves of the model, at least one of "
            f"{', '.join(start)}"
        )
    return [name for name in start if name in only]


def stacked_gradient(model: Model, task: Task, trained: Collection[str]) -> Gradient:
    """Return every client's gradient by one backward pass through the sum of their losses."""

    def gradient(params: dict[str, Tensor], batch: Batch, near: Near | None) -> list[Tensor]:
        with torch.enable_grad():
            with lowered(batch.x.device):
                outputs = _predict(model, params, batch)
            losses = model.losses(task, outputs, batch.y)
            if near is not None:
                with torch.no_grad(), lowered(batch.x.device):
                    # In training's own way: dropout falls on the same places of both.
                    theirs = _predict(model, dict(near.toward), batch)
                losses = losses + near.weight / 2 * divergence(task, outputs, theirs)
            by_client = (losses * batch.share).sum(dim=1)
            total = by_client.sum()
        leaves = [params[name] for name in trained]
        if not total.requires_grad:  # what is trained does not change the outputs
            return [torch.zeros_like(leaf) for leaf in leaves]
        grads = list(torch.autograd.grad(total, leaves, materialize_grads=True))
        return _with_bad_losses(grads, by_client.detach())

    return gradient


def _with_bad_losses(grads: list[Tensor], losses: Tensor) -> list[Tensor]:
    # A loss that is no number can have a gradient that is one: the client's steps must not pass for
    # sound. One leaf, the smallest, is enough to tell.
    place = min(range(len(grads)), key=lambda at: grads[at].numel())
    told = torch.where(losses.isnan(), losses, 0).to(grads[place])
    grads[place] = grads[place] + told.reshape(-1, *[1] * (grads[place].dim() - 1))
    return grads


def general_gradient(model: Model, task: Task, trained: Collection[str]) -> Gradient:
    """Return every client's gradient by `torch.func`, from the model of one client."""

    def loss(mine: dict[str, Tensor], held: dict[str, Tensor], near: Near, batch: Batch) -> Tensor:
        coins = () if batch.coins is None else (batch.coins,)
        outputs = model.apply(mine | held, batch.x, *coins)
        losses = model.losses(task, outputs, batch.y)
        if near.toward:
            theirs = model.apply(near.toward, batch.x, *coins)
            losses = losses + near.weight / 2 * divergence(task, outputs, theirs)
        return (losses * batch.share).sum()

    def gradient(params: dict[str, Tensor], batch: Batch, near: Near | None) -> list[Tensor]:
        mine = {name: params[name].detach() for name in trained}
        held = {name: leaf.detach() for name, leaf in params.items() if name not in mine}
        toward = {} if near is None else dict(near.toward)
        weight = 0.0 if near is None else near.weight

        def one(mine: dict[str, Tensor], held: Tree, toward: Tree, *batch: Tensor) -> Tensor:
            return loss(mine, dict(held), Near(weight, toward), Batch(*batch))

        given = [part for part in batch if part is not None]
        found = torch.func.vmap(torch.func.grad(one))(mine, held, toward, *given)
        return list(found.values())

    return gradient


def _predict(model: Model, params: dict[str, Tensor], batch: Batch) -> Tensor:
    coins = () if batch.coins is None else (batch.coins,)
    outputs = model.apply_stacked(params, batch.x, *coins)
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def divergence(task: Task, outputs: Tensor, others: Tensor) -> Tensor:
    """Return KL(p || q) + KL(q || p) of every row's predicted distributions.

    The sum over outcomes of (p - q) (log p - log q): softmax for multiclass, independent Bernoullis
    for binary and multilabel, normals of variance 1 for regression.
    """
    if task == "regression":
        return (outputs - others).square()
    if task == "multiclass":
        ours, theirs = functional.log_softmax(outputs, -1), functional.log_softmax(others, -1)
        return ((ours.exp() - theirs.exp()) * (ours - theirs)).sum(dim=-1)
    # Of a Bernoulli with logit o: (p - q) times the difference of the logits.
    apart = (torch.sigmoid(outputs) - torch.sigmoid(others)) * (outputs - others)
    return apart.sum(dim=-1) if task == "multilabel" else apart
