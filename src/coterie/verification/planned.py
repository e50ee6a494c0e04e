"""What a plan.toml says that its run's certificate must say too."""

import math
from collections.abc import Mapping
from typing import Any

_NEAR = 1e-9


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
    untold = plan.get("tuned", "no") != "no" and "tuning" not in certificate
    found += ["settings were tuned, and the certificate does not say so"] * untold
    return found


def spends(plan: Mapping[str, Any], certificate: Mapping[str, Any]) -> list[str]:
    """List how the events, the budget and the noise of a plan disagree."""
    privacy = _table(plan, "privacy")
    asked, given = privacy.get("epsilon"), privacy.get("noise_multiplier")
    events = certificate["events"]
    kinds = {event["event"] for event in events}
    if asked == math.inf:
        return ["the plan asks for no privacy, and events have noise"] * bool(
            kinds - {"non_private"}
        )
    if "non_private" in kinds:
        return ["the plan asks for privacy, and an event has no noise"]
    claimed = any(event.get("claimed") is not None for event in events)
    if asked is not None and not claimed:
        stated = certificate["epsilon"]
        over = isinstance(stated, str) or stated > asked * (1 + 1e-6)
        return [f"epsilon: certificate {stated}, the plan allows {asked}"] * (over and bool(events))
    return _noise(plan, certificate, given) if given is not None and not claimed else []


def _noise(plan: Mapping[str, Any], certificate: Mapping[str, Any], given: float) -> list[str]:
    """Compare noise that was given with that of each round's event."""
    found: list[str] = []
    number = 0
    weights = _weights(plan, certificate["rounds"])
    for event in certificate["events"]:
        for _ in range(event["rounds"]):
            weight = weights[number] if number < len(weights) else math.nan
            number += 1
            noise = 1 / event["epsilon"] if event["event"] == "laplace" else None
            noise = event.get("noise_multiplier", noise)
            if noise is None or not math.isclose(noise * weight, given, rel_tol=_NEAR):
                found.append(f"round {number}: noise {noise}, plan {given} over weight {weight:g}")
    return found[:3]


def _weights(plan: Mapping[str, Any], rounds: int) -> list[float]:
    privacy = _table(plan, "privacy")
    spend = _table(privacy, "spend")
    if privacy.get("budget"):
        return [float(weight) for weight in privacy["budget"]]
    kind = spend.get("kind", "even")
    if kind == "power":
        alpha = spend.get("alpha", 0.4)
        top = rounds if alpha > 0 else 1
        return [(number / top) ** alpha for number in range(1, rounds + 1)]
    if kind == "geometric":
        base = spend.get("Q", 0.97)
        top = rounds if base < 1 else 1
        return [base ** (top - number) for number in range(1, rounds + 1)]
    return [1.0] * rounds


def _delta(privacy: Mapping[str, Any], clients: int) -> float:
    if "delta" in privacy:
        return float(privacy["delta"])
    pure = _table(privacy, "noise").get("kind") == "laplace"
    return 0.0 if pure else min(1e-5, 1 / (10 * max(clients, 1)))


def _rate(sampler: Mapping[str, Any], clients: int) -> float:
    return float(sampler["cohort"]) / max(clients, 1) if "cohort" in sampler else 1.0


def _table(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = plan.get(name)
    return found if isinstance(found, dict) else {}
