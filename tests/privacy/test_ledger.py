"""The ledger: on disk before it counts, readable after any cut, one plan, one process."""

import itertools
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from coterie.privacy.events import Gaussian, NonPrivate
from coterie.privacy.ledger import Ledger, LedgerError, OverspentError

EVENTS = [Gaussian(2.0)] * 4


def reopen(path, events=EVENTS, plan="plan"):
    """Read an account as a new process would, and let go of it."""
    with Ledger(events, path, plan) as ledger:
        return set(ledger.charged), dict(ledger.released)


def write_run(path):
    """A real account: two posts out, a third charged."""
    with Ledger(EVENTS, path, "plan") as ledger:
        for index in range(2):
            ledger.charge(index)
            ledger.release(index, f"digest{index}")
        ledger.charge(2)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ledger.jsonl"


@pytest.fixture(params=["memory", "disk"])
def ledger(request, path):
    with Ledger(EVENTS, None if request.param == "memory" else path, "plan") as made:
        yield made


def test_each_index_is_charged_and_released_once(ledger):
    ledger.charge(0)
    assert ledger.charged == {0}
    assert ledger.released == {}
    ledger.release(0, "abc")
    assert ledger.released == {0: "abc"}
    with pytest.raises(OverspentError, match="exists and is never computed again"):
        ledger.charge(0)


@pytest.mark.parametrize("index", [-1, 4, 1000])
def test_what_the_plan_does_not_hold_is_refused(ledger, index):
    with pytest.raises(OverspentError, match="plan has 4 releases"):
        ledger.charge(index)
    assert ledger.charged == set()


def test_a_plan_without_posts_pays_for_none():
    with pytest.raises(OverspentError):
        Ledger([]).charge(0)


def test_a_post_that_was_never_charged_is_refused(ledger):
    with pytest.raises(OverspentError, match="never charged"):
        ledger.release(0, "abc")
    assert ledger.released == {}


def test_a_charged_index_is_charged_again_for_nothing(path):
    with Ledger(EVENTS, path, "plan") as ledger:
        ledger.charge(0)
        size = path.stat().st_size
        ledger.charge(0)
        assert path.stat().st_size == size
    with Ledger(EVENTS, path, "plan") as ledger:
        ledger.charge(0)
        assert path.stat().st_size == size
        assert ledger.charged == {0}


def test_a_second_release_changes_nothing(ledger):
    ledger.charge(1)
    ledger.release(1, "first")
    ledger.release(1, "second")
    assert ledger.released == {1: "first"}


def test_the_account_survives_the_process(path):
    write_run(path)
    assert reopen(path) == ({0, 1, 2}, {0: "digest0", 1: "digest1"})
    with Ledger(EVENTS, path, "plan") as ledger:
        with pytest.raises(OverspentError):
            ledger.charge(1)
        ledger.charge(2)
        ledger.release(2, "digest2")
        ledger.charge(3)
    assert reopen(path)[0] == {0, 1, 2, 3}


def test_opening_twice_in_a_row_adds_nothing(path):
    content = write_run(path)
    for _ in range(3):
        reopen(path)
    assert path.read_bytes() == content


def test_a_cut_at_any_byte_loses_nothing_that_was_acknowledged(path, monkeypatch):
    content = write_run(path)
    # What is read back here was never lost: syncing would only make some 300 accounts slow.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    entries = [json.loads(line) for line in content.splitlines()]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = [entry for entry, end in zip(entries, ends, strict=True) if end <= cut]
        charged = {entry["charge"] for entry in whole if "charge" in entry}
        released = {entry["release"]: entry["sha256"] for entry in whole if "release" in entry}
        # A last line that lacks only its newline counts, and is not written a second time.
        near = [entry for entry, end in zip(entries, ends, strict=True) if end <= cut + 1]
        first = reopen(path)
        assert first[0] == charged | {entry["charge"] for entry in near if "charge" in entry}, cut
        assert released.items() <= first[1].items(), cut

        # The account goes on from there, through several more deaths, and adds up in the end.
        with Ledger(EVENTS, path, "plan") as ledger:
            for index in range(len(EVENTS)):
                if index not in ledger.released:
                    ledger.charge(index)
        assert reopen(path)[0] == {0, 1, 2, 3}, cut
        assert reopen(path)[1].keys() >= released.keys(), cut
        lines = path.read_bytes().splitlines()
        assert all(lines.count(b'{"charge": %d}' % index) == 1 for index in range(4)), cut


