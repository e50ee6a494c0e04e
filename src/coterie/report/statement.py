"""A privacy statement: what one run guarantees, on one page of paper, for a file or a signature.

The numbers are recomputed from the events of the certificate, as in the report. Metrics are left
out: the page has nothing that depends on clients' rows, and may be published with the certificate.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from coterie.core.files import write_atomically
from coterie.data.inspect import READ_OFF
from coterie.planning.about import READ_OFF_KEYS
from coterie.privacy.guarantee import RELATIONS, UNIT, Guarantee, round_up
from coterie.privacy.reviewer import review
from coterie.privacy.selection import CHOSEN_ONLY, FOR_OTHERS
from coterie.report import sections
from coterie.report.read import FinishedRun, read_finished
from coterie.report.tables import DASH, percent
from coterie.verification.signature import read_signature

NOT_DECLARED = "not declared"
_TITLES = {
    "operator": "operator",
    "purpose": "purpose",
    "contact": "contact",
    "data_period": "data from",
    "region": "region",
}
_SUBJECTS = ("Sampling", "Accountant", "Not covered")
_OTHER = {"zero_out": "replace", "replace": "zero_out"}
_MOST_INPUTS, _MOST_ASSUMED = 5, 4
_LONGEST = {"name": 40, "kind": 24, "source": 80, "licence": 24, "assumed": 140}
"""Public inputs and assumptions on one page, and characters of each; guarantee.json has all."""
_SIZES = ((2300, 8.2), (2900, 7.6), (3700, 7.0), (5000, 6.4), (6000, 5.6))
_SMALLEST = 5.0
"""Characters of a page, and the size of its letters in points, so that it is one page of A4."""

FIXED = (
    "The releases of this run, and every epsilon stated here: the ledger is closed.",
    "What is computed from the releases: the shared model and, with their own rows, models of "
    "clients that join later. These clients release nothing, so their own epsilon is 0.",
    "Predictions that a client makes with its own model and keeps.",
)
"""What no later use of a run can change."""
ONE_PLACE = "All rows were in one place, whose operator is trusted."
"""An assumption of runs that are no deployment."""
GROWS = (
    "Another private run, tuning or selection on the same clients: its epsilon comes on top.",
    "A personal model, or predictions of it, that a client shares: they depend on its own rows "
    "without noise, and no epsilon covers that.",
    "Published metrics and reports, and choices made by them: no epsilon covers them.",
    "A person whose rows are at more clients than listed here.",
)
"""What adds to what others can learn."""


def write_statement(folder: Path, out: Path) -> Path:
    """Write the statement of a finished run: HTML without scripts, one page of A4 when printed.

    Raises:
        ValueError: If the folder has no finished run, or cannot be read.
    """
    from coterie.report.page import environment

    facts = facts_of(read_certified(folder))
    page = environment().get_template("statement.html.j2").render(**facts, size=_size(facts))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.strip().encode(errors="replace") + b"\n")
    return out


def read_certified(folder: Path) -> FinishedRun:
    """Return a finished run that has a certificate; a site's folder of a deployment has none.

    Raises:
        ValueError: If it has none, has no finished run, or cannot be read.
    """
    (run,) = read_finished([folder])
    if run.certificate.get("format") != "coterie certificate":
        raise ValueError(
            f"{folder}: its guarantee.json is no certificate; give the folder of a run, or of the "
            "coordinator of a deployment"
        )
    return run


def facts_of(run: FinishedRun) -> dict[str, Any]:
    """Return what a statement says, by part."""
    stated, told = run.certificate, review(run.guarantee) if run.selection is None else None
    return {
        "run": run,
        "warnings": list(_warnings(run)),
        "caveats": run.caveats,
        "declared": [*declared(run), ["run", _trained(run)]],
        "unit": (run.guarantee.unit, UNIT),
        "neighbours": RELATIONS[run.guarantee.relation],
        "other": _OTHER[run.guarantee.relation],
        "adversaries": list(_adversaries(run)) if run.shares else [],
        "mu": _mu(told),
        "attacks": _attacks(told),
        "persons": _persons(told),
        "sentences": _sentences(run),
        "assumed": _few(list(run.guarantee.assumed), _MOST_ASSUMED),
        "inputs": input_rows(run, short=True)[:_MOST_INPUTS],
        "more_inputs": max(0, len(stated.get("inputs") or ()) - _MOST_INPUTS),
        "lists_inputs": "inputs" in stated,
        "place": "" if run.deployment else ONE_PLACE,
        "fixed": FIXED if run.shares else FIXED[2:],
        "grows": GROWS if run.shares else GROWS[:3],
        "code": code_rows(run),
        "signed": signed_by(run),
        "digest": _digest(run.folder / "guarantee.json"),
    }


def declared(run: FinishedRun) -> list[list[str]]:
    """Return what the owner declares, without the unit; what is missing is named."""
    about = run.certificate.get("about") or {}
    return [[title, str(about.get(key, NOT_DECLARED))] for key, title in _TITLES.items()]


def differ(runs: Sequence[FinishedRun]) -> bool:
    """Return whether runs have other declarations, or other public inputs, than the first."""
    keys = ("about", "inputs")
    first = [runs[0].certificate.get(key) for key in keys]
    return any([run.certificate.get(key) for key in keys] != first for run in runs)


def _part_of_rows(run: FinishedRun, one: Mapping[str, Any]) -> str:
    """Return whether private rows had a part in a public input, as far as that is stated."""
    if one.get("no_private_rows") is True:
        return "had no part"
    place, _, key = str(one.get("name")).rpartition(".")
    proposed = place == "data.source" and key in READ_OFF_KEYS  # by `coterie init`
    accepted = proposed and any(text.endswith(READ_OFF) for text in run.guarantee.assumed)
    return "used; accepted as public" if accepted else NOT_DECLARED


def input_rows(run: FinishedRun, *, short: bool = False) -> list[list[str]]:
    """Return name and kind, SHA-256, source, licence and declaration of public inputs."""
    rows = []
    for one in run.certificate.get("inputs") or ():
        given = {key: str(one.get(key) or NOT_DECLARED) for key in ("source", "licence")}
        given |= {key: str(one.get(key)) for key in ("name", "kind")}
        cut = {key: _cut(text, _LONGEST[key]) for key, text in given.items()}
        told, digest = cut if short else given, one.get("sha256")
        rows.append(
            [
                f"{told['name']} ({told['kind']})",
                _cut(str(digest), 16) if digest else "file not at hand",
                told["source"],
                told["licence"],
                _part_of_rows(run, one),
            ]
        )
    return rows


def code_rows(run: FinishedRun) -> list[list[str]]:
    """Return which code made the run."""
    versions = run.versions
    rows = [["coterie", str(versions.get("coterie", NOT_DECLARED))]]
    names = {"coterie_commit": "commit", "coterie_files": "SHA-256 of its files"}
    return rows + [[title, str(versions[key])] for key, title in names.items() if key in versions]


def signed_by(run: FinishedRun) -> str:
    """Return who signed the certificate, unchecked; empty if nobody did."""
    try:
        found = read_signature(run.folder / "guarantee.json")
    except ValueError as error:
        return f"nobody: {error}"
    return "" if found is None else f"key {found.key_id} (public key {found.key.hex()})"


def _warnings(run: FinishedRun) -> Iterator[str]:
    """Yield what a reader has to know first."""
    if run.guarantee.simulation:
        yield "SIMULATION: noise from a known seed, not a guarantee."
    if run.shares and not run.private:
        yield "NOT PRIVATE: epsilon is infinite."
    if "NOT COVERED" in run.result.get("tuning", ""):
        yield f"Tuning: {run.result['tuning']}."


def _trained(run: FinishedRun) -> str:
    """Return which run this is, in one line."""
    finished = str(run.certificate.get("finished", "")).replace("T", " ")
    sites = run.deployment.get("sites")
    data = Path(str(run.result["data"])).name
    parts = [
        f"{run.folder.resolve().name}: {run.result['method']} on {data}",
        f"{run.guarantee.clients} clients" + (f" at {sites} sites" if sites else ""),
        f"finished {finished}" if finished else "",
    ]
    return ", ".join(part for part in parts if part)


def _adversaries(run: FinishedRun) -> Iterator[list[str]]:
    """Yield adversary, epsilon under the run's relation, under the other one, and the reason."""
    if run.private and run.selection is not None:
        yield [CHOSEN_ONLY, round_up(run.epsilon), DASH, ""]
        yield ["all other clients together", "not stated", DASH, FOR_OTHERS]
        return
    names = {who: view for view, who in sections.adversaries(run).items()}
    other = _views(run.guarantee, _OTHER[run.guarantee.relation])
    for who, epsilon, why in sections.views(run):
        bound = other.get(names[who])
        yield [who, round_up(epsilon), DASH if bound is None else round_up(bound), why]


