"""The options of `coterie tune` that say how settings are searched and what that may cost."""

import argparse

MORE = """\
Without --charge all scores are functions of clients' rows without noise: free on public data, and
covered by no epsilon elsewhere (the plan that is written says which). With --charge K runs are made
(K is random), each private at --epsilon, scored privately, and the best is kept: two epsilons are
told, for whoever sees the chosen run alone and for the other clients, who see all runs. --dry-run
tells them before anything is spent. --json prints one object."""


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add what is searched, how, and how it is paid for."""
    grid = parser.add_argument_group("grid")
    grid.add_argument(
        "--grid",
        metavar="KEY=VALUE,VALUE",
        action="append",
        default=[],
        help="values of a setting of the plan to try; several make all combinations; a range such "
        "as method.lam=0.01..10 with --search optuna",
    )
    grid.add_argument(
        "--search", choices=("grid", "optuna"), default="grid", help="all of it (default), or TPE"
    )
    grid.add_argument("--trials", type=int, help="how many Optuna proposes (default 30)")
    grid.add_argument("--folds", type=int, default=5, help="of every client's rows (default 5)")
    grid.add_argument("--seed", type=int, default=0, help="of folds and trial noise (default 0)")
    grid.add_argument(
        "--public", action="store_true", help="declare the data public: tuning on it is free"
    )
    charge = parser.add_argument_group("charge")
    charge.add_argument(
        "--charge", action="store_true", help="choose by private runs, every one paid for"
    )
    charge.add_argument("--runs", type=float, default=10.0, help="to expect (default 10)")
    charge.add_argument(
        "--eta", type=float, default=1.0, help="shape of their number: 1 geometric, 0 logarithmic"
    )
    charge.add_argument(
        "--score-bound", type=float, default=1.0, help="the largest error that counts (default 1)"
    )
    charge.add_argument(
        "--score-noise", type=float, help="noise multiplier of a score (default: half a run's mu)"
    )
    charge.add_argument(
        "--validation", type=float, default=0.25, help="share of rows scored on (default 0.25)"
    )
    charge.add_argument("--dry-run", action="store_true", help="tell what it costs, and stop")
