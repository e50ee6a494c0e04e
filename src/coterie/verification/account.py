"""Epsilon of a certificate's events, recomputed by view.

Closed forms where they exist: Gaussian DP at full participation (Dong, Roth and Su 2022), its
binomial mixture for a visible cohort, sums of pure epsilons. Elsewhere the privacy loss
distributions of the package dp-accounting. The events are those of the certificate, whatever
mechanism made them:

- gaussian: a sum with noise of `noise_multiplier` times the bound; under replace it moves
  `replaced` times as far as under zero_out;
- gaussian_shares: the same noise, carried by the shares of `minimum_clients - corrupt` clients;
- gaussian_banded: noise that is correlated over `bands` rounds, of normals of `noise_multiplier`;
- local_gaussian: the noise of `gaussian` on each client's own message, which the server sees;
- laplace: any release that is `epsilon`-DP with delta = 0;
- wishart: a number `ratio` plus chi-square noise of `degrees` degrees of freedom;
- non_private: a release without noise.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Array = NDArray[np.float64]
Event = Mapping[str, Any]
Profile = Callable[[Array], Array]
"""From epsilons, negative ones too, to the deltas of one direction."""
_FINENESS = 50
"""Standard deviation of one release's loss over the grid step: epsilon is right to about 4e-5."""
_POINTS = 1 << 17
_COARSEST = 500.0
"""The largest grid step: its exponential is a float."""
_SMALLEST = 1e-12
"""The smallest delta that survives the Fourier transforms of dp-accounting."""
_UNDERFLOW = 600.0
"""Above this epsilon dp-accounting's inverse of delta loses e^-epsilon, and is too large."""
_SMALL = 1e-9
"""Below this delta training may state the epsilon of a visible cohort, which is larger."""
_KINDS = 64
"""Different noise multipliers that are composed separately."""
_SUMS = 1 << 18
"""Sums of losses of pure releases that are enumerated."""
_COARSE = 1.02
"""How much larger a bound on a grid of Renyi orders may be than one without a grid."""


@dataclass(frozen=True)
class Account:
    """Events with their counts, and who takes part in a round."""

    events: tuple[tuple[Event, int], ...]
    kind: str
    rate: float
    visible: bool
    relation: str
    delta: float

    @classmethod
    def of(cls, stated: Mapping[str, Any], events: Sequence[Event] | None = None) -> "Account":
        """Return the account of a certificate, or of other events under its sampling."""
        return cls(
            events=count(stated["events"] if events is None else events),
            kind=stated["sampling"],
            rate=float(stated["rate"]),
            visible=stated["cohort"] == "visible",
            relation=stated["relation"],
            delta=float(stated["delta"]),
        )

    @property
    def hides(self) -> str:
        """How a hidden cohort is sampled; empty if it is visible, or everybody takes part."""
        return "" if self.visible or self.rate == 1 else self.kind

    @property
    def seen(self) -> "Account":
        """The same with a visible cohort."""
        return replace(self, visible=True)

    def moved(self, event: Event) -> float:
        """Return how far a Gaussian event's sum moves, in deviations; infinite without noise."""
        noise = float(event.get("noise_multiplier", 0.0))
        return math.inf if noise == 0 else self.shift({"replaced": 2.0, **event}) / noise

    def shift(self, event: Event) -> float:
        """Return how far a Gaussian event's sum moves, in units of the bound."""
        return float(event["replaced"]) if self.relation == "replace" else 1.0


@dataclass(frozen=True)
class Span:
    """Where a stated epsilon may lie.

    Both accounts round up on grids of their own, by about 1e-5 of epsilon. The tolerance is 0.05 %
    and 1e-6 below the recomputed number, so that no stated epsilon is smaller than the truth by
    more than that, and 0.5 % and 1e-4 above it, for a grid that is coarse. A delta has fewer
    digits: `is_delta` widens the shares to 1 % and 5 %.
    """

    low: float
    high: float
    is_delta: bool = False

    def holds(self, stated: float) -> bool:
        """Return whether a stated number agrees."""
        if math.inf in (stated, self.low):
            return stated == self.low or (stated == math.inf and self.high == math.inf)
        if self.is_delta:
            return self.low * 0.99 - 1e-14 <= stated <= self.high * 1.05 + 1e-10
        return self.low * (1 - 5e-4) - 1e-6 <= stated <= self.high * 1.005 + 1e-4


