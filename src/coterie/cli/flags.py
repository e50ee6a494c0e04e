"""From flags to the table of a plan: a TOML plan, then flags, then `--set`, each over the last."""

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.account import make_sampler
from coterie.cli.options import ADAPTIVE, NO_DATA, check_name, names
from coterie.core.config import ConfigError, assign, from_table, naming, read_toml, to_table
from coterie.core.suggest import closest

if TYPE_CHECKING:
    from coterie.planning.plan import Plan

_BUDGET = ("epsilon", "noise_multiplier")
_SHAPES = {
    "--set": ("KEY=VALUE", "method.lam=0.3"),
    "--grid": ("KEY=VALUE,VALUE", "method.lam=0.1,0.3,1"),
    "--option": ("KEY=VALUE", "clients=50"),
    "--levels": ("COLUMN=A,B,C", "kind=day,night"),
    "--dates": ("COLUMN=ORIGIN", "admitted=2020-01-01"),
}


_FILES = (
    "target", "features", "task", "classes", "positive", "missing", "indicators", "text",
    "vocabulary", "length", "tags", "images", "unit_rows", "targets_are_clients",
)  # fmt: skip
_PATHS = {
    "data": "data.name",
    **{name: f"data.{name}" for name in ("test", "standardise", "clients", "population")},
    "rows": "data.most_rows",
    "rows_per_client": "data.rows_per_client",
    "client_column": "data.source.client",
    **{name: f"data.effects.{name}" for name in ("formula", "basis", "encoder")},
    **{name: f"data.source.{name}" for name in _FILES},
    **{n: f"privacy.{n}" for n in ("delta", "clip", "relation", "noise", *_BUDGET)},
    **{name: f"speed.{name}" for name in ("device", "block", "store", "precision")},
    **{name: f"stragglers.{name}" for name in ("wait", "hardware")},
    **{name: f"about.{name}" for name in ("unit", "operator", "purpose")},
    **{name: name for name in ("rounds", "simulation_seed", "newcomers", "history")},
}
"""The key of a plan that each flag sets."""


_SETTING = re.compile(
    rf"(?<![\w./'\"-])({'|'.join(_FILES)}|levels|dates)=(?:\"([\w-]+)\"|(?=[ ;,.)]|$))"
)


def with_flags(message: str) -> str:
    """Return an error of the library with flags in place of Python's arguments.

    >>> with_flags('leave such rows out with missing="drop", or name the classes with classes=')
    'leave such rows out with --missing drop, or name the classes with --classes'
    >>> with_flags("task=binary/rows.csv: no such file")
    'task=binary/rows.csv: no such file'
    """
    return _SETTING.sub(
        lambda found: f"--{found[1].replace('_', '-')}" + (f" {found[2]}" if found[2] else ""),
        message,
    )


def make_plan(arguments: argparse.Namespace) -> "Plan":
    """Return the plan of the flags; errors name its TOML file, if there is one."""
    from coterie.planning.plan import Plan

    with naming(arguments.plan) if arguments.plan else nullcontext():
        return Plan.from_table(plan_table(arguments))


def plan_table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lay flags over the TOML plan, and `--set` over both."""
    table = _base_table(arguments)
    table.pop("charged", None)  # of the run that was chosen: another one is not
    _check_tables(table)
    method, privacy = table.setdefault("method", {}), table.setdefault("privacy", {})
    # A published plan has its method already: Algorithm 1 of mpmtl with W^T W is another one.
    named = None if getattr(arguments, "as_published", None) is not None else arguments.method
    if named is not None and method.get("kind") != named:
        table["method"] = method = {"kind": named}
    if arguments.model is not None:
        named = {"kind": "module", "make": arguments.model}
        method["model"] = named if ":" in arguments.model else {"kind": arguments.model}
    if any(getattr(arguments, name) is not None for name in _BUDGET):
        for name in _BUDGET:
            privacy.pop(name, None)
    _lay_flags(table, arguments)
    if getattr(arguments, "trust", None) == "nobody":
        given = {name: getattr(arguments, name) for name in ("minimum_clients", "corrupt")}
        known = {name: value for name, value in given.items() if value is not None}
        privacy["noise"] = {"kind": "shares", **known}
    _lay_sampler(table, arguments)
    if getattr(arguments, "no_local", False):
        table["compare_with_local"] = False
    if getattr(arguments, "baselines", None) is not None:
        table["baselines"] = list(dict.fromkeys(("local", *arguments.baselines)))
    _lay_settings(table, arguments.set)
    _lay_defaults(table)
    _lay_adaptive(table, arguments)
    _lay_finetuning(table, arguments)
    return table


def _base_table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the TOML plan, and the published plan of the method over it."""
    table: dict[str, Any] = _read_plan(arguments.plan) if arguments.plan else {}
    if getattr(arguments, "as_published", None) is None:
        return table
    return table | _published(arguments.method, arguments.as_published)


