"""What cannot be stacked over clients, and what to use instead, in words."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from coterie.data.federated import Spec
from coterie.models import layers, sequences

REPLACED: Mapping[type[nn.Module], type[nn.Module]] = {**layers.REPLACED, **sequences.REPLACED}
TRIED = 8  # rows of a trial
_Unsized = (nn.UninitializedParameter, nn.UninitializedBuffer)


class MisfitError(ValueError):
    """An error that says all there is to say."""


def replace_batchnorm(module: nn.Module) -> nn.Module:
    """Copy a module with GroupNorm in the place of every BatchNorm; the copy starts its norms anew.

    At most 32 groups of at least 16 channels where they divide so (Wu and He 2018), else one group;
    scales and shifts are kept where the BatchNorm has them.

    Raises:
        ValueError: If a BatchNorm is of one feature: alone in its group it would always become 0.

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
            "2: give their number, or leave the norm of a single feature out"
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


def refuse_layers(module: nn.Module) -> None:
    """Refuse layers that are known not to work in a stack, and tensors that would stay behind."""
    for path, layer in module.named_modules():
        reason = _refusal(layer)
        if reason:
            raise ValueError(f"layer {path or '(the module itself)'!r} ({_called(layer)}) {reason}")
        for name, held in vars(layer).items():
            if isinstance(held, Tensor):
                raise ValueError(
                    f"layer {path or '(the module itself)'!r} ({_called(layer)}) holds the tensor "
                    f"{name!r} as a plain attribute, which stays behind when a module moves; use "
                    f"register_buffer({name!r}, ...), or an nn.Parameter if it is to be trained "
                    "(and torch.nn.utils.parametrizations instead of the older weight_norm)"
                )


def _called(layer: nn.Module) -> str:
    return next(
        (kind for kind, ours in REPLACED.items() if ours is type(layer)), type(layer)
    ).__name__


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters(recurse=False)
    yield from layer.buffers(recurse=False)


def _refusal(layer: Any) -> str:
    wrong = [
        (
            any(isinstance(given, _Unsized) for given in _tensors(layer)),
            "does not know its sizes yet; give them, or call the module once on a row before",
        ),
        (
            isinstance(layer, _BatchNorm),
            "keeps statistics over rows, which would leave the client past the clip and mix "
            "clients that are computed side by side; use GroupNorm: "
            "coterie.models.replace_batchnorm(module) gives a copy with it",
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
            "has proj_size > 0; use proj_size=0 and an nn.Linear behind it",
        ),
        (
            isinstance(layer, nn.MultiheadAttention)
            and (layer.bias_k is not None or layer.add_zero_attn),
            "adds keys of its own; use add_bias_kv=False and add_zero_attn=False",
        ),
        (
            isinstance(layer, nn.modules.dropout._DropoutNd) and type(layer) not in REPLACED,
            "draws in a way of its own; use torch's own nn.Dropout, whose draws can be the "
            "client's own",
        ),
    ]
    return next((reason for is_wrong, reason in wrong if is_wrong), "")


def check_outputs(outputs: Any, spec: Spec) -> None:
    """Refuse outputs that do not fit the labels."""
    wanted = (TRIED,) if spec.outputs == 1 else (TRIED, spec.outputs)
    if isinstance(outputs, Tensor) and outputs.shape[1:] == wanted:
        return
    given = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else type(outputs).__name__
    meaning = {
        "regression": "one value a row",
        "binary": "one logit a row",
        "multiclass": f"one logit for each of {spec.outputs} classes",
        "multilabel": f"one logit for each of {spec.outputs} labels",
    }[spec.task]
    raise MisfitError(
        f"the module gave {given} for {TRIED} rows of shape {spec.shape}; expected "
        f"{(TRIED, spec.outputs)}, {meaning}: change the width of its last layer (a function of "
        "one argument is given the Spec, with its `outputs`)"
    )


def some_targets(spec: Spec) -> Tensor:
    """Make targets of two clients."""
    if spec.task == "multilabel":
        return torch.zeros(2, TRIED, spec.outputs)
    return torch.zeros(2, TRIED, dtype=torch.int64 if spec.task == "multiclass" else None)


