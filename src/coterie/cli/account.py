"""`coterie account` and `coterie calibrate`: budgets before any data; neither loads torch."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from coterie.cli.options import (
    JSON,
    SHARES,
    VIEW,
    Commands,
    add_flags,
    aligned,
    check_shares,
    command,
)

if TYPE_CHECKING:
    from coterie.privacy.events import Event, Participation, Relation
    from coterie.privacy.guarantee import Guarantee
    from coterie.privacy.sampling import Sampler

_MOST_ROUNDS = 1_000_000
_MOST_CLIENTS = 1_000_000_000_000
_VIEWS = {
    "other_clients": "other clients",
    "server": "server",
    "server_secure_aggregation": "server, secure aggregation",
    "outsider": "outsider",
    "coordinator": "coordinator",
    "coordinator_and_corrupt": "coordinator and corrupt clients",
    "coalition_of_all_others": "all other clients together",
}
_STATED = ("view", "views", "epsilon_per_participation")


def add(commands: Commands) -> None:
    """Add `account` (noise to epsilon) and `calibrate` (epsilon to noise)."""
    for name in ("account", "calibrate"):
        _add(commands, name)


def _add(commands: Commands, name: str) -> None:
    calibrating = name == "calibrate"
    given = "--epsilon 2" if calibrating else "--noise-multiplier 10"
    parser = command(
        commands,
        name,
        "compute noise from epsilon" if calibrating else "compute epsilon from noise",
        f"coterie {name} --clients 205 --cohort 100 --rounds 1000 {given} --delta 1e-5 --json",
        action=_print,
    )
    asked = ("--epsilon", "the budget")
    if not calibrating:
        asked = (
            "--noise-multiplier",
            "standard deviation of the noise in a sum, divided by the clip",
        )
    for flag, kind, text in (
        ("--clients", int, "number of clients"),
        ("--rounds", int, "number of releases"),
        (asked[0], float, asked[1]),
    ):
        parser.add_argument(flag, type=kind, required=True, help=text)
    flags = {
        "--cohort NUMBER:float": "expected clients per round (default: all)",
        "--delta NUMBER:float": "default min(1e-5, 1/(10 clients))",
        "--noise {gaussian,banded,local}": "added by the server (default; banded: correlated over "
        "rounds, with --sampling cyclic), or by each client to its own contribution",
    }
    add_flags(parser, flags | SHARES | VIEW | JSON)


def _print(arguments: argparse.Namespace) -> None:
    found = account(arguments)
    print(json.dumps(found, indent=2, allow_nan=False) if arguments.json else describe(found))


def make_sampler(sampling: str | None, cohort: float | None, visible: bool) -> "Sampler":
    """Return the sampler that the flags name."""
    from coterie.privacy.sampling import Cyclic, Everyone, FixedSize, Poisson

    if sampling == "everyone":
        if cohort is not None:
            raise ValueError(
                f"--cohort {cohort:g} does not go with --sampling everyone: leave one of them out"
            )
        if visible:
            raise ValueError("--cohort-visible: with everyone in every round there is no cohort")
        return Everyone()
    if sampling in ("fixed", "cyclic"):
        if cohort is None or not float(cohort).is_integer():
            given = "no --cohort" if cohort is None else f"--cohort {cohort}"
            raise ValueError(
                f"--sampling {sampling} needs a whole number of clients per round, got {given}: "
                "give one, such as --cohort 20"
            )
        return Cyclic(int(cohort)) if sampling == "cyclic" else FixedSize(int(cohort), visible)
    return Poisson(cohort, visible)


def account(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return epsilon for the noise given, or the noise for the epsilon given."""
    _check(arguments)
    from coterie.privacy.calibrate import calibrate
    from coterie.privacy.events import default_delta
    from coterie.privacy.guarantee import Guarantee

    clients, rounds, delta = arguments.clients, arguments.rounds, arguments.delta
    delta = default_delta(clients) if delta is None else delta
    relation: Relation = arguments.relation or "zero_out"
    sampler = make_sampler(arguments.sampling, arguments.cohort, arguments.cohort_visible)
    participation = sampler.participation(clients)
    local, in_shares = arguments.noise == "local", check_shares(arguments)
    seen = participation.shown if local else participation.to_others
    seen = participation.always if in_shares else seen
    if arguments.command == "calibrate":
        noise = calibrate(
            arguments.epsilon, delta, weights=(1.0,) * rounds, participation=seen, relation=relation
        )
    else:
        noise = arguments.noise_multiplier
    event = _event(arguments, noise, participation, in_shares=in_shares)
    guarantee = Guarantee(
        events=(event,) * rounds,
        participation=participation,
        relation=relation,
        delta=delta,
        clients=clients,
    )
    return _stated(guarantee, noise, sampler)


def _event(
    arguments: argparse.Namespace, noise: float, who: "Participation", *, in_shares: bool
) -> "Event":
    from coterie.privacy.events import (
        BandedGaussian,
        Gaussian,
        LocalGaussian,
        SharedGaussian,
        share_counts,
    )

    if in_shares:
        counts = share_counts(arguments.clients, arguments.minimum_clients, arguments.corrupt)
        return SharedGaussian(noise, 2.0, *counts)
    if arguments.noise == "banded":
        return BandedGaussian(noise, 2.0, min(who.period, arguments.rounds))
    return LocalGaussian(noise) if arguments.noise == "local" else Gaussian(noise)


def _stated(guarantee: "Guarantee", noise: float, sampler: "Sampler") -> dict[str, Any]:
    """Return what is printed, as JSON."""
    found, clients = guarantee.to_json(), guarantee.clients
    return {
        "epsilon": found["epsilon"],
        "delta": guarantee.delta,
        "noise_multiplier": noise,
        **{key: found[key] for key in _STATED if key in found},
        "clients": clients,
        "cohort": sampler.expected(clients),
        "rounds": len(guarantee.events),
        "relation": guarantee.relation,
        "sampling": sampler.kind,
        "cohort_visible": guarantee.participation.visible,
        "accountant": found["accountant"],
        "statement": guarantee.statement(),
    }


def _check(arguments: argparse.Namespace) -> None:
    if arguments.clients > _MOST_CLIENTS:
        raise ValueError(f"--clients {arguments.clients}: expected at most {_MOST_CLIENTS:,}")
    for name in ("clients", "rounds"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: expected at least 1")
    if arguments.rounds > _MOST_ROUNDS:
        raise ValueError(f"--rounds {arguments.rounds}: expected at most {_MOST_ROUNDS:,}")
    # Outside these limits floating point loses the values.
    for name, least, most in (("delta", 1e-30, 1 - 1e-9), ("noise_multiplier", 1e-5, 1e9)):
        value = getattr(arguments, name, None)
        if value is not None and not least <= value <= most:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {value:g}: expected a number from {least:g} to {most:g}")


def describe(found: dict[str, Any]) -> str:
    """Return the result as text."""
    from coterie.privacy.guarantee import round_up

    def bound(epsilon: float | str) -> str:
        return epsilon if isinstance(epsilon, str) else round_up(epsilon, 6)

    views = dict(found["views"])
    rows = [
        (f"epsilon ({_VIEWS['other_clients']})", bound(views.pop("other_clients"))),
        ("delta", f"{found['delta']:.6g}"),
        ("noise multiplier", f"{found['noise_multiplier']:.6g}"),
        *((f"epsilon ({_VIEWS[view]})", bound(e)) for view, e in views.items() if view in _VIEWS),
        ("relation", found["relation"]),
        ("accountant", found["accountant"]),
    ]
    return "\n".join([*aligned(rows), "", found["statement"]])
