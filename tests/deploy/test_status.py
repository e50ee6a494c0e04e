"""Where a deployment stands, read while it goes on, after it failed, and when it is done.

Oracles: what the test itself did to the run; for epsilon, Gaussian DP in closed form.
"""

import argparse
import fcntl
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats
from tests.deploy.deployed import deploy

import coterie as ct
from coterie.cli.deploy import _add_status, rendered
from coterie.cli.main import main
from coterie.deploy import status
from coterie.deploy.coordinator import IncompleteRoundError
from coterie.deploy.messages import Envelope, peek, sign
from coterie.deploy.status import is_locked, read_events, status_of, wait_for
from coterie.privacy.sampling import Everyone

pytestmark = pytest.mark.full


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of mu-Gaussian DP at delta (Dong, Roth and Su 2022, corollary 1)."""

    def gap(epsilon: float) -> float:
        left = stats.norm.cdf(-epsilon / mu + mu / 2)
        return left - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2) - delta

    return float(optimize.brentq(gap, 0.0, 50.0))


def state_of_disk(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    _add_status(parser.add_subparsers())
    return parser.parse_args(["status", *words])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run in which all took part; it is left as it was."""
    made = deploy(tmp_path_factory.mktemp("done"), sampler=Everyone())
    made.coordinate()
    return made


def test_a_run_that_is_done(done, capsys):
    made = done
    before = state_of_disk(made.root)
    stated = status_of(made.run)
    assert (stated["kind"], stated["state"]) == ("coordinator", "finished")
    assert (stated["rounds"], stated["charged"], stated["released"]) == (3, 3, 3)
    assert [(one["asked"], one["answered"]) for one in stated["by_round"]] == [(12, 12)] * 3
    assert stated["delivered"] == 3 and stated["next"].startswith("nothing")
    assert stated["epsilon"]["spent"] == stated["epsilon"]["planned"]
    assert stated["epsilon"]["spent"]["coordinator"] == "inf"
    assert {site["counted"] for site in stated["sites"].values()} == {3}
    found = command(str(made.run), "--json")
    assert found.action(found) == 0
    assert json.loads(capsys.readouterr().out) == stated
    shown = command(str(made.run))
    assert shown.action(shown) == 0
    said = capsys.readouterr().out
    assert "finished" in said and "site2" in said and "private" in said
    assert state_of_disk(made.root) == before


def test_epsilon_so_far_is_of_the_rounds_that_were_charged(tmp_path):
    made = deploy(tmp_path, sampler=Everyone(), rounds=4, patience=0, deadline=0.05)
    seen = []

    def away_in_the_third(site, question, answer):
        seen.append(peek(question).round)
        return None if peek(question).round == 2 else answer

    made.hood.tamper = away_in_the_third
    with pytest.raises(IncompleteRoundError):
        made.coordinate()
    stated = status_of(made.run)
    assert stated["state"] == "failed" and stated["failure"]["kind"] == "IncompleteRoundError"
    assert (stated["rounds"], stated["charged"], stated["released"]) == (4, 3, 2)
    noise = made.agreement.plan.noise_multipliers(12)[0]
    delta = stated["epsilon"]["delta"]
    spent = stated["epsilon"]["spent"]["other_clients"]
    assert spent == pytest.approx(gaussian_epsilon(math.sqrt(3) / noise, delta), rel=1e-3)
    assert stated["epsilon"]["planned"]["other_clients"] == pytest.approx(1.0, rel=1e-2)
    last = stated["by_round"][-1]
    assert (last["round"], last["released"], last["answered"], last["silent"]) == (3, False, 0, 3)
    assert "round 3 of 4" in stated["next"] and "submit the app again" in stated["next"]
    made.hood.tamper = None
    made.coordinate()
    stated = status_of(made.run)
    assert stated["state"] == "finished" and stated["charged"] == 4
    assert [one["released"] for one in stated["by_round"]] == [True] * 4
    assert stated["by_round"][2]["repeated"] == 1


