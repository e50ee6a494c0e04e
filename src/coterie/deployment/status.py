"""Where a deployment stands: read off a coordinator's run folder, or off a site's folder.

Nothing is locked or changed, so that it can be looked at while the run goes on: a line that is just
being written is left out, and whether a process holds the folder is read off the system's list of
locks. The words are for whoever may see the folder: who answered a round, and how many, is told
from `log.jsonl`, which is private.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.deployment.agreement import FEDERATION, PLAN, Agreement, load_agreement, promise
from coterie.deployment.onlookers import by_view
from coterie.deployment.site_status import status_of_site
from coterie.evaluation.metrics import json_number

PRIVATE = "who answered a round, and how many, is for whoever may see this folder alone"
_COUNTS = ("asked", "answered", "refused", "failed", "silent", "scaled", "zeroed", "void")
_LOCKS = Path("/proc/locks")


def status_of(folder: Path) -> dict[str, Any]:
    """Say where a run of a deployment stands, or what a site has taken part in.

    Args:
        folder: A coordinator's run folder; a site's folder, or its folder of one run.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it is neither.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; check the path")
    if (folder / "run.json").exists():
        return status_of_site(folder.parent, [folder])
    if (folder / FEDERATION).exists() and not (folder / "pyproject.toml").exists():
        return _status_of_run(folder)
    runs = [path.parent for path in folder.glob("*/run.json")]
    if runs or (folder / "worker.log").exists():
        return status_of_site(folder, runs)
    began = [path.parent for path in folder.glob(f"runs/*/{FEDERATION}")]
    if began and (folder / "pyproject.toml").exists():
        raise ValueError(
            f"{folder}: an app's folder; its run is `coterie deploy status {began[0]}`"
        )
    raise ValueError(
        f"{folder}: neither a coordinator's run folder (it has {PLAN} and {FEDERATION}) nor a "
        "site's folder; the app names the first as `folder` in pyproject.toml, --node-config the "
        "second"
    )


def _status_of_run(folder: Path) -> dict[str, Any]:
    agreement = load_agreement(folder)
    lines = list(read_lines(folder / "log.jsonl"))
    planned = agreement.plan.posts
    begun = any(line["event"] in ("round", "packed", "finished") for line in lines)
    charged, released, sound = _account(folder, planned, begun and planned > 0)
    state = _state(folder, lines)
    told: dict[str, Any] = {
        "kind": "coordinator",
        "folder": str(folder),
        "run": _kept(folder).get("run"),
        "state": state,
        "trust": agreement.federation.trust,
        "began": lines[0]["time"] if lines else None,
        "last_word": lines[-1]["time"] if lines else None,
        "rounds": planned,
        "done": released,
        "charged": charged,
        "released": released,
        "ledger": "sound" if sound else "gone or damaged: all that is planned counts as spent",
        "epsilon": _epsilons(agreement, charged),
        "by_round": _by_round(lines),
        "sites": _sites(folder, agreement, lines),
        "strangers": sum(line["event"] == "stranger" for line in lines),
        "node_errors": sum(line["event"] == "node_error" and "site" not in line for line in lines),
        "taken_home": _home(lines),
        "failure": _failure(lines) if state == "failed" else None,
        "private": PRIVATE,
    }
    return {**told, "needed": _needed(told, agreement)}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the events of a log; a line that is cut off, or just being written, is left out."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for line in content.split(b"\n"):
        try:
            found = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("event"), str) and "time" in found:
            yield found


def _account(folder: Path, posts: int, begun: bool) -> tuple[int, int, bool]:
    """Count what the ledger charged and released; nothing of it is changed.

    Returns:
        Both counts, and whether the ledger can be believed. If not (it is gone though a round was
        begun, or a line other than the last cannot be read), all that is planned counts as charged:
        what was spent is then not known, and never more.
    """
    try:
        content = (folder / "ledger.jsonl").read_bytes()
    except FileNotFoundError:
        return (posts, 0, False) if begun else (0, 0, True)
    charged, released, sound = set[int](), set[int](), True
    for line in content.split(b"\n")[:-1]:  # what follows the last line's end is being written
        try:
            entry = json.loads(line.decode())
            charged |= {int(entry["charge"])} if "charge" in entry else set()
            released |= {int(entry["release"])} if "release" in entry else set()
        except (ValueError, TypeError, RecursionError):
            sound = False
    sound = sound and (bool(charged) or not begun)
    return len(charged) if sound else posts, len(released), sound


def _epsilons(agreement: Agreement, charged: int) -> dict[str, Any]:
    """Return epsilon by view: of the rounds that were charged, and of all that are planned."""
    guarantee, federation = promise(agreement), agreement.federation
    so_far = replace(guarantee, events=guarantee.events[:charged])
    return {
        "spent": _plain(by_view(so_far, federation)),
        "planned": _plain(by_view(guarantee, federation)),
        "delta": guarantee.delta,
        "relation": guarantee.relation,
        "simulation": guarantee.simulation,
    }


