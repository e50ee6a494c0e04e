"""Local SGD of stacked clients: many models at once, each on its own rows.

Client i minimises, by heavy-ball steps on batches of its own rows,

    mean over own rows of loss(w) + lam/2 |w - anchor|^2

(`objective` has other pulls). One interface, three ways to compute it, equal up to rounding: linear
models on the CPU run in a compiled kernel, all others as stacked tensors, where the sum of the
clients' losses gives every client its own gradient in one backward pass; `fast=False` takes
`torch.func` for the gradients of any model, the plain reference.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Clients, Task
from coterie.models import Linear, Model
from coterie.solvers.batches import Integers, Rows, draw_plainly
from coterie.solvers.graphs import Recipe, Recording, Step, bucket, record
from coterie.solvers.objective import (
    Batch,
    Near,
    Pull,
    general_gradient,
    stacked_gradient,
    trained_leaves,
)
from coterie.solvers.precision import Precision, current

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

    def __call__(  # noqa: PLR0913 - the parts of the objective, by name
        self,
        model: Model,
        start: Tree,
        clients: Clients,
        rng: Rng,
        *,
        round: int = 0,
        anchor: Tree | None = None,
        lam: float | Tree = 0.0,
        only: Collection[str] | None = None,
        near: Near | None = None,
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
            lam: Strength of the pull, >= 0; a tree of stacked leaves for one of each coordinate.
            only: Names of the leaves to train; the others stay as they are. None for all.
            near: Predictions to stay near to, None for none.

        Returns:
            New stacked parameters.

        Raises:
            ValueError: On trees that do not fit the clients or one another.
        """
        trained = trained_leaves(start, only)
        pull = Pull.checked(start, anchor, len(clients), lam, trained)
        keys, counts = rng.keys(clients.ids), clients.counts.numpy()
        steps, lr = self.count_steps(counts), self.rate(round)
        plain = near is None and len(trained) == len(start) and not pull.weights
        if plain and self.fast and _is_linear(model) and _fits_kernel(start, clients):
            return self._compiled(start, clients, pull, keys=keys, steps=steps, lr=lr)
        result = {name: leaf.detach().clone() for name, leaf in start.items()}
        work = _Work(model, clients.spec.task, tuple(trained), pull, near, lr, current())
        batches = _drawer()(keys, counts, steps, self.batch)
        for places in _portions(model, result, clients.device, steps):
            coins = rng.at("coins") if model.draws else None
            rows = Rows.plan(clients, places, batches, steps, result, coins)
            self._train(work, result, rows)
        return result

    def rate(self, round: int) -> float:
        """Return the learning rate of a round.

        >>> SGD(lr=0.1, halve_every=100).rate(250)
        0.025
        """
        return self.lr * 0.5 ** (round // self.halve_every) if self.halve_every else self.lr

    def count_steps(self, counts: Integers) -> Integers:
        """Return the steps of clients with these numbers of rows; without rows there are none."""
        if self.steps is not None:
            return np.where(counts > 0, self.steps, 0).astype(np.int64)
        return np.asarray(self.epochs * -(-counts // self.batch), dtype=np.int64)

    def _train(self, work: "_Work", result: Tree, rows: Rows) -> None:
        params = {name: leaf[rows.places] for name, leaf in result.items()}
        anchors, weights = work.pull.at(rows.places)
        recording = self._recording(work, params, rows)
        if recording is not None:
            recording.run(params, anchors, (rows.at(step) for step in range(len(rows.busy))))
        else:
            self._step_by_step(work, params, rows, anchors, weights)
        for name in work.trained:
            result[name][rows.places] = params[name]

    def _step_by_step(
        self,
        work: "_Work",
        params: dict[str, Tensor],
        rows: Rows,
        anchors: list[Tensor],
        weights: list[Tensor],
    ) -> None:
        maker = stacked_gradient if self.fast else general_gradient
        gradient = maker(work.model, work.task, work.trained)
        heavy = self.momentum > 0
        speeds = [torch.zeros_like(params[name]) for name in work.trained] if heavy else []
        near = None if work.near is None else work.near.at(rows.places)
        working: dict[str, Tensor] = {}
        for step, busy in enumerate(rows.busy):
            if step == 0 or busy != rows.busy[step - 1]:
                working = {name: leaf[:busy].detach() for name, leaf in params.items()}
                leaves = [working[name].requires_grad_() for name in work.trained]
                speeds, anchors, weights = (
                    [leaf[:busy] for leaf in part] for part in (speeds, anchors, weights)
                )
                near = None if near is None else near.first(busy)
            grads = gradient(working, rows.at(step), near)
            with torch.no_grad():
                pulls = weights or work.pull.lam
                self._move(leaves, grads, speeds, anchors, weights=pulls, lr=work.lr)

    def _recording(self, work: "_Work", params: Tree, rows: Rows) -> Recording | None:
        """Find the recorded step of a stack on a GPU whose clients all take every step."""
        like = next(iter(params.values()))
        even = len(rows.busy) > 1 and min(rows.busy) == len(like)
        usual = work.near is None and not work.pull.weights
        if not (usual and self.fast and like.is_cuda and even and like.dtype == torch.float32):
            return None
        targets, spec, lam = rows.clients.targets, rows.clients.spec, work.pull.lam
        recipe = Recipe(
            maker=_Maker(self, work.model, spec.task, work.lr, lam, work.trained, work.precision),
            leaves=tuple((name, tuple(leaf.shape[1:])) for name, leaf in params.items()),
            trained=work.trained,
            clients=bucket(len(like)),
            row=spec.shape,
            label=tuple(targets.shape[1:]),
            label_type=targets.dtype,
            batch=self.batch,
            pulled=lam > 0,
            heavy=self.momentum > 0,
            draws=work.model.draws,
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
        weights: list[Tensor] | float,
        lr: float,
    ) -> None:
        # One launch for all leaves. Gradients are not written to: two leaves may share one.
        if anchors:
            pulls = torch._foreach_sub(leaves, anchors)
            if isinstance(weights, float):
                grads = list(torch._foreach_add(grads, pulls, alpha=weights))
            else:
                grads = list(torch._foreach_add(grads, torch._foreach_mul(pulls, weights)))
        if self.momentum > 0:
            torch._foreach_mul_(speeds, self.momentum)
            torch._foreach_add_(speeds, grads)
            grads = speeds
        torch._foreach_add_(leaves, grads, alpha=-lr)

    def _compiled(
        self, start: Tree, clients: Clients, pull: Pull, *, keys: Any, steps: Integers, lr: float
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


@dataclass(frozen=True, eq=False)
class _Work:
    # What the steps of one call have in common.
    model: Model
    task: Task
    trained: tuple[str, ...]
    pull: Pull
    near: Near | None
    lr: float
    precision: Precision


@dataclass(frozen=True)
class _Maker:
    # Makes the step that is recorded; compared by value, so that equal settings share a recording.
    sgd: SGD
    model: Model
    task: Task
    lr: float
    lam: float
    trained: tuple[str, ...]
    precision: Precision

    def __call__(self) -> Step:
        gradient = stacked_gradient(self.model, self.task, self.trained)

        def step(
            params: dict[str, Tensor], speeds: list[Tensor], anchors: list[Tensor], batch: Batch
        ) -> None:
            grads = gradient(params, batch, None)
            with torch.no_grad():
                leaves = [params[name] for name in self.trained]
                self.sgd._move(leaves, grads, speeds, anchors, weights=self.lam, lr=self.lr)

        return step


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


def _is_linear(model: Model) -> bool:
    # A subclass that only names other settings is one; one that predicts or loses otherwise is not.
    kind = type(model)
    same = kind.apply is Linear.apply and kind.losses is Linear.losses
    return isinstance(model, Linear) and same


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
