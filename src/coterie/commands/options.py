"""The options of each command, with help and an example; no command is carried out here."""

import argparse
from collections.abc import Callable
from typing import Any

from coterie.commands.tune_options import MORE, add_search

Action = Callable[[argparse.Namespace], Any]
Commands = Any  # argparse keeps the type of its subparsers private


def _command(
    commands: Commands, name: str, help: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help}\n\n{more}" if more else help,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_offline(parser)
    return parser


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add `--offline`, which may stand before a command or among its flags."""
    parser.add_argument(
        "--offline",
        action="store_true",
        default=argparse.SUPPRESS,
        help="refuse every connection that leaves this machine (also COTERIE_OFFLINE=1)",
    )


def add_account(commands: Commands, action: Action, *, calibrate: bool) -> None:
    """Add `account` (noise to epsilon) or `calibrate` (epsilon to noise)."""
    name = "calibrate" if calibrate else "account"
    given = "--epsilon 2" if calibrate else "--noise-multiplier 10"
    parser = _command(
        commands,
        name,
        "from a budget to the noise it needs" if calibrate else "from noise to the epsilon it buys",
        f"coterie {name} --clients 205 --cohort 100 --rounds 1000 {given} --delta 1e-5 --json",
    )
    parser.add_argument("--clients", type=int, required=True, help="how many clients there are")
    parser.add_argument("--cohort", type=float, help="expected clients a round (default: all)")
    parser.add_argument("--rounds", type=int, required=True, help="how many posts")
    if calibrate:
        parser.add_argument("--epsilon", type=float, required=True, help="the budget")
    else:
        parser.add_argument(
            "--noise-multiplier", type=float, required=True, help="noise of the sum over the clip"
        )
    parser.add_argument("--delta", type=float, help="default min(1e-5, 1/(10 clients))")
    parser.add_argument(
        "--noise",
        choices=("gaussian", "local"),
        help="added by the server (default), or by each client to its own contribution",
    )
    _add_view(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=action)


def _add_view(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--relation",
        choices=("zero_out", "replace"),
        default=None,
        help="neighbours: a client's contributions zeroed (default) or replaced by another's",
    )
    parser.add_argument(
        "--sampling", choices=("poisson", "everyone", "fixed"), help="default poisson"
    )
    parser.add_argument(
        "--cohort-visible", action="store_true", help="others can see who takes part"
    )


_ADVICE = """\
Without --data and --plan nothing but the numbers given is looked at: --clients, and --numbers or
--features (how many) and --classes; --epsilon, or --noise-multiplier (then --epsilon is a limit on
the rounds); --cohort, --sampling, --rounds, --delta, --relation. The verdict on joining is that of
pfeb, the noise that of a sum under one clip. With --data or --plan it is that of the method, from
what is public of the data: clients, features, classes. The exit status is 0 whatever the verdict.

