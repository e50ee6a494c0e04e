"""`coterie run` and `coterie demo`: the flags, and what is checked before torch is loaded."""

import argparse

from coterie.cli.options import (
    EPSILONS,
    NO_DATA,
    TRACKING,
    TRUST,
    Commands,
    add_flags,
    add_plan,
    add_work,
    check_flags,
    check_run,
    command,
    epsilons,
    share,
)

_FLAGS = {
    "--out DIR": "run folder (default runs/DATA-METHOD-TIME)",
    "--resume DIR": "resume an interrupted run",
    "--anyway": "let auto spend the budget even where the verdict is to learn alone",
    **TRUST,
    "--hardware {equal,spread}": "speed of clients on the virtual clock: equal, or from 1 to 10",
}
_ABOUT = {
    "--unit TEXT": 'the protected unit in your words, e.g. "one hospital with all its patients"',
    "--operator TEXT": "who carries out the run",
    "--purpose TEXT": "what the models are for",
}
"""Declarations, stated with the guarantee; a plan may have more ([about])."""


def add(commands: Commands) -> None:
    """Add `run` and `demo`."""
    parser = command(
        commands,
        "run",
        "train one model per client under a budget, from flags or a TOML plan",
        "coterie run --data districts --epsilon 1",
        usual="--data --client-column --target --plan --method --model --epsilon --out --resume "
        "--json",
        action=_run,
    )
    add_plan(parser).add_argument(
        "--epsilon",
        type=epsilons,
        metavar=EPSILONS,
        help="for the whole run; inf for no privacy; several values (0.3,1,3) train once for each; "
        "local training and training without privacy are added",
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--wait",
        metavar="SECONDS|all|75%",
        help="simulate stragglers on a virtual clock: a round waits this many seconds, for all "
        "clients, or for about this share of them; more settings: --set stragglers.KEY=VALUE",
    )
    run.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        help="score every round on test rows; not private (default: if it is cheap)",
    )
    run.add_argument(
        "--holdout-clients",
        dest="newcomers",
        type=share,
        metavar="SHARE|NUMBER",
        help="clients to hold out of training and onboard afterwards; they release nothing",
    )
    _add_published(run)
    add_flags(run, _FLAGS | _ABOUT | TRACKING)
    add_work(run)
    _add_demo(commands)


def _add_published(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--as-published",
        nargs="?",
        const="",
        metavar="KEY=VALUE,...",
        help="the plan that the paper of --method publishes (pmtl, mpmtl, dpfedmtl, mtlsvm), a "
        "reproduction: its epsilon is stated as claimed and as it is",
    )


def _add_demo(commands: Commands) -> None:
    demo = {
        "--data NAME|FILE": "data (default districts)",
        "--epsilon NUMBER:float": "budget of each private run (default 1)",
        "--out DIR": "folder of the runs (default runs/demo-TIME)",
        "--simulation-seed N:int": "reproducible, protects nobody",
    }
    command(
        commands,
        "demo",
        "local, FedAvg, PMTL and the default method on real data; without --data, also the other "
        "published systems, each on data for it",
        "coterie demo --epsilon 1",
        flags=demo,
        action=_demo,
    ).set_defaults(data="districts", epsilon=1.0)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.resume is None:
        check_flags(arguments)
    else:
        check_run(arguments.resume, "plan.toml", "members.json")
    if not (arguments.data or arguments.plan or arguments.resume or arguments.set):
        raise ValueError(NO_DATA)
    from coterie.cli.train import run

    return run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    check_flags(arguments)
    from coterie.cli.train import demo

    return demo(arguments)
