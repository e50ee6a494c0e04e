"""The status of a deployment, read from a coordinator's run folder or from a site's folder.

Nothing is locked or changed, so a running deployment can be inspected: a line that is being written
is skipped, and the system's list of locks shows whether a process uses the folder. The result is
for readers who may see the folder: who answered a round, and how many, comes from `log.jsonl`,
which is private.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.deploy.coordinator import STATE, RoundStatistics
from coterie.deploy.federation import FEDERATION, PLAN, Agreement, epsilon_by_view, load_agreement
from coterie.deploy.results import RESULT, SITE
from coterie.engine.models import MODELS, client_names
from coterie.evaluation.metrics import json_number
from coterie.privacy.guarantee import Guarantee, add_up

PRIVATE = "who answered a round, and how many, is private to readers of this folder"
_COUNTS = tuple(field.name for field in fields(RoundStatistics))
_TROUBLE = {
    "rejected": "rejected",
    "declined": "declined",
    "clipped": "clipped",
    "node_error": "errors",
    "other_version": "other_versions",
}
_LOCKS = Path("/proc/locks")
_SPENT = "upper bound over all runs of this site, against other clients who observe all releases"
_LONGEST = 500
_PAUSE = 1.0
Events = list[dict[str, Any]]


def status_of(folder: Path) -> dict[str, Any]:
    """Return the status of a coordinator's run folder, a site's folder, or its folder of a run."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; check the path")
    if (folder / "run.json").exists():
        return _site_status(folder.parent, [folder])
    if (folder / FEDERATION).exists() and not (folder / "pyproject.toml").exists():
        return _run_status(folder)
    runs = [path.parent for path in folder.glob("*/run.json")]
    if runs or (folder / "worker.log").exists():
        return _site_status(folder, runs)
    began = [path.parent for path in folder.glob(f"runs/*/{FEDERATION}")]
    if began and (folder / "pyproject.toml").exists():
        raise ValueError(
            f"{folder}: an app's folder; for its run use `coterie deploy status {began[0]}`"
        )
    raise ValueError(
        f"{folder}: neither a coordinator's run folder (it has {PLAN} and {FEDERATION}) nor a "
        "site's folder; the first is `folder` in the app's pyproject.toml, the second in "
        "--node-config"
    )


