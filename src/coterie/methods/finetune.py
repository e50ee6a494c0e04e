"""Finetuning, a step after `personalise`; nothing more is released, so it costs no privacy.

Hu, Wu, Smith, "Private Multi-Task Learning: Formulation and Applications to Federated Learning",
TMLR 2023, section on local finetuning. Every client starts from the model that the base method
gives it (its personal model, or the shared one) and minimises, with s the final shared model fixed,

    plain:  mean loss(w)
    mean:   mean loss(w) + lam/2 |w - s|^2
    kl:     mean loss(w) + lam/2 mean [ KL(p_s || p_w) + KL(p_w || p_s) ]
    ewc:    mean loss(w) + lam/2 sum_j F_j (w_j - s_j)^2

p are the predictions on own rows, F the diagonal of the empirical Fisher information at the start,
on own rows (the paper's ewc is lam = 1). Leaves that are personal by design, such as the heads of
DPFedMTL, have no proximal term in `mean` and `ewc`; in `kl`, p_s uses their start.

The result is a function of the client's own rows and the releases, so the billboard lemma covers it
in the view of the other clients (the replay contract checks this). A client that publishes its
finetuned model publishes what it learned from its own rows, as with any personal model.
"""

import inspect
from dataclasses import InitVar, dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

from coterie.core.rng import Rng
from coterie.core.tree import Tree, scale
from coterie.data.federated import Clients, Spec
from coterie.methods.base import (
    Method,
    Post,
    Shape,
    check_numbers,
    per_row_leaves,
    register,
    shared_leaves,
)
from coterie.methods.fedavg import FedAvg
from coterie.solvers.local import LocalProblem, fisher
from coterie.solvers.sgd import SGD, Near

How = Literal["plain", "mean", "kl", "ewc"]
C = TypeVar("C", bound=type[Method])


def like_its_base(cls: C) -> C:
    """Take every member of `Method` that the class does not define from `base`."""
    for name in ("model", *(name for name in vars(Method) if not name.startswith("_"))):
        if name == "kind" or (name in vars(cls) and name != "model"):
            continue
        if inspect.isfunction(getattr(Method, name, None)):
            setattr(cls, name, _forwarded(name))
        else:
            setattr(cls, name, property(attrgetter(f"base.{name}")))
    return cls


def _forwarded(name: str) -> Any:
    def call(self: Any, *args: Any, **settings: Any) -> Any:
        return getattr(self.base, name)(*args, **settings)

    call.__name__, call.__doc__ = name, getattr(Method, name).__doc__
    return call


@register("finetune", releases="as its base method")
@like_its_base
@dataclass(frozen=True, kw_only=True)
class Finetune(Method):
    """Any method with a shared model, then local steps of each client after the last round.

    Everything but the models after the last round is the base method's.

    Attributes:
        base: The method that is finetuned.
        how: "plain", "mean", "kl" or "ewc".
        lam: The weight of the last three.
        sgd: The steps.
    """

    base: Method = field(default_factory=FedAvg)
    how: How = "plain"
    lam: float = 1.0
    sgd: SGD = field(default_factory=lambda: SGD(epochs=10))
    model: InitVar[Any] = None  # replaces the base method's

    def __post_init__(self, model: Any) -> None:
        if model is not None:
            base = replace(self.base, model=model)  # type: ignore[type-var]
            object.__setattr__(self, "base", base)
        check_numbers(self, lam=">= 0")
        if self.how not in get_args(How):
            raise ValueError(f"how = {self.how!r}: expected one of {', '.join(get_args(How))}")
        if isinstance(self.base, Finetune):
            raise ValueError("base is a finetune already: finetune its base method instead")

    def __str__(self) -> str:
        return f"{self.base}+{self.how}"

    def check(self, spec: Spec, **given: Any) -> None:
        """Raise ValueError for base methods without a shared model."""
        self.base.check(spec, **given)
        state = self.base.init_client_state(self.base.init(spec, Rng.seeded(0)), spec, 1)
        names = () if per_row_leaves(state) else shared_leaves(self.base, spec)
        first = self.base.model.init(spec, Rng.seeded(0))
        if self.base.shape is not Shape.SUM or not names or not set(names) <= first.keys():
            raise ValueError(
                f"{self.base.kind} has no shared model of the shape of a client's "
                f"({type(self.base.model).__name__} on {spec.task}): use fedavg, pmtl, dpfedmtl or "
                "another method that shares one"
            )

    def resolve(self, spec: Spec, *, n_mu: float, cohort: int) -> Method:
        """Resolve the base method."""
        base = self.base.resolve(spec, n_mu=n_mu, cohort=cohort)
        return replace(self, base=base, model=None)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Return the base method's update."""
        return self.base.local_update(shared, personal, clients, rng, round)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Return the base method's update."""
        return self.base.server_update(shared, post)

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Finetune the base method's models."""
        start = self.base.personalise(shared, personal, clients, rng)
        return self.refine(shared, start, clients, rng)

    def refine(self, shared: Tree, start: Tree, clients: Clients, rng: Rng) -> Tree:
        """Return finetuned models, given those of the base method."""
        towards = self.base.serving.shared_model(shared, clients)
        anchor = {
            name: towards.get(name, leaf).expand(leaf.shape).clone() for name, leaf in start.items()
        }
        problem = self._problem(start, anchor, set(towards), clients)
        return problem.solve(start, clients, rng.at("finetune"), round=0, anchor=anchor)

    def _problem(
        self, start: Tree, anchor: Tree, pulled: set[str], clients: Clients
    ) -> LocalProblem:
        plain = LocalProblem(model=self.base.model, how="sgd", sgd=self.sgd, lam=0.0)
        if self.how == "kl":
            return replace(plain, near=Near(self.lam, anchor))
        if self.how == "ewc":
            weights = scale(fisher(self.base.model, start, clients), self.lam)
            return replace(plain, weights={name: weights[name] for name in pulled})
        if self.how == "mean" and len(pulled) == len(start):
            return replace(plain, lam=self.lam)
        if self.how == "mean":
            ones = {name: start[name].new_full(start[name].shape, self.lam) for name in pulled}
            return replace(plain, weights=ones)
        return plain
