"""The virtual clock: against an event queue, against laws in closed form, and in words.

Seeds are fixed, and "false alarm" is the probability over seeds that a correct clock would be
rejected: at most 1e-6 a test.
"""

import heapq
import math
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coterie.core.config import ConfigError, from_table, to_table, to_toml
from coterie.core.rng import Rng
from coterie.planning import stragglers as clock_module
from coterie.planning.stragglers import CALIBRATION_ROUNDS, Clock, Stragglers, fit_times, measure

pytestmark = pytest.mark.full

ALARM = 1e-6
COUNTS = np.full(20, 240)
FEATURES = 561


def start(stragglers=None, counts=COUNTS, seed=5, epochs=1, **changes):
    return (stragglers or Stragglers(**changes)).clock(counts, FEATURES, Rng.seeded(seed), epochs)


class EventQueue:
    """The round as the paper tells it: states, events, and work that a broadcast breaks off.

    `times(r)` is what each client would need for its work begun at broadcast r; NaN for never.
    At one moment arrivals go before the close, and that before the broadcast.
    """

    ARRIVE, CLOSE, BROADCAST = 0, 1, 2

    def __init__(self, times, wait, sum_time):
        self.times, self.wait, self.sum_time = times, wait, sum_time
        self.queue = [(0.0, self.BROADCAST, -1, -1)]
        self.states = ["waiting"] * len(times(0))
        self.summing, self.log = False, []

    def run(self, rounds):
        handlers = {self.ARRIVE: self.arrive, self.CLOSE: self.close}
        while True:
            now, kind, client, begun = heapq.heappop(self.queue)
            if kind != self.BROADCAST:
                handlers[kind](now, client, begun)
                continue
            if self.log:
                late = [k for k, state in enumerate(self.states) if state == "computing"]
                self.log[-1].update(next_broadcast=now, late=late)
            if len(self.log) == rounds:
                return self.log
            self.broadcast(now)

    def broadcast(self, now):
        index, self.summing = len(self.log), False
        self.log.append({"opened": now, "answered": [], "discarded": []})
        for client, seconds in enumerate(self.times(index)):
            # Whoever still computes starts anew: the arrival of its old work is stale from here on.
            self.states[client] = "computing"
            if not math.isnan(seconds):
                heapq.heappush(self.queue, (now + seconds, self.ARRIVE, client, index))
        heapq.heappush(self.queue, (now + self.wait, self.CLOSE, -1, -1))

    def close(self, now, client, begun):
        self.summing, self.log[-1]["closed"] = True, now
        heapq.heappush(self.queue, (now + self.sum_time, self.BROADCAST, -1, -1))

    def arrive(self, now, client, begun):
        if begun == len(self.log) - 1:
            assert self.states[client] == "computing"
            self.states[client] = "waiting"
            self.log[-1]["discarded" if self.summing else "answered"].append(client)


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", ["equal", "spread"])
@pytest.mark.parametrize("wait", ["all", "75%", "45%", "10%", 0.1, 0.001])
def test_rounds_are_those_of_the_event_queue(hardware, wait):
    counts = np.random.default_rng(1).integers(50, 400, size=30)
    clock = start(counts=counts, wait=wait, hardware=hardware, spread=0.3, sum_time=0.03)
    log = EventQueue(clock.times, clock.wait, 0.03).run(60)
    for index in reversed(range(60)):  # any order: a round needs none before it
        found, told = clock.round(index), log[index]
        assert found.answered.tolist() == sorted(told["answered"])
        assert found.answered.dtype == np.int64
        assert found.next_broadcast == pytest.approx(told["next_broadcast"], rel=1e-12)
    kinds = ["answered", "discarded", "late"]
    happened = [sum(len(told[name]) for told in log) for name in kinds]
    assert sum(happened) == 60 * 30
    if wait in ("75%", "45%"):
        assert min(happened) > 0  # the comparison had all three to compare