def wait_for(folder: Path, seconds: float = math.inf, grace: float = 60.0) -> str:
    """Wait for the run in a folder to end; return its state, "running" if `seconds` pass before.

    The folder may not exist yet, because a ServerApp makes it some seconds after its app was
    submitted. A run that stopped before may have been submitted again, so an end that is found at
    the beginning counts only if nothing happens for `grace` seconds.

    Raises:
        FileNotFoundError: If there is no run after five times `grace`.
    """
    begun = time.monotonic()
    before = _size(folder / "log.jsonl")
    while True:
        state, passed = "running", time.monotonic() - begun
        if (folder / "log.jsonl").exists():
            state = _state(folder, list(read_events(folder / "log.jsonl")))
        is_new = _size(folder / "log.jsonl") != before or passed >= grace
        if state == "finished" or (state != "running" and is_new):
            return state
        if passed >= seconds:
            return "running"
        if passed >= 5 * grace and not (folder / "log.jsonl").exists():
            raise FileNotFoundError(
                f"{folder}: no run after {5 * grace:g} s; check the path, and `flwr log` of the run"
            )
        time.sleep(min(_PAUSE, max(seconds - passed, 0.0)))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _run_status(folder: Path) -> dict[str, Any]:
    agreement = load_agreement(folder)
    events = list(read_events(folder / "log.jsonl"))
    planned = agreement.plan.posts
    begun = any(one["event"] in ("round", "packed", "finished") for one in events)
    charged, released, sound = _account(folder, planned, begun and planned > 0)
    state = _state(folder, events)
    status: dict[str, Any] = {
        "kind": "coordinator",
        "folder": str(folder),
        "run": _read(folder / STATE).get("run"),
        "state": state,
        "trust": agreement.federation.trust,
        "started": events[0]["time"] if events else None,
        "last_event": events[-1]["time"] if events else None,
        "rounds": planned,
        "charged": charged,
        "released": released,
        "ledger": "sound" if sound else "missing or damaged: all planned rounds count as spent",
        "epsilon": _epsilons(agreement, charged),
        "by_round": _by_round(events),
        "sites": _sites(folder, agreement, events),
        "unknown_nodes": sum(one["event"] == "unknown_node" for one in events),
        "node_errors": sum(
            _times(one) for one in events if one["event"] == "node_error" and "site" not in one
        ),
        "delivered": _delivered(events),
        "failure": _failure(events) if state == "failed" else None,
        "private": PRIVATE,
    }
    return {**status, "next": _next_step(status, agreement)}


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log, without a line that is truncated or being written."""
    for line in _text(path).split("\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("event"), str) and "time" in found:
            yield found


def _account(folder: Path, posts: int, begun: bool) -> tuple[int, int, bool]:
    """Return how many rounds the ledger charged and released, and whether it is sound.

    If not (it is missing although a round was begun, or a line other than the last cannot be read),
    all planned rounds count as charged: the true amount is not known, and is never more.
    """
    try:
        content = (folder / "ledger.jsonl").read_bytes()
    except FileNotFoundError:
        return (posts, 0, False) if begun else (0, 0, True)
    charged, released, sound = set[int](), set[int](), True
    for line in content.split(b"\n")[:-1]:  # after the last line break a line is being written
        try:
            entry = json.loads(line.decode())
            charged |= {int(entry["charge"])} if "charge" in entry else set()
            released |= {int(entry["release"])} if "release" in entry else set()
        except (ValueError, TypeError, RecursionError):
            sound = False
    sound = sound and (bool(charged) or not begun)
    return len(charged) if sound else posts, len(released), sound


def _epsilons(agreement: Agreement, charged: int) -> dict[str, Any]:
    """Return epsilon by adversary: of the rounds that are charged, and of all planned rounds."""
    guarantee, federation = agreement.guarantee, agreement.federation
    so_far = replace(guarantee, events=guarantee.events[:charged])
    return {
        **{
            name: {view: json_number(e) for view, e in epsilon_by_view(one, federation).items()}
            for name, one in (("spent", so_far), ("planned", guarantee))
        },
        "delta": guarantee.delta,
        "relation": guarantee.relation,
        "simulation": guarantee.simulation,
    }


def _by_round(events: Events) -> list[dict[str, Any]]:
    """Return the statistics of each round, including the current one."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] not in ("round", "incomplete") or type(event.get("round")) is not int:
            continue
        released, number = event["event"] == "round", event["round"]
        one = found.setdefault(number, {"round": number, "repeated": 0})
        one |= {name: event.get(name, 0) for name in _COUNTS}
        one |= {"released": released, "time": event["time"]}
        one["repeated"] += not released
    return [found[number] for number in sorted(found)]


def _sites(folder: Path, agreement: Agreement, events: Events) -> dict[str, dict[str, Any]]:
    """Return for each site when it connected, which round counted, and what went wrong."""
    counted = _read(folder / STATE).get("counted")
    counted = counted if isinstance(counted, dict) else {}
    found: dict[str, dict[str, Any]] = {
        name: {
            "clients": len(site.clients),
            "connected": None,
            "counted": _from_one(counted.get(name)),
            **dict.fromkeys(_TROUBLE.values(), 0),
            "last_trouble": None,
        }
        for name, site in agreement.federation.sites.items()
    }
    for event in events:
        kind = event["event"]
        named = event.get("sites") or () if kind == "handshake" else [event.get("site")]
        for site in (found[name] for name in named if name in found):
            if kind in ("handshake", "connected"):
                site["connected"] = event["time"]
            if kind in _TROUBLE:
                site[_TROUBLE[kind]] += _times(event)
                reason = str(event.get("reason", ""))
                site["last_trouble"] = {"time": event["time"], "reason": reason}
    return found


def _times(event: Mapping[str, Any]) -> int:
    """Return how many occurrences a line of the log stands for."""
    times = event.get("times", 1)
    return times if type(times) is int else 1


def _state(folder: Path, events: Events) -> str:
    if (folder / RESULT).exists():
        return "finished"
    # The event that began or ended the last start; a kill logs nothing.
    marks = ("started", "resumed", "failed", "interrupted")
    last = next((one["event"] for one in reversed(events) if one["event"] in marks), "")
    locked = is_locked(folder / ".lock")
    if locked or (locked is None and last not in ("failed", "interrupted")):
        return "running"
    return "failed" if last == "failed" else "stopped"


def is_locked(path: Path, locks: Path = _LOCKS) -> bool | None:
    """Return whether a process of this machine has a lock on a file; None if this is unknown."""
    try:
        about, listed = path.stat(), locks.read_text(encoding="utf-8")
    except OSError:
        return False if locks.exists() else None
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    return any(place in line.split() for line in listed.splitlines() if "FLOCK" in line)


