"""A calibration run: a client's own epoch times on this machine become the clock's coefficients."""

from dataclasses import replace

import numpy as np

from coterie.core.rng import Rng
from coterie.data.federated import FederatedDataset
from coterie.engines.clock import Stragglers, fit_times, measure
from coterie.methods.base import Method

_CLIENTS, _REPEATS = 12, 8


def calibrate(stragglers: Stragglers, method: Method, data: FederatedDataset) -> Stragglers:
    """Time the local work of a round on some clients, from the smallest to the largest.

    Times follow from row counts: what comes out is private, and for simulations.

    Returns:
        The stragglers with `constant`, `seconds_per_number` and `spread` fitted.
    """
    order = np.argsort(data.counts, kind="stable")
    order = order[data.counts[order] > 0]
    ids = order[np.unique(np.linspace(0, len(order) - 1, _CLIENTS).astype(np.int64))]
    rng = Rng.seeded(0).at("calibration")
    shared = method.init(data.spec, rng)

    def run(client: int) -> None:
        block = data.clients(np.array([client], dtype=np.int64))
        method.local_update(shared, method.enrol(shared, data.spec, 1), block, rng, 0)

    seconds = measure(run, ids, _REPEATS) / method.passes
    fit = fit_times(data.counts[ids] * data.spec.features, seconds)
    return replace(stragglers, **fit._asdict(), calibrate=False)
