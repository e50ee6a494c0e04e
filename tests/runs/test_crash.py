"""Full and read-only disks: one clear line, the ledger intact, and a run that goes on.

Faults are put in at acts of writing (see `faults.py`), and met for real: on a small file system
that runs full, and on one that is mounted read-only.
"""

import errno
import os
import random
import re
import shutil
import subprocess

import pytest
from tests.runs.forked import account, kept, visible

from coterie.cli.main import main
from coterie.core.files import explain_disk_errors

pytestmark = pytest.mark.full

RUN = (
    "run", "--data", "synthetic", "--option", "clients=12", "--option", "rows=6",
    "--method", "pmtl", "--noise-multiplier", "4", "--rounds", "3", "--simulation-seed", "7",
    "--no-local", "--quiet", "--json",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """Return what the run leaves behind where all goes well, and its acts of writing."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    log = folder.parent / "acts"
    counted = {"kind": "none", "at": 0, "under": str(folder), "log": str(log)}
    code, _, err = forks.run(*RUN, "--out", folder, fault=counted)
    assert code == 0, err
    return kept(folder), log.read_text().splitlines()


def check_error(folder, found, said):
    """One line that says what is wrong and how to go on; every post that exists is charged."""
    code, out, err = found
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert re.search(said, err) and "Traceback" not in err and "[Errno" not in err, err
    if not folder.exists():
        return {}
    if (folder / "plan.toml").exists():
        assert f"coterie run --resume {folder}" in err or f"coterie report {folder}" in err
    charged, released = account(folder)
    seen = visible(folder)
    assert set(seen) <= set(charged) and set(released) <= set(charged)
    return seen


def check_goes_on(forks, folder, wanted, seen):
    """With room, the run goes on to what it would have been; what was out stays as it was."""
    resumed = ("run", "--resume", folder, "--json", "--quiet")
    begun = (folder / "plan.toml").exists()
    code, _, err = forks.run(*(resumed if begun else (*RUN, "--out", folder)))
    assert code == 0, err
    assert kept(folder) == wanted
    now = visible(folder)
    assert all(now[index] == post for index, post in seen.items())
    assert not list(folder.rglob("*.partial"))


def places(acts, count, seed):
    """Choose acts at which a full disk is felt: spread over the run, and where each kind ends."""
    coins = random.Random(seed)
    felt = [at for at, act in enumerate(acts, 1) if act.split()[0] not in ("unlink", "rmdir")]
    felt = [at for at in felt if not acts[at - 1].startswith(("replace", "rename"))]
    step = len(felt) / count
    return [felt[int((part + coins.random()) * step)] for part in range(count)]


def test_a_full_disk_at_acts_of_writing(forks, whole, tmp_path):
    wanted, acts = whole
    for at in places(acts, 6, 1):
        folder = tmp_path / str(at)
        fault = {"kind": "ENOSPC", "at": at, "under": str(folder)}
        found = forks.run(*RUN, "--out", folder, fault=fault)
        seen = check_error(folder, found, "the disk is full|No space left")
        check_goes_on(forks, folder, wanted, seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ENOSPC", "EROFS", "EIO"])
def test_an_error_at_every_act_of_writing(forks, whole, tmp_path, kind):
    wanted, acts = whole
    said = {"ENOSPC": "full|No space", "EROFS": "read-only|Read-only", "EIO": "error"}[kind]
    for at in range(1, len(acts) + 1):
        middle = 1 < at < len(acts) and acts[at - 2] == acts[at - 1] == acts[at]
        ends_well = kind == "ENOSPC" and at == len(acts) - 1  # a rename needs no room
        if middle or ends_well or "unlink" in acts[at - 1] or "rmdir" in acts[at - 1]:
            continue
        folder = tmp_path / str(at)
        fault = {"kind": kind, "at": at, "under": str(folder)}
        seen = check_error(folder, forks.run(*RUN, "--out", folder, fault=fault), said)
        check_goes_on(forks, folder, wanted, seen)
        shutil.rmtree(folder)


def test_a_run_resumed_on_a_full_disk_stays_resumable(forks, whole, tmp_path):
    wanted, acts = whole
    folder = tmp_path / "run"
    middle = next(at for at, act in enumerate(acts, 1) if "000001.npz.partial" in act)
    found = forks.run(
        *RUN, "--out", folder, fault={"kind": "kill", "at": middle, "under": str(folder)}
    )
    assert found[0] == -9
    for at in (1, 3, 6):
        fault = {"kind": "ENOSPC", "at": at, "under": str(folder)}
        found = forks.run("run", "--resume", folder, "--json", "--quiet", fault=fault)
        seen = check_error(folder, found, "the disk is full|No space left")
    check_goes_on(forks, folder, wanted, seen)


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of its own; only root can."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("only root can mount a file system to run full")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for each in mounted:
        subprocess.run(["umount", "-l", str(each)], check=True)


def remount(place, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


@pytest.mark.parametrize("kilobytes", [16, 40, 64])
def test_a_disk_that_is_really_full(forks, whole, disk, kilobytes):
    place = disk("size=1m")
    # All but so much is taken: a run of this size needs more than the most of them.
    used = (1 << 20) - (kilobytes << 10)
    (place / "ballast").write_bytes(bytes(used))
    folder = place / "run"
    found = forks.run(*RUN, "--out", folder)
    seen = check_error(folder, found, "the disk is full|No space left")
    (place / "ballast").unlink()
    check_goes_on(forks, folder, whole[0], seen)


def test_a_folder_that_is_really_read_only(forks, whole, disk):
    place = disk("size=4m")
    wanted, acts = whole
    folder = place / "run"
    middle = next(at for at, act in enumerate(acts, 1) if "000001.npz.partial" in act)
    fault = {"kind": "kill", "at": middle, "under": str(folder)}
    assert forks.run(*RUN, "--out", folder, fault=fault)[0] == -9
    seen, ledger = visible(folder), (folder / "ledger.jsonl").read_bytes()
    remount(place, "ro")
    try:
        for arguments in (("run", "--resume", folder, "--quiet"), (*RUN, "--out", place / "new")):
            code, out, err = forks.run(*arguments)
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert re.search("[Rr]ead-only", err) and "[Errno" not in err
        assert (folder / "ledger.jsonl").read_bytes() == ledger
    finally:
        remount(place, "rw")
    check_goes_on(forks, folder, wanted, seen)


def test_a_finished_run_on_a_read_only_disk_is_still_shown(forks, disk):
    place = disk("size=4m")
    folder = place / "run"
    code, _, err = forks.run(*RUN, "--out", folder)
    assert code == 0, err
    remount(place, "ro")
    try:
        code, out, err = forks.run("run", "--resume", folder, "--json", "--quiet")
    finally:
        remount(place, "rw")
    assert (code, err) == (0, "") and out.startswith("{")


def test_a_report_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch, capsys):
    def full(folders, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("coterie.cli.train.write_report", full)
    folder = tmp_path / "run"
    for arguments in ((*RUN, "--out", folder), ("run", "--resume", folder)):
        assert main([str(one) for one in arguments]) == 2
        out, err = capsys.readouterr()
        assert f"coterie report {folder}" in err and "No space left" in err
        assert out  # the results are shown all the same
    assert (folder / "result.json").exists()


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), explain_disk_errors(tmp_path):
        (tmp_path / "nowhere").read_bytes()
    with pytest.raises(OSError, match="plain"), explain_disk_errors(tmp_path):
        raise OSError("plain")
