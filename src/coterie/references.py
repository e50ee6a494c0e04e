"""What stands beside a run: learning alone, and what could be had without privacy. Not private.

- `local`: every client alone, its penalty by its own leave-one-out (`methods.local`)
- `local*`: alone, with one penalty for all clients (`methods.local_star`): a stronger opponent than
  any honest client has
- pooled: one model on all rows in one place (`methods.pooled`)
- mixed: the mixed model without privacy: private empirical Bayes at epsilon = inf, which tells
  what the budget costs

Each is compared with the run client by client, on the same test rows: over clients k with test
rows, d_k = own error under the run - own error under the reference; their mean, its standard error
s / sqrt(clients), and t, the one over the other. Below 0 the run is better. The share of clients
with d_k > 0 says who pays for the average.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from coterie.data.federated import DataError, FederatedDataset
from coterie.engine.simulate import Speed, simulate
from coterie.methods.base import Method, Shape, registered
from coterie.methods.local_star import LocalStar
from coterie.methods.pooled import PooledLinear
from coterie.models import Linear, Model
from coterie.newcomers import score_alone
from coterie.plan import Plan, Privacy
from coterie.rng import Rng
from coterie.scores import Array, Score, evaluate
from coterie.summary import json_number
from coterie.tree import size

Which = Literal["auto", "all", "local", "none"]

MOST_WORK = 1e10
"""The most products, about 10 s of a core, that a reference may take unasked."""
_SOLVES = {"local_star": 25, "pooled": 7}
"""Exact solves that a reference takes, one for each penalty; the mixed model: one a round."""

TITLES = {"local": "local", "local_star": "local*", "pooled": "pooled", "mixed": "mixed model"}
"""What tables call them."""
LABELS = {
    "local": "every client alone, its penalty chosen on its own rows",
    "local_star": "stronger than any honest client has: tuned over all clients non-privately",
    "pooled": "one model for everybody on all rows in one place: not private",
    "mixed": "the mixed model without privacy: all that a budget could buy",
}
PROMISE = "The promise is an average over clients, not one per client."
"""Said wherever references are shown, whatever they say."""
_CLEAR = 2.0
"""Standard errors from which on a difference is called one."""
_HARDLY = 0.05
"""A share of clients that is called hardly any change."""
_FREE = Privacy(epsilon=math.inf)


@dataclass(frozen=True)
class Paired:
    """How clients fare under a run, each against itself under something else.

    Attributes:
        difference: The mean over clients with test rows of own error less that under the other;
            not a number where an error is not finite.
        standard_error: Of that mean, over clients.
        worse: The share of clients whose error is larger than under the other.
    """

    difference: float
    standard_error: float
    worse: float

    @property
    def t(self) -> float:
        """The difference in standard errors; 0 where nobody differs."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.standard_error if self.standard_error > 0 else math.nan

    @classmethod
    def of(cls, run: Score, other: Score) -> "Paired":
        """Compare two scores on the same test rows, client by client."""
        known = run.rows > 0
        if not known.any():
            return cls(math.nan, math.nan, math.nan)
        ours, theirs = run.clients[known], other.clients[known]
        # An error that is not a number is no smaller than any other.
        worse = float((~(ours <= theirs) & ~np.isnan(theirs)).mean())
        with np.errstate(invalid="ignore"):
            apart = ours - theirs
        if not np.isfinite(apart).all():
            return cls(math.nan, math.nan, worse)
        count = len(apart)
        error = float(apart.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(apart.mean()), error, worse)


@dataclass(frozen=True)
class References:
    """What was scored beside a run, by name, and why the rest was not.

    Attributes:
        scores: By name, in the order of `TITLES`.
        missing: Sentences.
    """

    scores: Mapping[str, Score]
    missing: tuple[str, ...] = ()

    @property
    def local(self) -> Score | None:
        """Learning alone; None where it was not scored."""
        return self.scores.get("local")

    def told(self, score: Score) -> list[dict[str, Any]]:
        """Return what a summary says of them beside a run of this score; strict JSON."""
        strong = self.scores.get("local_star")
        return [_told(name, other, score, strong) for name, other in self.scores.items()]

    def errors(self) -> dict[str, Array]:
        """Return each client's own error by column of the metrics; that of `local` is there."""
        named = {name: other.clients for name, other in self.scores.items() if name != "local"}
        return {f"error_{name}": errors for name, errors in named.items()}


def _told(name: str, other: Score, score: Score, strong: Score | None) -> dict[str, Any]:
    paired = Paired.of(score, other)
    than_strong = math.nan if strong is None else Paired.of(other, strong).worse
    return {
        "name": name,
        "label": LABELS[name],
        # Of learning alone: its score is as bare of noise as the others'.
        "releases_nothing": name == "local",
        "value": json_number(other.value),
        "standard_error": json_number(other.standard_error),
        "difference": json_number(paired.difference),
        "difference_standard_error": json_number(paired.standard_error),
        "t": json_number(paired.t),
        "share_worse_off": json_number(paired.worse),
        "share_worse_than_local_star": json_number(than_strong),
    }


def verdict(references: Sequence[Mapping[str, Any]]) -> str:
    """Say in a sentence whether joining paid on average, and how many it did not pay for.

    Args:
        references: As a summary tells of them; compared with `local`, which every client could
            have had, and then with `local*`, which none could.
    """
    by_name = {told["name"]: told for told in references if told.get("t") is not None}
    strong = _against_strong(by_name)
    if "local" not in by_name:
        return strong
    t, share = (float(by_name["local"][key]) for key in ("t", "share_worse_off"))
    found = "pays on average"
    if t > -_CLEAR:
        found = "did not pay on average" if t > _CLEAR else "made no clear difference on average"
        found += f" (t = {t:.1f} over clients)"
    told = f"Joining {found}: {_percent(share)} of clients would have done better alone (local)."
    return f"{told} {strong}".strip()


