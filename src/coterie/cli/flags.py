"""From flags to the table of a plan: a TOML plan, then flags, then `--set`, each over the last."""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.cli.account import make_sampler
from coterie.cli.options import NO_DATA
from coterie.core.config import ConfigError, assign, read_toml, to_table

_SHAPES = {
    "--set": ("KEY=VALUE", "method.lam=0.3"),
    "--grid": ("KEY=VALUE,VALUE", "method.lam=0.1,0.3,1"),
    "--option": ("KEY=VALUE", "clients=50"),
    "--levels": ("COLUMN=A,B,C", "kind=day,night"),
}


def plan_table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lay flags over the TOML plan, and `--set` over both."""
    table: dict[str, Any] = read_toml(Path(arguments.plan)) if arguments.plan else {}
    table.pop("charged", None)  # of the run that was chosen: another one is not
    _check_tables(table)
    _overlay(table, "data", data_table(arguments))
    _lay_method(table, arguments)
    _lay_privacy(table, arguments)
    _lay_sampler(table, arguments)
    speeds = ("device", "block", "store", "precision")
    speed = {name: getattr(arguments, name, None) for name in speeds}
    _overlay(table, "speed", speed)
    for name in ("rounds", "simulation_seed", "newcomers"):
        if getattr(arguments, name, None) is not None:
            table[name] = getattr(arguments, name)
    if getattr(arguments, "no_local", False):
        table["compare_with_local"] = False
    if getattr(arguments, "baselines", None) is not None:
        table["baselines"] = list(dict.fromkeys(("local", *arguments.baselines)))
    _lay_clock(table, arguments)
    for setting in arguments.set:
        _assign(table, setting)
    _check_tables(table)
    _lay_defaults(table)
    _lay_finetuning(table, arguments)
    return table


def _check_tables(table: Mapping[str, Any]) -> None:
    for name in ("data", "method", "privacy", "sampler", "speed", "finetune"):
        if not isinstance(table.get(name, {}), dict):
            key = {"data": "name", "method": "kind", "sampler": "kind"}.get(name, "...")
            raise ConfigError(
                f"plan.{name} = {table[name]!r}: expected a table, such as {name}.{key} = ..."
            )


def _lay_defaults(table: dict[str, Any]) -> None:
    """Fill in what is not set by the plan, a flag or `--set`."""
    if "name" not in table["data"]:
        raise ConfigError(NO_DATA)
    method, privacy, seed = table["method"], table["privacy"], table.get("simulation_seed")
    method.setdefault("kind", "auto")
    from coterie.plan.plan import fill_kinds

    fill_kinds(table)
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


def _lay_clock(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    wait = getattr(arguments, "wait", None)
    clock = {
        "wait": None if wait is None else literal(wait),
        "hardware": getattr(arguments, "hardware", None),
    }
    if any(value is not None for value in clock.values()):
        _overlay(table, "stragglers", clock)
    if getattr(arguments, "history", None) is not None:
        table["history"] = arguments.history


def _lay_method(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    method = table.setdefault("method", {})
    if arguments.method is not None and method.get("kind") != arguments.method:
        table["method"] = method = {"kind": arguments.method}
    if arguments.model is not None:
        method["model"] = {"kind": arguments.model}


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


def _lay_privacy(table: dict[str, Any], arguments: argparse.Namespace) -> None:
    privacy = {name: getattr(arguments, name) for name in ("delta", "clip", "relation", "noise")}
    if arguments.epsilon is not None or arguments.noise_multiplier is not None:
        given = table.setdefault("privacy", {})
        given.pop("epsilon", None)
        given.pop("noise_multiplier", None)
        privacy |= {"epsilon": arguments.epsilon, "noise_multiplier": arguments.noise_multiplier}
    _overlay(table, "privacy", privacy)


def data_table(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plan's choice of data, as far as flags say it."""
    source: dict[str, Any] = {
        "client": arguments.client_column,
        "target": _listed(arguments.target),
        "features": arguments.features and arguments.features.split(","),
        "task": arguments.task,
        "classes": _classes(arguments.classes),
        "positive": _listed(arguments.positive),
        "missing": arguments.missing,
        **{key: getattr(arguments, key, None) for key in ("text", "vocabulary", "length", "tags")},
        "images": getattr(arguments, "images", None),
        "targets_are_clients": arguments.targets_are_clients or None,
    }
    for text in arguments.levels:
        name, values = pair(text, "--levels")
        source["levels"] = {**(source.get("levels") or {}), name: values.split(",")}
    options = {
        name: literal(value) for name, value in (pair(o, "--option") for o in arguments.option)
    }
    table: dict[str, Any] = {
        "name": arguments.data,
        "test": getattr(arguments, "test", None),
        "standardise": getattr(arguments, "standardise", None),
        "clients": arguments.clients,
        "rows": getattr(arguments, "rows", None),
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