def count(events: Iterable[Event]) -> tuple[tuple[Event, int], ...]:
    """Count equal events of a list of runs; claims of papers do not tell events apart."""
    found: Counter[tuple[Any, ...]] = Counter()
    for event in events:
        key = tuple((k, v) for k, v in event.items() if k not in ("rounds", "claimed"))
        found[key] += int(event["rounds"])
    return tuple((dict(key), times) for key, times in found.items())


def by_view(account: Account) -> dict[str, Span]:
    """Return epsilon by view; `epsilon` is the number against the other clients.

    The server adds central noise itself, so nothing holds against it. With a cohort of fixed size
    all other clients together know from their invitations who was sampled.
    """
    account = _of_one_client(account)
    kinds = {event["event"] for event, _ in account.events}
    if "gaussian_shares" in kinds:
        return _by_view_of_shares(account, kinds)
    main, infinite = recompute(account), Span(math.inf, math.inf)
    if "local_gaussian" in kinds:
        sums, local = recompute(_central(account, summed=True)), kinds == {"local_gaussian"}
        server = (main, sums) if local else (infinite, infinite)
        views = {"other_clients": main, "outsider": sums}
    else:
        server = (infinite, infinite) if kinds else (Span(0.0, 0.0), Span(0.0, 0.0))
        views = {"other_clients": main}
        if account.kind == "fixed":
            together = recompute(account.seen)
            views = {"other_clients": together, "outsider": main}
            views["coalition_of_all_others"] = together
    views |= {"server": server[0], "server_secure_aggregation": server[1]}
    return {"epsilon": views["other_clients"], **views}


def _of_one_client(account: Account) -> Account:
    """Return the releases of one client under a public schedule, as rounds with everybody.

    Once in b rounds, a client takes part in at most one more of n releases than n // b, unless b
    divides n. Those with the least noise count most. Noise that is correlated within b rounds
    counts as independent: its strategy has orthonormal columns for the rounds of one client.

    Raises:
        ValueError: If the noise of two rounds of a client is correlated, or is not Gaussian.
    """
    kinds = {event["event"] for event, _ in account.events}
    if account.kind != "cyclic":
        if "gaussian_banded" in kinds:
            raise ValueError("banded noise without a cyclic schedule")
        return account
    period = round(1 / account.rate)
    if not account.visible or not math.isclose(period * account.rate, 1, rel_tol=1e-12):
        raise ValueError(f"a cyclic schedule with rate {account.rate}, or a hidden one")
    single: list[Event] = []
    for event, times in account.events:
        if event.get("bands", 1) > period:
            raise ValueError(f"{event['bands']} bands, and a client takes part once in {period}")
        if "noise_multiplier" not in event and event["event"] != "non_private":
            raise ValueError(f"{event['event']} noise with a cyclic schedule")
        plain = event["event"] == "gaussian_banded"
        one = {k: v for k, v in event.items() if k != "bands"} | {"event": "gaussian"}
        single += [one if plain else event] * times
    single.sort(key=account.moved, reverse=True)
    kept = single[: math.ceil(len(single) / period)]
    events = count({**event, "rounds": 1} for event in kept)
    return replace(account, events=events, kind="everyone", rate=1.0)