# Sixteenths of a second: sums are exact, and ties at the deadline and the broadcast are common.
moments = st.one_of(st.integers(1, 24).map(lambda n: n / 16), st.just(math.nan))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    table=st.lists(st.lists(moments, min_size=4, max_size=4), min_size=1, max_size=5),
    wait=st.integers(1, 12),
    sum_time=st.integers(0, 6),
)
def test_the_deadline_is_that_of_the_event_queue_to_the_moment(table, wait, sum_time):
    log = EventQueue(lambda r: table[r], wait / 16, sum_time / 16).run(len(table))
    for index, told in enumerate(log):
        clock = Clock(np.array(table[index]), np.zeros(4), 0.0, Rng.seeded(0), wait / 16)
        assert clock.round(0).answered.tolist() == sorted(told["answered"])


def test_nobody_in_time_is_a_round_and_is_said():
    clock = start(wait=0.001)
    assert clock.round(3).answered.size == 0
    assert clock.expected_answers == pytest.approx(0, abs=1e-12)
    note = clock.note()
    assert "no client is expected to answer within 0.001 s: no round makes an update" in note
    # The wait that it names would do.
    named = float(re.search(r"about ([\d.e-]+) s", note)[1])
    assert start(wait=named * 1.005).expected_answers >= 1


def test_few_answers_are_said_and_enough_are_not():
    assert "clients per round are expected" in start(wait="4%").note()
    for wait in ("5%", "45%", "all", 10.0):
        assert start(wait=wait).note() is None
    # One client that nearly always answers is no cause for alarm, though 0.99 is less than one.
    assert start(counts=[240], wait="all").note() is None
    assert start(counts=[240], wait="30%").note() is not None


# --- times ----------------------------------------------------------------------------------------


def test_times_without_spread_are_the_formula():
    counts = [100, 50, 0]
    stragglers = Stragglers(
        spread=0.0, constant=0.5, seconds_per_number=0.01, hardware=(1.0, 2.0, 4.0), wait=1.0
    )
    clock = stragglers.clock(counts, 10, Rng.seeded(1))
    assert clock.times(0) == pytest.approx([10.5, 2.75, 0.125])
    assert clock.round(0).answered.tolist() == [2]
    assert stragglers.clock(counts, 10, Rng.seeded(1), 3).times(7) == pytest.approx(
        [31.5, 8.25, 0.375]
    )


def test_spread_hardware_goes_from_one_to_ten():
    spread = Stragglers(hardware="spread")
    assert spread.factors(4).tolist() == [1.0, 4.0, 7.0, 10.0]
    assert spread.factors(1).tolist() == [1.0]
    assert Stragglers().factors(3).tolist() == [1.0, 1.0, 1.0]
    # The same coins: the times of one are those of the other, divided.
    slow, fast = start().times(2), start(hardware="spread").times(2)
    assert fast == pytest.approx(slow / np.linspace(1, 10, 20))


def test_a_pooled_coordinator_has_everyones_power():
    stragglers = Stragglers(hardware="spread", constant=0.0, seconds_per_number=1e-3)
    assert stragglers.pooled_epoch_time([10] * 20, 5) == pytest.approx(1e-3 * 1000 / 110)
    equal = replace(stragglers, hardware="equal")
    # On equal hardware without a constant: as long as an average client's epoch.
    assert equal.pooled_epoch_time([5, 15], 7) == pytest.approx(1e-3 * 70)


def is_normal(values):
    # Sum of squares (chi-square) and Kolmogorov-Smirnov against N(0, 1), 1e-6 / 8 each.
    low, high = stats.chi2.ppf([ALARM / 16, 1 - ALARM / 16], len(values))
    squares = float((values**2).sum())
    return low < squares < high and stats.kstest(values, "norm").pvalue > ALARM / 8


