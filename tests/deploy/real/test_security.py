"""Who is let in, over real processes: strangers, a wrong authority, another plan, a false key.

What is refused here is refused by different parties: the SuperLink (keys of SuperNodes), a
SuperNode (the SuperLink's certificate), a site (the coordinator's signature, the plan that its
owner agreed to). One federation for all, and two runs: they take most of their time in waiting for
sites that are not to answer.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.real.faulty import FaultyFederation
from tests.deploy.real.trials import (
    QUICK,
    Attempt,
    charges,
    json_lines,
    releases,
    write_trial,
)

from coterie.deploy.keys import make_certificates

pytestmark = pytest.mark.slow
SIZES = {"north": 3, "south": 4, "east": 5, "west": 6}
HOOK = """
import hashlib
from pathlib import Path
from coterie.deploy.rows import read_rows

AGREED = {agreed!r}


def rows(config):
    found = hashlib.sha256(Path(config["app"], "plan.toml").read_bytes()).hexdigest()
    if found != AGREED:
        raise ValueError("another plan than was agreed")
    return read_rows(config)
"""
FALSE_SERVER = '''
from dataclasses import replace
from pathlib import Path

from flwr.serverapp import ServerApp

from coterie.deploy.federation import load_agreement
from coterie.deploy.keys import load_private
from coterie.deploy.coordinator import run_coordinator
from coterie.deploy.flower import GridTransport
from coterie.deploy.messages import public_hex


app = ServerApp()


@app.main()
def main(grid, context):
    """Coordinate the agreed run with a key that federation.toml does not list."""
    folder, key = Path(context.run_config["folder"]), Path(context.run_config["key"])
    agreement = load_agreement(Path(__file__).resolve().parent.parent)
    false = replace(agreement.federation, coordinator=public_hex(load_private(key)))
    run_coordinator(
        replace(agreement, federation=false), folder, key, lambda note: GridTransport(grid, note)
    )
'''


@dataclass(frozen=True)
class Seen:
    """What became of three runs."""

    folder: Path
    status: dict[str, str]
    logs: dict[str, str]
    online: set[str]
    attempts: dict[str, Attempt]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    folder = tmp_path_factory.mktemp("closed")
    keys = folder / "keys"
    make_certificates(keys, list(SIZES))
    make_certificates(folder / "false", list(SIZES))
    known = {"rounds": 1, "keys": keys, "minimum": 0.1, "deadline": 30.0, "patience": 0}
    right = write_trial(folder, "right", SIZES, **known)
    stolen = write_trial(folder, "stolen", SIZES, **known)
    (stolen.app.folder / stolen.app.package / "server.py").write_text(FALSE_SERVER)
    nodes = {
        "north": right.node("north", hook=_hook(folder, "north", right.app.folder)),
        "south": right.node("south", hook=_hook(folder, "south", folder / "another")),
        "east": right.node("east"),
        "west": right.node("west"),
    }
    runs = {
        "genuine": (right, keys / "coordinator.key"),
        "false": (stolen, folder / "false" / "coordinator.key"),
        "wrong key": (right, folder / "false" / "coordinator.key"),
    }
    status, attempts = {}, {}
    with FaultyFederation(
        folder / "flower",
        keys,
        nodes,
        environment=QUICK,
        patience=180,
        unregistered=["east"],
        authorities={"west": folder / "false" / "ca.pem"},
    ) as federation:
        for name in ("east", "west"):
            federation.start_stranger(name)
        for name, (trial, key) in runs.items():
            attempts[name] = Attempt(trial, federation, folder / "runs" / name)
            attempts[name].submit(key=str(key))
            status[name] = attempts[name].wait()
        online = {
            n for n, node in federation.node_ids.items() if node in federation.control.online()
        }
        logs = {name: federation.log(name).read_text() for name in (*SIZES, "superlink")}
    return Seen(folder, status, logs, online, attempts)


def _hook(folder: Path, site: str, app: Path) -> str:
    """Write a hook that gives rows to one plan alone, as docs/deploy/threat-model.md says."""
    plan = (app / "plan.toml").read_bytes() if app.exists() else b"another plan"
    path = folder / f"{site}_rows.py"
    path.write_text(HOOK.format(agreed=hashlib.sha256(plan).hexdigest()))
    return str(path)


def check_only_the_site_that_is_who_it_says_and_agreed_takes_part(seen: Seen) -> None:
    attempt = seen.attempts["genuine"]
    assert seen.status["genuine"] == "finished:completed"
    (gathered,) = attempt.log("handshake")
    assert gathered["sites"] == ["north"]
    (line,) = attempt.log("round")
    assert (line["asked"], line["answered"]) == (18, 3)
    assert attempt.released() == attempt.trial.expected_without({0: {"south", "east", "west"}})


def check_an_unregistered_key_is_not_let_in(seen: Seen) -> None:
    assert "SuperNode ID:" not in seen.logs["east"]
    assert "east" not in seen.online
    assert not (seen.folder / "sites" / "east").exists()


def check_a_node_turns_away_from_a_superlink_with_a_wrong_certificate(seen: Seen) -> None:
    assert "SuperNode ID:" not in seen.logs["west"]
    assert "CERTIFICATE_VERIFY_FAILED" in seen.logs["west"]
    assert "west" not in seen.online
    assert not (seen.folder / "sites" / "west").exists()


def check_a_site_with_another_plan_answers_nothing(seen: Seen) -> None:
    """Its SuperNode is let in, its owner's hook gives no rows to this plan."""
    assert {"north", "south"} <= seen.online
    assert [line["reason"] for line in seen.attempts["genuine"].log("node_error")]
    assert list((seen.folder / "sites" / "south").glob("*/run.json")) == []
    assert "another plan than was agreed" in _text(seen.folder / "sites" / "south" / "worker.log")


def check_a_coordinator_with_another_key_gets_nothing_from_sites(seen: Seen) -> None:
    attempt = seen.attempts["false"]
    assert seen.status["false"] == "finished:failed"
    assert charges(attempt.folder) == 0
    assert releases(attempt.folder) == []
    whys = [line["reason"] for line in attempt.log("unknown_node")]
    assert any("north does not take part: signature is not the sender's" in w for w in whys)
    assert attempt.log("handshake")[-1]["sites"] == []
    run = json.loads((attempt.folder / "coordinator.json").read_text())["run"]
    assert not list((seen.folder / "sites").glob(f"*/{run}"))


def check_a_key_that_is_not_listed_is_refused_before_anything_is_asked(
    seen: Seen,
) -> None:
    attempt = seen.attempts["wrong key"]
    assert seen.status["wrong key"] == "finished:failed"
    (line,) = [line for line in json_lines(attempt.folder / "log.jsonl") if "reason" in line]
    assert "the coordinator's signing key does not match" in line["reason"]
    assert charges(attempt.folder) == 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


CHECKS = (
    check_only_the_site_that_is_who_it_says_and_agreed_takes_part,
    check_an_unregistered_key_is_not_let_in,
    check_a_node_turns_away_from_a_superlink_with_a_wrong_certificate,
    check_a_site_with_another_plan_answers_nothing,
    check_a_coordinator_with_another_key_gets_nothing_from_sites,
    check_a_key_that_is_not_listed_is_refused_before_anything_is_asked,
)


def test_nobody_is_let_in_who_should_not_be(seen, subtests):
    """One test: several could be dealt to several workers, each with a federation of its own."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            check(seen)
