"""The joint multi-task SVM to a relative gap: in one place, in rounds, and what else there is.

    python benchmarks/svm_joint.py [--gap 1e-3] [--rounds-gap 0.03] [--seconds 60] [--quick]

Contenders, on 2 threads, one after the other in one run:
- `fit_joint`: all rows in one place, no feature is ever written twice
- liblinear on the expanded map [x, x / sqrt(C2) in the client's block], CSR, with the largest of
  some tolerances at which its measured gap is below the target (only that fit is timed)
- `mtlsvm` and `mocha` in rounds (safe sums, each client's message apart), each with the best of
  some numbers of local epochs, to a gap that is reached in reasonable time; the look at the gap is
  part of the time of both. Rounds are slow by nature: every client's step is made as if all others
  moved the same way
- the paper's loop as published, in plain Python and NumPy, and corrected (box, safe sums)

Data: har (30 people, sitting against the rest; $COTERIE_DATA, or shared/data beside the
repository) and a generated federation of 1,000 clients x 300 rows x 100 features.
"""

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from sklearn.svm import LinearSVC

from coterie.data.config import Source
from coterie.data.federated import FederatedDataset, Spec
from coterie.data.load import load
from coterie.engine.simulate import simulate
from coterie.methods.mocha import MOCHA
from coterie.methods.mtlsvm import MTLSVM
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.solvers.sdca import Losses, fit_joint

ROOT = Path(__file__).resolve().parent.parent


def har():
    root = Path(os.environ.get("COTERIE_DATA", ROOT.parent / "shared" / "data"))
    return load(root / "har" / "har.npz", Source(positive=3)).split_by_source()[0]


