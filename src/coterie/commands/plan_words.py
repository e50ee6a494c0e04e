"""What `coterie plan` prints: the verdict first, then noise, epsilon by view, what would help."""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.advice import FAR, FEW_NUMBERS, MEAN_SHARE, Advice
from coterie.commands.sketch import sketch
from coterie.plan_curves import Points, epsilon_by_rounds, error_by_clients
from coterie.planning import (
    HEAVY,
    MOST_ROUNDS,
    Outline,
    Outlook,
    judge_error,
    most_looked_for,
)
from coterie.privacy.guarantee import OUTSIDER, RELATIONS, UNIT, round_up

NOTHING = "no verdict: nothing is spent on noise (epsilon = inf), so there is nothing to weigh"
_HEADS = ("epsilon", "verdict", "rounds", "most numbers", "clients for a small gain", "to join")
_SCALE = "below 1 learn alone, from 1 small gain, from 4 join"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found out about a plan; `words` alone where there is no verdict."""

    advice: Advice | None = None
    table: Sequence[Advice] = ()
    about: dict[str, Any] = field(default_factory=dict)
    outline: Outline | None = None
    outlook: Outlook | None = None
    limit: float | None = None
    full: bool = True
    words: str = ""
    usual: bool = False

    def error_under_pfeb(self) -> float | None:
        """Return the noise of a posted mean under the usual method; None if another was asked for.

        Its contributions have more parts than the mean, and these share the budget.
        """
        if not self.usual or self.outlook is None or self.advice is None or self.limit is not None:
            return None
        advice = self.advice
        if advice.numbers <= FEW_NUMBERS and advice.clients * advice.mu >= FAR:
            return None  # curvatures are posted too, and shares are others
        return self.outlook.error / math.sqrt(MEAN_SHARE)

    def left_out(self) -> list[str]:
        """Name what would take longer than the answer itself."""
        grid = 0 if self.full or self.outlook is None else self.outlook.grid
        heavy = ["within.rounds", "within.epsilon", "by_epsilon"] if grid > HEAVY else []
        return [*heavy, *(["epsilon_by_rounds"] if grid > HEAVY // 3 else [])]

    def curves(self) -> tuple[Points, Points]:
        """Return epsilon by rounds, and the error of a posted mean by clients; empty if unknown."""
        if self.outline is None or self.outlook is None:
            return (), ()
        z, slow = self.outlook.noise_multiplier, "epsilon_by_rounds" in self.left_out()
        by_rounds = () if slow else epsilon_by_rounds(self.outline, z)
        return by_rounds, error_by_clients(self.outline, z)


def tell(found: Found, *, as_json: bool, sketched: bool) -> str:
    """Say it to a machine or to a person."""
    if as_json:
        return json.dumps(_to_json(found), indent=2, allow_nan=False)
    if found.advice is None:
        return f"{found.words}."
    return "\n".join(_lines(found, found.advice, sketched=sketched))


def _lines(found: Found, advice: Advice, *, sketched: bool) -> list[str]:
    lines = [f"{advice.verdict}: {advice.words}."]
    if found.about:
        about = found.about
        lines += [f"{about['data'] or 'as planned'}: {about['chosen'] or about['method']}."]
    lines += ["", *_aligned(_facts(found, advice))]
    if advice.remedies:
        lines += ["", "what would help", *(f"  {remedy}" for remedy in advice.remedies)]
    if found.outlook is not None:
        lines += ["", *_allowed(found.outlook, advice.epsilon)]
    if sketched:
        lines += _sketches(found)
    if found.left_out():
        lines += ["", f"left out, to answer at once: {', '.join(found.left_out())}; add --full"]
    if found.table:
        lines += ["", *lined([_HEADS, *(tuple(_row(one).values()) for one in found.table)])]
    return lines


def _facts(found: Found, advice: Advice) -> list[tuple[str, str]]:
    facts = [
        ("rounds", f"{advice.rounds:,}"),
        ("clip", f"{advice.clip:.4g}"),
        ("shared weights", f"{advice.numbers:,} (at most {advice.most_numbers:,})"),
        ("worth", f"{advice.worth:.3g} ({_SCALE})"),
        ("protected", _protected(advice.relation)),
    ]
    if found.outlook is None:
        return facts
    outlook = found.outlook
    return [
        *facts,
        (
            "noise multiplier",
            _noise(outlook, local=found.outline is not None and found.outline.local),
        ),
        ("noise in a mean", _error(outlook)),
        *_usual_error(found.error_under_pfeb()),
        *_views(outlook),
        *_within_limit(outlook, found.limit),
    ]


def _protected(relation: str) -> str:
    """Say whose privacy an epsilon is of, and what runs it compares."""
    return f"{UNIT}; compared are runs in which {RELATIONS[relation]} ({relation})"


def _noise(outlook: Outlook, *, local: bool) -> str:
    """Return the noise multiplier, and what it is of."""
    z, summed = outlook.noise_multiplier, outlook.over_clip * outlook.cohort
    if local:
        told = f"noise of one client's message over the clip; of a sum of {outlook.cohort:,.4g}: "
        return f"{z:.4g} ({told}{summed:.4g})"
    if math.isclose(z, summed, rel_tol=1e-3):
        return f"{z:.4g} (noise of a sum over the clip)"
    return f"{z:.4g} (noise of a sum over the clip: {summed:.4g}, as its parts share the budget)"


def _error(outlook: Outlook) -> str:
    return (
        f"{outlook.per_number:.3g} in each number; {outlook.error:.3g} of the clip over all: "
        f"{outlook.verdict}"
    )


def _usual_error(error: float | None) -> list[tuple[str, str]]:
    if error is None:
        return []
    told = f"{error:.3g} of the clip under pfeb, the usual method, which posts more than a mean"
    return [("", f"{told}: {judge_error(error)}")]


def _views(outlook: Outlook) -> list[tuple[str, str]]:
    """Return epsilon by who looks, each on a line."""
    views = outlook.views
    names = {
        "other_clients": "other clients",
        "server": "the server",
        "server_secure_aggregation": "the server, under secure aggregation",
        "released_shared_model": "an outsider who gets a released shared model, made of posts",
    }
    values = {name: round_up(views[name]) for name in names}
    lines = [f"{value} for {names[name]}" for name, value in values.items()]
    if values["server"] == "inf":
        lines[1:3] = ["inf for the server, which adds the noise: it is trusted, also with sums"]
    lines[0] += f" (delta {outlook.delta:.3g}, {outlook.relation}, unit: one client)"
    if outlook.view == OUTSIDER:
        lines.append(f"other epsilons here are of {OUTSIDER}")
    return [("epsilon" if turn == 0 else "", line) for turn, line in enumerate(lines)]


def _within_limit(outlook: Outlook, limit: float | None) -> list[tuple[str, str]]:
    if limit is None or outlook.rounds_at_noise is None:
        return []
    most, kept = outlook.rounds_at_noise, outlook.epsilon <= limit * (1 + 1e-9)
    told = f"{_many(most, outlook.rounds)} within epsilon {limit:g} at this noise"
    return [("rounds at most", told if kept else f"{told}: {outlook.rounds:,} are too many")]


def _allowed(outlook: Outlook, epsilon: float | None) -> list[str]:
    """Say what keeps the noise within the limit."""
    at = "at this noise" if epsilon is None else f"at epsilon {epsilon:g}"
    one = outlook.within
    rows = [
        ("rounds", "" if one.rounds is None else _most(_many(one.rounds, outlook.rounds))),
        ("clients", "" if one.clients is None else f"at least {one.clients:,}"),
        ("epsilon", "" if one.epsilon is None else f"at least {round_up(one.epsilon, 3)}"),
        ("shared weights", _most(f"{one.numbers:,}")),
    ]
    kept = [(name, value) for name, value in rows if value]
    return [
        f"for noise of at most {one.error:g} of the clip, {at}, one of these",
        *(f"  {line}" for line in _aligned(kept)),
    ]


def _most(count: str) -> str:
    return "none is few enough" if count == "0" else f"at most {count}"


def _many(rounds: int, planned: int) -> str:
    if rounds >= most_looked_for(planned) and rounds < MOST_ROUNDS:
        return f"{rounds:,} or more"
    return f"{rounds:,}"


def _sketches(found: Found) -> list[str]:
    """Draw two small plots, where the terminal has room for them."""
    width, plain = shutil.get_terminal_size().columns, not _has_blocks()
    outside = found.outlook is not None and found.outlook.view == OUTSIDER
    spent = "epsilon of an outsider" if outside else "epsilon"
    by_rounds, by_clients = found.curves()
    lines = []
    for points, title in (
        (by_rounds, f"{spent} against rounds, at this noise"),
        (by_clients, "noise of a mean over the clip against clients, at this noise"),
    ):
        drawn = sketch(points, title, width=width, height=3, plain=plain)
        lines += ["", *drawn] if drawn else []
    return lines


def _has_blocks() -> bool:
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _to_json(found: Found) -> dict[str, Any]:
    if found.advice is None:
        return found.about | {"verdict": None, "words": found.words}
    told = found.about | found.advice.to_json() | {"by_epsilon": [_row(one) for one in found.table]}
    if found.outline is None or found.outlook is None:
        return told
    outlook, sampler = found.outlook.to_json(), found.outline.sampler
    by_rounds, by_clients = found.curves()
    error = {
        "per_number": outlook["per_number"],
        "over_clip": outlook["over_clip"],
        "relative": outlook["error"],
        "relative_under_pfeb": found.error_under_pfeb(),
        "verdict": outlook["verdict"],
    }
    same = ("noise_multiplier", "accountant", "cohort", "rounds_at_noise", "within", "statement")
    return told | {
        **{key: outlook[key] for key in same},
        "epsilon_spent": outlook["epsilon"],
        "epsilon_limit": found.limit,
        "epsilon_by_view": outlook["views"],
        "view": outlook["view"],
        "unit": outlook["unit"],
        "reasons": outlook["reasons"],
        "sampling": sampler.kind,
        "cohort_visible": found.outline.participation.visible,
        "error": error,
        "epsilon_by_rounds": [list(point) for point in by_rounds],
        "left_out": found.left_out(),
        "error_by_clients": [list(point) for point in by_clients],
    }


def _row(advice: Advice) -> dict[str, Any]:
    return {
        "epsilon": advice.epsilon,
        "verdict": advice.verdict,
        "rounds": advice.rounds,
        "most_numbers": advice.most_numbers,
        "clients_for_small_gain": advice.needs["small gain"]["clients"],
        "clients_to_join": advice.needs["join"]["clients"],
    }


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def lined(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Set a table, columns to the right."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def _shown(cell: float | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:g}"