@pytest.mark.parametrize("epochs", [1, 4])
def test_times_are_normal_over_clients_and_over_rounds(epochs):
    clock = start(counts=np.full(4000, 240), spread=0.2, epochs=epochs)
    epoch = 0.01 + 1e-6 * 240 * 561
    scale = math.sqrt(epochs) * 0.2 * epoch
    across = (clock.times(11) - epochs * epoch) / scale
    along = np.array([clock.times(index)[7] for index in range(4000)])
    along = (along - epochs * epoch) / scale
    assert across.min() > -epochs / 0.2  # the cut is out of sight
    for values in (across, along):
        assert is_normal(values)
        # The correlation of neighbours is N(0, 1/n).
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) * math.sqrt(len(values)) < 5.4
        assert not is_normal(values * 1.15)
        assert not is_normal(values + 0.15)


def test_reports_are_the_longest_of_a_hundred():
    clock = start(counts=np.full(4000, 240), spread=0.2)
    values = (clock.reports() - clock.mean) / clock.deviation

    def law(power):
        return lambda value: stats.norm.cdf(value) ** power

    assert stats.kstest(values, law(CALIBRATION_ROUNDS)).pvalue > ALARM
    assert stats.kstest(values, law(CALIBRATION_ROUNDS / 1.5)).pvalue < ALARM
    # Calibration is not a round of the run.
    first = (clock.times(0) - clock.mean) / clock.deviation
    assert abs(np.corrcoef(values, first)[0, 1]) * math.sqrt(4000) < 5.4


def test_times_are_cut_from_below():
    clock = start(counts=np.full(2000, 240), spread=5.0, least=0.004, wait=0.004)
    times = clock.times(0)
    assert times.min() == 0.004
    assert (times > 0).all()
    mean = 0.01 + 1e-6 * 240 * 561
    chance = stats.norm.cdf((0.004 - mean) / (5 * mean))
    cut = int((times == 0.004).sum())
    assert stats.binomtest(cut, 2000, chance).pvalue > ALARM
    # Cut times are answers within the cut, and none is shorter.
    assert clock.round(0).answered.size == cut
    assert clock.expected_answers == pytest.approx(2000 * chance)
    assert start(spread=5.0, least=0.004, wait=0.0039).expected_answers == 0.0
    assert start(spread=5.0, least=0.004, wait=0.0039).round(0).answered.size == 0


def test_a_draw_depends_on_id_and_round_alone():
    few, many = start(counts=np.full(3, 240)), start(counts=np.full(500, 240))
    assert np.array_equal(few.times(4), many.times(4)[:3])
    assert np.array_equal(few.reports(), many.reports()[:3])
    other = start(counts=np.r_[240, 9, 240, 1000])
    assert np.array_equal(other.times(4)[[0, 2]], many.times(4)[[0, 2]])
    assert np.array_equal(start(wait=0.1).times(4), start(wait="45%").times(4))
    assert not np.isin(many.times(4), many.times(5)).any()
    assert not np.isin(many.times(4), start(counts=np.full(500, 240), seed=6).times(4)).any()
    assert len(set(many.times(4))) == 500


# --- waits ----------------------------------------------------------------------------------------


def hoeffding(count, alarm=ALARM):
    """How far a sum of so many independent coins may be from its mean, but for a false alarm."""
    return math.sqrt(count * math.log(2 / alarm) / 2)


@pytest.mark.parametrize("hardware", ["equal", "spread"])
@pytest.mark.parametrize("share", [75, 45, 25, 20, 10])
def test_about_the_share_asked_for_answers(hardware, share):
    counts = np.random.default_rng(2).integers(100, 400, size=20)
    clock = start(counts=counts, wait=f"{share}%", hardware=hardware)
    assert clock.expected_answers == pytest.approx(20 * share / 100, rel=1e-9)
    rounds = 1000
    answers = sum(clock.round(index).answered.size for index in range(rounds))
    assert abs(answers - rounds * 20 * share / 100) < hoeffding(20 * rounds)


