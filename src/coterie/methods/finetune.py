"""Finetuning after a method with a shared model; nothing more is posted, so nothing more is spent.

Hu, Wu, Smith, "Private Multi-Task Learning: Formulation and Applications to Federated Learning",
TMLR 2023, section on local finetuning. Every client starts from the model that the base method made
it (its personal model, or the shared one) and minimises, with s the final shared model held fixed,

    plain:  mean loss(w)
    mean:   mean loss(w) + lam/2 |w - s|^2
    kl:     mean loss(w) + lam/2 mean [ KL(p_s || p_w) + KL(p_w || p_s) ]
    ewc:    mean loss(w) + lam/2 sum_j F_j (w_j - s_j)^2

p are the predictions on own rows, F the diagonal of the empirical Fisher information at the start,
on own rows (the paper's ewc is lam = 1). Where a part of the model is personal by design, as the
heads of DPFedMTL, it is not pulled anywhere by `mean` and `ewc`, and in `kl` it stands as it
started in p_s.

Costs no privacy in the view of other clients: the result is a function of the client's own rows and
the posts (billboard lemma; the replay contract rebuilds it from these). A client that gives its
finetuned model away gives away what it learnt of its own rows, as with any personal model.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.methods.base import Block, Method, Post, Shape, register
from coterie.methods.fedavg import FedAvg
from coterie.models import Model
from coterie.rng import Rng
from coterie.solvers.local import LocalProblem, fisher
from coterie.solvers.sgd import SGD, Near
from coterie.tree import Tree, scale, stack

How = Literal["plain", "mean", "kl", "ewc"]


@register("finetune")
@dataclass(frozen=True, kw_only=True)
class Finetune(Method):
    """A method with a shared model, and steps of every client's own after its last round.

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

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"lam = {self.lam}: expected a finite number >= 0")
        if self.how not in get_args(How):
            raise ValueError(f"how = {self.how!r}: expected one of {', '.join(get_args(How))}")
        if isinstance(self.base, Finetune):
            raise ValueError("base is finetuned already: finetune the method underneath")

    @classmethod
    def arranged(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Hand a model on to the base method."""
        if "model" not in settings:
            return settings
        rest = {key: value for key, value in settings.items() if key != "model"}
        base = rest.get("base", FedAvg())
        return rest | {"base": replace(base, model=settings["model"])}

    @property
    def title(self) -> str:
        """The base method's, and how it is finetuned."""
        return f"{self.base.title}+{self.how}"

    @property
    def model(self) -> Model:  # type: ignore[override]
        """The model of the base method."""
        return self.base.model

    def check(self, spec: Spec) -> None:
        """Refuse bases without a shared model."""
        self.base.check(spec)
        first = self.model.init(spec, Rng.seeded(0))
        names = () if self.base.per_row else self.base.shared_leaves(spec)
        if self.base.shape is not Shape.SUM or not names or not set(names) <= first.keys():
            raise ValueError(
                f"{self.base.kind} has no shared model of the shape of a client's "
                f"({type(self.model).__name__} on {spec.task}): use fedavg, pmtl, dpfedmtl or "
                "another method that shares one"
            )

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Finetune what the base method gives."""
        start = self.base.personalise(shared, personal, clients, rng)
        return self.refine(shared, start, clients, rng)

    def refine(self, shared: Tree, start: Tree, clients: Clients, rng: Rng) -> Tree:
        """Finetune models that the base method gave, with these coins, for this shared tree."""
        towards = self.base.shared_model(shared, clients)
        anchor = {
            name: stack({"": towards[name]}, len(clients))[""]
            if name in towards and towards[name].dim() < leaf.dim()
            else towards.get(name, leaf)
            for name, leaf in start.items()
        }
        problem = self._problem(start, anchor, set(towards), clients)
        return problem.solve(start, clients, rng.at("finetune"), round=0, anchor=anchor)

    def _problem(
        self, start: Tree, anchor: Tree, pulled: set[str], clients: Clients
    ) -> LocalProblem:
        plain = LocalProblem(model=self.model, how="sgd", sgd=self.sgd, lam=0.0)
        if self.how == "kl":
            return replace(plain, near=Near(self.lam, anchor))
        if self.how == "ewc":
            weights = scale(fisher(self.model, start, clients), self.lam)
            return replace(plain, weights={name: weights[name] for name in pulled})
        if self.how == "mean" and len(pulled) == len(start):
            return replace(plain, lam=self.lam)
        if self.how == "mean":
            ones = {name: start[name].new_full(start[name].shape, self.lam) for name in pulled}
            return replace(plain, weights=ones)
        return plain

    # All else is the base method's: what is posted, and so what is spent.

    @property
    def shape(self) -> Shape:
        """What the base method needs posted."""
        return self.base.shape

    @property
    def has_places(self) -> bool:
        """The base method's."""
        return self.base.has_places

    @property
    def protects_rows(self) -> int | None:
        """The base method's."""
        return self.base.protects_rows

    @property
    def passes(self) -> int:
        """The base method's."""
        return self.base.passes

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Start the base method."""
        return self.base.init(spec, rng)

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse rows that the base method cannot learn from."""
        self.base.check_data(data)

    def check_cohort(self, largest: int, spec: Spec) -> None:
        """Refuse cohorts as the base method does."""
        self.base.check_cohort(largest, spec)

    def blocks(self, clip: float) -> tuple[Block, ...]:
        """Bound contributions as the base method does."""
        return self.base.blocks(clip)

    def for_budget(self, reach: float, spec: Spec) -> Method:
        """Fill in the base method."""
        return replace(self, base=self.base.for_budget(reach, spec))

    def for_cohort(self, largest: int, spec: Spec) -> Method:
        """Fill in the base method."""
        return replace(self, base=self.base.for_cohort(largest, spec))

    def usual_clip(self, clients: int, rounds: int) -> float:
        """Return the base method's clip."""
        return self.base.usual_clip(clients, rounds)

    def explain(self, rounds: int, clip: float) -> tuple[str, ...]:
        """Explain the base method's rounds and clip."""
        return self.base.explain(rounds, clip)

    def notices(self, data: FederatedDataset) -> tuple[str, ...]:
        """Return the base method's notices."""
        return self.base.notices(data)

    def caveats(self, private: bool) -> tuple[str, ...]:
        """Return the base method's caveats."""
        return self.base.caveats(private)

    def contribution(self, shared: Tree) -> Tree:
        """Contribute what the base method does."""
        return self.base.contribution(shared)

    def mean_of(self, spec: Spec) -> tuple[int, float]:
        """Return the base method's."""
        return self.base.mean_of(spec)

    def enrol(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep the base method's state."""
        return self.base.enrol(shared, spec, clients)

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Do the base method's work."""
        return self.base.local_update(shared, personal, clients, rng, round)

    def settle(self, before: Tree, after: Tree, kept: Tensor) -> Tree:
        """Settle as the base method does."""
        return self.base.settle(before, after, kept)

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Move the base method's shared tree."""
        return self.base.server_update(shared, post)

    def shared_model(self, shared: Tree, clients: Clients) -> Tree:
        """Return the base method's shared model."""
        return self.base.shared_model(shared, clients)

    def alone(self) -> Method | None:
        """Learn alone in the base method's terms."""
        return self.base.alone()

    def reference(self) -> Method | None:
        """Return the base method's reference."""
        return self.base.reference()

    def standing(self, shared: Tree, personal: Tree, clients: Clients) -> Tree:
        """Return the models that would be finetuned."""
        return self.base.standing(shared, personal, clients)
