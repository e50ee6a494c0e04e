"""What a certificate must say in words, from its own numbers.

People read the statement and not the numbers beside it, so it is written anew here and compared
line by line, and so is every text that does not depend on the run. The words are part of the format
of a certificate: a later version that words something else has to know these too.
"""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, Context
from typing import Any

_UNIT = "one client: its whole data and its whole state"
_UNCOVERED = [
    "metrics, losses, references and notices on clients' rows, which are shown without noise",
    "settings chosen by looking at results",
    "how long the run and its rounds took",
    "a personal model that its client gives away",
]
_COMPARED = {"zero_out": "without its data", "replace": "with another's in its place"}
_RELATIONS = {
    "zero_out": "the client's contributions are replaced by zero",
    "replace": "the client is replaced by any other client",
}
_OUTSIDER = "an outsider who sees the posts alone"
_BEFORE = "nobody: of these posts before the choice, see selection"
_THEOREM = "RDP bound (Papernot and Steinke 2022, Theorem 2)"
_ALONE = "whoever sees the chosen run alone"
_OTHERS = (
    "the other clients took part in all runs: their number is in selection.json, and larger than "
    "that of these posts"
)
_ACCOUNTANTS = re.compile(
    r"exact Gaussian DP|epsilons of pure releases added|exact profile of one Wishart release"
    r"|optimal composition of pure releases \(as randomised responses\)"
    r"|binomial mixture of Gaussian DP \((exact|attended mu\^2 rounded up to a grid)\)"
    r"|privacy loss distribution \(dp-accounting (?P<version>[^ ,]+), grid \de-?\+?\d\d, "
    r"pessimistic\)"
)
_BARE = "none: something is released without noise"
_NOTHING = "none needed: nothing is released"
_CHOICE = {"theorem": _THEOREM, "view": _ALONE, "other_clients": _OTHERS}


def wrong_words(told: Mapping[str, Any]) -> list[str]:
    """List what a certificate says otherwise than its numbers call for."""
    texts: dict[str, Any] = {
        "unit": _UNIT,
        "not_covered": _UNCOVERED,
        "reasons": _reasons(told),
        **_seen(told),
    }
    found = [
        f"{key} is {told.get(key)!r}, not {value!r}"
        for key, value in texts.items()
        if told.get(key) != value
    ]
    found += _strange_accountant(told)
    choice = told.get("selection")
    if isinstance(choice, dict):
        found += [
            f"selection: {key} is {choice.get(key)!r}, not {value!r}"
            for key, value in _CHOICE.items()
            if choice.get(key) != value
        ]
        cost = _cost(told, choice)
        found += [f"tuning does not end in {cost!r}"] * (not str(told.get("tuning")).endswith(cost))
    return found + _strange_lines(told)


def _cost(told: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    epsilon = round_up(_number(choice["epsilon_chosen_alone"]))
    return (
        "CHARGED: settings were chosen among private runs by private scores: epsilon = "
        f"{epsilon} at delta = {told['delta']:.3g} for {_ALONE}, {_THEOREM}; {_OTHERS}"
    )


def _strange_lines(told: Mapping[str, Any]) -> list[str]:
    """Compare the statement with the one that the numbers call for, and say so in the caveats."""
    said, expected = told["statement"].split("\n"), list(_lines(told))
    found = [
        f"said is {one!r}, not {other!r}"
        for one, other in zip(said, expected, strict=False)
        if one != other
    ]
    if len(said) != len(expected):
        found.append(f"{len(said)} lines are said, {len(expected)} are called for")
    caveats = told.get("caveats", [])
    if "claimed_epsilon" in told and (not isinstance(caveats, list) or expected[0] not in caveats):
        found.append("caveats do not say that this is a reproduction")
    return found


def _strange_accountant(told: Mapping[str, Any]) -> list[str]:
    library, kinds = told["versions"].get("dp-accounting"), _kinds(told)
    if not kinds or "non_private" in kinds:
        wanted = _BARE if kinds else _NOTHING
        return [f"accountant is {told['accountant']!r}"] * (told["accountant"] != wanted)
    for part in told["accountant"].split(" or, if smaller, "):
        known = _ACCOUNTANTS.fullmatch(part)
        if not known or (known["version"] or library) != library:
            return [f"accountant is {told['accountant']!r}"]
    return []


def round_up(bound: float, digits: int = 4) -> str:
    """Write an upper bound with few digits, never below it."""
    if not 0 < bound < math.inf:
        return f"{bound:g}"
    shown = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(bound)))
    return f"{shown.normalize():f}" if -5 <= shown.adjusted() < 6 else f"{shown:.{digits - 1}e}"


