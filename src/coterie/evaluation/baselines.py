"""Baselines of a run: local training, and what could be had without privacy. Not private.

- `local`: each client trains by itself, its penalty by its own leave-one-out (`methods.baselines`)
- `local_star`: local training with one penalty for all clients (`methods.baselines`)
- `centralised`: one model on all rows in one place (`methods.baselines`)
- `mixed`: the mixed model without privacy: private empirical Bayes at epsilon = inf

`local` is scored with every run, the others on request. Each is compared with the run client by
client on the same test rows: d_k = own error under the run - own error under the baseline. The
comparison has the mean of d_k, its standard error s / sqrt(clients), their ratio t, and the share
of clients with d_k > 0. Below 0 the run is better. This module does not import torch until a
baseline is scored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.evaluation.metrics import Array, Score, json_number
from coterie.evaluation.verdict import of_summary

if TYPE_CHECKING:
    from coterie.data.federated import FederatedDataset
    from coterie.methods.base import Method
    from coterie.planning.plan import Speed

TITLES = {
    "local": "local",
    "local_star": "local*",
    "centralised": "centralised",
    "mixed": "mixed model",
}
"""All baselines, by name: their names in tables."""
DESCRIPTIONS = {
    "local": "each client trains on its own rows only",
    "local_star": "local training tuned over all clients without privacy; no client can have it",
    "centralised": "one model trained on all rows in one place, without privacy",
    "mixed": "the method pfeb without noise, as if the budget had no limit",
}
PROMISE = "Gains are averages over clients; no single client is promised a gain."
"""Printed with every comparison with baselines."""


def check_baselines(names: Sequence[str]) -> None:
    """Raise a ValueError for an unknown baseline."""
    for name in names:
        if name not in TITLES:
            known = ", ".join(TITLES)
            raise ValueError(f"baselines: {name!r} is unknown; expected one of {known}")


@dataclass(frozen=True)
class Paired:
    """The paired comparison of a run with a baseline, client by client.

    Attributes:
        difference: The mean over clients with test rows of own error under the run minus own error
            under the baseline; not a number where an error is not finite.
        standard_error: Of that mean, over clients.
        worse: The share of clients whose error is larger under the run.
        better: The share of clients whose error is smaller under the run.
    """

    difference: float
    standard_error: float
    worse: float
    better: float

    @property
    def t(self) -> float:
        """The difference in standard errors; 0 where no client differs."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.standard_error if self.standard_error > 0 else math.nan

    @classmethod
    def of(cls, run: Score, other: Score) -> "Paired":
        """Return the comparison of two scores on the same test rows."""
        known = run.rows > 0
        return cls.between(run.clients[known], other.clients[known])

    @classmethod
    def between(cls, ours: Array, theirs: Array) -> "Paired":
        """Return the comparison of clients' own errors under a run and under a baseline."""
        count = len(ours)
        if not count:
            return cls(math.nan, math.nan, math.nan, math.nan)
        # An error that is not a number is not smaller than any other.
        worse = float((~(ours <= theirs) & ~np.isnan(theirs)).mean())
        better = float((ours < theirs).mean())
        with np.errstate(invalid="ignore"):
            apart = ours - theirs
        if not np.isfinite(apart).all():
            return cls(math.nan, math.nan, worse, better)
        error = float(apart.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(apart.mean()), error, worse, better)


@dataclass(frozen=True)
class Baselines:
    """The scores of baselines by name, and sentences on those that could not be scored."""

    scores: Mapping[str, Score]
    missing: tuple[str, ...] = ()

    @property
    def local(self) -> Score | None:
        """The local baseline; None where it was not scored."""
        return self.scores.get("local")

    def to_json(self, score: Score) -> list[dict[str, Any]]:
        """Return the comparisons with a run of this score as strict JSON."""
        return [self._one(name, other, score) for name, other in self.scores.items()]

    def _one(self, name: str, other: Score, score: Score) -> dict[str, Any]:
        paired, strong = Paired.of(score, other), self.scores.get("local_star")
        than_strong = math.nan if strong is None else Paired.of(other, strong).worse
        return {
            "name": name,
            "label": DESCRIPTIONS[name],
            "releases_nothing": name == "local",
            "value": json_number(other.value),
            "standard_error": json_number(other.standard_error),
            "difference": json_number(paired.difference),
            "difference_standard_error": json_number(paired.standard_error),
            "t": json_number(paired.t),
            "share_worse_off": json_number(paired.worse),
            "share_better_off": json_number(paired.better),
            "share_worse_than_local_star": json_number(than_strong),
        }

    def errors(self) -> dict[str, Array]:
        """Return each client's own error, by column of metrics.parquet, without `local`."""
        named = {name: other.clients for name, other in self.scores.items() if name != "local"}
        return {f"error_{name}": errors for name, errors in named.items()}


