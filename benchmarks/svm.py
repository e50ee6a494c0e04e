"""Linear SVMs of many clients, local and joint, compared with other solvers.

    python benchmarks/svm.py
    python benchmarks/svm.py --data har --c1 1 --repeats 3

local: every client by itself, min 1/2 |w|^2 + C1 sum hinge. joint: all clients at once, min 1/2
|w|^2 + C2/2 sum |v_k|^2 + C1 sum hinge, which for liblinear is one SVM on the rows [x, x / sqrt(C2)
in the client's own block] as CSR.

Data: har, 30 people, sitting against the rest, 561 features (skipped where it is not found under
$COTERIE_DATA or ../shared/data); made, generated clients x 300 rows x 100 features.

How good an answer is: its objective's excess over a lower bound (coterie's dual value at a gap of
1e-5), as a share of it, summed over clients. coterie stops at its own certificate, a gap of 1e-3
for each client. liblinear has none, so its tolerance is lowered by half powers of ten until the
excess is at most 1e-3, on the first clients (--probe) for local; the time of a run with that
tolerance counts. Runs are interleaved; medians are given; compilation is not counted.
"""

import argparse
import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from coterie.data.federated import FederatedDataset, Spec
from coterie.solvers.sdca import Losses, fit_joint, fit_local

Floats = NDArray[np.float64]
GAP = 1e-3
EXACT = 1e-5
SITTING = 3
# Models of all clients (c, d) for "local"; w and v_k stacked (1 + c, d) for "joint".
Solve = Callable[[FederatedDataset, float], Floats]


@dataclass(frozen=True)
class Task:
    """What is to be solved."""

    kind: str
    c1: float
    c2: float

    def objectives(self, data: FederatedDataset, models: Floats) -> Floats:
        """Return the objective: one per client if local, one in all if joint."""
        x, signs = data.features.numpy(), 2 * data.targets.numpy().astype(np.float64) - 1
        owner = np.repeat(np.arange(len(data)), data.counts)
        used = models if self.kind == "local" else models[0] + models[1:]
        scores = np.empty(len(x))
        for k, (begin, end) in enumerate(itertools.pairwise(data.offsets)):
            scores[begin:end] = x[begin:end] @ used[k]
        hinge = self.c1 * np.bincount(owner, np.maximum(1 - signs * scores, 0), len(data))
        squares = (models**2).sum(axis=1) / 2
        if self.kind == "local":
            return hinge + squares
        return np.array([hinge.sum() + squares[0] + self.c2 * squares[1:].sum()])

    def bounds(self, data: FederatedDataset) -> Floats:
        """Return lower bounds of the objectives, by weak duality."""
        clients, losses = everyone(data), Losses(c1=self.c1)
        if self.kind == "local":
            fit = fit_local(clients, losses, bias=False, tol=EXACT)
            return (fit.primal - fit.gap).numpy()
        joint = fit_joint(clients, losses, c2=self.c2, bias=False, tol=EXACT)
        return np.array([joint.primal - joint.gap])

    def contenders(self) -> dict[str, tuple[Solve, bool]]:
        """Return solvers by name; the flag states whether their tolerance is searched for."""
        return {
            "coterie": (self.ours(torch.float64), False),
            "coterie float32": (self.ours(torch.float32), False),
            "liblinear": (self.liblinear(), True),
        }

    def ours(self, dtype: torch.dtype) -> Solve:
        """Solve by coterie in a given precision."""
        losses = Losses(c1=self.c1)

        def solve(data: FederatedDataset, tol: float) -> Floats:
            clients = everyone(data)
            if self.kind == "local":
                fit = fit_local(clients, losses, bias=False, tol=tol, dtype=dtype)
                return fit.weight[:, 0].double().numpy()
            joint = fit_joint(clients, losses, c2=self.c2, bias=False, tol=tol, dtype=dtype)
            return torch.cat([joint.shared, joint.own[:, 0]]).double().numpy()

        return solve

    def liblinear(self) -> Solve:
        """Solve by liblinear, one fit a client or one of the expanded rows (written once)."""
        expanded: dict[int, sparse.csr_matrix] = {}

        def fit(x: Floats | sparse.csr_matrix, y: Floats, tol: float) -> Floats:
            if len(set(y)) < 2:
                return np.zeros(x.shape[1])
            how = {"fit_intercept": False, "random_state": 0, "max_iter": 10**6}
            kind = LinearSVC(loss="hinge", C=self.c1, tol=tol, **how)
            return np.asarray(kind.fit(x, y).coef_[0])

        def solve(data: FederatedDataset, tol: float) -> Floats:
            x, y = data.features.numpy(), data.targets.numpy()
            if self.kind == "local":
                pairs = itertools.pairwise(data.offsets)
                return np.stack([fit(x[begin:end], y[begin:end], tol) for begin, end in pairs])
            if len(data) not in expanded:
                expanded[len(data)] = expand(data, self.c2)
            found = fit(expanded[len(data)], y, tol).reshape(1 + len(data), -1)
            return np.concatenate([found[:1], found[1:] / math.sqrt(self.c2)])

        return solve


def everyone(data: FederatedDataset):
    return data.clients(np.arange(len(data)))


