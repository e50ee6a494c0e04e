"""What a site has taken part in: its runs, how far each is settled, what its clients have spent."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.deployment.keeping import SITE
from coterie.evaluation.metrics import json_number
from coterie.finished_models import MODELS, client_names
from coterie.privacy.accounting import Guarantee
from coterie.privacy.words import add_up

_SPENT = (
    "at most, of all runs joined, each counted whole: for other clients who see all of their posts"
)

_MOST = 500


def status_of_site(folder: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """Say what a site has taken part in.

    Args:
        folder: The site's folder.
        runs: The folders of the runs to speak of.
    """
    known = sorted(runs, key=lambda path: (_time(path / "run.json") or "", path.name))
    joined = [_read(path / "run.json") for path in known]
    names = {str(one["site"]) for one in joined if one.get("site")}
    guarantees = [_guarantee(one) for one in joined]
    return {
        "kind": "site",
        "folder": str(folder),
        "site": names.pop() if len(names) == 1 else None,
        "runs": [_run(path, promise) for path, promise in zip(known, guarantees, strict=True)],
        "errors": _errors(folder / "errors.log"),
        "worker": _last_line(folder / "worker.log"),
        "spent": _spent(guarantees),
    }


def _run(folder: Path, guarantee: Guarantee | None) -> dict[str, Any]:
    state = _read(folder / "state.json")
    sealed = _read(folder / "personal" / "journal" / "sealed.json").get("round")
    views = None if guarantee is None else guarantee.views
    return {
        "run": folder.name,
        "folder": str(folder),
        "joined": _time(folder / "run.json"),
        "rounds": None if guarantee is None else len(guarantee.events),
        "settled": _number(state.get("settled")),
        "staged": None if type(sealed) is not int else sealed + 1,
        "finished": (folder / SITE).exists(),
        "models": _models(folder),
        "epsilon": None if views is None else json_number(views["other_clients"]),
        "delta": None if guarantee is None else guarantee.delta,
        "simulation": None if guarantee is None else guarantee.simulation,
    }


def _spent(guarantees: Sequence[Guarantee | None]) -> dict[str, Any]:
    """Put together what the runs joined spend of this site's clients, simulations apart."""
    spending = [one for one in guarantees if one is not None and not one.simulation]
    told: dict[str, Any] = {
        "runs": len(spending),
        "simulations": sum(one is not None and one.simulation for one in guarantees),
        "unknown": sum(one is None for one in guarantees),
        "words": _SPENT,
    }
    if not any(one.events for one in spending):
        return {**told, "epsilon": 0.0, "delta": 0.0}
    epsilon, delta = add_up(spending)
    return {**told, "epsilon": json_number(epsilon), "delta": delta}


def _guarantee(joined: dict[str, Any]) -> Guarantee | None:
    """Rebuild what was promised when the site joined; None where that was not noted."""
    try:
        return Guarantee.from_json(joined["guarantee"])
    except (KeyError, TypeError, ValueError):
        return None


def _number(index: Any) -> int:
    """Count rounds from 1; 0 is before the first."""
    return index + 1 if type(index) is int else 0


def _models(folder: Path) -> int:
    try:
        return len(client_names(folder, MODELS))
    except (OSError, ValueError):
        return 0


def _errors(path: Path) -> int:
    """Count the errors that were noted; their words may hold numbers of rows, and stay there."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _last_line(path: Path) -> str | None:
    """Return the last words of the worker; for the site alone, which may see the folder."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return None
    return next((line.strip()[:_MOST] for line in reversed(lines) if line.strip()), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _time(path: Path) -> str | None:
    try:
        written = path.stat().st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
