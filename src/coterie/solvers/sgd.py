"""Local SGD of stacked clients: many models at once, each on its own rows.

Client i minimises, by heavy-ball steps on batches of its own rows,

    mean loss(w) + sum_j lam_j/2 (w_j - anchor_j)^2
        + kl/2 mean [KL(p_toward || p_w) + KL(p_w || p_toward)]

`lam` is one number, or one per coordinate and client (elastic weight consolidation, Kirkpatrick et
al. 2017); p are the predicted distributions (symmetrised KL, as in Hu, Wu and Smith; for regression
normal with variance 1, so that the divergence is the squared difference of the means).

There are three implementations, equal up to rounding. Linear models on the CPU run in a compiled
kernel. All others run as stacked tensors: one backward pass through the sum of the clients' losses
returns every client's own gradient. `fast=False` takes `torch.func` for any model, as a check.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Clients, Task
from coterie.models import Linear, Model

Integers = NDArray[np.int64]
Precision = Literal["float32", "bfloat16"]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# Parameters that a CPU thread works on at a time: about its share of the last-level cache.
_CACHED = 1 << 20
_KEPT = 16  # recordings
_WARM_UP = 3

# Mixed precision changes speed, never the guarantee: products of a step are computed in this type,
# parameters stay in float32, contributions are clipped, rounded and summed in float64. float16 is
# not offered: it loses small gradients unless losses are scaled.
_PRECISION: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def computed_in(precision: Precision) -> Iterator[None]:
    """Compute the local steps inside this block in this precision."""
    before = _PRECISION.set(precision)
    try:
        yield
    finally:
        _PRECISION.reset(before)


def current_precision() -> Precision:
    """Return the precision of local steps."""
    return _PRECISION.get()


def lowered(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch computes products in the current precision."""
    if current_precision() == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, current_precision()))


class Batch(NamedTuple):
    """A step's rows (c, batch, ...), targets, weight per row, and per-client random seeds."""

    x: Tensor
    y: Tensor
    share: Tensor
    seeds: Tensor | None = None


# Gradients of the trained stacked leaves, in order, from all leaves and a batch.
Gradient = Callable[[dict[str, Tensor], Batch, "Near | None"], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Near:
    """A penalty on the distance from the predictions of fixed models.

    Attributes:
        weight: Of the symmetrised KL divergence, halved.
        toward: The fixed models, stacked as the clients are.
    """

    weight: float
    toward: Tree

    def at(self, places: Tensor | slice) -> "Near":
        """Return the penalty of the clients at these places."""
        return Near(self.weight, {name: leaf[places] for name, leaf in self.toward.items()})


@dataclass(frozen=True, eq=False)
class Proximal:
    """The proximal term of the trained leaves: lam/2 |w - anchor|^2.

    Attributes:
        lam: Its weight, if it is one number; 0 for none.
        anchors: Leaves of the type and device of the parameters, with a client axis of c or 1.
        weights: Weights per coordinate in place of `lam`, stacked; empty for none.
    """

    lam: float
    anchors: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def checked(
        cls, start: Tree, anchor: Tree | None, clients: int, lam: float | Tree, trained: list[str]
    ) -> "Proximal":
        """Return the term; raise ValueError if trees do not fit the clients or each other."""
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
        """Return anchors and weights of the clients at these places."""
        # Repeated per client where that saves launches; on the CPU it would only fill the cache.
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
            f"{tuple(like.shape[1:])}, or {tuple(like.shape)} for one per client"
        )
    return given if given.shape == like.shape else given[None]


def trained_leaves(start: Tree, only: Collection[str] | None) -> list[str]:
    """Return the names of the trained leaves, in the order of the tree."""
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
                    # With the same dropout mask as the trained model.
                    theirs = _predict(model, dict(near.toward), batch)
                losses = losses + near.weight / 2 * divergence(task, outputs, theirs)
            by_client = (losses * batch.share).sum(dim=1)
            total = by_client.sum()
        leaves = [params[name] for name in trained]
        if not total.requires_grad:  # the trained leaves do not change the outputs
            return [torch.zeros_like(leaf) for leaf in leaves]
        grads = list(torch.autograd.grad(total, leaves, materialize_grads=True))
        return _with_bad_losses(grads, by_client.detach())

    return gradient