def _delivered(events: Events) -> int | None:
    """Return how many sites received the last shared tree; None if it was not sent yet."""
    sent = [event for event in events if event["event"] == "delivered"]
    return len({name for event in sent for name in event.get("sites") or ()}) if sent else None


def _failure(events: Events) -> dict[str, Any] | None:
    event = next((one for one in reversed(events) if one["event"] == "failed"), None)
    return None if event is None else {name: event.get(name) for name in ("time", "kind", "reason")}


def _next_step(status: Mapping[str, Any], agreement: Agreement) -> str:
    """Return what the run needs to continue."""
    sites, delivered = len(agreement.federation.sites), status["delivered"]
    if status["ledger"] != "sound":
        return "ledger.jsonl is missing or damaged: restore it; the run cannot resume without it"
    if status["state"] == "finished":
        if delivered is None or delivered >= sites:
            return f"nothing: the run is finished; `coterie verify {status['folder']}` checks it"
        return (
            f"{sites - delivered} of {sites} sites have not received the last shared model: start "
            "them and submit the app again; this spends nothing"
        )
    if status["state"] == "running":
        seconds = agreement.federation.deadline
        return f"nothing: the run waits at most {seconds:g} s for answers to a request"
    done, rounds = status["released"], status["rounds"]
    resumes = f"the run resumes with round {done + 1} of {rounds}, and charges no round twice"
    if done >= rounds:
        resumes = "the run finishes from its stored files"
    failure = status["failure"]
    reason = "" if failure is None else f"{failure['kind']}: {failure['reason']}; "
    return f"{reason}submit the app again (flwr run): {resumes}"


def _site_status(folder: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """Return which runs a site joined, how far each is, and what its clients have spent."""
    known = sorted(runs, key=lambda path: (_joined(path), path.name))
    joined = [_read(path / "run.json") for path in known]
    names = {str(one["site"]) for one in joined if one.get("site")}
    lines = _text(folder / "worker.log").strip().splitlines()
    guarantees = [_guarantee(one) for one in joined]
    return {
        "kind": "site",
        "folder": str(folder),
        "site": names.pop() if len(names) == 1 else None,
        "runs": [_joined_run(path, one) for path, one in zip(known, guarantees, strict=True)],
        # Their text may quote rows, and is not shown.
        "errors": _text(folder / "errors.log").count("\n"),
        "worker": lines[-1].strip()[:_LONGEST] if lines else None,
        "spent": _spent(guarantees),
    }


def _joined_run(folder: Path, guarantee: Guarantee | None) -> dict[str, Any]:
    state = _read(folder / "state.json")
    staged = _read(folder / "personal" / "journal" / "sealed.json").get("round")
    return {
        "run": folder.name,
        "folder": str(folder),
        "joined": _joined(folder),
        "rounds": None if guarantee is None else len(guarantee.events),
        "counted": _from_one(state.get("counted")) or 0,
        "staged": _from_one(staged),
        "finished": (folder / SITE).exists(),
        "models": _models(folder),
        "epsilon": None if guarantee is None else json_number(guarantee.views["other_clients"]),
        "delta": None if guarantee is None else guarantee.delta,
        "simulation": None if guarantee is None else guarantee.simulation,
    }


def _spent(guarantees: Sequence[Guarantee | None]) -> dict[str, Any]:
    """Return what the runs joined spend in total of this site's clients, without simulations."""
    spending = [one for one in guarantees if one is not None and not one.simulation]
    epsilon, delta = 0.0, 0.0
    if any(one.events for one in spending):
        epsilon, delta = add_up(spending)
    return {
        "runs": len(spending),
        "simulations": sum(one is not None and one.simulation for one in guarantees),
        "unknown": sum(one is None for one in guarantees),
        "note": _SPENT,
        "epsilon": json_number(epsilon),
        "delta": delta,
    }


def _guarantee(joined: dict[str, Any]) -> Guarantee | None:
    """Return the guarantee that the site stored when it joined; None if it is missing."""
    try:
        return Guarantee.from_json(joined["guarantee"])
    except (KeyError, TypeError, ValueError):
        return None


def _from_one(index: Any) -> int | None:
    """Return a round counted from 1; None where there is none."""
    return index + 1 if type(index) is int else None


def _models(folder: Path) -> int:
    try:
        return len(client_names(folder, MODELS))
    except (OSError, ValueError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _joined(folder: Path) -> str:
    """Return when a site joined a run."""
    written = (folder / "run.json").stat().st_mtime
    return datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
