"""Faults in real processes: killed nodes and ServerApps, silent sites, hostile ones.

Every test ends with the posts that the simulator makes, or that the same federation makes in one
process when the same answers are missing or wrong: what was disturbed must not be seen in them.
"""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from tests.deploy.real.trials import charges, json_lines, same_models, site_run

from coterie.cli.main import main
from coterie.deploy.messages import Expected, sign, verify

pytestmark = pytest.mark.slow
COMPLETED, FAILED = "finished:completed", "finished:failed"


def test_a_server_app_that_is_killed_goes_on_from_its_ledger(place):
    """When a site has been greeted, when one has answered the first round, and after a post.

    A kill while questions are being handed over is among them by chance: Flower's SuperNodes then
    look in vain for the rest of a message until the SuperLink has missed the ServerApp for a
    minute.
    """
    attempt = place.attempt("killed", {"round/0": "late"}, rounds=3, minimum=1.0, deadline=120.0)
    home = place.folder / "sites" / "north"
    moments = (
        lambda: list(home.glob("*/run.json")),
        lambda: list(home.glob("*/answer.npz")),
        lambda: len(attempt.released()) == 2,
    )
    before: list[str] = []
    stood: list[tuple[int, int]] = []
    for moment in moments:
        run = attempt.submit()
        attempt.until(moment)
        attempt.federation.kill_server_app(run)
        _until(lambda: not attempt.federation.server_apps())
        known = attempt.released()
        assert known[: len(before)] == before
        assert charges(attempt.folder) - len(known) in (0, 1)
        stood.append((charges(attempt.folder), len(known)))
        before = known
    assert stood[0] < (1, 1)
    assert stood[1] == (1, 0), "north answered, and nothing is out"
    assert stood[2][1] >= 2
    attempt.submit()
    assert attempt.wait() == COMPLETED
    posts = attempt.released()
    assert posts[: len(before)] == before
    assert posts == attempt.trial.expected()
    assert charges(attempt.folder) == 3
    assert same_models(attempt.trial, attempt.folder)
    assert main(["verify", str(attempt.folder)]) == 0


def test_a_node_that_is_killed_in_the_middle_of_a_round_answers_the_same_again(place):
    """It has answered to itself, not yet to the coordinator: what is on its disk is used."""
    attempt = place.attempt("again", {"round/1": "wait"}, rounds=3, minimum=1.0, deadline=40.0)
    attempt.submit()
    attempt.until(place.waits("east"))
    attempt.federation.kill_node("east")
    home = site_run(attempt.trial, "east", attempt.folder)
    state = json.loads((home / "state.json").read_text())
    assert (state["counted"], state["answered"]) == (0, 1)
    place.honest("east")
    attempt.federation.start_node("east")
    attempt.until(lambda: len(attempt.released()) == 2)
    # Asked again within the round if the SuperLink heard that the node was gone, else after it.
    assert attempt.log("node_error") or attempt.log("incomplete")
    assert attempt.wait() == COMPLETED
    assert attempt.released() == attempt.trial.expected()
    assert same_models(attempt.trial, attempt.folder)


def test_a_site_that_is_away_comes_back_with_its_old_state(place):
    attempt = place.attempt("away", {"round/1": "wait"}, rounds=4, minimum=0.5, deadline=40.0)
    attempt.submit()
    attempt.until(place.waits("east"))
    attempt.federation.kill_node("east")
    attempt.until(lambda: len(attempt.log("round")) == 2)
    home = site_run(attempt.trial, "east", attempt.folder)
    assert json.loads((home / "state.json").read_text())["counted"] == 0
    place.honest("east")
    attempt.federation.start_node("east")
    assert attempt.wait() == COMPLETED
    absent = attempt.absent()
    assert (absent[0], absent[1], absent[3]) == (set(), {"east"}, set())
    assert attempt.released() == attempt.trial.expected_without(absent)
    assert json.loads((home / "state.json").read_text())["counted"] == 3
    assert (home / "models" / "clients.safetensors").exists()
    assert main(["verify", str(attempt.folder)]) == 0


