"""Flags that several commands share, and their checks, which import neither torch nor numpy."""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coterie.cli.front import Parser
from coterie.core.environment import entry_points
from coterie.core.files import refuse_special
from coterie.core.suggest import closest, did_you_mean
from coterie.privacy import noise_names

Action = Callable[[argparse.Namespace], Any]
Commands = Any  # argparse keeps the type of its subparsers private
NO_DATA = "no data: give --data NAME|FILE, for example --data districts"
_WITH_RESUME = (
    "resume", "trust", "workers", "json", "quiet", "no_report", "track", "track_dir", "command",
    "action",
)  # fmt: skip
BASELINES = ("local", "local_star", "centralised", "mixed")


def command(
    commands: Commands,
    name: str,
    help: str,
    example: str,
    more: str = "",
    *,
    flags: Mapping[str, str] | None = None,
    usual: str = "",
    action: Action | None = None,
) -> Parser:
    """Add a command with its help, an example, its flags, and `--offline`.

    `usual` are the flags that `--help` shows, in order; without them it shows all.
    """
    about = help[:1].upper() + help[1:]
    parser: Parser = commands.add_parser(
        name,
        help=help,
        description=f"{about}\n\n{more}" if more else about,
        epilog=f"example:\n  {example}",
    )
    if usual:
        parser.shorten(tuple(usual.split()))
    add_offline(parser)
    add_flags(parser, flags or {})
    parser.set_defaults(action=action)
    return parser


def add_flags(parser: argparse._ActionsContainer, flags: Mapping[str, str]) -> None:
    """Add flags by their shape and help.

    Shapes are "--json" (a switch), "--out DIR", "--rounds N:int" (with a type), "--task {a,b}" (a
    choice) and "--set KEY=VALUE..." (may be repeated, as a choice may).
    """
    types = {"int": int, "float": float, "share": share, "seeds": seeds, "clip": clip, "": str}
    for shape, text in flags.items():
        flag, _, value = shape.partition(" ")
        how: dict[str, Any] = {"help": text}
        if not value:
            how["action"] = "store_true"
        if value.endswith("..."):
            how |= {"metavar": value[:-3], "action": "append", "default": []}
        if value.startswith("{"):
            how["choices"] = tuple(value.strip("{.}").split(","))
        elif value and "action" not in how:
            how["metavar"], _, kind = value.partition(":")
            how["type"] = types[kind]
        parser.add_argument(*flag.split("/"), **how)


def clip(text: str) -> float | str:
    """Read a clip: a number, or "adaptive"."""
    return text if text == ADAPTIVE else float(text)


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add `--offline`, which may stand before a command or among its flags."""
    text = "refuse every connection that leaves this machine (also COTERIE_OFFLINE=1)"
    parser.add_argument("--offline", action="store_true", default=argparse.SUPPRESS, help=text)


VIEW = {
    "--relation {zero_out,replace}": "neighbouring relation: a client's contributions become zero "
    "(default) or those of another client",
    "--sampling {poisson,everyone,fixed,cyclic}": "how clients are sampled (default poisson; "
    "cyclic: each once in clients/cohort rounds, by a public schedule)",
    "--cohort-visible": "the adversary observes the cohort",
}
"""The neighbouring relation and who takes part."""
SHARES = {
    "--trust {server,nobody}": "nobody: all clients add the noise in shares, and the coordinator "
    "sees only sums of many clients (default server, which adds the noise)",
    "--minimum-clients N:int": "with --trust nobody: clients in a sum, at least (default two "
    "thirds)",
    "--corrupt N:int": "with --trust nobody: clients that may collude with an adversary, at most "
    "(default a tenth of the minimum)",
}
"""Noise in shares."""
TRACKING = {
    "--track {mlflow,tensorboard}...": "also log the finished run there: settings, epsilon and "
    "scores by round, certificate and report; never models (may be repeated)",
    "--track-dir DIR": "folder of the tracker (default: MLFLOW_TRACKING_URI or ./mlruns; "
    "RUN/tensorboard)",
}
SET = {"--set KEY=VALUE...": "e.g. method.lam=0.3"}
TRUST = {"--trust": "import and run the code that a run or model of others names (docs: Trust)"}
JSON = {"--json": "print one JSON object"}
ADAPTIVE = "adaptive"
EPSILONS = "NUMBER[,NUMBER]"
BLOCK = "number of clients that are computed together (default: by size)"


def add_plan(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add plan, method, data and budget without epsilon; return the budget's group."""
    finetune = "finetune every client's model after the last round, at no privacy cost; settings: "
    add_flags(
        parser,
        {
            "--plan FILE": "a TOML plan; flags override it",
            "--method NAME": "see `coterie methods` (default auto: chosen by rule, with reasons)",
            "--model NAME": "linear, mlp, cnn, ... (see `coterie methods`), or your own class: "
            "nets:Net of nets.py",
            "--finetune {plain,mean,kl,ewc}": f"{finetune}--set finetune.lam=1",
        },
    )
    add_source(parser)
    noise = f"kind of noise: {', '.join(noise_names())} (default gaussian; local: by each client)"
    budget = parser.add_argument_group("budget")
    add_flags(
        budget,
        {
            "--noise-multiplier NUMBER:float": "instead of --epsilon",
            "--delta NUMBER:float": "default min(1e-5, 1/(10 clients))",
            "--noise KIND": noise,
            "--clip NUMBER:clip": "bound on a client's contribution (default: the method's), or "
            "adaptive: it follows the norms, at a share of epsilon (--set adaptive.quantile=0.5)",
            "--rounds N:int": "default: as many as the budget affords",
            "--cohort NUMBER:float": "expected clients per round (default: all)",
            **VIEW,
        },
    )
    return budget


