"""The frontier of a comparison, and which differences between methods are larger than noise.

The frontier is the mean of the metric over seeds, by method and epsilon. Differences are tested on
clients' own errors, which every run keeps in its `metrics.parquet`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import optimize, special

from coterie.evaluation.metrics import average, is_higher_better
from coterie.evaluation.verdict import Headline, Side, Verdict
from coterie.tune.compare import Ended, Row, is_done, read_comparison, rows_of

LOCAL = "local baseline"
"""The name of the local baseline in a pair."""
FALSE_ALARMS = 0.05
"""The probability of any false alarm among the pairs of one epsilon."""
_LEAST_P = 1e-12
_ENOUGH_SEEDS = 5

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """The difference of two methods in clients' own errors, at one epsilon."""

    # Over clients and seeds, the first's error minus the second's; below 0 the first is better. NaN
    # if an error is not finite, or no client has rows in all seeds.
    mean: float
    standard_error: float  # sqrt(A + B), or sqrt(A) with one seed; see `compare_errors`
    clients: int  # number of clients with test rows in every seed
    seeds: int  # number of seeds
    p: float  # the p-value of this pair
    adjusted: float = math.nan  # the p-value adjusted for all pairs of its epsilon (Holm)
    share_better: float = math.nan  # of clients whose error is smaller under the first; over seeds
    share_worse: float = math.nan  # of clients whose error is larger under the first

    @property
    def is_significant(self) -> bool:
        """Whether the difference is larger than noise."""
        return self.adjusted <= FALSE_ALARMS

    @property
    def side(self) -> Side:
        """Which side the first is on, by the test."""
        if not self.is_significant:
            return "unclear"
        return "better" if self.mean < 0 else "worse"


def compare_errors(first: Array, second: Array) -> Difference:
    """Compare two methods by clients' own errors, (clients, seeds) each.

    Both methods run on the same clients k = 1..K with the same seeds s = 1..S. The paired
    differences follow the crossed random effects model

        d[k, s] = mu + a_k + b_s + e[k, s],

    so the mean has variance va/K + vb/S + ve/(K S). Let A be the sample variance of the K client
    means over K, and B that of the S seed means over S:

        E[A] = (va + ve/S) / K,    E[B] = (vb + ve/K) / S,    E[A + B] = Var(mean) + ve/(K S).

    The test at level alpha rejects if

        mean^2 > t(K-1)^2 A + t(S-1)^2 B,    t(f): the 1 - alpha/2 quantile of Student's t.

    It holds its level for any split of the variance (Banerjee, "Approximate confidence interval for
    linear functions of means of k populations when the population variances are not equal", Sankhya
    1960). Let w and 1 - w be the shares of E[A] and E[B] in their sum, and F the distribution
    function of chi-squared with one degree of freedom, which is concave. Then P(no rejection) >=
    E F(w X + (1-w) Y) >= w E F(X) + (1-w) E F(Y) = 1 - alpha, with X = t(K-1)^2 A / E[A] and
    Y = t(S-1)^2 B / E[B]; A and B are independent of the mean. Satterthwaite's degrees of freedom
    do not hold the level for few seeds. With one seed B is unknown and omitted.

    A client without test rows in some seed (NaN under both) is left out.
    """
    if first.shape != second.shape or first.ndim != 2:
        raise ValueError(
            f"errors of shapes {first.shape} and {second.shape}: expected (clients, seeds) twice"
        )
    known = ~(np.isnan(first) & np.isnan(second)).any(axis=1)
    with np.errstate(invalid="ignore"):
        apart = (first - second)[known]
    clients, seeds = apart.shape
    shares = {
        "share_better": _share(first < second, first),
        "share_worse": _share(first > second, first),
    }
    if clients < 2 or not np.isfinite(apart).all():
        return Difference(math.nan, math.nan, clients, seeds, 1.0, **shares)
    mean = float(apart.mean())
    over_clients = float(apart.mean(axis=1).var(ddof=1)) / clients
    over_seeds = float(apart.mean(axis=0).var(ddof=1)) / seeds if seeds > 1 else 0.0
    error = math.sqrt(over_clients + over_seeds)
    p = _p_value(mean, (over_clients, clients - 1), (over_seeds, seeds - 1))
    return Difference(mean, error, clients, seeds, p, **shares)