@pytest.mark.parametrize("hardware", ["equal", "spread"])
def test_each_client_answers_as_often_as_its_hardware_says(hardware):
    clock = start(wait="45%", hardware=hardware)
    mean = (0.01 + 1e-6 * 240 * 561) / np.linspace(1, 10 if hardware == "spread" else 1, 20)
    chances = stats.norm.cdf(clock.wait, mean, 0.1 * mean)
    answers = np.zeros(20)
    for index in range(400):
        answers[clock.round(index).answered] += 1
    assert np.abs(answers - 400 * chances).max() < hoeffding(400, ALARM / 20)
    # On equal hardware it is anyone; on spread hardware not the slowest, and always the fastest.
    if hardware == "equal":
        assert chances == pytest.approx(np.full(20, 0.45), rel=1e-9)
    else:
        assert (chances[0], chances[-1]) == pytest.approx((0, 1), abs=ALARM / 800)
        assert (answers[0], answers[-1]) == (0, 400)


def test_fast_clients_shorten_the_wait_for_a_share():
    # The 9 fastest of 20 are at least 6 times faster than the slowest.
    assert start(wait="45%", hardware="spread").wait < start(wait="45%").wait / 5


def test_shares_of_equal_clients_are_quantiles():
    mean = 0.01 + 1e-6 * 240 * 561
    for share in (0.1, 0.25, 0.45, 0.75, 0.995):
        wait = start(wait=f"{100 * share:g}%").wait
        assert wait == pytest.approx(stats.norm.ppf(share, mean, 0.1 * mean), rel=1e-9)


def test_shares_of_certain_times_take_whole_clients():
    times = np.array([1.0, 2.0, 3.0, 4.0])
    stragglers = Stragglers(
        constant=1.0, seconds_per_number=0.0, spread=0.0, hardware=tuple(1 / times), wait="45%"
    )
    clock = stragglers.clock([1, 1, 1, 1], 1, Rng.seeded(1))
    assert clock.wait == pytest.approx(2.0, rel=1e-12)
    assert clock.round(0).answered.tolist() == [0, 1]
    assert clock.expected_answers == 2.0


@pytest.mark.parametrize("wait", ["all", "10%", 0.25])
def test_certain_equal_times_answer_at_the_last_moment(wait):
    stragglers = Stragglers(constant=0.25, seconds_per_number=0.0, spread=0.0, wait=wait)
    clock = start(stragglers)
    assert clock.wait == 0.25
    assert clock.expected_answers == 20.0
    assert clock.round(9).answered.size == 20


@pytest.mark.parametrize("hardware", ["equal", "spread"])
def test_all_answer_but_for_rare_longer_times(hardware):
    clock = start(wait="all", hardware=hardware)
    # The longest of n reported draws leaves more than x behind it with probability (1 - x)^n. On
    # spread hardware the first client is the slowest by far: its report alone decides.
    reported = CALIBRATION_ROUNDS * (20 if hardware == "equal" else 1)
    behind = 1 - (ALARM / 2) ** (1 / reported)
    assert clock.expected_answers > 20 - behind * (20 if hardware == "equal" else 1.01)
    late = sum(20 - clock.round(index).answered.size for index in range(1000))
    coins = 1000 * (20 if hardware == "equal" else 1)
    chance = 1000 * (20 - clock.expected_answers) / coins
    assert stats.binomtest(late, coins, chance).pvalue > ALARM / 2


def test_a_fresh_time_beats_every_report_as_often_as_chance_says():
    # All draws of equal clients are alike: the next is the longest of n + 1 with chance 1/(n + 1).
    seeds, clients = 3000, 2
    late = 0
    for seed in range(seeds):
        clock = start(counts=np.full(clients, 240), seed=seed, wait="all")
        late += 0 not in clock.round(0).answered
    assert stats.binomtest(late, seeds, 1 / (clients * CALIBRATION_ROUNDS + 1)).pvalue > ALARM / 2
    assert late > 0


def test_more_epochs_are_waited_for():
    assert start(epochs=3).wait > 2 * start().wait
    clock = start(epochs=3, wait="45%")
    assert clock.expected_answers == pytest.approx(9)
    assert start(epochs=3, wait=start().wait).round(0).answered.size == 0