--json prints one object: verdict ("join", "small gain", "learn alone", or null where the rule
knows nothing of the plan), words, remedies, clients, numbers (posted), most_numbers, rounds, clip,
mu, worth = (0.3 clients mu)^2 / numbers, epsilon, delta, relation; needs has for "small gain" and
"join" the clients, epsilon and numbers that would do; by_epsilon is the table; data, method and
chosen (why) come where a plan was given. Of the noise: noise_multiplier, epsilon_spent,
epsilon_by_view, error (per_number, over_clip, relative), within (what keeps error.relative
within 0.3), rounds_at_noise, epsilon_by_rounds, error_by_clients: docs/plan.md has them all."""


def add_advice(commands: Commands, action: Action) -> None:
    """Add `plan`."""
    help = "whether joining pays and what it costs, before any data is touched"
    example = "coterie plan --clients 550 --epsilon 1 --numbers 10"
    parser = _command(commands, "plan", help, example, _ADVICE)
    budget = _add_plan(parser)
    reword(
        parser,
        clients=("N", "how many there are; with --data: take the first so many"),
        features=("N|COLUMN,COLUMN", "how many there are; with --data: which (default: all)"),
        noise_multiplier=("NUMBER", "instead of --epsilon, which then limits the rounds"),
    )
    budget.add_argument("--epsilon", type=float, help="of the whole run (default 1)")
    parser.add_argument(
        "--numbers", type=int, help="instead of data: shared weights, such as features + 1"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        action="append",
        default=[],
        help="draw epsilon against rounds and noise against clients (.html, .svg or .png)",
    )
    parser.add_argument("--no-plot", action="store_true", help="no sketches in the terminal")
    parser.add_argument(
        "--full", action="store_true", help="all answers, also those that take some seconds"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="e.g. method.lam=0.3"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=action)


def add_run(commands: Commands, action: Action) -> None:
    """Add `run`."""
    parser = _command(
        commands,
        "run",
        "train one model per client under a budget, from flags or a TOML plan",
        "coterie run --data districts --epsilon 1",
    )
    budget = _add_plan(parser)
    budget.add_argument(
        "--epsilon",
        type=_epsilons,
        metavar="NUMBER[,NUMBER]",
        help="of the whole run; inf for no privacy; several (0.3,1,3) train once for each, beside "
        "learning alone and learning without privacy",
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="DIR", help="run folder (default runs/DATA-METHOD-TIME)")
    run.add_argument("--resume", metavar="DIR", help="go on with an interrupted run")
    run.add_argument(
        "--wait",
        metavar="SECONDS|all|75%",
        help="put clients on a virtual clock: a round waits so long, for all of them, or for about "
        "this share; more settings: --set stragglers.KEY=VALUE",
    )
    of_clock = "of clients on a virtual clock"
    run.add_argument("--hardware", choices=("equal", "spread"), help=of_clock)
    run.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        help="score every round on test rows, not private (default: where that is cheap)",
    )
    run.add_argument(
        "--holdout-clients",
        dest="newcomers",
        type=_share,
        metavar="SHARE|NUMBER",
        help="clients to hold out of training and onboard afterwards; they release nothing",
    )
    run.add_argument("--newcomers", type=_share, help=argparse.SUPPRESS)
    _add_work(run)
    add_tracking(run)
    parser.set_defaults(action=action)


def add_tracking(group: argparse._ArgumentGroup) -> None:
    """Add `--track`, for commands that make runs."""
    group.add_argument(
        "--track",
        metavar="mlflow|tensorboard",
        action="append",
        default=[],
        help="log the finished run there too: settings, epsilon and scores by round, certificate "
        "and page; never models (may be repeated)",
    )
    group.add_argument(
        "--track-dir",
        metavar="DIR",
        help="where to (default: MLFLOW_TRACKING_URI or ./mlruns; RUN/tensorboard)",
    )


def add_tune(commands: Commands, action: Action) -> None:
    """Add `tune`."""
    parser = _command(
        commands,
        "tune",
        "choose settings by cross-validation inside clients, or by private runs (--charge)",
        "coterie tune --data synthetic --method pmtl --grid method.lam=0.1,0.3,1 "
        "--grid privacy.clip=0.25,0.5",
        MORE,
    )
    add_search(parser)
    budget = _add_plan(parser)
    budget.add_argument("--epsilon", type=float, help="of one run; inf for no privacy")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", metavar="PATH", help="the plan (tuned.toml); with --charge a folder (selected)"
    )
    _add_work(run)
    parser.set_defaults(action=action)


def _add_plan(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add plan, method, data and budget, less epsilon; give the budget's group."""
    parser.add_argument("--plan", metavar="FILE", help="a TOML plan; flags override it")
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="see `coterie methods` (default auto: picked by rule from model and budget, and why)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="linear, mlp, cnn, femnist_cnn, ... (see `coterie methods`)"
    )
    parser.add_argument(
        "--finetune",
        choices=("plain", "mean", "kl", "ewc"),
        help="finetune every client's model after the last round, at no cost; settings: "
        "--set finetune.lam=1",
    )
    add_source(parser, positional=False)
    budget = parser.add_argument_group("budget")
    budget.add_argument("--noise-multiplier", type=float, help="instead of --epsilon")
    budget.add_argument("--delta", type=float, help="default min(1e-5, 1/(10 clients))")
    budget.add_argument(
        "--noise",
        metavar="KIND",
        help="gaussian (default; added by the server), local (by each client), laplace, wishart",
    )
    budget.add_argument(
        "--clip", type=float, help="bound on a client's contribution (default: the method's)"
    )
    budget.add_argument("--rounds", type=int, help="default: as many as the budget bears")
    budget.add_argument("--cohort", type=float, help="expected clients a round (default: all)")
    _add_view(budget)
    return budget


def reword(parser: argparse.ArgumentParser, **said: tuple[str, str]) -> None:
    """Say of flags that several commands share what they are to this one: metavar and help."""
    for action in parser._actions:
        if action.dest in said:
            action.metavar, action.help = said[action.dest]