def _with_bad_losses(grads: list[Tensor], losses: Tensor) -> list[Tensor]:
    # A NaN loss can have a finite gradient. Put the NaN into one leaf, the smallest, so that the
    # client is detected as failed.
    place = min(range(len(grads)), key=lambda at: grads[at].numel())
    spoilt = torch.where(losses.isnan(), losses, 0).to(grads[place])
    grads[place] = grads[place] + spoilt.reshape(-1, *[1] * (grads[place].dim() - 1))
    return grads


def general_gradient(model: Model, task: Task, trained: Collection[str]) -> Gradient:
    """Return every client's gradient by `torch.func`, from the model of one client."""

    def gradient(params: dict[str, Tensor], batch: Batch, near: Near | None) -> list[Tensor]:
        mine = {name: params[name].detach() for name in trained}
        held = {name: leaf.detach() for name, leaf in params.items() if name not in mine}
        toward = {} if near is None else dict(near.toward)

        def one(mine: Tree, held: Tree, toward: Tree, *given: Tensor) -> Tensor:
            x, y, share, *seeds = given
            outputs = model.apply({**mine, **held}, x, *seeds)
            losses = model.losses(task, outputs, y)
            if near is not None:
                theirs = model.apply(toward, x, *seeds)
                losses = losses + near.weight / 2 * divergence(task, outputs, theirs)
            return (losses * share).sum()

        given = [part for part in batch if part is not None]
        found = torch.func.vmap(torch.func.grad(one))(mine, held, toward, *given)
        return list(found.values())

    return gradient


def _predict(model: Model, params: dict[str, Tensor], batch: Batch) -> Tensor:
    seeds = () if batch.seeds is None else (batch.seeds,)
    outputs = model.apply_stacked(params, batch.x, *seeds)
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def divergence(task: Task, outputs: Tensor, others: Tensor) -> Tensor:
    """Return KL(p || q) + KL(q || p) of every row's predicted distributions.

    This is the sum over outcomes of (p - q) (log p - log q): softmax for multiclass, independent
    Bernoulli for binary and multilabel, normal of variance 1 for regression.
    """
    if task == "regression":
        return (outputs - others).square()
    if task == "multiclass":
        ours, theirs = functional.log_softmax(outputs, -1), functional.log_softmax(others, -1)
        return ((ours.exp() - theirs.exp()) * (ours - theirs)).sum(dim=-1)
    # For a Bernoulli: (p - q) times the difference of the logits.
    apart = (torch.sigmoid(outputs) - torch.sigmoid(others)) * (outputs - others)
    return apart.sum(dim=-1) if task == "multilabel" else apart


@dataclass(frozen=True)
class Rows:
    """The batches of some clients, those with most steps first, so that active clients lead.

    A batch that is not full repeats its first row with weight zero: this needs no masks, and no row
    from outside the batch can spoil it.
    """

    clients: Clients
    places: Tensor  # (c,) positions of these clients in the stack
    index: Tensor  # (steps, c, batch) rows of the flat arrays
    share: Tensor  # (steps, c, batch) one over the number of rows in the batch, or 0
    active: list[int]  # (steps,) how many clients take the step
    seeds: Tensor | None = None  # (steps, c) one per client, for models with dropout

    @classmethod
    def plan(
        cls,
        clients: Clients,
        places: Integers,
        batches: Any,
        steps: Integers,
        params: Tree,
        stream: Rng | None = None,
    ) -> "Rows":
        """Return the batches of the clients at these places."""
        longest = int(steps[places].max(initial=0))
        local = np.ascontiguousarray(batches[places, :longest].transpose(1, 0, 2))
        missing = local < 0
        index = np.where(missing, local[:, :, :1], local) + clients.starts.numpy()[places, None]
        share = ~missing / np.maximum((~missing).sum(axis=2, keepdims=True), 1)
        like = next(iter(params.values()))
        active = (steps[places][None, :] > np.arange(longest)[:, None]).sum(axis=1)
        dense = isinstance(clients.features, Tensor)
        seeds = None
        if stream is not None:
            drawn = stream.words(clients.ids.numpy()[places], np.arange(longest)[:, None])
            seeds = torch.from_numpy(drawn.astype(np.int64)).to(like.device)
        return cls(
            clients=clients,
            places=torch.from_numpy(places).to(like.device),
            index=torch.from_numpy(index).to(like.device if dense else "cpu"),
            share=torch.from_numpy(share).to(like),
            active=active.tolist(),
            seeds=seeds,
        )

    def at(self, step: int) -> Batch:
        """Return the batch of a step."""
        share = self.share[step, : self.active[step]]
        index = self.index[step, : self.active[step]]
        if isinstance(self.clients.features, Tensor):
            x = self.clients.features[index]
        else:
            picked = self.clients.features[index.reshape(-1).numpy()].toarray()
            x = torch.from_numpy(picked).reshape(*index.shape, *self.clients.spec.shape)
        seeds = None if self.seeds is None else self.seeds[step, : self.active[step]]
        return Batch(x.to(share), self.clients.targets[index], share, seeds)


