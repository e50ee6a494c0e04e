"""What is guaranteed: a section of a report, in words and symbols, by view, against attackers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.privacy.guarantee import (
    OUTSIDER,
    SERVER_SEES,
    Guarantee,
    describe_noise,
    is_local,
    reasons,
    round_up,
    view_of,
)
from coterie.privacy.selection import (
    CHOSEN_ONLY,
    FOR_OTHERS,
    THEOREM,
    charged_statement,
    chosen_alone,
)
from coterie.report.attack import show_attack, show_limits
from coterie.report.elements import Html, element, join, table
from coterie.report.finished import FinishedRun
from coterie.report.groups import named

_STATED = 4
"""Private guarantees stated in full on a page; all others are in a table."""
_NOT_COVERED = (
    "Metrics, and any choice made by looking at them (settings, rounds, which run to keep), are "
    "not covered by epsilon. "
)
_KEEP = "This page shows clients' own errors: keep it as you keep the data."
_LEFT_OUT = (
    "This page leaves out clients' names and whatever is one client's own; its means over clients "
    "are still made of their rows."
)
_NO_METRICS = (
    "This page shows nothing of single clients: scores stayed at the sites. Choices made by "
    "looking at them there are not covered by epsilon."
)
_VIEWS = {
    "other_clients": "the other clients, even all together",
    "server": "the server",
    "server_secure_aggregation": "the server, under secure aggregation",
    "released": "an outsider who is given the shared model",
}
_SERVERS = ("server", "server_secure_aggregation")
_RELEASED = (
    "the shared model is made of posts alone, and a client's own model is not in it; a client who "
    "is given it is one of the other clients"
)
_SAMPLED = {"everyone": "every client in every round", "poisson": "Poisson", "fixed": "fixed size"}
_COMPARED = {
    "zero_out": "zero_out: the client's contributions against zero",
    "replace": "replace: the client against any other client",
}

Stated = tuple[Guarantee, float | None, tuple[str, ...], float | None]


def show_guarantees(runs: Sequence[FinishedRun], *, clients: bool = True) -> Html:
    """State every guarantee once, with the runs that share it."""
    by_guarantee: dict[Stated, list[FinishedRun]] = {}
    for run in sorted(runs, key=lambda run: (not run.private, not run.shares)):
        chosen = chosen_alone(run.guarantee, run.selection)
        stated = (run.guarantee, run.result.get("clip"), run.caveats, chosen)
        by_guarantee.setdefault(stated, []).append(run)
    parts: list[str] = [element("h2", "What is guaranteed", id="guarantee")]
    further: list[list[str]] = []
    for number, (stated, shared) in enumerate(by_guarantee.items()):
        if shared[0].private and number >= _STATED:
            further.append(_in_short(stated[0], shared[0], named(shared, runs)))
            continue
        parts.append(element("h3", named(shared, runs)))
        parts += _one(stated, shared[0], f"guarantee-{number + 1}")
    if further:
        head = ["runs", "epsilon", "against", "delta", "relation", "rounds", "sampling"]
        head.append("accountant")
        parts += [element("h3", "Further guarantees, in short"), table(head, further)]
    told = _NOT_COVERED + (_KEEP if clients else _LEFT_OUT)
    if not any(run.is_scored for run in runs):
        told = _NO_METRICS
    parts.append(element("p", told, class_="note"))
    return element("section", *parts)


def _one(stated: Stated, run: FinishedRun, key: str) -> list[str]:
    guarantee, clip, caveats, chosen = stated
    parts: list[str] = []
    if not run.shares:
        parts.append(element("p", "Nothing is released: epsilon is 0."))
    elif not run.private:
        why = ": contributions are released without noise. Whoever sees them may learn all."
        why = why if guarantee.claimed_epsilon is None else f". {guarantee.statement()}"
        parts.append(element("p", element("span", "NOT PRIVATE", class_="bad"), why))
    else:
        parts.append(_words(run, clip))
    parts += [element("p", element("strong", caveat)) for caveat in caveats]
    if run.private and chosen is not None:
        parts += [_chosen_views(guarantee, chosen), show_limits(chosen, guarantee.delta)]
    elif run.private:
        parts += [_views(guarantee, run.deployment), show_attack(guarantee, key)]
    return parts


def _stated(run: FinishedRun) -> str:
    """Return the words of a guarantee; of a deployment, with what its coordinator does see."""
    said = charged_statement(run.guarantee, run.selection)
    if not run.deployment:
        return said
    bounded = math.isfinite(float(run.deployment.get("epsilon_coordinator", math.inf)))
    sees = f"the coordinator, which sees {run.deployment.get('coordinator_sees')}; "
    return said.replace(SERVER_SEES, "" if bounded else sees)


def _words(run: FinishedRun, clip: float | None) -> Html:
    guarantee = run.guarantee
    said = [_line(line) for line in _stated(run).splitlines()]
    epsilon = guarantee.epsilon if run.selection is None else run.epsilon
    bound = "C" if clip is None else f"C = {clip:.4g}"
    symbols = Html(
        "Pr[<i>M</i>(<i>D</i>) &isin; <i>S</i>] &le; e<sup>&epsilon;</sup> "
        "Pr[<i>M</i>(<i>D</i>&prime;) &isin; <i>S</i>] + &delta; for every set <i>S</i>, "
        f"&epsilon; = {round_up(epsilon)}, &delta; = {guarantee.delta:.3g}"
    )
    others = guarantee.views["other_clients"]
    jointly = "the same bound" if others == guarantee.epsilon else f"epsilon = {round_up(others)}"
    released = "messages" if is_local(guarantee) else "posts"
    parts = any(getattr(event, "replaced", 2.0) != 2.0 for event in guarantee.events)
    # Only blocks move by less than twice their bounds; which bounds these are is the method's.
    clipped = (
        "each part of it clipped to a bound of its own" if parts else f"each clipped to {bound}"
    )
    meaning = (
        f"M is the {released} of all {len(guarantee.events)} rounds together; D and D\u2032 differ "
        f"in one client by {guarantee.relation}. A post adds up what clients contribute, "
        f"{clipped}, plus {describe_noise(guarantee.events)}. "
    )
    meaning += (
        "The run is the best of several by private scores, and M is the choice with its posts."
        if run.selection is not None
        else "The other clients' models are functions of the posts and of their own data, and obey "
        f"{jointly} jointly."
    )
    return element(
        "div",
        *said,
        element("p", "In symbols", class_="label"),
        element("p", symbols, class_="symbols"),
        element("p", meaning, class_="note"),
        element("p", "In short", class_="label"),
        _facts(run),
        class_="card",
    )


def _line(line: str) -> Html:
    """Write a sentence, and what it is about in bold."""
    about, colon, told = line.partition(":")
    if not colon or len(about) > 20:
        return element("p", line)
    return element("p", element("strong", f"{about}:"), told)


def _facts(run: FinishedRun) -> Html:
    """Return what a reviewer asks for, one by one."""
    guarantee = run.guarantee
    used = ", ".join(f"{name} {told}" for name, told in run.versions.items())
    rows = [
        ["unit", "one client: its whole data and its whole state"],
        ["relation", _COMPARED[guarantee.relation]],
        ["view", view_of(guarantee) if run.selection is None else run.view],
        ["sampling", _sampling(guarantee)],
        ["rounds", str(len(guarantee.events))],
        ["epsilon", round_up(guarantee.epsilon if run.selection is None else run.epsilon)],
        ["delta", f"{guarantee.delta:.3g}"],
        ["accountant", guarantee.profile.accountant if run.selection is None else THEOREM],
        ["versions", used or "not recorded"],
    ]
    return table(["what", "here"], rows, class_="facts short")


def _sampling(guarantee: Guarantee) -> str:
    who = guarantee.participation
    if who.rate == 1:
        return _SAMPLED["everyone"]
    seen = ", seen by all" if who.visible or is_local(guarantee) else ", hidden"
    if view_of(guarantee) == OUTSIDER:
        seen = ", hidden from outsiders; all other clients together know it exactly"
    return f"{_SAMPLED[who.kind]}, a share of {who.rate:.4g} of clients in a round{seen}"


def _views(guarantee: Guarantee, deployment: Mapping[str, Any]) -> Html:
    """Return epsilon by who looks, and why; of a deployment, by who does look."""
    views = dict(guarantee.views)
    away = set(_SERVERS) - {deployment.get("coordinator_view")} if deployment else set()
    # Posts are all that a shared model is made of: it is seen as an outsider sees the posts.
    views["released"] = views.get("outsider", guarantee.epsilon)
    why = {**reasons(guarantee), "released": _RELEASED}
    labels = dict(_VIEWS)
    if deployment:
        view = deployment.get("coordinator_view")
        labels |= {str(view): "the coordinator"}
        why |= {str(view): f"it sees {deployment.get('coordinator_sees')}"}
    rows = []
    for view, told in labels.items():
        if view in away:
            continue
        epsilon: str = round_up(views[view])
        if epsilon == "inf":
            epsilon = element("span", "no bound (inf)", class_="bad")
        rows.append([told, epsilon, why.get(view, "")])
    head = ["against", "epsilon", "why"]
    label = element("p", "Epsilon by who looks", class_="label")
    return join(label, table(head, rows, class_="facts cards"))


def _chosen_views(guarantee: Guarantee, epsilon: float) -> Html:
    """Return epsilon of a run that was chosen, by who looks; for other clients it is not known."""
    before = round_up(guarantee.epsilon)
    bare = element("span", "no bound (inf)", class_="bad")
    rows: list[list[str]] = [
        [CHOSEN_ONLY, round_up(epsilon), f"{THEOREM}; of the shared model alone, no more"],
        [_VIEWS["other_clients"], f"not told here, above {before}", FOR_OTHERS],
        [_VIEWS["server"], bare, reasons(guarantee).get("server", "")],
    ]
    label = element("p", "Epsilon by who looks", class_="label")
    return join(label, table(["against", "epsilon", "why"], rows, class_="facts cards"))


def _in_short(guarantee: Guarantee, run: FinishedRun, labels: str) -> list[str]:
    return [
        labels,
        round_up(run.epsilon),
        run.view,
        f"{guarantee.delta:.3g}",
        guarantee.relation,
        str(len(guarantee.events)),
        _sampling(guarantee),
        guarantee.profile.accountant if run.selection is None else THEOREM,
    ]