def _number(value: Any) -> float:
    return math.inf if value == "inf" else float(value)


def _kinds(told: Mapping[str, Any]) -> set[str]:
    return {event["event"] for event in told["events"]}


def _view(told: Mapping[str, Any]) -> str:
    kinds = _kinds(told)
    if kinds == {"local_gaussian"}:
        return "the server and the other clients"
    apart = told["sampling"] == "fixed" and told["rate"] < 1 and told["cohort"] == "hidden"
    return _OUTSIDER if apart and "local_gaussian" not in kinds else "other clients"


def _seen(told: Mapping[str, Any]) -> dict[str, Any]:
    """Say whose view the first epsilon is, and whether it is seen who takes part."""
    seen = told["cohort"] == "visible" or "local_gaussian" in _kinds(told)
    return {
        "view": _BEFORE if "selection" in told else _view(told),
        "participation_seen": seen,
    }


def _reasons(told: Mapping[str, Any]) -> dict[str, str]:
    kinds = _kinds(told)
    if kinds - {"local_gaussian"}:
        return {
            "server": "infinite: the server sees each bounded contribution before noise",
            "server_secure_aggregation": "infinite: the server adds the noise itself and sees the "
            "exact sum",
        }
    if not kinds:
        return {}
    honest = _honest(told)
    trusted = f"{honest} honest clients, the protected one included, add their noise"
    if honest == 1:
        trusted = "the noise of the client itself alone is counted on"
    return {
        "server": "the server sees each client's noisy message, and who sent it",
        "other_clients": "all others together can subtract their own messages from a post",
        "server_secure_aggregation": f"the server sees sums, and who took part; {trusted}",
        "outsider": f"an outsider sees posts alone; {trusted}",
    }


def _honest(told: Mapping[str, Any]) -> int:
    return int(min(event.get("honest", math.inf) for event in told["events"]))


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    """Write the statement."""
    epsilon, delta = _number(told["epsilon"]), told["delta"]
    if "claimed_epsilon" in told:
        yield _claim(told)
    if told["simulation"]:
        yield "SIMULATION: noise from a known seed, not a guarantee."
    if epsilon == math.inf:
        # Wishart noise alone has an epsilon at some larger delta.
        at = f" at delta = {delta:.3g}" if "wishart" in _kinds(told) else ""
        yield f"NOT PRIVATE: epsilon is infinite{at}."
    yield _first(told)
    yield (f"Protected: {_UNIT}; compared are runs in which {_RELATIONS[told['relation']]}.")
    yield _seen_by(told)
    yield f"Sampling: {_drawn(told)}"
    accountant = told["accountant"]
    if "selection" in told:
        accountant = f"{_THEOREM}; of the posts before the choice: {accountant}"
    yield f"Accountant: {accountant}."
    yield (
        f"Not covered: {_uncovered(told)}metrics, losses and notes on rows that are shown; "
        "settings chosen by looking at results; a personal model that its client gives away."
    )
    if told["assumed_public"]:
        yield f"Assumed public: {'; '.join(map(str, told['assumed_public']))}."


