"""Flags that several commands share, and their checks, which import neither torch nor numpy."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.cli.front import closest
from coterie.core.environment import entry_points
from coterie.privacy import noise_names

Action = Callable[[argparse.Namespace], Any]
Commands = Any  # argparse keeps the type of its subparsers private
NO_DATA = "no data: give --data NAME|FILE, for example --data districts"
BASELINES = ("local", "local_star", "centralised", "mixed")


def command(
    commands: Commands, name: str, help: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command with its help, an example, and `--offline`."""
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


def add_view(parser: argparse._ActionsContainer) -> None:
    """Add the neighbouring relation and who takes part."""
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
        "--cohort-visible", action="store_true", help="the adversary observes the cohort"
    )


def add_tracking(group: argparse._ArgumentGroup) -> None:
    """Add `--track`, for commands that make runs."""
    group.add_argument(
        "--track",
        metavar="mlflow|tensorboard",
        action="append",
        default=[],
        help="also log the finished run there: settings, epsilon and scores by round, certificate "
        "and report; never models (may be repeated)",
    )
    group.add_argument(
        "--track-dir",
        metavar="DIR",
        help="where to (default: MLFLOW_TRACKING_URI or ./mlruns; RUN/tensorboard)",
    )


def add_plan(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add plan, method, data and budget without epsilon; return the budget's group."""
    parser.add_argument("--plan", metavar="FILE", help="a TOML plan; flags override it")
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="see `coterie methods` (default auto: chosen by rule, with the reason)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="linear, mlp, cnn, femnist_cnn, ... (see `coterie methods`)"
    )
    parser.add_argument(
        "--finetune",
        choices=("plain", "mean", "kl", "ewc"),
        help="finetune every client's model after the last round, at no privacy cost; settings: "
        "--set finetune.lam=1",
    )
    add_source(parser, positional=False)
    budget = parser.add_argument_group("budget")
    budget.add_argument("--noise-multiplier", type=float, help="instead of --epsilon")
    budget.add_argument("--delta", type=float, help="default min(1e-5, 1/(10 clients))")
    budget.add_argument(
        "--noise",
        metavar="KIND",
        help=f"kind of noise: {', '.join(noise_names())} (default gaussian; local: by each client)",
    )
    budget.add_argument(
        "--clip", type=float, help="bound on a client's contribution (default: the method's)"
    )
    budget.add_argument("--rounds", type=int, help="default: as many as the budget affords")
    budget.add_argument("--cohort", type=float, help="expected clients per round (default: all)")
    add_view(budget)
    return budget


def reword(parser: argparse.ArgumentParser, **texts: tuple[str, str]) -> None:
    """Replace metavar and help of flags that mean something else to this command."""
    for action in parser._actions:
        if action.dest in texts:
            action.metavar, action.help = texts[action.dest]


def add_work(run: argparse._ArgumentGroup) -> None:
    """Add seed, settings, device, and what is printed."""
    run.add_argument(
        "--simulation-seed", type=int, help="reproducible noise: a simulation that protects nobody"
    )
    run.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="e.g. method.lam=0.3"
    )
    run.add_argument("--device", help="cpu (default) or cuda")
    run.add_argument(
        "--precision", choices=("float32", "bfloat16"), help="of matrix products in networks"
    )
    run.add_argument("--block", type=int, help="clients computed side by side (default: by size)")
    run.add_argument("--store", choices=("memory", "disk"), help="where personal models live")
    run.add_argument("--no-local", action="store_true", help="do not train the local baseline")
    run.add_argument(
        "--baselines",
        nargs="?",
        const=BASELINES,
        type=_baselines,
        metavar="LIST",
        help="also score these baselines: local_star, centralised, mixed (default: all)",
    )
    run.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")


def add_source(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    """Add the flags that say which data to read, and how."""
    group = parser.add_argument_group("data")
    named = "districts, digits, synthetic:KIND, mpmtl:KIND, mtlsvm:regression"
    helped = f"a name ({named}) or a file (csv, parquet, npz, mat, json, h5, sqlite, arrow)"
    if positional:
        group.add_argument("data", metavar="NAME|FILE", help=helped)
    else:
        group.add_argument("--data", metavar="NAME|FILE", help=helped)
        group.add_argument("--test", type=share, help="test rows: a share, or rows per client")
        group.add_argument(
            "--standardise", choices=("none", "client"), help="scale by each client's own rows"
        )
        group.add_argument("--rows", type=int, help="use at most so many training rows per client")
    group.add_argument("--clients", type=int, help="use the first N clients")
    _add_columns(group)


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--client-column", metavar="COLUMN", help="default client")
    group.add_argument("--target", metavar="COLUMN[,COLUMN]", help="default y")
    group.add_argument("--features", metavar="COLUMN,COLUMN", help="default: all other columns")
    group.add_argument("--task", choices=("regression", "binary", "multiclass", "multilabel"))
    group.add_argument("--classes", metavar="N|A,B,C", help="declared classes")
    group.add_argument(
        "--positive", metavar="A[,B]", help="classes that count as 1; the others as 0"
    )
    group.add_argument(
        "--levels", metavar="COLUMN=A,B,C", action="append", default=[], help="declared levels"
    )
    group.add_argument(
        "--text", choices=("bag", "indices"), help="for text columns: bag of words, or word indices"
    )
    group.add_argument(
        "--vocabulary", metavar="FILE", help="public vocabulary, one word per line (for --text)"
    )
    group.add_argument("--length", type=int, help="words or characters per row (--text indices)")
    group.add_argument("--tags", metavar="FILE", help="public list of the tags that are classes")
    group.add_argument("--images", metavar="DIR", help="folder of the image files named in rows")
    group.add_argument("--missing", choices=("error", "drop"), help="rows with missing values")
    group.add_argument(
        "--targets-are-clients", action="store_true", help="each target column is a client"
    )
    group.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="option of a named data set",
    )


