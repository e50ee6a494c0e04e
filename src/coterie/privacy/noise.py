"""Kinds of noise: from a budget to the mechanism of every round.

A method says what shape it needs posted, a plan what may be spent; the kind of noise turns both
into mechanisms, calibrated so that the ledger's account of all rounds together meets the budget.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from coterie.privacy.accounting import (
    Participation,
    Relation,
    calibrate,
    calibrate_laplace,
    calibrate_wishart,
    default_delta,
)
from coterie.privacy.blocks import Block, BlockSum, check_blocks, replaced_by
from coterie.privacy.events import Gaussian, check_delta
from coterie.privacy.laplace import LaplaceSum
from coterie.privacy.local import LocalGaussianSum
from coterie.privacy.mechanisms import GaussianSum, Mechanism, Shape
from coterie.privacy.moments import SQRT2, GaussianGram, GaussianRows, Squares, WishartGram
from coterie.privacy.published import (
    printed_epsilon,
    printed_sigma,
    rows_to_clients,
    spent_as_printed,
)
from coterie.privacy.views import check_honest


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What noise is asked for.

    Attributes:
        shape: What is posted.
        clip: The bound on a client's contribution; for second moments, on its vector.
        epsilon: The budget of all rounds, or None.
        noise_multiplier: The noise of a round of weight 1, or None.
        delta: Of the budget.
        weights: Of the rounds.
        clients: How many there are.
        participation: Who takes part.
        relation: What neighbours are.
        rows: Where a published proof speaks of single rows: the most rows of a client, and the
            budget is converted (see `published`); None otherwise.
        blocks: How the leaves of a contribution are bounded, each on its own; () for one clip on
            the whole.
    """

    shape: Shape
    clip: float
    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    weights: tuple[float, ...]
    clients: int
    participation: Participation
    relation: Relation
    rows: int | None = None
    blocks: tuple[Block, ...] = ()


