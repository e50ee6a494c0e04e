"""Group-sparse multi-task regression on the same rows for all clients, beside other solvers.

    python benchmarks/multitask.py
    python benchmarks/multitask.py --repeats 3 --shares 0.3

All solve min_W |Y - X W|^2 / (2n) + lam |W|_2,1 from zeros until the relative duality gap, by one
function for all, is at most 1e-6: scikit-learn and celer stop on other measures, so their
tolerances are lowered tenfold until they get there, and the time of that last run counts. Runs are
interleaved; medians are given. celer is skipped where it is not installed.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import util

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import MultiTaskLasso

from coterie.data.federated import FederatedDataset, Spec
from coterie.solvers.multitask import fit_multitask, lam_max

Floats = NDArray[np.float64]
SIZES = ((100, 300, 100), (300, 1000, 50), (1000, 5000, 20), (1000, 100, 40))
GAP = 1e-6
Solve = Callable[[float], Floats]


def make(n: int, d: int, m: int) -> tuple[Floats, Floats, FederatedDataset]:
    """Make neighbouring features that correlate by 0.5, a twentieth of them in use, and noise."""
    generator = np.random.default_rng(n + d + m)
    x = generator.standard_normal((n, d))
    for j in range(1, d):
        x[:, j] = 0.5 * x[:, j - 1] + np.sqrt(0.75) * x[:, j]
    x = x.astype(np.float32).astype(np.float64)
    truth = np.zeros((d, m))
    chosen = generator.choice(d, max(1, d // 20), replace=False)
    truth[chosen] = generator.standard_normal((len(chosen), m))
    y = x @ truth
    y += generator.standard_normal(y.shape) * y.std() / 3
    y = y.astype(np.float32).astype(np.float64)
    data = FederatedDataset(
        Spec((d,), 1, "regression", m),
        [str(k) for k in range(m)],
        np.arange(m + 1, dtype=np.int64) * n,
        torch.from_numpy(np.tile(x.astype(np.float32), (m, 1))),
        torch.from_numpy(np.ascontiguousarray(y.T.astype(np.float32)).reshape(-1)),
    )
    return x, y, data


def relative_gap(x: Floats, y: Floats, weight: Floats, lam: float) -> float:
    """Return the duality gap of weights (m, d) over their objective."""
    n = len(x)
    rest = y - x @ weight.T
    primal = (rest**2).sum() / (2 * n) + lam * np.sqrt((weight**2).sum(axis=0)).sum()
    top = np.sqrt(((x.T @ rest / n) ** 2).sum(axis=1)).max()
    scale = min((rest * y).sum() / (rest**2).sum(), lam / top)
    dual = (scale * (rest * y).sum() - scale**2 * (rest**2).sum() / 2) / n
    return float((primal - dual) / primal)


def scikit(x: Floats, y: Floats, lam: float) -> Solve:
    def solve(tol: float) -> Floats:
        fit = MultiTaskLasso(lam, fit_intercept=False, tol=tol, max_iter=10**5)
        return np.asarray(fit.fit(x, y).coef_)

    return solve


def celer(x: Floats, y: Floats, lam: float) -> Solve:
    # Its estimator asks for an older scikit-learn; this is the function that does its work.
    from celer.homotopy import mtl_path

    def solve(tol: float) -> Floats:
        _, found, _ = mtl_path(x, y, alphas=[lam], tol=tol, max_iter=1000, max_epochs=10**6)
        return np.asarray(found[..., 0])

    return solve


def tolerance(solve: Solve, x: Floats, y: Floats, lam: float) -> float:
    """Find the loosest power of ten with which a solver reaches the gap."""
    for power in range(3, 14):
        if relative_gap(x, y, solve(10.0**-power), lam) <= GAP:
            return 10.0**-power
    return float("nan")


def compare(size: tuple[int, int, int], share: float, repeats: int) -> None:
    x, y, data = make(*size)
    clients = data.clients(np.arange(len(data)))
    lam = share * lam_max(clients, "l21", False)
    solvers: dict[str, Solve] = {
        "coterie": lambda tol: fit_multitask(
            clients, penalty="l21", lam=lam, bias=False, tol=tol
        ).weight.numpy(),
        "scikit-learn": scikit(x, y, lam),
    }
    if util.find_spec("celer"):
        solvers["celer"] = celer(x, y, lam)
    tols = {name: tolerance(solve, x, y, lam) for name, solve in solvers.items()}
    times: dict[str, list[float]] = {name: [] for name in solvers}
    gaps = {}
    for _ in range(repeats):
        for name, solve in solvers.items():
            begin = time.perf_counter()
            weight = solve(tols[name])
            times[name].append(time.perf_counter() - begin)
            gaps[name] = relative_gap(x, y, weight, lam)
    ours = statistics.median(times["coterie"])
    used = int(weight.any(axis=0).sum())
    for name, taken in times.items():
        middle = statistics.median(taken)
        label = "{} x {} x {}".format(*size) if name == "coterie" else ""
        print(
            f"{label:18} {share if label else '':>6} {used if label else '':>6} {name:14}"
            f"{middle:9.3f} {min(taken):8.3f} .. {max(taken):7.3f} {middle / ours:8.1f}x"
            f" {gaps[name]:9.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.2, 0.1])
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes")
    settings = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    if not util.find_spec("celer"):
        print("celer is not installed: skipped")
    head = f"{'n x d x m':18} {'lam/max':>6} {'used':>6} {'solver':14}{'median s':>9}"
    print(f"{head} {'fastest .. slowest':>19} {'ratio':>9} {'gap':>9}")
    for size in SIZES[: settings.sizes]:
        for share in settings.shares:
            compare(size, share, settings.repeats)


if __name__ == "__main__":
    main()
