"""What a plan.toml says that its run's certificate must say too."""

import math
from collections.abc import Mapping
from typing import Any

from scipy import optimize

from coterie.verification.closed import gaussian_epsilon
from coterie.verification.reading import is_positive

_NEAR = 1e-9
_LEAST = 0.99
"""Share of a budget that noise made for it spends at least: calibration errs by less than this."""
_SILENT = ("local", "localsvm", "single")
"""Methods that post nothing: of no other does a plan of some rounds have no event."""
_TUNED = {"no": "", "public": "on public data", "not covered": "NOT COVERED", "charged": "CHARGED"}
_KINDS = {
    "gaussian": "gaussian",
    "laplace": "laplace",
    "wishart": "wishart",
    "wishart_paper": "wishart",
    "local": "local_gaussian",
    "local_paper": "local_gaussian",
}


def disagreements(plan: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """List what a certificate states otherwise than the plan that was run."""
    privacy, sampler = _table(plan, "privacy"), _table(plan, "sampler")
    clients = certificate["clients"]
    expected = {
        "relation": privacy.get("relation", "zero_out"),
        "sampling": sampler.get("kind", "poisson"),
        "cohort": "visible" if sampler.get("visible", False) else "hidden",
        "simulation": "simulation_seed" in plan,
        "method": _table(plan, "method").get("kind"),
    }
    found = [
        f"{key}: certificate {certificate.get(key)!r}, plan {value!r}"
        for key, value in expected.items()
        if certificate.get(key) != value
    ]
    numbers = {"delta": _delta(privacy, clients), "rate": _rate(sampler, clients)}
    found += [
        f"{key}: certificate {certificate[key]}, plan {value}"
        for key, value in numbers.items()
        if not math.isclose(certificate[key], value, rel_tol=_NEAR)
    ]
    return found + _tuned(plan, certificate)


def _tuned(plan: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """Compare what is said of how settings were chosen."""
    mark, said = _TUNED.get(str(plan.get("tuned", "no"))), certificate.get("tuning", "")
    if mark is None or not isinstance(said, str):
        return [f"tuned = {plan.get('tuned')!r}, tuning = {said!r}"]
    found = [f"tuning: certificate {said!r}, plan {plan.get('tuned', 'no')!r}"] * (
        not said.startswith(mark) or (not mark and "charged" not in plan and said != "")
    )
    charged, chosen = "charged" in plan, "selection" in certificate
    if charged != chosen:
        found.append(f"of a selection: certificate {chosen}, plan {charged}")
    return found + ["what the choice cost is not said"] * (charged and "CHARGED" not in said)


def is_silent(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan's method is known to post nothing."""
    method = _table(plan, "method")
    while isinstance(method.get("base"), dict):
        method = method["base"]
    return method.get("kind") in _SILENT


def spends(plan: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """List how the events, the budget and the noise of a plan disagree."""
    privacy = _table(plan, "privacy")
    asked, given = privacy.get("epsilon"), privacy.get("noise_multiplier")
    if (asked is None) == (given is None):
        return [f"the plan has epsilon = {asked} and noise_multiplier = {given}: one is needed"]
    if asked != math.inf and not is_positive(given if asked is None else asked):
        return [f"the plan has epsilon = {asked!r}, noise_multiplier = {given!r}: no such budget"]
    kinds = {event["event"] for event in certificate["events"]}
    if asked == math.inf:
        return ["the plan asks for no privacy, and events have noise"] * bool(
            kinds - {"non_private"}
        )
    if "non_private" in kinds:
        return ["the plan asks for privacy, and an event has no noise"]
    if not kinds:
        return []
    return _kind(privacy, certificate) or _amount(plan, certificate)


def _kind(privacy: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """Compare the kind of noise of each event with the plan's."""
    noise = privacy.get("noise", "gaussian")
    noise = noise if isinstance(noise, dict) else {"kind": noise}
    name = str(noise.get("kind", "gaussian"))
    if name not in _KINDS:
        return [f"the plan's noise is {name!r}, which is not known"]
    wanted: dict[str, Any] = {"event": _KINDS[name]}
    if name in ("local", "local_paper"):
        wanted["honest"] = noise.get("honest", 1) if name == "local" else 1
    if name == "wishart":
        wanted["degrees"] = noise.get("degrees", 1000)
    found = [
        f"{key} of an event is {event.get(key)!r}, of the plan's {name} noise {value!r}"
        for event in certificate["events"]
        for key, value in wanted.items()
        if event.get(key) != value
    ]
    printed = name.endswith("_paper")
    claims = {event.get("claimed") is not None for event in certificate["events"]}
    found += [f"{name} noise, and events that claim {claims}"] * (claims != {printed})
    return found


def _amount(plan: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """Compare how much noise there is with the plan: by round, and in all."""
    weights, wrong = _weights(plan, certificate["rounds"])
    if wrong:
        return wrong
    privacy = _table(plan, "privacy")
    asked, given = privacy.get("epsilon"), privacy.get("noise_multiplier")
    claimed = certificate.get("claimed_epsilon")
    if claimed is not None:
        return _printed(privacy, certificate, claimed)
    base = _rows(plan, certificate, weights) if asked is not None else given
    found = _by_round(certificate["events"], weights, base)
    if asked is None or base is not None:
        return found
    stated = certificate["epsilon"]
    if isinstance(stated, str) or not _LEAST * asked <= stated <= asked * (1 + 1e-6):
        found.append(f"epsilon: certificate {stated}, noise made for {asked} spends about that")
    return found


def _printed(privacy: Mapping[str, Any], certificate: Mapping[str, Any], claimed: Any) -> list[str]:
    """Compare a reproduction with what its paper prints for the plan's numbers."""
    asked, given = privacy.get("epsilon"), privacy.get("noise_multiplier")
    delta, rate = certificate["delta"], certificate["rate"]
    if asked is not None and not (is_positive(claimed) and math.isclose(claimed, asked)):
        return [f"claimed_epsilon: certificate {claimed!r}, plan {asked}"]
    if certificate["events"][0]["event"] == "wishart":
        return []
    sigma = float(given or math.sqrt(2 * math.log(1.25 / delta)) / float(asked or math.nan))
    return [
        f"noise {event['noise_multiplier']}, printed for the plan {2 * sigma * rate}"
        for event in certificate["events"]
        if not math.isclose(event["noise_multiplier"], 2 * sigma * rate, rel_tol=_NEAR)
    ]


def _rows(
    plan: Mapping[str, Any], certificate: Mapping[str, Any], weights: list[float]
) -> float | None:
    """Return the noise of a recipe that protects rows, for clients of some; None for other methods.

    Liang et al., Proposition 3: (epsilon/n, delta/(n e^epsilon)) for one of n rows, which moves a
    fit by at most 2/n of its bound.
    """
    method = _table(plan, "method")
    while isinstance(method.get("base"), dict):
        method = method["base"]
    rows, asked = method.get("rows"), float(_table(plan, "privacy")["epsilon"])
    if method.get("convert") is not True or rows is None or not is_positive(rows):
        return None
    target, delta = asked / rows, certificate["delta"] / rows * math.exp(-asked)
    log = optimize.brentq(
        lambda log: gaussian_epsilon(math.exp(log), delta) - target, -30.0, 8.0, xtol=1e-13
    )
    moved = 2 / float(rows) * math.sqrt(math.fsum(weight**2 for weight in weights))
    return moved / math.exp(float(log))


def _by_round(
    events: list[Mapping[str, Any]], weights: list[float], base: float | None
) -> list[str]:
    """Compare each round's noise with the base over its weight; without one, with the first's."""
    found: list[str] = []
    number = 0
    near = _NEAR if base is None else 1e-6
    for event in events:
        noise = _noise(event)
        for weight in weights[number : number + event["rounds"]]:
            number += 1
            base = noise * weight if base is None else base
            if not math.isclose(noise * weight, base, rel_tol=near):
                found.append(f"round {number}: noise {noise:g}, plan {base:g} over {weight:g}")
    return found


def _noise(event: Mapping[str, Any]) -> float:
    """Return what a weight divides: the noise of a round."""
    if event["event"] == "wishart":
        return 1 / float(event["ratio"])
    if event["event"] == "laplace":
        return 1 / float(event["epsilon"])
    return float(event["noise_multiplier"])


def _weights(plan: Mapping[str, Any], rounds: int) -> tuple[list[float], list[str]]:
    """Return the weights of the rounds, or why there are none."""
    privacy = _table(plan, "privacy")
    spend, budget = _table(privacy, "spend"), privacy.get("budget", [])
    kind = spend.get("kind", "even")
    numbers = {"power": ("alpha", 0.4), "geometric": ("Q", 0.97)}
    name, usual = numbers.get(str(kind), ("", 1.0))
    value = spend.get(name, usual)
    if type(value) not in (int, float) or not math.isfinite(value):
        return [], [f"spend.{name} is {value!r}"]
    if budget:
        good = isinstance(budget, list) and len(budget) == rounds
        if not good or not all(is_positive(weight) for weight in budget):
            return [], [f"budget is not {rounds} positive weights"]
        return [float(weight) for weight in budget], []
    if kind == "even":
        return [1.0] * rounds, []
    if kind == "power":
        top = rounds if value > 0 else 1
        return [(number / top) ** value for number in range(1, rounds + 1)], []
    if kind == "geometric":
        top = rounds if value < 1 else 1
        return [value ** (top - number) for number in range(1, rounds + 1)], []
    return [], [f"spend.kind is {kind!r}, which is not known"]


def _delta(privacy: Mapping[str, Any], clients: int) -> float:
    if "delta" in privacy:
        return float(privacy["delta"]) if is_positive(privacy["delta"]) else _zero(privacy["delta"])
    pure = _table(privacy, "noise").get("kind") == "laplace"
    return 0.0 if pure else min(1e-5, 1 / (10 * max(clients, 1)))


def _zero(value: Any) -> float:
    """Return 0 for 0, and not-a-number for what is none."""
    return 0.0 if type(value) in (int, float) and value == 0 else math.nan


def _rate(sampler: Mapping[str, Any], clients: int) -> float:
    if "cohort" not in sampler:
        return 1.0
    return float(sampler["cohort"]) / clients if is_positive(sampler["cohort"]) else math.nan


def _table(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = plan.get(name)
    return found if isinstance(found, dict) else {}
