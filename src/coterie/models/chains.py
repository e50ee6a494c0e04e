"""Chains of simple layers (nn.Sequential) of a stack of clients, without `torch.func`.

`torch.func.vmap` takes any module, but its bookkeeping costs more than the products of a small
network. Layers that know what a stack is, or to which it makes no difference, are called directly:
one batched product a linear layer, and the same numbers. A chain with any other layer, with a hook,
or with parameters that are not trained is not taken apart.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from coterie import stacked
from coterie.core.tree import Tree
from coterie.models.layers import Coins, Dropout, Linear

# From stacked parameters and rows (c, n, ...) to the next rows.
Step = Callable[[Tree, Tensor], Tensor]
_BY_NUMBER = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh,
    nn.Hardsigmoid, nn.Hardswish, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def chain_of(module: nn.Module, leaves: Tree, coins: Coins) -> list[Step] | None:
    """Take a module apart into steps; None if it is not a chain of layers that are known here."""
    names = {id(given): name for name, given in module.named_parameters() if name in leaves}
    steps = []
    for layer in _links(module):
        # A parameter under two names of a layer is meant under both.
        every = layer.named_parameters(remove_duplicate=False)
        owned = {part: names.get(id(given)) for part, given in every}
        step = _step(layer, owned, coins) if _is_plain(layer) else None
        if step is None or None in owned.values():
            return None
        steps.append(step)
    return steps


def _links(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential and _is_plain(module):
        for layer in module:
            yield from _links(layer)
    else:
        yield module


def _is_plain(layer: nn.Module) -> bool:
    return "forward" not in vars(layer) and not any(getattr(layer, hooks) for hooks in _HOOKS)


def _step(layer: Any, names: dict[str, Any], coins: Coins) -> Step | None:
    if type(layer) in _BY_NUMBER:
        return lambda params, x: layer.forward(x)
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return lambda params, x: x.flatten(2)
    if type(layer) is Linear:
        return _linear(names)
    if type(layer) is nn.LayerNorm:
        return _layer_norm(layer, names)
    return _dropout(layer.p, coins) if type(layer) is Dropout else None


def _linear(names: dict[str, str]) -> Step:
    weight, bias = names["weight"], names.get("bias")

    def step(params: Tree, x: Tensor) -> Tensor:
        rows = x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])
        made = stacked.linear(rows, params[weight], None if bias is None else params[bias])
        return made if x.dim() == 3 else made.reshape(*x.shape[:-1], made.shape[-1])

    return step


def _layer_norm(layer: nn.LayerNorm, names: dict[str, str]) -> Step:
    shape = list(layer.normalized_shape)

    def step(params: Tree, x: Tensor) -> Tensor:
        x = functional.layer_norm(x, shape, None, None, layer.eps)
        ones = [1] * (x.dim() - 1 - len(shape))
        if "weight" in names:
            x = x * params[names["weight"]].reshape(len(x), *ones, *shape)
        if "bias" in names:
            x = x + params[names["bias"]].reshape(len(x), *ones, *shape)
        return x

    return step


def _dropout(share: float, coins: Coins) -> Step:
    def step(params: Tree, x: Tensor) -> Tensor:
        kept = coins.kept(x, tuple(x.shape[1:]), share)
        return x if kept is None else x * (kept / max(1 - share, 1e-12))

    return step
