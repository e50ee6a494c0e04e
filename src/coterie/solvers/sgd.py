"""Local SGD of stacked clients: many models at once, each on its own rows.

Client i minimises, by heavy-ball steps on batches of its own rows,

    mean over own rows of loss(w) + lam/2 |w - anchor|^2

One interface, three ways to compute it, equal up to rounding: linear models on the CPU run in a
compiled kernel, all others as stacked tensors, where the sum of the clients' losses gives every
client its own gradient in one backward pass; `fast=False` takes `torch.func` for the gradients of
any model, the plain reference.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federated import Clients, Task
from coterie.models import Linear, Model, row_losses
from coterie.rng import Rng
from coterie.solvers.batches import Integers, Rows, draw_plainly
from coterie.solvers.graphs import Batch, Recipe, Recording, Step, bucket, record
from coterie.tree import Tree

# Gradients of stacked parameters from rows x, targets y and the share of every row in its batch.
Gradient = Callable[[dict[str, Tensor], Tensor, Tensor, Tensor], list[Tensor]]
# Parameters that a CPU thread works on at a time: about its share of the last cache.
_CACHED = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Heavy-ball SGD from a given start: v <- momentum v + g, w <- w - lr v, with v = 0 at first.

    Attributes:
        lr: Learning rate.
        epochs: Passes over a client's rows, each in a new order.
        steps: Steps of every client, instead of epochs.
        batch: Rows a step; the last batch of an epoch may be smaller.
        momentum: Share of the last step that is kept.
        halve_every: Rounds after which the learning rate is halved, again and again; 0 for never.
        fast: False takes the gradients of one client's `apply` by `torch.func`, for comparison.
    """

    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None
    batch: int = 10
    momentum: float = 0.0
    halve_every: int = 0
    fast: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr: given {self.lr}; expected a finite number > 0, such as 0.1")
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum: given {self.momentum}; expected 0 <= momentum < 1, such as 0.9"
            )
        for name in ("epochs", "steps", "batch"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name}: given {given}; expected a whole number of at least 1")
        if self.halve_every < 0:
            raise ValueError(
                f"halve_every: given {self.halve_every}; expected a number of rounds, or 0 to keep "
                "the learning rate"
            )

    def __call__(
        self,
        model: Model,
        start: Tree,
        clients: Clients,
        rng: Rng,
        *,
        round: int = 0,
        anchor: Tree | None = None,
        lam: float = 0.0,
    ) -> Tree:
        """Train every client from its row of `start`, which is left as it is.

        A client's result depends on its own rows, its id, `rng` and `round` alone; a client
        without rows stays where it starts.

        Args:
            model: The model of all clients.
            start: Stacked parameters, on the device of the rows.
            clients: Their rows.
            rng: The stream of the batches.
            round: For the learning rate.
            anchor: What `lam` pulls to, unstacked or stacked; None for zeros.
            lam: Strength of the pull, >= 0.

        Returns:
            New stacked parameters.

        Raises:
            ValueError: On trees that do not fit the clients or one another.
        """
        pull = _Pull.checked(start, anchor, len(clients), lam)
        keys, counts = rng.keys(clients.ids), clients.counts.numpy()
        steps, lr = self.count_steps(counts), self.rate(round)
        if self.fast and type(model) is Linear and _fits_kernel(start, clients):
            return self._compiled(start, clients, pull, keys=keys, steps=steps, lr=lr)
        result = {name: leaf.detach().clone() for name, leaf in start.items()}
        batches = _drawer()(keys, counts, steps, self.batch)
        for places in _portions(model, result, clients.device, steps):
            rows = Rows.plan(clients, places, batches, steps, result)
            self._train(model, result, rows, pull=pull, lr=lr)
        return result

    def rate(self, round: int) -> float:
        """Give the learning rate of a round.

        >>> SGD(lr=0.1, halve_every=100).rate(250)
        0.025
        """
        return self.lr * 0.5 ** (round // self.halve_every) if self.halve_every else self.lr

    def count_steps(self, counts: Integers) -> Integers:
        """Give the steps of clients with these numbers of rows; without rows there are none."""
        if self.steps is not None:
            return np.where(counts > 0, self.steps, 0).astype(np.int64)
        return np.asarray(self.epochs * -(-counts // self.batch), dtype=np.int64)

    def _train(self, model: Model, result: Tree, rows: Rows, *, pull: "_Pull", lr: float) -> None:
        task = rows.clients.spec.task
        gradient = (_stacked_gradient if self.fast else _general_gradient)(model, task)
        params = {name: leaf[rows.places] for name, leaf in result.items()}
        speeds = [torch.zeros_like(leaf) for leaf in params.values()] if self.momentum > 0 else []
        anchors = pull.at(rows.places)
        recording = self._recording(model, params, rows, lam=pull.lam, lr=lr)
        if recording is not None:
            recording.run(params, anchors, (rows.at(step) for step in range(len(rows.busy))))
            for name, leaf in params.items():
                result[name][rows.places] = leaf
            return
        working: dict[str, Tensor] = {}
        for step, busy in enumerate(rows.busy):
            if step == 0 or busy != rows.busy[step - 1]:
                working = {n: leaf[:busy].detach().requires_grad_() for n, leaf in params.items()}
                speeds = [leaf[:busy] for leaf in speeds]
                anchors = [leaf[:busy] for leaf in anchors]
            grads = gradient(working, *rows.at(step))
            with torch.no_grad():
                self._move(list(working.values()), grads, speeds, anchors, lr=lr, lam=pull.lam)
        for name, leaf in params.items():
            result[name][rows.places] = leaf

    def _recording(
        self, model: Model, params: Tree, rows: Rows, *, lam: float, lr: float
    ) -> Recording | None:
        """Find the recorded step of a stack on a GPU whose clients all take every step."""
        like = next(iter(params.values()))
        even = len(rows.busy) > 1 and min(rows.busy) == len(like)
        if not (self.fast and like.is_cuda and even and like.dtype == torch.float32):
            return None
        targets, spec = rows.clients.targets, rows.clients.spec
        recipe = Recipe(
            maker=_Maker(self, model, spec.task, lr, lam),
            leaves=tuple((name, tuple(leaf.shape[1:])) for name, leaf in params.items()),
            clients=bucket(len(like)),
            row=spec.shape,
            label=tuple(targets.shape[1:]),
            label_type=targets.dtype,
            batch=self.batch,
            pulled=lam > 0,
            heavy=self.momentum > 0,
            device=like.device,
        )
        return record(recipe)

    def _move(
        self,
        leaves: list[Tensor],
        grads: list[Tensor],
        speeds: list[Tensor],
        anchors: list[Tensor],
        *,
        lr: float,
        lam: float,
    ) -> None:
        # One launch for all leaves. Gradients are not written to: two leaves may share one.
        if lam > 0:
            pulls = torch._foreach_sub(leaves, anchors)
            grads = list(torch._foreach_add(grads, pulls, alpha=lam))
        if self.momentum > 0:
            torch._foreach_mul_(speeds, self.momentum)
            torch._foreach_add_(speeds, grads)
            grads = speeds
        torch._foreach_add_(leaves, grads, alpha=-lr)

    def _compiled(
        self, start: Tree, clients: Clients, pull: "_Pull", *, keys: Any, steps: Integers, lr: float
    ) -> Tree:
        from coterie.solvers.kernels import linear_sgd, linear_sgd_csr

        features = clients.features
        common: dict[str, Any] = {
            "targets": clients.targets.contiguous().numpy(),
            "starts": clients.starts.numpy(),
            "counts": clients.counts.numpy(),
            "keys": keys,
            "steps": steps,
            "batch": self.batch,
            "lr": lr,
            "momentum": self.momentum,
            "lam": pull.lam,
            "anchor_weight": _array(pull.anchors, "weight"),
            "anchor_bias": _array(pull.anchors, "bias"),
            "task": clients.spec.task,
        }
        weight, bias = _array(start, "weight"), _array(start, "bias")
        if isinstance(features, Tensor):
            common["features"] = features.flatten(1).contiguous().numpy()
            trained = linear_sgd(weight, bias, **common)
        else:
            common |= {part: getattr(features, part) for part in ("indptr", "indices", "data")}
            trained = linear_sgd_csr(weight, bias, **common)
        named = dict(zip(("weight", "bias"), map(torch.from_numpy, trained), strict=True))
        return {name: named[name] for name in start}


@dataclass(frozen=True)
class _Maker:
    # Makes the step that is recorded; compared by value, so that equal settings share a recording.
    sgd: SGD
    model: Model
    task: Task
    lr: float
    lam: float

    def __call__(self) -> Step:
        gradient = _stacked_gradient(self.model, self.task)

        def step(
            params: dict[str, Tensor], speeds: list[Tensor], anchors: list[Tensor], batch: Batch
        ) -> None:
            grads = gradient(params, *batch)
            with torch.no_grad():
                leaves = list(params.values())
                self.sgd._move(leaves, grads, speeds, anchors, lr=self.lr, lam=self.lam)

        return step


@dataclass(frozen=True)
class _Pull:
    # anchors: of the type and device of the parameters, with a client axis of c or 1.
    lam: float
    anchors: dict[str, Tensor]

    @classmethod
    def checked(cls, start: Tree, anchor: Tree | None, clients: int, lam: float) -> "_Pull":
        if not 0 <= lam < float("inf"):
            raise ValueError(f"lam: given {lam}; expected a finite number >= 0")
        for name, leaf in start.items():
            if leaf.shape[:1] != (clients,):
                raise ValueError(
                    f"start[{name!r}]: given shape {tuple(leaf.shape)}; expected one row for each "
                    f"of {clients} clients: stack the tree first"
                )
        if lam == 0:
            return cls(lam, {})
        if anchor is not None and anchor.keys() != start.keys():
            raise ValueError(
                f"anchor: given leaves {sorted(anchor)}; expected those of the start, "
                f"{sorted(start)}"
            )
        return cls(lam, {name: _anchor(name, anchor, leaf) for name, leaf in start.items()})

    def at(self, places: Tensor) -> list[Tensor]:
        # Repeated for every client where that saves launches; in cache it would only take room.
        return [
            (leaf.expand(len(places), *leaf.shape[1:]).contiguous() if leaf.is_cuda else leaf)
            if len(leaf) == 1
            else leaf[places]
            for leaf in self.anchors.values()
        ]


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


def _stacked_gradient(model: Model, task: Task) -> Gradient:
    def gradient(params: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            losses = row_losses(task, model.apply_stacked(params, x), y)
            total = (losses * share).sum()
        return list(torch.autograd.grad(total, tuple(params.values()), materialize_grads=True))

    return gradient


def _general_gradient(model: Model, task: Task) -> Gradient:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        return (row_losses(task, model.apply(params, x), y) * share).sum()

    by_client = torch.func.vmap(torch.func.grad(loss))

    def gradient(params: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> list[Tensor]:
        return list(by_client(params, x, y, share).values())

    return gradient


def _portions(
    model: Model, params: Tree, device: torch.device, steps: Integers
) -> Iterator[Integers]:
    # Those with many steps first. On the CPU few at a time: what a client needs then stays in
    # cache from step to step; on other devices all at once.
    order = np.argsort(-steps, kind="stable")
    together = max(len(order), 1)
    if device.type == "cpu":
        numbers = sum(leaf[0].numel() for leaf in params.values()) if len(order) else 1
        per_thread = model.clients_per_thread or max(1, _CACHED // numbers)
        together = per_thread * torch.get_num_threads()
    for first in range(0, len(order), together):
        yield order[first : first + together]


def _fits_kernel(start: Tree, clients: Clients) -> bool:
    weight, features = start["weight"], clients.features
    dense = features if isinstance(features, Tensor) else torch.from_numpy(features.data[:0])
    wanted = torch.int64 if clients.spec.task == "multiclass" else weight.dtype
    return (
        clients.device.type == weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and dense.dtype == weight.dtype
        and clients.targets.dtype == wanted
        and importlib.util.find_spec("numba") is not None
    )


def _array(tree: Tree, name: str) -> Any:
    return tree[name].detach().contiguous().numpy() if name in tree else None


def _drawer() -> Callable[..., NDArray[np.int32]]:
    if importlib.util.find_spec("numba") is None:
        return draw_plainly
    from coterie.solvers.kernels import draw_batches

    return draw_batches