def _read_plan(given: str) -> dict[str, Any]:
    """Return the table of a plan; data that is not here is looked for beside the plan."""
    path, table = Path(given), read_toml(Path(given))
    data = table.get("data")
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str) or name in names()["data"] or Path(name).exists():
        return table
    if (path.parent / name).exists():
        table["data"]["name"] = str(path.parent / name)
    return table


def _published(name: str | None, text: str) -> dict[str, Any]:
    """Return the published plan of a method as tables, without its data."""
    from coterie.methods.base import choices

    known = [kind for kind, method in choices().items() if hasattr(method, "published")]
    if name not in known:
        raise ConfigError(f"--as-published: give --method, one of {', '.join(known)}")
    given = dict(pair(part, "--as-published") for part in text.split(",") if part)
    make: Any = choices()[name]
    try:
        plan = make.published(**{key: literal(value) for key, value in given.items()})
    except TypeError as error:
        wanted = [one for one in signature(make.published).parameters.values()
                  if one.kind is not one.VAR_KEYWORD]  # fmt: skip
        shown = ",".join(f"{one.name}=..." for one in wanted if one.default is one.empty)
        rest = ", ".join(one.name for one in wanted if one.default is not one.empty)
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        said = f"{name} has no setting {unknown[1]}" if unknown else str(error).partition("() ")[2]
        raise ConfigError(
            f"--as-published {text}: {said}; expected {shown or 'no settings'}, and at will {rest}"
            f", and the settings of the method (`coterie methods {name}`)"
        ) from error
    return {key: value for key, value in plan.to_table().items() if key != "data"}


def check_plan(arguments: argparse.Namespace) -> None:
    """Raise an error for a plan's file, method or data that cannot be right, without torch."""
    with naming(arguments.plan) if arguments.plan else nullcontext():
        table: dict[str, Any] = _read_plan(arguments.plan) if arguments.plan else {}
        _check_tables(table)
        _lay_flags(table, arguments, "data.")
        for setting in arguments.set:
            if setting.startswith(("data.", "method.kind")):
                _assign(table, setting)
        _check_tables(table)
        _lay_sampler(table, arguments)
        if isinstance(kind := table.get("method", {}).get("kind"), str):
            check_name("method.kind = ", kind, "methods")
        if "name" not in (data := table.get("data", {})):
            return
        from coterie.data.config import DataConfig

        from_table(DataConfig, data, "plan.data").check()


def data_table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plan's choice of data, as far as a plan and flags say it."""
    given = getattr(arguments, "plan", None)
    table: dict[str, Any] = {"data": _read_plan(given).get("data", {})} if given else {}
    _lay_flags(table, arguments, "data.")
    return dict(table.get("data", {}))


def _lay_flags(table: dict[str, Any], arguments: argparse.Namespace, section: str = "") -> None:
    for flag, path in _PATHS.items():
        value: Any = getattr(arguments, flag, None)
        absent = value is None or (value is False and flag != "history")  # --no-history
        absent = absent or (flag == "clip" and value == ADAPTIVE)  # that is a method, no number
        if path.startswith(section) and not absent:
            assign(table, path, _READ[flag](value) if flag in _READ else value)
    for text in arguments.levels:
        name, values = pair(text, "--levels")
        assign(table, "data.source.levels", {**_declared(table, "levels"), name: values.split(",")})
    for text in arguments.dates:
        name, origin = pair(text, "--dates")
        assign(table, "data.source.dates", {**_declared(table, "dates"), name: origin})
    for text in arguments.option:
        name, value = pair(text, "--option")
        assign(table, f"data.options.{name}", literal(value))


