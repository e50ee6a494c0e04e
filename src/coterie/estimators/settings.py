"""From the constructor's plain arguments to the values of a plan."""

import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from coterie.config import ConfigError, from_table
from coterie.methods.auto import Auto
from coterie.methods.base import Method, Shape, choices
from coterie.methods.local import Local
from coterie.models import Model
from coterie.privacy.sampling import Poisson, Sampler
from coterie.solvers.sgd import SGD


def method_of(method: Any, model: Any, settings: Mapping[str, Any] | None) -> Method:
    """Make the method of a name or a value, a model of its own if one is given, and settings.

    Raises:
        ValueError: For unknown names and settings that do not fit.
    """
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"method_settings = {settings!r}: expected settings by name, or None")
    given = dict(settings or {})
    if model is not None:
        given["model"] = _model_of(model)
    if isinstance(method, str):
        return _named(method, given)
    if not isinstance(method, Method):
        raise ValueError(
            f"method = {method!r}: expected a name such as 'auto' or 'pmtl', or a method such as "
            "coterie.PMTL(lam=0.3)"
        )
    _check_settings(method, type(method), given)
    return replace(method, **given) if given else method  # type: ignore[type-var]


def alone_of(method: Method) -> Method:
    """Return the method by which a single client learns: nothing is posted."""
    if method.shape is Shape.NONE:
        return method
    found = method.baselines().local
    if found is not None and found.shape is Shape.NONE:
        return found
    # Finetuning has steps of its own; what is trained with is its base's.
    steps = getattr(getattr(method, "base", method), "sgd", SGD())
    usual = Local(model=method.model)
    return replace(usual, sgd=replace(steps, epochs=usual.sgd.epochs, steps=None))


def sampler_of(cohort: Any) -> Sampler | None:
    """Make the sampler of an expected cohort; None for everyone in every round."""
    if cohort is None or isinstance(cohort, Sampler):
        return cohort
    if isinstance(cohort, int | float | np.number) and not isinstance(cohort, bool):
        return Poisson(cohort=float(cohort))
    raise ValueError(
        f"cohort = {cohort!r}: expected the expected number of clients in a round, a sampler such "
        "as coterie.FixedSize(20), or None for everyone"
    )


def seed_of(random_state: Any) -> int | None:
    """Return the simulation seed of a random_state; None for noise that nobody can repeat."""
    if random_state is None:
        return None
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(np.iinfo(np.int32).max))
    whole = isinstance(random_state, int | np.integer) and not isinstance(random_state, bool)
    if whole and random_state >= 0:
        return int(random_state)
    raise ValueError(
        f"random_state = {random_state!r}: expected None for private noise, or a whole number >= 0 "
        "for a simulation, which protects nobody"
    )


def _named(name: str, given: dict[str, Any]) -> Method:
    known = choices()
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=3)
        hint = f" (close: {', '.join(close)})" if close else ""
        raise ValueError(f"method = {name!r}: expected one of {', '.join(sorted(known))}{hint}")
    kind = known[name]
    _check_settings(name, kind, given)
    objects = {key: value for key, value in given.items() if _is_object(value)}
    plain = {key: value for key, value in given.items() if key not in objects}
    try:
        made = from_table(Method, {"kind": name, **plain}, "method")  # type: ignore[type-abstract]
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return replace(made, **objects) if objects else made  # type: ignore[type-var]


def _check_settings(method: Any, kind: type[Method], given: Mapping[str, Any]) -> None:
    settings = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(given) - settings - {"model"})
    if unknown and kind is Auto:
        raise ValueError(
            f"method_settings has {unknown[0]!r}, but no method is named: auto picks one by rule "
            "and has no settings of its own but the model; name the method that is meant"
        )
    if unknown:
        named = method if isinstance(method, str) else method.kind
        raise ValueError(
            f"method_settings has {unknown[0]!r}, which {named} does not know: expected among "
            f"{', '.join(sorted(settings))}"
        )


def _is_object(value: Any) -> bool:
    """Tell values of the library, functions and modules from what a plan could be read from."""
    plain = isinstance(value, str | int | float | bool | Mapping | list | tuple | None)
    return not plain or is_dataclass(value)


def _model_of(model: Any) -> Any:
    if not isinstance(model, str):
        return model
    known = Model.choices()
    if model not in known:
        raise ValueError(f"model = {model!r}: expected one of {', '.join(sorted(known))}")
    return known[model]()