def share(text: str) -> float | int:
    """Return a share or a count, for argparse."""
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0.25 or 2") from None


def check_file(path: Path, flag: str) -> Path:
    """Return a path that a file can be written to.

    Raises:
        ValueError: If it is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise ValueError(f"{flag} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: no such folder as {path.parent}; make it first")
    return path


def _baselines(text: str) -> tuple[str, ...]:
    """Return the baselines of a comma-separated list; `pooled` is the name of a method."""
    names = tuple("centralised" if name == "pooled" else name for name in text.split(","))
    if text != "all" and (unknown := [name for name in names if name not in BASELINES]):
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r}: expected some of {', '.join(BASELINES)}, or all"
        )
    return BASELINES if text == "all" else names


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that cannot be right, before anything slow is imported.

    The plan checks its values again: this only answers faster.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if "data" in given:
        check_data(given["data"])
    if "method" in given:
        _check_name("--method", given["method"], "methods")
    if "model" in given and ":" not in given["model"]:
        _check_name("--model", given["model"], "models")
    _check_numbers(given)
    if "plan" in given and not Path(given["plan"]).is_file():
        raise ValueError(f"{given['plan']}: cannot be read (no such file); check the path")
    if "resume" in given:
        check_run(given["resume"])
    _check_pairs(given)


def check_data(data: str) -> None:
    """Raise ValueError if data is neither a file, nor an address, nor the name of a data set."""
    known = names()["data"]
    kinds = {name.partition(":")[0] for name in known}
    if data.partition(":")[0] in kinds or "://" in data or Path(data).exists():
        return
    near = closest(data, known)
    meant = f"did you mean {near}?" if near else f"expected a file, or one of {', '.join(known)}"
    raise ValueError(f"{data}: no such file, and no data set of that name; {meant}")


def check_run(folder: str) -> Path:
    """Return the path of a run folder; raise ValueError if there is none."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; expected a run folder, such as runs/NAME")
    return Path(folder)


def _check_name(flag: str, given: str, kind: str) -> None:
    known = names()[kind]
    if given not in known:
        near = closest(given, known)
        meant = f"did you mean {near}?" if near else f"expected one of {', '.join(known)}"
        raise ValueError(f"{flag} {given}: no such {kind[:-1]}; {meant}")


def _check_pairs(given: Mapping[str, Any]) -> None:
    from coterie.cli.flags import pair

    for name in ("set", "grid", "option", "levels"):
        for text in given.get(name, ()):
            pair(text, f"--{name}")


def _check_numbers(given: Mapping[str, Any]) -> None:
    epsilon = given.get("epsilon", ())
    for value in epsilon if isinstance(epsilon, tuple) else (epsilon,):
        if not value > 0:
            raise ValueError(f"epsilon = {value}: expected a positive number, or inf")
    for name in ("noise_multiplier", "clip", "cohort"):
        if name in given and not 0 < given[name] < math.inf:
            raise ValueError(f"{name} = {given[name]}: expected a positive number")
    if given.get("rounds", 1) < 1:
        raise ValueError(f"rounds = {given['rounds']}: expected a whole number of at least 1")


def names() -> Mapping[str, list[str]]:
    """Return the names of methods, models and data, read from source: importing is slow."""
    package = files("coterie")
    methods = {"auto", *_registered(package.joinpath("methods"), "register")}
    methods |= {point.name for point in entry_points(group="coterie.methods")}
    data = package.joinpath("data")
    catalogue = data.joinpath("datasets.py").read_text(encoding="utf-8")
    kinds = re.search(r"^Kind = Literal\[(.*?)\]", _read(data, "synthetic.py"), re.S | re.M)
    found = re.findall(r'^    "([a-z_:]+)":', catalogue, re.M)
    found += [f"synthetic:{kind}" for kind in re.findall(r'"(\w+)"', kinds[1] if kinds else "")]
    return {
        "methods": sorted(methods),
        "models": sorted(_registered(package.joinpath("models"), "register_model")),
        "data": sorted(found),
    }


def _registered(folder: Any, decorator: str) -> set[str]:
    """Return the names that the files of a folder register."""
    sources = (entry for entry in folder.iterdir() if entry.name.endswith(".py"))
    pattern = re.compile(rf'^@{decorator}\(\s*"(\w+)"', re.M)
    return {name for entry in sources for name in pattern.findall(entry.read_text("utf-8"))}


def _read(folder: Any, name: str) -> str:
    return str(folder.joinpath(name).read_text(encoding="utf-8"))