def expand(data: FederatedDataset, c2: float) -> sparse.csr_matrix:
    """Write rows as [x, x / sqrt(c2) in the block of their client]."""
    x = sparse.csr_matrix(data.features.numpy().astype(np.float64))
    owner = np.repeat(np.repeat(np.arange(len(data)), data.counts), np.diff(x.indptr))
    width = x.shape[1]
    places = (x.data / math.sqrt(c2), x.indices + owner * width, x.indptr)
    blocks = sparse.csr_matrix(places, shape=(x.shape[0], width * len(data)))
    return sparse.hstack([x, blocks]).tocsr()


def first(data: FederatedDataset, clients: int) -> FederatedDataset:
    """Keep the first clients."""
    if clients >= len(data):
        return data
    rows = int(data.offsets[clients])
    spec = Spec(data.spec.shape, 1, "binary", clients)
    offsets, names = data.offsets[: clients + 1], data.names[:clients]
    return FederatedDataset(spec, names, offsets, data.features[:rows], data.targets[:rows])


def wrap(x: NDArray[np.float32], y: NDArray[np.bool_], counts: NDArray[np.int64]):
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    spec = Spec((x.shape[1],), 1, "binary", len(counts))
    names = [str(k) for k in range(len(counts))]
    targets = torch.from_numpy(y.astype(np.float32))
    return FederatedDataset(spec, names, offsets, torch.from_numpy(x), targets)


def har() -> FederatedDataset | None:
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    path = Path(os.environ.get("COTERIE_DATA", beside)) / "har" / "har.npz"
    if not path.exists():
        return None
    with np.load(path) as found:
        order = np.argsort(found["client"], kind="stable")
        x, y = found["X"][order], found["y"][order] == SITTING
        return wrap(np.ascontiguousarray(x), y, np.bincount(found["client"]))


def make(clients: int, rows: int = 300, features: int = 100) -> FederatedDataset:
    """Make clients whose true models scatter about a shared one, with noise on the scores."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((clients * rows, features), dtype=np.float32)
    shared = generator.standard_normal(features)
    truth = shared + 0.5 * generator.standard_normal((clients, features))
    scores = np.einsum("knd,kd->kn", x.reshape(clients, rows, features), truth).reshape(-1)
    y = scores + 3 * generator.standard_normal(len(x)) > 0
    return wrap(x, y, np.full(clients, rows))


def excess(task: Task, data: FederatedDataset, models: Floats, bounds: Floats) -> float:
    found = task.objectives(data, models)
    return float((found - bounds).sum() / found.sum())


def tolerance(task: Task, solve: Solve, data: FederatedDataset, bounds: Floats) -> float:
    """Find the loosest half power of ten with which a solver's excess is small enough."""
    for half in range(2, 16):
        if excess(task, data, solve(data, 10 ** (-half / 2)), bounds) <= GAP:
            return float(10 ** (-half / 2))
    return math.nan


def compare(name: str, data: FederatedDataset, task: Task, repeats: int, probe: int) -> None:
    bounds = task.bounds(data)
    few = first(data, probe) if task.kind == "local" else data
    contenders = task.contenders()
    tols = {
        who: tolerance(task, solve, few, bounds[: len(few)]) if searched else GAP
        for who, (solve, searched) in contenders.items()
    }
    times: dict[str, list[float]] = {who: [] for who in tols}
    gaps = {}
    for turn in range(repeats + 1):
        for who, (solve, searched) in contenders.items():
            if turn == 0 and searched:
                continue  # the first turn is for compilation
            begin = time.perf_counter()
            models = solve(data, tols[who])
            if turn:
                times[who].append(time.perf_counter() - begin)
                gaps[who] = excess(task, data, models, bounds)
    ours = statistics.median(times["coterie"])
    for who, taken in times.items():
        middle = statistics.median(taken)
        label = f"{name} {task.kind}" if who == "coterie" else ""
        print(
            f"{label:12} {task.c1 if label else '':>5} {len(data) if label else '':>6} {who:16}"
            f"{middle:9.3f} {min(taken):8.3f} .. {max(taken):7.3f} {middle / ours:8.1f}x"
            f" {gaps[who]:9.1e} {tols[who]:9.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--c1", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--c2", type=float, default=10.0)
    parser.add_argument("--data", nargs="+", default=["har", "made"])
    parser.add_argument("--kinds", nargs="+", default=["local", "joint"])
    parser.add_argument("--clients", type=int, default=1000, help="generated clients, local")
    parser.add_argument("--together", type=int, default=100, help="generated clients, joint")
    parser.add_argument("--probe", type=int, default=50, help="clients to find tolerances with")
    given = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    head = f"{'problem':12} {'C1':>5} {'m':>6} {'solver':16}{'median s':>9}"
    print(f"{head} {'fastest .. slowest':>19} {'ratio':>9} {'excess':>9} {'tol':>9}")
    for name in given.data:
        data = har() if name == "har" else make(given.clients)
        if data is None:
            print("har is not found: skipped")
            continue
        for kind in given.kinds:
            part = first(data, given.together) if kind == "joint" and name == "made" else data
            for c1 in given.c1:
                compare(name, part, Task(kind, c1, given.c2), given.repeats, given.probe)


if __name__ == "__main__":
    main()
