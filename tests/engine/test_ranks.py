"""Several processes share a run: the same releases to the last bit for any number, kills included.

Processes are forked and find one another as those that torchrun starts; traffic stays on loopback.
"""

import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.runs.forked import account

from coterie.core.ranks import ALONE, RankError, Ranks, is_launched

SMALL = ("--data", "synthetic", "--option", "clients=23", "--option", "rows=7")
DIGITS = ("--data", "digits", "--clients", "17", "--rows", "20")
SHORT = ("--rounds", "3", "--no-local", "--quiet", "--json")
METHODS = {
    "pfeb": (*SMALL, "--method", "pfeb"),
    "cohorts": (*SMALL, "--method", "pmtl", "--set", "method.solver=sgd", "--cohort", "9"),
    "duals": (*SMALL, "--option", "task=binary", "--method", "mtlsvm"),
    "moments": (*SMALL, "--method", "mpmtl"),
    "own noise": (*SMALL, "--method", "naive_dp", "--store", "disk"),
    "shares": (*SMALL, "--method", "pmtl", "--noise", "shares", "--cohort", "9"),
    "shared layers": (*DIGITS, "--method", "dpfedmtl", "--model", "mlp"),
    "network": (*DIGITS, "--method", "pmtl", "--model", "mlp"),
    "finetuned": (*SMALL, "--method", "fedavg", "--finetune", "plain"),
}


def begin(kind, seed, folder, epsilon=2):
    options = ("--epsilon", epsilon, "--simulation-seed", seed, "--out", folder)
    return ("run", *METHODS[kind], *SHORT, *options)


def finished(forks, jobs):
    """Return exit statuses of all ranks; on an error, show what they wrote."""
    found = [forks.finish(job) for job in jobs]
    return [status for status, *_ in found], "\n".join(err for _, _, err in found)


def same(one, other):
    """Whether releases and models are equal to the last bit; scores follow from them."""
    for name in ("posts.npz", "shared.npz", "models/clients.safetensors", "metrics.parquet"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("pfeb", 2),
        ("cohorts", 3),
        ("duals", 2),
        ("moments", 4),
        ("own noise", 2),
        ("shares", 3),
        ("shared layers", 2),
        ("network", 3),
        ("finetuned", 2),
    ],
)
def test_releases_are_those_of_one_process(forks, tmp_path, kind, size):
    seed = 11 + size
    code, _, err = forks.run(*begin(kind, seed, tmp_path / "alone"))
    assert code == 0, err
    statuses, err = finished(forks, forks.share(size, *begin(kind, seed, tmp_path / "shared")))
    assert statuses == [0] * size, err
    same(tmp_path / "alone", tmp_path / "shared")
    assert account(tmp_path / "alone") == account(tmp_path / "shared")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cohorts", "duals"])
def test_a_killed_rank_ends_the_run_which_another_number_of_ranks_resumes(forks, tmp_path, kind):
    """With state per client and per row; killed ranks are the first and another one."""
    code, _, err = forks.run(*begin(kind, 5, tmp_path / "alone"))
    assert code == 0, err
    folder = tmp_path / "shared"
    resume = ("run", "--resume", folder, "--quiet", "--json")
    under = str(folder)
    # Rank 1 dies at its first write of personal state, rank 0 in the middle of its work.
    faults = (None, {"kind": "kill", "at": 12, "under": under})
    statuses, err = finished(forks, forks.share(2, *begin(kind, 5, folder), faults=faults))
    assert statuses[1] == -signal.SIGKILL and statuses[0] == 2, err
    assert "another rank has ended" in err and f"--resume {folder}" in err
    faults = ({"kind": "kill", "at": 20, "under": under},)
    statuses, err = finished(forks, forks.share(3, *resume, faults=faults))
    assert statuses[0] == -signal.SIGKILL and set(statuses[1:]) <= {0, 2}, err
    charged, released = account(folder)
    assert set(released) <= set(charged)
    code, _, err = forks.run(*resume)
    assert code == 0, err
    same(tmp_path / "alone", folder)


@pytest.mark.full
def test_what_ranks_cannot_share_is_refused_by_all(forks, tmp_path):
    plan = ("run", *SMALL, *SHORT, "--epsilon", "2", "--out", tmp_path / "run")
    for more, why in (
        (("--method", "fedavg", "--history"), "--history"),
        (("--method", "mtl"), "all rows in one place"),
    ):
        started = time.monotonic()
        statuses, err = finished(forks, forks.share(2, *plan, *more))
        assert statuses[0] == 2 and why in err and "without torchrun" in err
        assert time.monotonic() - started < 60, "the other rank waits for nobody"
    assert not (tmp_path / "run").exists()


def test_alone_nothing_travels():
    total = {"w": torch.arange(3.0)}
    assert ALONE.add(total) is total and ALONE.share(total) is total
    ALONE.wait()
    assert not is_launched({"RANK": "0"})
    assert not is_launched(dict.fromkeys(("RANK", "MASTER_ADDR", "MASTER_PORT"), "1"))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("clients", [7, 8, 100])
def test_every_client_has_one_owner(size, clients):
    ranges = Ranks(0, size).ranges(clients)
    assert [client for owned in ranges for client in owned] == list(range(clients))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert [Ranks(rank, size).owned(clients) for rank in range(size)] == ranges


def test_a_rank_that_is_gone_is_an_error_with_a_name():
    from coterie.core.ranks import _explained

    with pytest.raises(RankError, match="another rank has ended"), _explained():
        raise RuntimeError("Connection reset by peer\n at line 7")


@pytest.mark.slow
def test_torchrun_and_one_process_write_equal_posts(tmp_path):
    """The contract for scripts, by the commands themselves."""
    plan = ("run", *METHODS["network"], *SHORT, "--epsilon", "2", "--simulation-seed", "3")
    alone = [sys.executable, "-m", "coterie", *plan, "--out", str(tmp_path / "alone")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "-m", "coterie", *plan]
    for command in (alone, [*launch, "--out", str(tmp_path / "shared")]):
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    same(tmp_path / "alone", tmp_path / "shared")
