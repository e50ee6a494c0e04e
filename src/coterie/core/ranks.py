"""The processes of one run (ranks), started by `torchrun`; alone, there is one.

Every rank computes the clients that it owns and keeps their personal state. Rank 0 also draws
cohorts and noise, owns the ledger and all files of the result, and prints. What travels: the plan
and each round's cohort from rank 0, the exact sum of the clipped contributions to rank 0, the
shared tree from rank 0, and after the last round every client's model to rank 0.

**Guarantee:** none against the ranks themselves: they are one trusted simulation, as one process
is. Sums without noise, models and objects that Python executes when it reads them (pickle) travel
unencrypted, so ranks belong on machines and a network of one operator. A release is the same
function of the clients' rows for any number of ranks: contributions lie on a public grid and their
sum stays below 2^53 steps (see `coterie.privacy.mechanisms`), so float64 adds them exactly in any
order. Test: tests/engine/test_ranks.py.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the command line asks whether it is a rank before it loads torch
    from coterie.core.tree import Tree

_PATIENCE = timedelta(hours=2)
"""A rank that dies closes its connections and is noticed at once; this is for one that hangs."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
T = TypeVar("T")


class RankError(RuntimeError):
    """Raised when another rank of the run has ended or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """This process's number among the ranks of a run, and what they say to each other.

    Alone, every operation returns what it is given.

    Attributes:
        rank: This process; 0 owns ledger, noise and files.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def owned(self, clients: int) -> range:
        """Return the clients of this rank: neighbours, so that cohorts are split evenly.

        >>> Ranks(1, 3).owned(10)
        range(3, 6)
        """
        return self.ranges(clients)[self.rank]

    def ranges(self, clients: int) -> list[range]:
        """Return the clients of every rank.

        >>> Ranks(0, 3).ranges(10)
        [range(0, 3), range(3, 6), range(6, 10)]
        """
        ends = [clients * rank // self.size for rank in range(self.size + 1)]
        return [range(start, stop) for start, stop in pairwise(ends)]

    def share(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box: list[Any] = [value if self.is_first else None]
        with _explained():
            dist.broadcast_object_list(box, src=0)
        found: T = box[0]
        return found

    def add(self, total: "Tree") -> "Tree":
        """Return the sum of every rank's leaves on rank 0; elsewhere what is given."""
        if self.size == 1:
            return total
        import torch
        import torch.distributed as dist

        # One message for all leaves.
        flat = torch.cat([leaf.reshape(-1) for leaf in total.values()])
        flat = flat if "nccl" in _backend() else flat.cpu()
        with _explained():
            dist.reduce(flat, dst=0)
        if not self.is_first:
            return total
        parts = torch.split(flat, [leaf.numel() for leaf in total.values()])
        pairs = zip(total.items(), parts, strict=True)
        return {name: part.reshape(leaf.shape) for (name, leaf), part in pairs}

    def send(self, value: Any) -> None:
        """Send a value to rank 0, which waits for it in `receive`."""
        import torch.distributed as dist

        with _explained():
            dist.send_object_list([value], dst=0)

    def receive(self, rank: int) -> Any:
        """Return the next value that a rank has sent."""
        import torch.distributed as dist

        box = [None]
        with _explained():
            dist.recv_object_list(box, src=rank)
        return box[0]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.share(None)
        if self.size > 1:
            import torch.distributed as dist

            with _explained():
                dist.barrier()


ALONE = Ranks()


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `torchrun` started this process as one of several."""
    return all(environment.get(name) for name in _LAUNCHED) and environment["WORLD_SIZE"] != "1"


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other ranks, if `torchrun` started this process as one of several."""
    if not is_launched():
        yield ALONE
        return
    _share_cores()
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise ValueError(
            "this build of torch has no torch.distributed with gloo: start coterie without torchrun"
        )
    _take_gpu()
    with _explained():
        dist.init_process_group(_backend(), timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _backend() -> str:
    """Return what carries the messages: gloo, and NCCL for sums on GPUs if each rank has one."""
    import torch
    import torch.distributed as dist

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_own = dist.is_nccl_available() and torch.cuda.device_count() >= ranks
    return "cpu:gloo,cuda:nccl" if has_own else "gloo"


def _take_gpu() -> None:
    """Make "cuda" mean another GPU for each rank of a machine, in turn."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _share_cores() -> None:
    """Give every rank of a machine its share of the cores, unless the user has decided."""
    cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Numba reads it when it is imported; torchrun sets OMP_NUM_THREADS=1 for torch.
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(1, cores // ranks)))


@contextmanager
def _explained() -> Iterator[None]:
    """Raise RankError for what torch.distributed raises when a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).split("\n", maxsplit=1)[0]
        raise RankError(f"another rank has ended or does not answer ({why})") from error
