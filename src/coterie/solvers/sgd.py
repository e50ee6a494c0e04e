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

**Guarantee:** a client's result of `SGD` is a function of its own rows, start, id, rank, the random
stream and the round, to the last bit: it does not change with the rows of others. Products of
stacked matrices round differently in stacks of other shapes and in other places of a stack, so both
are public: a stack has `stack_width` places, whatever clients have rows, and a client of rank r is
computed in place r modulo that. Clients of one place follow one another, and places without work
are computed all the same. Assumes that torch's stacked operations read and write each client's part
only and choose their algorithms by shapes alone, as they do with `torch.backends.cudnn.benchmark`
off (torch's default). Test: tests/solvers/test_sgd.py, on the CPU and CUDA, also in bfloat16.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree, send
from coterie.data.federated import Clients, Task
from coterie.models import Linear, Model

Integers = NDArray[np.int64]
Precision = Literal["float32", "bfloat16", "tf32"]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# Parameters that a CPU thread works on at a time: about its share of the last-level cache.
_CACHED = 1 << 20
# Places of a stack whose clients take steps by their numbers of rows. A place waits while the one
# with most steps still works, so more places wait more; on a GPU a step of few clients takes as
# long as one of many.
_UNEVEN, _UNEVEN_GPU = 64, 2048
# Clients, and their places; everybody as slices, which are copied at once.
Pair = tuple[Tensor | slice, Tensor | slice]
_KEPT, _KEPT_WHOLE = 16, 4  # recordings of a step, and of all steps, which belong to one data set
_AT_ONCE = 32  # steps of a recording
_KERNEL_LEAVES = 32  # of a model in one launch
_PICKED = 64 << 20  # bytes of the rows of a recording's steps that are picked at once
_WARM_UP = 3

# Mixed precision changes speed, never the guarantee: products of a step are computed in this type,
# parameters stay in float32, contributions are clipped, rounded and summed in float64. float16 is
# not offered: it loses small gradients unless losses are scaled. "tf32" permits torch on CUDA to
# round the factors of products to 10 bits; without it "float32" is float32 there too.
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
    if current_precision() != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def _rounding(device: torch.device) -> Iterator[None]:
    # Products on CUDA round their factors inside this block under "tf32" alone, whatever torch's
    # settings are: by default it rounds those of convolutions.
    if device.type != "cuda":
        yield
        return
    allowed = current_precision() == "tf32"
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # torch 2.9
        places, name = (backends.cuda.matmul, backends.cudnn.conv), "fp32_precision"
        wanted: Any = "tf32" if allowed else "ieee"
    else:
        places, name, wanted = (backends.cuda.matmul, backends.cudnn), "allow_tf32", allowed
    before = [getattr(place, name) for place in places]
    other = [place for place, value in zip(places, before, strict=True) if value != wanted]
    try:
        for place in other:
            setattr(place, name, wanted)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            if place in other:
                setattr(place, name, value)


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

    def at(self, places: Tensor) -> "Near":
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

    @property
    def has_one_anchor(self) -> bool:
        """Whether the anchor is the same for all clients: it is then read from the cache."""
        return bool(self.anchors) and all(len(leaf) == 1 for leaf in self.anchors.values())

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
    return given if given.shape == like.shape else given.unsqueeze(0)


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
            by_client = _fused_losses(model, task, outputs, batch) if near is None else None
            if by_client is None:
                losses = model.losses(task, outputs, batch.y)
                if near is not None:
                    with torch.no_grad(), lowered(batch.x.device):
                        # With the same dropout mask as the trained model.
                        theirs = _predict(model, dict(near.toward), batch)
                    losses = losses + near.weight / 2 * divergence(task, outputs, theirs)
                by_client = (losses * batch.share).sum(dim=1)
        leaves = [params[name] for name in trained]
        if not by_client.requires_grad:  # the trained leaves do not change the outputs
            return [torch.zeros_like(leaf) for leaf in leaves]
        ones = torch.ones_like(by_client)
        grads = list(torch.autograd.grad(by_client, leaves, ones, materialize_grads=True))
        return _with_bad_losses(grads, by_client.detach())

    return gradient


def _fused_losses(model: Model, task: Task, outputs: Tensor, batch: Batch) -> Tensor | None:
    """Return each client's weighted losses by one kernel on a GPU; None where there is none."""
    usual = task == "multiclass" and model.has_usual_losses
    if not (usual and outputs.is_cuda and outputs.dtype == torch.float32):
        return None
    kernels = _kernels()
    if kernels is None or not kernels.checked(outputs.device):
        return None
    found: Tensor | None = kernels.weighted_losses(outputs, batch.y, batch.share)
    return found


def _with_bad_losses(grads: list[Tensor], losses: Tensor) -> list[Tensor]:
    # A NaN loss can have a finite gradient. Put the NaN into one leaf, the smallest, so that the
    # client is detected as failed.
    place = min(range(len(grads)), key=lambda at: grads[at].numel())
    spoilt = losses.clamp(0, 0).to(grads[place])  # NaN stays NaN
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


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a stack: which client each place works for, and on which rows.

    A batch that is not full repeats its first row with weight zero: this needs no masks, and no row
    from outside the batch can spoil it. A place without work has weight zero throughout.
    """

    clients: Clients
    index: Tensor  # (steps, width, batch) rows of the flat arrays
    share: Tensor  # (steps, width, batch) one over the number of rows in the batch, or 0
    starts: dict[int, Pair]  # by step: clients that begin, and their places
    ends: dict[int, Pair]  # by step: clients that are done before it
    seeds: Tensor | None = None  # (steps, width) for models with dropout

    @classmethod
    def plan(
        cls,
        clients: Clients,
        batches: Any,
        steps: Integers,
        width: int,
        like: Tensor,
        stream: Rng | None = None,
    ) -> "Schedule":
        """Return the steps of clients with these batches, (c, steps, batch) row numbers."""
        ranks, starts = clients.ranks.numpy(), clients.starts.numpy()
        begin, place = _begins(ranks, steps, width), ranks % width
        length = int((begin + steps).max(initial=0))
        # One entry for each step of each client: whose, which of its own, and when.
        who = np.repeat(np.arange(len(steps)), steps)
        own = np.arange(len(who)) - np.repeat(np.cumsum(steps) - steps, steps)
        when, where = begin[who] + own, place[who]
        local, full = batches[who, own], 1 / max(batches.shape[2], 1)
        missing = local < 0
        weights: Any = full
        if missing.any():
            local = np.where(missing, local[:, :1], local)
            weights = ~missing / np.maximum((~missing).sum(axis=1, keepdims=True), 1)
        kind = np.float64 if like.dtype == torch.float64 else np.float32
        index = np.zeros((length, width, batches.shape[2]), dtype=np.int64)
        share = np.zeros(index.shape, dtype=kind)
        at = when * width + where
        index.reshape(-1, batches.shape[2])[at] = local + starts[who, None]
        share.reshape(-1, batches.shape[2])[at] = weights
        seeds = None
        if stream is not None:
            drawn = np.zeros((length, width), dtype=np.int64)
            drawn[when, where] = stream.words(clients.ids.numpy()[who], own).astype(np.int64)
            seeds = send(torch.from_numpy(drawn), like.device)
        dense = isinstance(clients.features, Tensor)
        return cls(
            clients=clients,
            index=send(torch.from_numpy(index), like.device if dense else "cpu"),
            share=send(torch.from_numpy(share), like.device).to(like.dtype),
            starts=_by_step(begin, steps, place, like.device),
            ends=_by_step(begin + steps, steps, place, like.device),
            seeds=seeds,
        )

    def __len__(self) -> int:
        return len(self.index)

    @property
    def is_whole(self) -> bool:
        """Whether all clients begin at once, and are done at once."""
        pairs = (*self.starts.values(), *self.ends.values())
        return all(isinstance(who, slice) for who, _ in pairs)

    @property
    def is_at_once(self) -> bool:
        """Whether its steps may be recorded as one: few, and the same for all clients."""
        dense = isinstance(self.clients.features, Tensor) and self.clients.features.is_cuda
        return dense and len(self.starts) == len(self.ends) == 1 and len(self) <= _AT_ONCE

    def at(self, step: int) -> Batch:
        """Return the batch of a step."""
        share, index = self.share[step], self.index[step]
        if isinstance(self.clients.features, Tensor):
            x = self.clients.features[index]
        else:
            picked = self.clients.features[index.reshape(-1).numpy()].toarray()
            x = torch.from_numpy(picked).reshape(*index.shape, *self.clients.spec.shape)
        seeds = None if self.seeds is None else self.seeds[step]
        return Batch(x.to(share), self.clients.targets[index], share, seeds)


def _begins(ranks: Integers, steps: Integers, width: int) -> Integers:
    """Return the step at which each client begins: when those before it in its place are done.

    >>> _begins(np.arange(5), np.array([3, 1, 0, 2, 4]), 2).tolist()
    [0, 0, 3, 1, 3]
    """
    order = np.lexsort((ranks, ranks % width))
    before = np.cumsum(steps[order]) - steps[order]
    place = (ranks % width)[order]
    found = np.empty_like(steps)
    found[order] = before - before[np.searchsorted(place, place)]
    return found


def _by_step(
    when: Integers, steps: Integers, place: Integers, device: torch.device
) -> dict[int, Pair]:
    """Return clients that take steps, and their places, by step; slices if it is everybody."""
    found: dict[int, Pair] = {}
    order = np.flatnonzero(steps)
    if len(order) and (when[order] == when[order[0]]).all():
        if len(order) == len(place) and (place == np.arange(len(place))).all():
            return {int(when[0]): (slice(None), slice(0, len(place)))}
        groups = [order]
    else:
        order = order[np.argsort(when[order], kind="stable")]
        groups = np.split(order, np.flatnonzero(np.diff(when[order])) + 1)
    for who in groups:
        if len(who):
            here, there = torch.from_numpy(who), torch.from_numpy(place[who])
            found[int(when[who[0]])] = (send(here, device), send(there, device))
    return found


@dataclass(frozen=True, eq=False)
class Stack:
    """The memory that a step reads and writes, for `width` clients side by side.

    Attributes:
        params: Parameters by name.
        velocities: Of the trained leaves, if there is momentum.
        anchors: Of the trained leaves, if there is a proximal term: per client, or one for all.
        weights: Of the proximal term by coordinate, if it has them.
        toward: The models of a `Near`, by name.
    """

    params: dict[str, Tensor]
    velocities: list[Tensor]
    anchors: list[Tensor]
    weights: list[Tensor]
    toward: dict[str, Tensor]

    def load(
        self, work: "_Work", result: Tree, who: Tensor | slice, places: Tensor | slice
    ) -> None:
        """Put clients into places, at the start of their steps."""
        near = () if work.near is None else tuple(work.near.toward[name] for name in self.toward)
        mine = [*self.params.values(), *self.anchors, *self.weights, *self.toward.values()]
        anchors = work.proximal.anchors.values()
        given = [result[name] for name in self.params]
        given += [*anchors, *work.proximal.weights.values(), *near]
        with torch.no_grad():
            if isinstance(who, slice) and mine[0].is_cuda:  # in one call
                all_places = places == slice(0, len(mine[0]))
                into = mine if all_places else [leaf[places] for leaf in mine]
                torch._foreach_copy_(into, given)
                mine, given = [], []
            for leaf, source in zip(mine, given, strict=True):
                if leaf is source:
                    continue
                if len(leaf) == len(source) == 1:  # of all clients, or of the only one
                    leaf.copy_(source)
                else:
                    leaf[places] = source if len(source) == 1 else source[who]
            for leaf in self.velocities:
                leaf[places] = 0

    def store(
        self, work: "_Work", result: dict[str, Tensor], who: Tensor | slice, places: Tensor | slice
    ) -> None:
        """Write the trained leaves of clients that are done."""
        trained = [self.params[name].detach()[places] for name in work.trained]
        if isinstance(who, slice):
            made = [torch.empty_like(leaf) for leaf in trained]
            torch._foreach_copy_(made, trained)  # on a GPU in one launch
            result.update(zip(work.trained, made, strict=True))
            return
        for name, leaf in zip(work.trained, trained, strict=True):
            result[name][who] = leaf


@dataclass(frozen=True)
class Rows:
    """Where a GPU has the rows of a federation: a recording of several steps reads them there.

    Places are compared, not values, and no rows are kept alive: a recording whose rows are gone
    has a place that is used again only by rows of the same shape, which it then reads.
    """

    place: tuple[Any, ...]
    tensors: tuple["ref[Tensor]", ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, clients: Clients) -> "Rows":
        """Return where the rows of these clients are."""
        tensors = (clients.features, clients.targets)
        place = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in tensors)
        return cls(tuple(place), tuple(ref(each) for each in tensors))

    def found(self) -> list[Tensor]:
        """Return features and targets, which exist while a recording is made."""
        return [each for tensor in self.tensors if (each := tensor()) is not None]


@dataclass(frozen=True)
class Recipe:
    """All that a recording depends on except values: equal recipes share a recording.

    With `rows`, it is one of `steps` steps, which picks their rows itself.
    """

    sgd: "SGD"
    model: Model
    task: Task
    trained: tuple[str, ...]
    lr: float
    lam: float
    is_weighted: bool
    has_one_anchor: bool
    nearness: float | None
    precision: Precision
    leaves: Shapes
    clients: int
    row: tuple[int, ...]
    label: tuple[int, ...]
    label_type: torch.dtype
    device: torch.device
    steps: int = 1
    rows: Rows | None = None


def _zeros(recipe: Recipe) -> Stack:
    """Return the memory of a recording's stack."""

    def zeros(shapes: Iterable[tuple[int, ...]], rows: int = recipe.clients) -> list[Tensor]:
        return [torch.zeros(rows, *shape, device=recipe.device) for shape in shapes]

    names, shapes = zip(*recipe.leaves, strict=True)
    moved = [shape for name, shape in recipe.leaves if name in recipe.trained]
    stack = Stack(
        dict(zip(names, zeros(shapes), strict=True)),
        zeros(moved if recipe.sgd.momentum > 0 else ()),
        zeros(
            moved if recipe.lam > 0 or recipe.is_weighted else (),
            1 if recipe.has_one_anchor else recipe.clients,
        ),
        zeros(moved if recipe.is_weighted else ()),
        dict(zip(names, zeros(shapes), strict=True)) if recipe.nearness is not None else {},
    )
    for name in recipe.trained:
        stack.params[name].requires_grad_()
    return stack


def _batch(recipe: Recipe) -> Batch:
    """Return the memory of the batch of one recorded step."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(recipe.clients, *shape, dtype=dtype, device=recipe.device)

    rows = recipe.sgd.batch
    return Batch(
        zeros(rows, *recipe.row),
        zeros(rows, *recipe.label, dtype=recipe.label_type),
        zeros(rows),
        zeros(dtype=torch.int64) if recipe.model.draws else None,
    )


class Recording:
    """A CUDA graph of a step, or of all steps of a call, with the memory that it reads and writes.

    A step of a small network is some hundred kernel launches, which take longer than the
    arithmetic. The graph is recorded once per recipe and replayed with other values.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.stack = _zeros(recipe)
        self.takes_all = recipe.rows is not None
        near, sgd = None, recipe.sgd
        if recipe.nearness is not None:
            near = Near(recipe.nearness, self.stack.toward)
        if recipe.rows is None:
            self._batch = _batch(recipe)
        else:
            rows = recipe.rows.found()
            self._plan = _Plan.of(recipe, *rows)
        gradient = stacked_gradient(recipe.model, recipe.task, recipe.trained)

        def take(numbers: range) -> None:
            for number in numbers:
                batch = self._plan.at(number, *rows) if self.takes_all else self._batch
                sgd._step(self.stack, recipe, gradient(self.stack.params, batch, near))

        # The first step has a graph of its own: a GPU begins with it while the host still launches
        # the many parts of the others.
        parts = [each for each in (range(1), range(1, recipe.steps)) if each]
        self._graphs = [torch.cuda.CUDAGraph() for _ in parts]
        stream = torch.cuda.Stream(recipe.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(recipe.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                take(range(recipe.steps))
        torch.cuda.current_stream(recipe.device).wait_stream(stream)
        for graph, part in zip(self._graphs, parts, strict=True):
            # In the memory of the first, which is done when the second begins.
            pool = None if graph is self._graphs[0] else self._graphs[0].pool()
            with torch.cuda.graph(graph, pool=pool):
                take(part)

    def step(self, batch: Batch) -> None:
        """Take a step."""
        with torch.no_grad():
            for static, now in zip(self._batch, batch, strict=True):
                if static is not None and now is not None:
                    static.copy_(now)
            self._replay()

    def _replay(self) -> None:
        for graph in self._graphs:
            graph.replay()

    def run(self, schedule: Schedule) -> None:
        """Take all steps of a call."""
        with torch.no_grad():
            for static, now in zip(
                self._plan[:3], (schedule.index, schedule.share, schedule.seeds), strict=True
            ):
                if static is not None and now is not None:
                    static.copy_(now)
            self._replay()


class _Plan(NamedTuple):
    """The memory of a schedule in a recording of all its steps, and of what its rows name.

    Labels are picked for all steps at once, and images or other features if they are few.
    """

    rows: Tensor
    share: Tensor
    seeds: Tensor | None
    labels: Tensor
    picked: Tensor | None

    @classmethod
    def of(cls, recipe: Recipe, features: Tensor, targets: Tensor) -> "_Plan":
        shape = (recipe.steps, recipe.clients, recipe.sgd.batch)
        rows = torch.zeros(shape, dtype=torch.int64, device=recipe.device)
        seeds = rows[:, :, 0].clone() if recipe.model.draws else None
        few = rows.numel() * features[:1].numel() * features.element_size() <= _PICKED
        return cls(
            rows,
            torch.zeros(shape, device=recipe.device),
            seeds,
            targets.new_zeros(*shape, *targets.shape[1:]),
            features.new_zeros(*shape, *features.shape[1:]) if few else None,
        )

    def at(self, step: int, features: Tensor, targets: Tensor) -> Batch:
        share, rows = self.share[step], self.rows[step]
        seeds = None if self.seeds is None else self.seeds[step]
        if step == 0:
            for source, into in ((targets, self.labels), (features, self.picked)):
                if into is not None:
                    torch.index_select(source, 0, self.rows.flatten(), out=into.flatten(0, 2))
        x = features[rows] if self.picked is None else self.picked[step]
        return Batch(x.to(share), self.labels[step], share, seeds)


def _recorded(recipe: Recipe) -> Recording | None:
    try:
        return Recording(recipe)
    except Exception:  # an error of the model's own is raised again without a recording
        torch.cuda.synchronize(recipe.device)
        return None


@lru_cache(maxsize=_KEPT)
def record(recipe: Recipe) -> Recording | None:
    """Return a recorded step; None if the model cannot be recorded."""
    return _recorded(recipe)


@lru_cache(maxsize=_KEPT_WHOLE)
def record_all(recipe: Recipe) -> Recording | None:
    """Return all steps of a call as one recording; None if the model cannot be recorded."""
    return _recorded(recipe)


@cache
def _kernels() -> Any:
    try:
        from coterie.solvers import sgd_gpu
    except Exception as error:  # no Triton, or one that fails
        warnings.warn(f"local steps are not fused on a GPU: {error}", stacklevel=2)
        return None
    return sgd_gpu


def fused_growth(
    after: list[Tensor], before: list[Tensor], far: float
) -> tuple[Tensor, Tensor] | None:
    """Return norms, and whether models have grown, by one kernel on a GPU; None without it."""
    if not after[0].is_cuda or not len(after[0]) or len(after) > _KERNEL_LEAVES:
        return None
    plain = [
        leaf if leaf.stride(0) else leaf[:1] for leaf in before
    ]  # one row for all is read once
    same = all(x.shape == y.shape for x, y in zip(after, before, strict=True))
    kernels = _kernels()
    if not same or kernels is None or not kernels.usable([*after, *plain]):
        return None
    found: tuple[Tensor, Tensor] = kernels.compare(after, before, far)
    return found


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Heavy-ball SGD from a given start: v <- momentum v + g, w <- w - lr v, with v = 0 at first.

    Attributes:
        lr: Learning rate.
        epochs: Passes over a client's rows, each in a new order.
        steps: Steps of every client, instead of epochs.
        most_steps: The most steps of a client in a round, however many rows it has; None for the
            epochs of the most rows that the plan permits.
        batch: Rows per step; the last batch of an epoch may be smaller.
        momentum: Heavy-ball factor.
        halve_every: Rounds between halvings of the learning rate; 0 for never.
        fast: False takes the gradients of one client's `apply` by `torch.func`, for comparison.
    """

    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None
    most_steps: int | None = None
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
        for name in ("epochs", "steps", "most_steps", "batch"):
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
        steps, lr = self.count_steps(clients.counts.numpy()), self.rate(round)
        plain = near is None and len(trained) == len(start) and not proximal.weights
        if plain and self.fast and _is_linear(model) and _fits_kernel(start, clients):
            keys = rng.keys(clients.ids)
            return self._compiled(start, clients, proximal, keys=keys, steps=steps, lr=lr)
        if not steps.any():
            return {name: leaf.detach().clone() for name, leaf in start.items()}
        work = _Work(model, clients.spec.task, tuple(trained), proximal, near, lr)
        like = next(iter(start.values()))
        schedule = clients.ahead.pop((self, rng, model.draws, like.dtype), None)
        if schedule is None:
            width = self.stack_width(model, start, clients)
            schedule = self._schedule(model, clients, rng, width, like)
        # What is written as a whole need not be copied first.
        whole = trained if schedule.is_whole else []
        result = {
            name: leaf.detach() if name in whole else leaf.detach().clone()
            for name, leaf in start.items()
        }
        with _rounding(like.device):
            self._train(work, result, schedule)
        return result

    def draw_ahead(self, model: Model, clients: Clients, rng: Rng) -> None:
        """Draw the batches of a call with this stream before it comes; see `Clients.ahead`."""
        if self.count_steps(clients.counts.numpy()).any() and clients.device.type == "cuda":
            like = torch.empty(0, device=clients.device)
            width = self.stack_width(model, {}, clients)
            schedule = self._schedule(model, clients, rng, width, like)
            clients.ahead[self, rng, model.draws, like.dtype] = schedule

    def _schedule(
        self, model: Model, clients: Clients, rng: Rng, width: int, like: Tensor
    ) -> Schedule:
        from coterie.solvers.sgd_kernels import draw_batches

        keys, counts = rng.keys(clients.ids), clients.counts.numpy()
        steps = self.count_steps(counts)
        return Schedule.plan(
            clients,
            draw_batches(keys, counts, steps, self.batch),
            steps,
            width,
            like,
            rng.at("coins") if model.draws else None,  # the name is part of the stream
        )

    def stack_width(self, model: Model, params: Tree, clients: Clients) -> int:
        """Return how many clients are computed side by side, from public numbers alone.

        On the CPU few, so that their data stay in cache from step to step.
        """
        device, most = clients.device.type, clients.width
        if self.steps is None:
            most = min(most, _UNEVEN if device == "cpu" else _UNEVEN_GPU)
        if device == "cpu":
            size = sum(leaf[0].numel() for leaf in params.values())
            per_thread = model.clients_per_thread or max(1, _CACHED // size)
            most = min(most, per_thread * torch.get_num_threads())
        width = -(-clients.width // -(-clients.width // most))  # as even as possible
        # Rounded up on other devices, so that similar cohorts share a recording.
        return width if device == "cpu" or width < 32 else -(-width // 4) * 4

    def rate(self, round: int) -> float:
        """Return the learning rate of a round.

        >>> SGD(lr=0.1, halve_every=100).rate(250)
        0.025
        """
        return self.lr * 0.5 ** (round // self.halve_every) if self.halve_every else self.lr

    def count_steps(self, counts: Integers) -> Integers:
        """Return the number of steps of clients with these numbers of rows."""
        if self.steps is not None:
            found = np.where(counts > 0, self.steps, 0)
        else:
            found = self.epochs * -(-counts // self.batch)
        return np.minimum(found, self.most_steps or found).astype(np.int64)

    def _train(self, work: "_Work", result: dict[str, Tensor], schedule: Schedule) -> None:
        recording = self._recording(work, result, schedule)
        stack = self._stack(work, result, schedule) if recording is None else recording.stack
        maker = stacked_gradient if self.fast else general_gradient
        gradient = maker(work.model, work.task, work.trained)
        near = None if work.near is None else Near(work.near.weight, stack.toward)
        if recording is not None and recording.takes_all:
            stack.load(work, result, *schedule.starts[0])
            recording.run(schedule)
            stack.store(work, result, *schedule.ends[len(schedule)])
            return
        for step in range(len(schedule) + 1):
            if step in schedule.ends:
                stack.store(work, result, *schedule.ends[step])
            if step in schedule.starts:
                stack.load(work, result, *schedule.starts[step])
            if step == len(schedule):
                break
            if recording is None:
                grads = gradient(stack.params, schedule.at(step), near)
                self._step(stack, work, grads)
            else:
                recording.step(schedule.at(step))

    def _stack(self, work: "_Work", result: Tree, schedule: Schedule) -> Stack:
        """Return the memory of a stack, with zeros."""
        width = schedule.index.shape[1]

        def zeros(leaf: Tensor) -> Tensor:
            return leaf.new_zeros(width, *leaf.shape[1:])

        params = {name: zeros(leaf) for name, leaf in result.items()}
        for name in work.trained:
            params[name].requires_grad_()
        near = {} if work.near is None else work.near.toward
        one = work.proximal.has_one_anchor
        return Stack(
            params,
            [zeros(result[name]) for name in work.trained] if self.momentum > 0 else [],
            # One for all clients is not repeated: it stays in the cache.
            [
                leaf if len(leaf) == 1 and (one or not leaf.is_cuda) else zeros(leaf)
                for leaf in work.proximal.anchors.values()
            ],
            [zeros(leaf) for leaf in work.proximal.weights.values()],
            {name: zeros(leaf) for name, leaf in near.items()},
        )

    def _recording(self, work: "_Work", result: Tree, schedule: Schedule) -> Recording | None:
        """Return a recorded step if the stack is on a GPU."""
        like = next(iter(result.values()))
        if not (self.fast and like.is_cuda and like.dtype == torch.float32):
            return None
        targets = schedule.clients.targets
        # A public choice: epochs of clients with equal numbers of rows are recorded by the step.
        at_once = self.steps is not None and schedule.is_at_once
        recipe = Recipe(
            sgd=self,
            model=work.model,
            task=work.task,
            trained=work.trained,
            lr=work.lr,
            lam=work.proximal.lam,
            is_weighted=bool(work.proximal.weights),
            has_one_anchor=work.proximal.has_one_anchor,
            nearness=None if work.near is None else work.near.weight,
            precision=current_precision(),
            leaves=tuple((name, tuple(leaf.shape[1:])) for name, leaf in result.items()),
            clients=schedule.index.shape[1],
            row=schedule.clients.spec.shape,
            label=tuple(targets.shape[1:]),
            label_type=targets.dtype,
            device=like.device,
            steps=len(schedule) if at_once else 1,
            rows=Rows.of(schedule.clients) if at_once else None,
        )
        whole = record_all(recipe) if at_once else None
        return whole or record(replace(recipe, steps=1, rows=None))

    @torch.no_grad()
    def _step(self, stack: Stack, work: "_Work | Recipe", grads: list[Tensor]) -> None:
        """Move the trained leaves by one step."""
        # One launch for all leaves. Gradients are not modified: two leaves may share one.
        leaves = [stack.params[name] for name in work.trained]
        kernels = _kernels() if leaves[0].is_cuda else None
        if kernels is not None and kernels.usable(leaves):
            lists = (stack.velocities, stack.anchors, stack.weights)
            kernels.move(leaves, grads, *lists, lr=work.lr, lam=work.lam, momentum=self.momentum)
            return
        if stack.anchors:
            offsets = torch._foreach_sub(leaves, stack.anchors)
            if stack.weights:
                grads = list(torch._foreach_add(grads, torch._foreach_mul(offsets, stack.weights)))
            else:
                grads = list(torch._foreach_add(grads, offsets, alpha=work.lam))
        if stack.velocities:
            torch._foreach_mul_(stack.velocities, self.momentum)
            torch._foreach_add_(stack.velocities, grads)
            grads = stack.velocities
        torch._foreach_add_(leaves, grads, alpha=-work.lr)

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

    @property
    def lam(self) -> float:
        return self.proximal.lam


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