def check_shares(arguments: argparse.Namespace) -> bool:
    """Return whether clients add the noise in shares; raise ValueError for flags without effect."""
    if arguments.trust == "nobody":
        if arguments.noise not in (None, "gaussian", "shares"):
            raise ValueError(
                f"--trust nobody and --noise {arguments.noise}: noise in shares is Gaussian; leave "
                "one of them out"
            )
        return True
    for name in ("minimum_clients", "corrupt"):
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} goes with --trust nobody: add it, or leave this out"
            )
    return False


def reword(parser: argparse.ArgumentParser, **texts: tuple[str, str]) -> None:
    """Replace metavar and help of flags that mean something else to this command."""
    for action in parser._actions:
        if action.dest in texts:
            action.metavar, action.help = texts[action.dest]


def add_work(run: argparse._ArgumentGroup) -> None:
    """Add seed, settings, device, and what is printed."""
    add_flags(
        run,
        {
            "--simulation-seed N:int": "reproducible noise: a simulation that protects nobody",
            **SET,
            "--device DEVICE": "cpu (default) or cuda",
            "--precision {float32,bfloat16,tf32}": "precision of matrix products in networks",
            "--block N:int": BLOCK,
            "--store {memory,disk}": "where personal models are kept",
            "--no-local": "do not train the local baseline",
            "--json": "end with one JSON object on stdout",
            "--quiet": "no progress on stderr",
        },
    )
    run.add_argument(
        "--baselines",
        nargs="?",
        const=BASELINES,
        type=_baselines,
        metavar="LIST",
        help="also score these baselines: local_star, centralised, mixed (default: all)",
    )


def add_source(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add the flags that say which data to read, and how."""
    group = parser.add_argument_group("data")
    named = "districts, digits, synthetic:KIND, mpmtl:KIND, mtlsvm:regression, mixed:KIND"
    helped = f"a name ({named}) or a file (csv, parquet, npz, mat, json, h5, sqlite, arrow)"
    if positional:
        place: dict[str, Any] = {"nargs": "?", "default": argparse.SUPPRESS, "help": helped}
        group.add_argument("data", metavar="NAME|FILE", **place)
        add_flags(group, {"--data NAME|FILE": "the same, as for other commands"})
    else:
        add_flags(group, {"--data NAME|FILE": helped, **_SPLIT})
    add_flags(group, _COLUMNS)


_SPLIT = {
    "--test SHARE|N:share": "test rows: a share, or a number per client",
    "--standardise {none,client}": "scale by each client's own rows",
    "--rows N:int": "largest number of training rows per client",
    "--rows-per-client N:int": "usual number of rows of a client, declared as public, for the "
    "verdict",
    "--population NAME": "whose clients these are: `coterie budget` knows a client by its name "
    "there",
}
_COLUMNS = {
    "--clients N:int": "use the first N clients",
    "--client-column COLUMN": "column that names the client (default client)",
    "--target COLUMN[,COLUMN]": "column to predict (default y)",
    "--features COLUMN,COLUMN": "columns to predict from (default: all others)",
    "--formula TEXT": "fixed and random effects: 'score ~ bs(age, 5) + sex * stay + (1 + age | "
    "hospital)'",
    "--basis {none,spline}": "a formula by rule: splines, products, personal slopes of columns",
    "--encoder NAME": "a frozen public network that maps rows to features: nets:Encoder of "
    "nets.py, which makes a torch.nn.Module",
    "--task {regression,binary,multiclass,multilabel}": "type of the target (default: inferred from"
    " the target)",
    "--classes N|A,B,C": "number or names of the classes",
    "--positive A[,B]": "classes that count as 1; the others as 0",
    "--levels COLUMN=A,B,C...": "levels of a categorical column",
    "--text {bag,indices}": "for text columns: bag of words, or word indices",
    "--vocabulary FILE": "public vocabulary, one word per line (for --text)",
    "--length N:int": "words or characters per row (--text indices)",
    "--tags FILE": "public list of the tags that are classes",
    "--images DIR": "folder of the image files named in rows",
    "--dates COLUMN=ORIGIN...": "a column of dates: year, month, weekday, days since 2020-01-01",
    "--missing {error,drop,constant,client-median}": "rows with gaps: refuse or drop them, or fill "
    "gaps with a constant or the median of the client's own rows",
    "--indicators COLUMN,COLUMN": "add a 0/1 column for gaps in these (with filled gaps)",
    "--unit-rows": "divide each row by its l2 norm",
    "--targets-are-clients": "each target column is a client",
    "--option KEY=VALUE...": "option of a named dataset",
}


def new_folder(stem: str) -> Path:
    """Return a new path below runs/, named by a stem and the time."""
    base = Path("runs") / f"{stem.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def refuse_with_resume(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that would change a run or comparison that is resumed."""
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in _WITH_RESUME
        and value is not None
        and value is not False  # by identity: 0 is a value too
        and value != []
    ]
    if given:
        raise ValueError(f"--resume continues with the plan as it is; leave out {', '.join(given)}")


