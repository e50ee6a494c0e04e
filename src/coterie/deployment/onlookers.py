"""Who sees what in a deployment, and at which epsilon: public facts, stated with every run.

Which view of the coordinator applies follows from `trust` (see `coterie.privacy.views`): "server"
is the guarantee's view of a server that sees each site's bounded sum, "secure_aggregation" that of
one that sees sums over sites alone. Against its own site's operator no epsilon protects a client:
the site hosts its rows.
"""

import math
from collections.abc import Iterator
from typing import Any

from coterie.engines.federation import Federation
from coterie.engines.site_masks import sites_needed
from coterie.evaluation.metrics import json_number
from coterie.privacy.accounting import Guarantee
from coterie.privacy.events import NonPrivate
from coterie.privacy.views import is_central
from coterie.privacy.words import round_up

VIEWS = {"server": "server", "secure_aggregation": "server_secure_aggregation"}
"""The coordinator's view in a guarantee, by trust."""
OWN_SITE = (
    "A client is not protected against the operator of its own site, which hosts its rows and its "
    "model."
)
_SEES = {
    ("server", True): "each site's bounded sum before noise, which it adds itself",
    ("server", False): "each site's sum of messages to which clients have added noise",
    ("secure_aggregation", True): "the exact sum over sites, to which it adds the noise itself; "
    "no single site's",
    ("secure_aggregation", False): "sums over sites of messages to which clients have added noise; "
    "no single site's",
}


def coordinator_epsilon(guarantee: Guarantee, federation: Federation) -> float:
    """Return epsilon against the coordinator, by the view that the federation's trust calls for."""
    return guarantee.views[VIEWS[federation.trust]]


def coordinator_sees(guarantee: Guarantee, federation: Federation) -> str:
    """Say what the coordinator sees."""
    if not guarantee.events:
        return "nothing: no round is asked"
    if all(isinstance(event, NonPrivate) for event in guarantee.events):
        return "who took part, and every sum: no noise is added"
    return f"who took part, and {_SEES[federation.trust, is_central(guarantee)]}"


def by_view(guarantee: Guarantee, federation: Federation) -> dict[str, float]:
    """Return epsilon by who looks: the views of the guarantee that exist here.

    The coordinator's is called `coordinator`, whichever view of a server it is.
    """
    views = {
        name: epsilon for name, epsilon in guarantee.views.items() if not name.startswith("server")
    }
    return {**views, "coordinator": coordinator_epsilon(guarantee, federation)}


def caveats(guarantee: Guarantee, federation: Federation) -> list[str]:
    """Return what must be read beside the guarantee of a deployment."""
    if not guarantee.events:
        return [OWN_SITE]
    epsilon = coordinator_epsilon(guarantee, federation)
    told = "infinite" if epsilon == math.inf else round_up(epsilon)
    return [
        f'Deployed with trust = "{federation.trust}": the coordinator sees '
        f"{coordinator_sees(guarantee, federation)}. Epsilon against it is {told}.",
        OWN_SITE,
    ]


def deployment_told(
    guarantee: Guarantee, federation: Federation, *, hidden: bool
) -> dict[str, Any]:
    """Return what a run says of how it was deployed; public facts of plan and federation alone.

    Args:
        guarantee: What is promised.
        federation: Who takes part.
        hidden: Whether nobody may know who takes part in a round.
    """
    masked = federation.trust == "secure_aggregation"
    return {
        "trust": federation.trust,
        "sites": len(federation.sites),
        "clients_by_site": {name: len(site.clients) for name, site in federation.sites.items()},
        "deadline": federation.deadline,
        "minimum": federation.minimum,
        "patience": federation.patience,
        "threshold": federation.threshold if masked else None,
        "sites_needed": sites_needed(federation) if masked else None,
        "hidden_cohort": hidden,
        "coordinator_view": VIEWS[federation.trust],
        "coordinator_sees": coordinator_sees(guarantee, federation),
        "epsilon_coordinator": json_number(coordinator_epsilon(guarantee, federation)),
        "sees": [
            {"who": who, "sees": sees, "epsilon": json_number(epsilon)}
            for who, sees, epsilon in _onlookers(guarantee, federation)
        ],
    }


def _onlookers(guarantee: Guarantee, federation: Federation) -> Iterator[tuple[str, str, float]]:
    """List who looks, what is seen, and at which epsilon."""
    others = guarantee.views["other_clients"]
    seen = " and who took part" if guarantee.participation.visible else ""
    posts = f"every post{seen}, and each client its own model"
    yield "other clients, even all together", posts, others
    # The survivors of a masked round are listed to all, who open the sum for them alone.
    masked = federation.trust == "secure_aggregation"
    there = "which sites were there to the end of a round, " if masked else ""
    told = f"every post, {there}and which of their own clients were asked"
    yield "operators of other sites", told, others
    told = coordinator_sees(guarantee, federation)
    epsilon = coordinator_epsilon(guarantee, federation)
    yield "the coordinator, and whoever runs its SuperLink", told, epsilon
    told = "its rows, its contributions and its model: nothing here protects against it"
    yield "the operator of a client's own site", told, math.inf
