"""Flags that several commands share, and their checks, which import neither torch nor numpy."""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.core.environment import entry_points
from coterie.core.files import refuse_special
from coterie.core.suggest import did_you_mean
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
    action: Action | None = None,
) -> argparse.ArgumentParser:
    """Add a command with its help, an example, its flags, and `--offline`."""
    about = help[:1].upper() + help[1:]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{about}\n\n{more}" if more else about,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_offline(parser)
    add_flags(parser, flags or {})
    parser.set_defaults(action=action)
    return parser


def add_flags(parser: argparse._ActionsContainer, flags: Mapping[str, str]) -> None:
    """Add flags by their shape and help.

    Shapes are "--json" (a switch), "--out DIR", "--rounds N:int" (with a type), "--task {a,b}" (a
    choice) and "--set KEY=VALUE..." (may be repeated).
    """
    types = {"int": int, "float": float, "share": share, "": str}
    for shape, text in flags.items():
        flag, _, value = shape.partition(" ")
        how: dict[str, Any] = {"help": text}
        if not value:
            how["action"] = "store_true"
        elif value.startswith("{"):
            how["choices"] = tuple(value[1:-1].split(","))
        elif value.endswith("..."):
            how |= {"metavar": value[:-3], "action": "append", "default": []}
        else:
            how["metavar"], _, kind = value.partition(":")
            how["type"] = types[kind]
        parser.add_argument(*flag.split("/"), **how)


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add `--offline`, which may stand before a command or among its flags."""
    text = "refuse every connection that leaves this machine (also COTERIE_OFFLINE=1)"
    parser.add_argument("--offline", action="store_true", default=argparse.SUPPRESS, help=text)


VIEW = {
    "--relation {zero_out,replace}": "neighbouring relation: a client's contributions become zero "
    "(default) or those of another client",
    "--sampling {poisson,everyone,fixed}": "how clients are sampled (default poisson)",
    "--cohort-visible": "the adversary observes the cohort",
}
"""The neighbouring relation and who takes part."""
TRACKING = {
    "--track mlflow|tensorboard...": "also log the finished run there: settings, epsilon and "
    "scores by round, certificate and report; never models (may be repeated)",
    "--track-dir DIR": "folder of the tracker (default: MLFLOW_TRACKING_URI or ./mlruns; "
    "RUN/tensorboard)",
}
SET = {"--set KEY=VALUE...": "e.g. method.lam=0.3"}
TRUST = {"--trust": "import and run the code that a run or model of others names (docs: Trust)"}
JSON = {"--json": "print one JSON object"}
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
            "--clip NUMBER:float": "bound on a client's contribution (default: the method's)",
            "--rounds N:int": "default: as many as the budget affords",
            "--cohort NUMBER:float": "expected clients per round (default: all)",
            **VIEW,
        },
    )
    return budget


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
            "--precision {float32,bfloat16}": "precision of matrix products in networks",
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
    named = "districts, digits, synthetic:KIND, mpmtl:KIND, mtlsvm:regression"
    helped = f"a name ({named}) or a file (csv, parquet, npz, mat, json, h5, sqlite, arrow)"
    if positional:
        group.add_argument("data", metavar="NAME|FILE", help=helped)
    else:
        add_flags(group, {"--data NAME|FILE": helped, **_SPLIT})
    add_flags(group, _COLUMNS)


_SPLIT = {
    "--test SHARE|N:share": "test rows: a share, or a number per client",
    "--standardise {none,client}": "scale by each client's own rows",
    "--rows N:int": "largest number of training rows per client",
}
_COLUMNS = {
    "--clients N:int": "use the first N clients",
    "--client-column COLUMN": "column that names the client (default client)",
    "--target COLUMN[,COLUMN]": "column to predict (default y)",
    "--features COLUMN,COLUMN": "columns to predict from (default: all others)",
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


def print_json(found: Mapping[str, Any]) -> None:
    """Print one strict JSON object: infinity is "inf", not-a-number is null."""
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


def check_file(path: Path, flag: str) -> Path:
    """Return a path that a file can be written to; raise ValueError if it cannot."""
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
        check_name("--method ", given["method"], "methods")
    if "model" in given and ":" not in given["model"]:
        check_name("--model ", given["model"], "models")
    _check_noise(given)
    _check_numbers(given)
    if "plan" in given and not Path(given["plan"]).is_file():
        raise ValueError(f"{given['plan']}: cannot be read (no such file); check the path")
    if "resume" in given:
        check_run(given["resume"])
    from coterie.cli.flags import pair

    for name in ("set", "grid", "option", "levels", "dates"):
        for text in given.get(name, ()):
            pair(text, f"--{name}")


def check_data(data: str) -> None:
    """Raise ValueError if data is neither a file, nor an address, nor the name of a dataset."""
    known = names()["data"]
    kinds = {name.partition(":")[0] for name in known}
    if data.partition(":")[0] in kinds or "://" in data or Path(data).exists():
        return
    meant = did_you_mean(data, known, "a file, or one of ")
    raise ValueError(f"{data}: no such file, and no dataset of that name; {meant}")


def check_run(folder: str) -> Path:
    """Return the path of a run folder; raise ValueError if there is none."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; expected a run folder, such as runs/NAME")
    refuse_special(Path(folder))
    return Path(folder)


def check_name(flag: str, given: str, kind: str) -> None:
    """Raise ValueError for an unknown name of a method or model."""
    known = names()[kind]
    if given not in known:
        meant = did_you_mean(given, known)
        raise ValueError(f"{flag}{given}: no such {kind[:-1]}; {meant}")


def _check_noise(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown kind of noise."""
    kind = given.get("noise")
    if kind is not None and kind not in noise_names():
        raise ValueError(f"--noise {kind}: no such noise; {did_you_mean(kind, noise_names())}")


def _check_numbers(given: Mapping[str, Any]) -> None:
    epsilon = given.get("epsilon", ())
    for value in epsilon if isinstance(epsilon, tuple) else (epsilon,):
        if not value > 0:
            raise ValueError(f"epsilon = {value}: expected a positive number, or inf")
    for name in ("noise_multiplier", "clip", "cohort"):
        if name in given and not 0 < given[name] < math.inf:
            raise ValueError(f"{name} = {given[name]}: expected a positive number")
    delta = given.get("delta")
    if delta is not None and not (delta == 0 or 1e-30 <= delta < 1):
        raise ValueError(
            f"--delta {delta:g}: expected a number from 1e-30 to below 1, or 0 for pure epsilon "
            "(Laplace noise)"
        )
    if given.get("rounds", 1) < 1:
        raise ValueError(f"rounds = {given['rounds']}: expected a whole number of at least 1")


def names() -> Mapping[str, list[str]]:
    """Return the names of methods, models and data, read from source: importing is slow."""
    data = _sources("data")
    kinds = re.search(r"^Kind = Literal\[(.*?)\]", data["synthetic.py"], re.S | re.M)
    found = re.findall(r'^    "([a-z_:]+)":', data["datasets.py"], re.M)
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