def test_what_sites_sent_is_counted(tmp_path):
    made = deploy(tmp_path, sampler=Everyone(), minimum=0.0, patience=0, rounds=2)
    key = made.keys.sites["site0"]

    def spoil(site, question, answer):
        if peek(question).kind != "round":
            return answer
        if site == "site1":
            return Envelope(answer.header, b"0" * 64, answer.arrays)
        if site == "site0":
            broken = {name: np.full(raw.shape, np.nan) for name, raw in answer.arrays.items()}
            return sign(replace(peek(answer), arrays=broken), key)
        return answer

    made.hood.tamper = spoil
    made.coordinate()
    stated = status_of(made.run)
    for one in stated["by_round"]:
        assert (one["asked"], one["answered"]) == (12, 8)
        assert (one["rejected"], one["zeroed"], one["silent"]) == (1, 1, 0)
    assert stated["sites"]["site1"]["rejected"] == 2 and stated["sites"]["site0"]["clipped"] == 2
    assert "signature" in stated["sites"]["site1"]["last_trouble"]["reason"]
    assert stated["sites"]["site1"]["counted"] is None and stated["sites"]["site2"]["counted"] == 2


def test_it_looks_while_the_run_goes_on_and_in_between(tmp_path):
    made = deploy(tmp_path, rounds=3)
    seen = []

    def look(site, question, answer):
        before = state_of_disk(made.run)
        seen.append(status_of(made.run))
        seen.append(status_of(made.site(site)))
        assert state_of_disk(made.run) == before
        return answer

    made.hood.tamper = look
    made.coordinate()
    runs = [one for one in seen if one["kind"] == "coordinator"]
    assert {one["state"] for one in runs} == {"running"}
    assert [one["released"] for one in runs] == sorted(one["released"] for one in runs)
    assert runs[0]["released"] == 0 and runs[0]["charged"] == 1
    sites = [one for one in seen if one["kind"] == "site"]
    assert any(run["staged"] for one in sites for run in one["runs"])
    (last,) = status_of(made.site("site0"))["runs"]
    assert last["finished"] and last["models"] == 4 and last["staged"] is None


