"""trust = "nobody" on a real SuperLink with five sites: one killed in a round, one malicious."""

import json
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

pytest.importorskip("flwr")

from tests.deploy.real.faulty import FaultyFederation
from tests.deploy.real.trials import QUICK, Attempt, write_trial

from coterie.cli.main import main
from coterie.deploy.keys import make_certificates
from coterie.deploy.messages import Expected, peek, sign, verify
from coterie.planning.plan import Privacy
from coterie.privacy.noise import BandedNoise, SharedNoise
from coterie.privacy.sampling import Cyclic

pytestmark = pytest.mark.slow
SIZES = dict.fromkeys(("north", "south", "east", "west", "centre"), 3)
SHARES = Privacy(epsilon=1.0, noise=SharedNoise(minimum_clients=12, corrupt=3))


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """A federation, and a function that begins a run of an app in it."""
    folder = tmp_path_factory.mktemp("five")
    keys = folder / "keys"
    make_certificates(keys, list(SIZES))
    first = write_trial(folder, "first", SIZES, rounds=1, keys=keys)
    nodes = {site: first.node(site, other="north", encrypted=site == "south") for site in SIZES}
    with FaultyFederation(
        folder / "flower", keys, nodes, environment=QUICK, patience=300
    ) as federation:

        def begin(name, wrongs=None, **facts):
            hostile = wrongs is not None
            usual = {"deadline": 150.0, "patience": 1, "keys": keys, "hostile": hostile}
            trial = write_trial(folder, name, SIZES, **{**usual, **facts})
            for site, wrong in (wrongs or {}).items():
                trial.site_folder(site).mkdir(parents=True, exist_ok=True)
                (trial.site_folder(site) / "wrongs.json").write_text(json.dumps(wrong))
            attempt = Attempt(trial, federation, folder / "runs" / name)
            attempt.submit()
            return attempt

        yield begin


def seconds(attempt):
    """The time of all rounds, from the first request to the last release."""
    when = [datetime.fromisoformat(line["time"]) for line in attempt.log()]
    names = [line["event"] for line in attempt.log()]
    last = len(names) - 1 - names[::-1].index("round")
    return (when[last] - when[names.index("handshake")]).total_seconds()


def test_five_sites_trust_nobody_as_the_simulation_does(five, capsys):
    """Bit-equal releases under a seed, and what it costs beside trusted sums, in one federation."""
    taken = {}
    for trust, privacy in (("nobody", SHARES), ("server", None)):
        attempt = five(trust, rounds=1, privacy=privacy, trust=trust)
        assert attempt.wait(900) == "finished:completed"
        assert attempt.released() == attempt.trial.expected()
        assert main(["verify", str(attempt.folder)]) == 0
        taken[trust] = seconds(attempt)
    with capsys.disabled():
        print(f"seconds of a round with its setup: {taken}")


def test_a_public_schedule_with_banded_noise_as_the_simulation_does(five):
    """Five of fifteen clients take part in a round, each once in three; sites enforce it."""
    banded = Privacy(epsilon=1.0, noise=BandedNoise())
    attempt = five("schedule", rounds=4, privacy=banded, sampler=Cyclic(5))
    assert attempt.wait(900) == "finished:completed"
    assert [line["answered"] for line in attempt.log("round")] == [5, 5, 5, 5]
    assert attempt.released() == attempt.trial.expected()
    assert main(["verify", str(attempt.folder)]) == 0
    sites = attempt.trial.folder / "sites"
    sealed = {path.parts[-4] for path in sites.glob("*/*/personal/rows.sealed")}
    assert sealed == {"south"}  # its node config asks for it


def test_a_killed_site_and_a_malicious_one(five):
    """A malicious site sends a huge sum, no numbers, an old sum; then a site is killed in a round.

    The releases are those of the same federation in one process, without masks of Flower's making,
    when the same answers are changed or do not come.
    """
    wrongs = {
        "east": {"masked/0": "ring", "masked/1": "nan", "masked/2": "replay"},
        "west": {"masked/3": "wait"},
    }
    attempt = five("disturbed", wrongs, rounds=4, privacy=SHARES, trust="nobody")
    waiting = attempt.trial.site_folder("west") / "waiting"
    attempt.until(waiting.exists, 1200)  # its answer is ready, and has not left
    attempt.federation.kill_node("west")
    assert attempt.wait(1200) == "finished:completed"
    assert [line["answered"] for line in attempt.log("round")] == [15, 12, 12, 12]
    assert len(attempt.log("rejected")) >= 2
    trial = attempt.trial

    def disturb(site, question, answer):
        seen = peek(question)
        if (site, seen.round) in (("east", 2), ("west", 3)):
            return None  # it is not about this round, or does not come
        if site != "east" or seen.kind != "masked" or seen.round not in (0, 1):
            return answer
        key = trial.signing_key("east")
        expected = {n: Expected(raw.dtype, raw.shape) for n, raw in answer.arrays.items()}
        message = verify(answer, key.public_key(), expected)
        wrong = [lambda a: a + np.uint64(1 << 62), lambda a: a * np.nan][seen.round]
        arrays = {name: wrong(array) for name, array in message.arrays.items()}
        return sign(replace(message, arrays=arrays), key)

    assert attempt.released() == trial.expected_with(disturb, trust="nobody")
    assert main(["verify", str(attempt.folder)]) == 0
    views = json.loads((attempt.folder / "guarantee.json").read_text())["views"]
    assert 0 < views["coordinator"] < views["coordinator_and_corrupt"] <= 1.0
    assert views["other_clients"] <= 1.0
