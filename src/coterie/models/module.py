"""Any `torch.nn.Module` as a model: made functional, and stacked over clients.

A module given as an object provides the public initial weights of all clients: a plan holds its
class and a digest of its weights, and the ledger is bound to both. A function or class that makes
the module draws initial weights from the run's own random stream, and can be written to a plan.

The module's trainable parameters, under its own names, are the tree; parameters without a gradient
and buffers are constants, the same for all clients. The module stays in training mode: dropout
follows the seeds of a call, and without seeds nothing is dropped.

A module that cannot be stacked is rejected before training: by its layers, then by a trial on a few
rows, forward and backward, for two clients side by side, for one client and row by row.
"""

import copy
import functools
import hashlib
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import TASKS, DataError, FederatedDataset, Spec, Task
from coterie.models.base import Model, register_model, row_losses, squeezed
from coterie.models.layers import (
    REPLACED,
    DropoutStream,
    Step,
    chain_of,
    indices_in,
)

Loss = Literal["cross_entropy", "binary_cross_entropy", "squared"]
Losses = Callable[[Tensor, Tensor], Tensor]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_KEPT = 64  # networks
_TRIED = 8  # rows of a trial
# Attributes that do not affect training: the mode, and a mark of `torch.compile`.
_PASSING = ("training", "_is_torch_compile")
_Unsized = (nn.UninitializedParameter, nn.UninitializedBuffer)
# Entries of the widest layer in one piece of work without gradients.
_PIECE = {"cpu": 1 << 23, "cuda": 1 << 28}
_ROWS_PIECE = 1 << 22  # entries of rows that are checked at once
_FEW = 32  # rows on which a module is tried, of those with indices outside a table
# Part of torch's warning about a function that it computes client by client.
_SLOW = "not yet implemented the batching rule"
# Lookups without bounds checks. torch flattens the tables of a stack: an index outside a client's
# table would read the parameters of the next client.
_UNSAFE = {
    functional.embedding,
    functional.embedding_bag,
    torch.embedding,
    torch.embedding_bag,
    torch.ops.aten.embedding,
    torch.ops.aten.embedding.default,
}


class MisfitError(ValueError):
    """A misfit of module, loss and data, with a complete message."""


def replace_batchnorm(module: nn.Module) -> nn.Module:
    """Return a copy of a module with GroupNorm instead of BatchNorm.

    There are at most 32 groups of at least 16 channels if these divide the channels (Wu and He
    2018), otherwise one group; scales and shifts of the BatchNorm are kept.

    Raises:
        ValueError: If a BatchNorm has one feature: its group norm would always be 0.

    >>> replace_batchnorm(nn.BatchNorm1d(64)).num_groups
    4
    """
    if isinstance(module, _BatchNorm):
        return _as_groups("", module)
    made = copy.deepcopy(module)
    for path, layer in list(made.named_modules()):
        if isinstance(layer, _BatchNorm):
            parent, _, name = path.rpartition(".")
            setattr(made.get_submodule(parent), name, _as_groups(path, layer))
    return made