def _views(guarantee: Guarantee, relation: Any) -> dict[str, float]:
    """Return epsilon by view under another relation; without those that have no proved account."""
    told = review(guarantee)
    epsilon = None if told is None else told["epsilon"][relation]
    found = {} if epsilon is None else {"other_clients": epsilon, "outsider": epsilon}
    try:
        return found | replace(guarantee, relation=relation).views
    except ValueError:
        return found


def _mu(told: Any) -> str:
    known = {} if told is None else {name: m for name, m in told["mu"].items() if m is not None}
    return ", ".join(f"{round_up(m)} ({name})" for name, m in known.items())


def _attacks(told: Any) -> list[list[str]]:
    if told is None:
        return []
    return [
        [percent(one["false_positives"]), sections.ceiling(one["true_positives"])]
        for one in told["attack"]
    ]


def _persons(told: Any) -> list[list[str]]:
    if told is None:
        return []
    return [
        [str(one["clients"]), "no bound" if one["epsilon"] is None else round_up(one["epsilon"])]
        for one in told["person"]
    ]


def _sentences(run: FinishedRun) -> dict[str, str]:
    """Return the sentences of the guarantee that no other part of the page has, by subject."""
    said = dict(sections.sentences(run))
    found = {about: said.get(f"{about}:", "").strip() for about in _SUBJECTS}
    return {about: text[:1].upper() + text[1:] for about, text in found.items()}


def _few(texts: Sequence[str], most: int) -> list[str]:
    """Return the first texts, cut, and how many more there are."""
    more = [f"and {len(texts) - most} more, in guarantee.json"] * (len(texts) > most)
    return [_cut(text, _LONGEST["assumed"]) for text in texts[:most]] + more


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _size(facts: Any) -> float:
    """Return the size of letters in points, smaller for more text."""
    parts = [value for key, value in facts.items() if key != "run"]
    # Letters that are about twice as wide as others count twice.
    written = sum(len(text) + sum(map(_is_wide, text)) for text in _texts(parts))
    return next((size for most, size in _SIZES if written <= most), _SMALLEST)


def _is_wide(letter: str) -> bool:
    return letter in "MW@" or east_asian_width(letter) in "WF"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
