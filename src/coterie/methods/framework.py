"""Any structure, any single-task solver: MP-MTL's general framework with two functions.

Liang et al., "Model-Protected Multi-Task Learning", Algorithm 1: from the posted second moments of
the clients' models make shared information, by any function; each client fits its own rows with
that information, by any function; the fits enter the next post. One round is the non-iterative
setting: fit alone, share once, fit again. Privacy does not depend on either function, since one
sees posts alone and the other one client's rows and posts.

    def share(before, moment, radius):       # information, from what was known and the new post
        return {"direction": torch.linalg.eigh(moment)[1][:, -1]}

    def solve(information, clients):         # (c, d) weights, from own rows and information
        ...

    method = framework("mine", share, solve)
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from coterie.data.federated import Clients, FederatedDataset, Spec
from coterie.data.scaling import refuse_degenerate
from coterie.methods.base import Method, Post, Shape
from coterie.methods.single import check_linear, check_matrix
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.tree import Tree

Share = Callable[[Tree, Tensor, float], Tree]
Solve = Callable[[Tree, Clients], Tensor]


@dataclass(frozen=True, kw_only=True)
class Framework(Method):
    """A method made of `share` and `solve`; subclass it, or use `framework`.

    Attributes:
        model: Linear without a bias (`solve` gives weights alone).
        structure: "low_rank" posts the second moment, "group_sparse" its diagonal.
    """

    rounds_between = (1, 4)
    model: Model = field(default_factory=lambda: Linear(bias=False))
    structure: Literal["low_rank", "group_sparse"] = "low_rank"

    @abstractmethod
    def share(self, before: Tree, moment: Tensor, radius: float) -> Tree:
        """Make shared information (a tree) of the former one and a new post.

        `moment` is for all clients, (d, d) or (d,); `radius` says how far noise alone reaches.
        """

    @abstractmethod
    def solve(self, information: Tree, clients: Clients) -> Tensor:
        """Fit every client on its own rows: weights (c, d). Information is empty at first.

        `clients.x` and `clients.y` are padded with zeros to the longest client; `clients.mask`
        says which rows are real.
        """

    @property
    def shape(self) -> Shape:
        """A second moment, or its diagonal."""
        return Shape.GRAM if self.structure == "low_rank" else Shape.SQUARES

    def check(self, spec: Spec) -> None:
        """Refuse other models and tasks, and matrices that are too large."""
        check_linear(self, spec)
        check_matrix(self.structure, spec)

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse rows that nothing can be learnt from."""
        refuse_degenerate(data)

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Know nothing yet but the sizes."""
        self.check(spec)
        return {
            "framework.clients": torch.tensor([float(spec.clients)], dtype=torch.float64),
            "framework.blank": torch.zeros(spec.features, dtype=torch.float64),
        }

    def contribution(self, shared: Tree) -> Tree:
        """Contribute one model, as a vector."""
        return {"moment": shared["framework.blank"]}

    def enrol(self, shared: Tree, spec: Spec, clients: int) -> Tree:
        """Keep nothing between rounds."""
        return {"begun": torch.zeros(clients)}

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Fit with what is known; contribute the model."""
        return personal, {"moment": self.solve(_known(shared), clients).double()}

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Make shared information of the post."""
        whole = float(shared["framework.clients"]) / post.cohort
        moment = post.value["moment"].double() * whole
        own = {name: leaf for name, leaf in shared.items() if name.startswith("framework.")}
        return {**self.share(_known(shared), moment, post.radius * whole), **own}

    def personalise(self, shared: Tree, personal: Tree, clients: Clients, rng: Rng) -> Tree:
        """Fit once more with all that is known."""
        return {"weight": self.solve(_known(shared), clients).float()[:, None]}


def _known(shared: Tree) -> Tree:
    return {name: leaf for name, leaf in shared.items() if not name.startswith("framework.")}


def framework(
    name: str,
    share: Share,
    solve: Solve,
    *,
    structure: Literal["low_rank", "group_sparse"] = "low_rank",
) -> Framework:
    """Make a method of two functions; `name` stands for them in plans and ledgers."""
    members = {
        "kind": name,
        "share": lambda self, before, moment, radius: share(before, moment, radius),
        "solve": lambda self, information, clients: solve(information, clients),
        "__doc__": f"The framework with the functions of {name}.",
    }
    made: type[Framework] = type(name, (Framework,), members)
    return made(structure=structure)
