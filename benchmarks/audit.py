"""The table of docs/review.md: claims beside lower bounds of `coterie audit`.

Each row is a plan of two rounds on 30 synthetic clients, attacked in 1,000 runs without and 1,000
with a canary. Bounds of both estimators hold together with confidence 95 %.

    python benchmarks/audit.py [--trials N] [--methods pmtl pfeb]
    python benchmarks/audit.py --planted 20   # how often 50, 100 and 200 trials find planted bugs
"""

import argparse
import importlib.util
import statistics
from pathlib import Path

import pytest

from coterie.audit.empirical import audit
from coterie.data.synthetic import synthetic
from coterie.methods.base import registered
from coterie.planning.plan import Plan, Privacy

METHODS = ("pmtl", "pfeb", "mpmtl", "dpfedmtl", "mtlsvm")
EPSILONS = (0.5, 1.0, 4.0, 8.0)


def planted(repeats: int, only: list[str]) -> None:
    """Plant the bugs of tests/audit/test_empirical.py, and print how often they are found."""
    path = Path(__file__).resolve().parents[1] / "tests" / "audit" / "test_empirical.py"
    spec = importlib.util.spec_from_file_location("planted", path)
    bugs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bugs)
    data = synthetic("mean", clients=bugs.CLIENTS, rows=12, features=3, seed=0).data
    print("| planted bug | trials | found | median lower bound | seconds |")
    print("|---|---|---|---|---|")
    for plant, attack in bugs.BUGS:
        for trials in (50, 100, 200) if not only or plant.__name__ in only else ():
            with pytest.MonkeyPatch.context() as monkeypatch:
                plant(monkeypatch)
                found = [
                    audit(bugs.plan_of(), data, trials=trials, seed=seed, attack=attack)
                    for seed in range(repeats)
                ]
            bound = statistics.median(one.best.epsilon for one in found)
            seconds = statistics.median(one.seconds for one in found)
            name, caught = plant.__name__.replace("_", " "), sum(not one.holds for one in found)
            print(
                f"| {name} | {trials} | {caught} of {repeats} | {bound:.1f} | {seconds:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--planted", type=int, metavar="REPEATS")
    parser.add_argument("--bugs", nargs="+", default=[])
    given = parser.parse_args()
    if given.planted:
        planted(given.planted, given.bugs)
        return
    print("| method | claimed | gaussian | threshold | of the allowed mu | trials | seconds |")
    print("|---|---|---|---|---|---|---|")
    for kind in given.methods:
        task = "binary" if kind == "mtlsvm" else "regression"
        data = synthetic("mean", clients=30, rows=12, features=3, task=task, seed=0).data
        for epsilon in EPSILONS:
            privacy = Privacy(epsilon=epsilon, delta=1e-5)
            plan = Plan(method=registered()[kind](), privacy=privacy, rounds=2)
            found = audit(plan, data, trials=given.trials)
            bounds = {bound.estimator: f"{bound.epsilon:.2f}" for bound in found.bounds}
            allowed = found.guarantee.profile.mu
            print(
                f"| {kind} | {epsilon:g} | {bounds.get('gaussian', '-')} | {bounds['threshold']} | "
                f"{found.canary['mu'] / allowed:.0%} | {found.trials} | {found.seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