def test_a_second_cut_in_the_line_after_a_torn_one(path):
    content = write_run(path)
    path.write_bytes(content[:-4])
    with Ledger(EVENTS, path, "plan") as ledger:
        ledger.charge(2)
        ledger.release(2, "x")
    grown = path.read_bytes()
    start = len(content) - 4
    for cut in range(start, len(grown) + 1):
        path.write_bytes(grown[:cut])
        charged, released = reopen(path)
        assert {0, 1} <= charged <= {0, 1, 2}
        assert {0, 1} <= released.keys() <= {0, 1, 2}


@pytest.mark.parametrize("rubbish", [b"\x00" * 40, b"\xff\xfe{", b'{"charge": ', b"\x00{\x00}"])
def test_a_torn_line_of_rubbish_is_void(path, rubbish):
    content = write_run(path)
    path.write_bytes(content + rubbish)
    with Ledger(EVENTS, path, "plan") as ledger:
        assert ledger.charged == {0, 1, 2}
        ledger.charge(3)
    assert reopen(path)[0] == {0, 1, 2, 3}


def test_another_plan_is_refused_and_the_file_left_alone(path):
    content = write_run(path)
    for events, plan in ((EVENTS, "other"), (EVENTS[:3], "plan"), (EVENTS * 2, "plan")):
        with pytest.raises(LedgerError, match="another plan"):
            Ledger(events, path, plan)
        assert path.read_bytes() == content


def test_other_events_are_another_plan(path):
    # The same digest and number of posts, but not the noise that earlier posts were paid for: the
    # account would state the new noise for posts that were made with the old one.
    write_run(path)
    for events in ([Gaussian(8.0)] * 4, [Gaussian(2.0)] * 3 + [NonPrivate()]):
        with pytest.raises(LedgerError):
            Ledger(events, path, "plan").close()


def test_the_same_events_in_other_number_types_are_the_same_plan(path):
    # A multiplier out of an array comes back from a plan's text as a plain float.
    with Ledger([Gaussian(np.float64(2.0))] * 4, path, "plan") as ledger:
        ledger.charge(0)
    assert reopen(path) == ({0}, {})


def test_a_refused_ledger_lets_go_of_the_file(path):
    write_run(path)
    with pytest.raises(LedgerError) as kept_alive:
        Ledger(EVENTS, path, "other")
    assert reopen(path)[0] == {0, 1, 2}
    assert kept_alive.value is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"release": 3, "sha256": "x"}',  # never charged
        b'{"charge": 4}',  # not in the plan
        b'{"charge": -1}',
        b"[1, 2]",
        b"7",
        b'{"charge": "x"}',
        b'{"charge": null}',
        b'{"release": 2}',  # a release without a digest
    ],
)
def test_an_altered_account_is_refused(path, line):
    content = write_run(path)
    path.write_bytes(content + line + b"\n")
    with pytest.raises(LedgerError):
        Ledger(EVENTS, path, "plan").close()


def test_a_lost_charge_line_of_a_released_post_is_refused(path):
    content = write_run(path)
    path.write_bytes(content.replace(b'{"charge": 1}\n', b""))
    with pytest.raises(LedgerError, match="never charged"):
        Ledger(EVENTS, path, "plan").close()


def test_a_gap_among_released_posts_is_refused(path):
    # Posts are made in order: if 1 is out and 0 is not, a line was taken away.
    content = write_run(path)
    path.write_bytes(content.replace(b'{"release": 0, "sha256": "digest0"}\n', b""))
    with pytest.raises(LedgerError):
        Ledger(EVENTS, path, "plan").close()


