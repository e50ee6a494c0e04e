"""A `torch.nn.Module` made a pure function of a tree, for one client or a stack of them.

The module's trainable parameters, under its own names, are the tree; parameters that take no
gradient and buffers are constants, the same for everybody. The module stays in training mode:
dropout falls by the coins a call is given, and without coins nothing is dropped.

What cannot be stacked is refused before anything is trained: by a look at the layers, then by a
trial on a few rows, forwards and backwards, as two clients side by side, as one alone and row by
row.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from coterie.core.tree import Tree
from coterie.data.federated import Spec
from coterie.models.base import squeezed
from coterie.models.chains import Step, chain_of
from coterie.models.layers import Coins
from coterie.models.lookups import Lookups, NoUnsafeLookups, check_trial, noted, readings
from coterie.models.refusals import (
    REPLACED,
    TRIED,
    MisfitError,
    changes,
    changes_rows,
    check_losses,
    check_outputs,
    explained,
    mixes_rows,
    refuse_layers,
)

Losses = Callable[[Tensor, Tensor], Tensor]
# Numbers of the widest layer in one piece of work that keeps nothing for a gradient.
_PIECE = {"cpu": 1 << 23, "cuda": 1 << 28}
# What torch says, at each call, of a function that it takes client by client.
_SLOW = "not yet implemented the batching rule"


class Network:
    """One module, ready to be called with any parameters of its shapes.

    Attributes:
        start: The module's own trainable parameters, by name.
        head: The leaves of the linear layer that is called last and trained; empty without one.
        draws: Whether it holds a layer that drops.
        aliases: Other names of tied leaves, each with the name that the leaf has in `start`.
        reads: Embeddings in which columns of the rows are looked up as they are.
    """

    def __init__(self, module: nn.Module, spec: Spec, losses: Losses) -> None:
        refuse_layers(module)
        self._coins = Coins()
        self._module = _replaced(module, self._coins)
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
        self._chain: list[Step] | None = None  # the trial is of the general way
        self.head = _head(self._module, *self._try(spec, losses))
        chain = chain_of(self._module, self.start, self._coins)
        self._chain = chain if chain and self._same_chained(chain, spec) else None
        self.reads = readings(self._module, lambda x: self.apply(self.start, x), spec)

    def apply(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict rows of one client."""
        self._coins.toss(coins)
        like = next(iter(params.values()))
        given = {**self._constants_like(like), **params}
        try:
            # The other kernels of attention know no stack.
            with sdpa_kernel(SDPBackend.MATH):
                outputs: Tensor = torch.func.functional_call(self._module, given, (x,))
        finally:
            self._coins.toss(None)
        return squeezed(outputs) if outputs.dim() > 1 else outputs

    def apply_stacked(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict rows of a stack of clients; without gradients, in pieces of bounded size."""
        if 0 in x.shape[:2]:
            return squeezed(x.new_zeros(*x.shape[:2], self._outputs))
        if torch.is_grad_enabled() or coins is not None:
            return self._stacked(params, x, coins)
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

    def _stacked(self, params: Tree, x: Tensor, coins: Tensor | None) -> Tensor:
        if self._chain is not None:
            return self._chained(self._chain, params, x, coins)
        given = (dict(params), x) if coins is None else (dict(params), x, coins)
        with _quiet() if self._slow else nullcontext():
            outputs: Tensor = torch.func.vmap(self.apply)(*given)
        return outputs

    def _chained(self, chain: list[Step], params: Tree, x: Tensor, coins: Tensor | None) -> Tensor:
        self._coins.toss(coins)
        try:
            for step in chain:
                x = step(params, x)
        finally:
            self._coins.toss(None)
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
                with NoUnsafeLookups():
                    trained = self._try_stack(spec, losses)
                self._slow = any(_SLOW in str(warning.message) for warning in said)
            except MisfitError:
                raise
            except Exception as error:
                raise ValueError(explained(self._module, path, error)) from error
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
            check_outputs(outputs, spec)
            found = check_losses(losses, outputs, spec)
            grads = torch.autograd.grad(found.sum(), list(params.values()), allow_unused=True)
        with torch.no_grad(), noted(self._module) as lookups:
            given = {**constants, **self.start}
            torch.func.functional_call(self._module, given, (x[0],))
        check_trial(lookups)
        same_alone = self._same_alone(x[0])
        for name, tensor in constants.items():
            same = torch.equal(_bits(tensor), _bits(before[name]))
            if given[name] is not tensor or not same:
                raise changes(name)
        # Rows that are changed on the way differ as well, but for a reason of their own.
        if x._version != untouched:
            raise changes_rows()
        if not same_alone:
            raise mixes_rows()
        return {name for name, grad in zip(params, grads, strict=True) if grad is not None}

    def _same_alone(self, x: Tensor) -> bool:
        with torch.no_grad():
            whole = self.apply(self.start, x)
            alone = torch.cat([self.apply(self.start, row) for row in torch.split(x, 1)])
        return torch.allclose(whole, alone, rtol=1e-3, atol=1e-4, equal_nan=True)

    def _same_chained(self, chain: list[Step], spec: Spec) -> bool:
        # With parameters that differ by client: a start of zeros would hide what a chain does.
        x, draws = _tried(spec), torch.Generator().manual_seed(1)
        params = {
            name: leaf + 0.1 * torch.randn((2, *leaf.shape), generator=draws)
            for name, leaf in self.start.items()
        }
        coins = torch.arange(2) if self.draws else None
        with torch.no_grad():
            wanted, found = (
                self._stacked(params, x.clone(), coins),
                self._chained(chain, params, x.clone(), coins),
            )
        near = 1e-4 * max(1.0, float(wanted.abs().max()))
        return wanted.shape == found.shape and torch.allclose(
            wanted, found, rtol=1e-3, atol=near, equal_nan=True
        )

    def asked(self, x: Tensor) -> list[Lookups]:
        """Return what the embeddings are asked for by rows of one client."""
        with torch.no_grad(), noted(self._module) as found:
            self.apply(self.start, x)
        return found

    @contextmanager
    def _watched(self) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
        """Follow which layer is at work and which were, and how many numbers a row becomes."""
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
                numbers = made.numel() if isinstance(made, Tensor) else 0
                self._wide = max(self._wide, numbers // TRIED)

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield inside, called
        finally:
            for hook in hooks:
                hook.remove()


def _tried(spec: Spec) -> Tensor:
    # Rows of bits of two clients: they are numbers to look up in an embedding, too.
    bits = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (2, TRIED, *spec.shape), generator=bits).float()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{_SLOW}")
        yield


def _bits(tensor: Tensor) -> Tensor:
    # NaN is not equal to itself, its bits are.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def leaves_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters of a module by name, as float32; tied ones once."""
    leaves = {}
    for name, given in module.named_parameters():
        if not given.requires_grad:
            continue
        if not given.is_floating_point():
            raise ValueError(
                f"parameter {name!r} is of type {given.dtype}; expected float32: keep real and "
                "imaginary parts, or codes and scales, as parameters of their own"
            )
        leaves[name] = given.detach().to("cpu", torch.float32).clone()
    if not leaves:
        raise ValueError(
            f"the module {type(module).__name__} has no parameters to train: expected at least one "
            "layer with parameters that require a gradient"
        )
    return leaves


def _replaced(module: nn.Module, coins: Coins) -> nn.Module:
    made = copy.deepcopy(module).to("cpu").train()
    for layer in made.modules():
        if type(layer) in REPLACED:
            layer.__class__ = REPLACED[type(layer)]
            layer._coins = coins  # type: ignore[assignment]
    return made


def _drops(layer: Any) -> bool:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return bool(layer.p > 0)
    if isinstance(layer, nn.RNNBase):
        return bool(layer.dropout > 0 and layer.num_layers > 1)
    return isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0


def _head(module: nn.Module, called: list[nn.Module], trained: set[str]) -> tuple[str, ...]:
    # Those whose weights are read without a call come first: any that is called is later.
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
    """Take what `torch.compile` made of a module, or of its layers, off again.

    The steps of a stack are not those that were compiled, and its names would change every leaf's.
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
    # By name: the class lives in a package that takes seconds to import.
    return type(layer).__name__ == "OptimizedModule" and "_orig_mod" in layer._modules
