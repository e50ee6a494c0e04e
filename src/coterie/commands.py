"""What the commands that touch data do: build a run plan from flags, run it, show it."""

import argparse
import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.budget import make_sampler
from coterie.config import ConfigError, to_table
from coterie.data.describe import describe
from coterie.methods.base import registered
from coterie.privacy.accounting import Guarantee
from coterie.privacy.words import round_up, spent_together
from coterie.report import write_report
from coterie.run import (
    RunPlan,
    execute,
    load_plan,
    plan_from_table,
    read_toml,
)
from coterie.watch import Watch

_SHAPES = {
    "--set": ("KEY=VALUE", "method.lam=0.3"),
    "--option": ("KEY=VALUE", "clients=50"),
    "--levels": ("COLUMN=A,B,C", "kind=day,night"),
}


def run(arguments: argparse.Namespace) -> int:
    """Carry out `coterie run`."""
    if arguments.resume is not None:
        folder = Path(arguments.resume)
        _refuse_with_resume(arguments)
        run_plan = load_plan(folder / "plan.toml")
        if (folder / "result.json").exists():
            return _show_finished(folder, as_json=arguments.json)
    else:
        run_plan = plan_from_table(_table(arguments))
        folder = Path(arguments.out) if arguments.out else _new_folder(run_plan)
        if (folder / "plan.toml").exists():
            raise FileExistsError(
                f"{folder} already holds a run; go on with `coterie run --resume {folder}`, "
                "or choose another --out"
            )
    watch = Watch(quiet=arguments.quiet)
    try:
        result = execute(run_plan, folder=folder, observer=watch.open)
    except KeyboardInterrupt:
        watch.close()
        begun = (folder / "plan.toml").exists()
        told = f"go on with: coterie run --resume {folder}" if begun else "nothing was spent"
        print(f"interrupted; {told}", file=sys.stderr)
        return 130
    finally:
        watch.close()
    _show(folder, result.summary, result.outcome.guarantee, as_json=arguments.json)
    return 0


def _show_finished(folder: Path, *, as_json: bool) -> int:
    """Show a run that is done as it was: its last solve is not drawn a second time."""
    try:
        summary = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stated = json.loads((folder / "guarantee.json").read_text(encoding="utf-8"))
        guarantee, summary["run"] = Guarantee.from_json(stated), str(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}: result.json or guarantee.json is missing or damaged ({error!r}); "
            "restore them, or remove result.json to make both again"
        ) from error
    _show(folder, summary, guarantee, as_json=as_json)
    return 0


def _show(folder: Path, summary: Mapping[str, Any], guarantee: Guarantee, *, as_json: bool) -> None:
    write_report([folder], folder / "report.html")
    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return
    Console().print(_results_table([summary]))
    print(guarantee.statement())
    print(f"\nrun folder {folder}, report {folder / 'report.html'}")


