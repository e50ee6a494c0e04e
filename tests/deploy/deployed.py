"""Deployments in one process, from the agreement to the folders that they leave behind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from tests.deploy.federations import Neighbourhood, federate, rows_of

import coterie as ct
from coterie.data.config import DataConfig
from coterie.data.federated import FederatedDataset
from coterie.deploy.coordinator import run_coordinator
from coterie.deploy.federation import Agreement, make_agreement
from coterie.deploy.results import save_models
from coterie.deploy.site import Site
from coterie.planning.plan import Plan


@dataclass
class Deployment:
    """An agreement, the coordinator's key and run folder, and sites that answer in this process."""

    agreement: Agreement
    root: Path
    whole: FederatedDataset
    keys: Any
    hood: Neighbourhood

    @property
    def run(self) -> Path:
        """The coordinator's run folder."""
        return self.root / "run"

    def site(self, name: str) -> Path:
        """A site's folder."""
        return self.root / "sites" / name

    def coordinate(self, transport: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        """Conduct the run, or go on with it."""
        made = transport or (lambda note: self.hood)
        return run_coordinator(self.agreement, self.run, self.root / "coordinator.key", made)

    def reopen(self) -> None:
        """Open all sites anew, as after a restart of their machines."""
        self.hood.sites = _open(self.agreement, self.root, self.whole, self.keys)


def deploy(root: Path, clients: int = 12, sites: int = 3, **settings: Any) -> Deployment:
    """Make a deployment on embedded data; `settings` are of the plan and of the federation."""
    root.mkdir(parents=True, exist_ok=True)
    of_plan = {"simulation_seed": 3, "rounds": 3, "sampler": ct.Poisson(6)}
    of_plan |= {"method": ct.PMTL(model=ct.Linear()), "privacy": ct.Privacy(epsilon=1.0)}
    of_data = {"standardise": settings.pop("standardise", "none")}
    of_data["effects"] = settings.pop("effects", None)
    of_plan |= {key: settings.pop(key) for key in list(settings) if key in Plan.__annotations__}
    choice = DataConfig(name="districts", **of_data)
    whole = choice.open().first(clients)
    federation, keys = federate(whole, sites, **settings)
    agreement = make_agreement(Plan(data=choice, **of_plan), federation)
    path = root / "coordinator.key"
    path.write_bytes(
        keys.coordinator.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    path.chmod(0o600)
    hood = Neighbourhood(_open(agreement, root, whole, keys))
    return Deployment(agreement, root, whole, keys, hood)


def _open(agreement: Agreement, root: Path, whole: FederatedDataset, keys: Any) -> dict[str, Site]:
    federation, choice = agreement.federation, agreement.plan.data
    found = {}
    for name in federation.sites:
        rows = rows_of(whole, federation, name)
        train, test = choice.split(rows)
        found[name] = Site(
            name=name,
            agreement=agreement,
            rows=train,
            folder=root / "sites" / name,
            key=keys.sites[name],
            finished=save_models(agreement, name, train, test),
        )
    return found