@dataclass(frozen=True)
class Recipe:
    """All that a recording depends on except values: equal recipes share a recording."""

    sgd: "SGD"
    model: Model
    task: Task
    trained: tuple[str, ...]
    lr: float
    lam: float
    precision: Precision
    leaves: Shapes
    clients: int
    row: tuple[int, ...]
    label: tuple[int, ...]
    label_type: torch.dtype
    device: torch.device


def bucket(clients: int) -> int:
    """Return a stack size rounded up, so that similar cohorts share a recording."""
    return clients if clients < 32 else -(-clients // 4) * 4


class Recording:
    """A CUDA graph of one step, with the memory that it reads and writes.

    A step of a small network is some hundred kernel launches, which take longer than the
    arithmetic. The graph is recorded once per recipe and replayed with other values.
    """

    def __init__(self, recipe: Recipe) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(recipe.clients, *shape, dtype=dtype, device=recipe.device)

        self._params = {
            name: zeros(*shape).requires_grad_(name in recipe.trained)
            for name, shape in recipe.leaves
        }
        moved = [shape for name, shape in recipe.leaves if name in recipe.trained]
        sgd, rows = recipe.sgd, recipe.sgd.batch
        self._velocities = [zeros(*shape) for shape in moved] if sgd.momentum > 0 else []
        self._anchors = [zeros(*shape) for shape in moved] if recipe.lam > 0 else []
        self._batch = Batch(
            zeros(rows, *recipe.row),
            zeros(rows, *recipe.label, dtype=recipe.label_type),
            zeros(rows),
            zeros(dtype=torch.int64) if recipe.model.draws else None,
        )
        gradient = stacked_gradient(recipe.model, recipe.task, recipe.trained)

        def step() -> None:
            grads = gradient(self._params, self._batch, None)
            with torch.no_grad():
                leaves = [self._params[name] for name in recipe.trained]
                sgd._move(
                    leaves, grads, self._velocities, self._anchors, weights=recipe.lam, lr=recipe.lr
                )

        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(recipe.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(recipe.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream(recipe.device).wait_stream(stream)
        with torch.cuda.graph(self._graph):
            step()

    def run(
        self, params: dict[str, Tensor], anchors: list[Tensor], batches: Iterable[Batch]
    ) -> None:
        """Take a step for each batch, updating `params` in place."""
        clients = len(next(iter(params.values())))
        with torch.no_grad():
            for mine, given in zip(self._params.values(), params.values(), strict=True):
                _fill(mine, given)
            for mine, given in zip(self._anchors, anchors, strict=True):
                _fill(mine, given)
            for velocity in self._velocities:
                velocity.zero_()
            for batch in batches:
                for static, now in zip(self._batch, batch, strict=True):
                    if static is not None and now is not None:
                        _fill(static, now)
                self._graph.replay()
            for mine, given in zip(self._params.values(), params.values(), strict=True):
                given.copy_(mine[:clients])


def _fill(static: Tensor, given: Tensor) -> None:
    # Places beyond the stack hold zeros; their results are never read.
    static[: len(given)].copy_(given)
    if len(given) < len(static):
        static[len(given) :].zero_()


@lru_cache(maxsize=_KEPT)
def record(recipe: Recipe) -> Recording | None:
    """Return a recorded step; None if the model cannot be recorded."""
    try:
        return Recording(recipe)
    except RuntimeError:
        torch.cuda.synchronize(recipe.device)
        return None


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Heavy-ball SGD from a given start: v <- momentum v + g, w <- w - lr v, with v = 0 at first.

    Attributes:
        lr: Learning rate.
        epochs: Passes over a client's rows, each in a new order.
        steps: Steps of every client, instead of epochs.
        batch: Rows per step; the last batch of an epoch may be smaller.
        momentum: Heavy-ball factor.
        halve_every: Rounds between halvings of the learning rate; 0 for never.
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

    def __call__(  # noqa: PLR0913 - the terms of the objective
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
        """Return every client's model, trained from its row of `start`.

        A client's result depends only on its own rows, its id, `rng` and `round`. A client without
        rows keeps its row of `start`.

        Args:
            model: The model of all clients.
            start: Stacked parameters, on the device of the rows.
            clients: Their rows.
            rng: The random stream of the batches.
            round: The round, for the learning rate.
            anchor: Centre of the proximal term, unstacked or stacked; None for zeros.
            lam: Weight of the proximal term, >= 0; a tree of stacked leaves for one per coordinate.
            only: Names of the leaves to train; the others keep their values. None for all.
            near: Penalty on the distance from given predictions; None for none.

        Raises:
            ValueError: If trees do not fit the clients or each other.
        """
        trained = trained_leaves(start, only)
        proximal = Proximal.checked(start, anchor, len(clients), lam, trained)
        keys, counts = rng.keys(clients.ids), clients.counts.numpy()
        steps, lr = self.count_steps(counts), self.rate(round)
        plain = near is None and len(trained) == len(start) and not proximal.weights
        if plain and self.fast and _is_linear(model) and _fits_kernel(start, clients):
            return self._compiled(start, clients, proximal, keys=keys, steps=steps, lr=lr)
        result = {name: leaf.detach().clone() for name, leaf in start.items()}
        work = _Work(model, clients.spec.task, tuple(trained), proximal, near, lr)
        from coterie.solvers.sgd_kernels import draw_batches

        batches = draw_batches(keys, counts, steps, self.batch)
        for places in _portions(model, result, clients.device, steps):
            stream = rng.at("coins") if model.draws else None  # the name is part of the stream
            rows = Rows.plan(clients, places, batches, steps, result, stream)
            self._train(work, result, rows)
        return result

    def rate(self, round: int) -> float:
        """Return the learning rate of a round.

        >>> SGD(lr=0.1, halve_every=100).rate(250)
        0.025
        """
        return self.lr * 0.5 ** (round // self.halve_every) if self.halve_every else self.lr

    def count_steps(self, counts: Integers) -> Integers:
        """Return the number of steps of clients with these numbers of rows."""
        if self.steps is not None:
            return np.where(counts > 0, self.steps, 0).astype(np.int64)
        return np.asarray(self.epochs * -(-counts // self.batch), dtype=np.int64)

    def _train(self, work: "_Work", result: Tree, rows: Rows) -> None:
        params = {name: leaf[rows.places] for name, leaf in result.items()}
        anchors, weights = work.proximal.at(rows.places)
        recording = self._recording(work, params, rows)
        if recording is not None:
            recording.run(params, anchors, (rows.at(step) for step in range(len(rows.active))))
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
        moving = self.momentum > 0
        velocities = [torch.zeros_like(params[name]) for name in work.trained] if moving else []
        near = None if work.near is None else work.near.at(rows.places)
        working: dict[str, Tensor] = {}
        for step, active in enumerate(rows.active):
            if step == 0 or active != rows.active[step - 1]:
                working = {name: leaf[:active].detach() for name, leaf in params.items()}
                leaves = [working[name].requires_grad_() for name in work.trained]
                velocities, anchors, weights = (
                    [leaf[:active] for leaf in part] for part in (velocities, anchors, weights)
                )
                near = None if near is None else near.at(slice(active))
            grads = gradient(working, rows.at(step), near)
            with torch.no_grad():
                lam = weights or work.proximal.lam
                self._move(leaves, grads, velocities, anchors, weights=lam, lr=work.lr)

    def _recording(self, work: "_Work", params: Tree, rows: Rows) -> Recording | None:
        """Return a recorded step if the stack is on a GPU and all clients take every step."""
        like = next(iter(params.values()))
        even = len(rows.active) > 1 and min(rows.active) == len(like)
        usual = work.near is None and not work.proximal.weights
        if not (usual and self.fast and like.is_cuda and even and like.dtype == torch.float32):
            return None
        targets = rows.clients.targets
        recipe = Recipe(
            sgd=self,
            model=work.model,
            task=work.task,
            trained=work.trained,
            lr=work.lr,
            lam=work.proximal.lam,
            precision=current_precision(),
            leaves=tuple((name, tuple(leaf.shape[1:])) for name, leaf in params.items()),
            clients=bucket(len(like)),
            row=rows.clients.spec.shape,
            label=tuple(targets.shape[1:]),
            label_type=targets.dtype,
            device=like.device,
        )
        return record(recipe)

    def _move(
        self,
        leaves: list[Tensor],
        grads: list[Tensor],
        velocities: list[Tensor],
        anchors: list[Tensor],
        *,
        weights: list[Tensor] | float,
        lr: float,
    ) -> None:
        # One launch for all leaves. Gradients are not modified: two leaves may share one.
        if anchors:
            offsets = torch._foreach_sub(leaves, anchors)
            if isinstance(weights, float):
                grads = list(torch._foreach_add(grads, offsets, alpha=weights))
            else:
                grads = list(torch._foreach_add(grads, torch._foreach_mul(offsets, weights)))
        if self.momentum > 0:
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, grads)
            grads = velocities
        torch._foreach_add_(leaves, grads, alpha=-lr)

    def _compiled(
        self,
        start: Tree,
        clients: Clients,
        proximal: Proximal,
        *,
        keys: Any,
        steps: Integers,
        lr: float,
    ) -> Tree:
        from coterie.solvers.sgd_kernels import linear_sgd

        features: Any = clients.features
        if isinstance(features, Tensor):
            features = features.flatten(1).contiguous().numpy()
        trained = linear_sgd(
            _array(start, "weight"),
            _array(start, "bias"),
            features=features,
            targets=clients.targets.contiguous().numpy(),
            starts=clients.starts.numpy(),
            counts=clients.counts.numpy(),
            keys=keys,
            steps=steps,
            batch=self.batch,
            lr=lr,
            momentum=self.momentum,
            lam=proximal.lam,
            anchor_weight=_array(proximal.anchors, "weight"),
            anchor_bias=_array(proximal.anchors, "bias"),
            task=clients.spec.task,
        )
        named = dict(zip(("weight", "bias"), map(torch.from_numpy, trained), strict=True))
        return {name: named[name] for name in start}


@dataclass(frozen=True, eq=False)
class _Work:
    # The common data of the steps of one call.
    model: Model
    task: Task
    trained: tuple[str, ...]
    proximal: Proximal
    near: Near | None
    lr: float


def _portions(
    model: Model, params: Tree, device: torch.device, steps: Integers
) -> Iterator[Integers]:
    # Clients with most steps first. On the CPU few at a time, so that their data stay in cache from
    # step to step; on other devices all at once.
    order = np.argsort(-steps, kind="stable")
    together = max(len(order), 1)
    if device.type == "cpu":
        size = sum(leaf[0].numel() for leaf in params.values()) if len(order) else 1
        per_thread = model.clients_per_thread or max(1, _CACHED // size)
        together = per_thread * torch.get_num_threads()
    for first in range(0, len(order), together):
        yield order[first : first + together]


def _is_linear(model: Model) -> bool:
    # A subclass may only change settings, not predictions or losses.
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
    )


def _array(tree: Tree, name: str) -> Any:
    return tree[name].detach().contiguous().numpy() if name in tree else None