def demo(arguments: argparse.Namespace) -> int:
    """Carry out `coterie demo`: local, FedAvg and PMTL on the same data, with a report."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    out = Path(arguments.out or f"runs/demo-{stamp}")
    results, folders = [], []
    for method in ("local", "fedavg", "pmtl"):
        table: dict[str, Any] = {
            "data": {"name": arguments.data},
            "method": {"kind": method},
            "privacy": {"epsilon": arguments.epsilon},
        }
        if arguments.simulation_seed is not None:
            table["simulation_seed"] = arguments.simulation_seed
            table["data"]["split_seed"] = arguments.simulation_seed
        print(f"training {method} on {arguments.data} ...", file=sys.stderr)
        watch = Watch(quiet=False)
        try:
            folder = out / method
            results.append(execute(plan_from_table(table), folder=folder, observer=watch.open))
            folders.append(folder)
        finally:
            watch.close()
    report = out / "report.html"
    write_report(folders, report)
    Console().print(_results_table([result.summary for result in results]))
    print(results[-1].outcome.guarantee.statement())
    print(f"\n{spent_together([result.outcome.guarantee for result in results])}\nreport: {report}")
    return 0


def methods(arguments: argparse.Namespace) -> None:
    """Carry out `coterie methods`."""
    found = {}
    for name, method in registered().items():
        summary = (method.__doc__ or "").strip().splitlines()[0]
        found[name] = {"summary": summary, "settings": to_table(method())}
        found[name]["settings"].pop("kind", None)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, about in found.items():
        print(f"{name}: {about['summary']}")
        for key, value in about["settings"].items():
            print(f"    method.{key} = {json.dumps(value)}")


def data_show(arguments: argparse.Namespace) -> None:
    """Carry out `coterie data show`."""
    choice = plan_from_table(
        {
            "data": _data_table(arguments),
            "method": {"kind": "local"},
            "privacy": {"epsilon": math.inf},
        }
    ).data
    facts = {"data": choice.name, **describe(choice.open())}
    if arguments.json:
        print(json.dumps(facts, indent=2, allow_nan=False))
        return
    for key, value in facts.items():
        for line in _lines(key, value):
            print(line)


def report(arguments: argparse.Namespace) -> None:
    """Carry out `coterie report`."""
    folders = [Path(run) for run in arguments.runs]
    out = Path(arguments.out) if arguments.out else folders[0] / "report.html"
    write_report(folders, out)
    print(out)


def _lines(key: str, value: Any) -> list[str]:
    label = key.replace("_", " ")
    if isinstance(value, Mapping):
        parts = ", ".join(f"{name} {_short(item)}" for name, item in value.items())
        return [f"{label:<20} {parts}"]
    if isinstance(value, list | tuple):
        return [f"{label if i == 0 else '':<20} {_short(item)}" for i, item in enumerate(value)]
    return [f"{label:<20} {_short(value)}"]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bound(epsilon: float | str) -> str:
    return epsilon if isinstance(epsilon, str) else round_up(epsilon)


def _score(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return "-"
    error = row["standard_error"]
    return _short(row["value"]) + ("" if error is None else f" ± {_short(error)}")


def _results_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first = rows[0]
    better = "smaller" if first["metric"] == "nmse" else "larger"
    table = Table(title=f"{first['data']}: {first['clients']} clients, one model each")
    table.add_column("method")
    table.add_column(f"test {first['metric']} ({better} is better)", justify="right")
    table.add_column("better off than alone", justify="right")
    table.add_column("epsilon", justify="right")
    table.add_column("delta", justify="right")
    table.add_column("rounds", justify="right")
    for row in rows:
        share = row["share_better_than_local"]
        alone = row["rounds"] == 0  # nothing was posted: there is nobody to be compared with
        told = "-" if share is None or alone else f"{share:.0%} of clients"
        table.add_row(
            row["method"],
            _score(row),
            told,
            _bound(row["epsilon"]),
            f"{row['delta']:.3g}",
            str(row["rounds"]),
        )
    what = "replacement" if first["relation"] == "replace" else "zero-out"
    told = f"epsilon: {what} of one client, view of {first['view']}; metrics are not covered"
    if first["simulation"]:
        told += "; SIMULATION: known seed, protects nobody"
    table.caption = told
    return table


def _refuse_with_resume(arguments: argparse.Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in ("resume", "json", "quiet", "command", "action")
        and value is not None
        and value is not False  # by identity: 0 is a value too
        and value != []
    ]
    if given:
        raise ConfigError(f"--resume goes on with the plan as it is; leave out {', '.join(given)}")


def _new_folder(run_plan: RunPlan) -> Path:
    stem = Path(run_plan.data.name).stem.replace(":", "-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{stem}-{run_plan.method.kind}-{stamp}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def _table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lay flags over the TOML plan, and `--set` over both."""
    table: dict[str, Any] = read_toml(Path(arguments.plan)) if arguments.plan else {}
    _check_tables(table)
    _overlay(table, "data", _data_table(arguments))
    _lay_method(table, arguments)
    _lay_privacy(table, arguments)
    _lay_sampler(table, arguments)
    speed = {name: getattr(arguments, name) for name in ("device", "block", "store")}
    _overlay(table, "speed", speed)
    for name in ("rounds", "simulation_seed"):
        if getattr(arguments, name) is not None:
            table[name] = getattr(arguments, name)
    if arguments.no_local:
        table["compare_with_local"] = False
    for setting in arguments.set:
        _assign(table, setting)
    _check_tables(table)
    _lay_defaults(table)
    return table