def _by_view_of_shares(account: Account, kinds: set[str]) -> dict[str, Span]:
    """Return epsilon by view where clients add shares of the noise and only sums are opened.

    Against other clients and the coordinator with the corrupt ones, K - C shares count; against the
    coordinator alone K; against all others together the client's own. The coordinator draws the
    cohort, so it could draw one client in every round; all clients together know a cohort of fixed
    size.
    """
    if kinds != {"gaussian_shares"}:
        raise ValueError("shares of the noise in some rounds only")
    others = account.seen if account.kind == "fixed" else account
    always = replace(account.seen, kind="everyone", rate=1.0)
    main = recompute(_of_shares(others, 0))
    return {
        "epsilon": main,
        "other_clients": main,
        "coordinator": recompute(_of_shares(always, -1)),
        "coordinator_and_corrupt": recompute(_of_shares(always, 0)),
        "coalition_of_all_others": recompute(_of_shares(others, 1)),
    }


def _of_shares(account: Account, counted: int) -> Account:
    """Return shares as central noise: of `counted` shares, 0 for K - C and -1 for K."""

    def one(event: Event) -> Event:
        least, honest = event["minimum_clients"], event["minimum_clients"] - event["corrupt"]
        shares = {0: honest, -1: least}.get(counted, counted)
        noise = event["noise_multiplier"] * math.sqrt(shares / honest)
        return {"event": "gaussian", "noise_multiplier": noise, "replaced": event["replaced"]}

    return replace(account, events=tuple((one(event), n) for event, n in account.events))


def recompute(account: Account) -> Span:
    """Return epsilon of all events together.

    Raises:
        ValueError: If no account is known for the events under this sampling and relation.
    """
    account = _of_one_client(account)
    kinds = {event["event"] for event, _ in account.events}
    if "non_private" in kinds:
        return Span(math.inf, math.inf)
    if not kinds:
        return Span(0.0, 0.0)
    if "local_gaussian" in kinds:
        return recompute(_central(account))
    if "gaussian_shares" in kinds:
        return recompute(_of_shares(account, 0))
    return _gaussian(account) if kinds == {"gaussian"} else _mixed(account)


def message_epsilon(account: Account) -> float | None:
    """Return epsilon of the least noisy message by itself; None without local noise."""
    noise = [e["noise_multiplier"] for e, _ in account.events if e["event"] == "local_gaussian"]
    scale = 2.0 if account.relation == "replace" else 1.0
    return gaussian_epsilon(scale / min(noise), account.delta) if noise else None


def recompute_delta(account: Account, epsilon: float) -> float:
    """Return delta of all events together at an epsilon, such as one that a paper claims."""
    account = _of_one_client(account)
    if any(event["event"] == "local_gaussian" for event, _ in account.events):
        account = _central(account)
    costs = _costs(account)
    if all(event["event"] == "gaussian" for event, _ in account.events):
        if account.rate == 1:
            return float(gaussian_delta(epsilon, _mu(account)))
        if not account.hides and len(costs) == 1:
            ((mu, rounds),) = costs.items()
            return mixture_delta(mu, rounds, account.rate, epsilon)
    return float(_composed(_losses(account)).get_delta_for_epsilon(epsilon))


def _central(account: Account, *, summed: bool = False) -> Account:
    """Return local noise as central noise of a visible cohort: of one message, or of a sum.

    A client that adds noise to its own message is seen to send one. Of a sum, the noise of the
    honest clients counts.
    """

    def one(event: Event) -> Event:
        if event["event"] != "local_gaussian":
            return event
        noise = event["noise_multiplier"] * (math.sqrt(event["honest"]) if summed else 1.0)
        return {"event": "gaussian", "noise_multiplier": noise, "replaced": 2.0}

    return replace(account.seen, events=tuple((one(event), n) for event, n in account.events))


# Closed forms.


