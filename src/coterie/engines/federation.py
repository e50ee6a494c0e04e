"""A federation: who takes part, where its clients live, whom it trusts; all of it public.

Written as `federation.toml` beside `plan.toml`, the same at every site and at the coordinator. A
*site* is one SuperNode: a hospital, a school authority. It hosts one client or several; what leaves
it is the sum of its clients' bounded contributions. Clients are numbered in the order in which they
are listed, site after site.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray

from coterie.core.config import to_table
from coterie.data.federated import TASKS, Spec, Task

Trust = Literal["server", "secure_aggregation"]
_OUTPUTS: Mapping[str, tuple[int, float]] = {
    "regression": (1, 1),
    "binary": (1, 1),
    "multiclass": (2, math.inf),
    "multilabel": (1, math.inf),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class SiteEntry:
    """A site of the federation.

    Attributes:
        clients: Names of its clients.
        key: Its Ed25519 public key, 64 hexadecimal digits: what it signs its answers with.
    """

    clients: tuple[str, ...]
    key: str

    def __post_init__(self) -> None:
        if isinstance(self.clients, str):
            raise ValueError(f"clients = {self.clients[:40]!r}: expected a list of names")
        object.__setattr__(self, "clients", tuple(str(name) for name in self.clients))
        if not self.clients:
            raise ValueError("a site without clients: list their names, or leave the site out")
        check_key(self.key)

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The key, to verify with."""
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key))


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Public facts of a deployment.

    Attributes:
        task: Of the model.
        shape: Of one row of features.
        outputs: Of the model: 1, or the number of classes or labels.
        sites: By name.
        coordinator: The coordinator's Ed25519 public key: sites answer to nobody else.
        trust: "server": the coordinator sees each site's bounded sum, and adds the noise.
            "secure_aggregation": it sees the sum over sites alone, and adds the noise.
        deadline: Seconds that answers to a question are waited for; later ones are dropped.
        minimum: The share of clients whose sites must have answered for a round to be posted: of
            those asked, or of all where the cohort is hidden. With fewer the same are asked again;
            the noise is made for all that are planned, so that fewer answers are safe, and only
            tell less.
        patience: How often a round is asked again before the run stops (it can be resumed).
        threshold: Under secure aggregation: the share of sites that must stay to the end of a
            round for its sum to be opened; above one half.
        steady: Let every question last until its deadline, so that the length of a round tells
            others nothing of who was drawn; slow.
        assumed: What is taken for public knowledge, in words; stated with every guarantee.
        simulation: Permit a plan with a seed: its noise is known, and it protects nobody.
    """

    task: Task
    shape: tuple[int, ...]
    outputs: int
    sites: Mapping[str, SiteEntry]
    coordinator: str
    trust: Trust = "server"
    deadline: float = 120.0
    minimum: float = 0.5
    patience: int = 2
    threshold: float = 2 / 3
    steady: bool = False
    assumed: tuple[str, ...] = ()
    simulation: bool = field(default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "assumed", tuple(self.assumed))
        check_key(self.coordinator)
        self._check_choices()
        self._check_sites()

    def _check_choices(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task = {self.task!r}: expected one of {', '.join(TASKS)}")
        if self.trust not in get_args(Trust):
            raise ValueError(f"trust = {self.trust!r}: expected {' or '.join(get_args(Trust))}")
        if not self.shape or min(self.shape) < 1 or self.outputs < 1:
            raise ValueError(
                f"shape = {self.shape}, outputs = {self.outputs}: expected positive numbers"
            )
        least, most = _OUTPUTS[self.task]
        if not least <= self.outputs <= most:
            raise ValueError(
                f"outputs = {self.outputs}: expected {'1' if most == 1 else f'{least} or more'}, "
                f"since the task is {self.task}"
            )
        self._check_rounds()

    def _check_rounds(self) -> None:
        if not 0 < self.deadline < math.inf:
            raise ValueError(f"deadline = {self.deadline}: expected seconds above 0")
        if not 0 <= self.minimum <= 1:
            raise ValueError(f"minimum = {self.minimum}: expected a share from 0 to 1")
        if self.patience < 0:
            raise ValueError(f"patience = {self.patience}: expected a whole number >= 0")
        if not 0.5 < self.threshold <= 1:
            raise ValueError(
                f"threshold = {self.threshold}: expected a share above 0.5, to 1: two halves of "
                "the sites could otherwise open a sum twice"
            )

    def _check_sites(self) -> None:
        if not self.sites:
            raise ValueError("no sites: list at least one, as [sites.NAME]")
        odd = [name for name in self.sites if not _NAME.fullmatch(name)]
        if odd:
            raise ValueError(
                f"site {odd[0]!r}: expected ASCII letters, digits, '.', '_' and '-', at most 64"
            )
        names = self.clients
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"client {twice!r} is listed twice: every client lives at one site")
        keys = [site.key for site in self.sites.values()]
        if len(set(keys)) < len(keys) or self.coordinator in keys:
            raise ValueError("a key is listed twice: give every site, and the coordinator, its own")
        if self.trust == "secure_aggregation" and len(self.sites) < 3:
            raise ValueError(
                f"trust = 'secure_aggregation' with {len(self.sites)} sites: expected at least 3; "
                "with two, a coordinator that colludes with one site knows the other's part"
            )

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """All clients, in the order of their numbers."""
        return tuple(name for site in self.sites.values() for name in site.clients)

    @property
    def spec(self) -> Spec:
        """The public facts that a plan needs."""
        return Spec(self.shape, self.outputs, self.task, len(self.clients))

    @cached_property
    def numbers(self) -> Mapping[str, NDArray[np.int64]]:
        """The numbers of each site's clients, in ascending order."""
        found, first = {}, 0
        for name, site in self.sites.items():
            found[name] = np.arange(first, first + len(site.clients), dtype=np.int64)
            first += len(site.clients)
        return found

    @property
    def coordinator_key(self) -> Ed25519PublicKey:
        """The coordinator's key, to verify with."""
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.coordinator))

    def digest(self) -> str:
        """Name what all have to agree on."""
        # The order of sites as well, which decides the numbers of clients.
        text = json.dumps([to_table(self), list(self.sites)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def check_key(key: str) -> None:
    """Refuse what is not a public key."""
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ValueError(
            f"key = {str(key)[:70]!r}: expected an Ed25519 public key as 64 hexadecimal digits; "
            "`coterie deploy certificates` makes them"
        )