def test_a_killed_and_an_interrupted_run_are_stopped(tmp_path):
    made = deploy(tmp_path)

    def stop(site, question, answer):
        raise KeyboardInterrupt

    made.hood.tamper = stop
    with pytest.raises(KeyboardInterrupt):
        made.coordinate()
    assert status_of(made.run)["state"] == "stopped"
    log = made.run / "log.jsonl"
    lines = [line for line in log.read_text().splitlines(True) if "interrupted" not in line]
    log.write_text("".join(lines))  # as a killed process leaves it
    assert status_of(made.run)["state"] == "stopped"
    with (made.run / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(made.run / ".lock")
        assert status_of(made.run)["state"] == "running"
    assert not is_locked(made.run / ".lock")
    assert is_locked(made.run / ".lock", Path("/nowhere")) is None


def test_lines_that_are_cut_off_are_left_out(done, tmp_path):
    run = shutil.copytree(done.run, tmp_path / "run")
    whole = status_of(run)
    for name in ("log.jsonl", "ledger.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"time": "2026", "event": "rou\xc3')
    assert status_of(run) == whole
    assert list(read_events(run / "nothing")) == []
    (run / "coordinator.json").write_bytes(b"{")
    assert status_of(run)["state"] == "finished"


def test_what_a_site_has_spent_in_all_its_runs(tmp_path):
    """Two runs in which all take part are one Gaussian release of sqrt(2) times the mu."""
    settings = {"sampler": Everyone(), "simulation_seed": None, "simulation": False}
    made = deploy(tmp_path, **settings)
    made.coordinate()
    stated = status_of(made.site("site0"))
    assert (stated["site"], len(stated["runs"]), stated["errors"]) == ("site0", 1, 0)
    assert stated["spent"]["epsilon"] == pytest.approx(1.0, rel=1e-2)
    other = deploy(tmp_path / "other", **settings)
    other.coordinate()
    (note,) = other.site("site0").glob("*/run.json")
    note.parent.rename(made.site("site0") / note.parent.name)
    (made.site("site0") / "errors.log").write_text("ValueError: 3.25\nKeyError: 'x'\n")
    stated = status_of(made.site("site0"))
    noise = made.agreement.plan.noise_multipliers(12)[0]
    expected = gaussian_epsilon(math.sqrt(6) / noise, stated["spent"]["delta"])
    assert stated["spent"]["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert stated["errors"] == 2 and "3.25" not in json.dumps(stated)
    assert len(stated["runs"]) == 2 and stated["spent"]["runs"] == 2
    one = status_of(made.site("site0") / stated["runs"][0]["run"])
    assert one["kind"] == "site" and len(one["runs"]) == 1


def test_a_rehearsal_is_not_counted_as_private(done, capsys):
    stated = status_of(done.site("site0"))
    assert stated["spent"]["simulations"] == 1 and stated["runs"][0]["simulation"]
    found = command(str(done.site("site0")))
    assert found.action(found) == 0
    assert "protects nobody" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_privacy_has_no_bound(tmp_path):
    made = deploy(tmp_path, privacy=ct.Privacy(epsilon=math.inf))
    made.coordinate()
    stated = status_of(made.run)
    assert set(stated["epsilon"]["planned"].values()) == {"inf"}
    assert json.loads(json.dumps(stated, allow_nan=False)) == stated
    assert rendered(stated) is not None


def test_folders_that_are_neither_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        status_of(tmp_path / "away")
    with pytest.raises(ValueError, match="neither"):
        status_of(tmp_path)
    (tmp_path / "worker.log").write_text("")
    assert status_of(tmp_path)["runs"] == []
    both = command(str(tmp_path), "--json", "--watch")
    with pytest.raises(ValueError, match="--watch"):
        both.action(both)


def test_watching_ends_with_the_run(done, capsys):
    found = command(str(done.run), "--watch")
    assert found.action(found) == 0
    assert "finished" in capsys.readouterr().out


def test_counts_of_sites_are_of_the_last_attempt(tmp_path, capsys):
    """Two of three sites are away twice, then come: nobody is counted three times."""
    made = deploy(tmp_path, sampler=Everyone(), patience=2, minimum=1.0, rounds=1, deadline=0.05)
    times = []

    def away_at_first(site, question, answer):
        if peek(question).kind == "round" and site != "site0":
            times.append(site)
            return answer if len(times) > 4 else None
        return answer

    made.hood.tamper = away_at_first
    made.coordinate()
    short = [line for line in read_events(made.run / "log.jsonl") if line["event"] == "incomplete"]
    assert [(line["round"], line["silent"]) for line in short] == [(1, 2), (1, 2)]
    (one,) = status_of(made.run)["by_round"]
    assert (one["asked"], one["answered"], one["silent"], one["repeated"]) == (12, 12, 0, 2)
    shown = command(str(made.run))
    assert shown.action(shown) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "clients asked" in said and "1 of 1 rounds released" in said


def test_sites_that_came_late_were_met_and_nodes_that_failed_are_told_of(done, tmp_path, capsys):
    run = shutil.copytree(done.run, tmp_path / "run")
    lines = (run / "log.jsonl").read_text().splitlines(True)
    kept = [line for line in lines if '"handshake"' not in line]
    more = [
        {"time": "2026-01-02T03:04:05Z", "event": "connected", "site": "site1"},
        {"time": "2026-01-02T03:04:06Z", "event": "connected", "site": "another"},
        *({"time": "2026", "event": "node_error", "reason": "flower: error 8"} for _ in range(3)),
        {"time": "2026", "event": "node_error", "reason": "flower: error 8", "times": 4},
        {"time": "2026", "event": "node_error", "site": "site2", "reason": "flower: error 2"},
    ]
    text = "".join([*kept, *(json.dumps(one) + "\n" for one in more)])
    (run / "log.jsonl").write_text(text)
    stated = status_of(run)
    assert stated["sites"]["site1"]["connected"] == "2026-01-02T03:04:05Z"
    assert stated["sites"]["site0"]["connected"] is None
    assert (stated["node_errors"], stated["unknown_nodes"]) == (7, 0)
    assert stated["sites"]["site2"]["errors"] == 1
    shown = command(str(run))
    assert shown.action(shown) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "failed 7 times" in said and "worker.log" in said


def test_a_site_whose_worker_fails_is_told_its_last_words(tmp_path, capsys):
    (tmp_path / "worker.log").write_text("2026 ready\n2026 DataError: no rows of client 'b'\n\n")
    stated = status_of(tmp_path)
    assert stated["worker"] == "2026 DataError: no rows of client 'b'"
    shown = command(str(tmp_path))
    assert shown.action(shown) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "last line of worker.log: 2026 DataError: no rows of client 'b'" in said


def test_an_apps_folder_names_its_run(tmp_path):
    run = tmp_path / "runs" / "ward"
    run.mkdir(parents=True)
    for path in (
        tmp_path / "pyproject.toml",
        tmp_path / "federation.toml",
        run / "federation.toml",
    ):
        path.write_text("")
    with pytest.raises(ValueError, match=rf"coterie deploy status {run}`"):
        status_of(tmp_path)


def test_an_account_that_cannot_be_read_never_says_less_than_was_spent(done):
    path = done.run / "ledger.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    middle = b"".join([*lines[:2], b"junk\n", *lines[2:]])
    for damaged in (None, b"garbage\n", middle, whole + b'{"charge": []}\n'):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        stated = status_of(done.run)
        assert stated["epsilon"]["spent"] == stated["epsilon"]["planned"], damaged
        assert stated["ledger"] != "sound" and "restore" in stated["next"], damaged
    path.write_bytes(whole)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping advances; `at` has what happens when."""
    now, at = [0.0], {}

    def sleep(seconds):
        now[0] += seconds
        for moment in [one for one in at if one <= now[0]]:
            at.pop(moment)()

    monkeypatch.setattr(status, "time", argparse.Namespace(monotonic=lambda: now[0], sleep=sleep))
    return now, at


def note(folder, *events):
    folder.mkdir(exist_ok=True)
    with (folder / "log.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"time": "2026", "event": event}) + "\n")


def test_waiting_ends_with_the_run(tmp_path, clock):
    now, at = clock
    run = tmp_path / "run"
    at[20] = lambda: note(run, "started")  # the ServerApp needs a while
    at[30] = lambda: note(run, "failed")
    assert wait_for(run) in ("failed", "stopped") and 20 <= now[0] <= 32


def test_an_old_end_counts_when_nothing_follows(tmp_path, clock):
    now, at = clock
    note(tmp_path, "started", "failed")
    assert wait_for(tmp_path, grace=60) == "failed" and 60 <= now[0] <= 62
    at[now[0] + 10] = lambda: (tmp_path / "result.json").write_text("{}")
    assert wait_for(tmp_path, grace=60) == "finished"


def test_waiting_has_a_limit_and_needs_a_run(tmp_path, clock):
    now, _ = clock
    assert wait_for(tmp_path / "run", seconds=7) == "running" and 7 <= now[0] <= 8
    with pytest.raises(FileNotFoundError, match="no run after 300 s"):
        wait_for(tmp_path / "run")


def test_the_exit_status_is_the_outcome(done, tmp_path, clock, capsys):
    assert main(["deploy", "wait", str(done.run)]) == 0
    assert "coterie verify" in capsys.readouterr().out
    short = shutil.copytree(done.run, tmp_path / "short")
    (short / "result.json").unlink()
    note(short, "failed")
    assert main(["deploy", "wait", str(short), "--limit", "5"]) == 124
    assert main(["deploy", "wait", str(short)]) == 1
    assert "submit the app again" in capsys.readouterr().err
    assert main(["deploy", "wait", str(short), "--limit", "0"]) == 2
