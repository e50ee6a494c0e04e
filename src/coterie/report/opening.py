"""How a report begins: a plain answer, what epsilon means, and what must be known first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from coterie.privacy.guarantee import COMPARED, round_up
from coterie.privacy.selection import FOR_OTHERS
from coterie.report.elements import DASH, Html, element, join, percent, short
from coterie.report.finished import FinishedRun
from coterie.report.groups import Group, are_grouped, named, rows_of
from coterie.report.results import SIMULATION

_VALUES = {"nmse": "test error", "accuracy": "test accuracy"}
_STRENGTHS = ((1.0, "a strong promise"), (4.0, "a fair promise"), (10.0, "a weak promise"))


def title_of(runs: Sequence[FinishedRun]) -> str:
    """Say what the runs are of."""
    names = dict.fromkeys(
        f"{Path(run.result['data']).name}, {run.result['clients']} clients" for run in runs
    )
    return "; ".join(names) + ", one model each"


def show_opening(runs: Sequence[FinishedRun], places: Mapping[str, str]) -> Html:
    """Answer first, with the best of the private runs; then name the sections, and link to them."""
    best, several = _best(runs)
    run = best.first
    parts: list[str] = [element("h1", title_of(runs))]
    parts.append(element("p", f"{_answer(best)}.", class_="answer"))
    if several > 1 and run.is_scored:
        kind = "private " if run.private else ""
        of = "groups of runs" if are_grouped(runs) else "runs"
        told = f"This is {best.label}, the best of {several} {kind}{of} by these same metrics."
        parts.append(element("p", told, class_="note"))
    parts += [element("p", told, class_="note") for told in _by_epsilon(runs)]
    parts.append(_tiles(best))
    if run.private:
        parts.append(element("p", _meaning(run), class_="means"))
    parts += [element("p", told) for told in _foretold(runs)]
    if any(run.result["simulation"] for run in runs):
        parts.append(element("p", element("span", SIMULATION, class_="badge")))
    bare = named([run for run in runs if run.shares and not run.private], runs)
    if bare:
        parts.append(element("p", element("span", "NOT PRIVATE", class_="bad"), f": {bare}"))
    links = (element("a", told, href=f"#{place}") for told, place in places.items())
    parts.append(element("nav", *links, aria_label="parts of this page"))
    return element("header", *parts)


def _best(runs: Sequence[FinishedRun]) -> tuple[Group, int]:
    """Choose what to speak of, and say of how many it is the best."""
    groups = rows_of(runs)
    groups = [one for one in groups if one.first.is_scored] or groups
    private = [one for one in groups if one.first.private]
    several = private or [one for one in groups if one.first.shares] or groups
    return min(several, key=lambda one: one.badness), len(several)


def _by_epsilon(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Name the best of every epsilon, where there are several of one metric."""
    found: dict[str, list[Group]] = {}
    for one in rows_of(runs):
        if one.first.private and one.first.is_scored:
            found.setdefault(round_up(one.first.epsilon), []).append(one)
    if len(found) < 2 or len({run.scored for run in runs}) > 1:
        return
    told = []
    for epsilon in sorted(found, key=float):
        best = min(found[epsilon], key=lambda one: one.badness)
        told.append(f"{epsilon}: {best.first.name} {short(best.mean('value'))}")
    yield f"The best at each epsilon: {'; '.join(told)}."


def _deployed(run: FinishedRun) -> str:
    """Answer for a run whose scores stayed at its sites."""
    told, clients = run.deployment, run.guarantee.clients
    sites = "1 site" if told.get("sites") == 1 else f"{told.get('sites')} sites"
    lead = "without any privacy" if run.shares else "without sharing anything"
    lead = f"at epsilon {round_up(run.epsilon)}" if run.private else lead
    return (
        f"Deployed over {sites}: {run.name} made a model for each of {clients} clients {lead}; "
        "models and their scores stayed at the sites"
    )


