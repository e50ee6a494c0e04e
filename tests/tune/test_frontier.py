"""Which differences are larger than noise: the test's level, its power, and its parts."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from coterie.evaluation.metrics import average
from coterie.tune.frontier import (
    LOCAL,
    Difference,
    Findings,
    Pair,
    Point,
    adjust,
    compare_errors,
    headlines,
    holm,
)


def draw(generator, clients, seeds, parts, mean=0.0):
    """Differences with effects of clients, of seeds, and of both: standard deviations `parts`."""
    a, b, e = parts
    return (
        mean
        + a * generator.normal(size=(clients, 1))
        + b * generator.normal(size=(1, seeds))
        + e * generator.normal(size=(clients, seeds))
    )


def test_one_seed_is_the_paired_t_test():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 30, 1))
    ours, theirs = compare_errors(first, second), stats.ttest_rel(first[:, 0], second[:, 0])
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6)
    assert ours.mean / ours.standard_error == pytest.approx(theirs.statistic)
    assert (ours.clients, ours.seeds) == (30, 1)


def test_the_standard_error_adds_clients_and_seeds():
    apart = draw(np.random.default_rng(1), 20, 4, (1.0, 0.5, 0.3))
    found = compare_errors(apart, np.zeros_like(apart))
    over_clients = stats.sem(apart.mean(axis=1)) ** 2
    over_seeds = stats.sem(apart.mean(axis=0)) ** 2
    assert found.standard_error == pytest.approx(math.sqrt(over_clients + over_seeds))
    # The level is where the mean just meets the threshold.
    t = [stats.t.ppf(1 - found.p / 2, f) for f in (19, 3)]
    assert found.mean**2 == pytest.approx(t[0] ** 2 * over_clients + t[1] ** 2 * over_seeds)


@pytest.mark.parametrize(
    ("clients", "seeds", "parts"),
    [
        (40, 3, (1.0, 0.0, 0.0)),
        (40, 3, (0.0, 1.0, 0.0)),  # the same split and noise for everybody: K S are not independent
        (40, 3, (1.0, 0.15, 1.0)),
        (40, 2, (1.0, 0.3, 0.5)),
        (8, 8, (1.0, 1.0, 1.0)),
    ],
)
def test_one_pair_keeps_its_level(clients, seeds, parts):
    generator, times = np.random.default_rng(2), 700
    alarms = sum(
        compare_errors(d, np.zeros_like(d)).p <= 0.05
        for d in (draw(generator, clients, seeds, parts) for _ in range(times))
    )
    assert alarms <= stats.binom.ppf(1 - 1e-4, times, 0.05)


def test_any_false_alarm_among_all_pairs_of_four_methods_is_rare():
    generator, times, alarms, naive = np.random.default_rng(3), 250, 0, 0
    for _ in range(times):
        # Four methods that are equally good: errors share a client's difficulty and a seed's luck.
        shared = draw(generator, 30, 3, (2.0, 1.0, 1.0))
        errors = [shared + draw(generator, 30, 3, (0.5, 0.3, 0.5)) for _ in range(4)]
        pairs = [(a, b) for i, a in enumerate(errors) for b in errors[:i]]
        found = adjust([compare_errors(a, b) for a, b in pairs])
        alarms += any(difference.is_significant for difference in found)
        naive += any(stats.ttest_1samp((a - b).ravel(), 0).pvalue <= 0.05 for a, b in pairs)
    assert alarms <= stats.binom.ppf(1 - 1e-4, times, 0.05)
    assert naive > 0.3 * times  # what happens to those who take K S numbers for independent


@pytest.mark.parametrize(("seeds", "least"), [(3, 0.5), (10, 0.95)])
def test_power(seeds, least):
    """A difference of 5 standard errors is found, and more surely with more seeds."""
    generator, times, parts = np.random.default_rng(4), 200, (1.0, 0.05, 0.5)
    error = math.sqrt(1 / 100 + 0.05**2 / seeds + 0.25 / (100 * seeds))
    found = sum(
        compare_errors(d, np.zeros_like(d)).p <= 0.05
        for d in (draw(generator, 100, seeds, parts, mean=5 * error) for _ in range(times))
    )
    assert found / times >= least
    ideal = 1 - NormalDist().cdf(1.96 - 5)
    assert found / times <= ideal + 0.01


def test_clients_without_rows_are_left_out_and_broken_errors_are_said():
    first, second = np.random.default_rng(5).normal(size=(2, 6, 2))
    first[0, 1] = second[0, 1] = math.nan  # no test rows under this split
    found = compare_errors(first, second)
    assert found.clients == 5
    assert found.mean == pytest.approx(float((first - second)[1:].mean()))
    first[3, 0] = math.nan  # a model that diverged
    broken = compare_errors(first, second)
    assert math.isnan(broken.mean) and broken.p == 1 and not adjust([broken])[0].is_significant


def test_no_difference_at_all_is_none():
    same = np.ones((5, 3))
    found = adjust([compare_errors(same, same)])[0]
    assert found.mean == 0 and found.p == 1 and not found.is_significant
    apart = adjust([compare_errors(same + 1, same)])[0]
    assert apart.is_significant and apart.mean == 1


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\(clients, seeds\)"):
        compare_errors(np.ones((3, 2)), np.ones((2, 3)))


def test_holm_by_hand():
    assert holm([]) == []
    assert holm([0.02]) == [0.02]
    assert holm([0.9, 0.001, 0.02, 0.04]) == pytest.approx([0.9, 0.004, 0.06, 0.08])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_a_mean_over_seeds_keeps_the_clients_error_whole():
    mean, error = average([1.0, 2.0, 3.0], [0.3, 0.4, 0.5])
    assert mean == 2
    assert error == pytest.approx(math.sqrt((0.09 + 0.16 + 0.25) / 3 + 1 / 3))
    assert average([1.0], [0.3]) == (1.0, 0.3)
    assert math.isnan(average([], [])[0])


def test_an_unadjusted_difference_is_not_called_one():
    assert not Difference(1.0, 0.1, 10, 3, 1e-9).is_significant


# --- headlines


def pair(epsilon, first, second, mean, adjusted, better=0.6):
    told = Difference(mean, 0.01, 60, 3, adjusted, adjusted, better, 1 - better)
    return Pair(epsilon, first, second, told)


def found_of(pairs, silent=(), metric="nmse"):
    labels = list(dict.fromkeys(label for one in pairs for label in (one.first, one.second)))
    labels = [label for label in labels if label != LOCAL]
    value = {label: 0.1 * (place + 3) for place, label in enumerate(labels)}
    epsilons = tuple(sorted({one.epsilon for one in pairs}))
    points = tuple(
        Point(label, epsilon, value[label], 0.01, 3, 0.7, private=True)
        for label in labels
        for epsilon in epsilons
    )
    return Findings(metric, epsilons, points, tuple(pairs), silent)


def test_the_best_method_at_each_epsilon_and_what_is_as_good():
    pairs = [
        pair(1.0, "a", "b", -0.01, 0.5),
        pair(1.0, "a", "c", -0.20, 0.01),
        pair(1.0, "a", LOCAL, -0.3, 0.001, 0.8),
        pair(4.0, "a", "b", -0.1, 0.001),
        pair(4.0, "a", "c", math.nan, math.nan),
        pair(4.0, "a", LOCAL, 0.3, 0.2, 0.45),
    ]
    first, second = headlines(found_of(pairs))
    assert (first.epsilon, first.method, first.as_good) == (1.0, "a", ("b",))
    assert first.verdict is not None and second.verdict is not None
    assert first.verdict.lead == "joining helps" and first.verdict.better == 0.8
    assert second.as_good == ("c",), "a difference that is not known is not a clear one"
    assert second.verdict.lead == "joining makes no clear difference"


def test_a_method_that_clearly_helps_comes_before_one_that_only_scores_better():
    """A score of a few seeds is best by chance; a method as good may be proved to help."""
    pairs = [
        pair(1.0, "a", "b", -0.01, 0.5),
        pair(1.0, "a", "c", -0.05, 0.2),
        pair(1.0, "b", "c", -0.15, 0.01),
        pair(1.0, "a", LOCAL, -0.2, 0.2, 0.7),
        pair(1.0, "b", LOCAL, -0.2, 0.001, 0.72),
        pair(1.0, "c", LOCAL, -0.01, 0.9, 0.5),
    ]
    (one,) = headlines(found_of(pairs))
    assert one.method == "b" and one.as_good == ("a",)
    assert one.verdict is not None and one.verdict.lead == "joining helps"


@pytest.mark.parametrize("turned", [False, True])
def test_a_local_method_of_the_comparison_stands_for_the_baseline(turned):
    names = ("local", "a") if turned else ("a", "local")
    told = pair(1.0, *names, 0.2 if turned else -0.2, 0.01, 0.3 if turned else 0.7)
    (one,) = headlines(found_of([told], silent=("local",)))
    assert one.method == "a" and one.as_good == ()
    assert one.verdict is not None and one.verdict.better == pytest.approx(0.7)
    assert one.verdict.lead == "joining helps"
    assert headlines(found_of([told], silent=("local", "a"))) == (), "nothing private, no headline"


def test_larger_may_be_better():
    told = pair(1.0, "a", "b", -0.2, 0.01)
    assert headlines(found_of([told], metric="accuracy"))[0].method == "b"


def test_shares_are_means_over_seeds_of_clients_with_rows():
    first = np.array([[1.0, math.nan], [2.0, 2.0], [3.0, 1.0]])
    second = np.array([[2.0, math.nan], [1.0, 2.0], [4.0, 0.5]])
    found = compare_errors(first, second)
    assert found.share_better == pytest.approx((2 / 3 + 0) / 2)
    assert found.share_worse == pytest.approx((1 / 3 + 1 / 2) / 2)
    nobody = np.full((2, 1), math.nan)
    assert math.isnan(compare_errors(nobody, nobody).share_better)