def _as_groups(path: str, layer: Any) -> nn.GroupNorm:
    channels = layer.num_features
    if channels <= 1:
        raise ValueError(
            f"layer {path!r} ({type(layer).__name__}) has {channels} features; expected at least "
            "2: set num_features, or remove the norm of a single feature"
        )
    fitting = (g for g in range(min(32, channels // 16), 1, -1) if channels % g == 0)
    made = nn.GroupNorm(next(fitting, 1), channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        with torch.no_grad():
            made.weight.copy_(layer.weight)
            made.bias.copy_(layer.bias)
            made.weight.requires_grad_(layer.weight.requires_grad)
            made.bias.requires_grad_(layer.bias.requires_grad)
    return made


def _refuse_layers(module: nn.Module) -> None:
    # Layers that do not work in a stack, and tensors as attributes.
    for path, layer in module.named_modules():
        reason = _refusal(layer)
        for name, held in vars(layer).items():
            if isinstance(held, Tensor) and not reason:
                reason = (
                    f"holds the tensor {name!r} as a plain attribute, which does not move with the "
                    f"module; use register_buffer({name!r}, ...), or an nn.Parameter if it is "
                    "trained (and torch.nn.utils.parametrizations instead of the older weight_norm)"
                )
        if reason:
            raise ValueError(f"{_where(path, layer)} {reason}")


def _where(path: str, layer: nn.Module) -> str:
    return f"layer {path or '(the module itself)'!r} ({type(layer).__name__})"


def _refusal(layer: Any) -> str:
    tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    wrong = [
        (
            any(isinstance(given, _Unsized) for given in tensors),
            "has uninitialised parameters; set its sizes, or call the module once on a row",
        ),
        (
            isinstance(layer, _BatchNorm),
            "keeps statistics over rows, which would be released without a clip and mix clients "
            "that are computed side by side; use GroupNorm: "
            "coterie.models.replace_batchnorm(module) returns a copy with it",
        ),
        (
            isinstance(layer, _NormBase) and layer.track_running_stats,
            "keeps running statistics of rows; use track_running_stats=False",
        ),
        (
            isinstance(layer, nn.Embedding | nn.EmbeddingBag)
            and (layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq),
            "changes its table while it looks up, or its gradients; use max_norm=None, "
            "sparse=False and scale_grad_by_freq=False",
        ),
        (
            isinstance(layer, nn.RNNBase) and layer.proj_size > 0,
            "has proj_size > 0; use proj_size=0 followed by an nn.Linear",
        ),
        (
            isinstance(layer, nn.MultiheadAttention)
            and (layer.bias_k is not None or layer.add_zero_attn),
            "adds keys; use add_bias_kv=False and add_zero_attn=False",
        ),
        (
            isinstance(layer, nn.modules.dropout._DropoutNd) and type(layer) not in REPLACED,
            "is a custom dropout layer; use nn.Dropout, which draws from the client's own random "
            "stream",
        ),
    ]
    return next((reason for is_wrong, reason in wrong if is_wrong), "")


def _check_outputs(outputs: Any, spec: Spec) -> None:
    wanted = (_TRIED,) if spec.outputs == 1 else (_TRIED, spec.outputs)
    if isinstance(outputs, Tensor) and outputs.shape[1:] == wanted:
        return
    given = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else type(outputs).__name__
    meaning = {
        "regression": "one value per row",
        "binary": "one logit per row",
        "multiclass": f"one logit for each of {spec.outputs} classes",
        "multilabel": f"one logit for each of {spec.outputs} labels",
    }[spec.task]
    raise MisfitError(
        f"the module returned {given} for {_TRIED} rows of shape {spec.shape}; expected "
        f"{(_TRIED, spec.outputs)}, {meaning}: change the width of its last layer (a function of "
        "one argument receives the Spec, with its `outputs`)"
    )


def _check_losses(losses: Losses, outputs: Tensor, spec: Spec) -> Tensor:
    # The losses of a trial, one number per row.
    labels = (spec.outputs,) if spec.task == "multilabel" else ()
    kind = torch.int64 if spec.task == "multiclass" else None
    try:
        found = losses(outputs, torch.zeros(2, _TRIED, *labels, dtype=kind))
    except MisfitError:
        raise
    except (Exception, SystemExit) as error:
        raise MisfitError(
            f"loss: it failed on {_TRIED} rows: {type(error).__name__}: {error}; expected a "
            "function of (outputs, targets) of one client that returns one number per row, made "
            "of torch functions, without branches on values"
        ) from error
    if found.shape != (2, _TRIED):
        raise _one_per_row(tuple(found.shape[1:]), _TRIED)
    return found


def _one_per_row(given: tuple[int, ...], rows: int) -> MisfitError:
    return MisfitError(
        f"loss: it returned shape {given} for {rows} rows; expected one number per row, "
        f"({rows},): use reduction='none', and sum over outputs"
    )


_MIXES_ROWS = (
    "the output for a row changes with the other rows of its batch; expected a module that treats "
    "rows independently, along the first axis: use batch_first=True in recurrent and attention "
    "layers, and no statistics over rows"
)
_CHANGES_ROWS = (
    "the forward pass changes its input in place; expected a module that leaves the rows "
    "unchanged: write x = x + 1 for x += 1, and use inplace=False in the first layers"
)
_CHANGES_BUFFER = (
    "the forward pass changes the buffer {!r}, which would mix clients that are computed side by "
    "side; expected a module whose output depends on its parameters and the row only"
)
_OWN_DRAWS = (
    "it draws random numbers; use an nn.Dropout layer, which draws from the client's own random "
    "stream, instead of functional.dropout, RReLU (LeakyReLU draws nothing) or torch.rand"
)
_IN_PLACE = (
    "it writes into an existing tensor, which cannot hold the values of many clients; make a new "
    "tensor, without changing buffers"
)
_NO_KERNEL = "torch has no such kernel; use another layer"
_LOOKS_UP = "functional.embedding"
# The first match counts.
_REASONS = (
    (
        _LOOKS_UP,
        "it looks up by a function, which in a stack of clients reads the table of the next client "
        "for an index outside its own; use the layers nn.Embedding or nn.EmbeddingBag",
    ),
    ("randomness error mode", _OWN_DRAWS),
    ("aten::rrelu", _OWN_DRAWS),
    (
        "modified by an inplace operation",
        "it changes a tensor in place that its gradient needs; make a new one: x = x + 1 for "
        "x += 1, inplace=False for layers",
    ),
    (
        "data-dependent control flow",
        "it branches on values, by `if`, `.item()` or `bool()` of a tensor; use torch.where",
    ),
    ("vmap: inplace", _IN_PLACE),
    ("doesn't match the broadcast shape", _IN_PLACE),
    ("Batching rule not implemented", _NO_KERNEL),
    ("vmap: we do not yet support", _NO_KERNEL),
)


def _explained(module: nn.Module, path: list[nn.Module], error: BaseException) -> str:
    # Which layer failed in a trial, and what to do.
    names = {layer: name for name, layer in module.named_modules()}
    at = path[-1] if path else module
    where = _where(names.get(at, ""), at)
    said = str(error).strip().split("\n")[0]
    for sign, meaning in _REASONS:
        if sign in str(error):
            return f"{where} cannot be stacked over clients: {meaning} ({said})"
    return (
        f"{where} failed on {_TRIED} rows: {type(error).__name__}: {said}; expected a module that "
        "takes rows along the first axis, as in the data, and returns a tensor"
    )


class _NoUnsafeLookups(TorchFunctionMode):
    # The layers `Embedding` and `EmbeddingBag` pass.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSAFE:
            raise RuntimeError(_LOOKS_UP)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class _Reading:
    # An embedding that looks up columns of the flattened row, unchanged.
    name: str
    size: int
    columns: Tensor


# The indices that each embedding looked up, call by call, by the name of the layer.
_Lookups = dict[str, list[Tensor]]


def _check_trial(module: nn.Module, lookups: _Lookups) -> None:
    # A table may be too small even for rows of 0 and 1.
    for name, calls in lookups.items():
        size: Any = module.get_submodule(name).num_embeddings
        for asked in calls:
            outside = asked[indices_in(asked, size)[1]]
            if len(outside):
                raise MisfitError(
                    f"layer {name!r} (Embedding) looked up {float(outside[0]):g} for rows of 0 and "
                    f"1, and its table holds 0 to {size - 1}; expected indices in the table: raise "
                    "num_embeddings, or correct the indices that the module computes"
                )


def _decoded(first: Tensor, second: Tensor, features: int) -> Tensor:
    if first.shape != second.shape:
        return torch.zeros(0, dtype=torch.int64)
    column, again = first.double() - 5, 2 * features + 17 - second.double()
    return column[(column == again) & (column >= 0) & (column < features)].long()


def _check_rows(
    data: FederatedDataset, reads: Sequence[_Reading], asked: Callable[[Tensor], _Lookups]
) -> None:
    """Raise DataError on rows with indices outside the tables that look them up.

    A module may handle such values itself (x % 1000, a clamp): `asked`, which returns the lookups
    for given rows, decides on a few of the rows.
    """
    if not reads or not data.features.shape[0]:
        return
    ends = [(float("inf"), float("-inf"))] * len(reads)
    refused = [False] * len(reads)
    step = max(1, _ROWS_PIECE // max(1, data.spec.features))
    for start in range(0, data.features.shape[0], step):
        piece = data.features[start : start + step]
        rows = piece if isinstance(piece, Tensor) else torch.from_numpy(piece.toarray())
        for at, each in enumerate(reads):
            # NaN is detected in training.
            found = rows.flatten(1)[:, each.columns.to(rows.device)].round().nan_to_num(nan=0.0)
            least, most = ends[at]
            ends[at] = min(least, float(found.min())), max(most, float(found.max()))
            few = _outside(found, each.size)
            if len(few) and not refused[at]:
                tried = rows[few].cpu().float().reshape(-1, *data.spec.shape)
                refused[at] = _asks_outside(each, tried.masked_fill(tried.isnan(), 0.0), asked)
    for each, (least, most), wrong in zip(reads, ends, refused, strict=True):
        if wrong:
            raise DataError(
                f"{data.title}: the rows hold indices from {least:g} to {most:g} for layer "
                f"{each.name!r} (Embedding), whose table holds 0 to {each.size - 1}; expected "
                f"indices in the table: raise num_embeddings (of char_lstm: vocabulary = "
                f"{max(most, 0) + 1:.0f}), and number from 0"
            )


def _outside(found: Tensor, size: int) -> Tensor:
    # The first few rows, and those with the extreme indices.
    least, most = found.amin(dim=1), found.amax(dim=1)
    bad = ((least < 0) | (most >= size)).nonzero().flatten()
    if len(bad) <= _FEW:
        return bad
    ends = torch.stack([least.argmin(), most.argmax()])
    return torch.cat([bad[:_FEW], ends])


def _asks_outside(read: _Reading, rows: Tensor, asked: Callable[[Tensor], _Lookups]) -> bool:
    try:
        lookups = asked(rows)
    except Exception:
        # It would fail in training too.
        return True
    return any(bool(indices_in(given, read.size)[1].any()) for given in lookups[read.name])


class Network:
    """One module as a function of parameters.

    Attributes:
        start: The module's own trainable parameters, by name.
        head: The leaves of the last trained linear layer that is called; empty without one.
        draws: Whether it has dropout.
        aliases: Other names of tied leaves, with the name of the leaf in `start`.
        reads: Embeddings that look up columns of the rows unchanged.
    """

    def __init__(self, module: nn.Module, spec: Spec, losses: Losses) -> None:
        _refuse_layers(module)
        self._stream = DropoutStream()
        self._module = _replaced(module, self._stream)
        self.start = leaves_of(self._module)
        self.aliases = _aliases(self._module)
        self.draws = any(_drops(layer) for layer in self._module.modules())
        self._constants = {
            name: tensor.detach()
            for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers())
            if name not in self.start
        }
        self._moved: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        self._outputs, self._wide, self._slow = spec.outputs, 1, False
        self._chain: list[Step] | None = None  # the trial uses vmap
        self.head = _head(self._module, *self._try(spec, losses))
        chain = chain_of(self._module, self.start, self._stream)
        self._chain = chain if chain and self._same_chained(chain, spec) else None
        self.reads = self._readings(spec)

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict rows of one client."""
        self._stream.restart(seed)
        like = next(iter(params.values()))
        given = {**self._constants_like(like), **params}
        try:
            # The other attention kernels cannot be stacked.
            with sdpa_kernel(SDPBackend.MATH):
                outputs: Tensor = torch.func.functional_call(self._module, given, (x,))
        finally:
            self._stream.restart(None)
        return squeezed(outputs) if outputs.dim() > 1 else outputs

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict rows of a stack of clients; without gradients, in pieces of bounded size."""
        if 0 in x.shape[:2]:
            return squeezed(x.new_zeros(*x.shape[:2], self._outputs))
        if torch.is_grad_enabled() or seeds is not None:
            return self._stacked(params, x, seeds)
        budget = _PIECE.get(x.device.type, _PIECE["cpu"]) // self._wide
        rows = max(1, min(x.shape[1], budget))
        clients = max(1, budget // rows)
        pieces = []
        for first in range(0, len(x), clients):
            part = {name: leaf[first : first + clients] for name, leaf in params.items()}
            mine = x[first : first + clients]
            outputs = [self._stacked(part, piece, None) for piece in torch.split(mine, rows, dim=1)]
            pieces.append(torch.cat(outputs, dim=1))
        return torch.cat(pieces)

    def _stacked(self, params: Tree, x: Tensor, seeds: Tensor | None) -> Tensor:
        if self._chain is not None:
            return self._chained(self._chain, params, x, seeds)
        given = (dict(params), x) if seeds is None else (dict(params), x, seeds)
        with _quiet() if self._slow else nullcontext():
            outputs: Tensor = torch.func.vmap(self.apply)(*given)
        return outputs

    def _chained(self, chain: list[Step], params: Tree, x: Tensor, seeds: Tensor | None) -> Tensor:
        self._stream.restart(seeds)
        try:
            for step in chain:
                x = step(params, x)
        finally:
            self._stream.restart(None)
        return squeezed(x) if x.dim() > 2 else x

    def _constants_like(self, like: Tensor) -> dict[str, Tensor]:
        key = (like.device, like.dtype)
        if key not in self._moved:
            self._moved[key] = {
                name: tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)
                for name, tensor in self._constants.items()
            }
        return self._moved[key]

    def _try(self, spec: Spec, losses: Losses) -> tuple[list[nn.Module], set[str]]:
        """Return the layers in the order of their calls, and the leaves that get a gradient."""
        with self._watched() as (path, called), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with _NoUnsafeLookups():
                    trained = self._try_stack(spec, losses)
                self._slow = any(_SLOW in str(warning.message) for warning in said)
            except MisfitError:
                raise
            except (Exception, SystemExit) as error:
                raise ValueError(_explained(self._module, path, error)) from error
        return called, trained

    def _try_stack(self, spec: Spec, losses: Losses) -> set[str]:
        x = _tried(spec)
        like = next(iter(self.start.values()))
        constants = self._constants_like(like)
        before = {name: tensor.clone() for name, tensor in constants.items()}
        params = {
            name: torch.stack([leaf, leaf]).requires_grad_() for name, leaf in self.start.items()
        }
        untouched = x._version
        with torch.enable_grad():
            outputs = self._stacked(params, x, torch.arange(2) if self.draws else None)
            _check_outputs(outputs, spec)
            found = _check_losses(losses, outputs, spec)
            grads = torch.autograd.grad(found.sum(), list(params.values()), allow_unused=True)
        with torch.no_grad(), self._noted() as lookups:
            given = {**constants, **self.start}
            torch.func.functional_call(self._module, given, (x[0],))
        _check_trial(self._module, lookups)
        with torch.no_grad():
            whole = self.apply(self.start, x[0])
            single = torch.cat([self.apply(self.start, row) for row in torch.split(x[0], 1)])
        for name, tensor in constants.items():
            same = torch.equal(_bits(tensor), _bits(before[name]))
            if given[name] is not tensor or not same:
                raise MisfitError(_CHANGES_BUFFER.format(name))
        # Checked first: changed rows make the outputs differ too.
        if x._version != untouched:
            raise MisfitError(_CHANGES_ROWS)
        if not torch.allclose(whole, single, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise MisfitError(_MIXES_ROWS)
        return {name for name, grad in zip(params, grads, strict=True) if grad is not None}

    def _same_chained(self, chain: list[Step], spec: Spec) -> bool:
        # With parameters that differ by client: zeros would hide errors of the chain.
        x, draws = _tried(spec), torch.Generator().manual_seed(1)
        params = {
            name: leaf + 0.1 * torch.randn((2, *leaf.shape), generator=draws)
            for name, leaf in self.start.items()
        }
        seeds = torch.arange(2) if self.draws else None
        with torch.no_grad():
            wanted = self._stacked(params, x.clone(), seeds)
            found = self._chained(chain, params, x.clone(), seeds)
        near = 1e-4 * max(1.0, float(wanted.abs().max()))
        return wanted.shape == found.shape and torch.allclose(
            wanted, found, rtol=1e-3, atol=near, equal_nan=True
        )

    def asked(self, x: Tensor) -> _Lookups:
        """Return the lookups of the embeddings for rows of one client."""
        with torch.no_grad(), self._noted() as found, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.apply(self.start, x)
        return found

    def _readings(self, spec: Spec) -> list[_Reading]:
        """Return which columns of the rows reach which embeddings unchanged.

        Two rows are tried whose values encode their columns: i + 5 and 2 d + 17 - i for column i of
        d. An index that decodes to the same column both times comes from there; a constant, or a
        value that was shifted, scaled or clamped, does not.
        """
        columns = torch.arange(spec.features)
        rows = (columns + 5, 2 * spec.features + 17 - columns)
        try:
            tried = [self.asked(row.float().reshape(1, *spec.shape)) for row in rows]
        except Exception:
            # The module rejects such rows; its lookups of other rows are unknown.
            return []
        made = []
        for name, calls in tried[0].items():
            pairs = zip(calls, tried[1][name], strict=False)
            found = [columns[:0], *(_decoded(*pair, spec.features) for pair in pairs)]
            read = torch.unique(torch.cat(found))
            if len(read):
                size: Any = self._module.get_submodule(name).num_embeddings
                made.append(_Reading(name, size, read))
        return made

    @contextmanager
    def _noted(self) -> Iterator[_Lookups]:
        """Record the lookups of the embeddings."""
        modules: Any = self._module.named_modules()
        layers = {name: layer for name, layer in modules if hasattr(layer, "lookups")}
        found: _Lookups = {name: [] for name in layers}
        for name, layer in layers.items():
            layer.lookups = found[name]
        try:
            yield found
        finally:
            for layer in layers.values():
                layer.lookups = None

    @contextmanager
    def _watched(self) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
        """Record active and finished layers, and the largest number of entries per row."""
        inside: list[nn.Module] = []
        called: list[nn.Module] = []
        mine = set(self._module.modules())

        def enter(layer: nn.Module, given: Any) -> None:
            if layer in mine:
                inside.append(layer)

        def leave(layer: nn.Module, given: Any, made: Any) -> None:
            if layer in mine:
                called.append(inside.pop())
                made = made[0] if isinstance(made, tuple) and made else made
                entries = made.numel() if isinstance(made, Tensor) else 0
                self._wide = max(self._wide, entries // _TRIED)

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield inside, called
        finally:
            for hook in hooks:
                hook.remove()


def _tried(spec: Spec) -> Tensor:
    # Rows of bits of two clients, which are valid indices of an embedding too.
    bits = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (2, _TRIED, *spec.shape), generator=bits).float()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{_SLOW}")
        yield


def _bits(tensor: Tensor) -> Tensor:
    # Bitwise, because NaN is not equal to itself.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def leaves_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters of a module by name, as float32; tied ones once."""
    leaves = {}
    for name, given in module.named_parameters():
        if not given.requires_grad:
            continue
        if not given.is_floating_point():
            raise ValueError(
                f"parameter {name!r} has type {given.dtype}; expected float32: use separate "
                "parameters for real and imaginary parts, or for codes and scales"
            )
        leaves[name] = given.detach().to("cpu", torch.float32).clone()
    if not leaves:
        raise ValueError(
            f"the module {type(module).__name__} has no parameters to train: expected at least one "
            "layer with parameters that require a gradient"
        )
    return leaves


def _replaced(module: nn.Module, stream: DropoutStream) -> nn.Module:
    made = copy.deepcopy(module).to("cpu").train()
    for layer in made.modules():
        if type(layer) in REPLACED:
            layer.__class__ = REPLACED[type(layer)]
            layer._stream = stream  # type: ignore[assignment]
    return made


def _drops(layer: Any) -> bool:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return bool(layer.p > 0)
    if isinstance(layer, nn.RNNBase):
        return bool(layer.dropout > 0 and layer.num_layers > 1)
    return isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0


def _head(module: nn.Module, called: list[nn.Module], trained: set[str]) -> tuple[str, ...]:
    # Layers that are called come after layers whose weights are only read.
    for layer in reversed([*module.modules(), *called]):
        if isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear):
            mine = {id(given) for given in layer.parameters() if given.requires_grad}
            names = tuple(name for name, given in module.named_parameters() if id(given) in mine)
            if trained.intersection(names):
                return names
    return ()


def _aliases(module: nn.Module) -> dict[str, str]:
    leaves = {id(given): name for name, given in module.named_parameters() if given.requires_grad}
    every = module.named_parameters(remove_duplicate=False)
    named = {name: leaves[id(given)] for name, given in every if id(given) in leaves}
    return {name: leaf for name, leaf in named.items() if name != leaf}


def uncompiled(module: nn.Module) -> nn.Module:
    """Return a module without the wrappers of `torch.compile`.

    A stack does not run the compiled code, and the wrappers change the names of leaves.
    """
    module = _bare(module)
    if any(_is_compiled(layer) for layer in module.modules()):
        module = copy.deepcopy(module)
        for layer in list(module.modules()):
            for name, inner in layer._modules.items():
                layer._modules[name] = None if inner is None else _bare(inner)
    return module


def _bare(layer: nn.Module) -> nn.Module:
    while _is_compiled(layer):
        layer = layer._modules["_orig_mod"]  # type: ignore[assignment]
    return layer


def _is_compiled(layer: nn.Module) -> bool:
    # By name: importing the class takes seconds.
    return type(layer).__name__ == "OptimizedModule" and "_orig_mod" in layer._modules


# The data for which parameters of these shapes were made, needed to make a module again.
_SPECS: dict[tuple["Networked", tuple[int, ...], Shapes], Spec] = {}
_DRAWS: dict["Networked", bool] = {}


class Networked(Model):
    """A model with the layers of a torch module."""

    @abstractmethod
    def build(self, spec: Spec) -> nn.Module:
        """Return the module, with weights from torch's global generator."""

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Return weights drawn from a random stream, without changing torch's global state.

        Constants (parameters without a gradient, buffers) are the same for every stream.

        Raises:
            ValueError: If the module cannot be stacked over clients, or does not fit the data.
        """
        wanted = _shapes(_network(self, spec).start)
        made = leaves_of(_drawn(self, spec, rng))
        if _shapes(made) != wanted:
            raise ValueError(
                f"model: it made the parameters {_shapes(made)}, and before {wanted}; expected the "
                "same names and shapes in every call for the same data"
            )
        return made

    def apply(self, params: Tree, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        return self._fitting(_shapes(params), tuple(x.shape[1:])).apply(params, x, seed)

    def apply_stacked(self, params: Tree, x: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Predict the rows of many clients at once."""
        shapes = tuple((name, tuple(leaf.shape[1:])) for name, leaf in params.items())
        return self._fitting(shapes, tuple(x.shape[2:])).apply_stacked(params, x, seeds)

    @property
    def draws(self) -> bool:
        """Whether training needs seeds: if there is dropout, or if that is not known yet."""
        return _DRAWS.get(self, True)

    def head(self, spec: Spec) -> tuple[str, ...]:
        """Return the leaves of the last linear layer that is called and trained.

        Raises:
            ValueError: If there is none that is trained.
        """
        network = _network(self, spec)
        if not network.head:
            raise ValueError(
                f"model: no linear layer among the parameters {', '.join(network.start)}; "
                "expected one as the personal part: name the personal layers"
            )
        return network.head

    def check_data(self, data: FederatedDataset) -> None:
        """Raise DataError on rows with indices outside the tables of embeddings."""
        network = _network(self, data.spec)
        _check_rows(data, network.reads, network.asked)

    def alias(self, spec: Spec, path: str) -> str | None:
        """Return the leaf with which a parameter or layer is tied; None if there is none."""
        aliases = _network(self, spec).aliases
        shared = (leaf for name, leaf in aliases.items() if f"{name}.".startswith(f"{path}."))
        return next(shared, None)

    def _fitting(self, shapes: Shapes, row: tuple[int, ...]) -> Network:
        if (self, row, shapes) in _SPECS:
            return _network(self, _SPECS[self, row, shapes])
        # For parameters from a file: find data for which they were made.
        widths = dict.fromkeys(shape[0] for _, shape in reversed(shapes) if shape)
        problem: ValueError | None = None
        for width in (*widths, 1):
            for task in TASKS if width == 1 else ("multiclass", "multilabel"):
                spec = Spec(row, width, task, 1)  # type: ignore[arg-type]
                try:
                    if _shapes(_network(self, spec).start) == shapes:
                        return _network(self, spec)
                except ValueError as error:
                    problem = problem or error
        raise ValueError(
            f"model: parameters {shapes} and rows of shape {row} do not fit it ({problem}); "
            "expected parameters that its `init` made for such rows"
        )


@lru_cache(maxsize=_KEPT)
def _network(model: Networked, spec: Spec) -> Network:
    # Only the constants of this copy are used.
    network = Network(
        _drawn(model, spec, Rng.seeded(0)), spec, functools.partial(model.losses, spec.task)
    )
    _remember(_SPECS, (model, spec.shape, _shapes(network.start)), spec)
    _remember(_DRAWS, model, network.draws)
    return network


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > 4 * _KEPT:
        memory.pop(next(iter(memory)))


def _drawn(model: Networked, spec: Spec, rng: Rng) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would change the generators of GPUs too.
        torch.default_generator.manual_seed(rng.at("module").key >> 1)
        return uncompiled(model.build(spec))


def assembled(model: Networked, spec: Spec, params: Tree) -> nn.Module:
    """Return the module with these parameters, in evaluation mode."""
    made = _drawn(model, spec, Rng.seeded(0)).eval()  # its constants are those of every run
    made.load_state_dict(dict(params), strict=False)
    return made


def _shapes(tree: Tree) -> Shapes:
    return tuple((name, tuple(leaf.shape)) for name, leaf in tree.items())


@register_model("module")
@dataclass(frozen=True)
class Module(Networked):
    """A torch module, given as an object or by a function that makes it.

    Attributes:
        make: A class or function that makes the module, or the module itself. It is called without
            arguments, or with the `Spec` of the data if it takes one; a plan holds
            "package.module:name".
        options: Named arguments of `make`.
        loss: "cross_entropy", "binary_cross_entropy", "squared" or a function of one client's
            (outputs, targets) that returns one number per row; None for the loss of the task.
        weights: Class and digest of a module given as an object.
        module: A copy of that module.
    """

    make: Callable[..., nn.Module] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    loss: Loss | Callable[[Tensor, Tensor], Tensor] | None = None
    weights: str | None = None
    module: nn.Module | None = field(
        default=None, repr=False, compare=False, metadata={"plan": False}
    )

    def __post_init__(self) -> None:
        make: Any = self.make
        module, options = self.module, dict(self.options)
        if isinstance(make, functools.partial):
            if make.args:
                raise ValueError(
                    f"make: given a partial with the arguments {make.args!r}; expected named "
                    "arguments, which a plan can hold"
                )
            make, options = make.func, {**make.keywords, **options}
        if isinstance(make, nn.Module):
            make, module = None, uncompiled(_copied(uncompiled(make)))
        self._check(make, module, options)
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "options", _frozen(options))
        object.__setattr__(self, "weights", None if module is None else _digest(module))

    def _check(self, make: Any, module: nn.Module | None, options: Mapping[str, Any]) -> None:
        if make is None and module is None and self.weights is not None:
            raise ValueError(
                f"weights = {self.weights!r}: this plan was made from a module in memory and holds "
                "no weights; set make = 'package.module:name' of a function that makes the module, "
                "or run from Python with the module itself"
            )
        if (make is None) == (module is None) or (make is not None and not _makes(make)):
            raise ValueError(
                f"make = {make!r}: expected a torch.nn.Module, or a class or function that makes "
                "one"
            )
        if module is not None and options:
            raise ValueError(
                f"options = {options!r}: given with a module object; expected only with a class or "
                "function"
            )
        if not (self.loss is None or callable(self.loss) or self.loss in _NAMED):
            raise ValueError(
                f"loss = {self.loss!r}: expected one of {', '.join(_NAMED)}, or a function of "
                "(outputs, targets)"
            )

    def build(self, spec: Spec) -> nn.Module:
        """Return the module, or a copy."""
        if self.module is not None:
            return copy.deepcopy(self.module)
        make: Any = self.make
        arguments = (spec,) if _takes_spec(make, self.options) else ()
        try:
            made = make(*arguments, **self.options)
        except (Exception, SystemExit) as error:
            given = ", ".join((*("the Spec" for _ in arguments), *self.options)) or "no arguments"
            raise ValueError(
                f"make = {_place(make)}: called with {given}, it failed: {type(error).__name__}: "
                f"{error}; expected a torch.nn.Module: call it by hand with the same arguments, "
                "and correct it or its options"
            ) from error
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"make = {_place(make)}: it made {made!r}; expected a torch.nn.Module: return one"
            )
        return made

    @property
    def has_usual_losses(self) -> bool:
        """Whether `losses` are those of the task."""
        return self.loss is None and type(self).losses is Module.losses

    def losses(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row, shape (..., n)."""
        if self.loss is None:
            return row_losses(task, outputs, targets)
        if isinstance(self.loss, str):
            return _NAMED[self.loss](task, outputs, targets)
        own, rows = self.loss, targets.shape[-2 if task == "multilabel" else -1]

        def one(outputs: Tensor, targets: Tensor) -> Tensor:
            found: Tensor = own(outputs, targets)
            if tuple(found.shape) != (rows,):
                raise _one_per_row(tuple(found.shape), rows)
            return found

        # Per client: the function must not see rows of other clients.
        for _ in range(targets.dim() - (2 if task == "multilabel" else 1)):
            one = torch.func.vmap(one)
        return one(outputs, targets)


def as_model(given: Any) -> Model:
    """Return a model; wrap a torch module, or a function or class that makes one.

    Raises:
        ValueError: On anything else.
    """
    if isinstance(given, Model):
        return given
    if isinstance(given, type) and issubclass(given, Model):
        raise ValueError(
            f"model = {given.__name__}: expected {given.__name__}(), with its settings"
        )
    if callable(given) and _makes(given):
        return Module(given)
    raise ValueError(
        f"model = {given!r}: expected a model such as Linear() or MLP(), a torch.nn.Module, or a "
        "class or function that makes one"
    )


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        _refuse_layers(module)
        raise ValueError(
            f"model: {type(module).__name__} cannot be copied ({error}); expected a module whose "
            "tensors are parameters and buffers: pass a function that makes it"
        ) from error


def _makes(make: Any) -> bool:
    # Checked before it is called: a class of something else may do anything.
    return issubclass(make, nn.Module) if isinstance(make, type) else callable(make)


def _place(make: Any) -> str:
    # As in a plan.
    name = getattr(make, "__qualname__", type(make).__qualname__)
    return f"{getattr(make, '__module__', '?')}:{name}"


def _takes_spec(make: Any, options: Mapping[str, Any]) -> bool:
    try:
        arguments = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        each
        for each in arguments
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.name not in options
    ]
    needed = [each.name for each in positional if each.default is each.empty]
    if len(needed) > 1:
        raise ValueError(
            f"make = {_place(make)}: it needs {', '.join(needed)}; expected no argument, or "
            "one for the Spec: pass the others as options"
        )
    return bool(needed) or any(each.name == "spec" for each in positional[:1])


def _frozen(value: Any) -> Any:
    # Lists become tuples, so that a plan equals itself after reading.
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for path, layer in module.named_modules():
        kind = type(layer)
        settings = {
            name: held
            for name, held in sorted(vars(layer).items())
            if isinstance(held, int | float | str | tuple) and name not in _PASSING
        }
        found.update(f"{path}={kind.__module__}:{kind.__qualname__}{settings!r}\n".encode())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            facts = f"{name}={tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}\n"
            found.update(facts.encode())
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            found.update(plain.view(torch.uint8).numpy().tobytes())
    kind = type(module)
    return f"{kind.__module__}:{kind.__qualname__} sha256:{found.hexdigest()[:32]}"


def _cross_entropy(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    if task != "multiclass":
        raise MisfitError(
            f"loss = 'cross_entropy' on a {task} task; expected a multiclass task: use "
            "'binary_cross_entropy' for binary and multilabel ones, 'squared' for regression"
        )
    return row_losses(task, outputs, targets)


def _binary_cross_entropy(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    if task == "regression":
        raise MisfitError(
            "loss = 'binary_cross_entropy' on a regression task; expected targets that are 0 or 1: "
            "use 'squared'"
        )
    wanted = _one_hot(task, outputs, targets)
    each = functional.binary_cross_entropy_with_logits(
        outputs.reshape(wanted.shape), wanted, reduction="none"
    )
    return each if task == "binary" else each.sum(dim=-1)


def _squared(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = _one_hot(task, outputs, targets)
    each = 0.5 * (outputs.reshape(wanted.shape) - wanted).square()
    return each.sum(dim=-1) if task in ("multiclass", "multilabel") else each


def _one_hot(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    if task != "multiclass":
        return targets.to(outputs.dtype)
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    return (targets[..., None] == classes).to(outputs.dtype)


_NAMED: Mapping[str, Callable[[Task, Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "squared": _squared,
}
