"""The public facts of a deployment: its federation, its agreement with a plan, who sees what.

`federation.toml` lies beside `plan.toml`, the same at every site and at the coordinator. A *site*
is one SuperNode: a hospital, a school authority. It hosts one or more clients, and sends the sum of
their clipped contributions. Clients are numbered in the order in which they are listed, site after
site. Plan and federation together are the *agreement*. The first message of a run states its
digest, and a site with another agreement never answers.

Which view of the guarantee applies to the coordinator follows from `trust` (see
`coterie.privacy.guarantee`): with "server" it sees the clipped sum of each site, with
"secure_aggregation" only the sum over sites. No epsilon protects a client against the operator of
its own site, which hosts its rows.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray

from coterie.core.config import ConfigError, from_table, read_toml, to_table, to_toml
from coterie.data.federated import TASKS, Spec, Task
from coterie.deploy.keys import check_key, check_site
from coterie.evaluation.metrics import json_number
from coterie.methods.base import Shape
from coterie.planning.plan import Plan
from coterie.planning.rules import resolve
from coterie.privacy.guarantee import Guarantee, is_central, is_in_shares, round_up

PLAN, FEDERATION = "plan.toml", "federation.toml"
Trust = Literal["server", "secure_aggregation", "nobody"]
VIEWS = {
    "server": "server",
    "secure_aggregation": "server_secure_aggregation",
    "nobody": "coordinator",
}
"""The coordinator's view in a guarantee, by trust."""
OWN_SITE = (
    "A client is not protected against the operator of its own site, which hosts its rows and its "
    "model."
)
_SEES = {
    ("server", True): "the clipped sum of each site before noise, and adds the noise itself",
    ("server", False): "the sum of each site, to which clients have added noise",
    ("secure_aggregation", True): "the exact sum over sites only, and adds the noise itself",
    ("secure_aggregation", False): "sums over sites only, to which clients have added noise",
    ("nobody", False): "sums over sites only, to which all clients have added shares of the noise",
}
_OUTPUTS: Mapping[str, tuple[int, float]] = {
    "regression": (1, 1),
    "binary": (1, 1),
    "multiclass": (2, math.inf),
    "multilabel": (1, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class SiteEntry:
    """A site: the names of its clients, and the Ed25519 public key of its signatures, in hex."""

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
        """The key that verifies its signatures."""
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key))


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The parties of a deployment and its public settings.

    Attributes:
        task: The prediction task.
        shape: The shape of one row of features.
        outputs: Outputs of the model: 1, or the number of classes or labels.
        sites: Sites by name.
        coordinator: The coordinator's Ed25519 public key; sites answer no other party.
        trust: "server": the coordinator sees the clipped sum of each site and adds the noise.
            "secure_aggregation": it sees only the sum over sites and adds the noise.
            "nobody": it sees only the sum over sites, to which all clients have added shares of
            the noise; the plan has noise = "shares". `corrupt` of the plan counts clients: choose
            at least the clients of the largest site, so that a site may collude.
        deadline: Seconds to wait for answers to a request; later answers are dropped.
        minimum: The share of clients whose sites must answer before a round is released: of the
            clients asked, or of all clients where the cohort is hidden. With fewer answers the same
            clients are asked again. The noise is calibrated for all planned clients, so fewer
            answers are safe, and only reduce the signal.
        patience: How often a round is asked again before the run stops (it can be resumed).
        threshold: Under secure aggregation: the share of sites that must stay to the end of a
            round before its sum can be unmasked; above one half.
        steady: Make every request last until its deadline, so that the duration of a round reveals
            nothing about the cohort; slow.
        assumed: Facts assumed to be public knowledge; stated with every guarantee.
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
    simulation: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "assumed", tuple(self.assumed))
        check_key(self.coordinator)
        for name in self.sites:
            check_site(name)
        for valid, problem in chain(self._settings(), self._parties()):
            if not valid:
                raise ValueError(problem)

    def _settings(self) -> Iterator[tuple[bool, str]]:
        """Yield for each setting whether it is valid, and the error if not."""
        yield self.task in TASKS, f"task = {self.task!r}: expected one of {', '.join(TASKS)}"
        trusts = get_args(Trust)
        yield self.trust in trusts, f"trust = {self.trust!r}: expected {' or '.join(trusts)}"
        positive = bool(self.shape) and min(*self.shape, self.outputs) >= 1
        yield (
            positive,
            f"shape = {self.shape}, outputs = {self.outputs}: expected positive numbers",
        )
        least, most = _OUTPUTS[self.task]
        yield (
            least <= self.outputs <= most,
            f"outputs = {self.outputs}: expected {'1' if most == 1 else f'{least} or more'}, "
            f"since the task is {self.task}",
        )
        finite = 0 < self.deadline < math.inf
        yield finite, f"deadline = {self.deadline}: expected seconds above 0"
        yield 0 <= self.minimum <= 1, f"minimum = {self.minimum}: expected a share from 0 to 1"
        yield self.patience >= 0, f"patience = {self.patience}: expected a whole number >= 0"
        yield (
            0.5 < self.threshold <= 1,
            f"threshold = {self.threshold}: expected a share above 0.5, up to 1: two halves of the "
            "sites could otherwise unmask a sum twice",
        )

    def _parties(self) -> Iterator[tuple[bool, str]]:
        """Yield the same for sites, clients and keys."""
        yield bool(self.sites), "no sites: list at least one, as [sites.NAME]"
        counts = Counter(self.clients)
        twice = next((name for name in counts if counts[name] > 1), None)
        yield twice is None, f"client {twice!r} is listed twice: list every client at one site"
        keys = {self.coordinator, *(site.key for site in self.sites.values())}
        yield len(keys) > len(self.sites), "a key is listed twice: give each party its own key"
        yield (
            not self.masked or len(self.sites) >= 3,
            f"trust = {self.trust!r} with {len(self.sites)} sites: expected at least 3; with "
            "two, a coordinator that colludes with one site learns the other's sum",
        )

    @property
    def masked(self) -> bool:
        """Whether the coordinator sees only sums over sites."""
        return self.trust != "server"

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """All clients, in the order of their ids."""
        return tuple(name for site in self.sites.values() for name in site.clients)

    @property
    def spec(self) -> Spec:
        """The spec of the rows that sites bring, before effects."""
        return Spec(self.shape, self.outputs, self.task, len(self.clients))

    @cached_property
    def client_ids(self) -> Mapping[str, NDArray[np.int64]]:
        """The ids of each site's clients, in ascending order."""
        found, first = {}, 0
        for name, site in self.sites.items():
            found[name] = np.arange(first, first + len(site.clients), dtype=np.int64)
            first += len(site.clients)
        return found

    @property
    def sites_needed(self) -> int:
        """How many sites t it takes to unmask a sum: public, and no coordinator can lower it.

        2 t > n + 1: a coordinator gains nothing by colluding with one site (see `deploy.secagg`).
        """
        sites = len(self.sites)
        return max((sites + 1) // 2 + 1, math.ceil(self.threshold * sites - 1e-9))

    @property
    def coordinator_key(self) -> Ed25519PublicKey:
        """The key that verifies the coordinator's signatures."""
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.coordinator))

    def to_toml(self) -> str:
        """Return the text of federation.toml."""
        return to_toml(to_table(self))

    def digest(self) -> str:
        """Return a hash of all fields."""
        # The order of sites too, because it decides the ids of clients.
        text = json.dumps([to_table(self), list(self.sites)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Agreement:
    """A resolved plan and a federation: public, and packed in the app that Flower distributes."""

    plan: Plan
    federation: Federation

    @cached_property
    def spec(self) -> Spec:
        """The spec that the plan is resolved for."""
        return model_spec(self.plan, self.federation)

    @cached_property
    def digest(self) -> str:
        """A hash of plan and federation."""
        text = json.dumps([to_table(self.plan), self.federation.digest()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of a run under this agreement."""
        federation = self.federation
        answers = (
            "which sites answer a round, and when (no more than "
            f"{self.plan.data.most_rows} rows of a client are used)"
        )
        guarantee = self.plan.guarantee(federation.spec.clients)
        accepted = dict.fromkeys((*self.plan.data.source.accepted, *federation.assumed))
        return replace(guarantee, assumed=(*accepted, answers))


def load_agreement(app: Path) -> Agreement:
    """Return the agreement of plan and federation in an app folder."""
    return make_agreement(Plan.load(app / PLAN), load_federation(app / FEDERATION))


def load_federation(path: Path) -> Federation:
    """Return the federation that a federation.toml describes."""
    try:
        return from_table(Federation, read_toml(path), "federation")
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def make_agreement(plan: Plan, federation: Federation) -> Agreement:
    """Return a plan resolved for a federation; refuse settings that only a simulation supports."""
    for name, why in (
        ("newcomers", "only a simulation holds out clients"),
        ("stragglers", "only a simulation has a virtual clock; the federation has a deadline"),
        ("charged", "the plan is of a run that a selection made; leave the table [charged] out"),
    ):
        if getattr(plan, name) is not None:
            raise ConfigError(f"plan.toml sets {name}: {why}; leave it out")
    if plan.data.clients is not None:
        raise ConfigError("plan.toml sets data.clients: federation.toml lists the clients")
    return Agreement(resolve(plan, model_spec(plan, federation)), federation)


def model_spec(plan: Plan, federation: Federation) -> Spec:
    """Return the spec of a federation's rows with the columns of the plan's effects."""
    effects, rows = plan.data.effects, federation.spec
    if effects is None:
        return rows
    return effects.design_of((), rows.shape, plan.data.source).spec(rows)


def check_deployable(plan: Plan, federation: Federation) -> None:
    """Raise `ConfigError` if a plan needs all rows in one place, or its noise is known."""
    if plan.method.shape is Shape.POOLED:
        raise ConfigError(
            f"method {plan.method.kind} trains on all rows in one place, and in a federation rows "
            "stay at their sites: choose another method, such as pmtl"
        )
    if (federation.trust == "nobody") != (plan.privacy.noise.kind == "shares"):
        raise ConfigError(
            f"trust = {federation.trust!r} and noise = {plan.privacy.noise.kind!r}: noise in "
            'shares and trust = "nobody" belong together; set both, in plan.toml and '
            "federation.toml, or neither"
        )
    check_seed(plan, federation)


def check_seed(plan: Plan, federation: Federation) -> None:
    """Raise `ConfigError` if noise comes from a seed and the federation is not a simulation."""
    if plan.simulation_seed is not None and not federation.simulation:
        raise ConfigError(
            f"simulation_seed = {plan.simulation_seed}: anyone who reads the plan knows noise from "
            "a seed, so it protects nobody; leave it out, or set simulation = true in "
            "federation.toml if all rows are public"
        )


def coordinator_epsilon(guarantee: Guarantee, federation: Federation) -> float:
    """Return epsilon against the coordinator, by the view for the federation's trust."""
    return guarantee.views[VIEWS[federation.trust]]


def colluding_sites(guarantee: Guarantee, federation: Federation) -> int:
    """Return how many sites may collude with the coordinator, under noise in shares.

    A site that colludes knows the shares of all its clients, so the largest sites that collude must
    not host more than `corrupt` clients. Unmasking must take an honest site: see `sites_needed`.
    """
    corrupt = min((getattr(event, "corrupt", 0) for event in guarantee.events), default=0)
    sizes = sorted((len(site.clients) for site in federation.sites.values()), reverse=True)
    hosted = sum(total <= corrupt for total in accumulate(sizes))
    return min(hosted, 2 * federation.sites_needed - len(sizes) - 1)


def epsilon_by_view(guarantee: Guarantee, federation: Federation) -> dict[str, float]:
    """Return epsilon by adversary; the coordinator is `coordinator`, whichever view applies."""
    views = {
        name: epsilon for name, epsilon in guarantee.views.items() if not name.startswith("server")
    }
    return {**views, "coordinator": coordinator_epsilon(guarantee, federation)}


def coordinator_sees(guarantee: Guarantee, federation: Federation) -> str:
    """Return a description of what the coordinator sees."""
    if not guarantee.events:
        return "nothing: the plan has no rounds"
    if not any(event.noisy for event in guarantee.events):
        return "who took part, and every sum, without noise"
    return f"who took part, and {_SEES[federation.trust, is_central(guarantee)]}"


def caveats(guarantee: Guarantee, federation: Federation) -> list[str]:
    """Return the caveats that belong to the guarantee of a deployment."""
    if not guarantee.events:
        return [OWN_SITE]
    epsilon = coordinator_epsilon(guarantee, federation)
    text = "infinite" if epsilon == math.inf else round_up(epsilon)
    return [
        f'Deployed with trust = "{federation.trust}": the coordinator observes '
        f"{coordinator_sees(guarantee, federation)}. Epsilon against it is {text}.",
        OWN_SITE,
    ]


def deployment_facts(
    guarantee: Guarantee, federation: Federation, *, hidden: bool
) -> dict[str, Any]:
    """Return the public facts of a deployment, for the summary of a run."""
    masked = federation.masked
    settings = ("deadline", "minimum", "patience")
    return {
        "trust": federation.trust,
        "sites": len(federation.sites),
        "clients_by_site": {name: len(site.clients) for name, site in federation.sites.items()},
        **{name: getattr(federation, name) for name in settings},
        "threshold": federation.threshold if masked else None,
        "sites_needed": federation.sites_needed if masked else None,
        "colluding_sites": colluding_sites(guarantee, federation)
        if is_in_shares(guarantee)
        else None,
        "hidden_cohort": hidden,
        "coordinator_view": VIEWS[federation.trust],
        "coordinator_sees": coordinator_sees(guarantee, federation),
        "epsilon_coordinator": json_number(coordinator_epsilon(guarantee, federation)),
        "sees": [
            {"who": who, "sees": sees, "epsilon": json_number(bound)}
            for who, sees, bound in _adversaries(guarantee, federation)
        ],
    }


def _coalitions(
    guarantee: Guarantee, corrupt: int, sites: int, cohort: str
) -> list[tuple[str, str, float]]:
    """Return the adversaries who know shares of the noise."""
    whole = {0: "no whole site", 1: "one whole site"}.get(sites, f"{sites} whole sites")
    return [
        (
            f"the coordinator, with {corrupt} clients ({whole})",
            f"the same, and these clients' contributions and shares of the noise{cohort}",
            guarantee.views["coordinator_and_corrupt"],
        ),
        (
            "all other clients together",
            "every release, without the noise that they added",
            guarantee.views["coalition_of_all_others"],
        ),
    ]


def _adversaries(guarantee: Guarantee, federation: Federation) -> list[tuple[str, str, float]]:
    """Return each adversary, what it sees, and epsilon against it."""
    others = guarantee.views["other_clients"]
    cohort = ", the cohort" if guarantee.participation.visible else ""
    # The sites that stay in a masked round are listed to all, who unmask the sum for them only.
    masked = federation.masked
    stayed = "which sites stayed to the end of a round, " if masked else ""
    who, of_sites, more = "other clients, all together", "", []
    if is_in_shares(guarantee):
        corrupt = max(getattr(event, "corrupt", 0) for event in guarantee.events)
        who, of_sites = f"other clients, at most {corrupt} together", " (as many clients at most)"
        sites = colluding_sites(guarantee, federation)
        more = _coalitions(guarantee, corrupt, sites, cohort)
    return [
        (who, f"every release{cohort}, and each its own model", others),
        (
            f"operators of other sites{of_sites}",
            f"every release, {stayed}and which of their own clients were drawn",
            others,
        ),
        (
            "the coordinator, and the operator of its SuperLink",
            coordinator_sees(guarantee, federation),
            coordinator_epsilon(guarantee, federation),
        ),
        *more,
        (
            "the operator of a client's own site",
            "its rows, its contributions and its model: no protection",
            math.inf,
        ),
    ]
