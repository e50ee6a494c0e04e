"""How runs were deployed: a section of a report, with who sees what; public facts alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.privacy.guarantee import round_up
from coterie.report.elements import Html, element, join, percent, table
from coterie.report.finished import FinishedRun

STAYED = "Scores of the clients' models stayed at the sites, and so did the models."
_TRUST = {
    "server": "server: the coordinator sees each site's sum",
    "secure_aggregation": "secure aggregation: the coordinator sees the sum over sites alone",
}
_LISTED = 12


def show_deployed(runs: Sequence[FinishedRun], *, clients: bool = True) -> Html:
    """Show how runs were deployed, and who sees what of them; nothing of simulated ones.

    Sites and how many clients they host are public facts of federation.toml. Nothing is told of
    rounds: how many answered one, and who, is hidden where the cohort is.
    """
    shown = [run for run in runs if run.deployment]
    if not shown:
        return Html("")
    parts: list[str] = [element("h2", "How it was deployed", id="deployed")]
    for run in shown:
        parts += [element("h3", run.label)] if len(runs) > 1 else []
        parts.append(_facts(run, clients=clients))
        parts.append(element("p", "Who sees what", class_="label"))
        parts.append(_sees(run.deployment))
        if not run.is_scored:
            parts.append(element("p", STAYED, class_="note"))
    return element("section", *parts)


def _facts(run: FinishedRun, *, clients: bool) -> Html:
    told = run.deployment
    rows = [
        ["trust", _TRUST.get(str(told.get("trust")), str(told.get("trust")))],
        ["sites", f"{told.get('sites')}{_hosted(told) if clients else ''}"],
        ["clients", str(run.guarantee.clients)],
        ["rounds", str(run.result["rounds"])],
        ["deadline", f"{float(told.get('deadline') or 0):g} s for the answers to a question"],
        ["minimum", _least(told)],
    ]
    if told.get("sites_needed") is not None:
        needed = f"{told['sites_needed']} of {told.get('sites')} sites"
        rows.append(
            [
                "sites needed",
                f"{needed} must answer a round (else it is asked again) and its opening (else it "
                "is void)",
            ]
        )
    if told.get("site"):
        rows.insert(0, ["this page", f"of site {told['site']}: its own clients' scores"])
    return table(["what", "here"], rows, class_="facts short")


def _least(told: Mapping[str, Any]) -> str:
    """Say with how many clients a round is posted, and what happens with fewer."""
    share = percent(float(told.get("minimum") or 0))
    of = "of all clients" if told.get("hidden_cohort") else "of the clients asked"
    return f"{share} {of}; a round with fewer is asked again, up to {told.get('patience')} times"


def _hosted(told: Mapping[str, Any]) -> str:
    """Name sites with how many clients they host; of many, a few."""
    hosted = dict(told.get("clients_by_site") or {})
    if not hosted:
        return ""
    named = [f"{name} {count}" for name, count in list(hosted.items())[:_LISTED]]
    more = f" and {len(hosted) - _LISTED} more" if len(hosted) > _LISTED else ""
    return f" (clients of each: {', '.join(named)}{more})"


def _sees(told: Mapping[str, Any]) -> Html:
    rows = [
        [str(one["who"]), str(one["sees"]), shown_epsilon(one["epsilon"])]
        for one in told.get("sees") or ()
    ]
    return table(["who", "sees", "epsilon"], rows, class_="facts cards")


def shown_epsilon(epsilon: float | str) -> Html:
    """Write an epsilon that may be infinite."""
    if math.isinf(float(epsilon)):
        return element("span", "no bound (inf)", class_="bad")
    return join(round_up(float(epsilon)))
