"""Auto: a placeholder for a method that a rule picks.

`coterie.planning.rules.choose` picks it from public facts (the model, the spec of the data, the
budget) before anything is spent, with the reason. It is not a registered method: it computes
nothing.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from coterie.methods.base import Method
from coterie.models import Linear, Model

_NOT_YET = (
    "auto is a placeholder for a method: use coterie.plan_for(data.spec, privacy), which picks one"
    " and gives the reason, or name a method"
)


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """A method chosen by rule: pfeb for linear models, fedavg, dpfedmtl or pmtl for networks.

    It has no setting but the model; all others are those of the method that is chosen.
    """

    kind: ClassVar[str] = "auto"
    model: Model = field(default_factory=Linear)

    def init(self, *args: Any, **given: Any) -> Any:
        """Raise ValueError: a rule must choose a method first."""
        raise ValueError(_NOT_YET)

    local_update = server_update = init
