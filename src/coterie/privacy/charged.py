"""What a run says of itself that was chosen among private runs (`coterie.privacy.selection`).

Its posts are the best of several, so the epsilon of its own events is true of nobody who sees it:
whoever sees it alone has that of Theorem 2 (Papernot and Steinke 2022), which does not depend on
how many runs there were and may be told to all; the other clients, who took part in all runs, have
that of all of them, which `selection.json` states and whoever is told the first must not see.

Every run of a selection carries the same `Charged`, since any of them may be the one that is kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from coterie.privacy.accounting import Guarantee
from coterie.privacy.events import Gaussian, list_runs, read_runs
from coterie.privacy.selection import RunLaw, Selection
from coterie.privacy.words import round_up

THEOREM = "RDP bound (Papernot and Steinke 2022, Theorem 2)"
ALONE = "whoever sees the chosen run alone"
OTHERS = (
    "the other clients took part in all runs: their number is in selection.json, and larger than "
    "that of these posts"
)
BEFORE = "nobody: of these posts before the choice, see selection"
"""Whose view the epsilon of a chosen run's own events is."""

Runs = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Charged:
    """How a run came to be chosen, as far as everybody may know; nothing of it tells K.

    Attributes:
        runs: Mean of the number of runs.
        eta: Shape of its law.
        score_noise: Noise multiplier of a score.
        score_replaced: How much further replacing a client moves a score than zeroing it.
        candidates: What a run may post, by settings that differ in it: for equal neighbouring
            events their noise multiplier, `replaced`, and how many they are.
    """

    runs: float
    eta: float
    score_noise: float
    score_replaced: float
    candidates: Runs

    @classmethod
    def of(cls, selection: Selection) -> "Charged":
        """Take it from a selection."""
        score = selection.score
        kinds = dict.fromkeys(selection.candidates)
        return cls(
            runs=selection.law.mean,
            eta=selection.law.eta,
            score_noise=score.noise_multiplier,
            score_replaced=score.replaced,
            candidates=tuple(_triples(events) for events in kinds),
        )

    def selection(self, run: Guarantee) -> Selection:
        """Rebuild the selection that a run was chosen in; its epsilon is computed anew.

        Raises:
            ValueError: If the run's own events were not on offer.

        **Guarantee:** as `Selection.chosen_alone`, if the run was made by `coterie.tune.charge`;
        `tests/test_charged.py`.
        """
        offered = tuple(_events(triples) for triples in self.candidates)
        if run.events not in offered:
            raise ValueError(
                f"a run of {len(run.events)} posts was chosen among {len(offered)} kinds of "
                "runs, and is none of them: restore its plan.toml and guarantee.json"
            )
        return Selection(
            candidates=offered,
            score=Gaussian(self.score_noise, self.score_replaced),
            law=RunLaw(self.runs, self.eta),
            participation=run.participation,
            relation=run.relation,
            delta=run.delta,
            clients=run.clients,
            simulation=run.simulation,
        )

    def to_json(self, run: Guarantee) -> dict[str, Any]:
        """Return what a run's certificate says of the choice: the number and what it follows from."""
        made = self.selection(run)
        return {
            "epsilon_chosen_alone": made.chosen_alone,
            "delta": run.delta,
            "theorem": THEOREM,
            "view": ALONE,
            "other_clients": OTHERS,
            "runs_mean": self.runs,
            "eta": self.eta,
            "score_event": list_runs([made.score])[0],
            "candidates": [list_runs(events) for events in made.candidates],
        }

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> "Charged":
        """Read what `to_json` wrote; the number is not believed."""
        (score,) = read_runs([stated["score_event"]])
        if not isinstance(score, Gaussian):
            raise ValueError(f"score_event = {stated['score_event']!r}: expected a Gaussian event")
        return cls(
            runs=float(stated["runs_mean"]),
            eta=float(stated["eta"]),
            score_noise=score.noise_multiplier,
            score_replaced=score.replaced,
            candidates=tuple(_triples(read_runs(events)) for events in stated["candidates"]),
        )


def chosen_alone(run: Guarantee, stated: Mapping[str, Any] | None) -> float | None:
    """Return epsilon for whoever sees a run alone that was chosen; None for one that was not.

    Args:
        run: The guarantee of the run's own events.
        stated: The field `selection` of its certificate, if it has one.
    """
    return None if stated is None else Charged.from_json(stated).selection(run).chosen_alone


def statement(run: Guarantee, stated: Mapping[str, Any] | None) -> str:
    """State what a run guarantees in plain words, to whoever sees it alone if it was chosen."""
    epsilon = chosen_alone(run, stated)
    if epsilon is None:
        return run.statement()
    return "\n".join(_reworded(line, run, epsilon) for line in run.statement().splitlines())


def _reworded(line: str, run: Guarantee, epsilon: float) -> str:
    """Word anew what is another for a run that was chosen."""
    if line.startswith("epsilon = "):
        factor = round_up(math.exp(epsilon), 3) if epsilon < 700 else "any number of"
        _, _, than = line.partition(" times as ")
        return (
            f"epsilon = {round_up(epsilon)} at delta = {run.delta:.3g}, over {len(run.events)} "
            f"rounds, for {ALONE} of several that were scored privately: whatever they look for "
            f"is at most {factor} times as {than}"
        )
    if line.startswith("Seen by: "):
        before = round_up(run.for_others.epsilon)
        return (
            "Seen by: whoever is handed this run, and neither another one, nor selection.json, nor "
            f"how many there were. For others it does not hold: {OTHERS} (epsilon = {before}, "
            "before the choice)."
        )
    if line.startswith("Accountant: "):
        return f"Accountant: {THEOREM}; of the posts before the choice: {run.profile.accountant}."
    return line


def told(epsilon: float, delta: float) -> str:
    """Say of a run that was chosen what that cost."""
    return (
        "CHARGED: settings were chosen among private runs by private scores: epsilon = "
        f"{round_up(epsilon)} at delta = {delta:.3g} for {ALONE}, {THEOREM}; {OTHERS}"
    )


def _triples(events: Any) -> tuple[tuple[float, ...], ...]:
    found = []
    for event, alike in groupby(events):
        if not isinstance(event, Gaussian):
            raise ValueError(f"{type(event).__name__} noise: runs are chosen under Gaussian noise")
        found.append((event.noise_multiplier, event.replaced, float(len(list(alike)))))
    return tuple(found)


def _events(triples: tuple[tuple[float, ...], ...]) -> tuple[Gaussian, ...]:
    for triple in triples:
        if len(triple) != 3 or not 1 <= triple[2] <= 1e7 or triple[2] % 1:
            raise ValueError(
                f"candidates: {triple} was given; expected noise, replaced and how many rounds"
            )
    return tuple(Gaussian(z, far) for z, far, times in triples for _ in range(int(times)))