def _plain(views: Mapping[str, float]) -> dict[str, float | str | None]:
    return {view: json_number(epsilon) for view, epsilon in views.items()}


def _by_round(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what became of each round's questions, those of a round under way too."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["event"] not in ("round", "short") or type(line.get("round")) is not int:
            continue
        posted = line["event"] == "round"
        number = line["round"]
        one = found.setdefault(number, {"round": number, "asked_again": 0})
        one |= {name: line.get(name, 0) for name in _COUNTS}
        one |= {"posted": posted, "time": line["time"]}
        one["asked_again"] += not posted
    return [found[number] for number in sorted(found)]


def _sites(
    folder: Path, agreement: Agreement, lines: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what is known of each site: when it was met, which round counted, what went wrong."""
    counted = _kept(folder).get("counted")
    counted = counted if isinstance(counted, dict) else {}
    found: dict[str, dict[str, Any]] = {}
    for name, site in agreement.federation.sites.items():
        last = counted.get(name)
        found[name] = {
            "clients": len(site.clients),
            "met": None,
            "counted": last + 1 if type(last) is int else None,
            "refused": 0,
            "declined": 0,
            "cut": 0,
            "errors": 0,
            "last_trouble": None,
        }
    for line in lines:
        _note(found, line)
    return found


def _note(found: dict[str, dict[str, Any]], line: Mapping[str, Any]) -> None:
    """Add what a line of the log says of a site."""
    if line["event"] == "gathered":
        for name in line.get("sites") or ():
            if name in found:
                found[name]["met"] = line["time"]
    if line["event"] == "met" and line.get("site") in found:
        found[line["site"]]["met"] = line["time"]
    kinds = {"refused": "refused", "declined": "declined", "cut": "cut", "node_error": "errors"}
    kind, name = kinds.get(line["event"]), line.get("site")
    if kind is not None and name in found:
        found[name][kind] += 1
        found[name]["last_trouble"] = {"time": line["time"], "why": str(line.get("why", ""))}


def _kept(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "coordinator.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(folder: Path, lines: list[dict[str, Any]]) -> str:
    if (folder / "result.json").exists():
        return "finished"
    ended = _ended(lines)
    held = is_held(folder / ".lock")
    if held or (held is None and ended is None):
        return "running"
    return "failed" if ended == "failed" else "stopped"


def _ended(lines: list[dict[str, Any]]) -> str | None:
    """Return what ended the last start, if it says so; a process that is killed says nothing."""
    found = None
    for line in lines:
        if line["event"] in ("started", "resumed"):
            found = None
        elif line["event"] in ("failed", "interrupted"):
            found = line["event"]
    return found


def is_held(path: Path, locks: Path = _LOCKS) -> bool | None:
    """Return whether a process of this machine holds a lock on a file; None if nobody can tell."""
    try:
        about, listed = path.stat(), locks.read_text(encoding="utf-8")
    except OSError:
        return False if locks.exists() else None
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    return any(place in line.split() for line in listed.splitlines() if "FLOCK" in line)


def _home(lines: list[dict[str, Any]]) -> int | None:
    """Count the sites that took the last shared tree home, at the end or when told again."""
    told = [line for line in lines if line["event"] == "taken_home"]
    return len({name for line in told for name in line.get("names") or ()}) if told else None


def _last(lines: list[dict[str, Any]], event: str) -> dict[str, Any] | None:
    return next((line for line in reversed(lines) if line["event"] == event), None)


def _failure(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    line = _last(lines, "failed")
    return None if line is None else {name: line.get(name) for name in ("time", "kind", "why")}


def _needed(told: Mapping[str, Any], agreement: Agreement) -> str:
    """Say what the run needs to go on."""
    sites, home = len(agreement.federation.sites), told["taken_home"]
    if told["ledger"] != "sound":
        return "ledger.jsonl is gone or damaged: restore it; nothing can go on without the account"
    if told["state"] == "finished":
        if home is None or home >= sites:
            return f"nothing: it is done; `coterie verify {told['folder']}` checks it"
        return (
            f"{sites - home} of {sites} sites have not taken the last shared model home: bring "
            "them back and start the app again; nothing more is spent"
        )
    if told["state"] == "running":
        seconds = agreement.federation.deadline
        return f"nothing: it waits at most {seconds:g} s for the answers to a question"
    after = (
        "it ends with what is kept"
        if told["done"] >= told["rounds"]
        else (
            f"it goes on with round {told['done'] + 1} of {told['rounds']}, and charges none twice"
        )
    )
    failure = told["failure"]
    why = "" if failure is None else f"{failure['kind']}: {failure['why']}; "
    return f"{why}start the app again (flwr run): {after}"
