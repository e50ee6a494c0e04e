"""Guarantees in words that are true: bounds are rounded up, and views are named."""

import dataclasses
import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context
from typing import TYPE_CHECKING

from coterie.privacy.events import Event, Gaussian, Laplace, LocalGaussian, Wishart
from coterie.privacy.views import is_central, is_local, per_participation

if TYPE_CHECKING:
    from coterie.privacy.accounting import Guarantee

OTHERS = "other clients"
EVERYBODY = "the server and the other clients"
OUTSIDER = "an outsider who sees the posts alone"
COMPARED = {"zero_out": "without its data", "replace": "with another's in its place"}
RELATIONS = {
    "zero_out": "the client's contributions are replaced by zero",
    "replace": "the client is replaced by any other client",
}
UNIT = "one client: its whole data and its whole state"
SERVER_SEES = "the server, which sees each bounded contribution before noise; "


def round_up(bound: float, digits: int = 4) -> str:
    """Write an upper bound with few digits, never below it.

    >>> round_up(4.61142), round_up(1.0), round_up(1.0000000001), round_up(math.inf)
    ('4.612', '1', '1.001', 'inf')
    >>> round_up(0.99999998), round_up(28.0656), round_up(8.125e7), round_up(0.1)
    ('1', '28.07', '8.125e+7', '0.1')
    """
    if not 0 < bound < math.inf:
        return f"{bound:g}"
    # In decimals, where the last digit shown is exact: floats would round on the way.
    shown = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(bound)))
    return f"{shown.normalize():f}" if -5 <= shown.adjusted() < 6 else f"{shown:.{digits - 1}e}"


def view_of(guarantee: "Guarantee") -> str:
    """Say whose view the guarantee's epsilon is.

    Under a hidden cohort of fixed size a client knows from its own invitation something of who else
    was drawn, so the amplified number holds only for whoever has no invitation. Noise that clients
    add themselves holds against the server too.
    """
    who = guarantee.participation
    if is_local(guarantee):
        return OTHERS if is_central(guarantee) else EVERYBODY
    return OUTSIDER if who.kind == "fixed" and who.rate < 1 and not who.visible else OTHERS


def state(guarantee: "Guarantee") -> str:
    """State a guarantee in plain words."""
    epsilon, delta = guarantee.epsilon, guarantee.delta
    factor = round_up(math.exp(epsilon), 3) if epsilon < 700 else "any number of"
    pure = delta == 0
    lines = [
        f"{'pure ' if pure else ''}epsilon = {round_up(epsilon)} at delta = {delta:.3g}, over "
        f"{len(guarantee.events)} rounds: whatever they look for is at most {factor} times as "
        f"probable with a client's data as {COMPARED[guarantee.relation]}"
        f"{', with nothing added' if pure else f', plus {delta:.3g}'}.",
        f"Protected: {UNIT}; compared are runs in which {RELATIONS[guarantee.relation]}.",
        _seen_by(guarantee),
        f"Sampling: {_drawn(guarantee)}",
        f"Accountant: {guarantee.profile.accountant}.",
        f"Not covered: {_uncovered(guarantee)}metrics, losses and notes on rows that are shown; "
        "settings chosen by looking at results; a personal model that its client gives away.",
    ]
    if guarantee.assumed:
        lines.append(f"Assumed public: {'; '.join(guarantee.assumed)}.")
    if epsilon == math.inf:
        # Under Wishart noise a larger delta may still have an epsilon; without noise none has.
        at = "" if guarantee.delta_at(1e9) == 1 else f" at delta = {delta:.3g}"
        lines.insert(0, f"NOT PRIVATE: epsilon is infinite{at}.")
    if guarantee.simulation:
        lines.insert(0, "SIMULATION: noise from a known seed, not a guarantee.")
    if guarantee.claimed_epsilon is not None:
        lines.insert(0, _compare_claim(guarantee, guarantee.claimed_epsilon))
    return "\n".join(lines)


def _uncovered(guarantee: "Guarantee") -> str:
    if not is_local(guarantee) or is_central(guarantee):
        return SERVER_SEES
    return "whoever reads a client's memory before its noise is added; "


def _compare_claim(guarantee: "Guarantee", claimed: float) -> str:
    """Set what was printed for a mechanism beside what is true of it."""
    alone = guarantee.claimed_alone
    single = per_participation(alone)
    each = "" if single is None else f"; {round_up(single)} for a single message"
    releases = f"{len(alone.events)} of {len(guarantee.events)} releases"
    return (
        "NOT A GUARANTEE: a reproduction of a printed mechanism. Printed for "
        f"{releases} together, {_reckoned(alone)}: epsilon = {round_up(claimed)} at "
        f"delta = {guarantee.delta:.3g}. True of them{_viewed(alone)}: delta = "
        f"{round_up(alone.delta_at(claimed))} at that epsilon, and epsilon = "
        f"{round_up(alone.epsilon)} at delta = {guarantee.delta:.3g}{each}."
    )