def _share(found: NDArray[np.bool_], errors: Array) -> float:
    """Return the mean over seeds of the share of clients with test rows, as a single run has it."""
    rows = (~np.isnan(errors)).sum(axis=0)
    if not rows.all():
        return math.nan
    return float(((found & ~np.isnan(errors)).sum(axis=0) / rows).mean())


def adjust(differences: Sequence[Difference]) -> list[Difference]:
    """Return the pairs of one epsilon with adjusted p-values (Holm, Scand. J. Statist. 1979)."""
    levels = holm([difference.p for difference in differences])
    return [replace(d, adjusted=level) for d, level in zip(differences, levels, strict=True)]


def holm(levels: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    found, least = [0.0] * len(levels), 0.0
    order = sorted(range(len(levels)), key=lambda place: levels[place])
    for step, place in enumerate(order):
        least = max(least, min(1.0, levels[place] * (len(levels) - step)))
        found[place] = least
    return found


def _p_value(mean: float, *parts: tuple[float, int]) -> float:
    """Return the level at which mean^2 equals the threshold."""
    used = [(variance, freedom) for variance, freedom in parts if freedom > 0]

    def excess(log_level: float) -> float:
        quantile = 1 - math.exp(log_level) / 2
        return mean**2 - sum(v * float(special.stdtrit(f, quantile)) ** 2 for v, f in used)

    if excess(0.0) <= 0:
        return 1.0
    least = math.log(_LEAST_P)
    return _LEAST_P if excess(least) > 0 else math.exp(optimize.brentq(excess, least, 0.0))


# --- the frontier -------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A method at an epsilon."""

    label: str  # the method's label
    epsilon: float  # the column; methods that release nothing are in all columns
    value: float  # mean over seeds of the metric
    standard_error: float  # over clients and seeds
    seeds: int  # number of seeds
    local_value: float  # mean over seeds of the local baseline
    private: bool  # whether epsilon is finite
    best: bool = False  # whether no other method is better at this epsilon


@dataclass(frozen=True)
class Pair:
    """Two methods at an epsilon; the second may be the local baseline."""

    epsilon: float
    first: str
    second: str
    difference: Difference

    def to_json(self) -> dict[str, Any]:
        """Return the pair for `coterie compare --json`."""
        found = asdict(self.difference)
        return {
            "epsilon": self.epsilon,
            "first": self.first,
            "second": self.second,
            "difference": found.pop("mean"),
            "p_adjusted": found.pop("adjusted"),
            "larger_than_noise": self.difference.is_significant,
            **found,
        }


@dataclass(frozen=True)
class Findings:
    """The frontier and the differences of a comparison."""

    metric: str  # its name; "" if no cell is done
    epsilons: tuple[float, ...]  # the columns, ascending
    points: tuple[Point, ...]  # by label, then by epsilon
    pairs: tuple[Pair, ...]  # by epsilon, with adjusted p-values
    silent: tuple[str, ...] = ()  # labels of methods that release nothing

    @property
    def smaller_is_better(self) -> bool:
        """Whether smaller values of the metric are better."""
        return not is_higher_better(self.metric)

    def at(self, epsilon: float) -> list[Point]:
        """Return the points of one epsilon."""
        return [point for point in self.points if point.epsilon == epsilon]


def find(rows: Sequence[Row], folder: Path) -> Findings:
    """Return the frontier, and test all pairs of each epsilon."""
    done = [row for row in rows if row["status"] == "done"]
    asked = {float(row["epsilon_asked"]) for row in done if row["epsilon_asked"] is not None}
    columns = tuple(sorted(asked or {0.0}))  # one column if nothing is released at all
    labels = list(dict.fromkeys(row["label"] for row in done))
    metric = done[0]["metric"] if done else ""
    errors = {row["run"]: _client_errors(folder / row["run"]) for row in done}
    points: list[Point] = []
    pairs: list[Pair] = []
    for epsilon in columns:
        shown: dict[str, list[Row]] = {}
        for row in done:
            if row["epsilon_asked"] in (None, epsilon):
                shown.setdefault(row["label"], []).append(row)
        points += _marked([_point(found, epsilon) for found in shown.values()], metric)
        pairs += _pairs(shown, epsilon, errors)
    points.sort(key=lambda point: (labels.index(point.label), point.epsilon))
    silent = dict.fromkeys(row["label"] for row in done if row["epsilon_asked"] is None)
    return Findings(metric, columns, tuple(points), tuple(pairs), tuple(silent))


def _point(rows: Sequence[Row], epsilon: float) -> Point:
    values, errors, local = (
        [math.nan if row[key] is None else row[key] for row in rows]
        for key in ("value", "standard_error", "local_value")
    )
    value, error = average(values, errors)
    private = all(row["private"] for row in rows)
    label = rows[0]["label"]
    return Point(label, epsilon, value, error, len(rows), float(np.mean(local)), private)


def _marked(points: list[Point], metric: str) -> Iterator[Point]:
    known = [point.value for point in points if not math.isnan(point.value)]
    best = (max if is_higher_better(metric) else min)(known) if len(known) > 1 else math.nan
    for point in points:
        yield replace(point, best=point.value == best)


Errors = Mapping[str, Mapping[str, Mapping[str, float]]]
_OWN, _LOCAL = "error", "error_alone"  # columns of metrics.parquet


def _client_errors(run: Path) -> dict[str, dict[str, float]]:
    """Read clients' own errors by name, of the run and of its local baseline."""
    table = pq.read_table(run / "metrics.parquet")
    names = table["client"].to_pylist()
    return {
        key: dict(zip(names, table[key].to_numpy(), strict=True))
        for key in (_OWN, _LOCAL)
        if key in table.column_names
    }


def _pairs(shown: Mapping[str, list[Row]], epsilon: float, read: Errors) -> list[Pair]:
    """Test all pairs of methods, and each method with a release against its local baseline."""
    asked = [(first, second, _OWN) for first, second in itertools.combinations(shown, 2)]
    silent = [label for label, rows in shown.items() if rows[0]["epsilon_asked"] is None]
    asked += [(label, label, _LOCAL) for label in shown if label not in silent]
    found: list[tuple[str, str, Difference]] = []
    for first, second, against in asked:
        errors = _paired(shown[first], shown[second], read, against)
        if errors is None or (
            against == _LOCAL and any(_is_same(shown[s], errors[1], read) for s in silent)
        ):
            continue  # a method of the comparison is this local baseline
        other = LOCAL if against == _LOCAL else second
        found.append((first, other, compare_errors(*errors)))
    adjusted = adjust([difference for *_, difference in found])
    return [
        Pair(epsilon, first, second, difference)
        for (first, second, _), difference in zip(found, adjusted, strict=True)
    ]


def _is_same(rows: Sequence[Row], local: Array, read: Errors) -> bool:
    errors = _paired(rows, rows, read, _OWN)
    return errors is not None and np.array_equal(errors[0], local, equal_nan=True)


def _paired(
    first: Sequence[Row], second: Sequence[Row], read: Errors, against: str
) -> tuple[Array, Array] | None:
    """Return errors on the common seeds and clients, (clients, seeds) each."""
    ours = {row["seed"]: read[row["run"]][_OWN] for row in first}
    theirs = {row["seed"]: read[row["run"]].get(against) for row in second}
    pairs = [(ours[seed], other) for seed in ours if (other := theirs.get(seed)) is not None]
    if not pairs:
        return None
    names = sorted(set.intersection(*(set(part) for pair in pairs for part in pair)))
    a, b = (
        np.array([[part[name] for part in parts] for name in names], dtype=np.float64)
        for parts in zip(*pairs, strict=True)
    )
    return a.reshape(len(names), len(pairs)), b.reshape(len(names), len(pairs))


def findings_of(folder: Path) -> Findings:
    """Return what the finished cells of a comparison's folder show."""
    cells = read_comparison(folder).cells()
    done = {n: Ended("done") for n, cell in enumerate(cells) if is_done(folder / cell.place)}
    return find(rows_of(cells, done, folder), folder)


def sentences(found: Findings) -> Iterator[str]:
    """Yield sentences about the differences that are larger than noise, by epsilon."""
    for epsilon in found.epsilons:
        pairs = [pair for pair in found.pairs if pair.epsilon == epsilon]
        if pairs:
            yield f"At epsilon {epsilon:g}:"
            yield from (f"  {line}" for line in _pair_sentences(pairs))
    if not found.pairs:
        return
    most = max(pair.difference.seeds for pair in found.pairs)
    unit = "mean squared errors" if found.smaller_is_better else "error rates"
    counted = "over clients and seeds" if most > 1 else "over clients only"
    yield (
        f"Tests compare each client's own {unit} under two methods. The probability of any false "
        f"alarm at one epsilon is at most {100 * FALSE_ALARMS:.0f} % ({counted}, all pairs of an "
        f"epsilon together). The {LOCAL} trains the method's model on each client's own rows."
    )
    if most == 1:
        yield (
            "With one seed only clients vary: another split and other noise could reverse these "
            "results; give --seeds 5."
        )
    elif most < _ENOUGH_SEEDS:
        yield (
            f"{most} seeds give an imprecise estimate of the variance over seeds, and the test "
            "accounts for that: more seeds detect smaller differences."
        )


def headlines(found: Findings) -> tuple[Headline, ...]:
    """Return one private method per epsilon, and those that are not clearly worse.

    It has the best score; if that is not clearly better than local training, but a method that is
    not clearly worse is, that one is taken.
    """
    return tuple(
        one for epsilon in found.epsilons if (one := _headline(found, epsilon)) is not None
    )


def _headline(found: Findings, epsilon: float) -> Headline | None:
    pairs = [pair for pair in found.pairs if pair.epsilon == epsilon]
    sign = 1 if found.smaller_is_better else -1
    private = sorted(
        (
            point
            for point in found.at(epsilon)
            if point.private and point.label not in found.silent and not math.isnan(point.value)
        ),
        key=lambda point: sign * point.value,
    )
    if not private:
        return None
    close = _not_worse(private[0], private, pairs)
    verdicts = {point.label: _joining(found, point, pairs) for point in (private[0], *close)}
    helping = (
        p for p in (private[0], *close) if getattr(verdicts[p.label], "average", "") == "better"
    )
    best = next(helping, private[0])
    others = tuple(point.label for point in _not_worse(best, private, pairs))
    return Headline(epsilon, best.label, best.value, best.local_value, verdicts[best.label], others)


def _not_worse(best: Point, private: Sequence[Point], pairs: Sequence[Pair]) -> list[Point]:
    """Return the methods that are not clearly worse than this one."""
    unclear = {
        label
        for pair in pairs
        for label in (pair.first, pair.second)
        if best.label in (pair.first, pair.second) and pair.difference.side == "unclear"
    }
    return [point for point in private if point.label in unclear - {best.label}]


def _joining(found: Findings, best: Point, pairs: Sequence[Pair]) -> Verdict | None:
    """Return how clients fare with a method, compared with its local baseline."""
    for other in (LOCAL, *found.silent):
        for pair in pairs:
            if (pair.first, pair.second) in ((best.label, other), (other, best.label)):
                told, turned = pair.difference, pair.first == other
                return _verdict(told, turned=turned)
    return None


def _verdict(told: Difference, *, turned: bool) -> Verdict | None:
    if not told.clients or math.isnan(told.share_better):
        return None
    opposite: dict[Side, Side] = {"better": "worse", "worse": "better", "unclear": "unclear"}
    shares = told.share_better, told.share_worse
    better, worse = shares[::-1] if turned else shares
    side = opposite[told.side] if turned else told.side
    return Verdict(side, better, worse, told.clients, seeds=told.seeds)


def _pair_sentences(pairs: Sequence[Pair]) -> Iterator[str]:
    better: dict[str, list[str]] = {}
    close: list[str] = []
    unknown: list[str] = []
    for pair in pairs:
        difference, both = pair.difference, f"{pair.first} and {pair.second}"
        if math.isnan(difference.mean):
            unknown.append(both)
        elif difference.is_significant:
            winner, loser = pair.first, pair.second
            if difference.mean > 0:
                winner, loser = loser, winner
            gap = f"{abs(difference.mean):.2g} ± {difference.standard_error:.1g}"
            better.setdefault(winner, []).append(f"{loser} (by {gap})")
        else:
            close.append(both)
    for label, others in better.items():
        yield f"{label} is better than {', '.join(others)}"
    if close:
        yield f"no significant difference: {', '.join(close)}"
    if unknown:
        yield f"not comparable (errors that are not finite): {', '.join(unknown)}"
