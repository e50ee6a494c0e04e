"""Seconds to account for and to calibrate plans of 1,000 rounds, beside dp-accounting.

Run as `python benchmarks/accounting.py`, on an idle machine; about a minute, nearly all of it
dp-accounting's. Imports are not counted, caches are emptied before every timing, and both sides
solve the same problem: 100 of 205 clients a round, delta = 1e-5. `dp-accounting` is
`PLDAccountant` with its defaults (grid 1e-4), and `calibrate_dp_mechanism` around it with a
tolerance of 0.1 % of the answer; it offers neither cohorts of a fixed size nor visible ones.
"""

import time
from collections.abc import Callable

import dp_accounting
from dp_accounting import pld

from coterie.privacy import accounting
from coterie.privacy import calibrate as calibration
from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Gaussian, Participation, Relation

ROUNDS, RATE, DELTA = 1000, 100 / 205, 1e-5
RELATIONS = {
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def forget() -> None:
    for module in (accounting, calibration):
        for function in vars(module).values():
            getattr(function, "cache_clear", lambda: None)()


def timed(work: Callable[[], float]) -> tuple[float, float]:
    forget()
    start = time.perf_counter()
    value = work()
    return value, time.perf_counter() - start


def plan_of(z: float) -> dp_accounting.DpEvent:
    sampled = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(z))
    return dp_accounting.SelfComposedDpEvent(sampled, ROUNDS)


def library_account(z: float, relation: Relation) -> float:
    return float(pld.PLDAccountant(RELATIONS[relation]).compose(plan_of(z)).get_epsilon(DELTA))


def library_calibrate(epsilon: float, relation: Relation, z: float) -> float:
    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: pld.PLDAccountant(RELATIONS[relation]),
            plan_of,
            epsilon,
            DELTA,
            bracket_interval=dp_accounting.LowerEndpointAndGuess(0.0, 1.0),
            tol=1e-3 * z,
        )
    )


def compare(z: float, who: Participation, relation: Relation) -> None:
    epsilon, account = timed(lambda: profile([Gaussian(z)] * ROUNDS, who, relation).epsilon(DELTA))
    found, search = timed(
        lambda: calibrate(
            epsilon, DELTA, weights=[1.0] * ROUNDS, participation=who, relation=relation
        )
    )
    cells = f"{z:5g} {who.kind:8} {'visible' if who.visible else 'hidden':8} {relation:9}"
    cells += f"{epsilon:9.4g} {account:9.3f} {found:9.4g} {search:9.3f}"
    if who.kind == "poisson" and not who.visible:
        theirs, their_account = timed(lambda: library_account(z, relation))
        their_z, their_search = timed(lambda: library_calibrate(epsilon, relation, z))
        cells += f" | {theirs:9.4g} {their_account:8.2f} {their_account / account:6.1f}x"
        cells += f" {their_z:9.4g} {their_search:8.2f} {their_search / search:6.1f}x"
    print(cells, flush=True)


def main() -> None:
    print(" " * 34 + f"{'coterie':>37} | {'dp-accounting':>52}")
    head = f"{'z':>5} {'sampling':8} {'cohort':8} {'relation':9}"
    head += f"{'epsilon':>9} {'account s':>9} {'z again':>9} {'search s':>9}"
    head += (
        f" | {'epsilon':>9} {'account':>8} {'ratio':>7} {'z again':>9} {'search':>8} {'ratio':>7}"
    )
    print(head)
    timed(
        lambda: profile([Gaussian(3.0)] * 2, Participation("poisson", 0.5), "replace").epsilon(0.1)
    )
    plans: list[tuple[Participation, Relation]] = [
        (Participation("poisson", RATE), "zero_out"),
        (Participation("poisson", RATE), "replace"),
        (Participation("fixed", RATE), "replace"),
        (Participation("poisson", RATE, visible=True), "zero_out"),
    ]
    for who, relation in plans:
        for z in (1.0, 10.0, 100.0):
            compare(z, who, relation)


if __name__ == "__main__":
    main()
