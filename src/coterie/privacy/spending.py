"""How a budget is spread over rounds: even, as a power of the round, or geometrically.

Liang et al., "Model-Protected Multi-Task Learning", section 3.5, with budgets eps_t per round. The
noise of a round is proportional to 1/eps_t, so eps_t is the round's weight in the sum of squared
mu; the ledger composes rounds of unequal noise exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

_LEAST = 1e-4


class Spending(ABC):
    """A shape of the budget over rounds."""

    kind: ClassVar[str] = ""

    @abstractmethod
    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return the rounds' shares, the largest of which is 1."""

    def weights(self, rounds: int) -> tuple[float, ...]:
        """Return the rounds' weights.

        Raises:
            ValueError: If a round would get nothing to speak of.
        """
        try:
            shares = self.shares(rounds)
        except OverflowError:
            shares = (0.0,)
        if not all(_LEAST <= share < float("inf") for share in shares):
            raise ValueError(
                f"{self} over {rounds} rounds gives a round less than {_LEAST:g} of the largest "
                "share: it would post noise and still be charged; choose a flatter shape, or "
                "fewer rounds"
            )
        return shares

    @classmethod
    def choices(cls) -> Mapping[str, type["Spending"]]:
        """Return the shapes by name."""
        kinds: tuple[type[Spending], ...] = (Even, Power, Geometric)
        return {kind.kind: kind for kind in kinds}


@dataclass(frozen=True)
class Even(Spending):
    """The same for every round."""

    kind: ClassVar[str] = "even"

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return ones."""
        return (1.0,) * rounds


@dataclass(frozen=True)
class Power(Spending):
    """eps_t proportional to t^alpha: 2/5 suits accelerated steps on convex losses."""

    kind: ClassVar[str] = "power"
    alpha: float = 0.4

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return t^alpha over the largest."""
        top = rounds if self.alpha > 0 else 1
        return tuple(float((t / top) ** self.alpha) for t in range(1, rounds + 1))


@dataclass(frozen=True)
class Geometric(Spending):
    """eps_t proportional to Q^-t: for strongly convex losses; Q below 1 spends more later.

    (1 - mu/L)^(2/5) suits plain steps, (1 - sqrt(mu/L))^(1/5) accelerated ones.
    """

    kind: ClassVar[str] = "geometric"
    Q: float = 0.97

    def __post_init__(self) -> None:
        if not 0 < self.Q < float("inf"):
            raise ValueError(f"Q = {self.Q}: expected a positive number, such as 0.97")

    def shares(self, rounds: int) -> tuple[float, ...]:
        """Return Q^-t over the largest."""
        top = rounds if self.Q < 1 else 1
        return tuple(float(self.Q ** (top - t)) for t in range(1, rounds + 1))
