"""`coterie run` and `coterie demo`: the flags, and what is checked before torch is loaded."""

import argparse
import math
from pathlib import Path

from coterie.cli.completion import names
from coterie.cli.front import closest
from coterie.cli.options import Commands, add_plan, add_tracking, add_work, command, share


def add(commands: Commands) -> None:
    """Add `run`."""
    parser = command(
        commands,
        "run",
        "train one model per client under a budget, from flags or a TOML plan",
        "coterie run --data districts --epsilon 1",
    )
    budget = add_plan(parser)
    budget.add_argument(
        "--epsilon",
        type=_epsilons,
        metavar="NUMBER[,NUMBER]",
        help="for the whole run; inf for no privacy; several (0.3,1,3) train once for each, beside "
        "local training and training without privacy",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="DIR", help="run folder (default runs/DATA-METHOD-TIME)")
    run.add_argument("--resume", metavar="DIR", help="resume an interrupted run")
    run.add_argument(
        "--wait",
        metavar="SECONDS|all|75%",
        help="put clients on a virtual clock: a round waits so long, for all of them, or for about "
        "this share; more settings: --set stragglers.KEY=VALUE",
    )
    run.add_argument("--hardware", choices=("equal", "spread"), help="clients' speed on that clock")
    run.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        help="score every round on test rows, not private (default: where that is cheap)",
    )
    run.add_argument(
        "--holdout-clients",
        dest="newcomers",
        type=share,
        metavar="SHARE|NUMBER",
        help="clients to hold out of training and onboard afterwards; they release nothing",
    )
    run.add_argument("--newcomers", type=share, help=argparse.SUPPRESS)
    add_work(run)
    add_tracking(run)
    parser.set_defaults(action=_run)


def add_demo(commands: Commands) -> None:
    """Add `demo`."""
    parser = command(
        commands,
        "demo",
        "local, FedAvg, PMTL and the default method side by side on real data, with a report",
        "coterie demo --epsilon 1",
    )
    parser.add_argument("--data", default="districts", help="default districts")
    parser.add_argument("--epsilon", type=float, default=1.0, help="default 1")
    parser.add_argument("--out", metavar="DIR", help="default runs/demo-TIME")
    parser.add_argument("--simulation-seed", type=int, help="reproducible, protects nobody")
    parser.set_defaults(action=_demo)


def _run(arguments: argparse.Namespace) -> int:
    check_flags(arguments)
    from coterie.cli.train import run

    return run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    check_flags(arguments)
    from coterie.cli.train import demo

    return demo(arguments)


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that cannot be right, before anything heavy is imported.

    The plan checks its values again: this is only the faster answer.
    """
    known, given = names(), vars(arguments)
    data = given.get("data")
    if data is not None and data not in known["data"] and not Path(data).exists():
        stem = data.partition(":")[0]
        if stem not in {name.partition(":")[0] for name in known["data"]} and "://" not in data:
            near = closest(data, known["data"])
            meant = f"did you mean {near}?" if near else "expected a file, or a named data set"
            raise ValueError(f"{data}: no such file, and no data set of that name; {meant}")
    method = given.get("method")
    if method is not None and method not in known["methods"]:
        near = closest(method, known["methods"])
        meant = f"did you mean {near}?" if near else "see `coterie methods`"
        raise ValueError(f"--method {method}: no such method; {meant}")
    epsilon = given.get("epsilon")
    for value in epsilon if isinstance(epsilon, tuple) else (epsilon,):
        if value is not None and not value > 0:
            raise ValueError(f"epsilon = {value}: expected a positive number, or inf")
    for name in ("noise_multiplier", "clip", "cohort"):
        value = given.get(name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a positive number")
    rounds = given.get("rounds")
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds = {rounds}: expected a whole number of at least 1")
    if given.get("plan") is not None and not Path(given["plan"]).is_file():
        raise ValueError(f"{given['plan']}: cannot be read (no such file); check the path")


def _epsilons(text: str) -> float | tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1, or 0.3,1,3") from None
    return found[0] if len(found) == 1 else found
