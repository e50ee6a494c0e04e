"""`coterie plan`: whether joining pays, before anything is spent.

From public facts alone it loads neither torch nor data; with data or a plan it opens them and looks
at the spec.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coterie.advice import Advice, advise

if TYPE_CHECKING:
    from coterie.data.federated import Spec, Task

_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_CONCRETE = ("data", "plan", "noise_multiplier", "noise", "sampling", "finetune", "clip")
_HEADS = ("epsilon", "verdict", "rounds", "most numbers", "clients for a small gain", "to join")


def plan(arguments: argparse.Namespace) -> str:
    """Carry out `coterie plan`; give what it prints."""
    if flags := _concrete_flags(arguments):
        return _concrete(arguments, flags)
    clients, numbers = _clients(arguments), _numbers(arguments)
    epsilon = 1.0 if arguments.epsilon is None else arguments.epsilon

    def at(epsilon: float) -> Advice:
        return advise(
            clients,
            epsilon,
            numbers,
            delta=arguments.delta,
            relation=arguments.relation or "zero_out",
            cohort=arguments.cohort,
            rounds=arguments.rounds,
        )

    table = [at(one) for one in _EPSILONS]
    if epsilon == math.inf:
        return _tell_nothing({}, _FREE, as_json=arguments.json)
    return _tell(at(epsilon), table, as_json=arguments.json)


def _concrete_flags(arguments: argparse.Namespace) -> list[str]:
    """Name the flags that speak of more than a linear model and its budget."""
    given = [name for name in _CONCRETE if getattr(arguments, name) is not None]
    given += ["method"] if arguments.method not in (None, "auto") else []
    given += ["model"] if arguments.model not in (None, "linear") else []
    given += [name for name in ("set", "cohort_visible") if getattr(arguments, name)]
    return [f"--{name.replace('_', '-')}" for name in given]


def _concrete(arguments: argparse.Namespace, flags: Sequence[str]) -> str:
    """Advise on a plan made of flags; torch is loaded here."""
    from coterie.commands.flags import plan_table
    from coterie.run_plan import advice_of, plan_from_table, resolve

    facts = arguments.data is None and arguments.plan is None
    if arguments.numbers is not None:
        raise ValueError(
            f"--numbers {arguments.numbers} is of a linear model and its budget alone, and "
            f"{', '.join(flags)} asks for a whole plan: leave out --numbers"
            f"{' and give --features N' if facts else ''}, or leave out {', '.join(flags)}"
        )
    spec = _spec(arguments) if facts else None
    if facts:
        away = {"data": "synthetic", "features": None, "classes": None, "clients": None}
        arguments = argparse.Namespace(**{**vars(arguments), **away, "task": None})
    run_plan = plan_from_table(plan_table(arguments))
    spec = run_plan.data.open().spec if spec is None else spec
    resolved = resolve(run_plan, spec)
    resolved.plan().guarantee(spec.clients)
    resolved.method.check(spec)
    about = {
        "data": None if facts else run_plan.data.name,
        "method": resolved.method.title,
        "chosen": resolved.chosen,
    }

    def at(epsilon: float) -> Advice | None:
        budget = replace(run_plan.privacy, epsilon=epsilon, noise_multiplier=None)
        return advice_of(resolve(replace(run_plan, privacy=budget), spec), spec)

    advice = advice_of(resolved, spec)
    if advice is None:
        free = resolved.privacy.epsilon == math.inf
        words = _FREE if free else _UNKNOWN.format(about["method"])
        return _tell_nothing(about, words, as_json=arguments.json)
    table = [found for one in _EPSILONS if (found := at(one)) is not None]
    return _tell(advice, table, about, as_json=arguments.json)


def _clients(arguments: argparse.Namespace) -> int:
    if arguments.clients is None:
        raise ValueError("how many clients? give --clients N, or --data NAME|FILE")
    return int(arguments.clients)


def _numbers(arguments: argparse.Namespace) -> int:
    """Count what a linear model posts: a weight for each feature and a bias, for each output."""
    if arguments.numbers is None:
        return (_features(arguments) + 1) * _outputs(arguments)
    if arguments.features is not None:
        raise ValueError(
            f"--numbers {arguments.numbers} and --features {arguments.features}: give one of them"
        )
    return int(arguments.numbers)


def _features(arguments: argparse.Namespace) -> int:
    given = arguments.features
    if given is None:
        raise ValueError("what is posted? give --numbers N, or --features N for a linear model")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"--features {given}: without --data, expected how many there are")
    return int(given)


def _outputs(arguments: argparse.Namespace) -> int:
    given = arguments.classes
    if given is None:
        return 1
    count = int(given) if given.isdecimal() else len(given.split(","))
    if count < 2:
        raise ValueError(f"--classes {given}: expected at least 2")
    return count if count > 2 or arguments.task == "multilabel" else 1


def _spec(arguments: argparse.Namespace) -> "Spec":
    """Make the spec of rows that nobody has shown us."""
    from coterie.data.federated import Spec

    outputs = _outputs(arguments)
    usual: Task = (
        "multiclass" if outputs > 1 else "regression" if arguments.classes is None else "binary"
    )
    return Spec((_features(arguments),), outputs, arguments.task or usual, _clients(arguments))


def _tell(
    advice: Advice,
    table: Sequence[Advice],
    about: dict[str, Any] | None = None,
    *,
    as_json: bool,
) -> str:
    if as_json:
        found = (about or {}) | advice.to_json() | {"by_epsilon": [_row(one) for one in table]}
        return json.dumps(found, indent=2, allow_nan=False)
    lines = [f"{advice.verdict}: {advice.words}.", ""]
    if about is not None:
        lines[1:1] = [f"{about['data'] or 'as planned'}: {about['chosen'] or about['method']}."]
    facts = {
        "rounds": advice.rounds,
        "clip": f"{advice.clip:.4g}",
        "shared weights": f"{advice.numbers:,} (at most {advice.most_numbers:,})",
        "worth": f"{advice.worth:.3g} ({_SCALE})",
    }
    lines += [f"{name:<15} {value}" for name, value in facts.items()]
    if advice.remedies:
        lines += ["", "what would help", *(f"  {remedy}" for remedy in advice.remedies)]
    return "\n".join([*lines, "", *_lined(table)])


_FREE = "no verdict: nothing is spent on noise (epsilon = inf), so there is nothing to weigh"
_UNKNOWN = (
    "no verdict on {}: the rule weighs Gaussian noise against a posted mean, and this plan posts "
    "none, or its noise is not Gaussian"
)
_SCALE = "below 1 learn alone, from 1 small gain, from 4 join"


def _tell_nothing(about: dict[str, Any], words: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(about | {"verdict": None, "words": words}, indent=2, allow_nan=False)
    return f"{words}."


def _row(advice: Advice) -> dict[str, Any]:
    return {
        "epsilon": advice.epsilon,
        "verdict": advice.verdict,
        "rounds": advice.rounds,
        "most_numbers": advice.most_numbers,
        "clients_for_small_gain": advice.needs["small gain"]["clients"],
        "clients_to_join": advice.needs["join"]["clients"],
    }


def _lined(table: Sequence[Advice]) -> list[str]:
    """Set the table by epsilon, columns to the right."""
    cells = [_HEADS, *(tuple(map(_shown, _row(one).values())) for one in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def _shown(cell: float | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:g}"