# --- calibration ----------------------------------------------------------------------------------


def test_a_fit_recovers_known_coefficients():
    rng = np.random.default_rng(3)
    sizes = rng.integers(20, 400, size=40) * 561.0
    exact = 0.02 + 3e-7 * sizes
    assert fit_times(sizes, exact) == pytest.approx((0.02, 3e-7, 0.0), rel=1e-9, abs=1e-12)
    seconds = exact[:, None] * (1 + 0.05 * rng.standard_normal((40, 50)))
    fit = fit_times(sizes, seconds)
    # Of relative least squares: covariance spread^2 (Z'Z)^-1 with rows (1, size) / mean.
    rows = np.repeat(np.stack([1 / exact, sizes / exact], axis=1), 50, axis=0)
    errors = 0.05 * np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))
    assert abs(fit.constant - 0.02) < 5.4 * errors[0]
    assert abs(fit.seconds_per_number - 3e-7) < 5.4 * errors[1]
    assert errors[0] < 0.02 / 20  # the bounds say something
    low, high = stats.chi2.ppf([ALARM / 3, 1 - ALARM / 3], 1998)
    assert low * 0.05**2 < 1998 * fit.spread**2 < high * 0.05**2
    assert replace(Stragglers(), **fit._asdict()).constant == fit.constant


def test_a_fit_recovers_the_clocks_own_times():
    counts = np.arange(50, 450, 5)
    stragglers = Stragglers(constant=0.03, seconds_per_number=4e-7, spread=0.02)
    clock = stragglers.clock(counts, FEATURES, Rng.seeded(8))
    times = np.stack([clock.times(index) for index in range(60)], axis=1)
    fit = fit_times(counts * FEATURES, times)
    assert fit == pytest.approx((0.03, 4e-7, 0.02), rel=0.1)


def test_a_fit_keeps_its_coefficients_from_going_below_zero():
    sizes = np.array([1e3, 2e3, 5e3, 9e3])
    convex = np.array([0.001, 0.004, 0.030, 0.080])  # the line through them starts below 0
    fit = fit_times(sizes, convex)
    # Relative least squares of b x: weights 1/(b x), so b is the mean of the ratios.
    assert fit.constant == 0
    assert fit.seconds_per_number == pytest.approx((convex / sizes).mean())
    falling = fit_times(sizes, [0.4, 0.3, 0.2, 0.1])
    assert falling == pytest.approx((0.25, 0.0, math.sqrt(0.05 / 0.0625 / 2)))


def test_a_fit_of_equal_sizes_puts_all_time_on_the_numbers():
    fit = fit_times([2e4, 2e4], [[0.1, 0.2], [0.2, 0.3]])
    assert fit == pytest.approx((0.0, 0.2 / 2e4, math.sqrt(0.02 / 3) / 0.2))


def test_measuring_times_every_client_and_not_the_first_call(monkeypatch):
    now, calls = [100.0], []
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])

    def run(client):
        calls.append(client)
        now[0] += 50.0 if len(calls) == 1 else 0.25 * client  # the first call compiles

    seconds = measure(run, np.array([2, 5, 3]), repeats=2)
    assert seconds.tolist() == [[0.5, 0.5], [1.25, 1.25], [0.75, 0.75]]
    assert sorted(calls) == [2, 2, 2, 3, 3, 5, 5]
    assert all(type(client) is int for client in calls)


def test_measuring_real_work_takes_real_time():
    seconds = measure(lambda client: sum(range(20_000 * client)), [1, 20], repeats=5)
    assert (seconds > 0).all()
    assert np.median(seconds[1]) > np.median(seconds[0])


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stragglers",
    [
        Stragglers(),
        Stragglers(wait=0.25, hardware="spread", spread=0.0),
        Stragglers(wait=2, hardware=(1.0, 2.5), sum_time=0.0),
        Stragglers(wait="12.5%", constant=0.0, least=1e-9),
    ],
)
def test_settings_survive_a_plan_file(stragglers):
    text = to_toml(to_table(stragglers))
    assert from_table(Stragglers, tomllib.loads(text), "stragglers") == stragglers