def gaussian_delta(epsilon: Any, mu: Any) -> Array:
    """Return delta of mu-Gaussian DP, for each epsilon (negative ones too) and each mu > 0."""
    size = np.abs(epsilon)
    x = size / mu - mu / 2
    top = special.log_ndtr(-x)
    found = -np.exp(top) * np.expm1(np.minimum(size + special.log_ndtr(-x - mu) - top, 0.0))
    below = -np.expm1(-size) + np.exp(-size) * found
    return np.asarray(np.where(np.asarray(epsilon) >= 0, found, below))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of mu-Gaussian DP."""
    if mu == 0:
        return 0.0
    if mu >= 1e9 or delta <= 0:
        return math.inf
    return _solve(lambda e: float(gaussian_delta(e, mu)), delta, mu)


def mixture_epsilon(mu: float, rounds: int, rate: float, delta: float) -> float:
    """Return epsilon where a client takes part in some of the rounds, visibly, at mu per round."""
    return _solve(lambda e: mixture_delta(mu, rounds, rate, e), delta, mu * math.sqrt(rounds))


def mixture_delta(mu: float, rounds: int, rate: float, epsilon: float) -> float:
    """Return the mean of delta over the binomial number of rounds that a client takes part in."""
    middle = rounds * rate
    far = 40 * math.sqrt(middle * (1 - rate)) + 400
    found = 0.0
    times = np.arange(max(1, math.floor(middle - far)), min(rounds, math.ceil(middle + far)) + 1)
    for part in np.array_split(times.astype(np.float64), 1 + len(times) // (1 << 16)):
        chance = _binomial(part, rounds, rate)
        found += float(chance @ gaussian_delta(epsilon, mu * np.sqrt(part)))
    return found


def _solve(delta_of: Callable[[float], float], delta: float, mu: float) -> float:
    if delta_of(0.0) <= delta:
        return 0.0

    def excess(epsilon: float) -> float:
        return math.log(max(delta_of(epsilon), 1e-300)) - math.log(delta)

    return float(optimize.brentq(excess, 0.0, mu * mu / 2 + 40 * mu, rtol=1e-12))


def responses_epsilon(costs: Mapping[float, int], delta: float) -> float | None:
    """Return epsilon of pure releases from all sums of their losses; None if there are too many.

    Every epsilon-DP release follows from randomised response (Kairouz, Oh and Viswanath 2015), with
    the loss epsilon with probability 1/(1 + e^-epsilon), else -epsilon.
    """
    losses, mass = np.zeros(1), np.ones(1)
    for cost, times in costs.items():
        if len(losses) * (times + 1) > _SUMS:
            return None
        yes = np.arange(times + 1, dtype=np.float64)
        chance = _binomial(yes, times, float(special.expit(cost)))
        losses = np.add.outer(losses, cost * (2.0 * yes - times)).ravel()
        mass = np.multiply.outer(mass, chance).ravel()

    def excess(epsilon: float) -> float:
        above = losses > epsilon
        return float(mass[above] @ -np.expm1(epsilon - losses[above])) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, float(losses.max()), rtol=1e-12))


def _binomial(times: Array, rounds: int, rate: float) -> Array:
    ways = special.gammaln(rounds + 1.0) - special.gammaln(times + 1.0)
    ways -= special.gammaln(rounds - times + 1.0)
    log = ways + special.xlogy(times, rate) + special.xlog1py(rounds - times, -rate)
    return np.asarray(np.exp(log))


def amplified(epsilon: float, how: str, rate: float, relation: str) -> float:
    """Return what an epsilon-DP release costs after hidden sampling; `how` is "" for none.

    Poisson: the laws with and without the client are within e^epsilon, so a mixture of weight q is
    within 1 + q (e^epsilon - 1). Fixed size under replace: the client drawn instead is a
    replacement, so all laws are within e^(2 epsilon) of each other.
    """
    whole = 2 * epsilon if relation == "replace" else epsilon
    if how == "poisson":
        up = _log_mean(epsilon, rate)
        return up if relation == "zero_out" else min(whole, up - _log_mean(-epsilon, rate))
    return _log_mean(whole, rate) if how == "fixed" and relation == "replace" else whole


def _log_mean(exponent: float, rate: float) -> float:
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))


# What the events come to.


def _costs(account: Account) -> Counter[float]:
    """Count the mu of one Gaussian round of a client that takes part."""
    costs: Counter[float] = Counter()
    for event, times in account.events:
        if event["event"] == "gaussian":
            costs[account.shift(event) / event["noise_multiplier"]] += times
    return costs


def _pure(account: Account) -> Counter[float]:
    """Count the epsilons of pure releases, amplified by hidden sampling."""
    costs: Counter[float] = Counter()
    for event, times in account.events:
        if event["event"] == "laplace":
            how, rate = account.hides, account.rate
            costs[amplified(event["epsilon"], how, rate, account.relation)] += times
    return costs


def _mu(account: Account) -> float:
    return math.sqrt(math.fsum(times * mu * mu for mu, times in _costs(account).items()))


def _gaussian(account: Account) -> Span:
    if account.rate == 1:
        found = gaussian_epsilon(_mu(account), account.delta)
        return Span(found, found)
    seen = _visible(account)
    if not account.hides:
        return seen
    found = _on_grid(account).low
    if account.hides == "poisson" and account != _reversed(account):
        # Two further bounds hold where a message cannot be reversed; the least counts.
        found = min(found, seen.low, _on_grid(replace(account, kind="fixed")).low)
    return Span(found, max(found, seen.high) if account.delta < _SMALL else found)


def _visible(account: Account) -> Span:
    """Return epsilon of Gaussian rounds with a visible cohort."""
    costs = _costs(account)
    mu, rounds = max(costs), sum(costs.values())
    most = mixture_epsilon(mu, rounds, account.rate, account.delta)
    if len(costs) == 1:
        return Span(most, most)
    found = _on_grid(account.seen)
    return Span(found.low, min(found.high, most))


def _mixed(account: Account) -> Span:
    """Return epsilon of unlike releases: composed, or with the epsilons of pure ones added."""
    pure = _pure(account)
    rest = tuple(part for part in account.events if part[0]["event"] != "laplace")
    added = math.fsum(epsilon * times for epsilon, times in pure.items())
    if account.delta == 0:
        return Span(math.inf, math.inf) if rest else Span(added, added)
    exact = None if rest else responses_epsilon(pure, account.delta)
    if exact is not None:
        return Span(exact, exact)
    found = _on_grid(account)
    if not pure:
        return found
    apart = recompute(replace(account, events=rest))
    return Span(min(found.low, added + apart.low), min(found.high, added + apart.high))


def _on_grid(account: Account) -> Span:
    """Return epsilon by privacy loss distributions; below some delta, only bounded from below."""
    delta = max(account.delta, _SMALLEST)
    losses = _composed(_losses(account))
    found = float(losses.get_epsilon_for_delta(delta))
    if _UNDERFLOW < found < math.inf:
        found = float(
            optimize.brentq(lambda e: losses.get_delta_for_epsilon(e) - delta, 0.0, found + 1)
        )
    return Span(found, found if delta == account.delta else math.inf)


# Privacy loss distributions of dp-accounting; imported late, since most runs need none.


@dataclass(frozen=True, eq=False)
class _Loss:
    """The privacy loss of one release: its distribution on a grid of a given step.

    `spread` is its standard deviation, roughly, and `largest` about the largest loss.
    """

    on: Callable[[float], Any]
    spread: float
    largest: float


def _composed(losses: Sequence[tuple[_Loss, int]]) -> Any:
    """Compose releases on one grid that is fine against the loss of an average release."""
    rounds = sum(times for _, times in losses)
    spread = math.sqrt(math.fsum(times * loss.spread**2 for loss, times in losses) / rounds)
    step = max(spread / _FINENESS, max(loss.largest for loss, _ in losses) / _POINTS)
    if step > _COARSEST:
        raise ValueError(f"losses of {step * _POINTS:.3g} are too large for a grid")
    with np.errstate(over="ignore"):  # in the library's bound on tails
        parts = [
            loss.on(step).self_compose(times, tail_mass_truncation=1e-18) for loss, times in losses
        ]
    return reduce(lambda one, other: one.compose(other, tail_mass_truncation=1e-18), parts)


def _losses(account: Account) -> list[tuple[_Loss, int]]:
    """Return the losses of all releases."""
    found = [(_response(cost), times) for cost, times in _pure(account).items()]
    for event, times in account.events:
        if event["event"] == "wishart":
            if account.relation == "replace":
                raise ValueError("no account of Wishart noise is known under replace")
            found.append((_wishart(event["degrees"], event["ratio"]), times))
    if account.rate == 1:
        return [*found, (_shown(mu, 1.0), 1)] if (mu := _mu(account)) else found
    for mu, times in _merged(_costs(_reversed(account))).items():
        found.append((_sampled(account, mu), times))
    return found


def _reversed(account: Account) -> Account:
    """Let every message be reversed under Poisson sampling and replace, as its bound assumes."""
    if account.hides != "poisson" or account.relation == "zero_out":
        return account
    worst = [(dict(e, replaced=2.0) if "replaced" in e else e, n) for e, n in account.events]
    return replace(account, events=tuple(worst))


def _merged(costs: Counter[float]) -> Counter[float]:
    """Merge costs within 5 % of each other where there are many, keeping the sum of squares."""
    if len(costs) <= _KINDS:
        return costs
    bins: dict[int, list[float]] = {}
    for mu, times in costs.items():
        whole = bins.setdefault(round(math.log(mu) / 0.05), [0.0, 0])
        whole[0] += times * mu * mu
        whole[1] += times
    return Counter({math.sqrt(square / n): int(n) for square, n in bins.values()})


def _sampled(account: Account, mu: float) -> _Loss:
    """Return the loss of one Gaussian round in which a client takes part at some rate."""
    if not account.hides:
        return _shown(mu, account.rate)
    if account.hides == "poisson":
        return _poisson(mu, account.rate, account.relation)
    if account.relation == "zero_out":
        raise ValueError("no amplification by a hidden cohort of fixed size is known for zero_out")
    return _fixed(mu, account.rate)


def _poisson(mu: float, rate: float, relation: str) -> _Loss:
    """Return the loss of a hidden Poisson cohort, as dp-accounting has it.

    Under REPLACE_ONE the library doubles the sensitivity itself.
    """

    def on(step: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as pld
        from dp_accounting.privacy_accountant import NeighboringRelation as Relation

        doubled = relation == "replace"
        return pld.from_gaussian_mechanism(
            (2 if doubled else 1) / mu,
            sampling_prob=rate,
            neighboring_relation=Relation.REPLACE_ONE if doubled else Relation.ADD_OR_REMOVE_ONE,
            value_discretization_interval=step,
        )

    return _Loss(on, _spread(mu, rate), _log_mean(mu * mu / 2 + 10 * mu, rate))


def _shown(mu: float, rate: float) -> _Loss:
    """Return the loss of a Gaussian round where it is visible whether the client takes part."""

    def profile(epsilon: Array) -> Array:
        away = (1 - rate) * -np.expm1(np.minimum(epsilon, 0.0))
        return rate * gaussian_delta(epsilon, mu) + away

    largest = mu * mu / 2 + 12 * mu
    return _Loss(_symmetric(profile, largest), mu * math.sqrt(rate), largest)


def _fixed(mu: float, rate: float) -> _Loss:
    """Return the loss of a hidden cohort of fixed size under replace.

    Advanced joint convexity (Balle, Barthe and Gaboardi 2018); below 0 by symmetry.
    """

    def profile(epsilon: Array) -> Array:
        size = np.abs(epsilon)
        inner = np.log1p(np.expm1(np.minimum(size, 700.0)) / rate)
        inner = np.where(size > 700, size - math.log(rate), inner)
        delta = rate * gaussian_delta(inner, mu)
        return np.where(epsilon >= 0, delta, -np.expm1(-size) + np.exp(-size) * delta)

    largest = _log_mean(mu * mu / 2 + 12 * mu, rate)
    return _Loss(_symmetric(profile, largest), _spread(mu, rate), largest)


def _spread(mu: float, rate: float) -> float:
    return rate * math.sqrt(math.expm1(min(mu * mu, 1.0)))


def _response(cost: float) -> _Loss:
    """Return the loss of randomised response, from which every pure release follows.

    Kairouz, Oh and Viswanath 2015.
    """

    def profile(epsilon: Array) -> Array:
        inside = -np.expm1(np.minimum(epsilon - cost, 0.0)) / (1 + math.exp(-cost))
        return np.where(epsilon <= -cost, -np.expm1(np.minimum(epsilon, 0.0)), inside)

    return _Loss(_symmetric(profile, cost), cost, cost)


def _wishart(degrees: int, ratio: float) -> _Loss:
    """Return the loss of `ratio` + chi2 against chi2, and the other way round.

    The likelihood ratio of y is (1 - r/y)^((k-2)/2) e^(r/2), and 0 below r: a threshold test is
    optimal in both directions.
    """
    half, k = ratio / 2, max(degrees - 2, 1e-9)

    def below(y: Array) -> Array:
        return np.asarray(special.gammainc(degrees / 2, np.maximum(y, 0.0) / 2))

    def above(y: Array) -> Array:
        return np.asarray(special.gammaincc(degrees / 2, np.maximum(y, 0.0) / 2))

    def add(epsilon: Array) -> Array:
        with np.errstate(over="ignore", divide="ignore"):
            t = ratio / -np.expm1(-2 * np.maximum(epsilon + half, 0.0) / k)
            found = below(t) - np.exp(np.minimum(epsilon, 700.0)) * below(t - ratio)
        return np.where(epsilon <= -half, -np.expm1(np.minimum(epsilon, 0.0)), found)

    def remove(epsilon: Array) -> Array:
        with np.errstate(over="ignore", divide="ignore"):
            t = ratio / -np.expm1(2 * np.minimum(epsilon - half, 0.0) / k)
            found = above(t - ratio) - np.exp(np.minimum(epsilon, half)) * above(t)
        return np.where(epsilon >= half, 0.0, found)

    def quantile(mass: float) -> float:
        return 2 * float(special.gammaincinv(degrees / 2, mass))

    impossible = float(below(np.array(ratio)))
    near = quantile(min(1.0, impossible + max(1e-16, 1e-6 * impossible)))
    high = k / 2 * math.log(near / max(near - ratio, 1e-300)) - half
    far = quantile(1e-13)
    low = k / 2 * math.log(max(far, 1e-300) / (far + ratio)) + half

    def on(step: float) -> Any:
        from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

        return Pld(_pmf(remove, low, half, step), _pmf(add, -half, max(high, 0.0), step))

    largest = max(high, -low, half)
    return _Loss(on, min(ratio / math.sqrt(2 * degrees), largest), largest)


def _symmetric(profile: Profile, largest: float) -> Callable[[float], Any]:
    def on(step: float) -> Any:
        from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pld

        return Pld(_pmf(profile, -largest, largest, step))

    return on


def _pmf(profile: Profile, low: float, high: float, step: float) -> Any:
    """Return the distribution of losses whose deltas meet a profile on the grid, and lie above."""
    from dp_accounting.pld import pld_pmf

    first, last = math.floor(low / step), math.ceil(high / step)
    deltas = np.clip(profile(step * np.arange(first, last + 1, dtype=np.float64)), 0.0, 1.0)
    deltas = np.minimum.accumulate(deltas)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, first, last, deltas)


# The best of several runs.


@dataclass(frozen=True)
class Choice:
    """A run that was chosen among several: candidates, a score, the law of their number.

    With e(a) the Renyi divergence of order a of one run with its score, K runs of the truncated
    negative binomial law (shape eta, parameter gamma), and any orders a, b > 1, an adversary who
    observes only the best run is guaranteed

        e(a) + (1 + eta) [(1 - 1/b) e(b) + log(1/gamma) / b] + log(E[K]) / (a - 1)

    (Papernot and Steinke 2022, Theorem 2); epsilon at delta follows for every a (Canonne, Kamath
    and Steinke 2020, Proposition 12).
    """

    candidates: Sequence[Sequence[Event]]
    score: Event
    mean: float
    eta: float
    account: Account

    def epsilon(self) -> float:
        """Return epsilon against an adversary who observes only the chosen run."""
        one, delta = self._divergence, self.account.delta
        gamma = parameter(self.mean, self.eta)
        extra = (1 + self.eta) * _least(lambda b: (1 - 1 / b) * one(b) - math.log(gamma) / b)

        def bound(a: float) -> float:
            spread = (math.log(self.mean) - math.log(delta * a)) / (a - 1)
            return one(a) + extra + spread + math.log1p(-1 / a)

        return max(0.0, _least(bound))

    def span(self) -> Span:
        """Return where a stated bound may lie, which is computed on a grid of orders."""
        found = self.epsilon()
        return Span(found, found * _COARSE)

    def _divergence(self, order: float) -> float:
        """Return the divergence of one run with its score, of the candidate that costs most."""
        return max(
            math.fsum(event["rounds"] * self._one(event, order) for event in (*events, self.score))
            for events in self.candidates
        )

    def _one(self, event: Event, order: float) -> float:
        who, noise = self.account, float(event["noise_multiplier"])
        whole = order * (order - 1) * (who.shift(event) / noise) ** 2 / 2
        seen = whole if who.rate == 1 else _log_mean(whole, who.rate)
        if who.hides == "poisson":
            seen = min(seen, _moment(order, who.rate, noise, who.relation))
        return seen / (order - 1)


def parameter(mean: float, eta: float) -> float:
    """Return gamma, at which the truncated negative binomial law of this shape has this mean."""

    def excess(log: float) -> float:
        gamma = math.exp(log)
        if eta == 0:
            return math.log((1 / gamma - 1) / -log) - math.log(mean)
        return math.log(eta * (1 / gamma - 1) / -math.expm1(eta * log)) - math.log(mean)

    return math.exp(float(optimize.brentq(excess, -40.0, -1e-9, xtol=1e-14)))


@lru_cache(maxsize=4096)
def _moment(order: float, rate: float, noise: float, relation: str) -> float:
    """Return log E_Q (P/Q)^a of a Poisson-sampled Gaussian, by quadrature in pieces.

    P = (1 - q) N(0) + q N(1) against Q = N(0), or against (1 - q) N(0) + q N(-1) under replace;
    the integrand lies between -1 and 2 a, and changes within z and z^2.
    """
    nodes, weights = np.polynomial.legendre.leggauss(32)
    low, high = -1 - 14 * noise, 2 * order + 14 * noise
    pieces = math.ceil((high - low) / min(2 * noise, 4 * noise * noise))
    if pieces > 20_000:
        return math.inf
    edges = np.linspace(low, high, pieces + 1)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    x = edges[:-1, None] + half * (1 + nodes)
    stay, come, square = math.log1p(-rate), math.log(rate), 2 * noise * noise
    terms = -x * x / square - math.log(noise * math.sqrt(2 * math.pi))
    terms += order * np.logaddexp(stay, come + (2 * x - 1) / square)
    if relation == "replace":
        terms += (1 - order) * np.logaddexp(stay, come - (2 * x + 1) / square)
    return max(0.0, float(special.logsumexp(terms + np.log(half * weights))))


def _least(bound: Callable[[float], float]) -> float:
    """Return the minimum over orders above 1: on a grid first, then around its best point."""

    def at(log: float) -> float:
        return bound(1 + math.exp(log))

    coarse = np.linspace(math.log(0.02), math.log(2047.0), 41)
    best = float(coarse[int(np.argmin([at(log) for log in coarse]))])
    step = float(coarse[1] - coarse[0])
    found = optimize.minimize_scalar(at, bounds=(best - step, best + step), method="bounded")
    return min(float(found.fun), at(best))