def _reckoned(guarantee: "Guarantee") -> str:
    return "as the paper labels it" if is_local(guarantee) else "by the paper's own composition"


def _viewed(guarantee: "Guarantee") -> str:
    seen = " for the server, and for all other clients together"
    return seen if is_local(guarantee) else ""


def _seen_by(guarantee: "Guarantee") -> str:
    who = guarantee.participation
    if is_local(guarantee):
        return _seen_locally(guarantee)
    if view_of(guarantee) == OUTSIDER:
        together = round_up(guarantee.views["coalition_of_all_others"])
        return (
            "Seen by: an outsider, who sees every release and was never invited. The other clients "
            "know from their own invitations who was drawn, all together exactly; against them the "
            f"sampling protects nothing: epsilon = {together}."
        )
    seen = "see" if who.visible else "do not see"
    return f"Seen by: the other clients, who see every release and {seen} who took part."


def _seen_locally(guarantee: "Guarantee") -> str:
    views, single = guarantee.views, per_participation(guarantee)
    assert single is not None
    honest = min(e.honest for e in guarantee.events if isinstance(e, LocalGaussian))
    trusted = "nobody else's noise" if honest == 1 else f"the noise of {honest} honest clients"
    server = "" if is_central(guarantee) else "the server, which sees every message; and by "
    return (
        "Noise: each client adds it to its own contribution, before that leaves. "
        f"Seen by: {server}all other clients together, who can subtract their own messages from a "
        "post. Both know who took part, so sampling hides nothing: epsilon = "
        f"{round_up(single)} for each round in which a client takes part, "
        f"{round_up(guarantee.epsilon)} in total. For whoever sees sums alone (the server under "
        f"secure aggregation, outsiders), counting on {trusted}: epsilon = "
        f"{round_up(views['outsider'])}."
    )


def _drawn(guarantee: "Guarantee") -> str:
    who, clients = guarantee.participation, guarantee.clients
    if who.rate == 1:
        return f"all {clients} clients take part in every round."
    how = {
        "poisson": f"each of {clients} clients joins a round by its own coin",
        "fixed": f"cohorts of fixed size are drawn from {clients} clients",
    }[who.kind]
    return f"{how} (probability {who.rate:.4g})."


def describe_noise(events: Sequence[Event]) -> str:
    """Say what noise a plan's posts carry, kind by kind."""
    told = []
    for kind, name, unit in (
        (
            Gaussian,
            "noise_multiplier",
            "Gaussian noise of z times what one client can change, z = {}",
        ),
        (
            LocalGaussian,
            "noise_multiplier",
            "Gaussian noise of z times that bound, which each client adds itself, z = {}",
        ),
        (Laplace, "epsilon", "Laplace noise of what one client can change over e, e = {}"),
        (Wishart, "ratio", "Wishart noise of scale C squared over r, r = {}"),
    ):
        values = [getattr(event, name) for event in events if isinstance(event, kind)]
        if values:
            low, high = f"{min(values):.4g}", f"{max(values):.4g}"
            told.append(unit.format(low if low == high else f"{low} to {high}"))
    return " or ".join(told) or "no noise"


def add_up(guarantees: "Sequence[Guarantee]") -> tuple[float, float]:
    """Bound epsilon and delta of several runs for other clients who see the posts of all of them.

    Runs alike in sampling and relation are composed; others are added up, epsilons and deltas (a
    guarantee under replace covers a client's contributions becoming zero).
    """
    spent = [guarantee for guarantee in guarantees if guarantee.events]
    if len({(guarantee.participation, guarantee.relation) for guarantee in spent}) == 1:
        events = tuple(event for guarantee in spent for event in guarantee.events)
        # The largest delta of any: a pure run beside a Gaussian one has none by itself.
        delta = max(guarantee.delta for guarantee in spent)
        # A client of any of them; the count decides only how many may be counted on as honest.
        clients = max(guarantee.clients for guarantee in spent)
        both = dataclasses.replace(spent[0], events=events, delta=delta, clients=clients)
        return both.views["other_clients"], delta
    epsilon = math.fsum(guarantee.views["other_clients"] for guarantee in spent)
    return epsilon, math.fsum(guarantee.delta for guarantee in spent)


def spent_together(guarantees: "Sequence[Guarantee]") -> str:
    """Say what several runs on the same data spend together."""
    epsilon, delta = add_up(guarantees)
    count = sum(bool(guarantee.events) for guarantee in guarantees)
    runs = "1 run" if count == 1 else f"{count} runs"
    return (
        f"{runs} with a budget posted about the same clients; for other clients who see all of "
        f"these posts and no others: epsilon = {round_up(epsilon)} at delta = {delta:.3g}."
    )
