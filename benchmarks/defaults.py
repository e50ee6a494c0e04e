"""How the defaults were chosen: on synthetic federations, never on real test rows.

For each setting of a method, test error on a grid of synthetic federations (clients, rows,
features, spread, noise) at epsilon 1, as regret: the error over the best error of that method on
that federation. Defaults are taken from the settings
with the smallest mean log-regret; of clips that differ by less than .01 the larger (0.5), which
limits less how far the shared model can move. Run:

    python benchmarks/defaults.py pmtl | fedavg | local
"""

import itertools
import math
import sys

import numpy as np

from coterie.data.synthetic import synthetic
from coterie.engine.simulate import simulate
from coterie.evaluation.score import evaluate
from coterie.methods.baselines import Local
from coterie.methods.fedavg import FedAvg
from coterie.methods.pmtl import PMTL
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import rounds_by_rule
from coterie.solvers.sgd import SGD

FEDERATIONS = [
    {"clients": m, "rows": n, "features": d, "spread": s, "noise": e}
    for (m, n, d), (s, e) in itertools.product(
        [(100, 50, 5), (500, 5, 12), (500, 20, 12), (1000, 8, 20)],
        [(0.3, 0.5), (1.0, 0.5), (0.5, 1.0)],
    )
]

GRIDS = {
    "pmtl": [
        (f"lam={lam} clip={clip}", PMTL(lam=lam), clip)
        for lam in (0.1, 0.3, 1.0, 3.0)
        for clip in (0.3, 0.5, 1.0)
    ],
    "fedavg": [
        (f"lr={lr} epochs={e} clip={clip}", FedAvg(sgd=SGD(lr=lr, epochs=e)), clip)
        for lr in (0.05, 0.1)
        for e in (1, 5, 20)
        for clip in (0.3, 0.5, 1.0)
    ],
    "local": [(f"lam={lam}", Local(lam=lam), 1.0) for lam in (0.01, 0.03, 0.1, 0.3, 1.0)],
}


def error(method, clip, federation, seed):
    data = synthetic("mean", seed=seed, **federation).data
    train, test = data.split(0.25 if federation["rows"] > 8 else 2, seed)
    privacy = Privacy(epsilon=1.0, clip=clip)
    rounds = rounds_by_rule(method, privacy, train.spec)
    plan = Plan(method=method, privacy=privacy, rounds=rounds, simulation_seed=seed)
    outcome = simulate(plan, train)
    value = evaluate(method.model, outcome.rows, test).value
    return value if math.isfinite(value) else 1e6


def main(kind):
    rows = GRIDS[kind]
    table = np.array(
        [
            [np.mean([error(method, clip, f, seed) for seed in (0, 1)]) for f in FEDERATIONS]
            for _, method, clip in rows
        ]
    )
    regret = np.log(table / table.min(axis=0))
    print(f"{kind}: mean log-regret over {len(FEDERATIONS)} federations (worst) | mean nMSE")
    for index in np.argsort(regret.mean(axis=1)):
        mean, worst = regret[index].mean(), regret[index].max()
        print(f"  {rows[index][0]:<28} {mean:.3f} ({worst:.2f}) | {table[index].mean():.3f}")


if __name__ == "__main__":
    for name in sys.argv[1:] or GRIDS:
        main(name)