def verdict(result: Mapping[str, Any]) -> str:
    """Return how a run compares with `local` and with `local*`, from its summary."""
    said = []
    for name, title in (("local", "local training"), ("local_star", TITLES["local_star"])):
        found = of_summary(result, name, title)
        if found is None:
            continue
        free: Mapping[str, Any] = next(
            (one for one in result["references"] if one["name"] == "mixed"), {}
        )
        share = free.get("share_worse_than_local_star")
        more = "" if share is None or name == "local" else f" (without privacy, {_percent(share)})"
        said.append(f"{found.compared()}{more}.")
    return " ".join(said)


def verdicts(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Return the verdicts of several runs, by their labels, and what an average promises."""
    said = {label: verdict(one) for label, one in results.items()}
    for label, text in said.items():
        if text:
            yield text if len(said) == 1 else f"{label}: {text}"
    if any(one.get("references") for one in results.values()):
        yield PROMISE


def _percent(share: float) -> str:
    return f"{100 * float(share):.0f} %"


def score_baselines(
    method: "Method",
    train: "FederatedDataset",
    test: "FederatedDataset",
    *,
    score: Score,
    names: Sequence[str] = ("local",),
    private: bool = True,
    seed: int = 0,
    speed: "Speed | None" = None,
) -> Baselines:
    """Return the scores of baselines (`TITLES`) of a run of this method and score.

    One that fails is left out with a note, and never loses the run. A run is not a baseline of
    itself; a `private` run of a method may be compared with the same method without privacy.
    """
    from coterie.data.federated import DataError
    from coterie.methods.base import Shape

    scores: dict[str, Score] = {}
    missing: list[str] = []
    for name in (one for one in TITLES if one in names):
        try:
            if name == "local" and method.shape is Shape.NONE:
                scores[name] = score
            elif name == "local":
                scores[name] = score_local(method, train, test, seed=seed, speed=speed)
            elif (other := _baseline(name, method, private)) is not None:
                scores[name] = _score(other, train, test, seed, speed, linear=True)
        except _NotLinearError as error:
            missing.append(f"{TITLES[name]} is left out: {error}")
        except DataError:  # its text names clients and columns, which are for their owner
            missing.append(f"{TITLES[name]} is left out: the rows are not scaled for it")
        except Exception as error:  # the run is done and paid for
            missing.append(
                f"{TITLES[name]} could not be computed ({type(error).__name__}: {error})"
            )
    return Baselines(scores, tuple(missing))


class _NotLinearError(Exception):
    """The baseline is defined for linear models only."""


def _baseline(name: str, method: "Method", private: bool) -> "Method | None":
    """Return the method of a baseline; None where the run is that baseline itself."""
    from coterie.methods.base import registered
    from coterie.models.linear import plain

    kind = {"local_star": "local_star", "centralised": "pooled", "mixed": "pfeb"}[name]
    make: Any = registered().get(kind)
    if make is None or (method.kind == kind and not (name == "mixed" and private)):
        return None
    return method if method.kind == kind else make(model=plain(method.model))


def score_local(
    method: "Method",
    train: "FederatedDataset",
    test: "FederatedDataset",
    *,
    seed: int = 0,
    speed: "Speed | None" = None,
) -> Score:
    """Return the score of local training, see `local_method`."""
    return _score(local_method(method), train, test, seed, speed, linear=False)


def _score(
    method: "Method",
    train: "FederatedDataset",
    test: "FederatedDataset",
    seed: int,
    speed: "Speed | None",
    *,
    linear: bool,
) -> Score:
    """Return the score of a method without privacy; a linear one has the rounds that it needs."""
    from coterie.engine.simulate import simulate
    from coterie.evaluation.score import evaluate
    from coterie.models.linear import is_linear
    from coterie.planning.plan import Plan, Privacy

    rounds = 1
    if linear:
        if not is_linear(method.model):
            kind = type(method.model).__name__
            raise _NotLinearError(f"it needs a linear model, and this is {kind}")
        method = method.resolve(train.spec, n_mu=math.inf, cohort=len(train))
        rounds = method.rounds(train.spec).without_noise
    free = Privacy(epsilon=math.inf)
    plan = Plan(method=method, privacy=free, rounds=rounds, simulation_seed=seed)
    return evaluate(method.model, simulate(plan, train, speed=speed, progress=False).rows, test)


def local_method(method: "Method") -> "Method":
    """Return local training as the method defines it, or with the method's model and step size."""
    from coterie.methods.baselines import Local
    from coterie.solvers.sgd import SGD

    if (own := method.baselines().local) is not None:
        return own
    # Finetuning has steps of its own; training uses those of the base method.
    steps = getattr(getattr(method, "base", method), "sgd", SGD())
    usual = Local(model=method.model)
    return replace(usual, sgd=replace(steps, epochs=usual.sgd.epochs, steps=None))
