"""Auto: no method of its own, but the wish that one be picked by rule.

`coterie.rules.choose` picks from public facts alone (the model, the spec of the data, the budget),
before anything is spent, and says why; `coterie run` does so by itself. It is not on the list of
registered methods, because there is nothing that it could compute.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

from coterie.data.federated import Clients, Spec
from coterie.methods.base import Method, Post
from coterie.models import Linear, Model
from coterie.rng import Rng
from coterie.tree import Tree

_NOT_YET = (
    "auto stands for a method that is still to be picked: use coterie.plan_for(data.spec, privacy),"
    " which picks one and says why, or name a method"
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