def check_losses(losses: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, spec: Spec) -> Tensor:
    """Refuse a loss that does not give one number a row; give what it gave."""
    try:
        found = losses(outputs, some_targets(spec))
    except MisfitError:
        raise
    except Exception as error:
        raise MisfitError(
            f"loss: it failed on {TRIED} rows: {type(error).__name__}: {error}; expected a "
            "function of (outputs, targets) of one client that gives one number a row, made of "
            "torch's functions, without branches on values"
        ) from error
    if found.shape != (2, TRIED):
        raise one_a_row(tuple(found.shape[1:]), TRIED)
    return found


def one_a_row(given: tuple[int, ...], rows: int) -> MisfitError:
    """Make the error for a loss that gives something else than one number a row."""
    return MisfitError(
        f"loss: it gave shape {given} for {rows} rows; expected one number a row, ({rows},): use "
        "reduction='none', and sum over outputs"
    )


def mixes_rows() -> MisfitError:
    """Make the error for a module that does not take every row by itself."""
    return MisfitError(
        "the output for a row changes with the other rows of its batch; expected a module that "
        "takes every row by itself, rows along the first axis: give recurrent and attention layers "
        "batch_first=True, and take no statistics over rows"
    )


def changes_rows() -> MisfitError:
    """Make the error for a module that writes into the rows that it is given."""
    return MisfitError(
        "the forward pass changes the rows in place, which others read after it; expected a module "
        "that leaves them as they are: write x = x + 1 for x += 1, and inplace=False for a layer "
        "that the rows reach first"
    )


def changes(name: str) -> MisfitError:
    """Make the error for a forward pass that changes a buffer."""
    return MisfitError(
        f"the forward pass changes the buffer {name!r}, which would mix clients that are computed "
        "side by side; expected a module whose output follows from its parameters and the row"
    )


_DRAWS = (
    "it draws random numbers by itself; put an nn.Dropout among the module's layers, whose draws "
    "can be the client's own, in place of functional.dropout, RReLU (LeakyReLU draws nothing) or "
    "torch.rand"
)
LOOKS_UP = "functional.embedding"
# The first sign that is found is taken.
_REASONS = (
    (
        LOOKS_UP,
        "it looks up by a function, which in a stack of clients reads the table of the next client "
        "for a number that is not in its own; use torch's own nn.Embedding or nn.EmbeddingBag "
        "among the layers",
    ),
    ("randomness error mode", _DRAWS),
    ("aten::rrelu", _DRAWS),
    (
        "modified by an inplace operation",
        "it changes a tensor in place that its gradient needs; make a new one: x = x + 1 for "
        "x += 1, inplace=False for layers",
    ),
    (
        "data-dependent control flow",
        "it branches on values, by `if`, `.item()` or `bool()` of a tensor; use torch.where",
    ),
    (
        "vmap: inplace",
        "it writes into a tensor of its own, which cannot hold the numbers of many clients; make a "
        "new tensor, without changing buffers",
    ),
    (
        "doesn't match the broadcast shape",
        "it writes into a tensor of its own, which cannot hold the numbers of many clients; make a "
        "new tensor, without changing buffers",
    ),
    ("Batching rule not implemented", "torch has no such kernel; use another layer"),
    ("vmap: we do not yet support", "torch has no such kernel; use another layer"),
)


def explained(module: nn.Module, path: list[nn.Module], error: Exception) -> str:
    """Say which layer failed in a trial, and what to do."""
    names = {layer: name for name, layer in module.named_modules()}
    at = path[-1] if path else module
    where = f"layer {names.get(at, '') or '(the module itself)'!r} ({_called(at)})"
    said = str(error).strip().split("\n")[0]
    for sign, meaning in _REASONS:
        if sign in str(error):
            return f"{where} cannot be stacked over clients: {meaning} ({said})"
    return (
        f"{where} failed on {TRIED} rows: {type(error).__name__}: {said}; expected a module that "
        "takes rows along the first axis, as they are in the data, and gives a tensor"
    )
