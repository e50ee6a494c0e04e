"""What a comparison with real noise has spent: every cell that has charged anything counts.

A cell that failed after its first post has told what it told, whatever became of it: it is counted
with all that its plan allows, as it may go on. So is a selection that was cut short, by the runs
that were drawn before the first of them. Where neither can be read any more, no bound is stated.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.evaluation.holdout import hold_out
from coterie.privacy.accounting import Guarantee
from coterie.privacy.ledger import events_digest
from coterie.privacy.selection import Selection
from coterie.privacy.words import add_up, round_up, spent_together
from coterie.run_plan import load_plan


@dataclass(frozen=True)
class Spent:
    """What cells have spent.

    Attributes:
        guarantees: Of cells with a budget that have posted; a selection's is of all its runs.
        unfinished: Cells that have posted and are not done; they are counted in whole.
        uncounted: Cells that have posted and cannot be counted, and why.
    """

    guarantees: tuple[Guarantee, ...] = ()
    unfinished: tuple[Path, ...] = ()
    uncounted: tuple[tuple[Path, str], ...] = ()

    @property
    def together(self) -> tuple[float, float] | None:
        """Epsilon and delta for other clients who see all posts; None where there is no bound."""
        return add_up(self.guarantees) if self.guarantees and not self.uncounted else None

    def told(self) -> str:
        """Say it in a sentence or two."""
        if self.uncounted:
            why = "; ".join(f"{place}: {reason}" for place, reason in self.uncounted)
            told = f"NO BOUND of what was spent: cells have posted that cannot be counted ({why})"
            if not self.guarantees:
                return f"{told}."
            epsilon, delta = add_up(self.guarantees)
            return f"{told}; the others: epsilon = {round_up(epsilon)} at delta = {delta:.3g}."
        if not self.guarantees:
            return "Nothing with a budget was posted."
        told = spent_together(self.guarantees)
        if self.unfinished:
            named = ", ".join(map(str, self.unfinished))
            told += f" Counted in whole, though not done: {named}."
        return told


def spent_by(places: Sequence[Path]) -> Spent:
    """Read what cells have spent, whether they are done or not; those without a budget apart."""
    found: list[Guarantee] = []
    unfinished: list[Path] = []
    uncounted: list[tuple[Path, str]] = []
    for place in places:
        if not has_charged(place):
            continue
        try:
            stated, done = _stated(place)
        except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
            uncounted.append((place, str(error) or type(error).__name__))
            continue
        if stated.events and stated.epsilon < math.inf:
            found.append(stated)
            unfinished += [] if done else [place]
    return Spent(tuple(found), tuple(unfinished), tuple(uncounted))


def has_charged(place: Path) -> bool:
    """Return whether a cell, or a run of its selection, has paid for a post."""
    ledgers = [place / "ledger.jsonl", place / "scores" / "ledger.jsonl"]
    ledgers += sorted(place.glob("runs/*/ledger.jsonl"))
    return any(b'"charge"' in path.read_bytes() for path in ledgers if path.exists())


def _stated(place: Path) -> tuple[Guarantee, bool]:
    """Return what a cell has spent or may still spend, and whether it is done."""
    if (place / "selection.json").exists() or (place / "scores").exists():
        record = json.loads((place / "selection.json").read_text(encoding="utf-8"))
        drawn = [int(number) for number in record["guarantee"]["drawn"]]
        return Selection.from_json(record["guarantee"]).of_runs(drawn), bool(record["finished"])
    with (place / "ledger.jsonl").open(encoding="utf-8") as lines:
        header = json.loads(lines.readline())
    if (place / "result.json").exists():
        text = (place / "guarantee.json").read_text(encoding="utf-8")
        return Guarantee.from_json(json.loads(text)), True
    planned = _planned(place)
    if events_digest(planned.events) != header["events"]:
        raise ValueError("its ledger paid for other posts than plan and rows now come to")
    return planned, False


def _planned(place: Path) -> Guarantee:
    run_plan = load_plan(place / "plan.toml")
    train, _ = run_plan.data.split()
    if run_plan.newcomers is not None:
        train, _ = hold_out(train, run_plan.newcomers, run_plan.data.split_seed)
    return run_plan.plan().guarantee(train.spec.clients)
