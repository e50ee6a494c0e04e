"""What all parties of a deployment have agreed on: plan.toml and federation.toml, side by side.

Both are public and lie in the app that Flower brings to every site. Their digest stands in the
first letter of a run, so that a site with another plan never answers.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from coterie.config import ConfigError, from_table, to_table
from coterie.engines.federation import Federation
from coterie.plan import Plan
from coterie.privacy.guarantee import Guarantee
from coterie.run_plan import RunPlan, load_plan, read_toml, resolve

PLAN, FEDERATION = "plan.toml", "federation.toml"


@dataclass(frozen=True)
class Agreement:
    """A resolved plan and a federation."""

    run_plan: RunPlan
    federation: Federation

    @property
    def plan(self) -> Plan:
        """The part that owns the guarantee."""
        return self.run_plan.plan()

    @property
    def digest(self) -> str:
        """Name the agreement."""
        table = to_table(self.run_plan)
        told = json.dumps([table, self.federation.digest()], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()


def load_agreement(app: Path) -> Agreement:
    """Read plan and federation of an app, and check that they fit together.

    Raises:
        ConfigError: If they cannot be read or do not fit.
    """
    return agree(load_plan(app / PLAN), load_federation(app / FEDERATION))


def load_federation(path: Path) -> Federation:
    """Read a federation.toml."""
    try:
        return from_table(Federation, read_toml(path), "federation")
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def agree(run_plan: RunPlan, federation: Federation) -> Agreement:
    """Resolve a plan for a federation.

    Raises:
        ConfigError: If the plan asks for what a deployment cannot do.
    """
    for name, why in (
        ("newcomers", "clients that are held out belong to a simulation"),
        ("stragglers", "a virtual clock belongs to a simulation; the federation has a deadline"),
        ("charged", "the plan is of a run that a selection made; leave the table [charged] out"),
    ):
        if getattr(run_plan, name) is not None:
            raise ConfigError(f"plan.toml sets {name}: {why}; leave it out")
    if run_plan.data.clients is not None:
        raise ConfigError("plan.toml sets data.clients: the federation lists its clients itself")
    return Agreement(resolve(run_plan, federation.spec), federation)


def promise(agreement: Agreement) -> Guarantee:
    """Return what a run of the agreement guarantees."""
    federation = agreement.federation
    promised = agreement.plan.guarantee(federation.spec.clients)
    return replace(promised, assumed=federation.assumed)