def generated(clients=1000, rows=300, features=100, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((clients, rows, features), dtype=np.float32)
    shared = rng.standard_normal(features)
    own = shared + 0.5 * rng.standard_normal((clients, features))
    scores = np.einsum("knd,kd->kn", x, own) / np.linalg.norm(shared)
    y = (scores + 0.5 * rng.standard_normal(scores.shape) > 0).astype(np.float32)
    return FederatedDataset(
        Spec((features,), 1, "binary", clients),
        [f"c{k}" for k in range(clients)],
        np.arange(clients + 1, dtype=np.int64) * rows,
        torch.from_numpy(x.reshape(-1, features)),
        torch.from_numpy(y.reshape(-1)),
    )


def pieces(data):
    owner = np.repeat(np.arange(len(data)), data.counts)
    return data.features.numpy(), 2 * data.targets.double().numpy() - 1, owner


def relative_gap(data, c1, c2, w, v, dual):
    """The gap of a primal point, with the dual value of duals in the box."""
    x, y, owner = pieces(data)
    margins = y * np.einsum("nd,nd->n", x, (w + v[owner]))
    primal = 0.5 * w @ w + c2 / 2 * (v**2).sum() + c1 * np.maximum(1 - margins, 0).sum()
    signed = sparse.csr_matrix((dual * y, (owner, np.arange(len(y)))), (len(data), len(y))) @ x
    total = signed.sum(axis=0)
    value = dual.sum() - 0.5 * total @ total - (signed**2).sum() / (2 * c2)
    return (primal - value) / primal


def expanded(data, c2):
    x, _, owner = pieces(data)
    n, d = x.shape
    columns = np.concatenate(
        [np.tile(np.arange(d), (n, 1)), d * (owner[:, None] + 1) + np.arange(d)], axis=1
    )
    values = np.concatenate([x, x / np.float32(math.sqrt(c2))], axis=1).astype(np.float64)
    starts = np.arange(n + 1) * 2 * d
    return sparse.csr_matrix(
        (values.reshape(-1), columns.reshape(-1), starts), (n, d * (len(data) + 1))
    )


def duals_of(data, c1, margins):
    """A feasible dual of a primal point: c1 inside the margin, 0 beyond it."""
    return np.where(margins < 1, c1, 0.0)


def liblinear(data, c1, c2, gap):
    """Fit ever more exactly until the best dual bound known is met; give the last fit's time."""
    wide, (x, y, owner) = expanded(data, c2), pieces(data)
    best = reference(data, c1, c2)
    seconds, found = math.nan, math.inf
    for tol in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
        started = time.perf_counter()
        fit = LinearSVC(C=c1, loss="hinge", fit_intercept=False, tol=tol, max_iter=100_000)
        fit.fit(wide, y)
        seconds = time.perf_counter() - started
        block = fit.coef_.reshape(len(data) + 1, -1)
        w, v = block[0], block[1:] / math.sqrt(c2)
        margins = y * np.einsum("nd,nd->n", x, w + v[owner])
        primal = 0.5 * w @ w + c2 / 2 * (v**2).sum() + c1 * np.maximum(1 - margins, 0).sum()
        found = (primal - best) / primal
        if found <= gap:
            break
    return seconds, found, f"tol {tol:g}"


_BEST = {}


def reference(data, c1, c2):
    """The optimum, from below: our dual value at a gap of 1e-5."""
    key = (id(data), c1, c2)
    if key not in _BEST:
        clients = data.clients(np.arange(len(data), dtype=np.int64))
        fit = fit_joint(clients, Losses(c1=c1), c2=c2, bias=False, tol=1e-5)
        _BEST[key] = fit.primal - fit.gap
    return _BEST[key]


def one_place(data, c1, c2, gap):
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    fit_joint(clients, Losses(c1=c1), c2=c2, bias=False, tol=0.5)  # compiles
    data.forget()
    clients = data.clients(np.arange(len(data), dtype=np.int64))
    started = time.perf_counter()
    fit = fit_joint(clients, Losses(c1=c1), c2=c2, bias=False, tol=gap)
    return time.perf_counter() - started, fit.gap / fit.primal, f"{fit.epochs} epochs"


class OutOfTimeError(Exception):
    """A contender has had its seconds."""


def in_rounds(make, data, seconds, epochs):
    """Time rounds until the gap; the best of some numbers of local epochs."""
    best = (math.inf, math.inf, "")
    for count in epochs:
        method = make(count)
        started = time.perf_counter()

        def watch(progress, started=started):
            if time.perf_counter() - started > seconds:
                raise OutOfTimeError

        plan = Plan(
            method=method, privacy=Privacy(epsilon=math.inf), rounds=100_000, simulation_seed=0
        )
        try:
            outcome = simulate(plan, data, observe=watch)
            found = (
                outcome.timing.rounds,
                outcome.gap,
                f"{count} epochs, {len(outcome.posts)} rounds",
            )
        except OutOfTimeError:
            found = (math.inf, math.nan, f"{count} epochs: not in {seconds:g} s")
        best = min(best, found, key=lambda f: f[0])
        if best[2] == "":
            best = found
    return best


def paper_loop(data, c1, c2, gap, seconds, *, corrected):
    """The published loop: every row in turn, clients in parallel, changes added."""
    x, y, owner = pieces(data)
    x = x.astype(np.float64)
    rows = [np.flatnonzero(owner == k) for k in range(len(data))]
    rng = np.random.default_rng(0)
    w, v, alpha = np.zeros(x.shape[1]), np.zeros((len(data), x.shape[1])), np.zeros(len(x))
    sigma = len(data) if corrected else 1
    squares = (x**2).sum(axis=1) * (sigma + 1 / c2)
    started, rounds, found = time.perf_counter(), 0, math.inf
    while time.perf_counter() - started < seconds and found > gap and np.isfinite(w).all():
        change = np.zeros_like(w)
        for k, own in enumerate(rows):
            q, moved = w + v[k], np.zeros_like(w)
            for i in rng.permutation(own):
                new = alpha[i] + (1 - y[i] * (x[i] @ q)) / squares[i]
                if corrected:
                    new = min(max(new, 0.0), c1)
                step = (new - alpha[i]) * y[i]
                alpha[i] = new
                q += (sigma + 1 / c2) * step * x[i]
                moved += step * x[i]
            v[k] += moved / c2
            change += moved
        w, rounds = w + change, rounds + 1
        if rounds % 10 == 0:
            with np.errstate(all="ignore"):
                found = relative_gap(data, c1, c2, w, v, np.clip(alpha, 0, c1))
            found = found if np.isfinite(found) else math.inf
    taken = time.perf_counter() - started
    return (taken if found <= gap else math.inf), found, f"{rounds} rounds, {taken:.0f} s"


def compare(name, data, c1, c2, gap, loose, seconds, quick):
    print(f"\n{name}: C1 {c1:g}, C2 {c2:g}, gap {gap:g}, in rounds {loose:g}")
    plain = Linear(bias=False)
    counts = (20,) if quick else (5, 20, 100)
    warm = data.first(2).at_most(5, 0)
    for make in (MTLSVM, MOCHA):
        simulate(Plan(method=make(model=plain), privacy=Privacy(epsilon=math.inf), rounds=2), warm)
    contenders = {
        "fit_joint, one place": lambda: one_place(data, c1, c2, gap),
        "liblinear, expanded map": lambda: liblinear(data, c1, c2, gap),
        "mtlsvm, rounds": lambda: in_rounds(
            lambda e: MTLSVM(model=plain, c1=c1, c2=c2, epochs=e, stop=loose),
            data, seconds, counts,
        ),
        "mocha, rounds": lambda: in_rounds(
            lambda e: MOCHA(model=plain, c1=c1, c2=c2, epochs=e, stop=loose),
            data, seconds, (20,) if quick else (1, 5, 20),
        ),
        "paper's loop, corrected": lambda: paper_loop(data, c1, c2, loose, seconds, corrected=True),
        "paper's loop, as published": lambda: paper_loop(
            data, c1, c2, loose, seconds / 3, corrected=False
        ),
    }  # fmt: skip
    times = {}
    for label, run in contenders.items():
        taken, found, told = run()
        times[label] = taken
        print(f"  {label:26} {taken:9.3f} s   gap {found:.1e}   {told}", flush=True)
    ours = times["fit_joint, one place"]
    print(f"  fit_joint is {times['liblinear, expanded map'] / ours:.1f} x liblinear on the map")
    rounds = times["mocha, rounds"] / times["mtlsvm, rounds"]
    print(f"  in rounds, mtlsvm is {rounds:.1f} x mocha; one place is "
          f"{times['mocha, rounds'] / ours:.1f} x mocha's rounds")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gap", type=float, default=1e-3)
    parser.add_argument("--rounds-gap", type=float, default=0.03)
    parser.add_argument("--seconds", type=float, default=60.0, help="the most for a loop of rounds")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clients", type=int, default=1000, help="of the generated federation")
    parser.add_argument("--data", choices=("har", "generated"), action="append")
    given = parser.parse_args()
    chosen = given.data or ["har", "generated"]
    if "har" in chosen:
        compare("har", har(), 0.1, 1.0, given.gap, given.rounds_gap, given.seconds, given.quick)
    if "generated" in chosen:
        data = generated(given.clients)
        compare(
            "generated", data, 0.1, 1.0, given.gap, given.rounds_gap, given.seconds, given.quick
        )


if __name__ == "__main__":
    main()