def _add_work(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--simulation-seed", type=int, help="reproducible noise: a simulation, protects nobody"
    )
    run.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="e.g. method.lam=0.3"
    )
    run.add_argument("--device", help="cpu (default) or cuda")
    run.add_argument(
        "--precision", choices=("float32", "bfloat16"), help="of products in networks' steps"
    )
    run.add_argument("--block", type=int, help="clients computed side by side")
    run.add_argument("--store", choices=("memory", "disk"), help="where personal models live")
    run.add_argument(
        "--no-local", action="store_true", help="do not train the local baseline"
    )
    run.add_argument(
        "--baselines",
        nargs="?",
        const="all",
        type=_baselines,
        metavar="LIST",
        help="also score these baselines: local_star, centralised, mixed (default: all)",
    )
    run.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _baselines(text: str) -> tuple[str, ...]:
    """Return the baselines of a list with commas; `pooled` is the name of a method."""
    from coterie.evaluation.baselines import TITLES, check_baselines

    if text == "all":
        return tuple(TITLES)
    names = tuple("centralised" if name == "pooled" else name for name in text.split(","))
    try:
        check_baselines(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def add_source(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    """Add the options that say which data, and how to read them."""
    group = parser.add_argument_group("data")
    named = "districts, digits, synthetic:KIND, mpmtl:KIND, mtlsvm:regression"
    helped = f"a name ({named}) or a file (csv, parquet, npz, mat, json, h5, sqlite, arrow)"
    if positional:
        group.add_argument("data", metavar="NAME|FILE", help=helped)
    else:
        group.add_argument("--data", metavar="NAME|FILE", help=helped)
        group.add_argument("--test", type=_share, help="held out: a share, or rows per client")
        group.add_argument(
            "--standardise", choices=("none", "client"), help="scale by each client's own rows"
        )
        group.add_argument("--rows", type=int, help="keep so many training rows a client")
    group.add_argument("--clients", type=int, help="take the first so many clients")
    group.add_argument("--client-column", metavar="COLUMN", help="default client")
    group.add_argument("--target", metavar="COLUMN[,COLUMN]", help="default y")
    group.add_argument("--features", metavar="COLUMN,COLUMN", help="default: all other columns")
    group.add_argument("--task", choices=("regression", "binary", "multiclass", "multilabel"))
    group.add_argument("--classes", metavar="N|A,B,C", help="declared classes")
    group.add_argument("--positive", metavar="A[,B]", help="classes that are 1; the rest is 0")
    group.add_argument(
        "--levels", metavar="COLUMN=A,B,C", action="append", default=[], help="declared levels"
    )
    group.add_argument(
        "--text", choices=("bag", "indices"), help="of text columns: bag of words, or word numbers"
    )
    group.add_argument(
        "--vocabulary", metavar="FILE", help="the public words of text, one a line (for --text)"
    )
    group.add_argument("--length", type=int, help="words or characters a row (--text indices)")
    group.add_argument("--tags", metavar="FILE", help="the public tags that are classes")
    group.add_argument("--images", metavar="DIR", help="where image files named in rows are")
    group.add_argument("--missing", choices=("error", "drop"), help="rows with gaps")
    group.add_argument(
        "--targets-are-clients", action="store_true", help="each target column is a client"
    )
    group.add_argument(
        "--option", metavar="KEY=VALUE", action="append", default=[], help="of a named data set"
    )


def add_demo(commands: Commands, action: Action) -> None:
    """Add `demo`."""
    parser = _command(
        commands,
        "demo",
        "local, FedAvg, PMTL and what auto picks side by side on real data, with a report",
        "coterie demo --epsilon 1",
    )
    parser.add_argument("--data", default="districts", help="default districts")
    parser.add_argument("--epsilon", type=float, default=1.0, help="default 1")
    parser.add_argument("--out", metavar="DIR", help="default runs/demo-TIME")
    parser.add_argument("--simulation-seed", type=int, help="reproducible, protects nobody")
    parser.set_defaults(action=action)


def add_methods(commands: Commands, action: Action) -> None:
    """Add `methods`."""
    parser = _command(commands, "methods", "the methods and their settings", "coterie methods")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=action)


def add_data(commands: Commands, action: Action) -> None:
    """Add `data show`."""
    parser = _command(
        commands, "data", "look at client-partitioned data", "coterie data show districts"
    )
    inner = parser.add_subparsers(dest="data_command", required=True, metavar="show")
    show = _command(
        inner,
        "show",
        "clients, rows per client, features, classes (for the data's owner; not private)",
        "coterie data show exam.csv --client-column school --target score",
    )
    add_source(show, positional=True)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(action=action)


def add_report(commands: Commands, action: Action) -> None:
    """Add `report`."""
    parser = _command(
        commands, "report", "one HTML page for one run or several", "coterie report runs/*"
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--out", metavar="FILE", help="default RUN/report.html of the first run")
    parser.add_argument(
        "--figures", metavar="DIR", help="also write every chart of the page as PNG and SVG"
    )
    parser.set_defaults(action=action)


def add_join(commands: Commands, action: Action) -> None:
    """Add `join`."""
    parser = _command(
        commands,
        "join",
        "models for clients who come after training; nothing of theirs is posted",
        "coterie join runs/har-mtlsvm --data newcomers.npz --out newcomers",
        "Rows are read and scaled as the run's were; what contradicts its plan is refused.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    add_source(parser, positional=False)
    parser.add_argument("--out", metavar="DIR", required=True, help="where to keep the models")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(action=action)


def _epsilons(text: str) -> float | tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1, or 0.3,1,3") from None
    return found[0] if len(found) == 1 else found


def _share(text: str) -> float | int:
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0.25 or 2") from None
