"""What an attacker can do against a guarantee, and what was spent by each round."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from coterie.privacy.accounting import epsilon_by_round
from coterie.privacy.guarantee import Guarantee, gdp_approximation, is_local, round_up
from coterie.report import figures
from coterie.report.charts import Figure
from coterie.report.elements import (
    Array,
    Html,
    can_draw,
    element,
    join,
    numbers,
    percent,
    side_by_side,
    table,
)

_MARKS = 12
_ALARMS = (0.01, 0.1)
_TITLE = "f-DP trade-off: no attack by other clients gets below the curve"
_QUESTIONS = {
    "zero_out": "whether what one given client contributed was made from its data, or was zero",
    "replace": "whether what one given client contributed was made from its data, or another's",
}


def show_attack(guarantee: Guarantee, key: str) -> Html:
    """Show what other clients can do at best as attackers, and epsilon by round, in their view."""
    rounds, spent = spent_by_round(guarantee)
    misses = guarantee.trade_off(_ALARMS)
    caught = [_ceiling(1 - miss) for miss in misses]
    few, many = (percent(alarm) for alarm in _ALARMS)
    told = (
        "What an attacker can do, even all other clients together: guess from everything released "
        f"{_QUESTIONS[guarantee.relation]}. Whatever the attack, at {few} false positives it has "
        f"at most {caught[0]} true "
        f"positives, and at {many} at most {caught[1]}; blind guessing has {few} and {many}."
    )
    if is_local(guarantee):
        told += " So for the server, which sees who sends a message, and cannot tell of what."
    if guarantee.simulation:
        told += " This holds for secret noise; the noise of a simulation is known."
    parts = [element("p", told), _abilities(guarantee, caught)]
    if can_draw():
        told = "Epsilon spent by round"
        by_round = figures.spending(f"{key}-spent", told, rounds=rounds, epsilons=spent)
        curve = draw_trade_off(guarantee, name=f"{key}-trade-off")
        parts.append(side_by_side(curve.show(), by_round.show()))
    steps = [[str(r), round_up(epsilon)] for r, epsilon in zip(rounds, spent, strict=True)]
    return join(*parts, numbers(table(["rounds done", "epsilon"], steps)))


def show_limits(epsilon: float, delta: float) -> Html:
    """Show what an attacker can do at best where no more is known than epsilon and delta.

    True positives are at most min(e^epsilon a + delta, 1 - e^-epsilon (1 - delta - a)) at a false
    positives (Kairouz, Oh and Viswanath 2015).
    """
    caught = [
        min(math.exp(epsilon) * alarm + delta, 1 - math.exp(-epsilon) * (1 - delta - alarm))
        for alarm in _ALARMS
    ]
    rows = [[percent(a), _ceiling(most)] for a, most in zip(_ALARMS, caught, strict=True)]
    told = (
        "What an attacker can do who sees this run alone, by epsilon and delta. No curve is drawn, "
        "and nothing by round: the posts of a run that was chosen have none of their own."
    )
    return join(element("p", told), table(["false positives", "true positives, at most"], rows))


def _abilities(guarantee: Guarantee, caught: Sequence[str]) -> Html:
    """Put what an attacker can do into a table."""
    head = ["false positives", "true positives, at most"]
    rows = [[percent(alarm), most] for alarm, most in zip(_ALARMS, caught, strict=True)]
    rough = _approximation(guarantee, _ALARMS)
    if rough is not None:
        head.append("Gaussian approximation, not a bound")
        for row, miss in zip(rows, rough, strict=True):
            row.append(f"{100 * (1 - miss):.1f} %")
    return join(element("p", "What an attacker can do", class_="label"), table(head, rows))


def draw_trade_off(guarantee: Guarantee, title: str = _TITLE, *, name: str = "trade-off") -> Figure:
    """Return the trade-off curve of a guarantee as a figure: the bound, and blind guessing.

    In the view of the other clients. The Gaussian approximation that papers draw is dashed, where
    it differs; it bounds nothing.
    """
    alarms = np.concatenate([[0.0], np.geomspace(1e-4, 0.1, 30), np.linspace(0.12, 1, 45)])
    listed = [float(alarm) for alarm in alarms]
    return figures.trade_off(
        name,
        title,
        alarms=alarms,
        misses=guarantee.trade_off(listed),
        marks=np.column_stack([_ALARMS, guarantee.trade_off(_ALARMS)]),
        approximation=_approximation(guarantee, listed),
    )


def save_trade_off(guarantee: Guarantee, path: Path | str) -> Path:
    """Write the trade-off curve of a guarantee to a file: .svg, .png or .pdf."""
    return draw_trade_off(guarantee).save(path)


def _approximation(guarantee: Guarantee, alarms: Sequence[float]) -> Array | None:
    """Return what papers draw; None where there is none, or where it is the curve itself."""
    try:
        found = gdp_approximation(guarantee).trade_off(alarms)
    except ValueError:  # other noise than Gaussian
        return None
    return None if np.allclose(found, guarantee.trade_off(alarms), atol=1e-9) else found


@lru_cache(maxsize=64)
def spent_by_round(guarantee: Guarantee) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return some of the rounds, the last among them, and epsilon after each of these.

    In the view of the other clients.
    """
    total = len(guarantee.events)
    # Sampled rounds of many different noises take seconds to account for.
    marks = min(total, _MARKS if len(set(guarantee.events)) <= 8 else 4)
    rounds = tuple(sorted({round(r) for r in np.linspace(1, total, marks)}))
    who, relation = guarantee.participation, guarantee.relation
    spent = epsilon_by_round(guarantee.events, who, relation, guarantee.delta, rounds)
    return rounds, tuple(spent)


def _ceiling(share: float) -> str:
    """Write a bound with one digit after the point, never below itself."""
    return f"{min(100.0, math.ceil(1000 * share - 1e-9) / 10):.1f} %"