def progress_bar() -> Any:
    """Return a started progress bar on stderr."""
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar.start()
    return bar


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return one line per row, with the second column aligned."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def print_json(found: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one strict JSON value: infinity is "inf", not-a-number is null."""
    print(json.dumps(_strict(found), allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def share(text: str) -> float | int:
    """Return a share or a count, for argparse."""
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0.25 or 2") from None


def seeds(text: str) -> int | tuple[int, ...]:
    """Return a number of seeds, or the seeds, for argparse."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 3, or 1,2,5") from None
    return found[0] if len(found) == 1 else found


def epsilons(text: str) -> float | tuple[float, ...]:
    """Return an epsilon, or several, for argparse."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1, or 0.3,1,3") from None
    return found[0] if len(found) == 1 else found


def check_file(path: Path, flag: str) -> Path:
    """Return a path that a file can be written to; raise ValueError if it cannot."""
    if path.is_dir():
        raise ValueError(f"{flag} {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: no such folder as {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path}: the folder {path.parent} is not writable; name another")
    return path


def _baselines(text: str) -> tuple[str, ...]:
    """Return the baselines of a comma-separated list; `pooled` is the name of a method."""
    names = tuple("centralised" if name == "pooled" else name for name in text.split(","))
    if text != "all" and (unknown := [name for name in names if name not in BASELINES]):
        meant = did_you_mean(unknown[0], (*BASELINES, "all"))
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: no such baseline; {meant}")
    return BASELINES if text == "all" else names


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ValueError for flags that cannot be right, before anything slow is imported.

    The plan checks its values again: this only answers faster.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    for name, check in _CHECKS.items():
        if name in given:
            check(given[name])
    several = given["command"] == "compare"
    for method in given.get("method", "auto").split("," if several else None):
        check_name("--method ", method.strip(), "methods")
    _check_numbers(given)
    from coterie.cli.flags import check_plan, pair

    for name in ("set", "grid", "option", "levels", "dates"):
        for text in given.get(name, ()):
            pair(text, f"--{name}")
    if hasattr(arguments, "plan") and hasattr(arguments, "set"):
        check_plan(arguments)


def check_data(data: str) -> None:
    """Raise ValueError if data is neither a file, nor an address, nor the name of a dataset."""
    known, path = names()["data"], Path(data)
    if data in known or "://" in data or path.exists():
        return
    here = {file.stem: file for file in path.parent.iterdir()} if path.parent.is_dir() else {}
    near = closest(path.stem, here) if path.suffix else None
    if near is not None:
        meant = f"did you mean {here[near]}?"
    elif path.suffix or len(path.parts) > 1:
        meant = "check the path"
    else:
        meant = did_you_mean(data, known, "a file, or one of ")
    raise ValueError(f"{data}: no such file, and no dataset of that name; {meant}")


def check_run(folder: str, *parts: str) -> Path:
    """Return the path of a run folder; raise ValueError without one, or without these parts."""
    path = Path(folder)
    if not path.is_dir():
        found = "is a file" if path.exists() else "no such folder"
        raise ValueError(f"{folder}: {found}; expected a run folder, such as runs/NAME")
    refuse_special(path)
    if parts and not any((path / part).exists() for part in parts):
        missing = " or ".join(parts)
        raise ValueError(f"{folder}: no {missing} in it; expected a run folder, such as runs/NAME")
    return path


def check_name(flag: str, given: str, kind: str) -> None:
    """Raise ValueError for an unknown name of a method or model."""
    known = names()[kind]
    if given not in known:
        meant = did_you_mean(given, known)
        raise ValueError(f"{flag}{given}: no such {kind[:-1]}; {meant}")


def _check_model(given: str) -> None:
    """Raise ValueError for an unknown model, or a class in a module that does not exist."""
    module, colon, name = given.partition(":")
    path = Path(module)
    if colon and path.suffix == ".py":
        raise ValueError(f"--model {given}: did you mean {path.stem}:{name}?")
    if not colon and "." in given:
        file, _, name = given.rpartition(".")
        raise ValueError(f"--model {given}: a class of your own is written {file}:{name or 'Net'}")
    if not colon:
        check_name("--model ", given, "models")
        return
    top = module.partition(".")[0]
    if not top or not name:
        raise ValueError(f"--model {given}: expected FILE:CLASS, such as nets:Net of nets.py")
    if find_spec(top) is None and PathFinder.find_spec(top, [os.getcwd()]) is None:
        raise ValueError(f"--model {given}: no module {module}; expected {module}.py, here")


def _check_plan_file(path: Path) -> None:
    """Raise ValueError for a plan that is no file."""
    if path.is_dir():
        raise ValueError(f"--plan {path}: is a folder; expected a TOML file, such as plan.toml")
    if not path.is_file():
        raise ValueError(f"--plan {path}: no such file; check the path")


def _check_noise(kind: str) -> None:
    """Raise ValueError for an unknown kind of noise."""
    if kind not in noise_names():
        raise ValueError(f"--noise {kind}: no such noise; {did_you_mean(kind, noise_names())}")


def _check_numbers(given: Mapping[str, Any]) -> None:
    epsilon = given.get("epsilon", ())
    for value in epsilon if isinstance(epsilon, tuple) else (epsilon,):
        if not value > 0:
            raise ValueError(f"--epsilon {value:g}: expected a positive number, or inf")
    for name in ("noise_multiplier", "clip", "cohort"):
        if name in given and given[name] != ADAPTIVE and not 0 < given[name] < math.inf:
            flag = f"--{name.replace('_', '-')} {given[name]:g}"
            raise ValueError(f"{flag}: expected a positive number")
    delta = given.get("delta")
    if delta is not None and not (delta == 0 or 1e-30 <= delta < 1):
        raise ValueError(
            f"--delta {delta:g}: expected a number from 1e-30 to below 1, or 0 for pure epsilon "
            "(Laplace noise)"
        )
    if given.get("rounds", 1) < 1:
        raise ValueError(f"--rounds {given['rounds']}: expected a whole number of at least 1")


_CHECKS: Mapping[str, Callable[[str], Any]] = {
    "data": check_data,
    "model": _check_model,
    "noise": _check_noise,
    "plan": lambda plan: _check_plan_file(Path(plan)),
    "resume": check_run,
}
"""What checks the values of a flag."""


def names() -> Mapping[str, list[str]]:
    """Return the names of methods, models and data, read from source: importing is slow."""
    data = _sources("data")
    kinds = re.search(r"^Kind = Literal\[(.*?)\]", data["synthetic.py"], re.S | re.M)
    found = re.findall(r'^    "([a-z0-9_:]+)":', data["datasets.py"], re.M)
    found += [f"synthetic:{kind}" for kind in re.findall(r'"(\w+)"', kinds[1] if kinds else "")]
    plugins = {point.name for point in entry_points(group="coterie.methods")}
    models = "".join(_sources("models").values())
    return {
        "methods": sorted({*method_texts(), *plugins}),
        "models": sorted(re.findall(r'^@register_model\(\s*"(\w+)"', models, re.M)),
        "data": sorted(found),
    }


def method_texts() -> dict[str, tuple[str, str]]:
    """Return summary and releases of the methods of this package, "auto" first, from source."""
    sources = _sources("methods")
    auto = re.search(r'^class Auto\(.*?^    """(.*?)$', sources["auto.py"], re.S | re.M)
    found = {"auto": (auto[1] if auto else "", "as the chosen method")}
    pattern = re.compile(r'^@register\(\s*"(\w+)"(.*?)^class .*?^    """(.*?)$', re.S | re.M)
    for name, texts, summary in sorted(pattern.findall("\n".join(sources.values()))):
        releases = re.search(r'releases="(.*?)"', texts)
        found[name] = (summary.removesuffix('"""'), releases[1] if releases else "")
    return found


def _sources(package: str) -> dict[str, str]:
    folder = files("coterie").joinpath(package)
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".py"))
    return {entry.name: entry.read_text("utf-8") for entry in found}