def _check_tables(table: Mapping[str, Any]) -> None:
    for name in ("data", "method", "privacy", "sampler", "speed"):
        if not isinstance(table.get(name, {}), dict):
            key = {"data": "name", "method": "kind", "sampler": "kind"}.get(name, "...")
            raise ConfigError(
                f"plan.{name} = {table[name]!r}: expected a table, such as {name}.{key} = ..."
            )


def _lay_defaults(table: dict[str, Any]) -> None:
    """Fill in what neither plan nor flags nor `--set` said."""
    if "name" not in table["data"]:
        raise ConfigError("no data: give --data NAME|FILE, for example --data districts")
    method, privacy, seed = table["method"], table["privacy"], table.get("simulation_seed")
    method.setdefault("kind", "pmtl")
    for place, kind in ((method.get("model"), "linear"), (table.get("sampler"), "poisson")):
        if isinstance(place, dict):
            place.setdefault("kind", kind)
    if not {"epsilon", "noise_multiplier"} & privacy.keys():
        privacy["epsilon"] = 1.0
    if isinstance(seed, int) and seed >= 0:
        table["data"].setdefault("split_seed", seed)


def _lay_sampler(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.cohort is None and not arguments.sampling and not arguments.cohort_visible:
        return
    given = table.get("sampler", {})
    if arguments.sampling and given.get("kind") != arguments.sampling:
        given = {}
    sampler = make_sampler(
        arguments.sampling or given.get("kind"),
        given.get("cohort") if arguments.cohort is None else arguments.cohort,
        arguments.cohort_visible or given.get("visible", False),
    )
    table["sampler"] = to_table(sampler)


def _lay_method(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    method = table.setdefault("method", {})
    if arguments.method is not None and method.get("kind") != arguments.method:
        table["method"] = method = {"kind": arguments.method}
    if arguments.model is not None:
        method["model"] = {"kind": arguments.model}


def _lay_privacy(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    privacy = {name: getattr(arguments, name) for name in ("delta", "clip", "relation")}
    if arguments.epsilon is not None or arguments.noise_multiplier is not None:
        given = table.setdefault("privacy", {})
        given.pop("epsilon", None)
        given.pop("noise_multiplier", None)
        privacy |= {"epsilon": arguments.epsilon, "noise_multiplier": arguments.noise_multiplier}
    _overlay(table, "privacy", privacy)


def _data_table(arguments: argparse.Namespace) -> dict[str, Any]:
    source: dict[str, Any] = {
        "client": arguments.client_column,
        "target": _listed(arguments.target),
        "features": arguments.features and arguments.features.split(","),
        "task": arguments.task,
        "classes": _classes(arguments.classes),
        "missing": arguments.missing,
        "targets_are_clients": arguments.targets_are_clients or None,
    }
    for text in arguments.levels:
        name, values = _pair(text, "--levels")
        source["levels"] = {**(source.get("levels") or {}), name: values.split(",")}
    options = {
        name: _literal(value) for name, value in (_pair(o, "--option") for o in arguments.option)
    }
    table: dict[str, Any] = {
        "name": arguments.data,
        "test": getattr(arguments, "test", None),
        "standardise": getattr(arguments, "standardise", None),
        "options": options or None,
        "source": {key: value for key, value in source.items() if value is not None} or None,
    }
    return {key: value for key, value in table.items() if value is not None}


def _listed(text: str | None) -> str | list[str] | None:
    return text.split(",") if text and "," in text else text


def _classes(text: str | None) -> int | list[str] | None:
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    return text.split(",")


def _overlay(table: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    place = table.setdefault(section, {})
    for key, value in values.items():
        if isinstance(value, Mapping):
            _overlay(place, key, value)
        elif value is not None:
            place[key] = value
    if not place and section == "speed":
        del table[section]


def _assign(table: dict[str, Any], setting: str) -> None:
    path, value = _pair(setting, "--set")
    *sections, key = path.split(".")
    place = table
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {setting}: {section} is not a table of the plan")
    place[key] = _literal(value)


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        shape, example = _SHAPES[flag]
        raise ConfigError(f"{flag} {text!r}: expected {shape}, for example {example}")
    return key.strip(), value.strip()


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
