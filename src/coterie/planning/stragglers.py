"""Stragglers on a virtual clock: simulate which clients answer in time, without waiting.

Ponomarenko-Timofeev et al., the timing of MTL-SVM. The coordinator broadcasts the shared tree,
waits T_wait, sums for T_sum (what arrives meanwhile is discarded) and broadcasts again; messages
take no time. A client of n_k rows of d features with hardware factor h_k needs, for E local epochs,

    time ~ N(E m_k, E (spread m_k)^2),   m_k = (constant + seconds_per_number n_k d) / h_k,

independent over clients, rounds and epochs, with a small positive minimum. A client that has
answered waits. At the broadcast, a client that still computes discards its steps and starts again
with the others. Hence rounds are independent: round r opens at r (T_wait + T_sum), and a client
answers if it needs at most T_wait.

A wait that depends on the clients' times depends on their row counts, and so does the list of
clients that answered. No guarantee covers either: do not publish them.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from scipy.special import ndtr, ndtri

from coterie.core.rng import Rng
from coterie.data.federated import FederatedDataset
from coterie.methods.base import Method

Ids = NDArray[np.int64]
Seconds = NDArray[np.float64]

CALIBRATION_ROUNDS = 100  # a client reports the longest time of this many rounds
FASTEST = 10.0  # the largest factor of spread hardware
_TIMED_CLIENTS, _REPEATS = 12, 8
_REWEIGHTINGS = 5


class Round(NamedTuple):
    """Ids whose contributions are summed (maybe none), and the virtual second of the next round."""

    answered: Ids
    next_broadcast: float


@dataclass(frozen=True, eq=False)
class Clock:
    """The virtual clock of a run; rounds can be asked for in any order.

    The times of a round are normal with mean and standard deviation by client. A draw depends on
    the client's distribution, its id and the round alone.
    """

    mean: Seconds
    deviation: Seconds
    least: float
    rng: Rng
    wait: float = math.nan
    sum_time: float = 0.0

    def times(self, index: int) -> Seconds:
        """Return the seconds that each client needs in a round."""
        if index < 0:
            raise ValueError(f"round {index}: expected a round from 0 on")
        return self._at(self._uniforms("round", index))

    def round(self, index: int) -> Round:
        """Return who answers up to and including the wait, and when the round ends."""
        answered = np.flatnonzero(self.times(index) <= self.wait).astype(np.int64)
        return Round(answered, (index + 1) * (self.wait + self.sum_time))

    def reports(self) -> Seconds:
        """Draw each client's report: the longest time of `CALIBRATION_ROUNDS` rounds."""
        # The largest of R uniforms is distributed as one to the power 1/R.
        return self._at(self._uniforms("report") ** (1 / CALIBRATION_ROUNDS))

    @property
    def expected_answers(self) -> float:
        """The expected number of answers of a round that everyone takes part in."""
        return self._expected(self.wait)

    def _expected(self, wait: float) -> float:
        if wait < self.least:
            return 0.0
        over, certain = wait - self.mean, self.deviation == 0
        chances = ndtr(over / np.where(certain, 1.0, self.deviation))
        return float(np.where(certain, over >= 0, chances).sum())

    def wait_for(self, answers: float) -> float:
        """Return the shortest wait with this expected number of answers, by bisection."""
        if self._expected(self.least) >= answers:
            return self.least
        # Beyond nine standard deviations the probability is 0 in float64.
        low, high = self.least, float((self.mean + 9 * self.deviation).max())
        while low < (middle := (low + high) / 2) < high:
            reached = self._expected(middle) >= answers
            low, high = (low, middle) if reached else (middle, high)
        return high

    def _uniforms(self, *names: str | int) -> NDArray[np.float64]:
        keys = self.rng.at("clock", *names).keys(np.arange(len(self.mean), dtype=np.int64))
        # 52 bits and a half: never 0 or 1, whose quantiles are infinite.
        return ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def _at(self, quantiles: NDArray[np.float64]) -> Seconds:
        times: Seconds = np.maximum(self.mean + self.deviation * ndtri(quantiles), self.least)
        return times

    def note(self) -> str | None:
        """Return a warning if fewer than one answer per round is expected (one client: a half)."""
        enough = min(1.0, len(self.mean) / 2)
        expected = self.expected_answers
        if expected >= enough * (1 - 1e-9):
            return None
        who, effect = f"{expected:.2g} clients per round are", "many rounds make no update"
        if expected < 0.005:
            who, effect = "no client is", "no round makes an update"
        return (
            f"{who} expected to answer within {self.wait:g} s: {effect}; wait about "
            f"{self.wait_for(enough):.3g} s or longer, or set wait = 'all'"
        )


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """How long clients compute, and how long the coordinator waits for them.

    The defaults describe a slow device (a microsecond per value); they are not a measurement.

    Attributes:
        wait: Seconds; or "all": the longest time that any client reports after 100 calibration
            rounds, so that nearly all answer; or a share such as "45%": the shortest wait within
            which this share of the clients is expected to answer.
        sum_time: Seconds to sum; answers that arrive meanwhile are discarded.
        seconds_per_number: Mean seconds of an epoch per value (rows x features) of a client.
        constant: Mean seconds of an epoch that do not grow with the data.
        spread: Standard deviation of an epoch's time, as a share of its mean.
        least: The minimum of a time, in seconds.
        hardware: Factors that divide a client's time: "equal" (all 1), "spread" (evenly spaced
            from 1 for the first client to 10 for the last), or one factor per client.
        calibrate: Measure the three coefficients on this machine before a run.
    """

    wait: float | str = "all"
    sum_time: float = 0.01
    seconds_per_number: float = 1e-6
    constant: float = 0.01
    spread: float = 0.1
    least: float = 1e-6
    hardware: Literal["equal", "spread"] | tuple[float, ...] = "equal"
    calibrate: bool = False

    def __post_init__(self) -> None:
        _share(self.wait)
        for name in ("sum_time", "seconds_per_number", "constant", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or a positive number")
        if self.seconds_per_number == 0 and self.constant == 0:
            raise ValueError(
                "seconds_per_number = 0 and constant = 0: expected at least one above 0"
            )
        if not 0 < self.least < math.inf:
            raise ValueError(f"least = {self.least}: expected a small positive number of seconds")
        _check_hardware(self.hardware)

    @property
    def wait_is_reported(self) -> bool:
        """Whether the wait depends on the clients' times, and so on private row counts."""
        return isinstance(self.wait, str)

    def factors(self, clients: int) -> NDArray[np.float64]:
        """Return the hardware factor of each client."""
        if isinstance(self.hardware, tuple):
            if len(self.hardware) != clients:
                raise ValueError(
                    f"hardware has {len(self.hardware)} factors for {clients} clients: give one "
                    "per client, or 'equal' or 'spread'"
                )
            return np.array(self.hardware, dtype=np.float64)
        return np.linspace(1.0, FASTEST if self.hardware == "spread" else 1.0, clients)

    def pooled_epoch_time(self, counts: ArrayLike, features: int) -> float:
        """Return the mean seconds of an epoch over all rows with the power of all clients."""
        numbers = _numbers(counts, features)
        seconds = self.constant + self.seconds_per_number * float(numbers.sum())
        return max(seconds / float(self.factors(len(numbers)).sum()), self.least)

    def clock(self, counts: ArrayLike, features: int, rng: Rng, epochs: int = 1) -> Clock:
        """Return the clock of a run with so many rows by client and local epochs per round."""
        if epochs < 1:
            raise ValueError(f"epochs = {epochs}: expected a whole number of at least 1")
        numbers = _numbers(counts, features)
        epoch = self.constant + self.seconds_per_number * numbers
        epoch /= self.factors(len(numbers))
        deviation = math.sqrt(epochs) * self.spread * epoch  # variances of epochs add up
        clock = Clock(epochs * epoch, deviation, self.least, rng, sum_time=self.sum_time)
        return replace(clock, wait=self._wait(clock))

    def _wait(self, clock: Clock) -> float:
        if self.wait == "all":
            return float(clock.reports().max())
        share = _share(self.wait)
        return float(self.wait) if share is None else clock.wait_for(share * len(clock.mean))


class Fit(NamedTuple):
    """Coefficients of `Stragglers`, fitted: `replace(stragglers, **fit._asdict())`."""

    constant: float
    seconds_per_number: float
    spread: float


def measure(run: Callable[[int], object], ids: Sequence[int] | Ids, repeats: int = 10) -> Seconds:
    """Return the measured seconds of clients' epochs on this machine, (ids, repeats).

    `run` computes one epoch of a client. Its first call is not timed: compiled code is slow then.
    """
    if len(ids) == 0 or repeats < 1:
        raise ValueError(f"{len(ids)} clients, {repeats} repeats: expected at least one of each")
    run(int(ids[0]))
    seconds = np.empty((len(ids), repeats))
    # Repeats are the outer loop, so that a machine that slows down affects all clients alike.
    for repeat in range(repeats):
        for row, client in enumerate(ids):
            started = time.perf_counter()
            run(int(client))
            seconds[row, repeat] = time.perf_counter() - started
    return seconds


def fit_times(numbers: ArrayLike, seconds: ArrayLike) -> Fit:
    """Fit measured epoch times by constant + seconds_per_number x numbers, neither below 0.

    Least squares of relative errors, reweighted a few times, since the standard deviation grows
    with the mean. Where all sizes are equal, the constant is 0. `numbers` are rows x features by
    client, `seconds` measured times, (clients,) or (clients, repeats).
    """
    times = np.asarray(seconds, dtype=np.float64)
    sizes = np.asarray(numbers, dtype=np.float64)
    shaped = sizes.ndim == 1 and times.ndim in (1, 2) and len(times) == len(sizes)
    positive = all(((v > 0) & (v < math.inf)).all() for v in (sizes, times))
    if not shaped or not positive or times.size < 3:
        raise ValueError(
            f"numbers {sizes.shape} and seconds {times.shape}: expected (clients,), and (clients,) "
            "or (clients, repeats), all positive, 3 or more; leave out clients without rows"
        )
    sizes, times = np.repeat(sizes, times.size // len(sizes)), times.ravel()
    largest = float(sizes.max())  # columns of like size
    design = np.stack([np.full(len(sizes), float(sizes.min() < largest)), sizes / largest], axis=1)
    fitted = np.full(len(sizes), times.mean())
    for _ in range(1 + _REWEIGHTINGS):
        solution, _norm = nnls(design / fitted[:, None], times / fitted)
        fitted = design @ solution
    freedom = len(times) - np.count_nonzero(design[0])
    spread = math.sqrt(float(((times / fitted - 1) ** 2).sum()) / freedom)
    return Fit(float(solution[0]), float(solution[1]) / largest, spread)


def _share(wait: object) -> float | None:
    """Return the share of a wait such as "45%"; None for seconds and "all"."""
    if wait == "all":
        return None
    if isinstance(wait, int | float) and wait is not True and 0 < wait < math.inf:
        return None
    if isinstance(wait, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?%", wait):
        share = float(wait[:-1]) / 100
        if 0 < share < 1:
            return share
    raise ValueError(
        f"wait = {wait!r}: expected a positive number of seconds, 'all', or a share of the clients "
        "between 0 and 100 such as '45%'"
    )


def _check_hardware(given: object) -> None:
    listed = isinstance(given, tuple) and given and all(0 < factor < math.inf for factor in given)
    if given not in ("equal", "spread") and not listed:
        raise ValueError(
            f"hardware = {given!r}: expected 'equal', 'spread', or positive factors, one per client"
        )


def _numbers(counts: ArrayLike, features: int) -> NDArray[np.float64]:
    rows = np.asarray(counts)
    if rows.ndim != 1 or rows.size == 0 or rows.dtype.kind not in "iu" or (rows < 0).any():
        raise ValueError(
            f"counts of shape {rows.shape} and type {rows.dtype}: expected whole numbers of rows "
            "from 0 on, one per client"
        )
    if features < 1:
        raise ValueError(f"features = {features}: expected at least 1")
    return rows.astype(np.float64) * features


def calibrate(stragglers: Stragglers, method: Method, data: FederatedDataset) -> Stragglers:
    """Return the stragglers with coefficients fitted to measured times of a few clients.

    The times depend on row counts, so the result is private: use it for simulations.
    """
    order = np.argsort(data.counts, kind="stable")
    order = order[data.counts[order] > 0]
    ids = order[np.unique(np.linspace(0, len(order) - 1, _TIMED_CLIENTS).astype(np.int64))]
    rng = Rng.seeded(0).at("calibration")
    shared = method.init(data.spec, rng)

    def run(client: int) -> None:
        block = data.clients(np.array([client], dtype=np.int64))
        method.local_update(shared, method.init_client_state(shared, data.spec, 1), block, rng, 0)

    seconds = measure(run, ids, _REPEATS) / method.rounds(data.spec).passes
    fit = fit_times(data.counts[ids] * data.spec.features, seconds)
    return replace(stragglers, **fit._asdict(), calibrate=False)
