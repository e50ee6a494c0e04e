"""Auto: a placeholder for a method that a rule picks.

`coterie.plan.rules.choose` picks it from public facts (the model, the spec of the data, the budget)
before anything is spent, with the reason. It is not a registered method: it computes nothing.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Clients, Spec
from coterie.methods.base import Method, Post
from coterie.models import Linear, Model

_NOT_YET = (
    "auto is a placeholder for a method: use coterie.plan_for(data.spec, privacy), which picks one"
    " and gives the reason, or name a method"
)


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """A method chosen by rule: pfeb for linear models, dpfedmtl or pmtl for networks.

    Attributes:
        model: The model of every client; all other settings are those of the method picked.
    """

    kind: ClassVar[str] = "auto"
    model: Model = field(default_factory=Linear)

    def init(self, spec: Spec, rng: Rng) -> Tree:
        """Raise ValueError: a rule must choose a method first."""
        self._refuse()

    def local_update(
        self, shared: Tree, personal: Tree, clients: Clients, rng: Rng, round: int
    ) -> tuple[Tree, Tree]:
        """Raise ValueError: a rule must choose a method first."""
        self._refuse()

    def server_update(self, shared: Tree, post: Post) -> Tree:
        """Raise ValueError: a rule must choose a method first."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(_NOT_YET)
