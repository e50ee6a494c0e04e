"""What a certificate says of a deployment, held against federation.toml and its own numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.verification import reading
from coterie.verification.verdict import Check, judge

_VIEWS = {"server": "server", "secure_aggregation": "server_secure_aggregation"}


def of_deployment(folder: Path, told: Mapping[str, Any]) -> Iterator[Check]:
    """Check how a run says it was deployed; nothing to check of one that was simulated."""
    stated, federation = told.get("deployment"), reading.read_federation(folder)
    if stated is None and federation is None:
        return
    wrong = list(_faults(folder, told, stated, federation))
    yield judge("deployment", wrong, "trust, sites and clients as federation.toml has them")


def _faults(
    folder: Path, told: Mapping[str, Any], stated: Any, federation: Mapping[str, Any] | None
) -> Iterator[str]:
    if not isinstance(stated, dict):
        yield "federation.toml lies here, and the certificate says nothing of a deployment"
        return
    if federation is None:
        yield "federation.toml is missing"
        return
    if reading.hash_file(folder / reading.FEDERATION) != stated.get("federation"):
        yield "federation.toml is altered"
    trust = federation.get("trust", "server")
    hosted = _hosted(federation)
    expected = {
        "trust": trust,
        "sites": len(hosted),
        "clients_by_site": hosted,
        "coordinator_view": _VIEWS.get(str(trust)),
        "epsilon_coordinator": told["views"].get(_VIEWS.get(str(trust), "")),
    }
    for name, value in expected.items():
        if stated.get(name) != value:
            yield f"{name}: certificate {stated.get(name)!r}, federation.toml {value!r}"
    if sum(hosted.values()) != told["clients"]:
        yield f"{told['clients']} clients, federation.toml lists {sum(hosted.values())}"
    yield from _strange_rows(stated, told)
    yield from _strange_caveats(told, str(trust))


def _hosted(federation: Mapping[str, Any]) -> dict[str, int]:
    sites = federation.get("sites")
    listed = sites if isinstance(sites, dict) else {}
    return {
        str(name): len(site["clients"])
        for name, site in listed.items()
        if isinstance(site, dict) and isinstance(site.get("clients"), list)
    }


def _strange_rows(stated: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[str]:
    """Compare the epsilons of who sees what with those by view."""
    others = told["views"].get("other_clients")
    expected = [others, others, stated.get("epsilon_coordinator"), "inf"]
    rows = stated.get("sees")
    found = [one.get("epsilon") for one in rows if isinstance(one, dict)] if rows else []
    if found != expected:
        yield f"who sees what has epsilons {found}, by view they are {expected}"


def _strange_caveats(told: Mapping[str, Any], trust: str) -> Iterator[str]:
    """Make sure that what must be read beside the guarantee is said."""
    caveats = told.get("caveats")
    said = [str(one) for one in caveats] if isinstance(caveats, list) else []
    if not any("operator of its own site" in one for one in said):
        yield "caveats do not say that a client's own site is not covered"
    if told["rounds"] and not any(
        one.startswith(f'Deployed with trust = "{trust}"') for one in said
    ):
        yield "caveats do not say what the coordinator sees"