def test_a_round_below_the_minimum_fails_is_charged_and_goes_on_when_sites_are_back(place):
    attempt = place.attempt("incomplete", rounds=2, minimum=0.9, deadline=30.0, patience=0)
    for site in ("south", "east"):
        attempt.federation.stop_node(site)
    attempt.submit()
    assert attempt.wait() == FAILED
    assert (charges(attempt.folder), attempt.released()) == (1, [])
    assert attempt.log("failed")[-1]["kind"] == "IncompleteRoundError"
    assert not (attempt.folder / "result.json").exists()
    for site in ("south", "east"):
        attempt.federation.start_node(site)
    for _ in range(3):  # on a busy machine one of them may be late again
        attempt.submit()
        if attempt.wait() == COMPLETED:
            break
        assert charges(attempt.folder) - len(attempt.released()) == 1
    assert attempt.released() == attempt.trial.expected()
    assert charges(attempt.folder) == 2


WRONGS = {
    "round/1": "nan",
    "round/2": "huge",
    "round/3": "other",
    "round/4": "shape",
    "round/5": "replay",
    "round/6": "garbage",
    "round/7": "raise",
}


def test_a_hostile_site_is_cut_or_refused_and_nobody_else_is_touched(place):
    attempt = place.attempt("wrongs", WRONGS, rounds=8, minimum=0.5, deadline=40.0)
    attempt.submit()
    assert attempt.wait(420) == COMPLETED
    rounds = attempt.log("round")
    assert [line["answered"] for line in rounds] == [12, 12, 12, 7, 7, 7, 7, 7]
    assert [line.get("zeroed", 0) for line in rounds] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert [line.get("scaled", 0) for line in rounds] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [line.get("rejected", 0) for line in rounds] == [0, 0, 0, 1, 1, 1, 1, 1]
    cut = attempt.log("clipped")
    assert [line["site"] for line in cut] == ["east", "east"]
    refused = attempt.log("rejected")
    assert {line["site"] for line in refused} == {"east"}
    words = ("its site differs", "has shape", "its round differs", "records", "flower: error")
    assert all(word in line["reason"] for word, line in zip(words, refused, strict=True))
    assert attempt.released() == attempt.trial.expected_with(_wronged(attempt.trial))
    kept = json.loads((attempt.folder / "coordinator.json").read_text())
    assert kept["counted"] == {"north": 7, "south": 7, "east": 2}
    assert main(["verify", str(attempt.folder)]) == 0
    found = "".join(path.read_text() for path in (place.folder / "flower" / "logs").iterdir())
    assert "told to fail" not in json.dumps(attempt.log())  # words of a site's error stay there
    assert found


def _wronged(trial):
    """Do in one process what the hostile site does; what is refused might as well not come."""
    key = trial.signing_key("east")

    def tamper(site, question, answer):
        found = json.loads(question.header)
        how = WRONGS.get(f"round/{found['round']}", "")
        if site != "east" or found["kind"] != "round" or not how:
            return answer
        if how not in ("nan", "huge"):
            return None
        expected = {name: Expected(raw.dtype, raw.shape) for name, raw in answer.arrays.items()}
        message = verify(answer, key.public_key(), expected)
        wrong = {n: a * np.nan if how == "nan" else a + 1e12 for n, a in message.arrays.items()}
        return sign(replace(message, arrays=wrong), key)

    return tamper


def test_secure_aggregation_survives_a_site_that_is_killed_in_the_middle_of_a_round(place):
    """Of three sites all are needed: the round is asked again, with new keys, and nothing is lost.

    That others' masks come off without a site is shown for four sites in tests/engines.
    """
    attempt = place.attempt(
        "masked",
        {"masked/1": "wait"},
        rounds=3,
        minimum=0.5,
        patience=5,
        deadline=30.0,
        trust="secure_aggregation",
    )
    attempt.submit()
    attempt.until(place.waits("east"))
    attempt.federation.kill_node("east")
    place.honest("east")
    attempt.federation.start_node("east")
    assert attempt.wait(400) == COMPLETED
    assert not attempt.log("void")
    assert attempt.log("incomplete")
    assert len(attempt.log("setup")) >= 2
    assert attempt.released() == attempt.trial.expected()
    assert charges(attempt.folder) == 3
    assert main(["verify", str(attempt.folder)]) == 0
    lines = json_lines(attempt.folder / "log.jsonl")
    assert not [line for line in lines if line["event"] == "failed"]


def _until(done, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