def test_a_plan_file_is_told_what_is_wrong():
    with pytest.raises(ConfigError, match=r"\[stragglers\] wait = 'most'.*'45%'"):
        from_table(Stragglers, {"wait": "most"}, "stragglers")
    with pytest.raises(ConfigError, match="unknown setting 'T_wait'"):
        from_table(Stragglers, {"T_wait": 3}, "stragglers")
    with pytest.raises(ConfigError, match="hardware"):
        from_table(Stragglers, {"hardware": "fast"}, "stragglers")
    assert from_table(Stragglers, {"hardware": [1, 2]}, "s").hardware == (1.0, 2.0)


def test_a_wait_in_seconds_alone_is_public():
    assert not Stragglers(wait=0.3).wait_is_reported
    assert Stragglers(wait="all").wait_is_reported
    assert Stragglers(wait="45%").wait_is_reported


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"wait": wait}, "wait = .*expected a positive number of seconds, 'all', or a share")
            for wait in (
                *(0, -1.0, math.nan, math.inf, True, None),
                *("0%", "100%", "120%", "-5%", "45", "45 %", "ALL", "", "1e1%", "٤٥%"),
            )
        ),
        ({"sum_time": -0.1}, "sum_time = -0.1"),
        ({"sum_time": math.inf}, "sum_time = inf"),
        ({"seconds_per_number": -1e-9}, "seconds_per_number = -1e-09"),
        ({"constant": math.nan}, "constant = nan"),
        ({"spread": -0.1}, "spread = -0.1: expected 0 or a positive number"),
        ({"seconds_per_number": 0, "constant": 0}, "expected at least one above 0"),
        ({"least": 0.0}, "least = 0.0: expected a small positive"),
        ({"least": math.inf}, "least = inf"),
        ({"hardware": "fast"}, "hardware = 'fast': expected 'equal', 'spread', or positive"),
        ({"hardware": ()}, "hardware = "),
        ({"hardware": (1.0, 0.0)}, "positive factors"),
        ({"hardware": (1.0, math.inf)}, "positive factors"),
        ({"hardware": [1.0]}, "hardware = "),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Stragglers(**changes)


def test_a_clock_refuses_what_does_not_fit():
    def clock(counts=(3, 4), features=2, epochs=1, **changes):
        return Stragglers(**changes).clock(counts, features, Rng.seeded(1), epochs)

    with pytest.raises(ValueError, match="3 factors for 2 clients"):
        clock(hardware=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="epochs = 0"):
        clock(epochs=0)
    with pytest.raises(ValueError, match="features = 0"):
        clock(features=0)
    for counts in ([], [3, -1], [[3, 4]], [1.5, 2.0]):
        with pytest.raises(ValueError, match="expected whole numbers of rows"):
            clock(counts=counts)
    with pytest.raises(ValueError, match="round -1"):
        clock().round(-1)


def test_fits_and_measurements_refuse_what_makes_no_sense():
    bad = [([1, 2], [1.0]), ([1, 2], [1.0, 2.0]), ([[1, 2, 3]], [[1, 2, 3]]), ([], [])]
    bad += [([1, 2, 0], [1, 1, 1]), ([1, 2, 3], [1, 1, 0]), ([1, 2, 3], [1, 1, math.nan])]
    for numbers, seconds in bad:
        with pytest.raises(ValueError, match=r"numbers .* and seconds .*: expected"):
            fit_times(numbers, seconds)
    with pytest.raises(ValueError, match="0 clients, 10 repeats"):
        measure(lambda client: None, [])
    with pytest.raises(ValueError, match="1 clients, 0 repeats"):
        measure(lambda client: None, [1], repeats=0)
