"""Federations in one process: sites that answer by a function call, and faults put in between."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.data.federated import FederatedDataset
from coterie.deploy.coordinator import Answer, Coordinator
from coterie.deploy.federation import Agreement, Federation, SiteEntry
from coterie.deploy.messages import Envelope, RefusedError, pack, public_hex, unpack
from coterie.deploy.rows import place_rows
from coterie.deploy.site import Site
from coterie.planning.plan import Plan

Tamper = Callable[[str, Envelope, Envelope], Answer | None]
"""Takes site, question and answer; gives what arrives instead, or None for nothing at all."""


@dataclass
class Keys:
    """Private keys of a coordinator and its sites."""

    coordinator: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    sites: dict[str, Ed25519PrivateKey] = field(default_factory=dict)


def federate(
    data: FederatedDataset, sites: int | Mapping[str, tuple[int, ...]], **settings: Any
) -> tuple[Federation, Keys]:
    """Spread the clients of a data set over sites, in their order."""
    if isinstance(sites, int):
        parts = np.array_split(np.arange(len(data)), sites)
        sites = {f"site{i}": tuple(part.tolist()) for i, part in enumerate(parts)}
    keys = Keys(sites={name: Ed25519PrivateKey.generate() for name in sites})
    entries = {
        name: SiteEntry(clients=tuple(data.names[i] for i in ids), key=public_hex(keys.sites[name]))
        for name, ids in sites.items()
    }
    spec = data.spec
    federation = Federation(
        task=spec.task,
        shape=spec.shape,
        outputs=spec.outputs,
        sites=entries,
        coordinator=public_hex(keys.coordinator),
        **{"deadline": 5.0, "simulation": True, **settings},
    )
    return federation, keys


def rows_of(data: FederatedDataset, federation: Federation, site: str) -> FederatedDataset:
    """Return a site's rows, in the shape of the federation."""
    names = list(data.names)
    rows = {}
    for name in federation.sites[site].clients:
        i = names.index(name)
        span = slice(int(data.offsets[i]), int(data.offsets[i + 1]))
        rows[name] = (data.features[span].numpy(), data.targets[span].numpy())
    return place_rows(rows, federation, site, "test")


@dataclass
class Neighbourhood:
    """All sites of a federation in this process, as a transport."""

    sites: dict[str, Site]
    tamper: Tamper | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)

    def connect(self, handshake, identify, sites, seconds) -> set[str]:
        found = set()
        for name, site in self.sites.items():
            if name in self.absent:
                continue
            try:
                found.add(identify(site.answer(handshake())))
            except RefusedError:
                continue
        return found

    def ask(
        self, questions: Mapping[str, Envelope], seconds: float
    ) -> Iterator[tuple[str, Answer]]:
        for name, envelope in questions.items():
            if name in self.absent:
                continue
            self.asked.append((name, unpack(pack(envelope)).header.decode()))
            answer: Answer | None = self.sites[name].answer(unpack(pack(envelope)))
            if self.tamper is not None:
                answer = self.tamper(name, envelope, answer)
            if answer is not None:
                yield name, answer


def open_sites(
    plan: Plan,
    data: FederatedDataset,
    federation: Federation,
    keys: Keys,
    folder: Path,
    **settings: Any,
) -> dict[str, Site]:
    """Open all sites of a federation."""
    agreement = Agreement(plan, federation)  # one: its guarantee takes a while
    return {
        name: Site(
            name=name,
            agreement=agreement,
            rows=rows_of(data, federation, name),
            folder=folder / name,
            key=keys.sites[name],
            **settings,
        )
        for name in federation.sites
    }


def open_coordinator(
    plan: Plan, federation: Federation, keys: Keys, folder: Path, transport: Any, log: list[Any]
) -> Coordinator:
    """Open a coordinator that notes into a list."""
    folder.mkdir(parents=True, exist_ok=True)
    return Coordinator(
        agreement=Agreement(plan, federation),
        folder=folder,
        key=keys.coordinator,
        transport=transport,
        log=lambda event, **facts: log.append((event, facts)),
    )
