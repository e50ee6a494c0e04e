"""The certificate of a finished run, `guarantee.json`: what others need to check the guarantee.

Format 2 holds numbers, names and hashes: the guarantee with every event, the bounds and the grid of
every release, the hash of every release, of every public file and of every public input, and
versions. Text that people read is rendered from it; no sentence in it is parsed. The only text in
it is what the plan's owner declares (`about`, `inputs`), and what is assumed public. Nothing in it
depends on clients' rows but the hashes of the releases. `coterie verify` reads it with code of its
own.

`sha256` is the hash of the rest (see `seal`). It reveals an accidental or unskilled edit. A skilled
one can compute it again, and then has to agree with releases, ledger, plan and arithmetic.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from coterie.core.files import write_atomically
from coterie.planning.about import describe_inputs
from coterie.planning.plan import Plan
from coterie.privacy.billboard import Billboard
from coterie.privacy.events import list_runs
from coterie.privacy.guarantee import Guarantee
from coterie.privacy.mechanisms import Mechanism, Shapes
from coterie.runs.log import Log, now, versions

CERTIFICATE = "guarantee.json"
FORMAT = "coterie certificate"
FORMAT_VERSION = 2
PUBLIC = ("plan.toml", "ledger.jsonl", "posts.npz", "shared.npz")
_SELECTION = ("epsilon_chosen_alone", "delta", "runs_mean", "eta", "score_event", "candidates")
_DEPLOYMENT = (
    "trust",
    "sites",
    "clients_by_site",
    "deadline",
    "minimum",
    "patience",
    "threshold",
    "sites_needed",
    "hidden_cohort",
    "coordinator_view",
    "epsilon_coordinator",
)


def keep_certificate(
    folder: Path,
    summary: Mapping[str, Any],
    guarantee: Guarantee,
    plan: Plan,
    billboard: Billboard,
    log: Log,
) -> None:
    """Write the certificate of a run whose public files are in a folder, and log its hash.

    `selection` and `deployment` are taken from the summary, without their text.
    """
    deployment, selection = summary.get("deployment"), summary.get("selection")
    finished = now()
    begun = log.begun or finished
    if deployment is not None:
        # To the day: the duration of rounds would reveal who was sampled.
        begun, finished = (f"{time[:10]}T00:00" for time in (begun, finished))
    certificate = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **describe_method(plan, guarantee.clients),
        **describe_guarantee(guarantee),
        **describe_declarations(plan),
        "releases": describe_releases(billboard),
        "posts": [
            {"index": index, "sha256": digest}
            for index, digest in sorted(billboard.ledger.released.items())
        ],
        "files": {name: _hash(folder / name) for name in PUBLIC},
        "versions": versions(),
        "started": _minute(begun),
        "finished": _minute(finished),
    }
    if selection is not None:
        certificate["selection"] = {key: selection[key] for key in _SELECTION}
    if deployment is not None:
        certificate["deployment"] = {key: deployment[key] for key in _DEPLOYMENT}
        # Not among `files`: a simulated run has no such file.
        certificate["deployment"]["federation"] = _hash(folder / "federation.toml")
    certificate["sha256"] = digest = seal(certificate)
    text = json.dumps(certificate, indent=2, allow_nan=False)
    write_atomically(folder / CERTIFICATE, text.encode())
    posts, epsilon = len(certificate["posts"]), certificate["epsilon"]
    log.note("finished", sync=True, posts=posts, epsilon=epsilon, certificate=digest)


def describe_method(plan: Plan, clients: int) -> dict[str, Any]:
    """Return the method's name, the shape of its releases, and how its settings were chosen.

    `protected_rows` is the number of rows per client for which a published recipe converts the
    budget from rows to clients, or null.
    """
    clipping = plan.method.clipping(clients, max(plan.posts, 1), plan.clip(clients))
    return {
        "method": plan.method.kind,
        "shape": plan.method.shape.value,
        "protected_rows": clipping.rows,
        "tuning": plan.tuned,
    }


def describe_declarations(plan: Plan) -> dict[str, Any]:
    """Return what the owner declares about the run, if anything, and all public inputs."""
    about = {} if plan.about is None else plan.about.texts()
    inputs = describe_inputs(plan.about, plan.to_table())
    return {"about": about, "inputs": inputs} if about else {"inputs": inputs}


def describe_guarantee(guarantee: Guarantee) -> dict[str, Any]:
    """Return the numbers and names of a guarantee; an infinite epsilon is the string "inf".

    `epsilon` is the number against the other clients, before any selection.
    """
    who = guarantee.participation
    views = {view: _plain(epsilon) for view, epsilon in guarantee.views.items()}
    found: dict[str, Any] = {
        "unit": "client",
        "relation": guarantee.relation,
        "sampling": who.kind,
        "rate": who.rate,
        "cohort": "visible" if who.visible else "hidden",
        "clients": guarantee.clients,
        "rounds": len(guarantee.events),
        "delta": guarantee.delta,
        "epsilon": views["other_clients"],
        "views": views,
        "events": list_runs(guarantee.events),
        "simulation": guarantee.simulation,
        "assumed_public": list(guarantee.assumed),
    }
    if guarantee.per_participation is not None:
        found["epsilon_per_participation"] = guarantee.per_participation
    if (claimed := guarantee.claimed_epsilon) is not None:
        found["claimed_epsilon"] = claimed
        found["true_delta_at_claimed"] = guarantee.claimed_only.delta_at(claimed)
    return found


def describe_releases(billboard: Billboard) -> list[dict[str, Any]]:
    """Return the bounds and the grid of every release, equal neighbours together.

    A part of a release is the leaves that are clipped together: `norm` is the order of the norm
    (1 or 2), `bound` the largest norm of one client's contribution to the sum, and `grid` the step
    of which every released number is a multiple. All three are null where there is none.
    """
    return _by_release(billboard, _parts)


def noise_of_releases(billboard: Billboard) -> list[dict[str, Any]]:
    """Return the bound and the noise of every release in absolute numbers, equal ones together.

    `norm` and `bound` are as in `describe_releases`. `noise` is the standard deviation of the noise
    of one number of the released sum, the largest of the part; under local noise, of one message.
    """
    return _by_release(billboard, _noise)


def _by_release(
    billboard: Billboard, describe: Callable[[Mechanism, Shapes], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    shapes: dict[Mechanism, Shapes] = {}

    def parts(index: int) -> list[dict[str, Any]]:
        mechanism = billboard.mechanism(index)
        if mechanism not in shapes:
            value = billboard.read(index).value
            shapes[mechanism] = {name: tuple(leaf.shape) for name, leaf in value.items()}
        return describe(mechanism, shapes[mechanism])

    indices = sorted(billboard.ledger.released)
    return [
        {"rounds": len(list(alike)), "parts": found}
        for found, alike in groupby(parts(index) for index in indices)
    ]


def _noise(mechanism: Mechanism, totals: Shapes) -> list[dict[str, Any]]:
    seen = mechanism.of_message() if mechanism.local else mechanism
    deviations = seen.standard_deviations(totals)
    return [
        {
            "leaves": part["leaves"],
            "norm": part["norm"],
            "bound": part["bound"],
            "noise": float(max(deviations[leaf] for leaf in part["leaves"])),
        }
        for part in _parts(mechanism, totals)
    ]


def _parts(mechanism: Mechanism, totals: Shapes) -> list[dict[str, Any]]:
    bounds, steps = mechanism.norm_bounds(totals), mechanism.grid(totals) or {}
    if not bounds:
        return [{"leaves": list(totals), "norm": None, "bound": None, "grid": None}]
    return [
        {
            "leaves": list(one.shapes),
            "norm": one.order,
            "bound": float(one.bound),
            "grid": steps.get(next(iter(one.shapes))),
        }
        for one in bounds
    ]


def seal(certificate: Mapping[str, Any]) -> str:
    """Return the hash of a certificate without its own hash: JSON without spaces, keys sorted."""
    rest = {key: value for key, value in certificate.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _minute(time: str) -> str:
    """Return a time to the minute: seconds would reveal more about the rows than is needed."""
    return f"{time[:16]}Z"


def _plain(epsilon: float) -> float | str:
    return "inf" if epsilon == math.inf else epsilon
