"""Any `torch.nn.Module` as a model: made functional, and stacked over clients.

A module that is handed over as it is starts everybody from its own weights, which are public: a
plan names its class and a digest of its weights, and the ledger is bound to both. A function or
class that makes the module starts from the run's own random stream, and can be written to a plan
and read back.
"""

import copy
import functools
import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import TASKS, FederatedDataset, Spec, Task
from coterie.models.base import Model, register_model, row_losses
from coterie.models.lookups import check_rows
from coterie.models.network import Network, leaves_of, uncompiled
from coterie.models.refusals import MisfitError, one_a_row, refuse_layers

Loss = Literal["cross_entropy", "binary_cross_entropy", "squared"]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_KEPT = 64
# Attributes that change nothing of what is trained: the mode, and a mark of `torch.compile`.
_PASSING = ("training", "_is_torch_compile")
# For which data parameters of these shapes were made: what a function is given to make its module.
_SPECS: dict[tuple["Networked", tuple[int, ...], Shapes], Spec] = {}
_DRAWS: dict["Networked", bool] = {}


class Networked(Model):
    """A model whose layers are those of a torch module."""

    @abstractmethod
    def build(self, spec: Spec) -> nn.Module:
        """Make the module, with weights from torch's own generator."""

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Draw the weights from the stream given; torch's global state is left as it is.

        What is not trained (parameters without a gradient, buffers) is the same for every stream.

        Raises:
            ValueError: If the module cannot be stacked over clients, or does not fit the data.
        """
        wanted = _shapes(_network(self, spec).start)
        made = leaves_of(_drawn(self, spec, rng))
        if _shapes(made) != wanted:
            raise ValueError(
                f"model: it made the parameters {_shapes(made)}, and before {wanted}; expected the "
                "same names and shapes whenever it is called for the same data"
            )
        return made

    def apply(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict one client's rows."""
        network = self._fitting(_shapes(params), tuple(x.shape[1:]))
        return network.apply(params, x, coins)

    def apply_stacked(self, params: Tree, x: Tensor, coins: Tensor | None = None) -> Tensor:
        """Predict the rows of many clients at once."""
        shapes = tuple((name, tuple(leaf.shape[1:])) for name, leaf in params.items())
        return self._fitting(shapes, tuple(x.shape[2:])).apply_stacked(params, x, coins)

    @property
    def draws(self) -> bool:
        """Whether training draws coins: if a layer drops, or if that is not known yet."""
        return _DRAWS.get(self, True)

    def head(self, spec: Spec) -> tuple[str, ...]:
        """Name the leaves of the last linear layer that is called and trained.

        Raises:
            ValueError: If there is none that is trained.
        """
        found = _network(self, spec).head
        if not found:
            raise ValueError(
                f"model: no linear layer among the parameters {', '.join(self._start(spec))}; "
                "expected one whose parameters are the personal part: name the personal layers"
            )
        return found

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse rows that are not in the tables of the embeddings they are looked up in."""
        network = _network(self, data.spec)
        check_rows(data, network.reads, network.asked)

    def alias(self, spec: Spec, path: str) -> str | None:
        """Name the leaf that a tied parameter, or one of a layer, shares; None if none is tied."""
        aliases = _network(self, spec).aliases
        shared = (leaf for name, leaf in aliases.items() if f"{name}.".startswith(f"{path}."))
        return next(shared, None)

    def _start(self, spec: Spec) -> Tree:
        return _network(self, spec).start

    def _fitting(self, shapes: Shapes, row: tuple[int, ...]) -> Network:
        spec = _SPECS.get((self, row, shapes)) or self._guessed(shapes, row)
        return _network(self, spec)

    def _guessed(self, shapes: Shapes, row: tuple[int, ...]) -> Spec:
        # Parameters that were read from a file, say: data of some width made them.
        widths = dict.fromkeys(shape[0] for _, shape in reversed(shapes) if shape)
        problem: ValueError | None = None
        for width in (*widths, 1):
            for task in TASKS if width == 1 else ("multiclass", "multilabel"):
                spec = Spec(row, width, task, 1)  # type: ignore[arg-type]
                try:
                    if _shapes(_network(self, spec).start) == shapes:
                        return spec
                except ValueError as error:
                    problem = problem or error
        raise ValueError(
            f"model: parameters {shapes} and rows of shape {row} do not fit it ({problem}); "
            "expected parameters that its `init` made for such rows"
        )


@lru_cache(maxsize=_KEPT)
def _network(model: Networked, spec: Spec) -> Network:
    # The weights of this copy are never used, its constants are.
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
        # torch.manual_seed would move the generators of GPUs as well.
        torch.default_generator.manual_seed(rng.at("module").key >> 1)
        return uncompiled(model.build(spec))


def assembled(model: Networked, spec: Spec, params: Tree) -> nn.Module:
    """Return the module with these parameters, set for predictions."""
    made = _drawn(model, spec, Rng.seeded(0)).eval()  # its constants are those of every run
    made.load_state_dict(dict(params), strict=False)
    return made


def _shapes(tree: Tree) -> Shapes:
    return tuple((name, tuple(leaf.shape)) for name, leaf in tree.items())


@register_model("module")
@dataclass(frozen=True)
class Module(Networked):
    """A torch module, given as it is or by what makes it.

    Attributes:
        make: A class or function that makes the module, or the module itself. It is called without
            arguments, or with the `Spec` of the data if it takes one; in a plan it is written
            "package.module:name".
        options: Named arguments of `make`.
        loss: "cross_entropy", "binary_cross_entropy", "squared" or a function of one client's
            (outputs, targets) that gives one number a row; None for the loss of the task.
        weights: Class and digest of a module that was given as it is.
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
                    f"make: given a partial with the arguments {make.args!r}; expected named ones, "
                    "which a plan can hold"
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
                f"weights = {self.weights!r}: this plan was made of a module as it was in memory, "
                "and holds no weights to make it again; give make = 'package.module:name' of a "
                "function that makes the module, or run from Python with the module itself"
            )
        if (make is None) == (module is None) or (make is not None and not callable(make)):
            raise ValueError(
                f"make = {make!r}: expected a torch.nn.Module, or a class or function that makes "
                "one"
            )
        if module is not None and options:
            raise ValueError(
                f"options = {options!r}: given beside a module that is made already; expected them "
                "with a class or function"
            )
        if not (self.loss is None or callable(self.loss) or self.loss in _NAMED):
            raise ValueError(
                f"loss = {self.loss!r}: expected one of {', '.join(_NAMED)}, or a function of "
                "(outputs, targets)"
            )

    def build(self, spec: Spec) -> nn.Module:
        """Make the module, or copy it."""
        if self.module is not None:
            return copy.deepcopy(self.module)
        make: Any = self.make
        arguments = (spec,) if _takes_spec(make, self.options) else ()
        try:
            made = make(*arguments, **self.options)
        except Exception as error:
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
                raise one_a_row(tuple(found.shape), rows)
            return found

        # By client: a function that looks at other rows must not see those of other clients.
        for _ in range(targets.dim() - (2 if task == "multilabel" else 1)):
            one = torch.func.vmap(one)
        return one(outputs, targets)


def as_model(given: Any) -> Model:
    """Take a model as it is; make one of a torch module, or of a function or class that makes it.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(given, Model):
        return given
    of_class = isinstance(given, type)
    if of_class and issubclass(given, Model):
        raise ValueError(
            f"model = {given.__name__}: expected {given.__name__}(), with its settings"
        )
    if callable(given) and (not of_class or issubclass(given, nn.Module)):
        return Module(given)
    raise ValueError(
        f"model = {given!r}: expected a model such as Linear() or MLP(), a torch.nn.Module, or a "
        "class or function that makes one"
    )


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        refuse_layers(module)
        raise ValueError(
            f"model: {type(module).__name__} cannot be copied ({error}); expected a module whose "
            "tensors are parameters and buffers: give a function that makes it"
        ) from error


def _place(make: Any) -> str:
    # As a plan writes it: where a function lies in memory tells nobody anything.
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
            "one for the Spec: give the others as options"
        )
    return bool(needed) or any(each.name == "spec" for each in positional[:1])


def _frozen(value: Any) -> Any:
    # Lists become tuples, so that a plan that is read back equals the one that was written.
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
