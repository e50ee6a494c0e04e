"""An entry for the registry of differential privacy deployments, from a finished run.

The keys and the allowed values are those of the public schema of OpenDP's registry
(https://github.com/opendp/deployments-registry-data, schemas/deployments-schema.yaml, as of July
2026). An entry is a draft: its operator reads it, fills in what was not declared, and submits it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.core.files import write_atomically
from coterie.privacy.guarantee import RELATIONS, UNIT, describe_noise, is_in_shares, is_local
from coterie.report import statement
from coterie.report.read import FinishedRun

_MISSING = "Not declared"
_Facts = Mapping[str, Any]


def write_entry(folder: Path, out: Path) -> tuple[str, ...]:
    """Write the entry of a finished run as YAML; return the required keys that it lacks.

    Raises:
        ValueError: If the run guarantees nothing: it is a simulation, has no privacy, or releases
            nothing.
    """
    found = entry(statement.read_certified(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, ("\n".join(to_yaml(found)) + "\n").encode())
    basic = found["deployment"]["basic"]
    return tuple(key for key, value in basic.items() if value in (_MISSING, [_MISSING]))


def entry(run: FinishedRun) -> dict[str, Any]:
    """Return the entry of a run, by the keys of the schema."""
    if run.guarantee.simulation or not run.private:
        why = "is a simulation" if run.guarantee.simulation else "has no epsilon"
        raise ValueError(f"{run.folder}: the run {why}; the registry lists private deployments")
    basic, facts = _basic(run), statement.facts_of(run)
    found = {
        "basic": basic,
        "dp_variant": _variant(run, facts),
        "privacy_loss": _loss(run, facts),
        "deployment_model": _model(run, facts),
        "accounting": _accounting(facts),
        "implementation": _implementation(run, facts),
        "administrative": _administrative(run, facts),
    }
    return {"url_slug": _slug(basic), "status": "Draft", "tier": 3, "deployment": found}


def to_yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    r"""Yield the lines of a mapping as YAML: nested mappings, lists of text, text and numbers.

    A line of text is written in double quotes as JSON, which YAML reads in the same way, several
    lines as a block. Only the slug is bare, as the registry's tools expect.

    >>> list(to_yaml({"a": {"b": ["x: y"], "c": 1e-05}, "url_slug": "a-b", "d": "one\ntwo"}))
    ['a:', '  b:', '    - "x: y"', '  c: 1.0e-05', 'url_slug: a-b', 'd: |-', '  one', '  two']
    """
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield f"{indent}{key}:"
            yield from to_yaml(item, f"{indent}  ")
        elif isinstance(item, list):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_scalar(one)}" for one in item)
        elif isinstance(item, str) and "\n" in item:
            yield f"{indent}{key}: |-"
            yield from (f"{indent}  {_printable(line).strip()}" for line in item.split("\n"))
        else:
            yield f"{indent}{key}: {item if key == 'url_slug' else _scalar(item)}"


def _scalar(value: str | float) -> str:
    if not isinstance(value, str):
        text = repr(value)  # YAML 1.1 reads an exponent only after a decimal point
        return re.sub(r"^(-?\d+)e", r"\1.0e", text)
    return json.dumps(_printable(value), ensure_ascii=False)


def _printable(text: str) -> str:
    """Return text without what YAML reads differently: line separators, control characters."""
    return "".join(one if one.isprintable() else " " for one in text)


def _basic(run: FinishedRun) -> dict[str, Any]:
    about, data = run.certificate.get("about") or {}, Path(str(run.result["data"])).name
    method, clients = run.result["method"], run.guarantee.clients
    return {
        "name": f"Personal models for {data}",
        "data_curators": [about.get("operator", _MISSING)],
        "intended_use": about.get("purpose", _MISSING),
        "data_product_type": "Machine learning model",
        "data_product_region": about.get("region", _MISSING),
        "description": f"One model for each of {clients} clients, trained together with {method}.",
        "publication_date": str(run.certificate.get("finished", _MISSING))[:10],
    }


def _slug(basic: Mapping[str, Any]) -> str:
    """Return the slug of an entry as the registry makes it: name, curators, year."""
    parts = basic["name"], "-".join(basic["data_curators"]), basic["publication_date"][:4]
    return "_".join(re.sub(r"\W+", "_", part.lower()) for part in parts).replace("_", "-")


def _variant(run: FinishedRun, facts: _Facts) -> dict[str, Any]:
    period = (run.certificate.get("about") or {}).get("data_period")
    rows = f"All possible rows of {run.guarantee.clients} clients"
    uncovered = facts["sentences"]["Not covered"]
    return {
        "variant_name": "Approximate DP" if run.guarantee.delta else "Pure DP",
        "data_domain": f"{rows}, collected {period}." if period else f"{rows}.",
        "unprotected_quantities": uncovered or "Metrics of the models.",
    }


def _loss(run: FinishedRun, facts: _Facts) -> dict[str, Any]:
    promise = run.guarantee
    lines = [
        f"- {who}: epsilon = {own} under {promise.relation}, {other} under {facts['other']}"
        for who, own, other, _ in facts["adversaries"]
    ]
    lines += [f"- Gaussian DP: mu = {facts['mu']}"] * bool(facts["mu"])
    lines += [f"- A person at {k} clients: epsilon = {bound}" for k, bound in facts["persons"][1:]]
    parameters = {"epsilon": run.epsilon, "delta": promise.delta}
    return {
        "privacy_unit": promise.unit or UNIT,
        "privacy_unit_details": f"{UNIT.capitalize()}. In neighbouring datasets "
        f"{RELATIONS[promise.relation]} (relation {promise.relation}).",
        "privacy_parameters": parameters if promise.delta else {"epsilon": run.epsilon},
        "privacy_parameters_details": "\n".join([f"Against {run.view}.", *lines]),
    }


def _model(run: FinishedRun, facts: _Facts) -> dict[str, Any]:
    local, sites = is_local(run.guarantee), run.deployment.get("sites")
    deployed = f"Rows stay at {sites} sites." if sites else statement.ONE_PLACE
    who = "Each client adds the noise" if local else "The server adds the noise"
    if is_in_shares(run.guarantee):
        who = "All clients together add the noise, in shares"
    actors = [f"- {who}: epsilon = {own} ({why or 'observes every release'})"
              for who, own, _, why in facts["adversaries"]]  # fmt: skip
    return {
        "model_name": "Central" if not sites else "Local" if local else "Federated",
        "model_name_details": f"{deployed} {who}.",
        "actors": "\n".join(actors),
        "release_type": "One release",
        "release_type_details": f"One run with {len(run.guarantee.events)} rounds; clients observe "
        "the release of each round. Fixed afterwards: " + " ".join(statement.FIXED),
        "data_source_type": "Static",
        "data_source_type_details": "What grows with further use: " + " ".join(statement.GROWS),
        "access_type": "Non-interactive",
    }


def _accounting(facts: _Facts) -> dict[str, Any]:
    return {
        "post_processing": "The shared model and the personal models are functions of the releases "
        "and of a client's own rows.",
        "composition": f"All rounds are composed. {facts['sentences']['Accountant']}",
    }


def _implementation(run: FinishedRun, facts: _Facts) -> dict[str, Any]:
    notes = [f"- {name}, source {source}, licence {licence}, private rows {rows}"
             for name, _, source, licence, rows in statement.input_rows(run)]  # fmt: skip
    assumed = [f"- {text}" for text in run.guarantee.assumed]
    code = ", ".join(f"{title} {text}" for title, text in statement.code_rows(run))
    tuning = str(run.result.get("tuning", ""))
    return {
        "preprocessing_and_hyperparameter_tuning": "\n".join(
            [f"Tuning: {tuning}.", "Public inputs:", *(notes or ["- none"])]
            + ["Assumed public:"] * bool(assumed)
            + assumed
        ),
        "mechanisms": f"Sums of clipped contributions with {describe_noise(run.guarantee.events)}. "
        f"{facts['sentences']['Sampling']} {_grid(run)}Software: {code}.",
        "justification": _MISSING,
    }


def _grid(run: FinishedRun) -> str:
    releases = run.certificate.get("releases") or ()
    steps = [part.get("grid") for release in releases for part in release["parts"]]
    if not steps or None in steps:
        return ""
    return "Every released number lies on a public grid, against attacks on floating point. "


def _administrative(run: FinishedRun, facts: _Facts) -> dict[str, Any]:
    about = run.certificate.get("about") or {}
    signed = statement.signed_by(run)
    return {
        "sources": _MISSING,
        "notes": "\n".join(
            [
                f"SHA-256 of the certificate: {facts['digest']}",
                f"Certificate signed by {signed}" if signed else "The certificate is not signed.",
                *run.caveats,
            ]
        ),
        "registry_authors": [about.get("contact", about.get("operator", _MISSING))],
    }
