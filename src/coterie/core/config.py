"""Plans as text: frozen dataclasses to and from plain tables, unknown keys refused."""

import collections.abc
import dataclasses
import importlib
import inspect
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from coterie.core.files import refuse_special
from coterie.core.suggest import closest, hint

T = TypeVar("T")
_CODE = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # package.module:name


class ConfigError(ValueError):
    """Raised when a table does not fit the dataclass it describes."""


def to_table(value: Any) -> Any:
    """Turn a dataclass (or a plain value) into tables, lists and scalars; None fields are left out.

    A dataclass registered under a name (it has `kind`) writes that name first; fields with the
    metadata `{"plan": False}` are no part of a plan. A function or class is written as the place
    where it can be imported, "package.module:name".
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): to_table(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_table(item) for item in value]
    return _place(value) if callable(value) else value


def _fields(value: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    kind = getattr(type(value), "kind", None)
    if isinstance(kind, str):
        table["kind"] = kind
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if not field.metadata.get("plan", True):
            continue
        if field.init and item is not None:
            table[field.name] = to_table(item)
        elif field.init and field.default is not None:
            raise ConfigError(
                f"{type(value).__name__}.{field.name} is None, which a plan cannot say: "
                f"leaving it out would mean {field.default!r}"
            )
    return table


def from_table(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a table.

    Args:
        cls: The dataclass; if it has `choices()`, `kind` in the table picks the class.
        table: Plain values.
        where: The table's name, for errors.
    """
    values = dict(table)
    target: Any = cls
    choices = _choices_of(cls)
    if choices is not None:
        names = choices()
        kind = values.pop("kind", None)
        if not isinstance(kind, str) or kind not in names:
            near = hint(kind, names) if isinstance(kind, str) else ""
            raise ConfigError(
                f"[{where}] kind = {kind!r}{near}: expected one of {', '.join(sorted(names))}"
            )
        target = names[kind]
    known = {
        field.name: field
        for field in dataclasses.fields(target)
        if field.init and field.metadata.get("plan", True)
    }
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"[{where}] {_unknown(unknown, list(known))}")
    hints = typing.get_type_hints(target)
    built = {key: _convert(hints[key], item, f"{where}.{key}") for key, item in values.items()}
    try:
        return typing.cast(T, target(**built))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[{where}] {error}") from error


def _unknown(names: Sequence[str], known: Sequence[str]) -> str:
    if len(names) > 1:
        listed = ", ".join(map(repr, names))
        return f"unknown settings {listed}: expected some of {', '.join(known)}"
    near = closest(names[0], known)
    expected = f"did you mean {near}? Expected" if near else "expected"
    return f"unknown setting {names[0]!r}: {expected} one of {', '.join(known)}"


def convert_fields(value: Any) -> None:
    """Convert the fields of a frozen dataclass to their declared types, as `from_table` does."""
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if given is not None or field.default is not None:
            object.__setattr__(value, field.name, _convert(hints[field.name], given, field.name))


def _choices_of(hint: Any) -> Any:
    return getattr(hint, "_choices", None) or getattr(hint, "choices", None)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            options = ", ".join(repr(option) for option in typing.get_args(hint))
            raise ConfigError(f"{where} = {value!r}: expected one of {options}")
        return value
    table = _table_for(hint, value)
    if table is not None:
        return from_table(hint, table, where)
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)[0]
        # a vocabulary may be long
        plain = inner is str and all(isinstance(item, str) for item in value)
        return tuple(value if plain else (_convert(inner, item, where) for item in value))
    if isinstance(value, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
        inner = typing.get_args(hint)
        return {key: _convert(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    return _scalar(hint, value, where)


def _place(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"


def refuse_code(table: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if a table of others names code: made into a plan, it would be run.

    This is the only rule, for exported models, run folders and comparisons. Every text that
    `from_table` would import counts; a plan's `about` has none, and its `data` an encoder only.
    """
    left: list[Any] = [value for key, value in table.items() if key not in ("data", "about")]
    data = table.get("data")
    left += [data.get("effects")] if isinstance(data, Mapping) else []
    while left:  # not by recursion: tables of others may be nested deeply
        value = left.pop()
        if isinstance(value, str) and _CODE.fullmatch(value):
            raise ConfigError(
                f"{path}: it names code, {value!r}, which would be imported and run; if you trust "
                "the source of this file, give --trust (from Python, trust=True)"
            )
        left += value.values() if isinstance(value, Mapping) else ()
        left += value if isinstance(value, list | tuple) else ()


def _imported(place: str, where: str) -> Any:
    """Import what a plan names; what has no name of its own in a module cannot be found again."""
    module, _, name = place.partition(":")
    try:
        if _CODE.fullmatch(place) is None:
            raise ValueError("no such name")
        found: Any = _import_here(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's file can fail in any way
        raise ConfigError(
            f"{where} = {place!r}: expected 'package.module:name' of a function that can be "
            f"imported ({error}); define it by name in a module on the path, or run from Python"
        ) from error
    if not (inspect.isfunction(found) or inspect.isclass(found)):
        raise ConfigError(
            f"{where} = {place!r}: found {found!r}; expected a function written in Python, or a "
            "class"
        )
    return found


def _import_here(module: str) -> Any:
    # As `python -m` does: what lies in the current folder is found, after all that is installed.
    sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop()


def _table_for(hint: Any, value: Any) -> Mapping[str, Any] | None:
    """Return the table of a dataclass; text names a kind with its usual settings."""
    if isinstance(value, str) and _choices_of(hint) is not None:
        return {"kind": value}
    takes = dataclasses.is_dataclass(hint) or _choices_of(hint) is not None
    return value if takes and isinstance(value, Mapping) else None


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    failures: list[str] = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _convert(option, value, where)
        except ConfigError as error:
            failures.append(str(error))
    lead = f"{where} = {value!r}: expected "
    if all(failure.startswith(lead) for failure in failures):
        failures = [lead + " or ".join(failure.removeprefix(lead) for failure in failures)]
    raise ConfigError("; ".join(failures))


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if getattr(value, "shape", None) == ():
        value = value.item()  # a number out of an array
    if typing.get_origin(hint) is collections.abc.Callable and isinstance(value, str):
        return _imported(value, where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} = {value!r}: too large for a float") from None
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{where} = {value!r}: expected {name}")


def to_toml(table: Mapping[str, Any]) -> str:
    """Return nested tables as TOML.

    Raises:
        ConfigError: If a value is not text, a number, a list or a table.
    """
    try:
        text = tomli_w.dumps(table)
        text.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"the plan cannot be written as TOML ({error}): expected text, numbers, lists, tables"
        ) from error
    return text


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: If it cannot be read, or is not TOML; the message says where.
    """
    refuse_special(path)
    try:
        with naming(path):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if not path.parent.exists():
            raise ConfigError(f"{path.parent}: no such folder; check the path") from error
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the file to the errors of what was read from it, and turn these into ConfigError."""
    try:
        yield
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply; expected a few levels") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except ValueError as error:
        known = str(error).startswith(str(path))
        raise ConfigError(str(error) if known else f"{path}: {error}") from error


def assign(table: dict[str, Any], path: str, value: Any) -> None:
    """Set a value of nested tables by its dotted path, such as `method.lam`."""
    *sections, key = path.split(".")
    place = table
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{path}: {section} is not a table of the plan")
    place[key] = value