def _first(told: Mapping[str, Any]) -> str:
    epsilon, delta, whose = _number(told["epsilon"]), told["delta"], ""
    if "selection" in told:
        epsilon = _number(told["selection"]["epsilon_chosen_alone"])
        whose = f", for {_ALONE} of several that were scored privately"
    factor = round_up(math.exp(epsilon), 3) if epsilon < 700 else "any number of"
    pure = delta == 0
    return (
        f"{'pure ' if pure else ''}epsilon = {round_up(epsilon)} at delta = {delta:.3g}, over "
        f"{told['rounds']} rounds{whose}: whatever they look for is at most {factor} times as "
        f"probable with a client's data as {_COMPARED[told['relation']]}"
        f"{', with nothing added' if pure else f', plus {delta:.3g}'}."
    )


def _uncovered(told: Mapping[str, Any]) -> str:
    if _kinds(told) == {"local_gaussian"}:
        return "whoever reads a client's memory before its noise is added; "
    return "the server, which sees each bounded contribution before noise; "


def _claim(told: Mapping[str, Any]) -> str:
    """Set what was printed beside what is true; all releases of a run are printed, or none."""
    local, delta = "local_gaussian" in _kinds(told), told["delta"]
    reckoned = "as the paper labels it" if local else "by the paper's own composition"
    single = told.get("epsilon_per_participation")
    each = "" if single is None else f"; {round_up(_number(single))} for a single message"
    return (
        "NOT A GUARANTEE: a reproduction of a printed mechanism. Printed for "
        f"{told['rounds']} of {told['rounds']} releases together, "
        f"{reckoned}: epsilon = "
        f"{round_up(_number(told['claimed_epsilon']))} at delta = {delta:.3g}. True of them"
        f"{' for the server, and for all other clients together' if local else ''}: delta = "
        f"{round_up(_number(told['true_delta_at_claimed']))} at that epsilon, and epsilon = "
        f"{round_up(_number(told['epsilon']))} at delta = {delta:.3g}{each}."
    )


def _seen_by(told: Mapping[str, Any]) -> str:
    views = told["views"]
    if "selection" in told:
        before = round_up(_number(views["other_clients"]))
        return (
            "Seen by: whoever is handed this run, and neither another one, nor selection.json, nor "
            f"how many there were. For others it does not hold: {_OTHERS} (epsilon = {before}, "
            "before the choice)."
        )
    if "local_gaussian" in _kinds(told):
        return _seen_locally(told)
    if _view(told) == _OUTSIDER:
        return (
            "Seen by: an outsider, who sees every release and was never invited. The other clients "
            "know from their own invitations who was drawn, all together exactly; against them the "
            "sampling protects nothing: epsilon = "
            f"{round_up(_number(views['coalition_of_all_others']))}."
        )
    seen = "see" if told["cohort"] == "visible" else "do not see"
    return f"Seen by: the other clients, who see every release and {seen} who took part."


def _seen_locally(told: Mapping[str, Any]) -> str:
    honest = _honest(told)
    trusted = "nobody else's noise" if honest == 1 else f"the noise of {honest} honest clients"
    alone = _kinds(told) == {"local_gaussian"}
    server = "the server, which sees every message; and by " if alone else ""
    return (
        "Noise: each client adds it to its own contribution, before that leaves. "
        f"Seen by: {server}all other clients together, who can subtract their own messages from a "
        "post. Both know who took part, so sampling hides nothing: epsilon = "
        f"{round_up(_number(told['epsilon_per_participation']))} for each round in which a client "
        f"takes part, {round_up(_number(told['epsilon']))} in total. For whoever sees sums alone "
        f"(the server under secure aggregation, outsiders), counting on {trusted}: epsilon = "
        f"{round_up(_number(told['views']['outsider']))}."
    )


def _drawn(told: Mapping[str, Any]) -> str:
    clients, rate = told["clients"], told["rate"]
    if rate == 1:
        return f"all {clients} clients take part in every round."
    how = f"each of {clients} clients joins a round by its own coin"
    if told["sampling"] == "fixed":
        how = f"cohorts of fixed size are drawn from {clients} clients"
    return f"{how} (probability {rate:.4g})."