def test_a_second_process_is_refused_until_the_first_ends(path):
    code = textwrap.dedent(
        """
        import sys
        from coterie.privacy.events import Gaussian
        from coterie.privacy.ledger import Ledger, LedgerError
        from pathlib import Path
        try:
            ledger = Ledger([Gaussian(2.0)] * 4, Path(sys.argv[1]), "plan")
        except LedgerError as error:
            print("refused:", error, flush=True)
            sys.exit(3)
        ledger.charge(0)
        print("open", flush=True)
        sys.stdin.readline()
        """
    )
    command = [sys.executable, "-c", code, str(path)]
    env = {"PYTHONPATH": ":".join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}

    with Ledger(EVENTS, path, "plan") as ours:
        ours.charge(0)
        with subprocess.Popen(command, **pipes) as second:
            out, _ = second.communicate("\n", timeout=60)
        assert second.returncode == 3
        assert "in use by another process" in out

    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "open\n"
        with pytest.raises(LedgerError, match="in use"):
            Ledger(EVENTS, path, "plan")
        first.kill()  # a killed process lets go of its lock, and its charge is on disk
        first.wait(60)
    assert reopen(path) == ({0}, {})


def test_the_same_process_cannot_open_it_twice_either(path):
    with Ledger(EVENTS, path, "plan"), pytest.raises(LedgerError, match="in use"):
        Ledger(EVENTS, path, "plan")
    assert reopen(path) == (set(), {})


class Disk:
    """Watches `os.fsync`: what a power cut would leave of a file at any moment."""

    def __init__(self, monkeypatch):
        self.safe = {}
        self.folders = set()
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._record)

    def _record(self, descriptor):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(target):
            self.folders.add(target)
        else:
            with open(target, "rb") as file:
                self.safe[target] = file.read()
        self._sync(descriptor)


def test_a_charge_is_synced_when_charge_returns(path, monkeypatch):
    disk = Disk(monkeypatch)
    with Ledger(EVENTS, path, "plan") as ledger:
        header = {"plan": "plan", "posts": 4}
        assert json.loads(disk.safe[str(path)].splitlines()[0]).items() >= header.items()
        ledger.charge(0)
        assert json.loads(disk.safe[str(path)].splitlines()[-1]) == {"charge": 0}
        ledger.release(0, "d")
        assert json.loads(disk.safe[str(path)].splitlines()[-1])["release"] == 0


def test_a_new_account_has_its_name_synced(path, monkeypatch):
    # fsync of a new file keeps its content, not its name in the folder: without this the whole
    # account may vanish in a power cut while posts stay.
    disk = Disk(monkeypatch)
    with Ledger(EVENTS, path, "plan") as ledger:
        ledger.charge(0)
    assert str(path.parent) in disk.folders


def test_a_charge_that_could_not_be_synced_does_not_count(path, monkeypatch):
    ledger = Ledger(EVENTS, path, "plan")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            ledger.charge(0)
    assert ledger.charged == set()
    ledger.charge(0)
    ledger.close()
    assert reopen(path)[0] == {0}


def test_a_closed_ledger_charges_nothing(path):
    # After close() nothing reaches the file: a charge that lived in memory alone would be a lie.
    ledger = Ledger(EVENTS, path, "plan")
    ledger.charge(0)
    ledger.close()
    ledger.close()
    with pytest.raises((LedgerError, ValueError)):
        ledger.charge(1)
    with pytest.raises((LedgerError, ValueError)):
        ledger.release(0, "d")
    assert reopen(path) == ({0}, {})


def test_a_closed_ledger_does_not_confirm_an_old_charge_either(path):
    # The lock is gone: another process may be redoing this very post.
    ledger = Ledger(EVENTS, path, "plan")
    ledger.charge(0)
    ledger.close()
    with pytest.raises((LedgerError, ValueError)):
        ledger.charge(0)


def test_leaving_the_context_gives_up_the_lock_even_after_an_error(path):
    with pytest.raises(RuntimeError, match="boom"), Ledger(EVENTS, path, "plan") as ledger:
        ledger.charge(0)
        raise RuntimeError("boom")
    assert reopen(path) == ({0}, {})


def test_charging_is_cheap(path):
    # O(1) appends: the file grows by one short line a charge, never rewritten.
    events = [Gaussian(1.0)] * 50
    with Ledger(events, path, "plan") as ledger:
        node = path.stat().st_ino
        sizes = []
        for index in range(50):
            ledger.charge(index)
            sizes.append(path.stat().st_size)
        assert path.stat().st_ino == node
    assert all(0 < after - before < 64 for before, after in itertools.pairwise(sizes))