def _declared(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return dict(table.get("data", {}).get("source", {}).get(key, {}))


def _listed(text: str) -> str | list[str]:
    return text.split(",") if "," in text else text


def _columns(text: str) -> list[str]:
    return text.split(",") if text else []


def _classes(text: str) -> int | list[str]:
    return int(text) if text.isdecimal() else text.split(",")


def _check_tables(table: Mapping[str, Any]) -> None:
    for name in ("data", "method", "privacy", "sampler", "speed", "adaptive", "finetune", "about"):
        if not isinstance(table.get(name, {}), dict):
            key = {"data": "name", "method": "kind", "sampler": "kind"}.get(name, "...")
            raise ConfigError(
                f"plan.{name} = {table[name]!r}: expected a table, such as {name}.{key} = ..."
            )


def _lay_settings(table: dict[str, Any], settings: Sequence[str]) -> None:
    """Lay `--set` over a table; refuse settings of the method that lack `method.`."""
    for setting in settings:
        _assign(table, setting)
    _check_tables(table)
    from coterie.methods.base import choices
    from coterie.planning.plan import Plan

    method = choices().get(table["method"].get("kind", "auto"))
    own = [] if method is None else [one.name for one in fields(method)]  # type: ignore[arg-type]
    known = {field.name for field in fields(Plan)}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        near = closest(key, own) if "." not in key and key not in known else None
        if near is not None:
            raise ConfigError(f"--set {key}: no such setting; did you mean method.{near}?")


def _lay_defaults(table: dict[str, Any]) -> None:
    """Fill in what is not set by the plan, a flag or `--set`."""
    if "name" not in table.get("data", {}):
        raise ConfigError(NO_DATA)
    table["method"].setdefault("kind", "auto")
    from coterie.planning.plan import fill_kinds

    fill_kinds(table)
    if not set(_BUDGET) & table["privacy"].keys():
        table["privacy"]["epsilon"] = 1.0
    seed = table.get("simulation_seed")
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


def _lay_adaptive(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Put adaptive clipping around the method; `adaptive.KEY` are its settings."""
    given, asked = table.pop("adaptive", {}), getattr(arguments, "clip", None) == ADAPTIVE
    outer = table["method"] if table["method"].get("kind") == "finetune" else table
    place = "base" if outer is table["method"] else "method"
    inner = outer.get(place, {"kind": "fedavg"})
    if inner.get("kind") == "adaptive":
        outer[place] = inner | given
    elif asked:
        outer[place] = {"kind": "adaptive", **given, "base": inner}
    elif given:
        raise ConfigError(
            f"adaptive.{next(iter(given))} was set, but no clip is adaptive: give --clip adaptive"
        )
    if asked:
        table["privacy"].pop("clip", None)


def _lay_finetuning(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Put finetuning around the method; `finetune.KEY` are its settings."""
    given, how = table.pop("finetune", {}), getattr(arguments, "finetune", None)
    given = given if how is None else {**given, "how": how}
    if not given:
        return
    if table["method"].get("kind") == "finetune":
        table["method"] |= given
        return
    if "how" not in given:
        raise ConfigError(
            f"finetune.{next(iter(given))} was set, but nothing is finetuned: give --finetune "
            "plain, mean, kl or ewc"
        )
    table["method"] = {"kind": "finetune", **given, "base": table["method"]}


def _assign(table: dict[str, Any], setting: str) -> None:
    path, value = pair(setting, "--set")
    try:
        assign(table, path, literal(value))
    except ConfigError as error:
        raise ConfigError(f"--set {error}") from None


def pair(text: str, flag: str) -> tuple[str, str]:
    """Cut KEY=VALUE in two; the flag is named where that fails."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        shape, example = _SHAPES[flag]
        raise ConfigError(f"{flag} {text!r}: expected {shape}, for example {example}")
    return key.strip(), value.strip()


def literal(text: str) -> Any:
    """Read a value as TOML writes it; what is no such value is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_READ: dict[str, Callable[[str], Any]] = {
    "target": _listed,
    "positive": _listed,
    "features": _columns,
    "indicators": _columns,
    "classes": _classes,
    "wait": literal,
}
"""How the text of a flag is read."""