def _answer(best: Group) -> str:
    run, result = best.first, best.first.result
    if not run.is_scored:
        return _deployed(run)
    lead = "Without any privacy" if run.shares else "Without sharing anything"
    if run.private:
        lead = f"At epsilon {round_up(run.epsilon)}"
        lead += "" if run.selection is None else f" for {run.view}"
    what = _VALUES.get(result["metric"], f"test {result['metric']}")
    text = f"{lead}, {best.first.name}'s {what} is {short(best.mean('value'))}"
    alone, share = best.mean("local_value"), best.mean("share_better_than_local")
    if run.shares and not math.isnan(alone):
        text += f" against {short(alone)} alone"
    if run.shares and not math.isnan(share):
        text += f"; {percent(share)} of clients are better off than alone{_ties(best, share)}"
    return text


def _ties(best: Group, share: float) -> str:
    """Say how many are worse off where not all others are: with few test rows, many are equal."""
    worse = float(np.mean([run.share_worse_than_alone for run in best.runs]))
    if math.isnan(worse) or share + worse > 0.995:
        return ""
    return f", {percent(worse)} worse, the rest equal"


def _tiles(best: Group) -> Html:
    """Return the few numbers that a person remembers."""
    run = best.first
    share, alone = best.mean("share_better_than_local"), best.mean("local_value")
    what = _VALUES.get(run.result["metric"], f"test {run.result['metric']}")
    clients = run.guarantee.clients if run.deployment else run.result["clients"]
    way = "smaller" if run.result["metric"] == "nmse" else "larger"
    spent = round_up(run.epsilon) if run.private else "0" if not run.shares else "\u221e"
    against = "" if math.isnan(alone) or not run.shares else f"; alone {short(alone)}"
    against_whom = f" against {run.view}" if run.private else ""
    tiles = [
        (spent, f"epsilon at delta {run.guarantee.delta:.3g}: what a client risks{against_whom}"),
    ]
    if run.is_scored:
        tiles.append((short(best.mean("value")), f"{what}{against} ({way} is better)"))
    if run.deployment:
        tiles.append((str(run.deployment.get("sites")), "sites that keep their clients' models"))
    if run.shares and run.is_scored:
        gained = DASH if math.isnan(share) else percent(share)
        tiles.append((gained, "of clients are better off joined than on their own"))
    if run.shares:
        told = f"rounds with {clients} clients"
        tiles.append((str(run.result["rounds"]), told))
    parts = (
        element("div", element("strong", number), element("span", told), class_="tile")
        for number, told in tiles
    )
    return element("div", *parts, class_="tiles")


def _meaning(run: FinishedRun) -> Html:
    """Say what epsilon means in a sentence or two."""
    epsilon = run.epsilon
    strength = next((told for most, told in _STRENGTHS if epsilon <= most + 1e-9), "")
    factor = round_up(math.exp(epsilon), 3) if epsilon < 30 else "an astronomic number of"
    alone = run.selection is not None
    who = "somebody sees who is handed this run alone" if alone else "the other clients see"
    told = (
        f"whatever {who}, and whatever they conclude about a client, is at most {factor} times as "
        f"probable with its data as {COMPARED[run.guarantee.relation]}"
    )
    delta = run.guarantee.delta
    told += f", but for a probability of {delta:.3g}. " if delta else ". "
    told += f"That is {strength}." if strength else "At this size the promise is next to nothing."
    if alone:
        told += f" Not for all: {FOR_OTHERS}."
    if run.guarantee.simulation:
        told += " It is one of runs with secret noise: the noise of a simulation is known."
    return join(element("strong", "What epsilon means: "), told)


def _foretold(runs: Sequence[FinishedRun]) -> list[str]:
    """Return each verdict and each choice of a method once, with the runs that they are of."""
    said: dict[str, list[FinishedRun]] = {}
    for run in runs:
        for sentence in run.foretold:
            said.setdefault(sentence, []).append(run)
    if len(runs) == 1:
        return list(said)
    return [f"{named(of, runs)}: {sentence}" for sentence, of in said.items()]
