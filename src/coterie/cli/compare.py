"""`coterie compare`: methods x epsilons x seeds in parallel processes, and what they come to."""

import argparse

from coterie.cli.options import Commands, add_plan, add_tracking, command

_MORE = """\
Every cell is a run folder of its own; the comparison's folder gets comparison.parquet (a row a
cell) and report.html. Methods that post nothing are run once per seed, methods that bring rows
together without privacy; a method that does not fit the data is shown as refused. Seeds are
simulation seeds, split and noise move together, and protect nobody; --repeats uses real noise.

A TOML plan may hold the comparison: [compare] with methods (names, or tables with kind, label and
settings), epsilons, seeds or repeats, workers, grid, search, trials, folds, public.

A setting of one method alone is written with its label: --set pmtl.method.lam=1, --grid
pmtl.method.lam=0.1,1. The exit status is 1 where a cell failed; --resume tries it again."""


def add(commands: Commands) -> None:
    """Add `compare`."""
    parser = command(
        commands,
        "compare",
        "methods x epsilons x seeds side by side, and which differences are larger than noise",
        "coterie compare --data districts --methods local,fedavg,pmtl,pfeb,mtlsvm "
        "--epsilons 0.5,1,2,4 --seeds 3",
        _MORE,
    )
    compared = parser.add_argument_group("compared")
    compared.add_argument(
        "--methods", metavar="NAME,NAME", help="default local,fedavg,pmtl,auto (`coterie methods`)"
    )
    compared.add_argument(
        "--epsilons", metavar="NUMBER,NUMBER", help="default 0.5,1,2,4; inf for no privacy"
    )
    compared.add_argument(
        "--seeds", metavar="N|A,B,C", help="how many simulations, or their seeds (default 3)"
    )
    compared.add_argument(
        "--repeats", type=int, metavar="N", help="instead of seeds: real noise, each run a release"
    )
    _add_selection(parser)
    add_plan(parser)
    _hide(parser, "method", "finetune", "noise_multiplier")
    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="DIR", help="default runs/compare-DATA-TIME")
    run.add_argument("--resume", metavar="DIR", help="go on with a comparison")
    run.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one a core; 0: this one)"
    )
    run.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="e.g. method.lam=0.3"
    )
    run.add_argument("--device", help="cpu (default) or cuda")
    run.add_argument("--block", type=int, help="clients computed side by side")
    run.add_argument("--no-report", action="store_true", help="do not write report.html")
    add_tracking(run)
    run.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(action=compare, epsilon=None)


def _hide(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Leave out of the help what is of one run: a comparison says what to give instead."""
    for action in parser._actions:
        if action.dest in flags:
            action.help = argparse.SUPPRESS


def _add_selection(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_argument_group("settings chosen in every cell")
    chosen.add_argument(
        "--grid",
        metavar="KEY=VALUE,VALUE",
        action="append",
        default=[],
        help="values to choose from, by cross-validation inside clients; epsilon does not cover "
        "the choice, and the table says so",
    )
    chosen.add_argument("--search", choices=("grid", "optuna"), help="default grid: all of them")
    chosen.add_argument("--trials", type=int, help="combinations that Optuna tries")
    chosen.add_argument("--folds", type=int, help="of every client's rows (default 5)")
    chosen.add_argument(
        "--public", action="store_true", help="declare the data public: choosing on it is free"
    )
    chosen.add_argument(
        "--charge-tuning", action="store_true", help="pay for the choice out of every budget"
    )


def compare(arguments: argparse.Namespace) -> int:
    """Carry out `coterie compare`."""
    from coterie.cli.compare_run import compare as carry_out

    return carry_out(arguments)