def _against_strong(by_name: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how many fare worse than under what no client could have had by itself, if known."""
    if "local_star" not in by_name:
        return ""
    t, share = (float(by_name["local_star"][key]) for key in ("t", "share_worse_off"))
    how = "is better" if t < -_CLEAR else "is worse" if t > _CLEAR else "makes no clear difference"
    free = by_name.get("mixed", {}).get("share_worse_than_local_star")
    more = ""
    if free is not None and t < -_CLEAR:
        hardly = "and more budget hardly changes that: without any privacy it is"
        more = hardly if abs(share - free) <= _HARDLY else "and without any privacy it would be"
        more = f", {more} {_percent(free)}"
    return (
        f"Against local*, which no client could have had, joining {how} on average (t = {t:.1f}): "
        f"{_percent(share)} of clients fare worse{more}."
    )


def verdicts(references: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Say of several runs, by their labels, whether joining paid; then what a promise this is."""
    told = {label: verdict(beside) for label, beside in references.items()}
    for label, text in told.items():
        if text:
            yield text if len(told) == 1 else f"{label}: {text}"
    if any(references.values()):
        yield PROMISE


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def score_references(
    method: Method,
    train: FederatedDataset,
    test: FederatedDataset,
    *,
    score: Score,
    which: Which = "auto",
    private: bool = True,
    seed: int = 0,
    speed: Speed | None = None,
) -> References:
    """Score what stands beside a finished run; what fails is left out with a note: runs are paid.

    Args:
        method: The run's.
        train: Its training rows.
        test: Rows of the same clients, held out.
        score: The run's own, which is that of `local` where nothing is shared.
        which: "all", "local" or "none"; "auto" is all that do not take long, for linear models
            beside a method that shares something, else `local`.
        private: Whether the run had a budget; one without is not compared with itself.
        seed: Of what is drawn.
        speed: Block size and device.
    """
    if which == "none":
        return References({})
    asked: dict[str, Callable[[], Score]] = {"local": lambda: score}
    if method.shape is not Shape.NONE:
        asked["local"] = partial(score_alone, method, train, test, seed=seed, speed=speed)
    missing = []
    for name, other in _others(method, private, which):
        if why := _left_out(name, other, train, which):
            missing.append(why)
        else:
            asked[name] = partial(_score, other, train, test, seed, speed)
    return _attempt(asked, tuple(missing))


def _attempt(asked: Mapping[str, Callable[[], Score]], missing: tuple[str, ...]) -> References:
    found: dict[str, Score] = {}
    for name, make in asked.items():
        try:
            found[name] = make()
        except DataError:  # its text names clients and columns, which are for their owner
            missing = (*missing, f"{TITLES[name]} is left out: the rows are not scaled for it")
        except Exception as error:  # whatever it is: the run is done and paid for
            why = f"{type(error).__name__}: {error}"
            missing = (*missing, f"{TITLES[name]} could not be computed ({why})")
    return References(found, missing)


def _others(method: Method, private: bool, which: Which) -> Iterator[tuple[str, Method]]:
    """Return the references that need all clients, by name; a run is not one to itself."""
    if which == "local" or (which == "auto" and method.shape is Shape.NONE):
        return
    if method.kind != LocalStar.kind:
        yield "local_star", LocalStar(model=method.model)
    if method.kind != PooledLinear.kind:
        yield "pooled", PooledLinear(model=method.model)
    mixed: Any = registered().get("pfeb")
    if method.kind != "pfeb":
        if mixed is not None:
            yield "mixed", mixed(model=method.model)
    elif private:
        yield "mixed", method


def _left_out(name: str, method: Method, train: FederatedDataset, which: Which) -> str:
    """Say why a reference is not computed; nothing where it is."""
    if not isinstance(method.model, Linear):
        kind = type(method.model).__name__
        return f"{TITLES[name]} is left out: it is of linear models, and this is {kind}"
    work = _SOLVES.get(name, method.rounds(train.spec).without_noise) * _products(
        train, method.model
    )
    if which == "all" or work <= MOST_WORK:
        return ""
    return (
        f"{TITLES[name]} is left out, as it would take long: about {work:.0e} products, of which "
        f'{MOST_WORK:.0e} are computed unasked (references = "all" asks)'
    )


def _products(train: FederatedDataset, model: Model) -> float:
    """Count the products of one exact solve of all clients, about: curvatures and their inverses.

    A curvature of n rows and k numbers is n k^2 products, and its inverse no more for the smaller
    of n and k; the numbers of all classes are solved together, those of labels one label at a time.
    """
    spec, rows = train.spec, float(train.offsets[-1])
    numbers = size(model.init(spec, Rng.seeded(0)))
    if spec.task == "multiclass":
        return rows * numbers**2 + spec.clients * float(numbers) ** 3
    return rows * numbers**2 / spec.outputs


def _score(
    method: Method,
    train: FederatedDataset,
    test: FederatedDataset,
    seed: int,
    speed: Speed | None,
) -> Score:
    """Score a method without privacy, with as many rounds as it takes."""
    settled = method.resolve(train.spec, n_mu=math.inf, cohort=len(train))
    rounds = settled.rounds(train.spec).without_noise
    plan = Plan(method=settled, privacy=_FREE, rounds=rounds, simulation_seed=seed)
    return evaluate(settled.model, simulate(plan, train, speed=speed).rows, test)