class Noise(ABC):
    """A kind of noise."""

    kind: ClassVar[str] = ""
    shapes: ClassVar[tuple[Shape, ...]] = ()
    local: ClassVar[bool] = False
    """Whether clients add the noise themselves: then who takes part is seen."""
    by_block: ClassVar[bool] = False
    """Whether it is made for contributions whose leaves are bounded each on its own."""

    def mechanisms(self, ask: Ask) -> tuple[Mechanism, ...]:
        """Return the mechanism of each round."""
        if ask.shape not in self.shapes:
            names = ", ".join(shape.value for shape in self.shapes)
            raise ValueError(
                f"{self.kind} noise is for posts of shape {names}; this method posts "
                f"{ask.shape.value}: use gaussian noise"
            )
        if not 0 < ask.clip < math.inf:
            raise ValueError(f"clip = {ask.clip}: expected a positive number")
        if ask.epsilon is not None and not 0 < ask.epsilon < math.inf:
            raise ValueError(f"epsilon = {ask.epsilon}: expected a positive number")
        if ask.blocks:
            self._check_blocks(ask)
        return self._make(ask)

    def _check_blocks(self, ask: Ask) -> None:
        names = ", ".join(block.name for block in ask.blocks)
        if not self.by_block:
            raise ValueError(
                f"{self.kind} noise is for contributions under one clip; this method bounds "
                f"{names} each on its own: use gaussian noise, or a method under one clip (pmtl)"
            )
        if ask.shape is not Shape.SUM or ask.rows is not None:
            raise ValueError(
                f"blocks {names} are of sums of whole clients' contributions; got shape "
                f"{ask.shape.value}, rows = {ask.rows}: leave blocks empty"
            )
        check_blocks(ask.blocks)

    @abstractmethod
    def _make(self, ask: Ask) -> tuple[Mechanism, ...]: ...

    def usual_delta(self, clients: int) -> float:
        """Return the delta for which a budget is stated where none is given."""
        return default_delta(clients)

    @classmethod
    def named(cls, kind: str) -> "Noise":
        """Return a kind of noise with its usual settings, by name."""
        kinds = cls.choices()
        if kind not in kinds:
            raise ValueError(f"noise = {kind!r}: expected one of {', '.join(sorted(kinds))}")
        return kinds[kind]()

    @classmethod
    def choices(cls) -> Mapping[str, type["Noise"]]:
        """Return the kinds by name."""
        kinds: tuple[type[Noise], ...] = (
            GaussianNoise,
            LaplaceNoise,
            WishartNoise,
            PrintedWishart,
            LocalNoise,
            PrintedLocal,
        )
        return {kind.kind: kind for kind in kinds}


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Gaussian noise (default): exact accounts, and the least noise of all kinds here."""

    kind: ClassVar[str] = "gaussian"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM, Shape.GRAM, Shape.SQUARES, Shape.ROWS)
    by_block: ClassVar[bool] = True

    def _make(self, ask: Ask) -> tuple[Mechanism, ...]:
        base = ask.noise_multiplier
        if base is None:
            assert ask.epsilon is not None
            check_delta(ask.delta, (Gaussian(1.0),))
            if ask.rows is not None:
                base = rows_to_clients(ask.epsilon, ask.delta, ask.weights, ask.rows)
            else:
                base = calibrate(
                    ask.epsilon,
                    ask.delta,
                    weights=ask.weights,
                    participation=ask.participation,
                    relation=ask.relation,
                    replaced=self._replaced(ask),
                )
        return tuple(self._one(ask, base / weight) for weight in ask.weights)

    def _replaced(self, ask: Ask) -> float:
        if ask.blocks:
            return replaced_by(ask.blocks)
        return SQRT2 if ask.shape in (Shape.GRAM, Shape.SQUARES) else 2.0

    def _one(self, ask: Ask, multiplier: float) -> Mechanism:
        if ask.blocks:
            return BlockSum(ask.blocks, multiplier)
        if ask.shape is Shape.GRAM:
            return GaussianGram(ask.clip, multiplier)
        if ask.shape is Shape.SQUARES:
            return Squares(GaussianSum(ask.clip**2, multiplier))
        if ask.shape is Shape.ROWS:
            return GaussianRows(ask.clip, multiplier, ask.clients)
        return GaussianSum(ask.clip, multiplier)


@dataclass(frozen=True)
class LaplaceNoise(Noise):
    """Laplace noise on sums clipped in l1: a pure epsilon, delta = 0."""

    kind: ClassVar[str] = "laplace"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM, Shape.SQUARES)

    def _make(self, ask: Ask) -> tuple[Mechanism, ...]:
        if ask.noise_multiplier is not None:
            base = 1 / ask.noise_multiplier
        else:
            assert ask.epsilon is not None
            base = calibrate_laplace(
                ask.epsilon,
                ask.delta,
                weights=ask.weights,
                participation=ask.participation,
                relation=ask.relation,
            )
        if ask.shape is Shape.SQUARES:
            return tuple(Squares(LaplaceSum(ask.clip**2, base * w)) for w in ask.weights)
        return tuple(LaplaceSum(ask.clip, base * weight) for weight in ask.weights)

    def usual_delta(self, clients: int) -> float:
        """Return 0: the noise is pure."""
        return 0.0


@dataclass(frozen=True)
class WishartNoise(Noise):
    """Wishart noise on second moments, calibrated by its exact profile; zero_out only.

    Never less noise than Gaussian, to which it tends as `degrees` grow (ADR 14).

    Attributes:
        degrees: nu - d + 1; at least 2, and best above 1000.
    """

    kind: ClassVar[str] = "wishart"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.GRAM,)
    degrees: int = 1000

    def _make(self, ask: Ask) -> tuple[Mechanism, ...]:
        if ask.epsilon is None:
            raise ValueError("wishart noise is calibrated: give epsilon, not noise_multiplier")
        ratio = calibrate_wishart(
            ask.epsilon,
            ask.delta,
            degrees=self.degrees,
            weights=ask.weights,
            participation=ask.participation,
            relation=ask.relation,
        )
        return tuple(
            WishartGram(ask.clip, self.degrees, ask.clip**2 / (ratio * weight))
            for weight in ask.weights
        )


@dataclass(frozen=True)
class PrintedWishart(Noise):
    """The noise that Liang et al. print: a reproduction, NOT A GUARANTEE (see docs/privacy.md).

    The report shows the claimed epsilon beside the true epsilon and delta.

    Attributes:
        sensitivity: "2K" as in their Algorithms 2 and 3, or "K^2" as in Algorithm 1.
    """

    kind: ClassVar[str] = "wishart_paper"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.GRAM,)
    sensitivity: Literal["2K", "K^2"] = "2K"

    def _make(self, ask: Ask) -> tuple[Mechanism, ...]:
        if ask.epsilon is None:
            raise ValueError("wishart_paper noise is made from epsilon; give that")
        budgets = spent_as_printed(ask.epsilon, ask.delta, ask.weights)
        total = math.fsum(budgets)
        made = []
        for budget in budgets:
            printed = WishartGram.paper(budget, bound=ask.clip, sensitivity=self.sensitivity)
            # Each round claims its share of the whole, so that the claims add up to it.
            share = ask.epsilon * budget / total
            made.append(WishartGram(ask.clip, printed.degrees, printed.scale, share, centred=False))
        return tuple(made)


@dataclass(frozen=True)
class LocalNoise(Noise):
    """Gaussian noise that each client adds to its own contribution: private to the server as well.

    A budget is met in the view of the server and of all other clients together, who see who takes
    part: sampling hides nothing, and only makes a client take part in fewer rounds. The posted sum
    carries the noise of a whole cohort.

    Attributes:
        honest: How many clients, the protected one included, are trusted to add their noise in
            every round in which it takes part; only views in which sums alone are seen count on it.
            At most the size of the smallest cohort: that of a fixed size, all where everybody takes
            part, 1 under Poisson sampling.
    """

    kind: ClassVar[str] = "local"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM,)
    local: ClassVar[bool] = True
    honest: int = 1

    def _make(self, ask: Ask) -> tuple[Mechanism, ...]:
        _check_whole(ask, self.kind)
        check_honest(self.honest, ask.participation, ask.clients)
        base = ask.noise_multiplier
        if base is None:
            assert ask.epsilon is not None
            check_delta(ask.delta, (Gaussian(1.0),))
            base = calibrate(
                ask.epsilon,
                ask.delta,
                weights=ask.weights,
                participation=ask.participation.shown,
                relation=ask.relation,
            )
        cohort = ask.participation.rate * ask.clients
        return tuple(
            LocalGaussianSum(ask.clip, base / weight, cohort, self.honest) for weight in ask.weights
        )


@dataclass(frozen=True)
class PrintedLocal(Noise):
    """The noise that Wu et al. (DPFedMTL) print: a reproduction, NOT A GUARANTEE.

    Each client adds N(0, sigma^2 S^2), S = 2 C K/M, K of M clients expected in a round. Their sigma
    is `noise_multiplier`, or sqrt(2 log(1.25/delta))/epsilon of `epsilon`, which is all that the
    printed epsilon means. The report shows it beside the true epsilon (see docs/privacy.md).
    """

    kind: ClassVar[str] = "local_paper"
    shapes: ClassVar[tuple[Shape, ...]] = (Shape.SUM,)
    local: ClassVar[bool] = True

    def _make(self, ask: Ask) -> tuple[Mechanism, ...]:
        _check_whole(ask, self.kind)
        check_delta(ask.delta, (Gaussian(1.0),))
        if len(set(ask.weights)) > 1:
            raise ValueError(
                f"weights = {ask.weights[:3]}...: local_paper noise is the same in every round; "
                "spend evenly"
            )
        sigma = ask.noise_multiplier
        if sigma is None:
            assert ask.epsilon is not None
            sigma = printed_sigma(ask.epsilon, ask.delta)
        rate, rounds = ask.participation.rate, len(ask.weights)
        # Each round claims its share of the label, so that the claims add up to it.
        share = printed_epsilon(sigma, ask.delta) / rounds
        one = LocalGaussianSum(ask.clip, 2 * sigma * rate, rate * ask.clients, 1, share)
        return (one,) * rounds


def _check_whole(ask: Ask, kind: str) -> None:
    if ask.rows is not None:
        raise ValueError(f"{kind} noise is for whole clients, not for single rows: use gaussian")
